"""Limits of an episode: which turn ends it, what becomes of its reward, and which limit is said to have done it."""

import asyncio
import inspect
import math
import time
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from nrl.batch.metrics import finalize
from nrl.envs import Environment, Step, Task, Trace, Turn, judged, limited, single_turn
from nrl.envs.tools import ToolCall, tool, tool_use
from nrl.rollout import rollout
from nrl.rollout.summaries import summary
from tests.rollout.scripted import TASKS, Scripted


def endless(ends: float = math.inf, sleep: float = 0.0) -> Environment:
    """Each turn earns half a point; it ends by itself with turn number ``ends``."""

    def step(state: int, turn: str) -> Step:
        time.sleep(sleep)
        return Step(state + 1, 0.5, state + 1 >= ends, "\n", {"mine": 2.0})

    return Environment(lambda task: (0, task["prompt"]), step)


def turns_until_done(env: Environment, sampled: list[int]) -> list[Step]:
    """The steps of an episode whose turns have so many tokens."""
    state, _ = env.reset({"prompt": "p"})
    steps = list[Step]()
    for number in sampled:
        steps.append(env.step(state, Turn("a", [0] * number)))  # type: ignore[arg-type]
        state = steps[-1].state
        if steps[-1].done:
            break
    return steps


@given(
    sampled=st.lists(st.integers(0, 5), min_size=12, max_size=12),
    turns=st.none() | st.integers(1, 12),
    tokens=st.none() | st.integers(1, 20),
    ends=st.integers(1, 12),
)
def test_an_episode_ends_behind_the_turn_that_reaches_a_limit(
    sampled: list[int], turns: int | None, tokens: int | None, ends: int
) -> None:
    """Against a count turn by turn."""
    steps = turns_until_done(limited(endless(ends), turns=turns, tokens=tokens, seconds=1e6), sampled)
    drawn = 0
    for number, step in enumerate(steps, 1):
        drawn += sampled[number - 1]
        by_itself = number == ends
        over = {
            "limits/turns": turns is not None and number == turns and not by_itself,
            "limits/tokens": tokens is not None and drawn >= tokens and not by_itself,
            "limits/seconds": False,
        }
        assert step.done == (by_itself or any(over.values()))
        assert step.done == (number == len(steps))
        assert step.reward == 0.5
        assert step.observation == "\n"
        wanted = [name for name, limit in (("turns", turns), ("tokens", tokens), ("seconds", 1e6)) if limit is not None]
        assert step.info == {"mine": 2.0, **{f"limits/{name}": float(over[f"limits/{name}"]) for name in wanted}}


def test_time() -> None:
    env = limited(endless(sleep=0.06), seconds=0.1)
    steps = turns_until_done(env, [1] * 4)
    assert [step.info["limits/seconds"] for step in steps] == [0.0] * (len(steps) - 1) + [1.0]
    assert 1 <= len(steps) <= 2  # one, where this machine slept for longer


def test_a_limit_within_another_is_reported_too() -> None:
    steps = turns_until_done(limited(limited(endless(), turns=2, tokens=50), turns=5), [1] * 9)
    assert [step.info["limits/turns"] for step in steps] == [0.0, 1.0]
    steps = turns_until_done(limited(limited(endless(), turns=5), turns=2), [1] * 9)
    assert [step.info["limits/turns"] for step in steps] == [0.0, 1.0]


