"""The settings of ``nrl eval``, which are read before torch is imported, so that a mistake in them is told at once."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import attrs

from nrl.arguments import checked
from nrl.envs import VERIFIERS, Trace, Verifier
from nrl.envs.builtin import Environments, environments
from nrl.errors import DataError, EnvError

if TYPE_CHECKING:
    from nrl.data import Format

__all__ = ["OF_SAMPLING", "Evaluation", "resolve"]


def _check_k(cfg: Any, field: Any, k: Sequence[int]) -> None:
    for count in k if cfg.rescore is None else ():  # `measure` checks the others.
        if not 1 <= count <= cfg.n:
            raise ValueError(f"{count} of n={cfg.n} samples cannot be drawn; give k from 1 to n, or a larger n")


def _check_temperature(cfg: Any, field: Any, temperature: float) -> None:
    if temperature == 0 and cfg.n > 1:
        raise ValueError(f"0 gives the same answer n={cfg.n} times; give n=1, or a temperature")


def _check_url(cfg: Any, field: Any, url: str | None) -> None:
    if cfg.sampler == "openai" and url is None:
        raise ValueError("sampler=openai needs url=, the address of a server, such as http://localhost:8000/v1")
    if cfg.sampler != "openai" and url is not None:
        raise ValueError(f"sampler={cfg.sampler} takes no url; leave it out, or give sampler=openai")


def _check_model(cfg: Any, field: Any, model: str | None) -> None:
    if model is None and cfg.rescore is None:
        raise ValueError("give a folder, a hub name or a run as model=; only rescore=FILE needs none")


OF_SAMPLING = (
    *("model", "n", "temperature", "max_new_tokens", "top_p", "top_k", "stop"),
    *("sampler", "url", "engine", "dtype", "cluster", "samplers"),
)
"""Settings without a meaning where stored samples are verified again."""


def _check_rescore(cfg: Any, field: Any, rescore: str | None) -> None:
    if rescore is None:
        return
    defaults: dict[str, Any] = {key: field.default for key, field in attrs.fields_dict(type(cfg)).items()}
    defaults |= {"engine": {}, "temperature": 0.0 if cfg.n == 1 else 1.0}
    changed = [key for key in OF_SAMPLING if getattr(cfg, key, defaults[key]) != defaults[key]]
    if changed:
        raise ValueError(f"nothing is sampled, so {', '.join(changed)} would not be read; leave that out")


_positive = attrs.validators.ge(1)


@checked("eval")
@attrs.frozen
class Evaluation:
    """Sample answers to tasks, or play an environment, and say how often they are right: pass@k, the mean reward."""

    model: str | None = attrs.field(
        default=None, validator=_check_model
    )  # a folder, a hub name, or the folder of a run
    tasks: str | dict[str, Any] | None = None  # a file or a dataset that env reads; none: its own
    n: int = attrs.field(default=1, validator=_positive)  # samples a task
    k: tuple[int, ...] = attrs.field(default=(1,), validator=_check_k)  # pass@k for these, such as k=1,4,8
    temperature: float = attrs.field(
        default=attrs.Factory(lambda cfg: 0.0 if cfg.n == 1 else 1.0, takes_self=True), validator=_check_temperature
    )  # 0, the most probable answer, if n is 1; else 1
    max_new_tokens: int = attrs.field(default=512, validator=_positive)  # of a sample
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    stop: tuple[str, ...] = ()  # texts that end a sample
    env: str | dict[str, Any] = "number"  # a verifier or an environment; options: env.math.timeout=2; see docs/eval.md
    passing: float = 1.0  # a sample passes where its reward is at least this
    sampler: Literal["hf", "vllm", "vllm-cpu", "openai"] = "hf"  # openai: a server that runs already
    url: str | None = attrs.field(default=None, validator=_check_url)  # of servers, for sampler=openai: URL or URL,URL
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
    rescore: str | None = attrs.field(default=None, validator=_check_rescore)  # results.jsonl, to verify it again
    out: str | None = None  # none: a new folder under runs/; that of an earlier evaluation: go on with it


def resolve(cfg: Evaluation) -> Environments:
    """Return the environments and the tasks of a configuration.

    Raises:
        ConfigError: the environment or an option of it is unknown.
    """
    return environments(cfg.env, cfg.tasks, format=_format(cfg), chat=cfg.chat, shuffle=cfg.shuffle)


def _format(cfg: Evaluation) -> "str | Format | None":
    """The format of the rows, in which a verifier known by name checks that it can work with their answers."""
    verifier = VERIFIERS.get(str(cfg.env))
    if verifier is None or not isinstance(cfg.tasks, str):
        return cfg.format
    from nrl.data.formats import format_of  # It imports torch.
    from nrl.data.task_streams import GENERATED

    if cfg.tasks in GENERATED:
        return cfg.format
    return _with_answer_check(verifier, (lambda row: row) if cfg.format is None else format_of(cfg.format))


def _with_answer_check(verifier: Verifier, format: "Format") -> "Format":
    """Let the verifier check each answer as part of the format, so that errors name the row."""

    def parse(row: Mapping[str, Any]) -> Any:
        tasks = format(row)
        for task in [tasks] if isinstance(tasks, Mapping) else tasks or ():
            try:
                verifier(task, Trace())
            except EnvError as error:
                raise DataError(str(error)) from error
        return tasks

    return parse
