"""The torch optimizer of a model, from an optimizer as data."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nrl.backends.fsdp import sharding
from nrl.backends.models import weight_layout
from nrl.backends.models.named_weights import a_few, is_head, weight_name
from nrl.backends.training.optim.muon import Muon
from nrl.backends.training.optim.optimizers import Group, Optimizer
from nrl.backends.training.optim.stochastic_rounding import RoundedAdamW
from nrl.backends.training.saving.storage import KEYS
from nrl.errors import ModelError

__all__ = ["OptimizerGroup", "TorchOptimizer", "build_optimizer", "optimizer_kind"]


class OptimizerGroup:
    """A group of torch optimizers that act as one, each with its own parameters.

    Args:
        optimizers: step one after the other. From then on they share their state.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._optimizers = optimizers
        self.state: defaultdict[Tensor, Any] = defaultdict(dict)
        for optimizer in optimizers:
            optimizer.state = self.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        """Take a step of each optimizer."""
        for optimizer in self._optimizers:
            optimizer.step()


_KEEPS = {"adamw": KEYS, "muon": ("momentum_buffer",), "sgd": ("momentum_buffer",), "own": None}
"""The state that each kind keeps of a parameter; unknown for one's own optimizer."""

type TorchOptimizer = torch.optim.Optimizer | OptimizerGroup


def build_optimizer(spec: Optimizer, module: nn.Module) -> TorchOptimizer:
    """Make a fresh optimizer of the trained parameters of a model, sharded or not.

    Raises:
        ModelError: a group fits no trained weight, or one's own optimizer cannot be used.
    """
    trained = {name: p for name, p in _name_parameters(module).items() if p.requires_grad}
    for group in spec.groups:
        if not any(fnmatchcase(name, group.names) for name in trained):
            raise ModelError(
                f"trainer.init: no trained weight has a name like '{group.names}', which a group of the optimizer asks "
                f"for; there are {a_few(trained)}"
            )
    for_muon, for_other = _split_groups(spec, trained, _make_outside_test(module))
    match spec.kind:
        case "own":
            return _make_own(spec, for_other)
        case "sgd":
            return torch.optim.SGD(for_other, lr=spec.lr, momentum=spec.momentum or 0.0, nesterov=bool(spec.nesterov))
        case "muon" if for_muon:
            optimizers: list[torch.optim.Optimizer] = [_make_muon(spec, for_muon, module)]
            return OptimizerGroup(*optimizers, *([_make_adamw(spec, for_other)] if for_other else []))
    return _make_adamw(spec, for_other)


def optimizer_kind(spec: Optimizer, optimizer: TorchOptimizer) -> str:
    """Return the name of the optimizer whose state a checkpoint has."""
    return f"own, {type(optimizer).__name__}" if spec.kind == "own" else spec.kind


def _make_adamw(spec: Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if spec.moments == "bfloat16":
        return RoundedAdamW(groups, spec.lr, spec.betas, spec.eps, _rank(groups))
    return torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=True)


def _rank(groups: list[dict[str, Any]]) -> int:
    """Return the rank of this process among the processes that share the parameters."""
    first = groups[0]["params"][0]
    return first.device_mesh.get_local_rank() if isinstance(first, DTensor) else 0


def _make_muon(spec: Optimizer, groups: list[dict[str, Any]], module: nn.Module) -> Muon:
    fields = {"momentum": spec.momentum, "nesterov": spec.nesterov, "scale": spec.scale, "precision": spec.precision}
    options: Any = {name: value for name, value in fields.items() if value is not None}
    names = {id(p): name for name, p in _name_parameters(module).items()}
    return Muon(groups, spec.lr, matrices=partial(_split_matrices, names, sharding.find_parts(module)), **options)


def _split_matrices(
    names: Mapping[int, str], parts: weight_layout.Parts, parameter: Tensor, tensor: Tensor
) -> list[Tensor]:
    """Return the matrices of files in a tensor that is like a parameter."""
    return [
        piece.tensor
        for piece in weight_layout.split_for_files([sharding.local_shard(names[id(parameter)], tensor)], parts)
    ]


