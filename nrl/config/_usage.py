"""The text of ``--help``: every key of a configuration with its type, its default and its comment."""

import ast
import inspect
import io
import textwrap
import tokenize
from collections.abc import Iterator
from typing import Any

import attrs
import yaml

from nrl.config._yaml import write
from nrl.config.structure import default_of, fields, name, sections

__all__ = ["keys", "usage"]


def usage(cls: type, program: str) -> str:
    """Return the text of ``--help``.

    >>> print(usage(attrs.make_class("Job", {"steps": attrs.field(default=3, type=int)}), "job"))
    usage: job [FILE.yaml | FILE.toml | config=FILE ...] [key=value ...]
    <BLANKLINE>
      steps: int = 3
    """
    lines = [f"usage: {program} [FILE.yaml | FILE.toml | config=FILE ...] [key=value ...]", ""]
    lines += [inspect.cleandoc(cls.__doc__).split("\n\n")[0], ""] if cls.__doc__ else []
    try:
        defaults = cls()  # computes the defaults that depend on other fields
    except Exception:  # something is required
        defaults = attrs.NOTHING
    for key, field, value in keys(cls, defaults):
        if value is attrs.NOTHING:
            shown = " (required)" if field.default is attrs.NOTHING else " (computed)"
        else:
            shown = "" if attrs.has(type(value)) else f" = {_inline(value)}"
        lines += [f"  {key}: {name(field.type)}{shown}"]
        lines += [f"      {field.metadata['help']}"] if "help" in field.metadata else []
    return "\n".join(lines)


def _inline(value: Any) -> str:
    try:
        return write(value, inline=True).removesuffix("...\n").strip()
    except yaml.YAMLError:
        return repr(value)


def keys(cls: type, instance: Any = attrs.NOTHING, above: tuple[type, ...] = ()) -> Iterator[tuple[str, Any, Any]]:
    """Every key, dotted, with its field and default; a section before its own keys."""
    notes = _comments(cls)
    for field in fields(cls):
        value = default_of(field) if instance is attrs.NOTHING else getattr(instance, field.name)
        if field.name in notes and "help" not in field.metadata:
            field = field.evolve(metadata={"help": notes[field.name]})
        yield field.alias, field, value
        for section in sections(field.type):
            if section not in (cls, *above):
                inner = value if type(value) is section else attrs.NOTHING
                for key, *rest in keys(section, inner, (cls, *above)):
                    yield f"{field.alias}.{key}", *rest


def _comments(cls: type) -> dict[str, str]:
    """The comment behind each field of a class, by the field's name; empty where there is no source to read."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
        body = ast.parse(source).body[0]
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):  # made in a notebook, by `type`, or in C
        return {}
    by_line = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    fields = [node for node in getattr(body, "body", []) if isinstance(node, ast.AnnAssign)]
    return {
        node.target.id: by_line[node.end_lineno]
        for node in fields
        if isinstance(node.target, ast.Name) and node.end_lineno in by_line
    }
