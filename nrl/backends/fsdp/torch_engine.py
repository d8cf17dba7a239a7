"""The torch engine: any Hugging Face causal language model, packed rows, fused log-probabilities.

It runs in one process, or sharded over several. Then each process computes rows of its own, and all processes make
every call together. A finding in the numbers of one is known to all before any acts (`training/agreement.py`).
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import attrs
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from nrl.algos import Loss, name_of, needed
from nrl.backends.fsdp import attention, mixed_precision, self_test, sharding, state_dict
from nrl.backends.fsdp.expert_load_hooks import ExpertLoads, count_loads
from nrl.backends.fsdp.optimizer import TorchOptimizer, build_optimizer, optimizer_kind
from nrl.backends.fsdp.outputs import compute
from nrl.backends.fsdp.torch_state import TorchParams, TorchState
from nrl.backends.models import loading, lora, weight_layout
from nrl.backends.models.exporting import export_weights
from nrl.backends.models.lazy_weights import LazyModel
from nrl.backends.models.model_files import save_beside
from nrl.backends.models.moe_routers import sizes
from nrl.backends.models.named_weights import head_weight
from nrl.backends.training.activation_checkpoint import Checkpointing, options_of
from nrl.backends.training.adapters import AdapterParams, params_of
from nrl.backends.training.collectives import DeferredError, ProcessGroup
from nrl.backends.training.flops import cost
from nrl.backends.training.layout.h2d import copy_to_device
from nrl.backends.training.layout.microbatch_plan import Outputs, Plan, find_skipped, output_mask, plan, read_mask
from nrl.backends.training.loss.mask_probe import MaskProbe
from nrl.backends.training.loss.step_sums import IDLE, StepSums, check_norm, even_out, step_metrics
from nrl.backends.training.optim.optimizers import Optimizer, set_learning_rate
from nrl.backends.training.outputs.output_heads import LARGE, PROVIDES, widths
from nrl.backends.training.router_replay import require_routes
from nrl.backends.training.saving import storage
from nrl.backends.training.saving.save_plan import SavePlan
from nrl.backends.training.weight_stream import write_full_weights
from nrl.backends.types import Model, Piece
from nrl.batch import Batch
from nrl.batch.metrics import Metrics
from nrl.batch.packed_rows import Packing
from nrl.errors import ModelError
from nrl.files import Folder
from nrl.log import waiting
from nrl.runtime.intraop import fit_threads
from nrl.runtime.mesh.offload import FROZEN, offload_value, onload_value

__all__ = ["TorchEngine"]


type _Source = Callable[..., LazyModel | None]


def _read_nothing(name: str) -> Tensor:
    """Read nothing: all parameters have values."""
    raise KeyError(name)


@attrs.frozen
class TorchEngine:
    """Satisfies `nrl.backends.engine.TrainEngine`; see `nrl.backends.fsdp.trainer` for the fields.

    With a ``mesh``, each of its processes makes an engine, and all processes call every method together, with
    micro-batches of their own (possibly none) and otherwise the same arguments. A mesh of one process changes nothing.
    Weights come from ``source``: `lora.build_lazy` reads a model's own, and `lora.build_without_weights` reads nothing.

    Raises:
        PlacementError: the mesh has no axis ``dp``, or is larger than 1 along another one.
    """

    model: Model
    optimizer: Optimizer
    packing: Packing | None
    checkpointing: Checkpointing
    compile: bool
    device: torch.device
    mesh: DeviceMesh | None = None
    offload: Literal["cpu"] | None = None
    source: _Source = lora.build_lazy
    _peers: ProcessGroup = attrs.field(
        default=attrs.Factory(lambda self: ProcessGroup(self._find_axis()), takes_self=True), init=False, repr=False
    )
    _mask_probe: MaskProbe = attrs.field(factory=MaskProbe, init=False, repr=False, eq=False)
    _probed: set[tuple[str, str]] = attrs.field(factory=set, init=False, repr=False, eq=False)
    """The classes and configs of models that passed the self-test."""

    def _find_axis(self) -> DeviceMesh | None:
        """Return the mesh of the processes that share a model; for offload, one process has a mesh, too."""
        axis = sharding.axis(self.mesh)
        return sharding.single_process_mesh(self.device) if axis is None and self.offload else axis

    @property
    def provides(self) -> frozenset[str]:
        """The kinds of outputs that it computes."""
        return PROVIDES[self.model.head]

    @property
    def frozen_token(self) -> int | None:
        """The token whose input embedding is not trained."""
        return loading.frozen_token(self.model)

    @property
    def widths(self) -> dict[str, int]:
        """The last dimension of logits and of hidden states."""
        return widths(head_weight(lora.skeleton(self.model))[0], self.provides)

    def init(self) -> TorchState:
        """Make a fresh train state."""
        module = self._make(self.model)
        return TorchState(module, build_optimizer(self.optimizer, module), 0)

    def receive(self, state: TorchState) -> lora.LoraReceiver:
        """Replace the weights of a fresh train state."""
        module = state.module
        return lora.LoraReceiver(
            lambda wanted: sharding.local_shards(module, lora.select_weights(module, wanted)),
            partial(lora.clear, module),
            "trainer.init",
        )

    def params(self, state: TorchState) -> nn.Module:
        """Return the module inside a train state."""
        return state.module

    def adapter(self, params: TorchParams) -> AdapterParams[nn.Module]:
        """Return the adapter of a module."""
        return AdapterParams(params_of(params))

    def load(self, source: str | None) -> nn.Module:
        """Load a frozen module."""
        model = self.model if source is None else attrs.evolve(self.model, source=source, lora=None)
        return self._make(model, frozen=True)

    def freeze(self, params: nn.Module) -> nn.Module:
        """Return a frozen copy."""
        onload_value(params)
        if self._peers.is_single:
            module = copy.deepcopy(params).requires_grad_(False)
        else:
            module = self._prepare(sharding.copy_frozen(params, self._peers, self._placement))
        return self._freeze_module(module)

    def pieces(self, params: TorchParams) -> Iterator[Piece]:
        """Yield this process's parts of the weights; where an adapter is added, all processes iterate together."""
        mine = partial(sharding.owned_shard, self._peers)
        if isinstance(params, AdapterParams):
            return lora.adapter(params.params, mine)
        return weight_layout.split_for_files(
            lora.merge_weights(params, mine, sharding.gather_full), sharding.find_parts(params)
        )

    def forward(self, params: nn.Module, microbatches: Iterable[Batch], needs: frozenset[str]) -> Sequence[TensorDict]:
        """Compute outputs without gradients, on the CPU."""
        onload_value(params)
        params.eval()
        names = needs | {"top_k_ids", "top_k_logprobs"}
        parts, _ = even_out(self._peers, "forward", microbatches)
        deferred, results = DeferredError(self._peers), list[Outputs | TensorDict]()
        all_outputs = partial(output_mask, head=self.model.head)
        select = all_outputs if self.model.head == "reward" else require_routes(all_outputs)
        large = not needs.isdisjoint(LARGE)

        def fetch(batch: Batch, out: Outputs) -> TensorDict:
            values = {key: out.scatter(x) for key, x in out.values.items() if key in names}
            return TensorDict(values, batch_size=batch.batch_size).cpu()

        with torch.no_grad(), sharding.reset_after(params):
            for batch in parts:
                work = copy_to_device(self._plan(params, batch, select, needs, deferred), self.device)
                out = self._compute_outputs(params, work, needs, deferred)
                # A device has room for large outputs of one micro-batch; others are fetched when all is computed
                results.append(fetch(batch, out) if large and batch is not IDLE else out)
            deferred.gather_or_raise("forward")
        pairs = zip(parts, results, strict=True)
        return [fetch(batch, out) if isinstance(out, Outputs) else out for batch, out in pairs if batch is not IDLE]

    def train(
        self, state: TorchState, loss: Loss, microbatches: Iterable[Batch], weights: Mapping[str, float]
    ) -> tuple[TorchState, Metrics]:
        """Take one optimizer step, or raise and leave the state as it was."""
        module, optimizer, step = state
        name = name_of(loss)
        for frozen in FROZEN:
            offload_value(frozen)
        module.train()
        with sharding.reset_after(module), count_loads(module) as loads:
            compute = partial(self._compute_sums, module, loss, name, weights, loads)

            def undo() -> None:
                module.zero_grad(set_to_none=True)
                loads.clear()

            metrics = self._mask_probe.compute_sums(self._peers, loss, microbatches, compute, undo)
            norm = self._clip_gradient(module, f"train_step({name})", step)
            rate = set_learning_rate(optimizer.param_groups, self.optimizer, step)
            optimizer.step()
            metrics |= step_metrics(norm, rate) | loads.metrics(self._peers)
        return TorchState(module, optimizer, step + 1), metrics

    def _clip_gradient(self, module: nn.Module, caller: str, step: int) -> Tensor:
        """Clip the gradient, and return its norm before that."""
        gradients, deferred = [p.grad for p in module.parameters() if p.grad is not None], DeferredError(self._peers)
        with deferred.capture():
            if not gradients:
                raise ModelError(
                    f"{caller}: no trained parameter has a gradient at optimizer step {step}; nothing was changed. "
                    f"This happens where another version of torch discards gradients: found is torch "
                    f"{torch.__version__}; install one that nrl's own dependencies admit"
                )
        deferred.gather_or_raise(caller)
        norm = sharding.gather_full(torch.nn.utils.get_total_norm(gradients))
        norm_on_host = norm.cpu()  # the one wait of a step, beside that for its sums
        check_norm(caller, norm_on_host, step)
        torch.nn.utils.clip_grads_with_norm_(module.parameters(), self.optimizer.clip, norm)
        return norm_on_host

    def _compute_sums(
        self,
        module: nn.Module,
        loss: Loss,
        name: str,
        weights: Mapping[str, float],
        loads: ExpertLoads,
        microbatches: Sequence[Batch],
        everywhere: bool,
    ) -> Metrics | None:
        """Compute the sums over the micro-batches of all processes; None: the loss reads outputs that were skipped."""
        needs = needed(loss) | (self.provides & {"logprobs"})
        sums = StepSums(loss, name, weights, self.device, cost=cost(module))
        deferred, plans, read = DeferredError(self._peers), list[Plan](), 0
        select = partial(read_mask, head=self.model.head, everywhere=everywhere)
        for batch in microbatches:
            plans.append(self._plan(module, batch, select, needs, deferred))
            real = batch is not IDLE and deferred.error is None
            left_out = find_skipped(batch, select(batch), self.model.head) if real else None
            on_device = copy_to_device((plans[-1], plans[-1].reads, batch if real else None, left_out), self.device)
            plan_on_device, loads.reads, rows, left_out = on_device
            out = self._compute_outputs(module, plan_on_device, needs, deferred)
            gradients, read = None, read + len(out.source)
            if rows is not None and left_out is not None:
                with deferred.capture():
                    outputs = {key: out.scatter(values.detach()) for key, values in out.values.items()}
                    gradients = sums.add(outputs, rows, left_out)
            out.backward(gradients)
        return sums.reduce_all(deferred, microbatches, plans, read)

    def _plan(
        self,
        module: Any,
        batch: Batch,
        select: Callable[[Batch], Tensor],
        needs: frozenset[str],
        deferred: DeferredError,
    ) -> Plan:
        words, always = module.get_input_embeddings().num_embeddings, not self._peers.is_single
        with deferred.capture():
            if deferred.error is None and batch is not IDLE:
                routers = sizes(module) if "routes" in batch.keys() else None
                return plan(
                    batch, select(batch), self.packing, words=words, needs=needs, always=always, routers=routers
                )
        nothing = torch.zeros_like(IDLE["input_ids"], dtype=torch.bool)  # after an error, computing more is in vain
        return plan(IDLE, nothing, self.packing, words=words, needs=self.provides & {"rewards"}, always=always)

    def _compute_outputs(self, module: Any, work: Plan, needs: frozenset[str], deferred: DeferredError) -> Outputs:
        return sharding.run_gathered(
            module, lambda: compute(module, work, needs, deferred.capture), self._compute_dtype
        )

    def _make(self, model: Model, frozen: bool = False, source: _Source | None = None) -> nn.Module:
        """Build a model with its weights, or from another source; each process reads its part if all see the same."""
        caller, deferred = "trainer.load" if frozen else "trainer.init", DeferredError(self._peers)
        master = torch.float64 if model.dtype == "float64" else torch.float32
        first, lazy, module = self._peers.rank == 0, None, None
        # The first process sends what another one cannot read.
        with deferred.capture(), nullcontext() if first else suppress(Exception):
            lazy = (source or self.source)(model, dtype=master)
        with deferred.capture():
            if first and deferred.error is None:
                module = lora.build(model, dtype=master) if lazy is None else lazy.module
                self._probe(module)
        if lazy is not None and frozen:
            lazy.module.requires_grad_(False)
        digests = deferred.gather_or_raise(caller, None if lazy is None else lazy.compute_digest())
        with waiting(f"loading the weights of {loading.display_name(model)}") as progress:
            if lazy is not None and set(digests) == {digests[0]}:
                built = sharding.make_empty(lazy.module, self._peers, self._placement)
                with deferred.capture():
                    sharding.fill_parameters(built, lazy, progress)
            elif self._peers.is_single:
                assert module is not None
                built = module.to(self.device)
            else:
                read = _read_nothing if lazy is None else lazy.load
                built = sharding.scatter(module, read, deferred, self._placement)
        deferred.gather_or_raise(caller)
        fit_threads(built, self.device)
        ready = self._prepare(built.requires_grad_(False) if frozen else built)
        return self._freeze_module(ready) if frozen else ready

    def _freeze_module(self, module: nn.Module) -> nn.Module:
        """Keep weights in the dtype of the computation, to which a forward rounds them anyway: the same to the bit."""
        if self._compute_dtype is not None and not lora.layers(module):
            low, weights = self._compute_dtype, {id(x) for x in module.parameters()}
            module._apply(lambda x: x.to(low) if id(x) in weights else x)
        FROZEN.add(module)
        return module

    def _probe(self, module: Any) -> None:
        """Refuse a model whose numbers this engine would not compute; probe each class and config once."""
        kind = type(module).__name__, module.config.to_json_string()
        if kind not in self._probed:
            self_test.check(module, self.packing, head=self.model.head == "lm")
            self._probed.add(kind)

    def _prepare(self, module: Any) -> nn.Module:
        if self.packing is not None:
            module.set_attn_implementation(attention.register_attention())
        if self._compute_dtype is not None and self._peers.is_single:
            mixed_precision.round_layers(module, self._compute_dtype, self.compile)
        if self.checkpointing:
            # In versions of transformers with the new name, the old one warns
            enable = getattr(module, "activation_checkpointing_enable", module.gradient_checkpointing_enable)
            enable(options_of(self.checkpointing))
        if self.compile:
            for layer in mixed_precision.layers(module):
                layer.compile(dynamic=True)
        ready: nn.Module = module
        return ready

    @property
    def _compute_dtype(self) -> torch.dtype | None:
        """The dtype of the computation, where it is not the dtype of the weights."""
        return torch.bfloat16 if self.model.dtype == "bfloat16" else None

    @property
    def _placement(self) -> sharding.ShardPlacement:
        return sharding.ShardPlacement(self.device, self._compute_dtype, bool(self.offload))

    def save(self, state: TorchState, params: TorchParams) -> SavePlan:
        """Plan to save module and optimizer."""
        return self._plan_save(params, state.optimizer, state.step)

    def restore(self, folder: Folder, record: Mapping[str, Any]) -> TorchState:
        """Read files of `save`, which any number of processes wrote."""
        # The optimizer's settings come from the configuration, and a base that was not saved from its own files
        module = self._make(self.model, source=None if record["base"] else lora.build_without_weights)
        state = TorchState(module, build_optimizer(self.optimizer, module), 0)
        storage.check_optimizer(record, optimizer_kind(self.optimizer, state.optimizer))
        self._load_files(folder, state.module, state.optimizer, record["base"])
        return state._replace(step=record["step"])

    def save_params(self, params: TorchParams) -> SavePlan:
        """Plan to save the module."""
        return self._plan_save(params, None, 0)

    def restore_params(self, folder: Folder, record: Mapping[str, Any]) -> nn.Module:
        """Read files of `save_params`."""
        model = self.model if record["lora"] else attrs.evolve(self.model, lora=None)
        module = self._make(model, frozen=True, source=None if record["base"] else lora.build_without_weights)
        self._load_files(folder, module, None, record["base"])
        return module

    def _plan_save(self, params: TorchParams, optimizer: TorchOptimizer | None, step: int) -> SavePlan:
        module, adapter = params_of(params), isinstance(params, AdapterParams)

        spoken = partial(sharding.owned_shard, self._peers)
        pieces = partial(state_dict.pieces, module, optimizer, spoken, lora.is_trained if adapter else None)
        base = lora.signature(module, sharding.gather_full) if adapter else None
        record: dict[str, Any] = {"step": step, "lora": bool(lora.layers(module)), "base": base}
        if optimizer is not None:
            record |= storage.record_optimizer(optimizer_kind(self.optimizer, optimizer))
        return storage.plan_save(pieces, self._peers, record)

    def _load_files(
        self,
        folder: Folder,
        module: nn.Module,
        optimizer: TorchOptimizer | None,
        base: Mapping[str, float] | None,
    ) -> None:
        is_wanted = None if base is None else lora.is_trained

        def pieces(stored: Mapping[str, Tensor]) -> Iterator[Piece]:
            if optimizer is not None:
                state_dict.fresh_state(module, optimizer, stored)
            return state_dict.pieces(module, optimizer, sharding.local_shard, is_wanted)

        storage.load_shards(folder, state_dict.shapes(module, is_wanted), pieces, self._peers)
        if optimizer is not None:
            state_dict.unwrap_numbers(optimizer)
        if base is not None:
            lora.check_base(lora.signature(module, sharding.gather_full), base)

    def export(self, params: TorchParams, folder: Path) -> None:
        """Write a folder that transformers and vLLM load; of an adapter, one that peft loads."""
        write_full_weights(self.pieces(params), self._peers, partial(self._export, params, folder))

    def _export(self, params: TorchParams, folder: Path, weights: Iterator[tuple[str, Tensor]]) -> None:
        if isinstance(params, AdapterParams):
            lora.export(params.params, dict(weights), self.model, folder)
            return
        dtype: Any = getattr(torch, self.model.dtype)
        export_weights(weights, lora.unwrap(sharding.skeleton(params)).to(dtype), folder)
        save_beside(self.model, folder)
