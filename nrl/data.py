"""Data: rows of files as endless streams of tasks, and their rendering into tokens.

A row is a mapping. What its ``"prompt"`` is, is decided here, once: chat messages, plain text or token ids. `render`
turns any of the three into token ids; `supervised` does so for rows that also have a response.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nrl.batch import Batch, assign
from nrl.envs import arithmetic
from nrl.envs.base import Message, Prompt, Task
from nrl.errors import DataError, ModelError
from nrl.stream import Source, counting

__all__ = ["PROMPT_KEYS", "read_jsonl", "render", "rows", "supervised", "tasks"]

PROMPT_KEYS = ("prompt", "messages", "question", "problem")
"""Where a row's prompt is looked for; the first that the row has is taken.

>>> PROMPT_KEYS[0]
'prompt'
"""

_GENERATED: dict[str, Callable[[int, int], Task]] = {"arithmetic": arithmetic.task}


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a JSON Lines file: UTF-8, one object a line. Blank lines are passed over.

    Args:
        path: of the file.

    Returns:
        A dict for each row, in order.

    Raises:
        DataError: no file that can be read, no rows, or a line that is no JSON object in UTF-8; it names the line.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "sums.jsonl"
    ...     _ = path.write_text('{"question": "1+1=", "answer": "2"}\\n')
    ...     read_jsonl(path)
    [{'question': '1+1=', 'answer': '2'}]
    """
    return [row for _, row in _lines(path)]


def _lines(path: str | Path) -> list[tuple[str, dict[str, Any]]]:
    """Each row with where it stands, as errors say it."""
    if Path(path).is_dir():
        raise DataError(f"read_jsonl: {path} is a folder; give a file, one JSON object a line")
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise DataError(f"read_jsonl: there is no file {path} (looked in {Path.cwd()})") from None
    except OSError as error:
        raise DataError(f"read_jsonl: {path} cannot be read: {error.strerror}") from error
    content = content.removeprefix(b"\xef\xbb\xbf")  # some editors begin a file with a byte-order mark
    found: list[tuple[str, dict[str, Any]]] = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            place = f"{path}, line {number}"
            found.append((place, _object(line, place)))
    if not found:
        raise DataError(f"read_jsonl: {path} has no rows; it must hold one JSON object a line")
    return found


def _object(line: bytes, place: str) -> dict[str, Any]:
    try:
        text = line.decode().strip()
        row = json.loads(text)
    except UnicodeDecodeError as error:
        found = f"invalid UTF-8 (byte {line[error.start]:#04x} at position {error.start}); save the file as UTF-8"
        raise DataError(f"read_jsonl: {place}: {found}") from None
    except (ValueError, RecursionError) as error:
        found = f"invalid JSON ({error}): {_shown(text)}; each line must be one JSON object"
        raise DataError(f"read_jsonl: {place}: {found}") from None
    if not isinstance(row, dict):
        found = f"{_kind(row)}, not an object: {_shown(text)}; each line must be one JSON object"
        raise DataError(f"read_jsonl: {place}: {found}")
    return row


