"""Attention by torch's varlen kernel. Its operators are given kernels for a CPU here, straight from the definition."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen as of_torch
from torch.utils._python_dispatch import TorchDispatchMode

import nrl
from nrl.backends.training.layout.packed_attention import SequenceAttention, choose_packing
from nrl.backends.training.layout.varlen import attention
from nrl.batch.packed_rows import Sequences
from nrl.batch.packing import pack
from nrl.errors import ModelError
from tests.backends.training.layout.test_packed_attention import WIDTH, expected, numbers, rows_of

ROWS = [[1, 2, 3], [7, 7], [1, 2, 4, 5], [1, 2, 5], [1, 2, 3, 3, 3]]
CALLS: list[str] = []


def sequences(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float | None, window: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, float]]:
    """Of each sequence query, key, value, ``[n, H, D]`` in float64, the weights ``[H, q, k]``, and the scale."""
    group = query.shape[1] // key.shape[1]
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    for s in range(len(cu_q) - 1):
        q = query[cu_q[s] : cu_q[s + 1]].double()
        k, v = (x[cu_k[s] : cu_k[s + 1]].double().repeat_interleave(group, 1) for x in (key, value))
        ahead = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        hidden = (ahead < 0) | ((ahead > window[0]) if window[0] >= 0 else False)
        scores = torch.einsum("qhd,khd->hqk", q, k) * factor
        yield q, k, v, scores.masked_fill(hidden, -torch.inf).softmax(-1), factor


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool = False,
    scale: float | None = None,
    window: Sequence[int] | None = None,
    grouped: bool = False,
    *more: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    CALLS.append("forward")
    assert (max_q, max_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
    assert window is not None
    assert causal == (list(window) == [-1, 0])
    assert grouped == (query.shape[1] != key.shape[1])
    each = sequences(query, key, value, cu_q, cu_k, scale, window)
    out = torch.cat([torch.einsum("hqk,khd->qhd", p, v) for _, _, v, p, _ in each]).to(query.dtype)
    return out, torch.zeros(query.shape[1], len(query)), torch.zeros(2, dtype=torch.uint64)


def backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    state: Tensor,
    scale: float | None = None,
    window: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    CALLS.append("backward")
    assert window is not None
    made = list[tuple[Tensor, Tensor, Tensor]]()
    of = zip(sequences(query, key, value, cu_q, cu_k, scale, window), gradient.split(cu_q.diff().tolist()), strict=True)
    for (q, k, v, p, factor), rows in of:
        g = rows.double()
        dp = torch.einsum("qhd,khd->hqk", g, v)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * factor
        dk, dv = torch.einsum("hqk,qhd->khd", ds, q), torch.einsum("hqk,qhd->khd", p, g)
        dk, dv = (x.unflatten(1, (key.shape[1], -1)).sum(2) for x in (dk, dv))
        made.append((torch.einsum("hqk,khd->qhd", ds, k), dk, dv))
    dq, dk, dv = (torch.cat(parts).to(query.dtype) for parts in zip(*made, strict=True))
    return dq, dk, dv


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    """Kernels for CPU tensors, of operators that have one for a GPU alone."""
    of_torch._varlen_attn.register_kernel("cpu")(forward)
    of_torch._varlen_attn_backward.register_kernel("cpu")(backward)
    yield
    for op in (of_torch._varlen_attn, of_torch._varlen_attn_backward):
        op._backend_fns.pop("cpu")


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
@pytest.mark.parametrize("share", [True, False])
def test_it_is_the_definition_with_and_without_shared_beginnings(
    window: int | None, heads: tuple[int, int], share: bool
) -> None:
    """bfloat16 has 8 bits: each number is rounded once, here and there."""
    compare(torch.device("cpu"), heads, window, share, 2**-7)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
@pytest.mark.parametrize("share", [True, False])
def test_the_kernel_of_a_gpu_is_the_definition(window: int | None, heads: tuple[int, int], share: bool) -> None:
    """It rounds weights and their gradients to bfloat16, too, before it multiplies them."""
    compare(torch.device("cuda"), heads, window, share, 2**-5)


def compare(device: torch.device, heads: tuple[int, int], window: int | None, share: bool, tolerance: float) -> None:
    tokens = pack(rows_of(ROWS, [1] * 5), packing=nrl.Sequences, share=share)
    H, h = heads
    leaves = [numbers((5 * WIDTH, n, 8), at).bfloat16() for at, n in enumerate((H, h, h))]
    cotangent = numbers((5, WIDTH, H, 8), 3)
    assert isinstance(tokens.rows, Sequences)
    assert (tokens.rows.keys is not None) == share
    own = [x.detach().requires_grad_() for x in leaves]
    q, k, v = (x[tokens.source].to(device) for x in own)
    out = attention(tokens.rows.to(device), q, k, v, window, 0.4)
    whole = nrl.unpack(out.cpu(), tokens)
    found = [whole.detach(), *torch.autograd.grad(whole, own, cotangent.bfloat16())]
    for one, other in zip(found, expected(tokens, leaves, cotangent.bfloat16().double(), window, 0.4), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)


def test_keys_of_prefixes_are_saved_once() -> None:
    """Of what a layer saves nothing is as long as the gathered keys."""
    rows = [[*range(1, 7), last] for last in range(1, 9)]
    tokens = pack(rows_of(rows, [1] * 8), packing=nrl.Sequences, share=True)
    assert isinstance(tokens.rows, Sequences)
    assert tokens.rows.keys is not None
    N, K = len(tokens.source), len(tokens.rows.keys)
    assert K > 3 * N
    q, k, v = (numbers((N, 2, 8), at).bfloat16().requires_grad_() for at in range(3))
    saved = list[tuple[int, ...]]()

    def note(x: Tensor) -> Tensor:
        saved.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        attention(tokens.rows, q, k, v, None, None).sum().backward()
    assert saved.count((N, 2, 8)) == 4  # query, key, value, output
    assert [shape for shape in saved if shape[0] >= K and len(shape) > 1] == []


class Counted(TorchDispatchMode):
    """Which operators ran."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def on_a_gpu(rows: Sequences, dtype: torch.dtype) -> list[str]:
    """What attention runs on fake tensors of a GPU, which nobody needs to have."""
    device, N = torch.device("cuda"), int(rows.cu_seqlens_q[-1])
    lengths = [x.diff().tolist() for x in (rows.cu_seqlens_q, rows.cu_seqlens_k)]
    with FakeTensorMode(allow_non_fake_inputs=True), Counted() as counted, torch.no_grad():
        over = SequenceAttention(rows.to(device))
        over.query_lengths, over.key_lengths = lengths  # which in float32 are read from the device
        q, k, v = (torch.empty(heads, N, 8, dtype=dtype, device=device) for heads in (4, 2, 2))
        out = over(q, k, v, 5, None)
        assert (tuple(out.shape), out.device.type) == ((N, 4, 8), "cuda")
    names: list[str] = counted.names
    return names


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_it_is_one_call_whatever_the_rows(dtype: torch.dtype) -> None:
    for share in (False, True):
        tokens = pack(rows_of(ROWS, [1] * 5), packing=nrl.Sequences, share=share)
        assert isinstance(tokens.rows, Sequences)
        names = on_a_gpu(tokens.rows, dtype)
        assert [name for name in names if "attn" in name or "attention" in name] == ["torch_attn._varlen_attn.default"]
        assert not [name for name in names if "mask" in name or "tril" in name or "full" in name]


