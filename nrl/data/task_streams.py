"""Endless streams of tasks, with an integer as their state."""

import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nrl.arguments import checked
from nrl.batch import Batch
from nrl.data.checks import Tokenizer, exists, shown
from nrl.data.completeness import losses
from nrl.data.formats import Format
from nrl.data.prompts import tasks_of_row
from nrl.data.rendering import render
from nrl.data.sources import is_glob, read
from nrl.envs import arithmetic, reversal
from nrl.envs.contract import Task
from nrl.envs.seeds import check_not_negative
from nrl.errors import DataError
from nrl.log import waiting
from nrl.stream import counting
from nrl.stream.cursors import derived

__all__ = ["GENERATED", "Tasks", "epoch", "tasks"]

_QUIET = 5.0  # seconds of reading between two lines about it

GENERATED: dict[str, Callable[[int, int], Task]] = {"arithmetic": arithmetic.task, "reversal": reversal.task}
"""Tasks that are generated, by name."""


class Tasks(NamedTuple):
    """A stream of tasks: a `Stream`, and facts about its sources.

    Args:
        take: the next ``n`` tasks.
        state: all that ``restore`` needs: the number of tasks taken.
        restore: continue from a state.
        names: of the sources, by their number in ``source``.
        size: tasks in an epoch; None: there are no epochs.
        dropped: rows of the sources that are left out, by reason: ``"format"``, ``"max_tokens"``.

    >>> tasks([{"prompt": "a"}, {"prompt": "b"}]).size
    2
    """

    take: Callable[[int], list[Task]]
    state: Callable[[], dict[str, Any]]
    restore: Callable[[Mapping[str, Any]], None]
    names: tuple[str, ...]
    size: int | None
    dropped: Mapping[str, int]


