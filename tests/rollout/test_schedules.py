"""Episodes that are bounded, cut, left out or carried on, over an engine whose requests take time."""

import asyncio
import gc
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

import nrl
from benchmarks._engine import SimulatedEngine
from nrl import data
from nrl.algos import advantages
from nrl.backends.sampling.pool import EnginePool
from nrl.batch.metrics import finalize
from nrl.envs import Environment, Step, of_group, single_turn
from nrl.errors import BatchError, DataError, EnvError, GenerationError
from nrl.rollout import sampler_client
from nrl.rollout.scheduler import EpisodeSchedule, EpisodeScheduler
from nrl.run.checkpoint import Checkpoints
from tests.clocks import MINUTE, Clock
from tests.processes import settled
from tests.rollout.scripted import Scripted

FAST, SLOW = 0.01, 3600.0  # seconds


class Game:
    """Some turns; it counts what is open, and which states were closed.

    The step of some turns sleeps, as the task says in ``sleeps``: until the game is woken, or that event is set.
    """

    def __init__(self, turns: int = 1) -> None:
        self.turns, self.opened, self.closed, self.most = turns, 0, list[int](), 0
        self.asleep, self.wakes = 0, threading.Event()
        self._guard = threading.Lock()
        GAMES.append(self)

    def reset(self, task: Any) -> Any:
        with self._guard:
            self.opened += 1
            self.most = max(self.most, self.opened - len(self.closed))
            return (self.opened, 0, task), task["prompt"]

    def step(self, state: Any, turn: str) -> Step:
        number, turns, task = state
        if turns in (sleeps := task.get("sleeps", {})):
            with self._guard:
                self.asleep += 1
            (sleeps[turns] or self.wakes).wait()
        done = turns + 1 == self.turns
        return Step((number, turns + 1, task), float(done), done, None if done else "+")

    def close(self, state: Any) -> None:
        with self._guard:
            self.closed.append(state[0])

    @property
    def env(self) -> Environment:
        return Environment(self.reset, self.step, self.close, timeout=None)

    @property
    def each_closed_once(self) -> bool:
        return sorted(self.closed) == list(range(1, self.opened + 1))


GAMES: list[Game] = []


@pytest.fixture(autouse=True)
def nobody_sleeps_on() -> Iterator[None]:
    yield
    for game in GAMES:
        game.wakes.set()
    GAMES.clear()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def under_way(episodes: int, groups: int) -> bool:
    """Whether so many episodes have not ended, and so many groups; asked on their loop."""
    tasks = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]  # type: ignore[union-attr]
    return (tasks.count("EpisodeScheduler._one"), tasks.count("EpisodeScheduler._whole")) == (episodes, groups)


@pytest.fixture
def engine() -> Iterator[Callable[..., SimulatedEngine]]:
    made: list[SimulatedEngine] = []

    def make(seconds: Any = lambda seed: FAST, slots: int = 64) -> SimulatedEngine:
        made.append(SimulatedEngine(slots, seconds))
        return made[-1]

    yield make
    for each in made:
        each.close()


def tasks(**of: dict[str, Any]) -> Any:
    """Tasks by their number; ``_3={...}`` has more of task 3."""
    return nrl.data.counting(lambda index: {"prompt": "1+1=", "index": index, **of.get(f"_{index}", {})})


class Slow:
    """The requests that come to an engine, by their number: these are slow."""

    def __init__(self, *places: int, seconds: float = SLOW) -> None:
        self.asked, self.places, self.seconds = 0, places, seconds

    def __call__(self, seed: int) -> float:
        self.asked += 1
        return self.seconds if self.asked - 1 in self.places else FAST


# --- a deadline


