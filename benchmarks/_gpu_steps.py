"""Steps that `benchmarks/gpu.py` takes: of nrl's engine, of plain transformers, and of a trainer with a sampler."""

import copy
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

import nrl
from nrl.algos import sft_loss
from nrl.backends import Model, Sampler, Trainer
from nrl.backends.fsdp.torch_engine import TorchEngine
from nrl.backends.models import lora
from nrl.backends.training.layout.packed_attention import choose_packing
from nrl.backends.training.loss.loss_terms import global_weights
from nrl.batch import Batch
from nrl.batch.packed_rows import Rectangles
from nrl.batch.prefixes import microbatches_by_prefix
from nrl.ops.plan.simulate import LOSSES, Step, make_rows

__all__ = ["Steps", "differences", "exchanged", "plain", "training_flops"]


class Steps:
    """Steps of the torch engine on a device, as `nrl plan` drives them; the state is replaced by each.

    Args:
        step: what is trained.
        where: the device of torch.
        fake: whether its tensors are; sums that come from it are ones.
        compile: whether the layers are compiled.
        drawn: whether weights are those that the CPU draws; if not, the device draws some, which takes no time.
    """

    def __init__(self, step: Step, where: torch.device, fake: bool, compile: bool = False, drawn: bool = True) -> None:
        packing = choose_packing(where, Rectangles, step.dtype, "gpu.py")
        model, source = (
            Model(dict(step.model), dtype=step.dtype),
            lora.build_lazy if drawn and not fake else lora.build_without_weights,
        )
        self.engine = TorchEngine(
            model,
            attrs.evolve(step.optimizer, lr=1e-6, clip=1e9),
            packing,
            step.checkpointing,
            compile,
            where,
            offload=step.offload,
            source=source,
        )
        self.batch, self.loss = make_rows(step), LOSSES[step.loss]
        weights = global_weights(self.loss, self.batch)
        self.weights = dict.fromkeys(weights, 1.0) if fake else weights
        self.parts = list(microbatches_by_prefix(self.batch, max_tokens=step.max_tokens))
        self.state = self.engine.init()
        if not drawn and not fake:
            _draw(self.state.module, where)

    def __call__(self) -> float:
        """Take one, and return its loss."""
        self.state, metrics = self.engine.train(self.state, self.loss, self.parts, self.weights)
        return float(nrl.finalize(metrics)["loss"])

    def outcome(self) -> dict[str, Tensor]:
        """Log-probabilities, and the gradients of a step, on the CPU, each as one row of numbers in float64."""
        found = self.engine.forward(self.state.module, self.parts, frozenset({"logprobs"}))
        gradients: list[Tensor] = []

        def copied(*_: Any) -> None:
            gradients.extend(x.grad.cpu() for x in self.state.module.parameters() if x.grad is not None)

        optimizer: Any = self.state.optimizer
        handle = optimizer.register_step_pre_hook(copied)
        self()
        handle.remove()
        logprobs = [out["logprobs"] for out in found]
        return {
            name: torch.cat([x.flatten().double() for x in each])
            for name, each in (("log-probabilities", logprobs), ("gradients", gradients))
        }


def _draw(module: torch.nn.Module, where: torch.device) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            own: Any = getattr(parameter, "_local_tensor", parameter)
            drawn = torch.ones(own.shape, device=where) if own.ndim < 2 else torch.randn(own.shape, device=where) / 50
            own.copy_(drawn)


def differences(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, float]:
    """How far numbers are from others: the root of the mean square, for gradients over that of the others.

    >>> a, b = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.0])
    >>> found = differences({"log-probabilities": a, "gradients": a}, {"log-probabilities": b, "gradients": b})
    >>> [round(x, 4) for x in found.values()]
    [0.7071, 0.2357]
    """
    far = {name: float((one[name] - other[name]).pow(2).mean().sqrt()) for name in one}
    return far | {"gradients": far["gradients"] / max(float(other["gradients"].pow(2).mean().sqrt()), 1e-30)}


