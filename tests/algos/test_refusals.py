"""What functions of the user's return, outputs that are declared, and reports that only some batches have."""

import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import nrl
from nrl import algos
from nrl.algos import from_logits, needs, output_shape
from nrl.batch import Batch
from nrl.batch.ragged import make_ragged, rows_of
from nrl.batch.values import check_batch
from nrl.errors import ArgumentError, BatchError, NotFinite

REWARDS, GROUPS = torch.tensor([1.0, 0.0]), torch.tensor([3, 3])


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ([1.0, 0.0], BatchError, "return a tensor"),
        (torch.zeros(3), BatchError, r"returned shape \[3\]; return one number for each"),
        (torch.zeros(2, dtype=torch.complex64), BatchError, "return real numbers"),
        (torch.tensor([1.0, math.inf]), NotFinite, "returned inf; guard what it divides by"),
    ],
)
def test_a_function_of_one_group_returns_finite_numbers(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        algos.per_group(lambda rewards: value)(REWARDS, GROUPS)


def test_an_estimator_takes_a_batch_and_gives_finite_advantages() -> None:
    mask = torch.tensor([[False, True], [False, True]])
    batch = Batch({"loss_mask": mask, "rewards": REWARDS, "group_ids": GROUPS}, batch_size=[2])
    with pytest.raises(ArgumentError, match="takes rewards and groups, and not a batch; give from_rewards"):
        algos.advantages(batch, algos.leave_one_out)  # type: ignore[arg-type]
    with pytest.raises(NotFinite, match="returned nan for row 0, token 1; guard"):
        algos.advantages(batch, lambda batch: torch.full((2, 2), math.nan))
    bare = algos.advantages(batch.exclude("loss_mask").lock_(), lambda batch: torch.zeros(2, 2))
    assert bare["advantages"].shape == (2, 2)


def log_z(logits: Tensor) -> Tensor:
    return logits.logsumexp(-1)


def test_functions_of_logits_are_declared_by_name() -> None:
    one, three = from_logits(log_z, name="mine"), from_logits(log_z, k=3, name="mine")
    with pytest.raises(ValueError, match="'from_logits\\(mine\\)' stands for two different functions of logits"):
        needs(one, three)(lambda out, batch: ...)
    again = pickle.loads(pickle.dumps(one))
    assert again.is_same(one)
    assert not one.is_same(three)
    for wrong, message in (
        ({"fn": 3}, "from_logits: fn is 3; give a function"),
        ({"fn": log_z, "k": 0}, "from_logits: k is 0; it must be at least 1"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            from_logits(**wrong)
    with pytest.raises(TypeError, match="3 is not the name of a column"):
        from_logits(log_z, 3)  # type: ignore[arg-type]


def test_shapes_of_large_outputs() -> None:
    batch = Batch({"input_ids": torch.ones(2, 5, dtype=torch.int64)}, batch_size=[2])
    assert output_shape(from_logits(log_z), batch) == (2, 5)
    assert output_shape(from_logits(log_z, "input_ids", k=3), batch) == (2, 5, 3)
    assert output_shape("logits", batch, {"logits": 7}) == (2, 5, 7)
    with pytest.raises(ValueError, match="H of hidden_states is the model's; give widths="):
        output_shape("hidden_states", batch)


def test_batches_in_the_place_of_one() -> None:
    batch = Batch({"rewards": REWARDS}, batch_size=[2])
    check_batch("assign", batch)
    with pytest.raises(ArgumentError, match=r"give one batch: nrl.concatenate\(batches\)"):
        check_batch("assign", [batch, batch])
    with pytest.raises(ArgumentError, match=r"such as nrl.data.supervised"):
        check_batch("assign", "rows")


def test_reports_that_only_one_batch_has_are_nan_in_the_other() -> None:
    one = Batch({"rewards": REWARDS, "reward/a": REWARDS}, batch_size=[2])
    assert nrl.concatenate([one, one.exclude("reward/a").lock_()])["reward/a"].isnan().tolist() == [
        False, False, True, True,
    ]  # fmt: skip


def test_numbers_of_turns_that_only_one_batch_has_are_nan_in_the_others() -> None:
    turns = torch.tensor([[-1, 0, 1], [-1, 0, 0]])

    def rows(**info: list[Tensor]) -> Batch:
        columns: dict[str, Any] = {"turns": turns, "input_ids": torch.ones_like(turns)}
        if info:
            columns["info"] = Batch({name: make_ragged(values) for name, values in info.items()}, batch_size=[2])
        return Batch(columns, batch_size=[2])

    numbers = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
    whole = nrl.concatenate([rows(a=numbers), rows(b=numbers), rows()])
    assert [len(row) for row in rows_of(whole["info"]["a"])] == [2, 1] * 3
    assert [bool(row.isnan().all()) for row in rows_of(whole["info"]["a"])] == [False, False, True, True, True, True]


@pytest.mark.parametrize("part", ["ratio", "aggregate"])
def test_what_makes_a_part_of_a_policy_loss_has_to_be_called(part: str) -> None:
    made: dict[str, Any] = {part: algos.product_ratio if part == "ratio" else algos.seq_sum}
    with pytest.raises(
        ArgumentError, match=f"policy_loss: {part} is the function .*, which makes one; call it"
    ) as raised:
        algos.policy_loss(algos.clip(0.2), **made)
    assert raised.value.argument == part
