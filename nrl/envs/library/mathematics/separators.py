"""Split answers at signs outside of brackets, and take away what stands around them."""

import re
from fractions import Fraction

from nrl.envs.library.mathematics.words.plain_kinds import TEXT
from nrl.envs.library.mathematics.words.spoken import spoken_number

__all__ = ["drop_words_of_items", "is_bracketed", "items_in", "outside_removed", "split_at_top"]

_BEGINS_ANSWER = re.compile(r"[-+]?[$€£¥₹(\[{]?[-+.]?[0-9]|[A-Za-z] ?[=<>]")
_ABOUT = re.compile(
    r"(?:\\(?:approx|sim(?:eq)?)(?![A-Za-z])|≈|~) ?|(?:about|approximately|approx\.?|roughly) (?=[$€£]|[0-9]*\.[0-9])"
)
_PRECISION = re.compile(
    r" ?\( ?(?:to )?[0-9]* ?(?:d\.? ?p\.?|s\.? ?f\.?|decimal places?|sig(?:nificant)?\.? fig(?:ure)?s?"
    r"|approx(?:imately)?\.?|rounded.*)\)$"
)


_SAID_TWICE = re.compile(  # 7 (seven)
    r"(?P<number>[0-9]{1,15}) ?\((?P<words>[A-Za-z][a-z -]+)\)|(?P<first>[A-Za-z][a-z -]+?) ?\((?P<last>[0-9]{1,15})\)"
)


def outside_removed(text: str) -> str:
    r"""Return a text without what stands around all of it.

    >>> outside_removed(r"\text{5 cm}."), outside_removed(r"\approx 5.2")
    ('5 cm', '5.2')
    """
    text = text.strip()
    while True:
        before = text
        text = text.strip(" ,;*").removesuffix(".").removeprefix("=").strip()
        text = _ABOUT.sub("", text, count=1) if _ABOUT.match(text) else text
        text = _PRECISION.sub("", text)
        if (said := _SAID_TWICE.fullmatch(TEXT.sub(r"\1", text))) and spoken_number(
            said["words"] or said["first"]
        ) == Fraction(said["number"] or said["last"]):
            text = said["number"] or said["last"]
        found = TEXT.fullmatch(text)
        if found and (_BEGINS_ANSWER.match(found[1].strip()) or not re.search(r"[A-Za-z]", found[1])):
            text = found[1]
        if text.startswith("(\\begin{") and text.endswith("})") and text.count("\\begin") == 1:
            text = text[1:-1]
        if text == before:
            return text


def drop_words_of_items(text: str) -> str:
    r"""Return a text whose "and" and "or" stand alone: of ``12 \text{ ducks and } 23``, and of ``\text{ or 43}``.

    >>> drop_words_of_items(r"12 \text{ ducks and } 23")
    '12 \\text{ducks}\\text{and} 23'
    """

    def split(found: re.Match[str]) -> str:
        before, word, after = (part.strip(" ,") for part in found.groups())
        return "".join(rf"\text{{{part}}}" for part in (before, word, after) if part)

    return re.sub(r"\\text ?\{([^{}]*?)(?<![A-Za-z])(and|or)(?![A-Za-z])([^{}]*)\}", split, text)


def split_at_top(text: str, at: re.Pattern[str]) -> list[tuple[str, str]]:
    """Split a text where a pattern is found outside of all brackets: each part with the separator before it.

    >>> split_at_top("a,(b,c),d", re.compile(","))
    [('', 'a'), (',', '(b,c)'), (',', 'd')]
    """
    parts, depth, start, before, place = list[tuple[str, str]](), 0, 0, "", 0
    while place < len(text):
        if depth == 0 and (found := at.match(text, place)) and found.end() > place:
            parts.append((before, text[start:place]))
            before, place = found[0], found.end()
            start = place
            continue
        if text[place] == "\\" and place + 1 < len(text) and text[place + 1] in "{}":
            depth += 1 if text[place + 1] == "{" else -1
            place += 2
            continue
        depth += (text[place] in "([{⟨") - (text[place] in ")]}⟩")
        depth = max(depth, 0)
        place += 1
    parts.append((before, text[start:]))
    return parts


def items_in(inner: str) -> list[str]:
    """Return the parts of a text between its commas and semicolons."""
    return [part for _, part in split_at_top(inner, re.compile(r"[,;]"))]


def is_bracketed(text: str) -> bool:
    """Return whether the first bracket closes at the end; the two may differ, as in ``[1,2)``."""
    depth, plain = 0, text.replace(r"\{", "(").replace(r"\}", ")")
    for place, sign in enumerate(plain):
        depth += (sign in "([{⟨") - (sign in ")]}⟩")
        if depth == 0:
            return place == len(plain) - 1
    return False
