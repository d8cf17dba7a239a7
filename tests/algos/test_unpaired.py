"""KTO and its reference point, against numbers worked out by hand and a slow loop from the paper."""

import math

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

import nrl
from nrl import tiny
from nrl.algos import kto_loss, mismatched, reference_point
from nrl.backends import adamw, fsdp
from nrl.batch import Batch, assign
from nrl.batch.metrics import Mean, finalize
from nrl.errors import BatchError, MissingColumn


def call(logprobs: Tensor, batch: Batch, *numbers: float) -> tuple[Mean, dict[str, float]]:
    mean, metrics = kto_loss(*numbers)(TensorDict({"logprobs": logprobs}, batch_size=batch.batch_size), batch)
    assert not any(value.requires_grad for metric in metrics.values() for value in metric)
    return mean, finalize(metrics)


def gradient(logprobs: Tensor, batch: Batch, *numbers: float) -> Tensor:
    return torch.autograd.grad(call(logprobs, batch, *numbers)[0].total, logprobs)[0]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def random_rows(n: int = 6, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Batch]:
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(n, 5, generator=g) < 0.7
    mask[:, 0], mask[:, 1] = False, True
    columns = {
        "loss_mask": mask,
        "ref_logprobs": -torch.rand(n, 5, generator=g).to(dtype),
        "desirable": torch.arange(n) % 3 > 0,
        "reference_point": torch.rand(n, generator=g).to(dtype),
    }
    logprobs = (-2 * torch.rand(n, 5, generator=g)).to(dtype).requires_grad_()
    return logprobs, Batch(columns, batch_size=[n])


HAND = Batch(
    {
        "loss_mask": torch.tensor([[0, 1, 1], [0, 1, 0], [0, 1, 1], [0, 0, 0]]).bool(),
        "ref_logprobs": torch.tensor([[0.0, -1, -1], [0, -2, 0], [0, -1, -1], [0, 0, 0]]),
        "desirable": torch.tensor([True, False, False, True]),
        "reference_point": torch.tensor([0.5, 0.5, 0.5, math.nan]),
    },
    batch_size=[4],
)  # the last row has no token: it does not count
LOGPROBS = torch.tensor([[0.0, -0.5, 0.0], [0, -4, 0], [0, -0.5, -0.5], [0, -9, -9]])  # log-ratios 1.5, -2, 1


def test_by_hand() -> None:
    mean, metrics = call(LOGPROBS, HAND, 2.0, 3.0, 5.0)
    losses = [3 * (1 - sigmoid(2 * (1.5 - 0.5))), 5 * (1 - sigmoid(2 * (0.5 + 2))), 5 * (1 - sigmoid(2 * (0.5 - 1)))]
    assert mean.total.item() == pytest.approx(sum(losses), rel=1e-5)
    assert mean.weight.item() == 3
    assert metrics == pytest.approx({"desirable_score": 3.0, "undesirable_score": -1.0, "reference_point": 0.5})


@pytest.mark.parametrize("seed", range(3))
def test_by_a_slow_loop(seed: int) -> None:
    """The value function of eq. 7 in the paper's fourth version, and the loss of its eq. 8."""
    logprobs, batch = random_rows(seed=seed)
    expected = 0.0
    for i in range(len(batch)):
        tokens = [t for t in range(5) if batch["loss_mask"][i, t]]
        r = sum(logprobs[i, t].item() - batch["ref_logprobs"][i, t].item() for t in tokens)
        z = batch["reference_point"][i].item()
        if batch["desirable"][i]:
            weight, v = 1.3, 1.3 * sigmoid(0.7 * (r - z))
        else:
            weight, v = 0.6, 0.6 * sigmoid(0.7 * (z - r))
        expected += weight - v
    assert call(logprobs, batch, 0.7, 1.3, 0.6)[0].total.item() == pytest.approx(expected)


def test_at_equal_policies_a_row_costs_half_its_weight() -> None:
    _, batch = random_rows()
    batch = batch.copy().set("reference_point", torch.zeros(6, dtype=torch.float64))
    mean, metrics = call(batch["ref_logprobs"], batch, 0.7, 1.5, 0.5)
    assert mean.total.item() == pytest.approx((4 * 1.5 + 2 * 0.5) / 2)
    assert metrics == {"desirable_score": 0.0, "undesirable_score": 0.0, "reference_point": 0.0}


