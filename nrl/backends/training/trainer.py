"""The driver's half of training: everything before a batch is split and after its sums return."""

import functools
import json
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nrl.algos import Loss, name_of, needed, output_kind
from nrl.backends.base import Bucket, Params, Trainer, TrainState
from nrl.backends.base import top_k as top_k_named
from nrl.backends.engines import TrainEngine
from nrl.backends.training import in_process, shared_folders
from nrl.backends.training.law import check_law
from nrl.backends.training.terms import LOGPROBS, global_weights
from nrl.batch import Batch, assign, deal, microbatches, restore
from nrl.batch.grouping import remembered
from nrl.errors import CheckpointError, ColumnError, MissingColumn, MissingOutput, ModelError, NotFinite
from nrl.files import Written, check_sizes, flush, write
from nrl.reduce import Mean, Metrics, Sum
from nrl.runtime import Future, Handle, Mesh, done
from nrl.runtime.mesh.futures import Coming, on_its_way
from nrl.runtime.mesh.placement import Donated, Out, Rows, Value, nothing
from nrl.runtime.transfer import opened, route

__all__ = ["make_trainer"]


def make_trainer(
    mesh: Mesh,
    make_engine: Callable[[], TrainEngine[Any, Any]],
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
        who: str,
        fn: Callable[..., Any],
        columns: Sequence[Sequence[Any]],
        outs: Any = Out.kept,
        *,
        turn: bool = True,
        sent: Callable[[], object] = nothing,
    ) -> Any:
        """Call ``fn`` in each process, with its entry of each column."""
        mesh.cluster.check_open(who)
        args = [list(row) for row in zip(*columns, strict=True)] if columns else [[] for _ in range(n)]
        found = mesh.processes.call(who, fn, args, outs, turn=turn, sent=sent)
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
        reading = call(reader, in_process.read, [engines, *held(params, reader), every(alone)], turn=False)
        more = True
        while more:
            some = partial(in_process.next_bucket, send)
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
        return state_of(call("init", in_process.init, [engines, *given]), 0, 0, False, adapter if same else None)

    def load(source: str | None = None) -> Params:
        has = adapter if source is None else None
        return frozen(call("load", in_process.load, [engines, every(source)]), 0, False, has)

    def freeze(params: Params) -> Params:
        values = call("freeze", in_process.freeze, [engines, *held(params, "freeze")])
        return frozen(values, params.version, params.published, params.adapter)

    def split(batch: Batch, coming: Collection[Coming] = ()) -> tuple[list[Tensor], list[list[Any]]]:
        """Which rows the shards hold, and which of them each process gets, followed by those of other columns."""
        rows = deal(batch, mesh.dp)
        shards = [[Rows(batch, index), *(column.part(index) for column in coming)] for index in rows]
        return rows, [list(chain(*shards))] if n == 1 else [shards[mesh.shard_of(rank)] for rank in range(n)]

    def computed(
        who: str, params: Params, batch: Batch, needs: Collection[str], keys: Sequence[str]
    ) -> list[Future[Tensor]]:
        """Each of some outputs, forward only."""
        check_needs(who, needs)
        weights = held(params, who)
        rows, shards = split(batch)
        fn = partial(in_process.forward, split_up, frozenset(needs), tuple(keys))
        replies = call(who, fn, [engines, *weights, *zip(*shards, strict=True)], (Out.each,) * len(keys))
        likes = [_like(key, batch) for key in keys]
        return [
            reply.then(partial(_in_order, who, rows), rows, like) for reply, like in zip(replies, likes, strict=True)
        ]

    def forward(params: Params, batch: Batch, needs: Collection[str]) -> dict[str, Future[Tensor]]:
        names = sorted({*needs, *(provided() & LOGPROBS)})
        return dict(zip(names, computed("forward", params, batch, names, names), strict=True))

    def output(need: str, params: Params, batch: Batch) -> Future[Tensor]:
        (found,) = computed(need, params, batch, [need], [need])
        return found

    def top_k(params: Params, batch: Batch, k: int) -> dict[str, Future[Tensor]]:
        ids, logprobs = computed("top_k", params, batch, [top_k_named(k)], ["top_k_ids", "top_k_logprobs"])
        return {"teacher_ids": ids, "teacher_topk_logprobs": logprobs}

    @functools.cache
    def provided() -> frozenset[str]:
        found: frozenset[str] = call(name, in_process.provides, [engines], Out.first).then(_only).result()
        return found

    def check_needs(who: str, needs: Collection[str]) -> None:
        missing = sorted(need for need in needs if output_kind(need) not in provided())
        if missing:
            raise MissingOutput(
                f"{who}: it needs {', '.join(missing)}, and {name} provides {', '.join(sorted(provided()))}; another "
                "Model(..., head=...) computes other things"
            )

    def train_step(loss: Loss) -> Callable[..., tuple[TrainState, Future[Metrics]]]:
        who = f"train_step({name_of(loss)})"
        check_needs(who, needed(loss))
        always = provided() & LOGPROBS
        checked = told = False

        def step(
            state: TrainState, batch: Batch, **columns: Tensor | Future[Tensor]
        ) -> tuple[TrainState, Future[Metrics]]:
            nonlocal checked, told
            batch, whole, coming = _with(who, batch, columns)
            if not isinstance(state, TrainState):
                raise TypeError(f"{who}: expected a train state (trainer.init()), found {type(state).__name__}")
            values = state.handle.borrow(owner, who)
            weights = global_weights(loss, whole, always=always)
            if not checked:
                checked = check_law(loss, whole, weights, always)
            metrics = _lag(state.version, batch)
            if any(weight == 0 for weight in weights.values()):
                state.handle.donate(owner, who)
                metrics |= {"skipped": Sum(torch.tensor(1.0))}
                same = state._params
                return state_of(values, state.step, state.version, same.published, same.adapter), done(metrics)
            _check_finite(who, batch)
            told = told or _told(who, loss, batch, always)
            _, shards = split(batch, coming.values())
            # What stays the same from step to step is part of the function, which a process remembers
            fn = partial(in_process.train, loss, split_up, tuple(coming))
            given = [engines, [Donated(value) for value in values], every(weights), *zip(*shards, strict=True)]
            with stepping:
                consume = partial(state.handle.donate, owner, who)
                new, found = call(who, fn, given, (Out.kept, Out.first), sent=consume)
            future = found.then(partial(_of_the_step, metrics))
            return state_of(new, state.step + 1, state.version, False, state._params.adapter), future

        return step

    def strangers(who: str, folder: Path) -> shared_folders.Stranger | None:
        def ask(*given: Any) -> list[tuple[str, str]]:
            found: list[tuple[str, str]] = (
                call(who, shared_folders.answer, [every(x) for x in given], Out.all, turn=False).then(_all).result()
            )
            return found

        return shared_folders.stranger(folder, ask)

    def check_folder(folder: str | Path, who: str = "check_folder") -> None:
        found = strangers(who, Path(folder).absolute())
        if found is not None:
            raise CheckpointError(
                f"{who}: {folder} is not the same folder for this program, on host {socket.gethostname()}, and for all "
                f"of {name}: {found}. A checkpoint would be without what it writes; give a folder (out=) on a disk "
                "that all nodes share by the same path, or reserve the trainer's slots on the node of this program"
            )

    def save(value: TrainState | Params, folder: str | Path) -> dict[str, Written]:
        folder = Path(folder).absolute()
        params = value._params if isinstance(value, TrainState) else value
        alone = params.adapter is not None
        record = {"version": params.version, "published": params.published, "adapter": alone}
        if isinstance(value, TrainState):
            fn: Callable[..., Any] = in_process.save
            columns: list[Sequence[Any]] = [params.handle.borrow(owner, "save")]
            record |= {"step": value.step}
        else:
            fn, columns = in_process.save_params, held(params, "save")
        mesh.cluster.check_open("save")
        folder.mkdir(parents=True, exist_ok=True)
        check_folder(folder, "save")
        columns += [every(folder), every(alone)]
        written: dict[str, Written] = {}
        for rank, files in enumerate(call("save", fn, [engines, *columns], Out.all).then(_all).result()):
            try:
                check_sizes(folder, files)
            except CheckpointError as error:
                raise CheckpointError(
                    f"save: {error}, when rank {rank} of {name} wrote it; this program does not see the same"
                ) from None
            written |= files
        text = json.dumps(record | {"files": written}).encode()
        written["state.json"] = write(folder / "state.json", [text])
        flush(folder)
        return written

    def restore_state(folder: str | Path) -> TrainState | Params:
        mesh.cluster.check_open("restore")
        folder = Path(folder).absolute()
        if not (folder / "state.json").exists():
            raise FileNotFoundError(f"restore: nothing that a trainer saved is in {folder}")
        record = json.loads((folder / "state.json").read_text())
        files = {file: Written(*told) for file, told in record["files"].items()}
        check_sizes(folder, files)
        call("restore", shared_folders.see, [every(folder), every(files)], Out.first, turn=False).then(_only).result()
        fn = in_process.restore if "step" in record else in_process.restore_params
        values = call("restore", fn, [engines, every(folder)])
        has = adapter if record["adapter"] else None
        if "step" not in record:
            return frozen(values, record["version"], record["published"], has)
        return state_of(values, record["step"], record["version"], record["published"], has)

    def verify(folder: str | Path, files: Mapping[str, Written]) -> None:
        folder = Path(folder).absolute()
        check_sizes(folder, files)
        call("verify", shared_folders.check, [every(folder), every(dict(files))], Out.first, turn=False).then(
            _only
        ).result()

    def export(params: Params, folder: str | Path, adapter: bool = False) -> None:
        folder = Path(folder).absolute()
        columns = [engines, *held(params, "export"), every(folder), every(adapter)]
        if adapter and params.adapter is None:
            raise ModelError(
                "export: adapter=True, and these params are not an adapter on the weights that Model names: it has no "
                "lora, or they come from init(params) or load(folder). Leave it out, and all weights are written"
            )
        mesh.cluster.check_open("export")
        folder.mkdir(parents=True, exist_ok=True)
        call("export", in_process.export, columns, Out.each).then(_only).result()
        found = strangers("export", folder)
        if found is not None and found.rank == 0:  # which has written it
            raise CheckpointError(
                f"export: the model lies in {folder} on host {found.host}, and this program, on host "
                f"{socket.gethostname()}, does not see it: {found}. Copy it from there, or give a folder on a disk "
                "that both share by the same path"
            )

    logprobs, values, rewards = (partial(output, need) for need in ("logprobs", "values", "rewards"))
    scores = forward, logprobs, values, rewards, top_k
    trainer = Trainer(init, load, freeze, *scores, train_step, save, restore_state, verify, check_folder, export)
    return trainer


