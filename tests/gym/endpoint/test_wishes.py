"""What agents wish besides an answer: where it ends, its tokens, a format; and what nobody can answer."""

import asyncio
import contextlib
import json
import urllib.error
import urllib.request
from typing import Any

import openai
import pytest

import nrl
from nrl import tiny
from nrl.backends import Sampling, hf
from nrl.envs import Turn
from nrl.gym.endpoint.agent_env import Endpoint
from nrl.gym.endpoint.chat_request import Asked, as_request
from nrl.gym.endpoint.endpoint_app import application
from tests.gym.endpoint.driving import Says, asks, played, turns_of

SAY: Any = {"role": "user", "content": "Say"}


def test_an_answer_ends_where_the_agent_wants_it_to() -> None:
    """The text that ends it is sampled and not told; sent back without it, the answer has its tokens."""
    policy = Says("qwen2_5", ["Add 2\nObservation:", "Bye<|im_end|>", "Hi<|im_end|>"])

    @asks
    async def agent(client: openai.AsyncOpenAI) -> float:
        how: Any = {"model": "policy", "stop": ["\nObservation:", "</code>"], "max_tokens": 30}
        first = await client.chat.completions.create(messages=[SAY], **how)
        assert first.choices[0].message.content == "Add 2"
        messages: Any = [SAY, first.choices[0].message, {"role": "user", "content": "4"}]
        second = await client.chat.completions.create(model="policy", messages=messages, stop="Bye")
        assert second.choices[0].message.content == ""
        await client.responses.create(model="policy", input="Say", max_output_tokens=3)
        return 1.0

    batch = played(policy, agent)
    assert turns_of(policy, batch)[0] == "Add 2\nObservation:"
    assert batch["valid"].all()
    own = policy.sampling
    asked = [(each.stop, each.max_new_tokens) for each in policy.sampled if each is not None]
    assert asked == [(("\nObservation:", "</code>"), 30), (("Bye",), own.max_new_tokens), ((), 3)]
    known = [*policy.asked[0], *policy.tokenizer.encode("Add 2\nObservation:", add_special_tokens=False)]
    assert policy.asked[1][: len(known)] == known


def test_agents_with_limits_of_their_own_sample_together() -> None:
    """Of one batch each row ends where its own agent says, and is what it would be alone."""
    with nrl.cluster("local") as cluster:
        model = tiny.model(tokenizer=tiny.bpe(["user assistant Hi more"]))
        sampler = hf.sampler(cluster.reserve(1), model, Sampling(max_new_tokens=12))

        async def agent(task: Any, endpoint: Endpoint) -> float:
            async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
                await client.chat.completions.create(model="policy", messages=[SAY], **task["how"])
            return 1.0

        def rolled(*how: Any) -> Any:
            return nrl.rollout(sampler, nrl.driven(agent), [{"prompt": "", "how": each, "seed": 1} for each in how])

        whole = rolled({}, {}, {}, {})
        said = sampler.tokenizer.decode(whole["input_ids"][2][whole["loss_mask"][2]])
        letter = next(each for each in said if each.isascii() and each.isprintable())
        how: Any = ({}, {"max_tokens": 5}, {"stop": [letter]}, {"max_tokens": 64})
        batch = rolled(*how)
    lengths = whole["loss_mask"].sum(1).tolist()
    assert batch["loss_mask"].sum(1).tolist()[:2] == [lengths[0], min(5, lengths[1])]
    assert batch["loss_mask"].sum(1).tolist()[3] == lengths[3]  # no more than the rollout allows
    for row in range(4):
        own, other = (each["input_ids"][row][each["loss_mask"][row]].tolist() for each in (batch, whole))
        assert own == other[: len(own)]
    ended = batch["input_ids"][2][batch["loss_mask"][2]]
    assert letter in sampler.tokenizer.decode(ended)
    assert letter not in sampler.tokenizer.decode(ended[:-1])


