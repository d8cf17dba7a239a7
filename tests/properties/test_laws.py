"""A loss cannot tell how its batch is laid out: laws 1, 2, 3 and 5, on outputs that are leaf tensors."""

from collections.abc import Sequence
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import pad

import nrl
from nrl.algos import Loss, output_shape, token_mean
from nrl.backends.training.loss.loss_terms import global_weights, terms_of
from nrl.batch import Batch, Parts
from nrl.batch.metrics import Mean, Metrics, finalize, merge
from tests.properties.strategies import (
    AGGREGATES,
    LOSSES,
    METHODS,
    PAIR_LOSSES,
    PAIR_METHODS,
    REWARD_LOSSES,
    ROW_COLUMNS,
    Layout,
    batches,
    hidden_rows,
    layouts,
    make_batch,
    outputs,
    policy_losses,
    taken,
)

ALL = [
    pytest.param(loss, pairs, id=name)
    for pairs, group in ((False, LOSSES | METHODS), (True, PAIR_LOSSES | PAIR_METHODS | REWARD_LOSSES))
    for name, loss in group.items()
]
RELATIVE, ABSOLUTE = 1e-9, 1e-12


class Result(NamedTuple):
    """What a loss made of a batch: its value, its gradient by output, its metrics, the weights of its terms."""

    value: Tensor
    gradient: dict[str, Tensor]
    metrics: dict[str, float]
    weights: dict[str, float]


def evaluate(loss: Loss, batch: Batch, out: dict[str, Tensor], layout: Layout) -> Result:
    """The loss over the parts of a layout, its totals divided by the weights of the whole batch."""
    weights = global_weights(loss, batch)
    leaves = {name: x.clone().requires_grad_() for name, x in out.items()}
    value = torch.zeros((), dtype=torch.float64)
    seen = dict.fromkeys(weights, 0.0)
    metrics: Metrics = {}
    for rows in layout.parts:
        part = nrl.pad(taken(batch, rows), batch["input_ids"].shape[-1] + layout.padding)
        wider = {name: layout.padding * (output_shape(name, batch) != batch.batch_size) for name in leaves}
        shown = {name: pad(x[rows], (0, wider[name])) for name, x in leaves.items()}
        if layout.masked:
            extra = nrl.pad(hidden_rows(batch, layout.masked), part["input_ids"].shape[-1])
            part = nrl.concatenate([part, extra])
            shown = {name: torch.cat([x, x.new_full((layout.masked, *x.shape[1:]), -7.0)]) for name, x in shown.items()}
        terms, found = terms_of("loss", loss(TensorDict(shown, batch_size=part.batch_size), part))
        for key, term in terms.items():
            value = value + term.total / (weights[key] or 1.0)
            seen[key] += float(term.weight)
        metrics = merge(metrics, found)
    gradient = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return Result(value.detach(), dict(zip(leaves, gradient, strict=True)), finalize(metrics), seen)


def whole(batch: Batch) -> Layout:
    return Layout([list(range(len(batch)))])


def assert_equal(found: Result, expected: Result) -> None:
    def close(a: Tensor, b: Tensor, what: str) -> None:
        torch.testing.assert_close(
            a, b, rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True, msg=lambda text: f"{what}: {text}"
        )

    assert found.weights == expected.weights
    assert torch.isfinite(found.value)
    close(found.value, expected.value, "value")
    for name, gradient in expected.gradient.items():
        assert torch.isfinite(gradient).all()
        close(found.gradient[name], gradient, f"gradient of {name}")
    assert found.metrics.keys() == expected.metrics.keys()
    for name, number in expected.metrics.items():
        close(torch.tensor(found.metrics[name]).double(), torch.tensor(number).double(), f"metric {name}")


@settings(max_examples=100)
@given(data=st.data(), loss=policy_losses)
def test_every_composition_is_the_same_in_every_layout(data: st.DataObject, loss: Loss) -> None:
    batch = data.draw(batches())
    layout = data.draw(layouts(len(batch)))
    out = outputs(batch)
    assert_equal(evaluate(loss, batch, out, layout), evaluate(loss, batch, out, whole(batch)))


