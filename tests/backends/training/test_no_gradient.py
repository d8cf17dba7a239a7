"""A loss that cannot train is an error; one whose gradient happens to be zero is not."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import nrl
from nrl import tiny
from nrl.algos import clip, policy_loss, sft_loss, token_mean
from nrl.backends import Trainer, adamw, fsdp
from nrl.batch import Batch
from nrl.batch.metrics import Mean, Metrics, finalize
from nrl.errors import LossError, NoGradient, NotFinite

type Result = tuple[Mean | dict[str, Mean], Metrics]


@pytest.fixture(scope="module")
def trainer() -> Iterator[Trainer]:
    with nrl.cluster("local") as cluster:
        yield fsdp.trainer(cluster.reserve(1), tiny.model(), adamw(lr=1e-3))


def batch_of(rows: int = 4) -> Batch:
    batch: Batch = tiny.sums(rows).take(1)[0]
    return batch


def detached(out: TensorDict, batch: Batch) -> Result:
    return token_mean(-out["logprobs"].detach(), batch["loss_mask"]), {}


def without_grad(out: TensorDict, batch: Batch) -> Result:
    with torch.no_grad():
        return token_mean(-out["logprobs"], batch["loss_mask"]), {}


def by_numpy(out: TensorDict, batch: Batch) -> Result:
    numbers = torch.from_numpy(out["logprobs"].detach().cpu().numpy())
    return token_mean(-numbers, batch["loss_mask"]), {}


def constant(out: TensorDict, batch: Batch) -> Result:
    return token_mean(torch.ones_like(out["logprobs"]), batch["loss_mask"]), {}


def fixed(out: TensorDict, batch: Batch) -> Result:
    return Mean(torch.tensor(1.0), batch["loss_mask"].sum().float()), {}


def of_the_batch(out: TensorDict, batch: Batch) -> Result:
    return token_mean(batch["input_ids"].float(), batch["loss_mask"]), {}


def two_without(out: TensorDict, batch: Batch) -> Result:
    mask = batch["loss_mask"]
    return {"a": token_mean(-out["logprobs"].detach(), mask), "b": token_mean(mask.float(), mask)}, {}


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("loss", [detached, without_grad, by_numpy, constant, fixed, of_the_batch, two_without])
def test_a_loss_without_a_gradient(loss: Callable[..., Result], rows: int, trainer: Trainer) -> None:
    with pytest.raises(NoGradient) as raised:
        trainer.train_step(loss)(trainer.init(), batch_of(rows))[1].result()
    assert isinstance(raised.value, LossError)
    assert str(raised.value).startswith(f"train_step({loss.__name__}): the loss has no gradient")
    assert "Compute it from out['logprobs']" in str(raised.value)


def one_of_two(out: TensorDict, batch: Batch) -> Result:
    mask = batch["loss_mask"]
    return {"a": token_mean(-out["logprobs"], mask), "b": token_mean(-out["logprobs"].detach(), mask)}, {}


def times_zero(out: TensorDict, batch: Batch) -> Result:
    return token_mean(0.0 * out["logprobs"], batch["loss_mask"]), {}


@pytest.mark.parametrize("loss", [one_of_two, times_zero, nrl.algos.add((0.0, sft_loss))])
def test_one_term_is_enough_and_zero_is_a_gradient(loss: Any, trainer: Trainer) -> None:
    state, metrics = trainer.train_step(loss)(trainer.init(), batch_of())
    assert finalize(metrics.result())["skipped"] == 0
    assert state.step == 1


def test_advantages_of_zero_have_a_gradient_of_zero(trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    batch = batch_of()
    zeros = torch.zeros(batch["input_ids"].shape)
    batch = nrl.assign(batch, advantages=zeros, old_logprobs=zeros)
    state, metrics = trainer.train_step(policy_loss(clip(0.2)))(trainer.init(), batch)
    assert finalize(metrics.result())["grad_norm"] == 0.0
    assert state.step == 1
    assert "all advantages are 0" in capsys.readouterr().err


@pytest.mark.parametrize("loss", [detached, constant])
def test_a_weight_of_zero_skips_it(loss: Any, trainer: Trainer) -> None:
    batch = batch_of()
    batch = nrl.assign(batch, loss_mask=torch.zeros_like(batch["loss_mask"]))
    state, metrics = trainer.train_step(loss)(trainer.init(), batch)
    assert finalize(metrics.result())["skipped"] == 1
    assert state.step == 0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_value_that_is_not_finite(bad: float, trainer: Trainer) -> None:
    def shifted(out: TensorDict, batch: Batch) -> Result:  # whose gradient is finite
        return token_mean(bad - out["logprobs"], batch["loss_mask"]), {}

    with pytest.raises(NotFinite, match=rf"train_step\(shifted\): the loss is {bad}; nothing was changed"):
        trainer.train_step(shifted)(trainer.init(), batch_of())[1].result()


def test_a_gradient_that_is_not_finite(trainer: Trainer) -> None:
    def rooted(out: TensorDict, batch: Batch) -> Result:  # whose value is finite
        return token_mean((out["logprobs"] - out["logprobs"].detach()).abs().sqrt(), batch["loss_mask"]), {}

    with pytest.raises(NotFinite, match=r"train_step\(rooted\): the norm of the gradient is nan"):
        trainer.train_step(rooted)(trainer.init(), batch_of())[1].result()
