import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nrl import ahead, batched, drop_uniform, filtered, fresh
from nrl.batch import Batch, concatenate
from nrl.data import Source, Stream, counting
from nrl.errors import DataError, MissingColumn, NotFinite

quick = settings(max_examples=60)


class Now:
    """A version that the test moves."""

    def __init__(self, version: int = 0) -> None:
        self.version = version


def group(rewards: Sequence[float], valid: Sequence[bool] | None = None, version: int = 0, number: int = 0) -> Batch:
    """A group of answers with these rewards; ``number`` tells which it is."""
    size = len(rewards)
    columns = {
        "input_ids": torch.zeros(size, 2, dtype=torch.int64),
        "rewards": torch.tensor(rewards),
        "version": torch.full((size,), version),
        "group_ids": torch.full((size,), number),
    }
    if valid is not None:
        columns["valid"] = torch.tensor(valid)
    batch = Batch(columns, batch_size=[size])
    batch.lock_()
    return batch


def numbers(groups: Sequence[Batch]) -> list[int]:
    return [int(number) for one in groups for number in one["group_ids"].unique()]


def carried(groups: Sequence[Batch]) -> list[tuple[int, float]]:
    return [(int(one["dropped"].sum()), float(one["dropped_rewards"].sum())) for one in groups]


def watched[T](stream: Stream[T]) -> tuple[Source[T], list[int]]:
    """The stream, and how many items each pull asked it for."""
    asked: list[int] = []

    def take(n: int) -> list[T]:
        asked.append(n)
        return stream.take(n)

    return Source(take, stream.state, stream.restore), asked


def listed(*rewards: Sequence[float]) -> Source[Batch]:
    """A stream of groups with these rewards, one after the other."""
    return counting(lambda index: group(rewards[index], number=index))


SAME, MIXED = [1.0, 1.0], [0.0, 1.0]


# --- counting


def test_counting_counts() -> None:
    stream = counting()
    assert stream.take(2) == [0, 1]
    assert stream.take(0) == []
    assert stream.take(3) == [2, 3, 4]
    assert stream.state() == {"cursor": 5}


def test_counting_continues_from_a_state() -> None:
    stream = counting(lambda index: index**2)
    state = stream.state()
    assert stream.take(3) == [0, 1, 4]
    stream.restore({"cursor": 2})
    assert stream.take(2) == [4, 9]
    stream.restore(state)
    assert stream.take(1) == [0]


def test_counting_makes_nothing_that_was_not_asked_for() -> None:
    made: list[int] = []
    stream = counting(made.append)
    assert made == []
    stream.take(2)
    assert made == [0, 1]


# --- batched


def test_batched_asks_for_a_batch_at_once() -> None:
    source, asked = watched(counting())
    stream = batched(source, 3, collate=tuple)  # type: ignore[arg-type]
    assert stream.take(2) == [(0, 1, 2), (3, 4, 5)]
    assert asked == [3, 3]
    assert stream.take(0) == []
    assert stream.state() == {"cursor": 6}


def test_batched_puts_groups_under_one_another() -> None:
    (batch,) = batched(listed(MIXED, SAME), 2).take(1)
    assert batch["rewards"].tolist() == [0, 1, 1, 1]
    assert batch["group_ids"].tolist() == [0, 0, 1, 1]
    assert batch.is_locked


@pytest.mark.parametrize("n", [0, -1])
def test_a_batch_has_an_item(n: int) -> None:
    with pytest.raises(DataError, match=f"batched: n is {n}; a batch needs at least one item"):
        batched(counting(), n)


# --- drop_uniform


def test_drop_uniform_keeps_groups_that_teach_something() -> None:
    stream = drop_uniform(listed(MIXED, SAME, [0.0, 0.0], [1.0, 1.0, 0.0], MIXED))
    kept = stream.take(3)
    assert numbers(kept) == [0, 3, 4]
    assert all(one.is_locked for one in kept)


def test_drop_uniform_asks_exactly_for_what_is_missing() -> None:
    source, asked = watched(listed(MIXED, SAME, SAME, MIXED, SAME, MIXED, SAME, MIXED))
    drop_uniform(source).take(4)
    assert asked == [4, 2, 1, 1]
    assert source.state() == {"cursor": 8}


