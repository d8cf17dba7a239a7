"""The Ray cluster: placement groups, and actors in them."""

import contextlib
import functools
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nrl.errors import ClosedCluster, PlacementError
from nrl.log.waits import wait_until
from nrl.runtime.executables.registry import Executable
from nrl.runtime.mesh.placement import Cluster, Mesh, Processes, Slots, Strategy
from nrl.runtime.mesh.submitting import SIDE_BY_SIDE
from nrl.runtime.ray.actor import Actor, split
from nrl.runtime.ray.connection import enter, leave, stock, target
from nrl.runtime.ray.nodes import address_of, by_value, command, interpreters
from nrl.runtime.ray.processes import RayProcesses

__all__ = ["RayCluster"]

_LAST_WORDS = 0.5  # seconds for the last lines of processes to get here


class RayCluster(Cluster):
    """A Ray cluster that has been entered; made by `nrl.cluster`.

    Args:
        address: ``"ray"``, ``"auto"`` or ``"host:port"``.
        deadline: seconds that any single wait may take.
    """

    remote = True

    def __init__(self, address: str, deadline: float) -> None:
        import ray

        super().__init__(address)
        self.deadline = deadline
        self._groups: list[Any] = []
        self._bundles: list[tuple[Any, int]] = []  # for each slot, its group and its place there
        self._meshes: list[RayProcesses] = []
        self._sound: set[tuple[str, str]] = set()  # pairs of a node and an interpreter that can run a process there
        self._entered = not ray.is_initialized()
        self._own = False
        where = target(address)
        try:
            if self._entered:
                self._own = enter(where)
            elif where not in (None, "auto", here := ray.get_runtime_context().gcs_address):
                raise PlacementError(
                    f"cluster: this process is on the Ray cluster at '{here}' already, and cannot join '{where}'; "
                    "leave it first (`ray.shutdown()`), or use the address 'auto'"
                )
            self.gpus = ray.cluster_resources().get("GPU", 0) > 0
        except BaseException:  # Ctrl-C, too
            if self._entered:
                leave()
            raise

    def reserve(self, n: int, *, strategy: Strategy = "PACK", deadline: float | None = None) -> Slots:
        """Make a placement group with a bundle for each slot, and wait for it."""
        from ray.util.placement_group import placement_group, remove_placement_group

        self.check_count(n)
        bundle = {"GPU": 1, "CPU": 1} if self.gpus else {"CPU": 1}
        limit = self.deadline if deadline is None else deadline
        if self._own and not self._room(n, bundle, strategy):  # this cluster never grows, and nobody else gives back
            raise PlacementError(_refusal(n, bundle, strategy, 0))
        group = placement_group([bundle] * n, strategy=strategy)
        self._groups.append(group)
        asked = _asked(n, bundle, strategy)
        if not wait_until(group.wait, limit, lambda _: f"reserve: waiting for {asked}; {stock()}"):
            self._groups.remove(group)
            text = _refusal(n, bundle, strategy, limit)  # before the group that waits is gone
            remove_placement_group(group)
            raise PlacementError(text)
        first = len(self._bundles)
        self._bundles += [(group, place) for place in range(n)]
        return Slots(self, tuple(range(first, first + n)))

    def _room(self, n: int, bundle: Mapping[str, int], strategy: Strategy) -> bool:
        """Whether the one node of a cluster that was started here has room for ``n`` more bundles."""
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
        pythons = interpreters(mesh.name, executable, set(nodes), self.deadline, self._sound)
        shares = [sum(other == node for other in where) for node in nodes]
        env = {"TOKENIZERS_PARALLELISM": "false"}
        if "OMP_NUM_THREADS" in os.environ:
            env["OMP_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"]
        env |= executable.env
        said = env.get("OMP_NUM_THREADS", "").partition(",")[0]  # OpenMP allows one number for each level
        threads = int(said) if said.isdecimal() else None
        early, late = split(env)
        kind: Any = ray.remote(by_value(Actor))
        seed = torch.initial_seed()

        def begin(name: str, threads_of_it: int, rank: int) -> Any:
            (group, place), node = bundles[rank], nodes[rank]
            options: dict[str, Any] = {
                "num_cpus": 0,
                "num_gpus": 0.01 if self.gpus else 0,  # meshes on the same slots share its GPU, and so do helpers
                "max_restarts": 0,
                "max_task_retries": 0,
                "max_concurrency": threads_of_it,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place),
                "runtime_env": {"env_vars": early, "py_executable": command(name, pythons[node].python)},
            }
            given = (mesh.name, rank, mesh.size, shares[rank], threads, seed)
            return kind.options(**options).remote(late, pythons[node].sources, f"{name}[{rank}]", *given)

        actors = [begin(mesh.name, 1, rank) for rank in range(mesh.size)]
        helper = functools.partial(begin, f"{mesh.name}.helper", SIDE_BY_SIDE + 1)  # one more, to be told of its end
        places = [(node, address_of(node)) for node in nodes]
        processes = RayProcesses(mesh, actors, places, self.deadline, helper, self._meshes if self.gpus else ())
        self._meshes.append(processes)
        return processes

    def _where(self, wanted: Sequence[int]) -> list[str]:
        """The node of each slot. When a node is lost, Ray moves its slots to others, if they have room."""
        from ray.util.placement_group import placement_group_table

        for group in {id(group): group for group, _ in map(self._bundles.__getitem__, wanted)}.values():
            if not group.wait(timeout_seconds=self.deadline):
                raise PlacementError(
                    f"mesh: a node of its slots is gone, and no other had room for them within {self.deadline:g} s; "
                    f"leave the cluster, and reserve fewer slots. {stock()}"
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
            leave()


def _asked(n: int, bundle: Mapping[str, int], strategy: str) -> str:
    return f"{n} slots of {' and '.join(f'{count} {kind}' for kind, count in bundle.items())} each, {strategy}"


def _refusal(n: int, bundle: Mapping[str, int], strategy: str, waited: float) -> str:
    return (
        f"reserve: {_asked(n, bundle, strategy)}, cannot be had"
        + (f" (waited {waited:g} s)" if waited else "")
        + f"; {stock()}. Ask for fewer slots, another strategy, or add nodes"
    )
