"""The protocols that authors of backends implement: an engine that trains, and one that samples."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tensordict import TensorDict
from torch import Tensor

from nrl.algos import Loss
from nrl.backends.base import Bucket, Sampling
from nrl.batch import Batch
from nrl.files import Saved
from nrl.reduce import Metrics

__all__ = ["Decoded", "Request", "SampleEngine", "TrainEngine"]


class TrainEngine[S, M](Protocol):
    """What a backend author writes; made in each process of a mesh. ``S`` is its train state, ``M`` its params.

    In a mesh of several processes each is called with its own rows, and all with the same arguments otherwise; an
    engine talks to its peers through `nrl.process`. What it returns as metrics is the same in all of them.
    Both loops over micro-batches are the engine's own (under pipeline parallelism the schedule owns them).
    Micro-batches are padded batches of whole rows; what the loss sees is ``[*b, T]`` like them. They are made while
    they are read, which may raise in one process alone: an engine of several lets all of them know.
    """

    @property
    def provides(self) -> frozenset[str]:
        """The kinds of outputs (`nrl.algos.output_kind`) that it computes, ``logprobs`` among them if it does."""
        ...

    def init(self, tensors: Iterable[tuple[str, Tensor]] | None = None) -> S:
        """A fresh train state with the model's own weights, or with these, which may be of a model of another head.

        They may be those of an adapter alone.
        """
        ...

    def params(self, state: S) -> M:
        """The params inside of a train state, shared with it."""
        ...

    def load(self, source: str | None) -> M:
        """Params from elsewhere, to be used forward only; None: the model's own initial ones."""
        ...

    def freeze(self, params: M) -> M:
        """A copy of params that later steps do not change."""
        ...

    def forward(self, params: M, microbatches: Iterable[Batch], needs: frozenset[str]) -> Sequence[TensorDict]:
        """What ``needs`` names for each micro-batch, without gradients, in the shapes of `nrl.algos.output_shape`.

        For `top_k` that is ``top_k_ids`` and ``top_k_logprobs``, each ``[*b, T, k]``, zeros where nothing is predicted.
        """
        ...

    def train(
        self, state: S, loss: Loss, microbatches: Iterable[Batch], weights: Mapping[str, float]
    ) -> tuple[S, Metrics]:
        """One optimizer step on the sum over micro-batches of ``total / weights[term]``.

        The metrics are those of the loss, ``loss``, ``grad_norm``, ``lr``, ``tokens``, and `mismatch_metrics` of what
        the loss saw; `nrl.backends.training.gradients.value_and_grad` has them with the loss.

        Either steps once, or raises and leaves the state as it was. Raises `WeightError` where the weights of the real
        calls do not add up to ``weights``.
        """
        ...

    def tensors(self, params: M, adapter: bool = False) -> Iterator[tuple[str, Tensor]]:
        """The params by their Hugging Face names, whole, tied ones once, for `publish`; all processes go along.

        With ``adapter`` those of an adapter alone; otherwise it is added to the others.
        """
        ...

    def save(self, state: S, folder: Path, adapter: bool = False) -> Saved:
        """Write all that `restore` needs; with ``adapter``, without the base, which is the model's own.

        Returns the files that this process wrote, by their names in the folder. They are on the disk by then (see
        `nrl.files.write`), and when one process returns, all have written theirs. What the first process returns as
        the record goes into the manifest, and to `restore` in each process.
        """
        ...

    def restore(self, folder: Path, record: Mapping[str, Any]) -> S:
        """The state that was saved, by any number of processes; raises `CheckpointError` where a part is missing."""
        ...

    def save_params(self, params: M, folder: Path, adapter: bool = False) -> Saved:
        """Write all that `restore_params` needs, to the last bit; otherwise as `save`."""
        ...

    def restore_params(self, folder: Path, record: Mapping[str, Any]) -> M:
        """The frozen params that were saved."""
        ...

    def export(self, params: M, folder: Path, adapter: bool = False) -> None:
        """Write params and tokenizer in Hugging Face format; with ``adapter``, that alone in peft's.

        All processes go along, and the first one writes.
        """
        ...


class Request(NamedTuple):
    """A prompt that is to be completed.

    Args:
        number: by which the answer is known; no other request of the sampler has it.
        prompt: token ids.
        seed: of its noise.
        sampling: how its tokens are drawn.

    >>> Request(0, [5, 6], 1, Sampling()).seed
    1
    """

    number: int
    prompt: Sequence[int]
    seed: int
    sampling: Sampling


class Decoded(NamedTuple):
    """The answer to one prompt.

    Args:
        token_ids: ``[L]`` int64, the sampled tokens, with the stop token if one was sampled.
        logprobs: ``[L]`` float32, nats, of each under the distribution that it was drawn from.
        truncated: it was ended by a length limit and not by a stop token.
        versions: ``[L]`` int64, of the weights that each was drawn with; None: of those that there are.
    """

    token_ids: Tensor
    logprobs: Tensor
    truncated: bool
    versions: Tensor | None = None


class SampleEngine(Protocol):
    """What samples, in one process. It may satisfy `nrl.runtime.mesh.current_process.Rests`, too.

    `nrl.backends.sampling.pool.EnginePool` makes a sampler of such engines; `nrl.backends.hf.hf_engine` and
    `nrl.backends.vllm.vllm_engine` hold two of them.
    """

    @property
    def context_length(self) -> int:
        """The most tokens that a prompt and its completion may have together."""
        ...

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        ...

    def advance(
        self, requests: Sequence[Request], cancelled: Sequence[int]
    ) -> Sequence[tuple[int, Decoded | Exception]]:
        """Take on requests, forget others, and decode: for a moment, or until all that it has are finished.

        It is called again and again while requests are unfinished, so an engine that can take on requests while it
        decodes returns every few steps, and any other when all are finished. The noise of a row depends on its seed
        alone.

        Args:
            requests: new ones, which `nrl.backends.sampling.request_checks.check_prompts` has found fit.
            cancelled: numbers of earlier ones that nobody waits for any more; some may be finished already.

        Returns:
            What is finished, with its number; or why it cannot be served.
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

    def end(self, version: int) -> None:
        """They have come; unfinished requests go on with them.

        Raises:
            ModelError: some have not.
        """
        ...
