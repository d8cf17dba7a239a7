"""A run, from its folder over its loops to its report.

`lifecycle` has the verbs: start, restore, steps, log, save. `exits` says why a program stopped, `retries` when it
begins again by itself.
"""

from nrl.runs.lifecycle import Run, run

__all__ = ["Run", "run"]