def test_what_is_not_over_by_the_deadline_is_cut_and_counted(engine: Any, clock: Clock) -> None:
    """Of two groups of three, the second loses the row that the engine never answers."""
    game, taken = Game(turns=2), engine(Slow(4))
    stream = nrl.cut(nrl.rollouts(taken, game.env, tasks(), n=3), MINUTE)
    with clock.passes(MINUTE, once=lambda: under_way(1, 1)):
        [batch] = nrl.batched(stream, 2).take(1)
    assert batch["cut"].tolist() == [False, False, False, False, True, False]
    assert batch["valid"].tolist() == (~batch["cut"]).tolist()
    assert not batch["loss_mask"][4].any()
    assert nrl.envs.STATUSES[int(batch["status"][4])] == "timeout"
    assert batch["sampled"].tolist() == [4, 4, 4, 4, 0, 4]  # two turns of two tokens; the slow request gave none
    found = finalize(nrl.summary(batch))
    assert {name: found[name] for name in found if name.startswith("cut")} == {
        "cut": 1,
        "cut/length": 0,
        "cut/groups": 0.5,
        "cut/share": pytest.approx(1 / 3),
    }
    assert found["tokens/sampled"] == 20 == found["tokens/trained"]
    assert game.each_closed_once


def test_tokens_of_turns_before_the_cut_are_counted(engine: Any, clock: Clock) -> None:
    game = Game(turns=3)
    stream = nrl.cut(nrl.rollouts(engine(), game.env, tasks(_1={"sleeps": {1: None}}), n=2), MINUTE)
    with clock.passes(MINUTE, once=lambda: under_way(2, 1) and game.asleep == 2):
        first, second = stream.take(2)
    assert first["cut"].tolist() == [False, False]
    assert second["cut"].tolist() == [True, True]
    assert second["sampled"].tolist() == [4, 4]  # two turns of two tokens
    found = finalize(nrl.summary(second))
    assert (found["cut/length"], found["tokens/cut"], found["tokens/sampled"]) == (4, 8, 8)
    assert found["tokens/invalid"] == found["tokens/trained"] == 0
    assert game.each_closed_once


def test_an_engine_forgets_what_was_cut(engine: Any, clock: Clock) -> None:
    slow = Slow(0, 1)
    taken = engine(slow, slots=2)  # they hold all slots
    stream = nrl.cut(nrl.rollouts(taken, Game().env, tasks(), n=2), MINUTE)
    with clock.passes(MINUTE, once=lambda: under_way(2, 1) and slow.asked == 2):
        assert stream.take(1)[0]["cut"].all()
    assert not stream.take(1)[0]["cut"].any()


def test_a_deadline_that_nobody_misses_changes_nothing(sampler: EnginePool) -> None:
    def batch(change: Callable[..., Any]) -> nrl.Batch:
        return nrl.batched(change(nrl.rollouts(sampler, Game(turns=2).env, data.tasks("arithmetic"), n=2)), 3).take(1)[
            0
        ]

    plain, limited = batch(lambda stream: stream), batch(lambda stream: nrl.cut(stream, MINUTE))
    assert set(limited.keys()) - set(plain.keys()) == {"cut"}
    for name in plain.keys():
        assert torch.equal(plain[name].nan_to_num(-1.0), limited[name].nan_to_num(-1.0)), name


def test_a_verdict_over_a_group_is_cut_too(engine: Any, clock: Clock) -> None:
    inside, over = threading.Event(), threading.Event()

    @of_group
    async def compare(task: Any, traces: Any) -> list[float]:
        if task["index"]:
            inside.set()
            over.wait()
        return [1.0 for _ in traces]

    stream = nrl.cut(nrl.rollouts(engine(), single_turn(compare, timeout=None), tasks(), n=2), MINUTE)
    with clock.passes(MINUTE, once=lambda: under_way(0, 1) and inside.is_set()):
        first, second = stream.take(2)
    over.set()
    assert first["cut"].tolist() == [False, False]
    assert second["cut"].tolist() == [True, True]


def test_takes_that_are_cut_whole_end_the_stream(engine: Any) -> None:
    stream = nrl.cut(nrl.rollouts(engine(lambda seed: SLOW), Game().env, tasks(), n=2, patience=2), 0.1)
    stream.take(1)  # without a warning: it was asked for
    with pytest.raises(EnvError, match=r"all rows of 2 rollouts in a row failed.*cut: it was not over after 0.1 s"):
        stream.take(1)


