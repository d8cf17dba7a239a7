"""`shard_map`: maps functions of local values over a mesh.

`shard_map` turns a function that a process runs on what is local to it into the same function of whole batches. The
specs say how each argument gets there and how each result comes back.
"""

import functools
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from nrl.algos import name_of
from nrl.arguments import checked
from nrl.batch import Batch, deal, microbatches, restore
from nrl.batch.metrics import Ess, Max, Mean, Metrics, Min, Sum, merge
from nrl.errors import ConsumedState, PlacementError
from nrl.runtime.mesh.futures import RemoteFuture, as_future
from nrl.runtime.mesh.handles import Handle
from nrl.runtime.mesh.placement import Mesh
from nrl.runtime.mesh.processes import Donated, Out, RowSlice
from nrl.runtime.mesh.rpc import only, watched

__all__ = ["P", "Spec", "donated", "merged", "microbatched", "resident", "shard_map"]


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


class Spec(Enum):
    """Specs for values that stay on the mesh, and for numbers that are still being added up.

    >>> Spec.resident is resident
    True
    """

    resident = "resident"
    donated = "donated"
    merged = "merged"

    def __repr__(self) -> str:
        return self.value


resident = Spec.resident
donated = Spec.donated
merged = Spec.merged

type _AnySpec = P | Spec


