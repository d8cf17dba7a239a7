"""Megatron's engine on fake CUDA tensors in a fake process group: ``python -m tests.backends.megatron.faked``.

It reads a layout as JSON, and writes what a step needs. That a plan could do so is shown here, and no plan does yet;
see `docs/decisions/0072-what-is-set-is-held.md`. The process is changed for good.
"""

import json
import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed._meta_registrations import create_fakework
from torch.overrides import TorchFunctionMode

import nrl
from nrl.backends import Model, adamw
from nrl.backends.training.loss.loss_terms import global_weights
from nrl.batch.prefixes import microbatches_by_prefix
from nrl.ops.plan import fake_cuda
from nrl.ops.plan.op_counter import OpCounter
from nrl.ops.plan.simulate import LOSSES, Step, make_rows
from nrl.runtime import Layout
from nrl.runtime.mesh.current_process import Process, enter_process
from tests.backends.processes import AXES
from tests.ops.plan.test_gpus import TINY

__all__ = ["STEP", "drive"]

STEP = Step(TINY | {"tie_word_embeddings": False}, rows=2, width=256, max_tokens=256)


class _Made(TorchFunctionMode):
    """``torch.tensor`` asks for a driver before any mode sees it: numbers come from the host, and are copied."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func is not torch.tensor:
            return func(*args, **options)
        device = options.pop("device", None)
        made = func(_numbers(args[0]), *args[1:], **options)
        return made if device is None else made.to(device)


def _numbers(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_numbers(each) for each in value]
    return value.item() if isinstance(value, Tensor) else value


def drive(layout: Layout) -> dict[str, Any]:
    """Two steps of the first process; the second one is counted."""
    counting = OpCounter()
    fake_cuda.install((9, 0), STEP.memory, counting.count_wait, layout.slots, 0)
    mesh = torch.distributed.device_mesh.init_device_mesh("cuda", (layout.slots, 1, 1, 1), mesh_dim_names=AXES)
    library = torch.library.Library("c10d", "IMPL")  # torch has fake ones of all collectives but those in one call
    for name in ("allreduce", "reduce_scatter_tensor", "allgather_into_tensor"):
        library.impl(f"{name}_coalesced_", lambda *args: create_fakework(args, return_first_arg=False), "Meta")
    from megatron.core.tensor_parallel import random

    from nrl.backends.megatron import checkpoint_io
    from nrl.backends.megatron.megatron_engine import MegatronEngine
    from nrl.backends.megatron.options import options

    state_of_chance = torch.zeros(16, dtype=torch.uint8)
    cuda: Any = torch.cuda
    cuda.get_rng_state = random._get_cuda_rng_state = lambda *_, **__: state_of_chance
    cuda.set_rng_state = random._set_cuda_rng_state = cuda.manual_seed = lambda *_, **__: None
    unfilled: Any = lambda engine, model, who: engine._build_stages(model, checkpoint_io.skeleton(model))  # noqa: E731
    MegatronEngine._load_stages = unfilled  # type: ignore[method-assign]
    batch, loss = make_rows(STEP), LOSSES[STEP.loss]
    weights = dict.fromkeys(global_weights(loss, batch, always={"logprobs"}), float(layout.slots))
    parts = list(microbatches_by_prefix(batch, max_tokens=STEP.max_tokens))
    fake_cuda.choose_attention((9, 0), Counter())
    model = Model(dict(STEP.model), dtype="bfloat16")
    with _Made(), counting, enter_process(Process(0, layout.slots, mesh)):
        engine = MegatronEngine(model, adamw(lr=1e-6), nrl.Sequences, options({}), torch.device("cuda:0"), layout, mesh)
        state, _ = engine.train(engine.init(), loss, parts, weights)
        held = counting.now
        counting.forget()
        engine.train(state, loss, parts, weights)
    return {
        "activations": counting.peak - held, "held": held, "collectives": dict(counting.sent), "at": counting.peak_line,
        "flops": dict(counting.flops), "waits": [[*key, count] for key, count in counting.waits.items()],
    }  # fmt: skip


if __name__ == "__main__":
    sys.stdout.write(json.dumps(drive(Layout(**json.loads(sys.argv[1])))))
