"""Batches, losses and layouts for the laws, all in float64, where only a mistake can make a difference."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

import nrl
from nrl import algos
from nrl.algos import Loss, policy_loss, preference_loss
from nrl.batch import Batch

__all__ = [
    "AGGREGATES",
    "LOSSES",
    "METHODS",
    "PAIR_LOSSES",
    "PAIR_METHODS",
    "REWARD_LOSSES",
    "ROW_COLUMNS",
    "TINY",
    "Layout",
    "batches",
    "forked",
    "hidden_rows",
    "layouts",
    "make_batch",
    "outputs",
    "policy_losses",
    "taken",
]

TINY: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 23,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "initializer_range": 0.3,
}
"""A model small enough to run hundreds of times, with weights large enough that its outputs are not all alike."""


ROW_COLUMNS = ("reference_point", "margin", "weights")
"""Numbers of rows that losses read, which in a row without a trained token may be anything."""

AGGREGATES = {"token_mean": algos.token_mean, "seq_mean": algos.seq_mean, "seq_sum": algos.seq_sum(16)}
SURROGATES = (
    algos.clip(0.2),
    algos.clip(0.2, 0.28),
    algos.clip(0.2, dual=1.5),
    algos.clip(float("inf")),
    algos.cispo(0.5),
    algos.cispo(0.3, low=0.3),
    algos.reinforce,
    algos.sapo(),
    algos.dppo(0.1),
    algos.dppo(0.05, 0.1, divergence=algos.binary_kl, cap=1.5),
    algos.vespo(),
)
RATIOS = (
    algos.token_ratio,
    algos.on_policy_ratio,
    algos.sequence_ratio,
    algos.rollout_ratio,
    algos.product_ratio(algos.token_ratio),
    algos.geometric_ratio(0.3),
)
PENALTIES = (
    None,
    algos.kl(algos.k1, 0.3),
    algos.kl(algos.k2, 0.3),
    algos.kl(algos.k3, 0.3),
    algos.importance_weighted(algos.kl(algos.k3, 0.3)),
)
CORRECTIONS = (
    None,
    algos.truncate(1.2),
    algos.icepop(0.6, 1.5),
    algos.importance_mask(1.2),
    algos.sequence_truncate(1.2),
    algos.times(algos.sequence_mask(0.8, 1.2), algos.truncate(1.2)),
)

policy_losses: st.SearchStrategy[Loss] = st.builds(
    policy_loss,
    st.sampled_from(SURROGATES),
    ratio=st.sampled_from(RATIOS),
    penalty=st.sampled_from(PENALTIES),
    correction=st.sampled_from(CORRECTIONS),
    keep=st.sampled_from((None, algos.opsm(0.1))),
    aggregate=st.sampled_from(list(AGGREGATES.values())),
)
"""Every composition of the parts."""

LOSSES: dict[str, Loss] = {
    "sft": algos.sft_loss,
    "grpo": algos.grpo_loss,
    "grpo with a penalty": policy_loss(algos.clip(0.2), penalty=algos.kl(algos.k3, 0.04), aggregate=algos.seq_mean),
    "dapo": algos.dapo_loss,
    "dr grpo": policy_loss(algos.clip(0.2), aggregate=algos.seq_sum(16)),
    "dual clip": policy_loss(algos.clip(0.2, dual=1.5)),
    "gspo": policy_loss(algos.clip(0.1), ratio=algos.sequence_ratio, aggregate=algos.seq_mean),
    "cispo": policy_loss(algos.cispo(0.5), correction=algos.truncate(1.2)),
    "reinforce": policy_loss(algos.reinforce, ratio=algos.on_policy_ratio, correction=algos.icepop(0.6, 1.5)),
    "on policy": policy_loss(algos.clip(0.2), ratio=algos.on_policy_ratio, penalty=algos.kl(algos.k2, 0.1)),
    "k1": policy_loss(algos.clip(0.2), penalty=algos.kl(algos.k1, 0.1), aggregate=algos.seq_mean),
    "entropy": algos.entropy_loss,
    "sum": algos.add((1.0, algos.grpo_loss), (-0.01, algos.entropy_loss), (0.5, algos.sft_loss)),
    "weighted sft": algos.weighted_sft_loss,
    "nested sum": algos.add((2.0, algos.add((1.0, algos.sft_loss), (1.0, algos.dapo_loss))), (1.0, algos.sft_loss)),
}
"""Losses over rows."""

METHODS: dict[str, Loss] = {
    "kto": algos.kto_loss(0.3, 1.5, 0.5),
    "dr grpo, ready": algos.dr_grpo_loss(16),
    "gspo, ready": algos.gspo_loss,
    "cispo, ready": algos.cispo_loss,
    "reinforce, ready": algos.reinforce_loss,
    "gmpo": algos.gmpo_loss,
    "sapo": algos.sapo_loss,
    "dppo": algos.dppo_loss,
    "vespo": algos.vespo_loss,
    "decoupled ppo": algos.decoupled_ppo_loss,
}
"""More of them, which are not trained with: a trainer takes its time."""

PAIR_LOSSES: dict[str, Loss] = {
    "dpo": algos.dpo_loss(0.3),
    "simpo": algos.simpo_loss(2.0, 0.5),
    "cpo": algos.cpo_loss(0.3, 0.5),
    "dpo with sft": algos.add((1.0, algos.dpo_loss(0.3)), (0.2, algos.sft_loss)),
}
"""Losses over pairs."""

PAIR_METHODS: dict[str, Loss] = {
    "length-normalized dpo": algos.length_normalized_dpo_loss(2.0),
    "cdpo": algos.cdpo_loss(0.3, 0.1),
    "robust dpo": algos.robust_dpo_loss(0.3, 0.1),
    "ipo": algos.ipo_loss(0.3),
    "length-normalized ipo": algos.length_normalized_ipo_loss(0.3),
    "hinge": algos.hinge_loss(0.3),
    "hinge without a reference": preference_loss(algos.mean_log_likelihood(1.0), algos.hinge(0.5)),
    "orpo": algos.orpo_loss(0.5),
    "rpo": algos.rpo_loss(0.3, 0.5),
}
"""More of them."""

REWARD_LOSSES: dict[str, Loss] = {
    "reward model": algos.reward_model_loss,
    "centered reward model": algos.bradley_terry_loss(0.1),
}
"""Losses over pairs that read an output with a number a row."""


def make_batch(
    lengths: Sequence[int], hidden: Sequence[bool], invalid: Sequence[bool], seed: int, pairs: bool
) -> Batch:
    """A batch with every column that a loss here reads.

    Args:
        lengths: of the rows, in tokens; for pairs an even number of them.
        hidden: rows whose ``loss_mask`` is empty.
        invalid: rows that an environment failed on; ``assign`` clears their ``loss_mask``.
        seed: of all the numbers.
        pairs: rows 2 i and 2 i + 1 are a pair.
    """
    g = torch.Generator().manual_seed(seed)
    n, width = len(lengths), max([1, *lengths])
    mask = torch.arange(width) < torch.tensor(lengths).view(-1, 1)
    # a prompt and a completion, with a hole now and then, as a tool's answer leaves one
    start = torch.randint(1, 4, (n, 1), generator=g)
    trained = mask & (torch.arange(width) >= start) & (torch.rand(n, width, generator=g) > 0.15)
    trained &= ~torch.tensor(hidden, dtype=torch.bool).view(-1, 1)

    def numbers(scale: float) -> Tensor:
        return torch.randn(n, width, generator=g, dtype=torch.float64) * scale

    old = -numbers(2.0).abs()
    columns = {
        "input_ids": torch.randint(0, TINY["vocab_size"], (n, width), generator=g) * mask,
        "attention_mask": mask,
        "loss_mask": trained,
        "old_logprobs": old,
        "rollout_logprobs": old + numbers(0.3),
        "ref_logprobs": old + numbers(0.5),
        "advantages": numbers(1.0) * (torch.rand(n, width, generator=g) > 0.1),
        "temperature": torch.tensor([0.0, 0.5, 1.0, 1.3], dtype=torch.float64)[torch.randint(0, 4, (n,), generator=g)],
        "version": torch.randint(0, 3, (n,), generator=g),
        "valid": ~torch.tensor(invalid, dtype=torch.bool),
        "desirable": torch.rand(n, generator=g) < 0.5,
        "reference_point": torch.rand(n, generator=g, dtype=torch.float64) * 2,
        "margin": torch.rand(n, generator=g, dtype=torch.float64),
        "weights": torch.randint(0, 9, (n,), generator=g).double() / 4,  # whose sums are exact in any order
    }
    if pairs:
        columns = {name: column.unflatten(0, (n // 2, 2)) for name, column in columns.items()}
    return nrl.assign(Batch({}, batch_size=[n // 2, 2] if pairs else [n]), **columns)


@st.composite
def batches(draw: st.DrawFn, *, pairs: bool = False, rows: int | None = None, width: int = 9) -> Batch:
    """Batches of a few rows, among them empty, untrained and invalid ones."""
    n = draw(st.integers(1, 6)) if rows is None else rows
    n = 2 * n if pairs else n
    lengths = draw(st.lists(st.integers(0, width), min_size=n, max_size=n))
    rare = st.integers(0, 5).map(lambda number: number == 5)
    hidden = draw(st.lists(rare, min_size=n, max_size=n))
    invalid = draw(st.lists(rare, min_size=n, max_size=n))
    return make_batch(lengths, hidden, invalid, draw(st.integers(0, 2**16)), pairs)


def outputs(batch: Batch, seed: int = 0) -> dict[str, Tensor]:
    """What a model might have put out: log-probabilities near the old ones, entropies, and rewards of rows."""
    g = torch.Generator().manual_seed(seed)
    noise = torch.randn(batch["old_logprobs"].shape, generator=g, dtype=torch.float64)
    return {
        "logprobs": (batch["old_logprobs"] + 0.3 * noise).clamp(max=0.0),
        "entropy": torch.rand(noise.shape, generator=g, dtype=torch.float64),
        "rewards": torch.randn(noise.shape[:-1], generator=g, dtype=torch.float64),
    }


class Layout(NamedTuple):
    """A way to lay out a batch: the rows of each part, extra columns of padding, extra rows without a trained token."""

    parts: list[list[int]]
    padding: int = 0
    masked: int = 0


@st.composite
def layouts(draw: st.DrawFn, rows: int) -> Layout:
    """Any order, any split, with a little padding and a few masked rows in each part."""
    order = draw(st.permutations(range(rows)))
    cuts = sorted(draw(st.lists(st.integers(0, rows), max_size=4)))
    parts = [list(order[a:b]) for a, b in zip([0, *cuts], [*cuts, rows], strict=True)]
    return Layout(parts, draw(st.integers(0, 3)), draw(st.integers(0, 2)))


def taken(batch: Batch, rows: Sequence[int]) -> Batch:
    """Some rows of a batch, in this order."""
    part: Batch = batch[torch.tensor(rows, dtype=torch.int64)].lock_()
    return part


def forked(batch: Batch, seed: int = 0) -> Batch:
    """Each episode in up to three rows, in any order: the same tokens, of which each row trains every third."""
    copies = [row for row in range(len(batch)) for _ in range(1 + row % 3)]
    place = torch.tensor([at for row in range(len(batch)) for at in range(1 + row % 3)])
    count = torch.tensor([1 + row % 3 for row in copies])
    whole = nrl.assign(taken(batch, copies), episode_ids=torch.tensor(copies))
    turn = whole["loss_mask"].cumsum(-1) % count.unsqueeze(-1)
    parts = nrl.assign(whole, loss_mask=whole["loss_mask"] & (turn == place.unsqueeze(-1)))
    return taken(parts, torch.randperm(len(parts), generator=torch.Generator().manual_seed(seed)).tolist())


def hidden_rows(batch: Batch, n: int) -> Batch:
    """``n`` rows like those of ``batch``, without a token that is trained on, and with nonsense in their columns."""
    part = taken(batch, [i % len(batch) for i in range(n)])
    return nrl.assign(
        part,
        loss_mask=torch.zeros_like(part["loss_mask"]),
        advantages=torch.full_like(part["advantages"], 1e6),
        old_logprobs=torch.full_like(part["old_logprobs"], 3e4),
        **{name: torch.full_like(part[name], float("nan")) for name in ("ref_logprobs", *ROW_COLUMNS)},
    )
