"""Sentences in which a judge gives a score: "I would give it 8 out of 10", "我给 8 分"."""

import re

__all__ = ["SCORE_NUMBER", "SCORE_OF_BEST", "float_of", "score_of_sentence"]

SCORE_NUMBER = r"[+-]?\d{1,9}(?:\.\d{1,9}|,\d{1,2})?(?!\d|[.,]\d|-\d|\s?%)"
"""A number as judges write it, with a decimal point or comma.

>>> re.fullmatch(SCORE_NUMBER, "8,5") is not None, re.fullmatch(SCORE_NUMBER, "1,000") is not None
(True, False)
"""
SCORE_OF_BEST = re.compile(
    rf"(?<![\w./-])({SCORE_NUMBER})(?:\s?/\s?|\s(?:points?\s)?out\s+of\s)({SCORE_NUMBER})(?![\w/])", re.IGNORECASE
)
"""A score and what it is out of, such as ``8/10``.

>>> SCORE_OF_BEST.findall("It is 8/10.")
[('8', '10')]
"""
_ANY_NUMBER = re.compile(r"\d+(?:[.,]\d+)?")
_LAST_NUMBER = re.compile(rf"(?<![\w./-])({SCORE_NUMBER})(?![\w/])()")
_LONGEST_SENTENCE = 1000  # characters in front of its score
_SENTENCE_END = re.compile(r"[.!?。]\s|\n")
_CLAUSE_END = re.compile(r"[,;:]\s|\s-\s|\s(?:so|and|but|thus|hence|therefore|yet)\s", re.IGNORECASE)
_SUBJECT = re.compile(r"\b(?:i|we|it|this|that|the|my|its|here)\b|\bi'd\b|^\W*$", re.IGNORECASE)
_NEGATED = re.compile(
    r"\b(?:not|never|cannot|hardly|barely|scarcely|no|nor|neither|without|refuse|fail|fails|unable|far\sfrom"
    r"|instead\sof|rather\sthan)\b|n't\b|\bcant\b|\bdont\b",
    re.IGNORECASE,
)
_NOT_MEANT = re.compile(  # hypothetical, or somebody else's
    r"\b(?:if|unless|were|could|might|may|have\s(?:given|been|rated|scored)|says|said|saying|claims?|claimed|states?|stated"
    r"|asks?|asked|asking|wants?|demands?|requests?|requested|suggests?|writes?|wrote|pretends?|insists?|argues?|quotes?|thinks|believes|feels|hopes|expects|begs|tells|according"
    r"|maximum|max|minimum|min|highest|lowest|best|worst|top|perfect|possible|previous|initial|average|expected|claimed"
    r"|first|range|should|ought|can|whether|why)\b",
    re.IGNORECASE,
)
_BOUND = re.compile(
    r"(?:\b(?:almost|nearly|around|about|approximately|roughly|than|least|most|up\sto|below|above|under|over|beyond|from"
    r"|between|only\sif|close\sto|near)\s(?:an?\s)?|\d\s?(?:to|or|-|and|,|~)\s?|[<>≤≥~≈]\s?)\Z",
    re.IGNORECASE,
)
_GIVES = re.compile(
    r"(?:\b(?:i|we)(?:'d|'ll|'m|\s(?:would|will|shall|am|do|hereby|therefore|thus|also|only|still)){0,3}\s"
    r"(?:giv(?:e|ing)|gave|rat(?:e|ed|ing)|scor(?:e|ed|ing)|assign(?:ed|ing)?|award(?:ed|ing)?|grad(?:e|ed|ing)|judged?"
    r"|mark(?:ed)?|say|go(?:ing)?\swith|settled?\son|put)"
    r"|\b(?:it|this|that|which|(?:the|this)\s(?:answer|response|solution|reply|text|output|submission))\s(?:\w+ly\s|just\s|still\s)?"
    r"(?:deserves?|merits?|earns?|gets?|receives?|warrants?|scores|is\s(?:worth|rated|scored|graded)))\b[^.!?\d]{0,60}\Z",
    re.IGNORECASE,
)
_NAMED = re.compile(
    r"\b(?:score|rating|grade|verdict)\s(?:(?:for|of)\sth(?:e|is)\s(?:answer|response|reply|solution)\s)?"
    r"(?:is|of|as|at|would\sbe|:)\s?(?:an?\s)?[\"'\[(]{0,4}\Z",
    re.IGNORECASE,
)
_IS_ONE = re.compile(r"\b(?:it|this|that)(?:'s|\sis)\s(?:(?:clearly|worth|a|an|solid|strong)\s?){0,3}\Z", re.IGNORECASE)
_LEAD = re.compile(
    r"[\W_]*(?:(?:so|thus|hence|therefore|overall|in\stotal|all\sin\sall|finally|then|and|verdict)\b[\W_]*){0,2}",
    re.IGNORECASE,
)
_EXPLAINS = re.compile(r"\b(?:is|isn't|was|are|it's|that's|i|my|we)\b", re.IGNORECASE)  # in front of a colon, no label
_BEHIND = re.compile(
    r"\s?(?:points?|stars?)?[\s\"'\])]{0,8}(?:\Z|[.!]|[,;:(]|\s?-\s|\b(?:because|since|as|overall|in\stotal|due\sto|given)\b)",
    re.IGNORECASE,
)
_TURNED = re.compile(
    r"\b(?:if|unless|but|however|would|wait|actually|rather|no|or|correction|higher|lower|though|take\sthat\sback)\b|\?",
    re.IGNORECASE,
)
_GIVES_CHINESE = re.compile(
    rf"(?:给|打|评|得)(?:出|予|它|了|为|该答案|这个(?:答案|回答))*\s?({SCORE_NUMBER})\s?分(?=[\s。.,，!;(]|\Z)"
)
_BEST_CHINESE = re.compile(rf"满分(?:为|是|:)?\s?({SCORE_NUMBER})")


