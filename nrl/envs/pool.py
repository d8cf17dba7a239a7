"""`pooled`: a verifier or an environment in processes of this machine, which are killed where a call takes too long."""

import functools
import weakref
from types import EllipsisType
from typing import Any, overload

import attrs

from nrl.envs.contract import Env, Environment, Step, Task, Trace, Turn, Verdict, Verifier
from nrl.envs.pool_processes import Pool, Worker
from nrl.errors import EnvError
from nrl.runtime.executables.registry import Executable
from nrl.runtime.threads import cores

__all__ = ["pooled"]


@overload
def pooled(
    f: Env,
    *,
    workers: int | None = None,
    executable: str | Executable = "system",
    timeout: float | EllipsisType | None = ...,
    memory: int | None = None,
) -> Environment: ...


@overload
def pooled(
    f: Verifier,
    *,
    workers: int | None = None,
    executable: str | Executable = "system",
    timeout: float | EllipsisType | None = ...,
    memory: int | None = None,
) -> Verifier: ...


def pooled(
    f: Any,
    *,
    workers: int | None = None,
    executable: str | Executable = "system",
    timeout: float | EllipsisType | None = ...,
    memory: int | None = None,
) -> Any:
    """The same verifier or environment, in a pool of processes of this machine.

    A process makes one call at a time. Where a call takes too long, its process is killed and another takes its place;
    so an overrun is gone, whatever it did, and with it the episodes whose states lay in that process. An episode stays
    in the process in which it was reset. Processes start when they are needed, and end with the pool, which ends with
    the value that this returns, and with the program, however that ends.

    Args:
        f: a verifier, or an environment; plain or ``async``. A function of an installed package travels by its name,
            anything else by value.
        workers: how many processes, at most; None: one for each processor.
        executable: the Python environment of the processes; by default the program's own.
        timeout: seconds of a call, from the moment at which it begins; None: no limit. Left out, the attribute
            ``timeout`` of ``f``, or a minute.
        memory: bytes of address space that a process may have; None: no limit.

    Returns:
        Of the same kind, ``async``, with the timeout None, since the pool has it.

    Raises:
        ValueError: ``workers``, ``timeout`` or ``memory`` is not positive.
        EnvError: ``f`` is neither; or, when called, the process ended, or could not start. The message has what it
            wrote last.
        TimeoutError: (when called) it took too long.

    >>> import asyncio
    >>> from nrl.envs import Trace
    >>> def right(task, trace):
    ...     return float(trace.text == task["answer"])
    >>> verify = pooled(right, workers=1, timeout=5)
    >>> asyncio.run(verify({"answer": "4"}, Trace("2+2=", ["4"])))
    1.0
    """
    if not callable(f) and not hasattr(f, "reset"):
        raise EnvError(
            f"pooled: {f!r:.200} is neither a verifier nor an environment; give a function, or an Environment"
        )
    for name, number in (("workers", workers), ("timeout", timeout), ("memory", memory)):
        if isinstance(number, int | float) and not number > 0:
            raise ValueError(f"pooled: {name} is {number}; it must be positive, or None")
    pool = Pool(f, workers or cores(), executable, timeout, memory)
    return _environment(f, pool) if hasattr(f, "reset") else _verifier(f, pool)


def _verifier(f: Verifier, pool: Pool) -> Verifier:
    async def verify(task: Task, trace: Any) -> Any:
        return await pool.call("verify", task, task, trace)

    functools.update_wrapper(verify, f, updated=())
    verify.timeout = None  # type: ignore[attr-defined]  # the pool's counts from the beginning of a call
    for name in ("of_group", "extract", "tasks"):
        if hasattr(f, name):
            setattr(verify, name, getattr(f, name))
    weakref.finalize(verify, pool.end)
    return verify


@attrs.frozen
class _Held:
    """The state of an episode, as the program knows it: which worker has it, under which number."""

    task: Task
    worker: Worker
    number: int


def _environment(env: Env, pool: Pool) -> Environment:
    async def reset(task: Task) -> Any:
        worker, (number, prompt, *tools) = await pool.placed("reset", task, task)
        return _Held(task, worker, number), prompt, *tools

    async def step(state: _Held, turn: Turn) -> Step:
        taken: Step = await pool.call("step", state.task, state.number, turn, worker=state.worker)
        return taken._replace(state=state)

    async def close(state: _Held) -> None:
        try:
            await pool.call("close", state.task, state.number, worker=state.worker)
        except EnvError:
            if not state.worker.dead:  # else there is nothing to give back
                raise

    async def verify(task: Task, trace: Trace) -> Verdict:
        found: Verdict = await pool.call("verify", task, task, trace)
        return found

    verifier: Any = getattr(env, "verifier", None)
    if getattr(verifier, "of_group", False):
        verify.of_group = True  # type: ignore[attr-defined]
    made = Environment(reset, step, close, None if verifier is None else verify, None, getattr(env, "tasks", None))
    weakref.finalize(reset, pool.end)
    return made
