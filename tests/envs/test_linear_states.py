"""Linear states: whatever is repeated, late or at once, each act happens once and every call gets its answer."""

import asyncio
import inspect
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import cloudpickle
import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from nrl.envs import Environment, LinearState, Step, Task, Trace, Turn, by_source, judged, limited, linear
from nrl.envs.tools import MalformedCall, ToolCall
from nrl.errors import ConsumedState, EnvError, ForeignState
from nrl.rollout import rollout
from tests.rollout.scripted import TASKS, Scripted

KINDS = ("plain", "async", "awaitable")


def counting(kind: str, acts: list[Any], failing: frozenset[int] = frozenset(), ticks: int = 0) -> Environment:
    """An environment that notes what it does; its state is all turns so far, of which some fail after they acted."""

    def act(name: str, *what: Any) -> None:
        acts.append((name, *what))

    async def slowly(fn: Callable[..., Any], *args: Any) -> Any:
        for _ in range(ticks):
            await asyncio.sleep(0)
        return fn(*args)

    def of_kind(fn: Callable[..., Any]) -> Callable[..., Any]:
        async def later(*args: Any) -> Any:
            return await slowly(fn, *args)

        return {"plain": fn, "async": later, "awaitable": lambda *args: slowly(fn, *args)}[kind]

    def reset(task: Task) -> Any:
        act("reset")
        return (), task["prompt"]

    def step(state: tuple[str, ...], turn: str) -> Step:
        act("step", state, turn)
        if len(state) in failing:
            raise RuntimeError(f"turn {len(state)} broke")
        after = (*state, turn)
        return Step(after, len(after) / 2, False, f"seen {after}", {"turns": len(after)})

    def close(state: tuple[str, ...]) -> str:
        act("close", state)
        return f"closed after {len(state)}"

    return Environment(of_kind(reset), of_kind(step), of_kind(close))


def value(found: Any) -> Any:
    """What a call gives, awaited where it has to be."""

    async def awaited() -> Any:
        return await found

    return asyncio.run(awaited()) if inspect.isawaitable(found) else found


def without_state(step: Step) -> tuple[Any, ...]:
    return step[1:]


class Play:
    """What is asked of an environment: each turn and the end several times, every call as soon as it can be made."""

    def __init__(self, turns: list[Turn], failing: int | None, order: list[int], by_pickle: list[bool]) -> None:
        self.turns, self.failing, self.order, self.by_pickle = turns, failing, order, by_pickle

    @property
    def failures(self) -> frozenset[int]:
        return frozenset() if self.failing is None else frozenset({self.failing})

    @property
    def reached(self) -> int:
        """The turn of the last state that there is."""
        return len(self.turns) if self.failing is None else self.failing

    def expected(self, kind: str) -> tuple[list[Any], list[Any]]:
        """The answers of a run without repetitions, and what it does."""
        acts: list[Any] = []
        env = counting(kind, acts, self.failures)
        state, _ = value(env.reset({"prompt": "Begin."}))
        answers: list[Any] = []
        for turn in self.turns:
            try:
                step = value(env.step(state, turn))
            except RuntimeError as error:
                answers.append(str(error))
                break
            state = step.state
            answers.append(without_state(step))
        assert env.close is not None
        answers.append(value(env.close(state)))
        return answers, acts


@st.composite
def plays(draw: st.DrawFn) -> Play:
    words = st.sampled_from(["a", "b", ""])
    turns = [Turn(draw(words), draw(st.lists(st.integers(0, 2), max_size=2))) for _ in range(draw(st.integers(1, 4)))]
    failing = draw(st.none() | st.integers(0, len(turns) - 1))
    last = len(turns) if failing is None else failing + 1  # the number that stands for the end
    each = [number for number in range(last + 1) for _ in range(draw(st.integers(1, 3)))]
    return Play(turns, failing, draw(st.permutations(each)), draw(st.lists(st.booleans(), min_size=16, max_size=16)))


def copied(state: Any, really: bool) -> Any:
    return pickle.loads(pickle.dumps(state)) if really else state


