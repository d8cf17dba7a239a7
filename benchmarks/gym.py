"""What it costs to serve an environment, beside NeMo Gym, in turns; and whether a server holds what is asked of it.

    python benchmarks/gym.py verify --other new                  # three minutes; makes one with nemo-gym 0.4.0
    python benchmarks/gym.py verify --other ~/nemo/bin/python    # the same, in an environment that is there
    python benchmarks/gym.py burst sessions rollouts             # a minute
    python benchmarks/gym.py --quick                             # does it run?

``verify``: user and system CPU time of the server's process for one call that compares two strings. Its body has 1.7 KB
(one answer) or 71 KB (16 turns, for NeMo Gym with 15 calls of tools between them, as the Responses API writes them;
the texts are as long as the size asks for). Both sides get the headers that `nrl.remote` sends, and have a session;
nrl's has a token and metrics. NeMo Gym is started by ``gym env start`` with a minimal ``SimpleResourcesServer``, all
else as it ships. The load comes from one process of its own, over ``--connections`` that stay open; server and load are
pinned to a processor each. The two sides take turns, the first of which is left out, and the ratio is taken within each
pair. Of NeMo Gym the process of the server alone counts, not Ray; of nrl the process and all that it starts.

``burst``: 16,000 calls of a `nrl.remote` verifier that are all under way at a time, each on a connection of its own and
with another right verdict: the verifier answers none before all of them have come. None may fail or be another's.
Server and program have a processor each. There are two clients, since each uses half of the files that a process may
have open.

``sessions``: 2,048 episodes of one `nrl.remote` environment, all open before the first goes on. Each adds up numbers of
its own, and has to find their sum.

``rollouts``: rollouts a second over HTTP where nothing but nrl takes time: a sampler that answers at once, and a served
verifier.

It needs Linux: CPU time and memory are read in ``/proc``.
"""

import argparse
import asyncio
import functools
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import nrl
from benchmarks._http_load import NUMBER, Load, children, cpu_seconds, most_resident, pin
from benchmarks._machine import described, resident, watched
from benchmarks._nemo_gym import Server, body, installed, nemo_gym
from benchmarks._paired import pair, spread
from benchmarks.schedules import rate_of
from nrl.envs import Trace

__all__ = [
    "BODIES",
    "HEADERS",
    "burst",
    "cost",
    "main",
    "options",
    "our_body",
    "ours",
    "rollouts",
    "sessions",
    "sized",
    "table",
    "verify",
]

ROOT = Path(__file__).resolve().parent.parent
TOKEN = "a-token-of-32-characters-or-more"
HEADERS = {
    "nrl-timeout": "690.000",
    "accept": "*/*",
    "accept-encoding": "gzip, deflate",
    "user-agent": "Python/3.12 aiohttp/3.14.5",
}
"""Those of `nrl.remote` that every request has, beside the token."""
BODIES: dict[str, tuple[int, int]] = {"1.7 KB": (1_700, 1), "71 KB": (71_000, 16)}
"""By name: bytes, and turns."""


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    >>> options(["burst"]).what
    ['burst']
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=[[], *MEASURES], help="measurements (all)")
    other = "of an environment with nemo-gym; new: of one that is made; none: nrl alone"
    parser.add_argument("--other", type=Path, metavar="PYTHON", help=other)
    parser.add_argument("--quick", action="store_true", help="little of everything")
    parser.add_argument("--turns", type=int, default=7, help="of each side, the first of which is left out")
    parser.add_argument("--seconds", type=float, default=1.0, help="of CPU time that a turn is to take")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--calls", type=int, default=16_000, help="of burst")
    parser.add_argument("--episodes", type=int, default=2_048, help="of sessions")
    parser.add_argument("--out", type=Path, help="a file for every measurement, as JSON")
    found = parser.parse_args(words)
    found.what = found.what or list(MEASURES)
    if found.quick:
        found.turns, found.seconds, found.calls, found.episodes = 2, 0.02, 64, 16
    return found


