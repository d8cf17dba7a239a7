"""The command ``nrl eval``: samples a file of tasks, or plays an environment, verifies, measures, and resumes.

The folder holds ``config.yaml``; ``results.jsonl``, a line for each task, written as soon as the tasks that are sampled
together have been verified; and in the end ``tasks.jsonl``, ``metrics.json`` and ``report.html``. Noise depends on the
seed, the task and the place of the sample alone, and the same tasks are always sampled together. So an evaluation that
is killed and started again ends with the same results.
"""

import json
import math
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import attrs
import yaml
from rich.box import ROUNDED
from rich.console import Console
from rich.table import Table

from nrl import data
from nrl.backends import SAMPLERS, Model, Sampler, Sampling, load_tokenizer, openai
from nrl.batch.metrics import Mean, Metrics, finalize, merge, over_something, prefixed
from nrl.cli import evaluation_folder, evaluation_report, rescoring
from nrl.cli.evaluation_folder import MARK, digest, digest_of_files, read_config
from nrl.cli.evaluation_settings import OF_SAMPLING, Evaluation
from nrl.envs import Task
from nrl.envs.builtin import Environments
from nrl.errors import ArgumentError, ConfigError, EnvError, ModelError, NrlError
from nrl.log import JsonLines, Progress, format_number
from nrl.rollout.evaluate import Graded, grade, measure
from nrl.run import checkpoint, config_file, folder
from nrl.runtime import cluster

__all__ = ["find_model", "main", "make_sampler", "retention_of"]


