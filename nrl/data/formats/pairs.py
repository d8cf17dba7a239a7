"""Formats of preferences: rows that have two answers or more, of which one is better."""

import re
from typing import Any

from nrl.data.checks import shown
from nrl.data.collating import shared
from nrl.data.formats.base import texts_of
from nrl.data.messages import before_answers, canonical_messages
from nrl.envs.contract import Task
from nrl.errors import DataError

__all__ = ["helpsteer3", "hh", "ultrafeedback"]


def helpsteer3(row: Task) -> Task | None:
    """Of HelpSteer3's preferences: the response that annotators preferred overall is the chosen one.

    Args:
        row: with ``context``, the messages so far, ``response1``, ``response2``, and ``overall_preference`` from -3
            (the first is much better) to 3 (the second is).

    Returns:
        None where the preference is 0.

    Raises:
        DataError: a field is missing or of another type.

    Source: Wang et al., 2025 (2505.11475); `nvidia/HelpSteer3`, configuration ``preference``, on the hub.

    >>> row = {"context": [{"role": "user", "content": "Hi"}], "response1": "Hello!", "response2": "No."}
    >>> helpsteer3(row | {"overall_preference": -2})["chosen"]
    'Hello!'
    """
    first, second = texts_of("helpsteer3", row, "response1", "response2")
    context = canonical_messages(row.get("context"), "helpsteer3: 'context'")
    preference = row.get("overall_preference")
    if isinstance(preference, bool) or not isinstance(preference, int) or not -3 <= preference <= 3:
        raise DataError(f"helpsteer3: 'overall_preference' is {shown(repr(preference))}; it must be from -3 to 3")
    if preference == 0:
        return None
    chosen, rejected = (first, second) if preference < 0 else (second, first)
    return {"prompt": context, "chosen": chosen, "rejected": rejected}


def ultrafeedback(row: Task) -> Task:
    """Of UltraFeedback, binarized: the prompt is the common beginning of the two conversations, the sides are the rest.

    Args:
        row: with ``chosen`` and ``rejected``, conversations.

    Raises:
        DataError: a side is missing or no conversation, or they share no message.

    Source: Cui et al., 2023 (2310.01377); `HuggingFaceH4/ultrafeedback_binarized` on the hub.

    >>> asked = {"role": "user", "content": "1+1="}
    >>> sides = [[asked, {"role": "assistant", "content": answer}] for answer in ("2", "11")]
    >>> ultrafeedback({"chosen": sides[0], "rejected": sides[1]})["rejected"]
    [{'role': 'assistant', 'content': '11'}]
    """
    return _pair("ultrafeedback", *(row.get(side) for side in ("chosen", "rejected")))


def hh(row: Task) -> Task:
    """Of Anthropic's HH: two dialogues as texts become messages; the prompt is their common beginning.

    Args:
        row: with ``chosen`` and ``rejected``, each ``"\\n\\nHuman: ...\\n\\nAssistant: ..."``, in any number of turns.

    Raises:
        DataError: a side is missing, is no such dialogue, or does not end with the assistant; or they share no message.

    Source: Bai et al., 2022 (2204.05862); `Anthropic/hh-rlhf` on the hub.

    >>> sides = [f"\\n\\nHuman: 1+1=\\n\\nAssistant: {answer}" for answer in ("2", "11")]
    >>> hh({"chosen": sides[0], "rejected": sides[1]})["rejected"]
    [{'role': 'assistant', 'content': '11'}]
    """
    names, sides = ("chosen", "rejected"), list[list[dict[str, str]]]()
    for name, text in zip(names, texts_of("hh", row, *names), strict=True):
        begin, *parts = re.split(r"(?:\A|\n\n)(Human|Assistant):", text)
        if begin.strip() or not parts:
            raise DataError(f"hh: '{name}' does not begin with '\\n\\nHuman:': {shown(repr(text))}")
        if parts[-2] != "Assistant":
            raise DataError(f"hh: '{name}' does not end with what the assistant says: {shown(repr(text[-50:]))}")
        roles = {"Human": "user", "Assistant": "assistant"}
        sides.append(
            [
                {"role": roles[speaker], "content": said.strip()}
                for speaker, said in zip(parts[::2], parts[1::2], strict=True)
            ]
        )
    return _pair("hh", *sides)


def _pair(format: str, chosen: Any, rejected: Any) -> Task:
    """Two conversations as their common beginning, up to an answer that may differ, and the rest of each."""
    good, bad = (
        canonical_messages(side, f"{format}: '{name}'") for name, side in (("chosen", chosen), ("rejected", rejected))
    )
    prompt = before_answers(good[: shared(good, bad)])
    if not prompt:
        raise DataError(f"{format}: 'chosen' and 'rejected' do not begin with the same message")
    return {"prompt": prompt, "chosen": good[len(prompt) :], "rejected": bad[len(prompt) :]}
