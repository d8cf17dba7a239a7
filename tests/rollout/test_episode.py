"""One episode: turns, rewards, and what makes it a failure."""

import asyncio
import itertools
import math
import pickle
from typing import Any

import pytest
import torch

import nrl
from nrl.backends import Completion, Sampling
from nrl.backends.sampling.pool import EnginePool
from nrl.batch.metrics import finalize
from nrl.batch.ragged import rows_of
from nrl.envs import Environment, Step, Turn, exact, single_turn
from nrl.envs.inprocess.call_with_timeout import Calls
from nrl.envs.inprocess.threads import UserCall
from nrl.rollout import rollout, run_episode
from nrl.rollout.summaries import summary
from tests.rollout.scripted import TASKS, Scripted


def test_turns_are_appended_and_observations_not_trained_on(sampler: EnginePool) -> None:
    turns: list[str] = []

    async def step(state: int, turn: Turn) -> Step:
        turns.append(turn)
        await asyncio.sleep(0)
        return Step(state + 1, reward=0.5, done=state == 2, observation="\nagain: ", info={"turns": state + 1})

    env = Environment(lambda task: (0, task["prompt"]), step)
    batch = rollout(sampler, env, TASKS[:1], n=2)
    assert batch["rewards"].tolist() == [1.5, 1.5]
    assert batch["env/turns"].tolist() == [3.0, 3.0]
    assert finalize(summary(batch))["env/turns"] == 3.0
    told = sampler.tokenizer.encode("\nagain: ")
    for ids, mask, real in zip(batch["input_ids"], batch["loss_mask"], batch["attention_mask"], strict=True):
        untrained = ids[real & ~mask].tolist()
        assert untrained == sampler.tokenizer.encode("1+2=") + told + told
    assert len(turns) == 6


def test_a_turn_knows_its_tokens_and_why_it_ended(sampler: EnginePool) -> None:
    tokenizer, seen = sampler.tokenizer, list[Turn]()
    stop = tokenizer.eos_token_id
    answers = [([20, stop], False), ([21, 22], True)]

    async def generate(tokens: list[int]) -> Completion:
        ids, truncated = answers[len(seen)]
        return Completion(torch.tensor(ids), -torch.ones(len(ids)), truncated, version=1)

    def step(state: None, turn: Turn) -> Step:
        seen.append(turn)
        return Step(None, done=len(seen) == 2, observation="\n")

    env = Environment(lambda task: (None, "1"), step)
    asyncio.run(run_episode(generate, env, {}, tokenizer=tokenizer, context_length=64))
    first, second = seen
    assert (first.text, first.token_ids, first.stop_reason) == (tokenizer.decode([20]), (20, stop), "stop")
    assert (second.text, second.token_ids, second.stop_reason) == (tokenizer.decode([21, 22]), (21, 22), "length")
    assert first == tokenizer.decode([20])  # it is a text, and no less of one
    again = pickle.loads(pickle.dumps(second))
    assert (type(again), again, again.token_ids, again.stop_reason) == (Turn, second, (21, 22), "length")
    assert type(again.text) is str


def test_the_numbers_of_every_step_are_kept(sampler: EnginePool) -> None:
    """Those of the first of three steps, of none, and of two."""

    def step(state: tuple[int, int], turn: Turn) -> Step:
        number, steps = state
        info: list[dict[str, float]] = [{"tried": 1.0, "first": 5.0}, {}, {"tried": number}]
        return Step((number, steps + 1), done=steps == number, observation="2", info=info[steps] if number else {})

    env = Environment(lambda task: ((task["turns"] - 1, 0), "1"), step)
    batch = rollout(sampler, env, [{"turns": 1}, {"turns": 3}])
    assert [row.nan_to_num(-1).tolist() for row in rows_of(batch["info", "tried"])] == [[-1], [1, -1, 2]]
    assert [row.nan_to_num(-1).tolist() for row in rows_of(batch["info", "first"])] == [[-1], [5, -1, -1]]
    assert batch["env/tried"].nan_to_num(-1).tolist() == [-1, 2]
    assert batch["env/first"].nan_to_num(-1).tolist() == [-1, 5]  # its last step was silent, and it is not forgotten
    assert [len(rows_of(part["info", "tried"])[0]) for part in nrl.shard(batch, 2)] == [3, 1]
    assert "info" not in rollout(sampler, single_turn(exact), TASKS).keys()


