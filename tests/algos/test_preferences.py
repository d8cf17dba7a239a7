"""Losses on pairs, against numbers worked out by hand, slow loops from the papers, and each other."""

import inspect
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

import nrl.algos
from nrl.algos import (
    Link,
    Loss,
    Score,
    add,
    cdpo_loss,
    chosen_nll,
    cpo_loss,
    dpo_loss,
    hinge,
    hinge_loss,
    implicit_reward,
    ipo_loss,
    length_normalized_dpo_loss,
    length_normalized_ipo_loss,
    log_likelihood,
    log_odds,
    log_sigmoid,
    mean_implicit_reward,
    mean_log_likelihood,
    orpo_loss,
    preference_loss,
    robust_dpo_loss,
    robust_log_sigmoid,
    rpo_loss,
    seq_mean,
    seq_sum,
    simpo_loss,
    squared,
    token_mean,
)
from nrl.backends.training.loss.loss_terms import terms_of
from nrl.batch import Batch, assign
from nrl.batch.metrics import Mean, finalize
from nrl.errors import BatchError, MissingColumn

LOSSES: dict[str, Loss] = {
    "dpo": dpo_loss(0.3),
    "length-normalized dpo": length_normalized_dpo_loss(2.0),
    "cdpo": cdpo_loss(0.3, 0.1),
    "robust dpo": robust_dpo_loss(0.3, 0.2),
    "ipo": ipo_loss(0.4),
    "length-normalized ipo": length_normalized_ipo_loss(0.4),
    "hinge": hinge_loss(0.3),
    "simpo": simpo_loss(2.0, 1.0),
    "cpo": cpo_loss(0.3, 0.7),
    "orpo": orpo_loss(0.5),
    "rpo": rpo_loss(0.3, 0.7),
    "nll": chosen_nll(),
    "nll of rows": chosen_nll(seq_mean),
}


