r"""Units behind a number: ``5 \text{ cm}``, ``30^\circ``, ``12 km/h``, ``3 million``."""

import re
from fractions import Fraction

from nrl.envs.library.mathematics.nodes import Node
from nrl.envs.library.mathematics.words.hedges import is_noun_phrase

__all__ = ["conversion", "differ", "read_measures", "scaled", "split_unit"]

_SAME = {
    "m": "m meter meters metre metres",
    "cm": "cm centimeter centimeters centimetre centimetres cms",
    "mm": "mm millimeter millimeters millimetre millimetres",
    "km": "km kilometer kilometers kilometre kilometres kms",
    "in": "in inch inches",
    "ft": "ft foot feet",
    "yd": "yd yard yards",
    "mi": "mi mile miles",
    "dm": "dm decimeter decimeters decimetre decimetres",
    "t": "t tonne tonnes",
    "g": "g gram grams",
    "mg": "mg milligram milligrams",
    "kg": "kg kilogram kilograms kgs",
    "lb": "lb lbs",
    "pound": "pound pounds",
    "£": "£ GBP quid",
    "penny": "p pence penny",
    "¥": "¥ yen JPY yuan CNY RMB",
    "₹": "₹ rupee rupees INR Rs",
    "oz": "oz ounce ounces",
    "s": "s sec secs second seconds",
    "min": "min mins minute minutes",
    "h": "h hr hrs hour hours",
    "day": "day days",
    "week": "week weeks",
    "month": "month months",
    "year": "year years yr yrs",
    "l": "l L liter liters litre litres",
    "ml": "ml mL milliliter milliliters",
    "$": "$ dollar dollars usd USD bucks",
    "cent": "cent cents ¢",
    "euro": "€ euro euros EUR eur",
    "degree": "degree degrees deg °",
    "radian": "rad radian radians",
    "%": "percent pct per_cent percentage",
    "N": "N newton newtons",
    "J": "J joule joules",
    "W": "W watt watts",
    "V": "V volt volts",
    "A": "A ampere amperes amp amps",
    "K": "K kelvin kelvins",
    "Hz": "Hz hertz",
    "Pa": "Pa pascal pascals",
    "mol": "mol mole moles",
    **{unit: unit for unit in ("kHz", "MHz", "kPa", "kJ", "kW", "kWh", "KB", "MB", "GB", "TB", "nm")},
    "mi/h": "mph",
    "km/h": "kph kmph",
}
_UNITS = {word: unit for unit, words in _SAME.items() for word in words.split()}
_UNITS |= {
    f"{degree} {name}": f"degree{name[0].upper()}"
    for degree in ("degree", "degrees")
    for name in ("celsius", "fahrenheit")
}
_ALONE = "cm mm km ft kg mg lb lbs min hr hrs mph ml mL oz sec yd Hz kHz MHz Pa kPa kJ kW kWh KB MB GB TB nm mol"
_LETTERS_ALONE = frozenset(_ALONE.split())  # without a text around
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_TEXT = r"\\(?:text|textbf|textit|textrm|mathrm|mbox|rm) ?\{[^{}]*\}"
_POWER = r"(?:\^(?:\{-?[0-9]\}|[0-9]))?"
_LETTERS = "|".join(sorted(_LETTERS_ALONE, key=len, reverse=True))
_IN_TEXT = rf"(?:(?:\\cdot ?|/ ?)?{_TEXT}{_POWER}(?:/[a-z]{{1,3}}{_POWER})?\s*)+"
_IN_LETTERS = rf" ?(?:(?:{_LETTERS}|m|s|h|g){_POWER}/(?:s|h|min|hr|m|L){_POWER}|(?:{_LETTERS})(?![A-Za-z]){_POWER})"
_IN_WORDS = rf" (?:(?:sq|cu)\.? [A-Za-z]+|[A-Za-z]{{3,}})(?: [A-Za-z]{{2,}})*(?:/[A-Za-z]+)?{_POWER}"
_BEHIND = re.compile(
    r"(?P<value>.*?[0-9A-Za-z)}\]!%])(?:\\[,;: ])*\s*"
    rf"(?P<unit>{_IN_TEXT}|(?<=[0-9}})]){_IN_LETTERS}|(?<=[0-9}})]){_IN_WORDS})",
    re.DOTALL,
)
_DEGREES = re.compile(
    r"(?P<value>(?:(?!\\(?:sin|cos|tan|circ)).)*)(?:\^ ?\{? ?\\circ ?\}?|\\degree) ?"
    r"(?:\\(?:text|mathrm) ?\{ ?([CFK]) ?\}|([CFK]))?",
    re.DOTALL,
)
_CHINESE_UNITS = (
    "cm 厘米 mm 毫米 dm 分米 km 千米 km 公里 m 米 kg 千克 kg 公斤 g 克 t 吨 h 小时 min 分钟 min 分 s 秒 day 天 day 日"
    " week 周 month 月 year 年 year 岁 l 升 ml 毫升 ¥ 元 degree 度 unit 개 unit 명 unit 가지 unit つ"
)
_CHINESE = dict(zip(_CHINESE_UNITS.split()[1::2], _CHINESE_UNITS.split()[::2], strict=True))
_CHINESE |= dict.fromkeys("个個種种人条條只支本张張次件名位项項组組对對套块塊棵辆輛间間", "unit")
_CHINESE_UNIT = re.compile(
    r"(?P<value>.*[0-9})\]])\s*(?:\\(?:text|mathrm|mbox) ?\{)?\s*(?P<power>平方|立方)?"
    r"(?P<unit>[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]{1,4})\s*\}?"
)


