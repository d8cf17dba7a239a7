from typing import Any

import pytest
import torch
from tensordict import TensorDict

import nrl
from nrl.algos import add, dpo_loss, needs, sft_loss, token_mean
from nrl.backends import Trainer
from nrl.backends.training.trainer import make_trainer
from nrl.batch import Batch
from nrl.batch.metrics import Mean, finalize
from nrl.errors import MissingOutput
from nrl.runtime import Slots
from tests.backends.bigram import Bigram


@pytest.fixture
def trainer(slots: Slots) -> Trainer:
    return make_trainer(slots[:1].mesh(), Bigram, name="bigram", max_tokens=8)


def rows() -> Batch:
    ids = torch.tensor([[1, 2, 3], [3, 1, 0], [2, 2, 0]])
    mask = torch.tensor([[False, True, True], [False, True, False], [False, True, False]])
    return nrl.assign(Batch({}, batch_size=[3]), input_ids=ids, attention_mask=ids > 0, loss_mask=mask)


def test_it_is_the_loss_that_a_step_reports(trainer: Trainer) -> None:
    state = trainer.init()
    before = nrl.evaluate(sft_loss, trainer, state.params, rows())
    assert list(before) == ["eval/loss"]
    _, metrics = trainer.train_step(sft_loss)(state, rows())
    assert finalize(before)["eval/loss"] == pytest.approx(finalize(metrics.result())["loss"], rel=1e-6)


def test_its_parts_add_up(trainer: Trainer) -> None:
    params = trainer.load()
    whole = nrl.evaluate(sft_loss, trainer, params, rows())
    parts = [nrl.evaluate(sft_loss, trainer, params, rows()[i : i + 1].lock_()) for i in range(3)]
    together = nrl.merge(nrl.merge(parts[0], parts[1]), parts[2])
    assert finalize(together)["eval/loss"] == pytest.approx(finalize(whole)["eval/loss"], rel=1e-6)


def test_metrics_of_the_loss_come_along(trainer: Trainer) -> None:
    ids = torch.tensor([[[1, 2], [1, 3]]])
    mask = torch.tensor([[[False, True], [False, True]]])
    pairs = nrl.assign(Batch({}, batch_size=[1, 2]), input_ids=ids, attention_mask=mask | True, loss_mask=mask)
    params = trainer.load()
    pairs = nrl.assign(pairs, ref_logprobs=trainer.logprobs(params, pairs))
    found = finalize(nrl.evaluate(dpo_loss(0.1), trainer, params, pairs))
    assert found["eval/loss"] == pytest.approx(0.693147, abs=1e-6)
    assert found.keys() >= {"eval/accuracy", "eval/margin"}


def test_terms_are_named(trainer: Trainer) -> None:
    found = nrl.evaluate(add((1.0, sft_loss), (0.5, sft_loss)), trainer, trainer.load(), rows())
    assert len(found) == 2
    assert all(name.startswith("eval/loss/") for name in found)


def test_a_loss_that_needs_more(trainer: Trainer) -> None:
    @needs("entropy")
    def my_loss(out: TensorDict, batch: Batch) -> tuple[Mean, dict[str, Any]]:
        return token_mean(out["entropy"], batch["loss_mask"]), {}

    with pytest.raises(MissingOutput, match=r"evaluate\(my_loss\): forward: it needs entropy, and bigram provides"):
        nrl.evaluate(my_loss, trainer, trainer.load(), rows())
