"""Giving weights to engines, bucket by bucket, so that no process holds a second copy of the model."""

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from nrl.backends.sampling.base import capabilities
from nrl.backends.sampling.replica import Seat
from nrl.backends.training.states import Params
from nrl.backends.types import Bucket, Completion, Sampling, top_k
from nrl.batch import Batch
from nrl.errors import CorruptedTransfer, TransferError, WeightMismatch
from nrl.runtime.mesh.futures import Future, RemoteFuture, as_future
from nrl.runtime.mesh.placement import Mesh

__all__ = ["Weights", "give", "say"]

_LENGTH = 40  # tokens of a prompt that fills a block of cached keys and values
_PLACES = 4  # in which it is cut off
_K = 8  # the trainer's most probable tokens, among which an engine's is


@attrs.frozen
class Weights:
    """The weights of params in buckets, which can be iterated any number of times; `nrl.publish` makes it.

    Args:
        params: of a trainer. When a step has consumed them, iterating raises `ConsumedState`.
        sampler: that they are for.
        given: those of them that are given away: all, or the adapter alone.
    """

    params: Params
    sampler: Any
    given: Params = attrs.field(default=attrs.Factory(lambda self: self.params, takes_self=True))
    _expected: list[dict[str, Future[Tensor]]] = attrs.field(factory=list, init=False)

    def __iter__(self) -> Iterator[Future[Bucket]]:
        return self.given.buckets("publish", dtype=capabilities(self.sampler).dtype)

    def to(self, meshes: Sequence[Mesh]) -> Iterator[Bucket | Future[Bucket]]:
        """The same buckets, by the best way to these meshes; see `nrl.runtime.transfer`.

        The trainer computes what `check` compares with: now, where the engines are on its devices, since a turn of it
        makes them rest, and they may not while they load; or else after the last bucket, while engines load. Where
        engines have routes, `check` replays these, and nothing is computed beforehand.
        """
        here, can = self.params.handle.mesh.slots, capabilities(self.sampler)
        beside = any(mesh.cluster is here.cluster and {*mesh.slots.indices} & {*here.indices} for mesh in meshes)
        checked = can.tolerance is not None and can.routes is None
        if checked and beside:
            self._expect()
        return self._buckets(meshes, checked)

    def _buckets(self, meshes: Sequence[Mesh], checked: bool) -> Iterator[Bucket | Future[Bucket]]:
        yield from self.given.buckets("publish", meshes, capabilities(self.sampler).dtype)
        if checked:
            self._expect()

    def _expect(self) -> dict[str, Future[Tensor]]:
        """The trainer's most probable tokens and their log-probabilities ``[1, T, k]``; asked for once."""
        if not self._expected:
            self._expected.append(self._forward([]))
        return self._expected[0]

    def _forward(self, routes: Sequence[Tensor]) -> dict[str, Future[Tensor]]:
        """The same, in as many rows as there are engines with routes, which are replayed as in a step."""
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
        ones of each place; one that is not among them is less probable there than they are.

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
        one = Sampling(temperature=0, max_new_tokens=1)
        asked = [complete(prompt[:place], one) for place in places]
        engines = [*zip(*(each.result() for each in asked), strict=False)]  # one that dies meanwhile is checked later
        routes = [row[-1].routes for row in engines if row[-1].routes is not None]
        expected = self._forward(routes) if routes else self._expect()
        ids, logprobs = (expected[name].result()[:, places] for name in ("top_k_ids", "top_k_logprobs"))
        for number, row in enumerate(engines):
            mine = number if routes else 0
            tokens = torch.stack([each.token_ids[0] for each in row])
            found = torch.stack([each.logprobs[0] for each in row])
            same = ids[mine] == tokens[:, None]
            least = logprobs[mine].min(-1).values
            trainers = torch.where(same, logprobs[mine], 0).sum(-1).where(same.any(-1), torch.minimum(found, least))
            apart = float((trainers - found).abs().max())
            if not apart <= tolerance or any(each.version != version for each in row):
                raise WeightMismatch(
                    f"publish: with the weights of version {version}, engine {number} of {len(engines)} that were "
                    f"asked (at version {row[0].version}) gives the tokens {tokens.tolist()} after the first {places} "
                    f"of a prompt the log-probabilities {_rounded(found)}, and the trainer at most "
                    f"{_rounded(trainers)}: they are {apart:.2g} nats apart, and {tolerance:g} may be rounding. The "
                    "engine holds other weights, or keys and values that were computed with older ones; what it "
                    "samples cannot be trained on"
                )


def _prompt(sampler: Any) -> list[int]:
    length = min(_LENGTH, sampler.context_length - 1)
    return [(31 * place + 7) % len(sampler.tokenizer) for place in range(length)]


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

    def note(seat: Seat, error: Exception, given: Any) -> None:
        its_own = not (
            isinstance(given, RemoteFuture) and given.failure() is error
        )  # else it is the trainer mesh's error
        if its_own and (death := seat.death(error)) is not None:
            dead[seat] = death
        else:
            refused.append(error)

    def ask(step: Literal["begin", "add", "end"], given: Any = None) -> list[tuple[Seat, Future[Any], Any]]:
        """Call a step in all seats, without waiting for any."""
        called = []
        for seat in [seat for seat in seats if seat not in dead]:
            try:
                called.append((seat, seat.load_weights(step, *([] if given is None else [given])), given))
            except Exception as error:
                note(seat, error, given)
        return called

    def wait(called: list[tuple[Seat, Future[Any], Any]]) -> None:
        for seat, reply, given in called:
            try:
                reply.result()
            except Exception as error:
                note(seat, error, given)
        if refused:
            raise refused[0]

    wait(ask("begin"))
    loading = list[tuple[Seat, Future[Any], Any]]()
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
