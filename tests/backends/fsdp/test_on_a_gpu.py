"""What the torch engine does with a GPU: `python -m pytest -m gpu`."""

import warnings
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from benchmarks._gpu_steps import Steps
from benchmarks.gpu import SMALL
from nrl import algos, tiny
from nrl.backends import adamw, fsdp
from nrl.ops.plan.simulate import Step
from nrl.runtime import Slots

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")
STEP = Step(**SMALL, shared=48)


def held(steps: Steps) -> dict[str, torch.Tensor]:
    """Parameters and moments, where they are."""
    state: Any = steps.state
    moments = {f"{i} {key}": x for i, each in enumerate(state.optimizer.state.values()) for key, x in each.items()}
    return dict(state.module.named_parameters()) | {name: x for name, x in moments.items() if x.ndim}


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("max_tokens", [2048, 512])
def test_a_step_waits_twice_whatever_its_micro_batches(max_tokens: int) -> None:
    """For its sums, and for the norm of its gradient."""
    steps = Steps(attrs.evolve(STEP, max_tokens=max_tokens), GPU, False)
    steps()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            steps()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum("synchronizing CUDA operation" in str(each.message) for each in said) == 2


def test_a_state_that_rests_leaves_the_gpu_and_comes_back_to_the_bit() -> None:
    steps = Steps(STEP, GPU, False)
    steps()
    before = {name: x.detach().cpu() for name, x in held(steps).items()}
    size, allocated = sum(x.nbytes for x in before.values()), torch.cuda.memory_allocated()
    for _ in range(2):  # the second time the host has places for them
        steps.state.offload()
        assert {x.device.type for x in held(steps).values()} == {"cpu"}
        assert allocated - torch.cuda.memory_allocated() >= size
        steps.state.onload()
        assert {x.device for x in held(steps).values()} == {GPU}
        assert torch.cuda.memory_allocated() <= allocated + 2**20
    for name, x in held(steps).items():
        assert torch.equal(x.detach().cpu(), before[name]), name
    steps()


def test_what_a_gpu_has_trained_and_saved_is_read_on_a_cpu(slots: Slots, tmp_path: Path) -> None:
    model, batch = tiny.model(dtype="bfloat16"), tiny.sums(8).take(1)[0]
    there = fsdp.trainer(slots[:1], model, adamw(lr=1e-3), device="cuda")
    state, _ = there.train_step(algos.sft_loss)(there.init(), batch)
    there.save(state, tmp_path)
    here = fsdp.trainer(slots[:1], model, adamw(lr=1e-3), device="cpu").restore(tmp_path)
    assert here.step == 1
    found, weights = (dict(each.params.tensors()) for each in (here, state))
    assert found.keys() == weights.keys()
    for name, x in found.items():
        assert torch.equal(x, weights[name].cpu()), name
