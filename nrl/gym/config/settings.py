"""What the files and arguments of a gym say, before anything is known about servers.

Files are merged, later ones over earlier ones, then ``env.yaml``, then arguments: mappings key by key, all else whole.
Any key at the top is a variable, to which ``${...}`` refers.
"""

import os
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from nrl.config._yaml import Problems, Word, word_items
from nrl.config.interpolation import interpolate, references
from nrl.config.layers import ConfigLayer, merge_values, read_file
from nrl.errors import ConfigError
from nrl.log.redaction import keep_secret, secret_texts

__all__ = ["Settings", "settings"]

_SETTING = re.compile(r"(\+\+|\+|~|)([^=/\s~+]+)(?:=(.*))?", re.DOTALL)
_FILES = ("config", "config_paths")  # the second is NeMo Gym's
_ENV = "env.yaml"
_AUTH = {"token", "none"}  # what auth may be, which is no secret
_NO_SECRET = re.compile(r"(^|_)(url|name|host|port|model|path|folder|dir)s?$", re.IGNORECASE)


class Settings(NamedTuple):
    """The settings of a gym, in which references still stand.

    Args:
        values: all of them, merged.
        layers: where they come from, for messages.
        files: the configurations, without ``env.yaml``; absolute paths.
    """

    values: dict[str, Any]
    layers: list[ConfigLayer]
    files: tuple[Path, ...]

    def resolved(self, keys: Sequence[str]) -> dict[str, Any]:
        """The values of some keys at the top, with others in place of their references.

        A name that nothing gives is that of an environment variable in capitals: ``${policy_api_key}`` is
        ``POLICY_API_KEY``.

        Raises:
            ConfigError: a reference leads nowhere or in a circle.
        """
        found = interpolate(self.values, keys, fallback=_variable)
        keep_secret(secret_texts(found))
        return found


def settings(args: Sequence[str], known: Sequence[str]) -> Settings:
    """Read files and arguments.

    Args:
        args: ``FILE.yaml``, ``config=FILE`` or ``config_paths=[FILE, FILE]``; ``key.sub=value``; Hydra's
            ``+key=value``, which adds, ``++key=value``, which adds or overrides, and ``~key``, which removes.
        known: the keys at the top that are no variables.

    Returns:
        The settings. Their secrets are masked from now on wherever nrl writes: what stands under a key such as
        ``api_key`` or ``token``, and all texts of ``env.yaml`` but those whose keys end in ``url``, ``name``, ``host``,
        ``port``, ``model``, ``path`` or ``folder``.

    Raises:
        ConfigError: a file cannot be read, or an argument is not understood, or it holds a secret, which the list of
            processes would show.
    """
    paths, changes = list[str](), list[tuple[str, str, str | None]]()
    for arg in args:
        match = _SETTING.fullmatch(arg)
        if arg.startswith("-"):
            raise ConfigError(f"{arg}: options are written key=value, without dashes")
        if match is None or (match[3] is None and match[1] != "~"):
            paths.append(arg)
        elif match[2] in _FILES:
            listed = _value(match[3] or "")
            paths += map(str, listed) if isinstance(listed, list) else [str(listed)]
        else:
            changes.append((match[1], match[2], match[3]))
    if not paths:
        raise ConfigError("no configuration is given; name one: CONFIG.yaml")
    _check_no_secret(changes, known)
    files = tuple(Path(path).expanduser().absolute() for path in paths)
    layers = [ConfigLayer(path, _file(path, file)) for path, file in zip(paths, files, strict=True)]
    values: Any = {}
    for layer in layers:
        values = merge_values(values, layer.values)
    private = _private(files)
    for layer in private:
        keep_secret(_texts(layer.values))
        values = merge_values(values, layer.values)
    there = set(values)
    for sign, key, text in changes:
        values = _changed(values, sign, key, text)
    layers += [
        *private,
        *(ConfigLayer("the command line", _nested(key, text)) for sign, key, text in changes if sign != "~"),
    ]
    keep_secret(text for text in secret_texts(values) if "${" not in text)
    given = {key.split(".")[0] for sign, key, _ in changes if sign != "~"}
    _check_names(values, given - there, {key for layer in layers[: len(files)] for key in layer.values}, known)
    return Settings(values, layers, files)


