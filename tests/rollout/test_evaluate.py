"""Samples that are drawn and verified, and the numbers that are made of them."""

import json
import math
import warnings
from typing import Any

import attrs
import pytest
import torch

import nrl
from nrl import tiny
from nrl.backends import Completion, Sampling, hf
from nrl.batch.metrics import Mean, finalize, merge
from nrl.envs import Environment, Step, Trace, exact, judged, number, single_turn, weighted
from nrl.errors import DataError, EnvError
from nrl.rollout.evaluate import Graded, grade, measure
from nrl.runtime import Slots
from nrl.runtime.mesh.futures import Future, done
from tests.rollout import test_conversations as chats
from tests.rollout.scripted import Scripted as Sure

TOKENIZER = tiny.tokenizer()


class Scripted:
    """A sampler that answers what it was told, by prompt and place; the least that `nrl.backends.Sampler` asks for."""

    version, tokenizer, context_length, sampling = 0, TOKENIZER, 64, Sampling(max_new_tokens=8)

    def __init__(self, said: dict[str, list[str]]) -> None:
        self.left = {prompt: list(texts) for prompt, texts in said.items()}

    def generate(self, prompts: Any, *, seeds: Any = None, sampling: Any = None) -> Future[list[Completion]]:
        texts = [self.left[TOKENIZER.decode(prompt)].pop(0) for prompt in prompts]
        ids = [[*TOKENIZER.encode(text), TOKENIZER.eos_token_id] for text in texts]
        # Log-probabilities of exactly 0: a policy that is certain
        return done([Completion(torch.tensor(each), torch.zeros(len(each)), len(each) > 8, 0) for each in ids])

    def receive(self, buckets: Any, version: int, *, inflight: Any = "wait") -> None:
        raise NotImplementedError


TASKS: list[dict[str, Any]] = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": 4}]
SAID = {"1+1=": ["2", "it is 2.0", "3", "no idea"], "2+2=": ["4", "5", "5.0", "so 5"]}


def test_what_is_graded() -> None:
    first, second = grade(Scripted(SAID), number, TASKS, n=4)
    assert first == Graded(
        "1+1=",
        "2",
        ["2", "it is 2.0", "3", "no idea"],
        [1.0, 1.0, 0.0, 0.0],
        ["2", "2", "3", None],
        [2, 10, 2, 8],
        [False, True, False, False],
    )
    assert (second.answer, second.rewards, second.answers) == (4, [1.0, 0.0, 0.0, 0.0], ["4", "5", "5", "5"])


def test_a_graded_task_survives_json() -> None:
    graded = grade(Scripted(SAID), number, TASKS, n=4)
    assert [Graded(**json.loads(json.dumps(attrs.asdict(each)))) for each in graded] == graded


def test_what_is_measured_by_hand() -> None:
    found = finalize(measure(grade(Scripted(SAID), number, TASKS, n=4), k=(1, 2, 4)))
    assert found == {
        "eval/reward": 3 / 8,
        "eval/pass@1": pytest.approx((2 / 4 + 1 / 4) / 2),
        "eval/pass@2": pytest.approx((5 / 6 + 1 / 2) / 2),
        "eval/pass@4": 1.0,
        "eval/majority": 1 / 2,  # 2 of three votes; 5 of four
        "eval/unanswered": 1 / 8,
        "eval/length": pytest.approx((2 + 10 + 2 + 8 + 2 + 2 + 4 + 5) / 8),
        "eval/truncated": 1 / 8,
        "eval/invalid": 0.0,
    }


def failing(task: Any, trace: Trace) -> float:
    if "?" in trace.text:
        raise EnvError("the judge is away")
    return float(trace.text == task["answer"])


