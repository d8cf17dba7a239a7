"""Exceptions on their way from the process that raises to the one that waits.

Ray sends an exception only if plain pickle can, and plain pickle cannot send a class of the user's own script. Here an
exception travels as functions do, so it arrives as itself, and ``except MyError`` catches it. One that cannot travel
arrives as a `RuntimeError` with its type and message. Large data that hang on an exception stay behind.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, TracebackType
from typing import Any

from nrl.errors import ShippingError
from nrl.runtime.ray.codec.pickling import deserialized, serialized, size

__all__ = ["Raised", "carried"]

_MOST = 1_000_000  # bytes of an exception that travel
_TEXT = 50_000  # characters of one text of it


class Raised(Exception):
    """An exception on its way.

    Args:
        parts: its class, arguments and attributes, serialized; None: they cannot be.
        summary: its type and message.
        trace: its traceback, as text.

    >>> try:
    ...     with carried("example"):
    ...         raise ValueError("no")
    ... except Raised as on_its_way:
    ...     on_its_way.original()
    ValueError('no')
    """

    def __init__(self, parts: list[bytes] | None, summary: str, trace: str) -> None:
        super().__init__(parts, summary, trace)
        self.parts, self.summary, self.trace = parts, summary, trace

    def __str__(self) -> str:
        return self.summary

    def original(self) -> BaseException:
        """The exception itself, or a stand-in that says what it was."""
        try:
            found = None if self.parts is None else deserialized(self.parts, copy=True)[0]
            error = _rebuilt(*found) if isinstance(found, tuple) else found
        except Exception:  # making an instance runs code of its class
            error = None
        return error if isinstance(error, BaseException) else RuntimeError(self.summary)


def _rebuilt(kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    """The exception again, without its own constructor, which may take other arguments than ``args``."""
    error = kind.__new__(kind, *args) if isinstance(kind.__init__, FunctionType) else kind(*args)
    error.args = args
    error.__dict__.update(attributes)
    return error


@contextmanager
def carried(who: str, kinds: type[BaseException] = Exception) -> Iterator[None]:
    """Raise any exception of the block as `Raised`, if it is of these kinds."""
    try:
        yield
    except kinds as error:
        told = _short(traceback.TracebackException(type(error), error, _of_user(error.__traceback__)))
        summary = "".join(told.format_exception_only()).strip()
        raise Raised(_parts(error, who), summary, "".join(told.format())) from None


def _short(told: traceback.TracebackException) -> traceback.TracebackException:
    """Cut the texts of an exception, and of those that led to it, to a length that people read."""
    several, seen = [told], set()
    for each in several:
        if id(each) not in seen:
            seen.add(id(each))
            each._str = _cut(str(each._str))  # type: ignore[attr-defined]  # to format it whole takes half a minute
            each.__notes__ = [_cut(str(note)) for note in each.__notes__ or ()]
            several += [other for other in (each.__cause__, each.__context__, *(each.exceptions or ())) if other]
    return told


def _parts(error: BaseException, who: str) -> list[bytes] | None:
    """The serialized parts that the exception is rebuilt from; None: they cannot be sent."""
    knows_how = type(error).__reduce__ is not BaseException.__reduce__
    whole = _packed(error if knows_how else (type(error), error.args, vars(error)), who)
    if whole is not None and size(whole) <= _MOST:
        return whole
    args, left, room = tuple(_small(arg, who) for arg in error.args), [], _MOST
    attributes: dict[str, Any] = {}
    for name, value in vars(error).items():
        parts = _packed(value, who)
        if parts is not None and size(parts) <= room:  # a lock or a file has no parts
            room -= size(parts)
            attributes[name] = value
        elif name != "__notes__":
            left.append(f"{name} ({'it cannot be sent' if parts is None else f'{size(parts):,} bytes'})")
    notes = [_cut(str(note)) for note in getattr(error, "__notes__", ())]
    if left:
        notes.append(f"Left behind in the process that raised this: {', '.join(left)}")
    return _packed((type(error), args, attributes | ({"__notes__": notes} if notes else {})), who)


def _packed(value: Any, who: str) -> list[bytes] | None:
    try:
        return [bytes(part) for part in serialized(value, who)]
    except ShippingError:
        return None


def _small(value: Any, who: str) -> Any:
    """An argument of an exception; a text that was cut, or a note in place of a large value."""
    if isinstance(value, str):
        return _cut(value)
    if isinstance(value, bytes):
        return _cut(value)
    parts = _packed(value, who)
    most = parts is None or size(parts) <= _TEXT  # one that cannot be sent fails when the whole is packed
    return value if most else f"<{type(value).__name__} of {size(parts or []):,} bytes, which were left out>"


def _cut[T: (str, bytes)](text: T) -> T:
    if len(text) <= _TEXT:
        return text
    mark = f" ... ({len(text) - _TEXT:,} characters were left out) ... "
    return text[: _TEXT // 2] + (mark if isinstance(text, str) else mark.encode()) + text[-_TEXT // 2 :]


def _of_user(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the runtime's own outer frames, unless it has no others."""
    inner, runtime = trace, Path(__file__).parents[2]
    while inner is not None and runtime in Path(inner.tb_frame.f_code.co_filename).parents:
        inner = inner.tb_next
    return inner or trace
