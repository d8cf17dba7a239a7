from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor

import nrl
from nrl.batch import Batch, assign, concatenate, forbid_writes, lengths, pad, require
from nrl.batch.columns import COLUMNS
from nrl.batch.values import memoize
from nrl.errors import BatchError, ColumnError, MissingColumn, MutatedBatch

MASK = torch.tensor([[True, True, True], [True, True, False]])


def small(**columns: Any) -> Batch:
    """Two rows of three and two tokens; not locked."""
    ids = torch.tensor([[5, 6, 7], [8, 9, 0]])
    return Batch({"input_ids": ids, "attention_mask": MASK.clone(), **columns}, batch_size=[2])


def media() -> Batch:
    return Batch({"pixels": torch.arange(8.0).view(2, 4), "count": torch.tensor([1, 2])}, batch_size=[2])


def of_dtype(name: str, dtype: torch.dtype) -> Tensor:
    shape = (2, 3) if COLUMNS[name].per == "token" else (2,)
    return torch.ones(*shape, *[4] * COLUMNS[name].entry[0]).to(dtype)


PLAIN = {name: column.dtype for name, column in COLUMNS.items() if column.dtype is not None}


# --- assign


def test_assign_returns_a_new_locked_batch_and_leaves_the_old_one_as_it_was() -> None:
    batch = small(rewards=torch.zeros(2))
    new = assign(batch, rewards=torch.ones(2), advantages=torch.ones(2, 3))
    assert new is not batch
    assert new.is_locked
    assert new["rewards"].tolist() == [1, 1]
    assert not batch.is_locked
    assert sorted(batch.keys()) == ["attention_mask", "input_ids", "rewards"]
    assert batch["rewards"].tolist() == [0, 0]


def test_assign_takes_a_locked_batch() -> None:
    batch = assign(small())
    assert batch.is_locked
    assert assign(batch, rewards=torch.ones(2))["rewards"].tolist() == [1, 1]
    assert "rewards" not in batch.keys()


def test_a_locked_batch_cannot_be_written_to() -> None:
    batch = assign(small())
    with pytest.raises(RuntimeError, match="locked"):
        batch["rewards"] = torch.zeros(2)


def test_assign_waits_for_futures() -> None:
    future: Future[Tensor] = Future()
    future.set_result(torch.tensor([1.0, 2.0]))
    assert assign(small(), rewards=future)["rewards"].tolist() == [1, 2]


def test_assign_raises_what_a_future_raises() -> None:
    future: Future[Tensor] = Future()
    future.set_exception(ZeroDivisionError("on the mesh"))
    with pytest.raises(ZeroDivisionError, match="on the mesh"):
        assign(small(), rewards=future)


def test_columns_are_constants() -> None:
    weights = torch.ones(2, requires_grad=True)
    batch = assign(small(), rewards=weights * 2)
    assert not batch["rewards"].requires_grad
    assert weights.requires_grad


def test_nested_columns_are_constants() -> None:
    weights = torch.ones(2, 4, requires_grad=True)
    batch = assign(small(), media=Batch({"pixels": weights * 2}, batch_size=[2]))
    assert not batch["media", "pixels"].requires_grad
    assert weights.requires_grad


def test_nested_entries_survive_assign() -> None:
    batch = assign(small(media=media()), rewards=torch.ones(2))
    assert batch["media", "pixels"].equal(media()["pixels"])
    assert assign(small(), media=media())["media", "count"].tolist() == [1, 2]


def test_assign_leaves_nested_entries_of_its_batch_as_they_were() -> None:
    batch = small(media=media())
    new = assign(batch, rewards=torch.ones(2))
    assert new["media"].is_locked
    assert not batch["media"].is_locked


def test_assign_leaves_a_nested_argument_as_it_was() -> None:
    argument = media()
    batch = assign(small(), media=argument)
    assert batch["media"].is_locked
    assert not argument.is_locked


