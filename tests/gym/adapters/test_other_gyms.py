"""Environments of TextArena and of Aviary, each in processes of an executable that has the package."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

import nrl
from nrl.envs import Environment, Turn
from nrl.envs.tools import ToolCall
from nrl.gym.adapters.aviary import fhaviary
from nrl.gym.adapters.textarena import textarena
from tests.rollout.scripted import Scripted

pytestmark = pytest.mark.timeout(600)  # an environment may have to be built
ADAPTERS = Path(nrl.__file__).parent / "gym" / "adapters"


@pytest.fixture(scope="module")
def game() -> Environment:
    return textarena(game="GuessTheNumber-v0", workers=2)


@pytest.fixture(scope="module")
def aviary() -> Environment:
    return fhaviary(workers=1)


@pytest.mark.parametrize("name", ["textarena", "aviary"])
def test_a_wrapper_has_at_most_60_lines(name: str) -> None:
    assert len((ADAPTERS / f"{name}.py").read_text().splitlines()) <= 60


def test_a_game_is_won_by_halving(game: Environment) -> None:
    """Two games at once in each process, and each is found by what it says alone."""

    async def play(seed: int) -> tuple[float, list[str]]:
        state, prompt = await game.reset({"seed": seed})
        assert "between 1 and 20" in prompt
        low, high, said = 1, 20, list[str]()
        for _ in range(10):
            guess = (low + high) // 2
            state, reward, done, observation, info = await game.step(state, Turn(f"I guess [{guess}]."))  # type: ignore[misc]
            if done:
                assert info == {"invalid_move": 0}
                return float(reward), said
            said.append(str(observation))
            low, high = (guess + 1, high) if "higher" in observation else (low, guess - 1)
        raise AssertionError(said)

    async def every() -> list[tuple[float, list[str]]]:
        return list(await asyncio.gather(*map(play, [1, 2, 3, 4, 1])))

    found = asyncio.run(every())
    assert [reward for reward, _ in found] == [1] * 5
    assert found[0] == found[4]
    assert len({tuple(said) for _, said in found}) > 1


def test_what_a_game_draws_does_not_depend_on_its_neighbours() -> None:
    """The ice of FrozenLake is drawn from the process's generator."""
    env = textarena(game="FrozenLake-v0-random", workers=1)

    async def play(task: Any) -> list[Any]:
        state, prompt = await env.reset(task)
        said = [prompt]
        for turn in ["[right]", "[down]", "junk", "[right]", "[left]"]:
            state, _, done, observation, _ = await env.step(state, Turn(turn))  # type: ignore[misc]
            if done:
                break
            said.append(observation)
        return said

    async def every(seeds: list[int]) -> list[Any]:
        return list(await asyncio.gather(*(play({"seed": seed}) for seed in seeds)))

    together = asyncio.run(every([5, 6, 7]))
    assert together == [asyncio.run(every([seed]))[0] for seed in (5, 6, 7)]


def test_a_rollout_and_hostile_turns(game: Environment) -> None:
    tasks = [game.tasks(0, index) for index in range(2)]  # type: ignore[misc]
    batch = nrl.rollout(Scripted(["[5]", "", "x" * 5000, "[[[", "[99999999999999999999]"] * 20), game, tasks, n=4)
    assert batch["valid"].all()
    assert ((batch["rewards"] >= 0) & (batch["rewards"] <= 1)).all()
    assert {"env/invalid_move"} <= set(batch.keys())


def test_a_game_that_is_not_there() -> None:
    env = textarena(game="Nonsense-v0", workers=1)
    with pytest.raises(Exception, match="Nonsense-v0"):
        asyncio.run(env.reset({"seed": 1}))
    two = textarena(game="TicTacToe-v0", workers=1)
    with pytest.raises(AssertionError, match="The number of players has to be 2, received 1"):
        asyncio.run(two.reset({"seed": 1}))


def test_tools_of_aviary(aviary: Environment) -> None:
    async def play(*turns: Turn) -> list[Any]:
        state, messages, tools = await aviary.reset({"task": "cats"})
        assert messages == [{"role": "user", "content": "Write a 5 word story via print_story about cats"}]
        assert [tool.name for tool in tools] == ["print_story", "cast_float", "cast_int", "get_random_int"]
        assert tools[0].schema["function"]["parameters"]["required"] == ["story"]
        found = []
        for turn in turns:
            taken = await aviary.step(state, turn)  # type: ignore[misc]
            found.append((taken.reward, taken.done, [each["content"] for each in taken.observation]))
            state = taken.state
        assert aviary.close is not None
        await aviary.close(state)
        return found

    def calling(name: str, **arguments: Any) -> Turn:
        return Turn("", calls=[ToolCall(name, arguments)])

    found = asyncio.run(
        play(
            Turn("hello"),
            calling("cast_int", x=3.5),
            calling("cast_int", y=1),
            calling("gone"),
            calling("cast_int", function_name="cast_int", id=1),
            calling("print_story", story="One two three four five"),
        )
    )
    assert [done for _, done, _ in found] == [False, False, False, False, False, True]
    assert [reward for reward, _, _ in found] == [0, 0, 0, 0, 0, 1]
    assert found[1][2] == ["3"]
    assert "unexpected keyword argument 'y'" in found[2][2][0]
    assert "gone" in found[3][2][0]
    assert "unexpected keyword argument 'function_name'" in found[4][2][0]


def test_the_names_of_the_resolver() -> None:
    made = nrl.environments({"textarena": {"game": "TowerOfHanoi-v0"}})
    assert made.tasks(3).take(2) == [{"seed": 3_000_009}, {"seed": 3_000_010}]
    assert nrl.environments("fhaviary", [{"task": "dogs"}], chat=False).names == ("fhaviary",)
