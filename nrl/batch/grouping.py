"""Grouping rows by length: dealing them to shards, and planning groups of at most so many tokens."""

import heapq
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from nrl.errors import BatchError

__all__ = ["dealt", "plan", "remembered"]

_FOUND: Any = WeakTensorKeyDictionary()


def remembered[T](tensor: Tensor, what: Hashable, find: Callable[[], T]) -> T:
    """What ``find`` finds out about a tensor: once as long as nobody writes into it, whatever batches hold it.

    Args:
        tensor: all that ``find`` looks at.
        what: names the question.
        find: answers it; nobody may change the answer.

    >>> import torch
    >>> mask = torch.ones(2, 3, dtype=torch.bool)
    >>> remembered(mask, "tokens", lambda: int(mask.sum())), remembered(mask, "tokens", lambda: 0)
    (6, 6)
    """
    if tensor.is_inference():  # its writes are not counted
        return find()
    written, answers = _FOUND.get(tensor, (-1, {}))
    if written != tensor._version:
        answers = {}
        _FOUND[tensor] = tensor._version, answers
    if what not in answers:
        answers[what] = find()
    answer: T = answers[what]
    return answer


def dealt(tokens: Sequence[int], n: int) -> list[list[int]]:
    """Deal rows to ``n`` parts: longest first, each to the part with the fewest tokens, then rows, then the first.

    Args:
        tokens: of each row.
        n: at least 1.

    Returns:
        The rows of each part, in their order.

    >>> dealt([1, 3, 1, 2], 2)
    [[1, 2], [0, 3]]
    """
    rows: list[list[int]] = [[] for _ in range(n)]
    parts = [(0, 0, part) for part in range(n)]  # a heap: tokens, rows, which
    for row in sorted(range(len(tokens)), key=lambda row: (-tokens[row], row)):
        load, count, part = parts[0]
        rows[part].append(row)
        heapq.heapreplace(parts, (load + tokens[row], count + 1, part))
    return [sorted(part) for part in rows]


def plan(widths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Choose rows for rectangles of at most ``max_tokens`` tokens, padding included: rows of like width go together.

    Args:
        widths: what each row takes, in tokens.
        max_tokens: bound on rows times the widest of them.

    Returns:
        Row numbers of each rectangle, widest first, so that the one that needs the most memory comes first.

    Raises:
        BatchError: a row alone is wider than ``max_tokens``.

    >>> plan([3, 1, 2, 1], max_tokens=4)
    [[0], [2, 1], [3]]
    """
    order = sorted(range(len(widths)), key=lambda row: (-widths[row], row))
    if order and widths[order[0]] > max_tokens:
        raise BatchError(
            f"microbatches: row {order[0]} has {widths[order[0]]} tokens, more than max_tokens={max_tokens}; "
            "raise max_tokens, or leave out rows that long"
        )
    groups: list[list[int]] = []
    widest = 0
    for row in order:
        if not groups or (len(groups[-1]) + 1) * widest > max_tokens:
            groups.append([])
            widest = max(1, widths[row])
        groups[-1].append(row)
    return groups
