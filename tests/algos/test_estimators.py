import math

import pytest
import torch
from torch import Tensor

from nrl.algos import (
    GroupFunction,
    advantages,
    discounted_returns,
    from_rewards,
    from_token_rewards,
    gae,
    group_center,
    group_center_batch_std,
    group_normalize,
    leave_one_out,
    max_rl,
    per_group,
    whiten,
)
from nrl.batch import Batch, assign
from nrl.errors import BatchError, ColumnError, MissingColumn, NotFinite

CENTERING = [group_center, group_normalize, leave_one_out, group_center_batch_std]
ALL = [*CENTERING, max_rl]
REWARDS = torch.tensor([1.0, 4.0, 2.0, 0.1, 8.0, 3.0, 0.1, 7.0, 0.1])
GROUPS = torch.tensor([5, -2, 5, 9, -2, 5, 9, 30, 9])  # 5: three, -2: two, 9: three that are equal, 30: one
STD = math.sqrt((143.03 - 25.3**2 / 9) / 8)  # of all nine


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (group_center, [-1.0, -2.0, 0.0, 0.0, 2.0, 1.0, 0.0, 0.0, 0.0]),
        (group_normalize, [-1.0, -1 / math.sqrt(2), 0.0, 0.0, 1 / math.sqrt(2), 1.0, 0.0, 0.0, 0.0]),
        (leave_one_out, [-1.5, -4.0, 0.0, 0.0, 4.0, 1.5, 0.0, 0.0, 0.0]),
        (group_center_batch_std, [-1 / STD, -2 / STD, 0.0, 0.0, 2 / STD, 1 / STD, 0.0, 0.0, 0.0]),
        (max_rl, [-1 / 2, -1 / 3, 0.0, 0.0, 1 / 3, 1 / 2, 0.0, 0.0, 0.0]),
    ],
)
def test_groups_by_hand(fn: GroupFunction, expected: list[float]) -> None:
    assert fn(REWARDS, GROUPS).tolist() == pytest.approx(expected, rel=1e-5)


def slow_std(rewards: Tensor) -> Tensor:
    mean = sum(rewards) / len(rewards)
    return torch.as_tensor(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)).sqrt() + 1e-6


def slow_center(rewards: Tensor) -> Tensor:
    return rewards - sum(rewards) / len(rewards)


def slow_normalize(rewards: Tensor) -> Tensor:
    return slow_center(rewards) / slow_std(rewards)


def slow_leave_one_out(rewards: Tensor) -> Tensor:
    n = len(rewards)
    return torch.stack([rewards[i] - sum(rewards[j] for j in range(n) if j != i) / (n - 1) for i in range(n)])


def slow_max_rl(rewards: Tensor) -> Tensor:
    mean = torch.as_tensor(sum(rewards) / len(rewards))
    return torch.stack([(r - mean) / mean if mean else 0 * r for r in rewards])


def slow_batch_std(rewards: Tensor, groups: Tensor) -> Tensor:
    return per_group(slow_center)(rewards, groups) / slow_std(rewards)


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize(
    ("fn", "slow"),
    [
        (group_center, per_group(slow_center)),
        (group_normalize, per_group(slow_normalize)),
        (leave_one_out, per_group(slow_leave_one_out)),
        (group_center_batch_std, slow_batch_std),
        (max_rl, per_group(slow_max_rl)),
    ],
    ids=lambda fn: getattr(fn, "__name__", ""),
)
def test_groups_by_a_slow_loop(fn: GroupFunction, slow: GroupFunction, binary: bool) -> None:
    torch.manual_seed(0)
    rewards = torch.rand(40, dtype=torch.float64)
    rewards = (rewards < 0.3).double() if binary else rewards
    groups = torch.randint(0, 7, (40,))
    torch.testing.assert_close(fn(rewards, groups), slow(rewards, groups))


@pytest.mark.parametrize("fn", ALL)
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, 1e6 + 0.1])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 11])
def test_equal_rewards_are_exactly_zero(fn: GroupFunction, reward: float, size: int) -> None:
    assert not fn(torch.full((size,), reward), torch.zeros(size, dtype=torch.int64)).any()
    among_others = torch.cat([torch.full((size,), reward), torch.tensor([0.0, 1.0])])
    assert not fn(among_others, torch.tensor([0] * size + [1, 1]))[:size].any()


