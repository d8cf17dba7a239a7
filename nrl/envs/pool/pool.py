"""`pooled` and `on`: a verifier or an environment in processes, which are killed where a call takes too long."""

import asyncio
import functools
import weakref
from collections.abc import Callable
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Protocol, overload

import attrs

from nrl.envs.pool.processes import Child, Process, Python, here
from nrl.envs.pool.scheduler import Pool, Worker
from nrl.envs.references import task_check
from nrl.envs.types import Env, Environment, Step, Task, Trace, Turn, Verdict, Verifier, declared_rewards
from nrl.errors import ArgumentError, EnvError
from nrl.runtime.node.cgroups import usable_cores
from nrl.runtime.venvs.registry import Executable
from nrl.runtime.venvs.registry import executable as registered

if TYPE_CHECKING:
    from nrl.runtime.mesh.placement import Mesh

__all__ = ["on", "pooled"]


@overload
def pooled(
    f: Env,
    *,
    workers: int | None = None,
    executable: str | Executable = "system",
    timeout: float | EllipsisType | None = ...,
    memory: int | None = None,
    cluster: str | None = None,
) -> Environment: ...


@overload
def pooled(
    f: Verifier,
    *,
    workers: int | None = None,
    executable: str | Executable = "system",
    timeout: float | EllipsisType | None = ...,
    memory: int | None = None,
    cluster: str | None = None,
) -> Verifier: ...


def pooled(
    f: Any,
    *,
    workers: int | None = None,
    executable: str | Executable = "system",
    timeout: float | EllipsisType | None = ...,
    memory: int | None = None,
    cluster: str | None = None,
) -> Any:
    """The same verifier or environment, in a pool of processes, of this machine or of a Ray cluster.

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
        cluster: of Ray, on whose nodes the processes are, each beside an actor that has one CPU: ``"auto"``,
            ``"host:port"`` or ``"ray://host:10001"``. None: they are on this machine.

    Returns:
        Of the same kind, ``async``, with the timeout None, since the pool has it.

    Raises:
        ValueError: ``workers``, ``timeout`` or ``memory`` is not positive.
        EnvError: ``f`` is neither; or, when called, the process ended, or could not start. The message has what it
            wrote last.
        PlacementError: no executable has this name.
        ExecutableError: (when called, or sent to a mesh) the Python environment cannot be made. It ends a rollout.
        TimeoutError: (when called) it took too long.
        RuntimeError: (when called) ``f`` raised what would end this program or a task of it, such as KeyboardInterrupt.
            The message has it. SystemExit and all other exceptions are raised here as they were there.

    >>> import asyncio
    >>> from nrl.envs import Trace
    >>> def right(task, trace):
    ...     return float(trace.answer == task["answer"])
    >>> verify = pooled(right, workers=1, timeout=5)
    >>> asyncio.run(verify({"answer": "4"}, Trace("2+2=", ["4"])))
    1.0
    """
    _check("pooled", f, workers=workers, timeout=timeout, memory=memory)
    python = Python(registered(executable))
    return _elsewhere(f, functools.partial(_processes, f, workers or usable_cores(), python, timeout, memory, cluster))


class _On(Protocol):
    """What `on` returns."""

    @overload
    def __call__(self, f: Env, /) -> Environment: ...
    @overload
    def __call__(self, f: Verifier, /) -> Verifier: ...


def on(mesh: "Mesh", *, timeout: float | EllipsisType | None = ...) -> _On:
    """The same verifier or environment, on a mesh: beside its processes, in their helpers (`Mesh.submit`).

    Each rank makes one call at a time. Where a call takes too long, its helper is killed, and the next call gets
    another; so an overrun is gone, and with it the episodes whose states lay in that helper. An episode stays on the
    rank on which it was reset. On the local cluster helpers are threads, which cannot be killed: an overrun is left
    behind.

    Args:
        mesh: for example of some CPU slots of the run's own cluster.
        timeout: seconds of a call, from the moment at which it begins; None: no limit. Left out, the attribute
            ``timeout`` of the verifier or environment, or a minute.

    Returns:
        From a verifier, plain or ``async``, to an ``async`` one, and from an environment to one of ``async``
        functions. It has the timeout None, since the mesh has it. What it is given travels as with `nrl.shard_map`.

    Raises:
        ValueError: ``timeout`` is not positive.
        EnvError: what is given is neither; or, when called, the helper has died, or did not start.
        TimeoutError: (when called) it took too long.

    >>> import asyncio, nrl
    >>> from nrl.envs import Trace
    >>> def right(task, trace):
    ...     return float(trace.answer == task["answer"])
    >>> with nrl.cluster("local") as cluster:
    ...     verify = on(cluster.reserve(2).mesh(name="judges"), timeout=5)(right)
    ...     asyncio.run(verify({"answer": "4"}, Trace("2+2=", ["4"])))
    1.0
    """
    _check("on", timeout=timeout)

    def moved(f: Any) -> Any:
        _check("on", f)
        return _elsewhere(f, functools.partial(_ranks, f, mesh, timeout))

    return moved