def test_drop_uniform_asks_for_nothing_when_nothing_is_wanted() -> None:
    source, asked = watched(listed())
    assert drop_uniform(source).take(0) == []
    assert asked == []


def test_what_was_dropped_is_carried_by_the_next_group_that_is_kept() -> None:
    kept = drop_uniform(listed(MIXED, SAME, [2.0, 2.0, 2.0], MIXED, MIXED)).take(3)
    assert carried(kept) == [(0, 0.0), (5, 8.0), (0, 0.0)]
    assert [one["dropped"].dtype for one in kept] == [torch.int64] * 3
    whole = concatenate(kept)
    assert (int(whole["dropped"].sum()), float(whole["dropped_rewards"].sum())) == (5, 8.0)


@quick
@given(st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=3), max_size=12), st.integers(1, 4))
def test_no_row_and_no_reward_is_lost(groups: list[list[float]], n: int) -> None:
    rewards = [*groups, *[MIXED] * 8]
    kept = drop_uniform(source := listed(*rewards)).take(n)
    assert numbers(kept) == [i for i, one in enumerate(rewards) if len(set(one)) > 1][:n]
    seen = rewards[: source.state()["cursor"]]
    assert sum(len(one) for one in kept) + sum(rows for rows, _ in carried(kept)) == sum(map(len, seen))
    assert float(sum(one["rewards"].sum() for one in kept)) + sum(r for _, r in carried(kept)) == sum(map(sum, seen))


@pytest.mark.parametrize(
    ("rewards", "valid"),
    [
        ([1.0, 1.0, 0.0], [True, True, False]),
        ([1.0, 1.0, torch.nan], [True, True, False]),
        ([1.0, 0.0, 0.0], [True, False, False]),
        ([1.0, 0.0, 0.5], [False, False, False]),
    ],
    ids=["equal", "nan", "one valid row", "no valid row"],
)
def test_rows_that_are_not_valid_do_not_count(rewards: list[float], valid: list[bool]) -> None:
    groups = [group(rewards, valid), group(MIXED, number=1)]
    kept = drop_uniform(counting(groups.__getitem__)).take(1)
    assert numbers(kept) == [1]
    assert carried(kept) == [(sum(valid), sum(r for r, v in zip(rewards, valid, strict=True) if v))]


def test_valid_rows_that_differ_are_kept_with_those_that_are_not_valid() -> None:
    kept = drop_uniform(counting([group([0.0, torch.nan, 1.0], [True, False, True])].__getitem__)).take(1)
    assert len(kept[0]) == 3


def test_a_group_of_one_row_is_uniform() -> None:
    kept = drop_uniform(listed([1.0], MIXED)).take(1)
    assert numbers(kept) == [1]
    assert carried(kept) == [(1, 1.0)]


def test_several_rewards_are_equal_if_all_of_them_are() -> None:
    def several(rewards: list[list[float]]) -> Batch:
        return Batch({"input_ids": torch.zeros(2, 2).long(), "rewards": torch.tensor(rewards)}, batch_size=[2])

    groups = [several([[1.0, 0.0], [1.0, 0.0]]), several([[1.0, 0.0], [1.0, 1.0]])]
    (kept,) = drop_uniform(counting(groups.__getitem__)).take(1)
    assert kept["rewards"].tolist() == [[1, 0], [1, 1]]
    assert carried([kept]) == [(2, 2.0)]


def test_rewards_that_are_equal_in_floating_point_are_equal() -> None:
    with pytest.raises(DataError):
        drop_uniform(counting(lambda _: group([0.1 + 0.2] * 4)), patience=2).take(1)


def test_patience_ends() -> None:
    source, asked = watched(counting(lambda _: group(SAME)))
    message = r"drop_uniform: 3 draws in a row \(6 groups\) had equal rewards or failed throughout.*use other tasks"
    with pytest.raises(DataError, match=message):
        drop_uniform(source, patience=3).take(2)
    assert asked == [2, 2, 2]


