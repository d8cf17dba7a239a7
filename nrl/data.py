"""Data: rows of files as endless streams of tasks, and their rendering into tokens.

A row is a mapping. What its ``"prompt"`` is, is decided here, once: chat messages, plain text or token ids. `render` turns
any of the three into token ids; `supervised` does so for rows that also have a response.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nrl.batch import Batch, assign
from nrl.envs import arithmetic
from nrl.envs.arithmetic import Counted
from nrl.errors import DataError, ModelError

__all__ = ["PROMPT_KEYS", "read_jsonl", "render", "rows", "supervised", "tasks"]

PROMPT_KEYS = ("prompt", "messages", "question", "problem")
"""Where a row's prompt is looked for; the first that the row has is taken.

>>> PROMPT_KEYS[0]
'prompt'
"""

_GENERATED: dict[str, Callable[[int], Counted[dict[str, Any]]]] = {"arithmetic": arithmetic.tasks}


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
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise DataError(
            f"read_jsonl: {place}: invalid UTF-8 (byte {line[error.start]:#04x} at position {error.start}); save it as UTF-8"
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"read_jsonl: {place}: invalid JSON ({error}): {_shown(line.decode().strip())}; each line must be one JSON object"
        ) from None
    if not isinstance(row, dict):
        raise DataError(
            f"read_jsonl: {place}: found {_kind(row)} where an object belongs: {_shown(line.decode().strip())}; each line "
            'must be one JSON object, such as {"prompt": "..."}'
        )
    return row


def _shown(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def _kind(value: Any) -> str:
    return "nothing (null)" if value is None else f"a {type(value).__name__}"


def rows(
    source: str | Path | Sequence[Mapping[str, Any]], *, template: str | None = None, chat: bool = True
) -> list[dict[str, Any]]:
    """The rows of a source, each with its ``"prompt"``, once and in order: what an evaluation goes through.

    The prompt is what the row has under the first of ``prompt``, ``messages``, ``question`` and ``problem``: a text, a chat
    (messages with ``role`` and ``content``) or token ids. A text becomes a chat of one user message, because models that
    are post-trained expect their chat template; with ``chat=False`` it stays a text, which is what base models and
    tokenizers without a chat template need.

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


def _task(row: Any, place: str, template: str | None, chat: bool) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise DataError(f"tasks: {place} is {_kind(row)}; give a mapping, such as {{'prompt': '...'}}")
    if template is not None:
        prompt: Any = _formatted(template, row, place)
    else:
        key = next((key for key in PROMPT_KEYS if key in row), None)
        if key is None:
            raise DataError(
                f"tasks: {place} has none of {', '.join(PROMPT_KEYS)}; it has {_keys(row)}. Name the prompt so, or make it "
                "with template='... {field} ...'"
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
        raise DataError(
            f"tasks: {place}: the template reads {{{error.args[0]}}}, which the row does not have; it has {_keys(row)}. "
            "A brace that stands for itself is doubled: {{ and }}"
        ) from None
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        raise DataError(
            f"tasks: {place}: the template {_shown(repr(template))} does not fit the row: {error}. It is filled in as by "
            "str.format, with the fields of the row; a brace that stands for itself is doubled: {{ and }}"
        ) from None


def _is_chat(prompt: Any) -> bool:
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str | bytes)
        and any(isinstance(message, Mapping) for message in prompt)
    )


def _check_prompt(prompt: Any, what: str) -> None:
    """A text, a chat that waits for an answer, or token ids; none of them empty."""
    if isinstance(prompt, str):
        if not prompt:
            raise DataError(f"{what} is an empty text; give a prompt or leave the row out")
    elif _is_chat(prompt):
        _check_messages(prompt, what)
        if prompt[-1]["role"] == "assistant":
            raise DataError(
                f"{what} ends with the assistant's message, so nothing is left to answer; leave that message out of the "
                "prompt"
            )
    else:
        _check_ids(prompt, what)


def _check_messages(messages: Sequence[Any], what: str) -> None:
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise DataError(f"{what}: message {number} is {_kind(message)}; give {{'role': ..., 'content': ...}}")
        for field in ("role", "content"):
            if not isinstance(message.get(field), str):
                found = _kind(message[field]) if field in message else f"only {_keys(message)}"
                raise DataError(f"{what}: message {number} has {found} where a text '{field}' belongs")


def _check_ids(ids: Any, what: str) -> None:
    if not isinstance(ids, Sequence) or isinstance(ids, bytes):
        raise DataError(f"{what} is {_kind(ids)}; give a text, a list of messages, or a list of token ids")
    if not ids:
        raise DataError(f"{what} is empty; give at least one message or token id")
    for position, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise DataError(
                f"{what}: entry {position} is {_shown(repr(token))}; give messages or token ids, which are integers from 0"
            )


