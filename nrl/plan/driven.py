"""The real torch engine, driven through training steps on fake CUDA tensors for one process of a mesh."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from nrl.algos import Loss, grpo_loss, sft_loss
from nrl.backends.base import Model
from nrl.backends.fsdp.torch_engine import TorchEngine
from nrl.backends.models import lora
from nrl.backends.training.optimizers import adamw
from nrl.backends.training.packed_attention import packing_on
from nrl.backends.training.terms import global_weights
from nrl.batch import Batch
from nrl.batch.packed_rows import Rectangles
from nrl.batch.prefixes import microbatches_by_prefix
from nrl.errors import ConfigError
from nrl.plan import fake_cuda

__all__ = ["LOSSES", "Step", "drive", "rows"]

LOSSES: Mapping[str, Loss] = {"grpo": grpo_loss, "sft": sft_loss}


@attrs.frozen
class Step:
    """A training step of one process.

    Args:
        model: the fields of a transformers config, with ``model_type``.
        dp: the number of processes.
        rows: of the process's batch.
        width: tokens of the longest row; row i has 37 i fewer, so that there is padding.
        shared: the tokens of a prompt that all rows begin with.
        max_tokens: of a micro-batch.
        loss: a name of `LOSSES`.
        dtype: in which the model computes.
        checkpointing: of activations, as `nrl.backends.fsdp.trainer` has it.
        capability: of the device.
    """

    model: Mapping[str, Any]
    dp: int = 1
    rows: int = 2
    width: int = 1024
    shared: int = 0
    max_tokens: int = 16384
    loss: str = "grpo"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    checkpointing: bool | Literal["selective"] = False
    capability: tuple[int, int] = (9, 0)


def drive(step: Step) -> dict[str, Any]:
    """Drive the second of two steps in a process of its own, and count.

    Returns:
        Bytes of ``parameters``, ``moments`` and ``gradients`` of the process, ``peak`` and ``peak_at``, the line of it;
        ``activations``, which is what the peak has beyond the first two; ``collectives`` (bytes by name), ``flops`` (by
        dtype), ``float32_products`` (flops by line), ``waits`` (``[kind, line, count]``), ``attention`` (calls by
        kernel), ``microbatches``.

    Raises:
        ConfigError: the version of torch was not tested, or the step fails; the message has the error's last lines.
    """
    fake_cuda.check_torch()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "nrl.plan.driven"],
        input=json.dumps(attrs.asdict(step)), capture_output=True, text=True, check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        raise ConfigError("plan: the step failed on fake tensors:\n" + "\n".join(done.stderr.splitlines()[-8:]))
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def rows(step: Step) -> Batch:
    """A batch of the step's shape."""
    torch.manual_seed(0)
    shape = step.rows, step.width
    ids = torch.randint(1, step.model["vocab_size"], shape)
    ids[:, : step.shared] = ids[:1, : step.shared]
    column = torch.arange(step.width)[None]
    mask = column < torch.tensor([max(step.width - 37 * i, 2) for i in range(step.rows)])[:, None]
    columns = {
        "input_ids": ids, "attention_mask": mask, "loss_mask": mask & (column >= max(step.shared, 1)),
        "rollout_logprobs": -torch.rand(shape), "old_logprobs": -torch.rand(shape), "advantages": torch.randn(shape),
        "group_ids": torch.zeros(step.rows, dtype=torch.int64),
    }  # fmt: skip
    made: Batch = Batch(columns, batch_size=[step.rows]).lock_()
    return made


class _Unfilled(TorchEngine):
    """Its weights have no numbers, and are not probed, which compares numbers."""

    def _build(self, model: Model) -> tuple[Any, Callable[[str], Tensor]]:
        module = lora.skeleton(model, dtype=torch.float32)
        names = dict(module.named_parameters())
        if self._peers.alone:
            made: dict[int, torch.nn.Parameter] = {}  # tied ones once
            for part in module.modules():
                for name, old in part._parameters.items():
                    if old is not None:
                        if id(old) not in made:
                            made[id(old)] = torch.nn.Parameter(torch.empty_like(old, device=self.device))
                        part._parameters[name] = made[id(old)]
                for name, buffer in part._buffers.items():
                    part._buffers[name] = None if buffer is None else buffer.to(self.device)
        return module, lambda name: torch.empty(names[name].shape)  # of which nobody touches a page

    def _probe(self, module: Any) -> None: ...


def _bytes(tensors: Any) -> int:
    local = [getattr(x, "_local_tensor", x) for x in tensors if isinstance(x, Tensor)]
    return sum(x.numel() * x.element_size() for x in local if x.device.type == "cuda")


def _here(step: Step) -> dict[str, Any]:
    """In a process of its own."""
    counting = fake_cuda.Counting()
    fake_cuda.install(step.capability, counting.waited, step.dp)
    mesh = None
    if step.dp > 1:
        mesh = torch.distributed.device_mesh.init_device_mesh("cuda", (step.dp,), mesh_dim_names=("dp",))
    model = Model(dict(step.model), dtype=step.dtype)
    device = torch.device("cuda:0")
    packing = packing_on(device, Rectangles, step.dtype, "plan")
    engine = _Unfilled(model, adamw(lr=1e-6), packing, step.checkpointing, False, device, mesh)
    batch, loss = rows(step), LOSSES[step.loss]
    # The sums of weights that come from the device are ones, from each process
    weights = dict.fromkeys(global_weights(loss, batch), float(step.dp))
    parts = list(microbatches_by_prefix(batch, max_tokens=step.max_tokens))
    kernels = Counter[str]()
    fake_cuda.choose_attention(step.capability, kernels)
    with counting:
        state = engine.init()
        for _ in range(2):
            counting.forget()
            kernels.clear()
            state, _ = engine.train(state, loss, parts, weights)
        parameters = list(state.module.parameters())
        held = _bytes(parameters)
        moments = _bytes(x for each in state.optimizer.state.values() for x in each.values())
    return {
        "parameters": held,
        "moments": moments,
        "gradients": held,
        "peak": counting.peak,
        "peak_at": counting.at,
        "activations": counting.peak - held - moments,
        "collectives": dict(counting.sent),
        "flops": dict(counting.flops),
        "float32_products": dict(counting.products),
        "waits": [[kind, line, count] for (kind, line), count in counting.waits.items()],
        "attention": dict(kernels + counting.attention),
        "microbatches": len(parts),
        "count": sum(x.numel() for x in parameters),
    }


if __name__ == "__main__":
    _given = json.load(sys.stdin)
    sys.stdout.write(json.dumps(_here(Step(**_given | {"capability": tuple(_given["capability"])}))))