def test_samples_whose_verifier_failed_are_kept_left_out_and_counted() -> None:
    said = {"1+1=": ["2", "2?", "3", "?"], "2+2=": ["?", "?", "?", "?"]}
    with pytest.warns(UserWarning, match="6 of 8 episodes failed"):
        graded = grade(Scripted(said), failing, TASKS, n=4)
    assert graded[0].samples == ["2", "2?", "3", "?"]  # also what the verifier could not look at
    assert graded[0].rewards == [1.0, None, 0.0, None]
    assert graded[0].answers is None
    metrics = measure(graded, k=(1, 2, 3))
    assert [float(metrics[f"eval/pass@{k}"].weight) for k in (1, 2, 3)] == [1, 1, 0]  # type: ignore[union-attr]
    found = finalize(metrics)
    assert (found["eval/reward"], found["eval/pass@1"], found["eval/pass@2"]) == (0.5, 0.5, 1.0)
    assert math.isnan(found["eval/pass@3"])
    assert found["eval/invalid"] == 6
    assert "eval/majority" not in found  # there is nothing to vote by


def test_a_group_with_no_valid_sample_has_no_vote() -> None:
    graded = [
        Graded("a", "1", ["1", "1"], [1.0, 1.0], ["1", "1"], [1, 1], [False, False]),
        Graded("b", "1", ["1", "1"], [None, None], ["1", "1"], [1, 1], [False, False]),
    ]
    majority = measure(graded)["eval/majority"]
    assert isinstance(majority, Mean)
    assert (float(majority.total), float(majority.weight)) == (1.0, 1.0)


def test_a_prompt_that_cannot_be_asked_is_invalid() -> None:
    tasks = [*TASKS[:1], {"prompt": "1" * 70, "answer": "1"}, {"answer": "1"}]
    with pytest.warns(UserWarning, match="2 of 3 episodes failed"):
        graded = grade(Scripted({"1+1=": ["2"]}), number, tasks)
    assert [each.rewards for each in graded] == [[1.0], [None], [None]]
    assert [each.samples for each in graded] == [["2"], [""], [""]]
    assert [each.lengths for each in graded] == [[2], [0], [0]]


def test_several_rewards_are_added_up_and_passing_is_a_bound() -> None:
    graded = grade(Scripted(SAID), lambda task, trace: (0.25, 0.5 * exact(task, trace)), TASKS, n=4)
    assert graded[0].rewards == [0.75, 0.25, 0.25, 0.25]
    assert finalize(measure(graded, k=(1,)))["eval/pass@1"] == 0.0
    found = finalize(measure(graded, k=(1,), passing=0.75))
    assert (found["eval/pass@1"], found["eval/reward"]) == (0.25, 0.375)


def test_the_measures_of_parts_add_up_to_those_of_the_whole() -> None:
    graded = grade(Scripted(SAID), number, TASKS, n=4)
    whole, parts = measure(graded, k=(2,)), merge(measure(graded[:1], k=(2,)), measure(graded[1:], k=(2,)))
    assert finalize(parts) == pytest.approx(finalize(whole))


def test_one_sample_a_task_has_no_majority() -> None:
    graded = grade(Scripted({"1+1=": ["2"]}), number, TASKS[:1])
    assert list(measure(graded)) == ["eval/reward", "eval/length", "eval/truncated", "eval/invalid"]


@pytest.mark.parametrize("k", [0, -1, 5])
def test_a_k_that_cannot_be_estimated_is_refused(k: int) -> None:
    graded = grade(Scripted(SAID), number, TASKS, n=4)
    with pytest.raises(DataError, match=f"measure: k is {k}, and there are 4 samples a task; give k from 1 to 4"):
        measure(graded, k=(2, k))


@pytest.fixture(scope="module")
def sampler(slots: Slots) -> Any:
    return hf.sampler(slots[:1], tiny.model(), Sampling(max_new_tokens=4))


def digit(task: Any, trace: Trace) -> float:
    return float(any(map(str.isdigit, trace.text)))


def test_its_reward_is_that_of_a_rollout(sampler: Any) -> None:
    tasks = nrl.data.tasks("arithmetic").take(16)
    rollout = nrl.rollout(sampler, single_turn(digit), tasks, n=2, seed=3)
    found = finalize(measure(grade(sampler, digit, tasks, n=2, seed=3)))
    expected = finalize(nrl.summary(rollout))
    assert 0 < found["eval/reward"] < 1
    assert found["eval/reward"] == expected["reward"]
    assert (found["eval/length"], found["eval/truncated"]) == (expected["length"], expected["truncated"])


