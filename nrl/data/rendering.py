"""Rendering prompts and conversations into token ids, and marking the assistant's tokens.

All goes through the tokenizer's own chat template, as text. The assistant's part of a turn begins after the template's
generation prompt and ends with the token that ends the turn.

Templates that write today's date, such as Llama 3.2's, always get 26 July 2024, the date in Llama 3.1's own template.
So a run that goes on tomorrow has the same prompts.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any, cast

from nrl.data.checks import check_prompt, shown
from nrl.data.completeness import check_complete
from nrl.data.forms import as_taken, selected_template
from nrl.data.messages import canonical_messages, canonical_prompt
from nrl.envs.contract import Message, Prompt
from nrl.errors import DataError, ModelError

__all__ = ["answered", "encode", "render", "templated"]

_TODAY: Mapping[str, Any] = {"strftime_now": datetime(2024, 7, 26).strftime}
"""An argument of every template. It shadows the clock that transformers provides under this name."""

type _Tools = Sequence[Mapping[str, Any]] | None

_CHARACTERS, _MARGIN = 8, 64  # of a token, more than most have; tokens that may depend on where a text was cut
_HEAD = 1000  # characters

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


def render(
    prompt: Prompt,
    tokenizer: Any,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    max_tokens: int | None = None,
) -> list[int]:
    """The token ids of a prompt, ready to be completed.

    A text is encoded with the special tokens that the tokenizer puts before a text, but not doubled if the text itself
    begins with them, and without those that it would put after the text. A chat goes through the tokenizer's chat
    template, up to the beginning of the assistant's answer. Ids stay as they are.

    Args:
        prompt: a text, messages with ``role`` and ``content``, or token ids.
        tokenizer: a transformers tokenizer.
        tools: JSON schemas of functions, which the chat template writes; nothing but a chat shows them.
        max_tokens: how many ids are wanted; the rest of a longer prompt is not read. None: all.

    Returns:
        At least one token id, unless the tokenizer writes none for the text.

    Raises:
        DataError: a prompt that is none of the three, that is empty, that the chat template refuses, or that has ids
            outside of the vocabulary.
        ModelError: a chat, for a tokenizer that has no chat template.

    >>> from nrl import tiny
    >>> render("7+12=", tiny.tokenizer())
    [28, 16, 22, 23, 34]
    """
    if hasattr(prompt, "tolist") and not isinstance(prompt, memoryview):
        prompt = prompt.tolist()
    prompt = canonical_prompt(prompt, "render: the prompt")
    check_prompt(prompt, "render: the prompt")
    if isinstance(prompt, str):
        return _with_specials(prompt, tokenizer, max_tokens)
    if isinstance(prompt[0], Mapping):
        text = templated(cast(Sequence[Message], prompt), tokenizer, asking=True, tools=tools)
        check_complete(text, cast(Sequence[Message], prompt), [], tools or (), _template(tokenizer, tools))
        return encode(text, tokenizer, max_tokens)
    ids = list(cast(Sequence[int], prompt))[:max_tokens]
    if max(ids) >= len(tokenizer):
        raise DataError(f"render: the prompt has the token id {max(ids)}; the tokenizer's last is {len(tokenizer) - 1}")
    return ids


def answered(
    prompt: Prompt,
    answer: str | Sequence[Message],
    tokenizer: Any,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[list[int], list[bool]]:
    """The token ids of a prompt with its answer, up to the end of the answer, and which of them the assistant writes.

    A text is an answer as the model writes it. It is encoded apart from the prompt, so that no token reaches across the
    boundary. Unless it ends itself, it gets the tokens with which the chat template ends a turn (or, if the prompt is
    no chat, the end-of-sequence token). Messages are an answer as the chat template writes it; all of the assistant's
    messages among them count, those in the prompt do not.

    Args:
        prompt: as for `render`; empty: nothing comes before the messages of the answer.
        answer: a text, or messages.
        tokenizer: a transformers tokenizer.
        tools: as for `render`.

    Returns:
        Ids, and for each of them whether the assistant writes it. Up to the first that it writes they are those of
        `render`.

    Raises:
        DataError: a prompt that `render` refuses, messages among which none is the assistant's, or a conversation that
            the chat template refuses or does not write turn by turn.
        ModelError: no end-of-sequence token, no chat template, or one that does not end the assistant's messages.

    >>> from nrl import tiny
    >>> ids, wrote = answered("1+1=", "2", tiny.tokenizer())
    >>> wrote
    [False, False, False, False, True, True]
    """
    if not isinstance(answer, str):
        return _conversation(prompt, answer, tokenizer, tools)
    before = render(prompt, tokenizer, tools=tools)
    chat = not isinstance(prompt, str) and isinstance(prompt[0], Mapping)
    end = encode(_ending(tokenizer, tools) if chat else "", tokenizer) or [_end_of_sequence(tokenizer)]
    after = encode(answer, tokenizer)
    after += [] if after[-len(end) :] == end else end
    return before + after, [False] * len(before) + [True] * len(after)


def _conversation(
    prompt: Prompt, answer: Sequence[Message], tokenizer: Any, tools: _Tools
) -> tuple[list[int], list[bool]]:
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}] if prompt else []
    if len(prompt) and not isinstance(prompt[0], Mapping):
        raise DataError("the prompt is token ids and the answer messages; give the prompt as a text or messages")
    messages = canonical_messages([*cast(Sequence[Message], prompt), *answer], "the conversation")
    own = [index for index in range(len(prompt), len(messages)) if messages[index]["role"] == "assistant"]
    turns = [index for index in own if "weight" not in messages[index]]
    if not turns:
        found = "no message of the assistant" if not own else "only messages of the assistant with 'weight': 0"
        raise DataError(f"the conversation has {found}, so there is nothing to train on")
    if turns[0] == 0:
        if all(message["role"] == "assistant" for message in messages[: turns[-1]]):
            raise DataError("the conversation begins with the assistant's message; begin with what it answers")
        turns = turns if _opens(tokenizer, tools) else turns[1:]  # then the first is only what the others follow
    if _MARKER.search(_template(tokenizer, tools)):
        text, spans = _marked(messages, turns, tokenizer, tools)
    else:
        text, spans = _derived(messages, turns, tokenizer, tools)
    check_complete(text, messages, turns, tools or (), _template(tokenizer, tools))
    return _apart(text, spans, tokenizer)


def _opens(tokenizer: Any, tools: _Tools) -> bool:
    """Whether the template asks for an answer to nothing."""
    try:
        return bool(templated([], tokenizer, asking=True, tools=tools))
    except DataError:
        return False


def _derived(
    messages: Sequence[Mapping[str, Any]], turns: Sequence[int], tokenizer: Any, tools: _Tools
) -> tuple[str, list[tuple[int, int]]]:
    """The text, and where in it each turn begins and ends, found by rendering the conversation up to each turn."""
    text = templated(messages, tokenizer, tools=tools)
    ending = _ending(tokenizer, tools)
    if not ending:
        raise ModelError(
            "the chat template ends the assistant's messages with no token, so nothing would teach the model to stop; "
            "put {{ eos_token }} behind their content in tokenizer.chat_template"
        )
    spans = []
    for turn in turns:
        asked = templated(messages[:turn], tokenizer, asking=True, tools=tools)
        so_far = templated(messages[: turn + 1], tokenizer, tools=tools)
        if not so_far.startswith(asked):
            raise DataError(
                f"the chat template asks for the assistant's message {turn} with {_after(asked, so_far)} and then "
                f"writes {_after(so_far, asked)}; {_ADVICE}"
            )
        end = so_far.rfind(ending, len(asked))
        if end < 0:
            found = shown(repr(so_far[len(asked) :][-50:]))
            raise DataError(f"the chat template ends the assistant's message {turn} with {found}, without {ending!r}")
        end += len(ending)
        if text[:end] != so_far[:end]:
            raise DataError(
                f"the chat template writes {_after(so_far, text)} for the assistant's message {turn} while it is the "
                f"last, and {_after(text, so_far)} once others follow, as templates do that drop the thinking of "
                f"earlier turns; {_ADVICE}"
            )
        spans.append((len(asked), end))
    return text, spans


_ADVICE = (
    "one row cannot teach what the model is to write. Make a row of each turn (data.turns), or set "
    "tokenizer.chat_template to one that leaves what it wrote"
)


def _after(text: str, other: str) -> str:
    """The part of a text at which it first differs from another, for a message."""
    same = next((at for at, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    return repr(text[same : same + 30])


def _marked(
    messages: Sequence[Mapping[str, Any]], turns: Sequence[int], tokenizer: Any, tools: _Tools
) -> tuple[str, list[tuple[int, int]]]:
    """The text, and where in it each turn begins and ends, by the template's own ``{% generation %}`` marks."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def call() -> tuple[list[str], list[list[tuple[int, int]]]]:
        return cast(
            tuple[list[str], list[list[tuple[int, int]]]],
            render_jinja_template(
                [[dict(message) for message in as_taken(messages, tokenizer, tools)]],
                tools=None if tools is None else [dict(tool) for tool in tools],
                chat_template=_template(tokenizer, tools),
                return_assistant_tokens_mask=True,
                **tokenizer.special_tokens_map,
                **_TODAY,
            ),
        )

    (text,), (found,) = _asked(call, messages)
    ending = _ending(tokenizer, tools)
    before = len(templated(messages[: turns[0]], tokenizer, asking=True, tools=tools))
    untrained = []
    for turn in range(turns[0], len(messages)):
        if "weight" in messages[turn]:
            asked = templated(messages[:turn], tokenizer, asking=True, tools=tools)
            untrained.append((len(asked), len(templated(messages[: turn + 1], tokenizer, tools=tools))))
    spans = []
    for start, end in found:
        if any(low <= start < high for low, high in untrained):
            continue
        close = text.rfind(ending, start, end) if ending else -1  # after the ending, the text is the template's
        if start >= before and start < end:
            spans.append((start, end if close < 0 else close + len(ending)))
    if not spans:
        raise DataError("the chat template marks nothing of the conversation with {% generation %} to be trained on")
    return text, spans