@checked("shard_map")
def shard_map(
    fn: Callable[..., Any],
    mesh: Mesh,
    in_specs: _AnySpec | Sequence[_AnySpec],
    out_specs: _AnySpec | Sequence[_AnySpec],
) -> Callable[..., Any]:
    """Turn a function of local values into the same function of whole values on a mesh.

    Args:
        fn: called once in each process of the mesh; `nrl.process` tells it which one. On a cluster of processes it
            is sent there as it is when it is called, with all that it captures.
        mesh: where it runs.
        in_specs: one for each argument, or one for all. ``P("dp")``: a batch or tensor whose rows are split, balanced
            by tokens (several such arguments are split alike); ``P()``: any value, given whole; ``resident``: a handle,
            borrowed; ``donated``: a handle, consumed.
        out_specs: one for each result if ``fn`` returns a tuple, else one. ``P("dp")``: rows, put back in order;
            ``P()``: the same from every shard; ``resident``: stays on the mesh; ``merged``: `Metrics`, added up.

    Returns:
        The mapped function. It returns futures, and handles where the spec is ``resident``; futures are accepted as
        arguments, and what they stand for goes from process to process without passing through this one.

    Raises:
        BatchError: a result with ``P("dp")`` that does not have a row for each row of its shard.
        PlacementError: specs that do not fit the arguments or results, or shards that differ where ``P()`` says that
            they agree. Where the call itself raises, nothing has been donated; on a cluster of processes errors of
            ``fn`` come when a result is read; if all processes raised, the handle that was returned in the place of a
            donated one stands for the old value.
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
    local = functools.partial(watched, fn, name)
    outs = _out(who, out_specs) if isinstance(out_specs, P | Spec) else tuple(_out(who, spec) for spec in out_specs)

    @functools.wraps(fn)
    def mapped(*args: Any) -> Any:
        mesh.cluster.check_open(who)
        specs = [in_specs] * len(args) if isinstance(in_specs, P | Spec) else list(in_specs)
        if len(specs) != len(args):
            raise PlacementError(f"{who}: {len(specs)} in_specs for {len(args)} arguments; give one for each")
        values = [arg if isinstance(arg, Handle) else as_future(arg) for arg in args]
        _check_handles(who, values, specs)
        rows = _rows(who, values, specs, mesh.dp)
        columns = [_spread(who, value, spec, rows, mesh) for value, spec in zip(values, specs, strict=True)]
        locals_ = [list(each) for each in zip(*columns, strict=True)] if columns else [[] for _ in mesh.called_shards]
        kinds = [out_specs] if isinstance(out_specs, P | Spec) else out_specs
        if rows is None and P("dp") in kinds:
            raise PlacementError(f"{who}: out_specs has P('dp'), but no argument was split by rows")

        def sent() -> None:
            for value, spec in zip(values, specs, strict=True):
                if spec is donated:
                    value.donate(mesh, who)

        results = mesh.processes.call(who, local, locals_, outs, sent=sent)
        given = [_collect(who, result, spec, rows, mesh) for result, spec in zip(results, kinds, strict=True)]
        return given[0] if isinstance(outs, Out) else tuple(given)

    return mapped


def _out(who: str, spec: _AnySpec) -> Out:
    if spec is donated:
        raise PlacementError(f"{who}: donated is a spec for arguments; a result that stays on the mesh is resident")
    if spec is resident:
        return Out.on_rank
    return Out.replicated if spec == P() else Out.per_shard


def _check_handles(who: str, values: Sequence[Any], specs: Sequence[_AnySpec]) -> None:
    """Before anything runs: handles only where a spec takes them, and none that is donated is given twice."""
    for value, spec in zip(values, specs, strict=True):
        if isinstance(spec, P) and isinstance(value, Handle):
            raise PlacementError(f"{who}: a handle was given for {spec!r}; its spec is resident (borrow) or donated")
        if spec is donated and sum(other is value for other in values) > 1:
            raise ConsumedState(f"{who}: a handle that is donated was given twice in one call; nothing else may use it")


def _rows(who: str, values: list[Any], specs: Sequence[_AnySpec], n: int) -> list[Tensor] | None:
    """Which rows go to which shard: balanced by tokens if there is a batch, else as evenly as can be.

    A value that is still on its way is split as it was computed, if it was computed in ``n`` shards; otherwise it has
    to be waited for.
    """
    split = [index for index, spec in enumerate(specs) if spec == P("dp")]
    if not split:
        return None
    coming = [values[index] for index in split if isinstance(values[index], RemoteFuture)]
    if len(coming) < len(split) or any(value.rows is None or len(value.rows) != n for value in coming):
        for index in split:
            if isinstance(values[index], RemoteFuture) and values[index].rows is None:
                values[index] = values[index].result()
    for index in split:
        value = values[index]
        if not isinstance(value, RemoteFuture) and (not isinstance(value, Tensor | TensorDict) or value.ndim == 0):
            raise PlacementError(f"{who}: P('dp') splits the rows of a tensor or a batch; found {type(value).__name__}")
    sizes = [_length(values[index]) for index in split]
    if len(set(sizes)) > 1:
        raise PlacementError(f"{who}: arguments with P('dp') have different numbers of rows: {sizes}")
    here = [values[index] for index in split if not isinstance(values[index], RemoteFuture)]
    batches = [value for value in here if isinstance(value, TensorDict) and "input_ids" in value.keys()]
    if batches:
        return deal(batches[0], n)
    if coming and coming[0].rows is not None and len(coming[0].rows) == n:
        return list(coming[0].rows)
    return list(torch.arange(sizes[0]).tensor_split(n))


def _length(value: Any) -> int:
    return sum(len(part) for part in value.rows or ()) if isinstance(value, RemoteFuture) else len(value)


def _spread(who: str, value: Any, spec: _AnySpec, rows: list[Tensor] | None, mesh: Mesh) -> list[Any]:
    """What each rank gets of an argument."""
    if spec == P("dp"):
        assert rows is not None
        parts = [value.part(index) if isinstance(value, RemoteFuture) else RowSlice(value, index) for index in rows]
        return [parts[shard] for shard in mesh.called_shards]
    if spec == P():
        return [value] * len(mesh.called_shards)
    if spec is merged:
        raise PlacementError(f"{who}: merged is a spec for results; use P() for metrics that go in")
    if not isinstance(value, Handle):
        raise PlacementError(
            f"{who}: {spec!r} takes a handle that a call on this mesh returned; found {type(value).__name__}"
        )
    held = value.borrow(mesh, who)
    return [Donated(each) for each in held] if spec is donated else held


def _collect(who: str, result: Any, spec: _AnySpec, rows: list[Tensor] | None, mesh: Mesh) -> Any:
    if spec is resident:
        return Handle(mesh, mesh, f"value of {who}", result)
    if spec is merged:
        return result.then(functools.partial(_sum, who))
    if spec == P():
        return result.then(only)
    assert rows is not None
    return result.then(functools.partial(restore, rows, caller=who), rows)


def _sum(who: str, results: list[Any]) -> Metrics:
    for result in results:
        kinds = Mean | Sum | Max | Min | Ess
        if not isinstance(result, dict) or not all(isinstance(x, kinds) for x in result.values()):
            raise PlacementError(
                f"{who}: merged wants metrics, a dict of Mean, Sum, Max, Min and Ess; found {type(result).__name__}"
            )
    start: Metrics = {}
    return functools.reduce(merge, results, start)


def microbatched(fn: Callable[..., Metrics], max_tokens: int) -> Callable[..., Metrics]:
    """Turn a function of a batch that returns sums into the same sums over a batch of any size.

    Args:
        fn: ``(batch, ...) -> Metrics``; what it returns must add up over rows.
        max_tokens: bound on the tokens of each micro-batch, padding counted.

    >>> from nrl.batch.metrics import Sum, finalize
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
