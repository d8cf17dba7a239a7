"""The parts of flat tokens along cp, and the blocks of a range of numbers, against the whole."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import nrl
from nrl.backends.megatron.cp_slice import pad_rows, slice_rows, slice_tokens
from nrl.backends.megatron.groups import instances
from nrl.backends.megatron.saved_state import ranges
from nrl.backends.training.layout.microbatch_plan import plan, predicted_mask
from nrl.backends.training.layout.packed_attention import make_attention
from nrl.backends.types import Piece
from nrl.batch import Batch
from nrl.batch.packed_rows import Packing, Sequences
from nrl.runtime import Layout

CPU = torch.device("cpu")


def attended(rows: nrl.Rectangles | Sequences, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    return make_attention(rows)(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), window, None)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([None, 3]),
    st.booleans(),
)
@settings(max_examples=50)
def test_parts_attend_as_the_whole(lengths: list[int], count: int, chunk: int, window: int | None, share: bool) -> None:
    sizes, shared = np.array(lengths), np.array(lengths)
    stem = np.arange(len(sizes))
    if share and len(sizes) > 1 and sizes.min() > 1:  # all rows begin as the longest does
        stem, shared = np.full_like(stem, sizes.argmax()), np.full_like(sizes, sizes.min() - 1)
    rows, _ = Sequences.of(sizes, stem, shared)
    size = int(rows.cu_seqlens_q[-1])
    whole = size + -size % (2 * count * chunk)
    rows_or_blocks = pad_rows(rows, whole - size)
    assert isinstance(rows_or_blocks, Sequences)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(whole, heads, 4, generator=g) for heads in (4, 2, 2))
    expected = attended(rows_or_blocks, q, k, v, window)
    parts = [slice_rows(rows_or_blocks, whole, count, rank) for rank in range(count)]
    every = torch.cat([mine for mine, _ in parts])
    assert sorted(every.tolist()) == list(range(whole))
    for mine, part in parts:
        assert len(mine) == whole // count
        torch.testing.assert_close(attended(part, q[mine], k[every], v[every], window), expected[mine])


@pytest.mark.parametrize("packing", [nrl.Rectangles, nrl.Sequences])
@pytest.mark.parametrize("count", [1, 2])
def test_every_place_is_read_in_one_part(packing: Packing, count: int) -> None:
    packing = nrl.Sequences if count > 1 else packing
    mask = torch.arange(6) < torch.tensor([6, 3, 0, 5])[:, None]
    batch = Batch({"input_ids": torch.arange(24).view(4, 6) * mask, "attention_mask": mask}, batch_size=[4])
    work = plan(batch, predicted_mask(batch), packing, words=30, always=True)
    assert work.places is not None
    parts = [slice_tokens(work, 16, 3, count, rank, CPU) for rank in range(count)]
    assert {part.input_ids.shape[1] for part in parts} == {18 if count == 1 else 12}
    read = torch.cat([part.read for part in parts])
    assert sorted(read.tolist()) == list(range(len(work.places)))
    ids = torch.cat([part.input_ids[0, part.places] for part in parts])
    assert torch.equal(ids, work.inputs["input_ids"][0, work.places[read]])
    positions = torch.cat([part.position_ids[0, part.places] for part in parts])
    assert torch.equal(positions, work.inputs["position_ids"][0, work.places[read]])


@given(st.lists(st.integers(1, 5), min_size=1, max_size=2), st.integers(0, 30), st.integers(0, 30), st.integers(0, 3))
def test_a_range_is_blocks(shape: list[int], begin: int, size: int, row: int) -> None:
    """Numbers ``begin`` to ``begin + size`` of a parameter, of which a weight's rows lie in the middle."""
    before, own = 7, int(np.prod(shape))
    numbers = torch.arange(own).view(shape)
    index = slice(row, row + shape[0]), *(slice(0, each) for each in shape[1:])
    piece = Piece("w", (9, *shape[1:]), index, numbers)
    whole = torch.full((9, *shape[1:]), -1)
    held = torch.arange(begin, begin + size) - before  # the numbers of the weight that are held, by their place in it
    for at, first, end in ranges(piece, before - begin, size):
        assert (whole[at] == -1).all()
        whole[at] = held[first:end].view(whole[at].shape)
    expected = torch.where((numbers + before >= begin) & (numbers + before < begin + size), numbers, -1)
    assert torch.equal(whole[index], expected)
    assert int((whole >= 0).sum()) == int((expected >= 0).sum())


def test_copies_of_an_optimizer() -> None:
    assert [instances(Layout(dp=4, shard=shard)) for shard in (None, 1, 2, 4)] == [1, 1, 2, 1]
