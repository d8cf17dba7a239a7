"""From rows to batches: `supervised`, `preferences` and `labelled`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nrl.arguments import checked, described
from nrl.batch import Batch, assign
from nrl.data.checks import Tokenizer, check_text_alone, fields, kind
from nrl.data.messages import (
    REASONING,
    SYSTEM_ROLES,
    before_answers,
    canonical_messages,
    canonical_prompt,
    canonical_tools,
    decoded_messages,
    is_chat,
)
from nrl.data.rendering import answered
from nrl.data.row_fields import (
    check_fields_agree,
    check_reasoning_read,
    row_system,
    row_tools,
    whole_prompt,
    with_system,
)
from nrl.data.suggestions import remedy_for
from nrl.data.templates import FIELD, template_arguments, with_arguments
from nrl.envs.types import Message, Prompt, Task
from nrl.errors import DataError, ModelError

__all__ = ["check_unprompted", "labelled", "preferences", "shared", "sides", "supervised"]


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
    messages ``tool_calls``; the chat template writes both. It may have ``chat_template_kwargs``, variables of the
    template such as ``{"enable_thinking": False}``.

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
        encoded.append(_encoded(prompt, answer, tokenizer, max_tokens, place, row))
    if not encoded:
        raise DataError("supervised: there are no rows; give at least one")
    return assign(Batch({}, batch_size=[len(encoded)]), **_padded(encoded))


def _lesson(row: Task, response: str, place: str) -> tuple[Prompt, str | Sequence[Message]]:
    check_fields_agree(row, place, response=response)
    system = row_system(row, place)
    if row.get(response) is None and row.get("messages") is not None:
        messages = canonical_messages(decoded_messages(row["messages"]), f"{place}: 'messages'")
        if system is None and messages[0]["role"] not in SYSTEM_ROLES and is_chat(row.get("prompt")):
            first = canonical_prompt(row["prompt"], f"{place}: 'prompt'")[0]
            system = first["content"] if first["role"] == "system" else None
        return [], with_system(messages, system, place)
    missing = [field for field in ("prompt", response) if field not in row]
    if missing:
        raise DataError(
            f"{place} has no '{missing[0]}'; it has {fields(row)}. "
            + remedy_for(row, "Rows of a well-known dataset need their format, such as format='gsm8k'.")
            + " An example that is to make no supervised steps first takes warmup=0"
        )
    check_reasoning_read(row, place, response)
    answer = _answer(row[response], f"{place}: '{response}'")
    return _asked(whole_prompt(row, place, answered=True) or row["prompt"], answer, system, place), answer


def _asked(prompt: Any, answer: str | Sequence[Message], system: Any, place: str) -> Any:
    """The prompt of an answer: in the canonical form, behind the system's message of the row."""
    prompt = decoded_messages(prompt)
    if isinstance(prompt, str) and prompt and not isinstance(answer, str):
        prompt = [{"role": "user", "content": prompt}]
    prompt = canonical_prompt(prompt, f"{place}: 'prompt'")
    return with_system(prompt, system, place) if is_chat(prompt) else check_unprompted(prompt, system, place)


def check_unprompted(prompt: Any, system: Any, place: str) -> Any:
    """Return a prompt that is no chat, if the row has no system prompt, which nothing would show.

    Raises:
        DataError: it has one.
    """
    if isinstance(system, str) and system.strip():
        raise DataError(
            f"{place} has 'system', {described(system)}, and its prompt is no chat, so nothing shows it; leave "
            "chat=False out, or write it into the prompt by template='{system} ...'"
        )
    return prompt


def _answer(value: Any, what: str) -> str | Sequence[Message]:
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise DataError(f"{what} is {kind(value)}; give a text, or a list of messages")
    return canonical_messages(value, what)


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
            encoded.append(_encoded(prompt, answer, tokenizer, max_tokens, f"{place}: {side}", row))
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
                f"{place} has no '{field}'; it has {fields(row)}. "
                + remedy_for(row, "Rows of a well-known dataset need their format, such as format='helpsteer3'.")
            )
    chosen, rejected = (
        _answer(decoded_messages(row[field]), f"{place}: '{field}'") for field in ("chosen", "rejected")
    )
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError(f"{place}: 'chosen' is {kind(chosen)} and 'rejected' {kind(rejected)}; give two of one kind")
    check_fields_agree(row, place)
    system, prompt = row_system(row, place), decoded_messages(row.get("prompt"))
    if isinstance(chosen, str) or isinstance(rejected, str):
        if prompt is None:
            raise DataError(f"{place} has no 'prompt', which texts answer; it has {fields(row)}")
        return _asked(whole_prompt(row, place, answered=True) or prompt, chosen, system, place), chosen, rejected
    if not prompt:
        count = shared(chosen, rejected)
        if not count:
            raise DataError(f"{place} has no 'prompt', and 'chosen' and 'rejected' do not begin with the same message")
        common = before_answers(chosen[:count]) or chosen[:count]
        return with_system(common, system, place), chosen[len(common) :], rejected[len(common) :]
    prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    bare = canonical_prompt(prompt, f"{place}: 'prompt'")
    asked = with_system(bare, system, place) if is_chat(bare) else check_unprompted(bare, system, place)
    for begun in (asked, bare, asked[1:] if asked[:1] == [{"role": "system", "content": system}] else asked):
        if all(
            _contents(side[: len(begun)]) == _contents(begun) and len(side) > len(begun) for side in (chosen, rejected)
        ):
            return asked, chosen[len(begun) :], rejected[len(begun) :]
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
    """What each message says; token ids as they are."""
    return [
        (
            *(each.get(name) for name in ("role", "content", *REASONING)),
            [call["function"] for call in each.get("tool_calls") or ()],
        )
        if isinstance(each, Mapping)
        else each
        for each in messages
    ]


type _Encoded = tuple[Tensor, Tensor]


def _encoded(
    prompt: Prompt, answer: str | Sequence[Message], tokenizer: Any, max_tokens: int | None, place: str, row: Task
) -> _Encoded:
    tools = canonical_tools(row_tools(row, place), f"{place}: 'tools'")
    if tools and isinstance(answer, str) and not is_chat(prompt):
        raise DataError(f"{place} has 'tools', and its prompt is no chat, so nothing shows them; give it as messages")
    arguments = template_arguments(row, place)
    if arguments and isinstance(answer, str) and not is_chat(prompt):
        raise DataError(f"{place} has '{FIELD}', and its prompt is no chat, so no template reads it; leave it out")
    try:
        ids, mask = answered(prompt, answer, with_arguments(tokenizer, arguments), tools=tools or None)
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


def _padded(encoded: Sequence[_Encoded]) -> dict[str, Tensor]:
    masks = [mask for _, mask in encoded]
    columns = {
        "input_ids": [ids for ids, _ in encoded],
        "attention_mask": [torch.ones_like(mask) for mask in masks],
        "loss_mask": masks,
    }
    return {name: pad_sequence(column, batch_first=True) for name, column in columns.items()}
