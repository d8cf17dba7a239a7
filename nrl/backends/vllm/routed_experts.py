"""Routes as vLLM records them (``enable_return_routed_experts``), and as nrl's columns have them."""

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from nrl.backends.models.loading import skeleton
from nrl.backends.models.moe_routers import layer_numbers, sizes
from nrl.backends.types import Model
from nrl.errors import GenerationError

__all__ = ["RoutedExperts"]


@attrs.frozen
class RoutedExperts:
    """The routers of a model, known before vLLM runs it.

    Args:
        layers: the numbers of the layers that have a router.
        k: the experts of a token in each of them.
        experts: the number of experts to choose from.

    >>> found = RoutedExperts((1,), k=2, experts=8).parse(np.array([[[0, 0], [3, 1]]], dtype=np.uint8), 1)
    >>> found.tolist(), found.dtype
    ([[[3, 1]]], torch.int16)
    """

    layers: Sequence[int]
    k: int
    experts: int

    @classmethod
    def of_model(cls, model: Model) -> "RoutedExperts":
        """Return the routers of a model.

        Raises:
            ModelError: it has no routers, or it is not known in which layers they are.
        """
        module = skeleton(model)
        return cls(layer_numbers(module), sizes(module).k, sizes(module).experts)

    def parse(self, recorded: Any, tokens: int) -> Tensor:
        """Return the routes of all but the last token of prompt and completion.

        Args:
            recorded: ``CompletionOutput.routed_experts`` of vLLM 0.32, a numpy array ``[tokens, layers, k]`` of all
                hidden layers, uint8 up to 256 experts and otherwise uint16. Layers without a router have any numbers
                there.
            tokens: the number of tokens that were inputs.

        Returns:
            ``[tokens, layers, k]`` int16, of the layers that have a router.

        Raises:
            GenerationError: the array is not of this form.
        """
        shape = None if recorded is None else tuple(np.shape(recorded))
        if shape is None or len(shape) != 3 or shape[0] != tokens or shape[1] <= max(self.layers) or shape[2] != self.k:
            raise GenerationError(
                f"generate: vLLM's routed_experts have the shape {shape}; expected are {tokens} tokens, more than "
                f"{max(self.layers)} layers and {self.k} experts a token. nrl reads what vLLM 0.32 records: install "
                "that, or leave routes= out"
            )
        routes = torch.from_numpy(np.asarray(recorded)[:, list(self.layers)].astype(np.int16))
        if routes.numel() and not 0 <= int(routes.min()) <= int(routes.max()) < self.experts:
            raise GenerationError(
                f"generate: vLLM's routed_experts have the expert {int(routes.max())}, and the model has those from 0 "
                f"to {self.experts - 1}; what was recorded is not of this model, so leave routes= out"
            )
        return routes
