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
from nrl.backends.megatron import adapters, checkpoint_io, stored
from nrl.backends.megatron import pipeline as of
from nrl.backends.megatron.cp_slice import Tokens, tokens
from nrl.backends.megatron.cuda_shim import host
from nrl.backends.megatron.experts import chosen_by, forget_loads, loads
from nrl.backends.megatron.families import architecture
from nrl.backends.megatron.groups import Groups, groups
from nrl.backends.megatron.options import Options
from nrl.backends.megatron.weights import joined, own, spoken
from nrl.backends.models import loading, lora, weight_layout
from nrl.backends.models.named_weights import head_weight, named_tensors
from nrl.backends.models.shards import Filling, whole
from nrl.backends.training.adapters import Adapter, params_of
from nrl.backends.training.collectives import HeldError
from nrl.backends.training.expert_load import balance
from nrl.backends.training.layout.h2d import to_device
from nrl.backends.training.layout.microbatch_plan import Outputs, Plan, left_out_of, plan, read_by, with_outputs
from nrl.backends.training.loss.mask_probe import Curious
from nrl.backends.training.loss.step_sums import IDLE, StepSums, check_norm, evened, step_metrics
from nrl.backends.training.optim.optimizers import Optimizer, set_learning_rate
from nrl.backends.training.outputs.output_heads import PROVIDES, widths
from nrl.backends.training.router_replay import where_routed
from nrl.backends.training.saving import storage
from nrl.backends.training.saving.save_plan import ToSave
from nrl.backends.types import Model, Piece
from nrl.batch import Batch
from nrl.batch.metrics import Metrics
from nrl.batch.packed_rows import Packing
from nrl.errors import ConfigError
from nrl.files import Folder
from nrl.runtime.intraop import fit_threads
from nrl.runtime.mesh.layout import Layout

__all__ = ["MegatronEngine", "MegatronState"]

type _Params = of.Stages | Adapter[of.Stages]


