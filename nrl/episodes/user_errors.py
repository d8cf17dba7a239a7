"""Errors of user code: masked, cut to a bounded length, each place shown once."""

import asyncio
import threading
import traceback
from pathlib import Path
from types import FrameType

from nrl.log import redact

__all__ = ["Failed", "hangs_at", "raised_at", "said"]

_LONGEST = 1000  # characters of an error's message
_NOT_USERS = (str(Path(__file__).parents[1]), asyncio.__path__[0], threading.__file__)
_shown: set[tuple[str, str, int]] = set()  # kinds of failures: what was raised, and where


class Failed(Exception):
    """A call of user code has no value.

    >>> str(Failed("ValueError: no"))
    'ValueError: no'
    """


def said(error: BaseException) -> str:
    """What an exception says, whatever its ``__str__`` does; secrets are masked.

    >>> said(ValueError("no"))
    'ValueError: no'
    """
    try:
        text = str(error)
    except BaseException as other:
        text = f"(its message cannot be shown: its __str__ raised {type(other).__name__})"
    return f"{type(error).__name__}: {redact(text[: 5 * _LONGEST])[:_LONGEST]}"


def raised_at(error: BaseException) -> str:
    """The traceback through user code; empty where it has no frames there, or was shown for such an error before.

    >>> raised_at(ValueError("no"))
    ''
    """
    tb, last = error.__traceback__, error.__traceback__
    while tb is not None and not _users(tb.tb_frame):
        tb = tb.tb_next
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if tb is None or last is None or not _first(type(error).__name__, last.tb_frame, last.tb_lineno):
        return ""
    text = redact("".join(traceback.TracebackException(type(error), error, tb).format()))
    return f"rollout: an environment or verifier raised (said once for each place):\n{text[-5 * _LONGEST :].rstrip()}"


def hangs_at(frame: FrameType | None) -> str:
    """Where in user code a thread is that does not return; empty where it is in none, or was shown there before.

    >>> hangs_at(None)
    ''
    """
    users = [each for each in traceback.walk_stack(frame) if frame and _users(each[0])]
    if not users or not _first("TimeoutError", users[-1][0], 0):
        return ""
    text = redact("".join(traceback.StackSummary.extract(iter(reversed(users))).format()))
    return f"rollout: an environment or verifier does not return (said once for each); it is at\n{text.rstrip()}"


def _users(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith(_NOT_USERS)


def _first(what: str, frame: FrameType, line: int) -> bool:
    kind = what, f"{frame.f_code.co_filename} {frame.f_code.co_qualname}", line
    new = kind not in _shown
    _shown.add(kind)
    return new
