import math

import pytest
import torch
from tensordict import TensorDict

from nrl.algos import clip, k2, kl, opsm, policy_loss
from nrl.batch import Batch
from nrl.batch.metrics import finalize
from nrl.errors import MissingColumn

MASK = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])
ROLLOUT = torch.tensor([[-1.0, -1.0, 9.0], [-1.0, -2.0, -3.0], [0.0, 0.0, 0.0]])
THETA = torch.tensor([[-2.0, -1.5, 9.0], [-3.0, -3.0, -3.0], [math.nan, 0.0, 0.0]])  # 0.75 and 1 nat a token less


def batch(*signs: float) -> Batch:
    columns = {"loss_mask": MASK, "rollout_logprobs": ROLLOUT, "advantages": torch.tensor([[x] * 3 for x in signs])}
    return Batch(columns, batch_size=[3])


@pytest.mark.parametrize(
    ("delta", "signs", "kept"),
    [
        (0.7, (-1.0, -1.0, -1.0), [False, False]),
        (0.8, (-1.0, -1.0, -1.0), [True, False]),
        (1.1, (-1.0, -1.0, -1.0), [True, True]),
        (0.7, (1.0, -1.0, 1.0), [True, False]),
        (0.7, (0.0, 1.0, 1.0), [True, True]),
        (math.inf, (-1.0, -1.0, -1.0), [True, True]),
    ],
)
def test_opsm_by_hand(delta: float, signs: tuple[float, ...], kept: list[bool]) -> None:
    found = opsm(delta)(THETA, batch(*signs))
    assert found.tolist() == [
        [float(on and keep) for on in row] for row, keep in zip(MASK.tolist(), [*kept, 0], strict=True)
    ]


def test_a_row_on_policy_is_kept_at_a_delta_of_zero() -> None:
    found = opsm(0.0)(ROLLOUT, batch(-1.0, -1.0, -1.0))
    assert found.tolist() == MASK.float().tolist()
    assert found.dtype == torch.float32


def test_a_row_of_one_token_is_as_far_as_that_token() -> None:
    columns = {
        "loss_mask": torch.tensor([[False, True]]),
        "rollout_logprobs": torch.tensor([[0.0, -1.0]]),
        "advantages": torch.tensor([[-1.0, -1.0]]),
    }
    found = opsm(0.7)(torch.tensor([[0.0, -2.0]]), Batch(columns, batch_size=[1]))
    assert found.tolist() == [[0.0, 0.0]]


def test_rows_of_pairs_are_rows() -> None:
    rows = batch(-1.0, -1.0, 1.0)[:2]
    for delta in (0.7, 0.8, 1.1):
        pairs = opsm(delta)(THETA[:2].view(1, 2, 3), rows.reshape(1, 2))
        assert pairs.view(2, 3).tolist() == opsm(delta)(THETA[:2], rows).tolist()


def test_a_selection_leaves_out_the_surrogate_and_not_the_penalty() -> None:
    """Tokens that are left out stay in the denominator, and the weights have no gradient."""
    whole = Batch({**batch(-1.0, 1.0, 1.0), "old_logprobs": ROLLOUT, "ref_logprobs": ROLLOUT}, batch_size=[3])
    theta = ROLLOUT.clone().requires_grad_()
    loss = policy_loss(clip(0.2), keep=lambda logprobs, batch: logprobs.exp() * 0 + 0.5, penalty=kl(k2, 1.0))
    mean, metrics = loss(TensorDict({"logprobs": theta + 1.0}, batch_size=[3]), whole)
    assert mean.weight.item() == 5
    assert mean.total.item() == pytest.approx(0.5 * (2 * math.e - 3 * 1.2) + 5 * 0.5)
    assert finalize(metrics)["kept"] == 0.5
    (gradient,) = torch.autograd.grad(mean.total, theta)
    assert gradient[0, 0].item() == pytest.approx(0.5 * math.e + 1.0)


def test_at_a_lag_of_zero_all_rows_are_kept() -> None:
    found = opsm(0.0)(ROLLOUT, batch(-1.0, -1.0, -1.0))
    assert found.tolist() == MASK.float().tolist()


def test_a_selection_is_detached_whatever_it_returns() -> None:
    whole = Batch({**batch(-1.0, 1.0, 1.0), "old_logprobs": ROLLOUT}, batch_size=[3])
    own = torch.ones(3, 3, requires_grad=True)
    loss = policy_loss(clip(0.2), keep=lambda logprobs, batch: own)
    mean, metrics = loss(TensorDict({"logprobs": ROLLOUT}, batch_size=[3]), whole)
    assert not mean.total.requires_grad
    assert not any(value.requires_grad for metric in metrics.values() for value in metric)


def test_delta_is_not_negative() -> None:
    for delta in (-0.1, math.nan):
        with pytest.raises(ValueError, match=f"opsm: delta is {delta}; it is a divergence in nats a token"):
            opsm(delta)


@pytest.mark.parametrize("column", ["rollout_logprobs", "advantages", "loss_mask"])
def test_a_missing_column_is_named(column: str) -> None:
    with pytest.raises(MissingColumn, match=f"opsm reads the column '{column}'"):
        opsm(0.5)(THETA, batch(1.0, 1.0, 1.0).exclude(column))
