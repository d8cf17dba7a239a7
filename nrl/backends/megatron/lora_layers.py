"""LoRA beside Megatron's linear layers, with an A and a B for each projection that Hugging Face's files know.

Megatron joins projections and splits them over the processes along tp. A layer whose weight is split by rows has each
A whole, and B split as the weight is; one whose weight is split by columns has A split, and B whole. So what an
adapter adds to a weight is computed where the weight lies.

With sequence parallelism a process has some tokens only where a layer's input or output is whole, and there the
gradients of A or of B are partial. They are marked as those of norms are, and Megatron adds them up.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from nrl.backends.megatron.groups import Groups
from nrl.backends.megatron.weight_views import owned_shards
from nrl.backends.models import lora, weight_layout
from nrl.backends.models.named_weights import named_tensors
from nrl.backends.types import Piece

__all__ = ["add", "clear", "merge_adapters", "signature"]

_JOINED = {
    "self_attention.linear_qkv": ("self_attn", ("q_proj", "k_proj", "v_proj")),
    "self_attention.linear_proj": ("self_attn", ("o_proj",)),
    "mlp.linear_fc1": ("mlp", ("gate_proj", "up_proj")),
    "mlp.linear_fc2": ("mlp", ("down_proj",)),
}
"""The projections that Megatron's linear layers consist of, by their names in files."""

_SUMS: WeakKeyDictionary[nn.Module, tuple[dict[str, int], dict[str, float]]] = WeakKeyDictionary()
"""The writes to each weight of the base of a stage when it was last summed, and the sums of its pieces then."""


