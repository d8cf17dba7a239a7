"""Turn tokens: the control tokens that stand around messages, and never within one of the assistant.

An assistant writes other control tokens itself: the marks of reasoning and of calls. Which ones a chat template writes
around messages is seen in a few short conversations, once for each template.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from nrl.data.control_tokens import ControlTokens, control_tokens
from nrl.data.forms import selected_template, to_template_form
from nrl.envs.replies import REASONING_MARKS

__all__ = ["turn_tokens"]

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OF = r"[\W_▁]*of[\W_▁]*"
_SAYS_SO = re.compile(
    rf"(?<![a-z])(?:pad|bos|eos|eot|eom|eod|unk)(?![a-z])|im_(?:start|end|sep)|</?s>"
    rf"|(?:begin|start|end){_OF}(?:text|turn|sentence|document|message|utterance|prompt)",
    re.IGNORECASE,
)
"""The names of tokens for the ends of turns and texts and for padding, which a chat template need not write."""

_FIND: Mapping[str, Any] = {"name": "find", "arguments": {"q": "V"}}
_SYSTEM, _USER = {"role": "system", "content": "S"}, {"role": "user", "content": "U"}
_ANSWER = {"role": "assistant", "content": "A"}
_CALL = {"role": "assistant", "content": "", "tool_calls": [{"id": "nrlprobe0", "type": "function", "function": _FIND}]}
_RESULT = {"role": "tool", "name": "find", "tool_call_id": "nrlprobe0", "content": "R"}
_SCHEMA = {"type": "object", "properties": {"q": {"type": "string", "description": "D"}}, "required": ["q"]}
_TOOLS = [{"type": "function", "function": {"name": "find", "description": "D", "parameters": _SCHEMA}}]

_TOKENS: "WeakKeyDictionary[Any, dict[Any, ControlTokens]]" = WeakKeyDictionary()


def turn_tokens(tokenizer: Any, tools: Sequence[Mapping[str, Any]] | None = None) -> ControlTokens:
    """Return the control tokens that no message of the assistant has: what begins and ends turns and texts, padding.

    Args:
        tokenizer: a transformers tokenizer; without a chat template, only names and roles of tokens tell.
        tools: JSON schemas of functions; some tokenizers have another template where there are any.

    >>> from nrl import tiny
    >>> sorted(turn_tokens(tiny.bpe(["user"])).texts)
    ['<|endoftext|>', '<|im_end|>', '<|im_start|>']
    """
    has_template = getattr(tokenizer, "chat_template", None) is not None
    key = len(tokenizer), selected_template(tokenizer, tools) if has_template else None
    known = _TOKENS.setdefault(tokenizer, {})
    if key not in known:
        control = control_tokens(tokenizer)
        texts = {text for text in control.texts if _SAYS_SO.search(text)}
        texts |= {str(token) for name in _NAMES if (token := getattr(tokenizer, name, None))}
        texts |= _written_around_messages(tokenizer, tools) if has_template else set()
        own = {*REASONING_MARKS, *REASONING_MARKS.values()}
        known[key] = ControlTokens.of((texts & control.texts) - own, tokenizer)
    return known[key]


def _written_around_messages(tokenizer: Any, tools: Sequence[Mapping[str, Any]] | None) -> set[str]:
    """The control tokens that a chat template writes outside of what the assistant writes."""
    template, pattern = selected_template(tokenizer, tools), control_tokens(tokenizer).pattern

    def written(*messages: Mapping[str, Any], offered: bool = False, asking: bool = True) -> str:
        """What the template writes of the messages; nothing if it refuses them."""
        from jinja2 import TemplateError

        try:
            return str(
                tokenizer.apply_chat_template(
                    [dict(message) for message in to_template_form(messages, tokenizer, tools)],
                    tools=_TOOLS if offered else None,
                    chat_template=template,
                    add_generation_prompt=asking,
                    tokenize=False,
                )
            )
        except (TemplateError, TypeError):
            return ""

    def tokens(text: str) -> Counter[str]:
        return Counter(pattern.findall(text))

    around = {*tokens(written(_USER, _ANSWER, _USER)), *tokens(written(_SYSTEM, _USER, _ANSWER, _USER))}
    called = written(_USER, _CALL, asking=False)
    in_call = tokens(called) - tokens(written(_USER, asking=False))
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    end = max((token for token in in_call if token in special and called.rstrip().endswith(token)), key=len, default="")
    # Texts of tools and results may name the marks of calls, to say how to write them
    beside = tokens(written(_USER, offered=True))
    if called:
        beside |= tokens(written(_USER, _CALL, _RESULT)) - tokens(called)
    return around | {end} | (set(beside) - set(in_call))
