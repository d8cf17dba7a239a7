import copy
import itertools
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nrl.batch import Batch, assign, lengths
from nrl.errors import ClosedCluster, ConsumedState, ForeignState, MutatedBatch, NrlError, PlacementError
from nrl.reduce import Max, Mean, Metrics, Min, Sum, finalize
from nrl.runtime import Cluster, Handle, Mesh, P, cluster, donated, merged, microbatched, resident, shard_map

quick = settings(max_examples=40)


@pytest.fixture
def local() -> Iterator[Cluster]:
    with cluster("local") as entered:
        yield entered


@pytest.fixture
def mesh(local: Cluster) -> Mesh:
    return local.reserve(3).mesh(dp=3)


def of_lengths(sizes: list[int], width: int = 9) -> Batch:
    mask = torch.arange(width) < torch.tensor(sizes, dtype=torch.int64).view(-1, 1)
    ids = torch.where(mask, torch.arange(1, len(sizes) * width + 1).view(-1, width), 0)
    columns = {"input_ids": ids, "attention_mask": mask, "row": torch.arange(len(sizes))}
    batch = Batch(columns, batch_size=[len(sizes)])
    batch.lock_()
    return batch


def sums(batch: Batch) -> Metrics:
    """One metric of each kind, by rows."""
    tokens = lengths(batch).double()
    return {
        "mean": Mean(batch["input_ids"].double().sum(), tokens.sum()),
        "sum": Sum(tokens.sum()),
        "high": Max(torch.cat([tokens, torch.tensor([-torch.inf])]).max()),
        "low": Min(torch.cat([tokens, torch.tensor([torch.inf])]).min()),
    }


# --- specs


def test_specs_print_as_they_are_written() -> None:
    assert [repr(spec) for spec in (P(), P("dp"), resident, donated, merged)] == [
        "P()",
        "P('dp')",
        "resident",
        "donated",
        "merged",
    ]


@pytest.mark.parametrize("axes", [("tp",), ("dp", "tp"), ("dp", "dp"), ("",)])
def test_rows_are_split_along_dp_only(axes: tuple[str, ...]) -> None:
    with pytest.raises(PlacementError, match=r"P\(.*rows are split along 'dp' only; use P\('dp'\) or P\(\)"):
        P(*axes)


@pytest.mark.parametrize("spec", [P(), P("dp"), resident, donated, merged], ids=repr)
def test_specs_can_be_copied_and_pickled(spec: Any) -> None:
    assert copy.deepcopy(spec) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec


# --- P("dp"): rows


def test_a_mesh_of_three_really_splits(mesh: Mesh) -> None:
    seen: list[list[int]] = []

    def double(x: Tensor) -> Tensor:
        seen.append(x.tolist())
        return 2 * x

    assert shard_map(double, mesh, P("dp"), P("dp"))(torch.arange(7)).result().tolist() == [0, 2, 4, 6, 8, 10, 12]
    assert len(seen) == 3
    assert sorted(len(rows) for rows in seen) == [2, 2, 3]
    assert sorted(itertools.chain(*seen)) == list(range(7))


def test_batches_are_split_by_tokens_and_come_back_in_order(mesh: Mesh) -> None:
    seen: list[list[int]] = []

    def describe(batch: Batch) -> tuple[Tensor, Batch]:
        seen.append(lengths(batch).tolist())
        assert batch.is_locked
        return batch["row"], batch.select("row", "input_ids")

    batch = of_lengths([1, 9, 1, 4, 4, 1])
    rows, restored = shard_map(describe, mesh, P("dp"), (P("dp"), P("dp")))(batch)
    assert sorted(sum(part) for part in seen) == [5, 6, 9]
    assert rows.result().tolist() == [0, 1, 2, 3, 4, 5]
    assert (restored.result() == batch.select("row", "input_ids")).all()
    assert restored.result().is_locked


@quick
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 4))
def test_the_number_of_shards_cannot_be_seen_from_the_result(sizes: list[int], dp: int) -> None:
    batch = of_lengths(sizes)

    def fn(part: Batch) -> tuple[Tensor, Metrics]:
        return part["input_ids"].cumsum(-1), sums(part)

    with cluster("local") as here:
        outs, metrics = shard_map(fn, here.reserve(dp).mesh(), P("dp"), [P("dp"), merged])(batch)
        assert outs.result().equal(batch["input_ids"].cumsum(-1))
        read, whole = finalize(metrics.result()), finalize(sums(batch))
        assert read == pytest.approx(whole, nan_ok=True)


