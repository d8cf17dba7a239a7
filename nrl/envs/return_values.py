"""Checks of what user code returns: resets, steps, prompts, observations, verdicts, numbers to report.

An environment or a verifier may be called in the program, in a pool, on a mesh or behind HTTP. All of these take
returned values apart with the functions of this module, so a value is accepted everywhere or nowhere. Arrays and
tensors count as the lists and numbers that their ``tolist`` gives, which is how they travel.

A function raises an `EnvError` with the value that it found and what to return instead. Whoever calls it makes that one
row invalid.
"""

import inspect
import math
import numbers
import operator
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, cast

from nrl.data.messages import canonical_messages, canonical_tools
from nrl.envs.contract import STATUSES, TRAINED, Score, Step, Verdict
from nrl.envs.tools.schemas import Tool
from nrl.errors import DataError, EnvError

__all__ = [
    "LARGEST_REWARD",
    "check_status",
    "is_reset",
    "read_info",
    "read_observation",
    "read_prompt",
    "read_reset",
    "read_step",
    "score_of",
    "verdicts_of",
]

LARGEST_REWARD = 3.4028234663852886e38
"""The largest number of float32, in which rewards are kept."""

_REMEDY = "return a number, several numbers, components by name, or a Score"
_CONVERSATION = {"messages"}
_REQUEST = _CONVERSATION | {"tools", "ids", "stop", "max_new_tokens"}
_BYTES = (bytes, bytearray, memoryview)

_repr = reprlib.Repr(maxstring=120, maxother=120, maxlong=60, maxlevel=3, maxdict=6, maxlist=6, maxtuple=6)


# --- Resets and steps


def is_reset(value: Any) -> bool:
    """Whether a value has the form of a reset's: a tuple of two or three.

    >>> is_reset((0, "1+1=")), is_reset("ab")
    (True, False)
    """
    return isinstance(value, tuple) and len(value) in (2, 3)


def read_reset(value: Any) -> tuple[Any, ...]:
    """Return the state, the prompt and, if there are any, the tools that a reset returned.

    Raises:
        EnvError: the value is no tuple of two or three, or the tools are no list of tools.

    >>> read_reset((0, "1+1="))
    (0, '1+1=')
    """
    if not is_reset(value):
        raise EnvError(
            f"the environment's reset returned {_kind(value)}; return (state, prompt), or (state, prompt, tools)"
        )
    for tools in value[2:]:
        if not isinstance(tools, list | tuple) or any(not isinstance(tool, Tool) for tool in tools):
            raise EnvError(
                "the environment's reset returned something else than a list of tools as its third value, "
                f"{_kind(tools)}; make each of a function, by nrl.envs.tools.tool"
            )
    return cast(tuple[Any, ...], value)


def read_step(value: Any) -> Step:
    """Return the `Step` that a step returned, with ``done`` as a bool and ``info`` as numbers by name.

    Its reward and its observation are left as they are, for `score_of` and `read_observation`.

    Raises:
        EnvError: the value is no `Step`, ``done`` is no truth value, or ``info`` has something else than numbers.

    >>> read_step(Step(None, done=1, info={"turns": 2})).info
    {'turns': 2.0}
    """
    if not isinstance(value, Step):
        raise EnvError(f"the environment's step returned {type(value).__name__}; return a Step(state, reward, ...)")
    done = _plain(value.done)
    if not isinstance(done, bool) and not (isinstance(done, int) and done in (0, 1)):
        raise EnvError(f"the step's done is {_shown(value.done)}; return Step(..., done=True) or Step(..., done=False)")
    return value._replace(done=bool(done), info=read_info(value.info))


def read_info(info: Any) -> dict[str, float]:
    """Return the numbers that a step reports, by name. NaN says that there is no number this time.

    Raises:
        EnvError: ``info`` is no mapping from texts to numbers.

    >>> read_info({"turns": 2})
    {'turns': 2.0}
    """
    if not isinstance(info, Mapping):
        raise EnvError(f"the step's info is {_shown(info)}; return numbers by name, such as info={{'turns': 2.0}}")
    read = dict[str, float]()
    for name, value in info.items():
        number = _number(value)
        if not isinstance(name, str) or not name:
            raise EnvError(f"the step's info has the name {_shown(name)}; name each number by a text")
        if number is None or math.isinf(number):
            raise EnvError(f"the step's info has {name!r:.80}: {_shown(value)}; give numbers alone")
        read[str.__str__(name)] = number
    return read


