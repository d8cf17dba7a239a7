"""The weights of Megatron's modules as pieces with Hugging Face's names and shapes.

Every piece is a view: what is copied into it is in the module. Megatron joins the projections of queries, keys and
values in one matrix, group by group, and those of gate and up in another one. So a weight may be several pieces.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from nrl.backends.megatron.groups import Groups, is_expert
from nrl.backends.models.named_weights import SCORE
from nrl.backends.models.shards import full_shard
from nrl.backends.types import Piece

__all__ = ["local_shards", "merge_adjacent", "owned_shards"]

_EMBEDDING = "model.embed_tokens.weight"
_NORMS = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
_BY_COLUMNS = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}


def local_shards(stages: Iterable[Any], groups: Groups) -> Iterator[tuple[Tensor, Piece, bool]]:
    """Yield this process's pieces of the weights of stages.

    Yields:
        A parameter, a piece that is a view of it, and whether no process before this one, of the same copy of the
        model, has the same piece.
    """
    for stage in stages:
        tied = groups.layout.pp > 1 and stage.post_process and not stage.pre_process
        for name, parameter in stage.named_parameters():
            for piece in _views(stage, name, parameter.detach(), groups.tp, groups.layout.tp):
                again = (tied and piece.name == _EMBEDDING) or (groups.tp > 0 and piece.tensor.shape == piece.shape)
                yield parameter, piece, is_expert(parameter) or not again


def owned_shards(stages: Iterable[Any], groups: Groups) -> Iterator[Piece]:
    """Yield the pieces that no earlier process has."""
    return (piece for parameter, piece, first in local_shards(stages, groups) if first and groups.first_copy(parameter))


def _views(module: Any, name: str, values: Tensor, rank: int, size: int) -> Iterator[Piece]:
    """Yield the pieces of a parameter, or of a tensor like it, such as a moment of its optimizer.

    Args:
        module: a stage of a model (`nrl.backends.megatron.packed_layers.PackedGPT`).
        name: of the parameter there.
        values: of its shape, of which pieces are views.
        rank: of this process along tp.
        size: of tp.
    """
    if ".adapter." in name:
        path, _, kind = name.rpartition(".")
        yield module.get_submodule(path).piece(kind, values)
    elif name.startswith("decoder.layers."):
        _, _, number, rest = name.split(".", 3)
        layer = module.decoder.layers[int(number)]
        prefix = f"model.layers.{layer.layer_number - 1}."
        if rest.startswith("mlp.") and layer.is_moe_layer:
            yield from _of_experts(module.experts, prefix, rest, values, layer.mlp.local_expert_indices)
        else:
            yield from _of_layer(module.config, prefix, rest, values, rank, size)
    elif name == "embedding.word_embeddings.weight":
        yield from _words(_EMBEDDING, module, values, rank)
    elif name.startswith("output_layer.") and isinstance(module.output_layer, torch.nn.Linear):
        yield full_shard(f"{SCORE}.{name.rsplit('.', 1)[1]}", values)
    elif name == "output_layer.weight":
        tied = module.share_embeddings_and_output_weights
        yield from _words(_EMBEDDING if tied else "lm_head.weight", module, values, rank)
    elif name == "decoder.final_layernorm.weight":
        yield full_shard("model.norm.weight", values)
    else:
        raise KeyError(name)


def merge_adjacent(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Join pieces that follow each other in a weight into one piece, which is a copy."""
    for name, group in groupby(pieces, lambda piece: piece.name):
        adjacent = list(group)
        if len(adjacent) == 1:
            yield adjacent[0]
            continue
        first, last = adjacent[0].index[0], adjacent[-1].index[0]
        index = slice(first.start, last.stop), *adjacent[0].index[1:]
        yield Piece(name, adjacent[0].shape, index, torch.cat([piece.tensor for piece in adjacent]))


def _of_experts(names: Any, prefix: str, name: str, values: Tensor, numbers: Sequence[int]) -> Iterator[Piece]:
    """Yield the pieces of a router or of a whole expert; ``numbers`` are those of the experts in this process."""
    if name == "mlp.router.weight":
        yield full_shard(prefix + names.router, values)
        return
    _, _, _, number, kind = name.removesuffix(".weight").split(".")
    expert = numbers[int(number)]
    if kind == "linear_fc2":
        yield full_shard(prefix + names.down.format(expert), values)
    else:
        for which, part in zip((names.gate, names.up), values.chunk(2), strict=True):
            yield full_shard(prefix + which.format(expert), part)


def _of_layer(config: Any, prefix: str, name: str, values: Tensor, rank: int, size: int) -> Iterator[Piece]:
    if name in _NORMS:
        yield full_shard(prefix + _NORMS[name], values)
    elif name in _BY_COLUMNS:
        rows, columns = values.shape
        index = slice(0, rows), slice(rank * columns, (rank + 1) * columns)
        yield Piece(prefix + _BY_COLUMNS[name], (rows, columns * size), index, values)
    elif name.startswith("self_attention.linear_qkv."):
        yield from _projections(config, prefix, name.rsplit(".", 1)[1], values, rank, size)
    elif name == "mlp.linear_fc1.weight":
        for which, part in zip(("gate", "up"), values.chunk(2), strict=True):
            yield _rows(f"{prefix}mlp.{which}_proj.weight", part, rank * len(part), len(part) * size)
    else:
        raise KeyError(prefix + name)


def _projections(config: Any, prefix: str, kind: str, values: Tensor, rank: int, size: int) -> Iterator[Piece]:
    """Yield queries, keys and values: for each group of heads its queries, its key and its value."""
    width, groups = config.kv_channels, config.num_query_groups // size
    queries = config.num_attention_heads // config.num_query_groups
    for which, first, heads in (("q", 0, queries), ("k", queries, 1), ("v", queries + 1, 1)):
        for group in range(groups):
            begin = (group * (queries + 2) + first) * width
            part = values[begin : begin + heads * width]
            first_row = (rank * groups + group) * heads * width
            yield _rows(
                f"{prefix}self_attn.{which}_proj.{kind}", part, first_row, config.num_query_groups * heads * width
            )


def _words(name: str, module: Any, values: Tensor, rank: int) -> Iterator[Piece]:
    """Yield the piece of a table of words, without the rows that fill the vocabulary up."""
    first = rank * len(values)
    real_words = max(0, min(len(values), module.words - first))
    yield _rows(name, values[:real_words], first, module.words)


def _rows(name: str, values: Tensor, first: int, rows: int) -> Piece:
    index = slice(first, first + len(values)), *(slice(0, size) for size in values.shape[1:])
    return Piece(name, (rows, *values.shape[1:]), index, values)