@pytest.mark.parametrize("fn", CENTERING)
@pytest.mark.parametrize("reward", [0.1, -0.1])
def test_equal_rewards_are_exactly_zero_where_their_mean_is_not_the_reward(fn: GroupFunction, reward: float) -> None:
    rewards = torch.full((3,), reward, dtype=torch.float64)
    assert rewards.sum() / 3 != reward
    assert not fn(rewards, torch.zeros(3, dtype=torch.int64)).any()


def test_means_of_groups_are_in_float64() -> None:
    rewards = torch.tensor([1e8, 1e8 + 8, 1e8 + 40])
    assert group_center(rewards, torch.zeros(3, dtype=torch.int64)).tolist() == [-16, -8, 24]


@pytest.mark.parametrize("fn", ALL)
def test_row_order_does_not_matter(fn: GroupFunction) -> None:
    order = torch.tensor([3, 8, 0, 1, 7, 2, 5, 4, 6])
    torch.testing.assert_close(fn(REWARDS[order], GROUPS[order]), fn(REWARDS, GROUPS)[order])


@pytest.mark.parametrize("fn", CENTERING)
def test_a_large_offset_costs_no_precision(fn: GroupFunction) -> None:
    shifted = REWARDS.double() + 1e6
    torch.testing.assert_close(fn(shifted, GROUPS), fn(REWARDS.double(), GROUPS), rtol=1e-8, atol=1e-8)


def test_leave_one_out_is_centring_times_n_over_n_minus_one() -> None:
    n = torch.tensor([3, 2, 3, 3, 2, 3, 3, 1, 3])
    expected = group_center(REWARDS, GROUPS) * n / (n - 1).clamp(min=1)
    torch.testing.assert_close(leave_one_out(REWARDS, GROUPS), expected)


@pytest.mark.parametrize("fn", [*ALL, per_group(lambda rewards: rewards * 2)])
def test_group_dtypes_and_no_rows(fn: GroupFunction) -> None:
    assert fn(REWARDS, GROUPS).dtype == torch.float32
    assert fn(REWARDS.double(), GROUPS).dtype == torch.float64
    assert fn(torch.tensor([1, 0]), torch.tensor([0, 0])).dtype == torch.float32
    assert fn(REWARDS[:0], GROUPS[:0]).shape == (0,)


@pytest.mark.parametrize("fn", ALL)
def test_group_shapes_are_checked(fn: GroupFunction) -> None:
    name = getattr(fn, "__name__", "")
    with pytest.raises(BatchError, match=rf"{name}: rewards has shape \[9\] and group_ids \[3\]"):
        fn(REWARDS, GROUPS[:3])
    with pytest.raises(BatchError, match=rf"{name}: rewards has shape \[9, 1\]"):
        fn(REWARDS[:, None], GROUPS[:, None])


def test_per_group_gives_each_group_alone_and_in_order() -> None:
    seen = []

    def ranks(rewards: Tensor) -> Tensor:
        seen.append(rewards.tolist())
        return torch.arange(len(rewards)).float()

    found = per_group(ranks)(torch.tensor([4.0, 1.0, 3.0, 2.0, 0.0]), torch.tensor([1, 0, 1, 0, 1]))
    assert seen == [[1, 2], [4, 3, 0]]
    assert found.tolist() == [0, 0, 1, 1, 2]


def test_per_group_checks_shapes() -> None:
    def shrinking(rewards: Tensor) -> Tensor:
        return rewards[:1]

    with pytest.raises(
        BatchError, match=r"per_group\(shrinking\): the function got 3 rewards of group 5 .* shape \[1\]"
    ):
        per_group(shrinking)(torch.ones(3), torch.tensor([5, 5, 5]))
    with pytest.raises(BatchError, match=r"per_group\(shrinking\): rewards has shape"):
        per_group(shrinking)(torch.ones(3), torch.tensor([5]))


