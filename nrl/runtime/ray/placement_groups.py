"""Placement groups: asking Ray for slots, and waiting for them."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from nrl.errors import PlacementError
from nrl.log.slow_wait import say, wait_until
from nrl.runtime.mesh.placement import Kind, Strategy
from nrl.runtime.ray.connection import stock
from nrl.runtime.restart_state import begun_again

__all__ = ["PATIENCE", "Wanted", "nodes_of", "placed", "reserved"]

PATIENCE = 60.0
"""Seconds for all slots, where fewer will do."""

_SOME = 20.0  # for those
_LOOK = 5.0  # seconds between two looks at what has joined the cluster
_MOMENT = 30.0  # seconds in which slots on chosen hosts are there, unless another program has taken them


@attrs.frozen
class Wanted:
    """Slots that a program asks for.

    Args:
        n: how many.
        strategy: of Ray's placement groups.
        per_host: so many on each host; then there is no strategy.
        gpu: whether a slot is a GPU and a CPU, or a CPU alone.

    >>> print(Wanted(6, "PACK", 4, True))
    6 slots of 1 GPU and 1 CPU each, 4 on each host
    """

    n: int
    strategy: Strategy
    per_host: int | None
    gpu: bool

    @property
    def bundle(self) -> dict[str, float]:
        """What Ray sets aside for a slot."""
        return {"GPU": 1, "CPU": 1} if self.gpu else {"CPU": 1}

    @property
    def sizes(self) -> list[int]:
        """How many slots on each host, where the program says so."""
        each = self.per_host or self.n
        return [min(each, self.n - first) for first in range(0, self.n, each)]

    def __str__(self) -> str:
        each = " and ".join(f"{count:g} {kind}" for kind, count in self.bundle.items())
        where = self.strategy if self.per_host is None else f"{self.per_host} on each host"
        return f"{self.n} slots of {each} each, {where}"

    def refusal(self, waited: float) -> str:
        """Why they cannot be had."""
        return (
            f"reserve: {self}, cannot be had"
            + (f" (waited {waited:g} s)" if waited else "")
            + f"; {stock(self.gpu)}. Ask for fewer slots, another strategy, or add nodes"
        )

    def waiting(self, seconds: float) -> str:
        """A line while they are not there yet."""
        none = ", since no node has a GPU yet" if self.gpu and not _gpus() else ""
        return f"reserve: waiting for {self}{none} ({seconds:.0f} s); {stock(self.gpu)}"


def reserved(
    n: int,
    strategy: Strategy,
    per_host: int | None,
    kind: Kind | None,
    least: int | None,
    limit: float,
    fits: Callable[[Wanted], bool],
) -> tuple[Wanted, Any]:
    """What was had, and its placement group.

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
    least = least if begun_again() else None
    while True:
        wanted = Wanted(count, strategy, per_host, kind == "gpu" or (kind is None and _gpus()))
        if not fits(wanted):
            if least is None or count == least:
                raise PlacementError(wanted.refusal(0))
            count = max(least, min(count - 1, _free(wanted)))
            continue

        def changed(gpu: bool = wanted.gpu) -> bool:
            return kind is None and not gpu and _gpus()

        left = max(0.0, until - time.monotonic())
        group = _granted(wanted, changed, left if least is None else min(left, PATIENCE if count == n else _SOME))
        if group is not None:
            return wanted, group
        if not changed():
            if time.monotonic() >= until:
                raise PlacementError(wanted.refusal(limit))
            count = n if least is None else max(least, min(n, _free(wanted)))
            if count < n:
                say(f"reserve: {wanted}, are not to be had within {time.monotonic() - began:.0f} s; {count} will do")


def _granted(wanted: Wanted, changed: Callable[[], bool], limit: float) -> Any:
    """A placement group that Ray has granted; None: it was not there in time, or should be another one by now."""
    bundles = [wanted.bundle] * wanted.n
    if wanted.per_host is None:
        return _waited(wanted, changed, limit, bundles, wanted.strategy)
    # Ray knows no "four on each host": whole hosts are found first, whose numbers then bind a bundle for each slot
    whole = [{kind: count * size for kind, count in wanted.bundle.items()} for size in wanted.sizes]
    until, group = time.monotonic() + limit, None
    while group is None and (left := until - time.monotonic()) > 0:
        if (spread := _waited(wanted, changed, left, whole, "STRICT_SPREAD")) is None:
            return None
        hosts = nodes_of(spread)
        _removed(spread)
        there = [{"ray.io/node-id": host} for host, size in zip(hosts, wanted.sizes, strict=True) for _ in range(size)]
        left = min(_MOMENT, max(1.0, until - time.monotonic()))
        group = _waited(wanted, changed, left, bundles, "PACK", bundle_label_selector=there)
    return group


def _waited(
    wanted: Wanted,
    changed: Callable[[], bool],
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
        there = placed(group, seconds)
        over = changed()
        return there or over

    try:
        if wait_until(ready, max(0.0, limit), wanted.waiting, poll_seconds=_LOOK) and not over:
            return group
    except BaseException:  # Ctrl-C, too
        _removed(group)
        raise
    _removed(group)
    return None


def placed(group: Any, seconds: float) -> bool:
    """Whether a placement group has its places, or gets them within about so long: Ray waits for whole seconds."""
    return bool(group.wait(math.ceil(seconds)))


def nodes_of(group: Any) -> list[str | None]:
    """The Ray id of the node of each bundle; None: it has none now."""
    from ray.util.placement_group import placement_group_table

    found = placement_group_table(group)["bundles_to_node_id"]
    return [str(found[place]) if found.get(place) else None for place in range(len(group.bundle_specs))]


def _removed(group: Any) -> None:
    from ray.util.placement_group import remove_placement_group

    remove_placement_group(group)


def _free(wanted: Wanted) -> int:
    """How many slots the cluster has room for, wherever they lie."""
    import ray

    free = ray.available_resources()
    return int(min(free.get(kind, 0) // count for kind, count in wanted.bundle.items()))


def _gpus() -> bool:
    import ray

    return bool(ray.cluster_resources().get("GPU", 0) > 0)