@pytest.mark.parametrize("first", [True, False])
def test_what_the_chat_template_does_not_take_is_refused_and_the_episode_goes_on(first: bool) -> None:
    """Mistral's takes no assistant before a user."""
    policy, refused = Says("mistral_v13", ["Hi</s>", "Bye</s>"]), list[Any]()
    wrong: Any = [{"role": "assistant", "content": "Hi"}, SAY]

    @asks
    async def agent(client: openai.AsyncOpenAI) -> float:
        if not first:
            await client.chat.completions.create(model="policy", messages=[SAY])
        try:
            await client.chat.completions.create(model="policy", messages=wrong)
        except openai.BadRequestError as error:
            refused.append(error)
        answer = await client.chat.completions.create(model="policy", messages=[SAY])
        return float(answer.choices[0].message.content in ("Hi", "Bye"))

    batch = played(policy, agent)
    assert "roles" in str(refused[0])
    assert batch["valid"].all()
    assert batch["rewards"].unique().tolist() == [1.0]
    assert int(batch["loss_mask"].sum()) == 2 * len(batch) == (2 if first else 4)


def test_an_agent_whose_requests_are_all_refused_may_end() -> None:
    wrong: Any = [{"role": "assistant", "content": "Hi"}, SAY]

    @asks
    async def agent(client: openai.AsyncOpenAI) -> float:
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="policy", messages=wrong)
        return 0.5

    batch = played(Says("mistral_v13", []), agent)
    assert batch["rewards"].tolist() == [0.5]
    assert not batch["loss_mask"].any()


def test_an_agent_that_asks_for_nothing_else_is_given_up() -> None:
    wrong: Any = [{"role": "assistant", "content": "Hi"}, SAY]

    @asks
    async def agent(client: openai.AsyncOpenAI) -> float:
        while True:
            with contextlib.suppress(openai.BadRequestError):
                await client.chat.completions.create(model="policy", messages=wrong)

    with pytest.warns(UserWarning, match="9 times in a row for what cannot be answered .*; let it end when it reads"):
        batch = played(Says("mistral_v13", []), agent)
    assert batch["valid"].tolist() == [False]


def test_what_nothing_meets_is_counted() -> None:
    policy = Says("qwen2_5", [f"{each}<|im_end|>" for each in range(6)])

    async def agent(task: Any, endpoint: Endpoint) -> float:
        more: Any = {"response_format": {"type": "json_object"}, "parallel_tool_calls": False} if task["wishes"] else {}
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            for wishes in (more, {"response_format": {"type": "text"}, "parallel_tool_calls": True}):
                await client.chat.completions.create(model="policy", messages=[SAY], **wishes)
            await client.responses.create(
                model="policy", input="Say", tool_choice="required" if task["wishes"] else "auto"
            )
        return 1.0

    batch = nrl.rollout(policy, nrl.driven(agent), [{"prompt": "", "wishes": each} for each in (True, False)])
    found = nrl.finalize(nrl.summary(batch))
    wishes = ("response_format", "parallel_tool_calls", "tool_choice")
    assert {name for name in found if name.startswith("env/unmet/")} == {f"env/unmet/{name}" for name in wishes}
    wishing = [nrl.finalize(nrl.summary(batch[batch["group_ids"] == group])) for group in (0, 1)]
    assert [sum(each.get(f"env/unmet/{name}") == 1.0 for name in wishes) for each in wishing] == [3, 0]


def test_a_first_request_that_does_not_fit_is_told_so_and_a_stop_that_is_empty_stops_nothing() -> None:
    policy, refused = Says("qwen2_5", ["Hi<|im_end|>"], context_length=64), list[Any]()

    @asks
    async def agent(client: openai.AsyncOpenAI) -> float:
        long: Any = [{"role": "user", "content": "Hi " * 64}]
        try:
            await client.chat.completions.create(model="policy", messages=long)
        except openai.BadRequestError as error:
            refused.append(error.code)
        answer = await client.chat.completions.create(model="policy", messages=[SAY], stop="")
        return float(answer.choices[0].message.content == "Hi")

    batch = played(policy, agent)
    assert refused == ["context_length_exceeded"]
    assert batch["rewards"].tolist() == [1.0]
    assert batch["forked"].tolist() == [0]
    assert turns_of(policy, batch) == ["Hi<|im_end|>"]


