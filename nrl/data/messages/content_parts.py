"""Contents that are lists of parts, as clients of OpenAI, Anthropic and Mistral write them.

Parts of text become the content, parts of reasoning and calls become those of the message, and results of tools become
messages of their own. All other parts, such as pictures, are refused by their type.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from nrl.data.checks import kind, shown
from nrl.errors import DataError

__all__ = ["ContentParts", "is_text", "read_parts", "separate_results"]

_TEXTS = ("text", "input_text", "output_text")
_REASONING = ("thinking", "reasoning", "thought")
_CALL, _RESULT = "tool_use", "tool_result"

_REMEDIES = {
    "redacted_thinking": "leave it out: its text is encrypted",
    "refusal": "give it as a part of the type 'text'",
    "tool_use": "give it in a message of the assistant",
    "tool_result": "give it in a message of the user, or of the role 'tool'",
    **dict.fromkeys(_REASONING, "give it in a message of the assistant"),
}


class ContentParts(NamedTuple):
    """What a list of parts says.

    Args:
        text: of all parts of text.
        reasoning: empty lines join several parts.
        calls: as `nrl.data.messages.tool_calls.canonical_call` takes them.

    >>> ContentParts("2", "Easy.", []).text
    '2'
    """

    text: str
    reasoning: str
    calls: list[Mapping[str, Any]]


def is_text(part: Any) -> bool:
    """Return whether a part is one of text.

    >>> is_text({"type": "text", "text": "2"}), is_text({"type": "image"})
    (True, False)
    """
    return isinstance(part, Mapping) and (part.get("type") or "text") in _TEXTS and isinstance(part.get("text"), str)


def read_parts(content: Sequence[Any], role: str, where: str) -> ContentParts:
    """Return what the parts of a content say.

    Args:
        content: the parts.
        role: of the message. Only the assistant reasons and calls.
        where: how errors name the message.

    Raises:
        DataError: a part is of another kind, or the parts do not follow each other as a template writes them.

    >>> read_parts([{"type": "thinking", "thinking": "Easy."}, {"type": "text", "text": "2"}], "assistant", "the chat")
    ContentParts(text='2', reasoning='Easy.', calls=[])
    """
    texts, thoughts, calls, order = list[str](), list[str](), list[Mapping[str, Any]](), list[int]()
    for number, part in enumerate(content):
        of_kind = str(part["type"]) if isinstance(part, Mapping) and part.get("type") is not None else None
        if is_text(part):
            texts.append(part["text"])
            order += [1] if part["text"].strip() else []
        elif role == "assistant" and of_kind in _REASONING:
            thoughts.append(_reasoning_of(part, f"{where}: part {number} of 'content'"))
            order.append(0)
        elif role == "assistant" and of_kind == _CALL:
            call = {"id": part.get("id"), "name": part.get("name"), "arguments": part.get("input")}
            calls.append({key: value for key, value in call.items() if value is not None})
            order.append(2)
        elif of_kind is None:
            raise DataError(f"{where}: 'content' is a list; give a text, or parts with a type; part {number} has none")
        else:
            remedy = _REMEDIES.get(of_kind, "give text alone")
            raise DataError(
                f"{where}: 'content' is a list; give a text, or parts of text; part {number} is of the type "
                f"{shown(repr(of_kind))}, which no template writes there; {remedy}"
            )
    if any(later < earlier for earlier, later in pairwise(order)):
        raise DataError(
            f"{where}: 'content' has reasoning or text behind what templates write later; give reasoning, text and "
            "calls in this order, or make several messages of it"
        )
    return ContentParts("".join(texts), "\n\n".join(thoughts), calls)


def _reasoning_of(part: Mapping[str, Any], where: str) -> str:
    """Return the text of a part of reasoning, which Mistral's clients write as parts again."""
    value = next((part[name] for name in (*_REASONING, "text") if part.get(name) not in (None, True)), "")
    if isinstance(value, list | tuple) and all(map(is_text, value)):
        value = "".join(inner["text"] for inner in value)
    if not isinstance(value, str):
        raise DataError(f"{where}, of reasoning, has {kind(value)}; give a text")
    return value


def separate_results(message: Any) -> list[Any]:
    """Return the messages that a message stands for: results of tools in its content are messages of their own.

    >>> result = {"type": "tool_result", "tool_use_id": "a", "content": "21"}
    >>> separate_results({"role": "user", "content": [result, {"type": "text", "text": "Thanks"}]})[0]
    {'role': 'tool', 'tool_call_id': 'a', 'content': '21'}
    """
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple) or message.get("role") == "assistant" or not any(map(_is_result, content)):
        return [message]
    messages = list[Any]()
    for are_results, parts in groupby(content, _is_result):
        if not are_results:
            messages.append({**message, "content": list(parts)})
            continue
        for part in parts:
            result = "" if part.get("content") is None else part["content"]
            messages.append({"role": "tool", "tool_call_id": str(part.get("tool_use_id") or ""), "content": result})
    return messages


def _is_result(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == _RESULT
