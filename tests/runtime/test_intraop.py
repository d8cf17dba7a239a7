"""How many threads torch computes with: one for small models, and never another number than the user has chosen."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from nrl import tiny
from nrl.backends import Sampling, adamw, fsdp, hf
from nrl.runtime import Cluster, intraop
from nrl.runtime.intraop import SMALL, fit_threads, set_threads
from nrl.runtime.node.cgroups import allowed_cores, usable_cores

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has made no model and whose user has chosen no number of threads."""
    before = torch.get_num_threads()
    monkeypatch.setattr(intraop, "_HERE", intraop._Intraop())
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(allowed_cores())
    yield
    torch.set_num_threads(before)


def model_of(parameters: int) -> nn.Module:
    return nn.Linear(parameters, 1, bias=False, device="meta")


def test_one_thread_as_long_as_all_models_are_small() -> None:
    fit_threads(model_of(SMALL), CPU)
    assert torch.get_num_threads() == 1
    fit_threads(model_of(SMALL + 1), CPU)
    assert torch.get_num_threads() == allowed_cores()
    fit_threads(model_of(10), CPU)
    assert torch.get_num_threads() == allowed_cores()


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_a_variable_of_the_user_decides(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, str(allowed_cores()))
    fit_threads(model_of(10), CPU)
    assert torch.get_num_threads() == allowed_cores()


def test_a_number_that_the_program_has_set_before_decides() -> None:
    torch.set_num_threads(allowed_cores() + 1)
    fit_threads(model_of(10), CPU)
    assert torch.get_num_threads() == allowed_cores() + 1


def test_a_number_that_the_program_sets_later_decides() -> None:
    fit_threads(model_of(10), CPU)
    torch.set_num_threads(allowed_cores() + 1)
    fit_threads(model_of(10), CPU)
    fit_threads(model_of(SMALL + 1), CPU)
    assert torch.get_num_threads() == allowed_cores() + 1


def test_a_model_on_a_gpu_changes_nothing() -> None:
    fit_threads(model_of(10), torch.device("cuda"))
    assert torch.get_num_threads() == allowed_cores()


def test_a_process_of_a_mesh_shares_cores_until_its_model_is_small() -> None:
    set_threads(None, 1)
    assert torch.get_num_threads() == usable_cores()
    fit_threads(model_of(10), CPU)
    assert torch.get_num_threads() == 1
    set_threads(3, 1)  # the user's
    fit_threads(model_of(10), CPU)
    assert torch.get_num_threads() == 3


def test_engines_count_their_models(local: Cluster) -> None:
    fsdp.trainer(local.reserve(1), tiny.model(), adamw(lr=1e-3)).init()
    assert torch.get_num_threads() == 1
    large = tiny.model(hidden_size=256, intermediate_size=8192)
    hf.sampler(local.reserve(1), large, Sampling(max_new_tokens=1))
    assert torch.get_num_threads() == allowed_cores()
