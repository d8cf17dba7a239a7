r"""`choice`: multiple choice, by the letter that a response ends with.

**Where it looks.** The first of these that a response has decides, and of several of one kind the last:

1. ``\boxed{B}``, ``\boxed{B) Paris}``, ``\boxed{\textbf{(B)}}``;
2. ``<answer>B</answer>``, ``#### B``;
3. "the answer is B", "answer: (B)", ``{"answer": "B"}``, "option B is correct", "I choose option B", "so B", "B is
   correct" and the like, also in Chinese, French, German, Italian, Portuguese, Russian and Spanish;
4. a response, or its last line, that is nothing but a letter: ``B``, ``(b)``, ``**B.**``, "option B"; or, if no other
   line is one too, an option with its text: ``B) Paris``. Fences of code are left out.

**What is no letter.** A small letter, unless it is in brackets or quotation marks or ends the sentence ("the answer is
a bit unclear"); ``A`` and ``I`` before a word that may follow an article or a pronoun ("answer: I do not know"); a
letter of which the response says that it is wrong; one beyond the task's ``"choices"``; all letters elsewhere. A
response that names several (``A or B``, ``A, B, C, D``), or a letter beside the text of another choice, has no answer.
"""

import re
from collections.abc import Sequence
from typing import Any

from nrl.envs.contract import Score, Task, Trace
from nrl.envs.final_numbers import boxes
from nrl.envs.verifiers import extracts
from nrl.errors import EnvError

__all__ = ["choice", "chosen_letter"]

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_LONGEST = 1000  # characters of a choice's text
# Patterns stay linear: white space is joined before, and all other runs are short.
_TOKEN = re.compile(
    r"[\s*_`$({\[\"']{0,8}(?:\\(?:text|math)?(?:bf|it|rm|sf|tt)?\{[({\[*]{0,3})?"
    r"(?P<letter>[A-Za-z])(?![^\W_]|[+#]| ?[=>^]| ?<(?!/)|-\w|['\u2019]\w|\.[A-Za-z](?![A-Za-z]))"
    r"(?P<marked>[)}\]*_`\"'$]{0,8})"
)
_ENDS = re.compile(  # a line, a sentence, or what is between tags
    r"[.!?:。！]?[)}\]*_`\"'$]{0,8}(?:\n|\Z| ?</)|[.!?][)}\]*_`\"'$]{0,8}\s|[。！]"
)
_WRONG = re.compile(r"\s(?:is|are)(?:n['\u2019]t|\snot|\swrong|\sincorrect|\sfalse)\b|\s(?:cannot|can['\u2019]t)\b")
_RIGHT = re.compile(
    r"\s(?:is|(?:must|would|should)\sbe)\s(?:the\s)?(?:only\s|most\s)?(?:answer|appropriate|best|correct|right|true)\b",
    re.IGNORECASE,
)
_PROSE = re.compile(  # behind an article or a pronoun; not the words that follow a letter
    r" (?!(?:as|based|because|but|by|due|for|from|given|if|is|not|or|and|since|that|when|where|which|while|with)\b)\w",
    re.IGNORECASE,
)
_LEADS = re.compile(
    r"\b(?:answer|choice|option)\b[*_`]{0,3}(?:\s(?:is|(?:has\sto|must|should|would)\sbe)\b)[*_`]{0,3}(?:\s?[:=])?"
    r"(?:\s(?:the\s)?(?:answer|choice|letter|option)\b)?"
    r"|\b(?:final_)?(?:answer|choice|option)\b[*_`\"']{0,3}\s?[:=：][*_`]{0,3}(?:\s?(?:choice|letter|option)\b)?"
    r"|(?<!not\s)(?<!n't\s)(?<!never\s)\b(?:choose|pick|select)\s(?:the\s)?(?:answer|choice|option)\b"
    r"|(?:答案|正确选项|選項|选项)(?:应该|應該)?(?:是|为|為|選|选)?\s?[:：]?|(?<!不)(?:故选|故選|应选|所以选|选择)\s?[:：]?"
    r"|\b(?:respuesta|opción|réponse|antwort|lösung|resposta|risposta|ответ)\b[*_]{0,3}"
    r"(?:\s(?:correcta|correcte|correta|corretta|finale?)\b)?"
    r"(?:\s?[:：]|\s(?:es|est|ist|lautet|é|è|sería|serait|wäre)\b\s?:?)[*_]{0,3}"
    r"(?:\s(?:la\s|die\s|l['’])?(?:opción|option|opção|opzione|letra|lettre)\b)?"
    r"|(?P<ends>\b(?:so|therefore|thus|hence)\b,?(?:\s(?:it|this)\s(?:is|must\sbe|should\sbe)\b)?"
    r"|\b(?:go|going)\swith\b|(?<!not\s)(?<!n't\s)(?<!never\s)\b(?:choose|pick|select)\b|\bmust\sbe\b)"
    r"|(?P<perhaps>\b(?:answer|choice|option)\b|(?:\A|(?<=\n)|(?<=[.!?,]))(?=\s?[*_(]{0,3}[A-Z][*_)]{0,3}\sis\b))",
    re.IGNORECASE,
)
_STRONG = re.compile(r"<answer>|(?<!#)####(?!#)", re.IGNORECASE)
_NOT_BUT = re.compile(
    r"\s?not\s(?:option\s)?[*_(]{0,3}[A-Za-z][*_)]{0,3},?\s(?:but|it\sis|it's|rather)(?:\srather)?(?=\s)", re.IGNORECASE
)
_FENCE = re.compile(r"\s*(?:`{3,}|~{3,})\w*\s*")
_BESIDE = re.compile(  # between several letters
    r"(?: ?(?:[,;/&+和或与、，]|\b(?:and|or|et|ou|und|oder|(?-i:y|o|e))\b)){0,4}", re.IGNORECASE
)
_NAMED = re.compile(r"[*_`]{0,3}(?:(?:answer|choice|option)\b[\s*_`]?)?", re.IGNORECASE)
_LISTED = re.compile(r"[*_`]{0,3}\(?(?P<letter>[A-Za-z])(?:\)|(?<=[A-Z])\.)[*_`]{0,3}\s(?!(?:is|are|was|or|and)\b)\S")
_ANOTHER = re.compile(r"(?<!\w)\(?[A-Za-z]\)")


