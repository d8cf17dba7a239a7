"""Tic-tac-toe (noughts and crosses) against an opponent that plays perfectly, at random, or as a function says.

A task is a function of ``(seed, index)`` alone, so the state of a stream of them is one integer.
"""

import functools
import random
from collections.abc import Callable
from typing import Literal, NamedTuple

from nrl.envs.library.games.moves import asked, check_amount, check_integer, last_number, prompt_of, said, seeded
from nrl.envs.types import Environment, Prompt, Step, Task
from nrl.errors import ArgumentError, EnvError

__all__ = ["Opponent", "best_moves", "task", "tic_tac_toe"]

type Opponent = Callable[[str, random.Random], int]
"""``(board, generator) -> cell``: the cell, from 0, that is taken by the side to move.

A board is nine characters, row by row: ``X``, ``O``, or ``.`` for a free cell. ``X`` begins, so it moves where
there are as many of both.
"""

_RULES = """Play tic-tac-toe. You are {mark}. Three in a row, a column or a diagonal win. The free cells have numbers; \
answer with the number of the one that you take."""
_LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]


class _Play(NamedTuple):
    """The board, which the model is to move on; turns that are left."""

    board: str
    left: int
    seed: int
    plain: bool


def task(seed: int, index: int, *, taken: int | None = None, chat: bool = False) -> Task:
    """The opening that a seed has at an index, from which the best play of both sides never loses for the model.

    Args:
        seed: not negative.
        index: not negative.
        taken: cells that are taken already, at random, from 0 to 4: of an even number the model is X, and moves as
            X, of an odd one O. None: drawn evenly.
        chat: whether the prompt is a chat; otherwise it is plain text. What the environment answers has the same form.

    Returns:
        ``prompt``, the rules and the board; ``board``, nine characters as an `Opponent` is given; ``seed``, of the
        opponent's moves.

    Raises:
        DataError: an argument is out of its range.

    >>> made = task(0, 3, taken=1)
    >>> print(made["prompt"].partition("take.")[2].strip())
    1 2 3
    X 5 6
    7 8 9
    Move:
    >>> made["board"]
    '...X.....'
    """
    for name, value, most in (("seed", seed, None), ("index", index, None), ("taken", taken, 4)):
        if value is not None or name != "taken":
            check_integer("noughts.task", name, value, 0, most)
    generator = seeded("noughts", seed, index, str(taken))
    marks = generator.randint(0, 4) if taken is None else taken
    while True:
        board = "." * 9
        for cell in generator.sample(range(9), marks):
            board = _after(board, cell)
        if _worth(board) >= 0:  # three marks of one side have lost for the other, who moves
            break
    text = f"{_RULES.format(mark=_mark(board))}\n\n{_drawn(board)}"
    prompt = asked(text if chat else f"{text}\nMove: ", chat)
    return {"prompt": prompt, "board": board, "seed": generator.getrandbits(32)}