@pytest.mark.parametrize("good", [True, False])
def test_a_batch_of_one_kind(good: bool) -> None:
    logprobs, batch = random_rows()
    rows = batch["desirable"] == good
    mean, metrics = call(logprobs[rows], batch[rows], 0.7)
    assert mean.weight.item() == int(rows.sum())
    assert math.isfinite(mean.total.item())
    seen, unseen = ("desirable_score", "undesirable_score")[:: 1 if good else -1]
    assert math.isfinite(metrics[seen])
    assert math.isnan(metrics[unseen])
    both = [call(logprobs[which], batch[which], 0.7)[0].total for which in (rows, ~rows)]
    torch.testing.assert_close(both[0] + both[1], call(logprobs, batch, 0.7)[0].total)
    signs = gradient(logprobs, batch, 0.7)[rows][batch["loss_mask"][rows]].sign().unique().tolist()
    assert signs == [-1.0 if good else 1.0]  # a step makes desirable answers more probable, undesirable ones less


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e4, -1e4, 0.0])
def test_extremes_are_finite(size: float, dtype: torch.dtype) -> None:
    logprobs, batch = random_rows(dtype=dtype)
    assert {part.dtype for part in call(logprobs, batch, 0.7)[0]} == {dtype}
    for point in (0.0, 1e4):
        far = batch.copy().set("reference_point", torch.full_like(batch["reference_point"], point))
        new = torch.full_like(logprobs, size).requires_grad_()
        mean, metrics = call(new, far, 0.7)
        assert bool(mean.total.isfinite())
        assert all(map(math.isfinite, metrics.values()))
        assert bool(gradient(new, far, 0.7).isfinite().all())


def test_a_small_loss_is_not_rounded_to_nothing() -> None:
    _, batch = random_rows(dtype=torch.float32)
    good = batch.copy().set("desirable", torch.ones(6, dtype=torch.bool))
    far = (good["ref_logprobs"] + 30.0 * (torch.arange(5) == 1)).requires_grad_()
    assert 0 < call(far, good, 1.0)[0].total.item() < 1e-11
    assert gradient(far, good, 1.0)[:, 1].lt(0).all()


def test_rows_without_a_token_are_not_seen() -> None:
    logprobs, batch = random_rows()
    valid = torch.tensor([True, False, True, True, False, True])
    found = call(logprobs, assign(batch, valid=valid), 0.7)[0]
    torch.testing.assert_close(found, call(logprobs[valid], batch[valid], 0.7)[0])
    none = assign(batch, valid=torch.zeros(6, dtype=torch.bool))
    for nothing, x in ((none, logprobs), (batch[:0], logprobs[:0])):
        mean, metrics = call(x, nothing, 0.7)
        assert (mean.total.item(), mean.weight.item()) == (0, 0)
        assert all(map(math.isnan, metrics.values()))


def test_what_is_constant_gets_no_gradient() -> None:
    logprobs, batch = random_rows()
    leaves = {name: batch[name].clone().requires_grad_() for name in ("ref_logprobs", "reference_point")}
    mean, _ = call(logprobs, batch.copy().update(leaves), 0.7)
    grads = torch.autograd.grad(mean.total, list(leaves.values()), allow_unused=True)
    assert all(grad is None for grad in grads)


@pytest.mark.parametrize("column", ["loss_mask", "ref_logprobs", "desirable", "reference_point"])
def test_a_missing_column_is_named(column: str) -> None:
    with pytest.raises(MissingColumn, match=rf"kto_loss reads the column '{column}'"):
        call(LOGPROBS, HAND.exclude(column), 0.1)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("name", ["beta", "desirable", "undesirable"])
def test_numbers_are_positive(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"^kto_loss: {name} is {value}; it must be positive and finite$"):
        kto_loss(**({"beta": 0.1} | {name: value}))
    assert (kto_loss(0.1).__name__, kto_loss(0.1).__doc__) == ("kto_loss", "KTO; see `nrl.algos.kto_loss`.")


# -- the reference point -----------------------------------------------------------------------------------------------


def rows_of(*rows: tuple[list[int], list[int]], extra: int = 0) -> Batch:
    """Rows of a prompt and an answer, and the answers' mask; the answer's odd tokens are a tool's, not the model's."""
    width = max(len(prompt) + len(answer) for prompt, answer in rows) + extra
    ids = torch.tensor([[*prompt, *answer, *[0] * (width - len(prompt) - len(answer))] for prompt, answer in rows])
    inside = torch.tensor([[len(prompt) <= t for t in range(width)] for prompt, _ in rows])
    return assign(
        Batch({}, batch_size=[len(rows)]),
        input_ids=ids,
        attention_mask=ids > 0,
        loss_mask=inside & (ids > 0) & (ids % 2 == 0),
    )


def parts(batch: Batch) -> list[tuple[list[int], list[bool]]]:
    """The real tokens of each row, and which are trained on. Outside them there is nothing."""
    found = []
    for ids, real, mask in zip(batch["input_ids"], batch["attention_mask"], batch["loss_mask"], strict=True):
        assert not ids[~real].any()
        assert not mask[~real].any()
        found.append((ids[real].tolist(), mask[real].tolist()))
    return found


def test_each_prompt_gets_the_next_answer() -> None:
    batch = rows_of(([1, 3], [10, 12]), ([5], [20, 21, 22]), ([7, 9, 11], [30]))
    f, t = False, True
    expected = [
        ([1, 3, 20, 21, 22], [f, f, t, f, t]),
        ([5, 30], [f, t]),
        ([7, 9, 11, 10, 12], [f, f, f, t, t]),
    ]
    assert parts(mismatched(batch)) == expected
    padded = rows_of(([1, 3], [10, 12]), ([5], [20, 21, 22]), ([7, 9, 11], [30]), extra=4)
    assert parts(mismatched(padded)) == expected
    assert mismatched(padded)["input_ids"].shape == (3, 5)


