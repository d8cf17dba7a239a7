"""Policy-gradient losses: `policy_loss` composes the parts in the other modules; the rest are compositions."""

import math
from collections.abc import Callable

from tensordict import TensorDict
from torch import Tensor

from nrl.algos._reductions import aggregate_tokens, token_max
from nrl.algos.aggregate import Aggregate, seq_mean, seq_sum, token_mean
from nrl.algos.corrections import Correction, truncate
from nrl.algos.divergences import Penalty, k3
from nrl.algos.loss_contract import MeanLoss, name_of, named, needed, needs
from nrl.algos.masking import masked, masked_column
from nrl.algos.ratios import (
    Ratio,
    bounded,
    geometric_ratio,
    on_policy_ratio,
    product_ratio,
    rollout_ratio,
    sequence_ratio,
    token_ratio,
)
from nrl.algos.surrogates import Surrogate, cispo, clip, dppo, reinforce, sapo, vespo
from nrl.algos.token_filters import Selection
from nrl.arguments import checked, described
from nrl.batch import Batch
from nrl.batch.metrics import Mean, Metrics
from nrl.errors import ArgumentError

__all__ = [
    "cispo_loss",
    "dapo_loss",
    "decoupled_ppo_loss",
    "dppo_loss",
    "dr_grpo_loss",
    "gmpo_loss",
    "grpo_loss",
    "gspo_loss",
    "policy_loss",
    "reinforce_loss",
    "sapo_loss",
    "vespo_loss",
]


_EXAMPLES = {
    "surrogate": "clip(0.2)",
    "ratio": "token_ratio",
    "penalty": "kl(k2, 0.1)",
    "correction": "truncate(2.0)",
    "keep": "opsm(0.1)",
    "aggregate": "token_mean",
}
"""What the parts of `policy_loss` may be, for errors."""
_MADE = (Surrogate, Ratio, Penalty, Correction, Selection, Callable[..., Mean])
"""What functions that make a part, such as `clip`, are annotated to return."""


def policy_loss(
    surrogate: Surrogate,
    *,
    ratio: Ratio = token_ratio,
    penalty: Penalty | None = None,
    correction: Correction | None = None,
    keep: Selection | None = None,
    aggregate: Aggregate = token_mean,
) -> MeanLoss:
    """A policy-gradient loss, composed from its parts.

        aggregate_t( w_t m_t surrogate(ratio, log π_θ, A)_t + penalty_t )

    w is the correction's weight and m that of ``keep``, 1 without one. Neither weighs the penalty.

    Args:
        surrogate: `clip`, `cispo`, `reinforce`, or any ``(log_ratio, logprobs, advantages) -> per-token loss``.
        ratio: `token_ratio`, `on_policy_ratio`, `sequence_ratio`, or any ``(logprobs, batch) -> log-ratio``.
        penalty: `kl`, or any ``(logprobs, batch) -> per-token``.
        correction: `truncate`, `icepop`, or any ``(log_ratio, mask) -> weight``; detached. It gets old/rollout, or
            theta/rollout where the batch has no ``old_logprobs``.
        keep: `opsm`, or any ``(logprobs, batch) -> weight``; detached.
        aggregate: `token_mean`, `seq_mean`, ``seq_sum(L)``, or any ``(x, mask) -> Mean``.

    Returns:
        A loss over ``loss_mask``, which reads ``advantages`` and the columns of its parts, and needs their outputs.
        Metrics, over tokens: ``ratio`` and ``ratio_max``; ``clip_fraction`` where the surrogate clips; ``approx_kl``
        (k3 of old against theta) where the batch has ``old_logprobs``; ``penalty``, its coefficient included;
        ``correction`` and ``kept``, the weights.

    Raises:
        TypeError: a part is no function.
        MissingColumn: (when called) the batch lacks a column.

    >>> import torch
    >>> mask = torch.tensor([[False, True, True]])
    >>> columns = {"loss_mask": mask, "advantages": 2.0 * mask, "old_logprobs": -1.0 * mask}
    >>> batch = Batch(columns, batch_size=[1])
    >>> out = TensorDict({"logprobs": -1.0 * mask}, batch_size=[1])
    >>> loss, metrics = policy_loss(clip(0.2))(out, batch)
    >>> loss.total.item(), loss.weight.item(), metrics["ratio"].total.item()
    (-4.0, 2.0, 2.0)
    """
    parts = {"surrogate": surrogate, "ratio": ratio, "penalty": penalty, "correction": correction, "keep": keep}
    for part, value in (parts | {"aggregate": aggregate}).items():
        if getattr(value, "__annotations__", {}).get("return") in _MADE:
            raise ArgumentError(
                f"policy_loss: {part} is {described(value)}, which makes one; call it, such as {_EXAMPLES[part]}", part
            )
        if value is not None and not callable(value):
            raise ArgumentError(
                f"policy_loss: {part} is {described(value)}; it is a function, such as {_EXAMPLES[part]}", part
            )

    @needs(*needed(surrogate, ratio, penalty, correction, keep, aggregate))
    def policy_loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        advantages = masked_column(batch, "advantages", reader=name_of(policy_loss))
        mask = batch["loss_mask"]
        logprobs = masked(out["logprobs"], mask)
        log_ratio = ratio(logprobs, batch)
        loss = surrogate(log_ratio, logprobs, advantages)
        metrics = _ratio_metrics(surrogate, log_ratio.detach(), logprobs.detach(), advantages, batch)
        if correction is not None:
            weight = correction(_mismatch(logprobs.detach(), batch, name_of(policy_loss)), mask).detach()
            loss = loss * weight
            metrics["correction"] = token_mean(weight, mask)
        if keep is not None:
            keep_mask = keep(logprobs.detach(), batch).detach()
            loss = loss * keep_mask
            metrics["kept"] = token_mean(keep_mask.to(loss.dtype), mask)
        if penalty is not None:
            cost = penalty(logprobs, batch)
            loss = loss + cost
            metrics["penalty"] = token_mean(cost.detach(), mask)
        return aggregate_tokens(aggregate, loss, batch), metrics

    return policy_loss