def test_several_arguments_are_split_alike(mesh: Mesh) -> None:
    batch = of_lengths([1, 9, 1, 4, 4])

    def check(x: Tensor, part: Batch, other: Batch) -> Tensor:
        assert x.tolist() == part["row"].tolist() == other["number"].tolist()
        return x

    numbers = Batch({"number": torch.arange(5)}, batch_size=[5])
    fn = shard_map(check, mesh, P("dp"), P("dp"))
    assert fn(torch.arange(5), batch, numbers).result().tolist() == [0, 1, 2, 3, 4]


def test_pairs_stay_whole(mesh: Mesh) -> None:
    whole = torch.arange(24).view(4, 2, 3)

    def check(part: Batch) -> Tensor:
        assert part.batch_size == (len(part), 2)
        ids: Tensor = part["input_ids"]
        return ids

    fn = shard_map(check, mesh, P("dp"), P("dp"))
    assert fn(Batch({"input_ids": whole}, batch_size=[4, 2])).result().equal(whole)


def test_with_fewer_rows_than_shards_some_shards_have_none(mesh: Mesh) -> None:
    seen: list[int] = []

    def fn(part: Batch) -> tuple[Tensor, Metrics]:
        seen.append(len(part))
        return part["row"], sums(part)

    rows, metrics = shard_map(fn, mesh, P("dp"), (P("dp"), merged))(of_lengths([5]))
    assert sorted(seen) == [0, 0, 1]
    assert rows.result().tolist() == [0]
    assert finalize(metrics.result())["sum"] == 5


