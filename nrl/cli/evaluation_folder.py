"""The folder of an evaluation: its configuration, and the results so far."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from nrl import config
from nrl.errors import ConfigError, DataError
from nrl.log import JsonLines, redacted
from nrl.rollout.evaluate import Graded
from nrl.run import config_file, folder

__all__ = [
    "MARK",
    "choose_folder",
    "digest",
    "digest_of_files",
    "iter_failures",
    "load_results",
    "read_config",
    "read_results",
    "write_config",
    "write_failures",
]

MARK = "digest_of_tasks"
"""A key that only the ``config.yaml`` of an evaluation has."""

_MAY_CHANGE = frozenset({"out", "k", "passing", "cluster", "samplers", "url", "engine", "trust_remote_code"})


def choose_folder(cfg: Any) -> Path:
    """The folder that an evaluation's configuration names, or a new one.

    Raises:
        ConfigError: the folder is a file, or holds other files than an evaluation's.
    """
    out = folder.location(cfg, "eval")
    content = sorted(path.name for path in out.glob("[!.]*")) if out.exists() else []
    if content and MARK not in read_config(out):
        raise ConfigError(
            f"eval: out={out} holds something else than an evaluation ({', '.join(content[:8])}); give another folder"
        )
    return out


def read_config(out: Path) -> Mapping[str, Any]:
    """The configuration in a folder; empty if it has none."""
    return config_file.read_config(out / "config.yaml") or {}


def write_config(out: Path, cfg: Any, digests: Mapping[str, Any], unread: Sequence[str] = ()) -> None:
    """Write ``config.yaml``, unless the folder holds an evaluation of something else.

    Args:
        out: the folder.
        cfg: the configuration.
        digests: of the tasks, under `MARK`, and of the model.
        unread: settings that have no part in the evaluation, and are left out.

    Raises:
        ConfigError: the folder holds another evaluation.
    """
    shown = config.dump(cfg, lambda all: redacted({key: all[key] for key in all if key not in unread}))
    text = shown + yaml.safe_dump(dict(digests))
    old, new = read_config(out), yaml.safe_load(text)
    changed = [key for key in old | new if old.get(key) != new.get(key) and key not in _MAY_CHANGE]
    if old and changed:
        raise ConfigError(
            f"eval: out={out} holds an evaluation of something else ("
            + "; ".join(f"{key}: {old.get(key)} -> {new.get(key)}" for key in changed)
            + "); give another folder, or remove that one"
        )
    config_file.replace(out / "config.yaml", text)


def digest(value: Any) -> str:
    """A hash of a value of JSON, whatever the order of its keys.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    True
    """
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def digest_of_files(model: str) -> str | None:
    """A hash of the sizes and times of a model's files; None: the model is not in a folder here.

    >>> digest_of_files("Qwen/Qwen3-0.6B") is None
    True
    """
    files = [(path.name, path.stat()) for path in sorted(Path(model).glob("*")) if path.is_file()]
    return digest([(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]) if files else None


def read_results(path: Path, total: int, together: int) -> list[Graded]:
    """Read the results of the tasks that are done, and cut off those of an incomplete group of tasks.

    Args:
        path: of ``results.jsonl``.
        total: the number of tasks.
        together: how many tasks are sampled together.

    Raises:
        DataError: a line is not the result of its task.
    """
    graded, ends = _read_lines(path)
    num_complete = len(graded) if len(graded) == total else len(graded) // together * together
    if path.exists():
        os.truncate(path, ends[num_complete])
    return graded[:num_complete]


def load_results(path: Path) -> list[Graded]:
    """Read the results of another evaluation, and change nothing; a line that is being written is left out.

    Raises:
        DataError: a line is not the result of its task.
    """
    return _read_lines(path)[0]


def write_failures(out: Path, graded: Sequence[Graded]) -> None:
    """Write ``failures.jsonl`` anew: a line for each sample without a reward; no file, where all have one."""
    path = out / "failures.jsonl"
    temporary = out / f".failures.{os.getpid()}.jsonl"
    try:
        temporary.unlink(missing_ok=True)
        with JsonLines(temporary) as lines:
            for record in iter_failures(graded, 0):
                lines.write(record)
        if temporary.stat().st_size:
            temporary.replace(path)
        else:
            path.unlink(missing_ok=True)
    finally:
        temporary.unlink(missing_ok=True)


def iter_failures(graded: Sequence[Graded], first: int) -> Iterator[dict[str, Any]]:
    """The lines of ``failures.jsonl`` about some tasks, of which the first has this number.

    >>> graded = Graded("1+1=", "2", ["2"], [None], None, [1], [False], failures=[{"status": "timeout", "error": "!"}])
    >>> list(iter_failures([graded], 7))
    [{'task': 7, 'sample': 0, 'status': 'timeout', 'error': '!', 'prompt': '1+1='}]
    """
    for number, result in enumerate(graded, first):
        for sample, reward in enumerate(result.rewards):
            if reward is None:
                failure = (result.failures[sample] if result.failures else None) or {}  # older results do not say
                status = result.statuses[sample] if result.statuses else None
                reason = {"status": failure.get("status", status), "error": failure.get("error")}
                yield {"task": number, "sample": sample, **reason, "prompt": result.prompt}


def _read_lines(path: Path) -> tuple[list[Graded], list[int]]:
    """The tasks of whole lines, and where each line ends, from 0 on."""
    graded, ends = list[Graded](), [0]
    if not path.exists():
        return graded, ends
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break  # it was being written
        try:
            record = json.loads(line)
            if record.pop("task") != len(graded):
                raise ValueError
            graded.append(Graded(**record))
        except (ValueError, TypeError, AttributeError, LookupError):
            raise DataError(
                f"eval: {path}, line {len(graded) + 1} is not the result of task {len(graded)}; mend it, or remove it "
                "and all that follows to sample those again"
            ) from None
        ends.append(ends[-1] + len(line))
    return graded, ends
