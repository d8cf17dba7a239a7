"""Formats of conversations."""

import re
from collections.abc import Mapping
from typing import Any

from nrl.data.checks import fields, kind, shown
from nrl.data.formats.base import alternate
from nrl.data.messages import (
    TRAINED,
    before_answers,
    canonical_messages,
    decode_json,
    decoded_messages,
    separate_results,
)
from nrl.data.row_fields import check_fields_agree
from nrl.envs.types import Task
from nrl.errors import DataError

__all__ = ["dialogue", "exchanges", "sharegpt", "turns"]


def sharegpt(row: Task) -> Task:
    """Of ShareGPT and its descendants: ``conversations`` become ``messages``.

    The roles are human, gpt, system, function_call or tool_call (whose value is the JSON text of a call, or of
    several), observation, tool, tool_response and their like, in small or capital letters. The fields ``tools``, a list
    or its JSON text, and ``system`` are read as in any row.

    Args:
        row: with ``conversations``, each with ``from`` and ``value``; or with ``role`` and ``content``.

    Returns:
        Its other fields, and ``messages``.

    Raises:
        DataError: no ``conversations``, a message that is none or has an unknown role, or another conversation in
            ``conversation`` or ``messages``.

    Source: the format of `lmsys/FastChat`'s and LLaMA-Factory's data.

    >>> said = [{"from": "human", "value": "1+1="}, {"from": "gpt", "value": "2"}]
    >>> sharegpt({"conversations": said, "id": 7})
    {'id': 7, 'messages': [{'from': 'human', 'value': '1+1='}, {'from': 'gpt', 'value': '2'}]}
    """
    keys = [key for key in ("conversations", "conversation", "messages") if row.get(key) is not None]
    key = next(iter(keys), "conversations")
    if key not in row or key == "messages":
        raise DataError(f"sharegpt: the row has no 'conversations'; it has {fields(row)}")
    messages = decoded_messages(row[key])
    canonical = canonical_messages(messages, f"sharegpt: '{key}'")
    for other in keys[1:]:
        if len(row[other]) and canonical_messages(decoded_messages(row[other]), f"sharegpt: '{other}'") != canonical:
            raise DataError(f"sharegpt: '{key}' and '{other}' differ, and only '{key}' would be read; leave one out")
    return {**{name: value for name, value in row.items() if name != key}, "messages": messages}


def turns(row: Task) -> list[Task]:
    """A row for each message of the assistant in a conversation, which teaches that one alone.

    For chat templates that write earlier turns differently from the last, such as Qwen3's, which drops their thinking:
    then each row has the tokens that the model reads and writes in that turn.

    Args:
        row: with ``messages``.

    Returns:
        Its other fields, ``prompt``, the messages so far, and ``response``, a list of one message. Where messages of
        the assistant stand right before it, they come in the response, too, and are not trained there. A message with
        ``weight`` 0 makes no row.

    Raises:
        DataError: no ``messages``, or none of the assistant among them that answers anything.

    >>> chat = [{"role": role, "content": text} for role, text in [("user", "a"), ("assistant", "b"), ("user", "c")]]
    >>> turns({"messages": [*chat, {"role": "assistant", "content": "d"}]})[1]["response"]
    [{'role': 'assistant', 'content': 'd'}]
    """
    if "messages" not in row:
        raise DataError(f"turns: the row has no 'messages'; it has {fields(row)}")
    check_fields_agree(row, "turns: the row")
    given = decoded_messages(row["messages"])
    messages = canonical_messages(given, "turns: 'messages'")
    # As they came, since only the reader of the source knows which nulls are filler
    given = [single for message in given for single in separate_results(message)]
    others = {name: value for name, value in row.items() if name != "messages"}
    found = list[Task]()
    for at, message in enumerate(messages):
        prompt = before_answers(messages[:at])
        if message["role"] != "assistant" or "weight" in message or not prompt:
            continue
        earlier = [
            {**{key: value for key, value in each.items() if key not in TRAINED}, "weight": 0}
            for each in given[len(prompt) : at]
        ]
        found.append({**others, "prompt": given[: len(prompt)], "response": [*earlier, given[at]]})
    if not found:
        raise DataError("turns: 'messages' has no message of the assistant after another, so there is nothing to teach")
    return found


