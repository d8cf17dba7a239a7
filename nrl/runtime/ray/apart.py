"""An object in a process on some node of a Ray cluster, outside any mesh, also through Ray Client."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from nrl.errors import ClusterError, PlacementError
from nrl.runtime.ray.connection import enter
from nrl.runtime.ray.nodes import by_value

__all__ = ["Apart", "Gone", "join"]

_LAST = 10.0  # seconds for an object to answer at its end

_lock = threading.Lock()
_joined = ""


class Gone(ClusterError):
    """The process of an object is gone, or its node, or the cluster."""


def join(address: str) -> None:
    """Join a cluster, unless this program is in one.

    Args:
        address: ``"auto"``, ``"host:port"``, or ``"ray://host:10001"``, that of Ray Client.

    Raises:
        PlacementError: there is no cluster at this address, or the program is in another one.
    """
    global _joined
    import ray

    with _lock:
        if ray.is_initialized():
            own = _joined or ray.get_runtime_context().gcs_address
            if address not in ("auto", own):
                raise PlacementError(
                    f"this program is in the Ray cluster at {own}, and cannot join {address} as well; give 'auto' for "
                    "the same one"
                )
            return
        enter(address)
        _joined = address


class Apart:
    """An object that is made on some node that has a free CPU, which it takes; it ends with the program.

    Args:
        address: of the cluster, as `join` takes it.
        kind: its class, which is sent by value, with its module and `nrl.runtime.node`. Two threads call its methods.
        also: functions of further modules that are sent so.
    """

    def __init__(self, address: str, kind: Any, also: Sequence[Callable[..., Any]] = ()) -> None:
        import ray

        join(address)
        for each in also:
            by_value(each)
        made: Any = ray.remote(by_value(kind))
        how = {"num_cpus": 1, "max_restarts": 0, "max_concurrency": 2, "scheduling_strategy": "SPREAD"}
        self._actor = made.options(**how).remote()

    def call(self, method: str, *args: Any) -> Callable[[float | None], Any]:
        """Call a method: a function that waits for seconds, or without a limit, and returns what it returned.

        That function raises what the method raised, and

        Raises:
            TimeoutError: it has not returned yet.
            Gone: it will not.
        """
        import ray

        with _told():
            coming = getattr(self._actor, method).remote(*args)

        def result(seconds: float | None = None) -> Any:
            try:
                with _told():
                    return ray.get(coming, timeout=seconds)
            except ray.exceptions.GetTimeoutError:
                raise TimeoutError from None
            except ray.exceptions.RayTaskError as error:
                raise (error.cause or error) from None

        return result

    def end(self, method: str) -> None:
        """Call a last method, and end the process."""
        import ray

        with suppress(Gone, TimeoutError):
            self.call(method)(_LAST)
        with suppress(Gone), _told():
            ray.kill(self._actor)


@contextmanager
def _told() -> Iterator[None]:
    """Turn what Ray raises about a process that is gone into `Gone`."""
    import ray

    if not ray.is_initialized():
        raise Gone("this program has left the cluster")
    try:
        yield
    except (ray.exceptions.RayTaskError, ray.exceptions.GetTimeoutError):
        raise
    except (ray.exceptions.RayError, ConnectionError) as error:
        raise Gone(" ".join(str(error).split())[:300]) from None