def make_batch(rewards: list[float], groups: list[int], **columns: Tensor) -> Batch:
    rows = len(rewards)
    mask = torch.tensor([False, True, True, False]).repeat(rows, 1)
    given = {"rewards": torch.tensor(rewards), "group_ids": torch.tensor(groups), "loss_mask": mask}
    return Batch({**given, **columns}, batch_size=[rows])


def test_from_rewards_spreads_over_the_mask() -> None:
    found = from_rewards(group_center)(make_batch([1.0, 3.0, 9.0], [0, 0, 1]))
    assert found.tolist() == [[0, -1, -1, 0], [0, 1, 1, 0], [0, 0, 0, 0]]
    assert found.dtype == torch.float32


def test_from_rewards_leaves_out_invalid_rows() -> None:
    valid = torch.tensor([True, False, True, True])
    found = from_rewards(group_center)(make_batch([1.0, math.nan, 3.0, 5.0], [0, 0, 0, 0], valid=valid))
    assert found[:, 1].tolist() == [-2, 0, 0, 2]
    assert not from_rewards(group_center)(make_batch([math.nan], [0], valid=torch.tensor([False]))).any()


def test_from_rewards_counts_an_episode_once() -> None:
    episodes = torch.tensor([7, 3, 7, 7, 1])
    found = from_rewards(group_center)(make_batch([6.0, 0.0, 6.0, 6.0, 3.0], [0, 0, 0, 0, 0], episode_ids=episodes))
    assert found[:, 1].tolist() == [3, -3, 3, 3, 0]
    unknown = from_rewards(group_center)(make_batch([6.0, 0.0, 6.0, 6.0, 3.0], [0, 0, 0, 0, 0]))
    assert unknown[:, 1].tolist() == pytest.approx([1.8, -4.2, 1.8, 1.8, -1.2])


def test_from_rewards_counts_an_episode_with_an_invalid_row_through_its_others() -> None:
    columns = {"episode_ids": torch.tensor([4, 4, 2]), "valid": torch.tensor([False, True, True])}
    found = from_rewards(group_center)(make_batch([math.inf, 2.0, 0.0], [0, 0, 0], **columns))
    assert found[:, 1].tolist() == [0, 1, -1]


def test_from_rewards_gives_the_function_no_empty_batch() -> None:
    def largest(rewards: Tensor, group_ids: Tensor) -> Tensor:
        return rewards - rewards.max()

    assert from_rewards(largest)(make_batch([1.0, 3.0], [0, 0]))[:, 1].tolist() == [-2, 0]
    assert not from_rewards(largest)(make_batch([1.0], [0], valid=torch.tensor([False]))).any()
    assert from_rewards(largest)(make_batch([1.0], [0])[:0]).shape == (0, 4)


def test_from_rewards_keeps_double_precision() -> None:
    batch = assign(make_batch([1.0, 2.0], [0, 0]), rewards=torch.tensor([1.0, 2.0], dtype=torch.float64))
    assert from_rewards(group_normalize)(batch).dtype == torch.float64


def test_eight_rows_that_are_not_finite_are_all_named() -> None:
    with pytest.raises(NotFinite, match=r"\(0, 1, 2, 3, 4, 5, 6, 7\).*valid=batch\['rewards'\]\.isfinite\(\)\)$"):
        from_rewards(group_center)(make_batch([math.nan] * 8, [0] * 8))
    with pytest.raises(NotFinite, match=r"\(0, 1, 2, 3, 4, 5, 6, 7, \.\.\.\)"):
        from_rewards(group_center)(make_batch([math.nan] * 9, [0] * 9))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rewards_that_are_not_finite_are_named(bad: float) -> None:
    with pytest.raises(
        NotFinite, match=r"from_rewards\(group_center\).* in 2 valid rows \(0, 2\).*assign\(batch, valid="
    ):
        from_rewards(group_center)(make_batch([bad, 1.0, bad], [0, 0, 0]))
    with pytest.raises(NotFinite, match=r"in 20 valid rows \(0, 1, 2, 3, 4, 5, 6, 7, \.\.\.\)"):
        from_rewards(group_center)(make_batch([bad] * 20, [0] * 20))


