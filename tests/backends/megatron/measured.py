"""A step of Megatron's engine on CPUs, in real numbers: the memory that torch's allocator gave, and collectives."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import nrl
from nrl.backends import Model
from nrl.backends.training.loss.loss_terms import global_weights
from nrl.batch.prefixes import microbatches_by_prefix
from nrl.ops.plan.simulate import LOSSES, Step, make_rows
from nrl.runtime import Layout
from tests.backends.megatron.test_megatron_engine import engine
from tests.ops.plan.measured import most

__all__ = ["measure"]

_AGAIN: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


class _Norm(torch.autograd.Function):
    """The norm as a GPU's kernel keeps it: its input and a factor for each row. A CPU's keeps two float32 copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, factor)
        return (wide * factor * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, factor = ctx.saved_tensors
        normed, slope = x.float() * factor, slopes[0].float()
        down = slope * weight
        back = factor * (down - normed * (down * normed).mean(-1, keepdim=True))
        return back.to(x.dtype), (slope * normed).flatten(0, -2).sum(0).to(weight.dtype), None


def _normed(norm: torch.nn.RMSNorm, x: Tensor) -> Tensor:
    found: Tensor = _Norm.apply(x.contiguous(), norm.weight, norm.eps)  # type: ignore[no-untyped-call]
    return found


class _Sent(TorchDispatchMode):
    """Bytes of the largest tensor of each collective, by name, as `nrl.ops.plan.op_counter` counts them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and not _alone(args):
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            name = str(func).split(".")[1]
            self.sent[name] += max((x.numel() * x.element_size() for x in tensors), default=0)
        return func(*args, **kwargs or {})


def _alone(args: Any) -> bool:
    """Whether a process speaks to itself alone."""
    groups = [x for x in tree_leaves(args) if isinstance(x, torch.ScriptObject)]
    return any(dist.ProcessGroup.unbox(x).size() == 1 for x in groups if "ProcessGroup" in str(x._type()))


def measure(mesh: DeviceMesh, step: Step, layout: Layout) -> dict[str, Any]:
    """Take eight steps: measure the memory of all but the first and the last, and the collectives of the last.

    Returns:
        ``stage``, ``activations``: the most that torch's allocator gave beyond what the process holds between steps,
        and the buffer into which Megatron gathers inputs, which stays; and ``collectives``. It is that of the step
        which had the least: a thread of gloo holds what it has sent for as long as it pleases.
    """
    from megatron.core.parallel_state import get_global_memory_buffer

    options: dict[str, Any] = _AGAIN if step.checkpointing else {}
    made = engine(mesh, layout, Model(dict(step.model), dtype="bfloat16"), nrl.Sequences, **options)
    batch, loss = make_rows(step), LOSSES[step.loss]
    found = global_weights(loss, batch, always={"logprobs"})
    weights = {name: weight * layout.dp for name, weight in found.items()}
    parts = list(microbatches_by_prefix(batch, max_tokens=step.max_tokens))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.RMSNorm, "forward", _normed)
        state, _ = made.train(made.init(), loss, parts, weights)
        peaks = []
        for _ in range(6):
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
                state, _ = made.train(state, loss, parts, weights)
            peaks.append(most(profiled))
        with _Sent() as sent:
            made.train(state, loss, parts, weights)
    stage = layout.coordinates(mesh.get_rank())["pp"]
    kept = sum(x.numel() * x.element_size() for x in get_global_memory_buffer().buffer.values())
    return {"stage": stage, "activations": kept + min(peaks), "collectives": dict(sent.sent)}