@pytest.mark.parametrize(("asleep", "rows"), [(1, 256), (40, 80)])
def test_what_does_not_return_holds_nobody_up(engine: Any, clock: Clock, asleep: int, rows: int) -> None:
    """They sleep in plain functions: the others end, and so does the take, by the deadline."""
    game = Game()
    slow = {f"_{index}": {"sleeps": {0: None}} for index in range(asleep)}
    stream = nrl.batched(nrl.cut(nrl.rollouts(engine(), game.env, tasks(**slow), n=1), MINUTE), rows)
    with clock.passes(MINUTE, once=lambda: under_way(asleep, asleep)):
        [batch] = stream.take(1)
    assert batch["cut"].tolist() == [True] * asleep + [False] * (rows - asleep)
    game.wakes.set()
    assert settled(lambda: not game.each_closed_once, MINUTE) is False


@pytest.mark.parametrize("later", [False, True])
def test_states_of_resets_that_were_cut_are_closed(engine: Any, later: bool) -> None:
    opened, closed = list[int](), list[int]()

    def plain(task: Any) -> Any:
        time.sleep(0.01)  # so that a cut comes within some of them
        opened.append(task["index"])
        return task["index"], "1+1="

    async def coroutine(task: Any) -> Any:
        await asyncio.sleep(0.002 * task["index"])
        opened.append(task["index"])
        return task["index"], "1+1="

    env = Environment(coroutine if later else plain, lambda state, turn: Step(state), closed.append)
    for seconds in (0.1, 0.15, 0.2):
        nrl.batched(nrl.cut(nrl.rollouts(engine(), env, tasks(), n=1), seconds), 200).take(1)
    assert settled(lambda: sorted(opened) != sorted(closed), MINUTE) is False


def test_a_verdict_over_a_group_is_over_those_that_ended(engine: Any, clock: Clock) -> None:
    seen: list[int] = []

    @of_group
    def shortest(task: Any, traces: Any) -> list[float]:
        seen.append(len(traces))
        return [1.0 for _ in traces]

    stream = nrl.oversample(nrl.rollouts(engine(Slow(0)), single_turn(shortest), tasks(), n=3), 2)
    assert nrl.cut(stream, MINUTE).take(1)[0]["rewards"].tolist() == [1.0, 1.0]
    late = nrl.cut(nrl.rollouts(engine(Slow(0)), single_turn(shortest), tasks(), n=3), MINUTE)
    with clock.passes(MINUTE, once=lambda: under_way(1, 1)):
        assert late.take(1)[0]["cut"].all()  # there was no time for a verdict
    assert seen == [2]


def test_groups_that_are_dropped_leave_their_numbers(engine: Any, clock: Clock) -> None:
    game = Game(turns=2)
    groups = nrl.rollouts(engine(), game.env, tasks(_0={"sleeps": {0: None}}), n=3)
    kept = nrl.filtered(nrl.cut(nrl.oversample(groups, 2), MINUTE), lambda group: not bool(group["cut"].any()))
    with clock.passes(MINUTE, once=lambda: under_way(3, 1) and game.asleep == 3):
        [group] = kept.take(1)
    found = finalize(nrl.summary(group))
    assert (found["cut"], found["left_out"]) == (2, 2)
    assert found["tokens/sampled"] == found["tokens/trained"] + found["tokens/dropped"]


# --- some of a group


