import math
from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from nrl.algos import (
    Correction,
    MeanLoss,
    add,
    bounded,
    cispo,
    cispo_loss,
    clip,
    dapo_loss,
    decoupled_ppo_loss,
    dppo_loss,
    entropy_loss,
    gmpo_loss,
    grpo_loss,
    gspo_loss,
    icepop,
    importance_mask,
    k1,
    k2,
    k3,
    kl,
    on_policy_ratio,
    opsm,
    policy_loss,
    reinforce,
    reinforce_loss,
    sapo_loss,
    seq_mean,
    seq_sum,
    sequence_mask,
    sequence_ratio,
    sequence_truncate,
    sft_loss,
    token_mean,
    truncate,
    vespo_loss,
)
from nrl.batch import Batch
from nrl.batch.metrics import Max, Mean, finalize
from nrl.errors import MissingColumn

COLUMNS = ("advantages", "old_logprobs", "rollout_logprobs", "ref_logprobs")
POLICY = {
    "grpo": grpo_loss,
    "dapo": dapo_loss,
    "dual": policy_loss(clip(0.2, dual=3.0)),
    "gspo": policy_loss(clip(3e-4, 4e-4), ratio=sequence_ratio, aggregate=seq_mean),
    "cispo": policy_loss(cispo(4.0), penalty=kl(k3, 0.1), correction=truncate(2.0)),
    "reinforce": policy_loss(reinforce, ratio=on_policy_ratio, penalty=kl(k2, 0.1), correction=icepop(0.5, 5.0)),
    "dr_grpo": policy_loss(clip(0.2), penalty=kl(k1, 0.1), aggregate=seq_sum(4)),
    "unclipped": policy_loss(clip(math.inf), correction=truncate(math.inf)),
    "gmpo": gmpo_loss,
    "sapo": sapo_loss,
    "dppo": dppo_loss,
    "vespo": vespo_loss,
    "decoupled": decoupled_ppo_loss,
    "kept": policy_loss(clip(0.2), keep=opsm(0.1), correction=sequence_truncate(2.0)),
    "sft": sft_loss,
}


def random_batch(rows: int = 6, width: int = 5, dtype: torch.dtype = torch.float64, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, width, generator=generator) < 0.7
    mask[:, 0] = False
    mask[:, 1] = True
    columns = {name: torch.randn(rows, width, generator=generator).to(dtype) for name in COLUMNS}
    return Batch({"loss_mask": mask, **columns}, batch_size=[rows])


def outputs(batch: Batch, scale: float = 1.0, seed: int = 1) -> Tensor:
    shape = batch["loss_mask"].shape
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return x.to(batch["advantages"].dtype).requires_grad_()


def call(loss: MeanLoss, logprobs: Tensor, batch: Batch) -> tuple[Mean, dict[str, float]]:
    mean, metrics = loss(TensorDict({"logprobs": logprobs}, batch_size=batch.batch_size), batch)
    assert not any(value.requires_grad for metric in metrics.values() for value in metric)
    return mean, finalize(metrics)


def gradient(loss: MeanLoss, logprobs: Tensor, batch: Batch) -> Tensor:
    return torch.autograd.grad(call(loss, logprobs, batch)[0].total, logprobs)[0]


# -- numbers by hand: two rows, of two tokens and of one; position 0 is the prompt -------------------------------------

MASK = torch.tensor([[False, True, True], [False, True, False]])
RATIO = torch.tensor([[1.0, 1.5, 0.5], [1.0, 0.5, 1.0]])
LOGPROBS = torch.tensor([[0.0, -1.0, -2.0], [0.0, -3.0, 0.0]])
HAND = Batch(
    {
        "loss_mask": MASK,
        "advantages": torch.tensor([[0.0, 2.0, 2.0], [0.0, -1.0, 0.0]]),
        "old_logprobs": LOGPROBS - RATIO.log(),
        "rollout_logprobs": LOGPROBS
        - RATIO.log()
        - torch.tensor([[0.0, 4.0, 0.5], [0.0, 1.0, 0.0]]).clamp(min=1).log(),
        "ref_logprobs": LOGPROBS - torch.tensor([[0.0, 1.0, 2.0], [0.0, 3.0, 0.0]]),
    },
    batch_size=[2],
)  # old/rollout is 4, 1 and 1


