r"""`choice`: multiple choice, by the letter that a response ends with.

**Where it looks.** The first of these that a response has decides, and of several of one kind the last:

1. ``\boxed{B}``, ``\boxed{B) Paris}``, ``\boxed{\textbf{(B)}}``;
2. ``<answer>B</answer>``, ``#### B``;
3. "the answer is B", "answer: (B)", ``{"answer": "B"}``, "option B is correct", "I choose option B", "so B", "B is
   correct", "It's B", "no, B", "leaving B", "only B remains" and the like, also in Chinese, Japanese, Korean and a
   dozen more languages;
4. a last line or sentence, or a first line, that is nothing but a letter: ``B``, ``(b)``, ``**B.**``, "option B"; or,
   if no other line is one too, an option with its text: ``B) Paris``, "B because ...". Fences of code are left out.

**What is no letter.** A small letter, unless it is in brackets or quotation marks or ends the sentence ("the answer is
a bit unclear"); ``A`` and ``I`` before a word that may follow an article or a pronoun ("answer: I do not know"); a
letter of which the response says that it is wrong, also afterwards; one in a statement that is denied ("I don't think
the answer is B"), supposed ("if it is B") or somebody else's ("many choose B"), or that ends in a question mark; one
beyond the task's ``"choices"``; all letters elsewhere. A response that names several (``A or B``, ``A, B, C, D``,
``\boxed{A}, \boxed{B}``, "A is correct. B is correct."), or a letter beside the text of another choice, has no answer.
"""

import re
from collections.abc import Sequence
from itertools import islice, takewhile
from typing import Any

from nrl.envs.final_numbers import boxes
from nrl.envs.phrases.plain_choices import plain_choice
from nrl.envs.plain_values import plain_text, shown_value
from nrl.envs.types import Score, Task, Trace
from nrl.envs.verifiers import extracts
from nrl.errors import EnvError

