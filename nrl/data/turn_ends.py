"""What ends the assistant's turns under a chat template.

Most templates write one token behind each message of the assistant. Some write another behind a call, and some none at
all: there the model ends its turn with the token that the next message begins with.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from nrl.data.templates import template_of, templated
from nrl.errors import DataError

__all__ = ["TurnEnds", "special_tokens", "turn_ends"]

type _Tools = Sequence[Mapping[str, Any]] | None


class TurnEnds(NamedTuple):
    """What ends the assistant's turns under a chat template: texts, each up to the token that the model samples last.

    Args:
        answer: of an answer; empty: no token ends it.
        call: of a turn that calls tools.
        written: whether the template writes them behind the assistant's message. If not, they are what the message of
            a user, or of a tool, begins with.
        mark: what the template writes before the name of a tool that is called.
    """

    answer: str
    call: str
    written: bool
    mark: str = ""

    def of(self, message: Mapping[str, Any]) -> str:
        """What ends the turn of a message, which may call tools in a field or in the words of its content."""
        calls = message.get("tool_calls") or (self.mark and self.mark in str(message.get("content")))
        return self.call if calls else self.answer

    def find(self, own: str, tokenizer: Any) -> int:
        """Where a turn ends within what the template wrote for it; -1: nowhere."""
        special = sorted(special_tokens(tokenizer).values(), key=len, reverse=True)
        for end in filter(None, (self.answer, self.call)):
            if (at := own.rfind(end)) >= 0:
                behind = re.sub("|".join(map(re.escape, special)) or "(?!)", "", own[at + len(end) :])
                if not behind.strip():
                    return at + len(end)
        if own.rstrip().endswith(tuple(special)):
            return len(own.rstrip())
        at = own.rfind(self.answer)
        return at if at < 0 else at + len(self.answer)


_ENDS: "WeakKeyDictionary[Any, tuple[Any, TurnEnds]]" = WeakKeyDictionary()


def turn_ends(tokenizer: Any, tools: Sequence[Mapping[str, Any]] | None = None) -> TurnEnds:
    """Return what ends turns under the tokenizer's chat template, found by rendering two short conversations.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        tools: JSON schemas of functions; some tokenizers have another template where there are any.

    >>> from nrl import tiny
    >>> turn_ends(tiny.bpe(["user"]))
    TurnEnds(answer='<|im_end|>', call='<|im_end|>', written=True, mark='')
    """
    key = len(tokenizer), template_of(tokenizer, tools)
    if tokenizer not in _ENDS or _ENDS[tokenizer][0] != key:
        _ENDS[tokenizer] = key, _probed_ends(tokenizer, tools)
    return _ENDS[tokenizer][1]


def _probed_ends(tokenizer: Any, tools: _Tools) -> TurnEnds:
    name = tools[0].get("function", tools[0]).get("name", "find") if tools else "find"
    ask, answer = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "ANSWER"}
    result = {"role": "tool", "name": name, "tool_call_id": "nrlprobe0", "content": "RESULT"}

    def behind(said: Mapping[str, Any], *new: Mapping[str, Any]) -> str:
        """What the template writes behind the answer, or behind a call."""
        text = templated([ask, said, *new], tokenizer, tools=tools)
        if said is answer:
            return text.rpartition("ANSWER")[2]
        return text[len(templated([ask, said], tokenizer, tools=tools)) :] if new else text

    def first(text: str, added: Collection[str]) -> str:
        found = [(at, -len(token)) for token in added if (at := text.find(token)) >= 0]
        return text[: min(found)[0] - min(found)[1]] if found else ""

    special = set(special_tokens(tokenizer).values())
    every = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    own = first(behind(answer), every) or behind(answer).rstrip()
    ends = TurnEnds(own or first(behind(answer, ask), special), "", written=bool(own))
    ends = ends._replace(call=ends.answer)
    for arguments in ({"q": "VALUE"}, '{"q": "VALUE"}'):
        function = {"name": name, "arguments": arguments}
        calls = [{"id": "nrlprobe0", "type": "function", "function": function}]
        call = {"role": "assistant", "content": "", "tool_calls": calls}
        with suppress(DataError):
            text = behind(call)
            if own:
                closing = [token for token in special if text.rstrip().endswith(token)]
                end = own if own in text else max(closing, key=len, default=own)
            else:
                end = first(behind(call, result), special) or ends.answer
            before = text.rpartition("VALUE")[0].rpartition(name)[0].split()
            return ends if end == ends.answer or not before else ends._replace(call=end, mark=before[-1])
    return ends


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the special tokens, as ids and as texts. Marks such as <think> are tokens of some tokenizers, but text."""
    added = {token: str(text) for token, text in tokenizer.added_tokens_decoder.items() if text.special}
    return added | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
