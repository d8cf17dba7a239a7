"""The terms of a loss, and the weight of each over a whole batch.

The weight of each term of a loss is a function of the batch alone, so the driver learns it by calling the loss on
outputs of zeros, before the first forward. The engine divides each micro-batch's total by it: sums all the way.
"""

import inspect
import math
import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from nrl.algos import Loss, name_of, needed, output_shape
from nrl.arguments import described, register_kind
from nrl.backends.training.layout.shape_tensors import ShapeTensor, needs_numbers
from nrl.batch import Batch, forbid_writes, microbatches
from nrl.batch.columns import COLUMNS
from nrl.batch.metrics import Ess, Max, Mean, Metrics, Min, Sum
from nrl.errors import LossResultError, MissingColumn, MissingOutput, NoGradient, WeightError

__all__ = ["LOGPROBS", "call_loss", "check_terms", "check_weights", "global_weights", "no_gradient", "terms_of"]

_RELATIVE = 1e-5
"""The fraction by which sums of weights in another order may differ."""

_PLACES = 2**16  # entries of a column that a loss is called on at once: they stay in a processor's cache
_NUMBERS = 2**24  # numbers of a large output that a loss is called on at once, if a row has no more: 64 MiB
_EXACT = 2**24  # below it float32 has every whole number, so that sums of them are the same in any order

_RESERVED = frozenset({"loss", "grad_norm", "lr", "tokens", "tokens/computed", "tokens/saved", "lag", "skipped"}) | {
    f"mismatch/{name}" for name in ("kl", "ess", "max_abs", "chi2", "max_ratio")
}


def terms_of(name: str, value: Any) -> tuple[dict[str, Mean], Metrics]:
    """Return the terms by name, and the metrics, of the return value of a loss.

    Args:
        name: of the loss in errors.
        value: that it returned: a `Mean`, which becomes the term ``loss``, or a dict of them; and metrics.

    Raises:
        LossResultError: it returned something else.
    """
    match value:
        case (Mean() as mean, dict() as metrics):
            return _checked_terms(name, {"loss": mean}), _checked_metrics(name, metrics)
        case (dict() as terms, dict() as metrics) if terms and all(isinstance(x, Mean) for x in terms.values()):
            return _checked_terms(name, terms), _checked_metrics(name, metrics)
    raise LossResultError(f"{name} returned {_describe_result(value)}. {_RESULT}")


_RETURN = 'return token_mean(x, batch["loss_mask"]), {}'
_RESULT = (
    "A loss returns (Mean, metrics) or (dict of Mean, metrics), since a mean over a part of a batch could not be added "
    f"up: where x is the loss of each token, [B, T] without any mean or sum, end with `{_RETURN}`"
)


def no_gradient(caller: str) -> NoGradient:
    """Return the error of a loss that depends on no output."""
    return NoGradient(
        f"{caller}: the loss has no gradient: no term of it depends on an output of the model, so nothing was changed. "
        "Compute it from out['logprobs'] or another output, without detach(), item(), numpy or torch.no_grad() on the "
        "way; only metrics may be detached"
    )


def _describe_result(value: Any) -> str:
    """Describe the return value of a loss and its fault."""
    match value:
        case Mean():
            return "a Mean without metrics: add `, {}`"
        case (first, dict()):
            nothing = "a dict that is empty, or that has something else than a Mean"
            return nothing if isinstance(first, dict) else f"{_describe_result(first)} (with metrics)"
        case (_, other):
            return f"metrics that are {described(other)}, and no dict"
        case Tensor() if value.ndim == 0:
            return "a scalar, which is summed or averaged already"
        case Tensor():
            return f"a tensor of shape {list(value.shape)}"
        case None:
            return "None: its last line has no `return`"
        case _ if callable(value):
            return f"a function, {name_of(value)}, so it makes a loss and is none: call it with its options first"
    return described(value)


def _is_loss(value: Any) -> bool:
    """Return whether a value can be called with outputs and a batch; a model or loss of torch takes tensors instead."""
    if not callable(value) or _takes_tensors(value):
        return False
    try:
        inspect.signature(value).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # a function that has no signature
        pass
    return True


def _takes_tensors(value: Any) -> bool:
    return isinstance(value, torch.nn.Module) and type(value).__module__.startswith(("torch.nn.", "transformers."))


