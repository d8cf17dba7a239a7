"""A process of a pool on a node of a Ray cluster."""

from collections.abc import Mapping, Sequence
from contextlib import suppress

from nrl.envs.pools.child import Child
from nrl.envs.pools.frames import framed
from nrl.errors import EnvError, PlacementError
from nrl.log.waits import wait_until
from nrl.runtime.node.environments import Recipe
from nrl.runtime.ray.apart import Apart, Gone

__all__ = ["OnRay"]

_START = 1800.0  # seconds for a free CPU, and for the environment to be built
_LAST = 10.0  # seconds to say how the process ended


class OnRay:
    """A process on some node; as `nrl.envs.pools.child.Child`, which is there.

    Args:
        who: how errors name it.
        cluster: the address.
    """

    def __init__(self, who: str, cluster: str) -> None:
        self._who, self._cluster = who, cluster
        self._there: Apart | None = None
        self._ended = False

    def start(self, recipe: Recipe, env: Mapping[str, str], path: Sequence[str]) -> None:
        """Start it where a CPU is free."""
        try:
            self._there = Apart(self._cluster, Child, also=[framed])
            started = self._there.call("start", recipe, dict(env), list(path))

            def ready(seconds: float) -> bool:
                with suppress(TimeoutError):
                    started(seconds)
                    return True
                return self._ended

            if wait_until(ready, _START, f"{self._who}: waiting for a process on the Ray cluster ({{:.0f}} s)".format):
                return
            why = f"no node had a free CPU for it within {_START:g} s; give fewer workers, or add nodes"
        except PlacementError as error:
            raise EnvError(f"{self._who}: {error}") from None
        except Exception as error:  # what cannot be built there
            why = str(error)
        raise EnvError(f"{self._who}: could not start on the Ray cluster: {why}")

    def ask(self, request: bytes, timeout: float | None) -> list[bytes]:
        """The parts of the answer to a request."""
        assert self._there is not None
        try:
            found: list[bytes] = self._there.call("ask", request, None)(timeout)
        except Gone as error:
            raise EOFError(str(error)) from None
        return found

    def kill(self) -> None:
        """Begin to end the process and what descends from it; `leave` sees it end."""
        self._ended = True
        if self._there is not None:
            with suppress(Gone):
                self._there.call("kill")

    def fate(self, why: str) -> str:
        """How it ended."""
        assert self._there is not None
        try:
            return str(self._there.call("fate", why)(_LAST))
        except (Gone, TimeoutError) as error:
            return f"its process {why and f'({why}) '}is gone, with its actor: {str(error) or 'it does not answer'}"

    def leave(self) -> None:
        """End what is left, and the actor."""
        if self._there is not None:
            self._there.end("kill")
