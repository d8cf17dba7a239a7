"""What a server does, without HTTP: each call once, episodes with a lease, refusals that say what to do."""

import asyncio
import gc
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nrl.envs import Environment, Score, Step, Trace, Turn, of_group, single_turn
from nrl.envs.tools import tool
from nrl.errors import ExecutableError
from nrl.gym.http import protocol, service
from nrl.gym.http.idempotency import Act, Refused
from nrl.gym.http.service import Service
from tests.clocks import Clock

Scenario = Callable[[Service], Awaitable[Any]]
ENV: Any = Environment  # which user code may give what it should not
STEP: Any = Step
SCORE: Any = Score


def served(f: Any, scenario: Scenario, *, lease: float = 60.0, most: int = 100, timeout: Any = ...) -> Any:
    """What comes of a scenario."""

    async def main() -> Any:
        made = Service(f, "it", lease=lease, most=most, timeout=timeout)
        try:
            return await scenario(made)
        finally:
            await made.stop()

    return asyncio.run(main())


async def refused(asked: Awaitable[Any]) -> Refused:
    with pytest.raises(Refused) as caught:
        await asked
    return caught.value


class Counting:
    """An environment that counts its calls, adds up the lengths of texts, and waits where a text says so."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.go = threading.Event()
        self.waits = threading.Event()

    def reset(self, task: Any) -> Any:
        self.calls.append(("reset", task.get("n")))
        if task.get("wait"):
            self._wait()
        return {"sum": 0}, f"{task.get('n')}?"

    def step(self, state: Any, turn: Turn) -> Any:
        self.calls.append(("step", turn.text))
        if turn.text == "wait":
            self._wait()
        if turn.text == "raise":
            raise KeyError("nothing")
        state = {"sum": state["sum"] + len(turn.text)}
        return STEP(state, reward=float(state["sum"]), done=turn.text == "end", observation="go on", info={"a": 1})

    def close(self, state: Any) -> None:
        self.calls.append(("close", state["sum"]))

    def _wait(self) -> None:
        self.waits.set()
        assert self.go.wait(60)

    def count(self, what: str) -> int:
        return sum(each[0] == what for each in self.calls)


@pytest.fixture
def env() -> Iterator[Counting]:
    made = Counting()
    yield made
    made.go.set()


def begin(it: Service, session: str = "a", **task: Any) -> Awaitable[bytes]:
    return it.reset(protocol.Reset(session, task))


def take(it: Service, turn: int, text: str, session: str = "a") -> Awaitable[bytes]:
    return it.step(protocol.Step(session, turn, text))


def end(it: Service, session: str = "a") -> Awaitable[bytes]:
    return it.close(protocol.Closing(session))


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


# --- Once


def test_what_is_repeated_acts_once_and_gets_the_same_answer(env: Counting) -> None:
    async def scenario(it: Service) -> None:
        assert await begin(it, n=1) == await begin(it, n=1) == b'{"prompt":"1?"}'
        first = await take(it, 0, "four")
        assert first == await take(it, 0, "four")
        assert json.loads(first) == {
            "verdict": {"reward": 4.0}, "done": False, "observation": "go on",
            "info": {"a": 1.0},
        }  # fmt: skip
        second = await take(it, 1, "end")
        assert (first, second) == (await take(it, 0, "four"), await take(it, 1, "end"))
        assert await end(it) == await end(it) == b'{"session":"a"}'
        assert it.replayed == 4  # resets and turns

    served(env, scenario)
    assert env.calls == [("reset", 1), ("step", "four"), ("step", "end"), ("close", 7)]


def test_what_is_repeated_while_it_is_under_way_acts_once(env: Counting) -> None:
    async def scenario(it: Service) -> None:
        await begin(it)
        asked = [asyncio.ensure_future(take(it, 0, "wait")) for _ in range(3)]
        await until(env.waits.is_set)
        asked[0].cancel()  # its client has gone; the others have not
        env.go.set()
        one, other = await asyncio.gather(*asked[1:])
        assert one == other == await take(it, 0, "wait")

    served(env, scenario)
    assert env.count("step") == 1


def test_another_action_for_a_turn_is_refused(env: Counting) -> None:
    async def scenario(it: Service) -> None:
        await begin(it, n=1)
        await take(it, 0, "one")
        error = await refused(take(it, 0, "two"))
        assert (error.status, error.code, error.kind) == (409, "consumed", "ConsumedState")
        assert "turn 0 of the session a was taken already, with another action" in str(error)
        error = await refused(take(it, 2, "two"))
        assert (error.status, error.kind) == (409, "ConsumedState")
        assert "turn 2 of the session a cannot be taken; 1 were" in str(error)
        error = await refused(begin(it, n=2))
        assert "the session a has another task; choose another name" in str(error)

    served(env, scenario)
    assert env.count("step") == env.count("reset") == 1


def test_an_action_is_the_same_whatever_it_holds(env: Counting) -> None:
    """Also where it cannot be packed: a lone surrogate, an integer of any size."""

    async def scenario(it: Service) -> None:
        for session, task in (("a", {"x": "\ud800"}), ("b", {"x": 2**70}), ("c", {"x": {1: b"y"}})):
            assert await begin(it, session, **task) == await begin(it, session, **task)
            assert (await refused(begin(it, session, x=0))).status == 409

    served(env, scenario)
    assert env.count("reset") == 3


def test_a_turn_that_failed_fails_again_and_ends_the_episode(env: Counting) -> None:
    async def scenario(it: Service) -> None:
        await begin(it)
        for _ in range(2):
            error = await refused(take(it, 0, "raise"))
            assert (error.status, error.code, error.kind, str(error)) == (422, "failed", "KeyError", "'nothing'")
        error = await refused(take(it, 1, "more"))
        assert "0 were, and the last one may have failed. Close it" in str(error)
        await end(it)

    served(env, scenario)
    assert env.calls == [("reset", None), ("step", "raise"), ("close", 0)]


# --- Sessions


def test_sessions_that_are_not_there(env: Counting) -> None:
    async def scenario(it: Service) -> None:
        for asked in (take(it, 0, "x"), end(it)):
            error = await refused(asked)
            assert (error.status, error.code, error.kind) == (404, "unknown", "ForeignState")
            assert "the session a is not known here" in str(error)
        await begin(it)
        await end(it)
        error = await refused(take(it, 0, "x"))
        assert (error.status, error.kind) == (409, "ConsumedState")
        assert "step: the session a is closed; reset another" in str(error)
        assert "reset: the session a is closed; choose another name" in str(await refused(begin(it)))

    served(env, scenario)


def test_closing_gives_up_what_is_under_way(env: Counting) -> None:
    async def scenario(it: Service) -> None:
        await begin(it)
        taken = asyncio.ensure_future(refused(take(it, 0, "wait")))
        await until(env.waits.is_set)
        await end(it)
        error = await taken
        assert (error.status, error.kind) == (409, "ConsumedState")
        assert str(error) == "the session was closed while this was under way"

    served(env, scenario)
    assert env.count("close") == 1


def test_an_episode_that_is_closed_in_its_reset_is_closed_when_that_is_over(env: Counting) -> None:
    async def scenario(it: Service) -> None:
        begun = asyncio.ensure_future(refused(begin(it, wait=True)))
        await until(env.waits.is_set)
        await end(it)
        assert "was closed while" in str(await begun)
        env.go.set()
        await until(lambda: env.count("close"))

    served(env, scenario)
    assert env.count("close") == 1


def test_the_end_of_a_server_closes_every_episode_once(env: Counting) -> None:
    async def scenario(it: Service) -> None:
        await asyncio.gather(*(begin(it, f"s{i}", n=i) for i in range(20)))
        closing = asyncio.ensure_future(end(it, "s3"))
        await asyncio.sleep(0)
        await it.stop()
        await closing
        assert it.sessions == 0
        error = await refused(begin(it, "late"))
        assert (error.status, error.code, error.after) == (503, "stopping", 1.0)

    served(env, scenario)
    assert env.count("close") == 20


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_who_nobody_asks_for_is_closed_after_the_lease(env: Counting, clock: Clock) -> None:
    async def scenario(it: Service) -> None:
        await begin(it, "left")
        clock.skip(60)
        await begin(it, "kept")
        await take(it, 0, "x", "kept")
        clock.skip(60)
        await until(lambda: it.evicted == 1)
        assert it.sessions == 1
        assert it.renew(protocol.Renewal(["kept", "left", "unknown"])) == b'{"sessions":1}'
        clock.skip(60)
        assert json.loads(await take(it, 1, "y", "kept"))["verdict"] == {"reward": 2.0}
        assert "nobody asked for it for 100 s" in str(await refused(take(it, 0, "x", "other")))
        late = await refused(take(it, 0, "x", "left"))
        assert late.status == 409
        assert "the session left is closed, since nobody asked for it for 100 s, its lease; reset another" in str(late)
        clock.skip(101)
        await until(lambda: it.evicted == 2)

    served(env, scenario, lease=100.0)
    assert env.count("close") == 2


def test_a_call_that_takes_longer_than_the_lease_is_let_finish(env: Counting, clock: Clock) -> None:
    async def scenario(it: Service) -> None:
        await begin(it)
        taken = asyncio.ensure_future(take(it, 0, "wait"))
        await until(env.waits.is_set)
        swept = it._sweeping
        clock.skip(20)
        await until(lambda: it._sweeping is not swept)
        assert it.sessions == 1
        env.go.set()
        await taken

    served(env, scenario, lease=10.0, timeout=None)
    assert env.count("close") == 1


def test_what_was_closed_is_forgotten_late(env: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_RECENT", 3)

    async def scenario(it: Service) -> None:
        for i in range(5):
            await begin(it, f"s{i}")
            await end(it, f"s{i}")
        assert [(await refused(take(it, 0, "x", f"s{i}"))).status for i in range(5)] == [404, 404, 409, 409, 409]

    served(env, scenario)


@pytest.mark.parametrize("each", [500, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_abandoned_sessions_are_all_closed_and_leave_nothing(
    each: int, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for what is remembered of those that were closed last, which has a bound."""
    monkeypatch.setattr(service, "_RECENT", 100)
    opened = set[str]()

    async def reset(task: Any) -> Any:
        opened.add(task["name"])
        return task["name"], "?"

    async def close(state: str) -> None:
        opened.remove(state)

    gc.collect()
    of_others = sum(isinstance(found, Act) for found in gc.get_objects())  # which earlier tests' errors still hold

    async def scenario(it: Service) -> None:
        resident = []
        for rounds in range(3):
            for i in range(each):
                await begin(it, f"{rounds}-{i}", name=f"{rounds}-{i}")
            assert len(opened) == it.sessions == each
            clock.skip(61)
            async with asyncio.timeout(600):
                while it.sessions or opened:
                    await asyncio.sleep(0.01)
            await end(it, f"{rounds}-{each - 1}")  # waits until the last one is closed, and closes no more
            swept = it._sweeping
            clock.skip(1)
            while it._sweeping is swept:
                await asyncio.sleep(0.001)
            gc.collect()
            assert sum(isinstance(found, Act) for found in gc.get_objects()) <= of_others + 100
            resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
        assert resident[2] - resident[1] < 32 << 20

    served(Environment(reset, lambda state, turn: Step(state), close), scenario, most=1_000_000)


