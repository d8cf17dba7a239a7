r"""Reasoning and answer of a reply, told apart by the marks that models write around reasoning.

**Marks.** ``<think>...</think>`` and the other pairs of `REASONING_MARKS`; and the channels of gpt-oss, where
``final`` is the answer and ``analysis`` and ``commentary`` are reasoning.

**Where reasoning ends.** At the last closing mark, so a mark that the reasoning mentions does not end it early. A
closing mark without an opening one is enough, since many chat templates open reasoning in the prompt.

**A reply that has no answer.** Reasoning that is opened and never closed. A mark in quotation marks or backticks, such
as ```<think>```, opens nothing.
"""

import re
from typing import NamedTuple

__all__ = ["REASONING_MARKS", "Reply", "opening_mark", "split_reasoning"]

REASONING_MARKS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<reasoning>": "</reasoning>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "◁think▷": "◁/think▷",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|begin_of_thought|>": "<|end_of_thought|>",
}
"""The marks that open and close reasoning: DeepSeek, Qwen, GLM and most others; Seed; Mistral; Kimi; Command A; Sky-T1.

They are read in capital letters, too.

>>> REASONING_MARKS["[THINK]"]
'[/THINK]'
"""

_OPENINGS = "|".join(map(re.escape, REASONING_MARKS))
_CLOSINGS = re.compile("|".join(map(re.escape, REASONING_MARKS.values())), re.IGNORECASE)
_OPENING = re.compile(_OPENINGS, re.IGNORECASE)
_OPENED_LAST = re.compile(rf"(?:{_OPENINGS})\s*\Z", re.IGNORECASE)
_MARK = re.compile(rf"{_OPENINGS}|{_CLOSINGS.pattern}", re.IGNORECASE)
_CLOSING_OF = {opening.lower(): closing.lower() for opening, closing in REASONING_MARKS.items()}
_QUOTES = "`\"'"

# gpt-oss; without its special tokens, which most decoders leave out, only the names of roles and channels remain.
_CHANNEL = re.compile(r"<\|channel\|>\s*(?P<name>\w+)[^<]{0,200}(?:<\|constrain\|>\w+)?<\|message\|>")
_CHANNEL_END = re.compile(r"<\|(?:end|return|call|start|channel)\|>")
_BARE_CHANNEL = re.compile(r"analysis(?=[A-Z\"'(])")
_BARE_FINAL = "assistantfinal"


class Reply(NamedTuple):
    """A reply of a model, with its reasoning apart.

    Args:
        answer: the text without its reasoning; empty where reasoning did not end.
        reasoning: without its marks; empty lines join several blocks.
        reasoning_ended: whether there is no reasoning, or all of it ended.

    >>> Reply("4", "2 and 2 are 4.", True).answer
    '4'
    """

    answer: str
    reasoning: str
    reasoning_ended: bool


def split_reasoning(text: str, *, reasoning_open: bool = False) -> Reply:
    """Split a reply into its reasoning and its answer. The module's docstring has the rules; the time is linear.

    Args:
        text: what the model wrote in one turn.
        reasoning_open: whether the prompt ended within reasoning, as those of some chat templates do.

    >>> split_reasoning("<think>Perhaps 8.</think>It is 9.")
    Reply(answer='It is 9.', reasoning='Perhaps 8.', reasoning_ended=True)
    >>> split_reasoning("<think>Perhaps 8. But wait")
    Reply(answer='', reasoning='Perhaps 8. But wait', reasoning_ended=False)
    >>> split_reasoning("Perhaps 8.", reasoning_open=True).reasoning_ended, split_reasoning("It is 9.").answer
    (False, 'It is 9.')
    """
    if (channels := _read_channels(text)) is not None:
        return channels
    openings = [mark for mark in _OPENING.finditer(text) if not _is_quoted(mark)]
    first = {_CLOSING_OF[mark[0].lower()]: mark.start() for mark in reversed(openings)}  # by the mark that closes it
    begin = min(first.values(), default=len(text))
    closing = None
    for mark in _CLOSINGS.finditer(text):
        is_its_own = first.get(mark[0].lower(), len(text)) < mark.start()
        if not _is_quoted(mark) and (is_its_own or mark.start() < begin):
            closing = mark
    start = 0 if closing is None else closing.end()
    opening = next((mark for mark in openings if mark.start() >= start), None)
    if opening is None and closing is None:
        return Reply("", text.strip(), False) if reasoning_open else Reply(text, "", True)
    if opening is not None:
        return Reply("", _without_marks(text), False)
    assert closing is not None
    return Reply(text[closing.end() :].strip(), _without_marks(text[: closing.start()]), True)


def opening_mark(prompt: str) -> str:
    r"""Return the mark with which a prompt opens reasoning at its end, and the white space behind it; else nothing.

    >>> opening_mark("<|im_start|>assistant\n<think>\n"), opening_mark("<think>\n\n</think>\n\n")
    ('<think>\n', '')
    """
    found = _OPENED_LAST.search(prompt)
    return found[0] if found else ""


def _is_quoted(mark: re.Match[str]) -> bool:
    before, after = mark.string[mark.start() - 1 : mark.start()], mark.string[mark.end() : mark.end() + 1]
    return before == after and before in _QUOTES and bool(before)


def _without_marks(text: str) -> str:
    return "\n\n".join(part for part in map(str.strip, _MARK.split(text)) if part)


def _read_channels(text: str) -> Reply | None:
    """Read the channels of gpt-oss; None: the text has none."""
    if "<|channel|>" in text:
        final, thoughts = None, list[str]()
        for channel in _CHANNEL.finditer(text):
            end = _CHANNEL_END.search(text, channel.end())
            content = text[channel.end() : end.start() if end else len(text)].strip()
            if channel["name"] == "final":
                final = content
            else:
                thoughts.append(content)
        return Reply(final or "", "\n\n".join(thoughts), final is not None)
    if _BARE_CHANNEL.match(text):
        reasoning, final_mark, answer = text.removeprefix("analysis").rpartition(_BARE_FINAL)
        return Reply(answer.strip(), reasoning.strip(), True) if final_mark else Reply("", answer.strip(), False)
    return None
