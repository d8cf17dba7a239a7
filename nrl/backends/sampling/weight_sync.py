"""`publish`: moves the weights of a trainer into a sampler, and checks that they arrived.

`publish` gives the params to ``sampler.receive``, as `nrl.backends.sampling.weight_delivery.Weights`. A pool calls
``begin`` of each engine, then ``add`` for each bucket that the trainer's processes send (`nrl.runtime.transfer`), then
``end`` (`nrl.backends.engine.SampleEngine`). `nrl.backends.vllm.weight_loading` puts weights into vLLM. Then each
engine completes a prompt, and its log-probabilities are compared with the trainer's.
"""

from typing import cast

from nrl.arguments import checked
from nrl.backends.sampling.base import Inflight, Probed, Sampler, capabilities
from nrl.backends.sampling.weight_delivery import Weights
from nrl.backends.training.states import Params
from nrl.errors import ConsumedState, ModelError, PlacementError, WeightMismatch
from nrl.runtime.mesh.placement import Mesh
from nrl.runtime.trace import timeline

__all__ = ["publish"]


@timeline.span("publish")
@checked("publish")
def publish(params: Params, sampler: Sampler, inflight: Inflight = "wait") -> int:
    """Move weights into a sampler, which from then on stamps their version on its completions.

    The version is the number of publishes, to this sampler and of these params. Params published before, to another
    sampler or before a restore, keep their number.

    A sampler whose `Model` has ``lora`` gets the adapter alone; any other one gets weights with adapters added in.

    Each engine of a sampler with another computation than the trainer's (`Probed`) then completes a fixed prompt, and
    its log-probabilities are compared with the trainer's.

    Args:
        params: from ``state.params``, ``trainer.load`` or ``trainer.freeze``.
        sampler: its weights are replaced in place.
        inflight: the fate of completions in flight, as with `nrl.ahead` or from other threads. ``"wait"``: finish them
            first, while new requests wait. ``"keep"``: continue them with the new weights; their ``version`` is the
            oldest, and ``versions`` has the version of each token. ``"abort"``: discard their tokens and begin
            again. A sampler of whole batches always waits.

    Returns:
        The version.

    Raises:
        ConsumedState: the params were borrowed from a consumed state.
        WeightMismatch: an engine's log-probabilities differ from the trainer's. The sampler serves nobody until a later
            publish succeeds.
        ModelError: the sampler has an adapter, and these params are not the same adapter on the same base.
        PlacementError: the sampler samples early (`nrl.ahead`), and shares GPUs with the trainer.
        ArgumentError: an argument is of another kind, or ``inflight`` is unknown.

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
    if params.handle.is_consumed:
        raise ConsumedState(
            "publish: these params were borrowed from a state that a step has consumed; publish(state.params, sampler) "
            "with the state that the step returned"
        )
    _check_lag(params.handle.mesh, sampler)
    # Other weights, such as a reference's, count on from the sampler's version, or two would share a number
    version = params.version if params.published else max(params.version, sampler.version) + 1
    weights = Weights(params, sampler, _select_params(params, sampler))
    sampler.receive(weights, version, inflight=inflight)
    params.version, params.published = version, True
    if capabilities(sampler).tolerance is not None:
        probed = cast(Probed, sampler)
        try:
            weights.check(version, probed.everywhere)
        except WeightMismatch as error:
            probed.distrust(str(error))
            raise
    return version


def _check_lag(trainer: Mesh, sampler: Sampler) -> None:
    """Refuse a lag on shared GPUs: the meshes take turns there, so sampling early would only wait for the trainer."""
    lag, meshes = getattr(sampler, "lag", 0), getattr(sampler, "meshes", ())
    sampler_slots = {index for mesh in meshes if mesh.cluster is trainer.cluster for index in mesh.slots.indices}
    if lag and trainer.slots.gpus and (shared := sorted(sampler_slots & set(trainer.slots.indices))):
        raise PlacementError(
            f"publish: the sampler shares {len(shared)} GPUs with the trainer's mesh '{trainer.name}' (slots "
            f"{', '.join(map(str, shared))}), and nrl.ahead lets it sample up to {lag} publishes early, while that "
            "trains; give it slots of its own, or take a lag of 0"
        )


def _select_params(params: Params, sampler: Sampler) -> Params:
    """Return the params that the sampler gets: all of them, or their adapter alone."""
    adapter = capabilities(sampler).adapter
    if adapter is not None and params.adapter_of != adapter:
        mismatch = "are not an adapter on the weights that their Model names"
        if params.adapter_of is not None:
            mismatch = f"have (source, seed, lora) {params.adapter_of}"
        raise ModelError(
            f"publish: the sampler has the adapter (source, seed, lora) {adapter}, and these params {mismatch}; give "
            "both sides the same Model, or leave lora out of the sampler's, and merged weights are published"
        )
    return params if adapter is None else params.adapter
