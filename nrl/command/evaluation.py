"""The command ``nrl eval``: samples a file of tasks, or plays an environment, verifies, measures, and resumes.

The folder holds ``config.yaml``; ``results.jsonl``, a line for each task, written as soon as the tasks that are sampled
together have been verified; and in the end ``tasks.jsonl``, ``metrics.json`` and ``report.html``. Noise depends on the
seed, the task and the place of the sample alone, and the same tasks are always sampled together. So an evaluation that
is killed and started again ends with the same results.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Literal

import attrs
import yaml
from rich.box import ROUNDED
from rich.console import Console
from rich.table import Table

from nrl import checkpoint, data
from nrl.backends import SAMPLERS, Model, Sampler, Sampling, load_tokenizer, openai
from nrl.command import evaluation_folder, evaluation_report, rescoring
from nrl.command.evaluation_folder import MARK, config_of, digest, digest_of_files
from nrl.data import FORMATS, Format
from nrl.data.task_streams import GENERATED
from nrl.envs import VERIFIERS, Task, Trace, Verifier
from nrl.envs.shipped import Environments, environments
from nrl.episodes.grades import Graded, grade, measure
from nrl.errors import ConfigError, DataError, EnvError, ModelError, NrlError
from nrl.log import JsonLines, Progress
from nrl.reduce import Mean, Metrics, finalize, merge, over_something, prefixed
from nrl.runs import config_file, folder
from nrl.runtime import cluster

__all__ = ["Evaluation", "exported", "main", "sampler_of"]


def _reachable(cfg: Any, field: Any, k: Sequence[int]) -> None:
    for each in k if cfg.rescore is None else ():  # which `measure` sees
        if not 1 <= each <= cfg.n:
            raise ValueError(f"{each} of n={cfg.n} samples cannot be drawn; give k from 1 to n, or a larger n")


def _varied(cfg: Any, field: Any, temperature: float) -> None:
    if temperature == 0 and cfg.n > 1:
        raise ValueError(f"0 gives the same answer n={cfg.n} times; give n=1, or a temperature")


def _addressed(cfg: Any, field: Any, url: str | None) -> None:
    if cfg.sampler == "openai" and url is None:
        raise ValueError("sampler=openai needs url=, the address of a server, such as http://localhost:8000/v1")
    if cfg.sampler != "openai" and url is not None:
        raise ValueError(f"sampler={cfg.sampler} takes no url; leave it out, or give sampler=openai")


def _modelled(cfg: Any, field: Any, model: str | None) -> None:
    if model is None and cfg.rescore is None:
        raise ValueError("give a folder, a hub name or a run as model=; only rescore=FILE needs none")


_OF_SAMPLING = (
    *("model", "n", "max_new_tokens", "top_p", "top_k", "stop"),
    *("sampler", "url", "engine", "dtype", "cluster", "samplers"),
)


def _not_sampled(cfg: Any, field: Any, rescore: str | None) -> None:
    if rescore is None:
        return
    defaults: dict[str, Any] = {
        key: {} if key == "engine" else field.default for key, field in attrs.fields_dict(type(cfg)).items()
    }
    asked = [key for key in _OF_SAMPLING if getattr(cfg, key) != defaults[key]]
    asked += ["temperature"] if cfg.n == 1 and cfg.temperature != 0 else []
    if asked:
        raise ValueError(f"nothing is sampled, so {', '.join(asked)} would not be read; leave that out")


_positive = attrs.validators.ge(1)


@attrs.frozen
class Evaluation:
    """Sample answers to tasks, or play an environment, and say how often they are right: pass@k, the mean reward."""

    model: str | None = attrs.field(default=None, validator=_modelled)  # a folder, a hub name, or the folder of a run
    tasks: str | dict[str, Any] | None = None  # a file or a dataset that env reads; none: its own
    n: int = attrs.field(default=1, validator=_positive)  # samples a task
    k: tuple[int, ...] = attrs.field(default=(1,), validator=_reachable)  # pass@k for these, such as k=1,4,8
    temperature: float = attrs.field(
        default=attrs.Factory(lambda cfg: 0.0 if cfg.n == 1 else 1.0, takes_self=True), validator=_varied
    )  # 0, the most probable answer, if n is 1; else 1
    max_new_tokens: int = attrs.field(default=512, validator=_positive)  # of a sample
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    stop: tuple[str, ...] = ()  # texts that end a sample
    env: str | dict[str, Any] = "number"  # a verifier or an environment; options: env.math.timeout=2; see docs/eval.md
    passing: float = 1.0  # a sample passes where its reward is at least this
    sampler: Literal["hf", "vllm", "vllm-cpu", "openai"] = "hf"  # openai: a server that runs already
    url: str | None = attrs.field(default=None, validator=_addressed)  # of the server, for sampler=openai
    engine: dict[str, Any] = attrs.field(factory=dict)  # more arguments of the sampler: engine.max_model_len=2048
    dtype: Literal["float32", "bfloat16"] = "float32"
    trust_remote_code: bool = False  # let Python files that lie with the model run
    cluster: str = "local"  # "local": this process; "ray", or the address of a Ray cluster: actors
    samplers: int = attrs.field(default=1, validator=_positive)  # processes that sample
    format: str | None = None  # from the rows of a well-known dataset
    chat: bool = True  # false: prompts that are texts stay texts, as base models need them
    limit: int | None = attrs.field(default=None, validator=attrs.validators.optional(_positive))  # so many tasks
    shuffle: bool = False  # false: the tasks in the order of the file
    seed: int = 0  # of the noise, and of the order
    rows: int = attrs.field(default=256, validator=_positive)  # samples that are drawn together
    rescore: str | None = attrs.field(default=None, validator=_not_sampled)  # results.jsonl, to verify it again
    out: str | None = None  # none: a new folder under runs/; that of an earlier evaluation: go on with it

    def __attrs_post_init__(self) -> None:
        _ = self.sampling  # refuses numbers out of range

    @property
    def sampling(self) -> Sampling:
        """The sampling parameters."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.max_new_tokens, stop=self.stop)


