"""Programs that answer JSON-RPC 2.0 on their standard input and output, a message a line."""

import asyncio
import atexit
import itertools
import json
import os
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from nrl.errors import EnvError

__all__ = ["RpcProgram"]

_LINES = 20  # of what a program wrote last, for an error
_LONGEST = 2**26  # bytes of a message
_LAST = 1.0  # seconds for what a program that has ended wrote last


class RpcProgram:
    """A program that is started when it is first asked, and again when it is asked and has ended.

    Used on one event loop alone. It is killed, with all processes of its group, when this process ends. A line that it
    prints and that is no message is passed over.

    Args:
        name: that begins each error message.
        command: what is started, as arguments and environment variables.
        greet: what is asked first of each that has been started.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[], Awaitable[tuple[Sequence[str], Mapping[str, str]]]],
        greet: "Callable[[RpcProgram], Awaitable[None]]",
    ) -> None:
        self.waiting = 0
        """How many wait for an answer."""
        self._name, self._command, self._greet, self._ids = name, command, greet, itertools.count()
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}  # of the process that was started last
        self._last = deque[str](maxlen=_LINES)
        self._starting: asyncio.Future[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Future[None] | None = None

    async def ask(self, method: str, params: Mapping[str, Any], timeout: float | None = None) -> dict[str, Any]:
        """The result of a request; one that is cancelled is cancelled there, too.

        Args:
            method: of the request.
            params: of the request.
            timeout: seconds for the answer; None: no limit.

        Raises:
            EnvError: there is none; the message has what the program wrote last.
        """
        self.waiting += 1
        try:
            starting = self._starting
            if starting is None or (starting.done() and self._ended(starting)):
                starting = self._starting = asyncio.ensure_future(self._start())
                starting.add_done_callback(lambda done: done.cancelled() or done.exception())  # if nobody waits for it
            await asyncio.shield(starting)  # who asked first may be cancelled; the others go on
            return await self.asked(method, params, timeout)
        finally:
            self.waiting -= 1

    def _ended(self, starting: "asyncio.Future[None]") -> bool:
        failed = starting.cancelled() or starting.exception() is not None
        return failed or self._process is None or self._process.returncode is not None

    async def _start(self) -> None:
        command, variables = await self._command()
        try:
            process = self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**os.environ, **variables},
                limit=_LONGEST,
                start_new_session=True,
            )
        except OSError as error:
            raise EnvError(f"{self._name}: {error.strerror}") from None
        self._answers = {}
        atexit.register(_kill, process)
        self._watching = asyncio.ensure_future(self._watch(process, self._answers))
        try:
            await self._greet(self)
        except BaseException:
            _kill(process)
            await process.wait()
            raise

    async def asked(self, method: str, params: Mapping[str, Any], timeout: float | None = None) -> dict[str, Any]:
        """As `ask`, of a program that runs."""
        number, answers = next(self._ids), self._answers
        answer = answers[number] = asyncio.get_running_loop().create_future()
        try:
            self.send({"jsonrpc": "2.0", "id": number, "method": method, "params": params})
            said = await asyncio.wait_for(answer, timeout)
        except TimeoutError:
            raise EnvError(f"{self._name} has not answered {method} within {timeout:g} s{self._words()}") from None
        except asyncio.CancelledError:
            with suppress(EnvError):  # who has ended has nothing to cancel
                self.send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": number}})
            raise
        finally:
            del answers[number]
        if "result" not in said:
            raise EnvError(f"{self._name} refuses {method}: {json.dumps(said.get('error'))[:500]}")
        found: dict[str, Any] = said["result"]
        return found

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message to a program that runs."""
        assert self._process is not None
        assert self._process.stdin is not None
        if self._process.returncode is not None:
            raise EnvError(self._gone())
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _watch(
        self, process: asyncio.subprocess.Process, answers: "dict[int, asyncio.Future[dict[str, Any]]]"
    ) -> None:
        """Give answers to who waits, until the program ends; what it has left behind may still hold its output."""
        reading = [asyncio.ensure_future(self._read(process, answers)), asyncio.ensure_future(self._note(process))]
        reading[0].add_done_callback(lambda _: _kill(process))  # it says no more that can be read
        await process.wait()
        await asyncio.wait(reading, timeout=_LAST)
        _kill(process)
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(EnvError(f"{self._name} has ended with {process.returncode}{self._words()}"))

    async def _read(
        self, process: asyncio.subprocess.Process, answers: "dict[int, asyncio.Future[dict[str, Any]]]"
    ) -> None:
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                with suppress(ValueError, AttributeError):  # what is no message is a line that it prints
                    said = json.loads(line)
                    answer = answers.get(said.get("id"))
                    if answer is not None and not answer.done():
                        answer.set_result(said)
        except ValueError:
            self._last.append(f"(a message of more than {_LONGEST} bytes, which is not read)")

    async def _note(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        with suppress(ValueError):
            async for line in process.stderr:
                self._last.append(line.decode(errors="replace").rstrip())

    def _gone(self) -> str:
        assert self._process is not None
        return f"{self._name} has ended with {self._process.returncode}{self._words()}"

    def _words(self) -> str:
        return f"; its last words: {' / '.join(self._last)}" if self._last else ""


def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
