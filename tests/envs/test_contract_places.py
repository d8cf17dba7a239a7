"""One contract, wherever a verifier or an environment runs: plainly, `pooled`, on a mesh by `on`, behind HTTP.

The same scores, bit for bit, and the same errors by their kind.
"""

import asyncio
import inspect
import pickle
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import nrl
from nrl.envs import Environment, Step, Trace, Turn, number, score_of, single_turn, weighted
from nrl.errors import EnvError, ExecutableError, ShippingError
from nrl.runtime import Cluster, process
from tests.envs.places import EVERYTHING, FAILURES, TEXTS, VERIFIERS, compared, failing
from tests.meshes import end
from tests.processes import settled
from tests.rollout.scripted import TASKS, Scripted

Transform = Callable[[Any], Any]
LIMIT = 4.0  # seconds that a call may take: more than one needs on a busy machine


@pytest.fixture(
    scope="module",
    params=["pooled", "on threads", "served", "served and pooled", pytest.param("on Ray", marks=pytest.mark.ray)],
)
def place(request: pytest.FixtureRequest) -> Iterator[tuple[str, Transform]]:
    """A transform of two workers, whose calls take `LIMIT` seconds at most."""
    kind = request.param
    if kind == "pooled":
        yield kind, lambda f: nrl.pooled(f, workers=2, timeout=LIMIT)
    elif kind == "on threads":
        with nrl.cluster("local") as here:
            yield kind, nrl.on(here.reserve(2).mesh(name="judges"), timeout=LIMIT)
    elif kind.startswith("served"):
        with ExitStack() as servers:

            def behind_http(f: Any) -> Any:
                inner = nrl.pooled(f, workers=2, timeout=LIMIT) if kind == "served and pooled" else f
                limit = None if kind == "served and pooled" else LIMIT
                return nrl.remote(servers.enter_context(nrl.serve(inner, timeout=limit)))

            yield kind, behind_http
    else:
        cluster: Cluster = request.getfixturevalue("on_ray")
        mesh = cluster.reserve(2).mesh(executable="system", name="judges")
        yield kind, nrl.on(mesh, timeout=LIMIT)
        end(mesh)


@pytest.fixture(scope="module")
def apart(place: tuple[str, Transform]) -> Environment:
    """Everything, there."""
    moved: Environment = place[1](EVERYTHING)
    return moved


SERVED = {"own": (EnvError, "^Refusal: refused$"), "exit": (RuntimeError, "^SystemExit: 3$")}


def value(found: Any) -> Any:
    async def awaited() -> Any:
        return await found

    return asyncio.run(awaited()) if inspect.isawaitable(found) else found


def verify(env: Environment, verifier: str, trace: Any, **task: Any) -> Any:
    made: Any = env.verifier
    return value(made({"prompt": "?", "answer": "3", "seed": 5, "verifier": verifier, **task}, trace))


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_verdicts_are_the_same_bit_for_bit(apart: Environment, verifier: str) -> None:
    task = {"big": "\0\ud800" * 500_000} if verifier == "hostile" else {}
    traces = [Trace("1+2=", [text]) for text in TEXTS]
    for given in [traces] if verifier == "compared" else [*traces, Trace("1+2=", ["3", "4"], ("no",), truncated=True)]:
        here, there = (verify(env, verifier, given, **task) for env in (EVERYTHING, apart))
        assert type(here) is type(there)
        assert pickle.dumps(here) == pickle.dumps(there)


def equal(plain: nrl.Batch, moved: nrl.Batch) -> None:
    def of(batch: nrl.Batch) -> dict[Any, list[bytes]]:
        columns: Any = batch.items(include_nested=True, leaves_only=True)
        return {
            name: [x.numpy().tobytes() for x in (column.unbind() if column.is_nested else [column])]
            for name, column in columns
        }

    assert of(plain) == of(moved)


class Keyed(Scripted):
    """The answer depends on the prompt and its seed, and not on which prompts come together."""

    def generate(self, prompts: Any, *, seeds: Any = None, sampling: Any = None) -> Any:
        asked = zip(prompts, seeds, strict=True)
        return Scripted([self.texts[(seed + len(prompt)) % len(self.texts)] for prompt, seed in asked]).generate(
            prompts
        )


