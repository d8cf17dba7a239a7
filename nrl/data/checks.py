"""Checks of prompts, chats and paths, and the words that errors describe them with."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nrl.arguments import register_kind
from nrl.errors import DataError

__all__ = ["Tokenizer", "check_messages", "check_prompt", "exists", "fields", "kind", "shown"]


def shown(text: str, most: int = 60) -> str:
    """A text for a message, cut to at most so many characters."""
    return text if len(text) <= most else text[: most - 3] + "..."


def kind(value: Any) -> str:
    """The words for a value's type in a message, such as ``a list``."""
    return "nothing (null)" if value is None else f"a {type(value).__name__}"


def fields(row: Mapping[Any, Any]) -> str:
    """The names of a row's fields, for a message."""
    return shown(", ".join(map(str, row))) or "no fields"


type Tokenizer = Any
"""A transformers tokenizer."""


def _instead_of_tokenizer(value: Any) -> str:
    if isinstance(value, str):
        return f"give nrl.backends.load_tokenizer(nrl.Model({value!r}))"
    return "give a transformers tokenizer, as nrl.backends.load_tokenizer(model) returns one"


register_kind(
    Tokenizer, _instead_of_tokenizer, lambda value: hasattr(value, "eos_token_id") and hasattr(value, "encode")
)


def exists(path: Path) -> bool:
    """Whether there is a file or folder of this name. A text that cannot be a name, such as a long one, names none."""
    try:
        return path.exists()
    except PermissionError:
        return True  # whoever reads it says so
    except (OSError, ValueError):  # a name that is too long for a file, or has a NUL
        return False


def check_prompt(prompt: Any, what: str) -> None:
    """Check that a prompt is a text, a chat that waits for an answer, or token ids, and not empty.

    Args:
        prompt: any value.
        what: how errors name it.

    Raises:
        DataError: it is none of the three.
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
    """Check that there is at least one message, and that each has a role and a content, both texts.

    Args:
        messages: any value.
        what: how errors name them.

    Raises:
        DataError: they are not messages; it names the one that is wrong.
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
