"""Heavy columns as handles: what is done to a batch is done to them, and nobody fetches their numbers for it."""

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

import nrl
from nrl.batch.handles import ColumnHandle, handle_of, handles_of, stand_ins, without_handles
from nrl.errors import ColumnError, MutatedBatch


class Elsewhere:
    """A future of a tensor in another process, as a `nrl.runtime.mesh.futures.RemoteFuture`; it counts fetches."""

    def __init__(self, value: Tensor, *, known: bool = True) -> None:
        self.value, self.fetched = value, 0
        self.rows = [torch.arange(len(value))]
        self.like = torch.zeros((), dtype=value.dtype).expand(value.shape) if known else None

    def result(self) -> Tensor:
        self.fetched += 1
        return self.value


def rows(sizes: list[int], seed: int = 0, width: int | None = None) -> nrl.Batch:
    sized = torch.tensor(sizes)
    mask = torch.arange(width or max(sizes)) < sized[:, None]
    ids = torch.randint(1, 99, mask.shape, generator=torch.Generator().manual_seed(seed)) * mask
    return nrl.assign(nrl.Batch({}, batch_size=[len(sizes)]), input_ids=ids, attention_mask=mask, loss_mask=mask)


def taught(batch: nrl.Batch, k: int = 2, seed: int = 0) -> tuple[nrl.Batch, nrl.Batch, list[Elsewhere]]:
    """A batch with a teacher's columns here, the same with handles of them, and their sources."""
    draw, shape = torch.Generator().manual_seed(seed), (*batch["input_ids"].shape, k)
    columns = {
        "teacher_ids": torch.randint(1, 99, shape, generator=draw),
        "teacher_topk_logprobs": torch.randn(shape, generator=draw),
    }
    sources = {name: Elsewhere(value) for name, value in columns.items()}
    return nrl.assign(batch, **columns), nrl.assign(batch, **sources), list(sources.values())


def same(found: TensorDict, expected: TensorDict) -> None:
    assert found.batch_size == expected.batch_size
    assert set(found.keys()) == set(expected.keys())
    for name in expected.keys():
        assert torch.equal(found[name], expected[name]), name
        assert found[name].dtype == expected[name].dtype


def test_assigning_a_heavy_column_waits_for_nothing() -> None:
    here, there, sources = taught(rows([3, 1]))
    assert [type(there[name]) for name in ("teacher_ids", "teacher_topk_logprobs")] == [ColumnHandle, ColumnHandle]
    assert [(x.shape, x.dtype) for x in handles_of(there).values()] == [
        ((2, 3, 2), torch.int64),
        ((2, 3, 2), torch.float32),
    ]
    assert there.is_locked
    assert repr(there["teacher_ids"]) == "ColumnHandle([2, 3, 2], torch.int64)"
    again = nrl.assign(there, rewards=torch.zeros(2), teacher_ids=there["teacher_ids"])
    assert isinstance(again["teacher_ids"], ColumnHandle)
    assert [source.fetched for source in sources] == [0, 0]
    same(there, here)
    assert all(source.fetched for source in sources)


def test_what_is_not_heavy_or_of_no_known_shape_is_waited_for() -> None:
    batch, values = rows([3, 1]), torch.zeros(2, 3)
    assert type(nrl.assign(batch, teacher_logprobs=Elsewhere(values))["teacher_logprobs"]) is Tensor
    ids = torch.ones(2, 3, 2, dtype=torch.int64)
    assert type(nrl.assign(batch, teacher_ids=Elsewhere(ids, known=False))["teacher_ids"]) is Tensor
    assert type(nrl.assign(batch, teacher_ids=ids)["teacher_ids"]) is Tensor
    whole = Elsewhere(ids)
    whole.rows = []  # it is not put together from rows
    assert handle_of(whole) is whole


def test_a_handle_that_does_not_fit_is_refused_before_it_is_fetched() -> None:
    batch = rows([3, 1])
    for value, message in [
        (torch.ones(3, 3, 2, dtype=torch.int64), r"'teacher_ids' has shape \[3, 3, 2\], but the batch has batch size"),
        (torch.ones(2, 4, 2, dtype=torch.int64), r"'teacher_ids' has shape \[2, 4, 2\]; it is per token"),
        (torch.ones(2, 3, 2), r"'teacher_ids' has dtype torch.float32; it must be torch.int64"),
    ]:
        source = Elsewhere(value)
        with pytest.raises(ColumnError, match=message):
            nrl.assign(batch, teacher_ids=source)
        assert source.fetched == 0


@given(data=st.data())
def test_batches_with_handles_are_cut_and_joined_as_any_other(data: st.DataObject) -> None:
    """Random programs over two batches, one with the numbers and one with handles."""
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    here, there, sources = taught(rows(sizes))
    made = [(here, there)]
    for _ in range(data.draw(st.integers(1, 5))):
        here, there = data.draw(st.sampled_from(made))
        n, width = len(here), int(here["input_ids"].shape[1])
        match data.draw(st.sampled_from(["rows", "mask", "slice", "pad", "shard", "mini", "micro", "join"])):
            case "rows":
                index = torch.tensor(
                    data.draw(st.lists(st.integers(-n, n - 1), max_size=4)) if n else [], dtype=torch.int64
                )
                made.append((here[index].lock_(), there[index].lock_()))
            case "mask":
                chosen = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=torch.bool)
                made.append((here[chosen].lock_(), there[chosen].lock_()))
            case "slice":
                cut = slice(data.draw(st.integers(0, n)), data.draw(st.integers(-1, n)), data.draw(st.integers(1, 2)))
                made.append((here[cut].lock_(), there[cut].lock_()))
            case "pad":
                more = width + data.draw(st.integers(0, 2))
                made.append((nrl.pad(here, more), nrl.pad(there, more)))
            case "shard":
                made += zip(nrl.shard(here, 2), nrl.shard(there, 2), strict=True)
            case "mini" if n > 1:
                made += zip(nrl.minibatches(here, 2, seed=n), nrl.minibatches(there, 2, seed=n), strict=True)
            case "micro" if n:
                parts = [nrl.microbatches(x, max_tokens=8) for x in (here, there)]
                made += zip(*parts, strict=True)
            case "join":
                others = [data.draw(st.sampled_from(made)) for _ in range(2)]
                made.append(
                    (
                        nrl.concatenate([here, *(x for x, _ in others)]),
                        nrl.concatenate([there, *(x for _, x in others)]),
                    )
                )
    assert [source.fetched for source in sources] == [0, 0]
    assert all(len(handles_of(there)) == 2 for _, there in made)
    for here, there in made:
        same(there, here)