def exchanges(row: Task) -> Task:
    """Of conversations that are lists of exchanges: each a question and its answer.

    Args:
        row: with ``conversation``, ``conversations`` or ``messages``: objects with ``input`` and ``output``, as
            Capybara has them, or ``human`` and ``assistant``, ``user`` and ``assistant``, ``question`` and ``answer``,
            ``prompt`` and ``response``; or texts of both in turn, as LIMA has them.

    Returns:
        Its other fields, and ``messages``.

    Raises:
        DataError: there is no such conversation.

    Source: `LDJnr/Capybara` and `GAIR/lima` on the hub.

    >>> exchanges({"conversation": [{"input": "1+1=", "output": "2"}]})["messages"][1]
    {'role': 'assistant', 'content': '2'}
    """
    key = next((key for key in ("conversation", "conversations", "messages") if row.get(key)), None)
    if key is None:
        raise DataError(f"exchanges: the row has no 'conversation'; it has {fields(row)}")
    given = row[key]
    if isinstance(given, str):
        given = decode_json(given, f"exchanges: '{key}'")
    if not isinstance(given, list | tuple):
        raise DataError(f"exchanges: '{key}' is {kind(given)}; give a list of exchanges")
    texts = list[Any]()
    for number, exchange in enumerate(given):
        if isinstance(exchange, str):
            texts.append(exchange)
            continue
        names = next((pair for pair in _EXCHANGES if isinstance(exchange, Mapping) and {*pair} <= {*exchange}), None)
        if names is None or len(texts) % 2:
            pairs = " or ".join(f"'{ask}' and '{answer}'" for ask, answer in _EXCHANGES)
            raise DataError(f"exchanges: exchange {number} is {shown(repr(exchange))}; give {pairs}")
        texts += [exchange[name] for name in names]
    if any(not isinstance(text, str) for text in texts[:-1]):
        wrong = next(text for text in texts if not isinstance(text, str))
        raise DataError(f"exchanges: '{key}' has {kind(wrong)} where a text is said; give texts")
    if not texts:
        raise DataError(f"exchanges: '{key}' has no exchanges; leave the row out")
    texts = texts if isinstance(texts[-1], str) else texts[:-1]  # a question that is not answered
    return {**{name: value for name, value in row.items() if name != key}, "messages": alternate(texts)}


_EXCHANGES = (
    ("input", "output"),
    ("human", "assistant"),
    ("user", "assistant"),
    ("question", "answer"),
    ("prompt", "response"),
)
"""The names of a question and its answer in an exchange."""


def dialogue(row: Task) -> Task:
    """Of conversations that are one text, with marks before what each speaker says.

    Args:
        row: with ``text``, as Guanaco has it, ``"### Human: ...### Assistant: ..."``; or with ``chat``, as Glaive's
            calls of functions have it, ``"USER: ... ASSISTANT: ... <|endoftext|> FUNCTION RESPONSE: ..."``, and
            ``system``.

    Returns:
        Its other fields, ``messages`` and, of Glaive, ``system``. Calls within a text stay as they are.

    Raises:
        DataError: there is no such text, or it does not begin with a mark.

    Source: `timdettmers/openassistant-guanaco` and `glaiveai/glaive-function-calling-v2` on the hub.

    >>> dialogue({"text": "### Human: 1+1=### Assistant: 2"})["messages"][1]
    {'role': 'assistant', 'content': '2'}
    """
    key = next((key for key in ("chat", "text") if isinstance(row.get(key), str)), None)
    if key is None:
        raise DataError(f"dialogue: the row has neither 'chat' nor 'text'; it has {fields(row)}")
    begin, *parts = _SPEAKER.split(row[key])
    if begin.strip() or not parts:
        raise DataError(f"dialogue: '{key}' does not begin with a speaker, as in '### Human:': {shown(repr(row[key]))}")
    messages = [
        {"role": _SPEAKERS[speaker], "content": text.strip().removesuffix(_END).strip()}
        for speaker, text in zip(parts[::2], parts[1::2], strict=True)
    ]
    others = {name: value for name, value in row.items() if name != key}
    if isinstance(system := row.get("system"), str):
        others["system"] = system.removeprefix("SYSTEM:").strip()
    return {**others, "messages": messages}


_SPEAKERS = {
    **dict.fromkeys(("### Human", "### User", "USER"), "user"),
    **dict.fromkeys(("### Assistant", "ASSISTANT"), "assistant"),
    **dict.fromkeys(("### System", "SYSTEM"), "system"),
    "FUNCTION RESPONSE": "tool",
}
_SPEAKER = re.compile(rf"(?:(?<=\n)|\A|(?=###))\s*({'|'.join(map(re.escape, _SPEAKERS))}):")
_END = "<|endoftext|>"
