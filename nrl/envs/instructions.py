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

from nrl.envs.contract import Score, Task, Trace
from nrl.errors import EnvError

__all__ = ["CONSTRAINTS", "constraints"]


def _between(count: int, least: int = 0, most: int | None = None) -> bool:
    for each in (least, most):
        if each is not None and (isinstance(each, bool) or not isinstance(each, int) or each < 0):
            raise ValueError(f"{each!r} is no number of things; give least and most as integers that are not negative")
    if most is None and least == 0:
        raise ValueError("every text would do; give least, most or both")
    if most is not None and least > most:
        raise ValueError(f"no text would do; give a least that is not above the most, not {least} and {most}")
    return least <= count and (most is None or count <= most)


def _texts(words: Any) -> Sequence[str]:
    if isinstance(words, str) or not isinstance(words, Sequence) or not words:
        raise ValueError(f"the words are {words!r}; give a list of texts")
    return [_text(each) for each in words]


def _text(given: Any) -> str:
    if not isinstance(given, str) or not given.strip():
        raise ValueError(f"{given!r} is found in every text or in none; give a text that is not empty")
    return given


def _words(text: str) -> list[str]:
    """Runs of letters and digits; a line to be filled in, such as ``___``, is no word."""
    return [each for each in re.findall(r"\w+(?:['\u2019-]\w+)*", text) if each.strip("_'\u2019-")]


def _sentences(text: str) -> list[str]:
    return [each for each in re.split(r"(?<=[.!?])[\"')\]]*\s+|\n+", text.strip()) if _words(each)]


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


def _bullets(text: str) -> int:
    return sum(re.match(r"(?:[*+-]|\d+[.)])\s+\S", line.strip()) is not None for line in text.splitlines())


def _paragraphs(text: str) -> int:
    before, count = False, 0
    for line in text.splitlines():
        count += bool(line.strip()) and not before
        before = bool(line.strip())
    return count


def _is_quoted(text: str) -> bool:
    text = text.strip()
    return len(text) > 2 and text[0] == text[-1] == '"'


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
    "lowercase": lambda text: text == text.lower() and text != text.upper(),
    "uppercase": lambda text: text == text.upper() and text != text.lower(),
    "no_commas": lambda text: bool(_words(text)) and "," not in text,
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
            f"constraints: the task's constraints are {asked!r}; give a list of names, or of mappings from a name to "
            "its arguments"
        )
    text, met = trace.answer, list[tuple[str, bool]]()
    for each in asked:
        name, how = _read(each)
        try:
            arguments = {"with_" if key == "with" else str(key): value for key, value in how.items()}
            met.append((name, bool(CONSTRAINTS[name](text, **arguments))))
        except (TypeError, ValueError) as error:
            raise EnvError(f"constraints: {name} does not take {dict(how)}: {error}") from error
    share = sum(kept for _, kept in met) / len(met)
    if not _words(text):
        return Score(0.0, "parse_fail", {"all": 0.0})
    found = {"all": float(share == 1.0)}
    for name, kept in met:
        found[name] = min(found.get(name, 1.0), float(kept))
    return Score(share, components=found)


def _read(each: Any) -> tuple[str, Mapping[str, Any]]:
    name, how = each, dict[str, Any]()
    if isinstance(each, Mapping) and len(each) == 1:
        ((name, how),) = each.items()
    if not isinstance(name, str) or name not in CONSTRAINTS or not isinstance(how, Mapping):
        raise EnvError(f"constraints: there is no {each!r}; there are {', '.join(sorted(CONSTRAINTS))}")
    return name, how
