"""A law of rows: nothing of a conversation disappears unsaid on its way through a chat template, and nothing doubles.

`check_complete` looks for each text of a conversation in what the template wrote: contents, calls, tools, reasoning.
Some things may be missing, because templates leave them out by design: white space around a text, reasoning of turns
that are not trained, all descriptions of tools, or all of their parameters; and the types and limits of parameters.
`losses` counts the rows in which they are, so that it can be said once a source. A tool's schema is read at every
level: a template that writes its outer parameters and leaves out inner ones is an error.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from nrl.data.checks import shown
from nrl.data.messages import REASONING, split_content
from nrl.envs.replies import REASONING_MARKS, find_closing, find_mark
from nrl.errors import DataError

__all__ = ["check_complete", "count_loss", "losses"]

_SHORT = 24  # characters; shorter texts occur by chance, so their repetition says nothing

_FIELDS = " or ".join([", ".join(map(repr, REASONING[:-1])), repr(REASONING[-1])])

_COUNTS: ContextVar[dict[str, int] | None] = ContextVar("losses", default=None)


@contextmanager
def losses() -> Iterator[dict[str, int]]:
    """Count what templates leave out by design in the rows that are rendered in this context.

    Yields:
        The number of rows by field, such as ``"reasoning of earlier turns"``.

    >>> message = {"role": "user", "content": " 1+1= "}
    >>> with losses() as found:
    ...     check_complete("user: 1+1=", [message], [])
    >>> found
    {'white space around content': 1}
    """
    counts = dict[str, int]()
    token = _COUNTS.set(counts)
    try:
        yield counts
    finally:
        _COUNTS.reset(token)


def check_complete(
    text: str,
    messages: Sequence[Mapping[str, Any]],
    trained: Sequence[int],
    tools: Sequence[Mapping[str, Any]] = (),
    template: str = "",
) -> None:
    """Check that a chat template wrote all of a conversation, and none of it twice.

    Args:
        text: that the template wrote.
        messages: in the canonical form; see `nrl.data.messages`.
        trained: the places of the messages that the model learns to write.
        tools: in the canonical form.
        template: its source. Words that it writes by itself may stand in the text besides.

    Raises:
        DataError: a content, a call, a tool, or the reasoning of a trained message is not in the text, or is in it more
            often than in the messages; the error names the message and the field.

    >>> message = {"role": "assistant", "content": "2", "reasoning_content": "Easy."}
    >>> check_complete("assistant: 2", [message], [0])
    Traceback (most recent call last):
    nrl.errors.DataError: render: the chat template leaves out the reasoning of message 0 ('reasoning_content', \
'reasoning' or 'thinking'), 'Easy.'; take a template that writes it, write it into 'content' between <think> and \
</think>, or leave it out of the row
    """
    lost = _check_tools(text, tools)
    written = list[tuple[str, str]]()  # texts and their names
    called = list[tuple[str, str]]()  # likewise, of calls
    spoken = _Reader(text)
    for at, message in enumerate(messages):
        of = f"of message {at}"
        parts = _reasoned(message) if message["role"] == "assistant" else {"content": message["content"]}
        where = _Reader(text) if message["role"] == "system" else spoken  # some templates put all of them in front
        for name, value in parts.items():
            inner = value.strip()
            if name != "content" and at not in trained:
                lost |= {"reasoning of earlier turns"} if inner and not where.has(inner) else set()
                continue
            said = f"'{name}' {of}" if name not in REASONING else f"the reasoning {of} ({_FIELDS})"
            if not where.has(inner):
                raise DataError(_missing(said, inner, _INTO_CONTENT if name in REASONING else ""))
            if not where.has(value):
                lost.add(f"white space around {name}")
            written.append((inner, said))
        for number, call in enumerate(message.get("tool_calls") or ()):
            spoken = _check_call(spoken, call, f"of call {number} {of}")
            if isinstance(call["function"]["arguments"], Mapping):
                called += [
                    (value.strip(), f"the argument '{path}' of call {number} {of}")
                    for path, value in _leaves(call["function"]["arguments"], "")
                    if isinstance(value, str)
                ]
        if at in trained:
            _check_opened_once(text, message["content"], of)
    _check_counts(text, written, called, (messages, tools), template)
    for name in sorted(lost):
        count_loss(name)


def count_loss(name: str) -> None:
    """Count that a template leaves something out by design, where `losses` counts.

    >>> with losses() as found:
    ...     count_loss("types of tools")
    >>> found
    {'types of tools': 1}
    """
    counts = _COUNTS.get()
    if counts is not None:
        counts[name] = counts.get(name, 0) + 1


def _reasoned(message: Mapping[str, Any]) -> dict[str, str]:
    """The texts of a message of the assistant. Templates take apart a content that has the reasoning within marks."""
    found = {name: message[name] for name in REASONING if message.get(name)}
    reasoning, content = split_content(message["content"])
    _, begun, is_ended = _begun_reasoning(content)
    if not is_ended:
        reasoning, content = begun, ""
    if content != message["content"]:
        found["reasoning in content"] = reasoning
    return {**found, "content": content}


class _Reader:
    """A text, read from some place on."""

    def __init__(self, text: str, start: int = 0) -> None:
        self.text, self.start = text, start

    def has(self, value: str) -> bool:
        return not value or any(self.text.find(each, self.start) >= 0 for each in _spellings(value))

    def count(self, value: str) -> int:
        return max(self.text.count(each, self.start) for each in _spellings(value))

    def behind(self, value: str) -> "_Reader | None":
        at = self.text.find(value, self.start)
        return None if at < 0 else _Reader(self.text, at + len(value))


def _spellings(value: str) -> Iterator[str]:
    """A text as it is, and as JSON writes it."""
    yield value
    for ascii_alone in (False, True):
        inner = json.dumps(value, ensure_ascii=ascii_alone)[1:-1]
        if inner != value:
            yield inner
            # Jinja's own filter `tojson` makes JSON safe for HTML
            yield inner.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026").replace("'", "\\u0027")


def _missing(name: str, value: str, remedy: str = "") -> str:
    found = f"render: the chat template leaves out {name}, {shown(repr(value))}"
    return f"{found}; take a template that writes it, {remedy}or leave it out of the row"


_INTO_CONTENT = "write it into 'content' between <think> and </think>, "


def _check_call(spoken: _Reader, call: Mapping[str, Any], of: str) -> _Reader:
    """Check that a call is written, and read on behind its name."""
    function = call["function"]
    behind = spoken.behind(function["name"])
    if behind is None:
        raise DataError(_missing(f"the name {of}", function["name"]))
    arguments = function["arguments"]
    if isinstance(arguments, str):
        left = behind.text[behind.start :]
        if arguments not in left or json.dumps(arguments, ensure_ascii=False) in left:
            raise DataError(
                f"render: the arguments {of} are {shown(repr(arguments))}, which is no JSON object, and the chat "
                "template does not write them as they are; give an object"
            )
        return behind
    for path, value in _leaves(arguments, ""):
        if not any(behind.has(each) for each in _values(value)):
            raise DataError(_missing(f"the argument '{path}' {of}", str(value)))
    return behind


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            inner = f"{path}.{key}" if path else str(key)
            yield inner, str(key)
            yield from _leaves(each, inner)
    elif isinstance(value, list | tuple):
        for at, each in enumerate(value):
            yield from _leaves(each, f"{path}[{at}]")
    else:
        yield path, value


def _values(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value.strip()
    else:
        yield json.dumps(value, default=str)
        yield str(value)


def _check_tools(text: str, tools: Sequence[Mapping[str, Any]]) -> set[str]:
    """Check that tools are written, and return what a template leaves out of all of them."""
    whole, lost = _Reader(text), set[str]()
    by_kind: dict[str, list[tuple[str, str]]] = {"names": [], "parameters": [], "descriptions": []}
    for tool in tools:
        for part in _of_tool(tool):
            if part.kind in by_kind:
                by_kind[part.kind].append((part.name, part.text.strip()))
            elif not whole.has(part.text):
                lost.add(f"{part.kind} of tools")
    for kind_of, texts in by_kind.items():
        times = Counter(value for _, value in texts)
        missing = [(name, value) for name, value in texts if value and whole.count(value) < times[value]]
        if missing and (kind_of == "names" or len(missing) < len(texts)):
            raise DataError(_missing(*missing[0]))
        lost |= {f"{kind_of} of tools"} if missing else set()
    return lost


class _Part(NamedTuple):
    """A text of a tool that a model has to read; ``name`` is how errors call it."""

    kind: str
    name: str
    text: str


def _of_tool(tool: Mapping[str, Any]) -> Iterator[_Part]:
    function = tool.get("function", tool)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return
    of = f"of the tool '{function['name']}'"
    yield _Part("names", f"the name {of}", function["name"])
    if isinstance(function.get("description"), str):
        yield _Part("descriptions", f"the description {of}", function["description"])
    yield from _of_schema(function.get("parameters"), "", of)
    for key in ("return", "returns", "response"):  # as transformers' get_json_schema writes one
        for part in _of_schema(function.get(key), "", of):
            yield part._replace(kind="return values")


_NAMED_SCHEMAS = ("properties", "patternProperties")
_DEFINITIONS = ("$defs", "definitions")  # whose names stand in references alone
_SCHEMAS = ("items", "prefixItems", "anyOf", "oneOf", "allOf", "not", "if", "then", "else", "additionalProperties")
_SCALARS = ("string", "integer", "number", "boolean", "null")  # lists and objects may be written by their brackets
_LIMITS = (
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "pattern"),
    *("format", "minItems", "maxItems", "uniqueItems", "default"),
)


def _of_schema(schema: Any, path: str, of: str) -> Iterator[_Part]:
    """Yield the texts of a JSON schema at every level.

    Args:
        schema: any value; only mappings have texts.
        path: of the parameter that the schema is of, such as ``"filter.city"``; empty: of all parameters.
        of: how errors name the tool.
    """
    if not isinstance(schema, Mapping):
        return
    here = f"of the parameter '{path}' {of}" if path else f"of the parameters {of}"
    if isinstance(schema.get("description"), str):
        yield _Part("descriptions", f"the description {here}", schema["description"])
    for key, choices in (("enum", schema.get("enum")), ("const", [schema["const"]] if "const" in schema else None)):
        for value in choices if isinstance(choices, list | tuple) else ():
            written = value if isinstance(value, str) else json.dumps(value, default=str)
            yield _Part("parameters", f"a value of '{key}' {here}", written)
    types = schema.get("type")
    for kind_of in types if isinstance(types, list | tuple) else [types]:
        if kind_of in _SCALARS and "enum" not in schema:  # whose values show the type
            yield _Part("types", f"the type {here}", kind_of)
    for key in _LIMITS:
        if key in schema:
            yield _Part("limits and defaults", f"'{key}' {here}", key)
    for key in (*_NAMED_SCHEMAS, *_DEFINITIONS):
        named = schema.get(key)
        for name, inner in named.items() if isinstance(named, Mapping) else ():
            within = f"{path}.{name}" if path else str(name)
            if key in _NAMED_SCHEMAS:
                yield _Part("parameters", f"the parameter '{within}' {of}", str(name))
            yield from _of_schema(inner, within, of)
    for key in _SCHEMAS:
        inner = schema.get(key)
        for each in inner if isinstance(inner, list | tuple) else [inner]:
            yield from _of_schema(each, f"{path}[]" if key in ("items", "prefixItems") else path, of)


def _check_counts(
    text: str,
    written: Sequence[tuple[str, str]],
    called: Sequence[tuple[str, str]],
    given: tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]],
    template: str,
) -> None:
    """Check that each text is written as often as it stands in a conversation, also within others, and not more often.

    Args:
        text: that the template wrote.
        written: texts and their names.
        called: likewise, of arguments. A template may write them twice, as those that show how calls are written do.
        given: the messages and the tools.
        template: its source.
    """
    names = dict(reversed([*written, *called]))
    spoken = "\0".join(value for value, _ in (*written, *called))
    once = {value for value, _ in written if len(value) >= _SHORT}
    encoded = ""
    for value, name in sorted(names.items(), key=lambda item: -len(item[0])):
        count = text.count(value) if value else 0
        if value and spoken.count(value) > count + sum(text.count(other) for other in {*_spellings(value)} - {value}):
            raise DataError(_missing(f"{name}, which stands elsewhere, too", value))
        if count < 2 or value not in once:
            continue
        encoded = encoded or json.dumps(given, ensure_ascii=False, default=str)
        own = encoded.count(json.dumps(value, ensure_ascii=False)[1:-1]) + template.count(value)
        if count > own:
            raise DataError(
                f"render: the chat template writes {name} {count} times, {shown(repr(value))}, where the row has it "
                f"{own} times; take a template that writes it once"
            )


def _check_opened_once(text: str, content: str, of: str) -> None:
    """Check that a template writes no reasoning in front of a content that begins with reasoning of its own."""
    opening, reasoning, _ = _begun_reasoning(content)
    if not reasoning:
        return
    for match in re.finditer(rf"{re.escape(opening)}\s*{re.escape(reasoning)}", text):
        if text[: match.start()].rstrip().endswith((opening, REASONING_MARKS[opening])):
            raise DataError(
                f"render: the chat template writes reasoning of its own in front of 'content' {of}, which begins with "
                f"{opening!r}, {shown(repr(content))}; end the reasoning with {REASONING_MARKS[opening]!r}, or give it "
                f"as '{REASONING[0]}'"
            )


def _begun_reasoning(content: str) -> tuple[str, str, bool]:
    """Return the mark that a content begins with, the reasoning behind it, and whether it ends; or empty texts."""
    mark = find_mark(content)
    if mark is None or mark[0] not in REASONING_MARKS or content[: mark.start()].strip():
        return "", "", True
    closing = find_closing(content, mark.end(), mark[0])
    return mark[0], content[mark.end() : closing.start() if closing else len(content)].strip(), closing is not None