def split_unit(text: str) -> tuple[str, str]:
    r"""Split an answer into a value and the unit behind it, in one way to write it; of an unknown one, as it stands.

    >>> split_unit(r"5\text{ centimeters}"), split_unit("12 km/h"), split_unit("3x"), split_unit("2 sqrt")
    (('5', 'cm'), ('12', 'km/h'), ('3x', ''), ('2 sqrt', ''))
    """
    if degrees := _DEGREES.fullmatch(text):
        return degrees["value"], "degree" + (degrees[2] or degrees[3] or "")
    if text.endswith("¢"):
        return text[:-1], "cent"
    if alone := re.fullmatch(r"([-0-9.,/{}]+|\\frac\{[0-9]+\}\{[0-9]+\}) ([NJWVAKLmgsh]|in)(\^\{?[23]\}?)?", text):
        return alone[1], _UNITS.get(alone[2], alone[2]) + re.sub(r"[{}]", "", alone[3] or "")
    if money := re.fullmatch(r"(-?)(?:(?:US|A|C|HK)?([$€£¥₹])|(USD|EUR|GBP|JPY|CNY|INR|Rs\.?) ?(?=[0-9])) ?(.+)", text):
        amount, slash, time = money[4].partition("/")
        rate = slash and re.fullmatch(r" ?[a-z]{1,6}", time)
        value, unit = split_unit(amount if rate else money[4])
        sign = _UNITS[(money[2] or money[3]).rstrip(".")]
        if unit.startswith("/"):  # $4.50 per hour
            rate, time = unit, unit[1:]
        scale = unit.split(" ")[0]
        return money[1] + value, f"{scale} {sign}" if scale in _SCALES else sign + (
            f"/{_canonical(time)}" if rate else ""
        )
    if money := re.fullmatch(r"(.*[0-9}]) ?([$€£₹])", text):
        return money[1].removesuffix("\\"), _UNITS[money[2]]
    if (chinese := _CHINESE_UNIT.fullmatch(text)) and chinese["unit"] in _CHINESE:
        power = {"平方": "^2", "立方": "^3"}.get(chinese["power"], "")
        return chinese["value"], _CHINESE[chinese["unit"]] + power
    match = _BEHIND.fullmatch(text)
    if (
        match is None
        or re.fullmatch(r"\\[a-z]+ ?\{ ?[ei] ?\}.*", match["unit"])
        or re.search(r"[0-9](?![}^])(?<!\^[0-9])(?<!\{[0-9])(?<!-[0-9])", match["unit"])
    ):
        return text, ""
    words = re.sub(r"\\(?:text|textbf|textit|textrm|mathrm|mbox|rm|cdot)|[{}\\]", " ", match["unit"]).strip()
    unit = _canonical(words)
    return (match["value"].strip(), unit) if _is_unit(words, unit) else (text, "")


