"""A Ray cluster: started or joined, placement groups on it, and actors in them."""

import os
from collections.abc import Collection, Mapping
from typing import Any

from nrl.errors import ClosedCluster, DeadlineExceeded, ExecutableError, PlacementError
from nrl.runtime import profiling, provision, venvs
from nrl.runtime.executables import Executable
from nrl.runtime.placement import Cluster, Mesh, Processes, Slots, Strategy
from nrl.runtime.ray_processes import RayProcesses
from nrl.runtime.worker import Worker

__all__ = ["RayCluster"]

_CPUS = 64  # logical ones of a cluster on this machine: its processes may share cores


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
        self._bundles: list[tuple[Any, int, str]] = []  # of each slot: its group, its place there, its node
        self._meshes: list[RayProcesses] = []
        self._entered = not ray.is_initialized()
        self._own = False
        if self._entered:
            self._own = _enter(address)
        self._gpus = ray.cluster_resources().get("GPU", 0) > 0

    def axes(self) -> frozenset[str]:
        """All of them."""
        return frozenset({"dp", "tp", "pp", "cp"})

    def reserve(self, n: int, *, strategy: Strategy = "PACK", deadline: float | None = None) -> Slots:
        """Make a placement group with a bundle for each slot, and wait for it."""
        import ray
        from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

        self.check_count(n)
        bundle = {"GPU": 1, "CPU": 1} if self._gpus else {"CPU": 1}
        group = placement_group([bundle] * n, strategy=strategy)
        limit = self.deadline if deadline is None else deadline
        impossible = self._own and any(
            count * n > ray.cluster_resources().get(kind, 0) for kind, count in bundle.items()
        )
        if impossible or not group.wait(timeout_seconds=limit):
            remove_placement_group(group)
            raise PlacementError(_refusal(n, bundle, strategy, 0 if impossible else limit))
        self._groups.append(group)
        nodes = placement_group_table(group)["bundles_to_node_id"]
        first = len(self._bundles)
        self._bundles += [(group, place, nodes[place]) for place in range(n)]
        return Slots(self, tuple(range(first, first + n)))

    def start(self, mesh: Mesh, executable: Executable) -> Processes:
        """Start an actor in each slot, and let them meet."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundles = [self._bundles[index] for index in mesh.slots.indices]
        interpreters = _interpreters(executable, {node for _, _, node in bundles}, self.deadline)
        shares = [sum(other == node for _, _, other in self._bundles) for _, _, node in bundles]
        environments = {
            node: {"py_executable": python} | profiling.nsight(mesh.name, python)
            for node, python in interpreters.items()
        }
        env = {"TOKENIZERS_PARALLELISM": "false", **dict(executable.env)}
        if "OMP_NUM_THREADS" in os.environ:
            env |= {"OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"], "NRL_THREADS": os.environ["OMP_NUM_THREADS"]}
        actors: list[Any] = []
        for rank, (group, place, node) in enumerate(bundles):
            options: dict[str, Any] = {
                "num_cpus": 0,
                "num_gpus": 0.01 if self._gpus else 0,  # meshes on the same slots share its GPU
                "max_restarts": 0,
                "max_task_retries": 0,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place),
                "runtime_env": {"env_vars": env} | environments[node],
            }
            actor: Any = ray.remote(Worker).options(**options)
            actors.append(actor.remote(mesh.name, rank, mesh.size, shares[rank]))
        nodes = [(node, _address(node)) for _, _, node in bundles]
        processes = RayProcesses(mesh, actors, nodes, self.deadline, self._meshes if self._gpus else ())
        self._meshes.append(processes)
        return processes

    def close(self) -> None:
        """End every process, give the slots back, and leave Ray, which ends if it was started here."""
        import ray
        from ray.util.placement_group import remove_placement_group

        if not ray.is_initialized():
            return
        why = ClosedCluster(f"the cluster '{self.name}' has been left, and what it held is gone")
        for processes in self._meshes:
            processes.close(why)
        for group in self._groups:
            remove_placement_group(group)
        if self._entered:
            ray.shutdown()


def _enter(address: str) -> bool:
    """Join a cluster or start one; whether it was started."""
    import ray

    target = os.environ.get("RAY_ADDRESS") if address == "ray" else address
    if target and target.startswith("ray://"):
        raise PlacementError(
            f"cluster: {target} is an address of Ray Client, through which every batch and result would take a detour "
            "over a proxy, and which cannot pass tensors in shared memory. Run the program on a node of the cluster "
            "(`ray job submit -- python ...`) with the address 'auto'"
        )
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # each mesh says which interpreter it runs in
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # whoever waits for a call is told
    try:
        if target:
            ray.init(address=target, configure_logging=False)
        else:
            cpus = max(_CPUS, os.cpu_count() or 1)
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, configure_logging=False)
    except ConnectionError as error:
        raise PlacementError(
            f"cluster: there is no Ray cluster at '{target}' ({str(error).splitlines()[0]}); start one with "
            "`ray start --head`, or use the address 'ray' without RAY_ADDRESS to have one started here"
        ) from error
    return not target


def _refusal(n: int, bundle: dict[str, int], strategy: str, waited: float) -> str:
    import ray

    asked = " and ".join(f"{count} {kind}" for kind, count in bundle.items())
    nodes = [node for node in ray.nodes() if node["Alive"]]
    free = ray.available_resources()

    def listed(resources: Mapping[str, float]) -> str:
        return ", ".join(f"{resources.get(kind, 0):g} {kind}" for kind in bundle)

    has = "; ".join(f"node {node['NodeManagerAddress']}: {listed(node['Resources'])}" for node in nodes)
    return (
        f"reserve: {n} slots of {asked} each, {strategy}, cannot be had"
        + (f" (waited {waited:g} s)" if waited else "")
        + f"; the cluster has {len(nodes)} node(s) ({has}), of which {listed(free)} are free. "
        + "Ask for fewer slots, another strategy, or add nodes"
    )


def _interpreters(executable: Executable, nodes: Collection[str], deadline: float) -> dict[str, str]:
    """Which Python runs the processes on each node; environments that are not there are built, on all nodes at once."""
    import ray
    from ray import cloudpickle
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    recipe = venvs.recipe(executable)
    if recipe.interpreter is not None:
        return dict.fromkeys(nodes, recipe.interpreter)
    cloudpickle.register_pickle_by_value(provision)  # a node's default Python need not have nrl
    this = ray.get_runtime_context().get_node_id()
    building: dict[str, Any] = {}
    for node in dict.fromkeys(nodes):
        if node != this:
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            task: Any = ray.remote(provision.provide).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
            building[node] = task.remote(recipe, deadline=deadline)
    found = {this: str(provision.provide(recipe, deadline=deadline))} if this in nodes else {}
    for node, ref in building.items():
        try:
            found[node] = str(ray.get(ref, timeout=deadline))
        except ray.exceptions.GetTimeoutError as error:
            raise DeadlineExceeded(
                f"mesh: {recipe.name} was not built on node {_address(node)} within {deadline:g} s"
            ) from error
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            raise ExecutableError(
                f"mesh: {recipe.name} cannot be provided on node {_address(node)}: {cause}"
            ) from error
    return found


def _address(node_id: str) -> str:
    import ray

    found = [node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id]
    return str(found[0]) if found else node_id
