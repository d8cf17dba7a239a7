"""Environments of OpenEnv, over a WebSocket: the package's own server, and one of a few lines that breaks the rules."""

import asyncio
import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import nrl
from benchmarks._nemo_gym import free_port
from nrl.gym.adapters.openenv import openenv
from tests.gym.endpoint.driving import Says, turn

SERVER = """
import sys, uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Guess(Action):
    number: int

class Hint(Observation):
    hint: str = ""

class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **more):
        self.number = (seed or 0) % 10
        return Hint(hint=f"guess {more.get('what', 'it')}", done=False, reward=None)

    def step(self, action, timeout_s=None, **more):
        right = action.number == self.number
        return Hint(hint="right" if right else "higher" if action.number < self.number else "lower", done=right,
                    reward=float(right) or 0.25)

    @property
    def state(self):
        return State(episode_id="e", step_count=0)

uvicorn.run(create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=8), host="127.0.0.1", port=int(sys.argv[1]),
            log_level="warning")
"""
TASK = {"prompt": "A number.", "seed": 7}


@pytest.mark.slow
def test_the_packages_own_server(tmp_path: Path) -> None:
    uv, python = [sys.executable, "-m", "uv"], tmp_path / "venv" / "bin" / "python"
    subprocess.run([*uv, "venv", "-q", "--python", sys.executable, str(tmp_path / "venv")], check=True)
    subprocess.run([*uv, "pip", "install", "-q", "-p", str(python), "openenv==0.10.0"], check=True)
    (tmp_path / "server.py").write_text(SERVER)
    port = free_port()
    server = subprocess.Popen([str(python), str(tmp_path / "server.py"), str(port)])
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5)
                break
            except OSError:
                time.sleep(0.5)
        said = [turn("qwen3", each) for each in ("3", '{"number": 9}', "what", '{"nombre": 1}', "7")]
        batch = nrl.rollout(Says("qwen3", said), openenv(url), [TASK])
        assert batch["valid"].tolist() == [True]
        assert batch["rewards"].tolist() == [1.5]
        text = Says("qwen3", []).tokenizer.decode(batch["input_ids"][0])
        assert [text.count(word) for word in ("guess it", "higher", "lower", "Invalid message")] == [1, 1, 1, 2]
        chat: Any = {"prompt": [{"role": "user", "content": "Play."}], "seed": 7, "reset": {"what": "mine"}}
        batch = nrl.rollout(Says("qwen3", [turn("qwen3", "7")] * 4), openenv(url), [chat], n=4)
        assert batch["rewards"].tolist() == [1.0] * 4
        assert "guess mine" in Says("qwen3", []).tokenizer.decode(batch["input_ids"][0])
        seen = openenv(url, act=lambda turn, fields: {fields[0]: len(turn)}, show=lambda found: found["hint"].upper())
        batch = nrl.rollout(Says("qwen3", [turn("qwen3", "seven..")]), seen, [TASK])
        assert batch["rewards"].tolist() == [1.0]
        assert "GUESS IT" in Says("qwen3", []).tokenizer.decode(batch["input_ids"][0])
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def server() -> Iterator[Any]:
    """A server of which a test says what it answers, and how many connections it has."""
    answers, connected, loop = dict[str, Any](), list[int](), asyncio.new_event_loop()

    async def talk(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        connected.append(1)
        async for message in socket:
            answer = answers[json.loads(message.data)["type"]]
            if answer is None:
                await socket.close()
            elif answer != "nothing":
                await socket.send_json(answer)
        connected.pop()
        return socket

    async def schema(request: web.Request) -> web.Response:
        return web.json_response({"action": {"properties": {"a": {}, "b": {}, "metadata": {}}}})

    app = web.Application()
    app.add_routes([web.get("/ws", talk), web.get("/schema", schema)])
    runner = web.AppRunner(app)
    loop.run_until_complete(runner.setup())
    site = web.TCPSite(runner, "127.0.0.1", 0)
    loop.run_until_complete(site.start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}", answers, connected
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


def observed(done: bool = False, **observation: Any) -> Any:
    return {"type": "observation", "data": {"observation": observation, "reward": 0.5, "done": done}}


def refused(code: str) -> Any:
    return {"type": "error", "data": {"code": code, "message": "no"}}


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ({"reset": refused("FACTORY_ERROR")}, "openenv: the server says FACTORY_ERROR: no"),
        ({"reset": refused("VALIDATION_ERROR")}, "refuses the reset"),
        ({"reset": observed(x=1), "step": refused("EXECUTION_ERROR")}, "openenv: the server says EXECUTION_ERROR: no"),
        ({"reset": observed(x=1), "step": None}, "openenv: the server has closed the connection"),
        ({"reset": observed(x=1), "step": "nothing"}, "TimeoutError"),
    ],
)
def test_a_server_that_fails_makes_the_row_invalid(server: Any, answers: Any, why: str) -> None:
    url, told, connected = server
    told |= answers
    with pytest.warns(UserWarning, match=why):
        batch = nrl.rollout(Says("qwen3", [turn("qwen3", '{"a": 1}')]), openenv(url, timeout=2.0), [TASK])
    assert batch["valid"].tolist() == [False]
    time.sleep(0.2)
    assert connected == []


def test_a_turn_that_is_no_action_is_told(server: Any) -> None:
    url, told, connected = server
    told |= {"reset": observed(x=1, y="two"), "step": observed(done=True)}
    said = [turn("qwen3", "left"), turn("qwen3", '{"a": 1, "b": 2}')]
    batch = nrl.rollout(Says("qwen3", said), openenv(url), [TASK])
    text = Says("qwen3", []).tokenizer.decode(batch["input_ids"][0])
    assert "this is no action; write a JSON object with a, b" in text
    assert '{"x": 1, "y": "two"}' in text
    assert batch["rewards"].tolist() == [0.5]
    time.sleep(0.2)
    assert connected == []


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.warns(UserWarning, match="openenv: http://127.0.0.1:.* does not answer"):
        batch = nrl.rollout(Says("qwen3", []), openenv(f"http://127.0.0.1:{free_port()}"), [TASK])
    assert batch["valid"].tolist() == [False]
