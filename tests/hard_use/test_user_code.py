"""Whole programs whose environments and verifiers hang, exit, or fail throughout; and Ctrl-C in their rollouts."""

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

import nrl
from nrl import data, tiny
from nrl.algos import advantages, grpo_loss
from nrl.backends import Sampling, adamw, fsdp, hf
from nrl.envs import Env, Trace, exact, single_turn
from tests.children import server
from tests.processes import settled

pytestmark = pytest.mark.slow


@attrs.frozen
class Config:
    out: str
    steps: int = 4
    cluster: str = "local"
    lag: int = 0
    tokens: int = 4


def train(cfg: Config, env: Env) -> None:
    with nrl.run(cfg) as run, nrl.cluster(cfg.cluster, deadline=60) as cluster:
        slots = cluster.reserve(2)
        trainer = fsdp.trainer(slots[:1].mesh(executable="system"), tiny.model(), adamw(lr=1e-3))
        sampling = Sampling(max_new_tokens=cfg.tokens, stop_token_ids=())
        sampler = hf.sampler(slots[1:].mesh(executable="system"), tiny.model(), sampling)
        groups = nrl.rollouts(sampler, env, data.tasks("arithmetic"), n=4)
        state, stream = run.restore(policy=trainer, stream=nrl.ahead(nrl.batched(groups, 2), cfg.lag))
        nrl.publish(state.params, sampler)
        step = trainer.train_step(grpo_loss)
        for i, batch in run.steps(stream):
            batch = nrl.assign(advantages(batch), old_logprobs=batch["rollout_logprobs"])
            state, metrics = step(state, batch)
            nrl.publish(state.params, sampler)
            run.log(i, metrics, nrl.summary(batch))
            run.save(i, policy=state, stream=stream)
        trainer.export(state.params, run.out / "model")


def main(name: str, folder: str, cfg: Config) -> None:
    for descriptor, file in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{file}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    train(cfg, ENVS[name]())


def some(rest: Callable[[], Any]) -> Callable[[Any, Trace], float]:
    """A verifier that does this in every eighth call or so, and else its work."""
    count = 0

    def verifier(task: Any, trace: Trace) -> float:
        nonlocal count
        count += 1
        if count % 8 == 3:
            rest()
        return float(len(trace.text) % 2)

    return verifier


def throughout(task: Any, trace: Trace) -> float:
    raise LookupError("the table of answers is not there")


async def exits(task: Any, trace: Trace) -> float:
    if task["answer"][-1] in "02468":
        sys.exit()
    return 1.0


async def cancels(task: Any, trace: Trace) -> float:
    raise asyncio.CancelledError


ENVS: dict[str, Callable[[], Env]] = {
    "sleeps": lambda: single_turn(some(lambda: time.sleep(10**6)), timeout=1.0),
    "waits": lambda: single_turn(some(threading.Event().wait), timeout=1.0),
    "exits": lambda: single_turn(some(sys.exit)),
    "exits, async": lambda: single_turn(exits),
    "fails": lambda: single_turn(throughout),
    "cancels": lambda: single_turn(cancels),
    "works": lambda: single_turn(exact),
}


def start(name: str, folder: Path, **settings: Any) -> Any:
    child = server().Process(target=main, args=(name, str(folder), Config(str(folder / "run"), **settings)))
    child.start()
    return child


def invalid(folder: Path) -> list[float]:
    return [json.loads(line)["invalid"] for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


CLUSTERS = ["local", pytest.param("ray", marks=pytest.mark.ray)]


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("name", ["sleeps", "exits"])
def test_rows_fail_and_the_run_comes_to_its_end(tmp_path: Path, name: str, cluster: str, lag: int) -> None:
    child = start(name, tmp_path, cluster=cluster, lag=lag)
    child.join(200)
    err = (tmp_path / "err").read_text()
    assert child.exitcode == 0, err
    assert invalid(tmp_path) == [1.0] * 4
    assert (tmp_path / "run/model/model.safetensors").exists()
    assert ("TimeoutError: verifier did not return within 1 s" if name == "sleeps" else "SystemExit: ") in err


def test_coroutines_that_exit_fail_their_rows_alone(tmp_path: Path) -> None:
    child = start("exits, async", tmp_path)
    child.join(200)
    assert child.exitcode == 0, (tmp_path / "err").read_text()
    assert 0 < sum(invalid(tmp_path)) < 32


@pytest.mark.parametrize("name", ["fails", "cancels"])
def test_a_verifier_that_fails_throughout_ends_the_run(tmp_path: Path, name: str) -> None:
    child = start(name, tmp_path)
    child.join(200)
    err = (tmp_path / "err").read_text()
    assert child.exitcode == 1
    assert "rollouts: all rows of 3 rollouts in a row failed, 24 of them, so there is nothing to learn from" in err
    assert len(invalid(tmp_path)) == 2
    assert not (tmp_path / "run/model").exists()
    if name == "fails":
        assert err.count('raise LookupError("the table of answers is not there")') == 1


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("lag", [0, 1])
def test_an_interrupt_in_a_rollout_is_one_and_comes_at_once(tmp_path: Path, cluster: str, lag: int) -> None:
    child = start("works", tmp_path, cluster=cluster, lag=lag, tokens=4000, steps=1000)
    settled(lambda: child.is_alive() and not (tmp_path / "run/metrics.jsonl").exists(), 200)
    time.sleep(1.0)
    began = time.monotonic()
    os.kill(child.pid, signal.SIGINT)
    child.join(60)
    took = time.monotonic() - began
    err = (tmp_path / "err").read_text()
    assert child.exitcode == 1, err
    assert took < 15
    assert err.rstrip().endswith("KeyboardInterrupt"), err
    assert (err.count("Traceback"), err.count("InvalidState")) == (1, 0), err
