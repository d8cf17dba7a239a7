r"""`choice`: multiple choice, by the letter that a response ends with.

**Where it looks.** The first of these that a response has decides, and of several of one kind the last:

1. ``\boxed{B}``, ``\boxed{B) Paris}``, ``\boxed{\textbf{(B)}}``;
2. ``<answer>B</answer>``, ``#### B``;
3. "the answer is B", "answer: (B)", ``{"answer": "B"}``, "option B is correct", "I choose option B", "so B", "B is
   correct", "It's B", "no, B" and the like, also in Chinese, Japanese, Korean and a dozen more languages;
4. a last line or sentence, or a first line, that is nothing but a letter: ``B``, ``(b)``, ``**B.**``, "option B"; or,
   if no other line is one too, an option with its text: ``B) Paris``, "B because ...". Fences of code are left out.

**What is no letter.** A small letter, unless it is in brackets or quotation marks or ends the sentence ("the answer is
a bit unclear"); ``A`` and ``I`` before a word that may follow an article or a pronoun ("answer: I do not know"); a
letter of which the response says that it is wrong, also afterwards; one beyond the task's ``"choices"``; all letters
elsewhere. A response that names several (``A or B``, ``A, B, C, D``), or a letter beside the text of another choice,
has no answer.
"""

import re
from collections.abc import Sequence
from typing import Any

from nrl.envs.final_numbers import boxes
from nrl.envs.types import Score, Task, Trace
from nrl.envs.verifiers import extracts
from nrl.errors import EnvError

__all__ = ["choice", "chosen_letter"]

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_LONGEST = 1000  # characters of a choice's text

# --- Typography and LaTeX around letters

_CHARACTERS = str.maketrans(
    {0xFEE0 + code: chr(code) for code in range(0x21, 0x7F)}  # the wide forms of ASCII
    | dict.fromkeys("“”„«»「」『』【】〔〕", '"')
    | {"’": "'", "‘": "'", "~": " ", "–": "-", "—": "-"}
)
_WRAPPED = re.compile(r"\\(?:text|math|operatorname|[fhm]box)[a-z]{0,6}\s?\{([^{}\\]{0,200})\}")
_DECLARED = re.compile(r"\\(?:bf|it|rm|sf|tt|displaystyle|large|Large|bold|left|right|quad|[,;! ])(?![a-zA-Z])")


def _plain(text: str) -> str:
    """The text without fences, wide characters and commands of LaTeX for fonts; white space is joined."""
    lines = [line for line in text.splitlines() if line.strip() and not _FENCE.fullmatch(line)]
    text = "\n".join(" ".join(line.translate(_CHARACTERS).split()) for line in lines)
    if "\\" in text:
        text = _DECLARED.sub("", text)
        for _ in range(2):  # \textbf{\text{B}}
            text = _WRAPPED.sub(r"\1", text)
        text = re.sub(" {2,}", " ", text)
    return text


_FENCE = re.compile(r"\s*(?:`{3,}|~{3,})\w*\s*")

# --- Patterns. They stay linear: white space is joined before, and all other runs are short.

