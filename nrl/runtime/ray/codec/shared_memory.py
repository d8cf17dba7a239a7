"""Tensors that lie in memory that other processes read, too."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs

from nrl.errors import MutatedBatch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Shared", "noting", "opening"]


@attrs.frozen
class Shared:
    """Tensors in memory that other processes read."""

    tensors: "list[Tensor]"

    def check(self, who: str) -> None:
        """Raise if a function has written into one of them.

        Raises:
            MutatedBatch: it has.
        """
        if any(tensor._version for tensor in self.tensors):
            raise MutatedBatch(
                f"{who} wrote into its arguments, which lie in memory that other processes read; batches are values: "
                "use an out-of-place operation, or clone the column first"
            )


_OPENING = threading.local()


@contextmanager
def noting(held: Shared | None) -> Iterator[None]:
    """Note here the tensors that this thread opens in the block; None: they are taken out of the shared memory."""
    before, _OPENING.now = opening(), held
    try:
        yield
    finally:
        _OPENING.now = before


def opening() -> Shared | None:
    """Where to note the tensors that are being opened; None: they are to be copied."""
    found: Shared | None = getattr(_OPENING, "now", None)
    return found
