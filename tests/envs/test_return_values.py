"""What user code returns has one verdict, row by row, wherever it runs; the others of its batch go on."""

import asyncio
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

import nrl
from nrl import tiny
from nrl.algos import advantages, from_rewards, per_group
from nrl.backends import Completion
from nrl.batch import Batch
from nrl.batch.ragged import rows_of
from nrl.data import counting
from nrl.data import tasks as task_stream
from nrl.data.encoding import encode
from nrl.envs import Environment, Step, judged, limited, linear, of_group, score_of, single_turn
from nrl.envs.policy_inputs import read_observation, read_prompt
from nrl.envs.return_values import verdicts_of
from nrl.envs.rubric import by_source
from nrl.envs.tools import ToolCall, call, tool
from nrl.errors import BatchError, ColumnError, DataError, EnvError, NotFinite
from tests.envs.returned import EVERYTHING, GROUPS, OBSERVATIONS, PROMPTS, VERDICTS, WAYS, Case, compared
from tests.rollout.scripted import TASKS, Scripted

Transform = Callable[[Any], Any]


def valid(env: Any, asked: list[dict[str, Any]], n: int = 1) -> list[bool]:
    sampler = Scripted(["3"] * 10_000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the rows that fail
        batch = nrl.rollout(sampler, env, asked, n=n)
    assert not batch["loss_mask"][~batch["valid"]].any()
    assert batch["rewards"][~batch["valid"]].isnan().all()
    assert batch["rewards"][batch["valid"]].isfinite().all()
    return [bool(row) for row in batch["valid"]]


@pytest.fixture(
    scope="module",
    params=["here", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("on threads", "pooled", "served"))],
)
def place(request: pytest.FixtureRequest) -> Iterator[Transform]:
    if request.param == "here":
        yield lambda f: f
    elif request.param == "on threads":
        with nrl.cluster("local") as cluster:
            yield nrl.on(cluster.reserve(2).mesh(name="judges"))
    elif request.param == "pooled":
        yield lambda f: nrl.pooled(f, workers=2)
    else:
        with ExitStack() as servers:
            yield lambda f: nrl.remote(servers.enter_context(nrl.serve(f)))


def wrong(cases: list[Case], found: list[bool]) -> list[str]:
    return [case.name for case, good in zip(cases, found, strict=True) if case.good != good]


def test_each_row_has_its_own_verdict_in_every_place(place: Transform) -> None:
    asked = [{"way": way, "case": number} for way, cases in WAYS.items() for number in range(len(cases))]
    every = [case._replace(name=f"{way}: {case.name}") for way, cases in WAYS.items() for case in cases]
    assert wrong(every, valid(place(EVERYTHING), asked)) == []


def test_verdicts_of_a_group_are_one_for_each_in_every_place(place: Transform) -> None:
    asked = [{"prompt": "1+1=", "case": number} for number in range(len(GROUPS))]
    found = valid(single_turn(place(compared)), asked, n=2)
    assert wrong(GROUPS, found[::2]) == wrong(GROUPS, found[1::2]) == []


def test_what_wraps_an_environment_changes_no_verdict() -> None:
    env = judged(limited(linear(by_source(EVERYTHING)), turns=3), _one)
    ways = ("reset", "step", "info", "done")
    asked = [{"way": way, "case": number, "source": 0} for way in ways for number in range(len(WAYS[way]))]
    assert wrong([case for way in ways for case in WAYS[way]], valid(env, asked)) == []


def _one(task: Any, trace: Any) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("read", "cases"),
    [
        (lambda value: read_observation(value, 100), OBSERVATIONS),
        (lambda value: read_prompt(value, 100), PROMPTS),
        (score_of, VERDICTS),
        (lambda value: verdicts_of(value, 2), GROUPS),
    ],
)
def test_an_error_is_short_and_says_what_to_return(read: Any, cases: list[Case]) -> None:
    elsewhere = ("surrogate", "turn that was not", "empty text", "no ids", "skipped", "failed")  # found by others
    for case in cases:
        if case.good or case.name in elsewhere:
            continue
        with pytest.raises(EnvError) as caught:
            read(case.make())
        text = str(caught.value)
        assert len(text) < 700, (case.name, text)
        assert any(word in text for word in ("return", "give", "encode", "largest")), (case.name, text)


