"""Tensors in memory that other processes read, too."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs

from nrl.errors import MutatedBatch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SharedTensors", "current_shared", "track_shared"]


@attrs.frozen
class SharedTensors:
    """Tensors in memory that other processes read."""

    tensors: "list[Tensor]"

    def check(self, caller: str) -> None:
        """Check that no function has written into these tensors.

        Raises:
            MutatedBatch: a function has.
        """
        if any(tensor._version for tensor in self.tensors):
            raise MutatedBatch(
                f"{caller} wrote into its arguments, which lie in memory that other processes read; batches are "
                "values: use an out-of-place operation, or clone the column first"
            )


_OPENING = threading.local()


@contextmanager
def track_shared(shared: SharedTensors | None) -> Iterator[None]:
    """Record the tensors that this thread opens in the block; None: copy them out of the shared memory instead."""
    before, _OPENING.now = current_shared(), shared
    try:
        yield
    finally:
        _OPENING.now = before


def current_shared() -> SharedTensors | None:
    """Return the record of the tensors that are being opened; None: they are to be copied."""
    shared: SharedTensors | None = getattr(_OPENING, "now", None)
    return shared
