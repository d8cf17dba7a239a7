"""Checkpoints: named values in a folder that is either whole or not there.

A process that is killed leaves earlier checkpoints as they were: see `nrl.run.checkpoint.storage`. The
``manifest.json`` has the size and the checksum of every file, computed by the process that wrote the file, and the
trainers' own records, such as the step. Values are train states and frozen params (saved by the trainer that made
them), streams (their ``state()``), and plain data (see `nrl.run.checkpoint.serialization`).
"""

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nrl.backends.training.trainer import Trainer
from nrl.errors import CheckpointError, NrlError
from nrl.files import (
    MANIFEST,
    Folder,
    Saved,
    Written,
    check_parts,
    check_sizes,
    check_sums,
    files_of,
    read_manifest,
    to_folder,
    write,
    write_manifest,
)
from nrl.run.checkpoint import storage
from nrl.run.checkpoint.retention import Checkpoint, Checkpoints, best, checkpoints, finite, not_finite
from nrl.run.checkpoint.serialization import decode, encode
from nrl.run.checkpoint.state import (
    RANDOM,
    check,
    load_file,
    random_state,
    read_value,
    set_random_state,
    to_bytes,
    trainers,
)
from nrl.runtime.preemption import note_save
from nrl.runtime.threads import DaemonThreadPool

__all__ = ["begin_storing", "load", "newest", "save", "store", "verify"]

_WRITER = DaemonThreadPool(1, "checkpoint")


