"""The law of pieces: however the senders and the receivers cut a weight, each number arrives once, in its place."""

import itertools
from collections.abc import Iterator, Sequence
from math import prod

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nrl.backends.models.shards import ShardAssembler, ShardLoader, fill, full_shard, full_shards, overlap
from nrl.backends.training import weight_stream
from nrl.backends.training.weight_stream import WeightStream, iter_full_weights, next_bucket, receive_bucket
from nrl.backends.types import Piece
from nrl.errors import CorruptedTransfer, ModelError
from nrl.runtime.transfer import by_value
from tests.backends.processes import Processes


@pytest.fixture(scope="module")
def three() -> Iterator[Processes]:
    processes = Processes(3)
    yield processes
    processes.close()


SHAPES = {"embed": (7, 4), "norm": (5,), "scale": (), "experts": (3, 4, 2), "head": (1, 6), "none": (0, 3)}


def coded() -> dict[str, Tensor]:
    """Each number says which one it is."""
    sizes = list(itertools.accumulate((prod(shape) for shape in SHAPES.values()), initial=1))
    return {
        name: torch.arange(first, first + prod(shape), dtype=torch.float64).view(shape)
        for (name, shape), first in zip(SHAPES.items(), sizes, strict=False)
    }


def blocks(draw: st.DrawFn, tensor: Tensor, n: int) -> list[tuple[slice, ...]]:
    """Places of ``n`` blocks beside each other, cut along one dimension; some may be empty."""
    every = tuple(slice(0, size) for size in tensor.shape)
    if not tensor.ndim:
        return [every]
    dim = draw(st.integers(0, tensor.ndim - 1))
    cuts = sorted(draw(st.lists(st.integers(0, tensor.shape[dim]), min_size=n - 1, max_size=n - 1)))
    ends = zip([0, *cuts], [*cuts, tensor.shape[dim]], strict=True)
    return [(*every[:dim], slice(a, b), *every[dim + 1 :]) for a, b in ends]


@st.composite
def cut(draw: st.DrawFn, tensors: dict[str, Tensor], n: int) -> list[list[Piece]]:
    """The pieces of ``n`` processes, in the order of the weights; what cannot be cut, the first one has."""
    found: list[list[Piece]] = [[] for _ in range(n)]
    for name, tensor in tensors.items():
        for process, index in zip(found, blocks(draw, tensor, n), strict=False):
            process.append(Piece(name, tuple(tensor.shape), index, tensor[index]))
    return found


def sent(processes: Sequence[Sequence[Piece]]) -> Iterator[list[Piece]]:
    """What arrives, bucket by bucket."""
    readings, more = [WeightStream(pieces) for pieces in processes], True
    while more:
        each = [next_bucket("test", by_value, False, one) for one in readings]
        more = any(going_on for _, going_on in each)
        yield list(receive_bucket([result for result, _ in each]))


@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, 100, 10_000]))
def test_each_number_arrives_once_in_its_place(data: st.DataObject, n: int, m: int, size: int) -> None:
    expected = coded()
    source = data.draw(cut(expected, n))
    empty = {name: torch.full_like(x, -1) for name, x in expected.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_stream, "_BUCKET", size)
        buckets = list(sent(source))
    assert sum(piece.tensor.numel() for bucket in buckets for piece in bucket) == sum(map(prod, SHAPES.values()))
    for number, own in enumerate(data.draw(cut(empty, m))):  # views of one tensor: together they have to fill it
        filling = ShardLoader({piece.name: piece for piece in own}, "test")
        for bucket in buckets:
            filling.add([piece for piece in bucket if piece.name != "scale" or number == 0])
        filling.end()
    assert all(torch.equal(empty[name], x) for name, x in expected.items())
    joining = ShardAssembler()
    joined = {name: x for bucket in buckets for name, x in joining.add(bucket)}
    joining.end("test")
    assert joined.keys() == expected.keys()
    assert all(torch.equal(joined[name], x) for name, x in expected.items())


