"""All tensors of a tree in one copy."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict
from torch import Tensor
from torch.utils._pytree import tree_flatten

from nrl.backends.training.layout.h2d import copy_to_device, pack_tensors, unpack_tensors
from nrl.backends.training.layout.microbatch_plan import Plan

DTYPES = [torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bfloat16, torch.float32, torch.float64]


def tensor(dtype: torch.dtype, shape: list[int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, shape, generator=generator).to(dtype) * (seed % 100)


tensors = st.builds(tensor, st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3), st.integers(0, 2**31))
trees = st.recursive(
    tensors | st.none() | st.integers() | st.just(torch.Size([2, 3])),
    lambda inner: st.lists(inner).map(tuple) | st.dictionaries(st.text(max_size=2), inner),
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return bool(type(a) is type(b) and a == b)


@given(trees)
def test_a_tree_comes_out_of_its_bytes(tree: Any) -> None:
    buffer, found = pack_tensors(tree, pinned=False)
    there = unpack_tensors(tree, found, buffer.clone())
    (before, form), (after, other) = (tree_flatten(x, is_leaf=lambda x: type(x) is torch.Size) for x in (tree, there))
    assert form == other
    assert all(same(a, b) for a, b in zip(before, after, strict=True))


def test_it_is_one_buffer_and_nothing_in_it_overlaps() -> None:
    tree = torch.ones(3, dtype=torch.bool), {"a": torch.zeros(5, dtype=torch.int64)}
    buffer, found = pack_tensors(tree, pinned=False)
    assert (buffer.dtype, len(buffer)) == (torch.uint8, 16 + 48)  # each begins at a multiple of 16 bytes
    first, rest = unpack_tensors(tree, found, buffer)
    rest["a"].fill_(-1)
    assert first.tolist() == [True] * 3
    assert {x.untyped_storage().data_ptr() for x in (first, rest["a"])} == {buffer.data_ptr()}


def test_what_no_buffer_holds_travels_beside_it() -> None:
    """Jagged columns, strings, and tensors that are on another device."""
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    names = NonTensorStack("x", "y")
    batch = TensorDict({"ids": torch.ones(2, 3), "jagged": jagged, "names": names}, batch_size=[2])
    there = copy_to_device((batch, torch.empty(2, device="meta")), torch.device("meta"))
    assert {x.device.type for x in (there[0]["ids"], there[0]["jagged"], there[1])} == {"meta"}
    assert there[0]["names"] == ["x", "y"]
    assert there[0].batch_size == torch.Size([2])


def test_a_plan_stays_a_plan() -> None:
    ids = torch.tensor([[1, 2]])
    plan = Plan({"input_ids": ids}, None, ids[0], {"input_ids": ids[0]}, {}, None, ids[0], torch.Size([1, 2]))
    there = copy_to_device(plan, torch.device("meta"))
    assert isinstance(there, Plan)
    assert there.shape.numel() == 2  # a `torch.Size`, not a tuple
    assert there.source.device.type == "meta"


def test_on_a_cpu_nothing_is_copied() -> None:
    tree = (torch.ones(2), None)
    assert copy_to_device(tree, torch.device("cpu")) is tree
