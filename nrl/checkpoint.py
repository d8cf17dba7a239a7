"""Checkpoints: named values in a folder that is either whole or not there.

A checkpoint is written under a temporary name, flushed to the disk, and renamed when it is complete, so that a process
that is killed leaves the ones before as they were. Its ``manifest.json`` has the checksum of every file. Values are
train states and frozen params (saved by the trainer that made them), streams (their ``state()``), and plain data:
numbers, texts, tensors, batches, and dicts, lists, tuples and attrs instances of these.
"""

import hashlib
import json
import math
import os
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import attrs
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from nrl.backends.base import Params, Trainer, TrainState
from nrl.errors import CheckpointError

__all__ = ["Checkpoint", "Checkpoints", "checkpoints", "load", "newest", "save", "store", "verify"]

_MANIFEST = "manifest.json"
_RANDOM = "random"  # the entry that holds the states of the global random generators


@attrs.frozen
class Checkpoints:
    """When a run writes checkpoints, and which of them it keeps.

    Args:
        every: steps between two of them. The last step of a loop always has one.
        keep: how many of the newest are kept.
        best: a metric whose best checkpoint is kept too, such as ``"eval/loss"``; a step that logs a new best of it
            has a checkpoint, whatever ``every`` says.
        mode: whether the best is the largest or the smallest.

    >>> Checkpoints(best="eval/loss", mode="min").every
    50
    """

    every: int = attrs.field(default=50, validator=attrs.validators.ge(1))
    keep: int = attrs.field(default=2, validator=attrs.validators.ge(1))
    best: str | None = None
    mode: Literal["max", "min"] = attrs.field(default="max", validator=attrs.validators.in_(["max", "min"]))


class Checkpoint(NamedTuple):
    """A complete checkpoint on the disk.

    Args:
        folder: where it is; its name is the number of steps it comes after.
        step: after which it was written, from 0.
        meta: what was written with it.

    >>> Checkpoint(Path("000050"), 49, {}).step
    49
    """

    folder: Path
    step: int
    meta: Mapping[str, Any]


def checkpoints(root: str | Path) -> list[Checkpoint]:
    """The complete checkpoints under ``root``, oldest first; what is in them is not looked at (see `verify`).

    >>> checkpoints("there/is/none")
    []
    """
    found = []
    for folder in sorted(Path(root).glob("[0-9]*")):
        if folder.name.isdigit():
            try:
                manifest = json.loads((folder / _MANIFEST).read_text())
                found.append(Checkpoint(folder, int(manifest["step"]), manifest["meta"]))
            except (OSError, ValueError, KeyError, TypeError):
                found.append(Checkpoint(folder, int(folder.name) - 1, {}))
    return found


def save(folder: str | Path, step: int, values: Mapping[str, Any], meta: Mapping[str, Any] | None = None) -> Checkpoint:
    """Write a checkpoint: all of it or nothing. One that is there under the same name is replaced.

    The states of Python's, NumPy's and torch's global random generators are written too.

    Args:
        folder: its folder; the one above is made.
        step: after which it is written, from 0.
        values: train states, params, streams and plain data, by name.
        meta: JSON, for `checkpoints` to find.

    Raises:
        CheckpointError: a value of another kind, or a disk that does not take it; the checkpoints before stand.
        ConsumedState: a state that a step has consumed.

    >>> import tempfile
    >>> root = Path(tempfile.mkdtemp())
    >>> made = save(root / "000010", 9, {"average": 0.5})
    >>> load(made.folder, average=0.0)
    [0.5]
    """
    folder = Path(folder)
    temporary = folder.with_name(f".{folder.name}.writing")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for name, value in values.items():
            _write(temporary / name, value, name)
        torch.save(_encoded(_random_state(), _RANDOM), temporary / f"{_RANDOM}.pt")
        files = {str(path.relative_to(temporary)): _digest(path) for path in _files(temporary)}
        manifest: dict[str, Any] = {"step": step, "names": sorted(values), "meta": dict(meta or {}), "files": files}
        (temporary / _MANIFEST).write_text(json.dumps(manifest, indent=1))
        for path in [*_files(temporary), *(path for path in temporary.rglob("*") if path.is_dir()), temporary]:
            _flush(path)
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        temporary.rename(folder)
        _flush(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError when the disk is full
        size = sum(path.stat().st_size for path in _files(temporary))
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, RuntimeError) and "PytorchStreamWriter" not in str(error):
            raise
        before = [x.folder.name for x in checkpoints(folder.parent)]
        raise CheckpointError(
            f"save: the checkpoint {folder} could not be written after {size / 1e6:.1f} MB "
            f"({getattr(error, 'strerror', None) or 'the disk took no more'}; {_free(folder)}). "
            + (f"The last good one is {before[-1]}. " if before else "There is none before it. ")
            + "Make room, and start the same command again"
        ) from error
    return Checkpoint(folder, step, manifest["meta"])


