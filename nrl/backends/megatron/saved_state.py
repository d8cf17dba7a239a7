"""State of the Megatron engine, its stages and their optimizer, by the names in a checkpoint.

Every piece is a view, so that reading fills what is there. Megatron's distributed optimizer gives each process a range
of the numbers of a parameter, one after the other; in the weight's own shape that is up to three blocks.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor

from nrl.backends.megatron.groups import Groups
from nrl.backends.megatron.weight_views import local_shards
from nrl.backends.models import lora
from nrl.backends.training.saving.storage import KEYS, MODEL, MOMENTS
from nrl.backends.types import Piece

__all__ = ["OptimizerReceiver", "fresh_moments", "iter_training_state", "name_weights", "ranges", "update_model"]


class _ParameterState(NamedTuple):
    """This process's part of a parameter's training state.

    Args:
        main: its numbers in the precision in which they are updated.
        state: AdamW's, of ``main``; empty before the first step.
        begin: where ``main`` begins among the numbers of the parameter.
        alone: whether no other copy of the model keeps the same.
    """

    main: Tensor
    state: dict[str, Tensor]
    begin: int
    alone: bool


def name_weights(pieces: Iterable[Piece], is_wanted: Callable[[str], bool]) -> Iterator[Piece]:
    """Yield wanted pieces of weights, by the names in a checkpoint."""
    return (attrs.evolve(piece, name=MODEL + piece.name) for piece in pieces if is_wanted(piece.name))


def iter_training_state(
    copies: Any, optimizer: Any, groups: Groups, *, owned: bool, is_wanted: Callable[[str], bool]
) -> Iterator[Piece]:
    """Yield wanted weights, and moments; if ``owned``, only the pieces that no earlier process has."""
    find = _make_finder(optimizer, groups)
    for parameter, piece, first in local_shards([copy.module for copy in copies], groups):
        if not is_wanted(piece.name):
            continue
        if not parameter.requires_grad:  # the base of an adapter, which no optimizer has
            if not owned or (first and groups.first_copy(parameter)):
                yield from name_weights([piece], is_wanted)
            continue
        state = find(parameter)
        if state is not None and (not owned or (first and state.alone)):
            yield from _iter_parameter_state(piece, parameter, state, owned)


def _iter_parameter_state(piece: Piece, parameter: Tensor, state: _ParameterState, owned: bool) -> Iterator[Piece]:
    first = int(piece.tensor.storage_offset() - parameter.storage_offset())
    for index, begin, end in ranges(piece, first - state.begin, state.main.numel()):
        shape = [dim.stop - dim.start for dim in index]

        def block(name: str, tensor: Tensor) -> Piece:
            return Piece(name, piece.shape, index, tensor.detach().view(-1)[begin:end].view(shape))  # noqa: B023

        yield block(MODEL + piece.name, state.main)
        if state.state:
            for key in KEYS[1:]:
                yield block(f"{MOMENTS}{piece.name}.{key}", state.state[key])
            # The process that writes the beginning of a weight writes its step.
            if not owned or not any(dim.start for dim in index):
                yield Piece(f"{MOMENTS}{piece.name}.step", (), (), state.state["step"])


def ranges(piece: Piece, first: int, size: int) -> Iterator[tuple[tuple[slice, ...], int, int]]:
    """Yield the blocks of a piece that a run of consecutive numbers covers.

    Args:
        piece: whose own numbers lie one after the other.
        first: where its first number would be among the given ones; negative if they begin inside of it.
        size: how many numbers there are.

    Yields:
        The index of a block in the whole weight, and where its numbers begin and end among the given ones.

    >>> from nrl.backends.models.shards import full_shard
    >>> list(ranges(full_shard("w", torch.zeros(3, 4)), -2, 5))
    [((slice(0, 1, None), slice(2, 4, None)), 0, 2), ((slice(1, 2, None), slice(0, 3, None)), 2, 5)]
    """
    shape = tuple(piece.tensor.shape)
    width = shape[1] if len(shape) > 1 else 1
    begin, end = max(0, -first), min(prod(shape), size - first)
    while begin < end:
        row, column = divmod(begin, width)
        stop = end // width * width if column == 0 and end - begin >= width else min(end, (row + 1) * width)
        rows, columns = slice(row, row + -(-(stop - begin) // width)), slice(column, column + min(width, stop - begin))
        local = (rows, columns)[: len(shape)]
        index = tuple(
            slice(outer.start + part.start, outer.start + part.stop)
            for outer, part in zip(piece.index, local, strict=True)
        )
        yield index, first + begin, first + stop
        begin = stop


def _make_finder(optimizer: Any, groups: Groups) -> Callable[[Tensor], _ParameterState | None]:
    """Return a function from a parameter to this process's part of its training state; None: there is no part."""
    states = dict[int, _ParameterState]()
    for part in optimizer.chained_optimizers:
        if hasattr(part, "model_param_gbuf_map"):
            for parameter in part.model_param_group_index_map:
                alone = groups.first_shards(parameter)
                state = part._get_main_param_and_optimizer_states(parameter)
                begin = part._get_model_param_range_map(parameter)["param"].start
                states[id(parameter)] = _ParameterState(state.pop("param"), state, begin, alone)
        else:
            for group in part.param_groups:
                for main in group["params"]:
                    states[id(main)] = _ParameterState(
                        main, part.optimizer.state.get(main, {}), 0, groups.first_copy(main)
                    )
    return lambda parameter: states.get(id(getattr(parameter, "main_param", parameter))) or states.get(id(parameter))


def _with_parameters(optimizer: Any) -> list[Any]:
    """Return the optimizers that have parameters; a stage without an adapter may have none."""
    return [part for part in optimizer.chained_optimizers if not part.is_stub_optimizer]


def fresh_moments(optimizer: Any) -> None:
    """Make moments of zeros for all parameters that this process keeps."""
    for part in _with_parameters(optimizer):
        part.init_state_fn(part.optimizer, part.config)
        for state in part.optimizer.state.values():
            state.setdefault("step", torch.zeros(()))


def update_model(copies: Any, optimizer: Any) -> None:
    """Copy weights from the optimizer to the model after a read; a collective."""
    for part in _with_parameters(optimizer):
        if hasattr(part, "_copy_main_params_to_model_params"):
            part._copy_main_params_to_model_params()
    for copy in copies:
        if copy.ddp_config.use_distributed_optimizer:
            copy.start_param_sync(force_sync=True)


class OptimizerReceiver:
    """A receiver of weights that passes them on to the optimizer."""

    def __init__(self, receiving: lora.LoraReceiver, optimizer: Any) -> None:
        self._receiving, self._optimizer = receiving, optimizer

    def add(self, bucket: Sequence[Piece]) -> None:
        """Copy some pieces into the stages."""
        self._receiving.add(bucket)

    def end(self) -> None:
        """Check that all weights have come."""
        self._receiving.end()
        self._optimizer.reload_model_params()
