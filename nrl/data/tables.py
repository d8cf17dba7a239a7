"""What a source is once it is read: rows, and where each of them stands."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Table", "exists"]


class Table(NamedTuple):
    """Rows, which may be made only when they are asked for, and where each of them stands.

    Args:
        name: of the source.
        rows: by index from 0.
        place: of the row of an index, as errors say it.

    >>> Table("sums", [{"question": "1+1="}], "row {}".format).place(0)
    'row 0'
    """

    name: str
    rows: Sequence[Any]
    place: Callable[[int], str]


def exists(path: Path) -> bool:
    """Whether there is a file or folder of this name; a text that no file could be named by is none.

    >>> exists(Path("a" * 5000))
    False
    """
    try:
        return path.exists()
    except PermissionError:
        return True  # whoever reads it says so
    except (OSError, ValueError):  # a name that is too long for a file, or has a NUL
        return False
