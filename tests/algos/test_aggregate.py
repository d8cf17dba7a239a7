import functools
import math

import pytest
import torch
from torch import Tensor

from nrl.algos import Aggregate, by_episode, episode_shares, seq_mean, seq_sum, token_mean
from nrl.algos._reductions import aggregate_tokens
from nrl.batch import Batch
from nrl.batch.metrics import Mean, finalize, merge
from nrl.errors import BatchError, MissingColumn

X = torch.tensor([[1.0, 2.0, 3.0], [8.0, 40.0, 50.0], [60.0, 70.0, 80.0]])
MASK = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
ALL = [token_mean, seq_mean, seq_sum(4)]


@pytest.mark.parametrize(
    ("aggregate", "total", "weight"),
    [(token_mean, 1 + 2 + 3 + 8, 4), (seq_mean, 6 / 3 + 8 / 1, 2), (seq_sum(4), 6 / 4 + 8 / 4, 2)],
)
def test_by_hand(aggregate: Aggregate, total: float, weight: float) -> None:
    found = aggregate(X, MASK)
    assert (found.total.item(), found.weight.item()) == (total, weight)


@pytest.mark.parametrize("aggregate", ALL)
def test_any_leading_dimensions(aggregate: Aggregate) -> None:
    flat = aggregate(X, MASK)
    for shape in ((3, 1, 3), (1, 3, 3)):
        folded = aggregate(X.view(shape), MASK.view(shape))
        assert (folded.total, folded.weight) == (flat.total, flat.weight)


@pytest.mark.parametrize("aggregate", ALL)
def test_rows_add_up(aggregate: Aggregate) -> None:
    parts = [aggregate(x[None], mask[None]) for x, mask in zip(X, MASK, strict=True)]
    added = merge(merge({"x": parts[0]}, {"x": parts[1]}), {"x": parts[2]})
    assert finalize(added) == pytest.approx(finalize({"x": aggregate(X, MASK)}))


@pytest.mark.parametrize("aggregate", ALL)
@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_what_is_masked_is_not_seen(aggregate: Aggregate, garbage: float) -> None:
    x = torch.where(MASK, X, garbage).requires_grad_()
    found = aggregate(x, MASK)
    assert found.total == aggregate(X, MASK).total
    found.total.backward()
    assert x.grad is not None
    assert bool((x.grad[~MASK] == 0).all())
    assert bool((x.grad[MASK] > 0).all())


@pytest.mark.parametrize("aggregate", ALL)
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 3)])
def test_nothing_is_zero_of_zero(aggregate: Aggregate, shape: tuple[int, int]) -> None:
    found = aggregate(torch.ones(shape), torch.zeros(shape, dtype=torch.bool))
    assert (found.total.item(), found.weight.item()) == (0, 0)


@pytest.mark.parametrize("aggregate", ALL)
def test_dtypes(aggregate: Aggregate) -> None:
    assert {part.dtype for part in aggregate(X.double(), MASK)} == {torch.float64}
    assert {part.dtype for part in aggregate(X.bfloat16(), MASK)} == {torch.float32}


def test_half_precision_counts_exactly() -> None:
    ones = torch.ones(1, 1001, dtype=torch.bfloat16)
    found = token_mean(ones, torch.ones(1, 1001, dtype=torch.bool))
    assert (found.total.item(), found.weight.item()) == (1001, 1001)


def test_norm_changes_the_total_and_not_the_weight() -> None:
    assert seq_sum(1)(X, MASK) == Mean(torch.tensor(14.0), torch.tensor(2.0))
    assert seq_sum(2)(X, MASK) == Mean(torch.tensor(7.0), torch.tensor(2.0))


@pytest.mark.parametrize("norm", [0, -1, math.inf, math.nan])
def test_norm_is_positive(norm: float) -> None:
    with pytest.raises(ValueError, match="seq_sum: norm is"):
        seq_sum(norm)


SHARES = torch.tensor([0.75, 0.25, 0.0])


def test_shares_by_hand() -> None:
    assert seq_mean(X, MASK, SHARES) == Mean(torch.tensor(0.75 * 2 + 0.25 * 8), torch.tensor(1.0))
    batch = Batch({"loss_mask": MASK, "episode_shares": SHARES}, batch_size=[3])
    assert aggregate_tokens(seq_sum(4), X, batch) == Mean(torch.tensor(14 / 4), torch.tensor(1.0))


