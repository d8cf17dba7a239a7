"""Read answers that are no formula: times, numbers in a base, choices, words, dates."""

import re

from nrl.envs.library.mathematics.kinds import REALS, Answer, Based, Choice, Listing, Point, Time, Words

__all__ = [
    "TEXT",
    "read_based",
    "read_choice",
    "read_prose",
    "read_special",
    "read_statement",
    "read_time",
    "read_word_list",
    "read_words",
    "split_choice",
    "unwrap_text",
]

TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname|rm|bf) ?\{([^{}]*)\}")
_TIME = re.compile(
    r"(?P<hour>[01]?[0-9]|2[0-4])(?::|\{:\}|\\colon ?)(?P<minute>[0-5][0-9])(?:(?::|\{:\})(?P<second>[0-5][0-9]))?"
    r" ?(?P<half>[ap]\.? ?m\.?)?",
    re.IGNORECASE,
)
_HOUR = re.compile(r"(?P<hour>1[0-2]|[1-9]) ?(?P<half>[ap]\.? ?m\.?)", re.IGNORECASE)
_BASED = re.compile(r"\(?([0-9A-Fa-f]+)\)?_ ?(?:\{ ?\(?([0-9]{1,2}|[a-z]+)\)? ?\}|([0-9]{1,2}))")
_BASE_WORDS = re.compile(r"([0-9A-Fa-f]+) ?(?:\(?(?:in )?base[- ]?([0-9]{1,2}|[a-z]+)\)?)", re.IGNORECASE)
_PREFIXED = re.compile(r"0([bxo])([0-9A-Fa-f]+)", re.IGNORECASE)
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
_BASES |= {"eleven": 11, "twelve": 12, "sixteen": 16}
_CHOICE = re.compile(
    r"(?:(?:option|choice|answer)[ :]*)?(?:\(([A-J])\)|([A-J])\)|([A-J])[.:](?=.)|([A-J]))", re.IGNORECASE
)
_OPTION = (  # The text of the option, but no second answer
    r"(?!.*(?:[,;](?! ?[0-9]{3}(?![0-9]))|=|(?<![A-Za-z])(?:or|and|not)(?![A-Za-z])|\([A-J]\)"
    r"|(?<![A-Za-z])[A-J][).:])).+"
)
_CHOICE_AND_MORE = re.compile(rf"(?:\(([A-J])\)|([A-J])[).:]) *(?![,;+!^=)\s-]){_OPTION}")
_PLAIN_CHOICE_AND_MORE = re.compile(
    rf"(?:\(([A-J])\)|([A-J])[).:](?![0-9]{{2}}$)) *(?=-?[$€£]?[0-9]|-?\\(?:frac|sqrt|pi)|[A-Za-z]{{3,}}|[a-z][-+^])"
    rf"{_OPTION}"
)
_MATH_WORDS = re.compile(
    r"(?:sqrt|cbrt|(?:arc|a)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|lg|exp|pi|Pi|inf(?:inity)?|oo|infty|max|min|abs|Abs|gcd|lcm"
    r"|floor|ceil|ceiling|factorial|binom|binomial|or|and|frac|alpha|beta|gamma|delta|theta|lambda|mu|phi|omega|rho|sigma)"
)
_EMPTY = frozenset(("empty set", "the empty set", "null set", "no solution", "no solutions", "{}"))
_NO_SOLUTION = re.compile(
    r"(?:(?:there (?:is|are|exists?)|it has|the equation has|has|have) )?no (?:real )?"
    r"(?:solutions?|roots?|real numbers?|such (?:numbers?|integers?|values?|functions?|[a-z]))(?: exists?)?\.?"
    r"|无解|无实数解"
)
_ALL = frozenset(
    ("all real numbers", "all reals", "real numbers", "the real numbers", "all real values", "all real number", "reals")
)
_ALL_WHOLE = frozenset(("all integers", "integers", "the integers", "every integer", "the set of integers"))
_MONTHS = [
    "january",
    "february",
    "march",
    "april",
    "may",
    "june",
    "july",
    "august",
    "september",
    "october",
    "november",
    "december",
]


