"""SIGTERM: where it breaks off, what it saves, and that a run goes on from there as if nothing had been."""

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest

import nrl
from nrl import ahead
from nrl.data import Source, Stream, counting
from nrl.errors import LostActor
from nrl.run.checkpoint import Checkpoints, checkpoints
from nrl.runtime import preemption
from nrl.runtime.preemption import Terminated, heed_signals
from tests.children import ends


@attrs.frozen
class Config:
    out: str
    steps: int = 6
    checkpoints: Checkpoints = Checkpoints(every=4, grace=600.0)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def call_off() -> None:
    """Make as if no signal had come: this process lives on."""
    preemption._signal = None
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _this_process_lives_on() -> Iterator[None]:
    yield
    call_off()


@contextmanager
def terminated() -> Iterator[None]:
    """The end of a process, and the beginning of the next one."""
    with pytest.raises(Terminated) as caught:
        yield
    assert caught.value.code == 143
    call_off()


def items(at: dict[int, Callable[[], Any]] | None = None) -> Source[Any]:
    """Numbers that are drawn, so that the generators' state matters; making one may call something first."""
    calls = at or {}

    def item(index: int) -> Any:
        drawn = (index, random.random())
        if index in calls:
            calls.pop(index)()
        return drawn

    return counting(item)


def program(
    out: Path,
    stream: Stream[Any],
    *,
    within: Callable[[int], Any] = lambda step: None,
    saves: bool = True,
    cfg: Callable[..., Config] = Config,
) -> list[Any]:
    with nrl.run(cfg(str(out))) as run:
        seen, stream = run.restore(seen=[], stream=stream)
        for i, item in run.steps(stream):
            seen = [*seen, item]
            within(i)
            run.log(i, {})
            if saves:
                run.save(i, seen=seen, stream=stream)
    return list(seen)


def lines(out: Path) -> int:
    path = out / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


STREAMS: dict[str, Callable[[Source[Any]], Source[Any]]] = {
    "plain": lambda source: source,
    "lag 0": lambda source: ahead(source, 0),
    "lag 2": lambda source: ahead(source, 2),
    "lag of lags": lambda source: ahead(ahead(source, 1), 1),
    "other processes": lambda source: ahead(source._replace(remote=True), 2),
}


@pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS.keys())
@pytest.mark.parametrize("index", [0, 1, 3, 4, 5])
def test_a_wait_for_a_batch_is_broken_off_and_the_last_step_is_saved(
    tmp_path: Path, make: Callable[[Source[Any]], Source[Any]], index: int
) -> None:
    expected = program(tmp_path / "whole", make(items()))
    out = tmp_path / "broken"
    with terminated():
        program(out, make(items({index: terminate})))
    done = lines(out)
    assert [found.step + 1 for found in checkpoints(out / "checkpoints/train")][-1:] == ([done] if done else [])
    assert program(out, make(items())) == expected
    assert lines(out) == 6


@pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS.keys())
def test_a_step_that_runs_comes_to_its_end_and_is_saved(
    tmp_path: Path, make: Callable[[Source[Any]], Source[Any]]
) -> None:
    expected = program(tmp_path / "whole", make(items()))
    out = tmp_path / "broken"
    with terminated():
        program(out, make(items()), within=lambda step: terminate() if step == 1 else None)
    assert [found.step for found in checkpoints(out / "checkpoints/train")] == [1]
    assert lines(out) == 2
    assert program(out, make(items())) == expected


