"""`run`: the steps of a run, with logging, saving and resuming.

A run writes ``config.yaml``, resolved; ``metrics.jsonl``, one object for each step of the main loop, flushed when the
step ends; ``rollouts.jsonl``, samples; ``report.html``, made of these; and ``checkpoints/``. Other loops, such as a
supervised warm-up, write files of their own. The same command with the same ``out`` goes on after the last checkpoint.
It cuts the files back to that point, so they end up as if the run had never been interrupted.
"""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import attrs
from torch import Tensor

from nrl import config
from nrl.arguments import check_argument, described
from nrl.backends import Trainer
from nrl.batch import Batch
from nrl.batch.metrics import Metrics, Reduced, finalize, merge
from nrl.data.cursors import Stream
from nrl.data.fingerprints import accept_changed_rows
from nrl.errors import ArgumentError, CheckpointError, ConfigError
from nrl.files import Folder
from nrl.log import Progress, Sink, duration, open_sinks, redacted
from nrl.rollout.prefetch import at_end
from nrl.rollout.rollout_stream import close_all
from nrl.run import checkpoint, config_file, folder
from nrl.run.async_checkpoint import AsyncCheckpointer
from nrl.run.checkpoint import Checkpoints
from nrl.run.reporting import report_at_end
from nrl.run.step_log import Loop, LoopFiles, RunningStep, StepInput, describe_resume, gc_paused
from nrl.runtime.mesh.futures import Future
from nrl.runtime.preemption import Preemption, Terminated, heed_signals
from nrl.runtime.trace import measured, profiles, timeline

__all__ = ["Run", "run"]