__all__ = ["choice", "chosen_letter"]

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_LONGEST = 1000  # characters of a choice's text

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
    r",?\s(?:because|since|due\sto|given|not|rather\sthan|instead\sof|as\s(?:the|my)|I\s(?:think|guess|believe|suppose))\b|\s?\((?:not|since|because)\b"
    r"|(?:项|項|选项|選項)?(?:입니다|이다|です|だ|[。,])|(?:项|項)(?=\Z|\n)",
    re.IGNORECASE,
)
_WRONG = re.compile(
    r"\s(?:is|are)(?:n't|\snot|\swrong|\sincorrect|\sfalse)\b|\s(?:cannot|can't)\b"
    r"|(?:选项|選項|项)?(?:是|は|는|은)?\s?(?:错|錯|不|間違|誤|ではな|じゃな|틀|오답)|(?:이|가)\s?아니|(?:이|가)\s?아닙",
    re.IGNORECASE,
)
_RIGHT = re.compile(
    r"\s(?:is|(?:must|would|should|has\sto)\sbe|seems|appears|looks)\s(?:to\sbe\s)?(?:(?:the|my)\s)?(?:only\s|most\s)?"
    r"(?:answer|appropriate|best|correct|right|true|better(?!\sthan)|(?<=(?:the|.my)\s)(?:one|choice|pick))\b"
    r"|\s(?:alone\s)?(?:remains|is\sleft)(?=\s?(?:[.!,;]|\Z|\n))|\sit\sis\b"
    r"|(?:选项|選項|项|項)?(?:是|が)?(?:正确|正確|正解|正しい|对的)|(?:이|가)\s?(?:정답|맞)",
    re.IGNORECASE,
)
_PROSE = re.compile(  # behind an article or a pronoun; not the words that follow a letter
    r" (?!(?:as|based|because|but|by|due|for|from|given|if|is|not|or|and|since|that|when|where|which|while|with)\b)\w",
    re.IGNORECASE,
)
_BE = r"(?:is|(?:has\sto|must|should|would)\sbe)\b"
_NOUN = r"(?:answer|choice|option)"
_RELATIVE = (  # of an option: "that fits best", not "that is wrong"
    r"(?:(?!\b(?:not|wrong|incorrect|false|least|never|eliminated?|excluded?|ruled?|rejected?)\b|n't)[^.!?:\n]){0,60}?"
)
_LEADS = re.compile(
    rf"\b{_NOUN}\b[*_`]{{0,3}}(?:\s(?:to|for|of|here|that|which|left)\b{_RELATIVE})?(?:,?\s(?:then|therefore|thus|hence),?)?(?:\s{_BE})"
    rf"(?:,|\s(?:clearly|simply|indeed|(?:most\s)?likely|probably|definitely|certainly|obviously|thus|therefore|hence|then)\b)?"
    r"[*_`]{0,3}(?:\s?[:=])?"
    rf"(?:\s(?:the\s)?(?:{_NOUN}|letter)\b)?"
    r"|\b(?:correct|right|best|final)\sletter\sis\b"
    rf"|\b(?:[a-z]{{1,9}}_)?(?:{_NOUN}|letter|ans)(?:\skey)?\b[*_`\"']{{0,3}}\s?[:=-][*_`\[]{{0,3}}(?:[\s\"'(]{{0,3}}(?:{_NOUN}|letter)\b)?"
    r"|\bans\."
    rf"|(?<!not\s)(?<!n't\s)(?<!never\s)\b(?:choose|pick|select)\s(?:the\s)?{_NOUN}\b"
    r"|(?:答案|正确选项|選項|选项)[\"\]*_]{0,3}(?:应该|應該)?(?:是|为|為|選|选)?\s?:?(?:\s?(?:选项|選項))?"
    r"|(?<!不)(?:故选|故選|应选|所以选|选择)\s?:?"
    r"|(?:,\s?而?|而)是"
    r"|(?:정답|답)(?:은|는|이)?\s?:?|(?:答え|正解|正答|解答|回答)(?:は|が)?\s?:?"
    r"|\b(?:respuesta|opción|opção|alternativa|вариант|réponse|antwort|lösung|resposta|risposta|ответ|antwoord|svar|cevap|jawaban|jawapan"
    r"|odpowiedź|odpověď|відповідь|válasz|vastaus|απάντηση|đáp\sán|الإجابة|الجواب|उत्तर|คำตอบ)[*_]{0,3}"
    r"(?:\s(?:correcta|correcte|correta|corretta|finale?|đúng)\b)?"
    r"(?:\s?:|\s-(?=\s)|\s(?:es|est|ist|lautet|é|è|is|là|sería|serait|wäre)\b\s?:?)[*_]{0,3}"
    r"(?:\s?(?:la\s|die\s|a\s|l')?(?:opción|option|opção|opzione|letra|lettre|lettera)\b"
    r"|\s?\b(?:la|le|die|el|il|a|o)(?=\s[*_(]{0,3}[A-Z]\b))?"
    r"|(?P<ends>\b(?:so|therefore|thus|hence)\b,?(?:\s(?:it|this)\s(?:is|must\sbe|should\sbe)\b|\s(?:option|choice)\b)?"
    rf"|\b(?:(?:it|this|that)(?:'s|\s{_BE})|i\smean)(?:\s(?:rather|actually|then|option)\b)?:?"
    r"|\b(?:leaving|leaves|left\swith)\b(?:\s(?:us|me|only|just|with|option|choice)\b){0,3}"
    r"|\b(?:in\s(?:conclusion|summary)|by\s(?:process\sof\s)?elimination|finally|ultimately)\b[,:]?(?:\s(?:option|choice)\b)?"
    r"|\b(?:guess|solution|conclusion|verdict|result|correct|final)\b[*_\"']{0,3}\s?[:=]|\b(?:my\s(?:guess|pick)|the\ssolution)\sis\b"
    r"|\b(?:i|we)(?:'d|\swould)?\s(?:say|think|guess|believe)\b|(?:\A|(?<=\n)|(?<=[.!?,;]\s))(?:[∴→⇒⟹]|=>)"
    r"|\bno\b[,:.!]|\b(?:wait|actually|correction|sorry|rather)\b[,:.!]?|(?:\A|(?<=\n)|(?<=[.!?]\s))(?:(?:most\s)?likely|probably"
    r"|definitely|certainly|clearly|obviously|surely|yes|okay|ok|well|hmm|sure)\b[,:.!]?"
    r"|\b(?:corresponds\sto|matches|which\sis)\s(?:option|choice|answer)\b|\b(?:statement|exception|one)\sis\b"
    r"|\b(?:go|going|opt|opting)\s(?:with|for)\b|\bi\schose\b|\bmust\sbe\b"
    r"|(?<!not\s)(?<!n't\s)(?<!never\s)\b(?:choos(?:e|ing)|pick(?:ing)?|select(?:ing)?)\b"
    r"|\bnot\s(?:option\s)?[*_(]{0,3}[A-Za-z](?:,?\s(?:or\s)?[A-Za-z]){0,4}[*_)]{0,3},?\sbut\b"
    r"|(?<![不可])(?<!不应)(?<!不能)(?<!不该)(?<!不要)选\s?)"
    rf"|(?P<perhaps>\b(?:{_NOUN}|statement|only|and|but|while|whereas|think|believe)\b"
    rf"|(?:\A|(?<=\n)|(?<=[.!?,;]))(?=\s?[*_(]{{0,3}}[A-Z][*_)]{{0,3}}(?:{_RIGHT.pattern})))",
    re.IGNORECASE,
)
_STRONG = re.compile(
    r"<(?:(?:final_?)?(?:answer|ans|choice|option|letter)|(?P<whole>final|solution|response|result|output))>"
    r"|\[answer\]|(?<!#)####(?!#)",
    re.IGNORECASE,
)
_DOUBTED = re.compile(  # in front of a statement, within its sentence: it is denied, supposed, or somebody else's
    r"(?:\b(?:do|does|did|would|can|could|should|is|am|are|was|'m)(?:\snot|n't)\s(?:think|believe|say|see|agree|feel|know|mean|imply"
    r"|follow|choose|pick|select|go)|\bcannot\s(?:say|see|be)|\bdoubt|\bunlikely|\bfalse|\buntrue|\b(?:if|suppose|supposing|assume"
    r"|assuming|imagine|whether|unless|why|nobody|no\sone|someone|somebody|others|might|may|could|should\si)\b"
    r"|\b(?:not|n't)\s(?:true|certain|sure|convinced|clear|likely|the\scase|obvious)\b(?!\s(?:but|so|and)\b)"
    r"|\b(?:some|many|most)\s(?:people|students|would|might|may|will|say)|\b(?:people|students)\b"
    r"|\b(?:one|you|they)\s(?:might|may|could|would|will|often)\b)",
    re.IGNORECASE,
)
_CONDITION = re.compile(r"\s?\?|,?\s(?:only\s)?(?:if|unless|when|but)\b|\sin\sgeneral\b|,?\sand\sso\b", re.IGNORECASE)
_CORRECTED = re.compile(
    r"\b(?:no|wait|actually|but|however|rather|correction|instead|so|therefore|thus|hence)\b", re.IGNORECASE
)
_UNREAL = re.compile(r"(?:\A|[.!?\n]\s?)(?:had|were|if)\b[^.!?\n]{0,120}\Z", re.IGNORECASE)
_IF = re.compile(r"\s(?:only\s)?if\b")
_BEFORE = 200  # characters in front of a statement that may take it back
_NOT_BOX = re.compile(r"\b(?:not|n't|instead\sof|rather\sthan)\s?[$(]{0,3}\Z", re.IGNORECASE)
_NOT_BUT = re.compile(
    r"\s?not\s(?:option\s)?[*_(]{0,3}[A-Za-z][*_)]{0,3},?\s(?:but|it\sis|it's|rather)(?:\srather)?(?=\s)", re.IGNORECASE
)
_BESIDE = re.compile(  # between several letters
    r"(?: ?(?:\\(?:cup|cap|lor|land|vee|wedge)|[,;/&+和或与、,か와과や]|또는|혹은"
    r"|\((?=(?:or|and|maybe|perhaps|possibly)\b)|\b(?:and|or|et|ou|und|oder|maybe|perhaps|possibly|also|either|plus|with|as\swell\sas|(?-i:y|o|e))\b)){0,6}",
    re.IGNORECASE,
)
_VERB = re.compile(
    r"\s(?:is|are|was|would|has|had|does|did|can|could|will|fails?|gives?|means?|seems?|says?)\b", re.IGNORECASE
)
_NAMED = re.compile(
    rf"[\s*_`\"'({{]{{0,8}}(?:(?:the|my|final|correct)\s){{0,3}}(?:(?:{_NOUN}(?:\s{_NOUN})?|ans|letter|选项|答案|opción|opção|alternativa|antwort|réponse|respuesta|resposta|вариант|ответ)(?:\sis)?:?[\s*_`]{{0,4}})?",
    re.IGNORECASE,
)
_LISTED = re.compile(
    r"[*_`]{0,3}\(?(?P<letter>[A-Za-z])(?:\)|(?<=[A-Z])\.|(?<=[B-HJ-Z])(?::| -(?= )))[*_`]{0,3}\s"
    r"(?!(?:is|are|was|or|and)\b)\S"
)
_OPTION = re.compile(  # a line that begins with a letter as an option does, or is one
    rf"{_LISTED.pattern}|[*_`]{{0,3}}\(?[A-Z]\)?[*_`.]{{0,4}}\Z|A: "
    r"|[*_`(]{0,4}[A-HJ-Z][*_`)]{0,4}(?:,?\s(?:because|since|as|not|I)\s|\s\([^\W\d])"
)
_SENTENCE = re.compile(r"[^\W\d_]{2}(?<!\bvs)['\")]?[.!?;] |(?:(?<=\bNot [A-Z])|(?<=\bnor [A-Z]))[.;] |(?<=\b[A-Z])\? ")
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
    text = plain_choice(response)
    choices = [_normal(plain_text(choice)) for choice in choices]
    closed = (box for box in takewhile(bool, boxes(text)) if box is not None)
    last_boxes = list(islice((box for box in closed if not _NOT_BOX.search(text, max(0, box[0] - 20), box[0])), 2))
    if last_boxes and (found := _named_letter(last_boxes[0][2], 0, letters)) is not None:
        content = last_boxes[0][2]
        if _beside(content, found[1], letters) or _ANOTHER.search(content, found[1]) or content[found[1] :] == "?":
            return None
        if len(last_boxes) > 1 and _joined(text[last_boxes[1][1] : last_boxes[0][0]]):
            before = _named_letter(last_boxes[1][2], 0, letters)
            if before is not None and before[0] != found[0]:
                return None
        return _unless_another(found, content, choices)
    leads = list(_STRONG.finditer(text))
    for place, lead in reversed(list(enumerate(leads))):
        found = _named_letter(text, lead.end(), letters)
        is_whole = found is not None and _ENDS.match(text, found[1]) is not None
        if found is None or not (is_whole or (lead["whole"] is None and (found[2] or lead[0] != "####"))):
            continue
        before = _named_letter(text, leads[place - 1].end(), letters) if place else None
        if before is not None and before[0] != found[0] and _joined(text[before[1] : lead.start()]):
            return None
        is_open = _beside(text, found[1], letters) or text[found[1] : found[1] + 1] == "?"
        return None if is_open else _unless_another(found, text, choices)
    stated, end = _last_statement(text, letters, choices)
    if end == 0:
        stated, end = _bare_letter(text, letters, choices)
    taken_back = (back[back.lastgroup or 0] for back in _TAKEN_BACK.finditer(text, end))
    return None if stated is None or stated in taken_back else stated


