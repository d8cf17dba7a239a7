"""Summaries of a rollout: metrics, and samples to look at."""

import codecs
import math
from collections.abc import Callable, Sequence
from itertools import pairwise, takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nrl.batch import Batch, require
from nrl.envs import STATUSES
from nrl.errors import BatchError
from nrl.reduce import Max, Mean, Metrics, Sum, prefixed

__all__ = ["per_source", "samples", "summary"]

_BINS = 20
# The characters that byte-level tokenizers write bytes as: printable ones as they are, the others from 256 on.
_BYTES = {chr(byte): byte for byte in (*range(33, 127), *range(161, 173), *range(174, 256))}
_BYTES |= {chr(256 + place): byte for place, byte in enumerate(byte for byte in range(256) if chr(byte) not in _BYTES)}


def summary(batch: Batch) -> Metrics:
    """Summarise a rollout as metrics.

    - ``reward``: the mean over all valid rows that were sampled, including those dropped since; ``reward/max``: of the
      best row.
    - ``length``: the mean number of sampled tokens; ``length/max``: the largest.
    - ``truncated``: the fraction of valid rows that hit a length limit.
    - ``invalid``, ``dropped``: numbers of rows.
    - ``asked_again``: requests that were asked again because an engine died or its work was thrown away.
    - ``forks``: rows that episodes have beside their first ones, where there are some.
    - ``tokens/sampled``: the sum of what became of them: ``tokens/trained``; ``tokens/masked``, of valid rows, but
      outside of ``loss_mask`` or the context; ``tokens/invalid``, of rows that failed; ``tokens/cut``, of those that
      were cut; ``tokens/dropped``, of rows that are not here.
    - ``cut``, ``cut/length``, ``cut/groups``, ``cut/share``: see `nrl.cut`; ``left_out``: episodes of `nrl.oversample`.
    - ``env/<name>``: means of the environment's own numbers; ``reward/<name>`` of the components of rewards.
    - ``status/<name>``: rows whose verdict was not ``"ok"``, by what became of it.

    Without rows, means are NaN and maxima minus infinity, which merges with others without an effect.

    Raises:
        MissingColumn: there are no rewards.
        BatchError: a row is trained on more tokens than were sampled for it.

    >>> rewards = torch.tensor([0.0, 1.0])
    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> batch = Batch({"input_ids": mask.long(), "loss_mask": mask, "rewards": rewards}, batch_size=[2])
    >>> from nrl.reduce import finalize
    >>> finalize(summary(batch))["reward"]
    0.5
    """
    require(batch, "rewards", "loss_mask", reader="summary")
    size = batch.batch_size
    every = batch["valid"] if "valid" in batch.keys() else torch.ones(size, dtype=torch.bool)
    first = _first_rows(batch)
    valid = every & first
    truncated = batch["truncated"] if "truncated" in batch.keys() else torch.zeros(size, dtype=torch.bool)
    rewards = batch["rewards"].sum(-1) if batch["rewards"].ndim > len(size) else batch["rewards"]
    rewards, count = torch.where(valid, rewards, 0.0), valid.sum()
    sampled = batch["loss_mask"].sum(-1)
    dropped = batch["dropped"].sum() if "dropped" in batch.keys() else torch.tensor(0)
    failed = batch["dropped_invalid"].sum() if "dropped_invalid" in batch.keys() else torch.tensor(0)
    carried = batch["dropped_rewards"].sum() if "dropped" in batch.keys() else torch.tensor(0.0)
    metrics: Metrics = {
        "reward": Mean(rewards.sum() + carried, (count + dropped).float()),
        "reward/max": Max(_largest(torch.where(valid, rewards, -math.inf))),
        "length": Mean(sampled[every].sum().float(), count.float()),
        "length/max": Max(_largest(sampled)),
        "truncated": Mean((truncated & valid).sum().float(), count.float()),
        "invalid": Sum((~every & first).sum() + failed),
        "dropped": Sum(dropped),
    }
    if "asked_again" in batch.keys():
        metrics["asked_again"] = Sum(batch["asked_again"].sum())
    if "sampled" in batch.keys():
        metrics |= _ledger(batch, every)
    if "cut" in batch.keys():
        metrics |= _cut(batch, first)
    if "left_out" in batch.keys():
        metrics["left_out"] = Sum(batch["left_out"].sum())
    if "status" in batch.keys():
        status = batch["status"][first]
        metrics |= {f"status/{name}": Sum((status == at).sum()) for at, name in enumerate(STATUSES) if at}
    if more := int((~first).sum()):
        metrics["forks"] = Sum(torch.tensor(more))
    for key, value in batch.items():
        if str(key).startswith(("env/", "reward/")) and isinstance(value, Tensor):
            known = torch.isfinite(value) & valid
            metrics[str(key)] = Mean(torch.where(known, value, 0.0).sum(), known.sum().float())
    return metrics


