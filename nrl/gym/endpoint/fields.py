"""Fields of requests and the budget of each, so that no request fills the memory or stalls what answers it."""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "MESSAGES",
    "Unusable",
    "check_length",
    "check_number",
    "check_wishes",
    "flag_of",
    "sampling_of",
    "shown",
    "text_of",
]

MESSAGES = 10_000
"""Messages, or items, of a request."""
_STOPS = 16  # OpenAI allows 4
_STOP_LENGTH = 1000  # characters of each
_NAME_LENGTH = 256  # characters of a name
_BIASES = 1024
_COLDEST = 1e-3  # the least temperature but 0: logits that are divided by less are no numbers any more
_LEAST_MASS = 1e-6  # of top_p
_RANGES: Mapping[str, tuple[Any, float, float]] = {
    "temperature": (int | float, 0, 100),
    "top_p": (int | float, 0, 1),
    "top_k": (int, -1, 2**31 - 1),
    "seed": (int, -(2**63), 2**63 - 1),
    "max_new_tokens": (int, 1, 2**31 - 1),
    "n": (int, 1, 128),
    # What no sampler here meets is checked all the same: a client hears of its mistake
    "frequency_penalty": (int | float, -2, 2),
    "presence_penalty": (int | float, -2, 2),
    "min_p": (int | float, 0, 1),
    "repetition_penalty": (int | float, 0, 100),
    "top_logprobs": (int, 0, 20),
}
_SHOWN = reprlib.Repr(maxlevel=2, maxlist=4, maxdict=4, maxstring=60, maxlong=40, maxother=60)