def random_pairs(pairs: int = 4, width: int = 5, dtype: torch.dtype = torch.float64, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(pairs, 2, width, generator=generator) < 0.7
    mask[..., 0] = False
    mask[..., 1] = True
    ref = -torch.rand(pairs, 2, width, generator=generator).to(dtype) * 3
    return Batch({"loss_mask": mask, "ref_logprobs": ref}, batch_size=[pairs, 2])


def outputs(batch: Batch, scale: float = 3.0, seed: int = 1) -> Tensor:
    x = -torch.rand(batch["loss_mask"].shape, generator=torch.Generator().manual_seed(seed)) * scale
    return x.to(batch["ref_logprobs"].dtype).requires_grad_()


def call(loss: Loss, logprobs: Tensor, batch: Batch) -> tuple[dict[str, Mean], dict[str, float]]:
    out = TensorDict({"logprobs": logprobs}, batch_size=batch.batch_size)
    terms, metrics = terms_of("loss", loss(out, batch))
    assert not any(value.requires_grad for metric in metrics.values() for value in metric)
    return terms, finalize(metrics)


def value(loss: Loss, logprobs: Tensor, batch: Batch) -> Tensor:
    """The sum of total / weight over the terms, 0 where a term weighs nothing."""
    terms, _ = call(loss, logprobs, batch)
    return torch.stack([term.total / term.weight.clamp(min=1) for term in terms.values()]).sum()


def gradient(loss: Loss, logprobs: Tensor, batch: Batch) -> Tensor:
    return torch.autograd.grad(value(loss, logprobs, batch), logprobs)[0]


# -- numbers by hand ---------------------------------------------------------------------------------------------------

PAIRS = Batch(
    {
        "loss_mask": torch.tensor([[[0, 1, 1], [0, 1, 0]], [[0, 1, 0], [0, 1, 1]], [[0, 1, 1], [0, 0, 0]]]).bool(),
        "ref_logprobs": torch.tensor(
            [[[0.0, -1, -1], [0, -2, 0]], [[0, -1, 0], [0, -2, -2]], [[0, -1, -1], [0, 0, 0]]]
        ),
    },
    batch_size=[3, 2],
)  # the third pair has a row without a token: it does not count
LOGPROBS = torch.tensor([[[0.0, -0.5, -0.5], [0, -4, 0]], [[0, -3, 0], [0, -1, -2]], [[0, -9, -9], [0, 0, 0]]])
# log-ratios: chosen +1 (0.5 a token) and -2 (-2), rejected -2 (-2) and +1 (0.5): differences 3 and -3 (2.5 and -2.5)
# log-likelihoods: chosen -1 (-0.5 a token) and -3 (-3), rejected -4 (-4) and -3 (-1.5)


def softplus(x: float) -> float:
    """-log σ(-x)"""
    return math.log1p(math.exp(x))


def odds(mean: float) -> float:
    """Log-odds of a probability with this logarithm."""
    return mean - math.log(1 - math.exp(mean))


TWO = (0.5 * 3, 0.5 * -3)  # the margins of DPO at β = 0.5


@pytest.mark.parametrize(
    ("loss", "total"),
    [
        (dpo_loss(0.5), sum(softplus(-m) for m in TWO)),
        (length_normalized_dpo_loss(2.0), softplus(-5.0) + softplus(5.0)),
        (cdpo_loss(0.5, 0.1), sum(0.9 * softplus(-m) + 0.1 * softplus(m) for m in TWO)),
        (robust_dpo_loss(0.5, 0.1), sum(0.9 * softplus(-m) - 0.1 * softplus(m) for m in TWO) / 0.8),
        (ipo_loss(0.25), (3.0 - 2.0) ** 2 + (-3.0 - 2.0) ** 2),
        (length_normalized_ipo_loss(0.25), (2.5 - 2.0) ** 2 + (-2.5 - 2.0) ** 2),
        (hinge_loss(0.5), 0.0 + 2.5),
        (simpo_loss(2.0, 0.7), softplus(-(2 * 3.5 - 0.7)) + softplus(-(2 * -1.5 - 0.7))),
        (preference_loss(log_likelihood(0.5), hinge(2.0)), 0.5 + 2.0),
    ],
)
def test_by_hand(loss: Loss, total: float) -> None:
    terms, _ = call(loss, LOGPROBS, PAIRS)
    assert terms["loss"].total.item() == pytest.approx(total, rel=1e-5)
    assert terms["loss"].weight.item() == 2


@pytest.mark.parametrize(
    ("loss", "preference", "nll", "weight"),
    [
        (cpo_loss(0.5, 0.1), softplus(-1.5) + softplus(0.0), 0.1 * 4, 3),
        (cpo_loss(0.5, 0.1, seq_sum(1)), softplus(-1.5) + softplus(0.0), 0.1 * 4, 2),
        (
            orpo_loss(0.1),
            0.1 * (softplus(odds(-4.0) - odds(-0.5)) + softplus(odds(-1.5) - odds(-3.0))),
            0.5 + 3.0,
            2,
        ),
        (rpo_loss(0.5, 0.1), sum(softplus(-m) for m in TWO), 0.1 * (0.5 + 3.0), 2),
        (rpo_loss(0.5, 0.1, token_mean), sum(softplus(-m) for m in TWO), 0.1 * 4, 3),
    ],
)
def test_sums_by_hand(loss: Loss, preference: float, nll: float, weight: float) -> None:
    terms, metrics = call(loss, LOGPROBS, PAIRS)
    found = {key: [part.item() for part in term] for key, term in terms.items()}
    assert found == {
        "preference_loss": [pytest.approx(preference, rel=1e-5), 2.0],
        "chosen_nll": [pytest.approx(nll, rel=1e-5), weight],
    }
    assert metrics.keys() == {"accuracy", "margin", "chosen_score", "rejected_score"}


def test_metrics_by_hand() -> None:
    expected = {"accuracy": 0.5, "margin": 0.0, "chosen_score": -0.25, "rejected_score": -0.25}
    assert call(dpo_loss(0.5), LOGPROBS, PAIRS)[1] == pytest.approx(expected)
    expected = {"accuracy": 0.5, "margin": 2.0, "chosen_score": -3.5, "rejected_score": -5.5}
    assert call(simpo_loss(2.0, 0.7), LOGPROBS, PAIRS)[1] == pytest.approx(expected)
    expected = {"accuracy": 0.5, "margin": 0.0, "chosen_score": -0.5, "rejected_score": -0.5}
    assert call(ipo_loss(0.25), LOGPROBS, PAIRS)[1] == pytest.approx(expected)  # in nats, not times beta


def test_accuracy_is_how_often_the_chosen_answer_scores_higher() -> None:
    logprobs = torch.tensor([[[-1.0], [-1.5]], [[-1.0], [-3.0]], [[-2.0], [-1.0]]])
    batch = Batch({"loss_mask": torch.ones(3, 2, 1, dtype=torch.bool)}, batch_size=[3, 2])
    _, metrics = call(preference_loss(log_likelihood(1.0), log_sigmoid()), logprobs, batch)
    assert metrics["accuracy"] == pytest.approx(2 / 3)


def test_scores_by_hand() -> None:
    logprobs = torch.where(PAIRS["loss_mask"], LOGPROBS, 0)
    expected: list[tuple[Score, list[list[float]]]] = [
        (implicit_reward(0.5), [[0.5, -1.0], [-1.0, 0.5], [-8.0, 0.0]]),
        (mean_implicit_reward(0.5), [[0.25, -1.0], [-1.0, 0.25], [-4.0, 0.0]]),
        (log_likelihood(0.5), [[-0.5, -2.0], [-1.5, -1.5], [-9.0, 0.0]]),
        (mean_log_likelihood(0.5), [[-0.25, -2.0], [-1.5, -0.75], [-4.5, 0.0]]),
        (log_odds, [[odds(-0.5), odds(-4.0)], [odds(-3.0), odds(-1.5)], [odds(-9.0), odds(-1e-6)]]),
    ]
    for score, rows in expected:
        found = score(logprobs, PAIRS)
        assert found.tolist() == [pytest.approx(row, rel=1e-5) for row in rows]
        assert torch.equal(score(logprobs[:2].view(4, 3), PAIRS[:2].reshape(4)), found[:2].flatten())  # any batch size


def test_links_by_hand() -> None:
    margins = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64)
    expected: list[tuple[Link, list[float]]] = [
        (log_sigmoid(), [softplus(1), math.log(2), softplus(-2)]),
        (log_sigmoid(margin=2.0), [softplus(3), softplus(2), math.log(2)]),
        (log_sigmoid(2.0, 0.25), [0.75 * softplus(-m) + 0.25 * softplus(m) for m in (-3, -2, 0)]),
        (robust_log_sigmoid(0.25), [(0.75 * softplus(-m) - 0.25 * softplus(m)) / 0.5 for m in (-1, 0, 2)]),
        (squared(-2.0), [1.0, 4.0, 16.0]),
        (hinge(), [2.0, 1.0, 0.0]),
        (hinge(3.0), [4.0, 3.0, 1.0]),
    ]
    for link, numbers in expected:
        assert link(margins).tolist() == pytest.approx(numbers)


