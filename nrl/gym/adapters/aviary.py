"""`fhaviary`: environments of Aviary, whose actions are calls of tools, in processes that have the package."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from nrl.envs.pool.pool import pooled
from nrl.envs.tools import Tool
from nrl.envs.types import Environment, Step, Task, Turn
from nrl.runtime.venvs.registry import Executable

__all__ = ["fhaviary"]


def fhaviary(
    *, name: str = "dummy", requirements: Sequence[str] = (), workers: int | None = None, timeout: float = 60.0
) -> Environment:
    """Episodes of an environment of Aviary, with its tools and its rewards; ``task["task"]`` is what it is made from.

    Args:
        name: by which ``aviary.env.Environment.from_name`` finds it.
        requirements: the packages that it is in, such as ``"aviary.gsm8k"``.
        workers: processes, at most; None: one for each processor.
        timeout: seconds of a call.

    Source: Aviary (Narayanan et al., 2024, 2412.21154).
    """

    async def reset(task: Task) -> Any:
        from aviary.env import Environment as Aviary  # type: ignore[import-not-found]

        inner = Aviary.from_name(name, task=task.get("task"))
        inner.exec_tool_calls = partial(inner.exec_tool_calls, handle_tool_exc=True)  # the model is told, and goes on
        messages, tools = await inner.reset()
        return inner, [_message(each) for each in messages], [_tool(each.info) for each in tools]

    async def step(inner: Any, turn: Turn) -> Step:
        from aviary.message import Message  # type: ignore[import-not-found]
        from aviary.tools import ToolCall, ToolRequestMessage  # type: ignore[import-not-found]

        # Not by `from_name`, which takes arguments named function_name and id for its own
        asked = [{"name": each.name, "arguments": each.arguments} for each in turn.calls]
        calls = [ToolCall(id=ToolCall.generate_id(), function=each) for each in asked]
        action = ToolRequestMessage(content=str(turn), tool_calls=calls) if calls else Message(content=str(turn))
        messages, reward, done, truncated = await inner.step(action)
        seen = [_message(each) for each in messages]
        return Step(inner, reward, done or truncated, seen, {"truncated": float(truncated)})

    made = Executable("fhaviary", requirements=["fhaviary>=0.37,<0.38", *requirements], package="aviary")
    env = Environment(reset, step, lambda inner: inner.close())
    return pooled(env, workers=workers, executable=made, timeout=timeout)


def _message(message: Any) -> dict[str, Any]:
    """As chat templates take it."""
    return {key: value for key, value in message.model_dump(exclude_none=True).items() if key != "tool_calls"}


def _tool(info: Any) -> Tool:  # whose function nobody calls: `step` has its environment do it
    return Tool(info.name, repr, {"type": "function", "function": info.model_dump(exclude_none=True)}, {}, ())
