"""The in-process sampler: exact, and fast for small models, from any Hugging Face causal language model."""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from nrl.backends.base import Completion, Model, Sampling
from nrl.backends.cache import prepare
from nrl.backends.decoding import decode
from nrl.backends.models import build, context_length, end_tokens, load_tensors, load_tokenizer
from nrl.errors import GenerationError
from nrl.runtime.futures import Future, done
from nrl.runtime.local import Mesh, Slots, as_mesh

__all__ = ["HFSampler", "sampler"]


def sampler(place: Slots | Mesh, model: Model, sampling: Sampling | None = None) -> "HFSampler":
    """A sampler that decodes in this process, with its own copy of the weights.

    Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE models without sliding windows decode with preallocated keys and values;
    all others with transformers' own cache, which is as right and slower (see `nrl.backends.cache`).

    Args:
        place: a mesh, or slots, of the local cluster. However many slots there are, there is one copy of the weights.
        model: what to sample from.
        sampling: for calls that do not say; None: ``Sampling()``.

    Returns:
        The sampler, on a CUDA device if there is one, at version 0.

    Raises:
        ModelError: the model or its tokenizer cannot be loaded.
        PlacementError: slots that no mesh can be made of.

    >>> import nrl
    >>> from nrl import tiny
    >>> from nrl.backends import Sampling, hf
    >>> with nrl.cluster("local") as here:
    ...     sampler = hf.sampler(here.reserve(1), tiny.model(), Sampling(max_new_tokens=3))
    ...     a, b = sampler.generate([[5, 6], [5, 6]], seeds=[0, 1]).result()
    >>> a.version, len(a.token_ids) <= 3
    (0, True)
    """
    return HFSampler(as_mesh(place, "base"), model, sampling or Sampling())


class HFSampler:
    """A `nrl.backends.Sampler` in this process; made by `sampler`.

    Args:
        mesh: where it lives; generating after its cluster has been left is an error.
        model: what to sample from.
        sampling: for calls that do not say.
    """

    def __init__(self, mesh: Mesh, model: Model, sampling: Sampling) -> None:
        self._mesh, self._sampling, self._version = mesh, sampling, 0
        self._tokenizer = load_tokenizer(model)
        module: Any = build(model).eval().requires_grad_(False)
        self._module = module.to("cuda" if torch.cuda.is_available() else "cpu")
        self._context_length = min(context_length(module), int(self._tokenizer.model_max_length))
        self._stops = end_tokens(module, self._tokenizer)
        self._broken = ""  # why the weights cannot be used
        self._warned = False
        prepare(module)

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

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        seeds: Sequence[int] | None = None,
        sampling: Sampling | None = None,
    ) -> Future[list[Completion]]:
        """Complete each prompt once, at once; see `nrl.backends.decoding.decode`.

        Args:
            prompts: token ids, of any lengths; equal ones are read once.
            seeds: of each row's noise; None: 0, 1, 2 ...
            sampling: None: the sampler's own.

        Returns:
            A future of one `Completion` for each prompt, in order.

        Raises:
            GenerationError: a prompt that cannot be completed, or weights that were received only in part.
            ClosedCluster: the cluster has been left.
        """
        self._mesh.cluster.check_open("generate")
        if self._broken:
            raise GenerationError(
                f"generate: the sampler's weights are incomplete since the last receive ({self._broken}); "
                "publish a complete set of weights first"
            )
        chosen = sampling or self._sampling
        self._warn(chosen)
        rows = decode(
            self._module,
            prompts,
            range(len(prompts)) if seeds is None else seeds,
            temperature=chosen.temperature,
            top_k=chosen.top_k,
            top_p=chosen.top_p,
            max_new_tokens=chosen.max_new_tokens,
            stop_token_ids=(*self._stops, *chosen.stop_token_ids),
            context_length=self._context_length,
        )
        return done([Completion(*row, version=self._version) for row in rows])

    def receive(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace the weights in place, one tensor at a time; `nrl.publish` calls it.

        Args:
            tensors: Hugging Face name and value, of any dtype and device; of tied weights one name is enough.
            version: stamped from now on on what is sampled.

        Raises:
            ModelError: a name that the model does not have, a wrong shape, or weights that are missing. The sampler
                then holds a mixture and refuses to generate until it has received a complete set.
        """
        self._broken = "it did not finish"
        try:
            load_tensors(self._module, tensors, who="receive")
        except BaseException as error:
            self._broken = str(error) or type(error).__name__
            raise
        self._broken, self._version = "", version

    def _warn(self, sampling: Sampling) -> None:
        size = self._module.get_input_embeddings().num_embeddings
        truncates = 0 < sampling.top_k < size or sampling.top_p < 1
        if not truncates or sampling.temperature == 0 or self._warned:
            return
        self._warned = True
        warnings.warn(
            f"hf.sampler: with top_k={sampling.top_k}, top_p={sampling.top_p} the rollout_logprobs are those of the "
            "truncated distribution q, renormalised over the kept tokens. A trainer's p is over all tokens, so E[p/q] "
            "is the kept mass and not 1, and ratios to rollout_logprobs are biased. To train on these rollouts sample "
            "with top_k=0 and top_p=1, or take old_logprobs from trainer.logprobs",
            UserWarning,
            stacklevel=3,
        )
