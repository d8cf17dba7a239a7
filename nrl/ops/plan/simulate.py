"""The real torch engine, driven through training steps on fake CUDA tensors for one process of a mesh."""

import multiprocessing
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Literal

import attrs
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nrl.algos import Loss, grpo_loss, sft_loss
from nrl.arguments import checked
from nrl.backends.fsdp.torch_engine import TorchEngine
from nrl.backends.fsdp.torch_state import TorchState
from nrl.backends.models import lora
from nrl.backends.training import worker
from nrl.backends.training.layout.packed_attention import choose_packing
from nrl.backends.training.loss.loss_terms import global_weights
from nrl.backends.training.optim.lr_schedule import Schedule
from nrl.backends.training.optim.optimizers import Optimizer
from nrl.backends.training.weight_stream import next_bucket
from nrl.backends.types import Model
from nrl.batch import Batch
from nrl.batch.packed_rows import Rectangles
from nrl.batch.prefixes import microbatches_by_prefix
from nrl.errors import ConfigError
from nrl.ops.plan import fake_cuda
from nrl.ops.plan.gpus import GPUS
from nrl.ops.plan.op_counter import OpCounter
from nrl.runtime.mesh.current_process import Process, enter_process

__all__ = ["LOSSES", "Step", "make_rows", "simulate_step"]

LOSSES: Mapping[str, Loss] = {"grpo": grpo_loss, "sft": sft_loss}


@checked("Step")
@attrs.frozen
class Step:
    """A training step of one process.

    Args:
        model: the fields of a transformers config, with ``model_type``.
        dp: the number of processes.
        rank: of the process that is driven.
        rows: of the process's batch.
        width: tokens of the longest row; of each eight rows, row i has 37 i fewer, so that there is padding.
        shared: the tokens of a prompt that all rows begin with.
        max_tokens: of a micro-batch.
        loss: a name of `LOSSES`.
        dtype: in which the model computes.
        checkpointing: of activations, as `nrl.backends.fsdp.trainer` has it.
        offload: to the host, as there; then there are the stages ``forward`` and ``train`` alone.
        optimizer: with what it keeps of a parameter; its schedule does not matter.
        moments: bytes that it keeps for a parameter, for closed forms alone; None: those that are known of it.
        capability: of the device.
        memory: of the device, in bytes; chunks of log-probabilities are sized for it.
    """

    model: Mapping[str, Any]
    dp: int = 1
    rank: int = 0
    rows: int = 2
    width: int = 1024
    shared: int = 0
    max_tokens: int = 16384
    loss: str = "grpo"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    checkpointing: bool | Literal["selective"] = False
    offload: Literal["cpu"] | None = None
    optimizer: Optimizer = Optimizer()
    moments: float | None = None
    capability: tuple[int, int] = (9, 0)
    memory: int = int(GPUS["h100"].memory)


