"""Memory of a GPU for tensors whose sizes vary, as those of packed rows do from one micro-batch to the next.

Torch's allocator keeps what was freed in segments of the sizes that it was first asked for, so that tensors of other
sizes find holes that are too small. Segments that can grow have no such holes. CUDA cannot lend them to every process
of a host: it hands out a descriptor, and for that the borrower would have to be allowed to trace the lender. So what is
lent lies in segments of a fixed size.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["use_expandable_segments", "use_fixed_segments"]

_GROW, _GROWS = "expandable_segments:True", re.compile(r"expandable_segments\s*:\s*True")
_CHOSEN = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def use_expandable_segments() -> None:
    """Let the segments of this process grow from now on, unless its environment configures the allocator."""
    if not any(os.environ.get(name) for name in _CHOSEN):
        torch._C._accelerator_setAllocatorSettings(_GROW)


@contextmanager
def use_fixed_segments() -> Iterator[None]:
    """Allocate memory in segments of fixed size inside of the block, so that it can be lent to other processes."""
    before: str = torch._C._accelerator_getAllocatorSettings()
    if not _GROWS.search(before):
        yield
        return
    torch._C._accelerator_setAllocatorSettings(_GROWS.sub("expandable_segments:False", before))
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(before)
