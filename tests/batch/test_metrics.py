import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nrl.arguments import with_article
from nrl.batch.metrics import Ess, Max, Mean, Metrics, Min, Sum, finalize, merge

quick = settings(max_examples=60)

KINDS: dict[str, Callable[[float, float], Mean | Sum | Max | Min | Ess]] = {
    "mean": lambda x, w: Mean(torch.tensor(x), torch.tensor(w)),
    "sum": lambda x, _: Sum(torch.tensor(x)),
    "max": lambda x, _: Max(torch.tensor(x)),
    "min": lambda x, _: Min(torch.tensor(x)),
    "ess": lambda x, w: Ess(torch.tensor(abs(x)), torch.tensor(x * x), torch.tensor(w)),
}
numbers = st.floats(-1e3, 1e3, width=32)
weights = st.integers(0, 100).map(float)


@st.composite
def metrics(draw: st.DrawFn) -> Metrics:
    keys = draw(st.sets(st.sampled_from(sorted(KINDS))))
    return {key: KINDS[key](draw(numbers), draw(weights)) for key in keys}


def close(a: Metrics, b: Metrics) -> bool:
    assert a.keys() == b.keys()
    return all(
        type(a[key]) is type(b[key])
        and all(float(x) == pytest.approx(float(y), rel=1e-5, abs=1e-2) for x, y in zip(a[key], b[key], strict=True))
        for key in a
    )


@quick
@given(metrics(), metrics(), metrics())
def test_merge_is_associative(a: Metrics, b: Metrics, c: Metrics) -> None:
    assert close(merge(merge(a, b), c), merge(a, merge(b, c)))


@quick
@given(metrics(), metrics())
def test_merge_is_commutative(a: Metrics, b: Metrics) -> None:
    assert close(merge(a, b), merge(b, a))


@quick
@given(metrics())
def test_the_empty_metrics_are_the_identity(a: Metrics) -> None:
    assert merge(a, {}) == a == merge({}, a)


@quick
@given(metrics(), metrics())
def test_merge_changes_neither_argument(a: Metrics, b: Metrics) -> None:
    before = [(dict(x), {key: [float(number) for number in x[key]] for key in x}) for x in (a, b)]
    merge(a, b)
    assert before == [(x, {key: [float(number) for number in x[key]] for key in x}) for x in (a, b)]


@quick
@given(st.lists(st.tuples(numbers, weights), min_size=1, max_size=8))
def test_a_merged_mean_is_the_mean_over_all(parts: list[tuple[float, float]]) -> None:
    merged: Metrics = {}
    for value, weight in parts:
        merged = merge(merged, {"x": Mean(torch.tensor(value * weight, dtype=torch.float64), torch.tensor(weight))})
    total = sum(weight for _, weight in parts)
    if total == 0:
        assert math.isnan(finalize(merged)["x"])
    else:
        assert finalize(merged)["x"] == pytest.approx(sum(v * w for v, w in parts) / total, rel=1e-6, abs=1e-6)


def test_merge_by_hand() -> None:
    a: Metrics = {
        "loss": Mean(torch.tensor(6.0), torch.tensor(2.0)),
        "tokens": Sum(torch.tensor(3)),
        "high": Max(torch.tensor(1.0)),
        "low": Min(torch.tensor(1.0)),
        "only a": Sum(torch.tensor(1.0)),
    }
    b: Metrics = {
        "loss": Mean(torch.tensor(1.0), torch.tensor(5.0)),
        "tokens": Sum(torch.tensor(4)),
        "high": Max(torch.tensor(-2.0)),
        "low": Min(torch.tensor(-2.0)),
        "only b": Sum(torch.tensor(2.0)),
    }
    assert finalize(merge(a, b)) == {
        "loss": 1.0,
        "tokens": 7.0,
        "high": 1.0,
        "low": -2.0,
        "only a": 1.0,
        "only b": 2.0,
    }


def test_of_nothing_the_largest_is_minus_infinity_and_the_smallest_infinity() -> None:
    nothing: Metrics = {"high": Max(torch.tensor(-math.inf)), "low": Min(torch.tensor(math.inf))}
    something: Metrics = {"high": Max(torch.tensor(-5.0)), "low": Min(torch.tensor(5.0))}
    assert finalize(nothing) == {"high": -math.inf, "low": math.inf}
    assert finalize(merge(nothing, something)) == {"high": -5.0, "low": 5.0}