def test_a_sample_depends_on_its_task_and_place_and_not_on_what_it_is_drawn_with(sampler: Any) -> None:
    tasks = nrl.data.tasks("arithmetic").take(6)
    whole = grade(sampler, digit, tasks, n=3, seed=1)
    parts = grade(sampler, digit, tasks[:4], n=3, seed=1) + grade(sampler, digit, tasks[4:], n=3, seed=1, first_group=4)
    assert parts == whole
    assert grade(sampler, digit, tasks, n=3, seed=2) != whole


def test_the_texts_are_those_that_the_verifier_saw(sampler: Any) -> None:
    seen = []

    def seeing(task: Any, trace: Trace) -> float:
        seen.append(trace.text)
        return 0.0

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graded = grade(sampler, seeing, nrl.data.tasks("arithmetic").take(4), n=2)
    assert sorted(seen) == sorted(text for each in graded for text in each.samples)


# --- environments


def adding(task: Any) -> Any:
    return (int(task["prompt"]), 3), task["prompt"] + "+"


def sums(state: Any, turn: str) -> Step:
    """The sum so far; it ends at 5 or more, or after three turns, and refuses what is no number."""
    total, left = state
    reward = {"far": 1.0} if "far" in turn else {"sum": int(turn) / 4}
    total += 9 if "far" in turn else int(turn)
    info = {"total": total} if left < 3 else {}
    return Step((total, left - 1), reward, total >= 5 or left == 1, f"={total}+", info)


SUMS = Environment(adding, sums)


def test_an_environment_is_played_by_hand() -> None:
    # Episode for episode, all first turns before all second ones
    sampler = Sure(["2", "9", "far", "1", "3", "1", "1"])
    first, second = grade(sampler, SUMS, [{"prompt": "1", "answer": "5"}, {"prompt": "2"}], n=2)
    assert (first.prompt, first.answer, second.prompt, second.answer) == ("1", "5", "2", None)
    assert (first.samples, second.samples) == (["3", "9"], ["far", "1"])
    assert (first.rewards, second.rewards) == ([1.25, 2.25], [1.0, 0.75])
    assert first.answers is None
    assert (first.lengths, second.lengths) == ([4, 2], [4, 6])  # each turn has a token that ends it
    assert (first.turns, second.turns) == ([2, 1], [1, 3])
    assert first.statuses == second.statuses == ["ok", "ok"]
    assert first.numbers == {"env/total": [6.0, None], "reward/far": [None, None], "reward/sum": [1.25, 2.25]}
    assert second.numbers == {"env/total": [None, 5.0], "reward/far": [1.0, None], "reward/sum": [None, 0.75]}
    assert first.conversations is not None
    assert first.conversations[0] == [
        {"role": "prompt", "tokens": [0, 2], "text": "1+"},
        {"role": "policy", "tokens": [2, 4], "text": "2<eos>", "reward": 0.5, "components": {"sum": 0.5}},
        {"role": "environment", "tokens": [4, 7], "text": "=3+"},
        {"role": "policy", "tokens": [7, 9], "text": "3<eos>", "reward": 0.75, "components": {"sum": 0.75}},
    ]
    found = finalize(measure([first, second], k=(1, 2)))
    assert found == {
        "eval/reward": (1.25 + 2.25 + 1.0 + 0.75) / 4,
        "eval/pass@1": 3 / 4,
        "eval/pass@2": 1.0,
        "eval/env/total": 5.5,  # of the two that say
        "eval/reward/far": 1.0,
        "eval/reward/sum": (1.25 + 2.25 + 0.75) / 3,
        "eval/turns": 7 / 4,
        "eval/length": 4.0,
        "eval/truncated": 0.0,
        **{f"eval/status/{name}": 0.0 for name in ("parse_fail", "timeout", "infra_error", "skipped")},
        "eval/invalid": 0.0,
    }


