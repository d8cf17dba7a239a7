"""Which of several engines completes a prompt: one that has read its beginning already, if it is not too busy."""

import math
from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["Spread"]

_BLOCK = 64  # tokens after which beginnings are compared
_REMEMBERED = 100_000  # beginnings
_SLACK = 1.25  # of its share, which an engine may have for the sake of what it has read


class Spread:
    """Remembers who has read what.

    An engine that has been given a prompt, or one with the same beginning, holds its keys and values; to read it once
    more elsewhere is waste. To wait for a busy engine while another idles is more of it.

    Args:
        engines: how many there are.

    >>> spread = Spread(2)
    >>> spread.choose([1], [0, 0]), spread.choose([2], [1, 0]), spread.choose([2], [1, 1]), spread.choose([2], [1, 9])
    (0, 1, 1, 0)
    """

    def __init__(self, engines: int) -> None:
        self._engines = engines
        self._readers: OrderedDict[int, int] = OrderedDict()

    def choose(self, prompt: Sequence[int], load: Sequence[float], coming: int = 1) -> int:
        """The engine for a prompt.

        Args:
            prompt: token ids.
            load: for each engine, how many requests it has; infinite, if it takes none.
            coming: how many are to be spread, this one included.

        Returns:
            The one that was given the longest beginning of the prompt, if that is at least half of it and the engine
            has at most a quarter more than its share; else the one with the fewest.
        """
        beginnings = _beginnings(prompt)
        least = min(range(self._engines), key=lambda engine: load[engine])
        taking = [each for each in load if each < math.inf]
        share = (sum(taking) + coming) / max(1, len(taking))
        known = (self._readers[key] for length, key in beginnings if key in self._readers and 2 * length >= len(prompt))
        reader = next(known, least)
        chosen = reader if load[reader] < share * _SLACK else least
        self._note(beginnings, chosen)
        return chosen

    def has_read(self, engine: int, tokens: Sequence[int]) -> None:
        """An engine holds these: a prompt with its completion, which the next turn of an episode begins with."""
        self._note(_beginnings(tokens), engine)

    def _note(self, beginnings: Sequence[tuple[int, int]], engine: int) -> None:
        for _, key in beginnings:
            self._readers[key] = engine
            self._readers.move_to_end(key)
        while len(self._readers) > _REMEMBERED:
            self._readers.popitem(last=False)


def _beginnings(prompt: Sequence[int]) -> list[tuple[int, int]]:
    """Lengths and hashes of beginnings, the longest first."""
    found, key = [], 0
    for start in range(0, len(prompt), _BLOCK):
        block = tuple(prompt[start : start + _BLOCK])
        key = hash((key, block))
        found.append((start + len(block), key))
    return found[::-1]