# --- the number of rewards, and the names of components


@pytest.mark.parametrize("order", [1, -1])
def test_most_rows_decide_how_many_rewards_there_are(order: int) -> None:
    rewards: list[Any] = [(1.0, 0.0), 1.0, 0.5, 0.25][::order]
    env = single_turn(lambda task, trace: rewards[task["at"]])
    with pytest.warns(UserWarning, match=r"the reward is \(1.0, 0.0\), and other episodes have one number"):
        batch = nrl.rollout(Scripted(["3"] * 4), env, [{"prompt": "1", "at": at} for at in range(4)])
    assert batch["valid"].tolist() == [False, True, True, True][::order]
    assert batch["rewards"].shape == (4,)


def test_where_no_number_of_rewards_is_the_most_frequent_all_rows_fail() -> None:
    env = single_turn(lambda task, trace: (1.0, 2.0) if task["answer"] == "3" else 1.0)
    assert valid(env, TASKS) == valid(env, TASKS[::-1]) == [False, False]


def test_a_stream_keeps_its_number_of_rewards() -> None:
    """Also where a draw fails whole, or would have another number by itself."""

    def verifier(task: Any, trace: Any) -> Any:
        return [(1.0, 2.0), (3.0, 4.0), None, 5.0, (6.0, 7.0)][task["at"]]

    stream = nrl.rollouts(
        Scripted(["3"] * 5),
        single_turn(verifier),
        task_stream([{"prompt": "1", "at": at} for at in range(5)], shuffle=False, chat=False),
        n=1,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        whole = nrl.concatenate([*stream.take(2), *stream.take(1), *stream.take(1), *stream.take(1)])
    assert whole["valid"].tolist() == [True, True, False, False, True]
    assert whole["rewards"].shape == (5, 2)


@pytest.mark.parametrize("order", [1, -1])
def test_a_component_that_only_some_rows_have_is_nan_in_the_others(order: int) -> None:
    verdicts: list[Any] = [{"a": 1.0}, {"a": 1.0, "b": 2.0}, 0.5][::order]
    env = single_turn(lambda task, trace: verdicts[task["at"]])
    stream = nrl.rollouts(
        Scripted(["3"] * 3),
        env,
        task_stream([{"prompt": "1", "at": at} for at in range(3)], shuffle=False, chat=False),
        n=1,
    )
    together = nrl.concatenate([group for _ in range(3) for group in stream.take(1)])
    assert together["reward/a"].nan_to_num(-1).tolist() == [1.0, 1.0, -1.0][::order]
    assert together["reward/b"].nan_to_num(-1).tolist() == [-1.0, 2.0, -1.0][::order]
    assert [row.nan_to_num(-1).tolist() for row in rows_of(together["components", "b"])] == [[-1], [2], [-1]][::order]


def test_rewards_of_turns_are_as_many_or_none() -> None:
    def played(*rewards: Any) -> Any:
        env = Environment(
            lambda task: (0, "1"), lambda at, turn: Step(at + 1, rewards[at], at + 1 == len(rewards), "2")
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            batch = nrl.rollout(Scripted(["3"] * 4), env, [{}])
        return batch["rewards"][0].tolist() if batch["valid"][0] else None

    assert played(0.0, (1.0, 2.0)) == played((1.0, 2.0), 0.0) == [1.0, 2.0]
    assert played((1.0, 2.0), [3, 4]) == [4.0, 6.0]
    assert played((1.0, 2.0), (1.0,)) is played((1.0, 2.0), 1.0) is played(1.0, (1.0, 2.0)) is None


def test_one_wrong_verdict_of_a_group_fails_its_row_alone() -> None:
    verify = of_group(lambda task, traces: [1.0, "right", {}, 0.0])
    assert valid(single_turn(verify), TASKS[:1], n=4) == [True, False, False, True]


# --- other functions of the user


def test_a_timeout_or_of_group_that_fails_for_a_task_fails_its_rows() -> None:
    def timeout(task: Any) -> Any:
        return {"3": 5.0, "19": "soon"}[task["answer"]]

    def verify(task: Any, trace: Any) -> float:
        return 1.0

    verify.of_group = lambda task: {"3": False}[task["answer"]]  # type: ignore[attr-defined]
    play = Environment(lambda task: (0, "1"), lambda state, turn: Step(state))
    assert valid(play._replace(timeout=timeout), TASKS) == [True, False]
    assert valid(play._replace(verifier=verify), TASKS) == [True, False]


@pytest.mark.parametrize(
    ("logprobs", "ids"),
    [
        (torch.tensor([-1.0, math.nan]), None),
        (torch.tensor([-1.0, math.inf]), None),
        (torch.tensor([-1.0, -math.inf]), None),
        (torch.tensor([-1.0, 7.5]), None),
        (torch.tensor([-1.0]), None),
        (torch.tensor([[-1.0, -1.0]]), None),
        (torch.tensor([-1, -1]), None),
        ([-1.0, -1.0], None),
        (None, None),
        (None, torch.tensor([-4, 2])),
        (None, torch.tensor([4.0, 2.0])),
        (None, [4, 2]),
    ],
)
def test_an_answer_of_a_sampler_that_cannot_be_trained_on_fails_its_row(logprobs: Any, ids: Any) -> None:
    class Faulty(Scripted):
        def generate(self, prompts: Any, *, seeds: Any = None, sampling: Any = None) -> Any:
            first, *others = super().generate(prompts).result()
            if ids is not None:
                first = first._replace(token_ids=ids)
            if logprobs is not None or ids is None:
                first = first._replace(logprobs=logprobs)
            return nrl.runtime.done([first, *others])

    with pytest.warns(UserWarning, match="LostRequest: generate: the sampler's answer has"):
        batch = nrl.rollout(Faulty(["3", "4"]), single_turn(_one), TASKS)
    assert batch["valid"].tolist() == [False, True]
    assert batch["rollout_logprobs"].isfinite().all()
    assert isinstance(Completion, type)


@pytest.mark.parametrize(
    "value",
    [
        *(None, 1.0, [1.0, 2.0], "ab", np.ones(2), torch.ones(3), torch.ones(2, 1), torch.ones(()), torch.ones(2) * 1j),
        *(torch.tensor([math.nan, 0.0]), torch.tensor([0.0, math.inf])),
    ],
)
def test_what_a_function_of_rewards_returns_is_checked(value: Any) -> None:
    columns = {"rewards": torch.tensor([1.0, 0.0]), "group_ids": torch.tensor([0, 0])}
    batch = Batch({**columns, "loss_mask": torch.ones(2, 2, dtype=torch.bool)}, batch_size=[2])
    bad = isinstance(value, torch.Tensor) and value.shape == (2,) and not value.is_complex()
    for fn in (per_group(lambda rewards: value), lambda rewards, groups: value):
        with pytest.raises(NotFinite if bad else BatchError, match="the function got 2 rewards"):
            advantages(batch, from_rewards(fn))
    with pytest.raises(ColumnError):
        advantages(batch, lambda batch: value)


def test_advantages_are_finite_where_they_are_trained_on() -> None:
    mask = torch.tensor([[False, True], [True, True]])
    batch = Batch({"loss_mask": mask, "valid": torch.tensor([True, False])}, batch_size=[2])
    known = torch.tensor([[math.nan, 1.0], [math.inf, math.nan]])
    assert advantages(batch, lambda batch: known)["advantages"][0, 1] == 1.0
    with pytest.raises(NotFinite, match="returned nan for row 0, token 1"):
        advantages(batch, lambda batch: known.flip(-1))


@pytest.mark.parametrize("value", [None, 1, "False", [True], torch.tensor([True, False]), torch.tensor(1.0)])
def test_a_predicate_returns_a_truth_value(value: Any) -> None:
    def group(index: int) -> Batch:
        return Batch({"input_ids": torch.zeros(1, 2, dtype=torch.int64)}, batch_size=[1])

    with pytest.raises(DataError, match=r"filtered: .* returned .*; return True or False"):
        nrl.filtered(counting(group), lambda group: value).take(1)


@pytest.mark.parametrize("value", [True, np.bool_(True), torch.tensor(True)])
def test_a_predicate_may_return_any_boolean(value: Any) -> None:
    def group(index: int) -> Batch:
        return Batch({"input_ids": torch.zeros(1, 2, dtype=torch.int64)}, batch_size=[1])

    assert len(nrl.filtered(counting(group), lambda group: value).take(1)) == 1


@pytest.mark.parametrize("value", [None, "1+1=", [("prompt", "1")], 5])
def test_generated_tasks_are_mappings(value: Any) -> None:
    with pytest.raises(DataError, match="return a mapping for each"):
        task_stream(lambda seed, number: value).take(1)


@pytest.mark.parametrize(
    "value", [b"12", bytearray(b"1"), [b"12"], math.nan, {"a": math.inf}, lambda: (x for x in "ab"), len]
)
def test_a_result_of_a_tool_is_text_or_what_json_has(value: Any) -> None:
    def find() -> Any:
        """Find."""
        return value() if callable(value) and value is not len else value

    with pytest.raises(EnvError, match="call: find returned"):
        asyncio.run(call([tool(find)], [ToolCall("find", {})]))


# --- the size of what is read


class Counting:
    """A tokenizer that counts the characters that it encodes; everything else is the real one."""

    def __init__(self, tokenizer: Any) -> None:
        self.real, self.encoded = tokenizer, 0

    def encode(self, text: str, **options: Any) -> list[int]:
        self.encoded += len(text)
        return list(self.real.encode(text, **options))

    def __len__(self) -> int:
        return len(self.real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


SIZE, CONTEXT = 3_000_000, 256
LONG = "word and more " * (SIZE // 14)
USER = {"role": "user", "content": LONG}


@pytest.mark.parametrize(
    ("observation", "chat"),
    [
        (LONG, False),
        (LONG, True),
        ([5] * SIZE, False),
        (np.full(SIZE, 5), False),
        ([USER], True),
        ({"messages": [USER]}, True),
        ({"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "turn": 0}, USER]}, True),
    ],
    ids=["text", "text in a chat", "ids", "array", "messages", "another conversation", "the same conversation"],
)
def test_of_a_long_observation_no_more_is_encoded_than_fits(observation: Any, chat: bool) -> None:
    sampler = Scripted(["3"] * 4)
    counting: Any = Counting(tiny.bpe(["user assistant more 2 3"]))
    sampler.tokenizer, sampler.context_length = counting, CONTEXT
    prompt = [{"role": "user", "content": "1+1="}] if chat else "1+1="
    env = Environment(lambda task: (0, prompt), lambda at, turn: Step(at, 1.0, done=False, observation=observation))
    batch = nrl.rollout(sampler, env, [{}], n=2)
    assert batch["valid"].all()
    assert batch["truncated"].all()
    assert batch["input_ids"].shape[1] <= CONTEXT
    assert counting.encoded < 200 * CONTEXT


@pytest.mark.parametrize("prompt", [LONG, [USER], [5] * SIZE], ids=["text", "messages", "ids"])
def test_of_a_long_prompt_no_more_is_encoded_than_fits(prompt: Any) -> None:
    sampler = Scripted([])
    counting: Any = Counting(tiny.bpe(["user assistant more 2 3"]))
    sampler.tokenizer, sampler.context_length = counting, CONTEXT
    env = Environment(lambda task: (0, prompt), lambda at, turn: Step(at))
    with pytest.warns(
        UserWarning, match=f"the prompt has more than {CONTEXT} tokens and fills the context of {CONTEXT}"
    ):
        batch = nrl.rollout(sampler, env, [{}], n=2)
    assert not batch["valid"].any()
    assert [nrl.envs.STATUSES[status] for status in batch["status"]] == ["skipped"] * 2
    assert counting.encoded < 200 * CONTEXT


@pytest.mark.parametrize("text", [LONG[:9000], "a" * 9000, " " * 9000, "1+1=\n" * 1800, "é€😀" * 3000])
@pytest.mark.parametrize("tokenizer", [tiny.tokenizer(), tiny.bpe(["word and more"])], ids=["tiny", "bpe"])
def test_the_first_ids_of_a_text_are_those_of_all_of_it(tokenizer: Any, text: str) -> None:
    every = encode(text, tokenizer)
    for count in (1, 7, 256, len(every), len(every) + 1):
        assert encode(text, tokenizer, count) == every[:count]