# -- slow loops, from the papers ---------------------------------------------------------------------------------------


def rows_of(batch: Batch, logprobs: Tensor) -> list[tuple[list[float], list[float], list[float], list[float]]]:
    """For each pair: the chosen answer's log-probabilities and the reference's, and the rejected one's."""
    found = []
    for p in range(len(batch)):
        columns = [
            [x[p, side, t].item() for t in range(x.shape[-1]) if batch["loss_mask"][p, side, t]]
            for side in (0, 1)
            for x in (logprobs, batch["ref_logprobs"])
        ]
        found.append((columns[0], columns[1], columns[2], columns[3]))
    return found


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def mean(x: list[float]) -> float:
    return sum(x) / len(x)


def probability(answer: list[float]) -> float:
    """ORPO, eq. 3: the geometric mean."""
    return math.exp(mean(answer))


def slow_orpo(coef: float, w: list[float], l: list[float]) -> float:
    odds_w, odds_l = (probability(y) / (1 - probability(y)) for y in (w, l))
    return -mean(w) - coef * math.log(sigmoid(math.log(odds_w / odds_l)))


type Slow = Callable[[list[float], list[float], list[float], list[float]], float]
SLOW: dict[str, Slow] = {
    "dpo": lambda w, rw, l, rl: -math.log(sigmoid(0.3 * (sum(w) - sum(rw)) - 0.3 * (sum(l) - sum(rl)))),
    "length-normalized dpo": lambda w, rw, l, rl: (
        -math.log(sigmoid(2 / len(w) * (sum(w) - sum(rw)) - 2 / len(l) * (sum(l) - sum(rl))))
    ),
    "cdpo": lambda w, rw, l, rl: (
        -0.9 * math.log(sigmoid(0.3 * (sum(w) - sum(rw) - sum(l) + sum(rl))))
        - 0.1 * math.log(sigmoid(-0.3 * (sum(w) - sum(rw) - sum(l) + sum(rl))))
    ),
    "robust dpo": lambda w, rw, l, rl: (
        (
            -0.8 * math.log(sigmoid(0.3 * (sum(w) - sum(rw) - sum(l) + sum(rl))))
            + 0.2 * math.log(sigmoid(-0.3 * (sum(w) - sum(rw) - sum(l) + sum(rl))))
        )
        / (1 - 2 * 0.2)
    ),
    "ipo": lambda w, rw, l, rl: (sum(w) - sum(l) - (sum(rw) - sum(rl)) - 1 / (2 * 0.4)) ** 2,
    "length-normalized ipo": lambda w, rw, l, rl: (mean(w) - mean(l) - (mean(rw) - mean(rl)) - 1 / (2 * 0.4)) ** 2,
    "hinge": lambda w, rw, l, rl: max(0.0, 1 - 0.3 * (sum(w) - sum(rw) - sum(l) + sum(rl))),
    "simpo": lambda w, rw, l, rl: -math.log(sigmoid(2 / len(w) * sum(w) - 2 / len(l) * sum(l) - 1)),
    "orpo": lambda w, rw, l, rl: slow_orpo(0.5, w, l),
    "rpo": lambda w, rw, l, rl: -0.7 * sum(w) / len(w) - math.log(sigmoid(0.3 * (sum(w) - sum(rw) - sum(l) + sum(rl)))),
    "nll of rows": lambda w, rw, l, rl: -sum(w) / len(w),
}