def _last_statement(text: str, letters: str, choices: Sequence[Any]) -> tuple[str | None, int]:
    """The letter that a text last says to be the answer, and where it ends; 0: the text does not say that of any.

    The letter is None where the last statement names several.
    """
    stated, end, was_called_right = None, 0, False
    for lead in _LEADS.finditer(text):
        at = excluded.end() if (excluded := _NOT_BUT.match(text, lead.end())) else lead.end()
        found = _letter(text, at, letters)
        if found is None or found[1] <= end:
            continue
        called_right = None if lead["perhaps"] is None else _RIGHT.match(text, found[1])
        if lead["perhaps"] is not None and (called_right is None or _CONDITION.match(text, called_right.end())):
            continue
        if text[found[1] : found[1] + 1] == "?" or _is_doubted(text, lead, found[1]):
            continue
        several = _beside(text, found[1], letters)
        if lead["ends"] is not None and not several:
            token = text[at : found[1]].strip()
            if (token.islower() or token == "I") and not found[2]:  # "It is a", "It is I"
                continue
            if not any(pattern.match(text, found[1]) for pattern in (_ENDS, _RIGHT, _REASON)):
                continue
        # "A is correct. B is correct." names two, unless the text corrects itself in between.
        several |= (
            was_called_right
            and called_right is not None
            and stated not in (None, found[0])
            and (_CORRECTED.search(text[end : found[1]]) is None)
        )
        stated, end = None if several else _unless_another(found, text, choices), found[1]
        was_called_right = called_right is not None
    return stated, end