def chosen_letter(response: str, letters: str = _LETTERS, choices: Sequence[Any] = ()) -> str | None:
    r"""The letter that a response chooses, in upper case; the module's docstring has the rules.

    Args:
        response: the text.
        letters: those that there are, in upper case.
        choices: their texts, in order; a letter beside the text of another one is not chosen.

    >>> chosen_letter("A is tempting, but the answer is (b)."), chosen_letter(r"So \boxed{C}"), chosen_letter("A or B")
    ('B', 'C', None)
    >>> chosen_letter("<answer>B</answer>"), chosen_letter("答案：B"), chosen_letter("B) Rome", "AB", ["Rome", "Paris"])
    ('B', 'B', None)
    """
    lines = [line for line in response.splitlines() if line.strip() and not _FENCE.fullmatch(line)]
    text = "\n".join(" ".join(line.split()) for line in lines)
    box = next(boxes(text), None)
    if box is not None and (found := _letter(box[2], 0, letters)) is not None:
        if _beside(box[2], found[1], letters) or _ANOTHER.search(box[2], found[1]):
            return None
        return _unless_another(found, box[2], choices)
    for lead in reversed(list(_STRONG.finditer(text))):
        found = _letter(text, lead.end(), letters)
        if found is not None and (lead[0] != "####" or _ENDS.match(text, found[1]) or found[2]):
            return None if _beside(text, found[1], letters) else _unless_another(found, text, choices)
    said = list[str | None]()
    for lead in _LEADS.finditer(text):
        at = excluded.end() if (excluded := _NOT_BUT.match(text, lead.end())) else lead.end()
        found = _letter(text, at, letters)
        if found is None or (lead["perhaps"] is not None and not _RIGHT.match(text, found[1])):
            continue
        if lead["ends"] is not None and not (_ENDS.match(text, found[1]) or _RIGHT.match(text, found[1])):
            continue
        said.append(None if _beside(text, found[1], letters) else _unless_another(found, text, choices))
    return said[-1] if said else _last_line(text.split("\n"), letters, choices)