@settings(max_examples=150, deadline=None)
@given(play=plays(), ticks=st.integers(0, 3), waits=st.lists(st.integers(0, 4), min_size=16, max_size=16))
@pytest.mark.parametrize("kind", KINDS)
def test_any_interleaving_of_repeated_calls(kind: str, play: Play, ticks: int, waits: list[int]) -> None:
    """As tasks of one loop, each of which calls some ticks after it could. Plain calls are made one after another."""
    answers, expected = play.expected(kind)
    acts: list[Any] = []
    env: Any = linear(counting(kind, acts, play.failures, ticks))

    async def awaited(found: Any) -> Any:
        return await found if inspect.isawaitable(found) else found

    async def run() -> None:
        states = [asyncio.get_running_loop().create_future() for _ in range(play.reached + 1)]
        states[0].set_result((await awaited(env.reset({"prompt": "Begin."})))[0])

        async def one(place: int, number: int) -> None:
            end = number == len(answers) - 1
            state = copied(await states[min(number, play.reached)], play.by_pickle[place % 16])
            if end and play.failing is not None:
                await broke.wait()
            for _ in range(waits[place % 16]):
                await asyncio.sleep(0)
            if end:
                assert await awaited(env.close(state)) == answers[-1]
            elif number == play.failing:
                with pytest.raises(RuntimeError) as caught:
                    await awaited(env.step(state, play.turns[number]))
                assert str(caught.value) == answers[number]
                broke.set()
            else:
                step = await awaited(env.step(state, play.turns[number]))
                assert without_state(step) == answers[number]
                if not states[number + 1].done():
                    states[number + 1].set_result(step.state)
                assert states[number + 1].result() == step.state

        broke = asyncio.Event()
        await asyncio.gather(*(one(place, number) for place, number in enumerate(play.order)))

    asyncio.run(run())
    assert acts == expected


@settings(max_examples=30, deadline=None)
@given(play=plays())
@pytest.mark.parametrize("kind", KINDS)
def test_repeated_calls_of_many_threads(kind: str, play: Play) -> None:
    answers, expected = play.expected(kind)
    acts: list[Any] = []
    env = linear(counting(kind, acts, play.failures, ticks=2))
    close = env.close
    assert close is not None
    states: list[Future[Any]] = [Future() for _ in range(play.reached + 1)]
    states[0].set_result(value(env.reset({"prompt": "Begin."}))[0])
    broke, lock, wrong = threading.Event(), threading.Lock(), list[Any]()

    def one(place: int, number: int) -> None:
        found: Any
        state = copied(states[min(number, play.reached)].result(60), play.by_pickle[place % 16])
        if number == len(answers) - 1:
            assert play.failing is None or broke.wait(60)
            found = value(close(state))
        else:
            try:
                step = value(env.step(state, play.turns[number]))
                found = without_state(step)
                with lock:
                    if not states[number + 1].done():
                        states[number + 1].set_result(step.state)
            except RuntimeError as error:
                found = str(error)
                broke.set()
        if found != answers[number]:
            wrong.append((number, found))

    threads = [threading.Thread(target=one, args=each, daemon=True) for each in enumerate(play.order)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert wrong == []
    assert acts == expected


def begun(env: Environment) -> LinearState:
    state, _ = value(env.reset({"prompt": "Begin."}))
    assert isinstance(state, LinearState)
    return state


CALLED = Turn("a", [1, 2], "stop", [ToolCall("add", {"x": 1})], [MalformedCall("<", "cut")], "hm")


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (Turn("b", [1, 2], "stop", CALLED.calls, CALLED.malformed, "hm"), "text: now 'b', before 'a'"),
        (Turn("a", [1, 3], "stop", CALLED.calls, CALLED.malformed, "hm"), r"token_ids: now \(1, 3\), before \(1, 2\)"),
        (Turn("a", [1, 2], "length", CALLED.calls, CALLED.malformed, "hm"), "stop_reason: now 'length', before 'stop'"),
        (
            Turn("a", [1, 2], "stop", [ToolCall("add", {"x": 2})], CALLED.malformed, "hm"),
            "calls: now .*2}.*, before",
        ),
        (Turn("a", [1, 2], "stop", CALLED.calls, [], "hm"), r"malformed: now \(\), before .*cut"),
        (Turn("a", [1, 2], "stop", CALLED.calls, CALLED.malformed), "reasoning: now '', before 'hm'"),
        ("a", r"token_ids: now \(\), before"),
    ],
)
def test_another_turn_is_an_error(other: Any, what: str) -> None:
    acts: list[Any] = []
    env = linear(counting("plain", acts))
    middle = env.step(begun(env), Turn("first")).state  # type: ignore[union-attr]
    taken = env.step(middle, CALLED)
    with pytest.raises(ConsumedState, match=rf"^step: turn 1 of this episode was taken already.*{what}") as caught:
        env.step(middle, other)
    assert "Go on from the state that the first call returned" in str(caught.value)
    again = Turn("a", [1, 2], "stop", [ToolCall("add", {"x": 1})], [MalformedCall("<", "cut")], "hm")
    assert env.step(copied(middle, True), copied(again, True)) == taken
    assert [act[0] for act in acts] == ["reset", "step", "step"]