def test_patience_is_for_draws_in_a_row() -> None:
    rewards = [SAME, SAME, MIXED, SAME, SAME, SAME, MIXED]
    assert numbers(drop_uniform(listed(*rewards), patience=3).take(2)) == [2, 6]
    one_more = [MIXED, SAME, SAME, SAME, SAME, MIXED]
    with pytest.raises(DataError, match="3 draws in a row"):
        drop_uniform(listed(*one_more), patience=3).take(2)


@pytest.mark.parametrize("patience", [0, -1])
def test_patience_is_positive(patience: int) -> None:
    with pytest.raises(DataError, match=f"drop_uniform: patience is {patience}"):
        drop_uniform(listed(MIXED), patience=patience)


def test_drop_uniform_needs_rewards() -> None:
    batch = Batch({"input_ids": torch.zeros(2, 2).long()}, batch_size=[2])
    with pytest.raises(MissingColumn, match="drop_uniform reads the column 'rewards'"):
        drop_uniform(counting(lambda _: batch)).take(1)


def test_groups_stay_as_they_were() -> None:
    one = group(MIXED)
    drop_uniform(counting(lambda _: one)).take(1)
    assert "dropped" not in one.keys()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("others", [[1.0, 1.0], [0.0, 1.0], [torch.nan]])
def test_a_reward_that_could_not_be_computed_is_refused(bad: float, others: list[float]) -> None:
    with pytest.raises(NotFinite, match=r"drop_uniform: rewards is NaN or infinite in .* valid rows .*mark these rows"):
        drop_uniform(listed([*others, bad])).take(1)


def test_one_of_several_rewards_that_could_not_be_computed_is_refused() -> None:
    rewards = torch.tensor([[1.0, torch.nan], [0.0, 1.0]])
    batch = Batch({"input_ids": torch.zeros(2, 2).long(), "rewards": rewards}, batch_size=[2])
    with pytest.raises(NotFinite, match=r"drop_uniform: .* 1 valid rows \(0\)"):
        drop_uniform(counting(lambda _: batch)).take(1)


# --- filtered


def solved(batch: Batch) -> bool:
    return bool((batch["rewards"] > 0).any())


def test_filtered_keeps_what_the_predicate_lets_through_and_asks_for_the_rest() -> None:
    source, asked = watched(listed(MIXED, [0.0, 0.0], SAME, [0.0, -1.0], [-1.0], MIXED))
    kept = filtered(source, solved).take(3)
    assert numbers(kept) == [0, 2, 5]
    assert asked == [3, 1, 1, 1]
    assert carried(kept) == [(0, 0.0), (2, 0.0), (3, -2.0)]


def test_filtered_carries_what_others_carried() -> None:
    kept = filtered(drop_uniform(listed(SAME, MIXED, MIXED, SAME, [0.0, 2.0])), lambda one: one["rewards"].max() > 1)
    assert carried(kept.take(1)) == [(8, 6.0)]


def test_filtered_works_without_rewards() -> None:
    stream = counting(lambda index: Batch({"input_ids": torch.full((1, 2), index)}, batch_size=[1]))
    (kept,) = filtered(stream, lambda one: int(one["input_ids"][0, 0]) == 2).take(1)
    assert (int(kept["dropped"].sum()), float(kept["dropped_rewards"].sum())) == (2, 0.0)


def test_the_patience_of_a_filter_ends() -> None:
    message = r"filtered: solved let nothing through in 3 draws in a row \(6 items\); ask for less"
    with pytest.raises(DataError, match=message):
        filtered(counting(lambda _: group([0.0])), solved, patience=3).take(2)
    with pytest.raises(DataError, match="filtered: patience is 0; it must be at least 1"):
        filtered(listed(MIXED), solved, patience=0)


# --- fresh


def test_fresh_drops_what_is_too_old_and_pulls_others() -> None:
    source, asked = watched(counting(lambda index: group(MIXED, version=index, number=index)))
    kept = fresh(source, 1, Now(5)).take(3)
    assert numbers(kept) == [4, 5, 6]
    assert asked == [3, 3, 1]
    assert carried(kept) == [(8, 4.0), (0, 0.0), (0, 0.0)]
    assert all(one.is_locked for one in kept)