def _unless_another(found: tuple[str, int, bool], text: str, choices: Sequence[Any]) -> str | None:
    """The letter, unless the text of another choice than its own follows it."""
    letter, end, _ = found
    own = ord(letter) - ord("A")
    beside = _normal(text[end : end + _LONGEST].partition("\n")[0])
    named = [place for place, choice in enumerate(choices) if beside and _normal(str(choice)) == beside]
    return letter if not named or own in named else None


def _normal(text: str) -> str:
    return " ".join(re.sub(r"\\[a-zA-Z]+|[^\w.%+-]", " ", text).strip(" .-:").lower().split())


def _letter(text: str, at: int, letters: str) -> tuple[str, int, bool] | None:
    """The letter at a place, in upper case, where it ends, and whether marks are around it; None: there is none."""
    found = _TOKEN.match(text, at)
    if found is None or found["letter"].upper() not in letters or _WRONG.match(text, found.end()):
        return None
    letter, end = found["letter"], found.end()
    if not found["marked"]:
        if letter.islower() and not _ENDS.match(text, end):
            return None
        if letter in "AI" and _PROSE.match(text, end):
            return None
    return letter.upper(), end, bool(found["marked"])


def _beside(text: str, end: int, letters: str) -> bool:
    """Whether another letter follows one; in the next line only where it is all of that."""
    at = _BESIDE.match(text, end).end()  # type: ignore[union-attr]  # which matches nothing, too
    another = _letter(text, at, letters)
    return another is not None and (text[at : at + 1] != "\n" or _ENDS.match(text, another[1]) is not None)


def _last_line(lines: list[str], letters: str, choices: Sequence[Any]) -> str | None:
    """The letter that the last line is, or that it begins with as the only option of all lines."""
    last = lines[-1]
    found = _letter(last, _NAMED.match(last).end(), letters)  # type: ignore[union-attr]  # as above
    if found is not None and (ends := _ENDS.match(last, found[1])) is not None and ends.end() == len(last):
        return found[0]
    listed = _LISTED.match(last)
    if listed is None or listed["letter"].upper() not in letters or _ANOTHER.search(last, listed.end() - 1):
        return None
    if any(_LISTED.match(line) for line in lines[:-1]):
        return None
    return _unless_another((listed["letter"].upper(), listed.end() - 1, True), last, choices)


@extracts(chosen_letter)
def choice(task: Task, trace: Trace) -> Score:
    """1 if the response chooses the right letter; otherwise 0. The module's docstring has the rules.

    Args:
        task: ``"answer"`` is a letter; or, if there is ``"choices"``, a list of texts, one of these, or its place
            from 0.
        trace: its last answer is read.

    Returns:
        A reward of 1 or 0; if the response chooses nothing 0, with the status ``"parse_fail"``.

    Raises:
        EnvError: the task has no such ``"answer"``.

    >>> choice({"answer": "B"}, Trace("", ["The answer is B."])).reward
    1.0
    >>> choice({"answer": "Paris", "choices": ["Rome", "Paris"]}, Trace("", ["A"])).reward
    0.0
    """
    choices = task.get("choices")
    letters = _LETTERS if choices is None else _LETTERS[: len(choices)]
    right, found = _right(task), chosen_letter(trace.answer, letters, choices or ())
    return Score(float(found == right), "parse_fail" if found is None else "ok")


def _check_task(task: Task) -> str | None:
    """Return why no response can choose the right letter of a task."""
    right, choices = _right(task), task.get("choices")
    if choices is None or right in _LETTERS[: len(choices)]:
        return None
    return f"task['answer'] is {right!r}, and there are {len(choices)} choices"


choice.check_task = _check_task  # type: ignore[attr-defined]


def _right(task: Task) -> str:
    answer, choices = task.get("answer"), task.get("choices")
    if choices is not None:
        place = _place(answer, list(choices))
        if place is not None:
            return chr(ord("A") + place)
    if isinstance(answer, str) and re.fullmatch(r"\(?[A-Za-z]\)?", answer.strip()):
        return answer.strip(" ()").upper()
    raise EnvError(
        f"choice: the task's answer is {answer!r}, and its choices are {choices!r}; give a letter, or a text or a "
        "place among the choices"
    )


def _place(answer: Any, choices: list[Any]) -> int | None:
    if answer in choices and not isinstance(answer, bool):
        return choices.index(answer)
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return answer
    return None
