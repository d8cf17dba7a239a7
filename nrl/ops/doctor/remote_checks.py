"""What the doctor asks of hosts of a Ray cluster, all of them at once, and what it makes of those that say nothing."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from nrl.log import error_text, wait_until
from nrl.ops.doctor.findings import Finding, failed, warning
from nrl.ops.doctor.runner import SILENCE
from nrl.runtime.ray.host_actors import get_reply, ray_error, wait_for_all

__all__ = ["CONNECTING", "Host", "answered", "longer", "reason", "unanswered"]

CONNECTING = 5.0
"""Seconds for a port to answer."""
_LATE = "no answer within"  # how it begins if somebody may only be slow


class Host(NamedTuple):
    """A node of the cluster, and the actor that speaks for it."""

    node: str
    address: str
    resources: Mapping[str, float]
    probe: Any


def answered[K](what: str, asked: Mapping[K, Any], limit: float) -> tuple[dict[K, Any], dict[K, str]]:
    """What came of calls, by their names, and why nothing came of the others."""
    found, silent = dict[K, Any](), dict[K, str]()
    if asked:
        wait_until(
            partial(wait_for_all, asked),
            limit,
            lambda waited: f"doctor: {what}, {waited:.0f} s so far",
            silence=SILENCE,
        )
    for name, ref in asked.items():
        try:
            found[name] = get_reply(ref)
        except TimeoutError:
            silent[name] = f"{_LATE} {limit:g} s"
        except ray_error() as error:
            silent[name] = reason(error)
    return found, silent


def reason(error: Exception) -> str:
    """The first line of what is wrong: of the call, if Ray only says that it failed; and what NCCL said, if it did."""
    cause = getattr(error, "cause", None) or error
    text, _, said = error_text(cause).partition("\nLast error:\n")
    return ": ".join(each.splitlines()[0] for each in (text, said) if each)


def _is_late(why: str) -> bool:
    """Whether nothing came, so that somebody may only be slow."""
    return why.startswith(_LATE)


def longer(why: str, limit: float) -> str:
    """What else to do about who is late: a clause, or nothing."""
    return f"; a busy host needs a longer deadline= ({limit:g} s now)" if _is_late(why) else ""


def unanswered(check: str, found: str, why: str, limit: float) -> Finding:
    """What has not been answered: not known of who is late, else a failure."""
    if _is_late(why):
        return warning(check, found, f"deadline= waits longer ({limit:g} s now): that host, or this one, is busy")
    return failed(check, found, "look at Ray's logs there")