@contextmanager
def ours(environment: str) -> Iterator[Server]:
    """Serve one of `_served`; when the block is left, stop.

    Raises:
        RuntimeError: the server did not start.
    """
    order = {"environment": f"benchmarks/_served.py:{environment}", "host": "127.0.0.1", "port": 0, "token": TOKEN}
    started = subprocess.Popen(
        [sys.executable, "-m", "nrl.gym.http.process"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert started.stdin is not None
    assert started.stdout is not None
    started.stdin.write(json.dumps(order) + "\n")
    started.stdin.flush()
    try:
        line = started.stdout.readline()
        if not line:
            raise RuntimeError(f"nrl: the server ended with exit code {started.wait()}; what it said is above")
        yield Server(json.loads(line)["url"], {"authorization": f"Bearer {TOKEN}"}, children(started.pid))
    finally:
        started.terminate()
        started.communicate()


def our_body(said: list[str]) -> bytes:
    """What is verified, as nrl's server takes it: a task, what was said, and a name, which clients give each call."""
    task = {"prompt": "Which number is it?", "answer": said[-1]}
    trace = {"prompt": task["prompt"], "turns": [{"text": text} for text in said]}
    return json.dumps({"task": task, "trace": trace, "call": NUMBER}).encode()


def sized(make: Callable[[list[str]], bytes], size: int, turns: int) -> bytes:
    """A body of so many bytes, or up to a word a turn less; the last turn, which is compared, is short.

    >>> len(sized(our_body, 1_700, 1)), 70_900 < len(sized(our_body, 71_000, 16)) <= 71_000
    (1700, True)
    """
    answer, others = "42", max(1, turns - 1)
    if turns == 1:  # the answer is all there is, and stands in the task again
        empty = len(make([""]))
        text = "w" * ((size - empty) // 2)
        return make([text]) + b" " * (size - empty - 2 * len(text))
    room = (size - len(make([""] * others + [answer]))) // others
    return make([("word " * room)[:room]] * others + [answer])


def cost(load: Load, server: Server, asked: bytes, requests: int, connections: int) -> float:
    """Microseconds of the server's CPU time for a request."""
    before = cpu_seconds(server.processes)
    load(server.url, asked, requests=requests, headers=HEADERS | dict(server.headers), connections=connections)
    return (cpu_seconds(server.processes) - before) / requests * 1e6


def _cores() -> tuple[Collection[int], Collection[int]]:
    """A processor for the server, and one for who asks; none, where there is only one."""
    usable = sorted(os.sched_getaffinity(0))
    return ([usable[-2]], [usable[-1]]) if len(usable) > 1 else ((), ())


def verify(given: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of CPU time of both servers, by body and turn."""
    mine, asking = _cores()
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        one = stack.enter_context(ours("same"))
        sides = [(one._replace(url=f"{one.url}/verify"), our_body)]
        if given.other:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            python = installed(folder / "environment") if given.other == Path("new") else given.other
            sides.append((stack.enter_context(nemo_gym(python, folder / "server")), body))
        for server, _ in sides:
            for each in server.processes:
                pin(each, mine)
        load = Load(asking)
        stack.callback(load.close)
        for name, (size, turns) in BODIES.items():
            asked = [(server, sized(make, size, turns)) for server, make in sides]
            found[name] = _in_turns(load, asked, given)
    return found


def _in_turns(load: Load, asked: list[tuple[Server, bytes]], given: argparse.Namespace) -> dict[str, Any]:
    calls = []
    for server, what in asked:
        cost(load, server, what, 200, given.connections)  # it warms up
        guess = cost(load, server, what, 200, given.connections)
        calls.append(max(50, round(given.seconds * 1e6 / max(guess, 10.0))))
    sides = [
        functools.partial(cost, load, server, what, requests, given.connections)
        for (server, what), requests in zip(asked, calls, strict=True)
    ]
    mine, *others = sides
    found = [pair(mine, others[0], number) if others else (mine(),) for number in range(given.turns)]
    return {"bytes": [len(what) for _, what in asked], "requests": calls, "microseconds": found[1:]}


def table(found: dict[str, Any]) -> str:
    """What `verify` found, as Markdown.

    >>> print(table({"1.7 KB": {"microseconds": [(50.0, 1000.0), (40.0, 1200.0)]}}))
    | body | nrl, us | NeMo Gym, us | NeMo Gym / nrl |
    |---|---|---|---|
    | 1.7 KB | 45 (40-50) | 1100 (1000-1200) | 25.00 (20.00-30.00) |
    """

    def side(pairs: list[tuple[float, ...]], number: int) -> str:
        values = [each[number] for each in pairs if len(each) > number]
        return f"{statistics.median(values):.0f} ({min(values):.0f}-{max(values):.0f})" if values else "-"

    lines = ["| body | nrl, us | NeMo Gym, us | NeMo Gym / nrl |", "|---|---|---|---|"]
    for name, each in found.items():
        pairs = each["microseconds"]
        ratio = spread([times[1] / times[0] for times in pairs if len(times) > 1])
        lines.append(f"| {name} | {side(pairs, 0)} | {side(pairs, 1)} | {ratio} |")
    return "\n".join(lines)


async def _value(found: Any) -> Any:
    return await found if inspect.isawaitable(found) else found


@contextmanager
def _served(environment: str) -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """What makes clients of a served environment; its memory is filled in when the block is left."""
    mine, asking = _cores()
    before = os.sched_getaffinity(0)
    with ours(environment) as server:
        for each in server.processes:
            pin(each, mine)
        pin(os.getpid(), asking)
        memory: dict[str, Any] = {"server_mib_before": round(_own(server.processes))}
        try:
            yield functools.partial(nrl.remote, server.url, token=TOKEN), memory
        finally:
            pin(os.getpid(), before)
        memory["server_mib_most"] = round(most_resident(server.processes))
        memory["server_mib_after"] = round(_own(server.processes))


def _own(processes: list[int]) -> float:
    return sum(resident(each)["own"] for each in processes)


def burst(given: argparse.Namespace) -> dict[str, Any]:
    """All calls at once; raises unless each has the verdict that is its own."""

    async def ask(verifiers: list[Any]) -> list[Any]:
        async def call(number: int) -> Any:
            task = {"prompt": "", "answer": str(number), "calls": given.calls}
            return await verifiers[number % 2](task, Trace("", [str(number + number % 2)]))

        return await asyncio.gather(*map(call, range(given.calls)))

    with _served("together") as (connect, memory):
        verifiers = [connect(connections=(given.calls + 1) // 2) for _ in range(2)]
        began = time.perf_counter()
        verdicts = asyncio.run(ask(verifiers))
        seconds = time.perf_counter() - began
    wrong = [number for number, verdict in enumerate(verdicts) if float(verdict) != 1.0 - number % 2]
    if len(verdicts) != given.calls or wrong:
        raise RuntimeError(f"burst: {len(verdicts)} verdicts of {given.calls}, and wrong ones of {wrong[:10]}")
    return {"calls": given.calls, "seconds": round(seconds, 2)} | memory


def sessions(given: argparse.Namespace) -> dict[str, Any]:
    """Episodes that are all open at once; raises unless each finds its own sums."""

    async def play(env: Any) -> list[Any]:
        numbers = range(given.episodes)
        begun = await asyncio.gather(*(_value(env.reset({"prompt": "", "start": number})) for number in numbers))
        states, rewards = [state for state, _ in begun], [0.0] * given.episodes
        for said in ("1", "10"):
            steps = await asyncio.gather(*(_value(env.step(state, nrl.envs.Turn(said))) for state in states))
            states = [step.state for step in steps]
            rewards = [reward + float(step.reward) for reward, step in zip(rewards, steps, strict=True)]
        await asyncio.gather(*(_value(env.close(state)) for state in states))
        return rewards

    with _served("adding") as (connect, memory):
        began = time.perf_counter()
        rewards = asyncio.run(play(connect()))
        seconds = time.perf_counter() - began
    wrong = [number for number, reward in enumerate(rewards) if reward != 2 * number + 12]
    if wrong:
        raise RuntimeError(f"sessions: the sums of the episodes {wrong[:10]} are wrong")
    return {"episodes": given.episodes, "seconds": round(seconds, 2)} | memory


def rollouts(given: argparse.Namespace) -> dict[str, Any]:
    """Rollouts a second, with the verifier served and, for comparison, in the program."""
    from benchmarks._served import same

    rows, takes = (8, 2) if given.quick else (256, 12)
    with _served("same") as (connect, memory):
        served = rate_of(nrl.envs.single_turn(connect()), rows, takes)
        here = rate_of(nrl.envs.single_turn(same), rows, takes)
    return {"a_second": round(served), "a_second_without_http": round(here)} | memory


MEASURES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "verify": verify,
    "burst": burst,
    "sessions": sessions,
    "rollouts": rollouts,
}


def main(given: argparse.Namespace) -> dict[str, Any]:
    """Measure, print, and return what was found."""
    found: dict[str, Any] = {}
    for name in given.what:
        with watched() as machine:
            found[name] = MEASURES[name](given)
        print(table(found[name]) if name == "verify" else json.dumps({name: found[name]}, indent=1))
        print(f"the machine: {described(machine)}\n", flush=True)
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    main(options())
