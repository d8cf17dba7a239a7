"""A trainer whose engine is a pipeline of two stages: what it says comes from the last one."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from nrl import P, shard_map
from nrl.algos import Loss
from nrl.backends.models.shards import ShardLoader, full_shard
from nrl.backends.training.saving.save_plan import SavePlan
from nrl.backends.training.trainer import make_trainer
from nrl.backends.types import Piece
from nrl.batch import Batch, assign
from nrl.batch.metrics import Mean, Metrics, finalize
from nrl.files import Folder
from nrl.runtime import Cluster, process

pytestmark = pytest.mark.ray


NAMES = ["first", "last"]


class TwoStages:
    """log p = -(ids * w0) * w1; the first stage holds w0, the last w1. Plain gradient descent at a rate of 0.1."""

    provides = frozenset({"logprobs"})
    frozen_token: int | None = None

    def __init__(self) -> None:
        mesh = process().device_mesh
        self.stage, peers = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
        self.other, self.copies = dist.get_global_rank(peers, 1 - self.stage), mesh["dp"].get_group()

    def init(self) -> Tensor:
        return torch.tensor([0.5 + self.stage], requires_grad=True)

    def receive(self, state: Tensor) -> ShardLoader:
        """A stage has its own weight, and nothing of the other one."""
        mine, other = NAMES[self.stage], NAMES[1 - self.stage]
        nothing = Piece(other, (1,), (slice(0, 0),), torch.empty(0))
        return ShardLoader({mine: full_shard(mine, state.detach()), other: nothing}, "trainer.init")

    def params(self, state: Tensor) -> Tensor:
        return state

    def load(self, source: str | None) -> Tensor:
        return self.init()

    def freeze(self, params: Tensor) -> Tensor:
        return params.detach().clone()

    def output(self, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """What the stage computes, and what it was given."""
        given = batch["input_ids"].float()
        if self.stage:
            dist.recv(given, self.other)
        given.requires_grad_()
        found = -given * w if self.stage else given * w
        if not self.stage:
            dist.send(found.detach(), self.other)
        return found, given

    def forward(self, params: Tensor, microbatches: Iterable[Batch], needs: frozenset[str]) -> Sequence[TensorDict]:
        found = []
        for batch in microbatches:
            logprobs = self.output(params.detach(), batch)[0].detach()
            if self.stage:
                found.append(TensorDict({"logprobs": logprobs}, batch_size=batch.batch_size))
        return found

    def train(
        self, state: Tensor, loss: Loss, microbatches: Iterable[Batch], weights: Mapping[str, float]
    ) -> tuple[Tensor, Metrics]:
        total = torch.zeros(())
        for batch in microbatches:
            found, given = self.output(state, batch)
            if self.stage:
                mean, _ = loss(TensorDict({"logprobs": found}, batch_size=batch.batch_size), batch)
                assert isinstance(mean, Mean)
                value = mean.total / weights["loss"]
                value.backward()
                assert given.grad is not None
                dist.send(given.grad, self.other)
                total += value.detach()
            else:
                slope = torch.empty_like(found)
                dist.recv(slope, self.other)
                found.backward(slope)
        assert state.grad is not None
        for each in (state.grad, total):
            dist.all_reduce(each, group=self.copies)
        new = (state - 0.1 * state.grad).detach().requires_grad_()
        one = torch.ones(())
        return new, {"loss": Mean(total, one), "stage": Mean(one * self.stage, one)}

    def adapter(self, params: Tensor) -> Tensor:
        raise NotImplementedError

    def pieces(self, params: Tensor) -> Iterator[Piece]:
        """Each stage has its own; of its two copies the first speaks."""
        if process().device_mesh.get_local_rank("dp") == 0:
            yield full_shard(NAMES[self.stage], params.detach())

    def save(self, *args: Any) -> SavePlan:
        raise NotImplementedError

    save_params = save

    def restore(self, folder: Folder, record: Mapping[str, Any]) -> Tensor:
        raise NotImplementedError

    restore_params = restore

    def export(self, params: Tensor, folder: Path) -> None:
        raise NotImplementedError


def loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    x = out["logprobs"] ** 2
    return Mean((x * batch["loss_mask"]).sum(), batch["loss_mask"].sum().float()), {}


def test_what_a_pipeline_says_comes_from_its_last_stage(on_ray: Cluster) -> None:
    mask = torch.arange(4) < torch.tensor([[2], [4], [3], [4]])
    ids = torch.arange(16).view(4, 4) % 5 * mask
    batch = assign(Batch({}, batch_size=[4]), input_ids=ids, attention_mask=mask, loss_mask=mask)
    mesh = on_ray.reserve(4).mesh(dp=2, pp=2, executable="system", name="stages")
    ranks = shard_map(lambda x: x * 0 + process().rank, mesh, P("dp"), P("dp"))
    assert set(ranks(torch.zeros(4)).result().tolist()) == {2, 3}
    trainer = make_trainer(mesh, TwoStages, name="stages", max_tokens=8)
    state = trainer.init()
    assert trainer.logprobs(state.params, batch).result().equal(-0.75 * ids)

    w0, w1 = torch.tensor(0.5, requires_grad=True), torch.tensor(1.5, requires_grad=True)
    expected = ((ids * w0 * w1) ** 2 * mask).sum() / mask.sum()
    expected.backward()
    state, metrics = trainer.train_step(loss)(state, batch)
    assert finalize(metrics.result()) == pytest.approx({"loss": expected.item(), "stage": 1.0, "skipped": 0.0})
    weights = dict(state.params.tensors())
    assert weights.keys() == {"first", "last"}
    assert w0.grad is not None
    assert w1.grad is not None
    assert weights["first"].item() == pytest.approx(0.5 - 0.1 * w0.grad.item())
    assert weights["last"].item() == pytest.approx(1.5 - 0.1 * w1.grad.item())
    copied = trainer.init(state.params)  # each stage takes its own weight out of those of all
    assert dict(copied.params.tensors()) == weights