class Run:
    """A run that has been entered; made by `run`.

    Args:
        out: its folder.
        total: steps of the main loop.
        keep: when to write checkpoints, and which to keep.
        sink: gets the metrics, besides the terminal and the JSONL files.
        preemption: knows whether SIGTERM or Ctrl-C has come.
        stack: closes everything at the end of the run.
        text: the configuration.
    """

    def __init__(
        self, out: Path, total: int, keep: Checkpoints, sink: Sink, preemption: Preemption, stack: ExitStack, text: str
    ) -> None:
        self.out, self.total, self.keep, self._text = out, total, keep, text
        self._sink, self._preemption = sink, preemption
        self._progress = stack.enter_context(Progress())
        self._files = LoopFiles(out, stack)
        self._loops: dict[str, Loop] = {}
        self._running: list[Loop] = []  # nested loops; the last calls log and save
        self._checkpointer = stack.enter_context(AsyncCheckpointer())
        self._sharing: set[Trainer] = set()  # trainers whose processes are known to see this folder

    @timeline.span("restore")
    def restore(self, loop: str = "train", /, **named: Any) -> Any:
        """Restore the named values from the newest checkpoint of a loop; without a checkpoint, return them as they are.

        The loop's files are cut back to the checkpoint, and the next `steps` of that loop goes on after it. A
        checkpoint whose checksums differ is reported and set aside, and the one before is used.

        Args:
            loop: the ``name`` of `steps`.
            **named: a `Trainer` stands for its train state, which is ``trainer.init()`` without a checkpoint. A train
                state (consumed if there is a checkpoint), frozen params, a stream (restored in place), or plain data
                stand for themselves.

        Returns:
            The values, in order; a single one without a tuple.

        Raises:
            ArgumentError: a value is given by its place.
            CheckpointError: every checkpoint is damaged, or they hold other names; or a process of a trainer does not
                share the folder with the program; or ``checkpoints.to`` has changed.
            DataError: a stream reads a source whose rows have changed, and ``checkpoints.data_changed`` is not
                ``"accept"``.
            ConfigError: ``checkpoints.to`` holds another run's.
            ModelError: the files of a trainer's model could not be written at an export.

        >>> import attrs, tempfile
        >>> from nrl.data import counting
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
        if not isinstance(loop, str):
            raise ArgumentError(
                f"run.restore: {described(loop)} was given by its place; give it by the name that run.save uses, such "
                "as run.restore(state=trainer)",
                "loop",
            )
        self._checkpointer.wait()
        loop_state = self._loop(loop)
        loop_state.names = frozenset(named)
        for trainer in checkpoint.trainers(named).values():
            trainer.check_export()
        had = self._check_shared("run.restore", loop_state, named)
        newest = checkpoint.newest(loop_state.checkpoints, readers=checkpoint.trainers(named))
        if newest is None:
            loop_state.begins = 0
            values = [value.init() if isinstance(value, Trainer) else value for value in named.values()]
            self._files.truncate(loop, {})
        else:
            if not had:
                config_file.check_same(self._text, newest.meta.get("config"), loop_state.checkpoints)
            loop_state.begins = newest.step + 1
            with accept_changed_rows(self.keep.data_changed == "accept"):
                values = checkpoint.load(newest.folder, **named)
            if champion := checkpoint.best(checkpoint.checkpoints(loop_state.checkpoints), self.keep):
                loop_state.best = checkpoint.score(champion.meta["metrics"], self.keep) or 0.0
            print(
                f"{loop}: {newest.step + 1} of {newest.meta['steps']} steps were done; going on after them", flush=True
            )
            self._files.truncate(loop, newest.meta["files"])
        return values[0] if len(values) == 1 else tuple(values)

    def steps(self, stream: Stream[Batch], n: int | None = None, *, name: str = "train") -> Iterator[tuple[int, Batch]]:
        """Pull a batch for each remaining step of a loop.

        Args:
            stream: of batches.
            n: the number of steps in all; None: the config's ``steps``.
            name: the loop's file is ``<name>.jsonl``, that of ``train`` is ``metrics.jsonl``. A loop within another
                one, such as an evaluation, belongs to it: its file is cut back with the outer one's. It is
                ``<outer>.<name>.jsonl``, unless the outer one is ``train``.

        Yields:
            The step, from 0, or from where the loop was restored, and its batch.

        Raises:
            ConfigError: the loop has been run before in this folder, and it was not restored.
        """
        check_argument("run.steps", "stream", stream, Stream)
        check_argument("run.steps", "n", n, int | None)
        outer = f"{self._running[-1].file}." if self._running else ""
        file = outer.removeprefix("metrics.") + ("metrics" if name == "train" else name)
        loop = self._loop(name)
        if not self._running and loop.begins is None and self._files.has_old_lines(file):
            raise ConfigError(
                f"run.steps: out={self.out} holds steps of the loop '{name}', which this run did not restore; call "
                f"run.restore('{name}', ...) before the loop, or give another folder"
            )
        main, shown = file == "metrics", "train" if file == "metrics" else file
        steps, begins = self.total if n is None else n, loop.begins or 0
        loop.file, loop.steps, loop.begins, loop.checked, loop.last_input = file, steps, None, False, None
        self._running.append(loop)
        try:
            with gc_paused():
                for step in range(begins, steps):
                    self._checkpointer.check()
                    if main:
                        timeline.step(step)
                    with timeline.span(f"{shown} {step}", loop=shown):
                        loop.step = RunningStep(
                            requested=time.perf_counter(), published=timeline.seconds_spent("publish")
                        )
                        with timeline.span("take"):
                            batch = self._pull(loop, stream, step)
                        loop.step.pulled = time.perf_counter()
                        yield step, batch
                    folder.mark_begun(self.out)
        finally:
            self._running.remove(loop)
            if expect := getattr(stream, "expect", None):
                expect(None)
            if not self._running:
                self._preemption.going_on = False
        if main:
            timeline.step(None)
        if not self._running:
            self._checkpointer.wait()

    @timeline.span("log")
    def log(
        self,
        step: int,
        *metrics: Mapping[str, Reduced | float | Tensor] | Future[Metrics],
        samples: Mapping[str, Any] | None = None,
    ) -> dict[str, float]:
        """Write one line: the metrics and the times of the step.

        In seconds: ``time/rollout`` is the time of the stream, ``time/train`` the time from then until now,
        ``time/publish`` the part of it that published weights, and ``time/total`` the sum of the first two.
        ``device/...`` is what train steps took of their devices since the last line (docs/logs.md), and
        ``tokens_per_second`` the number of trained tokens (prompts too) over the total.

        Args:
            step: from `steps`.
            *metrics: several are merged; futures are waited for. A plain number, or a scalar tensor, stands for itself.
            samples: from `nrl.samples`; a line of ``rollouts.jsonl``, which the report shows.

        Returns:
            The numbers of the line.

        Raises:
            ArgumentError: a metric is neither a reduction, such as a `Mean`, nor a number; or one is a number and given
                twice.
            ConfigError: no loop over `steps` is running, or the step has been saved already.
            OSError: the disk is full.
        """
        loop = self._innermost("log")
        if any(running_loop.step.saved for running_loop in self._running):
            raise ConfigError(
                f"run.log: step {step} of the loop '{loop.name}' comes after run.save, so its line would be cut off "
                "when the run goes on from that checkpoint; save last in a step"
            )
        merged: Metrics = {}
        plain: dict[str, float] = {}
        for group in metrics:
            if not (isinstance(group, Mapping) or hasattr(group, "result")):
                raise ArgumentError(
                    f"run.log: metrics is {described(group)}; give a mapping from names to reductions or numbers, such "
                    "as what a train step returns, or {'reward': 1.0}",
                    "metrics",
                )
            values: Mapping[str, Any] = group if isinstance(group, Mapping) else group.result()
            shapes = {key: getattr(value, "shape", None) for key, value in values.items()}  # a scalar tensor has ()
            numbers_of_group = {
                key: float(value)
                for key, value in values.items()
                if isinstance(value, int | float) or shapes[key] == ()
            }
            if twice := sorted(numbers_of_group.keys() & (plain.keys() | merged.keys())):
                raise ArgumentError(f"run.log: the metric '{twice[0]}' is given twice; give a number once", "metrics")
            merged = merge(merged, {key: value for key, value in values.items() if key not in numbers_of_group})
            plain |= numbers_of_group
        logged, running = time.perf_counter(), loop.step
        numbers = {"step": step, "loss": float("nan"), "grad_norm": float("nan")}
        numbers |= plain | finalize(merged | measured.take())
        numbers["tokens_per_second"] = numbers.get("tokens", 0.0) / max(logged - running.requested, 1e-9)
        numbers["time/rollout"] = running.pulled - running.requested
        numbers["time/train"] = logged - running.pulled
        if publishing := timeline.seconds_spent("publish") - running.published:
            numbers["time/publish"] = publishing
        numbers["time/total"] = logged - running.requested
        self._files.write(loop.file, numbers)
        if samples is not None:
            file = "rollouts" if loop.file == "metrics" else f"{loop.file}.rollouts"
            self._files.write(file, {"step": step} | dict(samples))
        self._progress.show(loop.name, step, loop.steps, numbers)
        self._sink.write(loop.name, step, numbers)
        running.numbers = numbers
        return numbers

    @timeline.span("save")
    def save(self, step: int, **named: Any) -> Folder | None:
        """Write a checkpoint of the running loop if one is due: see `nrl.run.checkpoint.Checkpoints`.

        It returns when the values are copied, and the files are written beside the steps that follow. One is written
        at a time; the end of the loop waits for the last. Call it when the step is logged and its weights are
        published.

        Args:
            step: from `steps`.
            **named: train states, params, streams and plain data; the same names as in `restore`.

        Returns:
            The folder that the checkpoint has when it is complete; None: none was due.

        Raises:
            CheckpointError: this one could not be copied, or the one before not be written (earlier ones stay; the next
                step or the end of the loop says so, too), the names are not those of `restore`, or, at the first step,
                a process of a trainer does not share the folder with the program.
            ConfigError: no loop over `steps` is running.
        """
        loop = self._innermost("save")
        with at_end(step + 1 == loop.steps):
            return self._save_if_due(loop, step, named)

    def _save_if_due(self, loop: Loop, step: int, named: Mapping[str, Any]) -> Folder | None:
        self._check(loop, named)
        loop.step.saved = True
        step_input = loop.last_input = StepInput(step, named, loop.step.numbers)
        score, last = checkpoint.score(step_input.numbers, self.keep), step + 1 == loop.steps
        better = score is not None and score > loop.best
        if not (better or last or (step + 1) % self.keep.every == 0 or self._is_preempted(loop)):
            return None
        if better and score is not None:
            loop.best = score
        if last and loop.name == "train" and self.keep.best and loop.best == -math.inf:
            print(
                f"train: no step logged '{self.keep.best}', so no checkpoint was kept for it (checkpoints.best)",
                flush=True,
            )
        self._store(loop, step_input)
        if self._is_preempted(loop):
            self._report_saved(loop, step_input)
            self._preemption.end()
        return step_input.folder

    def _store(self, loop: Loop, step_input: StepInput) -> None:
        self._preemption.going_on = True
        self._files.check_folder("run.save")
        metrics = {key: value for key, value in step_input.numbers.items() if math.isfinite(value)}
        meta = {"steps": loop.steps, "files": self._files.sizes(loop.name), "metrics": metrics}
        if loop.checkpoints != loop.folder:
            meta["config"] = self._text
        folder, given_to = (
            checkpoint.step_dir(loop.checkpoints, step_input.step),
            (loop.checkpoints, step_input.step, step_input.named),
        )
        if self.keep.wait == "disk":
            checkpoint.store(*given_to, self.keep, meta)
        else:
            self._checkpointer.begin(folder, partial(checkpoint.begin_storing, *given_to, self.keep, meta))
        step_input.folder = folder

    def _report_saved(self, loop: Loop, step_input: StepInput) -> None:
        self._checkpointer.wait()
        self._preemption.say(f"step {step_input.step} of '{loop.name}' is saved in {step_input.folder}")

    def _check(self, loop: Loop, named: Mapping[str, Any]) -> None:
        """Find values that cannot be saved or restored at the first step, not when the first checkpoint is due."""
        if loop.names is None:
            loop.names = frozenset(named)
        if loop.names != named.keys():
            raise CheckpointError(
                f"run.save: the loop '{loop.name}' restores {', '.join(sorted(loop.names)) or 'nothing'} and saves "
                f"{', '.join(sorted(named)) or 'nothing'}; give the same names to restore and save"
            )
        if not loop.checked:
            checkpoint.check(named)
            self._check_shared("run.save", loop, named)
        loop.checked = True

    # --- SIGTERM and Ctrl-C: the outermost loop heeds them, while it waits for a batch or at the end of its step

    def _is_preempted(self, loop: Loop) -> bool:
        return loop is self._running[0] and self._preemption.is_requested

    def _pull(self, loop: Loop, stream: Stream[Batch], step: int) -> Batch:
        """Take the next batch. A signal breaks this off if the stream can go back; else the step is finished first.

        The signal may also end the processes that make the batch: their error breaks this off, too.
        """
        if loop is not self._running[0]:
            return stream.take(1)[0]
        if self._preemption.is_requested:
            self._end(loop)
        if expect := getattr(stream, "expect", None):
            expect(loop.steps - step)
        mark, saves = getattr(stream, "mark", None), loop.names is not None
        random, back = checkpoint.random_state(), mark() if mark else None
        try:
            self._preemption.going_on = saves and back is None
            batch = stream.take(1)[0]
            self._preemption.going_on, self._preemption.begun = saves, True
        except (Terminated, KeyboardInterrupt, Exception):
            if back is None or not self._preemption.is_requested:
                raise
            back()
            if not getattr(stream, "remote", False):  # other processes go on with their items, which are kept
                checkpoint.set_random_state(random)
            self._end(loop)
        loop.last_input = None
        return batch

    def _end(self, loop: Loop) -> NoReturn:
        """Save the last step's values, unless they are saved already, and raise what ends the program."""
        step_input, preemption = loop.last_input, self._preemption
        if step_input is None:
            preemption.say(f"no step of '{loop.name}' has been given to run.save since the last checkpoint")
        else:
            try:
                if step_input.folder is None:
                    self._store(loop, step_input)
                self._report_saved(loop, step_input)
            except Exception as error:
                preemption.say(f"no checkpoint could be saved: {type(error).__name__}: {error}")
        preemption.end()

    # --- helpers of several verbs

    def _loop(self, name: str) -> Loop:
        own_folder = self.out / "checkpoints" / name
        return self._loops.setdefault(name, Loop(name, own_folder, checkpoint.root(own_folder, self.keep.to)))

    def _innermost(self, caller: str) -> Loop:
        if not self._running:
            raise ConfigError(
                f"run.{caller}: no loop is running; call it inside of `for step, batch in run.steps(stream)`"
            )
        return self._running[-1]

    def _check_shared(self, caller: str, loop: Loop, named: Mapping[str, Any]) -> bool:
        """See that all processes that will write checkpoints see the same folder; whether it is that of before."""

        def check() -> None:
            for trainer in set(checkpoint.trainers(named).values()) - self._sharing:
                trainer.check_folder(loop.checkpoints, caller)
                self._sharing.add(trainer)

        return checkpoint.settle(loop.folder, loop.checkpoints, check)