@pytest.mark.parametrize("name", SLOW)
@pytest.mark.parametrize("seed", range(3))
def test_by_a_slow_loop_over_pairs(name: str, seed: int) -> None:
    batch = random_pairs(6, seed=seed)
    logprobs = outputs(batch, seed=10 + seed)
    expected = mean([SLOW[name](*pair) for pair in rows_of(batch, logprobs)])
    assert value(LOSSES[name], logprobs, batch).item() == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(3))
def test_cpo_by_a_slow_loop(seed: int) -> None:
    """The second term of the paper is that of whole answers; its code's is over all tokens."""
    batch = random_pairs(6, seed=seed)
    logprobs = outputs(batch, seed=10 + seed)
    pairs = rows_of(batch, logprobs)
    prefer = mean([-math.log(sigmoid(0.3 * sum(w) - 0.3 * sum(l))) for w, _, l, _ in pairs])
    paper = mean([-sum(w) for w, *_ in pairs])
    code = -sum(sum(w) for w, *_ in pairs) / sum(len(w) for w, *_ in pairs)
    assert value(cpo_loss(0.3, 0.7), logprobs, batch).item() == pytest.approx(prefer + 0.7 * code)
    assert value(cpo_loss(0.3, 0.7, seq_sum(1)), logprobs, batch).item() == pytest.approx(prefer + 0.7 * paper)


