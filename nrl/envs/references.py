"""Check tasks before a run: find those to which no answer can be right.

A verifier or an environment may have a ``check_task``: a function of a task, plain or ``async``, that returns why no
answer to the task can be right, or None. `nrl.data.tasks` asks it for every row before the first step.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from nrl.envs.types import Task, settled
from nrl.errors import EnvError

__all__ = ["TaskCheck", "faults_of", "report", "task_check"]

type TaskCheck = Callable[[Task], str | Awaitable[str | None] | None]
"""``task -> why no answer to it can be right``; None: some answer can."""

_TOGETHER = 1000  # tasks that are checked at a time
_SHOWN = 20


def task_check(part: Any) -> TaskCheck | None:
    """Return the check of a verifier or an environment; of an environment without one, its verifier's.

    >>> from nrl.envs import number, single_turn
    >>> task_check(single_turn(number))({"answer": "no number"})[:16]
    "task['answer'] i"
    """
    check: TaskCheck | None = getattr(part, "check_task", None)
    verifier = getattr(part, "verifier", None)
    return check if check is not None or verifier is None else task_check(verifier)


def faults_of(check: TaskCheck, tasks: Sequence[Task]) -> dict[int, str]:
    """Return why no answer can be right, for those tasks of which that is so, by their place.

    A check that raises an `EnvError` about a task, such as of one without an answer, has found a fault.

    >>> faults_of(lambda task: None if task["answer"] else "no answer", [{"answer": 1}, {"answer": 0}])
    {1: 'no answer'}
    """

    async def one(task: Task) -> str | None:
        try:
            found = await settled(check(task))
            return None if found is None else str(found)
        except EnvError as error:
            return str(error)

    async def all_of_them() -> list[str | None]:
        found = list[str | None]()
        for start in range(0, len(tasks), _TOGETHER):
            found += await asyncio.gather(*map(one, tasks[start : start + _TOGETHER]))
        return found

    return {place: why for place, why in enumerate(_run(all_of_them)) if why}


def _run[T](make: Callable[[], Awaitable[T]]) -> T:
    """Run a coroutine to its end, also where an event loop runs in this thread already."""

    async def whole() -> T:
        return await make()

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(whole())
    found = list[T]()
    errors = list[BaseException]()

    def target() -> None:
        try:
            found.append(asyncio.run(whole()))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=target, name="check of tasks")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return found[0]


def report(name: str, faults: Sequence[tuple[str, str]], total: int | None) -> str:
    """Return what to say of tasks that are left out: where each stands and why, the first twenty.

    >>> print(report("a.jsonl", [("a.jsonl, line 2", "task['answer'] is '', ...")], 3))
    1 of 3 tasks of a.jsonl are left out, since no answer to them can be right:
      a.jsonl, line 2: task['answer'] is '', ...
    """
    of_them = "" if total is None else f" of {total}"
    lines = [f"{len(faults)}{of_them} tasks of {name} are left out, since no answer to them can be right:"]
    lines += [f"  {place}: {why}" for place, why in faults[:_SHOWN]]
    if len(faults) > _SHOWN:
        lines.append(f"  ... and {len(faults) - _SHOWN} more")
    return "\n".join(lines)