def test_several_rewards_must_be_combined_first() -> None:
    batch = assign(make_batch([1.0, 2.0], [0, 0]), rewards=torch.ones(2, 3))
    with pytest.raises(BatchError, match=r"rewards has shape \[2, 3\]; combine .*\['rewards'\]\.sum\(-1\)"):
        from_rewards(group_center)(batch)


@pytest.mark.parametrize(
    ("rewards", "groups", "column"), [([1.0, 2.0], [0, 0], "rewards"), ([1.0, 1.0], [0, 1], "group_ids")]
)
def test_an_episode_has_one_reward_and_one_group(rewards: list[float], groups: list[int], column: str) -> None:
    batch = make_batch(rewards, groups, episode_ids=torch.tensor([8, 8]))
    with pytest.raises(BatchError, match=f"row 1 has another value of {column} than the first row of its episode 8"):
        from_rewards(group_center)(batch)


def test_from_rewards_checks_what_the_function_returns() -> None:
    with pytest.raises(
        BatchError, match=r"the function got 2 rewards and returned shape \[\]; return one number for each"
    ):
        from_rewards(lambda rewards, group_ids: rewards.mean())(make_batch([1.0, 2.0], [0, 0]))


@pytest.mark.parametrize("column", ["rewards", "group_ids", "loss_mask"])
def test_a_missing_column_is_named(column: str) -> None:
    with pytest.raises(MissingColumn, match=rf"from_rewards\(group_normalize\) reads the column '{column}'"):
        advantages(make_batch([1.0], [0]).exclude(column))


def test_advantages_adds_the_column_and_leaves_the_batch() -> None:
    batch = make_batch([1.0, 3.0], [0, 0])
    found = advantages(batch)
    assert "advantages" not in batch.keys()
    assert found["advantages"][:, 1].tolist() == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2)], rel=1e-5)
    assert advantages(batch, from_rewards(leave_one_out))["advantages"][:, 2].tolist() == [-2, 2]


def test_advantages_checks_the_shape() -> None:
    with pytest.raises(ColumnError, match="advantages"):
        advantages(make_batch([1.0, 3.0], [0, 0]), lambda batch: batch["rewards"])


def slow_gae(
    rewards: list[float], values: list[float], mask: list[bool], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """A_k as the sum of discounted TD errors, written out over the mask's tokens."""
    tokens = [t for t in range(len(mask)) if mask[t]]
    v = [values[t] for t in tokens] + [0.0]
    delta = [rewards[t] + gamma * v[k + 1] - v[k] for k, t in enumerate(tokens)]
    out, returns = [0.0] * len(mask), [0.0] * len(mask)
    for k, t in enumerate(tokens):
        out[t] = sum((gamma * lam) ** (j - k) * delta[j] for j in range(k, len(tokens)))
        returns[t] = out[t] + v[k]
    return out, returns


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0), (0.0, 1.0)])
def test_gae_by_a_slow_loop(gamma: float, lam: float) -> None:
    torch.manual_seed(1)
    rewards, values = torch.randn(6, 7, dtype=torch.float64), torch.randn(6, 7, dtype=torch.float64)
    mask = torch.rand(6, 7) < 0.6
    mask[0] = False
    found = gae(rewards, values, mask, gamma=gamma, lam=lam)
    for i in range(6):
        expected = slow_gae(rewards[i].tolist(), values[i].tolist(), mask[i].tolist(), gamma, lam)
        assert found[0][i].tolist() == pytest.approx(expected[0])
        assert found[1][i].tolist() == pytest.approx(expected[1])
    assert found[0].dtype == found[1].dtype == torch.float64


def test_gae_by_hand() -> None:
    mask = torch.tensor([[False, True, False, True, False]])
    rewards = torch.tensor([[9.0, 1.0, 9.0, 2.0, 9.0]])
    values = torch.tensor([[9.0, 0.5, 9.0, 1.5, 9.0]])
    found, returns = gae(rewards, values, mask, gamma=0.5, lam=0.5)
    # second token: 2 - 1.5 = 0.5; first: 1 + 0.5 * 1.5 - 0.5 = 1.25, plus 0.25 * 0.5
    assert found.tolist() == [[0, 1.375, 0, 0.5, 0]]
    assert returns.tolist() == [[0, 1.875, 0, 2.0, 0]]


