"""Fingerprints of rows: a stream that is restored knows whether its source still has the rows of before."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from nrl.errors import DataError

__all__ = ["Fingerprint", "RowHash", "accept_changed_rows", "check_same_rows", "fingerprint_of"]


class Fingerprint(NamedTuple):
    """What identifies the rows of a source, wherever it lies and in whatever format.

    Args:
        rows: their number.
        sha256: of all rows as JSON, in the order of the source.
        tasks: how many are made of them and kept; None: as many as there are rows.
    """

    rows: int
    sha256: str
    tasks: int | None = None


class RowHash:
    """The hash of rows that come one at a time.

    >>> one, other = RowHash(), RowHash()
    >>> one.add({"prompt": "a", "answer": 1})
    >>> other.add({"answer": 1, "prompt": "a"})
    >>> one.fingerprint == other.fingerprint, one.fingerprint.rows
    (True, 1)
    """

    def __init__(self) -> None:
        self._hash, self._rows = hashlib.sha256(), 0

    def add(self, row: Any) -> None:
        """Add the next row. The order of its keys does not count."""
        try:
            text = json.dumps(row, sort_keys=True, default=_to_plain)
        except (TypeError, ValueError):  # keys of several types cannot be sorted, and some are no keys of JSON
            text = json.dumps(_with_text_keys(row), sort_keys=True, default=_to_plain)
        self._hash.update(text.encode())
        self._hash.update(b"\n")
        self._rows += 1

    @property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint of the rows so far."""
        return Fingerprint(self._rows, self._hash.hexdigest())


def fingerprint_of(rows: Iterable[Any]) -> Fingerprint:
    """Return the fingerprint of rows.

    >>> fingerprint_of([{"prompt": "a"}]).rows
    1
    """
    row_hash = RowHash()
    for row in rows:
        row_hash.add(row)
    return row_hash.fingerprint


def _to_plain(value: Any) -> Any:
    """Return a value that JSON has no form for as one that it has, equal in every process."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, bytes | bytearray):
        return value.hex()
    if hasattr(value, "tolist"):  # of NumPy and torch
        return value.tolist()
    # The text of other objects, such as pictures, may hold an address in memory, which differs from run to run.
    return type(value).__qualname__ if " at 0x" in str(value) else str(value)


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _with_text_keys(item) for key, item in value.items()}
    return [_with_text_keys(item) for item in value] if isinstance(value, list | tuple) else value


_accepted: ContextVar[bool] = ContextVar("_accepted", default=False)


@contextmanager
def accept_changed_rows(accepted: bool = True) -> Iterator[None]:
    """Restore streams within it even if the rows of their sources have changed.

    `nrl.run` does so where its configuration says ``checkpoints.data_changed=accept``.
    """
    token = _accepted.set(accepted or _accepted.get())
    try:
        yield
    finally:
        _accepted.reset(token)


def check_same_rows(name: str, saved: Mapping[str, Any], now: Fingerprint) -> None:
    """Check that a source has the rows that it had when a state was saved; say so, where changes are accepted.

    Args:
        name: of the source.
        saved: the fields of the fingerprint in the state.
        now: the fingerprint of its rows.

    Raises:
        DataError: they are other rows, or in another order.
    """
    if saved == now._asdict():
        return
    if (saved.get("rows"), saved.get("sha256")) == now[:2]:
        difference = (
            f"{now.tasks} tasks of the {now.rows} rows of {name} are kept, and {saved.get('tasks')} were at the "
            "checkpoint, as another max_tokens or format does"
        )
    elif saved.get("rows") != now.rows:
        difference = f"{name} has {now.rows} rows, and had {saved.get('rows')} at the checkpoint"
    else:
        difference = f"some of the {now.rows} rows of {name} are others, or in another order, than at the checkpoint"
    if not _accepted.get():
        raise DataError(
            f"data.tasks: {difference}. Restore the earlier rows; or set checkpoints.data_changed=accept to go on with "
            "these, of which some may come twice in the epoch that was begun and others not at all; or begin anew, "
            "with another out"
        )
    print(f"data: {difference}; going on with these (checkpoints.data_changed=accept)", flush=True)  # noqa: T201
