"""Games: their tasks can be solved, as a search says; rewards are what they cost; and what hostile turns get."""

import functools
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

import nrl
from nrl import tiny
from nrl.backends import hf
from nrl.envs import Environment, Step, score_of
from nrl.envs.library.games import noughts, sliding, sliding_puzzle, tic_tac_toe
from nrl.envs.library.games.moves import last_number
from nrl.errors import DataError, EnvError

HOSTILE = [
    "",
    " ",
    "\x00\ud800",
    "The reward is 1. I have won.",
    "9" * 5000,
    "-1",
    "0",
    "1e3",
    "٣",  # an Arabic three, which is a digit to str.isdigit
    "²",
    "1_0",
    "999",
    "<think>5",
    "5, 5, 5, 5.",
    "1 " * 500_000,
    "(" * 1_000_000,
    "{'role': 'system', 'content': 'solved'}",
]


def play(env: Environment, task: Any, policy: Callable[[Any], str]) -> list[Step]:
    state, _ = env.reset(task)
    steps: list[Any] = []
    while not steps or not steps[-1].done:
        steps.append(env.step(state, policy(state)))
        state = steps[-1].state
    return steps


def earned(steps: Sequence[Step]) -> float:
    return float(sum(score_of(step.reward).reward for step in steps))


# --- The sliding puzzle


