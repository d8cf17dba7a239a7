"""The score that a judge's reply ends with."""

import json
import re
from collections.abc import Iterator
from typing import Any

from nrl.envs.replies import split_reasoning

__all__ = ["read_score"]

_NUMBER = r"(-?\d{1,9}(?:[.,]\d{1,9})?)(?![\d%]|[.,]\d|-\d)"
_OF = rf"\s?(?:/|\bout\s+of\b)\s?{_NUMBER}"
_NAME = (
    r"(?:(?:my|the|final|overall|total)\s){0,3}(?:score|rating|grade|verdict|punktzahl|puntuación)\b"
    r"|最终(?:评分|得分)|评分|得分|分数|スコア|評価|採点|점수|평점"
)
_LINE = re.compile(
    rf"[\s*_`>#\"']{{0,16}}(?:[-•]\s)?(?P<name>{_NAME})?[\s*_`\"']{{0,8}}(?:[:=]|-\s|\b(?:is|of)\b)?(?P<marks>[\s*_`\"'\[({{]{{0,8}})"
    rf"{_NUMBER}[\])}}*_`]{{0,8}}(?:{_OF})?(?:\s?(?:points?\b|分|点|점))?[\s*_`.!\"'\])]{{0,16}}"
    r"(?P<remark>(?:(?<=\s)\(|[,;.:-]\s)\D{0,2000})?",
    re.IGNORECASE,
)
_OUT_OF = re.compile(rf"(?<![\w./-]){_NUMBER}{_OF}(?![\w/])", re.IGNORECASE)
_WITHIN = re.compile(rf"\b(?:score|rating|grade)\s(?:of|is|as)\s[*_`\[]{{0,4}}{_NUMBER}", re.IGNORECASE)
_HEADING = re.compile(rf"[\s*_`>#]{{0,16}}(?:{_NAME})[\s*_`]{{0,4}}:?[\s*_`]{{0,4}}", re.IGNORECASE)
_TAG = re.compile(r"<(score|rating|grade|verdict)>([^<>]{0,200})</\1>", re.IGNORECASE)
_BOXED = re.compile(r"\$?\\boxed\{([^{}]{0,200})\}\$?")
_HEDGE = re.compile(r"\b(?:not|but|or|rather|would|too|wait|actually)\b", re.IGNORECASE)
_WIDE = str.maketrans({0xFEE0 + code: chr(code) for code in range(0x21, 0x7F)} | dict.fromkeys("–—", "-"))
_BRACKETS = re.compile(r"(\\*)([\"'{}\[\]])")
_KEYS = ("score", "rating", "grade", "verdict", "points", "finalscore", "overallscore", "totalscore", "overallrating")
_BEST_KEYS = ("max", "maxscore", "maximum", "outof", "best", "scale")


def read_score(reply: str, low: float, high: float) -> float | None:
    """Read the score that a reply ends with; None: it has none in the range, or one out of another best.

    The reply, or the fenced block at its end, ends with JSON that has a ``"score"``, also within other objects and
    lists, of which the outermost counts; or with a line that is a score: ``SCORE: 8``, ``Score: 8 (good)``, ``8/10``,
    or a sentence with a single "8 out of 10". A number alone counts if it is all. The time is linear.

    Args:
        reply: of the judge; its own reasoning is left out.
        low: the worst score.
        high: the best.

    >>> read_score("Right, but long.\\nSCORE: 8", 0, 10), read_score('{"score": 8}', 0, 10), read_score("Fine.", 0, 10)
    (8.0, 8.0, None)
    """
    text = _unfenced(split_reasoning(reply).answer.translate(_WIDE).strip())
    values, best = _scores_of_json(text)
    if values:
        if any(value != values[0] for value in values) or best not in (None, high):
            return None
        text = f"SCORE: {values[0]}"
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    last = _BOXED.sub(r"\1", _TAG.sub(r"score: \2", lines[-1].strip()))
    is_headed = len(lines) > 1 and _HEADING.fullmatch(lines[-2]) is not None
    score = _score_of_line(last, may_stand_alone=len(lines) == 1 or is_headed)
    if score is None or (score[1] is not None and score[1] != high):
        return None
    return score[0] if low <= score[0] <= high else None


def _score_of_line(line: str, *, may_stand_alone: bool) -> tuple[float, float | None] | None:
    """The score of a line and what it is out of; None: the line has no score, or several."""
    whole = _LINE.fullmatch(line)
    if whole is not None and not (whole["remark"] and _HEDGE.search(whole["remark"])):
        number, best = whole.group(3), whole.group(4)
        if not (whole["name"] or best or may_stand_alone or "[[" in whole["marks"]):
            return None
        if whole["remark"] and not (whole["name"] or best):
            return None
        return _float(number), None if best is None else _float(best)
    pairs = _OUT_OF.findall(line)
    if pairs:
        return (_float(pairs[0][0]), _float(pairs[0][1])) if len(pairs) == 1 else None
    scores = _WITHIN.findall(line)
    return (_float(scores[0]), None) if len(scores) == 1 and len(re.findall(r"\d+(?:[.,]\d+)?", line)) == 1 else None


def _float(number: str) -> float:
    return float(number.replace(",", "."))


def _unfenced(text: str) -> str:
    """What is in the fenced block that a text ends with; a text without one as it is."""
    for fence in ("```", "~~~"):
        if text.endswith(fence) and (start := text.rfind(fence, 0, -3)) >= 0:
            block = text[start + 3 : -3]
            language, _, rest = block.partition("\n")
            return rest.strip() if re.fullmatch(r"\w*[ \t]*", language) and rest.strip() else block.strip()
    return text


def _scores_of_json(text: str) -> tuple[list[Any], float | None]:
    """The scores of the JSON that a text ends with, those that stand outermost; and what they are out of."""
    start = _json_start(text)
    if start is None:
        return [], None
    try:
        level = [json.loads(text[start:])]
    except (ValueError, RecursionError):
        return [], None
    while level:
        objects = [value for value in level if isinstance(value, dict)]
        fields = [(re.sub(r"[\s_-]", "", str(key)).lower(), value) for each in objects for key, value in each.items()]
        scores = [score for key, value in fields if key in _KEYS for score in _numbers(value)]
        if scores:
            bests = [value for key, value in fields if key in _BEST_KEYS and isinstance(value, int | float)]
            return scores, float(bests[0]) if bests else None
        level = [inner for value in level for inner in _inner(value)]
    return [], None


def _numbers(score: Any) -> list[Any]:
    """The value of a score's field if it may be a number; of ``{"value": 8}`` and ``[8]`` that within."""
    if isinstance(score, list) and len(score) == 1:
        score = score[0]
    if isinstance(score, dict) and "value" in score:
        score = score["value"]
    return [score] if isinstance(score, int | float | str) and not isinstance(score, bool) else []


def _inner(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _json_start(text: str) -> int | None:
    """Where the object or the list begins that a text ends with."""
    depth, is_string = 0, False
    if not text.endswith(("}", "]")):
        return None
    for mark in reversed(list(_BRACKETS.finditer(text))):
        if mark[2] == '"':
            is_string = not is_string if len(mark[1]) % 2 == 0 else is_string
        elif not is_string and mark[2] != "'":
            depth += 1 if mark[2] in "}]" else -1
            if depth == 0:
                return mark.start(2)
    return None