def tasks(
    source: str | Path | Sequence[Mapping[str, Any]],
    *,
    seed: int = 0,
    template: str | None = None,
    chat: bool = True,
    shuffle: bool = True,
) -> Counted[dict[str, Any]]:
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
        return _GENERATED[source](seed)
    if isinstance(source, str) and not Path(source).exists():
        raise DataError(
            f"tasks: '{source}' is neither a file (looked in {Path.cwd()}) nor one of the generated sources: "
            f"{', '.join(sorted(_GENERATED))}"
        )
    found = rows(source, template=template, chat=chat)

    @lru_cache(maxsize=2)
    def order(epoch: int) -> list[int]:
        return np.random.default_rng([seed, epoch]).permutation(len(found)).tolist()

    def at(index: int) -> dict[str, Any]:
        epoch, position = divmod(index, len(found))
        return dict(found[order(epoch)[position] if shuffle else position])

    return Counted(at, name="data.tasks")


def render(prompt: Any, tokenizer: Any) -> list[int]:
    """The token ids of a prompt, ready to be completed.

    A text is encoded with the special tokens that the tokenizer puts before a text. They are not doubled where the text
    begins with the beginning-of-sequence token itself, and an end-of-sequence token that it would append is left out. A chat is
    rendered by the tokenizer's chat template up to where the assistant's answer begins. Ids are checked and kept.

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
    if isinstance(prompt, str):
        ids = _encoded(prompt, tokenizer)
        if not ids:
            raise DataError(
                "render: the prompt is an empty text, and the tokenizer adds no special tokens; give some text"
            )
        return ids
    if _is_chat(prompt):
        _check_messages(prompt, "render: the prompt")
        return _chat(prompt, tokenizer)
    _check_ids(prompt, "render: the prompt")
    size = len(tokenizer)
    if max(prompt) >= size:
        raise DataError(f"render: the prompt has the token id {max(prompt)}; the tokenizer's last is {size - 1}")
    return list(prompt)


def _encoded(text: str, tokenizer: Any) -> list[int]:
    ids: list[int] = list(tokenizer.encode(text))
    begin, end = tokenizer.bos_token, tokenizer.eos_token
    if begin and text.startswith(begin) and ids[:2] == [tokenizer.bos_token_id] * 2:
        ids = ids[1:]
    if end and not text.endswith(end) and ids[-1:] == [tokenizer.eos_token_id] and begin != end:
        ids = ids[:-1]
    return ids


def _chat(messages: Sequence[Mapping[str, str]], tokenizer: Any) -> list[int]:
    from jinja2 import TemplateError

    if getattr(tokenizer, "chat_template", None) is None:
        raise ModelError(
            "render: the prompt is a chat, and the tokenizer has no chat template, as is usual for base models. Set "
            "tokenizer.chat_template, take a model that has one, or give prompts as plain text: data.tasks(..., chat=False)"
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
    rows: Iterable[Mapping[str, Any]], tokenizer: Any, *, max_tokens: int | None = None, response: str = "response"
) -> Batch:
    """A batch that teaches each row's response: ``loss_mask`` is true on its tokens and on the one that ends it.

    Prompt and response are encoded apart and put together, because that is how a sampler meets the prompt; a token never
    reaches across the boundary. The end-of-sequence token is added where the response does not end with it.

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
    sequences: list[tuple[list[int], int]] = []
    for number, row in enumerate(rows):
        missing = [field for field in ("prompt", response) if field not in row]
        if missing:
            raise DataError(f"supervised: row {number} has no '{missing[0]}'; it has {_keys(row)}")
        answer = row[response]
        if not isinstance(answer, str):
            raise DataError(f"supervised: row {number}: '{response}' is {_kind(answer)}; give a text")
        try:
            prompt = render(row["prompt"], tokenizer)
        except DataError as error:
            raise DataError(f"supervised: row {number}: {error}") from error
        ids = tokenizer.encode(answer, add_special_tokens=False)
        sequence = prompt + ids + ([] if ids[-1:] == [end] else [end])
        if max_tokens is not None and len(sequence) > max_tokens:
            raise DataError(
                f"supervised: row {number} has {len(sequence)} tokens ({len(prompt)} of the prompt), more than "
                f"max_tokens={max_tokens}; leave it out or raise max_tokens"
            )
        sequences.append((sequence, len(prompt)))
    if not sequences:
        raise DataError("supervised: there are no rows; give at least one")
    ids_ = torch.zeros(len(sequences), max(len(sequence) for sequence, _ in sequences), dtype=torch.int64)
    attention, trained = torch.zeros_like(ids_, dtype=torch.bool), torch.zeros_like(ids_, dtype=torch.bool)
    for number, (sequence, start) in enumerate(sequences):
        ids_[number, : len(sequence)] = torch.tensor(sequence)
        attention[number, : len(sequence)] = True
        trained[number, start : len(sequence)] = True
    empty = Batch({}, batch_size=[len(sequences)])
    return assign(empty, input_ids=ids_, attention_mask=attention, loss_mask=trained)