def _mismatch(logprobs: Tensor, batch: Batch, reader: str) -> Tensor:
    """The log-ratio of the trainer's policy to the sampler's."""
    trained = masked_column(batch, "old_logprobs", reader) if "old_logprobs" in batch.keys() else logprobs
    return trained - masked_column(batch, "rollout_logprobs", reader)


def _ratio_metrics(
    surrogate: Surrogate, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, batch: Batch
) -> Metrics:
    mask, ratio = batch["loss_mask"], bounded(log_ratio).exp()
    metrics: Metrics = {"ratio": token_mean(ratio, mask), "ratio_max": token_max(ratio, mask)}
    if hasattr(surrogate, "clipped"):
        metrics["clip_fraction"] = token_mean(surrogate.clipped(log_ratio, logprobs, advantages).to(ratio.dtype), mask)
    if "old_logprobs" in batch.keys():
        old = masked_column(batch, "old_logprobs", reader="policy_loss")
        metrics["approx_kl"] = token_mean(k3(old, logprobs), mask)
    return metrics


grpo_loss = named(
    "grpo_loss",
    """GRPO without a penalty: ``policy_loss(clip(0.2), aggregate=seq_mean)``.

        -1/B Σ_i 1/|y_i| Σ_t min(r_{i,t} A_{i,t}, clamp(r_{i,t}, 0.8, 1.2) A_{i,t}),   r_{i,t} = π_θ/π_old

    Reads ``advantages``, ``old_logprobs`` and ``loss_mask``. The paper adds ``penalty=kl(k3, 0.04)``.

    Source: https://arxiv.org/abs/2402.03300, eq. 3.

    >>> import torch
    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> columns = {"loss_mask": mask, "advantages": 1.0 * mask, "old_logprobs": -1.0 * mask}
    >>> out = TensorDict({"logprobs": -1.0 * mask}, batch_size=[2])
    >>> loss, _ = grpo_loss(out, Batch(columns, batch_size=[2]))
    >>> loss.total.item(), loss.weight.item()
    (-2.0, 2.0)
    """,
    policy_loss(clip(0.2), aggregate=seq_mean),
)

