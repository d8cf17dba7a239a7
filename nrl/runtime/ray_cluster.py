"""A Ray cluster: started or joined, placement groups on it, and actors in them."""

import contextlib
import functools
import os
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from nrl.errors import ClosedCluster, DeadlineExceeded, ExecutableError, LostActor, PlacementError
from nrl.runtime import on_node, profiling, provision, ray_logs, venvs
from nrl.runtime.executables import Executable
from nrl.runtime.placement import Cluster, Mesh, Processes, Slots, Strategy
from nrl.runtime.ray_processes import RayProcesses
from nrl.runtime.worker import Worker

__all__ = ["RayCluster"]

_CPUS = 64  # logical ones of a cluster on this machine: its processes may share cores
_KNOCKING = 20.0  # seconds in which a host answers
_SILENCE = 10.0  # seconds for which slots are waited for before one is told, and then six times as long
_LAST_WORDS = 0.5  # seconds that lines of processes may take to get here
_STARTED = {  # for the processes of a Ray that starts here
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",  # its agents look for a head that is gone for so long, and not 60 s
    "RAY_prestart_worker_first_driver": "0",  # workers of the driver's interpreter, which nobody uses
}


class RayCluster(Cluster):
    """A Ray cluster that has been entered; made by `nrl.cluster`.

    Args:
        address: ``"ray"``, ``"auto"`` or ``"host:port"``.
        deadline: seconds that any single wait may take.
    """

    def __init__(self, address: str, deadline: float) -> None:
        import ray

        super().__init__(address)
        self.deadline = deadline
        self._groups: list[Any] = []
        self._bundles: list[tuple[Any, int]] = []  # of each slot: its group, and its place there
        self._meshes: list[RayProcesses] = []
        self._sound: set[tuple[str, str]] = set()  # nodes, and interpreters that can run a process there
        self._entered = not ray.is_initialized()
        self._own = False
        target = _target(address)
        _refuse_client(target)
        try:
            if self._entered:
                self._own = _enter(target)
            elif target not in (None, "auto", here := ray.get_runtime_context().gcs_address):
                raise PlacementError(
                    f"cluster: this process is on the Ray cluster at '{here}' already, and cannot join '{target}'; "
                    "leave it first (`ray.shutdown()`), or use the address 'auto'"
                )
            self._gpus = ray.cluster_resources().get("GPU", 0) > 0
        except BaseException:  # Ctrl-C, too
            if self._entered:
                ray.shutdown()
            raise

    def axes(self) -> frozenset[str]:
        """All of them."""
        return frozenset({"dp", "tp", "pp", "cp"})

    def reserve(self, n: int, *, strategy: Strategy = "PACK", deadline: float | None = None) -> Slots:
        """Make a placement group with a bundle for each slot, and wait for it."""
        from ray.util.placement_group import placement_group, remove_placement_group

        self.check_count(n)
        bundle = {"GPU": 1, "CPU": 1} if self._gpus else {"CPU": 1}
        limit = self.deadline if deadline is None else deadline
        if self._own and not self._room(n, bundle, strategy):  # it does not grow, and nobody else uses it
            raise PlacementError(_refusal(n, bundle, strategy, 0))
        group = placement_group([bundle] * n, strategy=strategy)
        self._groups.append(group)
        if not _had(group, _asked(n, bundle, strategy), limit):
            self._groups.remove(group)
            text = _refusal(n, bundle, strategy, limit)  # before the group that waits is gone
            remove_placement_group(group)
            raise PlacementError(text)
        first = len(self._bundles)
        self._bundles += [(group, place) for place in range(n)]
        return Slots(self, tuple(range(first, first + n)))

    def _room(self, n: int, bundle: Mapping[str, int], strategy: Strategy) -> bool:
        """Whether the one node of a cluster that was started here has room for so many more bundles."""
        import ray

        room = min(ray.cluster_resources().get(kind, 0) // count for kind, count in bundle.items())
        return n + len(self._bundles) <= room and (strategy != "STRICT_SPREAD" or n == 1)

    def start(self, mesh: Mesh, executable: Executable) -> Processes:
        """Start an actor in each slot, and let them meet."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundles = [self._bundles[index] for index in mesh.slots.indices]
        where = self._where(mesh.slots.indices)
        nodes = [where[index] for index in mesh.slots.indices]
        interpreters = _interpreters(mesh.name, executable, set(nodes), self.deadline, self._sound)
        shares = [sum(other == node for other in where) for node in nodes]
        environments = {
            node: {"py_executable": python} | profiling.nsight(mesh.name, python)
            for node, python in interpreters.items()
        }
        env = {"TOKENIZERS_PARALLELISM": "false"}
        if "OMP_NUM_THREADS" in os.environ:
            env["OMP_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"]
        env |= executable.env
        said = env.get("OMP_NUM_THREADS", "").partition(",")[0]  # OpenMP allows one number for each level
        threads = int(said) if said.isdecimal() else None
        actors: list[Any] = []
        for rank, ((group, place), node) in enumerate(zip(bundles, nodes, strict=True)):
            options: dict[str, Any] = {
                "num_cpus": 0,
                "num_gpus": 0.01 if self._gpus else 0,  # meshes on the same slots share its GPU
                "max_restarts": 0,
                "max_task_retries": 0,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place),
                "runtime_env": {"env_vars": env} | environments[node],
            }
            actor: Any = ray.remote(Worker).options(**options)
            actors.append(actor.remote(mesh.name, rank, mesh.size, shares[rank], threads, torch.initial_seed()))
        places = [(node, _address(node)) for node in nodes]
        processes = RayProcesses(mesh, actors, places, self.deadline, self._meshes if self._gpus else ())
        self._meshes.append(processes)
        return processes

    def _where(self, wanted: Sequence[int]) -> list[str]:
        """The node of each slot. When a node is lost, Ray moves its slots to others, if they have room."""
        from ray.util.placement_group import placement_group_table

        for group in {id(group): group for group, _ in map(self._bundles.__getitem__, wanted)}.values():
            if not group.wait(timeout_seconds=self.deadline):
                raise PlacementError(
                    f"mesh: a node of its slots is gone, and no other had room for them within {self.deadline:g} s; "
                    f"leave the cluster, and reserve fewer slots. {_stock()}"
                )
        found = {group.id: placement_group_table(group)["bundles_to_node_id"] for group in self._groups}
        return [str(found[group.id].get(place)) for group, place in self._bundles]

    def finish(self) -> None:
        """Wait for calls that are under way."""
        for processes in self._meshes:
            processes.finish()

    def close(self) -> None:
        """End every process, give the slots back, and leave Ray, which ends if it was started here."""
        import ray
        from ray.util.placement_group import remove_placement_group

        if not ray.is_initialized():
            return
        why = ClosedCluster(f"the cluster '{self.name}' has been left, and what it held is gone")
        if self._meshes:
            time.sleep(_LAST_WORDS)
        for processes in self._meshes:
            with contextlib.suppress(ray.exceptions.RayError):  # a cluster that is gone has ended them
                processes.close(why)
        for group in self._groups:
            with contextlib.suppress(ray.exceptions.RayError):
                remove_placement_group(group)
        if self._entered:
            ray.shutdown()


def _enter(target: str | None) -> bool:
    """Join a cluster or start one; whether it was started."""
    import ray

    ray_logs.hushed()
    try:
        if target:
            _knock(target)
            ray.init(address=target, configure_logging=False)
        else:
            _start(attempts=3)
    except Exception as error:  # Ray raises all kinds, of which some are Exception itself
        ray.shutdown()
        if not target:
            raise PlacementError(f"cluster: Ray does not start on this machine: {_first_line(error)}") from error
        if _asks_for_a_token(error):
            raise PlacementError(
                f"cluster: the Ray cluster at '{target}' asks for a token; set RAY_AUTH_MODE=token, and "
                "RAY_AUTH_TOKEN_PATH if the token is not in ~/.ray/auth_token"
            ) from error
        raise PlacementError(
            f"cluster: there is no Ray cluster at '{target}' ({_first_line(error)}); start one with "
            "`ray start --head`, or use the address 'ray' without RAY_ADDRESS to have one started here"
        ) from error
    ray_logs.echo()
    if target:
        print(f"cluster: joined Ray at {ray.get_runtime_context().gcs_address}; {_stock()}", flush=True)  # noqa: T201
    return not target


def _asks_for_a_token(error: BaseException | None) -> bool:
    """Ray says so several errors deep."""
    while error is not None:
        if "uthenticat" in f"{type(error).__name__} {error}":
            return True
        error = error.__cause__ or error.__context__
    return False


def _target(address: str) -> str | None:
    """The address of a running cluster; None: one is to be started."""
    named = os.environ.get("RAY_ADDRESS")  # Ray itself prefers it to "auto"
    return named or (None if address == "ray" else address) if address in ("ray", "auto") else address


def _refuse_client(target: str | None) -> None:
    if target and target.startswith("ray://"):
        raise PlacementError(
            f"cluster: {target} is an address of Ray Client, through which every batch and result would take a detour "
            "over a proxy, and which cannot pass tensors in shared memory. Run the program on a node of the cluster "
            "(`ray job submit -- python ...`) with the address 'auto'"
        )


def _start(attempts: int) -> None:
    """Start Ray here; a machine that is busy may need more time than Ray gives itself."""
    import ray

    cpus = max(_CPUS, os.cpu_count() or 1)
    for attempt in range(1, attempts + 1):
        try:
            with _environment(_STARTED):
                ray.init(address="local", num_cpus=cpus, include_dashboard=False, configure_logging=False)
            return
        except Exception as error:  # Ray raises a plain one where its own processes are slow
            ray.shutdown()
            if attempt == attempts:
                raise RuntimeError(_first_line(error)) from error


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set those that are not set, for what is started in the block."""
    new = variables.keys() - os.environ.keys()
    os.environ.update({name: variables[name] for name in new})
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)