def simulate_step(step: Step) -> dict[str, Any]:
    """Drive the second of two steps in a process of its own, and count.

    Returns:
        Bytes of ``parameters``, ``moments`` and ``gradients`` of the process on its device, ``host``, which
        is those on the host, ``peak`` and ``peak_at``, the line of it;
        ``at_peak``: what of it are ``gradients`` of the process's own part, and ``log-probabilities``: chunks of the
        logits, what is kept of them, and the gradient of the head; ``activations``: all else that the peak has;
        ``logprobs``, the most that log-probabilities take at once; ``collectives`` (bytes by name), ``copied``
        (bytes between device and host, by direction), ``flops`` (by
        dtype), ``float32_products`` (flops by line), ``waits`` (``[kind, line, count]``), ``attention`` (calls by
        kernel), ``microbatches``; ``model``, the flops that a log's MFU counts; and ``recomputed``: the flops that the
        backward pass computes again, by line, of ``layers``, and of ``attention``.

        Then ``stages``, by name: ``forward`` (log-probabilities without gradients), ``train``, ``publish``, ``save``,
        ``rest`` and ``wake``. Each has the bytes that the process ``held`` at its end, ``peak``, ``peak_at``,
        ``waits``, ``collectives``, and ``copied`` (bytes by direction).

    Raises:
        ConfigError: the version of torch was not tested, or the step fails; the message has the error's last lines.
    """
    fake_cuda.check_torch()
    if step.optimizer.kind == "own" or step.moments is not None:
        raise ConfigError(
            f"plan: found an optimizer of the kind '{step.optimizer.kind}' and moments={step.moments}; a drive has one "
            "that nrl makes. Use closed forms (driven=false), with moments= as its bytes for a parameter"
        )
    processes = multiprocessing.get_context("forkserver")  # it imports once what each drive needs
    processes.set_forkserver_preload(["nrl.ops.plan.simulate", "transformers.models.qwen3.modeling_qwen3"])
    # A schedule may be a function.
    shipped = attrs.evolve(step, optimizer=attrs.evolve(step.optimizer, schedule=Schedule()))
    try:
        with ProcessPoolExecutor(1, processes) as pool:
            return pool.submit(_simulate_here, shipped).result()
    except Exception as error:
        cause = str(error.__cause__ or error).strip('"\n')  # the traceback over there
        raise ConfigError("plan: the step failed on fake tensors:\n" + "\n".join(cause.splitlines()[-8:])) from error


def make_rows(step: Step) -> Batch:
    """Make a batch of the step's shape."""
    torch.manual_seed(0)
    shape = step.rows, step.width
    ids = torch.randint(1, step.model["vocab_size"], shape)
    ids[:, : step.shared] = ids[:1, : step.shared]
    column = torch.arange(step.width)[None]
    mask = column < torch.tensor([max(step.width - 37 * (i % 8), 2) for i in range(step.rows)])[:, None]
    columns = {
        "input_ids": ids, "attention_mask": mask, "loss_mask": mask & (column >= max(step.shared, 1)),
        "rollout_logprobs": -torch.rand(shape), "old_logprobs": -torch.rand(shape), "advantages": torch.randn(shape),
        "group_ids": torch.zeros(step.rows, dtype=torch.int64),
    }  # fmt: skip
    batch: Batch = Batch(columns, batch_size=[step.rows]).lock_()
    return batch


def _num_bytes(tensors: Any, device: str = "cuda") -> int:
    local = [getattr(x, "_local_tensor", x) for x in tensors if isinstance(x, Tensor)]
    return sum(x.numel() * x.element_size() for x in local if x.device.type == device)


def _iter_moments(state: TorchState) -> Iterator[Any]:
    return (x for moments_of_parameter in state.optimizer.state.values() for x in moments_of_parameter.values())


