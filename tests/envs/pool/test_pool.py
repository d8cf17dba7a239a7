"""Verifiers and environments in a pool of processes: the same scores, and overruns that are gone."""

import asyncio
import ctypes
import gc
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import nrl
from nrl import pooled
from nrl.envs import Environment, Step, Trace, Turn, exact, judged, single_turn
from nrl.envs.pool import processes
from nrl.envs.pool.pool import _elsewhere
from nrl.envs.pool.processes import Process, Python, here
from nrl.envs.pool.scheduler import NoRoom, Pool
from nrl.errors import EnvError, ExecutableError, PlacementError, ShippingError
from nrl.runtime.ray.codec.pickling import deserialize, serialize
from nrl.runtime.venvs.recipes import make_recipe
from tests.processes import alive, settled
from tests.rollout.scripted import TASKS, Scripted

TEXTS = ["3", "4", "19", "what?"]  # two answers to each task


def by_task(task: Any, trace: Trace) -> Any:
    """Does what the task says, and then says whether the answer is right."""
    match task.get("does"):
        case "raise":
            raise ValueError(f"no {task['answer']}")
        case "stop":
            raise StopIteration
        case "exit":
            sys.exit(3)
        case "end":
            os._exit(4)
        case "crash":
            ctypes.string_at(0)
        case "sleep":
            time.sleep(60)
        case "hold":  # without ever letting another thread run
            return float(9**9**9 > 0)
        case "fill":
            return float(len(bytearray(8 << 30)))
        case "secret":
            return threading.Lock()
        case "pid":
            return float(os.getpid())
    print("read:", trace.text)
    return float(trace.text == task["answer"])


class Counting:
    """An environment whose states cannot travel: they have an open file each, in the process that made it."""

    def reset(self, task: Any) -> Any:
        return {"file": Path(os.devnull).open(), "turns": [], "pid": os.getpid()}, task["prompt"]

    async def step(self, state: Any, turn: Turn) -> Step:
        assert state["pid"] == os.getpid()
        assert (turn.stop_reason, len(turn.token_ids)) == ("stop", len(turn) + 1)
        state["turns"].append(turn.text)
        done = len(state["turns"]) == 2
        return Step(state, float(len(turn)), done, None if done else "+", {"turns": float(len(state["turns"]))})

    def close(self, state: Any) -> None:
        state["file"].close()

    timeout = 30.0


def test_an_episode_stays_in_its_process() -> None:
    def played(env: Any) -> nrl.Batch:
        texts = ["3", "44", "555", "66", "7", "8888", "1", "22"]
        return nrl.rollout(Scripted(texts), judged(env, lambda task, trace: len(trace.turns)), TASKS, n=2)

    plain, apart = played(Counting()), played(pooled(Counting(), workers=2))
    assert apart["valid"].all()
    for name in ("input_ids", "rewards", "token_rewards", "env/turns", "status"):
        assert plain[name].tolist() == apart[name].tolist(), name


def test_tools_of_a_pooled_environment_are_shown_and_called_there() -> None:
    def where() -> str:
        """Say where."""
        return str(os.getpid())

    def reset(task: Any) -> Any:
        return 0, "Where?", [nrl.envs.tools.tool(where)]

    def step(state: int, turn: Turn) -> Step:
        return Step(state, float(os.getpid() != turn.token_ids[0]), info={"pid": float(os.getpid())})

    env = pooled(Environment(reset, step), workers=1)

    async def play() -> tuple[Any, Step]:
        state, _, tools = await env.reset({})
        return tools, await env.step(state, Turn("here", [os.getpid()]))  # type: ignore[misc]

    (tool,), taken = asyncio.run(play())
    assert tool.schema["function"] == {
        "name": "where",
        "description": "Say where.",
        "parameters": {"type": "object", "properties": {}},
    }
    assert taken.reward == 1.0
    assert taken.info["pid"] != os.getpid()


def test_a_pool_has_the_environment_variables_of_an_executable() -> None:
    def told(task: Any, trace: Trace) -> float:
        return float(os.environ["TOLD"])

    verify: Any = pooled(told, workers=1, executable=nrl.Executable("system", env={"TOLD": "0.25"}))
    assert asyncio.run(verify({}, Trace())) == 0.25


def test_a_pool_has_the_packages_of_an_executable() -> None:
    def where(task: Any, trace: Trace) -> float:
        raise ValueError(sys.prefix)

    with pytest.raises(ValueError, match=r"/base-[0-9a-f]+$"):
        asyncio.run(pooled(where, workers=1, executable="base", timeout=300)({}, Trace()))  # type: ignore[arg-type]


