"""Texts that spell control tokens: a user, a tool or a web page that writes ``<|im_end|>`` does not end a turn.

A control token is a token that a tokenizer reads whole wherever its text stands: ``<|im_end|>``, ``<s>``, ``<think>``.
A text is kept from becoming one by encoding it in parts that are cut behind the first character of each such place, so
that no part has the whole of it. All other text is encoded as ever.
"""

import bisect
import copy
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

__all__ = [
    "ChatText",
    "ControlTokens",
    "Marked",
    "control_tokens",
    "find_breaks",
    "mark_texts",
    "parse_special",
    "unmark",
]


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


class ControlTokens(NamedTuple):
    """The control tokens of a tokenizer.

    Args:
        pattern: finds the first of their texts.
        texts: all of them.
        heads: what they begin with, short of the whole.
        tails: what they end with, short of the whole.
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
    longest: int
    normalized: bool


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
    ordered = sorted((text for text in texts if len(text.strip()) > 1), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, ordered)) or "(?!)")
    control = ControlTokens(
        pattern,
        frozenset(ordered),
        heads=frozenset(text[:at] for text in ordered for at in range(1, len(text))),
        tails=frozenset(text[at:] for text in ordered for at in range(1, len(text))),
        longest=max(map(len, ordered), default=0),
        normalized=any(token.normalized for token in added if str(token) in texts),
    )
    _KNOWN[tokenizer] = key, control
    return control


def find_breaks(text: str, tokenizer: Any, start: int = 0) -> tuple[int, ...]:
    """Return where to cut a text so that no part of it is read as a control token.

    Args:
        text: any.
        tokenizer: a transformers tokenizer; one of `parse_special` cuts nowhere.
        start: where to begin.

    >>> from nrl import tiny
    >>> find_breaks("an <|im_end|> there", tiny.bpe(["user"]))
    (4,)
    """
    if getattr(tokenizer, "parse_special", False):
        return ()
    control = control_tokens(tokenizer)
    breaks = {at + 1 for at, _ in _spelled(text, control.pattern, start)}
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    if control.normalized and normalizer is not None:
        normal = normalizer.normalize_str(text[start:])
        if sum(1 for _ in _spelled(normal, control.pattern)) > len(breaks):
            breaks |= {start + at for at in _read_as_control(text[start:], tokenizer, control)}
    return tuple(sorted(breaks))


def _spelled(text: str, pattern: re.Pattern[str], at: int = 0) -> Iterator[tuple[int, int]]:
    """Where control tokens begin and end, overlapping ones included."""
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


# A mark is a private character. It shows where in the template's text a text of the conversation has to be cut.


class Marked(NamedTuple):
    """Messages and tools with marks, which `unmark` finds in the text that a chat template makes of them.

    Args:
        messages: copies.
        tools: copies; None: there are none.
        within: the mark behind the first character of a control token; empty: there are no marks.
        edge: the mark at an end of a text that a neighbour may complete to a control token.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    within: str = ""
    edge: str = ""


def mark_texts(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, tokenizer: Any
) -> Marked:
    """Mark the places where texts of a conversation have to be cut; the assistant's own stay as they are."""
    plain = Marked([dict(message) for message in messages], None if tools is None else [dict(tool) for tool in tools])
    if getattr(tokenizer, "parse_special", False):
        return plain
    control = control_tokens(tokenizer)
    others = [message for message in messages if message.get("role") != "assistant"]
    texts = list(_texts([*others, *(tools or [])]))
    if not any(find_breaks(text, tokenizer) or any(_open_ends(text, control)) for text in texts):
        return plain
    every = "".join(_texts([*messages, *(tools or [])])).lower()
    private = map(chr, itertools.chain(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE)))
    unused = (letter for letter in private if letter not in every and _escaped(letter) not in every)
    within, edge = next(unused), next(unused)

    def marked(value: Any) -> Any:
        if isinstance(value, Mapping):
            # A role that is no more than a part of a control token is what the template asks for
            roles = {"role"} if isinstance(value.get("role"), str) and not find_breaks(value["role"], tokenizer) else ()
            return {marked(key): part if key in roles else marked(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [marked(part) for part in value]
        if not isinstance(value, str):
            return value
        places = (0, *find_breaks(value, tokenizer), len(value))
        begins, ends = (edge * is_open for is_open in _open_ends(value, control))
        return begins + within.join(value[start:stop] for start, stop in itertools.pairwise(places)) + ends

    return Marked(
        [dict(message) if message.get("role") == "assistant" else marked(message) for message in messages],
        None if tools is None else [marked(tool) for tool in tools],
        within,
        edge,
    )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)


def _open_ends(text: str, control: ControlTokens) -> tuple[bool, bool]:
    """Whether a text begins with the end of a control token, and ends with the beginning of one."""
    sizes = range(1, min(control.longest, len(text) + 1))
    return any(text[:n] in control.tails for n in sizes), any(text[-n:] in control.heads for n in sizes)


def _escaped(mark: str) -> str:
    """How JSON and Python's `repr` write a mark."""
    return json.dumps(mark)[1:-1].lower()


def unmark(text: str, marked: Marked, tokenizer: Any) -> tuple[ChatText, Callable[[int], int]]:
    """Return a text without its marks, which become breaks, and a function from places in it to those of the result.

    A mark at an end of a text is a break only if a control token reaches across it.
    """
    if not marked.within:
        return ChatText(text), lambda place: place
    escaped = "|".join(re.escape(_escaped(mark)[1:]) for mark in (marked.within, marked.edge))
    found = list(re.finditer(rf"{marked.within}|{marked.edge}|\\+(?:{escaped})", text, re.IGNORECASE))
    ends = [match.end() for match in found]
    gone = list(itertools.accumulate((len(match[0]) for match in found), initial=0))

    def moved(place: int) -> int:
        return place - gone[bisect.bisect_right(ends, place)]

    edges = [0, *(at for match in found for at in match.span()), len(text)]
    removed = "".join(text[start:stop] for start, stop in itertools.batched(edges, 2))
    within, control = (marked.within, _escaped(marked.within)), control_tokens(tokenizer)

    def crossed(place: int) -> bool:
        first = max(place - control.longest, 0)
        near = _spelled(removed[first : place + control.longest], control.pattern)
        return any(start < place - first < stop for start, stop in near)

    breaks = {
        at for match in found if (at := moved(match.end())) and (match[0].lower().endswith(within) or crossed(at))
    }
    return ChatText(removed, tuple(sorted(breaks - {0, len(removed)}))), moved
