"""Ask an HTTP server again and again, from a process of its own. Needs the standard library alone, on Linux.

The driver's half is `Load`. The other half is this file as a program. It has a few connections that stay open, and
writes the next request on each as soon as the answer to the last one is whole. Requests are bytes that are made once,
but for a number that tells them apart, and an answer is only searched for its end and for one text. So the client takes
little of the machine.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

__all__ = ["NUMBER", "Load", "children", "cpu_seconds", "most_resident", "pin", "request", "run"]

NUMBER = "number-0000000000000000"
"""Where this stands in a body, each request has a number of its own: a server that keeps answers by a name that the
client gives must not answer from there."""

_TICKS = os.sysconf("SC_CLK_TCK")


class _Connection(asyncio.Protocol):
    """One connection: asks until there is nothing left to ask."""

    def __init__(self, asked: bytes, expected: bytes, left: list[int], done: asyncio.Future[None]) -> None:
        self._before, self._number, self._after = asked.partition(NUMBER.encode())
        self._expected, self._left, self._done = expected, left, done
        self._read = b""
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._next()

    def _next(self) -> None:
        if self._left[0] == 0:
            self._transport.close()
            if not self._done.done():
                self._done.set_result(None)
            return
        self._left[0] -= 1
        number = f"number-{random.getrandbits(64):016x}".encode() if self._number else b""
        self._transport.write(self._before + number + self._after)

    def data_received(self, data: bytes) -> None:
        self._read += data
        head, found, body = self._read.partition(b"\r\n\r\n")
        if not found:
            return None
        fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:])
        if b"content-length" not in fields:
            return self._fail(f"an answer without a Content-Length: {head[:300]!r}")
        length = int(fields[b"content-length"])
        if len(body) < length:
            return None
        if head[9:12] != b"200" or self._expected not in body:
            return self._fail(f"not a 200 with {self._expected!r}: {self._read[:600]!r}")
        self._read = body[length:]
        return self._next()

    def connection_lost(self, exception: Exception | None) -> None:
        if not self._done.done():
            self._fail(f"the server closed a connection before it answered: {exception}")

    def _fail(self, why: str) -> None:
        if not self._done.done():
            self._done.set_exception(RuntimeError(why))
        self._transport.abort()


def request(url: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """A POST as it goes over the wire.

    >>> request("http://127.0.0.1:80/verify", {"x-a": "b"}, b"{}").split(b"\\r\\n")
    [b'POST /verify HTTP/1.1', b'host: 127.0.0.1:80', b'content-type: application/json', b'content-length: 2', \
b'x-a: b', b'', b'{}']
    """
    parts = urlsplit(url)
    all_headers = {"host": parts.netloc, "content-type": "application/json", "content-length": str(len(body))} | {
        name.lower(): value for name, value in headers.items()
    }
    lines = [f"POST {parts.path or '/'} HTTP/1.1", *(f"{name}: {value}" for name, value in all_headers.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def run(url: str, asked: bytes, expected: str, requests: int, connections: int) -> float:
    """Seconds until so many requests are answered.

    Raises:
        RuntimeError: an answer was not a 200 that has the expected text, or a connection was lost.
    """
    loop, left, parts = asyncio.get_running_loop(), [requests], urlsplit(url)
    ends: list[asyncio.Future[None]] = [loop.create_future() for _ in range(min(connections, requests))]
    opened: list[asyncio.Transport] = []
    began = time.perf_counter()
    try:
        for done in ends:
            transport, _ = await loop.create_connection(
                lambda done=done: _Connection(asked, expected.encode(), left, done),  # type: ignore[misc]
                parts.hostname or "127.0.0.1",
                parts.port or 80,
            )
            opened.append(transport)
        await asyncio.gather(*ends)
        return time.perf_counter() - began
    finally:
        for done in ends:
            done.cancel()
        for each in opened:
            each.close()
        await asyncio.sleep(0)  # they close in the loop's next turn


class Load:
    """A process that asks, on processors of its own.

    Args:
        processors: it may use; all, if there are none.
    """

    def __init__(self, processors: Collection[int] = ()) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        pin(self._process.pid, processors)

    def __call__(
        self,
        url: str,
        body: bytes,
        *,
        requests: int,
        headers: Mapping[str, str] | None = None,
        connections: int = 32,
        expected: str = '"reward":1',
    ) -> float:
        """Have it ask; seconds until all requests are answered.

        Args:
            url: of one endpoint.
            body: JSON.
            requests: how many.
            headers: more of them.
            connections: that stay open.
            expected: every answer is a 200 that has this text.

        Raises:
            RuntimeError: an answer is another one, or a connection is lost.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order: dict[str, Any] = {
            "url": url,
            "headers": dict(headers or {}),
            "body": body.decode(),
            "expected": expected,
        }
        order |= {"requests": requests, "connections": connections}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or '{"failed": "the load generator ended"}')
        if "failed" in answer:
            raise RuntimeError(f"{url}: {answer['failed']}")
        return float(answer["seconds"])

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


def pin(process: int, processors: Collection[int]) -> None:
    """Keep all threads of a process, and those that they start, on some processors; where there are none, on all."""
    if not processors:
        return
    for thread in Path(f"/proc/{process}/task").iterdir():
        os.sched_setaffinity(int(thread.name), processors)


def children(process: int) -> list[int]:
    """A process and all that it has started, by their ids.

    >>> os.getpid() in children(os.getpid())
    True
    """
    found = [process]
    for thread in Path(f"/proc/{process}/task").iterdir():
        started = (thread / "children").read_text().split()
        found += [each for child in started for each in children(int(child))]
    return found


def cpu_seconds(processes: Collection[int]) -> float:
    """User and system CPU time of some processes, all of their threads: fields 14 and 15 of ``/proc/PID/stat``.

    >>> cpu_seconds([os.getpid()]) > 0
    True
    """
    words = [Path(f"/proc/{each}/stat").read_text().rsplit(")", 1)[1].split() for each in processes]
    return sum(int(fields[11]) + int(fields[12]) for fields in words) / _TICKS


def most_resident(processes: Collection[int]) -> float:
    """The largest resident memory that each of some processes has had, added up, in MiB.

    >>> most_resident([os.getpid()]) > 1
    True
    """
    lines = [line for each in processes for line in Path(f"/proc/{each}/status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def main() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        asked = request(order["url"], order.pop("headers"), order.pop("body").encode())
        try:
            answer: dict[str, Any] = {"seconds": asyncio.run(run(asked=asked, **order))}
        except (RuntimeError, OSError) as error:
            answer = {"failed": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
