"""Placement groups: asking Ray for slots, and waiting for them."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from nrl.errors import PlacementError
from nrl.log.slow_wait import say, wait_until
from nrl.runtime.mesh.placement import Kind, Strategy
from nrl.runtime.ray.connection import available_resources
from nrl.runtime.restart_state import is_restart

__all__ = ["PATIENCE", "SlotRequest", "list_bundle_nodes", "reserve_slots", "wait_until_placed"]

PATIENCE = 60.0
"""Seconds to wait for all slots, if fewer are acceptable."""

_RETRY_PATIENCE = 20.0  # seconds to wait for fewer slots
_LOOK = 5.0  # seconds between two checks for new nodes of the cluster
_MOMENT = 30.0  # seconds to wait for slots on chosen hosts, which another program may have taken


@attrs.frozen
class SlotRequest:
    """A request for slots.

    Args:
        n: how many.
        strategy: of Ray's placement groups.
        per_host: so many on each host; then there is no strategy.
        gpu: whether a slot is a GPU and a CPU, or a CPU alone.

    >>> print(SlotRequest(6, "PACK", 4, True))
    6 slots of 1 GPU and 1 CPU each, 4 on each host
    """

    n: int
    strategy: Strategy
    per_host: int | None
    gpu: bool

    @property
    def bundle(self) -> dict[str, float]:
        """Resources that Ray reserves for a slot."""
        return {"GPU": 1, "CPU": 1} if self.gpu else {"CPU": 1}

    @property
    def sizes(self) -> list[int]:
        """Number of slots on each host, if the program chose it."""
        per_host = self.per_host or self.n
        return [min(per_host, self.n - first) for first in range(0, self.n, per_host)]

    def __str__(self) -> str:
        resources = " and ".join(f"{count:g} {kind}" for kind, count in self.bundle.items())
        spread = self.strategy if self.per_host is None else f"{self.per_host} on each host"
        return f"{self.n} slots of {resources} each, {spread}"

    def describe_refusal(self, waited: float) -> str:
        """Return the text of the error: the slots cannot be had."""
        return (
            f"reserve: {self}, cannot be had"
            + (f" (waited {waited:g} s)" if waited else "")
            + f"; {available_resources(self.gpu)}. Ask for fewer slots, another strategy, or add nodes"
        )

    def describe_wait(self, seconds: float) -> str:
        """Return a line of progress while waiting for the slots."""
        note = ", since no node has a GPU yet" if self.gpu and not _has_gpus() else ""
        return f"reserve: waiting for {self}{note} ({seconds:.0f} s); {available_resources(self.gpu)}"


def reserve_slots(
    n: int,
    strategy: Strategy,
    per_host: int | None,
    kind: Kind | None,
    least: int | None,
    limit: float,
    fits: Callable[[SlotRequest], bool],
) -> tuple[SlotRequest, Any]:
    """Reserve slots; return the request that was granted, and its placement group.

    Args:
        n: as of `nrl.runtime.Cluster.reserve`, and so are the next three.
        strategy: likewise.
        per_host: likewise.
        kind: likewise; None: GPUs, if the cluster has any by the time that the slots are there.
        least: likewise.
        limit: seconds.
        fits: whether to wait at all.

    Raises:
        PlacementError: they were not there in time, or do not fit.
    """
    began = time.monotonic()
    until, count = began + limit, n
    least = least if is_restart() else None
    while True:
        request = SlotRequest(count, strategy, per_host, kind == "gpu" or (kind is None and _has_gpus()))
        if not fits(request):
            if least is None or count == least:
                raise PlacementError(request.describe_refusal(0))
            count = max(least, min(count - 1, _count_free(request)))
            continue

        def has_changed(gpu: bool = request.gpu) -> bool:
            return kind is None and not gpu and _has_gpus()

        remaining = max(0.0, until - time.monotonic())
        group = _await_group(
            request,
            has_changed,
            remaining if least is None else min(remaining, PATIENCE if count == n else _RETRY_PATIENCE),
        )
        if group is not None:
            return request, group
        if not has_changed():
            if time.monotonic() >= until:
                raise PlacementError(request.describe_refusal(limit))
            count = n if least is None else max(least, min(n, _count_free(request)))
            if count < n:
                say(f"reserve: {request}, are not to be had within {time.monotonic() - began:.0f} s; {count} will do")


def _await_group(request: SlotRequest, has_changed: Callable[[], bool], limit: float) -> Any:
    """Wait for a placement group; None: it was not granted in time, or the request should change by now."""
    bundles = [request.bundle] * request.n
    if request.per_host is None:
        return _create_group(request, has_changed, limit, bundles, request.strategy)
    # Ray cannot express "four on each host": find full hosts first, then bind a bundle for each slot to its host's id.
    host_bundles = [{kind: count * size for kind, count in request.bundle.items()} for size in request.sizes]
    until, group = time.monotonic() + limit, None
    while group is None and (remaining := until - time.monotonic()) > 0:
        if (spread := _create_group(request, has_changed, remaining, host_bundles, "STRICT_SPREAD")) is None:
            return None
        hosts = list_bundle_nodes(spread)
        _remove(spread)
        selectors = [
            {"ray.io/node-id": host} for host, size in zip(hosts, request.sizes, strict=True) for _ in range(size)
        ]
        remaining = min(_MOMENT, max(1.0, until - time.monotonic()))
        group = _create_group(request, has_changed, remaining, bundles, "PACK", bundle_label_selector=selectors)
    return group


def _create_group(
    request: SlotRequest,
    has_changed: Callable[[], bool],
    limit: float,
    bundles: Sequence[dict[str, float]],
    strategy: Strategy,
    **options: Any,
) -> Any:
    from ray.util.placement_group import placement_group

    group = placement_group(list(bundles), strategy=strategy, **options)
    over = False

    def ready(seconds: float) -> bool:
        nonlocal over
        is_placed = wait_until_placed(group, seconds)
        over = has_changed()
        return is_placed or over

    try:
        if wait_until(ready, max(0.0, limit), request.describe_wait, poll_seconds=_LOOK) and not over:
            return group
    except BaseException:  # Ctrl-C, too
        _remove(group)
        raise
    _remove(group)
    return None


def wait_until_placed(group: Any, seconds: float) -> bool:
    """Return whether a placement group is placed within about so many seconds: Ray waits for whole seconds."""
    return bool(group.wait(math.ceil(seconds)))


def list_bundle_nodes(group: Any) -> list[str | None]:
    """Return the Ray id of the node of each bundle; None: the bundle has no node now."""
    from ray.util.placement_group import placement_group_table

    nodes = placement_group_table(group)["bundles_to_node_id"]
    return [str(nodes[index]) if nodes.get(index) else None for index in range(len(group.bundle_specs))]


def _remove(group: Any) -> None:
    from ray.util.placement_group import remove_placement_group

    remove_placement_group(group)


def _count_free(request: SlotRequest) -> int:
    """Return how many slots the cluster has room for, on any nodes."""
    import ray

    free = ray.available_resources()
    return int(min(free.get(kind, 0) // count for kind, count in request.bundle.items()))


def _has_gpus() -> bool:
    import ray

    return bool(ray.cluster_resources().get("GPU", 0) > 0)
