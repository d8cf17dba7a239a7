"""Checks of settings before they are written into a script or a manifest."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from nrl.errors import ConfigError
from nrl.log import redact, redacted

__all__ = [
    "check_options",
    "check_owned",
    "check_plain",
    "check_secrets",
    "check_variables",
    "match_pattern",
    "parse_duration",
    "program_arguments",
    "with_grace",
]

type _Validator = Callable[[Any, Any, Any], None]
_GRACE = "checkpoints.grace"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def match_pattern(pattern: str, expected: str) -> _Validator:
    """A validator of attrs: a text, each text of a sequence, or None.

    Args:
        pattern: a regular expression, of the whole text.
        expected: what a text should be, for the error, which is a ValueError.

    >>> match_pattern("[a-z]+", "small letters")(None, None, "Ab")
    Traceback (most recent call last):
    ValueError: expected small letters, found 'Ab'
    """
    compiled = re.compile(pattern, re.ASCII)

    def check(instance: Any, attribute: Any, value: Any) -> None:
        for text in [value] if isinstance(value, str) else value or ():
            if compiled.fullmatch(text) is None:
                raise ValueError(f"expected {expected}, found {text!r}")

    return check


def check_variables(instance: Any, attribute: Any, value: Mapping[str, str]) -> None:
    """A validator of attrs: names of environment variables.

    Raises:
        ValueError: a name that a shell cannot export.
    """
    for name in value:
        if _VARIABLE.fullmatch(name) is None:
            raise ValueError(f"expected names of environment variables, found {name!r}")


def parse_duration(text: str) -> int:
    """Seconds of a time as Slurm writes it, such as ``90``, ``1:30:00`` or ``2-12``.

    >>> parse_duration("90"), parse_duration("1:30:00"), parse_duration("2-12")
    (5400, 5400, 216000)
    """
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        parts = [*parts, 0, 0][:3]
    elif len(parts) < 3:
        parts = [0, *parts, 0][:3]
    return int(days or 0) * 86_400 + parts[0] * 3600 + parts[1] * 60 + parts[2]


def check_plain(cfg: Any, command: str) -> None:
    """Refuse characters that end a line or that nobody sees: no comment of a script can hold them.

    Args:
        cfg: an instance of an attrs class.
        command: for the error.

    Raises:
        ConfigError: a setting has one.
    """
    for key, text in _texts(attrs.asdict(cfg)):
        if not text.isprintable():
            raise ConfigError(f"{command}: {key} has a character that cannot be printed; found {text!r}")


def check_secrets(arguments: Sequence[str], env: Mapping[str, str], command: str, instead: str) -> None:
    """Refuse what looks like a secret: files are read by many, and stay.

    Args:
        arguments: of the program, ``key=value``.
        env: the variables that would be written.
        command: for the error.
        instead: where a secret belongs, for the error.

    Raises:
        ConfigError: there is one.
    """
    pairs = {**dict(argument.split("=", 1) for argument in arguments if "=" in argument), **env}
    for key, text in pairs.items():
        if text and (redacted({key: text})[key] != text or redact(f"{key}={text}") != f"{key}={text}"):
            raise ConfigError(f"{command}: {key} looks like a secret, which a file must not hold; {instead}")


def check_owned(names: Iterable[str], owned: Mapping[str, str], command: str) -> None:
    """Refuse environment variables that the files set themselves: one of the two values would be lost.

    Args:
        names: of the variables that would be written.
        owned: the names of the files' own, and what to give instead; empty: nothing.
        command: for the error.

    Raises:
        ConfigError: one of them is owned.
    """
    for name in names:
        if name in owned:
            instead = f"give {owned[name]} instead" if owned[name] else "leave it out"
            raise ConfigError(f"{command}: found {name} among the variables, which the files set themselves; {instead}")


def check_options(options: Sequence[str], owned: Mapping[str, str], command: str) -> None:
    """Refuse options of sbatch that the script has already: one of the two would be lost, and no check has seen it.

    Args:
        options: ``--name`` or ``--name=value``; sbatch takes the beginning of a name, too.
        owned: the names of the script's own, and what to give instead; empty: nothing.
        command: for the error.

    Raises:
        ConfigError: one of them is owned.
    """
    for option in options:
        name = option.removeprefix("--").partition("=")[0]
        own_option = (
            name
            if name in owned
            else next((option_name for option_name in owned if option_name.startswith(name)), None)
        )
        if own_option is not None:
            instead = (
                f"give {owned[own_option]} instead" if owned[own_option] else "edit the script where you want another"
            )
            raise ConfigError(
                f"{command}: found {option} among options=, and the script has --{own_option} of its own; {instead}"
            )


def program_arguments(arguments: Sequence[str], command: str) -> tuple[str, ...]:
    """The program's arguments, none of which the command gives itself.

    Raises:
        ConfigError: one of them is given by the command.
    """
    for argument in arguments:
        if argument.startswith("out="):
            raise ConfigError(
                f"{command}: found {argument} after `--`; give it before, since the files name that folder, too"
            )
        if argument.startswith("cluster=") and argument != "cluster=auto":
            raise ConfigError(
                f"{command}: found {argument} after `--`; the program joins the cluster of the job, by cluster=auto: "
                "leave it out"
            )
    return tuple(argument for argument in arguments if argument != "cluster=auto")


def with_grace(
    arguments: Sequence[str], files: Mapping[str, Any], grace: int, spare: int, command: str
) -> tuple[str, ...]:
    """The program's arguments, which say how much time it has when it is told to end.

    Args:
        arguments: of the program.
        files: what its files of settings say.
        grace: seconds from then until it is killed.
        spare: seconds of them that what ends after the program needs.
        command: for the error.

    Raises:
        ConfigError: they say more than that already.

    >>> with_grace(["steps=3"], {}, 120, 20, "deploy")
    ('steps=3', 'checkpoints.grace=100')
    >>> with_grace(["a.yaml"], {"checkpoints": {"grace": 60}}, 120, 20, "deploy")
    ('a.yaml',)
    """
    group, _, key = _GRACE.partition(".")
    of_files = files.get(group)
    values = [of_files[key]] if isinstance(of_files, Mapping) and key in of_files else []
    values += [files[_GRACE]] if _GRACE in files else []
    values += [text for name, _, text in (argument.partition("=") for argument in arguments) if name == _GRACE]
    if not values:
        return (*arguments, f"{_GRACE}={grace - spare}")
    value = str(values[-1])  # the last one counts
    if value.replace(".", "", 1).isdigit() and float(value) > grace - spare:
        raise ConfigError(
            f"{command}: found {_GRACE}={value} and grace={grace}; the program is killed then, and what it may take "
            f"has to be less, {grace - spare} s at most: give grace={int(float(value)) + 60}"
        )
    return tuple(arguments)


def _texts(value: Any, key: str = "") -> list[tuple[str, str]]:
    if isinstance(value, str):
        return [(key, value)]
    if isinstance(value, Mapping):
        of_keys = [(key, name) for name in value] if key else []
        return of_keys + [text for name, item in value.items() for text in _texts(item, key or name)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in _texts(item, key)]
    return []
