"""Estimators of advantages on the whole batch, on the driver: ``batch -> advantages [B, T]``.

`from_rewards` makes an estimator of a function of groups, `from_token_rewards` one of rewards at tokens; `whitened` and
`weighted_sum` compose them, and `advantages` writes the column.
"""

import inspect
from collections.abc import Callable
from functools import partial

from tensordict import TensorDict
from torch import Tensor

from nrl.algos._arguments import check_numbers, check_terms, in_unit_interval
from nrl.algos._episodes import check_finite, episodes, over_episodes, row_rewards, trained_tokens
from nrl.algos.groups import GroupFunction, group_normalize
from nrl.algos.kl_rewards import sampled_logprobs
from nrl.algos.loss_contract import name_of
from nrl.algos.masking import masked
from nrl.algos.returns import discounted_returns, gae, whiten
from nrl.arguments import checked
from nrl.batch import Batch, assign, forbid_writes, require
from nrl.errors import ArgumentError, NotFinite

__all__ = [
    "Estimator",
    "advantages",
    "episode_gae",
    "from_rewards",
    "from_token_rewards",
    "on_policy_distillation",
    "reinforce_plus_plus",
    "weighted_sum",
    "whitened",
]

type Estimator = Callable[[TensorDict], Tensor]
"""``batch -> advantages [B, T]``."""


def from_rewards(fn: GroupFunction) -> Estimator:
    """Turn a function of rewards and groups into an estimator.

    It leaves out the rows that ``valid`` marks false, gives ``fn`` each episode once (``episode_ids``; without that
    column, every row is one), and spreads the result over all rows of the episode and all tokens of ``loss_mask``.

    Args:
        fn: ``(rewards [n], group_ids [n]) -> [n]``, such as `group_normalize`; n is the number of valid episodes.

    Returns:
        ``batch -> [B, T]``, in the dtype of ``rewards``; 0 on invalid rows and outside ``loss_mask``. It reads
        ``rewards``, ``group_ids``, ``loss_mask`` and, if present, ``valid`` and ``episode_ids``.

    Raises:
        MissingColumn: (when called) the batch lacks one of the first three.
        BatchError: (when called) there are several rewards a row, the rows of one episode differ in reward or group, or
            ``fn`` did not return a number for each episode.
        NotFinite: (when called) the reward of a valid row, or what ``fn`` returned, is NaN or infinite.

    >>> import torch
    >>> from nrl.algos import group_center
    >>> batch = Batch(
    ...     {
    ...         "rewards": torch.tensor([1.0, 0.0]),
    ...         "group_ids": torch.tensor([0, 0]),
    ...         "loss_mask": torch.tensor([[False, True, True], [False, True, False]]),
    ...     },
    ...     batch_size=[2],
    ... )
    >>> from_rewards(group_center)(batch).tolist()
    [[0.0, 0.5, 0.5], [0.0, -0.5, 0.0]]
    """
    name = f"from_rewards({name_of(fn)})"

    def estimator(batch: Batch) -> Tensor:
        require(batch, "rewards", "group_ids", "loss_mask", reader=name)
        rewards = row_rewards(batch, reader=name)
        check_finite(batch, "rewards", reader=name)
        by_episode = episodes(batch, "rewards", "group_ids", reader=name)
        firsts = by_episode.firsts
        advantages = fn(rewards[firsts], batch["group_ids"][firsts]) if len(firsts) else rewards[firsts]
        advantages = check_numbers(name, advantages, f"{len(firsts)} rewards", tuple(firsts.shape))
        return by_episode.tokens(advantages.to(rewards.dtype), batch["loss_mask"])

    estimator.__name__ = name
    return estimator


_NORMALIZED = from_rewards(group_normalize)


