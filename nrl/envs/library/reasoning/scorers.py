"""What is mended about scorers of reasoning-gym 0.1.25: which answers they are given, and which of them may have 1."""

import ast
import json
import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

__all__ = ["EXACT", "MENDED", "Mend", "formula"]

type _Row = Mapping[str, Any]


class Mend(NamedTuple):
    """What is done about a scorer.

    Args:
        why: what it does otherwise.
        readable: whether an answer to a row is given to it; what is not gets 0.
        right: whether an answer may have more than `most`.
        most: the score of what is not right, at most.

    >>> MENDED["quantum_lock"].readable("A -> B", {}), MENDED["quantum_lock"].readable("A box", {})
    (True, False)
    """

    why: str
    readable: Callable[[str, _Row], bool] = lambda answer, row: True
    right: Callable[[str, _Row], bool] = lambda answer, row: True
    most: float = 0.0


_FUNCTIONS = frozenset(
    {"Abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "cot", "csc", "exp", "ln", "log", "oo"}
    | {"pi", "sec", "sin", "sinh", "sqrt", "tan", "tanh"}
)
_TOKENS = re.compile(
    r"(?P<name>[A-Za-z]\w*)|(?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)|(?P<sign>\*\*|[-+*/(),])|(?P<other>\S)"
)
_BITS = 20_000  # of the numbers in a formula
_FILLERS = frozenset({"a", "an", "and", "is"})


def formula(answer: str) -> bool:
    """Whether a text is a formula in Python's notation, of letters, numbers and functions, without a huge number.

    SymPy may parse it: it runs what it is given as Python.

    >>> formula("-4*(-2*x - 8)**(3/2)/3 + C"), formula("x.diff()"), formula("9**9**9"), formula("f(x)")
    (True, False, False, True)
    """
    if len(answer) > 2000:
        return False
    for found in _TOKENS.finditer(answer):
        name = found["name"]
        if found["other"] or (name and len(name) > 1 and name not in _FUNCTIONS):
            return False
    try:
        return _bits(ast.parse(answer.strip(), mode="eval").body) <= _BITS
    except SyntaxError:
        return False


def _bits(node: ast.AST) -> float:
    """A bound of the bits of a number."""
    match node:
        case ast.Constant(int() as value):
            return value.bit_length()
        case ast.UnaryOp(_, operand):
            return _bits(operand)
        case ast.BinOp(base, ast.Pow(), exponent):
            bits = _bits(exponent)
            return math.inf if bits > 12 else max(1.0, _bits(base)) * 2**bits
        case ast.BinOp(left, _, right):
            return _bits(left) + _bits(right) + 1
        case ast.Call(_, args):
            return sum(map(_bits, args))
        case ast.Tuple(elements):
            return sum(map(_bits, elements))
    return 4


def _numbers(answer: str) -> list[str]:
    """All whole numbers of a text."""
    return re.findall(r"\d+", answer)


def _formula(answer: str, row: _Row) -> bool:
    return formula(answer)


def _sum(answer: str, row: _Row) -> bool:
    return formula(answer) and not re.search(r"[A-Za-z]", answer)


def _with_its_numbers(answer: str, row: _Row) -> bool:
    return _sum(answer, row) and bool(sorted(map(int, _numbers(answer))) == sorted(row["metadata"]["numbers"]))


def _is_24(answer: str, row: _Row) -> bool:
    return _value(ast.parse(answer.strip(), mode="eval").body) == 24


def _value(node: ast.AST) -> Fraction:
    """The exact value of whole numbers under the four operators."""
    match node:
        case ast.Constant(int() as value):
            return Fraction(value)
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand)
        case ast.BinOp(left, ast.Add(), right):
            return _value(left) + _value(right)
        case ast.BinOp(left, ast.Sub(), right):
            return _value(left) - _value(right)
        case ast.BinOp(left, ast.Mult(), right):
            return _value(left) * _value(right)
        case ast.BinOp(left, ast.Div(), right):
            return _value(left) / _value(right)
    raise ValueError("no number, and none of the four operators")


