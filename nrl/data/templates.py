"""The text that a tokenizer's chat template writes of messages.

Templates that write today's date, such as Llama 3.2's, always get 26 July 2024, the date in Llama 3.1's own template.
So a run that goes on tomorrow has the same prompts.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from nrl.data.control_tokens import ChatText
from nrl.data.forms import selected_template, to_template_form
from nrl.data.marking import Marked, mark_texts, unmark
from nrl.errors import DataError, ModelError

__all__ = ["TODAY", "mark_chat", "render_chat", "render_marked", "run_template", "template_of", "templated"]

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
