"""Where the assistant's turns stand in the text that a chat template writes of a conversation."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from nrl.data.checks import shown
from nrl.data.control_tokens import ChatText, find_breaks
from nrl.data.marking import Marked, unmark
from nrl.data.messages import REASONING, SYSTEM_ROLES
from nrl.data.templates import TODAY, mark_chat, render_marked, run_template, template_of
from nrl.data.turn_ends import turn_ends
from nrl.data.turn_tokens import turn_tokens
from nrl.envs.replies import REASONING_MARKS, opening_mark
from nrl.errors import DataError, ModelError

__all__ = ["LONGEST_OPENING", "Turns", "find_turns", "unopened"]

type _Tools = Sequence[Mapping[str, Any]] | None

type Turns = tuple[ChatText, list[tuple[int, int]]]
"""The text of a conversation, and where in it each turn of the assistant begins and ends."""

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")

LONGEST_OPENING = 64
"""The characters of what opens reasoning, and of the white space behind it, at most."""


def unopened(answer: str, opened: str) -> str:
    """Return an answer without the mark that opens its reasoning, where the generation prompt has it already."""
    if not opened or not answer.lstrip().startswith(opened.rstrip()):
        return answer
    return answer.removeprefix(opened) if answer.startswith(opened) else answer.lstrip().removeprefix(opened.rstrip())


def find_turns(messages: Sequence[Mapping[str, Any]], turns: Sequence[int], tokenizer: Any, tools: _Tools) -> Turns:
    """Render a conversation and find turns of the assistant in its text.

    Args:
        messages: in the canonical form.
        turns: the numbers of the messages to find.
        tokenizer: a transformers tokenizer with a chat template.
        tools: JSON schemas of functions, for the template.

    Raises:
        DataError: the template refuses the messages, or does not write them turn by turn.
        ModelError: the template does not end the assistant's messages.
    """
    find = _marked if _MARKER.search(template_of(tokenizer, tools)) else _derived
    return find(messages, turns, tokenizer, tools)


def _derived(messages: Sequence[Mapping[str, Any]], turns: Sequence[int], tokenizer: Any, tools: _Tools) -> Turns:
    """Find the turns by rendering the conversation up to each of them."""
    marked = mark_chat(messages, tokenizer, tools)  # once, since each turn renders the conversation up to it
    chat = render_marked(marked, tokenizer)
    ends = turn_ends(tokenizer, tools)
    if not ends.answer:
        raise ModelError(
            "the chat template ends the assistant's messages with no token, so nothing would teach the model to stop; "
            "put {{ eos_token }} behind their content in tokenizer.chat_template"
        )
    spans = []
    prefixes = _Prefixes(marked, chat.text, tokenizer)
    for turn in turns:
        prompt = prefixes.render(turn, asking=True)
        is_last = turn + 1 == len(messages)
        if is_last and not chat.text.startswith(prompt.text):
            chat = _closing_reasoning(prompt, chat, messages[turn], tokenizer, tools)
        until = chat if is_last else prefixes.render(turn + 1)
        asked, so_far = prompt.text, until.text
        if not so_far.startswith(asked):
            raise DataError(
                f"the chat template asks for the assistant's message {turn} with {_after(asked, so_far)} and then "
                f"writes {_after(so_far, asked)}; {_ADVICE}"
            )
        end = len(asked) + ends.find(until.part(len(asked)).masked(), tokenizer) if ends.written else len(so_far)
        if end < len(asked):
            found = shown(repr(so_far[len(asked) :][-50:]))
            raise DataError(
                f"the chat template ends the assistant's message {turn} with {found}, without {ends.answer!r}"
            )
        if chat.text[:end] != so_far[:end]:
            raise DataError(
                f"the chat template writes {_after(so_far, chat.text)} for the assistant's message {turn} while it is "
                f"the last, and {_after(chat.text, so_far)} once others follow, as templates do that drop the thinking "
                f"of earlier turns; {_ADVICE}"
            )
        if not ends.written:
            if is_last:
                chat = chat._replace(text=chat.text + ends.of(messages[turn]))
            # A model does not sample the beginning of a message of the system
            end += next((len(own) for own in (ends.answer, ends.call) if chat.text.startswith(own, end)), 0)
        spans.append((len(asked), end))
        prefixes.set_anchor(turn, until)
    return chat, spans


class _Prefixes:
    """The texts of a conversation up to its turns.

    Rendering all messages up to each of n turns takes time that grows with the square of n. In a long conversation only
    some turns are rendered so. For the others the template is given an excerpt: the system's messages, a question, and
    the turns before. What it adds to the excerpt for the newest messages is what it adds to the conversation, if the
    whole conversation has it at that place; otherwise all messages are rendered.

    Args:
        marked: the whole conversation.
        text: that the template writes of it.
        tokenizer: as for `nrl.data.render`.
    """

    def __init__(self, marked: Marked, text: str, tokenizer: Any) -> None:
        self._marked, self._text, self._tokenizer = marked, text, tokenizer
        self._turns = list[int]()  # those before the anchor
        self._anchor: tuple[int, ChatText] | None = None  # messages whose text is known, and that text
        self._first = 0  # message of the excerpt
        self._rendered_whole = 0  # messages that were last rendered as a whole
        self._excerpts: dict[int, ChatText] = {}

    def set_anchor(self, turn: int, text: ChatText) -> None:
        """Set the turn up to which the text of the conversation is known."""
        self._turns.append(turn)
        self._anchor = (turn + 1, text)
        if turn - self._first > 2 * _CONTEXT:
            self._first = next((known for known in reversed(self._turns) if turn - known >= _CONTEXT), 0)
            self._excerpts = {}

    def render(self, stop: int, *, asking: bool = False) -> ChatText:
        """Return the text of the first messages.

        Args:
            stop: how many.
            asking: whether the text ends with the generation prompt.
        """
        if self._anchor is not None and self._first and stop - self._rendered_whole < _WHOLE:
            count, known = self._anchor
            with suppress(DataError):  # a template may refuse an excerpt
                base, longer = self._excerpt(count), self._excerpt(stop, asking=asking)
                if longer.text.startswith(base.text):
                    text = known.followed_by(longer.part(len(base.text)))
                    if self._text.startswith(text.text):
                        return text
        if not asking:
            self._rendered_whole = stop
        return render_marked(self._marked, self._tokenizer, stop, asking=asking)

    def _excerpt(self, stop: int, *, asking: bool = False) -> ChatText:
        if stop in self._excerpts and not asking:
            return self._excerpts[stop]
        messages, first = self._marked.messages, self._first
        system = [message for message in messages[:first] if message["role"] in SYSTEM_ROLES]
        question = [message for message in messages[:first] if message["role"] == "user"][-1:]
        excerpt = [*system, *question, *messages[first:stop]]
        text = render_marked(self._marked._replace(messages=excerpt), self._tokenizer, len(excerpt), asking=asking)
        if not asking:
            self._excerpts[stop] = text
        return text


_CONTEXT = 6  # messages of an excerpt before its newest ones, at least
_WHOLE = 64  # messages after which all of a conversation is rendered again


def _closing_reasoning(
    prompt: ChatText, chat: ChatText, message: Mapping[str, Any], tokenizer: Any, tools: _Tools
) -> ChatText:
    """Return a conversation whose last turn continues the reasoning that its prompt opens, and closes it.

    Some templates, such as DeepSeek's, open reasoning in the generation prompt, and then write the answer of a message
    alone. The model has to write the message's reasoning, the mark that closes it, and the answer.

    Args:
        prompt: the conversation up to the generation prompt.
        chat: all of it, as the template writes it.
        message: the last one.
        tokenizer: as for `render`.
        tools: as for `render`.
    """
    opened = opening_mark(prompt.text)
    opening, start = opened.rstrip(), len(prompt.text) - len(opened)
    closing = REASONING_MARKS.get(opening)
    if closing is None or not chat.text.startswith(prompt.text[:start]):
        return chat
    own = chat.part(start)
    if own.text.startswith(opening):  # with other white space behind it
        return prompt.followed_by(own.part(len(opening)))
    space = opened[len(opening) :]
    close = f"{space}{closing}{space * 2}"
    indent = len(own.text) - len(own.text.lstrip())
    if own.text.startswith(closing, indent):
        close, own = own.text[: indent + len(closing)], own.part(indent + len(closing))
    content = message["content"]
    if (at := content.rfind(closing)) >= 0:
        at += len(closing)
        answer = content[at:]
        if not own.text.startswith(answer):  # the template strips it
            at += len(answer) - len(answer.lstrip())
        thought = unopened(content[:at], opened)
    else:
        reasoning = next((message[name] for name in REASONING if message.get(name)), "")
        thought = reasoning.strip() + close
    breaks = find_breaks(thought, tokenizer, 0, turn_tokens(tokenizer, tools))
    return prompt.followed_by(ChatText(thought, breaks)).followed_by(own)


_ADVICE = (
    "one row cannot teach what the model is to write. Make a row of each turn (data.turns), or set "
    "tokenizer.chat_template to one that leaves what it wrote"
)


def _after(text: str, other: str) -> str:
    """The part of a text at which it first differs from another, for a message."""
    same = next((at for at, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    return repr(text[same : same + 30])


def _marked(messages: Sequence[Mapping[str, Any]], turns: Sequence[int], tokenizer: Any, tools: _Tools) -> Turns:
    """Find the turns by the template's own ``{% generation %}`` marks."""
    from transformers.utils.chat_template_utils import render_jinja_template

    marked = mark_chat(messages, tokenizer, tools)
    marked_tools: Any = marked.tools

    def run(chat: list[dict[str, Any]]) -> tuple[list[str], list[list[tuple[int, int]]]]:
        return cast(
            tuple[list[str], list[list[tuple[int, int]]]],
            render_jinja_template(
                [chat],
                tools=marked_tools,
                chat_template=template_of(tokenizer, tools),
                return_assistant_tokens_mask=True,
                **tokenizer.special_tokens_map,
                **TODAY,
            ),
        )

    if (plain := marked.plain) is not None:
        run_template(lambda: run(plain), messages)
    (text,), (found,) = run_template(lambda: run(marked.messages), messages)
    chat, moved = unmark(text, marked, tokenizer)
    ends = turn_ends(tokenizer, tools)
    before = len(render_marked(marked, tokenizer, turns[0], asking=True).text)
    untrained, prefixes = [], _Prefixes(marked, chat.text, tokenizer)
    for turn in range(turns[0], len(messages)):
        if "weight" in messages[turn]:
            until = prefixes.render(turn + 1)
            untrained.append((len(prefixes.render(turn, asking=True).text), len(until.text)))
            prefixes.set_anchor(turn, until)
    marks = [(moved(start), moved(end)) for start, end in found]
    asked = list[int]()
    if any(start < before < end for start, end in marks):
        # The generation prompt writes the beginning of what is marked, such as reasoning that is empty
        asked = [len(prefixes.render(turn, asking=True).text) for turn in turns]
    spans = []
    for start, end in marks:
        if any(low <= start < high for low, high in untrained):
            continue
        start = max([start, *(stop for stop in asked if start < stop < end)])
        # What stands behind the end of a turn is the template's text
        close = ends.find(chat.part(start, end).masked(), tokenizer) if ends.written else -1
        if start >= before and start < end:
            spans.append((start, end if close < 0 else start + close))
    if not spans:
        raise DataError("the chat template marks nothing of the conversation with {% generation %} to be trained on")
    return chat, spans
