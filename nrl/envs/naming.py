"""Verifiers and environments by name: one that ships, or one's own, as ``FILE.py:NAME`` or ``MODULE:NAME``."""

import functools
import importlib
import inspect
import runpy
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from nrl.envs.contract import Env, Environment, Verifier, is_env
from nrl.errors import ConfigError, NrlError

__all__ = ["named"]

_OWN = "give one of your own as FILE.py:NAME or MODULE:NAME"


def named(name: str, options: Mapping[str, Any], known: Mapping[str, Any]) -> Verifier | Env:
    """The verifier or the environment of a name.

    What is found is taken as it is, if it is an environment, or a function of a task and a trace, which is a verifier.
    Any other function makes one of the two, and takes the options.

    Args:
        name: of one that ships, or ``FILE.py:NAME`` or ``MODULE:NAME``.
        options: by name. Those of a verifier are its further arguments. ``timeout`` are the seconds that a call may
            take, unless the function that makes it has a ``timeout`` of its own.
        known: those that ship.

    Raises:
        ConfigError: there is no such name, file, module or option; or it is, or makes, neither a verifier nor an
            environment. The message says what there is.

    >>> from nrl.envs import exact, final_number
    >>> named("exact", {}, {"exact": exact}) is exact
    True
    >>> named("exat", {}, {"exact": exact})
    Traceback (most recent call last):
    nrl.errors.ConfigError: env=exat: there is no such environment; did you mean 'exact'? Or give one of your own as ...
    """
    if ":" in name:
        found = _found(name)
    elif name in known:
        found = known[name]
    else:
        near = get_close_matches(name, known, 1)
        hint = f"did you mean '{near[0]}'? Or" if near else f"there are {', '.join(sorted(known))}, or"
        raise ConfigError(f"env={name}: there is no such environment; {hint} {_OWN}")
    given, takes = dict(options), _options(found)
    limit = given.pop("timeout", ...) if "timeout" not in takes else ...
    for option in given:
        if option not in takes and "**" not in takes:
            near = get_close_matches(option, takes, 1)
            hint = f"did you mean '{near[0]}'? It" if near else "it"
            raise ConfigError(
                f"env={name} takes no '{option}'; {hint} takes {', '.join(dict.fromkeys([*takes, 'timeout']))}"
            )
    if not (is_env(found) or _verifies(found)):
        found = _made(name, found, given)
    elif given:  # of a verifier
        found = functools.update_wrapper(functools.partial(found, **given), found)
    return found if limit is ... else _limited(name, found, limit)


def _options(found: Any) -> list[str]:
    """The names of the options that something takes; ``"**"`` among them: any."""
    if is_env(found):
        return []
    parameters = _parameters(found)[2 if _verifies(found) else 0 :]
    names = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    return names + ["**" for each in parameters if each.kind is each.VAR_KEYWORD]


def _parameters(function: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a function in C that does not say what it takes
        return []


def _verifies(found: Any) -> bool:
    """Whether something is a function of a task and a trace."""
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [each for each in _parameters(found) if each.default is each.empty and each.kind in places]
    return callable(found) and not isinstance(found, type) and len(needed) == 2


def _made(name: str, make: Any, given: Mapping[str, Any]) -> Verifier | Env:
    what = "an Environment, a function (task, trace) that verifies, or one that makes either and takes options by name"
    if not callable(make):
        raise ConfigError(f"env={name} is {_article(make)}; give {what}")
    needed = [each.name for each in _parameters(make) if each.default is each.empty and each.kind.value in (0, 1, 3)]
    if missing := [each for each in needed if each not in given]:
        raise ConfigError(f"env={name} needs {', '.join(missing)}; give env.{name}.{missing[0]}=")
    try:
        made = make(**given)
    except (TypeError, ValueError) as error:
        if isinstance(error, NrlError):
            raise
        raise ConfigError(f"env={name}: {error}") from error
    if not (is_env(made) or _verifies(made)):
        raise ConfigError(f"env={name} returned {_article(made)}; let it return an Environment or a verifier")
    return made  # type: ignore[no-any-return]


def _article(value: Any) -> str:
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def _limited(name: str, found: Any, seconds: Any) -> Verifier | Env:
    """The same with another limit on the seconds of a call."""
    if seconds is not None and not (isinstance(seconds, int | float) and seconds > 0):
        raise ConfigError(f"env={name}: timeout is {seconds!r}; give seconds, or null for no limit")
    if is_env(found):
        close, verifier, tasks = (getattr(found, each, None) for each in ("close", "verifier", "tasks"))
        return Environment(found.reset, found.step, close, verifier, seconds, tasks)
    limited = functools.update_wrapper(functools.partial(found), found)
    limited.timeout = seconds  # type: ignore[attr-defined]
    return limited


def _found(name: str) -> Any:
    """What a file or a module has under a name."""
    module, _, attribute = name.rpartition(":")
    if not module:
        raise ConfigError(f"env={name}: the module is not named; {_OWN}")
    is_file = module.endswith(".py")
    if is_file and not Path(module).is_file():
        raise ConfigError(f"env={name}: there is no file {module} in {Path.cwd()}; {_OWN}")
    folder = str(Path(module).resolve().parent if is_file else Path.cwd())
    if folder not in sys.path:  # as where a program is run, so that it finds the modules beside it
        sys.path.insert(0, folder)
    try:
        names = runpy.run_path(module) if is_file else vars(importlib.import_module(module))
    except (OSError, ImportError) as error:
        raise ConfigError(f"env={name}: {module} cannot be imported: {type(error).__name__}: {error}") from error
    if attribute not in names:
        near = get_close_matches(attribute, names, 1)
        there = sorted(each for each, value in names.items() if is_env(value) or (_verifies(value) and each[0] != "_"))
        hint = f"did you mean '{near[0]}'?" if near else f"it has {', '.join(there) or 'none'}"
        raise ConfigError(f"env={name}: {module} has no '{attribute}'; {hint}")
    return names[attribute]
