r"""Read formulas of sets (``A\cup B``) and of statements (``p\land q``) by their tables of truth."""

import itertools
import operator
import re
from collections.abc import Callable

from nrl.envs.library.mathematics.kinds import Logic
from nrl.envs.library.mathematics.nodes import UnreadableError

__all__ = ["read_logic"]

_MOST = 6  # letters, since the table has two to their power rows
_DEEPEST = 40
_TOKEN = re.compile(
    r"\s+|(?P<or>\\(?:cup|lor|vee)(?![A-Za-z])|∨)|(?P<and>\\(?:cap|land|wedge)(?![A-Za-z])|∧)"
    r"|(?P<without>\\(?:setminus|backslash)(?![A-Za-z])|(?<=[A-Z)])-(?=[A-Z(]))"
    r"|(?P<xor>\\(?:triangle|oplus|Delta|bigtriangleup)(?![A-Za-z])|⊕)"
    r"|(?P<iff>\\(?:leftrightarrow|Leftrightarrow|iff)(?![A-Za-z])|<->|↔)"
    r"|(?P<then>\\(?:to|rightarrow|Rightarrow|implies)(?![A-Za-z])|->|→)"
    r"|(?P<not>\\(?:neg|lnot|sim)(?![A-Za-z])|¬)"
    r"|(?P<over>\\(?:overline|bar)\s*(?=\{|[A-Za-z]))"
    r"|(?P<behind>'|\^\{?(?:c|C|\\complement|\\prime|')\}?)"
    r"|(?P<open>[({\[])|(?P<close>[)}\]])|(?P<letter>[A-Za-z])(?![A-Za-z0-9_])"
)
_SET_SIGNS = re.compile(r"\\(?:cup|cap|setminus|backslash|triangle|bigtriangleup)(?![A-Za-z])")
_SIGNS = re.compile(
    rf"{_SET_SIGNS.pattern}|\\(?:lor|land|vee|wedge|neg|lnot|oplus|to|(?:left)?rightarrow|Rightarrow|implies|iff|sim)"
    r"(?![A-Za-z])|[¬∧∨⊕→↔]|->"
)
_LEVELS: tuple[tuple[str, ...], ...] = (("iff",), ("then",), ("or", "xor"), ("and", "without"))
type _Row = dict[str, bool]
type _Truth = Callable[[_Row], bool]


def read_logic(text: str) -> Logic | None:
    r"""Read a formula of sets or of statements, each named by one letter; None: it is something else.

    >>> read_logic(r"A\cup B") == read_logic(r"B\cup A"), read_logic(r"A\cup B") == read_logic(r"A\cap B")
    (True, False)
    >>> read_logic(r"\neg p\lor q") == read_logic(r"p\to q"), read_logic("x+1")
    (True, None)
    """
    if not _SIGNS.search(text):
        return None
    tokens, place = list[tuple[str, str]](), 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            return None
        if match.lastgroup is not None:
            tokens.append((match.lastgroup, match[0]))
        place = match.end()
    letters = tuple(sorted({token for kind, token in tokens if kind == "letter"}))
    if not 1 <= len(letters) <= _MOST:
        return None
    try:
        truth, rest = _formula(tokens, 0, 0)
    except UnreadableError:
        return None
    if rest:
        return None
    rows = itertools.product((False, True), repeat=len(letters))
    values = sum(truth(dict(zip(letters, row, strict=True))) << k for k, row in enumerate(rows))
    return Logic(letters, values, bool(_SET_SIGNS.search(text)))


def _formula(tokens: list[tuple[str, str]], level: int, depth: int) -> tuple[_Truth, list[tuple[str, str]]]:
    """Read a formula whose operations bind at least as strongly as a level; return it and the tokens behind it."""
    if depth > _DEEPEST:
        raise UnreadableError("too deep")
    if level == len(_LEVELS):
        return _factor(tokens, depth)
    left, rest = _formula(tokens, level + 1, depth)
    while rest and rest[0][0] in _LEVELS[level]:
        right_level = level if rest[0][0] == "then" else level + 1  # p -> q -> r is p -> (q -> r)
        right, behind = _formula(rest[1:], right_level, depth + 1)
        left, rest = _joined(rest[0][0], left, right), behind
    return left, rest


def _joined(kind: str, left: _Truth, right: _Truth) -> _Truth:
    match kind:
        case "or":
            return lambda row: left(row) or right(row)
        case "and":
            return lambda row: left(row) and right(row)
        case "without":
            return lambda row: left(row) and not right(row)
        case "then":
            return lambda row: not left(row) or right(row)
        case "xor":
            return lambda row: left(row) != right(row)
    return lambda row: left(row) == right(row)


def _factor(tokens: list[tuple[str, str]], depth: int) -> tuple[_Truth, list[tuple[str, str]]]:
    if not tokens:
        raise UnreadableError("nothing")
    (kind, text), rest = tokens[0], tokens[1:]
    if kind in ("not", "over"):
        inner, rest = _factor(rest, depth + 1)
        truth = _negated(inner)
    elif kind == "open":
        truth, rest = _formula(rest, 0, depth + 1)
        if not rest or rest[0][0] != "close":
            raise UnreadableError("a bracket that is not closed")
        rest = rest[1:]
    elif kind == "letter":
        truth = operator.itemgetter(text)
    else:
        raise UnreadableError(text)
    while rest and rest[0][0] == "behind":
        truth, rest = _negated(truth), rest[1:]
    return truth, rest


def _negated(truth: _Truth) -> _Truth:
    return lambda row: not truth(row)