# --- Verdicts


def verify(it: Service, text: str = "4", call: str | None = None, **task: Any) -> Awaitable[bytes]:
    return it.verify(protocol.Verify(task, protocol.Transcript("?", [text]), None, call), hash(text))


def test_a_verdict_that_is_asked_for_again_is_given_once() -> None:
    asked = list[str]()

    def judge(task: Any, trace: Trace) -> Score:
        asked.append(trace.text)
        if trace.text == "raise":
            raise ValueError("no")
        return Score(0.5, "parse_fail", {"long": len(trace.text)})

    async def scenario(it: Service) -> None:
        one = b'{"verdict":{"reward":0.5,"status":"parse_fail","components":{"long":1}},"verdicts":null}'
        assert await verify(it, call="c") == await verify(it, call="c") == one
        for _ in range(2):
            assert str(await refused(verify(it, "raise", "d"))) == "no"
        assert await verify(it) == await verify(it) == one
        assert it.replayed == 2

    served(judge, scenario)
    assert asked == ["4", "raise", "4", "4"]


def test_verdicts_are_forgotten_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_RECENT", 2)
    asked = list[int]()

    async def scenario(it: Service) -> None:
        for call in (1, 2, 3, 3, 2, 1):
            await verify(it, call=str(call), n=call)

    def judge(task: Any, trace: Trace) -> float:
        asked.append(task["n"])
        return 1.0

    served(judge, scenario)
    assert asked == [1, 2, 3, 1]