@contextmanager
def run(cfg: Any) -> Iterator[Run]:
    """Enter a run: ``with nrl.run(cfg) as run``.

    Args:
        cfg: a frozen attrs config. The run reads these fields, if present: ``out``, its folder (None: a new one
            under ``runs/``); ``steps``, of the main loop; ``seed``, of the global random generators; ``checkpoints``, a
            `nrl.run.checkpoint.Checkpoints`; and ``sinks``, which get the metrics besides the terminal and the JSONL
            files: any of ``"wandb"``, ``"tensorboard"`` and ``"mlflow"``.

    Raises:
        ConfigError: ``out`` is a file; it holds a run without checkpoints, or one of another configuration (``out``,
            ``steps``, ``checkpoints``, ``sinks``, optimizers, and where a step is computed, such as ``cluster`` and
            ``layout``, may change: docs/checkpoints.md); another process is in it; or ``steps`` is negative.

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
    if isinstance(cfg, type) or not attrs.has(type(cfg)):
        instead = f"{cfg.__name__}()" if isinstance(cfg, type) else "an instance of a class of @attrs.frozen"
        raise ConfigError(f"run: cfg is {described(cfg)}; give {instead}")
    text = config.dump(cfg, redacted)
    started, keep = time.monotonic(), getattr(cfg, "checkpoints", Checkpoints())
    with ExitStack() as stack:
        preemption = stack.enter_context(heed_signals(keep.grace))  # first, so that slow closing ends in time, too
        out = stack.enter_context(folder.enter(cfg))
        config_file.write(out, text)
        checkpoint.seed_generators(getattr(cfg, "seed", 0))
        measured.take()  # steps before this run belong to no line of it
        sink = stack.enter_context(open_sinks(getattr(cfg, "sinks", ()), out, attrs.asdict(cfg), name=out.name))
        stack.callback(report_at_end, out)
        stack.callback(close_all)
        stack.enter_context(timeline.recording(out))
        stack.enter_context(profiles.profiling(out))
        stack.callback(lambda: preemption.write(describe_resume(out)) if preemption.is_requested else None)
        entered = Run(out, int(getattr(cfg, "steps", 0)), keep, sink, preemption, stack, text)
        yield entered
        entered._files.check_folder("run")
    print(f"done in {duration(time.monotonic() - started)}; metrics are in {out}", flush=True)
