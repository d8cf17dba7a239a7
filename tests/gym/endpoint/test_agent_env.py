"""Episodes that an agent drives: what it asks is what the policy sees, and what the policy said is trained on."""

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from typing import Any

import openai
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nrl
from nrl import tiny
from nrl.backends import Sampling, fsdp, hf
from nrl.envs import Trace, Turn
from nrl.envs.limits import limited
from nrl.envs.tools import ToolCall
from nrl.gym.endpoint import chat_completions, responses
from nrl.gym.endpoint.agent_env import Endpoint
from nrl.gym.endpoint.chat_request import as_request
from nrl.gym.endpoint.endpoint_app import _read
from nrl.gym.endpoint.fields import Unusable
from nrl.gym.endpoint.sessions import Session
from nrl.rollout.bridges import FORKS
from tests.gym.endpoint.driving import ENDS, Says, asks, played, turn, turns_of

KEYS = st.sampled_from(
    [
        *("messages", "input", "role", "content", "type", "text", "tools", "tool_calls", "tool_call_id", "function"),
        *("name", "arguments", "n", "stream", "stream_options", "stop", "temperature", "max_tokens", "logprobs"),
        *("tool_choice", "include", "instructions", "previous_response_id", "call_id", "output", "summary", "id"),
        *("reasoning_content", "return_token_ids", "metadata"),
    ]
)
SCHEMA: dict[str, Any] = {
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
ADD: Any = {"type": "function", "function": SCHEMA}
CALLS = (("add", {"a": 2, "b": 3}), ("add", {"a": 4, "b": 5}))


@pytest.mark.parametrize("template", ENDS)
@pytest.mark.parametrize("api", ["chat", "responses", "chat, streamed"])
def test_what_comes_back_as_it_was_forks_nothing(template: str, api: str) -> None:
    """Text and several calls, whose results come in another order, by both APIs, under five families' templates."""
    calls = CALLS[: 1 if template == "llama3_1" else 2]  # Llama's template takes one
    text = "" if template in ("llama3_1", "mistral_v13") else "One moment."  # which write no text beside calls
    said = [turn(template, text, *calls), turn(template, "It is 5 ."), turn(template, "Bye")]
    policy, seen = Says(template, said), list[Any]()

    @asks
    async def chat(client: openai.AsyncOpenAI) -> float:
        messages = list[Any]([{"role": "user", "content": "2+3="}])
        for _ in range(3):
            asked: Any = {"model": "policy", "messages": messages, "tools": [ADD]}
            if "streamed" in api:
                async with client.chat.completions.stream(**asked) as stream:
                    answer: Any = await stream.get_final_completion()
            else:
                answer = await client.chat.completions.create(**asked)
            message = answer.choices[0].message
            seen.append((answer.choices[0].finish_reason, message.content))
            messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            for call in reversed(message.tool_calls or []):
                result = json.loads(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result["a"] + result["b"])})
            if not message.tool_calls:
                messages.append({"role": "user", "content": "Thanks"})
        return 1.0

    @asks
    async def responses(client: openai.AsyncOpenAI) -> float:
        items = list[Any]([{"role": "user", "content": "2+3="}])
        tools: Any = [{"type": "function", "strict": False, **SCHEMA}]
        for _ in range(3):
            answer = await client.responses.create(model="policy", input=items, tools=tools)
            made = [each for each in answer.output if each.type == "function_call"]
            seen.append(("tool_calls" if made else "stop", answer.output_text or None))
            items += answer.output
            for call in reversed(made):
                result = json.loads(call.arguments)
                total = str(result["a"] + result["b"])
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": total})
            if not made:
                items.append({"role": "user", "content": "Thanks"})
        return 1.0

    batch = played(policy, responses if api == "responses" else chat)
    assert batch["valid"].tolist() == [True]
    assert batch["rewards"].tolist() == [1.0]
    assert turns_of(policy, batch) == said
    empty = "" if "streamed" in api else None
    assert seen == [("tool_calls", text or empty), ("stop", "It is 5 ."), ("stop", "Bye")]
    row = policy.tokenizer.decode(batch["input_ids"][0])
    results = row[row.index(said[0]) + len(said[0]) :]
    assert results.index("5") < results.index("9") if len(calls) == 2 else "5" in results  # in the order of the calls
    assert policy.asked[1][: len(policy.asked[0])] == policy.asked[0]