def _shown(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def _kind(value: Any) -> str:
    return "nothing (null)" if value is None else f"a {type(value).__name__}"


def rows(source: str | Path | Sequence[Task], *, template: str | None = None, chat: bool = True) -> list[Task]:
    """The rows of a source, each with its ``"prompt"``, once and in order: what an evaluation goes through.

    The prompt is what the row has under the first of ``prompt``, ``messages``, ``question`` and ``problem``: a text, a
    chat (messages with ``role`` and ``content``) or token ids. A text becomes a chat of one user message, because
    models that are made to answer expect their chat template; with ``chat=False`` it stays a text, which is what base
    models and tokenizers without a chat template need.

    Args:
        source: a JSON Lines file, or mappings.
        template: makes the text of the prompt from the fields of the row instead, as `str.format` does:
            ``"Q: {question}\\nA:"``. A brace that stands for itself is doubled.
        chat: whether a text becomes a chat.

    Returns:
        A new dict for each row: its fields and ``"prompt"``.

    Raises:
        DataError: no rows, a row without a prompt or with one that is none of the three, or a template that does not
            fit; it names the row.

    >>> rows([{"question": "1+1=", "answer": "2"}])[0]["prompt"]
    [{'role': 'user', 'content': '1+1='}]
    >>> rows([{"question": "1+1=", "answer": "2"}], template="Q: {question}", chat=False)[0]["prompt"]
    'Q: 1+1='
    """
    if isinstance(source, str | Path):
        placed: list[tuple[str, Any]] = list(_lines(source))
    else:
        placed = [(f"row {number}", row) for number, row in enumerate(source)]
        if not placed:
            raise DataError("tasks: the source has no rows; give at least one")
    return [_task(row, place, template, chat) for place, row in placed]


def _task(row: Any, place: str, template: str | None, chat: bool) -> Task:
    if not isinstance(row, Mapping):
        raise DataError(f"tasks: {place} is {_kind(row)}; give a mapping, such as {{'prompt': '...'}}")
    if template is not None:
        prompt: Any = _formatted(template, row, place)
    else:
        key = next((key for key in PROMPT_KEYS if key in row), None)
        if key is None:
            raise DataError(
                f"tasks: {place} has none of {', '.join(PROMPT_KEYS)}; it has {_keys(row)}. Rename the field of the "
                "prompt, or make the prompt with template='... {field} ...'"
            )
        prompt = row[key]
        _check_prompt(prompt, f"tasks: {place}: '{key}'")
    if chat and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    return {**row, "prompt": prompt}


def _keys(row: Mapping[Any, Any]) -> str:
    return ", ".join(map(str, row)) or "no fields"


def _formatted(template: str, row: Mapping[str, Any], place: str) -> str:
    try:
        return template.format_map(row)
    except KeyError as error:
        found = f"the template reads {{{error.args[0]}}}, which the row does not have; it has {_keys(row)}"
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        found = f"the template {_shown(repr(template))} does not fit the row: {error}"
    raise DataError(f"tasks: {place}: {found}. A brace that stands for itself is doubled: {{{{ and }}}}")


def _check_prompt(prompt: Any, what: str) -> None:
    """A text, a chat that waits for an answer, or token ids; none of them empty."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise DataError(f"{what} is {_kind(prompt)}; give a text, a list of messages, or a list of token ids")
    if not prompt:
        raise DataError(f"{what} is empty; give a text, at least one message, or at least one token id")
    if isinstance(prompt, str):
        return
    if isinstance(prompt[0], Mapping):
        for number, message in enumerate(prompt):
            _check_message(message, f"{what}: message {number}")
        if prompt[-1]["role"] == "assistant":
            raise DataError(f"{what} ends with the assistant's message, which leaves nothing to answer; leave it out")
        return
    for position, token in enumerate(prompt):
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            found = _shown(repr(token))
            raise DataError(f"{what}: entry {position} is {found}; give a list of messages, or of token ids from 0")


def _check_message(message: Any, what: str) -> None:
    if not isinstance(message, Mapping):
        raise DataError(f"{what} is {_kind(message)}; give {{'role': ..., 'content': ...}}")
    for field in ("role", "content"):
        if field not in message:
            raise DataError(f"{what} has no '{field}'; it has {_keys(message)}")
        if not isinstance(message[field], str):
            raise DataError(f"{what}: '{field}' is {_kind(message[field])}; give a text")


def tasks(
    source: str | Path | Sequence[Task],
    *,
    seed: int = 0,
    template: str | None = None,
    chat: bool = True,
    shuffle: bool = True,
) -> Source[Task]:
    """An endless stream of tasks, each epoch in a new order, which is a function of ``(seed, epoch)``.

    Args:
        source: a JSON Lines file, mappings, or ``"arithmetic"``, the generated sums of `nrl.envs.arithmetic`, whose
            prompts stay plain text.
        seed: of the order; of the sums themselves, where they are generated.
        template: see `rows`.
        chat: see `rows`.
        shuffle: False: every epoch in the order of the source.

    Returns:
        A stream with ``take(n)``, ``state()`` and ``restore(state)``. Its state is the number of tasks taken, over all
        epochs; restoring it presumes the same source and seed.

    Raises:
        DataError: as `rows` does; a negative seed; a template for generated sums.

    >>> stream = tasks([{"prompt": "a"}, {"prompt": "b"}], seed=1, chat=False)
    >>> sorted(task["prompt"] for task in stream.take(2)), stream.state()
    (['a', 'b'], {'cursor': 2})
    >>> tasks("arithmetic").take(1)[0]["prompt"]
    '17+12='
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise DataError(f"tasks: seed is {seed!r}; it must be an integer that is not negative")
    if isinstance(source, str) and source in _GENERATED:
        if template is not None:
            raise DataError(f"tasks: '{source}' makes its own prompts, so it takes no template; leave it out")
        return counting(partial(_GENERATED[source], seed), name="data.tasks")
    if isinstance(source, str) and not Path(source).exists():
        raise DataError(
            f"tasks: '{source}' is neither a file (looked in {Path.cwd()}) nor one of the generated sources: "
            f"{', '.join(sorted(_GENERATED))}"
        )
    found = rows(source, template=template, chat=chat)

    @lru_cache(maxsize=2)
    def order(epoch: int) -> list[int]:
        permutation: list[int] = np.random.default_rng([seed, epoch]).permutation(len(found)).tolist()
        return permutation

    def at(index: int) -> Task:
        epoch, position = divmod(index, len(found))
        return dict(found[order(epoch)[position] if shuffle else position])

    return counting(at, name="data.tasks")


def render(prompt: Prompt, tokenizer: Any) -> list[int]:
    """The token ids of a prompt, ready to be completed.

    A text is encoded with the special tokens that the tokenizer puts before a text, such as the one for its beginning;
    those that the text itself begins with are not doubled, and what the tokenizer would put after it is left out. A
    chat goes through the tokenizer's chat template, up to where the assistant's answer begins. Ids stay as they are.

    Args:
        prompt: a text, messages with ``role`` and ``content``, or token ids.
        tokenizer: a transformers tokenizer.

    Returns:
        At least one token id.

    Raises:
        DataError: a prompt that is none of the three, that is empty, that the chat template refuses, or that has ids
            outside of the vocabulary.
        ModelError: a chat, for a tokenizer that has no chat template.

    >>> from nrl import tiny
    >>> render("7+12=", tiny.tokenizer())
    [28, 16, 22, 23, 34]
    """
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    _check_prompt(prompt, "render: the prompt")
    if isinstance(prompt, str):
        return _encoded(prompt, tokenizer)
    if isinstance(prompt[0], Mapping):
        return _chat(cast(Sequence[Message], prompt), tokenizer)
    ids = list(cast(Sequence[int], prompt))
    if max(ids) >= len(tokenizer):
        raise DataError(f"render: the prompt has the token id {max(ids)}; the tokenizer's last is {len(tokenizer) - 1}")
    return ids


def _encoded(text: str, tokenizer: Any) -> list[int]:
    bare = list(tokenizer.encode(text, add_special_tokens=False))
    if tokenizer.num_special_tokens_to_add() == 0:  # encoding is the dearest part of a short rollout
        return bare
    full = list(tokenizer.encode(text))
    starts = (start for start in range(len(full)) if full[start : start + len(bare)] == bare)
    before = full[: next(starts, 0)]
    return bare if bare[: len(before)] == before else before + bare


def _chat(messages: Sequence[Message], tokenizer: Any) -> list[int]:
    from jinja2 import TemplateError

    if getattr(tokenizer, "chat_template", None) is None:
        raise ModelError(
            "render: the prompt is a chat, and the tokenizer has no chat template, which is usual for base models. "
            "Give prompts as plain text (data.tasks with chat=False), take a model with a chat template, or set "
            "tokenizer.chat_template"
        )
    try:
        return list(
            tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, tokenize=True, return_dict=False
            )
        )
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(f"render: the chat template refuses the messages of the roles {roles}: {error}") from error