@pytest.mark.parametrize(("loss", "pairs"), ALL)
@settings(max_examples=10)
@given(data=st.data())
def test_every_loss_is_the_same_in_every_layout(loss: Loss, pairs: bool, data: st.DataObject) -> None:
    batch = data.draw(batches(pairs=pairs))
    layout = data.draw(layouts(len(batch)))
    out = outputs(batch)
    assert_equal(evaluate(loss, batch, out, layout), evaluate(loss, batch, out, whole(batch)))


@pytest.mark.parametrize(("loss", "pairs"), ALL)
@settings(max_examples=2)
@given(data=st.data())
def test_every_loss_is_the_same_in_any_number_of_parts(loss: Loss, pairs: bool, data: st.DataObject) -> None:
    batch = data.draw(batches(pairs=pairs, rows=12))
    order = torch.tensor(data.draw(st.permutations(range(12))))
    out = outputs(batch)
    expected = evaluate(loss, batch, out, whole(batch))
    for n in (1, 2, 3, 5, 12):
        assert_equal(evaluate(loss, batch, out, Layout([rows.tolist() for rows in order.tensor_split(n)])), expected)


@pytest.mark.parametrize(("loss", "pairs"), ALL)
@settings(max_examples=6)
@given(data=st.data())
def test_every_loss_is_the_same_on_shards_and_their_microbatches(loss: Loss, pairs: bool, data: st.DataObject) -> None:
    batch = data.draw(batches(pairs=pairs))
    dp = data.draw(st.integers(1, 3))
    widest = max(1, int(nrl.lengths(batch).max())) * (2 if pairs else 1)
    max_tokens = data.draw(st.integers(widest, 6 * widest))
    rows = []
    for numbers in nrl.shard(batch, dp).rows:
        rows += [numbers[part] for part in rows_of(taken(batch, numbers.tolist()), max_tokens)]
    assert torch.equal(torch.cat(rows).sort().values, torch.arange(len(batch)))
    out = outputs(batch)
    split = evaluate(loss, batch, out, Layout([part.tolist() for part in rows]))
    assert_equal(split, evaluate(loss, batch, out, whole(batch)))


def rows_of(batch: Batch, max_tokens: int) -> Sequence[Tensor]:
    parts = nrl.microbatches(batch, max_tokens=max_tokens)
    assert isinstance(parts, Parts)
    return parts.rows


@pytest.mark.parametrize(("loss", "pairs"), ALL)
@settings(max_examples=5)
@given(data=st.data())
def test_no_loss_sees_what_is_masked(loss: Loss, pairs: bool, data: st.DataObject) -> None:
    batch = data.draw(batches(pairs=pairs))
    out = outputs(batch)
    expected = evaluate(loss, batch, out, whole(batch))
    mask = batch["loss_mask"]
    rubbish = data.draw(st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e30]))

    def spoil(x: Tensor) -> Tensor:
        return torch.where(mask if x.shape == mask.shape else mask.any(-1), x, rubbish)

    columns = ("advantages", "old_logprobs", "rollout_logprobs", "ref_logprobs", *ROW_COLUMNS)
    spoiled = nrl.assign(batch, **{name: spoil(batch[name]) for name in columns})
    found = evaluate(loss, spoiled, {name: spoil(x) for name, x in out.items()}, whole(batch))
    assert_equal(found, expected)


@pytest.mark.parametrize(("loss", "pairs"), ALL)
@settings(max_examples=5)
@given(data=st.data())
def test_no_loss_trains_on_invalid_rows(loss: Loss, pairs: bool, data: st.DataObject) -> None:
    batch = data.draw(batches(pairs=pairs))
    shape = batch["valid"].shape
    flags = data.draw(st.lists(st.booleans(), min_size=shape.numel(), max_size=shape.numel()))
    valid = torch.tensor(flags).view(shape)
    gradient = evaluate(loss, nrl.assign(batch, valid=valid), outputs(batch), whole(batch)).gradient
    for name, of_output in gradient.items():
        assert not of_output[~valid].any(), name


@pytest.mark.parametrize(("loss", "pairs"), ALL)
@settings(max_examples=5)
@given(data=st.data())
def test_weights_do_not_depend_on_the_outputs(loss: Loss, pairs: bool, data: st.DataObject) -> None:
    batch = data.draw(batches(pairs=pairs))
    real = evaluate(loss, batch, outputs(batch, seed=data.draw(st.integers(0, 99))), whole(batch)).weights
    assert real == global_weights(loss, batch)
    assert global_weights(loss, batch, fill=data.draw(st.floats(-50, 0))) == real