dapo_loss = named(
    "dapo_loss",
    """DAPO's loss, clip-higher and a mean over tokens: ``policy_loss(clip(0.2, 0.28))``.

        -1/Σ_i|y_i| Σ_i Σ_t min(r_{i,t} A_{i,t}, clamp(r_{i,t}, 0.8, 1.28) A_{i,t}),   r_{i,t} = π_θ/π_old

    Reads ``advantages``, ``old_logprobs`` and ``loss_mask``. The method's dynamic sampling is `nrl.drop_uniform`.

    Source: https://arxiv.org/abs/2503.14476, eq. 8.

    >>> import torch
    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> columns = {"loss_mask": mask, "advantages": 1.0 * mask, "old_logprobs": -1.0 * mask}
    >>> out = TensorDict({"logprobs": -1.0 * mask}, batch_size=[2])
    >>> loss, _ = dapo_loss(out, Batch(columns, batch_size=[2]))
    >>> loss.total.item(), loss.weight.item()
    (-3.0, 3.0)
    """,
    policy_loss(clip(0.2, 0.28)),
)


@checked("dr_grpo_loss", finite=False)
def dr_grpo_loss(norm: float) -> MeanLoss:
    """Dr. GRPO's loss, without a mean's length bias: ``policy_loss(clip(0.2), aggregate=seq_sum(norm))``.

        -1/B Σ_i 1/norm Σ_t min(r_{i,t} A_{i,t}, clamp(r_{i,t}, 0.8, 1.2) A_{i,t}),   r_{i,t} = π_θ/π_old

    Reads ``advantages``, ``old_logprobs`` and ``loss_mask``. The method's advantages are not divided by a deviation:
    ``advantages(batch, from_rewards(group_center))``.

    Args:
        norm: in tokens, greater than 0; usually the longest completion that is allowed.

    Raises:
        ValueError: ``norm`` is not positive and finite.

    Source: Dr. GRPO, https://arxiv.org/abs/2503.20783, section 3.2.

    >>> import torch
    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> columns = {"loss_mask": mask, "advantages": 1.0 * mask, "old_logprobs": -1.0 * mask}
    >>> out = TensorDict({"logprobs": -1.0 * mask}, batch_size=[2])
    >>> loss, _ = dr_grpo_loss(norm=4)(out, Batch(columns, batch_size=[2]))
    >>> loss.total.item(), loss.weight.item()
    (-0.75, 2.0)
    """
    return named(
        "dr_grpo_loss", "Dr. GRPO; see `nrl.algos.dr_grpo_loss`.", policy_loss(clip(0.2), aggregate=seq_sum(norm))
    )


gspo_loss = named(
    "gspo_loss",
    """GSPO's loss: ``policy_loss(clip(3e-4, 4e-4), ratio=sequence_ratio, aggregate=seq_mean)``.

        -1/B Σ_i min(s_i A_i, clamp(s_i, 1 - 3e-4, 1 + 4e-4) A_i),   s_i = (Π_t π_θ/π_old)^(1/|y_i|)

    Reads ``advantages``, ``old_logprobs`` and ``loss_mask``. The bounds are for a ratio that is a mean over a row, and
    so is far closer to 1 than a token's. For rows of one token this is GRPO's loss with these bounds.

    Source: GSPO, https://arxiv.org/abs/2507.18071, eq. 5 and 7; the bounds: section 5.1.

    >>> import torch
    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> columns = {"loss_mask": mask, "advantages": 1.0 * mask, "old_logprobs": -1.0 * mask}
    >>> out = TensorDict({"logprobs": -1.0 * mask}, batch_size=[2])
    >>> loss, _ = gspo_loss(out, Batch(columns, batch_size=[2]))
    >>> loss.total.item(), loss.weight.item()
    (-2.0, 2.0)
    """,
    policy_loss(clip(3e-4, 4e-4), ratio=sequence_ratio, aggregate=seq_mean),
)

