"""Verifiers and environments by subject: mathematics, code, constraints, games, search."""
