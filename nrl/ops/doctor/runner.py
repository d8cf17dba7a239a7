"""Run checks at once, each with a time limit: a check that hangs, or fails itself, becomes a finding."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from nrl.log import error_text, wait_until
from nrl.ops.doctor.findings import Check, Finding, make_failure, make_warning
from nrl.runtime.node.machine import Facts, collect_facts
from nrl.runtime.threads import DaemonThreadPool

__all__ = ["SILENCE", "run_checks"]

SILENCE = 3.0
"""Seconds before a line says what is waited for."""


def run_checks(checks: Sequence[Check], limit: float, look: Callable[[], Facts] = collect_facts) -> Iterator[Finding]:
    """Run checks on this host, and yield their findings in order, each as soon as it is ready.

    Args:
        checks: they run at once, in threads.
        limit: seconds for all of them. One that has not ended by then is late, a warning, and is left to itself.
        look: finds out what this machine is.
    """
    threads, until = DaemonThreadPool(len(checks) + 1, name="doctor"), time.monotonic() + limit
    machine = threads.submit(look)
    if failure := _await_check("facts", machine, until, limit):
        yield failure
        return
    for check, result in [(item, threads.submit(_list_findings, item, machine.result())) for item in checks]:
        if failure := _await_check(check.__name__, result, until, limit):
            yield failure
        else:
            yield from result.result()


def _list_findings(check: Check, machine: Facts) -> list[Finding]:
    return list(check(machine))


def _await_check(name: str, work: Future[Any], until: float, limit: float) -> Finding | None:
    """Wait for a check; return a finding if it does not end, or raises."""
    ready, began = partial(_is_done, work), time.monotonic()

    def describe(waited: float) -> str:
        return f"doctor: looking at {name}, {waited:.0f} s so far"

    if not wait_until(ready, until - began, describe, silence=SILENCE):
        # Without facts nothing is known; they also look at all disks. Another check may only be slow
        return (make_failure if name == "facts" else make_warning)(
            name,
            f"late: no answer within {limit:g} s, so nothing is known of it",
            f"deadline= waits longer ({limit:g} s now), which a busy machine needs; where it hangs for ever, try `df` "
            "(a disk of another machine that is gone), `nvidia-smi` (a driver) and `getent hosts $(hostname)` (a name "
            "server), and mend what hangs",
        )
    if (error := work.exception()) is not None:
        return make_failure(name, f"the check itself failed: {error_text(error)}", "report it, with the whole line")
    return None


def _is_done(work: Future[Any], seconds: float) -> bool:
    return bool(wait([work], seconds).done)
