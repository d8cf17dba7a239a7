"""Numbers that are kept in bfloat16 and computed in float32: stochastic rounding, and AdamW whose moments are so kept.

bfloat16 has 8 bits of precision. An average with ``beta = 0.999`` changes by 1/1000 of itself in a step, and to the
nearest a change below 1/512 is lost: such a second moment would never fall again. Rounded up or down by chance, it is
right on average. The chance is a hash of the step and of the place, so that a run which goes on rounds as before.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

__all__ = ["RoundedAdamW", "noise", "round_stochastically"]

_AT_ONCE = 2**23
"""The numbers of a parameter that are computed at a time, each with some 40 bytes of temporary memory."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


def noise(shape: torch.Size, seed: int, start: int, device: torch.device) -> Tensor:
    """Return 32 random bits for each number of a tensor, a function of the seed and of its place alone.

    Args:
        shape: of the tensor.
        seed: any integer.
        start: the place of the tensor's first number.
        device: of the result.

    Returns:
        ``shape`` int32.

    Source: Wellons, 2018 (github.com/skeeto/hash-prospector), the best 32-bit hash of two rounds, twice.

    >>> whole, part = (noise(torch.Size([n]), 3, start, torch.device("cpu")) for n, start in ((4, 0), (2, 2)))
    >>> torch.equal(whole[2:], part)
    True
    """
    index = torch.arange(start, start + shape.numel(), dtype=torch.int64, device=device)
    x = index.remainder_(2**31).to(torch.int32).view(shape)
    x = _mix_bits(x)
    return _mix_bits(x.add_(_to_signed(seed * 0x9E3779B1)))


def _mix_bits(x: Tensor) -> Tensor:
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x ^= (x >> shift).bitwise_and_((1 << (32 - shift)) - 1)  # a shift of int32 repeats the sign
        x *= _to_signed(factor)
    return x.bitwise_xor_((x >> 15).bitwise_and_(2**17 - 1))


def _to_signed(x: int) -> int:
    return (x + 2**31) % 2**32 - 2**31


def round_stochastically(x: Tensor, bits: Tensor) -> Tensor:
    """Round to bfloat16, up or down with the chance that makes the mean right.

    With a < x < b, the neighbours in bfloat16: b with the chance ``(x - a) / (b - a)``, else a. What bfloat16 has
    stays as it is.

    Args:
        x: float32, finite.
        bits: int32 of its shape, whose lower 16 bits are random.

    Returns:
        bfloat16.

    Source: Gupta et al., 2015 (1502.02551), section 3; for bfloat16, Zamirai et al., 2020 (2010.06192).

    >>> third = torch.full((10_000,), 1 + 1 / 384)  # a third of the way from 1 to the next number, 1 + 1 / 128
    >>> found = round_stochastically(third, noise(third.shape, 0, 0, third.device))
    >>> sorted(set(found.tolist())), round(float((found > 1).float().mean()), 2)
    ([1.0, 1.0078125], 0.33)
    """
    return x.view(torch.int32).add(bits & 0xFFFF).bitwise_and_(-0x10000).view(torch.float32).to(torch.bfloat16)


class RoundedAdamW(torch.optim.Optimizer):
    """torch's fused AdamW, computed in the parameter's dtype, whose moments are kept in bfloat16.

    A step reads moments as they are kept, computes new ones and the update of these, and then rounds them
    stochastically. Parameters may be sharded; then each process has other noise.

    Args:
        groups: of parameters, as torch has them.
        lr: the learning rate.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        rank: of the process.

    >>> parameter = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = RoundedAdamW([{"params": [parameter]}], 0.1, (0.9, 0.999), 1e-8)
    >>> parameter.grad = torch.ones(2)
    >>> optimizer.step()
    >>> parameter.data, optimizer.state[parameter]["exp_avg"].dtype
    (tensor([0.9000, 0.9000]), torch.bfloat16)
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        rank: int = 0,
    ) -> None:
        extra = {"fused": True, "moments": torch.bfloat16, "at": 0}  # A checkpoint is read with these options.
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0} | extra)
        self._rank = rank

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step."""
        number = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                number += 1
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), device=_local(parameter).device)
                    state |= {key: torch.zeros_like(parameter, dtype=torch.bfloat16) for key in _MOMENTS}
                seed = (group["at"] * 1_000_003 + number) * 1_000_003 + self._rank
                _update(group, seed, state["step"], parameter, parameter.grad, *(state[key] for key in _MOMENTS))
                state["step"] += 1
            group["at"] += 1


def _update(group: Mapping[str, Any], seed: int, steps: Tensor, *tensors: Tensor) -> None:
    """Take a step of a parameter, a block of its numbers at a time; the engine sets the step's number, ``at``."""
    full, start = [torch.atleast_1d(_local(x)) for x in tensors], 0
    rows = max(1, _AT_ONCE // max(1, full[0][:1].numel()))
    for parameter, gradient, *stored in zip(*(x.split(rows) for x in full), strict=True):
        moments = [x.to(parameter.dtype) for x in stored]
        adamw(
            [parameter],
            [gradient],
            [moments[0]],
            [moments[1]],
            [],
            [steps.clone()],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        bits = noise(parameter.shape, seed, start, parameter.device)
        for moment, x, shift in zip(stored, moments, (0, 16), strict=True):
            moment.copy_(round_stochastically(x.float(), bits >> shift))
        start += parameter.numel()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