class _Projection(nn.Module):
    """A and B of a projection, or this process's parts of them.

    Args:
        name: that the projection has in files.
        layer: of the same projection, as peft has wrapped it.
        by_rows: whether B is split, as the rows of the weight are; or else A, as its columns are.
        linear: Megatron's layer.
        groups: the process groups.
    """

    def __init__(self, name: str, layer: Any, by_rows: bool, linear: Any, groups: Groups) -> None:
        super().__init__()
        self.name, self.scale, self.rank = name, layer.scaling["default"], layer.r["default"]
        shapes = {
            "lora_A": (self.rank, layer.base_layer.in_features),
            "lora_B": (layer.base_layer.out_features, self.rank),
        }
        self._split = {"lora_A": None if by_rows else 1, "lora_B": 0 if by_rows else None}
        self._groups = groups
        for kind, shape in shapes.items():
            dim = self._split[kind]
            mine = [size // groups.layout.tp if axis == dim else size for axis, size in enumerate(shape)]
            parameter: Any = nn.Parameter(torch.empty(mine, dtype=linear.weight.dtype, device=linear.weight.device))
            if dim is None:
                parameter.sequence_parallel = linear.sequence_parallel
            else:
                parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1
            self.register_parameter(kind, parameter)

    def piece(self, kind: str, values: Tensor) -> Piece:
        """Return this process's part of A or B, as a view of ``values``."""
        split, tp = self._split[kind], self._groups.layout.tp
        shape = tuple(size * tp if dim == split else size for dim, size in enumerate(values.shape))
        first = [self._groups.tp * size if dim == split else 0 for dim, size in enumerate(values.shape)]
        index = tuple(slice(begin, begin + size) for begin, size in zip(first, values.shape, strict=True))
        return Piece(f"{self.name}.{kind}.weight", shape, index, values)

    def compute_delta(self, index: tuple[slice, ...]) -> Tensor:
        """Compute what the adapter adds to a block of this process's part of the weight, in float32 at least."""
        a, b = (self.piece(kind, getattr(self, kind).detach()) for kind in ("lora_A", "lora_B"))
        rows, columns = index
        local_rows = slice(rows.start - b.index[0].start, rows.stop - b.index[0].start)
        local_columns = slice(columns.start - a.index[1].start, columns.stop - a.index[1].start)
        exact = torch.promote_types(a.tensor.dtype, torch.float32)
        delta: Tensor = self.scale * (b.tensor[local_rows].to(exact) @ a.tensor[:, local_columns].to(exact))
        return delta


class _ByRows(nn.Module):
    """Beside a layer whose weight is split by rows: several projections of the same input.

    Args:
        projections: those that have an adapter, by name.
        widths: of the outputs of all projections that the layer joins, in its order; as many of each as one group has.
        groups: how often the layer repeats them in this process.
        linear: the layer.
        group: of the processes along tp.
    """

    def __init__(
        self,
        projections: Mapping[str, _Projection],
        widths: Mapping[str, int],
        groups: int,
        linear: Any,
        group: Any,
    ) -> None:
        super().__init__()
        self.projections = nn.ModuleDict(projections)
        self._widths, self._groups, self._group = dict(widths), groups, group
        self._sequence_parallel = linear.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """``x`` ``[n, 1, H]``, with sequence parallelism a part of the tokens; returns ``[m, 1, rows]`` of all."""
        from megatron.core.tensor_parallel import mappings

        projections: Any = dict(self.projections.items())
        low = linear(x, torch.cat([projection.lora_A for projection in projections.values()]))
        gather = (
            mappings.gather_from_sequence_parallel_region
            if self._sequence_parallel
            else mappings.copy_to_tensor_model_parallel_region
        )
        low = gather(low, group=self._group)  # each process's B makes a part of its gradient
        lows = low.split([projection.rank for projection in projections.values()], -1)
        outputs = {
            name: linear(part, projection.lora_B) * projection.scale
            for (name, projection), part in zip(projections.items(), lows, strict=True)
        }
        parts = [
            outputs[name].unflatten(-1, (self._groups, width))
            if name in outputs
            else low.new_zeros(*low.shape[:-1], self._groups, width)
            for name, width in self._widths.items()
        ]
        return torch.cat(parts, -1).flatten(-2)


class _ByColumns(nn.Module):
    """Beside a layer whose weight is split by columns.

    Args:
        projections: the only one, by name.
        linear: the layer.
        group: of the processes along tp.
    """

    def __init__(self, projections: Mapping[str, _Projection], linear: Any, group: Any) -> None:
        super().__init__()
        self.projections = nn.ModuleDict(projections)
        self._group, self._sequence_parallel = group, linear.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """``x`` ``[n, 1, columns]``; returns ``[m, 1, H]``, with sequence parallelism a part of the tokens."""
        from megatron.core.tensor_parallel import mappings

        projection: Any = next(iter(self.projections.values()))
        add_up = (
            mappings.reduce_scatter_to_sequence_parallel_region
            if self._sequence_parallel
            else mappings.reduce_from_tensor_model_parallel_region
        )
        # The sum over columns of A x; then B is applied once.
        low = add_up(linear(x, projection.lora_A), group=self._group)
        output: Tensor = linear(low, projection.lora_B) * projection.scale
        return output


def add(stage: Any, skeleton: nn.Module, groups: Groups) -> None:
    """Give a stage the adapters that a transformers model has, and let it train those and a value or reward head alone.

    Args:
        stage: of the model (`nrl.backends.megatron.packed_layers.PackedGPT`).
        skeleton: the model, from `nrl.backends.models.lora.skeleton`.
        groups: the groups.
    """
    wrapped_layers = lora.layers(skeleton)
    stage.requires_grad_(False)
    for layer in stage.decoder.layers:
        for path, (part, names) in _JOINED.items():
            prefix = f"model.layers.{layer.layer_number - 1}.{part}."
            present = {name: wrapped_layers[prefix + name] for name in names if prefix + name in wrapped_layers}
            if present:
                joined = layer.get_submodule(path)
                by_rows = len(names) > 1
                projections = {
                    name: _Projection(prefix + name, x, by_rows, joined, groups) for name, x in present.items()
                }
                joined.adapter = _make_adapter(stage.config, names, projections, joined, groups)
                joined.register_forward_hook(_add_adapter_output)
    if stage.post_process and isinstance(stage.output_layer, nn.Linear):
        stage.output_layer.requires_grad_(True)
    if stage.pre_process:
        stage.embedding.register_forward_hook(_require_gradient)


def _make_adapter(
    config: Any, names: tuple[str, ...], projections: Mapping[str, _Projection], joined: Any, process_groups: Groups
) -> nn.Module:
    group = process_groups.collection.tp
    if len(names) == 1:
        return _ByColumns(projections, joined, group)
    if "q_proj" in names:
        width, groups = config.kv_channels, config.num_query_groups
        heads = config.num_attention_heads // groups
        widths = dict(zip(names, (heads * width, width, width), strict=True))
        return _ByRows(projections, widths, groups // process_groups.layout.tp, joined, group)
    return _ByRows(projections, dict.fromkeys(names, len(joined.weight) // len(names)), 1, joined, group)


def _add_adapter_output(joined: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """Add the adapter's output for the same input; a hook of a linear layer."""
    base_output, bias = output
    return base_output + joined.adapter(inputs[0]), bias


def _require_gradient(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """Let the output of a frozen embedding require a gradient; a hook.

    Megatron differentiates each stage, and layers that it computes again.

    It cannot differentiate a stage that no gradient reaches, as where a stage has no adapter.
    """
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output


def _projections(stages: Iterable[nn.Module]) -> Iterator[_Projection]:
    return (part for stage in stages for part in stage.modules() if isinstance(part, _Projection))


def merge_adapters(pieces: Iterable[Piece], stages: Iterable[nn.Module]) -> Iterator[Piece]:
    """Yield pieces of weights with adapters added; leave the adapters themselves out.

    Args:
        pieces: that this process has.
        stages: that they are of.
    """
    projections = {f"{projection.name}.weight": projection for projection in _projections(stages)}
    for piece in pieces:
        if piece.name in projections:
            total = piece.tensor + projections[piece.name].compute_delta(piece.index)
            yield attrs.evolve(piece, tensor=total.to(piece.tensor.dtype))
        elif ".lora_" not in piece.name:
            yield piece


@torch.no_grad()
def clear(stages: Iterable[nn.Module]) -> None:
    """Set each B to 0, so that the adapter changes nothing."""
    for projection in _projections(stages):
        projection.get_parameter("lora_B").zero_()


def signature(stages: Sequence[Any], skeleton: nn.Module, groups: Groups) -> dict[str, float]:
    """Compute `nrl.backends.models.lora.signature` of the stages of all processes; a collective.

    Args:
        stages: of this process.
        skeleton: the transformers model with the adapter, whose names sums have.
        groups: the groups.
    """
    total = dict[str, float]()
    for sums in groups.peers.gather(_sums(stages, groups)):
        for name, value in sums.items():
            total[name] = total.get(name, 0.0) + value
    parts = weight_layout.find_parts(skeleton)
    base = [name for name, _ in named_tensors(skeleton) if not lora.is_trained(name)]
    in_files = {name: [part.name for part in parts.get(name, ())] or [name] for name in base}
    return {name: sum(total[part] for part in names) for name, names in in_files.items()} | lora.scales(skeleton)


def _sums(stages: Sequence[Any], groups: Groups) -> dict[str, float]:
    """Sum up the pieces of the base that this process, and no process before it, has; the base is never trained."""
    writes = {
        f"{i} {name}": x._version
        for i, stage in enumerate(stages)
        for name, x in stage.named_parameters()
        if not x.requires_grad
    }
    seen, sums = _SUMS.get(stages[0], ({}, {}))
    if writes != seen:
        sums = {}
        for piece in owned_shards(stages, groups):
            if not lora.is_trained(piece.name):
                value = float(piece.tensor.sum(dtype=torch.float64))
                sums[piece.name] = sums.get(piece.name, 0.0) + value
        _SUMS[stages[0]] = writes, sums
    return sums
