"""Errors of user code as text: secrets masked, the length bounded, each place shown once."""

import asyncio
import threading
import traceback
from pathlib import Path
from types import FrameType

from nrl.log import printable, redact

__all__ = ["Failed", "stack_text", "traceback_text"]

_LONGEST = 5000  # characters of a traceback
_NOT_USERS = (str(Path(__file__).parents[2]), asyncio.__path__[0], threading.__file__)
_shown: set[tuple[str, str, int]] = set()  # kinds of failures: the error, and its place


class Failed(Exception):
    """A call of user code raised, or did not return in time."""


def traceback_text(error: BaseException) -> str:
    """The traceback through user code; empty if it has no frames there, or was shown for such an error before."""
    tb, last = error.__traceback__, error.__traceback__
    while tb is not None and not _is_user_code(tb.tb_frame):
        tb = tb.tb_next
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if tb is None or last is None or not _is_new(type(error).__name__, last.tb_frame, last.tb_lineno):
        return ""
    text = printable(redact("".join(traceback.TracebackException(type(error), error, tb).format())))
    return f"rollout: an environment or verifier raised (said once for each place):\n{text[-_LONGEST:].rstrip()}"


def stack_text(frame: FrameType | None) -> str:
    """The stack of a thread that does not return from user code; empty if it is in none, or was shown there before."""
    users = [each for each in traceback.walk_stack(frame) if frame and _is_user_code(each[0])]
    if not users or not _is_new("TimeoutError", users[-1][0], 0):
        return ""
    text = printable(redact("".join(traceback.StackSummary.extract(iter(reversed(users))).format())))
    return f"rollout: an environment or verifier does not return (said once for each); it is at\n{text.rstrip()}"


def _is_user_code(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith(_NOT_USERS)


def _is_new(what: str, frame: FrameType, line: int) -> bool:
    kind = what, f"{frame.f_code.co_filename} {frame.f_code.co_qualname}", line
    new = kind not in _shown
    _shown.add(kind)
    return new
