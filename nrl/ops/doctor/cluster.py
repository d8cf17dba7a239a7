"""The doctor of a Ray cluster: asks every host, compares them, and lets each two of them meet."""

import contextlib
import functools
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs

from nrl.errors import NrlError, PlacementError
from nrl.log import wait_until
from nrl.ops.doctor.findings import Finding, failed, note, ok, warning
from nrl.ops.doctor.hardware import HARDWARE, host_name
from nrl.ops.doctor.host_diff import differences, slots
from nrl.ops.doctor.host_probe import look, look_at_torch
from nrl.ops.doctor.installation import environments_judged, torch_judged, torch_to_come, uv_judged
from nrl.ops.doctor.network_checks import clock_of, connected, seen_by_all
from nrl.ops.doctor.remote_checks import CONNECTING, Host, answered, longer, reason, unanswered
from nrl.ops.doctor.runner import SILENCE
from nrl.ops.doctor.service_checks import hub_judged, sandbox_judged
from nrl.runtime.clusters import cluster as entered
from nrl.runtime.node.machine import Facts, facts
from nrl.runtime.node.probe import Probe
from nrl.runtime.ray.connection import target
from nrl.runtime.ray.host_actors import connection, list_nodes, ray_error, start_on
from nrl.runtime.ray.nodes import on_node
from nrl.runtime.venvs.environments import Recipe
from nrl.runtime.venvs.recipes import recipe
from nrl.runtime.venvs.registry import EXECUTABLES

__all__ = ["hosts", "judged"]

_GLANCE = 0.5  # seconds between two looks who has come
_GREETING = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"
_HEAD = "`ray status` on the head says whether it runs; see docs/clusters.md"


def hosts(address: str, shared: str | None, size: int, limit: float, expected: int | None = None) -> Iterator[Finding]:
    """What is found on all hosts of a Ray cluster, and between them.

    Args:
        address: ``"ray"``, ``"auto"`` or ``"host:port"``.
        shared: a folder that all should see; None: nobody looks.
        size: bytes that two hosts send each other.
        limit: seconds for each step.
        expected: how many hosts have to be there; those that are late are waited for. None: whoever is there.
    """
    began = time.monotonic()
    if silent := _says_nothing(address, limit):
        yield failed("cluster", silent, f"give the address of the head that `ray start --head` printed. {_HEAD}")
        return
    try:
        with entered(address, deadline=limit):
            took = f"; to {'start' if address == 'ray' else 'join'} it took {time.monotonic() - began:.1f} s"
            try:
                come = [] if expected is None else [_come(expected, limit)]
                there = _hosts()
                ray = connection()
                text = f"Ray {ray.version} at {ray.address}, {len(there)} host(s){took}"
                yield ok("cluster", text, address=ray.address, version=ray.version, hosts=list(there))
                yield from come
                yield from _lost()
                yield from _asked(there, shared, size, limit)
            except ray_error() as error:  # the head is gone again
                yield failed("cluster", reason(error), _HEAD)
    except PlacementError as error:
        yield failed("cluster", str(error), _HEAD)