def test_a_turn_that_broke_is_not_tried_again() -> None:
    acts: list[Any] = []
    env = linear(counting("plain", acts, frozenset({0})))
    state = begun(env)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="turn 0 broke"):
            env.step(state, Turn("a"))
    with pytest.raises(ConsumedState, match="turn 0 of this episode was taken already"):
        env.step(state, Turn("b"))
    with pytest.raises(ForeignState, match="turn 1 of episode"):  # nobody was given it
        env.step(state._replace(turn=1), Turn("b"))
    assert env.close is not None
    assert env.close(state) == env.close(state) == "closed after 0"
    assert [act[0] for act in acts] == ["reset", "step", "close"]


def test_a_cancelled_call_is_not_made_again() -> None:
    """Neither is one whose repetition was cancelled, which goes on."""
    acts, gates = list[str](), list[asyncio.Event]()

    async def step(state: int, turn: str) -> Step:
        acts.append(turn)
        await gates[state].wait()
        return Step(state + 1, done=False)

    async def run() -> None:
        gates.extend([asyncio.Event(), asyncio.Event()])
        gates[0].set()
        env: Any = linear(Environment(lambda task: (0, ""), step))
        state, _ = env.reset({})
        state = (await env.step(state, "a")).state
        first, second = (asyncio.create_task(env.step(state, "b")) for _ in range(2))
        await asyncio.sleep(0.01)
        second.cancel()
        await asyncio.sleep(0.01)
        assert second.cancelled()
        assert not first.done()
        third = asyncio.create_task(env.step(state, "b"))
        await asyncio.sleep(0.01)
        first.cancel()
        with pytest.raises(EnvError, match=r"step: the first call was interrupted \(CancelledError\).*close"):
            await third
        assert first.cancelled()
        with pytest.raises(EnvError, match="may have acted half-way, so it is not made again"):
            await env.step(state, "b")

    asyncio.run(run())
    assert acts == ["a", "b"]


def test_a_call_that_nobody_awaited_is_awaited_by_the_next() -> None:
    acts: list[Any] = []
    env: Any = linear(counting("awaitable", acts))
    state = begun(env)
    env.step(state, "a").close()  # as where its caller gave up
    assert value(env.step(state, "a")) == value(env.step(state, "a"))
    assert [act[0] for act in acts] == ["reset", "step"]


def test_an_interrupted_close_is_not_made_again() -> None:
    def interrupted(state: None) -> None:
        raise KeyboardInterrupt

    env: Any = linear(Environment(lambda task: (None, ""), lambda state, turn: Step(state), interrupted))
    state = begun(env)
    with pytest.raises(KeyboardInterrupt):
        env.close(state)
    with pytest.raises(EnvError, match=r"close: the first call was interrupted .*; see what it left behind"):
        env.close(state)