class Slow:
    """A verifier that waits until it may go on."""

    def __init__(self) -> None:
        self.calls, self.waits, self.go = 0, asyncio.Event(), asyncio.Event()

    async def __call__(self, task: Any, trace: Any) -> float:
        self.calls += 1
        self.waits.set()
        while not self.go.is_set():  # on another loop
            await asyncio.sleep(0.001)
        return 1.0


def test_a_verdict_is_waited_for_by_who_asks_again() -> None:
    slow = Slow()

    async def scenario(it: Service) -> None:
        first = asyncio.ensure_future(verify(it, call="c"))
        await until(slow.waits.is_set)
        second = asyncio.ensure_future(verify(it, call="c"))
        third = asyncio.ensure_future(verify(it, call="c"))
        await until(lambda: it.replayed == 2)
        third.cancel()
        with pytest.raises(asyncio.CancelledError):
            await third
        slow.go.set()
        assert await first == await second

    served(slow, scenario)
    assert slow.calls == 1


def test_a_verdict_whose_first_client_left_is_made_again_for_who_asks_again() -> None:
    slow = Slow()

    async def scenario(it: Service) -> None:
        first = asyncio.ensure_future(verify(it, call="c"))
        await until(slow.waits.is_set)
        second = asyncio.ensure_future(verify(it, call="c"))
        await until(lambda: it.replayed == 1)
        first.cancel()
        await until(lambda: slow.calls == 2)
        slow.go.set()
        assert json.loads(await second)["verdict"] == {"reward": 1.0}

    served(slow, scenario)


