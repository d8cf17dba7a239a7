"""The Megatron engine: models of some families, split over tensor, context, pipeline and data parallel processes.

All processes of a mesh make every call together. Those of one dp coordinate get the same rows. The last stage alone
has outputs; there the loss is called, and what it finds is known to all before any process acts.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nrl.algos import Loss, name_of, needed
from nrl.backends.megatron import checkpoint_io, lora_layers, pipeline, saved_state
from nrl.backends.megatron.cp_slice import Tokens, slice_tokens
from nrl.backends.megatron.cuda_shim import host
from nrl.backends.megatron.experts import forget_loads, loads, router_sizes
from nrl.backends.megatron.families import architecture
from nrl.backends.megatron.groups import Groups, groups
from nrl.backends.megatron.options import Options
from nrl.backends.megatron.weight_views import local_shards, merge_adjacent, owned_shards
from nrl.backends.models import loading, lora, weight_layout
from nrl.backends.models.named_weights import head_weight, named_tensors
from nrl.backends.models.shards import ShardLoader, full_shard
from nrl.backends.training.adapters import AdapterParams, params_of
from nrl.backends.training.collectives import DeferredError
from nrl.backends.training.expert_load import balance
from nrl.backends.training.layout.h2d import copy_to_device
from nrl.backends.training.layout.microbatch_plan import Outputs, Plan, find_skipped, output_mask, plan, read_mask
from nrl.backends.training.loss.mask_probe import MaskProbe
from nrl.backends.training.loss.step_sums import IDLE, StepSums, check_norm, even_out, step_metrics
from nrl.backends.training.optim.optimizers import Optimizer, set_learning_rate
from nrl.backends.training.outputs.output_heads import PROVIDES, widths
from nrl.backends.training.router_replay import require_routes
from nrl.backends.training.saving import storage
from nrl.backends.training.saving.save_plan import SavePlan
from nrl.backends.types import Model, Piece
from nrl.batch import Batch
from nrl.batch.metrics import Metrics
from nrl.batch.packed_rows import Packing
from nrl.errors import ConfigError
from nrl.files import Folder
from nrl.runtime.intraop import fit_threads
from nrl.runtime.mesh.layout import Layout

__all__ = ["MegatronEngine", "MegatronState"]

type _Params = pipeline.Stages | AdapterParams[pipeline.Stages]


class MegatronState(NamedTuple):
    """Stages in training, with room for gradients; their optimizer; and how many steps it has taken."""

    copies: list[Any]
    optimizer: Any
    step: int

    @property
    def stages(self) -> pipeline.Stages:
        """The stages themselves."""
        return [copy.module for copy in self.copies]


@attrs.frozen(eq=False)
class MegatronEngine:
    """Satisfies `nrl.backends.engine.TrainEngine`; see `nrl.backends.megatron.trainer` for the fields."""

    model: Model
    optimizer: Optimizer
    packing: Packing
    options: Options
    device: torch.device
    layout: Layout
    mesh: DeviceMesh | None = None
    _groups: Groups = attrs.field(
        default=attrs.Factory(lambda self: groups(self.layout, self.mesh), takes_self=True), init=False, repr=False
    )
    _mask_probe: MaskProbe = attrs.field(factory=MaskProbe, init=False, repr=False)

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
        return widths(head_weight(checkpoint_io.skeleton(self.model))[0], self.provides)

    # --- states and params

    def init(self) -> MegatronState:
        """Make a fresh train state."""
        stages = self._load_stages(self.model, "trainer.init")
        with host(self.device):
            copies = pipeline.make_replicas(stages, self._groups, self.options.copies)
            return MegatronState(
                copies, pipeline.make_optimizer(self.optimizer, copies, self._groups, self.options.optimizer), 0
            )

    def receive(self, state: MegatronState) -> saved_state.OptimizerReceiver:
        """Replace the weights of a fresh train state."""
        stages, skeleton = state.stages, checkpoint_io.skeleton(self.model)
        select = partial(checkpoint_io.shards_to_fill, stages, skeleton, self._groups)
        return saved_state.OptimizerReceiver(
            lora.LoraReceiver(select, partial(lora_layers.clear, stages), "trainer.init"), state.optimizer
        )

    def params(self, state: MegatronState) -> pipeline.Stages:
        """Return the stages of a train state."""
        for copy in state.copies:
            if copy.ddp_config.overlap_param_gather:  # Weights of the last step may still be in other processes.
                with host(self.device):
                    copy.start_param_sync(force_sync=True)
        return state.stages

    def adapter(self, params: _Params) -> AdapterParams[pipeline.Stages]:
        """Return the adapter of stages."""
        return AdapterParams(params_of(params))

    def load(self, source: str | None) -> pipeline.Stages:
        """Load frozen stages."""
        model = self.model if source is None else attrs.evolve(self.model, source=source, lora=None)
        return _freeze(self._load_stages(model, "trainer.load"))

    def freeze(self, params: pipeline.Stages) -> pipeline.Stages:
        """Return a frozen copy."""
        model = params[0].model
        copies = self._build_stages(model, checkpoint_io.skeleton(model))
        with torch.no_grad():
            for frozen, stage in zip(copies, params, strict=True):
                for mine, other in zip(frozen.parameters(), stage.parameters(), strict=True):
                    mine.copy_(other)
        return _freeze(copies)

    def pieces(self, params: _Params) -> Iterator[Piece]:
        """Yield this process's pieces of the weights, with adapters added, that no earlier process has."""
        if isinstance(params, AdapterParams):
            return (piece for piece in owned_shards(params.params, self._groups) if lora.is_trained(piece.name))
        return lora_layers.merge_adapters(merge_adjacent(owned_shards(params, self._groups)), params)

    # --- outputs and steps

    def forward(
        self, params: pipeline.Stages, microbatches: Iterable[Batch], needs: frozenset[str]
    ) -> Sequence[TensorDict]:
        """Compute outputs without gradients, on the CPU, in processes of the last stage."""
        names = needs | {"top_k_ids", "top_k_logprobs"}
        parts, _ = even_out(self._groups.peers, "forward", microbatches)
        parts = self._round_up(parts)
        deferred, results = DeferredError(self._groups.peers), dict[int, TensorDict]()
        all_outputs = partial(output_mask, head=self.model.head)
        select = all_outputs if self.model.head == "reward" else require_routes(all_outputs)
        plans, slices = self._plan_all(params, parts, select, needs, deferred, "forward")

        def compute(number: int, hidden: Tensor) -> Tensor:
            with deferred.capture():
                out = pipeline.compute_outputs(
                    params[-1],
                    hidden,
                    plans[number],
                    slices[number],
                    needs,
                    self.model.head,
                    self._groups,
                    deferred.capture,
                )
                values = {key: self._gather_outputs(out.scatter(x)) for key, x in out.values.items() if key in names}
                results[number] = TensorDict(values, batch_size=parts[number].batch_size).cpu()
            return hidden.new_zeros(())

        for stage in params:
            stage.eval()
        with torch.no_grad(), host(self.device):
            pipeline.run_passes(params, slices, compute, self._groups, backward=False)
        deferred.gather_or_raise("forward")
        return [results[number] for number in sorted(results) if parts[number] is not IDLE]

    def train(
        self, state: MegatronState, loss: Loss, microbatches: Iterable[Batch], weights: Mapping[str, float]
    ) -> tuple[MegatronState, Metrics]:
        """Take one optimizer step, or raise and leave the state as it was."""
        copies, optimizer, step = state
        for copy in copies:
            copy.train()
        with host(self.device):
            self._clear(state)
            compute = partial(self._compute_sums, state, loss, weights)
            metrics = self._mask_probe.compute_sums(
                self._groups.peers, loss, microbatches, compute, partial(self._clear, state)
            )
            optimizer.prepare_grads()
            norm = torch.as_tensor(optimizer.get_grad_norm(), dtype=torch.float32)
            check_norm(f"train_step({name_of(loss)})", norm, step)
            rate = set_learning_rate(optimizer.param_groups, self.optimizer, step)
            optimizer.step()
        metrics |= step_metrics(norm, rate) | self._measure_balance(state.stages)
        return MegatronState(copies, optimizer, step + 1), metrics

    def _measure_balance(self, stages: pipeline.Stages) -> Metrics:
        counts = loads(stages)
        if counts is None:
            return {}
        if not self._groups.peers.is_single:
            counts = counts.to(self.device)
            dist.all_reduce(counts, group=self._groups.peers.group)
        return balance(counts.cpu())

    def _clear(self, state: MegatronState) -> None:
        for copy in state.copies:
            copy.zero_grad_buffer()
        forget_loads(state.stages)
        state.optimizer.zero_grad()

    def _compute_sums(
        self,
        state: MegatronState,
        loss: Loss,
        weights: Mapping[str, float],
        microbatches: Sequence[Batch],
        everywhere: bool,
    ) -> Metrics | None:
        """Compute the sums over the micro-batches of all processes; None: the loss reads outputs that were skipped."""
        name, needs = name_of(loss), needed(loss) | (self.provides & {"logprobs"})
        sums = StepSums(loss, name, weights, self.device, self._groups.is_output_rank)
        deferred, read = DeferredError(self._groups.peers), 0
        parts = self._round_up(microbatches)
        last_stage = state.stages[-1]
        select = partial(read_mask, head=self.model.head, everywhere=everywhere)
        plans, slices = self._plan_all(state.stages, parts, select, needs, deferred, f"train_step({name})")

        def slope(number: int, hidden: Tensor) -> Tensor:
            nonlocal read
            batch, work = parts[number], plans[number]
            out = pipeline.compute_outputs(
                last_stage, hidden, work, slices[number], needs, self.model.head, self._groups, deferred.capture
            )
            gradients: Mapping[str, Tensor] | None = None
            if batch is not IDLE:
                read += len(work.source)
                outputs = {key: self._gather_outputs(out.scatter(x.detach())) for key, x in out.values.items()}
                with deferred.capture():
                    left_out = find_skipped(batch, select(batch), self.model.head)
                    gradients = sums.add(outputs, *copy_to_device((batch, left_out), self.device))
            return _slope(out, gradients)

        pipeline.run_passes(state.copies, slices, slope, self._groups, backward=True)
        return sums.reduce_all(deferred, parts, plans, read)

    def _plan_all(
        self,
        stages: pipeline.Stages,
        parts: Sequence[Batch],
        select: Callable[[Batch], Tensor],
        needs: frozenset[str],
        deferred: DeferredError,
        caller: str,
    ) -> tuple[list[Plan], list[Tokens]]:
        """Return the plans of all micro-batches, and this process's tokens of each."""
        plans, config, words = list[Plan](), stages[0].config, stages[0].words
        routers = router_sizes(config)
        with deferred.capture():
            for part in parts:
                names = self.provides & {"rewards"} if part is IDLE else needs  # it has no columns to ask for
                plans.append(
                    plan(part, select(part), self.packing, words=words, needs=names, always=True, routers=routers)
                )
        deferred.gather_or_raise(caller)
        multiple = self.layout.tp if config.sequence_parallel else 1
        # Where shapes do not travel with the tokens, all micro-batches have as many
        min_tokens = 0 if config.variable_seq_lengths else max(work.inputs["input_ids"].shape[1] for work in plans)
        return plans, [
            slice_tokens(work, min_tokens, multiple, self.layout.cp, self._groups.cp, self.device) for work in plans
        ]

    def _round_up(self, parts: Sequence[Batch]) -> list[Batch]:
        """Fill up micro-batches to a multiple of the stages of an interleaved pipeline."""
        missing = -len(parts) % self.layout.pp if self.layout.vp > 1 else 0
        return [*parts, *[IDLE] * (missing + (not parts))]

    def _gather_outputs(self, values: Tensor) -> Tensor:
        """Return outputs of all tokens, of which each process along cp has computed some."""
        if self.layout.cp > 1:
            dist.all_reduce(values, group=self._groups.collection.cp)
        return values

    # --- weights

    def _build_stages(self, model: Model, skeleton: Any) -> pipeline.Stages:
        arch, dtype = architecture(skeleton, self.layout), getattr(torch, model.dtype)
        if arch.experts is not None and self.layout.tp > 1 and not self.options.model.get("sequence_parallel", True):
            raise ConfigError(
                "megatron.trainer: experts along tp need sequence parallelism, else each of them would get every token "
                "from every process; leave out sequence_parallel"
            )
        fit_threads(skeleton, self.device)
        with host(self.device):
            stages = pipeline.build(arch, model.head, self.options.model, dtype, self._groups, self.device)
        for stage in stages:
            stage.model = model
            if model.lora is not None:
                lora_layers.add(stage, skeleton, self._groups)
        return stages

    def _load_stages(self, model: Model, caller: str) -> pipeline.Stages:
        """Build stages with a model's weights, which the first process reads for all, one at a time."""
        deferred, peers = DeferredError(self._groups.peers), self._groups.peers
        module: Any = None
        read: Any = None
        with deferred.capture():
            if peers.rank == 0:
                module, read = checkpoint_io.read_model(model)
        deferred.gather_or_raise(caller)
        skeleton = checkpoint_io.skeleton(model)
        stages, parts = self._build_stages(model, skeleton), weight_layout.find_parts(skeleton)
        loader = ShardLoader(checkpoint_io.shards_to_fill(stages, skeleton, self._groups), caller, other_head=True)
        tensors = dict(named_tensors(module)) if module is not None else {}
        for name, like in named_tensors(skeleton):
            value = torch.zeros(like.shape, dtype=like.dtype)
            with deferred.capture():
                if peers.rank == 0:
                    value = (read(name) if tensors[name].is_meta else tensors[name]).to(like.dtype)
            value = value.to(self.device).contiguous()
            if not peers.is_single:
                dist.broadcast(value, group=peers.group, group_src=0)
            loader.add(weight_layout.split_for_files([full_shard(name, value)], parts))
        loader.end()
        deferred.gather_or_raise(caller)
        return stages

    # --- folders

    def save(self, state: MegatronState, params: _Params) -> SavePlan:
        """Plan to save stages and optimizer."""
        pieces = partial(saved_state.iter_training_state, state.copies, state.optimizer, self._groups, owned=True)
        return checkpoint_io.plan_save(params, pieces, state.step, self._groups)

    def restore(self, folder: Folder, record: Mapping[str, Any]) -> MegatronState:
        """Read files of `save`, which any number of processes wrote, of this engine or another one."""
        storage.check_optimizer(record, self.optimizer.kind)
        copies, optimizer, _ = state = self.init()  # the optimizer's settings come from the configuration

        def pieces(stored: Collection[str], is_wanted: Callable[[str], bool]) -> Iterator[Piece]:
            if any(name.startswith(storage.MOMENTS) for name in stored):
                saved_state.fresh_moments(optimizer)
            yield from saved_state.iter_training_state(
                copies, optimizer, self._groups, owned=False, is_wanted=is_wanted
            )

        with host(self.device):
            checkpoint_io.restore(folder, state.stages, pieces, record, self._groups)
            saved_state.update_model(copies, optimizer)
        return state._replace(step=record["step"])

    def save_params(self, params: _Params) -> SavePlan:
        """Plan to save stages."""
        pieces = partial(saved_state.name_weights, owned_shards(params_of(params), self._groups))
        return checkpoint_io.plan_save(params, pieces, 0, self._groups)

    def restore_params(self, folder: Folder, record: Mapping[str, Any]) -> pipeline.Stages:
        """Read files of `save_params`."""
        model = self.model if record["lora"] else attrs.evolve(self.model, lora=None)
        stages = _freeze(self._load_stages(model, "trainer.restore"))

        def pieces(_: Collection[str], is_wanted: Callable[[str], bool]) -> Iterator[Piece]:
            return saved_state.name_weights((piece for _, piece, _ in local_shards(stages, self._groups)), is_wanted)

        checkpoint_io.restore(folder, stages, pieces, record, self._groups)
        return stages

    def export(self, params: _Params, folder: Path) -> None:
        """Write a folder that transformers and vLLM load; of an adapter, one that peft loads."""
        checkpoint_io.export(folder, params, self.pieces(params), self._groups)


def _freeze(stages: pipeline.Stages) -> pipeline.Stages:
    return [stage.requires_grad_(False) for stage in stages]


def _slope(out: Outputs, gradients: Mapping[str, Tensor] | None) -> Tensor:
    """Return a scalar whose gradient with respect to the outputs is the given one; None: zeros.

    It depends on every output, so that every parameter gets its gradient: else Megatron waits for some in vain.
    """
    depth, parts = len(out.shape), list[Tensor]()
    for key, x in out.values.items():
        slope = torch.zeros_like(x) if gradients is None else gradients[key].flatten(0, depth - 1)[out.source]
        parts.append((x * slope).sum())
    return torch.stack(parts).sum()
