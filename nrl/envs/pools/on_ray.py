"""A process of a pool on a node of a Ray cluster, for which an actor there answers."""

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from nrl.envs.pools.child import Child
from nrl.envs.pools.frames import framed
from nrl.errors import EnvError
from nrl.log.waits import wait_until
from nrl.runtime.node.environments import Recipe
from nrl.runtime.ray.nodes import by_value

__all__ = ["OnRay", "join"]

_START = 1800.0  # seconds for a free CPU, and for the environment to be built
_LAST = 10.0  # seconds for an actor to say how its process ended

_lock = threading.Lock()
_joined = ""
"""The address of the cluster that pools have joined."""


def join(address: str) -> None:
    """Join a Ray cluster, unless this program has.

    Args:
        address: ``"auto"``, ``"host:port"``, or ``"ray://host:10001"``, that of Ray Client.

    Raises:
        EnvError: it needs a package that is not there; or this program is in another cluster.
        PlacementError: there is no cluster at this address.
    """
    global _joined
    import ray

    from nrl.runtime.ray.connection import enter

    with _lock:
        if ray.is_initialized():
            own = _joined or ray.get_runtime_context().gcs_address
            if address not in ("auto", own):
                raise EnvError(
                    f"pooled: this program is in the Ray cluster at {own}, and cannot join {address} as well; give "
                    "cluster='auto' for the same one"
                )
            return
        if address.startswith("ray://"):
            try:
                import grpc  # noqa: F401
            except ImportError:
                raise EnvError(
                    f"pooled: {address} is an address of Ray Client, which needs grpcio; install ray[client]"
                ) from None
        enter(address)
        _joined = address


class OnRay:
    """A process on some node; as `nrl.envs.pools.child.Child`.

    Args:
        who: how errors name it.
        cluster: the address.
    """

    def __init__(self, who: str, cluster: str) -> None:
        self._who, self._cluster = who, cluster
        self._actor: Any = None
        self._ended = False

    def start(self, recipe: Recipe, env: Mapping[str, str], path: Sequence[str]) -> None:
        """Start an actor where a CPU is free, and let it start the process."""
        import ray

        join(self._cluster)
        by_value(framed)
        # A second thread ends the process while the first one waits for its answer
        kind: Any = ray.remote(by_value(Child)).options(
            num_cpus=1, max_restarts=0, max_concurrency=2, scheduling_strategy="SPREAD"
        )
        self._actor = kind.remote()
        started = self._actor.start.remote(recipe, dict(env), list(path))

        def ready(seconds: float) -> bool:
            if self._ended:
                return True
            with suppress(ray.exceptions.GetTimeoutError):
                ray.get(started, timeout=seconds)
                return True
            return False

        try:
            if wait_until(ready, _START, f"{self._who}: waiting for a process on the Ray cluster ({{:.0f}} s)".format):
                return
            why = f"no node had a free CPU for it within {_START:g} s; give fewer workers, or add nodes"
        except ray.exceptions.RayTaskError as error:
            why = str(error.cause or error)
        except _gone() as error:
            why = _line(error)
        raise EnvError(f"{self._who}: could not start on the Ray cluster: {why}")

    def ask(self, request: bytes, timeout: float | None) -> list[bytes]:
        """The parts of the answer to a request."""
        import ray

        try:
            found: list[bytes] = ray.get(self._actor.ask.remote(request, None), timeout=timeout)
        except ray.exceptions.GetTimeoutError:
            raise
        except _gone():
            raise EOFError from None
        return found

    def kill(self) -> None:
        """Begin to end the process and what descends from it; `leave` sees it end."""
        self._ended = True
        if self._there():
            with suppress(*_gone()):
                self._actor.kill.remote()

    def fate(self, why: str) -> str:
        """How it ended."""
        import ray

        try:
            return str(ray.get(self._actor.fate.remote(why), timeout=_LAST))
        except _gone() as error:
            return f"its process {why and f'({why}) '}is gone, with its node or its actor: {_line(error)}"

    def leave(self) -> None:
        """End what is left, and the actor."""
        import ray

        if self._there():
            with suppress(*_gone()):
                ray.get(self._actor.kill.remote(), timeout=_LAST)
            with suppress(*_gone()):
                ray.kill(self._actor)

    def _there(self) -> bool:
        """Whether there is an actor; when this program leaves the cluster, it ends by itself."""
        import ray

        return self._actor is not None and ray.is_initialized()


def _gone() -> tuple[type[Exception], ...]:
    """What is raised where an actor, its node or the cluster is gone."""
    import ray

    return ray.exceptions.RayError, ConnectionError


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__

