"""How torch is told to allocate: its own record says so, on a CPU as well."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import nrl
from nrl import tiny
from nrl.backends import adamw, fsdp
from nrl.backends.megatron import _make_engine as megatron_engine
from nrl.batch.packed_rows import Rectangles
from nrl.runtime import Layout, cuda_allocator, transfer


def chosen() -> str:
    return torch._C._accelerator_getAllocatorSettings()


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = chosen()
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    torch._C._accelerator_setAllocatorSettings("")
    yield
    torch._C._accelerator_setAllocatorSettings(before)


def test_segments_grow_unless_the_environment_says_how_memory_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        with monkeypatch.context() as of:
            of.setenv(name, "max_split_size_mb:64")
            cuda_allocator.use_expandable_segments()
            assert chosen() == ""
    cuda_allocator.use_expandable_segments()
    assert chosen() == "expandable_segments:True"


@pytest.mark.parametrize("settings", ["expandable_segments:True,max_split_size_mb:64", "expandable_segments: True"])
def test_what_is_lent_lies_in_fixed_segments(settings: str) -> None:
    torch._C._accelerator_setAllocatorSettings(settings)
    before = chosen()
    inside = list[str]()

    def allocates() -> None:
        with cuda_allocator.use_fixed_segments():
            inside.append(chosen())
            raise MemoryError

    with pytest.raises(MemoryError):
        allocates()
    assert inside == ["expandable_segments:False" + before.removeprefix(settings.partition(",")[0])]
    assert chosen() == before


def test_nothing_changes_where_segments_are_fixed() -> None:
    with cuda_allocator.use_fixed_segments():
        assert chosen() == ""
    assert chosen() == ""


def test_lending_allocates_in_fixed_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the borrower sees are the numbers at that time: the lender goes on with its own memory."""
    allocated, room = list[str](), transfer._allocate

    def watched(size: int) -> Tensor:
        allocated.append(chosen())
        return room(size)

    monkeypatch.setattr(transfer, "_allocate", watched)
    monkeypatch.setattr(transfer, "_is_lendable", lambda tensor: True)
    cuda_allocator.use_expandable_segments()
    tensors = {"x": torch.ones(3), "y": torch.zeros((), dtype=torch.bfloat16)}
    lent = transfer.send_tensors(transfer.lend, tensors)
    tensors["x"].fill_(7)
    found = transfer.receive_tensors([lent])
    assert allocated == ["expandable_segments:False"]
    assert chosen() == "expandable_segments:True"
    assert found["x"].tolist() == [1, 1, 1]
    assert found["y"].dtype == torch.bfloat16


def make(device: str, alone: bool) -> Any:
    return fsdp._make_engine(tiny.model(), adamw(lr=1e-3), None, False, False, None, False, device, alone)


def test_a_trainer_in_a_process_of_its_own_lets_them_grow_on_a_gpu() -> None:
    make("cpu", alone=True)
    make("cuda", alone=False)
    assert chosen() == ""
    make("cuda", alone=True)
    assert chosen() == "expandable_segments:True"


@pytest.mark.skipif(torch.cuda.is_available(), reason="it needs a machine without a GPU")
def test_a_trainer_on_the_local_cluster_is_not_alone_in_its_process() -> None:
    """There an engine of vLLM may lie beside it, whose sleep these segments do not bear."""
    with nrl.cluster("local") as cluster:
        trainer = fsdp.trainer(cluster.reserve(1), tiny.model(), adamw(lr=1e-3), packing=None, device="cuda")
        with pytest.raises(Exception, match="NVIDIA|CUDA"):  # the engine is there by then, and the GPU is not
            trainer.init()
        assert chosen() == ""


@pytest.mark.megatron
@pytest.mark.filterwarnings("ignore")  # of Megatron, when it is imported
def test_megatrons_trainer_lets_them_grow() -> None:
    model, optimizer = tiny.model(dtype="bfloat16"), adamw(lr=1e-3)
    for alone, expected in ((False, ""), (True, "expandable_segments:True")):
        megatron_engine(model, optimizer, Rectangles, {}, "cuda", Layout(), alone)
        assert chosen() == expected
