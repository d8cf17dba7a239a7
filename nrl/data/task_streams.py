"""Endless streams of tasks, with an integer as their state."""

import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nrl.arguments import checked, described
from nrl.batch import Batch
from nrl.data.checks import Tokenizer, exists, shown
from nrl.data.completeness import losses
from nrl.data.cursors import Source, counting, map_stream
from nrl.data.fingerprints import Fingerprint, RowHash, check_same_rows, fingerprint_of
from nrl.data.formats import Format, FormatName
from nrl.data.prompts import print_unread, tasks_of_row
from nrl.data.rendering import render
from nrl.data.sources import is_glob, read
from nrl.data.templates import FIELD, template_arguments
from nrl.envs.library import arithmetic, reversal
from nrl.envs.references import TaskCheck, faults_of, report
from nrl.envs.seeds import check_not_negative
from nrl.envs.types import Task
from nrl.errors import DataError
from nrl.log import waiting

__all__ = ["GENERATED", "Tasks", "epoch", "tasks"]

_CHECKED = 10_000  # tasks in memory at a time while they are checked
_IN_VAIN = 1000  # generated tasks in a row of which none can be used, until that is an error
_QUIET = 5.0  # seconds of reading between two lines about it
_DRAWS = 64  # the fewest that `epoch` takes from a mixture at once: most may be of a source that has no more tasks

GENERATED: dict[str, Callable[[int, int], Task]] = {"arithmetic": arithmetic.task, "reversal": reversal.task}
"""Tasks that are generated, by name."""


class Tasks(NamedTuple):
    """A stream of tasks: a `Stream`, and facts about its sources.

    Args:
        take: the next ``n`` tasks.
        state: all that ``restore`` needs: the number of tasks taken, and a fingerprint of the rows.
        restore: continue from a state.
        names: of the sources, by their number in ``source``.
        size: tasks in an epoch; None: there are no epochs.
        dropped: rows of the sources that are left out, by reason: ``"format"``, ``"max_tokens"``, ``"check"``.
        sizes: of a mixture, the tasks in an epoch of each source, by its number; None: that source has no end.
        with_check: from a check to a stream without the tasks to which no answer can be right; itself where there are
            none. None: a check was made already. `nrl.rollouts` asks for that of its environment.

    >>> tasks([{"prompt": "a"}, {"prompt": "b"}]).size
    2
    """

    take: Callable[[int], list[Task]]
    state: Callable[[], dict[str, Any]]
    restore: Callable[[Mapping[str, Any]], None]
    names: tuple[str, ...]
    size: int | None
    dropped: Mapping[str, int]
    sizes: tuple[int | None, ...] = ()
    with_check: "Callable[[TaskCheck], Tasks] | None" = None