@pytest.mark.parametrize(
    ("loss", "total", "weight"),
    [
        (grpo_loss, (-2.4 - 1.0) / 2 + 0.8, 2),
        (dapo_loss, -2.56 - 1.0 + 0.8, 3),
        (policy_loss(clip(0.2), aggregate=seq_sum(10)), (-2.4 - 1.0 + 0.8) / 10, 2),
        (policy_loss(clip(0.2), correction=truncate(3.0)), 3 * -2.4 - 1.0 + 0.8, 3),
        (policy_loss(clip(0.2), correction=icepop(0.5, 2.0)), 0 - 1.0 + 0.8, 3),
        (policy_loss(clip(0.2), penalty=kl(k2, 0.1)), -2.4 - 1.0 + 0.8 + 0.1 * (0.5 + 2.0 + 4.5), 3),
        # the penalty is not weighted by the correction
        (
            policy_loss(clip(0.2), penalty=kl(k1, 1.0), correction=truncate(3.0)),
            3 * -2.4 - 1.0 + 0.8 + 1 + 2 + 3,
            3,
        ),
        (policy_loss(reinforce), 2.0 * 1 + 2.0 * 2 - 1.0 * 3, 3),
        (policy_loss(cispo(0.3)), 1.3 * 2.0 * 1 + 0.5 * 2.0 * 2 - 0.5 * 3, 3),
        (policy_loss(clip(0.2), ratio=on_policy_ratio), -2.0 - 2.0 + 1.0, 3),
        (
            policy_loss(clip(math.inf), ratio=sequence_ratio, aggregate=seq_mean),
            -2 * math.sqrt(0.75) + 0.5,
            2,
        ),
        (sft_loss, 6.0, 3),
    ],
)
def test_by_hand(loss: MeanLoss, total: float, weight: float) -> None:
    mean, _ = call(loss, LOGPROBS, HAND)
    assert mean.total.item() == pytest.approx(total, rel=1e-5)
    assert mean.weight.item() == weight


def test_cispo_weighs_no_token_by_more_than_five() -> None:
    batch = HAND.copy().update({"old_logprobs": LOGPROBS - math.log(8)})
    mean, _ = call(cispo_loss, LOGPROBS, batch)
    assert mean.total.item() == pytest.approx(5 * (2.0 * 1 + 2.0 * 2 - 1.0 * 3), rel=1e-5)


def test_entropy_by_hand() -> None:
    entropy = torch.tensor([[math.nan, 1.0, 2.0], [math.inf, 4.0, 8.0]], requires_grad=True)
    mean, metrics = entropy_loss(TensorDict({"entropy": entropy}, batch_size=[2]), HAND)
    assert (mean.total.item(), mean.weight.item()) == (7, 3)
    assert finalize(metrics) == {"entropy": pytest.approx(7 / 3)}
    assert not any(value.requires_grad for metric in metrics.values() for value in metric)
    assert torch.autograd.grad(mean.total, entropy)[0].tolist() == MASK.float().tolist()


def test_metrics_by_hand() -> None:
    loss = policy_loss(clip(0.2), penalty=kl(k2, 0.1), correction=truncate(3.0))
    assert call(loss, LOGPROBS, HAND)[1] == pytest.approx(
        {
            "ratio": 2.5 / 3,
            "ratio_max": 1.5,
            "clip_fraction": 2 / 3,
            "approx_kl": sum(r - 1 - math.log(r) for r in (1.5, 0.5, 0.5)) / 3,
            "penalty": 0.1 * 7 / 3,
            "correction": 5 / 3,
        },
        rel=1e-5,
    )


def test_metrics_follow_the_options() -> None:
    lean = HAND.exclude("old_logprobs", "ref_logprobs", "rollout_logprobs")
    assert call(policy_loss(reinforce, ratio=on_policy_ratio), LOGPROBS, lean)[1] == {"ratio": 1.0, "ratio_max": 1.0}
    assert call(sft_loss, LOGPROBS, lean)[1] == {}


def test_a_correction_without_old_logprobs_is_theta_over_rollout() -> None:
    batch = HAND.exclude("old_logprobs")
    loss = policy_loss(reinforce, ratio=on_policy_ratio, correction=truncate(math.inf))
    logprobs = LOGPROBS.clone().requires_grad_()
    mean, metrics = call(loss, logprobs, batch)
    weights = [6.0, 0.5, 0.5]  # theta/old is 1.5, 0.5 and 0.5; old/rollout 4, 1 and 1
    assert metrics["correction"] == pytest.approx(sum(weights) / 3, rel=1e-5)
    expected = [[0, -2 * weights[0], -2 * weights[1]], [0, weights[2], 0]]  # detached: the weight has no gradient
    assert torch.autograd.grad(mean.total, logprobs)[0].tolist() == [pytest.approx(row, rel=1e-5) for row in expected]


