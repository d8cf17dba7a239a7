"""Rewards reshaped, rows and tokens taken out: by hand, by slow loops, at the edges."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import nrl
from nrl.algos import (
    Shaping,
    advantages,
    clip_rewards,
    from_rewards,
    group_center,
    keep_at_least,
    keep_best,
    length_penalty,
    mask_greedy,
    mask_truncated,
    overlong_penalty,
    scale_rewards,
    sft_loss,
    stop_properly,
    top_entropy,
)
from nrl.batch import Batch, assign
from nrl.errors import BatchError, MissingColumn, NotFinite
from tests.properties.strategies import batches, taken


def make_batch(rewards: list[float], lengths: list[int] | None = None, **more: Tensor) -> Batch:
    """One group; each row has one token of a prompt and then some that are trained on."""
    n = len(rewards)
    sizes = torch.tensor([2] * n if lengths is None else lengths, dtype=torch.int64).view(-1, 1)
    mask = (torch.arange(8) >= 1) & (torch.arange(8) <= sizes)
    columns = {"rewards": torch.tensor(rewards, dtype=torch.float64), "loss_mask": mask}
    columns["group_ids"] = torch.zeros(n, dtype=torch.int64)
    return assign(Batch({}, batch_size=[n]), **{**columns, **more})


def rewards_of(batch: Batch) -> list[float]:
    found: list[float] = batch["rewards"].tolist()
    return found


def test_scaling_by_hand() -> None:
    batch = make_batch([0.0, 1.0, -2.0])
    assert rewards_of(scale_rewards(2.0)(batch)) == [0, 2, -4]
    assert rewards_of(scale_rewards(2.0, offset=-1.0)(batch)) == [-1, 1, -5]
    assert rewards_of(batch) == [0, 1, -2]


def test_clipping_by_hand() -> None:
    batch = make_batch([-9.0, 0.5, 9.0, math.inf, math.nan])
    assert rewards_of(clip_rewards(-1.0, 2.0)(batch))[:4] == [-1, 0.5, 2, 2]
    assert rewards_of(clip_rewards(-math.inf, 2.0)(batch))[:3] == [-9, 0.5, 2]
    assert math.isnan(rewards_of(clip_rewards(-1.0, 2.0)(batch))[4])


def test_rewards_may_be_bounded_to_one_number() -> None:
    assert rewards_of(clip_rewards(1.0, 1.0)(make_batch([-9.0, 9.0]))) == [1, 1]


@pytest.mark.parametrize("shape", [overlong_penalty(limit=7, buffer=4), length_penalty(1.0)])
def test_rewards_keep_their_dtype(shape: Shaping) -> None:
    batch = assign(make_batch([1.0, 0.0], [2, 6]), rewards=torch.tensor([1.0, 0.0]))
    assert shape(batch)["rewards"].dtype == torch.float32


@pytest.mark.parametrize(("length", "expected"), [(0, 0.0), (3, 0.0), (4, -0.25), (5, -0.5), (6, -0.75), (7, -1.0)])
def test_the_overlong_penalty_by_hand(length: int, expected: float) -> None:
    assert rewards_of(overlong_penalty(limit=7, buffer=4)(make_batch([1.0], [length]))) == [1 + expected]


def slow_overlong(length: int, limit: int, buffer: int) -> float:
    if length <= limit - buffer:
        return 0.0
    if length <= limit:
        return ((limit - buffer) - length) / buffer
    return -1.0


@pytest.mark.parametrize(("limit", "buffer"), [(1, 1), (4, 4), (5, 2), (20, 3)])
def test_the_overlong_penalty_by_a_slow_loop(limit: int, buffer: int) -> None:
    found = rewards_of(overlong_penalty(limit, buffer)(make_batch([0.0] * 8, list(range(8)))))
    assert found == pytest.approx([slow_overlong(length, limit, buffer) for length in range(8)])


def test_the_overlong_penalty_is_capped() -> None:
    assert rewards_of(overlong_penalty(limit=3, buffer=1)(make_batch([0.0], [7]))) == [-1]


def test_the_length_of_an_episode_is_that_of_its_valid_rows() -> None:
    columns = {"episode_ids": torch.tensor([5, 5, 5, 1]), "valid": torch.tensor([True, True, False, True])}
    batch = make_batch([1.0, 1.0, 1.0, 1.0], [2, 3, 7, 2], **columns)
    assert rewards_of(overlong_penalty(limit=6, buffer=4)(batch)) == [0.25, 0.25, 1, 1]


def test_stop_properly_by_hand() -> None:
    batch = make_batch([1.0, 1.0, -1.0], truncated=torch.tensor([True, False, True]))
    assert rewards_of(stop_properly(0.5)(batch)) == [0.5, 1, -0.5]
    assert rewards_of(stop_properly(0.0)(batch)) == [0, 1, 0]
    assert rewards_of(stop_properly(1.0)(batch)) == [1, 1, -1]
    several = assign(batch, rewards=torch.ones(3, 2))
    assert rewards_of(stop_properly(0.5)(several)) == [[0.5, 0.5], [1, 1], [0.5, 0.5]]


def test_an_episode_is_truncated_if_one_of_its_valid_rows_is() -> None:
    columns = {
        "episode_ids": torch.tensor([5, 5, 1, 1]),
        "truncated": torch.tensor([True, False, False, True]),
        "valid": torch.tensor([True, True, True, False]),
    }
    batch = make_batch([1.0] * 4, None, **columns)
    assert rewards_of(stop_properly(0.5)(batch)) == [0.5, 0.5, 1, 1]
    assert mask_truncated(batch)["loss_mask"].any(-1).tolist() == [False, False, True, False]


def test_the_length_penalty_by_hand() -> None:
    found = rewards_of(length_penalty(2.0)(make_batch([1.0, 1.0, 0.0, 0.0], [1, 5, 2, 4])))
    assert found == [1 + 2 * 0.5, 1 - 2 * 0.5, 0, -2 * 0.25]


def test_the_length_penalty_knows_what_is_right() -> None:
    batch = make_batch([0.4, 0.6], [1, 2])
    assert rewards_of(length_penalty(1.0)(batch)) == pytest.approx([0.9, 0.1])
    assert rewards_of(length_penalty(1.0, threshold=0.5)(batch)) == pytest.approx([0.4, 0.1])
    assert rewards_of(length_penalty(0.0)(batch)) == pytest.approx([0.4, 0.6])


def test_the_length_penalty_by_a_slow_loop() -> None:
    torch.manual_seed(0)
    lengths, groups = torch.randint(0, 8, (30,)).tolist(), torch.randint(0, 8, (30,)).tolist()
    rewards = torch.randint(0, 2, (30,)).double().tolist()
    found = rewards_of(length_penalty(0.3)(make_batch(rewards, lengths, group_ids=torch.tensor(groups))))
    for i in range(30):
        mates = [lengths[j] for j in range(30) if groups[j] == groups[i]]
        spread = max(mates) - min(mates)
        shorter = 0.5 - (lengths[i] - min(mates)) / spread if spread else 0.0
        assert found[i] == pytest.approx(rewards[i] + 0.3 * (shorter if rewards[i] > 0 else min(0, shorter)))


def test_equal_lengths_and_groups_of_one_have_no_length_penalty() -> None:
    assert rewards_of(length_penalty(1.0)(make_batch([1.0, 0.1], [3, 3]))) == [1.0, 0.1]
    assert rewards_of(length_penalty(1.0)(make_batch([1.0], [3]))) == [1.0]


def test_truncated_rows_leave_the_loss_and_stay_in_their_group() -> None:
    batch = make_batch([1.0, 0.0, 0.5], truncated=torch.tensor([False, True, False]))
    found = mask_truncated(advantages(batch, from_rewards(group_center)))
    assert found["advantages"][:, 1].tolist() == [0.5, -0.5, 0]
    assert found["loss_mask"].sum(-1).tolist() == [2, 0, 2]
    without = advantages(assign(batch, valid=~batch["truncated"]), from_rewards(group_center))
    assert without["advantages"][:, 1].tolist() == [0.25, 0, -0.25]


def test_greedy_rows_leave_the_loss() -> None:
    batch = make_batch([1.0, 0.0], temperature=torch.tensor([0.0, 0.5]))
    assert mask_greedy(batch)["loss_mask"].sum(-1).tolist() == [0, 2]


ENTROPY = torch.tensor([[9.0, 0.1, 2.0, 0.3, 1.0, 1.0, 9.0, 9.0], [9.0, 1.0, 3.0, 9.0, 9.0, 9.0, 9.0, 9.0]])


@pytest.mark.parametrize(
    ("fraction", "first", "second"),
    [
        (1.0, [1, 2, 3, 4, 5], [1, 2]),
        (0.9, [2, 3, 4, 5], [1, 2]),  # 6.3 of 7 tokens are 6
        (0.4, [2, 4, 5], [1, 2]),  # 2.8 are 3, and the third has two equals
        (0.2, [], [2]),
        (0.01, [], [2]),
    ],
)
def test_top_entropy_by_hand(fraction: float, first: list[int], second: list[int]) -> None:
    found = top_entropy(fraction)(make_batch([0.0, 0.0], [5, 2], entropy=ENTROPY))["loss_mask"]
    assert [row.nonzero().squeeze(-1).tolist() for row in found] == [first, second]


def test_top_entropy_by_a_slow_loop() -> None:
    torch.manual_seed(1)
    lengths = torch.randint(0, 8, (12,)).tolist()
    batch = make_batch([0.0] * 12, lengths, entropy=torch.rand(12, 8))
    found = top_entropy(0.2)(batch)["loss_mask"]
    tokens = sorted(batch["entropy"][batch["loss_mask"]].tolist(), reverse=True)
    least = tokens[round(0.2 * len(tokens)) - 1]
    for i in range(12):
        expected = [1 <= t <= lengths[i] and float(batch["entropy"][i, t]) >= least for t in range(8)]
        assert found[i].tolist() == expected
    assert int(found.sum()) == round(0.2 * len(tokens))


def test_top_entropy_sees_no_masked_token_and_no_invalid_row() -> None:
    mask = make_batch([0.0, 0.0], [5, 2])["loss_mask"]
    dirty = make_batch([0.0, 0.0], [5, 2], entropy=torch.where(mask, ENTROPY, math.nan))
    clean = make_batch([0.0, 0.0], [5, 2], entropy=ENTROPY)
    assert top_entropy(0.4)(dirty)["loss_mask"].equal(top_entropy(0.4)(clean)["loss_mask"])
    valid = torch.tensor([True, False])
    alone = top_entropy(0.4)(Batch({**clean, "valid": valid}, batch_size=[2]))["loss_mask"]
    assert alone[0].nonzero().squeeze(-1).tolist() == [2, 4, 5]
    assert not alone[1].any()


def test_top_entropy_refuses_nan() -> None:
    with pytest.raises(NotFinite, match=r"top_entropy: entropy is NaN or infinite in 1 valid rows \(1\)"):
        top_entropy(0.5)(make_batch([0.0, 0.0], [0, 2], entropy=torch.full((2, 8), math.nan)))


def test_keep_at_least_by_hand() -> None:
    batch = make_batch([0.0, 1.0, 0.5, math.nan], valid=torch.tensor([True, True, True, False]))
    found = keep_at_least(0.5)(batch)
    assert found["valid"].tolist() == [False, True, True, False]
    assert found["loss_mask"].any(-1).tolist() == [False, True, True, False]
    assert keep_at_least(0.6)(batch)["valid"].tolist() == [False, True, False, False]


def test_what_is_kept_is_what_supervised_fine_tuning_sees() -> None:
    batch = keep_at_least(1.0)(make_batch([0.0, 1.0], [3, 2]))
    out = Batch({"logprobs": torch.full((2, 8), -1.5)}, batch_size=[2])
    loss, _ = sft_loss(out, batch)
    assert [part.item() for part in loss] == [3, 2]


def test_keep_best_by_hand() -> None:
    columns = {
        "group_ids": torch.tensor([3, 3, 1, 1, 3, 5, 6]),
        "valid": torch.tensor([True, True, True, True, False, True, False]),
    }
    found = keep_best(make_batch([0.5, 1.0, 0.2, 0.2, 9.0, -4.0, math.nan], None, **columns))
    assert found["valid"].tolist() == [False, True, True, True, False, True, False]
    assert found["loss_mask"].any(-1).tolist() == found["valid"].tolist()


def test_an_invalid_row_stays_so_however_good() -> None:
    batch = make_batch([1.0, 1.0, 0.0], None, valid=torch.tensor([False, True, True]))
    assert keep_best(batch)["valid"].tolist() == [False, True, False]
    assert keep_at_least(0.0)(batch)["valid"].tolist() == [False, True, True]


@pytest.mark.parametrize("shape", [keep_at_least(0.5), keep_best], ids=["keep_at_least", "keep_best"])
def test_what_cannot_be_compared_is_refused(shape: Shaping) -> None:
    with pytest.raises(NotFinite, match=r"keep_.*: rewards is NaN or infinite in 1 valid rows \(0\)"):
        shape(make_batch([math.nan, 1.0]))
    with pytest.raises(BatchError, match=r"keep_.*: rewards has shape \[2, 3\]; combine"):
        shape(assign(make_batch([0.0, 1.0]), rewards=torch.ones(2, 3)))


SHAPING: dict[str, tuple[Shaping, list[str]]] = {
    "scale_rewards": (scale_rewards(2.0, 1.0), ["rewards"]),
    "clip_rewards": (clip_rewards(0.2, 0.9), ["rewards"]),
    "overlong_penalty": (overlong_penalty(6, 3), ["rewards", "loss_mask"]),
    "stop_properly": (stop_properly(0.5), ["rewards", "truncated"]),
    "length_penalty": (length_penalty(0.5), ["rewards", "group_ids", "loss_mask"]),
    "mask_truncated": (mask_truncated, ["truncated", "loss_mask"]),
    "mask_greedy": (mask_greedy, ["temperature", "loss_mask"]),
    "top_entropy": (top_entropy(0.3), ["entropy", "loss_mask"]),
    "keep_at_least": (keep_at_least(0.5), ["rewards"]),
    "keep_best": (keep_best, ["rewards", "group_ids"]),
}


@pytest.mark.parametrize("name", SHAPING)
def test_a_missing_column_is_named(name: str) -> None:
    shape, columns = SHAPING[name]
    full = make_batch([1.0], truncated=torch.tensor([True]), temperature=torch.ones(1), entropy=torch.ones(1, 8))
    for column in columns:
        with pytest.raises(MissingColumn, match=f"{name} reads the column '{column}'"):
            shape(full.exclude(column))


@pytest.mark.parametrize("name", SHAPING)
def test_no_rows_no_valid_rows_and_rows_without_tokens(name: str) -> None:
    shape, _ = SHAPING[name]

    def full(rewards: list[float], **more: Tensor) -> Batch:
        n = len(rewards)
        columns = {"truncated": torch.ones(n, dtype=torch.bool), "temperature": torch.ones(n)}
        return make_batch(rewards, None, **{**columns, "entropy": torch.ones(n, 8), **more})

    assert len(shape(full([]))) == 0
    none = shape(full([math.nan, 1.0], valid=torch.zeros(2, dtype=torch.bool)))
    assert not none["loss_mask"].any()
    assert not none["valid"].any()
    untrained = shape(full([1.0, 0.0], loss_mask=torch.zeros(2, 8, dtype=torch.bool)))
    assert untrained["rewards"].isfinite().all()
    assert not untrained["loss_mask"].any()


@pytest.mark.parametrize(
    "name", ["scale_rewards", "clip_rewards", "overlong_penalty", "stop_properly", "length_penalty"]
)
def test_a_reward_that_is_nan_stays_so_and_changes_no_other(name: str) -> None:
    shape, _ = SHAPING[name]
    more = {"truncated": torch.tensor([True, True, False])}
    found = rewards_of(shape(make_batch([1.0, math.nan, 0.5], [5, 6, 1], **more)))
    assert math.isnan(found[1])
    known = rewards_of(shape(make_batch([1.0, 0.7, 0.5], [5, 6, 1], **more)))
    assert [found[0], found[2]] == [known[0], known[2]]


@st.composite
def rollouts(draw: st.DrawFn) -> Batch:
    batch = draw(batches())
    rows = len(batch)
    numbers = st.lists(st.integers(0, 2), min_size=rows, max_size=rows)
    return nrl.assign(
        batch,
        group_ids=torch.tensor(draw(numbers)),
        rewards=torch.tensor(draw(numbers), dtype=torch.float64) / 2,
        truncated=torch.tensor(draw(numbers)) == 0,
        entropy=(batch["advantages"].abs() * 4).round(),
    )


@pytest.mark.parametrize("name", SHAPING)
@settings(max_examples=25)
@given(data=st.data())
def test_order_and_padding_do_not_matter_and_the_batch_stays(name: str, data: st.DataObject) -> None:
    shape, _ = SHAPING[name]
    batch = data.draw(rollouts())
    before = {key: value.clone() for key, value in batch.items()}
    expected = shape(batch)
    assert all(batch[key].equal(value) for key, value in before.items())
    order = data.draw(st.permutations(range(len(batch))))
    moved, wider = shape(taken(batch, order)), shape(nrl.pad(batch, batch["input_ids"].shape[-1] + 3))
    for column in ("rewards", "loss_mask", "valid"):
        torch.testing.assert_close(moved[column], expected[column][order])
    torch.testing.assert_close(wider["rewards"], expected["rewards"])
    assert wider["loss_mask"][:, : expected["loss_mask"].shape[-1]].equal(expected["loss_mask"])
    assert not (expected["loss_mask"] & ~batch["loss_mask"]).any()
    if batch["loss_mask"].any() and name == "top_entropy":
        assert expected["loss_mask"].any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: scale_rewards(math.nan), "scale_rewards: factor is nan; it must be finite"),
        (lambda: scale_rewards(1.0, math.inf), "scale_rewards: offset is inf; it must be finite"),
        (lambda: clip_rewards(2.0, 1.0), r"clip_rewards: low is 2.0; it must be at most high, which is 1.0"),
        (lambda: clip_rewards(math.nan, 1.0), "clip_rewards: low is nan"),
        (lambda: overlong_penalty(4, 0), "overlong_penalty: buffer is 0; it must be between 1 and limit, which is 4"),
        (lambda: overlong_penalty(4, 5), "overlong_penalty: buffer is 5"),
        (lambda: stop_properly(1.5), "stop_properly: coef is 1.5; it must be between 0 and 1"),
        (lambda: stop_properly(math.nan), "stop_properly: coef is nan"),
        (lambda: length_penalty(-1.0), "length_penalty: weight is -1.0; it must be finite and at least 0"),
        (lambda: length_penalty(math.inf), "length_penalty: weight is inf"),
        (lambda: length_penalty(1.0, math.nan), "length_penalty: threshold is nan; it must be a number"),
        (lambda: top_entropy(0.0), "top_entropy: fraction is 0.0; it must be greater than 0 and at most 1"),
        (lambda: top_entropy(1.1), "top_entropy: fraction is 1.1"),
        (lambda: keep_at_least(math.nan), "keep_at_least: threshold is nan; it must be a number"),
    ],
)
def test_arguments_are_checked(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()
