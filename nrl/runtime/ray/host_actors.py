"""Actors that look at the hosts of a cluster: one on each host, beside the programs that run there."""

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from nrl.runtime.ray.nodes import pin_to_node, send_by_value

__all__ = ["Connection", "connection", "get_reply", "kill", "ray_error", "start_on", "wait_for_all"]


class Connection(NamedTuple):
    """The cluster that this process has joined."""

    version: str  # Ray's version
    address: str  # address of the head, "host:port"
    node: str  # the id of this host


def connection() -> Connection:
    """Describe the cluster that this process has joined."""
    import ray

    context = ray.get_runtime_context()
    return Connection(ray.__version__, context.gcs_address, context.get_node_id())


def start_on(node: str, cls: type, *args: object, **options: object) -> Any:
    """Start an actor on a node, or nowhere, that takes no CPU from programs.

    Args:
        node: its id.
        cls: the actor's class. It travels by value, since a host need not have nrl.
        args: of its constructor.
        options: further ones of the actor, such as ``num_gpus``.
    """
    import ray

    actor: Any = ray.remote(send_by_value(cls))
    return actor.options(**pin_to_node(node), max_restarts=0, **options).remote(*args)


def kill(actors: Iterable[Any]) -> None:
    """End actors that `start_on` has started."""
    import ray

    for actor in actors:
        ray.kill(actor, no_restart=True)


def wait_for_all(calls: Collection[Any], seconds: float) -> bool:
    """Wait for the replies of all calls, at most so many seconds; return whether all of them have come."""
    import ray

    return not ray.wait(list(calls), num_returns=len(calls), timeout=seconds)[1]


def get_reply(call: Any) -> Any:
    """Return the reply of a call.

    Raises:
        TimeoutError: it has not come yet.
        RayError: the call failed, or its host is gone; see `ray_error`.
    """
    import ray

    return ray.get(call, timeout=0)


def ray_error() -> type[Exception]:
    """Return the class of what Ray raises, for an ``except`` clause."""
    import ray

    return ray.exceptions.RayError