cispo_loss = named(
    "cispo_loss",
    """CISPO's loss: ``policy_loss(cispo(high=4.0))``, so ratios of at most 5.

        -1/Σ_i|y_i| Σ_i Σ_t stop_gradient(min(r_{i,t}, 5)) A_{i,t} log π_θ,   r_{i,t} = π_θ/π_old

    Reads ``advantages``, ``old_logprobs`` and ``loss_mask``. The paper has no lower bound in its experiments and does
    not say what its upper one is; 5 is that of ScaleRL, https://arxiv.org/abs/2510.13786.

    Source: MiniMax-M1, https://arxiv.org/abs/2506.13585, eq. 4 and 5.

    >>> import torch
    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> columns = {"loss_mask": mask, "advantages": 1.0 * mask, "old_logprobs": -1.0 * mask}
    >>> out = TensorDict({"logprobs": -1.0 * mask}, batch_size=[2])
    >>> loss, _ = cispo_loss(out, Batch(columns, batch_size=[2]))
    >>> loss.total.item(), loss.weight.item()
    (3.0, 3.0)
    """,
    policy_loss(cispo(high=4.0)),
)

reinforce_loss = named(
    "reinforce_loss",
    """REINFORCE on whole rows: ``policy_loss(reinforce, aggregate=seq_sum(1))``, the loss of RLOO, ReMax and OPO.

        -1/B Σ_i Σ_t A_{i,t} log π_θ(y_{i,t} | y_{i,<t})

    Reads ``advantages``, ``loss_mask``, and for a metric ``old_logprobs`` if present. The gradient is that of
    the log-probability of a row, a sum over its tokens. A mean over tokens would be another method. The methods differ
    in their advantages: `leave_one_out`, `greedy_baseline` and `optimal_baseline`.

    Source: RLOO, https://arxiv.org/abs/2402.14740, section 3.3; ReMax, https://arxiv.org/abs/2310.10505; OPO,
    https://arxiv.org/abs/2505.23585.

    >>> import torch
    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> columns = {"loss_mask": mask, "advantages": 1.0 * mask, "old_logprobs": -1.0 * mask}
    >>> out = TensorDict({"logprobs": -1.0 * mask}, batch_size=[2])
    >>> loss, _ = reinforce_loss(out, Batch(columns, batch_size=[2]))
    >>> loss.total.item(), loss.weight.item()
    (3.0, 2.0)
    """,
    policy_loss(reinforce, ratio=on_policy_ratio, aggregate=seq_sum(1)),
)

gmpo_loss = named(
    "gmpo_loss",
    """GMPO's loss: ``policy_loss(clip(math.inf), ratio=geometric_ratio(0.4), aggregate=seq_mean)``.

        -1/B Σ_i (Π_t min(r_{i,t} A_i, clamp(r_{i,t}, e^-0.4, e^0.4) A_i) / A_i)^(1/|y_i|) A_i,   r_{i,t} = π_θ/π_old

    Reads ``advantages``, ``old_logprobs`` and ``loss_mask``. Tokens are clipped in the ratio, 0.4 nats to either side.

    Source: GMPO, https://arxiv.org/abs/2507.20673, eq. 4.

    >>> import torch
    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> columns = {"loss_mask": mask, "advantages": 1.0 * mask, "old_logprobs": -1.0 * mask}
    >>> out = TensorDict({"logprobs": -1.0 * mask}, batch_size=[2])
    >>> loss, _ = gmpo_loss(out, Batch(columns, batch_size=[2]))
    >>> loss.total.item(), loss.weight.item()
    (-2.0, 2.0)
    """,
    policy_loss(clip(math.inf), ratio=geometric_ratio(0.4), aggregate=seq_mean),
)

sapo_loss = named(
    "sapo_loss",
    """SAPO's loss, a soft gate in place of the clip: ``policy_loss(sapo(), aggregate=seq_mean)``.

        -1/B Σ_i 1/|y_i| Σ_t 4/τ σ(τ (r_{i,t} - 1)) A_{i,t},   τ = 1 where A > 0, else 1.05,   r_{i,t} = π_θ/π_old

    Reads ``advantages``, ``old_logprobs`` and ``loss_mask``.

    Source: SAPO, https://arxiv.org/abs/2511.20347, eq. 5 and 6.

    >>> import torch
    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> columns = {"loss_mask": mask, "advantages": 1.0 * mask, "old_logprobs": -1.0 * mask}
    >>> out = TensorDict({"logprobs": -1.0 * mask}, batch_size=[2])
    >>> loss, _ = sapo_loss(out, Batch(columns, batch_size=[2]))
    >>> loss.total.item(), loss.weight.item()
    (-4.0, 2.0)
    """,
    policy_loss(sapo(), aggregate=seq_mean),
)