@checked("advantages")
def advantages(batch: Batch, estimator: Estimator = _NORMALIZED) -> Batch:
    """Add the column ``advantages``; by default GRPO's, ``from_rewards(group_normalize)``.

    Args:
        batch: has the columns that the estimator reads; it does not change.
        estimator: ``batch -> [B, T]``.

    Raises:
        ColumnError: the estimator returned another shape, or no floats.
        NotFinite: it returned NaN or an infinity for a token that is trained on.
        MutatedBatch: (under ``NRL_DEBUG=1``) it wrote into the batch.

    >>> import torch
    >>> from nrl.algos import leave_one_out
    >>> batch = Batch(
    ...     {
    ...         "rewards": torch.tensor([3.0, 1.0]),
    ...         "group_ids": torch.tensor([0, 0]),
    ...         "loss_mask": torch.tensor([[False, True], [False, True]]),
    ...     },
    ...     batch_size=[2],
    ... )
    >>> advantages(batch, from_rewards(leave_one_out))["advantages"].tolist()
    [[0.0, 2.0], [0.0, -2.0]]
    """
    try:
        inspect.signature(estimator).bind(batch)
    except TypeError:
        name = name_of(estimator)
        raise ArgumentError(
            f"advantages: the estimator {name} takes rewards and groups, and not a batch; give from_rewards({name})",
            "estimator",
        ) from None
    with forbid_writes(batch, name_of(estimator)):
        advantages = estimator(batch)
    added = assign(batch, advantages=advantages)
    if "loss_mask" in added.keys():
        wrong = ~masked(added["advantages"], trained_tokens(added)).isfinite()
        if bool(wrong.any()):
            position = tuple(wrong.nonzero()[0].tolist())
            raise NotFinite(
                f"advantages: {name_of(estimator)} returned {float(added['advantages'][position])} for row "
                f"{position[0]}, token {position[-1]}; guard what it divides by, or the logarithm of 0"
            )
    return added


@checked("from_token_rewards", finite=False)
def from_token_rewards(gamma: float = 1.0) -> Estimator:
    """An estimator from token rewards: the discounted return of each token, without a baseline.

        A_k = Σ_{j≥k} γ^(j-k) r_j,   k and j count the tokens of ``loss_mask``

    Time skips the tokens of a tool's answer, and rewards after them count before them. verl's returns have done the
    same since August 2026 (its pull request 7300); until then they started anew there. It runs over all rows of an
    episode that forked, in the order of ``turns``.

    Args:
        gamma: discount, in [0, 1].

    Returns:
        ``batch -> [B, T]``, 0 on invalid rows and outside ``loss_mask``. It reads ``token_rewards``, ``loss_mask`` and,
        if present, ``valid``, ``episode_ids`` and ``turns``.

    Raises:
        ValueError: ``gamma`` is outside [0, 1].
        MissingColumn: (when called) the batch lacks one of the first two, or an episode has several rows and no turns.
        BatchError: (when called) the turns of an episode's rows do not say their order.
        NotFinite: (when called) a token reward of a valid row is NaN or infinite.

    Source: Sutton and Barto, Reinforcement Learning (2018), eq. 3.9.

    >>> import torch
    >>> mask = torch.tensor([[False, True, True]])
    >>> batch = Batch({"token_rewards": torch.tensor([[9.0, 1.0, 2.0]]), "loss_mask": mask}, batch_size=[1])
    >>> from_token_rewards()(batch).tolist(), from_token_rewards(gamma=0.5)(batch).tolist()
    ([[0.0, 3.0, 2.0]], [[0.0, 2.0, 2.0]])
    """
    in_unit_interval("from_token_rewards", "gamma", gamma)

    def from_token_rewards(batch: Batch) -> Tensor:
        require(batch, "token_rewards", "loss_mask", reader="from_token_rewards")
        check_finite(batch, "token_rewards", reader="from_token_rewards")
        returns = partial(discounted_returns, gamma=gamma)
        return over_episodes(returns, batch, batch["token_rewards"], reader="from_token_rewards")

    return from_token_rewards


