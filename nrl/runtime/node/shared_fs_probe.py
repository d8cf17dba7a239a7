"""A probe for a shared folder: the program writes a note there, and each host that sees it writes an answer.

The module travels by value, and needs the standard library alone.
"""

import time
from collections.abc import Callable
from typing import Any

__all__ = ["answer_note", "wait_for_file"]

_PATIENCE = 3.0  # seconds for a file to arrive: a network disk does not show it to everybody at once


def wait_for_file(path: Any) -> bool:
    """Return whether a file of another host appears within some seconds.

    Args:
        path: a `pathlib.Path`, or a path in a store.
    """
    until = time.monotonic() + _PATIENCE
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def _touch(path: Any) -> None:
    path.write_bytes(b"")


def answer_note(folder: Any, note: str, name: str, write: Callable[[Any], None] = _touch) -> str:
    """Write ``note.name`` beside the program's note; return why this failed, or an empty text.

    Args:
        folder: a `pathlib.Path`, or a path in a store.
        note: the name of the program's file.
        name: the name of this host.
        write: writes an empty file.
    """
    try:
        if not wait_for_file(folder / note):
            return "has another folder there" if folder.exists() else "has no such folder"
    except Exception as error:  # a store raises all kinds
        return f"cannot look there ({type(error).__name__}: {error})"
    try:
        write(folder / f"{note}.{name}")
    except Exception as error:
        return f"cannot write there ({getattr(error, 'strerror', None) or error})"
    return ""
