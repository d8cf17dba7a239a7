"""Reasoning and answer of sampled turns, over the chat templates of models that reason."""

import asyncio
import json
import warnings
from typing import Any

import attrs
import pytest
import torch

from nrl.backends import Completion, Sampling
from nrl.batch.metrics import finalize
from nrl.envs import exact, judged, number, single_turn
from nrl.envs.tools import tool, tool_use
from nrl.envs.types import Trace
from nrl.rollout import rollout, run_episode
from nrl.rollout.episode import Episode
from nrl.rollout.evaluate import Graded, grade
from nrl.rollout.rescore import regrade
from nrl.rollout.summaries import summary
from tests.chat_tokenizers import tokenizer
from tests.rollout.scripted import Scripted

CHAT = [{"role": "user", "content": "Hi"}]


def play(template: str, replies: list[str], env: Any, prompt: Any = CHAT) -> Episode:
    """Play an episode in which the policy writes these replies."""
    words, left = tokenizer(template), list(replies)

    async def generate(tokens: list[int]) -> Completion:
        ids = words.encode(left.pop(0), add_special_tokens=False)
        return Completion(torch.tensor(ids), -torch.ones(len(ids)), truncated=not left, version=1)

    task = {"prompt": prompt, "answer": "4"}
    return asyncio.run(run_episode(generate, env, task, tokenizer=words, context_length=4096))


@pytest.mark.parametrize(
    ("template", "reply", "answer", "ended"),
    [
        ("qwen3", "<think>\nHmm 5\n</think>\n\n4<|im_end|>", "4", True),
        ("qwen3", "<think>\nHmm 4", "", False),
        ("qwen3", "4<|im_end|>", "4", True),
        ("qwen3_5_think", "Hmm 5\n</think>\n\n4<|im_end|>", "4", True),
        ("qwen3_5_think", "Hmm 4", "", False),  # its prompt opened <think>
        ("deepseekv3", "<think>Hmm 5</think>4<｜end▁of▁sentence｜>", "4", True),
        ("glm4moe", "<think>Hmm 5</think>\n4", "4", True),
        ("mistral_v13", "[THINK]Hmm 5[/THINK]4</s>", "4", True),
        ("gptoss", "<|channel|>analysis<|message|>Hmm 5<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>",
         "4", True),
        ("gptoss", "<|channel|>analysis<|message|>Hmm 4", "", False),
        ("llama3", "4<|eot_id|>", "4", True),
    ],
)  # fmt: skip
def test_answers_are_told_from_reasoning_by_the_template(template: str, reply: str, answer: str, ended: bool) -> None:
    trace = (episode := play(template, [reply], single_turn(exact))).trace
    assert (trace.answer, trace.reasoning_ended) == (answer, ended)
    assert trace.reasoning == ("" if "Hmm" not in reply else "Hmm 5" if ended else "Hmm 4")
    assert episode.reward == float(answer == "4")


def test_a_text_prompt_may_open_reasoning() -> None:
    episode = play("llama3", ["Hmm 4"], single_turn(exact), prompt="Hi <think>\n")
    assert (episode.trace.answer, episode.trace.reasoning, episode.reward) == ("", "Hmm 4", 0.0)


def test_the_last_turn_of_an_episode_with_tools_has_the_answer() -> None:
    def find(word: str) -> str:
        """Find a word."""
        return "5"

    def verify(task: Any, trace: Trace) -> float:
        return exact(task, trace)

    call = '<tool_call>\n{"name": "find", "arguments": {"word": "Hi"}}\n</tool_call>'
    replies = [f"<think>\n4\n</think>\n\n{call}<|im_end|>", "<think>\nHmm 5\n</think>\n\n4<|im_end|>"]
    episode = play("qwen3", replies, tool_use([tool(find)], verify))
    assert (episode.trace.answer, episode.trace.reasoning, episode.reward) == ("4", "Hmm 5", 1.0)
    episode = play("qwen3", [replies[0], "<think>\n4"], tool_use([tool(find)], verify))
    assert (episode.trace.answer, episode.trace.reasoning_ended, episode.reward) == ("", False, 0.0)


def cut_in_reasoning(count: int, n: int) -> Any:
    """Roll out answers, of which so many are cut within reasoning that the prompt opened."""
    sampler = Scripted(["Hmm 4"] * count + ["Hmm</think>4"] * (n - count))
    sampler.sampling = Sampling(max_new_tokens=16)
    return rollout(sampler, single_turn(exact), [{"prompt": "2+2=<think>", "answer": "4"}], n=n)


def test_answers_that_end_within_reasoning_are_counted_and_said() -> None:
    with pytest.warns(UserWarning, match=r"raise sampling\.max_new_tokens, which is 16, or the context"):
        batch = cut_in_reasoning(4, 4)
    assert batch["reasoning_ended"].tolist() == [False] * 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = cut_in_reasoning(3, 4)
        assert "unfinished_reasoning" not in finalize(summary(cut_in_reasoning(0, 4)))
    assert finalize(summary(batch))["unfinished_reasoning"] == 0.75
    assert batch["rewards"].tolist() == [0.0, 0.0, 0.0, 1.0]


def test_reasoning_is_known_when_samples_are_judged_again() -> None:
    texts = ["4", "Hmm</think>4", "4", "4"]
    for env in (number, single_turn(number), judged(single_turn(lambda task, trace: 0.0), number)):
        (graded,) = grade(Scripted(list(texts)), env, [{"prompt": "2+2=<think>", "answer": "4"}], n=4)
        stored = Graded(**json.loads(json.dumps(attrs.asdict(graded))))
        (again,) = regrade([number], [{"prompt": "2+2=<think>", "answer": "4"}], [stored])
        assert graded.rewards == again.rewards == [0.0, 1.0, 0.0, 0.0]
        assert again.answers == [None, "4", None, None]
