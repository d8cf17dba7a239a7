"""The half of training that runs in each process: the calls that the driver makes around an engine."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from nrl.algos import Loss, name_of, output_shape
from nrl.backends.engine import TrainEngine
from nrl.backends.models.shards import rounded
from nrl.backends.training.collectives import pickled
from nrl.backends.training.determinism import refusing
from nrl.backends.training.device_metrics import measuring
from nrl.backends.training.saving.save_plan import ToSave
from nrl.backends.training.weight_stream import Reading
from nrl.backends.types import outputs_of, top_k_of
from nrl.batch import Batch
from nrl.batch.metrics import Metrics
from nrl.errors import ModelError
from nrl.files import Folder, Saved
from nrl.runtime.mesh.current_process import process
from nrl.runtime.threads import DaemonThreadPool

__all__ = [
    "Find",
    "adapter_of",
    "as_it_is",
    "begin_writing",
    "forward",
    "of_state",
    "outputs_like",
    "read",
    "to_save",
    "train",
    "with_params",
    "write",
    "written",
]

type _Engine = TrainEngine[Any, Any]
type _Split = Callable[[Batch], Sequence[Batch]]
type _Writing = Future[Saved]
type Find = Callable[[_Engine, Any], Any]
"""How a process finds params in the value that it holds."""

_WRITERS = DaemonThreadPool(1, "saving")


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


def read(find: Find, dtype: torch.dtype | None, engine: _Engine, value: Any) -> Reading:
    """Begin to read the pieces of some params, matrices rounded to a dtype."""
    pieces = engine.pieces(find(engine, value))
    return Reading(pieces if dtype is None else (rounded(piece, dtype) for piece in pieces))


def to_save(find: Find, trained: bool, engine: _Engine, value: Any) -> ToSave:
    """What there is to write of params, or of a train state and of its params these."""
    params = find(engine, value)
    return engine.save(value, params) if trained else engine.save_params(params)


def write(find: Find, trained: bool, engine: _Engine, value: Any, folder: Folder) -> Saved:
    """Write it."""
    return to_save(find, trained, engine, value).write(folder)


def begin_writing(find: Find, trained: bool, engine: _Engine, value: Any, folder: Folder) -> tuple[_Writing, None]:
    """Copy it, and write the copy beside all that follows."""
    return _WRITERS.submit(to_save(find, trained, engine, value).copied().write, folder), None


def written(writing: _Writing) -> Saved | bytes | None:
    """What has been written, or the error of the writer for `pickle.loads`; None: it is not done."""
    if not writing.done():
        return None
    error = writing.exception()
    return pickled(error, "save", process().rank) if isinstance(error, Exception) else writing.result()


def forward(
    split: _Split,
    needs: frozenset[str],
    widths: Mapping[str, int],
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
        with refusing("forward"):
            outs = with_params("forward", find, engine, value, read(shard), needs)
        for out in outs:
            _check_widths(out, widths)
        wide = [out.apply(partial(_widen, out.ndim, shard["input_ids"].shape[-1])) for out in outs]
        found.append(parts[-1].restore(wide) if wide else _nothing(shard, needs, widths))
    each = [[out[name] for out in found] for name in outputs_of(needs)]
    return tuple(some[0] if len(some) == 1 else some for some in each)


def _check_widths(out: TensorDict, widths: Mapping[str, int]) -> None:
    """Check that large outputs are as wide as those of the trainer's own model, which other params may not be.

    Raises:
        ModelError: one is not.
    """
    for name, width in widths.items():
        if name in out.keys() and (found := out[name].shape[-1]) != width:
            raise ModelError(
                f"forward: {name} of these params have {found} numbers a token, and those of the trainer's own model "
                f"{width}; make a trainer of the model that the params are of"
            )


def outputs_like(batch: Batch, needs: Collection[str], widths: Mapping[str, int]) -> dict[str, Tensor]:
    """For each output that needs stand for, a tensor of its shape and dtype that takes no memory."""
    found = {}
    for name in outputs_of(needs):
        k = max(0, top_k_of(needs) or 0)
        shape = output_shape(name, batch, widths) + ((k,) if name in ("top_k_ids", "top_k_logprobs") else ())
        found[name] = torch.zeros((), dtype=torch.int64 if name == "top_k_ids" else torch.float32).expand(shape)
    return found


def _nothing(shard: Batch, needs: frozenset[str], widths: Mapping[str, int]) -> TensorDict:
    """The outputs for no rows."""
    found = {name: like.contiguous() for name, like in outputs_like(shard, needs, widths).items()}
    return TensorDict(found, batch_size=shard.batch_size)


def _widen(dim: int, width: int, x: Tensor) -> Tensor:
    """Per token as wide as the batch; what is per row stays as it is."""
    missing = 0 if x.ndim == dim else width - x.shape[dim]
    return torch.nn.functional.pad(x, (0, 0) * (x.ndim - dim - 1) + (0, missing)) if missing else x


def train(
    loss: Loss, split: _Split, engine: _Engine, state: Any, weights: dict[str, float], *shards: Batch
) -> tuple[Any, Metrics]:
    """One optimizer step, on shards; the first process tells the metrics, and each what it took of its device."""
    ended = measuring()
    with refusing(f"train_step({name_of(loss)})"):
        state, found = engine.train(state, loss, (part for shard in shards for part in split(shard)), weights)
    return state, ended(found)
