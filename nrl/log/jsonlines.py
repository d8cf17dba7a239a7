"""Writing JSON Lines files: one object a line."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Self

from nrl.log.redaction import redacted

__all__ = ["JsonLines"]


class JsonLines:
    r"""A file of one JSON object a line, written line by line. NaN and infinities become null, secrets ``***``.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
    >>> with JsonLines(path) as lines:
    ...     lines.write({"step": 0, "loss": math.nan})
    >>> path.read_text()
    '{"step": 0, "loss": null}\n'
    """

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = path.open("ab", buffering=0)  # nothing is left to be written when it is closed

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one object."""
        line = (json.dumps(redacted(_nan_to_none(record)), allow_nan=False) + "\n").encode()
        while line:  # a disk that is nearly full takes a part
            line = line[self._file.write(line) :]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _nan_to_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _nan_to_none(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_nan_to_none(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