@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_gae_does_not_see_what_is_masked(garbage: float) -> None:
    mask = torch.tensor([[False, True, False, True]])
    clean, dirty = torch.ones(1, 4), torch.where(mask, 1.0, garbage)
    for a, b in zip(
        gae(dirty, dirty, mask, gamma=0.9, lam=0.9), gae(clean, clean, mask, gamma=0.9, lam=0.9), strict=True
    ):
        assert a.tolist() == b.tolist()


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (3, 2, 3)])
def test_gae_shapes(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    for found in gae(x, x, x.bool(), gamma=1.0, lam=1.0):
        assert found.shape == shape
    with pytest.raises(BatchError, match="masked"):
        gae(x, x.unsqueeze(-1), x.bool(), gamma=1.0, lam=1.0)


def test_gae_is_constant() -> None:
    x = torch.ones(1, 3, requires_grad=True)
    assert not any(found.requires_grad for found in gae(x, x, x.bool(), gamma=1.0, lam=1.0))


def test_monte_carlo_gae_is_returns_less_values() -> None:
    torch.manual_seed(2)
    rewards, values, mask = torch.randn(3, 5), torch.randn(3, 5), torch.rand(3, 5) < 0.7
    found, returns = gae(rewards, values, mask, gamma=0.9, lam=1.0)
    expected = discounted_returns(rewards, mask, gamma=0.9)
    torch.testing.assert_close(returns, expected)
    torch.testing.assert_close(found, expected - values * mask)


def test_discounted_returns_by_hand() -> None:
    mask = torch.tensor([[True, False, True, True]])
    assert discounted_returns(torch.tensor([[1.0, 7.0, 2.0, 4.0]]), mask, gamma=0.5).tolist() == [[3, 0, 4, 4]]


def test_with_a_discount_of_zero_a_token_has_what_it_earned() -> None:
    batch = assign(make_batch([1.0], [0]), token_rewards=torch.tensor([[9.0, 1.0, 2.0, 4.0]]))
    expected = torch.where(batch["loss_mask"], batch["token_rewards"], 0)
    assert from_token_rewards(0.0)(batch).tolist() == expected.tolist()


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan])
def test_discounts_are_fractions(value: float) -> None:
    x = torch.ones(1, 1)
    with pytest.raises(ValueError, match=r"gae: gamma is .* between 0 and 1"):
        gae(x, x, x.bool(), gamma=value, lam=1.0)
    with pytest.raises(ValueError, match="gae: lam is"):
        gae(x, x, x.bool(), gamma=1.0, lam=value)
    with pytest.raises(ValueError, match="discounted_returns: gamma is"):
        discounted_returns(x, x.bool(), gamma=value)


def test_whiten_by_hand() -> None:
    x = torch.tensor([[1.0, 3.0, math.nan], [5.0, math.inf, 7.0]])
    mask = torch.tensor([[True, True, False], [True, False, True]])
    std = math.sqrt((9 + 1 + 1 + 9) / 3)
    expected = [[-3 / std, -1 / std, 0], [1 / std, 0, 3 / std]]
    torch.testing.assert_close(whiten(x, mask), torch.tensor(expected))


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_whiten_of_equal_numbers_is_exactly_zero(tokens: int) -> None:
    mask = torch.arange(4).view(1, 4) < tokens
    assert not whiten(torch.full((1, 4), 0.1), mask).any()


def test_whiten_shapes_and_dtypes() -> None:
    x = torch.randn(2, 2, 3, dtype=torch.float64)
    assert whiten(x, torch.ones(2, 2, 3, dtype=torch.bool)).dtype == torch.float64
    assert whiten(x[:0], torch.ones(0, 2, 3, dtype=torch.bool)).shape == (0, 2, 3)
    with pytest.raises(BatchError, match="masked"):
        whiten(x, torch.ones(2, 2, dtype=torch.bool))
