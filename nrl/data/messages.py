"""The canonical form of conversations and of tool schemas, in which chat templates read them.

Rows of data, environments and clients write the same conversation in many ways: OpenAI's, ShareGPT's, with arguments as
JSON text, with fields that are null. `canonical_messages` and `canonical_tools` turn all of them into one form:

- a message is a dict with a text ``role`` and a text ``content``; fields that are null are left out
- ``reasoning_content`` holds the reasoning; `nrl.data.forms` gives it the name that the chat template reads
- a call is ``{"type": "function", "function": {"name": ..., "arguments": {...}}}``; arguments are an object, or a text
  where they are no JSON object
- ``weight`` stands only in a message of the assistant that is not trained, and is 0
- a tool is ``{"type": "function", "function": {...}}``

Other fields stay as they are. The module imports no tensors, so environments can use it.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from nrl.arguments import described
from nrl.data.checks import fields, kind, shown
from nrl.errors import DataError

__all__ = [
    "REASONING",
    "ROLES",
    "are_messages",
    "before_answers",
    "canonical_messages",
    "canonical_prompt",
    "canonical_tools",
    "decoded_messages",
    "is_chat",
    "read_arguments",
    "split_content",
]

REASONING = ("reasoning_content", "reasoning", "thinking")
"""The fields that may hold reasoning; the first is the canonical one.

