"""Giving weights to engines, bucket by bucket, so that no process holds a second copy of the model."""

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from nrl.backends.base import Bucket, Completion, Sampling
from nrl.backends.samplers import capabilities
from nrl.backends.sampling.seat import Seat
from nrl.backends.training.states import Params
from nrl.batch import Batch
from nrl.errors import CorruptedTransfer, TransferError, WeightMismatch
from nrl.runtime.mesh.futures import Coming, Future, on_its_way
from nrl.runtime.mesh.placement import Mesh

__all__ = ["Weights", "give", "say"]

_PROBE = 136, 4  # tokens of a prompt that fills a block of cached keys and values, and of its completion


@attrs.frozen
class Weights:
    """The weights of params in buckets, which can be iterated any number of times; `nrl.publish` makes it.

    Args:
        params: of a trainer. When a step has consumed them, iterating raises `ConsumedState`.
        given: those of them that are given away: all, or the adapter alone.
    """

    params: Params
    given: Params = attrs.field(default=attrs.Factory(lambda self: self.params, takes_self=True))

    def __iter__(self) -> Iterator[Future[Bucket]]:
        return self.given.buckets("publish")

    def to(self, meshes: Sequence[Mesh]) -> Iterable[Bucket | Future[Bucket]]:
        """The same buckets, by the best way to these meshes; see `nrl.runtime.transfer`."""
        return self.given.buckets("publish", meshes)

    def check(
        self, sampler: Any, version: int, complete: Callable[[Sequence[int], Sampling], Sequence[Completion]]
    ) -> None:
        """Let engines that have these weights complete a prompt, and compare log-probabilities with the trainer's.

        Args:
            sampler: of these engines.
            version: that completions have to bear.
            complete: lets each engine complete a prompt, always the same one.

        Raises:
            WeightMismatch: an engine computes something else than the trainer does.
            ConsumedState: a step has consumed the params.
        """
        tolerance = capabilities(sampler).tolerance
        if tolerance is None:
            return
        length = min(_PROBE[0], sampler.context_length - _PROBE[1])
        prompt = [(31 * place + 7) % len(sampler.tokenizer) for place in range(length)]
        found = complete(prompt, Sampling(temperature=0, max_new_tokens=_PROBE[1]))
        rows = [torch.tensor([*prompt, *each.token_ids.tolist()]) for each in found]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
        columns = {"input_ids": ids, "attention_mask": mask}
        routes = [each.routes for each in found if each.routes is not None]
        if routes:  # as a step replays them
            short = torch.nn.utils.rnn.pad_sequence(routes, batch_first=True, padding_value=-1)
            columns["routes"] = short.new_full((*ids.shape, *short.shape[2:]), -1)
            columns["routes"][:, : short.shape[1]] = short
        batch = Batch(columns, batch_size=[len(rows)]).lock_()
        expected = self.params.trainer.logprobs(self.params, batch).result()[:, length:]
        for place, (each, values) in enumerate(zip(found, expected, strict=True)):
            trainers = values[: len(each.logprobs)]
            apart = float((trainers - each.logprobs).abs().max())
            if not apart <= tolerance or each.version != version:
                raise WeightMismatch(
                    f"publish: with the weights of version {version}, engine {place} of {len(found)} that were asked "
                    f"(at version {each.version}) gives the tokens {each.token_ids.tolist()} after a prompt of "
                    f"{length} the log-probabilities {_rounded(each.logprobs)}, and the trainer {_rounded(trainers)}: "
                    f"they are {apart:.2g} nats apart, and {tolerance:g} may be rounding. The engine holds "
                    "other weights, or keys and values that were computed with older ones; what it samples cannot be "
                    "trained on"
                )


def _rounded(x: Tensor) -> list[float]:
    return [round(value, 4) for value in x.tolist()]


def give(seats: Sequence[Seat], weights: Iterable[Bucket | Future[Bucket]], version: int) -> dict[Seat, Exception]:
    """Give engines new weights, by the best way to them; where that fails, by value.

    Args:
        seats: of the engines.
        weights: in buckets.
        version: of the weights.

    Returns:
        The seats that died meanwhile, with their errors; all others have the weights.

    Raises:
        CorruptedTransfer: weights did not arrive as they were sent.
        Exception: what an engine raised that refused the weights.
    """
    if isinstance(weights, Weights):
        try:
            return _give(seats, weights.to([seat.mesh for seat in seats]), version)
        except CorruptedTransfer:
            raise
        except TransferError as error:  # as when a receiver of a broadcast dies, since all wait for it
            say(f"publish: the weights go by value now, which is slower: {error}")
    return _give(seats, weights, version)


def _give(seats: Sequence[Seat], buckets: Iterable[Bucket | Future[Bucket]], version: int) -> dict[Seat, Exception]:
    dead: dict[Seat, Exception] = {}
    refused: list[Exception] = []

    def note(seat: Seat, error: Exception, given: Any = None) -> None:
        its_own = not (isinstance(given, Coming) and given.failure() is error)  # else it is the trainer mesh's error
        if its_own and (death := seat.death(error)) is not None:
            dead[seat] = death
        else:
            refused.append(error)

    def each(step: Literal["begin", "add", "end"], *given: Any) -> None:
        """Call a step in all seats before waiting for any, and then wait for all of them."""
        called = []
        for seat in seats:
            if seat not in dead:
                try:
                    called.append((seat, seat.load_weights(step, *given)))
                except Exception as error:
                    note(seat, error, *given)
        for seat, reply in called:
            try:
                reply.result()
            except Exception as error:
                note(seat, error, *given)
        if refused:
            raise refused[0]

    each("begin")
    for bucket in buckets:
        each("add", on_its_way(bucket))
    each("end", version)
    return dead


def say(text: str) -> None:
    """Warn from a thread; where warnings are errors, print instead, since raising there would help nobody."""
    try:
        warnings.warn(text, stacklevel=2)
    except Warning:
        print(text, file=sys.stderr)  # noqa: T201