def supervised(
    rows: Iterable[Task], tokenizer: Any, *, max_tokens: int | None = None, response: str = "response"
) -> Batch:
    """A batch that teaches each row's response: ``loss_mask`` is true on its tokens and on the one that ends it.

    Prompt and response are encoded apart and put together, so that no token reaches across the boundary and the prompt
    is what a sampler meets. The end-of-sequence token is added where the response does not end with it.

    Args:
        rows: each with ``prompt``, which `render` takes, and a response, a text.
        tokenizer: a transformers tokenizer.
        max_tokens: the most that a row may have; None: no bound.
        response: the field that holds the response.

    Returns:
        ``input_ids`` ``[B, T]`` int64, ``attention_mask`` and ``loss_mask`` ``[B, T]`` bool, right-padded with zeros.

    Raises:
        DataError: no rows; a row without prompt or response, or with more than ``max_tokens`` tokens; it names the row.
        ModelError: the tokenizer has no end-of-sequence token.

    >>> from nrl import tiny
    >>> batch = supervised([{"prompt": "1+1=", "response": "2"}], tiny.tokenizer())
    >>> batch["loss_mask"].tolist()
    [[False, False, False, False, True, True]]
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise ModelError(
            "supervised: the tokenizer has no end-of-sequence token to end responses with; set tokenizer.eos_token"
        )
    ids: list[Tensor] = []
    masks: list[Tensor] = []
    for number, row in enumerate(rows):
        missing = [field for field in ("prompt", response) if field not in row]
        if missing:
            raise DataError(f"supervised: row {number} has no '{missing[0]}'; it has {_keys(row)}")
        if not isinstance(row[response], str):
            raise DataError(f"supervised: row {number}: '{response}' is {_kind(row[response])}; give a text")
        try:
            prompt = render(row["prompt"], tokenizer)
        except DataError as error:
            raise DataError(f"supervised: row {number}: {error}") from error
        answer = tokenizer.encode(row[response], add_special_tokens=False)
        answer += [end] if answer[-1:] != [end] else []
        ids.append(torch.tensor(prompt + answer))
        masks.append(torch.arange(len(ids[-1])) >= len(prompt))
        if max_tokens is not None and len(ids[-1]) > max_tokens:
            raise DataError(
                f"supervised: row {number} has {len(ids[-1])} tokens ({len(prompt)} of them the prompt's), more than "
                f"max_tokens={max_tokens}; leave it out or raise max_tokens"
            )
    if not ids:
        raise DataError("supervised: there are no rows; give at least one")
    columns = {"input_ids": ids, "attention_mask": [torch.ones_like(mask) for mask in masks], "loss_mask": masks}
    padded = {name: pad_sequence(column, batch_first=True) for name, column in columns.items()}
    return assign(Batch({}, batch_size=[len(ids)]), **padded)
