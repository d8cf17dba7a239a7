"""Ragged and declared columns in other processes."""

import pytest
import torch
from torch import Tensor

import nrl
from nrl.batch import Batch, assign, microbatches
from nrl.batch.ragged import make_ragged, rows_of
from nrl.runtime import Cluster, P, shard_map

pytestmark = pytest.mark.ray


def in_parts(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """What two columns are as wide as in micro-batches, and the media."""
    parts = microbatches(batch, max_tokens=4)
    widths = [torch.tensor([part[name].shape[1]]).expand(len(part)) for part in parts for name in ("mine", "numbers")]
    return parts.restore(widths[::2]), parts.restore(widths[1::2]), batch["media"]


def test_columns_are_what_they_are_declared_to_be_in_other_processes(on_ray: Cluster) -> None:
    nrl.declare(mine="token", numbers="row")
    mask = torch.arange(4) < torch.tensor([[2], [4], [3]])
    batch = assign(
        Batch({}, batch_size=[3]), input_ids=mask.long(), attention_mask=mask, mine=torch.zeros(3, 4),
        numbers=torch.zeros(3, 4), media=make_ragged([torch.ones(2, 3), torch.ones(0, 3), torch.full((1, 3), 2.0)]),
    )  # fmt: skip
    with nrl.cluster("local") as local:
        for cluster in (on_ray, local):
            mesh = cluster.reserve(2).mesh(executable="system")
            mine, numbers, media = (x.result() for x in shard_map(in_parts, mesh, P("dp"), (P("dp"),) * 3)(batch))
            assert mine.tolist() == [2, 4, 3]
            assert numbers.tolist() == [4, 4, 4]
            assert [row.sum().item() for row in rows_of(media)] == [6, 0, 6]
