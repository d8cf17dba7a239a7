"""The ``nrl`` command. Each subcommand imports what it needs when it runs, since some of that takes seconds."""

import argparse
import importlib
import json
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from nrl.errors import ConfigError

__all__ = ["main"]

type _Handler = Callable[[argparse.Namespace], object]


class _CommandParser(argparse.ArgumentParser):
    """Its errors show what there is to choose from: a line of usage says no more than COMMAND."""

    def error(self, message: str) -> NoReturn:
        self.print_help(sys.stderr)
        self.exit(2, f"\n{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    ``nrl report OUT`` writes the report of a run or an evaluation, ``nrl eval TASKS`` evaluates a model, ``nrl serve
    MODEL`` serves one, ``nrl export RUN`` writes one of a checkpoint, ``nrl plan MODEL`` or ``nrl plan PROGRAM.py``
    plans a step on a GPU, ``nrl doctor`` says whether all that is needed is there, ``nrl gym`` serves environments and
    tries them out, ``nrl deploy`` writes what runs a program on a cluster, and ``nrl venvs`` builds and explains
    environments.

    Args:
        argv: the arguments; None: the program's own.

    Returns:
        The exit status: 0; 1 if ``nrl venvs check``, ``nrl doctor`` or ``nrl gym test`` finds something wrong; 2 after
        a mistake, which is explained on stderr; 130 after Ctrl-C.

    >>> main(["report", "/nowhere"])
    2
    """
    parser = _CommandParser(prog="nrl", description="A composable functional library for LLM post-training.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("report", help="write OUT/report.html, one page that shows the run or the evaluation")
    command.add_argument("out", metavar="OUT", help="its folder")
    command.set_defaults(do=_report)
    for name, summary, settings, do in _COMMANDS:
        _add_command(commands, name, summary, settings, do)
    of_gym = commands.add_parser("gym", help="serve environments, and try them out")
    of_deploy = commands.add_parser("deploy", help="write what runs a program on a cluster")
    for group, parts in ((of_gym, _GYM), (of_deploy, _DEPLOY)):
        below = group.add_subparsers(required=True, metavar="COMMAND")
        for name, summary, settings, do in parts:
            _add_command(below, name, summary, settings, do, words=2)
    _add_venvs(commands.add_parser("venvs", help="the virtual environments of executables"))

    argv = sys.argv[1:] if argv is None else argv
    args, unknown = parser.parse_known_args(argv)
    if "words" in args:  # load explains that options are written key=value
        args.settings = list(argv[args.words :])
    elif unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    from nrl.run.exit_codes import exit_status

    return exit_status(lambda: args.do(args), "nrl")


def _add_command(commands: Any, name: str, summary: str, settings: str, do: _Handler, words: int = 1) -> None:
    """Add a command that parses the arguments after its first ``words`` words itself."""
    command = commands.add_parser(name, help=summary, add_help=False)
    command.add_argument("settings", metavar=settings, nargs="*")
    command.set_defaults(do=do, name=name, words=words)


def _report(args: argparse.Namespace) -> None:
    from nrl.cli import evaluation_report
    from nrl.run.reporting import report

    out = Path(args.out)
    print(evaluation_report.report(out) if evaluation_report.is_evaluation(out) else report(args.out))


def _evaluate(args: argparse.Namespace) -> None:
    from nrl import config
    from nrl.cli.evaluation_settings import Evaluation, resolve

    settings = [_parse_setting(argument) for argument in args.settings]
    tasks = [setting.removeprefix("tasks=") for setting in settings if setting.startswith("tasks=")]
    if len(tasks) > 1 and not any(setting.startswith("-") for setting in settings):
        raise ConfigError(f"eval: found {' and '.join(tasks)}; give one file of tasks, and all else as key=value")
    cfg = config.load(Evaluation, settings, program="nrl eval TASKS", caller="eval")
    envs = resolve(cfg)
    from nrl.cli import evaluation  # It imports torch, so wrong names are reported before.

    evaluation.main(cfg, envs)


def _serve(args: argparse.Namespace) -> None:
    from nrl import config
    from nrl.cli import serve

    if any(setting.startswith("token=") for setting in args.settings):
        raise ConfigError(
            "serve: every user of this machine can read token=... in its list of processes; write the key into a file "
            "and give token_file=FILE, or set NRL_SERVE_TOKEN"
        )
    named = _name_settings("model", args.settings)
    serve.main(config.load(serve.Serving, named, program="nrl serve MODEL", caller="serve"))


def _export(args: argparse.Namespace) -> None:
    from nrl import config
    from nrl.cli import export

    cfg = config.load(export.Export, _name_settings("run", args.settings), program="nrl export RUN", caller="export")
    print(export.main(cfg))


def _deploy(args: argparse.Namespace) -> None:
    from nrl import config
    from nrl.ops.deploy import kubernetes, slurm

    cut = args.settings.index("--") if "--" in args.settings else len(args.settings)
    of_program = args.settings[cut + 1 :]
    settings = _name_settings("program", args.settings[:cut])
    if of_program:
        settings.append(f"arguments={json.dumps(of_program, ensure_ascii=False)}")
    program, caller = f"nrl deploy {args.name} PROGRAM.py [key=value ...] [-- ARGUMENTS]", f"deploy {args.name}"
    if args.name == "slurm":
        slurm.main(config.load(slurm.Slurm, settings, program=program, caller=caller))
    else:
        kubernetes.main(config.load(kubernetes.Kubernetes, settings, program=program, caller=caller))


def _is_file(argument: str) -> bool:
    """Return whether an argument names a file of settings."""
    from nrl.config.layers import is_file_name

    return is_file_name(argument)


def _name_settings(name: str, settings: Sequence[str]) -> list[str]:
    """Return settings; one without a key gets the key ``name``."""
    return [setting if "=" in setting or setting.startswith("-") or _is_file(setting) else f"{name}={setting}"
            for setting in settings]  # fmt: skip


def _plan(args: argparse.Namespace) -> None:
    if not {"-h", "--help"} & set(args.settings):  # before the imports, which take seconds
        print("plan: importing torch", file=sys.stderr, flush=True)
    from nrl import config
    from nrl.ops.plan import plan_command, planned_programs

    settings = plan_command.strip_dashes(args.settings)
    if scripts := [text for text in settings if text.endswith(".py") and "=" not in text]:
        rest = [text for text in settings if text != scripts[0]]
        plan_command.main(*planned_programs.plan_program(scripts[0], rest))
        return
    named = _name_settings("model", settings)
    cfg = config.load(plan_command.Planning, named, program="nrl plan MODEL", caller="plan")
    plan_command.main(cfg, config.given_keys(plan_command.Planning, named))


def _diagnose(args: argparse.Namespace) -> int:
    from nrl import config
    from nrl.ops.doctor import doctor_command

    settings = ["json=true" if setting == "--json" else setting for setting in args.settings]
    return doctor_command.main(config.load(doctor_command.Doctor, settings, program="nrl doctor", caller="doctor"))


def _audit(args: argparse.Namespace) -> int:
    from nrl import config
    from nrl.gym.cli import audit

    settings = list[str]()
    for argument in args.settings:
        key, equals, text = argument.partition("=")
        if key == "allow" and equals:
            settings.append(f"allow=[{text.strip('[]')}]")
        elif equals or argument.startswith("-") or (_is_file(argument) and not _is_gym(argument)):
            settings.append(argument)
        else:
            settings.append(f"target={argument}")
    targets = [setting.removeprefix("target=") for setting in settings if setting.startswith("target=")]
    if len(targets) > 1 and not any(setting.startswith("-") for setting in settings):
        raise ConfigError(f"gym test: found {' and '.join(targets)}; give one target, and all else as key=value")
    return audit.main(config.load(audit.Audit, settings, program="nrl gym test FILE.py:NAME", caller="gym test"))


def _is_gym(file: str) -> bool:
    """Return whether a file configures a gym, and no command."""
    import yaml

    if not file.endswith((".yaml", ".yml")):
        return False
    try:
        content = yaml.safe_load(Path(file).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):  # The command that reads the file reports the error.
        return False
    return isinstance(content, dict) and "servers" in content


def _gym(args: argparse.Namespace) -> int:
    from nrl.gym.cli import running, scaffold, status  # a server's libraries are not for every command

    module, do = {"run": (running, running.run), "status": (status, status.status), "init": (scaffold, scaffold.init)}[
        args.name
    ]
    if {"-h", "--help"} & set(args.settings):
        print(module.USAGE)
        return 0
    return do(args.settings)


def _parse_setting(argument: str) -> str:
    """An argument in the form of ``load``: a file that is no configuration is the tasks, and k=1,4 is a list."""
    key, equals, text = argument.partition("=")
    if key == "k" and equals:
        return f"k=[{text.strip('[]')}]"
    if argument.startswith("-") or (equals and "/" not in key) or _is_file(argument):
        return argument
    return f"tasks={argument}"


def _add_venvs(parser: argparse.ArgumentParser) -> None:
    parser.description = "Environments are in NRL_VENV_DIR, by default a folder in the user's cache."
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, summary: str, do: Callable[..., object], names: str | None = None) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=summary, description=summary)
        if names is not None:
            command.add_argument("names", metavar="NAME", nargs=names, help="an executable, such as base")
        command.add_argument(
            "--import", dest="modules", metavar="MODULE", action="append", default=[],
            help="a module, or a file that ends in .py, which registers executables",
        )  # fmt: skip

        def run(args: argparse.Namespace) -> int:
            _import(args.modules)
            return int(do(args) is False)

        command.set_defaults(do=run)
        return command

    add("build", "build missing environments", _build, "+")
    add("list", "the environments there are; with names, their contents", _list, "*")
    add("check", "compare environments with the lock", _check, "*")
    command = add("path", "the interpreter of an executable", _path, "+")
    command.add_argument("--imports", action="store_true", help="folders to import from besides, for PYTHONPATH")
    command = add("wheels", "download the packages of executables, for hosts without a network", _wheels, "+")
    command.add_argument("--to", metavar="FOLDER", required=True, help="gets the files, and NAME.txt with their list")
    command = add("prune", "remove environments that were not used lately", _prune)
    command.add_argument("--days", type=float, default=30.0, help="not used for so long; 0: all of them (default: 30)")
    command.add_argument("--dry-run", action="store_true", help="only say what would be removed")


def _import(modules: Sequence[str]) -> None:
    """Import what registers executables: a module from this folder, and a file with the folder that it is in."""
    for module in modules:
        is_file = module.endswith(".py")
        folder = str(Path(module).resolve().parent) if is_file else ""
        sys.path.insert(0, folder)
        try:
            if is_file:
                runpy.run_path(module, run_name="nrl_venvs")
            else:
                importlib.import_module(module)
        finally:
            sys.path.remove(folder)


def _build(args: argparse.Namespace) -> None:
    from nrl.runtime.venvs import cli

    cli.build(args.names)


def _list(args: argparse.Namespace) -> None:
    from nrl.runtime.venvs import cli

    print(cli.list_envs(args.names))


def _check(args: argparse.Namespace) -> bool:
    from nrl.runtime.venvs import cli

    return cli.check(args.names)


def _path(args: argparse.Namespace) -> None:
    from nrl.runtime.venvs import cli

    print(*(cli.find_path(name, imports=args.imports) for name in args.names), sep="\n")


def _wheels(args: argparse.Namespace) -> None:
    from nrl.runtime.venvs import offline_bundle

    offline_bundle.collect(args.names, Path(args.to))


def _prune(args: argparse.Namespace) -> None:
    from nrl.runtime.venvs import cli

    removed = cli.prune(args.days, dry=args.dry_run)
    print(f"{len(removed)} {'would be' if args.dry_run else 'are'} removed")


type _Commands = tuple[tuple[str, str, str, _Handler], ...]  # name, what it does, what it is given, and its function

_COMMANDS: _Commands = (
    ("eval", "sample answers to tasks, and say how many are right", "TASKS key=value ...", _evaluate),
    ("serve", "serve a model over HTTP, as OpenAI's APIs do", "MODEL key=value ...", _serve),
    ("export", "write a checkpoint as a folder that transformers loads", "RUN key=value ...", _export),
    ("plan", "what a training step needs on a GPU, without one", "MODEL or PROGRAM.py key=value ...", _plan),
    ("doctor", "does this machine, or a cluster, run nrl?", "key=value ...", _diagnose),
)
_GYM: _Commands = (
    ("run", "start the servers of a configuration", "CONFIG.yaml", _gym),
    ("status", "show the servers that run", "CONFIG.yaml", _gym),
    ("init", "write a new environment with its test, page and configuration", "NAME", _gym),
    ("test", "give it what lazy and hostile policies write, and say what it gets wrong", "FILE.py:NAME", _audit),
)
_DEPLOY: _Commands = (
    ("slurm", "a batch script", "PROGRAM.py key=value ... -- ARGUMENTS", _deploy),
    ("kubernetes", "manifests for KubeRay", "PROGRAM.py key=value ... -- ARGUMENTS", _deploy),
)
