"""Group functions and estimators beyond GRPO's, by hand, by slow loops, by what they are equal to."""

import math
from collections.abc import Callable, Sequence

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import nrl
from nrl.algos import (
    Estimator,
    advantages,
    from_rewards,
    from_token_rewards,
    gdpo,
    greedy_baseline,
    group_center,
    group_center_batch_std,
    group_normalize,
    mask_greedy,
    max_rl,
    on_policy_distillation,
    optimal_baseline,
    reinforce_plus_plus,
    weighted_sum,
    whiten,
    whitened,
)
from nrl.batch import Batch, assign
from nrl.errors import BatchError, MissingColumn, NotFinite
from tests.properties.strategies import batches, taken


def make_batch(
    rewards: Sequence[float] | Sequence[Sequence[float]], groups: list[int], lengths: list[int], **more: Tensor
) -> Batch:
    """Rows of some length after one token of a prompt, all in double precision."""
    mask = torch.arange(6).expand(len(groups), 6)
    mask = (mask >= 1) & (mask <= torch.tensor(lengths, dtype=torch.int64).view(-1, 1))
    columns = {
        "rewards": torch.tensor(rewards, dtype=torch.float64).reshape(len(groups), *torch.tensor(rewards).shape[1:]),
        "group_ids": torch.tensor(groups, dtype=torch.int64),
        "loss_mask": mask,
    }
    return assign(Batch({}, batch_size=[len(groups)]), **columns, **more)


def firsts(x: Tensor) -> list[float]:
    """What the first trained token of each row has."""
    return x[:, 1].tolist()


# --- group functions