@pytest.mark.parametrize("kind", ["game", "judged"])
def test_episodes_are_the_same_bit_for_bit(apart: Environment, kind: str) -> None:
    """Twelve texts at most: three turns of four episodes, whose states could be neither sent nor shared."""

    def played(env: Environment) -> nrl.Batch:
        tasks = [{**task, "kind": kind, "verifier": "plain"} for task in TASKS]
        return nrl.rollout(Keyed(["3", "44", "555", "6", "77", "8", "9", "10", "3", "12", "19", "4"]), env, tasks, n=2)

    plain = played(EVERYTHING)
    assert plain["valid"].all()
    equal(plain, played(apart))


def test_tools_are_shown_and_called_there(apart: Environment) -> None:
    def played(env: Environment) -> list[Any]:
        state, prompt, tools = value(env.reset({"kind": "tools", "prompt": "1+2="}))
        first = value(env.step(state, Turn("3")))
        second = value(env.step(first.state, Turn("44")))
        return [prompt, [tool.schema for tool in tools], first[1:], second[1:]]

    assert played(apart) == played(EVERYTHING)


def test_an_episode_stays_in_one_thread(place: tuple[str, Transform]) -> None:
    """Such as a database handle of the standard library needs."""

    def reset(task: Any) -> Any:
        return sqlite3.connect(":memory:"), "?"

    def step(state: sqlite3.Connection, turn: Turn) -> Step:
        return Step(state, state.execute("select 4").fetchone()[0], False, "?")

    env = place[1](Environment(reset, step, sqlite3.Connection.close))

    async def play() -> list[float]:
        state, _ = await env.reset({})
        rewards = [(await env.step(state, Turn())).reward for _ in range(4)]
        await env.close(state)
        return rewards

    assert asyncio.run(play()) == [4, 4, 4, 4]


def test_a_function_knows_its_mesh(place: tuple[str, Transform]) -> None:
    async def where(task: Any, trace: Trace) -> float:
        assert process().mesh == task["mesh"]
        return float(process().size)

    kind, transform = place
    on_mesh = kind.startswith("on ")
    assert value(transform(where)({"mesh": "judges" if on_mesh else ""}, Trace())) == (2.0 if on_mesh else 1.0)


def test_a_call_that_is_given_up_is_gone(place: tuple[str, Transform], tmp_path: Path) -> None:
    """Its process gets no other call; a thread is left behind."""

    def slow(task: Any, trace: Trace) -> float:
        if task["seconds"]:
            Path(task["file"] + ".begun").touch()
            time.sleep(task["seconds"])
            Path(task["file"]).touch()
        return 1.0

    kind, transform = place
    verify = transform(slow)

    async def give_up() -> float:
        await verify({"seconds": 0.0}, Trace())  # it has started
        late = asyncio.ensure_future(verify({"seconds": 1.2, "file": str(tmp_path / "over")}, Trace()))
        while not (tmp_path / "over.begun").exists():
            await asyncio.sleep(0.01)
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        return float(await verify({"seconds": 0.0}, Trace()))

    assert asyncio.run(give_up()) == 1.0
    if kind in ("on threads", "served"):
        assert not settled(lambda: not (tmp_path / "over").exists(), 60)
    else:
        time.sleep(1.2)
        assert not (tmp_path / "over").exists()


def test_what_a_verifier_remembers_is_forgotten_there(place: tuple[str, Transform]) -> None:
    """Also that of an environment, and of a composition; a server keeps its memory."""
    seen = list[str]()

    def fresh(task: Any, trace: Trace) -> float:
        seen.append(trace.text)
        return float(seen.count(trace.text))

    fresh.forget = seen.clear  # type: ignore[attr-defined]
    env = Environment(lambda task: (0, "?"), lambda state, turn: Step(state), verifier=fresh)
    kind, transform = place
    moved = [transform(fresh), transform(env).verifier, weighted(part=(1.0, transform(fresh)), other=(0.0, number))]
    for verify in moved:
        asked = [score_of(value(verify({"answer": "1"}, Trace("", ["a"])))).reward for _ in range(3)]
        assert asked == [1.0, 2.0, 3.0]
        if kind.startswith("served"):
            assert not hasattr(verify, "forget")
            seen.clear()
        else:
            value(verify.forget())
            assert score_of(value(verify({"answer": "1"}, Trace("", ["a"])))).reward == 1.0
            value(verify.forget())


def test_a_group_is_scored_together(place: tuple[str, Transform]) -> None:
    def scored(verifier: Any) -> nrl.Batch:
        return nrl.rollout(Scripted(["3", "44", "5", "6666"]), single_turn(verifier), TASKS, n=2)

    assert scored(compared)["rewards"].tolist() == [0.5, 1.0, 0.25, 1.0]
    equal(scored(compared), scored(place[1](compared)))


