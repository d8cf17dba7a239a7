"""References in a configuration: ``${policy_base_url}`` stands for the value of another key."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nrl.config._yaml import Word
from nrl.config.expansion import ENVIRONMENT, find_references, variable_value
from nrl.errors import ConfigError

__all__ = ["interpolated", "references"]

_REFERENCE = re.compile(r"\\?\$\{([^{}]*)\}")  # the innermost ones
_MISSING = "???"  # as in OmegaConf: somebody else has to give it


def interpolated(
    values: Mapping[str, Any], keys: Iterable[str] | None = None, *, more: Callable[[str], Any] | None = None
) -> dict[str, Any]:
    """The values, with others in place of their references.

    A text that is one reference becomes the value itself, of whatever type; within a longer text a reference stands for
    the value as text. ``${a.b}`` is the full path of a key. ``${oc.env:NAME}`` and ``${oc.env:NAME,default}`` are
    environment variables, and ``\\${`` is no reference. A value ``???`` has to be given elsewhere.

    Args:
        values: mappings, lists and scalars.
        keys: of the values, which are returned, whatever the others lack; None: all.
        more: from the first name of a path that ``values`` lack to its value, or None.

    Raises:
        ConfigError: a reference leads nowhere, or in a circle, or a mapping or list stands within a text.

    >>> interpolated(
    ...     {"host": "10.0.0.5", "port": 8000, "model": {"url": "http://${host}:${port}/v1", "port": "${port}"}}
    ... )
    {'host': '10.0.0.5', 'port': 8000, 'model': {'url': 'http://10.0.0.5:8000/v1', 'port': 8000}}
    >>> interpolated({"a": "${b}", "b": "${a}"})
    Traceback (most recent call last):
    nrl.errors.ConfigError: b: ${a} leads back to itself: a -> b -> a; give one of them a value
    """
    finder = _Finder(values, more or (lambda name: None))
    wanted = values if keys is None else [key for key in keys if key in values]
    return {key: finder.value((str(key),), values[key], (str(key),)) for key in wanted}


def references(value: Any) -> set[str]:
    """The first names of all paths that references name.

    >>> sorted(references({"url": "http://${host}:${ports.judge}", "price": "\\\\${5}"}))
    ['host', 'ports']
    """
    if isinstance(value, str):
        found = {match[1].strip() for match in _REFERENCE.finditer(value) if match[0][0] == "$"}
        return {name.split(".")[0] for name in found if not name.startswith(ENVIRONMENT)}
    items: Iterable[Any] = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return set[str]().union(*map(references, items))


class _Finder:
    """Follows references; a chain has the paths that are being looked for."""

    def __init__(self, values: Mapping[str, Any], more: Callable[[str], Any]) -> None:
        self._values, self._more = values, more

    def value(self, path: tuple[str, ...], value: Any, chain: tuple[str, ...]) -> Any:
        """A value at a path, with others in place of its references."""
        if isinstance(value, Mapping):
            return {key: self.value((*path, str(key)), item, chain) for key, item in value.items()}
        if isinstance(value, list):
            return [self.value((*path, str(at)), item, chain) for at, item in enumerate(value)]
        if not isinstance(value, str):
            return value
        where = ".".join(path)
        if value == _MISSING:
            raise ConfigError(f"{where}: the file leaves it open (???); give it, as {where}=VALUE")
        spans = list(find_references(value))
        if spans and spans[0][:2] == (0, len(value)):
            return self._named(where, value, spans[0][2].strip(), chain)
        text, last = "", 0
        for start, end, body in spans:
            if value[start - 1 : start] == "\\":
                text, last = text + value[last : start - 1] + value[start:end], end
                continue
            told = value[start:end]
            text += value[last:start] + _text(where, told, self._named(where, told, body.strip(), chain))
            last = end
        text += value[last:]
        return Word(text) if isinstance(value, Word) else text

    def _named(self, where: str, told: str, name: str, chain: tuple[str, ...]) -> Any:
        if name.startswith(ENVIRONMENT):

            def expand(default: str) -> str:
                return _text(where, told, self.value((where,), default, chain))

            try:
                return Word(variable_value(name, expand))
            except KeyError as error:
                variable = error.args[0]
                raise ConfigError(f"{where}: {told}: there is no environment variable {variable}; set it") from None
        if name.startswith("env:"):
            name = name.removeprefix("env:")
            raise ConfigError(f"{where}: {told} is no reference; write ${{oc.env:{name}}} for an environment variable")
        parts = name.split(".")
        if not all(parts) or ":" in name:
            raise ConfigError(f"{where}: {told} is no reference; write the full path of a key, as in ${{judge.url}}")
        if name in chain:
            circle = " -> ".join([*chain[chain.index(name) :], name])
            raise ConfigError(f"{where}: {told} leads back to itself: {circle}; give one of them a value")
        found: Any = self._values
        for at, part in enumerate(parts):
            if isinstance(found, list) and part.isdigit() and int(part) < len(found):
                found = found[int(part)]
            elif isinstance(found, Mapping) and part in found:
                found = found[part]
            else:
                found = self._more(part) if at == 0 else None
                if found is None:
                    raise ConfigError(_nowhere(where, told, parts, at))
            if at < len(parts) - 1 and isinstance(found, str):
                found = self.value(tuple(parts[: at + 1]), found, (*chain, name))
        return self.value(tuple(parts), found, (*chain, name))


def _nowhere(where: str, told: str, parts: list[str], at: int) -> str:
    name = ".".join(parts[: at + 1])
    if at or len(parts) > 1:
        return f"{where}: {told}: there is no {name}; give {'.'.join(parts)}=VALUE, or add it to the file"
    return (
        f"{where}: {told}: there is no {name}; give {name}=VALUE, or {name}: VALUE in env.yaml, or the environment "
        f"variable {name.upper()}"
    )


def _text(where: str, told: str, value: Any) -> str:
    if isinstance(value, Mapping | list):
        kind = "mapping" if isinstance(value, Mapping) else "list"
        raise ConfigError(f"{where}: {told} is a {kind}, which cannot stand within a text; refer to one of its values")
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value)