@pytest.mark.parametrize(("loss", "pairs"), ALL)
def test_no_loss_writes_into_its_arguments(loss: Loss, pairs: bool) -> None:
    batch = make_batch([5, 0, 7, 3], [False] * 4, [False, False, False, True], seed=1, pairs=pairs)
    out = outputs(batch)
    before = batch.clone(), {name: x.clone() for name, x in out.items()}
    evaluate(loss, batch, out, whole(batch))
    assert all(torch.equal(batch[name], before[0][name]) for name in before[0].keys())
    assert batch.keys() == before[0].keys()
    assert all(torch.equal(x, before[1][name]) for name, x in out.items())


@pytest.mark.parametrize(("loss", "pairs"), ALL)
def test_a_batch_without_a_trained_token_weighs_nothing(loss: Loss, pairs: bool) -> None:
    batch = make_batch([5, 0, 7, 3], [True] * 4, [False] * 4, seed=1, pairs=pairs)
    result = evaluate(loss, batch, outputs(batch), whole(batch))
    assert set(result.weights.values()) == {0.0}
    assert result.value == 0
    assert not any(gradient.any() for gradient in result.gradient.values())


@pytest.mark.parametrize(("loss", "pairs"), ALL)
def test_no_loss_or_gradient_is_infinite_on_finite_inputs(loss: Loss, pairs: bool) -> None:
    batch = make_batch([8, 8, 8, 8], [False] * 4, [False] * 4, seed=2, pairs=pairs)
    shape = batch["old_logprobs"].shape
    for old in (-1e4, -1e-30, -88.0, 0.0):
        for new in (-1e4, -1e-30, -88.0, 0.0):
            columns = {name: torch.full(shape, old) for name in ("old_logprobs", "rollout_logprobs", "ref_logprobs")}
            far = nrl.assign(batch, advantages=batch["advantages"].float(), **columns)
            out = {name: torch.full(x.shape, new) for name, x in outputs(far).items()}
            result = evaluate(loss, far, out, whole(far))
            assert torch.isfinite(result.value)
            assert all(torch.isfinite(gradient).all() for gradient in result.gradient.values())


@pytest.mark.parametrize("name", AGGREGATES)
@settings(max_examples=30)
@given(data=st.data())
def test_an_aggregate_adds_up_over_rows(name: str, data: st.DataObject) -> None:
    aggregate = AGGREGATES[name]
    batch = data.draw(batches())
    layout = data.draw(layouts(len(batch)))
    x = outputs(batch)["logprobs"].requires_grad_()
    mask = batch["loss_mask"]
    parts = [
        aggregate(pad(x[rows], (0, layout.padding)), pad(mask[rows], (0, layout.padding))) for rows in layout.parts
    ]
    once = aggregate(x, mask)
    total, weight = sum(part.total for part in parts), sum(part.weight for part in parts)
    torch.testing.assert_close(total, once.total, rtol=RELATIVE, atol=ABSOLUTE)
    assert weight == once.weight
    assert not once.weight.requires_grad
    per_row = torch.cat([aggregate(x[i : i + 1], mask[i : i + 1]).total[None] for i in range(len(batch))])
    torch.testing.assert_close(per_row.sum(), once.total, rtol=RELATIVE, atol=ABSOLUTE)


def test_the_law_catches_a_mean_of_means() -> None:
    """The check above has teeth: a loss that takes its mean too early does differ from layout to layout."""

    def mean_of_means(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        total, weight = token_mean(-out["logprobs"], batch["loss_mask"])
        return Mean(total / weight, torch.ones_like(weight)), {}

    batch = make_batch([5, 4, 7, 3], [False] * 4, [False] * 4, seed=1, pairs=False)
    out = outputs(batch)
    once = evaluate(mean_of_means, batch, out, whole(batch))
    split = evaluate(mean_of_means, batch, out, Layout([[0], [1, 2, 3]]))
    assert split.weights != once.weights
    with pytest.raises(AssertionError):
        assert_equal(split._replace(weights=once.weights), once)