def test_a_stream_has_its_tokens() -> None:
    policy, found = Says("qwen2_5", ["Hi<|im_end|>"]), list[Any]()

    @asks
    async def agent(client: openai.AsyncOpenAI) -> float:
        more: Any = {"extra_body": {"return_token_ids": True}}
        stream = await client.chat.completions.create(model="policy", messages=[SAY], stream=True, **more)
        found.extend([each async for each in stream])
        return 1.0

    batch = played(policy, agent)
    prompts = [each.prompt_token_ids for each in found if "prompt_token_ids" in each.model_extra]
    ids = [token for each in found for choice in each.choices for token in choice.model_extra.get("token_ids", ())]
    assert prompts == [policy.asked[0]]
    assert ids == batch["input_ids"][0][batch["loss_mask"][0]].tolist()


def test_models_are_found_by_name_and_nothing_else_is() -> None:
    found = list[Any]()

    @asks
    async def agent(client: openai.AsyncOpenAI) -> float:
        found.append((await client.models.retrieve("policy")).id)
        for asked in (client.models.retrieve("other"), client.responses.retrieve("resp_1")):
            try:
                await asked
            except openai.NotFoundError as error:
                found.append(error.body["message"])  # type: ignore[index]
        answer: Any = await client.chat.completions.create(model="", messages=[SAY])
        found.append(answer.model)
        return 1.0

    played(Says("qwen2_5", ["Hi<|im_end|>"]), agent)
    assert found[0] == found[3] == "policy"
    assert found[1] == "there is no model 'other'; it is 'policy'"
    assert "nothing is kept but what previous_response_id names" in found[2]


def test_a_response_that_is_not_stored_is_not_gone_on_with() -> None:
    @asks
    async def agent(client: openai.AsyncOpenAI) -> float:
        kept = await client.responses.create(model="policy", input="Say")
        lost = await client.responses.create(model="policy", input="Say", store=False)
        assert kept.id != lost.id
        await client.responses.create(model="policy", input="Thanks", previous_response_id=kept.id)
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            await client.responses.create(model="policy", input="Thanks", previous_response_id=lost.id)
        return 1.0

    assert played(Says("qwen2_5", ["Hi<|im_end|>"] * 3), agent)["valid"].all()


def test_results_have_the_names_of_their_calls_where_ids_come_again() -> None:
    def call(name: str) -> Any:
        return {"role": "assistant", "content": "", "tool_calls": [{"id": "call_0", "name": name, "arguments": {}}]}

    result = {"role": "tool", "tool_call_id": "call_0", "content": "5"}
    found = as_request(Asked([SAY, call("add"), result, call("mul"), result]), [])["messages"]
    assert [each["name"] for each in found if each["role"] == "tool"] == ["add", "mul"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_an_address_at_which_nobody_is_found_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match=r"at which no agent finds the endpoint; give the address of a network"):
        nrl.driven(lambda task, endpoint: 1.0, host=host)


def test_an_error_of_our_own_is_told_as_one_of_openai() -> None:
    class Broken:
        responses: Any = None
        ids = False

        async def ask(self, asked: Any, left: Any) -> Any:
            raise ValueError("no luck")

        def tokenize(self, body: Any) -> Any:
            return {}

    sent = list[Any]()

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps({"messages": [SAY]}).encode()}

    async def send(message: Any) -> None:
        sent.append(message)

    scope: Any = {"type": "http", "path": "/v1/chat/completions", "method": "POST", "headers": []}
    serve: Any = application(lambda key: Broken(), "policy")
    with pytest.raises(ValueError, match="no luck"):  # for the server's log
        asyncio.run(serve(scope, receive, send))
    assert sent[0]["status"] == 500
    assert json.loads(sent[1]["body"])["error"]["message"] == "ValueError: no luck"


def test_a_turn_that_is_refused_travels() -> None:
    """Where the environment is served, the turn is told by its fields."""

    def agent(task: Any, endpoint: Endpoint) -> float:
        body = json.dumps({"messages": [{"role": "assistant", "content": "Hi"}, SAY]}).encode()
        try:
            urllib.request.urlopen(urllib.request.Request(f"{endpoint.base_url}/chat/completions", body), timeout=10)
        except urllib.error.HTTPError as error:
            return float(error.code == 400)
        return 0.0

    with nrl.serve(nrl.driven(agent)) as server:
        batch = nrl.rollout(Says("mistral_v13", []), nrl.remote(server), [{"prompt": "Hi"}])
    assert batch["rewards"].tolist() == [1.0]
    assert Turn("no", stop_reason="refused").stop_reason == "refused"
