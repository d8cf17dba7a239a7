"""Wrong answers in the shape of a right one: what a scorer reads as an answer, and must not give 1."""

import ast
import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["shapes"]

_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?|\d+(?:\.\d+)?")
_WORD = re.compile(r"[A-Za-z]+")
_NUMBERS: dict[str, Callable[[str], str]] = {
    "NaN": lambda text: "NaN",
    "Infinity": lambda text: "Infinity",
    "-Infinity": lambda text: "-Infinity",
    "1e999": lambda text: "1e999",
    "0.9 more": lambda text: _plus(text, 0.9),
    "0.9 less": lambda text: _plus(text, -0.9),
    "1 more": lambda text: _plus(text, 1),
    "77": lambda text: "77",
    "negated": lambda text: text[1:] if text[:1] == "-" else "-" + text if float(text) else text,
}
_AROUND = {
    "a word behind": "{} other",
    "a word behind, comma": "{}, other",
    "a word behind, line": "{}\nother",
    "words behind": "{} or something else that is not it",
    "a number behind": "{} 77",
    "a number behind, comma": "{}, 77",
    "a number behind, line": "{}\n77",
    "a digit behind": "{}7",
    "a letter behind": "{}q",
    "0.5 added": "{} + 0.5",
    "a third added": "{} + 1/3",
    "0.4 taken away": "{} - 0.4",
    "times 1.02": "({}) * 1.02",
    "a word in front": "other {}",
    "a word in front, comma": "other, {}",
    "a word in front, line": "other\n{}",
    "a number in front": "77 {}",
    "a number in front, comma": "77, {}",
    "a number in front, line": "77\n{}",
    "not": "not {}",
    "twice": "{0} {0}",
    "twice, comma": "{0}, {0}",
    "twice, line": "{0}\n{0}",
}


def shapes(reference: str) -> Iterator[tuple[str, str]]:
    """Wrong answers made of a right one, with their names; none of them is the right one again.

    Args:
        reference: the right answer: a number, words, an expression, lines, or a list as JSON or Python writes it.

    >>> found = dict(shapes('["1", "2"]'))
    >>> found["numbers: NaN"], found["numbers: 0.9 more"], found["list: one value"]
    ('["NaN", "NaN"]', '["1.9", "2.9"]', "['1', '1']")
    """
    reference = reference.strip()
    seen = {reference}
    for kind, answer in _all(reference):
        if answer.strip() in seen or (_NUMBER.fullmatch(reference) and _about(answer, float(reference))):
            continue
        seen.add(answer.strip())
        yield kind, answer


def _all(reference: str) -> Iterator[tuple[str, str]]:
    for kind, change in _NUMBERS.items():
        yield f"numbers: {kind}", _NUMBER.sub(lambda found, change=change: change(found[0]), reference)  # type: ignore[misc]
    numbers = list(_NUMBER.finditer(reference))
    for kind, number in (("first", numbers[0]), ("last", numbers[-1])) if numbers else ():
        for much in (0.9, -0.9, 1):
            changed = reference[: number.start()] + _plus(number[0], much) + reference[number.end() :]
            yield f"{kind} number: {much:+}", changed
    yield "words: other", _WORD.sub("other", reference)
    yield "words: Z", _WORD.sub("Z", reference)
    for kind, pattern in _AROUND.items():
        yield kind, pattern.format(reference)
    lines = reference.splitlines()
    if len(lines) > 1:
        yield "lines: the last again", "\n".join([*lines, lines[-1]])
        yield "lines: one less", "\n".join(lines[:-1])
        yield "lines: longer", "\n".join(f"{line} {(line.split() or [''])[-1]}" for line in lines)
        yield "lines: one alike", "\n".join(lines[:1] * len(lines))
    for sign in (", ", " ", "") if reference.isalpha() else (", ", " "):
        parts = reference.split(sign) if sign else list(reference)
        if len(parts) > 1:
            yield f"parts at {sign!r}: one less", sign.join(parts[:-1])
            yield f"parts at {sign!r}: the last again", sign.join([*parts, parts[-1]])
            yield f"parts at {sign!r}: one alike", sign.join(parts[:1] * len(parts))
    yield from _near(reference)
    for write, value in _read(reference):
        for kind, changed in _lists(value) if isinstance(value, list) else _mappings(value):
            if changed != value:
                yield kind, write(changed)


def _about(answer: str, right: float) -> bool:
    """Whether a number is another one but for its last digits."""
    return _NUMBER.fullmatch(answer) is not None and abs(float(answer) - right) <= 1e-4 * abs(right)


def _plus(number: str, much: float) -> str:
    changed = float(number) + much
    return str(int(changed)) if changed.is_integer() else f"{changed:.10g}"


def _read(reference: str) -> Iterator[tuple[Callable[[Any], str], Any]]:
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError):
            value = read(reference)
            if isinstance(value, list | dict) and value:
                yield json.dumps, value
                yield repr, value
                return


def _lists(value: list[Any]) -> Iterator[tuple[str, Any]]:
    yield "list: one more", [*value, value[-1]]
    yield "list: another in front", [value[0], *value]
    yield "list: a number more", [*value, 77]
    yield "list: one less", value[:-1]
    yield "list: one value", [value[0]] * len(value)
    yield "list: empty", []
    yield "list: NaN", [float("nan")] * len(value)
    yield "list: Infinity", [float("inf")] * len(value)
    yield "list: true", [True] * len(value)
    yield "list: none", [None] * len(value)
    yield "list: empty ones", [[]] * len(value)
    yield "list: nested", [[each] for each in value]
    yield "list: as keys", {str(i): each for i, each in enumerate(value)}
    if all(isinstance(each, list) and each for each in value):
        yield "rows: longer", [[*each, each[-1]] for each in value]
        yield "rows: shorter", [each[:-1] for each in value]
        for kind, one in (("NaN", float("nan")), ("Infinity", float("inf")), ("true", True), ("none", None)):
            yield f"rows: {kind}", [[one] * len(each) for each in value]
        yield "rows: one value", [[value[0][0]] * len(each) for each in value]
        yield "rows: nested", [[[one] for one in each] for each in value]


def _mappings(value: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    first = next(iter(value.values()))
    yield "mapping: one more", value | {"other": first}
    yield "mapping: one less", dict(list(value.items())[:-1])
    yield "mapping: empty", {}
    for kind, one in (("one value", first), ("NaN", float("nan")), ("true", True), ("none", None), ("lists", [first])):
        yield f"mapping: {kind}", dict.fromkeys(value, one)
    yield "mapping: other keys", {f"{key}0": each for key, each in value.items()}


def _near(reference: str) -> Iterator[tuple[str, str]]:
    """Other sums of the same numbers, whose value is less than 1 away."""
    numbers = re.findall(r"\d+", reference)
    if (
        not 2 <= len(numbers) <= 6
        or not re.fullmatch(r"[-+*/()\d\s]+", reference)
        or not re.search(r"\d\s*[-+*/]", reference)
    ):
        return
    try:
        right = eval(reference)  # an expression of numbers that reasoning-gym made
    except (SyntaxError, ZeroDivisionError, TypeError):
        return
    found = 0
    orders = itertools.islice(itertools.permutations(numbers), 24)
    for order, signs in itertools.product(orders, itertools.product("*-/+", repeat=len(numbers) - 1)):
        left = order[0]
        for sign, number in zip(signs, order[1:], strict=True):
            left = f"({left} {sign} {number})"
        with contextlib.suppress(ZeroDivisionError):
            if 1e-3 < abs(eval(left) - right) < 1:
                yield f"expression: near, {found}", left
                found += 1
                if found == 2:
                    return
