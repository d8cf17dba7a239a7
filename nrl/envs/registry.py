"""Verifiers and environments by name: one that ships, or one's own, as ``FILE.py:NAME`` or ``MODULE:NAME``."""

import functools
import importlib
import inspect
import runpy
import sys
import traceback
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_type_hints

from nrl.envs.types import Env, Environment, Verifier, declared_rewards, is_env
from nrl.errors import ArgumentError, ConfigError, NrlError

__all__ = ["named"]

_OWN = "give one of your own as FILE.py:NAME or MODULE:NAME"


def named(name: str, options: Mapping[str, Any], known: Mapping[str, Any], at: str = "env") -> Verifier | Env:
    """The verifier or the environment of a name.

    What is found is taken as it is, if it is an environment, or a function of a task and a trace, which is a verifier.
    Any other function makes one of the two, and takes the options; so does one of two things that are among these.

    Args:
        name: of one that ships, or ``FILE.py:NAME`` or ``MODULE:NAME``.
        options: by name. Those of a verifier are its further arguments. ``timeout`` are the seconds that a call may
            take, unless the function that makes it has a ``timeout`` of its own.
        known: those that ship.
        at: the key of a configuration that names it, for messages.

    Raises:
        ConfigError: there is no such name, file, module or option, or an option is of another type; or what is found
            is, or makes, neither a verifier nor an environment. The message says what there is.

    >>> from nrl.envs import exact
    >>> named("exact", {}, {"exact": exact}) is exact
    True
    >>> named("exat", {}, {"exact": exact})
    Traceback (most recent call last):
    nrl.errors.ConfigError: env=exat: there is no such environment; did you mean 'exact'? Or give one of your own as ...
    """
    who = f"{at}={name}"
    if ":" in name:
        found = _found(name, who)
    elif name in known:
        found = known[name]
    elif name.endswith(".py") and Path(name).is_file():
        raise ConfigError(f"{who} names no environment of the file; it has {_there(_names(name, who))}: {name}:NAME")
    else:
        raise ConfigError(f"{who}: there is no such environment; {_meant(name, known, 'Or')} {_OWN}")
    given, takes = dict(options), _options(found, options)
    limit = given.pop("timeout", ...) if "timeout" not in takes else ...
    for option in given:
        if option not in takes and "**" not in takes:
            there = list(dict.fromkeys([*takes, "timeout", "weight"]))
            near = get_close_matches(option, there, 1)
            hint = f"did you mean '{near[0]}'? It" if near else "it"
            raise ConfigError(f"{who} takes no '{option}'; {hint} takes {', '.join(there)}")
    _check_types(who, found, given)
    if not (is_env(found) or _verifies(found, given)):
        found = _made(who, found, given, f"{at}.{name}")
    elif given:  # of a verifier
        found = functools.update_wrapper(functools.partial(found, **given), found)
    return found if limit is ... else _limited(who, found, limit)


def _meant(name: str, known: Mapping[str, Any], then: str) -> str:
    near = get_close_matches(name, known, 1)
    return f"did you mean '{near[0]}'? {then}" if near else f"there are {', '.join(sorted(known))}, {then.lower()}"


def _options(found: Any, given: Mapping[str, Any]) -> list[str]:
    """The names of the options that something takes; ``"**"`` among them: any."""
    if is_env(found):
        return []
    parameters = _parameters(found)[2 if _verifies(found, given) else 0 :]
    names = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    return names + ["**" for each in parameters if each.kind is each.VAR_KEYWORD]


