"""How weights get into a running vLLM engine: a backend of vLLM's own weight transfer, for tensors at hand."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from nrl.errors import GenerationError

__all__ = ["forget", "register", "repack"]

_NAME = "nrl"


def register() -> str:
    """Make the backend known to vLLM in this process; the name that it has there."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if _NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(_NAME, _made())
    return _NAME


def forget(engine: Any) -> None:
    """Drop keys and values that were computed with other weights; vLLM itself would go on using them.

    Requests that are under way keep their tokens, which are read again with the new weights.
    """
    if not engine.reset_prefix_cache(reset_running_requests=True):
        raise GenerationError("receive: vLLM could not forget the keys and values of the old weights")


def repack(model: Any) -> None:
    """Let a head that is tied to the embeddings be computed from the new ones, on a CPU.

    There vLLM keeps the weights of a linear layer in the layout of its kernels. A reload makes that anew for every
    layer but this one, which has no weights of its own in a checkpoint.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    head: Any = getattr(model, "lm_head", None)
    if head is not None and model.config.tie_word_embeddings and head.weight.device.type == "cpu":
        dispatch_cpu_unquantized_gemm(head, remove_weight=False)


def _made() -> type[Any]:
    """The class; made where vLLM is, since it inherits from it."""
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