def training_flops(weights: float, heads: float, sizes: Iterable[int]) -> float:
    """The products of a step that MFU counts: without recomputation, and of attention's scores the causal half.

    ``weights + 6 H D sum(n^2) L``: per layer, forward, two products of ``2 n^2 H D / 2``; backward, twice that.

    Args:
        weights: of `nrl.ops.plan.analytic.count_flops`.
        heads: ``L H D``, all layers' numbers of queries of a token.
        sizes: n, the tokens of each row.

    >>> training_flops(0, 1, [10, 20])
    3000.0
    """
    return float(weights + 6 * heads * sum(size**2 for size in sizes))


def plain(theirs: Any, batch: Batch, device: torch.device, again: bool) -> Callable[[], Tensor]:
    """The step that a user of transformers writes: its model with its own head and cross entropy, in bfloat16.

    Weights and moments are float32 under ``torch.autocast``, as nrl's are; AdamW is fused. Rows are a rectangle, padded
    on the right, so that no token sees padding without a mask, and attention takes its causal kernel.

    Args:
        theirs: a module with the same config, whose weights are copied.
        batch: with ``input_ids`` and ``loss_mask``.
        device: of the step.
        again: whether all of a layer is computed again in the backward pass.

    Returns:
        A step, which returns its loss, on the device.
    """
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(theirs.config)
    with torch.device("meta"):
        module: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    module.to_empty(device=device)
    module.tie_weights()
    for tensors in ("named_parameters", "named_buffers"):
        mine, other = (dict(getattr(each, tensors)()) for each in (module, theirs))
        if {name: x.shape for name, x in mine.items()} != {name: x.shape for name, x in other.items()}:
            raise ValueError(f"plain: found other tensors than nrl's: {sorted(mine.keys() ^ other.keys())}")
        with torch.no_grad():
            for name, x in mine.items():
                x.copy_(other[name])
    module.train()
    if again:
        module.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    ids = batch["input_ids"].to(device)
    labels = batch["input_ids"].masked_fill(~batch["loss_mask"], -100).to(device)

    def step() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            loss: Tensor = module(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def exchanged(
    trainer: Trainer, sampler: Sampler, batch: Batch, rounds: int, prompts: int = 64
) -> dict[str, list[float]]:
    """Seconds of calls on a trainer and a sampler, in a loop's order, after one round that does not count.

    Returns:
        ``publish``; ``generate``, the second of two calls; ``train``, as well; ``to sample`` and ``to train``, by which
        the first of two takes longer, which is what a swap takes where both are on one GPU; ``tokens``, of a call.

    >>> from nrl import tiny
    >>> from nrl.backends import Sampling, adamw, fsdp, hf
    >>> with nrl.cluster("local") as here:
    ...     trainer = fsdp.trainer(here.reserve(1), tiny.model(), adamw(lr=1e-3))
    ...     sampler = hf.sampler(here.reserve(1), tiny.model(), Sampling(max_new_tokens=4))
    ...     found = exchanged(trainer, sampler, tiny.sums(4).take(1)[0], 2, prompts=3)
    >>> {name: len(times) for name, times in found.items()}
    {'publish': 2, 'generate': 2, 'train': 2, 'to sample': 2, 'to train': 2, 'tokens': 2}
    """
    step, state = trainer.train_step(sft_loss), trainer.init()
    found: dict[str, list[float]] = {}
    asked = [[5 + i % 80, 6, 7, 8] for i in range(prompts)]

    def timed(act: Callable[[], object]) -> float:
        start = time.perf_counter()
        act()
        return time.perf_counter() - start

    def trained() -> None:
        nonlocal state
        state, metrics = step(state, batch)
        metrics.result()

    def generated() -> None:
        tokens.append(sum(len(each.token_ids) for each in sampler.generate(asked).result()))

    for _ in range(rounds + 1):
        tokens: list[int] = []
        train = [timed(trained), timed(trained)]
        publish = timed(lambda: nrl.publish(state.params, sampler))
        generate = [timed(generated), timed(generated)]
        for name, value in {
            "publish": publish, "generate": generate[1], "train": train[1], "to sample": generate[0] - generate[1],
            "to train": train[0] - train[1], "tokens": float(tokens[1]),
        }.items():  # fmt: skip
            found.setdefault(name, []).append(value)
    return {name: values[1:] for name, values in found.items()}
