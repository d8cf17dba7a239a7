"""Functions submitted to one process of a mesh: what the local cluster and Ray do alike, and how a desk decides."""

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, wait
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import nrl
from nrl.batch import Batch
from nrl.errors import (
    ClosedCluster,
    ClusterError,
    DeadlineExceeded,
    MutatedBatch,
    PlacementError,
    ShippingError,
)
from nrl.runtime import Mesh, P, cluster, process, resident, shard_map
from nrl.runtime.mesh.futures import gather
from nrl.runtime.mesh.task_queue import SIDE_BY_SIDE, Desk, Helper, Task
from nrl.runtime.trace import timeline

# --- on every cluster


@pytest.fixture(scope="module")
def mesh(judges: Mesh) -> Mesh:
    """Of two processes; each test leaves it as it was."""
    return judges


def here() -> tuple[int, int, str]:
    return process().rank, process().size, process().mesh


class Gate:
    """Functions of both clusters wait at it: it is a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def wait(self) -> str:
        until = time.monotonic() + 60
        while not Path(self.path).exists():
            assert time.monotonic() < until
            time.sleep(0.01)
        return "through"

    def open(self) -> None:
        Path(self.path).touch()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    made = Gate(tmp_path / "gate")
    yield made
    made.open()


def test_a_function_runs_beside_one_process(mesh: Mesh) -> None:
    one, zero = mesh.submit(here, rank=1), mesh.submit(here, rank=0)
    assert [zero.result(), one.result()] == [(0, 2, "judges"), (1, 2, "judges")]
    assert mesh.submit(here).result() == (0, 2, "judges")
    assert mesh.submit(partial(divmod, 7), 4).result() == (1, 3)
    assert process().mesh == ""


def test_a_function_that_is_given_up_fails_and_the_next_one_gets_another_helper(mesh: Mesh, gate: Gate) -> None:
    running = mesh.submit(gate.wait, rank=0)
    while not running.running():
        time.sleep(0.01)
    running.give_up()
    with pytest.raises(DeadlineExceeded, match="rank 0 of mesh 'judges'"):
        running.result(60)
    assert mesh.submit(here, rank=0).result() == (0, 2, "judges")
    running.give_up()  # what is over stays as it is
    assert isinstance(running.exception(), DeadlineExceeded)


def test_tensors_and_batches_go_and_come_back(mesh: Mesh) -> None:
    mask = torch.arange(5000) < torch.tensor([[5000], [3], [0]])
    batch = nrl.assign(
        Batch({}, batch_size=[3]), input_ids=mask.long() * 7, attention_mask=mask, rewards=torch.zeros(3)
    )

    def score(batch: Batch, weight: torch.Tensor) -> tuple[Batch, torch.Tensor]:
        return nrl.assign(batch, rewards=batch["attention_mask"].sum(-1) * weight), weight.clone()

    scored, weight = mesh.submit(score, batch, torch.full((), 2.0)).result()
    assert scored["rewards"].tolist() == [10_000.0, 6.0, 0.0]
    assert scored["input_ids"].equal(batch["input_ids"])
    assert weight.add_(1).item() == 3.0  # it is the caller's own
    assert batch["rewards"].tolist() == [0.0, 0.0, 0.0]


class Refusal(Exception):
    def __init__(self, task: int, why: str) -> None:
        super().__init__(f"{why}, {task}")
        self.task = task


def test_an_exception_arrives_as_itself(mesh: Mesh) -> None:
    def refuses(task: int) -> int:
        raise Refusal(task, "no answer")

    future = mesh.submit(refuses, 7, rank=1)
    with pytest.raises(Refusal, match="no answer, 7") as caught:
        future.result()
    assert caught.value.task == 7
    assert future.done()
    assert type(future.exception()) is Refusal
    if mesh.cluster.remote:
        assert caught.value.__notes__[-1].startswith("raised in rank 1 of mesh 'judges':\nTraceback")

    def late() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="^its own"):
        mesh.submit(late).result(timeout=60)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_what_ends_other_programs_ends_no_helper(mesh: Mesh, kind: type[BaseException]) -> None:
    before = mesh.submit(threading.get_native_id).result(), mesh.submit(here, rank=0)

    def leaves() -> None:
        raise kind("off")

    with pytest.raises(kind):
        mesh.submit(leaves, rank=0).result()
    assert before[1].result() == mesh.submit(here, rank=0).result()


def test_functions_run_side_by_side(mesh: Mesh, gate: Gate) -> None:
    """All of them and another one: a slow one delays neither the next, on any rank, nor a call in all processes."""
    slow = [mesh.submit(gate.wait) for _ in range(8)]
    assert [mesh.submit(here, rank=rank).result()[0] for rank in (0, 1)] == [0, 1]
    doubled = shard_map(lambda x: 2 * x, mesh, P("dp"), P("dp"))(torch.arange(4))
    assert doubled.result().tolist() == [0, 2, 4, 6]
    assert not any(each.done() for each in slow)
    gate.open()
    assert [each.result() for each in slow] == ["through"] * 8


def test_the_rank_where_the_fewest_are(mesh: Mesh, gate: Gate) -> None:
    slow = [mesh.submit(gate.wait, rank=0) for _ in range(2)]
    assert [mesh.submit(here).result()[0] for _ in range(3)] == [1, 1, 1]
    held = mesh.submit(lambda gate: (process().rank, gate.wait()), gate)
    more = mesh.submit(lambda gate: (process().rank, gate.wait()), gate)
    gate.open()
    assert (held.result()[0], more.result()[0]) == (1, 1)
    assert [each.result() for each in slow] == ["through"] * 2


def test_waiting_has_a_timeout(mesh: Mesh, gate: Gate) -> None:
    future = mesh.submit(gate.wait)
    with pytest.raises(
        DeadlineExceeded, match=r"submit\(wait\) on mesh 'judges' has not returned within 0.1 s; it goes on, and may be"
    ):
        future.result(timeout=0.1)
    with pytest.raises(TimeoutError):
        future.result(timeout=0.0)
    gate.open()
    assert future.result(timeout=60) == "through"


def test_a_function_that_is_late_is_given_up(mesh: Mesh, gate: Gate) -> None:
    """Alone: what runs beside it goes on, and the next one has a place."""
    beside = mesh.submit(gate.wait, rank=0)
    late = mesh.submit(gate.wait, rank=0, deadline=0.3)
    fate = "helper is killed as soon as no other function runs in it" if mesh.cluster.remote else "thread cannot be"
    with pytest.raises(
        DeadlineExceeded, match=rf"submit\(wait\): rank 0 of mesh 'judges' did not return within 0.3 s; its {fate}"
    ):
        late.result()
    assert mesh.submit(here, rank=0).result()[0] == 0
    assert not beside.done()
    gate.open()
    assert beside.result() == "through"


def test_what_has_not_begun_can_be_taken_back(mesh: Mesh, gate: Gate, tmp_path: Path) -> None:
    slow = [mesh.submit(gate.wait, rank=1) for _ in range(SIDE_BY_SIDE)]
    begun = slow[0]
    next_one, last = mesh.submit((tmp_path / "ran").touch, rank=1), mesh.submit(here, rank=1)
    assert mesh.submit(here, rank=0).result()[0] == 0  # while rank 1 is full
    assert mesh.submit(here).result()[0] == 0
    assert next_one.cancel()
    with pytest.raises(CancelledError):
        next_one.result()
    assert begun.running()
    assert not begun.cancel()
    gate.open()
    assert last.result()[0] == 1
    assert [each.result() for each in slow] == ["through"] * SIDE_BY_SIDE
    assert not (tmp_path / "ran").exists()


def test_futures_are_waited_for_first(mesh: Mesh, gate: Gate) -> None:
    def slowly(x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.2)
        return x + 1

    of_all: Any = shard_map(slowly, mesh, P("dp"), P("dp"))(torch.zeros(4))
    of_one: Any = mesh.submit(gate.wait)
    joined = mesh.submit(lambda x, text, n: (x.tolist(), text, n), of_all, of_one, nrl.runtime.done(3))
    assert mesh.submit(here).result()  # which does not wait
    assert not joined.done()
    gate.open()
    assert joined.result() == ([1.0] * 4, "through", 3)
    back = shard_map(lambda text: len(text), mesh, P(), P())(of_one)
    assert back.result() == 7


def test_an_argument_that_failed(mesh: Mesh) -> None:
    def fails(*_: Any) -> int:
        raise ZeroDivisionError("no number")

    with pytest.raises(ZeroDivisionError, match="no number"):
        mesh.submit(here, mesh.submit(fails)).result()


def test_it_is_a_future_of_the_standard_library(mesh: Mesh) -> None:
    futures = [mesh.submit(pow, 2, n) for n in range(4)]
    assert gather(futures).result() == [1, 2, 4, 8]
    assert wait(futures, timeout=60).not_done == set()

    async def awaited() -> list[Any]:
        return await asyncio.gather(*(mesh.submit(pow, 3, n) for n in range(3)), mesh.submit(here, rank=1))

    *powers, place = asyncio.run(awaited())
    assert (powers, place[0]) == ([1, 3, 9], 1)


def test_who_stops_to_wait_takes_back_what_has_not_begun(mesh: Mesh, gate: Gate) -> None:
    running = [mesh.submit(gate.wait, rank=rank) for rank in (0, 1) for _ in range(SIDE_BY_SIDE)]
    waiting = mesh.submit(here)

    async def stops() -> None:
        async with asyncio.timeout(0.1):
            await waiting

    with pytest.raises(TimeoutError):
        asyncio.run(stops())
    assert waiting.cancelled()
    gate.open()
    assert {each.result() for each in running} == {"through"}


def test_what_cannot_be_submitted(mesh: Mesh) -> None:
    for rank in (-1, 2):
        with pytest.raises(
            PlacementError, match=rf"submit\(len\): rank is {rank}, but mesh 'judges' has ranks 0 to 1;"
        ):
            mesh.submit(len, "", rank=rank)
    for deadline in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=rf"submit\(len\): deadline is {deadline}; give seconds, or None"):
            mesh.submit(len, "", deadline=deadline)
    handle = shard_map(int, mesh, (), resident)()
    with pytest.raises(PlacementError, match=r"submit\(len\): a handle was given; submitted functions run beside the"):
        mesh.submit(len, handle)


def test_the_timeline_shows_functions_beside_the_calls(mesh: Mesh, tmp_path: Path) -> None:
    with timeline.recording(tmp_path) as path:
        mesh.submit(here, rank=1).result()
        with timeline.hide_calls():
            mesh.submit(gc.collect).result()
    events = list(timeline._read_events(path))
    meshes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    shown = [(meshes[event["pid"]], event["name"]) for event in events if event["ph"] == "X"]
    assert shown == [("judges.helper", "submit(here)")]


# --- the local cluster


def test_a_local_cluster_that_is_left_gives_functions_up() -> None:
    gate = threading.Event()
    with cluster("local") as here:
        mesh = here.reserve(1).mesh()
        running: list[Any] = [mesh.submit(gate.wait) for _ in range(SIDE_BY_SIDE)]
        waiting = mesh.submit(len, "")
        given = mesh.submit(len, waiting)
    for future in (*running, waiting, given):
        with pytest.raises(ClosedCluster, match=r"submit\((wait|len)\): the cluster 'local' has been left"):
            future.result(timeout=60)
    with pytest.raises(ClosedCluster, match=r"submit\(len\): the cluster 'local' has been left"):
        mesh.submit(len, "")
    gate.set()


def test_the_clusters_deadline_is_that_of_functions() -> None:
    gate = threading.Event()
    with cluster("local", deadline=0.1) as here:
        mesh = here.reserve(1).mesh()
        with pytest.raises(DeadlineExceeded, match="did not return within 0.1 s; its thread cannot be ended"):
            mesh.submit(gate.wait).result()
        assert mesh.submit(gate.wait, 0.3, deadline=60).result() is False
    gate.set()


def test_debug_catches_a_submitted_function_that_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NRL_DEBUG", "1")
    batch = Batch({"row": torch.arange(3)}, batch_size=[3])

    def writes(batch: Batch) -> None:
        batch["row"].add_(1)

    with cluster("local") as here, pytest.raises(MutatedBatch, match="writes wrote into its batch: row"):
        here.reserve(1).mesh().submit(writes, batch).result()


def test_a_mesh_without_a_name_is_collected() -> None:
    with cluster("local") as here:
        mesh = here.reserve(1).mesh()
        desk = weakref.ref(mesh.processes.desk)  # type: ignore[attr-defined]
        del mesh
        gc.collect()
        assert desk() is None


def test_a_future_is_no_part_of_another_value() -> None:
    import pickle

    with cluster("local") as here:
        future = here.reserve(1).mesh().submit(len, "")
        with pytest.raises(TypeError, match="a future is known to its own program only"):
            pickle.dumps([future])


# --- a desk, over helpers whose functions end when a test says so


class Told(Helper):
    fate = "it is told so"

    def __init__(self, made: list["Told"], desk: Desk, rank: int) -> None:
        super().__init__(desk, rank)
        self.begun: list[str] = []
        self.tasks: dict[str, Task] = {}
        self.ended = 0
        made.append(self)

    def begin(self, task: Task) -> None:
        if task.load == "impossible":
            raise ShippingError("cannot begin")
        self.begun.append(task.load)
        self.tasks[task.load] = task

    def end(self) -> None:
        self.ended += 1

    def log(self) -> str:
        return "one\ntwo\n"

    def returns(self, name: str) -> None:
        self.desk.over(self, self.tasks[name])
        self.tasks[name].settle(name)


class Office:
    """A desk, and its helpers."""

    def __init__(self, size: int = 1, deadline: float = 60.0) -> None:
        self.made: list[Told] = []
        self.desk = Desk("office", size, deadline, partial(Told, self.made))

    def submit(self, name: str, rank: int | None = None, deadline: float | None = None) -> Any:
        return self.desk.submit(name, len, (), rank, deadline, lambda fn: name)

    def started(self, number: int = 0) -> Told:
        until(lambda: len(self.made) > number)
        self.desk.started(self.made[number])
        return self.made[number]


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def offices() -> Iterator[Callable[..., Office]]:
    made: list[Office] = []

    def make(*args: Any) -> Office:
        made.append(Office(*args))
        return made[-1]

    yield make
    for office in made:
        office.desk.close(ClusterError)


def test_functions_begin_when_their_helper_has_started(offices: Callable[..., Office]) -> None:
    office = offices()
    first, second = office.submit("a"), office.submit("b")
    until(lambda: bool(office.made))
    assert second.cancel()
    assert office.made[0].begun == []
    helper = office.started()
    until(lambda: helper.begun == ["a"])
    assert not first.cancel()
    helper.returns("a")
    assert first.result() == "a"
    assert len(office.made) == 1


def test_a_helper_that_does_not_start_in_time(offices: Callable[..., Office]) -> None:
    office = offices(1, 0.1)
    futures = [office.submit("a"), office.submit("b", deadline=60)]
    for name, future in zip("ab", futures, strict=True):
        with pytest.raises(DeadlineExceeded) as caught:
            future.result()
        assert str(caught.value) == (
            f"{name}: the helper of rank 0 of mesh 'office' did not start within 0.1 s. If it needs longer, give "
            "nrl.cluster(..., deadline=) more seconds. The last lines of its log:\n    one\n    two"
        )
    until(lambda: office.made[0].ended == 1)
    office.desk.deadline = 60.0
    again = office.submit("c")
    helper = office.started(1)
    until(lambda: helper.begun == ["c"])
    helper.returns("c")
    assert again.result() == "c"


def test_a_helper_that_cannot_be_made() -> None:
    def fails(desk: Desk, rank: int) -> Helper:
        raise PlacementError("no room")

    desk = Desk("office", 1, 60.0, fails)
    for _ in range(2):
        with pytest.raises(PlacementError, match="no room"):
            desk.submit("a", len, (), None, None, lambda fn: "a").result()
    desk.close(ClusterError)


def test_a_function_that_cannot_begin(offices: Callable[..., Office]) -> None:
    office = offices()
    bad, good = office.submit("impossible"), office.submit("a")
    helper = office.started()
    with pytest.raises(ShippingError, match="cannot begin"):
        bad.result()
    until(lambda: helper.begun == ["a"])
    helper.returns("a")
    assert good.result() == "a"
    until(lambda: not helper.running)


def test_a_helper_that_dies_while_it_starts_fails_what_waits_for_it(offices: Callable[..., Office]) -> None:
    office = offices(2)
    for_it, elsewhere = office.submit("a", 0), office.submit("b", 1)
    until(lambda: len(office.made) == 2)
    office.desk.lost(office.made[0], lambda who: ClusterError(f"{who} has died"))
    with pytest.raises(ClusterError, match="a has died"):
        for_it.result()
    helper = office.started(1)
    until(lambda: helper.begun == ["b"])
    assert not elsewhere.done()


def test_a_helper_that_dies_later_is_replaced(offices: Callable[..., Office]) -> None:
    """What had begun has its own error from the helper; what had not goes to the next one."""
    office = offices()
    futures = [office.submit(str(number)) for number in range(SIDE_BY_SIDE + 2)]
    dead = office.started()
    until(lambda: len(dead.begun) == SIDE_BY_SIDE)
    for task in list(dead.tasks.values()):
        task.settle(error=ClusterError("died"))
    office.desk.lost(dead, lambda who: ClusterError("not asked"))
    new = office.started(1)
    until(lambda: new.begun == [str(SIDE_BY_SIDE), str(SIDE_BY_SIDE + 1)])
    assert all(isinstance(future.exception(), ClusterError) for future in futures[:SIDE_BY_SIDE])
    assert not any(future.done() for future in futures[SIDE_BY_SIDE:])
    office.desk.lost(dead, lambda who: ClusterError("told again"))
    new.returns(str(SIDE_BY_SIDE))
    assert futures[SIDE_BY_SIDE].result() == str(SIDE_BY_SIDE)
    assert len(office.made) == 2


def test_a_late_function_costs_its_helper_when_the_others_are_done(offices: Callable[..., Office]) -> None:
    office = offices()
    beside, late = office.submit("beside"), office.submit("late", deadline=0.1)
    helper = office.started()
    with pytest.raises(DeadlineExceeded) as caught:
        late.result()
    assert str(caught.value) == (
        "late: rank 0 of mesh 'office' did not return within 0.1 s; it is told so. If it needs longer, give "
        "submit(..., deadline=) more seconds. The last lines of its log:\n    one\n    two"
    )
    after = office.submit("after")
    new = office.started(1)
    until(lambda: new.begun == ["after"])
    assert helper.ended == 0
    helper.returns("late")  # too late
    helper.returns("beside")
    assert beside.result() == "beside"
    until(lambda: helper.ended == 1)
    new.returns("after")
    assert after.result() == "after"
    assert new.ended == 0
    assert isinstance(late.exception(), DeadlineExceeded)


def test_functions_without_a_rank_wait_for_any(offices: Callable[..., Office]) -> None:
    office = offices(2)
    bound = [office.submit(f"zero {number}", 0) for number in range(SIDE_BY_SIDE + 1)]
    free = [office.submit(f"any {number}") for number in range(SIDE_BY_SIDE + 1)]
    until(lambda: len(office.made) == 2)
    zero, one = sorted((office.started(number) for number in range(2)), key=lambda each: each.rank)
    until(lambda: len(zero.begun) == len(one.begun) == SIDE_BY_SIDE)
    assert {name.split()[0] for name in one.begun} == {"any"}
    one.returns("any 0")
    until(lambda: f"any {SIDE_BY_SIDE}" in one.begun)
    zero.returns("zero 0")
    until(lambda: f"zero {SIDE_BY_SIDE}" in zero.begun)
    assert free[0].result() == "any 0"
    assert bound[0].result() == "zero 0"


def test_a_desk_that_closes_ends_everything(offices: Callable[..., Office]) -> None:
    office = offices()
    running, late = office.submit("a"), office.submit("b", deadline=0.1)
    office.started()
    assert isinstance(late.exception(), DeadlineExceeded)
    waiting = office.submit("c")  # for a new helper
    until(lambda: len(office.made) == 2)
    office.desk.close(lambda who: ClusterError(f"{who}: closed"))
    assert [each.ended for each in office.made] == [1, 1]
    for name, future in (("a", running), ("c", waiting)):
        with pytest.raises(ClusterError, match=f"{name}: closed"):
            future.result()
    with pytest.raises(ClusterError, match="d: closed"):
        office.submit("d").result()
    office.desk.close(lambda who: ClusterError("another reason"))
    with pytest.raises(ClusterError, match="e: closed"):
        office.submit("e").result()
