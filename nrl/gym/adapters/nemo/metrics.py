"""Numbers of many verdicts, as NeMo Gym's ``/aggregate_metrics`` has them."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nrl.errors import EnvError
from nrl.gym.adapters.nemo.nemo_client import json_of
from nrl.runtime.threads import run_in_loop

__all__ = ["ROLLOUT", "TASK", "aggregated", "nemo_gym_metrics"]

TASK, ROLLOUT = "_ng_task_index", "_ng_rollout_index"
"""Fields of an answer: which rows answer one task, and which of them this is."""


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
        tasks.setdefault(int(found.pop(TASK, 0)), []).append(found)
    every = [row for rows in tasks.values() for row in rows]
    stated = _described(every)
    groups = [{**_described(rows), TASK: task, "num_rollouts": len(rows)} for task, rows in sorted(tasks.items())]
    key = {name: value for name, value in stated.items() if name.startswith("mean/")}
    return {"group_level_metrics": groups, "agent_metrics": stated, "key_metrics": key}


def _described(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if name != ROLLOUT:
                columns.setdefault(name, []).append(value)
    found: dict[str, float] = {}
    for name, values in columns.items():
        found |= {f"mean/{name}": statistics.fmean(values), f"max/{name}": max(values), f"min/{name}": min(values)}
        found[f"median/{name}"] = statistics.median(values)
        if len(values) > 1 or len(rows) == 1:
            found[f"std/{name}"] = statistics.stdev(values) if len(values) > 1 else 0.0
    return found


def nemo_gym_metrics(url: str, answers: str | Path, *, timeout: float = 60.0) -> dict[str, Any]:
    """What a server makes of the answers that `nemo_gym` has noted: its ``/aggregate_metrics``.

    Args:
        url: of the resources server, or of an agent.
        answers: the file. Answers to one row have their task in common.
        timeout: seconds for the answer.

    Returns:
        ``"key_metrics"``, ``"agent_metrics"``, by name, and ``"group_level_metrics"``, of each task.

    Raises:
        EnvError: the file cannot be read, or the server does not answer.

    Source: NeMo Gym 0.4.0, ``nemo_gym/base_resources_server.py``, ``aggregate_metrics``.
    """
    try:
        noted = [json.loads(line) for line in Path(answers).expanduser().read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise EnvError(f"nemo_gym_metrics: {answers} cannot be read: {error}") from None
    seen: dict[Any, int] = {}
    for each in noted:
        each[ROLLOUT] = seen[each.get(TASK)] = seen.get(each.get(TASK), -1) + 1
    server = url.rstrip("/")
    found, _ = run_in_loop(json_of(server, "/aggregate_metrics", {"verify_responses": noted}, {}, timeout)).result()
    return found
