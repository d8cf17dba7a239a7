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
from nrl.envs.tools import parse, tool_format
from nrl.errors import DataError, ModelError

__all__ = ["TurnEnds", "has_calls", "turn_ends"]

type _Tools = Sequence[Mapping[str, Any]] | None


class TurnEnds(NamedTuple):
    """What ends the assistant's turns under a chat template: texts, each up to the token that the model samples last.

    Args:
        answer: of an answer; empty: no token ends it.
        call: of a turn that calls tools.
        written: whether the template writes them behind the assistant's message. If not, they are what the message of
            a user, or of a tool, begins with.
    """

    answer: str
    call: str
    written: bool

    def find(self, own: str, tokenizer: Any) -> int:
        """Where a turn ends within what the template wrote for it; -1: nowhere."""
        special = sorted(_special(tokenizer), key=len, reverse=True)
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
    TurnEnds(answer='<|im_end|>', call='<|im_end|>', written=True)
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

    special, every = _special(tokenizer), {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    own = first(behind(answer), every) or behind(answer).rstrip()
    end = own or first(behind(answer, ask), special)
    for arguments in ({"q": "VALUE"}, '{"q": "VALUE"}'):
        function = {"name": name, "arguments": arguments}
        call = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "nrlprobe0", "type": "function", "function": function}],
        }
        with suppress(DataError):
            if not own:
                return TurnEnds(end, first(behind(call, result), special) or end, written=False)
            closing = [token for token in special if behind(call).rstrip().endswith(token)]
            return TurnEnds(end, end if end in behind(call) else max(closing, key=len, default=end), written=True)
    return TurnEnds(end, end, written=bool(own))


def _special(tokenizer: Any) -> set[str]:
    return {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special} | {
        *tokenizer.all_special_tokens
    }


def has_calls(message: Mapping[str, Any], tokenizer: Any, tools: _Tools) -> bool:
    """Whether a message of the assistant calls tools, as a field or within its text."""
    if message.get("tool_calls"):
        return True
    with suppress(ModelError, ValueError):
        return bool(
            parse(str(message.get("content")), tool_format(tokenizer.get_chat_template(tools=tools or []))).calls
        )
    return False
