"""Weights between trainers that share a model among other numbers of processes, to a sampler, and into a folder."""

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import nrl
from nrl import tiny
from nrl.algos import sft_loss
from nrl.backends import Model, Sampling, adamw, fsdp, hf
from nrl.backends.training import weight_stream
from nrl.batch import Batch
from nrl.runtime import Cluster
from nrl.runtime.mesh.rpc import from_all
from tests.meshes import end
from tests.weights import assert_equal, weights

pytestmark = pytest.mark.ray


def small_buckets() -> None:
    weight_stream._BUCKET = 200_000


EXPERTS = {"model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@pytest.mark.parametrize("fields", [pytest.param({}, marks=pytest.mark.slow), EXPERTS], ids=["dense", "experts"])
def test_from_two_processes_to_three(fields: dict[str, Any], on_ray: Cluster, tmp_path: Path) -> None:
    """Of uneven parts, in several buckets; every number arrives as it was."""
    slots, model = on_ray.reserve(4), tiny.model()
    model = attrs.evolve(model, source={**model.source, **fields})  # type: ignore[dict-item]
    two, three, one = (slots[part].mesh(executable="system") for part in (slice(0, 2), slice(0, 3), slice(3, 4)))
    for mesh in (two, three):
        from_all(mesh, "test", small_buckets)
    source, other = fsdp.trainer(two, model, adamw(lr=1e-2)), fsdp.trainer(three, model, adamw(lr=1e-2))
    state, _ = source.train_step(sft_loss)(source.init(), tiny.sums(8).take(1)[0])
    expected = weights(state)
    assert len(list(state.params.buckets())) > 4
    copied = other.init(state.params)
    assert_equal(weights(copied), expected)
    sampler = hf.sampler(one, model)
    nrl.publish(copied.params, sampler)
    again = other.init(copied.params)  # of the same processes
    other.export(again.params, tmp_path)
    assert_equal(weights(fsdp.trainer(one, Model(str(tmp_path)), adamw(lr=1e-2)).load()), expected)
    (row,) = sampler.generate([[5, 6, 7]], sampling=Sampling(temperature=0, max_new_tokens=4)).result()
    ids = torch.tensor([[5, 6, 7, *row.token_ids.tolist()]])
    batch = Batch({"input_ids": ids, "attention_mask": ids > -1}, batch_size=[1]).lock_()
    torch.testing.assert_close(row.logprobs, other.logprobs(again.params, batch).result()[0, 3:], atol=1e-5, rtol=0)
    end(two, three, one)
