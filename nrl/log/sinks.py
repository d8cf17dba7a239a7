"""Sinks for metrics besides the JSONL files: Weights & Biases, TensorBoard and MLflow."""

import math
import os
import secrets
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from nrl.errors import ConfigError
from nrl.log.redaction import redact, redacted

__all__ = ["Sink", "open_sinks"]

type _Write = Callable[[str, int, Mapping[str, float]], None]


class Sink(Protocol):
    """A destination of metrics."""

    def write(self, loop: str, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of one step of a loop."""
        ...


@contextmanager
def open_sinks(names: Sequence[str], out: Path, config: Mapping[str, Any], *, name: str) -> Iterator[Sink]:
    """Open the sinks of a run. The end of the block closes them; after an exception they mark the run as failed.

    A run that is started again in the same folder goes on as the same run: ``wandb-run`` and ``mlflow-run`` in the
    folder hold its number there, and TensorBoard drops the steps that are written again. NaN and infinite numbers are
    left out. Each loop of the run has its own axis of steps: metrics are named ``<loop>/<metric>``.

    Args:
        names: any of ``"wandb"`` (set up by ``WANDB_*`` variables; ``WANDB_MODE=offline`` needs no account),
            ``"tensorboard"`` (files under ``tensorboard/``) and ``"mlflow"`` (``MLFLOW_TRACKING_URI``, or else the file
            ``mlflow.db``, for ``mlflow ui --backend-store-uri``).
        out: the run's folder.
        config: of the run; secrets in it are masked.
        name: of the run.

    Yields:
        One `Sink` for all of them. If one fails later, it warns once, and the run goes on.

    Raises:
        ConfigError: an unknown name, a package that is not installed, or a sink that cannot start.

    >>> with open_sinks([], Path("runs/a"), {}, name="a") as sink:
    ...     sink.write("train", 0, {"loss": 1.0})
    """
    unknown = [sink for sink in names if sink not in _KINDS]
    if unknown:
        raise ConfigError(f"open_sinks: there is no sink '{unknown[0]}'; the sinks are {', '.join(_KINDS)}")
    settings = dict(_flat(redacted(config)))
    with ExitStack() as stack:
        writers: dict[str, _Write] = {}
        for sink in names:
            try:
                writers[sink] = stack.enter_context(_KINDS[sink](out, settings, name))
            except ImportError as error:
                raise ConfigError(
                    f"open_sinks: '{sink}' needs a package that is not installed ({error}); install it with "
                    f"`uv pip install 'nrl-torch[{sink}]'`"
                ) from error
            except Exception as error:
                message = redact(f"{type(error).__name__}: {error}")  # an address may have a password
                raise ConfigError(f"open_sinks: '{sink}' could not start: {message}{_HINTS.get(sink, '')}") from error
        yield _Sinks(writers)


class _Sinks:
    def __init__(self, writers: Mapping[str, _Write]) -> None:
        self._writers = writers
        self._warned: set[str] = set()

    def write(self, loop: str, step: int, numbers: Mapping[str, float]) -> None:
        finite = {key: float(value) for key, value in numbers.items() if key != "step" and math.isfinite(value)}
        finite = redacted(finite)  # an environment may name its numbers after anything
        for name, write in self._writers.items():
            try:
                write(loop, step, finite)
            except Exception as error:  # a tracking server that is gone must not end a run of days
                if name not in self._warned:
                    self._warned.add(name)
                    warnings.warn(
                        f"run.log: '{name}' did not take step {step} ({type(error).__name__}: {error}); the run goes "
                        "on, and its metrics are in the JSONL files. This is said once",
                        stacklevel=3,
                    )


@contextmanager
def _wandb(out: Path, settings: Mapping[str, str], name: str) -> Iterator[_Write]:
    import wandb

    quiet = wandb.Settings(
        console="off", disable_code=True, disable_git=True, quiet=True, x_disable_meta=True, x_disable_stats=True
    )
    run = wandb.init(
        dir=str(out),
        id=_number(out / "wandb-run", lambda: secrets.token_hex(4)),
        resume="allow",
        project=os.environ.get("WANDB_PROJECT", "nrl"),
        name=os.environ.get("WANDB_NAME", name),
        config=dict(settings),
        settings=quiet,
    )
    axes: set[str] = set()

    def write(loop: str, step: int, numbers: Mapping[str, float]) -> None:
        if loop not in axes:  # wandb's own steps only grow, and those of a resumed run go back to the checkpoint
            axes.add(loop)
            run.define_metric(f"{loop}/*", step_metric=f"{loop}/step")
        run.log({f"{loop}/step": step} | {f"{loop}/{key}": value for key, value in numbers.items()})

    try:
        yield write
    except BaseException:
        run.finish(exit_code=1)
        raise
    run.finish()


@contextmanager
def _tensorboard(out: Path, settings: Mapping[str, str], name: str) -> Iterator[_Write]:
    from torch.utils.tensorboard import SummaryWriter

    writers: dict[str, Any] = {}

    def write(loop: str, step: int, numbers: Mapping[str, float]) -> None:
        if loop not in writers:  # Each loop has a writer, since purging a step purges all metrics of a writer.
            writers[loop] = SummaryWriter(out / "tensorboard" / loop, purge_step=step)
            table = "\n".join(f"| {key} | {value} |" for key, value in settings.items())
            writers[loop].add_text("config", f"| {name} | |\n|---|---|\n{table}", step)
        for key, value in numbers.items():
            writers[loop].add_scalar(f"{loop}/{key}", value, step)

    try:
        yield write
    finally:
        for writer in writers.values():
            writer.close()


@contextmanager
def _mlflow(out: Path, settings: Mapping[str, str], name: str) -> Iterator[_Write]:
    from mlflow.entities import Metric, Param, RunStatus
    from mlflow.tracking import MlflowClient

    client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{out.absolute()}/mlflow.db"))

    def start() -> str:
        title = os.environ.get("MLFLOW_EXPERIMENT_NAME", "nrl")
        experiment = client.get_experiment_by_name(title)
        folder = client.create_experiment(title) if experiment is None else experiment.experiment_id
        number: str = client.create_run(folder, run_name=name).info.run_id
        client.log_batch(number, params=[Param(key, value[:6000]) for key, value in settings.items()][:100])
        return number

    number = _number(out / "mlflow-run", start)
    client.update_run(number, RunStatus.to_string(RunStatus.RUNNING))

    def write(loop: str, step: int, numbers: Mapping[str, float]) -> None:
        timestamp = int(time.time() * 1000)
        client.log_batch(number, [Metric(f"{loop}/{key}", value, timestamp, step) for key, value in numbers.items()])

    try:
        yield write
    except BaseException:
        client.set_terminated(number, "FAILED")
        raise
    client.set_terminated(number)


_KINDS: Mapping[str, Callable[[Path, Mapping[str, str], str], AbstractContextManager[_Write]]] = {
    "wandb": _wandb,
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
}
_HINTS = {"wandb": ". WANDB_MODE=offline needs no account"}


def _number(file: Path, make: Callable[[], str]) -> str:
    """Read the run's number from a file; if there is none, make one and write it there."""
    if not file.exists():
        file.write_text(make(), encoding="utf-8")
    return file.read_text(encoding="utf-8")


def _flat(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", str(value)
