"""The protocol of a train engine, which runs in each process of a mesh; authors of trainers implement it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tensordict import TensorDict
from torch import Tensor

from nrl.algos import Loss
from nrl.batch import Batch
from nrl.files import Written
from nrl.reduce import Metrics

__all__ = ["TrainEngine"]


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

    def save(self, state: S, folder: Path, adapter: bool = False) -> Mapping[str, Written]:
        """Write all that `restore` needs; with ``adapter``, without the base, which is the model's own.

        Returns the files that this process wrote, by their names in the folder. They are on the disk by then (see
        `nrl.files.write`), and when one process returns, all have written theirs.
        """
        ...

    def restore(self, folder: Path) -> S:
        """The state that was saved, by any number of processes; raises `CheckpointError` where a part is missing."""
        ...

    def save_params(self, params: M, folder: Path, adapter: bool = False) -> Mapping[str, Written]:
        """Write all that `restore_params` needs, to the last bit; otherwise as `save`."""
        ...

    def restore_params(self, folder: Path) -> M:
        """The frozen params that were saved."""
        ...

    def export(self, params: M, folder: Path, adapter: bool = False) -> None:
        """Write params and tokenizer in Hugging Face format; with ``adapter``, that alone in peft's.

        All processes go along, and the first one writes.
        """
        ...
