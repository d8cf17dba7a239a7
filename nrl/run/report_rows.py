"""Rows of ``rollouts.jsonl`` and answers of an evaluation as a report shows them, turn by turn, as values of JSON.

A log may be of another version, or have been edited: what is not as it should be is left out.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from nrl.log import redacted
from nrl.run.charts import number, precise, to_float

__all__ = ["answer_row", "episode", "episodes", "mask_secrets", "peak", "text_part"]

_NUMBERS = ("loss_mask", "advantages", "rollout_logprobs")  # columns of each token
_ROWS = (3, 1)  # rows of a forked episode, at its beginning and end
_TOKENS, _CHARACTERS = (1500, 500), (3000, 1000)  # tokens of a row and characters of a text, likewise
_SHORT = (400, 100)  # characters of a call, likewise
_CALLS = 50  # calls of a turn, and messages of a part, at most


def episodes(rows: Any) -> list[list[dict[str, Any]]]:
    """Split the rows of a line of ``rollouts.jsonl`` into episodes; what a report does not show is left out.

    >>> [len(rows) for rows in episodes([{"row": 0}, {"row": 1, "episode": 5}, None])]
    [1, 1]
    """
    split: list[list[dict[str, Any]]] = []
    for row in _mappings(rows):
        before = split[-1][0] if split else {}
        if isinstance(row.get("parts"), list):
            row = row | {"parts": [_without_texts(part) for part in row["parts"]]}
        if _is_fork(row) and _is_fork(before) and row.get("episode") == before.get("episode"):
            split[-1].append(row)
        else:
            split.append([row])
    return split


def episode(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return an episode as a report shows it.

    Args:
        rows: its rows, masked.

    Returns:
        The ``rows`` that are shown and how many are ``left_out``; and the ``group``, ``source``, ``reward`` and
        ``flags`` to filter by.

    >>> found = episode([{"row": 0, "prompt": "1+1=", "tokens": ["2"], "reward": 1.0}])
    >>> [part["role"] for part in found["rows"][0]["parts"]], found["reward"]
    (['prompt', 'policy'], 1.0)
    """
    head, left_out, last = _ends(rows, *_ROWS)
    first = rows[0]
    rewards = first.get("reward")
    numbers = [to_float(reward) for reward in (rewards if isinstance(rewards, list) else [rewards])]
    total = math.fsum(value for value in numbers if math.isfinite(value))
    return {
        "rows": [_row(row) for row in [*head, *last]],
        "left_out": left_out,
        "group": _brief(first["group"]) if "group" in first else "",
        "source": _brief(first["source"]) if "source" in first else "",
        "reward": total if any(map(math.isfinite, numbers)) else None,
        "flags": list(dict.fromkeys(flag for row in rows for flag in _flags(row))),
    }


def peak(rows: Sequence[Mapping[str, Any]]) -> float:
    """The largest size of an advantage in some rows; 0, if there is none."""
    runs = [run for row in rows for part in row["parts"] for run in part.get("tokens", ())[::2]]
    columns = [run["advantages"] if isinstance(run["advantages"], list) else [run["advantages"]] for run in runs]
    return max((abs(advantage) for column in columns for advantage in column if advantage is not None), default=0.0)


def answer_row(text: str, conversation: Any, facts: Sequence[tuple[str, Any]], flags: Sequence[str]) -> dict[str, Any]:
    """Return an answer of an evaluation as a row: its conversation, or else its text alone.

    >>> row = answer_row("2", None, [("reward", 1.0)], ["right"])
    >>> row["facts"], row["parts"][0]["text"][0]
    ([('reward', '1')], '2')
    """
    parts = [part for part in _mappings(conversation) if part.get("role") in ("prompt", "policy", "environment")]
    turns, turn = sum(part["role"] == "policy" for part in parts), 0
    shown = list[dict[str, Any]]()
    for part in parts or [{"role": "policy", "text": text}]:
        turn += part["role"] == "policy"
        if part["role"] == "policy":
            ends = _ends(str(part.get("text", "")), *_CHARACTERS)
            shown.append(_turn(part, turn if turns > 1 else 0) | {"text": ends})
        else:
            shown.append(text_part(part["role"], str(part.get("text", "")), part.get("messages")))
    shown_facts = [(name, _brief(value)) for name, value in facts]
    return {"facts": shown_facts, "more": [], "flags": list(flags), "fork": None, "parts": shown}