@pytest.mark.parametrize("a", sorted(KINDS))
@pytest.mark.parametrize("b", sorted(KINDS))
def test_one_name_has_one_kind(a: str, b: str) -> None:
    left, right = {"kl": KINDS[a](1.0, 1.0)}, {"kl": KINDS[b](1.0, 1.0)}
    if a == b:
        assert merge(left, right).keys() == {"kl"}
    else:
        kinds = with_article(a.capitalize()), with_article(b.capitalize())
        expected = "merge: metric 'kl' is {} on one side and {} on the other; ".format(*kinds)
        with pytest.raises(TypeError, match=expected + "give the two numbers different names"):
            merge(left, right)


def test_a_mean_of_weight_0_measured_nothing() -> None:
    nothing: Metrics = {"loss": Mean(torch.tensor(0.0), torch.tensor(0.0))}
    assert math.isnan(finalize(nothing)["loss"])
    assert finalize(merge(nothing, {"loss": Mean(torch.tensor(3.0), torch.tensor(2.0))})) == {"loss": 1.5}


def ess(weights: list[float]) -> Ess:
    w = torch.tensor(weights, dtype=torch.float64)
    return Ess(w.sum(), w.square().sum(), torch.tensor(len(weights)))


@pytest.mark.parametrize(
    ("weights", "expected"),
    [([1.0], 1.0), ([5.0] * 7, 1.0), ([1.0, 3.0], 16 / 20), ([0.0, 0.0, 0.0, 8.0], 0.25), ([1e-200, 1e-200], math.nan)],
)
def test_the_effective_sample_size_by_hand(weights: list[float], expected: float) -> None:
    assert finalize({"w": ess(weights)})["w"] == pytest.approx(expected, nan_ok=True)


@quick
@given(st.lists(st.lists(st.floats(0.1, 10), max_size=4), min_size=1, max_size=5), st.floats(0.1, 10))
def test_the_effective_sample_size_of_parts_is_that_of_all(parts: list[list[float]], scale: float) -> None:
    merged: Metrics = {}
    for part in parts:
        merged = merge(merged, {"w": ess(part)})
    every = [weight for part in parts for weight in part]
    found = finalize(merged)["w"]
    assert found == pytest.approx(finalize({"w": ess([scale * weight for weight in every])})["w"], nan_ok=True)
    if every:
        assert found == pytest.approx(sum(every) ** 2 / (len(every) * sum(weight**2 for weight in every)))
        assert 1 / len(every) <= found * (1 + 1e-12)
        assert found <= 1


def test_the_effective_sample_size_hides_no_number_that_is_none() -> None:
    for bad in (math.nan, math.inf):
        assert math.isnan(finalize({"w": ess([1.0, bad])})["w"])


def test_finalize_returns_plain_floats() -> None:
    read = finalize({"n": Sum(torch.tensor(2)), "m": Mean(torch.tensor(3), torch.tensor(2))})
    assert read == {"n": 2.0, "m": 1.5}
    assert all(type(value) is float for value in read.values())


def test_finalize_reads_numbers_that_have_a_gradient() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    assert finalize({"m": Mean(x, x - 1), "s": Sum(x), "high": Max(x)}) == {"m": 1.5, "s": 3.0, "high": 3.0}


def test_finalize_of_nothing() -> None:
    assert finalize({}) == {}


def test_finalize_refuses_what_is_not_reduced() -> None:
    with pytest.raises(TypeError, match="finalize: metric 'kl' is a Tensor; return a Mean, Sum, Max, Min or Ess"):
        finalize({"kl": torch.tensor(1.0)})  # type: ignore[dict-item]


def test_merge_refuses_what_is_not_reduced() -> None:
    with pytest.raises(TypeError, match="merge: metric 'kl' is a float on one side and a Mean on the other"):
        merge({"kl": 1.0}, {"kl": Mean(torch.tensor(1.0), torch.tensor(1.0))})  # type: ignore[dict-item]


def test_a_mean_keeps_its_gradient() -> None:
    x = torch.tensor(2.0, requires_grad=True)
    merged = merge({"loss": Mean(3 * x, torch.tensor(1.0))}, {"loss": Mean(4 * x, torch.tensor(1.0))})["loss"]
    assert isinstance(merged, Mean)
    merged.total.backward()
    assert x.grad == 7
