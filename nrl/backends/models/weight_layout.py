"""The weights of files as blocks of a model's weights.

transformers keeps some weights in another form than files have, such as the experts of a layer in one tensor. Files
have a weight for each expert, and so have engines that read files. Pieces travel under the names that files have, so a
piece of a model's weight is cut into pieces of theirs. A block is a view: cutting and filling copy nothing.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import attrs
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nrl.backends.models.named_weights import weights
from nrl.backends.models.shards import are_disjoint, empty_shard, overlap
from nrl.backends.types import Piece

__all__ = ["FilePart", "Parts", "find_parts", "map_to_files", "split_for_files"]


class FilePart(NamedTuple):
    """A weight of files, as a block of a model's weight.

    Args:
        name: in files.
        shape: in files.
        block: where it is in the model's weight.
        dims: for each dimension of the shape, that of the model's weight. In the others the block has length 1.
    """

    name: str
    shape: tuple[int, ...]
    block: tuple[slice, ...]
    dims: tuple[int, ...]


type Parts = Mapping[str, Sequence[FilePart]]
"""The weights of files that each weight of a model consists of, by the model's name."""

_FOUND: WeakKeyDictionary[nn.Module, Parts] = WeakKeyDictionary()


def find_parts(module: nn.Module) -> Parts:
    """Find the weights of files that each weight of a model consists of; weights of adapters are left out.

    transformers converts weights without memory to the form of files. A result that is a view of a weight is a block
    of it. If any is no view, because files join weights of the model, all weights are taken unchanged.

    Args:
        module: a transformers model, with an adapter or without; not sharded.

    >>> config = {"model_type": "qwen3_moe", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> config |= {"num_experts": 2, "moe_intermediate_size": 4, "vocab_size": 3, "head_dim": 4}
    >>> from nrl.backends.models import loading
    >>> from nrl.backends import Model
    >>> found = find_parts(loading.build(Model(config)))["model.layers.0.mlp.experts.gate_up_proj"]  # [2, 8, 8]
    >>> found[1].name, found[1].block
    ('model.layers.0.mlp.experts.1.gate_proj.weight', (slice(1, 2, None), slice(0, 4, None), slice(0, 8, None)))
    """
    if module not in _FOUND:
        shapes = {name: x.shape for name, x in weights(module).items() if ".lora_" not in name}
        _FOUND[module] = _find_parts_by_views(module, shapes) or {
            name: [_full_part(name, shape)] for name, shape in shapes.items()
        }
    return _FOUND[module]


def split_for_files(pieces: Iterable[Piece], parts: Parts) -> Iterator[Piece]:
    """Cut pieces of a model's weights into pieces of the weights of files; pieces may be empty.

    >>> rows = [
    ...     FilePart("up", (1, 2), (slice(0, 1), slice(0, 2)), (0, 1)),
    ...     FilePart("down", (2,), (slice(1, 2), slice(0, 2)), (1,)),
    ... ]
    >>> fused = Piece("fused", (2, 2), (slice(0, 2), slice(0, 2)), torch.tensor([[1, 2], [3, 4]]))
    >>> [(piece.name, piece.tensor.tolist()) for piece in split_for_files([fused], {"fused": rows})]
    [('up', [[1, 2]]), ('down', [3, 4])]
    """
    for piece in pieces:
        yield from (_split_piece(piece, part) for part in parts[piece.name]) if piece.name in parts else [piece]


def _split_piece(piece: Piece, part: FilePart) -> Piece:
    if part == _full_part(part.name, piece.shape):
        return attrs.evolve(piece, name=part.name)
    overlapping = overlap(piece, Piece(piece.name, piece.shape, part.block, piece.tensor))
    if overlapping is None:
        return empty_shard(Piece(part.name, part.shape, tuple(slice(0, 0) for _ in part.shape), piece.tensor))
    in_piece, in_block = overlapping
    return Piece(
        part.name, part.shape, tuple(in_block[dim] for dim in part.dims), _permute_block(piece.tensor[in_piece], part)
    )


def _permute_block(block: Tensor, part: FilePart) -> Tensor:
    """Return a block in the form of files."""
    dropped = [dim for dim in range(block.ndim) if dim not in part.dims]
    view = block.permute(*part.dims, *dropped)
    for _ in dropped:
        view = view[..., 0]
    return view


def map_to_files(pieces: Mapping[str, Piece], parts: Parts) -> dict[str, Piece]:
    """Return pieces of a model by the names of files; a weight that has two names stays one piece."""
    by_block: dict[Any, Piece] = {}
    return {
        part.name: by_block.setdefault((id(piece), part.block, part.dims), _split_piece(piece, part))
        for name, piece in pieces.items()
        for part in parts.get(name) or [_full_part(name, piece.shape)]
    }


def _full_part(name: str, shape: Sequence[int]) -> FilePart:
    return FilePart(name, tuple(shape), tuple(slice(0, size) for size in shape), tuple(range(len(shape))))


class _Views(TorchFunctionMode):
    """A mode in which `Tensor.contiguous` copies nothing."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if function is Tensor.contiguous else function(*args, **(kwargs or {}))


def _find_parts_by_views(module: nn.Module, shapes: Mapping[str, Sequence[int]]) -> Parts | None:
    from transformers.core_model_loading import revert_weight_conversion

    tensors = {name: torch.empty(tuple(shape), device="meta") for name, shape in shapes.items()}
    with _Views():
        views: dict[str, Tensor] = revert_weight_conversion(module, dict(tensors))  # type: ignore[arg-type]
    names = {_storage(tensor): name for name, tensor in tensors.items()}
    parts: dict[str, list[FilePart]] = {name: [] for name in tensors}
    for name, view in views.items():
        source = names.get(_storage(view))
        part = None if source is None else _match_view(name, tensors[source], view)
        if source is None or part is None:
            return None
        parts[source].append(part)
    return parts if all(_cover_exactly(tensors[name], parts[name]) for name in tensors) else None


def _cover_exactly(tensor: Tensor, blocks: Sequence[FilePart]) -> bool:
    once = len(blocks) < 2 or are_disjoint([part.block for part in blocks])
    return once and sum(prod(part.shape) for part in blocks) == tensor.numel()


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _match_view(name: str, tensor: Tensor, view: Tensor) -> FilePart | None:
    """Return the block that a view of a tensor is; None: it is no block."""
    strides, offset, starts = dict(enumerate(tensor.stride())), int(view.storage_offset()), list[int]()
    for stride in tensor.stride():
        start, offset = divmod(offset, max(int(stride), 1))
        starts.append(start)
    dims = [-1] * view.ndim
    # Dimensions of length 1 come last: they match any.
    for axis in sorted(range(view.ndim), key=lambda at: view.shape[at] == 1):
        size, stride = view.shape[axis], view.stride()[axis]
        fits = [
            dim for dim, own_stride in strides.items() if size == 1 or (own_stride == stride and tensor.shape[dim] > 1)
        ]
        if not fits:
            return None
        dims[axis] = fits[0]
        del strides[fits[0]]
    sizes = [view.shape[dims.index(dim)] if dim in dims else 1 for dim in range(tensor.ndim)]
    block = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
    inside = all(bounds.stop <= size for bounds, size in zip(block, tensor.shape, strict=True))
    return FilePart(name, tuple(view.shape), block, tuple(dims)) if inside else None
