"""A worker of a pool: a process that calls one verifier, or the functions of one environment, call after call.

It reads requests from its standard input and answers on what was its standard output; what user code prints goes to
its standard error. It has no torch until somebody needs it. `nrl.envs.pool.processes` starts it, and kills it if a
call takes too long. On a mesh, the helper of a rank has the same `Sessions` (`nrl.envs.pool.mesh_worker`).
"""

import asyncio
import ctypes
import importlib
import inspect
import itertools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import attrs

from nrl.envs.policy_inputs import read_observation, read_prompt
from nrl.envs.pool.framing import framed, unframed
from nrl.envs.return_values import is_reset, read_reset, read_step
from nrl.envs.types import Step
from nrl.errors import EnvError
from nrl.runtime.ray.codec.exceptions import RemoteException, wrap_exceptions
from nrl.runtime.ray.codec.pickling import deserialize, serialize

__all__ = ["Sessions", "main", "packed", "receive", "send", "unpacked"]


def packed(value: Any) -> bytes:
    """A value as bytes, for `receive`, or `unpacked`."""
    return framed(serialize(value, "pooled"))


def unpacked(parts: list[bytes]) -> Any:
    """The value of which these are the parts."""
    return deserialize(parts, copy=True)[0]


def send(file: Any, value: Any) -> None:
    """Write a value."""
    file.write(packed(value))
    file.flush()


def receive(file: Any) -> Any:
    """Read what `send` wrote.

    Raises:
        EOFError: there is no more.
    """
    return unpacked(unframed(file))


class Sessions:
    """A verifier or an environment, and the states of the episodes that were reset here, by number.

    Args:
        fn: the verifier, or the environment.

    >>> sessions = Sessions(lambda task, trace: task + trace)
    >>> sessions.call("verify", 3, 4)
    7
    >>> sessions.end()
    """

    def __init__(self, fn: Any) -> None:
        self._fn, self._loop = fn, asyncio.new_event_loop()
        self._states: dict[int, Any] = {}
        self._numbers = itertools.count()
        self._does: dict[str, Callable[..., Any]] = {
            "verify": self._verify,
            "reset": self._reset,
            "step": self._step,
            "close": self._close,
            "forget": self._forget,
            "prepare": self._prepare,
        }

    def call(self, what: str, *args: Any) -> Any:
        """Verify, reset, step, close or forget; or prepare for calls that are given tensors."""
        return self._does[what](*args)

    def end(self) -> None:
        """Close the event loop."""
        self._loop.close()

    def _call(self, function: Any, *args: Any) -> Any:
        async def awaited(value: Any) -> Any:
            return await value

        value = function(*args)
        return self._loop.run_until_complete(awaited(value)) if inspect.isawaitable(value) else value

    def _prepare(self) -> None:
        importlib.import_module("nrl.runtime.ray.codec.tensors")

    def _reset(self, task: Any) -> Any:
        value = self._call(self._fn.reset, task)
        number = next(self._numbers)
        if is_reset(value):
            self._states[number] = value[0]
        try:
            _, prompt, *tools = read_reset(value)
            # The model needs their schemas; they are called here
            shown = [[attrs.evolve(tool, fn=None, parameters={}) for tool in some] for some in tools]
            return number, read_prompt(prompt), *shown
        except EnvError:
            if number in self._states:  # nobody learns its number
                self._close(number)
            raise

    def _step(self, number: int, turn: Any) -> Any:
        value = self._call(self._fn.step, self._states[number], turn)
        if isinstance(value, Step):
            self._states[number] = value.state
        taken = read_step(value)._replace(state=None)
        return taken if taken.done else taken._replace(observation=read_observation(taken.observation))

    def _close(self, number: int) -> None:
        state = self._states.pop(number)
        if getattr(self._fn, "close", None) is not None:
            self._call(self._fn.close, state)

    @property
    def _verifier(self) -> Any:
        return getattr(self._fn, "verifier", None) or self._fn

    def _verify(self, *args: Any) -> Any:
        return self._call(self._verifier, *args)

    def _forget(self) -> None:
        self._call(self._verifier.forget)


def main() -> None:
    """Answer until there are no more requests."""
    _die_with_the_parent()
    # User code and its children find nothing on the standard input, and the standard error on the standard output
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    fn, memory = receive(requests)
    _limit(memory)
    sessions = Sessions(fn)
    send(answers, None)  # it is there
    while True:
        try:
            what, *args = receive(requests)
        except EOFError:
            return
        try:
            with wrap_exceptions("pooled", BaseException):
                send(answers, (True, sessions.call(what, *args)))  # which fails before it writes, if that cannot travel
        except RemoteException as raised:
            send(answers, (False, raised))


def _die_with_the_parent() -> None:
    """Let the kernel kill this process when the thread ends that started it, which lives as long as the program.

    What user code starts and leaves behind stays below this process, so that it is found where this one is killed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the program's


def _limit(memory: int | None) -> None:
    if memory is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


if __name__ == "__main__":
    main()