def test_later_turns_draw_fresh_noise(sampler: EnginePool) -> None:
    seen: list[list[int]] = []

    async def generate(tokens: list[int]) -> Any:
        [completion] = sampler.generate([tokens], seeds=[3], sampling=Sampling(max_new_tokens=1)).result()
        seen.append(completion.token_ids.tolist())
        return completion

    env = Environment(lambda task: (0, "1"), lambda state, _: Step(state + 1, done=state == 19, observation=[]))
    episode = asyncio.run(run_episode(generate, env, {}, tokenizer=sampler.tokenizer, context_length=64))
    assert episode.failure is None
    assert len(seen) == 20
    assert len({tuple(ids) for ids in seen}) > 5


def test_the_first_route_of_a_token_stays(sampler: EnginePool) -> None:
    """A later turn reads all tokens again, and the sampler may route them otherwise then."""
    turn = itertools.count(1)

    async def generate(tokens: list[int]) -> Completion:
        routes = torch.full((len(tokens) + 1, 2, 1), next(turn), dtype=torch.int16)
        return Completion(torch.tensor([20, 21]), -torch.ones(2), truncated=False, version=0, routes=routes)

    env = Environment(lambda task: (0, "123"), lambda state, _: Step(state + 1, done=state == 2, observation="45"))
    episode = asyncio.run(run_episode(generate, env, {}, tokenizer=sampler.tokenizer, context_length=64))
    assert len(episode.token_ids) == 13  # 123 ab 45 ab 45 ab
    assert episode.routes is not None
    assert episode.routes[:, 0, 0].tolist() == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    assert episode.routes.shape == (12, 2, 1)


def test_the_oldest_version_may_be_0(sampler: EnginePool) -> None:
    versions = iter([0, 3])

    async def generate(tokens: list[int]) -> Completion:
        return Completion(torch.tensor([20]), torch.tensor([-1.0]), truncated=False, version=next(versions))

    env = Environment(lambda task: (0, "1"), lambda state, _: Step(state + 1, done=state == 1, observation="2"))
    episode = asyncio.run(run_episode(generate, env, {}, tokenizer=sampler.tokenizer, context_length=64))
    assert episode.version == 0


def test_an_episode_ends_where_the_context_does(sampler: EnginePool) -> None:
    env = Environment(lambda task: (0, "1" * 500), lambda state, _: Step(state, 1.0, done=False, observation="22222"))
    batch = rollout(sampler, env, TASKS[:1])
    assert batch["truncated"].all()
    assert batch["valid"].all()
    assert batch["input_ids"].shape[1] <= sampler.context_length


def test_a_prompt_that_fills_the_context_is_counted(sampler: EnginePool) -> None:
    limit = sampler.context_length
    tasks = [{"prompt": "1" * limit, "answer": "1"}, {"prompt": "1" * (limit - 1), "answer": "1"}]
    with pytest.warns(UserWarning, match=f"1 of 2 .* the prompt has {limit} tokens and fills the context of {limit}"):
        batch = rollout(sampler, single_turn(exact), tasks)
    assert batch["valid"].tolist() == [False, True]
    assert batch["input_ids"].shape[1] == limit


def test_several_rewards(sampler: EnginePool) -> None:
    batch = rollout(sampler, single_turn(lambda task, trace: (1.0, 0.25)), TASKS)
    assert batch["rewards"].tolist() == [[1.0, 0.25]] * 2
    assert finalize(summary(batch))["reward"] == 1.25


# --- failures


@pytest.mark.parametrize("reward", [math.nan, math.inf, 1e39, (0.0, -1e39)])
def test_a_reward_that_is_no_number_makes_the_row_invalid(sampler: EnginePool, reward: Any) -> None:
    with pytest.warns(UserWarning, match="EnvError: the reward is"):
        batch = rollout(sampler, single_turn(lambda task, trace: reward), TASKS)
    assert not batch["valid"].any()


