"""Fields of a row that say the same thing: only one of them is read, so the others must not say something else.

Datasets keep a conversation in several fields: ``prompt`` beside whole ``messages``, ``question`` beside ``prompt``,
``response`` beside ``messages`` that end with an answer, ``system_prompt`` for ``system``, ``functions`` for ``tools``.
`check_fields_agree` refuses a row of which an answer would disappear, and `unread_prompts` names prompts that nothing
reads, so that they can be said once a source.
"""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from nrl.data.checks import shown
from nrl.data.messages import (
    REASONING,
    SYSTEM_ROLES,
    are_messages,
    before_answers,
    canonical_messages,
    canonical_tools,
    decoded_messages,
    is_chat,
    split_content,
)
from nrl.errors import DataError

__all__ = [
    "PROMPT_KEYS",
    "check_fields_agree",
    "check_reasoning_read",
    "is_exchange",
    "row_system",
    "row_tools",
    "unread_prompts",
    "whole_prompt",
    "with_system",
]

PROMPT_KEYS = ("prompt", "messages", "question", "problem")
"""The fields that may hold a row's prompt; the first that the row has is taken."""

_LEAVE_OUT = "Leave one of them out: format=lambda row: {{key: row[key] for key in row if key != '{}'}}"


def check_fields_agree(row: Mapping[str, Any], place: str, *, response: str = "response") -> None:
    """Check that whole ``messages`` of a row say the same as its prompt and its answers.

    Args:
        row: as the data has it.
        place: how errors name it.
        response: the field that holds the response.

    Raises:
        DataError: ``messages`` have an answer, and do not begin with ``prompt``, or end with another answer than the
            row's own; or a ``history`` of the conversation stands beside them.

    >>> messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    >>> check_fields_agree({"messages": messages, "prompt": "1+1="}, "row 0")
    >>> check_fields_agree({"messages": messages, "response": "3"}, "row 0")
    Traceback (most recent call last):
    nrl.errors.DataError: row 0 has 'response', '3', and 'messages' that end with another answer, '2'; only 'response' \
would be read. Leave one of them out: format=lambda row: {key: row[key] for key in row if key != 'messages'}
    """
    history = row.get("history")
    if isinstance(history, list | tuple) and history and (are_messages(history) or all(map(is_exchange, history))):
        raise DataError(
            f"{place} has 'history', {shown(repr(history))}, which nothing reads. Read it with format='alpaca' or "
            "format='prompt=prompt,history=history,response=response', or give the whole conversation as 'messages'"
        )
    messages = _messages_of(row, place)
    tail = messages[len(before_answers(messages)) :]
    if not tail:
        return
    if _has_prompt(row) and not _begins(messages, row["prompt"], place):
        raise DataError(
            f"{place} has 'prompt', {shown(repr(row['prompt']))}, and 'messages' that do not begin with it, "
            f"{shown(repr(messages))}; only one of them would be read. {_LEAVE_OUT.format('messages')}"
        )
    _check_answers(row, tail, place, response)


def is_exchange(value: Any) -> bool:
    """Return whether a value is a pair of a question and its answer, both texts.

    >>> is_exchange(["1+1=", "2"]), is_exchange("12")
    (True, False)
    """
    return isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(text, str) for text in value)


_BESIDE_PROMPTS = ("context", "passage", "input", "instruction")
"""Fields that are a part of the prompt in many data sets, and that nothing reads without a format."""


def unread_prompts(row: Mapping[str, Any], place: str) -> list[tuple[str, str]]:
    """Return the fields of prompts that say something else than the one that is read: that one, and each other.

    >>> unread_prompts({"question": "1+1=", "prompt": "Add: 1+1="}, "row 0")
    []
    >>> unread_prompts({"question": "1+1=", "prompt": "Add."}, "row 0")
    [('prompt', 'question')]
    """
    messages = _messages_of(row, place)
    names = (*PROMPT_KEYS[2:], *_BESIDE_PROMPTS)
    texts = {key: row[key] for key in names if isinstance(row.get(key), str) and row[key].strip()}
    first = next((key for key in PROMPT_KEYS[2:] if key in texts), "")
    read = "prompt" if _has_prompt(row) else "messages" if messages else first
    found = list[tuple[str, str]]()
    if read:
        prompt = messages if read == "messages" else row[read]
        found += [(read, key) for key, text in texts.items() if not _holds(prompt, text)]
    if read == "prompt" and messages and not _begins(messages, row["prompt"], place):
        found.append((read, "messages"))
    return found


