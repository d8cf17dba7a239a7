import math

import pytest
import torch
from tensordict import TensorDict

from nrl.algos import masked, masked_column
from nrl.errors import BatchError, MissingColumn


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_garbage_reaches_neither_value_nor_gradient(garbage: float) -> None:
    x = torch.tensor([2.0, garbage], requires_grad=True)
    y = masked(x, torch.tensor([True, False])).exp()
    y.sum().backward()
    assert y.tolist() == pytest.approx([math.exp(2), 1])
    assert x.grad is not None
    assert x.grad.tolist() == pytest.approx([math.exp(2), 0])


def test_dtype_is_kept() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
        assert masked(torch.ones(2, dtype=dtype), torch.tensor([True, False])).dtype == dtype


def test_nothing_is_broadcast() -> None:
    with pytest.raises(BatchError, match=r"masked: x has shape \[2\] and the mask \[2, 3\]"):
        masked(torch.ones(2), torch.ones(2, 3, dtype=torch.bool))


def test_the_mask_is_bool() -> None:
    with pytest.raises(BatchError, match=r"dtype torch.int64; it must be bool"):
        masked(torch.ones(2), torch.ones(2, dtype=torch.int64))


def test_a_column_is_a_masked_constant() -> None:
    values = torch.tensor([[3.0, math.nan]], requires_grad=True)
    batch = TensorDict({"values": values, "loss_mask": torch.tensor([[True, False]])}, batch_size=[1])
    found = masked_column(batch, "values", reader="my_loss")
    assert found.tolist() == [[3, 0]]
    assert not found.requires_grad


@pytest.mark.parametrize("column", ["values", "loss_mask"])
def test_a_missing_column_is_named(column: str) -> None:
    columns = {"values": torch.zeros(1, 2), "loss_mask": torch.ones(1, 2, dtype=torch.bool)}
    del columns[column]
    with pytest.raises(MissingColumn, match=f"my_loss reads the column '{column}'"):
        masked_column(TensorDict(columns, batch_size=[1]), "values", reader="my_loss")
