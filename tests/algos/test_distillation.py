import math
from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

import nrl
from nrl.algos import (
    Aggregate,
    distillation_loss,
    forward_kl,
    jsd,
    logprobs_at,
    needed,
    reverse_kl,
    seq_mean,
    token_mean,
    with_tail,
)
from nrl.algos.distillation import Distance
from nrl.batch import Batch
from nrl.batch.metrics import Mean, finalize
from nrl.errors import BatchError, MissingColumn

STUDENT = [0.1, 0.6, 0.05, 0.25]
TEACHER = [0.4, 0.3, 0.2, 0.1]
ALL = {"forward": forward_kl, "reverse": reverse_kl, "jsd": jsd(0.5), "jsd 0.1": jsd(0.1)}


def logs(numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64).log()


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a)


def mixed(p: list[float], q: list[float], beta: float) -> float:
    """GKD, eq. 1; p is the teacher's."""
    m = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


@pytest.mark.parametrize(
    ("distance", "expected"),
    [
        (forward_kl, kl(TEACHER, STUDENT)),
        (reverse_kl, kl(STUDENT, TEACHER)),
        (jsd(0.5), mixed(TEACHER, STUDENT, 0.5)),
        (jsd(0.2), mixed(TEACHER, STUDENT, 0.2)),
    ],
)
def test_distances_are_what_the_papers_say(distance: Distance, expected: float) -> None:
    assert distance(logs(STUDENT), logs(TEACHER)).item() == pytest.approx(expected)


def test_the_ends_of_the_mixture_are_the_two_kls() -> None:
    small = 1e-6
    assert jsd(small)(logs(STUDENT), logs(TEACHER)).item() / small == pytest.approx(kl(TEACHER, STUDENT), rel=1e-4)
    assert jsd(1 - small)(logs(STUDENT), logs(TEACHER)).item() / small == pytest.approx(kl(STUDENT, TEACHER), rel=1e-4)
    apart = logs([1 - 1e-12, 1e-12]), logs([1e-12, 1 - 1e-12])
    assert jsd(0.5)(*apart).item() == pytest.approx(math.log(2), rel=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_at_the_teacher_there_is_neither_a_distance_nor_a_gradient(name: str) -> None:
    logits = torch.tensor([0.3, -1.0, 0.5, 0.0], dtype=torch.float64, requires_grad=True)
    top = with_tail(logits.log_softmax(-1)[:3])
    distance = ALL[name](top, top.detach())
    assert distance.item() == pytest.approx(0.0, abs=1e-12)
    torch.testing.assert_close(torch.autograd.grad(distance, logits)[0], torch.zeros_like(logits))


@pytest.mark.parametrize("name", ALL)
def test_with_one_token_in_the_tail_it_is_the_distance_over_the_vocabulary(name: str) -> None:
    found = ALL[name](with_tail(logs(STUDENT[:3])), with_tail(logs(TEACHER[:3])))
    torch.testing.assert_close(found, ALL[name](logs(STUDENT), logs(TEACHER)))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("k", [1, 2])
def test_with_more_in_the_tail_it_is_less(name: str, k: int) -> None:
    found = ALL[name](with_tail(logs(STUDENT[:k])), with_tail(logs(TEACHER[:k])))
    assert 0 < found < ALL[name](logs(STUDENT), logs(TEACHER))


def test_the_tail_is_what_is_left() -> None:
    assert with_tail(logs([0.5, 0.25])).exp().tolist() == pytest.approx([0.5, 0.25, 0.25])
    assert with_tail(torch.zeros(2, 3)).exp()[:, 3].tolist() == pytest.approx([1e-7, 1e-7], rel=0.2)  # too much already


# -- the loss ---------------------------------------------------------------------------------------------------------

MASK = torch.tensor([[False, True, True], [False, True, False], [False, False, False]])
K, WORDS = 3, 7


def batch_of(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Batch, Tensor]:
    """A batch, and what the student says of the teacher's tokens."""
    draw = torch.Generator().manual_seed(seed)
    teacher, student = (torch.randn(3, 3, WORDS, generator=draw).to(dtype).log_softmax(-1) for _ in range(2))
    known, ids = teacher.topk(K)
    columns = {"input_ids": torch.ones(3, 3, dtype=torch.int64), "attention_mask": torch.ones(3, 3, dtype=torch.bool)}
    columns |= {"loss_mask": MASK, "teacher_ids": ids, "teacher_topk_logprobs": known}
    return Batch(columns, batch_size=[3]), student.gather(-1, ids)


def call(loss: Callable[..., tuple[Mean, nrl.Metrics]], student: Tensor, batch: Batch) -> tuple[Mean, dict[str, float]]:
    out = TensorDict({logprobs_at("teacher_ids"): student}, batch_size=batch.batch_size)
    mean, metrics = loss(out, batch)
    return mean, finalize(metrics)


@pytest.mark.parametrize(("aggregate", "per_row"), [(token_mean, False), (seq_mean, True)])
@pytest.mark.parametrize("name", ALL)
def test_by_a_slow_loop(name: str, aggregate: Aggregate, per_row: bool) -> None:
    batch, student = batch_of()
    expected, mass = 0.0, []
    for i, t in MASK.nonzero().tolist():
        q, p = (x[i, t].exp().tolist() for x in (student, batch["teacher_topk_logprobs"]))
        p, q = [*p, 1 - sum(p)], [*q, 1 - sum(q)]
        slow = {"forward": kl(p, q), "reverse": kl(q, p), "jsd": mixed(p, q, 0.5), "jsd 0.1": mixed(p, q, 0.1)}
        expected += slow[name] / (int(MASK[i].sum()) if per_row else 1)
        mass.append(sum(p[:-1]))
    mean, metrics = call(distillation_loss(ALL[name], aggregate=aggregate), student, batch)
    assert mean.total.item() == pytest.approx(expected)
    assert mean.weight.item() == (2 if per_row else 3)
    assert metrics == {"teacher_mass": pytest.approx(sum(mass) / 3)}


def test_it_needs_the_students_logprobs_of_the_teachers_tokens() -> None:
    assert needed(distillation_loss()) == {"logprobs_at(teacher_ids)"}


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 5.0])
@pytest.mark.parametrize("name", ALL)
def test_what_is_masked_is_not_seen(name: str, garbage: float) -> None:
    batch, student = batch_of()
    loss, every = distillation_loss(ALL[name]), MASK.unsqueeze(-1).expand(student.shape)
    spoilt = torch.where(every, student, garbage).requires_grad_()
    hidden = nrl.assign(batch, teacher_topk_logprobs=torch.where(every, batch["teacher_topk_logprobs"], garbage))
    mean, _ = call(loss, spoilt, hidden)
    assert mean.total == call(loss, student, batch)[0].total
    (gradient,) = torch.autograd.grad(mean.total, spoilt)
    assert bool(gradient.isfinite().all())
    assert not gradient[~every].any()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0.0, -1e-9, -1e4])
