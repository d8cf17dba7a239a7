"""The driver's half of training: what happens to a batch before it is split, and to the sums after.

The weight of each term of a loss is a function of the batch alone, so the driver learns it by calling the loss on
outputs of zeros, before the first forward. The engine divides each micro-batch's total by it: sums all the way.
"""

import functools
import json
import math
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from nrl.algos import Loss, name_of, needed, output_kind, output_shape
from nrl.backends import processing
from nrl.backends.base import Bucket, Engine, Params, Trainer, TrainState
from nrl.backends.base import top_k as top_k_named
from nrl.batch import Batch, deal, microbatches, pad, restore, shard, unchanged
from nrl.columns import COLUMNS
from nrl.errors import MissingColumn, MissingOutput, ModelError, NotFinite, WeightError
from nrl.reduce import Ess, Max, Mean, Metrics, Min, Sum
from nrl.runtime import Future, Handle, Mesh, done
from nrl.runtime.futures import on_its_way
from nrl.runtime.placement import Donated, Out, Rows, Value
from nrl.runtime.transfer import opened, route

__all__ = ["check_terms", "check_weights", "global_weights", "make_trainer", "terms_of"]

_RELATIVE = 1e-5
"""How far sums of weights in another order may differ, as a fraction."""

_RESERVED = frozenset({"loss", "grad_norm", "lr", "tokens", "lag", "skipped"}) | {
    f"mismatch/{name}" for name in ("kl", "ess", "max_abs", "chi2", "max_ratio")
}


def terms_of(name: str, value: Any) -> tuple[dict[str, Mean], Metrics]:
    """What a loss returned, as terms by name and metrics.

    Raises:
        TypeError: it returned something else.

    >>> terms, metrics = terms_of("my_loss", (Mean(torch.tensor(1.0), torch.tensor(2.0)), {}))
    >>> list(terms)
    ['loss']
    """
    match value:
        case (Mean() as mean, dict() as metrics):
            return _checked_terms(name, {"loss": mean}), _checked_metrics(name, metrics)
        case (dict() as terms, dict() as metrics) if terms and all(isinstance(x, Mean) for x in terms.values()):
            return _checked_terms(name, terms), _checked_metrics(name, metrics)
    raise TypeError(
        f"{name} returned {type(value).__name__}; a loss returns (Mean, metrics) or (dict of Mean, metrics), for "
        "example (token_mean(loss, batch['loss_mask']), {})"
    )


def _checked_terms(name: str, terms: dict[str, Mean]) -> dict[str, Mean]:
    for key, term in terms.items():
        for part, value in zip(term._fields, term, strict=True):
            if not isinstance(value, Tensor) or value.ndim != 0:
                found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise TypeError(
                    f"{name}: the {part} of term '{key}' is {found}; it must be a scalar tensor, a sum over rows"
                )
    return terms


def _checked_metrics(name: str, metrics: dict[str, Any]) -> Metrics:
    for key, value in metrics.items():
        if key in _RESERVED:
            raise TypeError(f"{name} returned a metric '{key}', a name that the step itself reports; give it another")
        if not isinstance(value, Mean | Sum | Max | Min | Ess) or not all(isinstance(x, Tensor) for x in value):
            raise TypeError(
                f"{name} returned the metric '{key}' as a {type(value).__name__}; return a Mean, Sum, Max, Min or Ess, "
                f"such as token_mean({key}, batch['loss_mask'])"
            )
    return metrics


_LOGPROBS = frozenset({"logprobs"})


def global_weights(
    loss: Loss, batch: Batch, fill: float = 0.0, *, always: Collection[str] = _LOGPROBS
) -> dict[str, float]:
    """The weight of each term of ``loss`` over a whole batch, from a call on outputs that are all ``fill``.

    Args:
        loss: what to call.
        batch: all of it.
        fill: what the outputs are.
        always: the outputs that there are although the loss has not asked for them.

    Raises:
        MissingColumn: the loss reads a column that the batch does not have.
        MissingOutput: the loss reads an output that it did not ask for.

    >>> from nrl.algos import sft_loss
    >>> mask = torch.tensor([[False, True, True]])
    >>> batch = Batch({"input_ids": mask.long(), "loss_mask": mask}, batch_size=[1])
    >>> global_weights(sft_loss, batch)
    {'loss': 2.0}
    """
    return {key: float(term.weight) for key, term in _probe(loss, batch, fill, always).items()}


