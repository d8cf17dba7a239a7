"""Loading weights into a running vLLM engine, as a backend of vLLM's own weight transfer."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nrl.errors import GenerationError, WeightMismatch
from nrl.runtime.transfer import checksum

__all__ = [
    "check_cache_reset",
    "check_head",
    "check_loaded",
    "fingerprint",
    "has_uniform_dtype",
    "register_backend",
    "repack",
    "reset_cache",
    "reset_expert_kernels",
]

_NAME = "nrl"
_COLUMNS = 8  # columns of a head that are compared


def register_backend() -> str:
    """Make the weight transfer known to vLLM in this process, and return its name there."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if _NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(_NAME, _make_transfer_class())
    return _NAME


def reset_cache(engine: Any) -> None:
    """Drop keys and values of older weights; vLLM itself would go on using them.

    Unfinished requests keep their tokens, which the engine reads again with the new weights.
    """
    if not engine.reset_prefix_cache(reset_running_requests=True):
        raise GenerationError("receive: vLLM could not forget the keys and values of the old weights")


def repack(model: Any) -> None:
    """Let a head that is tied to the embeddings use the new ones, on a CPU.

    There vLLM keeps the weights of a linear layer in the layout of its kernels. A reload makes that layout anew for
    every layer but this one, which has no weights of its own in a checkpoint.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    if (head := _tied_head(model)) is not None:
        dispatch_cpu_unquantized_gemm(head, remove_weight=False)


def reset_expert_kernels(model: Any) -> None:
    """Let experts on a CPU be laid out for their kernel when they come, as they were when the model was loaded.

    vLLM does that when it makes the kernel, and keeps the kernel in a reload, since other devices may have recorded
    where its weights are. On a CPU nothing is recorded; so the kernel is made anew.
    """
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None and next(layer.parameters()).device.type == "cpu":
            method.moe_kernel = None


def _tied_head(model: Any) -> Any:
    head: Any = getattr(model, "lm_head", None)
    tied = head is not None and model.config.tie_word_embeddings and head.weight.device.type == "cpu"
    return head if tied else None


def check_head(model: Any) -> None:
    """Check that a head which is tied to the embeddings uses the current ones, on a CPU; see `repack`.

    A step changes so little that log-probabilities would not tell. The head's output for a vector with a single 1 is a
    column of its weights, exactly, in any dtype.

    Raises:
        WeightMismatch: it does not.
    """
    if (head := _tied_head(model)) is None:
        return
    wide = head.weight.shape[1]
    columns = torch.linspace(0, wide - 1, min(_COLUMNS, wide)).long()
    outputs = head.quant_method.apply(head, torch.nn.functional.one_hot(columns, wide).to(head.weight.dtype))
    if not torch.equal(outputs, head.weight[:, columns].T):
        raise WeightMismatch(
            "receive: the head is tied to the embeddings, and vLLM computes it from older ones: the layout of its "
            "weights is stale. Where nrl does not know this version of vLLM, give executable= one that it does"
        )


def has_uniform_dtype(dtype: torch.dtype, model: torch.nn.Module) -> bool:
    """Return whether a model keeps all its matrices in a dtype; some keep routers, or quantized layers, in another.

    Where vLLM has laid a matrix out for a kernel, an empty vector is left of it.

    >>> (
    ...     has_uniform_dtype(torch.bfloat16, torch.nn.Linear(2, 2)),
    ...     has_uniform_dtype(torch.bfloat16, torch.nn.LayerNorm(2)),
    ... )
    (False, True)
    """
    return all(
        parameter.dtype == dtype for parameter in model.parameters() if parameter.ndim > 1 or not parameter.numel()
    )


def fingerprint(tensor: Tensor, dtype: torch.dtype) -> tuple[torch.Size, int]:
    """Return the shape of a weight, and the sum of its bits in the dtype that a model computes in.

    >>> fingerprint(torch.ones(2), torch.bfloat16)
    (torch.Size([2]), 1065369472)
    """
    return tensor.shape, checksum(tensor.to(dtype))


def check_loaded(fingerprints: Mapping[str, tuple[torch.Size, int]], dtype: torch.dtype, model: Any) -> None:
    """Check bit by bit that a model has the new weights, where it keeps weights unchanged.

    Norms and embeddings stay as they are everywhere; other layers are merged, divided, or laid out for kernels.

    Args:
        fingerprints: of the new weights.
        dtype: of the fingerprints.
        model: vLLM's.

    Raises:
        WeightMismatch: it has other weights.
    """
    for name, parameter in model.named_parameters():
        shape, expected = fingerprints.get(name, (None, 0))
        if shape is None or parameter.dtype != dtype or parameter.ndim != len(shape) or len(parameter) < shape[0]:
            continue
        held = parameter[: shape[0]]  # embeddings may have more rows, which nobody reads
        if held.shape == shape and (actual := checksum(held)) != expected:
            raise WeightMismatch(
                f"receive: vLLM holds another '{name}' than the one that came (checksum {actual}, and not {expected}). "
                "Where nrl does not know this version of vLLM, give executable= one that it does"
            )


def check_cache_reset(engine: Any) -> None:
    """Check that the cache has no keys and values of older weights; see `reset_cache`.

    Raises:
        WeightMismatch: some are left.
    """
    blocks = engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool.blocks
    if stale := sum(block.block_hash is not None for block in blocks):
        raise WeightMismatch(
            f"receive: {stale} blocks of keys and values that were computed with older weights are stale, and vLLM "
            "would go on from them. Where nrl does not know this version of vLLM, give executable= one that it does"
        )


def _make_transfer_class() -> type[Any]:
    """Define the transfer's class here, since it inherits from vLLM's, which may not be installed."""
    from dataclasses import dataclass

    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    @dataclass
    class Nothing:
        """There is nothing to set up."""

    @dataclass
    class Tensors:
        """Weights by their Hugging Face names."""

        tensors: Mapping[str, Tensor]

    class InProcess(WeightTransferEngine):  # type: ignore[misc]
        """Takes tensors of its own process; vLLM lays them out layer by layer, as it does when it loads a model."""

        init_info_cls, update_info_cls = Nothing, Tensors

        def init_transfer_engine(self, init_info: Nothing) -> None:
            """Nothing is to be set up."""

        def start_weight_update(self) -> None:
            reset_expert_kernels(self.model)
            initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: Tensors) -> None:
            self.model.load_weights((name, tensor.to(self.device)) for name, tensor in update_info.tensors.items())

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)
            repack(self.model)

        def shutdown(self) -> None:
            """Nothing is held."""

    return InProcess
