"""Decide from the words around an answer whether the text gives it, doubts it, denies it or takes it back."""

import re

__all__ = [
    "is_candidate",
    "is_denied",
    "is_doubted",
    "is_noun_phrase",
    "is_question",
    "is_reference",
    "retraction_end",
]

_WINDOW = 80  # characters on either side that are looked at
_OPENERS = " \t\n$€£¥₹*_`\"'([{}\\"
_CLOSERS = " \t$*_`\"')]{}\\"
_ADVERBS = (
    r"(?:(?:definitely|clearly|certainly|obviously|actually|just|also|simply|absolutely|still|completely|totally|likely"
    r"|really|in fact|of course|quite|probably|therefore) )*"
)
_TAG_BEFORE, _TAG_BEHIND = re.compile(r"</?[a-z_]{1,20}>\Z"), re.compile(r"\A(?:</?[a-z_]{1,20}>|\\?text ?\{)")
_NOUNS = r"(?:(?!(?:since|because|as|while|but|and|where|so|if|when)\b)[A-Za-z]+ ){0,2}?"
_NOT = r"(?:not|n['’]t|never)"
_WRONG = (
    r"(?:wrong|incorrect|mistaken|(?:a |the )?(?:mistake|trap|distractor)\b|(?:an )?error\b"
    r"|(?:a |an |the )(?:\w+ )?(?:wrong|incorrect|mistake|error)"
    rf"|{_NOT} {_ADVERBS}(?:right|correct|it\b|true|what\b"
    r"|(?:the|an?|our|my) (?:\w+ )?(?:answer|solution|value|result)))"
)
_REFUSED = (
    rf"(?:{_WRONG}|false|invalid|impossible|absurd|nonsense|rejected|extraneous|ruled out|unreasonable"
    rf"|too (?:small|large|big|high|low|many|few|much|little)|{_NOT} {_ADVERBS}(?:possible|valid|allowed))"
)
_IS = (
    r"(?:is|was|are|were|would be|will be|seems|seems to be|looks|must be|has to be|turns out to be"
    r"|can(?:not|['’]t| not) (?=be (?:right|correct|true|it\b|the|an?\b|possible)))"
)
_DENIED_BEFORE = re.compile(
    r"(?:\b(?:not|never|neither|nor|cannot|anything but|rather than|instead of|other than|unlike)|n['’]t|≠|!=|\\neq?"
    r"|\b(?:different|distinct|differs) from|(?:不是|不为|不等于|不等於|并非|不可能是))"
    r"(?: (?:be|been|equal|equals|to|exactly|simply|just|actually|really|the answer|the same as|is))*\Z"
    r"|\b(?:wrong|incorrect|false|mistaken|erroneous|naive|mistake|error|trap|misconception)"
    r"(?: (?:answer|value|result|choice|guess|solution|one|option))?"
    r"(?: (?:is|was|would be|to (?:say|write|answer)))?:?\Z"
    r"|\bdoubt(?: that)?(?: (?:it|this|that|the answer))?(?: is|['’]s)?\Z",
    re.IGNORECASE,
)
_DENIED_BEHIND = re.compile(
    rf"[,;\s]*{_NOUNS}(?:(?:which|that|this|it|but that|but this)(?: |(?=['’])))?(?:{_IS}|['’]s) ?{_ADVERBS}{_REFUSED}"
    rf"|[,;\s]*{_NOUNS}(?:(?:is|was|are|would|should|could|does|do|ca|can)(?:n['’]t| not)) {_ADVERBS}"
    r"(?:be )?(?:right|correct|true|it\b|work\b|possible|the (?:\w+ )?(?:answer|solution|value|result))"
    rf"|[,;\s]*{_NOUNS}cannot be (?:right|correct|true|it\b|the|an?\b|possible)"
    r"|[-–—:,\s]*\(?(?:wrong|incorrect|false)\b|\s*(?:是|为|答案)*(?:不是|错|不对|不正确|有误|不成立)",
    re.IGNORECASE,
)
_RETRACTION = re.compile(
    rf"\b(?:that|this|it|which|the (?:answer|result|value)|my (?:answer|result|work|calculation))"
    rf"(?:['’]s| {_IS}|(?= isn['’]t| wasn['’]t)) ?(?:is|was)?{_ADVERBS}(?:be )?{_WRONG}"
    r"|\b(?:that|this|it) (?:is|was|would|does|can)(?:n['’]t) (?:be )?(?:right|correct|it\b|work\b|the answer)"
    r"|\bI(?:['’]ve| have| must have| think I(?: have)?| may have)? (?:just )?(?:made|make|found|see|spotted) "
    r"(?:a|an|some|my) "
    r"(?:\w+ ){0,2}(?:mistake|error|slip)"
    r"|\bI(?: was|['’]m| am) (?:wrong|mistaken)\b|\bthere (?:is|was) (?:a|an) (?:mistake|error)\b"
    r"|\bscratch that|\bnever ?mind|\b(?:disregard|ignore|forget) (?:that|this)|\bI take (?:that|it) back"
    r"|\b(?:wait|hmm|hold on|oops|actually)[,. …]{1,4}no\b"
    r"|(?:[.!?]|\A) ?No[.,!]? ?(?:wait|that|it|\Z)|[。，]?(?:不对|错了)",
    re.IGNORECASE,
)
_BOUND_BEFORE = re.compile(
    r"(?:\bat (?:least|most|(?:a |the )?(?:minimum|maximum|best|worst))"
    r"|\b(?:more|less|fewer|greater|larger|smaller|bigger|higher|lower|better"
    r"|older) than"
    r"|\b(?:over|under|above|below|up to|exceed(?:s|ing|ed)?|between|either|beyond)"
    r"|\b(?:maybe|perhaps|possibly|probably|presumably|(?:might|may|could|would) be)"
    r"|\bguess(?:ing)?(?: is| would be| that| it is)?:?"
    r"|(?<![-=<>])[<>≤≥]=?|\\(?:[lg]eq?|[lg]t|[lg]eqslant|pm)|±|(?:和|或|至少|至多|最多|最少|超过|大于|小于|不超过)[是为]?"
    r")(?: (?:be|or equal to|equal to|exactly|even|the answer is|it is))*\Z",
    re.IGNORECASE,
)
_ABOUT_BEFORE = re.compile(
    r"(?:\b(?:about|approximately|approx\.?|roughly|around|nearly|almost|close to|near|circa)|[~∼]|大约|约|大概)\Z",
    re.IGNORECASE,
)
_LABEL_BEFORE = re.compile(
    r"\b(?:pages?|pp?\.|steps?|eq(?:uation|n)?s?\.?|chapter|problem|question|section|fig(?:ure)?\.?|table|theorem|lemma|corollary"
    r"|exercise|example|appendix|footnote)(?: (?:no\.|number))?(?: ?#)?\Z",
    re.IGNORECASE,
)
_DIGIT_WORDS = "zero|one|two|three|four|five|six|seven|eight|nine"
_CHANGED_BEHIND = re.compile(
    r"\s*-?(?:\^(?! ?\{? ?\\circ)|(?:or|and) (?:more|less|so|higher|lower|fewer|greater|larger|smaller|above|below"
    r"|thereabouts|over|under|upwards?|up|counting|a half|a quarter|a third|half)\b|at (?:least|most)\b"
    r"|ish\b|\+(?!\s*[0-9])|(?:dozens?|gross|squared|cubed|factorial|halves|thirds|fourths|fifths|sixths|sevenths|eighths|ninths|tenths"
    r"|hundredths|thousandths|millionths|lakhs?|crores?|doubled|tripled|quadrupled|halved)\b|score\b(?! of)"
    rf"|per ?cent (?:off|more|less)\b|point (?:[0-9]|{_DIGIT_WORDS})\b"
    r"|(?:times|plus|minus|over|divided by|mod(?:ulo)?|choose) "
    rf"(?:[0-9]|{_DIGIT_WORDS}|ten)\b"
    r"|(?:or|to|–|—) ?[$€£]?[0-9]|[<>≤≥]|以上|以下|左右|或)",
    re.IGNORECASE,
)
_COUNTED_BEFORE = re.compile(  # 15 apples or 16
    r"[0-9][.,0-9]* (?!dozen|half|score|pair|hundred|thousand|million|billion)[a-z]+ or\Z", re.IGNORECASE
)
_CANDIDATE_BEFORE = re.compile(
    r"[0-9][%°]?[()}\]$\\ ]*(?:,? ?\b(?:or|and|to|till|through)\b|,? ?(?:或|和|至|到)| ?[|/])\Z"
)
_QUESTION_BEHIND = re.compile(r"(?![^\w?]*[A-Z])[^.!?\n]{0,40}\?")
_AFFIRMED = re.compile(r"\b(?:yes|yep|indeed|correct|exactly|right|true|it is|confirmed|works)\b", re.IGNORECASE)


