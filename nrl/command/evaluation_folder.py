"""The folder of an evaluation: its configuration, and the results so far."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from nrl import config
from nrl.episodes.grades import Graded
from nrl.errors import ConfigError, DataError
from nrl.log import redacted
from nrl.runs import config_file, folder

__all__ = ["MARK", "asked", "choose", "digest", "digest_of_files", "read", "settle"]

MARK = "digest_of_tasks"
"""A key of config.yaml that only an evaluation has.

>>> MARK
'digest_of_tasks'
"""

_MAY_CHANGE = frozenset({"out", "k", "passing", "timeout", "cluster", "samplers", "url", "engine", "trust_remote_code"})


def choose(cfg: Any) -> Path:
    """The folder that an evaluation asks for, or a new one.

    Raises:
        ConfigError: it is a file, or holds something else.

    >>> import attrs
    >>> @attrs.frozen
    ... class Config:
    ...     out: str = "runs/eval"
    >>> choose(Config()).name
    'eval'
    """
    if cfg.out is None:
        return folder.choose(cfg)
    out = Path(cfg.out)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"eval: out={out} is a file; give a folder, or leave it out to make a new one")
    there = sorted(path.name for path in out.glob("[!.]*")) if out.exists() else []
    if there and MARK not in asked(out):
        raise ConfigError(
            f"eval: out={out} holds something else than an evaluation ({', '.join(there[:8])}); give another folder"
        )
    return out


def asked(out: Path) -> Mapping[str, Any]:
    """The configuration of the evaluation in a folder; empty where there is none.

    >>> asked(Path("there/is/none"))
    {}
    """
    return config_file.read(out / "config.yaml") or {}


def settle(out: Path, cfg: Any, found: Mapping[str, Any]) -> None:
    """Write what is asked for, unless the folder holds results of something else.

    Args:
        out: the folder.
        cfg: what is asked for.
        found: digests of the tasks, under `MARK`, and of the model.

    Raises:
        ConfigError: it does.

    >>> import attrs, tempfile
    >>> settle(out := Path(tempfile.mkdtemp()), attrs.make_class("Config", ["tasks"])("sums"), {MARK: "0f"})
    >>> asked(out)
    {'tasks': 'sums', 'digest_of_tasks': '0f'}
    """
    text = config.dump(cfg, redacted) + yaml.safe_dump(dict(found))
    old, new = asked(out), yaml.safe_load(text)
    changed = [key for key in old | new if old.get(key) != new.get(key) and key not in _MAY_CHANGE]
    if old and changed:
        raise ConfigError(
            f"eval: out={out} holds an evaluation of something else ("
            + "; ".join(f"{key}: {old.get(key)} -> {new.get(key)}" for key in changed)
            + "); give another folder, or remove that one"
        )
    config_file.replace(out / "config.yaml", text)


def digest(value: Any) -> str:
    """Of what JSON can write.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    True
    """
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def digest_of_files(model: str) -> str | None:
    """Changes when a model's files do, by their sizes and times; None: it is not in a folder here.

    >>> digest_of_files("Qwen/Qwen3-0.6B") is None
    True
    """
    found = [(path.name, path.stat()) for path in sorted(Path(model).glob("*")) if path.is_file()]
    return digest([(name, each.st_size, each.st_mtime_ns) for name, each in found]) if found else None


def read(path: Path, total: int, together: int) -> list[Graded]:
    """The tasks that are done. Some alone of those that are sampled together do not count, and are cut off.

    Args:
        path: of ``results.jsonl``.
        total: how many tasks there are.
        together: how many of them are sampled together.

    Raises:
        DataError: a line that is not the result of its task.

    >>> read(Path("there/is/none/results.jsonl"), total=4, together=2)
    []
    """
    if not path.exists():
        return []
    graded, ends = list[Graded](), [0]
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
    whole = len(graded) if len(graded) == total else len(graded) // together * together
    os.truncate(path, ends[whole])
    return graded[:whole]