def test_nested_entries_need_the_rows_of_the_batch() -> None:
    with pytest.raises(ColumnError, match=r"column 'media' has shape \[3\], but the batch has batch size \[2\]"):
        assign(small(), media=Batch({"pixels": torch.zeros(3, 4)}, batch_size=[3]))


@pytest.mark.parametrize("name", sorted(PLAIN))
def test_every_known_column_is_accepted_in_its_own_dtype(name: str) -> None:
    assert assign(small(), **{name: of_dtype(name, PLAIN[name])})[name].dtype == PLAIN[name]


FLOATS = sorted(name for name, dtype in PLAIN.items() if dtype == torch.float32)


@pytest.mark.parametrize("name", FLOATS)
def test_numbers_may_be_float64(name: str) -> None:
    assert assign(small(), **{name: of_dtype(name, torch.float64)})[name].dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("name", FLOATS)
def test_numbers_may_not_be_of_half_precision_or_whole(name: str, dtype: torch.dtype) -> None:
    message = rf"assign: column '{name}' has dtype {dtype}; it must be torch.float32 \(convert it with .to\(torch.float"
    with pytest.raises(ColumnError, match=message):
        assign(small(), **{name: of_dtype(name, dtype)})


@pytest.mark.parametrize("name", sorted(set(PLAIN) - set(FLOATS)))
def test_masks_and_numbers_of_things_are_not_floats(name: str) -> None:
    with pytest.raises(ColumnError, match=f"assign: column '{name}' has dtype torch.float32; it must be torch"):
        assign(small(), **{name: of_dtype(name, torch.float32)})


def test_an_unknown_column_may_have_any_dtype_and_trailing_shape() -> None:
    batch = assign(small(), mine=torch.ones(2, 6, 4, 5, dtype=torch.float16), other=torch.zeros(2))
    assert batch["mine"].shape == (2, 6, 4, 5)
    nrl.declare(own="token")
    assert assign(small(), own=torch.ones(2, 3, 4, 5, dtype=torch.float16))["own"].shape == (2, 3, 4, 5)


def test_a_column_that_is_not_a_tensor() -> None:
    with pytest.raises(ColumnError, match="assign: column 'rewards' is a list; give a torch tensor"):
        assign(small(), rewards=[1.0, 2.0])


@pytest.mark.parametrize("shape", [(), (3,), (3, 2)])
@pytest.mark.parametrize("name", ["rewards", "mine"])
def test_a_column_without_the_rows_of_the_batch(name: str, shape: tuple[int, ...]) -> None:
    found = str(list(shape)).replace("[", r"\[").replace("]", r"\]")
    message = rf"assign: column '{name}' has shape {found}, but the batch has batch size \[2\]; its first dimensions"
    with pytest.raises(ColumnError, match=message):
        assign(small(), **{name: torch.zeros(shape)})


@pytest.mark.parametrize("shape", [(2,), (2, 4), (2, 3, 1)])
def test_a_column_per_token_is_as_wide_as_input_ids(shape: tuple[int, ...]) -> None:
    message = r"assign: column 'advantages' has shape .*; it is per token, so it must have shape \[2, 3\]"
    with pytest.raises(ColumnError, match=message):
        assign(small(), advantages=torch.zeros(shape))


def test_a_column_per_token_without_input_ids() -> None:
    batch = Batch({}, batch_size=[2])
    assert assign(batch, advantages=torch.zeros(2, 7))["advantages"].shape == (2, 7)
    with pytest.raises(ColumnError, match=r"column 'advantages' has shape \[2\].*must have shape \[2, 'T'\]"):
        assign(batch, advantages=torch.zeros(2))


def test_the_width_is_that_of_input_ids_in_the_same_call() -> None:
    batch = Batch({}, batch_size=[2])
    ids = torch.zeros(2, 4, dtype=torch.int64)
    assert assign(batch, advantages=torch.zeros(2, 4), input_ids=ids)["advantages"].shape == (2, 4)
    with pytest.raises(ColumnError, match="as wide as input_ids"):
        assign(batch, advantages=torch.zeros(2, 3), input_ids=ids)