def test_a_verdict_that_is_not_wanted_any_more_is_given_up() -> None:
    slow = Slow()

    async def scenario(it: Service) -> None:
        first = asyncio.ensure_future(refused(verify(it, call="c")))
        await until(slow.waits.is_set)
        assert await end(it, "c") == b'{"session":"c"}'
        error = await first
        assert (error.status, str(error)) == (409, "the verdict was given up")
        assert it.under_way == 0

    served(slow, scenario)


def test_groups_tasks_and_what_is_read_in_an_answer() -> None:
    @of_group
    def compared(task: Any, traces: Any) -> list[float]:
        return [float(len(trace.text)) for trace in traces]

    made: Any = compared
    made.tasks = lambda seed, index: {"prompt": f"{seed}/{index}"}
    made.extract = lambda text: None if text == "nothing" else (text, 1)

    async def scenario(it: Service) -> None:
        info = it.info()
        assert (info.kind, info.of_group, info.tasks, info.extracts) == ("verifier", True, True, True)
        traces = [protocol.Transcript("?", [text]) for text in ("a", "bb")]
        found = await it.verify(protocol.Verify({}, None, traces), 0)
        assert json.loads(found)["verdicts"] == [{"reward": 1.0}, {"reward": 2.0}]
        assert json.loads(await it.group(protocol.Grouping({}))) == {"of_group": True}
        assert json.loads(await it.task(protocol.At(3, 4))) == {"task": {"prompt": "3/4"}}
        assert json.loads(await it.extract(protocol.Extracting("x"))) == {"found": {"$nrl": "tuple", "value": ["x", 1]}}
        assert json.loads(await it.extract(protocol.Extracting("nothing"))) == {"found": None}
        for both in (None, traces[0]):
            error = await refused(it.verify(protocol.Verify({}, both, traces if both else None), 0))
            assert (error.status, str(error)) == (400, "verify: give either a trace or traces")

    served(compared, scenario)


def test_whether_answers_are_judged_together_may_depend_on_the_task() -> None:
    def judge(task: Any, trace: Any) -> Any:
        return 1.0

    made: Any = judge
    made.of_group = lambda task: task["together"]
    made.timeout = lambda task: 5.0

    async def scenario(it: Service) -> None:
        assert (it.info().of_group, it.info().timeout) == (None, None)
        assert [json.loads(await it.group(protocol.Grouping({"together": x})))["of_group"] for x in (0, 1)] == [
            False,
            True,
        ]
        error = await refused(it.group(protocol.Grouping({})))
        assert (error.status, error.kind, str(error)) == (422, "KeyError", "'together'")

    served(judge, scenario)


def test_what_one_lacks_is_refused() -> None:
    async def verifier(it: Service) -> None:
        for asked in (begin(it), take(it, 0, "x"), end(it)):
            error = await refused(asked)
            assert (error.status, str(error)) == (404, "it is a verifier: it has no episodes, and answers /verify")
        assert str(await refused(it.task(protocol.At(0, 0)))) == "task: it brings no tasks"
        assert "it does not say what it reads" in str(await refused(it.extract(protocol.Extracting("x"))))

    served(lambda task, trace: 1.0, verifier)

    async def environment(it: Service) -> None:
        assert str(await refused(verify(it))) == "verify: it has no verifier; its steps give the rewards"
        assert not it.info().verifies

    served(Environment(lambda task: (0, ""), lambda state, turn: Step(state)), environment)