def save(
    folder: str | Folder, step: int, values: Mapping[str, Any], meta: Mapping[str, Any] | None = None
) -> Checkpoint:
    """Write a checkpoint: all of it or nothing. It replaces one of the same name, which in a store is removed before.

    The states of the global random generators of Python, NumPy and torch are written too.

    Args:
        folder: its folder, or the URL of one in a store; the one above is made.
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
    return _begin_save(to_folder(folder), step, values, meta, beside=False)()


def _begin_save(
    folder: Folder, step: int, values: Mapping[str, Any], meta: Mapping[str, Any] | None, *, beside: bool
) -> Callable[[], Checkpoint]:
    """Begin to save copies of values, and return the function that completes the checkpoint.

    With ``beside`` the trainers go on to write when this returns; else they have written.
    """
    note_save()
    plain, about = check(values), json.loads(json.dumps(dict(meta or {})))
    written = dict[str, Any]()
    with _all_or_nothing(folder):
        temporary = storage.begin(folder)
        contents = {name: to_bytes(x) for name, x in (plain | {RANDOM: encode(random_state(), RANDOM)}).items()}
        try:
            for name, value in values.items():
                if name not in plain:
                    begin = value.trainer.begin_writing if beside else value.trainer.write
                    written[name] = begin(value, temporary / name)
        except BaseException:
            if beside:  # Trainers still write into the folder, which is removed now.
                with suppress(Exception):
                    _wait_for_all(written)
            raise
    order = dict.fromkeys([*values, RANDOM])

    def complete() -> Checkpoint:
        with _all_or_nothing(folder):
            files: dict[str, Written] = {}
            records: dict[str, Any] = dict.fromkeys(sorted(values))
            saved = _wait_for_all(written) if beside else written
            for name in order:
                if name in contents:
                    files[f"{name}.pt"] = write(temporary / f"{name}.pt", [contents[name]])
                else:
                    theirs, records[name] = saved[name]
                    files |= {f"{name}/{file}": digest for file, digest in theirs.items()}
            write_manifest(temporary, files, records, step=step, meta=about)
            storage.complete(temporary, folder)
        return Checkpoint(folder, step, about, not_finite({"values": records}))

    return complete


def _wait_for_all(written: Mapping[str, Callable[[], Saved]]) -> dict[str, Saved]:
    """Return the records of all trainers; errors are raised after all of them have ended writing."""
    saved, errors = dict[str, Saved](), list[Exception]()
    for name, wait in written.items():
        try:
            saved[name] = wait()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return saved


@contextmanager
def _all_or_nothing(folder: Folder) -> Iterator[None]:
    """Leave nothing of a checkpoint that could not be written."""
    try:
        yield
    except BaseException as error:
        leftover = storage.discard(folder)
        of_the_place = isinstance(error, OSError if isinstance(folder, Path) else Exception)
        if isinstance(error, NrlError) or not of_the_place:
            raise
        before = list[str]()
        with suppress(Exception):
            before = [x.folder.name for x in finite(checkpoints(folder.parent))]
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise CheckpointError(
            f"save: the checkpoint {folder} could not be written{leftover.after} ({reason}{leftover.room}). "
            + (f"The last good one is {before[-1]}. " if before else "There is none before it. ")
            + f"{leftover.advice}, and start the same command again"
        ) from error


def verify(folder: str | Folder, readers: Mapping[str, Trainer] = {}) -> None:
    """Compare every file of a checkpoint with the checksum that was written with it.

    Args:
        folder: of the checkpoint.
        readers: by name of a train state or params, the trainer whose processes read its files, each a share. All other
            files are read here. Missing and short files are found before any is read.

    Raises:
        CheckpointError: a file is missing, truncated or altered, or the manifest lists too few.

    >>> import tempfile
    >>> made = save(Path(tempfile.mkdtemp()) / "000010", 9, {"average": 0.5})
    >>> verify(made.folder)
    """
    folder = to_folder(folder)
    manifest = read_manifest(folder)
    if manifest is None:
        raise CheckpointError(f"{folder}: its {MANIFEST} is missing or was altered")
    files = files_of(manifest)
    for value, record in manifest.get("values", {}).items():
        if record is not None:
            check_parts(folder / value, files_of(manifest, value))
    check_sizes(folder, files)
    check_sums(folder, {name: x for name, x in files.items() if name.partition("/")[0] not in readers})
    for value, trainer in readers.items():
        trainer.verify(folder / value, files_of(manifest, value))


def newest(
    root: str | Folder, say: Callable[[str], None] = print, readers: Mapping[str, Trainer] = {}
) -> Checkpoint | None:
    """Find the newest checkpoint to go on from: intact, with finite weights and optimizer states.

    Newer checkpoints are quarantined: damaged ones as ``<name>.damaged``, diverged ones as ``<name>.diverged``. Call
    this function only while no process writes, because half-written files are removed first.

    Args:
        root: the folder of the checkpoints.
        say: gets a line about each quarantined checkpoint.
        readers: as in `verify`.

    Returns:
        The checkpoint. None: the folder has no checkpoints.

    Raises:
        CheckpointError: no checkpoint is intact and finite; all keep their names.
    """
    storage.clean(storage.resolve(root))
    passed_over: list[tuple[Folder, str, object]] = []
    for candidate in checkpoints(root)[::-1]:
        if candidate.not_finite:
            passed_over.append((candidate.folder, storage.DIVERGED, _describe_divergence(candidate)))
            continue
        try:
            verify(candidate.folder, readers)
        except CheckpointError as error:
            passed_over.append((candidate.folder, storage.DAMAGED, error))
            continue
        for folder, label, reason in passed_over:
            say(f"checkpoint: {reason}; {storage.quarantine(folder, label)}, and {candidate.folder.name} is used")
        return candidate
    if not passed_over:
        return None
    damaged = [reason for _, label, reason in passed_over if label == storage.DAMAGED]
    if damaged:
        raise CheckpointError(
            f"{root}: none of its {len(passed_over)} checkpoints is what was written ({damaged[0]}); mend the newest, "
            f"or remove {root} to start from the beginning"
        )
    raise CheckpointError(
        f"{root}: none of its {len(passed_over)} checkpoints is finite ({passed_over[0][2]}); lower the learning rate, "
        f"and remove {root} to start from the beginning"
    )


def _describe_divergence(checkpoint: Checkpoint) -> str:
    """Return what is wrong with a checkpoint that is not finite."""
    names = ", ".join(checkpoint.not_finite[:2]) + (", ..." if len(checkpoint.not_finite) > 2 else "")
    return f"{checkpoint.folder}: weights or optimizer states in it are NaN or infinite ({names})"


def load(folder: str | Folder, /, **named: Any) -> list[Any]:
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
    folder = to_folder(folder)
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
    values = [read_value(folder / name, like) for name, like in named.items()]
    set_random_state(decode(load_file(folder / f"{RANDOM}.pt"), None, RANDOM))
    return values


def store(
    root: str | Folder,
    step: int,
    values: Mapping[str, Any],
    keep: Checkpoints,
    meta: Mapping[str, Any],
    say: Callable[[str], None] = print,
) -> Folder:
    """Write the checkpoint after ``step`` under ``root``, then delete those that ``keep`` does not keep.

    Those that are kept are finite, but for the one that was just written.

    Args:
        root: the folder that holds the checkpoints, or its URL.
        step: from 0.
        values: as in `save`.
        keep: which ones to keep.
        meta: JSON; ``keep.best`` is looked up under ``"metrics"``.
        say: gets a line where weights or optimizer states are NaN or infinite.

    Returns:
        Its folder.

    >>> import tempfile
    >>> root, keep = tempfile.mkdtemp(), Checkpoints(keep=1, best="reward")
    >>> for step, reward in enumerate([0.2, 0.7, 0.4, 0.5]):
    ...     folder = store(root, step, {}, keep, {"metrics": {"reward": reward}})
    >>> [found.folder.name for found in checkpoints(root)]
    ['000002', '000004']
    """
    return _apply_retention(_begin_save(storage.step_dir(root, step), step, values, meta, beside=False)(), keep, say)


def begin_storing(
    root: str | Folder,
    step: int,
    values: Mapping[str, Any],
    keep: Checkpoints,
    meta: Mapping[str, Any],
    say: Callable[[str], None] = print,
) -> Future[Folder]:
    """Store as `store` does, byte for byte, but return when the values are copied, and write in the background.

    Whoever begins another one at the same place waits for it first. The end of a cluster waits for its trainers' ones.

    Returns:
        A future of the folder, or of what `store` raises.

    >>> import tempfile
    >>> begin_storing(tempfile.mkdtemp(), 9, {"average": 0.5}, Checkpoints(), {}).result().name
    '000010'
    """
    complete = _begin_save(storage.step_dir(root, step), step, values, meta, beside=True)
    future = _WRITER.submit(lambda: _apply_retention(complete(), keep, say))
    for trainer in trainers(values).values():
        trainer.mesh.cluster.wait_for_on_exit(future)
    return future


def _apply_retention(written: Checkpoint, keep: Checkpoints, say: Callable[[str], None]) -> Folder:
    if written.not_finite:
        say(f"save: {_describe_divergence(written)}; no run goes on from it")
    candidates = checkpoints(written.folder.parent)
    retained = {x.folder for x in finite(candidates)[-keep.keep :]} | {written.folder}
    champion = best(candidates, keep)
    if champion is not None:
        retained.add(champion.folder)
    for other in candidates:
        if other.folder not in retained:
            storage.remove(other.folder)
    return written.folder
