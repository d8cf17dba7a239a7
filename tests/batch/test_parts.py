"""Splitting a batch and putting it back: shard, microbatches, minibatches, restore."""

import gc
import itertools
import weakref
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nrl
from nrl.batch import Batch, Parts, assign, deal, lengths, microbatches, minibatches, restore, shard
from nrl.batch.parts import rows_of_microbatches
from nrl.errors import BatchError, MissingColumn

quick = settings(max_examples=40)
row_lengths = st.lists(st.integers(0, 9), min_size=1, max_size=9)
pair_lengths = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6)


def of_lengths(sizes: list[int], extra: int = 0) -> Batch:
    """Rows of these lengths, with a number each, ``extra`` columns of padding and a nested entry."""
    width = max([1, *sizes]) + extra
    mask = torch.arange(width) < torch.tensor(sizes, dtype=torch.int64).view(-1, 1)
    row = torch.arange(len(sizes))
    pixels = Batch({"pixels": row.view(-1, 1).expand(-1, 4).float()}, batch_size=[len(sizes)])
    ids = torch.where(mask, row.view(-1, 1) * 100 + torch.arange(width), 0)
    columns = {"input_ids": ids, "attention_mask": mask, "row": row, "media": pixels}
    batch = Batch(columns, batch_size=[len(sizes)])
    batch.lock_()
    return batch


def of_pairs(sizes: list[tuple[int, int]]) -> Batch:
    """Preference pairs whose two rows carry the number of the pair."""
    flat = of_lengths([size for pair in sizes for size in pair])
    shape = (len(sizes), 2)
    columns = {name: flat[name].unflatten(0, shape) for name in ("input_ids", "attention_mask")}
    pair = torch.arange(len(sizes)).view(-1, 1).expand(shape)
    batch = Batch({**columns, "row": pair}, batch_size=shape)
    batch.lock_()
    return batch


def rows_of(part: Batch) -> list[int]:
    numbers: list[int] = part["row"].flatten(1)[:, 0].tolist() if part.ndim > 1 else part["row"].tolist()
    return numbers


SPLITS: dict[str, Callable[[Batch], Parts]] = {
    "shard": lambda batch: shard(batch, 3),
    "microbatches": lambda batch: microbatches(batch, max_tokens=20),
}
each_split = pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS.keys())


# --- what all splits have in common


@each_split
@quick
@given(sizes=row_lengths)
def test_splitting_keeps_every_row_once_and_restore_is_its_inverse(
    split: Callable[[Batch], Parts], sizes: list[int]
) -> None:
    batch = of_lengths(sizes)
    parts = split(batch)
    assert sorted(number for part in parts for number in rows_of(part)) == list(range(len(sizes)))
    assert [rows_of(part) for part in parts] == [rows.tolist() for rows in parts.rows]
    assert all(part.is_locked and part["media"].is_locked for part in parts)
    assert all(part["media", "pixels"][:, 0].tolist() == rows_of(part) for part in parts)
    assert parts.restore([part["row"] for part in parts]).equal(batch["row"])
    assert parts.restore([lengths(part) for part in parts]).equal(lengths(batch))
    restored = parts.restore([part.select("row", "media") for part in parts])
    assert restored.is_locked
    assert (restored == batch.select("row", "media")).all()


@each_split
@quick
@given(sizes=pair_lengths)
def test_pairs_stay_whole(split: Callable[[Batch], Parts], sizes: list[tuple[int, int]]) -> None:
    batch = of_pairs(sizes)
    parts = split(batch)
    assert all(part.batch_size == (len(rows), 2) for part, rows in zip(parts, parts.rows, strict=True))
    assert all((part["row"][:, 0] == part["row"][:, 1]).all() for part in parts)
    assert parts.restore([part["row"] for part in parts]).equal(batch["row"])
    assert parts.restore([lengths(part) for part in parts]).equal(lengths(batch))


@each_split
def test_splitting_leaves_its_argument_as_it_was(split: Callable[[Batch], Parts]) -> None:
    batch = of_lengths([3, 1, 2]).clone()
    before = batch.clone()
    split(batch)
    assert not batch.is_locked
    assert not batch["media"].is_locked
    assert (batch == before).all()