def _messages_of(row: Mapping[str, Any], place: str) -> list[dict[str, Any]]:
    decoded = decoded_messages(row.get("messages"))
    return canonical_messages(decoded, f"{place}: 'messages'") if are_messages(decoded) else []


def _has_prompt(row: Mapping[str, Any]) -> bool:
    prompt = row.get("prompt")
    return isinstance(prompt, str | list | tuple) and len(prompt) > 0


def whole_prompt(row: Mapping[str, Any], place: str, *, answered: bool = False) -> list[dict[str, Any]]:
    """Return the messages that a row's prompt is a part of: some data sets give its first text alone.

    Args:
        row: one that `check_fields_agree` takes.
        place: how errors name it.
        answered: whether the prompt is that of the last answer, not of the first.

    Returns:
        Messages; none where the prompt is all that comes before the answer, or the row has no whole ``messages``.

    >>> whole = [{"role": role, "content": role} for role in ("system", "user", "assistant")]
    >>> [message["role"] for message in whole_prompt({"prompt": "system", "messages": whole}, "row 0")]
    ['system', 'user']
    """
    messages = _messages_of(row, place)
    asked = before_answers(messages)
    if len(asked) == len(messages) or not _has_prompt(row):
        return []
    asked = asked if answered else _before_first_answer(asked)
    prompt = row["prompt"]
    if isinstance(prompt, str):
        users = _turns(_without_system(asked))
        return [] if users == _turns([{"role": "user", "content": prompt}]) else asked
    if not is_chat(prompt) or len(_without_system(prompt)) >= len(_without_system(asked)):
        return []
    given = canonical_messages(prompt, f"{place}: 'prompt'")
    system = given[0]["content"] if given[0]["role"] in SYSTEM_ROLES else None
    return [*with_system(asked, system, place)]


def check_reasoning_read(row: Mapping[str, Any], place: str, response: str) -> None:
    """Check that a row has no reasoning beside a response that is a text, which nothing would read.

    Args:
        row: as the data has it.
        place: how errors name it.
        response: the field that holds the response.

    Raises:
        DataError: a field of `REASONING` has a text of several words that is not in the response. One word, such as
            ``"on"``, is a setting.

    >>> check_reasoning_read({"reasoning": "on", "response": "2"}, "row 0", "response")
    """
    answer = row.get(response)
    for name in REASONING:
        value = row.get(name)
        if isinstance(value, str) and len(value.split()) > 1 and isinstance(answer, str) and not _holds(answer, value):
            prompt = next((key for key in ("question", "problem") if key in row), "prompt")
            raise DataError(
                f"{place} has '{name}', {shown(repr(value))}, beside '{response}', which alone would be read. Read "
                f"both with format='prompt={prompt},reasoning={name},response={response}', or leave it out: "
                f"format=lambda row: {{key: row[key] for key in row if key != '{name}'}}"
            )


