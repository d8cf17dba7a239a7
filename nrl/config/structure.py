"""Converting values from YAML or the command line to the types of fields; the machinery below `nrl.config`.

Text on the command line is a `Word`. It is read here, because its meaning depends on the type of its field.
"""

import contextlib
import itertools
import reprlib
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from enum import Enum
from pathlib import Path, PurePath
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, NewType, TypeAliasType, Union, get_args, get_origin

import attrs
import cattrs

from nrl.arguments import with_article
from nrl.config._yaml import Problem, Problems, Word, mapping, parse, word_items
from nrl.config.expansion import expand_home
from nrl.errors import ArgumentError

__all__ = ["Unknown", "default_of", "describe_value", "fields", "name", "sections", "structure"]

_UNIONS = (Union, UnionType)
_HINTS = {bool: "; write true or false", str: "; put it in quotes", list: "; write [a, b]", tuple: "; write [a, b]"}


class Unknown(str):
    """The text of a problem: a key that its section does not have."""

    siblings: Sequence[str]


def fields(cls: Any) -> list[Any]:
    """Return the attrs fields of a class that ``__init__`` takes, with resolved types."""
    return [field for field in attrs.fields(attrs.resolve_types(cls)) if field.init]


def default_of(field: Any, other_fields: Any = None) -> Any:
    """Return a field's default. NOTHING: it has none, or depends on ``other_fields``, which are not given."""
    if not isinstance(field.default, attrs.Factory):  # type: ignore[arg-type]
        return field.default
    if field.default.takes_self:
        return attrs.NOTHING if other_fields is None else field.default.factory(other_fields)
    return field.default.factory()


def _strip_alias(kind: Any) -> Any:
    """Return a type without its alias, new name or annotations."""
    while isinstance(kind, TypeAliasType | NewType) or get_origin(kind) is Annotated:
        match kind:
            case TypeAliasType():
                kind = kind.__value__
            case NewType():
                kind = kind.__supertype__
            case _:
                kind = get_args(kind)[0]
    return kind


def sections(kind: Any) -> list[type]:
    """The attrs classes in a type: the type itself, or members of the union."""
    members = get_args(_strip_alias(kind)) if get_origin(_strip_alias(kind)) in _UNIONS else [_strip_alias(kind)]
    return [member for member in members if isinstance(member, type) and attrs.has(member)]


def name(kind: Any) -> str:
    """A type as a user would write it.

    >>> name(dict[str, float | None]), name(Literal["adamw", "muon"])
    ('dict[str, float | None]', "'adamw' or 'muon'")
    >>> from collections.abc import Callable
    >>> name(Callable[[int], float])
    'Callable[[int], float]'
    """
    if isinstance(kind, list):  # the arguments of a function
        return f"[{', '.join(map(name, kind))}]"
    kind = _strip_alias(kind)
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin in _UNIONS:
        return " | ".join(map(name, args))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " or ".join(repr(member.value) for member in kind)
    if kind is NoneType or kind is ... or kind is None:
        return {NoneType: "None", ...: "..."}.get(kind, "Any")
    text = getattr(origin or kind, "__name__", str(kind))
    return f"{text}[{', '.join(map(name, args))}]" if args else text


def describe_value(value: Any) -> str:
    """Describe a value and its type, for a message."""
    return "null" if value is None else f"{reprlib.repr(value)} ({with_article(type(value).__name__)})"


def _reading(value: Any) -> Any:
    """Read a text from the command line as YAML, if it is valid; return any other value as it is."""
    try:
        return parse(value) if isinstance(value, Word) else value
    except Problems:
        return str(value)


def _wrong(kind: Any, value: Any) -> Problems:
    value = _reading(value)
    value = dict(value) if isinstance(value, Mapping) else value
    hint = _HINTS.get(get_origin(kind) or kind, "")
    if len(sections(kind)) == 1:
        hint = f"; its keys are {', '.join(field.alias for field in fields(sections(kind)[0]))}"
    return Problems(((), f"expected {name(kind)}, found {describe_value(value)}{hint}"))


# --- Structuring. A hook returns a value of the type or raises Problems, and nothing else.


def _each(items: Iterable[tuple[Any, Any, Any]]) -> tuple[dict[Any, Any], list[Problem]]:
    """Structure (key, value, type) triples: the values that have their types, and the problems of the others."""
    done, problems = {}, []
    for key, value, kind in items:
        try:
            done[key] = structure(value, kind)
        except Problems as error:
            problems += [((key, *path), text) for path, text in error.problems]
    return done, problems