_TOKEN = re.compile(
    r"[\s*_`$({\[\"']{0,8}(?P<letter>[A-Za-z])"
    r"(?![0-9A-Za-z\u00c0-\u024f\u0370-\u052f]|[+#]| ?[=>^]| ?<(?!/)|-\w|'\w|\.[A-Za-z](?![A-Za-z]))"
    r"(?P<marked>[)}\]*_`\"'$]{0,8})"
)
_ENDS = re.compile(  # a line, a sentence, or what is between tags
    r"[.!?:。]?[)}\]*_`\"'$]{0,8}(?:\n|\Z| ?</)|[.!?][)}\]*_`\"'$]{0,8}\s|[。]"
)
_REASON = re.compile(  # words that follow a chosen letter
    r",?\s(?:because|since|due\sto|given|not|rather\sthan|instead\sof)\b|\s?\((?:not|since|because)\b"
    r"|(?:项|項|选项|選項)?(?:입니다|이다|です|だ|[。,])|(?:项|項)(?=\Z|\n)",
    re.IGNORECASE,
)
_WRONG = re.compile(
    r"\s(?:is|are)(?:n't|\snot|\swrong|\sincorrect|\sfalse)\b|\s(?:cannot|can't)\b"
    r"|(?:选项|選項|项)?(?:是|は|는|은)?\s?(?:错|錯|不|間違|誤|ではな|じゃな|틀|오답)|(?:이|가)\s?아니|(?:이|가)\s?아닙",
    re.IGNORECASE,
)
_RIGHT = re.compile(
    r"\s(?:is|(?:must|would|should)\sbe)\s(?:the\s)?(?:only\s|most\s)?(?:answer|appropriate|best|correct|right|true)\b"
    r"|(?:选项|選項|项|項)?(?:是|が)?(?:正确|正確|正解|对的)",
    re.IGNORECASE,
)
_PROSE = re.compile(  # behind an article or a pronoun; not the words that follow a letter
    r" (?!(?:as|based|because|but|by|due|for|from|given|if|is|not|or|and|since|that|when|where|which|while|with)\b)\w",
    re.IGNORECASE,
)
_BE = r"(?:is|(?:has\sto|must|should|would)\sbe)\b"
_NOUN = r"(?:answer|choice|option)"
_LEADS = re.compile(
    rf"\b{_NOUN}\b[*_`]{{0,3}}(?:\s(?:to|for|of|here)\b[^.!?:\n]{{0,60}}?)?(?:\s{_BE})[*_`]{{0,3}}(?:\s?[:=])?"
    rf"(?:\s(?:the\s)?(?:{_NOUN}|letter)\b)?"
    r"|\b(?:correct|right|best|final)\sletter\sis\b"
    rf"|\b(?:[a-z]{{1,9}}_)?(?:{_NOUN}|letter|ans)\b[*_`\"']{{0,3}}\s?[:=-][*_`\[]{{0,3}}(?:\s?(?:{_NOUN}|letter)\b)?"
    r"|\bans\."
    rf"|(?<!not\s)(?<!n't\s)(?<!never\s)\b(?:choose|pick|select)\s(?:the\s)?{_NOUN}\b"
    r"|(?:答案|正确选项|選項|选项)(?:应该|應該)?(?:是|为|為|選|选)?\s?:?(?:\s?(?:选项|選項))?"
    r"|(?<!不)(?:故选|故選|应选|所以选|选择)\s?:?"
    r"|(?:정답|답)(?:은|는|이)?\s?:?|(?:答え|正解|解答|回答)(?:は|が)?\s?:?"
    r"|\b(?:respuesta|opción|réponse|antwort|lösung|resposta|risposta|ответ|antwoord|svar|cevap|jawaban|jawapan"
    r"|odpowiedź|odpověď|відповідь|válasz|vastaus|απάντηση|đáp\sán|الإجابة|الجواب|उत्तर|คำตอบ)[*_]{0,3}"
    r"(?:\s(?:correcta|correcte|correta|corretta|finale?|đúng)\b)?"
    r"(?:\s?:|\s(?:es|est|ist|lautet|é|è|is|là|sería|serait|wäre)\b\s?:?)[*_]{0,3}"
    r"(?:\s?(?:la\s|die\s|a\s|l')?(?:opción|option|opção|opzione|letra|lettre|lettera)\b)?"
    r"|(?P<ends>\b(?:so|therefore|thus|hence)\b,?(?:\s(?:it|this)\s(?:is|must\sbe|should\sbe)\b)?"
    rf"|\b(?:it|this)(?:'s|\s{_BE})(?:\s(?:rather|actually|then|option)\b)?:?"
    r"|\b(?:no|wait|actually|correction|sorry|rather)\b[,:.!]?"
    r"|\b(?:go|going)\swith\b|(?<!not\s)(?<!n't\s)(?<!never\s)\b(?:choose|pick|select)\b|\bmust\sbe\b"
    r"|\bnot\s(?:option\s)?[*_(]{0,3}[A-Za-z][*_)]{0,3},?\sbut\b|(?<![不可])选\s?)"
    rf"|(?P<perhaps>\b{_NOUN}\b"
    r"|(?:\A|(?<=\n)|(?<=[.!?,]))(?=\s?[*_(]{0,3}[A-Z][*_)]{0,3}(?:\sis\b|(?:选项|項|项)?(?:是)?正[确確])))",
    re.IGNORECASE,
)
_STRONG = re.compile(r"<answer>|(?<!#)####(?!#)", re.IGNORECASE)
_NOT_BUT = re.compile(
    r"\s?not\s(?:option\s)?[*_(]{0,3}[A-Za-z][*_)]{0,3},?\s(?:but|it\sis|it's|rather)(?:\srather)?(?=\s)", re.IGNORECASE
)
_BESIDE = re.compile(  # between several letters
    r"(?: ?(?:[,;/&+和或与、,か와과や]|또는|혹은|\b(?:and|or|et|ou|und|oder|(?-i:y|o|e))\b)){0,4}", re.IGNORECASE
)
_NAMED = re.compile(
    rf"[\s*_`\"'({{]{{0,8}}(?:(?:the|my|final|correct)\s){{0,3}}(?:(?:{_NOUN}|letter|选项|答案)(?:\sis)?:?[\s*_`]{{0,4}})?",
    re.IGNORECASE,
)
_LISTED = re.compile(
    r"[*_`]{0,3}\(?(?P<letter>[A-Za-z])(?:\)|(?<=[A-Z])\.|(?<=[B-HJ-Z])(?::| -(?= )))[*_`]{0,3}\s"
    r"(?!(?:is|are|was|or|and)\b)\S"
)
_OPTION = re.compile(  # a line that begins with a letter as an option does, or is one
    rf"{_LISTED.pattern}|[*_`]{{0,3}}\(?[A-Z]\)?[*_`.]{{0,4}}\Z|A: "
    r"|[*_`(]{0,4}[A-HJ-Z][*_`)]{0,4}(?:,?\s(?:because|since|as|not)\s|\s\(not\s)"
)
_SENTENCE = re.compile(r"[^\W\d_]{2}['\")]?[.!?;] |(?<=\bNot [A-Z])[.;] ")
_UNSURE = re.compile(r"(?:\A|\W)(?:or|either|wait|no,|actually|wrong|incorrect|but|rather)(?:\W|\Z)", re.IGNORECASE)
_ANOTHER = re.compile(r"(?<!\w)\(?[A-Za-z]\)")
_TAKEN_BACK = re.compile(
    r"(?<![\w'])\(?(?P<letter>[A-Z])\)?\s(?:is|was)\s(?:wrong|incorrect|false|not\s(?:correct|right|the\sanswer))\b"
    r"|(?<![\w'])(?:not|isn't)\s\(?(?P<denied>[A-Z])\)?(?!\w)"
)


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
    text = _plain(response)
    box = next(boxes(text), None)
    if box is not None and (found := _named_letter(box[2], 0, letters)) is not None:
        if _beside(box[2], found[1], letters) or _ANOTHER.search(box[2], found[1]):
            return None
        return _unless_another(found, box[2], choices)
    for lead in reversed(list(_STRONG.finditer(text))):
        found = _named_letter(text, lead.end(), letters)
        if found is not None and (lead[0] != "####" or _ENDS.match(text, found[1]) or found[2]):
            return None if _beside(text, found[1], letters) else _unless_another(found, text, choices)
    stated, end = _last_statement(text, letters, choices)
    if end == 0:
        stated, end = _bare_letter(text, letters, choices)
    taken_back = (back[back.lastgroup or 0] for back in _TAKEN_BACK.finditer(text, end))
    return None if stated is None or stated in taken_back else stated


