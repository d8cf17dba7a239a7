"""``nrl deploy slurm``: a batch script that runs a program over the nodes of one job."""

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from nrl import config
from nrl.arguments import checked
from nrl.errors import ConfigError
from nrl.ops.deploy.checks import (
    check_options,
    check_owned,
    check_plain,
    check_secrets,
    check_variables,
    match_pattern,
    parse_duration,
    program_arguments,
    with_grace,
)
from nrl.ops.deploy.programs import build_arguments, check_files, check_fits, load_config, settings_in_files
from nrl.ops.deploy.writing import fill_template, write
from nrl.runtime.venvs.registry import EXECUTABLES

__all__ = ["Slurm", "main", "make_script"]

_COMMAND = "deploy slurm"
_BLOCK = 250
"""Ports of one job on a node: ten for Ray's own processes, 190 for its workers, the rest for nrl."""
_SPARE = 20
"""Seconds of the time before the limit in which Ray ends, after the program."""
_CHOSEN = ("partition", "account", "qos", "constraint", "reservation", "nodelist", "exclude")
_OPTIONS = {
    **{name: f"{name}=" for name in (*_CHOSEN, "nodes", "time")},
    "job-name": "name=",
    "signal": "grace=",
    "array": "seeds= and at_once=",
    "output": "logs=",
    **dict.fromkeys(("ntasks", "ntasks-per-node", "ntasks-per-core", "ntasks-per-socket", "ntasks-per-gpu"), "nodes="),
    **dict.fromkeys(("cpus-per-task", "cpus-per-gpu", "cores-per-socket", "sockets-per-node"), "cpus="),
    **dict.fromkeys(("mem", "mem-per-cpu", "mem-per-gpu"), "memory="),
    **dict.fromkeys(("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket"), "gpus= and gpu_type="),
    **dict.fromkeys(("requeue", "no-requeue", "open-mode"), ""),
}
"""Options of sbatch that the script has, and what to give instead."""
_VARIABLES = {
    "PATH": "venv= or setup=",
    "NRL_VENV_DIR": "venvs=",
    "NRL_PORTS": "ports=",
    "RAY_ADDRESS": "",
    "port": "ports=",
    **dict.fromkeys(
        ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ENABLE_UV_RUN_RUNTIME_ENV", "RAY_USAGE_STATS_ENABLED"), ""
    ),
    **dict.fromkeys(("RAY_prestart_worker_first_driver", "RAY_process_group_cleanup_enabled"), ""),
    **dict.fromkeys(("RAY_enable_pipe_based_agent_to_parent_health_check", "PYTHONUNBUFFERED"), ""),
    **dict.fromkeys(("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"), ""),
    **dict.fromkeys(
        ("SLURM_RESTART_COUNT", "SLURM_NNODES", "SLURM_NODEID", "SLURM_CPUS_ON_NODE", "SLURMD_NODENAME"), ""
    ),
    **dict.fromkeys(("logs", "head", "temp", "nodes", "driver", "status", "asked", "requeue", "shared"), ""),
}
"""Variables that the script sets, or that Slurm sets for it, and what to give instead."""
_job = match_pattern(r"[\w.-]+", "a name of letters, digits and ._-")
_word = match_pattern(r"[\w.,:*&|()\[\]/@+-]+", "a word of Slurm, without spaces and quotes")
_NEEDED = {
    ("trainer", "megatron"): "mcore",
    ("sampler", "vllm"): "vllm",
    ("sampler", "vllm-cpu"): "vllm-cpu",
}
"""The executable that a setting of a program needs besides base."""
_positive = attrs.validators.ge(1)
_maybe = attrs.validators.optional(_positive)
_size = match_pattern(r"[1-9]\d*[KMGT]?|0", "a size such as 200G, or 0 for all of it")
_bytes = match_pattern(r"[1-9]\d*[KMGT]?", "a size such as 20G")
_times = match_pattern(
    r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2}", "a time such as 30 (minutes), 24:00:00 or 2-00:00:00"
)
_option = match_pattern(r"--[a-z][a-z-]*(=[^'\"\\]+)?", "an option of sbatch, such as --mail-type=END")
_executable = match_pattern(r"[\w.-]+", "names of executables, such as base")
_ports = match_pattern(r"\d+-\d+", "a range of ports, such as 20000-29999")
_mount = match_pattern(r"/[^,:]*(:/[^,:]*(:[a-z]+)?)?", "mounts such as /data or /host:/inside")
_interface = match_pattern(r"[\w.-]+", "the name of a network interface, such as ib0")