@each_split
def test_a_batch_without_batch_size(split: Callable[[Batch], Parts]) -> None:
    with pytest.raises(BatchError, match="at least one batch dimension"):
        split(Batch({"input_ids": torch.tensor([1, 2, 3])}, batch_size=[]))


@each_split
def test_a_batch_without_tokens(split: Callable[[Batch], Parts]) -> None:
    with pytest.raises(MissingColumn, match="'input_ids'"):
        split(Batch({"rewards": torch.zeros(3)}, batch_size=[3]))


# --- shard


def best_balance(tokens: list[int], n: int) -> int:
    """The smallest possible load of the fullest of ``n`` parts, by trying everything."""
    return min(
        max(sum(size for size, part in zip(tokens, choice, strict=True) if part == k) for k in range(n))
        for choice in itertools.product(range(n), repeat=len(tokens))
    )


@quick
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 3))
def test_shards_are_balanced_within_four_thirds_of_the_best(sizes: list[int], n: int) -> None:
    parts = shard(of_lengths(sizes), n)
    assert len(parts) == n
    assert max(int(lengths(part).sum()) for part in parts) <= 4 / 3 * best_balance(sizes, n) + 1e-9


@quick
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5))
def test_shards_of_pairs_are_balanced_by_the_tokens_of_both(sizes: list[tuple[int, int]]) -> None:
    loads = [int(lengths(part).sum()) for part in shard(of_pairs(sizes), 2)]
    assert max(loads) <= 4 / 3 * best_balance([sum(pair) for pair in sizes], 2) + 1e-9


@quick
@given(st.lists(st.integers(0, 3), max_size=20), st.integers(1, 7))
def test_rows_are_dealt_to_the_part_with_the_fewest_tokens_then_rows_then_the_first(sizes: list[int], n: int) -> None:
    loads, rows = [0] * n, [list[int]() for _ in range(n)]
    for row in sorted(range(len(sizes)), key=lambda row: (-sizes[row], row)):
        lightest = min(range(n), key=lambda part: (loads[part], len(rows[part]), part))
        loads[lightest] += sizes[row]
        rows[lightest].append(row)
    assert [part.tolist() for part in deal(of_lengths(sizes), n)] == list(map(sorted, rows))


def test_rows_are_dealt_once_for_all_batches_with_a_mask() -> None:
    batch = of_lengths([3, 1, 2])
    first = deal(batch, 2)
    for again in (batch, assign(batch, rewards=torch.zeros(3)), batch.select("input_ids", "attention_mask")):
        assert all(one is other for one, other in zip(deal(again, 2), first, strict=True))
    assert [part.tolist() for part in deal(batch, 3)] == [[0], [2], [1]]
    shorter = assign(batch, attention_mask=batch["attention_mask"] & (torch.arange(3) < 1))
    assert [part.tolist() for part in deal(shorter, 2)] == [[0, 2], [1]]


def test_rows_are_dealt_anew_when_somebody_wrote_into_the_mask() -> None:
    batch = of_lengths([3, 1, 2]).clone()
    assert [part.tolist() for part in deal(batch, 2)] == [[0], [1, 2]]
    batch["attention_mask"][0, 1:] = False
    assert [part.tolist() for part in deal(batch, 2)] == [[2], [0, 1]]


def test_what_was_dealt_is_forgotten_with_the_mask() -> None:
    batch = of_lengths([3, 1, 2])
    kept = weakref.ref(deal(batch, 2)[0])
    assert kept() is not None
    del batch
    gc.collect()
    assert kept() is None


def test_rows_of_equal_length_are_dealt_evenly() -> None:
    batch = Batch({"input_ids": torch.zeros(7, 4, dtype=torch.int64)}, batch_size=[7])
    assert sorted(len(part) for part in shard(batch, 3)) == [2, 2, 3]


