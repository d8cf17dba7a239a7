"""Processes of a pool, and helpers of a mesh, that are killed at random: nothing is lost, counted twice or left."""

import asyncio
import gc
import os
import random
import re
import signal
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import nrl
from nrl.envs import Environment, Step, Trace, Turn
from nrl.errors import EnvError
from nrl.runtime import Cluster, Mesh
from tests.meshes import end
from tests.processes import alive, marked, settled

WHY = re.compile(r"ended by signal 9|the process that had this episode is gone|is gone: submit|has been replaced")


def noted(file: str, what: Any) -> None:
    """A line of a file that several processes write."""
    with Path(file).open("a") as log:
        log.write(f"{what}\n")


def product(task: Any, trace: Trace) -> float:
    noted(task["file"], task["row"])
    noted(f"{task['file']}.pids", os.getpid())
    return float(int(trace.text) == 7 * task["row"])


def turns() -> Environment:
    """Three turns; the reward of each is the row's number plus what the state has counted."""

    def reset(task: Any) -> Any:
        return {"row": task["row"], "turn": 0, "file": task["file"], "pid": os.getpid()}, "?"

    def step(state: Any, turn: Turn) -> Step:
        assert state["pid"] == os.getpid()
        state["turn"] += 1
        noted(state["file"], f"{state['row']}.{state['turn']}")
        return Step(state, float(state["row"] + state["turn"]), state["turn"] == 3, "?")

    return Environment(reset, step, lambda state: noted(state["file"], f"{state['row']}.closed"))


