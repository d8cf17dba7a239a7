"""A sampler over a pool of engines of any kind, each with a copy of the weights.

`generate` and `stream` place each request with an engine. The thread of the engine's replica lets the engine decode as
long as it has requests, answers the finished ones, and lets new ones join. Weights are received between two calls of an
engine. An engine that dies is started again and gets the weights; its requests are asked again, here or elsewhere.
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
from nrl.backends.sampling.replica import EngineReplica, EngineStep, PendingRequest, ReplicaState
from nrl.backends.sampling.validation import check_prompts, warn_of_truncation
from nrl.backends.sampling.weight_delivery import Weights, give, say
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
        """The number of publishes that it samples early, for `nrl.ahead`."""
        self.capabilities = Capabilities(
            streams=isinstance(self, StreamingEnginePool),
            remote=meshes[0].cluster.remote,
            tolerance=tolerance,
            adapter=model.adapter,
            media=media,
            routes=routes,
        )
        self._name, self._cluster = name, meshes[0].cluster
        self._changed = threading.Condition()  # Guards the replicas; each change of their state notifies it.
        self._replicas = [EngineReplica(mesh, name, make, self._changed) for mesh in meshes]
        self.context_length, self._vocabulary, dtype = self._replicas[0].about()
        self.capabilities = attrs.evolve(self.capabilities, dtype=dtype)
        self._engines = [(replica, engine) for replica in self._replicas for engine in range(replica.engines)]
        self._indices = {engine: index for index, engine in enumerate(self._engines)}
        self._router, self._numbers = Router(len(self._engines)), itertools.count()
        self._tended: set[EngineReplica] = set()  # replicas that a thread looks after
        self._called: set[EngineReplica] = set()  # replicas whose thread waits for the answer of their engines
        self._receives = threading.Lock()  # One receive at a time.
        self._weights: Iterable[Bucket | Future[Bucket]] | None = None  # Kept for engines that are started again.
        self._broken = ""  # why the weights are unusable
        self._warned = False

    @property
    def meshes(self) -> list[Mesh]:
        """The meshes of its engines."""
        return [replica.mesh for replica in self._replicas]

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

        Restarting engines are left out, unless all engines restart.
        """
        load, alive = self._load(), self._alive()
        available = [engine for engine in alive if math.isfinite(load[engine])] or alive
        return gather(self._ask([prompt] * len(available), None, sampling, available))

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
        read_given_up = GIVEN_UP.get()

        def make_pending(row: int, prompt: Chunks) -> PendingRequest:
            number, cancellable = next(self._numbers), read_given_up is not None
            request = Request(number, list(prompt), noise[row], chosen, cancellable)
            return PendingRequest(request, is_given_up=lambda: read_given_up is not None and read_given_up()[row])

        pending = [make_pending(row, prompt) for row, prompt in enumerate(prompts)]
        with self._changed:
            if self._broken:
                raise self._make_unfit_error()
            self._place(pending, engines)
        self._start_work()
        return [request.answer for request in pending]

    def _place(self, requests: Sequence[PendingRequest], engines: Sequence[int] | None = None) -> None:
        """Choose an engine for each request, which waits for it from now on."""
        alive, load = self._alive(), self._load()
        if not alive:
            for request in requests:
                request.fail(cast(BaseException, self._replicas[0].error))
            return
        if engines is None and min(load) < math.inf:
            engines = self._router.choose([request.request.prompt for request in requests], load)
        elif engines is None:  # all that are left are being started again
            engines = [alive[index % len(alive)] for index in range(len(requests))]
        for request, chosen in zip(requests, engines, strict=True):
            replica, engine = self._engines[chosen]
            replica.waiting[engine].append(request)

    def _load(self) -> list[float]:
        return [count for replica in self._replicas for count in replica.load]

    def _alive(self) -> list[int]:
        return [index for index, (replica, _) in enumerate(self._engines) if replica.state != "lost"]

    def _list_in(self, *states: ReplicaState) -> list[EngineReplica]:
        return [replica for replica in self._replicas if replica.state in states]

    def _start_work(self) -> None:
        """Start a thread for each replica with work that has no thread; do the work here where engines are local."""
        with self._changed:
            idle = [replica for replica in self._replicas if replica.has_work and replica not in self._tended]
            self._tended.update(idle)
        for replica in idle:
            if self.capabilities.remote:
                self._cluster.thread(self._work, replica, name=self._name)
            else:
                self._work(replica)

    def _work(self, replica: EngineReplica) -> None:
        """Let the engines of a replica decode until nobody waits for an answer, and start them again if they die."""
        try:
            while (work := self._next_steps(replica)) is not None:
                try:
                    if replica.state != "starting":
                        self._answer(replica, replica.advance(work, self.version))
                except Exception as error:
                    if (death := replica.describe_death(error)) is None:
                        self._fail(replica, error)
                    else:
                        replica.die(death)
                if replica.state == "starting":
                    self._revive(replica)
        except BaseException as error:  # an interrupt, or a cluster that was left
            with self._changed:
                self._fail(replica, error, waiting=True)
                self._tended.discard(replica)
                self._called.discard(replica)
                self._changed.notify_all()
            if not (self.capabilities.remote and isinstance(error, Exception)):
                raise

    def _next_steps(self, replica: EngineReplica) -> list[EngineStep] | None:
        """Return the next steps of the engines, as soon as they may take some; None: there is no work."""
        with self._changed:
            self._called.discard(replica)
            self._changed.notify_all()
            self._wait_until(lambda: replica.is_ready, f"generate: no engine could be asked, {_AFTER}")
            if replica.state == "starting":
                return []
            work = replica.take_steps()
            if replica.state == "lost" or not (replica.under_way or any(cancelled for _, cancelled in work)):
                self._tended.discard(replica)
                replica.show()
                return None
            self._called.add(replica)
            return work

    def _wait_until(self, condition: Callable[[], bool], otherwise: str) -> None:
        limit = getattr(self._cluster, "deadline", math.inf)
        began = time.monotonic()
        while not self._changed.wait_for(condition, 1.0):
            self._cluster.check_open(otherwise.partition(":")[0])
            if time.monotonic() - began > limit:
                raise DeadlineExceeded(f"{otherwise} (within {limit:g} s)")

    def _answer(self, replica: EngineReplica, finished: Sequence[Sequence[tuple[int, Completion | Exception]]]) -> None:
        with self._changed:
            for engine, answers in enumerate(finished):
                for number, answer in answers:
                    if (request := replica.pop_request(engine, number, answer)) is None:
                        continue  # nobody waits for it any more
                    if isinstance(answer, Exception):
                        request.fail(answer)
                    else:
                        tokens = [*request.request.prompt, *answer.token_ids.tolist()]
                        self._router.has_read(self._indices[replica, engine], tokens)
                        request.complete(answer)

    def _fail(self, replica: EngineReplica, error: BaseException, *, waiting: bool = False) -> None:
        with self._changed:
            in_flight, queued = replica.take_back()
            for request in [*in_flight, *(queued if waiting else [])]:
                request.fail(error)
            if not waiting:
                self._place(queued)

    def _make_unfit_error(self) -> GenerationError:
        return GenerationError(
            f"generate: the sampler's weights {self._broken}; publish a complete set of weights first"
        )

    def _revive(self, replica: EngineReplica) -> None:
        """Start the engines of a replica again after their death; their requests are asked again, here or elsewhere."""
        self._cluster.check_open("generate")
        error = replica.error
        with self._changed:
            self._called.discard(replica)
            in_flight, waiting = replica.take_back()
            for request in in_flight:
                request.deaths += 1
                if request.deaths >= _TIMES:
                    request.fail(
                        LostRequest(f"generate: {_TIMES} engines died while they decoded it; the last: {error}")
                    )
            retried = [request for request in in_flight if request.deaths < _TIMES]
            self._place([*retried, *waiting])
            self._changed.notify_all()
        self._start_work()
        death, count = str(error).partition(" The last lines of its log:")[0], len(in_flight) + len(waiting)
        slow_wait.say(
            f"{death} Its {count} requests are asked again, and mesh '{replica.mesh.name}' is started again in "
            f"{replica.mesh.slots!r}"
        )
        outcome = "it has been started again"
        try:
            replica.restart(_TIMES, lambda: self._renew(replica))
        except Exception as final:
            outcome = f"it is not started again: {final}"
            with self._changed:
                replica.lose(final)
                self._place(replica.take_back()[1])
            self._start_work()
        idle = replica.state != "lost" and not self._list_in("starting", "serving", "receiving")
        consequence = f"The sampler's weights {self._broken}. " if self._broken else _WAITS if idle else ""
        say(
            f"{self._name}: an engine was lost, and {outcome}; {len(retried)} requests were asked again, and "
            f"{len(in_flight) - len(retried)} given up. {consequence}{error}"
        )

    def _renew(self, replica: EngineReplica) -> None:
        """Give restarted engines the weights, if these still exist; then they serve."""
        with self._receives:
            try:
                ready = self._give_again(replica)
            except WeightMismatch as error:
                ready = all(min(other.load) == math.inf for other in self._replicas if other is not replica)
                if ready:
                    self.distrust(str(error))
                else:
                    say(f"{self._name}: what was started again does not serve before the next publish. {error}")
            with self._changed:
                if ready:
                    replica.serve()
                else:
                    replica.lack()
                    self._place(replica.take_back()[1])

    def _give_again(self, replica: EngineReplica) -> bool:
        """Give a replica the current weights and check them; False: a step has consumed them."""

        def complete(prompt: Sequence[int], sampling: Sampling) -> Future[list[Completion]]:
            return done(replica.complete(Request(next(self._numbers), prompt, 0, sampling), self.version))

        if self._weights is None:
            return self.version == 0
        try:
            for death in give([replica], self._weights, self.version).values():
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
        with self._receives, self._pause_decoding(inflight):
            self._weights = None if iter(buckets) is buckets else buckets
            try:
                for replica in self._list_in("empty"):
                    replica.receive()
                replicas = self._list_in("receiving")
                if not self._alive():
                    raise cast(Exception, self._replicas[0].error)
                for replica, error in (give(replicas, buckets, version) if replicas else {}).items():
                    if self._weights is None:
                        raise error
                    replica.die(error)
            except BaseException as error:
                self._weights = None
                self._refuse(f"are incomplete since the last receive ({str(error) or type(error).__name__})")
                for replica in self._list_in("receiving"):
                    replica.lack()
                raise
            with self._changed:
                self._broken, self.version = "", version

    def distrust(self, reason: str) -> None:
        """Refuse to generate, for this reason, until a complete set of weights has been received."""
        self._refuse(f"are not to be trusted ({reason})")

    def _refuse(self, broken: str) -> None:
        with self._changed:
            self._broken = broken
            for replica in self._replicas:
                self._fail(replica, self._make_unfit_error(), waiting=True)
            self._changed.notify_all()

    @contextmanager
    def _pause_decoding(self, inflight: Inflight) -> Iterator[None]:
        """Run the block while no engine decodes; the serving engines receive in it, and serve again after it."""
        try:
            with self._changed:
                for replica in self._list_in("serving"):
                    replica.receive(finish=inflight == "wait")
                self._wait_until(
                    lambda: not (self._called or any(replica.is_finishing for replica in self._replicas)),
                    "receive: what is under way did not end",
                )
                if inflight == "abort":
                    for replica in self._replicas:
                        self._place([*itertools.chain(*replica.take_back())])
            yield
        finally:
            with self._changed:
                for replica in self._list_in("receiving"):
                    replica.serve()
            self._start_work()


class StreamingEnginePool(EnginePool):
    """A pool of engines that take on requests while decoding others; `nrl.backends.vllm.sampler` makes one."""

    def stream(
        self, prompts: Sequence[Chunks], seeds: Sequence[int], sampling: Sampling | None = None
    ) -> "list[futures.Future[Completion]]":
        """Complete each prompt, with a future for each row; if one is cancelled, its engine forgets the row."""
        return self._ask(prompts, seeds, sampling)
