"""The plain PyTorch sampler for any Hugging Face causal language model: exact, and fast for small models."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from nrl.backends.base import Bucket, Model, Sampling
from nrl.backends.hf.cache import prepare
from nrl.backends.hf.decoding import decode
from nrl.backends.models import lora
from nrl.backends.models.loading import Loading, context_length, end_tokens, load_tokenizer
from nrl.backends.sampling.pool import ReplicatedSampler
from nrl.backends.sampling.replica import Decoded, Request
from nrl.backends.sampling.seat import meshes
from nrl.errors import ConfigError
from nrl.runtime.mesh.current_process import rest, wake
from nrl.runtime.mesh.placement import Mesh, Slots

__all__ = ["sampler"]


def sampler(place: Slots | Mesh, model: Model, sampling: Sampling | None = None, **engine: Any) -> ReplicatedSampler:
    """A sampler that decodes by plain PyTorch, with its own copy of the weights in each process of its mesh.

    Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE models without sliding windows decode with preallocated keys and values;
    all others with transformers' own cache, which is as right and slower (see `nrl.backends.hf.cache`).

    Args:
        place: slots, with a mesh for each, or a mesh, whose processes live and die together. Prompts are spread over
            the processes, and each has a copy of the weights; on the local cluster there is one.
        model: what to sample from. With ``lora`` it holds the adapter beside the base, is sent the adapter alone, and
            decodes through transformers' layers; without, it is sent merged weights, which small models decode faster.
        sampling: for calls that do not say; None: ``Sampling()``.
        **engine: there is nothing to set; what other samplers take is refused.

    Returns:
        The sampler, on a CUDA device if there is one, at version 0.

    Raises:
        ModelError: the model or its tokenizer cannot be loaded.
        PlacementError: slots that no mesh can be made of.
        ConfigError: it was given an argument for an engine.

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
    return ReplicatedSampler(
        "hf.sampler", meshes(place, "base"), partial(_Decoder, model), model, sampling or Sampling()
    )


class _Decoder:
    """What is in each process: a `nrl.backends.sampling.replica.Replica`."""

    def __init__(self, model: Model) -> None:
        module: Any = lora.build(model).eval().requires_grad_(False)
        tokenizer = self.tokenizer = load_tokenizer(model)
        self.module = module.to("cuda" if torch.cuda.is_available() else "cpu")
        self.context_length = min(context_length(module), int(tokenizer.model_max_length))
        self.vocabulary = int(module.get_input_embeddings().num_embeddings)
        self.stops = end_tokens(getattr(module, "generation_config", None), tokenizer)
        self.loading: Loading | None = None
        prepare(module)

    def rest(self) -> None:
        """Leave the device; see `nrl.runtime.mesh.current_process.Rests`."""
        rest(self.module)

    def wake(self) -> None:
        """Go back to it."""
        wake(self.module)

    def advance(self, requests: Sequence[Request], cancelled: Sequence[int]) -> Sequence[tuple[int, Decoded]]:
        """Decode all of them together; none is left for later."""
        found: list[tuple[int, Decoded]] = []
        for sampling in dict.fromkeys(request.sampling for request in requests):
            alike = [request for request in requests if request.sampling == sampling]
            rows = decode(
                self.module,
                [request.prompt for request in alike],
                [request.seed for request in alike],
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                max_new_tokens=sampling.max_new_tokens,
                stop_token_ids=(*self.stops, *sampling.stop_token_ids),
                stop=sampling.stop,
                tokenizer=self.tokenizer,
                context_length=self.context_length,
            )
            found += [(request.number, row) for request, row in zip(alike, rows, strict=True)]
        return found

    def begin(self) -> None:
        self.loading = Loading(lora.replaced(self.module), "receive")

    def add(self, bucket: Bucket) -> None:
        assert self.loading is not None
        self.loading.add(bucket.items())

    def end(self, version: int) -> None:
        assert self.loading is not None
        self.loading.end()
        self.loading = None
