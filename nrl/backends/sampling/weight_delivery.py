"""Giving weights to engines, bucket by bucket, so that no process holds a second copy of the model."""

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from nrl.backends.sampling.base import capabilities
from nrl.backends.sampling.replica import EngineReplica
from nrl.backends.training.states import Params
from nrl.backends.types import Bucket, Completion, Sampling, top_k
from nrl.batch import Batch
from nrl.errors import CorruptedTransfer, TransferError, WeightMismatch
from nrl.runtime.mesh.futures import Future, RemoteFuture, as_future
from nrl.runtime.mesh.placement import Mesh

__all__ = ["Weights", "give", "say"]

_LENGTH = 40  # tokens of a prompt that fills a block of cached keys and values
_PLACES = 4  # places where the prompt is cut off
_K = 8  # the trainer's most probable tokens, among which an engine's is


@attrs.frozen
class Weights:
    """The weights of params in buckets, which can be iterated any number of times; `nrl.publish` makes it.

    Args:
        params: of a trainer. When a step has consumed them, iterating raises `ConsumedState`.
        sampler: the receiver.
        sent_params: the params to send: all, or their adapter alone.
    """

    params: Params
    sampler: Any
    sent_params: Params = attrs.field(default=attrs.Factory(lambda self: self.params, takes_self=True))
    _expected: list[dict[str, Future[Tensor]]] = attrs.field(factory=list, init=False)

    def __iter__(self) -> Iterator[Future[Bucket]]:
        return self.sent_params.buckets("publish", dtype=capabilities(self.sampler).dtype)

    def to(self, meshes: Sequence[Mesh]) -> Iterator[Bucket | Future[Bucket]]:
        """Yield the same buckets, by the best way to these meshes; see `nrl.runtime.transfer`.

        The trainer computes the log-probabilities for `check`: now, if the engines are on its devices, since its turn
        would offload them while they load; or else after the last bucket, while engines load. Where
        engines have routes, `check` replays these, and nothing is computed beforehand.
        """
        trainer_slots, can = self.params.handle.mesh.slots, capabilities(self.sampler)
        beside = any(
            mesh.cluster is trainer_slots.cluster and {*mesh.slots.indices} & {*trainer_slots.indices}
            for mesh in meshes
        )
        checked = can.tolerance is not None and can.routes is None
        if checked and beside:
            self._expect()
        return self._buckets(meshes, checked)

    def _buckets(self, meshes: Sequence[Mesh], checked: bool) -> Iterator[Bucket | Future[Bucket]]:
        yield from self.sent_params.buckets("publish", meshes, capabilities(self.sampler).dtype)
        if checked:
            self._expect()

    def _expect(self) -> dict[str, Future[Tensor]]:
        """Return the trainer's most probable tokens and their log-probabilities ``[1, T, k]``, computed once."""
        if not self._expected:
            self._expected.append(self._forward([]))
        return self._expected[0]

    def _forward(self, routes: Sequence[Tensor]) -> dict[str, Future[Tensor]]:
        """Compute the same, in a row for each engine with routes, which are replayed as in a step."""
        prompt = _prompt(self.sampler)
        ids = torch.tensor([[*prompt, 0]] * max(1, len(routes)))
        columns = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if routes:
            columns["routes"] = routes[0].new_full((*ids.shape, *routes[0].shape[1:]), -1)
            columns["routes"][:, : len(prompt)] = torch.stack([*routes])
        k = min(_K, len(self.sampler.tokenizer))
        return self.params.trainer.forward(self.params, Batch(columns, batch_size=len(ids)).lock_(), [top_k(k)])

    def check(self, version: int, complete: Callable[[Sequence[int], Sampling], Future[list[Completion]]]) -> None:
        """Let engines that have these weights go on after a prompt, and compare log-probabilities with the trainer's.

        Each engine draws its most probable token after some beginnings of the prompt. The trainer has the most probable
        ones of each place; any other token is less probable there.

        Args:
            version: that completions have to bear.
            complete: lets each engine complete a prompt.

        Raises:
            WeightMismatch: an engine computes something else than the trainer does.
            ConsumedState: a step has consumed the params.
        """
        tolerance = capabilities(self.sampler).tolerance
        if tolerance is None:
            return
        prompt = _prompt(self.sampler)
        places = [*range(max(1, len(prompt) - _PLACES + 1), len(prompt) + 1)]
        greedy = Sampling(temperature=0, max_new_tokens=1)
        replies = [complete(prompt[:length], greedy) for length in places]
        # An engine that dies meanwhile is checked later.
        engines = [*zip(*(item.result() for item in replies), strict=False)]
        routes = [row[-1].routes for row in engines if row[-1].routes is not None]
        expected = self._forward(routes) if routes else self._expect()
        ids, logprobs = (expected[name].result()[:, places] for name in ("top_k_ids", "top_k_logprobs"))
        for number, row in enumerate(engines):
            mine = number if routes else 0
            tokens = torch.stack([item.token_ids[0] for item in row])
            engine_logprobs = torch.stack([item.logprobs[0] for item in row])
            same = ids[mine] == tokens[:, None]
            least_probable = logprobs[mine].min(-1).values
            trainers = (
                torch.where(same, logprobs[mine], 0)
                .sum(-1)
                .where(same.any(-1), torch.minimum(engine_logprobs, least_probable))
            )
            distance = float((trainers - engine_logprobs).abs().max())
            if not distance <= tolerance or any(item.version != version for item in row):
                raise WeightMismatch(
                    f"publish: with the weights of version {version}, engine {number} of {len(engines)} that were "
                    f"asked (at version {row[0].version}) gives the tokens {tokens.tolist()} after the first {places} "
                    f"of a prompt the log-probabilities {_round_all(engine_logprobs)}, and the trainer at most "
                    f"{_round_all(trainers)}: they are {distance:.2g} nats apart, and {tolerance:g} may be rounding. "
                    "The engine holds other weights, or keys and values that were computed with older ones; what it "
                    "samples cannot be trained on"
                )


