"""The torch backend: trains a model in one process, or sharded over several."""

import itertools
from functools import partial
from typing import Any, Literal

import torch

from nrl.arguments import checked
from nrl.backends.engine import TrainEngine
from nrl.backends.training.optim.optimizers import Optimizer
from nrl.backends.training.trainer import Trainer, make_trainer
from nrl.backends.types import Model
from nrl.batch import microbatches
from nrl.batch.packed_rows import Packing, Rectangles
from nrl.batch.prefixes import microbatches_by_prefix
from nrl.errors import PlacementError
from nrl.runtime import Layout, Mesh, Slots, as_mesh

__all__ = ["trainer"]

_NUMBERS = itertools.count(1)  # Errors name the trainer by its number.


@checked("fsdp.trainer")
def trainer(
    place: Slots | Mesh,
    model: Model,
    optimizer: Optimizer,
    *,
    max_tokens: int = 16_384,
    packing: Packing | None = Rectangles,
    checkpointing: bool | Literal["selective"] = False,
    compile: bool = False,
    offload: Literal["cpu"] | None = None,
    deterministic: bool = False,
    device: str | torch.device | None = None,
    layout: Layout | None = None,
) -> Trainer:
    """Make a trainer for any Hugging Face causal language model.

    In a mesh of several processes the model, its gradients and its optimizer are sharded by ``fully_shard`` along dp.

    Args:
        place: a mesh, or slots, which become a mesh with all of them along dp.
        model: its weights are trained, or its adapter if it has ``lora``. Under ``dtype="bfloat16"`` weights and
            moments stay in float32, and the computation is in bfloat16.
        optimizer: `adamw`, `sgd`, `muon` or one's `own`, with its schedule, clipping and groups.
        max_tokens: bound on the tokens of a micro-batch, padding counted; a longer row is an error.
        packing: the flat layout of rows: `nrl.Rectangles`, or `nrl.Sequences`, without padding, which a GPU always
            uses in bfloat16; None: the model's own padded forward.
        checkpointing: recompute activations in the backward pass, layer by layer, to save memory: all of a layer but
            its input; or ``"selective"``: all but its input, its attention and its narrow products.
        compile: compile the layers with ``torch.compile``; the first step takes longer.
        offload: ``"cpu"``: keep parameters, gradients and moments on the host, where the optimizer then steps; each
            layer goes to the device when it computes. See docs/memory.md.
        deterministic: let torch use deterministic kernels, in each process of the mesh, and refuse operations without
            one; slower. On the local cluster this sets the mode of this process. See docs/determinism.md.
        device: ``"cpu"``, ``"cuda"``; None: a GPU if there is one.
        layout: of the mesh made of slots; this backend has the axis dp alone.

    Returns:
        A `Trainer`.

    Raises:
        ModelError: the model cannot be loaded, or needs a computation that packed rows do not have (on ``init`` or
            ``load``); or a group of the optimizer fits no weight, or one's own optimizer is unusable (on ``init``).
        PlacementError: the slots cannot make the mesh, or its layout has other axes than dp.
        ConfigError: the environment sets CUBLAS_WORKSPACE_CONFIG to a value that is not deterministic.

    >>> import nrl
    >>> from nrl import tiny
    >>> from nrl.backends import adamw
    >>> with nrl.cluster("local") as cluster:
    ...     policy = trainer(cluster.reserve(1), tiny.model(), adamw(lr=1e-3))
    ...     policy.init().step
    0
    """
    name, parts_of = f"fsdp.trainer {next(_NUMBERS)}", microbatches if packing is None else microbatches_by_prefix
    _check(place, place.layout if isinstance(place, Mesh) else layout)
    mesh = as_mesh(place, "base", "trainer", layout)
    options = (model, optimizer, packing, checkpointing, compile, offload, deterministic, device)
    return make_trainer(
        mesh,
        partial(_make_engine, *options, mesh.cluster.remote),
        name=name,
        max_tokens=max_tokens,
        parts_of=parts_of,
        model=model,
    )


def _check(place: Slots | Mesh, layout: Layout | None) -> None:
    if layout is None or not place.cluster.remote or layout in (Layout(layout.dp), Layout(layout.dp, shard=layout.dp)):
        return
    raise PlacementError(f"fsdp.trainer: found {layout}; it shards a model over all of dp, and other axes are 1")


def _make_engine(
    model: Model,
    optimizer: Optimizer,
    packing: Packing | None,
    checkpointing: bool | Literal["selective"],
    compile: bool,
    offload: Literal["cpu"] | None,
    deterministic: bool,
    device: str | torch.device | None,
    alone: bool,
) -> TrainEngine[Any, Any]:
    """Make an engine in a process of the mesh; ``alone`` says that the process belongs to the mesh."""
    from nrl.backends.fsdp.torch_engine import TorchEngine
    from nrl.backends.training.determinism import make_deterministic
    from nrl.backends.training.device_metrics import device_of
    from nrl.backends.training.layout.packed_attention import choose_packing
    from nrl.runtime import cuda_allocator, process

    where = device_of("fsdp.trainer", device)
    if alone and where.type == "cuda":  # engines of vLLM, which may lie in the driver's process, refuse them
        cuda_allocator.use_expandable_segments()
    packing = choose_packing(where, packing, model.dtype, "fsdp.trainer")
    if deterministic:
        make_deterministic()
    return TorchEngine(model, optimizer, packing, checkpointing, compile, where, process().device_mesh, offload)
