"""Megatron Core: trains models of some families, split over tensor, context, pipeline and data parallel processes."""

import itertools
import logging
import warnings
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import torch

from nrl.arguments import checked
from nrl.backends.engine import TrainEngine
from nrl.backends.training.optim.optimizers import Optimizer
from nrl.backends.training.trainer import Trainer, make_trainer
from nrl.backends.types import Model
from nrl.batch.packed_rows import Packing, Rectangles, Sequences
from nrl.batch.prefixes import microbatches_by_prefix
from nrl.errors import ConfigError, ExecutableError
from nrl.runtime import Layout, Mesh, Slots, as_mesh

__all__ = ["trainer"]

_NUMBERS = itertools.count(1)  # Errors name the trainer by its number.


@checked("megatron.trainer")
def trainer(
    place: Slots | Mesh,
    model: Model,
    optimizer: Optimizer,
    *,
    max_tokens: int = 16_384,
    packing: Packing = Rectangles,
    checkpointing: bool | Literal["selective"] = False,
    device: str | torch.device | None = None,
    layout: Layout | None = None,
    **options: Any,
) -> Trainer:
    """Make a trainer on Megatron Core, which may be exchanged for `nrl.backends.fsdp.trainer`.

    It trains the dense models of Llama, Mistral, Qwen 2 and Qwen 3, split as in ``layout``: along tp with
    sequence parallelism, along cp, in a pipeline (1F1B, or with ``vp`` interleaved), and over copies, whose optimizer
    is shared. All is Megatron's own, but for attention over packed rows, norms, and log-probabilities.

    Args:
        place: a mesh, or slots, which become a mesh in the executable ``mcore``.
        model: its weights are trained; with ``lora=`` an adapter and a value or reward head. Under ``dtype="bfloat16"``
            it computes in bfloat16, and its optimizer has weights and moments in float32.
        optimizer: `adamw` with its schedule and clipping, without groups.
        max_tokens: bound on the tokens of a micro-batch, padding counted; a longer row is an error.
        packing: how rows are laid out flat, as for `nrl.backends.fsdp.trainer`; along cp it is `nrl.Sequences`.
        checkpointing: recompute every layer in the backward pass, which saves memory; or ``"selective"``: attention
            alone, as Megatron does. Its ``recompute_...`` options have finer ways.
        device: ``"cpu"``, ``"cuda"``; None: a GPU if there is one.
        layout: of the mesh that slots become.
        **options: Megatron's own, by name, such as ``recompute_granularity="selective"``: fields of its
            ``TransformerConfig``, ``DistributedDataParallelConfig`` and ``OptimizerConfig``.

    Returns:
        A `Trainer`.

    Raises:
        ModelError: the model is of another family, or cannot be split so (on ``init`` or ``load``).
        ConfigError: Megatron has no such option, or nrl decides it; or another optimizer.
        ExecutableError: on the local cluster, where trainers run in this process: Megatron Core is not installed here.
        PlacementError: the slots cannot make the mesh.
    """
    name = f"megatron.trainer {next(_NUMBERS)}"
    if optimizer.kind != "adamw" or optimizer.groups:
        raise ConfigError(
            f"{name}: found the optimizer '{optimizer.kind}' with {len(optimizer.groups)} groups; on Megatron there is "
            "'adamw' alone, without groups; use fsdp.trainer, or adamw(lr=...)"
        )
    if optimizer.moments == "bfloat16":
        raise ConfigError(
            f"{name}: found moments='bfloat16'; on Megatron they are float32, as other ones need Transformer Engine; "
            "use fsdp.trainer, or leave moments out"
        )
    if checkpointing == "selective":
        options = {"recompute_granularity": "selective"} | options
    elif checkpointing:
        options = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1} | options
    mesh = as_mesh(place, "mcore", "trainer", layout)
    if not mesh.cluster.remote and find_spec("megatron") is None:
        raise ExecutableError(
            f"{name}: on the local cluster it runs in this process, where Megatron Core is not installed; install "
            "nrl-torch[mcore], or take cluster=ray, which builds an environment with it"
        )
    make_engine = partial(_make_engine, model, optimizer, packing, options, device, mesh.layout, mesh.cluster.remote)
    return make_trainer(
        mesh, make_engine, name=name, max_tokens=max_tokens, parts_of=microbatches_by_prefix, model=model
    )


def _make_engine(
    model: Model,
    optimizer: Optimizer,
    packing: Packing,
    options: Mapping[str, Any],
    device: str | torch.device | None,
    layout: Layout,
    alone: bool,
) -> TrainEngine[Any, Any]:
    """Make an engine in a process of the mesh; ``alone`` says that the process belongs to the mesh."""
    _quiet()
    from nrl.backends.megatron.megatron_engine import MegatronEngine
    from nrl.backends.megatron.options import options as sorted_options
    from nrl.backends.training.device_metrics import device_of
    from nrl.backends.training.layout.packed_attention import choose_packing
    from nrl.runtime import cuda_allocator, process

    where = device_of("megatron.trainer", device)
    if alone and where.type == "cuda":
        cuda_allocator.use_expandable_segments()
    device_mesh = process().device_mesh
    if device_mesh is None:  # this process stands for all
        layout = Layout()
    packing = Sequences if layout.cp > 1 else choose_packing(where, packing, model.dtype, "megatron.trainer") or packing
    return MegatronEngine(model, optimizer, packing, sorted_options(options), where, layout, device_mesh)


def _quiet() -> None:
    """Silence Megatron's advice about GPUs and deprecations, which every process would print."""
    for message in (
        "Transformer Engine and Apex",
        "Apex is not",
        "absl.logging",
        "full scope is",
        "When using sequence",
    ):
        warnings.filterwarnings("ignore", message)
    warnings.filterwarnings("ignore", r"`torch\.distributed\..*` is deprecated", FutureWarning)
    warnings.filterwarnings("ignore", "MimoModelConfig is experimental")
    for name in ("megatron.core.models.gpt.gpt_model", "megatron.core.transformer.transformer_layer"):
        logging.getLogger(name).setLevel(logging.ERROR)