def test_every_loss_here_has_a_slow_loop() -> None:
    assert LOSSES.keys() - SLOW.keys() == {"cpo", "nll"}  # which have their own above, since they divide by tokens


def test_gradients_by_differences() -> None:
    batch = random_pairs()
    for loss in LOSSES.values():
        logprobs = outputs(batch)
        found = gradient(loss, logprobs, batch)
        for index in itertools.product(range(4), range(2), range(5)):
            step = torch.zeros_like(logprobs)
            step[index] = 1e-6
            with torch.no_grad():
                slope = (value(loss, logprobs + step, batch) - value(loss, logprobs - step, batch)) / 2e-6
            assert found[index].item() == pytest.approx(slope.item(), abs=1e-7)


# -- identities --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_at_equal_policies(dtype: torch.dtype) -> None:
    batch = random_pairs(dtype=dtype)
    ref = batch["ref_logprobs"]
    two = torch.tensor(2.0, dtype=dtype).log().item()
    for loss in (dpo_loss(0.7), length_normalized_dpo_loss(3.0), cdpo_loss(0.7, 0.0), robust_dpo_loss(0.7, 0.0)):
        assert value(loss, ref, batch).item() == two
    assert value(cdpo_loss(0.7, 0.3), ref, batch).item() == pytest.approx(two)
    assert value(robust_dpo_loss(0.7, 0.3), ref, batch).item() == pytest.approx(two)
    for loss in (ipo_loss(0.25), length_normalized_ipo_loss(0.25)):
        assert value(loss, ref, batch).item() == 1 / (4 * 0.25**2)
    assert value(hinge_loss(0.7), ref, batch).item() == 1
    metrics = call(dpo_loss(0.7), ref, batch)[1]
    assert metrics["accuracy"] == metrics["margin"] == 0


def test_without_smoothing_both_are_dpo_to_the_last_bit() -> None:
    batch = random_pairs(20)
    logprobs = outputs(batch)
    for loss in (cdpo_loss(0.3, 0.0), robust_dpo_loss(0.3, 0.0)):
        assert torch.equal(value(loss, logprobs, batch), value(dpo_loss(0.3), logprobs, batch))
        assert torch.equal(gradient(loss, logprobs, batch), gradient(dpo_loss(0.3), logprobs, batch))


