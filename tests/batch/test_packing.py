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
from nrl.batch.packed_rows import Block, Packing, Rectangles, Sequences, blocks
from nrl.batch.packing import Packed, pack, packed, unpack
from nrl.batch.prefixes import common_prefixes, microbatches_by_prefix
from nrl.batch.ragged import make_ragged
from nrl.errors import BatchError, MissingColumn

quick = settings(max_examples=50)
row_lengths = st.lists(st.integers(0, 7), max_size=8)
packings = st.sampled_from([Rectangles, Sequences])


def in_rectangles(batch: Batch, **options: Any) -> tuple[Packed, Rectangles]:
    tokens = pack(batch, packing=Rectangles, **options)
    assert isinstance(tokens.rows, Rectangles)
    return tokens, tokens.rows


def in_sequences(batch: Batch, **options: Any) -> tuple[Packed, Sequences]:
    tokens = pack(batch, packing=Sequences, **options)
    assert isinstance(tokens.rows, Sequences)
    return tokens, tokens.rows


def real(tokens: Packed) -> Tensor:
    return tokens.rows.real if isinstance(tokens.rows, Rectangles) else torch.ones_like(tokens.source, dtype=torch.bool)


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
@given(row_lengths, packings)
def test_packing_and_unpacking_gives_every_token_back_and_zeros_at_padding(sizes: list[int], packing: Packing) -> None:
    batch = of_lengths(sizes)
    tokens = pack(batch, packing=packing)
    expected = torch.where(batch["attention_mask"], batch["input_ids"], 0)
    assert unpack(tokens.input_ids, tokens).equal(expected)


@quick
@given(row_lengths, packings)
def test_packed_tokens_know_their_places(sizes: list[int], packing: Packing) -> None:
    batch = of_lengths(sizes)
    tokens = pack(batch, packing=packing)
    n = len(tokens.input_ids)
    assert tokens.shape == batch["input_ids"].shape
    assert tokens.position_ids.shape == tokens.source.shape == real(tokens).shape == (n,)
    if isinstance(tokens.rows, Rectangles):
        assert sum(block.rows * block.width for block in tokens.rows.blocks) == n
    assert int(real(tokens).sum()) == sum(sizes)
    assert tokens.input_ids.equal(batch["input_ids"].flatten()[tokens.source])
    assert real(tokens).equal(batch["attention_mask"].flatten()[tokens.source])
    assert tokens.position_ids.equal(tokens.source % 7)


@quick
@given(row_lengths)
def test_a_line_of_a_block_is_the_start_of_one_row(sizes: list[int]) -> None:
    batch = of_lengths(sizes)
    tokens, laid = in_rectangles(batch)
    seen, start = [], 0
    for rows, width, _ in laid.blocks:
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
    tokens, laid = in_rectangles(Batch({"input_ids": ids, "attention_mask": mask}, batch_size=[3]))
    assert laid.blocks == (Block(2, 3),)
    assert tokens.input_ids.tolist() == [5, 6, 0, 7, 8, 9]
    assert tokens.position_ids.tolist() == [0, 1, 2, 0, 1, 2]
    assert tokens.source.tolist() == [3, 4, 5, 0, 1, 2]
    assert laid.real.tolist() == [True, True, False, True, True, True]
    assert tokens.place.tolist() == [3, 4, 5, 0, 1, -1, -1, -1, -1]


def test_rows_of_unlike_length_lie_in_blocks_of_their_own() -> None:
    mask = torch.arange(400) < torch.tensor([[400], [1], [2], [0]])
    _, laid = in_rectangles(Batch({"input_ids": mask.long(), "attention_mask": mask}, batch_size=[4]))
    assert laid.blocks == (Block(2, 2), Block(1, 400))


@pytest.mark.parametrize("packing", [Rectangles, Sequences])
def test_packing_without_a_mask_takes_every_token(packing: Packing) -> None:
    tokens = pack(Batch({"input_ids": torch.tensor([[5, 6], [7, 8]])}, batch_size=[2]), packing=packing)
    assert tokens.input_ids.tolist() == [5, 6, 7, 8]
    assert real(tokens).all()


@pytest.mark.parametrize("packing", [Rectangles, Sequences])
def test_preference_batches(packing: Packing) -> None:
    sizes = [3, 1, 0, 7, 2, 2]
    batch = of_lengths(sizes, shape=(3, 2))
    tokens = pack(batch, packing=packing)
    assert tokens.shape == (3, 2, 7)
    restored = unpack(tokens.input_ids, tokens)
    assert restored.equal(torch.where(batch["attention_mask"], batch["input_ids"], 0))


