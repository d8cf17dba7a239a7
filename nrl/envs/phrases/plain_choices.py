"""Markdown, HTML, LaTeX and wide characters around the letter that a response chooses."""

import re

__all__ = ["plain_choice"]

_CHARACTERS = str.maketrans(
    {0xFEE0 + code: chr(code) for code in range(0x21, 0x7F)}  # the wide forms of ASCII
    | dict.fromkeys("“”„«»「」『』【】〔〕", '"')
    | {"’": "'", "‘": "'", "~": " ", "–": "-", "—": "-"}
)
_WRAPPED = re.compile(r"\\(?:text|math|operatorname|[fhm]box)[a-z]{0,6}\s?\{([^{}\\]{0,200})\}")
_DECLARED = re.compile(r"\\(?:bf|it|rm|sf|tt|displaystyle|large|Large|bold|left|right|quad|[,;! ])(?![a-zA-Z])")
_FENCE = re.compile(r"\s*(?:`{3,}|~{3,})\w*\s*")
_HTML = re.compile(
    r"</?(?:b|p|strong|em|i|u|span|div|br)\s?/?>|\s?[\ufe0f\U0001f449\U0001f44d\U0001f389]\s?", re.IGNORECASE
)
_HEADING = re.compile(r"\A\s{0,8}(?:(?:#{1,3}|#{5,6}|>)\s){1,4}")


def plain_choice(text: str) -> str:
    r"""Return a text without fences, headings, HTML, wide characters and fonts of LaTeX; white space is joined.

    >>> plain_choice(r"## Ａｎｓｗｅｒ:  \textbf{B}")
    'Answer: B'
    """
    lines = [_HEADING.sub("", line) for line in text.splitlines() if line.strip() and not _FENCE.fullmatch(line)]
    text = "\n".join(" ".join(line.translate(_CHARACTERS).split()) for line in lines)
    text = _HTML.sub("", text)
    if text.count("✅") == 1:  # else it marks what is right of several
        text = text.replace("✅", "").strip()
    if "\\" in text:
        text = re.sub(r"\\[()\[\]]", "", re.sub(r"\\[,;:! ]", " ", text).replace(r"\&", "&"))
        text = _DECLARED.sub("", text)
        for _ in range(2):  # \textbf{\text{B}}
            text = _WRAPPED.sub(r"\1", text)
        text = re.sub(" {2,}", " ", text)
    return text
