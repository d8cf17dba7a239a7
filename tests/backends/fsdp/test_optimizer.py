"""Every optimizer on the torch engine: groups of weights, checkpoints, and the same step on any number of processes.

The functions whose first argument is a mesh run in every process of a pool, and with None in this one.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import nrl
from nrl.algos import sft_loss
from nrl.backends import Group, Model, Optimizer, adamw, muon, own, sgd
from nrl.backends.fsdp.torch_engine import TorchEngine
from nrl.backends.fsdp.torch_state import TorchState
from nrl.backends.models import loading, weight_layout
from nrl.backends.training.loss.loss_terms import global_weights
from nrl.backends.training.saving import storage
from nrl.batch.metrics import finalize
from nrl.errors import CheckpointError, ModelError
from nrl.runtime import Slots
from tests.backends.fsdp.test_experts import EXPERTS
from tests.backends.fsdp.test_sharding import TINY_PARTS, everything, mine
from tests.backends.fsdp.test_torch_engine import CONFIGS, MIXED, batch_of, make, stock_logprobs
from tests.backends.processes import Processes
from tests.backends.training.optim.test_muon import placed
from tests.weights import assert_close, assert_equal, weights

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def three() -> Iterator[Processes]:
    processes = Processes(3)
    yield processes
    processes.close()


DENSE = CONFIGS["qwen3 untied"]
MIXTURE = EXPERTS["qwen3_moe"]


class Counting(torch.optim.Optimizer):
    """Heavy-ball descent whose state are a tensor, numbers of Python and a tensor of one number."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Moves by a momentum that grows with the count."""
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"sum": torch.zeros_like(p), "count": 0, "weight": 1 / 3, "even": True, "none": None}
                    state["scale"] = torch.ones((), dtype=torch.float64)
                state["count"] += 1
                state["weight"] *= 0.9
                state["even"] = not state["even"]
                state["scale"] *= 0.7
                state["sum"].mul_(1 - state["weight"]).add_(p.grad)
                p.sub_(state["sum"] * group["lr"] * float(state["scale"]) / state["count"])


OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": adamw(lr=1e-2, eps=1e-3, weight_decay=0.01),
    "sgd": sgd(lr=1e-2, weight_decay=0.01),
    "sgd with momentum": sgd(lr=1e-2, momentum=0.9, nesterov=True),
    "muon": muon(lr=1e-2, eps=1e-3, weight_decay=0.01),
    "adagrad": own(partial(torch.optim.Adagrad, lr_decay=0.1), lr=1e-2, schedule=lambda step: (step + 1) ** -0.5),
    "counting": own(Counting, lr=1e-1),
}
each = pytest.mark.parametrize("name", list(OPTIMIZERS))


def engine(mesh: DeviceMesh | None, optimizer: Optimizer, config: Mapping[str, Any], **options: Any) -> TorchEngine:
    model = Model(config, **({"dtype": "float64"} | options))
    settings: dict[str, Any] = {"checkpointing": False, "compile": False, "device": torch.device("cpu"), "mesh": mesh}
    return TorchEngine(model, optimizer, nrl.Rectangles, **settings)


def steps(
    mesh: DeviceMesh | None, made: TorchEngine, state: TorchState, numbers: range, tokens: int = 40
) -> TorchState:
    for number in numbers:
        batch = batch_of(MIXED, seed=number)
        state, _ = made.train(state, sft_loss, mine(mesh, batch, tokens), global_weights(sft_loss, batch))
    return state


# laws


def trained(mesh: DeviceMesh | None, name: str, config: dict[str, Any], tokens: int = 40) -> dict[str, Tensor]:
    made = engine(mesh, OPTIMIZERS[name], config)
    return numbers_of(made, steps(mesh, made, made.init(), range(3), tokens))


