"""Tests on fake CUDA tensors, which belong to a version of torch."""

import pytest
import torch

from nrl.ops.plan.fake_cuda import SLOTS

__all__ = ["faked"]

faked = pytest.mark.skipif(
    not torch.__version__.startswith(tuple(f"{tested}." for tested in SLOTS)),
    reason=f"fake CUDA tensors are tested with torch {', '.join(SLOTS)} alone",
)
"""Skips a test where torch is another one; ``nrl plan`` says so."""
