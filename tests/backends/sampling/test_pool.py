"""What a sampler does with its engines, seen with an engine that does nothing but take its time."""

import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import nrl
from nrl import tiny
from nrl.algos import sft_loss
from nrl.backends import Sampling, Trainer, adamw, fsdp, hf
from nrl.backends.engine import GIVEN_UP, Decoded, Request
from nrl.backends.hf.hf_engine import HfEngine
from nrl.backends.sampling import pool
from nrl.backends.sampling.pool import StreamingEnginePool
from nrl.backends.sampling.prefix_router import Router
from nrl.backends.sampling.replica import EngineReplica
from nrl.backends.sampling.weight_delivery import Weights, say
from nrl.backends.training import weight_stream
from nrl.batch import Batch
from nrl.errors import (
    ClosedCluster,
    ConsumedState,
    CorruptedTransfer,
    DeadlineExceeded,
    GenerationError,
    LostActor,
    LostRequest,
    ModelError,
    PlacementError,
)
from nrl.runtime import Cluster, Mesh, P, cluster, shard_map
from nrl.runtime.mesh.local import LocalCluster, _LocalProcesses
from nrl.runtime.trace import timeline
from tests.processes import settled
from tests.weights import bucket_of

SHORT, LONG = Sampling(max_new_tokens=1), Sampling(max_new_tokens=100)
PAUSE = 0.01


class Patient:
    """Gives every row a token each time that it is asked; the token is the number of weights it has had."""

    context_length, vocabulary = 512, 100

    def __init__(self) -> None:
        if STARTS:
            raise STARTS.pop()
        self.rows: dict[int, tuple[int, list[int]]] = {}
        self.weights = 0
        self.raises: list[BaseException] = []
        ENGINES.append(self)

    def advance(
        self, requests: Sequence[Request], cancelled: Sequence[int]
    ) -> Sequence[tuple[int, Decoded | Exception]]:
        found: list[tuple[int, Decoded | Exception]] = []
        for number in cancelled:
            self.rows.pop(number, None)
        for request in requests:
            if request.prompt[0] == 98:
                raise RuntimeError("CUDA error: an illegal memory access")
            if request.prompt[0] == 99:
                found.append((request.number, GenerationError("99 is refused")))
            else:
                self.rows[request.number] = (request.sampling.max_new_tokens, [])
        time.sleep(PAUSE)
        if self.raises:
            raise self.raises.pop()
        for number, (most, tokens) in list(self.rows.items()):
            tokens.append(self.weights)
            if len(tokens) == most:
                del self.rows[number]
                ids = torch.tensor(tokens)
                found.append((number, Decoded(ids, torch.zeros(most), True, ids)))
        return found

    def begin(self) -> None:
        """Nothing is forgotten."""

    def add(self, bucket: Any) -> None:
        names = [piece.name for piece in bucket]
        if "bad" in names:
            raise GenerationError("bad weights")
        if "first" in names and self is ENGINES[0]:
            raise RuntimeError("CUDA error: out of memory")

    def end(self, version: int) -> None:
        self.weights = version


ENGINES: list[Patient] = []
STARTS: list[Exception] = []
"""What the next ones raise that are made."""