def _prompt(sampler: Any) -> list[int]:
    length = min(_LENGTH, sampler.context_length - 1)
    return [(31 * index + 7) % len(sampler.tokenizer) for index in range(length)]


def _round_all(x: Tensor) -> list[float]:
    return [round(value, 4) for value in x.tolist()]


def give(
    replicas: Sequence[EngineReplica], weights: Iterable[Bucket | Future[Bucket]], version: int
) -> dict[EngineReplica, Exception]:
    """Give engines new weights, by the best way to them; where that fails, by value.

    Args:
        replicas: of the engines.
        weights: in buckets.
        version: of the weights.

    Returns:
        The replicas that died meanwhile, with their errors; all others have the weights.

    Raises:
        CorruptedTransfer: weights did not arrive as they were sent.
        Exception: the error of an engine on refusing the weights.
    """
    if isinstance(weights, Weights):
        try:
            return _give(replicas, weights.to([replica.mesh for replica in replicas]), version)
        except CorruptedTransfer:
            raise
        except TransferError as error:  # All receivers of a broadcast wait for one that died.
            say(f"publish: the weights go by value now, which is slower: {error}")
    return _give(replicas, weights, version)


def _give(
    replicas: Sequence[EngineReplica], buckets: Iterable[Bucket | Future[Bucket]], version: int
) -> dict[EngineReplica, Exception]:
    dead: dict[EngineReplica, Exception] = {}
    refused: list[Exception] = []

    def note(replica: EngineReplica, error: Exception, bucket: Any) -> None:
        # Otherwise it is the error of the trainer's mesh.
        its_own = not (isinstance(bucket, RemoteFuture) and bucket.failure() is error)
        if its_own and (death := replica.describe_death(error)) is not None:
            dead[replica] = death
        else:
            refused.append(error)

    def ask(step: Literal["begin", "add", "end"], bucket: Any = None) -> list[tuple[EngineReplica, Future[Any], Any]]:
        """Call a step in all replicas, without waiting for any."""
        called = []
        for replica in [replica for replica in replicas if replica not in dead]:
            try:
                called.append((replica, replica.load_weights(step, *([] if bucket is None else [bucket])), bucket))
            except Exception as error:
                note(replica, error, bucket)
        return called

    def wait(called: list[tuple[EngineReplica, Future[Any], Any]]) -> None:
        for replica, reply, bucket in called:
            try:
                reply.result()
            except Exception as error:
                note(replica, error, bucket)
        if refused:
            raise refused[0]

    wait(ask("begin"))
    loading = list[tuple[EngineReplica, Future[Any], Any]]()
    try:
        for bucket in buckets:  # the trainer reads the next one while engines load this one
            before, loading = loading, ask("add", as_future(bucket))
            wait(before)
    finally:
        wait(loading)
    wait(ask("end", version))
    return dead


def say(text: str) -> None:
    """Warn from a thread; where warnings are errors, print instead, since raising there would help nobody."""
    try:
        warnings.warn(text, stacklevel=2)
    except Warning:
        print(text, file=sys.stderr)  # noqa: T201
