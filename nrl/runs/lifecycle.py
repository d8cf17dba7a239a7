"""`run`: the steps of a run, with logging, saving and resuming.

A run leaves behind ``config.yaml``, resolved; ``metrics.jsonl``, one object for each step of the main loop, flushed
when the step ends; ``rollouts.jsonl``, samples; ``report.html``, made of these; and ``checkpoints/``. Other loops, such
as a supervised warm-up, write files of their own. The same command with the same ``out`` goes on after the last
checkpoint: files are cut back to it, so they are those of a run that was never interrupted.
"""

import os
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import attrs
import numpy as np

from nrl import checkpoint, config
from nrl.backends.base import Trainer
from nrl.batch import Batch
from nrl.checkpoint import Checkpoints
from nrl.errors import CheckpointError, ConfigError
from nrl.log import JsonLines, Progress, Sink, duration, open_sinks, redacted
from nrl.reduce import Metrics, finalize, merge
from nrl.runs import folder
from nrl.runs.reporting import report
from nrl.runtime.mesh.futures import Future
from nrl.runtime.preemption import Preemption, Terminated, heeded
from nrl.runtime.trace import profiles, timeline
from nrl.stream import Stream

__all__ = ["Run", "run"]


@attrs.define(eq=False)
class _Loop:
    name: str
    steps: int
    file: str  # without its suffix: a loop within a loop other than the main one bears that one's name too
    checked: bool = False  # what it saves
    saved: bool = False  # the step that is running
    asked: float = 0.0
    pulled: float = 0.0
    published: float = 0.0  # seconds that were spent on it before the step
    numbers: dict[str, float] = attrs.field(factory=dict)  # of the step, once it is logged
    last: "_Last | None" = None  # what the step before left, as long as nothing has consumed it


@attrs.frozen(eq=False)
class _Last:
    step: int
    named: Mapping[str, Any]
    numbers: Mapping[str, float]
    folder: Path | None = None  # of its checkpoint


