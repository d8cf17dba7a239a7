"""`constraints`: instructions that a program can check, such as a number of words.

The kinds are those of IFEval (Zhou et al., 2023, 2311.07911), by names of our own. A task's ``"constraints"`` is a
list, each a name, or a name with arguments: ``{"words": {"most": 50}}``. Every check is linear in the text.
Arguments under which every text would be right, or none, are an error of the task: no ``least`` or ``most`` at all, a
``least`` above the ``most``, an empty text, a text where a list belongs.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nrl.envs.library.ifeval_conflicts import Constraint, find_conflict
from nrl.envs.plain_values import shown_value
from nrl.envs.types import Score, Task, Trace
from nrl.errors import EnvError

__all__ = ["CONSTRAINTS", "constraints"]


def _between(count: int, least: int = 0, most: int | None = None) -> bool:
    for each in (least, most):
        if each is not None and (isinstance(each, bool) or not isinstance(each, int) or each < 0):
            raise ValueError(
                f"{shown_value(each)} is no number of things; give least and most as integers that are not negative"
            )
    if most is None and least == 0:
        raise ValueError("every text would do; give least, most or both")
    if most is not None and least > most:
        raise ValueError(f"no text would do; give a least that is not above the most, not {least} and {most}")
    return least <= count and (most is None or count <= most)


def _texts(words: Any) -> Sequence[str]:
    if isinstance(words, str) or not isinstance(words, Sequence) or not words:
        raise ValueError(f"the words are {shown_value(words)}; give a list of texts")
    return [_text(each) for each in words]


def _text(given: Any) -> str:
    if not isinstance(given, str) or not given.strip():
        raise ValueError(f"{shown_value(given)} is found in every text or in none; give a text that is not empty")
    return given


def _words(text: str) -> list[str]:
    """Split a text into runs of letters and digits. A number such as ``3.14`` is a word, ``___`` is none."""
    words = re.findall(r"\w+(?:(?:['\u2019-]|(?<=\d)[.,:](?=\d))\w+)*", text)
    return [word for word in words if word.strip("_'\u2019-")]


_TITLES = frozenset({"dr", "mr", "mrs", "ms", "prof", "rev", "hon", "capt", "col", "gen", "lt", "sgt", "rep", "sen"})
_TITLES |= {"st", "mt", "vs", "e.g", "i.e", "cf", "fig", "no", "nos", "vol", "approx", "ca"}
_ABBREVIATIONS = frozenset({"etc", "al", "a.m", "p.m", "a.d", "b.c", "inc", "ltd", "co", "corp", "dept", "jr", "sr"})
_ABBREVIATIONS |= {"est", "ave", "blvd", "ph.d", "u.s", "u.k", "u.n"}
_STOP = re.compile(
    r"(?<![.!?\u2026])(?P<marks>[.!?\u2026]++)(?P<close>[\"')\]\u201d\u2019\u00bb]*+)(?=\s)\s*"
    r"|[\u3002\uff01\uff1f]+[\u300d\u300f\u201d]*|\n+"
)
_LAST_WORD = re.compile(r"[\w.]+\Z")


def _sentences(text: str) -> list[str]:
    """Split a text into sentences: at stops and line ends, but not behind abbreviations, initials or an ellipsis.

    ``etc.``, ``p.m.`` and an ellipsis end a sentence where a capital letter follows; so does a quotation's own stop,
    in a text that has capital letters.
    """
    text, start, found = text.strip(), 0, list[str]()
    has_capitals = text != text.lower()
    for stop in _STOP.finditer(text):
        marks, close = stop["marks"], stop["close"]
        goes_on = text[stop.end() : stop.end() + 1].islower()
        if marks == "." and not close:
            last_word = _LAST_WORD.search(text[max(start, stop.start() - 20) : stop.start()])
            word = last_word[0] if last_word else ""
            abbreviated = word.lower() in _TITLES or (goes_on and word.lower() in _ABBREVIATIONS)
            if abbreviated or _is_initial(text, stop, word):
                continue
        elif marks is not None and goes_on and (has_capitals if close else set(marks) <= {".", "\u2026"}):
            continue
        found.append(text[start : stop.end()])
        start = stop.end()
    return [sentence for sentence in [*found, text[start:]] if _words(sentence)]


def _is_initial(text: str, stop: re.Match[str], word: str) -> bool:
    """Whether a stop follows an initial, as in ``J. K. Rowling``, and not a last letter, as in ``Take plan B. Go.``."""
    letter = word.rpartition(".")[2]
    if len(letter) != 1 or not letter.isupper() or letter == "I":
        return False
    before = text[max(0, stop.start() - 40) : stop.start() - len(word)].split()
    return not before or before[-1][:1].isupper() or before[-1][-1:] in ".!?"


def _holds(text: str, word: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def _is_json(text: str) -> bool:
    """Whether it is JSON by its standard, which has no ``NaN`` and no ``Infinity``."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    text = text.strip()
    first, newline, rest = text.partition("\n")
    if newline and first.rstrip() in ("```", "```json") and rest.endswith("```"):
        text = rest.removesuffix("```")
    try:
        json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return False
    return True


_BULLET = re.compile(
    r"(?![\s*_-]+\Z)(?:(?:\*(?!\*)|-(?!-))(?:\s+\S|[^\s*-])"
    r"|[+\u2022\u2013\u2014\u25e6\u2023\u2043\u25aa\u25cf\u25cb\u00b7]\s+\S)"
)