def _parameters(function: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a function in C that does not say what it takes
        return []


def _verifies(found: Any, given: Mapping[str, Any] = MappingProxyType({})) -> bool:
    """Whether something is a function of a task and a trace, which no options are."""
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [each for each in _parameters(found) if each.default is each.empty and each.kind in places]
    is_made = any(each.name in given for each in needed)
    return callable(found) and not isinstance(found, type) and len(needed) == 2 and not is_made


def _check_types(who: str, found: Any, given: Mapping[str, Any]) -> None:
    """Compare options with the types that the function says they have."""
    if not given or is_env(found):
        return
    from pydantic import TypeAdapter, ValidationError
    from pydantic.errors import PydanticUserError

    try:
        hints = get_type_hints(found)
    except (NameError, TypeError):  # not for this interpreter, or none
        return
    for option, value in given.items():
        try:
            TypeAdapter(hints.get(option, Any)).validate_python(value)
        except ValidationError as error:
            said = error.errors()[0]["msg"]
            raise ConfigError(f"{who}: {option} is {value!r:.200}: {said[0].lower()}{said[1:]}") from None
        except PydanticUserError:  # a type that it does not know
            continue


def _made(who: str, make: Any, given: Mapping[str, Any], at: str) -> Verifier | Env:
    what = "an Environment, a function (task, trace) that verifies, or one that makes either and takes options by name"
    if not callable(make):
        raise ConfigError(f"{who} is {_article(make)}; give {what}")
    needed = [each.name for each in _parameters(make) if each.default is each.empty and each.kind.value in (0, 1, 3)]
    if missing := [each for each in needed if each not in given]:
        verifier = "" if given else "; or, if it is a verifier, let it take a task and a trace alone"
        raise ConfigError(f"{who} needs {', '.join(missing)}; give {at}.{missing[0]}={verifier}")
    try:
        made = make(**given)
    except (TypeError, ValueError) as error:
        if isinstance(error, NrlError) and not isinstance(error, ArgumentError):
            raise
        raise ConfigError(f"{who}: {error}") from error
    if not (is_env(made) or _verifies(made)):
        raise ConfigError(f"{who} returned {_article(made)}; let it return an Environment or a verifier")
    return made  # type: ignore[no-any-return]


def _article(value: Any) -> str:
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def _limited(who: str, found: Any, seconds: Any) -> Verifier | Env:
    """The same with another limit on the seconds of a call."""
    if seconds is not None and not (isinstance(seconds, int | float) and seconds > 0):
        raise ConfigError(f"{who}: timeout is {seconds!r}; give seconds, or null for no limit")
    if is_env(found):
        close, verifier, tasks = (getattr(found, each, None) for each in ("close", "verifier", "tasks"))
        check, num_rewards = getattr(found, "check_task", None), declared_rewards(found)
        return Environment(found.reset, found.step, close, verifier, seconds, tasks, check, num_rewards)
    limited = functools.update_wrapper(functools.partial(found), found)
    limited.timeout = seconds  # type: ignore[attr-defined]
    return limited


def _found(name: str, who: str) -> Any:
    """What a file or a module has under a name."""
    module, _, attribute = name.rpartition(":")
    if not module:
        raise ConfigError(f"{who}: the module is not named; {_OWN}")
    names = _names(module, who)
    if attribute not in names:
        near = get_close_matches(attribute, names, 1)
        hint = f"did you mean '{near[0]}'?" if near else f"it has {_there(names)}"
        raise ConfigError(f"{who}: {module} has no '{attribute}'; {hint}")
    return names[attribute]


def _there(names: Mapping[str, Any]) -> str:
    """The environments and verifiers among names."""
    found = sorted(name for name, value in names.items() if name[0] != "_" and (is_env(value) or _verifies(value)))
    return ", ".join(found) or "none"


def _names(module: str, who: str) -> Mapping[str, Any]:
    """All that a file or a module defines."""
    is_file = module.endswith(".py")
    if is_file and not Path(module).is_file():
        raise ConfigError(f"{who}: there is no file {module} in {Path.cwd()}; {_OWN}")
    folder = str(Path(module).resolve().parent if is_file else Path.cwd())
    if folder not in sys.path:  # as where a program is run, so that it finds the modules beside it
        sys.path.insert(0, folder)
    try:
        return runpy.run_path(module) if is_file else vars(importlib.import_module(module))
    except Exception as error:  # it is the user's code
        lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == module]
        where = f", line {lines[-1]}" if lines else ""
        raise ConfigError(f"{who}: {module} cannot be imported{where}: {type(error).__name__}: {error}") from error