def test_an_environment_that_fails_at_a_later_turn_keeps_what_was_said() -> None:
    with pytest.warns(UserWarning, match="1 of 2 episodes failed"):
        (graded,) = grade(Sure(["2", "3", "no", "4"]), SUMS, [{"prompt": "1"}], n=2)
    assert (graded.samples, graded.rewards, graded.turns) == (["no", "4"], [None, 1.75], [2, 2])
    assert graded.statuses == ["infra_error", "ok"]
    assert graded.conversations is not None
    assert [part.get("reward", "") for part in graded.conversations[0]] == ["", None, "", None]
    found = finalize(measure([graded]))
    assert (found["eval/invalid"], found["eval/status/infra_error"], found["eval/turns"]) == (1, 1, 2)
    assert found["eval/reward"] == found["eval/reward/sum"] == 1.75


def test_an_episode_that_forked_is_one_sample() -> None:
    def verify(task: Any, trace: Trace) -> dict[str, float]:
        return {"hmm": float("Hmm" in trace.turns[0].text), "two": 1.0}

    sampler = chats.Chatty("qwen3", [chats.HMM, "Hello<|im_end|>", chats.BYE, "Bye<|im_end|>"])
    (graded,) = grade(sampler, judged(chats.two_turns(), verify), [{}], n=2)
    assert graded.rewards == [2.0, 1.0]
    assert graded.samples == [chats.BYE.removesuffix("<|im_end|>"), "Bye"]
    assert graded.turns == [2, 2]
    assert graded.numbers == {"reward/hmm": [1.0, 0.0], "reward/two": [1.0, 1.0]}
    count = [len(sampler.tokenizer.encode(text)) for text in (chats.HMM, chats.BYE, "Hello<|im_end|>", "Bye<|im_end|>")]
    assert graded.lengths == [count[0] + count[1], count[2] + count[3]]
    forked, whole = graded.conversations or ()
    assert [part["role"] for part in forked] == ["prompt", "policy"] * 2
    assert [part["role"] for part in whole] == ["prompt", "policy", "environment", "policy"]
    assert [part["text"] for part in forked[1::2]] == [chats.HMM, chats.BYE]
    assert forked[1]["reasoning"] == "Hmm"
    assert forked[2]["messages"][2:] == [{"role": "assistant", "content": "Hello"}, *chats.MORE]
    assert finalize(measure([graded], k=(2,)))["eval/reward"] == 1.5


def test_what_was_played_survives_json() -> None:
    graded = grade(Sure(["2", "9", "3"]), SUMS, [{"prompt": "1"}], n=2)
    assert [Graded(**json.loads(json.dumps(attrs.asdict(each), allow_nan=False))) for each in graded] == graded


def test_the_parts_of_what_was_played_add_up() -> None:
    tasks = [{"prompt": "1"}, {"prompt": "2"}]
    one, two = grade(Sure(["2", "9", "far", "1", "3", "1", "1"]), SUMS, tasks, n=2)
    assert finalize(merge(measure([one]), measure([two]))) == pytest.approx(finalize(measure([one, two])))


def test_components_of_a_verifier_are_measured() -> None:
    verify = weighted(right=(1.0, number), one=(0.5, lambda task, trace: 1.0))
    graded = grade(Scripted(SAID), verify, TASKS, n=4)
    assert graded[0].numbers == {"reward/one": [1.0] * 4, "reward/right": [1.0, 1.0, 0.0, 0.0]}
    found = finalize(measure(graded))
    assert (found["eval/reward"], found["eval/reward/right"], found["eval/reward/one"]) == (3 / 8 + 0.5, 3 / 8, 1.0)
    assert "eval/turns" not in found


def test_a_module_or_an_object_may_be_an_environment() -> None:
    class Sums:
        reset, step = staticmethod(adding), staticmethod(sums)

    assert grade(Sure(["4"]), Sums(), [{"prompt": "1"}])[0].rewards == [1.0]


def test_what_is_no_verifier_is_refused() -> None:
    with pytest.raises(EnvError, match=r"grade: timeout is 3, and an environment has its own; leave it out, and make"):
        grade(Sure([]), SUMS, TASKS, timeout=3)
    with pytest.raises(EnvError, match=r"grade: the verifier is 'number'; give a function of a task and a trace, or"):
        grade(Sure([]), "number", TASKS)  # type: ignore[arg-type]
