"""Rows of ``rollouts.jsonl`` as a report shows them: conversations turn by turn, as values for the template.

A log may be of another version, or have been edited: what is not as it should be is left out.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from nrl.runs.charts import measured, number

__all__ = ["peak", "sample"]

_EPISODES = 4  # of a step's samples, at most
_ROWS = (3, 1)  # of an episode that forked, from its beginning and its end
_TOKENS, _CHARACTERS = (1500, 500), (3000, 1000)  # of a row and of a text, likewise
_SHORT = (400, 100)  # characters of a call, likewise
_CALLS = 50  # of a turn, and messages of a part, at most


def sample(record: Mapping[str, Any]) -> dict[str, Any]:
    """A step's rows, those of one episode together.

    Args:
        record: a line of ``rollouts.jsonl``, masked.

    Returns:
        ``step``, and ``episodes``, each with the rows that are shown and the number of those that are not.

    >>> found = sample({"step": 3, "rows": [{"row": 0, "prompt": "1+1=", "tokens": ["2"], "reward": 1.0}]})
    >>> (episode,) = found["episodes"]
    >>> [part["role"] for part in episode["rows"][0]["parts"]]
    ['prompt', 'policy']
    """
    rows = [row for row in record["rows"] if isinstance(row, dict)]
    episodes: list[list[dict[str, Any]]] = []
    for row in rows:
        before = episodes[-1][0] if episodes else {}
        if _forked(row) and _forked(before) and row.get("episode") == before.get("episode"):
            episodes[-1].append(row)
        else:
            episodes.append([row])
    shown = []
    for some in episodes[:_EPISODES]:
        first, left_out, last = _ends(some, *_ROWS)
        shown.append({"rows": [_row(row) for row in [*first, *last]], "left_out": left_out})
    return {"step": number(measured(record.get("step")), 9), "episodes": shown}


def peak(sample: Mapping[str, Any]) -> float:
    """The largest size of an advantage in a sample; 0, if there is none."""
    parts = [part for episode in sample["episodes"] for row in episode["rows"] for part in row["parts"]]
    tokens = [token for part in parts for some in part.get("tokens", ((), 0, ()))[::2] for token in some]
    return max((abs(token["advantage"]) for token in tokens if math.isfinite(token["advantage"])), default=0.0)


def _forked(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("fork"), int) and isinstance(row.get("forks"), int) and row["forks"] > 0


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row's facts and its parts; of a long one the beginning and the end."""
    status = row.get("status")
    flags = {
        "truncated": row.get("truncated") is True,
        "cut": row.get("cut") is True,
        "invalid": row.get("valid") is False,
        str(status): isinstance(status, str) and status != "ok",
    }
    known = {name: _named(row.get(name)) for name in ("components", "env")}
    return {
        "facts": [(key, _brief(row[key])) for key in ("reward", "group", "row", "version") if key in row],
        "more": [(name, some) for name, some in known.items() if some],
        "flags": [flag for flag, raised in flags.items() if raised],
        "fork": _fork(row) if _forked(row) else None,
        "parts": _parts(row),
    }


def _fork(row: Mapping[str, Any]) -> dict[str, Any]:
    """Which row of an episode that forked this is."""
    names = ("episode", "fork", "forks", "shared")
    why = row["why"] if isinstance(row.get("why"), str) else ""
    return {name: number(measured(row.get(name)), 9) for name in names} | {"first": row["fork"] == 0, "why": why}