def test_the_first_of_a_group_are_kept(engine: Any) -> None:
    """Five of two turns each; the sleepers have sampled one turn of two tokens when they are left out."""
    game = Game(turns=2)
    stream = nrl.oversample(nrl.rollouts(engine(Slow(5, 6)), game.env, tasks(), n=5), 3)
    [group] = stream.take(1)
    assert len(group) == 3
    assert group["valid"].all()
    assert group["left_out"].tolist() == [2, 0, 0]
    assert group["dropped_tokens/left_out"].tolist() == [4, 0, 0]
    assert (group["episode_ids"] % 2**20).tolist() == [2, 3, 4]  # those whose second request was not slow
    found = finalize(nrl.summary(group))
    assert (found["left_out"], found["tokens/dropped"], found["tokens/sampled"]) == (2, 4, 16)
    assert game.each_closed_once
    assert torch.isfinite(advantages(group)["advantages"]).all()


@pytest.mark.parametrize("first", ["cut", "oversample"])
def test_cut_episodes_are_kept_only_where_there_are_too_few_others(engine: Any, clock: Clock, first: str) -> None:
    groups = nrl.rollouts(engine(Slow(0, 1)), Game().env, tasks(), n=4)
    cut = partial(nrl.cut, seconds=MINUTE)
    changed = nrl.oversample(cut(groups), 3) if first == "cut" else cut(nrl.oversample(groups, 3))
    with clock.passes(MINUTE, once=lambda: under_way(2, 1)):
        [group] = changed.take(1)
    assert (group["episode_ids"] % 2**20).tolist() == [0, 2, 3]
    assert group["cut"].tolist() == [True, False, False]


def test_failed_episodes_are_kept_only_where_there_are_too_few_others(engine: Any) -> None:
    count = iter(range(100))

    def verdict(task: Any, trace: Any) -> float:
        return 1.0 / (next(count) % 4 != 3 if task["index"] == 0 else 0)

    stream = nrl.oversample(nrl.rollouts(engine(), single_turn(verdict), tasks(), n=4), 3)
    with pytest.warns(UserWarning, match="3 of 6 episodes failed"):
        first, second = stream.take(2)
    assert first["valid"].tolist() == [True] * 3
    assert second["valid"].tolist() == [False] * 3


# --- groups that are carried on


def test_groups_that_end_first_come_first_and_others_are_carried_on(engine: Any) -> None:
    """The second group's step sleeps; what it has sampled stays, and its next turn has the next weights."""
    game, taken, woken, over = Game(turns=2), engine(), threading.Event(), threading.Event()
    later = {f"_{index}": {"sleeps": {0: over}} for index in (3, 4)}  # they end when the second has
    stream = nrl.partial(nrl.rollouts(taken, game.env, tasks(_1={"sleeps": {0: woken}}, **later), n=2), 1)
    assert [int(group["group_ids"][0]) for group in stream.take(2)] == [0, 2]
    taken.version = 1

    def watch() -> None:
        settled(lambda: len(game.closed) < 6, MINUTE)
        over.set()

    watching = threading.Thread(target=watch)
    watching.start()
    woken.set()
    groups = stream.take(2)
    watching.join()
    assert [int(group["group_ids"][0]) for group in groups][:1] == [1]
    carried, new = groups
    assert carried["version"].tolist() == [0, 0]
    assert carried["versions"][carried["loss_mask"]].tolist() == [0, 0, 1, 1] * 2
    assert new["version"].tolist() == [1, 1]
    assert game.most >= 6
    assert stream.state()["groups"] == 5


def test_groups_that_begin_early_come_in_order(engine: Any) -> None:
    game, taken = Game(), engine(Slow(0, seconds=0.6))
    stream = nrl.refill(nrl.rollouts(taken, game.env, tasks(), n=2), 2)
    first = stream.take(2)
    assert game.opened == 8
    later = stream.take(2)
    assert [int(group["group_ids"][0]) for group in [*first, *later]] == [0, 1, 2, 3]
    assert taken.lag == 1  # so that publishes refuse a sampler that shares GPUs with the trainer


