"""Checks of what is around nrl on this host: what Ray has left, the hub of models, what sandboxes need."""

import os
import socket
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nrl.envs.sandbox import Limits, bubblewrap
from nrl.errors import EnvError
from nrl.ops.doctor.findings import Check, Finding, failed, note, ok, warning
from nrl.ops.doctor.host_probe import look_at_hub
from nrl.runtime.node.machine import Facts

__all__ = ["SURROUNDINGS", "hub", "hub_judged", "ray", "sandbox", "sandbox_judged", "shared", "unwritable"]

_KNOCKING = 2.0  # seconds for an answer of what is on this machine, or near


def ray(facts: Facts) -> Iterator[Finding]:
    """Whether a cluster runs here that ``cluster=auto`` would join, or only seems to."""
    named = os.environ.get("RAY_ADDRESS")
    if named:
        yield note("ray", f"RAY_ADDRESS is {named}: cluster=ray and cluster=auto join that", address=named)
    file = Path(facts["folders"]["temporary"]["path"]) / "ray" / "ray_current_cluster"
    try:
        address = file.read_text().strip()
    except OSError:
        yield ok("ray", f"no cluster has been started here ({file.parent} says so)", address=None)
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCKING).close()
    except (OSError, ValueError) as error:
        yield warning(
            "ray",
            f"{file} says that a cluster runs at {address!r}, where nothing answers ({error})",
            f"rm {file}; until then cluster=auto finds no cluster there",
            address=address,
            stale=True,
        )
    else:
        yield ok("ray", f"a cluster runs here, at {address}", address=address, stale=False)


def hub(facts: Facts) -> Iterator[Finding]:
    """Whether models and data can be had from the hub; a token is looked for, and never shown."""
    yield hub_judged(look_at_hub())


def hub_judged(found: Mapping[str, Any]) -> Finding:
    """Whether models and data can be had from the hub on a host, by `look_at_hub` of it."""
    about = {name: found[name] for name in ("home", "token", "endpoint", "offline")}
    said = f"HF_HOME is {found['home']}; {'a token is there' if found['token'] else 'no token'}"
    if found["offline"]:
        less = f"{', '.join(found['offline'])} is set, so only what is in the cache can be had"
        return note("hub", f"{said}; {less}", **about)
    if not found["reached"]:
        return note(
            "hub",
            f"{said}; {found['endpoint']} does not answer ({found['why']})",
            "give models and data as folders, or fill the cache elsewhere; set HF_HUB_OFFLINE=1, so that nobody waits, "
            "or HF_ENDPOINT and HTTPS_PROXY, if there is a mirror or a proxy",
            reached=False,
            **about,
        )
    return ok("hub", f"{said}; {found['endpoint']} answers", reached=True, **about)


def sandbox(facts: Facts) -> Iterator[Finding]:
    """Whether programs that models write can be run in a sandbox."""
    try:
        done = bubblewrap()(["python", "-c", "print(6 * 7)"], b"", {}, Limits(seconds=20.0, cpu_seconds=20.0))
    except EnvError as error:
        text = str(error)
        more = "only environments that run programs of models need it. " + (
            "" if "install it" in text else _user_namespaces()
        )
        yield note("sandbox", text, more.strip(), works=False)
        return
    if done.stdout.strip() == b"42":
        yield ok("sandbox", f"bubblewrap works, {done.seconds:.1f} s for a program", works=True)
    else:
        wrote = done.stderr.decode(errors="replace").strip()[-200:]
        yield warning("sandbox", f"a program in it fails: {done.status}, {wrote}", _user_namespaces(), works=False)


def sandbox_judged(found: Mapping[str, Any]) -> Finding:
    """Whether the smallest sandbox runs on a host, by `nrl.ops.doctor.host_probe.look` of it."""
    if not found["why"]:
        return ok("sandbox", "bubblewrap works", works=True)
    more = "only environments that run programs of models need it: `apt-get install bubblewrap` where it is missing, "
    more += "and let the user, or the container, make user namespaces; `nrl doctor` on that host says what forbids them"
    return note("sandbox", found["why"], more, works=False)


def unwritable(folder: Path, mark: str) -> Finding | None:
    """Why a folder that all hosts should see is not on this one; None: the file ``mark`` has been written into it."""
    if not folder.is_dir():
        there = "is no folder" if folder.exists() else "does not exist"
        more = (
            "mend the path, or `mkdir -p` it once the common disk is mounted; it is not made for you: it might lie on "
        )
        return failed("shared", f"{folder} {there}", f"{more}a disk of this host alone", path=str(folder))
    try:
        (folder / mark).write_bytes(b"")
    except OSError as error:
        more = "let this user write there, or give another folder, for `out=` and checkpoints"
        return failed("shared", f"{folder} cannot be written ({error.strerror})", more, path=str(folder))
    return None


def shared(folder: Path) -> Iterator[Finding]:
    """Whether a folder that is meant for all hosts is on this one, and can be written."""
    mark = f".doctor-{uuid.uuid4().hex}"
    if wrong := unwritable(folder, mark):
        yield wrong
        return
    (folder / mark).unlink(missing_ok=True)
    yield ok("shared", f"{folder} can be written; whether other hosts see it, cluster= finds out", path=str(folder))


def _user_namespaces() -> str:
    """What keeps a user from having namespaces, as far as the kernel says."""
    for name, bad in (
        ("kernel/unprivileged_userns_clone", "0"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1"),
        ("user/max_user_namespaces", "0"),
    ):
        try:
            found = (Path("/proc/sys") / name).read_text().strip()
        except OSError:
            continue
        if found == bad:
            return f"the kernel refuses user namespaces: sysctl {name.replace('/', '.')} is {found}, change it as root"
    return "let this user, or this container, make user namespaces (docker's --security-opt seccomp=unconfined, say)"


SURROUNDINGS: tuple[Check, ...] = (ray, hub, sandbox)
"""The checks of what is around nrl, in the order in which they are shown."""