def reasoning(text: str) -> list[str]:
    return [f"<think>\nHmm\n</think>\n\n{text}<|im_end|>", "Bye<|im_end|>"]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ("nothing", ""),
        ("the reasoning is left out", "rewritten"),
        ("white space is left out", "rewritten"),
        ("a message is left out", "rewritten"),
        ("a tool is added", "rewritten"),
        ("the same is asked again", "retried"),
    ],
)
def test_what_is_changed_forks_and_is_counted(changed: str, reason: str) -> None:
    policy = Says("qwen3_training", reasoning("It  is\n 4"))
    ask: Any = {"role": "user", "content": "2+2="}

    @asks
    async def agent(client: openai.AsyncOpenAI) -> float:
        tools: Any = [ADD]
        answer: Any = await client.chat.completions.create(model="policy", messages=[ask], tools=tools)
        message = answer.choices[0].message
        assert (message.reasoning_content, message.content) == ("Hmm", "It  is\n 4")
        said = message.model_dump(exclude_none=True)
        if changed == "the reasoning is left out":
            del said["reasoning_content"]
        if changed == "white space is left out":
            said["content"] = " ".join(said["content"].split())
        messages = [ask, said, {"role": "user", "content": "Sure ?"}]
        if changed == "a message is left out":
            del messages[1]
        if changed == "a tool is added":
            tools = [ADD, {"type": "function", "function": {"name": "sub"}}]
        if changed == "the same is asked again":
            messages = [ask]
        await client.chat.completions.create(model="policy", messages=messages, tools=tools)
        return 1.0

    batch = played(policy, agent)
    assert batch["episode_ids"].tolist() == ([0, 0] if reason else [0])
    assert batch["forked"].tolist() == ([0, FORKS.index(reason)] if reason else [0])
    assert batch["sampled"].sum() == batch["loss_mask"].sum()
    found = nrl.finalize(nrl.summary(batch))
    assert found.get("forks", 0) == bool(reason)
    if reason:
        assert found[f"forks/{reason}"] == 1
        assert [turns_of(policy, batch, row) for row in range(2)] == [[each] for each in reasoning("It  is\n 4")]


def test_several_answers_to_one_request_are_turns_of_one_episode() -> None:
    policy = Says("qwen2_5", [f"{each}<|im_end|>" for each in ("Hi", "Hello", "Bye")])

    @asks
    async def agent(client: openai.AsyncOpenAI) -> float:
        ask: Any = [{"role": "user", "content": "Say"}]
        answer = await client.chat.completions.create(model="policy", messages=ask, n=3)
        assert [each.message.content for each in answer.choices] == ["Hi", "Hello", "Bye"]
        return 0.5

    batch = played(policy, agent)
    assert batch["forked"].tolist() == [0, FORKS.index("retried"), FORKS.index("retried")]
    assert batch["loss_mask"].sum(1).tolist() == batch["sampled"].tolist()
    assert batch["rewards"].tolist() == [0.5] * 3


def test_tokens_and_their_log_probabilities_are_told_on_request() -> None:
    policy, found = Says("qwen2_5", ["Hi<|im_end|>", "Bye<|im_end|>"]), list[Any]()

    @asks
    async def agent(client: openai.AsyncOpenAI) -> float:
        ask: Any = [{"role": "user", "content": "Say"}]
        more: Any = {"logprobs": True, "extra_body": {"return_token_ids": True}}
        found.append(await client.chat.completions.create(model="policy", messages=ask, **more))
        include: Any = ["message.output_text.logprobs"]
        more = {"include": include, "extra_body": {"return_token_ids": True}}
        found.append(await client.responses.create(model="policy", input="Say", **more))
        return 0.0

    batch = played(policy, agent)
    chat, response = found
    choice, item = chat.choices[0], response.output[0]
    for row, told in ((0, choice.message), (1, item)):
        own = batch["turns"][row] == row
        assert told.prompt_token_ids == policy.asked[row]
        assert told.generation_token_ids == batch["input_ids"][row][own].tolist()
        assert told.generation_log_probs == batch["rollout_logprobs"][row][own].tolist()
    named = [f"token_id:{each}" for each in choice.message.generation_token_ids]
    assert [each.token for each in choice.logprobs.content] == named
    assert [each.token for each in item.content[0].logprobs] == named[:0] + [
        f"token_id:{each}" for each in item.generation_token_ids
    ]
    assert chat.prompt_token_ids == policy.asked[0]
    assert choice.token_ids == choice.message.generation_token_ids
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (len(policy.asked[0]), 2)
    assert (response.usage.input_tokens, response.usage.output_tokens) == (len(policy.asked[1]), 2)


