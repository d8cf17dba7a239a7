"""Algorithms as parts that compose: estimators, ratios, surrogates, divergences, corrections, aggregates, losses."""

from nrl.algos.aggregate import Aggregate, seq_mean, seq_sum, token_mean
from nrl.algos.corrections import Correction, icepop, truncate
from nrl.algos.divergences import Divergence, Penalty, k1, k2, k3, kl
from nrl.algos.estimators import (
    Estimator,
    GroupFunction,
    advantages,
    discounted_returns,
    from_rewards,
    gae,
    group_center,
    group_normalize,
    leave_one_out,
    per_group,
    whiten,
)
from nrl.algos.losses import dapo_loss, grpo_loss, policy_loss
from nrl.algos.masking import masked, masked_column
from nrl.algos.mismatch import check_mismatch, mismatch_metrics
from nrl.algos.preferences import Link, Score, dpo_loss, preference_loss, simpo_loss
from nrl.algos.protocol import Loss, MeanLoss, add, name_of, named, needed, needs
from nrl.algos.ratios import Ratio, bounded, on_policy_ratio, sequence_ratio, token_ratio
from nrl.algos.supervised import sft_loss
from nrl.algos.surrogates import Surrogate, cispo, clip, reinforce

__all__ = [
    "Aggregate",
    "Correction",
    "Divergence",
    "Estimator",
    "GroupFunction",
    "Link",
    "Loss",
    "MeanLoss",
    "Penalty",
    "Ratio",
    "Score",
    "Surrogate",
    "add",
    "advantages",
    "bounded",
    "check_mismatch",
    "cispo",
    "clip",
    "dapo_loss",
    "discounted_returns",
    "dpo_loss",
    "from_rewards",
    "gae",
    "group_center",
    "group_normalize",
    "grpo_loss",
    "icepop",
    "k1",
    "k2",
    "k3",
    "kl",
    "leave_one_out",
    "masked",
    "masked_column",
    "mismatch_metrics",
    "name_of",
    "named",
    "needed",
    "needs",
    "on_policy_ratio",
    "per_group",
    "policy_loss",
    "preference_loss",
    "reinforce",
    "seq_mean",
    "seq_sum",
    "sequence_ratio",
    "sft_loss",
    "simpo_loss",
    "token_mean",
    "token_ratio",
    "truncate",
    "whiten",
]
