"""What the games share: reading a move, checking options, drawing, and answering in the form of the question."""

import random
import re
from typing import Any

from nrl.envs.types import Prompt, Task, Turn
from nrl.errors import ArgumentError, DataError, EnvError

__all__ = ["asked", "check_amount", "check_integer", "last_number", "prompt_of", "said", "seeded"]

_READ = 1000  # characters of a turn's end; a move is a few of them
_NUMBER = re.compile(r"(?<![\w.,])[0-9]{1,3}(?!\w|[.,][0-9])", re.ASCII)


def last_number(turn: str) -> int | None:
    """Return the last number of one to three digits that stands alone at the end of a turn's answer; None: no number.

    >>> last_number("4 is taken, so I play 7."), last_number("A1"), last_number("3.5"), last_number("9" * 5000)
    (7, None, None, None)
    """
    answer = (turn if isinstance(turn, Turn) else Turn(turn)).answer
    found = _NUMBER.findall(answer[-_READ:])
    return int(found[-1]) if found else None


def seeded(name: str, *values: int | str) -> random.Random:
    """A generator that depends on these alone, in every process.

    >>> seeded("a", 1, 2).random() == seeded("a", 1, 2).random() != seeded("a", 12).random()
    True
    """
    return random.Random(f"{name}:{':'.join(map(str, values))}")


def check_integer(game: str, name: str, value: object, least: int, most: int | None = None) -> None:
    """Check an option that counts something.

    Raises:
        DataError: it is no integer in this range.

    >>> check_integer("sliding.task", "size", 9, 2, 8)
    Traceback (most recent call last):
    nrl.errors.DataError: sliding.task: size is 9; it must be an integer from 2 to 8
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        span = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise DataError(f"{game}: {name} is {value!r}; it must be an integer {span}")


def check_amount(game: str, name: str, value: float) -> None:
    """Check an option that is a part of the reward.

    Raises:
        ValueError: it is not between 0 and 1.

    >>> check_amount("tic_tac_toe", "illegal", 2.0)
    Traceback (most recent call last):
    nrl.errors.ArgumentError: tic_tac_toe: illegal is 2.0; give a number from 0 to 1
    """
    if not 0 <= value <= 1:
        raise ArgumentError(f"{game}: {name} is {value!r}; give a number from 0 to 1")


def asked(text: str, chat: bool) -> Prompt:
    """A task's prompt: the text, or a chat of it.

    >>> asked("Your move?", True)
    [{'role': 'user', 'content': 'Your move?'}]
    """
    return [{"role": "user", "content": text}] if chat else text


def prompt_of(game: str, module: str, task: Task) -> Prompt:
    """The prompt of a task, which has a board, too.

    Raises:
        EnvError: it lacks one of them.

    >>> prompt_of("tic_tac_toe", "noughts", {"prompt": "Your move?"})
    Traceback (most recent call last):
    nrl.errors.EnvError: tic_tac_toe: the task has no 'board', only 'prompt'; take tasks of
    nrl.envs.library.games.noughts.task
    """
    for field in ("prompt", "board"):
        if field not in task:
            raise EnvError(
                f"{game}: the task has no '{field}', only {', '.join(map(repr, task)) or 'nothing'}; take tasks of "
                f"nrl.envs.library.games.{module}.task"
            )
    prompt: Prompt = task["prompt"]
    return prompt


def said(text: str, plain: bool) -> Any:
    """An observation in the form of the prompt: text behind a text, a message in a chat.

    >>> said("5 is taken.", False)
    [{'role': 'user', 'content': '5 is taken.'}]
    """
    return f"\n{text}\nMove: " if plain else [{"role": "user", "content": text}]