# --- Prompts and observations


def read_prompt(prompt: Any, vocabulary: int | None = None, limit: int | None = None) -> Any:
    """Return the prompt of a reset as text, a list of messages, a list of token ids, or an agent's request.

    Args:
        prompt: any value.
        vocabulary: how many tokens the policy's tokenizer has; None: it is not known here.
        limit: how many token ids are wanted; those behind them are not read. None: all.

    Raises:
        EnvError: it is none of the four, or has a token id outside of the vocabulary.

    >>> read_prompt((5, 6), vocabulary=100)
    [5, 6]
    """
    if isinstance(prompt, Mapping) and "tools" not in prompt:
        raise EnvError(
            f"the environment's reset returned {_shown(prompt)} as the prompt; give text, a list of messages, token "
            "ids, or a request with 'messages' and 'tools'"
        )
    return _read_input(prompt, "the prompt", "give text, a list of messages, or token ids", vocabulary, limit)


def read_observation(observation: Any, vocabulary: int | None = None, limit: int | None = None) -> Any:
    """Return an observation as text, a list of messages or of token ids, a whole conversation, or a request.

    Args:
        observation: of a step that is not done.
        vocabulary: how many tokens the policy's tokenizer has; None: it is not known here.
        limit: how many token ids are wanted; those behind them are not read. None: all.

    Raises:
        EnvError: it is nothing that the policy could read, or has a token id outside of the vocabulary.

    >>> read_observation("more"), read_observation([{"role": "user", "content": "more"}])
    ('more', [{'role': 'user', 'content': 'more'}])
    """
    if observation is None:
        raise EnvError("the step is not done, and it has no observation; return Step(..., done=True) or an observation")
    return _read_input(observation, "the observation", "return text, messages or token ids", vocabulary, limit)


def _read_input(value: Any, whose: str, remedy: str, vocabulary: int | None, limit: int | None) -> Any:
    if isinstance(value, str):
        return value if type(value) is str else str.__str__(value)
    if isinstance(value, Mapping):
        return _read_conversation(value, whose)
    if isinstance(value, _BYTES):
        raise EnvError(f"{whose} is {_shown(value)}, bytes; decode them to text, or give a list of token ids")
    if inspect.isawaitable(value):
        raise EnvError(f"{whose} is {_shown(value)}, which was not awaited; await it, and {remedy}")
    parts = value[:limit] if limit is not None and _is_array(value) else value
    parts = parts.tolist() if _is_array(parts) else parts
    if not isinstance(parts, list | tuple):
        raise EnvError(f"{whose} is {_shown(value)}; {remedy}")
    if any(isinstance(part, Mapping) for part in parts[:1]):
        return _read_messages(parts, whose)
    return _read_token_ids(parts[:limit], whose, remedy, vocabulary)


def _is_array(value: Any) -> bool:
    """Whether a value is an array or a tensor with at least one dimension."""
    return hasattr(value, "tolist") and not isinstance(value, type) and getattr(value, "ndim", 1) > 0


def _read_token_ids(parts: Sequence[Any], whose: str, remedy: str, vocabulary: int | None) -> list[int]:
    ids = list(parts)
    if not set(map(type, ids)) <= {int}:
        ids = [_token_id(place, part, whose, remedy) for place, part in enumerate(ids)]
    if ids and (min(ids) < 0 or (vocabulary is not None and max(ids) >= vocabulary)):
        place, token = next(
            each for each in enumerate(ids) if each[1] < 0 or (vocabulary is not None and each[1] >= vocabulary)
        )
        last = "" if vocabulary is None else f"; the tokenizer's last is {vocabulary - 1}"
        raise EnvError(f"{whose} has the token id {token:.20g} at place {place}{last}; encode it with that tokenizer")
    return ids


def _token_id(place: int, part: Any, whose: str, remedy: str) -> int:
    plain = _plain(part)
    if isinstance(plain, bool) or not isinstance(plain, int):
        raise EnvError(f"{whose}: entry {place} is {_shown(part)}, {_kind(part)}, which is no token id; {remedy}")
    return int(plain)


