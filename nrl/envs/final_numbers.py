r"""The final number of a text: where it stands, and how it is written.

**Where `number` looks.** The first of these that a response has decides, and no later one is tried:

1. the last ``####`` that a number follows, as in GSM8K's own solutions: ``#### 42 apples``. Of a line such as
   ``#### 6 * 7 = 42`` the part after the equals sign counts. A line with several numbers (``#### 42 or 43``,
   ``#### 42 (of 50)``) has none. Markdown headings (``#### Step 2``,
   ``#### 2. Add up``) are no such marker;
2. the last ``\boxed{...}``, which has to be closed and to hold one number: ``x =`` may stand before it and a unit or a
   noun behind it, but no other number and no mathematics. Several boxes of one answer (``\boxed{42} or \boxed{43}``)
   have none;
3. the last answer that is said to be one and is nothing but a number: ``Answer: 7``, ``<answer>7</answer>``,
   ``{"answer": 7}``, or a sentence ``The answer is 7.``, unless the text takes it back ("wait", "actually");
4. the last thing in the text that looks like a number. A number that the text says it is not (``42 (not 43)``,
   ``42 rather than 43``) is left out.

A number is no answer where the text gives it as a bound (``at least 16``), a guess (``maybe 16``), one of several
(``42 or 43``), the name of a page or a step, or a question, or says that it is wrong. Where the text takes its answer
back ("I made a mistake"), only what stands behind that counts. These rules are in
`nrl.envs.library.mathematics.words.hedges`.

**What a number is.** Digits with an optional sign (also the Unicode minus), decimals, thousands separators (``1,234``,
``1{,}234``, thin spaces), an exponent as in ``1.5e3``, simple fractions (``3/4``, ``\frac{3}{4}``, ``½``), mixed ones
(``1 1/2``), and such a number before ``hundred``, ``thousand``, ``million``, ``billion`` or ``trillion``. Currency,
percent signs, units and emphasis around it are left out, so ``42%`` is 42. What looks like a number and is not one
(``1,2``, ``3-4``, ``6 * 7``, ``10:30``, ``9^9``, ``\sqrt{2}``) is no answer, rather than one of its parts; where it is
the last, the response has no answer.

Numbers are compared as fractions, exactly: ``1/3`` is not ``0.333``. No expression is evaluated, and the time is linear
in the text.
"""

import collections
import itertools
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from nrl.envs.library.mathematics.words.hedges import (
    is_candidate,
    is_denied,
    is_doubted,
    is_noun_phrase,
    is_question,
    is_reference,
    retraction_end,
)

__all__ = [
    "boxes",
    "expected_value",
    "final_number",
    "final_value",
    "joined_boxes",
    "marked_number",
    "only_number",
]


def final_number(response: str) -> str | None:
    r"""The final number of a response, as `number` reads it; the module's docstring has the rules.

    Args:
        response: the model's text.

    Returns:
        An integer, or a fraction in lowest terms; equal numbers give equal texts. None: the response has no number.

    >>> final_number("So 0.50."), final_number("#### 1/2"), final_number(r"\boxed{1{,}234}"), final_number("Nothing.")
    ('1/2', '1/2', '1234', None)
    """
    value = final_value(response)
    return None if value is None else str(value)


def final_value(response: str) -> Fraction | None:
    """Return the final number of a response; None: it has none.

    >>> final_value("So 0.50.")
    Fraction(1, 2)
    """
    return next(itertools.chain(marked_number(response), _boxed(response), _stated(response), _last(response)), None)


def expected_value(answer: Any) -> Fraction | None:
    """Return the number of a task's right answer; None: it has none, or several.

    >>> expected_value("6 * 7 = 42\\n#### 42"), expected_value(0.5), expected_value("1 or 2")
    (Fraction(42, 1), Fraction(1, 2), None)
    """
    if isinstance(answer, int | Fraction):
        value = Fraction(answer)
        readable = max(value.numerator.bit_length(), value.denominator.bit_length()) < 7 * _LONGEST
        return value if readable else None  # No response has such a number: a longer numeral is not read.
    text = str(answer)
    return next(itertools.chain(marked_number(text), _boxed(text), [only_number(text)]))


