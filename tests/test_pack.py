import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nrl.batch import Batch, lengths
from nrl.errors import MissingColumn
from nrl.pack import Packed, blocks, pack, packed, unpack

quick = settings(max_examples=50)
row_lengths = st.lists(st.integers(0, 7), max_size=8)


def of_lengths(sizes: Sequence[int], width: int = 7, shape: tuple[int, ...] | None = None) -> Batch:
    """Rows of these lengths; every token, padding too, has an id of its own, from 1."""
    ids = torch.arange(1, len(sizes) * width + 1).view(len(sizes), width)
    mask = torch.arange(width) < torch.tensor(sizes, dtype=torch.int64).view(-1, 1)
    shape = (len(sizes),) if shape is None else shape
    columns = {"input_ids": ids.view(*shape, width), "attention_mask": mask.view(*shape, width)}
    batch = Batch(columns, batch_size=shape)
    batch.lock_()
    return batch


def cost_of(layout: Sequence[tuple[int, int]], sizes: Sequence[int], cost: int) -> int:
    """Padding plus ``cost`` for each rectangle."""
    return sum(rows * width for rows, width in layout) - sum(sizes) + cost * len(layout)


def least_cost(sizes: Sequence[int], cost: int) -> int:
    """Over every way to cut the sorted rows."""
    rows = sorted(sizes)
    best = None
    for cuts in itertools.product([False, True], repeat=len(rows) - 1):
        ends = [i + 1 for i, cut in enumerate(cuts) if cut] + [len(rows)]
        starts = [0, *ends[:-1]]
        layout = [(end - start, rows[end - 1]) for start, end in zip(starts, ends, strict=True)]
        here = cost_of(layout, sizes, cost)
        best = here if best is None else min(best, here)
    assert best is not None
    return best


# --- blocks


@quick
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(0, 40))
def test_blocks_are_the_best_of_all_cuts(sizes: list[int], cost: int) -> None:
    layout = blocks(sorted(sizes), cost)
    assert sum(rows for rows, _ in layout) == len(sizes)
    assert cost_of(layout, sizes, cost) == least_cost(sizes, cost)


@quick
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(0, 40))
def test_each_block_is_as_wide_as_its_longest_row(sizes: list[int], cost: int) -> None:
    rows, start = sorted(sizes), 0
    for count, width in blocks(rows, cost):
        assert rows[start + count - 1] == width
        start += count


def test_free_blocks_have_no_padding() -> None:
    assert blocks([1, 1, 2, 5], cost=0) == [(2, 1), (1, 2), (1, 5)]


def test_dear_blocks_are_one() -> None:
    assert blocks([1, 1, 2, 5], cost=1000) == [(4, 5)]


def test_short_batches_are_one_block() -> None:
    assert blocks([1, 5, 20]) == [(3, 20)]
    assert blocks([1, 5, 1000]) == [(2, 5), (1, 1000)]


def test_no_rows_are_no_blocks() -> None:
    assert blocks([]) == []


def test_blocks_are_plain_numbers() -> None:
    assert all(type(number) is int for block in blocks([1, 2, 300]) for number in block)


# --- pack, unpack


@quick
@given(row_lengths)
def test_packing_and_unpacking_gives_every_token_back_and_zeros_at_padding(sizes: list[int]) -> None:
    batch = of_lengths(sizes)
    tokens = pack(batch)
    expected = torch.where(batch["attention_mask"], batch["input_ids"], 0)
    assert unpack(tokens.input_ids, tokens).equal(expected)


@quick
@given(row_lengths)
def test_packed_tokens_know_their_places(sizes: list[int]) -> None:
    batch = of_lengths(sizes)
    tokens = pack(batch)
    n = len(tokens.input_ids)
    assert tokens.shape == batch["input_ids"].shape
    assert tokens.position_ids.shape == tokens.source.shape == tokens.real.shape == (n,)
    assert sum(rows * width for rows, width in tokens.blocks) == n
    assert int(tokens.real.sum()) == sum(sizes)
    assert tokens.input_ids.equal(batch["input_ids"].flatten()[tokens.source])
    assert tokens.real.equal(batch["attention_mask"].flatten()[tokens.source])
    assert tokens.position_ids.equal(tokens.source % 7)