def _simulate_here(step: Step) -> dict[str, Any]:
    """Simulate a step in a process of its own."""
    warnings.simplefilter("ignore")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks for GPUs
    torch.set_num_threads(1)
    counting, kernels = OpCounter(bool(step.offload)), Counter[str]()
    ranks = fake_cuda.install(step.capability, step.memory, counting.count_wait, step.dp, step.rank)
    mesh = None
    if step.dp > 1 or step.offload:
        mesh = torch.distributed.device_mesh.init_device_mesh("cuda", (step.dp,), mesh_dim_names=("dp",))
    model = Model(dict(step.model), dtype=step.dtype)
    device = torch.device("cuda:0")
    packing = choose_packing(device, Rectangles, step.dtype, "plan")
    engine = TorchEngine(
        model,
        step.optimizer,
        packing,
        step.checkpointing,
        False,
        device,
        mesh,
        step.offload,
        lora.build_without_weights,
    )
    batch, loss = make_rows(step), LOSSES[step.loss]
    # The sums of weights that come from the device are ones, from each process
    weights = dict.fromkeys(global_weights(loss, batch), float(step.dp))
    parts = list(microbatches_by_prefix(batch, max_tokens=step.max_tokens))
    fake_cuda.choose_attention(step.capability, kernels)
    stages: dict[str, Any] = {}

    gradients = dict[int, int]()  # gradients of the process's own shard, at the optimizer's step
    needed = dict[str, float]()  # products of the model, before the optimizer

    def ready(optimizer: Any, *_: Any) -> None:
        gradients_found = (x.grad for group in optimizer.param_groups for x in group["params"] if x.grad is not None)
        local = [getattr(x, "_local_tensor", x) for x in gradients_found]
        if not gradients:  # Muon has another optimizer within, which comes later
            needed["model"] = counting.model_flops()
        gradients.update(counting.bytes_by_birth(x for x in local if x.device.type == "cuda"))

    def stage(name: str, act: Callable[[], Any]) -> dict[str, Any]:
        counting.forget()
        kernels.clear()
        gradients.clear()
        act()
        stages[name] = {
            "held": counting.now,
            "peak": counting.peak,
            "peak_at": counting.peak_line,
            "collectives": dict(counting.sent),
            "copied": dict(counting.copied),
            "waits": [[kind, line, count] for (kind, line), count in counting.waits.items()],
        }
        return {
            "at_peak": {"gradients": counting.bytes_at_peak(gradients), "log-probabilities": counting.head_then},
            "logprobs": counting.head_most,
            "flops": dict(counting.flops),
            "float32_products": dict(counting.products),
            "recomputed": dict(counting.recomputed),
            "attention": dict(kernels + counting.attention),
        }

    register_optimizer_step_pre_hook(ready)
    with counting, enter_process(Process(step.rank, step.dp, mesh)):
        state = engine.init()
        engine.train(state, loss, parts, weights)  # it makes the moments
        stage("forward", lambda: engine.forward(state.module, parts, frozenset({"logprobs"})))
        train_stage = stage("train", lambda: engine.train(state, loss, parts, weights))
        parameters = list(state.module.parameters())
        held = _num_bytes(parameters)
        moments, host = (_num_bytes(_iter_moments(state), device) for device in ("cuda", "cpu"))
        if not step.offload:
            stage("publish", lambda: _read_all_weights(engine, state, step, ranks))
            stage("save", lambda: _save(engine, state))
            stage("rest", state.offload)
            stage("wake", state.onload)
    return train_stage | {
        **{name: stages["train"][name] for name in ("peak", "peak_at", "collectives", "copied", "waits")},
        "parameters": held,
        "moments": moments,
        "gradients": held,
        **needed,
        "host": 2 * _num_bytes(parameters, "cpu") + host if step.offload else 0,
        "activations": stages["train"]["peak"] - held - moments - sum(train_stage["at_peak"].values()),
        "microbatches": len(parts),
        "count": sum(x.numel() for x in parameters),
        "stages": stages,
    }


class _Reply(BaseException):
    """The reply of a process."""


def _read_all_weights(engine: TorchEngine, state: TorchState, step: Step, ranks: fake_cuda.OtherRanks) -> None:
    """Read all weights as for samplers on the same GPUs, which have one bucket while the next is read."""
    dtype = getattr(torch, step.dtype)  # the samplers' dtype
    readings = [worker.open_weight_stream(worker.find_in_state, dtype, engine, state) for _ in range(step.dp)]

    def say(_: int, value: Any) -> Any:
        raise _Reply(value)

    def says(rank: int, _: Any) -> Any:
        """Return what the process of this rank would send of its shards, once it has read as far."""
        ranks.reply = say
        try:
            with fake_cuda.as_rank(rank):
                readings[rank].next_full()
        except _Reply as said:
            return said.args[0]
        finally:
            ranks.reply = says

    alike, lent, ranks.reply = ranks.reply, None, says
    while readings[step.rank].has_more:
        lent = next_bucket("publish", dict, True, readings[step.rank])
    del lent
    ranks.reply = alike


def _save(engine: TorchEngine, state: TorchState) -> None:
    """Copy what this process writes to the host."""
    engine.save(state, state.module).copy_to_host()
