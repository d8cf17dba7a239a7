"""Calls of tools in messages, and their arguments."""

import json
from collections.abc import Mapping
from typing import Any

from nrl.data.checks import fields, kind, shown
from nrl.errors import DataError

__all__ = ["canonical_call", "decode_json", "read_arguments"]

_ARGUMENTS = ("arguments", "parameters", "args", "input")
"""The fields of a call that may hold its arguments; the first that it has is taken."""

_IN_CALL = ("id", "type", "index")
"""The fields of a call that stand beside its function."""


def canonical_call(call: Any, where: str, schemas: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a call in the canonical form.

    Args:
        call: as OpenAI writes it, or its function alone.
        where: how errors name it.
        schemas: of the parameters of tools by name, where nulls in arguments may be filler; None: they are values.

    Raises:
        DataError: it is no call.
    """
    if not isinstance(call, Mapping):
        raise DataError(f"{where} is {kind(call)}; give {{'function': {{'name': ..., 'arguments': ...}}}}")
    call = {key: value for key, value in call.items() if value is not None}
    function = call.get("function")
    if isinstance(function, Mapping):
        for key in ("name", *_ARGUMENTS):
            if key in call and read_arguments(call[key]) != read_arguments(function.get(key)):
                raise DataError(f"{where} has another '{key}' beside its 'function' than in it; leave one of them out")
    else:
        function = {key: value for key, value in call.items() if key not in _IN_CALL}
        call = {key: value for key, value in call.items() if key in _IN_CALL}
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise DataError(f"{where} has no 'name' of a function; it has {fields(function)}")
    texts = {key: function[key] for key in _ARGUMENTS if function.get(key)}
    if any(read_arguments(value) != read_arguments(function[next(iter(texts))]) for value in texts.values()):
        raise DataError(f"{where} of '{shown(name)}': {' and '.join(map(repr, texts))} differ; give its arguments once")
    key = next((key for key in (*texts, *_ARGUMENTS) if key in function), "arguments")
    given = function.get(key)
    arguments = read_arguments(given)
    if isinstance(arguments, list | tuple) and all(isinstance(each, tuple) and len(each) == 2 for each in arguments):
        arguments = dict(arguments)  # a map of Arrow
    if not isinstance(arguments, str | Mapping):
        raise DataError(f"{where} of '{shown(name)}': '{key}' is {kind(arguments)}; give an object")
    if schemas is not None and not isinstance(given, str):
        arguments = _without_filler(arguments, schemas.get(name))
    others = {
        field: value for field, value in function.items() if field not in ("name", key, *texts) and value is not None
    }
    return {"type": "function", **call, "function": {"name": name, "arguments": arguments, **others}}


def read_arguments(arguments: Any) -> Any:
    """Return the arguments of a call as an object: of JSON text, what it says; of nothing, an empty one.

    A text that is no JSON object, or that names an argument twice, stays a text.

    >>> read_arguments('{"a": 2}'), read_arguments("a=2"), read_arguments(None)
    ({'a': 2}, 'a=2', {})
    """
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        return arguments
    found: Any = arguments.strip() or "{}"
    try:
        for _ in range(2):  # some rows encode the text of the object again
            found = json.loads(found, object_pairs_hook=_unique) if isinstance(found, str) else found
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice")
    return found


def _without_filler(value: Any, schema: Any) -> Any:
    """Return an argument without the nulls that Arrow filled in: those of fields that the schema does not require."""
    schema = schema if isinstance(schema, Mapping) else {}
    if isinstance(value, Mapping):
        properties, required = schema.get("properties"), schema.get("required")
        inner = properties if isinstance(properties, Mapping) else {}
        needed = required if isinstance(required, list | tuple) else ()
        return {
            key: _without_filler(each, inner.get(key))
            for key, each in value.items()
            if each is not None or key in needed
        }
    return [_without_filler(each, schema.get("items")) for each in value] if isinstance(value, list) else value


def decode_json(text: Any, where: str) -> Any:
    """Return the value that a JSON text holds.

    Raises:
        DataError: it is no JSON text.
    """
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        raise DataError(f"{where} is {shown(repr(text))}, which is no JSON; give JSON text") from None
