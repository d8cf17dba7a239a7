"""`publish`: moves the weights of a trainer into a sampler, and checks that they arrived."""

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from nrl.backends.base import Bucket, Params, Sampling
from nrl.backends.samplers import Complete, Inflight, Probed, Sampler
from nrl.batch import Batch
from nrl.errors import ConsumedState, ModelError, PlacementError, WeightMismatch
from nrl.runtime.mesh.futures import Future
from nrl.runtime.mesh.placement import Mesh
from nrl.runtime.trace import timeline

__all__ = ["publish"]

_PROBE = 136, 4  # tokens of a prompt that fills a block of cached keys and values, and of its completion


@timeline.span("publish")
def publish(params: Params, sampler: Sampler, inflight: Inflight = "wait") -> int:
    """Move weights into a sampler, which from then on stamps their version on what it samples.

    The version is the number of publishes, to this sampler and of these params. Params that have been published
    already, to another sampler or before a restore, keep the number that they have.

    A sampler whose `Model` has ``lora`` is sent the adapter alone; any other one, weights that adapters are added to.

    Each engine of a sampler that computes otherwise than a trainer (`Probed`) is then asked for a completion, always of
    the same prompt, and its log-probabilities are compared with the trainer's.

    Args:
        params: from ``state.params``, ``trainer.load`` or ``trainer.freeze``.
        sampler: the sampler whose weights are replaced in place.
        inflight: what becomes of completions that are under way, as with `nrl.ahead` or from other threads. ``"wait"``:
            they are finished first, while new ones wait. ``"keep"``: they go on with the new weights, from where they
            are; their ``version`` is the oldest, and ``versions`` tells which token is whose. ``"abort"``: what they
            have is thrown away, and they are asked again. A sampler that decodes a batch as a whole always waits.

    Returns:
        The version.

    Raises:
        ConsumedState: the params were borrowed from a state that has been consumed.
        WeightMismatch: the sampler, asked for a completion, does not compute what the trainer does. It does not serve
            anybody else until it does.
        ModelError: the sampler has an adapter, and these params are not the same adapter on the same base.
        PlacementError: the sampler is asked early (`nrl.ahead`), and shares GPUs with the trainer.
        ValueError: there is no such ``inflight``.

    >>> import nrl
    >>> from nrl import tiny
    >>> from nrl.backends import adamw, fsdp, hf
    >>> with nrl.cluster("local") as cluster:
    ...     slots = cluster.reserve(2)
    ...     trainer = fsdp.trainer(slots[:1], tiny.model(), adamw(lr=1e-3))
    ...     sampler = hf.sampler(slots[1:], tiny.model())
    ...     state = trainer.init()
    ...     publish(state.params, sampler), publish(state.params, sampler), sampler.version, state.version
    (1, 1, 1, 1)
    """
    if params.handle.consumed:
        raise ConsumedState(
            "publish: these params were borrowed from a state that a step has consumed; publish(state.params, sampler) "
            "with the state that the step returned"
        )
    if inflight not in ("wait", "keep", "abort"):
        raise ValueError(f"publish: inflight is {inflight!r}; it is 'wait', 'keep' or 'abort'")
    _check_lag(params.handle.mesh, sampler)
    # Weights from elsewhere, such as a reference's, count on from what the sampler has had, or two would share a number
    version = params.version if params.published else max(params.version, sampler.version) + 1
    weights = _Buckets(params, _alone(params, sampler))
    sampler.receive(weights, version, inflight=inflight)
    params.version, params.published = version, True
    if isinstance(sampler, Probed):
        try:
            weights.check(sampler, version, lambda *asked: sampler.everywhere(*asked).result())
        except WeightMismatch as error:
            sampler.distrust(str(error))
            raise
    return version


def _check_lag(trainer: Mesh, sampler: Sampler) -> None:
    """Two that share a GPU take turns on it: what is to be sampled while the trainer trains would only wait for it."""
    lag, meshes = getattr(sampler, "lag", 0), getattr(sampler, "meshes", ())
    there = {index for mesh in meshes if mesh.cluster is trainer.cluster for index in mesh.slots.indices}
    if lag and trainer.cluster.gpus and (shared := sorted(there & set(trainer.slots.indices))):
        raise PlacementError(
            f"publish: the sampler shares {len(shared)} GPUs with the trainer's mesh '{trainer.name}' (slots "
            f"{', '.join(map(str, shared))}), and nrl.ahead lets it sample up to {lag} publishes early, while that "
            "trains; give it slots of its own, or take a lag of 0"
        )


def _alone(params: Params, sampler: Sampler) -> bool:
    """Whether the adapter alone is sent."""
    wanted = getattr(sampler, "adapter", None)
    if wanted is not None and params.adapter != wanted:
        found = "are not an adapter on the weights that their Model names"
        if params.adapter is not None:
            found = f"have (source, seed, lora) {params.adapter}"
        raise ModelError(
            f"publish: the sampler has the adapter (source, seed, lora) {wanted}, and these params {found}; give both "
            "sides the same Model, or leave lora out of the sampler's, and merged weights are published"
        )
    return wanted is not None


@attrs.frozen
class _Buckets:
    """The weights of params, or those of their adapter alone, as often as they are iterated."""

    params: Params
    adapter: bool

    def __iter__(self) -> Iterator[Future[Bucket]]:
        return self.params.buckets("publish", adapter=self.adapter)

    def to(self, meshes: Sequence[Mesh]) -> Iterator[Future[Bucket]]:
        """The same, by the best way to these."""
        return self.params.buckets("publish", meshes, self.adapter)

    def check(self, sampler: Any, version: int, complete: Complete) -> None:
        """Let engines that have them complete a prompt, always the same one, and the trainer say what it thinks."""
        if sampler.tolerance is None:
            return
        length = min(_PROBE[0], sampler.context_length - _PROBE[1])
        prompt = [(31 * place + 7) % len(sampler.tokenizer) for place in range(length)]
        found = complete(prompt, Sampling(temperature=0, max_new_tokens=_PROBE[1]))
        rows = [torch.tensor([*prompt, *each.token_ids.tolist()]) for each in found]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
        batch = Batch({"input_ids": ids, "attention_mask": mask}, batch_size=[len(rows)]).lock_()
        expected = self.params.trainer.logprobs(self.params, batch).result()[:, length:]
        for place, (each, values) in enumerate(zip(found, expected, strict=True)):
            trainers = values[: len(each.logprobs)]
            apart = float((trainers - each.logprobs).abs().max())
            if not apart <= sampler.tolerance or each.version != version:
                raise WeightMismatch(
                    f"publish: with the weights of version {version}, engine {place} of {len(found)} that were asked "
                    f"(at version {each.version}) gives the tokens {each.token_ids.tolist()} after a prompt of "
                    f"{length} the log-probabilities {_rounded(each.logprobs)}, and the trainer {_rounded(trainers)}: "
                    f"they are {apart:.2g} nats apart, and {sampler.tolerance:g} may be rounding. The engine holds "
                    "other weights, or keys and values that were computed with older ones; what it samples cannot be "
                    "trained on"
                )


def _rounded(x: Tensor) -> list[float]:
    return [round(value, 4) for value in x.tolist()]
