"""Rows to look at: a record of a rollout as values of JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from nrl.batch import Batch, require
from nrl.envs import STATUSES
from nrl.rollout.bridges import FORKS
from nrl.rollout.transcripts import numbers, rows_of_episodes, transcriber

__all__ = ["samples"]

_BINS = 20


def samples(batch: Batch, tokenizer: Any, n: int = 2, *, names: Sequence[str] = ()) -> dict[str, Any]:
    """A record of a rollout for ``rollouts.jsonl``: histograms, and some episodes as text, turn by turn.

    Args:
        batch: ``[B]`` with ``input_ids``, ``loss_mask`` and ``rewards``; other columns are optional.
        tokenizer: a transformers tokenizer.
        n: number of episodes to show: the best and the worst of the first group with different rewards, then the
            remaining ones in order. Without ``episode_ids`` a row is an episode; all rows of a forked episode are
            shown, next to one another.
        names: of the sources, by number, as in `nrl.per_source`; without names a ``source`` is a number.

    Returns:
        Values of JSON alone; NaN and infinite numbers are None.

        - ``rewards``, ``lengths``: histograms over all valid episodes, ``{"low", "high", "counts"}`` with 20 bins of
          equal width from the lowest to the highest value; without rows None, None and no counts. Several rewards are
          added up; a length is the number of sampled tokens.
        - ``rows``: for each ``row`` (its place), ``group``, ``source``, ``version``, ``valid``, ``truncated``, ``cut``,
          ``status`` (its name), ``reward`` (a list of several rewards), ``components`` (of the reward, by name),
          ``env`` (the environment's own numbers), ``prompt`` (text up to the first sampled token) and, for each
          further token, ``tokens`` (text; joined, the decoded response: a token within a character is empty, and the
          token at the end of the character has all of the character), ``loss_mask``, ``advantages``,
          ``rollout_logprobs``. Fields without a column in the batch are left out.
        - ``parts`` of a row, by author, in order; see `nrl.rollout.transcripts.RowTranscript`. Their texts are
          masked, as in the logs.
        - ``episode`` of a row, if the batch has ``episode_ids``. Rows of a forked episode have ``forks`` (number of
          further rows beside the first), ``fork`` (index of the row, from 0), ``shared`` (number of first tokens in
          common with an earlier row) and, of a later row, ``why``, the reason of the fork (see
          `nrl.rollout.bridges.TraceFork`).

    Raises:
        MissingColumn: one of the three columns is missing.

    >>> import torch
    >>> from nrl import tiny
    >>> tokenizer = tiny.tokenizer()
    >>> ids = torch.tensor([tokenizer.encode("1+1=2"), tokenizer.encode("1+1=3")])
    >>> mask = torch.tensor([[False] * 4 + [True]] * 2)
    >>> columns = {"input_ids": ids, "loss_mask": mask, "rewards": torch.tensor([1.0, 0.0])}
    >>> record = samples(Batch(columns, batch_size=[2]), tokenizer, n=1)
    >>> record["rows"][0]["prompt"], record["rows"][0]["tokens"], record["rewards"]["counts"][0]
    ('1+1=', ['2'], 1)
    >>> [part["role"] for part in record["rows"][0]["parts"]]
    ['prompt', 'policy']
    """
    require(batch, "input_ids", "loss_mask", "rewards", reader="samples")
    columns: dict[str, Any] = {str(key): value for key, value in batch.items()}
    rewards = columns["rewards"]
    totals = (rewards.sum(-1) if rewards.ndim > 1 else rewards).double().numpy()
    lengths = columns["loss_mask"].sum(-1).double().numpy()
    episodes = rows_of_episodes(columns, len(totals))
    firsts = np.array([rows[0] for rows in episodes], dtype=np.int64)
    valid = (columns["valid"].numpy() if "valid" in columns else np.ones(len(totals), dtype=bool))[firsts]
    counted = valid & np.isfinite(totals[firsts])
    groups = columns["group_ids"][firsts].tolist() if "group_ids" in columns else range(len(episodes))
    written = np.array([lengths[rows].sum() for rows in episodes])
    shown = [episodes[index] for index in _order_episodes(totals[firsts], counted, groups)[:n]]
    transcript = transcriber(tokenizer)

    def row(index: int, rows: Sequence[int]) -> dict[str, Any]:
        transcript_of_row = transcript(columns, index)
        record: dict[str, Any] = {"row": index}
        for name in ("group", "version", "valid", "truncated", "cut"):
            if (key := "group_ids" if name == "group" else name) in columns:
                record[name] = columns[key][index].item()
        if "source" in columns:
            source = int(columns["source"][index])
            record["source"] = names[source] if 0 <= source < len(names) else source
        record |= _episode_fields(columns, index, rows)
        record |= {
            "reward": numbers(rewards[index]),
            "prompt": transcript_of_row.prompt,
            "tokens": transcript_of_row.tokens,
        }
        record["loss_mask"] = columns["loss_mask"][index, transcript_of_row.start : transcript_of_row.end].tolist()
        for key in ("advantages", "rollout_logprobs"):
            if key in columns:
                record[key] = numbers(columns[key][index, transcript_of_row.start : transcript_of_row.end])
        return record | {"parts": transcript_of_row.parts}

    return {
        "rewards": _histogram(totals[firsts][counted]),
        "lengths": _histogram(written[valid]),
        "rows": [row(index, rows) for rows in shown for index in rows],
    }


def _histogram(values: np.ndarray) -> dict[str, Any]:
    if not len(values):
        return {"low": None, "high": None, "counts": []}
    low, high = float(values.min()), float(values.max())
    places = np.minimum((values - low) / ((high - low) or 1.0) * _BINS, _BINS - 1).astype(int)
    return {"low": low, "high": high, "counts": np.bincount(places, minlength=_BINS).tolist()}


def _order_episodes(rewards: np.ndarray, counted: np.ndarray, groups: Sequence[int]) -> list[int]:
    """Order episodes: the best and the worst of the first group that has both, then all others."""
    members: dict[int, list[int]] = {}
    for episode, group in enumerate(groups):
        if counted[episode]:
            members.setdefault(group, []).append(episode)
    first: list[int] = []
    for group_members in members.values():
        best, worst = max(group_members, key=rewards.__getitem__), min(group_members, key=rewards.__getitem__)
        if rewards[best] > rewards[worst]:
            first = [best, worst]
            break
    return [*first, *(episode for episode in range(len(rewards)) if episode not in first)]


def _episode_fields(columns: Mapping[str, Tensor], row: int, rows: Sequence[int]) -> dict[str, Any]:
    """Return the episode of a row, its status, and its numbers."""
    fields: dict[str, Any] = {}
    if "episode_ids" in columns:
        fields["episode"] = columns["episode_ids"][row].item()
    if len(rows) > 1:
        earlier = rows[: rows.index(row)]
        fields |= {"fork": len(earlier), "forks": len(rows) - 1, "shared": _shared_prefix_length(columns, row, earlier)}
        if earlier and "forked" in columns:
            fields["why"] = FORKS[int(columns["forked"][row])]
    if "status" in columns:
        fields["status"] = STATUSES[int(columns["status"][row])]
    for name, begin in (("components", "reward/"), ("env", "env/")):
        if columns_of_name := {key.removeprefix(begin): columns[key][row] for key in columns if key.startswith(begin)}:
            fields[name] = {key: numbers(value) for key, value in columns_of_name.items()}
    return fields


def _shared_prefix_length(columns: Mapping[str, Tensor], row: int, earlier: Sequence[int]) -> int:
    """Return the length of the longest prefix that a row shares with an earlier row."""
    ids = columns["input_ids"]
    real = columns["attention_mask"].bool() if "attention_mask" in columns else ids == ids
    same = [(ids[row] == ids[other]) & real[row] & real[other] for other in earlier]
    return max((int(equal.long().cumprod(0).sum()) for equal in same), default=0)
