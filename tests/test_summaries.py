import math

import pytest
import torch

import nrl
from nrl.errors import MissingColumn
from nrl.reduce import finalize
from nrl.summaries import summary

# --- summary


def test_summary_by_hand() -> None:
    batch = nrl.assign(
        nrl.Batch({}, batch_size=[3]),
        input_ids=torch.zeros(3, 4, dtype=torch.int64),
        loss_mask=torch.tensor([[False, True, True, True], [False, True, False, False], [False, True, True, False]]),
        rewards=torch.tensor([1.0, 0.5, math.nan]),
        valid=torch.tensor([True, True, False]),
        truncated=torch.tensor([True, False, True]),
        dropped=torch.tensor([2, 0, 0]),
        dropped_rewards=torch.tensor([2.0, 0.0, 0.0]),
    )
    assert finalize(summary(batch)) == {
        "reward": 3.5 / 4,
        "reward/max": 1.0,
        "length": 2.0,
        "length/max": 3.0,
        "truncated": 0.5,
        "invalid": 1.0,
        "dropped": 2.0,
    }


def test_summary_needs_rewards() -> None:
    with pytest.raises(MissingColumn, match=r"summary reads the column 'rewards'"):
        summary(nrl.Batch({"input_ids": torch.zeros(1, 1)}, batch_size=[1]))