def _same_text(answer: str, row: _Row) -> bool:
    return bool(answer.lower() == row["answer"].strip().lower())


def _only(pattern: str) -> Callable[[str, _Row], bool]:
    compiled = re.compile(pattern)
    return lambda answer, row: compiled.fullmatch(answer.strip()) is not None


def _once(pattern: str) -> Callable[[str, _Row], bool]:
    """A text that has one thing of a kind."""
    compiled = re.compile(pattern)
    return lambda answer, row: len(set(compiled.findall(answer))) == 1


def _near(answer: str, row: _Row) -> bool:
    found, right = (float(Fraction(each.replace(",", ""))) for each in (answer, row["answer"]))
    return math.isclose(found, right, rel_tol=1e-2)


def _same_numbers(answer: str, row: _Row) -> bool:
    found, right = (json.loads(each.replace("'", '"')) for each in (answer, row["answer"]))
    return list(map(float, found)) == list(map(float, right))


def _as_many_words(answer: str, row: _Row) -> bool:
    return len(answer.split(",")) == len(row["metadata"]["sorted_words"])


def _same_shape(answer: str, row: _Row) -> bool:
    def shape(text: str) -> Any:
        return [len(each) if isinstance(each, list) else 0 for each in json.loads(text)]

    return bool(shape(answer) == shape(row["answer"]))


def _each_vertex_once(answer: str, row: _Row) -> bool:
    pairs = json.loads(answer, object_pairs_hook=list)
    return len(pairs) == len(row["metadata"]["puzzle"]["vertices"])


def _each_letter_once(answer: str, row: _Row) -> bool:
    letters = [pair.split("=")[0].strip() for pair in answer.split(",")]
    return len(letters) == len(set(letters))


def _each_partition_once(answer: str, row: _Row) -> bool:
    return len(json.loads(answer)) == len(row["metadata"]["solution"])


def _to_a_hundredth(answer: str, row: _Row) -> bool:
    pairs = zip(answer.split(), row["answer"].split(), strict=True)
    return all(abs(float(found) - float(right)) <= 0.01 for found, right in pairs)


def _moves(answer: str, row: _Row) -> bool:
    return all(re.fullmatch(r"[^\d]+\d?", each) for each in answer.split())


def _each_person_once(answer: str, row: _Row) -> bool:
    def said(text: str) -> list[str]:
        return sorted(word for word in re.findall(r"\w+", text.lower()) if word not in _FILLERS)

    return not re.search(r"[^\w\s,.()]", answer) and said(answer) == said(row["answer"])


def _no_premise(answer: str, row: _Row) -> bool:
    def plain(text: str) -> str:
        text = "".join(text.split())
        return text[1:-1] if text[:1] == "(" and text[-1:] == ")" else text

    return plain(answer) not in map(plain, row["metadata"]["premises"])


_RUNS = "SymPy runs a model's text as Python; only formulas without huge numbers are read"
_LISTS = "runs a model's text as Python; it is read as a literal"
_PREFIX = "gives 1 to the answer with anything behind it; that gets 0.8"
_NUMBER = r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"

