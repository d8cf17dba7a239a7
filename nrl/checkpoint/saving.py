"""Checkpoints: named values in a folder that is either whole or not there.

A checkpoint is written under a temporary name, flushed to the disk, and renamed when it is complete. So a process that
is killed leaves earlier checkpoints as they were. Its ``manifest.json`` has the size and the checksum of every file,
computed by the process that wrote the file, and the trainers' own records, such as the step. Values are train states
and frozen params (saved by the trainer that made them), streams (their ``state()``), and plain data (see
`nrl.checkpoint.serialization`).
"""

import io
import json
import pickle
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nrl.backends.training.states import Params, TrainState
from nrl.backends.training.trainer import Trainer
from nrl.checkpoint.keeping import Checkpoint, Checkpoints, best, checkpoints
from nrl.checkpoint.serialization import decode, encode
from nrl.errors import CheckpointError
from nrl.files import (
    MANIFEST,
    Written,
    check_sizes,
    check_sums,
    files_of,
    flush,
    read_manifest,
    write,
    write_manifest,
)

__all__ = [
    "check",
    "load",
    "newest",
    "random_state",
    "save",
    "set_random_state",
    "store",
    "trainers",
    "verify",
]

_RANDOM = "random generators"  # the entry of the global ones; no value can have this name