def test_in_float32_on_a_gpu_each_row_is_a_call() -> None:
    tokens = pack(rows_of(ROWS, [1] * 5), packing=nrl.Sequences, share=False)
    assert isinstance(tokens.rows, Sequences)
    names = on_a_gpu(tokens.rows, torch.float32)
    assert not [name for name in names if "varlen" in name]
    assert sum("softmax" in name or "attention" in name for name in names) >= 5


def of(q: Tensor, k: Tensor | None = None, v: Tensor | None = None, **changed: Any) -> Any:
    tokens = pack(rows_of([[1, 2], [3, 4]], [1] * 2), packing=nrl.Sequences)
    assert isinstance(tokens.rows, Sequences)
    k = q if k is None else k
    return attention(tokens.rows._replace(**changed), q, k, k if v is None else v, None, None)


def halves(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: of(halves(4, 2, 8).float()), r"the query is torch.float32; train with Model\(..., dtype='bfloat16'\)"),
        (lambda: of(halves(4, 2, 8), halves(4, 2, 8).double()), "the key is torch.float64"),
        (lambda: of(halves(4, 8, 2).transpose(1, 2)), "in the query they are 2 apart; make it contiguous"),
        (lambda: of(halves(4, 2, 264)), "256 at most, and the model has heads of 264"),
        (lambda: of(halves(4, 2, 12)), "heads of a multiple of 8 numbers, .* the model has heads of 12"),
        (lambda: of(halves(4, 3, 8), halves(4, 2, 8)), r"the query \[4, 3, 8\], the key \[4, 2, 8\]"),
        (lambda: of(halves(4, 2, 8), v=halves(4, 2, 16)), r"the value \[4, 2, 16\]; use fsdp.trainer"),
        (
            lambda: of(halves(4, 2, 8), cu_seqlens_q=torch.tensor([0, 2, 4])),
            "takes lengths in int32 .*, cpu, and cu_seqlens_q is torch.int64 on cpu",
        ),
        (
            lambda: of(halves(4, 2, 8), cu_seqlens_k=torch.empty(3, dtype=torch.int32, device="meta")),
            "cu_seqlens_k is torch.int32 on meta; move the rows there",
        ),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(made: Any, says: str) -> None:
    """The kernel of tensors without values takes all of it."""
    with pytest.raises(ModelError, match=says):
        made()


def test_the_operators_of_torch_are_those_that_are_called() -> None:
    forward, backward = (
        str(getattr(torch.ops.torch_attn, name).default._schema) for name in ("_varlen_attn", "_varlen_attn_backward")
    )
    assert forward.startswith(
        "torch_attn::_varlen_attn(Tensor query, Tensor key, Tensor value, Tensor cu_seq_q, Tensor? cu_seq_k, "
        "SymInt max_q, SymInt max_k, bool is_causal=False, float? scale=None, SymInt[]? window_size=None, "
        "bool enable_gqa=False, "
    )
    assert backward.startswith(
        "torch_attn::_varlen_attn_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
        "Tensor lse, Tensor cu_seq_q, Tensor cu_seq_k, SymInt max_q, SymInt max_k, bool is_causal, Tensor rng_state, "
        "float? scale=None, SymInt[]? window_size=None"  # later ones have more, with defaults
    )


def test_on_a_gpu_rows_lie_as_its_kernel_takes_them() -> None:
    gpu = torch.device("cuda")
    assert choose_packing(gpu, nrl.Rectangles, "bfloat16", "me") is nrl.Sequences
    assert choose_packing(gpu, None, "float32", "me") is None
    with pytest.warns(UserWarning, match="me: the model is in float32, .* 16-bit numbers alone.* dtype='bfloat16'"):
        assert choose_packing(gpu, nrl.Rectangles, "float32", "me") is nrl.Rectangles