def mask_secrets(episodes: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[dict[str, Any]]]:
    """Mask secrets in the texts of episodes. Lists of numbers have none, and most of a log is numbers."""
    texts = [[{key: row[key] for key in row if key not in _NUMBERS} for row in rows] for rows in episodes]
    return [
        [text | {key: row[key] for key in _NUMBERS if key in row} for text, row in zip(*pair, strict=True)]
        for pair in zip(redacted(texts), episodes, strict=True)
    ]


def _without_texts(part: Any) -> Any:
    """A part without its texts: those of the tokens are shown."""
    unused = ("text", "content")
    return {key: value for key, value in part.items() if key not in unused} if isinstance(part, dict) else part


def _is_fork(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("fork"), int) and isinstance(row.get("forks"), int) and row["forks"] > 0


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row's facts and its parts; of a long one the beginning and the end."""
    number_groups = {name: _format_numbers(row.get(name)) for name in ("components", "env")}
    facts = [(key, _brief(row[key])) for key in ("reward", "source", "group", "row", "version") if key in row]
    return {
        "facts": facts,
        "more": [(name, numbers) for name, numbers in number_groups.items() if numbers],
        "flags": _flags(row),
        "fork": _fork(row) if _is_fork(row) else None,
        "parts": _parts(row),
    }


def _flags(row: Mapping[str, Any]) -> list[str]:
    """Return the flags of a row: status, and whether it is truncated, cut or invalid."""
    status = row.get("status")
    flags = {
        "truncated": row.get("truncated") is True,
        "cut": row.get("cut") is True,
        "invalid": row.get("valid") is False,
        str(status): isinstance(status, str) and status != "ok",
    }
    return [flag for flag, raised in flags.items() if raised]


