"""A sampler over a pool of engines of any kind, each with a copy of the weights.

Requests are spread over the engines, and a thread asks each engine as long as that has something to do: what is
finished goes to whoever waits for it, and new requests join. Weights are received between two such calls. An engine
that dies is started again and given the weights; its requests are asked again, here or elsewhere.
"""

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

from nrl.backends.base import Bucket, Completion, Model, Sampling
from nrl.backends.models.loading import load_tokenizer
from nrl.backends.samplers import Inflight
from nrl.backends.sampling.receiving import give, give_again, say
from nrl.backends.sampling.replica import Replica, Request, check
from nrl.backends.sampling.routing import Spread
from nrl.backends.sampling.seat import Asked, Order, Seat
from nrl.backends.sampling.truncation import warn_of_truncation
from nrl.errors import DeadlineExceeded, GenerationError, LostRequest, ModelError, WeightMismatch
from nrl.runtime.mesh.futures import Future, gathered
from nrl.runtime.mesh.placement import Mesh

__all__ = ["ReplicatedSampler", "StreamingSampler"]

_AFTER = "as where it was started again while a step had consumed its weights; publish those that the step returned"
_WAITS = "No engine has weights, since a step has consumed them: requests wait for the next publish. "
_TIMES = 3  # engines that may die with a request; and how often in a row one may die without an answer in between


