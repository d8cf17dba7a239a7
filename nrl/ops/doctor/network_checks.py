"""Checks between hosts of a Ray cluster: clocks, a shared folder, ports, and the backends of torch."""

import random
import shlex
import socket
import time
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import attrs

from nrl.errors import PlacementError
from nrl.ops.doctor.findings import Finding, make_failure, make_note, make_ok, make_warning
from nrl.ops.doctor.host_diff import describe_failed_link, describe_link, judge_clock, pair_in_rounds
from nrl.ops.doctor.remote_checks import (
    CONNECT_SECONDS,
    ProbedHost,
    advise_longer_deadline,
    collect_replies,
    make_unanswered,
)
from nrl.ops.doctor.service_checks import check_writable
from nrl.runtime.node.link_benchmark import LinkBenchmark
from nrl.runtime.node.machine import Facts
from nrl.runtime.node.shared_fs_probe import wait_for_file
from nrl.runtime.ports import NRL_PORTS, ports
from nrl.runtime.ray.host_actors import connection, kill, start_on
from nrl.runtime.ray.nodes import send_by_value
from nrl.runtime.ray.sockets import find_interface

__all__ = ["check_links", "check_shared_folder", "measure_clock"]

type _Routes = dict[tuple[str, str], bool]

_QUESTIONS = 8  # requests to a clock
_FIREWALL = (
    "let a firewall pass TCP between the hosts at the ports that systems pick: those of net.ipv4.ip_local_port_range, "
    "by default 32768 to 60999"
)


def measure_clock(name: str, probe: Any, limit: float) -> Finding:
    """Measure a clock's offset by the fastest of several round trips."""
    seen = list[tuple[float, float]]()
    for _ in range(_QUESTIONS):
        sent = time.time()
        replies, silent = collect_replies(f"the clock of {name}", {name: probe.read_clock.remote()}, limit)
        if silent:
            return attrs.evolve(make_unanswered("clock", silent[name], silent[name], limit), host=name)
        received = time.time()
        seen.append(((received - sent) / 2, replies[name] - (sent + received) / 2))
    uncertain, offset = min(seen)
    return judge_clock(name, offset, uncertain)


def check_shared_folder(hosts: Mapping[str, ProbedHost], shared: str | None, limit: float) -> Iterator[Finding]:
    """Check that all hosts see a folder: the program writes a note, each host an answer."""
    if shared is None:
        if len(hosts) > 1:
            yield make_note(
                "shared", "no folder that all hosts see was looked for", "give shared=FOLDER, such as your out="
            )
        return
    folder, mark = Path(shared).expanduser().absolute(), f".doctor-{uuid.uuid4().hex}"
    advice = "a disk that all hosts mount by the same path (NFS, Lustre, ...), for `out=` and checkpoints"
    if failure := check_writable(folder, mark):
        yield attrs.evolve(failure, host=socket.gethostname())
        return
    try:
        requests = {name: host.probe.check_folder.remote(str(folder), mark, name) for name, host in hosts.items()}
        replies, wrong = collect_replies(f"who sees {folder}", requests, limit)
        wrong |= {name: reason for name, reason in replies.items() if reason}
        for name in replies.keys() - wrong.keys():
            if not wait_for_file(folder / f"{mark}.{name}"):
                wrong[name] = "writes what does not arrive here"
        for name, reason in wrong.items():
            message = f"{folder} on {socket.gethostname()} is not the same there: it {reason}"
            yield attrs.evolve(
                make_failure("shared", message, f"use {advice}{advise_longer_deadline(reason, limit)}"), host=name
            )
        if not wrong:
            yield make_ok("shared", f"all hosts see {folder} and write there", path=str(folder))
    finally:
        for path in folder.glob(f"{mark}*"):
            path.unlink(missing_ok=True)


def check_links(
    hosts: Mapping[str, ProbedHost], facts: Mapping[str, Facts], size: int, limit: float
) -> Iterator[Finding]:
    """Check that all pairs of hosts reach each other, and measure their links.

    Args:
        hosts: the hosts.
        facts: what each of them is.
        size: bytes that two of them send each other.
        limit: seconds for each step.
    """
    reached = yield from _check_ports(hosts, limit)
    yield from _measure_links("gloo", hosts, facts, reached, size, limit)
    if sum(bool(host.resources.get("GPU")) for host in hosts.values()) > 1:
        with_gpus = {name: host for name, host in hosts.items() if host.resources.get("GPU")}
        yield from _measure_links("nccl", with_gpus, facts, reached, size, limit)


def _check_ports(hosts: Mapping[str, ProbedHost], limit: float) -> Generator[Finding, None, _Routes]:
    """Check that hosts reach each other; return the routes that work, at ports that the systems pick."""
    advice = "give Ray an address of its own interfaces (`ray start --node-ip-address`)"
    reached = yield from _check_reachable(hosts, "that the system picked", (0,), limit, advice, _FIREWALL)
    try:
        allowed = ports()
    except PlacementError as error:
        yield make_failure("ports", str(error), f"mend {NRL_PORTS}, or leave it out")
        return reached
    if allowed is not None:
        label = f"of {NRL_PORTS}={allowed[0]}-{allowed[-1]}"
        advice = f"end what has them, or let {NRL_PORTS} name others, from 1024 on"
        wall = f"let a firewall pass TCP between the hosts at the ports {label}"
        yield from _check_reachable(hosts, label, random.sample(allowed, len(allowed)), limit, advice, wall)
    return reached


