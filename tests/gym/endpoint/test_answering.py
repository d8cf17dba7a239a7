"""A sampler behind OpenAI's APIs: what each request is told, and that others do not wait for it."""

import asyncio
import gc
import threading
import time
from typing import Any

import pytest

import nrl
from nrl.backends.engine import GIVEN_UP
from nrl.gym.endpoint import answering
from nrl.gym.endpoint.answering import SamplerAnswers
from nrl.gym.endpoint.chat_request import Asked, call_id, said_by
from nrl.gym.endpoint.fields import Unusable
from tests.gym.endpoint.driving import Says, turn

SAY: Any = {"role": "user", "content": "Say"}
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def asked(answers: SamplerAnswers, *requests: Asked) -> list[Any]:
    """What requests of one moment are answered; or the error."""

    async def all_of_them() -> list[Any]:
        never = asyncio.get_running_loop().create_future()
        return list(await asyncio.gather(*(answers.ask(each, never) for each in requests), return_exceptions=True))

    return asyncio.run(all_of_them())


def test_each_call_has_an_id_of_its_own() -> None:
    """As clients want it that keep a conversation of several requests."""
    calling = turn("qwen2_5", "", ("add", {"a": 2, "b": 3}))
    answers = SamplerAnswers(Says("qwen2_5", [calling] * 4))
    found = [each for _ in range(2) for each in asked(answers, Asked([SAY], [ADD], n=2))]
    firsts = [first for _, first in found]
    ids = [call_id(first + place, 0) for first in firsts for place in range(2)]
    assert len(set(ids)) == 4
    (turns, first), *_ = found
    assert said_by(turns[0], first)["tool_calls"][0]["name"] == "add"


def test_requests_of_different_lengths_are_decoded_together() -> None:
    policy = Says("qwen2_5", ["Hi more<|im_end|>"] * 3)
    answers = SamplerAnswers(policy)
    lengths = [{"max_new_tokens": 1}, {"max_new_tokens": 2}, {}]
    answers._loop.call_soon_threadsafe(time.sleep, 0.5)  # until all of them are there, on a busy machine, too
    found = asked(answers, *(Asked([SAY], sampling=each) for each in lengths))
    assert len(policy.sampled) == 1
    counts = [len(turns[0].token_ids) for turns, _ in found]
    assert counts[:2] == [1, 2]
    assert counts[2] > 2
    assert [turns[0].stop_reason for turns, _ in found] == ["length", "length", "stop"]


def test_more_rows_than_a_call_may_have_are_decoded_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "_ROWS", 4)
    sizes = list[int]()

    class Counts(Says):
        def generate(self, prompts: Any, *, seeds: Any = None, sampling: Any = None) -> Any:
            sizes.append(len(prompts))
            return super().generate(prompts, seeds=seeds, sampling=sampling)

    answers = SamplerAnswers(Counts("qwen2_5", ["Hi<|im_end|>"] * 9))
    ((turns, _),) = asked(answers, Asked([SAY], n=9))
    assert len(turns) == 9
    assert sizes == [4, 4, 1]


class Slow(Says):
    """It decodes as long as it is let."""

    def __init__(self) -> None:
        super().__init__("qwen2_5", ["Hi<|im_end|>"] * 9)
        self.began, self.go_on = threading.Event(), threading.Event()

    def generate(self, prompts: Any, *, seeds: Any = None, sampling: Any = None) -> Any:
        self.began.set()
        assert self.go_on.wait(30)
        return super().generate(prompts, seeds=seeds, sampling=sampling)


def test_while_it_decodes_other_requests_are_looked_after() -> None:
    """One is refused, one leaves; and when the server ends, who waits is told so."""
    policy = Slow()
    answers = SamplerAnswers(policy)

    async def requests() -> None:
        loop = asyncio.get_running_loop()
        never, left = loop.create_future(), loop.create_future()
        waits = asyncio.create_task(answers.ask(Asked([SAY]), never))
        assert await asyncio.to_thread(policy.began.wait, 10)
        assert answers.busy
        began = time.monotonic()
        long = Asked([{"role": "user", "content": "Hi " * 40_000_000}])
        with pytest.raises(Unusable, match="120000000 characters, which do not fit into the 4096 tokens"):
            await answers.ask(long, never)
        leaves = asyncio.create_task(answers.ask(Asked([SAY]), left))
        await asyncio.sleep(0.05)
        left.set_result(None)
        assert await leaves is None
        assert time.monotonic() - began < 5
        answers.close()
        with pytest.raises(Unusable, match="the server ends; ask another one") as ended:
            await waits
        assert ended.value.status == 503

    asyncio.run(requests())
    policy.go_on.set()
    end = time.monotonic() + 10
    while answers.busy and time.monotonic() < end:
        time.sleep(0.01)
    assert not answers.busy


