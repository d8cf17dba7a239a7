"""A run: its folder, its loops, its report.

`run` has the verbs: start, restore, steps, log, save. `exit_codes` decides how a program ends, `retries` whether it
begins again by itself.
"""

from typing import TYPE_CHECKING

from nrl._lazy import on_demand

if TYPE_CHECKING:
    from nrl.run.run import Run, run
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = ["Run", "run"]
