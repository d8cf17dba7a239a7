"""Laws 4 and 6: state is linear, and versions count publishes, whatever the order of steps, publishes and copies."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import nrl
from nrl.algos import sft_loss
from nrl.backends import Params, Trainer, TrainState, publish
from nrl.backends.training.trainer import make_trainer
from nrl.batch.metrics import finalize
from nrl.errors import ConsumedState
from nrl.runtime import Slots
from tests.backends.bigram import VOCABULARY, Bigram, Recorder

OPERATIONS = ("step", "skip", "publish", "publish to another", "freeze", "save and restore")


@pytest.fixture(scope="module")
def trainer(slots: Slots) -> Trainer:
    return make_trainer(slots[:2].mesh(), Bigram, name="bigram", max_tokens=100)


def batch_of(trained: bool) -> nrl.Batch:
    ids = torch.arange(12).view(3, 4) % VOCABULARY
    mask = torch.full((3, 4), trained) & (torch.arange(4) > 0)
    columns = {"input_ids": ids, "attention_mask": torch.ones_like(mask), "loss_mask": mask}
    return nrl.assign(nrl.Batch({}, batch_size=[3]), **columns, version=torch.tensor([0, 1, 2]))


def table(params: Params) -> Tensor:
    return dict(params.tensors())["table"]


@settings(max_examples=60)
@given(operations=st.lists(st.sampled_from(OPERATIONS), max_size=12))
def test_any_program(operations: list[str], trainer: Trainer, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Against the plainest model of it: two counters, a flag, and the last weights that were published."""
    state, samplers = trainer.init(), (Recorder(), Recorder())
    steps, version, counted = 0, 0, False
    dead: list[tuple[TrainState, Params]] = []
    frozen: list[tuple[Params, Tensor]] = []
    step = trainer.train_step(sft_loss)
    for operation in operations:
        match operation:
            case "step" | "skip":
                dead.append((state, state.params))
                before, trained = table(state.params).clone(), operation == "step"
                state, metrics = step(state, batch_of(trained))
                numbers = finalize(metrics.result())
                assert numbers["skipped"] == (not trained)
                assert torch.equal(table(state.params), before) != trained
                if trained:
                    steps, counted = steps + 1, False
                    assert numbers["lag"] == pytest.approx(version - 1)  # the rows are of versions 0, 1 and 2
            case "publish" | "publish to another":
                sampler = samplers[operation != "publish"]
                version, counted = version + (not counted), True
                assert publish(state.params, sampler) == version == sampler.version
                assert torch.equal(sampler.weights["table"], table(state.params))
            case "freeze":
                frozen.append((trainer.freeze(state.params), table(state.params).clone()))
            case "save and restore":
                folder = tmp_path_factory.mktemp("state")
                trainer.save(state, folder)
                state = trainer.restore(folder)
        assert (state.step, state.version) == (steps, version)
    for old, params in dead:
        for use in (lambda old=old: step(old, batch_of(True)), lambda old=old: old.params):
            with pytest.raises(ConsumedState):
                use()
        with pytest.raises(ConsumedState):
            trainer.logprobs(params, batch_of(True))
    for params, expected in frozen:
        assert torch.equal(table(params), expected)
