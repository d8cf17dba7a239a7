"""Checks that a loss treats each row alone, so that no split of a batch changes the gradient.

A loss is any function, so the driver tries it on outputs that differ in each row and at each token. Its gradient on
some rows has to be that on their halves, and its weight must not depend on outputs or padding.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from nrl.algos import LogitsOutput, Loss, name_of, needed, output_kind, output_shape
from nrl.backends.training.layout.microbatch_plan import columns_at, predicted_mask
from nrl.backends.training.loss.loss_terms import call_loss, check_terms, check_weights, global_weights, no_gradient
from nrl.backends.training.outputs.head_functions import call_on
from nrl.batch import Batch, Parts, lengths, microbatches, pad, shard
from nrl.batch.metrics import Mean
from nrl.errors import WeightError

__all__ = ["check_loss_is_additive"]

_ROWS = 64
"""The most rows whose gradients are compared."""

_NUMBERS = 2**24
"""The most numbers of a large output that are drawn, if a row has no more."""

_DRAWS = 3
"""How many sets of outputs are tried. A mean or a maximum over rows shows in each; a threshold may hide from one."""

_CLOSE = 1e-4
"""The fraction by which numbers may differ between calls on rows of one width, since each row adds up in one order."""

_ROUGHLY = 0.1
"""The same with more padding, where another order rounds differently, and a row's sum may go through an exponential."""

_RATHER = (
    "compute statistics of the batch, such as a mean to subtract or a maximum to divide by, on the driver, and read "
    "them from a column"
)


