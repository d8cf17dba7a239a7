"""Generated tasks for `constraints`: short texts to write, each under one to three conditions.

A task is a function of ``(seed, index)`` alone, so the state of the stream is one integer.
"""

from typing import Any

from nrl.envs.seeds import check_not_negative, generator
from nrl.envs.types import Task

__all__ = ["task"]

_WORDS = (
    "apple", "bird", "cloud", "door", "fire", "green", "house", "june", "kite", "moon", "ocean", "rain", "sun", "tree",
)  # fmt: skip
_COUNTS = {1: "one word", 2: "two words", 3: "three words", 4: "four words"}


def task(seed: int, index: int) -> Task:
    """The text to write that a seed has at an index.

    Args:
        seed: not negative.
        index: not negative.

    Returns:
        ``prompt``, the conditions as plain text that ends in a line end; ``constraints``, the same for
        `nrl.envs.constraints`, from one to three of: how many words, small or capital letters, a word that is there,
        quotation marks, how it ends. For supervised training ``response``, a text that fulfils them.

    Raises:
        DataError: ``seed`` or ``index`` is negative or no integer.

    >>> found = task(0, 5)
    >>> found["prompt"], found["constraints"], found["response"]
    ('Use capital letters. End with ?\\n', ['uppercase', {'ends': {'with': '?'}}], 'GREEN FIRE BIRD?')
    """
    check_not_negative("instruction_tasks.task", seed=seed, index=index)
    draw = generator(seed, index)
    count, word = int(draw.integers(1, len(_COUNTS) + 1)), str(draw.choice(_WORDS))
    end, capital = str(draw.choice(["!", "?"])), bool(draw.integers(2))
    kinds: dict[str, tuple[str, Any]] = {
        "words": (f"Write {_COUNTS[count]}.", {"words": {"least": count, "most": count}}),
        "case": ("Use capital letters.", "uppercase") if capital else ("Use small letters.", "lowercase"),
        "contains": (f"Say {word}.", {"contains": {"words": [word]}}),
        "quoted": ("Put it in quotes.", "quoted"),
        "ends": (f"End with {end}", {"ends": {"with": end}}),
    }
    drawn = draw.choice(list(kinds), draw.integers(1, 4), replace=False)
    chosen = [name for name in kinds if name in drawn]
    if {"quoted", "ends"} <= set(chosen):  # which no text is
        chosen.remove("quoted")
    rest = [each for each in _WORDS if each != word]
    others = draw.choice(rest, (count if "words" in chosen else 3) - 1, replace=False)
    text = " ".join([word, *map(str, others)])
    text = text.upper() if "case" in chosen and capital else text
    text += end if "ends" in chosen else ""
    return {
        "prompt": " ".join(kinds[name][0] for name in chosen) + "\n",
        "constraints": [kinds[name][1] for name in chosen],
        "response": f'"{text}"' if "quoted" in chosen else text,
    }