def test_what_came_of_a_closed_episode() -> None:
    acts: list[Any] = []
    env: Any = linear(counting("plain", acts), remembered=2)
    states = [begun(env) for _ in range(3)]
    answers = [env.step(state, "a") for state in states]
    assert [env.close(state) for state in states[:2]] == ["closed after 1"] * 2  # with the first of their states
    assert env.step(states[0], "a") == answers[0]
    with pytest.raises(ConsumedState, match=r"this episode was closed before turn 1 was taken; reset for another"):
        env.step(answers[0].state, "b")
    env.close(answers[2].state)
    assert env.close(states[1]) == env.close(states[2]) == "closed after 1"
    for call in (env.close, lambda state: env.step(state, "a")):  # it is one too many
        with pytest.raises(ForeignState, match=r"was closed long ago \(linear\(..., remembered=2\)\); make all calls"):
            call(states[0])
    assert [act[0] for act in acts] == ["reset"] * 3 + ["step"] * 3 + ["close"] * 3


def test_a_step_that_ends_after_its_episode_was_closed() -> None:
    going_on, may_end = threading.Event(), threading.Event()

    def step(state: int, turn: str) -> Step:
        going_on.set()
        assert may_end.wait(60)
        return Step(state + 1, done=False)

    closed: list[int] = []
    env: Any = linear(Environment(lambda task: (7, ""), step, closed.append))
    state, found = begun(env), list[Step]()
    threads = [threading.Thread(target=lambda: found.append(env.step(state, "a"))) for _ in range(2)]
    threads[0].start()
    assert going_on.wait(60)
    threads[1].start()
    env.close(state)  # it does not wait
    assert closed == [7]
    may_end.set()
    for thread in threads:
        thread.join(60)
    assert found[0] == found[1] == env.step(state, "a")
    assert found[0].state == (state.episode, 1)
    env.close(found[0].state)
    assert closed == [7]


def test_episodes_stay_in_their_environment() -> None:
    acts: list[Any] = []
    env: Any = linear(counting("plain", acts))
    elsewheres: list[Any] = [linear(counting("plain", acts)), pickle.loads(cloudpickle.dumps(env))]
    state = begun(env)
    for elsewhere in elsewheres:
        with pytest.raises(ForeignState, match=rf"^step: turn 0 of episode {state.episode} is not known in"):
            elsewhere.step(state, "a")
        assert elsewhere.step(begun(elsewhere), "a").reward == 0.5
    with pytest.raises(TypeError, match="step: expected the state that reset or step of a linear .* found tuple"):
        env.step((), Turn("a"))
    with pytest.raises(ValueError, match="linear: remembered is -1; give how many closed episodes to keep, 0 or more"):
        linear(env, remembered=-1)


def test_it_composes() -> None:
    """Within others and around them; what has no close can be closed; what is no step is for others to say."""
    acts: list[Any] = []
    once = linear(counting("plain", acts))
    env: Any = linear(judged(by_source(once, linear(once)), lambda task, trace: 1.0))
    state, _ = env.reset({"prompt": "p", "source": 1})
    assert env.step(state, "a") == env.step(state, "a")
    env.close(state)
    env.close(state)
    assert [act[0] for act in acts] == ["reset", "step", "close"]
    assert env.verifier({}, Trace()) == 1.0
    bare: Any = linear(Environment(lambda task: (0, "", []), lambda state, turn: 3, timeout=5.0))  # type: ignore[arg-type, return-value]
    state, *rest = bare.reset({})
    assert (rest, bare.timeout, bare.step(state, ""), bare.close(state)) == (["", []], 5.0, 3, None)


@pytest.mark.parametrize("kind", KINDS)
def test_functions_stay_of_their_kind(kind: str) -> None:
    env, same = counting(kind, []), linear(counting(kind, []))
    for name in ("reset", "step", "close"):
        assert inspect.iscoroutinefunction(getattr(same, name)) == inspect.iscoroutinefunction(getattr(env, name))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rollout_is_the_same(kind: str) -> None:
    """Its turns have no repetitions, and its calls come from several threads."""
    found = []
    for wrap in (linear, lambda env: env):
        acts: list[Any] = []
        env = limited(wrap(counting(kind, acts)), turns=2)
        batch = rollout(Scripted(list("1234")), env, TASKS)
        assert batch["valid"].all()
        columns = [batch[name].tolist() for name in ("input_ids", "loss_mask", "rewards", "env/turns")]
        found.append((columns, sorted(map(str, acts))))
    assert found[0] == found[1]
    assert len(found[0][1]) == 8
