"""The torch engine, in one process: any Hugging Face causal language model, packed rows, fused log-probabilities."""

import contextlib
import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import attrs
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from nrl.algos import Loss, name_of, needed
from nrl.backends import models
from nrl.backends.base import Model
from nrl.backends.fsdp import attention, probe
from nrl.backends.fsdp.outputs import Outputs, compute, predicted
from nrl.backends.gradients import ignores, value_and_grad
from nrl.backends.optimizers import Optimizer, learning_rate
from nrl.backends.training import check_weights
from nrl.batch import Batch, lengths
from nrl.errors import NotFinite
from nrl.reduce import Mean, Metrics, Sum, merge

__all__ = ["State", "TorchEngine"]


_SEEN = "weight of "
"""Before the name of a term: its weight, added up over micro-batches."""


class State(NamedTuple):
    """A model that is being trained, its optimizer, and how many steps that has taken."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    step: int


@attrs.frozen
class TorchEngine:
    """Satisfies `nrl.backends.base.Engine`; see `nrl.backends.fsdp.trainer` for the fields."""

    model: Model
    optimizer: Optimizer
    packed: bool
    checkpointing: bool
    compile: bool
    device: torch.device
    _curious: WeakValueDictionary[int, Loss] = attrs.field(
        factory=WeakValueDictionary, init=False, repr=False, eq=False
    )
    """Losses that have been seen to read outputs where ``loss_mask`` is false."""

    @property
    def provides(self) -> frozenset[str]:
        """What a loss may ask for besides ``logprobs``."""
        return frozenset({"entropy"})

    def init(self, tensors: Iterable[tuple[str, Tensor]] | None = None) -> State:
        """A fresh train state."""
        module = self._build(self.model)
        if tensors is not None:
            models.load_tensors(module, tensors, who="trainer.init")
        return State(module, self._optimizer(module), 0)

    def params(self, state: State) -> nn.Module:
        """The module inside of a train state."""
        return state.module

    def load(self, source: str | None) -> nn.Module:
        """A frozen module."""
        model = self.model if source is None else attrs.evolve(self.model, source=source)
        module: nn.Module = self._build(model).requires_grad_(False)
        return module

    def freeze(self, params: nn.Module) -> nn.Module:
        """A frozen copy."""
        return copy.deepcopy(params).requires_grad_(False)

    def tensors(self, params: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Parameters by name, tied ones once."""
        return models.named_tensors(params)

    def forward(self, params: nn.Module, microbatches: Sequence[Batch], needs: frozenset[str]) -> Sequence[TensorDict]:
        """Outputs without gradients, on the CPU."""
        params.eval()
        with torch.no_grad():
            found = [(batch, self._outputs(params, batch, predicted(batch), needs)) for batch in microbatches]
        return [
            TensorDict({key: out.spread(x) for key, x in out.values.items()}, batch_size=batch.batch_size).cpu()
            for batch, out in found
        ]

    def train(
        self, state: State, loss: Loss, microbatches: Sequence[Batch], weights: Mapping[str, float]
    ) -> tuple[State, Metrics]:
        """One optimizer step; either steps once or raises and leaves the state as it was."""
        module, optimizer, step = state
        name = name_of(loss)
        module.train()
        try:
            metrics = self._accumulate(module, loss, name, microbatches, weights)
            gradients = [p.grad for p in module.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
            if not torch.isfinite(norm):
                raise NotFinite(
                    f"train_step({name}): the norm of the gradient is {float(norm)} at optimizer step {step}; nothing "
                    "was changed. Look for NaN or infinite values in the batch's columns, or lower the learning rate"
                )
            torch.nn.utils.clip_grads_with_norm_(module.parameters(), self.optimizer.clip, norm)
            rate = learning_rate(self.optimizer, step)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        finally:
            optimizer.zero_grad(set_to_none=True)
        one = torch.ones(())
        metrics |= {"grad_norm": Mean(norm.cpu(), one), "lr": Mean(torch.tensor(rate), one)}
        return State(module, optimizer, step + 1), metrics

    def _accumulate(
        self, module: nn.Module, loss: Loss, name: str, microbatches: Sequence[Batch], weights: Mapping[str, float]
    ) -> Metrics:
        """Backward through every micro-batch; returns the metrics, the loss among them."""
        if self._curious.get(id(loss)) is not loss:
            metrics = self._sums(module, loss, name, microbatches, weights, everywhere=False)
            if metrics is not None:
                return metrics
            module.zero_grad(set_to_none=True)
            with contextlib.suppress(TypeError):  # not every function can be remembered without keeping it alive
                self._curious[id(loss)] = loss
        metrics = self._sums(module, loss, name, microbatches, weights, everywhere=True)
        assert metrics is not None
        return metrics

    def _sums(
        self,
        module: nn.Module,
        loss: Loss,
        name: str,
        microbatches: Sequence[Batch],
        weights: Mapping[str, float],
        everywhere: bool,
    ) -> Metrics | None:
        """The sums over micro-batches; None if the loss reads outputs that have been left out.

        Nothing in the loop waits for the device, and after it one copy does.
        """
        needs = needed(loss)
        sums: Metrics = {}
        trusted = torch.ones((), dtype=torch.bool, device=self.device)
        for batch in microbatches:
            every = predicted(batch)
            wanted = every & batch["loss_mask"] if not everywhere and "loss_mask" in batch.keys() else every
            out = self._outputs(module, batch, wanted, needs)
            local = batch.to(self.device)
            outputs = {key: out.spread(values.detach()) for key, values in out.values.items()}
            found = value_and_grad(loss, name, outputs, local, weights)
            left_out = torch.nonzero((every & ~wanted).flatten())[:, 0].to(self.device)
            if len(left_out):
                trusted &= ignores(loss, name, outputs, local, weights, left_out, found)
            out.backward(found.gradients)
            terms = {f"loss/{key}": term for key, term in found.terms.items()} if len(found.terms) > 1 else {}
            seen = {_SEEN + key: Sum(term.weight.double()) for key, term in found.terms.items()}
            sums = merge(sums, found.metrics | terms | seen | {"loss": Sum(found.loss)})
        sums, (certain,) = _fetch(sums, trusted)
        if not certain:
            return None
        check_weights(name, {key: float(sums.pop(_SEEN + key)[0]) for key in weights}, weights)
        return sums | {"tokens": Sum(torch.tensor(sum(int(lengths(batch).sum()) for batch in microbatches)))}

    def _outputs(self, module: Any, batch: Batch, wanted: Tensor, needs: frozenset[str]) -> Outputs:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.model.dtype == "bfloat16"):
            return compute(module, batch, wanted, needs, self.packed)

    def _build(self, model: Model) -> Any:
        master = torch.float64 if model.dtype == "float64" else torch.float32
        module: Any = models.build(model, dtype=master).to(self.device)
        probe.check_positions(module)
        probe.check_head(module)
        if self.packed:
            probe.check_packing(module, attention.register())
        if self.checkpointing:
            module.gradient_checkpointing_enable({"use_reentrant": False})
        if self.compile:
            module.base_model.compile(dynamic=True)
        return module

    def _optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        spec = self.optimizer
        matrices = [p for p in module.parameters() if p.ndim > 1]
        others = [p for p in module.parameters() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": spec.weight_decay}, {"params": others, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
        return torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=True)

    def save(self, state: State, folder: Path) -> None:
        """Write module and optimizer."""
        self.save_params(state.module, folder)
        torch.save(state.optimizer.state_dict(), folder / "optimizer.pt")
        (folder / "engine.json").write_text(json.dumps({"step": state.step}))

    def restore(self, folder: Path) -> State:
        """Read what `save` wrote."""
        step = json.loads((folder / "engine.json").read_text())["step"]
        state = self.init()
        models.load_tensors(state.module, self._read(folder / "model.pt").items(), who="restore")
        moments = self._read(folder / "optimizer.pt")["state"]  # betas and the like are those of the configuration
        state.optimizer.load_state_dict(state.optimizer.state_dict() | {"state": moments})
        return State(state.module, state.optimizer, step)

    def save_params(self, params: nn.Module, folder: Path) -> None:
        """Write the module."""
        torch.save(params.state_dict(), folder / "model.pt")

    def restore_params(self, folder: Path) -> nn.Module:
        """Read what `save_params` wrote."""
        module = self.load(None)
        models.load_tensors(module, self._read(folder / "model.pt").items(), who="restore")
        return module

    def _read(self, file: Path) -> Any:
        return torch.load(file, map_location=self.device, weights_only=True)

    def export(self, params: nn.Module, folder: Path) -> None:
        """Write a folder that transformers and vLLM load."""
        dtype: Any = getattr(torch, self.model.dtype)
        module: Any = copy.deepcopy(params).to(dtype)
        models.save_model(module, folder)
        if self.model.tokenizer is not None or isinstance(self.model.source, str):
            models.load_tokenizer(self.model).save_pretrained(folder)


def _fetch(metrics: Metrics, *others: Tensor) -> tuple[Metrics, list[float]]:
    """Copy numbers to the CPU, all at once."""
    values = [x for value in metrics.values() for x in value]
    flat = torch.cat([x.double().flatten() for x in [*values, *others]]).cpu()
    parts = flat.split([x.numel() for x in [*values, *others]])
    copies = (part.to(x.dtype).view(x.shape) for part, x in zip(parts, values, strict=False))
    fetched = {key: type(value)(*(next(copies) for _ in value)) for key, value in metrics.items()}
    return fetched, [float(part) for part in parts[len(values) :]]
