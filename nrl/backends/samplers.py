"""The protocols of a sampler, which rollouts and `nrl.publish` use."""

from collections.abc import Iterable, Sequence
from concurrent import futures
from typing import Any, Literal, Protocol, runtime_checkable

from nrl.backends.base import Bucket, Completion, Sampling
from nrl.runtime.mesh.futures import Future

__all__ = ["Inflight", "Probed", "Sampler", "Streams"]


type Inflight = Literal["wait", "keep", "abort"]
"""What becomes of requests that are under way when new weights come; see `nrl.publish`."""


class Sampler(Protocol):
    """What `nrl.rollout` needs of an inference engine."""

    @property
    def version(self) -> int:
        """How often weights had been published when the ones it holds were."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer of its model."""
        ...

    @property
    def context_length(self) -> int:
        """The most tokens that a prompt and its completion may have together."""
        ...

    @property
    def sampling(self) -> Sampling:
        """What it samples with where a call does not say."""
        ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        seeds: Sequence[int] | None = None,
        sampling: Sampling | None = None,
    ) -> Future[list[Completion]]:
        """Complete each prompt once; equal prompts share their prefill. A row's noise depends on its seed alone."""
        ...

    def receive(self, buckets: Iterable[Bucket | Future[Bucket]], version: int, *, inflight: Inflight = "wait") -> None:
        """Replace the weights in place; `publish` calls it.

        Args:
            buckets: tensors by their Hugging Face names, some at a time. Futures are of values that live on a mesh: a
                sampler on a mesh passes them on to its processes, without a wait or a copy here. It can be iterated
                again later, as long as the params are there; then it raises `ConsumedState`.
            version: stamped from now on on what is sampled.
            inflight: what becomes of requests that are under way; see `nrl.publish`.
        """
        ...


@runtime_checkable
class Streams(Protocol):
    """A sampler that takes on requests while it decodes others."""

    def stream(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling | None = None
    ) -> "list[futures.Future[Completion]]":
        """As `Sampler.generate`, with a future for each row; to cancel one is to have it forgotten."""
        ...


@runtime_checkable
class Probed(Protocol):
    """A sampler whose engines compute otherwise than a trainer does, so that `publish` checks what they compute."""

    @property
    def tolerance(self) -> float | None:
        """Nats that its log-probabilities may differ from a trainer's; None: they are computed alike."""
        ...

    def everywhere(self, prompt: Sequence[int], sampling: Sampling) -> Future[list[Completion]]:
        """Let every engine complete a prompt."""
        ...

    def distrust(self, reason: str) -> None:
        """Serve nobody until other weights have been received."""
        ...