def _only(results: list[Any]) -> Any:
    return results[0]


def _all(results: list[Any]) -> list[Any]:
    return results


def _in_order(who: str, rows: list[Tensor], results: list[Tensor | list[Tensor]]) -> Tensor:
    shards = [shard for result in results for shard in (result if isinstance(result, list) else [result])]
    whole: Tensor = restore(rows, shards, who=who)
    return whole


def _of_the_step(metrics: Metrics, results: list[Metrics]) -> Metrics:
    (found,) = results
    whole = Mean(found["loss"][0], torch.ones(()))  # its parts have been added up: over steps it is a mean
    return metrics | found | {"loss": whole, "skipped": Sum(torch.tensor(0.0))}


def _like(output: str, batch: Batch) -> Tensor:
    """Stands for an output of a batch; see `nrl.runtime.mesh.futures.Coming`."""
    shape = batch.batch_size if output == "rewards" else batch["input_ids"].shape
    deeper = (1,) if output_kind(output) in ("top_k_ids", "top_k_logprobs", "logprobs_at") else ()
    return torch.zeros((), dtype=torch.int64 if output == "top_k_ids" else torch.float32).expand(*shape, *deeper)


def _with(
    who: str, batch: Batch, columns: Mapping[str, Tensor | Future[Tensor]]
) -> tuple[Batch, Batch, dict[str, Coming]]:
    """A batch with the columns that are here, and with what stands for those that are not; and the latter."""
    if not columns:
        return batch, batch, {}
    coming = {name: x for name, x in columns.items() if isinstance(x, Coming) and x.rows and x.like is not None}
    batch = assign(batch, **{name: x for name, x in columns.items() if name not in coming})
    for name, column in coming.items():
        if (rows := sum(map(len, column.rows or ()))) != len(batch):
            raise ColumnError(
                f"{who}: the column '{name}' was computed for {rows} rows, and the batch has {len(batch)}"
            )
    return batch, assign(batch, **{name: column.like for name, column in coming.items()}), coming


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