def _probe(loss: Loss, batch: Batch, fill: float, always: Collection[str]) -> dict[str, Mean]:
    """The terms of a loss on outputs that are all ``fill``."""
    name = name_of(loss)
    device = batch["input_ids"].device
    outputs = {key: torch.full(output_shape(key, batch), fill, device=device) for key in {*always, *needed(loss)}}
    out = TensorDict(outputs, batch_size=batch.batch_size)
    try:
        with torch.no_grad(), unchanged(batch, name):
            terms, _ = terms_of(name, loss(out, batch))
    except MissingColumn:
        raise
    except KeyError as error:
        missing = re.match(r".*key \"(.+)\" not found in TensorDict with keys \[(.*)\]", str(*error.args[:1]))
        if missing is None:
            raise
        if missing[2] == ", ".join(f"'{key}'" for key in sorted(out.keys())):
            raise MissingOutput(
                f"{name} reads the output '{missing[1]}' and did not ask for it; decorate it with "
                f"@nrl.algos.needs('{missing[1]}')"
                if missing[1] not in _LOGPROBS
                else f"{name} reads logprobs, which only a model with head='lm' computes"
            ) from error
        known = COLUMNS.get(missing[1])
        hint = known.hint if known else f"Add it with assign(batch, {missing[1]}=...)."
        raise MissingColumn(name, missing[1], sorted(map(str, batch.keys())), hint) from error
    return terms


