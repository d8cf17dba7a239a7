r"""The final answer of a response as text, and what can be said of it without mathematics.

**Where it is looked for**, in the last 16,384 characters of a response. The first of these that it has decides:

1. the last line that ``####`` begins and that is no heading;
2. the last ``\boxed{...}``, which has to be closed, and those that only a comma, "and" or "or" parts from it: then the
   answer is all of them together;
3. the last ``<answer>...</answer>``, ``"answer": ...`` of JSON, or line ``Answer: even``, if no formula stands behind;
4. the last formula (``$...$``, ``$$...$$``, ``\(...\)``, ``\[...\]``), unless a number stands behind it;
5. a last line, or what follows "answer is", "答案是" or the like in it, that has no words in it; or so an earlier line,
   where those behind it have no numbers;
6. the last number, as `nrl.envs.final_number` finds it.

All of it is linear in the text, and nothing is evaluated.
"""

import functools
import math
import re
from collections.abc import Iterator
from fractions import Fraction

from nrl.envs.final_numbers import boxes, final_number, marked_number, only_number
from nrl.envs.library.mathematics.statements import (
    SAYS,
    is_taken_back,
    last_statement,
    may_be_formula,
    sentence_end_removed,
)

__all__ = [
    "LONGEST",
    "answer_span",
    "final_answer",
    "plain_number",
    "repeats",
    "rounds",
    "same_number",
    "tidy",
    "written",
]

LONGEST = 1000
"""Characters that an answer has at most; whatever is longer is none."""

_READ = 16_384
_DEEPEST = 40  # braces and brackets in each other: what reads formulas takes a stack for each
_JOINED = 8  # boxes
_MARKS = 8  # of which the last is no heading
_LINES = 8  # from the last, where those behind an answer have no numbers in them

_MARK = re.compile(r"(?<!#)####(?!#)([^\n#]*)")
_BETWEEN = re.compile(r"(?:[\s$,;]|\\[()\[\]]|\\text\{\s*(?:and|or)\s*\}|and\b|or\b)*")
_FORMULA = re.compile(
    r"(?<!\\)\$\$(?P<a>[^$]+)\$\$|\\\[(?P<b>(?:[^\\]|\\[^\]\[])+)\\\]|\\\((?P<c>(?:[^\\]|\\[^()])+)\\\)"
    r"|(?<![\\$])\$(?=[^\s$])(?P<d>[^$\n]*[^\s$\\])\$(?![0-9$])"
)


def final_answer(response: str) -> str | None:
    r"""The final answer of a response; the module's docstring says where it is looked for.

    Args:
        response: the model's text.

    Returns:
        A number in lowest terms, or LaTeX without what does not matter; equal texts are equal answers, though equal
        answers may have texts that differ. None: the response holds no answer.

    >>> final_answer(r"So \boxed{0.50}."), final_answer(r"It is $x = \dfrac12$."), final_answer("Nothing.")
    ('1/2', 'x=\\frac12', None)
    """
    span = answer_span(response)
    return None if span is None else written(span)


def answer_span(response: str) -> str | None:
    r"""Return the part of a response that is its final answer, as it stands there; None: there is none.

    >>> answer_span(r"So \boxed{0.50}."), answer_span("Nothing.")
    ('0.50', None)
    """
    text = response[-_READ:]
    for mark in reversed(list(_MARK.finditer(text))[-_MARKS:]):
        if mark[1].strip() and (_may_be_answer(mark[1]) or next(marked_number(mark[0]), None) is not None):
            return mark[1]
    found = list(_together(text))
    if found:
        return None if None in found else ", ".join(each for each in reversed(found) if each is not None)
    *_, formula = [None, *_FORMULA.finditer(text)]
    statement = last_statement(text)
    if statement is not None and (formula is None or formula.end() <= statement.end):
        inner = answer_span(statement.text) if statement.marked and len(statement.text.split()) > 3 else statement.text
        if inner and not is_taken_back(text[statement.end :]):
            return inner
    rest = text[formula.end() :] if formula is not None else text
    if formula is not None:
        behind = final_number(rest)
        return behind or next(each for each in formula.group("a", "b", "c", "d") if each is not None)
    lines = [line for line in rest.split("\n") if line.strip()]
    for count, line in enumerate(reversed(lines[-_LINES:])):
        *_, said = [0, *(found.end() for found in SAYS.finditer(line))]
        bare = sentence_end_removed(line[said:], bool(said))
        if bare and _may_be_answer(bare) and (said or not count):
            return bare
        if re.search(r"[0-9=+*/^\\$]", line) or is_taken_back(line):
            break
    return final_number(rest)


def _may_be_answer(text: str) -> bool:
    return len(text) <= LONGEST and may_be_formula(text)