def tic_tac_toe(
    *,
    opponent: Literal["perfect", "random"] | Opponent = "perfect",
    draw: float = 0.5,
    illegal: float = 0.05,
    turns: int = 9,
    taken: int | None = None,
    chat: bool = False,
) -> Environment:
    """Tic-tac-toe, a move a turn, until a side has won, the board is full, or no turn is left.

    The last number of a turn is the cell. A turn that names none, or one that is not free, leaves the board as it is,
    and the model is told.

    Args:
        opponent: plays perfectly, by any of its best moves; or evenly among all moves; or a function.
        draw: the reward of a draw, the best that a perfect opponent allows; a win has 1, and all else 0.
        illegal: what a turn without a legal move costs, from 0 to 1.
        turns: of an episode, at most; a game needs five.
        taken: of the tasks that it brings, as of `nrl.envs.library.games.noughts.task`.
        chat: whether these are chats.

    Returns:
        An environment that brings tasks, and plays any of `nrl.envs.library.games.noughts.task`. Its states are values.
        The opponent's draws depend on the task's ``"seed"`` and the board alone: the same moves meet the same answers.
        The components of the reward are ``won``, ``drawn`` and ``illegal``. ``lost`` and ``limits/turns`` in ``info``
        say what else ended it.

    Raises:
        ValueError: an argument is out of its range.
        EnvError: by `reset`, if the task has no prompt, no seed, or no board on which somebody can move; by `step`, if
            the function takes a cell that is not free.

    >>> env = tic_tac_toe()
    >>> state, prompt = env.reset({"prompt": "Which cell?", "board": "XX.OO....", "seed": 0})
    >>> env.step(state, "I take 3 and win.").reward
    {'won': 1.0, 'drawn': 0.0, 'illegal': 0.0}
    >>> step = env.step(state, "9")
    >>> step.done, step.info["lost"]
    (True, 1.0)
    """
    if turns < 1:
        raise ArgumentError(f"tic_tac_toe: turns is {turns}; give at least 1")
    check_amount("tic_tac_toe", "draw", draw)
    check_amount("tic_tac_toe", "illegal", illegal)
    own = functools.partial(task, taken=taken, chat=chat)
    own(0, 0)  # it checks its arguments
    if opponent not in _OPPONENTS and not callable(opponent):
        raise ArgumentError(
            f"tic_tac_toe: opponent is {opponent!r}; give {' or '.join(map(repr, _OPPONENTS))}, or a function of the "
            "board and a random.Random that returns a free cell, from 0"
        )
    reply: Opponent = _OPPONENTS[opponent] if isinstance(opponent, str) else opponent

    def reset(task: Task) -> tuple[_Play, Prompt]:
        prompt = prompt_of("tic_tac_toe", "noughts", task)
        if not isinstance(task.get("seed"), int):
            raise EnvError(f"tic_tac_toe: task['seed'] is {task.get('seed')!r}; give an integer")
        return _Play(_checked(task["board"]), turns, task["seed"], isinstance(prompt, str)), prompt

    def step(play: _Play, turn: str) -> Step:
        number = last_number(turn)
        legal = number is not None and 1 <= number <= 9 and play.board[number - 1] == "."
        board = _after(play.board, number - 1) if number is not None and legal else play.board
        won, lost, out = _lined(board), False, play.left == 1
        if legal and not won and "." in board:
            board = _answered(board, reply, play.seed)
            lost = _lined(board)
        drawn = not won and not lost and "." not in board
        parts = {"won": float(won), "drawn": draw * drawn, "illegal": 0.0 if legal else -illegal}
        over = won or lost or drawn
        info = {"lost": float(lost), "limits/turns": float(out and not over)}
        after = play._replace(board=board, left=play.left - 1)
        if over or out:
            return Step(after, parts, info=info)
        wrong = "Name a free cell by its number." if number is None else f"{number} is not free."
        shown = said(_drawn(board) if legal else f"{wrong}\n{_drawn(board)}", play.plain)
        return Step(after, parts, False, shown, info)

    return Environment(reset, step, tasks=own)


def best_moves(board: str) -> list[int]:
    """The cells, from 0, whose taking is best for the side to move if both play perfectly from there.

    Args:
        board: on which nobody has won, and a cell is free.

    >>> best_moves("XX.OO....")
    [2]
    """
    worth = {cell: -_worth(_after(board, cell)) for cell in _free(board)}
    best = max(worth.values())
    return [cell for cell, value in worth.items() if value == best]


@functools.cache
def _worth(board: str) -> int:
    """By minimax, for the side to move: 1, it wins; 0, a draw; -1, it loses."""
    if _lined(board):
        return -1
    return max((-_worth(_after(board, cell)) for cell in _free(board)), default=0)


_OPPONENTS: dict[str, Opponent] = {
    "perfect": lambda board, generator: generator.choice(best_moves(board)),
    "random": lambda board, generator: generator.choice(_free(board)),
}


def _answered(board: str, reply: Opponent, seed: int) -> str:
    cell = reply(board, seeded("noughts", seed, board))
    if cell not in _free(board):
        raise EnvError(
            f"tic_tac_toe: the opponent took the cell {cell!r} of {board!r}; return one of {_free(board)}, which are "
            "free"
        )
    return _after(board, cell)


def _free(board: str) -> list[int]:
    return [cell for cell, mark in enumerate(board) if mark == "."]


def _mark(board: str) -> str:
    """Of the side to move."""
    return "X" if board.count("X") == board.count("O") else "O"


def _after(board: str, cell: int) -> str:
    return board[:cell] + _mark(board) + board[cell + 1 :]


def _lined(board: str) -> bool:
    """Whether somebody, so who moved last, has three in a line."""
    return any(board[a] == board[b] == board[c] != "." for a, b, c in _LINES)


def _drawn(board: str) -> str:
    cells = [str(cell + 1) if mark == "." else mark for cell, mark in enumerate(board)]
    return "\n".join(" ".join(cells[at : at + 3]) for at in (0, 3, 6))


def _checked(board: object) -> str:
    told = f"tic_tac_toe: task['board'] is {board!r:.200}"
    if not isinstance(board, str) or len(board) != 9 or not set(board) <= set("XO."):
        raise EnvError(f"{told}; give nine characters row by row, X, O or . for a free cell")
    if board.count("X") - board.count("O") not in (0, 1):
        raise EnvError(f"{told}; X begins, so there are as many X as O, or one more")
    if _lined(board) or "." not in board:
        raise EnvError(f"{told}, a game that is over; give one in which a side can move")
    return board