def _bullets(text: str) -> int:
    """Count lines that begin with a bullet. As in IFEval, ``*`` and ``-`` need no space, and a number is no bullet."""
    return sum(_BULLET.match(line.strip()) is not None for line in text.splitlines())


def _paragraphs(text: str) -> int:
    before, count = False, 0
    for line in text.splitlines():
        count += bool(line.strip()) and not before
        before = bool(line.strip())
    return count


_QUOTES = {'"': '"', "\u201c": "\u201d", "\u201e": "\u201c\u201d", "\u00ab": "\u00bb", "\u00bb": "\u00ab"}
_QUOTES |= {"\u300c": "\u300d", "\u300e": "\u300f", "\uff02": "\uff02"}
_COMMAS = frozenset(",\uff0c\u3001\u060c\ufe50\ufe51\uff64")


def _is_quoted(text: str) -> bool:
    text = text.strip()
    return len(text) > 2 and text[-1] in _QUOTES.get(text[0], "")


CONSTRAINTS: dict[str, Callable[..., bool]] = {
    "words": lambda text, **how: _between(len(_words(text)), **how),
    "sentences": lambda text, **how: _between(len(_sentences(text)), **how),
    "paragraphs": lambda text, **how: _between(_paragraphs(text), **how),
    "lines": lambda text, **how: _between(len([line for line in text.splitlines() if line.strip()]), **how),
    "bullets": lambda text, **how: _between(_bullets(text), **how),
    "contains": lambda text, words: all(_holds(text, word) for word in _texts(words)),
    "avoids": lambda text, words: not any(_holds(text, word) for word in _texts(words)),
    "repeats": lambda text, word, **how: _between(_holds(text, _text(word)), **how),
    "letter": lambda text, letter, **how: _between(text.lower().count(_text(letter).lower()), **how),
    "begins": lambda text, with_: text.lstrip().startswith(_text(with_)),
    "ends": lambda text, with_: text.rstrip().endswith(_text(with_)),
    "lowercase": lambda text: text == text.lower(),
    "uppercase": lambda text: text == text.upper(),
    "no_commas": lambda text: bool(_words(text)) and _COMMAS.isdisjoint(text),
    "quoted": _is_quoted,
    "titled": lambda text: bool(re.search(r"<<[^<>\n]+>>", text)),
    "placeholders": lambda text, **how: _between(len(re.findall(r"\[[^\[\]\n]+\]", text)), **how),
    "postscript": lambda text: any(re.match(r"P\. ?S\.", line.strip()) for line in text.splitlines()),
    "json": _is_json,
}
"""What can be checked, by name. Those that count take ``least`` and ``most``.

>>> CONSTRAINTS["words"]("One, two.", least=2, most=2), CONSTRAINTS["json"]("{}")
(True, True)
"""


def constraints(task: Task, trace: Trace) -> Score:
    """The share of a task's constraints that the response fulfils; none, if it has no words.

    Args:
        task: ``"constraints"``: names of `CONSTRAINTS`, or mappings from one to its arguments (``with`` for what a
            response begins or ends with).
        trace: its last answer is read.

    Returns:
        From 0 to 1, with the component ``all``, 1 where all are fulfilled, and one for each name.

    Raises:
        EnvError: the task has no ``"constraints"``, or one that does not exist or does not take its arguments, or
            under its arguments every text would do, or none.

    >>> task = {"constraints": ["lowercase", {"words": {"most": 3}}, {"ends": {"with": "."}}]}
    >>> constraints(task, Trace("", ["so it is!"])).reward
    0.6666666666666666
    """
    asked = task.get("constraints")
    if isinstance(asked, str | bytes) or not isinstance(asked, Sequence) or not asked:
        raise EnvError(
            f"constraints: the task's constraints are {shown_value(asked)}; give a list of names, or of mappings from "
            "a name to its arguments"
        )
    text, met = trace.answer, list[tuple[str, bool]]()
    for each in asked:
        name, how = _read(each)
        try:
            arguments = {"with_" if key == "with" else str(key): value for key, value in how.items()}
            met.append((name, bool(CONSTRAINTS[name](text, **arguments))))
        except (TypeError, ValueError) as error:
            raise EnvError(f"constraints: {name} does not take {shown_value(dict(how))}: {error}") from error
    share = sum(kept for _, kept in met) / len(met)
    if not _words(text):
        return Score(0.0, "parse_fail", {"all": 0.0})
    found = {"all": float(share == 1.0)}
    for name, kept in met:
        found[name] = min(found.get(name, 1.0), float(kept))
    return Score(share, components=found)


def _check_task(task: Task) -> str | None:
    """Return which constraints of a task cannot be fulfilled together, as far as `find_conflict` knows.

    Raises:
        EnvError: a constraint does not exist or does not take its arguments.
    """
    constraints(task, Trace("", ["word"]))
    conflict = find_conflict([Constraint(*_read(each)) for each in task["constraints"]], _holds, _words)
    return f"constraints: {conflict}; leave one of them out" if conflict else None


constraints.check_task = _check_task  # type: ignore[attr-defined]


def _read(each: Any) -> tuple[str, Mapping[str, Any]]:
    name, how = each, dict[str, Any]()
    if isinstance(each, Mapping) and len(each) == 1:
        ((name, how),) = each.items()
    if not isinstance(name, str) or name not in CONSTRAINTS or not isinstance(how, Mapping):
        raise EnvError(f"constraints: there is no {shown_value(each)}; there are {', '.join(sorted(CONSTRAINTS))}")
    return name, how