def _together(text: str) -> Iterator[str | None]:
    """What is in the last box, and in those before it that belong to it, from the last to the first."""
    start = -1
    for count, box in enumerate(boxes(text)):
        if box is None:
            if not count:
                yield None  # cut off
            return
        if count and not (0 <= start - box[1] < 40 and _BETWEEN.fullmatch(text, box[1], start)):
            return
        if count == _JOINED:
            return
        yield box[2]
        start = box[0]


# --- One way to write it.

_SIGNS = str.maketrans(
    {chr(0xFF10 + digit): str(digit) for digit in range(10)}
    | dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-")
    | {chr(0x2080 + digit): f"_{{{digit}}}" for digit in range(10)}
    | {"＋": "+", "＝": "=", "，": ",", "（": "(", "）": ")", "．": ".", "\u2044": "/", "\u2215": "/"}
    | {"×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "∗": "*", "±": r"\pm ", "°": r"^{\circ}", "′": "'"}
    | {"π": r"\pi ", "∞": r"\infty ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "λ": r"\lambda "}
    | {
        "≈": r"\approx ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "∈": r"\in ",
        "∅": r"\emptyset ",
    }
    | {"ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}"}
    | {"½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}"}
    | {"⟨": r"\langle ", "⟩": r"\rangle "}
    | dict.fromkeys("\xa0\u2009\u202f\u200b\u2002\u2003", " ")
)
_POWERS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-", strict=True))
_RAISED = re.compile(f"[{''.join(_POWERS)}]+")
_DOTS = re.compile(r"\.{3,}|…")
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|([0-9.]+|[A-Za-z]))")
_DROPPED = re.compile(
    r"(?<!\\)\$|\\(?:left|right|therefore|[bB]igg?[lr]?|displaystyle|textstyle|limits|quad|qquad)(?![A-Za-z])|\\[,!;:>]"
    r"|(?<!\\)~|\\(?=\$)|\\[()]"
)
_SAME = re.compile(r"\\(?:dfrac|tfrac|cfrac)(?![A-Za-z])|\\(?:leq|geq|neq|lbrace|rbrace)(?![A-Za-z])")
_INSTEAD = {"leq": r"\le", "geq": r"\ge", "neq": r"\ne", "lbrace": r"\{", "rbrace": r"\}"}
_SPACES = re.compile(r"\s+")
_TIGHT = re.compile(r" ?([-+*/^=()<>|\[\]]|(?<!\\)[{}]|\\[{}]) ?")
_COMMA = re.compile(r" ?, ?(?!(?<=, )[0-9]{3}(?![0-9]))")  # "1, 234" is not 1,234
_END = re.compile(r"[\s.,;:]+$")


def written(answer: str) -> str | None:
    r"""An answer in one way to write it: a plain number in lowest terms, anything else as LaTeX.

    Returns:
        None if it is empty, longer than `LONGEST`, or nested too deeply for anybody to read.

    >>> written(r"$\left(0,\; \tfrac{1}{2}\right]$"), written("50"), written("２√3"), written("x²")
    ('(0,\\frac{1}{2}]', '50', '2\\sqrt{3}', 'x^{2}')
    """
    text = tidy(answer)
    if text is None:
        return None
    repeating = _REPEATING.fullmatch(text)
    number = plain_number(_spelled(answer)) if repeating is None else _repeated(repeating)
    return text if number is None else str(number)


def tidy(answer: str) -> str | None:
    r"""Return an answer in LaTeX, in one way to write it, whose numbers stand as they are.

    Returns:
        None if it is empty, longer than `LONGEST`, or nested too deeply for anybody to read.

    >>> tidy(r"\dfrac{1}{2} \,x"), tidy("0.50"), tidy("x ≤ ½")
    ('\\frac{1}{2}x', '0.50', 'x \\le \\frac{1}{2}')
    """
    if answer.isascii() and answer.isdigit() and len(answer) < 20:
        return answer
    if len(answer) > LONGEST:
        return None
    text = _SAME.sub(lambda found: _INSTEAD.get(found[0][1:], r"\frac"), _DROPPED.sub("", _spelled(answer)))
    text = re.sub(r"(?<!\\)\\ ", " ", text)
    text = _COMMA.sub(",", _TIGHT.sub(r"\1", _SPACES.sub(" ", _END.sub("", text).strip())))
    return text if _depth(text) <= _DEEPEST and any(not each.isspace() and each != "\\" for each in text) else None


def _spelled(answer: str) -> str:
    """Return an answer with LaTeX in place of Unicode's signs."""
    if answer.count("$") == 1:
        answer = re.sub(r"(?<!\\)\$(?= ?[0-9.])", r"\\$", answer)  # One alone is a currency, not the edge of a formula.
    text = _RAISED.sub(lambda found: "^{" + "".join(_POWERS[each] for each in found[0]) + "}", answer)
    text = _DOTS.sub(r"\\ldots ", text)
    return _ROOT.sub(lambda found: r"\sqrt{" + (found[1] or found[2] or found[3] or "") + "}", text).translate(_SIGNS)


def _repeated(found: re.Match[str]) -> Fraction:
    whole, once, period = found["whole"] or "0", found["once"], found["period"]
    value = Fraction(int(whole + once + period) - int(whole + once), (10 ** len(period) - 1) * 10 ** len(once))
    return -value if found["sign"] else value


def _depth(text: str) -> int:
    depth = deepest = 0
    for each in text:
        depth += (each in "{([") - (each in "})]")
        deepest = max(deepest, depth)
    return deepest


_REPEATING = re.compile(
    r"[\s$]*(?P<sign>-?)(?P<whole>[0-9]{0,50})\.(?P<once>[0-9]{0,50})\\(?:overline|bar)\s*"
    r"\{?(?P<period>[0-9]{1,50})\}?[\s$]*"
)
# A number, with currency before it and a unit behind it. Parentheses and percent signs already are mathematics
_PLAIN = re.compile(
    r"[\s$€£¥₹\\!]*(?:[-+][\s$€£¥₹\\]*)?"
    r"(?:[0-9][0-9.,{}!\\ ]*(?:[eE][-+]?[0-9]{1,3}|/ ?[0-9][0-9.,]*)?|\.[0-9]+|(?:[0-9]+ ?)?\\[dtc]?frac ?[0-9{} ]+)"
    r"(?:\\(?:text|mathrm|mbox|,|;|:) ?\{[^{}\\0-9]*\}|[ \\]+(?P<unit>[a-z]{3,}(?: [a-z]{2,})*))?[\s.$\\]*"
)
_NO_UNITS = re.compile(
    r"\b(?:sqrt|frac|overline|bar|dot|[lc]?dots|sin|cos|tan|cot|sec|csc|log|exp|inf|infinity|infty|times|cdot|mod|max|min|abs|factorial|or|and|plus"
    r"|alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|rho|sigma|tau|phi|chi|psi|omega|pm|cup|cap|pct"
    r"|percent|percentage|squared|cubed|degrees|radians|minus|divided|dozen|hundred|thousand|million|billion|trillion"
    r")\b"
)


@functools.lru_cache(4096)
def plain_number(text: str) -> Fraction | None:
    r"""The number that a text is, if it is nothing but one: an integer, a decimal or a fraction.

    Currency may stand before it and a unit behind it, in words of three letters or more. A percent sign, parentheses, a
    product or a letter make it something that has to be computed, so it is None.

    >>> plain_number("1,234.50"), plain_number("-3/4"), plain_number(r"\frac{1}{2}"), plain_number(r"18\text{ dollars}")
    (Fraction(2469, 2), Fraction(-3, 4), Fraction(1, 2), Fraction(18, 1))
    >>> plain_number("50%"), plain_number("3x"), plain_number("(1,234)"), plain_number("2 pi"), plain_number("9^9")
    (None, None, None, None, None)
    """
    if text.isascii() and text.isdigit() and len(text) < 20:
        return Fraction(int(text))
    if len(text) > LONGEST:
        return None
    found = _PLAIN.fullmatch(text)
    if found is None or (found["unit"] and _NO_UNITS.search(found["unit"])):
        return None
    return only_number(text)


def same_number(reference: str, answer: str) -> bool | None:
    """Return whether two answers in one way to write them (`tidy`) are the same number, if it can be said at once.

    Returns:
        None: one is no plain number, or both have units, which may differ.

    >>> same_number("1/2", "0.50"), same_number("2", "3"), same_number("42", "6*7=42"), same_number("2", "x")
    (True, False, None, None)
    >>> same_number("1/12", "0.083333333333"), same_number("0.333", "1/3"), same_number("5 meters", "5 miles")
    (True, False, None)
    """
    expected, found = plain_number(reference), plain_number(answer.removeprefix("x="))
    if expected is None or found is None:
        return None
    if expected == found and _UNIT.search(reference) and _UNIT.search(answer):
        return None
    return expected == found or rounds(expected, found) or rounds(found, expected)


_UNIT = re.compile(r"\\(?:text|mathrm|mbox)|(?<![a-z\\])[a-z]{2,}|[$€£¥₹]")
_LEAST_DIGITS = 10  # of a decimal that may stand for a fraction, which can be written exactly
_LEAST_DIGITS_OF_IRRATIONAL = 6


def rounds(short: Fraction, value: Fraction, endless: bool = False) -> bool:
    """Return whether a decimal of ten digits or more is the rounding or the beginning of a number that has more.

    Args:
        short: the decimal.
        value: the number.
        endless: whether the number is irrational, and ``value`` is only close to it; then six digits are enough.

    >>> rounds(Fraction("0.3333333333"), Fraction(1, 3)), rounds(Fraction("0.333333"), Fraction(1, 3))
    (True, False)
    """
    decimals = _decimals(short)
    if not decimals or not (endless or _decimals(value) is None) or (short < 0) != (value < 0):
        return False
    scaled, whole = abs(value) * 10**decimals, int(abs(short) * 10**decimals)
    least = _LEAST_DIGITS_OF_IRRATIONAL if endless else _LEAST_DIGITS
    return len(str(whole)) >= least and whole in (math.floor(scaled), math.floor(scaled + Fraction(1, 2)))


def _decimals(value: Fraction) -> int | None:
    """Return how many decimals a number has; None: without end."""
    rest, counts = value.denominator, {2: 0, 5: 0}
    if rest.bit_length() > 400:
        return None
    for prime in counts:
        while rest % prime == 0:
            rest, counts[prime] = rest // prime, counts[prime] + 1
    return max(counts.values()) if rest == 1 else None


# --- A question is no answer to itself.

_OPERATION = re.compile(
    r".[-+*/^!]|\\(?:frac|sqrt|int|sum|prod|lim|binom|log|ln|sin|cos|tan|times|cdot|gcd|det)(?![a-z])"
)
_TIMES = re.compile(r"\\(?:times|cdot|ast)(?![A-Za-z]) ?")
_AROUND = re.compile(r"\$|\\[()\[\]]")
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}[,:]?(?=\s)")
_ONE = re.compile(r"\{([A-Za-z0-9])\}")
_JOINS = re.compile(r"[A-Za-z0-9+\-*/^()\\|_{}]")


