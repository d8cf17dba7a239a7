"""`python`: an interpreter as a tool, one for each episode, in a sandbox."""

import queue
import secrets
import threading
import time
import weakref
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

import attrs

from nrl.envs.sandbox import Channel, Limits, Sandbox, bubblewrap
from nrl.envs.tools.schemas import State
from nrl.envs.tools.tool_calls import ToolError
from nrl.errors import EnvError

__all__ = ["LIMITS", "Interpreter", "python"]

LIMITS = Limits(cpu_seconds=60.0)
"""Of an interpreter, where nothing else is said."""

_REPL = Path(__file__).parents[1] / "inside" / "repl.py"
_EPISODE = 24 * 3600.0  # seconds after which nobody comes back for an interpreter
_IDLE = 0.1  # seconds between two looks at an interpreter that is not called
_MARK = 16  # bytes, as so many pairs of digits, which end what a call writes
_SHOWN = 200  # characters of what a call had written


class _Job(NamedTuple):
    """A call, and who waits for it."""

    code: str
    answer: "Future[str]"


class Interpreter:
    """A Python interpreter in a sandbox, which keeps what it was told: the state of the tool `python`.

    Its process starts with the first call and is killed by `close`, with all that it has started. Where a call reaches
    a limit, the process is killed, and the next call begins with another one, without any variables.

    Args:
        sandbox: None: `nrl.envs.bubblewrap`.
        limits: ``seconds`` and ``output`` are of each call, the others of the process. None: those of
            `nrl.envs.Limits`, with a minute of processors.

    Raises:
        EnvError: there is no sandbox.

    >>> with Interpreter() as interpreter:
    ...     print(interpreter.run("x = 6"), interpreter.run("x * 7"))
     42
    """

    def __init__(self, sandbox: Sandbox | None = None, *, limits: Limits | None = None) -> None:
        self._sandbox, self._limits = sandbox or bubblewrap(), limits or LIMITS
        self._asked: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._one = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        weakref.finalize(self, self._asked.put, None)

    def run(self, code: str) -> str:
        """Run code; what it writes, errors included, and the value of its last line, if that is an expression.

        Raises:
            ToolError: it ended the process, or reached a limit.
            EnvError: the sandbox failed, or this is closed.
        """
        with self._one:
            if self._closed:
                raise EnvError("Interpreter: this interpreter has been closed; make another for each episode")
            if self._thread is None or not self._thread.is_alive():
                work = (self._sandbox, self._limits, self._asked)
                self._thread = threading.Thread(target=_converse, args=work, name="interpreter", daemon=True)
                self._thread.start()
            job = _Job(code, Future())
            self._asked.put(job)
            while True:
                try:
                    return job.answer.result(_IDLE)
                except TimeoutError:
                    # The process may have ended as the job was on its way
                    if not self._thread.is_alive() and job.answer.cancel():
                        raise ToolError("the interpreter ended, and its variables are gone") from None
                except BaseException:
                    self._thread.join()
                    raise

    def close(self) -> None:
        """Kill the process."""
        self._closed = True
        self._asked.put(None)
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def python(code: str, interpreter: State[Interpreter]) -> str:
    """Run Python code. Returns what it prints, and the value of its last line. Variables are kept between calls.

    Args:
        code: Python source.
        interpreter: of the episode.

    Examples:
        >>> from nrl.envs.tools import tool, tool_use
        >>> def right(task, trace):
        ...     return float(trace.answer == task["answer"])
        >>> env = tool_use([tool(python)], right, state=lambda task: Interpreter(), close=Interpreter.close)
        >>> state, prompt, tools = env.reset({"prompt": "What is 2 ** 64?", "answer": "18446744073709551616"})
        >>> tools[0].schema["function"]["parameters"]["properties"]
        {'code': {'type': 'string', 'description': 'Python source.'}}
    """
    return interpreter.run(code)


def _converse(sandbox: Sandbox, limits: Limits, asked: "queue.SimpleQueue[_Job | None]") -> None:
    """Run one process, and the calls that it lives through."""
    running: list[_Job] = []

    def talk(channel: Channel) -> None:
        while (job := _next(asked, channel)) is not None:
            running.append(job)
            if not _run(job, channel, limits):
                return
            running.clear()

    try:
        done = sandbox(
            ["python", "repl.py"],
            talk,
            {"repl.py": _REPL.read_bytes()},
            attrs.evolve(limits, seconds=_EPISODE, output=limits.output + 2 * _MARK),  # the mark ends each output
        )
        why = "ended" if done.status in ("exited", "stopped") else f"reached its limit of {done.status}"
        error: Exception = ToolError(f"the interpreter {why}, and its variables are gone")
    except Exception as found:
        error = found
    for job in running:
        if not job.answer.done():
            job.answer.set_exception(error)


def _next(asked: "queue.SimpleQueue[_Job | None]", channel: Channel) -> _Job | None:
    """The next call; None: there is none any more, or nothing to run it. What is written meanwhile nobody reads."""
    while True:
        try:
            job = asked.get(timeout=_IDLE)
            if job is None or job.answer.set_running_or_notify_cancel():
                return job
        except queue.Empty:
            with suppress(TimeoutError):
                if not channel.receive(0.0):
                    return None


def _run(job: _Job, channel: Channel, limits: Limits) -> bool:
    """Run a call; whether the process can run another."""
    mark, code = secrets.token_hex(_MARK).encode(), job.code.encode(errors="replace")
    channel.send(b"%s %d\n%s" % (mark, len(code), code))
    until, got = time.monotonic() + limits.seconds, bytearray()
    while not got.endswith(mark):
        try:
            more = channel.receive(max(0.0, until - time.monotonic()))
        except TimeoutError:
            more, said = b"", repr(got.decode(errors="replace")[-_SHOWN:])
            job.answer.set_exception(
                ToolError(
                    f"the interpreter was ended after {limits.seconds:g} s, and its variables are gone; it had "
                    f"written: {said}"
                )
            )
        if not more:
            return False
        got += more
        if len(got) > limits.output + len(mark):
            job.answer.set_exception(
                ToolError("the interpreter reached its limit of output, and its variables are gone")
            )
            return False
    job.answer.set_result(got.removesuffix(mark).decode(errors="replace"))
    return True
