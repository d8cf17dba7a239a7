from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import nrl
from nrl.batch import Batch, assign, concatenate, forbid_writes, microbatches, minibatches, pad, restore, shard
from nrl.batch.prefixes import media_numbers
from nrl.batch.ragged import is_ragged, make_ragged, number_rows, rows_of
from nrl.errors import ColumnError, MutatedBatch, PlacementError
from nrl.run.checkpoint.serialization import decode, encode
from nrl.runtime import P, shard_map
from nrl.runtime.ray.codec.pickling import deserialize, serialize
from nrl.runtime.ray.codec.tensors import make_row_serializer
from nrl.runtime.ray.worker import _compute_digest

COUNTS = [2, 0, 1, 3]


def rows(counts: Sequence[int] = COUNTS) -> Batch:
    """Rows with as many entries of media each, and as many tokens and one."""
    lengths = torch.tensor(counts) + 1
    mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    media = make_ragged([torch.full((count, 2), row + 0.5) for row, count in enumerate(counts)])
    sizes = Batch(
        {"sizes": make_ragged([torch.full((count,), row) for row, count in enumerate(counts)])}, [len(counts)]
    )
    return assign(
        Batch({}, batch_size=[len(counts)]), input_ids=mask.long(), attention_mask=mask, media=media, more=sizes,
        row=torch.arange(len(counts)),
    )  # fmt: skip


def check(batch: Batch, counts: Sequence[int]) -> None:
    """Every row has the entries that `rows` gave it."""
    number = batch["row"].tolist()
    assert [len(row) for row in rows_of(batch["media"])] == [counts[row] for row in number]
    assert all(bool((row == i + 0.5).all()) for i, row in zip(number, rows_of(batch["media"]), strict=True))
    assert [row.tolist() for row in rows_of(batch["more", "sizes"])] == [[row] * counts[row] for row in number]
    assert batch.is_locked


@settings(max_examples=40)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(1, 4))
def test_entries_go_along_with_their_rows(counts: list[int], n: int) -> None:
    batch = rows(counts)
    for parts in (shard(batch, n), microbatches(batch, max_tokens=8), minibatches(batch, min(n, len(counts)), 0)):
        assert sum(map(len, parts)) == len(counts)
        for part in parts:
            check(part, counts)
        check(concatenate(parts), counts)
    check(pad(batch, 9), counts)
    parts = shard(batch, n)
    assert [row.tolist() for row in rows_of(parts.restore([part["media"] for part in parts]))] == [
        row.tolist() for row in rows_of(batch["media"])
    ]
    check(parts.restore(parts), counts)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.data())
def test_entries_arrive_in_other_processes(counts: list[int], data: st.DataObject) -> None:
    batch = rows(counts)
    found, shared = deserialize(serialize(batch, "test"))
    check(found, counts)
    assert _compute_digest(found) == _compute_digest(batch)
    index = data.draw(st.lists(st.sampled_from(range(len(counts))), unique=True))
    if ship := make_row_serializer(batch):
        found, shared = deserialize(ship(index))
        check(found, counts)
        assert found["row"].tolist() == index
        if index and any(counts[i] for i in index):
            found["media"]._values.add_(1)
            with pytest.raises(MutatedBatch):
                shared.check("test")
    check(decode(encode(batch, "x"), None, "x"), counts)


def test_the_padding_stays_behind_and_other_rows_entries_do_too() -> None:
    media = make_ragged([torch.zeros(10000), torch.zeros(1)])
    mask = torch.tensor([[True] * 9, [True] + [False] * 8])
    batch = assign(Batch({}, batch_size=[2]), input_ids=mask.long(), attention_mask=mask, media=media)
    ship = make_row_serializer(batch)
    assert ship is not None
    assert sum(map(len, ship([1]))) < 2000