class Run:
    """A run that has been entered; made by `run`.

    Args:
        out: its folder.
        total: steps of the main loop.
        keep: when checkpoints are written, and which are kept.
        sink: what else is told of metrics, besides the terminal and the JSONL files.
        preemption: whether SIGTERM has come.
        stack: of what ends with the run.
    """

    def __init__(
        self, out: Path, total: int, keep: Checkpoints, sink: Sink, preemption: Preemption, stack: ExitStack
    ) -> None:
        self.out, self.total, self.keep, self._stack = out, total, keep, stack
        self._sink, self._preemption = sink, preemption
        self._progress = stack.enter_context(Progress())
        self._files: dict[str, JsonLines] = {}
        self._loops: list[_Loop] = []  # one within the other; the last is the one that is running
        self._next: dict[str, int] = {}  # the step at which a restored loop goes on
        self._names: dict[str, set[str]] = {}  # of what a loop restores and saves
        self._best: dict[str, float] = {}
        self._sharing: set[Trainer] = set()  # those whose processes have been seen to have this folder

    @timeline.span("restore")
    def restore(self, loop: str = "train", /, **named: Any) -> Any:
        """The named values as the newest checkpoint of a loop has them; without a checkpoint, as they are.

        The loop's files are cut back to the checkpoint, and the next `steps` of that loop goes on after it. A
        checkpoint that is not what was written, by its checksums, is said and set aside, and the one before is used.

        Args:
            loop: the ``name`` of `steps`.
            **named: a `Trainer` stands for its train state, which is ``trainer.init()`` where there is no checkpoint.
                A train state (consumed where there is one), frozen params, a stream (restored in place), or plain data
                stand for themselves.

        Returns:
            The values, in order; one alone not in a tuple.

        Raises:
            CheckpointError: every checkpoint is damaged, or they hold other names; or a process of a trainer does not
                have the folder in common with the program.

        >>> import attrs, tempfile
        >>> from nrl.stream import counting
        >>> @attrs.frozen
        ... class Config:
        ...     out: str = tempfile.mkdtemp()
        ...     steps: int = 2
        >>> for attempt in range(2):
        ...     with run(Config()) as entered:
        ...         total, stream = entered.restore(total=0, stream=counting())
        ...         for i, batch in entered.steps(stream):
        ...             total += 10
        ...             folder = entered.save(i, total=total, stream=stream)
        ...     total
        done in ...
        20
        train: 2 of 2 steps were done; going on after them
        done in ...
        20
        """
        root = self._checkpoints(loop)
        self._share("run.restore", root, named)
        found = checkpoint.newest(root, readers=checkpoint.trainers(named))
        self._next[loop] = 0 if found is None else found.step + 1
        self._names[loop] = set(named)
        if found is None:
            values = [value.init() if isinstance(value, Trainer) else value for value in named.values()]
        else:
            values = checkpoint.load(found.folder, **named)
            champion = checkpoint.best(checkpoint.checkpoints(root), self.keep)
            if champion is not None:
                self._best[loop] = checkpoint.score(champion.meta["metrics"], self.keep) or 0.0
            self._say(f"{loop}: {found.step + 1} of {found.meta['steps']} steps were done; going on after them")
        self._cut(loop, {} if found is None else found.meta["files"])
        return values[0] if len(values) == 1 else tuple(values)

    @timeline.span("save")
    def save(self, step: int, **named: Any) -> Path | None:
        """Write a checkpoint of the running loop if one is due: see `nrl.checkpoint.Checkpoints`.

        Call it when the step is logged and its weights are published.

        Args:
            step: from `steps`.
            **named: train states, params, streams and plain data; the same names as in `restore`.

        Returns:
            The folder of the checkpoint, None where none was due.

        Raises:
            CheckpointError: it could not be written (those before stand), the names are not those of `restore`, or, at
                the first step, a process of a trainer does not have the folder in common with the program.
            ConfigError: no loop over `steps` is running.
        """
        loop = self._running("save")
        self._check(loop, named)
        loop.saved = True
        score = checkpoint.score(loop.numbers, self.keep)
        better = score is not None and score > self._best.get(loop.name, float("-inf"))
        due = better or (step + 1) % self.keep.every == 0 or step + 1 == loop.steps
        last = loop is self._loops[0] and self._preemption.asked
        if not due and not last:
            loop.last = _Last(step, named, loop.numbers)
            return None
        if better and score is not None:
            self._best[loop.name] = score
        if step + 1 == loop.steps and loop.name == "train" and self.keep.best and "train" not in self._best:
            self._say(f"train: no step logged '{self.keep.best}', so no checkpoint was kept for it (checkpoints.best)")
        loop.last = self._store(loop, _Last(step, named, loop.numbers))
        if loop is self._loops[0] and self._preemption.asked:
            self._preemption.end()
        return loop.last.folder

    def _store(self, loop: _Loop, made: _Last) -> _Last:
        self._preemption.going_on = True
        sizes = {path.name: _size(path) for path in self._logs(loop.name)}
        meta = {"steps": loop.steps, "files": sizes, "metrics": _finite(made.numbers)}
        folder = checkpoint.store(self._checkpoints(loop.name), made.step, made.named, self.keep, meta)
        if self._preemption.asked:
            self._preemption.say(f"step {made.step} of '{loop.name}' is saved in {folder}")
        return attrs.evolve(made, folder=folder)

    def steps(self, stream: Stream[Batch], n: int | None = None, *, name: str = "train") -> Iterator[tuple[int, Batch]]:
        """Pull a batch for each step of a loop that is left to do.

        Args:
            stream: of batches.
            n: the number of steps in all; None: the config's ``steps``.
            name: the loop's file is ``<name>.jsonl``, that of ``train`` is ``metrics.jsonl``. A loop within
                another one, such as an evaluation, belongs to it: its file is cut back with it, and is
                ``<outer>.<name>.jsonl`` where the outer one is not ``train``.

        Yields:
            The step, from 0, or from where the loop was restored, and its batch.

        Raises:
            ConfigError: the loop has been run before in this folder, and it was not restored.
        """
        outer = f"{self._loops[-1].file}." if self._loops else ""
        file = outer.removeprefix("metrics.") + ("metrics" if name == "train" else name)
        loop = _Loop(name, self.total if n is None else n, file)
        if not self._loops and name not in self._next and file not in self._files and self._used(file):
            raise ConfigError(
                f"run.steps: out={self.out} holds steps of the loop '{name}', which this run did not restore; call "
                f"run.restore('{name}', ...) before the loop, or give another folder"
            )
        main, shown = file == "metrics", "train" if file == "metrics" else file
        self._loops.append(loop)
        try:
            for step in range(self._next.pop(name, 0), loop.steps):
                if main:
                    timeline.step(step)
                with timeline.span(f"{shown} {step}", loop=shown):
                    loop.numbers, loop.saved, loop.asked = {}, False, time.perf_counter()
                    loop.published = timeline.spent("publish")
                    with timeline.span("take"):
                        batch = self._pull(loop, stream)
                    loop.pulled = time.perf_counter()
                    folder.begun(self.out)
                    yield step, batch
        finally:
            self._loops.remove(loop)
            if not self._loops:
                self._preemption.going_on = False
        if main:
            timeline.step(None)

    def _pull(self, loop: _Loop, stream: Stream[Batch]) -> Batch:
        """The next batch. SIGTERM breaks that off where the stream can go back; else the step comes to its end.

        The same signal may have ended what makes the batch: that error breaks it off as well.
        """
        if loop is not self._loops[0]:
            return stream.take(1)[0]
        if self._preemption.asked:
            self._end(loop)
        mark, saves = getattr(stream, "mark", None), loop.name in self._names
        random, back = checkpoint.random_state(), mark() if mark else None
        try:
            self._preemption.going_on = saves and back is None
            batch = stream.take(1)[0]
            self._preemption.going_on = saves
        except (Terminated, Exception):
            if back is None or not self._preemption.asked:
                raise
            back()
            if not getattr(stream, "remote", False):  # else what others make goes on, and is kept
                checkpoint.set_random_state(random)
            self._end(loop)
        loop.last = None
        return batch

    def _end(self, loop: _Loop) -> NoReturn:
        """Save what the last step left, if it has not been saved, and raise `Terminated`."""
        last, preemption = loop.last, self._preemption
        if last is None:
            preemption.say(f"no step of '{loop.name}' has been given to run.save since the last checkpoint")
        elif last.folder is not None:
            preemption.say(f"step {last.step} of '{loop.name}' is saved in {last.folder}")
        else:
            try:
                self._store(loop, last)
            except Exception as error:
                preemption.say(f"no checkpoint could be saved: {type(error).__name__}: {error}")
        preemption.end()

    @timeline.span("log")
    def log(
        self, step: int, *metrics: Metrics | Future[Metrics], samples: Mapping[str, Any] | None = None
    ) -> dict[str, float]:
        """Write one line: the metrics, and the times of the step.

        ``time/rollout`` is the time that the stream took, ``time/train`` all from then until now, ``time/publish`` what
        of it went into publishing weights, ``time/total`` the sum of the first two, in seconds; ``tokens_per_second``
        the trained tokens (prompts too) over the total.

        Args:
            step: from `steps`.
            *metrics: several are merged; futures are waited for.
            samples: from `nrl.samples`; a line of ``rollouts.jsonl``, which the report shows.

        Returns:
            What was written.

        Raises:
            ConfigError: no loop over `steps` is running, or the step has been saved already.
            OSError: the disk is full.
        """
        loop = self._running("log")
        if any(each.saved for each in self._loops):
            raise ConfigError(
                f"run.log: step {step} of the loop '{loop.name}' comes after run.save, so its line would be cut off "
                "when the run goes on from that checkpoint; save last in a step"
            )
        merged: Metrics = {}
        for some in metrics:
            merged = merge(merged, some if isinstance(some, dict) else some.result())
        now = time.perf_counter()
        numbers = {"step": step, "loss": float("nan"), "grad_norm": float("nan")} | finalize(merged)
        numbers["tokens_per_second"] = numbers.get("tokens", 0.0) / max(now - loop.asked, 1e-9)
        numbers["time/rollout"] = loop.pulled - loop.asked
        numbers["time/train"] = now - loop.pulled
        if publishing := timeline.spent("publish") - loop.published:
            numbers["time/publish"] = publishing
        numbers["time/total"] = now - loop.asked
        self._write(loop.file, numbers)
        if samples is not None:
            file = "rollouts" if loop.file == "metrics" else f"{loop.file}.rollouts"
            self._write(file, {"step": step} | dict(samples))
        self._progress.show(loop.name, step, loop.steps, numbers)
        self._sink.write(loop.name, step, numbers)
        loop.numbers = numbers
        return numbers

    def _check(self, loop: _Loop, named: Mapping[str, Any]) -> None:
        """What could not be saved or restored is said at the first step, not where the first checkpoint is due."""
        known = self._names.setdefault(loop.name, set(named))
        if known != set(named):
            raise CheckpointError(
                f"run.save: the loop '{loop.name}' restores {', '.join(sorted(known)) or 'nothing'} and saves "
                f"{', '.join(sorted(named)) or 'nothing'}; give the same names to restore and save"
            )
        if not loop.checked:
            checkpoint.check(named)
            self._share("run.save", self._checkpoints(loop.name), named)
        loop.checked = True

    def _share(self, who: str, root: Path, named: Mapping[str, Any]) -> None:
        """Make a folder, and see that all who will write there have it in common."""
        root.mkdir(parents=True, exist_ok=True)
        for trainer in set(checkpoint.trainers(named).values()) - self._sharing:
            trainer.check_folder(root, who)
            self._sharing.add(trainer)

    def _running(self, who: str) -> _Loop:
        if not self._loops:
            raise ConfigError(
                f"run.{who}: no loop is running; call it inside of `for step, batch in run.steps(stream)`"
            )
        return self._loops[-1]

    def _write(self, file: str, record: Mapping[str, Any]) -> None:
        path = self.out / f"{file}.jsonl"
        try:
            if file not in self._files:
                self._files[file] = self._stack.enter_context(JsonLines(path))
            self._files[file].write(record)
        except OSError as error:
            raise OSError(
                error.errno,
                f"run.log: {path} could not be written ({error.strerror}); make room, and start the same command again",
            ) from error

    def _checkpoints(self, loop: str) -> Path:
        return self.out / "checkpoints" / loop

    def _used(self, file: str) -> bool:
        path = self.out / f"{file}.jsonl"
        return path.exists() and path.stat().st_size > 0

    def _logs(self, loop: str) -> list[Path]:
        """The files of a loop and of those within it, which begin with its name; all others are of the main one."""
        loops = {loop, *(path.name for path in self._checkpoints(loop).parent.glob("*"))} - {"train"}

        def owner(path: Path) -> str:
            return next((name for name in loops if path.name.startswith(f"{name}.")), "train")

        return [path for path in sorted(self.out.glob("*.jsonl")) if owner(path) == loop]

    def _cut(self, loop: str, sizes: Mapping[str, int]) -> None:
        for path in self._logs(loop):
            if path.stem not in self._files and path.stat().st_size > sizes.get(path.name, 0):
                os.truncate(path, sizes.get(path.name, 0))
        for name, size in sizes.items():
            path = self.out / name
            if not path.exists() or path.stat().st_size < size:
                self._say(f"{loop}: {name} is shorter than at the checkpoint; lines that were in it are lost")

    def _say(self, text: str) -> None:
        print(text, flush=True)  # noqa: T201


