"""Formats: from the rows of well-known datasets to rows with a prompt and an answer to it.

A format is a function of one row. It returns a row, a list of rows, or None to leave the row out. The rows that it
returns have ``prompt`` or ``messages``; and ``answer`` for verifiers, ``response`` for `supervised`, or ``chosen`` and
``rejected`` for `preferences`.
"""

from collections.abc import Mapping

from nrl.data.formats.base import Format
from nrl.data.formats.conversations import sharegpt, turns
from nrl.data.formats.pairs import helpsteer3, hh, ultrafeedback
from nrl.data.formats.single_answers import alpaca, gsm8k, openmathinstruct2, prompt_completion, squad, verl
from nrl.envs.contract import Task
from nrl.errors import DataError

__all__ = [
    "FORMATS",
    "Format",
    "alpaca",
    "format_of",
    "gsm8k",
    "helpsteer3",
    "hh",
    "openmathinstruct2",
    "prompt_completion",
    "sharegpt",
    "squad",
    "turns",
    "ultrafeedback",
    "verl",
]

FORMATS: Mapping[str, Format] = {
    "gsm8k": gsm8k,
    "helpsteer3": helpsteer3,
    "openmathinstruct2": openmathinstruct2,
    "squad": squad,
    "turns": turns,
    "ultrafeedback": ultrafeedback,
    "alpaca": alpaca,
    "hh": hh,
    "prompt_completion": prompt_completion,
    "sharegpt": sharegpt,
    "verl": verl,
}
"""The formats that a configuration can name."""


def format_of(name: str) -> Format:
    """Return the format of a name in `FORMATS`; of several with ``+`` between, one after the other.

    Args:
        name: such as ``"sharegpt+turns"``.

    Raises:
        DataError: there is no format of this name.

    >>> said = [{"from": "human", "value": "1+1="}, {"from": "gpt", "value": "2"}]
    >>> format_of("sharegpt+turns")({"conversations": said})[0]["prompt"]
    [{'from': 'human', 'value': '1+1='}]
    """
    names = name.split("+")
    for each in names:
        if each not in FORMATS:
            raise DataError(f"tasks: there is no format '{each}'; there are {', '.join(FORMATS)}, or give a function")
    if len(names) == 1:
        return FORMATS[name]

    def chained(row: Task) -> list[Task]:
        found = [row]
        for each in names:
            made = [FORMATS[each](task) for task in found]
            found = [task for one in made for task in ([one] if isinstance(one, Mapping) else one or ())]
        return found

    chained.__name__ = name
    return chained