@pytest.mark.parametrize("transform", [nrl.partial, nrl.refill])
def test_each_task_comes_exactly_once_where_a_run_goes_on(engine: Any, transform: Any) -> None:
    def stream() -> Any:
        return transform(nrl.rollouts(engine(Slow(3, 9, seconds=0.3)), Game().env, tasks(), n=2), 3)

    first = stream()
    before = [int(group["group_ids"][0]) for group in first.take(3)]
    state = first.state()
    assert [number for number, _ in state["begun"]] == sorted(set(range(6)) - set(before))
    again = stream()
    again.restore(state)
    after = [int(group["group_ids"][0]) for group in [*again.take(3), *again.take(3)]]
    assert len({*before, *after}) == 9
    found = again.state()
    assert sorted([*before, *after, *(number for number, _ in found["begun"])]) == list(range(12))
    assert [task["index"] for _, task in found["begun"]] == [number for number, _ in found["begun"]]


def test_a_checkpoint_has_what_is_under_way(engine: Any, tmp_path: Path) -> None:
    def stream() -> Any:
        groups = nrl.partial(nrl.rollouts(engine(Slow(2, 3)), Game().env, tasks(), n=2), 2)
        return nrl.ahead(nrl.batched(groups, 2), 0)

    @attrs.frozen
    class Config:
        steps: int
        out: str = str(tmp_path / "run")
        checkpoints: Checkpoints = Checkpoints(every=1)

    seen = []
    for steps in (1, 3):
        with nrl.run(Config(steps)) as run:
            found = run.restore(stream=stream())
            for i, batch in run.steps(found):
                seen += batch["group_ids"].unique().tolist()
                run.log(i, nrl.summary(batch))
                run.save(i, stream=found)
    assert len(set(seen)) == len(seen) == 6
    assert 1 in seen  # which was slow at first, and began anew


def test_what_is_carried_is_closed_once_when_nobody_takes_any_more(engine: Any) -> None:
    game = Game()
    stream = nrl.partial(nrl.rollouts(engine(Slow(0, 1, 2, 3)), game.env, tasks(), n=2), 2)
    stream.take(1)
    assert (game.opened, len(game.closed)) == (6, 2)
    del stream
    gc.collect()
    assert game.each_closed_once


def test_a_take_that_raises_closes_all_and_begins_them_anew(engine: Any) -> None:
    class Breaking(SimulatedEngine):
        breaks = False

        def stream(self, prompts: Any, seeds: Any, sampling: Any = None) -> Any:
            if self.breaks:
                raise RuntimeError("out of memory")
            return super().stream(prompts, seeds, sampling)

    game, taken = Game(), Breaking(64, Slow(2, 3))
    stream = nrl.refill(nrl.rollouts(taken, game.env, tasks(), n=2), 1)
    stream.take(1)
    before, taken.breaks = stream.state(), True
    with pytest.raises(RuntimeError, match="out of memory"):
        stream.take(1)
    assert game.each_closed_once
    assert stream.state() == before
    taken.breaks = False
    assert int(stream.take(1)[0]["group_ids"][0]) == 1
    taken.close()


@pytest.mark.parametrize("early", [0, 1])
def test_a_run_that_ends_closes_what_is_under_way(engine: Any, early: int, tmp_path: Path) -> None:
    """Also what another thread waits for."""

    @attrs.frozen
    class Config:
        steps: int = 2
        out: str = str(tmp_path / "run")

    game = Game()
    groups = nrl.rollouts(engine(lambda seed: 0.3), game.env, tasks(), n=2)
    with nrl.run(Config()) as run:
        stream = nrl.ahead(nrl.batched(nrl.refill(groups, 1), 2), early)
        for i, batch in run.steps(run.restore(stream=stream)):
            run.log(i, nrl.summary(batch))
    assert game.opened > 8
    assert game.each_closed_once