def _before_first_answer(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return list(takewhile(lambda message: message["role"] != "assistant", messages))


def _without_system(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [message for message in messages if str(message.get("role")).lower() not in SYSTEM_ROLES]


def _begins(messages: Sequence[dict[str, Any]], prompt: Any, place: str) -> bool:
    if isinstance(prompt, str):
        return _holds(_before_first_answer(messages), prompt)
    if not is_chat(prompt):
        return False  # token ids
    first, second = _turns(canonical_messages(prompt, f"{place}: 'prompt'")), _turns(messages)
    if (first[:1] and first[0][0] == "system") != (second[:1] and second[0][0] == "system"):
        # `with_system` puts the system's message of one in front of the other, too.
        first, second = (
            [turn for at, turn in enumerate(turns) if at or turn[0] != "system"] for turns in (first, second)
        )
    return second[: len(first)] == first


def _turns(messages: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    return [
        (
            {"developer": "system"}.get(message["role"], message["role"]),
            str(message["content"]).strip(),
            [call["function"] for call in message.get("tool_calls") or ()],
        )
        for message in messages
    ]


def _holds(whole: Any, text: str) -> bool:
    """Whether a prompt has a text, whatever the white space in it."""
    if is_chat(whole):
        parts = [part.get("content", part.get("value")) for part in whole if isinstance(part, Mapping)]
    else:
        parts = [whole]
    return "".join(text.split()) in "".join("".join(part.split()) for part in parts if isinstance(part, str))


def _check_answers(row: Mapping[str, Any], tail: Sequence[Mapping[str, Any]], place: str, response: str) -> None:
    """Check that the answer at the end of messages is one of the row's own answers, if it has any."""
    keys = [key for key in (response, "chosen", "rejected") if row.get(key) is not None]
    if not keys:
        return
    answers = {key: row[key] for key in keys}
    for value in answers.values():
        if isinstance(value, str):
            said = {message["content"].strip() for message in tail}
            if {value.strip(), split_content(value)[1].strip()} & {
                *said,
                *(split_content(text)[1].strip() for text in said),
            }:
                return
        elif are_messages(value) and _turns(canonical_messages(value, place))[-len(tail) :] == _turns(tail):
            return
        elif not are_messages(value):
            return  # it is no answer, and what reads it says so
    key = keys[0]
    raise DataError(
        f"{place} has '{key}', {shown(repr(answers[key]))}, and 'messages' that end with another answer, "
        f"{shown(repr(tail[-1]['content']))}; only '{key}' would be read. {_LEAVE_OUT.format('messages')}"
    )


def row_system(row: Mapping[str, Any], place: str) -> Any:
    """Return the system prompt of a row, which some datasets have as ``system_prompt`` or ``system_message``.

    Raises:
        DataError: it has several, and they differ; or one is a list of something else than texts.

    >>> row_system({"system_prompt": "Be brief.", "question": "1+1="}, "row 0")
    'Be brief.'
    """
    names = ("system", "system_prompt", "system_message")
    texts = {name: _system_text(row[name], f"{place}: '{name}'") for name in names if row.get(name) is not None}
    return _one_of(texts, names, place, lambda value: value)


def _system_text(system: Any, where: str) -> Any:
    """Return a system prompt of parts, as Anthropic's clients write one, as a text."""
    if not isinstance(system, list | tuple) or not system:
        return system
    messages = [{"role": "system", "content": [part]} for part in system]
    return "\n\n".join(message["content"] for message in canonical_messages(messages, where))


def row_tools(row: Mapping[str, Any], place: str) -> Any:
    """Return the tools of a row, which some datasets have as ``functions``.

    Raises:
        DataError: it has both, and they differ.

    >>> row_tools({"functions": [{"name": "add"}]}, "row 0")
    [{'name': 'add'}]
    """
    return _one_of(row, ("tools", "functions"), place, lambda tools: canonical_tools(tools, place))


def _one_of(row: Mapping[str, Any], keys: Sequence[str], place: str, canonical: Any) -> Any:
    """Return the value of the first of some fields that has one, and refuse others that differ."""
    values = {key: row[key] for key in keys if isinstance(row.get(key), str | list | tuple) and len(row[key])}
    values = {key: value for key, value in values.items() if not isinstance(value, str) or value.strip()}
    for key in [*values][1:]:
        if canonical(values[key]) != canonical(values[first := next(iter(values))]):
            raise DataError(
                f"{place} has '{first}', {shown(repr(values[first]))}, and '{key}', {shown(repr(values[key]))}, which "
                f"differ; only one of them would be read. {_LEAVE_OUT.format(key)}"
            )
    return next(iter(values.values()), row.get(keys[0]))


def with_system(messages: Sequence[Mapping[str, Any]], system: Any, where: str) -> Any:
    """Return canonical messages that begin with a system message of this text.

    Args:
        messages: may begin with it already.
        system: of the row; anything but a text that is not empty adds nothing.
        where: how errors name the row.

    Raises:
        DataError: they begin with another system message.

    >>> with_system([{"role": "user", "content": "1+1="}], "Be brief.", "row 0")[0]
    {'role': 'system', 'content': 'Be brief.'}
    """
    if not isinstance(system, str) or not system.strip():
        return messages
    if not messages or messages[0]["role"] not in SYSTEM_ROLES:
        return [{"role": "system", "content": system}, *messages]
    if messages[0]["content"] != system:
        raise DataError(
            f"{where} has 'system', {shown(repr(system))}, and its messages begin with another system message, "
            f"{shown(repr(messages[0]['content']))}; leave one of them out"
        )
    return messages
