"""What the servers of `gym.py` serve: a verifier that compares two strings, and an environment that adds up."""

from nrl.envs import Environment, Step, Task, Trace, Turn

__all__ = ["adding", "same"]


def same(task: Task, trace: Trace) -> float:
    """Whether the last turn is the answer.

    >>> same({"answer": "42"}, Trace("", ["the number is", "42"]))
    1.0
    """
    return float(trace.text == task["answer"])


def _begin(task: Task) -> tuple[int, str]:
    return int(task["start"]), "Add a number: "


def _add(state: int, turn: Turn) -> Step:
    found = state + int(turn)
    return Step(found, reward=float(found), done=False, observation=f"\n{found}. Add a number: ")


adding = Environment(_begin, _add)
"""An episode is a number; the reward of a turn is that number and all that was said up to there."""