def test_cdpo_is_least_where_the_model_doubts_as_much_as_the_labels() -> None:
    margin = torch.tensor([math.log(0.9 / 0.1)], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.grad(log_sigmoid(smoothing=0.1)(margin).sum(), margin)[0].item() == pytest.approx(
        0, abs=1e-12
    )


def test_robust_dpo_on_flipped_labels_is_dpo_on_average() -> None:
    margins = torch.linspace(-5, 5, 21, dtype=torch.float64)
    link = robust_log_sigmoid(0.2)
    torch.testing.assert_close(0.8 * link(margins) + 0.2 * link(-margins), log_sigmoid()(margins))


def test_ipo_has_no_gradient_at_its_target() -> None:
    batch = random_pairs()
    logprobs = batch["ref_logprobs"].clone()
    logprobs[:, 0, 1] += 2.0  # a token of each chosen answer: 1 / (2 beta)
    assert gradient(ipo_loss(0.25), logprobs.requires_grad_(), batch).abs().max() < 1e-12


def test_hinge_has_no_gradient_beyond_its_margin() -> None:
    batch = random_pairs()
    logprobs = batch["ref_logprobs"].clone()
    logprobs[:, 0, 1] += 3.0
    assert not gradient(hinge_loss(0.5), logprobs.requires_grad_(), batch).any()


def test_lengths_do_not_matter_where_all_are_one() -> None:
    batch = random_pairs(width=2)
    logprobs = outputs(batch)
    for sums, means in (
        (dpo_loss(0.3), length_normalized_dpo_loss(0.3)),
        (ipo_loss(0.3), length_normalized_ipo_loss(0.3)),
    ):
        assert torch.equal(value(sums, logprobs, batch), value(means, logprobs, batch))


def test_sums_are_their_parts() -> None:
    batch = random_pairs()
    logprobs = outputs(batch)
    plain = value(preference_loss(log_likelihood(0.3), log_sigmoid()), logprobs, batch)
    torch.testing.assert_close(value(cpo_loss(0.3, 0.0), logprobs, batch), plain)
    torch.testing.assert_close(
        value(rpo_loss(0.3, 0.7), logprobs, batch),
        value(dpo_loss(0.3), logprobs, batch) + 0.7 * value(chosen_nll(seq_mean), logprobs, batch),
    )
    torch.testing.assert_close(value(orpo_loss(0.0), logprobs, batch), value(chosen_nll(seq_mean), logprobs, batch))
    both = add((1.0, dpo_loss(0.3)), (0.7, chosen_nll(seq_mean)))
    torch.testing.assert_close(value(both, logprobs, batch), value(rpo_loss(0.3, 0.7), logprobs, batch))


def test_the_likelihood_of_the_chosen_answers_counts_once_unless_said() -> None:
    batch = random_pairs()
    logprobs = outputs(batch)
    for loss in (cpo_loss, rpo_loss):
        assert value(loss(0.3), logprobs, batch) == value(loss(0.3, 1.0), logprobs, batch)


def test_supervised_fine_tuning_sees_the_chosen_rows_of_the_pairs_that_count() -> None:
    grad = gradient(chosen_nll(), LOGPROBS.clone().requires_grad_(), PAIRS)
    assert grad[:, 1].any().item() is False
    assert grad[2].any().item() is False
    assert grad[:2, 0].tolist() == [pytest.approx([0, -1 / 3, -1 / 3]), pytest.approx([0, -1 / 3, 0])]


# -- edges -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_a_pair_of_which_a_row_has_no_token_is_not_seen(name: str) -> None:
    batch = random_pairs()
    logprobs = outputs(batch)
    mask = batch["loss_mask"].clone()
    mask[1, 0], mask[2, 1], mask[3] = False, False, False
    hidden = batch.copy().set("loss_mask", mask)
    torch.testing.assert_close(value(LOSSES[name], logprobs, hidden), value(LOSSES[name], logprobs[:1], batch[:1]))
    grad = gradient(LOSSES[name], logprobs, hidden)
    assert not grad[1:].any()
    alone = outputs(batch)[:1].detach().requires_grad_()
    torch.testing.assert_close(grad[:1], gradient(LOSSES[name], alone, batch[:1]))


@pytest.mark.parametrize("name", LOSSES)
def test_a_pair_with_an_invalid_row_is_not_seen(name: str) -> None:
    batch = random_pairs(2)
    logprobs = outputs(batch)
    found = assign(batch, valid=torch.tensor([[True, True], [True, False]]))
    torch.testing.assert_close(value(LOSSES[name], logprobs, found), value(LOSSES[name], logprobs[:1], batch[:1]))


@pytest.mark.parametrize("name", LOSSES)
def test_without_a_pair_that_counts_all_is_nothing(name: str) -> None:
    batch = random_pairs()
    invalid = assign(batch, valid=torch.zeros(4, 2, dtype=torch.bool))
    for none in (invalid, batch[:0]):
        logprobs = outputs(none)
        terms, metrics = call(LOSSES[name], logprobs, none)
        assert {part.item() for term in terms.values() for part in term} == {0.0}
        assert all(math.isnan(number) for number in metrics.values())
        assert not gradient(LOSSES[name], logprobs, none).any()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extremes_are_finite(name: str, dtype: torch.dtype) -> None:
    plain = random_pairs(dtype=dtype)
    sizes = (1e4, 0.0, -1e-7, -88.0, -1e4)
    for new, ref in itertools.product(sizes, sizes):
        for sides in ([new, new], [new, ref], [ref, new]):
            logprobs = torch.tensor(sides, dtype=dtype).view(1, 2, 1).expand(4, 2, 5).clone().requires_grad_()
            batch = plain.copy().set("ref_logprobs", torch.full_like(plain["ref_logprobs"], ref))
            terms, metrics = call(LOSSES[name], logprobs, batch)
            assert all(bool(term.total.isfinite()) for term in terms.values()), (new, ref)
            assert all(math.isfinite(number) for number in metrics.values()), (new, ref)
            assert bool(gradient(LOSSES[name], logprobs, batch).isfinite().all()), (new, ref)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_odds_of_what_is_certain(dtype: torch.dtype) -> None:
    batch = Batch({"loss_mask": torch.ones(1, 2, 1, dtype=torch.bool)}, batch_size=[1, 2])
    logprobs = torch.tensor([[[0.0], [-1.0]]], dtype=dtype, requires_grad=True)
    found = log_odds(logprobs, batch)
    assert found[0].tolist() == pytest.approx([math.log(1e6), odds(-1.0)], rel=1e-5)
    slopes = torch.autograd.grad(found.sum(), logprobs)[0].flatten().tolist()
    assert slopes == pytest.approx([0.0, 1 / (1 - math.exp(-1))])
    near = torch.tensor([[[-1e-3], [-50.0]]], dtype=dtype)
    assert log_odds(near, batch)[0].tolist() == pytest.approx([odds(-1e-3), -50.0], rel=1e-5)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_what_is_masked_is_not_seen(name: str, garbage: float) -> None:
    batch = random_pairs()
    logprobs = outputs(batch)
    mask = batch["loss_mask"]
    dirty = batch.copy().set("ref_logprobs", torch.where(mask, batch["ref_logprobs"], garbage))
    dirty_logprobs = torch.where(mask, logprobs.detach(), garbage).requires_grad_()
    assert value(LOSSES[name], dirty_logprobs, dirty).item() == value(LOSSES[name], logprobs, batch).item()
    assert call(LOSSES[name], dirty_logprobs, dirty)[1] == call(LOSSES[name], logprobs, batch)[1]
    grad = gradient(LOSSES[name], dirty_logprobs, dirty)
    torch.testing.assert_close(grad, gradient(LOSSES[name], logprobs, batch))
    assert not grad[~mask].any()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    batch = random_pairs(dtype=dtype)
    terms, _ = call(LOSSES[name], outputs(batch), batch)
    assert {part.dtype for term in terms.values() for part in term} == {dtype}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_flow_through_the_outputs_alone(name: str) -> None:
    batch = random_pairs()
    ref = batch["ref_logprobs"].clone().requires_grad_()
    total = value(LOSSES[name], outputs(batch), batch.copy().set("ref_logprobs", ref))
    assert torch.autograd.grad(total, ref, allow_unused=True)[0] is None


# -- errors ------------------------------------------------------------------------------------------------------------


def test_a_reference_is_read_where_one_is_needed() -> None:
    batch = random_pairs()
    logprobs = outputs(batch)
    without = {"simpo", "cpo", "orpo", "nll", "nll of rows"}
    for name, loss in LOSSES.items():
        if name in without:
            assert torch.equal(value(loss, logprobs, batch.select("loss_mask")), value(loss, logprobs, batch))
        else:
            with pytest.raises(MissingColumn, match=r"implicit_reward reads the column 'ref_logprobs'"):
                call(loss, logprobs, batch.select("loss_mask"))


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (dpo_loss(0.1), "dpo_loss"),
        (cdpo_loss(0.1, 0.1), "cdpo_loss"),
        (length_normalized_ipo_loss(0.1), "length_normalized_ipo_loss"),
        (cpo_loss(0.1), "preference_loss"),
        (chosen_nll(), "chosen_nll"),
    ],
)
def test_preferences_are_pairs(loss: Loss, name: str) -> None:
    with pytest.raises(BatchError, match=rf"^{name}: loss_mask has shape \[6, 3\]; preferences are pairs"):
        call(loss, LOGPROBS.view(6, 3), PAIRS.reshape(6))
    with pytest.raises(BatchError, match=rf"^{name}: loss_mask has shape \[2, 3, 3\]"):
        call(loss, LOGPROBS.view(2, 3, 3), PAIRS.reshape(2, 3))
    with pytest.raises(MissingColumn, match=rf"{name} reads the column 'loss_mask'"):
        call(loss, LOGPROBS, PAIRS.exclude("loss_mask"))