def repeats(answer: str, prompt: str, reference: str) -> bool:
    r"""Whether an answer is but a formula of the question, with something left to compute, and not the reference.

    The order of its parts, parentheses, and a zero or a one more do not matter: the answer is known to be equal, or
    is wrong anyway.

    Args:
        answer: as `written`.
        prompt: the question.
        reference: as `written`.

    >>> repeats("6*7", r"What is $6 \times 7$?", "42"), repeats("6", "What is $6*7$?", "42"), repeats("6*7", "?", "42")
    (True, False, False)
    >>> repeats("(1+x)^2", "Expand (x+1)^2.", "x^2+2x+1"), repeats("(1+x)^2", "Factor x^2+2x+1.", "(x+1)^2")
    (True, False)
    """
    told, right = _plainest(answer), _plainest(reference)
    if told == right or not _OPERATION.search(told):
        return False
    asked, formulas = _asked(prompt[-_READ:])
    if _stands_alone(told, asked):
        return True
    return _parts(told) in formulas and _parts(told) != _parts(right)


def _stands_alone(part: str, text: str) -> bool:
    """Whether a part is somewhere in a text with nothing beside it that joins. A pattern of it takes longer."""
    start = text.find(part)
    while start >= 0:
        end = start + len(part)
        if not (_JOINS.match(text[start - 1 : start]) or _JOINS.match(text, end)):
            return True
        start = text.find(part, start + 1)
    return False