def test_a_python_that_travels_is_that_of_the_program_that_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program, such as a process of a mesh, may have no lock to make a recipe from; but a Python of its own."""

    def travelled(executable: str | nrl.Executable) -> Python:
        twice = serialize(deserialize(serialize(Python(executable), "it"))[0], "it")
        made: Python = deserialize(twice)[0]
        return made

    named, given = travelled("base"), travelled(nrl.Executable("mine", extras=("gym",), env={"TOLD": "1"}))
    own = travelled("system"), travelled(nrl.Executable("system", env={"TOLD": "1"}))
    expected = make_recipe("base"), make_recipe("gym")
    monkeypatch.setattr(processes, "make_recipe", lambda of: "that of here")
    assert named.found() == (expected[0], {})
    assert (given.found()[0].requirements, given.found()[1]) == (expected[1].requirements, {"TOLD": "1"})
    there: list[Any] = [each.found() for each in own]
    assert there == [("that of here", {}), ("that of here", {"TOLD": "1"})]


NOWHERE = nrl.Executable("nowhere", extras=("no-such-extra",))


def test_an_environment_that_cannot_be_made_ends_the_rollout_and_no_row_is_to_blame() -> None:
    verify: Any = pooled(by_task, workers=1, executable=NOWHERE)
    with pytest.raises(ExecutableError, match="no-such-extra"):
        nrl.rollout(Scripted(["3"] * 4), single_turn(verify), TASKS, n=2)

    async def together(task: Any, traces: Any) -> Any:
        return [await verify(task, trace) for trace in traces]

    together.of_group = True  # type: ignore[attr-defined]
    with pytest.raises(ExecutableError, match="no-such-extra"):
        nrl.rollout(Scripted(["3"] * 4), single_turn(together), TASKS, n=2)


def test_an_environment_that_cannot_be_made_is_said_before_it_travels() -> None:
    with pytest.raises(ExecutableError, match="no-such-extra"):
        serialize(pooled(by_task, workers=1, executable=NOWHERE), "it")


# --- what goes wrong goes wrong in one row


def ask(verify: Any, does: str | None = None, answer: str = "3") -> Any:
    return asyncio.run(verify({"answer": answer, "does": does}, Trace("", [answer])))


@pytest.fixture(scope="module")
def verify() -> Any:
    return pooled(by_task, workers=1, timeout=3.0)


@pytest.mark.parametrize(
    ("does", "error", "said"),
    [
        ("raise", ValueError, "^no 3$"),
        ("stop", RuntimeError, "StopIteration"),
        ("exit", SystemExit, "3"),
        ("end", EnvError, r"pooled\(by_task\): its process ended with 4\n    read: 3"),
        ("crash", EnvError, r"pooled\(by_task\): its process ended by signal 11"),
        (
            "sleep",
            TimeoutError,
            r"pooled\(by_task\) did not return within 3 s, and its process was killed; mend it, or",
        ),
        ("hold", TimeoutError, r"pooled\(by_task\) did not return within 3 s, and its process was killed"),
        ("secret", ShippingError, "pooled"),
    ],
)
def test_whatever_a_verifier_does_the_next_call_is_answered(verify: Any, does: str, error: Any, said: str) -> None:
    assert ask(verify) == 1.0
    before = ask(verify, "pid")
    with pytest.raises(error, match=said):
        ask(verify, does)
    assert ask(verify) == 1.0
    gone = does in ("end", "crash", "sleep", "hold")
    assert alive(int(before)) is not gone
    assert (ask(verify, "pid") == before) is not gone


def test_memory_is_bounded() -> None:
    with pytest.raises(MemoryError):
        ask(pooled(by_task, workers=1, memory=6 << 30), "fill")


def test_a_call_that_is_given_up_is_killed() -> None:
    async def give_up() -> int:
        verify: Any = pooled(by_task, workers=1, timeout=None)
        pid = int(await verify({"answer": "3", "does": "pid"}, Trace("", ["3"])))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(verify({"answer": "3", "does": "sleep"}, Trace("", ["3"])), 0.5)
        assert not settled(lambda: alive(pid), 60)
        return int(await verify({"answer": "3", "does": "pid"}, Trace("", ["3"]))) - pid

    assert asyncio.run(give_up()) != 0


def test_what_a_process_writes_takes_little_room() -> None:
    """Between calls it is cut to its end, which an error shows."""

    def talk(task: Any, trace: Trace) -> float:
        if task["ends"]:
            os._exit(4)
        print("x" * (1 << 20))
        print("last", task["row"], flush=True)
        found = os.fstat(1)
        return float(max(found.st_size, found.st_blocks * 512))

    verify: Any = pooled(talk, workers=1)

    async def several() -> list[float]:
        return [await verify({"row": row, "ends": False}, Trace()) for row in range(13)]

    sizes = asyncio.run(several())
    assert sizes[2] > 3 << 20
    assert max(sizes) < 6 << 20
    with pytest.raises(EnvError, match=r"ended with 4\n    x*\n    last 12$") as caught:
        asyncio.run(verify({"ends": True}, Trace()))
    assert len(str(caught.value)) < 70_000


def test_what_a_late_call_has_started_is_gone(tmp_path: Path) -> None:
    """Children in a session of their own, those of another thread, and theirs."""

    def hang(task: Any, trace: Trace) -> float:
        pids = []
        inner = (
            "import os, subprocess; print(subprocess.Popen(['sleep', '47'], start_new_session=True).pid, flush=True)"
        )

        def start() -> None:
            pids.append(subprocess.Popen(["sleep", "47"], start_new_session=True).pid)
            time.sleep(47)

        threading.Thread(target=start, daemon=True).start()
        child = subprocess.Popen(
            [sys.executable, "-c", f"{inner}; os.wait()"], start_new_session=True, stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        pids += [child.pid, int(child.stdout.readline())]
        while len(pids) < 3:
            time.sleep(0.01)
        Path(task["file"]).write_text(" ".join(map(str, pids)))
        time.sleep(47)
        return 0.0

    verify: Any = pooled(hang, workers=1, timeout=6.0)
    with pytest.raises(TimeoutError):
        asyncio.run(verify({"file": str(tmp_path / "pids")}, Trace()))
    pids = [int(each) for each in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 3
    assert not settled(lambda: [pid for pid in pids if alive(pid)], 60)


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
@pytest.mark.parametrize("late", [True, False])
def test_a_daemon_is_gone_with_its_process(late: bool, tmp_path: Path) -> None:
    """One that has left its session and whose parent has ended; of a call that is late, and of one that returned."""

    def begin(task: Any, trace: Trace) -> float:
        file = task["file"]
        inner = f"import subprocess; open({file!r}, 'w').write(str(subprocess.Popen(['sleep', '47']).pid))"
        subprocess.run([sys.executable, "-c", inner], start_new_session=True, check=True)
        time.sleep(47 * task["late"])
        return 1.0

    verify: Any = pooled(begin, workers=1, timeout=6.0)
    task = {"file": str(tmp_path / "pid"), "late": late}
    if late:
        with pytest.raises(TimeoutError):
            asyncio.run(verify(task, Trace()))
    else:
        assert asyncio.run(verify(task, Trace())) == 1.0
    pid = int((tmp_path / "pid").read_text())
    assert late or alive(pid)
    del verify
    gc.collect()
    assert not settled(lambda: alive(pid), 60)


@pytest.mark.parametrize(
    "make", [lambda name: pooled(exact, executable=name), lambda name: nrl.math_verifier(executable=name)]
)
def test_an_executable_that_there_is_not_is_an_error_at_once(make: Any) -> None:
    with pytest.raises(PlacementError, match="there is none named 'gim'; did you mean 'gym'"):
        make("gim")


def test_this_programs_own_interpreter_has_to_have_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "math_verify" else found(name))
    with pytest.raises(PlacementError, match="math_verifier: the executable 'system' is .*, which has no math_verify"):
        nrl.math_verifier(executable="system")


def test_only_the_episodes_of_a_process_fail_with_it() -> None:
    """Of eight episodes in two processes, one kills its own: the rows of that process fail, the others do not."""

    def reset(task: Any) -> Any:
        return os.getpid(), task["prompt"]

    def step(state: int, turn: Turn) -> Step:
        if turn == "6":
            os.kill(os.getpid(), signal.SIGKILL)
        return Step(state, 1.0, info={"pid": float(state)})

    env = pooled(Environment(reset, step), workers=2)
    with pytest.warns(UserWarning, match=r"episodes failed.*its process ended by signal 9"):
        batch = nrl.rollout(Scripted(list("34567890")), env, TASKS, n=4)
    valid, pids = batch["valid"], batch["env/pid"]
    assert not valid[3]
    assert 1 <= len(set(pids[valid].tolist())) <= 2
    assert int(valid.sum()) >= 1
    assert batch["rewards"][valid].tolist() == [1.0] * int(valid.sum())
    assert nrl.rollout(Scripted(list("34512890")), env, TASKS, n=4)["valid"].all()


def test_calls_one_after_the_other_take_one_process() -> None:
    verify = pooled(by_task, workers=4)

    async def several() -> set[float]:
        return {await verify({"does": "pid"}, Trace()) for _ in range(500)}  # type: ignore[misc]

    assert len(asyncio.run(several())) == 1


# --- room for some workers only


class Scarce(Process):
    """A process, of which there may be so many."""

    room = threading.Semaphore(0)

    def start(self) -> None:
        if not self.room.acquire(timeout=1.0):
            raise NoRoom("there is none")
        super().start()


def scarce(f: Any, room: int) -> Any:
    class Few(Scarce):
        pass

    Few.room = threading.Semaphore(room)

    return _elsewhere(f, lambda: Pool(f, "pooled", 4, lambda _: Few("pooled", f, Python("system"), None, here()), 30.0))


def test_the_workers_that_find_room_make_all_calls() -> None:
    async def several(verify: Any) -> list[Any]:
        calls = (verify({"does": "pid"}, Trace()) for _ in range(40))
        return await asyncio.gather(*calls, return_exceptions=True)

    verify = scarce(by_task, 2)
    asyncio.run(several(verify))
    assert len(set(asyncio.run(several(verify)))) <= 2
    found = asyncio.run(several(scarce(by_task, 0)))
    assert {str(each) for each in found} == {"pooled(by_task): there is none"}
    assert {type(each) for each in found} == {EnvError}


def test_episodes_go_where_there_is_room() -> None:
    def reset(task: Any) -> Any:
        return os.getpid(), "?"

    def step(state: int, turn: Turn) -> Step:
        return Step(state, float(state == os.getpid()), info={"pid": float(state)})

    async def several(env: Any) -> list[Any]:
        states = await asyncio.gather(*(env.reset({}) for _ in range(8)))
        states += await asyncio.gather(*(env.reset({}) for _ in range(8)))
        return await asyncio.gather(*(env.step(state, Turn("x")) for state, _ in states))

    taken = asyncio.run(several(scarce(Environment(reset, step), 2)))
    assert [each.reward for each in taken] == [1.0] * 16
    assert len({each.info["pid"] for each in taken}) <= 2


# --- nothing is left


def test_processes_end_with_the_pool() -> None:
    verify = pooled(by_task, workers=1)
    pid = int(ask(verify, "pid"))
    assert alive(pid)
    del verify
    gc.collect()
    assert not settled(lambda: alive(pid), 60)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, None])
def test_processes_end_with_the_program(how: int | None, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import asyncio, os, sys, time\n"
        "import nrl\n"
        "from nrl.envs import Trace\n"
        "def verify(task, trace):\n"
        "    if task['hold']:\n"
        "        9 ** 9 ** 9\n"
        "    return float(os.getpid())\n"
        "if __name__ == '__main__':\n"
        "    pool = nrl.pooled(verify, workers=1)\n"
        "    print(int(asyncio.run(pool({'hold': False}, Trace()))), flush=True)\n"
        "    if sys.argv[1] == 'True':\n"
        "        asyncio.run(pool({'hold': True}, Trace()))\n"
    )
    program = subprocess.Popen([sys.executable, script, str(how is not None)], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    pid = int(program.stdout.readline())
    assert alive(pid) or how is None
    if how is not None:
        time.sleep(0.3)
        program.send_signal(how)
    program.wait(60)
    assert not settled(lambda: alive(pid), 60)
    program.stdout.close()


def test_a_verifier_that_cannot_travel_says_so() -> None:
    lock = threading.Lock()
    verify: Any = pooled(lambda task, trace: lock.locked(), workers=1)
    with pytest.raises(ShippingError, match="pooled"):
        asyncio.run(verify({}, Trace()))


@pytest.mark.parametrize("argument", ["workers", "timeout", "memory"])
def test_numbers_are_positive(argument: str) -> None:
    make: Callable[..., Any] = pooled
    with pytest.raises(ValueError, match=rf"pooled: {argument} is 0; it must be positive, or None"):
        make(by_task, **{argument: 0})
