"""`reasoning_gym`: the tasks of reasoning-gym and their verifier.

A task is a function of ``(seed, index)`` alone, wherever and in whatever order tasks are made. So it holds its dataset,
the dataset's options and a number, and not what reasoning-gym knows about it; the verifier makes that anew.
"""

import asyncio
import functools
import json
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import attrs

from nrl.envs.library.reasoning.scorer_worker import LONGEST, Source, answer_requests
from nrl.envs.pool.pool import pooled
from nrl.envs.replies import split_reasoning
from nrl.envs.seeds import generator
from nrl.envs.types import Score, Task, Trace
from nrl.envs.verifiers import extracts
from nrl.errors import ArgumentError, EnvError
from nrl.runtime.venvs.registry import Executable, check_has
from nrl.runtime.venvs.registry import executable as registered

__all__ = ["ReasoningVerifier", "datasets", "reasoning_gym", "stated_answer", "task"]

_KEPT = 4096  # outcomes, and tasks
_START = 90.0  # seconds of a call in which a worker imports reasoning-gym and makes a row
_ROWS = 2**31 - 1


class ReasoningVerifier(Protocol):
    """What `reasoning_gym` returns: a verifier with an extractor, and its tasks; ``forget`` makes every call a new one.

    >>> def names(verifier: ReasoningVerifier) -> list[str]:
    ...     return [verifier.tasks(0, index)["reasoning_gym"]["dataset"] for index in range(4)]
    """

    timeout: None
    forget: Callable[[], None]
    extract: Callable[[str], str | None]
    tasks: Callable[[int, int], Task]

    async def __call__(self, task: Task, trace: Trace) -> Score:
        """The verdict on a trace."""
        ...