class Unusable(ValueError):
    """A request that no model can answer.

    Args:
        message: what was found, and what to do.
        code: as OpenAI names it, such as ``"context_length_exceeded"``.
        status: of HTTP.
        param: the name of the field that is wrong.
    """

    def __init__(self, message: str, code: str | None = None, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.status, self.param = code, status, param


def shown(value: Any) -> str:
    """Return a value as an error quotes it, short however large it is.

    >>> len(shown("a" * 1000)) < 100
    True
    """
    return _SHOWN.repr(value)


def check_number(name: str, value: Any, field: str = "") -> None:
    """Refuse what is no number of its range.

    Args:
        name: of the range.
        value: as the request has it.
        field: of the request, where that has another name.

    Raises:
        Unusable: it is none.

    >>> check_number("temperature", 1e-300)
    Traceback (most recent call last):
    nrl.gym.endpoint.fields.Unusable: temperature is 1e-300; give 0, or a number from 0.001 to 100
    """
    kind, least, most = _RANGES[name]
    field = field or name
    if isinstance(value, bool) or not isinstance(value, kind) or not least <= value <= most:
        of = "a whole number" if kind is int else "a number"
        raise Unusable(f"{field} is {shown(value)}; give {of} from {least} to {most}", param=field)
    if name == "temperature" and 0 < value < _COLDEST:
        raise Unusable(f"{field} is {value}; give 0, or a number from {_COLDEST} to {most}", param=field)
    if name == "top_p" and value < _LEAST_MASS:
        raise Unusable(f"{field} is {value}; give a number from {_LEAST_MASS} to {most}", param=field)


def flag_of(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Return a field that is true or false.

    Raises:
        Unusable: it is something else.

    >>> flag_of({"stream": True}, "stream")
    True
    """
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise Unusable(f"{name} is {shown(value)}; give true or false", param=name)
    return default if value is None else value


def text_of(body: Mapping[str, Any], name: str) -> str:
    """Return a field that is a name; empty: there is none.

    Raises:
        Unusable: it is something else, or too long.

    >>> text_of({"model": "policy"}, "model")
    'policy'
    """
    value = body.get(name)
    if value is not None and (not isinstance(value, str) or len(value) > _NAME_LENGTH):
        raise Unusable(f"{name} is {shown(value)}; give a text of at most {_NAME_LENGTH} characters", param=name)
    return value or ""


def check_length(name: str, value: Any, most: int) -> None:
    """Refuse a list with more parts than its budget.

    Raises:
        Unusable: there are more, or it is no list.

    >>> check_length("tools", [1, 2], 1)
    Traceback (most recent call last):
    nrl.gym.endpoint.fields.Unusable: tools has 2 parts; give at most 1
    """
    if not isinstance(value, list):
        found = f"a field of the request is of the wrong type: {name} is {shown(value)}"
        raise Unusable(f"{found}; give a list", param=name)
    if len(value) > most:
        raise Unusable(f"{name} has {len(value)} parts; give at most {most}", param=name)


def check_wishes(body: Mapping[str, Any]) -> None:
    """Refuse wishes that would be wrong at any server, though nothing here meets them.

    Raises:
        Unusable: one is.

    >>> check_wishes({"logit_bias": {"5": 1000}})
    Traceback (most recent call last):
    nrl.gym.endpoint.fields.Unusable: logit_bias has 1000 for '5'; give numbers from -100 to 100
    """
    for name in ("frequency_penalty", "presence_penalty", "min_p", "repetition_penalty", "top_logprobs"):
        if body.get(name) is not None:
            check_number(name, body[name])
    for name in ("metadata", "response_format", "chat_template_kwargs", "stream_options", "logit_bias"):
        if body.get(name) is not None and not isinstance(body[name], Mapping):
            raise Unusable(f"{name} is {shown(body[name])}; give an object", param=name)
    biases = body.get("logit_bias") or {}
    if len(biases) > _BIASES:
        raise Unusable(f"logit_bias has {len(biases)} tokens; give at most {_BIASES}", param="logit_bias")
    for token, bias in biases.items():
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            found = f"{shown(bias)} for {shown(token)}"
            raise Unusable(f"logit_bias has {found}; give numbers from -100 to 100", param="logit_bias")


def sampling_of(body: Mapping[str, Any], *lengths: str) -> dict[str, Any]:
    """Return how a request wants to be sampled; ``lengths`` are names of the most tokens.

    Raises:
        Unusable: a value that is no number of its range, or no text; or two names of the most tokens that differ.

    >>> sampling_of({"temperature": 0, "max_tokens": 5, "user": "me"}, "max_tokens")
    {'temperature': 0, 'max_new_tokens': 5}
    """
    given = {name: body[name] for name in ("temperature", "top_p", "top_k", "seed") if body.get(name) is not None}
    limits = [name for name in lengths if body.get(name) is not None]
    for name, value in given.items():
        check_number(name, value)
    for name in limits:
        check_number("max_new_tokens", body[name], name)
    for name in limits:
        if body[name] != body[limits[0]]:
            found = f"{limits[0]} is {shown(body[limits[0]])} and {name} {shown(body[name])}"
            raise Unusable(f"{found}, which differ; send one of them", param=name)
        given["max_new_tokens"] = body[name]
    if given.get("top_k") == -1:  # vLLM's word for all
        given["top_k"] = 0
    if body.get("stop") is not None:
        given["stop"] = _stops(body["stop"])
    return given


def _stops(stop: Any) -> tuple[str, ...]:
    texts: Sequence[Any] = (stop,) if isinstance(stop, str) else stop
    if not isinstance(texts, list | tuple):
        raise Unusable(f"stop is {shown(stop)}; give texts", param="stop")
    if len(texts) > _STOPS:
        raise Unusable(f"stop has {len(texts)} texts; give at most {_STOPS}", param="stop")
    if not all(isinstance(text, str) for text in texts):
        raise Unusable(f"stop is {shown(stop)}; give texts", param="stop")
    longest = max(map(len, texts), default=0)
    if longest > _STOP_LENGTH:
        raise Unusable(
            f"stop has a text of {longest} characters; give texts of at most {_STOP_LENGTH} characters", param="stop"
        )
    return tuple(filter(None, texts))  # an empty one stops nothing
