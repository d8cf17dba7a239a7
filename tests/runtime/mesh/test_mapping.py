"""Functions mapped over a mesh: what the local cluster and Ray do alike. Each has a file of what is its own."""

import copy
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
from nrl.batch.metrics import Max, Mean, Metrics, Min, Sum, finalize
from nrl.errors import ConsumedState, NrlError, PlacementError
from nrl.runtime import Handle, Mesh, P, cluster, donated, merged, microbatched, process, resident, shard_map

quick = settings(max_examples=40)


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=pytest.mark.ray)])
def mesh(request: pytest.FixtureRequest) -> Iterator[Mesh]:
    if request.param == "ray":
        yield request.getfixturevalue("on_ray").reserve(2).mesh(executable="system", name="alike")
    else:
        with cluster("local") as here:
            yield here.reserve(3).mesh(dp=3)


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


def rank_of(rows: Tensor) -> Tensor:
    """For each row, which process has it."""
    return torch.full((len(rows),), process().rank)


def test_rows_are_really_split_and_come_back_in_order(mesh: Mesh) -> None:
    fn = shard_map(lambda x: (2 * x, rank_of(x)), mesh, P("dp"), (P("dp"), P("dp")))
    doubled, ranks = fn(torch.arange(7))
    assert doubled.result().tolist() == [0, 2, 4, 6, 8, 10, 12]
    assert sorted(ranks.result().bincount().tolist()) == {2: [3, 4], 3: [2, 2, 3]}[mesh.dp]


def test_batches_are_split_by_tokens_and_come_back_in_order(mesh: Mesh) -> None:
    def describe(batch: Batch) -> tuple[Tensor, Tensor, Batch]:
        assert batch.is_locked
        return rank_of(batch["row"]), batch["row"], batch.select("row", "input_ids")

    batch = of_lengths([1, 9, 1, 4, 4, 1])
    ranks, rows, restored = shard_map(describe, mesh, P("dp"), (P("dp"),) * 3)(batch)
    tokens = ranks.result().bincount(lengths(batch)).tolist()
    assert sorted(tokens) == {2: [10, 10], 3: [5, 6, 9]}[mesh.dp]
    assert rows.result().tolist() == [0, 1, 2, 3, 4, 5]
    assert (restored.result() == batch.select("row", "input_ids")).all()
    assert restored.result().is_locked


def test_a_call_has_results_of_every_kind(mesh: Mesh) -> None:
    def fn(batch: Batch, scale: float) -> tuple[Tensor, Metrics, float, Tensor]:
        scaled = batch["row"] * scale
        return scaled, {"rows": Sum(torch.tensor(len(batch)))}, scale, scaled

    specs = (P("dp"), merged, P(), resident)
    scaled, metrics, scale, kept = shard_map(fn, mesh, (P("dp"), P()), specs)(of_lengths([3, 1, 8, 5, 0]), 1.5)
    assert scaled.result().tolist() == [0, 1.5, 3, 4.5, 6]
    assert finalize(metrics.result()) == {"rows": 5}
    assert scale.result() == 1.5
    summed = shard_map(lambda x: {"sum": Sum(x.sum())}, mesh, resident, merged)
    assert finalize(summed(kept).result()) == {"sum": 15}


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


@pytest.mark.parametrize("rows", [0, 1])
def test_with_fewer_rows_than_shards_some_shards_have_none(mesh: Mesh, rows: int) -> None:
    """A shard without rows is not taken for the whole, whichever is sent first."""

    def about(batch: Batch) -> tuple[Tensor, Metrics]:
        return batch["input_ids"] + 1, {**sums(batch), "empty": Sum(torch.tensor(int(len(batch) == 0)))}

    split = shard_map(about, mesh, P("dp"), (P("dp"), merged))
    whole = shard_map(lambda batch: len(batch), mesh, P(), P())
    for first in (whole, split):
        batch = of_lengths([5] * rows)
        first(batch)
        assert whole(batch).result() == rows
        found, metrics = split(batch)
        assert found.result().equal(batch["input_ids"] + 1)
        read = finalize(metrics.result())
        assert (read["sum"], read["empty"]) == (5 * rows, mesh.dp - rows)


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
        shard_map(named_my_fn(wrong), mesh, P("dp"), P("dp"))(torch.arange(2 * mesh.dp)).result()


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
    def fn(x: Tensor, options: dict[str, list[int]]) -> tuple[Any, Metrics]:
        return (x.tolist(), options), {"calls": Sum(torch.tensor(1))}

    found, metrics = shard_map(fn, mesh, (P(), P()), (P(), merged))(torch.arange(4), {"a": [1, 2]})
    assert found.result() == ([0, 1, 2, 3], {"a": [1, 2]})
    assert finalize(metrics.result()) == {"calls": mesh.dp}


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
    "zero": lambda k: torch.tensor(float(k == 0)),
}


@pytest.mark.parametrize("make", DISAGREED.values(), ids=DISAGREED.keys())
def test_shards_that_disagree_are_caught(mesh: Mesh, make: Callable[[int], Any]) -> None:
    message = r"shard_map\(my_fn\): out_specs says P\(\), the same from every shard, but the shards differ"
    last = mesh.dp - 1
    with pytest.raises(PlacementError, match=message):
        shard_map(named_my_fn(lambda: make(last - process().rank)), mesh, (), P())().result()


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
    state = shard_map(lambda: process().rank, mesh, (), resident)()
    read = shard_map(lambda rank, x: x + rank, mesh, (resident, P("dp")), P("dp"))
    for _ in range(2):
        assert read(state, torch.zeros(mesh.dp)).result().tolist() == list(range(mesh.dp))


def test_a_donated_handle_cannot_be_used_again(mesh: Mesh) -> None:
    init, step, total = counter(mesh)
    state = init()
    new, _ = step(state, torch.arange(3))
    assert state.is_consumed
    assert not new.is_consumed
    with pytest.raises(
        ConsumedState, match=r"shard_map\(step\): this value of shard_map\(init\) was consumed by shard_"
    ):
        step(state, torch.arange(3))
    with pytest.raises(ConsumedState, match=r"shard_map\(total\): "):
        total(state)


@pytest.mark.parametrize("other", [donated, resident], ids=repr)
def test_a_handle_is_donated_once_in_a_call_and_not_borrowed_too(mesh: Mesh, other: Any) -> None:
    init, _, total = counter(mesh)
    state = init()
    with pytest.raises(ConsumedState):
        shard_map(lambda a, b: b, mesh, (other, donated), resident)(state, state)
    assert finalize(total(state).result()) == {"total": 0}


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
        shard_map(named_my_fn(lambda: wrong), mesh, (), merged)().result()


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
        shard_map(named_my_fn(wrong), mesh, P("dp"), (P("dp"), P("dp")))(torch.arange(3))[0].result()


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
