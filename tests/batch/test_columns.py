import functools

import pytest
import torch

import nrl
from nrl.batch import Batch, assign, concatenate, microbatches, pad, shard
from nrl.batch.columns import declaring, get_declarations, kind_of
from nrl.errors import ColumnError

MASK = torch.arange(4) < torch.tensor([[2], [4], [3]])


def tokens() -> Batch:
    return assign(Batch({}, batch_size=[3]), input_ids=MASK.long(), attention_mask=MASK)


def test_as_many_numbers_a_row_as_there_are_tokens() -> None:
    """The numbers of a row are not cut with its tokens."""
    nrl.declare(scores="row")
    batch = assign(tokens(), scores=torch.arange(12.0).view(3, 4))
    for part, rows in zip(parts := microbatches(batch, max_tokens=4), parts.rows, strict=True):
        assert part["scores"].equal(batch["scores"][rows])
    assert parts[-1]["input_ids"].shape == (1, 2)
    assert pad(batch, 6)["scores"].shape == (3, 4)


def test_a_column_that_may_be_either_is_asked_for() -> None:
    message = (
        r"column 'scores' has shape \[3, 4\], and the batch is 4 tokens wide, so it may hold an entry for each token "
        r"or 4 numbers for each row; say which, once in your program: nrl.declare\(scores='token'\) or nrl.declare\("
        r"scores='row'\)"
    )
    with pytest.raises(ColumnError, match=f"assign: {message}"):
        assign(tokens(), scores=torch.zeros(3, 4))
    with pytest.raises(ColumnError, match=f"assign: {message}"):
        assign(Batch({"scores": torch.zeros(3, 4)}, batch_size=[3]), input_ids=MASK.long())
    batch = Batch({**tokens(), "scores": torch.zeros(3, 4)}, batch_size=[3])
    for who, split in (
        ("microbatches", functools.partial(microbatches, max_tokens=4)),
        ("pad", functools.partial(pad, width=9)),
        ("concatenate", lambda whole: concatenate([whole, whole])),
    ):
        with pytest.raises(ColumnError, match=f"{who}: {message}"):
            split(batch)
    assert shard(batch, 2)[0]["scores"].shape[1] == 4  # which keeps all widths
    for kind in ("row", "token"):
        declaring({f"{kind}_scores": kind}, assign, tokens())
        assert f"{kind}_scores" in assign(tokens(), **{f"{kind}_scores": torch.zeros(3, 4)}).keys()


def test_what_has_another_shape_is_per_row() -> None:
    assert kind_of("mine", torch.zeros(3), 1, 4, "test") == "row"
    assert kind_of("mine", torch.zeros(3, 5), 1, 4, "test") == "row"
    assert kind_of("mine", torch.zeros(3, 4), 1, None, "test") == "row"
    assert kind_of("mine", Batch({}, batch_size=[3, 4]), 1, 4, "test") == "row"


def test_a_declared_column_has_its_shape() -> None:
    nrl.declare(mine="token", several="ragged", one="row")
    with pytest.raises(ColumnError, match=r"column 'mine' has shape \[3, 5\]; it is per token, so .* \[3, 4\]"):
        assign(tokens(), mine=torch.zeros(3, 5))
    with pytest.raises(ColumnError, match=r"column 'mine' has shape \[3\]; it is per token"):
        assign(tokens(), mine=torch.zeros(3))
    with pytest.raises(ColumnError, match=r"column 'several' has shape \[3, 4\], and it is ragged; ragged columns"):
        assign(tokens(), several=torch.zeros(3, 4))


def test_what_cannot_be_declared() -> None:
    with pytest.raises(ColumnError, match="declare: 'mine' is declared as 'tokens'; a column is 'row'"):
        nrl.declare(mine="tokens")  # type: ignore[arg-type]
    nrl.declare(rewards="row", mine="token")
    nrl.declare(mine="token")
    assert get_declarations()["mine"] == "token"
    assert "rewards" not in get_declarations()
    for name, known, other in (("rewards", "row", "token"), ("mine", "token", "row")):
        message = f"declare: the column '{name}' is '{known}' already, and cannot be '{other}'; take another name"
        with pytest.raises(ColumnError, match=message):
            nrl.declare(other="row", **{name: other})  # type: ignore[arg-type]
    assert "other" not in get_declarations()
