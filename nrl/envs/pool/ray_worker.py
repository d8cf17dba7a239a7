"""A process of a pool on a node of a Ray cluster."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from nrl.envs.pool.framing import framed
from nrl.envs.pool.scheduler import NoRoom
from nrl.envs.pool.subprocess_worker import Child
from nrl.errors import EnvError, PlacementError
from nrl.log.slow_wait import wait_until
from nrl.runtime.ray.connection import available_resources
from nrl.runtime.ray.remote_object import RemoteObject, RemoteObjectDied
from nrl.runtime.venvs.environments import Recipe

__all__ = ["OnRay"]

_ROOM = 300.0  # seconds for a free CPU, where the pool has no other process: a node may have to be added
_MORE_ROOM = 30.0  # the same, where it has
_LOOKS = 0.5  # seconds between looks at what else the pool has
_START = 1800.0  # seconds for the environment to be built
_LAST = 10.0  # seconds to say how the process ended


class OnRay:
    """A process on some node; as `nrl.envs.pool.subprocess_worker.Child`, which is there.

    Args:
        who: how errors name it.
        cluster: the address.
        others: whether others of the pool can make its calls.
    """

    def __init__(self, who: str, cluster: str, others: Callable[[], bool]) -> None:
        self._who, self._cluster, self._others = who, cluster, others
        self._there: RemoteObject | None = None
        self._placed, self._ended = False, False

    def start(self, recipe: Recipe, env: Mapping[str, str], path: Sequence[str]) -> None:
        """Start it where a CPU is free.

        Raises:
            NoRoom: none is, within 30 s where others of the pool have started, else within 5 minutes.
        """
        try:
            self._there = RemoteObject(self._cluster, Child, also=[framed])
            self._find_room(self._there)
            started = self._there.call("start", recipe, dict(env), list(path))

            def ready(seconds: float) -> bool:
                with suppress(TimeoutError):
                    started(seconds)
                    return True
                return self._ended

            if wait_until(ready, _START, f"{self._who}: waiting for a process on the Ray cluster ({{:.0f}} s)".format):
                return
            why = f"its Python environment was not there within {_START:g} s"
        except PlacementError as error:
            raise EnvError(f"{self._who}: {error}") from None
        except NoRoom:
            raise
        except Exception as error:  # what cannot be built there
            why = str(error)
        raise EnvError(f"{self._who}: could not start on the Ray cluster: {why}")

    def _find_room(self, there: RemoteObject) -> None:
        answered, began = there.call("there"), time.monotonic()

        def given_up() -> bool:
            return self._ended or (self._others() and time.monotonic() - began > _MORE_ROOM)

        def placed(seconds: float) -> bool:
            if given_up():
                return True
            with suppress(TimeoutError):
                answered(seconds)
                self._placed = True
            return self._placed

        def told(past: float) -> str:
            return f"{self._who}: no CPU is free since {past:.0f} s; {available_resources()}"

        wait_until(placed, _ROOM, told, poll_seconds=_LOOKS)
        if self._placed:
            return
        if self._others() and not self._ended:
            free = available_resources()
            print(f"{self._who}: goes on with fewer workers: no CPU is free for more; {free}", flush=True)  # noqa: T201
        raise NoRoom(
            f"no CPU of the Ray cluster was free for a process within {_ROOM:g} s; {available_resources()}. End what "
            "takes them, or add nodes"
        )

    def ask(self, request: bytes, timeout: float | None) -> list[bytes]:
        """The parts of the answer to a request."""
        assert self._there is not None
        try:
            found: list[bytes] = self._there.call("ask", request, None)(timeout)
        except RemoteObjectDied as error:
            raise EOFError(str(error)) from None
        return found

    def kill(self) -> None:
        """Begin to end the process and what descends from it; `leave` sees it end."""
        self._ended = True
        if self._there is not None:
            with suppress(RemoteObjectDied):
                self._there.call("kill")

    def fate(self, why: str) -> str:
        """How it ended."""
        assert self._there is not None
        try:
            return str(self._there.call("fate", why)(_LAST))
        except (RemoteObjectDied, TimeoutError) as error:
            return f"its process {why and f'({why}) '}is gone, with its actor: {str(error) or 'it does not answer'}"

    def leave(self) -> None:
        """End what is left, and the actor."""
        if self._there is not None:
            self._there.end("kill" if self._placed else None)
