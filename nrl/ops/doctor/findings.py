"""The finding of a check: one record, which is a line for people and an entry for programs."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import attrs

from nrl.runtime.node.machine import Facts

__all__ = ["Check", "Finding", "Level", "format_gib", "make_failure", "make_note", "make_ok", "make_warning"]

type Level = Literal["ok", "note", "warning", "failed"]


def _check_todo(finding: "Finding", attribute: Any, todo: str) -> None:
    if finding.level in ("warning", "failed") and not todo:
        raise ValueError(f"Finding: {finding.check} is a {finding.level} and does not say what to do; give todo=")


@attrs.frozen
class Finding:
    """The finding of a check.

    Args:
        check: the check's name.
        level: ``"ok"``; ``"note"``: neither good nor bad; ``"warning"``: something will be slow, or fail later;
            ``"failed"``: nrl does not run like this.
        found: the state that was found, as text.
        todo: the remedy; required for a warning and a failure.
        host: the host concerned; empty: this one.
        values: the state that was found, for programs.

    Raises:
        ValueError: a warning or a failure does not say what to do.

    >>> make_warning("uv", "0.8.1, and the lock has 0.9.2", "run `uv sync --locked`").level
    'warning'
    """

    check: str
    level: Level
    found: str
    todo: str = attrs.field(default="", validator=_check_todo)
    host: str = ""
    values: Mapping[str, Any] = attrs.field(factory=dict)


type Check = Callable[[Facts], Iterable[Finding]]
"""A function from a machine's facts to findings; the check has the function's name."""


def make_ok(check: str, message: str, **values: Any) -> Finding:
    """Make a finding of level ok."""
    return Finding(check, "ok", message, values=values)


def make_note(check: str, message: str, todo: str = "", **values: Any) -> Finding:
    """Make a note: the state is neither good nor bad."""
    return Finding(check, "note", message, todo, values=values)


def make_warning(check: str, message: str, todo: str, **values: Any) -> Finding:
    """Make a warning: the program will be slow, or fail later."""
    return Finding(check, "warning", message, todo, values=values)


def make_failure(check: str, message: str, todo: str, **values: Any) -> Finding:
    """Make a failure: nrl does not run like this."""
    return Finding(check, "failed", message, todo, values=values)


def format_gib(size: float) -> str:
    """Format bytes in GiB.

    >>> format_gib(80 << 30), format_gib(200 << 20)
    ('80 GiB', '0.2 GiB')
    """
    number = size / 2**30
    return f"{number:.0f} GiB" if number >= 10 else f"{number:.1f} GiB"
