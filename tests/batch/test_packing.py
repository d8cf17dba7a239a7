import itertools
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nrl.batch import Batch, assign, lengths, microbatches
from nrl.batch.packing import Block, Packed, blocks, pack, packed, unpack
from nrl.batch.prefixes import common_prefixes, microbatches_by_prefix
from nrl.batch.ragged import ragged
from nrl.errors import BatchError, MissingColumn

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
    assert sum(block.rows * block.width for block in tokens.blocks) == n
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
    for rows, width, _ in tokens.blocks:
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
    assert tokens.blocks == (Block(2, 3),)
    assert tokens.input_ids.tolist() == [5, 6, 0, 7, 8, 9]
    assert tokens.position_ids.tolist() == [0, 1, 2, 0, 1, 2]
    assert tokens.source.tolist() == [3, 4, 5, 0, 1, 2]
    assert tokens.real.tolist() == [True, True, False, True, True, True]
    assert tokens.place.tolist() == [3, 4, 5, 0, 1, -1, -1, -1, -1]


def test_rows_of_unlike_length_lie_in_blocks_of_their_own() -> None:
    mask = torch.arange(400) < torch.tensor([[400], [1], [2], [0]])
    tokens = pack(Batch({"input_ids": mask.long(), "attention_mask": mask}, batch_size=[4]))
    assert tokens.blocks == (Block(2, 2), Block(1, 400))


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
    """A small causal forward: each token sees the tokens before it in its own row, and in the one that comes before."""
    out: list[Tensor] = []
    start = 0
    for rows, width, after in tokens.blocks:
        sums = tokens.input_ids[start : start + rows * width].view(rows, width).cumsum(1)
        if after is not None:
            sums = sums + out[after.block][after.row, after.length - 1][:, None]
        out.append(sums)
        start += rows * width
    return torch.cat([torch.zeros(0, dtype=torch.int64), *(sums.flatten() for sums in out)])


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


# --- common first tokens

alike = st.lists(st.lists(st.integers(1, 2), max_size=6), max_size=7)
"""Rows that often begin alike: of two words."""


def rows_of(rows: Sequence[Sequence[int]], width: int = 6) -> Batch:
    ids = torch.tensor([[*row, *[9] * (width - len(row))] for row in rows]).view(len(rows), width)
    mask = torch.arange(width) < torch.tensor([len(row) for row in rows]).view(-1, 1)
    return Batch({"input_ids": ids, "attention_mask": mask}, batch_size=[len(rows)])


def in_common(rows: Sequence[Sequence[int]]) -> int:
    return next((t for t, column in enumerate(zip(*rows, strict=False)) if len(set(column)) > 1), min(map(len, rows)))


def pictures(numbers: Sequence[int]) -> Tensor:
    """For each row one picture, of two values."""
    return ragged([torch.tensor([[number, 0]]) for number in numbers])


@pytest.mark.parametrize("nested", [False, True])
def test_equal_tokens_that_stand_for_other_pictures_are_not_shared(nested: bool) -> None:
    media: Any = pictures([1, 2, 1])
    batch = assign(rows_of([[5, 6, 7]] * 3), media=Batch({"pixels": media}, [3]) if nested else media)
    found = pack(batch, share=True)
    assert sorted(found.input_ids.tolist()) == [5, 5, 6, 6, 7, 7]  # of the first and the last row, and of the second
    first, second, third = found.place.view(3, -1)[:, :3].tolist()
    assert first == third
    assert not set(first) & set(second)
    apart = assign(batch, media=pictures([1, 2, 3]))
    assert len(pack(apart, share=True).input_ids) == 9
    pairs = Batch({"input_ids": torch.full((1, 2, 3), 5)}, [1, 2])
    pairs["media"] = Batch({"pixels": torch.tensor([[1, 2]])}, [1, 2])
    assert len(pack(pairs, share=True).input_ids) == 6


def test_rows_with_other_pictures_need_not_be_in_one_micro_batch() -> None:
    width = 600
    ids = torch.ones(4, width, dtype=torch.int64)
    mask = torch.arange(width) < torch.tensor([[width - 1], [width], [width], [width - 1]])
    batch = assign(Batch({}, batch_size=[4]), input_ids=ids, attention_mask=mask, media=pictures([1, 1, 2, 2]))
    parts = microbatches_by_prefix(batch, max_tokens=2 * width)
    assert sorted(sorted(rows.tolist()) for rows in parts.rows) == [[0, 1], [2, 3]]


