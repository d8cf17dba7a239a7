"""The protocols that authors of backends implement: an engine that trains, and one that samples."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tensordict import TensorDict
from torch import Tensor

from nrl.algos import Loss
from nrl.backends.training.saving.save_plan import ToSave
from nrl.backends.types import Bucket, Chunks, Piece, Sampling
from nrl.batch import Batch
from nrl.batch.metrics import Metrics
from nrl.files import Folder

__all__ = ["GIVEN_UP", "Decoded", "Receives", "Request", "SampleEngine", "TrainEngine"]


GIVEN_UP: ContextVar[Callable[[], Sequence[bool]] | None] = ContextVar("GIVEN_UP", default=None)
"""Tells a sampler that is called in this thread which of the call's prompts nobody waits for any more, in their order.

The sampler may stop decoding those; its completions of them are not read.
"""


class Receives(Protocol):
    """What takes weights, some pieces at a time; `nrl.backends.models.shards.Filling` is one."""

    def add(self, bucket: Bucket) -> None:
        """Take some pieces, of which others may belong to other processes.

        Raises:
            ModelError: a name that the model does not have, or a wrong shape.
        """
        ...

    def end(self) -> None:
        """Check that all have come.

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
    them. Reading them makes them, which may raise in one process alone: then the engine lets its peers know.
    """

    @property
    def provides(self) -> frozenset[str]:
        """The kinds of outputs that it computes (`nrl.algos.output_kind`), such as ``logprobs``.

        An engine that provides ``logits``, ``from_logits`` or ``hidden_states`` has ``widths``, too: the size of the
        vocabulary by ``"logits"``, and of hidden states by ``"hidden_states"``.
        """
        ...

    @property
    def frozen_token(self) -> int | None:
        """The token whose input embedding is not trained, although others are; None: there is none."""
        ...

    def init(self) -> S:
        """A fresh train state with the model's own weights."""
        ...

    def receive(self, state: S) -> Receives:
        """Replace the weights of a fresh train state: those of its adapter alone, if such come, or else all.

        They may be of a model with another head.
        """
        ...

    def params(self, state: S) -> M:
        """The params inside of a train state, shared with it."""
        ...

    def adapter(self, params: M) -> M:
        """The adapter alone of these params, shared with them: for `pieces`, `save`, `save_params` and `export`."""
        ...

    def load(self, source: str | None) -> M:
        """Params for forward passes only, from a folder or the hub; None: the model's own initial ones."""
        ...

    def freeze(self, params: M) -> M:
        """A copy of params that later steps do not change."""
        ...

    def forward(self, params: M, microbatches: Iterable[Batch], needs: frozenset[str]) -> Sequence[TensorDict]:
        """The outputs that ``needs`` names, for each micro-batch, without gradients.

        Their shapes are those of `nrl.algos.output_shape`. `top_k` stands for ``top_k_ids`` and ``top_k_logprobs``,
        each ``[*b, T, k]``, zeros where nothing is predicted.
        """
        ...

    def train(
        self, state: S, loss: Loss, microbatches: Iterable[Batch], weights: Mapping[str, float]
    ) -> tuple[S, Metrics]:
        """One optimizer step on the sum over micro-batches of ``total / weights[term]``.

        The metrics are those of the loss, ``loss``, ``grad_norm``, ``lr``, ``tokens``, and `mismatch_metrics` of the
        outputs; `nrl.backends.training.loss.value_and_grad.value_and_grad` has them with the loss. An engine that
        computes what rows have in common once adds ``tokens/computed`` and ``tokens/saved``
        (`nrl.backends.training.loss.step_sums.StepSums.over_all`).

        It either steps once, or raises and leaves the state as it was.

        Raises:
            WeightError: the weights of the real calls do not add up to ``weights``.
        """
        ...

    def pieces(self, params: M) -> Iterator[Piece]:
        """The weights, or what this process has of them, under Hugging Face's names and in its shapes.

        Adapters are added to the weights, if ``params`` are not an `adapter` alone. Together the pieces of all
        processes are every number of every weight once, tied weights once: of copies, one process yields its own. All
        processes iterate together. Those that have pieces of the same weights yield them in the same order; a process
        that has nothing of such a weight may yield an empty piece, so that it keeps step.
        """
        ...

    def save(self, state: S, params: M) -> ToSave:
        """All that `restore` needs: the files of this process, and a record. Nothing is written or copied yet.

        ``params`` are the state's, or their `adapter` alone, where the base is the model's own and can be left out.
        Names of files differ between processes. The first process's record goes into the manifest, and from there to
        `restore` in each process.
        """
        ...

    def restore(self, folder: Folder, record: Mapping[str, Any]) -> S:
        """The state that was saved, by any number of processes; raises `CheckpointError` where a part is missing."""
        ...

    def save_params(self, params: M) -> ToSave:
        """As `save`, for params and `restore_params`."""
        ...

    def restore_params(self, folder: Folder, record: Mapping[str, Any]) -> M:
        """The frozen params that were saved."""
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
        cancellable: it may be cancelled while it is decoded, so that an engine that decodes requests to their end
            returns every second.
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
        logprobs: ``[L]`` float32, nats, of each under the distribution that it was drawn from.
        truncated: a length limit ended it, and not a stop token.
        versions: ``[L]`` int64, of the weights that drew each token; None: of the current ones.
        routes: as `nrl.backends.types.Completion` has them.
    """

    token_ids: Tensor
    logprobs: Tensor
    truncated: bool
    versions: Tensor | None = None
    routes: Tensor | None = None


class SampleEngine(Protocol):
    """The engine that the author of a sampler writes; it samples in one process.

    It may satisfy `nrl.runtime.mesh.offload.Offloadable`, too. And it may have ``matrices``, the one dtype that it
    keeps all weights of more than one dimension in: then they come in that dtype.

    `nrl.backends.sampling.pool.EnginePool` makes a sampler of such engines; `nrl.backends.hf.hf_engine` and
    `nrl.backends.vllm.vllm_engine` hold two of them.
    """

    @property
    def context_length(self) -> int:
        """The most tokens that a prompt and its completion may have together."""
        ...

    @property
    def vocabulary(self) -> int:
        """How many tokens the model knows."""
        ...

    def advance(
        self, requests: Sequence[Request], cancelled: Sequence[int]
    ) -> Sequence[tuple[int, Decoded | Exception]]:
        """Take on requests, forget others, and decode: for a moment, or until all requests are finished.

        It is called again and again while requests are unfinished. So an engine that can take on requests while it
        decodes returns every few steps, and any other when all are finished; while some of them are ``cancellable``,
        after a second. The noise of a row depends on its seed alone.

        Args:
            requests: new ones, which `nrl.backends.sampling.validation.check_prompts` has accepted.
            cancelled: numbers of earlier requests that nobody waits for any more; some may be finished already.

        Returns:
            For each finished request, its number and the answer, or the error for which it has none.
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