def _cut(batch: Batch, first: Tensor) -> Metrics:
    """How many episodes were ended early, and of which groups, whose statistics are over the others."""
    cut = batch["cut"]
    _, group = batch["group_ids"][first].unique(return_inverse=True)
    count, lost = torch.bincount(group), torch.bincount(group, weights=cut[first].double())
    return {
        "cut": Sum((cut & first).sum()),
        "cut/length": Mean(batch["sampled"][cut].sum().float(), (cut & first).sum().float()),
        "cut/groups": Mean((lost > 0).sum().float(), torch.tensor(float(len(lost)))),
        "cut/share": Mean((lost / count)[lost > 0].sum().float(), (lost > 0).sum().float()),
    }


def _first_rows(batch: Batch) -> Tensor:
    """``[*b]`` bool: the first row of each episode, which counts once however often it forked."""
    if "episode_ids" not in batch.keys():
        return torch.ones(batch.batch_size, dtype=torch.bool)
    ids = batch["episode_ids"].flatten()
    places = torch.arange(len(ids))
    found, episode = ids.unique(return_inverse=True)
    first = places.new_full((len(found),), len(ids)).scatter_reduce(0, episode, places, "amin")
    return (first[episode] == places).view(batch.batch_size)


def _ledger(batch: Batch, valid: Tensor) -> Metrics:
    """What became of the tokens that were sampled: each is counted once."""
    sampled, trained = batch["sampled"], batch["loss_mask"].sum(-1)
    if bool((over := trained > sampled).any()):
        row = int(over.flatten().nonzero()[0])
        raise BatchError(
            f"summary: row {row} is trained on {int(trained.flatten()[row])} tokens, and {int(sampled.flatten()[row])} "
            "were sampled for it; loss_mask may leave tokens out, and not add any that the policy did not sample"
        )
    dropped = batch["dropped_tokens"].sum() if "dropped_tokens" in batch.keys() else sampled.new_zeros(())
    cut = batch["cut"] if "cut" in batch.keys() else torch.zeros_like(valid)
    parts: dict[str, Tensor] = {
        "trained": trained[valid].sum(),
        "masked": (sampled - trained)[valid].sum(),
        "invalid": sampled[~valid & ~cut].sum(),
        "dropped": dropped,
    }
    if "cut" in batch.keys():
        parts["cut"] = sampled[cut].sum()
    every = {"sampled": sampled.sum() + dropped, **parts}
    return {f"tokens/{name}": Sum(count) for name, count in every.items()}


def _largest(x: Tensor) -> Tensor:
    """The largest number; minus infinity if there are none."""
    return x.max().float() if x.numel() else torch.tensor(-math.inf)


