"""Calls of tools as models write them: by real chat templates, and by writers of formats that those do not have."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from transformers.utils.chat_template_utils import render_jinja_template

from nrl.envs.tools import ToolCall
from tests.chat_tokenizers import TEMPLATES

HEADERS = {
    "qwen": "<|im_start|>assistant\n",
    "llama": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "deepseek": "<｜Assistant｜>",
    "mistral": "[/INST]",
}


class Piece(NamedTuple):
    """A part of what a model wrote: text, or a call, of which so many characters say that it is one."""

    text: str
    opens: int = 0


class Written(NamedTuple):
    """What a model wrote, and what of it a parser should find."""

    pieces: Sequence[Piece]
    text: str
    calls: Sequence[ToolCall]

    @property
    def whole(self) -> str:
        return "".join(piece.text for piece in self.pieces)


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@cache
def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


def by_template(name: str, text: str, calls: Sequence[ToolCall]) -> str:
    """What the template makes of an answer, from where the model begins to write to the token that ends its turn."""
    tools = [
        {"type": "function", "function": {"name": each.name, "arguments": each.arguments}, "id": each.id}
        for each in calls
    ]
    if name == "deepseekv3":  # which joins arguments with text; transformers is asked, and not nrl, which knows that
        for tool in tools:
            tool["function"]["arguments"] = dumps(tool["function"]["arguments"])  # type: ignore[index]
    answer: dict[str, Any] = {"role": "assistant", "content": text, "tool_calls": tools}
    messages = [{"role": "user", "content": "Q"}, answer if tools else {"role": "assistant", "content": text}]
    made: Any = render_jinja_template([messages], chat_template=template(name), bos_token="", eos_token="")
    header = next(header for family, header in HEADERS.items() if name.startswith(family))
    return str(made[0][0]).split(header, 1)[1].rstrip("\n")


# --- Writers, each of the text around and of the calls. A call's piece ends where the call is complete.


def hermes(text: str, calls: Sequence[ToolCall]) -> list[Piece]:
    pieces = [Piece(text)]
    for each in calls:
        body = dumps({"name": each.name, "arguments": each.arguments})
        pieces += [Piece("\n"), Piece(f"<tool_call>\n{body}", 11), Piece("\n</tool_call>")]
    return pieces


def qwen3_coder(text: str, calls: Sequence[ToolCall]) -> list[Piece]:
    pieces = [Piece(text)]
    for each in calls:
        parts = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in each.arguments.items()]
        call = f"<tool_call>\n<function={each.name}>\n{''.join(parts)}</function>"
        pieces += [Piece("\n\n"), Piece(call, 11), Piece("\n</tool_call>")]
    return pieces


def llama3_bare(text: str, calls: Sequence[ToolCall]) -> list[Piece]:
    pieces: list[Piece] = []
    for each in calls:
        call = dumps({"name": each.name, "parameters": each.arguments})
        pieces += [Piece(call, len('{"name": "')) if not pieces else Piece(f"; {call}", 3)]
    return pieces or [Piece(text)]


def llama3_tag(text: str, calls: Sequence[ToolCall]) -> list[Piece]:
    pieces = [Piece(text)]
    for place, each in enumerate(calls):
        call = dumps({"type": "function", "name": each.name, "parameters": each.arguments})
        pieces += [Piece(f"; {call}", 3) if place else Piece(f"<|python_tag|>{call}", 14)]
    return pieces


def mistral_list(text: str, calls: Sequence[ToolCall]) -> list[Piece]:
    pieces = [Piece(text)]
    for place, each in enumerate(calls):
        own = {"id": each.id} if each.id else {}
        call = dumps({"name": each.name, "arguments": each.arguments, **own})
        pieces += [Piece(f", {call}", 3) if place else Piece(f"[TOOL_CALLS] [{call}", 12)]
    return [*pieces, Piece("]" if calls else "")]


def mistral_named(text: str, calls: Sequence[ToolCall]) -> list[Piece]:
    pieces = [Piece(text)]
    for each in calls:
        own = f"[CALL_ID]{each.id}" if each.id else ""
        pieces += [Piece(f"[TOOL_CALLS]{each.name}{own}[ARGS]{dumps(each.arguments)}", 12)]
    return pieces


def deepseek_v3(text: str, calls: Sequence[ToolCall]) -> list[Piece]:
    pieces = [Piece(text), Piece("<｜tool▁calls▁begin｜>" if calls else "")]
    for each in calls:
        call = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{each.name}\n```json\n{dumps(each.arguments)}"
        pieces += [Piece(call, 20), Piece("\n```<｜tool▁call▁end｜>\n")]
    return [*pieces, Piece("<｜tool▁calls▁end｜>" if calls else "")]


def deepseek_v31(text: str, calls: Sequence[ToolCall]) -> list[Piece]:
    pieces = [Piece(text), Piece("<｜tool▁calls▁begin｜>" if calls else "")]
    for each in calls:
        call = f"<｜tool▁call▁begin｜>{each.name}<｜tool▁sep｜>{dumps(each.arguments)}"
        pieces += [Piece(call, 20), Piece("<｜tool▁call▁end｜>")]
    return [*pieces, Piece("<｜tool▁calls▁end｜>" if calls else "")]


type Writer = Callable[[str, Sequence[ToolCall]], list[Piece]]

WRITERS: dict[str, tuple[str, Writer]] = {
    "hermes": ("hermes", hermes),
    "qwen3_coder": ("qwen3_coder", qwen3_coder),
    "llama3, bare": ("llama3", llama3_bare),
    "llama3, tag": ("llama3", llama3_tag),
    "mistral, list": ("mistral", mistral_list),
    "mistral, named": ("mistral", mistral_named),
    "deepseek, V3": ("deepseek", deepseek_v3),
    "deepseek, V3.1": ("deepseek", deepseek_v31),
}

BY_TEMPLATE = {  # a template, and its format
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_5_think": "qwen3_coder",
    "llama3_1": "llama3",
    "llama3_2": "llama3",
    "deepseekv3": "deepseek",
    "mistral_v13": "mistral",
}


def untyped(call: ToolCall) -> ToolCall:
    """A call as the format of Qwen3-Coder keeps it: its template prints lists and objects as JSON, others as Python."""
    texts = {key: dumps(v) if isinstance(v, list | dict) else str(v) for key, v in call.arguments.items()}
    return call._replace(arguments=texts)


def written(writer: str, text: str, calls: Sequence[ToolCall]) -> Written:
    """What a writer makes of them."""
    format, write = WRITERS[writer]
    calls = [untyped(each) if format == "qwen3_coder" else each for each in calls]
    if format != "mistral":
        calls = [each._replace(id=None) for each in calls]
    return Written(write(text, calls), "" if writer == "llama3, bare" and calls else text.strip(), calls)
