"""What ``torch.compile`` makes of a loss computes what the loss does, one composition for each kind of part."""

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from nrl import algos
from nrl.algos import Loss, policy_loss
from nrl.batch import Batch

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script_method.*:DeprecationWarning"
)  # torch's own use of it

LOSSES: dict[str, Loss] = {
    "clip": policy_loss(algos.clip(0.2), penalty=algos.kl(algos.k3, 0.1), correction=algos.truncate(2.0)),
    "dual clip": policy_loss(algos.clip(0.2, 0.28, dual=3.0), correction=algos.icepop(0.5, 2.0)),
    "sequence": policy_loss(algos.clip(0.2), ratio=algos.sequence_ratio, correction=algos.sequence_truncate(2.0)),
    "geometric": algos.gmpo_loss,
    "cispo": policy_loss(algos.cispo(0.5), penalty=algos.importance_weighted(algos.kl(algos.k1, 0.1))),
    "reinforce": algos.reinforce_loss,
    "sapo": policy_loss(algos.sapo(), keep=algos.opsm(0.1), aggregate=algos.seq_mean),
    "dppo": algos.dppo_loss,
    "dppo, kl": policy_loss(algos.dppo(0.05, divergence=algos.binary_kl), ratio=algos.rollout_ratio),
    "vespo": algos.vespo_loss,
    "sum": algos.add((1.0, algos.grpo_loss), (-0.01, algos.entropy_loss), (0.1, algos.sft_loss)),
}


def numbers(loss: Loss, columns: dict[str, Tensor], **outputs: Tensor) -> tuple[Tensor, ...]:
    rows = columns["loss_mask"].shape[:-1]
    terms, metrics = loss(TensorDict(dict(outputs), batch_size=rows), Batch(columns, batch_size=rows))
    found = [*terms.values()] if isinstance(terms, dict) else [terms]
    return tuple(part for each in [*found, *metrics.values()] for part in each)


def check(loss: Loss, columns: dict[str, Tensor], compiled: Any, **outputs: Tensor) -> None:
    """Totals, weights, metrics and the gradient of the totals."""
    found = []
    for function in (numbers, compiled):
        leaves = {name: x.clone().requires_grad_() for name, x in outputs.items()}
        values = function(loss, columns, **leaves)
        total = sum(x for x in values if x.requires_grad)
        assert isinstance(total, Tensor)
        gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        found.append([*(x.detach() for x in values), *(x for x in gradients if x is not None)])
    assert len(found[0]) == len(found[1]) > 2
    for eager, other in zip(*found, strict=True):
        torch.testing.assert_close(other, eager, rtol=1e-12, atol=1e-12)


def columns_of(pairs: bool = False) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    mask = torch.rand(8, 6, generator=draw) < 0.7
    old = -torch.rand(8, 6, generator=draw, dtype=torch.float64) - 0.1
    columns = {"loss_mask": mask, "old_logprobs": old}
    for name in ("rollout_logprobs", "ref_logprobs"):
        columns[name] = old + 0.3 * torch.randn(8, 6, generator=draw, dtype=torch.float64)
    columns["advantages"] = torch.randn(8, 1, generator=draw, dtype=torch.float64).expand(8, 6)
    return {name: column.unflatten(0, (4, 2)) for name, column in columns.items()} if pairs else columns


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LOSSES)
def test_a_policy_loss(name: str, backend: str) -> None:
    torch._dynamo.reset()
    columns = columns_of()
    outputs = {"logprobs": (columns["old_logprobs"] + 0.2).clamp(max=-0.01), "entropy": -columns["old_logprobs"]}
    check(LOSSES[name], columns, torch.compile(numbers, backend=backend, fullgraph=True), **outputs)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_preference_loss(backend: str) -> None:
    torch._dynamo.reset()
    columns = columns_of(pairs=True)
    compiled = torch.compile(numbers, backend=backend, fullgraph=True)
    check(algos.dpo_loss(0.3), columns, compiled, logprobs=columns["old_logprobs"] + math.pi)


@pytest.mark.slow
def test_with_the_default_backend() -> None:
    """Which generates code, and takes as long as all that is traced above."""
    torch._dynamo.reset()
    columns = columns_of()
    options: Any = {"cpp.vec_isa_ok": True}  # no compiling of a trial first, which takes as long as a loss
    compiled = torch.compile(numbers, fullgraph=True, options=options)
    check(LOSSES["clip"], columns, compiled, logprobs=columns["old_logprobs"] + 0.2)
