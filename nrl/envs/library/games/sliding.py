"""The sliding puzzle: tiles on a square board, one of whose cells is empty, are to be put in order.

A task is a function of ``(seed, index)`` alone, so the state of a stream of them is one integer.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from nrl.envs.library.games.moves import asked, check_amount, check_integer, last_number, prompt_of, said, seeded
from nrl.envs.types import Environment, Prompt, Step, Task
from nrl.errors import ArgumentError, EnvError

__all__ = ["sliding_puzzle", "task"]

_RULES = """Put the tiles in order, row by row, with the empty cell (_) last. A move slides a tile that is directly \
above, below, left or right of the empty cell into it. Answer with the number of that tile."""

type _Board = tuple[int, ...]


class _Play(NamedTuple):
    """The tiles row by row, 0 for the empty cell; turns that are left; how far it was at first."""

    board: _Board
    left: int
    far: int
    plain: bool


def task(seed: int, index: int, *, size: int = 3, moves: int = 8, chat: bool = False) -> Task:
    """The puzzle that a seed has at an index.

    Args:
        seed: not negative.
        index: not negative.
        size: cells along a side, from 2 to 6.
        moves: how many times a tile has been slid at random, never the same one twice running. So that many moves
            solve it, or fewer.
        chat: whether the prompt is a chat; otherwise it is plain text. What the environment answers has the same form.

    Returns:
        ``prompt``, the rules and the board; ``board``, the tiles row by row, with 0 for the empty cell, never all in
        order; ``moves``.

    Raises:
        DataError: an argument is out of its range.

    >>> made = task(0, 0, size=2, moves=2)
    >>> print(made["prompt"].partition("tile.")[2].strip())
    _ 1
    3 2
    Move:
    >>> made["board"]
    [0, 1, 3, 2]
    """
    for name, value, least, most in (
        ("seed", seed, 0, None),
        ("index", index, 0, None),
        ("size", size, 2, 6),
        ("moves", moves, 1, 10_000),
    ):
        check_integer("sliding.task", name, value, least, most)
    generator = seeded("sliding", seed, index, size, moves)
    board, before, slid = _goal(size), _goal(size), 0
    for _ in range(moves):
        before, slid = board, generator.choice([tile for tile in _beside(board) if tile != slid])
        board = _after(board, slid)
    if board == _goal(size):
        board = before
    text = f"{_RULES}\n\n{_drawn(board)}"
    return {"prompt": asked(text if chat else f"{text}\nMove: ", chat), "board": list(board), "moves": moves}


def sliding_puzzle(
    *,
    size: int = 3,
    moves: int = 8,
    turns: int = 20,
    illegal: float = 0.05,
    progress: float = 0.0,
    chat: bool = False,
) -> Environment:
    """The sliding puzzle, a move a turn: tiles are slid until all are in order, or no turn is left.

    The last number of a turn is the tile. A turn that names none, or one that cannot be slid, leaves the board as it
    is, and the model is told.

    Args:
        size: of the tasks that it brings, as of `nrl.envs.library.games.sliding.task`.
        moves: of these, too.
        turns: of an episode, at most.
        illegal: what a turn without a legal move costs, from 0 to 1.
        progress: what it is worth, from 0 to 1, to bring tiles nearer to their places: that times the part by which a
            turn lessens the sum of their distances to these, which is lost again by a turn that undoes it. So over an
            episode it adds up to at most this, and to all of it in a solved one. 0: only the solution counts.
        chat: whether the tasks that it brings are chats.

    Returns:
        An environment that brings tasks, and plays any of `nrl.envs.library.games.sliding.task`. Its states are values.
        The components of its reward are ``solved``, 1 in the turn that solves it, ``illegal`` and ``progress``.
        ``limits/turns`` in ``info`` says whether the turns ran out.

    Raises:
        ValueError: an argument is out of its range.
        EnvError: by `reset`, if the task has no prompt, or no board that can be solved.

    >>> env = sliding_puzzle()
    >>> state, prompt = env.reset({"prompt": "Which tile?", "board": [1, 0, 3, 2]})
    >>> step = env.step(state, "I slide 3.")
    >>> print(step.observation.strip(), step.reward["illegal"])
    3 cannot be slid.
    1 _
    3 2
    Move: -0.05
    >>> env.step(step.state, "2").reward
    {'solved': 1.0, 'illegal': 0.0, 'progress': 0.0}

    Source: shaping by differences of a potential leaves the best policies what they are: Ng, Harada, Russell, 1999,
    "Policy invariance under reward transformations".
    """
    if turns < 1:
        raise ArgumentError(f"sliding_puzzle: turns is {turns}; give at least 1")
    check_amount("sliding_puzzle", "illegal", illegal)
    check_amount("sliding_puzzle", "progress", progress)
    own = functools.partial(task, size=size, moves=moves, chat=chat)
    own(0, 0)  # it checks its arguments

    def reset(task: Task) -> tuple[_Play, Prompt]:
        prompt = prompt_of("sliding_puzzle", "sliding", task)
        board = _checked(task["board"])
        return _Play(board, turns, _distance(board), isinstance(prompt, str)), prompt

    def step(play: _Play, turn: str) -> Step:
        tile = last_number(turn)
        legal = tile in _beside(play.board)
        board = _after(play.board, tile) if tile is not None and legal else play.board
        solved, out = board == _goal(_side(board)), play.left == 1
        nearer = (_distance(play.board) - _distance(board)) / play.far
        parts = {"solved": float(solved), "illegal": 0.0 if legal else -illegal, "progress": progress * nearer}
        info = {"limits/turns": float(out and not solved)}
        if solved or out:
            return Step(play._replace(board=board, left=0), parts, info=info)
        wrong = "Name a tile by its number." if tile is None else f"{tile} cannot be slid."
        shown = said(_drawn(board) if legal else f"{wrong}\n{_drawn(board)}", play.plain)
        return Step(play._replace(board=board, left=play.left - 1), parts, False, shown, info)

    return Environment(reset, step, tasks=own)


def _goal(size: int) -> _Board:
    return (*range(1, size * size), 0)


def _side(board: Sequence[int]) -> int:
    return math.isqrt(len(board))


def _beside(board: _Board) -> list[int]:
    """The tiles that can be slid."""
    size = _side(board)
    row, column = divmod(board.index(0), size)
    cells = [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
    return [board[y * size + x] for y, x in cells if 0 <= y < size and 0 <= x < size]


def _after(board: _Board, tile: int) -> _Board:
    return tuple({tile: 0, 0: tile}.get(each, each) for each in board)


def _distance(board: _Board) -> int:
    """Rows and columns between each tile and its place, summed."""
    size = _side(board)
    places = ((*divmod(at, size), *divmod(tile - 1, size)) for at, tile in enumerate(board) if tile)
    return sum(abs(y - own_y) + abs(x - own_x) for y, x, own_y, own_x in places)


def _drawn(board: _Board) -> str:
    size = _side(board)
    width = len(str(len(board) - 1))
    cells = [str(tile or "_").rjust(width) for tile in board]
    return "\n".join(" ".join(cells[at : at + size]) for at in range(0, len(cells), size))


def _checked(given: object) -> _Board:
    """A task's board.

    Of all orders of the tiles, moves reach half: those with an even number of inversions, where the empty cell is in
    the last row. A move along a column changes that number by an odd one if the side is even.
    """
    board = tuple(given) if isinstance(given, Sequence) else ()
    size = _side(board)
    if size < 2 or size * size != len(board) or set(map(type, board)) != {int} or sorted(board) != list(range(size**2)):
        raise EnvError(
            f"sliding_puzzle: task['board'] is {given!r:.200}; give the tiles of a square board row by row, such as "
            "[1, 0, 3, 2], with 0 for the empty cell"
        )
    row = board.index(0) // size
    swaps = sum(a > b for at, b in enumerate(board) for a in board[:at] if a and b)
    if (swaps + (size - 1) * (size - 1 - row)) % 2:
        raise EnvError(f"sliding_puzzle: task['board'] is {given!r:.200}, which no moves solve; exchange two tiles")
    if board == _goal(size):
        raise EnvError(f"sliding_puzzle: task['board'] is {given!r:.200}, which is solved already; slide some tiles")
    return board
