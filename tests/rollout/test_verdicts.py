"""What verifiers and environments say at the end of an episode, and that each state is given back once."""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

import nrl
from nrl.algos import k1, kl, token_rewards
from nrl.envs import STATUSES, Environment, Score, Step, Trace, judged, of_group, single_turn
from nrl.envs.inprocess.threads import stuck
from nrl.errors import GenerationError
from nrl.rollout import rollout
from nrl.rollout.episode import run_episode
from tests.processes import settled
from tests.rollout.scripted import TASKS, Scripted

pytestmark = pytest.mark.timeout(120)

TEXTS = ["3", "4", "19", "20"]  # two answers to each task


def by_status(task: Mapping[str, Any], trace: Trace) -> Any:
    status: Any = {"3": "parse_fail", "4": "timeout", "19": "skipped", "20": "ok"}[trace.text]
    return Score(2.0, status)


def test_only_verdicts_that_were_found_are_trained_on() -> None:
    with pytest.warns(UserWarning, match=r"2 of 4 episodes failed .* the verdict's status is 'timeout'"):
        batch = rollout(Scripted(TEXTS), single_turn(by_status), TASKS, n=2)
    assert [STATUSES[each] for each in batch["status"]] == ["parse_fail", "timeout", "skipped", "ok"]
    assert batch["valid"].tolist() == [True, False, False, True]
    assert batch["loss_mask"].any(-1).tolist() == [True, False, False, True]
    torch.testing.assert_close(batch["rewards"], torch.tensor([2.0, torch.nan, torch.nan, 2.0]), equal_nan=True)


@pytest.mark.parametrize(
    ("fail", "status"),
    [(lambda: 1 / 0, "infra_error"), (lambda: time.sleep(0.6), "timeout")],
    ids=["raises", "is late"],
)
def test_a_failure_has_a_status(fail: Callable[[], Any], status: str) -> None:
    with pytest.warns(UserWarning, match="1 of 1 episodes failed"):
        batch = rollout(Scripted(["3"]), single_turn(lambda task, trace: fail(), timeout=0.2), TASKS[:1])
    assert STATUSES[batch["status"][0]] == status
    assert settled(stuck, 60) == 0  # other tests count threads


def test_a_status_that_does_not_exist_is_an_error() -> None:
    wrong: Any = Score(1.0, "fine")  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="the status is 'fine'; give one of ok, parse_fail, timeout, infra_error"):
        rollout(Scripted(["3"]), single_turn(lambda task, trace: wrong), TASKS[:1])


def test_components_add_up_and_are_reported() -> None:
    def verify(task: Any, trace: Trace) -> Any:
        if trace.text == "20":
            return 0.0
        return {"right": float(trace.text == task["answer"]), "length": len(trace.text) / 4}

    batch = rollout(Scripted(TEXTS), single_turn(verify), TASKS, n=2)
    right = [float(text == task["answer"]) for text, task in zip(TEXTS, [TASKS[0]] * 2 + [TASKS[1]] * 2, strict=True)]
    assert batch["reward/right"][:3].tolist() == right[:3]
    assert batch["reward/length"][:3].tolist() == [0.25, 0.25, 0.5]
    assert batch["reward/right"][3].isnan()
    assert batch["rewards"].tolist() == [right[0] + 0.25, right[1] + 0.25, right[2] + 0.5, 0.0]
    found = nrl.finalize(nrl.summary(batch))
    assert found["reward/right"] == pytest.approx(sum(right[:3]) / 3)
    assert found["reward/length"] == pytest.approx(1 / 3)


def two_turns(rewards: Sequence[float] = (0.5, 1.0)) -> Environment:
    return Environment(
        lambda task: (0, task["prompt"]),
        lambda state, turn: Step(state + 1, rewards[state], done=state == 1, observation="12"),
    )


