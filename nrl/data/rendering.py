"""Rendering prompts and conversations into token ids, and marking the assistant's tokens.

All goes through the tokenizer's own chat template, as text. The assistant's part of a turn begins after the template's
generation prompt and ends with the token that ends the turn.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, cast

from nrl.data.checks import check_prompt
from nrl.data.completeness import check_complete
from nrl.data.control_tokens import ChatText, find_breaks, find_spelled
from nrl.data.encoding import encode, encode_prompt
from nrl.data.messages import canonical_messages, canonical_prompt, is_chat
from nrl.data.templates import render_chat, template_of, templated
from nrl.data.turn_ends import TurnEnds, turn_ends
from nrl.data.turn_spans import LONGEST_OPENING, Turns, find_turns, unopened
from nrl.data.turn_tokens import turn_tokens
from nrl.envs.replies import CHANNEL_HEADER, opening_mark
from nrl.envs.types import Message, Prompt
from nrl.errors import DataError, ModelError

__all__ = ["answered", "render"]

type _Tools = Sequence[Mapping[str, Any]] | None


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
        return encode_prompt(prompt, tokenizer, max_tokens)
    if isinstance(prompt[0], Mapping):
        messages = cast(Sequence[Message], prompt)
        chat = render_chat(messages, tokenizer, asking=True, tools=tools)
        check_complete(chat.text, messages, [], tools or (), template_of(tokenizer, tools))
        return encode(chat, tokenizer, max_tokens)
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

    Messages are an answer as the chat template writes it; all of the assistant's messages among them count, those in
    the prompt do not. A text that answers a chat is the content of such a message. Where the template does not write
    all of the content, because it drops reasoning, say, the text is what the model writes, word for word.

    Behind a text prompt, a text is always what the model writes. No token reaches across the edge between prompt and
    answer. A text that does not end itself gets what ends a turn under the chat template, or, if the prompt is no chat,
    the end-of-sequence token.

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
        return _apart(*_conversation(prompt, answer, tokenizer, tools), tokenizer)
    chat = is_chat(prompt)
    ends = turn_ends(tokenizer, tools) if chat else TurnEnds("", "", written=True)
    # A template has nothing to write of an empty text, whose turn is its end alone
    if chat and answer and (as_message := _as_message(prompt, answer, ends, tokenizer, tools)):
        return _apart(*as_message, tokenizer)
    before = render(prompt, tokenizer, tools=tools)
    if chat:
        answer = unopened(answer, opening_mark(tokenizer.decode(before[-LONGEST_OPENING:])))
    after = encode(_cut_at_turn_tokens(answer, tokenizer, tools), tokenizer, continues=True)
    own = encode(ends.of({"content": answer}), tokenizer) or _end_of_sequence(tokenizer)
    if not any(
        end and after[-len(end) :] == end for end in (own, encode(ends.call, tokenizer), encode(ends.answer, tokenizer))
    ):
        after += own
    return before + after, [False] * len(before) + [True] * len(after)


def _as_message(prompt: Prompt, answer: str, ends: TurnEnds, tokenizer: Any, tools: _Tools) -> Turns | None:
    """A text as the content of a message; None: the template does not take it, or does not write all of it."""
    end = next((end for end in (ends.answer, ends.call) if end and answer.endswith(end)), "")
    content = answer.removesuffix(end)
    try:
        chat, spans = _conversation(prompt, [{"role": "assistant", "content": content}], tokenizer, tools)
    except (DataError, ModelError):
        return None
    start, stop = spans[0][0], spans[-1][1]
    own = opening_mark(chat.text[max(start - LONGEST_OPENING, 0) : start]) + chat.text[start:stop]
    whole = "".join(content.split()) in "".join(own.split())
    return (chat, spans) if whole and own.endswith(end) else None


def _cut_at_turn_tokens(answer: str, tokenizer: Any, tools: _Tools) -> ChatText:
    """Return what a model writes, cut so that turn tokens in it are text, except the last one, which ends it.

    The channels of gpt-oss are the model's own, though their headers have turn tokens.
    """
    last = [tokenizer.eos_token]
    if getattr(tokenizer, "chat_template", None) is not None:
        with suppress(DataError, ModelError):
            last += turn_ends(tokenizer, tools)[:2]
    body = answer.removesuffix(next((end for end in last if end and answer.endswith(end)), ""))
    tokens = turn_tokens(tokenizer, tools)
    own = {
        header.start() + at + 1
        for header in CHANNEL_HEADER.finditer(body)
        for at, _ in find_spelled(header[0], tokens.pattern)
    }
    return ChatText(answer, tuple(at for at in find_breaks(body, tokenizer, 0, tokens) if at not in own))


def _conversation(prompt: Prompt, answer: Sequence[Message], tokenizer: Any, tools: _Tools) -> Turns:
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}] if prompt else []
    if len(prompt) and not isinstance(prompt[0], Mapping):
        raise DataError("the prompt is token ids and the answer messages; give the prompt as a text or messages")
    asked = canonical_messages(prompt, "the prompt") if prompt else []
    messages = [*asked, *canonical_messages(answer, "the answer")]
    own = [index for index in range(len(asked), len(messages)) if messages[index]["role"] == "assistant"]
    turns = [index for index in own if "weight" not in messages[index]]
    if not turns:
        found = "no message of the assistant" if not own else "only messages of the assistant with 'weight': 0"
        raise DataError(f"the conversation has {found}, so there is nothing to train on")
    if turns[0] == 0:
        if all(message["role"] == "assistant" for message in messages[: turns[-1]]):
            raise DataError("the conversation begins with the assistant's message; begin with what it answers")
        turns = turns if _opens(tokenizer, tools) else turns[1:]  # then the first is only what the others follow
    template = template_of(tokenizer, tools)
    ends = turn_ends(tokenizer, tools)
    if ends.written and ends.answer:  # the template writes it behind a content that has it already
        messages = [
            {**message, "content": message["content"].removesuffix(ends.answer)}
            if message["role"] == "assistant"
            else message
            for message in messages
        ]
    chat, spans = find_turns(messages, turns, tokenizer, tools)
    check_complete(chat.text, messages, turns, tools or (), template)
    return chat, spans


def _opens(tokenizer: Any, tools: _Tools) -> bool:
    """Whether the template asks for an answer to nothing."""
    try:
        return bool(templated([], tokenizer, asking=True, tools=tools))
    except DataError:
        return False


def _apart(chat: ChatText, spans: Sequence[tuple[int, int]], tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Encode the text up to the last span, so that no token reaches across the edge of a span; and the mask."""
    edges = [0, *(edge for span in spans for edge in span)]
    pieces = [encode(chat.part(start, end), tokenizer, continues=start > 0) for start, end in pairwise(edges)]
    whole = encode(chat.part(0, edges[-1]), tokenizer)
    if [token for piece in pieces for token in piece] != whole:
        # Either a token reaches across an edge (then it is cut, as sampling cuts it), or the tokenizer encodes the
        # beginning of a text differently (then the pieces are taken out of the whole).
        heads = list[list[int]]()
        for edge in edges:
            heads.append(encode(chat.part(0, edge), tokenizer))
            if whole[: len(heads[-1])] != heads[-1]:
                break
        else:
            pieces = [whole[len(head) : len(longer)] for head, longer in pairwise(heads)]
    mask = [position % 2 == 1 for position, piece in enumerate(pieces) for _ in piece]
    return [token for piece in pieces for token in piece], mask


def _end_of_sequence(tokenizer: Any) -> list[int]:
    if tokenizer.eos_token_id is None:
        raise ModelError("the tokenizer has no end-of-sequence token to end responses with; set tokenizer.eos_token")
    return [int(tokenizer.eos_token_id)]