class MegatronState(NamedTuple):
    """Stages in training, with room for gradients; their optimizer; and how many steps it has taken."""

    copies: list[Any]
    optimizer: Any
    step: int

    @property
    def stages(self) -> of.Stages:
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
    _at: Groups = attrs.field(
        default=attrs.Factory(lambda self: groups(self.layout, self.mesh), takes_self=True), init=False, repr=False
    )
    _curious: Curious = attrs.field(factory=Curious, init=False, repr=False)

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
        """A fresh train state."""
        stages = self._loaded(self.model, "trainer.init")
        with host(self.device):
            copies = of.replicas(stages, self._at, self.options.copies)
            return MegatronState(copies, of.optimizer(self.optimizer, copies, self._at, self.options.optimizer), 0)

    def receive(self, state: MegatronState) -> "_Receiving":
        """Replace the weights of a fresh train state."""
        stages, skeleton = state.stages, checkpoint_io.skeleton(self.model)
        own = partial(checkpoint_io.fillable, stages, skeleton, self._at)
        return _Receiving(lora.Receiving(own, partial(adapters.clear, stages), "trainer.init"), state.optimizer)

    def params(self, state: MegatronState) -> of.Stages:
        """The stages of a train state."""
        for copy in state.copies:
            if copy.ddp_config.overlap_param_gather:  # what the last step wrote may be in other processes still
                with host(self.device):
                    copy.start_param_sync(force_sync=True)
        return state.stages

    def adapter(self, params: _Params) -> Adapter[of.Stages]:
        """The adapter of stages."""
        return Adapter(params_of(params))

    def load(self, source: str | None) -> of.Stages:
        """Frozen stages."""
        model = self.model if source is None else attrs.evolve(self.model, source=source, lora=None)
        return _frozen(self._loaded(model, "trainer.load"))

    def freeze(self, params: of.Stages) -> of.Stages:
        """A frozen copy."""
        model = params[0].model
        made = self._built(model, checkpoint_io.skeleton(model))
        with torch.no_grad():
            for copy, stage in zip(made, params, strict=True):
                for mine, other in zip(copy.parameters(), stage.parameters(), strict=True):
                    mine.copy_(other)
        return _frozen(made)

    def pieces(self, params: _Params) -> Iterator[Piece]:
        """What this process has of the weights, with adapters added in, if no process before it has the same."""
        if isinstance(params, Adapter):
            return (piece for piece in spoken(params.params, self._at) if lora.trained(piece.name))
        return adapters.merged(joined(spoken(params, self._at)), params)

    # --- outputs and steps

    def forward(self, params: of.Stages, microbatches: Iterable[Batch], needs: frozenset[str]) -> Sequence[TensorDict]:
        """Outputs without gradients, on the CPU; in processes of the last stage."""
        asked = needs | {"top_k_ids", "top_k_logprobs"}
        parts, _ = evened(self._at.peers, "forward", microbatches)
        parts = self._rounded(parts)
        held, found = HeldError(self._at.peers), dict[int, TensorDict]()
        every = partial(with_outputs, head=self.model.head)
        wanted = every if self.model.head == "reward" else where_routed(every)
        works, cut = self._planned(params, parts, wanted, needs, held, "forward")

        def compute(number: int, hidden: Tensor) -> Tensor:
            with held.back():
                out = of.outputs(
                    params[-1], hidden, works[number], cut[number], needs, self.model.head, self._at, held.back
                )
                values = {key: self._gathered(out.scatter(x)) for key, x in out.values.items() if key in asked}
                found[number] = TensorDict(values, batch_size=parts[number].batch_size).cpu()
            return hidden.new_zeros(())

        for stage in params:
            stage.eval()
        with torch.no_grad(), host(self.device):
            of.passes(params, cut, compute, self._at, backward=False)
        held.meet("forward")
        return [found[number] for number in sorted(found) if parts[number] is not IDLE]

    def train(
        self, state: MegatronState, loss: Loss, microbatches: Iterable[Batch], weights: Mapping[str, float]
    ) -> tuple[MegatronState, Metrics]:
        """One optimizer step; either steps once or raises and leaves the state as it was."""
        copies, optimizer, step = state
        for copy in copies:
            copy.train()
        with host(self.device):
            self._clear(state)
            compute = partial(self._sums, state, loss, weights)
            metrics = self._curious.sums(self._at.peers, loss, microbatches, compute, partial(self._clear, state))
            optimizer.prepare_grads()
            norm = torch.as_tensor(optimizer.get_grad_norm(), dtype=torch.float32)
            check_norm(f"train_step({name_of(loss)})", norm, step)
            rate = set_learning_rate(optimizer.param_groups, self.optimizer, step)
            optimizer.step()
        metrics |= step_metrics(norm, rate) | self._balance(state.stages)
        return MegatronState(copies, optimizer, step + 1), metrics

    def _balance(self, stages: of.Stages) -> Metrics:
        found = loads(stages)
        if found is None:
            return {}
        if not self._at.peers.alone:
            found = found.to(self.device)
            dist.all_reduce(found, group=self._at.peers.group)
        return balance(found.cpu())

    def _clear(self, state: MegatronState) -> None:
        for copy in state.copies:
            copy.zero_grad_buffer()
        forget_loads(state.stages)
        state.optimizer.zero_grad()

    def _sums(
        self,
        state: MegatronState,
        loss: Loss,
        weights: Mapping[str, float],
        microbatches: Sequence[Batch],
        everywhere: bool,
    ) -> Metrics | None:
        """The sums over the micro-batches of all processes; None: the loss reads outputs that have been left out."""
        name, needs = name_of(loss), needed(loss) | (self.provides & {"logprobs"})
        sums = StepSums(loss, name, weights, self.device, self._at.speaks)
        held, read = HeldError(self._at.peers), 0
        parts = self._rounded(microbatches)
        last_stage = state.stages[-1]
        wanted = partial(read_by, head=self.model.head, everywhere=everywhere)
        works, cut = self._planned(state.stages, parts, wanted, needs, held, f"train_step({name})")

        def slope(number: int, hidden: Tensor) -> Tensor:
            nonlocal read
            batch, work = parts[number], works[number]
            out = of.outputs(last_stage, hidden, work, cut[number], needs, self.model.head, self._at, held.back)
            gradients: Mapping[str, Tensor] | None = None
            if batch is not IDLE:
                read += len(work.source)
                whole = {key: self._gathered(out.scatter(x.detach())) for key, x in out.values.items()}
                with held.back():
                    left_out = left_out_of(batch, wanted(batch), self.model.head)
                    gradients = sums.add(whole, *to_device((batch, left_out), self.device))
            return _slope(out, gradients)

        of.passes(state.copies, cut, slope, self._at, backward=True)
        return sums.over_all(held, parts, works, read)

    def _planned(
        self,
        stages: of.Stages,
        parts: Sequence[Batch],
        wanted: Callable[[Batch], Tensor],
        needs: frozenset[str],
        held: HeldError,
        who: str,
    ) -> tuple[list[Plan], list[Tokens]]:
        """The plans of all micro-batches, and of each the tokens of this process."""
        works, config, words = list[Plan](), stages[0].config, stages[0].words
        routers = chosen_by(config)
        with held.back():
            for part in parts:
                some = self.provides & {"rewards"} if part is IDLE else needs  # it has no columns to ask for
                works.append(
                    plan(part, wanted(part), self.packing, words=words, needs=some, always=True, routers=routers)
                )
        held.meet(who)
        multiple = self.layout.tp if config.sequence_parallel else 1
        # Where shapes do not travel with the tokens, all micro-batches have as many
        least = 0 if config.variable_seq_lengths else max(work.inputs["input_ids"].shape[1] for work in works)
        return works, [tokens(work, least, multiple, self.layout.cp, self._at.cp, self.device) for work in works]

    def _rounded(self, parts: Sequence[Batch]) -> list[Batch]:
        """As many micro-batches as an interleaved pipeline takes: a multiple of its stages."""
        missing = -len(parts) % self.layout.pp if self.layout.vp > 1 else 0
        return [*parts, *[IDLE] * (missing + (not parts))]

    def _gathered(self, values: Tensor) -> Tensor:
        """Outputs of all tokens, of which each process along cp has computed some."""
        if self.layout.cp > 1:
            dist.all_reduce(values, group=self._at.collection.cp)
        return values

    # --- weights

    def _built(self, model: Model, skeleton: Any) -> of.Stages:
        arch, dtype = architecture(skeleton, self.layout), getattr(torch, model.dtype)
        if arch.experts is not None and self.layout.tp > 1 and not self.options.model.get("sequence_parallel", True):
            raise ConfigError(
                "megatron.trainer: experts along tp need sequence parallelism, else each of them would get every token "
                "from every process; leave out sequence_parallel"
            )
        fit_threads(skeleton, self.device)
        with host(self.device):
            stages = of.build(arch, model.head, self.options.model, dtype, self._at, self.device)
        for stage in stages:
            stage.model = model
            if model.lora is not None:
                adapters.add(stage, skeleton, self._at)
        return stages

    def _loaded(self, model: Model, who: str) -> of.Stages:
        """Stages with a model's weights, which the first process reads for all, one at a time."""
        held, peers = HeldError(self._at.peers), self._at.peers
        module: Any = None
        read: Any = None
        with held.back():
            if peers.rank == 0:
                module, read = checkpoint_io.read(model)
        held.meet(who)
        skeleton = checkpoint_io.skeleton(model)
        stages, found = self._built(model, skeleton), weight_layout.parts(skeleton)
        filling = Filling(checkpoint_io.fillable(stages, skeleton, self._at), who, other_head=True)
        there = dict(named_tensors(module)) if module is not None else {}
        for name, like in named_tensors(skeleton):
            value = torch.zeros(like.shape, dtype=like.dtype)
            with held.back():
                if peers.rank == 0:
                    value = (read(name) if there[name].is_meta else there[name]).to(like.dtype)
            value = value.to(self.device).contiguous()
            if not peers.alone:
                dist.broadcast(value, group=peers.group, group_src=0)
            filling.add(weight_layout.cut([whole(name, value)], found))
        filling.end()
        held.meet(who)
        return stages

    # --- folders

    def save(self, state: MegatronState, params: _Params) -> ToSave:
        """Stages and optimizer."""
        pieces = partial(stored.of_training, state.copies, state.optimizer, self._at, spoken=True)
        return checkpoint_io.to_save(params, pieces, state.step, self._at)

    def restore(self, folder: Folder, record: Mapping[str, Any]) -> MegatronState:
        """Read files of `save`, which any number of processes wrote, of this engine or another one."""
        storage.check_optimizer(record, self.optimizer.kind)
        copies, optimizer, _ = state = self.init()  # the optimizer's settings come from the configuration

        def pieces(there: Collection[str], wanted: Callable[[str], bool]) -> Iterator[Piece]:
            if any(name.startswith(storage.MOMENTS) for name in there):
                stored.fresh_moments(optimizer)
            yield from stored.of_training(copies, optimizer, self._at, spoken=False, wanted=wanted)

        with host(self.device):
            checkpoint_io.restore(folder, state.stages, pieces, record, self._at)
            stored.updated(copies, optimizer)
        return state._replace(step=record["step"])

    def save_params(self, params: _Params) -> ToSave:
        """Stages."""
        pieces = partial(stored.of_model, spoken(params_of(params), self._at))
        return checkpoint_io.to_save(params, pieces, 0, self._at)

    def restore_params(self, folder: Folder, record: Mapping[str, Any]) -> of.Stages:
        """Read files of `save_params`."""
        model = self.model if record["lora"] else attrs.evolve(self.model, lora=None)
        stages = _frozen(self._loaded(model, "trainer.restore"))

        def pieces(_: Collection[str], wanted: Callable[[str], bool]) -> Iterator[Piece]:
            return stored.of_model((piece for _, piece, _ in own(stages, self._at)), wanted)

        checkpoint_io.restore(folder, stages, pieces, record, self._at)
        return stages

    def export(self, params: _Params, folder: Path) -> None:
        """Write a folder that transformers and vLLM load; of an adapter, one that peft loads."""
        checkpoint_io.export(folder, params, self.pieces(params), self._at)


def _frozen(stages: of.Stages) -> of.Stages:
    return [stage.requires_grad_(False) for stage in stages]


class _Receiving:
    """Takes weights, and lets the optimizer know."""

    def __init__(self, receiving: lora.Receiving, optimizer: Any) -> None:
        self._receiving, self._optimizer = receiving, optimizer

    def add(self, bucket: Sequence[Piece]) -> None:
        """Take some pieces."""
        self._receiving.add(bucket)

    def end(self) -> None:
        """Check that all have come."""
        self._receiving.end()
        self._optimizer.reload_model_params()


def _slope(out: Outputs, gradients: Mapping[str, Tensor] | None) -> Tensor:
    """A scalar whose gradient with respect to the outputs is the given one; None: zeros.

    It depends on every output, so that every parameter gets its gradient: else Megatron waits for some in vain.
    """
    depth, parts = len(out.shape), list[Tensor]()
    for key, x in out.values.items():
        slope = torch.zeros_like(x) if gradients is None else gradients[key].flatten(0, depth - 1)[out.source]
        parts.append((x * slope).sum())
    return torch.stack(parts).sum()
