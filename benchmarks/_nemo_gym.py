"""Start a NeMo Gym resources server as its users do. Needs the standard library alone, and nemo-gym elsewhere.

The server is the smallest that there is: `SimpleResourcesServer` with a `verify` that compares two strings, written as
NeMo Gym's own examples are. ``gym env start`` starts it, with Ray, the head server, the session middleware and all else
that ships. Its environment is the one that is named, instead of one that is built: ``skip_venv_if_present``.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._http_load import children

__all__ = ["Server", "body", "free_port", "installed", "nemo_gym"]

_APP = """\
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseRunRequest,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)


class SameRunRequest(BaseRunRequest):
    expected_answer: str


class SameVerifyRequest(SameRunRequest, BaseVerifyRequest):
    pass


class SameVerifyResponse(BaseVerifyResponse):
    expected_answer: str


class SameResourcesServer(SimpleResourcesServer):
    config: BaseResourcesServerConfig

    async def verify(self, body: SameVerifyRequest) -> SameVerifyResponse:
        said = body.response.output[-1].content[0].text
        return SameVerifyResponse(**body.model_dump(), reward=float(said == body.expected_answer))


if __name__ == "__main__":
    SameResourcesServer.run_webserver()
"""
_CONFIG = """\
same:
  resources_servers:
    same:
      entrypoint: app.py
      domain: other
      host: 127.0.0.1
      port: {port}
head_server:
  host: 127.0.0.1
  port: {head}
skip_venv_if_present: true
"""


class Server(NamedTuple):
    """A server that answers.

    Args:
        url: of its verify endpoint.
        headers: that a request has, such as a token.
        processes: whose CPU time and memory count.
    """

    url: str
    headers: Mapping[str, str]
    processes: list[int]


def installed(folder: Path) -> Path:
    """The interpreter of a new environment with nemo-gym 0.4.0, which uv makes in a folder."""
    uv, python = [sys.executable, "-m", "uv"], folder / "bin" / "python"
    subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, str(folder)], check=True)
    subprocess.run([*uv, "pip", "install", "--quiet", "--python", str(python), "nemo-gym==0.4.0"], check=True)
    return python


@contextmanager
def nemo_gym(python: Path, folder: Path, patience: float = 180.0) -> Iterator[Server]:
    """Start the server; when the block is left, stop it and what it needs.

    Args:
        python: the interpreter of an environment with nemo-gym.
        folder: an empty one, for the server's files and for what is logged.
        patience: seconds until it has to answer.

    Raises:
        RuntimeError: there is no ``gym`` beside the interpreter, or the server did not start.
    """
    command = python.parent / "gym"
    if not command.exists():
        raise RuntimeError(f"{command}: not found; name the interpreter of an environment that has nemo-gym")
    server = folder / "resources_servers" / "same"
    server.mkdir(parents=True)
    port = free_port()
    (server / "app.py").write_text(_APP)
    (server / "requirements.txt").write_text("nemo-gym\n")
    (server / "same.yaml").write_text(_CONFIG.format(port=port, head=free_port()))
    (server / ".venv").symlink_to(python.parent.parent.absolute())
    log = folder / "log.txt"
    with log.open("w") as out:
        started = subprocess.Popen(
            [command, "env", "start", "--config", str(server / "same.yaml")],
            cwd=folder,
            stdout=out,
            stderr=out,
            env=os.environ | {"PATH": f"{python.parent}:{os.environ['PATH']}", "VIRTUAL_ENV": str(python.parents[1])},
            start_new_session=True,
        )
    try:
        session = _session(f"http://127.0.0.1:{port}", started, log, patience)
        yield Server(f"http://127.0.0.1:{port}/verify", {"cookie": session}, [_served(started.pid)])
    finally:
        started.send_signal(signal.SIGINT)
        try:
            started.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()


def _session(url: str, started: subprocess.Popen[bytes], log: Path, patience: float) -> str:
    """The cookie of a session, as an agent asks for it before the first turn; waits until the server answers."""
    asked = urllib.request.Request(f"{url}/seed_session", b"{}", {"content-type": "application/json"})
    until = time.monotonic() + patience
    while time.monotonic() < until and started.poll() is None:
        try:
            with urllib.request.urlopen(asked, timeout=5) as answer:
                return str(answer.headers["set-cookie"]).split(";")[0]
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    end = "\n".join(log.read_text().splitlines()[-30:])
    raise RuntimeError(f"nemo-gym: the server did not answer within {patience:.0f} s; the end of {log}:\n{end}")


def _served(started: int) -> int:
    """The process of the server itself: NeMo Gym starts ``python app.py`` in a shell."""
    for each in children(started):
        if Path(f"/proc/{each}/cmdline").read_bytes().split(b"\0")[:2] == [b"python", b"app.py"]:
            return each
    raise RuntimeError("nemo-gym: no `python app.py` among the processes that `gym env start` has started")


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def body(said: list[str]) -> bytes:
    """What is verified: a question, tools that are called, and an answer that is right, as the Responses API has it.

    >>> len(json.loads(body(["a", "b", "c"]))["response"]["output"])
    5
    """
    last = len(said) - 1
    output: list[dict[str, Any]] = []
    for number, text in enumerate(said):
        content = [{"type": "output_text", "text": text, "annotations": []}]
        output.append(
            {"id": f"msg_{number}", "type": "message", "role": "assistant", "status": "completed", "content": content}
        )
        if number < last:
            called = {"type": "function_call", "id": f"fc_{number}", "call_id": f"call_{number}", "status": "completed"}
            output.append(called | {"name": "search", "arguments": '{"query": "the number"}'})
    response = {
        "id": "resp_0",
        "object": "response",
        "created_at": 1.0,
        "model": "policy_model",
        "output": output,
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "tools": [],
    }
    asked = {"input": [{"role": "user", "content": "Which number is it?"}]}
    return json.dumps({"responses_create_params": asked, "response": response, "expected_answer": said[-1]}).encode()