_NOTHING = re.compile(r"\+0(?![0-9.])|(?<![0-9.^])0\+|\*1(?![0-9.])|(?<![0-9.^])1\*|\^1(?![0-9.])|\^\{1\}")
_PART = re.compile(r"\\[A-Za-z]+|[A-Za-z0-9]|[-/^!|]")
_APART = re.compile(r"(?:^|(?<=[\s;,.:?]))[A-Za-z]{2,}(?=[\s;,.:?!]|$)|[=;,?:<>]|\.(?=\s|$)")


@functools.lru_cache(64)
def _asked(prompt: str) -> tuple[str, frozenset[str]]:
    """A question in one way to write it; and its formulas, each as its parts."""
    plain = prompt.translate(_SIGNS)
    apart = _AROUND.sub(";", plain)
    within = [each for found in _FORMULA.finditer(plain) for side in found.groups("") for each in side.split("=")]
    pieces = [each for each in (*_APART.split(apart), *within) if len(each) <= LONGEST]
    alone = _PROSE.sub(lambda found: f"{found[0]};", apart)  # else "Expand(x+1)" is one
    asked = _plainest(_TIGHT.sub(r"\1", _SPACES.sub(" ", _DROPPED.sub("", alone))))
    return asked, frozenset(_parts(_plainest(_DROPPED.sub("", each))) for each in pieces)


def _parts(text: str) -> str:
    """What a formula is made of, up to the order."""
    text = _NOTHING.sub("", _SPACES.sub("", text))
    return " ".join(sorted("/" if each == r"\frac" else each for each in _PART.findall(text)))


def _plainest(text: str) -> str:
    text = _SAME.sub(lambda found: _INSTEAD.get(found[0][1:], r"\frac"), text)
    return _TIGHT.sub(r"\1", _ONE.sub(r"\1", _TIMES.sub("*", text)))