def check_terms(name: str, seen: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Compare the terms of a real call with those that the driver knows.

    Raises:
        WeightError: they differ.

    >>> check_terms("my_loss", {"loss": 6.0}, {"loss": 6.0})
    """
    if seen.keys() != expected.keys():
        raise WeightError(
            f"{name}: its terms are {', '.join(sorted(seen)) or 'none'} on some outputs and "
            f"{', '.join(sorted(expected))} on others; a loss returns the same terms for every output and part"
        )


def check_weights(name: str, seen: Mapping[str, float], expected: Mapping[str, float]) -> None:
    """Compare the weights of the real calls, added up, with those that the driver learned.

    Raises:
        WeightError: they differ, so the loss's weight depends on more than the rows of the batch.

    >>> check_weights("my_loss", {"loss": 6.0}, {"loss": 6.0})
    """
    for key, weight in expected.items():
        found = seen.get(key, 0.0)
        if not abs(found - weight) <= _RELATIVE * max(abs(found), abs(weight)):
            raise WeightError(
                f"{name}: the weight of term '{key}' is {weight:g} on the whole batch, but {found:g} added up over its "
                "parts or on other outputs. A weight must be a sum over rows of the batch alone: aggregate with "
                "token_mean, seq_mean or seq_sum (a mean of means is not, nor a count that the output selects)"
            )


def _check_law(loss: Loss, batch: Batch, weights: Mapping[str, float], always: Collection[str]) -> bool:
    """Weights do not look at outputs or padding, and terms add up over rows; whether this batch could tell."""
    name, width = name_of(loss), batch["input_ids"].shape[-1]
    whole = _probe(loss, batch, -1.0, always)
    for probe in (whole, _probe(loss, pad(batch, width + 1), 0.0, always)):
        check_terms(name, probe, weights)
        check_weights(name, {key: float(term.weight) for key, term in probe.items()}, weights)
    if len(batch) < 2:
        return False
    halves = [_probe(loss, half, -1.0, always) for half in shard(batch, 2)]
    for half in halves:
        check_terms(name, half, weights)
    check_weights(name, {key: sum(float(half[key].weight) for half in halves) for key in whole}, weights)
    for key, term in whole.items():
        parts = [float(half[key].total) for half in halves]
        total = float(term.total)
        finite = math.isfinite(total) and all(map(math.isfinite, parts))  # otherwise there is a better error to come
        if finite and abs(sum(parts) - total) > 1e-3 * (sum(map(abs, parts)) + abs(total)):
            raise WeightError(
                f"{name}: the total of term '{key}' is {total:g} on the whole batch, but {sum(parts):g} added up over "
                "its halves. A total must be a sum over rows: compute statistics of the batch, such as a mean to "
                "subtract, on the driver, and read them from a column"
            )
    return all(float(term.weight) != 0 for half in halves for term in half.values())


def make_trainer(
    mesh: Mesh,
    make_engine: Callable[[], Engine[Any, Any]],
    *,
    name: str,
    max_tokens: int,
    parts_of: Callable[..., Sequence[Batch]] = microbatches,
    adapter: Any = None,
) -> Trainer:
    """Map an engine onto a mesh.

    An engine is made in each process. A batch is split into dp shards, each shard into micro-batches of at most
    ``max_tokens`` tokens; the engines add their gradients up and step once. On the local cluster one process holds one
    copy of the weights and gets all shards.

    Args:
        mesh: where it runs.
        make_engine: makes what runs there.
        name: how errors speak of the trainer.
        max_tokens: bound on the tokens of a micro-batch, padding counted.
        parts_of: how a shard is split; called as ``parts_of(batch, max_tokens=...)``.
        adapter: `Model.adapter` of what it trains.
    """
    owner, n = _Owner(name), mesh.processes.count
    stepping = threading.Lock()  # a step is asked for and consumes its state in one
    split_up = partial(parts_of, max_tokens=max_tokens)

    def call(
        who: str, fn: Callable[..., Any], columns: Sequence[Sequence[Any]], outs: Any = Out.kept, *, turn: bool = True
    ) -> Any:
        """Call ``fn`` in each process, with its entry of each column."""
        mesh.cluster.check_open(who)
        args = [list(row) for row in zip(*columns, strict=True)] if columns else [[] for _ in range(n)]
        found = mesh.processes.call(who, fn, args, outs, turn=turn)
        return found if isinstance(outs, tuple) else found[0]

    def every(value: Any) -> list[Any]:
        return [value] * n

    engines = call(name, make_engine, [])

    def held(params: Params, who: str) -> list[Sequence[Any]]:
        """Two columns: the values that hold some params, and how to find them there."""
        if not isinstance(params, Params):
            raise TypeError(f"{who}: expected params (state.params or trainer.load()), found {type(params).__name__}")
        return [params.handle.borrow(owner, who), every(isinstance(params, _Frozen))]

    def buckets(params: Params, reader: str, to: Sequence[Mesh], alone: bool) -> Iterator[Future[Bucket]]:
        send, out = route(mesh, to)
        # Those that receive may be on the same devices, and both have to be there
        reading = call(reader, processing.read, [engines, *held(params, reader), every(alone)], turn=False)
        more = True
        while more:
            some = partial(processing.next_bucket, send)
            sent, going_on = call(reader, some, [reading], (out, Out.first), turn=False)
            yield sent.then(opened)
            more = going_on.then(_only).result()
            with stepping:
                held(params, reader)  # in another thread a step may have changed them meanwhile: it raises

    def state_of(values: list[Value], step: int, version: int, published: bool, has: Any) -> TrainState:
        params = Params(Handle(mesh, owner, "train state", values), trainer, version, buckets, has)
        params.published = published
        return TrainState(params, step)

    def frozen(values: list[Value], version: int, published: bool, has: Any) -> Params:
        params = _Frozen(Handle(mesh, owner, "frozen params", values), trainer, version, buckets, has)
        params.published = published
        return params

    def init(params: Params | None = None) -> TrainState:
        same = adapter is not None and (params is None or params.adapter == adapter)  # the base is the model's own
        given = [] if params is None else [every(on_its_way(x)) for x in params.buckets("init", adapter=same)]
        return state_of(call("init", processing.init, [engines, *given]), 0, 0, False, adapter if same else None)

    def load(source: str | None = None) -> Params:
        has = adapter if source is None else None
        return frozen(call("load", processing.load, [engines, every(source)]), 0, False, has)

    def freeze(params: Params) -> Params:
        values = call("freeze", processing.freeze, [engines, *held(params, "freeze")])
        return frozen(values, params.version, params.published, params.adapter)

    def split(batch: Batch) -> tuple[list[Tensor], list[list[Any]]]:
        """Which rows the shards hold, and which of them each process gets."""
        rows = deal(batch, mesh.dp)
        shards = [Rows(batch, index) for index in rows]
        return rows, [shards] if n == 1 else [[shards[mesh.shard_of(rank)]] for rank in range(n)]

    def computed(
        who: str, params: Params, batch: Batch, needs: Collection[str], keys: Sequence[str]
    ) -> list[Future[Tensor]]:
        """Each of some outputs, forward only."""
        check_needs(who, needs)
        weights = held(params, who)
        rows, shards = split(batch)
        fn = partial(processing.forward, split_up, frozenset(needs), tuple(keys))
        replies = call(who, fn, [engines, *weights, *zip(*shards, strict=True)], (Out.each,) * len(keys))
        return [reply.then(partial(_in_order, who, rows), rows) for reply in replies]

    def forward(params: Params, batch: Batch, needs: Collection[str]) -> dict[str, Future[Tensor]]:
        names = sorted({*needs, *(provided() & _LOGPROBS)})
        return dict(zip(names, computed("forward", params, batch, names, names), strict=True))

    def output(need: str, params: Params, batch: Batch) -> Future[Tensor]:
        (found,) = computed(need, params, batch, [need], [need])
        return found

    def top_k(params: Params, batch: Batch, k: int) -> dict[str, Future[Tensor]]:
        ids, logprobs = computed("top_k", params, batch, [top_k_named(k)], ["top_k_ids", "top_k_logprobs"])
        return {"teacher_ids": ids, "teacher_topk_logprobs": logprobs}

    @functools.cache
    def provided() -> frozenset[str]:
        found: frozenset[str] = call(name, processing.provides, [engines], Out.first).then(_only).result()
        return found

    def check_needs(who: str, needs: Collection[str]) -> None:
        missing = sorted(need for need in needs if output_kind(need) not in provided())
        if missing:
            raise MissingOutput(
                f"{who}: it needs {', '.join(missing)}, and {name} provides {', '.join(sorted(provided()))}; another "
                "Model(..., head=...) computes other things"
            )

    def train_step(loss: Loss) -> Callable[[TrainState, Batch], tuple[TrainState, Future[Metrics]]]:
        who = f"train_step({name_of(loss)})"
        check_needs(who, needed(loss))
        always = provided() & _LOGPROBS
        checked = False

        def step(state: TrainState, batch: Batch) -> tuple[TrainState, Future[Metrics]]:
            nonlocal checked
            if not isinstance(state, TrainState):
                raise TypeError(f"{who}: expected a train state (trainer.init()), found {type(state).__name__}")
            values = state.handle.borrow(owner, who)
            weights = global_weights(loss, batch, always=always)
            if not checked:
                checked = _check_law(loss, batch, weights, always)
            metrics = _lag(state.version, batch)
            if any(weight == 0 for weight in weights.values()):
                state.handle.donate(owner, who)
                metrics |= {"skipped": Sum(torch.tensor(1.0))}
                same = state._params
                return state_of(values, state.step, state.version, same.published, same.adapter), done(metrics)
            _check_finite(who, batch)
            _, shards = split(batch)
            # What stays the same from step to step is part of the function, which a process remembers
            fn = partial(processing.train, loss, split_up)
            columns = [engines, [Donated(value) for value in values], every(weights), *zip(*shards, strict=True)]
            with stepping:
                new, found = call(who, fn, columns, (Out.kept, Out.first))
                state.handle.donate(owner, who)
            future = found.then(partial(_of_the_step, metrics))
            return state_of(new, state.step + 1, state.version, False, state._params.adapter), future

        return step

    def save(value: TrainState | Params, folder: str | Path) -> None:
        params = value._params if isinstance(value, TrainState) else value
        alone = params.adapter is not None
        record = {"version": params.version, "published": params.published, "adapter": alone}
        if isinstance(value, TrainState):
            fn: Callable[..., None] = processing.save
            columns: list[Sequence[Any]] = [params.handle.borrow(owner, "save")]
            record |= {"step": value.step}
        else:
            fn, columns = processing.save_params, held(params, "save")
        Path(folder).mkdir(parents=True, exist_ok=True)
        columns += [every(Path(folder).absolute()), every(alone)]
        call("save", fn, [engines, *columns], Out.each).then(_only).result()
        (Path(folder) / "state.json").write_text(json.dumps(record))

    def restore_state(folder: str | Path) -> TrainState | Params:
        mesh.cluster.check_open("restore")
        if not (Path(folder) / "state.json").exists():
            raise FileNotFoundError(f"restore: nothing that a trainer saved is in {folder}")
        record = json.loads((Path(folder) / "state.json").read_text())
        fn = processing.restore if "step" in record else processing.restore_params
        values = call("restore", fn, [engines, every(Path(folder).absolute())])
        has = adapter if record.get("adapter") else None
        if "step" not in record:
            return frozen(values, record["version"], record["published"], has)
        return state_of(values, record["step"], record["version"], record["published"], has)

    def export(params: Params, folder: str | Path, adapter: bool = False) -> None:
        columns = [engines, *held(params, "export"), every(Path(folder).absolute()), every(adapter)]
        if adapter and params.adapter is None:
            raise ModelError(
                "export: adapter=True, and these params are not an adapter on the weights that Model names: it has no "
                "lora, or they come from init(params) or load(folder). Leave it out, and all weights are written"
            )
        Path(folder).mkdir(parents=True, exist_ok=True)
        call("export", processing.export, columns, Out.each).then(_only).result()

    logprobs, values, rewards = (partial(output, need) for need in ("logprobs", "values", "rewards"))
    scores = forward, logprobs, values, rewards, top_k
    trainer = Trainer(init, load, freeze, *scores, train_step, save, restore_state, export)
    return trainer


def _only(results: list[Any]) -> Any:
    return results[0]


def _in_order(who: str, rows: list[Tensor], results: list[Tensor | list[Tensor]]) -> Tensor:
    shards = [shard for result in results for shard in (result if isinstance(result, list) else [result])]
    whole: Tensor = restore(rows, shards, who=who)
    return whole


def _of_the_step(metrics: Metrics, results: list[Metrics]) -> Metrics:
    (found,) = results
    whole = Mean(found["loss"][0], torch.ones(()))  # its parts have been added up: over steps it is a mean
    return metrics | found | {"loss": whole, "skipped": Sum(torch.tensor(0.0))}


class _Owner:
    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


class _Frozen(Params):
    """Params with a handle of their own."""


def _lag(version: int, batch: Batch) -> Metrics:
    """How many publishes the weights are ahead of those that sampled a row, over the rows that are trained on."""
    if "version" not in batch.keys() or "loss_mask" not in batch.keys():
        return {}
    rows = batch["loss_mask"].any(-1)
    return {"lag": Mean(((version - batch["version"]) * rows).sum().float(), rows.sum().float())}


def _check_finite(who: str, batch: Batch) -> None:
    """Columns that are not finite where a token is trained on would poison the weights."""
    if "loss_mask" not in batch.keys():
        return
    for column, value in batch.items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.shape == batch["loss_mask"].shape:
            bad = ~torch.isfinite(value) & batch["loss_mask"]
            if bool(bad.any()):
                rows = torch.nonzero(bad.flatten(1).any(1))[:, 0].tolist()
                raise NotFinite(
                    f"{who}: the column '{column}' is NaN or infinite at tokens that are trained on, in rows "
                    f"{rows[:10]}; mark such rows with assign(batch, valid=...), or mend what computed the column"
                )
