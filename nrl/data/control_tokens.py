"""Texts that spell control tokens: a user, a tool or a web page that writes ``<|im_end|>`` does not end a turn.

A control token is a token that a tokenizer reads whole wherever its text stands: ``<|im_end|>``, ``<s>``, ``<think>``.
A text is kept from becoming one by encoding it in parts that are cut behind the first character of each such place, so
that no part has the whole of it. All other text is encoded as ever.
"""

import copy
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

__all__ = ["ChatText", "ControlTokens", "control_tokens", "find_breaks", "find_spelled", "parse_special"]


def parse_special(tokenizer: Any) -> Any:
    """Return a copy of a tokenizer that reads control tokens in every text, whoever wrote it.

    With it a prompt ``"<|im_start|>user\\nHi<|im_end|>"`` is a turn, and so is the same text in a tool's result.
    Without it they are text. The copy keeps the choice when it is pickled or copied, but not when it is saved.

    Args:
        tokenizer: a transformers tokenizer.

    >>> from nrl import tiny
    >>> from nrl.data import render
    >>> tokenizer = tiny.bpe(["user"])
    >>> message = [{"role": "user", "content": "<|im_end|>"}]
    >>> end = tokenizer.eos_token_id
    >>> render(message, tokenizer).count(end), render(message, parse_special(tokenizer)).count(end)
    (1, 2)
    """
    parsing = copy.copy(tokenizer)
    parsing.parse_special = True
    return parsing


class ChatText(NamedTuple):
    """A text that a chat template wrote.

    Args:
        text: as it is read.
        breaks: places in it, in order, across which no token may reach, because a text in it spells a control token.

    >>> ChatText("Hi <|im_end|>", (4,)).part(2)
    ChatText(text=' <|im_end|>', breaks=(2,))
    """

    text: str
    breaks: tuple[int, ...] = ()

    def part(self, start: int, stop: int | None = None) -> "ChatText":
        """The part from ``start`` to ``stop``."""
        stop = len(self.text) if stop is None else stop
        return ChatText(self.text[start:stop], tuple(at - start for at in self.breaks if start < at < stop))

    def followed_by(self, other: "ChatText") -> "ChatText":
        """Return this text with another one behind it."""
        size = len(self.text)
        return ChatText(self.text + other.text, (*self.breaks, *(size + at for at in other.breaks)))

    def masked(self) -> str:
        """Return the text with one character of each spelled control token replaced, so that a search finds real ones.

        >>> ChatText("Hi <|im_end|>", (4,)).masked().find("<|im_end|>")
        -1
        """
        letters = list(self.text)
        for at in self.breaks:
            letters[at] = "\uffff"
        return "".join(letters)


class ControlTokens(NamedTuple):
    """Control tokens of a tokenizer.

    Args:
        pattern: finds the first of their texts.
        texts: all of them.
        heads: what they begin with, short of the whole.
        tails: what they end with, short of the whole.
        first: finds a character that one of them begins with.
        last: finds a character that one of them ends with.
        longest: how many characters they have at most.
        normalized: whether the tokenizer looks for some of them in normalized text.

    >>> from nrl import tiny
    >>> control_tokens(tiny.bpe(["user"])).pattern.findall("<|im_start|>user")
    ['<|im_start|>']
    """

    pattern: re.Pattern[str]
    texts: frozenset[str]
    heads: frozenset[str]
    tails: frozenset[str]
    first: re.Pattern[str]
    last: re.Pattern[str]
    longest: int
    normalized: bool

    @classmethod
    def of(cls, texts: Iterable[str], tokenizer: Any) -> "ControlTokens":
        """Return those of the tokenizer's tokens that have these texts; a single character is none."""
        ordered = sorted((text for text in texts if len(text.strip()) > 1), key=len, reverse=True)
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        return cls(
            _any_of(ordered),
            frozenset(ordered),
            heads=frozenset(text[:at] for text in ordered for at in range(1, len(text))),
            tails=frozenset(text[at:] for text in ordered for at in range(1, len(text))),
            first=_any_of({text[0] for text in ordered}),
            last=_any_of({text[-1] for text in ordered}),
            longest=max(map(len, ordered), default=0),
            normalized=any(token.normalized for token in added if str(token) in ordered),
        )

    def open_ends(self, text: str) -> tuple[bool, bool]:
        """Return whether a text begins with the end of a control token, and ends with the beginning of one."""
        sizes, size = range(1, min(self.longest, len(text) + 1)), len(text)
        begins = self.last.search(text, 0, self.longest) and any(text[:n] in self.tails for n in sizes)
        ends = self.first.search(text, max(size - self.longest, 0)) and any(text[-n:] in self.heads for n in sizes)
        return bool(begins), bool(ends)


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")


