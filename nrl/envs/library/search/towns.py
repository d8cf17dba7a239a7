"""An invented country: short passages about its towns, and questions about them. No model has read of it.

Passages and tasks are functions of their arguments alone. Some questions need one passage, others what two of them say.
"""

import functools
import random
from typing import Any, NamedTuple

from nrl.envs.seeds import check_not_negative
from nrl.envs.types import Task
from nrl.errors import DataError

__all__ = ["passages", "task"]

_TOWNS, _RIVERS, _PEOPLE = 120, 40, 120
_ASKED = """{question} Look it up with the tool search. Then answer with nothing but the name or the number, between \
<answer> and </answer>."""


class _Town(NamedTuple):
    name: str
    year: int
    river: str
    founder: str
    goods: str


class _Country(NamedTuple):
    towns: list[_Town]
    lengths: dict[str, int]  # of rivers, in kilometres
    people: dict[str, tuple[str, str, int]]  # birthplace, work, year of birth


def passages() -> list[dict[str, str]]:
    """The corpus, 280 passages: about each town, each river and each founder.

    Returns:
        Rows as `nrl.envs.search` takes them, with ``id``, ``title`` and ``text``.

    >>> len(passages()), sorted(passages()[0])
    (280, ['id', 'text', 'title'])
    """
    country = _country()
    found = [(each.name, _told(each)) for each in country.towns]
    found += [
        (river, f"The {river} is a river, {length} kilometres long. Boats go up as far as its second bridge.")
        for river, length in country.lengths.items()
    ]
    found += [
        (name, f"{name}, born in {born} in the year {year}, was a {work} before founding a town.")
        for name, (born, work, year) in country.people.items()
    ]
    return [{"id": f"towns-{at}", "title": title, "text": text} for at, (title, text) in enumerate(found)]


def task(seed: int, index: int, *, hops: int | None = None) -> Task:
    """The question that a seed has at an index.

    Args:
        seed: not negative.
        index: not negative.
        hops: how many passages its answer needs, 1 or 2. None: drawn evenly.

    Returns:
        ``prompt``; ``question``, without how to answer; ``answer``, a name or a number as text; ``hops``.

    Raises:
        DataError: an argument is out of its range.

    >>> found = task(0, 0, hops=1)
    >>> found["question"], found["answer"]
    ('What is Jorevik known for?', 'apples')
    """
    check_not_negative("towns.task", seed=seed, index=index)
    if hops not in (None, 1, 2):
        raise DataError(f"towns.task: hops is {hops!r}; give 1 or 2, or None for either")
    country, generator = _country(), random.Random(f"towns:{seed}:{index}:{hops}")
    far = generator.choice([1, 2]) if hops is None else hops
    town = generator.choice(country.towns)
    born, work, year = country.people[town.founder]
    near: list[tuple[str, Any]] = [
        (f"In which year was {town.name} founded?", town.year),
        (f"Who founded {town.name}?", town.founder),
        (f"Which river is {town.name} on?", town.river),
        (f"What is {town.name} known for?", town.goods),
    ]
    further: list[tuple[str, Any]] = [
        (f"In which town was the founder of {town.name} born?", born),
        (f"In which year was the founder of {town.name} born?", year),
        (f"What was the founder of {town.name} before?", work),
        (f"How many kilometres long is the river that {town.name} is on?", country.lengths[town.river]),
    ]
    question, answer = generator.choice(near if far == 1 else further)
    return {"prompt": _ASKED.format(question=question), "question": question, "answer": str(answer), "hops": far}


def _told(town: _Town) -> str:
    return (
        f"{town.name} is a town on the river {town.river}. It was founded in {town.year} by {town.founder}, and is "
        f"known for its {town.goods}."
    )


@functools.cache
def _country() -> _Country:
    generator = random.Random("towns")
    names = _names(generator, _TOWNS + _RIVERS + 2 * _PEOPLE)
    towns, rivers = names[:_TOWNS], names[_TOWNS : _TOWNS + _RIVERS]
    first, last = names[_TOWNS + _RIVERS :][:_PEOPLE], names[-_PEOPLE:]
    people, lengths, made = {}, {}, []
    for river in rivers:
        lengths[river] = generator.randint(20, 980)
    for name, *person in zip(towns, first, last, strict=True):
        year, founder = generator.randint(900, 1899), " ".join(person)
        home = generator.choice([each for each in towns if each != name])
        people[founder] = (home, generator.choice(_WORK), year - generator.randint(20, 60))
        made.append(_Town(name, year, generator.choice(rivers), founder, generator.choice(_GOODS)))
    return _Country(made, lengths, people)


def _names(generator: random.Random, count: int) -> list[str]:
    """Different names."""
    found: dict[str, None] = {}
    while len(found) < count:
        parts = [generator.choice(_BEGIN), generator.choice(_MIDDLE), generator.choice(_END)]
        found["".join(parts).capitalize()] = None
    return list(found)


_BEGIN = [
    *("bra", "cor", "dal", "el", "fen", "gar", "hol", "im", "jor", "kel", "lun", "mar"),
    *("nor", "or", "pel", "quin", "ros", "sal", "tor", "ul", "ver", "wen", "yar", "zel"),
]
_MIDDLE = ["a", "an", "e", "en", "i", "in", "o", "on", "u", "un"]
_END = ["ba", "den", "dor", "fa", "gol", "ka", "lem", "mir", "nak", "pas", "rith", "sen", "tal", "vik", "wold", "zar"]
_GOODS = ["glass", "wool", "honey", "paper", "bells", "salt", "boats", "lace", "apples", "clocks", "copper", "ink"]
_WORK = ["miller", "weaver", "sailor", "teacher", "baker", "surgeon", "mason", "painter", "farmer", "clerk"]