def _last_statement(text: str, letters: str, choices: Sequence[Any]) -> tuple[str | None, int]:
    """The letter that a text last says to be the answer, and where it ends; 0: the text does not say that of any.

    The letter is None where the last statement names several.
    """
    stated, end = None, 0
    for lead in _LEADS.finditer(text):
        at = excluded.end() if (excluded := _NOT_BUT.match(text, lead.end())) else lead.end()
        found = _letter(text, at, letters)
        if found is None or found[1] <= end or (lead["perhaps"] is not None and not _RIGHT.match(text, found[1])):
            continue
        several = _beside(text, found[1], letters)
        if lead["ends"] is not None and not several:
            token = text[at : found[1]].strip()
            if (token.islower() or token == "I") and not found[2]:  # "It is a", "It is I"
                continue
            if text[found[1] : found[1] + 1] == "?":
                continue
            if not any(pattern.match(text, found[1]) for pattern in (_ENDS, _RIGHT, _REASON)):
                continue
        stated, end = None if several else _unless_another(found, text, choices), found[1]
    return stated, end


def _unless_another(found: tuple[str, int, bool], text: str, choices: Sequence[Any]) -> str | None:
    """The letter, unless the text of another choice than its own follows it."""
    letter, end, _ = found
    own = ord(letter) - ord("A")
    beside = _normal(text[end : end + _LONGEST].partition("\n")[0])
    named = [place for place, choice in enumerate(choices) if beside and _normal(str(choice)) == beside]
    return letter if not named or own in named else None


