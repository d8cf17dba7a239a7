"""Functions mapped over Ray actors: what is not as on the local cluster. Where data goes, and what comes too late."""

import gc
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import nrl
from nrl.batch import Batch
from nrl.batch.metrics import Sum, finalize
from nrl.errors import (
    DeadlineExceeded,
    ForeignState,
    LostActor,
    MissingColumn,
    MutatedBatch,
    ShippingError,
)
from nrl.runtime import Cluster, Executable, Mesh, P, Slots, donated, merged, process, resident, shard_map
from nrl.runtime.mesh.processes import Out
from nrl.runtime.ray.codec.pickling import deserialize

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def slots(on_ray: Cluster) -> Slots:
    return on_ray.reserve(2)


@pytest.fixture(scope="module")
def mesh(slots: Slots) -> Mesh:
    return slots.mesh(executable="system", name="pair")


@pytest.fixture(scope="module")
def alone(slots: Slots) -> Mesh:
    """On one of the same slots: the two are colocated."""
    return slots[:1].mesh(executable="system", name="alone")


@pytest.fixture(scope="module")
def square(on_ray: Cluster) -> Mesh:
    return on_ray.reserve(4).mesh(dp=2, tp=2, executable="system", name="square")


def batch_of(lengths: list[int], width: int = 8) -> Batch:
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    made: Batch = Batch({"input_ids": mask.long(), "attention_mask": mask}, batch_size=[len(lengths)]).lock_()
    return made


def test_what_ranks_return_whose_rows_are_the_same(square: Mesh) -> None:
    """Of each shard one rank sends, or every rank does: the files that each has written, for instance."""
    args: list[list[Any]] = [[]] * 4
    one, every = square.processes.call("ranks", lambda: (process().rank,) * 2, args, (Out.per_shard, Out.all))
    assert [len(reply.then(list).result()) for reply in (one, every)] == [2, 4]
    assert every.then(list).result() == [0, 1, 2, 3]


class Alive:
    """Counted in the process that holds it."""


def living() -> int:
    gc.collect()
    return sum(type(each).__name__ == "Alive" for each in gc.get_objects())


def test_values_without_a_name_are_dropped(alone: Mesh) -> None:
    make, census = shard_map(Alive, alone, (), resident), shard_map(living, alone, (), P())
    kept, other = make(), make()
    assert census().result() == 2
    del other
    gc.collect()
    assert census().result() == 1
    del kept
    gc.collect()
    assert census().result() == 0


def test_a_value_of_another_mesh_is_refused(mesh: Mesh, alone: Mesh) -> None:
    value = shard_map(lambda: 0, alone, (), resident)()
    with pytest.raises(ForeignState):
        shard_map(lambda x: x, mesh, resident, P())(value)


def test_a_future_goes_from_process_to_process(mesh: Mesh, alone: Mesh) -> None:
    """The driver sees nothing of it: what it would have opened stays unopened."""
    double = shard_map(lambda x: 2 * x, mesh, P("dp"), P("dp"))
    first: Any = double(torch.arange(6))
    second: Any = double(first)  # split alike: each part goes to one process
    whole: Any = shard_map(lambda x: x + 1, alone, P(), P())(second)  # put together there
    split: Any = double(whole)  # of unknown length: the driver has to look
    assert whole.result().tolist() == [1, 5, 9, 13, 17, 21]
    assert split.result().tolist() == [2, 10, 18, 26, 34, 42]
    assert not first._value
    assert not second._value


def test_a_future_is_split_otherwise_where_another_argument_says_so(mesh: Mesh) -> None:
    """Rows of one argument that are on their way meet rows of another one that are split by tokens."""
    batch = batch_of([1, 1, 8, 8])
    numbers: Any = shard_map(lambda x: x, mesh, P("dp"), P("dp"))(torch.arange(4))
    assert [rows.tolist() for rows in numbers.rows] != [rows.tolist() for rows in nrl.batch.shard(batch, 2).rows]
    found = shard_map(lambda b, x: b["attention_mask"].sum(-1) * 10 + x, mesh, P("dp"), P("dp"))(batch, numbers)
    assert found.result().tolist() == [10, 11, 82, 83]
    assert not numbers._value


def test_what_all_have_is_fetched_once(square: Mesh) -> None:
    same: Any = shard_map(lambda x: x + 1, square, P(), P())(torch.zeros(3))
    assert len(same.refs) == 1
    assert same.result().tolist() == [1.0] * 3
    rows: Any = shard_map(lambda x: x + process().rank, square, P("dp"), P("dp"))(torch.zeros(4))
    assert len(rows.refs) == 2  # of four processes, two of which hold the same
    assert rows.result().tolist() == [0.0, 0.0, 2.0, 2.0]


