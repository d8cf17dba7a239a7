"""Find out whether an answer is but a formula of the question: a question is no answer to itself."""

import functools
import re

from nrl.envs.library.mathematics.answers import FORMULA, READ
from nrl.envs.library.mathematics.words.tidying import DROPPED, LONGEST, SIGNS, same_commands, tighten

__all__ = ["repeats"]

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
    asked, formulas = _asked(prompt[-READ:])
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
    plain = prompt.translate(SIGNS)
    apart = _AROUND.sub(";", plain)
    within = [each for found in FORMULA.finditer(plain) for side in found.groups("") for each in side.split("=")]
    pieces = [each for each in (*_APART.split(apart), *within) if len(each) <= LONGEST]
    alone = _PROSE.sub(lambda found: f"{found[0]};", apart)  # else "Expand(x+1)" is one
    asked = _plainest(tighten(" ".join(DROPPED.sub("", alone).split())))
    return asked, frozenset(_parts(_plainest(DROPPED.sub("", each))) for each in pieces)


def _parts(text: str) -> str:
    """What a formula is made of, up to the order."""
    text = _NOTHING.sub("", "".join(text.split()))
    return " ".join(sorted("/" if each == r"\frac" else each for each in _PART.findall(text)))


def _plainest(text: str) -> str:
    return tighten(_ONE.sub(r"\1", _TIMES.sub("*", same_commands(text))))
