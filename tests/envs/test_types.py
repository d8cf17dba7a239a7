"""Environments as pairs of functions; an environment of a verifier."""

import asyncio
import inspect
import types
from collections.abc import Sequence
from typing import Any

import pytest

import nrl.envs
from nrl.envs import Env, Environment, Prompt, Step, Task, Trace, Turn, exact, single_turn
from nrl.envs.types import FailedScore
from nrl.errors import EnvError

TASK = {"prompt": "2+2=", "answer": "4"}


def test_a_step_ends_the_episode_unless_it_says_otherwise() -> None:
    assert Step("s") == ("s", 0.0, True, None, {})


def test_reset_hands_on_the_task_and_its_prompt() -> None:
    prompts: list[Prompt] = ["text", [{"role": "user", "content": "chat"}], [1, 2, 3]]
    for prompt in prompts:
        task = {"prompt": prompt}
        state, asked = single_turn(exact).reset(task)
        assert state is task
        assert asked is prompt


@pytest.mark.parametrize(
    ("task", "found"), [({"question": "?", "answer": "4"}, "'question', 'answer'"), ({}, "nothing")]
)
def test_a_task_without_a_prompt_is_an_error(task: Task, found: str) -> None:
    with pytest.raises(EnvError, match=f"single_turn: the task has no 'prompt', only {found}; name the column"):
        single_turn(exact).reset(task)


def test_a_step_is_what_the_verifier_says() -> None:
    env = single_turn(exact)
    assert env.step(TASK, "4") == Step(TASK, reward=1.0, done=True)
    assert env.step(TASK, "5") == Step(TASK, reward=0.0, done=True)


def test_several_rewards_pass_through() -> None:
    def both(task: Task, trace: Trace) -> Sequence[float]:
        return exact(task, trace), -float(len(trace.text))

    assert single_turn(both).step(TASK, "4") == Step(TASK, reward=(1.0, -1.0))


def test_an_async_verifier_makes_an_async_step() -> None:
    async def later(task: Task, trace: Trace) -> float:
        await asyncio.sleep(0)
        return exact(task, trace)

    class Served:
        async def __call__(self, task: Task, trace: Trace) -> float:
            return await later(task, trace)

    for verifier in (later, Served()):
        step = single_turn(verifier).step(TASK, "4")
        assert inspect.iscoroutine(step)
        assert asyncio.run(step) == Step(TASK, reward=1.0)


def test_what_a_verifier_raises_is_not_a_reward() -> None:
    def broken(task: Task, trace: Trace) -> float:
        raise RuntimeError("no connection")

    async def broken_later(task: Task, trace: Trace) -> float:
        raise RuntimeError("no connection")

    with pytest.raises(RuntimeError, match="no connection"):
        single_turn(broken).step(TASK, "4")
    step = single_turn(broken_later).step(TASK, "4")
    assert inspect.iscoroutine(step)
    with pytest.raises(RuntimeError, match="no connection"):
        asyncio.run(step)


def test_whatever_has_the_two_functions_is_an_env() -> None:
    class Counter:
        """Counts its turns, and ends after two."""

        async def reset(self, task: Task) -> tuple[int, Prompt]:
            return 0, task["prompt"]

        def step(self, state: int, action: str) -> Step:
            return Step(state + 1, reward=1.0, done=state == 1, observation=None if state else [7])

    async def play(env: Env) -> list[Step]:
        async def call(result: Any) -> Any:
            return await result if inspect.isawaitable(result) else result

        state, _ = await call(env.reset(TASK))
        steps = [await call(env.step(state, Turn("4")))]
        while not steps[-1].done:
            steps.append(await call(env.step(steps[-1].state, Turn("4"))))
        return steps

    counter = Counter()
    module = types.ModuleType("module")
    module.reset, module.step = counter.reset, counter.step  # type: ignore[attr-defined]
    twice = [Step(1, 1.0, False, [7]), Step(2, 1.0)]
    assert asyncio.run(play(counter)) == twice
    assert asyncio.run(play(Environment(counter.reset, counter.step))) == twice
    assert asyncio.run(play(module)) == twice
    assert asyncio.run(play(single_turn(exact))) == [Step(TASK, 1.0)]


def test_the_package_lists_its_names_in_order() -> None:
    assert nrl.envs.__all__ == sorted(nrl.envs.__all__, key=lambda name: (not name.isupper(), name))
    assert all(hasattr(nrl.envs, name) for name in nrl.envs.__all__)


def test_a_failed_verdict_is_text_whatever_the_error() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise OSError

    assert FailedScore.of(Mute()).why == "Mute: (its message cannot be shown: its __str__ raised OSError)"
    assert len(FailedScore.of(ValueError("x" * 10_000)).why) < 1100
    assert "AKIA" not in FailedScore.of(ValueError("AKIA" + "ABCDEFGHIJKLMNOP")).why
