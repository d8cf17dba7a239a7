"""The processes of a pool, the calls that wait for them, and their ends."""

import asyncio
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from pathlib import Path
from types import EllipsisType
from typing import Any

import attrs

from nrl.envs.contract import TIMEOUT, Task
from nrl.envs.pool_worker import receive, send
from nrl.errors import EnvError
from nrl.runtime.executables.recipes import recipe
from nrl.runtime.executables.registry import Executable
from nrl.runtime.node.building import provide
from nrl.runtime.node.environments import sources

__all__ = ["Pool", "Worker"]

_LINES = 10  # of what a worker wrote, in an error
_START = 300.0  # seconds for a worker to start


@attrs.define(eq=False)
class _Call:
    """A call, and who waits for it."""

    what: str
    args: tuple[Any, ...]
    timeout: float | None
    answer: "futures.Future[tuple[Worker, Any]]" = attrs.field(factory=futures.Future)


class Pool:
    """Workers, and the calls that wait for one of them or for a certain one."""

    def __init__(
        self, f: Any, most: int, executable: str | Executable, timeout: float | EllipsisType | None, memory: int | None
    ) -> None:
        self.f, self.most, self.executable, self.memory = f, most, executable, memory
        self._timeout = getattr(f, "timeout", TIMEOUT) if isinstance(timeout, EllipsisType) else timeout
        self.name = str(getattr(f, "__name__", type(f).__name__))
        self.changed = threading.Condition()
        self.waiting: deque[_Call] = deque()
        self.workers: list[Worker] = []
        self.ended = False

    async def call(self, what: str, task: Task, *args: Any, worker: "Worker | None" = None) -> Any:
        """The value of a call."""
        return (await self.placed(what, task, *args, worker=worker))[1]

    async def placed(self, what: str, task: Task, *args: Any, worker: "Worker | None" = None) -> Any:
        """The worker that made a call, and its value. If this is cancelled while it runs, the worker is killed."""
        timeout = self._timeout(task) if callable(self._timeout) else self._timeout
        call = _Call(what, args, timeout)
        with self.changed:
            if worker is not None and worker.dead:
                raise worker.gone()
            if worker is None and what == "reset":  # its episode stays there, so they are spread evenly
                worker = min(self.workers, key=lambda each: each.load, default=None)
                if len(self.workers) < self.most and (worker is None or worker.load > 0):
                    worker = Worker(self)
                    self.workers.append(worker)
            if worker is not None and what == "close":  # which takes no time
                worker.waiting.appendleft(call)
            elif worker is not None:
                worker.waiting.append(call)
            else:
                self.waiting.append(call)
                if len(self.waiting) > sum(each.idle for each in self.workers) and len(self.workers) < self.most:
                    self.workers.append(Worker(self))
            self.changed.notify_all()
        answer = asyncio.wrap_future(call.answer)
        try:
            return await (asyncio.shield(answer) if what == "close" else answer)
        except asyncio.CancelledError:
            if what == "close":  # it is made all the same
                raise
            with self.changed:
                for each in self.workers:
                    if each.running is call:
                        each.kill("the call was given up")
            raise

    def end(self) -> None:
        """End all workers."""
        with self.changed:
            self.ended = True
            for worker in self.workers:
                worker.kill("the pool has ended")
            self.changed.notify_all()


