"""What a sandbox is: one function, from a command to what became of it."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import attrs

from nrl.arguments import checked

__all__ = ["Channel", "Dialogue", "Finished", "Limits", "Sandbox"]


def _positive(limits: "Limits", attribute: "attrs.Attribute[Any]", value: float) -> None:
    if not value > 0 or (attribute.type is int and not isinstance(value, int)) or math.isnan(value):
        kind = "a positive whole number" if attribute.type is int else "a positive number"
        raise ValueError(f"Limits: {attribute.name} is {value}; give {kind}")


@checked("Limits")
@attrs.frozen
class Limits:
    """What a program in a sandbox may use; whatever uses more is killed, with all that it has started.

    Args:
        seconds: from its start to its end, on the clock.
        cpu_seconds: of processors, all its processes together.
        memory: bytes, all its processes together; also the address space of each of them.
        processes: and threads, that it may have at once.
        output: bytes that it may write to its standard output and error and that nobody has received yet.
        disk: bytes of files in its work folder, and as many of shared memory.

    Raises:
        ValueError: one is not positive.

    >>> Limits(seconds=2).memory == 2**30
    True
    """

    seconds: float = attrs.field(default=10.0, validator=_positive)
    cpu_seconds: float = attrs.field(default=10.0, validator=_positive)
    memory: int = attrs.field(default=1 << 30, validator=_positive)
    processes: int = attrs.field(default=64, validator=_positive)
    output: int = attrs.field(default=1 << 20, validator=_positive)
    disk: int = attrs.field(default=64 << 20, validator=_positive)


class Finished(NamedTuple):
    """What became of a program.

    Args:
        status: ``"exited"``, by itself, or by a signal that was not the sandbox's; the limit at which it was killed,
            ``"seconds"``, ``"cpu_seconds"``, ``"memory"``, ``"output"`` or ``"disk"``; ``"stopped"``, killed since its
            dialogue was over.
        code: its exit status, 128 and the number of the signal where one ended it; None: it was killed.
        stdout: what it wrote, and no dialogue received; at most the limit of ``output``.
        stderr: likewise.
        seconds: that it took, the start of the sandbox included.

    >>> Finished("exited", 0, b"42", b"", 0.05).code
    0
    """

    status: Literal["exited", "seconds", "cpu_seconds", "memory", "output", "disk", "stopped"]
    code: int | None
    stdout: bytes
    stderr: bytes
    seconds: float


class Channel(Protocol):
    """The standard input and output of a program that runs.

    >>> def greet(channel: Channel) -> None:
    ...     channel.send(b"nrl")
    ...     assert channel.receive(5.0) == b"NRL"
    """

    def send(self, data: bytes) -> None:
        """Write all of it; what a program that has closed its input is sent is lost."""
        ...

    def receive(self, seconds: float) -> bytes:
        """What it has written since, as soon as there is something; empty: it has closed its output.

        Raises:
            TimeoutError: there was nothing for so long.
        """
        ...


type Dialogue = Callable[[Channel], object]
"""Talks to a program that runs; when it returns, the program is killed."""


class Sandbox(Protocol):
    """``(command, stdin, files, limits) -> Finished``: runs a program that must not be able to do any harm.

    Args:
        command: the program's name and arguments. ``"python"`` is an interpreter.
        stdin: what the program reads; or a `Dialogue` with it.
        files: that lie in the folder in which it starts, by their relative paths.
        limits: what it may use.

    Raises:
        EnvError: the sandbox itself failed. What the program does is never an exception.

    >>> from nrl.envs.sandbox import bubblewrap
    >>> run: Sandbox = bubblewrap()
    >>> run(["python", "main.py"], b"3", {"main.py": b"print(int(input()) ** 2)"}, Limits(seconds=5)).stdout
    b'9\\n'
    """

    def __call__(
        self, command: Sequence[str], stdin: bytes | Dialogue, files: Mapping[str, bytes], limits: Limits, /
    ) -> Finished:
        """Run it."""
        ...
