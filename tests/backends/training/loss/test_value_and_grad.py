"""What a loss makes of outputs, and whether it looks at those that are not there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

import nrl
from nrl.algos import grpo_loss, needs, sft_loss, token_mean
from nrl.backends.training.loss.value_and_grad import ignores, value_and_grad
from nrl.batch import Batch
from nrl.batch.metrics import Max, Mean, Metrics, Sum
from nrl.errors import WeightError

MASK = torch.tensor([[False, False, True, True], [False, True, False, False]])
LOGPROBS = torch.tensor([[0.0, 0.0, -1.0, -2.0], [0.0, -4.0, 0.0, 0.0]])
PLACES = torch.tensor([1, 6, 7])
"""Flat places of outputs that have been left out: one in the first row, two in the second."""


def batch_of() -> Batch:
    zeros = torch.zeros(2, 4)
    return nrl.assign(
        Batch({}, batch_size=[2]),
        input_ids=torch.ones(2, 4, dtype=torch.int64),
        loss_mask=MASK,
        advantages=torch.tensor([[1.0], [-2.0]]).expand(2, 4),
        old_logprobs=zeros - 1,
    )


def looks(loss: Any, **outputs: Tensor) -> bool:
    """Whether it is found out to read what has been left out."""
    given = {"logprobs": LOGPROBS} | outputs
    found = value_and_grad(loss, "loss", given, batch_of(), {"loss": 3.0})
    same = ignores(loss, "loss", given, batch_of(), {"loss": 3.0}, PLACES, found)
    assert same.shape == ()
    return not bool(same)


def test_evaluate_by_hand() -> None:
    def loss(out: TensorDict, batch: Batch) -> tuple[dict[str, Mean], Metrics]:
        square = token_mean(out["logprobs"] ** 2, batch["loss_mask"])
        plain = token_mean(-out["logprobs"], batch["loss_mask"])
        return {"square": square, "plain": plain}, {"longest": Max(out["logprobs"].abs().max())}

    found = value_and_grad(loss, "loss", {"logprobs": LOGPROBS}, batch_of(), {"square": 2.0, "plain": 4.0})
    assert found.loss.item() == (1 + 4 + 16) / 2 + 7 / 4
    assert {key: (float(x.total), float(x.weight)) for key, x in found.terms.items()} == {
        "square": (21.0, 3.0),
        "plain": (7.0, 3.0),
    }
    assert found.gradients["logprobs"].equal(torch.where(MASK, LOGPROBS - 0.25, 0.0))
    assert float(found.metrics["longest"][0]) == 4
    assert not any(x.requires_grad for value in found.metrics.values() for x in value)


def test_evaluate_without_a_gradient() -> None:
    def constant(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        return token_mean(batch["advantages"], batch["loss_mask"]), {}

    found = value_and_grad(constant, "constant", {"logprobs": LOGPROBS}, batch_of(), {"loss": 3.0})
    assert found.loss.item() == 0
    assert not found.gradients["logprobs"].any()


def test_evaluate_names_a_loss_whose_terms_change() -> None:
    with pytest.raises(WeightError, match=r"my_loss: its terms are loss on some outputs and other on others"):
        value_and_grad(sft_loss, "my_loss", {"logprobs": LOGPROBS}, batch_of(), {"other": 3.0})


def test_evaluate_leaves_outputs_alone() -> None:
    given = LOGPROBS.clone()
    value_and_grad(sft_loss, "sft", {"logprobs": given}, batch_of(), {"loss": 3.0})
    assert given.equal(LOGPROBS)
    assert not given.requires_grad


def times_the_mask(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    mask = batch["loss_mask"].float()
    return Mean(-(out["logprobs"] * mask).sum(), mask.sum()), {}


@pytest.mark.parametrize("loss", [sft_loss, grpo_loss, times_the_mask])
def test_losses_that_keep_to_the_mask(loss: Any) -> None:
    assert not looks(loss)


def of(metric: Callable[[Tensor], Any]) -> Any:
    """The supervised loss, with a metric of all log-probabilities."""

    def loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        mean, _ = sft_loss(out, batch)
        return mean, {"metric": metric(out["logprobs"].detach())}

    return loss


def fails(x: Tensor) -> Sum:
    if x.flatten()[PLACES].any():
        raise RuntimeError("an output that is not 0")
    return Sum(x.sum())


@pytest.mark.parametrize(
    "metric",
    [
        lambda x: Sum(x.sum()),
        lambda x: Mean(x.sum(), torch.ones(())),
        lambda x: Max(x[1, 2:].max()),
        lambda x: Sum((x > -3).sum()),
        lambda x: Sum(torch.where(x[0, 3] < -1.5, x[0, 1], 0.0)),
        lambda x: Sum(x[x < -1]),
        fails,
    ],
)
def test_metrics_that_read_elsewhere(metric: Callable[[Tensor], Any]) -> None:
    assert looks(of(metric))


def test_what_was_not_left_out_may_be_read() -> None:
    """Places that no token is predicted at are zeros for every loss."""
    assert not looks(of(lambda x: Sum(x[:, 0].sum())))


def test_a_metric_that_is_not_a_number_tells_nothing() -> None:
    assert looks(of(lambda x: Sum(x.sum() * float("nan"))))


def test_a_gradient_that_reads_elsewhere() -> None:
    """The value is 1 for each row whatever the outputs are; the gradient goes to all of them."""

    def loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        row = out["logprobs"].sum(-1, keepdim=True)
        return token_mean((row - row.detach()).exp().expand(2, 4), batch["loss_mask"]), {}

    assert looks(loss)


def test_a_gradient_whose_size_is_read_elsewhere() -> None:
    def loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        x, size = out["logprobs"], out["logprobs"].detach().sum(-1, keepdim=True)
        return token_mean((x - x.detach()) * size, batch["loss_mask"]), {}

    assert looks(loss)


def test_other_outputs_are_looked_after_too() -> None:
    @needs("entropy")
    def loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        mean, _ = sft_loss(out, batch)
        return mean, {"entropy": Sum(out["entropy"].detach().sum())}

    assert looks(loss, entropy=LOGPROBS.abs())
    assert not looks(sft_loss, entropy=LOGPROBS.abs())


WIDE = torch.zeros(2, 4, 3).index_copy(1, torch.tensor([2]), torch.tensor([[[1.0, -2.0, 0.5]], [[0.0, 0.0, 0.0]]]))
"""Logits of three words at a place that has been computed, and zeros elsewhere."""


def of_logits(where: Tensor) -> Any:
    """A loss that reads log-probabilities of words at some places; their mean over words is that of equal logits."""

    @needs("logits")
    def loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        mean, _ = sft_loss(out, batch)
        every = out["logits"].detach().log_softmax(-1).mean(-1)
        return mean, {"smooth": Sum(torch.where(where, every, 0.0).sum())}

    return loss


def test_outputs_of_several_numbers_a_token_are_looked_after_token_by_token() -> None:
    assert not looks(of_logits(MASK), logits=WIDE)
    for place in PLACES.tolist():
        elsewhere = torch.zeros(8, dtype=torch.bool)
        elsewhere[place] = True
        assert looks(of_logits(elsewhere.view(2, 4)), logits=WIDE)
    assert not looks(of_logits(torch.tensor([[True], [True]]) & (torch.arange(4) == 0)), logits=WIDE)