def test_rows_without_tokens_are_dealt_evenly_too() -> None:
    assert sorted(len(part) for part in shard(of_lengths([0, 0, 0, 0]), 2)) == [2, 2]


def test_shards_keep_the_width_and_the_order_of_rows() -> None:
    parts = shard(of_lengths([1, 5, 1, 1]), 2)
    assert all(part["input_ids"].shape[-1] == 5 for part in parts)
    assert [rows_of(part) for part in parts] == [[1], [0, 2, 3]]


def test_fewer_rows_than_shards_leave_some_without_rows() -> None:
    parts = shard(of_lengths([2, 3]), 4)
    assert sorted(len(part) for part in parts) == [0, 0, 1, 1]
    assert all(part["input_ids"].shape == (len(part), 3) for part in parts)
    assert parts.restore([part["row"] for part in parts]).tolist() == [0, 1]


def test_a_batch_without_rows_can_be_sharded() -> None:
    batch = of_lengths([1])[:0]
    parts = shard(batch, 2)
    assert [len(part) for part in parts] == [0, 0]
    assert parts.restore([part["input_ids"] for part in parts]).shape == (0, 1)


@pytest.mark.parametrize("n", [0, -1])
def test_the_number_of_shards_is_positive(n: int) -> None:
    with pytest.raises(BatchError, match=f"shard: n is {n}; it must be at least 1"):
        shard(of_lengths([1]), n)


# --- microbatches


@quick
@given(row_lengths, st.integers(9, 30))
def test_a_plan_takes_every_row_once_within_the_bound_widest_first(widths: list[int], max_tokens: int) -> None:
    groups = rows_of_microbatches(widths, max_tokens)
    assert sorted(itertools.chain(*groups)) == list(range(len(widths)))
    assert all(len(group) * max(widths[row] for row in group) <= max_tokens for group in groups)
    flat = [widths[row] for group in groups for row in group]
    assert flat == sorted(widths, reverse=True)


@quick
@given(row_lengths, st.integers(9, 30))
def test_a_plan_has_no_rectangle_that_could_take_the_next_row(widths: list[int], max_tokens: int) -> None:
    groups = rows_of_microbatches(widths, max_tokens)
    for group in groups[:-1]:
        assert (len(group) + 1) * max(1, *(widths[row] for row in group)) > max_tokens


def test_a_plan_of_nothing() -> None:
    assert rows_of_microbatches([], 10) == []


@quick
@given(row_lengths, st.integers(9, 40), st.integers(0, 3))
def test_microbatches_are_bounded_and_cut_to_their_longest_row(sizes: list[int], max_tokens: int, extra: int) -> None:
    for part in microbatches(of_lengths(sizes, extra), max_tokens=max_tokens):
        longest = max(1, int(lengths(part).max()))
        assert part["input_ids"].shape == part["attention_mask"].shape == (len(part), longest)
        assert len(part) * longest <= max_tokens


@quick
@given(pair_lengths, st.integers(18, 60))
def test_a_pair_counts_as_its_two_rows(sizes: list[tuple[int, int]], max_tokens: int) -> None:
    for part in microbatches(of_pairs(sizes), max_tokens=max_tokens):
        assert part["input_ids"].numel() <= max_tokens
        assert part["input_ids"].shape[-1] == max(1, int(lengths(part).max()))


def test_microbatches_without_a_mask_have_the_whole_width() -> None:
    batch = Batch({"input_ids": torch.arange(12).view(3, 4)}, batch_size=[3])
    parts = microbatches(batch, max_tokens=8)
    assert [part["input_ids"].shape for part in parts] == [(2, 4), (1, 4)]
    assert parts.restore([part["input_ids"] for part in parts]).equal(batch["input_ids"])