def _knock(address: str) -> None:
    """Find out whether anything listens at ``host:port``: Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if host:
        socket.create_connection((host, int(port)), timeout=_KNOCKING).close()


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _had(group: Any, asked: str, deadline: float) -> bool:
    """Wait until a placement group is there, and tell what is waited for."""
    until = time.monotonic() + deadline
    patience = _SILENCE
    while (left := until - time.monotonic()) > patience:
        if group.wait(timeout_seconds=patience):
            return True
        print(f"reserve: waiting for {asked}; {_stock()}", flush=True)  # noqa: T201
        patience = 6 * _SILENCE
    return bool(group.wait(timeout_seconds=max(0.0, left)))


def _asked(n: int, bundle: Mapping[str, int], strategy: str) -> str:
    return f"{n} slots of {' and '.join(f'{count} {kind}' for kind, count in bundle.items())} each, {strategy}"


def _refusal(n: int, bundle: Mapping[str, int], strategy: str, waited: float) -> str:
    return (
        f"reserve: {_asked(n, bundle, strategy)}, cannot be had"
        + (f" (waited {waited:g} s)" if waited else "")
        + f"; {_stock()}. Ask for fewer slots, another strategy, or add nodes"
    )


def _stock() -> str:
    import ray

    kinds = [kind for kind in ("GPU", "CPU") if kind == "CPU" or ray.cluster_resources().get(kind)]

    def listed(resources: Mapping[str, float]) -> str:
        return ", ".join(f"{resources.get(kind, 0):g} {kind}" for kind in kinds)

    nodes = [node for node in ray.nodes() if node["Alive"]]
    has = "; ".join(f"node {node['NodeManagerAddress']}: {listed(node['Resources'])}" for node in nodes)
    return f"the cluster has {len(nodes)} node(s) ({has}), of which {listed(ray.available_resources())} are free"


def _interpreters(
    mesh: str, executable: Executable, nodes: Collection[str], deadline: float, sound: set[tuple[str, str]]
) -> dict[str, str]:
    """Which Python runs the processes on each node; environments that are not there are built, on all nodes at once."""
    import ray

    version = tuple(sys.version_info[:2])
    own, asked = ".".join(map(str, version)), executable.python
    if asked is not None and asked.split(".")[:2] != own.split("."):
        raise ExecutableError(
            f"mesh '{mesh}': executable '{executable.name}' is of Python {asked}, and the driver of Python {own}. "
            "What they send each other can be read by the same version only: leave out python=, or run the driver with "
            f"{asked}"
        )
    recipe = venvs.recipe(executable)
    if recipe.interpreter is not None:
        found = dict.fromkeys(nodes, recipe.interpreter)
    else:
        build = functools.partial(_on_nodes, mesh, f"{recipe.name} cannot be provided", deadline)
        found = {
            node: str(python) for node, python in build(provision.provide, dict.fromkeys(nodes, (recipe,))).items()
        }
    new = set(found.items()) - sound
    look = functools.partial(_on_nodes, mesh, f"executable '{executable.name}' cannot be looked at", deadline)
    faults = look(on_node.fault, {node: (python, version, ray.__version__) for node, python in new})
    for node, fault in faults.items():
        if fault:
            hint = (
                "it is the driver's own interpreter; choose an executable that is built on each node, such as 'base'"
                if recipe.interpreter is not None
                else "build it again with NRL_FORCE_REBUILD_VENVS=1"
            )
            raise ExecutableError(
                f"mesh '{mesh}': executable '{executable.name}' cannot run on node {_address(node)}, where it is "
                f"{found[node]}: {fault}. Hint: {hint}"
            )
    sound |= new
    return found


def _on_nodes(
    mesh: str, failed: str, deadline: float, fn: Callable[..., Any], args: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """Call a function on nodes, each with its arguments and ``deadline``; on this one in this process."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    this = ray.get_runtime_context().get_node_id()
    refs: dict[str, Any] = {}
    for node in args.keys() - {this}:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        task: Any = ray.remote(on_node.by_value(fn))
        task = task.options(num_cpus=0, max_retries=0, scheduling_strategy=there)
        refs[node] = task.remote(*args[node], deadline=deadline)
    until = time.monotonic() + deadline
    found = {this: fn(*args[this], deadline=deadline)} if this in args else {}
    for node, ref in refs.items():
        try:
            found[node] = ray.get(ref, timeout=max(0.0, until - time.monotonic()))
        except ray.exceptions.GetTimeoutError:
            raise DeadlineExceeded(
                f"mesh '{mesh}': {failed} on node {_address(node)}: no answer within {deadline:g} s"
            ) from None
        except ray.exceptions.RayTaskError as error:
            cause = error.cause or error
            raise ExecutableError(f"mesh '{mesh}': {failed} on node {_address(node)}: {cause}") from error
        except ray.exceptions.RayError as error:
            raise LostActor(f"mesh '{mesh}'", mesh, None, _address(node), " ".join(str(error).split())[:300]) from None
    return found


def _address(node_id: str) -> str:
    import ray

    found = [node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id]
    return str(found[0]) if found else node_id