def unwrap_text(text: str) -> str:
    r"""Return a text without the commands around its words, and with single spaces.

    >>> unwrap_text(r"5\text{ or  more}")
    '5 or more'
    """
    return " ".join(TEXT.sub(r" \1 ", text).split())


def read_time(text: str) -> Time | None:
    """Read a time of day.

    >>> read_time("3:30 p.m."), read_time("3:3")
    (Time(minutes=930, seconds=-1, half='p', numbers=()), None)
    """
    plain = " ".join(TEXT.sub(r" \1", text).split())
    if word := re.fullmatch(r"(?:12 ?)?(noon|midnight)", plain, re.IGNORECASE):
        return Time(720, half="p") if word[1].lower() == "noon" else Time(0, half="a")
    plain = re.sub(r"^([0-9]{1,2}) ?o['’]clock$", r"\1:00", plain)
    found = _TIME.fullmatch(plain)
    if found is None and (hour := _HOUR.fullmatch(plain)):
        return _clock(int(hour["hour"]), 0, -1, hour["half"])
    if found is None:
        return None
    hours, minutes, seconds = (int(found[part] or -1) for part in ("hour", "minute", "second"))
    time = _clock(hours, minutes, seconds, found["half"] or "")
    clock = found["hour"].startswith("0") or found["minute"].startswith("0") or (seconds < 0 and 10 <= hours <= 12)
    if found["half"] or clock:
        return time  # 10:20 is how a clock shows it; 4:10 and 15:20 may be ratios, beside another one.
    return time._replace(numbers=(hours, minutes) if seconds < 0 else (hours, minutes, seconds))


def _clock(hour: int, minute: int, second: int, half: str) -> Time:
    half = half[:1].lower()
    if half and hour <= 12:
        return Time(60 * (hour % 12 + 12 * (half == "p")) + minute, second, half)
    return Time(60 * hour + minute, second)


def read_based(text: str) -> Based | None:
    """Read a number whose base is said.

    >>> read_based("101_{2}"), read_based("102_2")
    (Based(digits='101', base=2, literal=False), None)
    >>> read_based("0x1f")
    Based(digits='1F', base=16, literal=True)
    """
    plain = TEXT.sub(r"\1", text)
    if found := _PREFIXED.fullmatch(plain):
        base = {"b": 2, "o": 8, "x": 16}[found[1].lower()]
        digits = _digits(found[2], base)
        return None if digits is None else digits._replace(literal=True)
    found = _BASED.fullmatch(plain) or _BASE_WORDS.fullmatch(plain)
    if found is None:
        return None
    said = next(each for each in found.groups()[1:] if each)
    base = int(said) if said.isdigit() else _BASES.get(said, 0)
    return _digits(found[1], base)


def _digits(digits: str, base: int) -> Based | None:
    if not 2 <= base <= 36 or any(int(digit, 36) >= base for digit in digits):
        return None
    return Based(digits.upper().lstrip("0") or "0", base)


def read_choice(text: str) -> Choice | None:
    r"""Read a letter that may name an option.

    >>> read_choice("B"), read_choice(r"\text{(B)}")
    (Choice(letter='B', marked=False, option=None), Choice(letter='B', marked=True, option=None))
    """
    plain = TEXT.sub(r"\1", text).strip()
    marked = plain != text
    if found := _CHOICE.fullmatch(plain):
        letter = next(each for each in found.groups() if each)
        return (
            Choice(letter, marked or found[4] is None or len(plain) > 1)
            if (letter != "e" and letter != "i") or marked
            else None
        )
    return None


def split_choice(text: str) -> tuple[str, str] | None:
    r"""Split an option into its letter and its text; None: it is no option.

    >>> split_choice("(B) 12"), split_choice(r"\textbf{(B) } x+1"), split_choice("(B)+12")
    (('B', '12'), ('B', 'x+1'), None)
    """
    plain = TEXT.sub(r"\1", text).strip()
    pattern = _CHOICE_AND_MORE if re.search(r"\\[a-z]+ ?\{ ?\(?[A-J][).:]", text) else _PLAIN_CHOICE_AND_MORE
    match = pattern.fullmatch(plain)
    if match is None:
        return None
    rest = plain[match.end(1 if match[1] else 2) :].lstrip(").: ")
    return (match[1] or match[2], rest) if not re.fullmatch(r"(?:sin|cos|tan|log|ln|exp)\b.*", rest) else None