def test_what_is_asked_for_early_does_not_begin_after_the_end_of_its_run(engine: Any, tmp_path: Path) -> None:
    """The thread that takes ahead is about to begin when the run ends; another run of the program may go on."""
    game, held, released = Game(), threading.Event(), threading.Event()

    def take(n: int) -> Any:
        if game.opened and not released.is_set():
            held.set()
            released.wait(MINUTE)
        return groups.take(n)

    @attrs.frozen
    class Config:
        out: str
        steps: int = 1

    groups = nrl.rollouts(engine(), game.env, tasks(), n=2)
    with nrl.run(Config(str(tmp_path / "first"), steps=2)) as run:
        for _ in run.steps(nrl.ahead(groups._replace(take=take), 1)):
            break  # of two steps: only what a later step would take is asked for early
        assert held.wait(MINUTE)
    opened = game.opened
    released.set()
    assert not settled(lambda: "ahead" in [thread.name for thread in threading.enumerate()], MINUTE)
    assert game.opened == opened == 2
    with nrl.run(Config(str(tmp_path / "second"))) as run:
        [(_, group)] = run.steps(nrl.ahead(groups, 1))
    assert group["group_ids"].tolist() == [1, 1]
    assert game.each_closed_once


def test_an_end_that_comes_when_a_take_has_just_ended_spares_the_next(engine: Any) -> None:
    """A loop run is asked to end by another thread, and has ended by itself: the next one is not meant."""
    running = EpisodeScheduler(engine(), Game().env, 1, None, 0, EpisodeSchedule())
    with running._turn, running._interrupting():
        pass
    assert len(running.play([(0, {"prompt": "1+1="})], 1)) == 1
    running.close()


def test_prompts_that_are_arrays_are_not_mixed_up(engine: Any) -> None:
    """However they are shown."""
    count = itertools.count(6)

    def reset(task: Any) -> Any:
        return 0, np.array([5] * 1500 + [next(count)] + [5] * 1500)

    env = Environment(reset, lambda state, turn: Step(state))
    batch = nrl.rollout(engine(), env, [{}], n=3)
    assert sorted(batch["input_ids"][:, 1500].tolist()) == [6, 7, 8]


class Threads(SimulatedEngine):
    """Answers each request in a thread of its own, all at once."""

    def stream(self, prompts: Any, seeds: Any, sampling: Any = None) -> Any:
        asked = super().stream(prompts, seeds, sampling)
        mine: list[futures.Future[Any]] = [futures.Future() for _ in asked]
        together = threading.Barrier(len(asked))

        def answer(one: Any, other: Any) -> None:
            found = other.result()
            together.wait()
            one.set_result(found)

        for pair in zip(mine, asked, strict=True):
            threading.Thread(target=answer, args=pair, daemon=True).start()
        return mine


def test_answers_from_many_threads_all_arrive() -> None:
    taken, before = Threads(64, lambda seed: 0.001), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(100):
            assert nrl.rollout(taken, Game().env, [{"prompt": "1"}], n=12)["valid"].all()
    finally:
        sys.setswitchinterval(before)
        taken.close()


class Forgetful(SimulatedEngine):
    def __init__(self, how: str) -> None:
        super().__init__(4, lambda seed: FAST)
        self.how = how

    def stream(self, prompts: Any, seeds: Any, sampling: Any = None) -> Any:
        asked = super().stream(prompts, seeds, sampling)
        if self.how == "few":
            return asked[1:]
        asked[0].cancel()
        return asked


def test_samplers_that_forget_are_found_out() -> None:
    with pytest.warns(UserWarning, match="the first: LostRequest: generate: the sampler has forgotten a request that"):
        assert nrl.rollout(Forgetful("cancels"), Game().env, [{"prompt": "1"}], n=2)["valid"].tolist() == [False, True]
    with pytest.raises(GenerationError, match="generate: the sampler gave 1 answers to 2 prompts"):
        nrl.rollout(Forgetful("few"), Game().env, [{"prompt": "1"}], n=2)


# --- how many at a time, and who waits for whom


