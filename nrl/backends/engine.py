"""The protocols that authors of backends implement: an engine that trains, and one that samples."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tensordict import TensorDict
from torch import Tensor

from nrl.algos import Loss
from nrl.backends.training.saving.save_plan import SavePlan
from nrl.backends.types import Bucket, Chunks, Piece, Sampling
from nrl.batch import Batch
from nrl.batch.metrics import Metrics
from nrl.files import Folder

__all__ = ["GIVEN_UP", "Decoded", "Request", "SampleEngine", "TrainEngine", "WeightReceiver"]


GIVEN_UP: ContextVar[Callable[[], Sequence[bool]] | None] = ContextVar("GIVEN_UP", default=None)
"""Tells a sampler that is called in this thread which of the call's prompts nobody waits for any more, in their order.

The sampler may stop decoding those; its completions of them are not read.
"""


class WeightReceiver(Protocol):
    """A receiver of weights, a bucket at a time, for example `nrl.backends.models.shards.ShardLoader`."""

    def add(self, bucket: Bucket) -> None:
        """Take some pieces; other processes may have the remaining pieces of the same weights.

        Raises:
            ModelError: a name that the model does not have, or a wrong shape.
        """
        ...

    def end(self) -> None:
        """Check that all weights have come.

        Raises:
            ModelError: some did not.
        """
        ...


class TrainEngine[S, M](Protocol):
    """The engine that the author of a trainer writes; each process of a mesh makes one.

    ``S`` is its train state, ``M`` its params. In a mesh of several processes every method is called in all of them,
    with rows of their own and otherwise the same arguments; an engine talks to its peers through `nrl.process`. All
    processes return the same metrics. Both loops over micro-batches are the engine's own (under pipeline parallelism
    the schedule owns them). Micro-batches are padded batches of whole rows, and the loss sees outputs ``[*b, T]`` like
    them. Reading makes them, and may raise in one process alone: then the engine lets its peers know.
    """

    @property
    def provides(self) -> frozenset[str]:
        """The kinds of outputs of the engine (`nrl.algos.output_kind`), such as ``logprobs``.

        An engine that provides ``logits``, ``from_logits`` or ``hidden_states`` has ``widths``, too: the size of the
        vocabulary by ``"logits"``, and of hidden states by ``"hidden_states"``.
        """
        ...

    @property
    def frozen_token(self) -> int | None:
        """The token whose input embedding is not trained, although others are; None: there is none."""
        ...

    def init(self) -> S:
        """Make a fresh train state with the model's own weights."""
        ...

    def receive(self, state: S) -> WeightReceiver:
        """Replace the weights of a fresh train state: the adapter alone, if an adapter comes, or else all weights.

        They may be of a model with another head.
        """
        ...

    def params(self, state: S) -> M:
        """Return the params inside a train state, shared with it."""
        ...

    def adapter(self, params: M) -> M:
        """Return the adapter alone of these params, shared with them; `pieces`, `save` and `export` take it."""
        ...

    def load(self, source: str | None) -> M:
        """Load params for forward passes only, from a folder or the hub; None: the model's own initial ones."""
        ...

    def freeze(self, params: M) -> M:
        """Copy params, so that later steps do not change the copy."""
        ...

    def forward(self, params: M, microbatches: Iterable[Batch], needs: frozenset[str]) -> Sequence[TensorDict]:
        """Compute the outputs that ``needs`` names, for each micro-batch, without gradients.

        Their shapes are those of `nrl.algos.output_shape`. `top_k` stands for ``top_k_ids`` and ``top_k_logprobs``,
        each ``[*b, T, k]``, zeros where nothing is predicted.
        """
        ...

    def train(
        self, state: S, loss: Loss, microbatches: Iterable[Batch], weights: Mapping[str, float]
    ) -> tuple[S, Metrics]:
        """Take one optimizer step on the sum over micro-batches of ``total / weights[term]``.

        The metrics are those of the loss, ``loss``, ``grad_norm``, ``lr``, ``tokens``, and `mismatch_metrics` of the
        outputs; `nrl.backends.training.loss.value_and_grad.value_and_grad` has them with the loss. An engine that
        computes what rows have in common once adds ``tokens/computed`` and ``tokens/saved``
        (`nrl.backends.training.loss.step_sums.StepSums.reduce_all`).

        It either steps once, or raises and leaves the state unchanged.

        Raises:
            WeightError: the weights of the real calls do not add up to ``weights``.
        """
        ...

    def pieces(self, params: M) -> Iterator[Piece]:
        """Yield the weights, or the parts that this process has, under Hugging Face's names and in its shapes.

        Adapters are added to the weights, if ``params`` are not an `adapter` alone. Together the pieces of all
        processes are every number of every weight once, tied weights once: of copies, one process yields its own. All
        processes iterate together. Processes with pieces of the same weights yield them in the same order; a process
        without a piece of a weight may yield an empty piece to keep step.
        """
        ...

    def save(self, state: S, params: M) -> SavePlan:
        """Plan to save all that `restore` needs: the files of this process, and a record. Nothing is written yet.

        ``params`` are the state's, or their `adapter` alone, where the base is the model's own and can be left out.
        Names of files differ between processes. The first process's record goes into the manifest, and from there to
        `restore` in each process.
        """
        ...

    def restore(self, folder: Folder, record: Mapping[str, Any]) -> S:
        """Read the state that any number of processes saved; raise `CheckpointError` where a part is missing."""
        ...

    def save_params(self, params: M) -> SavePlan:
        """Plan to save params, which `restore_params` reads; see `save`."""
        ...

    def restore_params(self, folder: Folder, record: Mapping[str, Any]) -> M:
        """Read the frozen params that were saved."""
        ...

    def export(self, params: M, folder: Path) -> None:
        """Write params and tokenizer in Hugging Face format; an `adapter` in peft's.

        All processes call it, and the first one writes.
        """
        ...


