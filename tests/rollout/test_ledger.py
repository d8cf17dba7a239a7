"""Every token that a sampler gave is in one row, once, as it was, and in the ledger."""

import random
import warnings
from collections import Counter
from itertools import groupby
from typing import Any

import pytest
import torch

import nrl
from nrl.backends import Completion, Sampling
from nrl.batch.metrics import finalize
from nrl.envs import Environment, Score, Step, Trace, Turn, judged
from nrl.envs.tools import call, tool
from nrl.rollout.bridges import FORKS
from tests.chat_tokenizers import tokenizer
from tests.rollout.conversations import FAMILIES, Message, answer, never, text


class Wild:
    """A policy that says what models say on a bad day; it remembers all of it.

    What it says follows from a request's seed: requests come in another order if the machine is busy.
    """

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.seed, self.said = name, seed, list[tuple[int, ...]]()
        self.tokenizer, self.version, self.sampling = tokenizer(name), 1, Sampling()
        self.context_length = random.Random(seed).choice([60, 200, 4096])

    def generate(self, prompts: Any, *, seeds: Any = None, sampling: Any = None) -> Any:
        found = []
        for _, each in zip(prompts, seeds, strict=True):
            said = answer(random.Random(f"{self.seed} {each}"), self.name, [{"role": "user", "content": "?"}])
            ids = said.ids or [5]
            self.said.append(tuple(ids))
            found.append(Completion(torch.tensor(ids), -torch.ones(len(ids)), truncated=not said.end, version=1))
        return nrl.runtime.done(found)

    def receive(self, buckets: Any, version: int, *, inflight: Any = "wait") -> None:
        raise AssertionError("nothing is published")


@tool
def find(q: str = "", n: Any = None) -> str:
    """Find it.

    Args:
        q: What.
        n: How many.
    """
    return f"{q} {n}"


def game(rng: random.Random, name: str, forked: Counter[str]) -> Environment:
    """Some turns of a user, who may also break off, and a verifier that may not make sense of the answer.

    Half of the episodes have a tool, if the template knows any. Some turns without a call are answered with the whole
    conversation, which is what was said, or shorter. ``forked`` counts the latter, and why.
    """
    tools = [find] if FAMILIES[name].calls != (0,) and name not in ("glm4moe", "gptoss") else []  # no parser of ours

    def reset(task: Any) -> Any:
        own = random.Random(rng.random())  # an episode's: tools run in threads, and end in any order
        said = [{"role": "user", "content": text(own) + "?"}]
        given = tools if own.random() < 0.5 else []
        return (own, own.randint(1, 4), said, bool(given)), said, given

    async def step(state: tuple[random.Random, int, list[Message], bool], turn: Turn) -> Step:
        rng, left, said, calling = state
        if rng.random() < 0.05:
            raise OSError("gone")
        if left == 1:
            return Step(state, rng.random())
        asked = {"role": "user", "content": text(rng) + "!"}
        if turn.calls or turn.malformed:
            results, _ = await call([find], [*turn.calls, *turn.malformed])
            answers = [each.message for each in results]
            then = [*answers, asked] if rng.random() < 0.2 else answers
            return Step((rng, left - 1, said, calling), done=False, observation=then)
        said_something = bool(turn.text.strip())  # Mistral's template refuses an answer of nothing
        weights = [3, 1 - calling, 2 * said_something, 1]
        how = rng.choices(["appended", "echoed", "rewritten", "retried"], weights)[0]
        whole: list[Message] = [*said, {"role": "assistant", "content": turn.text}, asked]
        if how == "appended":
            return Step((rng, left - 1, whole, calling), rng.random(), done=False, observation=[asked])
        if how == "rewritten":
            whole = [{"role": "user", "content": f"In short {rng.random()}"}, *whole[-2:]]
        if how == "retried":
            whole = said[:1]
        if how != "echoed":
            forked[how] += 1
        return Step((rng, left - 1, whole, calling), rng.random(), done=False, observation={"messages": whole})

    def verify(task: Any, trace: Trace) -> Score:
        own = random.Random("".join(turn.text for turn in trace.turns))
        return Score(own.random(), own.choice(["ok", "ok", "parse_fail", "skipped"]))

    return judged(Environment(reset, step), verify)


def check(name: str, seed: int) -> Counter[str]:
    """Play, and look for every token that was given; why rows forked."""
    policy, forked = Wild(name, seed), Counter[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batch = nrl.rollout(policy, game(random.Random(seed), name, forked), [{"prompt": ""}] * 3, n=2)
    found = finalize(nrl.summary(batch))
    forks = Counter({reason: int(found.get(f"forks/{reason}", 0)) for reason in FORKS[1:]})
    assert forks.total() == found.get("forks", 0)
    if policy.context_length == 4096:
        assert {**forks, "template": 0} == {"rewritten": 0, "retried": 0, **forked, "template": 0}
    given = sum(map(len, policy.said))
    assert given == found["tokens/sampled"]
    drawn = (batch["turns"] >= 0).sum(-1)  # the tokens of the rows themselves; a context may have cut some off
    assert found["tokens/trained"] == int(drawn[batch["valid"]].sum()) == int(batch["loss_mask"].sum())
    assert found["tokens/masked"] == found["tokens/dropped"] == 0
    assert given == found["tokens/trained"] + found["tokens/beyond"] + found["tokens/invalid"]
    if policy.context_length == 4096:
        assert found["tokens/beyond"] == 0
        assert given == found["tokens/trained"] + int(drawn[~batch["valid"]].sum())
        assert found["tokens/invalid"] == int(drawn[~batch["valid"]].sum())
    runs, of_episode = Counter[tuple[int, ...]](), Counter[tuple[int, int]]()
    last = batch["attention_mask"].sum(-1).tolist()
    for row, turns in enumerate(batch["turns"].tolist()):
        at = 0
        for turn, run in groupby(turns):
            first, at = at, at + len(list(run))
            if turn >= 0:
                of_episode[int(batch["episode_ids"][row]), turn] += 1
                if at < policy.context_length or last[row] < policy.context_length:  # else its end may be cut off
                    runs[tuple(batch["input_ids"][row, first:at].tolist())] += 1
    assert max(of_episode.values(), default=0) <= 1  # a turn is in one row
    assert runs <= Counter(policy.said)
    if policy.context_length == 4096:
        assert runs == Counter(policy.said)
    return forks


@pytest.mark.parametrize("name", FAMILIES)
def test_every_token_is_accounted_for(name: str) -> None:
    forks = sum((check(name, seed) for seed in range(24)), Counter[str]())
    assert (forks["template"] > 0) == (FAMILIES[name].forks is not never), forks
    assert forks["rewritten"] > 0 < forks["retried"]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_token_is_accounted_for_more_often(name: str) -> None:
    for seed in range(24, 220):
        check(name, seed)
