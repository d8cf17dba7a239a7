"""A process that has verifiers 0.1, and plays episodes of one of its environments.

It is run as a file, by a Python that need not have nrl, so this module imports the standard library alone. It reads
requests of JSON-RPC 2.0 on its standard input, a message a line, and answers on its standard output.
"""

import asyncio
import contextvars
import functools
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["load", "play", "rows"]

_BLOCK = 64  # rows of an answer
_RAISED: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("_RAISED", default=None)


class _Raised(logging.Handler):
    """What a rubric says of its reward functions that raised, and counts as 0: it is kept nowhere else."""

    def emit(self, record: logging.LogRecord) -> None:
        found = _RAISED.get()
        text = record.getMessage()
        if found is not None and text.startswith(("Error calling reward function", "Error calling group reward")):
            found.append(text)


_HANDLER = _Raised(logging.ERROR)


def load(name: str, arguments: Mapping[str, Any]) -> Any:
    """The environment that ``verifiers.load_environment`` gives, by the name of its module.

    Raises:
        ValueError: there is none.
    """
    import verifiers  # type: ignore[import-not-found]

    return verifiers.load_environment(name, **arguments)


def rows(environment: Any, split: str, start: int = 0) -> tuple[int, list[dict[str, Any]]]:
    """How many rows a dataset of an environment has, and a block of them.

    Args:
        environment: of verifiers.
        split: ``"train"``, or ``"eval"``: its ``get_dataset``, or its ``get_eval_dataset``.
        start: the number of the first row.
    """
    found = environment.get_dataset() if split == "train" else environment.get_eval_dataset()
    block = found.select(range(start, min(len(found), start + _BLOCK)))
    return len(found), block.to_list()


async def play(environment: Any, row: Mapping[str, Any], base_url: str, api_key: str, model: str) -> dict[str, Any]:
    """Let an environment lead an episode, and score it.

    Args:
        environment: of verifiers.
        row: of its dataset.
        base_url: of the model.
        api_key: for it.
        model: its name.

    Returns:
        ``reward``; ``metrics``, by name; ``error``, the name of the class, and ``why``, both None where there is none;
        ``raised``, what it says of reward functions that raised.

    Raises:
        ValueError: the environment scores groups of episodes.
    """
    import verifiers

    if environment.requires_group_rollouts:
        raise ValueError("its rubric scores whole groups of rollouts, and nrl asks for each alone; see nrl's of_group")
    raised = list[str]()
    _RAISED.set(raised)
    logger = logging.getLogger("verifiers.rubrics")
    if _HANDLER not in logger.handlers:
        logger.addHandler(_HANDLER)
    asked = _connections(asyncio.get_running_loop()).with_options(base_url=base_url, api_key=api_key)
    found = await environment.run_rollout(dict(row), verifiers.OpenAIChatCompletionsClient(asked), model, {})
    error = found.get("error") or {}
    return {
        "reward": found["reward"],
        "metrics": {key: float(each) for key, each in (found.get("metrics") or {}).items() if each is not None},
        "error": error.get("error"),
        "why": error.get("error_chain_repr"),
        "raised": raised,
    }


@functools.cache
def _connections(loop: asyncio.AbstractEventLoop) -> Any:
    """OpenAI's client, whose connections all episodes of an event loop share: to make one takes 30 ms."""
    import openai

    # All episodes may wait for an answer at once, so a limit on their number would be a deadlock
    limits = type(openai.DEFAULT_CONNECTION_LIMITS)(max_connections=None, max_keepalive_connections=256)
    inner = openai.DefaultAsyncHttpxClient(limits=limits)
    return openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", timeout=None, http_client=inner)


class _Server:
    """What answers the requests of one program."""

    def __init__(self, say: Callable[[bytes], Any]) -> None:
        self._say, self._environment = say, None
        self._working = dict[int, asyncio.Task[None]]()

    def take(self, message: Mapping[str, Any]) -> None:
        """Begin to answer a request, or cancel one."""
        if message["method"] == "notifications/cancelled":
            if work := self._working.get(message["params"]["requestId"]):
                work.cancel()
            return
        number = message["id"]
        self._working[number] = asyncio.ensure_future(self._answer(number, message["method"], message["params"]))

    async def _answer(self, number: int, method: str, params: Mapping[str, Any]) -> None:
        said: dict[str, Any] = {"jsonrpc": "2.0", "id": number}
        try:
            said["result"] = await self._result(method, params)
            text = json.dumps(said)
        except asyncio.CancelledError:
            return  # nobody waits for it
        except Exception as error:
            text = json.dumps({"jsonrpc": "2.0", "id": number, "error": f"{type(error).__name__}: {error}"})
        finally:
            del self._working[number]
        self._say(text.encode() + b"\n")

    async def _result(self, method: str, params: Mapping[str, Any]) -> Any:
        if method == "load":
            self._environment = load(**params)
            return {}
        if method == "rows":
            total, block = rows(self._environment, **params)
            return {"total": total, "rows": block}
        return await play(self._environment, **params)


async def _main() -> None:
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what an environment prints is no answer
    server, loop = _Server(out.write), asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=2**26)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        server.take(json.loads(line))


if __name__ == "__main__":
    asyncio.run(_main())
