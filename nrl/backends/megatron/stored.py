"""State of the Megatron engine, its stages and their optimizer, by the names in a checkpoint.

Every piece is a view, so that reading fills what is there. Megatron's distributed optimizer gives each process a range
of the numbers of a parameter, one after the other; in the weight's own shape that is up to three blocks.
"""

from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor

from nrl.backends.megatron.groups import Groups
from nrl.backends.megatron.weights import own
from nrl.backends.training.saving.storage import KEYS, MODEL, MOMENTS
from nrl.backends.types import Piece

__all__ = ["fresh_moments", "of_model", "of_training", "ranges", "updated"]


class _Kept(NamedTuple):
    """What this process keeps of a parameter's training.

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


def of_model(pieces: Iterable[Piece], wanted: Callable[[str], bool]) -> Iterator[Piece]:
    """Pieces of weights whose names are wanted, by the names that they are stored by."""
    return (attrs.evolve(piece, name=MODEL + piece.name) for piece in pieces if wanted(piece.name))


def of_training(
    copies: Any, optimizer: Any, at: Groups, *, spoken: bool, wanted: Callable[[str], bool]
) -> Iterator[Piece]:
    """Weights whose names are wanted, and moments; if ``spoken``, those that no process before this one has."""
    find = _finder(optimizer, at)
    for parameter, piece, first in own([copy.module for copy in copies], at):
        if not wanted(piece.name):
            continue
        if not parameter.requires_grad:  # the base of an adapter, which no optimizer has
            if not spoken or (first and at.first_copy(parameter)):
                yield from of_model([piece], wanted)
            continue
        kept = find(parameter)
        if kept is not None and (not spoken or (first and kept.alone)):
            yield from _of_parameter(piece, parameter, kept, spoken)


def _of_parameter(piece: Piece, parameter: Tensor, kept: _Kept, spoken: bool) -> Iterator[Piece]:
    first = int(piece.tensor.storage_offset() - parameter.storage_offset())
    for index, begin, end in ranges(piece, first - kept.begin, kept.main.numel()):
        shape = [at.stop - at.start for at in index]

        def block(name: str, tensor: Tensor) -> Piece:
            return Piece(name, piece.shape, index, tensor.detach().view(-1)[begin:end].view(shape))  # noqa: B023

        yield block(MODEL + piece.name, kept.main)
        if kept.state:
            for key in KEYS[1:]:
                yield block(f"{MOMENTS}{piece.name}.{key}", kept.state[key])
            if not spoken or not any(at.start for at in index):  # who writes the beginning of a weight writes its step
                yield Piece(f"{MOMENTS}{piece.name}.step", (), (), kept.state["step"])


def ranges(piece: Piece, first: int, size: int) -> Iterator[tuple[tuple[slice, ...], int, int]]:
    """The blocks of a piece that some numbers, one after the other, are.

    Args:
        piece: whose own numbers lie one after the other.
        first: where its first number would be among the given ones; negative if they begin inside of it.
        size: how many numbers there are.

    Yields:
        The index of a block in the whole weight, and where its numbers begin and end among the given ones.

    >>> from nrl.backends.models.shards import transactional
    >>> list(ranges(transactional("w", torch.zeros(3, 4)), -2, 5))
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
            slice(whole.start + part.start, whole.start + part.stop)
            for whole, part in zip(piece.index, local, strict=True)
        )
        yield index, first + begin, first + stop
        begin = stop


def _finder(optimizer: Any, at: Groups) -> Callable[[Tensor], _Kept | None]:
    """What this process keeps of a parameter; None: nothing."""
    found = dict[int, _Kept]()
    for each in optimizer.chained_optimizers:
        if hasattr(each, "model_param_gbuf_map"):
            for parameter in each.model_param_group_index_map:
                alone = at.first_shards(parameter)
                state = each._get_main_param_and_optimizer_states(parameter)
                begin = each._get_model_param_range_map(parameter)["param"].start
                found[id(parameter)] = _Kept(state.pop("param"), state, begin, alone)
        else:
            for group in each.param_groups:
                for main in group["params"]:
                    found[id(main)] = _Kept(main, each.optimizer.state.get(main, {}), 0, at.first_copy(main))
    return lambda parameter: found.get(id(getattr(parameter, "main_param", parameter))) or found.get(id(parameter))


def _with_parameters(optimizer: Any) -> list[Any]:
    """The optimizers that have any: in a stage without an adapter there may be none."""
    return [each for each in optimizer.chained_optimizers if not each.is_stub_optimizer]


def fresh_moments(optimizer: Any) -> None:
    """Moments of zeros for all that this process keeps."""
    for each in _with_parameters(optimizer):
        each.init_state_fn(each.optimizer, each.config)
        for state in each.optimizer.state.values():
            state.setdefault("step", torch.zeros(()))


def updated(copies: Any, optimizer: Any) -> None:
    """Let the model have what has been read into its optimizer; a collective."""
    for each in _with_parameters(optimizer):
        if hasattr(each, "_copy_main_params_to_model_params"):
            each._copy_main_params_to_model_params()
    for copy in copies:
        if copy.ddp_config.use_distributed_optimizer:
            copy.start_param_sync(force_sync=True)
