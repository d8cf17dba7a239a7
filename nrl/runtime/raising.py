"""What a function raises in another process, on its way to the one that waits for it.

Ray sends an exception only if plain pickle can, which a class of the user's own script is not for. Here it travels as
functions do, so that it arrives as what it was, and ``except MyError`` catches it; what cannot be sent or opened
arrives as a `RuntimeError` that says what it was.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, TracebackType
from typing import Any

from nrl.errors import ShippingError
from nrl.runtime.shipping import opened, shipped

__all__ = ["Raised", "carried"]


class Raised(Exception):
    """An exception on its way.

    Args:
        parts: its class, arguments and attributes, shipped; None: they cannot be.
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
            found = None if self.parts is None else opened(self.parts, copy=True)[0]
            error = _made(*found) if isinstance(found, tuple) else found
        except Exception:  # a class may do whatever it wants when an instance is made
            error = None
        return error if isinstance(error, BaseException) else RuntimeError(self.summary)


def _made(made: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    """As it was, without another call of a constructor that may want other arguments than it gave to Exception."""
    error = made.__new__(made, *args) if isinstance(made.__init__, FunctionType) else made(*args)
    error.args = args
    error.__dict__.update(attributes)
    return error


@contextmanager
def carried(who: str) -> Iterator[None]:
    """Let what is raised in the block be raised as `Raised`."""
    try:
        yield
    except Exception as error:
        lines = traceback.format_exception(type(error), error, _of_user(error.__traceback__))
        summary = "".join(traceback.format_exception_only(error)).strip()
        raise Raised(_parts(error, who), summary, "".join(lines)) from None


def _parts(error: BaseException, who: str) -> list[bytes] | None:
    knows_how = type(error).__reduce__ is not BaseException.__reduce__
    with_all = (type(error), error.args, vars(error))
    for value in (error if knows_how else with_all, (*with_all[:2], {})):  # what hangs on it may be a lock, or a file
        try:
            return [bytes(part) for part in shipped(value, who)]
        except ShippingError:
            continue
    return None


def _of_user(trace: TracebackType | None) -> TracebackType | None:
    """Without the frames through which the runtime called the function, unless they are all there is."""
    inner = trace
    while inner is not None and _passes_on(Path(inner.tb_frame.f_code.co_filename)):
        inner = inner.tb_next
    return inner or trace


def _passes_on(file: Path) -> bool:
    return file.parent == Path(__file__).parent or "ray" in file.parts