def _before(text: str, start: int) -> str:
    return _TAG_BEFORE.sub("", text[max(0, start - _WINDOW) : start].rstrip(_OPENERS)).rstrip(_OPENERS)


def _behind(text: str, end: int) -> str:
    return _TAG_BEHIND.sub("", text[end : end + _WINDOW].lstrip(_CLOSERS)).lstrip(_CLOSERS)


def is_denied(text: str, start: int, end: int) -> bool:
    """Return whether a text says that a part of it is not the answer.

    >>> is_denied("The answer is not 16.", 18, 20), is_denied("16 is wrong", 0, 2), is_denied("not 15 but 16", 11, 13)
    (True, True, False)
    """
    return bool(_DENIED_BEFORE.search(_before(text, start)) or _DENIED_BEHIND.match(_behind(text, end)))


def is_doubted(text: str, start: int, end: int) -> bool:
    """Return whether a text gives a part of it as a bound, a guess, or with a word that makes it another number.

    An approximation is no doubt about a decimal, but about an integer.

    >>> is_doubted("at least 16", 9, 11), is_doubted("16 dozen", 0, 2), is_doubted("It is 16 m.", 6, 8)
    (True, True, False)
    >>> is_doubted("about 16", 6, 8), is_doubted("about 5.2", 6, 9)
    (True, False)
    """
    before = _before(text, start)
    about = _ABOUT_BEFORE.search(before) and not re.search(r"[0-9]\.[0-9]", text[start:end])
    return bool(about or _BOUND_BEFORE.search(before) or _CHANGED_BEHIND.match(_behind(text, end)))


