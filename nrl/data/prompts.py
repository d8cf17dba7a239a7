"""From rows of a source to tasks: the format makes rows of a row, and each gets its prompt."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from nrl.algos import name_of
from nrl.data.checks import check_prompt, check_text_alone, fields, kind, shown
from nrl.data.collating import check_unprompted, shared
from nrl.data.formats import Format, FormatName, format_of
from nrl.data.messages import (
    SYSTEM_ROLES,
    are_messages,
    before_answers,
    canonical_messages,
    canonical_tools,
    decoded_messages,
    is_chat,
)
from nrl.data.row_fields import (
    PROMPT_KEYS,
    check_fields_agree,
    row_system,
    row_tools,
    unread_prompts,
    whole_prompt,
    with_system,
)
from nrl.data.sources import read
from nrl.data.suggestions import remedy_for, suggested_format
from nrl.envs.types import Task
from nrl.errors import DataError

__all__ = ["print_unread", "rows", "tasks_of_row"]


def rows(
    source: str | Path | Sequence[Task | str | Path],
    *,
    format: FormatName | Format | None = None,
    template: str | None = None,
    chat: bool = True,
) -> list[Task]:
    """Read the rows of a source, each with its ``"prompt"``, once and in order.

    The prompt is the first of the fields ``prompt``, ``messages``, ``question`` and ``problem`` that the row has: a
    text, a chat (messages with ``role`` and ``content``) or token ids. If ``messages`` end with the assistant's, the
    prompt leaves that one out. The prompt of two conversations is their common beginning. A text becomes a chat of one
    user message, because instruction-tuned models expect their chat template. With ``chat=False`` it stays a text, as
    base models and tokenizers without a chat template need it.

    Args:
        source: a file (JSON Lines, a JSON array, Parquet, CSV), a pattern such as ``"data/*.jsonl"``, a folder, a
            dataset of the Hugging Face hub such as ``"openai/gsm8k/main:train"``, a list of these, or mappings; see
            `nrl.data.sources.read`.
        format: first makes of each row a row, several or none: a function, or its name in `FORMATS`, or several names
            with ``+`` between, such as ``"sharegpt+turns"``; or the names of columns, such as
            ``{"prompt": "query", "response": "reply"}`` or ``"prompt=query,response=reply"``; see `columns`.
        template: makes the text of the prompt from the fields of the row instead, as `str.format` does:
            ``"Q: {question}\\nA:"``. A brace that stands for itself is doubled.
        chat: whether a text becomes a chat.

    Returns:
        A new dict for each row: its fields and ``"prompt"``.

    Raises:
        DataError: no rows, a row that the format refuses, without a prompt or with one that is none of the three, or
            with pictures, films or sounds, which nothing reads; or a template that does not fit; it names the row.

    >>> rows([{"question": "1+1=", "answer": "2"}])[0]["prompt"]
    [{'role': 'user', 'content': '1+1='}]
    >>> rows([{"question": "1+1=", "answer": "2"}], template="Q: {question}", chat=False)[0]["prompt"]
    'Q: 1+1='
    """
    table, unread = read(source), Counter[tuple[str, str]]()
    made = tasks_of_row(format, template, chat, unread)
    found = [
        task for index, row in enumerate(table.rows) for task in made(row, table.place(index), table.filled(index))
    ]
    if not found:
        kept = " that the format keeps" if format else ""
        raise DataError(f"tasks: {table.name} has no rows{kept}; give at least one")
    print_unread(unread, table.name, len(found))
    return found


def print_unread(unread: Mapping[tuple[str, str], int], name: str, total: int) -> None:
    """Print which fields of prompts are passed over for another one, in how many rows of a source."""
    for (taken, key), count in unread.items():
        where = f"{count} of {total} rows of {name} have '{key}' that is not in their '{taken}'"
        print(f"data: {where}, and '{taken}' alone is read; template= makes the prompt of several fields", flush=True)  # noqa: T201


def tasks_of_row(
    format: FormatName | Format | None, template: str | None, chat: bool, unread: "Counter[tuple[str, str]]"
) -> Callable[[Any, str, bool], list[Task]]:
    """Make the function from a row to its tasks; see `rows`.

    Its arguments are the row, where it stands, and whether its nulls may be filler; see `nrl.data.readers.Table`.
    ``unread`` counts the rows whose prompts nothing reads; see `nrl.data.row_fields.unread_prompts`.

    Raises:
        DataError: there is no format of this name.
    """
    function = format_of(format) if isinstance(format, str | Mapping) else format

    def made(row: Any, place: str, filled: bool) -> list[Task]:
        if not isinstance(row, Mapping):
            raise DataError(f"tasks: {place} is {kind(row)}; give a mapping, such as {{'prompt': '...'}}")
        if function is None:
            return [_task(row, place, template, chat, filled, unread)]
        try:
            found = function(row)
        except DataError as error:
            suggestion = suggested_format(row)
            other = f"; read such rows with format='{suggestion}'" if suggestion not in ("", format) else ""
            raise DataError(f"tasks: {place}: {error}{other}") from error
        except Exception as error:
            fault = shown(f"{type(error).__name__}: {error}")
            raise DataError(f"tasks: {place}: the format {name_of(function)} raised {fault}") from error
        several = [found] if isinstance(found, Mapping) else [] if found is None else found
        if not isinstance(several, Sequence) or not all(isinstance(each, Mapping) for each in several):
            raise DataError(
                f"tasks: {place}: the format {name_of(function)} returned {kind(found)}; return a mapping, a list of "
                "mappings, or None to leave the row out"
            )
        return [_task(each, place, template, chat, filled, unread) for each in several]

    return made


def _task(
    row: Task, place: str, template: str | None, chat: bool, filled: bool, unread: "Counter[tuple[str, str]]"
) -> Task:
    check_text_alone(row, f"tasks: {place}", template or "")
    place = f"tasks: {place}"
    row = _canonical(row, place, filled)
    check_fields_agree(row, place)
    passed_over = unread_prompts(row, place) if template is None else []
    unread.update(passed_over)
    if template is not None:
        prompt: Any = _formatted(template, row, place)
    else:
        prompt = _prompt(row, place)
    if chat and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    system = None if template is not None and "{system" in template else row_system(row, place)
    differs = template is not None or ("prompt", "messages") in passed_over
    if not differs and system is None and is_chat(prompt) and is_chat(row.get("messages")):
        first = canonical_messages(row["messages"], f"{place}: 'messages'")[0]
        system = first["content"] if first["role"] == "system" and prompt[0]["role"] not in SYSTEM_ROLES else None
    return {
        **row,
        "prompt": with_system(prompt, system, place) if is_chat(prompt) else check_unprompted(prompt, system, place),
    }


_CHATS = ("messages", "prompt", "response", "chosen", "rejected")
"""The fields that may hold messages."""


def _canonical(row: Task, place: str, filled: bool) -> dict[str, Any]:
    """The row with its messages and tools in the canonical form."""
    found = dict(row)
    tools: Sequence[Mapping[str, Any]] = ()
    if given := row_tools(row, place):
        with suppress(DataError):  # of a column that is something else; `supervised` refuses it
            found["tools"] = tools = canonical_tools(given, "", filled=filled)
    for key in _CHATS:
        messages: Any = row.get(key) if key == "response" else decoded_messages(row.get(key))
        if are_messages(messages):
            of_arrow = filled and not isinstance(row[key], str)
            found[key] = canonical_messages(messages, f"{place}: '{key}'", tools=tools, filled=of_arrow)
    return found


def _prompt(row: Mapping[str, Any], place: str) -> Any:
    pair = all(isinstance(row.get(side), list | tuple) for side in ("chosen", "rejected"))
    messages = row.get("messages")
    whole = pair or (isinstance(messages, str | list | tuple) and len(messages) > 0)
    given = [key for key in PROMPT_KEYS if row.get(key) is not None]
    key = next((key for key in given if not (whole and isinstance(row[key], str | list) and not row[key])), None)
    if key is None and pair:
        return _shared(row, place)
    key = key or next((key for key in PROMPT_KEYS if key in row), None)
    if key is None:
        raise DataError(
            f"{place} has none of {', '.join(PROMPT_KEYS)}; it has {fields(row)}. "
            + remedy_for(
                row,
                "Rename the field of the prompt by format='prompt=...', or make the prompt with "
                "template='... {field} ...'",
            )
        )
    prompt = row[key]
    if key == "prompt":
        prompt = whole_prompt(row, place) or prompt
    if key == "messages" and is_chat(prompt):
        prompt = before_answers(canonical_messages(prompt, f"{place}: '{key}'")) or prompt
    check_prompt(prompt, f"{place}: '{key}'")
    return prompt


def _shared(row: Mapping[str, Any], place: str) -> Any:
    """The prompt of a pair of conversations: their common beginning, up to the first answer that may differ."""
    chosen, rejected = (canonical_messages(row[side], f"{place}: '{side}'") for side in ("chosen", "rejected"))
    common = chosen[: shared(chosen, rejected)]
    prompt = before_answers(common) or common
    check_prompt(prompt, f"{place}: what 'chosen' and 'rejected' share")
    return prompt


def _formatted(template: str, row: Mapping[str, Any], place: str) -> str:
    try:
        return template.format_map(row)
    except KeyError as error:
        found = f"the template reads {{{error.args[0]}}}, which the row does not have; it has {fields(row)}"
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        found = f"the template {shown(repr(template))} does not fit the row: {error}"
    raise DataError(f"{place}: {found}. A brace that stands for itself is doubled: {{{{ and }}}}")
