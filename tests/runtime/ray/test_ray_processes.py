"""What the driver sends to the processes of a mesh, without any: what actors would get is written down."""

import pickle
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import nrl
from benchmarks.driver import Nowhere, Parts, stood_in
from nrl.batch import Batch, deal
from nrl.runtime import P, shard_map
from nrl.runtime.mesh.placement import Mesh
from nrl.runtime.ray.codec.messages import CACHED_FUNCTIONS, decode
from nrl.runtime.ray.codec.pickling import deserialize, serialize
from nrl.runtime.ray.results import Pending, PendingRows

RANKS = 3


@pytest.fixture
def cluster() -> Iterator[Nowhere]:
    with stood_in(Parts()), Nowhere("nowhere") as entered:
        nothing = serialize(None, "")
        entered.replies.each = lambda rank: [nothing]
        yield entered


@pytest.fixture
def mesh(cluster: Nowhere) -> Mesh:
    return cluster.reserve(RANKS).mesh(executable="system")


@pytest.fixture
def puts(cluster: Nowhere, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    put = sys.modules["ray"].put

    def noted(value: Any) -> Any:
        found.append(value)
        return put(value)

    monkeypatch.setattr(sys.modules["ray"], "put", noted)
    return found


def add(offset: Tensor, x: Tensor) -> Tensor:
    return x + offset.sum()


def test_a_large_function_is_put_once(mesh: Mesh, puts: list[Any]) -> None:
    fn = partial(add, torch.ones(50_000))
    for _ in range(3):
        shard_map(fn, mesh, P("dp"), P())(torch.zeros(6))
    assert len(puts) == 1
    fn.args[0][0] = 2.0  # it is another one now
    shard_map(fn, mesh, P("dp"), P())(torch.zeros(6))
    assert len(puts) == 2


def test_as_many_large_functions_are_kept_as_processes_remember(mesh: Mesh, puts: list[Any]) -> None:
    kept: Any = mesh.processes.stored.functions  # type: ignore[attr-defined]
    first = partial(add, torch.full((20_000,), -1.0))
    for number in range(CACHED_FUNCTIONS + 3):
        shard_map(partial(add, torch.full((20_000,), float(number))), mesh, P("dp"), P())(torch.zeros(6))
        shard_map(first, mesh, P("dp"), P())(torch.zeros(6))
    assert len(kept) == CACHED_FUNCTIONS
    assert len(puts) == CACHED_FUNCTIONS + 4  # the first, which is always used, is not put again


def skewed(rows: int = 60, width: int = 2048) -> Batch:
    mask = torch.arange(width) < torch.tensor([width, *range(1, rows)]).view(-1, 1)
    ids = torch.arange(rows * width).view(rows, width) * mask
    return nrl.assign(
        Batch({}, batch_size=[rows]), input_ids=ids, attention_mask=mask, versions=torch.where(mask, 1, -1)
    )


@pytest.mark.parametrize("locked", [True, False])
def test_shards_travel_without_padding_and_arrive_whole(cluster: Nowhere, mesh: Mesh, locked: bool) -> None:
    batch = skewed() if locked else skewed().clone()
    assert batch.is_locked == locked
    sent: list[Any] = []
    cluster.replies.sent = sent.append
    shard_map(lambda shard: None, mesh, P("dp"), P())(batch)
    tokens = int(batch["attention_mask"].sum())
    size = sum(len(pickle.dumps([getattr(arg, "held", arg) for arg in args])) for args in sent)
    assert tokens * 17 < size < tokens * 17 + RANKS * 10_000 < batch["input_ids"].numel() * 17 / 10
    assert len(sent) == RANKS
    for args, rows in zip(sent, deal(batch, RANKS), strict=True):
        order, beside = decode(args[0], [pickle.loads(ref.held[0], buffers=ref.held[1:]) for ref in args[1:]])
        [place] = order.args[0].parts
        found, _ = deserialize(beside[place])
        assert found.is_locked
        assert (found == batch[rows]).all()


def test_shards_are_packed_once_for_a_batch(mesh: Mesh) -> None:
    stored: Any = mesh.processes.stored.batches  # type: ignore[attr-defined]
    batch = skewed()
    for _ in range(2):
        shard_map(lambda shard: None, mesh, P("dp"), P())(batch)
        assert len(stored) == RANKS
    batch["input_ids"][0, 0] = 7
    shard_map(lambda shard: None, mesh, P("dp"), P())(batch)
    assert len(stored) == 2 * RANKS
    del batch
    assert not stored


def test_a_result_that_holds_just_some_rows_is_found() -> None:
    rows = [
        torch.tensor([1, 2]),
        torch.tensor([], dtype=torch.int64),
        torch.tensor([0]),
        torch.tensor([], dtype=torch.int64),
    ]
    pending: Any = Pending(None, ["a", "b", "c", "d"], list, rows, None)  # type: ignore[arg-type]
    assert [PendingRows(pending, index).find_exact_result() for index in (rows[2].clone(), rows[0], rows[3])] == [
        "c",
        "a",
        "b",
    ]
    assert PendingRows(pending, torch.tensor([1])).find_exact_result() is None
    assert PendingRows(Pending(None, ["a"], list, None, None), rows[0]).find_exact_result() is None  # type: ignore[arg-type]