@pytest.mark.parametrize("sizes", [[], [0], [0, 0, 0]])
def test_batches_without_tokens(sizes: list[int]) -> None:
    tokens, laid = in_rectangles(of_lengths(sizes))
    assert laid.blocks == ()
    assert laid.real.dtype == torch.bool
    other, rows = in_sequences(of_lengths(sizes))
    assert rows.cu_seqlens_q.tolist() == rows.cu_seqlens_k.tolist() == [0]
    assert (rows.max_seqlen_q, rows.max_seqlen_k, rows.keys) == (0, 0, None)
    assert rows.parent.tolist() == rows.shared.tolist() == other.input_ids.tolist() == []
    assert unpack(torch.zeros(0, 4), other).tolist() == torch.zeros(len(sizes), 7, 4).tolist()
    assert tokens.input_ids.tolist() == tokens.position_ids.tolist() == tokens.source.tolist() == []
    assert tokens.input_ids.dtype == tokens.position_ids.dtype == torch.int64
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
    tokens, laid = in_rectangles(of_lengths([2, 4]))
    values = torch.ones(len(tokens.input_ids), requires_grad=True)
    unpack(values, tokens).sum().backward()
    assert values.grad is not None
    assert values.grad.equal(laid.real.float())


def test_pack_needs_tokens() -> None:
    with pytest.raises(MissingColumn, match="pack reads the column 'input_ids'"):
        pack(Batch({"rewards": torch.zeros(2)}, batch_size=[2]))


# --- packed


def prefix_sums(tokens: Packed) -> Tensor:
    """A small causal forward: each token sees the tokens before it in its own row, and in the one that comes before."""
    out: list[Tensor] = []
    start = 0
    if isinstance(tokens.rows, Sequences):
        ends = tokens.rows.cu_seqlens_q.tolist()
        for row, (parent, shared) in enumerate(zip(tokens.rows.parent, tokens.rows.shared, strict=True)):
            before = out[parent][shared - 1] if parent >= 0 else 0
            out.append(tokens.input_ids[ends[row] : ends[row + 1]].cumsum(0) + before)
        return torch.cat([torch.zeros(0, dtype=torch.int64), *out])
    for rows, width, after in tokens.rows.blocks:
        sums = tokens.input_ids[start : start + rows * width].view(rows, width).cumsum(1)
        if after is not None:
            sums = sums + out[after.block][after.row, after.length - 1][:, None]
        out.append(sums)
        start += rows * width
    return torch.cat([torch.zeros(0, dtype=torch.int64), *(sums.flatten() for sums in out)])


@quick
@given(row_lengths, packings)
def test_packed_computes_the_same_as_rows_one_at_a_time(sizes: list[int], packing: Packing) -> None:
    batch = of_lengths(sizes)
    expected = torch.zeros(len(sizes), 7, dtype=torch.int64)
    for row, size in enumerate(sizes):
        expected[row, :size] = batch["input_ids"][row, :size].cumsum(0)
    assert packed(prefix_sums, packing=packing)(batch).equal(expected)


def test_packed_never_sees_rows_without_tokens() -> None:
    seen = []

    def forward(tokens: Packed) -> Tensor:
        seen.append(tokens.input_ids.tolist())
        return tokens.input_ids.float()

    packed(forward)(of_lengths([0, 2]))
    packed(forward, packing=Sequences)(of_lengths([1, 0, 2]))
    packed(forward)(of_lengths([1, 0, 2]))
    assert seen == [[8, 9], [1, 15, 16], [1, 2, 15, 16]]


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
    return make_ragged([torch.tensor([[number, 0]]) for number in numbers])


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("packing", [Rectangles, Sequences])
def test_equal_tokens_that_stand_for_other_pictures_are_not_shared(packing: Packing, nested: bool) -> None:
    media: Any = pictures([1, 2, 1])
    batch = assign(rows_of([[5, 6, 7]] * 3), media=Batch({"pixels": media}, [3]) if nested else media)
    found = pack(batch, packing=packing, share=True)
    assert sorted(found.input_ids.tolist()) == [5, 5, 6, 6, 7, 7]  # of the first and the last row, and of the second
    first, second, third = found.place.view(3, -1)[:, :3].tolist()
    assert first == third
    assert not set(first) & set(second)
    apart = assign(batch, media=pictures([1, 2, 3]))
    assert len(pack(apart, packing=packing, share=True).input_ids) == 9
    pairs = Batch({"input_ids": torch.full((1, 2, 3), 5)}, [1, 2])
    pairs["media"] = Batch({"pixels": torch.tensor([[1, 2]])}, [1, 2])
    assert len(pack(pairs, packing=packing, share=True).input_ids) == 6


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
@given(alike, packings, st.randoms(use_true_random=False))
def test_what_is_shared_does_not_depend_on_the_order_of_the_rows(
    rows: list[list[int]], packing: Packing, random: Random
) -> None:
    def tokens(order: list[int]) -> int:
        return int(real(pack(rows_of([rows[i] for i in order]), packing=packing, share=True)).sum())

    order = list(range(len(rows)))
    random.shuffle(order)
    assert tokens(order) == tokens(sorted(order))