def test_a_column_per_row_has_no_more_dimensions() -> None:
    message = r"assign: column 'version' has shape \[2, 3\]; it is per row, so it must have shape \[2\]"
    with pytest.raises(ColumnError, match=message):
        assign(small(), version=torch.zeros(2, 3, dtype=torch.int64))


def test_there_may_be_several_rewards_a_row() -> None:
    assert assign(small(), rewards=torch.zeros(2, 5))["rewards"].shape == (2, 5)
    with pytest.raises(ColumnError, match=r"column 'rewards' has shape \[2, 5, 1\]; it is per row"):
        assign(small(), rewards=torch.zeros(2, 5, 1))


def test_columns_of_preference_batches_have_both_dimensions() -> None:
    batch = Batch({"input_ids": torch.zeros(4, 2, 3, dtype=torch.int64)}, batch_size=[4, 2])
    assert assign(batch, ref_logprobs=torch.zeros(4, 2, 3))["ref_logprobs"].shape == (4, 2, 3)
    with pytest.raises(ColumnError, match=r"has shape \[4, 3\], but the batch has batch size \[4, 2\]"):
        assign(batch, ref_logprobs=torch.zeros(4, 3))


@pytest.mark.parametrize("row", [[False, True, True], [True, False, True], [False, False, True]])
def test_rows_are_right_padded(row: list[bool]) -> None:
    message = "assign: 'attention_mask' has a false before a true; rows are right-padded, so move the padding"
    with pytest.raises(ColumnError, match=message):
        assign(small(), attention_mask=torch.tensor([[True, True, True], row]))


def test_rows_may_be_full_or_empty() -> None:
    mask = torch.tensor([[True, True, True], [False, False, False]])
    assert assign(small(), attention_mask=mask)["attention_mask"].equal(mask)


VALID = torch.tensor([True, False])
CLEARED = [[True, True, True], [False, False, False]]


def test_rows_that_are_not_valid_are_not_trained_on() -> None:
    batch = assign(small(), loss_mask=torch.ones_like(MASK))
    assert assign(batch, valid=VALID)["loss_mask"].tolist() == CLEARED
    assert batch["loss_mask"].all()


def test_nor_when_the_loss_mask_comes_later() -> None:
    batch = assign(small(), valid=VALID)
    assert "loss_mask" not in batch.keys()
    assert assign(batch, loss_mask=torch.ones_like(MASK))["loss_mask"].tolist() == CLEARED


def test_nor_when_both_come_at_once() -> None:
    mask = torch.ones_like(MASK)
    assert assign(small(), loss_mask=mask, valid=VALID)["loss_mask"].tolist() == CLEARED
    assert assign(small(), valid=VALID, loss_mask=mask)["loss_mask"].tolist() == CLEARED
    assert mask.all()


def test_nor_in_a_preference_batch() -> None:
    batch = Batch({"input_ids": torch.zeros(1, 2, 3, dtype=torch.int64)}, batch_size=[1, 2])
    batch = assign(batch, loss_mask=torch.ones(1, 2, 3, dtype=torch.bool), valid=VALID.view(1, 2))
    assert batch["loss_mask"].tolist() == [CLEARED]


# --- require, lengths


def test_require_says_who_reads_what_and_how_to_add_it() -> None:
    require(small(), "input_ids", "attention_mask", reader="my_loss")
    with pytest.raises(MissingColumn) as caught:
        require(small(), "input_ids", "advantages", "rewards", reader="my_loss")
    assert str(caught.value) == (
        "my_loss reads the column 'advantages', which this batch does not have. It has: attention_mask, input_ids. "
        "Add it with nrl.algos.advantages(batch)."
    )


def test_require_of_a_column_that_is_not_in_the_vocabulary() -> None:
    with pytest.raises(MissingColumn, match=r"reads the column 'mine'.*Add it with assign\(batch, mine=\.\.\.\)\."):
        require(small(), "mine")


def test_a_missing_column_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        require(small(), "rewards")


