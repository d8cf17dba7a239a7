"""The helpers of a mesh, in which a pool makes its calls: one call at a time for each rank.

A helper keeps what it was given, and its episodes, under a token, so that one that has replaced another is found out.
All calls are made in one thread, as in a process of its own, since states such as database handles belong to a thread.
"""

import contextvars
import math
import queue
import threading
import uuid
from concurrent import futures
from contextlib import suppress
from typing import Any

from nrl.envs.pool.scheduler import NotBegun
from nrl.envs.pool.worker import Sessions
from nrl.errors import DeadlineExceeded, EnvError, LostActor, NrlError, ShippingError
from nrl.runtime.mesh.futures import Submitted
from nrl.runtime.mesh.placement import Mesh
from nrl.runtime.ray.codec.exceptions import RemoteException, wrap_exceptions

__all__ = ["Rank"]


class Rank:
    """The helper of a rank, which starts with the first call.

    Args:
        who: how errors name it.
        mesh: that it belongs to.
        rank: beside which it is.
        f: what it calls.
    """

    def __init__(self, who: str, mesh: Mesh, rank: int, f: Any) -> None:
        self._who, self._mesh, self._rank, self._f = who, mesh, rank, f
        self.after_late = "its helper was killed" if mesh.cluster.remote else "its thread, which cannot be, was left"
        self._token = ""
        self._asked: Submitted[Any] | None = None
        self._lost = ""

    def start(self) -> None:
        """Let the helper keep what it is to call."""
        token = uuid.uuid4().hex
        try:
            try:
                self._submitted(_keep, token, self._f, deadline=None)
            except LostActor:  # no call had begun, so another helper takes its place
                self._submitted(_keep, token, self._f, deadline=None)
        except (DeadlineExceeded, LostActor) as error:
            raise EnvError(f"{self._who}: could not start: {error}") from None
        self._token = token

    def ask(self, what: str, args: tuple[Any, ...], timeout: float | None) -> tuple[bool, Any]:
        """Make a call."""
        deadline = math.inf if timeout is None else timeout
        try:
            found = self._submitted(_make, self._token, what, args, deadline=deadline)
        except ShippingError as error:
            return False, error
        except (DeadlineExceeded, LostActor) as error:
            if self._mesh.cluster.remote:
                self._token = ""  # it is gone with the helper
            if isinstance(error, DeadlineExceeded):
                raise
            self._lost = str(error)
            raise EOFError from None
        if found is None:
            self._token = ""
            raise NotBegun(f"its helper, that of rank {self._rank} of mesh '{self._mesh.name}', has been replaced")
        good, value = found
        return good, value if good else value.rebuild()

    def _submitted(self, fn: Any, *args: Any, deadline: float | None) -> Any:
        self._asked = self._mesh.submit(fn, *args, rank=self._rank, deadline=deadline)
        try:
            return self._asked.result()
        finally:
            self._asked = None

    def kill(self) -> None:
        """Give up the call that runs, and so the helper."""
        if (asked := self._asked) is not None:
            asked.give_up()

    def fate(self, why: str) -> str:
        """How it ended."""
        return f"its helper {why and f'({why}) '}is gone: {self._lost}"

    def leave(self) -> None:
        """Let the helper forget what it was given, if it goes on."""
        if not self._mesh.cluster.remote:
            _forget(self._token)
        elif self._token:
            with suppress(NrlError):  # the cluster is closed
                self._mesh.submit(_forget, self._token, rank=self._rank)


# --- In the helper; on the local cluster in this process.

_HELD: dict[str, "_Line"] = {}


class _Line:
    """A thread that makes calls, one after the other, with what `nrl.process` says where it was begun."""

    def __init__(self, f: Any) -> None:
        self._sessions = Sessions(f)
        self._asked: queue.SimpleQueue[tuple[futures.Future[Any], tuple[Any, ...]] | None] = queue.SimpleQueue()
        here = contextvars.copy_context()
        threading.Thread(target=here.run, args=(self._work,), name="on a mesh", daemon=True).start()

    def make(self, *call: Any) -> Any:
        """Make a call in the thread, and wait for it."""
        found: futures.Future[Any] = futures.Future()
        self._asked.put((found, call))
        return found.result()

    def end(self) -> None:
        """End the thread, after the calls that wait."""
        self._asked.put(None)

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            found, call = asked
            try:
                with wrap_exceptions("on", BaseException):
                    found.set_result(self._sessions.call(*call))
            except RemoteException as raised:
                found.set_exception(raised)
            del found, call, asked
        self._sessions.end()


def _keep(token: str, f: Any) -> None:
    _HELD[token] = _Line(f)


def _make(token: str, what: str, args: tuple[Any, ...]) -> tuple[bool, Any] | None:
    if token not in _HELD:
        return None
    try:
        return True, _HELD[token].make(what, *args)
    except RemoteException as raised:
        return False, raised


def _forget(token: str) -> None:
    if token in _HELD:
        _HELD.pop(token).end()
