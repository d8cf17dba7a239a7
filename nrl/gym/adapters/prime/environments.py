"""`verifiers`: environments of verifiers 0.1, which lead episodes of their own, as environments like any other."""

import asyncio
import functools
import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nrl.envs.seeds import shuffled
from nrl.envs.types import Environment, Score, Task
from nrl.errors import ArgumentError, EnvError
from nrl.gym.adapters.prime import worker
from nrl.gym.adapters.rpc_programs import RpcProgram
from nrl.gym.endpoint.agent_env import Endpoint, driven
from nrl.gym.http.json_codec import sendable
from nrl.runtime.threads import run_in_loop

__all__ = ["verifiers"]

_START = 900.0  # seconds in which uv installs the package, and the environment is loaded
_EMPTY = "EmptyModelResponseError"


def verifiers(
    name: Any,
    *,
    arguments: Mapping[str, Any] | None = None,
    requirements: Sequence[str] = ("verifiers==0.1.14",),
    python: str | None = None,
    split: Literal["train", "eval"] = "train",
    workers: int = 1,
    timeout: float = 600.0,
) -> Environment:
    """The environment that one of verifiers 0.1 is.

    It leads the episode itself: it asks this endpoint, calls its tools, and scores the rollout by its rubric. The
    reward is the rubric's; each of its functions is a component, ``reward/<name>``, with the number that it gave,
    before its weight. An environment whose rubric scores whole groups is refused.

    A rollout that ends with an error of verifiers makes its row invalid. So does a reward function that raises, which
    verifiers itself counts as 0. An answer without any text is the model's doing: it has the status ``"parse_fail"``,
    with the rubric's reward. A prompt that does not fit into the context ends the rollout, which is scored.

    Args:
        name: of the module whose ``load_environment`` makes it, such as ``"gsm8k"``; it lies in processes beside this
            program, each of which plays many episodes at once. Or an environment of verifiers itself, which stays in
            this process.
        arguments: for ``load_environment``.
        requirements: packages that the process has, as in a requirements file; uv installs them in an environment of
            their own, apart from nrl's lock.
        python: the Python of the process, which has the packages already; None: uv makes one.
        split: whose rows the environment brings as tasks: of its ``get_dataset``, or its ``get_eval_dataset``.
        workers: how many processes; more where reward functions compute, as one process has one thread for them.
        timeout: seconds of the environment between two requests, and until the last of them is scored.

    Returns:
        An environment, ``async``, with tasks. A task is a row of its dataset: ``prompt``, ``answer``, ``info``.

    Raises:
        ValueError: ``workers`` is not positive.
        EnvError: (when called) a process does not start, or ends, or the environment cannot be loaded.

    Source: verifiers 0.1.14, ``verifiers/envs/environment.py``.

    >>> verifiers("gsm8k").verifier is None
    True
    """
    if workers < 1:
        raise ArgumentError(f"verifiers: workers is {workers}; give a positive number of processes")
    if isinstance(name, str):
        given = json.dumps(dict(arguments or {}), sort_keys=True)
        specs = [_Spec(name, given, tuple(requirements), python, number) for number in range(workers)]
        play: Callable[..., Awaitable[Mapping[str, Any]]] = functools.partial(_played_there, specs)
        rows: Callable[[], Sequence[Task]] = functools.partial(_rows_there, specs[0], split)
    else:
        play, rows = functools.partial(worker.play, name), functools.partial(_rows_here, name, split)
    made = driven(functools.partial(_start, play), timeout=timeout)
    return made._replace(tasks=shuffled(rows))


class _Spec(NamedTuple):
    """What a process is started for."""

    name: str
    arguments: str
    requirements: tuple[str, ...]
    python: str | None
    number: int = 0


async def _start(play: Callable[..., Awaitable[Mapping[str, Any]]], task: Task, endpoint: Endpoint) -> Score:
    row = sendable(dict(task), "the task")
    return _score(await play(row=row, base_url=endpoint.base_url, api_key=endpoint.api_key, model=endpoint.model))


def _score(found: Mapping[str, Any]) -> Score:
    """The verdict on a rollout.

    Raises:
        EnvError: it has failed.
    """
    if found["error"] not in (None, _EMPTY):
        raise EnvError(f"verifiers: the rollout ended with an error: {found['why']}")
    if found["raised"]:
        raise EnvError(f"verifiers: {'; '.join(found['raised'])}")
    if found["error"] == _EMPTY:
        return Score(found["reward"], "parse_fail", found["metrics"])
    return Score(float(found["reward"]), "ok", found["metrics"])


def _rows_here(environment: Any, split: str) -> list[Task]:
    return _all_rows(lambda start: worker.rows(environment, split, start))


def _rows_there(spec: _Spec, split: str) -> list[Task]:
    def block(start: int) -> tuple[int, list[Task]]:
        found = run_in_loop(_program(spec).ask("rows", {"split": split, "start": start})).result()
        return found["total"], found["rows"]

    return _all_rows(block)


def _all_rows(block: Callable[[int], tuple[int, Sequence[Task]]]) -> list[Task]:
    total, found = block(0)
    every = list(found)
    while len(every) < total:
        every += block(len(every))[1]
    if not every:
        raise EnvError("verifiers: the environment's dataset has no rows")
    return every


async def _played_there(specs: Sequence[_Spec], **how: Any) -> Mapping[str, Any]:
    async def ask() -> Mapping[str, Any]:
        return await min(programs, key=lambda each: each.waiting).ask("play", how)

    programs = [_program(spec) for spec in specs]
    return await asyncio.wrap_future(run_in_loop(ask()))


@functools.cache
def _program(spec: _Spec) -> RpcProgram:
    """The process of a kind; each process of nrl that uses it has one of its own."""
    here = str(Path(worker.__file__))

    async def command() -> tuple[Sequence[str], Mapping[str, str]]:
        # -P, since modules beside the worker's file are no packages; but those of this folder may be environments
        path = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH", "")]))
        if spec.python is not None:
            return (spec.python, "-P", here), {"PYTHONPATH": path}
        uv = [sys.executable, "-m", "uv", "run", "--quiet", "--isolated", "--no-project", "--python", sys.executable]
        given = [part for each in spec.requirements for part in ("--with", each)]
        return [*uv, *given, "python", "-P", here], {"PYTHONPATH": path}

    async def greet(program: RpcProgram) -> None:
        await program.asked("load", {"name": spec.name, "arguments": json.loads(spec.arguments)}, _START)

    async def made() -> RpcProgram:
        return RpcProgram(f"verifiers: the process of {spec.name}", command, greet)

    return run_in_loop(made()).result()
