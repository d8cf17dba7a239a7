"""Newton-Schulz and Muon against loops written from the papers, number by number."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from nrl.backends.training.optim.muon import Muon, newton_schulz

type Rows = list[list[float]]


def times(a: Rows, b: Rows) -> Rows:
    return [[sum(a[i][k] * b[k][j] for k in range(len(b))) for j in range(len(b[0]))] for i in range(len(a))]


def turned(a: Rows) -> Rows:
    return [list(column) for column in zip(*a, strict=True)]


def by_hand(matrix: Rows) -> Rows:
    """Jordan et al., 2024: X <- a X + b (X X^T) X + c (X X^T)^2 X, five times, from X = G / (|G| + eps)."""
    norm = math.sqrt(sum(x * x for row in matrix for x in row))
    x = [[value / (norm + 1e-7) for value in row] for row in matrix]
    for _ in range(5):
        gram = times(x, turned(x))
        once, twice = times(gram, x), times(times(gram, gram), x)
        places = product(range(len(x)), range(len(x[0])))
        new = [[0.0] * len(x[0]) for _ in x]
        for i, j in places:
            new[i][j] = 3.4445 * x[i][j] - 4.7750 * once[i][j] + 2.0315 * twice[i][j]
        x = new
    return x


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4), (1, 6), (6, 1)])
def test_newton_schulz_is_the_papers_loop(shape: tuple[int, int]) -> None:
    matrix = noise(*shape)
    torch.testing.assert_close(newton_schulz(matrix), torch.tensor(by_hand(matrix.tolist()), dtype=torch.float64))


@pytest.mark.parametrize("shape", [(2, 3, 3, 7), (4, 7, 3)])
def test_each_matrix_of_a_stack_is_one_of_its_own(shape: tuple[int, ...]) -> None:
    stack = noise(*shape) * torch.logspace(-3, 2, shape[0], dtype=torch.float64).reshape(-1, *[1] * (len(shape) - 1))
    alone = [newton_schulz(matrix) for matrix in stack.flatten(0, -3)]
    torch.testing.assert_close(newton_schulz(stack).flatten(0, -3), torch.stack(alone))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(16, 16), (8, 40), (40, 8), (3, 12, 20)])
def test_singular_values_are_within_the_bounds_of_the_polynomial(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """U and V stay. Each value of S that is 0.002 of the norm or more comes into [0.68, 1.21]; see the test below."""
    left, values, right = torch.linalg.svd(noise(*shape, dtype=dtype), full_matrices=False)
    values[..., -1] = 0.002 * values.square().sum(-1).sqrt() * 1.01  # a small one
    made = newton_schulz(left @ values.diag_embed() @ right)
    inside = left.mT @ made @ right.mT
    found = inside.diagonal(dim1=-2, dim2=-1)
    assert 0.68 < found.min() < found.max() < 1.21
    torch.testing.assert_close(inside, found.diag_embed(), rtol=0, atol=1e-3 if dtype == torch.float32 else 1e-9)


def test_the_bounds_of_the_polynomial() -> None:
    start = torch.logspace(math.log10(0.002), 0, 100_001, dtype=torch.float64)
    x = start
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
    assert 0.68 < x.min() < x.max() < 1.21
    tiny = newton_schulz(torch.diag(torch.tensor([1.0, 1e-9], dtype=torch.float64)))
    assert float(tiny[1, 1]) == pytest.approx(1e-9 * 3.4445**5, rel=1e-5)


def test_zeros_stay_zeros() -> None:
    assert torch.equal(newton_schulz(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))


def steps(shape: tuple[int, ...], number: int = 3, dtype: torch.dtype = torch.float64, **options: object) -> Tensor:
    weight = nn.Parameter(noise(*shape, seed=100, dtype=dtype))
    optimizer = Muon([weight], 0.1, **options)  # type: ignore[arg-type]
    for step in range(number):
        weight.grad = noise(*shape, seed=step, dtype=dtype)
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("shape", [(3, 5), (5, 3)])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
def test_three_steps_by_hand(shape: tuple[int, int], nesterov: bool, scale: str) -> None:
    """Liu et al., 2025, equation 4: M = mu M + G, then W -= lr (0.2 sqrt(max(m, n)) O + decay W)."""
    m, n = shape
    factor = 0.2 * math.sqrt(max(m, n)) if scale == "match_rms_adamw" else math.sqrt(max(1, m / n))
    weight: Rows = noise(*shape, seed=100).tolist()
    momentum: Rows = [[0.0] * n for _ in range(m)]
    for step in range(3):
        gradient: Rows = noise(*shape, seed=step).tolist()
        momentum = [[0.8 * momentum[i][j] + gradient[i][j] for j in range(n)] for i in range(m)]
        ahead = [[gradient[i][j] + 0.8 * momentum[i][j] for j in range(n)] for i in range(m)]
        update = by_hand(ahead if nesterov else momentum)
        weight = [
            [weight[i][j] - 0.1 * (factor * update[i][j] + 0.3 * weight[i][j]) for j in range(n)] for i in range(m)
        ]
    found = steps(shape, momentum=0.8, nesterov=nesterov, scale=scale, weight_decay=0.3)
    torch.testing.assert_close(found, torch.tensor(weight, dtype=torch.float64))


def test_the_scale_gives_updates_the_size_of_adamws() -> None:
    """Of a full-rank matrix the root mean square of an update is near 0.2, whatever its shape (Liu et al., 2.2)."""
    for shape in [(16, 64), (64, 16), (32, 32)]:
        moved = steps(shape, 1, momentum=0.0) - noise(*shape, seed=100)
        assert 0.2 * 0.68 < float(moved.square().mean().sqrt()) / 0.1 < 0.2 * 1.21


@pytest.mark.parametrize(
    "options", [{"momentum": 0.5}, {"nesterov": False}, {"scale": "original"}, {"weight_decay": 0.1}, {"lr": 0.2}]
)
def test_each_option_changes_a_step(options: dict[str, object]) -> None:
    weight = {name: nn.Parameter(noise(4, 6, seed=100)) for name in ("plain", "changed")}
    for name, given in (("plain", {}), ("changed", options)):
        optimizer = Muon([weight[name]], **({"lr": 0.1} | given))  # type: ignore[arg-type]
        for step in range(2):
            weight[name].grad = noise(4, 6, seed=step)
            optimizer.step()
    assert not torch.allclose(weight["plain"], weight["changed"])


def test_precision() -> None:
    """bfloat16 rounds; float32 rounds less; of float64, float32 is float64."""
    exact = steps((6, 8))
    single, half = (steps((6, 8), dtype=torch.float32, precision=name).double() for name in ("float32", "bfloat16"))
    assert 0 < (single - exact).abs().max() < 1e-4
    assert 1e-4 < (half - exact).abs().max() < 0.1
    assert (steps((6, 8), precision="bfloat16") - exact).abs().max() > 1e-4


def test_experts_are_matrices_of_their_own() -> None:
    stack = steps((3, 4, 6), 1)
    for expert in range(3):
        weight = nn.Parameter(noise(3, 4, 6, seed=100)[expert])
        optimizer = Muon([weight], 0.1)
        weight.grad = noise(3, 4, 6)[expert]
        optimizer.step()
        torch.testing.assert_close(stack[expert], weight.detach())


def test_what_has_no_gradient_stays() -> None:
    weights = [nn.Parameter(noise(2, 3, seed=seed)) for seed in range(2)]
    optimizer = Muon(weights, 0.1, weight_decay=0.1)
    weights[1].grad = torch.ones_like(weights[1])
    optimizer.step()
    assert torch.equal(weights[0], noise(2, 3, seed=0))
    assert not torch.equal(weights[1], noise(2, 3, seed=1))
    assert list(optimizer.state) == [weights[1]]


def placed(mesh: DeviceMesh, placement: Shard | Replicate) -> str:
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 6), mesh["dp"], [placement]))
    with pytest.raises(ValueError, match="Muon") as caught:
        Muon([weight], 0.1)
    return f"{type(caught.value).__name__}: {caught.value}"