def test_tools_are_shown() -> None:
    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: one.
            b: another.
        """
        return a + b

    env = Environment(lambda task: (0, "?", [tool(add)]), lambda state, turn: Step(state))

    async def scenario(it: Service) -> None:
        begun = msgspec.json.decode(await begin(it), type=protocol.Begun)
        assert begun.tools is not None
        (shown,) = begun.tools
        assert (shown.name, shown.required) == ("add", ["a", "b"])
        (made,) = protocol.tools_of(begun.tools)
        assert made.schema == tool(add).schema

    served(env, scenario)


# --- User code that does what it should not


@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        (ValueError("no"), "ValueError", "no"),
        (SystemExit(3), "SystemExit", "3"),
        (KeyboardInterrupt("mine"), "KeyboardInterrupt", "mine"),
        (ExecutableError("no lock"), "ExecutableError", "no lock"),
        (asyncio.CancelledError("mine"), "CancelledError", "mine"),
        (StopIteration(3), "StopIteration", "3"),
        (TimeoutError("slow"), "TimeoutError", "slow"),
    ],
)
@pytest.mark.parametrize("later", [False, True])
def test_whatever_user_code_raises_is_an_answer(raised: BaseException, kind: str, message: str, later: bool) -> None:
    def judge(task: Any, trace: Trace) -> float:
        raise raised

    async def later_judge(task: Any, trace: Trace) -> float:
        raise raised

    async def scenario(it: Service) -> None:
        error = await refused(verify(it))
        assert (error.status, error.code) == (422, "failed")
        if not (later and isinstance(raised, StopIteration)):  # Python makes a RuntimeError of it
            assert (error.kind, str(error)) == (kind, message)
        assert it.under_way == 0

    served(later_judge if later else judge, scenario)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (ENV(lambda task: "prompt", lambda state, turn: STEP(state)), "reset returned a str; return"),
        (
            ENV(lambda task: (1, 2, 3, 4), lambda state, turn: STEP(state)),
            "reset returned a tuple of 4; return",
        ),
        (ENV(lambda task: (0, object()), lambda state, turn: STEP(state)), "the prompt is <object object"),
        (ENV(lambda task: (0, ""), lambda state, turn: 1.0), "step returned float; return a Step"),
        (
            ENV(lambda task: (0, ""), lambda state, turn: STEP(state, reward=object())),
            "the verdict has a",
        ),
        (
            ENV(lambda task: (0, ""), lambda state, turn: STEP(state, observation={1})),
            "the observation has a",
        ),
        (
            ENV(lambda task: (0, ""), lambda state, turn: STEP(state, info={"a": {1}})),
            "the step's info has 'a': {1}; give numbers",
        ),
        (
            ENV(lambda task: (0, ""), lambda state, turn: STEP(state, info=3)),
            "the step's info is 3; return numbers by name",
        ),
    ],
)
def test_what_breaks_the_contract_is_told(env: Any, message: str) -> None:
    async def scenario(it: Service) -> None:
        async def played() -> None:
            await begin(it)
            await take(it, 0, "x")

        error = await refused(played())
        assert (error.status, error.code) == (422, "failed")
        assert message in str(error)

    served(env, scenario)


@pytest.mark.parametrize(
    ("verdict", "message"),
    [
        (object(), "the verdict has an object"),
        (SCORE(1.0, "wrong"), "wrong"),
        (SCORE(1.0, components={"a": {1}}), "the score's components has a set"),
        ({"a": {1}}, "the verdict has a set"),
    ],
)
def test_what_is_no_verdict_is_told(verdict: Any, message: str) -> None:
    async def scenario(it: Service) -> None:
        error = await refused(verify(it))
        assert error.status == 422
        assert message in str(error)

    served(lambda task, trace: verdict, scenario)


def test_other_answers_that_cannot_be_sent() -> None:
    @of_group
    def judge(task: Any, traces: Any) -> Any:
        return 1.0

    made: Any = judge
    made.tasks = lambda seed, index: 7
    made.extract = lambda text: {1}

    async def scenario(it: Service) -> None:
        for asked in (
            it.verify(protocol.Verify({}, None, [protocol.Transcript()]), 0),
            it.task(protocol.At(0, 0)),
            it.extract(protocol.Extracting("")),
        ):
            assert (await refused(asked)).status == 422

    served(judge, scenario)


def test_a_call_that_takes_too_long_is_given_up(env: Counting, clock: Clock) -> None:
    async def scenario(it: Service) -> None:
        await begin(it)
        with clock.passes(60, env.waits.is_set):
            error = await refused(take(it, 0, "wait"))
        assert (error.status, error.kind) == (422, "TimeoutError")

    served(env, scenario, timeout=30.0)


def test_a_limit_that_is_none_is_told() -> None:
    def judge(task: Any, trace: Trace) -> float:
        return 1.0

    made: Any = judge
    made.timeout = lambda task: -1

    async def scenario(it: Service) -> None:
        assert "the environment's timeout is -1" in str(await refused(verify(it)))

    served(judge, scenario)


# --- Too much to do


def test_who_comes_beyond_the_limit_is_told_when_to_come_again(env: Counting) -> None:
    async def scenario(it: Service) -> None:
        await begin(it, "a")
        await begin(it, "b")
        error = await refused(begin(it, "c"))
        assert (error.status, error.code) == (429, "busy")
        assert error.after is not None
        assert 0 < error.after <= 30
        assert str(error) == "it has 0 calls under way and 2 open sessions, and at most 2; ask again"
        taken = [asyncio.ensure_future(take(it, 0, "wait", each)) for each in "ab"]
        await until(lambda: it.under_way == 2)
        assert (await refused(take(it, 1, "more", "a"))).status == 409
        await end(it, "a")
        await refused(taken[0])
        env.go.set()
        await taken[1]
        await begin(it, "c")

    served(env, scenario, most=2)


def test_no_path_takes_calls_beyond_the_limit_or_holds_up_the_others() -> None:
    """Whatever user code a path calls, it is in a thread, and is given up after its time."""
    go, waiting = threading.Event(), threading.Semaphore(0)

    def waits(*_: Any) -> Any:
        waiting.release()
        assert go.wait(60)
        return {"found": True}

    def judge(task: Any, trace: Any) -> float:
        return 1.0

    made: Any = judge
    made.tasks = made.extract = made.of_group = waits

    async def scenario(it: Service) -> None:
        asks: list[Callable[[], Awaitable[bytes]]] = [
            lambda: it.task(protocol.At(0, 0)),
            lambda: it.extract(protocol.Extracting("")),
            lambda: it.group(protocol.Grouping({})),
        ]
        for ask in asks:
            go.clear()
            first = asyncio.ensure_future(ask())
            await until(lambda: waiting.acquire(blocking=False))
            for other in asks:
                assert (await refused(other())).status == 429
            go.set()
            await first
        it.refuse()
        for ask in asks:
            assert (await refused(ask())).status == 503

    served(judge, scenario, most=1)


def test_whether_answers_are_judged_together_is_said_in_time(clock: Clock) -> None:
    go, waiting = threading.Event(), threading.Event()

    def together(task: Any) -> bool:
        waiting.set()
        return go.wait(60)

    def judge(task: Any, trace: Any) -> float:
        return 1.0

    made: Any = judge
    made.of_group = together

    async def scenario(it: Service) -> None:
        with clock.passes(120, waiting.is_set):
            error = await refused(it.group(protocol.Grouping({})))
        assert (error.status, error.kind) == (422, "TimeoutError")
        go.set()

    served(judge, scenario)


def test_calls_beyond_the_limit_are_refused_too() -> None:
    slow = Slow()

    async def scenario(it: Service) -> None:
        first = asyncio.ensure_future(verify(it))
        await until(slow.waits.is_set)
        for call in (None, "c"):
            error = await refused(verify(it, call=call))
            assert (error.status, str(error)) == (
                429,
                "it has 1 calls under way and 0 open sessions, and at most 1; ask again",
            )
        slow.go.set()
        await first
        await verify(it, call="c")

    served(slow, scenario, most=1)


def test_a_refusal_as_it_is_sent() -> None:
    sent = json.loads(Refused(400, "invalid", "no", after=1.0).body)
    assert sent == {"error": {"code": "invalid", "kind": "EnvError", "message": "no"}}


def test_a_single_turn_is_an_environment_like_another() -> None:
    async def scenario(it: Service) -> None:
        assert not it.info().verifies  # its steps do
        await begin(it, prompt="2+2=", answer="4")
        assert json.loads(await take(it, 0, "4"))["verdict"] == {"reward": 1.0}
        await end(it)

    served(single_turn(lambda task, trace: float(trace.text == task["answer"])), scenario)