def test_the_oldest_row_counts() -> None:
    mixed = Batch({"version": torch.tensor([5, 3]), "rewards": torch.zeros(2), "group_ids": torch.tensor([0, 0])}, [2])
    stream = counting([mixed, group(MIXED, version=4, number=1)].__getitem__)
    assert numbers(fresh(stream, 1, Now(5)).take(1)) == [1]


def test_fresh_reads_the_version_when_it_is_pulled() -> None:
    now = Now(0)
    stream = fresh(counting(lambda index: group(MIXED, version=index, number=index)), 0, now)
    assert numbers(stream.take(1)) == [0]
    now.version = 3
    assert numbers(stream.take(1)) == [3]


def test_fresh_carries_what_others_carried() -> None:
    rewards = [SAME, MIXED, SAME, MIXED]
    versions = [0, 0, 5, 5]
    source = counting(lambda index: group(rewards[index], version=versions[index], number=index))
    kept = fresh(drop_uniform(source), 0, Now(5)).take(1)
    assert numbers(kept) == [3]
    assert carried(kept) == [(6, 5.0)]


def test_fresh_works_without_rewards() -> None:
    plain = counting(lambda index: Batch({"version": torch.tensor([index])}, batch_size=[1]))
    (kept,) = fresh(plain, 0, Now(2)).take(1)
    assert carried([kept]) == [(2, 0.0)]


def test_fresh_takes_preference_batches() -> None:
    pairs = counting(lambda index: Batch({"version": torch.full((1, 2), index)}, batch_size=[1, 2]))
    (kept,) = fresh(pairs, 0, Now(1)).take(1)
    assert kept["version"].tolist() == [[1, 1]]
    assert int(kept["dropped"].sum()) == 2


def test_fresh_needs_versions() -> None:
    with pytest.raises(MissingColumn, match="fresh reads the column 'version'"):
        fresh(counting(lambda _: Batch({"rewards": torch.zeros(1)}, batch_size=[1])), 0, Now()).take(1)


def test_a_lag_is_not_negative() -> None:
    with pytest.raises(DataError, match="fresh: lag is -1; it must not be negative"):
        fresh(counting(), -1, Now())


# --- ahead


@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_the_lag_is_exactly_the_smaller_of_the_pull_and_n(n: int) -> None:
    now = Now()
    stream = ahead(counting(lambda _: now.version), n)
    for k in range(12):
        (sampled,) = stream.take(1)
        assert now.version - sampled == min(k, n)
        now.version += 1


def test_the_lag_is_at_most_n_whatever_is_pulled() -> None:
    now = Now()
    stream = ahead(counting(lambda _: now.version), 2)
    for count in (1, 3, 0, 2, 1, 1):
        assert all(0 <= now.version - sampled <= 2 for sampled in stream.take(count))
        now.version += 1


@pytest.mark.parametrize("n", [0, 1, 3])
def test_nothing_is_made_that_was_not_asked_for(n: int) -> None:
    made: list[int] = []
    stream = ahead(counting(lambda index: made.append(index) or index), n)  # type: ignore[func-returns-value]
    assert made == []
    assert stream.take(0) == []
    assert made == []
    for k in range(5):
        assert stream.take(1) == [k]
        assert made == list(range(k + 1 + n))


def test_with_no_lag_the_loop_is_synchronous() -> None:
    source, asked = watched(counting())
    stream = ahead(source, 0)
    assert stream.take(3) == [0, 1, 2]
    assert asked == [1, 1, 1]
    assert stream.state() == {"source": {"cursor": 3}, "pending": []}


def test_ahead_is_not_negative() -> None:
    with pytest.raises(DataError, match="ahead: n is -1; it must not be negative"):
        ahead(counting(), -1)


