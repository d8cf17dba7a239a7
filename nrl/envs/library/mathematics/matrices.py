"""Read matrices, in LaTeX or by their rows."""

import re

from nrl.envs.library.mathematics.expressions import parse
from nrl.envs.library.mathematics.kinds import Matrix
from nrl.envs.library.mathematics.nodes import Node, UnreadableError
from nrl.envs.library.mathematics.patterns import NAME
from nrl.envs.library.mathematics.separators import is_bracketed, items_in, split_at_top

__all__ = ["read_matrix", "read_rows"]

_MATRIX = re.compile(
    r"(?P<factor>.*?)\\begin\{(?:[pbBvV]?matrix|array)\}(?:\{[lcr| ]*\})?(?P<body>(?:(?!\\begin).)*?)"
    r"\\end\{(?:[pbBvV]?matrix|array)\}",
    re.DOTALL,
)


def read_matrix(text: str) -> Matrix | None:
    r"""Read a matrix in LaTeX, perhaps with a number before it; None: there is none.

    >>> len(read_matrix(r"2\begin{pmatrix}1&0\\0&1\end{pmatrix}").rows), read_matrix("x")
    (2, None)
    """
    if "\\begin" not in text:
        return None
    found = _MATRIX.fullmatch(text)
    if found is None:
        raise UnreadableError("an environment that is no matrix")
    body = re.sub(r"\\\\ *(?:\[[^\]]*\])? *$", "", re.sub(r"\\hline", "", found["body"].strip()))
    rows = [tuple(parse(cell) for cell in row.split("&")) for row in re.split(r"\\\\|\\cr(?![A-Za-z])", body)]
    if len({len(row) for row in rows}) != 1:
        raise UnreadableError("rows of different lengths")
    factor = found["factor"].strip().removesuffix("\\cdot").strip()
    if name := re.fullmatch(rf"(?:{NAME.pattern})=(.*)", factor):
        factor = name[1].strip()
    if factor:
        times = parse("-1" if factor == "-" else factor)
        rows = [tuple(Node("*", (times, cell), "factor") for cell in row) for row in rows]
    return Matrix(tuple(rows))


def read_rows(inner: str) -> Matrix | None:
    """Read a matrix by its rows: ``[1,2],[3,4]``, or ``1,2;3,4``, without the brackets around it."""
    parts = [part.strip() for _, part in split_at_top(inner, re.compile(","))]
    if all(part[:1] == "[" and part[-1:] == "]" and is_bracketed(part) for part in parts):
        rows = [items_in(part[1:-1]) for part in parts]
    else:
        rows = [items_in(part) for _, part in split_at_top(inner, re.compile(";"))]
        if len(rows) < 2 or len(rows[0]) < 2:
            return None
    if len({len(row) for row in rows}) != 1:
        return None
    return Matrix(tuple(tuple(parse(cell) for cell in row) for row in rows))
