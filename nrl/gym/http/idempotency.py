"""Calls that are made once: what is repeated under the same name gets the same answer, also one that is an error."""

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Hashable, MutableMapping
from typing import Any

import attrs
import msgspec

from nrl.gym.http import protocol
from nrl.log import error_text
from nrl.log.redaction import redact

__all__ = ["Act", "Refused", "answered", "failed", "once", "users"]

_encode = msgspec.json.Encoder().encode


class Refused(Exception):
    """There is no answer.

    Args:
        status: of HTTP.
        code: as `nrl.gym.http.protocol.Failure` has it.
        message: what was found, and what to do.
        kind: the type of the exception that the client raises.
        after: seconds after which it is worth asking again; None: it is not.
        unread: whether there is more of the request, which is not read.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        kind: str = "EnvError",
        *,
        after: float | None = None,
        unread: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.kind, self.after, self.unread = status, code, kind, after, unread

    @property
    def body(self) -> bytes:
        """As it is sent."""
        # A message may quote lone surrogates, which no JSON has
        told = self.kind, redact(str(self))  # which may be what user code has raised
        kind, message = (text.encode("utf-8", "backslashreplace").decode() for text in told)
        return _encode(protocol.Error(protocol.Failure(self.code, kind, message)))


@attrs.define(eq=False)
class Act:
    """A call that is made once: what was asked, and the answer, which others may wait for, too."""

    digest: bytes
    answer: "asyncio.Task[bytes]"


def once(
    acts: MutableMapping[Any, Act], key: Hashable, asked: Any, make: Callable[[], Coroutine[Any, Any, bytes]]
) -> Act | None:
    """The act of a key, which begins if there is none; None: there is one, and something else was asked."""
    try:
        written = msgspec.msgpack.encode(asked)
    except (TypeError, ValueError, OverflowError):  # texts with lone surrogates, large integers
        written = repr(asked).encode("utf-8", "surrogatepass")
    digest, act = hashlib.blake2b(written, digest_size=16).digest(), acts.get(key)
    if act is None:
        act = acts[key] = Act(digest, asyncio.ensure_future(make()))
        act.answer.add_done_callback(_seen)
    return act if act.digest == digest else None


def _seen(task: "asyncio.Task[bytes]") -> None:
    if not task.cancelled():
        task.exception()  # so that asyncio does not log one that nobody waits for


async def answered(act: Act) -> bytes:
    """What came of an act, which goes on if whoever waits does not."""
    try:
        return await asyncio.shield(act.answer)
    except asyncio.CancelledError:
        if act.answer.cancelled():
            raise Refused(409, "consumed", "the session was closed while this was under way", "ConsumedState") from None
        raise


def failed(message: str, kind: str = "EnvError") -> Refused:
    """What is raised where user code has failed."""
    return Refused(422, "failed", message, kind)


def users[T](function: Callable[..., T], *args: Any) -> T:
    """What a function of the user's says, or what becomes of a value of theirs; either may raise anything."""
    try:
        return function(*args)
    except Exception as error:
        kind, _, message = error_text(error).partition(": ")
        raise failed(message, kind) from None