@quick
@given(alike, packings)
def test_shared_tokens_come_back_in_every_row(rows: list[list[int]], packing: Packing) -> None:
    batch = rows_of(rows)
    tokens = pack(batch, packing=packing, share=True)
    assert unpack(tokens.input_ids, tokens).equal(torch.where(batch["attention_mask"], batch["input_ids"], 0))
    positions = torch.where(batch["attention_mask"], torch.arange(6), 0)
    assert unpack(tokens.position_ids, tokens).equal(positions)
    if isinstance(tokens.rows, Rectangles):
        assert sum(block.rows * block.width for block in tokens.rows.blocks) == len(tokens.input_ids)
    assert tokens.input_ids.equal(batch["input_ids"].flatten()[tokens.source])
    assert ((tokens.place >= 0) == batch["attention_mask"].flatten()).all()
    found = tokens.place[tokens.place >= 0]
    assert sorted(set(found.tolist())) == torch.nonzero(real(tokens))[:, 0].tolist()


@quick
@given(alike, packings)
def test_shared_rows_compute_the_same_as_rows_one_at_a_time(rows: list[list[int]], packing: Packing) -> None:
    tokens = pack(rows_of(rows), packing=packing, share=True)
    found = unpack(prefix_sums(tokens), tokens)
    for row, ids in enumerate(rows):
        assert found[row].tolist() == list(itertools.accumulate(ids)) + [0] * (6 - len(ids))


@quick
@given(alike, packings, st.lists(st.integers(0, 6), min_size=7, max_size=7), st.booleans())
def test_rows_are_laid_out_up_to_their_ends(
    rows: list[list[int]], packing: Packing, cut: list[int], share: bool
) -> None:
    short = [row[:end] for row, end in zip(rows, cut, strict=False)]
    ends = torch.tensor([len(row) for row in short], dtype=torch.int64)
    found = pack(rows_of(rows), packing=packing, ends=ends, share=share)
    expected = pack(rows_of(short), packing=packing, share=share)
    assert found.place.equal(expected.place)
    assert found.input_ids[real(found)].equal(expected.input_ids[real(expected)])


def test_sharing_by_hand() -> None:
    """Two answers to one prompt, and a row of its own."""
    tokens, laid = in_rectangles(rows_of([[1, 2, 3], [7, 7], [1, 2, 4, 5]]), share=True)
    assert [(block.rows, block.width) for block in laid.blocks] == [(2, 2), (2, 2)]
    assert tokens.input_ids.tolist() == [1, 2, 7, 7, 3, 9, 4, 5]
    assert tokens.position_ids.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert laid.real.tolist() == [True] * 5 + [False, True, True]
    after = laid.blocks[1].after
    assert after is not None
    assert (after.block, after.row.tolist(), after.length.tolist()) == (0, [0, 0], [2, 2])
    assert tokens.place.view(3, 6).tolist() == [
        [0, 1, 4, -1, -1, -1],
        [2, 3, -1, -1, -1, -1],
        [0, 1, 6, 7, -1, -1],
    ]


@pytest.mark.parametrize("packing", [Rectangles, Sequences])
def test_gradients_of_shared_tokens_add_up(packing: Packing) -> None:
    tokens = pack(rows_of([[1, 2, 3], [1, 2, 4]]), packing=packing, share=True)
    values = torch.ones(len(tokens.input_ids), requires_grad=True)
    unpack(values, tokens).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [2, 2, 1, 1]