@checked("data.tasks")
def tasks(
    source: str | Path | Sequence[Task | str | Path] | Callable[[int, int], Task],
    *,
    seed: int = 0,
    format: str | Format | None = None,
    template: str | None = None,
    chat: bool = True,
    shuffle: bool = True,
    tokenizer: Tokenizer | None = None,
    max_tokens: int | None = None,
    collate: Callable[[Iterable[Task], Any], Batch] | None = None,
) -> Tasks:
    """An endless stream of tasks, each epoch in a new order, which is a function of ``(seed, epoch)``.

    Making the stream reads every row once, so that faults show then. With ``max_tokens`` it leaves longer rows out,
    prints how many, and keeps their number in ``dropped``.

    Args:
        source: a file (JSON Lines, a JSON array, Parquet, CSV), a pattern such as ``"data/*.jsonl"``, a folder, a
            dataset of the Hugging Face hub such as ``"openai/gsm8k/main:train"``, a list of these, or mappings. Or
            tasks that are generated: by a pure function from the seed and a number from 0 on, or by ``"arithmetic"``
            or ``"reversal"``, the functions of `nrl.envs.arithmetic` and `nrl.envs.reversal`. Their prompts stay as
            they are. An attribute ``many`` of the function is called with several numbers in place of it, as where each
            task would be a request.
        seed: of the order; of the tasks themselves, where they are generated.
        format: see `rows`.
        template: see `rows`.
        chat: see `rows`.
        shuffle: False: every epoch in the order of the source.
        tokenizer: counts the tokens.
        max_tokens: the most that a row may have; None: no bound.
        collate: `supervised` or `preferences`, if the rows go through it: then a row is as long as the batch that
            ``collate`` makes of it. None: as long as its prompt, as `render` makes it.

    Returns:
        A stream with ``take(n)``, ``state()`` and ``restore(state)``. Its state is the number of tasks taken, over all
        epochs; restoring it presumes the same source and seed.

    Raises:
        DataError: as `rows` does; a negative seed; options for generated tasks; one of ``tokenizer`` and ``max_tokens``
            without the other; or no row is short enough.

    >>> stream = tasks([{"prompt": "a"}, {"prompt": "b"}], seed=1, chat=False)
    >>> sorted(task["prompt"] for task in stream.take(2)), stream.state()
    (['a', 'b'], {'cursor': 2})
    >>> tasks("arithmetic").take(1)[0]["prompt"]
    '17+12='
    """
    check_not_negative("tasks", seed=seed)
    if (tokenizer is None) != (max_tokens is None):
        missing = "max_tokens" if max_tokens is None else "tokenizer"
        raise DataError(f"tasks: to leave long rows out, give both tokenizer and max_tokens; {missing} is missing")
    made_by = GENERATED.get(source) if isinstance(source, str) else source if callable(source) else None
    if made_by is not None:
        name = source if isinstance(source, str) else str(getattr(source, "__name__", type(source).__name__))
        given = {"format": format, "template": template}
        wrong = next((option for option, value in given.items() if value is not None), None)
        if wrong:
            raise DataError(f"tasks: '{name}' makes its own prompts, so it takes no {wrong}; leave it out")
        many = getattr(made_by, "many", lambda seed, numbers: [made_by(seed, number) for number in numbers])
        numbers = counting(name="data.tasks")

        def generated(n: int) -> list[Task]:
            wanted = numbers.take(n)
            made = many(seed, wanted)
            if not isinstance(made, list | tuple) or len(made) != n or not all(isinstance(x, Mapping) for x in made):
                raise DataError(
                    f"tasks: '{name}' made {made!r:.200} for the numbers {wanted!r:.80}; return a mapping for each"
                )
            return list(made)

        return Tasks(*derived(numbers, generated)[:3], (name,), None, {})  # all short
    if isinstance(source, str) and ":" not in source and not exists(Path(source)) and not is_glob(source):
        raise DataError(
            f"tasks: '{shown(source, 300)}' is neither a file (looked in {Path.cwd()}) nor one of the generated "
            f"sources: {', '.join(sorted(GENERATED))}; a dataset of the Hugging Face hub is named with its split, "
            "'owner/name:train'"
        )
    assert not callable(source)
    with waiting(f"data: reading {shown(str(source), 300)}" if isinstance(source, str | Path) else "data: reading"):
        table = read(source)
    made = tasks_of_row(format, template, chat)
    length = _length(tokenizer, collate, max_tokens)
    kept = array("q")  # of each task: its row, and its number among the tasks of the row
    total = unused = long = 0
    last = time.monotonic()
    with losses() as lost:
        for index, row in enumerate(table.rows):
            if time.monotonic() - last > _QUIET:
                last = time.monotonic()
                print(f"data: {index} of {len(table.rows)} rows of {table.name} have been read", flush=True)  # noqa: T201
            found = made(row, table.place(index), table.filled(index))
            unused += not found
            for number, task in enumerate(found):
                total += 1
                if max_tokens is not None and length(task, table.place(index)) > max_tokens:
                    long += 1
                else:
                    kept.extend((index, number))
    for field, count in lost.items():
        print(f"data: the chat template leaves out the {field} in {count} of {total} rows of {table.name}", flush=True)  # noqa: T201
    if long:
        said = f"{long} of {total} rows of {table.name} have more than {max_tokens} tokens"
        if not kept:
            raise DataError(f"tasks: {said}, so none is left; raise max_tokens")
        print(f"data: {said} and are left out", flush=True)  # noqa: T201
    if not kept:
        that = " that the format keeps" if unused else ""
        raise DataError(f"tasks: {table.name} has no rows{that}; give at least one")
    which = np.frombuffer(kept, dtype=np.int64).reshape(-1, 2)

    @lru_cache(maxsize=2)
    def order(epoch: int) -> np.ndarray[Any, Any]:
        return which[np.random.default_rng([seed, epoch]).permutation(len(which))] if shuffle else which

    def at(position: int) -> Task:
        epoch, within = divmod(position, len(which))
        index, number = map(int, order(epoch)[within])
        return made(table.rows[index], table.place(index), table.filled(index))[number]

    dropped = {"format": unused} if format is not None else {}
    dropped |= {"max_tokens": long} if max_tokens is not None else {}
    return Tasks(*counting(at, name="data.tasks")[:3], (table.name,), len(which), dropped)


def epoch(stream: Tasks, most: int | None = None) -> list[Task]:
    """Take the next tasks of a stream, none of them twice, for an evaluation.

    Args:
        stream: from `tasks`.
        most: no more than so many; None: as many as an epoch has.

    Returns:
        At most an epoch. (From the middle of one it reaches into the next, which has another order.)

    Raises:
        DataError: ``most`` is less than 1, or None where the source has no end.

    >>> [task["prompt"] for task in epoch(tasks([{"prompt": "a"}, {"prompt": "b"}], shuffle=False, chat=False), 5)]
    ['a', 'b']
    """
    if most is None and stream.size is None:
        raise DataError(f"epoch: {', '.join(stream.names)} has no end; say how many tasks, as most=")
    if most is not None and most < 1:
        raise DataError(f"epoch: most is {most}; give at least 1")
    return stream.take(min(each for each in (most, stream.size) if each is not None))


def _length(
    tokenizer: Any, collate: Callable[[Iterable[Task], Any], Batch] | None, max_tokens: int | None
) -> Callable[[Task, str], int]:
    """Make the function that counts a task's tokens, given where its row stands, up to one more than may be there."""

    def length(task: Task, place: str) -> int:
        try:
            if collate is None:
                return len(render(task["prompt"], tokenizer, max_tokens=None if max_tokens is None else max_tokens + 1))
            return int(collate([task], tokenizer)["input_ids"].shape[-1])
        except DataError as error:
            raise DataError(f"tasks: {place}: {error}") from error

    return length