class Worker:
    """A process, and the thread that talks to it."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.waiting: deque[_Call] = deque()
        self.running: _Call | None = None
        self.idle, self.episodes = True, 0
        self.dead = ""
        """Why it is gone; empty: it is there."""
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the worker
        threading.Thread(target=self._work, name=f"pooled({pool.name})", daemon=True).start()

    def kill(self, why: str) -> None:
        """End the process and all that it has started."""
        self.dead = self.dead or why
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    @property
    def load(self) -> int:
        """How many episodes it has or is to have."""
        return self.episodes + sum(call.what == "reset" for call in (*self.waiting, self.running) if call)

    def gone(self) -> EnvError:
        """The error of an episode that it had."""
        return EnvError(
            f"pooled({self.pool.name}): the process that had this episode is gone, with all that it had: {self.dead}"
        )

    def _next(self) -> _Call | None:
        pool = self.pool
        with pool.changed:
            self.running, self.idle = None, True
            pool.changed.wait_for(lambda: self.dead or self.waiting or pool.waiting)
            if self.dead:
                return None
            call = (self.waiting or pool.waiting).popleft()
            self.running, self.idle = call, False
            return call

    def _work(self) -> None:
        error: Exception | None = None
        try:
            while (call := self._next()) is not None:
                if call.answer.set_running_or_notify_cancel():
                    self._make(call)
        except Exception as found:
            error = found
        with self.pool.changed:
            self.kill("it has failed")
            self.pool.workers.remove(self)
            running, left = self.running, [each for each in self.waiting if each.what != "reset"]
            self.pool.waiting.extend(each for each in self.waiting if each.what == "reset")  # nothing of theirs is lost
            if self.pool.waiting and not self.pool.ended:  # for which another worker has to start
                self.pool.workers.append(Worker(self.pool))
        if running is not None and error is not None:
            running.answer.set_exception(error)
        for call in left:
            with suppress(futures.InvalidStateError):
                call.answer.set_exception(self.gone())
        self._forget()

    def _forget(self) -> None:
        """Give back what belongs to the process."""
        self._log.close()
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                with suppress(OSError):  # of what was not yet written
                    pipe.close()  # type: ignore[union-attr]
            self._process.wait()

    def _make(self, call: _Call) -> None:
        """Make a call; raises what ends the worker."""
        if self._process is None:
            self._process = self._start()
        process, timer = self._process, None
        late = threading.Event()
        if call.timeout is not None:

            def end() -> None:
                late.set()
                self.kill(f"a {call.what} of another episode did not return within {call.timeout:g} s")

            timer = threading.Timer(call.timeout, end)
            timer.daemon = True
            timer.start()
        try:
            send(process.stdin, (call.what, *call.args))  # type: ignore[arg-type]
            good, value = receive(process.stdout)  # type: ignore[arg-type]
        except (EOFError, OSError):
            if late.is_set():
                raise TimeoutError(
                    f"pooled({self.pool.name}) did not return within {call.timeout:g} s, and its process was killed; "
                    "mend it, or give pooled(timeout=) more seconds"
                ) from None
            self.dead = self._fate(process)
            raise EnvError(f"pooled({self.pool.name}): {self.dead}") from None
        finally:
            if timer is not None:
                timer.cancel()
        self.episodes += {"reset": int(good), "close": -1}.get(call.what, 0)
        with self.pool.changed:  # before the answer, since who has it may ask again: that takes no other process
            self.running, self.idle = None, True
        if good:
            call.answer.set_result((self, value))
        else:
            error = value.original()
            # Which asyncio gives nobody, so that one would wait for ever
            call.answer.set_exception(RuntimeError(value.summary) if isinstance(error, StopIteration) else error)

    def _start(self) -> "subprocess.Popen[bytes]":
        made = recipe(self.pool.executable)
        python = provide(made)
        found = sources(made, Path(python))
        path = os.pathsep.join(found or [each for each in sys.path if each])
        env = {**os.environ, "PYTHONPATH": path}
        process = _STARTER.start(
            [str(python), "-c", "from nrl.envs.pool_worker import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=env,
            start_new_session=True,
        )
        self._process = process
        late = threading.Timer(_START, lambda: self.kill("it did not start"))
        late.daemon = True
        late.start()
        try:
            send(process.stdin, (self.pool.f, self.pool.memory))  # type: ignore[arg-type]
            receive(process.stdout)  # type: ignore[arg-type]
        except (EOFError, OSError):
            raise EnvError(f"pooled({self.pool.name}): could not start: {self._fate(process)}") from None
        finally:
            late.cancel()
        return process

    def _fate(self, process: "subprocess.Popen[bytes]") -> str:
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        code = process.returncode
        how = "does not answer" if code is None else f"ended by signal {-code}" if code < 0 else f"ended with {code}"
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()[-_LINES:]
        return "\n".join([f"its process {self.dead and f'({self.dead}) '}{how}", *(f"    {line}" for line in lines)])


class _Starter:
    """A thread that starts all processes and never ends, since the kernel kills them with the thread that did."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._guard, self._thread = threading.Lock(), threading.Thread(target=self._work, name="pools", daemon=True)

    def start(self, *args: Any, **options: Any) -> "subprocess.Popen[bytes]":
        """A process."""
        found: futures.Future[subprocess.Popen[bytes]] = futures.Future()

        def begin() -> None:
            try:
                found.set_result(subprocess.Popen(*args, **options))
            except Exception as error:
                found.set_exception(error)

        with self._guard:
            if self._thread.ident is None:
                self._thread.start()
        self._asked.put(begin)
        return found.result()

    def _work(self) -> None:
        while True:
            self._asked.get()()


_STARTER = _Starter()
