"""Rewrite notation of Python, of calculators and of single countries as the LaTeX that is read elsewhere."""

import re

__all__ = ["as_latex"]

_TEXT = re.compile(r"\\(?:text|mathrm|mbox) ?\{([^{}]*)\}")
_MODULES = r"(?<![A-Za-z.])(?:c?math|np|numpy|sp|sympy|mpmath|mp)\."
_MODULE = re.compile(rf"{_MODULES}(?=[A-Za-z])")
_NATURAL = re.compile(rf"{_MODULES}log\(")
_LOGARITHM = re.compile(r"(?<![A-Za-z\\])log(10|2)\(")
_LOGARITHM_TO = re.compile(r"(?<![A-Za-z\\])log\(([^(),]+),([^(),]+)\)")
_QUOTED = re.compile(r"(?<=[\[{(, ])(['\"])([^'\"\[\]{}()]*)\1(?=[\]}),])")
_DIGIT_GROUPS = re.compile(r"(?<![0-9A-Za-z_.])[0-9]{1,3}(?:_[0-9]{3})+(?![0-9A-Za-z_])")
_POINTED_GROUPS = re.compile(r"(?<![0-9A-Za-z.,])[0-9]{1,3}(?:\.[0-9]{3}){2,}(?![0-9.])")
_CASES = re.compile(
    r"\\begin\{(?:cases|aligned|gathered)\}(?P<lines>(?:(?!\\begin)[^&])+)\\end\{(?:cases|aligned|gathered)\}"
)
_FRACTION = re.compile(r"(?<![A-Za-z\\])(?:Rational|Fraction|S\.Rational)\(([^(),]+),([^(),]+)\)")
_COMPLEX = re.compile(r"(?<![A-Za-z\\])complex\(([^(),]+),([^(),]+)\)")
_POWER = re.compile(r"(?<![A-Za-z\\])pow\(([^(),]+),([^(),]+)\)")
_FLOAT = re.compile(r"(?<![A-Za-z\\])float\(['\"]([-+]?)inf(?:inity)?['\"]\)")
_WRAPPED = re.compile(
    r"(?P<name>array|[mM]atrix|set|frozenset|FiniteSet|list|tuple|Point|Tuple|int|float|Integer|Float)\((?P<inner>.*)\)"
)
_INTERVAL = re.compile(
    r"Interval(?P<open>\.open|\.Lopen|\.Ropen)?\((?P<ends>[^(),]+(?:\([^()]*\))?,[^(),]+(?:\([^()]*\))?)\)"
)
_UNION = re.compile(r"Union\((.+)\)")
_EXCEPT = re.compile(
    r"(?:[a-z] ?(?:is|can be|=|\\in) ?)?(?:(?:all|any|every|the) )?(?:set of )?(?:all )?real (?:numbers?|values?)"
    r"(?: of [a-z])?,? (?:except|other than|excluding|but not)(?: for)? (?:[a-z] ?= ?)?(?P<points>.+)"
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
    text = _POINTED_GROUPS.sub(lambda match: match[0].replace(".", ""), text)
    if cases := _CASES.fullmatch(text):
        text = ",".join(line.strip(" ,") for line in cases["lines"].split(r"\\") if line.strip(" ,"))
    text = _LOGARITHM_TO.sub(r"\\log_{\2}(\1)", _QUOTED.sub(r"\2", text) if text[:1] in "[{(" else text)
    text = r"\{\}" if text in ("[]", "()") else re.sub(r"^\(([^(),]+),\)$", r"[\1]", re.sub(r",(?=\]$)", "", text))
    text = _FLOAT.sub(r"\1\\infty ", _COMPLEX.sub(r"(\1+(\2)i)", _FRACTION.sub(r"((\1)/(\2))", text)))
    text = _INTERVAL.sub(_interval, text)
    if union := _UNION.fullmatch(text):
        text = re.sub(r"(?<=[)\]}]) ?, ?(?=[(\[{])", r"\\cup ", union[1])
    if exception := _EXCEPT.fullmatch(" ".join(_TEXT.sub(r" \1 ", text).split())):
        text = rf"\mathbb{{R}}\setminus\{{{exception['points'].replace(' and ', ',')}\}}"
    text = _POWER.sub(r"(\1)^(\2)", text)
    if wrapped := _WRAPPED.fullmatch(text):
        bare = wrapped["inner"][:1] not in "([{"
        around = {"FiniteSet": r"\{%s\}", "Point": "(%s)"}.get(wrapped["name"], "%s") if bare else "%s"
        text = around % wrapped["inner"] if wrapped["inner"] else r"\{\}"
    letters = set(re.sub(r"\\?(?:sqrt|frac|cdot|text|pi|exp|sin|cos)|(?<![a-z])(?:or|and)(?![a-z])", "", text)) - {"e"}
    if not any(letter.isalpha() and letter not in "jJ" for letter in letters):
        text = _IMAGINARY.sub(r"\1i", text)
    elif "*" in text and not any(letter.isalpha() and letter != "I" for letter in letters):
        text = re.sub(r"(?<=\*)I|I(?=\*)", "i", text)
    if text[:1] in ("[", "]") and _OUTWARD_ONLY.fullmatch(text):
        text = _OUTWARD.sub(_brackets, text)
    return text


def _interval(match: re.Match[str]) -> str:
    low, high = match["open"] in (".open", ".Lopen"), match["open"] in (".open", ".Ropen")
    return ("(" if low else "[") + match["ends"] + (")" if high else "]")


def _brackets(match: re.Match[str]) -> str:
    """Return an interval with parentheses where a bracket points away from it."""
    return ("(" if match[1] == "]" else "[") + match[2] + (")" if match[3] == "[" else "]")