def test_the_reward_of_a_turn_lies_at_its_last_token() -> None:
    batch = rollout(Scripted(["34", "5"]), two_turns(), TASKS[:1])
    sampled = torch.nonzero(batch["loss_mask"][0])[:, 0].tolist()
    assert len(sampled) == 5  # with the tokens that end turns
    expected = torch.zeros_like(batch["token_rewards"])
    expected[0, sampled[2]], expected[0, sampled[4]] = 0.5, 1.0
    torch.testing.assert_close(batch["token_rewards"], expected)
    assert batch["token_rewards"].sum(-1).tolist() == batch["rewards"].tolist() == [1.5]


def test_rewards_that_were_shaped_are_earned_at_the_end() -> None:
    batch = rollout(Scripted(["34", "5"]), two_turns(), TASKS[:1])
    turns, last = batch["token_rewards"], int(torch.nonzero(batch["loss_mask"][0])[-1])
    torch.testing.assert_close(token_rewards(batch)["token_rewards"], turns)
    shaped = token_rewards(nrl.assign(batch, rewards=batch["rewards"] - 0.25))["token_rewards"]
    torch.testing.assert_close(shaped - turns, -0.25 * torch.eye(turns.shape[1])[last][None])
    batch = nrl.assign(batch, ref_logprobs=torch.zeros_like(turns))
    penalty = batch["rollout_logprobs"] * batch["loss_mask"]
    torch.testing.assert_close(token_rewards(batch, kl(k1, 0.5))["token_rewards"], turns - 0.5 * penalty)


def test_several_rewards_have_no_place() -> None:
    batch = rollout(Scripted(["3"]), single_turn(lambda task, trace: (1.0, 2.0)), TASKS[:1])
    assert "token_rewards" not in batch.keys()


def test_a_verifier_sees_all_turns_also_where_a_limit_ended_the_episode() -> None:
    seen: list[Trace] = []

    def verify(task: Any, trace: Trace) -> float:
        seen.append(trace)
        return float(len(trace.turns))

    more = Step(None, 0.5, done=False, observation="1" * 20)
    endless = Environment(lambda task: (None, "1"), lambda state, _: more)
    tokenizer = Scripted([]).tokenizer
    env = judged(endless, verify)

    async def generate(tokens: list[int]) -> nrl.backends.types.Completion:
        return nrl.backends.types.Completion(torch.tensor(tokenizer.encode("7")), torch.zeros(1), False, 0)

    episode = asyncio.run(run_episode(generate, env, {}, tokenizer=tokenizer, context_length=50))
    (trace,) = seen
    assert trace.truncated
    assert (trace.prompt, trace.text, len(trace.turns), len(trace.observations)) == ("1", "7", 3, 3)
    assert episode.reward == 3 * 0.5 + 3
    assert len(episode.token_ids) == 50
    assert tuple(tokenizer.decode(trace.token_ids)) == tuple("1" + ("7" + "1" * 20) * 3)
    assert sum(trace.sampled) == 3


# --- a group


