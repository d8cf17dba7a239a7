"""Rows of NeMo Gym's data: as they are read, and as tasks of an environment are written."""

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nrl.envs.seeds import shuffled
from nrl.envs.types import Environment, Task, Verifier, is_env, text_of
from nrl.errors import EnvError
from nrl.gym.endpoint import responses
from nrl.gym.endpoint.chat_request import Asked
from nrl.gym.endpoint.fields import Unusable
from nrl.gym.http.json_codec import sendable
from nrl.runtime.threads import run_in_loop

__all__ = ["ROW", "asked_of", "drawn", "nemo_gym_row", "nemo_gym_rows"]

ROW = "responses_create_params"
"""The field of a row that says what the model is asked."""


def nemo_gym_row(task: Task, f: Environment | Verifier, *, agent: str = "simple_agent") -> dict[str, Any]:
    """A task as NeMo Gym's agents read it, for a server with `nrl.gym.adapters.nemo.server.nemo_gym_protocol`.

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
        if (close := getattr(f, "close", None)) is not None:
            _now(close(state))
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
    return {**row, ROW: asked, "agent_ref": {"type": "responses_api_agents", "name": agent}}


def nemo_gym_rows(file: str | Path) -> list[dict[str, Any]]:
    """The rows of a file of NeMo Gym's data (JSON Lines).

    Raises:
        EnvError: there is no such file, or a line is no row.

    >>> nemo_gym_rows("nowhere.jsonl")
    Traceback (most recent call last):
    nrl.errors.EnvError: nemo_gym: nowhere.jsonl cannot be read: No such file or directory
    """
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise EnvError(f"nemo_gym: {file} cannot be read: {error.strerror}") from None
    rows = list[dict[str, Any]]()
    for at, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            asked_of(row)
        except (ValueError, EnvError) as error:
            raise EnvError(f"nemo_gym: {file}, line {at}: {error}") from None
        rows.append(row)
    if not rows:
        raise EnvError(f"nemo_gym: {file} has no rows")
    return rows


def drawn(file: str) -> Any:
    """Tasks of a file, in a new order for each seed and epoch."""
    rows = nemo_gym_rows(file)
    return shuffled(lambda: rows)


def asked_of(row: Mapping[str, Any]) -> Asked:
    """What a row asks the model."""
    params = row.get(ROW) if isinstance(row, Mapping) else None
    if not isinstance(params, Mapping):
        raise EnvError(f"nemo_gym: the task has no '{ROW}'; give rows of NeMo Gym's data")
    if not params.get("input"):  # as where a game says all
        told = params.get("instructions")
        return Asked([{"role": "system", "content": told}] if told else [])
    try:
        return responses.read(params)
    except Unusable as error:
        raise EnvError(f"nemo_gym: {ROW}: {error}") from None


def _now(found: Any) -> Any:
    async def awaited() -> Any:
        return await found

    return run_in_loop(awaited()).result() if inspect.isawaitable(found) else found