@pytest.mark.parametrize("score", [mean_log_likelihood(1.0), log_odds])
def test_a_score_alone_says_what_it_misses(score: Score) -> None:
    with pytest.raises(MissingColumn, match=r"(mean_log_likelihood|log_odds) reads the column 'loss_mask'"):
        score(LOGPROBS, PAIRS.exclude("loss_mask"))


def test_a_score_is_a_number_a_row() -> None:
    loss = preference_loss(lambda logprobs, batch: logprobs, lambda margin: margin)
    with pytest.raises(BatchError, match=r"preference_loss: the score has shape \[3, 2, 3\]; .* \[3, 2\]"):
        call(loss, LOGPROBS, PAIRS)


FACTORIES: dict[str, dict[str, float]] = {
    "implicit_reward": {"beta": 0.1},
    "mean_implicit_reward": {"beta": 0.1},
    "log_likelihood": {"beta": 0.1},
    "mean_log_likelihood": {"beta": 0.1},
    "log_sigmoid": {"margin": 0.0, "smoothing": 0.0},
    "robust_log_sigmoid": {"smoothing": 0.1},
    "squared": {"target": 1.0},
    "hinge": {"margin": 1.0},
    "dpo_loss": {"beta": 0.1},
    "length_normalized_dpo_loss": {"beta": 0.1},
    "cdpo_loss": {"beta": 0.1, "smoothing": 0.1},
    "robust_dpo_loss": {"beta": 0.1, "smoothing": 0.1},
    "ipo_loss": {"beta": 0.1},
    "length_normalized_ipo_loss": {"beta": 0.1},
    "hinge_loss": {"beta": 0.1},
    "simpo_loss": {"beta": 0.1, "gamma": 0.1},
    "cpo_loss": {"beta": 0.1, "alpha": 0.1},
    "orpo_loss": {"coef": 0.1},
    "rpo_loss": {"beta": 0.1, "alpha": 0.1},
}
WRONG = {
    "beta": (0.0, -1.0, math.inf, math.nan),
    "smoothing": (-0.1, 0.5, 1.0, math.inf, math.nan),
    "target": (math.inf, -math.inf, math.nan),
    "gamma": (-1.0, math.inf, math.nan),
    "alpha": (-1.0, math.inf, math.nan),
    "coef": (-1.0, math.inf, math.nan),
    "margin": (-1.0, math.inf, math.nan),
}


@pytest.mark.parametrize(("name", "argument"), [(name, key) for name, given in FACTORIES.items() for key in given])
def test_wrong_numbers_are_refused_by_name(name: str, argument: str) -> None:
    factory = getattr(nrl.algos, name)
    assert factory(**FACTORIES[name]) is not None
    for number in WRONG[argument]:
        with pytest.raises(ValueError, match=rf"^{name}: {argument} is {number}; it must be "):
            factory(**FACTORIES[name] | {argument: number})


def test_the_hinge_needs_a_margin() -> None:
    with pytest.raises(ValueError, match=r"^hinge: margin is 0; it must be positive and finite$"):
        hinge(0)


def test_names_and_documentation_of_ready_made_losses() -> None:
    for name, given in FACTORIES.items():
        made = getattr(nrl.algos, name)(**given)
        assert made.__name__ == name
        if name.endswith("_loss"):
            assert inspect.getdoc(made)
            assert f"`nrl.algos.{name}`" in made.__doc__
