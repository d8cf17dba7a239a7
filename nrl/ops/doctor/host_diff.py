"""What the hosts of a cluster have to have in common, what differs, and what the way between two of them is."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from nrl.ops.doctor.findings import Finding, failed, gib, note, ok, warning
from nrl.ops.doctor.hardware import leads_home
from nrl.runtime.node.machine import PACKAGES, Facts

__all__ = ["apart", "clock", "differences", "rounds", "slots", "way"]

_CLOCK = 0.5  # seconds
_SLOW = 1e8  # bytes a second
_FAR = 5e-3  # seconds
_LOPSIDED = 4  # how much faster one way is than the other
_COMPARED = ("Python", *PACKAGES, "lock", "platform", "cores", "memory", "GPUs")
_SAME = "install the same on all hosts (one image, or `uv sync --locked` on each)"


def differences(hosts: Mapping[str, Facts], own: Facts) -> Iterator[Finding]:
    """What differs between hosts, each time named with the host.

    Args:
        hosts: what each of them is, by its name.
        own: what the host of the program is, with which they are compared.
    """
    differing = set[str]()
    for what, finding in (*_differing(hosts, own), *_kinds_of_gpus(hosts)):
        differing.add(what)
        yield finding
    if len(hosts) < 2:
        return
    without = sorted(host for host, facts in hosts.items() if facts["lock"] is None)
    unknown = {"lock"} if without or own["lock"] is None else set()
    same = [each for each in _COMPARED if each not in differing | unknown]
    if same:
        more = "" if not unknown else f"; locks were not compared: {', '.join(without) or 'this host'} has none"
        yield ok("hosts", f"all {len(hosts)} have the same {', '.join(same)}{more}", same=same)
    yield from _names(hosts)


def _differing(hosts: Mapping[str, Facts], own: Facts) -> Iterator[tuple[str, Finding]]:
    """What differs from the program's host, each with its name in `_COMPARED`."""
    for host, facts in hosts.items():
        here = _python(own), _python(facts)
        if here[0] != here[1]:
            less = f"Python {facts['python']}; the program's is {own['python']}"
            yield "Python", _at(host, failed("hosts", less, _SAME))
        elif facts["python"] != own["python"]:
            less = f"Python {facts['python']}; the program's is {own['python']}, with which environments are built"
            yield "Python", _at(host, warning("hosts", less, _SAME))
        for name in PACKAGES:
            theirs, ours = facts["packages"][name], own["packages"][name]
            if theirs == ours:
                continue
            less = f"{name} {theirs or 'is not installed'}; the program has {ours or 'none'}"
            if name == "ray":
                yield name, _at(host, failed("hosts", less, _SAME))
            elif theirs is None:
                built = "only executable='system' needs it: others are built on each host from the program's lock"
                yield name, _at(host, note("hosts", less, built))
            else:
                built = f"{_SAME}, or do not use executable='system': others are built from the program's lock"
                yield name, _at(host, warning("hosts", less, built))
        theirs, ours = facts["lock"], own["lock"]
        if theirs is not None and ours is not None and theirs["digest"] != ours["digest"]:
            less = f"{theirs['path']} differs from the program's {ours['path']}"
            built = "programs that start there use that lock; those that start here build environments from this one"
            yield "lock", _at(host, warning("hosts", less, f"check out one commit on all hosts: {built}"))
        if facts["platform"] != own["platform"]:
            less = f"it is {facts['platform']}, the program's host {own['platform']}"
            more = "use hosts of one kind: environments are built for one platform"
            yield "platform", _at(host, failed("hosts", less, more))
        if facts["cores"]["usable"] != own["cores"]["usable"]:
            less = f"{facts['cores']['usable']} cores; the program's host has {own['cores']['usable']}"
            yield "cores", _at(host, note("hosts", less, "the slowest process sets the pace of a mesh"))
        theirs, ours = facts["memory"]["total"], own["memory"]["total"]
        if theirs and ours and not 0.9 < theirs / ours < 1.1:
            yield "memory", _at(host, note("hosts", f"{gib(theirs)} of memory; the program's host has {gib(ours)}"))


def _names(hosts: Mapping[str, Facts]) -> Iterator[Finding]:
    """Hosts whose own name leads nobody else to them."""
    for host, facts in hosts.items():
        if leads_home(facts["addresses"]):
            less = f"its own name stands for {', '.join(facts['addresses'])}, where other hosts do not find it"
            more = "give its name its own address in /etc/hosts; nrl chooses the interface that Ray's address has, "
            yield _at(host, warning("host_name", less, f"{more}other programs over gloo need GLOO_SOCKET_IFNAME"))