# --- Where an answer may stand: each yields a number, or None for no number; or nothing if it is not there.

_MARK = re.compile(r"(?<!#)####(?!#)([^\n#]*)")
_HAS_NUMBER = re.compile("[0-9½¼¾⅓⅔]")
_BOX = re.compile(
    r"\\(?:f|frame)?box(?:ed)?\s*(?:\{|(?<=boxed)\s+(?P<bare>[-+]?[0-9][0-9.,/]*[0-9]|[0-9A-Za-z])(?![0-9A-Za-z{]))"
)
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_HEADING = re.compile(r"[.)][ \t]+[*_]*[A-Za-z]")  # the rest of "#### 2. Add up"


def marked_number(text: str) -> Iterator[Fraction | None]:
    """The number after the last ``####`` that one follows; None: it is no number after all; nothing: there is none.

    >>> list(marked_number("#### 42 apples")), list(marked_number("#### 2, 3")), list(marked_number("#### Step 2"))
    ([Fraction(42, 1)], [None], [])
    """
    for mark in reversed(list(_MARK.finditer(text))):
        if not _HAS_NUMBER.search(mark[1]):  # which a text may have a hundred thousand times
            continue
        line = _without_markup(mark[1])
        first = next(_numerals(line), None)
        if first is None or line[: first.start("run")].strip(" \t*_:\"'({[$€£¥₹+-"):
            continue  # words come first, as in "#### Step 2"
        rest = line[first.end("run") :]
        if _HEADING.match(rest):
            continue
        yield _only(line)


def _only(line: str) -> Fraction | None:
    """The one number of the last side of equations that is a number; None: it has another one beside it."""
    for side in reversed(line.split("=")):
        found = list(itertools.islice(_affirmed(side), 2))
        if len(found) > 1:
            return None
        if found and (value := _value(found[0])) is not None:
            return value
    return None


def boxes(text: str) -> Iterator[tuple[int, int, str] | None]:
    r"""Boxes of a text, from the last one to the first: where each begins and ends, and what is in it.

    None stands for one that is not closed. The time of each is linear in the text behind it.

    >>> list(boxes(r"\boxed{1}, \fbox{\boxed{2}"))
    [(17, 26, '2'), None, (0, 9, '1')]
    """
    for box in reversed(list(_BOX.finditer(text))):
        if box["bare"]:
            yield box.start(), box.end(), box["bare"]
            continue
        depth, end = 1, -1
        for brace in _BRACE.finditer(text, box.end()):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if depth == 0:
                end = brace.start()
                break
        yield (box.start(), end + 1, text[box.end() : end]) if depth == 0 else None


_JOINED = re.compile(r"(?:[\s$,;()]|\\[()\[\]]|\\text\{\s*(?:and|or)\s*\}|and\b|or\b)*")
_ALTERNATIVE = re.compile(r"\b(?:or|if|case|otherwise|alternatively|vs|maybe|perhaps|possibly)\b|[|/]", re.IGNORECASE)
_REPLACED = re.compile(
    r"\b(?:no|not|wait|actually|instead|rather|so|thus|hence|therefore|total|finally)\b", re.IGNORECASE
)
_MOST_BOXES = 8
_MOST_DENIED = 32  # numbers behind the last one that the text does not deny


def joined_boxes(text: str) -> list[tuple[int, int, str]] | None:
    r"""Return the last box of a text, and those before it that are a part of the same answer, in their order.

    A comma, "and" or "or" joins boxes, and so do words of cases or of doubt. None: the last box is not closed.

    >>> [box[2] for box in joined_boxes(r"\boxed{1}. So \boxed{2} or \boxed{3}.")], joined_boxes("1")
    (['2', '3'], [])
    """
    joined = list[tuple[int, int, str]]()
    for box in itertools.islice(boxes(text), _MOST_BOXES):
        if box is None:  # One that is cut off may be the beginning of a longer number.
            return joined or None
        if joined:
            start = joined[0][0]
            between = text[box[1] : start] if box[1] <= start <= box[1] + 80 else None
            alternative = between is not None and _ALTERNATIVE.search(between) and not _REPLACED.search(between)
            if between is None or not (alternative or (len(between) < 40 and _JOINED.fullmatch(between))):
                return joined
        joined.insert(0, box)
    return joined


