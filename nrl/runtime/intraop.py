"""The number of threads of one torch operation: a single one where all models of a process are small.

The threads of an operation wait for each other by spinning. If other processes keep the cores busy, a thread that has
no core keeps its siblings spinning, in each of the thousands of operations of a step. A small model pays that, and a
second thread gives it next to nothing: `benchmarks/busy.py` measures both.
"""

import os

import attrs
import torch
from torch import nn

from nrl.runtime.node.cgroups import allowed_cores, usable_cores

__all__ = ["SMALL", "fit_threads", "set_threads"]

SMALL = 1_000_000
"""The parameters of the largest model that one thread computes; `python benchmarks/busy.py --sizes` measured it."""

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@attrs.define
class _Intraop:
    """The threads of this process."""

    usual: int = 0  # threads without a small model; 0: not known yet
    current: int = 0  # The number that torch has now.
    chosen: bool = False  # the user or the program has chosen a number
    largest: int = 0  # parameters of the largest model


_HERE = _Intraop()


def set_threads(threads: int | None, share: int = 1) -> None:
    """Set the number of threads of this process, which `fit_threads` leaves alone if ``threads`` is given.

    Args:
        threads: the number that the user has chosen; None: the cores of the node divided by ``share``.
        share: how many processes share the cores of the node.
    """
    _HERE.chosen = threads is not None
    _HERE.usual = _HERE.current = threads or max(1, usable_cores() // share)
    torch.set_num_threads(_HERE.current)


def fit_threads(module: nn.Module, device: torch.device) -> None:
    """Compute with one thread as long as all models of this process are small; with the usual number from then on.

    It changes nothing where the user has set ``OMP_NUM_THREADS`` or ``MKL_NUM_THREADS``, or where the program has
    called `torch.set_num_threads` with another number than torch's own, or at any time after the first model was made.

    Args:
        module: a model that this process computes from now on.
        device: where it is; the threads of a process do not matter to a GPU.
    """
    threads = torch.get_num_threads()
    if not _HERE.usual:
        _HERE.usual = _HERE.current = threads
        # torch takes a thread for each core, or half as many where each core runs two threads.
        _HERE.chosen = any(map(os.environ.get, _VARIABLES)) or threads not in (allowed_cores(), allowed_cores() // 2)
    if _HERE.chosen or threads != _HERE.current or device.type != "cpu":
        return
    _HERE.largest = max(_HERE.largest, sum(parameter.numel() for parameter in module.parameters()))
    _HERE.current = 1 if _HERE.largest <= SMALL else _HERE.usual
    torch.set_num_threads(_HERE.current)
