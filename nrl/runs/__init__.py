"""A run: its folder, its loops and what it logs, saves and reports; and how a program that holds one ends."""

from nrl.runs.lifecycle import Run, run

__all__ = ["Run", "run"]
