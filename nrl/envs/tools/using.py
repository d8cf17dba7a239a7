"""An environment in which the model calls tools until it answers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from nrl.envs.tools.schemas import Tool
from nrl.envs.tools.tool_calls import call, count_calls
from nrl.envs.types import Environment, Step, Task, Turn, Verifier
from nrl.errors import EnvError

__all__ = ["tool_use"]


class _Play(NamedTuple):
    """What is left of the limits, the state of the tools, and the numbers of calls so far."""

    turns: int
    calls: int
    state: Any
    counted: Mapping[str, float] = {}


def tool_use(
    tools: Sequence[Tool],
    verifier: Verifier,
    *,
    turns: int = 8,
    calls: int = 32,
    state: Callable[[Task], Any] | None = None,
    done: Callable[[Any], bool] | None = None,
    close: Callable[[Any], Any] | None = None,
) -> Environment:
    """The environment that asks a task's prompt, makes the calls of each turn, and verifies what comes of it.

    It ends with the first turn that calls nothing, at a limit, or when ``done`` says so. A call that could not be read,
    or does not fit its tool, is answered with what was wrong. The numbers of calls in the episode are reported as
    ``env/tools/...``, and whether ``turns`` ended it as ``env/limits/turns``. `nrl.envs.limited` limits tokens, and
    time.

    Args:
        tools: of `nrl.envs.tools.tool`.
        verifier: has the last word, with the whole trace.
        turns: of the model, at most. The calls of the last one are made, and the verifier alone sees their results.
        calls: in an episode, at most; those beyond are answered with this limit.
        state: from the task to the first state of tools that have a `nrl.envs.tools.State`.
        done: from the state of the tools after a turn's calls to whether the episode is over.
        close: called with their last state once the episode is over, however it ended. None: there is nothing to give
            back.

    Raises:
        EnvError: by `reset`, if a task has no ``"prompt"``.

    >>> from nrl.envs.tools import tool
    >>> def add(a: int, b: int) -> int:
    ...     '''Add two numbers.'''
    ...     return a + b
    >>> env = tool_use([tool(add)], lambda task, trace: float(task["answer"] in trace.answer))
    >>> state, prompt, tools = env.reset({"prompt": "12+30=", "answer": "42"})
    >>> prompt, [each.name for each in tools]
    ('12+30=', ['add'])
    """

    def reset(task: Task) -> tuple[_Play, Any, Sequence[Tool]]:
        if "prompt" not in task:
            raise EnvError(
                f"tool_use: the task has no 'prompt', only {', '.join(map(repr, task)) or 'nothing'}; name the column "
                "that holds what the model is asked 'prompt'"
            )
        return _Play(turns, calls, None if state is None else state(task)), task["prompt"], tools

    async def step(play: _Play, turn: Turn) -> Step:
        asked = [*turn.calls, *turn.malformed]
        if not asked:
            return Step(play, info={"limits/turns": 0.0})
        results, after = await call(tools, asked, play.state, most=play.calls)
        counted = {name: play.counted.get(name, 0.0) + count for name, count in count_calls(results).items()}
        left = _Play(play.turns - 1, max(0, play.calls - len(asked)), after, counted)
        over = done is not None and bool(done(after))
        info = counted | {"limits/turns": float(not over and left.turns < 1)}
        said = [each.message for each in results]
        return Step(left, done=over or left.turns < 1, observation=said, info=info)

    ending = None if close is None else lambda play: close(play.state)
    return Environment(reset, step, ending, verifier)