@quick
@given(alike, st.data())
def test_what_rows_have_in_common_is_tokens_and_media(rows: list[list[int]], data: st.DataObject) -> None:
    """As if the media were a first token that is not counted."""
    media = data.draw(st.lists(st.integers(1, 2), min_size=len(rows), max_size=len(rows)))
    batch = rows_of(rows)
    sizes = lengths(batch).numpy()
    stem, shared = common_prefixes(batch["input_ids"].numpy(), sizes, np.array(media, np.int64))
    for row, other in enumerate(stem.tolist()):
        assert media[row] == media[other]
        assert rows[row][: shared[row]] == rows[other][: shared[row]]
    for number in set(media):
        alone = [row for row in range(len(rows)) if media[row] == number]
        expected = common_prefixes(batch["input_ids"].numpy()[alone], sizes[alone])[1]
        assert shared[alone].tolist() == expected.tolist()


@quick
@given(alike)
def test_common_prefixes_save_as_much_as_any_length_of_prefix(rows: list[list[int]]) -> None:
    batch = rows_of(rows)
    stem, shared = common_prefixes(batch["input_ids"].numpy(), lengths(batch).numpy())
    sets = [[row for row in range(len(rows)) if stem[row] == number] for number in set(stem.tolist())]
    for members in sets:
        expected = in_common([rows[row] for row in members])
        assert shared[members].tolist() == [expected] * len(members)
        assert stem[members[0]] in members
    saved = sum((len(members) - 1) * int(shared[members[0]]) for members in sets)
    for k in range(1, 7):
        begins = Counter(tuple(row[:k]) for row in rows if len(row) >= k)
        assert saved >= sum((count - 1) * k for count in begins.values())


def test_nested_prompts_are_shared_at_the_length_that_saves_most() -> None:
    prompt = [1] * 4
    nested = [[*prompt, 2, 2, i] for i in range(3)] + [[*prompt, 3, 3, i] for i in range(3)]
    stem, shared = common_prefixes(rows_of(nested, 7)["input_ids"].numpy(), np.full(6, 7))
    assert stem.tolist() == [0, 0, 0, 3, 3, 3]  # 2 * 2 * 6 tokens saved, and not 5 * 4
    assert shared.tolist() == [6] * 6
    pairs = [nested[0], nested[3]]
    assert common_prefixes(rows_of(pairs, 7)["input_ids"].numpy(), np.full(2, 7))[1].tolist() == [4, 4]


@quick
@given(alike, st.randoms(use_true_random=False))
def test_what_is_shared_does_not_depend_on_the_order_of_the_rows(rows: list[list[int]], random: Random) -> None:
    def tokens(order: list[int]) -> int:
        return int(pack(rows_of([rows[i] for i in order]), share=True).real.sum())

    order = list(range(len(rows)))
    random.shuffle(order)
    assert tokens(order) == tokens(sorted(order))


@quick
@given(alike)
def test_shared_tokens_come_back_in_every_row(rows: list[list[int]]) -> None:
    batch = rows_of(rows)
    tokens = pack(batch, share=True)
    assert unpack(tokens.input_ids, tokens).equal(torch.where(batch["attention_mask"], batch["input_ids"], 0))
    positions = torch.where(batch["attention_mask"], torch.arange(6), 0)
    assert unpack(tokens.position_ids, tokens).equal(positions)
    assert sum(block.rows * block.width for block in tokens.blocks) == len(tokens.input_ids)
    assert tokens.input_ids.equal(batch["input_ids"].flatten()[tokens.source])
    assert ((tokens.place >= 0) == batch["attention_mask"].flatten()).all()
    assert tokens.real[tokens.place[tokens.place >= 0]].all()


@quick
@given(alike)
def test_shared_rows_compute_the_same_as_rows_one_at_a_time(rows: list[list[int]]) -> None:
    tokens = pack(rows_of(rows), share=True)
    found = unpack(prefix_sums(tokens), tokens)
    for row, ids in enumerate(rows):
        assert found[row].tolist() == list(itertools.accumulate(ids)) + [0] * (6 - len(ids))


@quick
@given(alike, st.lists(st.integers(0, 6), min_size=7, max_size=7), st.booleans())
def test_rows_are_laid_out_up_to_their_ends(rows: list[list[int]], cut: list[int], share: bool) -> None:
    short = [row[:end] for row, end in zip(rows, cut, strict=False)]
    ends = torch.tensor([len(row) for row in short], dtype=torch.int64)
    found, expected = pack(rows_of(rows), ends=ends, share=share), pack(rows_of(short), share=share)
    assert found.place.equal(expected.place)
    assert found.input_ids[found.real].equal(expected.input_ids[expected.real])