def float_of(number: str) -> float:
    """Return the value of a number with a decimal point or comma.

    >>> float_of("8,5")
    8.5
    """
    return float(number.replace(",", "."))


def score_of_sentence(line: str) -> tuple[float, float | None] | None:
    """Return the score that a line gives in words, and what it is out of; None: it gives none, or several.

    A line that denies a score, names one under a condition, as a bound or as somebody else's, or asks for it gives
    none. The same holds for a criterion's, such as ``Style: 8/10``.

    >>> score_of_sentence("It is not complete, so I would give it 8 out of 10."), score_of_sentence("It is 8 metres.")
    ((8.0, 10.0), None)
    >>> score_of_sentence("I would not give it 8 out of 10.")
    """
    if (chinese := _chinese(line)) is not None:
        return chinese
    pairs = list(SCORE_OF_BEST.finditer(line))
    if not pairs and len(_ANY_NUMBER.findall(line)) == 1:
        pairs = list(_LAST_NUMBER.finditer(line))
    if len(pairs) != 1:
        return None
    (pair,) = pairs
    start = max((end.end() for end in _SENTENCE_END.finditer(line, 0, pair.start())), default=0)
    if pair.start() - start > _LONGEST_SENTENCE:
        return None
    sentence, rest = line[start : pair.start()], line[pair.end() :]
    if not _BEHIND.match(rest) or _TURNED.search(rest) or _NOT_MEANT.search(sentence) or _BOUND.search(sentence):
        return None
    if not _gives(sentence, has_best=bool(pair[2])):
        return None
    return float_of(pair[1]), float_of(pair[2]) if pair[2] else None


def _gives(sentence: str, *, has_best: bool) -> bool:
    """Whether the words in front of a number say that it is the score."""
    ends = [0, *(end.end() for end in _CLAUSE_END.finditer(sentence))]
    clause = sentence[ends.pop() :]
    while ends and not _SUBJECT.search(clause):  # "I would not, I think, give it"
        clause = sentence[ends.pop() :]
    if _NEGATED.search(clause):
        return False
    if _GIVES.search(clause) or _NAMED.search(clause):
        return True
    if not has_best:
        return False
    if _IS_ONE.search(clause):
        return True
    before, colon, last = sentence.rpartition(":")
    if colon and _LEAD.fullmatch(last):
        return bool(_EXPLAINS.search(before)) and not _GIVES.search(before)
    return _LEAD.fullmatch(clause) is not None and (not sentence.strip() or _LEAD.fullmatch(sentence) is not None)


def _chinese(line: str) -> tuple[float, float | None] | None:
    scores = list(_GIVES_CHINESE.finditer(line))
    if len(scores) != 1:
        return None
    clause = re.split(r"[,，。;；]", line[: scores[0].start()])[-1]
    if re.search(r"[不没别未]|如果|若", clause) or re.search(r"[不但?？]", line[scores[0].end() :]):
        return None
    best = _BEST_CHINESE.search(line)
    return float_of(scores[0][1]), float_of(best[1]) if best else None