def test_what_an_environment_has_besides_stays() -> None:
    closed = list[int]()

    async def later(state: int, turn: str) -> Step:
        return Step(state + 1, 0.5, False, "\n")

    async def close(state: int) -> None:
        closed.append(state)

    async def reset(task: Task) -> Any:
        return 0, task["prompt"], ["tools"]

    own = Environment(reset, later, close, lambda task, trace: 2.0, timeout=7.0)
    env: Any = limited(own, turns=1)
    assert all(inspect.iscoroutinefunction(fn) for fn in (env.reset, env.step, env.close))

    async def run() -> Step:
        state, prompt, tools = await env.reset({"prompt": "p"})
        assert (prompt, tools) == ("p", ["tools"])
        step: Step = await env.step(state, "a text without tokens")
        await env.close(step.state)
        return step

    assert asyncio.run(run()).done
    assert closed == [1]
    assert (env.verifier({}, Trace()), env.timeout) == (2.0, 7.0)
    plain: Any = limited(endless(), turns=1)
    assert (plain.close, plain.verifier, plain.timeout) == (None, None, 60.0)
    assert not inspect.iscoroutinefunction(plain.step)
    broken: Any = limited(Environment(lambda task: (0, ""), lambda state, turn: 3), turns=1)  # type: ignore[arg-type, return-value]
    assert broken.step(broken.reset({})[0], "a") == 3  # for a rollout to complain about


def test_in_a_rollout() -> None:
    """A verifier has the last word; rewards stay; numbers are columns and metrics."""
    closed = list[int]()
    env = limited(
        judged(endless(ends=2)._replace(close=closed.append), lambda task, trace: {"turns": len(trace.turns)}), tokens=4
    )
    batch = rollout(Scripted(["1", "12345", "2"]), env, TASKS)  # with the token that ends each
    assert batch["env/limits/tokens"].tolist() == [0.0, 1.0]
    assert batch["rewards"].tolist() == [2 * 0.5 + 2, 0.5 + 1]
    assert batch["valid"].all()
    assert not batch["truncated"].any()
    assert finalize(summary(batch))["env/limits/tokens"] == 0.5
    assert sorted(closed) == [1, 2]


def test_tools() -> None:
    """The calls of the last turn are made, whoever limits it."""
    acts = list[int]()

    def add(a: int) -> int:
        """Add one.

        Args:
            a: to this.
        """
        acts.append(a)
        return a + 1

    def play(env: Environment) -> list[tuple[bool, float, float]]:
        async def run() -> list[tuple[bool, float, float]]:
            found, done = list[Any](), False
            state, *_ = env.reset({"prompt": "p"})
            while not done:
                step: Any = await env.step(state, Turn("", [1], calls=[ToolCall("add", {"a": len(found)})]))  # type: ignore[misc]
                state, done = step.state, step.done
                found.append((done, step.info["limits/turns"], step.info.get("tools/calls", 0.0)))
            return found

        acts.clear()
        return asyncio.run(run())

    use = tool_use([tool(add)], lambda task, trace: 1.0, turns=3)
    assert play(use) == [(False, 0.0, 1.0), (False, 0.0, 2.0), (True, 1.0, 3.0)]
    assert acts == [0, 1, 2]
    assert play(limited(use, turns=2)) == [(False, 0.0, 1.0), (True, 1.0, 2.0)]
    assert acts == [0, 1]
    assert play(limited(use, turns=9)) == [(False, 0.0, 1.0), (False, 0.0, 2.0), (True, 1.0, 3.0)]
    state, *_ = use.reset({"prompt": "p"})
    answered: Any = asyncio.run(use.step(state, Turn("4", [1])))  # type: ignore[arg-type]
    assert (answered.done, answered.info) == (True, {"limits/turns": 0.0})


@pytest.mark.parametrize("limits", [{"turns": 0}, {"tokens": -1}, {"seconds": 0.0}, {"seconds": math.nan}])
def test_limits_that_are_none(limits: dict[str, Any]) -> None:
    ((name, value),) = limits.items()
    with pytest.raises(ValueError, match=rf"limited: {name} is {value}; give a positive number, or leave it out"):
        limited(single_turn(lambda task, trace: 1.0), **limits)
    with pytest.raises(ValueError, match=r"limited: no limit is given; give turns=, tokens= or seconds="):
        limited(single_turn(lambda task, trace: 1.0))