def numbers_of(made: TorchEngine, state: TorchState) -> dict[str, Tensor]:
    """Weights and all of the state, whole."""
    for moments in state.optimizer.state.values():
        moments |= {k: torch.tensor(float(x)) for k, x in moments.items() if isinstance(x, bool | int | float)}
        for key in [key for key, x in moments.items() if x is None]:
            del moments[key]
    return everything(made, state)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("muon", DENSE),
        ("muon", TINY_PARTS | {"tie_word_embeddings": False}),
        ("muon", MIXTURE),
        ("sgd with momentum", MIXTURE),
        ("counting", TINY_PARTS),
    ],
)
def test_any_number_of_processes_gives_the_same_steps(
    two: Processes, three: Processes, name: str, config: dict[str, Any]
) -> None:
    expected = trained(None, name, config)
    for pool in (two, three):
        for found in pool(trained, name, config):
            assert_close(found, expected, 1e-9)


@each
def test_any_number_of_micro_batches_gives_the_same_steps(name: str) -> None:
    assert_close(trained(None, name, MIXTURE, 17), trained(None, name, MIXTURE, 1000), 1e-9)


def test_muon_refuses_other_layouts(two: Processes) -> None:
    from torch.distributed.tensor import Replicate, Shard

    for placement in (Shard(1), Replicate()):
        for said in two(placed, placement):
            assert said.startswith(
                f"PlacementError: Muon: a weight of shape [4, 6] has the placements ({placement!r},)"
            )


# against loops of plain torch


def stepped_by_hand(config: Mapping[str, Any], spec: Optimizer, number: int) -> dict[str, Tensor]:
    """transformers' model, each matrix of its files with Muon as a loop, torch's AdamW for the rest."""
    module: Any = loading.build(Model(config), dtype=torch.float64)
    named = dict(module.named_parameters())
    hidden = {name: p for name, p in named.items() if ".layers." in name and p.ndim > 1}
    matrices = {name: [part.block for part in weight_layout.find_parts(module)[name]] for name in hidden}
    momentum = {name: torch.zeros_like(p) for name, p in hidden.items()}
    rest = [p for name, p in named.items() if name not in hidden]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in rest if p.ndim > 1], "weight_decay": spec.weight_decay},
        {"params": [p for p in rest if p.ndim == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps)
    for seed in range(number):
        batch = batch_of(MIXED, seed=seed)
        module.zero_grad()
        mask = batch["loss_mask"]
        (-stock_logprobs(module, batch)[mask].sum() / mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), spec.clip)
        adam.step()
        for name, p in hidden.items():
            momentum[name] = 0.95 * momentum[name] + p.grad
            update = p.grad + 0.95 * momentum[name]
            for block in matrices[name]:
                x = update[block].squeeze(0) if p.ndim == 3 else update[block]
                rows, columns = x.shape
                x = x / (x.norm() + 1e-7)
                for _ in range(5):
                    a = x @ x.T
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                change = 0.2 * math.sqrt(max(rows, columns)) * x + spec.weight_decay * p.detach()[block].view(
                    rows, columns
                )
                p.data[block] -= spec.lr * change.view(p[block].shape)
    return named


@pytest.mark.parametrize("config", [DENSE, MIXTURE])
def test_two_steps_of_muon_in_a_plain_torch_loop(config: dict[str, Any]) -> None:
    spec = muon(lr=1e-2, eps=1e-3, weight_decay=0.1, clip=0.5)
    made = engine(None, spec, config)
    found = dict(steps(None, made, made.init(), range(2), 1000).module.named_parameters())
    expected = stepped_by_hand(config, spec, 2)
    assert found.keys() == expected.keys()
    for name, x in expected.items():  # log-probabilities are computed in float32
        torch.testing.assert_close(found[name].detach(), x.detach(), rtol=0, atol=2e-5)


