"""Rewrite notation of Python, of calculators and of single countries as the LaTeX that is read elsewhere."""

import re

__all__ = ["as_latex"]

_MODULE = re.compile(r"(?<![A-Za-z.])(?:c?math|np|numpy|sp|sympy|mpmath|mp)\.(?=[A-Za-z])")
_NATURAL = re.compile(r"(?<![A-Za-z.])(?:c?math|np|numpy|sp|sympy|mpmath|mp)\.log\(")
_LOGARITHM = re.compile(r"(?<![A-Za-z\\])log(10|2)\(")
_DIGIT_GROUPS = re.compile(r"(?<![0-9A-Za-z_.])[0-9]{1,3}(?:_[0-9]{3})+(?![0-9A-Za-z_])")
_FRACTION = re.compile(r"(?<![A-Za-z\\])(?:Rational|Fraction|S\.Rational)\(([^(),]+),([^(),]+)\)")
_COMPLEX = re.compile(r"(?<![A-Za-z\\])complex\(([^(),]+),([^(),]+)\)")
_POWER = re.compile(r"(?<![A-Za-z\\])pow\(([^(),]+),([^(),]+)\)")
_FLOAT = re.compile(r"(?<![A-Za-z\\])float\(['\"]([-+]?)inf(?:inity)?['\"]\)")
_WRAPPED = re.compile(
    r"(?P<name>array|[mM]atrix|set|frozenset|FiniteSet|list|tuple|Point|Tuple|int|float|Integer|Float)\((?P<inner>.*)\)"
)
_IMAGINARY = re.compile(r"(?<![0-9.A-Za-z])((?:[0-9]+\.?[0-9]*|\.[0-9]+)) ?\*? ?[jJ](?![A-Za-z0-9_({])")
_OUTWARD = re.compile(r"([\[\]])([^\[\](){},;]+[,;][^\[\](){},;]+)([\[\]])")
_OUTWARD_ONLY = re.compile(rf"(?:{_OUTWARD.pattern}(?:\\cup|∪|U| )*)+")


def as_latex(text: str) -> str:
    r"""Return an answer with LaTeX in place of other notation; what is LaTeX already stays as it is.

    >>> as_latex("np.pi/2"), as_latex("math.log(2)"), as_latex("3+4j"), as_latex("1_000"), as_latex("]1,2]")
    ('pi/2', 'ln(2)', '3+4i', '1000', '(1,2]')
    >>> as_latex("np.array([1,2])"), as_latex("Rational(1,2)"), as_latex("float('-inf')")
    ('[1,2]', '((1)/(2))', '-\\infty ')
    """
    text = _MODULE.sub("", _NATURAL.sub("ln(", text))
    text = _LOGARITHM.sub(r"\\log_{\1}(", _DIGIT_GROUPS.sub(lambda match: match[0].replace("_", ""), text))
    text = _FLOAT.sub(r"\1\\infty ", _COMPLEX.sub(r"(\1+(\2)i)", _FRACTION.sub(r"((\1)/(\2))", text)))
    text = _POWER.sub(r"(\1)^(\2)", text)
    if wrapped := _WRAPPED.fullmatch(text):
        bare = wrapped["inner"][:1] not in "([{"
        around = {"FiniteSet": r"\{%s\}", "Point": "(%s)"}.get(wrapped["name"], "%s") if bare else "%s"
        text = around % wrapped["inner"] if wrapped["inner"] else r"\{\}"
    if not re.search(r"[A-Za-ik-z]", re.sub(r"\\?sqrt|\\frac|\\cdot|\\text|\\or|\\and", "", text)):
        text = _IMAGINARY.sub(r"\1i", text)
    if text[:1] in ("[", "]") and _OUTWARD_ONLY.fullmatch(text):
        text = _OUTWARD.sub(_brackets, text)
    return text


def _brackets(match: re.Match[str]) -> str:
    """Return an interval with parentheses where a bracket points away from it."""
    return ("(" if match[1] == "]" else "[") + match[2] + (")" if match[3] == "[" else "]")