@quick
@given(row_lengths)
def test_a_line_of_a_block_is_the_start_of_one_row(sizes: list[int]) -> None:
    batch = of_lengths(sizes)
    tokens = pack(batch)
    seen, start = [], 0
    for rows, width in tokens.blocks:
        source = tokens.source[start : start + rows * width].view(rows, width)
        start += rows * width
        assert (source // 7 == source[:, :1] // 7).all()
        assert (source % 7 == torch.arange(width)).all()
        seen += (source[:, 0] // 7).tolist()
    assert sorted(seen) == [row for row, size in enumerate(sizes) if size > 0]
    assert lengths(batch)[torch.tensor(seen, dtype=torch.int64)].tolist() == sorted(size for size in sizes if size > 0)


def test_packing_by_hand() -> None:
    ids = torch.tensor([[7, 8, 9], [5, 6, 0], [0, 0, 0]])
    mask = torch.tensor([[True, True, True], [True, True, False], [False, False, False]])
    tokens = pack(Batch({"input_ids": ids, "attention_mask": mask}, batch_size=[3]))
    assert tokens.blocks == ((2, 3),)
    assert tokens.input_ids.tolist() == [5, 6, 0, 7, 8, 9]
    assert tokens.position_ids.tolist() == [0, 1, 2, 0, 1, 2]
    assert tokens.source.tolist() == [3, 4, 5, 0, 1, 2]
    assert tokens.real.tolist() == [True, True, False, True, True, True]


def test_rows_of_unlike_length_lie_in_blocks_of_their_own() -> None:
    mask = torch.arange(400) < torch.tensor([[400], [1], [2], [0]])
    tokens = pack(Batch({"input_ids": mask.long(), "attention_mask": mask}, batch_size=[4]))
    assert tokens.blocks == ((2, 2), (1, 400))


def test_packing_without_a_mask_takes_every_token() -> None:
    tokens = pack(Batch({"input_ids": torch.tensor([[5, 6], [7, 8]])}, batch_size=[2]))
    assert tokens.input_ids.tolist() == [5, 6, 7, 8]
    assert tokens.real.all()


def test_preference_batches() -> None:
    sizes = [3, 1, 0, 7, 2, 2]
    batch = of_lengths(sizes, shape=(3, 2))
    tokens = pack(batch)
    assert tokens.shape == (3, 2, 7)
    restored = unpack(tokens.input_ids, tokens)
    assert restored.equal(torch.where(batch["attention_mask"], batch["input_ids"], 0))


@pytest.mark.parametrize("sizes", [[], [0], [0, 0, 0]])
def test_batches_without_tokens(sizes: list[int]) -> None:
    tokens = pack(of_lengths(sizes))
    assert tokens.blocks == ()
    assert tokens.input_ids.tolist() == tokens.position_ids.tolist() == tokens.source.tolist() == []
    assert tokens.input_ids.dtype == tokens.position_ids.dtype == torch.int64
    assert tokens.real.dtype == torch.bool
    assert unpack(torch.zeros(0, 4), tokens).tolist() == torch.zeros(len(sizes), 7, 4).tolist()


def test_values_of_several_numbers_a_token() -> None:
    batch = of_lengths([2, 7])
    tokens = pack(batch)
    values = torch.stack([tokens.input_ids, -tokens.input_ids], dim=-1).double()
    restored = unpack(values, tokens)
    assert restored.shape == (2, 7, 2)
    assert restored.dtype == torch.float64
    assert restored[0, :3].tolist() == [[1, -1], [2, -2], [0, 0]]


def test_gradients_reach_real_tokens_only() -> None:
    tokens = pack(of_lengths([2, 4]))
    values = torch.ones(len(tokens.input_ids), requires_grad=True)
    unpack(values, tokens).sum().backward()
    assert values.grad is not None
    assert values.grad.equal(tokens.real.float())


def test_pack_needs_tokens() -> None:
    with pytest.raises(MissingColumn, match="pack reads the column 'input_ids'"):
        pack(Batch({"rewards": torch.zeros(2)}, batch_size=[2]))


# --- packed


def prefix_sums(tokens: Packed) -> Tensor:
    """A small causal forward: each token sees the tokens before it in its own row."""
    out, start = [], 0
    for rows, width in tokens.blocks:
        block = tokens.input_ids[start : start + rows * width].view(rows, width)
        out.append(block.cumsum(1).flatten())
        start += rows * width
    return torch.cat([torch.zeros(0, dtype=torch.int64), *out])


@quick
@given(row_lengths)
def test_packed_computes_the_same_as_rows_one_at_a_time(sizes: list[int]) -> None:
    batch = of_lengths(sizes)
    expected = torch.zeros(len(sizes), 7, dtype=torch.int64)
    for row, size in enumerate(sizes):
        expected[row, :size] = batch["input_ids"][row, :size].cumsum(0)
    assert packed(prefix_sums)(batch).equal(expected)


def test_packed_never_sees_rows_without_tokens() -> None:
    seen = []

    def forward(tokens: Packed) -> Tensor:
        seen.append(tokens.input_ids.tolist())
        return tokens.input_ids.float()

    packed(forward)(of_lengths([0, 2]))
    assert seen == [[8, 9]]