def test_what_it_says(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with terminated():
        program(tmp_path / "a", items({2: terminate}))
    assert capfd.readouterr().err.splitlines() == [
        "run: SIGTERM; ending, within 600 s (checkpoints.grace)",
        f"run: step 1 of 'train' is saved in {tmp_path}/a/checkpoints/train/000002",
        f"run: the same command with out={tmp_path}/a goes on after step 1 of 'train'",
    ]
    with terminated():
        program(tmp_path / "b", items(), within=lambda step: terminate() if step == 3 else None)
    assert capfd.readouterr().err.splitlines() == [
        "run: SIGTERM; going on to the end of this step, within 600 s (checkpoints.grace)",
        f"run: step 3 of 'train' is saved in {tmp_path}/b/checkpoints/train/000004",
        f"run: the same command with out={tmp_path}/b goes on after step 3 of 'train'",
    ]
    with terminated():
        program(tmp_path / "b", items({4: terminate}))
    assert "no step of 'train' has been given to run.save since the last checkpoint" in capfd.readouterr().err
    with terminated():
        program(tmp_path / "c", items({4: terminate}))
    assert f"step 3 of 'train' is saved in {tmp_path}/c/checkpoints/train/000004" in capfd.readouterr().err


def test_a_disk_that_takes_nothing_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def full() -> None:
        (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
        (tmp_path / "checkpoints").write_text("")
        terminate()

    with terminated():
        program(tmp_path, items({2: full}))
    assert "run: no checkpoint could be saved: CheckpointError: save: " in capfd.readouterr().err


def test_a_stream_that_cannot_go_back_is_not_broken_off(tmp_path: Path) -> None:
    def make(at: dict[int, Callable[[], Any]] | None = None) -> Source[Any]:
        return items(at)._replace(mark=None)

    expected = program(tmp_path / "whole", make())
    with terminated():
        program(tmp_path / "broken", make({2: terminate}))
    assert [found.step for found in checkpoints(tmp_path / "broken/checkpoints/train")] == [2]
    assert program(tmp_path / "broken", make()) == expected


def test_a_step_that_saves_nothing_is_lost_and_that_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with terminated():
        program(tmp_path, items({2: terminate}), saves=False)
    assert "no step of 'train' has been given to run.save since" in capfd.readouterr().err


def test_outside_of_a_loop_it_ends_at_once(tmp_path: Path) -> None:
    left = []
    with terminated(), nrl.run(Config(str(tmp_path))):
        try:
            terminate()
            time.sleep(60)
        except Exception:  # as programs do
            pytest.fail("it is no Exception")
        finally:
            left.append(True)
    assert left


def test_what_is_under_way_elsewhere_is_made_anew_where_it_takes_too_long(tmp_path: Path) -> None:
    going = threading.Event()
    expected = program(tmp_path / "whole", items())

    def slow() -> None:
        threading.Timer(0.2, terminate).start()
        going.wait()

    cfg = lambda out: Config(out, checkpoints=Checkpoints(every=4, grace=4.0))  # noqa: E731
    with terminated():
        program(tmp_path / "broken", ahead(items({3: slow})._replace(remote=True), 2), cfg=cfg)
    going.set()
    (found,) = checkpoints(tmp_path / "broken/checkpoints/train")
    assert found.step == 2
    resumed = program(tmp_path / "broken", ahead(items(), 2))
    assert [index for index, _ in resumed] == [index for index, _ in expected]


def test_the_handler_is_there_while_the_run_is(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with nrl.run(Config(str(tmp_path))):
        assert signal.getsignal(signal.SIGTERM) != before
        with nrl.run(Config(str(tmp_path / "inner"))):
            pass
    assert signal.getsignal(signal.SIGTERM) is before


@contextmanager
def handled(handler: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("handler", [lambda number, frame: None, signal.SIG_IGN])
def test_a_handler_of_the_program_stays(handler: Any) -> None:
    with handled(handler), heed_signals(30.0):
        assert signal.getsignal(signal.SIGTERM) is handler


def test_another_thread_has_no_handler() -> None:
    with futures.ThreadPoolExecutor(1) as pool:
        with heed_signals(30.0) as found:
            assert signal.getsignal(signal.SIGTERM) == found.handle

        def elsewhere() -> Any:
            with heed_signals(30.0):
                return signal.getsignal(signal.SIGTERM)

        assert pool.submit(elsewhere).result() is signal.SIG_DFL


def test_patience_has_an_end_until_the_process_ends() -> None:
    found = []
    with pytest.raises(Terminated), heed_signals(600.0):  # noqa: PT012  the end of the block is what is looked at
        try:
            terminate()
        finally:
            found.append(preemption.patience_left() or 0.0)
    found.append(preemption.patience_left() or 0.0)
    assert 235 < found[1] <= found[0] <= 240


# --- Ctrl-C


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """A job in the background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
@pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS.keys())
@pytest.mark.parametrize("place", ["batch", "step"])
def test_ctrl_c_saves_like_sigterm_and_the_process_lives_on(
    place: str, make: Callable[[Source[Any]], Source[Any]], tmp_path: Path
) -> None:
    expected = program(tmp_path / "whole", make(items()))
    out = tmp_path / "broken"
    stream = make(items({3: interrupt} if place == "batch" else {}))
    with pytest.raises(KeyboardInterrupt):
        program(out, stream, within=lambda step: interrupt() if (place, step) == ("step", 1) else None)
    done = lines(out)
    assert [found.step + 1 for found in checkpoints(out / "checkpoints/train")][-1:] == ([done] if done else [])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert program(out, make(items())) == expected
    assert lines(out) == 6


@pytest.mark.usefixtures("_interruptible")
def test_ctrl_c_is_heeded_until_the_block_that_handles_it_ends() -> None:
    def elsewhere() -> bool:
        with heed_signals(30.0) as other:
            return other.is_requested

    with heed_signals(30.0) as found:
        found.going_on = True
        interrupt()
        with futures.ThreadPoolExecutor(1) as pool:
            assert pool.submit(elsewhere).result()
        with heed_signals(30.0) as inner:
            assert inner.is_requested
        assert found.is_requested
    assert not found.is_requested


@pytest.mark.usefixtures("_interruptible")
def test_a_second_ctrl_c_breaks_off_a_step(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def within(step: int) -> None:
        if step == 1:
            interrupt()
            time.sleep(0.5)  # a signal that comes sooner is the first one, forwarded
            interrupt()
            pytest.fail("it went on")

    with pytest.raises(KeyboardInterrupt):
        program(tmp_path, items(), within=within)
    assert not (tmp_path / "checkpoints").exists() or checkpoints(tmp_path / "checkpoints/train") == []
    assert capfd.readouterr().err.splitlines() == [
        "run: Ctrl-C; going on to the end of this step; press it again to stop at once",
        f"run: {tmp_path} has no checkpoint, so the same command begins anew",
    ]


@pytest.mark.usefixtures("_interruptible")
@pytest.mark.parametrize("module", [__name__, None])
def test_a_handler_of_the_program_for_ctrl_c_stays(module: str | None) -> None:
    def own(number: int, frame: Any) -> None:
        pass

    own.__module__ = module  # type: ignore[assignment]
    signal.signal(signal.SIGINT, own)
    with heed_signals(30.0):
        assert signal.getsignal(signal.SIGINT) is own


# --- the same signal ends other processes too


def lost() -> LostActor:
    return LostActor("train_step", "trainer", 0, "10.0.0.3", "killed by signal 15")


def test_what_is_lost_in_a_step_after_it_is_no_reason_to_begin_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def within(step: int) -> None:
        if step == 2:
            terminate()
            raise lost()

    with pytest.raises(Terminated) as caught:
        nrl.retrying(partial(program, stream=items(), within=within), pause=0)(tmp_path)
    assert isinstance(caught.value.__cause__, LostActor)
    assert lines(tmp_path) == 2
    said = capfd.readouterr()
    assert "retrying" not in said.out
    assert said.err.splitlines() == [
        "run: SIGTERM; going on to the end of this step, within 600 s (checkpoints.grace)",
        f"run: {tmp_path} has no checkpoint, so the same command begins anew",
        f"run: no checkpoint could be saved; what ran was ended by LostActor: {lost()}",
    ]


def test_what_is_lost_in_the_wait_for_a_batch_leaves_the_last_step_to_be_saved(tmp_path: Path) -> None:
    def broken() -> None:
        with suppress(Terminated):  # as where it comes in the middle of what cannot raise
            terminate()
        raise lost()

    expected = program(tmp_path / "whole", items())
    out = tmp_path / "broken"
    with terminated():
        nrl.retrying(partial(program, stream=items({2: broken})), pause=0)(out)
    assert [found.step for found in checkpoints(out / "checkpoints/train")] == [1]
    assert program(out, items()) == expected


def test_what_is_lost_outside_of_a_run_after_it_is_no_reason_to_begin_again(tmp_path: Path) -> None:
    def main(out: Path) -> None:
        try:
            program(out, items({2: terminate}))
        finally:
            raise lost()

    with pytest.raises(Terminated) as caught:
        nrl.retrying(main, pause=0)(tmp_path)
    assert isinstance(caught.value.__cause__, LostActor)
    assert [found.step for found in checkpoints(tmp_path / "checkpoints/train")] == [1]


# --- the end of the process


def test_what_is_closed_after_the_last_step_is_within_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: list[Any] = []
    monkeypatch.setattr(
        sys.modules["nrl.run.run"], "report_at_end", lambda out: handlers.append(signal.getsignal(signal.SIGTERM))
    )
    program(tmp_path, items())
    assert [getattr(handler, "__name__", "") for handler in handlers] == ["handle"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


BLOCKS = {
    "after": "try:\n    with heed_signals(1.0): term()\nfinally: time.sleep(3600)",
    "another signal": "try:\n    with heed_signals(1.0): term()\nfinally:\n    term()\n    time.sleep(3600)",
    "caught": "try:\n    with heed_signals(1.0): term()\n"
    "except SystemExit: pass\nwith heed_signals(300.0): time.sleep(3600)",
    "at exit": "atexit.register(time.sleep, 3600)\nwith heed_signals(1.0): term()",
}


def test_whatever_has_been_left_the_process_ends_in_time() -> None:
    begin = "import atexit, os, signal, time\nfrom nrl.runtime.preemption import heed_signals\n"
    term = "def term() -> None: os.kill(os.getpid(), signal.SIGTERM)\n"
    for name, done in ends(begin, {name: begin + term + block for name, block in BLOCKS.items()}, 250).items():
        assert done.status == 143, name
        assert "run: 0.95 s are over; no checkpoint could be saved" in done.err, name


_CLOSES = "time.sleep(1.5); print('saved')"  # after more than the time of a program that saves nothing
SAVING = {
    "saves": f"with heed_signals(600.0):\n    try: term()\n    finally: save(folder / '1', 0, {{'x': 1}}); {_CLOSES}",
    "has saved": f"save(folder / '2', 0, {{'x': 1}})\n"
    f"with heed_signals(600.0):\n    try: term()\n    finally: {_CLOSES}",
    "saves nothing": "with heed_signals(600.0):\n    try: term()\n    finally: time.sleep(3600)",
}


def test_a_program_that_saves_without_steps_has_the_whole_time(tmp_path: Path) -> None:
    begin = (
        "import os, signal, time\nfrom pathlib import Path\nfrom nrl.run.checkpoint import save\n"
        "from nrl.runtime import preemption\nfrom nrl.runtime.preemption import heed_signals\n"
        f"preemption._CLOSING, folder = 1.0, Path({str(tmp_path)!r})\n"
        "def term() -> None: os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    done = ends(begin, {name: begin + block for name, block in SAVING.items()}, 250)
    assert {name: end.status for name, end in done.items()} == dict.fromkeys(SAVING, 143)
    assert [done[name].out for name in SAVING] == ["saved\n", "saved\n", ""]
    assert "run: 1 s are over; no checkpoint could be saved" in done["saves nothing"].err
