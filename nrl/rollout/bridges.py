"""Bridges from one turn of a conversation to the next, and forks where there is none.

A trace is token ids that only grow. After a turn was sampled, a bridge is what the chat template writes from there up
to the next answer: the token that ends the turn, if it was not sampled, the new messages, the generation prompt. What
was sampled is never decoded and encoded again. The template says what is new; the trace says what was.

There is no bridge if the model would have to see another history than the trace has: the messages were changed, or the
template itself leaves out, once new messages follow, what it wrote before. Then the trace forks: another row of the
same episode begins with as much of the trace as is still true.
"""

import itertools
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from nrl.data.checks import fields, kind, shown
from nrl.data.encoding import encode
from nrl.data.forms import to_template_form
from nrl.data.messages import REASONING
from nrl.data.templates import render_chat, templated
from nrl.data.turn_ends import special_tokens
from nrl.errors import DataError

__all__ = ["FORKS", "Extension", "Reason", "Sampled", "TraceFork", "bridge", "continues", "count_common", "extend"]

type Reason = Literal["rewritten", "retried", "template"]
"""Why a trace forks; see `TraceFork`."""

FORKS: tuple[str, ...] = ("", *get_args(Reason.__value__))
"""Why a row of an episode began, in the order in which the column ``forked`` numbers them; empty: it is the first."""


class TraceFork(NamedTuple):
    """Reason for which token ids cannot be appended to a trace.

    Args:
        reason: ``"rewritten"``: a message of the history is another one now, or is gone. ``"retried"``: the messages
            end where the history goes on. ``"template"``: the chat template writes what came before differently once
            the new messages follow; many leave out earlier reasoning.
        num_messages: number of messages of the history that are unchanged.
        details: description of the difference, in words.

    >>> TraceFork("retried", 1, "the messages are the first 1 of the history's 2").reason
    'retried'
    """

    reason: Reason
    num_messages: int
    details: str


class Sampled(NamedTuple):
    """Position of a sampled turn in a trace.

    Args:
        message: the place of its message in the history.
        start: its first token.
        stop: behind its last token.

    >>> Sampled(message=1, start=9, stop=12).stop
    12
    """

    message: int
    start: int
    stop: int


class Extension(NamedTuple):
    """The token ids to ask with: ``tokens[:num_kept] + appended``.

    Args:
        num_kept: number of kept tokens of the trace, up to the end of a sampled turn: all, or fewer at a fork.
        appended: the ids behind these tokens; none was sampled.
        fork: the reason for fewer tokens; None: the trace goes on.

    >>> Extension(num_kept=12, appended=[3, 4], fork=None).num_kept
    12
    """

    num_kept: int
    appended: list[int]
    fork: TraceFork | None


def continues(history: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]) -> int | TraceFork:
    """Check whether messages begin with a history, word for word.

    Fields that are None or an empty list say nothing, as clients add them to messages that they send back.

    Args:
        history: the messages of a trace.
        messages: a whole conversation.

    Returns:
        How many messages are the history's, which is all of it; a `TraceFork` where one was changed or is missing.

    >>> history = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    >>> continues(history, [*history, {"role": "user", "content": "Sure?"}])
    2
    >>> continues(history, [history[0], {"role": "assistant", "content": "3"}]).reason
    'rewritten'
    """
    num_common = count_common(history, messages)
    if num_common == len(history):
        return num_common
    if num_common == len(messages):
        return TraceFork(
            "retried", num_common, f"the messages are the first {num_common} of the history's {len(history)}"
        )
    differing = ", ".join(sorted(_iter_differences(history[num_common], messages[num_common])))
    return TraceFork("rewritten", num_common, f"message {num_common} has another {differing} than the history's")


