"""`retrying`: resumes a program after a process of a mesh has died."""

import functools
import gc
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path

from nrl.errors import ArgumentError, FailedStart, LostActor
from nrl.log import printable, redact
from nrl.run import checkpoint
from nrl.run.folder import Folders, is_dead_end, reuse_folders
from nrl.runtime.preemption import end_after_signal
from nrl.runtime.restart_state import mark_restart

__all__ = ["retrying"]

_LONGEST = 60.0  # seconds between two attempts


def retrying[C, T](main: Callable[[C], T], times: int = 3, *, pause: float = 1.0) -> Callable[[C], T]:
    """Let a program continue from its last checkpoint when a process of a mesh is lost.

    `nrl.errors.LostActor` leaves the ``with`` blocks of the program, which end its meshes. Then ``main`` is called
    again, with the same configuration. Its `nrl.run` enters the same folder, even if ``out`` is None, hence
    `Run.restore` finds the newest checkpoint, and the metrics equal the metrics of an undisturbed run. Its
    ``cluster.reserve(..., least=)`` may return fewer slots than before, if a host is gone.

    The error may come wrapped: as the ``__cause__`` of another (``raise ... from``), or in an `ExceptionGroup` of such
    errors alone. All other errors, and Ctrl-C, end the program as without this. So does SIGTERM: a process lost after
    it, perhaps by the same signal, is no reason to begin again.

    Args:
        main: ``(cfg) -> value``.
        times: retries in a row without a new checkpoint; then the error is raised. A new checkpoint restarts the
            count: a run of weeks may lose any number of processes, and a run without further checkpoints ends.
        pause: seconds before the first of these retries; doubled before each further retry, up to a minute.

    Returns:
        The program.

    Raises:
        LostActor: ``times`` is used up, or steps were logged by a run that makes no checkpoints.
        ValueError: ``times`` or ``pause`` is negative.

    >>> import attrs, nrl, tempfile
    >>> from nrl.data import counting
    >>> @attrs.frozen
    ... class Config:
    ...     out: str = tempfile.mkdtemp()
    ...     steps: int = 3
    ...     checkpoints: checkpoint.Checkpoints = checkpoint.Checkpoints(every=1)
    >>> lost = [LostActor("train_step", "trainer", 1, "10.0.0.3", "killed by signal 9")]
    >>> def main(cfg):
    ...     with nrl.run(cfg) as run:
    ...         total, stream = run.restore(total=0, stream=counting())
    ...         for i, number in run.steps(stream):
    ...             if i == 2 and lost:
    ...                 raise lost.pop()
    ...             total += number
    ...             run.save(i, total=total, stream=stream)
    ...         return total
    >>> retrying(main, pause=0)(Config())
    retrying: train_step: rank 1 of mesh 'trainer' on node 10.0.0.3 is lost: killed by signal 9.
    retrying: attempt 2 begins in 0 s, after step 2 of 'train' in ...; retry 1 of 3 since the last new checkpoint
    train: 2 of 3 steps were done; going on after them
    done in 0:...; metrics are in ...
    3
    """
    if times < 0 or pause < 0:
        raise ArgumentError(f"retrying: times={times}, pause={pause}; give 0 or more")

    @functools.wraps(main)
    def run_with_retries(cfg: C) -> T:
        folders, reached, attempt, failures = Folders(), dict[Path, int](), 1, 0
        while True:
            try:
                with reuse_folders(folders), end_after_signal(), mark_restart() if attempt > 1 else nullcontext():
                    return main(cfg)
            except Exception as error:
                lost = _find_loss(error)
                if lost is None:
                    raise
                before, reached = reached, _count_steps(folders.used)
                failures = failures + 1 if reached == before else 1
                if hint := _hopeless(folders, failures, times):
                    error.add_note(f"retrying: {hint}")
                    raise
            gc.collect()  # here, where nothing holds the models and states of that attempt any more
            attempt += 1
            wait = min(pause * 2 ** (failures - 1), _LONGEST)
            steps = (f"after step {step} of '{root.name}' in {root.parents[1]}" for root, step in reached.items())
            where = ", ".join(steps) or "from the beginning"
            print(f"retrying: {printable(redact(str(lost)))}", flush=True)
            print(
                f"retrying: attempt {attempt} begins in {wait:g} s, {where}; retry {failures} of {times} since the "
                "last new checkpoint",
                flush=True,
            )
            time.sleep(wait)

    return run_with_retries


def _find_loss(error: BaseException) -> str | None:
    """Return the message of a lost process. None: the error has another cause, or several."""
    if isinstance(error, LostActor):
        return None if isinstance(error, FailedStart) else str(error)
    if isinstance(error, ExceptionGroup):
        losses = [_find_loss(inner) for inner in error.exceptions]
        return losses[0] if all(losses) else None
    return None if error.__cause__ is None else _find_loss(error.__cause__)


def _count_steps(folders: Iterable[Path]) -> dict[Path, int]:
    """Count the steps before the newest checkpoint of each loop."""
    roots = [root for out in folders for root in sorted(out.glob("checkpoints/*/"))]
    return {root: saved[-1].step + 1 for root in roots if (saved := checkpoint.finite(checkpoint.checkpoints(root)))}


def _hopeless(folders: Folders, failures: int, times: int) -> str:
    """Return the reason for which another attempt is useless; empty: it is not."""
    for out in filter(is_dead_end, folders.used):
        return (
            f"the run in {out} makes no checkpoints, so there is nothing to go on from; call run.restore before its "
            "loop and run.save in it"
        )
    if failures > times:
        return f"{times} retries in a row came to no new checkpoint" if times else "times=0, so it is not tried again"
    return ""
