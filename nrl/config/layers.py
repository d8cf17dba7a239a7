"""Layers of a configuration: files as mappings, one laid over the other, and problems told with their places."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nrl.arguments import similar_name
from nrl.config._usage import keys
from nrl.config._yaml import Problems, Word, mapping, parse
from nrl.config.structure import Unknown, describe_value

__all__ = ["ConfigLayer", "explain", "is_file_name", "merge_values", "read_file"]

_SUFFIXES = (".yaml", ".yml", ".toml")


class ConfigLayer(NamedTuple):
    """Some values, and where they come from."""

    source: str
    values: Any


def is_file_name(text: str) -> bool:
    """Return whether a text is the name of a file of settings.

    >>> is_file_name("runs/Big.YAML"), is_file_name("lr=1e-3")
    (True, False)
    """
    return text.lower().endswith(_SUFFIXES)


def read_file(path: Path) -> Any:
    """Read the mapping of a YAML or TOML file.

    Raises:
        OSError: the file cannot be read.
        ValueError: TOML or UTF-8 that cannot be decoded.
        Problems: YAML that is not valid, or no mapping.
    """
    if not is_file_name(path.name):
        raise Problems(((), "neither key=value nor a file that ends in .yaml, .yml or .toml"))
    text = path.read_text(encoding="utf-8-sig")
    values = tomllib.loads(text) if path.suffix.lower() == ".toml" else parse(text)
    if values is not None and not isinstance(values, Mapping):
        raise Problems(((), f"expected a mapping of keys to values, found {describe_value(values)}"))
    return values or {}


def merge_values(base: Any, over: Any) -> Any:
    """Lay one value over another: mappings key by key, anything else whole.

    >>> merge_values({"lr": 1, "betas": [1, 2]}, {"betas": [3]})
    {'lr': 1, 'betas': [3]}
    """
    if not isinstance(base, Mapping) and not isinstance(over, Mapping):
        return over  # two texts: their field decides whether they are mappings
    old, new = mapping(base), mapping(over)
    if old is None or new is None:
        return over
    return {**old, **{key: merge_values(old[key], value) if key in old else value for key, value in new.items()}}


def explain(cls: type, path: tuple[Any, ...], text: str, layers: Sequence[ConfigLayer]) -> str:
    """Describe a problem in one line: key, text, source."""
    dotted = ".".join(map(str, path))
    if isinstance(text, Unknown):
        *above, last = map(str, path)
        near = similar_name(last, text.siblings, 0.6)
        if near:
            near = ".".join([*above, near])
        else:  # it may belong to another section
            elsewhere = {key.rpartition(".")[2]: key for key, _, _ in keys(cls)}
            near = elsewhere.get(similar_name(last, elsewhere, 0.6), "")
        hint = f"did you mean '{near}'?" if near else f"the keys here are {', '.join(text.siblings)}"
        text = f"{text}; {hint}"
    origin = next(filter(None, (_origin(path, layer) for layer in reversed(layers))), "")
    return f"{dotted}: {text}{origin}" if dotted else text


def _origin(path: tuple[Any, ...], layer: ConfigLayer) -> str:
    """Return source and line of a value, if this layer sets it; else empty."""
    value, line = layer.values, None
    for key in path:
        if isinstance(value, Word):  # the rest of the path is inside the text
            break
        try:
            line, value = getattr(value, "lines", {}).get(str(key), line), value[key]
        except (LookupError, TypeError):
            return ""
    return f"; from {layer.source}" + (f", line {line}" if line else "") if path else ""