dppo_loss = named(
    "dppo_loss",
    """DPPO's loss, with a trust region in total variation: ``policy_loss(dppo(0.2), ratio=rollout_ratio)``.

        -1/Σ_i|y_i| Σ_i Σ_t stop_gradient(M_{i,t} r_{i,t}) A_{i,t} log π_θ,   r_{i,t} = π_θ/π_rollout
        M = 0 where |π_θ - π_rollout| > 0.2 and the step would make it more, 1 elsewhere

    Reads ``advantages``, ``rollout_logprobs`` and ``loss_mask``. The ratio is to the sampler, so the loss needs no
    correction for the mismatch with it. The paper's objective is a sum over the tokens of a row, which the mean over
    all tokens of a batch is up to the size of the step.

    Source: DPPO, https://arxiv.org/abs/2602.04879, eq. 12 and 13.

    >>> import torch
    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> columns = {"loss_mask": mask, "advantages": 1.0 * mask, "rollout_logprobs": -1.0 * mask}
    >>> out = TensorDict({"logprobs": -1.0 * mask}, batch_size=[2])
    >>> loss, _ = dppo_loss(out, Batch(columns, batch_size=[2]))
    >>> loss.total.item(), loss.weight.item()
    (3.0, 3.0)
    """,
    policy_loss(dppo(0.2), ratio=rollout_ratio),
)

vespo_loss = named(
    "vespo_loss",
    """VESPO's loss, with smooth weights of whole rows: ``policy_loss(vespo(), ratio=product_ratio(rollout_ratio))``.

        -1/Σ_i|y_i| Σ_i Σ_t stop_gradient(φ(W_i)) A_{i,t} log π_θ,   W_i = Π_t π_θ/π_rollout
        φ(W) = W² e^(3 (1 - W)) where A >= 0, W³ e^(2 (1 - W)) where A < 0

    Reads ``advantages``, ``rollout_logprobs`` and ``loss_mask``. The method's advantages are those of `group_center`.
    Its implementations choose the mean over all tokens of a batch; the paper's gradient is of whole rows.

    Source: VESPO, https://arxiv.org/abs/2602.10693, eq. 17 and 20.

    >>> import torch
    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> columns = {"loss_mask": mask, "advantages": 1.0 * mask, "rollout_logprobs": -1.0 * mask}
    >>> out = TensorDict({"logprobs": -1.0 * mask}, batch_size=[2])
    >>> loss, _ = vespo_loss(out, Batch(columns, batch_size=[2]))
    >>> loss.total.item(), loss.weight.item()
    (3.0, 3.0)
    """,
    policy_loss(vespo(), ratio=product_ratio(rollout_ratio)),
)

decoupled_ppo_loss = named(
    "decoupled_ppo_loss",
    """Decoupled PPO: clipped against the policy that the step started from, weighted for the one that sampled.

        -E[ π_old/π_rollout min(r A, clamp(r, 0.8, 1.2) A) ],   r = π_θ/π_old

    ``policy_loss(clip(0.2), correction=truncate(math.inf))``. Reads ``advantages``, ``old_logprobs`` (computed by the
    trainer, the paper's proximal policy), ``rollout_logprobs`` (its behaviour policy) and ``loss_mask``. The paper does
    not bound the weight; ``truncate(5.0)`` or ``icepop(0, 5.0)`` in its place do.

    Source: https://arxiv.org/abs/2110.00641, section 3.

    >>> import torch
    >>> mask = torch.tensor([[True, True]])
    >>> columns = {"loss_mask": mask, "advantages": 1.0 * mask, "old_logprobs": -1.0 * mask}
    >>> batch = Batch(columns | {"rollout_logprobs": torch.tensor([[-1.0, -2.0]])}, batch_size=[1])
    >>> loss, _ = decoupled_ppo_loss(TensorDict({"logprobs": -1.0 * mask}, batch_size=[1]), batch)
    >>> round(loss.total.item(), 4)  # 1 + e
    -3.7183
    """,
    policy_loss(clip(0.2), correction=truncate(math.inf)),
)
