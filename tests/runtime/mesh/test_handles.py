import pytest

from nrl.errors import ClosedCluster, ConsumedState, ForeignState
from nrl.runtime import Cluster, Handle, Mesh, cluster


@pytest.fixture
def mesh(local: Cluster) -> Mesh:
    return local.reserve(2).mesh()


def test_a_handle_can_be_borrowed_any_number_of_times(mesh: Mesh) -> None:
    state = Handle(mesh, mesh, "counter", [1, 2])
    assert [state.borrow(mesh, "count") for _ in range(3)] == [[1, 2]] * 3
    assert not state.is_consumed


def test_a_handle_can_be_donated_once(mesh: Mesh) -> None:
    state = Handle(mesh, mesh, "counter", [1, 2])
    assert state.donate(mesh, "step") == [1, 2]
    assert state.is_consumed
    message = r"again: this counter was consumed by step already.*use what that call returned \(state, metrics = step"
    with pytest.raises(ConsumedState, match=message):
        state.donate(mesh, "again")
    with pytest.raises(ConsumedState, match=r"read: this counter was consumed by step already"):
        state.borrow(mesh, "read")


def test_a_handle_has_one_owner(local: Cluster, mesh: Mesh) -> None:
    state = Handle(mesh, mesh, "counter", [1, 2])
    other = local.reserve(2).mesh()
    with pytest.raises(
        ForeignState, match="read: this counter belongs to .*pass the state of the same trainer or mesh"
    ):
        state.borrow(other, "read")
    with pytest.raises(ForeignState, match="step: this counter"):
        state.donate(other, "step")
    assert state.borrow(mesh, "read") == [1, 2]


def test_the_owner_is_known_by_identity(mesh: Mesh) -> None:
    state = Handle(mesh, [], "counter", [1, 2])
    with pytest.raises(ForeignState):
        state.borrow([], "read")


def test_what_a_cluster_held_is_gone_with_it() -> None:
    with cluster("local") as here:
        mesh = here.reserve(1).mesh()
        state = Handle(mesh, mesh, "counter", [1])
    with pytest.raises(ClosedCluster, match="read: the cluster 'local' has been left, and what it held is gone"):
        state.borrow(mesh, "read")
    with pytest.raises(ClosedCluster, match="step: "):
        state.donate(mesh, "step")
    assert not state.is_consumed


def test_a_handle_prints_its_name_and_whether_it_is_consumed(mesh: Mesh) -> None:
    state = Handle(mesh, mesh, "counter", [1, 2])
    assert repr(state) == "<counter on 2 process(es)>"
    state.donate(mesh, "step")
    assert repr(state) == "<counter on 2 process(es), consumed>"
