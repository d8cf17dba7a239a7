"""Each layout with each kind of loss, and the laws in each layout, against the torch engine in one process."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import nrl
from nrl import algos
from nrl.backends.training.loss.batch_checks import with_shares
from nrl.backends.training.loss.loss_terms import global_weights
from nrl.backends.training.weight_stream import iter_full_weights
from nrl.batch import Batch
from nrl.batch.metrics import finalize
from nrl.runtime import Layout
from tests.backends.megatron.test_experts import MIXTRAL, QWEN
from tests.backends.megatron.test_megatron_engine import (
    MODEL,
    ROUTED,
    cut,
    engine,
    parts,
    rows,
    same,
    steps,
    torch_engine,
)
from tests.backends.processes import Processes
from tests.metrics import assert_same_steps
from tests.properties.strategies import forked
from tests.weights import assert_close

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(600)]

EXACT = QWEN | {"dtype": "float64"}
TIED = {"tie_word_embeddings": True}
LAYOUTS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "tp=2, without sequence parallelism": (Layout(tp=2), {"options": {"sequence_parallel": False}}),
    "pp=2, tied": (Layout(pp=2), TIED),
    "pp=2, vp=2": (Layout(pp=2, vp=2), {}),
    "pp=2, vp=2, tied": (Layout(pp=2, vp=2), TIED),
    "pp=4": (Layout(pp=4), {}),
    "tp=2, pp=2": (Layout(tp=2, pp=2), {}),
    "tp=2, cp=2": (Layout(tp=2, cp=2), {}),
    "pp=2, cp=2": (Layout(pp=2, cp=2), {}),
    "dp=2, tp=2": (Layout(dp=2, tp=2), {}),
    "dp=2, pp=2": (Layout(dp=2, pp=2), {}),
    "dp=4, shard=2": (Layout(dp=4, shard=2), {}),
    "ep=2": (Layout(dp=2, ep=2), EXACT),
    "tp=2, ep=2": (Layout(tp=2, ep=2), EXACT),
    "dp=4, ep=2": (Layout(dp=4, ep=2), EXACT),
    "dp=4, ep=4": (Layout(dp=4, ep=4), EXACT),
    "dp=2, tp=2, ep=4": (Layout(dp=2, tp=2, ep=4), EXACT),
    "dp=2, pp=2, ep=2": (Layout(dp=2, pp=2, ep=2), EXACT),
    "mixtral, tp=2, ep=2": (Layout(tp=2, ep=2), MIXTRAL),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("name", ["sft", "dpo", "grpo", "value", "distillation"])
def test_every_layout_has_the_numbers_of_one_process(two: Processes, four: Processes, kind: str, name: str) -> None:
    layout, fields = LAYOUTS[kind]
    same(two if layout.slots == 2 else four, layout, name, **fields)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [name for name, (_, fields) in LAYOUTS.items() if fields is EXACT])
def test_every_layout_replays_routes(two: Processes, four: Processes, kind: str) -> None:
    layout, fields = LAYOUTS[kind]
    same(two if layout.slots == 2 else four, layout, ROUTED, **fields)


def changed(batch: Batch, how: str) -> Batch:
    if how == "forked":
        return with_shares(forked(batch))
    if how == "in another order":
        return batch[torch.tensor([3, 0, 7, 4, 1, 6, 2, 5])]
    return nrl.pad(batch, 24) if how == "padded" else batch


def in_process(
    mesh: DeviceMesh | None, layout: Layout, how: str, packing: Any
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """A step, by each process of a mesh; None: by the torch engine in one, on the rows as they are."""
    made: Any = torch_engine(MODEL) if mesh is None else engine(mesh, layout, MODEL, packing)
    rank, group = (0, None) if mesh is None else (mesh.get_rank(), made._groups.peers.group)
    batch = changed(rows("grpo"), how).lock_()
    weights = global_weights(algos.grpo_loss, batch, always={"logprobs"})
    state, metrics = made.train(made.init(), algos.grpo_loss, cut(batch, layout, rank, 3), weights)
    return finalize(metrics), dict(iter_full_weights(made.pieces(made.params(state)), "test", group))


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2), Layout(cp=2), Layout(dp=2)], ids=str)
@pytest.mark.parametrize("how", ["in another order", "padded", "as sequences"])
def test_order_padding_and_packing_cannot_be_seen(two: Processes, layout: Layout, how: str) -> None:
    metrics, weights = in_process(None, Layout(), "", None)
    packing = nrl.Sequences if how == "as sequences" or layout.cp > 1 else nrl.Rectangles
    for found, tensors in two(in_process, layout, how, packing):
        assert_same_steps([found], [metrics], 1e-5)
        assert_close(tensors, weights, 1e-5)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2), Layout(cp=2), Layout(dp=2)], ids=str)
def test_a_forked_episode_counts_once(two: Processes, layout: Layout) -> None:
    metrics, weights = in_process(None, Layout(), "", None)
    for found, tensors in two(in_process, layout, "forked", None):
        assert_same_steps([found], [metrics | {"tokens": found["tokens"]}], 1e-5)
        assert_close(tensors, weights, 1e-5)


def threads(mesh: DeviceMesh, layouts: list[Layout]) -> list[int]:
    """How many threads Linux, where alone Megatron runs, lists after each of some engines, which are gone."""
    found = []
    gc.collect()
    gc.disable()  # as if Python did not happen to collect
    try:
        for layout in layouts:
            made = engine(mesh, layout, MODEL)
            steps(made, "sft", parts(rows("sft"), layout, mesh.get_rank()), made._groups.peers.group)
            del made
            found.append(len(list(Path("/proc/self/task").iterdir())))
    finally:
        gc.enable()
    return found


def test_an_earlier_layout_leaves_no_thread(two: Processes) -> None:
    """Each of gloo's would wake a hundred times in a second, for as long as the process lives."""
    for found in two(threads, [Layout(tp=2), Layout(dp=2), Layout(cp=2), Layout(tp=2)]):
        assert len(set(found)) == 1
