"""The doctor of a Ray cluster: check every host, compare hosts, and measure the links between them."""

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
from nrl.ops.doctor.findings import Finding, make_failure, make_note, make_ok, make_warning
from nrl.ops.doctor.hardware import HARDWARE, host_name
from nrl.ops.doctor.host_diff import judge_slots, list_differences
from nrl.ops.doctor.host_probe import look_at_host, look_at_torch
from nrl.ops.doctor.installation import judge_environments, judge_future_torch, judge_torch, judge_uv
from nrl.ops.doctor.network_checks import check_links, check_shared_folder, measure_clock
from nrl.ops.doctor.remote_checks import (
    CONNECT_SECONDS,
    ProbedHost,
    advise_longer_deadline,
    collect_replies,
    describe_error,
    make_unanswered,
)
from nrl.ops.doctor.runner import SILENCE
from nrl.ops.doctor.service_checks import judge_hub, judge_sandbox
from nrl.runtime.clusters import cluster as enter_cluster
from nrl.runtime.node.machine import Facts, collect_facts
from nrl.runtime.node.probe import Probe
from nrl.runtime.ray.connection import list_nodes, resolve_address
from nrl.runtime.ray.host_actors import connection, ray_error, start_on
from nrl.runtime.ray.nodes import call_on_node
from nrl.runtime.venvs.environments import Recipe
from nrl.runtime.venvs.recipes import make_recipe
from nrl.runtime.venvs.registry import EXECUTABLES

__all__ = ["check_hosts", "judge_host"]

_POLL = 0.5  # seconds between two looks who has come
_GREETING = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"
_HEAD = "`ray status` on the head says whether it runs; see docs/clusters.md"


def check_hosts(
    address: str, shared: str | None, size: int, limit: float, expected: int | None = None
) -> Iterator[Finding]:
    """Yield findings on all hosts of a Ray cluster, and between them.

    Args:
        address: ``"ray"``, ``"auto"`` or ``"host:port"``.
        shared: a folder that all should see; None: nobody looks.
        size: bytes that two hosts send each other.
        limit: seconds for each step.
        expected: how many hosts have to be there; those that are late are waited for. None: whoever is there.
    """
    began = time.monotonic()
    if silent := _describe_silence(address, limit):
        yield make_failure("cluster", silent, f"give the address of the head that `ray start --head` printed. {_HEAD}")
        return
    try:
        with enter_cluster(address, deadline=limit):
            took = f"; to {'start' if address == 'ray' else 'join'} it took {time.monotonic() - began:.1f} s"
            try:
                arrivals = [] if expected is None else [_await_hosts(expected, limit)]
                probes = _start_probes()
                ray = connection()
                text = f"Ray {ray.version} at {ray.address}, {len(probes)} host(s){took}"
                yield make_ok("cluster", text, address=ray.address, version=ray.version, hosts=list(probes))
                yield from arrivals
                yield from _find_lost()
                yield from _check_all(probes, shared, size, limit)
            except ray_error() as error:  # the head is gone again
                yield make_failure("cluster", describe_error(error), _HEAD)
    except PlacementError as error:
        yield make_failure("cluster", str(error), _HEAD)


