"""Media are read once for a batch: its parts know what was found of the whole."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import nrl
from nrl import tiny
from nrl.algos import sft_loss
from nrl.backends import adamw, fsdp
from nrl.batch import Batch, ragged
from nrl.batch.packing import pack
from nrl.batch.prefixes import common_prefixes, media_numbers, microbatches_by_prefix, routed_tokens
from nrl.runtime import Slots


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Every row of media whose contents somebody has looked at."""
    seen, content = list[Tensor](), ragged._content

    def watched(row: Tensor) -> Any:
        seen.append(row)
        return content(row)

    monkeypatch.setattr(ragged, "_content", watched)
    return seen


def shown(pictures: Sequence[int], *, nested: bool = True, width: int = 600) -> Batch:
    """Rows of the same tokens; each has so many pictures of a kind as its number says, and a caption."""
    n = len(pictures)
    mask = torch.arange(width) < width - torch.arange(n)[:, None] % 2
    media: Any = ragged.make_ragged([torch.full((count, 2), float(count)) for count in pictures])
    if nested:
        media = Batch({"pixels": media, "caption": torch.tensor(pictures) // 2}, [n])
    columns = {"input_ids": mask.long(), "attention_mask": mask, "loss_mask": mask, "media": media}
    return nrl.assign(Batch({}, batch_size=[n]), **columns)


@pytest.mark.parametrize(("nested", "leaves"), [(False, 1), (True, 2)])
@pytest.mark.parametrize("pictures", [[1, 2, 1, 2], [0, 0, 0, 0], [4, 3, 2, 1], [1]])
def test_they_are_read_once(read: list[Tensor], pictures: list[int], nested: bool, leaves: int) -> None:
    batch = shown(pictures, nested=nested)
    parts = microbatches_by_prefix(batch, max_tokens=1200)
    found = [pack(part, share=True) for part in parts]
    assert len(read) == leaves * len(pictures)
    for rows, part, packed in zip(parts.rows, parts, found, strict=True):
        fresh = nrl.assign(part, media=shown([pictures[row] for row in rows.tolist()], nested=nested)["media"])
        inherited, expected = media_numbers(part), media_numbers(fresh)
        assert inherited is not None
        assert expected is not None
        assert np.array_equal(inherited[:, None] == inherited, expected[:, None] == expected)
        assert torch.equal(packed.place, pack(fresh, share=True).place)


def test_a_write_is_seen(read: list[Tensor]) -> None:
    """Nobody should write into a batch; what is remembered of the old numbers is forgotten then."""
    batch = shown([1, 2, 1])
    assert media_numbers(batch) is not None
    before = len(read)
    batch["media", "caption"].copy_(torch.tensor([1, 1, 1]))
    numbers: Any = media_numbers(batch)
    assert len(read) == before + 3  # the captions again, and no pictures
    assert numbers[0] == numbers[2] != numbers[1]


def test_a_step_reads_them_once(read: list[Tensor], slots: Slots) -> None:
    """In all shards together, each of which falls into several micro-batches."""
    trainer = fsdp.trainer(slots[:2], tiny.model(), adamw(lr=1e-3), max_tokens=40)
    state, step = trainer.init(), trainer.train_step(sft_loss)
    batch = shown([1, 2, 1, 2, 3, 3, 1, 2], width=20)
    state, metrics = step(state, batch)
    assert nrl.finalize(metrics.result())["skipped"] == 0
    assert len(read) == 2 * len(batch)


def test_rows_that_are_cut_otherwise_out_of_the_same_memory() -> None:
    values = torch.zeros(4, 2)
    values[1] = 1
    for offsets, expected in (([0, 2, 4], [1, 0]), ([0, 1, 4], [0, 1]), ([0, 1, 2, 4], [0, 2, 1])):
        media = ragged.of_values(values, torch.tensor(offsets))
        found = media_numbers(Batch({"media": media}, batch_size=[len(offsets) - 1]))
        assert found is not None
        assert len(set(found.tolist())) == len(set(expected))
        assert found.shape == (len(offsets) - 1,)


def test_tokens_with_other_routes_are_other_tokens() -> None:
    """Against a comparison token by token; also of pairs, and of a batch without rows."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 3, (12, 9), generator=g)
    routes = torch.randint(-1, 2, (12, 9, 2, 1), generator=g).to(torch.int16)
    batch = Batch({"input_ids": ids, "routes": routes}, batch_size=[12])
    found = torch.from_numpy(routed_tokens(batch)).flatten()
    tokens = [(int(a), b.tolist()) for a, b in zip(ids.flatten(), routes.flatten(0, 1), strict=True)]
    for i, j in itertools.combinations(range(len(tokens)), 2):
        assert bool(found[i] == found[j]) == (tokens[i] == tokens[j])
    folded = Batch({name: x.reshape(6, 2, *x.shape[1:]) for name, x in batch.items()}, batch_size=[6, 2])
    assert np.array_equal(routed_tokens(folded), routed_tokens(batch))
    assert routed_tokens(batch[:0]).shape == (0, 9)
    assert np.array_equal(routed_tokens(batch.exclude("routes")), ids.numpy())


def test_rows_are_shared_as_far_as_their_routes_agree() -> None:
    ids = np.array([[5, 6, 7, 8], [5, 6, 7, 9], [5, 6, 7, 4]])
    routes = torch.zeros(3, 4, 1, 1, dtype=torch.int16)
    routes[2, 1] = 1
    batch = Batch({"input_ids": torch.from_numpy(ids), "routes": routes}, batch_size=[3])
    stem, shared = common_prefixes(routed_tokens(batch), np.array([4, 4, 4]))
    assert stem.tolist() == [0, 0, 2]
    assert shared.tolist() == [3, 3, 4]
    assert pack(batch, share=True, packing=nrl.Sequences).input_ids.tolist() == [5, 6, 7, 8, 9, 5, 6, 7, 4]


def test_rows_with_equal_routes_go_into_one_part() -> None:
    ids = torch.arange(4)[:, None] // 2 * torch.ones(1, 600, dtype=torch.int64)
    mask = torch.arange(600) < torch.tensor([[599], [600], [600], [599]])
    batch = Batch({"input_ids": ids, "attention_mask": mask}, batch_size=[4])
    routes = torch.zeros(4, 600, 1, 1, dtype=torch.int16)
    for given, expected in [
        (routes, [[1, 0], [2, 3]]),
        (routes + torch.arange(4)[:, None, None, None], [[1, 2], [0, 3]]),
    ]:
        routed = nrl.assign(batch, routes=given.to(torch.int16))
        assert [rows.tolist() for rows in microbatches_by_prefix(routed, max_tokens=1200).rows] == expected