def test_microbatches_cut_every_column_per_token_and_no_other() -> None:
    nrl.declare(mine="token", four="row")
    mask = torch.tensor([[True, True, False, False]])
    batch = Batch(
        {
            "input_ids": mask.long(),
            "attention_mask": mask,
            "advantages": torch.ones(1, 4),
            "mine": torch.ones(1, 4, 3),
            "rewards": torch.ones(1, 4),
            "four": torch.ones(1, 4),
            "row": torch.ones(1),
        },
        batch_size=[1],
    )
    (part,) = microbatches(batch, max_tokens=4)
    assert {name: tuple(part[name].shape) for name in batch.keys()} == {
        "input_ids": (1, 2),
        "attention_mask": (1, 2),
        "advantages": (1, 2),
        "mine": (1, 2, 3),
        "rewards": (1, 4),
        "four": (1, 4),
        "row": (1,),
    }


def test_microbatches_of_no_rows() -> None:
    assert microbatches(of_lengths([1])[:0], max_tokens=4) == []


def test_a_row_that_fits_in_no_microbatch() -> None:
    message = "microbatches: row 1 has 5 tokens, more than max_tokens=4; raise max_tokens, or leave out rows that long"
    with pytest.raises(BatchError, match=message):
        microbatches(of_lengths([3, 5, 4]), max_tokens=4)


def test_a_pair_that_fits_in_no_microbatch() -> None:
    with pytest.raises(BatchError, match="row 0 has 6 tokens, more than max_tokens=5"):
        microbatches(of_pairs([(1, 3)]), max_tokens=5)


# --- minibatches


@quick
@given(row_lengths, st.data())
def test_minibatches_are_a_partition_into_like_numbers_of_rows(sizes: list[int], data: st.DataObject) -> None:
    n = data.draw(st.integers(1, len(sizes)))
    parts = minibatches(of_lengths(sizes), n, seed=data.draw(st.integers(0, 5)))
    assert len(parts) == n
    assert sorted(number for part in parts for number in rows_of(part)) == list(range(len(sizes)))
    counts = [len(part) for part in parts]
    assert max(counts) - min(counts) <= 1
    assert all(part.is_locked for part in parts)
    assert all(part["media", "pixels"][:, 0].tolist() == rows_of(part) for part in parts)


def test_minibatches_are_a_function_of_the_seed_alone() -> None:
    batch = of_lengths([1] * 12)

    def split(seed: int) -> list[list[int]]:
        return [rows_of(part) for part in minibatches(batch, 3, seed)]

    first = split(0)
    torch.rand(7)
    assert split(0) == first
    assert split(1) != first
    assert first != [list(range(4)), list(range(4, 8)), list(range(8, 12))]


def test_minibatches_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    minibatches(of_lengths([1, 2]), 2, seed=0)
    assert torch.get_rng_state().equal(before)


def test_minibatches_keep_pairs_whole() -> None:
    parts = minibatches(of_pairs([(1, 2), (3, 4), (5, 6)]), 2, seed=0)
    assert sorted(part.batch_size for part in parts) == [(1, 2), (2, 2)]


@quick
@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.data())
def test_minibatches_keep_episodes_whole(episodes: list[int], data: st.DataObject) -> None:
    batch = assign(of_lengths([1] * len(episodes)), episode_ids=7 * torch.tensor(episodes))
    n = data.draw(st.integers(1, len(set(episodes))))
    parts = minibatches(batch, n, seed=data.draw(st.integers(0, 5)))
    assert sorted(number for part in parts for number in rows_of(part)) == list(range(len(episodes)))
    sets = [set(part["episode_ids"].tolist()) for part in parts]
    assert sum(map(len, sets)) == len(set(episodes))
    assert max(map(len, sets)) - min(map(len, sets)) <= 1


def test_minibatches_of_episodes_of_one_row_are_those_of_rows() -> None:
    batch = of_lengths([1] * 12)
    numbered = assign(batch, episode_ids=torch.arange(12).flip(0))
    for seed in range(3):
        plain = [rows_of(part) for part in minibatches(batch, 5, seed)]
        assert [rows_of(part) for part in minibatches(numbered, 5, seed)] == plain
        order = torch.randperm(12, generator=torch.Generator().manual_seed(seed)).tolist()
        assert [number for part in plain for number in part] == order


