"""The torch engine in several processes against itself in one: the same numbers, the same files, errors in all of them.

The functions whose first argument is a mesh run in every process of a pool, and with None in this one.
"""

import hashlib
import json
import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import nrl
from nrl import algos, tiny
from nrl.algos import Loss, from_logits, needs, sft_loss, token_mean
from nrl.backends import Model, adamw
from nrl.backends.fsdp.torch_engine import TorchEngine
from nrl.backends.fsdp.torch_state import TorchState
from nrl.backends.models import loading, lora, named_weights
from nrl.backends.training import worker
from nrl.backends.training.collectives import DeferredError, ProcessGroup, pickle_error
from nrl.backends.training.loss.batch_checks import with_shares
from nrl.backends.training.loss.loss_terms import global_weights
from nrl.backends.training.weight_stream import iter_full_weights
from nrl.backends.types import Piece, top_k
from nrl.batch import Batch
from nrl.batch.metrics import Max, Mean, Metrics, Min, Sum, finalize
from nrl.batch.packed_rows import Packing
from nrl.errors import (
    BatchError,
    CheckpointError,
    ClusterError,
    MissingColumn,
    ModelError,
    NoGradient,
    NotFinite,
    PlacementError,
    WeightError,
)
from nrl.files import Written
from tests.backends.fsdp.test_torch_engine import CONFIGS, MIXED, QWEN3, batch_of, entropy_loss
from tests.backends.processes import Processes
from tests.disks import small_disk_at, transferred
from tests.metrics import assert_same_steps
from tests.properties.strategies import forked
from tests.weights import assert_close, assert_equal, bucket_of

pytestmark = pytest.mark.timeout(600)

TINY_PARTS = QWEN3 | {"head_dim": 2, "num_key_value_heads": 1}
"""With weights of two rows, which three processes cannot share evenly."""
LOGPROBS = frozenset({"logprobs"})


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


def log_normalizer(logits: Tensor) -> Tensor:
    return logits.logsumexp(-1)


LOG_Z = from_logits(log_normalizer)


