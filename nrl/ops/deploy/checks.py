"""Which settings may be written into a script or a manifest."""

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
    "duration",
    "environment",
    "matches",
    "program_arguments",
    "with_grace",
]

type _Validator = Callable[[Any, Any, Any], None]
_GRACE = "checkpoints.grace"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def matches(pattern: str, what: str) -> _Validator:
    """A validator of attrs: a text, each text of a sequence, or None.

    Args:
        pattern: a regular expression, of the whole text.
        what: what a text should be, for the error, which is a ValueError.

    >>> matches("[a-z]+", "small letters")(None, None, "Ab")
    Traceback (most recent call last):
    ValueError: expected small letters, found 'Ab'
    """
    compiled = re.compile(pattern, re.ASCII)

    def check(instance: Any, attribute: Any, value: Any) -> None:
        for each in [value] if isinstance(value, str) else value or ():
            if compiled.fullmatch(each) is None:
                raise ValueError(f"expected {what}, found {each!r}")

    return check


def environment(instance: Any, attribute: Any, value: Mapping[str, str]) -> None:
    """A validator of attrs: names of environment variables.

    Raises:
        ValueError: a name that a shell cannot export.
    """
    for name in value:
        if _VARIABLE.fullmatch(name) is None:
            raise ValueError(f"expected names of environment variables, found {name!r}")


def duration(text: str) -> int:
    """Seconds of a time as Slurm writes it, such as ``90``, ``1:30:00`` or ``2-12``.

    >>> duration("90"), duration("1:30:00"), duration("2-12")
    (5400, 5400, 216000)
    """
    days, dash, rest = text.rpartition("-")
    parts = [int(each) for each in rest.split(":")]
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
    pairs = {**dict(each.split("=", 1) for each in arguments if "=" in each), **env}
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
    for each in options:
        name = each.removeprefix("--").partition("=")[0]
        of = name if name in owned else next((known for known in owned if known.startswith(name)), None)
        if of is not None:
            instead = f"give {owned[of]} instead" if owned[of] else "edit the script where you want another"
            raise ConfigError(
                f"{command}: found {each} among options=, and the script has --{of} of its own; {instead}"
            )


def program_arguments(arguments: Sequence[str], command: str) -> tuple[str, ...]:
    """The program's arguments, none of which the command gives itself.

    Raises:
        ConfigError: one of them is given by the command.
    """
    for each in arguments:
        if each.startswith("out="):
            raise ConfigError(
                f"{command}: found {each} after `--`; give it before, since the files name that folder, too"
            )
        if each.startswith("cluster=") and each != "cluster=auto":
            raise ConfigError(
                f"{command}: found {each} after `--`; the program joins the cluster of the job, by cluster=auto: leave "
                "it out"
            )
    return tuple(each for each in arguments if each != "cluster=auto")


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
    found = [of_files[key]] if isinstance(of_files, Mapping) and key in of_files else []
    found += [files[_GRACE]] if _GRACE in files else []
    found += [text for name, _, text in (each.partition("=") for each in arguments) if name == _GRACE]
    if not found:
        return (*arguments, f"{_GRACE}={grace - spare}")
    said = str(found[-1])  # the last one counts
    if said.replace(".", "", 1).isdigit() and float(said) > grace - spare:
        raise ConfigError(
            f"{command}: found {_GRACE}={said} and grace={grace}; the program is killed then, and what it may take has "
            f"to be less, {grace - spare} s at most: give grace={int(float(said)) + 60}"
        )
    return tuple(arguments)


def _texts(value: Any, key: str = "") -> list[tuple[str, str]]:
    if isinstance(value, str):
        return [(key, value)]
    if isinstance(value, Mapping):
        of_keys = [(key, name) for name in value] if key else []
        return of_keys + [found for name, each in value.items() for found in _texts(each, key or name)]
    if isinstance(value, list | tuple):
        return [found for each in value for found in _texts(each, key)]
    return []