def _instead_of_loss(value: Any) -> str:
    example = "def loss(out, batch), which reads out['logprobs'] and ends with `" + _RETURN + "`"
    if not callable(value) or _takes_tensors(value):
        return f"give a function, such as nrl.algos.sft_loss, or write {example}"
    name, parameters = name_of(value), ", ".join(inspect.signature(value).parameters)
    if str(getattr(value, "__module__", "")).startswith("nrl."):
        return f"it makes a loss of {parameters}: call it, {name}(...), and give what it returns"
    return f"a loss takes two arguments, and this one takes ({parameters}): write {example}"


register_kind(Loss, _instead_of_loss, _is_loss)


def _checked_terms(name: str, terms: dict[str, Mean]) -> dict[str, Mean]:
    for key, term in terms.items():
        for part, value in zip(term._fields, term, strict=True):
            if not isinstance(value, Tensor) or value.ndim != 0:
                kind = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise LossResultError(
                    f"{name}: the {part} of term '{key}' is {kind}; it must be a scalar tensor, a sum over rows"
                )
    return terms


def _checked_metrics(name: str, metrics: dict[str, Any]) -> Metrics:
    for key, value in metrics.items():
        if key in _RESERVED:
            raise LossResultError(
                f"{name} returned a metric '{key}', a name that the step itself reports; give it another"
            )
        if not isinstance(value, Mean | Sum | Max | Min | Ess) or not all(isinstance(x, Tensor) for x in value):
            raise LossResultError(
                f"{name} returned the metric '{key}' as a {type(value).__name__}; return a Mean, Sum, Max, Min or Ess, "
                f"such as token_mean({key}, batch['loss_mask'])"
            )
    return metrics


LOGPROBS = frozenset({"logprobs"})
"""The outputs that every loss gets from a language model."""


def global_weights(
    loss: Loss,
    batch: Batch,
    fill: float = 0.0,
    *,
    always: Collection[str] = LOGPROBS,
    widths: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, float]:
    """Compute the weight of each term of ``loss`` over a whole batch, from calls on outputs that are all ``fill``.

    Weights add up over rows, so the loss is called on parts of the batch, with rows of like length. Where weights are
    not whole numbers, their sum could depend on the order, and the loss is called once, on the whole batch. A loss that
    reads logits or hidden states gets outputs without numbers (`ShapeTensor`); if it cannot compute its weight with
    these, it gets numbers for a few rows at a time.

    Args:
        loss: any.
        batch: the whole one.
        fill: the value of all outputs.
        always: outputs of every loss, in addition to its needs.
        widths: as `nrl.algos.output_shape` takes them.

    Raises:
        MissingColumn: the loss reads a column that the batch does not have.
        MissingOutput: the loss reads an output outside its needs.

    >>> from nrl.algos import sft_loss
    >>> mask = torch.tensor([[False, True, True]])
    >>> batch = Batch({"input_ids": mask.long(), "loss_mask": mask}, batch_size=[1])
    >>> global_weights(sft_loss, batch)
    {'loss': 2.0}
    """
    needs = {*always, *needed(loss)}
    large = [widths[output] for output in needs if output in widths]
    if large:
        try:
            return _weights(loss, batch, {key: ShapeTensor(output_shape(key, batch, widths)) for key in needs})
        except Exception as error:
            if not needs_numbers(error):  # a loss that looks at the numbers of its outputs gets some below
                raise
    limit = _NUMBERS // max(large) if large else _PLACES
    if batch["input_ids"].numel() > limit:
        widest = batch["input_ids"][0].numel()
        parts = microbatches(batch, max_tokens=max(widest, limit))
        weights_of_parts = [_weights(loss, part, _fill_outputs(part, fill, needs, widths)) for part in parts]
        sums = {key: sum(weights.get(key, math.nan) for weights in weights_of_parts) for key in weights_of_parts[0]}
        exact = all(
            x.is_integer() and abs(x) < _EXACT for weights in (*weights_of_parts, sums) for x in weights.values()
        )
        if large or exact:
            return sums
    return _weights(loss, batch, _fill_outputs(batch, fill, needs, widths))