def test_metrics_of_replicas_count_once(square: Mesh) -> None:
    found = shard_map(lambda x: {"n": Sum(torch.tensor(len(x)))}, square, P("dp"), merged)(torch.zeros(5))
    assert int(found.result()["n"].total) == 5


def test_processes_know_their_place(square: Mesh) -> None:
    def place() -> Any:
        here = process()
        axes = {name: here.device_mesh[name].get_local_rank() for name in ("pp", "dp", "cp", "tp")}
        found: list[Any] = [None] * here.size
        dist.all_gather_object(found, (here.rank, here.size, here.mesh, axes))
        return found

    found = shard_map(place, square, (), P())().result()
    assert [rank for rank, *_ in found] == [0, 1, 2, 3]
    assert {(size, name) for _, size, name, _ in found} == {(4, "square")}
    assert [(axes["dp"], axes["tp"]) for *_, axes in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_collectives_run_along_named_axes(square: Mesh) -> None:
    def summed(x: Any) -> Any:
        dist.all_reduce(x := x.clone(), group=process().device_mesh["dp"].get_group())
        return x

    assert shard_map(summed, square, P("dp"), P("dp"))(torch.tensor([1.0, 10.0])).result().tolist() == [11.0, 11.0]


def test_thread_counts_are_set(slots: Slots) -> None:
    """Not left to Ray, which sets 1."""
    mesh = slots[:1].mesh(executable=Executable("system", env={"OMP_NUM_THREADS": "3"}))
    assert shard_map(torch.get_num_threads, mesh, (), P())().result() == 3


def test_a_batch_is_put_into_the_store_once(mesh: Mesh, alone: Mesh) -> None:
    batch = batch_of([8] * 4)
    lengths = shard_map(lambda b: b["attention_mask"].sum(-1), mesh, P("dp"), P("dp"))
    stored: Any = mesh.processes.stored.batches  # type: ignore[attr-defined]
    before = len(stored)
    for _ in range(3):
        assert lengths(batch).result().tolist() == [8] * 4
    assert len(stored) - before == 2  # its two shards
    del batch
    gc.collect()
    assert len(stored) == before


def test_all_rows_of_a_batch_are_not_put_a_second_time(alone: Mesh) -> None:
    batch = batch_of([8, 3, 5])
    stored: Any = alone.processes.stored.batches  # type: ignore[attr-defined]
    before = len(stored)
    for spec in (P("dp"), P()):
        assert shard_map(lambda b: b["attention_mask"].sum(), alone, spec, P())(batch).result() == 16
    assert len(stored) - before == 1


@pytest.mark.parametrize("spec", [P("dp"), P()])
def test_results_are_in_memory_of_their_own(alone: Mesh, spec: P) -> None:
    import ray

    future: Any = shard_map(lambda x: x + 1, alone, spec, spec)(torch.zeros(4096))
    found = future.result()
    found.mul_(5)  # lawful: it is the caller's
    [parts] = ray.get(future.refs)
    shared = deserialize(parts)[0]
    assert found.unique().tolist() == [5.0]
    assert shared.unique().tolist() == [1.0]


def test_a_write_into_an_argument_is_found(mesh: Mesh) -> None:
    def spoil(batch: Batch) -> Any:
        batch["input_ids"].add_(1)
        return batch["input_ids"].sum(-1)

    batch = batch_of([3000, 3000], width=3000)
    with pytest.raises(MutatedBatch, match="spoil.* wrote into its arguments"):
        shard_map(spoil, mesh, P("dp"), P("dp"))(batch).result()
    total = shard_map(lambda b: b["input_ids"].sum(-1), mesh, P("dp"), P("dp"))
    assert total(batch).result().tolist() == [3000, 3000]  # what was spoiled is not used again


def test_a_write_by_a_function_that_raises_is_found(mesh: Mesh) -> None:
    def writes(batch: Batch) -> Any:
        batch["input_ids"].add_(1)
        raise ValueError("after it wrote")

    batch = batch_of([8] * 256, width=64)
    total = int(batch["input_ids"].sum())
    with pytest.raises(MutatedBatch) as caught:
        shard_map(writes, mesh, P("dp"), P("dp"))(batch).result()
    assert "after it wrote" in str(caught.value.__notes__)
    summed = shard_map(lambda b: {"sum": Sum(b["input_ids"].sum().float())}, mesh, P("dp"), merged)
    assert finalize(summed(batch).result()) == {"sum": total}


def test_a_future_that_was_written_into_is_not_used_again(mesh: Mesh) -> None:
    coming = shard_map(lambda x: x, mesh, P("dp"), P("dp"))(torch.zeros(100_000))
    with pytest.raises(MutatedBatch):
        shard_map(lambda x: x.add_(1), mesh, P("dp"), P("dp"))(coming).result()
    uses: list[Any] = [coming.result, lambda: shard_map(lambda x: x, mesh, P("dp"), P("dp"))(coming)]
    for use in uses:
        with pytest.raises(MutatedBatch):
            use()


def test_what_the_program_writes_is_sent_again(mesh: Mesh) -> None:
    batch = batch_of([8] * 64)
    summed = shard_map(lambda b: {"sum": Sum(b["input_ids"].sum().float())}, mesh, P("dp"), merged)
    for _ in range(2):
        assert finalize(summed(batch).result()) == {"sum": float(batch["input_ids"].sum())}
        batch["input_ids"].add_(1)


def test_what_stays_is_not_what_others_read(mesh: Mesh) -> None:
    weights = shard_map(lambda w: w, mesh, P(), resident)(torch.zeros(5000))

    def add(w: Any) -> Any:
        w.add_(1)
        return w, {"most": Sum(w.max())}

    _, most = shard_map(add, mesh, donated, (resident, merged))(weights)
    assert finalize(most.result()) == {"most": 2.0}  # 1 in each of two processes


def test_equal_results_are_the_same(mesh: Mesh) -> None:
    def result() -> Any:
        names = ["alpha", "beta", "gamma"]
        turned = names[process().rank :] + names[: process().rank]
        zero = torch.tensor(-0.0 if process().rank else 0.0)
        text = str(b"ab", "ascii")
        return dict.fromkeys(turned, 1), set(turned), zero, [text, text if process().rank else str(b"ab", "ascii")]

    keys, names, *_ = shard_map(result, mesh, (), P())().result()
    assert set(keys) == names == {"alpha", "beta", "gamma"}


def test_random_numbers_are_seeded_and_of_each_rank(mesh: Mesh) -> None:
    drawn = shard_map(lambda x: torch.full_like(x, torch.initial_seed() % 2**31), mesh, P("dp"), P("dp"))
    first, second = drawn(torch.zeros(2, dtype=torch.int64)).result().tolist()
    assert second - first == 1


def test_errors_arrive_as_what_they_are(mesh: Mesh) -> None:
    def reads(batch: Batch) -> Any:
        return nrl.require(batch, "rewards", reader="my_function")

    with pytest.raises(MissingColumn, match="my_function reads the column 'rewards'") as caught:
        shard_map(reads, mesh, P("dp"), P("dp"))(batch_of([1, 2])).result()
    assert re.match(r"raised in rank [01] of mesh 'pair'", caught.value.__notes__[0])
    assert "in reads" in caught.value.__notes__[0]


class Particular(Exception):
    """Of the user's own."""


def test_an_exception_of_the_users_own_can_be_caught(mesh: Mesh) -> None:
    def fails() -> None:
        raise Particular("only here")

    with pytest.raises(Particular, match="only here"):
        shard_map(fails, mesh, (), P())().result()


def test_what_failed_before_it_is_the_error_of_what_follows(mesh: Mesh) -> None:
    def fails(x: Any) -> Any:
        raise Particular("the first one")

    failed = shard_map(fails, mesh, P("dp"), P("dp"))(torch.arange(4))
    with pytest.raises(Particular, match="the first one"):
        shard_map(lambda x: x + 1, mesh, P("dp"), P("dp"))(failed).result()
    value = shard_map(fails, mesh, P("dp"), resident)(torch.arange(4))
    with pytest.raises(Particular, match="the first one"):
        shard_map(lambda x: x, mesh, resident, P())(value).result()


def test_a_failed_call_leaves_what_it_was_to_consume(mesh: Mesh) -> None:
    """What it returned stands for the old value, once it is known that all ranks raised."""

    def grow(x: int, by: int) -> Any:
        if by < 0 and process().rank >= -1 - by:
            raise Particular("late")
        return x + by, {"by": Sum(torch.tensor(float(by)))}

    step = shard_map(grow, mesh, (donated, P()), (resident, merged))
    look = shard_map(lambda x: x, mesh, resident, P())
    value, _ = step(shard_map(lambda: 1, mesh, (), resident)(), 1)
    for _ in range(2):
        value, failed = step(value, -1)  # in both
        with pytest.raises(Particular):
            failed.result()
    again, metrics = step(value, -1)
    again, _ = step(again, 5)  # which was asked for before anybody knew
    with pytest.raises(Particular):
        look(again).result()
    with pytest.raises(Particular):
        metrics.result()
    assert look(again).result() == 2
    value, _ = step(again, 1)
    assert look(value).result() == 3
    value, failed = step(value, -2)  # in one of them
    with pytest.raises(Particular):
        failed.result()
    with pytest.raises(Particular):
        look(value).result()


def test_a_wait_may_end_before_the_call(alone: Mesh) -> None:
    slow = shard_map(lambda: time.sleep(1.5), alone, (), P())()
    with pytest.raises(DeadlineExceeded, match=r"rank 0 of mesh 'alone' did not return within 0\.2 s; it goes on"):
        slow.result(timeout=0.2)
    assert slow.result() is None


def test_what_cannot_be_sent_is_said_before_anything_runs(mesh: Mesh) -> None:
    generator = (x for x in range(3))
    with pytest.raises(ShippingError, match=r"shard_map\(.*generator.*'generator' of"):
        shard_map(lambda: next(generator), mesh, (), P())()


def test_a_future_is_an_argument(mesh: Mesh) -> None:
    coming = shard_map(lambda x: x, mesh, P("dp"), P("dp"))(torch.zeros(2))
    one = shard_map(lambda x: x, mesh, P(), P())
    uses: list[Any] = [lambda: shard_map(lambda: coming, mesh, (), P())(), lambda: one({"a": coming})]
    for use in uses:
        with pytest.raises(ShippingError, match=r"Pending.*give it to the call as an argument of its own"):
            use()


def test_what_a_function_captures_is_as_it_is_at_the_call(alone: Mesh) -> None:
    captured = {"scale": 2}
    scale = shard_map(lambda x: x * captured["scale"], alone, P(), P())
    assert scale(torch.ones(1)).result().tolist() == [2.0]
    captured["scale"] = 3
    assert scale(torch.ones(1)).result().tolist() == [3.0]


class Sleeper:
    """A value that says when it left its device and came back."""

    def __init__(self) -> None:
        self.story = ["made"]

    def offload(self) -> None:
        self.story.append("rest")

    def onload(self) -> None:
        self.story.append("wake")


def told_by(sleeper: Sleeper) -> list[str]:
    return list(sleeper.story)


def test_of_two_meshes_on_the_same_devices_the_idle_one_rests(on_ray: Cluster) -> None:
    """Slots are CPUs here, which nobody has to leave; so these meshes are told that they share devices."""
    slots = on_ray.reserve(2)
    meshes = [slots.mesh(executable="system"), slots[1:].mesh(executable="system")]
    for mesh in meshes:
        mesh.processes._others = [each.processes for each in meshes]  # type: ignore[attr-defined]
    both, one = meshes
    value, other = shard_map(Sleeper, both, (), resident)(), shard_map(Sleeper, one, (), resident)()
    told = shard_map(told_by, both, resident, P())
    assert told(value).result() == ["made", "rest", "wake"]  # `one` was called in between
    assert told(value).result() == ["made", "rest", "wake"]
    assert shard_map(lambda sleeper: list(sleeper.story), one, resident, P())(other).result() == [
        "made",
        "rest",
        "wake",
    ]
    assert told(value).result() == ["made", "rest", "wake", "rest", "wake"]
    (pid,) = shard_map(lambda: (os.getpid(),), one, (), P())().result()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(LostActor, match="rest: ") as caught:
        told(value).result()
    assert caught.value.mesh == one.name
    assert told(value).result()[-1] == "wake"  # the other mesh goes on


def test_a_block_ends_when_its_calls_have_and_says_what_nobody_read(on_ray: Cluster, tmp_path: Path) -> None:
    def fails() -> None:
        raise Particular("unread")

    def writes(path: str) -> None:
        time.sleep(1)
        Path(path).touch()

    def block() -> None:
        with nrl.cluster("ray") as cluster:
            mesh = cluster.reserve(1).mesh(executable="system")
            shard_map(fails, mesh, (), P())()
            shard_map(writes, mesh, P(), P())(str(tmp_path / "done"))

    with pytest.raises(Particular, match="unread") as caught:
        block()
    assert "No result of shard_map(fails) was read" in caught.value.__notes__[-1]
    assert (tmp_path / "done").exists()


def test_a_call_has_its_own_deadline_however_many_wait(alone: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alone.processes, "deadline", 2.0)
    calls = [shard_map(lambda: time.sleep(0.7), alone, (), P())() for _ in range(5)]
    assert calls[-1].result() is None