@checked("data.tasks")
def tasks(
    source: str | Path | Sequence[Task | str | Path] | Callable[[int, int], Task],
    *,
    seed: int = 0,
    format: FormatName | Format | None = None,
    template: str | None = None,
    chat: bool = True,
    shuffle: bool = True,
    tokenizer: Tokenizer | None = None,
    max_tokens: int | None = None,
    collate: Callable[[Iterable[Task], Any], Batch] | None = None,
    check: TaskCheck | None = None,
    positions: int | None = None,
) -> Tasks:
    """An endless stream of tasks, each epoch in a new order, which is a function of ``(seed, epoch)``.

    Making the stream reads every row once, so that faults show then. With ``max_tokens`` it leaves longer rows out,
    prints how many, and keeps their number in ``dropped``.

    Args:
        source: a file (JSON Lines, a JSON array, Parquet, CSV), a pattern such as ``"data/*.jsonl"``, a folder, a
            dataset of the Hugging Face hub such as ``"openai/gsm8k/main:train"``, a list of these, or mappings. Or
            tasks that are generated: by a pure function from the seed and a number from 0 on, or by ``"arithmetic"``
            or ``"reversal"``, the functions of `nrl.envs.library.arithmetic` and `nrl.envs.library.reversal`. Their
            prompts stay as they are. An attribute ``many`` of the function is called with several numbers in place of
            it, as where each task would be a request. An attribute ``all_rows`` gives the rows of which its tasks are
            all, in an order of each epoch; without it they have no end.
        seed: of the order; of the tasks themselves, where they are generated.
        format: see `rows`.
        template: see `rows`.
        chat: see `rows`.
        shuffle: False: every epoch in the order of the source.
        tokenizer: counts the tokens.
        max_tokens: the most that a row may have; None: no bound.
        collate: `supervised` or `preferences`, if the rows go through it: then a row is as long as the batch that
            ``collate`` makes of it. None: as long as its prompt, as `render` makes it.
        check: says why no answer to a task can be right, as `nrl.envs.references.task_check` has it of a verifier. Rows
            with such a task are left out, and printed with the reason; of generated tasks, when they are made.
        positions: how many tokens the model can read, such as ``trainer.positions``: a longer row that ``max_tokens``
            does not leave out is an error. None: nobody knows.

    Returns:
        A stream with ``take(n)``, ``state()`` and ``restore(state)``. Its state is the number of tasks taken, over all
        epochs, and the number of the source's rows with a hash over them. Restoring it presumes the same seed.

    Raises:
        DataError: as `rows` does; a negative seed; options for generated tasks; one of ``tokenizer`` and ``max_tokens``
            without the other, or ``positions`` without them; no row is short enough, or one is longer than
            ``positions``. When restored: the source has other rows than before.

    >>> stream = tasks([{"prompt": "a"}, {"prompt": "b"}], seed=1, chat=False)
    >>> sorted(task["prompt"] for task in stream.take(2)), stream.state()["cursor"], stream.state()["data"]["rows"]
    (['a', 'b'], 2, 2)
    >>> tasks("arithmetic").take(1)[0]["prompt"]
    '17+12='
    """
    check_not_negative("tasks", seed=seed)
    if (tokenizer is None) != (max_tokens is None):
        missing = "max_tokens" if max_tokens is None else "tokenizer"
        raise DataError(f"tasks: to leave long rows out, give both tokenizer and max_tokens; {missing} is missing")
    if positions is not None and max_tokens is None:
        raise DataError(f"tasks: positions={positions} needs tokenizer and max_tokens, by which rows are counted")
    made_by = GENERATED.get(source) if isinstance(source, str) else source if callable(source) else None
    if made_by is not None:
        name = source if isinstance(source, str) else str(getattr(source, "__name__", type(source).__name__))
        given = {"format": format, "template": template}
        wrong = next((option for option, value in given.items() if value is not None), None)
        if wrong:
            raise DataError(f"tasks: '{name}' makes its own prompts, so it takes no {wrong}; leave it out")
        many = getattr(made_by, "many", lambda seed, numbers: [made_by(seed, number) for number in numbers])
        numbers = counting(name="data.tasks")
        all_rows = made_by.all_rows() if hasattr(made_by, "all_rows") else None
        size = None if all_rows is None else len(all_rows)

        def generated(n: int) -> list[Task]:
            wanted = numbers.take(n)
            made = many(seed, wanted)
            if not isinstance(made, list | tuple) or len(made) != n or not all(isinstance(x, Mapping) for x in made):
                raise DataError(
                    f"tasks: '{name}' made {made!r:.200} for the numbers {wanted!r:.80}; return a mapping for each"
                )
            return list(made)

        fingerprint = None if all_rows is None else fingerprint_of(all_rows)

        def generated_with_check(check: TaskCheck | None) -> Tasks:
            faulty: dict[str, int] = {} if check is None else {"check": 0}
            take = generated if check is None else _without_faults(generated, check, name, faulty)
            usable = size
            if check is not None and all_rows is not None:
                usable = len(all_rows) - len(faults_of(check, all_rows))
            verbs = _with_fingerprint(map_stream(numbers, take), name, fingerprint)
            return Tasks(*verbs, (name,), usable, faulty, with_check=None if check else generated_with_check)

        return generated_with_check(check)
    if isinstance(source, str) and ":" not in source and not exists(Path(source)) and not is_glob(source):
        raise DataError(
            f"tasks: '{shown(source, 300)}' is neither a file (looked in {Path.cwd()}) nor one of the generated "
            f"sources: {', '.join(sorted(GENERATED))}; a dataset of the Hugging Face hub is named with its split, "
            "'owner/name:train'"
        )
    assert not callable(source)
    with waiting(f"data: reading {shown(str(source), 300)}" if isinstance(source, str | Path) else "data: reading"):
        table = read(source)
    unread = Counter[tuple[str, str]]()
    made = tasks_of_row(format, template, chat, unread)
    length = _length(tokenizer, collate, max_tokens)
    kept = array("q")  # of each task: its row, and its number among the tasks of the row
    total = unused = long = beyond = unused_arguments = 0
    longest = (0, "")  # tokens of a row that has more than there are positions, and where it stands
    row_hash = RowHash()
    last = time.monotonic()
    lost = Counter[str]()
    for index, row in enumerate(table.rows):
        if time.monotonic() - last > _QUIET:
            last = time.monotonic()
            print(f"data: {index} of {len(table.rows)} rows of {table.name} have been read", flush=True)  # noqa: T201
        found = made(row, table.place(index), table.filled(index))
        row_hash.add(row)
        unused += not found
        for number, task in enumerate(found):
            total += 1
            unused_arguments += collate is None and bool(template_arguments(task, table.place(index)))
            with losses() as lost_of_task:  # which are counted once for both sides of a pair
                tokens = 0 if max_tokens is None else length(task, table.place(index))
            lost.update(lost_of_task.keys())
            if max_tokens is not None and tokens > max_tokens:
                long += 1
                continue
            kept.extend((index, number))
            if positions is not None and tokens > positions:
                beyond += 1
                longest = max(longest, (tokens, table.place(index)))
    if beyond:
        raise DataError(
            f"tasks: {beyond} of {total} rows have more tokens than the {positions} positions of the model "
            f"(max_position_embeddings); the longest has {longest[0]} ({longest[1]}). Set max_tokens={positions} (in "
            f"the examples max_length={positions}) in place of {max_tokens} to leave them out, or take a model with "
            "more positions"
        )
    print_unread(unread, table.name, total)
    if unused_arguments:
        where = f"{unused_arguments} of {total} rows of {table.name} have '{FIELD}'"
        print(f"data: {where}, which prompts of rollouts do not read; set them in tokenizer.chat_template", flush=True)  # noqa: T201
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

    def tasks_at(index: int) -> tuple[list[Task], str]:
        return made(table.rows[index], table.place(index), table.filled(index)), table.place(index)

    def stream_with_check(check: TaskCheck) -> Tasks:
        usable = array("q", kept)
        faults = _leave_out(usable, check, table.name, tasks_at)
        return stream(usable, {**dropped, "check": faults}) if faults else unchecked

    def stream(usable: "array[int]", dropped: dict[str, int], with_check: Any = None) -> Tasks:
        which = np.frombuffer(usable, dtype=np.int64).reshape(-1, 2)

        @lru_cache(maxsize=2)
        def order(epoch: int) -> np.ndarray[Any, Any]:
            return which[np.random.default_rng([seed, epoch]).permutation(len(which))] if shuffle else which

        def at(position: int) -> Task:
            epoch, within = divmod(position, len(which))
            index, number = map(int, order(epoch)[within])
            return tasks_at(index)[0][number]

        fingerprint = row_hash.fingerprint._replace(tasks=len(which))
        verbs = _with_fingerprint(counting(at, name="data.tasks"), table.name, fingerprint)
        return Tasks(*verbs, (table.name,), len(which), dropped, with_check=with_check)

    dropped = {"format": unused} if format is not None else {}
    dropped |= {"max_tokens": long} if max_tokens is not None else {}
    unchecked = stream(kept, dropped, stream_with_check)
    if check is None:
        return unchecked
    checked = stream_with_check(check)
    return checked if checked is not unchecked else stream(kept, {**dropped, "check": 0})