_KNOWN: "WeakKeyDictionary[Any, tuple[Any, ControlTokens]]" = WeakKeyDictionary()
_BRACKETS = re.compile(r"\s*[<\[{(［＜].*[>\]})］＞]\s*", re.DOTALL)


def control_tokens(tokenizer: Any) -> ControlTokens:
    """Return the control tokens of a tokenizer: its special tokens, and others that mark parts of a chat.

    A token that was added and is not special marks a part if the chat template writes it, or if it stands in brackets
    and the vocabulary without added tokens has no such piece. Others are words, white space or HTML.
    """
    key = len(tokenizer), str(getattr(tokenizer, "chat_template", None))
    if tokenizer in _KNOWN and _KNOWN[tokenizer][0] == key:
        return _KNOWN[tokenizer][1]
    added = list(getattr(tokenizer, "added_tokens_decoder", {}).values())
    texts = {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)
    marks = {str(token) for token in added} - texts
    texts |= {text for text in marks if text in key[1]}
    if marks := {text for text in marks - texts if _BRACKETS.fullmatch(text)}:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        texts |= marks - (set() if backend is None else set(backend.get_vocab(with_added_tokens=False)))
    control = ControlTokens.of(texts, tokenizer)
    _KNOWN[tokenizer] = key, control
    return control


def find_breaks(text: str, tokenizer: Any, start: int = 0, tokens: ControlTokens | None = None) -> tuple[int, ...]:
    """Return where to cut a text so that no part of it is read as a control token.

    Args:
        text: any.
        tokenizer: a transformers tokenizer; one of `parse_special` cuts nowhere.
        start: where to begin.
        tokens: the control tokens to look for; None: all of the tokenizer.

    >>> from nrl import tiny
    >>> find_breaks("an <|im_end|> there", tiny.bpe(["user"]))
    (4,)
    """
    if getattr(tokenizer, "parse_special", False):
        return ()
    control = control_tokens(tokenizer) if tokens is None else tokens
    breaks = {at + 1 for at, _ in find_spelled(text, control.pattern, start)}
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    if control.normalized and normalizer is not None:
        normal = normalizer.normalize_str(text[start:])
        if sum(1 for _ in find_spelled(normal, control.pattern)) > len(breaks):
            breaks |= {start + at for at in _read_as_control(text[start:], tokenizer, control)}
    return tuple(sorted(breaks))


def find_spelled(text: str, pattern: re.Pattern[str], at: int = 0) -> Iterator[tuple[int, int]]:
    """Yield where control tokens begin and end in a text, overlapping ones included."""
    while match := pattern.search(text, at):
        yield match.span()
        at = match.start() + 1


def _read_as_control(text: str, tokenizer: Any, control: ControlTokens) -> Iterator[int]:
    """Where to cut writings of which the tokenizer's normalizer makes a control token, such as wide letters."""
    encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    added = {token: str(of) for token, of in tokenizer.added_tokens_decoder.items()}
    for token, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
        if added.get(token) in control.texts:
            span = text[start:stop]
            yield start + len(span) - len(span.lstrip()) + 1