def _boxed(text: str) -> Iterator[Fraction | None]:
    together = joined_boxes(text)
    if together is None:
        yield None
    if not together:
        return
    start, end = together[0][0], together[-1][1]
    if (behind := retraction_end(text, end)) >= 0:
        yield final_value(text[behind:])
    elif is_denied(text, start, end) or is_doubted(text, start, end) or is_question(text, end):
        yield None
    else:
        values = {_formal_number(box[2]) for box in together}
        yield values.pop() if len(values) == 1 else None


def _formal_number(text: str) -> Fraction | None:
    """Return the number of a box, behind which at most a unit or a noun stands."""
    part = _without_markup(text).rpartition("=")[2]
    numeral = next(_numerals(part), None)
    if numeral is None:
        return None
    end = numeral.end("run")
    rest = re.sub(r"[^\w\s'’.-]|_", " ", part[end:]).strip(" .-")
    plain = not rest or _SCALE.match(part, end) or _UNIT.fullmatch(rest) or is_noun_phrase(rest)
    return only_number(text) if plain else None


_STATED = re.compile(
    r"(?:^|[.!?] )[ \t>*_#-]{0,8}(?:(?:so|thus|hence|therefore),? )?(?:(?:the|my|final|correct|short) ){0,3}"
    r"(?:(?<![A-Za-z])answer\b[*_]{0,4} ?(?:is ?)?[:=：]|(?<=the )(?:final |correct )?answer is\b)"
    r"(?P<rest>[^\n]{0,200})"
    r"|^[ \t*_]{0,8}答案(?:是|为|為)?[:：]?(?P<cjk>[^\n。]{0,200})"
    r"|<answer>(?P<tag>[^<]{0,200})</answer>|\"(?:final_)?answer\" ?: ?\"?(?P<json>[^\",}\n]{0,200})",
    re.IGNORECASE | re.MULTILINE,
)
_TAKEN_BACK = re.compile(r"\b(?:wait|actually|correction|mistake|instead|rather|recheck|sorry|oops)\b", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?;](?=\s|\Z)")
_RELATIVE = re.compile(r", (?:which|since|because|as) ")
_NAME = re.compile(r"[A-Za-z]\w{0,9} ?[=≈]?")
_LIST_BEFORE = re.compile(r"(?:^|answers? (?:is|are)|[:=])[ $*_(]{0,8}(?:[-+]?[0-9./]+, ?){1,20}\$?\Z", re.IGNORECASE)


def _stated(text: str) -> Iterator[Fraction | None]:
    """The number of the last statement of an answer that has one and nothing else than a unit."""
    *_, stated = [None, *_STATED.finditer(text)]
    if stated is None or not _HAS_NUMBER.search(stated[0]):
        return
    part = stated[stated.lastgroup or 0]
    if stated["rest"] is not None:
        part = _SENTENCE_END.split(part, maxsplit=1)[0]
    behind = stated.start(stated.lastgroup or 0) + len(part)
    if _TAKEN_BACK.search(text, behind) or retraction_end(text, behind) >= 0 or is_question(text, behind):
        return
    if stated["rest"] is not None:
        part = _RELATIVE.split(part, maxsplit=1)[0]
    plain = _without_markup(part)
    found = list(itertools.islice(_affirmed(plain), 2))
    if len(found) != 1 or (value := _value(found[0])) is None or _is_uncertain(plain, found[0]):
        return
    before = plain[: found[0].start("run")].strip(" \t*_:\"'({[$€£¥₹+-")
    if not before or _NAME.fullmatch(before):
        yield value


def _affirmed(plain: str) -> Iterator[re.Match[str]]:
    """Everything that looks like a number, without those that the text says it is not."""
    return (numeral for numeral in _numerals(plain) if not _is_denied(plain, numeral))


def _is_denied(plain: str, numeral: re.Match[str]) -> bool:
    return is_denied(plain, numeral.start(), numeral.end("run"))


