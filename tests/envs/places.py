"""Verifiers and environments of every kind, for the suite that compares the places in which they may run."""

import asyncio
import os
import random
import sqlite3
import threading
import time
from typing import Any

from nrl.envs import Environment, Score, Step, Trace, Turn, judged, of_group, tools
from nrl.envs.types import mapped
from nrl.errors import ExecutableError

__all__ = ["ENVIRONMENTS", "EVERYTHING", "FAILURES", "TEXTS", "VERIFIERS", "Refusal", "failing"]


class Refusal(Exception):
    """An exception with attributes of its own."""

    def __init__(self, text: str, *, code: int) -> None:
        super().__init__(text)
        self.code = code


def plain(task: Any, trace: Trace) -> float:
    """A number that no rounding may change."""
    return float(trace.text == task["answer"]) + 0.1 + 0.2


async def later(task: Any, trace: Trace) -> float:
    await asyncio.sleep(0.001)
    return float(len(trace.text)) / 3


def parts(task: Any, trace: Trace) -> dict[str, float]:
    return {"right": float(trace.text == task["answer"]), "short": 1 / (1 + len(trace.text))}


def several(task: Any, trace: Trace) -> tuple[float, float]:
    return float(trace.text == task["answer"]), -float(len(trace.text))


def full(task: Any, trace: Trace) -> Score:
    ok = trace.text.isdigit()
    return Score(float(ok) / 7, "ok" if ok else "parse_fail", {"digits": float(sum(map(str.isdigit, trace.text)))})


def seeded(task: Any, trace: Trace) -> float:
    return random.Random(f"{task['seed']}:{trace.text!r}").random()


@of_group
def compared(task: Any, traces: Any) -> list[Score]:
    longest = max(len(trace.text) for trace in traces)
    return [Score(len(trace.text) / longest, components={"of": float(len(traces))}) for trace in traces]


def hostile(task: Any, trace: Trace) -> float:
    """Infinities, a megabyte and surrogates travel as they are."""
    assert task["big"] == "\0\ud800" * 500_000
    return float("inf") if trace.text == task["answer"] else -0.0


VERIFIERS = {each.__name__: each for each in (plain, later, parts, several, full, seeded, compared, hostile)}

TEXTS = ["3", "4", "19", "what?\n\u2028\ud83d\ude00"]
"""Two answers to each of two tasks."""


class Game:
    """An environment with a state that no other process can have, over several turns."""

    timeout = 30.0

    def reset(self, task: Any) -> Any:
        base = sqlite3.connect(":memory:", check_same_thread=False)
        base.execute("create table turns (text)")
        return {"base": base, "seed": task["seed"], "pid": os.getpid()}, task["prompt"]

    async def step(self, state: Any, turn: Turn) -> Step:
        assert state["pid"] == os.getpid()
        assert turn.stop_reason == "stop"
        state["base"].execute("insert into turns values (?)", (turn.text,))
        ((number,),) = state["base"].execute("select count(*) from turns")
        drawn = random.Random(state["seed"] * 100 + number).random()
        done = number == 3
        return Step(state, {"drawn": drawn, "turn": number / 3}, done, None if done else f"{number};", {"n": number})

    def close(self, state: Any) -> None:
        state["base"].close()


def adder() -> Environment:
    """Tools, which are called where the state is."""

    def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    def reset(task: Any) -> Any:
        return [], task["prompt"], [tools.tool(add)]

    def step(state: list[str], turn: Turn) -> Step:
        return Step([*state, turn.text], float(len(turn.text)), len(state) == 1, "go on")

    return Environment(reset, step)


def _turns(task: Any, trace: Trace) -> float:
    return float(len(trace.turns)) + 0.1


ENVIRONMENTS = {"game": Game(), "judged": judged(Game(), _turns), "tools": adder()}


def failing(task: Any, trace: Trace) -> Any:
    """Does what the task says."""
    match task.get("does"):
        case "raise":
            raise ValueError(f"no {task['answer']}")
        case "own":
            raise Refusal("refused", code=7)
        case "stop":
            raise StopIteration
        case "assert":
            assert trace.text == "", "not this"
        case "exit":
            raise SystemExit(3)
        case "interrupt":
            raise KeyboardInterrupt("no hand")
        case "cancel":
            raise asyncio.CancelledError("nobody")
        case "need":
            raise ExecutableError("no lock")
        case "status":
            return Score(1.0, "bogus")  # type: ignore[arg-type]
        case "sleep":
            time.sleep(task["seconds"])
        case "die":
            os._exit(4)
        case "hold":  # without ever letting another thread run
            return float(9**9**9 > 0)
        case "lock":
            return threading.Lock()
    return float(trace.text == task["answer"])


FAILURES: dict[str, tuple[type[BaseException], str]] = {
    "raise": (ValueError, "^no 3$"),
    "own": (Refusal, "^refused$"),
    "stop": (RuntimeError, "StopIteration"),
    "assert": (AssertionError, "not this"),
    "exit": (SystemExit, "^3$"),
    "interrupt": (RuntimeError, "^KeyboardInterrupt: no hand$"),
    "cancel": (RuntimeError, "^CancelledError: nobody$"),
}
"""What a verifier raises, and what whoever called it gets."""


def _everything() -> Environment:
    """All of them in one, by the task's ``"kind"``, since a pool's processes take seconds to start."""

    def reset(task: Any) -> Any:
        env: Any = ENVIRONMENTS[task["kind"]]
        return mapped(env.reset(task), lambda found: ((task["kind"], found[0]), *found[1:]))

    def step(state: Any, turn: Turn) -> Any:
        kind, inner = state
        env: Any = ENVIRONMENTS[kind]
        return mapped(env.step(inner, turn), lambda taken: taken._replace(state=(kind, taken.state)))

    def close(state: Any) -> Any:
        kind, inner = state
        end: Any = getattr(ENVIRONMENTS[kind], "close", None)
        return end(inner) if end else None

    def verifier(task: Any, trace: Any) -> Any:
        known: dict[str, Any] = {**VERIFIERS, "failing": failing}
        return known[task["verifier"]](task, trace) if "verifier" in task else 0.0

    return Environment(reset, step, close, verifier, 30.0)


EVERYTHING = _everything()
