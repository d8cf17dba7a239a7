"""Attention over packed rows, in both forms, against a loop straight from the definition."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import nrl
from nrl.backends.training.layout import packed_attention
from nrl.batch import Batch, assign
from nrl.batch.packed_rows import Packing
from nrl.batch.packing import Packed, pack, unpack
from nrl.batch.ragged import make_ragged

PACKINGS: list[Packing] = [nrl.Rectangles, nrl.Sequences]
WIDTH = 8


def rows_of(rows: Sequence[Sequence[int]], media: Sequence[int], width: int = WIDTH) -> Batch:
    ids = torch.tensor([[*row, *[9] * (width - len(row))] for row in rows])
    mask = torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]
    batch = Batch({"input_ids": ids, "attention_mask": mask}, batch_size=[len(rows)])
    return assign(batch, media=make_ragged([torch.tensor([[number, 0]]) for number in media]))


def by_definition(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, window: int | None, scaling: float | None) -> Tensor:
    """``q`` ``[B, T, H, D]``, ``k`` and ``v`` ``[B, T, h, D]``: each token of each row by itself."""
    out = torch.zeros(q.shape, dtype=q.dtype)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    for row, t in torch.nonzero(mask).tolist():
        first = 0 if window is None else max(0, t - window + 1)
        for head in range(q.shape[2]):
            of = head * k.shape[2] // q.shape[2]
            weights = (k[row, first : t + 1, of] @ q[row, t, head] * scale).softmax(0)
            out[row, t, head] = weights @ v[row, first : t + 1, of]
    return out


def results(
    tokens: Packed, leaves: Sequence[Tensor], cotangent: Tensor, window: int | None, scaling: float | None
) -> list[Tensor]:
    """The output in the shape of the batch, and the gradients of the leaves, which are ``[B * T, heads, D]``."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    q, k, v = (x[tokens.source].transpose(0, 1) for x in leaves)
    out = packed_attention.make_attention(tokens.rows)(q, k, v, window, scaling)
    whole = unpack(out, tokens)
    return [whole.detach(), *torch.autograd.grad(whole, leaves, cotangent.to(whole.dtype))]


def expected(
    tokens: Packed, leaves: Sequence[Tensor], cotangent: Tensor, window: int | None, scaling: float | None
) -> list[Tensor]:
    """The same in float64, by definition: every row is whole, of the tokens that were laid out for it."""
    leaves = [x.detach().double().requires_grad_() for x in leaves]
    mask, own = (tokens.place >= 0).view(tokens.shape), tokens.source[tokens.place.clamp(min=0)]
    q, k, v = (x[own].view(*tokens.shape, *x.shape[1:]) for x in leaves)
    whole = by_definition(q, k, v, mask, window, scaling)
    return [whole.detach(), *torch.autograd.grad(whole, leaves, cotangent)]


def numbers(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) / 2


alike = st.lists(st.lists(st.integers(1, 2), min_size=0, max_size=WIDTH), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    rows=alike.filter(any),
    media=st.lists(st.integers(1, 2), min_size=6, max_size=6),
    share=st.booleans(),
    window=st.sampled_from([None, 1, 2, 3, 5, 50]),
    scaling=st.sampled_from([None, 0.7]),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**16),
)
def test_both_forms_are_the_definition(
    rows: list[list[int]],
    media: list[int],
    share: bool,
    window: int | None,
    scaling: float | None,
    heads: tuple[int, int],
    dtype: torch.dtype,
    seed: int,
) -> None:
    batch, (H, h) = rows_of(rows, media[: len(rows)]), heads
    size, tolerance = len(rows) * WIDTH, 1e-6 if dtype == torch.float32 else 1e-12
    leaves = [numbers((size, n, 4), seed + i).to(dtype) for i, n in enumerate((H, h, h))]
    cotangent = numbers((len(rows), WIDTH, H, 4), seed + 3)
    found = []
    for packing in PACKINGS:
        tokens = pack(batch, packing=packing, share=share)
        found.append(results(tokens, leaves, cotangent, window, scaling))
        for x, y in zip(found[-1], expected(tokens, leaves, cotangent, window, scaling), strict=True):
            torch.testing.assert_close(x.double(), y, rtol=tolerance, atol=tolerance)
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("share", [False, True])
def test_long_rows_for_which_rectangles_take_the_fused_kernel(
    window: int | None, dtype: torch.dtype, tolerance: float, share: bool
) -> None:
    sizes, width = [150, 97, 120, 150, 64], 150
    rows = [[*[1] * 60, *([2 + number] * (size - 60))] for number, size in enumerate(sizes)]
    batch = rows_of(rows, [1] * 5, width)
    leaves = [numbers((5 * width, n, 8), i).to(dtype) for i, n in enumerate((2, 1, 1))]
    cotangent = numbers((5, width, 2, 8), 3) / 8
    found = [
        results(pack(batch, packing=packing, share=share), leaves, cotangent, window, None) for packing in PACKINGS
    ]
    tokens = pack(batch, share=share)
    assert len(tokens.input_ids) < 5 * 150
    for one, other, own in zip(*found, expected(tokens, leaves, cotangent, window, None), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(other.double(), own, rtol=tolerance, atol=tolerance)


def test_masks_and_gathers_are_made_where_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that continues none is causal without a mask; of the others, each takes the corner of one."""
    seen: list[Any] = []
    original = torch.nn.functional.scaled_dot_product_attention

    def spied(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None, is_causal: bool, **options: Any) -> Tensor:
        seen.append((q.shape[2], k.shape[2], is_causal, attn_mask))
        return original(q, k, v, attn_mask=attn_mask, is_causal=is_causal, **options)

    monkeypatch.setattr(packed_attention, "scaled_dot_product_attention", spied)
    batch = rows_of([[1, 2, 3], [7, 7], [1, 2, 4, 5], [1, 2, 5]], [1] * 4)
    leaves = [numbers((4 * WIDTH, 1, 4), i) for i in range(3)]
    cotangent = numbers((4, WIDTH, 1, 4), 3)
    results(pack(batch, packing=nrl.Sequences, share=True), leaves, cotangent, None, None)
    assert [call[:3] for call in seen] == [(3, 3, True), (2, 2, True), (2, 4, False), (1, 3, False)]
    inf = float("inf")
    assert seen[2][3].tolist() == [[0, 0, 0, -inf], [0, 0, 0, 0]]
    assert seen[3][3].tolist() == [[0, 0, 0]]
    assert seen[2][3].untyped_storage().data_ptr() == seen[3][3].untyped_storage().data_ptr()
    seen.clear()
    results(pack(batch, packing=nrl.Sequences), leaves, cotangent, 3, None)
    assert [call[:3] for call in seen] == [(3, 3, True), (2, 2, True), (4, 4, False), (3, 3, True)]
    assert seen[2][3].tolist() == [[0, -inf, -inf, -inf], [0, 0, -inf, -inf], [0, 0, 0, -inf], [-inf, 0, 0, 0]]