def _is_doubted(text: str, lead: re.Match[str], end: int) -> bool:
    """Whether a text denies or supposes what it states by a lead, or says that somebody else states it."""
    before = text[max(0, lead.start() - _BEFORE) : lead.start()]
    for words in (before, before + lead[0]):
        clause = words[max(map(words.rfind, ".!?;,:\n")) + 1 :]
        if _DOUBTED.search(clause):
            return True
    return "would" in lead[0] and (_UNREAL.search(before) or _IF.match(text, end)) is not None


def _unless_another(found: tuple[str, int, bool], text: str, choices: Sequence[Any]) -> str | None:
    """The letter, unless the text of another choice than its own follows it."""
    letter, end, _ = found
    beside = _normal(text[end : end + _LONGEST].partition("\n")[0])
    named = [place for place, choice in enumerate(choices) if beside and choice == beside]
    return letter if not named or ord(letter) - ord("A") in named else None


def _normal(text: str) -> str:
    return " ".join(re.sub(r"\\[a-zA-Z]+|[^\w.%+-]", " ", plain_choice(text)).strip(" .-:").lower().split())


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
    if another is None or (text[end:at].strip() in (",", ";") and _VERB.match(text, another[1])):
        return False
    return text[at : at + 1] != "\n" or _ENDS.match(text, another[1]) is not None