def _is_uncertain(plain: str, numeral: re.Match[str]) -> bool:
    """Return whether a text gives a number as a bound, a guess, one of several, or the name of a page."""
    start, end = numeral.start(), numeral.end("run")
    line = plain[plain.rfind("\n", 0, start) + 1 : start]
    return (
        is_doubted(plain, start, end)
        or is_reference(plain, start)
        or is_candidate(plain, start)
        or is_question(plain, end)
        or _VARIABLE.match(plain, end) is not None
        or bool(_LIST_BEFORE.search(line[-_LONGEST:]))
    )


def _last(text: str) -> Iterator[Fraction | None]:
    # Markup of a text without digits, such as a megabyte of dollars, takes the longest
    plain = _without_markup(text) if _HAS_NUMBER.search(text) else ""
    numerals = collections.deque(_numerals(plain), maxlen=_MOST_DENIED + 1)
    last = next((numeral for numeral in reversed(numerals) if not _is_denied(plain, numeral)), None)
    if last is None:
        return
    if (behind := retraction_end(plain, last.end())) >= 0:
        yield final_value(plain[behind:])
    else:
        yield None if _is_uncertain(plain, last) or _is_value_denied(plain, last) else _value(last)


def _is_value_denied(plain: str, numeral: re.Match[str]) -> bool:
    """Return whether a later number, which the text says is not the answer, is equal to one."""
    value = _value(numeral)
    return any(_value(later) == value for later in _numerals(plain[numeral.end("run") :]))


def only_number(text: str) -> Fraction | None:
    r"""The number of a text that has one and no mathematics besides, after its last equals sign.

    >>> only_number(r"x = \frac{1}{2}"), only_number(r"2\pi"), only_number("1 or 2")
    (Fraction(1, 2), None, None)
    """
    part = _without_markup(text).rpartition("=")[2]
    numerals = list(itertools.islice(_numerals(part), 2))
    if len(numerals) != 1 or set(part) & set("^√!\0") or _VARIABLE.match(part, numerals[0].end("run")):
        return None
    start, end = numerals[0].start(), numerals[0].end("run")
    return None if is_denied(part, start, end) or is_doubted(part, start, end) else _value(numerals[0])


# --- Numerals. Every pattern is linear: no two of its parts can share out the same characters in several ways.

# Commands around numbers that do not change them. Any other command is mathematics, and becomes "\0".
_PROSE = re.compile(
    "text(?:bf|color|it|normal|rm|sf|style|tt)?|math(?:bb|bf|cal|it|rm|sf|tt)|[fhm]box|boxed|bf|it|rm|tt|emph|bm|boldsymbol"
    "|underline|displaystyle|left|right|[bB]igg?|q?quad|[hv]space|hfill|begin|end|color|label|tag|nonumber|therefore"
    "|because|so|pounds|euro|yen|(?:black)?square|Box|qed|checkmark|[lc]?dots|small|normalsize|large|Large|LARGE|huge|Huge"
)
_RELATION = re.compile("approx|simeq|equiv|implies|iff|to|(?:long|Long)?(?:right|Right)arrow")
_TIMES = re.compile("times|cdot|div|ast|star")
_SIGNS = {"\\": " ", "$": "$", "%": "%", "!": "", ",": "\u2009"}  # after a backslash
_CHARACTERS = str.maketrans(
    dict.fromkeys("\u2212\u2010\u2011\u2013\ufe63\uff0d", "-")
    | dict.fromkeys("≈≅≡→⇒⟹", "=")
    | {"\u2044": "/", "\u2215": "/", "，": ",", "·": "×", "⋅": "×", "÷": "×", "\0": " ", "`": " ", "\u202f": "\u2009"}
    | {"½": r"\frac12", "¼": r"\frac14", "¾": r"\frac34", "⅓": r"\frac13", "⅔": r"\frac23", "\xa0": "\u2009"}
)
_FRACTION = re.compile(r"\\[dtc]?frac *(?:\{ *(-?[0-9.,]+) *\}|([0-9])) *(?:\{ *([0-9.,]+) *\}|([0-9]))")
_DEGREES = re.compile(r"\^ *(?:\{ *)?\\(?:circ|degree)(?![A-Za-z]) *\}?")
_COMMAND = re.compile(r"\\([A-Za-z]+|.)", re.DOTALL)
_GROUPS = re.compile(r"(?<=[0-9])\u2009(?=[0-9]{3}(?![0-9]))")
_POWER = re.compile(r"(?<=[0-9])\*\*(?=[0-9])")
_UNIT_POWER = re.compile(r"(?<=[A-Za-z])[ })]*\^ *(?:\{ *)?-?[0-9] *\}?")  # m^2

