"""From the canonical form of messages to the one that a chat template takes.

Templates differ: most write arguments that are an object, and some join them as text; some write reasoning of a field,
some only that in the content, and some nothing at all beside a call. It is seen in what they make of a conversation
that is known, once for each template.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nrl.data.checks import shown
from nrl.data.messages import REASONING, ROLES
from nrl.errors import DataError, ModelError

__all__ = ["Form", "form", "selected_template", "to_template_form"]


class Form(NamedTuple):
    """What a template takes of a message with calls.

    Args:
        text: whether arguments have to be JSON text, not an object.
        reasoning: the field whose reasoning it writes beside calls; None: it reads none.
        content: whether it writes the content beside calls.
        several: whether it takes several calls.
        plain: whether it takes a tool's result after a message without calls, and writes all of its content.
        ids: whether it refuses calls and results without an id; those of Mistral want one of nine letters and digits.
        thought: the field whose reasoning it writes in a last message without calls; None: it reads none.
        null: whether the content beside calls has to be null where it is empty.

    >>> Form().reasoning, Form().text
    (None, False)
    """

    text: bool = False
    reasoning: str | None = None
    content: bool = True
    several: bool = True
    plain: bool = False
    ids: bool = False
    thought: str | None = None
    null: bool = False


_FORMS: dict[tuple[type, str, bool], Form] = {}


def form(tokenizer: Any, tools: Sequence[Mapping[str, Any]] | None = None) -> Form:
    """The form of a tokenizer's template, which is asked once.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        tools: JSON schemas of functions, for the template.

    >>> from nrl import tiny
    >>> form(tiny.bpe(["user assistant"]))
    Form(text=False, reasoning=None, content=True, several=True, plain=True, ids=False, thought=None, null=False)
    """
    key = type(tokenizer), selected_template(tokenizer, tools), bool(tools)
    if key not in _FORMS:
        _FORMS[key] = _probed(tokenizer, tools)
    return _FORMS[key]


def selected_template(tokenizer: Any, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
    """Return the text of the chat template that a tokenizer has for a conversation with these tools.

    A tokenizer may have several, by name: then it is ``"tool_use"`` with tools and ``"default"`` without them, or the
    only one that there is.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        tools: JSON schemas of functions.

    Raises:
        ModelError: it has several, and none of them is for such a conversation.

    >>> from nrl import tiny
    >>> tokenizer = tiny.bpe(["user assistant"])
    >>> tokenizer.chat_template = {"tool_use": tokenizer.chat_template}
    >>> selected_template(tokenizer) == tiny.CHATML
    True
    """
    named = getattr(tokenizer, "chat_template", None)
    if not isinstance(named, Mapping):
        return str(tokenizer.get_chat_template(tools=tools))
    wanted = ["tool_use", "default"] if tools else ["default"]
    name = next((name for name in (wanted if len(named) > 1 else [*wanted, *named]) if name in named), None)
    if name is None:
        raise ModelError(
            f"render: the tokenizer has the chat templates {', '.join(map(repr, named))}, and none for a conversation "
            f"with{'' if tools else 'out'} tools; set tokenizer.chat_template to one of them"
        )
    return str(named[name])


def to_template_form(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, tools: Sequence[Mapping[str, Any]] | None = None
) -> list[Mapping[str, Any]]:
    """Messages as the template takes them.

    Arguments are as they are, or JSON text. Where the template wants ids, those that are missing, since the model wrote
    none or its call could not be read, are the numbers of the message and of the call. Reasoning stands in the field
    that the template reads. A developer's message is one of the system, unless the template names that role. The
    ``weight`` of a message is left out.

    Args:
        messages: a conversation, from its beginning.
        tokenizer: a transformers tokenizer.
        tools: JSON schemas of functions, for the template.

    Raises:
        DataError: a message has a role that is neither in `nrl.data.messages.ROLES` nor named by the template.

    >>> from nrl import tiny
    >>> tokenizer = tiny.bpe(["user assistant"])
    >>> joined = "{% for call in m.tool_calls or [] %}{{ '' + call.function.arguments }}{% endfor %}"
    >>> tokenizer.chat_template = "{% for m in messages %}" + joined + "{% endfor %}"
    >>> call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    >>> to_template_form([{"role": "assistant", "tool_calls": [call]}], tokenizer)[0]["tool_calls"][0]["function"]
    {'name': 'add', 'arguments': '{"a": 2}'}
    """
    if getattr(tokenizer, "chat_template", None) is None:
        return list(messages)
    found = [_known(message, tokenizer, tools) for message in messages]
    if not any(message.get("role") == "tool" or message.get("tool_calls") for message in found):
        return found
    takes = form(tokenizer, tools)
    found = list(_numbered(found)) if takes.ids else found
    if takes.null:
        bare = [bool(message.get("tool_calls")) and not message.get("content") for message in found]
        found = [{**each, "content": None} if is_bare else each for each, is_bare in zip(found, bare, strict=True)]
    if not takes.text:
        return found
    return [
        {**message, "tool_calls": [_as_text(call) for call in message["tool_calls"]]} if _objects(message) else message
        for message in found
    ]


def _known(message: Mapping[str, Any], tokenizer: Any, tools: Sequence[Mapping[str, Any]] | None) -> Mapping[str, Any]:
    """A message whose role and whose field of reasoning the template knows."""
    if "weight" in message:
        message = {key: value for key, value in message.items() if key != "weight"}
    if message.get("role") == "developer" and not _names(selected_template(tokenizer, tools), "developer"):
        message = {**message, "role": "system"}
    role = str(message.get("role"))
    if role not in ROLES.values() and not _names(selected_template(tokenizer, tools), role):
        raise DataError(
            f"render: a message has the role {shown(repr(role))}, which the chat template does not name; the roles "
            f"that are read are {', '.join(ROLES)}"
        )
    given = next((name for name in REASONING if isinstance(message.get(name), str)), None)
    if given is None:
        return message
    takes = form(tokenizer, tools)
    own, other = (takes.reasoning, takes.thought) if message.get("tool_calls") else (takes.thought, takes.reasoning)
    name = own or other or given
    return {name if key == given else key: value for key, value in message.items()}


def _names(template: str, role: str) -> bool:
    return f"'{role}'" in template or f'"{role}"' in template


_ID = re.compile(r"[a-zA-Z0-9]{9}")


def _numbered(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Give calls and their results ids that the template takes.

    A result has the id of its call, in any order. One without an id of a call answers the call at its place.
    """
    renamed: dict[str, list[str]] = {}
    own: list[str] = []
    for at, message in enumerate(messages):
        calls = message.get("tool_calls")
        if calls:
            old = [str(call.get("id")) for call in calls]
            own = [name if _ID.fullmatch(name) else f"{at:05}{place:04}" for place, name in enumerate(old)]
            renamed = {name: [new for each, new in zip(old, own, strict=True) if each == name] for name in old}
            message = {**message, "tool_calls": [{**call, "id": new} for call, new in zip(calls, own, strict=True)]}
        elif message.get("role") == "tool":
            given = str(message.get("tool_call_id"))
            name = renamed[given].pop(0) if renamed.get(given) else own[0] if own else given
            if name in own:
                own.remove(name)
            message = {**message, "tool_call_id": name if _ID.fullmatch(name) else f"{at:09}"}
        yield message


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

    def written(*messages: Mapping[str, Any], asking: bool = True) -> str:
        """What the template writes of the messages; nothing if it refuses them."""
        from jinja2 import TemplateError

        try:
            return str(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": "Q"}, *messages],
                    tools=None if tools is None else [dict(tool) for tool in tools],
                    chat_template=selected_template(tokenizer, tools),
                    add_generation_prompt=asking,
                    tokenize=False,
                )
            )
        except (TemplateError, TypeError):
            return ""

    def called(calls: int = 1, content: str | None = "", text: bool = False, ids: bool = True, **more: str) -> str:
        """What the template writes of an answer with calls and their results."""
        own = [{"id": f"nrlprobe{at}"} if ids else {} for at in range(calls)]  # Mistral's templates want nine letters
        arguments = json.dumps(_ARGUMENTS) if text else _ARGUMENTS
        made = [{**id, "type": "function", "function": {"name": name, "arguments": arguments}} for id in own]
        answer = {"role": "assistant", "content": content, **more} | ({"tool_calls": made} if made else {})
        result = {"role": "tool", "name": name, "content": _WORDS["result"]}
        results = [{**result, **({"tool_call_id": f"nrlprobe{at}"} if ids else {})} for at in range(calls or 1)]
        return written(answer, *results)

    def takes(text: bool, content: str | None = "") -> bool:
        found = called(text=text, content=content)
        # Python's own text of an object means that the template prints whatever it is given
        return all(word in found for each in _ARGUMENTS.items() for word in each) and str(_ARGUMENTS) not in found

    null = not (takes(text=False) or takes(text=True)) and (takes(text=False, content=None) or takes(True, None))
    empty = None if null else ""
    text, thought, content = not takes(False, empty) and takes(True, empty), _WORDS["thought"], _WORDS["content"]
    plain = called(calls=0, content=content)

    def last(field: str) -> str:
        return written({"role": "assistant", "content": content, field: thought}, asking=False)

    return Form(
        text=text,
        reasoning=next(
            (each for each in REASONING if thought in called(1, empty, text, True, **{each: thought})), None
        ),
        content=content in called(text=text, content=content),
        several=called(2, empty, text).count(_WORDS["value"]) == 2,
        plain=content in plain and _WORDS["result"] in plain,
        ids=bool(called(1, empty, text)) and not called(1, empty, text, ids=False),
        thought=next((each for each in REASONING if thought in last(each)), None),
        null=null,
    )