def test_max_rl_of_binary_rewards_is_the_mean_over_successes_less_the_mean_over_all() -> None:
    """Equation 9 less the control variate: 1/N Σ A_i S_i = 1/K Σ_successes S_i - 1/N Σ S_i for any scores S."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    scores = torch.tensor([0.3, -2.0, 1.5, 0.7, 4.0], dtype=torch.float64)
    found = (max_rl(rewards, torch.zeros(5, dtype=torch.int64)) * scores).mean()
    torch.testing.assert_close(found, scores[rewards == 1].mean() - scores.mean())


def test_max_rl_refuses_negative_rewards() -> None:
    with pytest.raises(BatchError, match=r"max_rl: the reward of row 1 is negative; what is divided .* at least 0"):
        max_rl(torch.tensor([1.0, -0.5]), torch.tensor([0, 0]))


def test_batch_std_of_one_group_is_grpo() -> None:
    rewards, groups = torch.randn(9), torch.zeros(9, dtype=torch.int64)
    torch.testing.assert_close(group_center_batch_std(rewards, groups), group_normalize(rewards, groups))


# --- OPO


def test_optimal_baseline_by_hand() -> None:
    found = optimal_baseline(make_batch([1.0, 0.0, 7.0], [0, 0, 3], [1, 3, 2]))
    # the baseline is (1 * 1 + 3 * 0) / 4
    assert found.tolist() == [[0, 0.75, 0, 0, 0, 0], [0, -0.25, -0.25, -0.25, 0, 0], [0] * 6]


def test_an_episode_without_a_token_has_no_part_in_the_optimal_baseline() -> None:
    assert firsts(optimal_baseline(make_batch([1.0, 0.0], [0, 0], [1, 0]))) == [0, 0]


@pytest.mark.parametrize(
    "estimator", [optimal_baseline, greedy_baseline, gdpo(), from_rewards(lambda rewards, groups: rewards.double())]
)
def test_advantages_have_the_dtype_of_the_rewards(estimator: Estimator) -> None:
    batch = make_batch([1.0, 0.0], [0, 0], [1, 2], temperature=torch.tensor([0.0, 1.0]))
    assert estimator(assign(batch, rewards=batch["rewards"].float())).dtype == torch.float32


def test_optimal_baseline_by_a_slow_loop() -> None:
    torch.manual_seed(2)
    rewards, groups = torch.randn(20).tolist(), torch.randint(0, 4, (20,)).tolist()
    lengths = torch.randint(0, 6, (20,)).tolist()
    found = optimal_baseline(make_batch(rewards, groups, lengths))
    for i in range(20):
        mates = [j for j in range(20) if groups[j] == groups[i]]
        total = sum(lengths[j] for j in mates)
        baseline = sum(lengths[j] * rewards[j] for j in mates) / total if total else 0.0
        expected = [rewards[i] - baseline if 1 <= t <= lengths[i] else 0.0 for t in range(6)]
        assert found[i].tolist() == pytest.approx(expected)


def test_optimal_baseline_of_equal_lengths_is_centring() -> None:
    batch = make_batch([1.0, 4.0, 2.5, 0.0], [0, 0, 1, 1], [3, 3, 5, 5])
    torch.testing.assert_close(optimal_baseline(batch), from_rewards(group_center)(batch))
    other = make_batch([1.0, 4.0, 2.5, 0.0], [0, 0, 1, 1], [3, 2, 5, 5])
    assert not torch.allclose(optimal_baseline(other), from_rewards(group_center)(other))


def test_the_length_of_an_episode_is_that_of_all_its_valid_rows() -> None:
    columns = {"episode_ids": torch.tensor([4, 4, 2, 4]), "valid": torch.tensor([True, True, True, False])}
    found = optimal_baseline(make_batch([1.0, 1.0, 0.0, math.nan], [0, 0, 0, 0], [1, 2, 1, 5], **columns))
    assert firsts(found) == [0.25, 0.25, -0.75, 0]  # three tokens against one


def test_lengths_of_zero_count_nothing() -> None:
    assert firsts(optimal_baseline(make_batch([5.0, 1.0, 0.0], [0, 0, 0], [0, 1, 1]))) == pytest.approx([0, 0.5, -0.5])
    assert not optimal_baseline(make_batch([5.0, 1.0], [0, 0], [0, 0])).any()


# --- ReMax


def greedy(rewards: list[float], groups: list[int], cold: list[bool], **more: Tensor) -> Batch:
    temperature = torch.where(torch.tensor(cold, dtype=torch.bool), 0.0, 0.7)
    return make_batch(rewards, groups, [2] * len(rewards), temperature=temperature, **more)


def test_greedy_baseline_by_hand() -> None:
    found = greedy_baseline(greedy([1.0, 0.25, 3.0, 8.0, 6.0], [0, 0, 0, 1, 1], [False, True, False, True, False]))
    assert firsts(found) == [0.75, 0, 2.75, 0, -2]
    assert not found[:, 0].any()


def test_the_mean_of_several_greedy_rows_is_the_baseline() -> None:
    found = greedy_baseline(greedy([1.0, 4.0, 2.0], [0, 0, 0], [False, True, True]))
    assert firsts(found) == [-2, 0, 0]


def test_a_group_without_a_greedy_row_learns_nothing() -> None:
    found = greedy_baseline(greedy([1.0, 2.0, 5.0, 3.0], [0, 0, 1, 1], [False, False, False, True]))
    assert firsts(found) == [0, 0, 2, 0]


def test_a_group_whose_greedy_row_failed_learns_nothing() -> None:
    valid = torch.tensor([True, False])
    assert not greedy_baseline(greedy([1.0, math.nan], [0, 0], [False, True], valid=valid)).any()


def test_greedy_baseline_by_a_slow_loop() -> None:
    torch.manual_seed(3)
    rewards, groups = torch.randn(24).tolist(), torch.randint(0, 5, (24,)).tolist()
    cold = (torch.rand(24) < 0.3).tolist()
    found = firsts(greedy_baseline(greedy(rewards, groups, cold)))
    for i in range(24):
        known = [rewards[j] for j in range(24) if groups[j] == groups[i] and cold[j]]
        expected = 0.0 if cold[i] or not known else rewards[i] - sum(known) / len(known)
        assert found[i] == pytest.approx(expected)


def test_greedy_rows_leave_the_loss() -> None:
    batch = mask_greedy(advantages(greedy([1.0, 0.25], [0, 0], [False, True]), greedy_baseline))
    assert batch["loss_mask"].sum(-1).tolist() == [2, 0]
    assert firsts(batch["advantages"]) == [0.75, 0]


def test_the_rows_of_an_episode_have_one_temperature() -> None:
    batch = greedy([1.0, 1.0], [0, 0], [False, True], episode_ids=torch.tensor([3, 3]))
    with pytest.raises(BatchError, match="greedy_baseline: row 1 has another value of temperature .* episode 3"):
        greedy_baseline(batch)


# --- GDPO


def slow_gdpo(rewards: list[list[float]], groups: list[int], weights: list[float]) -> list[float]:
    def normalized(values: list[float]) -> list[float]:
        mean = sum(values) / len(values)
        std = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1)) if len(values) > 1 else 0.0
        return [(v - mean) / (std + 1e-6) for v in values]

    sums = [0.0] * len(rewards)
    for group in set(groups):
        rows = [i for i in range(len(rewards)) if groups[i] == group]
        for k, weight in enumerate(weights):
            for i, value in zip(rows, normalized([rewards[i][k] for i in rows]), strict=True):
                sums[i] += weight * value
    return normalized(sums)


@pytest.mark.parametrize("weights", [None, [0.5, 2.0, -1.0]])
def test_gdpo_by_a_slow_loop(weights: list[float] | None) -> None:
    torch.manual_seed(4)
    rewards, groups = torch.randn(20, 3).tolist(), torch.randint(0, 5, (20,)).tolist()
    found = firsts(gdpo(weights)(make_batch(rewards, groups, [2] * 20)))
    assert found == pytest.approx(slow_gdpo(rewards, groups, weights or [1.0, 1.0, 1.0]))


def test_gdpo_by_hand() -> None:
    # each normalized reward is ±1/√2; the sums are ±√2 and, where the two are opposed, 0
    found = gdpo()(make_batch([[1, 10], [0, 0], [1, 0], [0, 10]], [0, 0, 1, 1], [1] * 4))
    std = math.sqrt(4 / 3)
    assert firsts(found) == pytest.approx([math.sqrt(2) / std, -math.sqrt(2) / std, 0, 0], abs=1e-5)


def test_gdpo_of_one_reward_is_grpo_over_the_deviation_in_the_batch() -> None:
    rewards, groups = [1.0, 4.0, 2.5, 0.0, 3.0], [0, 0, 1, 1, 1]
    grpo = group_normalize(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups))
    expected = (grpo / (grpo.std() + 1e-6)).tolist()
    assert firsts(gdpo()(make_batch(rewards, groups, [1] * 5))) == pytest.approx(expected)
    assert firsts(gdpo()(make_batch([[r] for r in rewards], groups, [1] * 5))) == pytest.approx(expected)


def test_gdpo_does_not_see_the_scale_of_a_reward_and_its_weights_change_values() -> None:
    batch = make_batch([[1, 10], [0, 30], [1, 0], [0, 10]], [0, 0, 0, 0], [1] * 4)
    scaled = assign(batch, rewards=batch["rewards"] * torch.tensor([1.0, 1e3]).double())
    torch.testing.assert_close(gdpo()(batch), gdpo()(scaled), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(gdpo()(batch), gdpo([1.0, 0.1])(batch), atol=1e-2)


def test_gdpo_counts_an_episode_once_and_no_invalid_row() -> None:
    columns = {"episode_ids": torch.tensor([4, 4, 2, 1]), "valid": torch.tensor([True, True, True, False])}
    found = gdpo()(make_batch([[6.0, 1.0], [6.0, 1.0], [0.0, 0.0], [math.nan, 0.0]], [0, 0, 0, 0], [1] * 4, **columns))
    high, low = firsts(gdpo()(make_batch([[6, 1], [0, 0]], [0, 0], [1, 1])))
    assert firsts(found) == [high, high, low, 0]


@pytest.mark.parametrize("weights", [[], [1.0, math.nan], [math.inf]])
def test_the_weights_of_gdpo_are_finite(weights: list[float]) -> None:
    with pytest.raises(ValueError, match=r"gdpo: weights is \[.*\]; it must be finite numbers, one for each reward"):
        gdpo(weights)


def test_gdpo_has_a_weight_for_each_reward() -> None:
    with pytest.raises(BatchError, match=r"gdpo: there are 3 weights, but rewards has shape \[2, 2\]"):
        gdpo([1.0, 2.0, 3.0])(make_batch([[1, 2], [3, 4]], [0, 0], [1, 1]))


def test_gdpo_refuses_one_reward_that_is_not_finite() -> None:
    with pytest.raises(NotFinite, match=r"gdpo: rewards is NaN .* 1 valid rows \(1\).*isfinite\(\)\.all\(-1\)"):
        gdpo()(make_batch([[1.0, 2.0], [3.0, math.nan]], [0, 0], [1, 1]))


def test_the_rows_of_an_episode_have_the_same_rewards() -> None:
    batch = make_batch([[1, 2], [1, 3]], [0, 0], [1, 1], episode_ids=torch.tensor([8, 8]))
    with pytest.raises(BatchError, match="gdpo: row 1 has another value of rewards than .* episode 8"):
        gdpo()(batch)


# --- REINFORCE++, a teacher, sums


TOKENS = torch.tensor([[9.0, -1.0, 9.0, 3.0], [9.0, 1.0, 9.0, 9.0]])
HOLES = torch.tensor([[False, True, False, True], [False, True, False, False]])


def test_from_token_rewards_by_hand() -> None:
    batch = Batch({"token_rewards": TOKENS, "loss_mask": HOLES}, batch_size=[2])
    assert from_token_rewards()(batch).tolist() == [[0, 2, 0, 3], [0, 1, 0, 0]]
    assert from_token_rewards(0.5)(batch).tolist() == [[0, 0.5, 0, 3], [0, 1, 0, 0]]


def test_reinforce_plus_plus_by_hand() -> None:
    batch = Batch({"token_rewards": TOKENS, "loss_mask": HOLES}, batch_size=[2])
    assert reinforce_plus_plus(batch).flatten().tolist() == pytest.approx([0, 0, 0, 1, 0, -1, 0, 0], abs=1e-5)


def test_reinforce_plus_plus_by_a_slow_loop() -> None:
    torch.manual_seed(5)
    rewards, mask = torch.randn(5, 7, dtype=torch.float64), torch.rand(5, 7) < 0.6
    returns = [[sum(float(rewards[i, j]) for j in range(t, 7) if mask[i, j]) for t in range(7)] for i in range(5)]
    tokens = [returns[i][t] for i in range(5) for t in range(7) if mask[i, t]]
    mean = sum(tokens) / len(tokens)
    std = math.sqrt(sum((x - mean) ** 2 for x in tokens) / (len(tokens) - 1))
    found = reinforce_plus_plus(Batch({"token_rewards": rewards, "loss_mask": mask}, batch_size=[5]))
    for i in range(5):
        expected = [(returns[i][t] - mean) / (std + 1e-6) if mask[i, t] else 0.0 for t in range(7)]
        assert found[i].tolist() == pytest.approx(expected)


def test_invalid_rows_have_no_part_in_whitening() -> None:
    columns = {"loss_mask": torch.ones(3, 2, dtype=torch.bool), "valid": torch.tensor([True, True, False])}
    rewards = torch.tensor([[0.0, 1.0], [0.0, 3.0], [math.nan, 7.0]])
    found = reinforce_plus_plus(Batch({**columns, "token_rewards": rewards}, batch_size=[3]))
    std = math.sqrt(4 / 3)
    assert found.flatten().tolist() == pytest.approx([-1 / std, -1 / std, 1 / std, 1 / std, 0, 0], abs=1e-5)


def test_an_invalid_row_has_no_returns_even_if_its_mask_is_not_empty() -> None:
    batch = Batch({"token_rewards": TOKENS, "loss_mask": HOLES, "valid": torch.tensor([False, True])}, batch_size=[2])
    assert from_token_rewards()(batch).tolist() == [[0] * 4, [0, 1, 0, 0]]


def test_the_baseline_form_whitens_centred_rewards_over_tokens() -> None:
    batch = make_batch([1.0, 4.0, 2.5, 0.0], [0, 0, 1, 1], [3, 1, 5, 0])
    expected = whiten(from_rewards(group_center)(batch), batch["loss_mask"])
    torch.testing.assert_close(whitened(from_rewards(group_center))(batch), expected)
    chosen = expected[batch["loss_mask"]]
    assert chosen.mean().item() == pytest.approx(0, abs=1e-9)
    assert chosen.std().item() == pytest.approx(1, abs=1e-5)
    assert not torch.allclose(expected, from_rewards(group_center)(batch))


@pytest.mark.parametrize("gamma", [-0.1, 1.1, math.nan])
def test_a_discount_is_a_fraction(gamma: float) -> None:
    with pytest.raises(ValueError, match=r"from_token_rewards: gamma is .*; it must be between 0 and 1"):
        from_token_rewards(gamma)


def test_token_rewards_are_finite() -> None:
    bad = torch.where(HOLES, math.inf, TOKENS)
    with pytest.raises(NotFinite, match=r"from_token_rewards: token_rewards is NaN .* 2 valid rows \(0, 1\)"):
        reinforce_plus_plus(Batch({"token_rewards": bad, "loss_mask": HOLES}, batch_size=[2]))
    outside = torch.where(HOLES, TOKENS, math.nan)
    assert from_token_rewards()(Batch({"token_rewards": outside, "loss_mask": HOLES}, batch_size=[2])).isfinite().all()


def teacher_batch(teacher: Tensor, **more: Tensor) -> Batch:
    return Batch({"teacher_logprobs": teacher, "loss_mask": HOLES, **more}, batch_size=[2])


def test_reverse_kl_by_hand() -> None:
    old = torch.full((2, 4), -2.0)
    found = on_policy_distillation(teacher_batch(-TOKENS.abs(), old_logprobs=old))
    assert found.tolist() == [[0, 1, 0, -1], [0, 1, 0, 0]]
    assert on_policy_distillation(teacher_batch(-TOKENS.abs(), rollout_logprobs=old)).tolist() == found.tolist()
    both = on_policy_distillation(teacher_batch(-TOKENS.abs(), rollout_logprobs=old - 5, old_logprobs=old))
    assert both.tolist() == found.tolist()


def test_a_teacher_that_agrees_teaches_exactly_nothing() -> None:
    logprobs = torch.randn(2, 4)
    assert not on_policy_distillation(teacher_batch(logprobs, old_logprobs=logprobs.clone())).any()


def test_reverse_kl_sees_no_masked_token_and_no_invalid_row() -> None:
    teacher = torch.where(HOLES, -1.0, math.nan)
    assert on_policy_distillation(teacher_batch(teacher, old_logprobs=teacher - 1)).tolist() == HOLES.float().tolist()
    valid = torch.tensor([False, True])
    teacher = torch.tensor([[math.nan], [-1.0]]).expand(2, 4)
    found = on_policy_distillation(teacher_batch(teacher, old_logprobs=teacher, valid=valid))
    assert not found.any()


def test_reverse_kl_refuses_what_is_not_finite() -> None:
    ruled_out = torch.where(HOLES, -math.inf, -1.0)
    with pytest.raises(NotFinite, match="on_policy_distillation: teacher_logprobs is NaN or infinite in 2 valid rows"):
        on_policy_distillation(teacher_batch(ruled_out, old_logprobs=TOKENS))
    with pytest.raises(NotFinite, match="on_policy_distillation: old_logprobs is NaN or infinite"):
        on_policy_distillation(teacher_batch(TOKENS, old_logprobs=ruled_out))


def test_reverse_kl_needs_both_policies() -> None:
    with pytest.raises(MissingColumn, match="on_policy_distillation reads the column 'old_logprobs'"):
        on_policy_distillation(teacher_batch(TOKENS))
    with pytest.raises(MissingColumn, match="on_policy_distillation reads the column 'teacher_logprobs'"):
        on_policy_distillation(teacher_batch(TOKENS, old_logprobs=TOKENS).exclude("teacher_logprobs"))


def test_weighted_sum_by_hand() -> None:
    columns = {"rewards": torch.tensor([1.0, 0.0]), "group_ids": torch.tensor([0, 0])}
    batch = teacher_batch(-TOKENS.abs(), old_logprobs=torch.full((2, 4), -2.0), **columns)
    center = from_rewards(group_center)
    assert weighted_sum((2.0, center), (0.5, on_policy_distillation))(batch).tolist() == [
        [0, 1.5, 0, 0.5],
        [0, -0.5, 0, 0],
    ]
    assert weighted_sum((1.0, center))(batch).tolist() == center(batch).tolist()
    total = weighted_sum((2.0, center), (0.5, on_policy_distillation))
    assert getattr(total, "__name__", "") == "weighted_sum(from_rewards(group_center), on_policy_distillation)"


def test_weighted_sum_checks_its_terms() -> None:
    with pytest.raises(ValueError, match="weighted_sum: there are no terms"):
        weighted_sum()
    with pytest.raises(ValueError, match="weighted_sum: the coefficient of term 2 is nan; it must be finite"):
        weighted_sum((1.0, on_policy_distillation), (math.nan, on_policy_distillation))
    for wrong in (on_policy_distillation, (1.0,), (on_policy_distillation, 1.0)):
        with pytest.raises(TypeError, match=r"weighted_sum: term 1 is .*; give a pair \(coefficient, estimator\)"):
            weighted_sum(wrong)  # type: ignore[arg-type]


# --- all of them, at the edges

ESTIMATORS: dict[str, Estimator] = {
    "max_rl": from_rewards(max_rl),
    "group_center_batch_std": from_rewards(group_center_batch_std),
    "optimal_baseline": optimal_baseline,
    "greedy_baseline": greedy_baseline,
    "gdpo": gdpo([1.0]),
    "whitened": whitened(from_rewards(group_center)),
    "weighted_sum": weighted_sum((1.0, from_rewards(group_center)), (0.3, on_policy_distillation)),
    "reinforce_plus_plus": reinforce_plus_plus,
    "from_token_rewards": from_token_rewards(0.9),
    "on_policy_distillation": on_policy_distillation,
}
OF_REWARDS = list(ESTIMATORS)[:7]


@st.composite
def rollouts(draw: st.DrawFn) -> Batch:
    batch = draw(batches())
    rows = len(batch)
    groups = draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows))
    rewards = draw(st.lists(st.sampled_from([0.0, 0.1, 1.0, 2.5]), min_size=rows, max_size=rows))
    return nrl.assign(
        batch,
        group_ids=torch.tensor(groups),
        rewards=torch.tensor(rewards, dtype=torch.float64),
        token_rewards=batch["advantages"],
        teacher_logprobs=batch["ref_logprobs"],
    )


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=25)
@given(data=st.data())
def test_advantages_do_not_see_order_padding_or_failures(name: str, data: st.DataObject) -> None:
    batch, estimator = data.draw(rollouts()), ESTIMATORS[name]
    expected = advantages(batch, estimator)["advantages"]
    order = data.draw(st.permutations(range(len(batch))))
    close(advantages(taken(batch, order), estimator)["advantages"], expected[order])
    width = batch["input_ids"].shape[-1]
    wider = advantages(nrl.pad(batch, width + 3), estimator)["advantages"]
    close(wider[:, :width], expected)
    assert not wider[:, width:].any()
    spoiled = nrl.assign(
        batch,
        rewards=torch.where(batch["valid"], batch["rewards"], math.nan),
        **{c: torch.where(batch["loss_mask"], batch[c], math.nan) for c in ("token_rewards", "teacher_logprobs")},
    )
    close(advantages(spoiled, estimator)["advantages"], expected)
    assert not expected[~batch["loss_mask"]].any()


@pytest.mark.parametrize("name", OF_REWARDS[:5])
@settings(max_examples=25)
@given(data=st.data())
def test_an_episode_of_several_rows_counts_once(name: str, data: st.DataObject) -> None:
    batch, estimator = data.draw(rollouts()), ESTIMATORS[name]
    times = 2 if name == "optimal_baseline" else None  # whose lengths are those of all rows
    copies = [row for row in range(len(batch)) for _ in range(times or data.draw(st.integers(1, 3)))]
    forked = nrl.assign(taken(batch, copies), episode_ids=torch.tensor(copies))
    close(advantages(forked, estimator)["advantages"], advantages(batch, estimator)["advantages"][copies])


@pytest.mark.parametrize("name", [*OF_REWARDS[:6]])
@settings(max_examples=10)
@given(data=st.data())
def test_equal_rewards_teach_exactly_nothing(name: str, data: st.DataObject) -> None:
    batch = data.draw(rollouts())
    reward = data.draw(st.floats(0, 1e6))
    same = nrl.assign(batch, rewards=torch.full((len(batch),), reward, dtype=torch.float64))
    assert not ESTIMATORS[name](same).any()


def complete(rows: int, **more: Tensor) -> Batch:
    batch = make_batch([1.0] * rows, [0] * rows, [2] * rows, temperature=torch.ones(rows))
    zeros = torch.zeros(rows, 6)
    return assign(batch, token_rewards=zeros, teacher_logprobs=zeros, old_logprobs=zeros, **more)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_no_rows_no_valid_rows_and_rows_without_tokens(name: str) -> None:
    assert ESTIMATORS[name](complete(0)).shape == (0, 6)
    none = complete(2, valid=torch.zeros(2, dtype=torch.bool))
    assert not ESTIMATORS[name](assign(none, rewards=torch.full((2,), math.nan))).any()
    untrained = complete(2, rewards=torch.tensor([1.0, 3.0]), loss_mask=torch.zeros(2, 6, dtype=torch.bool))
    found = ESTIMATORS[name](untrained)
    assert found.isfinite().all()
    assert not found.any()


@pytest.mark.parametrize("name", OF_REWARDS)
def test_a_group_of_one_is_zero(name: str) -> None:
    batch = make_batch([3.0], [5], [2], temperature=torch.ones(1))
    zeros = torch.zeros(1, 6)
    assert not ESTIMATORS[name](assign(batch, teacher_logprobs=zeros, old_logprobs=zeros)).any()


@pytest.mark.parametrize("name", OF_REWARDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rewards_of_valid_rows_are_finite(name: str, bad: float) -> None:
    batch = complete(2, rewards=torch.tensor([1.0, bad]))
    with pytest.raises(NotFinite, match=r"rewards is NaN or infinite in 1 valid rows \(1\)"):
        ESTIMATORS[name](batch)


@pytest.mark.parametrize("estimator", [optimal_baseline, greedy_baseline])
def test_several_rewards_must_be_combined_first(estimator: Callable[[Batch], Tensor]) -> None:
    batch = complete(2, rewards=torch.ones(2, 3))
    with pytest.raises(BatchError, match=rf"{getattr(estimator, '__name__', '')}: rewards has shape \[2, 3\]; combine"):
        estimator(batch)


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("optimal_baseline", ["rewards", "group_ids", "loss_mask"]),
        ("greedy_baseline", ["rewards", "group_ids", "temperature", "loss_mask"]),
        ("gdpo", ["rewards", "group_ids", "loss_mask"]),
        ("from_token_rewards", ["token_rewards", "loss_mask"]),
        ("whitened", ["loss_mask"]),
    ],
)
def test_a_missing_column_is_named(name: str, columns: list[str]) -> None:
    for column in columns:
        with pytest.raises(MissingColumn, match=rf"{name}.* reads the column '{column}'"):
            ESTIMATORS[name](complete(1).exclude(column))
