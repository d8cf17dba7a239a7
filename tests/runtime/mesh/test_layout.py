import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import nrl
from nrl import Layout, P, resident, shard_map, tiny
from nrl.algos import sft_loss
from nrl.backends import TRAINERS, adamw, fsdp
from nrl.batch.metrics import Sum, finalize
from nrl.errors import PlacementError
from nrl.runtime import Cluster

SQUARE = Layout(dp=2, tp=3, cp=2, pp=2)


def test_ranks_are_numbered_from_the_last_axis() -> None:
    places = list(itertools.product(range(2), range(2), range(2), range(3)))
    assert [tuple(SQUARE.coordinates(rank).values()) for rank in range(SQUARE.slots)] == places
    assert SQUARE.slots == 24


@pytest.mark.parametrize("layout", [Layout(3), Layout(2, tp=2), Layout(2, cp=2), SQUARE, Layout(pp=4)])
def test_the_first_rank_of_the_last_stage_speaks_for_a_shard(layout: Layout) -> None:
    for shard in range(layout.dp):
        assert layout.coordinates(layout.shard_leader(shard)) == {"pp": layout.pp - 1, "dp": shard, "cp": 0, "tp": 0}


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"dp": 0}, "'dp' must be >= 1: 0"),
        ({"tp": 0}, "'tp' must be >= 1: 0"),
        ({"dp": 4, "shard": 3}, "shard=3 does not divide dp=4"),
        ({"dp": 4, "shard": 0}, "'shard' must be >= 1: 0"),
        ({"dp": 2, "cp": 2, "pp": 3, "ep": 3}, "ep=3 does not divide dp x cp x tp = 4"),
        ({"vp": 2}, "vp=2 splits the stages of a pipeline, and pp=1 has none"),
    ],
)
def test_a_layout_that_cannot_be(axes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(**axes)
    fit = {"dp": 4, "shard": 2, "cp": 2, "pp": 2, "ep": 8, "vp": 2}
    assert pickle.loads(pickle.dumps(Layout(**fit))) == Layout(**fit)


def test_a_mesh_of_a_layout(local: Cluster) -> None:
    mesh = local.reserve(24).mesh(layout=SQUARE)
    assert mesh.axes == {"dp": 2, "tp": 3, "pp": 2, "cp": 2}
    assert (mesh.layout, mesh.size, mesh.called_shards) == (SQUARE, 24, [0, 1])
    assert local.reserve(24).mesh(tp=3, cp=2, pp=2).layout == SQUARE
    with pytest.raises(PlacementError, match="mesh: dp=2, tp=1, pp=1, cp=1 and a layout; give one of the two"):
        local.reserve(24).mesh(dp=2, layout=SQUARE)
    with pytest.raises(PlacementError, match="mesh: dp=2 tp=3 pp=2 cp=2 is 24 processes, but there are 4 slots"):
        local.reserve(4).mesh(layout=SQUARE)
    with pytest.raises(PlacementError, match=r"trainer: layout=Layout\(dp=4, .*but a mesh was given that has .* leave"):
        nrl.runtime.as_mesh(mesh, "base", "trainer", Layout(4))


def test_one_process_stands_for_all_axes(local: Cluster) -> None:
    """It is called once for each shard, and what stays there is there once for each call."""
    mesh, calls = local.reserve(8).mesh(dp=2, tp=2, cp=2), list[int]()

    def inside(x: Tensor, more: Any) -> tuple[Tensor, Tensor, Any, int]:
        calls.append(len(x))
        return 2 * x, x.sum() * 0 + 7, {"rows": Sum(torch.tensor(len(x)))}, len(calls)

    outs = (P("dp"), P(), nrl.merged, resident)
    doubled, same, rows, kept = shard_map(inside, mesh, (P("dp"), P()), outs)(torch.arange(5), "all")
    assert doubled.result().tolist() == [0, 2, 4, 6, 8]
    assert (int(same.result()), int(rows.result()["rows"].total), calls) == (7, 5, [3, 2])
    number = shard_map(lambda x, n: x * 0 + n, mesh, (P("dp"), resident), P("dp"))
    assert number(torch.arange(4), kept).result().tolist() == [1, 1, 2, 2]
    assert shard_map(lambda: 3, mesh, (), P())().result() == 3


def test_a_trainer_takes_every_axis_as_one_copy(local: Cluster) -> None:
    found = []
    for layout in (Layout(2), Layout(2, tp=2, cp=2), Layout(2, pp=2, vp=2, ep=2)):
        trainer = TRAINERS["fsdp"](local.reserve(layout.slots), tiny.model(), adamw(lr=1e-2), layout=layout)
        state, metrics = trainer.train_step(sft_loss)(trainer.init(), tiny.sums(8).take(1)[0])
        found.append((finalize(metrics.result())["loss"], dict(state.params.tensors())))
    for loss, weights in found[1:]:
        assert loss == found[0][0]
        assert all(torch.equal(weights[name], value) for name, value in found[0][1].items())


def test_fsdp_knows_dp_alone(local: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = local.reserve(4)
    monkeypatch.setattr(type(local), "remote", True)
    for layout in (Layout(2, tp=2), Layout(4, shard=2), Layout(2, pp=2)):
        with pytest.raises(PlacementError, match=r"fsdp.trainer: found Layout\(dp=.*it shards a model over all of dp"):
            fsdp.trainer(slots, tiny.model(), adamw(lr=1e-2), layout=layout)
