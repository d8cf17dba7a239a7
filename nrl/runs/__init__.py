"""A run: its folder, its loops, its report.

`lifecycle` has the verbs: start, restore, steps, log, save. `exits` decides how a program ends, `retries` whether it
begins again by itself.
"""

from nrl.runs.lifecycle import Run, run

__all__ = ["Run", "run"]