def test_a_response_may_go_on_with_an_earlier_one() -> None:
    policy = Says("qwen2_5", ["Hi<|im_end|>", "Hello<|im_end|>", "Bye<|im_end|>"])

    @asks
    async def agent(client: openai.AsyncOpenAI) -> float:
        more: Any = {"model": "policy", "instructions": "Be brief ."}
        one = await client.responses.create(input="Say", **more)
        two = await client.responses.create(input="Thanks", previous_response_id=one.id, **more)
        items: Any = [{"role": "user", "content": "Say"}, *one.output, {"role": "user", "content": "Thanks"}]
        items += [*two.output, {"role": "user", "content": "Bye"}]
        three = await client.responses.create(input=items, **more)
        assert not hasattr(three.output[0], "prompt_token_ids")
        return 1.0

    batch = played(policy, agent)
    assert turns_of(policy, batch) == ["Hi<|im_end|>", "Hello<|im_end|>", "Bye<|im_end|>"]
    assert policy.tokenizer.decode(batch["input_ids"][0]).count("Be brief .") == 1
    assert len(batch) == 1


def test_all_answers_may_tell_their_tokens() -> None:
    @asks
    async def agent(client: openai.AsyncOpenAI) -> float:
        found: Any = await client.responses.create(model="policy", input="Say")
        return float(len(found.output[-1].generation_token_ids))

    assert played(Says("qwen2_5", ["Hi<|im_end|>"]), agent, ids=True)["rewards"].tolist() == [2.0]


def test_an_agent_learns_that_its_request_is_too_long_and_may_shorten_it() -> None:
    policy, refused = Says("qwen2_5", ["Hi<|im_end|>", "Bye<|im_end|>"], context_length=64), list[Any]()

    @asks
    async def agent(client: openai.AsyncOpenAI) -> float:
        ask: Any = {"role": "user", "content": "Say"}
        answer = await client.chat.completions.create(model="policy", messages=[ask])
        messages: Any = [ask, answer.choices[0].message, {"role": "user", "content": "Hi " * 64}]
        for _ in range(2):
            try:
                await client.chat.completions.create(model="policy", messages=messages)
            except openai.BadRequestError as error:
                refused.append(error)
        messages[-1] = {"role": "user", "content": "Sure ?"}
        answer = await client.chat.completions.create(model="policy", messages=messages)
        return float(answer.choices[0].message.content == "Bye")

    batch = played(policy, agent)
    assert [error.code for error in refused] == ["context_length_exceeded"] * 2
    assert "leaves no room for an answer" in str(refused[0])
    assert batch["rewards"].tolist() == [1.0]
    assert turns_of(policy, batch) == ["Hi<|im_end|>", "Bye<|im_end|>"]  # in one row
    assert batch["truncated"].tolist() == [False]


def test_an_agent_that_shortens_nothing_is_given_up() -> None:
    @asks
    async def agent(client: openai.AsyncOpenAI) -> float:
        ask: Any = {"role": "user", "content": "Say"}
        await client.chat.completions.create(model="policy", messages=[ask])
        while True:
            try:
                long: Any = [{"role": "user", "content": "Hi " * 64}]
                await client.chat.completions.create(model="policy", messages=long)
            except openai.BadRequestError:
                pass

    with pytest.warns(UserWarning, match="9 times in a row for more than fits into the context"):
        batch = played(Says("qwen2_5", ["Hi<|im_end|>"], context_length=64), agent)
    assert batch["valid"].tolist() == [False]


def quits(task: Any, endpoint: Endpoint) -> float:
    return 0.25


def breaks(task: Any, endpoint: Endpoint) -> float:
    raise ValueError("no luck")


def hangs(task: Any, endpoint: Endpoint) -> float:
    time.sleep(3)
    return 1.0


