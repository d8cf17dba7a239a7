"""``nrl eval rescore=FILE``: stored samples, to be verified again without a model."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from nrl.cli.evaluation_folder import digest, load_results
from nrl.envs import Env, Task, Verifier
from nrl.envs.types import is_env
from nrl.errors import ConfigError, DataError
from nrl.log import redacted
from nrl.rollout.evaluate import Graded
from nrl.rollout.rescore import can_rescore, regrade

__all__ = ["Rescoring", "open_results"]


_MISSED = re.compile(r"KeyError: (['\"])(?P<field>.*)\1", re.DOTALL)  # also of a verifier in another process


@attrs.frozen
class Rescoring:
    """Stored samples with their tasks, and who judges them.

    Args:
        path: of ``results.jsonl``.
        judges: verifiers, by the task's source.
        tasks: in the order of the lines.
        graded: the lines.
        of_lines: whether the tasks are made of the lines, which may lack what a verifier reads.
    """

    path: Path
    judges: Sequence[Verifier | Env]
    tasks: Sequence[Task]
    graded: Sequence[Graded]
    of_lines: bool

    @property
    def samples(self) -> int:
        """The number of samples of a task, at most."""
        return max(len(task.samples) for task in self.graded)

    def grade(self, start: int, count: int, seed: int) -> list[Graded]:
        """Judge some tasks again.

        Raises:
            DataError: the verifier reads a field that the lines do not have.
        """
        part = slice(start, start + count)
        graded = regrade(self.judges, self.tasks[part], self.graded[part], seed=seed, first_group=start)
        if self.of_lines and (missed := _missing_fields(self.tasks[part], self.graded[part], graded)):
            names = ", ".join(repr(name) for name in sorted(missed))
            raise DataError(
                f"eval: the verifier reads {names} of the task, which {self.path} does not have; give the tasks of "
                f"that evaluation as well, as in: nrl eval TASKS rescore={self.path}"
            )
        return graded


def open_results(rescore: str, env: Any, judges: Sequence[Verifier | Env], tasks: Sequence[Task] | None) -> Rescoring:
    """Read stored samples.

    Args:
        rescore: ``results.jsonl`` of an evaluation, or its folder.
        env: what the configuration says, for errors.
        judges: of each source.
        tasks: the tasks; None: those of the lines.

    Raises:
        ConfigError: an environment has no verifier.
        DataError: the file does not exist, has no results, or has results of other tasks.
    """
    if any(is_env(judge) and getattr(judge, "verifier", None) is None for judge in judges):
        raise ConfigError(
            f"eval: env={env} has no verifier: its steps give the reward, so stored samples cannot be judged; play it "
            "with a model=, or give a verifier as env="
        )
    path = Path(rescore)
    path = path / "results.jsonl" if path.is_dir() else path
    if not path.is_file():
        raise DataError(f"eval: rescore={rescore}: there is no {path}; give results.jsonl of an evaluation")
    graded = load_results(path)
    if not graded:
        raise DataError(f"eval: rescore={rescore}: {path} has no results; give those of an evaluation")
    if tasks is None:
        return Rescoring(path, judges, [_make_task(line) for line in graded], graded, True)
    for number, line in enumerate(graded):
        if number >= len(tasks) or digest(redacted(tasks[number].get("prompt"))) != digest(line.prompt):
            raise DataError(
                f"eval: {path}, line {number + 1} is of another task than the tasks that are given; give those of that "
                "evaluation, with its format, chat, shuffle, seed and limit"
            )
    return Rescoring(path, judges, [dict(task) for task in tasks[: len(graded)]], graded, False)


def _missing_fields(tasks: Sequence[Task], old: Sequence[Graded], new: Sequence[Graded]) -> set[str]:
    """The fields that a verifier has not found in tasks."""
    return {
        match["field"]
        for task, before, after in zip(tasks, old, new, strict=True)
        for index, failure in enumerate(after.failures or ())
        if failure and can_rescore(before, index)
        if (match := _MISSED.fullmatch(failure["error"])) and match["field"] not in task
    }


def _make_task(line: Graded) -> dict[str, Any]:
    task = {"prompt": line.prompt, "answer": line.answer}
    return {key: value for key, value in task.items() if value is not None} | dict(line.fields)
