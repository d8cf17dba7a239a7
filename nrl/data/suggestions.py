"""Names of formats by the columns of rows, for errors that say how to read them."""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

__all__ = ["remedy_for", "suggested_format"]

_BY_COLUMNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("query", "answers", "tools"), "xlam"),
    (("question", "thinking_trajectories", "attempt"), "s1k"),
    (("instruction", "completions"), "ultrafeedback_completions"),
    (("context", "response1", "response2", "overall_preference"), "helpsteer3"),
    (("prompt", "response_0", "response_1"), "pku_saferlhf"),
    (("conversation_a", "conversation_b", "winner"), "arena"),
    (("prompt", "reward_model"), "verl"),
    (("conversations",), "sharegpt"),
    (("conversation",), "sharegpt"),
    (("system", "chat"), "glaive"),
    (("instruction", "output"), "alpaca"),
    (("instruction", "context", "response"), "dolly"),
    (("prompt", "completion"), "prompt_completion"),
    (("problem", "generated_solution", "expected_answer"), "openmathinstruct2"),
    (
        ("question", "generated_solution", "expected_answer"),
        "prompt=question,response=generated_solution,answer=expected_answer",
    ),
    (("context", "question", "answers"), "squad"),
    (("instruction", "response"), "prompt=instruction,response=response"),
    (("query", "response"), "prompt=query,response=response"),
    (("query", "answer"), "prompt=query,response=answer"),
    (("input", "output"), "prompt=input,response=output"),
    (("question", "response"), "prompt=question,response=response"),
    (("question", "solution"), "prompt=question,response=solution"),
    (("problem", "solution"), "prompt=problem,response=solution"),
    (("question", "chosen", "rejected"), "prompt=question,chosen=chosen,rejected=rejected"),
    (("input", "chosen", "rejected"), "prompt=input,chosen=chosen,rejected=rejected"),
    (("instruction", "chosen", "rejected"), "prompt=instruction,chosen=chosen,rejected=rejected"),
    (("Question", "Complex_CoT", "Response"), "prompt=Question,reasoning=Complex_CoT,response=Response"),
)


def suggested_format(row: Mapping[str, Any]) -> str:
    """Return the format that reads a row with such columns; empty: none is known.

    >>> suggested_format({"conversations": [], "id": 7}), suggested_format({"a": 1})
    ('sharegpt', '')
    """
    present = {name for name, value in row.items() if value is not None}
    if isinstance(row.get("chosen"), str) and row["chosen"].lstrip().startswith("Human:"):
        return "hh"
    if isinstance(row.get("text"), str) and row["text"].lstrip().startswith("### Human:"):
        return "guanaco"
    if {"question", "answer"} <= present and isinstance(row["answer"], str):
        return "gsm8k" if "####" in row["answer"] else "prompt=question,response=answer"
    for names, format in _BY_COLUMNS:
        if present >= {*names}:
            return "exchanges" if format == "sharegpt" and _are_exchanges(row[names[0]]) else format
    return ""


def _are_exchanges(conversation: Any) -> bool:
    if isinstance(conversation, str):
        with suppress(ValueError, RecursionError):
            conversation = json.loads(conversation)
    first = conversation[0] if isinstance(conversation, list | tuple) and conversation else {"role": ""}
    return isinstance(first, str) or (isinstance(first, Mapping) and not {"role", "from"} & {*first})


def remedy_for(row: Mapping[str, Any], otherwise: str) -> str:
    """Return how an error tells to read a row: by the format that is known for its columns.

    Args:
        row: as it was found.
        otherwise: the remedy where no format is known.

    >>> remedy_for({"conversations": []}, "Rename the field.")
    "Read such rows with format='sharegpt'."
    """
    format = suggested_format(row)
    return f"Read such rows with format='{format}'." if format else otherwise