def test_a_correction_is_detached_whatever_it_returns() -> None:
    plain, leaking = policy_loss(reinforce), policy_loss(reinforce, correction=lambda log_ratio, mask: OWN)
    OWN = torch.ones(2, 3, requires_grad=True)
    mean, _ = call(leaking, LOGPROBS.clone().requires_grad_(), HAND)
    assert torch.autograd.grad(mean.total, OWN, allow_unused=True)[0] is None
    assert mean.total == call(plain, LOGPROBS, HAND)[0].total


def test_clip_at_infinity_is_importance_sampling() -> None:
    batch = random_batch()
    logprobs = outputs(batch)
    ratio = (logprobs - batch["old_logprobs"]).exp()
    expected = -(ratio * batch["advantages"])[batch["loss_mask"]].sum()
    mean, _ = call(policy_loss(clip(math.inf)), logprobs, batch)
    torch.testing.assert_close(mean.total, expected)
    torch.testing.assert_close(torch.autograd.grad(mean.total, logprobs)[0], torch.autograd.grad(expected, logprobs)[0])


def test_the_ready_made_cispo_loss_has_an_upper_bound_alone() -> None:
    """Ratios of 8 and of 0.05, whose weights are 5 and 0.05."""
    mask = torch.ones(1, 2, dtype=torch.bool)
    columns = {"loss_mask": mask, "advantages": torch.ones(1, 2), "old_logprobs": -torch.tensor([[8.0, 0.05]]).log()}
    logprobs = torch.zeros(1, 2, requires_grad=True)
    found = gradient(cispo_loss, logprobs, Batch(columns, batch_size=[1]))
    assert found.tolist() == [[pytest.approx(-5.0), pytest.approx(-0.05)]]


def test_a_part_that_is_no_function() -> None:
    for name, part in (("surrogate", 0.2), ("ratio", "token"), ("correction", 2.0), ("keep", 1), ("aggregate", 5)):
        parts: dict[str, object] = {"surrogate": clip(0.2), name: part}
        with pytest.raises(TypeError, match=f"policy_loss: {name} is {part!r}; it is a function, such as "):
            policy_loss(**parts)  # type: ignore[arg-type]


def test_gspo_is_grpo_where_rows_have_one_token() -> None:
    """With the same bounds."""
    batch = random_batch()
    batch = Batch({**batch, "loss_mask": torch.arange(5).expand(6, 5) == 2}, batch_size=[6])
    logprobs = outputs(batch, scale=0.1)
    grpo = policy_loss(clip(3e-4, 4e-4), aggregate=seq_mean)
    found, expected = (call(loss, logprobs, batch)[0] for loss in (gspo_loss, grpo))
    assert found == expected
    assert torch.equal(gradient(gspo_loss, logprobs, batch), gradient(grpo, logprobs, batch))


@pytest.mark.parametrize(
    "correction",
    [truncate(2.0), icepop(0.5, 2.0), importance_mask(2.0), sequence_truncate(2.0), sequence_mask(0.9, 1.1)],
)
def test_at_a_lag_of_zero_a_correction_changes_nothing(correction: Correction) -> None:
    """The sampler's log-probabilities are the trainer's own."""
    batch = random_batch()
    batch = Batch({**batch, "rollout_logprobs": batch["old_logprobs"]}, batch_size=[6])
    logprobs = outputs(batch)
    loss, plain = policy_loss(clip(0.2), correction=correction), policy_loss(clip(0.2))
    mean, metrics = call(loss, logprobs, batch)
    assert metrics["correction"] == 1
    assert mean == call(plain, logprobs, batch)[0]
    assert torch.equal(gradient(loss, logprobs, batch), gradient(plain, logprobs, batch))