SAID: list[str] = []
"""What pools have told from their threads."""


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    SAID.clear()

    def told(text: str) -> None:
        say(text)
        SAID.append(text)

    monkeypatch.setattr(pool, "say", told)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A local cluster whose engines are asked by threads, as those of other processes are."""
    ENGINES.clear()
    monkeypatch.setattr(LocalCluster, "remote", True)
    with cluster("local") as entered:
        yield entered


def sampler_on(entered: Cluster, engines: int = 1) -> StreamingEnginePool:
    meshes: list[Mesh] = [entered.reserve(1).mesh(name=f"engine {i}") for i in range(engines)]
    return StreamingEnginePool("patient", meshes, Patient, tiny.model(), SHORT)


def tokens(row: Any) -> list[int]:
    found: list[int] = row.result(60).token_ids.tolist()
    return found


def test_requests_are_spread_by_load(here: Cluster) -> None:
    sampler = sampler_on(here, 3)
    rows = sampler.stream([[place] for place in range(1, 31)], range(30), LONG)
    settled(lambda: sum(len(engine.rows) for engine in ENGINES) < 30, 60)
    assert [len(engine.rows) for engine in ENGINES] == [10, 10, 10]
    assert all(tokens(row) == [0] * 100 for row in rows)


def test_requests_go_where_their_beginning_has_been_read() -> None:
    spread = Router(2)
    first, second = list(range(300)), list(range(500, 800))
    assert spread.choose([first], [0, 0]) == [0]
    assert spread.choose([second], [1, 0]) == [1]
    assert spread.choose([first, second, *([place] for place in range(6))], [5, 5])[:2] == [0, 1]
    spread.has_read(1, [*first, 7, 8, 9])
    assert spread.choose([[*first, 7, 8, 9, 10]], [5, 5]) == [1]  # the next turn of an episode
    assert spread.choose([[*first, 7, 8, 9, 10]], [0, 50]) == [0]  # but not at any price
    assert spread.choose([[*second[:64], *range(900, 1000)]], [4, 5]) == [0]  # of which it has read less than the half


class OneByOne:
    """What `Router.choose` decides, by looking at every engine for every prompt."""

    def __init__(self, engines: int) -> None:
        self.engines, self.readers = engines, dict[tuple[int, ...], int]()

    def choose(self, prompts: list[list[int]], load: list[float]) -> list[int]:
        found, load = [], list(load)
        for place, prompt in enumerate(prompts):
            ends = [min(start + 64, len(prompt)) for start in range(0, len(prompt), 64)]
            beginnings = [tuple(prompt[:end]) for end in reversed(ends)]
            least = min(range(self.engines), key=lambda engine: load[engine])
            taking = [each for each in load if each < math.inf]
            share = (sum(taking) + len(prompts) - place) / max(1, len(taking))
            known = [key for key in beginnings if key in self.readers and 2 * len(key) >= len(prompt)]
            reader = self.readers[known[0]] if known else least
            chosen = reader if load[reader] < share * 1.25 else least
            self.readers.update(dict.fromkeys(beginnings, chosen))
            load[chosen] += 1
            found.append(chosen)
        return found


@settings(max_examples=200)
@given(st.data())
def test_requests_are_placed_as_if_each_were_placed_alone(data: st.DataObject) -> None:
    engines = data.draw(st.integers(1, 6))
    spread, slow = Router(engines), OneByOne(engines)
    for _ in range(3):
        load = data.draw(st.lists(st.sampled_from([0, 1, 2, 5, math.inf]), min_size=engines, max_size=engines))
        which = data.draw(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 200)), max_size=20))
        prompts = [[base * 1000 + token for token in range(length)] for base, length in which]
        assert spread.choose(prompts, load) == slow.choose(prompts, load)


def test_the_load_of_an_engine_is_looked_at_once_for_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[EngineReplica] = []
    load = EngineReplica.load

    def counted(replica: EngineReplica) -> list[float]:
        looks.append(replica)
        return load.__get__(replica)  # type: ignore[no-any-return]

    monkeypatch.setattr(EngineReplica, "load", property(counted))
    monkeypatch.setattr(StreamingEnginePool, "_start_work", lambda self: None)
    with cluster("local") as entered:
        sampler = sampler_on(entered, 8)
        sampler.stream([[place] for place in range(64)], range(64), LONG)
        assert len(looks) == 8


def test_one_that_is_refused_leaves_the_others_alone(here: Cluster) -> None:
    good, bad, late = sampler_on(here).stream([[5], [99], [6]], [0, 1, 2], SHORT)
    with pytest.raises(GenerationError, match="99 is refused"):
        bad.result(60)
    assert tokens(good) == tokens(late) == [0]


def test_what_an_engine_raises_is_for_those_that_it_was_asked(here: Cluster) -> None:
    sampler = sampler_on(here)
    (asked,) = sampler.stream([[5]], [0], LONG)
    settled(lambda: not ENGINES[0].rows, 60)
    ENGINES[0].raises.append(GenerationError("too much"))
    with pytest.raises(GenerationError, match="too much"):
        asked.result(60)
    assert tokens(sampler.stream([[5]], [0], SHORT)[0]) == [0]
    assert not ENGINES[0].rows  # it was told to forget the other


def test_an_engine_that_raises_what_nrl_does_not_is_started_again(
    here: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    sampler = sampler_on(here)
    sampler.receive([[]], 1)
    (row,) = sampler.stream([[5]], [0], LONG)
    settled(lambda: not ENGINES[0].rows, 60)

    def raising() -> list[int]:
        ENGINES[0].raises.append(MemoryError("too much"))
        return tokens(row)

    lost = "an engine was lost, and it has been started again; 1 requests were asked again.*its engine raised MemoryErr"
    with pytest.warns(UserWarning, match=lost):
        assert raising() == [1] * 100  # by the next, which has the weights
    assert (row.result().times, len(ENGINES)) == (2, 2)
    at_once, _, _ = capsys.readouterr().err.partition("\n")  # before what the test has caught above
    assert at_once.startswith("patient: a rank of mesh 'engine 0' on node ? is lost: its engine raised MemoryError: to")
    assert " Its 1 requests are asked again, and mesh 'engine 0' is started again in Slots(0 on " in at_once


@pytest.mark.filterwarnings("ignore:.*an engine was lost")
def test_a_request_that_every_engine_raises_at_is_given_up(here: Cluster) -> None:
    sampler = sampler_on(here)
    with pytest.raises(LostRequest, match="3 engines died while they decoded it; the last: .*illegal memory access"):
        sampler.stream([[98]], [0])[0].result(60)
    assert len(ENGINES) == 3
    assert not settled(lambda: sampler._tended, 60)
    with pytest.raises(LostActor, match="mesh 'engine 0'.* is lost: its engine raised RuntimeError: CUDA error"):
        sampler.generate([[5]]).result(60)


@pytest.mark.filterwarnings("ignore:.*an engine was lost")
def test_deaths_with_answers_in_between_are_not_in_a_row(here: Cluster) -> None:
    sampler = sampler_on(here)
    for _ in range(3):
        ENGINES[-1].raises.append(RuntimeError("no"))
        assert tokens(sampler.stream([[5]], [0])[0]) == [0]
    assert len(ENGINES) == 4


def test_an_engine_that_raises_while_it_receives_is_started_again(here: Cluster) -> None:
    sampler = sampler_on(here, 2)

    def received() -> None:
        sampler.receive([bucket_of({"first": torch.zeros(1)})], 1)
        assert not settled(lambda: sampler._tended, 60)

    with pytest.warns(UserWarning, match="an engine was lost, and it has been started again; .*out of memory"):
        received()
    assert len(ENGINES) == 3
    assert [each.token_ids.tolist() for each in sampler.everywhere([5], SHORT).result()] == [[1], [1]]


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.filterwarnings("ignore:.*an engine was lost")
def test_an_engine_that_raises_while_it_is_started_again_has_died_once_more(here: Cluster, times: int) -> None:
    """And is given up when it has done so as often as it may."""
    sampler = sampler_on(here)
    STARTS.extend(RuntimeError("CUDA error: out of memory") for _ in range(times))
    (row,) = sampler.stream([[5]], [0], LONG)
    settled(lambda: not ENGINES[0].rows, 60)
    ENGINES[0].raises.append(RuntimeError("no"))
    if times == 1:
        assert tokens(row) == [0] * 100
    else:
        with pytest.raises(LostActor, match="its engine raised RuntimeError: CUDA error: out of memory"):
            row.result(60)
    assert (len(ENGINES), STARTS) == (3 - times, [])


def test_an_engine_that_raises_on_purpose_while_it_is_started_again_is_given_up(here: Cluster) -> None:
    sampler = sampler_on(here)
    STARTS.append(ModelError("no such model"))
    ENGINES[0].raises.append(RuntimeError("no"))

    def asked() -> Any:
        (row,) = sampler.stream([[5]], [0])
        return row.exception(10), settled(lambda: sampler._tended, 60)

    with pytest.warns(UserWarning, match="an engine was lost, and it is not started again: no such model"):
        error, _ = asked()
    assert isinstance(error, ModelError)
    assert len(ENGINES) == 1


@pytest.mark.filterwarnings("ignore:.*an engine was lost")
def test_an_engine_whose_host_is_gone_is_given_up_because_of_that(
    here: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `nrl.retrying` looks for is the loss, and not that there is no place now."""
    sampler = sampler_on(here)

    def nowhere(*_: Any) -> Any:
        raise PlacementError("node 10.0.0.3 of its slots is gone")

    monkeypatch.setattr(_LocalProcesses, "has_ended", True)
    monkeypatch.setattr(LocalCluster, "start", nowhere)
    ENGINES[0].raises.append(LostActor("generate", "engine 0", 0, "10.0.0.3", "its node is gone"))
    error = sampler.stream([[5]], [0])[0].exception(60)
    assert not settled(lambda: sampler._tended, 60)
    assert isinstance(error, PlacementError)
    assert isinstance(error.__cause__, LostActor)