def verify(folder: str | Path) -> None:
    """Compare every file of a checkpoint with the checksum that was written with it.

    Raises:
        CheckpointError: a file is missing, truncated or altered.
    """
    folder = Path(folder)
    try:
        files = json.loads((folder / _MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: its {_MANIFEST} cannot be read ({type(error).__name__})") from None
    for name, (size, digest) in files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder}: the file {name} is missing")
        if path.stat().st_size != size:
            raise CheckpointError(f"{folder}: the file {name} has {path.stat().st_size} bytes, and had {size}")
        if _digest(path)[1] != digest:
            raise CheckpointError(f"{folder}: the file {name} was altered; its checksum is not what was written")


def newest(root: str | Path, say: Callable[[str], None] = print) -> Checkpoint | None:
    """The newest checkpoint that is what was written. Damaged ones are renamed to ``<name>.damaged`` and passed over.

    Args:
        root: the folder that holds the checkpoints.
        say: is told of each one that is damaged.

    Returns:
        None: there is no checkpoint at all.

    Raises:
        CheckpointError: there are some, and all are damaged.

    >>> newest("there/is/none")
    """
    damaged: list[str] = []
    for found in checkpoints(root)[::-1]:
        try:
            verify(found.folder)
        except CheckpointError as error:
            aside = found.folder.with_name(f"{found.folder.name}.damaged")
            shutil.rmtree(aside, ignore_errors=True)
            found.folder.rename(aside)
            damaged.append(str(error))
            say(f"checkpoint: {error}; it is now {aside.name}, and the one before is used")
        else:
            return found
    if damaged:
        raise CheckpointError(
            f"{root}: none of its {len(damaged)} checkpoints is what was written ({damaged[0]}); remove {root} to "
            "start from the beginning"
        )
    return None


def load(folder: str | Path, /, **named: Any) -> list[Any]:
    """What a checkpoint holds, by name, in the order of the arguments; the global random generators continue from it.

    Args:
        folder: of the checkpoint.
        **named: for each value something that says what it is: for a train state its trainer (or any state of it),
            for params any params of their trainer, a stream that reads the same source, for plain data any value of
            the same kind. Streams are restored in place; a state is consumed.

    Raises:
        CheckpointError: the checkpoint holds other names.
    """
    folder = Path(folder)
    held = json.loads((folder / _MANIFEST).read_text())["names"]
    if sorted(named) != held:
        raise CheckpointError(
            f"load: {folder} holds {', '.join(held) or 'nothing'}, and the program asks for "
            f"{', '.join(sorted(named)) or 'nothing'}; give the same names to restore and save"
        )
    values = [_read(folder / name, like) for name, like in named.items()]
    _set_random_state(_decoded(_load(folder / f"{_RANDOM}.pt"), ()))
    return values


def store(root: str | Path, step: int, values: Mapping[str, Any], keep: Checkpoints, meta: Mapping[str, Any]) -> Path:
    """Write the checkpoint after ``step`` under ``root``, then delete those that ``keep`` does not keep.

    Args:
        root: the folder that holds the checkpoints.
        step: from 0.
        values: as in `save`.
        keep: which are kept.
        meta: JSON; the value under ``"metrics"`` is where ``keep.best`` is looked up.

    Returns:
        Its folder.
    """
    made = save(Path(root) / f"{step + 1:06}", step, values, meta)
    found = checkpoints(root)
    kept = {x.folder for x in found[-keep.keep :]} | {made.folder}
    champion = best(found, keep)
    if champion is not None:
        kept.add(champion.folder)
    for other in found:
        if other.folder not in kept:
            shutil.rmtree(other.folder, ignore_errors=True)
    return made.folder


def best(found: list[Checkpoint], keep: Checkpoints) -> Checkpoint | None:
    """The checkpoint with the best of the metric that ``keep`` names; of equal ones the first."""
    scored = [(x, score(x.meta.get("metrics", {}), keep)) for x in found]
    ranked = [(x, value) for x, value in scored if value is not None]
    return max(ranked, key=lambda pair: pair[1])[0] if ranked else None


def score(metrics: Mapping[str, Any], keep: Checkpoints) -> float | None:
    """The metric that ``keep`` names, larger is better; None where it was not measured."""
    value = metrics.get(keep.best) if keep.best else None
    if value is None or math.isnan(value):
        return None
    return float(value) if keep.mode == "max" else -float(value)


# --- values


def _is_stream(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("take", "state", "restore"))


def _write(path: Path, value: Any, name: str) -> None:
    if isinstance(value, TrainState | Params):
        value.trainer.save(value, path)
    else:
        torch.save(_encoded(value.state() if _is_stream(value) else value, name), path.with_name(f"{name}.pt"))


def _read(path: Path, like: Any) -> Any:
    if isinstance(like, Trainer | TrainState | Params):
        if isinstance(like, TrainState):  # state is linear: there is never a second copy of it
            like.handle.donate(like.handle.owner, "restore")
        return (like if isinstance(like, Trainer) else like.trainer).restore(path)
    stored = _load(path.with_name(f"{path.name}.pt"))
    if _is_stream(like):
        like.restore(_decoded(stored, None))
        return like
    return _decoded(stored, like)


def _load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _encoded(value: Any, name: str) -> Any:
    """As what ``torch.load(weights_only=True)`` reads: nothing in a checkpoint is code."""
    if value is None or isinstance(value, bool | int | float | str | bytes | Tensor):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return {"ndarray": torch.from_numpy(np.ascontiguousarray(value))}
    if isinstance(value, TensorDict):
        columns = {key: _encoded(column, f"{name}.{key}") for key, column in value.items()}
        return {"batch": columns, "batch_size": list(value.batch_size), "locked": value.is_locked}
    if attrs.has(type(value)):
        return {"fields": [_encoded(x, f"{name}.{k}") for k, x in attrs.asdict(value, recurse=False).items()]}
    if isinstance(value, Mapping):
        return {"keys": list(value), "values": [_encoded(x, f"{name}.{k}") for k, x in value.items()]}
    if isinstance(value, list | tuple):
        items = [_encoded(x, f"{name}[{i}]") for i, x in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    raise CheckpointError(
        f"save: '{name}' is a {type(value).__name__}, which a checkpoint cannot hold; give train states, params, "
        "streams, or numbers, texts, tensors, batches and dicts, lists, tuples and attrs instances of these"
    )


def _decoded(stored: Any, like: Any) -> Any:
    """The inverse; ``like`` tells named tuples and attrs classes."""
    match stored:
        case {"ndarray": tensor}:
            return tensor.numpy()
        case {"batch": columns, "batch_size": size, "locked": locked}:
            made = TensorDict({key: _decoded(column, None) for key, column in columns.items()}, batch_size=size)
            return made.lock_() if locked else made
        case {"fields": values}:
            fields = attrs.fields(type(like))
            return type(like)(
                **{field.alias: _decoded(x, getattr(like, field.name)) for field, x in zip(fields, values, strict=True)}
            )
        case {"keys": keys, "values": values}:
            known = like if isinstance(like, Mapping) else {}
            return {key: _decoded(x, known.get(key)) for key, x in zip(keys, values, strict=True)}
        case list() | tuple():
            likes = like if isinstance(like, list | tuple) and len(like) == len(stored) else [None] * len(stored)
            items = [_decoded(x, y) for x, y in zip(stored, likes, strict=True)]
            if isinstance(stored, list):
                return items
            return type(like)(*items) if hasattr(like, "_fields") else tuple(items)
    return stored


def _random_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(), "cuda": cuda}


def _set_random_state(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


# --- files


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _digest(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free(folder: Path) -> str:
    there = next(path for path in folder.absolute().parents if path.exists())
    return f"{shutil.disk_usage(there).free / 1e6:.1f} MB are free in {there}"