def _fill_outputs(batch: Batch, fill: float, needs: Collection[str], widths: Mapping[str, int]) -> dict[str, Tensor]:
    device = batch["input_ids"].device
    return {key: torch.full(output_shape(key, batch, widths), fill, device=device) for key in needs}


def _weights(loss: Loss, batch: Batch, outputs: Mapping[str, Tensor]) -> dict[str, float]:
    with torch.no_grad():
        return {key: float(term.weight) for key, term in call_loss(loss, batch, outputs).items()}


def call_loss(loss: Loss, batch: Batch, outputs: Mapping[str, Tensor]) -> dict[str, Mean]:
    """Call a loss on outputs that the driver made up, and return its terms.

    Args:
        loss: any.
        batch: the rows of the outputs.
        outputs: all that the loss gets, in the shapes of `nrl.algos.output_shape`.

    Raises:
        MissingColumn: the loss reads a column that the batch does not have.
        MissingOutput: the loss reads an output outside its needs.
    """
    name, out = name_of(loss), TensorDict(dict(outputs), batch_size=batch.batch_size)
    try:
        with forbid_writes(batch, name):
            terms, _ = terms_of(name, loss(out, batch))
    except MissingColumn:
        raise
    except TypeError as error:
        if "on types that implement __torch_function__" in str(error) and "TensorDict" in str(error):
            raise LossResultError(
                f"{name}: a function of torch got all outputs, or the whole batch, in place of a tensor. A loss is "
                "def loss(out, batch), which reads out['logprobs'], [B, T], and columns such as batch['loss_mask'], "
                f"and ends with `{_RETURN}`"
            ) from error
        if str(error) != "'TensorDict' object is not callable":
            raise
        raise LossResultError(
            f"{name} calls its first argument, and that is no model: the trainer has computed the outputs already. "
            "Read out['logprobs'], [B, T], the log-probability of each token"
        ) from error
    except AttributeError as error:
        key = str(error.name)
        if not isinstance(error.obj, TensorDict) or key not in {*out.keys(), *batch.keys()}:
            raise
        owner = "out" if key in out.keys() else "batch"
        raise MissingOutput(f"{name}: write {owner}['{key}'] for {owner}.{key}") from error
    except KeyError as error:
        missing = re.match(r".*key \"(.+)\" not found in TensorDict with keys \[(.*)\]", str(*error.args[:1]))
        if missing is None:
            raise
        if missing[2] == ", ".join(f"'{key}'" for key in sorted(out.keys())):
            raise MissingOutput(
                f"{name} reads the output '{missing[1]}' and did not ask for it; decorate it with "
                f"@nrl.algos.needs('{missing[1]}')"
                if missing[1] not in LOGPROBS
                else f"{name} reads logprobs, which only a model with head='lm' computes"
            ) from error
        column = COLUMNS.get(missing[1])
        hint = column.hint if column else f"Add it with assign(batch, {missing[1]}=...)."
        if missing[1] in out.keys():
            hint = f"'{missing[1]}' is an output of the model: a loss is called with (out, batch), in this order."
        raise MissingColumn(name, missing[1], sorted(map(str, batch.keys())), hint) from error
    return terms


def check_terms(name: str, seen: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Compare the names of the terms of a call with the driver's.

    Raises:
        WeightError: they differ.
    """
    if seen.keys() != expected.keys():
        raise WeightError(
            f"{name}: its terms are {', '.join(sorted(seen)) or 'none'} on some outputs and "
            f"{', '.join(sorted(expected))} on others; a loss returns the same terms for every output and part"
        )


def check_weights(name: str, seen: Mapping[str, float], expected: Mapping[str, float]) -> None:
    """Compare the weights of the real calls, added up, with the driver's.

    Raises:
        WeightError: the weights differ: the loss's weight depends on more than the rows of the batch.
    """
    for key, weight in expected.items():
        total = seen.get(key, 0.0)
        if not abs(total - weight) <= _RELATIVE * max(abs(total), abs(weight)):
            raise WeightError(
                f"{name}: the weight of term '{key}' is {weight:g} on the whole batch, but {total:g} added up over its "
                "parts or on other outputs. A weight must be a sum over rows of the batch alone: aggregate with "
                "token_mean, seq_mean or seq_sum (a mean of means is not, nor a count that the output selects)"
            )