def _parts(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Who wrote what; the tokens in the middle of a long row are left out, and what lies between them."""
    texts, mask, advantages, logprobs = (
        row[key] if isinstance(row.get(key), list) else []
        for key in ("tokens", "loss_mask", "advantages", "rollout_logprobs")
    )
    prompt, known = str(row.get("prompt", "")), _whole(row.get("parts"), len(texts))
    given: list[dict[str, Any]] = [{"role": "prompt"}, {"role": "policy", "tokens": [0, len(texts)]}]
    given = row["parts"] if known else given
    behind, from_end = sum(_TOKENS), len(texts) - _TOKENS[1]

    def token(place: int) -> dict[str, Any]:
        return {
            "text": str(texts[place]),
            "trained": place >= len(mask) or bool(mask[place]),
            "other": "not trained on" if known else "not sampled",
            "advantage": measured(advantages[place]) if place < len(advantages) else math.nan,
            "logprob": measured(logprobs[place]) if place < len(logprobs) else math.nan,
        }

    start = next((part["tokens"][0] for part in given if part["role"] != "prompt"), 0)
    parts, turn = list[dict[str, Any]](), 0
    turns = sum(part["role"] == "policy" for part in given)
    for part in given:
        if part["role"] == "prompt":
            parts.append(_text("prompt", prompt, part.get("messages")))
            continue
        turn += part["role"] == "policy"
        first, stop = (place - start for place in part["tokens"])
        cut = stop if len(texts) <= behind else min(max(first, _TOKENS[0]), stop)
        again = stop if len(texts) <= behind else max(min(stop, from_end), cut)
        if cut == first and again == stop > first:  # all of it is in the middle
            if parts[-1]["role"] != "gap":
                parts.append({"role": "gap", "left_out": 0})
            parts[-1]["left_out"] += stop - first
        elif part["role"] == "environment":
            parts.append(_text("environment", "".join(map(str, texts[first:stop])), part.get("messages")))
        else:
            tokens = [token(place) for place in range(first, cut)], again - cut, [token(i) for i in range(again, stop)]
            parts.append(_turn(part, turn if turns > 1 else 0) | {"tokens": tokens})
            if turns == 1 and not _forked(row):
                parts[-1] |= {"reward": "", "components": []}  # the row's own say it
    return parts


def _whole(parts: Any, tokens: int) -> bool:
    """Whether parts have all tokens of a row, each one once and in order."""
    if not isinstance(parts, list) or not parts:
        return False
    places: list[Any] = [part.get("tokens") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(each, list) and len(each) == 2 and all(type(at) is int for at in each) for each in places):
        return False
    roles, at = [str(part.get("role")) for part in parts], places[0][0]
    if not {*roles[:1]} <= {"prompt", "policy"} or not {*roles[1:]} <= {"policy", "environment"}:
        return False
    for first, stop in places:
        if first != at or stop < first:
            return False
        at = stop
    return bool(at - (places[0][1] if roles[0] == "prompt" else places[0][0]) == tokens)


def _text(role: str, text: str, messages: Any) -> dict[str, Any]:
    """A part that the policy did not write: its messages, or its text."""
    known = [
        (each["role"], _ends(each["content"], *_CHARACTERS))
        for each in (messages if isinstance(messages, list) else ())
        if isinstance(each, dict) and isinstance(each.get("role"), str) and isinstance(each.get("content"), str)
    ]
    first, left_out, last = _ends(known, _CALLS - 10, 10)
    return {"role": role, "text": _ends(text, *_CHARACTERS), "messages": (first, left_out, last)}


def _turn(part: Mapping[str, Any], turn: int) -> dict[str, Any]:
    """What there is to say about a turn of the policy beside its tokens."""
    calls = [
        (str(each["name"]), _ends(", ".join(_argument(*pair) for pair in each["arguments"].items()), *_SHORT))
        for each in _mappings(part.get("calls"))
        if isinstance(each.get("arguments"), dict) and "name" in each
    ]
    malformed = [
        (_ends(str(each.get("text", "")), *_SHORT), str(each.get("reason", "")))
        for each in _mappings(part.get("malformed"))
    ]
    return {
        "role": "policy",
        "turn": turn,
        "reward": _brief(part["reward"]) if "reward" in part else "",
        "components": _named(part.get("components")),
        "reasoning": len(part["reasoning"]) if isinstance(part.get("reasoning"), str) else 0,
        "calls": calls[:_CALLS],
        "malformed": malformed[:_CALLS],
    }


def _named(values: Any) -> list[tuple[str, str]]:
    """Numbers by name; those that are None are not there."""
    own = values if isinstance(values, dict) else {}
    return [(str(key), _brief(value)) for key, value in own.items() if value is not None]


def _mappings(values: Any) -> list[Any]:
    return [each for each in values if isinstance(each, dict)] if isinstance(values, list) else []


def _argument(name: str, value: Any) -> str:
    return f"{name}={json.dumps(value, ensure_ascii=False)}"


def _brief(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_brief, value[:8])) + (" …" if len(value) > 8 else "")
    if isinstance(value, int | float):
        return number(measured(value), 9)
    return "undefined" if value is None else str(value)


def _ends[T: Sequence[Any]](items: T, first: int, last: int) -> tuple[Any, int, Any]:
    """The beginning, the number left out, and the end."""
    if len(items) <= first + last:
        return items, 0, items[:0]
    return items[:first], len(items) - first - last, items[-last:]
