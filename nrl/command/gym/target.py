"""What is tested: a verifier or an environment, by its name."""

import inspect
from typing import Any

from nrl.command import named
from nrl.envs import Env, Verifier
from nrl.envs.contract import is_env
from nrl.errors import ConfigError

__all__ = ["target"]


def target(name: str) -> Verifier | Env:
    """The verifier or the environment of a name, or what a function without arguments returns.

    Args:
        name: one of `nrl.envs.VERIFIERS`; or ``FILE.py:NAME`` or ``MODULE:NAME``, a verifier, an environment, or a
            function that makes one of them and needs no arguments.

    Raises:
        ConfigError: there is no such file, module or value, or it is none of these.

    >>> target("number").__name__, target("nrl.envs:choice").__name__, target("nrl.envs:code").__name__
    ('number', 'choice', 'verify')
    """
    try:
        found: Any = named.verifier(name)
    except ConfigError as error:
        try:
            return named.environment(name)  # a value that cannot be called
        except ConfigError:
            raise ConfigError(f"gym test: {str(error).removeprefix('eval: ')}") from error
    if is_env(found) or _takes(found, 2):
        return found  # type: ignore[no-any-return]
    if not _takes(found, 0):
        raise ConfigError(
            f"gym test: {name} takes neither (task, trace), as a verifier does, nor nothing, as a function that makes "
            "a verifier or an environment; give one of these"
        )
    made = found()
    if not is_env(made) and not callable(made):
        raise ConfigError(
            f"gym test: {name}() returned a {type(made).__name__}; return a verifier, a function of a task and a "
            "trace, or an environment"
        )
    return made  # type: ignore[no-any-return]


def _takes(fn: Any, arguments: int) -> bool:
    try:
        inspect.signature(fn).bind(*[None] * arguments)
    except TypeError:
        return False
    except ValueError:  # a function in C that does not say what it takes
        return arguments == 2
    return True