def test_the_argument_stays_as_it_was(mesh: Mesh) -> None:
    batch = of_lengths([1, 2, 3]).clone()
    shard_map(lambda part: part["row"], mesh, P("dp"), P("dp"))(batch)
    assert not batch.is_locked
    assert batch["row"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("value", [3, [1, 2, 3], torch.tensor(1.0), None], ids=str)
def test_only_tensors_and_batches_have_rows(mesh: Mesh, value: object) -> None:
    message = rf"shard_map\(my_fn\): P\('dp'\) splits the rows of a tensor or a batch; found {type(value).__name__}"
    with pytest.raises(PlacementError, match=message):
        shard_map(named_my_fn(lambda x: x), mesh, P("dp"), P("dp"))(value)


def test_arguments_of_different_numbers_of_rows(mesh: Mesh) -> None:
    message = r"arguments with P\('dp'\) have different numbers of rows: \[3, 4\]"
    with pytest.raises(PlacementError, match=message):
        shard_map(lambda x, y: x, mesh, P("dp"), P("dp"))(torch.arange(3), torch.arange(4))


@pytest.mark.parametrize(
    "wrong", [lambda x: x.sum(), lambda x: x[:0], lambda x: x.tolist()], ids=["0-d", "short", "list"]
)
def test_a_result_needs_an_entry_for_each_row(mesh: Mesh, wrong: Callable[[Tensor], Any]) -> None:
    with pytest.raises(NrlError, match=r"shard_map\(my_fn\): the part has 2 rows, but what was computed on it is"):
        shard_map(named_my_fn(wrong), mesh, P("dp"), P("dp"))(torch.arange(6))


def test_a_result_has_rows_only_if_an_argument_has(mesh: Mesh) -> None:
    message = r"shard_map\(my_fn\): out_specs has P\('dp'\), but no argument was split by rows"
    with pytest.raises(PlacementError, match=message):
        shard_map(named_my_fn(lambda x: x), mesh, P(), P("dp"))(torch.arange(3))


def named_my_fn(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function under a name that can be looked for in messages."""

    def my_fn(*args: Any) -> Any:
        return fn(*args)

    return my_fn


# --- P(): the whole value


def test_every_shard_gets_the_whole(mesh: Mesh) -> None:
    seen: list[Any] = []
    anything = {"a": [1, 2]}

    def fn(x: Tensor, options: dict[str, list[int]]) -> Tensor:
        seen.append((x.tolist(), options))
        return x.sum()

    total = shard_map(fn, mesh, (P(), P()), P())(torch.arange(4), anything)
    assert total.result() == 6
    assert seen == [([0, 1, 2, 3], anything)] * 3


AGREED: dict[str, Callable[[], Any]] = {
    "number": lambda: 3,
    "text": lambda: "same",
    "none": lambda: None,
    "tensor": lambda: torch.arange(4),
    "nan": lambda: torch.tensor([1.0, torch.nan]),
    "float nan": lambda: float("nan"),
    "batch": lambda: Batch(
        {"x": torch.arange(3), "media": Batch({"y": torch.ones(3)}, batch_size=[3])}, batch_size=[3]
    ),
    "dict of tensors": lambda: {"x": torch.arange(4), "y": torch.ones(2)},
    "list of tensors": lambda: [torch.arange(4), torch.ones(2)],
}


@pytest.mark.parametrize("make", AGREED.values(), ids=AGREED.keys())
def test_shards_that_agree(mesh: Mesh, make: Callable[[], Any]) -> None:
    result = shard_map(make, mesh, (), P())().result()
    assert type(result) is type(make())
    assert str(result) == str(make())


DISAGREED: dict[str, Callable[[int], Any]] = {
    "number": lambda k: k,
    "kind": lambda k: [1, 1.0, True][k],
    "tensor": lambda k: torch.arange(4) + k,
    "shape": lambda k: torch.zeros(k + 1),
    "batch": lambda k: Batch({"x": torch.arange(3) + k}, batch_size=[3]),
    "columns": lambda k: Batch({str(k): torch.arange(3)}, batch_size=[3]),
    "dict of tensors": lambda k: {"x": torch.arange(4) + k},
    "last": lambda k: torch.tensor(float(k == 2)),
}


@pytest.mark.parametrize("make", DISAGREED.values(), ids=DISAGREED.keys())
def test_shards_that_disagree_are_caught(mesh: Mesh, make: Callable[[int], Any]) -> None:
    ranks = iter(range(3))
    message = r"shard_map\(my_fn\): out_specs says P\(\), the same from every shard, but the shards differ"
    with pytest.raises(PlacementError, match=message):
        shard_map(named_my_fn(lambda: make(next(ranks))), mesh, (), P())()


def test_one_shard_always_agrees_with_itself(local: Cluster) -> None:
    assert shard_map(lambda x: x.sum(), local.reserve(1).mesh(), P("dp"), P())(torch.arange(4)).result() == 6


# --- resident and donated: values that stay on the mesh


def counter(mesh: Mesh) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """A small state on a mesh: a list of the rows that each process has seen."""

    def init() -> list[int]:
        return []

    def step(state: list[int], x: Tensor) -> tuple[list[int], Metrics]:
        return [*state, *x.tolist()], {"rows": Sum(torch.tensor(len(x)))}

    def total(state: list[int]) -> Metrics:
        return {"total": Sum(torch.tensor(sum(state)))}

    return (
        shard_map(init, mesh, (), resident),
        shard_map(step, mesh, (donated, P("dp")), (resident, merged)),
        shard_map(total, mesh, resident, merged),
    )


def test_a_state_goes_round(mesh: Mesh) -> None:
    init, step, total = counter(mesh)
    state = init()
    assert isinstance(state, Handle)
    for _ in range(3):
        state, metrics = step(state, torch.arange(5))
        assert finalize(metrics.result()) == {"rows": 5}
    assert finalize(total(state).result()) == {"total": 30}
    assert finalize(total(state).result()) == {"total": 30}


def test_each_process_keeps_its_own(mesh: Mesh) -> None:
    ranks = iter(range(3))
    state = shard_map(lambda: next(ranks), mesh, (), resident)()
    assert finalize(shard_map(lambda k: {"high": Max(torch.tensor(k))}, mesh, resident, merged)(state).result()) == {
        "high": 2
    }


def test_a_donated_handle_cannot_be_used_again(mesh: Mesh) -> None:
    init, step, total = counter(mesh)
    state = init()
    new, _ = step(state, torch.arange(3))
    assert state.consumed
    assert not new.consumed
    with pytest.raises(
        ConsumedState, match=r"shard_map\(step\): this value of shard_map\(init\) was consumed by shard_"
    ):
        step(state, torch.arange(3))
    with pytest.raises(ConsumedState, match=r"shard_map\(total\): "):
        total(state)


def test_a_call_that_fails_consumes_nothing(mesh: Mesh) -> None:
    init, _, total = counter(mesh)
    state = init()

    def fail(state: list[int], x: Tensor) -> list[int]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        shard_map(fail, mesh, (donated, P("dp")), resident)(state, torch.arange(3)).result()
    assert finalize(total(state).result()) == {"total": 0}


def test_a_handle_is_donated_once_in_a_call(mesh: Mesh) -> None:
    init, _, _ = counter(mesh)
    state = init()
    calls: list[int] = []
    with pytest.raises(ConsumedState):
        shard_map(lambda a, b: calls.append(1), mesh, (donated, donated), resident)(state, state)
    assert calls == []


def test_a_handle_cannot_be_borrowed_and_donated_in_one_call(mesh: Mesh) -> None:
    init, _, _ = counter(mesh)
    state = init()
    with pytest.raises(ConsumedState):
        shard_map(lambda a, b: b, mesh, (resident, donated), resident)(state, state)


def test_a_handle_of_another_mesh(local: Cluster, mesh: Mesh) -> None:
    init, step, _ = counter(local.reserve(3).mesh())
    _, other_step, other_total = counter(mesh)
    state = init()
    with pytest.raises(ForeignState, match=r"shard_map\(total\): this value of shard_map\(init\) belongs to"):
        other_total(state)
    with pytest.raises(ForeignState, match=r"shard_map\(step\): "):
        other_step(state, torch.arange(3))
    step(state, torch.arange(3))


def test_a_cluster_that_has_been_left() -> None:
    with cluster("local") as here:
        init, step, total = counter(here.reserve(2).mesh())
        state = init()
    for call in (init, partial(step, state, torch.arange(3)), partial(total, state)):
        with pytest.raises(ClosedCluster, match=r"shard_map\(\w+\): the cluster 'local' has been left"):
            call()


@pytest.mark.parametrize("spec", [resident, donated], ids=repr)
def test_what_stays_on_a_mesh_is_given_as_a_handle(mesh: Mesh, spec: Any) -> None:
    message = rf"shard_map\(my_fn\): {spec!r} takes a handle that a call on this mesh returned; found Tensor"
    with pytest.raises(PlacementError, match=message):
        shard_map(named_my_fn(lambda x: x), mesh, spec, resident)(torch.zeros(3))


def test_donated_is_no_spec_for_results(mesh: Mesh) -> None:
    with pytest.raises(PlacementError, match="donated is a spec for arguments; a result that stays on the mesh is res"):
        shard_map(lambda x: x, mesh, P("dp"), donated)(torch.zeros(3))


# --- merged


def test_merged_results_are_added_up(mesh: Mesh) -> None:
    batch = of_lengths([1, 2, 3, 4])
    assert finalize(shard_map(sums, mesh, P("dp"), merged)(batch).result()) == pytest.approx(finalize(sums(batch)))


def test_merged_is_no_spec_for_arguments(mesh: Mesh) -> None:
    with pytest.raises(PlacementError, match=r"merged is a spec for results; use P\(\) for metrics that go in"):
        shard_map(lambda x: x, mesh, merged, P())({})


@pytest.mark.parametrize(
    "wrong", [torch.tensor(1.0), 1.0, None, Sum(torch.tensor(1.0))], ids=["tensor", "float", "none", "sum"]
)
def test_merged_results_are_metrics(mesh: Mesh, wrong: object) -> None:
    with pytest.raises(PlacementError, match=r"shard_map\(my_fn\): "):
        shard_map(named_my_fn(lambda: wrong), mesh, (), merged)()


# --- calls


def test_futures_are_accepted_as_arguments(mesh: Mesh) -> None:
    double = shard_map(lambda x: 2 * x, mesh, P("dp"), P("dp"))
    assert double(double(torch.arange(4))).result().tolist() == [0, 4, 8, 12]
    batch = assign(
        of_lengths([1, 2, 3]),
        rewards=shard_map(lambda b: b["row"].float(), mesh, P("dp"), P("dp"))(of_lengths([1, 2, 3])),
    )
    assert batch["rewards"].tolist() == [0, 1, 2]


def test_what_a_future_raises_comes_out(mesh: Mesh) -> None:
    future: Future[Tensor] = Future()
    future.set_exception(ZeroDivisionError("earlier"))
    with pytest.raises(ZeroDivisionError, match="earlier"):
        shard_map(lambda x: x, mesh, P("dp"), P("dp"))(future).result()


def test_what_the_function_raises_comes_out(mesh: Mesh) -> None:
    def fail(x: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        shard_map(fail, mesh, P("dp"), P("dp"))(torch.arange(3)).result()


def test_one_spec_stands_for_all_arguments(mesh: Mesh) -> None:
    add = shard_map(lambda a, b: a + b, mesh, P("dp"), P("dp"))
    assert add(torch.arange(3), torch.arange(3)).result().tolist() == [0, 2, 4]


def test_the_number_of_in_specs(mesh: Mesh) -> None:
    with pytest.raises(PlacementError, match=r"shard_map\(my_fn\): 1 in_specs for 2 arguments; give one for each"):
        shard_map(named_my_fn(lambda *x: x), mesh, [P("dp")], P("dp"))(torch.arange(3), torch.arange(3))


@pytest.mark.parametrize("wrong", [lambda x: x, lambda x: (x,), lambda x: [x, x]], ids=["one", "tuple of one", "list"])
def test_the_number_of_out_specs(mesh: Mesh, wrong: Callable[[Tensor], Any]) -> None:
    message = r"shard_map\(my_fn\): 2 out_specs, so it must return a tuple of 2 values"
    with pytest.raises(PlacementError, match=message):
        shard_map(named_my_fn(wrong), mesh, P("dp"), (P("dp"), P("dp")))(torch.arange(3))


def test_a_sequence_of_one_out_spec_is_a_tuple_of_one(mesh: Mesh) -> None:
    (out,) = shard_map(lambda x: (x,), mesh, P("dp"), [P("dp")])(torch.arange(3))
    assert out.result().tolist() == [0, 1, 2]


def test_a_mapped_function_keeps_its_name(mesh: Mesh) -> None:
    assert shard_map(sums, mesh, P("dp"), merged).__name__ == "sums"
    assert microbatched(sums, 10).__name__ == "sums"


def test_a_callable_without_a_name(mesh: Mesh) -> None:
    add = partial(torch.add, torch.tensor(1))
    assert shard_map(add, mesh, P("dp"), P("dp"))(torch.arange(3)).result().tolist() == [1, 2, 3]
    with pytest.raises(PlacementError, match=r"shard_map\(partial\)"):
        shard_map(add, mesh, P("dp"), donated)(torch.arange(3))


# --- NRL_DEBUG


@pytest.mark.parametrize("spec", [P("dp"), P()], ids=repr)
def test_debug_catches_a_function_that_writes_into_its_batch(
    monkeypatch: pytest.MonkeyPatch, mesh: Mesh, spec: P
) -> None:
    monkeypatch.setenv("NRL_DEBUG", "1")

    def my_fn(batch: Batch) -> Metrics:
        batch["row"].add_(1)
        return {}

    with pytest.raises(MutatedBatch, match="my_fn wrote into its batch: row"):
        shard_map(my_fn, mesh, spec, merged)(of_lengths([1, 2, 3])).result()


def test_debug_watches_every_batch(monkeypatch: pytest.MonkeyPatch, mesh: Mesh) -> None:
    monkeypatch.setenv("NRL_DEBUG", "1")

    def my_fn(batch: Batch, other: Batch) -> Metrics:
        other["row"].add_(1)
        return {}

    with pytest.raises(MutatedBatch, match="my_fn wrote into its batch: row"):
        shard_map(my_fn, mesh, P("dp"), merged)(of_lengths([1, 2, 3]), of_lengths([1, 2, 3])).result()


def test_debug_lets_others_pass(monkeypatch: pytest.MonkeyPatch, mesh: Mesh) -> None:
    monkeypatch.setenv("NRL_DEBUG", "1")
    batch = of_lengths([1, 2, 3])
    assert finalize(shard_map(sums, mesh, P("dp"), merged)(batch).result())["sum"] == 6


# --- microbatched


@quick
@given(st.lists(st.integers(0, 9), max_size=8), st.integers(9, 40))
def test_microbatches_add_up_to_the_whole(sizes: list[int], max_tokens: int) -> None:
    batch = of_lengths(sizes)

    def fn(part: Batch) -> Metrics:
        assert part["input_ids"].numel() <= max_tokens
        return sums(part)

    read = finalize(microbatched(fn, max_tokens)(batch))
    assert read == (pytest.approx(finalize(sums(batch)), nan_ok=True) if sizes else {})


def test_microbatched_hands_other_arguments_on() -> None:
    def scaled(batch: Batch, factor: float) -> Metrics:
        return {"x": Sum(factor * batch["row"].sum())}

    assert finalize(microbatched(scaled, 9)(of_lengths([9, 9, 9]), 2.0)) == {"x": 6.0}


def test_microbatched_really_splits() -> None:
    seen: list[int] = []

    def fn(part: Batch) -> Metrics:
        seen.append(len(part))
        return {}

    microbatched(fn, 18)(of_lengths([9, 9, 9, 1]))
    assert seen == [2, 2]


def test_the_transforms_compose(mesh: Mesh) -> None:
    batch = of_lengths([1, 9, 1, 4, 4, 1, 7, 7])
    fn = shard_map(microbatched(sums, 9), mesh, P("dp"), merged)
    assert finalize(fn(batch).result()) == pytest.approx(finalize(sums(batch)))