class Request(NamedTuple):
    """A prompt to complete.

    Args:
        number: of this request and of its answer; unique in the sampler.
        prompt: token ids; and media, if the engine takes them.
        seed: of its noise.
        sampling: how its tokens are drawn.
        cancellable: the request may be cancelled while decoded, so an engine of whole batches returns every second.
    """

    number: int
    prompt: Chunks
    seed: int
    sampling: Sampling
    cancellable: bool = False


class Decoded(NamedTuple):
    """The answer to one prompt.

    Args:
        token_ids: ``[L]`` int64, the sampled tokens, with the stop token if one was sampled.
        logprobs: ``[L]`` float32, nats, under the sampling distribution.
        truncated: a length limit ended it instead of a stop token.
        versions: ``[L]`` int64, of the weights of each token; None: the current version.
        routes: as `nrl.backends.types.Completion` has them.
    """

    token_ids: Tensor
    logprobs: Tensor
    truncated: bool
    versions: Tensor | None = None
    routes: Tensor | None = None


class SampleEngine(Protocol):
    """The engine that the author of a sampler writes; it samples in one process.

    It may satisfy `nrl.runtime.mesh.offload.Offloadable`, too. And it may have ``matrices``, the common dtype of all
    weights of more than one dimension: then these come in this dtype.

    `nrl.backends.sampling.pool.EnginePool` makes a sampler of such engines; `nrl.backends.hf.hf_engine` and
    `nrl.backends.vllm.vllm_engine` hold two of them.
    """

    @property
    def context_length(self) -> int:
        """The most tokens that a prompt and its completion may have together."""
        ...

    @property
    def vocabulary(self) -> int:
        """The number of tokens that the model knows."""
        ...

    def advance(
        self, requests: Sequence[Request], cancelled: Sequence[int]
    ) -> Sequence[tuple[int, Decoded | Exception]]:
        """Take on requests, forget cancelled ones, and decode: for a moment, or until all requests are finished.

        The pool calls it again and again while requests are unfinished. An engine that can take on requests while
        decoding returns every few steps, and any other engine when all are finished, or after a second while some are
        ``cancellable``. The noise of a row depends on its seed alone.

        Args:
            requests: new ones, which `nrl.backends.sampling.validation.check_prompts` has accepted.
            cancelled: numbers of earlier requests without a waiting caller; they may be finished already.

        Returns:
            The number of each finished request, and its answer or error.
        """
        ...

    def begin(self) -> None:
        """Prepare for new weights, all of them. Nothing computed with the old ones may be used again."""
        ...

    def add(self, bucket: Bucket) -> None:
        """Take some pieces of the new weights; of tied weights one name is enough.

        `nrl.backends.models.shards` has what an engine needs that copies them into its own weights, or that has to have
        each weight whole.

        Raises:
            ModelError: a name that the model does not have, or a wrong shape.
        """
        ...

    def end(self, version: int) -> None:
        """Use the new weights from now on, for unfinished requests, too.

        Raises:
            ModelError: some weights did not come.
        """
        ...