def read_special(text: str) -> Answer | None:
    """Read the empty set, all real numbers, and infinity as words."""
    plain = unwrap_text(text).lower()
    empty = r"\\(?:emptyset|varnothing)|\\\{ ?\\\}|\{ ?\}|∅|\\O"
    if re.fullmatch(empty, text) or plain in _EMPTY or _NO_SOLUTION.fullmatch(plain):
        return Listing((), True)
    if plain in _ALL or re.fullmatch(r"(?:[a-z] ?\\in ?)?\\(?:mathbb|mathbf|Bbb) ?\{?R\}?|[a-z] ?\\in ?R", text):
        return REALS
    if plain in _ALL_WHOLE or re.fullmatch(r"(?:[a-z]\\in ?)?\\(?:mathbb|mathbf|Bbb) ?\{?Z\}?", text):
        return Words("all integers")
    return None


_ROMAN = re.compile(r"[IVX]{1,5}")
_JOINED_BY = re.compile(r"(?: ?, ?(?:and|or|&) | (?:and|or|&) )")


def read_word_list(text: str) -> Listing | Point | Words | None:
    """Read words, or Roman numerals of statements, that are joined by "and", in any order; by commas alone, in theirs.

    >>> read_word_list("III and I") == read_word_list("I, III"), read_word_list("Bob"), read_word_list("x and y")
    (True, None, None)
    """
    plain = unwrap_text(text).strip("\"'“”‘’")
    if not re.fullmatch(r"[^\W\d_](?:[^\W\d_]|[',’. &-])*", plain):
        return None
    statements = re.sub(r"^(?:only|statements?) (?=[IVX])|(?<=[IVX]) only$", "", plain)
    if statements != plain and _ROMAN.fullmatch(statements):
        return Words(statements.lower(), statements)
    plain = statements
    parts = [part.strip(" ,") for joined in _JOINED_BY.split(plain) for part in joined.split(",")]
    if len(parts) < 2 or any(not part or len(part.split()) > 3 for part in parts):
        return None
    if all(map(_ROMAN.fullmatch, parts)) and any(len(part) > 1 for part in parts):
        return Listing(tuple(Words(part.lower()) for part in sorted(parts)), False)
    if any(_MATH_WORDS.fullmatch(word) for part in parts for word in part.split()):
        return None
    if all(len(part) == 1 for part in parts) or not all(re.search(r"[^\W\d_]{2}", part) for part in parts):
        return None
    words = tuple(Words(_simple(part)) for part in parts)
    return Listing(words, False) if _JOINED_BY.search(plain) else Point(words)


def read_words(text: str) -> Words | None:
    """Read words: letters, perhaps with a date's or a name's numbers in them, and nothing of a formula."""
    plain = unwrap_text(text).strip("\"'“”‘’")
    if date := _date(plain) or _numeric_date(plain):
        return Words(date)
    if not re.fullmatch(r"[^\W\d_](?:[^\W\d_]|['’. -](?=.))*", plain) or not re.search(
        r"[^\W\d_]{2}|[\u4e00-\u9fff]", plain
    ):
        return None
    runs = re.findall(r"[A-Za-z]+", plain)
    if runs and all(_MATH_WORDS.fullmatch(run) or len(run) == 1 for run in runs) and plain == text:
        return None  # as "pi" and "x or y"
    if any(run in ("and", "or") for run in runs[1:-1]) and all(len(run) == 1 or run in ("and", "or") for run in runs):
        return None
    if "-" in plain and plain == text and all(len(run) < 3 for run in runs):
        return None  # as "ad-bc"
    product = text if len(runs) == 1 and plain == text and len(text) <= 4 else ""
    options = plain if re.fullmatch("A?B?C?D?E?F?G?H?", plain) else ""
    return Words(_simple(plain), product, options)