def test_sharing_by_hand() -> None:
    """Two answers to one prompt, and a row of its own."""
    tokens = pack(rows_of([[1, 2, 3], [7, 7], [1, 2, 4, 5]]), share=True)
    assert [(block.rows, block.width) for block in tokens.blocks] == [(2, 2), (2, 2)]
    assert tokens.input_ids.tolist() == [1, 2, 7, 7, 3, 9, 4, 5]
    assert tokens.position_ids.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert tokens.real.tolist() == [True] * 5 + [False, True, True]
    after = tokens.blocks[1].after
    assert after is not None
    assert (after.block, after.row.tolist(), after.length.tolist()) == (0, [0, 0], [2, 2])
    assert tokens.place.view(3, 6).tolist() == [
        [0, 1, 4, -1, -1, -1],
        [2, 3, -1, -1, -1, -1],
        [0, 1, 6, 7, -1, -1],
    ]


def test_gradients_of_shared_tokens_add_up() -> None:
    tokens = pack(rows_of([[1, 2, 3], [1, 2, 4]]), share=True)
    values = torch.ones(len(tokens.input_ids), requires_grad=True)
    unpack(values, tokens).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [2, 2, 1, 1]


def test_tokens_are_shared_where_that_is_cheaper() -> None:
    few, many = [[1, 2, 3], [1, 2, 4]], [[1] * 40 + [i] for i in range(4)]
    assert pack(rows_of(few), share=None).blocks == (Block(2, 3),)
    assert [block[:2] for block in pack(rows_of(many, 41), share=None).blocks] == [(1, 40), (4, 1)]
    assert pack(rows_of(many, 41)).blocks == (Block(4, 41),)


# --- parts of rows that begin alike


def answers(prompts: int, each: int, prompt: int, sizes: Sequence[int]) -> Batch:
    """Rows of several prompts in turn, with answers of these lengths, none of them alike."""
    rows, width = prompts * each, prompt + max(sizes)
    ids = torch.arange(rows * width).view(rows, width) + 1000
    ids[:, :prompt] = torch.arange(rows)[:, None] % prompts
    mask = torch.arange(width) < prompt + torch.tensor(sizes).repeat(rows)[:rows, None]
    return Batch({"input_ids": ids, "attention_mask": mask}, batch_size=[rows])


def laid_out(parts: Sequence[Batch]) -> int:
    return sum(len(pack(part, share=None).input_ids) for part in parts)


def test_answers_to_long_prompts_stay_together() -> None:
    """Six prompts of 500 tokens with four answers each; four rows of the longest fit into a part."""
    batch = answers(6, 4, 500, [10, 40, 70, 100, 20, 50, 80])
    found, apart = microbatches_by_prefix(batch, max_tokens=2400), microbatches(batch, max_tokens=2400)
    assert len(found) == 6
    assert all(len(set((rows % 6).tolist())) == 1 for rows in found.rows)
    assert laid_out(found) < 0.5 * laid_out(apart)


def test_answers_to_short_prompts_go_by_length() -> None:
    batch = answers(6, 4, 5, [10, 400, 70, 600, 20, 50, 80])
    found, apart = microbatches_by_prefix(batch, max_tokens=2400), microbatches(batch, max_tokens=2400)
    assert [rows.tolist() for rows in found.rows] == [rows.tolist() for rows in apart.rows]


@quick
@given(alike, st.integers(6, 40), st.sampled_from([0, 500]))
def test_parts_hold_every_row_once_and_are_bounded(rows: list[list[int]], max_tokens: int, cost: int) -> None:
    batch = rows_of(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nrl.batch.prefixes._PART_COST", cost)
        parts = microbatches_by_prefix(batch, max_tokens=max_tokens)
    assert sorted(row for part in parts.rows for row in part.tolist()) == list(range(len(rows)))
    for part in parts:
        assert len(part) * part["input_ids"].shape[-1] <= max_tokens
        assert part["input_ids"].shape[-1] == max(1, int(lengths(part).max()))
    if rows:
        assert parts.restore([part["input_ids"][:, 0] for part in parts]).equal(batch["input_ids"][:, 0])


def test_pairs_go_by_length() -> None:
    batch = of_lengths([7, 2, 7, 7], shape=(2, 2))
    found, apart = microbatches_by_prefix(batch, max_tokens=14), microbatches(batch, max_tokens=14)
    assert [rows.tolist() for rows in found.rows] == [rows.tolist() for rows in apart.rows]


def test_a_row_that_fits_in_no_part() -> None:
    with pytest.raises(BatchError, match="7 tokens, more than max_tokens=6"):
        microbatches_by_prefix(of_lengths([7, 2]), max_tokens=6)
