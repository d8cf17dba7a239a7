"""The plain PyTorch sampler for any Hugging Face causal language model: exact, and fast for small models."""

from functools import partial
from typing import Any

from nrl.arguments import checked
from nrl.backends.hf.hf_engine import HfEngine
from nrl.backends.models.loading import skeleton
from nrl.backends.models.moe_routers import sizes
from nrl.backends.sampling.pool import EnginePool
from nrl.backends.sampling.replica import meshes
from nrl.backends.types import Model, Sampling
from nrl.errors import ConfigError
from nrl.runtime.mesh.placement import Mesh, Slots

__all__ = ["sampler"]


@checked("hf.sampler")
def sampler(
    place: Slots | Mesh, model: Model, sampling: Sampling | None = None, *, routes: bool = False, **engine: Any
) -> EnginePool:
    """Make a sampler that decodes by plain PyTorch, with its own copy of the weights in each process of its mesh.

    Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE models without sliding windows decode with preallocated keys and values;
    all others with transformers' own cache, which is exact, too, and slower (see `nrl.backends.hf.cache`).

    Args:
        place: slots, each of which becomes a mesh, or a mesh, whose processes live and die together. Prompts are spread
            over the processes, and each has a copy of the weights; the local cluster has one process.
        model: to sample from. With ``lora`` the sampler holds the adapter beside the base, gets the adapter alone, and
            decodes through transformers' layers. Without, it gets merged weights, which small models decode faster.
        sampling: the default of calls; None: ``Sampling()``.
        routes: record the experts of each token; rollouts then have the column ``routes``, which trainers replay. For
            mixtures of experts whose routers choose by one ``topk``: Qwen, Mixtral, OLMoE, DeepSeek, GLM and more.
        **engine: arguments for engines of other samplers, which this sampler refuses.

    Returns:
        The sampler, on a CUDA device if there is one, at version 0.

    Raises:
        ModelError: the model or its tokenizer cannot be loaded, or has no routes to record.
        PlacementError: no mesh can be made of the slots.
        ConfigError: an argument for an engine was given.

    >>> import nrl
    >>> from nrl import tiny
    >>> from nrl.backends import Sampling, hf
    >>> with nrl.cluster("local") as here:
    ...     sampler = hf.sampler(here.reserve(1), tiny.model(), Sampling(max_new_tokens=3))
    ...     a, b = sampler.generate([[5, 6], [5, 6]], seeds=[0, 1]).result()
    >>> a.version, len(a.token_ids) <= 3
    (0, True)
    """
    if engine:
        raise ConfigError(f"hf.sampler: it has no engine to set {', '.join(engine)} of; that is for vllm.sampler")
    router_sizes = sizes(skeleton(model)) if routes else None
    make, shape = (
        partial(HfEngine, model, routes=routes),
        None if router_sizes is None else (router_sizes.layers, router_sizes.k),
    )
    return EnginePool("hf.sampler", meshes(place, "base"), make, model, sampling or Sampling(), routes=shape)
