"""The smallest engine there is, a table of next-token logits, and a sampler that keeps what it receives.

Both satisfy their protocols, so the driver's half of training is tested without transformers.
"""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import torch
from tensordict import TensorDict
from torch import Tensor

from nrl.algos import Loss, mismatch_metrics
from nrl.backends import Completion, Sampling
from nrl.backends.models.shards import ShardLoader, full_shard
from nrl.backends.training.loss.loss_terms import check_weights, terms_of
from nrl.backends.training.saving.save_plan import SavePlan
from nrl.backends.types import Bucket, Chunks, Piece
from nrl.batch import Batch, lengths
from nrl.batch.metrics import Metrics, Sum, merge
from nrl.files import Folder
from nrl.runtime.mesh.futures import Future, as_future, done

__all__ = ["VOCABULARY", "Bigram", "BigramState", "Recorder"]

VOCABULARY = 7


class BigramState(NamedTuple):
    """``table`` ``[V, V]``: row v holds the logits of the token after v."""

    table: Tensor


@attrs.frozen
class Bigram:
    """Plain gradient descent on a table; satisfies `nrl.backends.TrainEngine`."""

    rate: float = 0.5
    provides: frozenset[str] = frozenset({"logprobs"})
    frozen_token: int | None = None

    def init(self) -> BigramState:
        generator = torch.Generator().manual_seed(0)
        return BigramState(torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64))

    def receive(self, state: BigramState) -> ShardLoader:
        return ShardLoader({"table": full_shard("table", state.table)}, "trainer.init")

    def params(self, state: BigramState) -> Tensor:
        return state.table

    def load(self, source: str | None) -> Tensor:
        return self.init().table if source is None else torch.load(Path(source) / "table.pt", weights_only=True)

    def freeze(self, params: Tensor) -> Tensor:
        return params.clone()

    def forward(self, params: Tensor, microbatches: Iterable[Batch], needs: frozenset[str]) -> Sequence[TensorDict]:
        return [self._outputs(params, batch) for batch in microbatches]

    def train(
        self, state: BigramState, loss: Loss, microbatches: Iterable[Batch], weights: Mapping[str, float]
    ) -> tuple[BigramState, Metrics]:
        table, parts = state.table.clone().requires_grad_(), list(microbatches)
        metrics: Metrics = {"parts": Sum(torch.tensor(len(parts)))}
        seen = dict.fromkeys(weights, 0.0)
        for batch in parts:
            out = self._outputs(table, batch)
            terms, extra = terms_of("loss", loss(out, batch))
            extra |= mismatch_metrics(out, batch)
            value = torch.stack([term.total / weights[key] for key, term in terms.items()]).sum()
            value.backward()
            seen = {key: seen[key] + float(term.weight) for key, term in terms.items()}
            tokens = Sum(lengths(batch).sum())
            metrics = merge(metrics, extra | {"loss": Sum(value.detach()), "tokens": tokens})
        check_weights("loss", seen, weights)
        assert table.grad is not None
        return BigramState((table - self.rate * table.grad).detach()), metrics

    def _outputs(self, table: Tensor, batch: Batch) -> TensorDict:
        ids = batch["input_ids"]
        found = table.log_softmax(-1)[ids[..., :-1], ids[..., 1:]]
        logprobs = torch.cat([torch.zeros_like(ids[..., :1], dtype=table.dtype), found], -1)
        real = torch.arange(ids.shape[-1]) < lengths(batch).unsqueeze(-1)
        return TensorDict({"logprobs": torch.where(real, logprobs, 0.0)}, batch_size=batch.batch_size)

    def adapter(self, params: Tensor) -> Tensor:
        raise NotImplementedError

    def pieces(self, params: Tensor) -> Iterator[Piece]:
        yield full_shard("table", params)

    def save(self, state: BigramState, params: Tensor) -> SavePlan:
        return _to_save(state.table, "table.pt")

    def restore(self, folder: Folder, record: Mapping[str, Any]) -> BigramState:
        return BigramState(torch.load(BytesIO((folder / "table.pt").read_bytes()), weights_only=True))

    def save_params(self, params: Tensor) -> SavePlan:
        return _to_save(params, "params.pt")

    def restore_params(self, folder: Folder, record: Mapping[str, Any]) -> Tensor:
        found: Tensor = torch.load(BytesIO((folder / "params.pt").read_bytes()), weights_only=True)
        return found

    def export(self, params: Tensor, folder: Path) -> None:
        torch.save(params, folder / "table.pt")


def _to_save(table: Tensor, name: str) -> SavePlan:
    file = io.BytesIO()
    torch.save(table, file)
    return SavePlan({name: [file.getvalue()]}, {})


@attrs.define
class Recorder:
    """Satisfies `nrl.backends.Sampler`; ``weights`` are a copy of the last ones of ``calls`` publishes."""

    version: int = 0
    weights: dict[str, Tensor] = attrs.field(factory=dict)
    calls: int = 0
    tokenizer: Any = None
    context_length: int = 64
    sampling: Sampling = Sampling()

    def generate(
        self,
        prompts: Sequence[Chunks],
        *,
        seeds: Sequence[int] | None = None,
        sampling: Sampling | None = None,
    ) -> Future[list[Completion]]:
        token = torch.tensor([0])
        return done([Completion(token, torch.zeros(1), truncated=True, version=self.version) for _ in prompts])

    def receive(self, buckets: Iterable[Bucket | Future[Bucket]], version: int, *, inflight: Any = "wait") -> None:
        came = [as_future(bucket) for bucket in buckets]
        self.weights = {piece.name: piece.tensor.clone() for bucket in came for piece in bucket}
        self.version, self.calls = version, self.calls + 1