def _name_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {weight_name(name): parameter for name, parameter in module.named_parameters()}


def _make_outside_test(module: Any) -> Callable[[str, nn.Parameter], bool]:
    """Return a test of whether a parameter is outside the hidden layers: of embeddings or of the head."""
    head = module.get_output_embeddings()
    tables = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    weights = {id(part.weight) for part in (*tables, *([] if head is None else [head]))}
    return lambda name, parameter: is_head(name) or id(parameter) in weights


def _split_groups(
    spec: Optimizer, trained: Mapping[str, nn.Parameter], outside: Callable[[str, nn.Parameter], bool]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Split the trained parameters into groups for Muon and groups for another optimizer."""
    grouped: tuple[dict[Any, list[nn.Parameter]], ...] = {}, {}
    for name, parameter in trained.items():
        group = next((group for group in spec.groups if fnmatchcase(name, group.names)), Group("*"))
        decay = group.weight_decay
        if decay is None and spec.kind != "own":
            decay = spec.weight_decay if parameter.ndim > 1 else 0.0
        for_muon = spec.kind == "muon" and group.muon and _is_matrix(parameter.shape) and not outside(name, parameter)
        grouped[0 if for_muon else 1].setdefault((group.factor, decay), []).append(parameter)
    keep = _KEEPS["muon"], _KEEPS["adamw" if spec.kind == "muon" else spec.kind]
    muon, other = (
        [
            {"params": parameters, "factor": factor, "keeps": keeps}
            | ({} if decay is None else {"weight_decay": decay})
            for (factor, decay), parameters in groups.items()
        ]
        for groups, keeps in zip(grouped, keep, strict=True)
    )
    return muon, other


def _is_matrix(shape: Sequence[int]) -> bool:
    """Return whether a shape is of a matrix or of a stack of matrices.

    Kernels of convolutions along time have length 1 in a dimension and are no matrices.
    """
    return len(shape) == 2 or (len(shape) == 3 and min(shape[1:]) > 1)


def _make_own(spec: Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    assert spec.make is not None
    _try(spec.make)
    optimizer: torch.optim.Optimizer = spec.make(groups)
    return optimizer


def _try(make: Callable[[Any], Any]) -> None:
    """Refuse an optimizer whose state a checkpoint would not have, by a step on a small matrix."""
    parameter = nn.Parameter(torch.ones(2, 3))
    parameter.grad = torch.ones(2, 3)
    optimizer = make([{"params": [parameter]}])
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ModelError(
            f"own: make gave a {name}; it has to give a torch.optim.Optimizer of the parameters that it gets"
        )

    def settings() -> list[dict[str, str]]:
        return [{key: repr(x) for key, x in group.items() if key != "params"} for group in optimizer.param_groups]

    before = settings()
    try:
        optimizer.step()
    except Exception as error:
        raise ModelError(
            f"own: a step of {name} on a matrix raised {type(error).__name__}: {error}; its step has to work without a "
            "closure, on what has a gradient"
        ) from error
    if before != settings():
        changed = sorted(
            {key for old, new in zip(before, settings(), strict=True) for key in new if old.get(key) != new[key]}
        )
        raise ModelError(
            f"own: a step of {name} changes {a_few(changed)} in its param_groups, which a checkpoint does not have; "
            "use one that keeps all that changes in the state of each parameter"
        )
    for key, x in optimizer.state[parameter].items():
        tensor = isinstance(x, Tensor) and tuple(x.shape) in ((), (2, 3))
        if not (tensor or x is None or isinstance(x, bool | int | float)) or "." in key:
            kind = f"a tensor of shape {list(x.shape)}" if isinstance(x, Tensor) else f"of type {type(x).__name__}"
            raise ModelError(
                f"own: {name} keeps '{key}', {kind}, of a parameter of shape [2, 3]; a checkpoint has tensors of the "
                "parameter's shape, and numbers, by names without dots"
            )
