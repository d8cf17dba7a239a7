"""Policies that say what they are told, and agents of OpenAI's own client."""

from collections.abc import Callable, Sequence
from typing import Any

import openai
import torch

import nrl
from nrl.backends import Completion, Sampling
from nrl.envs.tools import ToolCall
from nrl.gym.endpoint.agent_env import Endpoint
from tests.chat_tokenizers import tokenizer as chat_tokenizer
from tests.envs.tool_texts import written

ENDS = {"qwen2_5": "<|im_end|>", "qwen3": "<|im_end|>", "llama3_1": "<|eot_id|>", "mistral_v13": "</s>"}
ENDS |= {"deepseekv3": "<｜end▁of▁sentence｜>", "qwen3_training": "<|im_end|>"}
WRITER = {"llama3_1": "llama3, bare", "mistral_v13": "mistral, named", "deepseekv3": "deepseek, V3"}


class Says:
    """A policy that answers each request with the next of its texts, whose special tokens are read."""

    def __init__(self, template: str, texts: Sequence[str], context_length: int = 4096) -> None:
        self.tokenizer, self.texts, self.asked = chat_tokenizer(template), list(texts), list[list[int]]()
        self.sampled = list[Sampling | None]()
        self.version, self.context_length, self.sampling = 1, context_length, Sampling()

    def generate(self, prompts: Any, *, seeds: Any = None, sampling: Any = None) -> Any:
        self.asked += prompts
        self.sampled.append(sampling)
        ids = [self.tokenizer.encode(self.texts.pop(0), add_special_tokens=False) for _ in prompts]
        logprobs = [-torch.arange(1.0, len(each) + 1) / 8 for each in ids]
        found = [Completion(torch.tensor(x), y, False, 1) for x, y in zip(ids, logprobs, strict=True)]
        return nrl.runtime.done(found)

    def receive(self, buckets: Any, version: int, *, inflight: Any = "wait") -> None:
        raise AssertionError("nothing is published")


def turn(template: str, text: str, *calls: tuple[str, dict[str, Any]]) -> str:
    """A turn as a model of this template writes it."""
    made = [ToolCall(name, arguments) for name, arguments in calls]
    thought = "\n</think>\n\n" if template == "deepseekv3" else ""  # which its prompts open
    return thought + written(WRITER.get(template, "hermes"), text, made).whole + ENDS[template]


def played(policy: Any, agent: Callable[..., Any], *, n: int = 1, **how: Any) -> Any:
    return nrl.rollout(policy, nrl.driven(agent, **how), [{"prompt": "Hi"}], n=n)


def asks(agent: Callable[[openai.AsyncOpenAI], Any]) -> Callable[..., Any]:
    """What `nrl.driven` takes, of a function of OpenAI's own client, which is told the address and the key alone."""

    async def start(task: Any, endpoint: Endpoint) -> Any:
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            return await agent(client)

    return start


def turns_of(policy: Any, batch: Any, row: int = 0) -> list[str]:
    """What was sampled for a row, by turn."""
    found = list[str]()
    for number in range(int(batch["turns"][row].max()) + 1):
        at = batch["turns"][row] == number
        found += [policy.tokenizer.decode(batch["input_ids"][row][at])] if at.any() else []
    return found
