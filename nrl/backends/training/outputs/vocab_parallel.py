"""A vocabulary that several processes share: each has the logits of some of its words."""

from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["VocabularyShard"]


@attrs.frozen
class VocabularyShard:
    """The words that this process has. All its methods are collectives, but `add_at`.

    Args:
        start: the first of its words; the others follow it.
        max_words: the most words of a process, by which all processes cut their work.
        group: the processes that share the vocabulary, of ``torch.distributed``.
        words: how many words all of them have together.
    """

    start: int
    max_words: int
    group: Any
    words: int

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Gather the logits of all words, ``[n, V]``, in every process."""
        missing = (0, self.max_words - logits.shape[1])
        return self._all_gather(torch.nn.functional.pad(logits, missing))[:, : self.words]

    def log_softmax(self, logits: Tensor, out: Tensor) -> Tensor:
        """Compute ``[n, v]``, log-probabilities of the words here under the softmax over all; logits are overwritten.

        out_v = z_v - max - log sum_w exp(z_w - max)
        """
        highest = logits.amax(1, keepdim=True)
        dist.all_reduce(highest, dist.ReduceOp.MAX, self.group)
        torch.sub(logits, highest, out=out)
        return out.sub_(self.all_reduce(torch.exp(out, out=logits).sum(1, keepdim=True)).log())

    def gather(self, logprobs: Tensor, targets: Tensor) -> Tensor:
        """Return ``[n, k]``, the log-probabilities of ``targets``, any words of the vocabulary, in every process."""
        index, mine = self._locate(logprobs, targets)
        return self.all_reduce(logprobs.gather(1, index).masked_fill_(~mine, 0.0))

    def add_at(self, grad: Tensor, targets: Tensor, values: Tensor) -> None:
        """Add ``[n, k]`` values to ``grad`` ``[n, v]`` at those targets that are words here."""
        index, mine = self._locate(grad, targets)
        grad.scatter_add_(1, index, values.masked_fill(~mine, 0.0))

    def top_k(self, logprobs: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return ``(words, logprobs)``, ``[n, k]`` each: the most probable of all words, in every process."""
        local = logprobs.topk(min(k, logprobs.shape[1]))
        missing = (0, k - local.values.shape[1])
        values = torch.nn.functional.pad(local.values, missing, value=-torch.inf)
        words = torch.nn.functional.pad(local.indices + self.start, missing)
        values, words = self._all_gather(values), self._all_gather(words)
        best = values.topk(k)
        return words.gather(1, best.indices), best.values

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over processes, in place."""
        dist.all_reduce(x, group=self.group)
        return x

    def _locate(self, logprobs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        index = targets - self.start
        mine = (index >= 0) & (index < logprobs.shape[1])
        return index.where(mine, 0), mine

    def _all_gather(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, 1)
