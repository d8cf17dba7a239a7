"""Checks of a program and of its settings on the host that submits the job."""

import ast
import contextlib
import difflib
import shlex
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from nrl.config._yaml import Problems
from nrl.config.layers import is_file_name, read_file
from nrl.errors import ConfigError
from nrl.runtime.venvs.registry import EXECUTABLES

__all__ = ["build_arguments", "check_files", "check_fits", "load_config", "settings_in_files"]

_ATTRS = ("frozen", "define", "mutable", "attrs", "s")
_READ_BY = {"launch": 2, "load": 1}
"""The functions of nrl that read the program's own arguments, and how many of theirs are positional then."""


def _iter_files(arguments: Sequence[str]) -> Iterator[str]:
    """The files of settings among a program's arguments, as `nrl.config.load` finds them."""
    for argument in arguments:
        key, equals, text = argument.partition("=")
        path = text if key == "config" and equals else argument
        if not argument.startswith("-") and (not equals or "/" in key or key == "config") and is_file_name(path):
            yield path


def settings_in_files(arguments: Sequence[str], folder: str) -> dict[str, Any]:
    """Read the settings in readable files; the program itself reports errors in the others."""
    settings = dict[str, Any]()
    for file in _iter_files(arguments):
        with contextlib.suppress(OSError, ValueError, Problems):
            settings |= read_file(Path(folder) / file)
    return settings


def check_files(arguments: Sequence[str], folder: str, command: str) -> None:
    """See that the files of settings are there.

    Args:
        arguments: of the program.
        folder: where it runs.
        command: for the error.

    Raises:
        ConfigError: one of them is missing.
    """
    for file in _iter_files(arguments):
        if not (Path(folder) / file).is_file():
            raise ConfigError(f"{command}: found no file {file} in {folder}, where the program runs")


def _parse_importable(program: Path) -> ast.Module | None:
    """A program whose main part stands under ``if __name__ == "__main__"``, so that its module can be imported.

    Returns:
        Its syntax; None: the program is not here, or is none, or has no such part.
    """
    try:
        tree = ast.parse(program.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    return tree if any(isinstance(node, ast.If) and _is_guard(node.test) for node in tree.body) else None


def _is_guard(test: ast.expr) -> bool:
    match test:
        case ast.Compare(ast.Name("__name__"), [ast.Eq()], [ast.Constant("__main__")]):
            return True
        case ast.Compare(ast.Constant("__main__"), [ast.Eq()], [ast.Name("__name__")]):
            return True
    return False


def _reads_config(tree: ast.Module) -> bool:
    """Return whether a program declares an attrs class ``Config``, into which nrl reads its arguments."""

    def name(node: ast.expr) -> str:
        node = node.func if isinstance(node, ast.Call) else node
        return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""

    declared = any(
        isinstance(node, ast.ClassDef)
        and node.name == "Config"
        and any(name(by) in _ATTRS for by in node.decorator_list)
        for node in tree.body
    )
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    reading = [node for node in calls if len(node.args) == _READ_BY.get(name(node))]
    of_program = [node for node in reading if all(keyword.arg != "args" for keyword in node.keywords)]
    return declared and any(
        isinstance(arg, ast.Name) and arg.id == "Config" for call in of_program for arg in call.args
    )


def load_config(program: str, words: Sequence[str], added: Sequence[str], folder: str, command: str) -> Any | None:
    """Load what a job will give a program into the ``Config`` that its module declares, as the program will.

    Its module is imported, which needs what it imports; so this is done only where its main part is guarded, and where
    nrl reads its arguments. If it cannot be imported here, a line on stderr says that nobody has looked.

    Args:
        program: its file, from ``folder``.
        words: the program's arguments.
        added: further ones, which the command gives it.
        folder: where it runs.
        command: for the error.

    Returns:
        The configuration; None: nobody has looked.

    Raises:
        ConfigError: its configuration does not take these.
    """
    tree = _parse_importable(Path(folder) / program)
    if tree is None or not _reads_config(tree):
        return None
    if missing := [file for file in _iter_files(words) if not (Path(folder) / file).is_file()]:  # it is in a container
        print(f"{command}: {missing[0]} is not here, so nobody has checked the settings of {program}", file=sys.stderr)
        return None
    print(f"{command}: importing {program}, whose Config takes the settings", file=sys.stderr, flush=True)
    from nrl import config
    from nrl.ops.plan.planned_programs import load_config_class  # This imports torch, as nearly all programs do.

    caller = f"{command}: {program} with {shlex.join(added)}, which the job gives it"
    with contextlib.chdir(folder):  # The program finds its files there.
        try:
            with contextlib.redirect_stdout(sys.stderr):
                cls = load_config_class(program)
        except (Exception, SystemExit) as error:
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            message = f"{command}: {program} cannot be imported here ({cause}), so nobody has checked its settings"
            print(message, file=sys.stderr)
            return None
        return None if cls is None else config.load(cls, [*words, *added], program=program, caller=caller)


def check_fits(loaded: Any, key: str, nodes: int, gpus: int, command: str) -> None:
    """See that a job has the slots that a program's ``layout`` and ``samplers`` ask for.

    Args:
        loaded: its configuration.
        key: the setting that says how many nodes there are.
        nodes: that number.
        gpus: of a node; 0: slots are processors, whose number is not known here.
        command: for the error.

    Raises:
        ConfigError: it has fewer.
    """
    slots, samplers = getattr(getattr(loaded, "layout", None), "slots", None), getattr(loaded, "samplers", 0)
    if gpus and isinstance(slots, int) and isinstance(samplers, int) and slots + samplers > nodes * gpus:
        raise ConfigError(
            f"{command}: the program takes {slots + samplers} slots, {slots} by its layout and {samplers} for "
            f"samplers; {key}={nodes} with gpus={gpus} have {nodes * gpus} GPUs: give more of them, or it less"
        )


def build_arguments(
    names: Sequence[str], program: str, folder: str, *, known_names: Collection[str], imported: bool, command: str
) -> tuple[str, ...]:
    """The words that follow ``nrl venvs build``. An executable of the program's own is taken from its file.

    Args:
        names: of executables.
        program: its file, from ``folder``.
        folder: where it runs.
        known_names: the executables that there are without the program.
        imported: whether the program's module was imported here, so that its executables are there, too.
        command: for the error.

    Raises:
        ConfigError: nobody registers one of the names.
    """
    if all(name in known_names for name in names):
        return tuple(names)
    maybe = not imported and _parse_importable(Path(folder) / program) is not None
    for name in names:
        if name in EXECUTABLES:
            continue
        if not maybe:
            near = difflib.get_close_matches(name, EXECUTABLES, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(EXECUTABLES)}"
            raise ConfigError(
                f"{command}: there is no executable named '{name}'; {hint} (one of the program's own is registered by "
                f'{program} itself, whose main part stands under `if __name__ == "__main__"`)'
            )
        print(
            f"{command}: it is not known here whether {program} registers the executable '{name}'; if it does not, the "
            "job ends before the program starts",
            file=sys.stderr,
        )
    return (f"--import={program}", *names)