def reasoning_gym(
    dataset: str | Mapping[str, float] = "chain_sum",
    config: Mapping[str, Any] | None = None,
    *,
    suffix: str = "",
    partial: bool = True,
    workers: int | None = None,
    executable: str | Executable = "gym",
    timeout: float = 2.0,
) -> ReasoningVerifier:
    """A verifier of the tasks of reasoning-gym, and the tasks of one of its datasets, or of several.

    The reward is the score that reasoning-gym gives, from 0 to 1. An answer that is the task's has 1 at once. Every
    other one is scored in a process of this machine that is killed where it takes too long. Scorers that reward what is
    no answer are mended (docs/reasoning_gym.md).

    An empty answer, one of more than 16,384 characters, and one on which the scorer fails, takes too long or brings the
    process down, has a reward of 0 with the status ``"parse_fail"``: the model wrote it. Only where the machine had no
    time for an answer, the status is ``"timeout"``, and the row is left out.

    Args:
        dataset: that ``.tasks`` draws from: a name (`datasets`), or several with their weights. Tasks of all datasets
            are verified, whatever it is.
        config: the dataset's options, such as ``{"min_terms": 2}``; of several, by dataset.
        suffix: text behind each question, such as ``"\\nEnd with <answer>...</answer>."``.
        partial: false: every score below 1 is a reward of 0.
        workers: how many processes, at most; None: one for each processor.
        executable: their Python environment, which has reasoning-gym.
        timeout: seconds for an answer.

    Returns:
        An ``async`` verifier with an extractor (`stated_answer`), whose attribute ``task`` is ``(seed, index) -> task``
        (`task`). Its own ``timeout`` is None.

    Raises:
        ValueError: ``workers`` is not positive, or ``timeout`` is no positive number (None neither).
        EnvError: ``dataset`` is empty, or a weight is negative; or, when called, the task is none of these, or
            reasoning-gym is not there. Whether there is such a dataset, and such an option, its process says when the
            first task is made.

    >>> import asyncio
    >>> verify = reasoning_gym("chain_sum", {"max_terms": 2}, workers=1)
    >>> found = verify.tasks(0, 0)
    >>> asyncio.run(verify(found, Trace(found["prompt"], [f"So it is <answer>{found['answer']}</answer>."])))
    Score(reward=1.0, status='ok', components={})

    Source: reasoning-gym 0.1.25 (Stojanovski et al., 2025), https://github.com/open-thought/reasoning-gym.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise ArgumentError(
            f"reasoning_gym: timeout is {timeout!r}; give seconds, more than 0: each answer has a limit, as some "
            "scorers never end"
        )
    _weights(dataset)
    worker: Any = answer_requests  # it has the arguments of a verifier only in number
    check_has("reasoning_gym", executable, "reasoning_gym")
    ask: Any = pooled(worker, workers=workers, executable=_seeded(executable), timeout=_START + timeout)
    outcomes: dict[tuple[Source, int, str], Score] = {}

    @extracts(stated_answer)
    async def score(task: Task, trace: Trace) -> Score:
        source, number = _row(task)
        reference, answer = task.get("answer"), stated_answer(trace.answer)
        if answer is not None and reference is not None and answer == str(reference).strip():
            return Score(1.0)
        if answer is None or len(answer) > LONGEST:
            return Score(0.0, "parse_fail")
        found = outcomes.get((source, number, answer))
        if found is None:
            outcome, value = await ask(("score", source, number, reference, answer, timeout), None)
            if outcome == "starved":
                return Score(0.0, "timeout")
            found = Score(value if partial or value >= 1.0 else 0.0, "ok" if outcome == "scored" else "parse_fail")
            if len(outcomes) >= _KEPT:
                outcomes.pop(next(iter(outcomes)), None)
            outcomes[source, number, answer] = found
        return found

    made: Any = score
    made.forget = outcomes.clear
    made.timeout = None  # that of an answer begins when it is scored
    made.tasks = functools.partial(task, dataset=dataset, config=config, suffix=suffix, executable=executable)
    return made  # type: ignore[no-any-return]


def task(
    seed: int,
    index: int,
    *,
    dataset: str | Mapping[str, float] = "chain_sum",
    config: Mapping[str, Any] | None = None,
    suffix: str = "",
    executable: str | Executable = "gym",
) -> Task:
    """The task that a seed has at an index.

    Args:
        seed: not negative. Rows of one seed and those of another have nothing to do with each other.
        index: not negative.
        dataset: a name; or several with their weights, of which each task draws one.
        config: the dataset's options; of several, by dataset.
        suffix: text behind the question.
        executable: the Python environment, which has reasoning-gym, of the process that makes tasks. There is one for
            the whole program; it makes tasks ahead, for a quarter of a second.

    Returns:
        ``prompt``, the question; ``answer``, one that is right, unless none is known (``boxnet``, ``rush_hour``);
        ``reasoning_gym``, what the verifier makes the row of: its ``dataset``, its ``number`` and its ``config``.

    Raises:
        EnvError: ``seed`` or ``index`` is negative or no integer, there is no such dataset or option, or reasoning-gym
            is not there.

    >>> found = task(0, 0, dataset="spell_backward", config={"max_word_len": 4})
    >>> found["reasoning_gym"]
    {'dataset': 'spell_backward', 'number': 1826701614, 'config': {'max_word_len': 4}}
    """
    for name, value in (("seed", seed), ("index", index)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise EnvError(f"reasoning_gym: {name} is {value!r}; it must be an integer that is not negative")
    weights = _weights(dataset)
    key = (json.dumps(weights), json.dumps(config or {}, sort_keys=True), _seeded(executable))
    question, answer, row = _tasks(*key).at(seed, index)
    return {"prompt": question + suffix} | ({} if answer is None else {"answer": answer}) | {"reasoning_gym": row}


def datasets(*, executable: str | Executable = "gym") -> tuple[str, ...]:
    """The names of all datasets of reasoning-gym.

    Args:
        executable: the Python environment of the process that is asked.

    >>> len(datasets()) > 100, "chain_sum" in datasets()
    (True, True)
    """
    return tuple(_asked(_seeded(executable), ("names",)))


def stated_answer(response: str) -> str | None:
    """Return the answer in a response: between the last ``<answer>`` and ``</answer>``, or all behind its reasoning.

    Args:
        response: what the model wrote.

    Returns:
        The answer without white space around it; None: there is none, or its reasoning did not end.

    >>> stated_answer("<think>2+2</think> It is <answer> 4 </answer>"), stated_answer(" 4\\n"), stated_answer(" ")
    ('4', '4', None)
    """
    answer = split_reasoning(response).answer
    end = answer.rfind("</answer>")
    begin = answer.rfind("<answer>", 0, end) if end >= 0 else -1
    return (answer[begin + len("<answer>") : end] if begin >= 0 else answer).strip() or None


def _weights(dataset: str | Mapping[str, float]) -> dict[str, float]:
    weights = {dataset: 1.0} if isinstance(dataset, str) else {str(name): float(dataset[name]) for name in dataset}
    if any(not weight >= 0 for weight in weights.values()) or not sum(weights.values()) > 0:
        raise EnvError(
            f"reasoning_gym: dataset is {dataset!r}; give a name, or several with weights, of which none is negative "
            "and one is positive"
        )
    return weights


def _row(task: Task) -> tuple[Source, int]:
    """What a task was made of."""
    row = task.get("reasoning_gym")
    name, number = (row.get("dataset"), row.get("number")) if isinstance(row, Mapping) else (None, None)
    if row is None or not isinstance(name, str) or not isinstance(number, int):
        raise EnvError(
            f"reasoning_gym: the task has no 'reasoning_gym' with a dataset and a number, only "
            f"{', '.join(map(repr, task)) or 'nothing'}; verify tasks that reasoning_gym(...).tasks has made"
        )
    return Source(name, json.dumps(row.get("config") or {}, sort_keys=True)), number


def _seeded(executable: str | Executable) -> Executable:
    """With one order of sets in all of its processes, on which some rows depend."""
    found = registered(executable)
    return attrs.evolve(found, env={**found.env, "PYTHONHASHSEED": "0"})


# --- Tasks are asked for one by one, from any thread, and made in blocks, in a process.


class _Tasks:
    """Those of some datasets."""

    def __init__(self, weights: Mapping[str, float], config: Mapping[str, Any], executable: Executable) -> None:
        several = len(weights) > 1
        self._names, self._executable = list(weights), executable
        self._shares = [weight / sum(weights.values()) for weight in weights.values()]
        options = {name: config.get(name, {}) for name in weights} if several else dict.fromkeys(weights, config)
        if several and (strange := sorted(set(config) - set(weights))):
            raise EnvError(
                f"reasoning_gym: config has {', '.join(strange)}, and the datasets are {', '.join(weights)}; where "
                "there are several, give options by dataset"
            )
        self._options = options
        self._sources = {name: Source(name, json.dumps(options[name], sort_keys=True)) for name in weights}
        self._made: dict[tuple[str, int], tuple[str, str | None]] = {}
        self._guard = threading.Lock()

    def at(self, seed: int, index: int) -> tuple[str, str | None, dict[str, Any]]:
        """Question, answer and row."""
        name, number = self._drawn(seed, index)
        with self._guard:
            if (name, number) not in self._made:
                ahead = [each for i in range(64) if (each := self._drawn(seed, index + i))[0] == name]
                numbers = tuple(number for _, number in ahead)
                if len(self._made) >= _KEPT:
                    self._made.clear()
                rows = _asked(self._executable, ("make", self._sources[name], numbers))
                self._made.update(zip(((name, number) for number in numbers), rows, strict=False))
            question, answer = self._made[name, number]
        return question, answer, {"dataset": name, "number": number, "config": dict(self._options[name])}

    def _drawn(self, seed: int, index: int) -> tuple[str, int]:
        draw = generator(seed, index)
        number = int(draw.integers(_ROWS))
        return self._names[int(draw.choice(len(self._names), p=self._shares))], number


@functools.lru_cache(64)
def _tasks(weights: str, config: str, executable: Executable) -> _Tasks:
    return _Tasks(json.loads(weights), json.loads(config), executable)


@functools.lru_cache(8)
def _maker(executable: Executable) -> Any:
    worker: Any = answer_requests
    return pooled(worker, workers=1, executable=executable, timeout=_START)


def _asked(executable: Executable, request: tuple[Any, ...]) -> Any:
    """The answer of the process that makes tasks; this thread waits for it, also where it runs an event loop."""
    found: list[Any] = []

    def ask() -> None:
        try:
            found.append((asyncio.run(_maker(executable)(request, None)), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=ask, name="reasoning_gym")
    thread.start()
    thread.join()
    answer, error = found[0]
    if error is not None:
        raise error
    return answer