def test_steps_of_sgd_in_a_plain_torch_loop() -> None:
    spec = sgd(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, clip=0.5)
    made = engine(None, spec, DENSE)
    found = dict(steps(None, made, made.init(), range(3), 1000).module.named_parameters())
    module: Any = loading.build(Model(DENSE), dtype=torch.float64)
    buffers = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    for seed in range(3):
        batch = batch_of(MIXED, seed=seed)
        module.zero_grad()
        mask = batch["loss_mask"]
        (-stock_logprobs(module, batch)[mask].sum() / mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        for name, p in module.named_parameters():
            gradient = p.grad + (0.1 * p.detach() if p.ndim > 1 else 0)
            buffers[name] = 0.9 * buffers[name] + gradient
            p.data -= 0.1 * (gradient + 0.9 * buffers[name])
    for name, p in module.named_parameters():
        torch.testing.assert_close(found[name].detach(), p.detach(), rtol=0, atol=2e-5)


# options and groups


def after(spec: Optimizer, number: int = 2, config: Mapping[str, Any] = DENSE) -> dict[str, Tensor]:
    made = engine(None, spec, config)
    state = steps(None, made, made.init(), range(number), 1000)
    return {name: x.detach().clone() for name, x in state.module.named_parameters()}


@pytest.mark.parametrize(
    ("plain", "changed"),
    [
        (sgd(0.1), sgd(0.1, momentum=0.5)),
        (sgd(0.1, momentum=0.5), sgd(0.1, momentum=0.5, nesterov=True)),
        (sgd(0.1), sgd(0.1, weight_decay=0.1)),
        (sgd(0.1), sgd(0.1, clip=0.01)),
        (sgd(0.1), sgd(0.1, schedule=lambda step: 0.5)),
        (muon(0.01), muon(0.01, momentum=0.5)),
        (muon(0.01), muon(0.01, nesterov=False)),
        (muon(0.01), muon(0.01, scale="original")),
        (muon(0.01), muon(0.01, precision="bfloat16")),
        (muon(0.01), muon(0.01, weight_decay=0.1)),
        (muon(0.01), muon(0.01, betas=(0.5, 0.9))),
        (muon(0.01), muon(0.01, eps=1e-2)),
        (OPTIMIZERS["counting"], attrs.evolve(OPTIMIZERS["counting"], clip=0.01)),
    ],
)
def test_each_option_changes_a_step(plain: Optimizer, changed: Optimizer) -> None:
    one, other = after(plain), after(changed)
    assert any(not torch.allclose(one[name], other[name], rtol=1e-7, atol=0) for name in one)


def test_muon_has_the_matrices_of_hidden_layers_and_adamw_all_else() -> None:
    made = engine(None, OPTIMIZERS["muon"], MIXTURE)
    state = steps(None, made, made.init(), range(1))
    kept = {name: set(state.optimizer.state[p]) for name, p in state.module.named_parameters()}
    for name, p in state.module.named_parameters():
        hidden = ".layers." in name and p.ndim > 1
        assert kept[name] == ({"momentum_buffer"} if hidden else set(storage.KEYS)), name
    assert {name.split(".")[-1] for name, keys in kept.items() if "momentum_buffer" in keys and "experts" in name} == {
        "gate_up_proj",
        "down_proj",
    }


def test_muon_leaves_a_value_head_and_a_tied_embedding_to_adamw() -> None:
    for model, names in ({"head": "value"}, ["score.weight"]), ({}, ["model.embed_tokens.weight"]):
        made = engine(None, OPTIMIZERS["muon"], CONFIGS["qwen3 tied"], **model)
        state = made.init()
        [*_, others] = state.optimizer.param_groups
        matrices = [group["params"] for group in state.optimizer.param_groups if "eps" in group]
        named = {id(p): name for name, p in state.module.named_parameters()}
        found = {named[id(p)] for several in matrices for p in several}
        assert set(names) <= found
        assert not any("proj" in name for name in found)
        assert "eps" in others


def test_of_what_has_no_hidden_matrix_muon_has_nothing() -> None:
    with_adamw = adamw(lr=1e-2, eps=1e-3)
    without = muon(lr=1e-2, eps=1e-3, groups=[Group("*", muon=False)])
    assert_equal(after(without), after(with_adamw))


def test_a_factor_is_of_the_rate_of_its_weights() -> None:
    """Of plain descent it is a factor of what they move, and 0 freezes them."""
    spec = sgd(0.1, clip=math.inf)
    groups = Group("*.q_proj.weight", factor=0.5), Group("*.layers.0.*", factor=0.0)
    start = dict(engine(None, spec, DENSE).init().module.named_parameters())
    plain, changed = after(spec, 1), after(attrs.evolve(spec, groups=groups), 1)
    for name, x in start.items():
        factor = 0.5 if "q_proj" in name else 0.0 if ".layers.0." in name else 1.0  # the first that fits counts
        torch.testing.assert_close(changed[name] - x.detach(), factor * (plain[name] - x.detach()))


@pytest.mark.parametrize("kind", ["adamw", "muon", "sgd"])
def test_weight_decay_of_a_group(kind: str) -> None:
    """None of embeddings, and some of norms: after one step the difference is ``lr * decay * weight``."""
    kinds: dict[str, Callable[..., Optimizer]] = {"adamw": partial(adamw, eps=1e-3), "muon": partial(muon, eps=1e-3)}
    make_it = kinds.get(kind, sgd)
    groups = Group("*embed_tokens*", weight_decay=0.0), Group("*norm.weight", weight_decay=0.5)
    start = dict(engine(None, make_it(0.1), DENSE).init().module.named_parameters())
    plain, decayed = after(make_it(0.1), 1), after(make_it(0.1, weight_decay=0.2, groups=groups), 1)
    for name, x in start.items():
        decay = 0.0 if "embed" in name else 0.5 if "norm.weight" in name else 0.2 if x.ndim > 1 else 0.0
        torch.testing.assert_close(plain[name] - decayed[name], 0.1 * decay * x.detach())


def test_groups_reach_ones_own_optimizer() -> None:
    seen: list[dict[str, Any]] = []

    def make_it(params: Any) -> torch.optim.Optimizer:
        seen[:] = params
        return torch.optim.RMSprop(params, weight_decay=0.3)

    spec = own(make_it, lr=0.5, groups=[Group("*norm*", factor=0.1, weight_decay=0.0)])
    made = engine(None, spec, DENSE)
    state = made.init()
    named = {id(p): name for name, p in state.module.named_parameters()}
    assert [group["weight_decay"] for group in state.optimizer.param_groups] == [0.3, 0.0]
    assert all("norm" in named[id(p)] for p in seen[1]["params"])
    steps(None, made, state, range(1))
    assert [group["lr"] for group in state.optimizer.param_groups] == [0.5, 0.05]


def test_a_group_that_fits_nothing() -> None:
    message = (
        r"trainer.init: no trained weight has a name like '\*.embed.weight', .*; there are model.embed_tokens.weight"
    )
    with pytest.raises(ModelError, match=message):
        engine(None, adamw(1e-2, groups=[Group("*.embed.weight")]), DENSE).init()


def test_a_rate_that_cannot_be_leaves_the_state(slots: Slots) -> None:
    trainer = make(slots, optimizer=sgd(0.1, schedule=lambda step: -1.0 if step else 1.0))
    step, (state, _) = trainer.train_step(sft_loss), trainer.train_step(sft_loss)(trainer.init(), batch_of(MIXED))
    before = weights(state)
    with pytest.raises(ValueError, match="the schedule gives -0.1 at optimizer step 1; give a finite rate"):
        step(state, batch_of(MIXED))[1].result()
    assert_equal(weights(state), before)


def test_a_step_says_its_rate(slots: Slots) -> None:
    trainer = make(slots, optimizer=sgd(0.1, schedule=lambda step: 1 / (step + 1)))
    state, found = trainer.init(), []
    for _ in range(3):
        state, metrics = trainer.train_step(sft_loss)(state, batch_of(MIXED))
        found.append(finalize(metrics.result())["lr"])
    assert found == pytest.approx([0.1, 0.05, 0.1 / 3])


# one's own that cannot be used


class Odd(torch.optim.SGD):
    """Keeps, or changes, what it is told to."""

    def __init__(self, params: Any, keep: Callable[[Tensor], dict[str, Any]], setting: bool = False) -> None:
        super().__init__(params, lr=0.1)
        self.keep, self.setting = keep, setting

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Does so."""
        for group in self.param_groups:
            group |= {"k": group.get("k", 0) + 1} if self.setting else {}
            for p in group["params"]:
                self.state[p] = self.keep(p)


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (
            list,
            "make gave a list; it has to give a torch.optim.Optimizer",
        ),
        (torch.optim.LBFGS, "a step of LBFGS on a matrix raised TypeError: .*closure.*; its step has to work without"),
        (
            partial(Odd, keep=lambda p: {}, setting=True),
            "a step of Odd changes k in its param_groups, which a checkpoint",
        ),
        (
            torch.optim.Adafactor,
            r"Adafactor keeps 'row_var', a tensor of shape \[2, 1\], of a parameter of shape \[2, 3\]",
        ),
        (partial(Odd, keep=lambda p: {"history": [p]}), "Odd keeps 'history', of type list, of a parameter"),
        (partial(Odd, keep=lambda p: {"a.b": 1}), "Odd keeps 'a.b', of type int, .* by names without dots"),
    ],
)
def test_ones_own_that_cannot_be_used(make_it: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ModelError, match=f"own: {message}"):
        engine(None, own(make_it, lr=0.1), DENSE).init()


# checkpoints


def saved(
    mesh: DeviceMesh | None, name: str, folder: Path
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """After two steps, and after a third."""
    made = engine(mesh, OPTIMIZERS[name], MIXTURE, dtype="float32")
    state = steps(mesh, made, made.init(), range(2))
    record = dict(made.save(state, state.module).write(folder).record)
    now = copies(made, state)
    return now, numbers_of(made, steps(mesh, made, state, range(2, 3))), record


def copies(made: TorchEngine, state: TorchState) -> dict[str, Any]:
    """As `everything`, and numbers of Python as what they are."""
    kept: dict[str, dict[str, Any]] = {name: state.optimizer.state[p] for name, p in state.module.named_parameters()}
    numbers = {f"{name}.{key}": x for name, each_of in kept.items() for key, x in each_of.items()}
    tensors = {
        p: {key: x for key, x in state.optimizer.state[p].items() if isinstance(x, Tensor)}
        for p in state.module.parameters()
    }
    found: dict[str, Any] = dict(everything(made, state._replace(optimizer=SimpleNamespace(state=tensors))))  # type: ignore[arg-type]
    return found | {key: x for key, x in numbers.items() if isinstance(x, bool | int | float)}


def restored(mesh: DeviceMesh | None, name: str, folder: Path, record: dict[str, Any]) -> tuple[Any, Any]:
    made = engine(mesh, OPTIMIZERS[name], MIXTURE, dtype="float32", seed=5)
    state = made.restore(folder, record)
    assert state.step == 2
    return copies(made, state), numbers_of(made, steps(mesh, made, state, range(2, 3)))


def alike(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, x in expected.items():
        assert type(found[key]) is type(x), key
        assert torch.equal(found[key], x) if isinstance(x, Tensor) else found[key] == x, key
        assert not isinstance(x, Tensor) or found[key].dtype == x.dtype, key


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("sgd with momentum", marks=pytest.mark.slow),
        "muon",
        pytest.param("counting", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_goes_on_bitwise_and_on_any_number_of_processes(
    two: Processes, three: Processes, name: str, tmp_path: Path
) -> None:
    def alone(function: Callable[..., Any], *args: Any) -> list[Any]:
        return [function(None, *args)]

    sizes: list[Callable[..., list[Any]]] = [alone, two, three]
    for number, writer in enumerate(sizes):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        now, following, record = writer(saved, name, folder)[0]
        assert any("momentum_buffer" in key for key in now) == (name in ("muon", "sgd with momentum"))
        for reader in (writer, sizes[number - 1]):
            for found, later in reader(restored, name, folder, record):
                alike(found, now)
                if reader is writer:
                    assert_equal(later, following)


@each
def test_a_checkpoint_goes_on_bitwise(name: str, tmp_path: Path) -> None:
    now, following, record = saved(None, name, tmp_path)
    found, later = restored(None, name, tmp_path, record)
    alike(found, now)
    assert_equal(later, following)


def test_a_record_says_whose_state_it_is(tmp_path: Path) -> None:
    said = {}
    for name in OPTIMIZERS:
        made = engine(None, OPTIMIZERS[name], DENSE)
        state = made.init()
        said[name] = made.save(state, state.module).write(tmp_path).record.get("optimizer")
        assert made.save_params(state.module).write(tmp_path).record.get("optimizer") is None
    assert list(said.values()) == [None, "sgd", "sgd", "muon", "own, Adagrad", "own, Counting"]


def test_the_state_of_another_optimizer_is_not_restored(tmp_path: Path) -> None:
    made = engine(None, OPTIMIZERS["sgd with momentum"], DENSE)
    state = steps(None, made, made.init(), range(1))
    record = made.save(state, state.module).write(tmp_path).record
    for name, here in {"adamw": "adamw", "counting": "own, Counting"}.items():
        message = f"restore: the checkpoint is of the optimizer 'sgd', and here it is '{here}', .*trainer.export"
        with pytest.raises(CheckpointError, match=message):
            engine(None, OPTIMIZERS[name], DENSE).restore(tmp_path, record)


def test_a_weight_goes_on_with_the_optimizer_that_it_had(tmp_path: Path) -> None:
    made = engine(None, OPTIMIZERS["muon"], DENSE)
    state = steps(None, made, made.init(), range(1))
    record = made.save(state, state.module).write(tmp_path).record
    other = attrs.evolve(OPTIMIZERS["muon"], groups=(Group("*.o_proj.weight", muon=False),))
    message = (
        r"restore: of the optimizer's state of 'model.layers.0.self_attn.o_proj.weight' the checkpoint has "
        r"momentum_buffer, and here it is step, exp_avg, exp_avg_sq; leave the weight to the optimizer that it had"
    )
    with pytest.raises(CheckpointError, match=message):
        engine(None, other, DENSE).restore(tmp_path, record)


def test_other_rates_and_groups_are_taken_up_at_a_restart(tmp_path: Path) -> None:
    made = engine(None, OPTIMIZERS["muon"], DENSE)
    state = steps(None, made, made.init(), range(1))
    record = made.save(state, state.module).write(tmp_path).record
    frozen = attrs.evolve(OPTIMIZERS["muon"], groups=(Group("*.layers.*", factor=0.0),))
    again = engine(None, frozen, DENSE).restore(tmp_path, record)
    before = {name: x.detach().clone() for name, x in again.module.named_parameters()}
    after_it = dict(steps(None, engine(None, frozen, DENSE), again, range(1)).module.named_parameters())
    assert all(torch.equal(x, before[name]) == (".layers." in name) for name, x in after_it.items())


def test_tensors_leave_the_device_and_single_numbers_stay() -> None:
    made = engine(None, OPTIMIZERS["adamw"], DENSE)
    state = steps(None, made, made.init(), range(1))
    state._move_moments(lambda x: x.to("meta"))
    places = {(key, x.device.type) for kept in state.optimizer.state.values() for key, x in kept.items()}
    assert places == {("step", "cpu"), ("exp_avg", "meta"), ("exp_avg_sq", "meta")}


def test_an_adapter(tmp_path: Path) -> None:
    """Its matrices are Muon's; its checkpoint goes on bitwise."""
    lora: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "o_proj"]}
    made = engine(None, OPTIMIZERS["muon"], DENSE, lora=lora)
    state = steps(None, made, made.init(), range(2))
    assert all(set(kept) == {"momentum_buffer"} for kept in state.optimizer.state.values())
    record = made.save(state, made.adapter(state.module)).write(tmp_path).record
    again = made.restore(tmp_path, record)
    one, other = (steps(None, made, each_state, range(2, 3)) for each_state in (state, again))
    for x, y in zip(one.module.parameters(), other.module.parameters(), strict=True):
        assert torch.equal(x, y)
        assert isinstance(x, nn.Parameter)
