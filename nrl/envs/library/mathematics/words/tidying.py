r"""Write an answer in one way, and compare two plain numbers, without mathematics. Nothing is evaluated."""

import functools
import math
import re
from fractions import Fraction

from nrl.envs.final_numbers import only_number
from nrl.envs.library.mathematics.words.hedges import is_noun_phrase

__all__ = [
    "DROPPED",
    "LONGEST",
    "SIGNS",
    "plain_number",
    "rounds",
    "same_commands",
    "same_number",
    "tidy",
    "tighten",
    "written",
]

LONGEST = 1000
"""Characters that an answer has at most; whatever is longer is none."""

_DEEPEST = 40  # braces and brackets in each other: what reads formulas takes a stack for each

SIGNS = str.maketrans(
    {chr(0xFF10 + digit): str(digit) for digit in range(10)}
    | dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-")
    | {chr(0x2080 + digit): f"_{{{digit}}}" for digit in range(10)}
    | {
        "＋": "+",
        "＝": "=",
        "，": ",",
        "（": "(",
        "）": ")",
        "．": ".",
        "、": ",",
        "；": ";",
        "：": ":",
        "＞": ">",
        "＜": "<",
        "。": "",
        "\u2044": "/",
        "\u2215": "/",
    }
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
_CHINESE_OR = re.compile(r"(?<=[0-9A-Za-z)}\]]) ?(?:或者?|和|且) ?(?=[-−0-9A-Za-z\\(\[])")
_DOTS = re.compile(r"\.{3,}|…")
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|([0-9.]+|[A-Za-z]))")
DROPPED = re.compile(
    r"(?<!\\)\$|\\(?:left|right|therefore|[bB]igg?[lr]?|displaystyle|textstyle|limits|quad|qquad)(?![A-Za-z])|\\[,!;:>]"
    r"|(?<!\\)~|\\(?=\$)|\\[()]|`|\\(?:text)?color *\{[A-Za-z]+\}"
    r"|\\(?:[Ll]arge|LARGE|[Hh]uge|small|normalsize|underline)(?![A-Za-z])"
    r"|\\(?:bf|rm|it)(?= ?[0-9])"
)
_SAME = re.compile(r"\\(?:dfrac|tfrac|cfrac)(?![A-Za-z])|\\(?:leq|geq|neq|lbrace|rbrace)(?![A-Za-z])")
_INSTEAD = {"leq": r"\le", "geq": r"\ge", "neq": r"\ne", "lbrace": r"\{", "rbrace": r"\}"}
_SPACES = re.compile(r"\s+")
_TIGHT = re.compile(r" ?([-+*/^=()<>|\[\]]|(?<!\\)[{}]|\\[{}]) ?")
_COMMA = re.compile(r" ?, ?(?!(?<=, )[0-9]{3}(?![0-9]))")  # "1, 234" is not 1,234
_INTRODUCTION = re.compile(
    r"\A(?P<open>\\(?:text|mathrm|textbf) ?\{ ?)?(?:(?:thus|so|hence|therefore),? )?(?:the )?"
    r"(?:final |correct |total )?"
    r"(?:(?:answer|result|value|solution|total|sum)s?(?: set)?(?: (?:is|are)(?: ?:)?|:| ?=)(?! ?not\b)"
    r"|there (?:is|are)(?= *\}? *[0-9])) ?(?P<close>\})? ?",
    re.IGNORECASE,
)
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
    text = same_commands(DROPPED.sub("", _spelled(answer)))
    text = re.sub(r"(?<!\\)\\ ", " ", text)
    text = _INTRODUCTION.sub(_introduction, _SPACES.sub(" ", _END.sub("", text).strip()), count=1)
    text = _COMMA.sub(",", tighten(text))
    return text if _depth(text) <= _DEEPEST and any(not each.isspace() and each != "\\" for each in text) else None


def _introduction(match: re.Match[str]) -> str:
    """Return what is left of "The answer is", in or before a text in LaTeX."""
    if match["open"]:
        return "" if match["close"] else match["open"]
    return match["close"] or ""


def same_commands(text: str) -> str:
    r"""Return LaTeX with one of several commands that mean the same.

    >>> same_commands(r"\dfrac{1}{2} \leq x")
    '\\frac{1}{2} \\le x'
    """
    return _SAME.sub(lambda command: _INSTEAD.get(command[0][1:], r"\frac"), text)


def tighten(text: str) -> str:
    """Return a formula without white space around its signs.

    >>> tighten("x + 1 = 2")
    'x+1=2'
    """
    return _TIGHT.sub(r"\1", text)


def _spelled(answer: str) -> str:
    """Return an answer with LaTeX in place of Unicode's signs."""
    if answer.count("$") == 1:
        answer = re.sub(r"(?<!\\)\$(?= ?[0-9.])", r"\\$", answer)  # One alone is a currency, not the edge of a formula.
    answer = _CHINESE_OR.sub(lambda word: rf"\text{{ {'or' if '或' in word[0] else 'and'} }}", answer)
    text = _RAISED.sub(lambda found: "^{" + "".join(_POWERS[each] for each in found[0]) + "}", answer)
    text = _DOTS.sub(r"\\ldots ", text)
    return _ROOT.sub(lambda found: r"\sqrt{" + (found[1] or found[2] or found[3] or "") + "}", text).translate(SIGNS)


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
    r"(?:\\(?:text|mathrm|mbox|,|;|:) ?\{(?P<text>[^{}\\0-9]*)\}|[ \\]+(?P<unit>[a-z]{3,}(?: [a-z]{2,})*))?[\s.$\\]*"
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
    match = _PLAIN.fullmatch(text)
    if match is None:
        return None
    words = (match["unit"] or match["text"] or "").strip()
    command = bool(match["unit"]) and text[match.start("unit") - 1] == "\\"
    return None if command or (words and not is_noun_phrase(words)) else only_number(text)


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
    if _UNIT.search(reference) and _UNIT.search(answer):
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
