"""Limits of an episode: on the model's turns, on the tokens that it samples, on time."""

import time
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from nrl.envs.return_values import is_reset
from nrl.envs.types import TIMEOUT, Env, Environment, Step, Task, Turn, alike, declared_rewards, mapped
from nrl.errors import ArgumentError

__all__ = ["limited"]


class _Used(NamedTuple):
    """What an episode has used of its limits, and the environment's own state."""

    turns: int
    tokens: int
    began: float
    own: Any


def limited(
    env: Env, *, turns: int | None = None, tokens: int | None = None, seconds: float | None = None
) -> Environment:
    """The environment whose episodes end behind the turn that reaches a limit.

    `step` answers that turn, and its reward counts; its observation is for the verifier alone, which has the last word,
    as in any episode, and `close` is called. Nothing is cut in the middle of a turn, so the last one may go beyond
    ``tokens`` or ``seconds``. Each limit is reported, as ``env/limits/turns`` and so on: 1 where it ended an episode
    that would have gone on, and 0 elsewhere.

    Args:
        env: its functions are plain or ``async``, and stay so.
        turns: of the model, at most.
        tokens: that the model samples (`Turn.token_ids`), in all turns together; neither prompt nor observations count.
        seconds: since `reset` returned, waiting for the sampler included. This limit depends on the clock: the same
            seed may give another episode. It is read from the machine's own clock, where `reset` and `step` run.

    Raises:
        ValueError: no limit is given, or one is not positive.

    >>> from nrl.envs import Environment, Step, Turn
    >>> def reset(task):
    ...     return 0, task["prompt"]
    >>> def step(state, turn):
    ...     return Step(state + 1, reward=0.5, done=False, observation="Go on.")
    >>> env = limited(Environment(reset, step), turns=8, tokens=3)
    >>> state, prompt = env.reset({"prompt": "Count."})
    >>> state, _, done, observation, info = env.step(state, Turn("1", [5, 2]))
    >>> done, observation, dict(info)
    (False, 'Go on.', {'limits/turns': 0.0, 'limits/tokens': 0.0})
    >>> _, reward, done, observation, info = env.step(state, Turn("2", [6, 2]))
    >>> reward, done, observation, dict(info)
    (0.5, True, 'Go on.', {'limits/turns': 0.0, 'limits/tokens': 1.0})
    """
    most = {"turns": turns, "tokens": tokens, "seconds": seconds}
    given = {name: value for name, value in most.items() if value is not None}
    if not given:
        raise ArgumentError("limited: no limit is given; give turns=, tokens= or seconds=")
    for name, value in given.items():
        if not value > 0:
            raise ArgumentError(
                f"limited: {name} is {value}; give a positive number, or leave it out for no such limit", name
            )

    def reset(task: Task) -> Any:
        return mapped(
            env.reset(task),
            lambda value: (_Used(0, 0, time.time(), value[0]), *value[1:]) if is_reset(value) else value,
        )

    def step(used: _Used, turn: Turn) -> Any:
        return mapped(env.step(used.own, turn), partial(after, used, turn))

    def after(used: _Used, turn: Turn, found: Any) -> Any:
        if not isinstance(found, Step):
            return found  # for its caller to complain about
        now = _Used(used.turns + 1, used.tokens + len(getattr(turn, "token_ids", ())), used.began, found.state)
        spent = {"turns": now.turns, "tokens": now.tokens, "seconds": time.time() - now.began}
        if not isinstance(found.info, Mapping):
            return found._replace(state=now)  # for its caller to complain about
        reached = {name: found.done in (False, 0) and spent[name] >= value for name, value in given.items()}
        info = dict(found.info)
        for name, ended in reached.items():  # another `limited` within this one may have reported it, too
            info[f"limits/{name}"] = info.get(f"limits/{name}", 0.0) + float(ended)
        if any(reached.values()):
            found = found._replace(done=True)
        return found._replace(state=now, info=info)

    own_close = getattr(env, "close", None)
    close = None if own_close is None else alike(own_close, lambda used: own_close(used.own))
    verifier, tasks = getattr(env, "verifier", None), getattr(env, "tasks", None)
    timeout = getattr(env, "timeout", TIMEOUT)
    check = getattr(env, "check_task", None)
    steps, num_rewards = alike(env.step, step), declared_rewards(env)
    return Environment(alike(env.reset, reset), steps, close, verifier, timeout, tasks, check, num_rewards)
