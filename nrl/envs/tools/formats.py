"""How models write calls of tools: a reader for each format.

JSON is read by a JSON parser, so no marker within a string ends a call.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from nrl.errors import ModelError

__all__ = ["FORMATS", "READERS", "Format", "Malformed", "MalformedCall", "ToolCall", "is_bare_call", "tool_format"]

FORMATS = ("hermes", "qwen3_coder", "llama3", "mistral", "deepseek")
"""How calls are written. An ellipsis stands for an object in JSON.

- ``"hermes"``: ``<tool_call>{"name": NAME, "arguments": ...}</tool_call>``; Hermes, Qwen 2.5, Qwen 3.
- ``"qwen3_coder"``: ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``, where lines
  may end between markers; Qwen3-Coder, Qwen 3.5, Nemotron 3.
- ``"llama3"``: ``{"name": NAME, "parameters": ...}``, alone or after ``<|python_tag|>``, several with ``;`` between.
- ``"mistral"``: ``[TOOL_CALLS]NAME[ARGS]...``; before version 11 of its tokenizer a list of objects,
  ``[TOOL_CALLS] [{"name": NAME, "arguments": ...}]``.
- ``"deepseek"``: of V3 and R1 ``<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME``, and the object between lines of
  three backticks; of V3.1 ``<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>...<｜tool▁call▁end｜>``.
