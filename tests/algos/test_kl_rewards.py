"""The penalty in the reward: by hand, and what its expected policy gradient is, by enumeration."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import nrl
from nrl.algos import (
    Divergence,
    Penalty,
    from_token_rewards,
    k1,
    k2,
    k3,
    kl,
    on_policy_distillation,
    penalized_rewards,
    token_rewards,
)
from nrl.batch import Batch, assign
from nrl.errors import BatchError, MissingColumn, NotFinite

MASK = torch.tensor([[False, True, False, True, False], [False, True, False, False, False], [False] * 5])
OLD = torch.tensor([[9.0, -1.0, 9.0, -2.0, 9.0]]).expand(3, 5)
REF = torch.tensor([[7.0, -3.0, 7.0, -2.5, 7.0]]).expand(3, 5)
REWARDS = torch.tensor([1.0, 4.0, 6.0])


def make_batch(**more: Tensor) -> Batch:
    columns = {"rewards": REWARDS, "loss_mask": MASK, "old_logprobs": OLD, "ref_logprobs": REF}
    return assign(Batch({}, batch_size=[3]), **{**columns, **more})


def test_token_rewards_by_hand() -> None:
    found = token_rewards(make_batch(), kl(k1, 0.5))["token_rewards"]
    assert found.tolist() == [[0, -1, 0, 0.75, 0], [0, 3, 0, 0, 0], [0] * 5]
    assert token_rewards(make_batch(), kl(k2, 0.5))["token_rewards"][0].tolist() == [0, -1, 0, 1 - 0.0625, 0]
    assert token_rewards(make_batch())["token_rewards"].tolist() == [[0, 0, 0, 1, 0], [0, 4, 0, 0, 0], [0] * 5]


def test_penalized_rewards_by_hand() -> None:
    found = penalized_rewards(make_batch(), kl(k1, 0.5))["rewards"]
    assert found.tolist() == [1 - 0.5 * (2 + 0.5), 4 - 0.5 * 2, 6]
    assert penalized_rewards(make_batch(), kl(k1, 0.0))["rewards"].tolist() == REWARDS.tolist()


def test_rows_of_an_episode_that_disagree_are_refused() -> None:
    mask = torch.ones(2, 2, dtype=torch.bool)
    columns = {"loss_mask": mask, "old_logprobs": -1.0 * mask, "ref_logprobs": -1.0 * mask}
    columns |= {"rewards": torch.tensor([1.0, 2.0]), "episode_ids": torch.tensor([7, 7])}
    with pytest.raises(BatchError, match="penalized_rewards: row 1 has another value of rewards"):
        penalized_rewards(Batch(columns, batch_size=[2]), kl(k1, 0.1))


@pytest.mark.parametrize("shape", [token_rewards, penalized_rewards])
def test_what_is_taken_from_a_reward_is_a_constant(shape: Callable[[Batch, Penalty], Batch]) -> None:
    batch = make_batch(old_logprobs=OLD.clone().requires_grad_())
    weight = torch.ones((), requires_grad=True)
    found = shape(batch, lambda logprobs, batch: weight * logprobs)
    assert not any(found[name].requires_grad for name in ("rewards", "token_rewards") if name in found.keys())


def test_distillation_advantages_are_constants() -> None:
    leaves = {"old_logprobs": OLD.clone().requires_grad_(), "teacher_logprobs": REF.clone().requires_grad_()}
    batch = make_batch().copy().update(leaves)
    assert not on_policy_distillation(batch).requires_grad


def test_a_penalty_does_not_see_what_is_masked() -> None:
    batch = make_batch(old_logprobs=torch.where(MASK, OLD, math.nan))
    found = token_rewards(batch, lambda logprobs, batch: logprobs.sum(-1, keepdim=True).expand(3, 5))
    assert found["token_rewards"][0].tolist() == [0, 3, 0, 4, 0]


def test_token_rewards_add_up_to_penalized_rewards() -> None:
    batch, penalty = make_batch(), kl(k3, 0.3)
    totals = token_rewards(batch, penalty)["token_rewards"].sum(-1)
    torch.testing.assert_close(totals[:2], penalized_rewards(batch, penalty)["rewards"][:2])


@pytest.mark.parametrize("shape", [token_rewards, penalized_rewards])
def test_the_policy_that_sampled_is_old_or_else_rollout(shape: Callable[[Batch, Penalty], Batch]) -> None:
    column = "token_rewards" if shape is token_rewards else "rewards"
    expected = shape(make_batch(), kl(k1, 0.5))[column]
    both = make_batch(rollout_logprobs=OLD - 5)
    assert shape(both, kl(k1, 0.5))[column].tolist() == expected.tolist()
    alone = both.exclude("old_logprobs")
    assert shape(alone, kl(k1, 0.5))[column].tolist() != expected.tolist()
    assert shape(assign(alone, rollout_logprobs=OLD), kl(k1, 0.5))[column].tolist() == expected.tolist()
    with pytest.raises(MissingColumn, match=f"{shape.__name__} reads the column 'old_logprobs'"):
        shape(make_batch().exclude("old_logprobs"), kl(k1, 0.5))


def test_an_episode_pays_for_all_its_valid_rows_and_ends_in_its_reward_once() -> None:
    mask = torch.tensor([[False, True]] * 4)
    columns = {
        "rewards": torch.tensor([1.0, 1.0, 5.0, math.nan]),
        "loss_mask": mask,
        "old_logprobs": torch.tensor([[math.nan, -1.0]] * 4),
        "ref_logprobs": torch.tensor([[math.nan, -2.0], [0.0, -4.0], [0.0, -1.0], [0.0, math.nan]]),
        "episode_ids": torch.tensor([7, 7, 2, 7]),
        "valid": torch.tensor([True, True, True, False]),
    }
    batch = Batch(columns, batch_size=[4])
    found = penalized_rewards(batch, kl(k1, 1.0))["rewards"]
    assert found[:3].tolist() == [-3, -3, 5]
    assert found[3].isnan()
    turns = torch.tensor([[-1, 0], [-1, 1], [-1, 0], [-1, 0]], dtype=torch.int16)
    tokens = token_rewards(nrl.assign(batch, turns=turns), kl(k1, 1.0))["token_rewards"]
    assert tokens.tolist() == [[0, -1], [0, -2], [0, 5], [0, 0]]


@pytest.mark.parametrize("shape", [token_rewards, penalized_rewards])
def test_edges(shape: Callable[[Batch, Penalty], Batch]) -> None:
    name = shape.__name__
    column = "token_rewards" if shape is token_rewards else "rewards"
    assert len(shape(make_batch()[:0], kl(k1, 1.0))[column]) == 0
    nobody = make_batch(valid=torch.zeros(3, dtype=torch.bool), rewards=torch.full((3,), math.nan))
    assert bool((shape(nobody, kl(k1, 1.0))[column].nan_to_num() == 0).all())
    with pytest.raises(NotFinite, match=f"{name}: rewards is NaN"):
        shape(make_batch(rewards=torch.tensor([math.nan, 0.0, 0.0])), kl(k1, 1.0))
    with pytest.raises(NotFinite, match=f"{name}: old_logprobs is NaN"):
        shape(make_batch(old_logprobs=torch.full((3, 5), -math.inf)), kl(k1, 1.0))
    with pytest.raises(BatchError, match=rf"{name}: rewards has shape \[3, 2\]; combine"):
        shape(make_batch(rewards=torch.ones(3, 2)), kl(k1, 1.0))
    for missing in ("rewards", "loss_mask"):
        with pytest.raises(MissingColumn, match=f"{name} reads the column '{missing}'"):
            shape(make_batch().exclude(missing), kl(k1, 1.0))
    with pytest.raises(MissingColumn, match="kl reads the column 'ref_logprobs'"):
        shape(make_batch().exclude("ref_logprobs"), kl(k1, 1.0))


@pytest.mark.parametrize("shape", [token_rewards, penalized_rewards])
def test_order_and_padding_do_not_matter(shape: Callable[[Batch, Penalty], Batch]) -> None:
    column = "token_rewards" if shape is token_rewards else "rewards"
    batch = make_batch(input_ids=torch.zeros(3, 5, dtype=torch.int64), episode_ids=torch.tensor([1, 2, 3]))
    expected = shape(batch, kl(k3, 0.5))[column]
    order = torch.tensor([2, 0, 1])
    torch.testing.assert_close(shape(batch[order], kl(k3, 0.5))[column], expected[order])
    wider = shape(nrl.pad(batch, 8), kl(k3, 0.5))[column]
    torch.testing.assert_close(wider[:, :5] if wider.ndim > 1 else wider, expected)


# --- the gradient, over every answer of two tokens that a policy with a state can give

V = 3
FIRST = torch.tensor([0.3, -1.2, 0.8], dtype=torch.float64)
SECOND = torch.tensor([[0.1, 0.7, -0.4], [1.0, -0.2, 0.0], [-0.6, 0.5, 0.9]], dtype=torch.float64)
OTHER = (torch.tensor([-0.5, 0.4, 0.2], dtype=torch.float64), SECOND.flip(0) * 0.7 - 0.1)
PRIZES = torch.tensor([0.0, 2.0, -1.0, 0.5, 1.0, 0.0, 3.0, -2.0, 1.5], dtype=torch.float64)
ANSWERS = list(itertools.product(range(V), repeat=2))
COEF = 0.37


def leaves() -> tuple[Tensor, Tensor]:
    return FIRST.clone().requires_grad_(), SECOND.clone().requires_grad_()


def logprobs_of(first: Tensor, second: Tensor) -> Tensor:
    """The log-probability of each token of each answer: ``[9, 2]``."""
    a, b = first.log_softmax(-1), second.log_softmax(-1)
    return torch.stack([torch.stack([a[x], b[x, y]]) for x, y in ANSWERS])


def answers() -> Batch:
    logprobs, ref = logprobs_of(FIRST, SECOND), logprobs_of(*OTHER)
    columns = {"rewards": PRIZES, "old_logprobs": logprobs, "ref_logprobs": ref, "teacher_logprobs": ref}
    return assign(Batch({}, batch_size=[9]), loss_mask=torch.ones(9, 2, dtype=torch.bool), **columns)


def policy_gradient(advantages: Tensor) -> Tensor:
    """E over answers of Σ_t A_t ∇log π(y_t), exactly: each answer counts by its probability."""
    parameters = leaves()
    logprobs = logprobs_of(*parameters)
    weights = logprobs.detach().sum(-1).exp()
    found = torch.autograd.grad((weights.unsqueeze(-1) * advantages * logprobs).sum(), parameters)
    return torch.cat([part.flatten() for part in found])


def gradient_of(value: Callable[[Tensor], Tensor]) -> Tensor:
    parameters = leaves()
    found = torch.autograd.grad(value(logprobs_of(*parameters)), parameters)
    return torch.cat([part.flatten() for part in found])


def reward(logprobs: Tensor) -> Tensor:
    return (logprobs.sum(-1).exp() * PRIZES).sum()


def true_reverse(logprobs: Tensor) -> Tensor:
    """KL(π_θ ‖ π_ref) over whole answers."""
    return (logprobs.sum(-1).exp() * (logprobs - logprobs_of(*OTHER)).sum(-1)).sum()


def test_k1_in_the_reward_has_the_gradient_of_the_reverse_kl() -> None:
    expected = gradient_of(lambda logprobs: reward(logprobs) - COEF * true_reverse(logprobs))
    at_tokens = from_token_rewards()(token_rewards(answers(), kl(k1, COEF)))
    torch.testing.assert_close(policy_gradient(at_tokens), expected)
    at_rows = penalized_rewards(answers(), kl(k1, COEF))["rewards"].unsqueeze(-1).expand(9, 2)
    torch.testing.assert_close(policy_gradient(at_rows), expected)


@pytest.mark.parametrize("divergence", [k2, k3])
def test_k2_and_k3_in_the_reward_have_another_gradient(divergence: Divergence) -> None:
    expected = gradient_of(lambda logprobs: reward(logprobs) - COEF * true_reverse(logprobs))
    found = policy_gradient(from_token_rewards()(token_rewards(answers(), kl(divergence, COEF))))
    assert float((found - expected).norm() / expected.norm()) > 0.05


def test_k3_in_the_reward_has_the_gradient_of_the_reverse_less_that_of_the_forward_kl() -> None:
    """Of one token; its value is unbiased all the same."""
    logits, ref = FIRST.clone().requires_grad_(), OTHER[0].log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    probs = logprobs.detach().exp()
    value = k3(logprobs.detach(), ref)
    torch.testing.assert_close((probs * value).sum(), (probs * (logprobs.detach() - ref)).sum())
    (found,) = torch.autograd.grad((probs * value * logprobs).sum(), logits, retain_graph=True)
    difference = (logprobs.exp() * (logprobs - ref)).sum() - (ref.exp() * (ref - logprobs)).sum()
    (expected,) = torch.autograd.grad(difference, logits)
    torch.testing.assert_close(found, expected)


def test_the_advantage_of_a_teacher_has_the_gradient_of_the_reverse_kl_at_each_token() -> None:
    """KL(π_θ(·|s) ‖ π_teacher(·|s)) summed over the states s that the policy comes to, which are held fixed."""

    def per_state(first: Tensor, second: Tensor) -> Tensor:
        a, b = first.log_softmax(-1), second.log_softmax(-1)
        p, q = OTHER[0].log_softmax(-1), OTHER[1].log_softmax(-1)
        states = (b.exp() * (b - q)).sum(-1)
        return (a.exp() * (a - p)).sum() + (a.detach().exp() * states).sum()

    parameters = leaves()
    found = torch.autograd.grad(per_state(*parameters), parameters)
    expected = -torch.cat([part.flatten() for part in found])
    torch.testing.assert_close(policy_gradient(on_policy_distillation(answers())), expected)
    whole = -gradient_of(true_reverse)
    assert not torch.allclose(expected, whole, atol=1e-3)  # what a token does to later ones is not seen
    torch.testing.assert_close(expected[V:], whole[V:])  # the last token does nothing to later ones
