"""Rows and scores of reasoning-gym, in a process that may be killed at any time.

Tasks are made in this process; answers are scored in its fork. Some of the package's scorers are mended first: those
that run a model's text as Python, that raise, or that give 1 to what is no answer.
"""

import ast
import contextlib
import datetime as dt
import difflib
import functools
import json
import math
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nrl.envs.library.reasoning.scorers import EXACT, MENDED
from nrl.envs.pool.fork_worker import Crashed, Fork, Late
from nrl.errors import EnvError

__all__ = ["LONGEST", "Outcome", "Source", "answer_requests"]

LONGEST = 16_384
"""Characters that an answer has at most: twice as many as the longest reference."""

type Outcome = Literal["scored", "unread", "starved"]
"""Whether an answer has a score; or it cannot be read, took too long or brought the process down; or the machine had no
time for it."""


class Source(NamedTuple):
    """A dataset of reasoning-gym with its options, as JSON: a value that can be a key.

    >>> Source("chain_sum", '{"min_terms": 2}').name
    'chain_sum'
    """

    name: str
    options: str = "{}"


_BLOCK = 64  # tasks of one answer, at most
_BLOCK_SECONDS = 0.25  # and about as much time
_REDRAWN = 100  # rows without a question or an answer, one after the other
_SIZE = 2**31 - 1
# Made once, and asked for the row of any number: making one reads a file, which takes 50 to 250 ms
_KEPT = frozenset({"arc_agi", "codeio", "figlet_font", "group_anagrams", "rearc"})
_REFERENCES = {
    "graph_color": "possible_answer",
    "propositional_logic": "example_answer",
    "rubiks_cube": "example_correct_answer",
}
"""Where a row without an answer has one that is right."""


def answer_requests(request: tuple[Any, ...], _: Any = None) -> Any:
    """What a request asks for.

    Args:
        request: ``("names",)``: all datasets. ``("make", source, numbers)``: the question and the answer (or None) of
            the rows that a `Source` has under these numbers, from the first on, as many as there is time for.
            ``("score", source, number, reference, answer, seconds)``: the outcome and the score of an answer.

    Raises:
        EnvError: reasoning-gym is not there, has no such dataset, or rejects its options; or the row has another answer
            than the reference.
    """
    _prepare()
    what, *args = request
    does: dict[str, Callable[..., Any]] = {"names": _names, "make": _made, "score": _scored}
    return does[what](*args)


@functools.cache
def _prepare() -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of what reasoning-gym depends on
            import reasoning_gym
            from reasoning_gym.algorithmic import binary_matrix, spiral_matrix, string_insertion
            from reasoning_gym.arithmetic import time_intervals
            from reasoning_gym.games import n_queens
    except ImportError as error:
        raise EnvError(
            f"reasoning_gym: {sys.executable} has no reasoning-gym ({error}); use executable='gym', or another one "
            "with nrl's extra 'gym'"
        ) from error
    assert reasoning_gym
    for module in (binary_matrix, n_queens, spiral_matrix, string_insertion):
        module.eval = ast.literal_eval  # of what a model wrote
    time_intervals.date = _NoDay  # else a row depends on the day on which it is made


class _NoDay:
    @staticmethod
    def today() -> Any:
        return dt.date(2000, 1, 1)


def _names() -> list[str]:
    from reasoning_gym.factory import DATASETS

    return sorted(set(DATASETS) - {"composite"})


@functools.lru_cache(64)
def _dataset(source: Source, seed: int = 0, size: int = 1) -> Any:
    """A dataset of reasoning-gym."""
    import reasoning_gym

    if source.name not in _names():
        near = difflib.get_close_matches(source.name, _names(), n=3) or _names()
        raise EnvError(f"reasoning_gym: there is no dataset {source.name!r}; there are {', '.join(near)}")
    options = json.loads(source.options)
    try:
        return reasoning_gym.create_dataset(source.name, seed=seed, size=size, **options)
    except Exception as error:
        kind = reasoning_gym.factory.DATASETS[source.name][1]
        known = ", ".join(sorted(kind.__dataclass_fields__.keys() - {"seed", "size"}))
        raise EnvError(
            f"reasoning_gym: {source.name} rejects the options {options} ({type(error).__name__}: {error}); it has "
            f"{known}"
        ) from error


def _dataset_of_row(source: Source, number: int) -> tuple[Any, int]:
    if source.name in _KEPT:
        return _dataset(source, 0, _SIZE), number
    return _dataset.__wrapped__(source, number, 1), 0


@functools.lru_cache(1024)
def _entry(source: Source, number: int) -> Mapping[str, Any]:
    """The row that a dataset has under a number, and with it an answer that is right, where one is known."""
    import numpy as np  # here, since the program that asks needs it not

    for attempt in range(_REDRAWN):
        drawn = (number + attempt * 1_000_003) % _SIZE
        dataset, index = _dataset_of_row(source, drawn)
        random.seed(drawn)  # which some read in place of their own generator
        np.random.seed(drawn)
        with _silence():
            entry = dict(dataset[index])
        if entry["answer"] is None:
            entry["answer"] = (entry.get("metadata") or {}).get(_REFERENCES.get(source.name, ""))
        if entry["answer"] is None:
            return entry
        if not isinstance(entry["answer"], str):
            entry["answer"] = json.dumps(entry["answer"])
        if entry["answer"].strip():  # else the right answer would be none
            return entry
    raise EnvError(f"reasoning_gym: {source.name} made {_REDRAWN} rows whose answer is empty; change its options")


def _made(source: Source, numbers: tuple[int, ...]) -> list[tuple[str, str | None]]:
    made, began = [], time.monotonic()
    for number in numbers[:_BLOCK]:
        entry = _entry(source, number)
        made.append((str(entry["question"]), entry["answer"]))
        if time.monotonic() - began > _BLOCK_SECONDS:
            break
    return made


def _scored(source: Source, number: int, reference: str | None, answer: str, seconds: float) -> tuple[Outcome, float]:
    entry = _entry(source, number)
    if reference is not None and reference != entry["answer"]:
        raise EnvError(
            f"reasoning_gym: the task's answer is {reference!r:.200}, but row {number} of {source.name} has "
            f"{entry['answer']!r:.200}; make tasks and verify them with one version of reasoning-gym"
        )
    _dataset(source)  # so that the next forks have it
    try:
        score = _fork().ask((source, dict(entry), answer), seconds)
    except Late as late:
        return ("unread" if late.busy(seconds) else "starved"), 0.0
    except Crashed as crashed:
        if crashed.signal == 9:  # which this process has not sent
            raise EnvError("reasoning_gym: its process was killed; is there enough memory?") from None
        return "unread", 0.0
    return ("unread", 0.0) if score is None else ("scored", score)


@functools.cache
def _fork() -> Fork:
    return Fork(_score)


@contextlib.contextmanager
def _silence() -> Any:
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


# --- In the fork: what a model wrote is read here alone.


def _score(request: tuple[Source, dict[str, Any], str]) -> float | None:
    """From 0 to 1; None: the answer cannot be read."""
    source, entry, answer = request
    if source.name in EXACT:
        return float(answer == entry["answer"])
    mend = MENDED.get(source.name)
    if mend is not None and not mend.readable(answer, entry):
        return None
    with _silence(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        score = float(_dataset(source).score_answer(answer, entry))
    if not math.isfinite(score):
        return None
    score = min(1.0, max(0.0, score))
    if mend is not None and score > mend.most and not mend.right(answer, entry):
        return mend.most
    return score
