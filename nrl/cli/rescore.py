"""``nrl eval rescore=FILE``: stored samples, to be verified again without a model."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from nrl.cli.evaluation_folder import digest, stored
from nrl.envs import Env, Task, Verifier
from nrl.envs.types import is_env
from nrl.errors import ConfigError, DataError
from nrl.log import redacted
from nrl.rollout.evaluate import Graded
from nrl.rollout.rescore import is_asked_again, regrade

__all__ = ["Rescoring", "opened"]


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
        return max(len(each.samples) for each in self.graded)

    def grade(self, start: int, count: int, seed: int) -> list[Graded]:
        """Judge some tasks again.

        Raises:
            DataError: the verifier reads a field that the lines do not have.
        """
        part = slice(start, start + count)
        found = regrade(self.judges, self.tasks[part], self.graded[part], seed=seed, first_group=start)
        if self.of_lines and (missed := _missed(self.tasks[part], self.graded[part], found)):
            names = ", ".join(repr(name) for name in sorted(missed))
            raise DataError(
                f"eval: the verifier reads {names} of the task, which {self.path} does not have; give the tasks of "
                f"that evaluation as well, as in: nrl eval TASKS rescore={self.path}"
            )
        return found


def opened(rescore: str, env: Any, judges: Sequence[Verifier | Env], given: Sequence[Task] | None) -> Rescoring:
    """Read stored samples.

    Args:
        rescore: ``results.jsonl`` of an evaluation, or its folder.
        env: what the configuration says, for errors.
        judges: of each source.
        given: the tasks; None: those of the lines.

    Raises:
        ConfigError: an environment has no verifier.
        DataError: there is no such file, or it has no results, or those of other tasks.
    """
    if any(is_env(each) and getattr(each, "verifier", None) is None for each in judges):
        raise ConfigError(
            f"eval: env={env} has no verifier: its steps give the reward, so stored samples cannot be judged; play it "
            "with a model=, or give a verifier as env="
        )
    path = Path(rescore)
    path = path / "results.jsonl" if path.is_dir() else path
    if not path.is_file():
        raise DataError(f"eval: rescore={rescore}: there is no {path}; give results.jsonl of an evaluation")
    graded = stored(path)
    if not graded:
        raise DataError(f"eval: rescore={rescore}: {path} has no results; give those of an evaluation")
    if given is None:
        return Rescoring(path, judges, [_fields(each) for each in graded], graded, True)
    for number, each in enumerate(graded):
        if number >= len(given) or digest(redacted(given[number].get("prompt"))) != digest(each.prompt):
            raise DataError(
                f"eval: {path}, line {number + 1} is of another task than the tasks that are given; give those of that "
                "evaluation, with its format, chat, shuffle, seed and limit"
            )
    return Rescoring(path, judges, [dict(task) for task in given[: len(graded)]], graded, False)


def _missed(tasks: Sequence[Task], old: Sequence[Graded], new: Sequence[Graded]) -> set[str]:
    """The fields that a verifier has not found in tasks."""
    return {
        found["field"]
        for task, before, after in zip(tasks, old, new, strict=True)
        for place, failure in enumerate(after.failures or ())
        if failure and is_asked_again(before, place)
        if (found := _MISSED.fullmatch(failure["error"])) and found["field"] not in task
    }


def _fields(line: Graded) -> dict[str, Any]:
    known = {"prompt": line.prompt, "answer": line.answer}
    return {key: value for key, value in known.items() if value is not None} | dict(line.fields)
