"""Signals of the system in the middle of a call that goes out to several processes; their Ray is a stand-in here."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

import nrl
from nrl.runtime import Mesh
from nrl.runtime.interrupts import deferred
from nrl.runtime.placement import Out
from nrl.runtime.ray_processes import RayProcesses

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

    def method(rank: int, *, count: bool = False) -> Any:
        def remote(*_: Any) -> str:
            if count:
                then(rank)
                got.append(rank)
            return "ref"

        return SimpleNamespace(remote=remote, options=lambda **_: SimpleNamespace(remote=remote))

    actors = [
        SimpleNamespace(logs=method(rank), listen=method(rank), join=method(rank), call=method(rank, count=True))
        for rank in range(mesh.size)
    ]
    return RayProcesses(mesh, actors, [("node", "address")] * mesh.size, 60.0), got


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_waits_until_a_call_has_gone_out_whole(mesh: Mesh, handled: list[int], number: int) -> None:
    processes, got = calls(mesh, lambda rank: os.kill(os.getpid(), number) if rank == 0 else None)
    with pytest.raises(InterruptedError):
        processes.call("test", len, [([],)] * 3, Out.each)
    assert (got, handled) == ([0, 1, 2], [number])
    assert not processes.ended


def test_each_signal_is_told_once_after_the_block(handled: list[int]) -> None:
    def body() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert handled == []

    with pytest.raises(InterruptedError):
        deferred()(body)()
    assert sorted(handled) == [signal.SIGINT, signal.SIGTERM]


def test_a_second_one_goes_through(handled: list[int]) -> None:
    def hangs() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert handled == []
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("nobody could end it")

    with pytest.raises(InterruptedError):
        deferred()(hangs)()
    assert handled == [signal.SIGINT, signal.SIGINT]


def test_blocks_within_blocks_wait_for_the_outermost(handled: list[int]) -> None:
    def outer() -> None:
        with deferred():
            os.kill(os.getpid(), signal.SIGINT)
        assert handled == []

    with pytest.raises(InterruptedError):
        deferred()(outer)()
    assert handled == [signal.SIGINT]


def test_what_the_system_does_is_left_to_it() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with deferred():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_another_thread_has_nothing_to_defer() -> None:
    found: list[bool] = []

    def body() -> None:
        with deferred():
            found.append(True)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found == [True]