def test_extreme_outputs_are_finite(name: str, dtype: torch.dtype, size: float) -> None:
    """Among them what no distribution has, all tokens at a probability of 1."""
    batch, student = batch_of(dtype=dtype)
    for sharp in (batch, nrl.assign(batch, teacher_topk_logprobs=torch.full_like(student, size))):
        leaf = torch.full_like(student, size, requires_grad=True)
        mean, _ = call(distillation_loss(ALL[name]), leaf, sharp)
        assert bool(mean.total.isfinite())
        assert bool(torch.autograd.grad(mean.total, leaf)[0].isfinite().all())


@pytest.mark.parametrize("name", ALL)
def test_tokens_that_the_teacher_rules_out(name: str) -> None:
    """As a teacher under top-p does, whose table of k tokens has places to fill."""
    batch, student = batch_of()
    known = batch["teacher_topk_logprobs"].clone()
    known[..., -1] = -math.inf
    leaf = student.clone().requires_grad_()
    mean, metrics = call(distillation_loss(ALL[name]), leaf, nrl.assign(batch, teacher_topk_logprobs=known))
    assert bool(mean.total.isfinite())
    assert bool(torch.autograd.grad(mean.total, leaf)[0].isfinite().all())
    assert 0 < metrics["teacher_mass"] < 1
    fewer = {"teacher_ids": batch["teacher_ids"][..., :-1], "teacher_topk_logprobs": known[..., :-1]}
    if name == "forward":  # what the teacher rules out does not count
        other, _ = call(distillation_loss(), student[..., :-1], Batch({**batch, **fewer}, batch_size=[3]))
        assert mean.total > other.total  # but the student's mass on it is no longer the tail's


@pytest.mark.parametrize("name", ALL)
def test_gradients_away_from_the_teacher(name: str) -> None:
    """By differences: the mixture of the two has a gradient, too."""
    batch, student = batch_of()
    loss, leaf = distillation_loss(ALL[name]), student.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(call(loss, leaf, batch)[0].total, leaf)
    for i, t in MASK.nonzero().tolist():
        for j in range(K):
            moved = torch.zeros_like(student)
            moved[i, t, j] = 1e-6
            high, low = (call(loss, student + sign * moved, batch)[0].total.item() for sign in (1, -1))
            assert gradient[i, t, j].item() == pytest.approx((high - low) / 2e-6, rel=1e-5, abs=1e-8)


def test_parts_add_up() -> None:
    """Columns of several numbers a token are cut and padded with the tokens."""
    batch, student = batch_of()
    whole, _ = call(distillation_loss(), student, batch)
    totals = []
    for rows in ([2, 0], [1]):
        part = nrl.pad(batch[torch.tensor(rows)].lock_(), 5)
        shown = torch.nn.functional.pad(student[rows], (0, 0, 0, 2))
        totals.append(call(distillation_loss(), shown, part)[0])
    assert sum(mean.total.item() for mean in totals) == pytest.approx(whole.total.item())
    assert sum(mean.weight.item() for mean in totals) == whole.weight.item()


def test_a_batch_without_rows() -> None:
    batch, student = batch_of()
    mean, _ = call(distillation_loss(), student[:0], batch[:0])
    assert (mean.total.item(), mean.weight.item()) == (0, 0)


def test_the_teacher_gets_no_gradient() -> None:
    batch, student = batch_of()
    leaf = batch["teacher_topk_logprobs"].clone().requires_grad_()
    loose = Batch({**batch, "teacher_topk_logprobs": leaf}, batch_size=[3])
    assert not call(distillation_loss(), student, loose)[0].total.requires_grad


@pytest.mark.parametrize("beta", [0.0, 1.0, -0.1, math.nan])
def test_beta_is_a_part_of_a_mixture(beta: float) -> None:
    with pytest.raises(ValueError, match=f"jsd: beta is {beta}; it is the teacher's part of the mixture"):
        jsd(beta)


@pytest.mark.parametrize("column", ["teacher_ids", "teacher_topk_logprobs", "loss_mask"])
def test_a_missing_column_is_named(column: str) -> None:
    batch, student = batch_of()
    with pytest.raises(MissingColumn, match=f"distillation_loss reads the column '{column}'"):
        call(distillation_loss(), student, batch.exclude(column))


def test_shapes_have_to_agree() -> None:
    batch, student = batch_of()
    with pytest.raises(BatchError, match=r"teacher_ids has shape \[3, 3, 3\], .* log-probabilities \[3, 3, 2\]"):
        call(distillation_loss(), student[..., :2], batch)
