"""A sampler over a pool of engines of any kind, each with a copy of the weights.

`generate` and `stream` place each request with an engine. The thread that looks after the engine's seat lets the engine
decode as long as it has requests, answers those that are finished, and lets new ones join. Weights are received between
two calls of an engine. An engine that dies is started again and gets the weights; its requests are asked again, here or
elsewhere.
"""

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from typing import cast

import attrs

from nrl.backends.engine import GIVEN_UP, Request, SampleEngine
from nrl.backends.models.loading import load_tokenizer
from nrl.backends.sampling.base import Capabilities, Inflight
from nrl.backends.sampling.prefix_router import Router
from nrl.backends.sampling.replica import Awaited, Seat, SeatState, Work
from nrl.backends.sampling.validation import check_prompts, warn_of_truncation
from nrl.backends.sampling.weights import Weights, give, say
from nrl.backends.types import Bucket, Chunks, Completion, Model, Sampling
from nrl.errors import ConsumedState, DeadlineExceeded, GenerationError, LostRequest, ModelError, WeightMismatch
from nrl.log import slow_wait
from nrl.runtime.mesh.futures import Future, done, gather
from nrl.runtime.mesh.placement import Mesh

__all__ = ["EnginePool", "StreamingEnginePool"]

_AFTER = "as where it was started again while a step had consumed its weights; publish those that the step returned"
_WAITS = "No engine has weights, since a step has consumed them: requests wait for the next publish. "
_TIMES = 3  # deaths: of engines with one request, and of one engine in a row without an answer


