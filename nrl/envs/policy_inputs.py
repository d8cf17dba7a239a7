"""Checks of what the policy reads: the prompts of resets and the observations of steps.

As in `nrl.envs.return_values`, a value is accepted wherever the environment runs, or nowhere, and an `EnvError` says
what to return instead.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nrl.data.messages import canonical_messages, canonical_tools
from nrl.envs.plain_values import BYTES, is_array, named_kind, scalar_value, shown_value
from nrl.errors import DataError, EnvError

__all__ = ["read_observation", "read_prompt"]

_CONVERSATION = {"messages"}
_REQUEST = _CONVERSATION | {"tools", "ids", "stop", "max_new_tokens"}


def read_prompt(prompt: Any, vocabulary: int | None = None, limit: int | None = None) -> Any:
    """Return the prompt of a reset as text, a list of messages, a list of token ids, or an agent's request.

    Args:
        prompt: any value.
        vocabulary: how many tokens the policy's tokenizer has; None: it is not known here.
        limit: how many token ids are wanted; those behind them are not read. None: all.

    Raises:
        EnvError: it is none of the four, or has a token id outside of the vocabulary.

    >>> read_prompt((5, 6), vocabulary=100)
    [5, 6]
    """
    if isinstance(prompt, Mapping) and "tools" not in prompt:
        raise EnvError(
            f"the environment's reset returned {shown_value(prompt)} as the prompt; give text, a list of messages, "
            "token ids, or a request with 'messages' and 'tools'"
        )
    return _read_input(prompt, "the prompt", "give text, a list of messages, or token ids", vocabulary, limit)


def read_observation(observation: Any, vocabulary: int | None = None, limit: int | None = None) -> Any:
    """Return an observation as text, a list of messages or of token ids, a whole conversation, or a request.

    Args:
        observation: of a step that is not done.
        vocabulary: how many tokens the policy's tokenizer has; None: it is not known here.
        limit: how many token ids are wanted; those behind them are not read. None: all.

    Raises:
        EnvError: it is nothing that the policy could read, or has a token id outside of the vocabulary.

    >>> read_observation("more"), read_observation([{"role": "user", "content": "more"}])
    ('more', [{'role': 'user', 'content': 'more'}])
    """
    if observation is None:
        raise EnvError("the step is not done, and it has no observation; return Step(..., done=True) or an observation")
    return _read_input(observation, "the observation", "return text, messages or token ids", vocabulary, limit)


def _read_input(value: Any, whose: str, remedy: str, vocabulary: int | None, limit: int | None) -> Any:
    if isinstance(value, str):
        return value if type(value) is str else str.__str__(value)
    if isinstance(value, Mapping):
        return _read_conversation(value, whose)
    if isinstance(value, BYTES):
        raise EnvError(f"{whose} is {shown_value(value)}, bytes; decode them to text, or give a list of token ids")
    if inspect.isawaitable(value):
        raise EnvError(f"{whose} is {shown_value(value)}, which was not awaited; await it, and {remedy}")
    parts = value[:limit] if limit is not None and is_array(value) else value
    parts = parts.tolist() if is_array(parts) else parts
    if not isinstance(parts, list | tuple):
        raise EnvError(f"{whose} is {shown_value(value)}; {remedy}")
    if any(isinstance(part, Mapping) for part in parts[:1]):
        return _read_messages(parts, whose)
    return _read_token_ids(parts[:limit], whose, remedy, vocabulary)


def _read_token_ids(parts: Sequence[Any], whose: str, remedy: str, vocabulary: int | None) -> list[int]:
    ids = list(parts)
    if not set(map(type, ids)) <= {int}:
        ids = [_token_id(place, part, whose, remedy) for place, part in enumerate(ids)]
    if ids and (min(ids) < 0 or (vocabulary is not None and max(ids) >= vocabulary)):
        place, token = next(
            each for each in enumerate(ids) if each[1] < 0 or (vocabulary is not None and each[1] >= vocabulary)
        )
        last = "" if vocabulary is None else f"; the tokenizer's last is {vocabulary - 1}"
        raise EnvError(f"{whose} has the token id {token:.20g} at place {place}{last}; encode it with that tokenizer")
    return ids


def _token_id(place: int, part: Any, whose: str, remedy: str) -> int:
    plain = scalar_value(part)
    if isinstance(plain, bool) or not isinstance(plain, int):
        raise EnvError(
            f"{whose}: entry {place} is {shown_value(part)}, {named_kind(part)}, which is no token id; {remedy}"
        )
    return int(plain)


def _read_messages(messages: Iterable[Any], whose: str) -> list[Mapping[str, Any]]:
    """Messages in the canonical form; those that stand for a turn of the model are left as they are."""
    read = list(messages)
    for place, message in enumerate(read):
        where = f"{whose}: message {place}"
        if not isinstance(message, Mapping):
            raise EnvError(f"{where} is {named_kind(message)}; give {{'role': ..., 'content': ...}}")
        role, content = (
            message.get(name, message.get(other)) for name, other in (("role", "from"), ("content", "value"))
        )
        calls = message.get("tool_calls")
        if not isinstance(role, str):
            raise EnvError(f"{where} has {shown_value(role)} as its 'role'; give a text, such as 'user'")
        if "turn" in message:
            continue
        if content is None and not calls and not message.get("function_call"):
            raise EnvError(f"{where} has no 'content', only {shown_value(list(message))}; give a text")
        if not isinstance(content, str | None) and not _is_parts(content):
            raise EnvError(f"{where} has {shown_value(content)} as its 'content'; give a text, or a list of parts")
        try:
            (read[place],) = canonical_messages([message], where, parts=True)
        except DataError as error:
            raise EnvError(str(error).replace(f"{where}: message 0", where, 1)) from None
    return read


def _is_parts(content: Any) -> bool:
    """Whether a content is a list of parts, each a text or a mapping."""
    return isinstance(content, list | tuple) and all(isinstance(part, str | Mapping) for part in content)


def _read_conversation(value: Mapping[str, Any], whose: str) -> dict[str, Any]:
    """A whole conversation, or an agent's request."""
    if "role" in value:
        raise EnvError(f"{whose} is one message; return a list of messages")
    messages = value.get("messages")
    known = _REQUEST if "tools" in value else _CONVERSATION
    if not set(value) <= known or not isinstance(messages, list | tuple):
        raise EnvError(
            f"{whose} is {shown_value(value)}; return {{'messages': [...]}} with the whole conversation "
            "(and the 'tools' of an agent), a list of messages to append, text, or token ids"
        )
    read = dict(value) | {"messages": _read_messages(messages, whose)}
    if "tools" in read:
        _check_request(read, whose)
        read["tools"] = canonical_tools(read["tools"], f"{whose}: 'tools'")
    return read


def _check_request(request: Mapping[str, Any], whose: str) -> None:
    tools, stop, most = (request.get(name) for name in ("tools", "stop", "max_new_tokens"))
    if not isinstance(tools, list | tuple) or any(not isinstance(tool, Mapping) for tool in tools):
        raise EnvError(
            f"{whose} has 'tools' that are {shown_value(tools)}; give a list of JSON schemas, which may be empty"
        )
    if not isinstance(request.get("ids", False), bool | None):
        raise EnvError(f"{whose} has 'ids' that are {shown_value(request['ids'])}; give True or False")
    texts = isinstance(stop, list | tuple) and all(isinstance(text, str) and text for text in stop)
    if "stop" in request and not texts:
        raise EnvError(f"{whose} has 'stop' that is {shown_value(stop)}; give a list of texts that are not empty")
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise EnvError(f"{whose} has 'max_new_tokens' that is {shown_value(most)}; give at least 1, or leave it out")