def _needed_executables(files: Mapping[str, Any], arguments: Sequence[str], loaded: Any) -> tuple[str, ...]:
    """The executables that the program's configuration asks for, or, unless it was loaded, files and settings."""
    settings = {**files, **dict(argument.split("=", 1) for argument in arguments if "=" in argument)}
    if loaded is not None:
        settings |= {key: getattr(loaded, key) for key, _ in _NEEDED if hasattr(loaded, key)}
    return ("base", *(name for (key, value), name in _NEEDED.items() if settings.get(key) == value))


@checked("slurm")
@attrs.frozen(kw_only=True)
class Slurm:
    """Write a batch script that runs a program over the nodes of a job. The program's own settings follow `--`."""

    program: str  # the Python file, from folder
    arguments: tuple[str, ...] = ()  # the program's arguments; on the command line they follow `--`
    name: str = config.derived(lambda cfg: Path(cfg.program).stem, validator=_job)  # name of the job
    to: str = config.derived(lambda cfg: f"{cfg.name}.sbatch")  # the file to write
    force: bool = False  # replace a file that differs
    nodes: int = attrs.field(default=1, validator=_positive)  # the program runs on the first of them
    gpus: int = attrs.field(default=0, validator=attrs.validators.ge(0))  # GPUs of a node
    gpu_type: str | None = attrs.field(default=None, validator=_word)  # kind of GPU as Slurm names it, such as h100
    cpus: int | None = attrs.field(
        default=None, validator=_maybe
    )  # cores of a node; none: whole nodes, for this job alone
    memory: str | None = attrs.field(
        default=None, validator=_size
    )  # memory of a node, such as 200G; none: what Slurm gives
    time: str = attrs.field(default="24:00:00", validator=_times)  # the limit of one start
    grace: int = attrs.field(default=120, validator=_positive)  # seconds before the limit when the program is told
    partition: str | None = attrs.field(default=None, validator=_word)  # none: Slurm's default
    account: str | None = attrs.field(default=None, validator=_word)  # account that is charged for the time
    qos: str | None = attrs.field(default=None, validator=_word)  # the quality of service
    constraint: str | None = attrs.field(default=None, validator=_word)  # features of nodes, such as ib&h100
    reservation: str | None = attrs.field(default=None, validator=_word)  # its name
    nodelist: str | None = attrs.field(default=None, validator=_word)  # nodes to take, such as gpu[01-04]
    exclude: str | None = attrs.field(default=None, validator=_word)  # nodes not to take
    options: tuple[str, ...] = attrs.field(default=(), validator=_option)  # further ones of sbatch: [--mail-type=END]
    seeds: int | None = attrs.field(default=None, validator=_maybe)  # number of jobs, an array with seed=0, 1, ...
    at_once: int | None = attrs.field(default=None, validator=_maybe)  # number of the array's jobs
    folder: str = config.derived(lambda cfg: str(Path.cwd()))  # folder where the program runs; all nodes see it
    out: str = config.derived(lambda cfg: f"runs/{cfg.name}")  # the run's folder, from folder; all nodes see it
    logs: str = config.derived(lambda cfg: f"{cfg.out}-logs")  # a folder for what the job writes
    container: Literal["pyxis", "apptainer"] | None = None  # written and checked, not run by nrl's tests
    image: str | None = None  # image of the container, such as docker://registry#team/nrl:1, or a file
    mounts: tuple[str, ...] = attrs.field(default=(), validator=_mount)  # into the container, besides folder
    venv: str | None = config.derived(
        lambda cfg: None if cfg.container else sys.prefix
    )  # venv that has nrl, on all nodes
    executables: tuple[str, ...] | None = attrs.field(
        default=None, validator=_executable
    )  # executables to build first; none: those of the program's trainer= and sampler=; []: nothing
    check: bool = True  # see that files of settings are here, and that the program's Config takes what it is given
    doctor: bool = False  # ask `nrl doctor` of all nodes before the program; where something fails the job ends
    venvs: str | None = None  # NRL_VENV_DIR; best on a disk of the node; none: in the user's cache
    setup: str | None = None  # a file of bash that is sourced first, such as one of `module load`
    env: dict[str, str] = attrs.field(
        factory=dict, validator=check_variables
    )  # variables, for all processes; no secrets
    ports: str = attrs.field(default="20000-29999", validator=_ports)  # Ray's ports; a job takes 250 of them
    interface: str | None = attrs.field(default=None, validator=_interface)  # none: by the name of the first node
    object_store: str | None = attrs.field(default=None, validator=_bytes)  # memory of Ray's, a node; none: 30 %


