"""Messages in the canonical form."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from nrl.arguments import described
from nrl.data.checks import fields, find_media, kind, shown
from nrl.data.messages.content_parts import ContentParts, is_text, read_parts, separate_results
from nrl.data.messages.reasoning import set_reasoning
from nrl.data.messages.tool_calls import canonical_call, decode_json
from nrl.data.messages.tool_schemas import function_of
from nrl.errors import DataError

__all__ = [
    "ROLES",
    "SYSTEM_ROLES",
    "TRAINED",
    "are_messages",
    "before_answers",
    "canonical_messages",
    "canonical_prompt",
    "decoded_messages",
    "is_chat",
]

ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool", "ipython")},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "ai", "bot"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("observation", "function", "tool_response", "function_response"), "tool"),
    **dict.fromkeys(("tool_result", "function_result"), "tool"),
}
"""The roles that are read, of ShareGPT's descendants too, in small letters; and what each becomes.

>>> ROLES["human"]
'user'
"""

SYSTEM_ROLES = ("system", "developer")
"""The roles of a system prompt."""

_CALLS = ("function_call", "tool_call")
"""Roles whose content is the JSON text of a call."""


def is_chat(value: Any) -> bool:
    """Return whether a value has the form of messages: a list whose first part is a mapping.

    >>> is_chat([{"role": "user", "content": "1+1="}]), is_chat("1+1=")
    (True, False)
    """
    return (
        isinstance(value, Sequence) and not isinstance(value, str | bytes) and isinstance([*value[:1], 0][0], Mapping)
    )


def are_messages(value: Any) -> bool:
    """Return whether a value is a list of mappings each of which says who speaks.

    >>> are_messages([{"role": "user", "content": "1+1="}]), are_messages([{"score": 1}])
    (True, False)
    """
    return is_chat(value) and all(isinstance(each, Mapping) and ("role" in each or "from" in each) for each in value)


def decoded_messages(value: Any) -> Any:
    """Return the messages that a JSON text holds, as in columns of CSV files; any other value as it is.

    >>> decoded_messages('[{"role": "user", "content": "1+1="}]'), decoded_messages("1+1=")
    ([{'role': 'user', 'content': '1+1='}], '1+1=')
    """
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    with suppress(ValueError, RecursionError):
        found = json.loads(value)
        return found if are_messages(found) else value
    return value


def canonical_prompt(prompt: Any, where: str) -> Any:
    """Return a prompt whose messages are in the canonical form; a text or token ids stay as they are.

    Args:
        prompt: any value.
        where: how errors name it.

    Raises:
        DataError: as `canonical_messages` does.

    >>> canonical_prompt([{"from": "human", "value": "1+1="}], "the prompt")
    [{'role': 'user', 'content': '1+1='}]
    """
    return canonical_messages(prompt, where) if is_chat(prompt) else prompt


def canonical_messages(
    messages: Any,
    where: str,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    filled: bool = False,
    parts: bool = False,
) -> list[dict[str, Any]]:
    """Return messages in the canonical form; those that are in it already stay equal.

    Args:
        messages: at least one, as OpenAI (also the deprecated ``function_call``) or ShareGPT writes them.
        where: how errors name them.
        tools: the canonical tools that calls may name. Their schemas say which arguments may be null.
        filled: whether the messages come from Arrow or Parquet, where all rows have the fields of any row and null is
            in those that a row did not have. Then a null in the arguments of a call is left out, unless the schema of
            the tool requires that argument. Arguments that are JSON text are as they were written.
        parts: whether a content may have parts that are no text; then it stays as it is.

    Raises:
        DataError: they are no messages; the error names the message and the field.

    >>> call = {"function": {"name": "add", "arguments": '{"a": 2}'}}
    >>> canonical_messages([{"role": "assistant", "content": None, "tool_calls": [call]}], "the chat")[0]["tool_calls"]
    [{'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 2}}}]
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise DataError(f"{where} is {kind(messages)}; give a list of messages")
    if not messages:
        raise DataError(f"{where} is empty; give at least one message")
    schemas = {str(function_of(tool).get("name")): function_of(tool).get("parameters") for tool in tools}
    return [
        _message(single, f"{where}: message {number}", schemas if filled else None, parts)
        for number, message in enumerate(messages)
        for single in ([message] if parts else separate_results(message))
    ]


def _message(message: Any, where: str, schemas: Mapping[str, Any] | None, parts: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise DataError(f"{where} is {kind(message)}; give {{'role': ..., 'content': ...}}")
    message = _with_role(message, where)
    role = message["role"].lower()
    found = {key: value for key, value in message.items() if value is not None}
    found["role"] = ROLES.get(role, message["role"])
    calls = found.pop("tool_calls", None)
    of_content = role in _CALLS and not (calls and found.get("content") in (None, ""))
    if of_content or isinstance(calls, str):
        schemas = None  # Arrow fills nothing into a text
    if of_content and calls:
        raise DataError(f"{where} has a call in 'content' and others in 'tool_calls'; give all of them in 'tool_calls'")
    if of_content:
        calls, found["content"] = decode_json(found.get("content"), f"{where}: the call in 'content'"), ""
    if isinstance(calls, str):
        calls = decode_json(calls, f"{where}: 'tool_calls'")
    calls = [calls] if isinstance(calls, Mapping) else calls
    if calls is not None and not isinstance(calls, list | tuple):
        raise DataError(f"{where}: 'tool_calls' is {kind(calls)}; give a list of calls, or leave it out")
    in_parts = ContentParts("", "", [])
    if not parts and isinstance(found.get("content"), list | tuple):
        in_parts = read_parts(found["content"], found["role"], where)
        found["content"] = in_parts.text
    read = [canonical_call(call, f"{where}: call {at}", schemas) for at, call in enumerate(calls or ())]
    others = (
        [(found.pop("function_call"), "'function_call'")] if isinstance(found.get("function_call"), Mapping) else []
    )
    for call, name in (*others, *((call, "the call in 'content'") for call in in_parts.calls)):
        call = canonical_call(call, f"{where}: {name}", schemas)
        read += [] if call["function"] in [earlier["function"] for earlier in read] else [call]
    if read:
        found["tool_calls"] = read
        found.setdefault("content", "")
    for field, remedy in _UNREAD.items():
        if found.get(field):
            raise DataError(f"{where} has '{field}', {described(found[field])}, which no template writes; {remedy}")
    if not parts and (field := find_media(found)):
        raise DataError(
            f"{where} has '{field}', {described(found[field])}, and nothing here reads it: models of nrl see text "
            "alone; take rows that text alone can answer"
        )
    found["content"] = _content(found, message, where)
    set_reasoning(found, where, in_parts.reasoning)
    return found if _pop_trained(found, where) else {**found, "weight": 0}


TRAINED = ("weight", "train", "trainable", "training", "loss", "loss_mask", "step_loss_mask")
"""The fields that may say whether a message of the assistant is trained, of OpenAI, Axolotl, Together and others.

>>> "weight" in TRAINED
True
"""


def _pop_trained(message: dict[str, Any], where: str) -> bool:
    """Take the fields of `TRAINED` out of a message, and return what they say."""
    flags = {name: message.pop(name) for name in TRAINED if name in message}
    if message["role"] != "assistant":
        return True
    for name, value in flags.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise DataError(f"{where}: '{name}' is {described(value)}; give 1, or 0 for a turn that is not trained")
    if len({bool(value) for value in flags.values()}) > 1:
        pairs = " and ".join(f"'{name}', {described(value)}," for name, value in flags.items())
        raise DataError(f"{where} has {pairs} which differ; leave all but one out")
    return all(flags.values())


_UNREAD = {
    **dict.fromkeys(("tools", "functions"), "give them as the field 'tools' of the row"),
    "refusal": "give it as 'content'",
    **dict.fromkeys(("train_detail", "training_detail"), "nrl trains whole turns; leave it out"),
}
"""Fields of a message that say something and that nothing reads there; what to do with them."""


def _with_role(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a message with ``role`` and ``content`` in place of ShareGPT's ``from`` and ``value``."""
    names = {"role": "from", "content": "value"}
    found = {key: value for key, value in message.items() if key not in names.values()}
    of_sharegpt = message.get("role") is None and message.get("from") is not None
    for name, other in names.items():
        if other not in message:
            continue
        first, second = message.get(name), message[other]
        if first is None:
            found[name] = second
        elif isinstance(second, str) and (first != second if name == "content" else _other_role(first, second)):
            pair = f"'{name}', {shown(repr(first))}, and '{other}', {shown(repr(second))}"
            raise DataError(f"{where} has {pair}, which differ; leave one of them out")
    if "role" not in found:
        raise DataError(f"{where} has no 'role'; it has {fields(message)}")
    role = found["role"]
    if not isinstance(role, str):
        raise DataError(f"{where}: '{'from' if of_sharegpt else 'role'}' is {kind(role)}; give a text")
    if of_sharegpt and role.lower() not in ROLES:
        raise DataError(f"{where}: 'from' is {shown(repr(role))}; the roles that are read are {', '.join(ROLES)}")
    return found


def _other_role(role: Any, speaker: str) -> bool:
    """Whether ``from`` names another role; a name that is no role is metadata."""
    return speaker.lower() in ROLES and ROLES[speaker.lower()] != ROLES.get(str(role).lower())


def _content(found: Mapping[str, Any], message: Mapping[str, Any], where: str) -> Any:
    if "content" not in message and "content" not in found:
        raise DataError(f"{where} has no 'content'; it has {fields(message)}")
    content = found.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        return "".join(part["text"] for part in content) if all(map(is_text, content)) else content
    raise DataError(f"{where}: 'content' is {kind(content)}; give a text")


def before_answers[M: Mapping[str, Any]](messages: Sequence[M]) -> list[M]:
    """Return messages without the assistant's at their end, of which there may be several.

    >>> before_answers([{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}])
    [{'role': 'user', 'content': '1+1='}]
    """
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    return list(messages[:end])
