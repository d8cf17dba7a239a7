"""Measures of an evaluation with several samples a task: pass@k, and the majority vote.

Each is a mean over groups, still ``(total, weight)``. If batches split no group, their sums add up to those of the
whole. Rows whose verifier failed say nothing about the policy: leave them out first, as `nrl.measure` does.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from nrl.batch.metrics import Mean
from nrl.errors import BatchError

__all__ = ["majority", "pass_at_k"]


def pass_at_k(passed: Tensor, group_ids: Tensor, k: int) -> Mean:
    """The probability that one of k samples passes, estimated without bias from the n samples of each group.

        pass@k = mean over groups of 1 - C(n - c, k) / C(n, k),   c of the n rows of a group passed

    This is the share of the subsets of k rows that hold a row that passed. Groups may differ in size, and each counts
    once, with its own n. A group of fewer than k rows has no unbiased estimate and is left out; the weight counts the
    groups that were measured. Binomial coefficients are integers here, so nothing overflows or cancels.

    The other estimate of this name, 1 - (1 - c/n)^k, is biased: on average it is too low for k above 1.

    Args:
        passed: ``[B]`` bool.
        group_ids: ``[B]`` int64; in any order, groups of any size.
        k: samples that one may draw, at least 1.

    Returns:
        A mean whose weight is the number of groups of at least k rows.

    Raises:
        BatchError: the shapes are not ``[B]`` and ``[B]``, ``passed`` is not bool, or ``k`` is less than 1.

    Source: Chen et al., 2021, https://arxiv.org/abs/2107.03374, equation 1.

    >>> from nrl.batch.metrics import finalize
    >>> passed = torch.tensor([True, False, False, False, False, False])
    >>> finalize({"pass@2": pass_at_k(passed, torch.tensor([7, 7, 7, 7, 8, 8]), k=2)})
    {'pass@2': 0.25}
    """
    _check("pass_at_k", passed, group_ids)
    if k < 1:
        raise BatchError(f"pass_at_k: k is {k}; it counts samples, so it is at least 1")
    _, group, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    right = torch.zeros_like(sizes).index_add(0, group, passed.to(sizes.dtype))
    counts = [(n, c) for n, c in zip(sizes.tolist(), right.tolist(), strict=True) if n >= k]
    total = math.fsum((math.comb(n, k) - math.comb(n - c, k)) / math.comb(n, k) for n, c in counts)
    return _mean(total, len(counts))


def majority(passed: Tensor, group_ids: Tensor, answers: Sequence[Hashable | None]) -> Mean:
    """Compute the probability that the most frequent answer of a group is right.

        maj = mean over groups of 1/|W| Σ_{a in W} [a passes],   W the most frequent answers of a group

    Rows without an answer have no vote. A tie is a draw between its answers, so the measure takes the mean over them. A
    group in which no row has an answer is wrong. Groups may differ in size, and each counts once. If only some rows of
    an answer passed, the answer counts as their share.

    Args:
        passed: ``[B]`` bool.
        group_ids: ``[B]`` int64; in any order, groups of any size.
        answers: of each row, as a comparable value, for example a text; None: no answer.

    Returns:
        A mean whose weight is the number of groups.

    Raises:
        BatchError: the shapes are not ``[B]`` and ``[B]``, ``passed`` is not bool, or there is not one answer a row.

    Source: self-consistency, Wang et al., 2022, https://arxiv.org/abs/2203.11171, section 2.

    >>> from nrl.batch.metrics import finalize
    >>> passed, answers = torch.tensor([True, False, True, False]), ["42", "41", "42", None]
    >>> finalize({"maj": majority(passed, torch.tensor([0, 0, 0, 0]), answers)})
    {'maj': 1.0}
    """
    _check("majority", passed, group_ids)
    if len(answers) != len(passed):
        raise BatchError(f"majority: there are {len(answers)} answers for {len(passed)} rows; give one a row, or None")
    votes: dict[int, dict[Hashable, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for right, group, answer in zip(passed.tolist(), group_ids.tolist(), answers, strict=True):
        ballots = votes[group]  # a group counts even if nobody votes
        if answer is not None:
            ballots[answer].append(right)
    return _mean(math.fsum(_majority_probability(list(ballots.values())) for ballots in votes.values()), len(votes))


def _majority_probability(ballots: Sequence[Sequence[bool]]) -> float:
    """Return the probability that an answer drawn from the most frequent ones is right."""
    max_votes = max(map(len, ballots), default=0)
    first = [ballot for ballot in ballots if len(ballot) == max_votes]
    return sum(map(sum, first)) / (len(first) * max_votes) if first else 0.0


def _mean(total: float, weight: int) -> Mean:
    return Mean(torch.tensor(total, dtype=torch.float64), torch.tensor(weight, dtype=torch.float64))


def _check(reader: str, passed: Tensor, group_ids: Tensor) -> None:
    if passed.ndim != 1 or passed.shape != group_ids.shape or passed.dtype != torch.bool:
        raise BatchError(
            f"{reader}: passed is {passed.dtype} of shape {list(passed.shape)} and group_ids has "
            f"{list(group_ids.shape)}; give [B] bool, such as rewards >= 1, and the group of each row"
        )