@pytest.mark.parametrize(
    ("agent", "why"),
    [
        (quits, r"EnvError: driven: the agent ended, with 0.25, and had not asked the model"),
        (breaks, "ValueError: no luck"),
        (hangs, "TimeoutError: .*reset did not return within 0.5 s"),
    ],
)
def test_an_agent_that_fails_makes_its_row_invalid(agent: Any, why: str) -> None:
    with pytest.warns(UserWarning, match=why):
        batch = played(Says("qwen2_5", []), agent, timeout=0.5)
    assert batch["valid"].tolist() == [False]
    assert not batch["loss_mask"].any()


def test_an_agent_that_fails_after_a_turn_is_no_reward_of_zero() -> None:
    @asks
    async def agent(client: openai.AsyncOpenAI) -> float:
        ask: Any = [{"role": "user", "content": "Say"}]
        await client.chat.completions.create(model="policy", messages=ask)
        raise RuntimeError("the tool is gone")

    with pytest.warns(UserWarning, match="RuntimeError: the tool is gone"):
        batch = played(Says("qwen2_5", ["Hi<|im_end|>"]), agent)
    assert batch["valid"].tolist() == [False]
    assert batch["rewards"].isnan().all()


def test_when_a_limit_ends_an_episode_its_agent_is_cancelled_and_refused() -> None:
    came = list[Any]()

    @asks
    async def agent(client: openai.AsyncOpenAI) -> float:
        ask = list[Any]([{"role": "user", "content": "Say"}])
        try:
            for _ in range(9):
                await client.chat.completions.create(model="policy", messages=ask)
        except asyncio.CancelledError:
            came.append("cancelled")
            try:
                await client.chat.completions.create(model="policy", messages=ask)
            except openai.APIStatusError as error:
                came.append((error.status_code, error.message))
            raise
        return 1.0

    def verifier(task: Any, trace: Trace) -> float:
        return float(trace.text == "Hello")

    env = limited(nrl.driven(agent, verifier=verifier), turns=2)
    batch = nrl.rollout(Says("qwen2_5", ["Hi<|im_end|>", "Hello<|im_end|>"]), env, [{"prompt": "Hi"}])
    assert batch["rewards"].tolist() == [1.0, 1.0]
    assert batch["valid"].all()
    assert came[0] == "cancelled"
    assert came[1][0] == 401
    assert "that of no session here" in came[1][1]


def test_a_request_whose_connection_broke_is_answered_once() -> None:
    """An agent that leaves and asks again is given the turn that was sampled for it."""
    began, go_on = threading.Event(), threading.Event()

    class Slow(Says):
        def generate(self, prompts: Any, *, seeds: Any = None, sampling: Any = None) -> Any:
            began.set()
            go_on.wait(10)
            return super().generate(prompts)

    policy = Slow("qwen2_5", ["Hi<|im_end|>", "Bye<|im_end|>"])

    @asks
    async def agent(client: openai.AsyncOpenAI) -> float:
        ask: Any = {"role": "user", "content": "Say"}
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.5, max_retries=0).chat.completions.create(
                model="policy", messages=[ask]
            )
        assert began.is_set()
        go_on.set()
        answer = await client.chat.completions.create(model="policy", messages=[ask])
        return float(answer.choices[0].message.content == "Hi")

    batch = played(policy, agent)
    assert batch["rewards"].tolist() == [1.0]
    assert policy.texts == ["Bye<|im_end|>"]
    assert len(batch) == 1


def test_requests_of_one_episode_are_answered_one_after_the_other() -> None:
    policy = Says("qwen2_5", ["Hi<|im_end|>", "Bye<|im_end|>"])

    @asks
    async def agent(client: openai.AsyncOpenAI) -> float:
        asks: list[Any] = [[{"role": "user", "content": each}] for each in ("Say", "Thanks")]
        found = await asyncio.gather(*(client.chat.completions.create(model="policy", messages=each) for each in asks))
        return float(sorted(str(each.choices[0].message.content) for each in found) == ["Bye", "Hi"])

    batch = played(policy, agent)
    assert batch["rewards"].tolist() == [1.0, 1.0]
    assert batch["sampled"].tolist() == [2, 2]


def chatter(task: Any, endpoint: Endpoint) -> float:
    """A plain function, with nothing but Python's own library, for another process."""
    said = list[str]()
    messages = [{"role": "user", "content": task["prompt"]}]
    for _ in range(2):
        body = json.dumps({"messages": messages, "return_token_ids": True}).encode()
        request = urllib.request.Request(f"{endpoint.base_url}/chat/completions", body)
        with urllib.request.urlopen(request, timeout=20) as answer:
            found = json.load(answer)
        message = found["choices"][0]["message"]
        assert found["usage"]["prompt_tokens"] == len(message.pop("prompt_token_ids"))
        assert found["usage"]["completion_tokens"] == len(message["generation_log_probs"])
        messages += [message, {"role": "user", "content": "more"}]
        said.append(message["content"])
    return float(len("".join(said)))


