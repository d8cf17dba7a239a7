"""The Ray cluster: placement groups, and actors in them."""

import contextlib
import functools
import os
import time
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from nrl.errors import ClosedCluster, PlacementError
from nrl.log.slow_wait import say, wait_until
from nrl.runtime.mesh.placement import Cluster, Kind, Mesh, Slots, Strategy
from nrl.runtime.mesh.processes import Processes
from nrl.runtime.mesh.task_queue import SIDE_BY_SIDE
from nrl.runtime.ports import NRL_PORTS, ports
from nrl.runtime.ray.actor import Actor, split_env
from nrl.runtime.ray.clock_skew import HostClock, read_clocks, warn_if_uneven
from nrl.runtime.ray.connection import available_resources, connect, disconnect, list_nodes, resolve_address
from nrl.runtime.ray.nodes import find_interpreters, interpreter_command, send_by_value
from nrl.runtime.ray.pending_call import ActorLocation
from nrl.runtime.ray.placement_groups import PATIENCE, SlotRequest, list_bundle_nodes, reserve_slots, wait_until_placed
from nrl.runtime.ray.ray_processes import RayProcesses
from nrl.runtime.venvs.registry import Executable

__all__ = ["RayCluster"]

_LAST_WORDS = 0.5  # seconds for the last lines of processes to arrive
_NOTICE = 120.0  # seconds for threads to notice that the cluster has been left
_GLANCE = 1.0  # seconds between two checks whether it has been left


@attrs.define(eq=False)
class _Slot:
    """A slot: its bundle, and the Ray id of the bundle's node at the last update."""

    group: Any
    bundle: int
    request: SlotRequest
    node: str
    fewer: bool  # whether the program can do with fewer, if its node is lost