def test_tokens_are_shared_where_that_is_cheaper() -> None:
    few, many = [[1, 2, 3], [1, 2, 4]], [[1] * 40 + [i] for i in range(4)]
    assert in_rectangles(rows_of(few), share=None)[1].blocks == (Block(2, 3),)
    assert [block[:2] for block in in_rectangles(rows_of(many, 41), share=None)[1].blocks] == [(1, 40), (4, 1)]
    assert in_rectangles(rows_of(many, 41))[1].blocks == (Block(4, 41),)
    assert in_sequences(rows_of(few), share=None)[1].parent.tolist() == [-1, 0]
    assert in_sequences(rows_of(many, 41), share=None)[1].parent.tolist() == [-1, 0, 0, 0]
    assert in_sequences(rows_of([[1, 2], [2, 2]]), share=None)[1].parent.tolist() == [-1, -1]
    assert in_sequences(rows_of(many, 41))[1].parent.tolist() == [-1] * 4


# --- sequences


def test_sequences_by_hand() -> None:
    """Two answers to one prompt, a row of its own, one that is the prompt's beginning alone, and one without tokens."""
    tokens, rows = in_sequences(rows_of([[1, 2, 3], [7, 7], [], [1, 2, 4, 5], [1, 2]]), share=True)
    assert tokens.input_ids.tolist() == [1, 2, 3, 7, 7, 4, 5]
    assert tokens.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert rows.cu_seqlens_q.tolist() == [0, 3, 5, 7]
    assert rows.cu_seqlens_k.tolist() == [0, 3, 5, 9]
    assert rows.keys is not None
    assert rows.keys.tolist() == [0, 1, 2, 3, 4, 0, 1, 5, 6]
    assert (rows.max_seqlen_q, rows.max_seqlen_k) == (3, 4)
    assert (rows.parent.tolist(), rows.shared.tolist()) == ([-1, -1, 0], [0, 0, 2])
    assert tokens.place.view(5, 6).tolist() == [
        [0, 1, 2, -1, -1, -1],
        [3, 4, -1, -1, -1, -1],
        [-1, -1, -1, -1, -1, -1],
        [0, 1, 5, 6, -1, -1],
        [0, 1, -1, -1, -1, -1],
    ]


@quick
@given(alike, st.booleans(), st.lists(st.integers(1, 2), min_size=7, max_size=7))
def test_sequences_and_their_tree_cover_every_token_once(rows: list[list[int]], share: bool, media: list[int]) -> None:
    """Of each row a kernel gets exactly the tokens of the row as keys, and the last of them as queries."""
    batch = rows_of(rows)
    if rows:
        batch = assign(batch, media=pictures(media[: len(rows)]))
    tokens, laid = in_sequences(batch, share=share)
    n, n_rows = len(tokens.input_ids), len(laid.parent)
    own, all_keys = laid.cu_seqlens_q, laid.cu_seqlens_k
    assert own.dtype == all_keys.dtype == torch.int32
    assert len(own) == len(all_keys) == n_rows + 1
    assert own[0] == all_keys[0] == 0
    assert (own.diff() > 0).all()
    assert own[-1] == n  # no token lies outside of the sequences, and
    assert sorted(set(tokens.place[tokens.place >= 0].tolist())) == list(range(n))  # none is padding
    assert laid.max_seqlen_q == max(own.diff().tolist(), default=0)
    assert laid.max_seqlen_k == max(all_keys.diff().tolist(), default=0)
    assert (laid.keys is None) == (not (laid.parent >= 0).any())
    if not share:
        assert laid.keys is None
        assert n == sum(map(len, rows))
    keys = torch.arange(n) if laid.keys is None else laid.keys
    assert all_keys[-1] == len(keys)
    for row in range(n_rows):
        queries = torch.arange(int(own[row]), int(own[row + 1]))
        of = int(tokens.source[queries[0]]) // 6
        before, parent = int(laid.shared[row]), int(laid.parent[row])
        assert tokens.source[queries].tolist() == [of * 6 + i for i in range(before, len(rows[of]))]
        seen = keys[int(all_keys[row]) : int(all_keys[row + 1])]
        assert tokens.input_ids[seen].tolist() == rows[of]
        assert tokens.position_ids[seen].tolist() == list(range(len(rows[of])))
        assert seen[before:].equal(queries)
        assert (parent >= 0) == (before > 0)
        if parent >= 0:
            assert parent < row
            assert laid.parent[parent] == -1
            assert media[of] == media[int(tokens.source[own[parent]]) // 6]
            assert seen[:before].tolist() == list(range(int(own[parent]), int(own[parent]) + before))


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
