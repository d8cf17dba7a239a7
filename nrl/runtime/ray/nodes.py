"""Calling functions on the nodes of a Ray cluster, and finding or building the Python of a mesh's processes there."""

import contextlib
import functools
import importlib.metadata
import shlex
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nrl.errors import DeadlineExceeded, ExecutableError, LostActor
from nrl.log.slow_wait import wait_until
from nrl.runtime import node as before_nrl
from nrl.runtime.ray.actor import tail
from nrl.runtime.trace import profiles
from nrl.runtime.venvs.building import provide
from nrl.runtime.venvs.environments import sources
from nrl.runtime.venvs.interpreters import fault
from nrl.runtime.venvs.recipes import recipe
from nrl.runtime.venvs.registry import Executable

__all__ = ["Interpreter", "address_of", "ask", "by_value", "command", "interpreters", "last_lines", "on_node"]


class Interpreter(NamedTuple):
    """The Python of a process, and the folders that it imports from beside its environment."""

    python: str
    sources: list[str]


def interpreters(
    mesh: str, executable: Executable, nodes: Collection[str], deadline: float, sound: set[tuple[str, str]]
) -> dict[str, Interpreter]:
    """Find the Python for processes on each node; build missing environments, on all nodes at once.

    Args:
        mesh: how errors name the mesh.
        executable: of the mesh.
        nodes: their Ray ids.
        deadline: seconds for all of it.
        sound: pairs of a node and an interpreter that can run a process there; new ones are added.

    Raises:
        ExecutableError: an environment cannot be built, or its interpreter cannot run a process.
        DeadlineExceeded: a node did not answer in time.
        LostActor: a node is gone.
    """
    import ray

    version = tuple(sys.version_info[:2])
    own, asked = ".".join(map(str, version)), executable.python
    if asked is not None and asked.split(".")[:2] != own.split("."):
        raise ExecutableError(
            f"mesh '{mesh}': executable '{executable.name}' is of Python {asked}, and the driver of Python {own}. "
            "What they send each other can be read by the same version only: leave out python=, or run the driver with "
            f"{asked}"
        )
    made = recipe(executable, say=print)
    if made.interpreter is not None:
        found = dict.fromkeys(nodes, made.interpreter)
    else:
        build = functools.partial(_on_nodes, mesh, made.name, "provided", deadline)
        found = {node: str(python) for node, python in build(provide, dict.fromkeys(nodes, (made,))).items()}
    new = set(found.items()) - sound
    look = functools.partial(_on_nodes, mesh, f"executable '{executable.name}'", "looked at", deadline)
    same = None if made.interpreter is None else importlib.metadata.version("torch")  # of others the lock says which
    faults = look(fault, {node: (python, version, ray.__version__, same) for node, python in new})
    for node, wrong in faults.items():
        if wrong:
            hint = (
                "it is the driver's own interpreter; choose an executable that is built on each node, such as 'base'"
                if made.interpreter is not None
                else "build it again with NRL_FORCE_REBUILD_VENVS=1"
            )
            raise ExecutableError(
                f"mesh '{mesh}': executable '{executable.name}' cannot run on node {address_of(node)}, where it is "
                f"{found[node]}: {wrong}. Hint: {hint}"
            )
    sound |= new
    return {node: Interpreter(python, sources(made, Path(python))) for node, python in found.items()}


def command(mesh: str, python: str) -> str:
    """The command that starts an interpreter for a mesh, quoted: Ray puts its ``py_executable`` into a shell's text.

    >>> command("trainer", "/my project/.venv/bin/python")
    "'/my project/.venv/bin/python'"
    """
    return shlex.join([*profiles.nsight(mesh), python])


def _on_nodes(
    mesh: str, what: str, done: str, deadline: float, fn: Callable[..., Any], args: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """Call a function on nodes, each with its arguments and ``deadline``; on this one in this process."""
    import ray

    this = ray.get_runtime_context().get_node_id()
    refs = {node: on_node(node, fn, *args[node], deadline=deadline) for node in args.keys() - {this}}
    until = time.monotonic() + deadline
    found = {this: fn(*args[this], deadline=deadline)} if this in args else {}
    for node, ref in refs.items():

        def arrived(seconds: float, node: str = node, ref: Any = ref) -> bool:
            with contextlib.suppress(ray.exceptions.GetTimeoutError):
                found[node] = ray.get(ref, timeout=seconds)
            return node in found

        failed = f"mesh '{mesh}': {what} cannot be {done} on node {address_of(node)}"
        told = f"mesh '{mesh}': waiting for {what} to be {done} on node {address_of(node)} ({{:.0f}} s)".format
        try:
            if not wait_until(arrived, max(0.0, until - time.monotonic()), told):
                raise DeadlineExceeded(f"{failed}: no answer within {deadline:g} s")
        except ray.exceptions.RayTaskError as error:
            cause = error.cause or error
            raise ExecutableError(f"{failed}: {cause}") from error
        except ray.exceptions.RayError as error:
            said = " ".join(str(error).split())[:300]
            raise LostActor(f"mesh '{mesh}'", mesh, None, address_of(node), said) from None
    return found


def ask(
    mesh: str, what: str, done: str, deadline: float, fn: Callable[..., Any], nodes: Collection[str]
) -> dict[str, tuple[float, Any, float]]:
    """What a function says on each node, one after the other, and when by this clock it was called and had answered."""
    found = {}
    for node in nodes:
        sent = time.time()
        said = _on_nodes(mesh, what, done, deadline, fn, {node: ()})[node]
        found[node] = (sent, said, time.time())
    return found


def address_of(node_id: str) -> str:
    """The address of a node by its Ray id."""
    import ray

    found = [node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id]
    return str(found[0]) if found else node_id


def on_node(node: str, fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function on a node, in the Python that Ray runs there; a reference to its result."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node, soft=False)
    task: Any = ray.remote(by_value(fn)).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    return task.remote(*args, **options)


def last_lines(node: str, files: Any, most: int = 20) -> str:
    """The last lines of a process's log; empty where they cannot be read any more.

    Args:
        node: its Ray id.
        files: a reference to the names of the files.
        most: how many lines.
    """
    import ray

    try:
        names = ray.get(files, timeout=1)
        if ray.get_runtime_context().get_node_id() == node:
            return tail(names, most)
        return str(ray.get(on_node(node, tail, names, most), timeout=10))
    except ray.exceptions.RayError:  # it, or its node, is gone
        return ""


def by_value[T: Callable[..., Any]](fn: T) -> T:
    """The same function or class, which Ray sends by value from now on, with its module and `nrl.runtime.node`."""
    from ray import cloudpickle

    for module in (before_nrl, sys.modules[fn.__module__]):
        cloudpickle.register_pickle_by_value(module)
    return fn
