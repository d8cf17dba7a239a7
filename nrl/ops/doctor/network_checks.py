"""What lies between two hosts of a Ray cluster: clocks that differ, a folder, ports, and the backends of torch."""

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
from nrl.ops.doctor.findings import Finding, failed, note, ok, warning
from nrl.ops.doctor.host_diff import apart, clock, rounds, way
from nrl.ops.doctor.remote_checks import CONNECTING, Host, answered, longer, unanswered
from nrl.ops.doctor.service_checks import unwritable
from nrl.runtime.node.link_benchmark import LinkBenchmark
from nrl.runtime.node.machine import Facts
from nrl.runtime.node.shared_fs_probe import wait_for_file
from nrl.runtime.ports import NRL_PORTS, ports
from nrl.runtime.ray.host_actors import connection, kill, start_on
from nrl.runtime.ray.nodes import send_by_value
from nrl.runtime.ray.sockets import find_interface

__all__ = ["clock_of", "connected", "seen_by_all"]

type _Routes = dict[tuple[str, str], bool]

_QUESTIONS = 8  # to a clock
_FIREWALL = (
    "let a firewall pass TCP between the hosts at the ports that systems pick: those of net.ipv4.ip_local_port_range, "
    "by default 32768 to 60999"
)


def clock_of(name: str, probe: Any, limit: float) -> Finding:
    """The offset by the quickest round trip of some."""
    seen = list[tuple[float, float]]()
    for _ in range(_QUESTIONS):
        sent = time.time()
        said, silent = answered(f"the clock of {name}", {name: probe.read_clock.remote()}, limit)
        if silent:
            return attrs.evolve(unanswered("clock", silent[name], silent[name], limit), host=name)
        got = time.time()
        seen.append(((got - sent) / 2, said[name] - (sent + got) / 2))
    uncertain, offset = min(seen)
    return clock(name, offset, uncertain)


def seen_by_all(there: Mapping[str, Host], shared: str | None, limit: float) -> Iterator[Finding]:
    """Whether all see a folder: the program leaves a note, each host an answer."""
    if shared is None:
        if len(there) > 1:
            yield note("shared", "no folder that all hosts see was looked for", "give shared=FOLDER, such as your out=")
        return
    folder, mark = Path(shared).expanduser().absolute(), f".doctor-{uuid.uuid4().hex}"
    where = "a disk that all hosts mount by the same path (NFS, Lustre, ...), for `out=` and checkpoints"
    if wrong_here := unwritable(folder, mark):
        yield attrs.evolve(wrong_here, host=socket.gethostname())
        return
    try:
        asked = {name: host.probe.check_folder.remote(str(folder), mark, name) for name, host in there.items()}
        found, wrong = answered(f"who sees {folder}", asked, limit)
        wrong |= {name: why for name, why in found.items() if why}
        for name in found.keys() - wrong.keys():
            if not wait_for_file(folder / f"{mark}.{name}"):
                wrong[name] = "writes what does not arrive here"
        for name, why in wrong.items():
            less = f"{folder} on {socket.gethostname()} is not the same there: it {why}"
            yield attrs.evolve(failed("shared", less, f"use {where}{longer(why, limit)}"), host=name)
        if not wrong:
            yield ok("shared", f"all hosts see {folder} and write there", path=str(folder))
    finally:
        for path in folder.glob(f"{mark}*"):
            path.unlink(missing_ok=True)


def connected(there: Mapping[str, Host], facts: Mapping[str, Facts], size: int, limit: float) -> Iterator[Finding]:
    """Whether each two hosts reach each other, and how fast.

    Args:
        there: the hosts.
        facts: what each of them is.
        size: bytes that two of them send each other.
        limit: seconds for each step.
    """
    reached = yield from _ports(there, limit)
    yield from _meetings("gloo", there, facts, reached, size, limit)
    if sum(bool(host.resources.get("GPU")) for host in there.values()) > 1:
        having = {name: host for name, host in there.items() if host.resources.get("GPU")}
        yield from _meetings("nccl", having, facts, reached, size, limit)


def _ports(there: Mapping[str, Host], limit: float) -> Generator[Finding, None, _Routes]:
    """Whether hosts reach each other; returns by which routes they do, at the ports that systems pick."""
    more = "give Ray an address of its own interfaces (`ray start --node-ip-address`)"
    reached = yield from _knocks(there, "that the system picked", (0,), limit, more, _FIREWALL)
    try:
        allowed = ports()
    except PlacementError as error:
        yield failed("ports", str(error), f"mend {NRL_PORTS}, or leave it out")
        return reached
    if allowed is not None:
        named = f"of {NRL_PORTS}={allowed[0]}-{allowed[-1]}"
        more = f"end what has them, or let {NRL_PORTS} name others, from 1024 on"
        wall = f"let a firewall pass TCP between the hosts at the ports {named}"
        yield from _knocks(there, named, random.sample(allowed, len(allowed)), limit, more, wall)
    return reached