def _told(who: str, loss: Loss, batch: Batch, always: Collection[str]) -> bool:
    """Say that all advantages are 0, if the loss reads them; whether there is nothing left to look for.

    On the standard error, and no warning: a run may be well and have such a step.
    """
    if not {"advantages", "loss_mask"} <= set(batch.keys()):
        return False
    if bool((batch["loss_mask"] & (batch["advantages"] != 0)).any()):
        return False
    try:
        global_weights(loss, batch.exclude("advantages"), always=always)
        return True  # it does not read them
    except MissingColumn:
        pass
    why = "See what computed the column."
    if "group_ids" in batch.keys():
        _, rows = batch["group_ids"][batch["loss_mask"].flatten(1).any(1)].unique(return_counts=True)
        why = (
            f"In each of its {len(rows)} groups all rewards are equal. Now and then that is so where a model has "
            "learned its tasks; where it lasts, they are too hard or too easy, or a verifier says the same of every "
            "answer: look at some rows, or leave such groups out with nrl.drop_uniform."
        )
        if int(rows.max()) == 1:
            why = (
                f"Each of its {len(rows)} groups has one row, which has nothing to be compared with: sample several "
                "answers a prompt (group_size, or n of nrl.rollouts), or use an estimator that needs no group."
            )
    text = f"{who}: all advantages are 0 at the tokens that are trained on, so this step learns nothing from them."
    print(f"{text} {why} (This is said once.)", file=sys.stderr, flush=True)  # noqa: T201
    return True


def _check_finite(who: str, batch: Batch) -> None:
    """Columns that are not finite where a token is trained on would poison the weights."""
    if "loss_mask" not in batch.keys():
        return
    mask = batch["loss_mask"]
    trained = remembered(mask, "trained", lambda: mask.flatten().nonzero()[:, 0])
    for column, value in batch.items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.shape == mask.shape:
            bad = ~torch.isfinite(value.flatten()[trained])
            if bool(bad.any()):
                rows = (trained[bad] // mask[0].numel()).unique().tolist()
                raise NotFinite(
                    f"{who}: the column '{column}' is NaN or infinite at tokens that are trained on, in rows "
                    f"{rows[:10]}; mark such rows with assign(batch, valid=...), or mend what computed the column"
                )
