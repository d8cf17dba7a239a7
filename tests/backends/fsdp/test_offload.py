"""Parameters, gradients and moments on the host, and moments in bfloat16: equal numbers, or near ones, in less memory.

The functions whose first argument is a mesh run in every process of a pool. What a GPU needs is in a plan, whose CUDA
tensors are fake; numbers are those of CPUs.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nrl import tiny
from nrl.backends import Optimizer, adamw, megatron, muon
from nrl.backends.fsdp.torch_engine import TorchEngine
from nrl.backends.fsdp.torch_state import TorchState
from nrl.errors import ConfigError
from nrl.ops.plan.simulate import simulate_step
from nrl.runtime import Slots
from tests.backends.fsdp.test_optimizer import engine, numbers_of, steps
from tests.backends.fsdp.test_sharding import TINY_PARTS
from tests.backends.processes import Processes
from tests.faked import faked
from tests.ops.plan.test_simulate import STEP
from tests.weights import assert_close, assert_equal

pytestmark = pytest.mark.timeout(600)
ADAMW = adamw(lr=1e-2, eps=1e-3, weight_decay=0.01)


@pytest.fixture(scope="module")
def one() -> Iterator[Processes]:
    processes = Processes(1)
    yield processes
    processes.close()


def of(mesh: DeviceMesh | None, offload: Any, optimizer: Optimizer = ADAMW, **options: Any) -> TorchEngine:
    return attrs.evolve(engine(mesh, optimizer, TINY_PARTS, **options), offload=offload)


def stepped(mesh: DeviceMesh | None, offload: Any, optimizer: Optimizer = ADAMW) -> dict[str, Tensor]:
    made = of(mesh, offload, optimizer)
    state = steps(mesh, made, made.init(), range(3))
    assert {p.device.type for p in state.module.parameters()} == {"cpu"}
    return numbers_of(made, state)


def alone(mesh: DeviceMesh) -> dict[str, Tensor]:
    """In a process without a group, which makes one of itself."""
    dist.destroy_process_group()
    made = of(None, "cpu")
    assert made.mesh is None
    assert made._peers.count == 1
    return numbers_of(made, steps(None, made, made.init(), range(3)))


@pytest.mark.parametrize("optimizer", [ADAMW, muon(lr=1e-2, eps=1e-3)], ids=lambda each: each.kind)
def test_the_same_steps_on_the_host(two: Processes, optimizer: Optimizer) -> None:
    for found, expected in zip(two(stepped, "cpu", optimizer), two(stepped, None, optimizer), strict=True):
        assert_equal(found, expected)


def test_a_process_alone(one: Processes) -> None:
    expected = numbers_of(made := of(None, None), steps(None, made, made.init(), range(3)))
    (found,) = one(alone)
    assert_close(found, expected, 1e-9)


def placed_alone(mesh: DeviceMesh) -> str:
    try:
        of(None, "cpu")
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_one_of_several_needs_their_mesh(two: Processes) -> None:
    for said in two(placed_alone):
        assert said.startswith("PlacementError: TorchEngine: offload='cpu' without a mesh is for a process alone")
        assert said.endswith("this is one of 2 in a process group; give the engine a mesh with the axis 'dp'")


def gone_on(mesh: DeviceMesh, folder: Path) -> bool:
    """A checkpoint of the host goes on on the device, and so do frozen copies."""
    there, here = of(mesh, "cpu"), of(mesh, None)
    state = steps(mesh, there, there.init(), range(2))
    saved = there.save(state, there.params(state)).write(folder)
    copied = there.freeze(state.module)
    for one_of, other in zip(copied.parameters(), state.module.parameters(), strict=True):
        assert torch.equal(one_of.to_local(), other.to_local())  # type: ignore[attr-defined]
    again = here.restore(folder, saved.record)
    both = (numbers_of(made, steps(mesh, made, old, range(2, 3))) for made, old in ((here, again), (there, state)))
    assert_equal(*both)
    return True


def test_a_checkpoint_of_the_host_goes_on_anywhere(two: Processes, tmp_path: Path) -> None:
    assert two(gone_on, tmp_path) == [True, True]


@pytest.mark.slow
@faked
def test_a_plan_has_them_on_the_host() -> None:
    several = (
        STEP,
        attrs.evolve(STEP, offload="cpu"),
        attrs.evolve(STEP, optimizer=adamw(lr=1e-6, moments="bfloat16")),
    )
    plain, host, rounded = map(simulate_step, several)
    assert host["parameters"] == host["moments"] == 0
    steps_of = 4 * 24  # a number for each parameter, float32
    assert host["host"] == pytest.approx(plain["parameters"] * 4, abs=steps_of)
    assert plain["peak"] - host["peak"] == plain["parameters"] + plain["moments"]
    assert plain["host"] == rounded["host"] == 0
    assert plain["peak"] - rounded["peak"] == plain["moments"] - rounded["moments"] == plain["parameters"]
    # Layers come and gradients go while others compute; it waits for the last of them, and no more often
    kinds = {kind for kind, *_ in host["waits"]} - {kind for kind, *_ in plain["waits"]}
    assert kinds == {"copy to the host", "Event.synchronize"}
    assert host["stages"].keys() == {"forward", "train"}
    assert rounded["waits"] == plain["waits"]
    alone = simulate_step(attrs.evolve(STEP, dp=1, offload="cpu"))
    assert (alone["parameters"], alone["moments"], alone["collectives"]) == (0, 0, {})
    assert alone["host"] == pytest.approx(2 * host["host"], abs=2 * steps_of)


# moments in bfloat16

ROUNDED = adamw(lr=1e-2, eps=1e-3, weight_decay=0.01, moments="bfloat16")


def test_moments_take_half_and_steps_are_near() -> None:
    found, expected = stepped(None, None, ROUNDED), stepped(None, None, ADAMW)
    assert found.keys() == expected.keys()
    start = of(None, None).init().module.state_dict()
    for name, x in found.items():
        kept = "exp_avg" in name
        assert x.dtype == (torch.bfloat16 if kept else expected[name].dtype)
        if not kept and (begun := start.get(name.removeprefix("model."))) is not None:
            moved = (expected[name] - begun).norm()
            assert float((x - expected[name]).norm()) <= 0.01 * float(moved)


@pytest.mark.parametrize("pool", ["two", "one"])
def test_a_run_that_goes_on_rounds_as_before(pool: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    assert all(request.getfixturevalue(pool)(resumed, tmp_path))


def resumed(mesh: DeviceMesh, folder: Path) -> bool:
    made = of(mesh, None, ROUNDED)
    state = steps(mesh, made, made.init(), range(2))
    saved = made.save(state, made.params(state)).write(folder)
    again = numbers_of(made, steps(mesh, made, made.restore(folder, saved.record), range(2, 4)))
    assert_equal(again, numbers_of(made, steps(mesh, made, state, range(2, 4))))
    return True


@pytest.mark.parametrize(("before", "after"), [(ADAMW, ROUNDED), (ROUNDED, ADAMW)])
def test_the_configuration_says_how_moments_are_kept(before: Optimizer, after: Optimizer, tmp_path: Path) -> None:
    old, new = of(None, None, before), of(None, None, after)
    state = steps(None, old, old.init(), range(2))
    saved = old.save(state, old.params(state)).write(tmp_path)
    again = new.restore(tmp_path, saved.record)

    def kept(some: TorchState) -> list[Tensor]:
        return [x for each in some.optimizer.state.values() for key, x in each.items() if key != "step"]

    dtype = torch.bfloat16 if after is ROUNDED else torch.float64
    for one, other in zip(kept(again), kept(state), strict=True):
        assert one.dtype == dtype
        assert torch.equal(one, other.to(dtype))
    assert steps(None, new, again, range(2, 3)).step == 3


def test_others_have_no_moments_to_round() -> None:
    with pytest.raises(ValueError, match="moments is for 'adamw' alone; found 'bfloat16' of 'muon'"):
        Optimizer(kind="muon", moments="bfloat16")
    assert adamw(lr=1.0, moments="float32") == adamw(lr=1.0)


def test_megatron_refuses_them(slots: Slots) -> None:
    with pytest.raises(ConfigError, match="found moments='bfloat16'; on Megatron they are float32"):
        megatron.trainer(slots, tiny.model(), ROUNDED)