@pytest.fixture(scope="module")
def sampler() -> Any:
    with nrl.cluster("local") as cluster:
        model = tiny.model(tokenizer=tiny.bpe(["user assistant Hi more"]))
        yield hf.sampler(cluster.reserve(1), model, Sampling(max_new_tokens=6))


@pytest.mark.parametrize("where", ["pooled", "served"])
def test_it_is_an_environment_like_any_other(where: str, sampler: Any) -> None:
    env = nrl.driven(chatter)
    tasks = [{"prompt": "Hi"}, {"prompt": "more"}]
    here = nrl.rollout(sampler, env, tasks, n=2)
    if where == "pooled":
        there = nrl.rollout(sampler, nrl.pooled(env, workers=2), tasks, n=2)
    else:
        with nrl.serve(env) as server:
            there = nrl.rollout(sampler, nrl.remote(server), tasks, n=2)
    for name in ("input_ids", "loss_mask", "rewards", "turns"):
        assert torch.equal(here[name], there[name]), name
    # What is decoded together depends on who asks in time, and rounding on that
    torch.testing.assert_close(here["rollout_logprobs"], there["rollout_logprobs"], atol=1e-5, rtol=0)


def test_what_the_sampler_said_is_what_the_trainer_says(sampler: Any) -> None:
    with nrl.cluster("local") as cluster:
        model = tiny.model(tokenizer=tiny.bpe(["user assistant Hi more"]))
        trainer = fsdp.trainer(cluster.reserve(1), model, nrl.adamw(lr=1e-3))
        params = trainer.init().params
        nrl.publish(params, sampler)
        batch = nrl.rollout(sampler, nrl.driven(chatter), [{"prompt": "Hi"}], n=4)
        own = trainer.logprobs(params, batch).result()
    at = batch["loss_mask"]
    assert at.sum() > 8
    torch.testing.assert_close(own[at], batch["rollout_logprobs"][at], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/chat/completions", {"messages": []}, 400, "messages: there are none"),
        ("/chat/completions", b"{", 400, "the request is no JSON"),
        ("/chat/completions", [], 400, "the request is list"),
        ("/chat/completions", {"messages": [{"role": "boss", "content": "Hi"}]}, 400, "its role is 'boss'"),
        ("/responses", {"input": []}, 400, "input: there is none"),
        ("/responses", {"input": "Hi", "previous_response_id": "x"}, 404, "there is no response 'x'"),
        ("/embeddings", {}, 404, "there is no /s/"),
        ("/models", {}, 405, "does not take POST"),
    ],
)
def test_what_cannot_be_answered_is_refused(path: str, body: Any, status: int, said: str) -> None:
    found = list[Any]()

    def agent(task: Any, endpoint: Endpoint) -> float:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            urllib.request.urlopen(urllib.request.Request(endpoint.base_url + path, raw), timeout=10)
        except urllib.error.HTTPError as error:
            found.append((error.code, json.load(error)["error"]["message"]))
        return 0.0

    with pytest.warns(UserWarning, match="had not asked the model"):
        played(Says("qwen2_5", []), agent)
    assert found[0][0] == status
    assert said in found[0][1]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(api=st.sampled_from([chat_completions, responses]), body=st.dictionaries(KEYS, JSON, max_size=8))
def test_whatever_is_sent_is_read_or_refused(api: Any, body: Any) -> None:
    given = {"messages": [{"role": "user", "content": "Hi"}], "input": "Hi", **body}
    try:
        asked = _read(api, given, Session("a", ids=False))
    except Unusable:
        return
    request = as_request(asked, [])
    assert {each["role"] for each in request["messages"]} <= {"system", "user", "assistant", "tool"}
    said = [Turn("4", [7, 2], "stop", [ToolCall("add", {"a": 2})], (), "Hm", 3, [1, 2, 3], [-0.5, -0.5])]
    assert json.dumps(api.answer(asked, said, 0, "1"))
    assert list(api.events(asked, said, 0, "1"))
