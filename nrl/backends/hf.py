"""The plain PyTorch sampler: exact, and fast for small models, from any Hugging Face causal language model."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from nrl.backends.base import Bucket, Completion, Model, Sampling
from nrl.backends.cache import prepare
from nrl.backends.decoding import decode
from nrl.backends.models import Loading, build, context_length, end_tokens, load_tokenizer
from nrl.errors import GenerationError
from nrl.runtime.futures import Future, on_its_way
from nrl.runtime.placement import Mesh, Out, Reply, Slots, as_mesh
from nrl.runtime.process import rest, wake

__all__ = ["HFSampler", "sampler"]


def sampler(place: Slots | Mesh, model: Model, sampling: Sampling | None = None) -> "HFSampler":
    """A sampler that decodes by plain PyTorch, with its own copy of the weights in each process of its mesh.

    Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE models without sliding windows decode with preallocated keys and values;
    all others with transformers' own cache, which is as right and slower (see `nrl.backends.cache`).

    Args:
        place: a mesh, or slots. Prompts are split among its processes, and each has a copy of the weights; on the local
            cluster there is one.
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
    return HFSampler(as_mesh(place, "base", "sampler"), model, sampling or Sampling())


class _Decoder:
    """What is in each process: a model, and the version of its weights."""

    def __init__(self, model: Model) -> None:
        self.tokenizer = load_tokenizer(model)
        module: Any = build(model).eval().requires_grad_(False)
        self.module = module.to("cuda" if torch.cuda.is_available() else "cpu")
        self.context_length = min(context_length(module), int(self.tokenizer.model_max_length))
        self.stops = end_tokens(module, self.tokenizer)
        self.version = 0
        self.loading: Loading | None = None
        self.broken = ""  # why the weights cannot be used
        prepare(module)

    def rest(self) -> None:
        """Leave the device; see `nrl.runtime.process.Rests`."""
        rest(self.module)

    def wake(self) -> None:
        """Go back to it."""
        wake(self.module)


def _about(decoder: _Decoder) -> tuple[int, int]:
    return decoder.context_length, decoder.module.get_input_embeddings().num_embeddings


def _generate(
    decoder: _Decoder, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling
) -> list[Completion]:
    if decoder.broken:
        raise GenerationError(
            f"generate: the sampler's weights are incomplete since the last receive ({decoder.broken}); "
            "publish a complete set of weights first"
        )
    rows = decode(
        decoder.module,
        prompts,
        seeds,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        max_new_tokens=sampling.max_new_tokens,
        stop_token_ids=(*decoder.stops, *sampling.stop_token_ids),
        context_length=decoder.context_length,
    )
    return [Completion(*row, version=decoder.version) for row in rows]


def _begin(decoder: _Decoder) -> None:
    decoder.broken = "it did not finish"
    decoder.loading = Loading(decoder.module, "receive")


def _add(decoder: _Decoder, bucket: Bucket) -> None:
    assert decoder.loading is not None
    with _noting(decoder):
        decoder.loading.add(bucket.items())


def _end(decoder: _Decoder, version: int) -> None:
    assert decoder.loading is not None
    with _noting(decoder):
        decoder.loading.end()
    decoder.loading, decoder.broken, decoder.version = None, "", version


def _stop(decoder: _Decoder, reason: str) -> None:
    decoder.broken = reason


@contextmanager
def _noting(decoder: _Decoder) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        decoder.broken = str(error) or type(error).__name__
        raise


class HFSampler:
    """A `nrl.backends.Sampler`; made by `sampler`.

    Args:
        mesh: where it lives; generating after its cluster has been left is an error.
        model: what to sample from.
        sampling: for calls that do not say.
    """

    def __init__(self, mesh: Mesh, model: Model, sampling: Sampling) -> None:
        self._mesh, self._sampling, self._version = mesh, sampling, 0
        self._tokenizer = load_tokenizer(model)
        (self._decoders,) = mesh.processes.call("hf.sampler", _Decoder, [[model]] * mesh.processes.count, Out.kept)
        about: tuple[int, int] = self._call("hf.sampler", _about, Out.first).then(_only).result()
        self._context_length, self._vocabulary = about
        self._warned = False

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
        chosen = sampling or self._sampling
        self._warn(chosen)
        noise = list(range(len(prompts)) if seeds is None else seeds)
        n = self._mesh.processes.count
        cuts = [len(prompts) * rank // n for rank in range(n + 1)]  # neighbours, which may share their prefill
        each = [(list(prompts[a:b]), noise[a:b], chosen) for a, b in pairwise(cuts)]
        return self._call("generate", _generate, Out.each, *zip(*each, strict=True)).then(_joined)

    def receive(self, buckets: Iterable[Bucket | Future[Bucket]], version: int) -> None:
        """Replace the weights in place, one bucket after the other; `nrl.publish` calls it.

        Args:
            buckets: tensors by their Hugging Face names, of any dtype and device; of tied weights one name is enough.
            version: stamped from now on on what is sampled.

        Raises:
            ModelError: a name that the model does not have, a wrong shape, or weights that are missing. The sampler
                then holds a mixture and refuses to generate until it has received a complete set.
        """
        self._do("receive", _begin)
        try:
            for bucket in buckets:
                self._do("receive", _add, on_its_way(bucket))
        except BaseException as error:
            self._do("receive", _stop, str(error) or type(error).__name__)
            raise
        self._do("receive", _end, version)
        self._version = version

    def _do(self, who: str, fn: Callable[..., None], *args: Any) -> None:
        """In each process, with the same arguments, and done when it returns."""
        n = self._mesh.processes.count
        self._call(who, fn, Out.each, *([arg] * n for arg in args)).then(_only).result()

    def _call(self, who: str, fn: Callable[..., Any], out: Out, *columns: Sequence[Any]) -> Reply:
        self._mesh.cluster.check_open(who)
        reply: Reply
        args = [list(row) for row in zip(self._decoders, *columns, strict=True)]
        (reply,) = self._mesh.processes.call(who, fn, args, out)
        return reply

    def _warn(self, sampling: Sampling) -> None:
        truncates = 0 < sampling.top_k < self._vocabulary or sampling.top_p < 1
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


def _only(results: list[Any]) -> Any:
    return results[0]


def _joined(results: list[list[Completion]]) -> list[Completion]:
    return [completion for result in results for completion in result]