@pytest.mark.parametrize("aggregate", [seq_mean, seq_sum(4)])
def test_shares_of_whole_rows_change_no_bit(aggregate: Aggregate) -> None:
    x = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    assert aggregate_tokens(aggregate, x, Batch({"loss_mask": MASK}, batch_size=[3])) == aggregate(x, MASK)


@pytest.mark.parametrize("aggregate", [seq_mean, seq_sum(4)])
def test_a_row_without_a_token_counts_nothing_whatever_its_share(aggregate: Aggregate) -> None:
    batch = Batch({"loss_mask": MASK, "episode_shares": torch.ones(3)}, batch_size=[3])
    assert aggregate_tokens(aggregate, X, batch).weight == 2


@pytest.mark.parametrize(("aggregate", "name"), [(seq_mean, "seq_mean"), (seq_sum(4), "seq_sum")])
def test_shares_are_a_number_a_row(aggregate: Aggregate, name: str) -> None:
    batch = Batch({"loss_mask": MASK, "episode_shares": torch.ones(3, 3)}, batch_size=[3])
    with pytest.raises(BatchError, match=rf"{name}: shares has shape \[3, 3\], and x has \[3\] rows; .*episode_shares"):
        aggregate_tokens(aggregate, X, batch)


def test_episode_shares_by_hand() -> None:
    mask = torch.tensor([[True, True], [True, False], [False, False], [True, True], [True, False]])
    batch = Batch({"loss_mask": mask, "episode_ids": torch.tensor([9, 2, 4, 2, 2])}, batch_size=[5])
    assert episode_shares(batch).tolist() == [1.0, 0.25, 0.0, 0.5, 0.25]
    assert episode_shares(batch.exclude("episode_ids")).tolist() == [1.0, 1.0, 0.0, 1.0, 1.0]
    assert episode_shares(batch[:0]).tolist() == []
    nested = batch[:4].reshape(2, 2)
    assert episode_shares(nested).tolist() == [[1.0, pytest.approx(1 / 3)], [0.0, pytest.approx(2 / 3)]]
    known = torch.full((5,), 0.3)
    assert episode_shares(Batch({**batch, "episode_shares": known}, batch_size=[5])) is known
    with pytest.raises(MissingColumn, match=r"episode_shares.*loss_mask"):
        episode_shares(batch.exclude("loss_mask"))


def test_shares_wait_for_no_device() -> None:
    """A tensor without numbers has sizes alone: none of those here depends on a number."""
    batch = Batch({"loss_mask": MASK, "episode_ids": torch.tensor([1, 1, 2])}, batch_size=[3]).to("meta")
    assert episode_shares(batch).shape == (3,)
    with pytest.raises(NotImplementedError):
        batch["episode_ids"].unique()


@pytest.mark.parametrize("aggregate", [seq_mean, seq_sum(4)])
def test_a_weight_of_whole_episodes_is_a_whole_number_in_any_order(aggregate: Aggregate) -> None:
    """Thirds, sevenths and elevenths do not add up to 300 in float32."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.cat([100 * n + torch.arange(100).repeat_interleave(n) for n in (3, 7, 11)])
    mask = torch.ones(len(ids), 1, dtype=torch.bool)
    for _ in range(5):
        order = torch.randperm(len(ids), generator=draw)
        batch = Batch({"loss_mask": mask, "episode_ids": ids[order]}, batch_size=[len(ids)])
        assert aggregate_tokens(aggregate, torch.ones(len(ids), 1), batch).weight == 300
        assert episode_shares(batch).float().sum() != 300


def test_an_aggregate_gets_shares_if_it_is_declared() -> None:
    def weight(x: Tensor, mask: Tensor, shares: Tensor | None = None, factor: float = 1.0) -> Mean:
        return Mean(x.sum(), torch.tensor(factor) * (-1.0 if shares is None else shares.sum()))

    batch = Batch({"loss_mask": MASK, "episode_ids": torch.tensor([1, 1, 2])}, batch_size=[3])
    assert aggregate_tokens(weight, X, batch).weight == -1
    declared = by_episode(weight)
    assert declared is weight
    assert aggregate_tokens(declared, X, batch).weight == 1
    assert aggregate_tokens(functools.partial(declared, factor=3.0), X, batch).weight == 3
    assert aggregate_tokens(lambda x, mask: declared(x, mask), X, batch).weight == -1