def _says_nothing(address: str, limit: float) -> str:
    """Why there is no head of a cluster where something listens; empty: there is one, or nothing listens.

    Ray itself would try for two minutes, whatever the limit, and write a line each few seconds.
    """
    with contextlib.suppress(PlacementError):
        where = target(address) or ""
        host, _, port = where.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=min(limit, CONNECTING)).close()
            subprocess.run([sys.executable, "-c", _GREETING, where], capture_output=True, timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            return (
                f"something listens at {where}, and is no head of a Ray cluster, or did not answer within {limit:g} s"
            )
        except (OSError, ValueError):
            return ""
    return ""


def _come(expected: int, limit: float) -> Finding:
    """Wait for hosts that are late, and say how many have come."""

    def came(seconds: float) -> bool:
        if len(list_nodes(True)) < expected:
            time.sleep(seconds)
        return len(list_nodes(True)) >= expected

    def told(waited: float) -> str:
        return f"doctor: {len(list_nodes(True))} of {expected} hosts have come, {waited:.0f} s so far"

    all_of_them = wait_until(came, limit, told, silence=SILENCE, poll_seconds=_GLANCE)
    there = sorted(str(each["NodeManagerHostname"]) for each in list_nodes(True))
    said = f"{len(there)} of {expected} have come"
    values = {"expected": expected, "come": there}
    if all_of_them:
        return ok("hosts", said, **values)
    more = (
        "look at what `ray start` said on those that are missing, and whether they reach the head's port; deadline= "
        f"waits longer ({limit:g} s now)"
    )
    return failed("hosts", f"{said} within {limit:g} s: {', '.join(there)}", more, **values)


def _hosts() -> dict[str, Host]:
    """The nodes by name: that of the host, with its port where several are one machine."""
    alive = list_nodes(True)
    names = [str(node["NodeManagerHostname"]) for node in alive]
    hosts = {}
    for name, node in zip(names, alive, strict=True):
        unique = name if names.count(name) == 1 else f"{name}:{node['NodeManagerPort']}"
        probe = start_on(node["NodeID"], Probe)
        hosts[unique] = Host(node["NodeID"], str(node["NodeManagerAddress"]), node["Resources"], probe)
    return hosts


def _lost() -> Iterator[Finding]:
    """Nodes that were in the cluster and are not any more, unless they are back."""
    here = {each["NodeManagerAddress"] for each in list_nodes(True)}
    for each in list_nodes(False):
        if each["NodeManagerAddress"] not in here:
            gone = f"Ray has lost it ({each['NodeManagerAddress']})"
            more = "`ray start` there again, if it should be in the cluster"
            yield attrs.evolve(warning("host", gone, more), host=str(each["NodeManagerHostname"]))


def _asked(there: dict[str, Host], shared: str | None, size: int, limit: float) -> Iterator[Finding]:
    own, (version, _, this) = facts(), connection()
    asked = {name: host.probe.facts.remote(version) for name, host in there.items()}
    looking = {
        name: on_node(host.node, look, version, tuple(EXECUTABLES))
        for name, host in there.items()
        if host.node != this  # whose own checks have been shown
    }
    answers, silent = answered("what each host is", asked, limit)
    for name, error in silent.items():
        more = "is it on, and its cable in? Ray takes up to 65 s to notice. Else read Ray's logs there, start it again"
        more += longer(error, limit)
        yield attrs.evolve(failed("host", f"{there.pop(name).address}: {error}", more), host=name)
    looks, unseen = answered("what is installed on each host", {n: looking[n] for n in answers if n in looking}, limit)
    build = functools.cache(lambda: look_at_torch(sys.executable, False))
    made = functools.cache(recipe)
    for name, each in answers.items():
        yield from slots(name, each, there[name].resources)
        if there[name].node != this:
            for check in HARDWARE:
                if check is host_name:  # which matters between hosts, and is told there
                    continue
                yield from (attrs.evolve(finding, host=name) for finding in check(each))
        if name in looks:
            found = judged(looks[name], each, version, made, build)
            yield from (attrs.evolve(finding, host=name) for finding in found)
        if name in unseen:
            less = f"uv, environments, hub, sandbox and torch are not known: {unseen[name]}"
            yield attrs.evolve(unanswered("installation", less, unseen[name], limit), host=name)
    yield from differences(answers, own)
    for name in answers:
        if there[name].node != this:
            yield clock_of(name, there[name].probe, limit)
    yield from seen_by_all(there, shared, limit)
    if len(there) < 2:
        yield note("gloo", "there is one host, so none is between two")
        return
    yield from connected(there, answers, size, limit)


def judged(
    looked: Mapping[str, Mapping[str, Any]],
    machine: Facts,
    ray: str,
    made: Callable[[str], Recipe],
    build: Callable[[], Mapping[str, Any]],
) -> Iterator[Finding]:
    """What a look at another host means.

    Args:
        looked: what `nrl.ops.doctor.host_probe.look` has seen there.
        machine: what the host is.
        ray: the version of Ray that a Python with torch should have.
        made: what the environment of an executable should be.
        build: `look_at_torch` of the program, for hosts whose environments are still to be built.
    """
    lock: Mapping[str, Any] = {}
    with contextlib.suppress(NrlError):  # which was told of this host
        lock = made("base").inventory["packages"]
    uv = uv_judged(looked["uv"], lock.get("uv", {}).get("version"))
    if uv.level == "failed" and looked["environments"].get("whole"):
        uv = warning("uv", uv.found, f"{uv.todo}; those that are there do without")
    yield uv
    torch, gpus = looked["torch"], machine["gpus"]
    judges: dict[str, Callable[[], Iterable[Finding]]] = {
        "environments": lambda: environments_judged(looked["environments"], made),
        "hub": lambda: [hub_judged(looked["hub"])],
        "sandbox": lambda: [sandbox_judged(looked["sandbox"])],
    }
    for name, judge in judges.items():
        if "error" in looked[name]:
            yield failed(name, f"the look itself failed: {looked[name]['error']}", "report it, with the whole line")
        else:
            yield from judge()
    if torch.get("python", "") is None:
        yield torch_to_come(gpus, build(), ray)
    else:
        yield from torch_judged(torch, gpus)