def main(cfg: Evaluation) -> Metrics:
    """Evaluate, from where an earlier attempt in the same folder was, and print a table.

    Args:
        cfg: the configuration.

    Returns:
        The metrics of `nrl.measure`; ``metrics.json`` holds them as numbers.

    Raises:
        ConfigError: the folder holds something else, another process is in it, or the environment, an option of it or
            an argument of the sampler is unknown.
        DataError: a task cannot be read, or the verifier cannot work with its answer (it names the row); or the results
            of an earlier attempt were changed.
        ModelError: no such model; a run's folder without an exported one.
        EnvError: every sample failed.
    """
    envs = environments(cfg.env, cfg.tasks, format=_format(cfg), chat=cfg.chat, shuffle=cfg.shuffle)
    again, model = None, None
    if cfg.rescore is not None:
        again = rescoring.opened(cfg.rescore, cfg.env, envs.each, None if cfg.tasks is None else _tasks(cfg, envs))
        tasks, n = list(again.tasks), again.samples
    else:
        model = Model(exported(str(cfg.model)), dtype=cfg.dtype, trust_remote_code=cfg.trust_remote_code)
        tasks, n = _tasks(cfg, envs), cfg.n
        if cfg.out is None:
            load_tokenizer(model)  # no folder is named for a model that is not there
    together = max(1, cfg.rows // n)
    with ExitStack() as stack:
        out = stack.enter_context(folder.entered(cfg, evaluation_folder.choose))
        results = out / "results.jsonl"
        digests: dict[str, Any] = {MARK: digest(tasks)}
        digests |= {"digest_of_results": digest([attrs.asdict(each) for each in again.graded])} if again else {}
        digests |= {"digest_of_model": digest_of_files(str(model.source))} if model else {}
        evaluation_folder.write_config(out, cfg, digests)
        done = evaluation_folder.read(results, len(tasks), together)
        evaluation_folder.write_failures(out, done)
        print(
            f"eval: {len(done)} of {len(tasks)} tasks are done in {out}; the same command with out={out} goes on there",
            flush=True,
        )
        if len(done) < len(tasks):
            sampler, so_far = sampler_of(cfg, model, stack) if model else None, measure(done)
            lines, progress = stack.enter_context(JsonLines(results)), stack.enter_context(Progress())
            for start in range(len(done), len(tasks), together):
                began, some = monotonic(), tasks[start : start + together]
                if sampler is None:
                    assert again is not None
                    graded = again.grade(start, together, cfg.seed)
                else:
                    graded = grade(sampler, envs.graded, some, n=cfg.n, seed=cfg.seed, first_group=start)
                for number, each in enumerate(graded, start):
                    lines.write({"task": number} | attrs.asdict(each))
                _note_failures(out, graded, start)
                so_far = merge(so_far, measure(graded))
                shown = _shown(so_far, graded, monotonic() - began)
                progress.show("eval", start // together, -(-len(tasks) // together), shown)
        # From the file, so that the number of attempts does not matter
        every = evaluation_folder.read(results, len(tasks), together)
        metrics = measure(every, cfg.k, passing=cfg.passing)
        for source, name in enumerate(envs.names if len(envs.names) > 1 else ()):
            own = [each for each, task in zip(every, tasks, strict=True) if task["source"] == source]
            metrics |= prefixed(f"{name}/", over_something(measure(own, cfg.k, passing=cfg.passing)))
        evaluation_report.write_tasks(out, every, cfg.passing)
        config_file.replace(out / "metrics.json", json.dumps(_summary(metrics, len(tasks)), indent=1) + "\n")
        evaluation_report.report(out)
    Console().print(_table(metrics, cfg))
    invalid = int(metrics["eval/invalid"].total)  # type: ignore[union-attr]
    if invalid and invalid == sum(len(each.rewards) for each in every):
        where = f"{out}/failures.jsonl says" if again else "the warnings above say"
        raise EnvError(f"eval: all {invalid} samples failed, so nothing was measured; mend what {where}")
    return metrics


def exported(model: str) -> str:
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
    found = checkpoint.checkpoints(root / "checkpoints" / "train")
    if not found and (MARK in config_of(root) or not (root / "config.yaml").is_file()):
        there = ", ".join(sorted(path.name for path in root.iterdir())[:8]) or "nothing"
        raise ModelError(
            f"eval: {root} is neither the folder of a model, which has a config.json, nor of a run; it holds {there}"
        )
    missing = f"eval: the run {root} has exported no model (looked for model/config.json and best/config.json)"
    if not found:
        raise ModelError(f"{missing}, and has no checkpoints; let it run to its end")
    champion = checkpoint.best(found, _kept(root))
    best = f", the best of them {champion.folder.name}" if champion else ""
    source, target = (champion or found[-1]).folder / "policy", root / "best"
    raise ModelError(
        f"{missing}; its checkpoints are {', '.join(each.folder.name for each in found)}{best}. Let it run to its end, "
        f"by the same command, or export one: trainer.export(trainer.restore({str(source)!r}).params, {str(target)!r})"
    )


def _kept(root: Path) -> checkpoint.Checkpoints:
    """The run's own definition of its best checkpoint."""
    try:
        asked = yaml.safe_load((root / "config.yaml").read_text(encoding="utf-8"))["checkpoints"]
        return checkpoint.Checkpoints(best=asked["best"], mode=asked["mode"])
    except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError):  # a program of another kind
        return checkpoint.Checkpoints()


def _tasks(cfg: Evaluation, envs: Environments) -> list[Task]:
    """Read the tasks, once each."""
    made = envs.tasks(cfg.seed)
    if made.size is None and cfg.limit is None:
        raise ConfigError(f"eval: {' and '.join(made.names)} has no end; say how many tasks, such as limit=256")
    return data.epoch(made, cfg.limit)


def _format(cfg: Evaluation) -> str | Format | None:
    """The format of the rows, in which a verifier known by name checks that it can work with their answers."""
    known = VERIFIERS.get(str(cfg.env))
    if known is None or not isinstance(cfg.tasks, str) or cfg.tasks in GENERATED:
        return cfg.format
    if cfg.format is not None and cfg.format not in FORMATS:
        return cfg.format
    return _answered(known, FORMATS.get(str(cfg.format), lambda row: row))


def _answered(verifier: Verifier, format: Format) -> Format:
    """Let the verifier check each answer as part of the format, so that errors name the row."""

    def checked(row: Mapping[str, Any]) -> Any:
        found = format(row)
        for each in [found] if isinstance(found, Mapping) else found or ():
            try:
                verifier(each, Trace())
            except EnvError as error:
                raise DataError(str(error)) from error
        return found

    return checked


def sampler_of(cfg: Any, model: Model, stack: ExitStack, who: str = "eval") -> Sampler:
    """The sampler of a configuration, which has ``sampler``, ``url``, ``engine``, ``cluster`` and ``samplers``.

    Raises:
        ConfigError: an argument of it is unknown.
    """
    make: Callable[..., Sampler]
    if cfg.sampler == "openai":
        make = partial(openai.sampler, cfg.url or "")
    else:
        slots = stack.enter_context(cluster(cfg.cluster)).reserve(cfg.samplers)
        make = partial(SAMPLERS[cfg.sampler], slots)
    try:
        return make(model, cfg.sampling, **cfg.engine)
    except (TypeError, ValueError) as error:
        if isinstance(error, NrlError):
            raise
        raise ConfigError(f"{who}: sampler={cfg.sampler}: {error}") from error


# --- output


def _note_failures(out: Path, graded: Sequence[Graded], first: int) -> None:
    if found := list(evaluation_folder.failures(graded, first)):
        with JsonLines(out / "failures.jsonl") as lines:
            for record in found:
                lines.write(record)


def _summary(metrics: Metrics, tasks: int) -> dict[str, Any]:
    numbers = {key: value if math.isfinite(value) else None for key, value in finalize(metrics).items()}
    over = {key: int(value.weight) for key, value in metrics.items() if isinstance(value, Mean)}
    return {"tasks": tasks, "metrics": numbers, "over": over}


def _shown(so_far: Metrics, graded: Sequence[Graded], seconds: float) -> dict[str, float]:
    """The metrics so far, under names that the panel shows."""
    numbers, tokens = finalize(so_far), sum(sum(each.lengths) for each in graded)
    return {
        "eval/reward": numbers["eval/reward"],
        "length": numbers["eval/length"],
        "invalid": numbers["eval/invalid"],
        "tokens_per_second": tokens / max(seconds, 1e-9),
    }


def _table(metrics: Metrics, cfg: Evaluation) -> Table:
    names = ", ".join(cfg.env) if isinstance(cfg.env, Mapping) else cfg.env  # options may be secrets
    how = "verified again" if cfg.rescore else f"n={cfg.n}, temperature={cfg.temperature:g}"
    title = f"{cfg.rescore or cfg.model} on {cfg.tasks or names}, {how}"
    table = Table("metric", title=title, title_justify="left", box=ROUNDED)
    table.add_column("value", justify="right")
    table.add_column("over", justify="right", style="dim")
    for key, value in metrics.items():
        number = finalize({key: value})[key]
        what = "tasks" if "eval/pass@" in key or "eval/majority" in key else "samples"
        over = f"{int(value.weight)} {what}" if isinstance(value, Mean) else ""
        table.add_row(key, f"{number:.4f}" if over else f"{number:g}", over)
    return table
