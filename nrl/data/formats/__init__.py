"""Formats: from the rows of well-known datasets to rows with a prompt and an answer to it.

A format is a function of one row. It returns a row, a list of rows, or None to leave the row out. The rows that it
returns have ``prompt`` or ``messages``; and ``answer`` for verifiers, ``response`` for `supervised`, or ``chosen`` and
``rejected`` for `preferences`.
"""

from collections.abc import Mapping

from nrl.data.formats.base import Format, FormatName
from nrl.data.formats.column_names import columns, columns_of_text
from nrl.data.formats.conversation_rows import dialogue, exchanges, sharegpt, turns
from nrl.data.formats.preference_rows import (
    arena,
    helpsteer3,
    hh,
    pku_saferlhf,
    ultrafeedback,
    ultrafeedback_completions,
)
from nrl.data.formats.single_answers import alpaca, gsm8k, openmathinstruct2, prompt_completion, s1k, squad, verl
from nrl.data.formats.tool_call_rows import xlam
from nrl.envs.types import Task
from nrl.errors import DataError

__all__ = [
    "FORMATS",
    "Format",
    "FormatName",
    "alpaca",
    "arena",
    "columns",
    "dialogue",
    "exchanges",
    "format_of",
    "gsm8k",
    "helpsteer3",
    "hh",
    "openmathinstruct2",
    "pku_saferlhf",
    "prompt_completion",
    "s1k",
    "sharegpt",
    "squad",
    "turns",
    "ultrafeedback",
    "ultrafeedback_completions",
    "verl",
    "xlam",
]

FORMATS: Mapping[str, Format] = {
    "gsm8k": gsm8k,
    "helpsteer3": helpsteer3,
    "openmathinstruct2": openmathinstruct2,
    "squad": squad,
    "turns": turns,
    "ultrafeedback": ultrafeedback,
    "alpaca": alpaca,
    "arena": arena,
    "capybara": exchanges,
    "dialogue": dialogue,
    "dolly": columns(prompt=["instruction", "context"], response="response"),
    "exchanges": exchanges,
    "glaive": dialogue,
    "guanaco": dialogue,
    "hh": hh,
    "medical_o1": columns(prompt="Question", reasoning="Complex_CoT", response="Response"),
    "metamath": columns(prompt="query", response="response"),
    "nemotron": columns(system="system_prompt", prompt="input", response="output"),
    "numina": columns(prompt="problem", response="solution"),
    "openorca": columns(system="system_prompt", prompt="question", response="response"),
    "orca_dpo_pairs": columns(system="system", prompt="question", chosen="chosen", rejected="rejected"),
    "pku_saferlhf": pku_saferlhf,
    "prompt_completion": prompt_completion,
    "s1k": s1k,
    "sharegpt": sharegpt,
    "ultrafeedback_completions": ultrafeedback_completions,
    "verl": verl,
    "xlam": xlam,
}
"""The formats that a configuration can name."""


def format_of(name: FormatName) -> Format:
    """Return the format of a name in `FORMATS`, or of the names of columns; of several, one after the other.

    Args:
        name: such as ``"alpaca"``; ``"sharegpt+turns"``, one after the other; or, as `columns` takes them,
            ``"prompt=question,response=solution"`` or ``{"prompt": "question", "response": "solution"}``.

    Raises:
        DataError: there is no format of this name, or no field for a column.

    >>> said = [{"from": "human", "value": "1+1="}, {"from": "gpt", "value": "2"}]
    >>> format_of("sharegpt+turns")({"conversations": said})[0]["prompt"]
    [{'from': 'human', 'value': '1+1='}]
    """
    if isinstance(name, Mapping):
        return columns(**name)
    names = name.split("+")
    for each in names:
        if each not in FORMATS and "=" not in each:
            known = ", ".join(FORMATS)
            raise DataError(
                f"tasks: there is no format '{each}'; there are {known}, or give columns, such as "
                "'prompt=question,response=solution', or give a function"
            )
    formats = [columns_of_text(part) if "=" in part else FORMATS[part] for part in names]
    if len(formats) == 1:
        return formats[0]

    def chained(row: Task) -> list[Task]:
        tasks = [row]
        for format in formats:
            made = [format(task) for task in tasks]
            tasks = [task for one in made for task in ([one] if isinstance(one, Mapping) else one or ())]
        return tasks

    chained.__name__ = name
    return chained