def test_gspo_by_a_slow_loop() -> None:
    batch = random_batch()
    logprobs = outputs(batch).detach()
    expected = 0.0
    for i in range(len(batch)):
        tokens = batch["loss_mask"][i].nonzero().flatten().tolist()
        s = math.exp(sum((logprobs[i, t] - batch["old_logprobs"][i, t]).item() for t in tokens) / len(tokens))
        for t in tokens:
            a = batch["advantages"][i, t].item()
            expected -= min(s * a, min(max(s, 0.9), 1.2) * a) / len(tokens)
    mean, _ = call(policy_loss(clip(0.1, 0.2), ratio=sequence_ratio, aggregate=seq_mean), logprobs, batch)
    assert mean.total.item() == pytest.approx(expected)


# -- what holds for every loss ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICY)
def test_weights_do_not_depend_on_outputs(name: str) -> None:
    batch = random_batch()
    weights = {call(POLICY[name], outputs(batch, scale), batch)[0].weight.item() for scale in (0.0, 1.0, 1e4)}
    assert len(weights) == 1
    assert weights.pop() > 0


@pytest.mark.parametrize("name", POLICY)
def test_rows_add_up(name: str) -> None:
    batch = random_batch()
    logprobs = outputs(batch)
    whole, _ = call(POLICY[name], logprobs, batch)
    parts = [call(POLICY[name], logprobs[i : i + 1], batch[i : i + 1])[0] for i in range(len(batch))]
    torch.testing.assert_close(torch.stack([part.total for part in parts]).sum(), whole.total)
    torch.testing.assert_close(torch.stack([part.weight for part in parts]).sum(), whole.weight)


@pytest.mark.parametrize("name", POLICY)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_what_is_masked_is_not_seen(name: str, garbage: float) -> None:
    batch = random_batch()
    logprobs = outputs(batch)
    mask = batch["loss_mask"]
    dirty = batch.copy()
    for column in COLUMNS:
        dirty[column] = torch.where(mask, batch[column], garbage)
    dirty_logprobs = torch.where(mask, logprobs.detach(), garbage).requires_grad_()
    expected, metrics = call(POLICY[name], logprobs, batch)
    found, dirty_metrics = call(POLICY[name], dirty_logprobs, dirty)
    assert found.total.item() == expected.total.item()
    assert dirty_metrics == metrics
    grad = gradient(POLICY[name], dirty_logprobs, dirty)
    torch.testing.assert_close(grad, gradient(POLICY[name], logprobs, batch))
    assert not grad[~mask].any()