>>> REASONING[0]
'reasoning_content'
"""

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

_CALLS = ("function_call", "tool_call")
"""Roles whose content is the JSON text of a call."""

_ARGUMENTS = ("arguments", "parameters", "args", "input")
"""The fields of a call that may hold its arguments; the first that it has is taken."""

_IN_CALL = ("id", "type", "index")
"""The fields of a call that stand beside its function."""


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
    schemas = {str(_function(tool).get("name")): _function(tool).get("parameters") for tool in tools}
    return [
        _message(message, f"{where}: message {number}", schemas if filled else None, parts)
        for number, message in enumerate(messages)
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
        calls, found["content"] = _decoded(found.get("content"), f"{where}: the call in 'content'"), ""
    if isinstance(calls, str):
        calls = _decoded(calls, f"{where}: 'tool_calls'")
    calls = [calls] if isinstance(calls, Mapping) else calls
    if calls is not None and not isinstance(calls, list | tuple):
        raise DataError(f"{where}: 'tool_calls' is {kind(calls)}; give a list of calls, or leave it out")
    read = [_call(call, f"{where}: call {at}", schemas) for at, call in enumerate(calls or ())]
    if isinstance(found.get("function_call"), Mapping):
        call = _call(found.pop("function_call"), f"{where}: 'function_call'", schemas)
        read += [] if call["function"] in [other["function"] for other in read] else [call]
    if read:
        found["tool_calls"] = read
        found.setdefault("content", "")
    for field, remedy in _UNREAD.items():
        if found.get(field):
            raise DataError(f"{where} has '{field}', {described(found[field])}, which no template writes; {remedy}")
    found["content"] = _content(found, message, where, parts)
    _set_reasoning(found, where)
    weight = found.pop("weight", 1)
    if found["role"] == "assistant":
        if not isinstance(weight, int | float) or weight not in (0, 1):
            raise DataError(f"{where}: 'weight' is {described(weight)}; give 1, or 0 for a turn that is not trained")
        found |= {} if weight else {"weight": 0}
    return found


_UNREAD = {
    "tools": "give them as the field 'tools' of the row",
    "refusal": "give it as 'content'",
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


def _content(found: Mapping[str, Any], message: Mapping[str, Any], where: str, parts: bool) -> Any:
    if "content" not in message and "content" not in found:
        raise DataError(f"{where} has no 'content'; it has {fields(message)}")
    content = found.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        texts = [part["text"] for part in content if _is_text(part)]
        if texts and len(texts) == len(content):
            return "".join(texts)
        if parts:
            return content
    raise DataError(f"{where}: 'content' is {kind(content)}; give a text")


def _is_text(part: Any) -> bool:
    kinds = ("text", "input_text", "output_text")
    return isinstance(part, Mapping) and part.get("type", "text") in kinds and isinstance(part.get("text"), str)


def _set_reasoning(message: dict[str, Any], where: str) -> None:
    given = {name: message.pop(name) for name in REASONING if name in message}
    for name, value in given.items():
        if not isinstance(value, str):
            raise DataError(f"{where}: '{name}' is {kind(value)}; give a text")
    texts = {value: name for name, value in given.items() if value} or {value: name for name, value in given.items()}
    if len(texts) > 1:
        raise DataError(f"{where}: {' and '.join(map(repr, texts.values()))} differ; give its reasoning once")
    for text, name in texts.items():
        message[REASONING[0]] = text
        content = message["content"]
        if not text or not isinstance(content, str) or "</think>" not in content:
            continue
        if split_content(content)[0] == text.strip():
            del message[REASONING[0]]  # templates read that of the content
        elif content.lstrip().startswith("<think>"):
            raise DataError(f"{where}: '{name}' and the reasoning in 'content' differ; give its reasoning once")


def split_content(content: str) -> tuple[str, str]:
    """Return the reasoning that a content has before its last ``</think>``, and the content behind that mark.

    Templates that read reasoning of the content take it apart there.

    >>> split_content("<think>Easy.</think>2"), split_content("2")
    (('Easy.', '2'), ('', '2'))
    """
    reasoning, mark, answer = content.rpartition("</think>")
    return (reasoning.strip().removeprefix("<think>").strip(), answer) if mark else ("", content)


def _call(call: Any, where: str, schemas: Mapping[str, Any] | None) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise DataError(f"{where} is {kind(call)}; give {{'function': {{'name': ..., 'arguments': ...}}}}")
    call = {key: value for key, value in call.items() if value is not None}
    function = call.get("function")
    if isinstance(function, Mapping):
        for key in ("name", *_ARGUMENTS):
            if key in call and read_arguments(call[key]) != read_arguments(function.get(key)):
                raise DataError(f"{where} has another '{key}' beside its 'function' than in it; leave one of them out")
    else:
        function = {key: value for key, value in call.items() if key not in _IN_CALL}
        call = {key: value for key, value in call.items() if key in _IN_CALL}
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise DataError(f"{where} has no 'name' of a function; it has {fields(function)}")
    texts = {key: function[key] for key in _ARGUMENTS if function.get(key)}
    if any(read_arguments(value) != read_arguments(function[next(iter(texts))]) for value in texts.values()):
        raise DataError(f"{where} of '{shown(name)}': {' and '.join(map(repr, texts))} differ; give its arguments once")
    key = next((key for key in (*texts, *_ARGUMENTS) if key in function), "arguments")
    given = function.get(key)
    arguments = read_arguments(given)
    if isinstance(arguments, list | tuple) and all(isinstance(each, tuple) and len(each) == 2 for each in arguments):
        arguments = dict(arguments)  # a map of Arrow
    if not isinstance(arguments, str | Mapping):
        raise DataError(f"{where} of '{shown(name)}': '{key}' is {kind(arguments)}; give an object")
    if schemas is not None and not isinstance(given, str):
        arguments = _without_filler(arguments, schemas.get(name))
    others = {
        field: value for field, value in function.items() if field not in ("name", key, *texts) and value is not None
    }
    return {"type": "function", **call, "function": {"name": name, "arguments": arguments, **others}}


def read_arguments(arguments: Any) -> Any:
    """Return the arguments of a call as an object: of JSON text, what it says; of nothing, an empty one.

    A text that is no JSON object, or that names an argument twice, stays a text.

    >>> read_arguments('{"a": 2}'), read_arguments("a=2"), read_arguments(None)
    ({'a': 2}, 'a=2', {})
    """
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        return arguments
    found: Any = arguments.strip() or "{}"
    try:
        for _ in range(2):  # some rows encode the text of the object again
            found = json.loads(found, object_pairs_hook=_unique) if isinstance(found, str) else found
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice")
    return found


def _without_filler(value: Any, schema: Any) -> Any:
    """Return an argument without the nulls that Arrow filled in: those of fields that the schema does not require."""
    schema = schema if isinstance(schema, Mapping) else {}
    if isinstance(value, Mapping):
        properties, required = schema.get("properties"), schema.get("required")
        inner = properties if isinstance(properties, Mapping) else {}
        needed = required if isinstance(required, list | tuple) else ()
        return {
            key: _without_filler(each, inner.get(key))
            for key, each in value.items()
            if each is not None or key in needed
        }
    return [_without_filler(each, schema.get("items")) for each in value] if isinstance(value, list) else value


def canonical_tools(tools: Any, where: str, *, filled: bool = False) -> list[dict[str, Any]]:
    """Return tools as a list of JSON schemas of functions in OpenAI's form; empty: there are none.

    Args:
        tools: a list of schemas, or its JSON text. A schema may be JSON text, too, and may stand without the
            ``"function"`` around it.
        where: how errors name them.
        filled: as in `canonical_messages`. Then nulls in schemas are left out.

    Raises:
        DataError: they are no such list.

    >>> canonical_tools('[{"name": "add", "parameters": {"type": "object"}}]', "the tools")
    [{'type': 'function', 'function': {'name': 'add', 'parameters': {'type': 'object'}}}]
    """
    if tools is None or (isinstance(tools, str) and not tools.strip()):
        return []
    given = tools
    if isinstance(tools, str):
        with suppress(ValueError, RecursionError):
            tools, filled = json.loads(tools), False
    tools = [] if tools is None else tools
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise DataError(f"{where} is {kind(given)}; give a list of JSON schemas of functions, or its JSON text")
    return [_tool(tool, where, filled) for tool in tools]


def _tool(given: Any, where: str, filled: bool) -> dict[str, Any]:
    decoded: Any = given
    if isinstance(given, str):
        with suppress(ValueError, RecursionError):
            decoded, filled = json.loads(given), False
    if not isinstance(decoded, Mapping):
        raise DataError(f"{where} is a list of {kind(given)}; give a list of JSON schemas of functions")
    tool: dict[str, Any] = dict(_without_nulls(decoded) if filled else decoded)
    if not isinstance(tool.get("function"), Mapping) and isinstance(tool.get("name"), str):
        own = {key: value for key, value in tool.items() if key != "type" or value != "function"}
        tool = {"type": "function", "function": own}
    function = _function(tool)
    if isinstance(function.get("parameters"), str):
        parameters = _decoded(function["parameters"], f"{where}: 'parameters' of '{function.get('name')}'")
        tool["function"] = {**function, "parameters": parameters}
    return tool


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    found = tool.get("function")
    return found if isinstance(found, Mapping) else tool


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _decoded(text: Any, where: str) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        raise DataError(f"{where} is {shown(repr(text))}, which is no JSON; give JSON text") from None


def before_answers[M: Mapping[str, Any]](messages: Sequence[M]) -> list[M]:
    """Return messages without the assistant's at their end, of which there may be several.

    >>> before_answers([{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}])
    [{'role': 'user', 'content': '1+1='}]
    """
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    return list(messages[:end])
