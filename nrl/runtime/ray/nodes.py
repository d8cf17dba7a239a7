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
from nrl.runtime.venvs import building, environments, inspection, installer, interpreters
from nrl.runtime.venvs.building import ensure_env
from nrl.runtime.venvs.environments import list_sources
from nrl.runtime.venvs.interpreters import check_interpreter
from nrl.runtime.venvs.recipes import make_recipe
from nrl.runtime.venvs.registry import Executable

__all__ = [
    "PORTABLE",
    "Interpreter",
    "call_on_node",
    "call_with_times",
    "find_interpreters",
    "get_address",
    "interpreter_command",
    "last_lines",
    "pin_to_node",
    "send_by_value",
]

PORTABLE = (before_nrl, building, environments, inspection, installer, interpreters)
"""Modules that travel by value, since a node's default Python need not have nrl."""


class Interpreter(NamedTuple):
    """The Python of a process, and the folders that it imports from beside its environment."""

    python: str
    sources: list[str]


def find_interpreters(
    mesh: str, executable: Executable, nodes: Collection[str], deadline: float, sound: set[tuple[str, str]]
) -> dict[str, Interpreter]:
    """Find the Python for processes on each node; build missing environments, on all nodes at once.

    Args:
        mesh: how errors name the mesh.
        executable: of the mesh.
        nodes: their Ray ids.
        deadline: seconds for all nodes together.
        sound: pairs of a node and an interpreter that can run a process there; new ones are added.

    Raises:
        ExecutableError: an environment cannot be built, or its interpreter cannot run a process.
        DeadlineExceeded: a node did not answer in time.
        LostActor: a node is gone.
    """
    import ray

    version = tuple(sys.version_info[:2])
    driver_version, version_asked = ".".join(map(str, version)), executable.python
    if version_asked is not None and version_asked.split(".")[:2] != driver_version.split("."):
        raise ExecutableError(
            f"mesh '{mesh}': executable '{executable.name}' is of Python {version_asked}, and the driver of Python "
            f"{driver_version}. What they send each other can be read by the same version only: leave out python=, or "
            f"run the driver with {version_asked}"
        )
    venv_recipe = make_recipe(executable, say=print)
    if venv_recipe.interpreter is not None:
        pythons = dict.fromkeys(nodes, venv_recipe.interpreter)
    else:
        build = functools.partial(_call_on_nodes, mesh, venv_recipe.name, "provided", deadline)
        pythons = {
            node: str(python) for node, python in build(ensure_env, dict.fromkeys(nodes, (venv_recipe,))).items()
        }
    new = set(pythons.items()) - sound
    check = functools.partial(_call_on_nodes, mesh, f"executable '{executable.name}'", "looked at", deadline)
    # For others, the lock sets the version.
    torch_version = None if venv_recipe.interpreter is None else importlib.metadata.version("torch")
    faults = check(check_interpreter, {node: (python, version, ray.__version__, torch_version) for node, python in new})
    for node, fault_text in faults.items():
        if fault_text:
            hint = (
                "it is the driver's own interpreter; choose an executable that is built on each node, such as 'base'"
                if venv_recipe.interpreter is not None
                else "build it again with NRL_FORCE_REBUILD_VENVS=1"
            )
            raise ExecutableError(
                f"mesh '{mesh}': executable '{executable.name}' cannot run on node {get_address(node)}, where it is "
                f"{pythons[node]}: {fault_text}. Hint: {hint}"
            )
    sound |= new
    return {node: Interpreter(python, list_sources(venv_recipe, Path(python))) for node, python in pythons.items()}


def interpreter_command(mesh: str, python: str) -> str:
    """Return the quoted command that starts an interpreter for a mesh: Ray puts ``py_executable`` into a shell's text.

    >>> interpreter_command("trainer", "/my project/.venv/bin/python")
    "'/my project/.venv/bin/python'"
    """
    return shlex.join([*profiles.nsight(mesh), python])


def _call_on_nodes(
    mesh: str, subject: str, action: str, deadline: float, fn: Callable[..., Any], args: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """Call a function on nodes, each with its arguments and ``deadline``; on this one in this process."""
    import ray

    own_node = ray.get_runtime_context().get_node_id()
    refs = {node: call_on_node(node, fn, *args[node], deadline=deadline) for node in args.keys() - {own_node}}
    until = time.monotonic() + deadline
    replies = {own_node: fn(*args[own_node], deadline=deadline)} if own_node in args else {}
    for node, ref in refs.items():

        def fetch(seconds: float, node: str = node, ref: Any = ref) -> bool:
            with contextlib.suppress(ray.exceptions.GetTimeoutError):
                replies[node] = ray.get(ref, timeout=seconds)
            return node in replies

        failure = f"mesh '{mesh}': {subject} cannot be {action} on node {get_address(node)}"
        progress = (
            f"mesh '{mesh}': waiting for {subject} to be {action} on node {get_address(node)} ({{:.0f}} s)".format
        )
        try:
            if not wait_until(fetch, max(0.0, until - time.monotonic()), progress):
                raise DeadlineExceeded(f"{failure}: no answer within {deadline:g} s")
        except ray.exceptions.RayTaskError as error:
            inner = error.cause or error
            raise ExecutableError(f"{failure}: {inner}") from error
        except ray.exceptions.RayError as error:
            message = " ".join(str(error).split())[:300]
            raise LostActor(f"mesh '{mesh}'", mesh, None, get_address(node), message) from None
    return replies


def call_with_times(
    mesh: str, subject: str, action: str, deadline: float, fn: Callable[..., Any], nodes: Collection[str]
) -> dict[str, tuple[float, Any, float]]:
    """Call a function on each node in turn; return its results, and the times of call and reply by this clock."""
    replies = {}
    for node in nodes:
        sent = time.time()
        reply = _call_on_nodes(mesh, subject, action, deadline, fn, {node: ()})[node]
        replies[node] = (sent, reply, time.time())
    return replies


def get_address(node_id: str) -> str:
    """Return the address of a node by its Ray id."""
    import ray

    addresses = [node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id]
    return str(addresses[0]) if addresses else node_id


def pin_to_node(node: str) -> dict[str, object]:
    """Return the options of a task or an actor that runs on this node, or nowhere, and takes no CPU from programs."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


def call_on_node(node: str, fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function on a node, in Ray's own Python; return a reference to the result."""
    import ray

    task: Any = ray.remote(send_by_value(fn)).options(**pin_to_node(node), max_retries=0)
    return task.remote(*args, **options)


def last_lines(node: str, files: Any, limit: int = 20) -> str:
    """Return the last lines of a process's log; empty if they cannot be read any more.

    Args:
        node: its Ray id.
        files: a reference to the names of the files.
        limit: how many lines.
    """
    import ray

    try:
        names = ray.get(files, timeout=1)
        if ray.get_runtime_context().get_node_id() == node:
            return tail(names, limit)
        return str(ray.get(call_on_node(node, tail, names, limit), timeout=10))
    except ray.exceptions.RayError:  # The process, or its node, is gone.
        return ""


def send_by_value[T: Callable[..., Any]](fn: T) -> T:
    """Make Ray send a function or class by value from now on, with its module and `PORTABLE`; return it."""
    from ray import cloudpickle

    for module in (*PORTABLE, sys.modules[fn.__module__]):
        cloudpickle.register_pickle_by_value(module)
    return fn