def _with_fingerprint(stream: Source[Task], name: str, fingerprint: Fingerprint | None) -> tuple[Any, Any, Any]:
    """Return take, state and restore of a stream whose state holds the fingerprint of its rows, if there is one."""
    if fingerprint is None:
        return stream[:3]

    def restore(state: Mapping[str, Any]) -> None:
        if isinstance(state, Mapping) and "data" in state:
            if not isinstance(state["data"], Mapping):
                raise DataError(
                    f"data.tasks: the state has 'data', {described(state['data'])}; restore what state() returned"
                )
            check_same_rows(name, state["data"], fingerprint)
        stream.restore(state)

    return stream.take, lambda: {**stream.state(), "data": fingerprint._asdict()}, restore


def _leave_out(
    kept: "array[int]", check: TaskCheck, name: str, tasks_at: Callable[[int], tuple[list[Task], str]]
) -> int:
    """Take rows out of which a task has no right answer, and return how many.

    Args:
        kept: of each task its row, and its number among the tasks of the row.
        check: finds such tasks.
        name: of the source.
        tasks_at: the tasks of a row, and where the row stands.

    Raises:
        DataError: none is left.
    """
    pairs = [(kept[at], kept[at + 1]) for at in range(0, len(kept), 2)]
    found = list[tuple[int, str]]()
    for start in range(0, len(pairs), _CHECKED):
        some = pairs[start : start + _CHECKED]
        faults = faults_of(check, [tasks_at(index)[0][number] for index, number in some])
        found += [(some[place][0], why) for place, why in faults.items()]
    if not found:
        return 0
    rows = {index for index, _ in found}
    said = report(name, [(tasks_at(index)[1], why) for index, why in found], len(pairs))
    del kept[:]
    for pair in pairs:
        if pair[0] not in rows:
            kept.extend(pair)
    if not kept:
        raise DataError(f"tasks: {said}\nNo task is left; mend the answers, or choose the verifier that reads them")
    print(f"data: {said}", flush=True)  # noqa: T201
    return len(rows)


