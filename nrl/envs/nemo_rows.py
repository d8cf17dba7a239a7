"""Tasks of an environment as rows of NeMo Gym's data."""

import inspect
from collections.abc import Mapping
from typing import Any

from nrl.envs.contract import Environment, Task, Verifier, is_env, text_of
from nrl.envs.gym.values import sendable
from nrl.errors import EnvError
from nrl.runtime.threads import beside

__all__ = ["nemo_gym_row"]


def nemo_gym_row(task: Task, f: Environment | Verifier, *, agent: str = "simple_agent") -> dict[str, Any]:
    """A task as NeMo Gym's agents read it, for a server with `nrl.envs.nemo_serving.nemo_gym_protocol`.

    An episode is begun and closed, to see what it asks, and which tools it has. A line of NeMo Gym's data is this as
    JSON.

    Args:
        task: with the fields that the environment or the verifier reads.
        f: the environment or the verifier.
        agent: the name of the agent that is to lead it, in NeMo Gym's configuration.

    Returns:
        The fields of the task, ``responses_create_params`` and ``agent_ref``.

    Raises:
        EnvError: the task has no ``"prompt"``, or the prompt is token ids or an agent's request.

    >>> from nrl.envs import exact
    >>> row = nemo_gym_row({"prompt": "2+2=", "answer": "4"}, exact, agent="sums")
    >>> row["responses_create_params"]
    {'input': [{'role': 'user', 'content': '2+2='}]}
    >>> row["answer"], row["agent_ref"]
    ('4', {'type': 'responses_api_agents', 'name': 'sums'})
    """
    tools: Any = ()
    if is_env(f):
        state, prompt, *more = _now(f.reset(task))
        tools = more[0] if more else ()
        if f.close is not None:
            _now(f.close(state))
    elif "prompt" in task:
        prompt = task["prompt"]
    else:
        raise EnvError("nemo_gym_row: the task has no 'prompt'; give what the model is asked")
    chat = isinstance(prompt, list | tuple) and all(isinstance(each, Mapping) for each in prompt)
    if not (chat or isinstance(prompt, str)):
        raise EnvError(
            f"nemo_gym_row: the prompt is {type(prompt).__name__} of something else than messages; give a "
            "text or a chat"
        )
    asked: dict[str, Any] = {"input": list(prompt) if chat else [{"role": "user", "content": text_of(prompt)}]}
    if tools:
        asked["tools"] = [{"type": "function", "strict": False, **each.schema["function"]} for each in tools]
    row = sendable(dict(task), "the task")
    return {**row, "responses_create_params": asked, "agent_ref": {"type": "responses_api_agents", "name": agent}}


def _now(found: Any) -> Any:
    async def awaited() -> Any:
        return await found

    return beside(awaited()).result() if inspect.isawaitable(found) else found
