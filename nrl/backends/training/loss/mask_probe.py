"""A probe for losses that read outputs where ``loss_mask`` is false; for all others these are not computed."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from weakref import WeakValueDictionary

from nrl.algos import Loss, name_of
from nrl.backends.training.collectives import ProcessGroup
from nrl.backends.training.loss.step_sums import even_out
from nrl.batch import Batch
from nrl.batch.metrics import Metrics

__all__ = ["MaskProbe"]


class MaskProbe:
    """A record of the losses that read outputs where ``loss_mask`` is false."""

    def __init__(self) -> None:
        self._losses: WeakValueDictionary[int, Loss] = WeakValueDictionary()

    def compute_sums(
        self,
        peers: ProcessGroup,
        loss: Loss,
        microbatches: Iterable[Batch],
        compute: Callable[[Sequence[Batch], bool], Metrics | None],
        undo: Callable[[], None],
    ) -> Metrics:
        """Compute the sums over the micro-batches of all processes; a collective.

        Args:
            peers: the processes.
            loss: of the step.
            microbatches: of this process.
            compute: goes through as many micro-batches in every process, and returns the sums, or None where the loss
                reads outputs that were skipped; its second argument is whether to compute all outputs.
            undo: discards the sums of a call that returned None.
        """
        seen = self._losses.get(id(loss)) is loss
        parts, reads_masked = even_out(peers, f"train_step({name_of(loss)})", microbatches, seen)
        if not any(reads_masked):
            metrics = compute(parts, False)
            if metrics is not None:
                return metrics
            undo()
            with contextlib.suppress(TypeError):  # some callables have no weak references
                self._losses[id(loss)] = loss
        metrics = compute(parts, True)
        assert metrics is not None
        return metrics
