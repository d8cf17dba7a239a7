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
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._last = deque[str](maxlen=_LINES)
        self._starting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._reading: list[asyncio.Future[None]] = []

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
            async with self._starting:
                if self._process is None or self._process.returncode is not None:
                    await self._start()
            return await self.asked(method, params, timeout)
        finally:
            self.waiting -= 1

    async def _start(self) -> None:
        command, variables = await self._command()
        try:
            self._process = await asyncio.create_subprocess_exec(
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
        atexit.register(self._kill)
        self._reading = [asyncio.ensure_future(self._read()), asyncio.ensure_future(self._note())]
        try:
            await self._greet(self)
        except BaseException:
            self._kill()
            raise

    async def asked(self, method: str, params: Mapping[str, Any], timeout: float | None = None) -> dict[str, Any]:
        """As `ask`, of a program that runs."""
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
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
            del self._answers[number]
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

    async def _read(self) -> None:
        """Give answers to who waits, until the program ends."""
        assert self._process is not None
        assert self._process.stdout is not None
        with suppress(ValueError):  # a line that is too long
            async for line in self._process.stdout:
                with suppress(ValueError, AttributeError):  # what is no message is a line that it prints
                    said = json.loads(line)
                    answer = self._answers.get(said.get("id"))
                    if answer is not None and not answer.done():
                        answer.set_result(said)
        self._kill()
        await self._process.wait()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EnvError(self._gone()))

    async def _note(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        with suppress(ValueError):
            async for line in self._process.stderr:
                self._last.append(line.decode(errors="replace").rstrip())

    def _gone(self) -> str:
        assert self._process is not None
        return f"{self._name} has ended with {self._process.returncode}{self._words()}"

    def _words(self) -> str:
        return f"; its last words: {' / '.join(self._last)}" if self._last else ""

    def _kill(self) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
