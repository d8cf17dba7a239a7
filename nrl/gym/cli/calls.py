"""Calls of what is tested, as a rollout makes them: in threads and on event loops, with a time limit, measured."""

import functools
import inspect
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import attrs

from nrl.envs.inprocess.tracebacks import Failed
from nrl.envs.return_values import score_of, verdicts_of
from nrl.envs.types import (
    STATUSES,
    TRAINED,
    Score,
    Task,
    Trace,
    Verifier,
    asynchronous,
    judges_group,
    settled,
)
from nrl.gym.cli.leak_check import Meter

__all__ = ["LEFT_OUT", "Call", "Outcome", "forgetting", "metered", "reward_of", "verdict"]

type Call = Callable[..., Awaitable[Any]]
"""``(fn, *args)`` -> the value of that call; raises `Failed`."""

LEFT_OUT = tuple(status for status in STATUSES if status not in TRAINED)
"""Statuses of verdicts whose rows are not trained on."""


@attrs.frozen
class Outcome:
    """What came of a call.

    Args:
        reward: several are added up; None: there is none, since the call failed or its status says so.
        status: one of `nrl.envs.STATUSES`; ``"error"``: it raised, or took too long.
        seconds: of the call.
        memory: bytes by which the process was larger meanwhile.
        error: what it raised.
    """

    reward: float | None
    status: str = "ok"
    seconds: float = 0.0
    memory: int = 0
    error: str | None = None


def forgetting(verifier: Any) -> Callable[[], Awaitable[Any]]:
    """What makes a verifier forget earlier calls, its ``forget``, plain or ``async``; nothing where there is none.

    >>> import asyncio
    >>> def right(task, trace): ...
    >>> right.forget = {1: 2}.popitem
    >>> asyncio.run(forgetting(right)()), asyncio.run(forgetting(None)())
    ((1, 2), None)
    """
    found = getattr(verifier, "forget", None)

    async def forget() -> Any:
        return await settled(found()) if callable(found) else None

    return forget


def metered(fn: Callable[..., Any], meter: Meter) -> Callable[..., Any]:
    """A function that is measured while it runs; of its kind, and with its name.

    >>> metered(len, Meter())("abc")
    3
    """
    if asynchronous(fn):

        @functools.wraps(fn)
        async def later(*args: Any) -> Any:
            with meter:
                found = fn(*args)
                return await found if inspect.isawaitable(found) else found

        return later

    async def awaited(found: Awaitable[Any]) -> Any:
        with meter:
            return await found

    @functools.wraps(fn)
    def now(*args: Any) -> Any:
        with meter:
            found = fn(*args)
        return awaited(found) if inspect.isawaitable(found) else found

    return now


async def verdict(
    call: Call, verifier: Verifier, task: Task, trace: Trace, meter: Meter, others: Sequence[Trace] = ()
) -> Outcome:
    """Ask a verifier, and measure the call.

    Args:
        call: makes it.
        verifier: plain or ``async``; one of groups is asked about the whole group.
        task: the task.
        trace: what happened.
        meter: measures.
        others: the rest of the group, which stands before it.
    """
    of_group = judges_group(verifier, task)
    began = time.perf_counter()
    try:
        found = await call(metered(verifier, meter), task, [*others, trace] if of_group else trace)
        reward, status = reward_of(verdicts_of(found, len(others) + 1)[-1] if of_group else found)
    except Failed as error:
        return Outcome(None, "error", time.perf_counter() - began, 0, str(error))
    except Exception as error:  # of a value that is no verdict
        return Outcome(None, "error", meter.seconds, meter.memory, f"{type(error).__name__}: {error}")
    return Outcome(reward, status, meter.seconds, meter.memory)


def reward_of(found: Any) -> tuple[float | None, str]:
    """The reward of a verdict, several added up, and its status.

    Raises:
        EnvError: it is no verdict.

    >>> reward_of({"right": 1.0, "brief": 0.5}), reward_of(Score(status="skipped"))
    ((1.5, 'ok'), (None, 'skipped'))
    """
    score: Score = score_of(found)
    if score.status in LEFT_OUT:
        return None, score.status
    return math.fsum(score.reward) if isinstance(score.reward, tuple) else score.reward, score.status