def _date(text: str) -> str:
    words = re.findall(r"[A-Za-z]+|[0-9]+", text)
    month = next(
        (n for n, name in enumerate(_MONTHS) for word in words if len(word) > 2 and name.startswith(word.lower())), None
    )
    numbers = [word for word in words if word.isdigit()]
    rest = [word.lower() for word in words if word.isalpha()]
    if month is None or not 1 <= len(numbers) <= 2:
        return ""
    known = {
        "st",
        "nd",
        "rd",
        "th",
        "of",
        "the",
        "monday",
        "tuesday",
        "wednesday",
        "thursday",
        "friday",
        "saturday",
        "sunday",
    }
    if any(word not in known and not _MONTHS[month].startswith(word) for word in rest):
        return ""
    return f"date {month + 1} " + " ".join(sorted(number.lstrip("0") for number in numbers))


_DATE = re.compile(r"([0-9]{4})[-/]([0-9]{1,2})[-/]([0-9]{1,2})|[0-9]{1,2}/[0-9]{1,2}/[0-9]{4}|[0-9]{3}-[0-9]{4}")


def _numeric_date(text: str) -> str:
    """A date in digits, or a number of a telephone, which are no differences or quotients; else nothing."""
    found = _DATE.fullmatch(text)
    if found is None or found[1] is None:
        return "" if found is None else re.sub(r"(?<![0-9])0(?=[0-9]/)", "", text)
    year, month, day = found.groups()
    return f"date {int(month)} " + " ".join(sorted((year, day.lstrip("0"))))


_HYPHEN = re.compile(r"(?<=[^\W\d_])[-–](?=[^\W\d_]{2})|(?<=[^\W\d_]{2})[-–](?=[^\W\d_])")
_STOP = re.compile(r"(?<=[^\W\d_])[.'’](?![0-9])|(?<![0-9])\.$")


def _simple(text: str) -> str:
    """Return words without what does not matter; a minus sign and a decimal point stay."""
    words = _STOP.sub("", _HYPHEN.sub(" ", text.casefold())).split()
    while len(words) > 1 and words[0] in ("the", "a", "an"):
        words = words[1:]
    plain = " ".join(words)
    return _SAME_WORDS.get(plain, plain)


_SAME_WORDS = {
    **dict.fromkeys(
        ("dne", "limit does not exist", "it does not exist", "doesnt exist", "limit dne"), "does not exist"
    ),
    **dict.fromkeys(
        ("infinitely many solutions", "infinite number of solutions", "infinite solutions"), "infinitely many"
    ),
    "there are infinitely many solutions": "infinitely many",
}


_SYMBOLIC = re.compile(
    r"\\(?:subseteq|subset|supseteq|supset|perp|parallel|cong|forall|exists|nexists|nmid|aleph|mapsto|notin)(?![A-Za-z])"
)


def read_statement(text: str) -> Words | None:
    r"""Read a statement in symbols, such as ``A\subseteq B``, which is equal to the same symbols.

    >>> read_statement(r"A \subseteq B") == read_statement(r"A\subseteq B"), read_statement(r"\frac{1}{")
    (True, None)
    """
    if not _SYMBOLIC.search(text) or text.count("{") != text.count("}"):
        return None
    sides = re.split(r"\\(?:perp|parallel|cong)(?![A-Za-z])", text)
    if len(sides) == 2 and text[len(sides[0])] == "\\":
        sign = text[len(sides[0]) : len(text) - len(sides[1])]
        return Words(f"statement {sign} " + " ".join(sorted(side.replace(" ", "") for side in sides)))
    return Words("statement " + text.replace(" ", ""))


def read_prose(text: str) -> Words | None:
    """Read what has words in it and is no formula; so it equals the same words alone."""
    plain = unwrap_text(text)
    if not re.search(r"(?<![\\A-Za-z])[A-Za-z]{2,}", plain) or re.search(r"\\(?:frac|sqrt)\b", text):
        return None
    runs = re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", plain)
    return Words(_simple(plain)) if any(not _MATH_WORDS.fullmatch(run) for run in runs) else None
