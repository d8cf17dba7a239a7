"""`textarena`: the games of TextArena for one player, in processes of an executable that has the package."""

import random
from typing import Any

from nrl.envs.pool.pool import pooled
from nrl.envs.types import Environment, Step, Task, Turn
from nrl.runtime.venvs.registry import Executable

__all__ = ["textarena"]

_HAS_IT = Executable("textarena", requirements=["textarena>=0.7.4,<0.8"], package="textarena")


def textarena(*, game: str = "GuessTheNumber-v0", workers: int | None = None, timeout: float = 30.0) -> Environment:
    """Episodes of a game of TextArena, whose task is a seed.

    Args:
        game: for one player, such as ``"FrozenLake-v0"``.
        workers: processes, at most; None: one for each processor.
        timeout: seconds of a call.

    Returns:
        An environment, with tasks. Its reward is the game's, its number ``env/invalid_move`` whether an illegal move
        ended it.

    Source: TextArena 0.7 (Guertler et al., 2025, 2504.11442).
    """

    def reset(task: Task) -> Any:
        import textarena as arena  # type: ignore[import-not-found]

        played = arena.make(f"{game}-raw")  # without the wrapper that says all that was said again
        played.reset(num_players=1, seed=task["seed"] % 2**32)
        return (played, random.getstate()), _seen(played)

    def step(state: Any, turn: Turn) -> Step:
        played, generator = state
        random.setstate(generator)  # games draw from the global one, and other episodes are in this process
        done, _ = played.step(action=turn.answer)
        if not done:
            return Step((played, random.getstate()), done=False, observation=_seen(played))
        rewards, found = played.close()
        return Step(None, float(rewards[0]), info={"invalid_move": float(found[0]["invalid_move"])})

    env = Environment(reset, step, tasks=lambda seed, index: {"seed": seed * 1_000_003 + index})
    return pooled(env, workers=workers, executable=_HAS_IT, timeout=timeout)


def _seen(played: Any) -> str:
    """What the game has said since, and not what the player did."""
    _, said = played.get_observation()
    return "\n".join(text for speaker, text, _ in said if speaker != 0) + "\n"