def per_source(batch: Batch, names: Sequence[str], measure: Callable[[Batch], Metrics] = summary) -> Metrics:
    """Measure the rows of each source by themselves, under ``<name>/``. A source without rows has no metrics.

    Args:
        batch: has ``source``, as with tasks from `nrl.data.mixture`.
        names: of the sources, by their number.
        measure: from rows to metrics.

    Raises:
        MissingColumn: the batch lacks ``source``, or a column that ``measure`` reads.
        BatchError: a row is of a source that has no name.

    >>> from nrl.reduce import finalize
    >>> mask = torch.tensor([[True], [True]])
    >>> columns = {"rewards": torch.tensor([0.0, 1.0]), "loss_mask": mask, "source": torch.tensor([1, 0])}
    >>> found = finalize(per_source(Batch(columns, batch_size=[2]), ["sums", "words"]))
    >>> found["sums/reward"], found["words/reward"]
    (1.0, 0.0)
    """
    require(batch, "source", reader="per_source")
    source = batch["source"]
    if len(source) and not 0 <= int(source.min()) <= int(source.max()) < len(names):
        raise BatchError(
            f"per_source: there are rows of source {int(source.max())}, and {len(names)} names; give a name for each "
            "source, as the names of a mixture"
        )
    found: Metrics = {}
    for number, name in enumerate(names):
        if bool((source == number).any()):
            found |= prefixed(f"{name}/", measure(batch[source == number]))
    return found


def samples(batch: Batch, tokenizer: Any, n: int = 2) -> dict[str, Any]:
    """A record of a rollout for ``rollouts.jsonl``: histograms, and some rows as text.

    Args:
        batch: ``[B]`` with ``input_ids``, ``loss_mask`` and ``rewards``; other columns are shown if they are there.
        tokenizer: a transformers tokenizer.
        n: how many rows to show: the best and the worst of the first group whose rewards differ, then the others in
            their order.

    Returns:
        Values of JSON alone; numbers that are not finite are None.

        - ``rewards``, ``lengths``: histograms over all valid rows, ``{"low", "high", "counts"}`` with 20 bins of equal
          width from the lowest to the highest value; without rows None, None and no counts. Several rewards are added
          up; a length is the number of sampled tokens.
        - ``rows``: for each ``row`` (its place), ``group``, ``version``, ``valid``, ``truncated``, ``reward`` (a list
          where there are several), ``prompt`` (text up to the first token that was sampled) and, for each token from
          there to the end, ``tokens`` (text; joined, they are the decoded response, so a token that ends within a
          character is empty and the one that completes it has it), ``loss_mask``, ``advantages``,
          ``rollout_logprobs``. Fields without a column in the batch are left out.

    Raises:
        MissingColumn: one of the three is not there.

    >>> from nrl import tiny
    >>> tokenizer = tiny.tokenizer()
    >>> ids = torch.tensor([tokenizer.encode("1+1=2"), tokenizer.encode("1+1=3")])
    >>> mask = torch.tensor([[False] * 4 + [True]] * 2)
    >>> columns = {"input_ids": ids, "loss_mask": mask, "rewards": torch.tensor([1.0, 0.0])}
    >>> record = samples(Batch(columns, batch_size=[2]), tokenizer, n=1)
    >>> record["rows"][0]["prompt"], record["rows"][0]["tokens"], record["rewards"]["counts"][0]
    ('1+1=', ['2'], 1)
    """
    require(batch, "input_ids", "loss_mask", "rewards", reader="samples")
    columns = {str(key): value for key, value in batch.items() if isinstance(value, Tensor)}
    sampled, rewards = columns["loss_mask"], columns["rewards"]
    totals = (rewards.sum(-1) if rewards.ndim > 1 else rewards).double().numpy()
    valid = columns["valid"].numpy() if "valid" in columns else np.ones(len(totals), dtype=bool)
    counted = valid & np.isfinite(totals)
    groups = columns["group_ids"].tolist() if "group_ids" in columns else range(len(totals))
    return {
        "rewards": _histogram(totals[counted]),
        "lengths": _histogram(sampled.sum(-1).double().numpy()[valid]),
        "rows": [_row(columns, index, tokenizer) for index in _chosen(totals, counted, groups)[:n]],
    }