@needs("logits", "hidden_states", LOG_Z)
def large_outputs(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    smooth = -out["logits"].log_softmax(-1).mean(-1) + out["hidden_states"].square().sum(-1)
    return token_mean(smooth + out[LOG_Z].square(), batch["loss_mask"]), {}


@attrs.frozen
class Picky:
    """A function of logits that raises where it sees the token 22: in a forward, or in the backward alone."""

    backward: bool

    def __call__(self, logits: Tensor, input_ids: Tensor) -> Tensor:
        if (input_ids == 22).any() and logits.requires_grad == self.backward:
            raise value_error()
        return logits.logsumexp(-1)


def of_picky(backward: bool) -> Loss:
    output = from_logits(Picky(backward), "input_ids")

    @needs(output)
    def picky(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        return token_mean(out[output], batch["loss_mask"]), {}

    return picky


LOSSES: dict[str, Loss] = {
    "large outputs": large_outputs,
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


def engine(
    mesh: DeviceMesh | None, model: Model | None = None, packing: Packing | None = nrl.Rectangles, **options: Any
) -> TorchEngine:
    settings = {"checkpointing": False, "compile": False} | options
    optimizer = adamw(lr=1e-2, eps=1e-3, weight_decay=0.01)
    return TorchEngine(model or Model(QWEN3), optimizer, packing, device=torch.device("cpu"), mesh=mesh, **settings)


def pairs(batch: Batch) -> Batch:
    return Batch({name: batch[name].unflatten(0, (-1, 2)) for name in batch.keys()}, batch_size=[len(batch) // 2, 2])


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
        state, metrics = made.train(state, fn, mine(mesh, batch), global_weights(fn, batch, widths=made.widths))
        numbers.append(finalize(metrics))
    assert state.step == steps
    return numbers, everything(made, state)


def whole(made: TorchEngine, params: Any) -> dict[str, Tensor]:
    """The weights that all processes have pieces of, in each of them; copies."""
    return {name: x.clone() for name, x in iter_full_weights(made.pieces(params), "test", made._peers.group)}


def filled(made: TorchEngine, tensors: Mapping[str, Tensor]) -> TorchState:
    """A fresh state with these weights."""
    state = made.init()
    receiving = made.receive(state)
    receiving.add(bucket_of(tensors))
    receiving.end()
    return state


def everything(made: TorchEngine, state: TorchState) -> dict[str, Tensor]:
    """Weights and moments, whole, by name."""
    found = whole(made, state.module)
    for name, parameter in state.module.named_parameters():
        for key, x in state.optimizer.state[parameter].items():
            found[f"{name}.{key}"] = x.full_tensor() if isinstance(x, DTensor) else x
    return {name: x.clone() for name, x in found.items()}


HEADS: dict[str, Loss] = {
    "value": algos.value_loss(0.2),
    "reward": algos.bradley_terry_loss(0.01),
    "lm": algos.distillation_loss(algos.reverse_kl),
}


def rows_of(head: str, sizes: Sequence[int]) -> Batch:
    """With the columns that the loss of the head reads."""
    draw, batch = torch.Generator().manual_seed(1), batch_of(list(sizes))
    noise = torch.randn(*batch["input_ids"].shape, 3, generator=draw)
    ids = torch.randint(0, 23, noise.shape, generator=draw)
    batch = nrl.assign(batch, returns=noise[..., 0], values=noise[..., 1])
    batch = nrl.assign(batch, teacher_ids=ids, teacher_topk_logprobs=noise.log_softmax(-1) - 0.1)
    return pairs(batch).lock_() if head == "reward" else batch


MANY_AND_FEW: tuple[tuple[int, ...], ...] = ((*MIXED, 3), (9, 5))


def headed(mesh: DeviceMesh | None, head: Any) -> list[tuple[list[dict[str, float]], Any, Any]]:
    """Two steps of a loss of another head, or of a teacher's tokens; and what the model says of its rows after them."""
    made, fn, found = engine(mesh, Model(QWEN3, head=head)), HEADS[head], []
    rank, size = where(mesh)
    need = {"value": "values", "reward": "rewards", "lm": top_k(4)}[head]
    split = partial(nrl.microbatches, max_tokens=40)
    for sizes in MANY_AND_FEW:
        state, batch, numbers = made.init(), rows_of(head, sizes), []
        for _ in range(2):
            state, metrics = made.train(state, fn, mine(mesh, batch), global_weights(fn, batch))
            numbers.append(finalize(metrics))
        out = worker.forward(
            split, frozenset({need}), {}, worker.find_in_state, made, state, nrl.shard(batch, size)[rank]
        )
        found.append((numbers, everything(made, state), out))
    return found


@both
@pytest.mark.parametrize("head", list(HEADS))
def test_other_heads_and_a_teachers_tokens(pool: Processes, head: str) -> None:
    """As in one process, also where some processes have no rows at all."""
    alone, together = headed(None, head), pool(headed, head)
    for sizes, (numbers, expected, whole), *found in zip(MANY_AND_FEW, alone, *together, strict=True):
        for rank, (theirs, weights, _) in enumerate(found):
            assert theirs == found[0][0], rank
            assert_close(weights, expected, 1e-4)
        for one, other in zip(found[0][0], numbers, strict=True):
            assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
        parts = nrl.shard(rows_of(head, sizes), len(found))
        for expected_output, *outputs in zip(whole, *(out for _, _, out in found), strict=True):
            torch.testing.assert_close(parts.restore(outputs), expected_output, atol=1e-4, rtol=1e-4)
            assert bool(expected_output.any())


# the same numbers


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("two", "grpo", {}),
    ("three", "grpo", {"model": Model(QWEN3, dtype="float64")}),
    ("two", "grpo", {"packing": None, "checkpointing": True, "model": Model(QWEN3, dtype="float64")}),
    ("three", "grpo", {"checkpointing": True}),
    ("three", "sft", {"model": Model(CONFIGS["qwen3 untied"])}),
    ("two", "dpo", {"model": Model(QWEN3, dtype="float64")}),
    ("three", "dpo", {"packing": None}),
    # Sequences share in other micro-batches than rectangles, and RMS norms round to float32 where a row is shared
    (
        "two",
        "grpo",
        {"packing": nrl.Sequences, "model": Model(CONFIGS["phi, a head with a bias"], dtype="float64")},
    ),
    ("two", "two terms", {"model": Model(TINY_PARTS, dtype="float64")}),
    ("three", "two terms", {"model": Model(TINY_PARTS, dtype="float64")}),
    ("three", "everywhere", {"model": Model(CONFIGS["llama tied"], dtype="float64")}),
    ("two", "everywhere", {"model": Model(CONFIGS["qwen2 untied"], dtype="float64"), "packing": None}),
    ("two", "large outputs", {"model": Model(QWEN3, dtype="float64")}),
    ("three", "large outputs", {"model": Model(CONFIGS["phi, a head with a bias"], dtype="float64"), "packing": None}),
    ("three", "of some rows", {"model": Model(CONFIGS["phi, a head with a bias"], dtype="float64")}),
]


@pytest.mark.parametrize(("pool", "loss", "options"), CASES, indirect=["pool"])
def test_three_steps_give_the_numbers_of_one_process(pool: Processes, loss: str, options: dict[str, Any]) -> None:
    relative = 1e-9 if options.get("model", Model(QWEN3)).dtype == "float64" else 1e-5
    numbers, weights = train(None, loss, 3, **options)
    found = pool(train, loss, 3, **options)
    for others, parts in found:
        assert others == found[0][0]  # the same in every process
        assert_same_steps(others, numbers, relative)
        assert_equal(parts, found[0][1])
        assert_close(parts, weights, relative)


def of_episodes(mesh: DeviceMesh | None) -> tuple[dict[str, float], dict[str, Tensor]]:
    """A step on episodes that forked, whose rows lie in different processes; in one process, on a row each."""
    made = engine(mesh, Model(CONFIGS["phi, a head with a bias"], dtype="float64"))
    batch, loss = batch_of([*MIXED, 3]), algos.dr_grpo_loss(16)
    batch = with_shares(batch if mesh is None else forked(batch))
    state, metrics = made.train(made.init(), loss, mine(mesh, batch), global_weights(loss, batch))
    return finalize(metrics), whole(made, state.module)


@both
def test_an_episode_whose_rows_lie_in_several_processes_counts_once(pool: Processes) -> None:
    numbers, weights = of_episodes(None)
    for found, theirs in pool(of_episodes):
        assert_same_steps([found], [numbers | {"tokens": found["tokens"]}], 1e-6)
        assert_close(theirs, weights, 1e-6)


def tokens_of(mesh: DeviceMesh | None, assigned: list[list[list[int]]]) -> list[float]:
    """The tokens of a step on rows of two prompts, which share all that they can."""
    rows = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8], [1, 2, 3, 9], [5, 5, 5], [5, 5, 6]]
    mask = torch.arange(6) < torch.tensor([len(row) for row in rows])[:, None]
    ids = torch.tensor([[*row, *[0] * (6 - len(row))] for row in rows])
    columns = {"input_ids": ids, "attention_mask": mask, "loss_mask": mask & (torch.arange(6) > 0)}
    batch = nrl.assign(Batch({}, batch_size=[5]), **columns)
    made = engine(mesh, Model(QWEN3), nrl.Sequences)
    _, metrics = made.train(made.init(), sft_loss, cut(mesh, batch, assigned), global_weights(sft_loss, batch))
    numbers = finalize(metrics)
    return [numbers[name] for name in ("tokens", "tokens/computed", "tokens/saved")]


@pytest.mark.parametrize(
    ("assigned", "computed", "saved"),
    [
        # 22 tokens, of which the last of each row predicts nothing. The first three of three rows, two of two
        ([[[0, 1, 2, 3, 4]], []], 9, 8),
        ([[[0, 1, 2]], [[3, 4]]], 9, 8),
        ([[[0, 1], [2]], [[3, 4]]], 11, 6),  # the first four of two rows: 12345 and 7, 123, 55
        ([[[0], [3], [4]], [[1, 2]]], 14, 3),
        ([[[0], [1], [2]], [[3], [4]]], 17, 0),
    ],
)
def test_tokens_of_all_processes_are_counted(
    two: Processes, assigned: list[list[list[int]]], computed: int, saved: int
) -> None:
    assert tokens_of(None, assigned) == [22, computed, saved]
    assert two(tokens_of, assigned) == [[22, computed, saved]] * 2


def cut(mesh: DeviceMesh | None, batch: Batch, assigned: list[list[list[int]]]) -> list[Batch]:
    """Rows of each micro-batch of each process; all of them where there is one process."""
    rank, size = where(mesh)
    parts = assigned[rank] if size > 1 else [part for parts in assigned for part in parts]
    return [nrl.pad(batch[torch.tensor(rows, dtype=torch.int64)], batch["input_ids"].shape[-1]) for rows in parts]


def first_steps(
    mesh: DeviceMesh | None, loss: str, splits: list[list[list[list[int]]]], hidden: list[int], packing: Packing | None
) -> list[tuple[dict[str, float], dict[str, Tensor]]]:
    """The first step of a fresh state, with each split of the rows."""
    batch = batch_of([*MIXED, 3])
    mask = batch["loss_mask"].clone()
    mask[hidden] = False
    batch = nrl.assign(batch, loss_mask=mask)
    made, fn = engine(mesh, Model(QWEN3, dtype="float64"), packing), LOSSES[loss]
    found = []
    for assigned in splits:
        state, metrics = made.train(made.init(), fn, cut(mesh, batch, assigned), global_weights(fn, batch))
        found.append((finalize(metrics), everything(made, state)))
    return found


UNEVEN: dict[str, tuple[list[list[list[int]]], list[int]]] = {
    "no row at all in one": ([[[0, 2, 3, 5], [6, 7, 8, 9, 1, 4]], []], []),
    "five micro-batches against one": ([[[0], [2], [3, 1, 4], [5], [6]], [[7, 8, 9]]], []),
    "rows that are masked in one": ([[[0, 1, 2, 3, 4]], [[5, 6], [7], [8, 9]]], [5, 6, 7, 8, 9]),
    "masked micro-batches between others": ([[[0, 1], [2], [3, 4]], [[5, 6], [7, 8, 9]]], [2, 5, 6]),
    "rows that predict nothing in one": ([[[0, 2, 3, 5, 6, 7, 8, 9]], [[1], [4]]], []),
}


@pytest.mark.parametrize(("loss", "packing"), [("grpo", nrl.Rectangles), ("grpo", nrl.Sequences), ("everywhere", None)])
@pytest.mark.parametrize("split", list(UNEVEN))
def test_uneven_splits(two: Processes, split: str, loss: str, packing: Packing | None) -> None:
    assigned, hidden = UNEVEN[split]
    ((numbers, weights),) = first_steps(None, loss, [assigned], hidden, packing)
    for found in two(first_steps, loss, [assigned, assigned[::-1]], hidden, packing):
        for others, parts in found:
            assert others == pytest.approx(numbers, rel=1e-9, abs=1e-12)
            assert_close(parts, weights, 1e-9)


def test_any_split_of_rows_gives_the_same_step(three: Processes) -> None:
    generator = torch.Generator().manual_seed(7)
    for packing in (nrl.Rectangles, nrl.Sequences, None, nrl.Rectangles):
        rank, part = (torch.randint(0, 3, (10,), generator=generator) for _ in range(2))
        assigned = [[torch.nonzero((rank == r) & (part == p))[:, 0].tolist() for p in range(3)] for r in range(3)]
        assigned = [[rows for rows in parts if rows] for parts in assigned]
        ((numbers, weights),) = first_steps(None, "two terms", [assigned], [], packing)
        for ((others, parts),) in three(first_steps, "two terms", [assigned], [], packing):
            assert others == pytest.approx(numbers, rel=1e-9, abs=1e-12)
            assert_close(parts, weights, 1e-9)


def bfloat16(mesh: DeviceMesh | None) -> tuple[list[float], set[torch.dtype], dict[str, Tensor]]:
    made = engine(mesh, Model(CONFIGS["qwen3 untied"], dtype="bfloat16"))
    state, losses = made.init(), []
    for batch in batches("grpo", 3):
        state, metrics = made.train(state, sft_loss, mine(mesh, batch), global_weights(sft_loss, batch))
        losses.append(finalize(metrics)["loss"])
    found = everything(made, state)
    return losses, {x.dtype for x in found.values()}, found


@both
def test_weights_and_moments_stay_in_float32_where_it_computes_in_bfloat16(pool: Processes) -> None:
    losses, _, weights = bfloat16(None)
    exact = train(None, "sft", 3, model=Model(CONFIGS["qwen3 untied"]))
    for others, dtypes, parts in pool(bfloat16):
        assert dtypes == {torch.float32}
        assert others == pytest.approx(losses, rel=1e-2)
        assert others != pytest.approx([x["loss"] for x in exact[0]], rel=1e-5)  # it is not float32
        for name, x in weights.items():
            moved = float((parts[name] - x).norm() / x.norm())
            assert moved < (0.1 if "exp_avg" in name else 0.02), name


def frozen_in_bfloat16(mesh: DeviceMesh | None, config: str, offload: Any = None) -> set[str]:
    made = attrs.evolve(engine(mesh, Model(CONFIGS[config], dtype="bfloat16")), offload=offload)
    state, (batch,) = made.init(), batches("grpo", 1)
    state, _ = made.train(state, sft_loss, mine(mesh, batch), global_weights(sft_loss, batch))
    frozen = made.freeze(state.module)
    outputs = [made.forward(each, mine(mesh, batch), LOGPROBS) for each in (state.module, frozen, made.freeze(frozen))]
    for one, *others in zip(*outputs, strict=True):
        assert all(torch.equal(one["logprobs"], other["logprobs"]) for other in others)
    assert {x.dtype for x in state.module.parameters()} == {torch.float32}
    loaded = made.load(None)
    found = [{name for name, x in each.named_parameters() if x.dtype == torch.bfloat16} for each in (frozen, loaded)]
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("config", ["qwen3 untied", "llama tied"])
def test_a_frozen_model_is_in_bfloat16(two: Processes, config: str) -> None:
    """Its log-probabilities are those of the trained one, to the bit: a forward rounds each weight."""
    alone = frozen_in_bfloat16(None, config)
    assert alone == dict(engine(None, Model(CONFIGS[config])).init().module.named_parameters()).keys()
    assert two(frozen_in_bfloat16, config) == two(frozen_in_bfloat16, config, "cpu") == [alone] * 2


def compiled(mesh: DeviceMesh | None, name: str, steps: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler warns of what it does itself
        return train(mesh, name, steps, compile=True)


@pytest.mark.slow
def test_a_compiled_model(two: Processes) -> None:
    numbers, weights = train(None, "grpo", 2)
    for others, parts in two(compiled, "grpo", 2):
        for a, b in zip(others, numbers, strict=True):
            assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
        assert_close(parts, weights, 1e-4)


# outputs without gradients


def outputs(mesh: DeviceMesh | None, assigned: list[list[list[int]]], packing: Packing | None) -> list[TensorDict]:
    made = engine(mesh, packing=packing)
    batch = batches("grpo", 1)[0]
    params = made.init().module
    found = made.forward(params, cut(mesh, batch, assigned), frozenset({"logprobs", "entropy"}))
    again = made.forward(made.load(None), cut(mesh, batch, assigned), LOGPROBS)
    for a, b in zip(found, again, strict=True):
        assert torch.equal(a["logprobs"], b["logprobs"])
    return list(found)


@pytest.mark.parametrize("packing", [nrl.Rectangles, nrl.Sequences, None])
@pytest.mark.parametrize("split", list(UNEVEN))
def test_forward(two: Processes, split: str, packing: Packing | None) -> None:
    assigned, _ = UNEVEN[split]
    expected = outputs(None, assigned, packing)
    found = [out for outs in two(outputs, assigned, packing) for out in outs]
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a["logprobs"].shape == b["logprobs"].shape
        torch.testing.assert_close(a["logprobs"], b["logprobs"], rtol=0, atol=1e-6)
        torch.testing.assert_close(a["entropy"], b["entropy"], rtol=0, atol=1e-6)


# errors


def attempt(mesh: DeviceMesh | None, loss: Loss, rank: int) -> tuple[type, str, list[str], bool, dict[str, Tensor]]:
    """What a step raises if one rank alone has the token 22, whether it left all as it was, and the next step."""
    batch = batch_of([5, 9, 4, 7, 3, 8, 6, 5])
    ids = batch["input_ids"].clone()
    ids[ids == 22] = 1
    mask = batch["loss_mask"].clone()
    ids[4 if rank else 0, 2], mask[4 if rank else 0, 2] = 22, True
    assigned = [[[0, 1], [2, 3]], [[4], [5], [6], [7]]]
    bad, good = nrl.assign(batch, input_ids=ids, loss_mask=mask), batch_of([5, 9, 4, 7, 3, 8, 6, 5], seed=1)
    made = engine(mesh)
    state = made.init()
    state, _ = made.train(state, sft_loss, cut(mesh, good, assigned), global_weights(sft_loss, good))
    before = everything(made, state)
    with pytest.raises(Exception, match=r"[\s\S]") as caught:
        made.train(state, loss, cut(mesh, bad, assigned), global_weights(sft_loss, bad))
    after = everything(made, state)
    same = state.step == 1 and all(torch.equal(after[name], x) for name, x in before.items())
    same &= all(p.grad is None for p in state.module.parameters())
    state, _ = made.train(state, sft_loss, cut(mesh, good, assigned), global_weights(sft_loss, good))
    error = caught.value
    return type(error), str(error), getattr(error, "__notes__", []), same, everything(made, state)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("make", [value_error, missing, local_error])
def test_an_error_of_a_loss_in_one_process_is_raised_in_all(
    two: Processes, make: Callable[[], Exception], rank: int
) -> None:
    original = make()
    _, _, _, _, weights = attempt(None, Raises(make), rank)
    answers = two(attempt, Raises(make), rank)
    assert answers[rank][:3] == (type(original), str(original), [])
    kind, text, notes, _, _ = answers[1 - rank]
    said = f"train_step(Raises): rank {rank} of dp raised it: {type(original).__name__}: {original}"
    if make is local_error:
        assert kind is ClusterError
        assert text == f"train_step(Raises): rank {rank} raised LocalError: it cannot travel"
    else:
        assert (kind, text) == (type(original), str(original))
    assert notes == [said]
    for _, _, _, same, parts in answers:
        assert same
        assert_close(parts, weights, 1e-5)


@pytest.mark.parametrize("backward", [False, True], ids=["in the forward", "in the backward"])
def test_an_error_of_a_function_of_logits_in_one_process_is_raised_in_all(two: Processes, backward: bool) -> None:
    _, _, _, _, weights = attempt(None, of_picky(backward), 1)
    (kind, text, notes, *_), own = answers = two(attempt_picky, backward)
    assert own[:3] == (ValueError, str(value_error()), [])
    assert (kind, text) == (ValueError, str(value_error()))
    assert notes == [f"train_step(picky): rank 1 of dp raised it: ValueError: {value_error()}"]
    for _, _, _, same, parts in answers:
        assert same
        assert_close(parts, weights, 1e-5)


def attempt_picky(mesh: DeviceMesh, backward: bool) -> Any:
    return attempt(mesh, of_picky(backward), 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_number_that_is_not_finite_in_one_process(two: Processes, rank: int) -> None:
    for kind, text, _, same, _ in two(attempt, not_finite, rank):
        assert kind is NotFinite
        assert re.match(r"train_step\(not_finite\): the loss is nan; nothing was changed", text)
        assert same


def detached(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    return token_mean(-out["logprobs"].detach(), batch["loss_mask"]), {}


def test_a_loss_without_a_gradient_in_all_processes(two: Processes) -> None:
    for kind, text, _, same, _ in two(attempt, detached, 0):
        assert kind is NoGradient
        assert text.startswith("train_step(detached): the loss has no gradient")
        assert same


def discarded(mesh: DeviceMesh | None, rank: int) -> tuple[str, list[str], bool]:
    """A step whose gradients somebody takes away in one rank, before they are read."""
    made, batch = engine(mesh), batch_of(MIXED)
    state = made.init()
    before = everything(made, state)
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda x: setattr(x, "grad", None))
        for parameter in state.module.parameters()
        if where(mesh)[0] == rank
    ]
    with pytest.raises(ModelError) as caught:
        made.train(state, sft_loss, mine(mesh, batch), global_weights(sft_loss, batch))
    after = everything(made, state)
    for hook in hooks:
        hook.remove()
    same = all(torch.equal(after[name], x) for name, x in before.items())
    same &= all(p.grad is None for p in state.module.parameters())
    state, metrics = made.train(state, sft_loss, mine(mesh, batch), global_weights(sft_loss, batch))
    assert finalize(metrics)["grad_norm"] > 0
    return str(caught.value), getattr(caught.value, "__notes__", []), same


def test_a_step_without_any_gradient(two: Processes) -> None:
    """As where a version of torch discards them; one that trains nothing must not look like one that does."""
    said, _, same = discarded(None, 0)
    assert re.match(
        r"train_step\(sft_loss\): no trained parameter has a gradient at optimizer step 0; nothing was", said
    )
    assert f"found is torch {torch.__version__}" in said
    assert same
    first, second = two(discarded, 1)
    assert first == (said, [f"train_step(sft_loss): rank 1 of dp raised it: ModelError: {said}"], True)
    assert second == (said, [], True)


def unread(mesh: DeviceMesh | None) -> str:
    batch, made = batch_of([5, 9]), engine(mesh)
    mask = torch.zeros_like(batch["loss_mask"])
    mask[:, 0] = True
    state, batch = made.init(), nrl.assign(batch, loss_mask=mask)
    with pytest.raises(BatchError) as caught:
        made.train(state, sft_loss, mine(mesh, batch), global_weights(sft_loss, batch))
    assert not any(state.optimizer.state.values())
    return str(caught.value)


def test_a_batch_none_of_whose_trained_tokens_is_predicted(two: Processes) -> None:
    said = unread(None)
    assert re.match(r"train_step\(sft_loss\): no output of the model is read, .* 'loss_mask' is true at no token", said)
    assert two(unread) == [said] * 2


def test_a_weight_that_the_output_decides(two: Processes) -> None:
    for kind, text, _, same, _ in two(attempt, weight_by_output, 0):
        assert kind is WeightError
        assert "the weight of term 'loss' is" in text
        assert same


def test_a_metric_of_two_kinds(two: Processes) -> None:
    """Each process has a kind of its own; it is a sum where the first row has a token."""
    found = two(kinds)
    assert found[0] == found[1]
    assert re.match("merge: metric 'kind' is a (Mean|Sum) on one side and a (Mean|Sum) on the other", found[0])


def kinds(mesh: DeviceMesh | None) -> str:
    batch = batch_of([5, 0, 6])
    made = engine(mesh)
    with pytest.raises(TypeError) as caught:
        made.train(made.init(), two_kinds, cut(mesh, batch, [[[0]], [[1, 2]]]), global_weights(two_kinds, batch))
    return str(caught.value)


def unknown(mesh: DeviceMesh | None) -> list[tuple[type, str, list[str]]]:
    batch = batch_of([5, 4, 6])
    ids = batch["input_ids"].clone()
    ids[2, 1] = 23
    batch, made, errors = nrl.assign(batch, input_ids=ids), engine(mesh), []
    state = made.init()
    parts = cut(mesh, batch, [[[0]], [[1], [2]]])
    for call in (
        lambda: made.forward(state.module, parts, LOGPROBS),
        lambda: made.train(state, sft_loss, parts, global_weights(sft_loss, batch)),
    ):
        with pytest.raises(BatchError) as caught:
            call()
        errors.append((type(caught.value), str(caught.value), getattr(caught.value, "__notes__", [])))
    return errors


def test_a_token_that_the_model_does_not_know_in_one_process(two: Processes) -> None:
    message = "forward: input_ids has the token 23, and the model knows those from 0 to 22; encode with the model's own"
    first, second = two(unknown)
    for who, a, b in zip(("forward", "train_step(sft_loss)"), first, second, strict=True):
        assert a[:2] == b[:2]
        assert a[1].startswith(message)
        assert (a[2], b[2]) == ([f"{who}: rank 1 of dp raised it: BatchError: {a[1]}"], [])
    assert [x[:2] for x in unknown(None)] == [x[:2] for x in first]


def splitting(mesh: DeviceMesh | None) -> list[tuple[str, list[str]]]:
    """Each process splits its shard, and one finds a row that is too long."""
    rank, _ = where(mesh)
    batch, made, errors = batch_of([5, 9]), engine(mesh), []
    state, shard, split = made.init(), nrl.shard(batch, 2)[rank], partial(nrl.microbatches, max_tokens=8)
    for call in (
        lambda: worker.forward(split, LOGPROBS, {}, worker.find_in_state, made, state, shard),
        lambda: worker.train(sft_loss, split, made, state, global_weights(sft_loss, batch), shard),
    ):
        with pytest.raises(BatchError) as caught:
            call()
        errors.append((str(caught.value), getattr(caught.value, "__notes__", [])))
    return errors


def test_a_row_that_is_too_long_in_one_process(two: Processes) -> None:
    first, second = two(splitting)
    for who, a, b in zip(("forward", "train_step(sft_loss)"), first, second, strict=True):
        assert a[0] == b[0]
        assert "9 tokens, more than max_tokens=8; raise max_tokens" in a[0]
        assert sorted([a[1], b[1]], key=len) == [[], [f"{who}: rank 0 of dp raised it: BatchError: {a[0]}"]]


@attrs.frozen
class EachItsOwn:
    def __call__(self, out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        if out["logprobs"].any():
            raise ValueError(f"of {batch['attention_mask'].sum()} tokens")
        return sft_loss(out, batch)


def own_error(mesh: DeviceMesh | None) -> str:
    batch, made = batch_of([5, 9]), engine(mesh)
    with pytest.raises(ValueError, match="tokens") as caught:
        made.train(made.init(), EachItsOwn(), cut(mesh, batch, [[[0]], [[1]]]), global_weights(sft_loss, batch))
    return str(caught.value)


def test_each_process_raises_its_own_error(two: Processes) -> None:
    assert two(own_error) == ["of 5 tokens", "of 9 tokens"]


def test_an_error_that_travels_and_one_that_does_not() -> None:
    made = pickle.loads(pickle_error(missing(), "forward", 3))
    assert (type(made), str(made)) == (MissingColumn, str(missing()))
    made = pickle.loads(pickle_error(local_error(), "forward", 3))
    assert (type(made), str(made)) == (ClusterError, "forward: rank 3 raised LocalError: it cannot travel")
    held = DeferredError(ProcessGroup(None))
    with pytest.raises(ValueError, match="not like"), held.capture():
        raise value_error()
    assert held.gather_or_raise("forward", 7) == [7]


# meshes


def refused(mesh: DeviceMesh | None) -> list[str]:
    errors = []
    shapes: list[tuple[tuple[int, ...], tuple[str, ...] | None]] = [
        ((1, 2, 1, 1), ("dp", "tp", "pp", "cp")),
        ((1, 1, 1, 2), ("dp", "tp", "pp", "cp")),
        ((2,), ("data",)),
        ((2,), None),
    ]
    for shape, names in shapes:
        with pytest.raises(PlacementError) as caught:
            engine(init_device_mesh("cpu", shape, mesh_dim_names=names))
        errors.append(str(caught.value))
    return errors


def test_meshes_that_it_does_not_have(two: Processes) -> None:
    make = "needs one named 'dp'; make it with init_device_mesh(device, (n,), mesh_dim_names=('dp',))"
    for errors in two(refused):
        assert errors == [
            "TorchEngine: the mesh has tp=2; the torch backend shards along dp only, so use tp=1",
            "TorchEngine: the mesh has cp=2; the torch backend shards along dp only, so use cp=1",
            f"TorchEngine: the mesh has the axes data, and {make}",
            f"TorchEngine: the mesh has no named axes, and {make}",
        ]


def test_a_mesh_of_one_process_changes_no_bit() -> None:
    one = Processes(1)
    try:
        ((numbers, weights),) = one(train, "two terms", 3)
    finally:
        one.close()
    expected, others = train(None, "two terms", 3)
    assert numbers == expected
    assert_equal(weights, others)


def held_bytes(mesh: DeviceMesh | None) -> list[int]:
    """Of weights and moments, after a step and a forward; and of a frozen copy."""
    made, batch = engine(mesh), batch_of(MIXED)
    state, _ = made.train(made.init(), sft_loss, mine(mesh, batch), global_weights(sft_loss, batch))
    made.forward(state.module, mine(mesh, batch), LOGPROBS)
    moments = [x for one in state.optimizer.state.values() for x in one.values()]
    groups = [[*state.module.parameters(), *moments], list(made.freeze(state.module).parameters())]
    local = [[x.to_local() if isinstance(x, DTensor) else x for x in group] for group in groups]
    return [sum(x.numel() * x.itemsize for x in group) for group in local]


def test_each_process_holds_its_part(three: Processes) -> None:
    whole, found = held_bytes(None), three(held_bytes)
    assert max(x[0] for x in found) < 0.4 * whole[0]
    assert max(x[1] for x in found) < 0.4 * whole[1]


# weights in and out


def in_and_out(mesh: DeviceMesh | None) -> dict[str, dict[str, Tensor]]:
    made, batch = engine(mesh, Model(TINY_PARTS)), batch_of(MIXED)
    state = made.init()
    fresh = whole(made, made.params(state))
    state, _ = made.train(state, sft_loss, mine(mesh, batch), global_weights(sft_loss, batch))
    frozen = made.freeze(state.module)
    assert not any(p.requires_grad for p in frozen.parameters())
    trained = whole(made, state.module)
    before = made.forward(frozen, mine(mesh, batch), LOGPROBS)
    copy = filled(made, trained)
    state, _ = made.train(state, sft_loss, mine(mesh, batch), global_weights(sft_loss, batch))
    again = made.freeze(frozen)
    for params in (frozen, again):
        after = made.forward(params, mine(mesh, batch), LOGPROBS)
        assert all(torch.equal(a["logprobs"], b["logprobs"]) for a, b in zip(before, after, strict=True))
    found = {"frozen": whole(made, frozen), "again": whole(made, again), "copy": whole(made, copy.module)}
    return {"fresh": fresh, "trained": trained} | found


@both
def test_weights_go_in_and_out(pool: Processes) -> None:
    expected = in_and_out(None)
    for found in pool(in_and_out):
        assert_equal(found["fresh"], expected["fresh"])
        assert_close(found["trained"], expected["trained"], 1e-5)
        for name in ("frozen", "again", "copy"):
            assert_equal(found[name], found["trained"])
    assert "lm_head.weight" not in expected["fresh"]


def wrong(mesh: DeviceMesh | None) -> list[str]:
    made, errors = engine(mesh), []
    tensors = whole(made, made.init().module)
    one = next(iter(tensors))
    for given in (tensors | {one: torch.zeros(1)}, tensors | {"other": torch.zeros(1)}, {one: tensors[one]}):
        with pytest.raises(ModelError) as caught:
            filled(made, given)
        errors.append(str(caught.value))
    return errors


def test_weights_of_another_model(two: Processes) -> None:
    assert two(wrong) == [wrong(None)] * 2


def elsewhere(mesh: DeviceMesh | None, folder: Path) -> tuple[dict[str, Tensor], list[str], list[str]]:
    made = engine(mesh)
    with pytest.raises(ModelError) as caught:
        made.load(str(folder / "none"))
    found = whole(made, made.load(str(folder)))
    return found, [str(caught.value)], getattr(caught.value, "__notes__", [])


def test_weights_from_a_folder(two: Processes, tmp_path: Path) -> None:
    module = loading.build(Model(CONFIGS["qwen3 untied"], seed=3))
    loading.save_model(module, tmp_path)
    (first, message, notes), (second, same, more) = two(elsewhere, tmp_path)
    for found in (first, second):
        assert_equal(found, dict(named_weights.named_tensors(module)))
    assert "there is no such folder" in message[0]
    assert (same, notes) == (message, [])
    assert more == [f"trainer.load: rank 0 of dp raised it: ModelError: {message[0]}"]


def with_adapter(mesh: DeviceMesh | None, base: Path, adapter: Path) -> dict[str, Tensor]:
    made = engine(mesh, Model(str(base), head="value", lora=str(adapter)))
    return whole(made, made.adapter(made.init().module))


def test_an_adapters_folder_with_a_head_is_read_over_a_folder(two: Processes, tmp_path: Path) -> None:
    loading.save_model(loading.build(Model(QWEN3, seed=3)), tmp_path / "base")
    model = Model(str(tmp_path / "base"), head="value", lora={"r": 2, "target_modules": ["q_proj"]})
    adapted = lora.build(model)
    trained = {
        name: torch.randn(x.shape) for name, x in named_weights.weights(adapted).items() if lora.is_trained(name)
    }
    (tmp_path / "adapter").mkdir()
    lora.export(adapted, trained, model, tmp_path / "adapter")
    assert "score.weight" in trained
    folders = tmp_path / "base", tmp_path / "adapter"
    for found in (with_adapter(None, *folders), *two(with_adapter, *folders)):
        assert_equal(found, trained)


def unreadable(mesh: DeviceMesh | None, folder: Path) -> tuple[str, list[str]]:
    made: Any = engine(mesh, Model(str(folder)))
    if where(mesh)[0] == 0:
        made = attrs.evolve(made, source=lambda *args, **how: lora.build_lazy(*args, **how)._replace(fill=broken_disk))  # type: ignore[union-attr]
    with pytest.raises(OSError, match="the disk is gone") as caught:
        made.load(None)
    return str(caught.value), getattr(caught.value, "__notes__", [])


def broken_disk(piece: Piece) -> None:
    raise OSError(f"the disk is gone at {piece.name}")


def test_a_weight_that_cannot_be_read_is_said_by_all(two: Processes, tmp_path: Path) -> None:
    loading.save_model(loading.build(Model(CONFIGS["qwen3 untied"])), tmp_path)
    (mine, _), (theirs, notes) = two(unreadable, tmp_path)
    assert mine == theirs == "the disk is gone at model.embed_tokens.weight"
    assert notes == [f"trainer.load: rank 0 of dp raised it: OSError: {mine}"]


# files

RECORD = {"step": 2, "lora": False, "base": None}


def save(mesh: DeviceMesh | None, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two steps, and what is saved after them; then the state after another one."""
    made = engine(mesh, Model(TINY_PARTS))
    state = made.init()
    for batch in batches("grpo", 2):
        state, _ = made.train(state, sft_loss, mine(mesh, batch), global_weights(sft_loss, batch))
    for name in ("state", "params"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    assert made.save(state, state.module).write(folder / "state").record == RECORD | {"not_finite": []}
    made.save_params(made.freeze(state.module)).write(folder / "params")
    saved = everything(made, state)
    return saved, another(mesh, made, state)


def another(mesh: DeviceMesh | None, made: TorchEngine, state: TorchState) -> dict[str, Tensor]:
    batch = batch_of(MIXED, seed=9)
    state, _ = made.train(state, sft_loss, mine(mesh, batch), global_weights(sft_loss, batch))
    assert state.step == 3
    return everything(made, state)


def restore(mesh: DeviceMesh | None, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    made = engine(mesh, Model(TINY_PARTS, seed=5))
    state = made.restore(folder / "state", RECORD)
    restored = everything(made, state)
    params = made.restore_params(folder / "params", RECORD)
    assert not any(p.requires_grad for p in params.parameters())
    return restored, whole(made, params), another(mesh, made, state)


def test_checkpoints_of_any_number_of_processes_in_another(two: Processes, three: Processes, tmp_path: Path) -> None:
    def alone(function: Callable[..., Any], *args: Any) -> list[Any]:
        return [function(None, *args)]

    sizes: list[Callable[..., list[Any]]] = [alone, two, three]
    for number, writer in enumerate(sizes):
        folder = tmp_path / f"{number}"
        saved, next_one = writer(save, folder)[0]
        assert len(list((folder / "state").glob("*.safetensors"))) == number + 1
        for reader in (writer, sizes[number - 1]):
            for restored, params, after in reader(restore, folder):
                assert_equal(restored, saved)
                assert_equal(params, {name: saved[name] for name in params})
                assert_close(after, next_one, 1e-5)
                if reader is writer:
                    assert_equal(after, next_one)


def counted(mesh: DeviceMesh | None, folder: Path) -> tuple[dict[str, Written], int, int]:
    """What one process says that it wrote, and the bytes that it read and wrote meanwhile, as the kernel counts."""
    made = engine(mesh, tiny.model())
    state, batch = made.init(), batch_of(MIXED)
    state, _ = made.train(state, sft_loss, mine(mesh, batch), global_weights(sft_loss, batch))
    (read, wrote), (files, _) = transferred(), made.save(state, state.module).write(folder)
    now_read, now_wrote = transferred()
    return dict(files), now_read - read, now_wrote - wrote


def test_files_are_hashed_as_they_are_written_and_not_read_back(two: Processes, tmp_path: Path) -> None:
    pools: list[Callable[[Path], list[Any]]] = [lambda folder: [counted(None, folder)], partial(two, counted)]
    for number, pool in enumerate(pools, 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        told = dict[str, Written]()
        for files, read, wrote in pool(folder):
            size = sum(file.size for file in files.values())
            assert size > 4e6 / number
            assert wrote >= size
            assert read < size / 20
            told |= files
        found = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert told == {name: (len(x), hashlib.sha256(x).hexdigest()) for name, x in found.items()}
        assert len(told) == number


def test_the_files_are_those_of_torchs_own_checkpoints(two: Processes, tmp_path: Path) -> None:
    saved, _ = two(save, tmp_path)[0]
    found = {f"model.{name}": torch.zeros_like(x) for name, x in saved.items() if name.endswith(".weight")}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        dcp_load(found, storage_reader=HuggingFaceStorageReader(str(tmp_path / "state")), no_dist=True)
    assert len(found) > 10
    assert_equal(found, {name: saved[name.removeprefix("model.")] for name in found})


def not_restored(mesh: DeviceMesh | None, folder: Path) -> str:
    made = engine(mesh, Model(TINY_PARTS, seed=5))
    with pytest.raises(CheckpointError) as caught:
        made.restore(folder, RECORD)
    return str(caught.value)


def without(name: str, *paths: Path) -> None:
    """Files of tensors as they were, but for one of them."""
    for path in paths:
        with safe_open(path, "pt") as file:
            kept = {key: file.get_tensor(key) for key in file.keys() if key != name}
            shards = json.loads(file.metadata()["DCP_SHARDING_INFO"])
        del shards[name]
        save_file(kept, path, metadata={"DCP_SHARDING_INFO": json.dumps(shards)})


def test_half_of_a_checkpoint_is_not_restored(two: Processes, tmp_path: Path) -> None:
    two(save, tmp_path)
    whole = tmp_path / "state"
    one, other = sorted(path.name for path in whole.glob("*.safetensors"))
    weight = "model.model.layers.0.mlp.up_proj.weight"
    content = (whole / one).read_bytes()
    damages: dict[str, tuple[Callable[[Path], object], str]] = {
        "first gone": (
            lambda path: (path / one).unlink(),
            f"of what 2 processes wrote, {one} is missing, as host .* sees it",
        ),
        "last gone": (lambda path: (path / other).unlink(), f"of what 2 processes wrote, {other} is missing"),
        "both gone": (lambda path: list(map(Path.unlink, (path / one, path / other))), "nothing is there of what"),
        "short": (lambda path: (path / one).write_bytes(content[:-1]), f"{one} is not what a trainer saved"),
        "none": (lambda path: (path / one).write_bytes(b"?" * 100), f"{one} is not what a trainer saved"),
        "content": (
            lambda path: without(weight, path / other),
            rf"has \d+ of the \d+ numbers of '{weight}', in {one}, {other}; use",
        ),
        "moments": (
            lambda path: without("optimizer.model.norm.weight.exp_avg", path / one, path / other),
            "has nothing of optimizer.model.norm.weight.exp_avg; use another checkpoint",
        ),
    }
    for kind, (damage, message) in damages.items():
        folder = tmp_path / kind
        shutil.copytree(whole, folder)
        damage(folder)
        for found in (not_restored(None, folder), *two(not_restored, folder)):
            assert re.match(f"restore: {folder}.*{message}", found), (kind, found)


def doubles(mesh: DeviceMesh | None, folder: Path) -> None:
    """Numbers of eight bytes and the count of steps, of four, lie in one file."""
    made = engine(mesh, Model(TINY_PARTS, dtype="float64"))
    state, batch = made.init(), batch_of(MIXED)
    state, _ = made.train(state, sft_loss, mine(mesh, batch), global_weights(sft_loss, batch))
    _, record = made.save(state, state.module).write(folder)
    made._peers.gather(None)  # all have written
    assert_equal(everything(made, made.restore(folder, record)), everything(made, state))


def test_numbers_of_different_sizes_in_one_file(two: Processes, tmp_path: Path) -> None:
    pools: list[Callable[[Path], object]] = [partial(doubles, None), partial(two, doubles)]
    for number, pool in enumerate(pools):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        pool(folder)


def other_model(mesh: DeviceMesh | None, folder: Path) -> list[str]:
    errors = []
    for changes in ({"intermediate_size": 32}, {"num_hidden_layers": 3}, {"num_hidden_layers": 1}):
        with pytest.raises(ModelError) as caught:
            engine(mesh, Model(TINY_PARTS | changes)).restore(folder / "state", RECORD)
        errors.append(str(caught.value))
    return errors


def test_restore_of_another_model(two: Processes, tmp_path: Path) -> None:
    two(save, tmp_path)
    errors = other_model(None, tmp_path)
    patterns = [
        r"restore: 'model\.layers\.0\.mlp\.\w+\.weight' has shape \[\d+, \d+\], and here it is \[\d+, \d+\]; ",
        r"restore: 11 weights did not arrive: model\.layers\.2\..* and 6 more; build both sides from the same Model",
        r"restore: the model has no weight 'model\.layers\.1\..*'; it has model\..* more; build both sides from",
    ]
    for pattern, message in zip(patterns, errors, strict=True):
        assert re.match(pattern, message), message
    for found in two(other_model, tmp_path):
        assert found == errors


def no_room(mesh: DeviceMesh | None, folder: Path) -> str:
    made = engine(mesh, tiny.model())
    state = made.init()
    with pytest.raises(OSError, match="No space left on device|os error 28") as caught:
        made.save(state, state.module).write(folder)
    return str(caught.value)


def test_a_disk_that_takes_no_more(two: Processes, tmp_path: Path) -> None:
    with small_disk_at(tmp_path / "disk", megabytes=1) as disk:
        assert no_room(None, disk)
        assert all(two(no_room, disk))


def export(mesh: DeviceMesh | None, folder: Path, dtype: str) -> dict[str, Tensor]:
    made = engine(mesh, tiny.model(dtype=dtype, hidden_size=16, num_hidden_layers=2))
    state, batch = made.init(), batch_of([5, 6, 7])
    state, _ = made.train(state, sft_loss, mine(mesh, batch), global_weights(sft_loss, batch))
    made.export(state.module, folder)
    return whole(made, state.module)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_exported_folder_is_the_same_model(two: Processes, tmp_path: Path, dtype: Any) -> None:
    export(None, tmp_path / "one", dtype)
    weights = two(export, tmp_path / "two", dtype)[0]
    module = loading.build(Model(str(tmp_path / "two"), dtype=dtype))
    own = dict(named_weights.named_tensors(module))
    assert own.keys() == weights.keys()
    for name, x in own.items():
        assert torch.equal(x, weights[name].to(x.dtype))
    files = [{path.name for path in (tmp_path / name).iterdir()} for name in ("one", "two")]
    assert files[0] == files[1]
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("one", "two")]
    assert configs[0] == configs[1]
    assert loading.load_tokenizer(Model(str(tmp_path / "two"))).encode("12+3") == tiny.tokenizer().encode("12+3")
