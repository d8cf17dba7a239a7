"""Bridges between turns: 500 random conversations under the templates of real models, and each case by itself."""

import copy
import random
from collections import Counter
from typing import Any

import pytest

from nrl import tiny
from nrl.episodes.bridges import Extension, Fork, Sampled, bridge, continues, extend
from nrl.errors import DataError, ModelError
from tests.chat_tokenizers import tokenizer
from tests.episodes.conversations import FAMILIES, TOOLS, Answer, Message, answer, changed, echoed, ending, observation, started

JULY = __import__("datetime").datetime(2024, 7, 26)


def written(name: str, messages: list[Message], tools: Any) -> str:
    """The template's text of a conversation that waits for an answer, straight from transformers."""
    found: str = tokenizer(name).apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, tokenize=False, strftime_now=JULY.strftime
    )
    return found


def refused(name: str, messages: list[Message], tools: Any) -> bool:
    from jinja2 import TemplateError

    try:
        written(name, messages, tools)
    except (TemplateError, TypeError):
        return True
    return False


def converse(rng: random.Random, name: str) -> Counter[str]:
    """One conversation, checked at every turn; what came of its turns."""
    of, family = tokenizer(name), FAMILIES[name]
    tools = TOOLS if max(family.calls) and rng.random() < 0.5 else None
    count: Counter[str] = Counter()
    history: list[Message] = []
    tokens: list[int] = []
    turns: list[tuple[Sampled, Answer]] = []
    messages, first = started(rng, name), None
    for _ in range(rng.randint(2, 6)):
        if refused(name, messages, tools):
            with pytest.raises(DataError, match="the chat template refuses"):
                extend(tokens, history, [turn for turn, _ in turns], messages, of, tools=tools)
            count["refused"] += 1
            break
        kept, appended, fork = extend(tokens, history, [turn for turn, _ in turns], messages, of, tools=tools)
        row, expected = tokens[:kept] + appended, written(name, messages, tools)
        turns = [each for each in turns if each[0].stop <= kept]
        text = of.decode(appended)
        assert expected.endswith(text)
        if not turns:
            assert kept == 0
            assert row == of.encode(expected, add_special_tokens=False)
        else:
            at, last = turns[-1]
            assert kept == at.stop
            assert messages[: at.message + 1] == [{**message, **also(message, sent)} for message, sent in zip(history, messages, strict=False)][: at.message + 1]
            head = expected.removesuffix(text)
            token = ending(name, last.message, messages[at.message + 1])
            if last.ids[-1:] == [of.convert_tokens_to_ids(token)]:
                assert head.endswith(token)
                head = head.removesuffix(token)
            if "tool_calls" not in last.message:
                assert head.rstrip().endswith(last.message["content"].rpartition("</think>")[2].strip())
            ends = [ending(name, each.message, messages[turn.message + 1]) for turn, each in turns]
            if all(each.exact and each.end == end for (_, each), end in zip(turns, ends, strict=True)):
                assert of.decode(row) == expected
                count["exact"] += 1
        if first is not None:  # the history was changed
            assert fork is not None
            assert (fork.reason, fork.at) == (first[0], first[1])
            if family.forks.__name__ == "never":
                whole = [turn.stop for turn, _ in turns if turn.message < first[1]]
                assert kept == max(whole, default=0)
        elif history:
            expects = family.forks(history, turns_before[-1][1], messages[len(history) :])
            assert (fork is not None) == expects, (fork, history, messages)
            assert expects or row[: len(tokens)] == tokens
            if fork is not None:
                assert (fork.reason, fork.at) == ("template", len(history) - 1)
        else:
            assert fork is None
        count["bridge" if history and not fork else fork.reason if fork else "begin"] += 1
        tokens, history = row, messages
        said = answer(rng, name, history)
        turns = [*turns, (Sampled(len(history), len(tokens), len(tokens) + len(said.ids)), said)]
        turns_before = turns
        tokens, history = tokens + said.ids, [*history, said.message]
        messages, first = [*echoed(rng, history), *observation(rng, name, said)], None
        luck = rng.random()
        if luck < 0.2:
            sent, at = changed(rng, name, history)
            messages, first = [*sent, *messages[len(history) :]], ("rewritten", at)
        elif luck < 0.27:
            places = [at for at in range(1, len(history)) if history[at]["role"] == "assistant"]
            at = rng.choice(places)
            messages, first = copy.deepcopy(history[:at]), ("retried", at)
    return count


def also(message: Message, sent: Message) -> Message:
    """The fields that say nothing, which a client may have added."""
    return {name: value for name, value in sent.items() if value is None and name not in message}


def fuzz(n: int, name: str) -> Counter[str]:
    count: Counter[str] = Counter()
    for seed in range(n):
        try:
            count += converse(random.Random(f"{name} {seed}"), name)
        except Exception as error:
            error.add_note(f"{name}, conversation {seed}")
            raise
    return count


@pytest.mark.parametrize("name", FAMILIES)
def test_random_conversations(name: str) -> None:
    count = fuzz(600, name)
    print(name, dict(count))
