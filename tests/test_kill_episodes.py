"""Runs of several turns that are killed or interrupted: the numbers of an undisturbed one, and states closed once."""

import importlib
import inspect
import itertools
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import pytest

from nrl.backends import Sampling, adamw
from nrl.envs import Environment, Step, Task, Turn
from tests.children import server
from tests.jsonlines import untimed
from tests.replays import ONE_TURN, taught

STEPS = 6


def counted(env: Environment, log: Path, interrupt: int) -> Environment:
    """The environment, which writes down each state that it gives and closes; its n-th step presses Ctrl-C."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    numbers, steps = itertools.count(), itertools.count(1)

    def note(what: str, key: str) -> None:
        os.write(file, f"{what} {key}\n".encode())  # one write, so that a kill leaves whole lines

    def reset(task: Task) -> Any:
        state, *rest = env.reset(task)
        key = f"{os.getpid()}-{next(numbers)}"
        note("open", key)
        return (key, state), *rest

    async def step(held: Any, turn: Turn) -> Step:
        if next(steps) == interrupt:
            os.kill(os.getpid(), signal.SIGINT)
        key, state = held
        taken = env.step(state, turn)
        found: Step = await taken if inspect.isawaitable(taken) else taken
        return found._replace(state=(key, found.state))

    return env._replace(reset=reset, step=step, close=lambda held: note("close", held[0]))


def program(name: str, out: str, lag: int, interrupt: int) -> None:
    """One attempt at the whole of an example, with a model that has been taught."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = Path(out).parent
    with (folder / "log").open("a") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    module: Any = importlib.import_module(f"examples.{name}")
    module.env = counted(module.env, Path(f"{out}.states"), interrupt)
    cfg = module.Config(
        model=str(folder / "taught" / "model"),
        out=out,
        lag=lag,
        steps=STEPS,
        prompts=8,
        evaluate_every=2,
        sampling=Sampling(max_new_tokens=ONE_TURN[name]),
        optimizer=adamw(lr=1e-3),
        max_mismatch=10.0,  # a lag is no mistake
    )
    cfg = attrs.evolve(cfg, checkpoints=attrs.evolve(cfg.checkpoints, every=2))
    module.main(attrs.evolve(cfg, chat=False) if name == "guess" else cfg)


def attempt(
    name: str, out: Path, lag: int, *, seconds: float | None = None, interrupt: int = 0
) -> tuple[int | None, float]:
    """Run the program to its end, or kill it after so many seconds; returns how it ended and what it took."""
    child = server(f"examples.{name}").Process(target=program, args=(name, str(out), lag, interrupt))
    started = time.monotonic()
    child.start()
    child.join(seconds)
    if child.is_alive():
        child.kill()
        child.join()
    return child.exitcode, time.monotonic() - started


def states(out: Path) -> tuple[dict[str, int], dict[str, int]]:
    """How often each state was opened, and closed, by all attempts."""
    log = Path(f"{out}.states")
    lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    opened, closed = (Counter(key for what, key in lines if what == kind) for kind in ("open", "close"))
    assert set(closed) <= set(opened)
    assert {*opened.values(), *closed.values()} <= {1}
    return opened, closed


@pytest.fixture(scope="module", params=["guess", pytest.param("tools", marks=pytest.mark.slow)])
def example(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Its name, and a folder with a model that has been taught."""
    folder = tmp_path_factory.mktemp(request.param)
    taught(importlib.import_module(f"examples.{request.param}"), request.param, folder / "taught")
    return request.param, folder


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("lag", "rounds"), [(0, 1), pytest.param(2, 10, marks=pytest.mark.slow)])
def test_interrupted_and_killed_at_random_moments(example: tuple[str, Path], lag: int, rounds: int) -> None:
    name, folder = example
    draw, log = random.Random(lag), folder / "log"
    whole, broken = folder / f"whole {lag}", folder / f"broken {lag}"
    code, took = attempt(name, whole, lag)
    assert code == 0, log.read_text()
    expected, (opened, closed) = untimed(whole), states(whole)
    assert opened == closed
    assert len(opened) > STEPS * 8 * 8  # and those of evaluations
    assert min(line["grad_norm"] for line in expected["metrics.jsonl"]) > 1e-3  # so a step lost or done twice shows

    def same() -> None:
        assert untimed(broken) == expected
        for file in ("model/model.safetensors", f"checkpoints/train/{STEPS:06}/policy/00001-of-00001.safetensors"):
            assert (broken / file).read_bytes() == (whole / file).read_bytes()

    interrupted, killed, names = 0, 0, itertools.count(1)
    while min(interrupted, killed) < rounds:
        before = len(states(broken)[0])
        code, _ = attempt(name, broken, lag, interrupt=draw.randrange(1, 300))
        if code:
            assert "KeyboardInterrupt" in log.read_text()
            opened, closed = states(broken)
            assert set(itertools.islice(opened, before, None)) <= set(closed)  # those that were open, too
            interrupted += 1
            code, _ = attempt(name, broken, lag, seconds=draw.uniform(0.1, 1.0) * took)
            assert code in (0, -signal.SIGKILL), log.read_text()
            killed += code != 0
            took *= 1.0 if code else 0.8  # an attempt that came through was given too long
        if not code:  # it came through: begin again
            same()
            broken = folder / f"broken {lag} {next(names)}"
    before = len(states(broken)[0])
    code, _ = attempt(name, broken, lag)
    assert code == 0, log.read_text()
    opened, closed = states(broken)
    assert set(itertools.islice(opened, before, None)) <= set(closed)
    same()
