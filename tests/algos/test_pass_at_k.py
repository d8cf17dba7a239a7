"""pass@k and majority: by hand, and against all subsets and all draws."""

import math
from collections import Counter
from fractions import Fraction
from itertools import combinations
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nrl.algos import majority, pass_at_k
from nrl.batch.metrics import Mean, Metrics, finalize, merge
from nrl.errors import BatchError

BITS = st.lists(st.booleans(), min_size=1, max_size=8)
GROUPS = st.lists(BITS, min_size=1, max_size=4)


def rows(groups: list[list[bool]]) -> tuple[torch.Tensor, torch.Tensor]:
    ids = [number for number, group in enumerate(groups) for _ in group]
    return torch.tensor([bit for group in groups for bit in group]), torch.tensor(ids)


def read(mean: Mean) -> float:
    return finalize({"x": mean})["x"]


# --- pass@k


@pytest.mark.parametrize(
    ("passed", "k", "expected"),
    [
        ([1, 0, 0, 0], 1, 1 / 4),
        ([1, 0, 0, 0], 2, 1 / 2),  # 3 of the 6 pairs hold the first row
        ([0, 1, 0, 1], 2, 5 / 6),  # all pairs but one
        ([0, 1, 0, 1], 3, 1.0),
        ([0, 0, 0, 0], 4, 0.0),
        ([1], 1, 1.0),
        ([1, 1, 1], 2, 1.0),
        ([0, 0, 1, 0, 0], 4, 4 / 5),
    ],
)
def test_pass_at_k_of_a_group_by_hand(passed: list[int], k: int, expected: float) -> None:
    found = pass_at_k(torch.tensor(passed).bool(), torch.full((len(passed),), 9), k)
    assert (float(found.total), float(found.weight)) == (expected, 1.0)


def test_groups_of_unequal_size_count_once_and_smaller_ones_than_k_are_left_out() -> None:
    passed, ids = rows([[True, False], [True, False, False, False], [True]])
    assert read(pass_at_k(passed, ids, 1)) == pytest.approx((1 / 2 + 1 / 4 + 1) / 3)
    two = pass_at_k(passed, ids, 2)
    assert (float(two.total), float(two.weight)) == (1 + 1 / 2, 2.0)
    assert math.isnan(read(pass_at_k(passed, ids, 5)))


@given(BITS, st.data())
def test_pass_at_k_is_the_share_of_subsets_that_pass(passed: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(passed)))
    subsets = list(combinations(passed, k))
    expected = Fraction(sum(map(any, subsets)), len(subsets))
    assert read(pass_at_k(torch.tensor(passed), torch.zeros(len(passed)).long(), k)) == float(expected)


@given(GROUPS, st.integers(1, 8))
def test_pass_at_1_is_the_mean_and_pass_at_k_does_not_fall_with_k(groups: list[list[bool]], most: int) -> None:
    passed, ids = rows(groups)
    means = [sum(group) / len(group) for group in groups]
    assert read(pass_at_k(passed, ids, 1)) == pytest.approx(sum(means) / len(means))
    large = [group for group in groups if len(group) >= most]
    if large:
        found = [read(pass_at_k(*rows(large), k)) for k in range(1, most + 1)]
        assert found == sorted(found)


def test_many_samples_neither_overflow_nor_cancel() -> None:
    passed = torch.zeros(20_000, dtype=torch.bool)
    passed[0] = True
    assert read(pass_at_k(passed, torch.zeros(20_000).long(), 10_000)) == 0.5  # k / n, where one passes
    passed[:] = True
    assert read(pass_at_k(passed, torch.zeros(20_000).long(), 10_000)) == 1.0


def test_it_is_unbiased_where_one_minus_the_power_is_not() -> None:
    """Over all outcomes of 4 samples that pass with probability 1/3, weighted by how probable they are."""
    p, k = Fraction(1, 3), 3
    mean, plain = Fraction(0), Fraction(0)
    for outcome in range(16):
        bits = [bool(outcome >> place & 1) for place in range(4)]
        weight = p ** sum(bits) * (1 - p) ** (4 - sum(bits))
        found = read(pass_at_k(torch.tensor(bits), torch.zeros(4).long(), k))
        mean += weight * Fraction(found).limit_denominator(10)
        plain += weight * (1 - (1 - Fraction(sum(bits), 4)) ** k)
    assert mean == 1 - (1 - p) ** k
    assert plain < mean


