"""Mapping functions of local values over a mesh.

`shard_map` turns a function that a process runs on what is local to it into the same function of whole batches. The
specs say how each argument gets there and how each result comes back.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from enum import Enum
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from nrl.algos import name_of
from nrl.batch import Batch, microbatches, restore, shard, unchanged
from nrl.errors import ConsumedState, PlacementError
from nrl.reduce import Max, Mean, Metrics, Min, Sum, merge
from nrl.runtime.futures import done
from nrl.runtime.handles import Handle
from nrl.runtime.local import Mesh

__all__ = ["P", "State", "donated", "merged", "microbatched", "resident", "shard_map"]


class P(tuple[str, ...]):
    """How the first dimension of a value lies on a mesh: ``P("dp")`` splits rows, ``P()`` gives everyone the whole.

    Raises:
        PlacementError: an axis other than dp, along which rows are not split.

    >>> P("dp"), P()
    (P('dp'), P())
    """

    __slots__ = ()

    def __new__(cls, *axes: str) -> "P":
        """A spec over these axes."""
        if axes not in ((), ("dp",)):
            raise PlacementError(f"P{axes!r}: rows are split along 'dp' only; use P('dp') or P()")
        return super().__new__(cls, axes)

    def __getnewargs__(self) -> tuple[str, ...]:
        return tuple(self)

    def __repr__(self) -> str:
        return f"P({', '.join(map(repr, self))})"


class State(Enum):
    """Specs for values that stay on the mesh, and for numbers that are still being added up.

    >>> State.resident is resident
    True
    """

    resident = "resident"
    donated = "donated"
    merged = "merged"

    def __repr__(self) -> str:
        return self.value


resident = State.resident
donated = State.donated
merged = State.merged

type _Spec = P | State


def shard_map(
    fn: Callable[..., Any],
    mesh: Mesh,
    in_specs: _Spec | Sequence[_Spec],
    out_specs: _Spec | Sequence[_Spec],
) -> Callable[..., Any]:
    """Turn a function of local values into the same function of whole values on a mesh.

    Args:
        fn: called once for each dp shard.
        mesh: where it runs.
        in_specs: one for each argument, or one for all. ``P("dp")``: a batch or tensor whose rows are split, balanced
            by tokens (several such arguments are split alike); ``P()``: any value, given whole; ``resident``: a handle,
            borrowed; ``donated``: a handle, consumed.
        out_specs: one for each result if ``fn`` returns a tuple, else one. ``P("dp")``: rows, put back in order;
            ``P()``: the same from every shard; ``resident``: stays on the mesh; ``merged``: `Metrics`, added up.

    Returns:
        The mapped function. It returns futures, and handles where the spec is ``resident``; futures are accepted as
        arguments.

    Raises:
        BatchError: a result with ``P("dp")`` that does not have a row for each row of its shard.
        PlacementError: specs that do not fit the arguments or results, or shards that differ where ``P()`` says that
            they agree. Whatever is raised, nothing has been donated.
        ConsumedState, ForeignState, ClosedCluster: a handle that cannot be used here.

    >>> from nrl.runtime import cluster
    >>> with cluster("local") as here:
    ...     mesh = here.reserve(3).mesh()
    ...     double = shard_map(lambda x: 2 * x, mesh, P("dp"), P("dp"))
    ...     double(torch.arange(4)).result().tolist()
    [0, 2, 4, 6]

    A value that stays on the mesh, and a sum over it:

    >>> def count(seen, x):
    ...     return seen + len(x), {"rows": Sum(torch.tensor(seen + len(x)))}
    >>> with cluster("local") as here:
    ...     mesh = here.reserve(3).mesh()
    ...     start = shard_map(lambda: 0, mesh, (), resident)()
    ...     state, metrics = shard_map(count, mesh, (donated, P("dp")), (resident, merged))(start, torch.arange(4))
    ...     state, metrics = shard_map(count, mesh, (donated, P("dp")), (resident, merged))(state, torch.arange(4))
    >>> int(metrics.result()["rows"].total)
    8
    """
    name = name_of(fn)
    who = f"shard_map({name})"

    @functools.wraps(fn)
    def mapped(*args: Any) -> Any:
        mesh.cluster.check_open(who)
        specs = [in_specs] * len(args) if isinstance(in_specs, P | State) else list(in_specs)
        if len(specs) != len(args):
            raise PlacementError(f"{who}: {len(specs)} in_specs for {len(args)} arguments; give one for each")
        values = [arg.result() if hasattr(arg, "result") else arg for arg in args]
        _check_handles(who, values, specs)
        rows = _rows(who, values, specs, mesh.dp)
        columns = [_spread(who, value, spec, rows, mesh) for value, spec in zip(values, specs, strict=True)]
        locals_ = zip(*columns, strict=True) if columns else [()] * mesh.dp
        results = [_call(fn, name, local) for local in locals_]
        collected = _collect_all(who, results, out_specs, rows, mesh)
        for value, spec in zip(values, specs, strict=True):
            if spec is donated:
                value.donate(mesh, who)
        return collected

    return mapped


def _check_handles(who: str, values: Sequence[Any], specs: Sequence[_Spec]) -> None:
    """Before anything runs: handles only where a spec takes them, and none that is donated is given twice."""
    for value, spec in zip(values, specs, strict=True):
        if isinstance(spec, P) and isinstance(value, Handle):
            raise PlacementError(f"{who}: a handle was given for {spec!r}; its spec is resident (borrow) or donated")
        if spec is donated and sum(other is value for other in values) > 1:
            raise ConsumedState(f"{who}: a handle that is donated was given twice in one call; nothing else may use it")


def _rows(who: str, values: Sequence[Any], specs: Sequence[_Spec], n: int) -> list[Tensor] | None:
    """Which rows go to which shard: balanced by tokens if there is a batch, else as evenly as can be."""
    split = [value for value, spec in zip(values, specs, strict=True) if spec == P("dp")]
    for value in split:
        if not isinstance(value, Tensor | TensorDict) or value.ndim == 0:
            raise PlacementError(f"{who}: P('dp') splits the rows of a tensor or a batch; found {type(value).__name__}")
    if len({len(value) for value in split}) > 1:
        raise PlacementError(f"{who}: arguments with P('dp') have different numbers of rows: {[len(v) for v in split]}")
    if not split:
        return None
    batches = [value for value in split if isinstance(value, TensorDict) and "input_ids" in value.keys()]
    return shard(batches[0], n).rows if batches else list(torch.arange(len(split[0])).tensor_split(n))


def _spread(who: str, value: Any, spec: _Spec, rows: list[Tensor] | None, mesh: Mesh) -> list[Any]:
    if spec == P("dp"):
        assert rows is not None
        parts = [value[index] for index in rows]
        return [part.lock_() for part in parts] if isinstance(value, TensorDict) else parts
    if spec == P():
        return [value] * mesh.dp
    if spec is merged:
        raise PlacementError(f"{who}: merged is a spec for results; use P() for metrics that go in")
    if not isinstance(value, Handle):
        raise PlacementError(
            f"{who}: {spec!r} takes a handle that a call on this mesh returned; found {type(value).__name__}"
        )
    return value.borrow(mesh, who)


def _call(fn: Callable[..., Any], name: str, local: Sequence[Any]) -> Any:
    with ExitStack() as stack:
        for value in local:
            if isinstance(value, TensorDict):
                stack.enter_context(unchanged(value, name))
        return fn(*local)


def _collect_all(
    who: str, results: list[Any], out_specs: _Spec | Sequence[_Spec], rows: list[Tensor] | None, mesh: Mesh
) -> Any:
    if isinstance(out_specs, P | State):
        return _collect(who, results, out_specs, rows, mesh)
    outs = list(out_specs)
    for result in results:
        if not isinstance(result, tuple) or len(result) != len(outs):
            raise PlacementError(f"{who}: {len(outs)} out_specs, so it must return a tuple of {len(outs)} values")
    columns = zip(zip(*results, strict=True), outs, strict=True)
    return tuple(_collect(who, list(column), spec, rows, mesh) for column, spec in columns)


def _collect(who: str, results: list[Any], spec: _Spec, rows: list[Tensor] | None, mesh: Mesh) -> Any:
    if spec is resident:
        return Handle(mesh, mesh, f"value of {who}", results)
    if spec is merged:
        for result in results:
            if not isinstance(result, dict) or not all(isinstance(x, Mean | Sum | Max | Min) for x in result.values()):
                raise PlacementError(
                    f"{who}: merged wants metrics, a dict of Mean, Sum, Max and Min; found {type(result).__name__}"
                )
        start: Metrics = {}
        return done(functools.reduce(merge, results, start))
    if spec is donated:
        raise PlacementError(f"{who}: donated is a spec for arguments; a result that stays on the mesh is resident")
    if spec == P():
        if not all(_same(results[0], other) for other in results[1:]):
            raise PlacementError(
                f"{who}: out_specs says P(), the same from every shard, but the shards differ; "
                "return rows with P('dp'), or sums with merged"
            )
        return done(results[0])
    if rows is None:
        raise PlacementError(f"{who}: out_specs has P('dp'), but no argument was split by rows")
    return done(restore(rows, results, who=who))


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        alike = a.shape == b.shape and a.dtype == b.dtype
        return alike and bool(((a == b) | ((a != a) & (b != b))).all())  # NaN is the same as NaN here
    if isinstance(a, Mapping | TensorDict):
        return set(a.keys()) == set(b.keys()) and all(_same(a[key], b[key]) for key in a.keys())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b) or (a != a and b != b)


def microbatched(fn: Callable[..., Metrics], max_tokens: int) -> Callable[..., Metrics]:
    """Turn a function of a batch that returns sums into the same sums over a batch of any size.

    Args:
        fn: ``(batch, ...) -> Metrics``; what it returns must add up over rows.
        max_tokens: bound on the tokens of each micro-batch, padding counted.

    >>> from nrl.reduce import Sum, finalize
    >>> count = microbatched(lambda batch: {"tokens": Sum(batch["attention_mask"].sum())}, max_tokens=3)
    >>> mask = torch.tensor([[1, 1, 1], [1, 0, 0]], dtype=torch.bool)
    >>> finalize(count(Batch({"input_ids": mask.long(), "attention_mask": mask}, batch_size=[2])))
    {'tokens': 4.0}
    """

    @functools.wraps(fn)
    def over(batch: Batch, *args: Any) -> Metrics:
        parts = microbatches(batch, max_tokens=max_tokens)
        start: Metrics = {}
        return functools.reduce(merge, (fn(part, *args) for part in parts), start)

    return over
