"""Conversations of many turns take time that grows with their length, and have the tokens of the whole conversation."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest

from nrl import data
from nrl.data import turn_spans
from nrl.errors import DataError
from tests.chat_tokenizers import TEMPLATES, tokenizer

NAMES = ["chatml", *sorted(path.stem for path in TEMPLATES.glob("*.jinja"))]
TOOL = {"type": "function", "function": {"name": "find", "description": "Find.", "parameters": {"type": "object"}}}


def talk(turns: int) -> list[dict[str, Any]]:
    roles = ["user", "assistant"] * turns
    system = {"role": "system", "content": "Be brief."}
    return [system, *({"role": role, "content": f"Hello {number}"} for number, role in enumerate(roles))]


def work(turns: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
    for number in range(turns):
        function = {"name": "find", "arguments": {"q": f"Hi {number}"}}
        calls = [{"id": f"{number:09}", "type": "function", "function": function}]
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        messages.append({"role": "tool", "name": "find", "tool_call_id": f"{number:09}", "content": f"Bye {number}"})
    return [*messages, {"role": "assistant", "content": "Bye."}]


ROWS = ({"messages": talk(18)}, {"messages": work(17), "tools": [TOOL]})


def lesson(row: dict[str, Any], of: Any) -> list[list[int]] | str:
    try:
        batch = data.supervised([row], of)
    except DataError as error:
        return str(error)
    return [batch["input_ids"][0].tolist(), batch["loss_mask"][0].tolist()]


@pytest.mark.parametrize("name", NAMES)
def test_excerpts_give_the_tokens_of_the_whole_conversation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lessons = [lesson(row, tokenizer(name)) for row in ROWS]
    monkeypatch.setattr(turn_spans, "_WHOLE", 0)  # renders the whole conversation up to every turn
    assert [lesson(row, tokenizer(name)) for row in ROWS] == lessons


@pytest.mark.parametrize("name", ["chatml", "glm4moe"])
def test_a_template_reads_few_messages_for_each_turn(name: str) -> None:
    class Counting(type(tokenizer(name))):  # type: ignore[misc]
        def apply_chat_template(self, conversation: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            counts.append(len(conversation))
            return super().apply_chat_template(conversation, *args, **kwargs)

    of = copy.copy(tokenizer(name))
    of.__class__ = Counting
    for turns in (10, 80):
        counts = list[int]()
        data.supervised([{"messages": talk(turns)}], of)
    assert sum(counts) < 6000  # all messages up to each turn are 80 * 160

    # A template that writes something else behind many messages is read as it is
    of = copy.copy(tokenizer(name))
    of.chat_template = of.chat_template + "{{ '<|im_end|>' if messages | length == 91 else '' }}"
    assert lesson({"messages": talk(60)}, of) == lesson({"messages": talk(60)}, tokenizer(name))


def test_a_template_that_rewrites_earlier_turns_of_a_long_conversation_is_refused() -> None:
    of = copy.copy(tokenizer("chatml"))
    assert "message['content']" in of.chat_template
    of.chat_template = of.chat_template.replace(
        "message['content']", "(message['content'] if loop.last or loop.index != 40 else message['content'] + '!')"
    )
    with pytest.raises(DataError, match="for the assistant's message 39 while it is the last"):
        data.supervised([{"messages": talk(40)[1:]}], of)
