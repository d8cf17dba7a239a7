"""Split a formula into tokens, after spellings of one notation have become another."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from nrl.envs.library.mathematics.nodes import UnreadableError

__all__ = ["CONSTANTS", "DECORATIONS", "FONTS", "FUNCTIONS", "GREEK", "Token", "tokens_of"]

FUNCTIONS = {
    **{name: name for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "exp", "log", "ln")},
    **{name: name for name in ("arcsin", "arccos", "arctan", "max", "min", "gcd", "lcm", "floor", "ceil", "abs")},
    "asin": "arcsin",
    "acos": "arccos",
    "atan": "arctan",
    "lg": "log10",
    "cis": "cis",
    "sqrt": "sqrt",
    **{name: "arc" + name[-4:] for name in ("arcsinh", "arccosh", "arctanh")},
    **{name: f"arc{name[1:]}" for name in ("asinh", "acosh", "atanh")},
    **{name: f"arc{name[2:]}" for name in ("arsinh", "arcosh", "artanh")},
    "cbrt": "cbrt",
    "factorial": "factorial",
    "binomial": "binom",
    "binom": "binom",
    "comb": "binom",
    "nCr": "binom",
    "Abs": "abs",
    "ceiling": "ceil",
    "coth": "coth",
    "arccot": "arccot",
    "re": "re",
    "Re": "re",
    "Im": "im",
}
CONSTANTS = {"pi": "pi", "Pi": "pi", "infty": "infinity", "infinity": "infinity", "oo": "infinity", "inf": "infinity"}
_GREEK = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau phi"
    " varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell hbar"
)
GREEK = frozenset(_GREEK.split())
_DECORATIONS = "vec hat bar overline overrightarrow mathbf boldsymbol bm tilde dot ddot mathbb mathcal"
DECORATIONS = frozenset(_DECORATIONS.split())
FONTS = frozenset(["mathrm", "mathit", "text", "textbf", "textit", "rm", "operatorname", "mathsf", "textrm", "mbox"])
_TOKEN = re.compile(
    r"\s+|(?P<number>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,3}(?![0-9a-zA-Z.]))?"
    r"|\.[0-9]+)|\\(?P<command>[A-Za-z]+|.)|(?P<letters>[A-Za-z]+)|(?P<sign>\*\*|.)",
    re.DOTALL,
)
_DOTS = r"\\[lc]?dots(?![a-z])"
_REPEATING = re.compile(
    r"(?P<whole>[0-9]{0,150})\.(?P<once>[0-9]{0,150}?)(?:"
    r"\\(?:overline|bar|dot) *\{?(?P<barred>(?<=\{)[0-9]+(?=\})|[0-9](?!\}))\}?|\((?P<enclosed>[0-9]{1,50})\)"
    rf"|(?P<digit>[0-9])(?P=digit){{2,9}}{_DOTS}|(?<=\.)(?P<group>[0-9]{{2,9}})(?P=group){{1,9}}{_DOTS})"
)
_DOTTED = re.compile(r"\\dot *\{?([0-9])\}?([0-9]{0,50})\\dot *\{?([0-9])\}?")
_CUT_OFF = re.compile(rf"(\.[0-9]{{6,}}){_DOTS}$")
_CHOOSE = re.compile(r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}")
_COMBINATIONS = re.compile(
    r"(?:\{\})?[\^_]?(?<![0-9])\{?(?P<n>[0-9]{1,3})\}? ?C_?\{?(?P<k>[0-9]{1,3})\}?(?![0-9])"
    r"|(?<![A-Za-z])C\((?P<m>[0-9]{1,3}),(?P<j>[0-9]{1,3})\)"
)
_BELOW = r"_ ?(?:\{ ?(?P<n>[0-9]{1,3}|[a-z]) ?\}|(?P<m>[0-9a-z]))"
_ABOVE = r"\^ ?(?:\{ ?(?P<k>[0-9]{1,3}|[a-z]) ?\}|(?P<j>[0-9a-z]))"
_CHOSEN = re.compile(rf"(?<![A-Za-z\\])(?P<kind>[CAP]){_BELOW} ?{_ABOVE}(?![0-9])")  # C_{10}^{3}, as in China
_TIMES_TEN = re.compile(r"(?<=[0-9]) ?x ?(?=10\^)")
_DEGREE = re.compile(r"\^ ?\{ ?\\(?:circ|degree) ?\}|\^ ?\\(?:circ|degree)(?![A-Za-z])|\\degree(?![A-Za-z])")
_FONT_WORDS = re.compile(
    r"\\(?:mathrm|text|textbf|textit|mathit|operatorname|rm|mathsf|textrm|mbox) ?\{ ?([A-Za-z0-9.,]+) ?\}"
)


class Token(NamedTuple):
    """A part of a formula, and whether white space stands before it."""

    kind: str  # "number", "command", "letters", "sign" or "end"
    text: str
    spaced: bool


def tokens_of(text: str) -> list[Token]:
    r"""Return the tokens of a formula, and one of the kind "end" behind them.

    >>> [token.text for token in tokens_of(r"\frac12 x")]
    ['frac', '12', 'x', 'end']
    """
    text = _FONT_WORDS.sub(lambda match: f" {match[1]} " if len(match[1]) > 1 else match[1], text)
    text = _CHOOSE.sub(r"\\binom{\1}{\2}", _TIMES_TEN.sub(r"\\times ", text))
    text = _COMBINATIONS.sub(_combinations, _CHOSEN.sub(_chosen, text))
    text = _DEGREE.sub(r"\\deg ", text.replace("{,}", ",").replace(r"\ ", " ").replace("~", " "))
    text = _REPEATING.sub(_repeating, _DOTTED.sub(r"\\overline{\1\2\3}", text))
    return list(_tokens(_CUT_OFF.sub(r"\1", text)))


def _tokens(text: str) -> Iterator[Token]:
    spaced = False
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup
        if kind is None:
            spaced = True
            continue
        yield Token(kind, match[kind], spaced)
        spaced = False
    yield Token("end", "end", False)


def _chosen(match: re.Match[str]) -> str:
    n, k = match["n"] or match["m"], match["k"] or match["j"]
    numbers = n.isdigit() and k.isdigit()
    if (numbers and int(n) < int(k)) or (not numbers and (match["kind"] != "C" or n.isdigit())):
        return match[0]
    permutations = "" if match["kind"] == "C" else rf"\cdot ({k})!"
    return rf"\binom{{{n}}}{{{k}}}{permutations}"


def _combinations(match: re.Match[str]) -> str:
    n, k = match["n"] or match["m"], match["k"] or match["j"]
    return rf"\binom{{{n}}}{{{k}}}" if int(n) >= int(k) else match[0]


def _repeating(match: re.Match[str]) -> str:
    whole, once = match["whole"] or "0", match["once"]
    period = match["barred"] or match["enclosed"] or match["digit"] or match["group"]
    if len(whole + once + period) > 150:
        raise UnreadableError("a repeating decimal that is too long")
    below = (10 ** len(period) - 1) * 10 ** len(once)
    return rf"\repeating{{{int(whole + once + period) - int(whole + once)}}}{{{below}}}"
