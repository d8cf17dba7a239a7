"""Files of rows."""

import json
from pathlib import Path
from typing import Any

from nrl.data.checks import kind, shown
from nrl.errors import DataError

__all__ = ["placed_lines", "read_jsonl"]


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a JSON Lines file: UTF-8, one object a line. Blank lines are passed over.

    Args:
        path: of the file.

    Returns:
        A dict for each row, in order.

    Raises:
        DataError: no file that can be read, no rows, or a line that is no JSON object in UTF-8; it names the line.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "sums.jsonl"
    ...     _ = path.write_text('{"question": "1+1=", "answer": "2"}\\n')
    ...     read_jsonl(path)
    [{'question': '1+1=', 'answer': '2'}]
    """
    return [row for _, row in placed_lines(path)]


def placed_lines(path: str | Path) -> list[tuple[str, dict[str, Any]]]:
    """Each row with where it stands, as errors say it."""
    if Path(path).is_dir():
        raise DataError(f"read_jsonl: {path} is a folder; give a file, one JSON object a line")
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise DataError(f"read_jsonl: there is no file {path} (looked in {Path.cwd()})") from None
    except OSError as error:
        raise DataError(f"read_jsonl: {path} cannot be read: {error.strerror}") from error
    content = content.removeprefix(b"\xef\xbb\xbf")  # some editors begin a file with a byte-order mark
    found: list[tuple[str, dict[str, Any]]] = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            place = f"{path}, line {number}"
            found.append((place, _object(line, place)))
    if not found:
        raise DataError(f"read_jsonl: {path} has no rows; it must hold one JSON object a line")
    return found


def _object(line: bytes, place: str) -> dict[str, Any]:
    try:
        text = line.decode().strip()
        row = json.loads(text)
    except UnicodeDecodeError as error:
        found = f"invalid UTF-8 (byte {line[error.start]:#04x} at position {error.start}); save the file as UTF-8"
        raise DataError(f"read_jsonl: {place}: {found}") from None
    except (ValueError, RecursionError) as error:
        found = f"invalid JSON ({error}): {shown(text)}; each line must be one JSON object"
        raise DataError(f"read_jsonl: {place}: {found}") from None
    if not isinstance(row, dict):
        found = f"{kind(row)}, not an object: {shown(text)}; each line must be one JSON object"
        raise DataError(f"read_jsonl: {place}: {found}")
    return row