class Killer:
    """Kills a process at random, as often as asked for, evenly over the rows that come back."""

    def __init__(self, pids: Callable[[], Sequence[int]], kills: int, rows: int) -> None:
        self._pids, self._every, self._random = pids, max(1, rows // (kills + 1)), random.Random(0)
        self._back = self._due = self.killed = 0
        self._most = kills

    def count(self) -> None:
        """A row is back."""
        self._back += 1
        self._due = min(self._back // self._every, self._most)
        while self.killed < self._due and (pids := self._pids()):
            os.kill(self._random.choice(pids), signal.SIGKILL)
            self.killed += 1


def verified(verify: Any, killer: Killer, rows: int, file: Path) -> list[Any]:
    """What becomes of each row; a third of the answers is right."""

    async def one(row: int) -> Any:
        try:
            task = {"row": row, "file": str(file)}
            return await verify(task, Trace("", [str(7 * row + (row % 3 > 0))]))
        except EnvError as error:
            return EnvError(str(error))  # without a traceback, which would keep the pool
        finally:
            killer.count()

    async def every() -> list[Any]:
        return await asyncio.gather(*map(one, range(rows)))

    return asyncio.run(every())


def played(env: Environment, killer: Killer, rows: int, file: Path) -> list[Any]:
    """The sum of each episode's rewards; twenty are played at a time."""

    async def one(row: int, places: asyncio.Semaphore) -> Any:
        async with places:
            try:
                state, _ = await env.reset({"row": row, "file": str(file)})
            except EnvError as error:
                killer.count()
                return EnvError(str(error))
            try:
                total, done = 0.0, False
                while not done:
                    taken: Any = await env.step(state, Turn("?"))  # type: ignore[misc]
                    state, done = taken.state, taken.done
                    total += taken.reward
                return total
            except EnvError as error:
                return EnvError(str(error))
            finally:
                killer.count()
                assert env.close is not None
                await env.close(state)

    async def every() -> list[Any]:
        places = asyncio.Semaphore(20)
        return await asyncio.gather(*(one(row, places) for row in range(rows)))

    return asyncio.run(every())


def checked(found: Sequence[Any], right: Callable[[int], float], most: int) -> list[int]:
    """The rows that failed, each of which says why; every other score is right."""
    failed = [row for row, each in enumerate(found) if isinstance(each, EnvError)]
    for row in failed:
        assert WHY.search(str(found[row])), found[row]
    assert [each for row, each in enumerate(found) if row not in failed] == [
        right(row) for row in range(len(found)) if row not in failed
    ]
    assert len(failed) <= most
    return failed


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """In the environment of all processes that are started from now on."""
    name = uuid.uuid4().hex
    monkeypatch.setenv("NRL_TEST_KILLS", name)
    return name


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """No thread and no open file."""

    others = set(threading.enumerate())  # pools that other tests keep

    def threads() -> list[str]:
        return [each.name for each in set(threading.enumerate()) - others if each.name.startswith("pooled(")]

    def files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    gc.collect()
    before = files()
    yield
    gc.collect()
    assert not settled(threads, 60)
    assert not settled(lambda: files() > before + 1, 60)  # one is that of the program's only starter of processes


SIZES = [pytest.param(400, 3, id="small"), pytest.param(8192, 100, id="whole", marks=pytest.mark.slow)]


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize(("rows", "kills"), SIZES)
def test_rows_whose_processes_are_killed_are_verified_or_fail(mark: str, tmp_path: Path, rows: int, kills: int) -> None:
    killer = Killer(lambda: marked(mark), kills, rows)
    verify = nrl.pooled(product, workers=3)
    found = verified(verify, killer, rows, tmp_path / "log")
    assert killer.killed == kills
    checked(found, lambda row: float(row % 3 == 0), kills)
    times = Counter((tmp_path / "log").read_text().split())
    assert set(times.values()) == {1}  # none is made twice, also where its process was killed
    assert {str(row) for row, each in enumerate(found) if isinstance(each, float)} <= times.keys()
    del verify
    gc.collect()
    assert not settled(lambda: marked(mark), 10)


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize(("rows", "kills"), [pytest.param(60, 2, id="small"), SIZES[1]])
def test_episodes_whose_processes_are_killed_are_right_or_fail(
    mark: str, tmp_path: Path, rows: int, kills: int
) -> None:
    killer = Killer(lambda: marked(mark), kills, rows)
    env = nrl.pooled(turns(), workers=3)
    found = played(env, killer, rows, tmp_path / "log")
    assert killer.killed == kills
    failed = checked(found, lambda row: 3.0 * row + 6.0, 20 * kills)
    lines = (tmp_path / "log").read_text().split()
    assert set(Counter(lines).values()) == {1}
    closed = {line.removesuffix(".closed") for line in lines if line.endswith(".closed")}
    assert closed.isdisjoint(map(str, failed))  # what a killed process had is gone
    unclosed = set(map(str, range(rows))) - closed - set(map(str, failed))  # killed between the last turn and its end
    assert len(unclosed) <= 20 * kills - len(failed)
    del env
    gc.collect()
    assert not settled(lambda: marked(mark), 10)


# --- on Ray


@pytest.fixture(scope="module")
def mesh(on_ray: Cluster) -> Iterator[Mesh]:
    made = on_ray.reserve(2).mesh(executable="system", name="killed")
    yield made
    end(made)


def at_work(log: Path) -> Callable[[], list[int]]:
    """Tells the processes that have verified a row and still are there; one that is killed before has not started."""
    pids = log.with_name(f"{log.name}.pids")
    return lambda: [pid for pid in sorted({int(line) for line in pids.read_text().split()}) if alive(pid)]


@pytest.mark.ray
def test_rows_whose_helpers_are_killed_are_verified_or_fail(mesh: Mesh, tmp_path: Path) -> None:
    killer = Killer(at_work(tmp_path / "log"), 4, 400)
    found = verified(nrl.on(mesh)(product), killer, 400, tmp_path / "log")
    assert killer.killed == 4
    checked(found, lambda row: float(row % 3 == 0), 4)
    assert set(Counter((tmp_path / "log").read_text().split()).values()) == {1}


@pytest.mark.ray
def test_only_the_episodes_of_a_helper_fail_with_it(mesh: Mesh, tmp_path: Path) -> None:
    """Eight episodes lie on two ranks; one helper is killed between two of their turns."""
    env: Any = nrl.on(mesh)(turns())

    async def play() -> tuple[list[Any], list[Any]]:
        states = [(await env.reset({"row": row, "file": str(tmp_path / "log")}))[0] for row in range(8)]
        first = [(await env.step(state, Turn("?"))).reward for state in states]
        os.kill(mesh.submit(os.getpid, rank=1).result(), signal.SIGKILL)
        second = await asyncio.gather(*(env.step(state, Turn("?")) for state in states), return_exceptions=True)
        for state in states:
            await env.close(state)
        again = (await env.reset({"row": 9, "file": str(tmp_path / "log")}))[0]
        assert (await env.step(again, Turn("?"))).reward == 10.0
        return first, second

    first, second = asyncio.run(play())
    assert first == [row + 1.0 for row in range(8)]
    failed = [row for row, each in enumerate(second) if isinstance(each, EnvError)]
    assert len(failed) == 4  # they are spread evenly
    assert all(WHY.search(str(second[row])) for row in failed)
    assert [second[row].reward for row in range(8) if row not in failed] == [
        row + 2.0 for row in range(8) if row not in failed
    ]


def deadly(deaths: str) -> Any:
    """A verifier that kills a process which is given it, as long as there are deaths to die."""
    left = Path(deaths)
    if (lives := int(left.read_text())) > 0:
        left.write_text(str(lives - 1))
        os.kill(os.getpid(), signal.SIGKILL)
    return Deadly(deaths)


class Deadly:
    """What travels as a call of `deadly`."""

    def __init__(self, deaths: str) -> None:
        self.deaths = deaths

    def __reduce__(self) -> Any:
        return deadly, (self.deaths,)

    def __call__(self, task: Any, trace: Trace) -> float:
        return 1.0


@pytest.mark.ray
def test_a_helper_that_dies_while_it_starts_is_started_once_more(mesh: Mesh, tmp_path: Path) -> None:
    (tmp_path / "deaths").write_text("1")
    verify: Any = nrl.on(mesh)(Deadly(str(tmp_path / "deaths")))
    assert asyncio.run(verify({}, Trace())) == 1.0
    assert (tmp_path / "deaths").read_text() == "0"
    (tmp_path / "deaths").write_text("2")
    verify = nrl.on(mesh)(Deadly(str(tmp_path / "deaths")))
    with pytest.raises(EnvError, match=r"on\(killed\)\(Deadly\): could not start: submit.* of mesh 'killed'"):
        asyncio.run(verify({}, Trace()))
    assert asyncio.run(verify({}, Trace())) == 1.0  # the next call has another one
