"""The parts of a row: who wrote which of its tokens, and what is in them, from the columns of a batch alone.

All texts are masked (`nrl.log.redacted`) as one text, so that a secret that lies across two parts is in neither.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any, NamedTuple

from torch import Tensor

from nrl.batch.ragged import parts_of
from nrl.envs.tools import parse, tool_format
from nrl.errors import ModelError
from nrl.log import redacted
from nrl.rollout.token_spans import decode, split_text

__all__ = ["RowTranscript", "last_turn", "numbers", "rows_of_episodes", "transcriber"]

_DEPTH = 16  # nesting of the arguments of a call, at most
_THINK = ("<think>", "[THINK]")

# How chat templates open a message, and what closes it, if not the next one.
_MESSAGES = (
    (r"<\|im_start\|>(?P<role>\w+)\n", r"<\|im_end\|>"),
    (r"<\|start_header_id\|>(?P<role>\w+)<\|end_header_id\|>\n\n", r"<\|eo[tm]_id\|>"),
    (r"<start_of_turn>(?P<role>\w+)\n", r"<end_of_turn>"),
    (r"<｜(?P<role>User|Assistant|tool▁output▁begin)｜>", r"<｜tool▁output▁end｜>|<｜end▁of▁sentence｜>"),
    (r"<\|(?P<role>system|user|assistant|observation)\|>\n?", r"(?!)"),
)
# One sign for each entry of _MESSAGES.
_SIGNS = "<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<｜User｜>", "<|observation|>"
_ROLES = {"model": "assistant", "ipython": "tool", "observation": "tool", "tool▁output▁begin": "tool"}
_RESULT = re.compile(r"\s*<tool_response>\n?(.*?)\n?</tool_response>\s*", re.DOTALL)


class RowTranscript(NamedTuple):
    """A row as text.

    Args:
        start: index of its first sampled token; all earlier tokens are the prompt.
        end: number of tokens.
        prompt: text.
        tokens: the text of each token from ``start`` on.
        parts: the parts by author, in order, as values of JSON. Each has ``role`` (``"prompt"``, ``"policy"`` or
            ``"environment"``), ``tokens`` (start and end in the row) and ``text``. A
            part of the policy has its ``reward`` if the batch has rewards of tokens: those from its first token to the
            next turn; None, if the row is invalid. It has ``components``, what that reward is made of, by name, if
            rewards of the batch are made of some. Where the chat template has a known format of tool calls it has what
            `nrl.envs.tools.parse` finds: ``content``, ``reasoning``, ``calls`` and ``malformed``. Other parts
            have ``messages``, each with its ``role`` and ``content``, where they are messages of a known chat template.
    """

    start: int
    end: int
    prompt: str
    tokens: list[str]
    parts: list[dict[str, Any]]


def transcriber(tokenizer: Any) -> Callable[[Mapping[str, Any], int], RowTranscript]:
    """Make the function that takes a row apart.

    Args:
        tokenizer: a transformers tokenizer; its chat template says how calls and messages are written.

    Returns:
        ``(columns, row) -> RowTranscript``. The columns ``[B, ...]`` are ``input_ids`` and ``loss_mask``, and
        optionally ``attention_mask``, ``turns``, ``token_rewards``, ``components`` and ``valid``. Without ``turns`` the
        policy's tokens are those of ``loss_mask``, two turns with nothing between them are one part, and no turn has
        components.

    >>> import torch
    >>> from nrl import tiny
    >>> tokenizer = tiny.tokenizer()
    >>> mask = torch.tensor([[False, True, False, True]])
    >>> row = transcriber(tokenizer)({"input_ids": torch.tensor([tokenizer.encode("1234")]), "loss_mask": mask}, 0)
    >>> [(part["role"], part["text"]) for part in row.parts]
    [('prompt', '1'), ('policy', '2'), ('environment', '3'), ('policy', '4')]
    """
    format, read = _format(tokenizer), _message_reader(tokenizer)

    def transcript(columns: Mapping[str, Any], row: int) -> RowTranscript:
        real = columns["attention_mask"][row].nonzero() if "attention_mask" in columns else None
        width = columns["input_ids"].shape[-1]
        end = width if real is None else int(real.max()) + 1 if len(real) else 0
        turns = _turns(columns, row)[:end].tolist()
        start = next((index for index, turn in enumerate(turns) if turn >= 0), end)
        ids = columns["input_ids"][row, :end].tolist()
        prompt, tokens = decode(tokenizer, ids[:start]), split_text(tokenizer, ids[start:])
        masked = redacted([prompt, *tokens])
        spans, position = list[tuple[bool, int, int]](), 0
        for turn, run in groupby(turns):
            spans.append((turn >= 0, position, position := position + sum(1 for _ in run)))
        parts: list[dict[str, Any]] = []
        for index, (policy, first, stop) in enumerate(spans):
            text = masked[0] if first < start else "".join(masked[1 + first - start : 1 + stop - start])
            role = "policy" if policy else "environment" if parts else "prompt"
            part: dict[str, Any] = {"role": role, "tokens": [first, stop], "text": text}
            if policy:
                until = next((later for wrote, later, _ in spans[index + 1 :] if wrote), width)
                part |= _reward(columns, row, first, until) | _components(columns, row, turns[first])
                if format is not None:
                    opened = bool(parts) and parts[-1]["text"].rstrip().endswith(_THINK)
                    part |= _parse_calls(text, format, opened)
            elif messages := read(text):
                part["messages"] = messages
            parts.append(part)
        return RowTranscript(start, end, prompt, tokens, parts)

    return transcript


def rows_of_episodes(columns: Mapping[str, Any], size: int) -> list[list[int]]:
    """The rows of each episode, in the order of their first ones; without ``episode_ids`` a row each.

    >>> import torch
    >>> rows_of_episodes({"episode_ids": torch.tensor([4, 4, 2, 4])}, 4)
    [[0, 1, 3], [2]]
    """
    ids = columns["episode_ids"].tolist() if "episode_ids" in columns else range(size)
    rows: dict[int, list[int]] = {}
    for row, episode in enumerate(ids):
        rows.setdefault(episode, []).append(row)
    return list(rows.values())


def last_turn(row: RowTranscript, columns: Mapping[str, Tensor], index: int, tokenizer: Any) -> str:
    """Return the last turn of a row without special tokens, as a verifier gets it; empty: no turn."""
    wrote = [part["tokens"] for part in row.parts if part["role"] == "policy"]
    if not wrote:
        return ""
    first, stop = wrote[-1]
    return str(tokenizer.decode(columns["input_ids"][index, first:stop], skip_special_tokens=True))


def numbers(values: Tensor) -> Any:
    """Python numbers with six digits, as many as float32 has; None for those that are not finite.

    >>> import torch
    >>> numbers(torch.tensor([0.1, float("nan")])), numbers(torch.tensor(2.0))
    ([0.1, None], 2.0)
    """
    if values.ndim:
        return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]
    return numbers(values[None])[0]


def _turns(columns: Mapping[str, Tensor], row: int) -> Tensor:
    """``[T]``: the policy's turn of each token; -1: somebody else's."""
    return columns["turns"][row] if "turns" in columns else columns["loss_mask"][row].long() - 1


def _reward(columns: Mapping[str, Tensor], row: int, first: int, until: int) -> dict[str, Any]:
    if "token_rewards" not in columns:
        return {}
    valid = "valid" not in columns or bool(columns["valid"][row])
    return {"reward": numbers(columns["token_rewards"][row, first:until].sum()) if valid else None}


def _components(columns: Mapping[str, Any], row: int, turn: int) -> dict[str, Any]:
    if not {"components", "turns"} <= columns.keys():
        return {}
    components: dict[str, Any] = {}
    for name, column in columns["components"].items():
        values, starts = parts_of(column)
        components[name] = numbers(values[starts[row] + turn])
    return {"components": {name: value for name, value in components.items() if value is not None}}


# --- calls


def _format(tokenizer: Any) -> str | None:
    """Return the format of tool calls; None: the chat template has no known one."""
    with suppress(ModelError, ValueError, AttributeError):
        return tool_format(tokenizer.get_chat_template(tools=[]))
    return None


def _parse_calls(text: str, format: str, reasoning_open: bool) -> dict[str, Any]:
    reply = parse(text, format, reasoning_open=reasoning_open)
    calls = [
        {"name": call.name, "arguments": {key: _to_json(value) for key, value in call.arguments.items()}}
        | ({} if call.id is None else {"id": call.id})
        for call in reply.calls
    ]
    malformed = [{"text": malformed_call.text, "reason": malformed_call.reason} for malformed_call in reply.malformed]
    return {"content": reply.text, "reasoning": reply.reasoning, "calls": calls, "malformed": malformed}


def _to_json(value: Any, depth: int = 1) -> Any:
    """Return a value with finite numbers; values that are nested too deeply become text."""
    if isinstance(value, dict | list) and depth == _DEPTH:
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        return {key: _to_json(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_to_json(item, depth + 1) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- messages


def _message_reader(tokenizer: Any) -> Callable[[str], list[dict[str, str]] | None]:
    """Make the function that finds the messages of a text; None: it has other words than those of messages."""
    template = ""
    with suppress(ValueError, AttributeError):
        template = tokenizer.get_chat_template(tools=[])
    template_index = next((position for position, sign in enumerate(_SIGNS) if sign in template), None)
    if template_index is None:
        return lambda text: None
    opens, closes = map(re.compile, _MESSAGES[template_index])
    added = {str(token) for token in getattr(tokenizer, "added_tokens_decoder", {}).values() if token.special}
    longest_first = sorted(added | set(tokenizer.all_special_tokens), key=len, reverse=True)
    special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def messages(text: str) -> list[dict[str, str]] | None:
        read, between, position = list[dict[str, str]](), list[str](), 0
        while opened := opens.search(text, position):
            between.append(text[position : opened.start()])
            after = opens.search(text, opened.end())
            end = after.start() if after else len(text)
            closed = closes.search(text, opened.end(), end)
            content = text[opened.end() : closed.start() if closed else end]
            role = opened["role"]
            read += _make_messages(_ROLES.get(role, role.lower()), content, last=after is None and closed is None)
            position = closed.end() if closed else end
        between.append(text[position:])
        return None if any(special.sub("", text_between).strip() for text_between in between) else read

    return messages


def _make_messages(role: str, content: str, last: bool) -> list[dict[str, str]]:
    """The messages between two markers: one; results of several calls; none, where the policy is asked to begin."""
    content = content.strip()
    if last and role == "assistant" and content in ("", *_THINK):
        return []
    results: Sequence[str] = _RESULT.findall(content) if role in ("user", "tool") else ()
    if results and not _RESULT.sub("", content):
        return [{"role": "tool", "content": result} for result in results]
    return [{"role": role, "content": content}]
