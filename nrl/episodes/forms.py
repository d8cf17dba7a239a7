"""In which form a chat template takes the messages of turns that call tools.

Templates differ: most write arguments that are an object, and some join them as text; some write reasoning of a field,
some only that in the content, and some nothing at all beside a call. It is seen in what they make of a conversation
that is known, once for each template.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nrl.data.templates import templated
from nrl.errors import DataError

__all__ = ["REASONING", "Form", "as_taken", "form"]

REASONING = ("reasoning_content", "reasoning", "thinking")
"""The fields in which templates read reasoning.

>>> REASONING[0]
'reasoning_content'
"""


class Form(NamedTuple):
    """What a template takes of a message with calls.

    Args:
        text: whether arguments have to be JSON text, not an object.
        reasoning: the field whose reasoning it writes; None: it reads none.
        content: whether it writes the content beside calls.
        several: whether it takes several calls.
        plain: whether it takes a tool's result after a message without calls, and writes all of its content.
        ids: whether it refuses calls and results without an id; those of Mistral want one of nine letters and digits.

    >>> Form().reasoning, Form().text
    (None, False)
    """

    text: bool = False
    reasoning: str | None = None
    content: bool = True
    several: bool = True
    plain: bool = False
    ids: bool = False


_FORMS: dict[tuple[type, str, bool], Form] = {}


def form(tokenizer: Any, tools: Sequence[Mapping[str, Any]] | None = None) -> Form:
    """The form of a tokenizer's template, which is asked once.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        tools: JSON schemas of functions, for the template.

    >>> from nrl import tiny
    >>> form(tiny.bpe(["user assistant"]))
    Form(text=False, reasoning=None, content=True, several=True, plain=True, ids=False)
    """
    key = type(tokenizer), str(tokenizer.get_chat_template(tools=tools)), bool(tools)
    if key not in _FORMS:
        _FORMS[key] = _probed(tokenizer, tools)
    return _FORMS[key]


def as_taken(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, tools: Sequence[Mapping[str, Any]] | None = None
) -> list[Mapping[str, Any]]:
    """Messages whose calls and results are as the template takes them.

    Arguments are as they are, or JSON text. Where the template wants ids, those that are missing, since the model wrote
    none or its call could not be read, are the numbers of the message and of the call.

    Args:
        messages: a conversation, from its beginning.
        tokenizer: a transformers tokenizer.
        tools: JSON schemas of functions, for the template.

    >>> from nrl import tiny
    >>> tokenizer = tiny.bpe(["user assistant"])
    >>> joined = "{% for call in m.tool_calls or [] %}{{ '' + call.function.arguments }}{% endfor %}"
    >>> tokenizer.chat_template = "{% for m in messages %}" + joined + "{% endfor %}"
    >>> call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    >>> as_taken([{"role": "assistant", "tool_calls": [call]}], tokenizer)[0]["tool_calls"][0]["function"]
    {'name': 'add', 'arguments': '{"a": 2}'}
    """
    tooled = any(message.get("role") == "tool" or _objects(message) for message in messages)
    if not tooled or getattr(tokenizer, "chat_template", None) is None:
        return list(messages)
    takes = form(tokenizer, tools)
    found = list(_numbered(messages)) if takes.ids else list(messages)
    if not takes.text:
        return found
    return [
        {**message, "tool_calls": [_as_text(call) for call in message["tool_calls"]]} if _objects(message) else message
        for message in found
    ]


_ID = re.compile(r"[a-zA-Z0-9]{9}")


def _numbered(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Results come behind the message with their calls, in the order of these."""
    last = 0

    def named(of: Mapping[str, Any], key: str, place: int) -> Mapping[str, Any]:
        return of if _ID.fullmatch(str(of.get(key))) else {**of, key: f"{last:05}{place:04}"}

    for at, message in enumerate(messages):
        if message.get("role") == "tool":
            yield named(message, "tool_call_id", at - last - 1)
            continue
        last = at
        calls = message.get("tool_calls")
        yield {**message, "tool_calls": [named(each, "id", n) for n, each in enumerate(calls)]} if calls else message


def _objects(message: Mapping[str, Any]) -> bool:
    calls = message.get("tool_calls") or []
    return any(isinstance(call, Mapping) and isinstance(_function(call).get("arguments"), Mapping) for call in calls)


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    found = call.get("function")
    return found if isinstance(found, Mapping) else call


def _as_text(call: Any) -> Any:
    function = _function(call) if isinstance(call, Mapping) else {}
    if not isinstance(function.get("arguments"), Mapping):
        return call
    function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
    return {**call, "function": function} if "function" in call else function


_WORDS = {name: f"nrl{name}probe" for name in ("key", "value", "thought", "content", "result")}
_ARGUMENTS = {_WORDS["key"]: _WORDS["value"]}


def _probed(tokenizer: Any, tools: Sequence[Mapping[str, Any]] | None) -> Form:
    name = tools[0].get("function", tools[0]).get("name", "find") if tools else "find"

    def written(calls: int = 1, content: str = "", text: bool = False, ids: bool = True, **more: str) -> str:
        """What the template writes of an answer with calls and their results; nothing if it refuses them."""
        own = [{"id": f"nrlprobe{at}"} if ids else {} for at in range(calls)]  # Mistral's templates want nine letters
        arguments = json.dumps(_ARGUMENTS) if text else _ARGUMENTS
        made = [{**id, "type": "function", "function": {"name": name, "arguments": arguments}} for id in own]
        answer = {"role": "assistant", "content": content, **more} | ({"tool_calls": made} if made else {})
        result = {"role": "tool", "name": name, "content": _WORDS["result"]}
        results = [{**result, **({"tool_call_id": f"nrlprobe{at}"} if ids else {})} for at in range(calls or 1)]
        try:
            return templated([{"role": "user", "content": "Q"}, answer, *results], tokenizer, asking=True, tools=tools)
        except DataError:
            return ""

    def takes(text: bool) -> bool:
        found = written(text=text)
        # Python's own text of an object means that the template prints whatever it is given
        return all(word in found for each in _ARGUMENTS.items() for word in each) and str(_ARGUMENTS) not in found

    text, thought, content = not takes(text=False) and takes(text=True), _WORDS["thought"], _WORDS["content"]
    plain = written(calls=0, content=content)
    return Form(
        text=text,
        reasoning=next((each for each in REASONING if thought in written(1, "", text, True, **{each: thought})), None),
        content=content in written(text=text, content=content),
        several=written(calls=2, text=text).count(_WORDS["value"]) == 2,
        plain=content in plain and _WORDS["result"] in plain,
        ids=bool(written(text=text)) and not written(text=text, ids=False),
    )