# --- majority


@pytest.mark.parametrize(
    ("answers", "right", "expected"),
    [
        (["4", "4", "5"], "4", 1.0),
        (["4", "5", "5"], "4", 0.0),
        (["4", "5"], "4", 1 / 2),  # a tie: one is drawn
        (["4", "5", "6"], "6", 1 / 3),
        (["4", "4", "5", "5", "6"], "5", 1 / 2),
        (["4", "4", "5", "5", "6"], "6", 0.0),
        (["4", None, None], "4", 1.0),  # no answer is no vote
        ([None, None], "4", 0.0),
        (["", ""], "", 1.0),  # an empty text is an answer
        (["4"], "4", 1.0),
    ],
)
def test_majority_of_a_group_by_hand(answers: list[str | None], right: str, expected: float) -> None:
    passed = torch.tensor([answer == right for answer in answers])
    found = majority(passed, torch.full((len(answers),), 3), answers)
    assert (float(found.total), float(found.weight)) == (expected, 1.0)


def test_an_answer_whose_rows_do_not_agree_counts_as_the_share_that_passed() -> None:
    passed = torch.tensor([True, False, True, False])
    assert read(majority(passed, torch.zeros(4).long(), ["a", "a", "a", "b"])) == pytest.approx(2 / 3)


def test_groups_vote_apart_and_count_once() -> None:
    passed, ids = torch.tensor([True, False, False, True, True]), torch.tensor([0, 1, 1, 1, 2])
    found = majority(passed, ids, ["4", "5", "5", "4", "4"])
    assert (float(found.total), float(found.weight)) == (2.0, 3.0)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=7), st.sampled_from("abc"))
def test_majority_is_the_mean_over_the_most_frequent(answers: list[str], right: str) -> None:
    counts = Counter(answers)
    first = [answer for answer, count in counts.items() if count == max(counts.values())]
    passed = torch.tensor([answer == right for answer in answers])
    assert read(majority(passed, torch.zeros(len(answers)).long(), answers)) == pytest.approx(
        sum(answer == right for answer in first) / len(first)
    )


# --- both


@given(GROUPS, st.randoms())
def test_the_order_of_rows_does_not_matter(groups: list[list[bool]], random: Random) -> None:
    passed, ids = rows(groups)
    answers: list[str | None] = [("right" if bit else None) for bit in passed.tolist()]
    order = list(range(len(passed)))
    random.shuffle(order)
    assert pass_at_k(passed[order], ids[order], 2) == pass_at_k(passed, ids, 2)
    assert majority(passed[order], ids[order], [answers[row] for row in order]) == majority(passed, ids, answers)


@given(GROUPS, GROUPS, st.integers(1, 3))
def test_the_sums_of_batches_that_split_no_group_are_those_of_the_whole(
    first: list[list[bool]], second: list[list[bool]], k: int
) -> None:
    def both(groups: list[list[bool]]) -> Metrics:
        passed, ids = rows(groups)
        return {"pass": pass_at_k(passed, ids, k), "maj": majority(passed, ids, passed.tolist())}

    merged = finalize(merge(both(first), both(second)))
    assert merged == pytest.approx(finalize(both(first + second)), nan_ok=True)


@pytest.mark.parametrize(
    ("passed", "ids", "found"),
    [
        (torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), r"passed is torch.float32 of shape \[2\]"),
        (torch.tensor([True]), torch.tensor([0, 0]), r"of shape \[1\] and group_ids has \[2\]"),
        (torch.tensor([[True]]), torch.tensor([[0]]), r"of shape \[1, 1\]"),
    ],
)
def test_other_rows_are_refused(passed: torch.Tensor, ids: torch.Tensor, found: str) -> None:
    with pytest.raises(BatchError, match=f"pass_at_k: .*{found}"):
        pass_at_k(passed, ids, 1)
    with pytest.raises(BatchError, match=f"majority: .*{found}"):
        majority(passed, ids, [None] * len(passed))


def test_other_numbers_are_refused() -> None:
    passed, ids = torch.tensor([True]), torch.tensor([0])
    with pytest.raises(BatchError, match="pass_at_k: k is 0; it counts samples, so it is at least 1"):
        pass_at_k(passed, ids, 0)
    with pytest.raises(BatchError, match="majority: there are 2 answers for 1 rows; give one a row, or None"):
        majority(passed, ids, ["a", "b"])
