"""Rows with a common beginning: finding them and keeping them together, so that it is computed once.

Rows that answer one prompt begin with the same tokens. These are found by comparing tokens, so group numbers are not
needed, the order of the rows does not matter, and other tokens that happen to be equal count, too. Rows with different
media have nothing in common, because the same tokens stand for different things. Tokens that went to different experts
(``routes``) are different tokens, because their states are.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from nrl.batch import Parts, lengths, microbatches
from nrl.batch.ragged import is_ragged, memory_of, number_rows, parts_of
from nrl.batch.values import memoize

__all__ = ["common_prefixes", "media_numbers", "microbatches_by_prefix", "routed_tokens"]

_PART_COST = 500
"""The cost of one more micro-batch, in tokens."""


def common_prefixes(
    ids: np.ndarray, sizes: np.ndarray, media: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Group rows by common first tokens, to compute the common tokens of each set once.

    Sorted rows with the first k tokens in common are neighbours, hence the candidates form a tree. A set either
    shares the k tokens common to all of its rows and saves ``(rows - 1) * k``, or is split into smaller sets with
    longer common beginnings, whichever saves more. The tree is built from its leaves by joining the two neighbours
    with the longest common beginning. No single k would save more for all rows.

    Args:
        ids: ``[B, T]`` integers, right-padded, as from `routed_tokens`.
        sizes: ``[B]`` integers, the tokens of each row that count.
        media: ``[B]`` integers, different for rows with different media: equal tokens of these rows are not the same
            beginning. None: no media.

    Returns:
        stem: ``[B]`` int64, a row of the same set, the same one for the whole set.
        shared: ``[B]`` int64, the number of first tokens that the set has in common; all tokens of a row alone.

    >>> ids = np.array([[5, 6, 1, 2], [7, 7, 7, 7], [5, 6, 3, 0]])
    >>> common_prefixes(ids, np.array([4, 4, 3]))
    (array([0, 1, 0]), array([2, 4, 2]))
    """
    keys, media = ids.astype(">i8"), np.zeros(len(ids), np.int64) if media is None else media
    sorted_rows = sorted(range(len(ids)), key=lambda row: (media[row], keys[row, : sizes[row]].tobytes()))
    order = np.array(sorted_rows, dtype=np.int64)
    alike = np.where(np.diff(media[order]) == 0, _count_common(ids[order], sizes[order]), 0)
    # A set of sorted rows is known by its first and its last one, which know each other
    last, first = list(range(len(ids))), list(range(len(ids)))
    saved = [0] * len(ids)  # tokens saved by the set that begins here
    cut: dict[int, list[tuple[int, int, int]]] = {}  # parts of the set that begins here: (first, end, shared)
    for neighbour in np.argsort(-alike, kind="stable").tolist():
        common = int(alike[neighbour])
        if common == 0:
            break
        begin, end = first[neighbour], last[neighbour + 1]
        last[begin], first[end] = end, begin
        parts = saved[begin] + saved[neighbour + 1]
        saved_whole = (end - begin) * common
        below = cut.pop(begin, []) + cut.pop(neighbour + 1, [])
        saved[begin], cut[begin] = (saved_whole, [(begin, end + 1, common)]) if saved_whole >= parts else (parts, below)
    stem, shared = np.arange(len(ids)), np.array(sizes, dtype=np.int64)
    for sets in cut.values():
        for begin, stop, common in sets:
            rows = order[begin:stop]
            stem[rows], shared[rows] = rows.min(), common
    return stem, shared


