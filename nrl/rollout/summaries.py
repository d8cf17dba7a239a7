"""Summaries of a rollout: metrics."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nrl.backends.training.loss.batch_checks import check_sampled
from nrl.batch import Batch, require
from nrl.batch.columns import DROPPED_TOKENS
from nrl.batch.metrics import Max, Mean, Metrics, Sum, over_something, prefixed
from nrl.envs import STATUSES
from nrl.errors import BatchError
from nrl.rollout.bridges import FORKS

__all__ = ["per_source", "summary"]


def summary(batch: Batch) -> Metrics:
    """Summarise a rollout as metrics.

    - ``reward``: the mean over all valid sampled rows, including rows dropped since; ``reward/max``: of the best row.
    - ``length``: the mean number of sampled tokens; ``length/max``: the largest.
    - ``truncated``: the fraction of valid rows at a length limit; ``unfinished_reasoning``: the fraction of valid rows
      without an answer, because the last turn ends within its reasoning; absent at 0.
    - ``invalid``, ``dropped``: numbers of rows.
    - ``asked_again``: requests repeated because an engine died or its work was discarded.
    - ``forks``: rows of episodes beside the first ones; absent at 0; ``forks/<reason>``: of each
      `nrl.rollout.bridges.TraceFork`.
    - ``tokens/sampled``: the sum of ``tokens/trained``; of valid rows ``tokens/masked``, outside of ``loss_mask``, and
      ``tokens/beyond``, outside of the context; ``tokens/invalid``, of failed rows; ``tokens/cut``, of rows cut off;
      and ``tokens/dropped``, of dropped rows, the sum of ``tokens/dropped/<reason>``.
    - ``cut``, ``cut/length``, ``cut/groups``, ``cut/share``: see `nrl.cut`; ``left_out``: episodes of `nrl.oversample`.
    - ``env/<name>``: means of the environment's own numbers; ``reward/<name>`` of the components of rewards.
    - ``status/<name>``: rows with a verdict other than ``"ok"``, by status.

    Without rows, means are NaN and maxima minus infinity; merging these has no effect.

    Raises:
        MissingColumn: the batch has no rewards.
        BatchError: a row is trained on a token outside of the sampled ones, or its number of sampled tokens differs
            from ``sampled``.

    >>> rewards = torch.tensor([0.0, 1.0])
    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> batch = Batch({"input_ids": mask.long(), "loss_mask": mask, "rewards": rewards}, batch_size=[2])
    >>> from nrl.batch.metrics import finalize
    >>> finalize(summary(batch))["reward"]
    0.5
    """
    require(batch, "rewards", "loss_mask", reader="summary")
    size = batch.batch_size
    valid_rows = batch["valid"] if "valid" in batch.keys() else torch.ones(size, dtype=torch.bool)
    first = _first_rows(batch)
    valid = valid_rows & first
    truncated = batch["truncated"] if "truncated" in batch.keys() else torch.zeros(size, dtype=torch.bool)
    rewards = batch["rewards"].sum(-1) if batch["rewards"].ndim > len(size) else batch["rewards"]
    rewards, count = torch.where(valid, rewards, 0.0), valid.sum()
    sampled = batch["loss_mask"].sum(-1)
    dropped = batch["dropped"].sum() if "dropped" in batch.keys() else torch.tensor(0)
    failed = batch["dropped_invalid"].sum() if "dropped_invalid" in batch.keys() else torch.tensor(0)
    carried = batch["dropped_rewards"].sum() if "dropped" in batch.keys() else torch.tensor(0.0)
    metrics: Metrics = {
        "reward": Mean(rewards.sum() + carried, (count + dropped).float()),
        "reward/max": Max(_max_or_minus_inf(torch.where(valid, rewards, -math.inf))),
        "length": Mean(sampled[valid_rows].sum().float(), count.float()),
        "length/max": Max(_max_or_minus_inf(sampled)),
        "truncated": Mean((truncated & valid).sum().float(), count.float()),
        "invalid": Sum((~valid_rows & first).sum() + failed),
        "dropped": Sum(dropped),
    }
    if "reasoning_ended" in batch.keys() and bool((unfinished := ~batch["reasoning_ended"] & valid).any()):
        metrics["unfinished_reasoning"] = Mean(unfinished.sum().float(), count.float())
    if "asked_again" in batch.keys():
        metrics["asked_again"] = Sum(batch["asked_again"].sum())
    if "sampled" in batch.keys():
        metrics |= _token_metrics(batch, valid_rows)
    if "cut" in batch.keys():
        metrics |= _cut_metrics(batch, first)
    if "left_out" in batch.keys():
        metrics["left_out"] = Sum(batch["left_out"].sum())
    if "status" in batch.keys():
        status = batch["status"][first]
        metrics |= {f"status/{name}": Sum((status == index).sum()) for index, name in enumerate(STATUSES) if index}
    if num_forks := int((~first).sum()):
        metrics["forks"] = Sum(torch.tensor(num_forks))
        reasons = batch["forked"][~first] if "forked" in batch.keys() else torch.zeros(num_forks)
        metrics |= {f"forks/{name}": Sum((reasons == index).sum()) for index, name in enumerate(FORKS) if index}
    for key, value in batch.items():
        if str(key).startswith(("env/", "reward/")) and isinstance(value, Tensor):
            is_known = torch.isfinite(value) & valid
            metrics[str(key)] = Mean(torch.where(is_known, value, 0.0).sum(), is_known.sum().float())
    return metrics


def _cut_metrics(batch: Batch, first: Tensor) -> Metrics:
    """Return metrics of episodes that were ended early, and of their groups."""
    cut = batch["cut"]
    _, group = batch["group_ids"][first].unique(return_inverse=True)
    count, lost = torch.bincount(group), torch.bincount(group, weights=cut[first].double())
    return {
        "cut": Sum((cut & first).sum() + (batch["dropped_cut"].sum() if "dropped_cut" in batch.keys() else 0)),
        "cut/length": Mean(batch["sampled"][cut].sum().float(), (cut & first).sum().float()),
        "cut/groups": Mean((lost > 0).sum().float(), torch.tensor(float(len(lost)))),
        "cut/share": Mean((lost / count)[lost > 0].sum().float(), (lost > 0).sum().float()),
    }


def _first_rows(batch: Batch) -> Tensor:
    """``[*b]`` bool: the first row of each episode, which counts once however often it forked."""
    if "episode_ids" not in batch.keys():
        return torch.ones(batch.batch_size, dtype=torch.bool)
    ids = batch["episode_ids"].flatten()
    rows = torch.arange(len(ids))
    unique_ids, episode = ids.unique(return_inverse=True)
    first = rows.new_full((len(unique_ids),), len(ids)).scatter_reduce(0, episode, rows, "amin")
    return (first[episode] == rows).view(batch.batch_size)


def _token_metrics(batch: Batch, valid: Tensor) -> Metrics:
    """Return metrics of all sampled tokens by their use; each token is counted once."""
    require(batch, "turns", reader="summary")
    sampled, trained, of_policy = batch["sampled"], batch["loss_mask"].sum(-1), (batch["turns"] >= 0).sum(-1)
    check_sampled("summary", batch)
    beyond = sampled - of_policy
    ended = batch["truncated"] if "truncated" in batch.keys() else torch.zeros_like(valid)
    if bool((lost := valid & ((beyond < 0) | (beyond > 0) & ~ended)).any()):
        row = int(lost.flatten().nonzero()[0])
        raise BatchError(
            f"summary: row {row} has {int(of_policy.flatten()[row])} tokens of the policy, and "
            f"{int(sampled.flatten()[row])} were sampled for it; take tokens out of loss_mask, and leave the row, its "
            "turns and sampled as they are"
        )
    dropped = {f"dropped/{name}": batch[key].sum() for name, key in DROPPED_TOKENS.items() if key in batch.keys()}
    total = sum(dropped.values(), sampled.new_zeros(()))
    cut = batch["cut"] if "cut" in batch.keys() else torch.zeros_like(valid)
    parts: dict[str, Tensor] = {
        "trained": trained[valid].sum(),
        "masked": (of_policy - trained)[valid].sum(),
        "beyond": beyond[valid].sum(),
        "invalid": sampled[~valid & ~cut].sum(),
        "dropped": total,
    }
    if "cut" in batch.keys():
        parts["cut"] = sampled[cut].sum()
    counts = {"sampled": sampled.sum() + total, **parts, **dropped}
    return {f"tokens/{name}": Sum(count) for name, count in counts.items()}


def _max_or_minus_inf(x: Tensor) -> Tensor:
    """Return the largest number; minus infinity if there are none."""
    return x.max().float() if x.numel() else torch.tensor(-math.inf)


def per_source(batch: Batch, names: Sequence[str], measure: Callable[[Batch], Metrics] = summary) -> Metrics:
    """Measure the rows of each source by themselves, under ``<name>/``. A source without rows has no metrics.

    Where there is one name, and no ``source``, nothing was mixed, and there are no metrics.

    Args:
        batch: has ``source``, as with tasks from `nrl.data.mixture`.
        names: of the sources, by their number.
        measure: from rows to metrics.

    Raises:
        MissingColumn: the batch lacks ``source``, or a column that ``measure`` reads.
        BatchError: a row is of a source that has no name.

    >>> from nrl.batch.metrics import finalize
    >>> mask = torch.tensor([[True], [True]])
    >>> columns = {"rewards": torch.tensor([0.0, 1.0]), "loss_mask": mask, "source": torch.tensor([1, 0])}
    >>> found = finalize(per_source(Batch(columns, batch_size=[2]), ["sums", "words"]))
    >>> found["sums/reward"], found["words/reward"]
    (1.0, 0.0)
    """
    if len(names) == 1 and "source" not in batch.keys():
        return {}
    require(batch, "source", reader="per_source")
    source = batch["source"]
    if len(source) and not 0 <= int(source.min()) <= int(source.max()) < len(names):
        raise BatchError(
            f"per_source: there are rows of source {int(source.max())}, and {len(names)} names; give a name for each "
            "source, as the names of a mixture"
        )
    metrics: Metrics = {}
    for number, name in enumerate(names):
        if bool((source == number).any()):
            # Columns that another source brings, such as its components, have no entries in these rows
            metrics |= prefixed(f"{name}/", over_something(measure(batch[source == number])))
    return metrics