def _anything(value: Any, _: Any = Any) -> Any:
    value = parse(value) if isinstance(value, Word) else value
    if isinstance(value, Mapping):
        return {_anything(key): _anything(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_anything(item) for item in value]
    return expand_home(value) if isinstance(value, str) else value


def _scalar(value: Any, kind: Any) -> Any:
    if issubclass(kind, Enum):  # an enumeration of strings is a str too
        return _choice(value, kind)
    if isinstance(value, Word):
        value = str(value) if kind is str else _reading(value)
    small = type(value) is int and abs(value) < 2**1023
    if type(value) is kind or (kind is float and small):
        return expand_home(value) if isinstance(value, str) else kind(value)
    raise _wrong(kind, value)


def _path(value: Any, kind: Any) -> Any:
    if isinstance(value, str | PurePath):
        return kind(expand_home(str(value)))
    raise _wrong(kind, value)


def _choice(value: Any, kind: Any) -> Any:
    if isinstance(value, Enum):  # a default
        return value
    choices = [(x, x) for x in get_args(kind)] or [(member.value, member) for member in kind]
    for candidate in [str(value), _reading(value)] if isinstance(value, Word) else [value]:
        for choice, member_value in choices:
            if type(choice) is type(candidate) and choice == candidate:
                return member_value
    raise _wrong(kind, value)


def _union(value: Any, kind: Any) -> Any:
    members = [member for member in get_args(kind) if member is not NoneType]
    nothing = value is None or (isinstance(value, Word) and value in ("null", "Null", "NULL", "~", ""))
    if nothing and len(members) < len(get_args(kind)):
        return None
    if len(members) == 1:
        return structure(value, members[0])
    typed = _reading(value)
    if type(typed) in members and not isinstance(typed, Mapping | list):
        return expand_home(str(value)) if isinstance(typed, str) else typed
    fits = {}
    for member in sorted(members, key=lambda member: member is str):  # every text fits str, so it comes last
        with contextlib.suppress(Problems):
            fits[member] = structure(value, member)
    if len(sections_that_fit := [name(member) for member in fits if attrs.has(member)]) > 1:
        raise Problems(((), f"fits {' and '.join(sections_that_fit)}; give a key that only one of them has"))
    if not fits and mapping(value) is not None and len(sections(kind)) == 1:
        return structure(value, sections(kind)[0])  # says which of its keys are wrong
    if not fits:
        raise _wrong(kind, value)
    return next(iter(fits.values()))


def _sequence(value: Any, kind: Any) -> Any:
    items = word_items(value) if isinstance(value, Word) else value
    origin, args = get_origin(kind) or kind, get_args(kind)
    fixed = origin is tuple and bool(args) and args[-1] is not ...
    if not isinstance(items, list | tuple) or (fixed and len(items) != len(args)):
        raise _wrong(kind, value)
    done, problems = _each(zip(itertools.count(), items, args if fixed else itertools.repeat(args[0] if args else Any)))
    if problems:
        raise Problems(*problems)
    return list(done.values()) if origin is list else tuple(done.values())


def _table(value: Any, kind: Any) -> Any:
    items = mapping(value)
    if items is None:
        raise _wrong(kind, value)
    key_kind, item_kind = get_args(kind) or (Any, Any)
    keys, bad_keys = _each((key, key, key_kind) for key in items)
    done, bad_items = _each((key, item, item_kind) for key, item in items.items())
    if bad_keys or bad_items:
        raise Problems(*bad_keys, *bad_items)
    return {keys[key]: item for key, item in done.items()}


def _fill(kind: Any, instance: Any, overrides: Any) -> Any:
    """Lay the given values of a section over the instance that is its default."""
    new = mapping(overrides) if sections(kind) == [type(instance)] else None
    if new is None:
        return overrides
    kinds = {field.alias: field.type for field in fields(type(instance))}
    old = {field.alias: getattr(instance, field.name) for field in fields(type(instance))}
    return {**old, **{key: _fill(kinds[key], old[key], new[key]) if key in kinds else new[key] for key in new}}


def _section(value: Any, cls: Any) -> Any:
    if isinstance(value, cls):
        return value
    overrides = mapping(value)
    if overrides is None:
        raise _wrong(cls, value)
    fields_by_key = {field.alias: field for field in fields(cls)}
    present = [(key, field) for key, field in fields_by_key.items() if key in overrides]
    late = {key for key, field in present if getattr(field.default, "takes_self", False)}
    done, problems = _each(
        (key, _fill(field.type, default_of(field), overrides[key]), field.type)
        for key, field in present
        if key not in late
    )
    if late and not problems:
        other_fields = SimpleNamespace()
        for key, field in fields_by_key.items():  # a default may be derived from one that is
            default = default_of(field, other_fields) if key not in done else attrs.NOTHING
            if key in late:
                value_of_key, wrong = _each([(key, _fill(field.type, default, overrides[key]), field.type)])
                done, problems = done | value_of_key, problems + wrong
            setattr(other_fields, field.name, done.get(key, default))
    for key, field in fields_by_key.items():
        if key not in overrides and field.default is attrs.NOTHING:
            problems.append(((key,), f"missing, and it has no default; expected {name(field.type)}"))
    for key in overrides:
        if key not in fields_by_key:
            problems.append(((key,), unknown := Unknown("no such key")))
            unknown.siblings = list(fields_by_key)
    try:
        if not problems:
            return cls(**done)
    except Exception as error:  # validators may raise anything
        key = (error.argument,) if isinstance(error, ArgumentError) and error.argument in overrides else ()
        raise Problems(*(_invalid(cls, overrides, done) or [(key, _message(error))])) from error
    raise Problems(*problems, *_invalid(cls, overrides, done))


def _invalid(cls: Any, overrides: Mapping[str, Any], done: Mapping[str, Any]) -> list[Problem]:
    """Ask the validators one by one, so that each complaint has a key and the first does not hide the others."""
    probe, problems = object.__new__(cls), []
    for field in attrs.fields(cls):
        value = done.get(field.alias, attrs.NOTHING) if field.alias in overrides else default_of(field)
        try:
            if value is not attrs.NOTHING:
                object.__setattr__(probe, field.name, field.converter(value) if callable(field.converter) else value)
        except Exception as error:
            problems.append(((field.alias,), _message(error)))
    for field in attrs.fields(cls):
        try:
            if field.alias in done and field.validator:
                field.validator(probe, field, getattr(probe, field.name))
        except AttributeError:  # it looks at a field that has its own problem
            continue
        except Exception as error:
            problems.append(((field.alias,), _message(error)))
    return problems


def _message(error: Exception) -> str:
    if isinstance(error, ValueError | TypeError):  # Errors of attrs have more arguments.
        return str(error.args[0] if error.args else error)
    return f"{type(error).__name__}: {error}"


def _refuse(value: Any, kind: Any) -> Any:
    with contextlib.suppress(TypeError):  # not every type can be asked
        if isinstance(value, get_origin(kind) or kind):
            return value  # a default
    raise Problems(((), f"{with_article(name(kind))} cannot be written in a configuration; set it in Python"))


def _origin(kind: Any) -> Any:
    return get_origin(kind) or kind


def _is_class(kind: Any, base: type) -> bool:
    return isinstance(kind, type) and issubclass(kind, base)


_CONVERTER = cattrs.Converter()
for _holds, _hook in (  # the last that holds for a type is asked
    (lambda kind: True, _refuse),
    (lambda kind: _strip_alias(kind) is not kind, lambda value, kind: structure(value, _strip_alias(kind))),
    (lambda kind: kind in (Any, object, None), _anything),
    (lambda kind: _origin(kind) is Literal, _choice),
    (lambda kind: _origin(kind) in _UNIONS, _union),
    (lambda kind: _origin(kind) in (list, tuple, Sequence), _sequence),
    (lambda kind: _origin(kind) in (dict, Mapping, MutableMapping), _table),
    (lambda kind: _is_class(kind, object) and attrs.has(kind), _section),
    (lambda kind: _is_class(kind, Enum), _choice),
    (lambda kind: _is_class(kind, PurePath), _path),
):
    _CONVERTER.register_structure_hook_func(_holds, _hook)
for _kind in (bool, int, float, str):  # these, Path and bytes have hooks of cattrs' own, which convert
    _CONVERTER.register_structure_hook(_kind, _scalar)
_CONVERTER.register_structure_hook(Path, _path)
_CONVERTER.register_structure_hook(bytes, _refuse)


def structure(value: Any, kind: Any) -> Any:
    """Convert a value to a type, or raise all `Problems`, each with its path.

    >>> structure(Word("[1, 2.5]"), list[float])
    [1.0, 2.5]
    >>> structure(["1"], list[int])
    Traceback (most recent call last):
    nrl.config._yaml.Problems: ((0,), "expected int, found '1' (a str)")
    """
    return _CONVERTER.structure(value, kind)
