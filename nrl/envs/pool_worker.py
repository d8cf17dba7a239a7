"""A worker of a pool: a process that calls one verifier, or the functions of one environment, call after call.

It reads requests from its standard input and answers on what was its standard output; what user code prints goes to
its standard error. `nrl.envs.pool_processes` starts it, and kills it if a call takes too long.
"""

import asyncio
import ctypes
import inspect
import itertools
import os
import signal
import struct
import sys
from typing import Any, BinaryIO

import attrs

from nrl.runtime.ray.exceptions import Raised, carried
from nrl.runtime.ray.pickling import deserialized, serialized

__all__ = ["main", "receive", "send"]

_LENGTH = struct.Struct("!Q")


def send(file: BinaryIO, value: Any) -> None:
    """Write a value: the number of its parts, and each with its length."""
    parts = [bytes(part) for part in serialized(value, "pooled")]
    file.write(_LENGTH.pack(len(parts)) + b"".join(_LENGTH.pack(len(part)) + part for part in parts))
    file.flush()


def receive(file: BinaryIO) -> Any:
    """Read what `send` wrote.

    Raises:
        EOFError: there is no more.
    """

    def exactly(size: int) -> bytes:
        found = file.read(size)
        if len(found) < size:
            raise EOFError
        return found

    def number() -> int:
        (found,) = _LENGTH.unpack(exactly(_LENGTH.size))
        return int(found)

    return deserialized([exactly(number()) for _ in range(number())], copy=True)[0]


def main() -> None:
    """Answer until there are no more requests."""
    _die_with_the_parent()
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    loop = asyncio.new_event_loop()
    fn, memory = receive(requests)
    _limit(memory)
    sessions: dict[int, Any] = {}
    numbers = itertools.count()
    send(answers, None)  # it is there

    async def awaited(value: Any) -> Any:
        return await value if inspect.isawaitable(value) else value

    def call(function: Any, *args: Any) -> Any:
        value = function(*args)
        return loop.run_until_complete(awaited(value)) if inspect.isawaitable(value) else value

    def reset(task: Any) -> Any:
        state, prompt, *tools = call(fn.reset, task)
        number = next(numbers)
        sessions[number] = state
        # The model needs their schemas; they are called here
        return number, prompt, *([attrs.evolve(each, fn=None, parameters={}) for each in some] for some in tools)

    def step(number: int, turn: Any) -> Any:
        taken = call(fn.step, sessions[number], turn)
        sessions[number] = taken.state
        return taken._replace(state=None)

    def close(number: int) -> None:
        state = sessions.pop(number)
        if getattr(fn, "close", None) is not None:
            call(fn.close, state)

    def verify(*args: Any) -> Any:
        return call(getattr(fn, "verifier", None) or fn, *args)

    does = {"verify": verify, "reset": reset, "step": step, "close": close}
    while True:
        try:
            what, *args = receive(requests)
        except EOFError:
            return
        try:
            with carried("pooled", BaseException):
                send(answers, (True, does[what](*args)))  # which fails before it writes, if the value cannot travel
        except Raised as raised:
            send(answers, (False, raised))


def _die_with_the_parent() -> None:
    """Let the kernel kill this process when the thread ends that started it, which lives as long as the program."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the program's


def _limit(memory: int | None) -> None:
    if memory is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


if __name__ == "__main__":
    main()