def _is_unit(words: str, unit: str) -> bool:
    """Return whether words behind a number are a unit or a noun, and do not change or doubt the number."""
    if _is_known(unit) or words.lower() == "percentage points":
        return True
    first, _, rest = words.partition(" ")
    if first.lower() in _SCALES:
        return not rest or _is_known(_canonical(rest)) or is_noun_phrase(rest)
    noun = re.sub(r"^(?:per|/|square|sq\.?|cubic|cu\.?) |\s*\^\s*-?[0-9]$", "", words.strip())
    return is_noun_phrase(noun)


def _is_known(unit: str) -> bool:
    names = [re.sub(r"\^-?[0-9]", "", part) for part in unit.split("/")]
    return all(name in _SAME or re.fullmatch("degree[CFK]?", name) for name in names)


def _canonical(unit: str) -> str:
    """Return a unit in one way to write it: ``m^2`` for "square meters", ``km/h`` for "kilometers per hour"."""
    unit = re.sub(r"\s*\^\s*", "^", unit)
    top, _, bottom = re.sub(r"\bper\b", "/", unit).partition("/")
    parts = list[str]()
    for side in (top, bottom):
        words, power = side.split(), ""
        if words and words[0].lower() in ("square", "cubic", "sq", "cu"):
            power = "^2" if words[0].lower().startswith("sq") else "^3"
            words = words[1:]
        elif words and words[-1].lower() in ("squared", "cubed"):
            power = "^2" if words[-1].lower() == "squared" else "^3"
            words = words[:-1]
        joined = " ".join(words)
        name, sign, raised = joined.partition("^")
        parts.append(
            (_UNITS.get(name.strip()) or _UNITS.get(name.strip().lower()) or name.strip()) + (sign + raised or power)
        )
    return parts[0] + ("/" + parts[1] if bottom else "")


def differ(first: str, second: str) -> bool:
    """Return whether two units, or the nouns behind two numbers, are not the same. Where one is missing, they are.

    >>> differ("m", "km"), differ("m", ""), differ("apples", "oranges"), differ("blue marbles", "marbles")
    (True, False, True, False)
    >>> differ("pound", "£"), differ("units^2", "cm^2")
    (False, False)
    """
    first, second = map(_without_scale, (first, second))
    if not (first and second) or first == second or {first, second} in ({"pound", "lb"}, {"pound", "£"}):
        return False  # A pound is a weight or money.
    if _is_known(first) and _is_known(second):
        return True
    nouns = [_head(side) for side in (first, second)]
    return nouns[0] != nouns[1] and not _GENERIC & set(nouns)


_GENERIC = frozenset(("unit", "item", "object", "thing", "number", "value", "people", "person", "element", "member"))
_TRAILING = frozenset(("old", "long", "left", "total", "altogether", "away", "each", "tall", "wide", "high", "deep"))


def _head(unit: str) -> str:
    """Return the noun of a phrase in the singular: "marble" for "blue marbles", "cup" for "cups of flour"."""
    words = re.sub(r"\^-?[0-9]", "", unit.casefold()).split("/")[0].split(" of ")[0].split()
    while len(words) > 1 and words[-1] in _TRAILING:
        words.pop()
    word = words[-1] if words else ""
    for plural, singular in (("ies", "y"), ("ches", "ch"), ("shes", "sh"), ("xes", "x"), ("sses", "ss"), ("s", "")):
        if word.endswith(plural) and len(word) > len(plural) + 1 and not word.endswith("ss"):
            return word.removesuffix(plural) + singular
    return word