class RayCluster(Cluster):
    """A Ray cluster that has been entered; made by `nrl.cluster`.

    Args:
        address: ``"ray"``, ``"auto"`` or ``"host:port"``.
        deadline: seconds that any single wait may take.
    """

    remote = True

    def __init__(self, address: str, deadline: float) -> None:
        import ray

        ports()  # raises before anything begins
        super().__init__(address)
        self.deadline = deadline
        self._groups: list[Any] = []
        self._slots: list[_Slot] = []
        self._addresses: dict[str, str] = {}  # addresses of nodes by Ray id, lost nodes included
        self._meshes: list[RayProcesses] = []
        self._hosts: dict[str, HostClock] = {}  # clocks by Ray id of the node
        self._sound: set[tuple[str, str]] = set()  # pairs of a node and an interpreter that can run a process there
        self._joined = not ray.is_initialized()
        self._started_here = False
        head = resolve_address(address)
        try:
            if self._joined:
                self._started_here = connect(head, deadline=deadline)
            elif head not in (None, "auto", current := ray.get_runtime_context().gcs_address):
                raise PlacementError(
                    f"cluster: this process is on the Ray cluster at '{current}' already, and cannot join '{head}'; "
                    "leave it first (`ray.shutdown()`), or use the address 'auto'"
                )
        except BaseException:  # Ctrl-C, too
            if self._joined:
                disconnect()
            raise

    def reserve(
        self,
        n: int,
        *,
        strategy: Strategy | None = None,
        per_host: int | None = None,
        kind: Kind | None = None,
        least: int | None = None,
        deadline: float | None = None,
    ) -> Slots:
        """Make a placement group with a bundle for each slot, and wait for it."""
        self.check_reserve(n, strategy, per_host, kind, least)
        limit = self.deadline if deadline is None else deadline
        request, group = reserve_slots(n, strategy or "PACK", per_host, kind, least, limit, self._fits)
        self._groups.append(group)
        nodes = list_bundle_nodes(group)
        first, order = len(self._slots), list(dict.fromkeys(nodes))
        # Slots of a host follow one another.
        bundles = sorted(range(request.n), key=lambda place: order.index(nodes[place]))
        self._slots += [_Slot(group, bundle, request, str(nodes[bundle]), least is not None) for bundle in bundles]
        self._learn_addresses()
        return Slots(self, tuple(range(first, first + request.n)))

    def _fits(self, request: SlotRequest) -> bool:
        """Return whether there may be room: a cluster started here never grows, and no other program frees slots."""
        import ray

        if not self._started_here:
            return True
        total, taken = (
            ray.cluster_resources(),
            {"CPU": len(self._slots), "GPU": sum(s.request.gpu for s in self._slots)},
        )
        room = min(total.get(kind, 0) - taken[kind] for kind in request.bundle)
        return request.n <= room and (request.n == 1 or request.strategy != "STRICT_SPREAD") and len(request.sizes) == 1

    def hosts(self, indices: Sequence[int]) -> tuple[str, ...]:
        """Return the address of each slot's node at the last update."""
        return tuple(self._addresses.get(self._slots[index].node, "?") for index in indices)

    def are_gpus(self, indices: Sequence[int]) -> bool:
        """Return whether a GPU is reserved for each slot."""
        return all(self._slots[index].request.gpu for index in indices)

    def _learn_addresses(self) -> None:
        import ray

        self._addresses |= {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}

    def start(self, mesh: Mesh, executable: Executable) -> Processes:
        """Start an actor in each slot, and let them meet."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        slots = [self._slots[index] for index in mesh.slots.indices]
        self._update_nodes(mesh)
        nodes = [slot.node for slot in slots]
        pythons = find_interpreters(mesh.name, executable, set(nodes), self.deadline, self._sound)
        new = set(nodes) - self._hosts.keys()
        self._hosts |= read_clocks(mesh.name, sorted(new), self._addresses, self.deadline)
        shares = [sum(other.node == node for other in self._slots) for node in nodes]
        env = {"TOKENIZERS_PARALLELISM": "false"}
        env |= {name: os.environ[name] for name in ("OMP_NUM_THREADS", NRL_PORTS) if name in os.environ}
        env |= executable.env
        setting = env.get("OMP_NUM_THREADS", "").partition(",")[0]  # OpenMP allows one number for each level
        threads = int(setting) if setting.isdecimal() else None
        if threads is None:
            threads_by_node = {
                node: max(1, self._hosts[node].cores // share) for node, share in zip(nodes, shares, strict=True)
            }
            warn_if_uneven(mesh.name, threads_by_node, self._addresses)
        early, late = split_env(env)
        kind: Any = ray.remote(send_by_value(Actor))
        seed = torch.initial_seed()

        def start_actor(name: str, threads_of_it: int, rank: int) -> Any:
            slot = slots[rank]
            options: dict[str, Any] = {
                "num_cpus": 0,
                # Meshes on the same slots share its GPU, and so do helpers.
                "num_gpus": 0.01 if slot.request.gpu else 0,
                "max_restarts": 0,
                "max_task_retries": 0,
                "max_concurrency": threads_of_it,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    slot.group, placement_group_bundle_index=slot.bundle
                ),
                "runtime_env": {
                    "env_vars": early,
                    "py_executable": interpreter_command(name, pythons[slot.node].python),
                },
            }
            args = (mesh.name, rank, mesh.size, shares[rank], threads, seed)
            return kind.options(**options).remote(late, pythons[slot.node].sources, f"{name}[{rank}]", *args)

        actors = [start_actor(mesh.name, 1, rank) for rank in range(mesh.size)]
        # One more thread reports the end of the process.
        helper = functools.partial(start_actor, f"{mesh.name}.helper", SIDE_BY_SIDE + 1)
        locations = [ActorLocation(node, self._addresses[node], self._hosts[node].clock_skew) for node in nodes]
        processes = RayProcesses(
            mesh, actors, locations, self.deadline, helper, self._meshes if mesh.slots.gpus else ()
        )
        self._meshes.append(processes)
        self.check_open(f"mesh '{mesh.name}'")  # a thread may start it while the cluster is left
        return processes

    def _update_nodes(self, mesh: Mesh) -> None:
        """Update each slot's node. When a node is lost, Ray moves its slots to others, if they have room."""
        from ray.util.placement_group import placement_group_table

        groups = {id(slot.group): slot.group for slot in map(self._slots.__getitem__, mesh.slots.indices)}
        for group in groups.values():
            if placement_group_table(group)["state"] != "CREATED":
                self._await_room(mesh, group)
        moved = {id(group): list_bundle_nodes(group) for group in self._groups}
        for slot in self._slots:
            slot.node = moved[id(slot.group)][slot.bundle] or slot.node
        self._learn_addresses()

    def _await_room(self, mesh: Mesh, group: Any) -> None:
        """Wait until Ray has moved the slots of lost nodes; report this at once."""
        alive = {node["NodeID"] for node in list_nodes()}
        lost = [i for i, slot in enumerate(self._slots) if slot.group is group and slot.node not in alive]
        hosts = ", ".join(sorted(set(self.hosts(lost))))
        subject = f"mesh '{mesh.name}': " + (f"node {hosts} of its slots is gone" if lost else "its slots are moved")
        if lost and self._slots[lost[0]].request.per_host is not None:
            raise PlacementError(
                f"{subject}, and slots that were reserved with per_host= stay where they are; leave the cluster, and "
                f"reserve again what is left. {available_resources()}"
            )
        fewer = any(slot.fewer for slot in self._slots if slot.group is group)
        limit = min(PATIENCE, self.deadline) if fewer else self.deadline
        goal = f"a place for slots {', '.join(map(str, lost))}" if lost else "their new places"

        def describe(seconds: float) -> str:
            return (
                f"{subject}; waiting for {goal} on other nodes ({seconds:.0f} of {limit:g} s); {available_resources()}"
            )

        def are_placed(seconds: float) -> bool:
            self.check_open(f"mesh '{mesh.name}'")
            return wait_until_placed(group, seconds)

        say(describe(0.0))
        if not wait_until(are_placed, limit, describe, poll_seconds=_GLANCE):
            raise PlacementError(
                f"{subject}, and no other had room for them within {limit:g} s; leave the cluster, and reserve fewer "
                f"slots. {available_resources()}"
            )

    def finish(self) -> None:
        """Wait for running calls."""
        for processes in self._meshes:
            processes.finish()

    def close(self) -> None:
        """End every process, give the slots back, and leave Ray, which ends if it was started here."""
        import ray
        from ray.util.placement_group import remove_placement_group

        if not ray.is_initialized():
            return
        reason = ClosedCluster(f"the cluster '{self.name}' has been left, and what it held is gone")
        if self._meshes:
            time.sleep(_LAST_WORDS)
        self._end_meshes(reason)
        if not wait_until(self.join, _NOTICE, f"cluster '{self.name}': waiting for its threads ({{:.0f}} s)".format):
            say(f"cluster '{self.name}': left with threads that go on; where one asks Ray now, this process may end")
        self._end_meshes(reason)  # A thread may have started another mesh.
        for group in self._groups:
            with contextlib.suppress(ray.exceptions.RayError):
                remove_placement_group(group)
        if self._joined:
            disconnect()

    def _end_meshes(self, reason: ClosedCluster) -> None:
        """End the processes of every mesh."""
        import ray

        while self._meshes:
            with contextlib.suppress(ray.exceptions.RayError):  # a cluster that is gone has ended them
                self._meshes.pop().close(reason)
