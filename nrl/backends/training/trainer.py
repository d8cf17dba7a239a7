"""The driver's half of training: a trainer, which maps an engine onto a mesh, and its verbs."""

import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial, reduce
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import torch
from torch import Tensor

from nrl.algos import LogitsOutput, Loss, name_of, needed
from nrl.arguments import check_argument, checked, register_kind
from nrl.backends.engine import TrainEngine
from nrl.backends.models.exporting import export_described
from nrl.backends.models.loading import load_configs
from nrl.backends.models.model_files import DESCRIPTION, description
from nrl.backends.models.positions import count_positions
from nrl.backends.training import weight_stream, worker
from nrl.backends.training.determinism import explain_refusals
from nrl.backends.training.device_metrics import PREFIX
from nrl.backends.training.layout.microbatch_plan import check_room
from nrl.backends.training.loss.batch_checks import (
    check_finite,
    check_needs,
    check_sampled,
    lag,
    warn_of_frozen_token,
    warn_of_long_rows,
    warn_of_no_advantages,
    with_columns,
    with_shares,
)
from nrl.backends.training.loss.loss_checks import check_loss_is_additive
from nrl.backends.training.loss.loss_terms import LOGPROBS, global_weights
from nrl.backends.training.outputs.output_heads import LARGE
from nrl.backends.training.saving import shared_fs
from nrl.backends.training.saving.async_save import wait_for_writers
from nrl.backends.training.states import Params, TrainState
from nrl.backends.types import Bucket, Model
from nrl.backends.types import top_k as top_k_named
from nrl.batch import Batch, deal, microbatches, restore
from nrl.batch.handles import stand_ins, without_handles
from nrl.batch.metrics import Mean, Metrics, Sum, merge, without
from nrl.errors import ArgumentError, CheckpointError, ModelError
from nrl.files import (
    MANIFEST,
    NOT_FINITE,
    Folder,
    Saved,
    Written,
    check_parts,
    check_sizes,
    flush,
    make,
    read_saved,
    resolve_output,
    to_folder,
    write_manifest,
)
from nrl.files import write as write_file
from nrl.runtime import Future, Handle, Mesh, done
from nrl.runtime.mesh.futures import as_future
from nrl.runtime.mesh.processes import Donated, Out, RowSlice, Value
from nrl.runtime.mesh.rpc import Each, call, from_all, from_first, method
from nrl.runtime.preemption import note_save
from nrl.runtime.trace import measured
from nrl.runtime.transfer import choose_route

__all__ = ["TrainStep", "Trainer", "make_trainer"]

type TrainStep = Callable[..., tuple[TrainState, Future[Metrics]]]
"""A step of `Trainer.train_step`: ``(state, batch, **columns) -> (state, Future[Metrics])``."""


def make_trainer(
    mesh: Mesh,
    make_engine: Callable[[], TrainEngine[Any, Any]],
    *,
    name: str,
    max_tokens: int,
    parts_of: Callable[..., Sequence[Batch]] = microbatches,
    model: Model | None = None,
) -> "Trainer":
    """Map an engine onto a mesh.

    An engine is made in each process. A batch is split into dp shards, each shard into micro-batches of at most
    ``max_tokens`` tokens; the engines add their gradients up and step once. On the local cluster one process holds one
    copy of the weights and gets all shards.

    Args:
        mesh: where it runs.
        make_engine: makes the engine of a process.
        name: how errors speak of the trainer.
        max_tokens: bound on the tokens of a micro-batch, padding counted.
        parts_of: how a shard is split; called as ``parts_of(batch, max_tokens=...)``.
        model: of the engine; None: only the engine knows the model.
    """
    if max_tokens < 1:
        raise ArgumentError(
            f"{name}: max_tokens is {max_tokens}; give the tokens of a micro-batch, 1 or more", "max_tokens"
        )
    engines = Each(call(mesh, name, make_engine))
    return Trainer(mesh, name, model, engines, partial(parts_of, max_tokens=max_tokens))


