"""The torch engine, in one process: any Hugging Face causal language model, packed rows, fused log-probabilities."""

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from nrl.algos import Loss, name_of, needed
from nrl.backends import models
from nrl.backends.base import Model
from nrl.backends.fsdp import attention, probe
from nrl.backends.fsdp.linear_logprobs import linear_logprobs
from nrl.backends.optimizers import Optimizer, learning_rate
from nrl.backends.training import check_terms, check_weights, terms_of
from nrl.batch import Batch, lengths, unchanged
from nrl.errors import NotFinite
from nrl.pack import pack
from nrl.reduce import Mean, Metrics, Sum, merge

__all__ = ["State", "TorchEngine"]


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
            return [self._outputs(params, batch, needs).cpu() for batch in microbatches]

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
        needs = needed(loss)
        seen: Metrics = {}
        metrics: Metrics = {"tokens": Sum(torch.tensor(sum(int(lengths(batch).sum()) for batch in microbatches)))}
        for batch in microbatches:
            out = self._outputs(module, batch, needs)
            local = batch.to(self.device)
            with unchanged(local, name):
                terms, extra = terms_of(name, loss(out, local))
            check_terms(name, terms, weights)
            scaled = torch.stack([term.total / weights[key] for key, term in terms.items()]).sum()
            if scaled.requires_grad:
                scaled.backward()
            seen = merge(seen, {key: Sum(term.weight.detach().double()) for key, term in terms.items()})
            metrics = merge(metrics, extra | {"loss": Sum(scaled.detach())})
            if len(terms) > 1:
                metrics = merge(metrics, {f"loss/{key}": _detach(term) for key, term in terms.items()})
        check_weights(name, {key: float(value[0]) for key, value in seen.items()}, weights)
        return {key: type(value)(*(x.detach().cpu() for x in value)) for key, value in metrics.items()}

    def _outputs(self, module: Any, batch: Batch, needs: frozenset[str]) -> TensorDict:
        """``logprobs`` and the outputs in ``needs``, ``[*b, T]`` on the device; zero where no token is predicted."""
        tokens = pack(batch)
        at = torch.nonzero(tokens.real & (tokens.position_ids > 0))[:, 0]
        source, targets = tokens.source[at], tokens.input_ids[at]
        temperature = None
        if "temperature" in batch.keys():
            each = batch["temperature"].flatten()[source // tokens.shape[-1]]
            temperature = torch.where(each == 0, 1.0, each).to(self.device)
        with self._precision():
            if self.packed and len(tokens.input_ids):
                hidden = module.base_model(
                    input_ids=tokens.input_ids[None].to(self.device),
                    position_ids=tokens.position_ids[None].to(self.device),
                    use_cache=False,
                    nrl_blocks=tokens.blocks,
                ).last_hidden_state[0]
                before = hidden[(at - 1).to(self.device)]
            else:
                before = self._padded(module, batch, source)
            weight, bias = models.head_weight(module)
            bias = None if bias is None else bias.to(before.dtype)
            logprobs, entropy = linear_logprobs(
                before,
                weight.to(before.dtype),
                targets.to(self.device),
                temperature=temperature,
                bias=bias,
                entropy="entropy" in needs,
            )
        into = source.to(self.device)

        def spread(values: Tensor) -> Tensor:
            return values.new_zeros(tokens.shape.numel()).index_copy(0, into, values).view(tokens.shape)

        out = {"logprobs": spread(logprobs)} | ({} if entropy is None else {"entropy": spread(entropy)})
        return TensorDict(out, batch_size=batch.batch_size)

    def _padded(self, module: Any, batch: Batch, source: Tensor) -> Tensor:
        """Hidden states from which the tokens at ``source`` are predicted, by the model's stock padded forward."""
        ids = batch["input_ids"].flatten(0, -2)
        width, sizes = ids.shape[-1], lengths(batch).flatten()
        rows = torch.nonzero(sizes)[:, 0]  # a row without any token has no softmax
        mask = torch.arange(width) < sizes[rows, None]
        if len(rows) == 0:
            weight, _ = models.head_weight(module)
            return weight[:0]
        hidden = module.base_model(
            input_ids=ids[rows].to(self.device), attention_mask=mask.long().to(self.device), use_cache=False
        ).last_hidden_state
        place = torch.zeros(len(ids), dtype=torch.int64)
        place[rows] = torch.arange(len(rows))
        before: Tensor = hidden[place[source // width].to(self.device), (source % width - 1).to(self.device)]
        return before

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.model.dtype == "bfloat16")

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
        state = self.init(self._read(folder / "model.pt").items())
        state.optimizer.load_state_dict(self._read(folder / "optimizer.pt"))
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
        module.save_pretrained(folder)
        if self.model.tokenizer is not None or isinstance(self.model.source, str):
            models.load_tokenizer(self.model).save_pretrained(folder)


def _detach(term: Mean) -> Mean:
    return Mean(term.total.detach(), term.weight.detach())
