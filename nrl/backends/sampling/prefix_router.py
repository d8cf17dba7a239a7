"""Routing requests to engines: to one that has read the beginning of the prompt, unless it is too busy."""

import heapq
import math
from collections import OrderedDict
from collections.abc import Sequence

from nrl.backends.types import Chunks

__all__ = ["Router"]

_BLOCK = 64  # tokens; beginnings are multiples of it
_REMEMBERED = 100_000  # beginnings
_SLACK = 1.25  # how many times its share an engine may get of prompts whose beginning it has read


class Router:
    """A router that remembers which engine has read which beginnings of prompts.

    An engine that has read a prompt, or one with the same beginning, holds its keys and values, and another engine
    would compute them again. But waiting for a busy engine while another idles costs more.

    Args:
        engines: how many there are.

    >>> router = Router(2)
    >>> router.choose([[1]], [0, 0]), router.choose([[2]], [1, 0]), router.choose([[2], [3]], [1, 1])
    ([0], [1], [1, 0])
    """

    def __init__(self, engines: int) -> None:
        self._engines = engines
        self._readers: OrderedDict[int, int] = OrderedDict()

    def choose(self, prompts: Sequence[Chunks], load: Sequence[float]) -> list[int]:
        """Choose an engine for each of some prompts.

        Args:
            prompts: token ids; equal tokens with other media are other prompts.
            load: the number of requests of each engine; infinite, if an engine takes none.

        Returns:
            For each prompt, the engine with the longest beginning of it, if the beginning is at least half of the
            prompt and the engine has at most a quarter more than its share of requests; else the first engine with the
            fewest requests.
        """
        load = list(load)
        taking = [count for count in load if count < math.inf]
        limit = (sum(taking) + len(prompts)) / max(1, len(taking)) * _SLACK
        fewest = [(count, engine) for engine, count in enumerate(load)]
        heapq.heapify(fewest)
        choices = []
        for prompt in prompts:
            beginnings = _beginnings(prompt)
            while fewest[0][0] != load[fewest[0][1]]:  # it has been given more since
                heapq.heapreplace(fewest, (load[fewest[0][1]], fewest[0][1]))
            least = fewest[0][1]
            readers = (self._readers[key] for n, key in beginnings if 2 * n >= len(prompt) and key in self._readers)
            reader = next(readers, least)
            chosen = reader if load[reader] < limit else least
            load[chosen] += 1
            self._note(beginnings, chosen)
            choices.append(chosen)
        return choices

    def has_read(self, engine: int, tokens: Sequence[int]) -> None:
        """Note that an engine holds a prompt with its completion; an episode's next turn begins with them."""
        self._note(_beginnings(tokens), engine)

    def _note(self, beginnings: Sequence[tuple[int, int]], engine: int) -> None:
        for _, key in beginnings:
            self._readers[key] = engine
            self._readers.move_to_end(key)
        while len(self._readers) > _REMEMBERED:
            self._readers.popitem(last=False)


def _beginnings(prompt: Chunks) -> list[tuple[int, int]]:
    """Return lengths and hashes of the beginnings of a prompt, the longest first."""
    beginnings, key = [], 0
    for start in range(0, len(prompt), _BLOCK):
        block = tuple(prompt[start : start + _BLOCK])
        key = hash((key, block))
        beginnings.append((start + len(block), key))
    return beginnings[::-1]
