"""Checks of what user code returns: resets, steps, verdicts, numbers to report; `nrl.envs.policy_inputs` has the rest.

An environment or a verifier may be called in the program, in a pool, on a mesh or behind HTTP. All of these take
returned values apart with the functions of this module, so a value is accepted everywhere or nowhere. Arrays and
tensors count as the lists and numbers that their ``tolist`` gives, which is how they travel.

A function raises an `EnvError` with the value that it found and what to return instead. Whoever calls it makes that one
row invalid.
"""

import inspect
import math
from collections.abc import Mapping
from typing import Any, cast

from nrl.envs.plain_values import BYTES, is_array, named_kind, real_number, scalar_value, shown_value
from nrl.envs.tools.schemas import Tool
from nrl.envs.types import STATUSES, TRAINED, Score, Step, Verdict
from nrl.errors import EnvError

__all__ = [
    "LARGEST_REWARD",
    "check_status",
    "is_reset",
    "read_info",
    "read_reset",
    "read_step",
    "score_of",
    "verdicts_of",
]

LARGEST_REWARD = 3.4028234663852886e38
"""The largest number of float32, in which rewards are kept."""

_REMEDY = "return a number, several numbers, components by name, or a Score"


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
            f"the environment's reset returned {named_kind(value)}; return (state, prompt), or (state, prompt, tools)"
        )
    for tools in value[2:]:
        if not isinstance(tools, list | tuple) or any(not isinstance(tool, Tool) for tool in tools):
            raise EnvError(
                "the environment's reset returned something else than a list of tools as its third value, "
                f"{named_kind(tools)}; make each of a function, by nrl.envs.tools.tool"
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
    done = scalar_value(value.done)
    if not isinstance(done, bool) and not (isinstance(done, int) and done in (0, 1)):
        raise EnvError(
            f"the step's done is {shown_value(value.done)}; return Step(..., done=True) or Step(..., done=False)"
        )
    return value._replace(done=bool(done), info=read_info(value.info))


def read_info(info: Any) -> dict[str, float]:
    """Return the numbers that a step reports, by name. NaN says that there is no number this time.

    Raises:
        EnvError: ``info`` is no mapping from texts to numbers.

    >>> read_info({"turns": 2})
    {'turns': 2.0}
    """
    if not isinstance(info, Mapping):
        raise EnvError(f"the step's info is {shown_value(info)}; return numbers by name, such as info={{'turns': 2.0}}")
    read = dict[str, float]()
    for name, value in info.items():
        number = real_number(value)
        if not isinstance(name, str) or not name:
            raise EnvError(f"the step's info has the name {shown_value(name)}; name each number by a text")
        if number is None or math.isinf(number):
            raise EnvError(f"the step's info has {name!r:.80}: {shown_value(value)}; give numbers alone")
        read[str.__str__(name)] = number
    return read


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
        raise EnvError(f"Score: the status is {shown_value(score.status)}; give one of {', '.join(STATUSES)}")


def verdicts_of(verdicts: Any, count: int) -> list[Any]:
    """Return the verdicts of a verifier of groups as a list.

    Raises:
        EnvError: they are no list, tuple or array, or not as many as episodes.

    >>> verdicts_of((1.0, 0.0), 2)
    [1.0, 0.0]
    """
    parts = verdicts.tolist() if is_array(verdicts) and not isinstance(verdicts, BYTES) else verdicts
    if not isinstance(parts, list | tuple) or isinstance(parts, Score):
        raise EnvError(
            f"the verifier of a group gave {shown_value(verdicts)} for {count} episodes; return a list with a verdict "
            "for each"
        )
    if len(parts) != count:
        raise EnvError(
            f"the verifier of a group gave {len(parts)} verdicts for {count} episodes; return one for each, in order"
        )
    return list(parts)


def _no_reward(verdict: Any, whose: str, reason: str = "") -> EnvError:
    return EnvError(
        f"{whose} is {shown_value(verdict)}, of which no reward can be made{reason and f', since {reason}'}; {_REMEDY}"
    )


def _read_rewards(reward: Any, verdict: Any, whose: str) -> float | tuple[float, ...]:
    parts = reward.tolist() if is_array(reward) and not isinstance(reward, BYTES) else reward
    if not isinstance(parts, list | tuple):
        number = real_number(reward)
        if number is None:
            raise _no_reward(verdict, whose, "it was not awaited" if inspect.isawaitable(reward) else "")
        return _finite(number, "the reward")
    read = [real_number(part) for part in parts]
    if not read or None in read:
        raise _no_reward(verdict, whose, "" if read else "it is empty")
    return tuple(_finite(cast(float, number), "the reward", read) for number in read)


def _read_components(components: Any, verdict: Any, whose: str) -> dict[str, float]:
    if not isinstance(components, Mapping):
        raise _no_reward(verdict, whose, f"its components are {named_kind(components)}")
    read = dict[str, float]()
    for name, value in components.items():
        number = real_number(value)
        if not isinstance(name, str) or not name:
            raise _no_reward(verdict, whose, f"a component is named {shown_value(name)}, which is no text")
        if number is None:
            raise _no_reward(verdict, whose, f"the component {name!r:.80} is {shown_value(value)}, which is no number")
        read[str.__str__(name)] = _finite(number, f"the component {name!r:.80} of the reward")
    return read


def _finite(number: float, what: str, shown: Any = None) -> float:
    if not abs(number) <= LARGEST_REWARD:
        raise EnvError(
            f"{what} is {shown_value(number if shown is None else tuple(shown))}; rewards are float32, whose largest "
            f"number is {LARGEST_REWARD:.3g}"
        )
    return number
