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
from nrl.backends.fsdp.expert_load_hooks import Loads, counting
from nrl.backends.fsdp.optimizer import TorchOptimizer, build_optimizer, optimizer_kind
from nrl.backends.fsdp.outputs import compute
from nrl.backends.fsdp.torch_state import TorchParams, TorchState
from nrl.backends.models import loading, lora, weight_layout
from nrl.backends.models.exporting import export_weights
from nrl.backends.models.lazy_weights import Unread
from nrl.backends.models.model_files import save_beside
from nrl.backends.models.moe_routers import sizes
from nrl.backends.models.named_weights import head_weight
from nrl.backends.training.activation_checkpoint import Checkpointing, options_of
from nrl.backends.training.adapters import Adapter, params_of
from nrl.backends.training.collectives import HeldError, Peers
from nrl.backends.training.flops import cost
from nrl.backends.training.layout.h2d import to_device
from nrl.backends.training.layout.microbatch_plan import Outputs, Plan, left_out_of, plan, read_by, with_outputs
from nrl.backends.training.loss.mask_probe import Curious
from nrl.backends.training.loss.step_sums import IDLE, StepSums, check_norm, evened, step_metrics
from nrl.backends.training.optim.optimizers import Optimizer, set_learning_rate
from nrl.backends.training.outputs.output_heads import LARGE, PROVIDES, widths
from nrl.backends.training.router_replay import where_routed
from nrl.backends.training.saving import storage
from nrl.backends.training.saving.save_plan import ToSave
from nrl.backends.training.weight_stream import written_whole
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


type _Source = Callable[..., Unread | None]


def _nothing(name: str) -> Tensor:
    """Reads nothing: all parameters are there."""
    raise KeyError(name)