def test_a_verifier_of_a_group_sees_all_its_answers() -> None:
    @of_group
    def longest(task: Any, traces: Sequence[Trace]) -> list[float]:
        return [float(len(x.text) == max(len(y.text) for y in traces)) for x in traces]

    async def later(task: Any, traces: Sequence[Trace]) -> list[float]:
        return longest(task, traces)  # type: ignore[arg-type,return-value]

    for env in (single_turn(longest), single_turn(of_group(later)), judged(two_turns((0.0, 0.0)), longest)):
        batch = rollout(Scripted(["3", "44", "19", "2"] * 2), env, TASKS, n=2)
        assert batch["rewards"].tolist() in ([0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("verdicts", "why"),
    [(lambda traces: [1.0], "gave 1 verdicts for 2 episodes"), (lambda traces: 1 / 0, "ZeroDivisionError")],
)
def test_a_verifier_of_a_group_that_fails_fails_its_group(verdicts: Any, why: str) -> None:
    def verify(task: Any, traces: Sequence[Trace]) -> Any:
        return verdicts(traces) if task["answer"] == TASKS[0]["answer"] else [1.0] * len(traces)

    with pytest.warns(UserWarning, match=why):
        batch = rollout(Scripted(TEXTS), single_turn(of_group(verify)), TASKS, n=2)
    assert batch["valid"].tolist() == [False, False, True, True]


# --- seeds


def test_a_group_has_one_seed_that_every_run_gives_it() -> None:
    seen: list[int] = []

    def reset(task: Mapping[str, Any]) -> tuple[Any, str]:
        seen.append(task["seed"])
        return task, "1"

    env = Environment(reset, lambda state, turn: Step(state))
    for seed in (0, 0, 1):
        rollout(Scripted(TEXTS), env, TASKS, n=2, seed=seed, first_group=3)
    first, again, other = (sorted(seen[at : at + 4]) for at in (0, 4, 8))
    assert first == again
    assert len(set(first)) == 2
    assert first[0] == first[1]
    assert not set(first) & set(other)
    seen.clear()
    rollout(Scripted(["1"]), env, [{"seed": 7}])
    assert seen == [7]


# --- states are given back


class Counted:
    """Hands out numbers and takes them back."""

    def __init__(self, fails: str = "", later: bool = False) -> None:
        self.fails, self.out, self.back = fails, list[Any](), list[Any]()
        if later:
            plain = self.close

            async def close(state: Any) -> None:
                await asyncio.sleep(0)
                plain(state)

            self.close = close  # type: ignore[method-assign,assignment]

    def reset(self, task: Any) -> tuple[Any, Any]:
        if self.fails == "reset":
            raise OSError("away")
        number = len(self.out)
        self.out.append(number)
        if self.fails == "late reset":
            time.sleep(0.6)
        return [number, 0], [10**6] if self.fails == "prompt" else "1"

    def step(self, state: Any, turn: Any) -> Step:
        if self.fails == "step":
            raise OSError("away")
        if self.fails == "late step":
            time.sleep(0.6)
        return Step([state[0], state[1] + 1], done=state[1] == 1, observation="1")

    def close(self, state: Any) -> None:
        self.back.append(state)
        if self.fails == "close":
            raise OSError("away")

    @property
    def timeout(self) -> float:
        return 0.2 if "late" in self.fails else 60


@pytest.mark.parametrize("later", [False, True], ids=["plain", "async"])
@pytest.mark.parametrize("fails", ["", "reset", "late reset", "prompt", "step", "late step", "close"])
def test_each_state_is_closed_once(fails: str, later: bool) -> None:
    env = Counted(fails, later)
    if fails:
        with pytest.warns(UserWarning, match="close failed" if fails == "close" else "4 of 4 episodes failed"):
            batch = rollout(Scripted(TEXTS * 2), env, TASKS, n=2)
    else:
        batch = rollout(Scripted(TEXTS * 2), env, TASKS, n=2)
    until = time.monotonic() + 60
    while len(env.back) < len(env.out) and time.monotonic() < until:
        time.sleep(0.01)
    assert sorted(state[0] for state in env.back) == env.out
    assert len(env.out) == (0 if fails == "reset" else 4)
    assert batch["valid"].all() == (fails in ("", "close"))
    assert fails or [state[1] for state in env.back] == [2] * 4  # the last one
    assert settled(stuck, 60) == 0


def test_states_are_closed_when_the_sampler_fails() -> None:
    env, sampler = Counted(), Scripted(TEXTS)
    with pytest.raises(GenerationError, match="generate: the sampler gave 0 answers to 4 prompts"):  # each asks twice
        rollout(sampler, env, TASKS, n=2)
    assert sorted(state[0] for state in env.back) == env.out == [0, 1, 2, 3]


def test_states_are_closed_after_an_interrupt() -> None:
    env = Counted()
    inside = threading.Event()

    def step(state: Any, turn: Any) -> Step:
        if inside.is_set():
            time.sleep(0.1)
        inside.set()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rollout(Scripted(TEXTS), Environment(env.reset, step, env.close), TASKS, n=2)
    assert sorted(state[0] for state in env.back) == env.out
