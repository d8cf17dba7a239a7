"""Signals of the system in the middle of a call that goes out to several processes; their Ray is a stand-in here."""

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

import nrl
from nrl.algos import sft_loss
from nrl.backends.training.trainer import make_trainer
from nrl.batch import Batch
from nrl.errors import ClusterError, ConsumedState
from nrl.runtime import Mesh, donated, resident, shard_map
from nrl.runtime.mesh.processes import Out
from nrl.runtime.ray.pending_call import ActorLocation
from nrl.runtime.ray.ray_processes import RayProcesses
from nrl.runtime.ray.signal_guard import defer_signals
from tests.backends.bigram import Bigram

Handler = Callable[[int, FrameType | None], Any]


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """The signals that a handler was told of: the program's own, which raises."""
    found: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        found.append(number)
        raise InterruptedError(number)

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    yield found
    for number, old in before.items():
        assert signal.getsignal(number) is handler
        signal.signal(number, old)


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    with nrl.cluster("local") as cluster:
        yield cluster.reserve(3).mesh()


def calls(mesh: Mesh, then: Callable[[int], None]) -> tuple[RayProcesses, list[int]]:
    """The driver's side of a mesh, and the ranks that have got a call; ``then`` happens as one of them gets it."""
    got: list[int] = []

    def actor(rank: int) -> Any:
        def remote(name: str, *_: Any) -> str:
            if name == "call":
                then(rank)
                got.append(rank)
            return "ref"

        return SimpleNamespace(do=SimpleNamespace(remote=remote, options=lambda **_: SimpleNamespace(remote=remote)))

    actors = [actor(rank) for rank in range(mesh.size)]
    return RayProcesses(mesh, actors, [ActorLocation("node", "address")] * mesh.size, 60.0, actor), got


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_waits_until_a_call_has_gone_out_whole(mesh: Mesh, handled: list[int], number: int) -> None:
    processes, got = calls(mesh, lambda rank: os.kill(os.getpid(), number) if rank == 0 else None)
    with pytest.raises(InterruptedError):
        processes.call("test", len, [([],)] * 3, Out.per_shard)
    assert (got, handled) == ([0, 1, 2], [number])
    assert not processes.has_ended


def step(value: int) -> int:
    """Stands for a step that consumes its state."""
    return value + 1


def test_a_state_that_an_interrupted_call_consumed_says_so(mesh: Mesh, handled: list[int]) -> None:
    armed: list[bool] = []
    processes, got = calls(mesh, lambda rank: os.kill(os.getpid(), signal.SIGINT) if armed and rank == 1 else None)
    object.__setattr__(mesh, "processes", processes)
    state = shard_map(int, mesh, (), resident)()
    mapped = shard_map(step, mesh, donated, resident)
    armed.append(True)
    with pytest.raises(InterruptedError):
        mapped(state)
    assert (got, handled) == ([0, 1, 2] * 2, [signal.SIGINT])
    gc.collect()  # the exception's traceback
    assert [len(keys) for keys in processes.dropped] == [1, 1, 1]  # the new value, which nobody has got
    with pytest.raises(ConsumedState, match=r"consumed by shard_map\(step\) already.* where Ctrl-C kept it from"):
        mapped(state)
    assert got == [0, 1, 2] * 2


@attrs.frozen
class GoesOut:
    """The processes of a mesh, whose train steps are interrupted as they go out; all else is their own."""

    processes: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.processes, name)

    def call(self, who: str, *given: Any, **options: Any) -> Any:
        with defer_signals():
            if who.startswith("train_step"):
                os.kill(os.getpid(), signal.SIGINT)
            return self.processes.call(who, *given, **options)


def test_a_train_state_that_an_interrupted_step_consumed_says_so(mesh: Mesh, handled: list[int]) -> None:
    object.__setattr__(mesh, "processes", GoesOut(mesh.processes))
    trainer = make_trainer(mesh, Bigram, name="bigram", max_tokens=100)
    train, state = trainer.train_step(sft_loss), trainer.init()
    mask = torch.ones(3, 4, dtype=torch.bool)
    batch = nrl.assign(
        Batch({}, batch_size=[3]),
        input_ids=torch.ones(3, 4).long(),
        attention_mask=mask,
        loss_mask=mask.tril(1).triu(1),
    )
    with pytest.raises(InterruptedError):
        train(state, batch)
    assert handled == [signal.SIGINT]
    with pytest.raises(ConsumedState, match=r"consumed by train_step\(sft_loss\) already.* where Ctrl-C kept it from"):
        train(state, batch)
    assert handled == [signal.SIGINT]


def test_a_call_that_went_out_in_part_ends_its_mesh(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(rank: int) -> None:
        if rank == 1:
            raise MemoryError

    processes, got = calls(mesh, fails)
    killed: list[Any] = []
    monkeypatch.setattr("ray.kill", lambda actor, *, no_restart: killed.append(actor))
    text = (
        f"test had gone out to 1 of 3 processes of mesh '{mesh.name}' when MemoryError was raised, so the mesh has "
        "been ended; make another one"
    )
    with pytest.raises(MemoryError) as caught:
        processes.call("test", len, [([],)] * 3, Out.per_shard)
    assert caught.value.__notes__ == [text]
    assert processes.has_ended
    assert killed == processes.actors
    with pytest.raises(ClusterError) as ended:
        processes.call("again", len, [([],)] * 3, Out.per_shard)
    assert str(ended.value) == text
    assert got == [0]


def test_each_signal_is_told_once_after_the_block(handled: list[int]) -> None:
    def body() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert handled == []

    with pytest.raises(InterruptedError):
        defer_signals()(body)()
    assert sorted(handled) == [signal.SIGINT, signal.SIGTERM]


def test_a_second_one_goes_through(handled: list[int]) -> None:
    def hangs() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert handled == []
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("nobody could end it")

    with pytest.raises(InterruptedError):
        defer_signals()(hangs)()
    assert handled == [signal.SIGINT, signal.SIGINT]


def test_blocks_within_blocks_wait_for_the_outermost(handled: list[int]) -> None:
    def outer() -> None:
        with defer_signals():
            os.kill(os.getpid(), signal.SIGINT)
        assert handled == []

    with pytest.raises(InterruptedError):
        defer_signals()(outer)()
    assert handled == [signal.SIGINT]


def test_what_the_system_does_is_left_to_it() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with defer_signals():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_another_thread_has_nothing_to_defer() -> None:
    found: list[bool] = []

    def body() -> None:
        with defer_signals():
            found.append(True)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found == [True]