def test_the_largest_rewards_of_float32_count(sampler: EnginePool) -> None:
    batch = rollout(sampler, single_turn(lambda task, trace: 3.4e38), TASKS)
    assert batch["rewards"].tolist() == pytest.approx([3.4e38] * 2)
    twice = Environment(lambda task: (0, "1"), lambda state, _: Step(1, 3e38, done=state == 1, observation="2"))
    with pytest.warns(
        UserWarning, match=r"the reward is 6e\+38; rewards are float32, whose largest number is 3.4e\+38"
    ):
        assert not rollout(sampler, twice, TASKS)["valid"].any()


@pytest.mark.parametrize("error", [SystemExit(), asyncio.CancelledError(), GeneratorExit()])
@pytest.mark.parametrize("part", ["reset", "step"])
def test_whatever_an_environment_raises_is_its_rows_failure(
    sampler: EnginePool, error: BaseException, part: str
) -> None:
    def reset(task: Any) -> Any:
        if part == "reset" and task["answer"] == "3":
            raise error
        return task, task["prompt"]

    def step(state: Any, action: str) -> Step:
        if part == "step" and state["answer"] == "3":
            raise error
        return Step(state, 1.0)

    with pytest.warns(UserWarning, match=f"2 of 4 episodes failed .* the first: {type(error).__name__}: "):
        batch = rollout(sampler, Environment(reset, step), TASKS, n=2)
    assert batch["valid"].tolist() == [False, False, True, True]


def test_a_step_without_observation_is_a_failure(sampler: EnginePool) -> None:
    env = Environment(lambda task: (0, "1"), lambda state, _: Step(state, done=False))
    with pytest.warns(UserWarning, match="not done, and it has no observation"):
        assert not rollout(sampler, env, TASKS[:1])["valid"].any()


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (
            Step(None, 1.0, info={"note": "x"}),  # type: ignore[dict-item]
            "the step's info has 'note': 'x'; give numbers alone",
        ),
        (1.0, "step returned float; return a Step"),
        (
            Step(None, done=False, observation=[{"role": "user", "content": "x"}]),
            "observation is messages, and the episode is no chat",
        ),
    ],
)
def test_a_step_that_is_malformed_makes_the_row_invalid(sampler: EnginePool, step: Any, said: str) -> None:
    env = Environment(lambda task: (0, task["prompt"]), lambda state, action: step)
    with pytest.warns(UserWarning, match=said):
        assert not rollout(sampler, env, TASKS)["valid"].any()


def test_a_task_without_prompt_makes_the_row_invalid(sampler: EnginePool) -> None:
    with pytest.warns(UserWarning, match="no 'prompt'"):
        batch = rollout(sampler, single_turn(exact), [{"answer": "3"}, TASKS[1]])
    assert batch["valid"].tolist() == [False, True]
    assert batch["attention_mask"][0].sum() == 0


def test_what_the_sampler_raises_is_no_failure_of_the_environment() -> None:
    class Broken(Scripted):
        def generate(self, prompts: Any, *, seeds: Any = None, sampling: Any = None) -> Any:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        rollout(Broken([]), single_turn(exact), TASKS)


@pytest.mark.parametrize(("kind", "state"), [(tuple, 1), (Step, 2)])
def test_a_state_that_comes_in_the_moment_of_a_cancel_is_closed(
    sampler: EnginePool, monkeypatch: pytest.MonkeyPatch, kind: type, state: int
) -> None:
    """asyncio forgets the value of a future that was set when its task is cancelled before it goes on."""
    closed: list[int] = []
    env = Environment(lambda task: (1, "1"), lambda state, turn: Step(state + 1, observation="\n"), closed.append)
    answer = Calls._answer

    async def generate(tokens: list[int]) -> Completion:
        return Completion(torch.tensor([20]), -torch.ones(1), False, version=1)

    async def every() -> None:
        limits = {"tokenizer": sampler.tokenizer, "context_length": 64}
        playing = asyncio.ensure_future(run_episode(generate, env, {}, **limits))

        def answer_and_cancel(calls: Calls, call: UserCall) -> None:
            answer(calls, call)
            if isinstance(call.value, kind):
                playing.cancel()

        monkeypatch.setattr(Calls, "_answer", answer_and_cancel)
        with pytest.raises(asyncio.CancelledError):
            await playing

    asyncio.run(every())
    assert closed == [state]
