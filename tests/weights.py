"""Weights as tests compare them: by name."""

from collections.abc import Mapping

import torch
from torch import Tensor

from nrl.backends import Params, TrainState
from nrl.backends.models.shards import full_shard
from nrl.backends.types import Bucket

__all__ = ["assert_close", "assert_equal", "bucket_of", "weights"]


def bucket_of(tensors: Mapping[str, Tensor]) -> Bucket:
    """Whole weights, as a sampler receives them."""
    return [full_shard(name, tensor) for name, tensor in tensors.items()]


def weights(of: TrainState | Params) -> dict[str, Tensor]:
    """Copies, which stay when the state is consumed."""
    params = of.params if isinstance(of, TrainState) else of
    return {name: x.clone() for name, x in params.tensors()}


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same names, and the same numbers to the last bit."""
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], x) for name, x in expected.items())


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], relative: float) -> None:
    """The same names, and numbers that differ by less than this part of the largest."""
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=relative, atol=relative * (1e-9 + float(x.abs().max())))