@attrs.frozen
class TorchEngine:
    """Satisfies `nrl.backends.engine.TrainEngine`; see `nrl.backends.fsdp.trainer` for the fields.

    With a ``mesh``, each of its processes makes an engine, and all processes call every method together, with
    micro-batches of their own (possibly none) and otherwise the same arguments. A mesh of one process changes nothing.
    Weights come from ``source``: `lora.unread` reads a model's own, and `lora.unfilled` leaves them as they are.

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
    source: _Source = lora.unread
    _peers: Peers = attrs.field(
        default=attrs.Factory(lambda self: Peers(self._axis()), takes_self=True), init=False, repr=False
    )
    _curious: Curious = attrs.field(factory=Curious, init=False, repr=False, eq=False)
    _probed: set[tuple[str, str]] = attrs.field(factory=set, init=False, repr=False, eq=False)
    """The classes and configs of models that it computes rightly."""

    def _axis(self) -> DeviceMesh | None:
        """The processes that share a model; of a process alone, itself where its model is on the host."""
        found = sharding.axis(self.mesh)
        return sharding.alone(self.device) if found is None and self.offload else found

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
        """A fresh train state."""
        module = self._make(self.model)
        return TorchState(module, build_optimizer(self.optimizer, module), 0)

    def receive(self, state: TorchState) -> lora.Receiving:
        """Replace the weights of a fresh train state."""
        module = state.module
        return lora.Receiving(
            lambda wanted: sharding.own(module, lora.some(module, wanted)), partial(lora.clear, module), "trainer.init"
        )

    def params(self, state: TorchState) -> nn.Module:
        """The module inside of a train state."""
        return state.module

    def adapter(self, params: TorchParams) -> Adapter[nn.Module]:
        """The adapter of a module."""
        return Adapter(params_of(params))

    def load(self, source: str | None) -> nn.Module:
        """A frozen module."""
        model = self.model if source is None else attrs.evolve(self.model, source=source, lora=None)
        return self._make(model, frozen=True)

    def freeze(self, params: nn.Module) -> nn.Module:
        """A frozen copy."""
        onload_value(params)
        if self._peers.alone:
            module = copy.deepcopy(params).requires_grad_(False)
        else:
            module = self._ready(sharding.copied(params, self._peers, self._home))
        return self._frozen(module)

    def pieces(self, params: TorchParams) -> Iterator[Piece]:
        """What this process has of the weights; where an adapter is added to them, all processes iterate together."""
        mine = partial(sharding.spoken, self._peers)
        if isinstance(params, Adapter):
            return lora.adapter(params.params, mine)
        return weight_layout.cut(lora.merged(params, mine, sharding.whole), sharding.parts(params))

    def forward(self, params: nn.Module, microbatches: Iterable[Batch], needs: frozenset[str]) -> Sequence[TensorDict]:
        """Outputs without gradients, on the CPU."""
        onload_value(params)
        params.eval()
        asked = needs | {"top_k_ids", "top_k_logprobs"}
        parts, _ = evened(self._peers, "forward", microbatches)
        held, found = HeldError(self._peers), list[Outputs | TensorDict]()
        every = partial(with_outputs, head=self.model.head)
        wanted = every if self.model.head == "reward" else where_routed(every)
        large = not needs.isdisjoint(LARGE)

        def fetched(batch: Batch, out: Outputs) -> TensorDict:
            values = {key: out.scatter(x) for key, x in out.values.items() if key in asked}
            return TensorDict(values, batch_size=batch.batch_size).cpu()

        with torch.no_grad(), sharding.reset_after(params):
            for batch in parts:
                work = to_device(self._plan(params, batch, wanted, needs, held), self.device)
                out = self._outputs(params, work, needs, held)
                # A device has room for large outputs of one micro-batch; others are fetched when all is computed
                found.append(fetched(batch, out) if large and batch is not IDLE else out)
            held.meet("forward")
        both = zip(parts, found, strict=True)
        return [fetched(batch, out) if isinstance(out, Outputs) else out for batch, out in both if batch is not IDLE]

    def train(
        self, state: TorchState, loss: Loss, microbatches: Iterable[Batch], weights: Mapping[str, float]
    ) -> tuple[TorchState, Metrics]:
        """One optimizer step; either steps once or raises and leaves the state as it was."""
        module, optimizer, step = state
        name = name_of(loss)
        for frozen in FROZEN:
            offload_value(frozen)
        module.train()
        with sharding.reset_after(module), counting(module) as loads:
            compute = partial(self._sums, module, loss, name, weights, loads)

            def undo() -> None:
                module.zero_grad(set_to_none=True)
                loads.clear()

            metrics = self._curious.sums(self._peers, loss, microbatches, compute, undo)
            norm = self._clipped(module, f"train_step({name})", step)
            rate = set_learning_rate(optimizer.param_groups, self.optimizer, step)
            optimizer.step()
            metrics |= step_metrics(norm, rate) | loads.metrics(self._peers)
        return TorchState(module, optimizer, step + 1), metrics

    def _clipped(self, module: nn.Module, who: str, step: int) -> Tensor:
        """Clip the gradient, and return its norm before that."""
        gradients, held = [p.grad for p in module.parameters() if p.grad is not None], HeldError(self._peers)
        with held.back():
            if not gradients:
                raise ModelError(
                    f"{who}: no trained parameter has a gradient at optimizer step {step}; nothing was changed. This "
                    f"happens where another version of torch discards gradients: found is torch {torch.__version__}; "
                    "install one that nrl's own dependencies admit"
                )
        held.meet(who)
        norm = sharding.whole(torch.nn.utils.get_total_norm(gradients))
        found = norm.cpu()  # the one wait of a step, beside that for its sums
        check_norm(who, found, step)
        torch.nn.utils.clip_grads_with_norm_(module.parameters(), self.optimizer.clip, norm)
        return found

    def _sums(
        self,
        module: nn.Module,
        loss: Loss,
        name: str,
        weights: Mapping[str, float],
        loads: Loads,
        microbatches: Sequence[Batch],
        everywhere: bool,
    ) -> Metrics | None:
        """The sums over the micro-batches of all processes; None: the loss reads outputs that have been left out."""
        needs = needed(loss) | (self.provides & {"logprobs"})
        sums = StepSums(loss, name, weights, self.device, cost=cost(module))
        held, works, read = HeldError(self._peers), list[Plan](), 0
        wanted = partial(read_by, head=self.model.head, everywhere=everywhere)
        for batch in microbatches:
            works.append(self._plan(module, batch, wanted, needs, held))
            real = batch is not IDLE and held.error is None
            left_out = left_out_of(batch, wanted(batch), self.model.head) if real else None
            moved = to_device((works[-1], works[-1].reads, batch if real else None, left_out), self.device)
            work, loads.reads, rows, left_out = moved
            out = self._outputs(module, work, needs, held)
            gradients, read = None, read + len(out.source)
            if rows is not None and left_out is not None:
                with held.back():
                    outputs = {key: out.scatter(values.detach()) for key, values in out.values.items()}
                    gradients = sums.add(outputs, rows, left_out)
            out.backward(gradients)
        return sums.over_all(held, microbatches, works, read)

    def _plan(
        self, module: Any, batch: Batch, wanted: Callable[[Batch], Tensor], needs: frozenset[str], held: HeldError
    ) -> Plan:
        words, always = module.get_input_embeddings().num_embeddings, not self._peers.alone
        with held.back():
            if held.error is None and batch is not IDLE:
                routers = sizes(module) if "routes" in batch.keys() else None
                return plan(
                    batch, wanted(batch), self.packing, words=words, needs=needs, always=always, routers=routers
                )
        nothing = torch.zeros_like(IDLE["input_ids"], dtype=torch.bool)  # after an error, computing more is in vain
        return plan(IDLE, nothing, self.packing, words=words, needs=self.provides & {"rewards"}, always=always)

    def _outputs(self, module: Any, work: Plan, needs: frozenset[str], held: HeldError) -> Outputs:
        return sharding.run(module, lambda: compute(module, work, needs, held.back), self._low)

    def _make(self, model: Model, frozen: bool = False, source: _Source | None = None) -> nn.Module:
        """A model with its own weights, or from another source; each process reads its part, where all see the same."""
        who, held = "trainer.load" if frozen else "trainer.init", HeldError(self._peers)
        master = torch.float64 if model.dtype == "float64" else torch.float32
        first, unread, module = self._peers.rank == 0, None, None
        with held.back(), nullcontext() if first else suppress(Exception):  # what another lacks, the first one sends
            unread = (source or self.source)(model, dtype=master)
        with held.back():
            if first and held.error is None:
                module = lora.build(model, dtype=master) if unread is None else unread.module
                self._probe(module)
        if unread is not None and frozen:
            unread.module.requires_grad_(False)
        digests = held.meet(who, None if unread is None else unread.alike())
        with waiting(f"loading the weights of {loading.called(model)}") as far:
            if unread is not None and set(digests) == {digests[0]}:
                made = sharding.empty(unread.module, self._peers, self._home)
                with held.back():
                    sharding.filled(made, unread, far)
            elif self._peers.alone:
                assert module is not None
                made = module.to(self.device)
            else:
                read = _nothing if unread is None else unread.read
                made = sharding.scattered(module, read, held, self._home)
        held.meet(who)
        fit_threads(made, self.device)
        ready = self._ready(made.requires_grad_(False) if frozen else made)
        return self._frozen(ready) if frozen else ready

    def _frozen(self, module: nn.Module) -> nn.Module:
        """Keep weights in the dtype to which a forward rounds them anyway; it computes the same to the bit."""
        if self._low is not None and not lora.layers(module):
            low, weights = self._low, {id(x) for x in module.parameters()}
            module._apply(lambda x: x.to(low) if id(x) in weights else x)
        FROZEN.add(module)
        return module

    def _probe(self, module: Any) -> None:
        """Refuse a model whose numbers this engine would not compute. What is alike is probed once."""
        kind = type(module).__name__, module.config.to_json_string()
        if kind not in self._probed:
            self_test.check(module, self.packing, head=self.model.head == "lm")
            self._probed.add(kind)

    def _ready(self, module: Any) -> nn.Module:
        if self.packing is not None:
            module.set_attn_implementation(attention.register_attention())
        if self._low is not None and self._peers.alone:
            mixed_precision.round_layers(module, self._low, self.compile)
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
    def _low(self) -> torch.dtype | None:
        """The dtype in which it computes, where that is not the weights' own."""
        return torch.bfloat16 if self.model.dtype == "bfloat16" else None

    @property
    def _home(self) -> sharding.Home:
        return sharding.Home(self.device, self._low, bool(self.offload))

    def save(self, state: TorchState, params: TorchParams) -> ToSave:
        """Module and optimizer."""
        return self._to_save(params, state.optimizer, state.step)

    def restore(self, folder: Folder, record: Mapping[str, Any]) -> TorchState:
        """Read files of `save`, which any number of processes wrote."""
        # The optimizer's settings come from the configuration, and a base that was not saved from its own files
        module = self._make(self.model, source=None if record["base"] else lora.unfilled)
        state = TorchState(module, build_optimizer(self.optimizer, module), 0)
        storage.check_optimizer(record, optimizer_kind(self.optimizer, state.optimizer))
        self._read(folder, state.module, state.optimizer, record["base"])
        return state._replace(step=record["step"])

    def save_params(self, params: TorchParams) -> ToSave:
        """The module."""
        return self._to_save(params, None, 0)

    def restore_params(self, folder: Folder, record: Mapping[str, Any]) -> nn.Module:
        """Read files of `save_params`."""
        model = self.model if record["lora"] else attrs.evolve(self.model, lora=None)
        module = self._make(model, frozen=True, source=None if record["base"] else lora.unfilled)
        self._read(folder, module, None, record["base"])
        return module

    def _to_save(self, params: TorchParams, optimizer: TorchOptimizer | None, step: int) -> ToSave:
        module, adapter = params_of(params), isinstance(params, Adapter)

        spoken = partial(sharding.spoken, self._peers)
        pieces = partial(state_dict.pieces, module, optimizer, spoken, lora.trained if adapter else None)
        base = lora.signature(module, sharding.whole) if adapter else None
        record: dict[str, Any] = {"step": step, "lora": bool(lora.layers(module)), "base": base}
        if optimizer is not None:
            record |= storage.written_by(optimizer_kind(self.optimizer, optimizer))
        return storage.to_save(pieces, self._peers, record)

    def _read(
        self,
        folder: Folder,
        module: nn.Module,
        optimizer: TorchOptimizer | None,
        base: Mapping[str, float] | None,
    ) -> None:
        wanted = None if base is None else lora.trained

        def pieces(there: Mapping[str, Tensor]) -> Iterator[Piece]:
            if optimizer is not None:
                state_dict.fresh_state(module, optimizer, there)
            return state_dict.pieces(module, optimizer, sharding.piece, wanted)

        storage.read(folder, state_dict.shapes(module, wanted), pieces, self._peers)
        if optimizer is not None:
            state_dict.with_numbers(optimizer)
        if base is not None:
            lora.check_base(lora.signature(module, sharding.whole), base)

    def export(self, params: TorchParams, folder: Path) -> None:
        """Write a folder that transformers and vLLM load; of an adapter, one that peft loads."""
        written_whole(self.pieces(params), self._peers, partial(self._export, params, folder))

    def _export(self, params: TorchParams, folder: Path, weights: Iterator[tuple[str, Tensor]]) -> None:
        if isinstance(params, Adapter):
            lora.export(params.params, dict(weights), self.model, folder)
            return
        dtype: Any = getattr(torch, self.model.dtype)
        export_weights(weights, lora.unwrap(sharding.skeleton(params)).to(dtype), folder)
        save_beside(self.model, folder)