def _check_reachable(
    hosts: Mapping[str, ProbedHost],
    port_kind: str,
    candidates: Sequence[int],
    limit: float,
    todo_on_host: str,
    todo_between: str,
) -> Generator[Finding, None, _Routes]:
    """Check that each host reaches a port of each other host: the first candidate that is free there."""
    listening = {name: host.probe.listen.remote(host.address, candidates) for name, host in hosts.items()}
    open_ports, not_listening = collect_replies("who can listen", listening, limit)
    for name, reason in not_listening.items():
        message = f"it cannot listen at {hosts[name].address}, at a port {port_kind}: {reason}"
        yield attrs.evolve(make_failure("ports", message, todo_on_host), host=name)
    routes = {(source, other): open_ports[other] for source in hosts for other in open_ports if source != other}
    requests = {
        route: hosts[route[0]].probe.check_reachable.remote(hosts[route[1]].address, port, CONNECT_SECONDS)
        for route, port in routes.items()
    }
    replies, silent = collect_replies("who reaches whom", requests, limit)
    reached: _Routes = {}
    for (source, other), port in routes.items():
        reason = replies.get((source, other), silent.get((source, other), ""))
        reached[source, other] = not reason
        if reason:
            message = f"it does not reach port {port} of {other}, {hosts[other].address}, {port_kind}: {reason}"
            yield attrs.evolve(make_failure("ports", message, todo_between), host=source)
    if routes and not not_listening and all(reached.values()):
        yield make_ok("ports", f"each host reaches a port of each other one {port_kind}", ports=open_ports)
    return reached


def _measure_links(
    backend: str,
    hosts: Mapping[str, ProbedHost],
    facts: Mapping[str, Facts],
    reached: Mapping[tuple[str, str], bool],
    size: int,
    limit: float,
) -> Iterator[Finding]:
    """Connect all pairs of hosts over a backend, and measure both directions."""
    actors = dict[str, Any]()
    pairs = [pair for pair in combinations(hosts, 2) if all(reached.get(route, True) for route in (pair, pair[::-1]))]
    for a, b in combinations(hosts, 2):
        if (a, b) not in pairs:
            yield make_note(backend, f"{a} and {b} did not try: a port is closed between them", "see ports")
    for name, host in hosts.items():
        if not any(name in pair for pair in pairs):
            continue
        python = facts[name]["python_with_torch"]
        if python is None:
            message = f"not tried: no Python here has torch and Ray {connection().version}"
            yield attrs.evolve(make_note(backend, message, "`nrl venvs build base` there, and ask again"), host=name)
            continue
        options_of_python = (
            {} if python == facts[name]["executable"] else {"runtime_env": {"py_executable": shlex.join([python])}}
        )
        options = {"num_gpus": 0.01 if backend == "nccl" else 0, **options_of_python}
        actors[name] = start_on(host.node, LinkBenchmark, host.address, send_by_value(find_interface), **options)
    try:
        importing = {name: actor.describe_torch.remote() for name, actor in actors.items()}
        started, dead = collect_replies(f"{backend}: torch is imported", importing, limit)
        for name, reason in dead.items():
            message = f"a process with torch does not start: {reason}"
            busy = "ask again when a GPU is free: programs that run have all of them; or with a longer deadline="
            silent = (
                make_warning(backend, message, busy)
                if backend == "nccl"
                else make_unanswered(backend, message, reason, limit)
            )
            yield attrs.evolve(silent, host=name)
        for round_pairs in pair_in_rounds(list(started)):
            usable = [pair for pair in round_pairs if pair in pairs or pair[::-1] in pairs]
            yield from _measure_round(backend, usable, hosts, actors, size, limit)
    finally:
        kill(actors.values())


def _measure_round(
    backend: str,
    pairs: Sequence[tuple[str, str]],
    hosts: Mapping[str, ProbedHost],
    actors: Mapping[str, Any],
    size: int,
    limit: float,
) -> Iterator[Finding]:
    names = {f"{a} and {b}": (a, b) for a, b in pairs}
    requests = {name: actors[a].open_store.remote(name, limit) for name, (a, _) in names.items()}
    store_ports, closed = collect_replies(f"{backend}: who hosts whom", requests, limit)
    measurements_pending = {}
    for name, port in store_ports.items():
        address = hosts[names[name][0]].address
        for rank, host_name in enumerate(names[name]):
            measurements_pending[name, rank] = actors[host_name].measure.remote(
                name, backend, address, port, rank, size, limit
            )
    measurements, wrong = collect_replies(f"{backend}: {', '.join(names)}", measurements_pending, 3 * limit)
    for name, pair in names.items():
        pair_measurements = [measurements[name, rank] for rank in (0, 1) if (name, rank) in measurements]
        if len(pair_measurements) == len(pair):
            yield describe_link(backend, pair, pair_measurements)
            continue
        reason = closed.get(name) or next(text for rank in (1, 0) if (text := wrong.get((name, rank))))
        addresses = hosts[pair[0]].address, hosts[pair[1]].address
        yield describe_failed_link(backend, pair, reason, addresses, advise_longer_deadline(reason, limit))