def episode_gae(batch: Batch, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation of a batch: `gae` over the trained tokens of each episode, in their order.

    An episode that forked is one sequence, whatever the order of its rows: V_{k+1} behind a row's last token is that of
    the first token of its next turn, and rewards of later rows count for earlier ones.

    Args:
        batch: has ``token_rewards``, ``values`` and ``loss_mask``; and ``turns``, where an episode has several rows.
        gamma: discount, in [0, 1].
        lam: λ in [0, 1]; 0 is one-step TD, 1 is Monte Carlo.

    Returns:
        Advantages and returns, each ``[B, T]``, 0 on invalid rows and outside ``loss_mask``. Without gradient.

    Raises:
        MissingColumn: the batch lacks a column.
        BatchError: the turns of an episode's rows do not say their order.
        NotFinite: a token reward or a value of a trained token is NaN or infinite.
        ValueError: ``gamma`` or ``lam`` is outside [0, 1].

    Source: https://arxiv.org/abs/1506.02438, eq. 16.

    >>> import torch
    >>> columns = {"token_rewards": torch.tensor([[1.0], [0.0]]), "values": torch.tensor([[0.5], [0.5]])}
    >>> columns |= {"turns": torch.tensor([[1], [0]]), "loss_mask": torch.ones(2, 1, dtype=torch.bool)}
    >>> batch = Batch({**columns, "episode_ids": torch.tensor([0, 0])}, batch_size=[2])
    >>> [x.tolist() for x in episode_gae(batch, gamma=1.0, lam=0.5)]
    [[[0.5], [0.25]], [[1.0], [0.75]]]
    """
    require(batch, "token_rewards", "values", "loss_mask", reader="episode_gae")
    check_finite(batch, "token_rewards", reader="episode_gae")
    check_finite(batch, "values", reader="episode_gae")

    def estimate(rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        return gae(rewards, values, mask, gamma=gamma, lam=lam)[0]

    values = batch["values"]
    advantages = over_episodes(estimate, batch, batch["token_rewards"], values, reader="episode_gae")
    return advantages, advantages + masked(values.detach(), trained_tokens(batch))


def whitened(estimator: Estimator) -> Estimator:
    """Shift and scale another estimator's advantages to mean 0 and deviation 1 over the batch's tokens, by `whiten`.

    Applied to ``from_rewards(group_center)``, this is the baseline form of REINFORCE++ (eq. 6 and 7), whose loss has
    ``kl(k2, coef)`` as its penalty (eq. 8). The statistics are over tokens, as in every library, so a long row counts
    more than a short one; the paper writes them over rows.

    Args:
        estimator: ``batch -> [B, T]``.

    Returns:
        ``batch -> [B, T]``, 0 on invalid rows and outside ``loss_mask``; exactly 0 where all advantages are equal.

    Raises:
        MissingColumn: (when called) the batch lacks ``loss_mask``.

    Source: REINFORCE++, https://arxiv.org/abs/2501.03262v9, eq. 5 to 8.

    >>> import torch
    >>> from nrl.algos import group_center
    >>> columns = {"rewards": torch.tensor([3.0, 1.0]), "group_ids": torch.tensor([0, 0])}
    >>> batch = Batch({**columns, "loss_mask": torch.ones(2, 2, dtype=torch.bool)}, batch_size=[2])
    >>> [[round(x, 4) for x in row] for row in whitened(from_rewards(group_center))(batch).tolist()]
    [[0.866, 0.866], [-0.866, -0.866]]
    """
    name = f"whitened({name_of(estimator)})"

    def estimate(batch: Batch) -> Tensor:
        require(batch, "loss_mask", reader=name)
        return whiten(estimator(batch), trained_tokens(batch))

    estimate.__name__ = name
    return estimate


def reinforce_plus_plus(batch: Batch) -> Tensor:
    """Returns of the token rewards, less the penalty for leaving the reference, whitened over the batch (REINFORCE++).

        A_t = (R_t - mean R) / (std R + 1e-6),   R_t = r - Σ_{i≥t} penalty_i

    ``whitened(from_token_rewards())``, on the column of `token_rewards`, with ``kl(k1, coef)`` as the paper's penalty.
    The libraries differ: verl divides by sqrt(var + 1e-8), and discounts by its ``gamma``; NeMo RL subtracts each
    token's own penalty and not those after it, and divides by the deviation with n.

    Args:
        batch: has ``token_rewards`` and ``loss_mask``.

    Returns:
        ``[B, T]``, 0 on invalid rows and outside ``loss_mask``.

    Raises:
        MissingColumn: the batch lacks a column.
        NotFinite: a token reward of a valid row is NaN or infinite.

    Source: https://arxiv.org/abs/2501.03262v9, eq. 4 and 5.

    >>> import torch
    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> token_rewards = torch.tensor([[-1.0, 3.0], [1.0, 0.0]])
    >>> batch = Batch({"token_rewards": token_rewards, "loss_mask": mask}, batch_size=[2])
    >>> [[round(x, 4) for x in row] for row in reinforce_plus_plus(batch).tolist()]
    [[0.0, 1.0], [-1.0, 0.0]]
    """
    return _REINFORCE_PLUS_PLUS(batch)


_REINFORCE_PLUS_PLUS = whitened(from_token_rewards())


def on_policy_distillation(batch: Batch) -> Tensor:
    """On-policy distillation: the log-ratio of teacher and policy at each sampled token.

        A_t = log π_teacher(y_t) - log π_old(y_t)

    On average over samples of the policy, the policy gradient is minus that of the reverse KL(π_θ ‖ π_teacher) at each
    token, given those before it. It ignores the effect of a token on later ones (γ = 0). Add rewards with
    `weighted_sum`.

    Args:
        batch: has ``teacher_logprobs``, ``loss_mask``, and ``old_logprobs`` or else ``rollout_logprobs``.

    Returns:
        ``[B, T]``, 0 on invalid rows and outside ``loss_mask``; exactly 0 where both agree.

    Raises:
        MissingColumn: the batch lacks a column.
        NotFinite: a log-probability of a trained token is NaN or infinite, as under a teacher that rules a token out.

    Source: K. Lu, On-Policy Distillation (2025), https://thinkingmachines.ai/blog/on-policy-distillation; MOPD,
    https://arxiv.org/abs/2601.02780.

    >>> import torch
    >>> columns = {"teacher_logprobs": torch.tensor([[9.0, -1.0]]), "old_logprobs": torch.tensor([[9.0, -3.0]])}
    >>> on_policy_distillation(Batch({**columns, "loss_mask": torch.tensor([[False, True]])}, batch_size=[1])).tolist()
    [[0.0, 2.0]]
    """
    require(batch, "teacher_logprobs", "loss_mask", reader="on_policy_distillation")
    check_finite(batch, "teacher_logprobs", reader="on_policy_distillation")
    mask = trained_tokens(batch)
    return masked(batch["teacher_logprobs"].detach(), mask) - masked(
        sampled_logprobs(batch, "on_policy_distillation"), mask
    )


def weighted_sum(*terms: tuple[float, Estimator]) -> Estimator:
    """A weighted sum of estimators, such as rewards and a teacher.

        A = Σ_k c_k A_k

    Args:
        terms: pairs ``(coefficient, estimator)``.

    Returns:
        ``batch -> [B, T]``.

    Raises:
        ValueError: no terms are given, or a coefficient is not finite.
        TypeError: a term is not such a pair.

    >>> import torch
    >>> columns = {"teacher_logprobs": torch.tensor([[-1.0]]), "old_logprobs": torch.tensor([[-3.0]])}
    >>> columns |= {"rewards": torch.tensor([1.0]), "group_ids": torch.tensor([0])}
    >>> batch = Batch({**columns, "loss_mask": torch.tensor([[True]])}, batch_size=[1])
    >>> weighted_sum((1.0, from_rewards(group_normalize)), (0.5, on_policy_distillation))(batch).tolist()
    [[1.0]]
    """
    check_terms("weighted_sum", "estimator", terms)

    def total(batch: Batch) -> Tensor:
        (first, *rest) = (coef * estimator(batch) for coef, estimator in terms)
        return sum(rest, first)

    total.__name__ = f"weighted_sum({', '.join(name_of(estimator) for _, estimator in terms)})"
    return total
