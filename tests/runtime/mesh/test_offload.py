"""Values that leave their device; there is none here, so everything is said not to be on the host."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from nrl.runtime.mesh import offload
from nrl.runtime.mesh.offload import FROZEN, offload_value, onload_value, to_host
from nrl.runtime.ray.worker import Worker


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_is_on_host", lambda x: False)
    monkeypatch.setattr(offload, "_device", lambda module: torch.device("meta"))


@pytest.fixture
def layer() -> Iterator[nn.Linear]:
    made = nn.Linear(3, 2)
    yield made
    FROZEN.discard(made)


def test_tensors_have_the_place_that_they_had_before() -> None:
    owner, other = nn.Identity(), nn.Identity()
    first = [*map(to_host(owner), (torch.ones(2), torch.zeros(3)))]
    again = [*map(to_host(owner), (torch.full((2,), 5.0), torch.ones(3)))]
    assert [x.data_ptr() for x in again] == [x.data_ptr() for x in first]
    assert [x.tolist() for x in again] == [[5, 5], [1, 1, 1]]
    assert to_host(other)(torch.ones(2)).data_ptr() != first[0].data_ptr()
    wider = [*map(to_host(owner), (torch.ones(4), torch.ones(3)))]  # as moments that are new
    assert [x.shape[0] for x in wider] == [4, 3]
    assert wider[1].data_ptr() == first[1].data_ptr()


def test_a_frozen_module_is_copied_to_the_host_once(layer: nn.Linear) -> None:
    """On its way back nothing could be read from the device here."""
    expected = {name: x.clone() for name, x in layer.state_dict().items()}
    FROZEN.add(layer)
    for _ in range(3):
        assert offload_value(layer)
        assert all(torch.equal(x, expected[name]) for name, x in layer.state_dict().items())
        onload_value(layer)
        assert {x.device.type for x in layer.parameters()} == {"meta"}


def test_any_other_module_is_copied_each_time(layer: nn.Linear) -> None:
    assert offload_value(layer)
    onload_value(layer)
    with pytest.raises(NotImplementedError, match="no data"):
        offload_value(layer)


def test_a_module_that_is_on_the_host_stays(layer: nn.Linear, monkeypatch: pytest.MonkeyPatch) -> None:
    """And whoever rests all values need not wake it."""
    monkeypatch.setattr(offload, "_device", lambda module: torch.device("cpu"))
    assert not offload_value(layer)
    assert not offload_value([layer])


class Sleeper:
    def __init__(self) -> None:
        self.story = list[str]()

    def offload(self) -> None:
        self.story.append("rest")

    def onload(self) -> None:
        self.story.append("wake")


def test_a_turn_wakes_those_that_it_made_rest(layer: nn.Linear) -> None:
    """And not a reference that had left the device before, which comes back when somebody asks it."""
    value: Any = Sleeper()
    assert offload_value(value)
    onload_value(value)
    assert value.story == ["rest", "wake"]
    worker = Worker("mesh", 0, 1, 1, torch.get_num_threads(), 0)
    worker._values = {1: value, 2: "a number", 3: layer}
    for _ in range(2):  # or while a third mesh takes its turn
        worker.offload()
        assert worker._offloaded == {1, 3}


def test_copies_have_come_before_a_module_reads_them(layer: nn.Linear, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a sharded one does, which fills up a part that is smaller than those of others."""
    story = list[str]()
    applied: Any = nn.Module._apply

    def apply(module: nn.Module, *args: Any) -> Any:
        story.append("apply")
        return applied(module, *args)

    monkeypatch.setattr(offload, "to_host", lambda owner, same: lambda x: x)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: story.append("synchronize"))
    monkeypatch.setattr(nn.Module, "_apply", apply)
    offload_value(layer)
    assert story == ["synchronize", "apply"]


def test_a_sharded_module(layer: nn.Linear) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
        x = torch.ones(1, 3)
        expected = layer(x)
        FROZEN.add(layer)
        for _ in range(2):
            offload_value(layer)
            torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)
    finally:
        dist.destroy_process_group()
