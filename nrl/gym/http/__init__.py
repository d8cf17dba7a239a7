"""Environments as servers: `nrl.serve` and `nrl.remote`, and what they say to each other."""