def test_what_is_decoded_for_a_client_that_left_ends() -> None:
    """A call of the sampler is told which rows nobody waits for; the others go on."""

    class Told(Says):
        def generate(self, prompts: Any, *, seeds: Any = None, sampling: Any = None) -> Any:
            given_up = GIVEN_UP.get()
            assert given_up is not None
            began.set()
            while sum(given_up()) < 2:
                time.sleep(0.01)
            seen.append(list(given_up()))
            return super().generate(prompts, seeds=seeds, sampling=sampling)

    began, seen = threading.Event(), list[Any]()
    answers = SamplerAnswers(Told("qwen2_5", ["Hi<|im_end|>"] * 9))

    async def requests() -> None:
        loop = asyncio.get_running_loop()
        never, left = loop.create_future(), loop.create_future()
        leaves = asyncio.create_task(answers.ask(Asked([SAY], n=2), left))
        stays = asyncio.create_task(answers.ask(Asked([SAY]), never))
        assert await asyncio.to_thread(began.wait, 10)
        left.set_result(None)
        assert await leaves is None
        assert await asyncio.wait_for(stays, 10) is not None

    answers._loop.call_soon_threadsafe(time.sleep, 0.5)  # until both are there, on a busy machine, too
    asyncio.run(requests())
    assert sorted(seen[0]) == [False, True, True]


def test_of_a_client_that_left_nothing_is_logged() -> None:
    policy, logged = Slow(), list[Any]()
    answers = SamplerAnswers(policy)
    answers._loop.set_exception_handler(lambda loop, context: logged.append(context["message"]))

    async def requests() -> None:
        loop = asyncio.get_running_loop()
        for number in (1, 2):
            left = loop.create_future()
            leaves = asyncio.create_task(answers.ask(Asked([SAY], n=number), left))
            assert await asyncio.to_thread(policy.began.wait, 10)
            left.set_result(None)
            assert await leaves is None

    asyncio.run(requests())
    policy.go_on.set()
    for _ in range(2):  # turns of the loop, after which nobody has the futures any more
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.05), answers._loop).result(10)
        gc.collect()
    assert logged == []


THOUGHT = "2+2= " * 1_400_000
LONG: dict[str, dict[str, Any]] = {
    "reasoning": {"reasoning": THOUGHT},
    "arguments": {"tool_calls": [{"id": "1", "name": "f", "arguments": {"a": THOUGHT}}]},
}


@pytest.mark.parametrize("part", LONG)
def test_nothing_of_a_message_is_encoded_beyond_the_context(part: str) -> None:
    answers = SamplerAnswers(Says("qwen3_training", []))  # its template writes the reasoning of all messages
    began = time.process_time()
    (found,) = asked(answers, Asked([SAY, {"role": "assistant", "content": "", **LONG[part]}, SAY]))
    assert isinstance(found, Unusable)
    assert found.code == "context_length_exceeded"
    assert time.process_time() - began < 2


def test_a_text_that_cannot_fit_is_refused_before_all_of_it_is_encoded() -> None:
    answers = SamplerAnswers(Says("qwen2_5", []))
    began = time.process_time()
    with pytest.raises(Unusable, match="do not fit into the 4096 of the context") as refused:
        answers.tokenize({"prompt": "2+2= " * 30_000})
    assert refused.value.code == "context_length_exceeded"
    assert time.process_time() - began < 2


def test_what_nothing_meets_is_said_once() -> None:
    answers = SamplerAnswers(Says("qwen2_5", ["Hi<|im_end|>"] * 3))
    wishing = Asked([SAY], unmet=("response_format",))
    with pytest.warns(UserWarning, match="serve: a request asks for response_format, which nothing here meets") as said:
        asked(answers, wishing, wishing)
    assert len([each for each in said if "response_format" in str(each.message)]) == 1


def test_tokens_of_what_is_no_request() -> None:
    answers = SamplerAnswers(Says("qwen2_5", []))
    for body, why in (
        ({"messages": [SAY], "tools": 5}, "a field of the request is of the wrong type"),
        ({"prompt": "Hi " * 4_000_000}, "12000000 characters, which do not fit"),
        ({}, "messages: there are none"),
    ):
        with pytest.raises(Unusable, match=why):
            answers.tokenize(body)
    assert answers.tokenize({"prompt": "Hi"})["count"] == len(answers.tokenize({"prompt": "Hi"})["tokens"])
    assert nrl.Sampling().max_new_tokens > 2
