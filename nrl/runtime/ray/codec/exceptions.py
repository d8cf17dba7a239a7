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
from nrl.runtime.ray.codec.pickling import deserialize, num_bytes, serialize

__all__ = ["RemoteException", "wrap_exceptions"]

_MAX_BYTES = 1_000_000  # bytes of an exception
_MAX_TEXT = 50_000  # characters of one text of an exception


class RemoteException(Exception):
    """An exception of another process, in a form that can be sent.

    Args:
        parts: its class, arguments and attributes, serialized; None: they cannot be sent.
        summary: its type and message.
        trace: its traceback, as text.

    >>> try:
    ...     with wrap_exceptions("example"):
    ...         raise ValueError("no")
    ... except RemoteException as on_its_way:
    ...     on_its_way.rebuild()
    ValueError('no')
    """

    def __init__(self, parts: list[bytes] | None, summary: str, trace: str) -> None:
        super().__init__(parts, summary, trace)
        self.parts, self.summary, self.trace = parts, summary, trace

    def __str__(self) -> str:
        return self.summary

    def rebuild(self) -> BaseException:
        """Rebuild the exception, or a `RuntimeError` with its type and message."""
        try:
            parts = None if self.parts is None else deserialize(self.parts, copy=True)[0]
            error = _rebuild(*parts) if isinstance(parts, tuple) else parts
        except Exception:  # making an instance runs code of its class
            error = None
        return error if isinstance(error, BaseException) else RuntimeError(self.summary)


def _rebuild(kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    """Rebuild an exception without calling its own constructor, which may take other arguments than ``args``."""
    error = kind.__new__(kind, *args) if isinstance(kind.__init__, FunctionType) else kind(*args)
    error.args = args
    error.__dict__.update(attributes)
    return error


@contextmanager
def wrap_exceptions(caller: str, kinds: type[BaseException] = Exception) -> Iterator[None]:
    """Raise exceptions of these kinds in the block as `RemoteException`."""
    try:
        yield
    except kinds as error:
        trace = _shorten(traceback.TracebackException(type(error), error, _drop_runtime_frames(error.__traceback__)))
        summary = "".join(trace.format_exception_only()).strip()
        raise RemoteException(_serialize_parts(error, caller), summary, "".join(trace.format())) from None


def _shorten(trace: traceback.TracebackException) -> traceback.TracebackException:
    """Truncate the texts of an exception and of its causes to a readable length."""
    chain, seen = [trace], set()
    for link in chain:
        if id(link) not in seen:
            seen.add(id(link))
            link._str = _truncate(str(link._str))  # type: ignore[attr-defined]  # to format it whole takes half a minute
            link.__notes__ = [_truncate(str(note)) for note in link.__notes__ or ()]
            chain += [cause for cause in (link.__cause__, link.__context__, *(link.exceptions or ())) if cause]
    return trace


def _serialize_parts(error: BaseException, caller: str) -> list[bytes] | None:
    """Serialize the parts from which the exception is rebuilt; None: they cannot be sent."""
    knows_how = type(error).__reduce__ is not BaseException.__reduce__
    everything = _try_serialize(error if knows_how else (type(error), error.args, vars(error)), caller)
    if everything is not None and num_bytes(everything) <= _MAX_BYTES:
        return everything
    args, left_behind, room = tuple(_shorten_argument(arg, caller) for arg in error.args), [], _MAX_BYTES
    attributes: dict[str, Any] = {}
    for name, value in vars(error).items():
        parts = _try_serialize(value, caller)
        if parts is not None and num_bytes(parts) <= room:  # a lock or a file has no parts
            room -= num_bytes(parts)
            attributes[name] = value
        elif name != "__notes__":
            left_behind.append(f"{name} ({'it cannot be sent' if parts is None else f'{num_bytes(parts):,} bytes'})")
    notes = [_truncate(str(note)) for note in getattr(error, "__notes__", ())]
    if left_behind:
        notes.append(f"Left behind in the process that raised this: {', '.join(left_behind)}")
    return _try_serialize((type(error), args, attributes | ({"__notes__": notes} if notes else {})), caller)


def _try_serialize(value: Any, caller: str) -> list[bytes] | None:
    try:
        return [bytes(part) for part in serialize(value, caller)]
    except ShippingError:
        return None


def _shorten_argument(value: Any, caller: str) -> Any:
    """Return an argument of an exception, truncated if it is a text, or a note in place of a large value."""
    if isinstance(value, str):
        return _truncate(value)
    if isinstance(value, bytes):
        return _truncate(value)
    parts = _try_serialize(value, caller)
    # An argument that cannot be sent fails later, with the full exception.
    fits = parts is None or num_bytes(parts) <= _MAX_TEXT
    return value if fits else f"<{type(value).__name__} of {num_bytes(parts or []):,} bytes, which were left out>"


def _truncate[T: (str, bytes)](text: T) -> T:
    if len(text) <= _MAX_TEXT:
        return text
    mark = f" ... ({len(text) - _MAX_TEXT:,} characters were left out) ... "
    return text[: _MAX_TEXT // 2] + (mark if isinstance(text, str) else mark.encode()) + text[-_MAX_TEXT // 2 :]


def _drop_runtime_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the runtime's own outer frames, unless it has no others."""
    frame, runtime = trace, Path(__file__).parents[2]
    while frame is not None and runtime in Path(frame.tb_frame.f_code.co_filename).parents:
        frame = frame.tb_next
    return frame or trace
