"""Checks of prompts, chats and paths, and the words that errors describe them with."""

import functools
import numbers
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nrl.arguments import described, register_kind, with_article
from nrl.errors import DataError

__all__ = [
    "Tokenizer",
    "check_messages",
    "check_prompt",
    "check_text_alone",
    "exists",
    "fields",
    "find_media",
    "kind",
    "shown",
]


def shown(text: str, most: int = 60) -> str:
    """A text for a message, cut to at most so many characters."""
    return text if len(text) <= most else text[: most - 3] + "..."


def kind(value: Any) -> str:
    """The words for a value's type in a message, such as ``a list``."""
    return "nothing (null)" if value is None else with_article(type(value).__name__)


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


_MEDIA = re.compile(
    r"(the_)?(input_|prompt_)?(image|img|picture|photo|screenshot|video|audio|speech|sound|clip)s?"
    r"(_?(url|path|file|filename|bytes|base64|b64|data|list|array|tensor)s?)?(_?\d+)?"
    r"|pixel_values(_videos)?|input_features|multi_?modal_data|mm_data|media"
)
"""Names of columns that hold what is no text."""

_REFERENCE = re.compile(
    r"\S+\.(apng|avif|bmp|gif|jpe?g|png|svg|tiff?|webp|avi|m4v|mkv|mov|mp4|mpe?g|webm|aac|flac|m4a|mp3|ogg|opus|wav)"
    r"|(https?|s3|gs|file)://\S+|data:\S+|[\w+/-]{200,}=*",
    re.IGNORECASE,
)
"""A file name, an address, or base64: texts that stand for something else than themselves."""


def check_text_alone(row: Mapping[Any, Any], place: str, template: str = "") -> None:
    """Check that a row holds no pictures, films or sounds, which nothing reads.

    Rows without their pictures would teach a model to answer questions about what it does not see.

    Args:
        row: with the columns of a file.
        place: how errors name it.
        template: of the prompt; a column that it writes is read.

    Raises:
        DataError: a column holds some.

    >>> check_text_alone({"prompt": "What is this?", "image": None, "image_width": 640}, "row 0")
    >>> check_text_alone({"prompt": "What is this?", "image": "cat.png"}, "row 0")
    Traceback (most recent call last):
    nrl.errors.DataError: row 0 has 'image', 'cat.png', and nothing here reads it: models of nrl see text alone, and \
would learn to answer about what they do not see. Take rows that text alone can answer, or leave the column out: \
format=lambda row: {key: row[key] for key in row if key != 'image'}
    """
    if not isinstance(row, Mapping):
        raise DataError(f"{place} is {described(row)}; give a mapping, such as {{'prompt': '...'}}")
    unread = {key: value for key, value in row.items() if f"{{{key}" not in template}
    if (key := find_media(unread)) is not None:
        raise DataError(
            f"{place} has '{key}', {described(row[key])}, and nothing here reads it: models of nrl see text alone, and "
            "would learn to answer about what they do not see. Take rows that text alone can answer, or leave the "
            f"column out: format=lambda row: {{key: row[key] for key in row if key != '{key}'}}"
        )


def find_media(row: Mapping[Any, Any]) -> Any:
    """Return the name of the first field that holds a picture, a film or a sound; None: there is none.

    >>> find_media({"content": "What is this?", "images": ["cat.png"]})
    'images'
    """
    held = (key for key, value in row.items() if _is_media(value) or (_names_media(key) and _may_be_media(value)))
    return next(held, None)


@functools.lru_cache(maxsize=4096)
def _names_media(key: Any) -> bool:
    return isinstance(key, str) and _MEDIA.fullmatch(re.sub(r"[\s-]", "_", key).lower()) is not None


def _may_be_media(value: Any) -> bool:
    """Whether a value of such a column is a picture, a film or a sound, or names one; prose and numbers are neither."""
    if isinstance(value, str):
        return _REFERENCE.fullmatch(value) is not None
    if value is None or isinstance(value, bool | numbers.Number):
        return False
    if isinstance(value, list | tuple):
        return any(map(_may_be_media, value))
    return not hasattr(value, "__len__") or len(value) > 0  # bytes, a mapping, an array, or a picture of a library


def _is_media(value: Any) -> bool:
    """Whether a value is a picture or a sound as Hugging Face's datasets have it, whatever its column is called."""
    if isinstance(value, list | tuple) and value:
        return any(map(_is_media, value[:8]))
    if isinstance(value, Mapping):
        has_bytes = {*value} == {"bytes", "path"} and (value["bytes"] is not None or value["path"] is not None)
        return has_bytes or {"array", "sampling_rate"} <= {*value}
    return type(value).__module__.partition(".")[0] in ("PIL", "torchcodec")


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