def _check(transform: str, f: Any = len, **numbers: Any) -> None:
    if not callable(f) and not hasattr(f, "reset"):
        raise EnvError(
            f"{transform}: {f!r:.200} is neither a verifier nor an environment; give a function, or an Environment"
        )
    for name, number in numbers.items():
        if isinstance(number, int | float) and not number > 0:
            raise ArgumentError(f"{transform}: {name} is {number}; it must be positive, or None")


def _processes(
    f: Any,
    most: int,
    python: Python,
    timeout: float | EllipsisType | None,
    memory: int | None,
    cluster: str | None,
) -> Pool:
    def child() -> Child:
        if cluster is None:
            return here()
        from nrl.envs.pool.ray_worker import OnRay  # which most have no use for

        return OnRay(pool.who, cluster, pool.works)

    def place(number: int) -> Process:
        return Process(pool.who, f, python, memory, child())

    pool = Pool(f, "pooled", most, place, timeout)
    return pool


def _ranks(f: Any, mesh: "Mesh", timeout: float | EllipsisType | None) -> Pool:
    from nrl.envs.pool.mesh_worker import Rank  # who has a mesh has torch

    def place(number: int) -> Rank:
        return Rank(pool.who, mesh, number, f)

    pool = Pool(f, f"on({mesh.name})", mesh.size, place, timeout)
    return pool


class _Owner:
    """Holds a pool, which ends with it; in another process it is made anew, with workers of its own."""

    def __init__(self, make: Callable[[], Pool]) -> None:
        self._make, self.pool = make, make()
        weakref.finalize(self, self.pool.end)

    def __reduce__(self) -> Any:
        return _Owner, (self._make,)


def _elsewhere(f: Any, make: Callable[[], Pool]) -> Any:
    return _environment(f, _Owner(make)) if hasattr(f, "reset") else _verifier(f, _Owner(make))


def _verifier(f: Verifier, owner: _Owner) -> Verifier:
    async def verify(task: Task, trace: Any) -> Any:
        return await owner.pool.call("verify", task, task, trace)

    functools.update_wrapper(verify, f, updated=())
    verify.timeout = None  # type: ignore[attr-defined]  # the pool's counts from the beginning of a call
    for name in ("of_group", "extract", "tasks", "check_task", "num_rewards"):
        if hasattr(f, name):
            setattr(verify, name, getattr(f, name))
    _let_forget(verify, f, owner)
    return verify


def _let_forget(verify: Any, verifier: Any, owner: _Owner) -> None:
    """Give a verifier that is elsewhere the ``forget`` of the one that is called there, in all places that are left."""
    if not hasattr(verifier, "forget"):
        return

    async def one(worker: Worker) -> None:
        try:
            await owner.pool.call("forget", {}, worker=worker)
        except EnvError:
            if not worker.dead:  # else its memory is gone
                raise

    async def forget() -> None:
        await asyncio.gather(*map(one, list(owner.pool.workers)))

    verify.forget = forget


@attrs.frozen
class _Held:
    """The state of an episode, as the program knows it: which worker has it, under which number."""

    task: Task
    worker: Worker
    number: int


def _environment(env: Env, owner: _Owner) -> Environment:
    async def reset(task: Task) -> Any:
        worker, (number, prompt, *tools) = await owner.pool.placed("reset", task, task)
        return _Held(task, worker, number), prompt, *tools

    async def step(state: _Held, turn: Turn) -> Step:
        taken: Step = await owner.pool.call("step", state.task, state.number, turn, worker=state.worker)
        return taken._replace(state=state)

    async def close(state: _Held) -> None:
        try:
            await owner.pool.call("close", state.task, state.number, worker=state.worker)
        except EnvError:
            if not state.worker.dead:  # else there is nothing to give back
                raise

    async def verify(task: Task, trace: Trace) -> Verdict:
        found: Verdict = await owner.pool.call("verify", task, task, trace)
        return found

    verifier: Any = getattr(env, "verifier", None)
    if hasattr(verifier, "of_group"):
        verify.of_group = verifier.of_group  # type: ignore[attr-defined]
    _let_forget(verify, verifier, owner)
    tasks, check, num_rewards = getattr(env, "tasks", None), task_check(env), declared_rewards(env)
    return Environment(reset, step, close, None if verifier is None else verify, None, tasks, check, num_rewards)