class EnginePool:
    """A `nrl.backends.Sampler` over engines; `nrl.backends.hf.sampler` makes one.

    Args:
        name: how errors and warnings name it.
        meshes: where its engines live.
        make: makes an engine, in each process.
        model: to sample from.
        sampling: for calls that do not say.
        tolerance: see `nrl.backends.sampling.base.Capabilities`.
        media: likewise.
        routes: likewise.

    Raises:
        ModelError: the model does not predict tokens, or its tokenizer cannot be loaded.
    """

    def __init__(
        self,
        name: str,
        meshes: Sequence[Mesh],
        make: Callable[[], SampleEngine],
        model: Model,
        sampling: Sampling,
        tolerance: float | None = None,
        media: frozenset[str] = frozenset(),
        routes: tuple[int, int] | None = None,
    ) -> None:
        if model.head != "lm":
            raise ModelError(f"{name}: the model has head='{model.head}'; only a language model, head='lm', samples")
        self.sampling = sampling
        self.tokenizer = load_tokenizer(model)
        """The transformers tokenizer of its model."""
        self.version = 0
        """See `nrl.backends.Sampler`."""
        self.lag = 0
        """How many publishes early it samples, for `nrl.ahead`."""
        self.capabilities = Capabilities(
            streams=isinstance(self, StreamingEnginePool),
            remote=meshes[0].cluster.remote,
            tolerance=tolerance,
            adapter=model.adapter,
            media=media,
            routes=routes,
        )
        self._name, self._cluster = name, meshes[0].cluster
        self._changed = threading.Condition()  # guards the seats; every change of theirs notifies it
        self._seats = [Seat(mesh, name, make, self._changed) for mesh in meshes]
        self.context_length, self._vocabulary, dtype = self._seats[0].about()
        self.capabilities = attrs.evolve(self.capabilities, dtype=dtype)
        self._engines = [(seat, engine) for seat in self._seats for engine in range(seat.engines)]
        self._places = {each: place for place, each in enumerate(self._engines)}
        self._router, self._numbers = Router(len(self._engines)), itertools.count()
        self._tended: set[Seat] = set()  # a thread looks after them
        self._called: set[Seat] = set()  # and waits for the answer of their engines
        self._receives = threading.Lock()  # weights are received once at a time
        self._weights: Iterable[Bucket | Future[Bucket]] | None = None  # for an engine that is started again
        self._broken = ""  # what is wrong with the weights
        self._warned = False

    @property
    def meshes(self) -> list[Mesh]:
        """Where its engines are."""
        return [seat.mesh for seat in self._seats]

    def generate(
        self,
        prompts: Sequence[Chunks],
        *,
        seeds: Sequence[int] | None = None,
        sampling: Sampling | None = None,
    ) -> Future[list[Completion]]:
        """Complete each prompt once; see `nrl.backends.Sampler`. Prompts that begin alike go to one engine.

        The future raises `LostRequest` for a prompt with which engines died several times, and `LostActor` if no engine
        is left.

        Raises:
            GenerationError: a prompt that cannot be completed, or weights that were received only in part.
            ClosedCluster: the cluster has been left.
        """
        return gather(self._ask(prompts, seeds, sampling))

    def everywhere(self, prompt: Sequence[int], sampling: Sampling) -> Future[list[Completion]]:
        """Let every engine complete a prompt; see `nrl.backends.sampling.base.Probed`.

        Engines that are being started again are left out, unless there are no others.
        """
        load, alive = self._load(), self._alive()
        there = [place for place in alive if math.isfinite(load[place])] or alive
        return gather(self._ask([prompt] * len(there), None, sampling, there))

    def _ask(
        self,
        prompts: Sequence[Chunks],
        seeds: Sequence[int] | None,
        sampling: Sampling | None,
        engines: Sequence[int] | None = None,
    ) -> "list[futures.Future[Completion]]":
        self._cluster.check_open("generate")
        chosen = sampling or self.sampling
        self._warned = self._warned or warn_of_truncation(self._name, chosen, self._vocabulary, stacklevel=4)
        noise = list(range(len(prompts)) if seeds is None else seeds)
        media = self.capabilities.media
        check_prompts(prompts, noise, chosen.stop_token_ids, self._vocabulary, self.context_length, media)
        given_up = GIVEN_UP.get()

        def awaited(row: int, prompt: Chunks) -> Awaited:
            number, cancellable = next(self._numbers), given_up is not None
            request = Request(number, list(prompt), noise[row], chosen, cancellable)
            return Awaited(request, is_given_up=lambda: given_up is not None and given_up()[row])

        asked = [awaited(row, prompt) for row, prompt in enumerate(prompts)]
        with self._changed:
            if self._broken:
                raise self._unfit()
            self._place(asked, engines)
        self._work_where_wanted()
        return [each.answer for each in asked]

    def _place(self, asked: Sequence[Awaited], engines: Sequence[int] | None = None) -> None:
        """Choose an engine for each request, which waits for it from now on."""
        alive, load = self._alive(), self._load()
        if not alive:
            for each in asked:
                each.fail(cast(BaseException, self._seats[0].error))
            return
        if engines is None and min(load) < math.inf:
            engines = self._router.choose([each.request.prompt for each in asked], load)
        elif engines is None:  # all that are left are being started again
            engines = [alive[place % len(alive)] for place in range(len(asked))]
        for each, chosen in zip(asked, engines, strict=True):
            seat, engine = self._engines[chosen]
            seat.waiting[engine].append(each)

    def _load(self) -> list[float]:
        return [each for seat in self._seats for each in seat.load]

    def _alive(self) -> list[int]:
        return [place for place, (seat, _) in enumerate(self._engines) if seat.state != "lost"]

    def _in(self, *states: SeatState) -> list[Seat]:
        return [seat for seat in self._seats if seat.state in states]

    def _work_where_wanted(self) -> None:
        """Start a thread for each seat with work that none looks after; do the work here where engines are local."""
        with self._changed:
            idle = [seat for seat in self._seats if seat.wanted and seat not in self._tended]
            self._tended.update(idle)
        for seat in idle:
            if self.capabilities.remote:
                self._cluster.thread(self._work, seat, name=self._name)
            else:
                self._work(seat)

    def _work(self, seat: Seat) -> None:
        """Let the engines of a seat decode until nobody waits for an answer, and start them again if they die."""
        try:
            while (work := self._next(seat)) is not None:
                try:
                    if seat.state != "starting":
                        self._answer(seat, seat.advance(work, self.version))
                except Exception as error:
                    if (death := seat.death(error)) is None:
                        self._fail(seat, error)
                    else:
                        seat.die(death)
                if seat.state == "starting":
                    self._revive(seat)
        except BaseException as error:  # an interrupt, or a cluster that was left
            with self._changed:
                self._fail(seat, error, waiting=True)
                self._tended.discard(seat)
                self._called.discard(seat)
                self._changed.notify_all()
            if not (self.capabilities.remote and isinstance(error, Exception)):
                raise

    def _next(self, seat: Seat) -> list[Work] | None:
        """The next work for the engines, as soon as they may take some; None: there is none."""
        with self._changed:
            self._called.discard(seat)
            self._changed.notify_all()
            self._until(lambda: seat.free, f"generate: no engine could be asked, {_AFTER}")
            if seat.state == "starting":
                return []
            work = seat.take()
            if seat.state == "lost" or not (seat.under_way or any(cancelled for _, cancelled in work)):
                self._tended.discard(seat)
                seat.show()
                return None
            self._called.add(seat)
            return work

    def _until(self, condition: Callable[[], bool], otherwise: str) -> None:
        limit = getattr(self._cluster, "deadline", math.inf)
        began = time.monotonic()
        while not self._changed.wait_for(condition, 1.0):
            self._cluster.check_open(otherwise.partition(":")[0])
            if time.monotonic() - began > limit:
                raise DeadlineExceeded(f"{otherwise} (within {limit:g} s)")

    def _answer(self, seat: Seat, finished: Sequence[Sequence[tuple[int, Completion | Exception]]]) -> None:
        with self._changed:
            for engine, found in enumerate(finished):
                for number, answer in found:
                    if (asked := seat.answered(engine, number, answer)) is None:
                        continue  # nobody waits for it any more
                    if isinstance(answer, Exception):
                        asked.fail(answer)
                    else:
                        tokens = [*asked.request.prompt, *answer.token_ids.tolist()]
                        self._router.has_read(self._places[seat, engine], tokens)
                        asked.give(answer)

    def _fail(self, seat: Seat, error: BaseException, *, waiting: bool = False) -> None:
        with self._changed:
            asked, others = seat.take_back()
            for each in [*asked, *(others if waiting else [])]:
                each.fail(error)
            if not waiting:
                self._place(others)

    def _unfit(self) -> GenerationError:
        return GenerationError(
            f"generate: the sampler's weights {self._broken}; publish a complete set of weights first"
        )

    def _revive(self, seat: Seat) -> None:
        """Start the engines of a seat again after their death; their requests are asked again, here or elsewhere."""
        self._cluster.check_open("generate")
        error = seat.error
        with self._changed:
            self._called.discard(seat)
            asked, waiting = seat.take_back()
            for each in asked:
                each.deaths += 1
                if each.deaths >= _TIMES:
                    each.fail(LostRequest(f"generate: {_TIMES} engines died while they decoded it; the last: {error}"))
            again = [each for each in asked if each.deaths < _TIMES]
            self._place([*again, *waiting])
            self._changed.notify_all()
        self._work_where_wanted()
        death, count = str(error).partition(" The last lines of its log:")[0], len(asked) + len(waiting)
        slow_wait.say(
            f"{death} Its {count} requests are asked again, and mesh '{seat.mesh.name}' is started again in "
            f"{seat.mesh.slots!r}"
        )
        outcome = "it has been started again"
        try:
            seat.restart(_TIMES, lambda: self._renew(seat))
        except Exception as final:
            outcome = f"it is not started again: {final}"
            with self._changed:
                seat.lose(final)
                self._place(seat.take_back()[1])
            self._work_where_wanted()
        idle = seat.state != "lost" and not self._in("starting", "serving", "receiving")
        more = f"The sampler's weights {self._broken}. " if self._broken else _WAITS if idle else ""
        say(
            f"{self._name}: an engine was lost, and {outcome}; {len(again)} requests were asked again, and "
            f"{len(asked) - len(again)} given up. {more}{error}"
        )

    def _renew(self, seat: Seat) -> None:
        """Give engines that have been started again the weights, if they are still there; then they serve."""
        with self._receives:
            try:
                whole = self._given_again(seat)
            except WeightMismatch as error:
                whole = all(min(other.load) == math.inf for other in self._seats if other is not seat)
                if whole:
                    self.distrust(str(error))
                else:
                    say(f"{self._name}: what was started again does not serve before the next publish. {error}")
            with self._changed:
                if whole:
                    seat.serve()
                else:
                    seat.lack()
                    self._place(seat.take_back()[1])

    def _given_again(self, seat: Seat) -> bool:
        """Give a seat the current weights and check them; False: a step has consumed them."""

        def complete(prompt: Sequence[int], sampling: Sampling) -> Future[list[Completion]]:
            return done(seat.complete(Request(next(self._numbers), prompt, 0, sampling), self.version))

        if self._weights is None:
            return self.version == 0
        try:
            for death in give([seat], self._weights, self.version).values():
                raise death
            if isinstance(self._weights, Weights):
                self._weights.check(self.version, complete)
        except ConsumedState:
            return False
        return True

    def receive(self, buckets: Iterable[Bucket | Future[Bucket]], version: int, *, inflight: Inflight = "wait") -> None:
        """Replace the weights in place; see `nrl.backends.Sampler`.

        Tensors may have any dtype and device; of tied weights one name is enough. Buckets that can be iterated again
        are kept for engines that are started again.

        Raises:
            ModelError: as there. The sampler then holds a mixture, and refuses to generate until it has received a
                complete set.
            LostActor: an engine died, and cannot be started again and given the weights.
        """
        self._cluster.check_open("receive")
        with self._receives, self._while_none_decodes(inflight):
            self._weights = None if iter(buckets) is buckets else buckets
            try:
                for seat in self._in("empty"):
                    seat.receive()
                seats = self._in("receiving")
                if not self._alive():
                    raise cast(Exception, self._seats[0].error)
                for seat, error in (give(seats, buckets, version) if seats else {}).items():
                    if self._weights is None:
                        raise error
                    seat.die(error)
            except BaseException as error:
                self._weights = None
                self._refuse(f"are incomplete since the last receive ({str(error) or type(error).__name__})")
                for seat in self._in("receiving"):
                    seat.lack()
                raise
            with self._changed:
                self._broken, self.version = "", version

    def distrust(self, reason: str) -> None:
        """Refuse to generate, for this reason, until a complete set of weights has been received."""
        self._refuse(f"are not to be trusted ({reason})")

    def _refuse(self, broken: str) -> None:
        with self._changed:
            self._broken = broken
            for seat in self._seats:
                self._fail(seat, self._unfit(), waiting=True)
            self._changed.notify_all()

    @contextmanager
    def _while_none_decodes(self, inflight: Inflight) -> Iterator[None]:
        """Run the block while no engine decodes; the serving engines receive in it, and serve again after it."""
        try:
            with self._changed:
                for seat in self._in("serving"):
                    seat.receive(finish=inflight == "wait")
                self._until(
                    lambda: not (self._called or any(seat.finishing for seat in self._seats)),
                    "receive: what is under way did not end",
                )
                if inflight == "abort":
                    for seat in self._seats:
                        self._place([*itertools.chain(*seat.take_back())])
            yield
        finally:
            with self._changed:
                for seat in self._in("receiving"):
                    seat.serve()
            self._work_where_wanted()


class StreamingEnginePool(EnginePool):
    """A pool whose engines take on requests while they decode others; `nrl.backends.vllm.sampler` makes one."""

    def stream(
        self, prompts: Sequence[Chunks], seeds: Sequence[int], sampling: Sampling | None = None
    ) -> "list[futures.Future[Completion]]":
        """As `generate`, with a future for each row; if one is cancelled, its engine forgets the row."""
        return self._ask(prompts, seeds, sampling)
