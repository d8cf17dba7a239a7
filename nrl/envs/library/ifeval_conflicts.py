"""Constraints of one task that no text fulfils together, such as lower case and capitals."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

__all__ = ["Constraint", "find_conflict"]

_COMMAS = frozenset(",\uff0c\u3001\u060c\ufe50\ufe51\uff64")
_QUOTES = '"\u201c\u201e\u00ab\u00bb\u300c\u300e\uff02', '"\u201d\u201c\u00bb\u00ab\u300d\u300f\uff02'
_JSON = '{["-0123456789tfn`', '}]"0123456789eln`'  # what JSON may begin and end with, in a fence too
_COUNTS = ("words", "sentences", "paragraphs", "lines", "bullets", "placeholders")
_AT_LEAST_ONE = ("words", "sentences", "paragraphs", "lines")  # of which a text without any has no words
_NO_MORE_THAN = {"sentences": "words", "paragraphs": "lines", "bullets": "lines"}


class Constraint(NamedTuple):
    """A constraint: its name, and its arguments.

    >>> str(Constraint("words", {"most": 3}))
    "{'words': {'most': 3}}"
    """

    name: str
    how: Mapping[str, Any]

    def __str__(self) -> str:
        return repr({self.name: dict(self.how)}) if self.how else repr(self.name)

    @property
    def least(self) -> int:
        """The fewest that it asks for."""
        return int(self.how.get("least") or 0)

    @property
    def most(self) -> int | None:
        """The most that it allows; None: it says none."""
        return self.how.get("most")


class _Needed(NamedTuple):
    """A text that a response must have: somewhere, at its beginning or at its end."""

    text: str
    side: str
    of: Constraint


def find_conflict(
    constraints: Sequence[Constraint], holds: Callable[[str, str], int], words: Callable[[str], Any]
) -> str:
    """Return which constraints cannot be fulfilled together; empty: none is known.

    Args:
        constraints: each by itself has arguments that it takes.
        holds: how often a text has a word, as the checks count it.
        words: splits a text into words, as the checks do.

    >>> both = [Constraint("lowercase", {}), Constraint("uppercase", {})]
    >>> find_conflict(both, str.count, str.split)
    "'lowercase' and 'uppercase' cannot both be fulfilled"
    """
    needed = list(_needed(constraints))
    for conflict in (
        *_names(constraints),
        *_bounds(constraints, needed, words),
        *_texts(constraints, needed, holds),
    ):
        first, second = conflict
        if first is second:
            return f"{first} cannot be fulfilled by a text that has words"
        return f"{first} and {second} cannot both be fulfilled"
    return ""


type _Pairs = Iterator[tuple[Constraint, Constraint]]


def _names(constraints: Sequence[Constraint]) -> _Pairs:
    """Yield constraints that exclude each other whatever their arguments."""
    excluded = ({"lowercase", "uppercase"}, {"lowercase", "postscript"}, {"json", "postscript"})
    for first, second in combinations(constraints, 2):
        if {first.name, second.name} in excluded:
            yield first, second
        if {first.name, second.name} == {"json", "bullets"} and max(first.least, second.least) > 0:
            yield first, second


def _needed(constraints: Sequence[Constraint]) -> Iterator[_Needed]:
    for one in constraints:
        if one.name == "contains":
            yield from (_Needed(word, "within", one) for word in one.how["words"])
        if one.name in ("begins", "ends"):
            yield _Needed(one.how["with"], one.name, one)
        if one.name == "repeats" and one.least:
            yield _Needed(one.how["word"], "within", one)


def _key(one: Constraint) -> tuple[str, str]:
    """What a constraint counts."""
    return one.name, str(one.how.get("word", one.how.get("letter", ""))).lower()


def _bounds(constraints: Sequence[Constraint], needed: Sequence[_Needed], words: Callable[[str], Any]) -> _Pairs:
    """Yield constraints of which one asks for more than the other allows."""
    counted = [one for one in constraints if one.name in (*_COUNTS, "repeats", "letter")]
    for one in counted:
        if one.most == 0 and one.name in _AT_LEAST_ONE:
            yield one, one
        for other in counted:
            most = other.most
            if most is None or one is other:
                continue
            if one.least > most and (_key(one) == _key(other) or _NO_MORE_THAN.get(one.name) == other.name):
                yield one, other
    for limit in (one for one in counted if one.name == "words" and one.most is not None):
        for one in constraints:
            own = [word for need in needed if need.of is one for word in map(str.lower, words(need.text))]
            least = one.least * len(own) if one.name == "repeats" else len(set(own))
            least = 2 if one.name == "postscript" else least  # "P.S." is two words
            if limit.most is not None and least > limit.most:
                yield one, limit


def _texts(constraints: Sequence[Constraint], needed: Sequence[_Needed], holds: Callable[[str, str], int]) -> _Pairs:
    """Yield constraints of which one asks for a text that the other excludes."""
    for first, second in combinations(needed, 2):
        if first.side == second.side != "within" and not _overlap(first, second):
            yield first.of, second.of
    for need in needed:
        text = need.text
        if need.side != "within":
            text = text.lstrip() if need.side == "begins" else text.rstrip()
        # A word at the open end of such a text may go on, as "no" does in "nothing".
        whole = {"begins": f"{need.text}a", "ends": f"a{need.text}"}.get(need.side, need.text)
        for one in constraints:
            excluded = {
                "lowercase": need.side != "within" and text != text.lower(),
                "uppercase": need.side != "within" and text != text.upper(),
                "no_commas": not _COMMAS.isdisjoint(text),
                "avoids": one.name == "avoids" and any(holds(whole, word) for word in one.how["words"]),
                "repeats": one.name == "repeats" and one.most is not None and holds(whole, one.how["word"]) > one.most,
                "letter": one.name == "letter"
                and one.most is not None
                and text.lower().count(one.how["letter"].lower()) > one.most,
                "quoted": _wrong_end(need.side, text, _QUOTES),
                "json": _wrong_end(need.side, text, _JSON),
            }
            if excluded.get(one.name) and one is not need.of:
                yield need.of, one


def _overlap(first: _Needed, second: _Needed) -> bool:
    short, long = sorted((first.text, second.text), key=len)
    return long.startswith(short) if first.side == "begins" else long.endswith(short)


def _wrong_end(side: str, text: str, ends: tuple[str, str]) -> bool:
    if side == "begins":
        return text[:1] not in ends[0]
    return side == "ends" and text[-1:] not in ends[1]
