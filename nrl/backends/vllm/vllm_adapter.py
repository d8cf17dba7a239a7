"""LoRA adapters in vLLM: computed beside the weights and replaced in place."""

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from nrl.backends.models import lora
from nrl.backends.models.named_weights import check_arrived
from nrl.backends.types import Model
from nrl.errors import ModelError

__all__ = ["VllmAdapter"]

_RANKS = 1, 8, 16, 32, 64, 128, 256, 320, 512  # vLLM's
_NAME, _NUMBER = "nrl", 1  # All versions share a name: requests in flight go on with the new one.


class VllmAdapter:
    """The adapter of an engine's model: its shapes, its arguments for vLLM, and its weights when they come.

    Args:
        model: it has ``lora``.

    Raises:
        ModelError: peft or vLLM cannot have such an adapter.
    """

    def __init__(self, model: Model) -> None:
        self._model, self._skeleton = model, lora.skeleton(model)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in lora.select_published(self._skeleton).items()}
        config: Any = self._skeleton.peft_config["default"]  # type: ignore[index]
        if config.init_lora_weights is False:
            raise ModelError(
                "vllm.sampler: with init_lora_weights=False B is random, and vLLM is given no adapter before the first "
                "publish; leave it out, so that B is 0"
            )
        rank = max(layer.r["default"] for layer in lora.layers(self._skeleton).values())
        if rank > max(_RANKS):
            raise ModelError(f"vllm.sampler: an adapter has rank {rank}, and vLLM has up to {max(_RANKS)}")
        self.arguments = {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": min(supported for supported in _RANKS if supported >= rank),
        }
        self.request: Any = None
        """The adapter in requests; None: the base alone."""
        self._folder: Any = None
        self._came: dict[str, Tensor] = {}

    def begin(self, engine: Any) -> None:
        """Load the adapter that the model names, if it names one, into an engine that has just started."""
        if isinstance(self._model.lora, str):
            self.add(
                (piece.name, piece.tensor) for piece in lora.read_adapter(self._model.lora) if piece.name in self.shapes
            )
            check_arrived(self.shapes.keys() - self._came.keys(), f"Model(lora='{self._model.lora}')")
            self.replace(engine)

    def add(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Keep some of the new weights."""
        self._came |= {name: tensor.cpu().clone() for name, tensor in weights}

    def replace(self, engine: Any) -> None:
        """Let the engine use the weights that have come; the caller drops keys and values of older ones."""
        from vllm.lora.request import LoRARequest

        folder = tempfile.TemporaryDirectory(prefix="nrl-adapter-")  # a new one, since vLLM finds keys and values by it
        lora.export(self._skeleton, self._came, self._model, Path(folder.name))
        try:
            engine.add_lora(LoRARequest(_NAME, _NUMBER, folder.name, load_inplace=True))
        except (ValueError, RuntimeError) as error:
            raise ModelError(
                f"vllm.sampler: vLLM refuses the adapter: {error}; leave lora out of the sampler's Model, and merged "
                "weights are published"
            ) from error
        self.request = LoRARequest(_NAME, _NUMBER, folder.name)
        self._folder, self._came = folder, {}  # vLLM may read the folder again until the next one
