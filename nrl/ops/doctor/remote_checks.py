"""Requests of the doctor to all hosts of a Ray cluster at once, and findings on hosts that do not answer."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from nrl.log import error_text, wait_until
from nrl.ops.doctor.findings import Finding, make_failure, make_warning
from nrl.ops.doctor.runner import SILENCE
from nrl.runtime.ray.host_actors import get_reply, ray_error, wait_for_all

__all__ = [
    "CONNECT_SECONDS",
    "ProbedHost",
    "advise_longer_deadline",
    "collect_replies",
    "describe_error",
    "make_unanswered",
]

CONNECT_SECONDS = 5.0
"""Seconds for a port to answer."""
_LATE = "no answer within"  # how it begins if somebody may only be slow


class ProbedHost(NamedTuple):
    """A node of the cluster, and the actor that speaks for it."""

    node: str
    address: str
    resources: Mapping[str, float]
    probe: Any


def collect_replies[K](subject: str, calls: Mapping[K, Any], limit: float) -> tuple[dict[K, Any], dict[K, str]]:
    """Collect the replies of calls by name, and the errors of the others."""
    replies, silent = dict[K, Any](), dict[K, str]()
    if calls:
        wait_until(
            partial(wait_for_all, calls.values()),
            limit,
            lambda waited: f"doctor: {subject}, {waited:.0f} s so far",
            silence=SILENCE,
        )
    for name, ref in calls.items():
        try:
            replies[name] = get_reply(ref)
        except TimeoutError:
            silent[name] = f"{_LATE} {limit:g} s"
        except ray_error() as error:
            silent[name] = describe_error(error)
    return replies, silent


def describe_error(error: Exception) -> str:
    """Return the first line of an error, or of the error behind it, and NCCL's last error, if there is one."""
    inner = getattr(error, "cause", None) or error
    text, _, detail = error_text(inner).partition("\nLast error:\n")
    return ": ".join(part.splitlines()[0] for part in (text, detail) if part)


def _is_late(reason: str) -> bool:
    """Return whether no reply came, so that the host may only be slow."""
    return reason.startswith(_LATE)


def advise_longer_deadline(reason: str, limit: float) -> str:
    """Return a clause about a longer deadline, if the host is late."""
    return f"; a busy host needs a longer deadline= ({limit:g} s now)" if _is_late(reason) else ""


def make_unanswered(check: str, message: str, reason: str, limit: float) -> Finding:
    """Make a finding on a host without a reply: a warning if it is late, else a failure."""
    if _is_late(reason):
        return make_warning(
            check, message, f"deadline= waits longer ({limit:g} s now): that host, or this one, is busy"
        )
    return make_failure(check, message, "look at Ray's logs there")