def test_every_known_column_says_how_to_get_it() -> None:
    assert all(column.hint.endswith(".") for column in COLUMNS.values())


def test_lengths_count_real_tokens() -> None:
    assert lengths(small()).tolist() == [3, 2]
    assert lengths(small()).dtype == torch.int64


def test_lengths_without_a_mask_are_the_width() -> None:
    assert lengths(Batch({"input_ids": torch.zeros(2, 2, 5, dtype=torch.int64)}, batch_size=[2, 2])).tolist() == [
        [5, 5],
        [5, 5],
    ]


def test_lengths_of_what_has_no_tokens() -> None:
    with pytest.raises(MissingColumn, match="lengths reads the column 'input_ids'"):
        lengths(Batch({"rewards": torch.zeros(2)}, batch_size=[2]))


# --- pad


def test_pad_adds_zeros_on_the_right_of_every_column_per_token() -> None:
    nrl.declare(mine="token")
    batch = assign(
        small(), loss_mask=MASK, advantages=torch.ones(2, 3), rewards=torch.ones(2), mine=torch.ones(2, 3, 2)
    )
    wide = pad(batch, 5)
    assert wide.is_locked
    assert wide["input_ids"].tolist() == [[5, 6, 7, 0, 0], [8, 9, 0, 0, 0]]
    assert wide["attention_mask"].tolist() == [[True] * 3 + [False] * 2, [True] * 2 + [False] * 3]
    assert wide["loss_mask"].equal(wide["attention_mask"])
    assert wide["advantages"].tolist() == [[1, 1, 1, 0, 0]] * 2
    assert wide["mine"].shape == (2, 5, 2)
    assert wide["mine"].sum() == 12
    assert wide["rewards"].tolist() == [1, 1]
    assert {key: wide[key].dtype for key in batch.keys()} == {key: batch[key].dtype for key in batch.keys()}
    assert batch["input_ids"].shape == (2, 3)


@pytest.mark.parametrize(("name", "entry"), [("turns", ()), ("versions", ()), ("routes", (2, 2))])
def test_padding_of_a_column_is_what_the_column_says(name: str, entry: tuple[int, ...]) -> None:
    batch = assign(small(), **{name: torch.ones(2, 3, *entry, dtype=COLUMNS[name].dtype)})
    other = assign(pad(small(), 5), **{name: torch.ones(2, 5, *entry, dtype=COLUMNS[name].dtype)})
    for wide in (pad(batch, 5), concatenate([other, batch])[2:]):
        assert (wide[name][:, :3] == 1).all()
        assert (wide[name][:, 3:] == -1).all()


def test_pad_without_a_mask_makes_one() -> None:
    wide = pad(Batch({"input_ids": torch.tensor([[5, 6]])}, batch_size=[1]), 3)
    assert wide["attention_mask"].tolist() == [[True, True, False]]


def test_pad_to_the_width_that_it_has() -> None:
    batch = small(rewards=torch.ones(2))
    assert (pad(batch, 3) == batch).all()
    assert not batch.is_locked


def test_several_rewards_are_not_taken_for_tokens() -> None:
    assert pad(small(rewards=torch.ones(2, 3)), 5)["rewards"].shape == (2, 3)


def test_pad_keeps_nested_entries_and_leaves_its_argument_as_it_was() -> None:
    batch = small(media=media())
    assert pad(batch, 5)["media", "pixels"].equal(media()["pixels"])
    assert not batch["media"].is_locked


def test_pad_of_preference_batches() -> None:
    batch = Batch({"input_ids": torch.ones(4, 2, 3, dtype=torch.int64), "version": torch.ones(4, 2)}, batch_size=[4, 2])
    assert pad(batch, 4)["input_ids"].shape == (4, 2, 4)
    assert pad(batch, 4)["version"].shape == (4, 2)


def test_pad_never_cuts() -> None:
    with pytest.raises(BatchError, match="pad: the batch is 3 tokens wide, more than width=2"):
        pad(small(), 2)


