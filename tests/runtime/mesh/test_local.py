"""The local cluster: its slots and meshes, and what a function mapped over it does otherwise than on processes."""

import socket
import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from nrl.batch import Batch
from nrl.batch.metrics import Metrics, Sum, finalize
from nrl.errors import ClosedCluster, ForeignState, MutatedBatch, PlacementError
from nrl.runtime import Cluster, Mesh, P, Slots, as_mesh, cluster, donated, done, merged, resident, shard_map
from nrl.runtime.venvs.registry import EXECUTABLES, Executable, check_importable

# --- cluster


def test_the_local_cluster_is_the_default() -> None:
    with cluster() as here:
        assert here.name == "local"


def test_an_unknown_address() -> None:
    with pytest.raises(PlacementError, match="cluster: unknown address 'nowhere'; give 'local', 'ray'"):  # noqa: SIM117
        with cluster("nowhere"):
            pass


def test_a_cluster_that_has_been_left_lends_nothing() -> None:
    with cluster("local") as here:
        slots = here.reserve(2)
    with pytest.raises(ClosedCluster, match="reserve: the cluster 'local' has been left.*keep the call inside `with"):
        here.reserve(1)
    with pytest.raises(ClosedCluster, match="mesh: the cluster 'local' has been left"):
        slots.mesh()


def test_threads_of_a_cluster_are_waited_for_and_those_that_they_start() -> None:
    with cluster("local") as here:
        first, second = threading.Event(), threading.Event()

        def work() -> None:
            first.wait()
            here.thread(second.wait, name="second")

        here.thread(work, name="first")
        assert not here.join(0.01)
        first.set()
        assert not here.join(0.1)
        second.set()
        assert here.join(60)


def test_a_cluster_is_left_on_an_error_too() -> None:
    with pytest.raises(ZeroDivisionError), cluster("local") as here:
        raise ZeroDivisionError
    assert not here.open


def test_two_clusters_are_two() -> None:
    with cluster("local") as one, cluster("local") as other:
        assert one != other
    with cluster("local") as again:
        assert again.open


# --- slots


@pytest.mark.parametrize("n", [0, -1])
def test_at_least_one_slot(local: Cluster, n: int) -> None:
    with pytest.raises(PlacementError, match=f"reserve: n is {n}; reserve at least one slot"):
        local.reserve(n)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"strategy": "NEAR"}, "strategy='NEAR' is unknown; choose from PACK, SPREAD, STRICT_PACK, STRICT_SPREAD"),
        ({"kind": "tpu"}, "kind='tpu' is unknown; choose 'gpu' or 'cpu', or leave it out"),
        ({"least": 5}, "least is 5; give a number from 1 to n=4"),
        ({"per_host": 0}, "per_host is 0; give the number of slots on each host"),
        ({"per_host": 2, "strategy": "SPREAD"}, "strategy='SPREAD' and per_host=2 both say where slots lie; leave one"),
    ],
)
def test_what_no_cluster_can_reserve(local: Cluster, given: dict[str, Any], said: str) -> None:
    with pytest.raises(PlacementError, match=f"reserve: {said}"):
        local.reserve(4, **given)


def test_this_process_stands_for_every_host(local: Cluster) -> None:
    """So that a program that chooses hosts and GPUs runs here, too."""
    slots = local.reserve(4, per_host=2, kind="gpu")
    assert slots.hosts == (socket.gethostname(),) * 4
    assert not slots.gpus
    first = slots.indices[0]
    assert repr(slots[:2]) == f"Slots({first}, {first + 1} on {socket.gethostname()})"


def test_slots_can_be_sliced(local: Cluster) -> None:
    slots = local.reserve(5)
    train, sample = slots[:3], slots[3:]
    assert (len(slots), len(train), len(sample)) == (5, 3, 2)
    assert set(train.indices).isdisjoint(sample.indices)
    assert slots[:3] == train


def test_one_slot_is_slots_too(local: Cluster) -> None:
    slots = local.reserve(3)
    assert isinstance(slots[0], Slots)
    assert slots[0] == slots[:1]
    assert slots[-1] == slots[2:]
    assert [len(slot) for slot in slots] == [1, 1, 1]  # type: ignore[attr-defined]
    with pytest.raises(IndexError):
        slots[3]


def test_slots_that_were_reserved_apart_are_not_the_same(local: Cluster) -> None:
    assert local.reserve(2) != local.reserve(2)


# --- mesh


def test_a_mesh_uses_all_its_slots(local: Cluster) -> None:
    mesh = local.reserve(4).mesh()
    assert mesh.axes == {"dp": 4, "tp": 1, "pp": 1, "cp": 1}
    assert mesh.size == 4
    assert mesh.cluster is local
    assert mesh.executable == "base"
    assert local.reserve(3).mesh(dp=3).axes["dp"] == 3
    assert local.reserve(1).mesh(executable="system").executable == "system"


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_a_mesh_that_does_not_use_all_its_slots_says_so(local: Cluster, dp: int) -> None:
    message = f"mesh: dp={dp} tp=1 pp=1 cp=1 is {dp} processes, but there are 3 slots; slice the slots"
    with pytest.raises(PlacementError, match=message):
        local.reserve(3).mesh(dp=dp)