@attrs.frozen(eq=False, repr=False)
class Trainer:
    """An engine in each process of a mesh, with the calls of all of them together; `make_trainer` makes it.

    Users get one from a backend: ``fsdp.trainer(place, model, optimizer)``.

    Args:
        mesh: where it runs.
        name: how errors speak of it.
        model: of the engine; None: only the engine knows the model.

    >>> import nrl
    >>> from nrl import tiny
    >>> from nrl.backends import adamw, fsdp
    >>> with nrl.cluster("local") as cluster:
    ...     trainer = fsdp.trainer(cluster.reserve(1), tiny.model(), adamw(lr=1e-3))
    ...     state = trainer.init()
    >>> state.trainer is trainer, state.step
    (True, 0)
    """

    mesh: Mesh
    name: str
    model: Model | None
    _engines: Each
    _split: Callable[[Batch], Sequence[Batch]]
    _stepping: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    """A step is asked for and consumes its state in one."""

    def __repr__(self) -> str:
        return self.name

    @property
    def adapter(self) -> Any:
        """`Model.adapter` of the trained model."""
        return None if self.model is None else self.model.adapter

    # --- states and params

    def init(self, params: Params | None = None) -> TrainState:
        """Make a train state with a fresh optimizer and the weights that `Model` names, or a copy of ``params``.

        Params may be of this trainer or another one for the same model. Between models of different heads all goes
        along but the head (value and reward heads share their weight), so that a critic can begin where a policy or a
        reward model is. With ``Model(lora=)``, an adapter on the same base is copied; other weights become the base,
        and a new adapter begins that changes nothing.
        """
        # The base is the model's own
        same = self.adapter is not None and (params is None or params.adapter_of == self.adapter)
        values = self._call("init", partial(method, "init"))
        if params is not None:
            self._fill(values, params.adapter if same else params)
        return self._state(values, 0, 0, False, self.adapter if same else None)

    def _fill(self, values: list[Value], params: Params) -> None:
        """Copy weights into a fresh train state, a bucket at a time: a process holds its part and a bucket."""
        filling = Each(self._call("init", partial(method, "receive"), Each(values), turn=False))
        for bucket in params.buckets("init"):
            from_first(self.mesh, "init", partial(method, "add"), filling, as_future(bucket), turn=False)
        from_first(self.mesh, "init", partial(method, "end"), filling, turn=False)

    def load(self, source: str | None = None) -> Params:
        """Load frozen params, for a reference or a teacher; None: those of the model itself."""
        values = self._call("load", partial(method, "load"), source)
        return self._params(values, 0, False, self.adapter if source is None else None)

    @checked("freeze")
    def freeze(self, params: Params) -> Params:
        """Return a copy that training does not change."""
        fn, borrowed = self._method_of(params, "freeze", "freeze")
        params.check_whole("freeze")
        values = self._call("freeze", fn, borrowed)
        return self._params(values, params.version, params.published, params.adapter_of)

    def _state(self, values: list[Value], step: int, version: int, published: bool, adapter: Any) -> TrainState:
        handle = Handle(self.mesh, self, "train state", values)
        params = Params(handle, self, version, published=published, adapter_of=adapter, find=worker.find_in_state)
        return TrainState(params, step)

    def _params(self, values: list[Value], version: int, published: bool, adapter: Any) -> Params:
        handle = Handle(self.mesh, self, "frozen params", values)
        return Params(handle, self, version, published=published, adapter_of=adapter)

    def buckets(
        self, params: Params, who: str, to: Sequence[Mesh], dtype: torch.dtype | None = None
    ) -> Iterator[Future[Bucket]]:
        """Yield the buckets of `Params.buckets`."""
        route_to = choose_route(self.mesh, to)
        # Those that receive may be on the same devices, and both have to be there
        pieces = Each(
            self._call(
                who, partial(worker.open_weight_stream, params.find, dtype), self._borrow(params, who), turn=False
            )
        )
        read_next, has_more = partial(weight_stream.next_bucket, who, route_to.send, route_to.same), True
        while has_more:
            bucket, going_on = call(self.mesh, who, read_next, pieces, outs=(route_to.out, Out.all), turn=False)
            yield bucket.then(weight_stream.receive_bucket)
            has_more = any(going_on.then(list).result())
            with self._stepping:
                self._borrow(params, who)  # Raise if a step in another thread has changed them meanwhile.

    # --- outputs, forward only

    @checked("forward")
    def forward(
        self, params: Params, batch: Batch, needs: Collection[str], *, who: str = "forward"
    ) -> dict[str, Future[Tensor]]:
        """Compute outputs of a model, all by one call on the mesh, and none but these.

        `logprobs`, `values`, `rewards` and `top_k` are forward and a name.

        Args:
            params: ``state.params``, or frozen ones.
            batch: any.
            needs: names of outputs, as a loss asks for them (`nrl.algos.needs`), of the kinds in `provides`.
            who: how errors begin, and what the timeline shows.

        Returns:
            A future for each name, of the shape of `nrl.algos.output_shape`. ``top_k(8)`` stands for ``top_k_ids`` and
            ``top_k_logprobs``, each ``[*B, T, 8]``. ``logits`` and ``hidden_states`` of all rows come to this program
            whole, so give it few rows; `nrl.algos.from_logits` computes numbers for each token where the logits are.

        Raises:
            MissingOutput: the model does not compute one of them.
            BatchError: the logits of these rows are more than 8 GiB.

        >>> import nrl
        >>> from nrl import data, tiny
        >>> from nrl.backends import adamw, fsdp
        >>> with nrl.cluster("local") as cluster:
        ...     trainer = fsdp.trainer(cluster.reserve(1), tiny.model(), adamw(lr=1e-3))
        ...     batch = data.supervised([{"prompt": "1+1=", "response": "2"}], tiny.tokenizer())
        ...     found = trainer.forward(trainer.load(), batch, {"logprobs", "entropy"})
        >>> {name: list(future.result().shape) for name, future in found.items()}
        {'entropy': [1, 6], 'logprobs': [1, 6]}
        """
        check_needs(who, needs, self.provides, self.name)
        values = self._borrow(params, who)
        params.check_whole(who)
        rows, shards = self._shards(batch)
        widths = self._widths(needs)
        if "logits" in needs:
            check_room(f"{who}: logits", batch["input_ids"].numel(), widths["logits"], "give it fewer rows at a time")
        likes = worker.outputs_like(batch, needs, widths)
        fn = partial(worker.forward, self._split, frozenset(needs), widths, params.find)
        replies = self._call(who, fn, values, *shards, outs=(Out.per_shard,) * len(likes))
        return {
            name: reply.then(partial(_restore_order, who, rows), rows, like)
            for (name, like), reply in zip(likes.items(), replies, strict=True)
        }

    @checked("logprobs")
    def logprobs(self, params: Params, batch: Batch) -> Future[Tensor]:
        """``[*B, T]`` float32, nats, of each token under its row's ``temperature``; 0 for the first and for padding."""
        return self.forward(params, batch, ["logprobs"], who="logprobs")["logprobs"]

    @checked("values")
    def values(self, params: Params, batch: Batch) -> Future[Tensor]:
        """``[*B, T]`` float32, of a model with ``head="value"``: V before each token, and 0 as in `logprobs`."""
        return self.forward(params, batch, ["values"], who="values")["values"]

    @checked("rewards")
    def rewards(self, params: Params, batch: Batch) -> Future[Tensor]:
        """``[*B]`` float32, of a model with ``head="reward"``."""
        return self.forward(params, batch, ["rewards"], who="rewards")["rewards"]

    @checked("top_k")
    def top_k(self, params: Params, batch: Batch, k: int) -> dict[str, Future[Tensor]]:
        """The most probable tokens at each place, for ``step(state, batch, **teacher.top_k(params, batch, k))``.

        Returns:
            Futures of ``teacher_ids`` ``[*B, T, k]`` int64, and of ``teacher_topk_logprobs``, nats, under the row's
            ``temperature``.
        """
        outputs = self.forward(params, batch, [top_k_named(k)], who="top_k")
        return {"teacher_ids": outputs["top_k_ids"], "teacher_topk_logprobs": outputs["top_k_logprobs"]}

    @cached_property
    def provides(self) -> frozenset[str]:
        """The kinds of outputs of the model (`nrl.algos.output_kind`), such as ``logprobs``."""
        kinds: frozenset[str] = from_first(self.mesh, self.name, attrgetter("provides"), self._engines)
        return kinds

    @cached_property
    def positions(self) -> int | None:
        """The most tokens of a row, by the config of the model; None: unknown on this host."""
        try:
            return None if self.model is None else count_positions(load_configs(self.model)[0])
        except ModelError:  # its config is on other hosts alone
            return None

    @cached_property
    def _frozen_token(self) -> int | None:
        """`nrl.backends.engine.TrainEngine.frozen_token`."""
        token: int | None = from_first(self.mesh, self.name, attrgetter("frozen_token"), self._engines)
        return token

    def _widths(self, needs: Collection[str]) -> Mapping[str, int]:
        """Return the sizes of the model's vocabulary and hidden states, if needed outputs depend on them."""
        return self._all_widths if any(need in LARGE or isinstance(need, LogitsOutput) for need in needs) else {}

    @cached_property
    def _all_widths(self) -> dict[str, int]:
        sizes: dict[str, int] = from_first(self.mesh, self.name, attrgetter("widths"), self._engines)
        return sizes

    # --- steps

    @checked("train_step")
    def train_step(self, loss: Loss) -> TrainStep:
        """``step(state, batch, **columns) -> (state, Future[Metrics])``: one optimizer step on this loss.

        Columns are added as by `nrl.assign`, but those that other processes compute become handles, heavy or not: their
        numbers go from there to the trainer's processes, and not through the program.

        Raises:
            MissingOutput: the model does not compute what the loss needs.
            ModelError: the files of the model, which `export` will write beside the weights, cannot be written.
        """
        caller = f"train_step({name_of(loss)})"
        if self.model is not None and isinstance(self.model.source, str):
            self.check_export()
        check_needs(caller, needed(loss), self.provides, self.name)
        always, widths = self.provides & LOGPROBS, self._widths(needed(loss))
        is_additive = no_advantages = frozen = long = False

        @checked(caller)
        def step(
            state: TrainState, batch: Batch, **columns: Tensor | Future[Tensor]
        ) -> tuple[TrainState, Future[Metrics]]:
            nonlocal is_additive, no_advantages, frozen, long
            batch = with_shares(with_columns(batch, columns))
            local_batch, full_batch = without_handles(batch), stand_ins(batch)
            values, params = state.handle.borrow(self, caller), state.params
            check_sampled(caller, local_batch)
            with explain_refusals(caller):
                weights = global_weights(loss, full_batch, always=always, widths=widths)
                is_additive = is_additive or check_loss_is_additive(loss, full_batch, weights, always, widths)
            metrics = lag(state.version, local_batch)
            if any(weight == 0 for weight in weights.values()):
                state.handle.donate(self, caller)
                metrics |= {"skipped": Sum(torch.tensor(1.0))}
                same = self._state(values, state.step, state.version, params.published, params.adapter_of)
                return same, done(metrics)
            check_finite(caller, local_batch)
            no_advantages = no_advantages or warn_of_no_advantages(caller, loss, local_batch, always, widths)
            long = long or warn_of_long_rows(caller, local_batch, self.positions)
            frozen = frozen or warn_of_frozen_token(caller, local_batch, self._frozen_token)
            _, shards = self._shards(batch)
            # What stays the same from step to step is part of the function, which a process remembers
            fn = partial(worker.train, loss, self._split)
            donated, consume = Each([Donated(value) for value in values]), partial(state.handle.donate, self, caller)
            with self._stepping:
                new, results = self._call(
                    caller, fn, donated, weights, *shards, outs=(Out.on_rank, Out.all), sent=consume
                )
            return (
                self._state(new, state.step + 1, state.version, False, params.adapter_of),
                results.then(partial(_merge_metrics, metrics)),
            )

        return step

    # --- folders

    def save(self, value: TrainState | Params, folder: str | Folder) -> dict[str, Written]:
        """Write a train state or params to the last bit; `nrl.run.checkpoint` makes it atomic.

        Of an adapter on the weights that `Model` names, the adapter alone.

        Returns:
            Every file by its name in the folder; each process hashes what it writes while it writes.
        """
        files, record = self.write(value, folder)
        return {**files, MANIFEST: write_manifest(to_folder(folder), files, {".": record})}

    def write(self, value: TrainState | Params, folder: str | Folder) -> Saved:
        """Write a value without its manifest, which belongs to the folder above; see `save`."""
        fn, values, folder, record = self._prepare_save(worker.write, value, folder)
        saved: list[Saved] = from_all(self.mesh, "save", fn, self._engines, values, folder)
        return self._finish_save(saved, folder, record)

    def begin_writing(self, value: TrainState | Params, folder: str | Folder) -> Callable[[], Saved]:
        """Copy a value and return; the processes go on, and write the copy beside that.

        Returns:
            A function that waits for the files, in any thread, and raises the errors of their writers.
        """
        fn, values, folder, record = self._prepare_save(worker.begin_writing, value, folder)
        writers, copied = self._call("save", fn, values, folder, outs=(Out.on_rank, Out.all))
        copied.then(list).result()
        return lambda: self._finish_save(wait_for_writers(self.mesh, writers), folder, record)

    def _prepare_save(
        self, write: Callable[..., Any], value: TrainState | Params, folder: str | Folder
    ) -> tuple[Callable[..., Any], Each, Folder, dict[str, Any]]:
        """Return the function for the processes, their values, the folder, which exists now, and the record."""
        note_save()
        folder = to_folder(folder).absolute()
        params = value._params if isinstance(value, TrainState) else value
        alone = params.adapter_of is not None
        record: dict[str, Any] = {"version": params.version, "published": params.published, "adapter": alone}
        saved_params = params.adapter if alone else params
        values, trained = self._borrow(saved_params, "save"), isinstance(value, TrainState)
        if isinstance(value, TrainState):
            record |= {"step": value.step}
        self.mesh.cluster.check_open("save")
        make(folder)
        self.check_folder(folder, "save")
        if self.model is not None and self._description:
            record["model"] = {"head": self.model.head, "dtype": self.model.dtype}
        return partial(write, saved_params.find, trained), values, folder, record

    def _finish_save(self, saved_by_rank: Sequence[Saved], folder: Folder, record: Mapping[str, Any]) -> Saved:
        files = shared_fs.collect_written(self.name, folder, [saved.files for saved in saved_by_rank])
        for path in folder.glob("[0-9]*-of-[0-9]*.safetensors"):
            if path.name not in files:  # another number of processes has left it
                path.unlink()
        if self._description:
            files = {**files, **self._describe(folder / DESCRIPTION)}
        flush(folder)
        not_finite = sorted({name for saved in saved_by_rank for name in saved.record.get(NOT_FINITE, ())})
        engine = {key: value for key, value in saved_by_rank[0].record.items() if key != NOT_FINITE}
        return Saved(files, {**record, NOT_FINITE: not_finite[:8], "engine": engine})

    @cached_property
    def _description(self) -> dict[str, bytes]:
        """The files of the model beside its weights; empty where this host cannot make them."""
        rehearsal = self._rehearsal
        if isinstance(rehearsal, dict):
            return rehearsal
        warnings.warn(
            f"save: {self.name}: the config and the tokenizer of its model cannot be written here ({rehearsal}); its "
            "checkpoints have the weights alone, of which nrl export makes nothing",
            UserWarning,
            stacklevel=3,
        )
        return {}

    @cached_property
    def _rehearsal(self) -> dict[str, bytes] | ModelError:
        """An export without weights, which shows before the first step if the last export would fail."""
        return {} if self.model is None else description(self.model)

    def _describe(self, folder: Folder) -> dict[str, Written]:
        """Write the description of the model, with which anybody can export the weights."""
        make(folder)
        written = {
            f"{folder.name}/{name}": write_file(folder / name, [content]) for name, content in self._description.items()
        }
        flush(folder)
        return written

    def restore(self, folder: str | Folder) -> Any:
        """Read a complete train state, or params, from a folder.

        The folder is one that `save` wrote, or that of a value in a checkpoint, ``.../000050/policy``.
        """
        self.mesh.cluster.check_open("restore")
        folder = to_folder(folder).absolute()
        saved = read_saved(folder)
        if saved is None and (folder / "state.json").exists():
            raise CheckpointError(
                f"restore: {folder} was written by an earlier version of nrl (its state.json shows it), and this one "
                "reads its own alone; go on with that version, or let it export the weights and begin with those"
            )
        if saved is None:
            raise FileNotFoundError(
                f"restore: nothing that a trainer saved is in {folder}: no {MANIFEST} there says so, nor one in the "
                "folder above it, where that of a checkpoint is"
            )
        files, record = saved
        check_parts(folder, files)
        check_sizes(folder, files)
        from_first(self.mesh, "restore", shared_fs.check_visible, folder, files, turn=False)
        name = "restore" if "step" in record else "restore_params"
        values = self._call("restore", partial(method, name), folder, record["engine"])
        attributes = record["version"], record["published"], self.adapter if record["adapter"] else None
        return (
            self._state(values, record["step"], *attributes) if "step" in record else self._params(values, *attributes)
        )

    def verify(self, folder: str | Folder, files: Mapping[str, Written]) -> None:
        """Compare the files of a `save` with the disk. Each process reads a share."""
        folder = to_folder(folder).absolute()
        check_sizes(folder, files)
        from_first(self.mesh, "verify", shared_fs.check, folder, dict(files), turn=False)

    def check_folder(self, folder: str | Folder, who: str = "check_folder") -> None:
        """Check that the program and all processes see the same folder; ``who`` begins the error.

        `save` looks first, and a run at its first step.
        """
        shared_fs.check_shared(self.mesh, self.name, folder, who)

    def check_export(self) -> None:
        """Check before the first step that `export` can write the model's files beside its weights.

        `nrl.run` and, where the model is in a folder or on the hub, `train_step` do so. Nothing is kept on the disk.

        Raises:
            ModelError: they cannot be written.
        """
        _ = self._rehearsal

    @checked("export")
    def export(self, params: Params, folder: str | Path) -> None:
        """Write Hugging Face format, with adapters added to the weights; of ``params.adapter``, peft's format.

        The first process writes it, or this program does, where they do not share the folder.

        Raises:
            CheckpointError: they do not, and it is peft's format, or only the engine knows the model.
        """
        target = resolve_output("export: folder", folder).absolute()
        if not isinstance(target, Path):
            raise CheckpointError(f"export: {target} is in a store, where no model can be loaded from; give a folder")
        folder = target
        fn, values = self._method_of(params, "export", "export")
        self.mesh.cluster.check_open("export")
        folder.mkdir(parents=True, exist_ok=True)
        apart = shared_fs.find_separate_exporter(self.mesh, folder)
        if apart is not None and self.model is not None and self._description and params.whole:
            with TemporaryDirectory() as described:
                for name, content in self._description.items():
                    (Path(described) / name).write_bytes(content)
                dtype = getattr(torch, self.model.dtype)
                about = Path(described), self.model.head, dtype, folder, self.model.trust_remote_code
                export_described(params.tensors("export"), *about)
            return
        from_all(self.mesh, "export", fn, self._engines, values, folder)
        if apart is not None:
            raise shared_fs.local_only_error(folder, apart)

    # --- calls

    def _call(self, caller: str, fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call ``fn(engine, *args)`` in each process; see `nrl.runtime.mesh.rpc.call`."""
        return call(self.mesh, caller, fn, self._engines, *args, **options)

    def _borrow(self, params: Params, caller: str) -> Each:
        """Return the values of params in the processes, borrowed."""
        check_argument(caller, "params", params, Params)
        return Each(params.handle.borrow(self, caller))

    def _method_of(self, params: Params, name: str, caller: str) -> tuple[Callable[..., Any], Each]:
        """Return a method of the engine that takes these params first, and their values."""
        values = self._borrow(params, caller)
        return partial(worker.with_params, name, params.find), values

    def _shards(self, batch: Batch) -> tuple[list[Tensor], list[Each]]:
        """Return the rows of each shard, and the shards of each process."""
        rows = deal(batch, self.mesh.dp)
        shards = [RowSlice(batch, index) for index in rows]
        n = self.mesh.processes.count
        shards_by_rank = [shards] if n == 1 else [[shards[self.mesh.shard_of(rank)]] for rank in range(n)]
        return rows, [Each(column) for column in zip(*shards_by_rank, strict=True)]


def _restore_order(caller: str, rows: list[Tensor], results: list[Tensor | list[Tensor]]) -> Tensor:
    shards = [shard for result in results for shard in (result if isinstance(result, list) else [result])]
    ordered: Tensor = restore(rows, shards, caller=caller)
    return ordered


def _merge_metrics(metrics: Metrics, results: list[Metrics]) -> Metrics:
    merged = reduce(merge, results)  # the first process has the metrics of all; each has what it took of its device
    measured.add({key: x for key, x in merged.items() if key.startswith(PREFIX)})
    step_metrics = without(PREFIX, merged)
    loss = Mean(step_metrics["loss"][0], torch.ones(()))  # its parts have been added up: over steps it is a mean
    return metrics | step_metrics | {"loss": loss, "skipped": Sum(torch.tensor(0.0))}


register_kind(Trainer, lambda value: "give the trainer, as fsdp.trainer(slots, model, optimizer) makes one")