def _read_messages(messages: Iterable[Any], whose: str) -> list[Mapping[str, Any]]:
    """Messages in the canonical form; those that stand for a turn of the model are left as they are."""
    read = list(messages)
    for place, message in enumerate(read):
        where = f"{whose}: message {place}"
        if not isinstance(message, Mapping):
            raise EnvError(f"{where} is {_kind(message)}; give {{'role': ..., 'content': ...}}")
        role, content = (
            message.get(name, message.get(other)) for name, other in (("role", "from"), ("content", "value"))
        )
        calls = message.get("tool_calls")
        if not isinstance(role, str):
            raise EnvError(f"{where} has {_shown(role)} as its 'role'; give a text, such as 'user'")
        if "turn" in message:
            continue
        if content is None and not calls and not message.get("function_call"):
            raise EnvError(f"{where} has no 'content', only {_shown(list(message))}; give a text")
        if not isinstance(content, str | None) and not _is_parts(content):
            raise EnvError(f"{where} has {_shown(content)} as its 'content'; give a text, or a list of parts")
        try:
            (read[place],) = canonical_messages([message], where, parts=True)
        except DataError as error:
            raise EnvError(str(error).replace(f"{where}: message 0", where, 1)) from None
    return read


def _is_parts(content: Any) -> bool:
    """Whether a content is a list of parts, each a text or a mapping."""
    return isinstance(content, list | tuple) and all(isinstance(part, str | Mapping) for part in content)


def _read_conversation(value: Mapping[str, Any], whose: str) -> dict[str, Any]:
    """A whole conversation, or an agent's request."""
    if "role" in value:
        raise EnvError(f"{whose} is one message; return a list of messages")
    messages = value.get("messages")
    known = _REQUEST if "tools" in value else _CONVERSATION
    if not set(value) <= known or not isinstance(messages, list | tuple):
        raise EnvError(
            f"{whose} is {_shown(value)}; return {{'messages': [...]}} with the whole conversation "
            "(and the 'tools' of an agent), a list of messages to append, text, or token ids"
        )
    read = dict(value) | {"messages": _read_messages(messages, whose)}
    if "tools" in read:
        _check_request(read, whose)
        read["tools"] = canonical_tools(read["tools"], f"{whose}: 'tools'")
    return read


def _check_request(request: Mapping[str, Any], whose: str) -> None:
    tools, stop, most = (request.get(name) for name in ("tools", "stop", "max_new_tokens"))
    if not isinstance(tools, list | tuple) or any(not isinstance(tool, Mapping) for tool in tools):
        raise EnvError(f"{whose} has 'tools' that are {_shown(tools)}; give a list of JSON schemas, which may be empty")
    if not isinstance(request.get("ids", False), bool | None):
        raise EnvError(f"{whose} has 'ids' that are {_shown(request['ids'])}; give True or False")
    texts = isinstance(stop, list | tuple) and all(isinstance(text, str) and text for text in stop)
    if "stop" in request and not texts:
        raise EnvError(f"{whose} has 'stop' that is {_shown(stop)}; give a list of texts that are not empty")
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise EnvError(f"{whose} has 'max_new_tokens' that is {_shown(most)}; give at least 1, or leave it out")


# --- Verdicts


def score_of(verdict: Verdict, whose: str = "the verdict") -> Score:
    """Return a verdict as a `Score`, whose reward and components are finite numbers.

    A bool counts as 0 or 1, and a scalar of an array or a tensor as its number. Of a status that is not trained on,
    neither the reward nor the components are read.

    Args:
        verdict: a number, several (a list, a tuple, or an array of one dimension), components by name, or a `Score`.
        whose: the value's name, for errors.

    Raises:
        EnvError: the verdict is something else, is empty, or has a number that float32 cannot hold, or its status does
            not exist.

    >>> score_of({"right": 1.0, "short": 0.5})
    Score(reward=1.5, status='ok', components={'right': 1.0, 'short': 0.5})
    """
    if isinstance(verdict, Score):
        check_status(verdict)
        if verdict.status not in TRAINED:
            return verdict
        reward = _read_rewards(verdict.reward, verdict, whose)
        return verdict._replace(reward=reward, components=_read_components(verdict.components, verdict, whose))
    if isinstance(verdict, Mapping):
        if not verdict:
            raise _no_reward(verdict, whose, "it has no component")
        components = _read_components(verdict, verdict, whose)
        return Score(_finite(sum(components.values()), "the reward"), components=components)
    return Score(_read_rewards(verdict, verdict, whose))


