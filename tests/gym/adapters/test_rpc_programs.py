"""Programs that answer JSON-RPC: who starts them, and what becomes of who waits when one ends."""

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from nrl.errors import EnvError
from nrl.gym.adapters.rpc_programs import RpcProgram

PROGRAM = """
import json, os, subprocess, sys, time
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    if asked["method"] == "load":
        time.sleep(float(sys.argv[1]))
    if asked["method"] == "leave":  # somebody else holds the output
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1.5)"], start_new_session=True)
        os._exit(3)
    print("no message", flush=True)
    print(json.dumps({"id": asked["id"], "result": {"pid": os.getpid()}}), flush=True)
"""


def program(tmp_path: Path, load: float = 0.0) -> RpcProgram:
    (tmp_path / "program.py").write_text(PROGRAM)

    async def command() -> tuple[Sequence[str], Mapping[str, str]]:
        return (sys.executable, str(tmp_path / "program.py"), str(load)), {}

    async def greet(made: RpcProgram) -> None:
        await made.asked("load", {}, 30.0)

    return RpcProgram("the program", command, greet)


def test_who_asks_first_may_leave_and_the_others_are_answered(tmp_path: Path) -> None:
    async def ask() -> None:
        made = program(tmp_path, load=1.0)
        first = asyncio.create_task(made.ask("a", {}))
        others = [asyncio.create_task(made.ask("b", {})) for _ in range(3)]
        await asyncio.sleep(0.3)
        first.cancel()
        pids = {(await each)["pid"] for each in others}
        assert len(pids) == 1
        assert made.waiting == 0

    asyncio.run(ask())


def test_one_that_ends_is_started_again_whoever_holds_its_output(tmp_path: Path) -> None:
    async def ask() -> None:
        made = program(tmp_path)
        before = await made.ask("a", {})
        began = time.monotonic()
        with pytest.raises(EnvError, match="the program has ended with 3"):
            await made.ask("leave", {})
        assert time.monotonic() - began < 10
        after = await made.ask("a", {})
        assert after["pid"] != before["pid"]
        await asyncio.sleep(2.0)  # until who held the old one's output has ended
        assert await made.ask("a", {}) == after

    asyncio.run(ask())


def test_one_that_does_not_start_says_why_each_time(tmp_path: Path) -> None:
    async def ask() -> None:
        async def command() -> tuple[Sequence[str], Mapping[str, str]]:
            return (sys.executable, "-c", "raise SystemExit('no luck')"), {}

        async def greet(made: RpcProgram) -> None:
            await made.asked("load", {}, 30.0)

        made: Any = RpcProgram("the program", command, greet)
        for _ in range(2):
            with pytest.raises(EnvError, match=r"the program has ended with 1(; its last words: no luck)?"):
                await made.ask("a", {})

    asyncio.run(ask())