_DIGITS = r"[0-9]+(?:[.,:][0-9]+)*"
_NUMERAL = re.compile(
    r"(?<![A-Za-z0-9_])[A-Za-z][A-Za-z_]*[0-9][A-Za-z0-9_]*(?:[.,:][0-9]+[A-Za-z0-9_]*)*"  # a name such as H2 or v1.5
    r"|(?P<before>[\^√\0][ {(]*)?"
    r"(?P<sign>(?:(?<![A-Za-z0-9)\]}])[-+])?(?:[$€£¥₹] ?-?)?)"
    rf"(?<![A-Za-z0-9])(?P<run>(?:[0-9]+ (?=[0-9]+/[0-9]))?(?:{_DIGITS}|(?<!\.)\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
    rf"(?: ?[-+*/^×x] ?{_DIGITS})*)"
    r"(?=(?P<after>[ })]*[\^\0²³¹⁰⁴-⁹])?)"
)
_DECIMAL = r"(?:(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
_READABLE = re.compile(
    rf"(?:(?P<whole>[0-9]+) )?(?P<top>{_DECIMAL})(?:[eE](?P<exponent>[-+]?[0-9]{{1,3}}))?"
    rf"(?: ?/ ?(?P<bottom>{_DECIMAL}))?"
)
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALE = re.compile(rf"[ {{}}-]{{0,4}}({'|'.join(_SCALES)})s?\b", re.IGNORECASE)
_VARIABLE = re.compile(r"[xyznk](?![A-Za-z])")  # 3x is no number
_UNIT = re.compile(r"[A-Za-z°µμ]{1,4}(?: ?[A-Za-z]{1,4})?")
_LONGEST = 1000  # characters; to read a longer numeral would take time that is quadratic in its length


def _without_markup(text: str) -> str:
    """The text without LaTeX, Markdown and typography, as far as they stand around numbers."""
    text = text.translate(_CHARACTERS).replace("{,}", ",")
    text = _FRACTION.sub(_fraction, _DEGREES.sub(" ", text))
    text = _GROUPS.sub(",", _COMMAND.sub(_command, text)).replace("\u2009", " ")
    return _UNIT_POWER.sub(" ", _POWER.sub("^", text).replace("**", " ").replace("__", " "))


def _fraction(found: re.Match[str]) -> str:
    mixed = found.start() > 0 and found.string[found.start() - 1] in "0123456789"
    return f"{' ' * mixed}{found[1] or found[2]}/{found[3] or found[4]} "


def _command(found: re.Match[str]) -> str:
    command = found[1]
    if not command.isalpha():
        return _SIGNS.get(command, " ")
    known = {" ": _PROSE, "=": _RELATION, "×": _TIMES}
    return next((plain for plain, pattern in known.items() if pattern.fullmatch(command)), "\0")


def _numerals(plain: str) -> Iterator[re.Match[str]]:
    """Everything that looks like a number."""
    return (found for found in _NUMERAL.finditer(plain) if found["run"])


def _value(numeral: re.Match[str]) -> Fraction | None:
    """The number that it is, or None: a list, a range, a time, a product, a power ..."""
    read = _READABLE.fullmatch(numeral["run"]) if len(numeral["run"]) <= _LONGEST else None
    if read is None or numeral["before"] or numeral["after"]:
        return None
    value = Fraction(read["top"].replace(",", "")) * Fraction(10) ** int(read["exponent"] or 0)
    if read["bottom"]:
        bottom = Fraction(read["bottom"].replace(",", ""))
        if bottom == 0 or (read["whole"] and value >= bottom):
            return None
        value = value / bottom + int(read["whole"] or 0)
    end = numeral.end("run")
    while scale := _SCALE.match(numeral.string, end):
        value, end = value * _SCALES[scale[1].lower()], scale.end()
    return -value if numeral["sign"].count("-") == 1 else value
