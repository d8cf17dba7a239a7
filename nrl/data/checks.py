"""Checks of prompts and chats, and the words that errors describe them with."""

from collections.abc import Mapping, Sequence
from typing import Any

from nrl.errors import DataError

__all__ = ["check_messages", "check_prompt", "fields", "kind", "shown"]


def shown(text: str, most: int = 60) -> str:
    """The beginning of a text, of at most so many characters.

    >>> shown("a" * 100) == "a" * 57 + "..."
    True
    """
    return text if len(text) <= most else text[: most - 3] + "..."


def kind(value: Any) -> str:
    """What a value is, as errors say it.

    >>> kind(None), kind([1])
    ('nothing (null)', 'a list')
    """
    return "nothing (null)" if value is None else f"a {type(value).__name__}"


def fields(row: Mapping[Any, Any]) -> str:
    """The names that a row has.

    >>> fields({"question": 1, "answer": 2})
    'question, answer'
    """
    return shown(", ".join(map(str, row))) or "no fields"


def check_prompt(prompt: Any, what: str) -> None:
    """A text, a chat that waits for an answer, or token ids; none of them empty.

    Args:
        prompt: to be looked at.
        what: how errors name it.

    Raises:
        DataError: it is none of the three.

    >>> check_prompt("1+1=", "row 0: 'prompt'")
    """
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise DataError(f"{what} is {kind(prompt)}; give a text, a list of messages, or a list of token ids")
    if not prompt:
        raise DataError(f"{what} is empty; give a text, at least one message, or at least one token id")
    if isinstance(prompt, str):
        return
    if isinstance(prompt[0], Mapping):
        check_messages(prompt, what)
        if prompt[-1]["role"] == "assistant":
            raise DataError(
                f"{what} ends with the assistant's message, which leaves nothing to answer; leave it out, or give the "
                "whole conversation as 'messages'"
            )
        return
    for position, token in enumerate(prompt):
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            found = shown(repr(token))
            raise DataError(f"{what}: entry {position} is {found}; give a list of messages, or of token ids from 0")


def check_messages(messages: Any, what: str) -> None:
    """At least one message, each with a role and a content, which are texts.

    Args:
        messages: to be looked at.
        what: how errors name them.

    Raises:
        DataError: they are not; it names the message.

    >>> check_messages([{"role": "user", "content": "1+1="}], "row 0: 'messages'")
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise DataError(f"{what} is {kind(messages)}; give a list of messages")
    if not messages:
        raise DataError(f"{what} is empty; give at least one message")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise DataError(f"{what}: message {number} is {kind(message)}; give {{'role': ..., 'content': ...}}")
        for field in ("role", "content"):
            if field not in message:
                raise DataError(f"{what}: message {number} has no '{field}'; it has {fields(message)}")
            if not isinstance(message[field], str):
                raise DataError(f"{what}: message {number}: '{field}' is {kind(message[field])}; give a text")