def _describe_silence(address: str, limit: float) -> str:
    """Describe a port that listens but is no head of a cluster; empty: it is a head, or nothing listens.

    Ray itself would try for two minutes, whatever the limit, and write a line each few seconds.
    """
    with contextlib.suppress(PlacementError):
        head = resolve_address(address) or ""
        host, _, port = head.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=min(limit, CONNECT_SECONDS)).close()
            subprocess.run([sys.executable, "-c", _GREETING, head], capture_output=True, timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            return f"something listens at {head}, and is no head of a Ray cluster, or did not answer within {limit:g} s"
        except (OSError, ValueError):
            return ""
    return ""


def _await_hosts(expected: int, limit: float) -> Finding:
    """Wait for late hosts, and report how many have come."""

    def have_come(seconds: float) -> bool:
        if len(list_nodes()) < expected:
            time.sleep(seconds)
        return len(list_nodes()) >= expected

    def describe(waited: float) -> str:
        return f"doctor: {len(list_nodes())} of {expected} hosts have come, {waited:.0f} s so far"

    complete = wait_until(have_come, limit, describe, silence=SILENCE, poll_seconds=_POLL)
    names = sorted(str(node["NodeManagerHostname"]) for node in list_nodes())
    count = f"{len(names)} of {expected} have come"
    values = {"expected": expected, "come": names}
    if complete:
        return make_ok("hosts", count, **values)
    advice = (
        "look at what `ray start` said on those that are missing, and whether they reach the head's port; deadline= "
        f"waits longer ({limit:g} s now)"
    )
    return make_failure("hosts", f"{count} within {limit:g} s: {', '.join(names)}", advice, **values)


def _start_probes() -> dict[str, ProbedHost]:
    """Start a probe on each node; return them by host name, with a port if several nodes are one machine."""
    alive = list_nodes()
    names = [str(node["NodeManagerHostname"]) for node in alive]
    probes = {}
    for name, node in zip(names, alive, strict=True):
        unique = name if names.count(name) == 1 else f"{name}:{node['NodeManagerPort']}"
        probe = start_on(node["NodeID"], Probe)
        probes[unique] = ProbedHost(node["NodeID"], str(node["NodeManagerAddress"]), node["Resources"], probe)
    return probes


def _find_lost() -> Iterator[Finding]:
    """Yield a warning for each node that has left the cluster and is not back."""
    alive = {node["NodeManagerAddress"] for node in list_nodes(True)}
    for node in list_nodes(False):
        if node["NodeManagerAddress"] not in alive:
            message = f"Ray has lost it ({node['NodeManagerAddress']})"
            advice = "`ray start` there again, if it should be in the cluster"
            yield attrs.evolve(make_warning("host", message, advice), host=str(node["NodeManagerHostname"]))


def _check_all(hosts: dict[str, ProbedHost], shared: str | None, size: int, limit: float) -> Iterator[Finding]:
    own_facts, (version, _, own_node) = collect_facts(), connection()
    requests = {name: host.probe.collect_facts.remote(version) for name, host in hosts.items()}
    lookups = {
        name: call_on_node(host.node, look_at_host, version, tuple(EXECUTABLES))
        for name, host in hosts.items()
        if host.node != own_node  # The checks of this host have been shown.
    }
    answers, silent = collect_replies("what each host is", requests, limit)
    for name, error in silent.items():
        advice = (
            "is it on, and its cable in? Ray takes up to 65 s to notice. Else read Ray's logs there, start it again"
        )
        advice += advise_longer_deadline(error, limit)
        yield attrs.evolve(make_failure("host", f"{hosts.pop(name).address}: {error}", advice), host=name)
    results, unknown = collect_replies(
        "what is installed on each host", {n: lookups[n] for n in answers if n in lookups}, limit
    )
    build = functools.cache(lambda: look_at_torch(sys.executable, False))
    recipe_of = functools.cache(make_recipe)
    for name, host_facts in answers.items():
        yield from judge_slots(name, host_facts, hosts[name].resources)
        if hosts[name].node != own_node:
            for check in HARDWARE:
                if check is host_name:  # `host_diff` reports the name, which matters between hosts.
                    continue
                yield from (attrs.evolve(finding, host=name) for finding in check(host_facts))
        if name in results:
            findings = judge_host(results[name], host_facts, version, recipe_of, build)
            yield from (attrs.evolve(finding, host=name) for finding in findings)
        if name in unknown:
            message = f"uv, environments, hub, sandbox and torch are not known: {unknown[name]}"
            yield attrs.evolve(make_unanswered("installation", message, unknown[name], limit), host=name)
    yield from list_differences(answers, own_facts)
    for name in answers:
        if hosts[name].node != own_node:
            yield measure_clock(name, hosts[name].probe, limit)
    yield from check_shared_folder(hosts, shared, limit)
    if len(hosts) < 2:
        yield make_note("gloo", "there is one host, so none is between two")
        return
    yield from check_links(hosts, answers, size, limit)


def judge_host(
    look: Mapping[str, Mapping[str, Any]],
    facts: Facts,
    ray: str,
    recipe_of: Callable[[str], Recipe],
    build: Callable[[], Mapping[str, Any]],
) -> Iterator[Finding]:
    """Judge the examination of another host.

    Args:
        look: what `nrl.ops.doctor.host_probe.look_at_host` has seen there.
        facts: what the host is.
        ray: the version of Ray that a Python with torch should have.
        recipe_of: what the environment of an executable should be.
        build: `look_at_torch` of the program, for hosts whose environments are still to be built.
    """
    lock: Mapping[str, Any] = {}
    with contextlib.suppress(NrlError):  # The check of this host has reported the error.
        lock = recipe_of("base").inventory["packages"]
    uv = judge_uv(look["uv"], lock.get("uv", {}).get("version"))
    if uv.level == "failed" and look["environments"].get("whole"):
        uv = make_warning("uv", uv.found, f"{uv.todo}; those that are there do without")
    yield uv
    torch, gpus = look["torch"], facts["gpus"]
    judges: dict[str, Callable[[], Iterable[Finding]]] = {
        "environments": lambda: judge_environments(look["environments"], recipe_of),
        "hub": lambda: [judge_hub(look["hub"])],
        "sandbox": lambda: [judge_sandbox(look["sandbox"])],
    }
    for name, judge in judges.items():
        if "error" in look[name]:
            yield make_failure(name, f"the look itself failed: {look[name]['error']}", "report it, with the whole line")
        else:
            yield from judge()
    if torch.get("python", "") is None:
        yield judge_future_torch(gpus, build(), ray)
    else:
        yield from judge_torch(torch, gpus)
