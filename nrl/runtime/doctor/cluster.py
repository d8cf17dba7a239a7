"""The doctor of a Ray cluster: asks every host, compares them, and lets each two of them meet."""

import contextlib
import functools
import random
import shlex
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import attrs

from nrl.errors import NrlError, PlacementError
from nrl.files import arrives
from nrl.log import error_text, wait_until
from nrl.runtime.clusters import cluster as entered
from nrl.runtime.doctor.comparing import clock, differences, rounds, slots, way
from nrl.runtime.doctor.findings import Finding, failed, note, ok, warning
from nrl.runtime.doctor.hardware import HARDWARE, host_name
from nrl.runtime.doctor.installation import environments_judged, torch_judged, torch_to_come, uv_judged
from nrl.runtime.doctor.surroundings import hub_judged, sandbox_judged, unwritable
from nrl.runtime.doctor.there import look, look_at_torch
from nrl.runtime.executables.recipes import recipe
from nrl.runtime.executables.registry import EXECUTABLES
from nrl.runtime.node.environments import Recipe
from nrl.runtime.node.machine import Facts, facts
from nrl.runtime.node.meeting import Meeting
from nrl.runtime.node.probe import Probe
from nrl.runtime.ports import NRL_PORTS, ports
from nrl.runtime.ray.connection import target
from nrl.runtime.ray.nodes import by_value, on_node
from nrl.runtime.ray.sockets import interface_of

__all__ = ["hosts", "judged"]

_SILENCE = 3.0  # seconds before a line says what is waited for
_QUESTIONS = 8  # to a clock
_PATIENCE = 3.0  # seconds for a file to arrive from another host
_CONNECTING = 5.0  # seconds for a port to answer
_GLANCE = 0.5  # seconds between two looks who has come
_GREETING = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"
_LATE = "no answer within"  # how it begins if somebody may only be slow
_HEAD = "`ray status` on the head says whether it runs; see docs/clusters.md"
_FIREWALL = (
    "let a firewall pass TCP between the hosts at the ports that systems pick: those of net.ipv4.ip_local_port_range, "
    "by default 32768 to 60999"
)


class _Host(NamedTuple):
    """A node of the cluster, and the actor that speaks for it."""

    node: str
    address: str
    resources: Mapping[str, float]
    probe: Any


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
    if dumb := _says_nothing(address, limit):
        yield failed("cluster", dumb, f"give the address of the head that `ray start --head` printed. {_HEAD}")
        return
    try:
        with entered(address, deadline=limit):
            import ray

            took = f"; to {'start' if address == 'ray' else 'join'} it took {time.monotonic() - began:.1f} s"
            try:
                come = [] if expected is None else [_come(expected, limit)]
                there = _hosts()
                where = ray.get_runtime_context().gcs_address
                said = f"Ray {ray.__version__} at {where}, {len(there)} host(s){took}"
                yield ok("cluster", said, address=where, version=ray.__version__, hosts=list(there))
                yield from come
                yield from _lost()
                yield from _asked(there, shared, size, limit)
            except ray.exceptions.RayError as error:  # the head is gone again
                yield failed("cluster", _reason(error), _HEAD)
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
            socket.create_connection((host.strip("[]"), int(port)), timeout=min(limit, _CONNECTING)).close()
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
        until = time.monotonic() + seconds
        while len(_nodes(True)) < expected:
            if time.monotonic() >= until:
                return False
            time.sleep(min(_GLANCE, seconds))
        return True

    def told(waited: float) -> str:
        return f"doctor: {len(_nodes(True))} of {expected} hosts have come, {waited:.0f} s so far"

    all_of_them = wait_until(came, limit, told, silence=_SILENCE)
    there = sorted(str(each["NodeManagerHostname"]) for each in _nodes(True))
    said = f"{len(there)} of {expected} have come"
    values = {"expected": expected, "come": there}
    if all_of_them:
        return ok("hosts", said, **values)
    more = (
        "look at what `ray start` said on those that are missing, and whether they reach the head's port; deadline= "
        f"waits longer ({limit:g} s now)"
    )
    return failed("hosts", f"{said} within {limit:g} s: {', '.join(there)}", more, **values)


