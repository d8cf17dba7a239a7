"""The reasoning of a message: the fields that may hold it, and that within a content."""

from collections.abc import Mapping, Sequence
from typing import Any

from nrl.data.checks import kind, shown
from nrl.data.messages.tool_calls import decode_json
from nrl.errors import DataError

__all__ = ["REASONING", "set_reasoning", "split_content"]

REASONING = ("reasoning_content", "reasoning", "thinking")
"""The fields that may hold reasoning; the first is the canonical one.

>>> REASONING[0]
'reasoning_content'
"""


_OTHER_FIELDS = (
    *("thought", "thoughts", "think", "thinking_content", "reasoning_text", "reasoning_trace"),
    *("chain_of_thought", "cot"),
)
"""Fields of the assistant's messages that hold reasoning in some data sets, and that no template reads."""

_DETAILS = "reasoning_details"
"""OpenRouter's list of parts of reasoning."""


def set_reasoning(message: dict[str, Any], where: str, in_parts: str = "") -> None:
    """Set the reasoning of a message in its canonical field.

    Args:
        message: which is changed.
        where: how errors name it.
        in_parts: the reasoning in parts of its content.

    Raises:
        DataError: a field holds no text, or two of them differ.
    """
    given = {name: message.pop(name) for name in REASONING if name in message}
    if message["role"] == "assistant":
        given |= {name: value for name in _OTHER_FIELDS if name in message and (value := message.pop(name))}
        if details := message.pop(_DETAILS, None):
            given[_DETAILS] = _text_of_details(details, [*given.values(), in_parts], where)
    given |= {"content": in_parts} if in_parts else {}
    for name, value in given.items():
        if not isinstance(value, str):
            raise DataError(f"{where}: '{name}' is {kind(value)}; give a text")
    texts = {value: name for name, value in given.items() if value} or {value: name for name, value in given.items()}
    if len({"".join(text.split()) for text in texts}) > 1:
        raise DataError(f"{where}: {' and '.join(map(repr, texts.values()))} differ; give its reasoning once")
    if not texts:
        return
    text, name = next(iter(texts.items()))
    message[REASONING[0]] = text
    content = message["content"]
    if not text or not isinstance(content, str) or "</think>" not in content:
        return
    if split_content(content)[0] == text.strip():
        del message[REASONING[0]]  # Templates read the reasoning of the content.
    elif content.lstrip().startswith("<think>"):
        raise DataError(f"{where}: '{name}' and the reasoning in 'content' differ; give its reasoning once")


def _text_of_details(details: Any, others: Sequence[Any], where: str) -> str:
    if isinstance(details, str):
        details = decode_json(details, f"{where}: '{_DETAILS}'")
    if not isinstance(details, list | tuple) or not all(isinstance(part, Mapping) for part in details):
        raise DataError(f"{where}: '{_DETAILS}' is {kind(details)}; give a list of parts with 'text' or 'summary'")
    parts = [part.get("text") or part.get("summary") or "" for part in details]
    text = "".join(part for part in parts if isinstance(part, str))
    if not text and not any(others):
        raise DataError(
            f"{where}: '{_DETAILS}' has no text that a model can learn, {shown(repr(details))}; leave it out"
        )
    return text


def split_content(content: str) -> tuple[str, str]:
    """Return the reasoning that a content has before its last ``</think>``, and the content behind that mark.

    Templates that read reasoning of the content take it apart there.

    >>> split_content("<think>Easy.</think>2"), split_content("2")
    (('Easy.', '2'), ('', '2'))
    """
    reasoning, mark, answer = content.rpartition("</think>")
    return (reasoning.strip().removeprefix("<think>").strip(), answer) if mark else ("", content)
