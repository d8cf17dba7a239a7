"""Environments and verifiers that declare how many rewards an episode has, by ``num_rewards``."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch

import nrl
from nrl.batch import Batch
from nrl.data import tasks as task_stream
from nrl.envs import Environment, Step, Verifier, gated, judged, limited, linear, of_group, single_turn
from nrl.envs.rubric import by_source
from nrl.envs.types import declared_rewards
from nrl.errors import ArgumentError
from tests.rollout.scripted import Scripted


def declaring(num_rewards: Any, verdicts: Sequence[Any] = ()) -> Verifier:
    """A verifier that gives the verdict whose place the task has; one that is an exception is raised."""

    def verify(task: Any, trace: Any) -> Any:
        verdict = verdicts[task["at"]]
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    verify.num_rewards = num_rewards  # type: ignore[attr-defined]
    return verify


def first_batch(num_rewards: int | None, verdicts: Sequence[Any]) -> Batch:
    """The first batch of a stream, which has one row for each verdict."""
    env, rows = single_turn(declaring(num_rewards, verdicts)), [{"prompt": "1", "at": i} for i in range(len(verdicts))]
    groups = nrl.rollouts(Scripted(["3"] * len(rows)), env, task_stream(rows, shuffle=False, chat=False), n=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about the rows that fail
        (batch,) = nrl.batched(groups, len(rows)).take(1)
    return batch


BROKEN = ValueError("no verdict")


@pytest.mark.parametrize(
    ("declared", "verdicts", "rewards"),
    [
        (2, [(1.0, 2.0), 0.5, 0.25], [(1.0, 2.0), None, None]),  # fewer rows have as many, and are right
        (2, [BROKEN, BROKEN, (1.0, 2.0)], [None, None, (1.0, 2.0)]),
        (2, [(1.0, 2.0, 3.0), BROKEN], [None, None]),
        (3, [BROKEN, (1.0,), 7.0], [None, None, None]),
        (2, [0.0, (1.0, 2.0), 0], [(0.0, 0.0), (1.0, 2.0), (0.0, 0.0)]),  # 0 adds nothing to several
        (1, [(1.0,), 1.0], [(1.0,), None]),
        (0, [(1.0, 2.0), (1.0, 2.0), 0.5], [None, None, 0.5]),
        (0, [(0.0, 0.0), BROKEN], [None, None]),
        (None, [(1.0, 2.0), 0.5, 0.25], [None, 0.5, 0.25]),  # most rows decide
    ],
)
@pytest.mark.parametrize("order", [1, -1])
def test_the_first_batch_has_as_many_rewards_as_are_declared(
    declared: int | None, verdicts: list[Any], rewards: list[Any], order: int
) -> None:
    batch = first_batch(declared, verdicts[::order])
    assert batch["rewards"].shape == ((len(rewards), declared) if declared else (len(rewards),))
    for reward, expected, valid in zip(batch["rewards"], rewards[::order], batch["valid"], strict=True):
        assert bool(valid) is (expected is not None)
        assert bool(reward.isnan().all()) if expected is None else torch.equal(reward, torch.tensor(expected))


def test_a_row_with_another_number_says_what_is_declared() -> None:
    for declared, verdict, told in (
        (2, 0.5, r"the reward is 0.5, and the environment declares num_rewards=2; return 2 rewards, or change"),
        (0, (1.0, 2.0), r"the reward is \(1.0, 2.0\), and .* declares num_rewards=0; return one number, or change"),
    ):
        with pytest.warns(UserWarning, match=told):
            nrl.rollout(Scripted(["3"]), single_turn(declaring(declared, [verdict])), [{"prompt": "1", "at": 0}])


def test_an_episode_that_ended_before_its_rewards_has_zeros() -> None:
    """At its limit of turns; where they are not declared, most rows decide, and it fails."""

    def step(state: int, turn: str) -> Step:
        return Step(state + 1, (1.0, 0.5) if turn == "3" else 0.0, done=turn == "3", observation="2")

    env = limited(Environment(lambda task: (0, "1"), step, num_rewards=2), turns=1)
    batch = nrl.rollout(Scripted(["3", "4"]), env, [{}, {}])
    assert sorted(batch["rewards"].tolist()) == [[0.0, 0.0], [1.0, 0.5]]


PLAIN = Environment(lambda task: (0, "1"), lambda state, turn: Step(state, (1.0, 0.5)), num_rewards=2)
TWO = declaring(2, [(1.0, 0.5)])
WRAPPED: dict[str, Callable[[], Any]] = {
    "single_turn": lambda: single_turn(TWO),
    "single_turn of a group": lambda: single_turn(of_group(cast(Any, TWO))),
    "gated": lambda: single_turn(gated(lambda task, trace: 1.0, TWO)),
    "judged": lambda: judged(Environment(PLAIN.reset, PLAIN.step), TWO),
    "judged, declared by the environment": lambda: judged(PLAIN, lambda task, trace: 0.0),
    "limited": lambda: limited(PLAIN, turns=3),
    "linear": lambda: linear(PLAIN),
    "by_source": lambda: by_source(single_turn(lambda task, trace: 1.0), PLAIN),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_what_is_put_together_declares_as_many(name: str) -> None:
    assert declared_rewards(WRAPPED[name]()) == 2


@pytest.mark.parametrize("part", [PLAIN, TWO, single_turn(TWO)], ids=["environment", "verifier", "single_turn"])
def test_another_place_declares_as_many(part: Any) -> None:
    with nrl.cluster("local") as cluster, nrl.serve(part) as server:
        for elsewhere in (nrl.pooled(part, workers=1), nrl.on(cluster.reserve(1).mesh(name="judges"))(part)):
            assert declared_rewards(elsewhere) == 2
        assert declared_rewards(nrl.remote(server)) == 2


def test_nothing_that_is_undeclared_is_declared_elsewhere() -> None:
    with nrl.serve(lambda task, trace: 1.0) as server:
        assert declared_rewards(nrl.remote(server)) is None


def test_environments_of_a_mixture_that_declare_different_numbers_are_refused() -> None:
    one = single_turn(declaring(0))
    with pytest.raises(ArgumentError, match=r"num_rewards: 2 \(environment 0\), 0 \(environment 2\)"):
        by_source(PLAIN, single_turn(lambda task, trace: 1.0), one)


@pytest.mark.parametrize("wrong", [-1, 2.0, True, "2", (1,)])
def test_a_number_that_is_none_is_refused(wrong: Any) -> None:
    env = Environment(PLAIN.reset, PLAIN.step, num_rewards=wrong)
    sampler, rows = Scripted(["3"]), [{"prompt": "1"}]
    for begin in (
        lambda: nrl.rollout(sampler, env, rows),
        lambda: nrl.rollouts(sampler, env, task_stream(rows), n=1),
        lambda: limited(env, turns=1),
    ):
        with pytest.raises(ArgumentError, match="num_rewards is"):
            begin()
