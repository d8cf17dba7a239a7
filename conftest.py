"""What every test runs under: no network, one thread, the same examples each time."""

import os
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported, which reads it once

import hypothesis
import pytest
import torch

import nrl  # noqa: F401 - before pytest collects doctests, or it would import modules a second time under their names
from nrl.runtime.executables.registry import EXECUTABLES

torch.set_num_threads(1)  # small tensors: more threads cost more than they give, and sums keep one order

hypothesis.settings.register_profile("nrl", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile("nrl")


@pytest.fixture(autouse=True)
def executables() -> Iterator[None]:
    """What a test registers is forgotten after it."""
    before = dict(EXECUTABLES)
    yield
    EXECUTABLES.clear()
    EXECUTABLES.update(before)
