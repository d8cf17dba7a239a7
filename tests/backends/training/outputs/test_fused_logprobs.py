import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from nrl.backends.training.outputs.fused_logprobs import KEEP_BYTES, linear_logprobs
from nrl.backends.training.outputs.head_chunks import CHUNK_BYTES
from nrl.errors import BatchError, ConfigError, ModelError

TOKENS, WIDTH, VOCABULARY = 11, 5, 7
DTYPES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 4e-2}


def inputs(dtype: torch.dtype = torch.float64, tokens: int = TOKENS, *, bias: bool = False) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, WIDTH, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    extra = (
        {"bias": torch.randn(VOCABULARY, generator=g, dtype=torch.float64).to(dtype).requires_grad_()} if bias else {}
    )
    targets = torch.randint(0, VOCABULARY, (tokens,), generator=g)
    return {"hidden": hidden, "weight": weight, "targets": targets, **extra}


def temperatures(tokens: int = TOKENS) -> Tensor:
    return torch.linspace(0.3, 2.5, tokens)


def naive(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if temperature is not None:
        logits = logits / temperature.to(logits.dtype)[:, None]
    logp = logits.log_softmax(-1)
    return logp.gather(-1, targets[:, None]).squeeze(-1), -(logp.exp() * logp).sum(-1)


def gradients(loss: Tensor, given: dict[str, Any]) -> list[Tensor]:
    leaves = [x for x in given.values() if isinstance(x, Tensor) and x.requires_grad]
    return list(torch.autograd.grad(loss, leaves))


def mixed(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
    """A loss with another coefficient for each token and each result."""
    slope = torch.linspace(-1, 2, len(logprobs), dtype=logprobs.dtype)
    loss = (slope * logprobs).sum()
    return loss if entropy is None else loss + ((0.7 - slope) * entropy).sum()


class Allocations(TorchDispatchMode):
    """Records the largest number of elements of any result."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(result):
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.numel(), x.untyped_storage().nbytes() // x.itemsize)
        return result


def saved(run: Callable[[], Any]) -> list[Tensor]:
    tensors: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        tensors.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        run()
    return tensors


def test_values_by_hand() -> None:
    # Probabilities 1/4 and 3/4; at temperature 1/2 their squares, 1/10 and 9/10.
    hidden = torch.tensor([[1.0], [1.0]])
    weight = torch.tensor([[0.0], [math.log(3)]])
    logprobs, entropy = linear_logprobs(
        hidden, weight, torch.tensor([0, 1]), temperature=torch.tensor([1.0, 0.5]), entropy=True
    )
    assert entropy is not None
    assert logprobs.tolist() == pytest.approx([math.log(0.25), math.log(0.9)])
    expected = [-0.25 * math.log(0.25) - 0.75 * math.log(0.75), -0.1 * math.log(0.1) - 0.9 * math.log(0.9)]
    assert entropy.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [None, 1, 4, TOKENS, 100])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("with_temperature", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_the_whole_matrix(
    dtype: torch.dtype, chunk: int | None, with_entropy: bool, with_temperature: bool, with_bias: bool
) -> None:
    given = inputs(dtype, bias=with_bias)
    temperature = temperatures() if with_temperature else None
    logprobs, entropy = linear_logprobs(**given, temperature=temperature, entropy=with_entropy, chunk=chunk)
    # For bfloat16 the truth is float64 on the same rounded numbers, and the tolerance is bfloat16's.
    exact = {name: x.detach().double().requires_grad_() if x.is_floating_point() else x for name, x in given.items()}
    expected_logprobs, expected_entropy = naive(**exact, temperature=temperature)

    tolerance = DTYPES[dtype]
    assert logprobs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(logprobs.double(), expected_logprobs, rtol=tolerance, atol=tolerance)
    if with_entropy:
        assert entropy is not None
        assert entropy.dtype == logprobs.dtype
        torch.testing.assert_close(entropy.double(), expected_entropy, rtol=tolerance, atol=tolerance)
    else:
        assert entropy is None

    actual = gradients(mixed(logprobs, entropy), given)
    expected = gradients(mixed(expected_logprobs, expected_entropy if with_entropy else None), exact)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), e, rtol=tolerance, atol=tolerance * e.abs().max().item())


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("use", ["logprobs", "entropy"])
def test_a_result_that_the_loss_does_not_use(chunk: int | None, use: str) -> None:
    given = inputs()
    index = ["logprobs", "entropy"].index(use)
    result = linear_logprobs(**given, temperature=temperatures(), entropy=True, chunk=chunk)[index]
    assert result is not None
    expected = naive(**given, temperature=temperatures())[index]
    for a, e in zip(gradients(result.sum(), given), gradients(expected.sum(), given), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore:Backwards compatibility")  # of gradcheck, about what it checks
@pytest.mark.parametrize("chunk", [None, 4])
def test_gradcheck(chunk: int | None) -> None:
    given = inputs(bias=True)

    def both(hidden: Tensor, weight: Tensor, bias: Tensor) -> Any:
        return linear_logprobs(
            hidden, weight, given["targets"], bias=bias, temperature=temperatures(), entropy=True, chunk=chunk
        )

    assert torch.autograd.gradcheck(both, (given["hidden"], given["weight"], given["bias"]))


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("only", ["hidden", "weight", "bias"])
def test_only_one_input_requires_a_gradient(chunk: int | None, dtype: torch.dtype, only: str) -> None:
    given = inputs(dtype, bias=True)
    everything = gradients(mixed(*linear_logprobs(**given, entropy=True, chunk=chunk)), given)
    expected = dict(zip(["hidden", "weight", "bias"], everything, strict=True))[only]
    given = {name: x.detach() for name, x in given.items()}
    given[only].requires_grad_()
    (actual,) = gradients(mixed(*linear_logprobs(**given, entropy=True, chunk=chunk)), given)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("chunk", [None, 4])
def test_backward_twice_gives_the_same_and_changes_no_input(chunk: int | None) -> None:
    given = inputs()
    before = {name: x.detach().clone() for name, x in given.items()}
    loss = mixed(*linear_logprobs(**given, temperature=temperatures(), entropy=True, chunk=chunk))
    first = torch.autograd.grad(loss, [given["hidden"], given["weight"]], retain_graph=True)
    second = torch.autograd.grad(loss, [given["hidden"], given["weight"]])
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(before[name], given[name]) for name in before)


def test_there_is_no_second_derivative() -> None:
    given = inputs()
    (grad,) = torch.autograd.grad(linear_logprobs(**given)[0].square().sum(), given["hidden"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("chunk", [None, 4])
def test_no_tokens(chunk: int | None) -> None:
    given = inputs(tokens=0, bias=True)
    logprobs, entropy = linear_logprobs(**given, temperature=temperatures(0), entropy=True, chunk=chunk)
    assert entropy is not None
    assert logprobs.shape == entropy.shape == (0,)
    for name, grad in zip(["hidden", "weight", "bias"], gradients(mixed(logprobs, entropy), given), strict=True):
        assert grad.shape == given[name].shape
        assert not grad.any()


@pytest.mark.parametrize("chunk", [None, 4])
def test_without_gradients_nothing_is_saved(chunk: int | None) -> None:
    given = inputs()
    results: list[Any] = []

    def run() -> None:
        with torch.no_grad():
            results.append(linear_logprobs(**given, entropy=True, chunk=chunk))

    assert saved(run) == []
    for actual, expected in zip(results[0], linear_logprobs(**given, entropy=True, chunk=chunk), strict=True):
        assert not actual.requires_grad
        assert expected is not None
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("chunk", [None, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_logits_are_finite(dtype: torch.dtype, chunk: int | None) -> None:
    hidden = torch.tensor([[1e4], [-1e4], [1e4], [1e4]], dtype=dtype, requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.0]], dtype=dtype, requires_grad=True)
    temperature = torch.tensor([1.0, 1.0, 1.0, 0.01])
    given: dict[str, Any] = {"hidden": hidden, "weight": weight, "targets": torch.tensor([0, 1, 1, 2])}
    logprobs, entropy = linear_logprobs(**given, temperature=temperature, entropy=True, chunk=chunk)
    assert entropy is not None
    size = hidden.detach()[0, 0].item()  # 1e4, as the dtype has it
    assert logprobs.tolist() == pytest.approx([0, 0, -2 * size, -100 * size], rel=1e-2)
    assert entropy.tolist() == [0, 0, 0, 0]
    assert all(grad.isfinite().all() for grad in gradients(mixed(logprobs, entropy), given))


def test_gradients_are_summed_in_float32() -> None:
    # In bfloat16, 1 + 2^-9 is 1: of 512 tokens with a gradient of 2^-9 each, none would arrive after the first.
    tokens = 513
    hidden = torch.full((tokens, 1), 2.0**-8, dtype=torch.bfloat16)
    hidden[0] = 2.0
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    logprobs, _ = linear_logprobs(hidden, weight, torch.zeros(tokens, dtype=torch.int64), chunk=1)
    logprobs.sum().backward()
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == [2.0, -2.0]  # (2 + 512 / 256) / 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_entropy", [False, True])
def test_the_whole_matrix_never_exists(dtype: torch.dtype, with_entropy: bool) -> None:
    tokens, vocabulary, width, chunk = 64, 50, 3, 16
    hidden = torch.randn(tokens, width).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width).to(dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,))
    with Allocations() as seen:
        results = linear_logprobs(
            hidden, weight, targets, temperature=torch.ones(tokens), entropy=with_entropy, chunk=chunk
        )
        forward = seen.largest
        mixed(*results).backward()
    assert forward == seen.largest == chunk * vocabulary


@pytest.mark.parametrize("entropy", [False, True])
def test_what_is_kept_for_the_backward(entropy: bool) -> None:
    given = inputs()
    chunked = saved(lambda: linear_logprobs(**given, temperature=temperatures(), entropy=entropy, chunk=4))
    inputs_size = given["hidden"].numel() + given["weight"].numel()
    assert sum(x.numel() for x in chunked) == inputs_size + TOKENS * (3 if entropy else 2)
    whole = saved(lambda: linear_logprobs(**given, temperature=temperatures(), entropy=entropy))
    assert sum(x.numel() for x in whole) == inputs_size + TOKENS * (3 if entropy else 2) + TOKENS * VOCABULARY


def test_sizes_that_are_chosen() -> None:
    # Sizes alone matter, and a fake tensor has nothing else. A value that Python reads is an error here, so this also
    # shows that neither direction waits for the device.
    for tokens, vocabulary, whole in [(4096, 151_936, False), (4096, 10_000, True), (10_000, 90, True)]:
        with FakeTensorMode(), Allocations() as seen:
            hidden = torch.empty(tokens, 8, requires_grad=True)
            weight = torch.empty(vocabulary, 8, requires_grad=True)
            targets = torch.empty(tokens, dtype=torch.int64)
            kept = saved(lambda h=hidden, w=weight, t=targets: linear_logprobs(h, w, t))  # type: ignore[misc]
            mixed(*linear_logprobs(hidden, weight, targets, temperature=torch.ones(tokens), entropy=True)).backward()
        assert seen.largest <= CHUNK_BYTES // 4
        assert (seen.largest == tokens * vocabulary) == whole
        assert (max(x.numel() for x in kept) == tokens * vocabulary) == (tokens * vocabulary <= KEEP_BYTES // 4)


def test_chunks_are_even() -> None:
    tokens, vocabulary = 9, 50
    hidden, weight = torch.randn(tokens, 2), torch.randn(vocabulary, 2)
    with Allocations() as seen:
        linear_logprobs(hidden, weight, torch.zeros(tokens, dtype=torch.int64), chunk=8)
    assert seen.largest == 5 * vocabulary  # 5 + 4, not 8 + 1


def test_layouts_of_memory() -> None:
    given = inputs()
    expected = gradients(mixed(*linear_logprobs(**given, chunk=4)), given)
    given["hidden"] = given["hidden"].detach().t().contiguous().t().requires_grad_()
    given["weight"] = given["weight"].detach().t().contiguous().t().requires_grad_()
    given["targets"] = torch.stack([given["targets"]] * 2, 1)[:, 0]
    for a, e in zip(gradients(mixed(*linear_logprobs(**given, chunk=4)), given), expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu_without_waiting_for_it(dtype: torch.dtype) -> None:
    given = inputs(dtype, bias=True)
    temperature = temperatures()
    expected = gradients(mixed(*linear_logprobs(**given, temperature=temperature, entropy=True, chunk=4)), given)
    there = {name: x.detach().cuda().requires_grad_(x.requires_grad) for name, x in given.items()}
    slope = torch.linspace(-1, 2, TOKENS, dtype=torch.float64 if dtype == torch.float64 else torch.float32).cuda()
    temperature = temperature.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        logprobs, entropy = linear_logprobs(**there, temperature=temperature, entropy=True, chunk=4)
        assert entropy is not None
        actual = gradients((slope * logprobs).sum() + ((0.7 - slope) * entropy).sum(), there)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.cpu(), e, rtol=DTYPES[dtype], atol=DTYPES[dtype] * e.abs().max().item())


@pytest.mark.parametrize(
    ("error", "change", "message"),
    [
        (ModelError, {"hidden": torch.zeros(1, 11, 5)}, r"hidden is float32 \[1, 11, 5\]; flatten it"),
        (
            ModelError,
            {"hidden": torch.zeros(11, 5, dtype=torch.float16)},
            "hidden is float16 .* use one of float32, bf",
        ),
        (ModelError, {"weight": torch.zeros(7, 6)}, r"weight is float32 \[7, 6\]; .* must be \[vocabulary, 5\]"),
        (ModelError, {"weight": torch.zeros(7)}, r"weight is float32 \[7\]"),
        (ModelError, {"weight": torch.zeros(0, 5)}, r"weight is float32 \[0, 5\]"),
        (
            ModelError,
            {"weight": torch.zeros(7, 5).double()},
            r"weight is float64 \[7, 5\]; it must be float32 \[7, 5\]",
        ),
        (ModelError, {"bias": torch.zeros(5)}, r"bias is float32 \[5\]; it must be float32 \[7\]"),
        (ModelError, {"bias": torch.zeros(7).bfloat16()}, r"bias is bfloat16 \[7\]; it must be float32 \[7\]"),
        (BatchError, {"targets": torch.zeros(10).long()}, r"targets is int64 \[10\]; it must be int64 \[11\]"),
        (BatchError, {"targets": torch.zeros(11).int()}, r"targets is int32 \[11\]; it must be int64 \[11\]"),
        (BatchError, {"temperature": torch.ones(1)}, r"temperature is float32 \[1\]; it must be float32 \[11\]"),
        (BatchError, {"temperature": torch.ones(11).long()}, r"temperature is int64 \[11\]; it must be float32"),
        (ConfigError, {"chunk": 0}, "chunk is 0; give at least 1 token"),
    ],
)
def test_errors(error: type[Exception], change: dict[str, Any], message: str) -> None:
    with pytest.raises(error, match=f"linear_logprobs: {message}"):
        linear_logprobs(**{**inputs(torch.float32), **change})
