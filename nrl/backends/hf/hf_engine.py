"""A transformers model in one process, which decodes all of its requests at once."""

import math
import time
from collections.abc import Sequence
from typing import Any, cast

import torch

from nrl.backends.engine import Decoded, Request
from nrl.backends.hf.cache import prepare
from nrl.backends.hf.decoding import Decoding, Stops
from nrl.backends.hf.recording import Recording
from nrl.backends.models import lora
from nrl.backends.models.loading import end_tokens, load_tokenizer
from nrl.backends.models.positions import context_length
from nrl.backends.models.shards import ShardLoader, full_shards
from nrl.backends.models.weight_layout import find_parts, map_to_files
from nrl.backends.types import Bucket, Model
from nrl.runtime.intraop import fit_threads
from nrl.runtime.mesh.offload import offload_value, onload_value

__all__ = ["HfEngine"]

_SECONDS = 1.0  # Cancelled requests are noticed after so many seconds of decoding.


class HfEngine:
    """A `nrl.backends.engine.SampleEngine` for decoding by plain PyTorch; ``routes`` records routes."""

    def __init__(self, model: Model, *, routes: bool = False) -> None:
        module: Any = lora.build(model).eval().requires_grad_(False)
        tokenizer = self.tokenizer = load_tokenizer(model)
        self.module = module.to("cuda" if torch.cuda.is_available() else "cpu")
        fit_threads(module, module.device)
        self.context_length = min(context_length(module), int(tokenizer.model_max_length))
        self.vocabulary = int(module.get_input_embeddings().num_embeddings)
        dtypes = {parameter.dtype for parameter in module.parameters() if parameter.ndim > 1}
        self.matrices = dtypes.pop() if len(dtypes) == 1 else None
        self.stops = end_tokens(getattr(module, "generation_config", None), tokenizer)
        self.filling: ShardLoader | None = None
        prepare(module)
        self._recording = Recording(module) if routes else None
        self._batches: list[tuple[list[Request], Decoding]] = []  # the first is decoded, the others wait

    def offload(self) -> None:
        """Move the model off its device; see `nrl.runtime.mesh.offload.Offloadable`."""
        offload_value(self.module)

    def onload(self) -> None:
        """Move the model back."""
        onload_value(self.module)

    def advance(self, requests: Sequence[Request], cancelled: Sequence[int]) -> Sequence[tuple[int, Decoded]]:
        """Decode all requests of one sampling together, to their end; for a second if some are cancellable.

        New requests wait until the current batch is done.
        """
        for sampling in dict.fromkeys(request.sampling for request in requests):
            alike = [request for request in requests if request.sampling == sampling]
            decoding = Decoding(
                self.module,
                [cast(Sequence[int], request.prompt) for request in alike],
                [request.seed for request in alike],
                sampling={name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")},
                max_new_tokens=sampling.max_new_tokens,
                stops=Stops((*self.stops, *sampling.stop_token_ids), sampling.stop, self.tokenizer),
                context_length=self.context_length,
                recording=self._recording,
            )
            self._batches.append((alike, decoding))
        for alike, decoding in self._batches if cancelled else []:
            for row, request in enumerate(alike):
                if request.number in cancelled:
                    decoding.give_up(row)
        answers: list[tuple[int, Decoded]] = []
        until = time.monotonic() + _SECONDS
        while self._batches:
            alike, decoding = self._batches[0]
            try:
                rows = decoding.run(until if any(request.cancellable for request in alike) else math.inf)
            except BaseException:
                self._batches.clear()
                raise
            if rows is None:
                break
            self._batches.pop(0)
            answers += [(request.number, row) for request, row in zip(alike, rows, strict=True)]
        return answers

    def begin(self) -> None:
        """Prepare for new weights, and decode all requests in flight anew with them."""
        for _, decoding in self._batches:
            decoding.restart()
        self.filling = ShardLoader(
            map_to_files(full_shards(lora.select_published(self.module)), find_parts(self.module)), "receive"
        )

    def add(self, bucket: Bucket) -> None:
        """Copy some of the new weights into the model."""
        assert self.filling is not None
        self.filling.add(bucket)

    def end(self, version: int) -> None:
        """Check that all weights have come."""
        assert self.filling is not None
        self.filling.end()
        self.filling = None
