"""References in a configuration: ``${policy_base_url}`` stands for the value of another key."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nrl.config._yaml import Word
from nrl.config.expansion import ENVIRONMENT, find_references, variable_value
from nrl.errors import ConfigError

__all__ = ["interpolate", "references"]

_REFERENCE = re.compile(r"\\?\$\{([^{}]*)\}")  # the innermost ones
_MISSING = "???"  # OmegaConf has the same mark of a missing value.


def interpolate(
    values: Mapping[str, Any], keys: Iterable[str] | None = None, *, fallback: Callable[[str], Any] | None = None
) -> dict[str, Any]:
    """Replace the references in values.

    A text that is one reference becomes the value itself, of whatever type; within a longer text a reference stands for
    the value as text. ``${a.b}`` is the full path of a key. ``${oc.env:NAME}`` and ``${oc.env:NAME,default}`` are
    environment variables, and ``\\${`` is no reference. A value ``???`` has to be given elsewhere.

    Args:
        values: mappings, lists and scalars.
        keys: of the values, which are returned, whatever the others lack; None: all.
        fallback: from the first name of a path that ``values`` lack to its value, or None.

    Raises:
        ConfigError: a reference leads nowhere, or in a circle, or a mapping or list stands within a text.

    >>> interpolate(
    ...     {"host": "10.0.0.5", "port": 8000, "model": {"url": "http://${host}:${port}/v1", "port": "${port}"}}
    ... )
    {'host': '10.0.0.5', 'port': 8000, 'model': {'url': 'http://10.0.0.5:8000/v1', 'port': 8000}}
    >>> interpolate({"a": "${b}", "b": "${a}"})
    Traceback (most recent call last):
    nrl.errors.ConfigError: b: ${a} leads back to itself: a -> b -> a; give one of them a value
    """
    finder = _Finder(values, fallback or (lambda name: None))
    chosen = values if keys is None else [key for key in keys if key in values]
    return {key: finder.value((str(key),), values[key], (str(key),)) for key in chosen}


def references(value: Any) -> set[str]:
    """Return the first names of the paths of all references.

    >>> sorted(references({"url": "http://${host}:${ports.judge}", "price": "\\\\${5}"}))
    ['host', 'ports']
    """
    if isinstance(value, str):
        paths = {match[1].strip() for match in _REFERENCE.finditer(value) if match[0][0] == "$"}
        return {name.split(".")[0] for name in paths if not name.startswith(ENVIRONMENT)}
    items: Iterable[Any] = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return set[str]().union(*map(references, items))


class _Finder:
    """Follows references; a chain has the paths that are being looked for."""

    def __init__(self, values: Mapping[str, Any], fallback: Callable[[str], Any]) -> None:
        self._values, self._fallback = values, fallback

    def value(self, path: tuple[str, ...], value: Any, chain: tuple[str, ...]) -> Any:
        """Return the value at a path, with its references replaced."""
        if isinstance(value, Mapping):
            return {key: self.value((*path, str(key)), item, chain) for key, item in value.items()}
        if isinstance(value, list):
            return [self.value((*path, str(index)), item, chain) for index, item in enumerate(value)]
        if not isinstance(value, str):
            return value
        where = ".".join(path)
        if value == _MISSING:
            raise ConfigError(f"{where}: the file leaves it open (???); give it, as {where}=VALUE")
        spans = list(find_references(value))
        if spans and spans[0][:2] == (0, len(value)):
            return self._look_up(where, value, spans[0][2].strip(), chain)
        text, last = "", 0
        for start, end, body in spans:
            if value[start - 1 : start] == "\\":
                text, last = text + value[last : start - 1] + value[start:end], end
                continue
            reference = value[start:end]
            text += value[last:start] + _text(where, reference, self._look_up(where, reference, body.strip(), chain))
            last = end
        text += value[last:]
        return Word(text) if isinstance(value, Word) else text

    def _look_up(self, where: str, reference: str, name: str, chain: tuple[str, ...]) -> Any:
        if name.startswith(ENVIRONMENT):

            def expand(default: str) -> str:
                return _text(where, reference, self.value((where,), default, chain))

            try:
                return Word(variable_value(name, expand))
            except KeyError as error:
                variable = error.args[0]
                raise ConfigError(
                    f"{where}: {reference}: there is no environment variable {variable}; set it"
                ) from None
        if name.startswith("env:"):
            name = name.removeprefix("env:")
            raise ConfigError(
                f"{where}: {reference} is no reference; write ${{oc.env:{name}}} for an environment variable"
            )
        parts = name.split(".")
        if not all(parts) or ":" in name:
            raise ConfigError(
                f"{where}: {reference} is no reference; write the full path of a key, as in ${{judge.url}}"
            )
        if name in chain:
            circle = " -> ".join([*chain[chain.index(name) :], name])
            raise ConfigError(f"{where}: {reference} leads back to itself: {circle}; give one of them a value")
        target: Any = self._values
        for index, part in enumerate(parts):
            if isinstance(target, list) and part.isdigit() and int(part) < len(target):
                target = target[int(part)]
            elif isinstance(target, Mapping) and part in target:
                target = target[part]
            else:
                target = self._fallback(part) if index == 0 else None
                if target is None:
                    raise ConfigError(_make_missing_message(where, reference, parts, index))
            if index < len(parts) - 1 and isinstance(target, str):
                target = self.value(tuple(parts[: index + 1]), target, (*chain, name))
        return self.value(tuple(parts), target, (*chain, name))


def _make_missing_message(where: str, reference: str, parts: list[str], index: int) -> str:
    name = ".".join(parts[: index + 1])
    if index or len(parts) > 1:
        return f"{where}: {reference}: there is no {name}; give {'.'.join(parts)}=VALUE, or add it to the file"
    return (
        f"{where}: {reference}: there is no {name}; give {name}=VALUE, or {name}: VALUE in env.yaml, or the "
        f"environment variable {name.upper()}"
    )


def _text(where: str, reference: str, value: Any) -> str:
    if isinstance(value, Mapping | list):
        kind = "mapping" if isinstance(value, Mapping) else "list"
        raise ConfigError(
            f"{where}: {reference} is a {kind}, which cannot stand within a text; refer to one of its values"
        )
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value)