def is_reference(text: str, start: int) -> bool:
    """Return whether a number names a part of a document, such as a page or a step.

    >>> is_reference("See page 16.", 9), is_reference("The question: 16", 14)
    (True, False)
    """
    return bool(_LABEL_BEFORE.search(text[max(0, start - _WINDOW) : start].rstrip(" (#")))


def is_candidate(text: str, start: int) -> bool:
    """Return whether a number is one of several that "or", "and" or "to" joins.

    >>> is_candidate("15 or 16", 6), is_candidate("two dozen or 24", 13)
    (True, False)
    """
    before = _before(text, start)
    return bool(_CANDIDATE_BEFORE.search(before) or _COUNTED_BEFORE.search(before))


def is_question(text: str, end: int) -> bool:
    """Return whether the text asks whether something is the answer, and does not say yes.

    >>> is_question("Is it 16?", 8), is_question("Is it 16? Yes.", 8)
    (True, False)
    """
    match = _QUESTION_BEHIND.match(text, end)
    return match is not None and not _AFFIRMED.search(text, match.end())


def retraction_end(text: str, start: int) -> int:
    """Return where the last sentence ends by which a text takes back what stands before it; -1: there is none.

    >>> retraction_end("16. I made a mistake.", 2), retraction_end("16. I hope this helps.", 2)
    (20, -1)
    """
    *_, last = [None, *_RETRACTION.finditer(text, start)]
    return -1 if last is None else last.end()


