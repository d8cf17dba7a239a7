"""The sums of a step over micro-batches and processes, and equal numbers of micro-batches in all processes."""

import functools
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from nrl.algos import Loss
from nrl.backends.training.collectives import DeferredError, ProcessGroup
from nrl.backends.training.device_metrics import FLOPS
from nrl.backends.training.flops import Cost, step_flops
from nrl.backends.training.layout.microbatch_plan import Plan
from nrl.backends.training.loss.loss_terms import check_weights, no_gradient
from nrl.backends.training.loss.value_and_grad import ignores, value_and_grad
from nrl.batch import Batch, lengths
from nrl.batch.metrics import Mean, Metrics, Sum, merge
from nrl.errors import BatchError, NotFinite

__all__ = ["IDLE", "StepSums", "check_norm", "even_out", "step_metrics"]

IDLE = Batch({"input_ids": torch.zeros(1, 1, dtype=torch.int64)}, batch_size=[1]).lock_()
"""The micro-batch of a process that has no more while others have: one token, which predicts nothing."""

_SEEN = "weight of "
"""The prefix of a term's name, for its weight added up over micro-batches."""


def even_out(
    peers: ProcessGroup, caller: str, microbatches: Iterable[Batch], value: bool = False
) -> tuple[list[Batch], list[bool]]:
    """Fill up the micro-batches of this process with `IDLE` ones, as all processes meet in each of them.

    Args:
        peers: the processes.
        caller: the name of the caller in errors.
        microbatches: of this process.
        value: for the other processes.

    Returns:
        As many micro-batches as the process with the most has; and the values of all processes.

    Raises:
        Exception: what reading them raised in any process.
    """
    deferred, parts = DeferredError(peers), list[Batch]()
    with deferred.capture():
        parts = list(microbatches)
    gathered = deferred.gather_or_raise(caller, (len(parts), value))
    count = max(length for length, _ in gathered)
    return parts + [IDLE] * (count - len(parts)), [value for _, value in gathered]


class StepSums:
    """The sums of a step over its micro-batches; nothing waits for the device until `reduce_all` copies them at once.

    Args:
        loss: called on the outputs of each micro-batch.
        name: of the loss in errors.
        weights: of each of its terms, over the whole batch.
        device: of the outputs.
        counted: whether the sums of this process count; of processes that have the same outputs, one does.
        cost: what the model computes; None: that is not known.

    >>> from nrl.algos import sft_loss
    >>> ids = torch.tensor([[5, 6]])
    >>> batch = Batch({"input_ids": ids, "loss_mask": ids == 6}, batch_size=[1])
    >>> sums = StepSums(sft_loss, "sft", {"loss": 2.0}, torch.device("cpu"))
    >>> sums.add({"logprobs": torch.tensor([[0.0, -3.0]])}, batch, torch.tensor([0]))
    {'logprobs': tensor([[-0.0000, -0.5000]])}
    """

    def __init__(
        self,
        loss: Loss,
        name: str,
        weights: Mapping[str, float],
        device: torch.device,
        counted: bool = True,
        cost: Cost | None = None,
    ) -> None:
        self._loss, self._name, self._weights, self._counted, self._cost = loss, name, weights, counted, cost
        self._sums: Metrics = {}
        self._differentiable = False
        self._trusted = torch.ones((), dtype=torch.bool, device=device)

    def add(self, outputs: Mapping[str, Tensor], batch: Batch, left_out: Tensor) -> dict[str, Tensor]:
        """Call the loss on the outputs of a micro-batch, and return its gradient for each output.

        Args:
            outputs: ``[*b, T, ...]`` each, on the device.
            batch: their rows, on the device.
            left_out: ``[k]`` int64, the tokens of the flattened batch whose outputs have not been computed.
        """
        result = value_and_grad(self._loss, self._name, outputs, batch, self._weights)
        self._differentiable |= result.differentiable
        if len(left_out):
            self._trusted &= ignores(self._loss, self._name, outputs, batch, self._weights, left_out, result)
        terms = {f"loss/{key}": term for key, term in result.terms.items()} if len(result.terms) > 1 else {}
        seen = {_SEEN + key: Sum(term.weight.double()) for key, term in result.terms.items()}
        self._sums = merge(self._sums, result.metrics | terms | seen | {"loss": Sum(result.loss)})
        return result.gradients

    def reduce_all(
        self, deferred: DeferredError, microbatches: Sequence[Batch], plans: Sequence[Plan], read: int
    ) -> Metrics | None:
        """Compute the sums over all processes; None: the loss reads outputs that were skipped. A collective.

        Args:
            deferred: with the error of this process, if it has one.
            microbatches: of this process.
            plans: the plan of each.
            read: how many outputs the loss has got in this process.

        Raises:
            BatchError: no process has read an output.
            NoGradient: the loss depends on no output in any process.
            NotFinite: the loss is NaN or infinite.
            WeightError: the weights of the real calls do not add up to those of the whole batch.
            Exception: what was held back in any process.
        """
        caller = f"train_step({self._name})"
        sums, (certain,) = _fetch(self._sums, self._trusted)
        mine = sums | _counts(microbatches, plans, self._cost) if self._counted else {}
        everybody = deferred.gather_or_raise(caller, (mine, certain, read, self._differentiable))
        if not all(certain for _, certain, *_ in everybody):
            return None
        if not any(read for *_, read, _ in everybody):
            raise BatchError(
                f"{caller}: no output of the model is read, so no parameter has a gradient; nothing was "
                "changed. 'loss_mask' is true at no token that has one before it in its row, from which a model "
                "predicts it: see how the column was made"
            )
        totals = functools.reduce(merge, [sums for sums, *_ in everybody])
        seen = {key: float(totals.pop(_SEEN + key)[0]) for key in self._weights}
        check_weights(self._name, seen, self._weights)
        if not any(differentiable for *_, differentiable in everybody):
            raise no_gradient(caller)
        if not torch.isfinite(total := totals["loss"][0]):
            raise NotFinite(
                f"{caller}: the loss is {float(total)}; nothing was changed. Look for NaN or infinite values in the "
                "batch's columns, and for a logarithm or a division of 0 or an exp in the loss; clamp before them"
            )
        return totals


