"""A step of the real engine on the CPU, in real numbers: the memory that torch's allocator gave, and the products."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from nrl.backends.fsdp.torch_engine import TorchEngine
from nrl.backends.training.loss.loss_terms import global_weights
from nrl.backends.training.optim.optimizers import adamw
from nrl.backends.types import Model
from nrl.batch.packed_rows import Rectangles, Sequences
from nrl.batch.prefixes import microbatches_by_prefix
from nrl.ops.plan.simulate import LOSSES, Step, make_rows

__all__ = ["measure", "most"]


def measure(mesh: DeviceMesh | None, step: Step) -> dict[str, Any]:
    """Take three steps: measure the memory of the second one, and the products of the third.

    Rows are packed as `nrl.backends.training.layout.packed_attention.choose_packing` has it for a GPU.

    Args:
        mesh: of this process; None: it is alone.
        step: as it is driven. Each process has the same rows.

    Returns:
        ``peak``: what the process holds before the step (``parameters`` and ``moments``), and the most that torch's
        allocator gave beyond that, by torch's profiler. Memory that gloo takes in threads of its own is not in it.
        ``flops``: of products of matrices, by torch's counter.
    """
    torch.set_num_threads(1)
    device, packing = torch.device("cpu"), Sequences if step.dtype == "bfloat16" else Rectangles
    model = Model(dict(step.model), dtype=step.dtype)
    engine = TorchEngine(model, adamw(lr=1e-6), packing, step.checkpointing, False, device, mesh)
    batch, loss = make_rows(step), LOSSES[step.loss]
    weights = {name: weight * step.dp for name, weight in global_weights(loss, batch).items()}
    parts = list(microbatches_by_prefix(batch, max_tokens=step.max_tokens))
    state, _ = engine.train(engine.init(), loss, parts, weights)
    parameters = _bytes(state.module.parameters())
    moments = _bytes(x for each in state.optimizer.state.values() for x in each.values())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        state, _ = engine.train(state, loss, parts, weights)
    in_place = {torch.ops.aten.addmm_: lambda total, one, other, *_, **__: 2 * one[0] * one[1] * other[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as flops:
        engine.train(state, loss, parts, weights)
    counted = {str(op).rpartition(".")[2]: count for op, count in flops.get_flop_counts()["Global"].items()}
    return {
        "parameters": parameters,
        "moments": moments,
        "peak": parameters + moments + most(profiled),
        "flops": sum(count for name, count in counted.items() if "attn" not in name and "attention" not in name),
    }


def _bytes(tensors: Any) -> int:
    local: list[Tensor] = [getattr(x, "_local_tensor", x) for x in tensors]
    return sum(x.numel() * x.element_size() for x in local)


def most(profiled: Any) -> int:
    """The most bytes that were allocated and not yet freed."""
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