def _joined(between: str) -> bool:
    """Whether nothing is between two choices but a conjunction, signs and the marks of a tag or of mathematics."""
    rest = re.sub(r"</\w{1,20}>|[\s$.*`]", " ", between[:_BEFORE]).strip()
    return len(between) <= _BEFORE and _BESIDE.fullmatch(rest) is not None


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
    inner = rest.strip(" .:-")
    is_own_text = _normal(rest) in choices
    if (
        _ANOTHER.search(rest)
        or _whole_letter(inner, 0, len(inner), letters)
        or (not is_own_text and _UNSURE.search(rest))
    ):
        return None, 0
    return chosen, found[1]


def _whole_letter(text: str, start: int, end: int, letters: str) -> tuple[str, int] | None:
    """The letter that is all of a part of the text, and where it ends."""
    part = text[start:end]
    found = _named_letter(part, 0, letters)
    if found is None or (ends := _ENDS.match(part, found[1])) is None or ends.end() != len(part):
        return None
    if set("?:") & set(ends[0]):
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
        EnvError: the task has no such ``"answer"``, or its ``"choices"`` are no list of 1 to 26 texts.

    >>> choice({"answer": "B"}, Trace("", ["The answer is B."])).reward
    1.0
    >>> choice({"answer": "Paris", "choices": ["Rome", "Paris"]}, Trace("", ["A"])).reward
    0.0
    """
    right, choices = _right(task), task.get("choices")
    letters = _LETTERS if choices is None else _LETTERS[: len(choices)]
    found = chosen_letter(trace.answer, letters, choices or ())
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
        if not isinstance(choices, list | tuple) or not 0 < len(choices) <= len(_LETTERS):
            raise EnvError(f"choice: the task's choices are {shown_value(choices)}; give a list of 1 to 26 texts")
        place = _place(answer, list(choices))
        if place is not None:
            return chr(ord("A") + place)
    if isinstance(answer, str) and re.fullmatch(r"\(?[A-Za-z]\)?", answer.strip()):
        return answer.strip(" ()").upper()
    raise EnvError(
        f"choice: the task's answer is {shown_value(answer)}, and its choices are {shown_value(choices)}; "
        "give a letter, or a text or a place among the choices"
    )


def _place(answer: Any, choices: list[Any]) -> int | None:
    if answer in choices and not isinstance(answer, bool):
        return choices.index(answer)
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return answer
    return None
