"""Compare hosts of a cluster: versions that must match, differences, and link speed."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from nrl.ops.doctor.findings import Finding, format_gib, make_failure, make_note, make_ok, make_warning
from nrl.ops.doctor.hardware import is_loopback_name
from nrl.runtime.node.machine import PACKAGES, Facts

__all__ = ["describe_failed_link", "describe_link", "judge_clock", "judge_slots", "list_differences", "pair_in_rounds"]

_CLOCK = 0.5  # seconds
_SLOW = 1e8  # bytes a second
_FAR = 5e-3  # seconds
_LOPSIDED = 4  # how much faster one way is than the other
_COMPARED = ("Python", *PACKAGES, "lock", "platform", "cores", "memory", "GPUs")
_SAME = "install the same on all hosts (one image, or `uv sync --locked` on each)"


def list_differences(hosts: Mapping[str, Facts], reference: Facts) -> Iterator[Finding]:
    """Yield the differences between hosts, each with the name of its host.

    Args:
        hosts: the facts of each host, by name.
        reference: what the host of the program is, with which they are compared.
    """
    differing = set[str]()
    for subject, finding in (*_compare_facts(hosts, reference), *_compare_gpus(hosts)):
        differing.add(subject)
        yield finding
    if len(hosts) < 2:
        return
    without = sorted(host for host, facts in hosts.items() if facts["lock"] is None)
    unknown = {"lock"} if without or reference["lock"] is None else set()
    equal = [name for name in _COMPARED if name not in differing | unknown]
    if equal:
        note_on_locks = (
            "" if not unknown else f"; locks were not compared: {', '.join(without) or 'this host'} has none"
        )
        yield make_ok("hosts", f"all {len(hosts)} have the same {', '.join(equal)}{note_on_locks}", same=equal)
    yield from _check_names(hosts)


def _compare_facts(hosts: Mapping[str, Facts], reference: Facts) -> Iterator[tuple[str, Finding]]:
    """Yield the differences from the program's host, each with its name in `_COMPARED`."""
    for host, facts in hosts.items():
        versions = _python_version(reference), _python_version(facts)
        if versions[0] != versions[1]:
            message = f"Python {facts['python']}; the program's is {reference['python']}"
            yield "Python", _on_host(host, make_failure("hosts", message, _SAME))
        elif facts["python"] != reference["python"]:
            message = (
                f"Python {facts['python']}; the program's is {reference['python']}, with which environments are built"
            )
            yield "Python", _on_host(host, make_warning("hosts", message, _SAME))
        for name in PACKAGES:
            theirs, ours = facts["packages"][name], reference["packages"][name]
            if theirs == ours:
                continue
            message = f"{name} {theirs or 'is not installed'}; the program has {ours or 'none'}"
            if name == "ray":
                yield name, _on_host(host, make_failure("hosts", message, _SAME))
            elif theirs is None:
                advice = "only executable='system' needs it: others are built on each host from the program's lock"
                yield name, _on_host(host, make_note("hosts", message, advice))
            else:
                advice = f"{_SAME}, or do not use executable='system': others are built from the program's lock"
                yield name, _on_host(host, make_warning("hosts", message, advice))
        theirs, ours = facts["lock"], reference["lock"]
        if theirs is not None and ours is not None and theirs["digest"] != ours["digest"]:
            message = f"{theirs['path']} differs from the program's {ours['path']}"
            advice = "programs that start there use that lock; those that start here build environments from this one"
            yield "lock", _on_host(host, make_warning("hosts", message, f"check out one commit on all hosts: {advice}"))
        if facts["platform"] != reference["platform"]:
            message = f"it is {facts['platform']}, the program's host {reference['platform']}"
            advice_on_platform = "use hosts of one kind: environments are built for one platform"
            yield "platform", _on_host(host, make_failure("hosts", message, advice_on_platform))
        if facts["cores"]["usable"] != reference["cores"]["usable"]:
            message = f"{facts['cores']['usable']} cores; the program's host has {reference['cores']['usable']}"
            yield "cores", _on_host(host, make_note("hosts", message, "the slowest process sets the pace of a mesh"))
        theirs, ours = facts["memory"]["total"], reference["memory"]["total"]
        if theirs and ours and not 0.9 < theirs / ours < 1.1:
            yield (
                "memory",
                _on_host(
                    host,
                    make_note("hosts", f"{format_gib(theirs)} of memory; the program's host has {format_gib(ours)}"),
                ),
            )


def _check_names(hosts: Mapping[str, Facts]) -> Iterator[Finding]:
    """Yield a warning for each host whose own name leads other hosts elsewhere."""
    for host, facts in hosts.items():
        if is_loopback_name(facts["addresses"]):
            message = f"its own name stands for {', '.join(facts['addresses'])}, where other hosts do not find it"
            advice = "give its name its own address in /etc/hosts; nrl chooses the interface that Ray's address has, "
            yield _on_host(
                host, make_warning("host_name", message, f"{advice}other programs over gloo need GLOO_SOCKET_IFNAME")
            )


