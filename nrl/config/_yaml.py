"""Reading and writing YAML for `nrl.config`: plain scalars by the rules of YAML 1.2, typed or left as text."""

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import PurePath
from typing import Any

import attrs
import yaml

__all__ = ["Problem", "Problems", "Word", "mapping", "parse", "word_items", "write"]

type Problem = tuple[tuple[Any, ...], str]


class Problems(Exception):
    """The problems of a value: pairs of a path below the value and a text."""

    def __init__(self, *found: Problem) -> None:
        self.problems = found


class Word(str):
    """Text from the command line, which has no type until a field gives it one."""


class _Section(dict[Any, Any]):
    """A mapping that knows the line of each key."""

    lines: Mapping[Any, int]


class _Loader(yaml.SafeLoader):
    """YAML 1.2's plain scalars, the lines of keys, and no key twice."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - declared so by PyYAML

    def section(self, node: yaml.MappingNode) -> _Section:
        lines: dict[Any, int] = {}
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in seen:
                raise yaml.MarkedYAMLError(problem=f"the key '{key.value}' occurs twice", problem_mark=key.start_mark)
            seen.add((key.tag, key.value))
            lines[key.value] = key.start_mark.line + 1
        section = _Section(self.construct_mapping(node, deep=True))
        section.lines = lines
        return section


class _WordLoader(_Loader):
    """Leaves unquoted scalars as words, for the fields that they reach."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        is_word = isinstance(node, yaml.ScalarNode) and node.style is None
        return Word(node.value) if is_word else super().construct_object(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes every string that YAML 1.1 or 1.2 would read as something else; short lists stay on one line."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def list_of(self, data: Sequence[Any]) -> yaml.Node:
        nested = any(isinstance(item, dict | list | tuple) or attrs.has(type(item)) for item in data)
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=None if nested else True)

    def text(self, data: str) -> yaml.Node:
        style = '"' if set(data) & set("\x85\u2028\u2029") else None  # PyYAML folds these line breaks into spaces
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)

    def other(self, data: Any) -> yaml.Node:
        match data:
            case Enum():
                return self.represent_data(data.value)
            case PurePath() | str():
                return self.text(str(data))
            case Mapping():
                return self.represent_dict(dict(data))
        if not attrs.has(type(data)):
            self.represent_undefined(data)
        pairs = [(field.alias, getattr(data, field.name)) for field in attrs.fields(type(data)) if field.init]
        return self.represent_mapping("tag:yaml.org,2002:map", pairs)


_FLOAT = (
    r"^(?:[-+]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))"
    r"|\.(?:nan|NaN|NAN))$"
)
for _tag, _pattern, _first in (
    ("bool", "^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", "^[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)$", "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
    ("null", "^(?:null|Null|NULL|~|)$", ("n", "N", "~", "")),
    ("merge", "^<<$", "<"),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))
_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.section)
_Dumper.add_representer(list, _Dumper.list_of)
_Dumper.add_representer(tuple, _Dumper.list_of)
_Dumper.add_representer(str, _Dumper.text)
_Dumper.add_multi_representer(object, _Dumper.other)


def parse(text: str, loader: type[yaml.SafeLoader] = _Loader) -> Any:
    """Read YAML by the rules of YAML 1.2; raises `Problems` with the line.

    >>> parse("{lr: 1e-3, schedule: off, at: 12:30}")
    {'lr': 0.001, 'schedule': 'off', 'at': '12:30'}
    """
    try:
        return yaml.load(text, loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise Problems(((), f"not valid YAML, line {line}: {error.problem}")) from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:  # such as '!!int x', '!!bool x'
        raise Problems(((), f"not valid YAML: {' '.join(str(error).split())}")) from None
    except RecursionError:
        raise Problems(((), "not usable as YAML: it is nested too deeply")) from None


def write(value: Any, *, inline: bool = False) -> str:
    """Write attrs instances, collections and scalars as YAML that `parse` reads back."""
    return yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1 << 30, default_flow_style=inline
    )


def word_items(text: str) -> Any:
    """Read the text of a collection; its unquoted scalars stay text.

    >>> word_items("[1e5, 'on', on]")
    ['1e5', 'on', 'on']
    """
    return parse(text, _WordLoader)


def mapping(value: Any) -> Any:
    """The value as a mapping, or None if it is not one; text is read."""
    try:
        value = word_items(value) if isinstance(value, Word) else value
    except Problems:
        return None
    return value if isinstance(value, Mapping) else None