def main(cfg: Slurm) -> None:
    """Write the script, and say how it is submitted.

    Raises:
        ConfigError: settings that contradict each other, or a file that differs is there.
    """
    write({Path(cfg.to): make_script(cfg)}, force=cfg.force, command=_COMMAND)
    logs, file = shlex.quote(_logs_folder(cfg)), shlex.quote(cfg.to)
    print(f"{cfg.to} is written; submit it with\n  mkdir -p {logs} && sbatch {file}")


def make_script(cfg: Slurm) -> str:
    """The text of the script.

    Raises:
        ConfigError: settings that contradict each other.
    """
    check_plain(cfg, _COMMAND)
    instead = "export it in the shell that submits the job: sbatch passes variables on"
    check_owned(cfg.env, _VARIABLES, _COMMAND)
    check_secrets(cfg.arguments, cfg.env, _COMMAND, instead)
    exclusive = {"exclusive": "cpus= of the job's own"} if cfg.cpus is None else {}
    check_options(cfg.options, _OPTIONS | exclusive, _COMMAND)
    if any(item.startswith("--gres=") and "gpu" in item for item in cfg.options):
        raise ConfigError(f"{_COMMAND}: found GPUs in options=, of which Ray would not know; give gpus= and gpu_type=")
    _check_times(cfg)
    spare = min(_SPARE, cfg.grace // 4)
    files = settings_in_files(cfg.arguments, _program_folder(cfg))
    arguments = with_grace(program_arguments(cfg.arguments, _COMMAND), files, cfg.grace, spare, _COMMAND)
    first, last = (int(item) for item in cfg.ports.split("-"))
    if not 1024 <= first < first + _BLOCK - 1 <= last <= 65535:
        raise ConfigError(f"{_COMMAND}: ports={cfg.ports} is no range of {_BLOCK} ports or more from 1024 to 65535")
    if cfg.seeds and any(item.startswith("seed=") for item in arguments):
        raise ConfigError(f"{_COMMAND}: found seed= after `--` and seeds={cfg.seeds}; give one of them")
    if cfg.at_once and not cfg.seeds:
        raise ConfigError(f"{_COMMAND}: found at_once={cfg.at_once} without seeds=, which makes several jobs")
    if cfg.gpu_type and not cfg.gpus:
        raise ConfigError(f"{_COMMAND}: found gpu_type={cfg.gpu_type} and gpus=0; give gpus=, the number in a node")
    setup, registered = _setup_file(cfg), frozenset(EXECUTABLES)
    loaded = _load_checked(cfg, arguments)
    executables = _needed_executables(files, cfg.arguments, loaded) if cfg.executables is None else cfg.executables
    values: dict[str, Any] = attrs.asdict(cfg) | {
        "folder": _program_folder(cfg),
        "setup": setup,
        "executables": executables,
        "builds": build_arguments(
            executables,
            cfg.program,
            _program_folder(cfg),
            known_names=registered,
            imported=loaded is not None,
            command=_COMMAND,
        ),
        "logs": _logs_folder(cfg),
        "chosen": [(item, value) for item in _CHOSEN if (value := getattr(cfg, item)) is not None],
        "options": [_quote_option(item) for item in cfg.options],
        "block": _BLOCK,
        "first_port": first,
        "blocks": (last - first + 1) // _BLOCK,
        "object_store": _parse_bytes(cfg.object_store),
        "run": _run_folder(cfg),
        "command": _program_words(cfg, arguments),
        "mounts": _list_mounts(cfg),
        "apptainer": _apptainer_words(cfg),
    }
    return fill_template("slurm.sbatch.jinja", values)


def _load_checked(cfg: Slurm, arguments: tuple[str, ...]) -> Any | None:
    """Load the program's configuration from the job's arguments; None: it was not checked."""
    folder = _program_folder(cfg)
    if cfg.container is None and not (Path(folder) / cfg.program).is_file():
        raise ConfigError(f"{_COMMAND}: found no file program={cfg.program} in {folder}; folder= says where it is")
    if not cfg.check:
        return None
    if cfg.container is None:
        check_files(arguments, folder, _COMMAND)
    count = len(program_arguments(cfg.arguments, _COMMAND))
    seeded = ("seed=0", f"out={_out_folder(cfg)}/seed-0") if cfg.seeds else (f"out={_out_folder(cfg)}",)
    added = (*arguments[count:], "cluster=auto", *seeded)
    configuration = load_config(cfg.program, arguments[:count], added, folder, _COMMAND)
    check_fits(configuration, "nodes", cfg.nodes, cfg.gpus, _COMMAND)
    return configuration


def _program_words(cfg: Slurm, arguments: tuple[str, ...]) -> str:
    """The words after ``python``, quoted."""
    seed = ['seed="$SLURM_ARRAY_TASK_ID"'] if cfg.seeds else []
    return " ".join([*map(shlex.quote, (cfg.program, *arguments, "cluster=auto")), *seed, f"out={_run_folder(cfg)}"])


def _run_folder(cfg: Slurm) -> str:
    """The folder of the run, as bash reads it."""
    return shlex.quote(_out_folder(cfg)) + ('/seed-"$SLURM_ARRAY_TASK_ID"' if cfg.seeds else "")


def _out_folder(cfg: Slurm) -> str:
    return os.path.expanduser(cfg.out)  # noqa: PTH111 - a Path would drop what follows //


def _setup_file(cfg: Slurm) -> str | None:
    """Return the absolute path of the setup file, since the script starts in the folder of submission."""
    if cfg.setup is None:
        return None
    path = Path(cfg.setup).expanduser().absolute()
    if not path.is_file():
        raise ConfigError(f"{_COMMAND}: found no file setup={path}; give one that the first node has, too")
    return str(path)


def _check_times(cfg: Slurm) -> None:
    if cfg.grace >= parse_duration(cfg.time):
        raise ConfigError(f"{_COMMAND}: grace={cfg.grace} s is not within time={cfg.time}; give less of it")


def _list_mounts(cfg: Slurm) -> tuple[str, ...]:
    """List the nodes' folders that are mounted into the container."""
    if cfg.container is None:
        for value, name in ((cfg.image, "image"), (cfg.mounts, "mounts")):
            if value:
                raise ConfigError(f"{_COMMAND}: found {name}= without a container; give container=pyxis or apptainer")
        return ()
    if cfg.image is None:
        raise ConfigError(f"{_COMMAND}: container={cfg.container} needs image=")
    mounts = tuple(dict.fromkeys((_program_folder(cfg), *cfg.mounts)))
    seen = [mount.split(":")[1] if ":" in mount else mount for mount in mounts]
    for name, path in (("out", _out_folder(cfg)), ("logs", _logs_folder(cfg))):
        if path.startswith("/") and not any(Path(path).is_relative_to(mount) for mount in seen):
            raise ConfigError(
                f"{_COMMAND}: {name}={path} is in none of the container's mounts, {', '.join(seen)}; add mounts="
            )
    return tuple(mount if ":" in mount else f"{mount}:{mount}" for mount in mounts)


def _apptainer_words(cfg: Slurm) -> str:
    """Words before the command of each step."""
    if cfg.container != "apptainer":
        return ""
    words = ["apptainer", "exec", *(["--nv"] if cfg.gpus else []), "--pwd", _program_folder(cfg)]
    return shlex.join([*words, "--bind", ",".join(_list_mounts(cfg)), str(cfg.image)])


def _quote_option(option: str) -> str:
    """An option of sbatch whose value may have spaces."""
    name, equals, value = option.partition("=")
    return f"{name}{equals}{shlex.quote(value)}" if " " in value else option


def _program_folder(cfg: Slurm) -> str:
    return str(Path(cfg.folder).expanduser().absolute())


def _logs_folder(cfg: Slurm) -> str:
    """Return the absolute folder of logs, since Slurm resolves it from the folder of submission."""
    path = str(Path(_program_folder(cfg)) / Path(cfg.logs).expanduser())
    if re.search(r"[\s%\\'\"]", path):
        raise ConfigError(
            f"{_COMMAND}: the logs are in {path}, which Slurm misreads; give logs= without spaces, quotes, %"
        )
    return path


def _parse_bytes(size: str | None) -> int | None:
    if size is None:
        return None
    number, unit = (size[:-1], size[-1]) if size[-1].isalpha() else (size, "")
    return int(number) * 1024 ** "KMGT".index(unit) * 1024 if unit else int(number)