def _size(path: Path) -> int:
    """In bytes, all of them on the disk, so that no checkpoint is newer than its logs when a machine loses power."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size


def _finite(numbers: Mapping[str, float]) -> dict[str, float]:
    return {key: value for key, value in numbers.items() if np.isfinite(value)}


@contextmanager
def run(cfg: Any) -> Iterator[Run]:
    """Enter a run: ``with nrl.run(cfg) as run``.

    Args:
        cfg: a frozen attrs config. What it has of these is read: ``out``, the run's folder (None: a new one under
            ``runs/``), ``steps``, the number of steps of the main loop, ``seed``, of the global random generators,
            ``checkpoints``, a `nrl.checkpoint.Checkpoints`, and ``sinks``, where metrics go besides the terminal and
            the JSONL files: any of ``"wandb"``, ``"tensorboard"`` and ``"mlflow"``.

    Raises:
        ConfigError: ``out`` is a file; holds a run that has no checkpoints, one that another process is in, or one with
            another configuration (``out``, ``steps``, ``checkpoints``, ``sinks``, ``cluster`` and ``optimizer`` may
            change); or ``steps`` is negative.

    >>> import attrs, tempfile
    >>> @attrs.frozen
    ... class Config:
    ...     steps: int
    ...     out: str
    >>> with run(Config(steps=3, out=tempfile.mkdtemp())) as entered:
    ...     print(entered.total)
    3
    done in 0:00; metrics are in ...
    """
    text = config.dump(cfg, redacted)
    started, keep = time.monotonic(), getattr(cfg, "checkpoints", Checkpoints())
    with ExitStack() as stack:
        preemption = stack.enter_context(heeded(keep.grace))  # first: what takes long to close is closed in time
        out = stack.enter_context(folder.entered(cfg))
        folder.settle(out, text)
        folder.plant(getattr(cfg, "seed", 0))
        sink = stack.enter_context(open_sinks(getattr(cfg, "sinks", ()), out, attrs.asdict(cfg), name=out.name))
        stack.callback(_report, out)
        stack.enter_context(timeline.recording(out))
        stack.enter_context(profiles.asked(out))
        yield Run(out, int(getattr(cfg, "steps", 0)), keep, sink, preemption, stack)
    print(f"done in {duration(time.monotonic() - started)}; metrics are in {out}", flush=True)  # noqa: T201


def _report(out: Path) -> None:
    """However a run ends, there is something to look at; and what ended it is not hidden by this."""
    try:
        if any(path.stat().st_size for path in out.glob("*.jsonl")):
            report(out)
    except Exception as error:
        warnings.warn(f"run: {out}/report.html could not be written: {type(error).__name__}: {error}", stacklevel=2)
