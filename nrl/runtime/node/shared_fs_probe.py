"""Whether hosts have the same folder: the program leaves a note there, and each host that finds it leaves an answer.

It travels by value, and needs the standard library alone.
"""

import time
from collections.abc import Callable
from typing import Any

__all__ = ["answer", "arrives"]

_PATIENCE = 3.0  # seconds for a file to arrive: a network disk does not show it to everybody at once


def arrives(path: Any) -> bool:
    """Whether a file that another host has written is seen here within some seconds.

    Args:
        path: a `pathlib.Path`, or one of a store.
    """
    until = time.monotonic() + _PATIENCE
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def _touch(path: Any) -> None:
    path.write_bytes(b"")


def answer(folder: Any, note: str, name: str, leave: Callable[[Any], None] = _touch) -> str:
    """Leave ``note.name`` beside the program's note; why that cannot be, or empty.

    Args:
        folder: a `pathlib.Path`, or one of a store.
        note: the name of the program's file.
        name: of who answers.
        leave: writes an empty file.
    """
    try:
        if not arrives(folder / note):
            return "has another folder there" if folder.exists() else "has no such folder"
    except Exception as error:  # a store raises all kinds
        return f"cannot look there ({type(error).__name__}: {error})"
    try:
        leave(folder / f"{note}.{name}")
    except Exception as error:
        return f"cannot write there ({getattr(error, 'strerror', None) or error})"
    return ""