@pytest.mark.parametrize("does", FAILURES)
def test_errors_are_the_same(place: tuple[str, Transform], apart: Environment, does: str) -> None:
    """Over HTTP those that only this program has are told of, and nothing ends whoever called."""
    served = place[0].startswith("served")
    kind, said = (SERVED if served else FAILURES).get(does, FAILURES[does])
    with pytest.raises(kind, match=said) as caught:
        verify(apart, "failing", Trace("", ["3"]), does=does)
    assert type(caught.value).__name__ == kind.__name__
    assert getattr(caught.value, "code", None) == (None if served else {"own": 7, "exit": 3}.get(does))
    assert verify(apart, "failing", Trace("", ["3"])) == 1.0


def test_rows_that_fail_are_the_same(place: tuple[str, Transform]) -> None:
    """Of five tasks one raises, one is late, one has a status that does not exist."""
    tasks = [
        {"prompt": "?", "answer": "3", "seconds": 8.0, "does": x} for x in (None, "raise", "sleep", "status", None)
    ]

    def scored(verifier: Any, **options: Any) -> nrl.Batch:
        with pytest.warns(UserWarning, match="3 of 5 episodes failed"):
            return nrl.rollout(Scripted(["3", "3", "3", "3", "4"]), single_turn(verifier, **options), tasks)

    plain, moved = scored(failing, timeout=LIMIT), scored(place[1](failing), timeout=None)
    assert plain["valid"].tolist() == [True, False, False, False, True]
    assert plain["rewards"][plain["valid"]].tolist() == [1.0, 0.0]
    equal(plain, moved)


def test_an_interrupt_elsewhere_is_a_row_that_fails(place: tuple[str, Transform]) -> None:
    tasks = [{"prompt": "?", "answer": "3", "does": does} for does in (None, "interrupt", "cancel")]
    with pytest.warns(UserWarning, match="2 of 3 episodes failed"):
        batch = nrl.rollout(Scripted(["3", "3", "3"]), single_turn(place[1](failing)), tasks)
    assert batch["valid"].tolist() == [True, False, False]


@pytest.mark.parametrize("judged", [True, False])
def test_an_executable_that_is_not_there_ends_the_rollout(apart: Environment, judged: bool) -> None:
    """No row is to blame, and none would be better."""
    verifier: Any = apart.verifier
    tasks = [{"prompt": "?", "answer": "3", "kind": "game", "verifier": "failing", "does": x} for x in (None, "need")]
    with pytest.raises(ExecutableError, match="^no lock$"):
        nrl.rollout(Scripted(["3"] * 6), apart if judged else single_turn(verifier), tasks)


def test_late_is_a_timeout_and_said_so(place: tuple[str, Transform], apart: Environment) -> None:
    gone, give = (
        ("", "the environment another timeout") if place[0] == "served" else (", and its .*", r"\w+\(timeout=\)")
    )
    with pytest.raises(TimeoutError, match=f"did not return within 4 s{gone}; mend it, or give {give}"):
        verify(apart, "failing", Trace("", ["3"]), does="sleep", seconds=12.0)
    assert verify(apart, "failing", Trace("", ["3"])) == 1.0


def test_what_never_lets_go_is_gone(place: tuple[str, Transform], apart: Environment) -> None:
    kind, _ = place
    if kind in ("on threads", "served"):
        pytest.skip("a thread cannot be killed")
    with pytest.raises(TimeoutError, match=r"did not return within 4 s, and its (process|helper) was killed"):
        verify(apart, "failing", Trace("", ["3"]), does="hold")
    with pytest.raises(
        EnvError, match=r"\(Environment\): its (process ended with 4|helper is gone: .*\brank \d of mesh)"
    ):
        verify(apart, "failing", Trace("", ["3"]), does="die")
    with pytest.raises(ShippingError, match="lock"):
        verify(apart, "failing", Trace("", ["3"]), does="lock")
    assert verify(apart, "failing", Trace("", ["3"])) == 1.0


@pytest.mark.parametrize("given", [3, None])
def test_what_is_neither_is_an_error(place: tuple[str, Transform], given: Any) -> None:
    with pytest.raises(EnvError, match=f"{given} is neither a verifier nor an environment; give a function, or an Env"):
        place[1](given)


def test_the_seconds_of_a_mesh_are_positive(slots: Any) -> None:
    with pytest.raises(ValueError, match="on: timeout is 0; it must be positive, or None"):
        nrl.on(slots[:1].mesh(), timeout=0)
