"""The weights of files as blocks of a model's: cutting, filling and joining are exact, and copy nothing."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.core_model_loading import Chunk, Interleave, Transpose, WeightConverter

from nrl.backends import Model
from nrl.backends.models import lazy_weights, loading, weight_layout
from nrl.backends.models.named_weights import weights
from nrl.backends.models.shards import fill, full_shard
from nrl.backends.models.weight_layout import FilePart, find_parts, map_to_files, split_for_files
from nrl.backends.types import Piece
from tests.properties.strategies import TINY

Q = "model.layers.0.self_attn.q_proj.weight"


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(1, 4), max_size=4))
    count = int(torch.tensor(shape).prod()) if shape else 1
    return torch.arange(float(count)).view(shape)


def grid(draw: st.DrawFn, tensor: Tensor) -> list[tuple[slice, ...]]:
    """Blocks that make all of it."""
    blocks: list[tuple[slice, ...]] = [()]
    for size in tensor.shape:
        ends = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))})
        along = [slice(a, b) for a, b in itertools.pairwise(ends)]
        blocks = [(*block, each) for block in blocks for each in along]
    return blocks


def view_of(draw: st.DrawFn, tensor: Tensor, block: tuple[slice, ...]) -> Tensor:
    """A block, turned, and without some of its dimensions of length 1."""
    view = tensor[block]
    view = view.permute(draw(st.permutations(range(view.ndim))))
    for dim in reversed(range(view.ndim)):
        if view.shape[dim] == 1 and draw(st.booleans()):
            view = view.squeeze(dim)
    return view


@given(st.data())
def test_a_view_is_found_and_each_number_comes_back_to_its_place(data: st.DataObject) -> None:
    own = data.draw(tensors())
    views = {f"part {i}": view_of(data.draw, own, block) for i, block in enumerate(grid(data.draw, own))}  # type: ignore[arg-type]
    found: list[FilePart] = []
    for name, view in views.items():
        part = weight_layout._match_view(name, own, view)
        assert part is not None
        found.append(part)
    assert weight_layout._cover_exactly(own, found)
    assert weight_layout._cover_exactly(own, found[1:]) is False
    assert weight_layout._cover_exactly(own, [*found, found[0]]) is False
    mine = [Piece("own", tuple(own.shape), block, own[block]) for block in grid(data.draw, own)]  # type: ignore[arg-type]
    there = {name: full_shard(name, torch.full(view.shape, -1.0)) for name, view in views.items()}
    pieces = [piece for piece in split_for_files(mine, {"own": found}) if piece.tensor.numel()]
    assert all(piece.tensor.untyped_storage()._cdata == own.untyped_storage()._cdata for piece in pieces)
    fill(there, pieces, caller="test")
    assert all(torch.equal(there[name].tensor, view) for name, view in views.items())
    again = torch.full_like(own, -1)
    fill(map_to_files({"own": full_shard("own", again)}, {"own": found}), there.values(), caller="test")
    assert torch.equal(again, own)


@pytest.mark.parametrize(
    "view",
    [
        torch.zeros(4, 4)[::2],
        torch.zeros(4, 4).diagonal(),
        torch.zeros(4, 4).view(2, 8),
        torch.zeros(4, 4).as_strided((2, 2), (4, 1), 3),
        torch.zeros(1).expand(4),
    ],
    ids=["steps", "diagonal", "other shape", "across rows", "one number"],
)
def test_a_view_that_is_no_block(view: Tensor) -> None:
    assert weight_layout._match_view("name", torch.zeros(4, 4), view) is None


def built(*conversions: WeightConverter) -> Any:
    module: Any = loading.build(Model(TINY))
    module._weight_conversions = list(conversions)
    return module


def test_what_transformers_turns() -> None:
    module = built(WeightConverter("attention.query", "self_attn.q_proj.weight", [Transpose(0, 1)]))
    found = find_parts(module)
    (part,) = found[Q]
    assert (part.name, part.dims) == ("model.layers.0.attention.query", (1, 0))
    q = weights(module)[Q].detach()
    (piece,) = split_for_files([full_shard(Q, q)], found)
    assert torch.equal(piece.tensor, q.T)
    assert found is find_parts(module)  # once


@pytest.mark.parametrize(
    "conversion",
    [
        WeightConverter("attention.query", "self_attn.q_proj.weight", [Interleave(dim=0)]),
        WeightConverter("qkv", [f"self_attn.{x}_proj.weight" for x in "kv"], [Chunk(dim=0)]),
    ],
    ids=["mixes rows", "cuts a weight of files"],
)
def test_what_is_no_block_is_taken_as_it_is(conversion: WeightConverter) -> None:
    module = built(conversion)
    own = {name: tuple(x.shape) for name, x in weights(module).items()}
    assert {name: [(part.name, part.shape) for part in each] for name, each in find_parts(module).items()} == {
        name: [(name, shape)] for name, shape in own.items()
    }


def test_files_that_are_joined_already_are_read_as_they_are(tmp_path: Any) -> None:
    """As transformers reads them; and they are written so again."""
    experts = TINY | {"model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    module: Any = loading.build(Model(experts))
    module._weight_conversions = []
    loading.save_model(module, tmp_path)
    read, whole_model = lazy_weights.build_lazy(Model(str(tmp_path))), loading.build(Model(str(tmp_path)))
    assert read is not None
    assert find_parts(read.module).keys() == find_parts(whole_model).keys()
    for name, x in weights(whole_model).items():
        assert (
            [part.name for part in find_parts(read.module)[name]]
            == [part.name for part in find_parts(whole_model)[name]]
            == [name]
        )
        assert torch.equal(read.load(name), x)