def _count_common(ids: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Count the first tokens that each row has in common with the next one."""
    differs = ids[1:] != ids[:-1]
    first = np.where(differs.any(1), differs.argmax(1), ids.shape[1]) if ids.shape[1] else np.zeros(len(differs), int)
    common: np.ndarray = np.minimum(np.minimum(first, sizes[1:]), sizes[:-1])
    return common


def routed_tokens(batch: TensorDict) -> np.ndarray:
    """Number tokens for `common_prefixes`: equal numbers where tokens and their routes are equal.

    Returns:
        ``[B, T]`` integers: ``input_ids`` themselves, where the batch has no ``routes``.

    >>> ids, routes = torch.tensor([[5, 5, 6]]), torch.tensor([0, 1, 1]).view(1, 3, 1, 1)
    >>> routed_tokens(TensorDict({"input_ids": ids, "routes": routes}, batch_size=[1])).tolist()
    [[0, 1, 2]]
    """
    ids = batch["input_ids"].flatten(0, -2)
    if "routes" not in batch.keys():
        token_ids: np.ndarray = ids.cpu().numpy()
        return token_ids
    routes = batch["routes"].flatten(0, batch["input_ids"].ndim - 1).flatten(1).cpu()
    keys = torch.cat([ids.cpu().reshape(-1, 1).view(torch.int16), routes.to(torch.int16)], 1).contiguous().numpy()
    # Tokens can be sorted by one value each.
    scalar_keys = keys.view(np.dtype((np.void, keys.shape[1] * keys.itemsize)))[:, 0]
    numbers: np.ndarray = np.unique(scalar_keys, return_inverse=True)[1]
    return numbers.reshape(ids.shape)


def media_numbers(batch: TensorDict) -> np.ndarray | None:
    """Number rows by their media for `common_prefixes`: equal numbers where all media are equal.

    Media are read once: a batch remembers the numbers, and parts of `microbatches_by_prefix` have those of the whole.

    Returns:
        ``[B]`` int64; None where the batch has none.
    """
    numbers_by_column = [_numbers(column) for column in _media(batch)]
    if len(numbers_by_column) < 2:
        return numbers_by_column[0] if numbers_by_column else None
    numbers: np.ndarray = np.unique(np.stack(numbers_by_column), axis=1, return_inverse=True)[1]
    return numbers.reshape(-1)


def _media(batch: TensorDict) -> list[Tensor]:
    """Return the columns of media, always in the same order."""
    if "media" not in batch.keys():
        return []
    media: Any = batch["media"].reshape(-1) if batch.ndim > 1 else batch["media"]
    leaves: Any = media.values(True, True, sort=True) if isinstance(media, TensorDict) else [media]
    return list(leaves)


def _numbers(column: Tensor) -> np.ndarray:
    return memoize(memory_of(column), _key(column), partial(number_rows, column))


def _key(column: Tensor) -> tuple[str, bytes]:
    """Return a key of the rows that the memory of a column is cut into."""
    return "numbers", parts_of(column)[1].numpy().tobytes() if is_ragged(column) else b""


def _share_media_numbers(batch: TensorDict, parts: Parts) -> Parts:
    """Pass the media numbers of a batch to its parts, so that media are read once."""
    for rows, part in zip(parts.rows, parts, strict=True):
        for full_column, column in zip(_media(batch), _media(part), strict=True):
            memoize(memory_of(column), _key(column), partial(_numbers(full_column).take, rows.numpy()))
    return parts


def microbatches_by_prefix(batch: TensorDict, *, max_tokens: int) -> Parts:
    """Split a batch as `nrl.microbatches` does, but keep rows that begin alike in one part if that saves tokens.

    `nrl.microbatches` puts rows of like length together, so the answers to a prompt are in all parts. With packing,
    padding costs nothing, so parts of like beginnings may be cheaper, though there are more of them. The cost counts
    the tokens that a model computes, with each common beginning once a part, and a constant for each part.

    Args:
        batch: rows; or pairs, which are split by length alone.
        max_tokens: bound on the tokens of each part, padding counted.

    Raises:
        BatchError: one row alone has more than ``max_tokens`` tokens.

    >>> ids = torch.arange(4)[:, None] // 2 * torch.ones(1, 600, dtype=torch.int64)
    >>> mask = torch.arange(600) < torch.tensor([[599], [600], [600], [599]])
    >>> batch = TensorDict({"input_ids": ids, "attention_mask": mask}, batch_size=[4])
    >>> [rows.tolist() for rows in microbatches_by_prefix(batch, max_tokens=1200).rows]
    [[1, 0], [2, 3]]
    """
    parts = microbatches(batch, max_tokens=max_tokens)
    if len(parts) < 2 or batch.ndim > 1:
        return parts
    sizes = lengths(batch).cpu().numpy()
    stem, shared = common_prefixes(routed_tokens(batch), sizes, media_numbers(batch))

    def cost(plan: Sequence[np.ndarray]) -> int:
        beginnings = sum(int(shared[np.unique(stem[rows])].sum()) for rows in plan)
        return beginnings + int((sizes - shared).sum()) + _PART_COST * len(plan)

    plan = _fill(sizes, stem, max_tokens)
    if cost(plan) >= cost([rows.numpy() for rows in parts.rows]):
        return _share_media_numbers(batch, parts)
    return _share_media_numbers(batch, Parts(batch, [torch.from_numpy(rows) for rows in plan], trim=True))


def _fill(sizes: np.ndarray, stem: np.ndarray, max_tokens: int) -> list[np.ndarray]:
    """Rows one set after the other, those with the longest rows first, into parts of at most ``max_tokens``."""
    longest = np.zeros_like(sizes)
    np.maximum.at(longest, stem, sizes)
    parts: list[list[int]] = [[]]
    widest = 1
    for row in np.lexsort((-sizes, stem, -longest[stem])).tolist():
        width = max(widest, int(sizes[row]))
        if parts[-1] and (len(parts[-1]) + 1) * width > max_tokens:
            parts.append([])
            width = max(1, int(sizes[row]))
        parts[-1].append(row)
        widest = width
    return [np.array(part, dtype=np.int64) for part in parts]