def check_loss_is_additive(
    loss: Loss,
    batch: Batch,
    weights: Mapping[str, float],
    always: Collection[str],
    widths: Mapping[str, int] = MappingProxyType({}),
) -> bool:
    """Check that weights ignore outputs and padding, and that terms and gradients add up over rows.

    Args:
        loss: any.
        batch: the whole one.
        weights: from `global_weights`.
        always: outputs of every loss, in addition to its needs.
        widths: as `nrl.algos.output_shape` takes them. Where the loss reads such outputs, a few short rows are checked.
            Functions of logits are checked if V is among them.

    Returns:
        Whether the batch was enough to check that.

    Raises:
        NoGradient: the loss depends on no output.
        WeightError: the loss, or a function of logits in its needs, is not additive over rows.
        TypeError: a function of logits returned something of another shape than it declared.

    >>> from nrl.algos import sft_loss
    >>> mask = torch.tensor([[False, True, True]] * 2)
    >>> batch = Batch({"input_ids": mask.long(), "loss_mask": mask}, batch_size=[2])
    >>> check_loss_is_additive(sft_loss, batch, {"loss": 4.0}, {"logprobs"})
    True
    """
    name, outputs = name_of(loss), {*always, *needed(loss)}
    _check_functions(name, outputs, batch, widths)
    if large := [widths[output] for output in outputs if output in widths]:
        sample = _pick_rows(batch)
        tokens = max(sample["input_ids"][:1].numel(), _NUMBERS // max(large))
        batch = max(microbatches(sample, max_tokens=tokens), key=len)
        if len(batch) < 2:
            return False
        weights = global_weights(loss, batch, always=always, widths=widths)
    wide = pad(batch, batch["input_ids"].shape[-1] + 1)
    with torch.no_grad():
        full_terms = call_loss(loss, wide, _draw_outputs(outputs, wide, 0, widths))
    check_terms(name, full_terms, weights)
    check_weights(name, {key: float(term.weight) for key, term in full_terms.items()}, weights)
    if len(batch) < 2:
        return False
    halves = [global_weights(loss, half, always=always, widths=widths) for half in shard(batch, 2)]
    for half in halves:
        check_terms(name, half, weights)
    check_weights(name, {key: sum(half[key] for half in halves) for key in weights}, weights)
    sample = _pick_rows(batch)
    return len(sample) > 1 and all(_is_additive(loss, sample, weights, outputs, seed, widths) for seed in range(_DRAWS))


def _check_functions(name: str, outputs: Collection[str], batch: Batch, widths: Mapping[str, int]) -> None:
    """Check on random logits that each function of logits treats a token the same alone and among others."""
    functions = [output for output in sorted(outputs) if isinstance(output, LogitsOutput)]
    if not functions or "logits" not in widths:
        return
    tokens = torch.nonzero(predicted_mask(batch).flatten())[:4, 0]
    logits = 3 * torch.randn(len(tokens), widths["logits"], generator=torch.Generator().manual_seed(0))
    columns = columns_at(batch, functions, tokens)
    for output in functions:
        inputs = [columns[column] for column in output.columns]
        with torch.no_grad():
            together = call_on(output, logits, inputs).double()
            alone = [call_on(output, logits[n : n + 1], [x[n : n + 1] for x in inputs]) for n in range(len(tokens))]
        for n, single in enumerate(alone):
            if not torch.allclose(single[0].double(), together[n], rtol=_CLOSE, atol=_CLOSE, equal_nan=True):
                raise WeightError(
                    f"{name}: {output} is {single[0].tolist()} for a token alone, but {together[n].tolist()} among "
                    f"{len(tokens)} tokens. A function of logits treats each token alone, as its tokens are those of a "
                    "chunk; let the loss compute statistics over the tokens of a row"
                )


def _pick_rows(batch: Batch) -> Batch:
    """Pick rows from all over a batch; with a ``loss_mask``, only trained rows."""
    rows = torch.arange(len(batch))
    if "loss_mask" in batch.keys():
        rows = torch.nonzero(batch["loss_mask"].flatten(1).any(1))[:, 0]
    if len(rows) > _ROWS:
        rows = rows[torch.linspace(0, len(rows) - 1, _ROWS).long()]
    return Parts(batch, [rows])[0]


def _draw_outputs(outputs: Collection[str], batch: Batch, seed: int, widths: Mapping[str, int]) -> dict[str, Tensor]:
    """Draw outputs like those of models, different in each row and at each token; 0 where a row has no token.

    Each row has a scale of its own, within a factor of 16, and numbers with a long tail. So any two halves of the rows
    have different means, deviations and maxima.
    """
    draw, outputs_by_name = torch.Generator().manual_seed(seed), {}
    for key in sorted(outputs):
        x = torch.empty(output_shape(key, batch, widths)).exponential_(generator=draw)
        per_row = (len(batch), *[1] * (x.ndim - 1))
        x = x * 2 ** (4 * torch.rand(per_row, generator=draw) - 2)
        if output_kind(key) in ("logprobs", "logprobs_at"):
            x = -x
        elif output_kind(key) != "entropy":
            x = torch.where(torch.rand(per_row, generator=draw) < 0.5, -x, x)
        if x.ndim > batch.ndim:
            present = torch.arange(x.shape[batch.ndim]) < lengths(batch).unsqueeze(-1)
            x = x * present.view(*present.shape, *[1] * (x.ndim - present.ndim))
        outputs_by_name[key] = x.to(batch["input_ids"].device)
    return outputs_by_name


def _is_additive(
    loss: Loss,
    batch: Batch,
    weights: Mapping[str, float],
    outputs: Collection[str],
    seed: int,
    widths: Mapping[str, int],
) -> bool:
    """Check that a row's gradient is the same among other rows and with more padding.

    Returns:
        Whether the rows were enough to check it.
    """
    name, parts = name_of(loss), shard(batch, 2)
    wide = pad(batch, 2 * batch["input_ids"].shape[-1])
    longer = _draw_outputs(outputs, wide, seed, widths)
    drawn = {key: _cut_to_width(x, batch) for key, x in longer.items()}
    full_terms, full_gradients = _differentiate(loss, batch, weights, drawn)
    halves = [
        _differentiate(loss, half, weights, {key: x[rows] for key, x in drawn.items()})
        for half, rows in zip(parts, parts.rows, strict=True)
    ]
    padded, with_padding = _differentiate(loss, wide, weights, longer)
    for terms, gradients in [(full_terms, full_gradients), (padded, with_padding), *halves]:
        if not all(bool(x.isfinite().all()) for x in [*gradients.values(), *(term.total for term in terms.values())]):
            return False  # a later check has a better error for that
    if not full_gradients:
        raise no_gradient(f"train_step({name})")
    for key, term in full_terms.items():
        total, added = float(term.total), [float(terms[key].total) for terms, _ in halves]
        if abs(sum(added) - total) > 1e-3 * (sum(map(abs, added)) + abs(total)):  # rows may cancel
            raise WeightError(
                f"{name}: the total of term '{key}' is {total:g} on {len(batch)} rows, but {sum(added):g} added up "
                f"over their halves. A total must be a sum over rows: {_RATHER}"
            )
    for key, expected in full_gradients.items():
        for rows, (_, gradients) in zip(parts.rows, halves, strict=True):
            _compare(
                name, key, expected[rows], gradients[key], _CLOSE, f"among {len(batch)} rows", "among half of them"
            )
        _compare(
            name, key, expected, _cut_to_width(with_padding[key], batch), _ROUGHLY, "as it is", "with more padding"
        )
    return all(bool(term.weight != 0) for terms, _ in halves for term in terms.values())


def _cut_to_width(x: Tensor, batch: Batch) -> Tensor:
    """Cut an output or gradient of a batch with more padding to the width of this one."""
    return x.narrow(batch.ndim, 0, batch["input_ids"].shape[-1]) if x.ndim > batch.ndim else x


def _compare(
    name: str, output: str, expected: Tensor, actual: Tensor, allowed: float, where: str, elsewhere: str
) -> None:
    """Check that gradients are the same, relative to the largest of their row."""
    a, b = expected.reshape(len(expected), -1), actual.reshape(len(actual), -1)
    excess = (a - b).abs() - allowed * torch.maximum(a.abs(), b.abs()).amax(1, keepdim=True)
    if bool((excess > 1e-30).any()):  # rounding may change smaller numbers by any factor
        x, y = (float(gradients.flatten()[excess.argmax()]) for gradients in (a, b))
        raise WeightError(
            f"{name}: the gradient for {output} of a row is {x:g} {where}, but {y:g} {elsewhere}. What a loss makes of "
            f"a row must not depend on other rows or on padding: {_RATHER}"
        )


def _differentiate(
    loss: Loss, batch: Batch, weights: Mapping[str, float], outputs: Mapping[str, Tensor]
) -> tuple[dict[str, Mean], dict[str, Tensor]]:
    """Return the terms of a loss, and the gradient of its weighted sum for each output; no gradients if it has none."""
    leaves = {key: x.clone().requires_grad_() for key, x in outputs.items()}
    with torch.enable_grad():
        terms = call_loss(loss, batch, leaves)
        check_terms(name_of(loss), terms, weights)
        total = torch.stack([term.total / weights[key] for key, term in terms.items()]).sum()
    detached = {key: Mean(*(x.detach() for x in term)) for key, term in terms.items()}
    if not total.requires_grad:
        return detached, {}
    gradients = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    return detached, dict(zip(leaves, gradients, strict=True))