def _fork(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the position of a row within a forked episode."""
    names = ("episode", "fork", "forks", "shared")
    reason = row["why"] if isinstance(row.get("why"), str) else ""
    return {name: precise(to_float(row.get(name)), 9) for name in names} | {"first": row["fork"] == 0, "why": reason}


def _parts(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a row by author, without the middle of a long row."""
    texts, mask, advantages, logprobs = (
        row[key] if isinstance(row.get(key), list) else [] for key in ("tokens", *_NUMBERS)
    )
    prompt, are_complete = str(row.get("prompt", "")), _are_complete(row.get("parts"), len(texts))
    row_parts: list[dict[str, Any]] = [{"role": "prompt"}, {"role": "policy", "tokens": [0, len(texts)]}]
    row_parts = row["parts"] if are_complete else row_parts
    behind, from_end = sum(_TOKENS), len(texts) - _TOKENS[1]

    def run(first: int, stop: int) -> dict[str, Any]:
        trained = [int(bool(value)) for value in mask[first:stop]]
        return {
            "texts": [str(text) for text in texts[first:stop]],
            "trained": _column(trained + [1] * (stop - first - len(trained))),
            "advantages": _numbers(advantages, first, stop),
            "logprobs": _numbers(logprobs, first, stop),
        }

    start = next((part["tokens"][0] for part in row_parts if part["role"] != "prompt"), 0)
    parts, turn = list[dict[str, Any]](), 0
    turns = sum(part["role"] == "policy" for part in row_parts)
    for part in row_parts:
        if part["role"] == "prompt":
            parts.append(text_part("prompt", prompt, part.get("messages")))
            continue
        turn += part["role"] == "policy"
        first, stop = (position - start for position in part["tokens"])
        cut = stop if len(texts) <= behind else min(max(first, _TOKENS[0]), stop)
        again = stop if len(texts) <= behind else max(min(stop, from_end), cut)
        if cut == first and again == stop > first:  # all of it is in the middle
            if parts[-1]["role"] != "gap":
                parts.append({"role": "gap", "left_out": 0})
            parts[-1]["left_out"] += stop - first
        elif part["role"] == "environment":
            parts.append(text_part("environment", "".join(map(str, texts[first:stop])), part.get("messages")))
        else:
            tokens = run(first, cut), again - cut, run(again, stop)
            other = "not trained on" if are_complete else "not sampled"
            parts.append(_turn(part, turn if turns > 1 else 0) | {"tokens": tokens, "other": other})
            if turns == 1 and not _is_fork(row):
                parts[-1] |= {"reward": "", "components": []}  # the row's own say it
    return parts


def _column(values: list[Any]) -> Any:
    """Values of all tokens; a single value where they are all the same, which makes pages much smaller."""
    return values[0] if values and values.count(values[0]) == len(values) else values


def _numbers(values: Sequence[Any], first: int, stop: int) -> Any:
    """A column of numbers in as many digits as are shown; None for what is no number."""
    selected = list(values[first:stop])
    if selected and selected.count(selected[0]) == stop - first:
        return _round(selected[0])  # Most samples have equal advantages.
    return _column([*map(_round, selected), *[None] * (stop - first - len(selected))])


def _round(value: Any) -> float | None:
    number = to_float(value)
    return float(f"{number:.5g}") if math.isfinite(number) else None


def _are_complete(parts: Any, tokens: int) -> bool:
    """Return whether parts have all tokens of a row, each one once and in order."""
    if not isinstance(parts, list) or not parts:
        return False
    places: list[Any] = [part.get("tokens") if isinstance(part, dict) else None for part in parts]
    if not all(
        isinstance(span, list) and len(span) == 2 and all(type(position) is int for position in span) for span in places
    ):
        return False
    roles, position = [str(part.get("role")) for part in parts], places[0][0]
    if not {*roles[:1]} <= {"prompt", "policy"} or not {*roles[1:]} <= {"policy", "environment"}:
        return False
    for first, stop in places:
        if first != position or stop < first:
            return False
        position = stop
    return bool(position - (places[0][1] if roles[0] == "prompt" else places[0][0]) == tokens)


def text_part(role: str, text: str, messages: Any = None) -> dict[str, Any]:
    """Return a part that the policy did not write: its messages, or its text."""
    shown_messages = [
        (message["role"], _ends(message["content"], *_CHARACTERS))
        for message in (messages if isinstance(messages, list) else ())
        if isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
    ]
    first, left_out, last = _ends(shown_messages, _CALLS - 10, 10)
    return {"role": role, "text": _ends(text, *_CHARACTERS), "messages": (first, left_out, last)}


def _turn(part: Mapping[str, Any], turn: int) -> dict[str, Any]:
    """Return the facts of a turn of the policy, without its tokens."""
    calls = [
        (str(call["name"]), _ends(", ".join(_argument(*pair) for pair in call["arguments"].items()), *_SHORT))
        for call in _mappings(part.get("calls"))
        if isinstance(call.get("arguments"), dict) and "name" in call
    ]
    malformed = [
        (_ends(str(call.get("text", "")), *_SHORT), str(call.get("reason", "")))
        for call in _mappings(part.get("malformed"))
    ]
    return {
        "role": "policy",
        "turn": turn,
        "reward": _brief(part["reward"]) if "reward" in part else "",
        "components": _format_numbers(part.get("components")),
        "reasoning": len(part["reasoning"]) if isinstance(part.get("reasoning"), str) else 0,
        "calls": calls[:_CALLS],
        "malformed": malformed[:_CALLS],
    }


def _format_numbers(values: Any) -> list[tuple[str, str]]:
    """Numbers by name; those that are None are not there."""
    numbers = values if isinstance(values, dict) else {}
    return [(str(key), _brief(value)) for key, value in numbers.items() if value is not None]


def _mappings(values: Any) -> list[Any]:
    return [item for item in values if isinstance(item, dict)] if isinstance(values, list) else []


def _argument(name: str, value: Any) -> str:
    return f"{name}={json.dumps(value, ensure_ascii=False)}"


def _brief(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_brief, value[:8])) + (" …" if len(value) > 8 else "")
    if isinstance(value, int):
        return precise(to_float(value), 9)
    if isinstance(value, float):
        return number(value)
    return "undefined" if value is None else str(value)


def _ends[T: Sequence[Any]](items: T, first: int, last: int) -> tuple[Any, int, Any]:
    """The beginning, the number left out, and the end."""
    if len(items) <= first + last:
        return items, 0, items[:0]
    return items[:first], len(items) - first - last, items[-last:]
