"""``deterministic=true``: it is in force in the process of a trainer, and what has no such kernel is refused."""

import os
from collections.abc import Iterator

import pytest
import torch
from tensordict import TensorDict

from nrl import tiny
from nrl.algos import sft_loss, token_mean
from nrl.backends import adamw, fsdp
from nrl.backends.training.determinism import explain_refusals, make_deterministic
from nrl.batch import Batch
from nrl.batch.metrics import Mean, Metrics
from nrl.errors import ConfigError, NotDeterministic
from nrl.runtime import Slots

OF_TORCH = torch.backends.cudnn


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    before = OF_TORCH.deterministic, OF_TORCH.benchmark
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    OF_TORCH.deterministic, OF_TORCH.benchmark = before
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def puts(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    """A loss with an operation that has no deterministic kernel on any device: two indices may be the same."""
    mask = batch["loss_mask"]
    ones = torch.zeros(mask.numel()).put_(torch.nonzero(mask.flatten())[:, 0], torch.ones(int(mask.sum())))
    return token_mean(-out["logprobs"] * ones.view(mask.shape), mask), {}


def test_it_is_in_force(slots: Slots) -> None:
    batch = tiny.sums(8).take(1)[0]
    plain = fsdp.trainer(slots, tiny.model(), adamw(lr=1e-3))
    assert not torch.are_deterministic_algorithms_enabled()
    plain.train_step(puts)(plain.init(), batch)  # allowed
    trainer = fsdp.trainer(slots, tiny.model(), adamw(lr=1e-3), deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert (OF_TORCH.deterministic, OF_TORCH.benchmark) == (True, False)
    assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    with pytest.raises(NotDeterministic) as error:
        trainer.train_step(puts)(trainer.init(), batch)
    assert str(error.value).startswith("train_step(puts): under deterministic=true torch refuses put_")
    assert "or take deterministic=false" in str(error.value)
    found = [trainer.train_step(sft_loss)(trainer.init(), batch)[1].result()["loss"] for _ in range(2)]
    assert torch.equal(found[0][0], found[1][0])


def test_an_operation_of_the_step_itself_is_refused() -> None:
    make_deterministic()
    with pytest.raises(NotDeterministic, match=r"^forward: .* torch refuses put_"), explain_refusals("forward"):
        torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))
    with pytest.raises(RuntimeError, match="^another$"), explain_refusals("forward"):
        raise RuntimeError("another")


def test_a_workspace_that_is_not_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    make_deterministic()  # it is
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(ConfigError, match=r"CUBLAS_WORKSPACE_CONFIG=:0:0, .* set it to :4096:8 or :16:8"):
        make_deterministic()