def test_pad_needs_tokens() -> None:
    with pytest.raises(MissingColumn, match="pad reads the column 'input_ids'"):
        pad(Batch({"rewards": torch.zeros(2)}, batch_size=[2]), 4)


# --- concatenate


def test_concatenate_pads_to_the_widest() -> None:
    short = Batch(
        {"input_ids": torch.tensor([[1]]), "attention_mask": torch.tensor([[True]]), "advantages": torch.ones(1, 1)},
        batch_size=[1],
    )
    whole = concatenate([short, small(advantages=torch.ones(2, 3))])
    assert whole.is_locked
    assert whole.batch_size == (3,)
    assert whole["input_ids"].tolist() == [[1, 0, 0], [5, 6, 7], [8, 9, 0]]
    assert whole["attention_mask"].tolist() == [[True, False, False], *MASK.tolist()]
    assert whole["advantages"].tolist() == [[1, 0, 0], [1, 1, 1], [1, 1, 1]]
    assert short["input_ids"].shape == (1, 1)


def test_concatenate_of_ragged_batches_makes_a_mask() -> None:
    a = Batch({"input_ids": torch.tensor([[5, 6]])}, batch_size=[1])
    b = Batch({"input_ids": torch.tensor([[7]])}, batch_size=[1])
    assert concatenate([a, b])["attention_mask"].tolist() == [[True, True], [True, False]]
    assert "attention_mask" not in concatenate([a, a]).keys()


def test_concatenate_completes_the_mask_where_one_batch_has_it() -> None:
    full = Batch({"input_ids": torch.tensor([[1, 2, 3]])}, batch_size=[1])
    for batches in ([full, small()], [small(), full]):
        assert sorted(concatenate(batches)["attention_mask"].sum(-1).tolist()) == [2, 3, 3]


@pytest.mark.parametrize(
    ("name", "default"),
    [("valid", True), ("truncated", False), ("temperature", 1.0), ("source", 0), ("dropped", 0)],
)
def test_concatenate_fills_in_what_absence_means(name: str, default: float) -> None:
    other = torch.tensor([5, 5]).to(COLUMNS[name].dtype)
    whole = concatenate([small(), small(**{name: other})])
    assert whole[name].tolist() == [default, default, *other.tolist()]
    assert whole[name].dtype == COLUMNS[name].dtype


def test_concatenate_of_preference_batches_fills_in_both_of_a_pair() -> None:
    a = Batch({"input_ids": torch.ones(1, 2, 3, dtype=torch.int64)}, batch_size=[1, 2])
    b = Batch(
        {"input_ids": torch.ones(3, 2, 4, dtype=torch.int64), "valid": torch.zeros(3, 2).bool()}, batch_size=[3, 2]
    )
    whole = concatenate([a, b])
    assert whole["input_ids"].shape == (4, 2, 4)
    assert whole["valid"].tolist() == [[True, True], *[[False, False]] * 3]


@pytest.mark.parametrize("name", ["rewards", "old_logprobs", "mine"])
def test_concatenate_does_not_invent_columns(name: str) -> None:
    column = torch.zeros(2, 3) if name == "old_logprobs" else torch.zeros(2)
    message = f"concatenate: one batch has the column '{name}' and another has not; assign it to all of them first"
    for batches in ([small(), small(**{name: column})], [small(**{name: column}), small()]):
        with pytest.raises(BatchError, match=message):
            concatenate(batches)


def test_concatenate_of_batches_of_which_one_has_no_tokens() -> None:
    with pytest.raises(BatchError, match="concatenate: one batch has the column"):
        concatenate([small(), Batch({"rewards": torch.zeros(1)}, batch_size=[1])])


def test_concatenate_of_nothing() -> None:
    with pytest.raises(BatchError, match="concatenate: there are no batches"):
        concatenate([])


def test_concatenate_of_one_is_a_copy() -> None:
    batch = small(media=media())
    whole = concatenate([batch])
    assert (whole == batch).all()
    assert not batch.is_locked
    assert not batch["media"].is_locked