def main(cfg: Evaluation, envs: Environments) -> Metrics:
    """Evaluate, from where an earlier attempt in the same folder was, and print a table.

    Args:
        cfg: the configuration.
        envs: what its ``env`` and ``tasks`` say, from `resolve`.

    Returns:
        The metrics of `nrl.measure`; ``metrics.json`` holds them as numbers.

    Raises:
        ConfigError: the folder holds something else, another process is in it, or an argument of the sampler is
            unknown.
        DataError: a task cannot be read, or the verifier cannot work with its answer (it names the row); or the results
            of an earlier attempt were changed.
        ModelError: no such model; a run's folder without an exported one.
        EnvError: every sample failed.
    """
    stored, model = None, None
    if cfg.rescore is not None:
        stored = rescoring.open_results(
            cfg.rescore, cfg.env, envs.each, None if cfg.tasks is None else _read_tasks(cfg, envs)
        )
        tasks, n = list(stored.tasks), stored.samples
    else:
        _sampling(cfg)  # refuses numbers out of range
        model = Model(find_model(str(cfg.model)), dtype=cfg.dtype, trust_remote_code=cfg.trust_remote_code)
        tasks, n = _read_tasks(cfg, envs), cfg.n
        if cfg.out is None:
            load_tokenizer(model)  # no folder is named for a model that is not there
    together = max(1, cfg.rows // n)
    with ExitStack() as stack:
        out = stack.enter_context(folder.enter(cfg, evaluation_folder.choose_folder))
        results = out / "results.jsonl"
        digests: dict[str, Any] = {MARK: digest(tasks)}
        digests |= {"digest_of_results": digest([attrs.asdict(result) for result in stored.graded])} if stored else {}
        digests |= {"digest_of_model": digest_of_files(str(model.source))} if model else {}
        evaluation_folder.write_config(out, cfg, digests, OF_SAMPLING if stored else ())
        done = evaluation_folder.read_results(results, len(tasks), together)
        evaluation_folder.write_failures(out, done)
        print(
            f"eval: {len(done)} of {len(tasks)} tasks are done in {out}; the same command with out={out} goes on there",
            flush=True,
        )
        if len(done) < len(tasks):
            sampler = make_sampler("eval", cfg, model, _sampling(cfg), stack) if model else None
            so_far = measure(done)
            lines, progress = stack.enter_context(JsonLines(results)), stack.enter_context(Progress())
            for start in range(len(done), len(tasks), together):
                began, part = monotonic(), tasks[start : start + together]
                if sampler is None:
                    assert stored is not None
                    graded = stored.grade(start, together, cfg.seed)
                else:
                    graded = grade(sampler, envs.graded, part, n=cfg.n, seed=cfg.seed, first_group=start)
                for number, result in enumerate(graded, start):
                    lines.write({"task": number} | attrs.asdict(result))
                _append_failures(out, graded, start)
                so_far = merge(so_far, measure(graded))
                shown = _progress_metrics(so_far, graded, monotonic() - began)
                progress.show("eval", start // together, -(-len(tasks) // together), shown)
        # From the file, so that the number of attempts does not matter
        results_of_all = evaluation_folder.read_results(results, len(tasks), together)
        metrics = measure(results_of_all, cfg.k, passing=cfg.passing)
        for source, name in enumerate(envs.names if len(envs.names) > 1 else ()):
            results_of_source = [
                result for result, task in zip(results_of_all, tasks, strict=True) if task["source"] == source
            ]
            metrics |= prefixed(f"{name}/", over_something(measure(results_of_source, cfg.k, passing=cfg.passing)))
        evaluation_report.write_tasks(out, results_of_all, cfg.passing)
        config_file.replace(out / "metrics.json", json.dumps(_summary(metrics, len(tasks)), indent=1) + "\n")
        evaluation_report.report(out)
    Console().print(_table(metrics, cfg))
    invalid = int(metrics["eval/invalid"].total)  # type: ignore[union-attr]
    if invalid and invalid == sum(len(result.rewards) for result in results_of_all):
        errors = Counter(
            failure["error"] or failure["status"] for failure in evaluation_folder.iter_failures(results_of_all, 0)
        )
        ((error, count),) = errors.most_common(1)
        raise EnvError(
            f"eval: all {invalid} samples failed, {count} of them with: {error}. So nothing was measured; mend it; "
            f"{out}/failures.jsonl says what each failed with"
        )
    return metrics


def find_model(model: str) -> str:
    """The model to load for a name: the name itself, unless it is a run's folder.

    Args:
        model: a folder of a model; a name of the hub; or a run's folder, whose ``model`` is loaded, which the examples
            export at their end, or else its ``best``.

    Raises:
        ModelError: the folder is neither, or the run has exported nothing; the message lists its content.
    """
    root = Path(model)
    if not root.is_dir() or (root / "config.json").is_file():
        return model
    for name in ("model", "best"):
        if (root / name / "config.json").is_file():
            return str(root / name)
    checkpoints = checkpoint.checkpoints(root / "checkpoints" / "train")
    if not checkpoints and (MARK in read_config(root) or not (root / "config.yaml").is_file()):
        content = ", ".join(sorted(path.name for path in root.iterdir())[:8]) or "nothing"
        raise ModelError(
            f"eval: {root} is neither the folder of a model, which has a config.json, nor of a run; it holds {content}"
        )
    missing = f"eval: the run {root} has exported no model (looked for model/config.json and best/config.json)"
    if not checkpoints:
        raise ModelError(f"{missing}, and has no checkpoints; let it run to its end")
    champion = checkpoint.best(checkpoints, retention_of(root))
    best = f", the best of them {champion.folder.name}" if champion else ""
    names = (f"{x.folder.name} (NaN or infinite)" if x.not_finite else x.folder.name for x in checkpoints)
    raise ModelError(
        f"{missing}; its checkpoints are {', '.join(names)}{best}. Let it run to its end, "
        f"by the same command, or export one: nrl export {shlex.quote(str(root))}"
    )


def retention_of(root: Path) -> checkpoint.Checkpoints:
    """The run's own definition of its best checkpoint."""
    try:
        settings = yaml.safe_load((root / "config.yaml").read_text(encoding="utf-8"))["checkpoints"]
        return checkpoint.Checkpoints(best=settings["best"], mode=settings["mode"])
    except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError):  # a program of another kind
        return checkpoint.Checkpoints()


def _read_tasks(cfg: Evaluation, envs: Environments) -> list[Task]:
    """Read the tasks, once each."""
    stream = envs.tasks(cfg.seed)
    if None in (stream.sizes or (stream.size,)) and cfg.limit is None:
        raise ConfigError(f"eval: {' and '.join(stream.names)} has no end; say how many tasks, such as limit=256")
    return data.epoch(stream, cfg.limit)


def _sampling(cfg: Evaluation) -> Sampling:
    try:
        return Sampling(cfg.temperature, cfg.top_k, cfg.top_p, cfg.max_new_tokens, stop=cfg.stop)
    except ValueError as error:
        raise ConfigError(f"eval: {str(error).removeprefix('Sampling: ')}") from error


def make_sampler(caller: str, cfg: Any, model: Model, sampling: Sampling, stack: ExitStack) -> Sampler:
    """The sampler of a configuration, which has ``sampler``, ``url``, ``engine``, ``cluster`` and ``samplers``.

    Raises:
        ConfigError: an argument of it is unknown.
    """
    make: Callable[..., Sampler]
    if cfg.sampler == "openai":
        make = partial(openai.sampler, (cfg.url or "").split(","))
    else:
        slots = stack.enter_context(cluster(cfg.cluster)).reserve(cfg.samplers)
        make = partial(SAMPLERS[cfg.sampler], slots)
    try:
        return make(model, sampling, **cfg.engine)
    except (TypeError, ValueError) as error:
        if isinstance(error, NrlError) and not isinstance(error, ArgumentError):
            raise
        raise ConfigError(f"{caller}: sampler={cfg.sampler}: {error}") from error


# --- output


def _append_failures(out: Path, graded: Sequence[Graded], first: int) -> None:
    if records := list(evaluation_folder.iter_failures(graded, first)):
        with JsonLines(out / "failures.jsonl") as lines:
            for record in records:
                lines.write(record)


def _summary(metrics: Metrics, tasks: int) -> dict[str, Any]:
    numbers = {key: value if math.isfinite(value) else None for key, value in finalize(metrics).items()}
    over = {key: int(value.weight) for key, value in metrics.items() if isinstance(value, Mean)}
    return {"tasks": tasks, "metrics": numbers, "over": over}


def _progress_metrics(so_far: Metrics, graded: Sequence[Graded], seconds: float) -> dict[str, float]:
    """The metrics so far, under names that the panel shows."""
    numbers, tokens = finalize(so_far), sum(sum(result.lengths) for result in graded)
    return {
        "eval/reward": numbers["eval/reward"],
        "length": numbers["eval/length"],
        "invalid": numbers["eval/invalid"],
        "tokens_per_second": tokens / max(seconds, 1e-9),
    }


def _table(metrics: Metrics, cfg: Evaluation) -> Table:
    names = ", ".join(cfg.env) if isinstance(cfg.env, Mapping) else cfg.env  # options may be secrets
    settings = "verified again" if cfg.rescore else f"n={cfg.n}, temperature={cfg.temperature:g}"
    title = f"{cfg.rescore or cfg.model} on {cfg.tasks or names}, {settings}"
    table = Table("metric", title=title, title_justify="left", box=ROUNDED)
    table.add_column("value", justify="right")
    table.add_column("over", justify="right", style="dim")
    for key, value in metrics.items():
        number = finalize({key: value})[key]
        unit = "tasks" if "eval/pass@" in key or "eval/majority" in key else "samples"
        over = f"{int(value.weight):,} {unit}" if isinstance(value, Mean) else ""
        table.add_row(key, format_number(number, key), over)
    return table
