"""Muon: momentum whose singular values are all made about 1, for the matrices of hidden layers.

Where rows of matrices are spread over processes, each matrix has an owner. It gets the rows of all others, computes,
and gives each its rows back. So the numbers are those of one process, and none is computed twice.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import batched
from math import sqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from nrl.errors import PlacementError

__all__ = ["Muon", "newton_schulz"]

type _Matrices = Callable[[Tensor, Tensor], Sequence[Tensor]]

_COEFFICIENTS = 3.4445, -4.7750, 2.0315
_SCALES: dict[str, Callable[[int, int], float]] = {
    "match_rms_adamw": lambda rows, columns: 0.2 * sqrt(max(rows, columns)),
    "original": lambda rows, columns: sqrt(max(1, rows / columns)),
}


def newton_schulz(matrices: Tensor, *, steps: int = 5, eps: float = 1e-7) -> Tensor:
    """Approximate ``U V^T`` of each matrix ``U S V^T``: its singular values become numbers between 0.68 and 1.21.

    That holds of those that are at least 0.002 of the Frobenius norm; smaller ones are multiplied by up to 485. One
    step is ``x = a x + (b A + c A^2) x`` with ``A = x x^T``, from ``x = matrix / (its Frobenius norm + eps)``, and with
    a, b, c = 3.4445, -4.7750, 2.0315.

    Args:
        matrices: ``[..., m, n]``, computed in their dtype; of zeros the result is zeros.
        steps: how many.
        eps: added to the norm.

    Returns:
        ``[..., m, n]``.

    Source: Jordan et al., 2024 (Muon: an optimizer for hidden layers in neural networks, kellerjordan.github.io).

    >>> newton_schulz(torch.tensor([[3.0, 0.0], [0.0, -4.0]])).round(decimals=2)
    tensor([[ 0.7200,  0.0000],
            [ 0.0000, -1.1200]])
    """
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices  # the smaller product
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.mT if tall else x
    return result


class Muon(torch.optim.Optimizer):
    """The steps of `nrl.backends.muon` on matrices, with ``momentum_buffer`` as their state.

    Args:
        params: of two dimensions, or of three, where the first counts matrices. Sharded ones are so along the first
            dimension of a mesh that has one; all processes make each step together.
        lr: the learning rate.
        momentum: mu.
        nesterov: whether a step looks ahead.
        scale: a name of a scale of `nrl.backends.muon`.
        precision: in which Newton-Schulz is computed, at least; bfloat16 means just that.
        weight_decay: decoupled.
        matrices: from a parameter, and a tensor that is like it or the part of it that this process has, to views of
            that tensor, each of a matrix or of some in its last two dimensions.

    Raises:
        PlacementError: a parameter is sharded in another way.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        scale: str = "match_rms_adamw",
        precision: str = "float32",
        weight_decay: float = 0.0,
        matrices: _Matrices = lambda _, whole: [whole],
    ) -> None:
        self._matrices, self._scale = matrices, _SCALES[scale]
        self._dtype: torch.dtype = getattr(torch, precision)
        defaults = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if isinstance(parameter, DTensor) and parameter.placements != (Shard(0),):
                raise PlacementError(
                    f"Muon: a weight of shape {list(parameter.shape)} has the placements {parameter.placements}; it "
                    "knows those that are sharded along their first dimension, over one axis of a mesh"
                )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step; over several processes, a collective."""
        for group in self.param_groups:
            ready = [(p, self._momentum(p, group)) for p in group["params"] if p.grad is not None]
            split = [(p, x) for p, x in ready if isinstance(x, DTensor) and x.ndim == 2]
            for parameter, update in ready:
                if not (isinstance(update, DTensor) and update.ndim == 2):
                    self._orthogonalise(parameter, update)
            for owned in batched(split, split[0][1].device_mesh.size() if split else 1):
                self._orthogonalise_by_owners(owned)
            for parameter, update in ready:
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])

    def _momentum(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Update the momentum of a parameter, and return the update as a new tensor."""
        gradient = parameter.grad
        assert gradient is not None
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = state["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
        update: Tensor = gradient.add(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer.clone()
        return update

    def _orthogonalise(self, parameter: Tensor, update: Tensor) -> None:
        """Replace the matrices in a tensor, all matrices of one shape together."""
        by_shape = dict[torch.Size, list[Tensor]]()
        for view in self._matrices(parameter, update):
            if view.numel():
                by_shape.setdefault(view.shape, []).append(view)
        for shape, views in by_shape.items():
            stacked = torch.stack(views)
            low = self._dtype == torch.bfloat16
            dtype = self._dtype if low else torch.promote_types(stacked.dtype, self._dtype)
            orthogonal = newton_schulz(stacked.to(dtype)).to(stacked.dtype) * self._scale(shape[-2], shape[-1])
            for view, x in zip(views, orthogonal, strict=True):
                view.copy_(x)

    def _orthogonalise_by_owners(self, updates: Sequence[tuple[Tensor, DTensor]]) -> None:
        """Orthogonalise at most as many matrices as there are processes: each process computes one."""
        mesh = updates[0][1].device_mesh
        group, rank, size = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        local = [update.to_local() for _, update in updates]
        sent = [x.numel() for x in local] + [0] * (size - len(local))
        received, parameter = [0] * size, updates[rank][0] if rank < len(updates) else None
        if parameter is not None:
            rows, columns = parameter.shape
            rows_each = -(-rows // size)
            received = [columns * max(0, min(rows_each, rows - rows_each * other)) for other in range(size)]
        rows_sent = torch.cat([x.flatten() for x in local])
        rows_received = rows_sent.new_empty(sum(received))
        dist.all_to_all_single(rows_received, rows_sent, received, sent, group=group)
        if parameter is not None:
            self._orthogonalise(parameter, rows_received.view(parameter.shape))
        dist.all_to_all_single(rows_sent, rows_received, sent, received, group=group)
        for x, mine in zip(local, rows_sent.split(sent[: len(local)]), strict=True):
            x.copy_(mine.view_as(x))