def save(folder: str | Path, step: int, values: Mapping[str, Any], meta: Mapping[str, Any] | None = None) -> Checkpoint:
    """Write a checkpoint: all of it or nothing. It replaces one of the same name.

    The states of the global random generators of Python, NumPy and torch are written too.

    Args:
        folder: its folder; the one above is made.
        step: the step before it, from 0.
        values: train states, params, streams and plain data; names are identifiers.
        meta: JSON, for `checkpoints` to find.

    Raises:
        CheckpointError: a value is of another kind, the disk fails, or a process of a trainer writes where the program
            does not see it. Earlier checkpoints stay as they are.
        ConsumedState: a step has consumed a state.

    >>> import tempfile
    >>> root = Path(tempfile.mkdtemp())
    >>> made = save(root / "000010", 9, {"average": 0.5})
    >>> load(made.folder, average=0.0)
    [0.5]
    """
    folder = Path(folder)
    plain, about = check(values), json.loads(json.dumps(dict(meta or {})))
    temporary, old = (folder.with_name(f".{folder.name}.{what}") for what in ("writing", "old"))
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        files: dict[str, Written] = {}
        records: dict[str, Any] = dict.fromkeys(sorted(values))
        for name, value in values.items():
            if name in plain:
                files[f"{name}.pt"] = _write(plain[name], temporary / f"{name}.pt")
            else:
                theirs, records[name] = value.trainer.write(value, temporary / name)
                files |= {f"{name}/{file}": told for file, told in theirs.items()}
        files[f"{_RANDOM}.pt"] = _write(encode(random_state(), _RANDOM), temporary / f"{_RANDOM}.pt")
        write_manifest(temporary, files, records, step=step, meta=about)
        if folder.exists():  # killed between the two renames, the old one is found by `newest`
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        temporary.rename(folder)
        flush(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException as error:
        size = sum(path.stat().st_size for path in temporary.rglob("*") if path.is_file())
        shutil.rmtree(temporary, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        before = [x.folder.name for x in checkpoints(folder.parent)]
        raise CheckpointError(
            f"save: the checkpoint {folder} could not be written after {size / 1e6:.1f} MB "
            f"({error.strerror or 'the disk took no more'}; {_free(folder)}). "
            + (f"The last good one is {before[-1]}. " if before else "There is none before it. ")
            + "Make room, and start the same command again"
        ) from error
    return Checkpoint(folder, step, about)


def check(values: Mapping[str, Any]) -> dict[str, Any]:
    """Encode the plain data and the streams among ``values`` as `save` does, without writing them.

    Raises:
        CheckpointError: a checkpoint cannot hold a name or a kind of value.
    """
    for name in values:
        if not name.isidentifier():
            raise CheckpointError(f"save: '{name}' cannot name a value; give a Python name, such as average")
    return {
        name: _encode_value(value, name) for name, value in values.items() if not isinstance(value, TrainState | Params)
    }


def trainers(values: Mapping[str, Any]) -> dict[str, Trainer]:
    """The trainers of the values that live on a mesh, by name."""
    return {
        name: value if isinstance(value, Trainer) else value.trainer
        for name, value in values.items()
        if isinstance(value, Trainer | TrainState | Params)
    }


def verify(folder: str | Path, readers: Mapping[str, Trainer] = {}) -> None:
    """Compare every file of a checkpoint with the checksum that was written with it.

    Args:
        folder: of the checkpoint.
        readers: by name of a train state or params, the trainer whose processes read its files, each a share. All other
            files are read here. Missing and short files are found before any is read.

    Raises:
        CheckpointError: a file is missing, truncated or altered.

    >>> import tempfile
    >>> made = save(Path(tempfile.mkdtemp()) / "000010", 9, {"average": 0.5})
    >>> verify(made.folder)
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if manifest is None:
        raise CheckpointError(f"{folder}: its {MANIFEST} is missing or was altered")
    files = files_of(manifest)
    check_sizes(folder, files)
    check_sums(folder, {name: x for name, x in files.items() if name.partition("/")[0] not in readers})
    for value, trainer in readers.items():
        trainer.verify(folder / value, files_of(manifest, value))


def newest(
    root: str | Path, say: Callable[[str], None] = print, readers: Mapping[str, Trainer] = {}
) -> Checkpoint | None:
    """Find the newest checkpoint that is intact. Damaged ones are renamed to ``<name>.damaged`` and passed over.

    It first removes half-written files of a killed process, so call it only while nobody is writing.

    Args:
        root: the folder that holds the checkpoints.
        say: gets a line about each damaged checkpoint.
        readers: as in `verify`.

    Returns:
        The checkpoint. None: there is none.

    Raises:
        CheckpointError: all checkpoints are damaged; they keep their names.
    """
    _tidy(Path(root))
    damaged: list[tuple[Path, CheckpointError]] = []
    for found in checkpoints(root)[::-1]:
        try:
            verify(found.folder, readers)
        except CheckpointError as error:
            damaged.append((found.folder, error))
            continue
        for folder, why in damaged:
            aside = folder.with_name(f"{folder.name}.damaged")
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
            say(f"checkpoint: {why}; it is now {aside.name}, and {found.folder.name} is used")
        return found
    if damaged:
        raise CheckpointError(
            f"{root}: none of its {len(damaged)} checkpoints is what was written ({damaged[0][1]}); mend the newest, "
            f"or remove {root} to start from the beginning"
        )
    return None


def load(folder: str | Path, /, **named: Any) -> list[Any]:
    """Load the values of a checkpoint, in the order of the arguments, and restore the global random generators.

    Args:
        folder: of the checkpoint.
        **named: for each value an example: for a train state its trainer (or any state of it), for params any params of
            their trainer, a stream that reads the same source, for plain data any value of the same kind. Streams are
            restored in place; a state is consumed.

    Raises:
        CheckpointError: the checkpoint has other names, or a value of another kind under one.

    >>> import tempfile
    >>> made = save(Path(tempfile.mkdtemp()) / "000010", 9, {"average": 0.5, "seen": [1, 2]})
    >>> load(made.folder, seen=[], average=0.0)
    [[1, 2], 0.5]
    """
    folder = Path(folder)
    manifest = read_manifest(folder) or {"values": {}}
    if "values" not in manifest:
        raise CheckpointError(
            f"load: {folder} was written by an earlier version of nrl, and this one reads its own alone; go on with "
            "that version, or start in another folder"
        )
    held = list(manifest["values"])
    if sorted(named) != held:
        raise CheckpointError(
            f"load: {folder} holds {', '.join(held) or 'nothing'}, and the program asks for "
            f"{', '.join(sorted(named)) or 'nothing'}; give the same names to restore and save"
        )
    values = [_read(folder / name, like) for name, like in named.items()]
    set_random_state(decode(_load(folder / f"{_RANDOM}.pt"), None, _RANDOM))
    return values


def store(root: str | Path, step: int, values: Mapping[str, Any], keep: Checkpoints, meta: Mapping[str, Any]) -> Path:
    """Write the checkpoint after ``step`` under ``root``, then delete those that ``keep`` does not keep.

    Args:
        root: the folder that holds the checkpoints.
        step: from 0.
        values: as in `save`.
        keep: which ones to keep.
        meta: JSON; ``keep.best`` is looked up under ``"metrics"``.

    Returns:
        Its folder.

    >>> import tempfile
    >>> root, keep = tempfile.mkdtemp(), Checkpoints(keep=1, best="reward")
    >>> for step, reward in enumerate([0.2, 0.7, 0.4, 0.5]):
    ...     folder = store(root, step, {}, keep, {"metrics": {"reward": reward}})
    >>> [found.folder.name for found in checkpoints(root)]
    ['000002', '000004']
    """
    made = save(Path(root) / f"{step + 1:06}", step, values, meta)
    found = checkpoints(root)
    kept = {x.folder for x in found[-keep.keep :]} | {made.folder}
    champion = best(found, keep)
    if champion is not None:
        kept.add(champion.folder)
    for other in found:
        if other.folder not in kept:
            gone = other.folder.with_name(f".{other.folder.name}.gone")  # never half a checkpoint under its name
            shutil.rmtree(gone, ignore_errors=True)
            other.folder.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
    return made.folder


# --- values


def _is_stream(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("take", "state", "restore"))


def _encode_value(value: Any, name: str) -> Any:
    if isinstance(value, Trainer):
        raise CheckpointError(f"save: '{name}' is a trainer; give its train state, which the last step returned")
    return {"stream": encode(value.state(), name, classes=False)} if _is_stream(value) else encode(value, name)


def _read(path: Path, like: Any) -> Any:
    trained, file = isinstance(like, Trainer | TrainState | Params), path.with_name(f"{path.name}.pt")
    stored: Any = None if path.is_dir() else _load(file)
    streamed = isinstance(stored, dict) and "stream" in stored
    if (path.is_dir(), streamed) != (trained, _is_stream(like)):
        kind = "a train state or params" if path.is_dir() else "a stream" if streamed else "plain data"
        raise CheckpointError(
            f"load: '{path.name}' was saved as {kind}, and restore was given a {type(like).__name__}; give the same "
            "values to restore and save"
        )
    if isinstance(like, TrainState):  # state is linear: there is never a second copy of it
        like.handle.donate(like.handle.owner, "restore")
    if trained:
        return (like if isinstance(like, Trainer) else like.trainer).restore(path)
    if streamed:
        like.restore(decode(stored["stream"], None, path.name))
        return like
    return decode(stored, like, path.name)


def _write(value: Any, path: Path) -> Written:
    file = io.BytesIO()  # into the file itself torch would seek
    torch.save(value, file)
    return write(path, [file.getbuffer()])


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"load: {path} holds something that is no data; it was not read, and nothing of it was run. nrl did not "
            "write it: look where it came from, and use another checkpoint"
        ) from error


def random_state() -> dict[str, Any]:
    """The states of the global generators of Python, NumPy and torch."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: Mapping[str, Any]) -> None:
    """Let the global generators go on from a state.

    >>> before = random_state()
    >>> drawn = random.random()
    >>> set_random_state(before)
    >>> random.random() == drawn
    True
    """
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


# --- files


def _tidy(root: Path) -> None:
    """Clean up after a killed process: bring a replaced checkpoint back if its replacement is missing."""
    for path in root.glob(".[0-9]*"):
        whole = path.with_name(path.stem[1:])
        if path.suffix == ".old" and not whole.exists():
            path.rename(whole)
        elif path.suffix in (".old", ".writing", ".gone"):
            shutil.rmtree(path, ignore_errors=True)


def _free(folder: Path) -> str:
    there = next(path for path in folder.absolute().parents if path.exists())
    return f"{shutil.disk_usage(there).free / 1e6:.1f} MB are free in {there}"