_FACTORS = {
    "length": {"m": "1", "cm": "0.01", "mm": "0.001", "dm": "0.1", "km": "1000", "nm": "1e-9", "in": "0.0254"}
    | {"ft": "0.3048", "yd": "0.9144", "mi": "1609.344"},
    "mass": {"g": "1", "mg": "0.001", "kg": "1000", "t": "1000000", "lb": "453.59237", "oz": "28.349523125"},
    "time": {"s": "1", "min": "60", "h": "3600", "day": "86400", "week": "604800"},
    "volume": {"l": "1", "ml": "0.001"},
    "dollars": {"$": "1", "cent": "0.01"},
    "sterling": {"£": "1", "penny": "0.01"},
    "energy": {"J": "1", "kJ": "1000", "kWh": "3600000"},
    "power": {"W": "1", "kW": "1000"},
    "frequency": {"Hz": "1", "kHz": "1000", "MHz": "1000000"},
    "pressure": {"Pa": "1", "kPa": "1000"},
}
_DIMENSIONS = {name: (kind, Fraction(size)) for kind, sizes in _FACTORS.items() for name, size in sizes.items()}


def _size(unit: str) -> tuple[Fraction, tuple[tuple[str, int], ...]] | None:
    """Return the size of a unit in the basic one of its dimension, and the dimension; None: it is not known."""
    size, dimension = Fraction(1), list[tuple[str, int]]()
    for place, part in enumerate(unit.split("/")):
        name, _, power = part.partition("+")[0].partition("^")
        if name not in _DIMENSIONS or not re.fullmatch(r"-?[0-9]?", power):
            return None
        raised = int(power or 1) * (1 if place == 0 else -1)
        size *= _DIMENSIONS[name][1] ** raised
        dimension.append((_DIMENSIONS[name][0], raised))
    return size, tuple(sorted(dimension))


def conversion(first: str, second: str) -> Fraction | None:
    """Return how many of a second unit one of a first is; None: they are not of one kind.

    >>> conversion("cm", "mm"), conversion("km/h", "m/s"), conversion("cm", "g"), conversion("$", "cent")
    (Fraction(10, 1), Fraction(5, 18), None, Fraction(100, 1))
    """
    sizes = [_size(unit) for unit in (first, second)]
    if sizes[0] is None or sizes[1] is None or sizes[0][1] != sizes[1][1]:
        return None
    return sizes[0][0] / sizes[1][0]


_PART = re.compile(
    r"(?P<value>[0-9]+(?:\.[0-9]+)?|[0-9]+ [0-9]+/[0-9]+) ?(?P<unit>[A-Za-z]+)(?:,? and |, |,| |(?=[0-9])|$)"
)


def read_measures(text: str) -> tuple[Fraction, str] | None:
    """Read a measure in several units, such as "1 hour 30 minutes": its value in the first one, and the unit.

    >>> read_measures("1 hour 30 minutes"), read_measures("5 ft 6 in"), read_measures("5 cm"), read_measures("1 m 2 kg")
    ((Fraction(3, 2), 'h+'), (Fraction(11, 2), 'ft+'), None, None)
    """
    total, first, last, place = Fraction(0), "", "", 0
    while place < len(text):
        match = _PART.match(text, place)
        if match is None or (unit := _canonical(match["unit"])) not in _DIMENSIONS:
            return None
        first = first or unit
        factor = conversion(unit, first)
        if factor is None or (last and (conversion(last, unit) or 0) <= 1):
            return None
        total += sum(map(Fraction, match["value"].split())) * factor
        last, place = unit, match.end()
    return (total, first + "+") if last != first else None


def _without_scale(unit: str) -> str:
    """Return the unit behind "million" and the like."""
    scale, _, rest = unit.partition(" ")
    return _UNITS.get(rest, rest) if scale.lower() in _SCALES else unit


def scaled(value: Node, unit: str) -> Node:
    """Return a number times what the word behind it says: 3 million is 3,000,000."""
    word = unit.split()[0].lower() if unit else ""
    if word in ("%", "percent", "percentage"):
        return Node("%", (value,))
    if word in _SCALES:
        times = Fraction(_SCALES[word])
        if value.kind == "number":
            return Node("number", (), value.value * times)
        return Node("*", (value, Node("number", (), times)))
    return value
