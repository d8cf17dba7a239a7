"""From rows to batches: `supervised`, `preferences` and `labelled`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nrl.arguments import checked
from nrl.batch import Batch, assign
from nrl.data.checks import Tokenizer, check_messages, check_text_alone, fields, kind
from nrl.data.rendering import answered
from nrl.envs.contract import Message, Prompt, Task
from nrl.errors import DataError, ModelError

__all__ = ["labelled", "preferences", "shared", "sides", "supervised"]


@checked("supervised")
def supervised(
    rows: Iterable[Task], tokenizer: Tokenizer, *, max_tokens: int | None = None, response: str = "response"
) -> Batch:
    """A batch that teaches each row's response: ``loss_mask`` is true on its tokens and on the one that ends it.

    A row has a prompt and a response. The response is a text, as the model is to write it, or messages, as the chat
    template writes them. Or the row has ``messages``, a conversation, and every message of the assistant is taught. The
    mask covers the tokens that the model has to write, and none that the template writes around them. The prompt has
    the tokens that a sampler would see: no token reaches across its end.

    A row that is a chat may have ``tools``, JSON schemas of functions as `nrl.envs.tools.Tool.schema` is one, and its
    messages ``tool_calls``; the chat template writes both.

    Args:
        rows: each with ``prompt``, which `render` takes, and a response; or with ``messages``.
        tokenizer: a transformers tokenizer.
        max_tokens: the most that a row may have; None: no bound.
        response: the field that holds the response.

    Returns:
        ``input_ids`` ``[B, T]`` int64, ``attention_mask`` and ``loss_mask`` ``[B, T]`` bool, right-padded with zeros.

    Raises:
        DataError: no rows; a row without prompt or response, with more than ``max_tokens`` tokens, with ``tools`` that
            nothing shows, or whose messages the chat template does not write turn by turn (see `turns`); it names the
            row.
        ModelError: the tokenizer has no end-of-sequence token, or no chat template that ends the assistant's messages.

    >>> from nrl import tiny
    >>> batch = supervised([{"prompt": "1+1=", "response": "2"}], tiny.tokenizer())
    >>> batch["loss_mask"].tolist()
    [[False, False, False, False, True, True]]
    """
    encoded = []
    for number, row in enumerate(rows):
        place = f"supervised: row {number}"
        check_text_alone(row, place)
        prompt, answer = _lesson(row, response, place)
        encoded.append(_encoded(prompt, answer, tokenizer, max_tokens, place, row.get("tools")))
    if not encoded:
        raise DataError("supervised: there are no rows; give at least one")
    return assign(Batch({}, batch_size=[len(encoded)]), **_padded(encoded))


def _lesson(row: Task, response: str, place: str) -> tuple[Prompt, str | Sequence[Message]]:
    if response not in row and "messages" in row:
        check_messages(row["messages"], f"{place}: 'messages'")
        return [], row["messages"]
    missing = [field for field in ("prompt", response) if field not in row]
    if missing:
        raise DataError(
            f"{place} has no '{missing[0]}'; it has {fields(row)}. Rows of a well-known dataset need their format, "
            "such as format='gsm8k'; an example that is to make no supervised steps first takes warmup=0"
        )
    return row["prompt"], _answer(row[response], f"{place}: '{response}'")


def _answer(value: Any, what: str) -> str | Sequence[Message]:
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise DataError(f"{what} is {kind(value)}; give a text, or a list of messages")
    check_messages(value, what)
    return value


@checked("preferences")
def preferences(rows: Iterable[Task], tokenizer: Tokenizer, *, max_tokens: int | None = None) -> Batch:
    """A batch of pairs, the chosen response first, for `nrl.algos.preference_loss`.

    ``chosen`` and ``rejected`` are texts, as the model would write them; or messages that follow the prompt; or whole
    conversations, which begin with the prompt or, where the row has none, with the messages that they share. The mask
    covers the model's tokens after the prompt, as in `supervised`.

    Args:
        rows: each with ``chosen`` and ``rejected``, and ``prompt``, which `render` takes.
        tokenizer: a transformers tokenizer.
        max_tokens: the most that a side may have; None: no bound.

    Returns:
        Batch size ``[P, 2]``: ``input_ids`` ``[P, 2, T]`` int64, ``attention_mask`` and ``loss_mask`` ``[P, 2, T]``
        bool, right-padded with zeros.

    Raises:
        DataError: no rows; a row that lacks a side or the prompt, whose sides are not of one kind, or that has more
            than ``max_tokens`` tokens in a side; it names row and side.
        ModelError: as `supervised` does.

    >>> from nrl import tiny
    >>> batch = preferences([{"prompt": "1+1=", "chosen": "2", "rejected": "11"}], tiny.tokenizer())
    >>> batch.batch_size, batch["loss_mask"].int().tolist()
    (torch.Size([1, 2]), [[[0, 0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 1, 1, 1]]])
    """
    encoded = []
    for number, row in enumerate(rows):
        place = f"preferences: row {number}"
        check_text_alone(row, place)
        prompt, *answers = sides(row, place)
        for side, answer in zip(("chosen", "rejected"), answers, strict=True):
            encoded.append(_encoded(prompt, answer, tokenizer, max_tokens, f"{place}: {side}", row.get("tools")))
    if not encoded:
        raise DataError("preferences: there are no rows; give at least one")
    pairs = len(encoded) // 2
    columns = {name: column.unflatten(0, (pairs, 2)) for name, column in _padded(encoded).items()}
    return assign(Batch({}, batch_size=[pairs, 2]), **columns)


@checked("labelled")
def labelled(rows: Iterable[Task], tokenizer: Tokenizer, *, max_tokens: int | None = None) -> Batch:
    """A batch of single answers, each good or bad, for `nrl.algos.kto_loss`.

    A row has a response and a ``label``, true for a good one; or it is a pair as in `preferences`, whose chosen and
    rejected responses become two rows. All chosen ones come first, so that neighbours have different prompts, as
    `nrl.algos.mismatched` needs them.

    Args:
        rows: as `supervised` takes them, with ``label``; or as `preferences` takes them.
        tokenizer: a transformers tokenizer.
        max_tokens: the most that a row may have; None: no bound.

    Returns:
        The columns of `supervised`, and ``desirable`` ``[B]`` bool.

    Raises:
        DataError: as they do; or some rows are labelled and others are pairs, or a label is neither true nor false.
        ModelError: as `supervised` does.

    >>> from nrl import tiny
    >>> batch = labelled([{"prompt": "1+1=", "response": "3", "label": False}], tiny.tokenizer())
    >>> batch["desirable"].tolist()
    [False]
    >>> labelled([{"prompt": "1+1=", "chosen": "2", "rejected": "11"}], tiny.tokenizer())["desirable"].tolist()
    [True, False]
    """
    given = list(rows)
    if not any("label" in row for row in given):
        pairs = preferences(given, tokenizer, max_tokens=max_tokens)
        good = torch.arange(2 * len(pairs)) < len(pairs)
        return assign(cast(Batch, pairs.transpose(0, 1).reshape(-1)), desirable=good)
    for number, row in enumerate(given):
        if not isinstance(row.get("label"), bool):
            found = f"the label {row['label']!r}" if "label" in row else f"no 'label'; it has {fields(row)}"
            raise DataError(
                f"labelled: row {number} has {found}; it is true of a good response, and false of a bad one"
            )
    batch = supervised(given, tokenizer, max_tokens=max_tokens)
    return assign(batch, desirable=torch.tensor([row["label"] for row in given]))


def sides(row: Task, place: str) -> tuple[Prompt, str | Sequence[Message], str | Sequence[Message]]:
    """The prompt of a pair, and the chosen and the rejected answer to it.

    Args:
        row: see `preferences`.
        place: how errors name it.

    Raises:
        DataError: see `preferences`.
    """
    for field in ("chosen", "rejected"):
        if field not in row:
            raise DataError(
                f"{place} has no '{field}'; it has {fields(row)}. Rows of a well-known dataset need their format, "
                "such as format='helpsteer3'"
            )
    chosen, rejected = (_answer(row[field], f"{place}: '{field}'") for field in ("chosen", "rejected"))
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError(f"{place}: 'chosen' is {kind(chosen)} and 'rejected' {kind(rejected)}; give two of one kind")
    if isinstance(chosen, str) or isinstance(rejected, str):
        if "prompt" not in row:
            raise DataError(f"{place} has no 'prompt', which texts answer; it has {fields(row)}")
        return row["prompt"], chosen, rejected
    if "prompt" not in row:
        count = shared(chosen, rejected)
        if not count:
            raise DataError(f"{place} has no 'prompt', and 'chosen' and 'rejected' do not begin with the same message")
        return chosen[:count], chosen[count:], rejected[count:]
    prompt = row["prompt"]
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if all(_contents(side[: len(asked)]) == _contents(asked) and len(side) > len(asked) for side in (chosen, rejected)):
        return asked, chosen[len(asked) :], rejected[len(asked) :]
    for field, side in (("chosen", chosen), ("rejected", rejected)):
        if side[0]["role"] != "assistant":
            raise DataError(
                f"{place}: '{field}' begins with neither the prompt nor an answer of the assistant to it; give both "
                "sides either way, or leave the prompt out where they hold it"
            )
    return asked, chosen, rejected


def shared(chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """The number of messages that two conversations begin with alike; at least one of each is left over."""
    most = max(0, min(len(chosen), len(rejected)) - 1)
    pairs = zip(_contents(chosen), _contents(rejected), strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b or index == most), most)


def _contents(messages: Any) -> list[Any]:
    return [(each["role"], each["content"]) if isinstance(each, Mapping) else each for each in messages]


type _Encoded = tuple[Tensor, Tensor]


def _encoded(
    prompt: Prompt, answer: str | Sequence[Message], tokenizer: Any, max_tokens: int | None, place: str, tools: Any
) -> _Encoded:
    if tools:
        _check_tools(tools, prompt, answer, place)
    try:
        ids, mask = answered(prompt, answer, tokenizer, tools=tools or None)
    except DataError as error:
        raise DataError(f"{place}: {error}") from error
    except ModelError as error:
        raise ModelError(f"{place}: {error}") from error
    if max_tokens is not None and len(ids) > max_tokens:
        raise DataError(
            f"{place} has {len(ids)} tokens ({mask.index(True)} of them the prompt's), more than "
            f"max_tokens={max_tokens}; leave it out or raise max_tokens"
        )
    return torch.tensor(ids), torch.tensor(mask)


def _check_tools(tools: Any, prompt: Prompt, answer: str | Sequence[Message], place: str) -> None:
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise DataError(f"{place}: 'tools' is {kind(tools)}; give a list of JSON schemas of functions")
    if wrong := [tool for tool in tools if not isinstance(tool, Mapping)]:
        raise DataError(f"{place}: 'tools' is a list of {kind(wrong[0])}; give a list of JSON schemas of functions")
    if isinstance(answer, str) and (isinstance(prompt, str) or not isinstance(prompt[0], Mapping)):
        raise DataError(f"{place} has 'tools', and its prompt is no chat, so nothing shows them; give it as messages")


def _padded(encoded: Sequence[_Encoded]) -> dict[str, Tensor]:
    masks = [mask for _, mask in encoded]
    columns = {
        "input_ids": [ids for ids, _ in encoded],
        "attention_mask": [torch.ones_like(mask) for mask in masks],
        "loss_mask": masks,
    }
    return {name: pad_sequence(column, batch_first=True) for name, column in columns.items()}