def test_episodes_take_any_place_among_minibatches() -> None:
    """However many rows an episode has: it would come first too often if its first row decided."""
    batch = assign(of_lengths([1] * 8), episode_ids=torch.tensor([3, 3, 3, 3, 3, 3, 3, 1]))
    sizes = [len(minibatches(batch, 2, seed)[0]) for seed in range(40)]
    assert 10 <= sizes.count(7) <= 30
    assert sizes.count(7) + sizes.count(1) == 40


def test_pairs_are_no_episodes() -> None:
    pairs = assign(of_pairs([(1, 2), (3, 4)]), episode_ids=torch.tensor([[1, 1], [1, 1]]))
    assert len(minibatches(pairs, 2, seed=0)) == 2


def test_there_are_at_most_as_many_minibatches_as_episodes() -> None:
    batch = assign(of_lengths([1, 2, 3]), episode_ids=torch.tensor([5, 6, 5]))
    with pytest.raises(BatchError, match="minibatches: n is 3; it must be between 1 and the number of episodes, 2"):
        minibatches(batch, 3, seed=0)


@pytest.mark.parametrize("n", [0, -1, 4])
def test_there_are_at_most_as_many_minibatches_as_rows(n: int) -> None:
    message = f"minibatches: n is {n}; it must be between 1 and the number of rows, 3"
    with pytest.raises(BatchError, match=message):
        minibatches(of_lengths([1, 2, 3]), n, seed=0)


# --- restore


def test_restore_by_hand() -> None:
    rows = [torch.tensor([2, 0]), torch.tensor([1])]
    assert restore(rows, [torch.tensor([[30.0], [10.0]]), torch.tensor([[20.0]])]).tolist() == [[10], [20], [30]]


def test_restore_lets_gradients_through() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    restore([torch.tensor([1, 0])], [3 * x])[0].backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 3]


@pytest.mark.parametrize("parts", [1, 2])
def test_what_is_restored_shares_no_memory_with_the_parts(parts: int) -> None:
    whole = Batch({"x": torch.arange(4.0), "nested": Batch({"y": torch.arange(8).view(4, 2)}, batch_size=[4])}, [4])
    rows = list(torch.arange(4).tensor_split(parts))
    pieces = [whole[int(index[0]) : int(index[-1]) + 1] for index in rows]  # views
    found = restore(rows, pieces)
    assert bool((found == whole).all())
    assert found.is_locked
    for key in ("x", ("nested", "y")):
        assert found[key].untyped_storage().data_ptr() != whole[key].untyped_storage().data_ptr()
    alone = restore(rows, [piece["x"] for piece in pieces])
    assert alone.untyped_storage().data_ptr() != whole["x"].untyped_storage().data_ptr()


def test_parts_of_different_dtypes_are_restored_as_torch_joins_them() -> None:
    rows = [torch.tensor([1]), torch.tensor([0])]
    found = restore(rows, [torch.tensor([1]), torch.tensor([0.5])])
    assert found.dtype == torch.float32
    assert found.tolist() == [0.5, 1.0]
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        restore(rows, [torch.zeros(1, 2), torch.zeros(1, 3)])


def test_rows_are_dealt_as_a_batch_is_sharded() -> None:
    batch = of_lengths([1, 8, 2, 7, 3])
    assert [rows.tolist() for rows in deal(batch, 3)] == [rows.tolist() for rows in shard(batch, 3).rows]
    with pytest.raises(BatchError, match="shard: n is 0; it must be at least 1"):
        deal(batch, 0)


@pytest.mark.parametrize(
    ("output", "found"),
    [(torch.zeros(3), r"\[3\]"), (torch.tensor(1.0), r"\[\]"), (1.0, "float"), ([1, 2], "list")],
)
def test_restore_needs_an_entry_for_each_row(output: object, found: str) -> None:
    message = f"my_fn: the part has 2 rows, but what was computed on it is {found}; return one entry for each row"
    with pytest.raises(BatchError, match=message):
        restore([torch.tensor([0, 1])], [output], caller="my_fn")


def test_nothing_to_put_together() -> None:
    with pytest.raises(BatchError, match="restore: there are no parts to put together"):
        restore([], [])