@pytest.mark.parametrize("streams", [False, True])
def test_no_more_episodes_are_live_than_were_allowed(engine: Any, sampler: EnginePool, streams: bool) -> None:
    game, other = Game(turns=2), Game(turns=2)
    some = [{"prompt": f"{index}+1="} for index in range(6)]
    of: Any = engine() if streams else sampler
    bounded = nrl.rollout(of, game.env, some, n=3, concurrency=4)
    free = nrl.rollout(of, other.env, some, n=3)
    assert (game.most, other.most) == (4, 18)
    assert game.each_closed_once
    assert torch.equal(bounded["input_ids"], free["input_ids"])
    stream = nrl.rollouts(of, Game().env, tasks(), n=3, concurrency=2)
    assert [len(group) for group in stream.take(2)] == [3, 3]
    with pytest.raises(DataError, match="rollouts: concurrency is 0; it must be at least 1, or None for all at once"):
        nrl.rollouts(of, Game().env, tasks(), n=3, concurrency=0)
    with pytest.raises(DataError, match="rollout: concurrency is -1; it must be at least 1, or None for all at once"):
        nrl.rollout(of, Game().env, some, n=3, concurrency=-1)
    assert stream.take(0) == []


class Rounds(Scripted):
    """Notes how many are asked at a time."""

    def __init__(self) -> None:
        super().__init__([])
        self.asked = list[int]()

    def generate(self, prompts: Any, *, seeds: Any = None, sampling: Any = None) -> Any:
        self.asked.append(len(prompts))
        self.texts = ["1"] * len(prompts)
        return super().generate(prompts, seeds=seeds, sampling=sampling)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> float:
    """Slow is who has been away for longer than any test takes; a second, that is."""
    assert sampler_client._SLOW == 1.0
    monkeypatch.setattr(sampler_client, "_SLOW", SLOW)
    return SLOW


