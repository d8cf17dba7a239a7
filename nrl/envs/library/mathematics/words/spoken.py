"""Read what is said in words or marks: "forty-two", "two thirds", statements such as ①③, lists of options (A, C, D)."""

import re
from fractions import Fraction

from nrl.envs.library.mathematics.kinds import Answer, Choice, Listing, Words

__all__ = ["read_marks", "spoken_number"]

_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    " eighteen nineteen"
)
_ONES = {word: number for number, word in enumerate(_SMALL.split())}
_DECADES = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_TENS = {word: 10 * number for number, word in enumerate(_DECADES, 2)}
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_NTHS = ("third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
_PARTS = {"half": 2, "halve": 2, "quarter": 4, "hundredth": 100} | {
    word: number for number, word in enumerate(_NTHS, 3)
}
_FRACTION = re.compile(rf"(?:(?P<top>[a-z]+)[ -])?(?P<part>{'|'.join(_PARTS)})s?")


def spoken_number(text: str) -> Fraction | None:
    """Return the number that words say; None: they are something else.

    >>> spoken_number("forty-two"), spoken_number("one hundred and five"), spoken_number("two thirds")
    (Fraction(42, 1), Fraction(105, 1), Fraction(2, 3))
    >>> spoken_number("sixty sixteen"), spoken_number("thousand ways"), spoken_number("")
    (None, None, None)
    """
    text = text.strip().casefold()
    sign = -1 if text.startswith(("negative ", "minus ")) else 1
    text = text.split(" ", 1)[1] if sign < 0 else text
    if match := _FRACTION.fullmatch(text):
        top = {"a": 1, "an": 1, None: 1 if match["part"] == "half" else 0}.get(
            match["top"], _ONES.get(match["top"] or "", 0)
        )
        return Fraction(sign * top, _PARTS[match["part"]]) if top else None
    words = re.split(r"[ -]+", re.sub(r"(?<=hundred|housand) and (?=[a-z])", " ", text))
    if words[0] == "a" and len(words) > 1 and words[1] in ("hundred", *_SCALES):
        words[0] = "one"
    total, last = 0, 10**15
    while words:
        value, words = _below_thousand(words)
        if value is None:
            return None
        scale = _SCALES.get(words[0], 0) if words else 1
        if not 0 < scale < last:
            return None
        total, last, words = total + value * scale, scale, words[1:]
    return Fraction(sign * total)


def _below_thousand(words: list[str]) -> tuple[int | None, list[str]]:
    """Return the number below 1,000, or below 2,000 of hundreds, that words begin with, and the words behind it."""
    total = None
    if len(words) > 1 and words[1] == "hundred" and _ONES.get(words[0], 0):
        total, words = 100 * _ONES[words[0]], words[2:]
    if words and words[0] in _TENS:
        total, words = (total or 0) + _TENS[words[0]], words[1:]
        if words and _ONES.get(words[0], 0) in range(1, 10):
            total, words = total + _ONES[words[0]], words[1:]
    elif words and words[0] in _ONES and (total is None or _ONES[words[0]]):
        total, words = (total or 0) + _ONES[words[0]], words[1:]
    return total, words


_CIRCLED = re.compile(r"[①-⑳](?:(?:,|and| )*[①-⑳])*")
_OPTIONS = re.compile(r"[A-J](?:(?: ?[,;] ?(?:and )?| and | )[A-J])+")


def read_marks(text: str) -> Answer | None:
    r"""Read circled numbers of statements, or letters of several options, in any order; None: there are none.

    >>> read_marks("①③") == read_marks("③, ①"), read_marks("A, C and D") == read_marks("D,A,C"), read_marks("A,C,A")
    (True, True, None)
    """
    if _CIRCLED.fullmatch(text):
        words = [Words(sign) for sign in sorted(re.findall("[①-⑳]", text))]
        return words[0] if len(words) == 1 else Listing(tuple(words), False)
    if _OPTIONS.fullmatch(text):
        letters = sorted(re.findall("[A-J]", text))
        if len(set(letters)) == len(letters):
            return Listing(tuple(Choice(letter, False) for letter in letters), False)
    return None