def _counts(microbatches: Sequence[Batch], plans: Sequence[Plan], cost: Cost | None) -> Metrics:
    """Count the tokens of the rows, those computed, those saved because rows have them in common, and FLOPs."""
    real = [(batch, plan) for batch, plan in zip(microbatches, plans, strict=True) if batch is not IDLE]
    counts = {
        "tokens": sum(int(lengths(batch).sum()) for batch, _ in real),
        "tokens/computed": sum(plan.computed for _, plan in real),
        "tokens/saved": sum(plan.saved for _, plan in real),
    }
    metrics: Metrics = {name: Sum(torch.tensor(count)) for name, count in counts.items()}
    if cost is not None:
        flops = sum(step_flops(cost, plan) for _, plan in real)
        metrics[FLOPS] = Sum(torch.tensor(flops, dtype=torch.float64))
    return metrics


def check_norm(caller: str, norm: Tensor, step: int) -> None:
    """Check that the norm of a step's gradient is finite.

    Raises:
        NotFinite: it is not.
    """
    if not torch.isfinite(norm):
        raise NotFinite(
            f"{caller}: the norm of the gradient is {float(norm)} at optimizer step {step}; nothing was changed. Look "
            "for NaN or infinite values in the batch's columns, or lower the learning rate"
        )


def _fetch(metrics: Metrics, *extra: Tensor) -> tuple[Metrics, list[float]]:
    """Copy numbers to the CPU, all at once."""
    values = [x for value in metrics.values() for x in value]
    flat = torch.cat([x.double().flatten() for x in [*values, *extra]]).cpu()
    parts = flat.split([x.numel() for x in [*values, *extra]])
    copies = (part.to(x.dtype).view(x.shape) for part, x in zip(parts, values, strict=False))
    fetched = {key: type(value)(*(next(copies) for _ in value)) for key, value in metrics.items()}
    return fetched, [float(part) for part in parts[len(values) :]]


def step_metrics(norm: Tensor, rate: float) -> Metrics:
    """Return the metrics of an optimizer step: the norm of its gradient before clipping, and its learning rate."""
    weight = torch.ones(())
    return {"grad_norm": Mean(norm.cpu(), weight), "lr": Mean(torch.tensor(rate), weight)}