def test_a_slow_episode_delays_the_others_by_a_second_and_once(
    clock: Clock, patient: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of four turns; the first steps of one sleep. It goes on as soon as it can."""
    asked, game, came, add = Rounds(), Game(turns=4), list[Any](), sampler_client.BatchedClient._add

    def added(of: Any, key: Any, request: Any) -> None:
        came.append(key)
        add(of, key, request)

    monkeypatch.setattr(sampler_client.BatchedClient, "_add", added)
    wakes = [threading.Event() for _ in range(3)]
    some = [{"prompt": "1", "sleeps": dict(enumerate(wakes)) if index == 1 else {}} for index in range(3)]
    seen = []

    def both_others_wait() -> bool:
        if game.asleep == 1 and len(came) == 5:
            seen.append(list(asked.asked))
        return bool(seen)

    def others_play_or_it_is_awake(turns: int) -> bool:
        return len(game.closed) < 2 or game.asleep <= turns

    def wake() -> None:
        """The others have ended; nobody is waited for any more."""
        for number, event in enumerate(wakes):
            settled(partial(others_play_or_it_is_awake, number), MINUTE)
            event.set()

    waking = threading.Thread(target=wake)
    waking.start()
    with clock.passes(patient, once=both_others_wait):
        batch = nrl.rollout(asked, game.env, some)
    waking.join()
    assert batch["valid"].all()
    assert seen[0] == [3]
    assert asked.asked == [3, 2, 2, 2, 1, 1, 1]
    assert clock.skips == 1


def test_who_ends_is_not_waited_for(patient: float) -> None:
    asked = Rounds()

    def step(left: int, turn: str) -> Step:
        return Step(left - 1, done=left == 1, observation="+")

    nrl.rollout(asked, Environment(lambda task: (task["turns"], "1"), step), [{"turns": 1}, {"turns": 3}, {"turns": 2}])
    assert asked.asked == [3, 2, 1]


def test_places_of_episodes_that_were_cut_are_given_back(engine: Any, clock: Clock) -> None:
    """Those that had begun, and those that waited for a place."""
    game, slow = Game(), Slow(0, 1, 2, 3)
    taken = engine(slow)
    stream = nrl.cut(nrl.refill(nrl.rollouts(taken, game.env, tasks(), n=6, concurrency=3), 1), MINUTE)
    with clock.passes(MINUTE, once=lambda: under_way(12, 2) and slow.asked == 3):
        assert stream.take(1)[0]["cut"].all()
    with clock.passes(MINUTE, once=lambda: under_way(1, 1)):
        assert stream.take(1)[0]["cut"].tolist() == [True] + [False] * 5
    for _ in range(3):
        [group] = stream.take(1)
        assert not group["cut"].any()
    assert game.most == 3


def test_all_are_asked_together_while_none_is_slow(patient: float) -> None:
    asked, game = Rounds(), Game(turns=3)
    threading.Timer(0.4, game.wakes.set).start()
    nrl.rollout(asked, game.env, [{"prompt": "1", "sleeps": {0: None} if index else {}} for index in range(3)])
    assert asked.asked == [3, 3, 3]


# --- errors


@pytest.mark.parametrize(
    ("transform", "argument", "said"),
    [
        (nrl.cut, 0.0, "cut: seconds is 0.0; it must be positive"),
        (nrl.cut, float("nan"), "cut: seconds is nan; it must be positive"),
        (nrl.oversample, 0, "oversample: m is 0; at least one episode has to be kept"),
        (nrl.oversample, 5, "oversample: m is 5, and rollouts begins n=4 episodes a group; keep fewer, or begin more"),
        (nrl.partial, 0, "partial: extra is 0; at least one group has to be carried on"),
        (nrl.refill, 0, "refill: extra is 0; at least one group has to begin early"),
    ],
)
def test_arguments_are_checked(engine: Any, transform: Any, argument: Any, said: str) -> None:
    with pytest.raises(DataError, match=f"^{said}$".replace(".", r"\.")):
        transform(nrl.rollouts(engine(), Game().env, tasks(), n=4), argument)


def test_a_schedule_is_of_rollouts_alone_and_of_one_kind(engine: Any) -> None:
    groups = nrl.rollouts(engine(), Game().env, tasks(), n=4)
    said = "cut: the stream is none of nrl.rollouts, or was made of one; put cut around nrl.rollouts"
    for other in (nrl.batched(groups, 2), tasks()):
        with pytest.raises(DataError, match=said):
            nrl.cut(other, 1.0)
    with pytest.raises(DataError, match="cut: the stream is cut after 2 s already; leave one of the two out"):
        nrl.cut(nrl.cut(groups, 2.0), 1.0)
    with pytest.raises(DataError, match="refill: the stream is partial already; take one of the two"):
        nrl.refill(nrl.partial(groups, 1), 1)
    assert len(nrl.oversample(nrl.cut(groups, MINUTE), 2).take(1)[0]) == 2


def test_a_coroutine_of_what_was_cut_is_cancelled(engine: Any, clock: Clock) -> None:
    found, inside = list[str](), threading.Event()

    async def verdict(task: Any, trace: Any) -> float:
        try:
            if task["index"] == 0:
                inside.set()
            await asyncio.sleep(SLOW if task["index"] == 0 else 0)
        except asyncio.CancelledError:
            found.append("cancelled")
            raise
        return 1.0

    stream = nrl.cut(nrl.refill(nrl.rollouts(engine(), single_turn(verdict, timeout=None), tasks(), n=1), 1), MINUTE)
    with clock.passes(MINUTE, once=lambda: under_way(1, 1) and inside.is_set()):
        assert stream.take(1)[0]["cut"].tolist() == [True]
    while not found:  # while others are under way; or the time limit of a test
        stream.take(1)
    assert found == ["cancelled"]


def test_what_was_cut_is_no_tokens_that_are_trained_on(engine: Any) -> None:
    [group] = nrl.cut(nrl.rollouts(engine(), Game().env, tasks(), n=2), MINUTE).take(1)
    wide = nrl.Batch({**dict(group.items()), "loss_mask": torch.ones_like(group["loss_mask"])}, batch_size=[2])
    with pytest.raises(BatchError, match="row 0 is trained on its token 0, which the policy did not sample"):
        nrl.summary(wide)
