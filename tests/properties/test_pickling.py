"""What arrives is what was sent: whatever is in a batch, and whichever rows of it travel."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

import nrl
from nrl.batch import Batch
from nrl.errors import MutatedBatch
from nrl.runtime.mesh.processes import RowSlice
from nrl.runtime.ray.codec.pickling import deserialize, num_bytes, serialize
from nrl.runtime.ray.codec.ragged_codec import UnpaddedBatch
from nrl.runtime.ray.codec.tensors import make_row_serializer

DTYPES = (
    torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.float16, torch.float32, torch.float64,
    torch.complex64, torch.complex128,
)  # fmt: skip
FILLERS = (0.0, -0.0, 1.0, -1.0, float("nan"), float("inf"))


def equal(one: Any, other: Any) -> bool:
    """To the bit, but for the signs of zeros."""
    if isinstance(one, TensorDict):
        same = isinstance(other, TensorDict) and one.batch_size == other.batch_size and one.keys() == other.keys()
        return same and all(equal(one[name], other[name]) for name in one.keys())
    alike = one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.isnan(), other.isnan())
    return alike and bool(((one == other) | one.isnan()).all())


@st.composite
def columns(draw: st.DrawFn, shape: tuple[int, ...], mask: Tensor | None) -> Tensor:
    """Numbers of any dtype, and beyond the tokens, if there are some, one number, or any."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    dtype = draw(st.sampled_from(DTYPES))
    numbers = torch.randint(-3 if dtype.is_signed else 0, 4, shape, generator=random).to(dtype)
    if mask is not None and shape[: mask.ndim] == mask.shape and draw(st.booleans()):
        filler = draw(st.sampled_from(FILLERS if dtype.is_floating_point else FILLERS[:4]))
        beyond = ~mask.view(*mask.shape, *(1 for _ in shape[mask.ndim :])).expand(shape)
        numbers[beyond] = torch.tensor(abs(filler) if dtype == torch.uint8 else filler).to(dtype)
    return numbers


@st.composite
def any_batches(draw: st.DrawFn) -> Batch:
    """Rows or pairs of any lengths, none of them too; known, unknown and nested columns; masks that are missing."""
    size = draw(st.sampled_from([(0,), (1,), (5,), (0, 2), (3, 2)]))
    width = draw(st.integers(1, 9))
    lengths = torch.tensor(draw(st.lists(st.integers(0, width), min_size=(n := torch.Size(size).numel()), max_size=n)))
    mask = torch.arange(width) < lengths.long().view(*size, 1)
    if draw(st.integers(0, 4)) == 4:  # a mask with holes, as nothing but `assign` refuses
        mask = mask & (torch.rand(mask.shape, generator=torch.Generator().manual_seed(0)) < 0.7)
    known = draw(st.integers(0, 4)) < 4
    given = mask if known else None

    def some(prefix: str) -> dict[str, Any]:
        tails = draw(st.lists(st.sampled_from([(), (width,), (width, 2), (3,), (0,), (2, width)]), max_size=5))
        return {f"{prefix}{i}": draw(columns((*size, *tail), given)) for i, tail in enumerate(tails)}

    found = {"input_ids": torch.arange(mask.numel()).view(mask.shape), **some("column ")}
    found["versions"] = torch.where(mask, 3, -1)
    found["same"] = found["versions"]
    if known:
        found["attention_mask"] = mask
    inner = TensorDict({**some("inner "), "empty": TensorDict({}, batch_size=size)}, batch_size=size)
    batch = Batch({**found, "media": inner}, batch_size=size)
    return batch.lock_() if draw(st.booleans()) else batch


@settings(max_examples=300)
@given(any_batches(), st.booleans())
def test_a_batch_arrives_as_it_was_sent(batch: Batch, copy: bool) -> None:
    found, shared = deserialize(serialize(batch, "test"), copy=copy)
    assert equal(found, batch)
    assert found.is_locked == batch.is_locked
    assert not (copy and shared.tensors)


@settings(max_examples=300)
@given(any_batches(), st.data(), st.booleans())
def test_rows_arrive_as_they_were_sent(batch: Batch, data: st.DataObject, copy: bool) -> None:
    rows = st.permutations(range(len(batch))).flatmap(lambda order: st.integers(0, len(order)).map(lambda n: order[:n]))
    index = torch.tensor(data.draw(rows), dtype=torch.int64)
    ship = make_row_serializer(batch)
    expected = RowSlice(batch, index).open()
    if ship is None:
        assert not UnpaddedBatch.from_batch(batch)
        return
    found, shared = deserialize(ship(index.tolist()), copy=copy)
    assert equal(found, expected)
    assert found.is_locked
    assert found["media"].is_locked
    assert not (copy and shared.tensors)


def skewed(rows: int = 64, width: int = 4096) -> Batch:
    """Nearly all padding, in columns with a filler each, and one that has something else there."""
    mask = torch.arange(width) < torch.tensor([width, *[100] * (rows - 1)]).view(-1, 1)
    random = torch.Generator().manual_seed(0)
    return nrl.assign(
        Batch({}, batch_size=[rows]),
        input_ids=torch.randint(1, 9, (rows, width), generator=random) * mask,
        attention_mask=mask,
        advantages=-torch.rand(rows, width, generator=random) * mask,  # whose padding is a negative zero
        versions=torch.where(mask, 3, -1),
        teacher_topk_logprobs=torch.where(mask.unsqueeze(-1), 1.5, float("-inf")).repeat(1, 1, 2),
    )


def test_what_travels_is_the_tokens() -> None:
    batch = skewed()
    tokens, entry = int(batch["attention_mask"].sum()), 8 + 1 + 4 + 8 + 8
    ship: Any = make_row_serializer(batch)
    for parts in (serialize(batch, "test"), ship(None)):
        assert tokens * entry < num_bytes(parts) < 1.05 * tokens * entry
    assert num_bytes(ship([3, 5])) < 200 * entry + 2000
    nrl.declare(odd="token")
    odd = nrl.assign(batch, odd=torch.arange(64 * 4096).view(64, 4096))
    assert (
        0 <= num_bytes(serialize(odd, "test")) - num_bytes(serialize(batch, "test")) - 64 * 4096 * 8 < 100
    )  # whole, as it is


def test_rows_without_padding_lie_where_they_came() -> None:
    batch = skewed()
    ship: Any = make_row_serializer(batch)
    parts = ship([0])
    found, _ = deserialize(parts)
    start = parts[1].ctypes.data
    assert start < found["input_ids"].data_ptr() < start + len(parts[1])
    assert equal(found, batch[:1])


@pytest.mark.parametrize("rows", [[0], [1, 2]])
def test_a_write_into_rows_is_found(rows: list[int]) -> None:
    ship: Any = make_row_serializer(skewed())
    found, shared = deserialize(ship(rows))
    shared.check("my_function")
    found["advantages"].mul_(2)
    with pytest.raises(MutatedBatch, match="my_function wrote into its arguments"):
        shared.check("my_function")


def test_padding_that_has_been_written_to_is_looked_at_again() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    batch = Batch({"attention_mask": mask, "x": torch.ones(2, 3) * mask}, batch_size=[2]).lock_()
    assert equal(deserialize(serialize(batch, "test"))[0], batch)
    batch["x"][1, 2] = 5.0
    assert equal(deserialize(serialize(batch, "test"))[0], batch)
    mask[1, 2] = True
    assert equal(deserialize(serialize(batch, "test"))[0], batch)