def _histogram(values: np.ndarray) -> dict[str, Any]:
    if not len(values):
        return {"low": None, "high": None, "counts": []}
    low, high = float(values.min()), float(values.max())
    places = np.minimum((values - low) / ((high - low) or 1.0) * _BINS, _BINS - 1).astype(int)
    return {"low": low, "high": high, "counts": np.bincount(places, minlength=_BINS).tolist()}


def _chosen(rewards: np.ndarray, counted: np.ndarray, groups: Sequence[int]) -> list[int]:
    """Every row: the best and the worst of the first group that has both, then all others in their order."""
    rows_of: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        if counted[row]:
            rows_of.setdefault(group, []).append(row)
    first: list[int] = []
    for rows in rows_of.values():
        best, worst = max(rows, key=rewards.__getitem__), min(rows, key=rewards.__getitem__)
        if rewards[best] > rewards[worst]:
            first = [best, worst]
            break
    return [*first, *(row for row in range(len(rewards)) if row not in first)]


def _row(columns: dict[str, Tensor], row: int, tokenizer: Any) -> dict[str, Any]:
    mask = columns["loss_mask"][row]
    if not mask.any() and "rollout_logprobs" in columns:  # the mask of an invalid row has been cleared
        mask = columns["rollout_logprobs"][row] != 0
    real = columns["attention_mask"][row].nonzero() if "attention_mask" in columns else torch.arange(len(mask))
    end = int(real.max()) + 1 if len(real) else 0
    start = int(mask.nonzero()[0]) if mask.any() else end
    ids = columns["input_ids"][row, :end].tolist()
    shown: dict[str, Any] = {"row": row}
    for name, key in (("group", "group_ids"), ("version", "version"), ("valid", "valid"), ("truncated", "truncated")):
        if key in columns:
            shown[name] = columns[key][row].item()
    shown["reward"] = _numbers(columns["rewards"][row])
    shown["prompt"] = _decode(tokenizer, ids[:start])
    shown["tokens"] = _pieces(tokenizer, ids[start:])
    shown["loss_mask"] = columns["loss_mask"][row, start:end].tolist()
    for key in ("advantages", "rollout_logprobs"):
        if key in columns:
            shown[key] = _numbers(columns[key][row, start:end])
    return shown


def _numbers(values: Tensor) -> Any:
    """Python numbers with six digits, as many as float32 has; None for those that are not finite."""
    if values.ndim:
        return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]
    return _numbers(values[None])[0]


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token, such that joined they are the decoded text."""
    text = _decode(tokenizer, ids)
    tokens = [token or "" for token in tokenizer.convert_ids_to_tokens(ids)]  # a model may have more than its tokenizer
    for spelt in (_byte_level, _sentence_piece):
        pieces = _characters([spelt(token) for token in tokens])
        if pieces and pieces[0].removeprefix(" ") + "".join(pieces[1:]) == text:
            pieces[0] = pieces[0].removeprefix(" ")  # which sentencepiece puts before a text, and takes off again
        if "".join(pieces) == text:
            return pieces
    # A tokenizer of another kind: decode each beginning and take the difference. Quadratic, so the last resort.
    ends = [_common(text, _decode(tokenizer, ids[:count])) for count in range(1, len(ids))]
    cuts = np.maximum.accumulate([0, *ends, len(text)]).tolist()
    return [text[start:end] for start, end in pairwise(cuts)]


def _common(a: str, b: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _byte_level(token: str) -> bytes:
    """An added token, such as one with a space, is not spelt in bytes."""
    return bytes(map(_BYTES.__getitem__, token)) if _BYTES.keys() >= set(token) else token.encode()


def _sentence_piece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x"):
        return bytes.fromhex(token[3:5])
    return token.replace("\u2581", " ").encode()


def _characters(spelt: Sequence[bytes]) -> list[str]:
    """Bytes as text, where a character belongs to the token that completes it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    last = len(spelt) - 1
    return [decoder.decode(some, final=place == last) for place, some in enumerate(spelt)]