def test_fused_and_tied_weights() -> None:
    """An engine may hold several weights in one tensor, and one weight under two names; its pieces are views."""
    heads, wide = 4, 3
    q, k, v = (torch.arange(12.0).view(heads, wide) + 100 * each for each in range(3))

    def fused(rank: int, ranks: int) -> tuple[Tensor, dict[str, Piece]]:
        size = heads // ranks
        held, rows = torch.full((3 * size, wide), -1.0), slice(rank * size, (rank + 1) * size)
        views = dict(zip("qkv", held.split(size), strict=True))
        return held, {name: Piece(name, (heads, wide), (rows, slice(0, wide)), view) for name, view in views.items()}

    senders = [fused(rank, 2) for rank in range(2)]
    for rank, (_, own) in enumerate(senders):
        fill(own, [full_shard("q", q), full_shard("k", k), full_shard("v", v)], caller="test")
        assert own["v"].tensor.equal(v[2 * rank : 2 * rank + 2])
    for rank in range(4):
        held, own = fused(rank, 4)
        fill(own, [piece for _, pieces in senders for piece in pieces.values()], caller="test")
        assert held.equal(torch.stack([q[rank], k[rank], v[rank]]))
    embedding = torch.zeros(2)
    tied = full_shards({"embed": embedding, "head": embedding})
    assert tied["embed"] is tied["head"]
    fill(tied, [full_shard("head", torch.ones(2))], caller="test")
    assert embedding.equal(torch.ones(2))
    halves = [
        Piece(name, (2,), (slice(i, i + 1),), torch.full((1,), 2.0)) for i in (0, 1) for name in ("embed", "head")
    ]
    fill(tied, halves, caller="test")  # of both names, in turns
    with pytest.raises(ModelError, match=r"test: 'head' came twice with different values, or is tied to another"):
        fill(tied, [*halves[:-1], attrs.evolve(halves[-1], tensor=torch.zeros(1))], caller="test")


def test_what_is_missing_or_overlaps_is_said() -> None:
    def own() -> dict[str, Piece]:
        return {"a": full_shard("a", torch.zeros(4)), "b": full_shard("b", torch.zeros(2))}

    def rows(first: int, last: int) -> Piece:
        return Piece("a", (4,), (slice(first, last),), torch.ones(last - first))

    b = full_shard("b", torch.ones(2))
    with pytest.raises(ModelError, match="test: 1 weights did not arrive: b; send all of them"):
        fill(own(), [rows(0, 4)], caller="test")
    for pieces in ([rows(0, 3), b], [rows(0, 3), rows(2, 4), b], [rows(0, 2), rows(1, 3), b]):
        with pytest.raises(ModelError, match="test: of a not every number came, or one came twice; the pieces"):
            fill(own(), pieces, caller="test")
    with pytest.raises(ModelError, match="test: the model has no weight 'c'"):
        fill(own(), [full_shard("c", torch.ones(1))], caller="test")
    with pytest.raises(ModelError, match="weights: of a not every number came, or one came twice"):
        list(ShardAssembler().add([rows(0, 2), rows(1, 3)]))
    with pytest.raises(CorruptedTransfer, match="transfer: 'a' came from two processes; one has to speak for it"):
        receive_bucket(
            [next_bucket("test", by_value, False, WeightStream([full_shard("a", torch.zeros(4))]))[0] for _ in range(2)]
        )
    joining = ShardAssembler()
    assert list(joining.add([rows(0, 3)])) == []
    with pytest.raises(ModelError, match="test: 1 weights did not arrive: a"):
        joining.end("test")
    assert overlap(rows(0, 1), rows(1, 2)) is None


def gathering(mesh: DeviceMesh | None, size: int) -> dict[str, Tensor]:
    """Uneven parts: the first process has the rows but one, the next ones one row each, or nothing."""
    assert mesh is not None
    weight_stream._BUCKET, rank, found = size, mesh["dp"].get_local_rank(), []
    for name, tensor in coded().items():
        every = tuple(slice(0, n) for n in tensor.shape)
        if not tensor.ndim:
            found += [full_shard(name, tensor)] if rank == 1 else []
            continue
        rows = max(tensor.shape[0] - 1, 0)
        place = slice(0, rows) if rank == 0 else slice(rows, tensor.shape[0]) if rank == 1 else slice(0, 0)
        found.append(Piece(name, tuple(tensor.shape), (place, *every[1:]), tensor[place]))
    return dict(iter_full_weights(found, "test", mesh["dp"].get_group()))


@pytest.mark.parametrize("size", [1, 10_000])
def test_processes_put_whole_weights_together(three: Processes, size: int) -> None:
    expected = coded()
    for found in three(gathering, size):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], x) for name, x in expected.items())


def test_a_piece_is_a_value() -> None:
    piece = full_shard("a", torch.zeros(2))
    assert attrs.evolve(piece, name="b").index == piece.index == (slice(0, 2),)