def test_prompts_without_an_answer_are_passed_over() -> None:
    batch = rows_of(([1, 3], [10, 12]), ([5], []), ([7], [20]), ([9], [30]))
    batch = assign(batch, valid=torch.tensor([True, True, True, False]))
    f, t = False, True
    assert parts(mismatched(batch)) == [
        ([1, 3, 20], [f, f, t]),
        ([5], [f]),
        ([7, 10, 12], [f, t, t]),
        ([9, 30], [f, f]),
    ]


def test_a_row_alone_measures_nothing() -> None:
    other = mismatched(rows_of(([1, 3], [10, 12])))
    assert parts(other) == [([1, 3, 10, 12], [False] * 4)]
    numbers = torch.ones(1, 4)
    assert reference_point(numbers, -numbers, other["loss_mask"]).item() == 0


def test_an_empty_batch() -> None:
    other = mismatched(rows_of(([1], [2]))[:0])
    assert other["input_ids"].shape[0] == 0
    assert reference_point(torch.zeros(0, 2), torch.zeros(0, 2), torch.zeros(0, 2, dtype=torch.bool)).item() == 0


def test_as_many_times_as_there_are_rows_gives_the_rows_back() -> None:
    batch = rows_of(([1, 3], [10, 12]), ([5], [20, 21, 22]), ([7, 9, 11], [30]))
    other = batch
    for _ in range(3):
        other = mismatched(other)
    assert parts(other) == parts(batch)


def test_of_the_other_columns_the_temperature_stays() -> None:
    batch = assign(rows_of(([1], [2]), ([3], [4])), temperature=torch.tensor([0.5, 1.0]), rewards=torch.zeros(2))
    other = mismatched(batch)
    assert set(other.keys()) == {"input_ids", "attention_mask", "loss_mask", "temperature"}
    assert other["temperature"].tolist() == [0.5, 1.0]
    assert other.is_locked


def test_mismatched_says_what_it_needs() -> None:
    batch = rows_of(([1], [2]), ([3], [4]))
    with pytest.raises(MissingColumn, match="mismatched reads the column 'attention_mask'"):
        mismatched(batch.exclude("attention_mask"))
    with pytest.raises(BatchError, match=r"mismatched: loss_mask has shape \[1, 2, 2\]; give rows"):
        mismatched(batch.reshape(1, 2))


def test_the_reference_point_of_one_row_is_its_log_ratio() -> None:
    ours = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    theirs = torch.tensor([[-2.0, -3.0]], requires_grad=True)
    found = reference_point(ours, theirs, torch.tensor([[True, True]]))
    assert found.item() == 3
    assert not found.requires_grad


def test_reference_point_by_hand() -> None:
    mask = torch.tensor([[0, 1, 1], [0, 1, 0], [0, 0, 0]]).bool()
    ours = torch.tensor([[math.nan, -1.0, -2.0], [0.0, -3.0, math.inf], [5.0, 5.0, 5.0]], requires_grad=True)
    theirs = torch.tensor([[0.0, -2.0, -5.0], [0.0, -2.0, 0.0], [0.0, 0.0, 0.0]])
    found = reference_point(ours, theirs, mask)
    assert (found.item(), found.shape, found.requires_grad) == (1.5, (), False)  # (4 - 1) / 2
    assert reference_point(theirs, ours, mask).item() == 0
    assert reference_point(ours, theirs, torch.zeros_like(mask)).item() == 0
    with pytest.raises(BatchError, match=r"x has shape \[2, 3\]"):
        reference_point(ours[:2], theirs, mask)


def test_with_a_trainer() -> None:
    """The recipe of the module: at the start the point is 0, later what a loop over the rows says."""
    batch = rows_of(([1, 3], [10, 12]), ([5], [20, 21, 22]), ([7, 9, 11], [30]))
    batch = assign(batch, desirable=torch.tensor([True, False, True]))
    with nrl.cluster("local") as cluster:
        trainer = fsdp.trainer(cluster.reserve(1), tiny.model(), adamw(lr=1e-2))
        state, reference, other = trainer.init(), trainer.load(), mismatched(batch)
        batch = assign(batch, ref_logprobs=trainer.logprobs(reference, batch))
        step = trainer.train_step(kto_loss(0.1))
        for _ in range(2):
            ours, theirs = (trainer.logprobs(params, other).result() for params in (state.params, reference))
            point = reference_point(ours, theirs, other["loss_mask"])
            state, metrics = step(state, assign(batch, reference_point=point.expand(len(batch))))
            ratios = (ours - theirs) * other["loss_mask"]
            assert point.item() == pytest.approx(max(0.0, sum(row.sum().item() for row in ratios) / 3), abs=1e-6)
            assert finalize(metrics.result())["reference_point"] == pytest.approx(point.item(), abs=1e-6)