def _hosts() -> dict[str, _Host]:
    """The nodes by name: that of the host, with its port where several are one machine."""
    import ray

    alive = _nodes(True)
    names = [str(each["NodeManagerHostname"]) for each in alive]
    made: Any = ray.remote(by_value(Probe))
    found = {}
    for name, each in zip(names, alive, strict=True):
        unique = name if names.count(name) == 1 else f"{name}:{each['NodeManagerPort']}"
        probe = made.options(**_on(each["NodeID"])).remote()
        found[unique] = _Host(each["NodeID"], str(each["NodeManagerAddress"]), each["Resources"], probe)
    return found


def _nodes(alive: bool) -> list[dict[str, Any]]:
    import ray

    return [each for each in ray.nodes() if each["Alive"] == alive]


def _lost() -> Iterator[Finding]:
    """Nodes that were in the cluster and are not any more, unless they are back."""
    here = {each["NodeManagerAddress"] for each in _nodes(True)}
    for each in _nodes(False):
        if each["NodeManagerAddress"] not in here:
            gone = f"Ray has lost it ({each['NodeManagerAddress']})"
            more = "`ray start` there again, if it should be in the cluster"
            yield attrs.evolve(warning("host", gone, more), host=str(each["NodeManagerHostname"]))


def _on(node: str) -> dict[str, Any]:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


def _asked(there: dict[str, _Host], shared: str | None, size: int, limit: float) -> Iterator[Finding]:
    import ray

    own, this = facts(), ray.get_runtime_context().get_node_id()
    asked = {name: host.probe.facts.remote(ray.__version__) for name, host in there.items()}
    looking = {
        name: on_node(host.node, look, ray.__version__, tuple(EXECUTABLES))
        for name, host in there.items()
        if host.node != this  # whose own checks have been shown
    }
    answers, silent = _answers("what each host is", asked, limit)
    for name, error in silent.items():
        more = "is it on, and its cable in? Ray takes up to 65 s to notice. Else read Ray's logs there, start it again"
        more += f"; a busy one needs a longer deadline= ({limit:g} s now)" if _late(error) else ""
        yield attrs.evolve(failed("host", f"{there.pop(name).address}: {error}", more), host=name)
    looks, unseen = _answers("what is installed on each host", {n: looking[n] for n in answers if n in looking}, limit)
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
            found = judged(looks[name], each, ray.__version__, made, build)
            yield from (attrs.evolve(finding, host=name) for finding in found)
        if name in unseen:
            less = f"uv, environments, hub, sandbox and torch are not known: {unseen[name]}"
            yield attrs.evolve(_unknown("installation", less, unseen[name], limit), host=name)
    yield from differences(answers, own)
    for name in answers:
        if there[name].node != this:
            yield _clock(name, there[name].probe, limit)
    yield from _shared(there, shared, limit)
    if len(there) < 2:
        yield note("gloo", "there is one host, so none is between two")
        return
    reached = dict[tuple[str, str], bool]()
    yield from _ports(there, limit, reached)
    yield from _meetings("gloo", there, answers, reached, size, limit)
    if sum(bool(host.resources.get("GPU")) for host in there.values()) > 1:
        having = {name: host for name, host in there.items() if host.resources.get("GPU")}
        yield from _meetings("nccl", having, answers, reached, size, limit)


