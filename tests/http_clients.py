"""Clients that send any bytes to a server in a process of its own, and what that costs the server."""

import contextlib
import json
import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

GONE = (ConnectionError, TimeoutError, OSError)


class Reply(NamedTuple):
    """The first response on a connection; status 0: there is none. ``seconds`` until it had come."""

    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float

    @property
    def error(self) -> dict[str, Any]:
        return dict(json.loads(self.body)["error"])


class Server:
    """A server in another process.

    Args:
        process: that runs it.
        url: as its clients take it.
        log: the file of its standard error.
    """

    def __init__(self, process: "subprocess.Popen[str]", url: str, log: Path) -> None:
        self.process, self.log = process, log
        host, port = re.findall(r"//([^:/]+):(\d+)", url)[0]
        self.address = host, int(port)

    def connect(self, seconds: float = 30.0) -> socket.socket:
        return socket.create_connection(self.address, timeout=seconds)

    def ask(self, sent: bytes, seconds: float = 30.0) -> Reply:
        """Send bytes, in a thread, since a server that answers early reads no more; the first response."""
        began = time.monotonic()
        with contextlib.suppress(*GONE), self.connect(seconds) as connection:
            sending = threading.Thread(target=_send, args=(connection, sent), daemon=True)
            sending.start()
            return _reply(connection, began, has_body=not sent.startswith(b"HEAD "))
        return Reply(0, {}, b"", time.monotonic() - began)

    @contextlib.contextmanager
    def measured(self) -> Iterator[list[float]]:
        """Measure the memory that the process needs more at its peak, in MiB; the list has it afterwards."""
        more = list[float]()
        status = Path(f"/proc/{self.process.pid}")
        (status / "clear_refs").write_text("5")  # the peak counts from here
        before = self._kilobytes("VmRSS")
        yield more
        more.append((self._kilobytes("VmHWM") - before) / 1024)

    def _kilobytes(self, name: str) -> int:
        found = re.search(rf"{name}:\s+(\d+)", Path(f"/proc/{self.process.pid}/status").read_text())
        assert found is not None
        return int(found[1])

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100


def _send(connection: socket.socket, sent: bytes) -> None:
    with contextlib.suppress(*GONE):
        connection.sendall(sent)


def _reply(connection: socket.socket, began: float, *, has_body: bool) -> Reply:
    found = b""
    while b"\r\n\r\n" not in found and (more := connection.recv(65536)):
        found += more
    head, _, body = found.partition(b"\r\n\r\n")
    if not head:
        return Reply(0, {}, b"", time.monotonic() - began)
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    while has_body and len(body) < int(headers.get("content-length", 0)) and (more := connection.recv(65536)):
        body += more
    return Reply(int(first.split()[1]), headers, body, time.monotonic() - began)


def request(path: str, body: bytes = b"", method: str = "POST", **headers: str) -> bytes:
    """A request; a header's underscores are hyphens, and one that is empty is left out.

    >>> request("/health", method="GET")
    b'GET /health HTTP/1.1\\r\\nhost: localhost\\r\\n\\r\\n'
    """
    own = {"host": "localhost"} | ({"content_length": str(len(body))} if body else {})
    lines = [f"{name.replace('_', '-')}: {value}\r\n" for name, value in (own | headers).items() if value]
    return f"{method} {path} HTTP/1.1\r\n{''.join(lines)}\r\n".encode("latin-1") + body
