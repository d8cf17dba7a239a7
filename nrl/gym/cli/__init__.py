"""``nrl gym``: verifiers and environments, tried out."""