MENDED: dict[str, Mend] = {
    "advanced_geometry": Mend(
        "passes over what stands behind the second number of a point; there are one or two", _only(r"[^,]*(?:,[^,]*)?")
    ),
    "binary_matrix": Mend(_LISTS),
    "coin_flip": Mend(
        "gives 1 to 0 where the probability is less than 0.0001; it has to be right to a hundredth",
        right=_near,
        most=0.5,
    ),
    "complex_arithmetic": Mend("gives 1 to nan", lambda answer, row: "nan" not in answer.lower()),
    "countdown": Mend(_RUNS, _sum),
    "cryptarithm": Mend("reads the last of several digits of a letter; there may be one", _each_letter_once),
    "fraction_simplification": Mend(
        "takes the first fraction of a text; only a fraction is read, in dollars or not",
        _only(r"\$*\s*(?:\d+\s*/\s*\d+|\\d?frac\s*\{\d+\}\s*\{\d+\})\s*\$*"),
    ),
    "game_of_life": Mend("gives 1 to the answer with more cells or rows; that gets 0.8", right=_same_shape, most=0.8),
    "graph_color": Mend(
        "passes over what is no vertex; each is there once, and nothing else", right=_each_vertex_once, most=0.01
    ),
    "gsm_symbolic": Mend(
        "takes the first number of a text, without its sign; only a number, $ and % are read",
        _only(r"[$€£]?\d+(?:\.\d+)?%?"),
    ),
    "intermediate_integration": Mend(_RUNS, _formula),
    "kakurasu": Mend("passes over all but 0 and 1; nothing else may be there", _only(r"[01\s,\[\]]+")),
    "knights_knaves": Mend(
        "passes over other words, such as not; what has more than each name's role gets 0.8",
        right=_each_person_once,
        most=0.8,
    ),
    "letter_jumble": Mend(_PREFIX, right=_same_text, most=0.8),
    "n_queens": Mend(_LISTS),
    "number_sorting": Mend(
        "gives 1 to NaN, and to numbers that are off by 1; they have to be equal", right=_same_numbers
    ),
    "palindrome_partitioning": Mend("passes over what is there twice; each may be there once", _each_partition_once),
    "polynomial_equations": Mend(
        "passes over what is no number; only numbers with commas between them are read",
        _only(rf"{_NUMBER}(?:\s*,\s*{_NUMBER})*"),
    ),
    "polynomial_multiplication": Mend(_RUNS, _formula),
    "pool_matrix": Mend(
        "allows a hundredth of each number; asked for two decimals, each is right to 0.01",
        right=_to_a_hundredth,
        most=0.1,
    ),
    "propositional_logic": Mend(
        "gives 1 to a premise, and takes long; that gets 0.25, as what is always true",
        _only(r"[A-Z()∧∨→↔¬ ]{1,500}"),
        right=_no_premise,
        most=0.25,
    ),
    "puzzle24": Mend(
        "as `countdown`; and gives 1 to any numbers that make 24, or 24.9; the row's have to make 24",
        _with_its_numbers,
        _is_24,
        0.01,
    ),
    "quantum_lock": Mend(
        "takes every A, B and C of a text for a button; nothing else may be there",
        _only(r"[ABCabc](?:[\s,→>-]{1,8}[ABCabc])*"),
    ),
    "rubiks_cube": Mend("passes over what is no move; only moves are read", _moves),
    "simple_integration": Mend(_RUNS, _formula),
    "sokoban": Mend("passes over what is no move; only moves are read", _only(r"[LRUD][LRUD\s,]*")),
    "spell_backward": Mend(_PREFIX, right=_same_text, most=0.8),
    "spiral_matrix": Mend(_LISTS),
    "string_insertion": Mend(_LISTS),
    "survo": Mend("passes over what is no whole number; nothing else may be there", _only(r"[-\d\s]+")),
    "time_intervals": Mend(
        "takes the first of several numbers of days; there may be one",
        _only(r"(?:\d+(?: days?)?)?,? ?(?:\d+:\d\d(?::\d\d(?:\.\d+)?)?)?"),
    ),
    "word_sorting": Mend("gives 1 to the answer with more words; that gets 0.8", right=_as_many_words, most=0.8),
}
"""Scorers that are mended, by dataset.

>>> MENDED["complex_arithmetic"].readable("nan", {})
False
"""

EXACT: dict[str, str] = {"game_of_life_halting": "gives 1 to every text; only the reference has 1"}
"""Scorers that are replaced: only the reference has 1. By dataset, with the reason.

>>> list(EXACT)
['game_of_life_halting']
"""