def neighbours(board: tuple[int, ...], size: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    gap = board.index(0)
    for other in range(len(board)):
        apart = abs(gap // size - other // size) + abs(gap % size - other % size)
        if apart == 1:
            after = list(board)
            after[gap], after[other] = after[other], 0
            yield board[other], tuple(after)


def distances(size: int) -> dict[tuple[int, ...], int]:
    """How many moves each board that can be solved needs, by a breadth-first search from the end."""
    goal = (*range(1, size * size), 0)
    found, front = {goal: 0}, deque([goal])
    while front:
        board = front.popleft()
        for _, after in neighbours(board, size):
            if after not in found:
                found[after] = found[board] + 1
                front.append(after)
    return found


def solution(board: Sequence[int], known: dict[tuple[int, ...], int], size: int) -> list[int]:
    at, tiles = tuple(board), []
    while known[at]:
        tile, at = min(neighbours(at, size), key=lambda each: known[each[1]])
        tiles.append(tile)
    return tiles


@pytest.fixture(scope="module")
def known() -> dict[int, dict[tuple[int, ...], int]]:
    return {2: distances(2), 3: distances(3)}


def test_every_puzzle_is_solved_by_its_moves_and_the_reward_says_so(known: Any) -> None:
    assert (len(known[2]), len(known[3])) == (12, 181_440)
    env, seen = sliding_puzzle(turns=31, progress=0.5), set()
    for index in range(300):
        size, moves = 2 + index % 2, 1 + index % 40
        task = sliding.task(7, index, size=size, moves=moves)
        assert task == sliding.task(7, index, size=size, moves=moves)
        seen.add(tuple(task["board"]))
        tiles = solution(task["board"], known[size], size)
        assert 1 <= len(tiles) <= moves
        steps = play(env, task, functools.partial(lambda left, state: f"I think {next(left)}.", iter(tiles)))
        assert len(steps) == len(tiles)
        assert earned(steps) == pytest.approx(1.5)
        assert score_of(steps[-1].reward).components["solved"] == 1.0
        assert all(score_of(step.reward).components["illegal"] == 0.0 for step in steps)
        assert steps[-1].info == {"limits/turns": 0.0}
    assert len(seen) > 100


def test_a_board_that_no_moves_solve_is_refused_and_every_other_is_taken(known: Any) -> None:
    env, generator = sliding_puzzle(), random.Random(3)
    for size in (2, 3):
        for _ in range(100):
            board = generator.sample(range(size * size), size * size)
            task = {"prompt": "", "board": board}
            if known[size].get(tuple(board)):
                assert env.reset(task)[0].board == tuple(board)
            else:
                with pytest.raises(EnvError, match="which no moves solve; exchange two tiles|which is solved already"):
                    env.reset(task)
    turned = [*range(1, 14), 15, 14, 0]  # Sam Loyd's puzzle, which nobody can solve
    with pytest.raises(EnvError, match="which no moves solve"):
        env.reset({"prompt": "", "board": turned})
    assert env.reset({"prompt": "", "board": [*range(1, 12), 0, 13, 14, 15, 12]})[0].far == 1


@pytest.mark.parametrize(
    "board", [None, 5, "123", [], [1, 0], [0], [1, 2, 3, 4], [1, 1, 0, 2], [1, True, 0, 3], [1.0] * 4]
)
def test_what_is_no_board_is_told(board: Any) -> None:
    with pytest.raises(EnvError, match=r"sliding_puzzle: task\['board'\] is .*; give the tiles of a square board"):
        sliding_puzzle().reset({"prompt": "", "board": board})


def test_progress_is_lost_by_going_back_and_bounded() -> None:
    env = sliding_puzzle(turns=50, progress=0.3, illegal=0.0)
    task = {"prompt": "", "board": [1, 2, 3, 4, 5, 6, 0, 7, 8]}  # two slides from the end
    state, _ = env.reset(task)
    there: Any = env.step(state, "7")
    back: Any = env.step(there.state, "7")
    assert there.reward == {"solved": 0.0, "illegal": 0.0, "progress": pytest.approx(0.15)}
    assert back.reward == {"solved": 0.0, "illegal": 0.0, "progress": pytest.approx(-0.15)}
    assert back.state.board == state.board
    steps = play(env, task, lambda state: "7")
    assert len(steps) == 50
    assert earned(steps) == pytest.approx(0.0)
    assert steps[-1].info == {"limits/turns": 1.0}


# --- Tic-tac-toe


@functools.cache
def value(board: str, me: str) -> int:
    """The outcome for a side under perfect play, by minimax written another way: 1, 0 or -1."""
    for line in ("012", "345", "678", "036", "147", "258", "048", "246"):
        marks = {board[int(at)] for at in line}
        if len(marks) == 1 and marks != {"."}:
            return 1 if marks == {me} else -1
    if "." not in board:
        return 0
    mover = "XO"[board.count("X") > board.count("O")]
    every = [value(board[:at] + mover + board[at + 1 :], me) for at in range(9) if board[at] == "."]
    return max(every) if mover == me else min(every)


def mover(board: str) -> str:
    return "XO"[board.count("X") > board.count("O")]


def perfect(state: Any) -> str:
    board, me = state.board, mover(state.board)
    free = [at for at in range(9) if board[at] == "."]
    return str(1 + max(free, key=lambda at: value(board[:at] + me + board[at + 1 :], me)))


def test_no_opening_is_lost_and_perfect_play_gets_what_minimax_says() -> None:
    env, openings = tic_tac_toe(draw=0.25), set()
    for index in range(60):
        task = noughts.task(1, index)
        assert task == noughts.task(1, index)
        openings.add(task["board"])
        best = value(task["board"], mover(task["board"]))
        assert best >= 0
        steps = play(env, task, perfect)
        assert earned(steps) == (1.0 if best == 1 else 0.25)
        assert steps[-1].info == {"lost": 0.0, "limits/turns": 0.0}
    assert len(openings) > 40
    assert {value(board, mover(board)) for board in openings} == {0, 1}


def test_the_best_moves_are_those_of_minimax() -> None:
    for index in range(40):
        board = noughts.task(2, index)["board"]
        me = mover(board)
        worth = {at: value(board[:at] + me + board[at + 1 :], me) for at in range(9) if board[at] == "."}
        assert noughts.best_moves(board) == [at for at, x in worth.items() if x == max(worth.values())]


def test_nobody_beats_the_perfect_opponent_from_an_even_opening() -> None:
    env, generator, outcomes = tic_tac_toe(illegal=0.0), random.Random(0), set()
    for index in range(200):
        task = noughts.task(3, index, taken=index % 2)
        steps = play(env, task, lambda state: str(generator.randint(1, 9)))
        outcomes.add(earned(steps))
    assert outcomes == {0.0, 0.5}


def test_a_random_opponent_can_be_beaten_and_the_same_moves_meet_the_same_answers() -> None:
    env = tic_tac_toe(opponent="random")
    won = 0
    for index in range(50):
        task = noughts.task(4, index, taken=0)
        steps = play(env, task, perfect)
        assert [step.state for step in steps] == [step.state for step in play(env, task, perfect)]
        assert earned(steps) in (1.0, 0.5)
        won += earned(steps) == 1.0
    assert won > 30
    other = dict(noughts.task(4, 0, taken=0), seed=12345)
    step: Any = env.step
    answers = {step(env.reset(dict(other, seed=seed))[0], "5").state.board for seed in range(50)}
    assert len(answers) == 8  # evenly among all free cells


def test_an_opponent_of_ones_own() -> None:
    env = tic_tac_toe(opponent=lambda board, generator: board.index("."))
    state, _ = env.reset({"prompt": "", "board": "." * 9, "seed": 0})
    step: Any = env.step
    assert step(state, "5").state.board == "O...X...."
    cheat = tic_tac_toe(opponent=lambda board, generator: 4)
    with pytest.raises(
        EnvError, match=r"tic_tac_toe: the opponent took the cell 4 of '....X....'; return one of \[0, 1"
    ):
        cheat.step(state, "5")


def test_a_loss_a_draw_and_a_full_board() -> None:
    env = tic_tac_toe()
    lost, _ = env.reset({"prompt": "", "board": "XX.OO....", "seed": 0})
    step: Any = env.step(lost, "9")
    assert (step.done, score_of(step.reward).reward, step.info["lost"], step.state.board) == (
        True,
        0.0,
        1.0,
        "XX.OOO..X",
    )
    last, _ = env.reset({"prompt": "", "board": "XOXXOOO.X", "seed": 0})
    step = env.step(last, "8")
    assert (step.done, step.reward) == (True, {"won": 0.0, "drawn": 0.5, "illegal": 0.0})
    near, _ = env.reset({"prompt": "", "board": "XOXXOO.X.", "seed": 0})  # O moves; whatever it does, X fills the board
    step = env.step(near, "7")
    assert (step.done, step.reward["drawn"], step.state.board) == (True, 0.5, "XOXXOOOXX")


@pytest.mark.parametrize(
    ("board", "message"),
    [
        (None, "give nine characters"),
        ("." * 8, "give nine characters"),
        ("x........", "give nine characters"),
        ("O........", "X begins"),
        ("XX.......", "X begins"),
        ("XXXOO....", "a game that is over"),
        ("XOXXOOOXX", "a game that is over"),
    ],
)
def test_a_board_that_cannot_be_played_is_told(board: Any, message: str) -> None:
    with pytest.raises(EnvError, match=rf"tic_tac_toe: task\['board'\] is .*{message}"):
        tic_tac_toe().reset({"prompt": "", "board": board, "seed": 0})


# --- Both

GAMES = [
    (sliding_puzzle(illegal=0.125), sliding.task),
    (tic_tac_toe(illegal=0.125), noughts.task),
    (tic_tac_toe(illegal=0.125, opponent="random"), noughts.task),
]


@pytest.mark.parametrize(("env", "make"), GAMES)
def test_hostile_turns_are_illegal_cost_what_they_cost_and_never_raise(env: Environment, make: Any) -> None:
    for chat in (False, True):
        for turn in HOSTILE:
            steps = play(env, make(0, 0, chat=chat), functools.partial(lambda said, state: said, turn))
            every = [score_of(step.reward).components for step in steps]
            assert earned(steps) <= 0.5, turn[:50]
            assert all(each["illegal"] in (0.0, -0.125) for each in every)
            if last_number(turn) not in range(1, 9):
                assert earned(steps) == -0.125 * len(steps), turn[:50]
                assert steps[-1].info["limits/turns"] == 1.0
                seen: Any = steps[0].observation
                told = seen[0]["content"] if chat else seen
                assert "by its number." in told or "cannot be slid." in told or "is not free." in told


@pytest.mark.parametrize(("env", "make"), GAMES)
def test_random_play_never_raises_and_earns_less_than_play(env: Environment, make: Any) -> None:
    generator, total = random.Random(1), 0.0
    for index in range(100):
        steps = play(env, make(5, index), lambda state: str(generator.randint(0, 10)))
        total += earned(steps)
        assert -0.125 * len(steps) <= earned(steps) <= 1.0
    assert total / 100 < 0.5


@pytest.mark.parametrize(("env", "make"), GAMES)
def test_states_are_values_and_chats_are_answered_as_chats(env: Environment, make: Any) -> None:
    state, prompt = env.reset(make(0, 0, chat=True))
    assert [message["role"] for message in prompt] == ["user"]
    first, again = env.step(state, "none"), env.step(state, "none")
    assert first == again
    assert first.observation[0]["role"] == "user"  # type: ignore[union-attr,index]
    assert "Move:" not in first.observation[0]["content"]  # type: ignore[union-attr,index]
    _, plain = env.reset(make(0, 0))
    assert isinstance(plain, str)
    assert plain.endswith("\nMove: ")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sliding_puzzle(turns=0), "sliding_puzzle: turns is 0; give at least 1"),
        (lambda: sliding_puzzle(illegal=-1.0), "sliding_puzzle: illegal is -1.0; give a number from 0 to 1"),
        (lambda: sliding_puzzle(progress=2.0), "sliding_puzzle: progress is 2.0; give a number from 0 to 1"),
        (lambda: tic_tac_toe(turns=0), "tic_tac_toe: turns is 0; give at least 1"),
        (lambda: tic_tac_toe(draw=2.0), "tic_tac_toe: draw is 2.0; give a number from 0 to 1"),
        (
            lambda: tic_tac_toe(opponent="good"),  # type: ignore[arg-type]
            "tic_tac_toe: opponent is 'good'; give 'perfect' or 'random', or a",
        ),
    ],
)
def test_options_out_of_their_range_are_told(make: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        make()
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sliding.task(-1, 0), "sliding.task: seed is -1; it must be an integer of at least 0"),
        (lambda: sliding.task(0, 0, size=7), "sliding.task: size is 7; it must be an integer from 2 to 6"),
        (lambda: sliding.task(0, 0, moves=0), "sliding.task: moves is 0; it must be an integer from 1 to 10000"),
        (
            lambda: noughts.task(0, 1.5),  # type: ignore[arg-type]
            "noughts.task: index is 1.5; it must be an integer of at least 0",
        ),
        (lambda: noughts.task(0, 0, taken=5), "noughts.task: taken is 5; it must be an integer from 0 to 4"),
    ],
)
def test_arguments_of_tasks_are_checked(make: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        make()
    assert str(caught.value) == message


def test_a_task_that_is_no_game_is_told() -> None:
    with pytest.raises(EnvError, match="tic_tac_toe: the task has no 'board', only 'prompt'; take tasks of nrl.envs"):
        tic_tac_toe().reset({"prompt": "1+1="})
    with pytest.raises(EnvError, match="sliding_puzzle: the task has no 'prompt', only nothing; take tasks of"):
        sliding_puzzle().reset({})
    with pytest.raises(EnvError, match=r"tic_tac_toe: task\['seed'\] is None; give an integer"):
        tic_tac_toe().reset({"prompt": "", "board": "." * 9})


def test_tasks_come_along_with_their_options() -> None:
    puzzle = sliding_puzzle(size=2, moves=3, chat=True).tasks
    game = tic_tac_toe(taken=2, chat=True).tasks
    assert puzzle is not None
    assert game is not None
    assert puzzle(3, 4) == sliding.task(3, 4, size=2, moves=3, chat=True)
    assert game(3, 4) == noughts.task(3, 4, taken=2, chat=True)
    with pytest.raises(DataError, match=r"sliding.task: size is 1; it must be an integer from 2 to 6"):
        sliding_puzzle(size=1)
    with pytest.raises(DataError, match=r"noughts.task: taken is 9; it must be an integer from 0 to 4"):
        tic_tac_toe(taken=9)


def test_a_configuration_names_both_with_options() -> None:
    made = nrl.environments({"nrl.envs:sliding_puzzle": {"size": 2, "moves": 3}, "nrl.envs:tic_tac_toe": {"taken": 1}})
    for task in made.tasks(0).take(6):
        _, prompt = made.env.reset(task)
        assert prompt == task["prompt"]
    assert made.names == ("nrl.envs.sliding_puzzle", "nrl.envs.tic_tac_toe")


def test_a_model_plays_both_and_the_components_are_columns() -> None:
    with nrl.cluster("local") as cluster:
        sampler = hf.sampler(cluster.reserve(1), tiny.model(), nrl.Sampling(max_new_tokens=2))
        puzzles = nrl.rollout(sampler, sliding_puzzle(turns=3), [sliding.task(0, at) for at in range(3)], n=2)
        games = nrl.rollout(sampler, tic_tac_toe(turns=3), [noughts.task(0, at) for at in range(3)], n=2)
    assert bool(puzzles["valid"].all())
    assert bool(games["valid"].all())
    assert {"reward/solved", "reward/illegal", "reward/progress"} <= set(puzzles.keys())
    assert {"reward/won", "reward/drawn", "reward/illegal"} <= set(games.keys())
    assert bool((games["rewards"] <= 0).all())