def test_axes_that_do_not_divide_the_slots(local: Cluster) -> None:
    with pytest.raises(PlacementError, match="but there are 3 slots"):
        local.reserve(3).mesh(tp=2)


@pytest.mark.parametrize("axes", [{"dp": 0}, {"dp": -2}, {"tp": 0}, {"pp": -1}, {"cp": 0}])
def test_axes_are_positive(local: Cluster, axes: dict[str, int]) -> None:
    name, value = next(iter(axes.items()))
    with pytest.raises(PlacementError, match=rf"mesh: axes must be positive \(dp may be -1\); found .*{name}={value}"):
        local.reserve(2).mesh(**axes)  # type: ignore[arg-type]


def test_a_mesh_of_no_slots(local: Cluster) -> None:
    with pytest.raises(PlacementError, match="mesh: there are no slots to make a mesh of"):
        local.reserve(2)[2:].mesh()


def test_two_meshes_are_two(local: Cluster) -> None:
    slots = local.reserve(2)
    assert slots.mesh() != slots.mesh()


def test_as_mesh_makes_a_mesh_of_slots_in_the_given_executable(local: Cluster) -> None:
    slots = local.reserve(2)
    made = as_mesh(slots, "system")
    assert isinstance(made, Mesh)
    assert (made.dp, made.executable) == (2, "system")
    assert as_mesh(made, "base") is made


# --- executables


def test_an_unknown_executable(local: Cluster) -> None:
    with pytest.raises(PlacementError, match="executable: there is none named 'bace'; did you mean 'base'"):
        local.reserve(1).mesh(executable="bace")
    with pytest.raises(PlacementError, match="executable: there is none named 'xyzxyz'; there are .*mcore"):
        check_importable("xyzxyz")


def test_an_executable_that_this_process_cannot_import(monkeypatch: pytest.MonkeyPatch, local: Cluster) -> None:
    monkeypatch.setitem(EXECUTABLES, "mine", Executable("mine", package="a_package_that_nobody_has"))
    message = "mesh: executable 'mine' needs the package 'a_package_that_nobody_has', which this process cannot import"
    with pytest.raises(PlacementError, match=message):
        local.reserve(1).mesh(executable="mine")


# --- futures


def test_a_future_that_is_done() -> None:
    assert done(3).result() == 3
    assert done(3).result(timeout=0.0) == 3
    assert done(None).result() is None


# --- functions mapped over it: in this process, at once


def test_one_shard_always_agrees_with_itself(local: Cluster) -> None:
    assert shard_map(lambda x: x.sum(), local.reserve(1).mesh(), P("dp"), P())(torch.arange(4)).result() == 6


def test_a_call_that_fails_consumes_nothing(local: Cluster) -> None:
    mesh = local.reserve(3).mesh()
    state = shard_map(lambda: 1, mesh, (), resident)()

    def fail(state: int, x: Tensor) -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        shard_map(fail, mesh, (donated, P("dp")), resident)(state, torch.arange(3))
    assert shard_map(lambda state: state, mesh, resident, P())(state).result() == 1


def test_a_handle_of_another_mesh(local: Cluster) -> None:
    def step(state: int) -> int:
        return state + 1

    one, other = local.reserve(3).mesh(), local.reserve(3).mesh()
    state = shard_map(lambda: 1, one, (), resident)()
    for spec in (resident, donated):
        with pytest.raises(ForeignState, match=r"shard_map\(step\): this value of shard_map\(<lambda>\) belongs to"):
            shard_map(step, other, spec, resident)(state)
    assert shard_map(step, one, donated, P())(state).result() == 2


def test_a_cluster_that_has_been_left() -> None:
    with cluster("local") as here:
        mesh = here.reserve(2).mesh()
        init = shard_map(lambda: 1, mesh, (), resident)
        borrow, consume = (partial(shard_map(lambda x: x, mesh, spec, P()), init()) for spec in (resident, donated))
    for call in (init, borrow, consume):
        with pytest.raises(ClosedCluster, match=r"shard_map\(<lambda>\): the cluster 'local' has been left"):
            call()


@pytest.mark.parametrize("spec", [P("dp"), P()], ids=repr)
@pytest.mark.parametrize("others", [0, 1])
def test_debug_catches_a_function_that_writes_into_a_batch(
    monkeypatch: pytest.MonkeyPatch, local: Cluster, spec: P, others: int
) -> None:
    monkeypatch.setenv("NRL_DEBUG", "1")
    batch = Batch({"row": torch.arange(3)}, batch_size=[3])
    mesh = local.reserve(3).mesh()

    def my_fn(*batches: Batch) -> Metrics:
        batches[-1]["row"].add_(1)
        return {}

    with pytest.raises(MutatedBatch, match="my_fn wrote into its batch: row"):
        shard_map(my_fn, mesh, spec, merged)(*[batch] * others, batch.clone())
    count = shard_map(lambda batch: {"rows": Sum(batch["row"].sum())}, mesh, P("dp"), merged)
    assert finalize(count(batch).result()) == {"rows": 3}