def _knocks(
    there: Mapping[str, Host], which: str, tried: Sequence[int], limit: float, todo_there: str, todo_between: str
) -> Generator[Finding, None, _Routes]:
    """Whether each host reaches a port of each other one: the first of those tried that is not taken there."""
    listening = {name: each.probe.listen.remote(each.address, tried) for name, each in there.items()}
    opened, unheard = answered("who can listen", listening, limit)
    for name, why in unheard.items():
        less = f"it cannot listen at {there[name].address}, at a port {which}: {why}"
        yield attrs.evolve(failed("ports", less, todo_there), host=name)
    wanted = {(one, other): opened[other] for one in there for other in opened if one != other}
    asked = {
        route: there[route[0]].probe.check_reachable.remote(there[route[1]].address, port, CONNECTING)
        for route, port in wanted.items()
    }
    found, silent = answered("who reaches whom", asked, limit)
    reached: _Routes = {}
    for (one, other), port in wanted.items():
        why = found.get((one, other), silent.get((one, other), ""))
        reached[one, other] = not why
        if why:
            less = f"it does not reach port {port} of {other}, {there[other].address}, {which}: {why}"
            yield attrs.evolve(failed("ports", less, todo_between), host=one)
    if wanted and not unheard and all(reached.values()):
        yield ok("ports", f"each host reaches a port of each other one {which}", ports=opened)
    return reached


def _meetings(
    backend: str,
    there: Mapping[str, Host],
    facts: Mapping[str, Facts],
    reached: Mapping[tuple[str, str], bool],
    size: int,
    limit: float,
) -> Iterator[Finding]:
    """Each two hosts meet over a backend, both ways."""
    actors = dict[str, Any]()
    pairs = [pair for pair in combinations(there, 2) if all(reached.get(route, True) for route in (pair, pair[::-1]))]
    for a, b in combinations(there, 2):
        if (a, b) not in pairs:
            yield note(backend, f"{a} and {b} did not try: a port is closed between them", "see ports")
    for name, host in there.items():
        if not any(name in pair for pair in pairs):
            continue
        python = facts[name]["python_with_torch"]
        if python is None:
            less = f"not tried: no Python here has torch and Ray {connection().version}"
            yield attrs.evolve(note(backend, less, "`nrl venvs build base` there, and ask again"), host=name)
            continue
        more = {} if python == facts[name]["executable"] else {"runtime_env": {"py_executable": shlex.join([python])}}
        options = {"num_gpus": 0.01 if backend == "nccl" else 0, **more}
        actors[name] = start_on(host.node, LinkBenchmark, host.address, send_by_value(find_interface), **options)
    try:
        importing = {name: each.describe_torch.remote() for name, each in actors.items()}
        begun, dead = answered(f"{backend}: torch is imported", importing, limit)
        for name, why in dead.items():
            less = f"a process with torch does not start: {why}"
            busy = "ask again when a GPU is free: programs that run have all of them; or with a longer deadline="
            silent = warning(backend, less, busy) if backend == "nccl" else unanswered(backend, less, why, limit)
            yield attrs.evolve(silent, host=name)
        for some in rounds(list(begun)):
            met = [pair for pair in some if pair in pairs or pair[::-1] in pairs]
            yield from _round(backend, met, there, actors, size, limit)
    finally:
        kill(actors.values())


def _round(
    backend: str,
    pairs: Sequence[tuple[str, str]],
    there: Mapping[str, Host],
    actors: Mapping[str, Any],
    size: int,
    limit: float,
) -> Iterator[Finding]:
    names = {f"{a} and {b}": (a, b) for a, b in pairs}
    hosting = {name: actors[a].open_store.remote(name, limit) for name, (a, _) in names.items()}
    hosted, closed = answered(f"{backend}: who hosts whom", hosting, limit)
    asked = {}
    for name, port in hosted.items():
        where = there[names[name][0]].address
        for rank, each in enumerate(names[name]):
            asked[name, rank] = actors[each].measure.remote(name, backend, where, port, rank, size, limit)
    found, wrong = answered(f"{backend}: {', '.join(names)}", asked, 3 * limit)
    for name, pair in names.items():
        both = [found[name, rank] for rank in (0, 1) if (name, rank) in found]
        if len(both) == len(pair):
            yield way(backend, pair, both)
            continue
        why = closed.get(name) or next(text for rank in (1, 0) if (text := wrong.get((name, rank))))
        addresses = there[pair[0]].address, there[pair[1]].address
        yield apart(backend, pair, why, addresses, longer(why, limit))
