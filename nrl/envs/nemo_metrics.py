"""Numbers of many verdicts, as NeMo Gym's ``/aggregate_metrics`` has them."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["aggregated"]

_TASK, _ROLLOUT = "_ng_task_index", "_ng_rollout_index"


def aggregated(answers: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    """Describe the numbers of answers to ``/verify``: of all, and of each task.

    A field that is a number or a boolean, and each count of ``response.usage``, has a ``mean/``, ``max/``, ``min/``,
    ``median/`` and ``std/`` (with n - 1; of one answer alone 0).

    Args:
        answers: the fields of each; ``_ng_task_index`` says which have a task in common.

    Source: NeMo Gym 0.4.0, ``nemo_gym/reward_profile.py``, ``compute_aggregate_metrics``.

    >>> found = aggregated([{"_ng_task_index": 0, "reward": 1.0}, {"_ng_task_index": 1, "reward": 0.5}])
    >>> found["key_metrics"], found["group_level_metrics"][1]["mean/reward"]
    ({'mean/reward': 0.75}, 0.5)
    """
    tasks: dict[int, list[dict[str, Any]]] = {}
    for answer in answers or ():
        numbers = {**answer, **((answer.get("response") or {}).get("usage") or {})}
        found = {name: float(value) for name, value in numbers.items() if isinstance(value, bool | int | float)}
        tasks.setdefault(int(found.pop(_TASK, 0)), []).append(found)
    every = [row for rows in tasks.values() for row in rows]
    stated = _described(every)
    groups = [{**_described(rows), _TASK: task, "num_rollouts": len(rows)} for task, rows in sorted(tasks.items())]
    key = {name: value for name, value in stated.items() if name.startswith("mean/")}
    return {"group_level_metrics": groups, "agent_metrics": stated, "key_metrics": key}


def _described(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if name != _ROLLOUT:
                columns.setdefault(name, []).append(value)
    found: dict[str, float] = {}
    for name, values in columns.items():
        found |= {f"mean/{name}": statistics.fmean(values), f"max/{name}": max(values), f"min/{name}": min(values)}
        found[f"median/{name}"] = statistics.median(values)
        if len(values) > 1 or len(rows) == 1:
            found[f"std/{name}"] = statistics.stdev(values) if len(values) > 1 else 0.0
    return found