def _normal(text: str) -> str:
    return " ".join(re.sub(r"\\[a-zA-Z]+|[^\w.%+-]", " ", _plain(text)).strip(" .-:").lower().split())


def _named_letter(text: str, at: int, letters: str) -> tuple[str, int, bool] | None:
    """The letter at a place, which a word such as "option" may introduce."""
    return _letter(text, at, letters) or _letter(text, _NAMED.match(text, at).end(), letters)  # type: ignore[union-attr]


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


def _bare_letter(text: str, letters: str, choices: Sequence[Any]) -> tuple[str | None, int]:
    """The letter that is all of the last line or sentence or of the first line, or the only option that is listed."""
    lines = text.split("\n")
    last_start = len(text) - len(lines[-1])
    if (whole := _whole_letter(text, last_start, len(text), letters)) is not None:
        return whole
    sentence = next((mark.end() for mark in reversed(list(_SENTENCE.finditer(text, last_start)))), len(text))
    if sentence < len(text) and (whole := _whole_letter(text, sentence, len(text), letters)) is not None:
        return whole
    options = [place for place, line in enumerate(lines) if _OPTION.match(line)]
    if (whole := _whole_letter(text, 0, len(lines[0]), letters)) is not None:
        return whole if options in ([], [0]) else (None, 0)
    if options not in ([0], [len(lines) - 1]):
        return None, 0
    start = 0 if options == [0] else last_start
    found, line = _letter(text, start, letters), lines[options[0]]
    if found is None or (found[0] == "I" and not found[2]) or line.startswith("A: "):
        return None, 0
    if (reason := _REASON.match(text, found[1])) is not None:
        return found[0], reason.end()
    chosen, rest = _unless_another(found, text, choices), line[found[1] - start :]
    is_own_text = any(_normal(str(each)) == _normal(rest) for each in choices)
    if _ANOTHER.search(rest) or (not is_own_text and _UNSURE.search(rest)):
        return None, 0
    return chosen, found[1]


def _whole_letter(text: str, start: int, end: int, letters: str) -> tuple[str, int] | None:
    """The letter that is all of a part of the text, and where it ends."""
    part = text[start:end]
    found = _named_letter(part, 0, letters)
    if found is None or (ends := _ENDS.match(part, found[1])) is None or ends.end() != len(part):
        return None
    return found[0], start + found[1]


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