def test_a_difference_in_entries_is_a_difference() -> None:
    base, other = rows(), rows([2, 1, 0, 3])
    assert _compute_digest(base["media"]) != _compute_digest(other["media"])
    with nrl.cluster("local") as cluster:
        mesh = cluster.reserve(2).mesh()
        again = shard_map(lambda x: x, mesh, P(), P())(base["media"]).result()
        assert is_ragged(again)
        with pytest.raises(PlacementError, match="the shards differ"):
            shard_map(lambda x: x["media"], mesh, P("dp"), P())(base)
        alone = shard_map(lambda x: x, mesh, P("dp"), P("dp"))(base["media"]).result()
        assert [row.tolist() for row in rows_of(alone)] == [row.tolist() for row in rows_of(base["media"])]
        nobody = shard_map(lambda x: x, cluster.reserve(9).mesh(), P("dp"), P("dp"))(base["media"]).result()
        assert [row.tolist() for row in rows_of(nobody)] == [row.tolist() for row in rows_of(base["media"])]


def test_a_write_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NRL_DEBUG", "1")
    batch = rows()
    with forbid_writes(batch, "my_loss"):
        rows_of(batch["media"])[0].sum()
    with pytest.raises(MutatedBatch, match="my_loss wrote into its batch: media"), forbid_writes(batch, "my_loss"):
        rows_of(batch["media"])[0].add_(1)


def not_ragged() -> dict[str, Tensor]:
    return {
        "strided": torch.nested.nested_tensor([torch.zeros(1, 2), torch.zeros(3, 2)]),
        "transposed": make_ragged([torch.zeros(1, 2), torch.zeros(3, 2)]).transpose(1, 2),
        "gaps": torch.nested.narrow(
            torch.zeros(2, 4, 2), 1, torch.tensor([0, 1]), torch.tensor([2, 1]), layout=torch.jagged
        ),
    }


@pytest.mark.parametrize("name", ["strided", "transposed", "gaps"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_other_nested_tensors_are_refused(name: str) -> None:
    with pytest.raises(ColumnError, match=r"it must be torch.nested.nested_tensor\(rows, layout=torch.jagged\)"):
        assign(Batch({}, batch_size=[2]), media=not_ragged()[name])


def test_a_nested_tensor_needs_no_declaration() -> None:
    batch = assign(rows(), sounds=make_ragged([torch.zeros(count) for count in COUNTS]))
    assert [len(row) for row in rows_of(pad(batch, 9)["sounds"])] == COUNTS


def test_where_a_ragged_column_cannot_be() -> None:
    some = make_ragged([torch.zeros(1, 2), torch.zeros(3, 2)])
    with pytest.raises(ColumnError, match=r"'media' is a nested tensor, of the layout torch.jagged, .* size \[2, 2\]"):
        assign(Batch({}, batch_size=[2, 2]), media=some)
    with pytest.raises(ColumnError, match=r"'media' has shape \[2, 'j', 2\], but the batch has batch size \[3\]"):
        assign(Batch({}, batch_size=[3]), media=some)
    with pytest.raises(ColumnError, match=r"'rewards' has shape \[2, 'j', 2\], and it is per row; ragged columns"):
        assign(Batch({}, batch_size=[2]), rewards=some)
    with pytest.raises(ColumnError, match=r"'media' has shape \[2, 3\], and it is ragged; ragged columns, and no"):
        assign(Batch({}, batch_size=[2]), media=torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (make_ragged([torch.ones(2), torch.ones(1), torch.ones(2)]), [0, 1, 0]),
        (make_ragged([torch.ones(2, 1), torch.ones(1, 1), torch.zeros(2, 1)]), [0, 1, 2]),
        (torch.tensor([3, 3, 4]), [0, 0, 1]),
        (Batch({"a": torch.zeros(3), "b": make_ragged([torch.ones(1), torch.ones(1), torch.ones(0)])}, [3]), [0, 0, 1]),
        (Batch({"b": {"c": torch.tensor([1, 2, 1])}}, [3]), [0, 1, 0]),
    ],
)
def test_equal_rows_have_equal_numbers(value: Any, expected: list[int]) -> None:
    found = media_numbers(Batch({"media": value}, [3]))
    assert found is not None
    assert [[number == other for other in found] for number in found] == [[x == y for y in expected] for x in expected]
    if isinstance(value, Tensor):
        assert number_rows(value).tolist() == expected


def test_restore_takes_entries_of_different_lengths() -> None:
    found = restore(
        [torch.tensor([2]), torch.tensor([0, 1])], [make_ragged([torch.ones(1)]), make_ragged([torch.zeros(2)] * 2)]
    )
    assert [row.tolist() for row in rows_of(found)] == [[0, 0], [0, 0], [1]]
