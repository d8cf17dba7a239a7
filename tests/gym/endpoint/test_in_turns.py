"""Agents that take turns within one episode, such as one that asks others: each is a row of it."""

import asyncio
from typing import Any

import openai
from hypothesis import given, settings
from hypothesis import strategies as st

import nrl
from nrl.envs import Trace
from nrl.rollout.bridges import FORKS
from tests.gym.endpoint.driving import Says, asks, played, turns_of


class Speaker:
    """An agent with a conversation of its own, whose answers it sends back."""

    def __init__(self, client: openai.AsyncOpenAI, told: str) -> None:
        self.client, self.messages = client, list[Any]([{"role": "system", "content": told}])

    async def ask(self, text: str) -> str:
        self.messages.append({"role": "user", "content": text})
        answer = await self.client.chat.completions.create(model="policy", messages=self.messages)
        self.messages.append(answer.choices[0].message)
        return str(answer.choices[0].message.content)


def said(number: int) -> str:
    return f"{number}<|im_end|>"


def test_each_agent_that_takes_turns_has_one_row() -> None:
    policy = Says("qwen2_5", [said(each) for each in range(5)])

    @asks
    async def agents(client: openai.AsyncOpenAI) -> float:
        plan, search = Speaker(client, "Plan ."), Speaker(client, "Search .")
        found = [await plan.ask("Say")]
        for _ in range(2):
            found += [await search.ask(found[-1]), await plan.ask(found[-1])]
        return float(found == ["0", "1", "2", "3", "4"])

    batch = played(policy, agents)
    assert batch["rewards"].tolist() == [1.0, 1.0]
    assert batch["forked"].tolist() == [0, FORKS.index("rewritten")]
    assert [turns_of(policy, batch, row) for row in range(2)] == [[said(0), said(2), said(4)], [said(1), said(3)]]
    assert batch["sampled"].tolist() == batch["loss_mask"].sum(1).tolist() == [6, 4]
    for earlier, later in ((0, 2), (2, 4), (1, 3)):  # each goes on from the tokens of its own answer
        tokens = [*policy.asked[earlier], *policy.tokenizer.encode(said(earlier), add_special_tokens=False)]
        assert policy.asked[later][: len(tokens)] == tokens
    assert nrl.finalize(nrl.summary(batch))["forks"] == 1


@settings(max_examples=30, deadline=None, derandomize=True)
@given(order=st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_in_whatever_order_they_ask(order: list[int]) -> None:
    """As many rows as agents, and each token is trained on once, in the row of its agent."""
    policy = Says("qwen2_5", [said(each) for each in range(len(order))])

    @asks
    async def agents(client: openai.AsyncOpenAI) -> float:
        of = [Speaker(client, f"{each} .") for each in range(4)]
        for each in order:
            await of[each].ask("Say")
        return 1.0

    batch = played(policy, agents)
    first = list(dict.fromkeys(order))
    own = [[said(at) for at, each in enumerate(order) if each == agent] for agent in first]
    assert [turns_of(policy, batch, row) for row in range(len(batch))] == own
    assert int(batch["loss_mask"].sum()) == 2 * len(order)
    assert int(batch["forked"].count_nonzero()) == len(first) - 1


def test_agents_that_ask_at_the_same_time_have_a_row_each() -> None:
    policy = Says("qwen2_5", [said(each) for each in range(6)])

    @asks
    async def agents(client: openai.AsyncOpenAI) -> float:
        of = [Speaker(client, told) for told in ("Plan .", "Search .", "Check .")]
        for _ in range(2):
            await asyncio.gather(*(each.ask("Say") for each in of))
        return 1.0

    batch = played(policy, agents)
    assert len(batch) == 3
    assert batch["sampled"].tolist() == [4, 4, 4]


def test_a_fork_is_of_the_conversation_that_was_changed() -> None:
    """An agent changes its last message after another one asked: its earlier answers keep their tokens."""
    policy = Says("qwen2_5", [said(each) for each in range(4)])

    @asks
    async def agents(client: openai.AsyncOpenAI) -> float:
        plan, search = Speaker(client, "Plan ."), Speaker(client, "Search .")
        await plan.ask("Say")
        await plan.ask("Thanks")
        await search.ask("Say")
        del plan.messages[-2:]
        await plan.ask("Bye")
        return 1.0

    batch = played(policy, agents)
    assert [turns_of(policy, batch, row) for row in range(3)] == [[said(0), said(1)], [said(2)], [said(3)]]
    kept = [*policy.asked[0], *policy.tokenizer.encode(said(0), add_special_tokens=False)]
    assert policy.asked[3][: len(kept)] == kept
    assert batch["forked"].tolist() == [0, FORKS.index("rewritten"), FORKS.index("rewritten")]


def test_a_verdict_is_earned_by_the_last_turn_whatever_row_it_is_in() -> None:
    policy = Says("qwen2_5", [said(each) for each in range(3)], context_length=64)

    @asks
    async def agents(client: openai.AsyncOpenAI) -> None:
        plan, search = Speaker(client, "Plan ."), Speaker(client, "Search .")
        await plan.ask("Say")
        await search.ask("Say")
        await plan.ask("Thanks")

    def verifier(task: Any, trace: Trace) -> float:
        return float(len(trace.turns))

    batch = played(policy, agents, verifier=verifier)
    assert batch["rewards"].tolist() == [3.0, 3.0]
    last = (batch["turns"][0] == 2).nonzero().max()
    assert batch["token_rewards"][0, last] == 3.0
    assert batch["token_rewards"].sum() == 3.0
