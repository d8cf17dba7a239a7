"""An object in a process on some node of a Ray cluster, outside any mesh, also through Ray Client."""

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from nrl.errors import ClusterError, PlacementError
from nrl.runtime.ray.connection import connect
from nrl.runtime.ray.nodes import send_by_value

__all__ = ["RemoteObject", "RemoteObjectDied", "join"]

_LAST_CALL = 10.0  # seconds for an object to answer at its end

_lock = threading.Lock()
_joined = ""


class RemoteObjectDied(ClusterError):
    """The process of an object is gone, or its node, or the cluster."""


def join(address: str) -> None:
    """Join a cluster, unless this program is in it.

    Args:
        address: ``"host:port"``, or ``"ray://host:10001"``, that of Ray Client; ``"auto"``: the cluster in which this
            program is, else that of ``RAY_ADDRESS``, else that of this machine.

    Raises:
        PlacementError: there is no cluster at this address, or the program is in another one.
    """
    global _joined
    import ray

    if address in ("ray", "local"):
        raise PlacementError(
            f"cluster={address!r} would start a Ray cluster; give the address of one that runs: 'auto', 'host:port' or "
            "'ray://host:10001'"
        )
    with _lock:
        if ray.is_initialized():
            current = str(ray.get_runtime_context().gcs_address)  # also of Ray Client
            if address not in ("auto", _joined, current) and not _is_same_server(address, current):
                raise PlacementError(
                    f"this program is in the Ray cluster at {current}, and cannot join {address} as well; give 'auto' "
                    "for the same one"
                )
            return
        target = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
        connect(target, or_else="")
        _joined = target


def _is_same_server(address: str, other: str) -> bool:
    """Return whether two addresses, ``host:port``, lead to the same server as seen from this host."""
    (host, _, port), (elsewhere, _, its) = address.rpartition(":"), other.rpartition(":")
    with suppress(OSError):
        return port == its and bool({host, *_resolve(host)} & {elsewhere, *_resolve(elsewhere)})
    return False


def _resolve(host: str) -> set[str]:
    return {str(info[4][0]) for info in socket.getaddrinfo(host, None)}


class RemoteObject:
    """An object that is made on some node that has a free CPU, which it takes; it ends with the program.

    Args:
        address: of the cluster, as `join` takes it.
        kind: its class, which is sent by value, with its module and `nrl.runtime.node`. Two threads call its methods.
        also: functions of further modules that are sent so.
    """

    def __init__(self, address: str, kind: Any, also: Sequence[Callable[..., Any]] = ()) -> None:
        import ray

        join(address)
        for function in also:
            send_by_value(function)
        actor: Any = ray.remote(send_by_value(kind))
        options = {"num_cpus": 1, "max_restarts": 0, "max_concurrency": 2, "scheduling_strategy": "SPREAD"}
        self._actor = actor.options(**options).remote()

    def call(self, method: str, *args: Any) -> Callable[[float | None], Any]:
        """Call a method; return a function that waits for seconds, or without a limit, for its result.

        The function raises the method's error, or

        Raises:
            TimeoutError: the method has not returned yet.
            RemoteObjectDied: the method will not return.
        """
        import ray

        with _translate_errors():
            reference = getattr(self._actor, method).remote(*args)

        def result(seconds: float | None = None) -> Any:
            try:
                with _translate_errors():
                    return ray.get(reference, timeout=seconds)
            except ray.exceptions.GetTimeoutError:
                raise TimeoutError from None
            except ray.exceptions.RayTaskError as error:
                raise (error.cause or error) from None

        return result

    def end(self, method: str | None) -> None:
        """Call a last method, if there is one, and end the process, or the wait for a free CPU."""
        import ray

        if method is not None:
            with suppress(RemoteObjectDied, TimeoutError):
                self.call(method)(_LAST_CALL)
        with suppress(RemoteObjectDied), _translate_errors():
            ray.kill(self._actor)


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Turn Ray's errors about a dead process into `RemoteObjectDied`."""
    import ray

    if not ray.is_initialized():
        raise RemoteObjectDied("this program has left the cluster")
    try:
        yield
    except (ray.exceptions.RayTaskError, ray.exceptions.GetTimeoutError):
        raise
    except (ray.exceptions.RayError, ConnectionError) as error:
        raise RemoteObjectDied(" ".join(str(error).split())[:300]) from None