def check_status(score: Score) -> None:
    """Check the status of a `Score`.

    Raises:
        EnvError: it does not exist.
    """
    if score.status not in STATUSES:
        raise EnvError(f"Score: the status is {_shown(score.status)}; give one of {', '.join(STATUSES)}")


def verdicts_of(verdicts: Any, count: int) -> list[Any]:
    """Return the verdicts of a verifier of groups as a list.

    Raises:
        EnvError: they are no list, tuple or array, or not as many as episodes.

    >>> verdicts_of((1.0, 0.0), 2)
    [1.0, 0.0]
    """
    parts = verdicts.tolist() if _is_array(verdicts) and not isinstance(verdicts, _BYTES) else verdicts
    if not isinstance(parts, list | tuple) or isinstance(parts, Score):
        raise EnvError(
            f"the verifier of a group gave {_shown(verdicts)} for {count} episodes; return a list with a verdict for "
            "each"
        )
    if len(parts) != count:
        raise EnvError(
            f"the verifier of a group gave {len(parts)} verdicts for {count} episodes; return one for each, in order"
        )
    return list(parts)


def _no_reward(verdict: Any, whose: str, reason: str = "") -> EnvError:
    return EnvError(
        f"{whose} is {_shown(verdict)}, of which no reward can be made{reason and f', since {reason}'}; {_REMEDY}"
    )


def _read_rewards(reward: Any, verdict: Any, whose: str) -> float | tuple[float, ...]:
    parts = reward.tolist() if _is_array(reward) and not isinstance(reward, _BYTES) else reward
    if not isinstance(parts, list | tuple):
        number = _number(reward)
        if number is None:
            raise _no_reward(verdict, whose, "it was not awaited" if inspect.isawaitable(reward) else "")
        return _finite(number, "the reward")
    read = [_number(part) for part in parts]
    if not read or None in read:
        raise _no_reward(verdict, whose, "" if read else "it is empty")
    return tuple(_finite(cast(float, number), "the reward", read) for number in read)


def _read_components(components: Any, verdict: Any, whose: str) -> dict[str, float]:
    if not isinstance(components, Mapping):
        raise _no_reward(verdict, whose, f"its components are {_kind(components)}")
    read = dict[str, float]()
    for name, value in components.items():
        number = _number(value)
        if not isinstance(name, str) or not name:
            raise _no_reward(verdict, whose, f"a component is named {_shown(name)}, which is no text")
        if number is None:
            raise _no_reward(verdict, whose, f"the component {name!r:.80} is {_shown(value)}, which is no number")
        read[str.__str__(name)] = _finite(number, f"the component {name!r:.80} of the reward")
    return read


def _finite(number: float, what: str, shown: Any = None) -> float:
    if not abs(number) <= LARGEST_REWARD:
        raise EnvError(
            f"{what} is {_shown(number if shown is None else tuple(shown))}; rewards are float32, whose largest number "
            f"is {LARGEST_REWARD:.3g}"
        )
    return number


# --- Values


def _plain(value: Any) -> Any:
    """The number of a scalar array or tensor; any other value as it is."""
    if hasattr(value, "tolist") and not isinstance(value, type | memoryview) and getattr(value, "ndim", 1) == 0:
        return value.tolist()
    return value


def _number(value: Any) -> float | None:
    """A real number as a float, infinite where that cannot hold it; None for any other value."""
    value = _plain(value)
    if not isinstance(value, numbers.Real | Decimal):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, operator.gt(value, 0) - 0.5)
    except (TypeError, ValueError):  # a signalling NaN of Decimal
        return math.nan


def _kind(value: Any) -> str:
    """The type of a value, and its length if it is a tuple or a list."""
    size = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return "nothing" if value is None else f"{_article(type(value).__name__)}{size}"


def _article(name: str) -> str:
    return f"{'an' if name[:1] in 'aeiou' else 'a'} {name}"


def _shown(value: Any) -> str:
    """A value for a message, bounded in length; one whose ``repr`` fails is shown by its type."""
    try:
        return _repr.repr(value)
    except Exception:
        return _article(type(value).__name__)
