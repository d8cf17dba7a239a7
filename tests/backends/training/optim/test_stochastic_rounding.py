"""Moments in bfloat16: rounding that is right on average, and AdamW against torch's own."""

import pytest
import torch

from nrl.backends.training.optim import stochastic_rounding
from nrl.backends.training.optim.stochastic_rounding import RoundedAdamW, noise, round_stochastically

CPU = torch.device("cpu")


def test_noise_is_uniform_and_its_halves_are_independent() -> None:
    bits = noise(torch.Size([2**18]), 7, 0, CPU)
    halves = [(bits >> shift & 0xFFFF).double() / 2**16 for shift in (0, 16)]
    for half in halves:  # a mean of n uniform numbers deviates by 1 / sqrt(12 n), 0.0006
        assert abs(float(half.mean()) - 0.5) < 0.003
        counts = torch.histc(half, 64, 0, 1)
        assert float(((counts - 4096) ** 2 / 4096).sum()) < 110  # chi squared of 63, with a chance of 0.0002 above
    assert abs(float(torch.corrcoef(torch.stack(halves))[0, 1])) < 0.01
    other = noise(torch.Size([2**18]), 8, 0, CPU)
    assert abs(float(torch.corrcoef(torch.stack([bits.double(), other.double()]))[0, 1])) < 0.01


def test_rounding_is_right_on_average_and_keeps_what_bfloat16_has() -> None:
    x = torch.tensor([1.001, -1.001, 3e-39, 1e30, -0.25, 0.0, 5.0]).repeat_interleave(2**16)
    found = round_stochastically(x, noise(x.shape, 1, 0, CPU)).double().view(7, -1)
    assert all(len(set(some.tolist())) <= 2 for some in found)
    torch.testing.assert_close(found.mean(1), x.double().view(7, -1)[:, 0], rtol=2e-4, atol=0)
    assert torch.equal(found[4:], x.double().view(7, -1)[4:])  # bfloat16 has these


def steps(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, number: int) -> None:
    torch.manual_seed(0)
    for _ in range(number):
        parameter.grad = torch.randn_like(parameter)
        optimizer.step()


def test_a_first_step_is_that_of_torch_and_later_ones_are_near() -> None:
    mine, other = (torch.nn.Parameter(torch.linspace(-1, 1, 4096).view(64, 64)) for _ in range(2))
    optimizer = RoundedAdamW([{"params": [mine], "weight_decay": 0.1}], 1e-2, (0.9, 0.95), 1e-8)
    torchs = torch.optim.AdamW([other], 1e-2, (0.9, 0.95), 1e-8, 0.1, fused=True)
    steps(optimizer, mine, 1)
    steps(torchs, other, 1)
    assert torch.equal(mine, other)  # moments are rounded after they were used
    steps(optimizer, mine, 50)
    steps(torchs, other, 50)
    moved = other - torch.linspace(-1, 1, 4096).view(64, 64)
    assert (
        0 < float((mine - other).detach().norm() / moved.detach().norm()) < 0.02
    )  # each moment is off by 1/256 of itself


def test_a_second_moment_falls_again() -> None:
    """0.999 of a number is nearest to the number itself, in bfloat16; on average it has to become 0.999 of it."""
    parameter = torch.nn.Parameter(torch.zeros(4096))
    optimizer = RoundedAdamW([{"params": [parameter]}], 1e-3, (0.9, 0.999), 1e-8)
    parameter.grad = torch.ones(4096)
    optimizer.step()
    before = optimizer.state[parameter]["exp_avg_sq"].double().mean()
    parameter.grad = torch.zeros(4096)
    for _ in range(500):
        optimizer.step()
    after = optimizer.state[parameter]["exp_avg_sq"].double().mean()
    assert abs(float(after / before) - 0.999**500) < 0.01
    nearest = torch.tensor(1.0, dtype=torch.bfloat16)
    assert (nearest.float() * 0.999).to(torch.bfloat16) == nearest  # what happens without


def test_parts_give_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for at_once in (2**22, 100):
        monkeypatch.setattr(stochastic_rounding, "_AT_ONCE", at_once)
        parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in ((13, 40), (300,), (), (0, 4))]
        optimizer = RoundedAdamW([{"params": parameters}], 1e-2, (0.9, 0.999), 1e-8)
        torch.manual_seed(0)
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        found.append([*parameters, *(x for state in optimizer.state.values() for x in state.values())])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_steps_parameters_and_processes_have_other_noise() -> None:
    def kept(at: int, rank: int) -> list[torch.Tensor]:
        parameters = [torch.nn.Parameter(torch.ones(1000)) for _ in range(3)]
        optimizer = RoundedAdamW([{"params": parameters}], 1e-2, (0.9, 0.999), 1e-8, rank)
        optimizer.param_groups[0]["at"] = at
        for parameter in parameters[:2]:
            parameter.grad = torch.full((1000,), 1.003)
        optimizer.step()
        assert parameters[2] not in optimizer.state  # it had no gradient
        return [optimizer.state[parameter]["exp_avg"] for parameter in parameters[:2]]

    first, second = kept(0, 0)
    others = [second, kept(1, 0)[0], kept(0, 1)[0]]
    assert not any(torch.equal(first, other) for other in others)
    assert torch.equal(first, kept(0, 0)[0])
