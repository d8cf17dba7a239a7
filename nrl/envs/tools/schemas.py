"""A tool from a function: its JSON schema, and the types of its parameters."""

import functools
import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_origin

import attrs

from nrl.errors import EnvError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

__all__ = ["State", "Tool", "tool"]

type State[T] = T
"""The annotation of a parameter that is given the environment's state, ``board: State[Board]``; no model sees it.

It is an annotation and not a name, so that a tool may have a parameter ``state`` that the model fills in.
"""


@attrs.frozen
class Tool:
    """A function that a model may call; `tool` makes one.

    Args:
        name: by which the model calls it.
        fn: plain or ``async``; called with keywords.
        schema: ``{"type": "function", "function": {"name", "description", "parameters"}}``, as chat templates and
            OpenAI's API take it.
        parameters: what the model fills in, by name, each with a pydantic ``TypeAdapter`` of its type.
        required: the names of those that have no default.
        state: the name of the parameter that is given the environment's state; None: there is none.

    >>> def search(query: str, most: int = 5) -> list[str]:
    ...     '''Search the library.'''
    ...     return [query] * most
    >>> made = tool(search)
    >>> made.schema["function"]["name"], list(made.parameters), made.required
    ('search', ['query', 'most'], ('query',))
    """

    name: str
    fn: Callable[..., Any]
    schema: Mapping[str, Any]
    parameters: Mapping[str, "TypeAdapter[Any]"]
    required: Sequence[str]
    state: str | None = None


_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_SECTION = re.compile(r"^(Args|Arguments|Returns|Yields|Raises|Examples?|Notes?):[ ]*$", re.MULTILINE)
_ARGUMENT = re.compile(r"(\w+)(?: \([^)]*\))?:(.*(?:\n(?:[ ]*\n)*[ ]+\S.*)*)")


def tool(fn: Callable[..., Any], *, name: str | None = None) -> Tool:
    """Make a tool of a function with type hints and a docstring.

    The docstring describes it, and under ``Args:`` its parameters, in Google's style. The types may be those that
    pydantic knows: JSON's own, unions, ``Literal``, enumerations, dataclasses, TypedDicts, ``Annotated`` constraints.

    Args:
        fn: a function or a method, plain or ``async``. A parameter that is annotated with `State` is given the
            environment's state.
        name: by which the model calls it; left out, the function's own.

    Returns:
        The tool. Its schema does not show defaults and what is returned; say in the docstring what of them matters.

    Raises:
        EnvError: no schema can be made of the function; the message says why.

    >>> def add(a: int, b: int) -> int:
    ...     '''Add two numbers.
    ...
    ...     Args:
    ...         a: the first.
    ...         b: the second.
    ...     '''
    ...     return a + b
    >>> tool(add).schema["function"]["parameters"]["properties"]
    {'a': {'type': 'integer', 'description': 'the first.'}, 'b': {'type': 'integer', 'description': 'the second.'}}
    """
    if isinstance(fn, functools.partial):
        raise EnvError(f"tool: {fn} has no types; write a function with type hints and a docstring that calls it")
    own = str(name or getattr(fn, "__name__", type(fn).__name__))
    if not _NAME.fullmatch(own):
        raise EnvError(f"tool: {own!r} can be no tool's name; give name=, of 1 to 64 letters, digits, _ and -")
    about, described = _described(inspect.getdoc(fn) or "")
    if not about:
        raise EnvError(f"tool: {own} has no docstring; write in one what it does, for the model to read")
    there, hints = inspect.signature(fn).parameters, _hints(own, fn)
    if strange := [each for each in described if each not in there]:
        raise EnvError(
            f"tool: the docstring of {own} describes {strange[0]}, and there is no such parameter; rename it"
        )
    states = []
    for each in there.values():
        if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            raise EnvError(f"tool: the parameter {each} of {own} cannot be given by name; write it as name: type")
        if each.name not in hints:
            raise EnvError(f"tool: the parameter {each.name} of {own} has no type; annotate it, a state with State")
        if hints[each.name] is State or get_origin(hints[each.name]) is State:
            states.append(each.name)
    if len(states) > 1:
        raise EnvError(f"tool: {own} has several parameters for the state, {', '.join(states)}; leave one of them")
    adapters = {each: _adapter(own, each, hints[each]) for each in there if each not in states}
    required = tuple(each for each in adapters if there[each].default is inspect.Parameter.empty)
    parameters = _schema(adapters, described, required)
    schema = {"type": "function", "function": {"name": own, "description": about, "parameters": parameters}}
    return Tool(own, fn, schema, adapters, required, states[0] if states else None)


def _described(doc: str) -> tuple[str, dict[str, str]]:
    """The description in a docstring, and those of parameters."""
    about, *parts = _SECTION.split(doc)
    described: dict[str, str] = {}
    for title, part in zip(parts[::2], parts[1::2], strict=True):
        if title in ("Args", "Arguments"):
            entries = re.split(r"\n(?=\S)", inspect.cleandoc(part))
            found = [match for entry in entries if (match := _ARGUMENT.match(entry))]
            described |= {match[1]: " ".join(match[2].split()) for match in found}
    return about.strip(), described


def _hints(name: str, fn: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(fn if inspect.isroutine(fn) else type(fn).__call__, include_extras=True)
    except NameError as error:
        raise EnvError(f"tool: a type of {name} is not known: {error}; define or import it in its module") from error


def _adapter(name: str, parameter: str, kind: Any) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError

    try:
        adapter: TypeAdapter[Any] = TypeAdapter(kind)
        adapter.json_schema()
    except (PydanticUserError, PydanticUndefinedAnnotation) as error:
        raise EnvError(
            f"tool: no JSON schema can be made of the parameter {parameter}: {kind} of {name} "
            f"({str(error.message).splitlines()[0]}); take what JSON has, a dataclass or a TypedDict; State is for what"
            " no model fills in"
        ) from error
    return adapter


def _schema(adapters: Mapping[str, Any], described: Mapping[str, str], required: Sequence[str]) -> dict[str, Any]:
    """The JSON schema of parameters. What several have in common stands once, under ``$defs``."""
    from pydantic import TypeAdapter
    from pydantic.json_schema import GenerateJsonSchema

    class Untitled(GenerateJsonSchema):
        def field_title_should_be_set(self, schema: Any) -> bool:
            return False  # "Max Results" beside max_results is tokens for nothing

    mode: Literal["validation"] = "validation"
    made, shared = TypeAdapter.json_schemas(
        [(each, mode, adapter) for each, adapter in adapters.items()], schema_generator=Untitled
    )
    properties = {each: dict(made[each, mode]) for each in adapters}
    for each in properties.keys() & described.keys():
        properties[each]["description"] = described[each]
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {}), **shared}
