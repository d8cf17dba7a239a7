r"""Units behind a number: ``5 \text{ cm}``, ``30^\circ``, ``12 km/h``, ``3 million``."""

import re
from fractions import Fraction

from nrl.envs.library.mathematics.nodes import Node

__all__ = ["differ", "scaled", "split_unit"]

_SAME = {
    "m": "m meter meters metre metres",
    "cm": "cm centimeter centimeters centimetre centimetres cms",
    "mm": "mm millimeter millimeters millimetre millimetres",
    "km": "km kilometer kilometers kilometre kilometres kms",
    "in": "in inch inches",
    "ft": "ft foot feet",
    "yd": "yd yard yards",
    "mi": "mi mile miles",
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
_ALONE = "cm mm km ft kg mg lb lbs min hr hrs mph ml mL oz sec yd Hz kHz MHz Pa kPa kJ kW kWh KB MB GB TB nm mol"
_LETTERS_ALONE = frozenset(_ALONE.split())  # without a text around
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_TEXT = r"\\(?:text|textbf|textit|textrm|mathrm|mbox|rm) ?\{[^{}]*\}"
_POWER = r"(?:\^(?:\{-?[0-9]\}|[0-9]))?"
_LETTERS = "|".join(sorted(_LETTERS_ALONE, key=len, reverse=True))
_IN_TEXT = rf"(?:(?:\\cdot ?|/ ?)?{_TEXT}{_POWER}(?:/[a-z]{{1,3}}{_POWER})?\s*)+"
_IN_LETTERS = rf" ?(?:(?:{_LETTERS}|m|s|h|g){_POWER}/(?:s|h|min|hr|m|L){_POWER}|(?:{_LETTERS})(?![A-Za-z]){_POWER})"
_IN_WORDS = rf" (?:(?:sq|cu)\.? [A-Za-z]+|[A-Za-z]{{3,}})(?: [A-Za-z]{{2,}})*{_POWER}"
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
_NO_UNITS = re.compile(
    r"(?<![A-Za-z])(?:sqrt|cbrt|frac|cis|sin|cos|tan|cot|sec|csc|log|exp|inf|infinity|oo|pi|mod|max|abs|factorial|or|and|plus|minus"
    r"|alpha|beta|gamma|delta|theta|lambda|times|divided|choose|over|maybe|not|but|if)(?![A-Za-z])"
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
        scale = unit.split(" ")[0]
        return money[1] + value, f"{scale} {sign}" if scale in _SCALES else sign + (
            f"/{_canonical(time)}" if rate else ""
        )
    if money := re.fullmatch(r"(.*[0-9}]) ?([$€£₹])", text):
        return money[1].removesuffix("\\"), _UNITS[money[2]]
    found = _BEHIND.fullmatch(text)
    if (
        found is None
        or re.fullmatch(r"\\[a-z]+ ?\{ ?[ei] ?\}.*", found["unit"])
        or _NO_UNITS.search(found["unit"])
        or re.search(r"[0-9](?![}^])(?<!\^[0-9])(?<!\{[0-9])(?<!-[0-9])", found["unit"])
    ):
        return text, ""
    unit = re.sub(r"\\(?:text|textbf|textit|textrm|mathrm|mbox|rm|cdot)|[{}\\]", " ", found["unit"]).strip()
    return found["value"].strip(), _canonical(unit)


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
    """Return whether two known units are not the same; what is no known unit is no difference.

    >>> differ("m", "km"), differ("m", ""), differ("ducks", "m"), differ("pound", "£")
    (True, False, False, False)
    """

    def known(unit: str) -> bool:
        return all(re.sub(r"\^-?[0-9]", "", part) in _SAME or part[:6] == "degree" for part in unit.split("/"))

    first, second = map(_without_scale, (first, second))
    if {first, second} in ({"pound", "lb"}, {"pound", "£"}):
        return False  # A pound is a weight or money.
    return first != second and bool(first and second) and known(first) and known(second)


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
