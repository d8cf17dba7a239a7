"""Several optimizer steps on one batch."""

from typing import Any

import pytest
import torch

import nrl
from nrl import Batch, tiny
from nrl.algos import dapo_loss, sft_loss
from nrl.backends import Trainer, adamw, fsdp
from nrl.batch.metrics import finalize, merge, without
from nrl.errors import BatchError, ConfigError
from nrl.runtime import Slots
from tests.weights import assert_equal, weights


@pytest.fixture(scope="module")
def trainer(slots: Slots) -> Trainer:
    return fsdp.trainer(slots[:1], tiny.model(hidden_size=32), adamw(lr=1e-2))


@pytest.fixture(scope="module")
def batch(trainer: Trainer) -> Batch:
    rows = tiny.sums(16).take(1)[0]
    logprobs = trainer.logprobs(trainer.init().params, rows).result()
    advantages = torch.arange(16.0).unsqueeze(-1) * rows["loss_mask"] - 7
    return nrl.assign(rows, old_logprobs=logprobs, rollout_logprobs=logprobs, advantages=advantages)


def test_the_parts_are_stepped_on_one_after_the_other(trainer: Trainer, batch: Batch) -> None:
    step = trainer.train_step(dapo_loss)
    some = nrl.minibatched(step, 3, seed=5)
    state, metrics = some(trainer.init(), batch)
    one, expected = trainer.init(), dict[str, Any]()
    for number, part in enumerate(nrl.minibatches(batch, 3, seed=5)):
        one, found = step(one, part)
        expected = merge(expected, without("mismatch/", found.result()) if number else found.result())
    assert state.step == one.step == 3
    assert_equal(weights(state), weights(one))
    assert finalize(metrics.result()) == finalize(expected)
    assert finalize(expected)["mismatch/max_abs"] < 1e-5  # not those of weights that the sampler never had
    following, _ = some(state, batch)
    for part in nrl.minibatches(batch, 3, seed=5 + 3):  # another draw
        one, _ = step(one, part)
    assert_equal(weights(following), weights(one))


def test_columns_are_split_too(trainer: Trainer, batch: Batch) -> None:
    some = nrl.minibatched(trainer.train_step(dapo_loss), 2)
    bare = Batch({name: x for name, x in batch.items() if name != "advantages"}, batch_size=[16])
    state, _ = some(trainer.init(), bare, advantages=batch["advantages"])
    whole, _ = some(trainer.init(), batch)
    assert_equal(weights(state), weights(whole))


def test_one_part_is_the_step_itself(trainer: Trainer) -> None:
    step = trainer.train_step(sft_loss)
    assert nrl.minibatched(step, 1) is step


def test_a_number_of_parts_that_a_batch_does_not_have(trainer: Trainer, batch: Batch) -> None:
    step = trainer.train_step(sft_loss)
    with pytest.raises(ConfigError, match="minibatched: n is 0; a batch is at least one part"):
        nrl.minibatched(step, 0)
    with pytest.raises(BatchError, match="n is 17; it must be between 1 and the number of rows, 16"):
        nrl.minibatched(step, 17)(trainer.init(), batch)