def test_batches_of_several_sources_are_joined() -> None:
    """As groups of a rollout are, each from processes of its own; what one source holds is one part."""
    (a, first, some), (b, second, others) = taught(rows([3, 1])), taught(rows([2, 4, 4], seed=1), seed=1)
    joined = nrl.concatenate([second, first, second])
    order = torch.tensor([6, 3, 1, 0, 4])
    taken = joined[order].lock_()
    assert [len(x["teacher_ids"].parts) for x in (joined, taken, taken[:2])] == [2, 2, 2]
    assert len(nrl.concatenate([second[:1].lock_(), second[1:].lock_()])["teacher_ids"].parts) == 1
    assert sum(source.fetched for source in some + others) == 0
    same(taken, nrl.concatenate([b, a, b])[order])
    same(nrl.concatenate([first, b]), nrl.concatenate([a, b]))  # one handle and one that is here: the numbers


def test_pairs_have_handles_too() -> None:
    batch = rows([3, 1, 2, 2]).reshape(2, 2).lock_()
    here, there, sources = taught(batch)
    parts = nrl.minibatches(there, 2, seed=0), nrl.minibatches(here, 2, seed=0)
    narrow = [nrl.microbatches(nrl.pad(x, 5), max_tokens=20) for x in (there, here)]
    assert [source.fetched for source in sources] == [0, 0]
    for found, expected in [*zip(*parts, strict=True), *zip(*narrow, strict=True)]:
        same(found, expected)


def test_whoever_computes_with_it_gets_the_numbers() -> None:
    here, there, (source, _) = taught(rows([3, 1]))
    ids, known = there["teacher_ids"], here["teacher_ids"]
    assert ids.tolist() == ids.numpy().tolist() == known.tolist()
    for fn in (
        lambda x: x + 1,
        lambda x: x[:, 0],
        lambda x: x[:, torch.tensor([0, 2])],
        lambda x: x[torch.tensor([0, 1]), torch.tensor([0, 2])],
        lambda x: x[torch.tensor([[0], [1]])],
        lambda x: x[:, 1:],
        lambda x: x[:, ::2],
        lambda x: x.index_select(1, torch.tensor([1])),
        lambda x: torch.cat([x, torch.ones(2, 1, 2, dtype=torch.int64)], 1),
        lambda x: torch.cat([x, x], -1),
        lambda x: torch.cat([x, torch.zeros(2, 1, 2)], 1),
        lambda x: torch.cat([torch.zeros(2, 1, 2, dtype=torch.int64), x], 1),
        lambda x: torch.cat([x, torch.zeros(1, 3, 2)]),
        lambda x: x.flatten(0, 1),
        lambda x: x.to(torch.float32),
        lambda x: torch.where(x > 3, x, 0),
    ):
        before, found = source.fetched, fn(ids)
        assert type(found) is Tensor
        assert torch.equal(found, fn(known))
        assert source.fetched > before
    before = source.fetched
    for fn in (
        lambda x: x.index_select(0, torch.tensor([1])),
        lambda x: x.detach().clone(),
        lambda x: x[-1:],
        lambda x: x[:, :2],
        lambda x: x[..., :1],
    ):
        assert isinstance(fn(ids), ColumnHandle)
        assert source.fetched == before
        assert torch.equal(fn(ids), fn(known))
        before = source.fetched
    assert torch.equal(ids.new_zeros(2), torch.zeros(2, dtype=torch.int64))
    assert source.fetched == before


def test_nobody_writes_into_it() -> None:
    _, there, (source, _) = taught(rows([3, 1]))
    with pytest.raises(MutatedBatch, match=r"add_.* writes into a column that other processes hold; .* out-of-place"):
        there["teacher_ids"].add_(1)
    assert source.fetched == 0


def test_elsewhere_it_is_the_numbers() -> None:
    """In a pickle, as in a checkpoint; a copy here is the handle itself."""
    here, there, (source, _) = taught(rows([3, 1]))
    assert copy.deepcopy(there["teacher_ids"]) is there["teacher_ids"]
    assert source.fetched == 0
    found: Any = pickle.loads(pickle.dumps(there["teacher_ids"]))
    assert type(found) is Tensor
    assert torch.equal(found, here["teacher_ids"])


def test_a_batch_without_its_handles_and_with_zeros_for_them() -> None:
    here, there, sources = taught(rows([3, 1]))
    assert without_handles(here) is stand_ins(here) is here
    found, zeros = without_handles(there), stand_ins(there)
    assert found.is_locked
    assert zeros.is_locked
    same(found, here.exclude("teacher_ids", "teacher_topk_logprobs"))
    same(zeros, nrl.assign(here, **{name: torch.zeros_like(here[name]) for name in handles_of(there)}))
    assert [source.fetched for source in sources] == [0, 0]