@pytest.mark.parametrize("name", POLICY)
@pytest.mark.parametrize("size", [1e4, -1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_outputs_and_columns_are_finite(name: str, size: float, dtype: torch.dtype) -> None:
    plain = random_batch(dtype=dtype)
    for column in ("logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs"):
        batch = plain.copy()
        logprobs = outputs(plain)
        if column == "logprobs":
            logprobs = torch.full_like(logprobs, size).requires_grad_()
        else:
            batch[column] = torch.full_like(logprobs, size)
        mean, metrics = call(POLICY[name], logprobs, batch)
        assert bool(mean.total.isfinite()), column
        assert all(math.isfinite(value) for value in metrics.values()), column
        assert bool(gradient(POLICY[name], logprobs, batch).isfinite().all()), column


@pytest.mark.parametrize("name", POLICY)
def test_rows_without_tokens_add_nothing(name: str) -> None:
    rows = random_batch(4)
    empty = rows.copy()
    empty["loss_mask"] = torch.zeros_like(rows["loss_mask"])
    both: Batch = torch.cat([rows, empty])  # type: ignore[assignment]
    logprobs = outputs(both)
    found, expected = call(POLICY[name], logprobs, both)[0], call(POLICY[name], logprobs[: len(rows)], rows)[0]
    torch.testing.assert_close(found, expected)
    none = call(POLICY[name], logprobs[len(rows) :], empty)[0]
    assert (none.total.item(), none.weight.item()) == (0, 0)


@pytest.mark.parametrize("name", POLICY)
def test_a_batch_without_rows(name: str) -> None:
    batch = random_batch(2)[:0]
    mean, metrics = call(POLICY[name], outputs(batch), batch)
    assert (mean.total.item(), mean.weight.item()) == (0, 0)
    assert not any(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("name", POLICY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    batch = random_batch(dtype=dtype)
    mean, _ = call(POLICY[name], outputs(batch), batch)
    assert mean.total.dtype == mean.weight.dtype == dtype


@pytest.mark.parametrize("name", POLICY)
def test_leading_dimensions(name: str) -> None:
    batch = random_batch(6)
    logprobs = outputs(batch)
    flat, folded = (
        call(POLICY[name], logprobs, batch)[0],
        call(POLICY[name], logprobs.view(3, 2, -1), batch.reshape(3, 2))[0],
    )
    torch.testing.assert_close(folded, flat)


@pytest.mark.parametrize("name", POLICY)
def test_gradients_flow_through_the_outputs_alone(name: str) -> None:
    batch = random_batch()
    leaves = {column: batch[column].clone().requires_grad_() for column in COLUMNS}
    batch = batch.copy().update(leaves)
    mean, _ = call(POLICY[name], outputs(batch), batch)
    grads = torch.autograd.grad(mean.total, list(leaves.values()), allow_unused=True)
    assert all(grad is None for grad in grads)


READS: list[tuple[MeanLoss, str, str]] = [
    (grpo_loss, "grpo_loss", "advantages"),
    (dapo_loss, "dapo_loss", "loss_mask"),
    (grpo_loss, "token_ratio", "old_logprobs"),
    (policy_loss(reinforce), "policy_loss", "advantages"),
    (policy_loss(reinforce, correction=truncate(2.0)), "policy_loss", "rollout_logprobs"),
    (policy_loss(reinforce, penalty=kl(k3, 0.1)), "kl", "ref_logprobs"),
    (sft_loss, "sft_loss", "loss_mask"),
]


@pytest.mark.parametrize(("loss", "reader", "column"), READS)
def test_a_missing_column_is_named(loss: MeanLoss, reader: str, column: str) -> None:
    batch = random_batch()
    with pytest.raises(MissingColumn, match=f"{reader} reads the column '{column}'"):
        call(loss, outputs(batch), batch.exclude(column))


def test_no_column_is_read_that_is_not_needed() -> None:
    needs: list[tuple[MeanLoss, tuple[str, ...]]] = [
        (policy_loss(reinforce, ratio=on_policy_ratio), ("loss_mask", "advantages")),
        (reinforce_loss, ("loss_mask", "advantages")),
        (grpo_loss, ("loss_mask", "advantages", "old_logprobs")),
        (sft_loss, ("loss_mask",)),
    ]
    for loss, columns in needs:
        call(loss, LOGPROBS, HAND.select(*columns))


def test_names_and_documentation_of_ready_made_losses() -> None:
    names: list[tuple[Callable[..., object], str]] = [
        (grpo_loss, "grpo_loss"),
        (dapo_loss, "dapo_loss"),
    ]
    for loss, name in names:
        assert loss.__name__ == name
        assert loss.__doc__


def test_terms_of_a_sum_keep_their_weights_and_metrics() -> None:
    batch = random_batch()
    logprobs = outputs(batch)
    out = TensorDict({"logprobs": logprobs}, batch_size=batch.batch_size)
    found, metrics = add((1.0, grpo_loss), (0.5, dapo_loss), (0.1, sft_loss))(out, batch)
    assert isinstance(found, dict)
    assert list(found) == ["grpo_loss", "dapo_loss", "sft_loss"]
    torch.testing.assert_close(found["dapo_loss"].total, 0.5 * call(dapo_loss, logprobs, batch)[0].total)
    assert {"ratio", "ratio_2", "clip_fraction_2"} <= metrics.keys()


def test_a_ratio_of_the_users_own_may_be_unbounded() -> None:
    loss = policy_loss(clip(0.2), ratio=lambda logprobs, batch: logprobs + 1e4)
    mean, metrics = call(loss, LOGPROBS, HAND)
    assert bool(mean.total.isfinite())
    assert metrics["ratio_max"] == pytest.approx(bounded(torch.tensor(1e4)).exp().item())


def test_a_surrogate_of_the_users_own_does_not_see_what_is_masked() -> None:
    logprobs = torch.where(MASK, LOGPROBS, math.inf).requires_grad_()
    found = gradient(policy_loss(lambda log_ratio, logprobs, advantages: -advantages * logprobs.exp()), logprobs, HAND)
    assert bool(found.isfinite().all())


def test_ratio_max_is_a_max_and_aggregates_may_be_anything() -> None:
    out = TensorDict({"logprobs": LOGPROBS}, batch_size=[2])
    loss = policy_loss(reinforce, aggregate=lambda x, mask: token_mean(2 * x, mask))
    mean, metrics = loss(out, HAND)
    assert mean.total.item() == 2 * call(policy_loss(reinforce), LOGPROBS, HAND)[0].total.item()
    assert isinstance(metrics["ratio_max"], Max)