"""


_SHOWN = 40  # characters of a text that a message quotes


class ToolCall(NamedTuple):
    """A call that a model wrote.

    Args:
        name: of the tool.
        arguments: by name, as they were written: values of JSON; in the format ``"qwen3_coder"``, which has no types,
            texts.
        id: that the model gave the call, in formats that have one.

    >>> ToolCall("add", {"a": 2, "b": 3})
    ToolCall(name='add', arguments={'a': 2, 'b': 3}, id=None)
    """

    name: str
    arguments: dict[str, Any]
    id: str | None = None


class MalformedCall(NamedTuple):
    """What began like a call and could not be read.

    Args:
        text: all of it, markers included.
        reason: what was found, and what to write; for the model to read.

    >>> from nrl.envs.tools.parsing import parse
    >>> parse('<tool_call>{"name": "add"}</tool_call>', "hermes").malformed[0].reason
    'the object has no "arguments"; write {"name": ..., "arguments": {...}}'
    """

    text: str
    reason: str


class Malformed(Exception):
    """The reason, and the place in the text up to which the call was read."""

    def __init__(self, reason: str, at: int) -> None:
        self.reason, self.at = reason, at


type _Found = ToolCall | MalformedCall


class Format(NamedTuple):
    """How calls of a format are found and read."""

    opens: re.Pattern[str]
    closes: re.Pattern[str]  # a malformed call ends behind this, or in front of what opens another
    read: Callable[[str, re.Match[str]], Iterator[tuple[_Found, int]]]  # from a marker on: calls, and where each ends


def tool_format(template: str) -> str:
    """Find the format in which a chat template shows calls of tools.

    Args:
        template: its text, ``tokenizer.get_chat_template(tools=...)``.

    Returns:
        One of `FORMATS`.

    Raises:
        ModelError: it shows none, or another.

    >>> tool_format("{{ '<tool_call>' }}{{ {'name': call.name, 'arguments': call.arguments} | tojson }}")
    'hermes'
    """
    if not isinstance(template, str):
        raise ModelError(
            f"tool_format: the chat template is {type(template).__name__}, not text; give what "
            "tokenizer.get_chat_template(tools=...) returns"
        )
    for format, has, lacks in _SIGNS:
        if all(re.search(sign, template) for sign in has) and not any(sign in template for sign in lacks):
            return format
    about = "has no calls of tools" if "tool_calls" not in template else "writes calls of tools in a way of its own"
    raise ModelError(
        f"tool_format: the chat template {about}, and none of {', '.join(FORMATS)}; take a model with one of these, or "
        "give parse the one that its answers have"
    )


_SIGNS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (  # a format, what a template has, what it lacks
    ("qwen3_coder", ("<function=", "<parameter="), ()),
    ("mistral", (r"\[TOOL_CALLS\]",), ()),
    ("deepseek", ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"), ()),
    ("hermes", ("<tool_call>", "arguments"), ("<arg_key>",)),  # GLM 4 has keys of arguments between tags
    ("llama3", (r'"parameters": ', "<.start_header_id.>"), ()),
)


# --- JSON.


def _json(text: str, at: int) -> tuple[Any, int]:
    """The value that begins behind white space, and where it ends."""
    at = _blank(text, at)
    if at == len(text):
        raise Malformed("it ends before its JSON begins", at)
    try:
        value, end = json.JSONDecoder().raw_decode(text, at)
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair can be no text
    except json.JSONDecodeError as error:
        where = text[max(at, error.pos - _SHOWN // 2) : error.pos + _SHOWN // 2]
        read = len(text) if error.msg.startswith("Unterminated string") else error.pos  # markers in it are no markers
        raise Malformed(f"its JSON cannot be read: {error.msg.removesuffix(' at')}, at {where!r}", read) from None
    except (ValueError, RecursionError) as error:  # such as a number of 5,000 digits
        raise Malformed(f"its JSON cannot be read: {error}", at) from None
    return value, end


_BLANK = re.compile(r"\s*")


def _blank(text: str, at: int) -> int:
    """Where white space ends."""
    return next(_BLANK.finditer(text, at)).end()


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return repr(shown) if isinstance(value, str) else shown


def _of_object(value: Any, text: str, *keys: str) -> _Found:
    """The call that an object says, which has its arguments under one of these keys."""
    wanted = f'write {{"name": ..., "{keys[0]}": {{...}}}}'
    if not isinstance(value, dict):
        return MalformedCall(text, f"found {_shown(value)} in place of an object; {wanted}")
    own = next((key for key in keys if key in value), keys[0])
    for key, kind in (("name", str), (own, dict)):
        if key not in value:
            return MalformedCall(text, f'the object has no "{key}"; {wanted}')
        if not isinstance(value[key], kind) or value[key] == "":
            return MalformedCall(text, f'the object\'s "{key}" is {_shown(value[key])}; {wanted}')
    id = value.get("id")
    return ToolCall(value["name"], value[own], id if isinstance(id, str) else None)


def _of_name(name: str, value: Any, text: str, id: str | None = None) -> _Found:
    """The call of a name with this value for its arguments."""
    if isinstance(value, dict):
        return ToolCall(name, value, id)
    return MalformedCall(text, f"the arguments are {_shown(value)}; write an object, {{...}}")


def _closing(text: str, at: int, closes: str) -> int:
    """Where a call ends that has to end here: behind its marker, or with the text, where the marker may be cut."""
    at = _blank(text, at)
    if text.startswith(closes, at):
        return at + len(closes)
    if closes.startswith(text[at:]):
        return len(text)
    raise Malformed(f"found {_shown(text[at:])} behind its JSON; write one object and {closes}", at)


# --- The formats.


def _hermes(text: str, stop: re.Match[str]) -> Iterator[tuple[_Found, int]]:
    value, at = _json(text, stop.end())
    end = _closing(text, at, "</tool_call>")
    yield _of_object(value, text[stop.start() : end], "arguments"), end


_FUNCTION = re.compile(r"\s*<function=(?:([^<>\n]+)>\s*)?")
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>")


def _qwen3_coder(text: str, stop: re.Match[str]) -> Iterator[tuple[_Found, int]]:
    tagged = stop[0] == "<tool_call>"
    function = _FUNCTION.match(text, stop.end() if tagged else stop.start())
    if function is None or not function[1]:
        raise Malformed("it does not begin with <function=NAME>", function.end() if function else stop.end())
    arguments: dict[str, Any] = {}
    at = function.end()
    while parameter := _PARAMETER.match(text, at):
        name = parameter[1]
        value, behind = _value(text, parameter.end())
        if value is None or "\n<parameter=" in value:
            read = len(text) if value is None else parameter.end()
            raise Malformed(f"</parameter> is missing behind the parameter {name}", read)
        if name in arguments:
            raise Malformed(f"it has the parameter {name} twice; write each once", behind)
        arguments[name], at = value.removeprefix("\n").removesuffix("\n"), behind
    if not text.startswith("</function>", at):
        found = f"found {_shown(text[at:])}" if text[at:].strip() else "it ends before </function>"
        raise Malformed(f"{found}; write <parameter=NAME>, VALUE, </parameter> for each, and </function>", at)
    at += len("</function>")
    rest = text[_blank(text, at) :]
    if tagged and (rest.startswith("</tool_call>") or "</tool_call>".startswith(rest)):
        at = _closing(text, at, "</tool_call>")
    yield ToolCall(function[1], arguments), at


def _value(text: str, at: int) -> tuple[str | None, int]:
    """A value up to the marker that closes it, and where what follows begins; the value may hold such a marker."""
    end = text.find("</parameter>", at)
    while end >= 0:
        behind = _blank(text, end + len("</parameter>"))
        if text.startswith(("<parameter=", "</function>"), behind):
            return text[at:end], behind
        end = text.find("</parameter>", end + 1)
    return None, at


_ANOTHER = re.compile(r"\s*;?\s*(?:<\|python_tag\|>\s*)?(?=\{)")
_BARE = re.compile(r'\{\s*"(?:type|name)"\s*:\s*"')


def _llama3(text: str, stop: re.Match[str]) -> Iterator[tuple[_Found, int]]:
    more: re.Match[str] | None = stop
    at = stop.start() if stop[0] == "{" else stop.end()
    while more:
        value, end = _json(text, at)
        yield _of_object(value, text[at:end].strip(), "parameters", "arguments"), end
        more = _ANOTHER.match(text, end)
        at = more.end() if more else end


def is_bare_call(text: str, at: int, before: list[str]) -> bool:
    """Whether a call of Llama begins here: nothing is before it, and it is more than an answer in JSON."""
    if any(part.strip() for part in before):
        return False
    try:
        value, _ = json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError):
        return _BARE.match(text, at) is not None
    return "parameters" in value or "arguments" in value


_NAMED = re.compile(r"([^\s\[\]{}<>]+)\s*(?:\[CALL_ID\]\s*([^\s\[\]{}]+)\s*)?(?:\[ARGS\]|(?=\{))")


def _mistral(text: str, stop: re.Match[str]) -> Iterator[tuple[_Found, int]]:
    at = _blank(text, stop.end())
    if named := _NAMED.match(text, at):
        value, end = _json(text, named.end())
        yield _of_name(named[1], value, text[stop.start() : end], named[2]), end
        return
    if text.startswith("{", at):
        value, end = _json(text, at)
        yield _of_object(value, text[stop.start() : end], "arguments"), end
        return
    if not text.startswith("[", at):
        raise Malformed("it is neither NAME[ARGS]{...} nor a list of objects", at)
    last = text.startswith("]", _blank(text, at + 1))
    if last:
        raise Malformed("its list is empty; write a call, or none", at)
    while not last:
        value, end = _json(text, at + 1)
        after = _blank(text, end)
        if text[after : after + 1] not in ("", ",", "]"):
            raise Malformed(f"found {_shown(text[after:])} behind an object; write a comma or ]", after)
        last = text[after : after + 1] != ","
        yield _of_object(value, text[at + 1 : end].strip(), "arguments"), min(after + 1, len(text))
        at = after


_BEGIN, _END, _ALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
_NAME = re.compile(r"[^<>\n]*<｜tool▁sep｜>([^<>\n]+)\n```json\n|([^<>\n]+)<｜tool▁sep｜>")


def _deepseek(text: str, stop: re.Match[str]) -> Iterator[tuple[_Found, int]]:
    at = stop.start() if stop[0] == _BEGIN else _blank(text, stop.end())
    if not text.startswith(_BEGIN, at):
        raise Malformed(f"it does not begin with {_BEGIN}", at)
    begin = stop.start()
    while text.startswith(_BEGIN, at):
        at += len(_BEGIN)
        name = _NAME.match(text, at)
        if name is None:
            raise Malformed("it has no name in front of <｜tool▁sep｜>", at)
        value, end = _json(text, name.end())
        if name[1]:
            end = _closing(text, end, "```")
        end = _closing(text, end, _END)
        found = _of_name(name[1] or name[2], value, text[begin:end])
        at = begin = _blank(text, end)
        yield found, at + len(_ALL_END) * text.startswith(_ALL_END, at)


READERS = {
    "hermes": Format(re.compile(r"<tool_call>"), re.compile(r"</tool_call>"), _hermes),
    "qwen3_coder": Format(
        re.compile(r"<tool_call>|<function="),
        re.compile(r"</tool_call>|</function>\s*(?!\s|</tool_call>)"),
        _qwen3_coder,
    ),
    "llama3": Format(re.compile(r"<\|python_tag\|>|\{"), re.compile(r"(?!)"), _llama3),
    "mistral": Format(re.compile(r"\[TOOL_CALLS\]"), re.compile(r"(?!)"), _mistral),
    "deepseek": Format(
        re.compile(r"<｜tool▁calls▁begin｜>|<｜tool▁call▁begin｜>"),
        re.compile(rf"{_END}\s*{_ALL_END}|{_END}|{_ALL_END}"),
        _deepseek,
    ),
}
