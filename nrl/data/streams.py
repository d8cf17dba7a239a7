"""Streams of tasks."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from nrl.data.prompts import rows
from nrl.envs import arithmetic
from nrl.envs.base import Task
from nrl.errors import DataError
from nrl.stream import Source, counting

__all__ = ["tasks"]

_GENERATED: dict[str, Callable[[int, int], Task]] = {"arithmetic": arithmetic.task}


def tasks(
    source: str | Path | Sequence[Task],
    *,
    seed: int = 0,
    template: str | None = None,
    chat: bool = True,
    shuffle: bool = True,
) -> Source[Task]:
    """An endless stream of tasks, each epoch in a new order, which is a function of ``(seed, epoch)``.

    Args:
        source: a JSON Lines file, mappings, or ``"arithmetic"``, the generated sums of `nrl.envs.arithmetic`, whose
            prompts stay plain text.
        seed: of the order; of the sums themselves, where they are generated.
        template: see `rows`.
        chat: see `rows`.
        shuffle: False: every epoch in the order of the source.

    Returns:
        A stream with ``take(n)``, ``state()`` and ``restore(state)``. Its state is the number of tasks taken, over all
        epochs; restoring it presumes the same source and seed.

    Raises:
        DataError: as `rows` does; a negative seed; a template for generated sums.

    >>> stream = tasks([{"prompt": "a"}, {"prompt": "b"}], seed=1, chat=False)
    >>> sorted(task["prompt"] for task in stream.take(2)), stream.state()
    (['a', 'b'], {'cursor': 2})
    >>> tasks("arithmetic").take(1)[0]["prompt"]
    '17+12='
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise DataError(f"tasks: seed is {seed!r}; it must be an integer that is not negative")
    if isinstance(source, str) and source in _GENERATED:
        if template is not None:
            raise DataError(f"tasks: '{source}' makes its own prompts, so it takes no template; leave it out")
        return counting(partial(_GENERATED[source], seed), name="data.tasks")
    if isinstance(source, str) and not Path(source).exists():
        raise DataError(
            f"tasks: '{source}' is neither a file (looked in {Path.cwd()}) nor one of the generated sources: "
            f"{', '.join(sorted(_GENERATED))}"
        )
    found = rows(source, template=template, chat=chat)

    @lru_cache(maxsize=2)
    def order(epoch: int) -> list[int]:
        permutation: list[int] = np.random.default_rng([seed, epoch]).permutation(len(found)).tolist()
        return permutation

    def at(index: int) -> Task:
        epoch, position = divmod(index, len(found))
        return dict(found[order(epoch)[position] if shuffle else position])

    return counting(at, name="data.tasks")
