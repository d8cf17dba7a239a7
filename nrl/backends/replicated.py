"""A sampler with a copy of the weights in each of several engines, whichever engine decodes there.

Requests are spread over the engines, and a thread asks each engine as long as that has something to do: what is
finished goes to whoever waits for it, and new requests join. Weights are received between two such calls. An engine
that dies is started again and given the weights; its requests are asked again, here or elsewhere.
"""

import itertools
import math
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from typing import Any, cast

from nrl.backends.base import Bucket, Completion, Inflight, Model, Sampling
from nrl.backends.decoding import check
from nrl.backends.models import load_tokenizer
from nrl.backends.replica import Replica, Request
from nrl.backends.seats import Asked, Order, Seat, gathered
from nrl.backends.spread import Spread
from nrl.backends.truncation import warn_of_truncation
from nrl.errors import ConsumedState, DeadlineExceeded, FailedStart, GenerationError, LostActor, LostRequest
from nrl.runtime.futures import Future
from nrl.runtime.placement import Mesh

__all__ = ["ReplicatedSampler", "StreamingSampler"]

_TIMES = 3  # engines that may die with a request; and how often in a row one may die without an answer in between


_AFTER = "since an engine was lost while a step had consumed those that it had; publish the new ones"


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
        self._name, self._sampling, self._version, self._tolerance = name, sampling, 0, tolerance
        self._cluster, self._tokenizer = meshes[0].cluster, load_tokenizer(model)
        self._seats = [Seat(mesh, name, make) for mesh in meshes]
        self._context_length, self._vocabulary = self._seats[0].about()
        self._engines = [(seat, engine) for seat in self._seats for engine in range(seat.engines)]
        self._spread, self._numbers = Spread(len(self._engines)), itertools.count()
        self._changed = threading.Condition()  # guards the seats, and is told of whatever somebody may wait for
        self._receives = threading.Lock()  # one at a time
        self._receiving: Inflight | None = None
        self._weights: Iterable[Bucket | Future[Bucket]] | None = None  # for an engine that is started again
        self._broken = ""  # why the weights cannot be used
        self._warned = False

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
        """Let every engine complete a prompt; see `nrl.backends.base.Probed`."""
        alive = [place for place, (seat, _) in enumerate(self._engines) if seat.lost is None]
        return gathered(self._ask([prompt] * len(alive), None, sampling, alive))

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
            try:
                self._transfer(buckets, version)
            except BaseException as error:
                self._broken = str(error) or type(error).__name__
                for seat in self._seats:
                    self._fail(seat, self._incomplete())
                raise
            self._broken, self._version = "", version

    @contextmanager
    def _while_none_decodes(self, inflight: Inflight) -> Iterator[None]:
        with self._changed:
            self._receiving = inflight
            self._changed.notify_all()
            waits = inflight == "wait"
            self._changed.wait_for(lambda: not any(s.busy or (waits and s.under_way) for s in self._seats))
            if inflight == "abort":
                self._place([asked for seat in self._seats for asked in seat.take_back()])
        try:
            yield
        finally:
            with self._changed:
                self._receiving = None
                self._changed.notify_all()
            self._work_where_wanted()

    def _transfer(self, buckets: Iterable[Bucket | Future[Bucket]], version: int) -> None:
        """Give every engine the weights, bucket by bucket, so that nobody holds a second copy of the model."""
        seats = [seat for seat in self._seats if seat.lost is None]
        try:
            _give(seats, buckets, version)
        except (LostActor, DeadlineExceeded) as error:
            if isinstance(error, FailedStart) or self._weights is None:
                raise
            for seat in seats:  # which of them it was will show
                try:
                    self._restarted(seat, error, version, begun=True)
                except (LostActor, DeadlineExceeded) as final:
                    self._give_up(seat, final)
            if all(seat.lost for seat in seats):
                raise
        for seat in seats:
            seat.empty = False

    def _restarted(self, seat: Seat, error: Exception, version: int, *, begun: bool = False) -> None:
        """Give an engine that has died, or may have, the weights."""
        while True:
            if not begun:
                seat.deaths += 1
                if isinstance(error, FailedStart) or seat.deaths >= _TIMES:
                    raise error
                seat.restart()
            begun = False
            try:
                if self._weights is not None:
                    _give([seat], self._weights, version)
                elif version:
                    raise ConsumedState("receive: the weights are gone")
                return
            except (LostActor, DeadlineExceeded) as again:
                error = again

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
        if self._broken:
            raise self._incomplete()
        pairs = zip(prompts, noise, strict=True)
        asked = [Asked(Request(next(self._numbers), list(prompt), seed, chosen)) for prompt, seed in pairs]
        with self._changed:
            self._place(asked, engines)
        self._work_where_wanted()
        return [each.answer for each in asked]

    def _place(self, asked: Sequence[Asked], engines: Sequence[int] | None = None) -> None:
        """Let them wait for engines."""
        alive = [place for place, (seat, _) in enumerate(self._engines) if seat.lost is None]
        for place, each in enumerate(asked):
            if not alive:
                each.fail(cast(BaseException, self._seats[0].lost))
                continue
            load = [seat.load[engine] for seat, engine in self._engines]
            if engines is not None:
                chosen = engines[place]
            elif min(load) < math.inf:
                chosen = self._spread.choose(each.request.prompt, load, len(asked) - place)
            else:  # all that are left are being started again
                chosen = alive[place % len(alive)]
            seat, engine = self._engines[chosen]
            seat.waiting[engine].append(each)

    def _work_where_wanted(self) -> None:
        """Have somebody ask the engines that have something to do: a thread, or where that would not help, this one."""
        with self._changed:
            idle = [seat for seat in self._seats if seat.wanted and seat.worker is None]
            for seat in idle:
                seat.worker = threading.Thread(target=self._work, args=(seat,), name=self._name, daemon=True)
        for seat in idle:
            assert seat.worker is not None
            if self.remote:
                seat.worker.start()
            else:
                self._work(seat)

    def _work(self, seat: Seat) -> None:
        """Ask the engines of a seat until nobody waits for an answer."""
        while (orders := self._next(seat)) is not None:
            try:
                finished = seat.advance(orders)
            except (LostActor, DeadlineExceeded) as error:
                self._revive(seat, error)
            except Exception as error:
                self._fail(seat, error)
            except BaseException as error:
                self._fail(seat, error)
                self._next(seat)
                raise
            else:
                self._answer(seat, finished)

    def _next(self, seat: Seat) -> list[Order] | None:
        """What to tell the engines next, as soon as they may be told something; None: there is nothing."""

        def free() -> bool:
            return not seat.empty and (self._receiving is None or (self._receiving == "wait" and seat.under_way))

        with self._changed:
            seat.busy = False
            self._changed.notify_all()
            limit = getattr(self._cluster, "deadline", None)
            if not self._changed.wait_for(lambda: not seat.wanted or free(), limit):
                self._fail(seat, DeadlineExceeded(f"generate: no weights came within {limit:g} s, {_AFTER}"))
            orders = seat.order(new=self._receiving is None)
            if seat.lost or not (seat.under_way or any(cancelled for _, cancelled in orders)):
                seat.worker = None
                return None
            seat.busy = True
            return orders

    def _answer(self, seat: Seat, finished: Sequence[Sequence[tuple[int, Completion]]]) -> None:
        with self._changed:
            for engine, found in enumerate(finished):
                for number, completion in found:
                    asked = seat.asked[engine].pop(number, None)
                    if asked is not None:
                        seat.deaths = 0
                        tokens = [*asked.request.prompt, *completion.token_ids.tolist()]
                        self._spread.has_read(self._engines.index((seat, engine)), tokens)
                        asked.give(completion)

    def _fail(self, seat: Seat, error: BaseException) -> None:
        with self._changed:
            for asked in seat.take_back():
                asked.fail(error)

    def _revive(self, seat: Seat, error: LostActor | DeadlineExceeded) -> None:
        """Start an engine that has died anew, and let what it was asked be asked again, here or elsewhere."""
        with self._changed:
            seat.empty = True
            back = seat.take_back()
        for asked in back:
            asked.deaths += 1
        again = [asked for asked in back if asked.deaths < _TIMES]
        warnings.warn(
            f"{self._name}: an engine was lost and is started again; {len(again)} requests are asked again, and "
            f"{len(back) - len(again)} given up. {error}",
            stacklevel=2,
        )
        for asked in back:
            if asked.deaths >= _TIMES:
                asked.fail(LostRequest(f"generate: {_TIMES} engines died while they decoded it; the last: {error}"))
        with self._changed:
            self._place(again)
        self._work_where_wanted()
        try:
            self._restarted(seat, error, self._version)
            seat.empty = False
        except ConsumedState:  # they will come with the next publish
            return
        except Exception as final:
            self._give_up(seat, final)

    def _give_up(self, seat: Seat, error: BaseException) -> None:
        with self._changed:
            seat.lost = error
            self._place(seat.take_back())
        self._work_where_wanted()

    def _incomplete(self) -> GenerationError:
        return GenerationError(
            f"generate: the sampler's weights are incomplete since the last receive ({self._broken}); "
            "publish a complete set of weights first"
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


def _give(seats: Sequence[Seat], buckets: Iterable[Bucket | Future[Bucket]], version: int) -> None:
    for seat in seats:
        seat.begin()
    for bucket in buckets:
        for added in [seat.adding(bucket) for seat in seats]:
            added.result()
    for seat in seats:
        seat.end(version)
