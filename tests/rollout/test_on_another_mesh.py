"""Verifiers and environments that run on another mesh: `Mesh.submit` inside of a rollout.

Deadlines bound the calls. The environment's timeout would count the seconds in which a helper starts.
"""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from nrl.envs import Environment, Step, Trace, Turn, gated, product, single_turn, weighted
from nrl.rollout import rollout
from nrl.runtime import Mesh, process
from tests.rollout.scripted import TASKS, Scripted

TEXTS = ["3", "4", "19", "20"]  # two answers to each task


def right(task: Mapping[str, Any], trace: Trace) -> float:
    assert process().mesh == "judges"  # it runs there
    return float(trace.text == task["answer"])


def test_a_verifier_runs_on_another_mesh(judges: Mesh) -> None:
    async def verify(task: Any, trace: Trace) -> float:
        return await judges.submit(right, task, trace, deadline=60)

    def plain(task: Any, trace: Trace) -> Any:
        return judges.submit(right, task, trace)

    for verifier in (verify, plain):
        batch = rollout(Scripted(TEXTS), single_turn(verifier, timeout=None), TASKS, n=2)
        assert batch["rewards"].tolist() == [1.0, 0.0, 1.0, 0.0]
        assert batch["valid"].all()


def advanced(state: tuple[int, int], turn: str) -> Step:
    assert process().mesh == "judges"
    total, left = state[0] + int(turn), state[1] - 1
    return Step((total, left), float(total), done=not left, observation="+", info={"total": float(total)})


def test_a_step_runs_on_another_mesh(judges: Mesh) -> None:
    async def reset(task: Any) -> Any:
        return await judges.submit(lambda task: ((0, 2), task["prompt"]), task)

    def step(state: Any, turn: Turn) -> Any:
        return judges.submit(advanced, state, turn)

    batch = rollout(Scripted(["3", "4", "5", "6"]), Environment(reset, step, timeout=None), TASKS)
    assert batch["rewards"].tolist() == [3.0 + 8.0, 4.0 + 10.0]
    assert [x.tolist() for x in batch["info", "total"].unbind()] == [[3.0, 8.0], [4.0, 10.0]]
    assert batch["valid"].all()


def until(path: str) -> float:
    end = time.monotonic() + 60
    while not Path(path).exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    return 1.0


def test_verifiers_put_together_run_on_another_mesh(judges: Mesh) -> None:
    """Plain functions that return what can be awaited."""

    def there(task: Any, trace: Trace) -> Any:
        return judges.submit(right, task, trace)

    for verify in (
        weighted(right=(1.0, there)),
        product(right=there, one=lambda task, trace: 1.0),
        gated(there, there),
    ):
        batch = rollout(Scripted(TEXTS), single_turn(verify, timeout=None), TASKS, n=2)
        assert batch["rewards"].tolist() == [1.0, 0.0, 1.0, 0.0]


def test_a_slow_verifier_delays_no_other(judges: Mesh, tmp_path: Path) -> None:
    """The first row's ends only when those of all others have: of its own group, and of the next one."""
    over: list[str] = []

    async def verify(task: Any, trace: Trace) -> float:
        if trace.text == "3":
            reward = await judges.submit(until, str(tmp_path / "gate"))
        else:
            reward = await judges.submit(right, task, trace)
        over.append(trace.text)
        if len(over) == 3:
            (tmp_path / "gate").touch()
        return reward

    batch = rollout(Scripted(TEXTS), single_turn(verify, timeout=None), TASKS, n=2)
    assert over[-1] == "3"
    assert batch["rewards"].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert batch["valid"].all()


def failing(judges: Mesh, bad: Callable[..., Any], deadline: float | None = None, timeout: float | None = None) -> str:
    """The failure of the first row, whose verifier does that; the other rows have their rewards."""

    async def verify(task: Any, trace: Trace) -> float:
        fn, seconds = (bad, deadline) if trace.text == "3" else (right, None)
        return await judges.submit(fn, task, trace, rank=int(trace.text != "3"), deadline=seconds)

    with pytest.warns(UserWarning, match="rollout: 1 of 4 episodes failed") as warned:
        batch = rollout(Scripted(TEXTS), single_turn(verify, timeout=timeout), TASKS, n=2)
    assert batch["valid"].tolist() == [False, True, True, True]
    assert batch["rewards"].isnan().tolist() == [True, False, False, False]
    assert batch["rewards"][1:].tolist() == [0.0, 1.0, 0.0]
    assert not batch["loss_mask"][0].any()
    assert judges.submit(right, {"answer": "1"}, Trace("", ["1"]), rank=0).result() == 1.0  # the mesh goes on
    return str(warned[0].message)


def test_a_verifier_that_is_late_fails_its_row(judges: Mesh, tmp_path: Path) -> None:
    def stays(task: Any, trace: Trace) -> float:
        return until(str(tmp_path / "gate"))

    try:
        said = failing(judges, stays, 0.5)
        assert "the first: DeadlineExceeded: submit(stays): rank 0 of mesh 'judges' did not return within 0.5 s" in said
        if not judges.cluster.remote:
            said = failing(judges, stays, 50, timeout=0.5)
            assert "the first: TimeoutError: verify did not return within 0.5 s" in said
    finally:
        (tmp_path / "gate").touch()


def test_a_verifier_that_raises_fails_its_row(judges: Mesh) -> None:
    def raises(task: Any, trace: Trace) -> float:
        raise LookupError("no such answer")

    assert "the first: LookupError: no such answer" in failing(judges, raises)


@pytest.mark.ray
def test_a_verifier_that_dies_fails_its_row(request: pytest.FixtureRequest) -> None:
    def dies(task: Any, trace: Trace) -> float:
        os._exit(1)

    judges = request.getfixturevalue("on_ray").reserve(2).mesh(executable="system", name="judges")
    said = failing(judges, dies)
    assert "the first: LostActor: submit(dies): rank 0 of mesh 'judges' on node" in said
