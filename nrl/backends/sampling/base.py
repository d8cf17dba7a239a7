"""The protocols of a sampler, which rollouts and `nrl.publish` use."""

from collections.abc import Iterable, Sequence
from concurrent import futures
from typing import Any, Literal, Protocol

import attrs
import torch

from nrl.arguments import checked, register_kind
from nrl.backends.types import Bucket, Chunks, Completion, Sampling
from nrl.runtime.mesh.futures import Future

__all__ = ["Capabilities", "Inflight", "Probed", "Sampler", "Streams", "capabilities"]


type Inflight = Literal["wait", "keep", "abort"]
"""The fate of requests in flight when new weights come; see `nrl.publish`."""


@checked("Capabilities")
@attrs.frozen
class Capabilities:
    """The abilities of a sampler beside the methods that every `Sampler` has.

    Args:
        streams: the sampler takes on requests while decoding others, and has the method of `Streams`.
        remote: the sampler decodes in other processes, while the program can go on.
        tolerance: nats by which log-probabilities may differ from a trainer's, because the sampler computes
            differently: `publish` compares them, by the methods of `Probed`. None: no check is needed.
        adapter: `nrl.backends.Model.adapter` of the sampler's model; with one, `publish` sends the adapter alone.
        media: the kinds of `nrl.backends.Media` in prompts, for example ``"image"``.
        dtype: of received matrices after rounding, which `publish` does before sending; None: unknown, or different
            for some matrices.
        routes: (layers, k) of the ``routes`` of completions; None: completions have no routes.

    >>> Capabilities().streams
    False
    """

    streams: bool = False
    remote: bool = False
    tolerance: float | None = None
    adapter: tuple[Any, ...] | None = None
    media: frozenset[str] = frozenset()
    routes: tuple[int, int] | None = None
    dtype: torch.dtype | None = None


def capabilities(sampler: Any) -> Capabilities:
    """Return a sampler's attribute ``capabilities``, or the default ``Capabilities()`` without one.

    >>> capabilities(object()) == Capabilities()
    True
    """
    declared: Capabilities = getattr(sampler, "capabilities", Capabilities())
    return declared


class Sampler(Protocol):
    """The sampler that rollouts and `nrl.publish` need. It may have ``capabilities``, too: see `Capabilities`."""

    @property
    def version(self) -> int:
        """The version of its weights: how many publishes there had been, with theirs."""
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
        """The sampling of calls that name none."""
        ...

    def generate(
        self,
        prompts: Sequence[Chunks],
        *,
        seeds: Sequence[int] | None = None,
        sampling: Sampling | None = None,
    ) -> Future[list[Completion]]:
        """Complete each prompt once. A row's noise depends on its seed alone.

        Args:
            prompts: token ids, of any lengths, and among them `nrl.backends.Media` of the kinds that the sampler takes;
                equal ones may be read once.
            seeds: of each row's noise; None: 0, 1, 2 ...
            sampling: None: the sampler's own.

        Returns:
            A future of one `Completion` for each prompt, in order.

        Raises:
            GenerationError: a prompt that cannot be completed, or has media that the sampler does not take.
        """
        ...

    def receive(self, buckets: Iterable[Bucket | Future[Bucket]], version: int, *, inflight: Inflight = "wait") -> None:
        """Replace the weights in place; `publish` calls it.

        Args:
            buckets: pieces of weights (`nrl.backends.types.Piece`), a bucket at a time. Futures are values on a mesh: a
                sampler on a mesh passes them on to its processes, without a wait or a copy here. The buckets of
                `publish` can be iterated again until a step has consumed the params; then iterating raises
                `ConsumedState`.
            version: of these weights; completions bear it from now on.
            inflight: the fate of requests in flight; see `nrl.publish`.

        Raises:
            ModelError: a name that the model does not have, a wrong shape, or weights that are missing.
        """
        ...


def _instead_of_sampler(value: Any) -> str:
    return "give a sampler, as hf.sampler(slots, model) or vllm.sampler(slots, model) makes one"


register_kind(
    Sampler,
    _instead_of_sampler,
    lambda value: hasattr(value, "version") and (hasattr(value, "generate") or hasattr(value, "stream")),
)


class Streams(Protocol):
    """A sampler with requests joining while others are decoded (`Capabilities.streams`)."""

    def stream(
        self, prompts: Sequence[Chunks], seeds: Sequence[int], sampling: Sampling | None = None
    ) -> "list[futures.Future[Completion]]":
        """Complete each prompt, with a future for each row; if one is cancelled, the sampler forgets the row."""
        ...


class Probed(Protocol):
    """A sampler whose engines compute differently from a trainer (`Capabilities.tolerance`)."""

    def everywhere(self, prompt: Sequence[int], sampling: Sampling) -> Future[list[Completion]]:
        """Let every engine complete a prompt."""
        ...

    def distrust(self, reason: str) -> None:
        """Serve nobody until other weights have been received."""
        ...