def count_common(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> int:
    """Count the messages at the beginning of two conversations that say the same.

    >>> ask = {"role": "user", "content": "1+1="}
    >>> count_common([ask, ask], [ask, {"role": "assistant", "content": "2"}])
    1
    """
    pairs = enumerate(zip(first, second, strict=False))
    differs = (index for index, (a, b) in pairs if a != b and any(True for _ in _iter_differences(a, b)))
    return next(differs, min(len(first), len(second)))


def bridge(
    turn: Sequence[int],
    history: Sequence[Mapping[str, Any]],
    new: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    max_tokens: int | None = None,
) -> list[int] | TraceFork:
    """Return the token ids to append behind a sampled turn, so that the model answers new messages.

    They begin with the token at the end of a turn, if the turn was cut or has another end. If the turn was cut within
    reasoning in a field of its own, the template's closing mark of reasoning comes first.

    Args:
        turn: the sampled ids, with the token at their end, if any.
        history: messages up to and including the assistant's message of the turn. Its content may be the turn's text,
            or reasoning and calls may be in fields read by the template.
        new: the following messages; the last is not the assistant's.
        tokenizer: a transformers tokenizer with a chat template.
        tools: JSON schemas of functions, for the template.
        max_tokens: limit of ids; None: no limit. Longer messages are not encoded to their end.

    Returns:
        At least one id; or a `TraceFork` of reason ``"template"``, if the template writes the conversation before the
        turn differently than in the prompt of the turn, if it leaves out words of the turn (white space does not
        count), or if it ends the turn with another token once new messages follow.

    Raises:
        DataError: messages without a role, a history that does not end with the assistant's, nothing new, new messages
            that end with the assistant's, or a conversation that the template refuses.
        ModelError: the tokenizer has no chat template.

    >>> from nrl import tiny
    >>> tokenizer = tiny.bpe(["user assistant more 2 3"])
    >>> history = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    >>> ended = tokenizer.encode("2<|im_end|>")
    >>> tokenizer.decode(bridge(ended, history, [{"role": "user", "content": "more"}], tokenizer))
    '\\n<|im_start|>user\\nmore<|im_end|>\\n<|im_start|>assistant\\n'
    >>> cut = tokenizer.encode("2")
    >>> tokenizer.decode(bridge(cut, history, [{"role": "user", "content": "more"}], tokenizer))
    '<|im_end|>\\n<|im_start|>user\\nmore<|im_end|>\\n<|im_start|>assistant\\n'
    """
    _check(history, new)
    conversation = to_template_form([*history, *new], tokenizer, tools)
    history, new = conversation[: len(history)], conversation[len(history) :]
    turn, last = list(turn), history[-1]
    before = templated(history[:-1], tokenizer, asking=True, tools=tools)
    chat = render_chat([*history, *new], tokenizer, asking=True, tools=tools)
    after = chat.text
    if not after.startswith(before):
        return _make_fork(history, f"what it wrote as {_difference(before, after)}")
    tail = _tail(before, after, history, new, tokenizer, tools)
    if tail is None:
        return _make_fork(history, f"the end of message {len(history) - 1}, and not always in the same way")
    turn_text = after[len(before) : len(after) - len(tail)]  # the turn, as the template writes it
    if not _contains_turn(before, turn_text, turn, last, tokenizer):
        sampled_text = tokenizer.decode(turn, skip_special_tokens=True)
        return _make_fork(
            history,
            f"message {len(history) - 1} as {shown(repr(turn_text))}, which leaves out some of "
            f"{shown(repr(sampled_text))}",
        )
    special = special_tokens(tokenizer)
    ids = encode(chat.part(len(after) - len(tail)), tokenizer, max_tokens, continues=True)
    end = next((index for index, token in enumerate(ids) if token in special), len(ids))
    after_end = next((n for n, token in enumerate(reversed(turn), 1) if ids[end : end + 1] == [token]), 0)
    if after_end and turn[-after_end:] == ids[end : end + after_end]:
        return ids[end + after_end :]
    if turn and turn[-1] in special:  # ended by another token
        alone = templated(history, tokenizer, tools=tools).rstrip()
        if alone.endswith(tokenizer.decode(turn[-1:])):
            return _make_fork(history, f"{tokenizer.decode(turn[-1:])!r}, the end of message {len(history) - 1}")
    sampled_text = tokenizer.decode(turn)
    if turn_text.startswith(sampled_text) and any(last.get(name) for name in REASONING):  # the template closes it
        return encode(chat.part(len(before) + len(sampled_text)), tokenizer, max_tokens, continues=True)
    return ids


def extend(
    tokens: Sequence[int],
    history: Sequence[Mapping[str, Any]],
    turns: Sequence[Sampled],
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    max_tokens: int | None = None,
) -> Extension:
    """Extend a trace to the token ids with which a model answers a longer conversation.

    For the trace's history and new messages, the result is the whole trace and a `bridge`. Otherwise the trace forks
    behind its last turn with a bridge. Without a bridge the row is the chat template's text of all messages. Kept
    tokens are trained in their original row, and the loss mask of the fork leaves them out.

    Args:
        tokens: the trace's; empty: a new trace.
        history: its messages; the last is the assistant's.
        turns: the sampled turns of its messages, in order; the last message is the last turn.
        messages: the whole conversation; the last is not the assistant's.
        tokenizer: a transformers tokenizer with a chat template.
        tools: JSON schemas of functions, for the template.
        max_tokens: limit of ids behind the kept tokens; None: no limit.

    Returns:
        The number of kept tokens, the appended ids, and the reason of a fork.

    Raises:
        DataError: as `bridge` does; or the trace does not end with its last turn.
        ModelError: the tokenizer has no chat template.

    >>> from nrl import tiny
    >>> tokenizer = tiny.bpe(["user assistant more 2 3"])
    >>> ask, more = {"role": "user", "content": "1+1="}, {"role": "user", "content": "more"}
    >>> tokens = extend([], [], [], [ask], tokenizer).appended
    >>> turn = tokenizer.encode("2<|im_end|>")
    >>> turns = [Sampled(1, len(tokens), len(tokens) + len(turn))]
    >>> history = [ask, {"role": "assistant", "content": "2"}]
    >>> kept, appended, fork = extend(tokens + turn, history, turns, [*history, more], tokenizer)
    >>> kept == len(tokens + turn), fork
    (True, None)
    >>> changed = [ask, {"role": "assistant", "content": "3"}, more]
    >>> kept, appended, fork = extend(tokens + turn, history, turns, changed, tokenizer)
    >>> kept, fork.reason
    (0, 'rewritten')
    """
    _check_asking(messages, "messages")
    end, stop = (turns[-1].message + 1, turns[-1].stop) if turns else (0, 0)
    if (end, stop) != (len(history), len(tokens)):
        raise DataError(
            f"extend: the last turn ends {end} messages and {stop} tokens; history has {len(history)}, and tokens has "
            f"{len(tokens)}; give the trace as it was when its last turn had been sampled"
        )
    num_common = continues(history, messages)
    fork = num_common if isinstance(num_common, TraceFork) else None
    for turn in reversed(turns):
        end = turn.message + 1
        if fork is not None and end > fork.num_messages:
            continue
        sampled = tokens[turn.start : turn.stop]
        appended = bridge(sampled, history[:end], messages[end:], tokenizer, tools=tools, max_tokens=max_tokens)
        if not isinstance(appended, TraceFork):
            return Extension(turn.stop, appended, fork)
        fork = fork or appended
    conversation = to_template_form(messages, tokenizer, tools)
    chat = render_chat(conversation, tokenizer, asking=True, tools=tools)
    return Extension(0, encode(chat, tokenizer, max_tokens), fork)


def _check(history: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> None:
    _check_roles(history, "history")
    if history[-1]["role"] != "assistant":
        raise DataError(
            f"bridge: history ends with a message of the role {history[-1]['role']!r}; give it up to and including the "
            "assistant's message that the turn stands for"
        )
    if len(history) == 1:
        raise DataError("bridge: history begins with the assistant's message; give what it answers, too")
    _check_asking(new, "new")


def _check_asking(messages: Sequence[Mapping[str, Any]], name: str) -> None:
    _check_roles(messages, name)
    if messages[-1]["role"] == "assistant":
        raise DataError(
            f"bridge: {name} ends with the assistant's message, which leaves nothing to answer; end with what the "
            "model answers"
        )


def _check_roles(messages: Sequence[Mapping[str, Any]], name: str) -> None:
    if not messages:
        raise DataError(f"bridge: {name} is empty; give at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise DataError(f"bridge: {name}: message {index} is {kind(message)}; give {{'role': ..., 'content': ...}}")
        if not isinstance(message.get("role"), str):
            raise DataError(f"bridge: {name}: message {index} has no text as its 'role'; it has {fields(message)}")


def _iter_differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[str]:
    for name in {*first, *second}:
        a, b = first.get(name), second.get(name)
        if a != b and not (a in (None, []) and b in (None, [])):
            yield name


def _tail(
    before: str,
    after: str,
    history: Sequence[Mapping[str, Any]],
    new: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    tools: Sequence[Mapping[str, Any]] | None,
) -> str | None:
    """Return the template's text behind the last assistant message: its end, new messages, generation prompt.

    It is what follows another, plain answer in its place, if the template accepts one and the real text ends with the
    same. Otherwise, as where results must follow calls, it begins with the special token, if there is one, at the end
    of the text that ends with the message.
    """
    answer = next(candidate for n in itertools.count() if (candidate := f"ANSWER{n}") not in after)
    try:
        plain = templated(
            [*history[:-1], {"role": history[-1]["role"], "content": answer}, *new],
            tokenizer,
            asking=True,
            tools=tools,
        )
    except DataError:
        plain = ""
    if plain.count(answer) == 1:
        tail = plain.partition(answer)[2]
        if after[len(before) :].endswith(tail):
            return tail
    alone = templated(history, tokenizer, tools=tools)
    if not (alone.startswith(before) and after.startswith(alone)):
        return None
    turn_text = alone[len(before) :].rstrip()
    end = max((text for text in special_tokens(tokenizer).values() if turn_text.endswith(text)), key=len, default="")
    return after[len(before) + len(turn_text) - len(end) :]


def _contains_turn(before: str, turn_text: str, turn: list[int], message: Mapping[str, Any], tokenizer: Any) -> bool:
    """Return whether the template's text of a turn has all of its words."""
    calls = message.get("tool_calls") or []
    if not calls:
        read = tokenizer.decode(encode(turn_text, tokenizer), skip_special_tokens=True)
        sampled_text = _squeeze(tokenizer.decode(turn, skip_special_tokens=True))
        # The second text may have spelled a special token.
        return sampled_text in _squeeze(read) or sampled_text in _squeeze(turn_text)
    # The template writes calls in its own way, of which only the names can be told. A content may begin with what the
    # generation prompt has begun, such as the opening of the reasoning.
    texts = [*_texts(message), *(str((call.get("function") or call).get("name", "")) for call in calls)]
    before, turn_text, start = _squeeze(before), _squeeze(turn_text), 0
    for text in texts:
        start = turn_text.find(word := _strip_overlap(before, _squeeze(text)), start)
        if start < 0:
            return False
        start += len(word)
    return True


def _strip_overlap(before: str, text: str) -> str:
    """Return a text without the beginning that the text before it ends with."""
    return text[next(n for n in range(min(len(text), 100), -1, -1) if before.endswith(text[:n])) :]


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of a message, in the order in which a model writes them."""
    for name in (*REASONING, "content"):
        value = message.get(name)
        parts = value if isinstance(value, list) else [value]
        yield from (part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str))
        yield from (part for part in parts if isinstance(part, str))


def _squeeze(text: str) -> str:
    """Return a text without white space, in composed Unicode form, which some tokenizers produce."""
    return "".join(unicodedata.normalize("NFC", text).split())


def _make_fork(history: Sequence[Mapping[str, Any]], details: str) -> TraceFork:
    return TraceFork("template", len(history) - 1, f"once new messages follow, the chat template writes {details}")


def _difference(before: str, after: str) -> str:
    pairs = zip(before, after, strict=False)
    same = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(before), len(after)))
    start = max(same - 10, 0)  # The differing parts may begin alike.
    return f"{before[start : same + 30]!r} as {after[start : same + 30]!r}"
