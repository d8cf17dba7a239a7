"""No process holds more of a sharded model than its part and what is under way."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import nrl
from benchmarks.publish import model
from nrl import tiny
from nrl.backends import Model, adamw, fsdp, hf
from nrl.backends.training.weight_stream import _BUCKET
from nrl.runtime import Cluster, Executable
from nrl.runtime.mesh.rpc import from_all
from tests.weights import assert_equal, weights

pytestmark = [pytest.mark.ray, pytest.mark.slow]

RANKS = 4
FREES = Executable("system", env={"MALLOC_MMAP_THRESHOLD_": str(2**20)})
"""What is freed goes back to the operating system at once, so that a peak is one of what is held."""


def forget_peak() -> int:
    """Bytes that the process has now, from which on its peak is measured."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def memory(of: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{of}:"))
    return int(line.split()[1]) * 1024


def peaks(mesh: Any, call: Callable[[], Any]) -> tuple[Any, list[int]]:
    """What a call returns, and for each process the bytes that it takes meanwhile, at most."""
    before = from_all(mesh, "test", forget_peak)
    found = call()
    after = from_all(mesh, "test", partial(memory, "VmHWM"))
    return found, [high - low for high, low in zip(after, before, strict=True)]


@pytest.mark.timeout(900)
def test_a_part_and_two_buckets(on_ray: Cluster, tmp_path: Path) -> None:
    tiny.save(model("500M"), tmp_path)
    named = Model(str(tmp_path))
    slots = on_ray.reserve(RANKS + 1)
    mesh = slots[:RANKS].mesh(dp=RANKS, executable=FREES, name="sharded")
    trainer = fsdp.trainer(mesh, named, adamw(lr=1e-6))
    sampler = hf.sampler(slots[RANKS:].mesh(executable=FREES), named)
    fsdp.trainer(mesh, tiny.model(), adamw(lr=1e-6)).load()  # what is imported then stays
    params, loaded = peaks(mesh, trainer.load)
    size = sum(tensor.nbytes for _, tensor in params.tensors())
    assert size > 2e9
    other, filled = peaks(mesh, lambda: trainer.init(params))
    assert_equal(weights(other.params), weights(params))
    _, published = peaks(mesh, lambda: nrl.publish(params, sampler))
    _, exported = peaks(mesh, lambda: trainer.export(params, tmp_path / "out"))
    most = 2 * _BUCKET
    taken = {"loaded": loaded, "filled": filled, "published": published, "exported": exported}
    part = {"loaded": size / RANKS, "filled": size / RANKS, "published": 0, "exported": 0}
    assert not {name: each for name, each in taken.items() if max(each) >= part[name] + most}
