"""What user code may do to those who call it, and what they do about it."""

import asyncio
import contextvars
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from nrl.envs import Trace, number, single_turn
from nrl.envs.inprocess import threads as call_threads
from nrl.envs.inprocess.call_with_timeout import Calls
from nrl.envs.inprocess.threads import stuck
from nrl.envs.inprocess.tracebacks import Failed
from nrl.log import error_text
from nrl.runtime.threads import DaemonThreadPool
from tests.clocks import MINUTE, Clock
from tests.processes import settled

WHO = contextvars.ContextVar("who", default="nobody")
LONG = threading.Event()  # never set while a test waits


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    LONG.clear()
    yield
    LONG.set()
    assert settled(stuck, MINUTE) == 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Calls]:
    """Of each look for late calls that is over, whose it was; two see that a loop is blocked."""
    seen, look = list[Calls](), Calls._look

    def looked(calls: Calls) -> None:
        look(calls)
        seen.append(calls)

    monkeypatch.setattr(Calls, "_look", looked)
    return seen


class Hangs:
    """A function that hangs; it counts how often it has begun to."""

    def __init__(self) -> None:
        self.inside = 0
        self._guard = threading.Lock()

    def __call__(self) -> None:
        with self._guard:
            self.inside += 1
        LONG.wait()


def ask(
    *fns: Callable[..., Any],
    timeout: float | None = MINUTE,
    clock: Clock | None = None,
    once: Sequence[Callable[[int], bool]] = (),
) -> list[Any]:
    """What all of them return, called at the same moment; what they raise in its place.

    The clock skips more than a minute as soon as each of ``once`` says so of the number that have not answered.
    """

    async def one(calls: Calls, fn: Callable[..., Any]) -> Any:
        return await calls.begin(fn, timeout=timeout, context=contextvars.copy_context())

    async def every() -> list[Any]:
        calls = Calls()
        try:
            asked = [asyncio.ensure_future(one(calls, fn)) for fn in fns]
            for ready in once:
                while not ready(sum(not each.done() for each in asked)):
                    await asyncio.sleep(0.001)
                assert clock is not None
                clock.skip(MINUTE + 1)
            return list(await asyncio.gather(*asked, return_exceptions=True))
        finally:
            calls.close()

    return asyncio.run(every())


def failed(*fns: Callable[..., Any], **options: Any) -> list[str]:
    found = ask(*fns, **options)
    assert all(isinstance(each, Failed) for each in found), found
    return [str(each) for each in found]


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__


def raising(error: BaseException) -> Callable[[], Any]:
    def plain() -> Any:
        raise error

    return plain


def later(fn: Callable[[], Any]) -> Callable[[], Any]:
    async def coroutine() -> Any:
        return fn()

    return coroutine


