"""Runs: their folder, loops, logs, checkpoints and report, and the end of a program."""

from nrl.runs.lifecycle import Run, run

__all__ = ["Run", "run"]
