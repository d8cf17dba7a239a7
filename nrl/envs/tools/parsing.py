"""What a model wrote, taken apart, whichever sampler it comes from.

A text is read once, from left to right. What stands in reasoning is no call. Nothing is guessed and nothing is lost:
what begins like a call is a call, or it is reported as malformed, so that the model can be told.
"""

import re
from typing import NamedTuple

from nrl.envs.replies import REASONING_MARKS, find_closing, find_mark, is_quoted
from nrl.envs.tools.formats import FORMATS, READERS, Format, Malformed, MalformedCall, ToolCall, is_bare_call
from nrl.errors import ModelError

__all__ = ["Parsed", "parse"]

_MARKS = "|".join(map(re.escape, [*REASONING_MARKS, *REASONING_MARKS.values()]))
_CLOSINGS = re.compile("|".join(map(re.escape, REASONING_MARKS.values())), re.IGNORECASE)
_NO_CALLS = Format(re.compile("(?!)"), re.compile("(?!)"), lambda text, stop: iter(()))
_ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "</s>", "<｜end▁of▁sentence｜>")


class Parsed(NamedTuple):
    """What a model wrote, taken apart.

    Args:
        text: without reasoning, calls, and tokens that end a turn; white space around it is cut.
        reasoning: what stood between its markers, likewise cut; an empty line joins several blocks.
        calls: in their order.
        malformed: what could not be read, in its order.
        reasoning_ended: whether all reasoning was closed, also where there is none.

    >>> parse("<think>Easy.</think>Four.", "hermes")
    Parsed(text='Four.', reasoning='Easy.', calls=(), malformed=(), reasoning_ended=True)
    """

    text: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    malformed: tuple[MalformedCall, ...]
    reasoning_ended: bool = True


class _Opened(Exception):
    """The text began within reasoning."""


def parse(text: str, format: str | None, *, reasoning_open: bool = False) -> Parsed:
    """Take apart what a model wrote: its text, its reasoning, its calls, and what is malformed.

    Args:
        text: of one turn, decoded with special tokens kept: some formats have them for markers.
        format: one of `FORMATS`; `tool_format` finds it. None: there are no tools, so nothing is a call.
        reasoning_open: whether the prompt ended within reasoning, as those of templates do that end in ``<think>``.
            If not, a ``</think>`` that nothing opened still ends reasoning, which then began with the text. Where it
            ends is as for `nrl.envs.replies.split_reasoning`.

    Returns:
        Its parts. What follows a ``<think>`` that is never closed is reasoning, and no call.

    Raises:
        ModelError: there is no such format.

    >>> found = parse('One moment.<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call><|im_end|>', "hermes")
    >>> found.text, found.calls
    ('One moment.', (ToolCall(name='add', arguments={'a': 2}, id=None),))
    >>> parse("<think>Easy.</think>Four.", None).reasoning
    'Easy.'
    """
    form = _NO_CALLS if format is None else READERS.get(format)
    if form is None:
        raise ModelError(f"parse: there is no format {format!r} of tool calls; give one of {', '.join(FORMATS)}")
    text = text.rstrip()
    while ended := next((end for end in _ENDS if text.endswith(end)), None):
        text = text.removesuffix(ended).rstrip()
    try:
        return _scan(text, form, reasoning_open)
    except _Opened:
        return _scan(text, form, True)


def _scan(text: str, form: Format, opened: bool) -> Parsed:
    """Read a text that begins in reasoning that the prompt has opened, or outside of any.

    Raises:
        _Opened: the prompt did open reasoning, since something closes it first, and that is no argument of a call.
    """
    stops = re.compile(f"(?P<mark>(?i:{_MARKS}))|{form.opens.pattern}")
    texts: list[str] = []
    thoughts: list[str] = []
    found: list[ToolCall | MalformedCall] = []
    at, ended = 0, True
    opening = "" if opened else None
    while True:
        if opening is not None:
            closing = find_closing(text, at, opening)
            thoughts.append(text[at : closing.start() if closing else len(text)].strip())
            at, opening, ended = closing.end() if closing else len(text), None, closing is not None
        stop = stops.search(text, at)
        texts.append(text[at : stop.start() if stop else len(text)])
        if stop is None:
            break
        if mark := stop["mark"]:
            at = stop.end()
            if is_quoted(stop):
                texts.append(mark)
            elif not _CLOSINGS.fullmatch(mark):
                opening, opened = mark, True
            elif not opened:
                raise _Opened
            elif any(map(str.strip, texts)):  # an answer that shows the mark
                texts.append(mark)
        elif stop[0] == "{" and not is_bare_call(text, stop.start(), texts):
            texts.append("{")
            at = stop.end()
        else:
            more, at = _read(text, stop, form)
            unread = [each.text for each in more if isinstance(each, MalformedCall)]
            if not opened and any(find_mark(each, 0, _CLOSINGS) for each in unread):
                raise _Opened
            found += more
    return Parsed(
        "".join(texts).strip(),
        "\n\n".join(filter(None, thoughts)),
        tuple(each for each in found if isinstance(each, ToolCall)),
        tuple(each for each in found if isinstance(each, MalformedCall)),
        ended,
    )


def _read(text: str, stop: re.Match[str], form: Format) -> tuple[list[ToolCall | MalformedCall], int]:
    """The calls from an opening marker on, and where they end."""
    found: list[ToolCall | MalformedCall] = []
    at = stop.start()
    try:
        for each, end in form.read(text, stop):
            found.append(each)
            at = end
    except Malformed as error:
        another = form.opens.search(text, error.at)
        end = another.start() if another and another[0] != "{" else len(text)
        closed = form.closes.search(text, error.at, end)
        end = closed.end() if closed else end
        found.append(MalformedCall(text[at:end].strip(), error.reason))
        at = end
    return found, at
