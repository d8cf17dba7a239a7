"""A sampler with a copy of the weights in each process of a mesh, whichever engine decodes there.

An inference engine that satisfies `Replica` is all that a sampler needs beside this module; `nrl.backends.hf` and
`nrl.backends.vllm` are two of them.
"""

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Protocol

from nrl.backends.base import Bucket, Completion, Model, Sampling
from nrl.backends.decoding import Decoded
from nrl.backends.models import load_tokenizer
from nrl.errors import GenerationError
from nrl.runtime.futures import Future, on_its_way
from nrl.runtime.placement import Mesh, Out, Reply
from nrl.runtime.process import rest, wake

__all__ = ["Replica", "ReplicatedSampler", "truncates", "warn_of_truncation"]


class Replica(Protocol):
    """An engine in one process. It may satisfy `nrl.runtime.process.Rests`, too."""

    @property
    def context_length(self) -> int:
        """The most tokens that a prompt and its completion may have together."""
        ...

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling) -> Sequence[Decoded]:
        """A completion of each prompt, whose noise depends on its seed alone.

        Raises:
            GenerationError: a prompt that is empty, or fills the context.
        """
        ...

    def begin(self) -> None:
        """New weights will come, all of them. What was computed with the old ones must not be used again."""
        ...

    def add(self, bucket: Bucket) -> None:
        """Some of them, by their Hugging Face names; of tied weights one name is enough.

        Raises:
            ModelError: a name that the model does not have, or a wrong shape.
        """
        ...

    def end(self) -> None:
        """They have come.

        Raises:
            ModelError: some have not.
        """
        ...


class _Held:
    """A replica in its process, with the version of its weights."""

    def __init__(self, make: Callable[[], Replica]) -> None:
        self.replica, self.version = make(), 0
        self.broken = ""  # why the weights cannot be used

    def rest(self) -> None:
        rest(self.replica)

    def wake(self) -> None:
        wake(self.replica)


def _about(held: _Held) -> tuple[int, int]:
    return held.replica.context_length, held.replica.vocabulary


def _generate(
    held: _Held, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling
) -> list[Completion]:
    if held.broken:
        raise GenerationError(
            f"generate: the sampler's weights are incomplete since the last receive ({held.broken}); "
            "publish a complete set of weights first"
        )
    rows = held.replica.generate(prompts, seeds, sampling) if prompts else []
    return [Completion(*row, version=held.version) for row in rows]


def _begin(held: _Held) -> None:
    held.broken = "it did not finish"
    held.replica.begin()


def _add(held: _Held, bucket: Bucket) -> None:
    with _noting(held):
        held.replica.add(bucket)


def _end(held: _Held, version: int) -> None:
    with _noting(held):
        held.replica.end()
    held.broken, held.version = "", version


def _stop(held: _Held, reason: str) -> None:
    held.broken = reason


@contextmanager
def _noting(held: _Held) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        held.broken = str(error) or type(error).__name__
        raise


class ReplicatedSampler:
    """A `nrl.backends.Sampler` over a mesh; `nrl.backends.hf.sampler` makes one.

    Args:
        name: how errors and warnings name it.
        mesh: where it lives; generating after its cluster has been left is an error.
        make: makes the engine, in each process.
        model: what it samples from.
        sampling: for calls that do not say.
        tolerance: nats that its log-probabilities may differ from a trainer's; None: they are computed alike.
    """

    def __init__(
        self,
        name: str,
        mesh: Mesh,
        make: Callable[[], Replica],
        model: Model,
        sampling: Sampling,
        tolerance: float | None = None,
    ) -> None:
        self._name, self._mesh, self._sampling, self._version = name, mesh, sampling, 0
        self._tolerance = tolerance
        self._whole = threading.Lock()  # weights are received between calls of any thread, not between their parts
        self._tokenizer = load_tokenizer(model)
        (self._replicas,) = mesh.processes.call(name, _Held, [[make]] * mesh.processes.count, Out.kept)
        about: tuple[int, int] = self._call(name, _about, Out.first).then(_only).result()
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

    @property
    def remote(self) -> bool:
        """Whether it decodes in other processes, so that this one can do something else meanwhile."""
        return self._mesh.cluster.remote

    @property
    def tolerance(self) -> float | None:
        """How far its log-probabilities may be from a trainer's; None: they are computed alike."""
        return self._tolerance

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        seeds: Sequence[int] | None = None,
        sampling: Sampling | None = None,
    ) -> Future[list[Completion]]:
        """Complete each prompt once; prompts are split among the processes, neighbours together.

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
        with self._whole:
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
        with self._whole:
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
        args = [list(row) for row in zip(self._replicas, *columns, strict=True)]
        (reply,) = self._mesh.processes.call(who, fn, args, out)
        return reply

    def _warn(self, sampling: Sampling) -> None:
        if not self._warned:
            self._warned = warn_of_truncation(self._name, sampling, self._vocabulary, stacklevel=4)


def truncates(sampling: Sampling, vocabulary: int) -> bool:
    """Whether top-k or top-p leave out any of so many tokens.

    >>> truncates(Sampling(top_k=9), 8), truncates(Sampling(top_k=7), 8)
    (False, True)
    """
    return 0 < sampling.top_k < vocabulary or sampling.top_p < 1


def warn_of_truncation(who: str, sampling: Sampling, vocabulary: int, stacklevel: int = 3) -> bool:
    """Warn if log-probabilities of what is sampled are not to be compared with a trainer's; whether it did.

    >>> warn_of_truncation("hf.sampler", Sampling(temperature=0.7), 8)
    False
    """
    if not truncates(sampling, vocabulary) or sampling.temperature == 0:
        return False
    warnings.warn(
        f"{who}: with top_k={sampling.top_k}, top_p={sampling.top_p} the rollout_logprobs are those of the "
        "truncated distribution q, renormalised over the kept tokens. A trainer's p is over all tokens, so E[p/q] "
        "is the kept mass and not 1, and ratios to rollout_logprobs are biased. To train on these rollouts sample "
        "with top_k=0 and top_p=1, or take old_logprobs from trainer.logprobs",
        UserWarning,
        stacklevel=stacklevel,
    )
    return True


def _only(results: list[Any]) -> Any:
    return results[0]


def _joined(results: list[list[Completion]]) -> list[Completion]:
    return [completion for result in results for completion in result]
