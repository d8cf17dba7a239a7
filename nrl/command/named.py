"""Verifiers and environments of the user's own, named on a command line: ``FILE.py:NAME`` or ``MODULE:NAME``."""

import importlib
import inspect
import runpy
import sys
from pathlib import Path
from typing import Any

from nrl.envs import VERIFIERS, Env, Verifier
from nrl.envs.contract import is_env
from nrl.errors import ConfigError

__all__ = ["environment", "verifier"]

_ENV = "give an Environment, or a function without arguments that returns one, as env=FILE.py:NAME or MODULE:NAME"


def verifier(name: str) -> Verifier:
    """The function of a name: one of `VERIFIERS`, or of the user's own.

    Raises:
        ConfigError: there is no such file, module or function.

    >>> verifier("nrl.envs:exact").__name__
    'exact'
    """
    known = f"there are {', '.join(sorted(VERIFIERS))}, or give a function of your own as FILE.py:NAME or MODULE:NAME"
    if name in VERIFIERS:
        return VERIFIERS[name]
    if ":" not in name:
        raise ConfigError(f"eval: there is no verifier '{name}'; {known}")
    module, found, _ = _found("verifier", name, known)
    if not callable(found):
        raise ConfigError(f"eval: verifier={name}: {module} has no function '{name.rpartition(':')[2]}'; {known}")
    made: Verifier = found
    return made


def environment(name: str) -> Env:
    """The environment of a name: a value, or what a function without arguments returns.

    Raises:
        ConfigError: there is no such file, module or value, or it is no environment.

    >>> environment("nrl.envs:single_turn")
    Traceback (most recent call last):
    nrl.errors.ConfigError: eval: env=nrl.envs:single_turn cannot be called without arguments: missing a required ...
    """
    if ":" not in name:
        raise ConfigError(f"eval: env={name} names no file or module; {_ENV}")
    module, found, names = _found("env", name, _ENV)
    attribute = name.rpartition(":")[2]
    if attribute not in names:
        envs = ", ".join(sorted(each for each, value in names.items() if is_env(value))) or "no environment"
        raise ConfigError(f"eval: env={name}: {module} has no '{attribute}', and it has {envs}; {_ENV}")
    if is_env(found):
        return found
    if not callable(found):
        raise ConfigError(f"eval: env={name} is a {type(found).__name__}, which has no reset and step; {_ENV}")
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise ConfigError(f"eval: env={name} cannot be called without arguments: {error}; {_ENV}") from error
    except ValueError:  # a function in C that does not say what it takes
        pass
    if not is_env(made := found()):
        raise ConfigError(
            f"eval: env={name} returned a {type(made).__name__}, which has no reset and step; return an Environment"
        )
    return made


def _found(what: str, name: str, known: str) -> tuple[str, Any, dict[str, Any]]:
    """The file or module of a name, the value there (None: there is none), and all that it has."""
    module, _, attribute = name.rpartition(":")
    if not module:
        raise ConfigError(f"eval: {what}={name}: the module is not named; {known}")
    is_file = module.endswith(".py")
    if is_file and not Path(module).is_file():
        raise ConfigError(f"eval: {what}={name}: there is no file {module}; {known}")
    folder = str(Path(module).resolve().parent if is_file else Path.cwd())
    if folder not in sys.path:  # as where a program is run, so that it finds the modules beside it
        sys.path.insert(0, folder)
    try:
        names = runpy.run_path(module) if is_file else vars(importlib.import_module(module))
    except (OSError, ImportError) as error:
        raise ConfigError(
            f"eval: {what}={name}: {module} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    return module, names.get(attribute), names
