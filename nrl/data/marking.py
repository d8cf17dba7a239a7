"""Marks in the texts of a conversation, which show where what a chat template makes of them has to be cut.

A mark is a private character. It stands behind the first character of each control token that a text only spells.
"""

import bisect
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nrl.data.control_tokens import ChatText, ControlTokens, control_tokens, find_breaks, find_spelled
from nrl.data.turn_tokens import turn_tokens

__all__ = ["Marked", "mark_texts", "unmark"]


class Marked(NamedTuple):
    """Messages and tools with marks, which `unmark` finds in the text that a chat template makes of them.

    Args:
        messages: copies.
        tools: copies; None: there are none.
        within: the mark behind the first character of a control token; empty: there are no marks.
        edge: the mark at an end of a text that a neighbour may complete to a control token.
        plain: the messages without marks, where the assistant's have some: a template may refuse what it reads in them.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    within: str = ""
    edge: str = ""
    plain: list[dict[str, Any]] | None = None


def mark_texts(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, tokenizer: Any
) -> Marked:
    """Mark the places where texts of a conversation have to be cut.

    The assistant writes control tokens itself, such as those around reasoning and calls, so its messages are cut only
    where they spell a token of `nrl.data.turn_tokens`. All other texts are cut at every control token.
    """
    plain = Marked([dict(message) for message in messages], None if tools is None else [dict(tool) for tool in tools])
    if getattr(tokenizer, "parse_special", False):
        return plain
    control = control_tokens(tokenizer)

    def spells(value: Any, tokens: ControlTokens) -> bool:
        return any(find_breaks(text, tokenizer, 0, tokens) or any(tokens.open_ends(text)) for text in _texts(value))

    suspects = [part for part in [*messages, *(tools or [])] if spells(part, control)]
    if not suspects:
        return plain
    turns = turn_tokens(tokenizer, tools)

    def tokens_of(part: Mapping[str, Any]) -> ControlTokens:
        return turns if part.get("role") == "assistant" else control

    suspects = [part for part in suspects if spells(part, tokens_of(part))]
    if not suspects:
        return plain
    every = "".join(_texts([*messages, *(tools or [])])).lower()
    private = map(chr, itertools.chain(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE)))
    unused = (letter for letter in private if letter not in every and _escaped(letter) not in every)
    within, edge = next(unused), next(unused)

    def marked(value: Any, tokens: ControlTokens) -> Any:
        if isinstance(value, Mapping):
            # A role that is no more than a part of a control token is what the template asks for
            role = value.get("role")
            roles = {"role"} if isinstance(role, str) and not find_breaks(role, tokenizer, 0, tokens) else ()
            return {marked(key, tokens): part if key in roles else marked(part, tokens) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [marked(part, tokens) for part in value]
        if not isinstance(value, str):
            return value
        places = (0, *find_breaks(value, tokenizer, 0, tokens), len(value))
        begins, ends = (edge * is_open for is_open in tokens.open_ends(value))
        return begins + within.join(value[start:stop] for start, stop in itertools.pairwise(places)) + ends

    return Marked(
        [marked(message, tokens_of(message)) for message in messages],
        None if tools is None else [marked(tool, control) for tool in tools],
        within,
        edge,
        plain.messages if any(part.get("role") == "assistant" for part in suspects) else None,
    )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)


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
        near = find_spelled(removed[first : place + control.longest], control.pattern)
        return any(start < place - first < stop for start, stop in near)

    breaks = {
        at for match in found if (at := moved(match.end())) and (match[0].lower().endswith(within) or crossed(at))
    }
    return ChatText(removed, tuple(sorted(breaks - {0, len(removed)}))), moved