def _kinds_of_gpus(hosts: Mapping[str, Facts]) -> Iterator[tuple[str, Finding]]:
    """GPUs are compared among the hosts that have some: a program may run on one that has none."""
    kinds = {host: (facts["gpus"] or {}) for host, facts in hosts.items()}
    having = {host: each for host, each in kinds.items() if each.get("devices")}
    first, *others = having.items() if having else [("", {})]
    for host, each in others:
        names = [sorted({device["name"] for device in some["devices"]}) for some in (first[1], each)]
        if names[0] != names[1]:
            less = f"{', '.join(names[1])}; {first[0]} has {', '.join(names[0])}"
            yield "GPUs", _at(host, warning("hosts", less, "keep a mesh on equal GPUs: the slowest sets the pace"))
        if each["driver"] != first[1]["driver"]:
            less = f"NVIDIA driver {each['driver']}; {first[0]} has {first[1]['driver']}"
            yield "GPUs", _at(host, note("hosts", less, "one driver everywhere makes faults easier to find"))


def slots(host: str, facts: Facts, resources: Mapping[str, float]) -> Iterator[Finding]:
    """Whether Ray hands out what a host has."""
    cpus, gpus = resources.get("CPU", 0), resources.get("GPU", 0)
    found = facts["gpus"] or {"devices": [], "unseen": []}
    there = len(found["devices"] or found["unseen"])
    said = f"Ray hands out {cpus:g} CPU" + (f" and {gpus:g} GPU" if gpus or there else "")
    if gpus != there:
        more = f"`ray stop` there, and `ray start --num-gpus={there}`; CUDA_VISIBLE_DEVICES hides some, too"
        yield _at(host, warning("slots", f"{said}; the host has {there} of NVIDIA's GPUs", more))
    else:
        yield _at(host, ok("slots", said, cpus=cpus, gpus=gpus))


def clock(host: str, offset: float, uncertain: float) -> Finding:
    """Whether a host's clock agrees with the program's.

    Args:
        host: its name.
        offset: seconds that it is ahead.
        uncertain: seconds by which that may be wrong: half a round trip.
    """
    said = f"{abs(offset) * 1e3:.0f} ms {'ahead of' if offset > 0 else 'behind'} the program's host"
    said += f" (to {uncertain * 1e3:.1f} ms)"
    values = {"offset": offset, "uncertain": uncertain}
    if abs(offset) > _CLOCK + uncertain:
        more = "let NTP set it (`timedatectl set-ntp true`, chrony): times in logs do not fit together, tokens expire"
        return _at(host, warning("clock", said, more, **values))
    return _at(host, ok("clock", said, **values))


def rounds(names: Sequence[str]) -> Iterator[list[tuple[str, str]]]:
    """All pairs, in rounds in which each is at most once: pairs of a round do not disturb each other.

    >>> list(rounds(["a", "b", "c", "d"]))
    [[('a', 'd'), ('b', 'c')], [('a', 'c'), ('d', 'b')], [('a', 'b'), ('c', 'd')]]
    """
    ring: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        yield [(a, b) for a, b in pairs if a is not None and b is not None]
        ring = [ring[0], ring[-1], *ring[1:-1]]


def way(backend: str, pair: tuple[str, str], found: Sequence[Mapping[str, Any]]) -> Finding:
    """What the way between two hosts is.

    Args:
        backend: by which they met.
        pair: their names.
        found: what each measured.
    """
    there, back = found
    said = (
        f"{pair[0]} -> {pair[1]} {_rate(there['rate'])}, {pair[1]} -> {pair[0]} {_rate(back['rate'])}, "
        f"{1e3 * max(there['latency'], back['latency']):.2f} ms, over {_interface(there)} and {_interface(back)}"
    )
    values = {"hosts": list(pair), "there": dict(there), "back": dict(back)}
    slow, fast = sorted((there["rate"], back["rate"]))
    name = f"{backend.upper()}_SOCKET_IFNAME"
    if slow < _SLOW:
        more = f"is there a faster interface? Set {name} on the nodes before `ray start`. 1 GB of weights takes "
        return warning(backend, said, f"{more}{1e9 / slow:.0f} s", **values)
    if fast > _LOPSIDED * slow:
        return warning(backend, said, "look at the slower way: a cable, a port's speed, other traffic", **values)
    if max(there["latency"], back["latency"]) > _FAR:
        return note(backend, said, "hosts that are so far apart are slow with shards of one model", **values)
    return ok(backend, said, **values)


def apart(backend: str, pair: tuple[str, str], why: str, addresses: tuple[str, str], more: str = "") -> Finding:
    """Two hosts that did not meet.

    Args:
        backend: by which.
        pair: their names.
        why: as it was said.
        addresses: theirs.
        more: what else may be done.
    """
    todo = f"set {backend.upper()}_SOCKET_IFNAME on both before `ray start`, to the interface that has "
    todo += " and ".join(addresses)
    if "Duplicate GPU" in why:  # nodes of Ray on one machine
        todo = "they are nodes of Ray that share a GPU: give each its own, by CUDA_VISIBLE_DEVICES before `ray start`"
    return failed(backend, f"{' and '.join(pair)} do not meet: {why}", f"{todo}{more}", hosts=list(pair))


def _interface(found: Mapping[str, Any]) -> str:
    return found["interface"] or "what it chose itself"


def _rate(rate: float) -> str:
    return f"{rate / 1e9:.1f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.0f} MB/s"


def _python(facts: Facts) -> list[str]:
    return str(facts["python"]).split(".")[:2]


def _at(host: str, finding: Finding) -> Finding:
    return attrs.evolve(finding, host=host)