def _compare_gpus(hosts: Mapping[str, Facts]) -> Iterator[tuple[str, Finding]]:
    """Compare GPUs among the hosts that have some: a program may run on a host without GPUs."""
    gpus = {host: (facts["gpus"] or {}) for host, facts in hosts.items()}
    with_gpus = {host: host_gpus for host, host_gpus in gpus.items() if host_gpus.get("devices")}
    first, *rest = with_gpus.items() if with_gpus else [("", {})]
    for host, host_gpus in rest:
        names = [sorted({device["name"] for device in side["devices"]}) for side in (first[1], host_gpus)]
        if names[0] != names[1]:
            message = f"{', '.join(names[1])}; {first[0]} has {', '.join(names[0])}"
            yield (
                "GPUs",
                _on_host(host, make_warning("hosts", message, "keep a mesh on equal GPUs: the slowest sets the pace")),
            )
        if host_gpus["driver"] != first[1]["driver"]:
            message = f"NVIDIA driver {host_gpus['driver']}; {first[0]} has {first[1]['driver']}"
            yield (
                "GPUs",
                _on_host(host, make_note("hosts", message, "one driver everywhere makes faults easier to find")),
            )


def judge_slots(host: str, facts: Facts, resources: Mapping[str, float]) -> Iterator[Finding]:
    """Judge whether Ray hands out the host's CPUs and GPUs."""
    cpus, gpus = resources.get("CPU", 0), resources.get("GPU", 0)
    devices = facts["gpus"] or {"devices": [], "unseen": []}
    count = len(devices["devices"] or devices["unseen"])
    message = f"Ray hands out {cpus:g} CPU" + (f" and {gpus:g} GPU" if gpus or count else "")
    if gpus != count:
        advice = f"`ray stop` there, and `ray start --num-gpus={count}`; CUDA_VISIBLE_DEVICES hides some, too"
        yield _on_host(host, make_warning("slots", f"{message}; the host has {count} of NVIDIA's GPUs", advice))
    else:
        yield _on_host(host, make_ok("slots", message, cpus=cpus, gpus=gpus))


def judge_clock(host: str, offset: float, uncertain: float) -> Finding:
    """Judge whether a host's clock agrees with the program's.

    Args:
        host: its name.
        offset: seconds that it is ahead.
        uncertain: seconds by which that may be wrong: half a round trip.
    """
    message = f"{abs(offset) * 1e3:.0f} ms {'ahead of' if offset > 0 else 'behind'} the program's host"
    message += f" (to {uncertain * 1e3:.1f} ms)"
    values = {"offset": offset, "uncertain": uncertain}
    if abs(offset) > _CLOCK + uncertain:
        advice = "let NTP set it (`timedatectl set-ntp true`, chrony): times in logs do not fit together, tokens expire"
        return _on_host(host, make_warning("clock", message, advice, **values))
    return _on_host(host, make_ok("clock", message, **values))


def pair_in_rounds(names: Sequence[str]) -> Iterator[list[tuple[str, str]]]:
    """Yield all pairs in rounds, each host at most once in a round: pairs of a round do not disturb each other.

    >>> list(pair_in_rounds(["a", "b", "c", "d"]))
    [[('a', 'd'), ('b', 'c')], [('a', 'c'), ('d', 'b')], [('a', 'b'), ('c', 'd')]]
    """
    ring: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        yield [(a, b) for a, b in pairs if a is not None and b is not None]
        ring = [ring[0], ring[-1], *ring[1:-1]]


def describe_link(backend: str, pair: tuple[str, str], measurements: Sequence[Mapping[str, Any]]) -> Finding:
    """Describe the link between two hosts.

    Args:
        backend: by which they met.
        pair: their names.
        measurements: what each measured.
    """
    forth, back = measurements
    message = (
        f"{pair[0]} -> {pair[1]} {_format_rate(forth['rate'])}, {pair[1]} -> {pair[0]} {_format_rate(back['rate'])}, "
        f"{1e3 * max(forth['latency'], back['latency']):.2f} ms, over {_interface_used(forth)} "
        f"and {_interface_used(back)}"
    )
    values = {"hosts": list(pair), "there": dict(forth), "back": dict(back)}
    slow, fast = sorted((forth["rate"], back["rate"]))
    name = f"{backend.upper()}_SOCKET_IFNAME"
    if slow < _SLOW:
        advice = f"is there a faster interface? Set {name} on the nodes before `ray start`. 1 GB of weights takes "
        return make_warning(backend, message, f"{advice}{1e9 / slow:.0f} s", **values)
    if fast > _LOPSIDED * slow:
        return make_warning(
            backend, message, "look at the slower way: a cable, a port's speed, other traffic", **values
        )
    if max(forth["latency"], back["latency"]) > _FAR:
        return make_note(backend, message, "hosts that are so far apart are slow with shards of one model", **values)
    return make_ok(backend, message, **values)


def describe_failed_link(
    backend: str, pair: tuple[str, str], reason: str, addresses: tuple[str, str], advice: str = ""
) -> Finding:
    """Describe two hosts that did not connect.

    Args:
        backend: by which.
        pair: their names.
        reason: as it was said.
        addresses: theirs.
        advice: what else may be done.
    """
    todo = f"set {backend.upper()}_SOCKET_IFNAME on both before `ray start`, to the interface that has "
    todo += " and ".join(addresses)
    if "Duplicate GPU" in reason:  # nodes of Ray on one machine
        todo = "they are nodes of Ray that share a GPU: give each its own, by CUDA_VISIBLE_DEVICES before `ray start`"
    return make_failure(backend, f"{' and '.join(pair)} do not meet: {reason}", f"{todo}{advice}", hosts=list(pair))


def _interface_used(measurement: Mapping[str, Any]) -> str:
    return measurement["interface"] or "what it chose itself"


def _format_rate(rate: float) -> str:
    return f"{rate / 1e9:.1f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.0f} MB/s"


def _python_version(facts: Facts) -> list[str]:
    return str(facts["python"]).split(".")[:2]


def _on_host(host: str, finding: Finding) -> Finding:
    return attrs.evolve(finding, host=host)
