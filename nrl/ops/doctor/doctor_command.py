"""The command ``nrl doctor``: does this machine, or this cluster, run nrl, and if not, what is to be done?"""

import contextlib
import json
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console
from rich.text import Text

from nrl.arguments import checked
from nrl.ops.doctor.findings import Finding, make_failure
from nrl.runtime.node.machine import Facts

__all__ = ["Doctor", "main"]

_FORMAT = 1  # The version of the JSON document; it changes if programs that read it have to.
_SHOWN = {
    "ok": ("OK", "green"),
    "note": ("note", "cyan"),
    "warning": ("WARNING", "yellow"),
    "failed": ("FAILED", "red"),
}
_positive = attrs.validators.gt(0.0)


def _check_address(cfg: Any, field: Any, cluster: str) -> None:
    if cluster.startswith("ray://") or (cluster not in ("local", "ray", "auto") and ":" not in cluster):
        raise ValueError(f"cluster is {cluster!r}; give local, ray, auto, or the HOST:PORT of a Ray cluster")


def _check_hosts(cfg: Any, field: Any, hosts: int | None) -> None:
    if hosts is None:
        return
    if cfg.cluster == "local":
        raise ValueError(
            f"hosts={hosts} is how many hosts of a cluster have to be there; give cluster=auto as well, or HOST:PORT"
        )
    if hosts < 1:
        raise ValueError(f"hosts is {hosts}; give how many hosts have to be there, 1 at least")


@checked("doctor")
@attrs.frozen
class Doctor:
    """Say whether this machine, or a Ray cluster, runs nrl, and what to do if it does not."""

    cluster: str = attrs.field(default="local", validator=_check_address)  # local: this host; ray, auto, HOST:PORT: all
    hosts: int | None = attrs.field(
        default=None, validator=_check_hosts
    )  # number of hosts that the cluster has to have
    shared: str | None = None  # a folder that all hosts should see, such as your out=
    megabytes: int = attrs.field(default=32, validator=attrs.validators.ge(1))  # data that two hosts exchange
    json: bool = False  # print a JSON document instead of lines; --json is the same
    deadline: float = attrs.field(default=60.0, validator=_positive)  # seconds for this host, and for each step beyond


def main(cfg: Doctor) -> int:
    """Check, and print what was found, a line each.

    Returns:
        The exit status: 1 if something failed, else 0.
    """
    shown = list[Finding]()
    out, host = sys.stdout, socket.gethostname()
    console = Console(file=out, soft_wrap=True, highlight=False)
    with contextlib.redirect_stdout(sys.stderr):  # Ray and others print progress to stdout.
        for finding in _run_checks(cfg):
            if not cfg.json:
                if not shown or finding.check == "cluster":
                    console.print(Text(f"this host, {host}" if not shown else "the cluster", "bold"))
                console.print(_format_finding(finding))
            shown.append(finding)
    if cfg.json:
        print(json.dumps(_make_document(host, shown), indent=1), file=out)
    else:
        console.print(_summarize(shown))
    return int(any(finding.level == "failed" for finding in shown))


def _run_checks(cfg: Doctor) -> Iterator[Finding]:
    from nrl.ops.doctor.hardware import HARDWARE
    from nrl.ops.doctor.installation import INSTALLATION, torch
    from nrl.ops.doctor.runner import run_checks
    from nrl.ops.doctor.service_checks import SERVICES
    from nrl.ops.doctor.service_checks import shared as see

    stale = None
    checks = [*INSTALLATION, *HARDWARE, *SERVICES, torch]
    if cfg.shared is not None and cfg.cluster == "local":  # a cluster's hosts are asked below
        folder = Path(cfg.shared).expanduser().absolute()

        def shared(facts: Facts) -> Iterable[Finding]:
            return see(folder)

        checks.append(shared)
    for finding in run_checks(checks, cfg.deadline):
        stale = finding if finding.values.get("stale") else stale
        yield finding
    if cfg.cluster == "local":
        return
    if cfg.cluster == "auto" and stale is not None and not os.environ.get("RAY_ADDRESS"):
        yield make_failure("cluster", "not joined: what Ray has left here leads nowhere, see ray", stale.todo)
        return
    from nrl.ops.doctor.cluster import check_hosts

    yield from check_hosts(cfg.cluster, cfg.shared, cfg.megabytes << 20, cfg.deadline, cfg.hosts)


def _format_finding(finding: Finding) -> Text:
    word, colour = _SHOWN[finding.level]
    prefix = f"{finding.host}: " if finding.host else ""
    line = Text.assemble((f"{word:<8}", colour), f"{finding.check.replace('_', ' '):<14}{prefix}{finding.found}")
    return Text.assemble(line, f"\n{'':22}-> {finding.todo}") if finding.todo else line


def _summarize(findings: Iterable[Finding]) -> str:
    counts = Counter(finding.level for finding in findings)
    failures = f"{counts['failed']} failed" if counts["failed"] else "nothing failed"
    return f"doctor: {failures}, {counts['warning']} warnings, {counts['note']} notes"


def _make_document(host: str, findings: Iterable[Finding]) -> dict[str, Any]:
    records = [attrs.asdict(record) for record in findings]
    failed = any(record["level"] == "failed" for record in records)
    timestamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"nrl_doctor": _FORMAT, "host": host, "time": timestamp, "failed": failed, "findings": records}
