"""Calling a function in each process of a mesh, and waiting for the results of the first or of all."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from tensordict import TensorDict

from nrl.batch import forbid_writes
from nrl.runtime.mesh.placement import Mesh
from nrl.runtime.mesh.processes import Out

__all__ = ["Each", "call", "from_all", "from_first", "method", "only", "watched"]


class Each(NamedTuple):
    """An argument of which every process gets its own; any other argument goes to all of them.

    >>> Each([3, 4]).values
    [3, 4]
    """

    values: Sequence[Any]


def call(
    mesh: Mesh,
    who: str,
    fn: Callable[..., Any],
    *args: Any,
    outs: Out | tuple[Out, ...] = Out.on_rank,
    turn: bool = True,
    sent: Callable[[], object] | None = None,
) -> Any:
    """Call ``fn`` in each process; its result, or one for each of ``outs``: see `nrl.runtime.mesh.processes.Processes`.

    >>> from nrl.runtime import cluster
    >>> with cluster("local") as here:
    ...     call(here.reserve(1).mesh(), "add", int.__add__, 3, Each([4]), outs=Out.first).then(list).result()
    [7]
    """
    mesh.cluster.check_open(who)
    rows = [
        [arg.values[rank] if isinstance(arg, Each) else arg for arg in args] for rank in range(mesh.processes.count)
    ]
    found = mesh.processes.call(who, fn, rows, outs, turn=turn, sent=sent)
    return found if isinstance(outs, tuple) else found[0]


def from_first(mesh: Mesh, who: str, fn: Callable[..., Any], *args: Any, turn: bool = True) -> Any:
    """Call ``fn`` in each process, and wait for what the first one returns.

    >>> from nrl.runtime import cluster
    >>> with cluster("local") as here:
    ...     from_first(here.reserve(1).mesh(), "add", int.__add__, 3, 4)
    7
    """
    return call(mesh, who, fn, *args, outs=Out.first, turn=turn).then(only).result()


def from_all(mesh: Mesh, who: str, fn: Callable[..., Any], *args: Any, turn: bool = True) -> list[Any]:
    """Call ``fn`` in each process, and wait for what all of them return, by rank.

    >>> from nrl.runtime import cluster
    >>> with cluster("local") as here:
    ...     from_all(here.reserve(1).mesh(), "add", int.__add__, 3, 4)
    [7]
    """
    found: list[Any] = call(mesh, who, fn, *args, outs=Out.all, turn=turn).then(list).result()
    return found


def method(name: str, value: Any, *args: Any) -> Any:
    """Call a method of a value; ``partial(method, "size")`` is what a process calls on the value that it holds.

    >>> method("upper", "a")
    'A'
    """
    return getattr(value, name)(*args)


def only(results: list[Any]) -> Any:
    """The one result.

    >>> only([3])
    3
    """
    return results[0]


def watched(fn: Callable[..., Any], name: str, *args: Any) -> Any:
    """Call a function; under ``NRL_DEBUG=1`` raise if it writes into a batch that it is given.

    >>> watched(len, "len", [3, 4])
    2
    """
    with ExitStack() as stack:
        for value in args:
            if isinstance(value, TensorDict):
                stack.enter_context(forbid_writes(value, name))
        return fn(*args)
