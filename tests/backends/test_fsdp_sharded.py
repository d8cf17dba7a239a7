"""The torch engine in several processes against itself in one: the same numbers, the same files, errors in all of them.

The functions whose first argument is a mesh run in every process of a pool, and with None in this one.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import nrl
from nrl import algos, tiny
from nrl.algos import Loss, needs, sft_loss, token_mean
from nrl.backends import Model, adamw, models
from nrl.backends.fsdp.agreement import Held, Mishap, Peers
from nrl.backends.fsdp.engine import State, TorchEngine
from nrl.backends.training import global_weights
from nrl.batch import Batch
from nrl.errors import BatchError, ClusterError, MissingColumn, ModelError, NotFinite, PlacementError, WeightError
from nrl.reduce import Max, Mean, Metrics, Min, Sum, finalize
from tests.backends.processes import Processes
from tests.backends.test_fsdp import CONFIGS, MIXED, QWEN3, batch_of, entropy_loss

pytestmark = pytest.mark.timeout(600)

TINY_PARTS = QWEN3 | {"head_dim": 2, "num_key_value_heads": 1}
"""With weights of two rows, which three processes cannot share evenly."""


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    processes = Processes(2)
    yield processes
    processes.close()


@pytest.fixture(scope="module")
def three() -> Iterator[Processes]:
    processes = Processes(3)
    yield processes
    processes.close()


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> Processes:
    found: Processes = request.getfixturevalue(request.param)
    return found


both = pytest.mark.parametrize("pool", ["two", "three"], indirect=True)


# losses


@needs("entropy")
def everywhere(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    """Reads outputs where ``loss_mask`` is false."""
    every = batch["attention_mask"]
    return token_mean(-out["logprobs"] - 0.1 * out["entropy"], every), {"all": Sum(out["logprobs"].detach().sum())}


def of_some_rows(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    """Has metrics of every kind, some of them only where a row is long: so not in every process."""
    found: Metrics = {"rows": Sum(torch.tensor(len(batch)))}
    long = batch["attention_mask"].sum(-1) > 16
    if long.any():
        logprobs = out["logprobs"].detach()[long]
        found |= {"long": Mean(logprobs.sum(), long.sum().float())}
        found |= {"long_max": Max(logprobs.max()), "long_min": Min(logprobs.min())}
    return token_mean(-out["logprobs"], batch["loss_mask"]), found


def two_kinds(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    mean = token_mean(-out["logprobs"], batch["loss_mask"])
    return mean, {"kind": Sum(mean.total.detach()) if batch["attention_mask"][0, 0] else mean}


class LocalError(Exception):
    """Cannot be pickled: its arguments are not those that it is made with."""

    def __init__(self, a: str, b: str) -> None:
        super().__init__(f"{a} {b}")


@attrs.frozen
class Raises:
    """Raises in the process that sees the token 22 where the outputs are real."""

    make: Callable[[], Exception]

    def __call__(self, out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        if (batch["input_ids"] == 22).any() and out["logprobs"].any():
            raise self.make()
        return sft_loss(out, batch)


def local_error() -> Exception:
    return LocalError("it", "cannot travel")


def value_error() -> Exception:
    return ValueError("a row that I do not like")


def missing() -> Exception:
    return MissingColumn("my_loss", "values", ["input_ids"], "Add it.")


def weight_by_output(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    seen = batch["loss_mask"] & (out["logprobs"] > -3)
    return token_mean(-out["logprobs"], seen), {}


def not_finite(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    """NaN in the gradient of the row with the token 22."""
    bad = (batch["input_ids"] == 22).any(-1, keepdim=True)
    scale = torch.where(bad, torch.nan, torch.ones(()))
    return token_mean(-out["logprobs"] * scale, batch["loss_mask"]), {}


LOSSES: dict[str, Loss] = {
    "grpo": algos.grpo_loss,
    "sft": sft_loss,
    "dpo": algos.dpo_loss(0.1),
    "two terms": algos.add((1.0, algos.grpo_loss), (0.1, entropy_loss)),
    "everywhere": everywhere,
    "of some rows": of_some_rows,
}


# what runs in each process


def where(mesh: DeviceMesh | None) -> tuple[int, int]:
    return (0, 1) if mesh is None else (mesh["dp"].get_local_rank(), mesh["dp"].size())


def engine(mesh: DeviceMesh | None, model: Model | None = None, packed: bool = True, **options: Any) -> TorchEngine:
    settings = {"checkpointing": False, "compile": False} | options
    optimizer = adamw(lr=1e-2, eps=1e-3, weight_decay=0.01)
    return TorchEngine(
        model or Model(QWEN3), optimizer, packed, device=torch.device("cpu"), mesh=mesh, **settings
    )  # type: ignore[arg-type]


def pairs(batch: Batch) -> Batch:
    return Batch({name: batch[name].unflatten(0, (-1, 2)) for name in batch.keys()}, batch_size=[len(batch) // 2])


def batches(loss: str, steps: int, sizes: Sequence[int] = (*MIXED, 3)) -> list[Batch]:
    made = [batch_of(list(sizes), seed=seed, temperature=torch.linspace(0.7, 1.2, len(sizes))) for seed in range(steps)]
    return [pairs(batch).lock_() for batch in made] if loss == "dpo" else made


def mine(mesh: DeviceMesh | None, batch: Batch, max_tokens: int = 40) -> list[Batch]:
    rank, size = where(mesh)
    return list(nrl.microbatches(nrl.shard(batch, size)[rank], max_tokens=max_tokens))


def train(mesh: DeviceMesh | None, loss: str, steps: int, **options: Any) -> tuple[list[dict[str, float]], Any]:
    """The metrics of each step, the weights and moments after the last."""
    made = engine(mesh, **options)
    state, numbers = made.init(), []
    for batch in batches(loss, steps):
        fn = LOSSES[loss]
        state, metrics = made.train(state, fn, mine(mesh, batch), global_weights(fn, batch))
        numbers.append(finalize(metrics))
    assert state.step == steps
    return numbers, everything(made, state)


def everything(made: TorchEngine, state: State) -> dict[str, Tensor]:
    """Weights and moments, whole, by name."""
    found = dict(made.tensors(state.module))
    for name, parameter in state.module.named_parameters():
        for key, x in state.optimizer.state[parameter].items():
            found[f"{name}.{key}"] = x.full_tensor() if isinstance(x, DTensor) else x
    return {name: x.clone() for name, x in found.items()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], relative: float) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=relative, atol=relative * (1e-9 + float(x.abs().max())))


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], x) for name, x in expected.items())


# the same numbers


CASES: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {}),
    ("grpo", {"packed": False}),
    ("sft", {"model": Model(CONFIGS["qwen3 untied"], dtype="float64")}),
    ("dpo", {"model": Model(QWEN3, dtype="float64")}),
    ("dpo", {"packed": False}),
    ("two terms", {"model": Model(TINY_PARTS, dtype="float64")}),
    ("everywhere", {"model": Model(CONFIGS["llama tied"], dtype="float64")}),
    ("everywhere", {"model": Model(CONFIGS["qwen2 untied"], dtype="float64"), "packed": False}),
    ("of some rows", {"model": Model(CONFIGS["phi, a head with a bias"], dtype="float64")}),
    ("grpo", {"checkpointing": True, "model": Model(QWEN3, dtype="float64")}),
]


@both
@pytest.mark.parametrize(("loss", "options"), CASES)
def test_five_steps_give_the_numbers_of_one_process(pool: Processes, loss: str, options: dict[str, Any]) -> None:
    relative = 1e-9 if options.get("model", Model(QWEN3)).dtype == "float64" else 1e-5
    numbers, weights = train(None, loss, 5, **options)
    found = pool(train, loss, 5, **options)
    for others, parts in found:
        assert [x.keys() for x in others] == [x.keys() for x in numbers]
        assert others == found[0][0]  # the same in every process
        for a, b in zip(others, numbers, strict=True):
            assert a == pytest.approx(b, rel=relative, abs=relative)
        assert_equal(parts, found[0][1])
        assert_close(parts, weights, relative)