def test_what_is_pending_is_saved_with_the_versions_that_it_had() -> None:
    now = Now()

    def make() -> Source[tuple[int, int]]:
        return ahead(counting(lambda index: (index, now.version)), 2)

    stream = make()
    for _ in range(3):
        stream.take(1)
        now.version += 1
    state = copy.deepcopy(stream.state())
    assert state == {"source": {"cursor": 5}, "pending": [(3, 1), (4, 2)]}
    resumed = make()
    resumed.restore(state)
    expected = []
    for step in range(4):
        now.version = 3 + step
        expected += stream.take(1)
    actual = []
    for step in range(4):
        now.version = 3 + step
        actual += resumed.take(1)
    assert actual == expected
    assert [index for index, _ in actual] == [3, 4, 5, 6]


def test_a_state_is_not_changed_by_what_happens_later() -> None:
    stream = ahead(counting(), 2)
    stream.take(1)
    state = stream.state()
    stream.take(3)
    assert state == {"source": {"cursor": 3}, "pending": [1, 2]}
    stream.restore(state)
    assert stream.take(1) == [1]
    assert state == {"source": {"cursor": 3}, "pending": [1, 2]}


# --- compositions


def mixture(index: int) -> Batch:
    """Every third group teaches something."""
    return group(MIXED if index % 3 == 2 else [float(index)] * 2, version=index, number=index)


COMPOSITIONS: dict[str, Callable[[], Source[Batch]]] = {
    "batched": lambda: batched(counting(mixture), 3),
    "drop_uniform": lambda: drop_uniform(counting(mixture)),
    "filtered": lambda: filtered(counting(mixture), solved),
    "fresh": lambda: fresh(counting(mixture), 0, Now(2)),
    "ahead": lambda: ahead(counting(mixture), 2),
    "batched(drop_uniform)": lambda: batched(drop_uniform(counting(mixture)), 2),
    "ahead(batched(drop_uniform))": lambda: ahead(batched(drop_uniform(counting(mixture)), 2), 2),
    "fresh(ahead(batched))": lambda: fresh(ahead(batched(counting(mixture), 2), 1), 3, Now(3)),
    "batched(fresh(ahead))": lambda: batched(fresh(ahead(counting(mixture), 3), 1, Now(3)), 2),
    "ahead(ahead)": lambda: ahead(ahead(counting(mixture), 1), 2),
}


def plain(batches: Sequence[Batch]) -> list[Mapping[str, Any]]:
    return [{str(key): value.tolist() for key, value in batch.items()} for batch in batches]


@pytest.mark.parametrize("make", COMPOSITIONS.values(), ids=COMPOSITIONS.keys())
@pytest.mark.parametrize("consumed", [0, 1, 4])
def test_a_composition_continues_exactly_from_its_state(make: Callable[[], Source[Batch]], consumed: int) -> None:
    stream = make()
    for _ in range(consumed):
        stream.take(1)
    state = copy.deepcopy(stream.state())
    expected = plain(stream.take(3))
    resumed = make()
    resumed.take(2)
    resumed.restore(state)
    assert plain(resumed.take(3)) == expected
    stream.restore(state)
    assert plain(stream.take(3)) == expected


def test_a_batch_of_groups_that_teach_something() -> None:
    source, asked = watched(counting(mixture))
    first, second = batched(drop_uniform(source), 2).take(2)
    assert first["group_ids"].tolist() == [2, 2, 5, 5]
    assert second["group_ids"].tolist() == [8, 8, 11, 11]
    assert carried([first, second]) == [(8, 2.0 * (0 + 1 + 3 + 4)), (8, 2.0 * (6 + 7 + 9 + 10))]
    assert asked == [2, 2, 1, 1, 2, 2, 1, 1]


def test_a_lag_of_batches_of_groups_that_teach_something() -> None:
    now = Now()
    source = counting(lambda index: group(MIXED if index % 2 else SAME, version=now.version, number=index))
    stream = ahead(batched(drop_uniform(source), 2), 1)
    for k in range(5):
        (batch,) = stream.take(1)
        assert (now.version - batch["version"]).unique().tolist() == [min(k, 1)]
        assert batch["group_ids"].unique().tolist() == [4 * k + 1, 4 * k + 3]
        now.version += 1
