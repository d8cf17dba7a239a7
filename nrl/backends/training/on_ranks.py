"""The half of training that runs in each process: the calls that the driver makes around an engine."""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from nrl.algos import Loss, output_shape
from nrl.backends.base import outputs_of, top_k_of
from nrl.backends.engines import TrainEngine
from nrl.backends.training.reading import Reading
from nrl.batch import Batch
from nrl.files import Saved
from nrl.reduce import Metrics

__all__ = [
    "Find",
    "adapter_of",
    "as_it_is",
    "forward",
    "of_state",
    "outputs_like",
    "read",
    "save",
    "train",
    "with_params",
]

type _Engine = TrainEngine[Any, Any]
type _Split = Callable[[Batch], Sequence[Batch]]
type Find = Callable[[_Engine, Any], Any]
"""How a process finds params in the value that it holds."""


def as_it_is(engine: _Engine, value: Any) -> Any:
    """Frozen params: the value itself."""
    return value


def of_state(engine: _Engine, value: Any) -> Any:
    """The params of a train state."""
    return engine.params(value)


def adapter_of(find: Find, engine: _Engine, value: Any) -> Any:
    """The adapter alone of some params."""
    return engine.adapter(find(engine, value))


def with_params(name: str, find: Find, engine: _Engine, value: Any, *args: Any) -> Any:
    """Call a method of the engine that takes params first."""
    return getattr(engine, name)(find(engine, value), *args)


def read(find: Find, engine: _Engine, value: Any) -> Reading:
    """Begin to read the pieces of some params."""
    return Reading(engine.pieces(find(engine, value)))


def save(find: Find, engine: _Engine, state: Any, folder: Path) -> Saved:
    """Write a train state, and of its params these."""
    return engine.save(state, find(engine, state), folder)


def forward(
    split: _Split,
    needs: frozenset[str],
    find: Find,
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
        outs = with_params("forward", find, engine, value, read(shard), needs)
        wide = [out.apply(partial(_widen, out.ndim, shard["input_ids"].shape[-1])) for out in outs]
        found.append(parts[-1].restore(wide) if wide else _nothing(shard, needs))
    each = [[out[name] for out in found] for name in outputs_of(needs)]
    return tuple(some[0] if len(some) == 1 else some for some in each)


def outputs_like(batch: Batch, needs: Collection[str]) -> dict[str, Tensor]:
    """For each output that needs stand for, a tensor of its shape and dtype that takes no memory."""
    found = {}
    for name in outputs_of(needs):
        k = max(0, top_k_of(needs) or 0)
        shape = output_shape(name, batch) + ((k,) if name in ("top_k_ids", "top_k_logprobs") else ())
        found[name] = torch.zeros((), dtype=torch.int64 if name == "top_k_ids" else torch.float32).expand(shape)
    return found


def _nothing(shard: Batch, needs: frozenset[str]) -> TensorDict:
    """The outputs for no rows."""
    found = {name: like.contiguous() for name, like in outputs_like(shard, needs).items()}
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
