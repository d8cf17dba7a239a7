"""The text that a tokenizer's chat template writes of messages.

Templates that write today's date, such as Llama 3.2's, always get 26 July 2024, the date in Llama 3.1's own template.
So a run that goes on tomorrow has the same prompts.

A row may have arguments for its template, such as ``{"enable_thinking": false}``. Transformers and TRL pass a row's
``chat_template_kwargs`` to the template. Here they are set in front of its text, so that all that is derived of a
template, such as what ends its turns, is derived of this one.
"""

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any
from weakref import WeakKeyDictionary

from nrl.data.checks import kind, shown
from nrl.data.completeness import count_loss
from nrl.data.control_tokens import ChatText
from nrl.data.forms import selected_template, to_template_form
from nrl.data.marking import Marked, mark_texts, unmark
from nrl.data.messages import decode_json
from nrl.errors import DataError, ModelError

__all__ = [
    "FIELD",
    "TODAY",
    "mark_chat",
    "render_chat",
    "render_marked",
    "run_template",
    "template_arguments",
    "template_of",
    "templated",
    "with_arguments",
]

TODAY: Mapping[str, Any] = {"strftime_now": datetime(2024, 7, 26).strftime}
"""An argument of every template. It shadows the clock that transformers provides under this name."""


def template_of(tokenizer: Any, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
    """Return the chat template of a tokenizer.

    Raises:
        ModelError: it has none.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ModelError(
            "render: the prompt is a chat, and the tokenizer has no chat template, which is usual for base models. "
            "Give prompts as plain text (chat=False), take a model with a chat template, or set "
            "tokenizer.chat_template"
        )
    return selected_template(tokenizer, tools)


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    asking: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> ChatText:
    """Return the text of a chat, as the tokenizer's template writes it, and where control tokens are only spelled.

    Args:
        messages: at least one, each with a ``role``, and what else the template reads.
        tokenizer: a transformers tokenizer.
        asking: whether the text ends with the generation prompt.
        tools: JSON schemas of functions, for the template.

    Raises:
        DataError: the template refuses the messages.
        ModelError: the tokenizer has no chat template.
    """
    return render_marked(mark_chat(messages, tokenizer, tools), tokenizer, asking=asking)


def mark_chat(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, tools: Sequence[Mapping[str, Any]] | None = None
) -> Marked:
    """Return a chat as the tokenizer's template takes it, with marks for `render_marked`.

    Raises:
        ModelError: the tokenizer has no chat template.
    """
    template_of(tokenizer, tools)
    return mark_texts(to_template_form(messages, tokenizer, tools), tools, tokenizer)


def render_marked(marked: Marked, tokenizer: Any, stop: int | None = None, *, asking: bool = False) -> ChatText:
    """Return what `render_chat` does of the messages up to ``stop``, which were marked once for all of the chat."""
    template = template_of(tokenizer, marked.tools)

    def run(messages: Sequence[Mapping[str, Any]]) -> str:
        nothing: Any = [[]]  # transformers takes no messages only as one of several conversations
        chat: Any = messages or nothing
        text: Any = tokenizer.apply_chat_template(
            chat,
            tools=marked.tools,
            chat_template=template,
            add_generation_prompt=asking,
            tokenize=False,
            **TODAY,
        )
        return str(text if messages else text[0])

    messages = marked.messages[:stop]
    if stop is None and (plain := marked.plain) is not None:
        run_template(lambda: run(plain), messages)
    return unmark(run_template(lambda: run(messages), messages), marked, tokenizer)[0]


def templated(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    asking: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """The text of a chat; see `render_chat`."""
    return render_chat(messages, tokenizer, asking=asking, tools=tools).text


def run_template[T](call: Callable[[], T], messages: Sequence[Mapping[str, Any]]) -> T:
    """Run what renders a template, and say which messages it refuses.

    Raises:
        DataError: it refuses them.
    """
    from jinja2 import TemplateError

    try:
        return call()
    except (TemplateError, TypeError) as error:
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(f"render: the chat template refuses the messages of the roles {roles}: {error}") from error


FIELD = "chat_template_kwargs"
"""The field of a row that holds them."""

_RESERVED = {
    "messages": "give them as 'messages'",
    "conversation": "give it as 'messages'",
    "tools": "give them as 'tools'",
    **dict.fromkeys(
        (
            *("add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation", "max_length"),
            *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
        ),
        "leave it out: nrl sets it",
    ),
    "chat_template": "set tokenizer.chat_template",
}
"""Arguments that say something else than a value for the template, and what to do with them."""

_KEPT = 64  # copies of a tokenizer
_COPIES: "WeakKeyDictionary[Any, dict[str, Any]]" = WeakKeyDictionary()


def template_arguments(row: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the arguments that a row has for its chat template; nulls, which Arrow fills in, are none.

    Args:
        row: any.
        place: how errors name it.

    Raises:
        DataError: they are no object, or one of them is no value for the template.

    >>> template_arguments({"chat_template_kwargs": '{"enable_thinking": false}'}, "row 0")
    {'enable_thinking': False}
    """
    arguments = row.get(FIELD)
    if isinstance(arguments, str) and arguments.strip():
        arguments = decode_json(arguments, f"{place}: '{FIELD}'")
    if not arguments:
        return {}
    if not isinstance(arguments, Mapping):
        raise DataError(
            f"{place}: '{FIELD}' is {kind(arguments)}; give an object, such as {{'enable_thinking': false}}"
        )
    arguments = {str(name): value for name, value in arguments.items() if value is not None}
    for name, value in arguments.items():
        if name in _RESERVED and value:
            raise DataError(f"{place}: '{FIELD}' has '{name}', {shown(repr(value))}; {_RESERVED[name]}")
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise DataError(f"{place}: '{FIELD}' has {shown(repr(name))}, which is no name of a variable; rename it")
    return {name: value for name, value in arguments.items() if name not in _RESERVED}


def with_arguments(tokenizer: Any, arguments: Mapping[str, Any]) -> Any:
    """Return a tokenizer whose chat template has arguments set; the same one if there are none.

    An argument that the template does not name is counted as a loss; see `nrl.data.completeness.losses`.

    Args:
        tokenizer: a transformers tokenizer.
        arguments: of `template_arguments`.

    >>> from nrl import tiny
    >>> with_arguments(tiny.bpe(["user"]), {"enable_thinking": False}).chat_template[:32]
    '{%- set enable_thinking = false '
    """
    template = getattr(tokenizer, "chat_template", None)
    if not arguments or template is None:
        return tokenizer
    templates = template if isinstance(template, Mapping) else {"": template}
    for name, value in arguments.items():
        if value and not any(re.search(rf"\b{name}\b", text) for text in templates.values()):
            count_loss(f"'{name}' of '{FIELD}'")
    front = "".join(f"{{%- set {name} = {_literal(value)} %}}" for name, value in sorted(arguments.items()))
    copies = _COPIES.setdefault(tokenizer, {})
    key = front + str(template)
    if key not in copies:
        if len(copies) >= _KEPT:
            copies.clear()
        copies[key] = copy.copy(tokenizer)
        made = {name: front + text for name, text in templates.items()}
        copies[key].chat_template = made if isinstance(template, Mapping) else made[""]
    return copies[key]


def _literal(value: Any) -> str:
    """Return a value as Jinja writes it, which is JSON but for null."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(str(key))}: {_literal(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False, default=str)
