"""Patterns of relations, of names before an equals sign, and of conditions that a letter is a whole number."""

import re

__all__ = ["FLIPPED", "INTEGERS", "NAME", "RELATIONS", "SIGN", "VALUE", "VARIABLE"]

RELATIONS = {
    "=": "=",
    "<": "<",
    ">": ">",
    r"\le": "<=",
    r"\ge": ">=",
    r"\lt": "<",
    r"\gt": ">",
    r"\ne": "!=",
    "!=": "!=",
    "<=": "<=",
    ">=": ">=",
    r"\leqslant": "<=",
    r"\geqslant": ">=",
    r"\equiv": "=",
    "==": "=",
}
SIGN = re.compile(r"<=|>=|!=|==|=|<|>|\\(?:le|ge|lt|gt|ne|leqslant|geqslant)(?![A-Za-z])")
FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
NAME = re.compile(
    r"(?:[A-Za-z]|\\(?:[a-z]+|Delta|Gamma|Omega))(?:_(?:\{[^{}]*\}|[A-Za-z0-9]))?'*(?:\^\{?-1\}?)?"
    r"(?:\([-A-Za-z0-9,./ ]*\))?|\\frac\{d[^{}]{0,3}\}\{d[^{}]{1,3}\}|[a-z]{1,2}/d[a-z]|(?:m ?)?\\angle ?[A-Z]{1,3}"
    r"|\((?:[A-Za-z]|\\[a-z]+ ?)(?:_[0-9])?(?:,(?:[A-Za-z]|\\[a-z]+ ?)(?:_[0-9])?)+\)|[A-Z]{2,3}"
    r"|\\(?:overline|vec|overrightarrow|mathbf|bar|hat) ?\{[A-Za-z]{1,2}\}|\\nabla ?[A-Za-z]"
    r"|(?:P|E|Pr|Var|\\Pr|\\mathbb ?\{?[PE]\}?)\([^()]{1,30}\)"
)
VARIABLE = re.compile(
    r"(?:[A-Za-z]|\\(?:alpha|beta|gamma|theta|lambda|mu|phi|omega|rho|sigma))(?:_(?:\{[^{}]*\}|[A-Za-z0-9]))?"
)
VALUE = re.compile(  # An expression before an equals sign of which an answer may give the value alone
    r"\\(?:sin|cos|tan|cot|sec|csc)(?:\^\{?-?[0-9]\}?)? ?(?:\\?[A-Za-z]+|\{[^{}=]*\}|\([^()=]*\)|\\angle ?[A-Z]+)"
    r"|\|(?:[A-Z]{2}(?:_\{?[0-9]\}?)?|z(?:_\{?[0-9]\}?)?|[^|=]*\\(?:vec|overrightarrow|mathbf|boldsymbol) ?\{[^|=]*)\|"
    r"|\\vec ?\{[a-z]\} ?\\cdot ?\\vec ?\{[a-z]\}"
    r"|\\lim(?:_\{[^{}]*\})?.*|S_\{?(?:\\triangle ?)?[A-Z]+\}?|\\(?:triangle|Delta) ?[A-Z]{3}"
)
_WHOLE = (
    r"(?:\\in(?![A-Za-z])|∈|(?:is |are )?in) ?(?:\\(?:mathbb|mathbf|Bbb|mathrm) ?)?\{?(?P<set>Z|N|the integers)\}?"
    r"(?P<part>\^\{?[+*]\}?|_\{?(?:\+|0|\\ge ?0|>0)\}?)?"
)
INTEGERS = re.compile(
    rf"(?P<value>.+?)[ ,;.]*(?:\()?(?:(?:where|for|with|and) )?(?:(?:any|all|some|every|each) )?(?:\\forall ?)?(?:"
    rf"(?P<a>[A-Za-z]) ?{_WHOLE}"
    r"|(?P<b>[A-Za-z]),? (?:(?:is |are |be |being )?(?:an |any |some )?(?:arbitrary )?)integers?"
    r"|(?<![A-Za-z])(?:an |any )?integers? (?P<c>[A-Za-z]))\)?"
)