def _apart(text: str, spans: Sequence[tuple[int, int]], tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Encode the text up to the last span, so that no token reaches across the edge of a span; and the mask."""
    edges = [0, *(edge for span in spans for edge in span)]
    pieces = [encode(text[start:end], tokenizer) for start, end in pairwise(edges)]
    whole = encode(text[: edges[-1]], tokenizer)
    if [token for piece in pieces for token in piece] != whole:
        # Either a token reaches across an edge (then it is cut, as sampling cuts it), or the tokenizer encodes the
        # beginning of a text differently (then the pieces are taken out of the whole).
        heads = [encode(text[:edge], tokenizer) for edge in edges]
        if all(whole[: len(head)] == head for head in heads):
            pieces = [whole[len(head) : len(longer)] for head, longer in pairwise(heads)]
    mask = [position % 2 == 1 for position, piece in enumerate(pieces) for _ in piece]
    return [token for piece in pieces for token in piece], mask


def _ending(tokenizer: Any, tools: _Tools = None) -> str:
    """The text that the chat template puts behind the assistant's, up to the token that ends the turn; or nothing."""
    answer = "ANSWER"
    chat = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": answer}]
    text = templated(chat, tokenizer, tools=tools if isinstance(tokenizer.chat_template, Mapping) else None)
    after = text[text.rfind(answer) + len(answer) :]
    special = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    ends = [(at, at + len(token)) for token in special if (at := after.find(token)) >= 0]
    return after[: min(ends, key=lambda each: (each[0], -each[1]))[1]] if ends else after.rstrip()


def _end_of_sequence(tokenizer: Any) -> int:
    if tokenizer.eos_token_id is None:
        raise ModelError("the tokenizer has no end-of-sequence token to end responses with; set tokenizer.eos_token")
    return int(tokenizer.eos_token_id)


def encode(text: str, tokenizer: Any, max_tokens: int | None = None) -> list[int]:
    """Return the token ids of a text alone; special tokens in it are single ids, and none are added.

    Args:
        text: any.
        tokenizer: a transformers tokenizer.
        max_tokens: how many ids are wanted; None: all. Encoding takes about a second a megabyte, so a longer text is
            read only as far as these ids reach, and a little further, since the last ids of a part depend on its end.

    Raises:
        DataError: the text has a half of a surrogate pair.
    """
    if not text:
        return []
    size = len(text) if max_tokens is None else _CHARACTERS * max_tokens + _MARGIN
    while True:
        ids = _encoded(text[:size], tokenizer)
        if max_tokens is None or size >= len(text):
            return ids[:max_tokens]
        if len(ids) >= max_tokens + _MARGIN:
            return ids[:max_tokens]
        size *= 4


def _encoded(text: str, tokenizer: Any, **options: Any) -> list[int]:
    try:
        return list(tokenizer.encode(text, **{"add_special_tokens": False, **options}))
    except (TypeError, UnicodeError):  # JSON can write halves of a character, which no encoding has
        raise DataError(f"render: {shown(ascii(text))} has a half of a surrogate pair, which is no character") from None


def _with_specials(text: str, tokenizer: Any, max_tokens: int | None) -> list[int]:
    bare = encode(text, tokenizer, max_tokens)
    # The tokens that come before a text depend on its beginning alone
    head = text[:_HEAD]
    short, full = encode(head, tokenizer), list(tokenizer.encode(head))
    starts = (start for start in range(len(full) - len(short) + 1) if full[start : start + len(short)] == short)
    before = full[: next(starts, 0)]
    return (bare if bare[: len(before)] == before else before + bare)[:max_tokens]


def _template(tokenizer: Any, tools: _Tools = None) -> str:
    if getattr(tokenizer, "chat_template", None) is None:
        raise ModelError(
            "render: the prompt is a chat, and the tokenizer has no chat template, which is usual for base models. "
            "Give prompts as plain text (chat=False), take a model with a chat template, or set "
            "tokenizer.chat_template"
        )
    return selected_template(tokenizer, tools)


def templated(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    asking: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """The text of a chat, as the tokenizer's template writes it.

    Args:
        messages: at least one, each with a ``role``, and what else the template reads.
        tokenizer: a transformers tokenizer.
        asking: whether the text ends with the generation prompt.
        tools: JSON schemas of functions, for the template.

    Raises:
        DataError: the template refuses the messages.
        ModelError: the tokenizer has no chat template.
    """
    template = _template(tokenizer, tools)
    taken: list[Any] = [dict(message) for message in as_taken(messages, tokenizer, tools)]

    def call() -> str:
        found: Any = tokenizer.apply_chat_template(
            taken or [taken],  # transformers takes none only as one of several conversations
            tools=None if tools is None else [dict(tool) for tool in tools],
            chat_template=template,
            add_generation_prompt=asking,
            tokenize=False,
            **_TODAY,
        )
        return str(found if taken else found[0])

    return _asked(call, messages)


def _asked[T](call: Callable[[], T], messages: Sequence[Mapping[str, Any]]) -> T:
    from jinja2 import TemplateError

    try:
        return call()
    except (TemplateError, TypeError) as error:
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(f"render: the chat template refuses the messages of the roles {roles}: {error}") from error
