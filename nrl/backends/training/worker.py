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
from nrl.backends.models.shards import cast_matrix
from nrl.backends.training.collectives import pickle_error
from nrl.backends.training.determinism import explain_refusals
from nrl.backends.training.device_metrics import begin_measuring
from nrl.backends.training.saving.save_plan import SavePlan
from nrl.backends.training.weight_stream import WeightStream
from nrl.backends.types import outputs_of, top_k_of
from nrl.batch import Batch
from nrl.batch.metrics import Metrics
from nrl.errors import ModelError
from nrl.files import Folder, Saved
from nrl.runtime.mesh.current_process import process
from nrl.runtime.threads import DaemonThreadPool

__all__ = [
    "Find",
    "begin_writing",
    "find_adapter",
    "find_frozen",
    "find_in_state",
    "forward",
    "open_weight_stream",
    "outputs_like",
    "plan_save",
    "poll_writing",
    "train",
    "with_params",
    "write",
]

type _Engine = TrainEngine[Any, Any]
type _Split = Callable[[Batch], Sequence[Batch]]
type _Writing = Future[Saved]
type Find = Callable[[_Engine, Any], Any]
"""A function that finds params in the value that a process holds."""

_WRITERS = DaemonThreadPool(1, "saving")


def find_frozen(engine: _Engine, value: Any) -> Any:
    """Return frozen params: the value itself."""
    return value


def find_in_state(engine: _Engine, value: Any) -> Any:
    """Return the params of a train state."""
    return engine.params(value)


def find_adapter(find: Find, engine: _Engine, value: Any) -> Any:
    """Return the adapter alone of params."""
    return engine.adapter(find(engine, value))


def with_params(name: str, find: Find, engine: _Engine, value: Any, *args: Any) -> Any:
    """Call a method of the engine that takes params first."""
    return getattr(engine, name)(find(engine, value), *args)


def open_weight_stream(find: Find, dtype: torch.dtype | None, engine: _Engine, value: Any) -> WeightStream:
    """Begin to read the pieces of params, with matrices cast to a dtype."""
    pieces = engine.pieces(find(engine, value))
    return WeightStream(pieces if dtype is None else (cast_matrix(piece, dtype) for piece in pieces))


def plan_save(find: Find, trained: bool, engine: _Engine, value: Any) -> SavePlan:
    """Plan to save params, or a train state with these of its params."""
    params = find(engine, value)
    return engine.save(value, params) if trained else engine.save_params(params)


def write(find: Find, trained: bool, engine: _Engine, value: Any, folder: Folder) -> Saved:
    """Write params, or a train state, into a folder."""
    return plan_save(find, trained, engine, value).write(folder)


def begin_writing(find: Find, trained: bool, engine: _Engine, value: Any, folder: Folder) -> tuple[_Writing, None]:
    """Copy params, or a train state, and write the copy beside all that follows."""
    return _WRITERS.submit(plan_save(find, trained, engine, value).copy_to_host().write, folder), None


def poll_writing(writing: _Writing) -> Saved | bytes | None:
    """Return the written files, or the error of the writer for `pickle.loads`; None: the writer is not done."""
    if not writing.done():
        return None
    error = writing.exception()
    return pickle_error(error, "save", process().rank) if isinstance(error, Exception) else writing.result()


def forward(
    split: _Split,
    needs: frozenset[str],
    widths: Mapping[str, int],
    find: Find,
    engine: _Engine,
    value: Any,
    *shards: Batch,
) -> tuple[Tensor | list[Tensor], ...]:
    """Compute the outputs of each shard, in the order of `outputs_of`: a list, or the output of a single shard."""
    results, parts = [], list[Any]()

    def split_and_yield(shard: Batch) -> Iterator[Batch]:
        parts.append(split(shard))
        yield from parts[-1]

    for shard in shards:
        with explain_refusals("forward"):
            outs = with_params("forward", find, engine, value, split_and_yield(shard), needs)
        for out in outs:
            _check_widths(out, widths)
        wide = [out.apply(partial(_widen, out.ndim, shard["input_ids"].shape[-1])) for out in outs]
        results.append(parts[-1].restore(wide) if wide else _nothing(shard, needs, widths))
    outputs = [[out[name] for out in results] for name in outputs_of(needs)]
    return tuple(values[0] if len(values) == 1 else values for values in outputs)


def _check_widths(out: TensorDict, widths: Mapping[str, int]) -> None:
    """Check that large outputs are as wide as those of the trainer's own model, which other params may not be.

    Raises:
        ModelError: one is not.
    """
    for name, width in widths.items():
        if name in out.keys() and (actual := out[name].shape[-1]) != width:
            raise ModelError(
                f"forward: {name} of these params have {actual} numbers a token, and those of the trainer's own model "
                f"{width}; make a trainer of the model that the params are of"
            )


def outputs_like(batch: Batch, needs: Collection[str], widths: Mapping[str, int]) -> dict[str, Tensor]:
    """Return a tensor of the shape and dtype of each output of ``needs`` that takes no memory."""
    outputs = {}
    for name in outputs_of(needs):
        k = max(0, top_k_of(needs) or 0)
        shape = output_shape(name, batch, widths) + ((k,) if name in ("top_k_ids", "top_k_logprobs") else ())
        outputs[name] = torch.zeros((), dtype=torch.int64 if name == "top_k_ids" else torch.float32).expand(shape)
    return outputs


def _nothing(shard: Batch, needs: frozenset[str], widths: Mapping[str, int]) -> TensorDict:
    """Return the outputs of no rows."""
    outputs = {name: like.contiguous() for name, like in outputs_like(shard, needs, widths).items()}
    return TensorDict(outputs, batch_size=shard.batch_size)


def _widen(dim: int, width: int, x: Tensor) -> Tensor:
    """Pad an output per token to the width of the batch; an output per row stays as it is."""
    missing = 0 if x.ndim == dim else width - x.shape[dim]
    return torch.nn.functional.pad(x, (0, 0) * (x.ndim - dim - 1) + (0, missing)) if missing else x


def train(
    loss: Loss, split: _Split, engine: _Engine, state: Any, weights: dict[str, float], *shards: Batch
) -> tuple[Any, Metrics]:
    """Take one optimizer step on shards; the first process reports its metrics, and each those of its device."""
    finish = begin_measuring()
    with explain_refusals(f"train_step({name_of(loss)})"):
        state, metrics = engine.train(state, loss, (part for shard in shards for part in split(shard)), weights)
    return state, finish(metrics)