def _without_faults(
    take: Callable[[int], list[Task]], check: TaskCheck, name: str, faulty: dict[str, int]
) -> Callable[[int], list[Task]]:
    """Return a function that takes others in place of tasks to which no answer can be right.

    Args:
        take: the next tasks of an endless source.
        check: finds such tasks.
        name: of the source.
        faulty: counts them, as ``"check"``.
    """

    def without(n: int) -> list[Task]:
        found, in_vain = list[Task](), 0
        while len(found) < n:
            some = take(n - len(found))
            faults = faults_of(check, some)
            in_vain = in_vain + len(faults) if len(faults) == len(some) else 0
            if faults and (not faulty["check"] or in_vain >= _IN_VAIN):
                said = report(name, [(f"a task of {name}", why) for why in faults.values()], None)
                if in_vain >= _IN_VAIN:
                    raise DataError(f"tasks: {in_vain} in a row: {said}\nMend the source of the tasks")
                print(f"data: {said}", flush=True)  # noqa: T201
            faulty["check"] += len(faults)
            found += [task for place, task in enumerate(some) if place not in faults]
        return found

    return without


def epoch(stream: Tasks, most: int | None = None) -> list[Task]:
    """Take the next tasks of a stream, none of them twice, for an evaluation.

    Where the stream has fewer tasks than ``most``, a line says how many are taken. Of a mixture, a source of which all
    tasks are taken gives no more, and the others go on.

    Args:
        stream: from `tasks` or `mixture`.
        most: no more than so many; None: as many as an epoch has.

    Returns:
        At most an epoch. (From the middle of one it reaches into the next, which has another order.)

    Raises:
        DataError: ``most`` is less than 1, or None where a source has no end.

    >>> rows = tasks([{"prompt": "a"}, {"prompt": "b"}], shuffle=False, chat=False)
    >>> [task["prompt"] for task in epoch(rows, 5)]
    data: the source has 2 rows, fewer than the 5 wanted for an evaluation; each is taken once
    ['a', 'b']
    """
    sizes = stream.sizes or (stream.size,)
    endless = [name for name, size in zip(stream.names, sizes, strict=False) if size is None]
    if most is None and endless:
        raise DataError(f"epoch: {', '.join(endless)} has no end; say how many tasks, as most=")
    if most is not None and most < 1:
        raise DataError(f"epoch: most is {most}; give at least 1")
    total = None if endless else sum(size or 0 for size in sizes)
    count = min(number for number in (most, total) if number is not None)
    if most is not None and count < most:
        wanted = f"fewer than the {most} wanted for an evaluation; each is taken once"
        print(f"data: {', '.join(stream.names)} has {count} rows, {wanted}", flush=True)  # noqa: T201
    if not stream.sizes:
        return stream.take(count)
    left = list(sizes)
    taken: list[Task] = []
    while len(taken) < count:
        for task in stream.take(max(count - len(taken), _DRAWS)):
            number = task["source"]
            size = left[number]
            if size == 0 or len(taken) == count:
                continue
            taken.append(task)
            left[number] = None if size is None else size - 1
    return taken


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
