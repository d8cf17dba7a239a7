"""The score that a judge's reply ends with."""

import ast
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from nrl.envs.phrases.judge_sentences import SCORE_NUMBER, SCORE_OF_BEST, float_of, score_of_sentence
from nrl.envs.replies import split_reasoning

__all__ = ["read_score"]

_FINAL = r"final|overall|total|average|mean|最终|综合|总"
_NAME = (
    rf"(?:here\sis\s)?(?:(?:my|the|{_FINAL}|numerical|numeric)\s){{0,3}}"
    r"(?:score|rating|grade|verdict|evaluation|assessment|judge?ment|marks?|points)\b"
    r"(?:\s(?:for|of)\s(?:the|this)\s(?:answer|response|reply|solution)\b)?"
    r"|(?:overall|final|total|average)\b(?:\s(?:quality|impression|result|mark|points)\b)?"
    r"|punktzahl\b|(?:gesamt)?(?:bewertung|note)(?<!^note)\b|puntuaci[oó]n(?:\sfinal)?\b|punteggio\b|pontuação\b"
    r"|not[ae]\sfinale?\b|nota\b|voto\b|ocena\b|betyg\b|оценка\b|điểm\b|skor\b|puan\b|(?:التقييم|الدرجة)"
    r"|(?:因此|所以|综上|我的|,)*(?:最终|综合|总)*的?(?:评分|得分|分数|打分)|总分|スコア|評価|採点|点数|점수|평점|평가"
)


def _scale(group: str) -> str:
    """Return the pattern of a scale behind a name or a number: ``(0-10)``, ``[max: 10]``, ``out of 10``."""
    words = r"(?:on|out|a|an|the|scale|of|from|between|range|max(?:imum)?|best|满分|/)(?:\b|(?<=[分/]))[\s:]{0,2}"
    return (
        rf"\s?(?:[(\[]\s?(?:{words}){{0,5}}(?:-?\d{{1,9}}\s?(?:-|to|and|~)\s?)?(?P<{group}>{SCORE_NUMBER})"
        rf"\s?(?:points?|分)?\s?[)\]]|(?:\bout\s+of\s|/)(?P<{group}_bare>{SCORE_NUMBER}))"
    )


_NO_SCALE = r"\s?[(\[](?:integer|number|numeric|float|int|higher\sis\sbetter)[)\]]"
_OF = (
    r"\s?(?:点|分|점)?\s?(?:/|\b(?:points?\s)?(?:(?:out\s+)?of(?:\sa\s(?:possible|maximum(?:\sof)?|total\sof))?"
    rf"|von|de|sur|su|av|van|dari|из)\b)\s?(?P<best>{SCORE_NUMBER})"
)
_CLOSE = r"[\s\"'\])}]{0,8}"
_LINE = re.compile(
    rf"[\s\"']{{0,8}}(?:(?P<name>{_NAME}|(?P<weak>note|result)\b)[\s\"']{{0,8}}(?:{_scale('scale')}|{_NO_SCALE})?"
    r"[\s\"']{0,8}(?:[:=]|-\s|\b(?:is|of)\b\s?:?|(?:是|为|は|는|은)\s?:?)?)?\s?(?:->|=>|→)?"
    rf"(?P<marks>[\s\"'\[({{]{{0,8}})(?:(?P<first>{SCORE_NUMBER})\s?(?:点満?点?|점\s?만점)(?:中|で|の|에|、|,)?\s?)?"
    rf"(?P<number>{SCORE_NUMBER})(?:{_OF})?{_CLOSE}(?:{_scale('behind')})?"
    r"(?:\s?(?:(?:points?|pts|stars?)\b|分|点|점))?(?:です|だ|입니다|이다)?"
    rf"(?:{_scale('after_unit')})?[\s.!;。\"'\])]{{0,16}}"
    r"(?P<remark>(?:(?<=\s)(?:\(|\|\s|-\s)|[,;.!:-]\s)\D{0,2000})?",
    re.IGNORECASE,
)
_BESTS = ("best", "first", *(f"{place}{bare}" for place in ("scale", "behind", "after_unit") for bare in ("", "_bare")))
_HEADING = re.compile(rf"\s?(?:{_NAME})(?:{_scale('scale')}|{_NO_SCALE})?(?:\s?:|\sis\s?:?)?\s?", re.IGNORECASE)
_IS_FINAL = re.compile(rf"(?:{_FINAL})", re.IGNORECASE)
_HEDGE = re.compile(
    r"\b(?:or|rather|would|should|could|too|wait|actually|no|maybe|perhaps|correction|sorry|instead|higher|lower|less|more"
    r"|really|zero|one|two|three|four|five|six|seven|eight|nine|ten)\b|\bnot\b(?!\s\w)",
    re.IGNORECASE,
)
_REASON_LINE = re.compile(
    r"(?:reason(?:ing)?|explanation|justification|rationale|comments?|feedback|why|理由|解释|原因|説明)\s?:",
    re.IGNORECASE,
)
_TAKEN_BACK = re.compile(r"\b(?:wait|actually|rather|correction|take\sthat\sback|on\sreflection)\b", re.IGNORECASE)
_LABELLED = re.compile(rf"[^\W\d][\w\s]{{0,40}}[:=]?\s?{SCORE_NUMBER}(?:\s?/\s?\d+)?[\s.]{{0,4}}")

