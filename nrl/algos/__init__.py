"""Algorithms as parts that compose.

Shaping, estimators, ratios, surrogates, divergences, corrections, aggregates, losses.
"""

from nrl.algos.aggregate import Aggregate, seq_mean, seq_sum, token_mean
from nrl.algos.baselines import gdpo, greedy_baseline, optimal_baseline
from nrl.algos.corrections import Correction, icepop, truncate
from nrl.algos.divergences import Divergence, Penalty, k1, k2, k3, kl
from nrl.algos.episodes import Episodes, check_finite, episodes, row_rewards, trained_tokens, valid_rows
from nrl.algos.estimators import (
    Estimator,
    advantages,
    from_rewards,
    from_token_rewards,
    reinforce_plus_plus,
    reverse_kl,
    weighted_sum,
    whitened,
)
from nrl.algos.groups import (
    GroupFunction,
    group_center,
    group_center_batch_std,
    group_normalize,
    leave_one_out,
    max_rl,
    per_group,
)
from nrl.algos.kl_rewards import penalized_rewards, sampled_logprobs, token_rewards
from nrl.algos.losses import dapo_loss, grpo_loss, policy_loss
from nrl.algos.masking import masked, masked_column
from nrl.algos.mismatch import check_mismatch, mismatch_metrics
from nrl.algos.preferences import Link, Score, dpo_loss, preference_loss, simpo_loss
from nrl.algos.protocol import Loss, MeanLoss, add, name_of, named, needed, needs
from nrl.algos.ratios import Ratio, bounded, on_policy_ratio, sequence_ratio, token_ratio
from nrl.algos.returns import discounted_returns, gae, whiten
from nrl.algos.shaping import (
    Shaping,
    clip_rewards,
    keep_at_least,
    keep_best,
    length_penalty,
    mask_greedy,
    mask_truncated,
    overlong_penalty,
    scale_rewards,
    stop_properly,
    top_entropy,
)
from nrl.algos.supervised import sft_loss
from nrl.algos.surrogates import Surrogate, cispo, clip, reinforce

__all__ = [
    "Aggregate",
    "Correction",
    "Divergence",
    "Episodes",
    "Estimator",
    "GroupFunction",
    "Link",
    "Loss",
    "MeanLoss",
    "Penalty",
    "Ratio",
    "Score",
    "Shaping",
    "Surrogate",
    "add",
    "advantages",
    "bounded",
    "check_finite",
    "check_mismatch",
    "cispo",
    "clip",
    "clip_rewards",
    "dapo_loss",
    "discounted_returns",
    "dpo_loss",
    "episodes",
    "from_rewards",
    "from_token_rewards",
    "gae",
    "gdpo",
    "greedy_baseline",
    "group_center",
    "group_center_batch_std",
    "group_normalize",
    "grpo_loss",
    "icepop",
    "k1",
    "k2",
    "k3",
    "keep_at_least",
    "keep_best",
    "kl",
    "leave_one_out",
    "length_penalty",
    "mask_greedy",
    "mask_truncated",
    "masked",
    "masked_column",
    "max_rl",
    "mismatch_metrics",
    "name_of",
    "named",
    "needed",
    "needs",
    "on_policy_ratio",
    "optimal_baseline",
    "overlong_penalty",
    "penalized_rewards",
    "per_group",
    "policy_loss",
    "preference_loss",
    "reinforce",
    "reinforce_plus_plus",
    "reverse_kl",
    "row_rewards",
    "sampled_logprobs",
    "scale_rewards",
    "seq_mean",
    "seq_sum",
    "sequence_ratio",
    "sft_loss",
    "simpo_loss",
    "stop_properly",
    "token_mean",
    "token_ratio",
    "token_rewards",
    "top_entropy",
    "trained_tokens",
    "truncate",
    "valid_rows",
    "weighted_sum",
    "whiten",
    "whitened",
]