class ReplicatedSampler:
    """A `nrl.backends.Sampler` over engines; `nrl.backends.hf.sampler` makes one.

    Args:
        name: how errors and warnings name it.
        meshes: where its engines live; generating after their cluster has been left is an error.
        make: makes an engine, in each process.
        model: what it samples from.
        sampling: for calls that do not say.
        tolerance: nats that its log-probabilities may differ from a trainer's; None: they are computed alike.
    """

    def __init__(
        self,
        name: str,
        meshes: Sequence[Mesh],
        make: Callable[[], Replica],
        model: Model,
        sampling: Sampling,
        tolerance: float | None = None,
    ) -> None:
        if model.head != "lm":
            raise ModelError(f"{name}: the model has head='{model.head}'; only a language model, head='lm', samples")
        self._name, self._sampling, self._version, self._tolerance = name, sampling, 0, tolerance
        self._cluster, self._tokenizer, self._adapter = meshes[0].cluster, load_tokenizer(model), model.adapter
        self._seats = [Seat(mesh, name, make) for mesh in meshes]
        self._context_length, self._vocabulary = self._seats[0].about()
        self._engines = [(seat, engine) for seat in self._seats for engine in range(seat.engines)]
        self._places = {each: place for place, each in enumerate(self._engines)}
        self._spread, self._numbers = Spread(len(self._engines)), itertools.count()
        self._changed = threading.Condition()  # guards the seats, and is told of whatever somebody may wait for
        self._receives = threading.Lock()  # one at a time
        self._receiving: Inflight | None = None
        self._weights: Iterable[Bucket | Future[Bucket]] | None = None  # for an engine that is started again
        self._broken = ""  # what is wrong with the weights
        self._warned = False
        self.lag = 0
        """How many publishes early it is asked, by `nrl.ahead`."""

    @property
    def meshes(self) -> list[Mesh]:
        """Where its engines are."""
        return [seat.mesh for seat in self._seats]

    @property
    def version(self) -> int:
        """How often weights had been published when the ones it holds were."""
        return self._version

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer of its model."""
        return self._tokenizer

    @property
    def context_length(self) -> int:
        """The most tokens that a prompt and its completion may have together."""
        return self._context_length

    @property
    def sampling(self) -> Sampling:
        """What it samples with where a call does not say."""
        return self._sampling

    @property
    def adapter(self) -> Any:
        """`nrl.backends.Model.adapter` of its model: where there is one, it is sent that alone."""
        return self._adapter

    @property
    def remote(self) -> bool:
        """Whether it decodes in other processes, so that this one can do something else meanwhile."""
        return self._cluster.remote

    @property
    def tolerance(self) -> float | None:
        """How far its log-probabilities may be from a trainer's; None: they are computed alike."""
        return self._tolerance

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        seeds: Sequence[int] | None = None,
        sampling: Sampling | None = None,
    ) -> Future[list[Completion]]:
        """Complete each prompt once; prompts are spread over the engines, those that begin alike together.

        Args:
            prompts: token ids, of any lengths; equal ones are read once.
            seeds: of each row's noise; None: 0, 1, 2 ...
            sampling: None: the sampler's own.

        Returns:
            A future of one `Completion` for each prompt, in order. It raises `LostRequest` for one with which engines
            died several times, and `LostActor` if no engine is left.

        Raises:
            GenerationError: a prompt that cannot be completed, or weights that were received only in part.
            ClosedCluster: the cluster has been left.
        """
        return gathered(self._ask(prompts, seeds, sampling))

    def everywhere(self, prompt: Sequence[int], sampling: Sampling) -> Future[list[Completion]]:
        """Let every engine complete a prompt; see `nrl.backends.samplers.Probed`.

        Those that are being started again are not waited for, unless no other is left.
        """
        alive = [place for place, (seat, _) in enumerate(self._engines) if seat.lost is None]
        load = self._load()
        there = [place for place in alive if math.isfinite(load[place])] or alive
        return gathered(self._ask([prompt] * len(there), None, sampling, there))

    def receive(self, buckets: Iterable[Bucket | Future[Bucket]], version: int, *, inflight: Inflight = "wait") -> None:
        """Replace the weights in place, one bucket after the other; `nrl.publish` calls it.

        Args:
            buckets: tensors by their Hugging Face names, of any dtype and device; of tied weights one name is enough.
                They are kept for engines that are started again, if they can be iterated once more.
            version: stamped from now on on what is sampled.
            inflight: what becomes of requests that are under way; see `nrl.publish`.

        Raises:
            ModelError: a name that the model does not have, a wrong shape, or weights that are missing. The sampler
                then holds a mixture and refuses to generate until it has received a complete set.
            LostActor: an engine died, and cannot be started again and given the weights.
        """
        self._cluster.check_open("receive")
        with self._receives, self._while_none_decodes(inflight):
            self._weights = None if iter(buckets) is buckets else buckets
            seats = [seat for seat in self._seats if seat.lost is None and seat.died is None]
            try:
                if all(seat.lost for seat in self._seats):
                    raise cast(Exception, self._seats[0].lost)
                for seat, error in (give(seats, buckets, version) if seats else {}).items():
                    if self._weights is None:
                        raise error
                    seat.died = error
            except BaseException as error:
                self._weights = None
                self._refuse(f"are incomplete since the last receive ({str(error) or type(error).__name__})")
                raise
            with self._changed:
                self._broken, self._version = "", version
                for seat in seats:
                    seat.empty = False

    def distrust(self, reason: str) -> None:
        """Refuse to generate, until a complete set of weights has been received.

        Args:
            reason: what was found wrong with what it has; errors say it.
        """
        self._refuse(f"are not to be trusted ({reason})")

    def _refuse(self, broken: str) -> None:
        with self._changed:
            self._broken = broken
            for seat in self._seats:
                self._fail(seat, self._unfit(), waiting=True)
            self._changed.notify_all()

    @contextmanager
    def _while_none_decodes(self, inflight: Inflight) -> Iterator[None]:
        def quiet() -> bool:
            return not any(seat.busy or (inflight == "wait" and seat.under_way) for seat in self._seats)

        try:
            with self._changed:
                self._receiving = inflight
                self._changed.notify_all()
                self._until(quiet, "receive: what is under way did not end")
                if inflight == "abort":
                    for seat in self._seats:
                        asked, waiting = seat.take_back()
                        self._place([*asked, *waiting])
            yield
        finally:
            with self._changed:
                self._receiving = None
                self._changed.notify_all()
            self._work_where_wanted()

    def _until(self, condition: Callable[[], bool], otherwise: str) -> None:
        limit = getattr(self._cluster, "deadline", math.inf)
        began = time.monotonic()
        while not self._changed.wait_for(condition, 1.0):
            self._cluster.check_open(otherwise.partition(":")[0])
            if time.monotonic() - began > limit:
                raise DeadlineExceeded(f"{otherwise} (within {limit:g} s)")

    def _ask(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int] | None,
        sampling: Sampling | None,
        engines: Sequence[int] | None = None,
    ) -> "list[futures.Future[Completion]]":
        self._cluster.check_open("generate")
        chosen = sampling or self._sampling
        self._warned = self._warned or warn_of_truncation(self._name, chosen, self._vocabulary, stacklevel=4)
        noise = list(range(len(prompts)) if seeds is None else seeds)
        check(prompts, noise, chosen.stop_token_ids, self._vocabulary, self._context_length)
        pairs = zip(prompts, noise, strict=True)
        asked = [Asked(Request(next(self._numbers), list(prompt), seed, chosen)) for prompt, seed in pairs]
        with self._changed:
            if self._broken:
                raise self._unfit()
            self._place(asked, engines)
        self._work_where_wanted()
        return [each.answer for each in asked]

    def _place(self, asked: Sequence[Asked], engines: Sequence[int] | None = None) -> None:
        """Let them wait for engines."""
        alive = [place for place, (seat, _) in enumerate(self._engines) if seat.lost is None]
        if not alive:
            for each in asked:
                each.fail(cast(BaseException, self._seats[0].lost))
            return
        load = self._load()
        if engines is None and min(load) < math.inf:
            engines = self._spread.choose([each.request.prompt for each in asked], load)
        elif engines is None:  # all that are left are being started again
            engines = [alive[place % len(alive)] for place in range(len(asked))]
        for each, chosen in zip(asked, engines, strict=True):
            seat, engine = self._engines[chosen]
            seat.waiting[engine].append(each)

    def _load(self) -> list[float]:
        return [each for seat in self._seats for each in seat.load]

    def _work_where_wanted(self) -> None:
        """Have somebody ask the engines that have something to do: a thread, or where that would not help, this one."""
        with self._changed:
            idle = [seat for seat in self._seats if (seat.wanted or seat.died) and seat.worker is None]
            for seat in idle:
                seat.worker = threading.Thread(target=self._work, args=(seat,), name=self._name, daemon=True)
        for seat in idle:
            assert seat.worker is not None
            if self.remote:
                seat.worker.start()
            else:
                self._work(seat)

    def _work(self, seat: Seat) -> None:
        """Ask the engines of a seat until nobody waits for an answer, and start them again if they die."""
        try:
            while (orders := self._next(seat)) is not None:
                try:
                    if seat.died is None:
                        self._answer(seat, seat.advance(orders))
                except Exception as error:
                    seat.died = seat.death(error)
                    if seat.died is None:
                        self._fail(seat, error)
                if seat.died is not None:
                    self._revive(seat, seat.died)
        except BaseException as error:  # an interrupt, or a cluster that was left
            with self._changed:
                self._fail(seat, error, waiting=True)
                seat.worker, seat.busy = None, False
                self._changed.notify_all()
            if not (self.remote and isinstance(error, Exception)):
                raise

    def _next(self, seat: Seat) -> list[Order] | None:
        """What to tell the engines next, as soon as they may be told something; None: there is nothing."""

        def free() -> bool:
            asking = self._receiving is None or (self._receiving == "wait" and seat.under_way)
            return bool(seat.died) or not seat.wanted or (asking and not seat.empty)

        with self._changed:
            seat.busy = False
            self._changed.notify_all()
            self._until(free, f"generate: no engine could be asked, {_AFTER}")
            if seat.died is not None:
                return []
            orders = seat.order(new=self._receiving is None)
            if seat.lost or not (seat.under_way or any(cancelled for _, cancelled in orders)):
                seat.worker = None
                seat.show()
                return None
            seat.busy = True
            return orders

    def _answer(self, seat: Seat, finished: "Sequence[Sequence[tuple[int, Completion | Exception]]]") -> None:
        with self._changed:
            for engine, found in enumerate(finished):
                for number, answer in found:
                    asked = seat.asked[engine].pop(number, None)
                    if asked is None:  # nobody wants it any more
                        continue
                    if isinstance(answer, Exception):
                        asked.fail(answer)
                        continue
                    seat.deaths = 0
                    tokens = [*asked.request.prompt, *answer.token_ids.tolist()]
                    self._spread.has_read(self._places[seat, engine], tokens)
                    asked.give(answer)

    def _fail(self, seat: Seat, error: BaseException, *, waiting: bool = False) -> None:
        with self._changed:
            asked, others = seat.take_back()
            for each in [*asked, *(others if waiting else [])]:
                each.fail(error)
            if not waiting:
                self._place(others)

    def _revive(self, seat: Seat, error: Exception) -> None:
        """Start an engine that has died anew, and let what it was asked be asked again, here or elsewhere."""
        self._cluster.check_open("generate")
        with self._changed:
            seat.busy = False  # nobody has to wait for this
            asked, waiting = seat.take_back()
            for each in asked:
                each.deaths += 1
            again = [each for each in asked if each.deaths < _TIMES]
            for each in asked:
                if each.deaths >= _TIMES:
                    each.fail(LostRequest(f"generate: {_TIMES} engines died while they decoded it; the last: {error}"))
            self._place([*again, *waiting])
            self._changed.notify_all()
        self._work_where_wanted()
        outcome = "it has been started again"
        try:
            seat.restart(error, _TIMES, partial(self._renew, seat))
        except Exception as final:
            outcome = f"it is not started again: {final}"
            with self._changed:
                seat.lost, seat.died = final, None
                _, waiting = seat.take_back()
                self._place(waiting)
                self._changed.notify_all()
            self._work_where_wanted()
        waits = not seat.lost and all(each.lost or each.empty for each in self._seats)
        more = f"The sampler's weights {self._broken}. " if self._broken else _WAITS if waits else ""
        say(
            f"{self._name}: an engine was lost, and {outcome}; {len(again)} requests were asked again, and "
            f"{len(asked) - len(again)} given up. {more}{error}"
        )

    def _renew(self, seat: Seat) -> None:
        """Give an engine that has been started again the weights, if they are still there; it may serve then."""

        def complete(prompt: Sequence[int], sampling: Sampling) -> list[Completion]:
            return seat.complete(Request(next(self._numbers), prompt, 0, sampling))

        with self._receives:
            try:
                empty = not give_again(seat, self._weights, self._version, self, complete)
            except WeightMismatch as error:
                empty = any(min(other.load) < math.inf for other in self._seats if other is not seat)
                if empty:
                    say(f"{self._name}: what was started again does not serve before the next publish. {error}")
                else:
                    self.distrust(str(error))
            with self._changed:
                seat.died, seat.empty = None, empty
                if empty:
                    self._place(seat.take_back()[1])
                self._changed.notify_all()

    def _unfit(self) -> GenerationError:
        return GenerationError(
            f"generate: the sampler's weights {self._broken}; publish a complete set of weights first"
        )


class StreamingSampler(ReplicatedSampler):
    """One whose engines take on requests while they decode others, so that nobody has to wait for a row to ask it.

    `nrl.backends.vllm.sampler` makes one.
    """

    def stream(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling | None = None
    ) -> "list[futures.Future[Completion]]":
        """As `generate`, with a future for each row; to cancel one is to have the engine forget it."""
        return self._ask(prompts, seeds, sampling)
