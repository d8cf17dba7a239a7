"""The vocabulary of batches: the name, shape and dtype of each column."""

from typing import Literal, NamedTuple

import torch

__all__ = ["COLUMNS", "Column"]


class Column(NamedTuple):
    """A column of the vocabulary: per row or per token, its dtype, how to get it, and its default.

    >>> COLUMNS["advantages"].per, COLUMNS["advantages"].dtype
    ('token', torch.float32)
    """

    per: Literal["row", "token"]
    dtype: torch.dtype
    hint: str
    default: bool | int | float | None = None
    """The value of an absent column; None: its absence has no meaning."""


def _from_trainer(call: str, column: str) -> str:
    return f"Add it with assign(batch, {column}={call})."


_DATA = "Data and rollout write it."
COLUMNS: dict[str, Column] = {
    "input_ids": Column("token", torch.int64, _DATA),
    "attention_mask": Column("token", torch.bool, _DATA),
    "loss_mask": Column(
        "token",
        torch.bool,
        "Data and rollout write it; true for the tokens that are trained on.",
    ),
    "rollout_logprobs": Column("token", torch.float32, "rollout writes it."),
    "temperature": Column("row", torch.float32, "rollout writes it.", 1.0),
    "old_logprobs": Column(
        "token",
        torch.float32,
        "Add it with assign(batch, old_logprobs=batch['rollout_logprobs']) or, exactly, "
        "assign(batch, old_logprobs=trainer.logprobs(state.params, batch)).",
    ),
    "ref_logprobs": Column(
        "token",
        torch.float32,
        _from_trainer("trainer.logprobs(reference, batch)", "ref_logprobs"),
    ),
    "teacher_logprobs": Column(
        "token",
        torch.float32,
        _from_trainer("teacher.logprobs(params, batch)", "teacher_logprobs"),
    ),
    "entropy": Column(
        "token",
        torch.float32,
        "Add it with assign(batch, entropy=trainer.forward(state.params, batch, {'entropy'})['entropy']); in nats, "
        "of the policy that sampled.",
    ),
    "values": Column(
        "token",
        torch.float32,
        _from_trainer("critic.values(state.params, batch)", "values") + " V before each token.",
    ),
    "rewards": Column("row", torch.float32, "The environment writes it, in rollout."),
    "token_rewards": Column("token", torch.float32, "Add it with nrl.algos.token_rewards(batch, penalty)."),
    "advantages": Column("token", torch.float32, "Add it with nrl.algos.advantages(batch)."),
    "returns": Column("token", torch.float32, "Add it with nrl.algos.gae."),
    "group_ids": Column(
        "row",
        torch.int64,
        "rollout writes it; rows that answer one prompt share a number.",
    ),
    "episode_ids": Column(
        "row",
        torch.int64,
        "Add it with assign(batch, episode_ids=...) where several rows are one episode; absent, every row is one.",
    ),
    "version": Column("row", torch.int64, "rollout writes it."),
    "versions": Column("token", torch.int64, "rollout writes it, with a sampler that streams; -1 where not sampled."),
    "asked_again": Column("row", torch.int64, "rollout writes it, with a sampler that streams.", 0),
    "valid": Column("row", torch.bool, "rollout writes it.", True),
    "truncated": Column("row", torch.bool, "rollout writes it.", False),
    "source": Column("row", torch.int64, "Data writes it where task sources are mixed.", 0),
    "dropped": Column("row", torch.int64, "drop_uniform and fresh write it.", 0),
    "dropped_invalid": Column("row", torch.int64, "drop_uniform and fresh write it.", 0),
    "dropped_rewards": Column("row", torch.float32, "drop_uniform and fresh write it.", 0.0),
    "desirable": Column("row", torch.bool, "data.labelled writes it."),
    "reference_point": Column(
        "row",
        torch.float32,
        "Add it with assign(batch, reference_point=nrl.algos.reference_point(...).expand(len(batch))).",
    ),
    "margin": Column("row", torch.float32, "Preference data writes it; that of a pair is its chosen row's.", 0.0),
    "weights": Column("row", torch.float32, "Add it with assign(batch, weights=...); how much a row counts."),
}
"""The vocabulary of columns. ``float32`` columns may be ``float64``; the tests of the laws use it."""