@pytest.fixture
def checked(here: Cluster) -> tuple[Any, StreamingEnginePool]:
    """Params, and a sampler of real engines that have them; one that computes otherwise than the trainer is found."""
    trainer = fsdp.trainer(here.reserve(1), tiny.model(), adamw(lr=1e-3))
    mesh = here.reserve(1).mesh(name="checked")
    sampler = StreamingEnginePool("checked", [mesh], partial(HfEngine, tiny.model()), tiny.model(), SHORT, 1e-3)
    params = trainer.init().params
    nrl.publish(params, sampler)
    return params, sampler


def dies(sampler: StreamingEnginePool, monkeypatch: pytest.MonkeyPatch, says: int = 1) -> Any:
    """A row with which an engine dies; it has been started again, and lacks weights if it does not serve."""

    def die(*_: Any) -> Any:
        monkeypatch.setattr(HfEngine, "advance", advance)
        raise RuntimeError("no")

    advance = HfEngine.advance
    monkeypatch.setattr(HfEngine, "advance", die)
    SAID.clear()
    (row,) = sampler.stream([[5]], [0])
    settled(lambda: sampler._tended and all(replica.state != "empty" for replica in sampler._replicas), 60)
    assert not settled(lambda: len(SAID) < says, 60)
    return row


def test_an_engine_that_is_started_again_is_checked_before_it_serves(
    checked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, sampler = checked
    add, checks = HfEngine.add, list[int]()

    def others(self: Any, bucket: Any) -> None:
        add(self, [attrs.evolve(piece, tensor=piece.tensor + 0.01) for piece in bucket])

    monkeypatch.setattr(HfEngine, "add", others)
    wrong = r"it has been started again; 1 requests .*weights are not to be trusted \(publish: .*0\.001 may be rounding"
    with pytest.warns(UserWarning, match=wrong):
        row = dies(sampler, monkeypatch)
    with pytest.raises(GenerationError, match=r"not to be trusted \(publish: with the weights of version 1, engine 0"):
        row.result(60)
    with pytest.raises(GenerationError, match="not to be trusted"):
        sampler.generate([[5]])
    monkeypatch.setattr(HfEngine, "add", add)
    nrl.publish(params, sampler)
    check = Weights.check

    def counted(*args: Any) -> None:
        checks.append(1)
        check(*args)

    monkeypatch.setattr(Weights, "check", counted)
    with pytest.warns(UserWarning, match="started again; 1 requests were asked again, and 0 given up. checked"):
        row = dies(sampler, monkeypatch)
    assert (row.result(60).version, checks) == (1, [1])


def test_an_engine_that_computes_otherwise_after_a_start_leaves_the_others_alone(
    here: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It serves again after a publish."""
    params = fsdp.trainer(here.reserve(1), tiny.model(), adamw(lr=1e-3)).init().params
    meshes = [here.reserve(1).mesh(name=f"checked {i}") for i in range(2)]
    sampler = StreamingEnginePool("checked", meshes, partial(HfEngine, tiny.model()), tiny.model(), SHORT, 1e-3)
    nrl.publish(params, sampler)
    add = HfEngine.add

    def others(self: Any, bucket: Any) -> None:
        add(self, [attrs.evolve(piece, tensor=piece.tensor + 0.01) for piece in bucket])

    monkeypatch.setattr(HfEngine, "add", others)
    does_not_serve = "what was started again does not serve before the next publish. publish: with the weights"
    with pytest.warns(UserWarning, match="an engine was lost"), pytest.warns(UserWarning, match=does_not_serve):
        assert dies(sampler, monkeypatch, says=2).result(60).version == 1
    assert sorted(replica.state for replica in sampler._replicas) == ["empty", "serving"]
    assert len(sampler.generate([[5], [6], [7]]).result(60)) == 3
    monkeypatch.setattr(HfEngine, "add", add)
    nrl.publish(params, sampler)
    assert [replica.state for replica in sampler._replicas] == ["serving"] * 2
    assert len(sampler.everywhere([5], SHORT).result(60)) == 2


def test_an_engine_whose_weights_are_consumed_before_it_is_given_them_gets_the_next(
    checked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, sampler = checked

    def consumed(*_: Any) -> Any:
        raise ConsumedState("publish: a step has consumed them")

    buckets = Trainer.buckets
    monkeypatch.setattr(Trainer, "buckets", consumed)
    with pytest.warns(UserWarning, match="requests wait for the next publish"):
        row = dies(sampler, monkeypatch)
    assert not row.done()
    monkeypatch.setattr(Trainer, "buckets", buckets)
    nrl.publish(params, sampler)
    assert row.result(60).version == 1


class Failed:
    """A bucket whose trainer has raised while it made it; as a `nrl.runtime.mesh.futures.RemoteFuture`."""

    rows = like = None
    error = RuntimeError("the trainer is out of memory")

    def part(self, index: Any) -> Any:
        return self

    def failure(self) -> BaseException:
        return self.error

    def result(self, timeout: float | None = None) -> Any:
        raise self.error

    def __iter__(self) -> Iterator[Any]:
        raise self.error


def test_weights_that_arrive_damaged_are_not_sent_another_way(here: Cluster) -> None:
    """Something is wrong with the memory, or with the way."""
    sampler = sampler_on(here)
    params = fsdp.trainer(here.reserve(1), tiny.model(), adamw(lr=1e-3)).init().params

    class Damaged(Weights):
        def to(self, meshes: Any) -> Any:
            raise CorruptedTransfer("transfer: 'x' did not arrive as it was sent")

    with pytest.raises(CorruptedTransfer, match="'x' did not arrive"):
        sampler.receive(Damaged(params, sampler), 1)
    with pytest.raises(GenerationError, match="incomplete since the last receive"):
        sampler.generate([[5]])


def test_what_a_trainer_raises_is_not_taken_for_the_death_of_an_engine(here: Cluster) -> None:
    sampler = sampler_on(here)
    with pytest.raises(RuntimeError, match="the trainer is out of memory"):
        sampler.receive([Failed()], 1)
    assert (sampler._replicas[0].state, len(ENGINES)) == ("empty", 1)
    with pytest.raises(GenerationError, match=r"incomplete since the last receive \(the trainer is out of memory\)"):
        sampler.generate([[5]])


@pytest.mark.filterwarnings("ignore:.*an engine was lost")
def test_engines_that_are_being_started_are_not_waited_for(here: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by those who publish, nor by those who ask, unless there is no other."""
    sampler, again, restart = sampler_on(here, 2), threading.Event(), EngineReplica.restart

    def late(replica: EngineReplica, *args: Any) -> None:
        again.wait(60)
        restart(replica, *args)

    monkeypatch.setattr(EngineReplica, "restart", late)
    ENGINES[0].raises.append(RuntimeError("no"))
    (row,) = sampler._ask([[5]], [0], SHORT, [0])
    assert tokens(row) == [0]  # elsewhere
    sampler.receive([[]], 1)
    assert [replica.state for replica in sampler._replicas] == ["starting", "serving"]
    assert len(sampler.everywhere([5], SHORT).result(60)) == 1
    ENGINES[1].raises.append(RuntimeError("no"))
    both: Any = sampler.everywhere([5], SHORT)
    settled(lambda: sampler._replicas[1].state != "starting", 60)
    every: Any = sampler.everywhere([5], SHORT)
    time.sleep(0.2)
    assert not both.done()
    assert not every.done()
    again.set()
    assert (len(both.result(60)), len(every.result(60))) == (1, 2)


def test_engines_without_weights_say_so(here: Cluster) -> None:
    sampler = sampler_on(here)
    sampler.receive(iter([[]]), 1)  # which cannot be iterated again, as those that a step has consumed
    ENGINES[0].raises.append(RuntimeError("no"))

    def asked() -> Any:
        rows = sampler.stream([[5]], [0])
        assert not settled(lambda: sampler._replicas[0].state != "empty", 60)
        assert not settled(lambda: not SAID, 60)
        return rows[0]

    with pytest.warns(UserWarning, match="them: requests wait for the next publish. .*its engine raised RuntimeError"):
        row = asked()
    assert not row.done()
    sampler.receive([[]], 2)
    assert tokens(row) == [2]


def test_a_sampler_that_is_distrusted_refuses(here: Cluster) -> None:
    """What is under way, too, until it has received weights again."""
    sampler = sampler_on(here, 2)
    rows = sampler.stream([[5], [6]], [0, 1], LONG)
    settled(lambda: not all(engine.rows for engine in ENGINES), 60)
    sampler.distrust("engine 1 computes something else")
    for row in rows:
        with pytest.raises(GenerationError, match="to be trusted .engine 1 computes something else.; publish a compl"):
            row.result(60)
    with pytest.raises(GenerationError, match="not to be trusted"):
        sampler.everywhere([5], SHORT)
    with pytest.raises(GenerationError, match="bad weights"):
        sampler.receive([bucket_of({"bad": torch.zeros(1)})], 1)
    with pytest.raises(GenerationError, match="incomplete since the last receive"):
        sampler.generate([[5]])
    sampler.receive([[]], 1)
    assert tokens(sampler.stream([[5]], [0])[0]) == [1]


def test_to_cancel_a_call_is_to_cancel_its_rows(here: Cluster) -> None:
    sampler = sampler_on(here)
    rows: Any = sampler.generate([[5], [6]], sampling=Sampling(max_new_tokens=100_000))
    settled(lambda: len(ENGINES[0].rows) < 2, 60)
    assert rows.cancel()
    assert not settled(lambda: ENGINES[0].rows, 60)
    assert not settled(lambda: sampler._tended, 60)


@pytest.mark.parametrize(
    ("inflight", "begins", "ends", "times"), [("wait", 0, 0, 1), ("keep", 0, 1, 1), ("abort", 1, 1, 2)]
)
def test_new_weights_while_rows_are_under_way(here: Cluster, inflight: Any, begins: int, ends: int, times: int) -> None:
    sampler = sampler_on(here, 2)
    rows = sampler.stream([[5], [6]], [0, 1], LONG)
    settled(lambda: not all(engine.rows for engine in ENGINES), 60)
    sampler.receive([[]], 1, inflight=inflight)
    for row in rows:
        found = tokens(row)
        assert (found[0], found[-1]) == (begins, ends)
        assert (row.result().version, row.result().times) == (begins, times)
    assert [each.version for each in sampler.everywhere([5], SHORT).result()] == [1, 1]


def test_weights_that_are_refused_end_what_is_under_way(here: Cluster) -> None:
    sampler = sampler_on(here, 2)
    rows = sampler.stream([[5], [6]], [0, 1], LONG)
    with pytest.raises(GenerationError, match="bad weights"):
        sampler.receive([bucket_of({"bad": torch.zeros(1)})], 1, inflight="keep")
    for row in rows:
        with pytest.raises(GenerationError, match=r"incomplete since the last receive \(bad weights\)"):
            row.result(60)
    sampler.receive([[]], 1)
    assert tokens(sampler.stream([[5]], [0])[0]) == [1]


def test_an_interrupt_leaves_a_sampler_that_works() -> None:
    ENGINES.clear()
    with cluster("local") as entered:
        sampler = sampler_on(entered)
        ENGINES[0].raises.append(KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            sampler.generate([[5]])
        sampler.receive([[]], 1)
        assert [row.version for row in sampler.generate([[5]]).result()] == [1]


def test_an_interrupt_while_rows_are_waited_for(here: Cluster) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a program in the background may ignore it
    sampler = sampler_on(here)
    (row,) = sampler.stream([[5]], [0], LONG)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        sampler.receive([[]], 1)
    signal.signal(signal.SIGINT, before)
    assert tokens(row) == [0] * 100
    assert tokens(sampler.stream([[5]], [0])[0]) == [0]


def test_many_small_calls_are_one_bar_of_the_timeline(here: Cluster, tmp_path: Path) -> None:
    sampler = sampler_on(here)
    with timeline.recording(tmp_path) as path:
        assert tokens(sampler.stream([[5]], [0], LONG)[0])
        settled(lambda: sampler._tended, 60)
        sampler.receive([[]], 1)
    events = [json.loads(line.rstrip(",")) for line in path.read_text().splitlines() if line.startswith("{")]
    bars = [event for event in events if event["ph"] == "X"]
    assert [bar["name"] for bar in bars] == ["generate", "receive", "receive", "receive"]
    assert bars[0]["dur"] >= 100 * PAUSE * 1e6


def test_who_leaves_the_cluster_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ENGINES.clear()
    monkeypatch.setattr(LocalCluster, "remote", True)
    with cluster("local") as entered:
        sampler = sampler_on(entered)
        (row,) = sampler.stream([[5]], [0], Sampling(max_new_tokens=100_000))
    with pytest.raises(ClosedCluster):
        row.result(60)
    assert not settled(lambda: sampler._tended, 60)


# on Ray, where engines die


def batch_of(rows: int = 4) -> Batch:
    ids = torch.arange(rows * 8).view(rows, 8) % 50 + 3
    columns: dict[str, Tensor] = {"input_ids": ids, "attention_mask": ids > 0, "loss_mask": ids > 0}
    return nrl.assign(Batch({}, batch_size=[rows]), **columns)


def test_weights_that_a_step_consumes_are_not_read_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an engine that is started again would, while another thread trains; half of each would be wrong."""
    monkeypatch.setattr(weight_stream, "_BUCKET", 1)
    with cluster("local") as entered:
        trainer = fsdp.trainer(entered.reserve(1), tiny.model(), adamw(lr=1e-3))
        state = trainer.init()
        buckets = state.params.buckets("receive")
        next(buckets)
        trainer.train_step(sft_loss)(state, batch_of())
        with pytest.raises(ConsumedState, match="receive: this train state was consumed"):
            next(buckets)


def kill(mesh: Mesh) -> None:
    os.kill(int(shard_map(lambda: torch.tensor(os.getpid()), mesh, (), P())().result()), signal.SIGKILL)


@pytest.mark.ray
def test_an_engine_that_dies_when_its_weights_are_consumed_gets_the_next(on_ray: Cluster) -> None:
    """And a trainer that dies in a publish is not taken for an engine that does."""
    slots = on_ray.reserve(2)
    mesh = slots[:1].mesh(executable="system", name="faults: trainer")
    trainer = fsdp.trainer(mesh, tiny.model(), adamw(lr=1e-3))
    sampler = hf.sampler(slots[1:].mesh(executable="system", name="faults: sampler"), tiny.model(), SHORT)
    state = trainer.init()
    nrl.publish(state.params, sampler)
    state, _ = trainer.train_step(sft_loss)(state, batch_of())
    kill(sampler._replicas[0].mesh)
    future: Any = sampler.generate([[5]])

    def empty() -> bool:
        settled(lambda: sampler._replicas[0].state != "empty", 100)
        assert not settled(lambda: not SAID, 60)
        return sampler._replicas[0].state == "empty"

    lost = "an engine was lost, and it has been started again; 1 requests were asked.*requests wait for the next pub"
    with pytest.warns(UserWarning, match=lost):
        assert empty()
    assert not future.done()
    nrl.publish(state.params, sampler)
    assert [row.version for row in future.result(60)] == [2]
    kill(mesh)
    with pytest.raises(LostActor, match="faults: trainer"):
        nrl.publish(trainer.load(), sampler)
    assert sampler._replicas[0].state == "empty"
    with pytest.raises(GenerationError, match="incomplete since the last receive"):
        sampler.generate([[5]])


@pytest.mark.ray
def test_work_on_ray_ends_when_nobody_waits_for_it(on_ray: Cluster) -> None:
    long = Sampling(max_new_tokens=30_000, temperature=0.0)
    model = tiny.model(max_position_embeddings=32_768)
    mesh = on_ray.reserve(1).mesh(executable="system", name="given up")
    sampler = hf.sampler(mesh, model, long)
    end = time.monotonic() + 0.5
    token = GIVEN_UP.set(lambda: [time.monotonic() > end] * 2)
    try:
        given_up = sampler.generate([[6], [7]])  # they repeat themselves
    finally:
        GIVEN_UP.reset(token)
    assert [len(row.token_ids) for row in given_up.result(60)] == [0, 0]
    began = time.monotonic()
    assert len(sampler.generate([[5]], sampling=SHORT).result(60)[0].token_ids) == 1
    assert time.monotonic() - began < 5  # 30,000 tokens take more than 20 s


@pytest.mark.ray
@pytest.mark.slow
def test_a_rank_that_raises_while_others_decode(on_ray: Cluster) -> None:
    """Then Ray's mesh is ended, which is a death, whatever was raised."""
    slots = on_ray.reserve(2)
    mesh = slots.mesh(executable="system", name="faults: two engines")
    sampler = hf.sampler(mesh, tiny.model(), SHORT)
    mesh.processes.end(DeadlineExceeded("a call took too long"))
    assert len(sampler.generate([[5], [6]]).result(120)) == 2
    assert sampler._replicas[0].mesh is not mesh
