"""The half of training that runs in each process: the calls that the driver makes around an engine."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from nrl.algos import Loss, output_shape
from nrl.backends.base import Bucket, outputs_of, top_k_of
from nrl.backends.engines import TrainEngine
from nrl.batch import Batch
from nrl.reduce import Metrics
from nrl.runtime.transfer import Tensors, sent

__all__ = ["forward", "init", "next_bucket", "train", "with_params"]

type _Engine = TrainEngine[Any, Any]
type _Split = Callable[[Batch], Sequence[Batch]]

_BUCKET = 256 * 2**20
"""Bytes of weights that travel at once, unless one tensor alone is larger."""


def with_params(name: str, frozen: bool, engine: _Engine, value: Any, *args: Any) -> Any:
    """Call a method of the engine that takes params first: frozen ones, or those of a train state."""
    return getattr(engine, name)(value if frozen else engine.params(value), *args)


def init(engine: _Engine, *buckets: Bucket) -> Any:
    """A fresh train state."""
    return engine.init((pair for bucket in buckets for pair in bucket.items()) if buckets else None)


def next_bucket(send: Callable[[Tensors], Any], reading: Iterator[tuple[str, Tensor]]) -> tuple[Any, bool]:
    """Some more weights, sent, and whether there may be others. All processes go along, and end together."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in reading:
        bucket[name] = tensor
        size += tensor.numel() * tensor.element_size()
        if size >= _BUCKET:
            return sent(send, bucket), True
    return sent(send, bucket), False


def forward(
    split: _Split,
    needs: frozenset[str],
    frozen: bool,
    engine: _Engine,
    value: Any,
    *shards: Batch,
) -> tuple[Tensor | list[Tensor], ...]:
    """The outputs of each shard, by `outputs_of`: a list, or, as other processes may be given it, the one shard's."""
    found, parts = [], list[Any]()

    def read(shard: Batch) -> Iterator[Batch]:
        parts.append(split(shard))
        yield from parts[-1]

    for shard in shards:
        outs = with_params("forward", frozen, engine, value, read(shard), needs)
        wide = [out.apply(partial(_widen, out.ndim, shard["input_ids"].shape[-1])) for out in outs]
        found.append(parts[-1].restore(wide) if wide else _nothing(shard, needs))
    each = [[out[name] for out in found] for name in outputs_of(needs)]
    return tuple(some[0] if len(some) == 1 else some for some in each)


def _nothing(shard: Batch, needs: frozenset[str]) -> TensorDict:
    """The outputs for no rows."""
    k = top_k_of(needs)
    found = {name: torch.zeros(output_shape(name, shard)) for name in outputs_of(needs)}
    if k is not None:
        likely = torch.zeros(*shard["input_ids"].shape, k)
        found |= {"top_k_ids": likely.long(), "top_k_logprobs": likely}
    return TensorDict(found, batch_size=shard.batch_size)


def _widen(dim: int, width: int, x: Tensor) -> Tensor:
    """Per token as wide as the batch; what is per row stays as it is."""
    missing = 0 if x.ndim == dim else width - x.shape[dim]
    return torch.nn.functional.pad(x, (0, 0) * (x.ndim - dim - 1) + (0, missing)) if missing else x


def train(
    loss: Loss, split: _Split, engine: _Engine, state: Any, weights: dict[str, float], *shards: Batch
) -> tuple[Any, Metrics]:
    """One optimizer step, on shards."""
    return engine.train(state, loss, (part for shard in shards for part in split(shard)), weights)
