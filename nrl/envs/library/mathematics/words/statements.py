"""Find where a response says that something is its answer: tags, JSON, ``Answer: x+1``, ``答案：42``."""

import re
from typing import NamedTuple

__all__ = ["SAYS", "Statement", "is_taken_back", "last_statement", "may_be_formula", "sentence_end_removed"]

SAYS = re.compile(
    r"\b(?:answer|result|solution)s?\b[*_]*(?:\s+(?:is|are|equals)\b)?[\s*_]*[:=：]?[\s*_]*"
    r"|(?:答案|结果|結果)(?:应该|應該)?(?:是|为|為|等于)?[\s*_]*[:：]?[\s*_]*|(?<!\w)答\s?[:：][\s*_]*"
    r"|答え\s?(?:は|[:：])[\s*_]*|(?:정답|답)\s?(?:은|는|[:：])[\s*_]*"
    r"|\b(?:respuesta|réponse|antwort|lösung|resposta|risposta|ответ)\b[*_]*"
    r"(?:\s(?:correcta|correcte|correta|corretta|finale?)\b)?(?:\s(?:es|est|ist|lautet|é|è)\b)?[\s*_]*[:：]?[\s*_—-]*",
    re.IGNORECASE,
)
_STATEMENT = re.compile(
    r"<answer>(?P<tag>[^<]{1,1000})</answer>"
    r"|[\"'](?:final_)?answer[\"']\s?:\s?(?:\"(?P<quoted>(?:[^\"\\]|\\.){1,1000})\"|'(?P<single>(?:[^'\\]|\\.){1,1000})'"
    r"|\[(?P<items>[^\[\]{}]{1,1000})\]|(?P<bare>[^\s\"'{}\[\],]{1,1000}|\[\[[^{}\n]{1,1000}\]\]))"
    r"|^[ \t*_>#]{0,8}(?:(?:the|my|final|correct) ){0,3}answer[*_]{0,4}\s?[:：][ \t*_]{0,8}"
    r"(?P<line>[^\W\d_][^\n{}\\$=:]{0,60})$",
    re.IGNORECASE | re.MULTILINE,
)
_POLITE_END = re.compile(r"\s?(?:です|になります|である|だ|입니다|이다|이에요|예요)?[\s*_]*[。．.]?[\s*_]*$")
_MOST_WORDS = 5
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}|[\u0400-\u052f\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]")
_FUNCTION = re.compile(
    "sqrt|(?:arc)?(?:sin|cos|tan)|cot|sec|csc|log|ln|exp|pi|inf(?:inity)?|oo|or|and|frac|max|min|abs|mod|remainder|math"
    "|np|numpy|sympy|sp|array|Matrix|Rational|Fraction|complex"
)
_TAKEN_BACK = re.compile(
    r"\b(?:wait|actually|correction|mistake|instead|rather|recheck|sorry|oops|but|not)\b", re.IGNORECASE
)


class Statement(NamedTuple):
    """Where a statement of an answer begins and ends, what it says, and whether that may be words."""

    start: int
    end: int
    text: str
    marked: bool


def last_statement(text: str) -> Statement | None:
    r"""Return the last answer in a tag, in JSON, or alone behind "Answer:"; None: there is none.

    >>> last_statement('{"answer": "\\frac12"}').text, last_statement("<answer>Paris</answer>").text
    ('\\frac12', 'Paris')
    >>> last_statement("Answer: even").text, last_statement("The answer is 4.")
    ('even', None)
    """
    *_, match = [None, *_STATEMENT.finditer(text)]
    if match is None or match.lastgroup is None:
        return None
    said = match[match.lastgroup]
    if match.lastgroup in ("quoted", "single"):
        said = said.replace(r"\\", "\\").replace(r"\"", '"')
    if match.lastgroup == "line":
        said = said.strip(" \t*_").rstrip(".!")
        if len(said.split()) > _MOST_WORDS:
            return None
    return Statement(match.start(), match.end(), said.strip(), match.lastgroup != "line")


def sentence_end_removed(text: str, in_sentence: bool) -> str:
    """Return the end of a sentence without what ends it; where words stand before it, "42!" is no factorial.

    >>> sentence_end_removed("42!", True), sentence_end_removed("4!", False), sentence_end_removed("42です。", True)
    ('42', '4!', '42')
    """
    text = _POLITE_END.sub("", text.strip(" \t*_"))
    return text.rstrip("!！").rstrip(" *_") if in_sentence else text


def may_be_formula(text: str) -> bool:
    """Return whether a text has no words in it, and something else.

    >>> may_be_formula("sin(x)+1"), may_be_formula("the answer"), may_be_formula("答え")
    (True, False, False)
    """
    return any(each.isalnum() for each in text) and all(
        _FUNCTION.fullmatch(word) for word in _WORD.findall(re.sub(r"\\(?:text|mathrm)\s*\{[^{}]*\}", "", text))
    )


def is_taken_back(text: str) -> bool:
    """Return whether a text behind an answer takes it back.

    >>> is_taken_back("Wait, that is wrong."), is_taken_back("I hope this helps.")
    (True, False)
    """
    return _TAKEN_BACK.search(text) is not None