# --- Markup around scores

_WIDE = str.maketrans(
    {0xFEE0 + code: chr(code) for code in range(0x21, 0x7F)}
    | dict.fromkeys("–—−", "-")
    | {"【": "[", "】": "]", "\xa0": " "}
)
_TAG = re.compile(
    r"<((?:final_|overall_|total_)?(?:score|rating|grade|verdict|result)|number)>\s{0,9}([^<>]{0,200}?)\s{0,9}</\1>",
    re.IGNORECASE,
)
_LONE_TAG = re.compile(rf"<(answer|output)>\s{{0,9}}({SCORE_NUMBER}[^<>]{{0,20}}?)\s{{0,9}}</\1>", re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\{([^{}]{0,200})\}")
_FONT = re.compile(r"\\(?:text|math)[a-z]{0,5}\{([^{}]{0,200})\}")
_HTML = re.compile(
    r"</?(?:b|p|strong|em|i|u|br|div|span|h[1-6]|ul|ol|li|evaluation|judge?ment|output|response|review|feedback)\s?/?>|&nbsp;|&#160;",
    re.IGNORECASE,
)
_EMPHASIS = re.compile(r"[*`$★⭐✅☑✔👍\ufe0f\U0001f300-\U0001faff]+|(?<!\w)_{1,3}|_{1,3}(?!\w)")
_ITEM = re.compile(rf"[\s>#]{{0,16}}(?:[-•+]\s{{1,8}}(?=\D)|\d{{1,2}}[.)]\s(?=\s?(?:{_NAME})))?", re.IGNORECASE)
_ANGLES = re.compile(rf"<({SCORE_NUMBER})>")
_BRACKETED_NAME = re.compile(rf"\[({_NAME})\]", re.IGNORECASE)
_RESULT = re.compile(r"\[RESULT\]", re.IGNORECASE)  # Prometheus
_END = re.compile(r"\s*(?:</s>|<\|\w{1,20}\|>|<｜[^｜]{1,40}｜>|<end_of_turn>|\n[-*_=]{3,40}|\n`{3,4})\Z")

# --- JSON

_BRACKETS = re.compile(r"(\\*)([\"'{}\[\]])")
_KEYS = (
    "score",
    "rating",
    "grade",
    "verdict",
    "points",
    "finalscore",
    "overallscore",
    "totalscore",
    "overallrating",
    "overall",
)
_BEST_KEYS = ("max", "maxscore", "maximum", "outof", "best", "scale")
_LONGEST_LITERAL = 10_000  # characters of a dict as Python writes it
_LONGEST_LINE = 2_000  # characters of a line before the last one that may be a score


class _Statement(NamedTuple):
    """A score that a reply states: what it is out of, and whether it says to be the final or overall one."""

    score: float
    best: float | None
    is_final: bool


def read_score(reply: str, low: float, high: float) -> float | None:
    """Read the score that a reply ends with; None: it has none in the range, or one out of another best.

    The reply, or the fenced block at its end, ends with one of these:

    - JSON or a ``dict`` of Python that has a ``"score"``, also within other objects and lists, of which the outermost
      counts;
    - a table of Markdown with a row or a column for the score;
    - a line that is a score: ``SCORE: 8``, ``Score (0-10): 8``, ``Score: 8 (good)``, ``8/10``, ``[[8]]``;
    - a sentence that gives one: "I would give it 8 out of 10".

    A number alone counts if it is all. A sentence that denies, doubts or reports a score gives none. Where an earlier
    line states another score, there is none, unless the last one alone is called final or overall. The time is linear.

    Args:
        reply: of the judge; its own reasoning is left out.
        low: the worst score.
        high: the best.

    >>> read_score("Right, but long.\\nSCORE: 8", 0, 10), read_score('{"score": 8}', 0, 10), read_score("Fine.", 0, 10)
    (8.0, 8.0, None)
    """
    text = _RESULT.sub("\nscore: ", split_reasoning(reply).answer.translate(_WIDE)).strip()
    for _ in range(3):
        text = _END.sub("", text).rstrip() if not text.endswith("```") or text.count("```") % 2 else text
    text = _TAG.sub(lambda tag: f"{tag[1].replace('_', ' ')}: {tag[2]}".removeprefix("number: "), text)
    before, text = _unfenced(_HTML.sub("", text).strip())
    last, earlier = _last_statement(text)
    if last is None or last.best not in (None, high) or not low <= last.score <= high:
        return None
    for other in _statements([*before.splitlines(), *earlier]):
        if other.score != last.score and other.best in (None, high) and other.is_final >= last.is_final:
            return None
    return last.score


def _last_statement(text: str) -> tuple[_Statement | None, list[str]]:
    """Return the score that a text ends with, and the lines before it."""
    start = _json_start(text)
    scores, best = ([], None) if start is None else _scores_of_json(text[start:])
    if scores:
        score = None if any(score != scores[0] for score in scores) else _statement(f"score: {scores[0]}")
        score = score and score._replace(best=best if score.best is None else score.best)
        return score, text[:start].splitlines()
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return None, []
    if lines[-1].lstrip().startswith("|"):
        return _score_of_table(lines), []
    before = lines[-2] if len(lines) > 1 else ""
    score = _statement(lines[-1], before, may_stand_alone=len(lines) == 1) or _score_in_sentences(_bare(lines[-1]))
    if score is None and len(lines) > 1 and _REASON_LINE.match(_bare(lines[1])):  # it begins with its score
        rest = "\n".join(lines[1:])
        first = _statement(lines[0])
        is_alone = not _TAKEN_BACK.search(rest) and not SCORE_OF_BEST.search(rest) and not any(_statements(lines[1:]))
        return (first if is_alone and _score_in_sentences(rest[-_LONGEST_LINE:]) is None else None), []
    return score, lines[:-1]


def _statements(lines: Sequence[str]) -> Iterator[_Statement]:
    """Yield the scores of those lines that are nothing but a score with its name."""
    before = ""
    for line in lines:
        if line.strip() and len(line) <= _LONGEST_LINE:
            statement = None
            if line.rstrip().endswith("}") and line.lstrip().startswith("{"):
                scores, best = _scores_of_json(line.strip())
                statement = _statement(f"score: {scores[0]}") if scores else None
                statement = statement and statement._replace(best=best)
            if statement := statement or _statement(line, before):
                yield statement
            before = line


def _bare(line: str) -> str:
    """Return a line without emphasis, fonts of LaTeX and marks of headings, quotations and lists."""
    line = _BRACKETED_NAME.sub(r"\1", _EMPHASIS.sub("", _FONT.sub(r"\1", _BOXED.sub(r"[[\1]]", line))))
    line = _ANGLES.sub(r"\1", line)
    line = line[_ITEM.match(line).end() :].strip()  # type: ignore[union-attr]  # which matches nothing, too
    if line[:1] + line[-1:] == "{}" and line.count("{") == 1:
        line = line[1:-1]
    return line


def _statement(line: str, before: str = "", *, may_stand_alone: bool = False) -> _Statement | None:
    """Return the score of a line that is nothing else; None: the line has no score, or says more."""
    bare, heading = _bare(line), _HEADING.fullmatch(_bare(before)) if len(before) <= _LONGEST_LINE else None
    if may_stand_alone:
        bare = _LONE_TAG.sub(r"\2", bare)
    inner = bare[2:-2] if bare.startswith("[[") and bare.endswith("]]") else ""
    match = _LINE.fullmatch(bare) or _LINE.fullmatch(inner)
    if match is None or (match["remark"] and _HEDGE.search(match["remark"])):
        return None
    bests = {float_of(match[name]) for name in _BESTS if match[name]}
    is_named = match["name"] or bests
    if not (is_named or heading or may_stand_alone or inner or "[[" in match["marks"]):
        return None
    if len(bests) > 1 or (match["remark"] and not is_named) or (match["weak"] and not bests):
        return None
    is_final = _IS_FINAL.search(match["name"] or "") or (before and _IS_FINAL.match(_bare(before)[:40]))
    return _Statement(float_of(match["number"]), bests.pop() if bests else None, bool(is_final))


def _score_in_sentences(line: str) -> _Statement | None:
    """Return the score of a line of several sentences or fields, or that of one that gives a score in words."""
    sentences = re.split(r"(?<=[.!?;])\s+", line)
    fields = [field for sentence in sentences for field in re.split(r",\s|\s\|\s|\s-\s", sentence)]
    for parts in (sentences, fields if all(map(_LABELLED.fullmatch, fields)) else []):
        statements = [_statement(part) for part in parts]
        if len(parts) > 1 and (last := statements[-1]) is not None:
            others = [other for other in statements[:-1] if other is not None and other.is_final >= last.is_final]
            return last if all(other.score == last.score for other in others) else None
    score = score_of_sentence(line)
    return None if score is None else _Statement(*score, is_final=False)


# --- Tables, fences, JSON


def _score_of_table(lines: Sequence[str]) -> _Statement | None:
    """Return the score of the table that ends with the last line: of its row for the score, or its column."""
    rows = list[list[str]]()
    for line in reversed(lines):
        if not line.lstrip().startswith("|") or len(line) > _LONGEST_LINE:
            break
        rows.append([_bare(cell.strip()) for cell in line.strip().strip("|").split("|")])
    rows.reverse()
    has_header = len(rows) > 1 and all(re.fullmatch(r"\s?:?-*:?\s?", cell) for cell in rows[1])
    header, body = (rows[0], rows[2:]) if has_header else ([], rows)
    columns = [column for column, cell in enumerate(header) if column and _HEADING.fullmatch(cell)]
    if header and len(body) == 1 and not columns:
        columns = [column for column, cell in enumerate(header) if _HEADING.fullmatch(cell)]
    named = [row for row in body if _HEADING.fullmatch(row[0])] or (body if len(body) == 1 and columns else [])
    statements = list[_Statement]()
    for row in named:
        if len(columns) > 1:
            return None
        cells = [row[column] for column in columns if column < len(row)] or row[1:]
        scores = [score for cell in cells if (score := _statement(cell, may_stand_alone=True)) is not None]
        if len(scores) != 1:
            return None
        statements.append(scores[0]._replace(is_final=bool(_IS_FINAL.search(row[0]))))
    finals = [statement for statement in statements if statement.is_final] or statements
    return finals[0] if finals and all(statement.score == finals[0].score for statement in finals) else None


def _unfenced(text: str) -> tuple[str, str]:
    """Return what is before the fenced block that a text ends with, and what is in it; of a text without one, all."""
    for fence in ("```", "~~~"):
        if text.endswith(fence) and (start := text.rfind(fence, 0, -3)) >= 0:
            block = text[start + 3 : -3]
            language, _, rest = block.partition("\n")
            has_language = re.fullmatch(r"\w*[ \t]*", language) and rest.strip()
            return text[:start], (rest if has_language else block).strip()
    return "", text


def _scores_of_json(text: str) -> tuple[list[Any], float | None]:
    """The scores of a text that is JSON or a dict of Python, those that stand outermost; and what they are out of."""
    try:
        level = [json.loads(text)]
    except (ValueError, RecursionError):
        if len(text) > _LONGEST_LITERAL:
            return [], None
        try:
            level = [ast.literal_eval(text)]
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
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
    elif isinstance(value, list | tuple):
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
