r"""Reasoning and answer of a reply, told apart by the marks that models write around reasoning.

**Marks.** ``<think>...</think>`` and the other pairs of `REASONING_MARKS`; and the channels of gpt-oss, where
``final`` is the answer and ``analysis`` and ``commentary`` are reasoning.

**Where reasoning ends.** At the first mark that closes it. A closing mark without an opening one is enough, since many
chat templates open reasoning in the prompt. Closing marks further on are text of the answer. Where more reasoning is
opened, the answer is what follows the last of it.

**A reply that has no answer.** Reasoning that is opened and never closed. A mark in quotation marks or backticks, such
as ```<think>```, opens and closes nothing.

`find_closing` has the rule for the end of reasoning, also for `nrl.envs.tools.parse`.
"""

import re
from typing import NamedTuple

__all__ = [
    "CHANNEL_HEADER",
    "REASONING_MARKS",
    "Reply",
    "find_closing",
    "find_mark",
    "is_quoted",
    "opening_mark",
    "split_reasoning",
]

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

_ATTRIBUTES = r"(?:\s[^<>\n]{0,100})?>"  # <think id=1>
_OPENINGS = "|".join(re.sub(r"(?<=[a-z])>\Z", lambda _: _ATTRIBUTES, re.escape(mark)) for mark in REASONING_MARKS)
_CLOSINGS = re.compile("|".join(map(re.escape, REASONING_MARKS.values())), re.IGNORECASE)
_OPENING = re.compile(_OPENINGS, re.IGNORECASE)
_OPENED_LAST = re.compile(rf"(?:{_OPENINGS})\s*\Z", re.IGNORECASE)
_MARK = re.compile(rf"{_OPENINGS}|{_CLOSINGS.pattern}", re.IGNORECASE)
_CLOSING_OF = {
    opening.lower(): re.compile(re.escape(closing), re.IGNORECASE) for opening, closing in REASONING_MARKS.items()
}
_CLOSED_AGAIN = re.compile(rf"\A(?:\s*(?:{_CLOSINGS.pattern}))+", re.IGNORECASE)  # models may write the mark twice
_QUOTES, _BEFORE_QUOTATION = "`\"'", "`\"'([{<=,:;+-*/|_"

# gpt-oss; without its special tokens, which most decoders leave out, only the names of roles and channels remain.
_CHANNEL = re.compile(r"<\|channel\|>\s*(?P<name>\w+)[^<]{0,200}(?:<\|constrain\|>\w+)?<\|message\|>")
_CHANNEL_END = re.compile(r"<\|(?:end|return|call|start|channel)\|>")
CHANNEL_HEADER = re.compile(rf"(?:\A|<\|end\|><\|start\|>assistant[^<]{{0,200}}){_CHANNEL.pattern}")
"""What gpt-oss writes in front of a part of its turn, with the end of the part before.

>>> CHANNEL_HEADER.match("<|channel|>final<|message|>Four.")[0]
'<|channel|>final<|message|>'
"""
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
    >>> split_reasoning("<think id=1>Perhaps 8.</think>It is 9.").answer
    'It is 9.'
    >>> split_reasoning("Perhaps 8.", reasoning_open=True).reasoning_ended, split_reasoning("It is 9.").answer
    (False, 'It is 9.')
    """
    if (channels := _read_channels(text)) is not None:
        return channels
    mark = None if reasoning_open else find_mark(text)
    opening = "" if reasoning_open or (mark and not _OPENING.fullmatch(mark[0])) else mark and mark[0]
    start, end = mark.end() if mark and opening else 0, 0
    while opening is not None:
        closing = find_closing(text, start, opening)
        if closing is None:
            return Reply("", _without_marks(text), False)
        end = closing.end()
        following = find_mark(text, end, _OPENING)
        opening, start = (following[0], following.end()) if following else (None, end)
    if not end:
        return Reply(text, "", True)
    return Reply(_CLOSED_AGAIN.sub("", text[end:]).strip(), _without_marks(text[:end]), True)


def find_mark(text: str, start: int = 0, pattern: re.Pattern[str] = _MARK) -> re.Match[str] | None:
    """Return the first mark of reasoning from a place on that is not quoted.

    Args:
        text: a reply.
        start: the place.
        pattern: finds marks.

    >>> find_mark("Write `<think>` or <think>")
    <re.Match object; span=(19, 26), match='<think>'>
    """
    return next((mark for mark in pattern.finditer(text, start) if not is_quoted(mark)), None)


def find_closing(text: str, start: int, opening: str = "") -> re.Match[str] | None:
    """Return the mark that ends reasoning: the first one that is not quoted.

    A model writes the mark as one token where its reasoning ends, and servers and trainers of models take the first.
    Reasoning that mentions the mark quotes it as a rule. Answers show it in templates and code, without quotes, too,
    so the last one would cut into them.

    Args:
        text: a reply.
        start: where in it the reasoning begins.
        opening: the mark that opened it, which only its own closing mark ends; empty: the prompt did, and any does.

    >>> find_closing("I close with `</think>`.</think>It is </think>.", 0).start()
    24
    """
    return find_mark(text, start, _CLOSING_OF[re.sub(r"\s.*", ">", opening.lower())] if opening else _CLOSINGS)


def opening_mark(prompt: str) -> str:
    r"""Return the mark with which a prompt opens reasoning at its end, and the white space behind it; else nothing.

    >>> opening_mark("<|im_start|>assistant\n<think>\n"), opening_mark("<think>\n\n</think>\n\n")
    ('<think>\n', '')
    """
    found = _OPENED_LAST.search(prompt)
    return found[0] if found else ""


def is_quoted(mark: re.Match[str]) -> bool:
    """Return whether a mark is between two equal quotation marks or backticks, the first of which opens a quotation.

    >>> is_quoted(re.search("</think>", "`</think>`")), is_quoted(re.search("</think>", 'is "9"</think>"9"'))
    (True, False)
    """
    text, start, end = mark.string, mark.start(), mark.end()
    quote = text[start - 1 : start]
    return bool(quote) and quote in _QUOTES and text[end : end + 1] == quote and _opens_quotation(text, start - 1)


def _opens_quotation(text: str, at: int) -> bool:
    """Whether a quotation mark stands where a quotation may begin: not behind a word or the end of a sentence."""
    before = text[at - 1 : at]
    return not before or before.isspace() or before in _BEFORE_QUOTATION


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
