"""Token ids of texts: of prompts that are texts, of what follows another text, and of what a chat template wrote."""

import functools
import re
import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

from nrl.data.checks import shown
from nrl.data.control_tokens import ChatText, control_tokens, find_breaks
from nrl.errors import DataError

__all__ = ["encode", "encode_prompt"]

_CHARACTERS, _MARGIN = 8, 64  # of a token, more than most have; tokens that may depend on where a text was cut
_HEAD = 1000  # characters


def encode(
    text: str | ChatText,
    tokenizer: Any,
    max_tokens: int | None = None,
    *,
    spelled: bool = False,
    continues: bool = False,
    start: int = 0,
) -> list[int]:
    """Return the token ids of a text alone; special tokens in it are single ids, and none are added.

    Args:
        text: any, or what `render_chat` returned.
        tokenizer: a transformers tokenizer.
        max_tokens: how many ids are wanted; None: all. Encoding takes about a second a megabyte, so a longer text is
            read only as far as these ids reach, and a little further, since the last ids of a part depend on its end.
        spelled: whether control tokens in the text are only spelled, so that they are text.
        continues: whether the text follows another, so that the tokenizer puts no space before it.
        start: where text that only spells control tokens begins.

    Raises:
        DataError: the text has a half of a surrogate pair.
    """
    chat = ChatText(text) if isinstance(text, str) else text
    size = len(chat.text) if max_tokens is None else _CHARACTERS * max_tokens + _MARGIN
    while chat.text:
        part = chat.part(0, size)
        breaks = find_breaks(part.text, tokenizer, start) if spelled else part.breaks
        edges = [0, *breaks, len(part.text)]
        pieces = [part.text[first:stop] for first, stop in pairwise(edges)]
        ids = _encoded(pieces[0], tokenizer, continues)
        if len(pieces) > 1:
            ids += [token for piece in _behind(pieces[1:], tokenizer) for token in piece]
        if max_tokens is None or size >= len(chat.text) or len(ids) >= max_tokens + _MARGIN:
            return ids[:max_tokens]
        size *= 4
    return []


def _encoded(text: str, tokenizer: Any, continues: bool) -> list[int]:
    return _behind([text], tokenizer)[0] if continues else _batch([text], tokenizer)[0]


def _behind(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """The ids of texts that follow others, without the space that a tokenizer puts before the first word of a text."""
    alone = _batch(texts, tokenizer)
    if not _prepends(tokenizer):
        return alone
    head, *rest = _batch(["\n", *("\n" + text for text in texts)], tokenizer)
    pairs = zip(alone, rest, strict=True)
    return [ids[len(head) :] if ids[: len(head)] == head else whole for whole, ids in pairs]


def _batch(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    # A text that spells many control tokens is cut into many pieces, most of which are the same few
    single = list(dict.fromkeys(texts))
    try:
        if len(single) == 1:
            ids = list(tokenizer.encode(single[0], add_special_tokens=False))
            return [ids for _ in texts]
        batch = dict(zip(single, tokenizer(single, add_special_tokens=False)["input_ids"], strict=True))
        return [list(batch[text]) for text in texts]
    except (TypeError, UnicodeError):  # JSON can write halves of a character, which no encoding has
        half = next((text for text in texts if re.search(r"[\ud800-\udfff]", text)), texts[0])
        raise DataError(f"render: {shown(ascii(half))} has a half of a surrogate pair, which is no character") from None


_PREPENDS: "WeakKeyDictionary[Any, bool]" = WeakKeyDictionary()


def _prepends(tokenizer: Any) -> bool:
    """Whether a tokenizer writes something before the first word of a text, as many put a space there."""
    if tokenizer not in _PREPENDS:
        head, *words = (tokenizer.encode(text, add_special_tokens=False) for text in ("\n", "a", "\na", "|", "\n|"))
        _PREPENDS[tokenizer] = words[1] != [*head, *words[0]] or words[3] != [*head, *words[2]]
    return _PREPENDS[tokenizer]


def encode_prompt(text: str, tokenizer: Any, max_tokens: int | None) -> list[int]:
    """Return the token ids of a text with the special tokens that the tokenizer puts before a text, but not twice.

    Args:
        text: any; other control tokens in it are text.
        tokenizer: a transformers tokenizer.
        max_tokens: as for `encode`.
    """
    # The tokens that come before a text depend on its beginning alone
    head = text[:_HEAD]
    short, full = encode(head, tokenizer), list(tokenizer.encode(head))
    starts = (start for start in range(len(full) - len(short) + 1) if full[start : start + len(short)] == short)
    before = full[: next(starts, 0)]
    doubled = bool(before) and short[: len(before)] == before
    opening, own = tokenizer.convert_ids_to_tokens(before) if doubled else [], 0
    if not before and tokenizer.bos_token and text.startswith(tokenizer.bos_token):
        opening = [tokenizer.bos_token]
    for token in opening:  # own: where the text begins, behind the special tokens that it has in front already
        at = text.find(token, own, _HEAD)
        own = own if at < 0 else at + len(token)
    if find_breaks(head, tokenizer, own) and (match := control_tokens(tokenizer).pattern.search(head, own)):
        _warn_once(match[0])
    ids = encode(text, tokenizer, max_tokens, spelled=True, start=own)
    return (ids if doubled else before + ids)[:max_tokens]


@functools.cache
def _warn_once(token: str) -> None:
    warnings.warn(
        f"render: a prompt that is a text spells the control token {token!r}, which is read as text. Give messages, or "
        "a tokenizer that reads control tokens in every text: nrl.data.parse_special(tokenizer)",
        stacklevel=2,
    )