def judged(
    looked: Mapping[str, Mapping[str, Any]],
    machine: Facts,
    ray: str,
    made: Callable[[str], Recipe],
    build: Callable[[], Mapping[str, Any]],
) -> Iterator[Finding]:
    """What a look at another host means.

    Args:
        looked: what `nrl.runtime.doctor.there.look` has seen there.
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


def _late(why: str) -> bool:
    return why.startswith(_LATE)


def _unknown(check: str, less: str, why: str, limit: float) -> Finding:
    """What has not been answered: not known of who is late, else a failure."""
    if _late(why):
        return warning(check, less, f"deadline= waits longer ({limit:g} s now): that host, or this one, is busy")
    return failed(check, less, "look at Ray's logs there")


def _answers[K](what: str, asked: Mapping[K, Any], limit: float) -> tuple[dict[K, Any], dict[K, str]]:
    """What came of calls, by their names, and why nothing came of the others."""
    import ray

    def arrived(seconds: float) -> bool:
        return len(ray.wait(list(asked.values()), num_returns=len(asked), timeout=seconds)[1]) == 0

    found, silent = dict[K, Any](), dict[K, str]()
    if asked:
        wait_until(arrived, limit, lambda waited: f"doctor: {what}, {waited:.0f} s so far", silence=_SILENCE)
    for name, ref in asked.items():
        try:
            found[name] = ray.get(ref, timeout=0)
        except ray.exceptions.GetTimeoutError:
            silent[name] = f"{_LATE} {limit:g} s"
        except ray.exceptions.RayError as error:
            silent[name] = _reason(error)
    return found, silent


def _reason(error: Exception) -> str:
    cause = getattr(error, "cause", None) or error
    return error_text(cause).splitlines()[0]


def _clock(name: str, probe: Any, limit: float) -> Finding:
    """The offset by the quickest round trip of some."""
    import ray

    seen = list[tuple[float, float]]()
    for _ in range(_QUESTIONS):
        sent = time.time()
        try:
            said = ray.get(probe.time.remote(), timeout=limit)
        except ray.exceptions.RayError as error:
            late = isinstance(error, ray.exceptions.GetTimeoutError)
            why = f"{_LATE} {limit:g} s" if late else _reason(error)
            return attrs.evolve(_unknown("clock", why, why, limit), host=name)
        got = time.time()
        seen.append(((got - sent) / 2, said - (sent + got) / 2))
    uncertain, offset = min(seen)
    return clock(name, offset, uncertain)


def _shared(there: Mapping[str, _Host], shared: str | None, limit: float) -> Iterator[Finding]:
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
        asked = {name: host.probe.sees.remote(str(folder), mark, name) for name, host in there.items()}
        found, wrong = _answers(f"who sees {folder}", asked, limit)
        wrong |= {name: why for name, why in found.items() if why}
        for name in found.keys() - wrong.keys():
            if not arrives(folder / f"{mark}.{name}", _PATIENCE):
                wrong[name] = "writes what does not arrive here"
        for name, why in wrong.items():
            less = f"{folder} on {socket.gethostname()} is not the same there: it {why}"
            late = f"; a busy host needs a longer deadline= ({limit:g} s now)" if _late(why) else ""
            yield attrs.evolve(failed("shared", less, f"use {where}{late}"), host=name)
        if not wrong:
            yield ok("shared", f"all hosts see {folder} and write there", path=str(folder))
    finally:
        for path in folder.glob(f"{mark}*"):
            path.unlink(missing_ok=True)


def _ports(there: Mapping[str, _Host], limit: float, reached: dict[tuple[str, str], bool]) -> Iterator[Finding]:
    """Whether hosts reach each other; ``reached`` gets by which routes, at the ports that systems pick."""
    more = "give Ray an address of its own interfaces (`ray start --node-ip-address`)"
    reached |= yield from _knocks(there, "that the system picked", (0,), limit, more, _FIREWALL)
    try:
        allowed = ports()
    except PlacementError as error:
        yield failed("ports", str(error), f"mend {NRL_PORTS}, or leave it out")
        return
    if allowed is not None:
        named = f"of {NRL_PORTS}={allowed[0]}-{allowed[-1]}"
        more = f"end what has them, or let {NRL_PORTS} name others, from 1024 on"
        wall = f"let a firewall pass TCP between the hosts at the ports {named}"
        yield from _knocks(there, named, random.sample(allowed, len(allowed)), limit, more, wall)


def _knocks(
    there: Mapping[str, _Host], which: str, tried: Sequence[int], limit: float, deaf_todo: str, closed_todo: str
) -> Generator[Finding, None, dict[tuple[str, str], bool]]:
    """Whether each host reaches a port of each other one: the first of those tried that is not taken there."""
    listening = {name: each.probe.listen.remote(each.address, tried) for name, each in there.items()}
    opened, deaf = _answers("who can listen", listening, limit)
    for name, why in deaf.items():
        less = f"it cannot listen at {there[name].address}, at a port {which}: {why}"
        yield attrs.evolve(failed("ports", less, deaf_todo), host=name)
    wanted = {(one, other): opened[other] for one in there for other in opened if one != other}
    asked = {
        route: there[route[0]].probe.reaches.remote(there[route[1]].address, port, _CONNECTING)
        for route, port in wanted.items()
    }
    found, silent = _answers("who reaches whom", asked, limit)
    reached = dict[tuple[str, str], bool]()
    for (one, other), port in wanted.items():
        why = found.get((one, other), silent.get((one, other), ""))
        reached[one, other] = not why
        if why:
            less = f"it does not reach port {port} of {other}, {there[other].address}, {which}: {why}"
            yield attrs.evolve(failed("ports", less, closed_todo), host=one)
    if wanted and all(reached.values()):
        yield ok("ports", f"each host reaches a port of each other one {which}", ports=opened)
    return reached


def _meetings(
    backend: str,
    there: Mapping[str, _Host],
    answers: Mapping[str, Facts],
    reached: Mapping[tuple[str, str], bool],
    size: int,
    limit: float,
) -> Iterator[Finding]:
    """Each two hosts meet over a backend, both ways."""
    import ray

    made: Any = ray.remote(by_value(Meeting))
    actors = dict[str, Any]()
    pairs = [pair for pair in combinations(there, 2) if all(reached.get(route, True) for route in (pair, pair[::-1]))]
    for a, b in combinations(there, 2):
        if (a, b) not in pairs:
            yield note(backend, f"{a} and {b} did not try: a port is closed between them", "see ports")
    for name, host in there.items():
        if not any(name in pair for pair in pairs):
            continue
        python = answers[name]["python_with_torch"]
        if python is None:
            less = f"not tried: no Python here has torch and Ray {ray.__version__}"
            yield attrs.evolve(note(backend, less, "`nrl venvs build base` there, and ask again"), host=name)
            continue
        more = {} if python == answers[name]["executable"] else {"runtime_env": {"py_executable": shlex.join([python])}}
        placed = made.options(**_on(host.node), num_gpus=0.01 if backend == "nccl" else 0, **more)
        actors[name] = placed.remote(host.address, by_value(interface_of))
    try:
        importing = {name: each.torch.remote() for name, each in actors.items()}
        begun, dead = _answers(f"{backend}: torch is imported", importing, limit)
        for name, why in dead.items():
            less = f"a process with torch does not start: {why}"
            busy = "ask again when a GPU is free: programs that run have all of them; or with a longer deadline="
            dumb = warning(backend, less, busy) if backend == "nccl" else _unknown(backend, less, why, limit)
            yield attrs.evolve(dumb, host=name)
        for some in rounds(list(begun)):
            met = [pair for pair in some if pair in pairs or pair[::-1] in pairs]
            yield from _round(backend, met, there, actors, size, limit)
    finally:
        for each in actors.values():
            ray.kill(each, no_restart=True)


def _round(
    backend: str,
    pairs: Sequence[tuple[str, str]],
    there: Mapping[str, _Host],
    actors: Mapping[str, Any],
    size: int,
    limit: float,
) -> Iterator[Finding]:
    names = {f"{a} and {b}": (a, b) for a, b in pairs}
    hosting = {name: actors[a].host.remote(name, limit) for name, (a, _) in names.items()}
    hosted, closed = _answers(f"{backend}: who hosts whom", hosting, limit)
    asked = {}
    for name, port in hosted.items():
        where = there[names[name][0]].address
        for rank, each in enumerate(names[name]):
            asked[name, rank] = actors[each].meet.remote(name, backend, where, port, rank, size, limit)
    found, wrong = _answers(f"{backend}: {', '.join(names)}", asked, 3 * limit)
    for name, pair in names.items():
        both = [found[name, rank] for rank in (0, 1) if (name, rank) in found]
        if len(both) == len(pair):
            yield way(backend, pair, both)
            continue
        why = closed.get(name) or next(text for rank in (1, 0) if (text := wrong.get((name, rank))))
        addresses = " and ".join(there[each].address for each in pair)
        more = f"set {backend.upper()}_SOCKET_IFNAME on both before `ray start`, to the interface that has {addresses}"
        more += f"; busy hosts need a longer deadline= ({limit:g} s now)" if _late(why) else ""
        yield failed(backend, f"{name} do not meet: {why}", more, hosts=list(pair))
