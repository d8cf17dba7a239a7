"""Formats of preferences: rows that have two answers or more, of which one is better."""

import re
from collections.abc import Mapping
from typing import Any

from nrl.data.checks import shown
from nrl.data.collating import shared
from nrl.data.formats.base import texts_of
from nrl.data.messages import before_answers, canonical_messages
from nrl.envs.types import Task
from nrl.errors import DataError

__all__ = ["arena", "helpsteer3", "hh", "pku_saferlhf", "ultrafeedback", "ultrafeedback_completions"]


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


def ultrafeedback_completions(row: Task) -> Task | None:
    """Of UltraFeedback as it was annotated: the completion of the highest score is chosen, that of the lowest rejected.

    Args:
        row: with ``instruction`` and ``completions``, each with a ``response`` and an ``overall_score``.

    Returns:
        Its other fields but ``completions``, ``prompt``, ``chosen`` and ``rejected``; None where all scores are equal.

    Raises:
        DataError: a field is missing or of another type.

    Source: Cui et al., 2023 (2310.01377); `openbmb/UltraFeedback` on the hub.

    >>> completions = [{"response": "2", "overall_score": 9.0}, {"response": "11", "overall_score": 1.5}]
    >>> ultrafeedback_completions({"instruction": "1+1=", "completions": completions})["rejected"]
    '11'
    """
    (instruction,) = texts_of("ultrafeedback_completions", row, "instruction")
    completions = row.get("completions")
    if not isinstance(completions, list | tuple) or not all(isinstance(each, Mapping) for each in completions):
        raise DataError(
            f"ultrafeedback_completions: 'completions' is {shown(repr(completions))}; give a list of objects"
        )
    scored = list[tuple[float, str]]()
    for number, completion in enumerate(completions):
        (response,) = texts_of(f"ultrafeedback_completions: completion {number}", completion, "response")
        score = completion.get("overall_score")
        if isinstance(score, bool) or not isinstance(score, int | float):
            raise DataError(
                f"ultrafeedback_completions: completion {number} has the 'overall_score' {shown(repr(score))}; give a "
                "number"
            )
        scored.append((float(score), response))
    best, worst = (pick(scored, key=lambda pair: pair[0], default=(0.0, "")) for pick in (max, min))
    if best[0] == worst[0]:
        return None
    others = {name: value for name, value in row.items() if name not in ("instruction", "completions")}
    return {**others, "prompt": instruction, "chosen": best[1], "rejected": worst[1]}


def pku_saferlhf(row: Task) -> Task:
    """Of PKU-SafeRLHF: the better of two responses is the chosen one.

    Args:
        row: with ``prompt``, ``response_0``, ``response_1``, and ``better_response_id``, 0 or 1.

    Returns:
        Its other fields, ``chosen`` and ``rejected``.

    Raises:
        DataError: a field is missing or of another type.

    Source: Ji et al., 2024 (2406.15513); `PKU-Alignment/PKU-SafeRLHF` on the hub.

    >>> row = {"prompt": "1+1=", "response_0": "11", "response_1": "2", "better_response_id": 1}
    >>> pku_saferlhf(row)["chosen"]
    '2'
    """
    prompt, *responses = texts_of("pku_saferlhf", row, "prompt", "response_0", "response_1")
    better = row.get("better_response_id")
    if better not in (0, 1):
        raise DataError(f"pku_saferlhf: 'better_response_id' is {shown(repr(better))}; it must be 0 or 1")
    others = {name: value for name, value in row.items() if name not in ("response_0", "response_1")}
    return {**others, "prompt": prompt, "chosen": responses[better], "rejected": responses[1 - better]}


def arena(row: Task) -> Task | None:
    """Of Chatbot Arena: the conversation with the winner is the chosen one; the prompt is their common beginning.

    Args:
        row: with ``conversation_a``, ``conversation_b`` and ``winner``: ``"model_a"``, ``"model_b"`` or a tie.

    Returns:
        ``prompt``, ``chosen`` and ``rejected``; None where there is a tie.

    Raises:
        DataError: a field is missing or of another type, or the conversations share no message.

    Source: Zheng et al., 2023 (2306.05685); `lmsys/chatbot_arena_conversations` on the hub.

    >>> asked = {"role": "user", "content": "1+1="}
    >>> sides = [[asked, {"role": "assistant", "content": answer}] for answer in ("2", "11")]
    >>> arena({"conversation_a": sides[0], "conversation_b": sides[1], "winner": "model_b"})["rejected"]
    [{'role': 'assistant', 'content': '2'}]
    """
    (winner,) = texts_of("arena", row, "winner")
    if not winner.startswith(("model_", "tie")):
        raise DataError(f"arena: 'winner' is {shown(repr(winner))}; it must be 'model_a', 'model_b' or a tie")
    sides = [row.get(name) for name in ("conversation_a", "conversation_b")]
    if winner.startswith("tie"):
        return None
    return _pair("arena", *(sides if winner == "model_a" else sides[::-1]))
