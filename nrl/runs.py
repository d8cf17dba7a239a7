"""One run's folder: what was asked for, what was measured, and how far it is.

A run leaves behind ``config.yaml``, resolved, and ``metrics.jsonl``, one object for each step of the main loop, flushed
when the step ends. Other loops, such as a supervised warm-up, write files of their own.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import attrs

from nrl import config
from nrl.batch import Batch
from nrl.errors import ConfigError
from nrl.log import JsonLines, Progress, duration
from nrl.reduce import Metrics, finalize, merge
from nrl.runtime.futures import Future
from nrl.stream import Stream

__all__ = ["Run", "run"]

_SHOWN = ("reward", "loss", "grad_norm", "kl", "length", "lag", "invalid", "skipped", "tokens_per_second")
_QUIET_AT_ZERO = ("lag", "invalid", "skipped")


@attrs.define(eq=False)
class _Loop:
    name: str
    steps: int
    asked: float = 0.0
    pulled: float = 0.0


class Run:
    """A run that has been entered; made by `run`.

    Args:
        out: its folder.
        total: steps of the main loop.
    """

    def __init__(self, out: Path, total: int, stack: ExitStack) -> None:
        self.out, self.total, self._stack = out, total, stack
        self._progress = stack.enter_context(Progress())
        self._files: dict[str, JsonLines] = {}
        self._loops: list[_Loop] = []  # one within the other; the last is the one that is running

    def steps(
        self, stream: Stream[Batch], n: int | None = None, *, name: str = "metrics"
    ) -> Iterator[tuple[int, Batch]]:
        """Pull a batch for each step of a loop.

        Args:
            stream: of batches.
            n: the number of steps; None: the config's ``steps``.
            name: the loop's file is ``<name>.jsonl``.

        Yields:
            The step, from 0, and its batch.
        """
        loop = _Loop(name, self.total if n is None else n)
        self._loops.append(loop)
        try:
            for step in range(loop.steps):
                loop.asked = time.perf_counter()
                batch = stream.take(1)[0]
                loop.pulled = time.perf_counter()
                yield step, batch
        finally:
            self._loops.remove(loop)

    def log(self, step: int, *metrics: Metrics | Future[Metrics]) -> dict[str, float]:
        """Write one line: the metrics, and the times of the step.

        ``time/rollout`` is the time that the stream took, ``time/train`` all from then until now, ``time/total`` their
        sum, in seconds; ``tokens_per_second`` the trained tokens (prompts too) over the total.

        Args:
            step: from `steps`.
            *metrics: several are merged; futures are waited for.

        Returns:
            What was written.

        Raises:
            ConfigError: no loop over `steps` is running.
        """
        if not self._loops:
            raise ConfigError("run.log: no loop is running; call it inside of `for step, batch in run.steps(stream)`")
        loop = self._loops[-1]
        merged: Metrics = {}
        for some in metrics:
            merged = merge(merged, some if isinstance(some, dict) else some.result())
        now = time.perf_counter()
        numbers = {"step": step, "loss": float("nan"), "grad_norm": float("nan")} | finalize(merged)
        numbers["tokens_per_second"] = numbers.get("tokens", 0.0) / max(now - loop.asked, 1e-9)
        numbers["time/rollout"] = loop.pulled - loop.asked
        numbers["time/train"] = now - loop.pulled
        numbers["time/total"] = now - loop.asked
        if loop.name not in self._files:
            self._files[loop.name] = self._stack.enter_context(JsonLines(self.out / f"{loop.name}.jsonl"))
        self._files[loop.name].write(numbers)
        shown = {k: numbers[k] for k in _SHOWN if k in numbers and (numbers[k] != 0 or k not in _QUIET_AT_ZERO)}
        self._progress.show("train" if loop.name == "metrics" else loop.name, step, loop.steps, shown)
        return numbers


@contextmanager
def run(cfg: Any) -> Iterator[Run]:
    """Enter a run: ``with nrl.run(cfg) as run``.

    Args:
        cfg: a frozen attrs config. Its ``out`` is the run's folder (None: a new one under ``runs/``), its ``steps`` the
            number of steps of the main loop.

    Raises:
        ConfigError: ``out`` is a file, or holds a run already.

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
    out = Path(cfg.out) if getattr(cfg, "out", None) else _new_folder()
    if out.exists() and not out.is_dir():
        raise ConfigError(f"run: out={out} is a file; give a folder, or leave it out to make a new one")
    if any(path.stat().st_size for path in out.glob("*.jsonl")):  # a start that failed leaves none
        raise ConfigError(f"run: out={out} holds a run already; give another folder, or remove that one")
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.yaml").write_text(config.dump(cfg), encoding="utf-8")
    started = time.monotonic()
    with ExitStack() as stack:
        yield Run(out, int(getattr(cfg, "steps", 0)), stack)
    print(f"done in {duration(time.monotonic() - started)}; metrics are in {out}", flush=True)  # noqa: T201


def _new_folder() -> Path:
    """A folder that no other run has, also when two start in the same second."""
    stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    for attempt in range(1000):
        out = Path("runs") / (stamp if attempt == 0 else f"{stamp}-{attempt}")
        try:
            out.mkdir(parents=True)
        except FileExistsError:
            continue
        return out
    raise ConfigError(f"run: no new folder could be made under {Path('runs').absolute()}")
