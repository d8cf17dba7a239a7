"""Checks of services that nrl uses on this host: Ray, the hub of models, the sandbox."""

import os
import socket
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nrl.envs.sandbox import Limits, bubblewrap
from nrl.errors import EnvError
from nrl.ops.doctor.findings import Check, Finding, make_failure, make_note, make_ok, make_warning
from nrl.ops.doctor.host_probe import look_at_hub
from nrl.runtime.node.machine import Facts

__all__ = ["SERVICES", "check_writable", "hub", "judge_hub", "judge_sandbox", "ray", "sandbox", "shared"]

_CONNECT_SECONDS = 2.0  # seconds for an answer of what is on this machine, or near


def ray(facts: Facts) -> Iterator[Finding]:
    """Check whether the cluster that ``cluster=auto`` would join here still runs."""
    address_set = os.environ.get("RAY_ADDRESS")
    if address_set:
        yield make_note(
            "ray", f"RAY_ADDRESS is {address_set}: cluster=ray and cluster=auto join that", address=address_set
        )
    file = Path(facts["folders"]["temporary"]["path"]) / "ray" / "ray_current_cluster"
    try:
        address = file.read_text().strip()
    except OSError:
        yield make_ok("ray", f"no cluster has been started here ({file.parent} says so)", address=None)
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        yield make_warning(
            "ray",
            f"{file} says that a cluster runs at {address!r}, where nothing answers ({error})",
            f"rm {file}; until then cluster=auto finds no cluster there",
            address=address,
            stale=True,
        )
    else:
        yield make_ok("ray", f"a cluster runs here, at {address}", address=address, stale=False)


def hub(facts: Facts) -> Iterator[Finding]:
    """Check that the hub of models answers; a token is looked for, and never shown."""
    yield judge_hub(look_at_hub())


def judge_hub(hub_facts: Mapping[str, Any]) -> Finding:
    """Judge whether a host can download models and data from the hub, by `look_at_hub`."""
    values = {name: hub_facts[name] for name in ("home", "token", "endpoint", "offline")}
    message = f"HF_HOME is {hub_facts['home']}; {'a token is there' if hub_facts['token'] else 'no token'}"
    if hub_facts["offline"]:
        reason = f"{', '.join(hub_facts['offline'])} is set, so only what is in the cache can be had"
        return make_note("hub", f"{message}; {reason}", **values)
    if not hub_facts["reached"]:
        return make_note(
            "hub",
            f"{message}; {hub_facts['endpoint']} does not answer ({hub_facts['why']})",
            "give models and data as folders, or fill the cache elsewhere; set HF_HUB_OFFLINE=1, so that nobody waits, "
            "or HF_ENDPOINT and HTTPS_PROXY, if there is a mirror or a proxy",
            reached=False,
            **values,
        )
    return make_ok("hub", f"{message}; {hub_facts['endpoint']} answers", reached=True, **values)


def sandbox(facts: Facts) -> Iterator[Finding]:
    """Check that programs of models can be run in a sandbox."""
    try:
        run = bubblewrap()(["python", "-c", "print(6 * 7)"], b"", {}, Limits(seconds=20.0, cpu_seconds=20.0))
    except EnvError as error:
        text = str(error)
        advice = "only environments that run programs of models need it. " + (
            "" if "install it" in text else _advise_user_namespaces()
        )
        yield make_note("sandbox", text, advice.strip(), works=False)
        return
    if run.stdout.strip() == b"42":
        yield make_ok("sandbox", f"bubblewrap works, {run.seconds:.1f} s for a program", works=True)
    else:
        wrote = run.stderr.decode(errors="replace").strip()[-200:]
        yield make_warning(
            "sandbox", f"a program in it fails: {run.status}, {wrote}", _advise_user_namespaces(), works=False
        )


def judge_sandbox(sandbox_facts: Mapping[str, Any]) -> Finding:
    """Judge whether a minimal sandbox runs on a host, by `nrl.ops.doctor.host_probe.look_at_host`."""
    if not sandbox_facts["why"]:
        return make_ok("sandbox", "bubblewrap works", works=True)
    advice = "only environments that run programs of models need it: `apt-get install bubblewrap` where it is missing, "
    advice += (
        "and let the user, or the container, make user namespaces; `nrl doctor` on that host says what forbids them"
    )
    return make_note("sandbox", sandbox_facts["why"], advice, works=False)


def check_writable(folder: Path, mark: str) -> Finding | None:
    """Write the file ``mark`` into a folder that all hosts should see; return a finding if this fails."""
    if not folder.is_dir():
        state = "is no folder" if folder.exists() else "does not exist"
        advice = (
            "mend the path, or `mkdir -p` it once the common disk is mounted; it is not made for you: it might lie on "
        )
        return make_failure("shared", f"{folder} {state}", f"{advice}a disk of this host alone", path=str(folder))
    try:
        (folder / mark).write_bytes(b"")
    except OSError as error:
        advice = "let this user write there, or give another folder, for `out=` and checkpoints"
        return make_failure("shared", f"{folder} cannot be written ({error.strerror})", advice, path=str(folder))
    return None


def shared(folder: Path) -> Iterator[Finding]:
    """Check that a folder that all hosts should see exists on this one, and can be written."""
    mark = f".doctor-{uuid.uuid4().hex}"
    if failure := check_writable(folder, mark):
        yield failure
        return
    (folder / mark).unlink(missing_ok=True)
    yield make_ok(
        "shared", f"{folder} can be written; whether other hosts see it, cluster= finds out", path=str(folder)
    )


def _advise_user_namespaces() -> str:
    """Advise how to enable user namespaces, by the kernel's settings."""
    for name, bad in (
        ("kernel/unprivileged_userns_clone", "0"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1"),
        ("user/max_user_namespaces", "0"),
    ):
        try:
            value = (Path("/proc/sys") / name).read_text().strip()
        except OSError:
            continue
        if value == bad:
            return f"the kernel refuses user namespaces: sysctl {name.replace('/', '.')} is {value}, change it as root"
    return "let this user, or this container, make user namespaces (docker's --security-opt seccomp=unconfined, say)"


SERVICES: tuple[Check, ...] = (ray, hub, sandbox)
"""The checks of services, in the order of display."""