def _file(told: str, path: Path) -> Any:
    try:
        return read_file(path)
    except OSError as error:
        raise ConfigError(f"{told}: cannot be read: {error.strerror}; give an existing file, or key=value") from None
    except ValueError as error:
        raise ConfigError(f"{told}: not valid: {error}") from None
    except Problems as error:
        text = error.problems[0][1]
        hint = "; within { } and [ ] a reference stands in quotes: {api_key: '${policy_api_key}'}"
        quoted = hint if "not valid YAML" in text and "${" in path.read_text(errors="replace") else ""
        raise ConfigError(f"{told}: {text}{quoted}") from None


def _private(files: Sequence[Path]) -> list[ConfigLayer]:
    """Each ``env.yaml`` beside a configuration, then that of the working directory, which wins."""
    folders = dict.fromkeys([*(file.parent for file in files), Path.cwd()])
    found = [folder / _ENV for folder in folders if (folder / _ENV).is_file() and folder / _ENV not in files]
    return [ConfigLayer(str(path), _file(str(path), path)) for path in found]


def _texts(value: Any, key: str = "") -> set[str]:
    """The texts of a file of secrets that are secret."""
    if isinstance(value, Mapping):
        return set[str]().union(*(_texts(item, str(name)) for name, item in value.items()))
    if isinstance(value, list):
        return set[str]().union(*(_texts(item, key) for item in value))
    return {value} if isinstance(value, str) and "${" not in value and not _NO_SECRET.search(key) else set()


def _variable(name: str) -> Word | None:
    found = os.environ.get(name.upper())
    if found is not None and not _NO_SECRET.search(name):
        keep_secret([found])
    return None if found is None else Word(found)


def _value(text: str) -> Any:
    """A text of the command line: a mapping or a list of words, or a word, whose type its field decides."""
    try:
        found = word_items(text)
    except Problems:
        return Word(text)
    return found if isinstance(found, Mapping | list) else Word(text)


def _nested(key: str, text: str | None) -> Any:
    found: Any = _value(text or "")
    for part in reversed(key.split(".")):
        found = {part: found}
    return found


def _changed(values: Any, sign: str, key: str, text: str | None) -> Any:
    """The values after one argument."""
    *above, last = parts = key.split(".")
    if not all(parts):
        raise ConfigError(f"{sign}{key}: a part of the key is empty; write {sign}key=value or {sign}key.sub=value")
    at: Any = values
    for part in above:
        at = at.get(part) if isinstance(at, Mapping) else None
    is_there = isinstance(at, Mapping) and last in at
    if sign == "+" and is_there:
        raise ConfigError(f"+{key}: it is there already; write {key}=VALUE, or ++{key}=VALUE to add or override it")
    if sign == "~":
        if not is_there:
            near = get_close_matches(last, at or (), 1)
            raise ConfigError(
                f"~{key}: there is no such key to remove" + (f"; did you mean {near[0]}?" if near else "")
            )
        return _without(values, parts)
    return merge_values(values, _nested(key, text))


def _without(values: Mapping[str, Any], parts: Sequence[str]) -> dict[str, Any]:
    first, *rest = parts
    kept = {key: value for key, value in values.items() if key != first}
    return {**kept, first: _without(values[first], rest)} if rest else kept


def _check_names(values: Mapping[str, Any], new: set[str], of_files: set[str], known: Sequence[str]) -> None:
    """Find variables that nothing refers to and that are mistakes: new ones, and those almost like a known key."""
    used = references(values)
    for key in values:
        if key in known or key in used:
            continue
        if key in new:
            close = get_close_matches(key, [*known, *used], 1)
            hint = f"did you mean {close[0]}?" if close else f"the keys are {', '.join(known)}"
            raise ConfigError(f"{key}: no file has it, and nothing refers to it; {hint}")
        if key in of_files and (close := get_close_matches(key, known, 1, 0.85)):
            raise ConfigError(f"{key}: nothing refers to it; did you mean {close[0]}?")


def _check_no_secret(changes: Sequence[tuple[str, str, str | None]], known: Sequence[str]) -> None:
    """Refuse arguments that hold a secret itself, and not a reference to one."""
    for _, key, text in changes:
        found = secret_texts(_nested(key, text)) - _AUTH
        if any("${" not in secret for secret in found):
            variable = "." not in key and key not in known
            remedy = (
                f"set the environment variable {key.upper()}"
                if variable
                else "write ${gym_token} in its place and set the environment variable GYM_TOKEN"
            )
            raise ConfigError(
                f"{key} holds a secret on the command line, which every user of this machine can read; give it in "
                f"{_ENV}, or {remedy}"
            )