def test_concatenate_of_rows_without_tokens() -> None:
    rewards = Batch({"rewards": torch.ones(2)}, batch_size=[2])
    assert concatenate([rewards, rewards])["rewards"].tolist() == [1, 1, 1, 1]


def test_concatenate_with_no_rows() -> None:
    assert concatenate([small()[:0], small()])["input_ids"].equal(small()["input_ids"])


def test_concatenate_keeps_nested_entries() -> None:
    a, b = small(media=media()), small(media=media())
    whole = concatenate([a, b])
    assert whole["media", "count"].tolist() == [1, 2, 1, 2]
    assert not a["media"].is_locked
    with pytest.raises(BatchError, match="the column 'media'"):
        concatenate([a, small()])


def test_concatenate_of_rows_and_pairs() -> None:
    pairs = Batch({"input_ids": torch.zeros(1, 2, 3, dtype=torch.int64)}, batch_size=[1, 2])
    with pytest.raises(BatchError, match="concatenate"):
        concatenate([Batch({"input_ids": torch.zeros(1, 3, dtype=torch.int64)}, batch_size=[1]), pairs])


# --- unchanged


def test_writing_into_a_batch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NRL_DEBUG", "1")
    batch = assign(small(), rewards=torch.zeros(2), version=torch.zeros(2, dtype=torch.int64))
    with pytest.raises(MutatedBatch, match="my_loss wrote into its batch: rewards. Batches are values"):  # noqa: SIM117
        with forbid_writes(batch, "my_loss"):
            batch["rewards"].add_(1)


def test_writing_into_a_part_of_a_column_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NRL_DEBUG", "1")
    batch = assign(small(), media=media())
    with pytest.raises(MutatedBatch, match="pixels"), forbid_writes(batch, "my_loss"):
        batch["media", "pixels"][0, 1] = 5


def test_adding_or_replacing_columns_of_an_open_batch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NRL_DEBUG", "1")
    batch = small(rewards=torch.zeros(2))
    with pytest.raises(MutatedBatch, match="my_loss wrote into its batch: rewards"), forbid_writes(batch, "my_loss"):
        batch["rewards"] = torch.ones(2)
    with pytest.raises(MutatedBatch, match="my_loss wrote into its batch: mine"), forbid_writes(batch, "my_loss"):
        batch["mine"] = torch.ones(2)


def test_reading_a_batch_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NRL_DEBUG", "1")
    batch = assign(small(), rewards=torch.zeros(2), media=media())
    with forbid_writes(batch, "my_loss"):
        (batch["rewards"] + 1).add_(1)
        assign(batch, rewards=torch.ones(2))


def test_a_batch_made_in_inference_mode_can_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NRL_DEBUG", "1")
    with torch.inference_mode():
        batch = assign(small(), rewards=torch.zeros(2))
    with forbid_writes(batch, "my_loss"):
        assert batch["rewards"].sum() == 0


def test_what_is_raised_inside_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NRL_DEBUG", "1")
    batch = small(rewards=torch.zeros(2))
    with pytest.raises(ZeroDivisionError), forbid_writes(batch, "my_loss"):
        raise ZeroDivisionError


def test_without_the_variable_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NRL_DEBUG", raising=False)
    batch = small(rewards=torch.zeros(2))
    with forbid_writes(batch, "my_loss"):
        batch["rewards"].add_(1)


def test_what_was_found_of_a_tensor_is_looked_up_until_somebody_writes_into_it() -> None:
    mask = torch.ones(2, 3)
    assert [memoize(mask, "sum", mask.sum) for _ in range(2)] == [6, 6]
    mask[0] = 0
    assert memoize(mask, "sum", mask.sum) == 3


def test_of_a_tensor_whose_writes_are_not_counted_nothing_is_remembered() -> None:
    with torch.inference_mode():
        mask = torch.ones(2, 3)
        assert memoize(mask, "sum", lambda: float(mask.sum())) == 6
        mask[0] = 0
        assert memoize(mask, "sum", lambda: float(mask.sum())) == 3