# No short noun phrase has articles, pronouns, conjunctions or verbs.
_FUNCTION_WORDS = (
    "a an the it this that these those which what who whom each every either neither both all any some other "
    "another such same more most less least fewer few many much several enough something nothing anything "
    "everything none no not never or and but nor if unless though although because since while whereas so then "
    "else otherwise only also is are was were be been being am do does did has have had can cannot could may "
    "might must shall should will would at in on by to from with without over under above below than as into onto "
    "upto up off out among within beyond near about around upwards between per"
)
# These words doubt a number, or compare it.
_OPINIONS = (
    "maybe perhaps possibly probably approximately approx roughly nearly almost ish guess likely wrong incorrect "
    "false invalid impossible mistaken rejected minimum maximum exclusive inclusive negative positive short fewer "
    "higher lower greater larger smaller"
)
# These words multiply a number, or calculate with it.
_NUMBERS_AND_OPERATIONS = (
    "plus minus times divided cent zero one two three four five six seven eight nine ten eleven twelve thirteen "
    "fourteen fifteen sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety "
    "twos threes fives tens hundreds dozen dozens score scores gross hundred thousand thousands million millions "
    "billion billions trillion trillions quadrillion nonillion lakh lakhs crore crores mil bn pair pairs couple "
    "couples brace half halves third thirds quarter quarters fourth fourths fifth fifths sixth sixths seventh "
    "sevenths eighth eighths ninth ninths tenth tenths hundredth hundredths thousandth thousandths millionth "
    "millionths trillionth trillionths percent percentage pct squared cubed doubled tripled halved double "
    "triple quadruple twice thrice factorial power powers root roots radical radicals inverse reciprocal "
    "complement opposite reversed remainder quotient base mod modulo choose point log logs sqrt multiples cbrt "
    "sin cos tan cot sec csc sinh cosh tanh exp inf infinity oo "
    "max min abs gcd lcm floor ceil alpha beta gamma delta epsilon zeta eta theta iota kappa lambda rho sigma tau "
    "phi chi psi omega pi cis ln lg ascending descending"
)
_CHANGING = frozenset(f"{_FUNCTION_WORDS} {_OPINIONS} {_NUMBERS_AND_OPERATIONS}".split())
_DESCRIBING = frozenset(("positive", "negative", "other", "same", "maximum", "minimum"))  # before a noun
_HEADS = frozenset(("pair", "pairs", "multiples", "roots", "root", "powers"))  # behind an adjective
_NO_NOUN = re.compile(r"n['’]t$|fold$|^(?:fails?|works?|nope|nah|apiece)$")
_LONGEST_PHRASE = 4  # words


def is_noun_phrase(words: str) -> bool:
    """Return whether words behind a number are a short noun phrase that leaves the number as it is.

    >>> is_noun_phrase("red balls"), is_noun_phrase("cups of flour"), is_noun_phrase("miles per hour")
    (True, True, True)
    >>> is_noun_phrase("or more"), is_noun_phrase("dozen"), is_noun_phrase("is wrong"), is_noun_phrase("squared")
    (False, False, False, False)
    """
    if not re.fullmatch(r"[^\W\d_][^\W\d_'’ .-]*(?:[ .'’-]+[^\W\d_]+)*\.?", words.strip()):
        return False
    parts = [part.strip(".'’") for part in words.casefold().split()]
    for joint in ("per", "of"):
        if joint in parts[1:-1]:
            place = parts.index(joint)
            first, rest = parts[:place], [part for part in parts[place + 1 :] if part not in ("a", "an", "the")]
            return bool(rest) and all(is_noun_phrase(" ".join(side)) for side in (first, rest))
    if len(parts) > _LONGEST_PHRASE:
        return False
    if len(parts) > 1:
        if parts[-1] in _HEADS and parts[-2] not in _CHANGING | {"square", "cube"}:
            parts = parts[:-1]
        while len(parts) > 1 and parts[0] in _DESCRIBING:
            parts = parts[1:]
    return not _CHANGING & set(parts) and not any(len(part) < 2 or _NO_NOUN.search(part) for part in parts)