@pytest.mark.parametrize("form", [lambda fn: fn, later], ids=["plain", "async"])
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no"), "ValueError: no"),
        (SystemExit(3), "SystemExit: 3"),
        (asyncio.CancelledError(), "CancelledError: "),
        (GeneratorExit(), "GeneratorExit: "),
        (Unspeakable(), "Unspeakable: (its message cannot be shown: its __str__ raised RuntimeError)"),
        (ValueError("x" * 10**6), f"ValueError: {'x' * 1000}"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_whatever_is_raised_is_a_failure_of_that_call(form: Any, error: BaseException, text: str) -> None:
    bad, good = ask(form(raising(error)), form(lambda: 3))
    assert isinstance(bad, Failed)
    assert (str(bad), good) == (text, 3)


def test_an_iterator_that_is_exhausted_is_a_failure() -> None:
    assert failed(raising(StopIteration())) == ["StopIteration: "]


def test_an_interrupt_is_none() -> None:
    with pytest.raises(KeyboardInterrupt):
        ask(raising(KeyboardInterrupt()))


def test_plain_calls_that_are_quick_run_one_after_the_other_in_their_order() -> None:
    seen: list[tuple[int, int]] = []
    ask(*(lambda i=i: seen.append((i, threading.get_ident())) for i in range(300)))
    assert [i for i, _ in seen] == list(range(300))
    assert len({thread for _, thread in seen}) == 1
    assert seen[0][1] != threading.get_ident()


def test_plain_calls_that_wait_do_so_side_by_side() -> None:
    together = threading.Barrier(8)  # each goes on when all have begun
    assert sorted(ask(*[partial(together.wait, MINUTE)] * 8)) == list(range(8))


def test_coroutines_of_one_moment_begin_before_any_goes_on() -> None:
    seen: list[str] = []

    async def coroutine() -> None:
        seen.append("began")
        await asyncio.sleep(0)
        seen.append("ended")

    ask(*[coroutine] * 5)
    assert seen == ["began"] * 5 + ["ended"] * 5
    seen.clear()
    ask(*[lambda: coroutine()] * 5)  # a plain function that makes one
    assert seen == ["began"] * 5 + ["ended"] * 5


def test_a_call_that_does_not_return_is_given_up_and_others_are_not(clock: Clock) -> None:
    hang = Hangs()

    def wait() -> None:
        hang()

    both = [lambda left: left == 2 == hang.inside]
    found = ask(wait, lambda: 1, lambda: 2, wait, lambda: 3, clock=clock, once=both)
    assert [str(each) for each in found] == [
        "TimeoutError: wait did not return within 60 s; mend it, or give the environment another timeout",
        *"12",
        "TimeoutError: wait did not return within 60 s; mend it, or give the environment another timeout",
        "3",
    ]
    assert stuck() == 2


def test_where_it_hangs_is_shown_once(capfd: pytest.CaptureFixture[str], clock: Clock) -> None:
    hang = Hangs()

    def hangs() -> None:
        hang()

    failed(hangs, hangs, clock=clock, once=[lambda left: hang.inside == 2])
    shown = capfd.readouterr().err
    assert shown.count("in hangs\n    hang()") == 1
    assert "nrl/rollout/" not in shown


def test_a_coroutine_that_takes_too_long_is_cancelled() -> None:
    seen = []

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            seen.append("cancelled")

    assert failed(slow, timeout=0.1)[0].startswith("TimeoutError: slow did not return within 0.1 s")
    assert settled(stuck, MINUTE) == 0
    assert seen == ["cancelled"]


def test_a_coroutine_that_will_not_be_cancelled_is_left_alone() -> None:
    async def stubborn() -> None:
        while not LONG.is_set():
            try:
                await asyncio.sleep(0.02)
            except asyncio.CancelledError:
                continue

    assert "TimeoutError" in failed(stubborn, timeout=0.1)[0]  # before it ends
    assert stuck() == 1


def test_a_coroutine_that_blocks_its_loop_does_not_block_this_one() -> None:
    async def blocks() -> None:
        LONG.wait()

    async def every() -> Any:
        calls = Calls()

        def call(fn: Any, timeout: float) -> Any:
            return calls.begin(fn, timeout=timeout, context=contextvars.copy_context())

        try:
            with pytest.raises(Failed, match="TimeoutError: blocks"):
                await call(blocks, 0.1)
            return await call(later(lambda: 3), MINUTE)  # on another loop, at once
        finally:
            calls.close()

    assert asyncio.run(every()) == 3
    assert stuck() == 1


def test_coroutines_that_share_a_loop_have_a_limit_each(clock: Clock, looks: list[Calls]) -> None:
    """Each blocks for ten seconds, in which there are looks; all of them together block for longer than a limit."""

    def wait_for_looks() -> None:
        enough = len(looks) + 2
        while len(looks) < enough:
            time.sleep(0.001)

    async def blocks() -> int:
        wait_for_looks()
        clock.skip(10.0)
        wait_for_looks()
        return 1

    async def begins_and_blocks() -> int:
        await asyncio.sleep(0)  # so that all of them have begun, before one blocks
        return await blocks()

    assert ask(*[blocks] * 10) == [1] * 10
    assert ask(*[begins_and_blocks] * 10) == [1] * 10


def test_coroutines_that_hang_fail_alone(clock: Clock) -> None:
    """Whatever their number: one limit passes for the first, and one for all that it had kept from beginning."""
    hang = Hangs()

    async def hangs() -> None:
        hang()

    first, others = (lambda left: left == 27 and hang.inside == 1), (lambda left: left == 5 and hang.inside == 6)
    fns = [*[later(lambda: 1)] * 8, hangs, *[later(lambda: 2)] * 20, *[hangs] * 5, later(lambda: 3)]
    found = ask(*fns, clock=clock, once=[first, others])
    assert [str(each) for each in found if isinstance(each, Failed)] == [
        "TimeoutError: hangs did not return within 60 s; mend it, or give the environment another timeout"
    ] * 6
    assert [each for each in found if not isinstance(each, Failed)] == [1] * 8 + [2] * 20 + [3]
    assert stuck() == 6


def test_a_coroutine_that_awaits_while_another_one_blocks_is_not_failed_for_it(
    clock: Clock, looks: list[Calls]
) -> None:
    goes_on, before = asyncio.Event(), list[int]()

    async def awaits() -> int:
        await goes_on.wait()
        return 1

    async def blocks() -> None:
        goes_on.set()
        before.append(len(looks))
        LONG.wait()

    def blocked(left: int) -> bool:
        return bool(before) and len(looks) > before[0] + 2

    def given_up(left: int) -> bool:
        if left < 3:
            LONG.set()
        return left == 0

    found = ask(awaits, blocks, awaits, clock=clock, once=[blocked, given_up])
    assert [each if isinstance(each, int) else str(each)[:20] for each in found] == [1, "TimeoutError: blocks", 1]


def test_who_waits_on_a_loop_that_never_goes_on_is_given_up_too() -> None:
    async def awaits() -> None:
        await asyncio.sleep(0.1)

    async def hangs() -> None:
        LONG.wait()

    found = failed(awaits, hangs, timeout=0.3)
    assert [each.split()[1] for each in found] == ["awaits", "hangs"]

    async def hangs_in_a_task() -> None:
        await asyncio.create_task(hangs())

    assert failed(hangs_in_a_task, timeout=0.3)[0].startswith("TimeoutError: hangs_in_a_task did")


def test_a_timeout_names_what_the_user_wrote() -> None:
    def verify(task: Any, trace: Trace) -> Any:
        LONG.wait()

    async def awaits(task: Any, trace: Trace) -> float:
        await asyncio.sleep(60)
        return 1.0

    def makes(task: Any, trace: Trace) -> Any:
        return awaits(task, trace)

    forms: list[Any] = [verify, partial(verify), awaits, makes]
    found = failed(*[partial(single_turn(each).step, {}, "") for each in forms], timeout=0.1)
    assert [each.split()[1] for each in found] == ["verify", "verify", "awaits", "makes"]


def test_what_is_shown_is_masked(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MY_API_KEY", "correct-horse-battery")
    assert failed(raising(LookupError("x" * 990 + "correct-horse-battery"))) == [f"LookupError: {'x' * 990}***"]
    shown = capfd.readouterr().err
    assert "LookupError: xxx" in shown
    assert "horse" not in shown


def test_without_a_limit_one_waits() -> None:
    assert ask(lambda: time.sleep(0.3) or 1, timeout=None) == [1]  # type: ignore[func-returns-value]


@pytest.mark.parametrize("form", [lambda fn: fn, later], ids=["plain", "async"])
def test_context_is_carried(form: Any) -> None:
    WHO.set("somebody")
    assert ask(form(WHO.get)) == ["somebody"]


def test_what_one_call_sets_the_next_of_its_episode_sees() -> None:
    async def episode() -> str:
        calls, context = Calls(), contextvars.copy_context()
        try:
            await calls.begin(WHO.set, "me", timeout=MINUTE, context=context)
            return str(await calls.begin(later(WHO.get), timeout=MINUTE, context=context))
        finally:
            calls.close()

    assert asyncio.run(episode()) == "me"


def test_a_traceback_is_shown_once_with_the_frames_of_the_user(capfd: pytest.CaptureFixture[str]) -> None:
    def verify() -> None:
        raise LookupError("not there")

    failed(verify, verify)
    failed(later(verify))
    shown = capfd.readouterr().err
    assert shown.count("LookupError: not there") == 1
    assert "in verify\n    raise LookupError" in shown
    assert "nrl/rollout/" not in shown


def test_an_error_of_nrl_itself_has_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    assert failed(partial(number, {"prompt": "How many?", "answer": "none"}, Trace("", ["3"])))[0].startswith(
        "EnvError: "
    )
    assert capfd.readouterr().err == ""


def test_messages() -> None:
    assert error_text(KeyError("a")) == "KeyError: 'a'"


PROGRAM = """
import asyncio, contextvars, time
from nrl.envs.inprocess.call_with_timeout import Calls

async def hangs_in_a_thread_of_its_own():
    await asyncio.to_thread(time.sleep, 600)

async def main():
    calls = Calls()
    for fn in (lambda: time.sleep(600), hangs_in_a_thread_of_its_own):
        try:
            await calls.begin(fn, timeout=0.1, context=contextvars.copy_context())
        except Exception as error:
            print(type(error).__name__)
    calls.close()

asyncio.run(main())
"""


def test_a_process_ends_while_calls_hang() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=250)
    assert (done.returncode, done.stdout.split()) == (0, ["Failed", "Failed"]), done.stderr


def test_daemons_begin_in_order_and_raise_what_was_raised() -> None:
    seen: list[int] = []
    threads = DaemonThreadPool(1)
    futures = [threads.submit(seen.append, i) for i in range(100)]
    broken = threads.submit(int, "x")
    for future in futures:
        future.result(MINUTE)
    assert seen == list(range(100))
    with pytest.raises(ValueError, match="invalid literal"):
        broken.result(MINUTE)


@pytest.mark.parametrize(("kind", "left"), [("plain", True), ("coroutine", True), ("plain", False)])
def test_a_context_that_is_about_to_be_left_is_waited_for(
    kind: str, left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop tells that a call has ended before it leaves its context, and the next call may be quicker than that."""
    context, entered, tries, leaves = contextvars.copy_context(), threading.Event(), list[float](), threading.Event()

    def hold() -> None:
        entered.set()
        leaves.wait()

    def sleep(seconds: float) -> None:
        """In which the context is left, at the third time; or not."""
        tries.append(seconds)
        if left and len(tries) == 3:
            leaves.set()
            holder.join()

    monkeypatch.setattr(call_threads, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))

    async def coroutine() -> int:
        return 7

    async def asked() -> Any:
        calls = Calls()
        try:
            return await calls.begin(coroutine if kind == "coroutine" else lambda: 7, timeout=MINUTE, context=context)
        finally:
            calls.close()

    holder = threading.Thread(target=context.run, args=(hold,))
    holder.start()
    entered.wait()
    if left:
        assert asyncio.run(asked()) == 7
        assert len(tries) == 3
    else:  # one that was given up may stay there
        with pytest.raises(Failed, match="already entered"):
            asyncio.run(asked())
        assert sum(tries) == pytest.approx(0.1)
    leaves.set()
    holder.join()
