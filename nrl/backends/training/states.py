"""Train states, which a step consumes, and params, which are borrowed from them or frozen."""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from nrl.arguments import register_kind
from nrl.backends.models.shards import ShardAssembler
from nrl.backends.training import worker
from nrl.backends.types import Bucket
from nrl.batch import Batch
from nrl.errors import ModelError
from nrl.files import Folder, Saved
from nrl.runtime.mesh.futures import Future
from nrl.runtime.mesh.handles import Handle
from nrl.runtime.mesh.placement import Mesh

__all__ = ["OwningTrainer", "Params", "TrainState"]


class OwningTrainer(Protocol):
    """The trainer that made a train state or params, as others use it; see `nrl.backends.training.trainer.Trainer`."""

    @property
    def buckets(self) -> Callable[..., Iterator[Future[Bucket]]]:
        """See `Params.buckets`."""

    @property
    def forward(self) -> Callable[["Params", Batch, Collection[str]], dict[str, Future[Tensor]]]:
        """Outputs of the model."""

    @property
    def logprobs(self) -> Callable[["Params", Batch], Future[Tensor]]:
        """``[*B, T]`` float32, nats."""

    @property
    def rewards(self) -> Callable[["Params", Batch], Future[Tensor]]:
        """``[*B]`` float32."""

    @property
    def write(self) -> Callable[["TrainState | Params", Folder], Saved]:
        """Write a value into a checkpoint."""

    @property
    def begin_writing(self) -> Callable[["TrainState | Params", Folder], Callable[[], Saved]]:
        """Write a value into a checkpoint beside later steps."""

    @property
    def restore(self) -> Callable[[Folder], Any]:
        """Read what was written."""


class Params:
    """Weights of a model on a mesh. Those of a train state are borrowed: they are gone when a step consumes the state.

    Trainers make them (``state.params``, ``trainer.load``, ``trainer.freeze``).
    """

    def __init__(
        self,
        handle: Handle,
        trainer: OwningTrainer,
        version: int,
        *,
        published: bool,
        adapter_of: Any,
        find: worker.Find = worker.find_frozen,
    ) -> None:
        self.handle, self.trainer, self.version, self.published = handle, trainer, version, published
        self.adapter_of = adapter_of
        """`Model.adapter`, if they are an adapter on the weights that their model names; else None."""
        self.find = find
        """How a process finds them in the value that the handle names."""

    @property
    def whole(self) -> bool:
        """True if they are more than an adapter."""
        return self.find in (worker.find_frozen, worker.find_in_state)

    def check_whole(self, who: str) -> None:
        """Check that they are more than an adapter.

        Raises:
            ModelError: they are `adapter` of some params; ``who`` is how it begins.
        """
        if not self.whole:
            raise ModelError(f"{who}: params.adapter is an adapter without the weights that it is on; give the params")

    @property
    def adapter(self) -> "Params":
        """Their adapter alone, without the weights that it is on.

        Raises:
            ModelError: they are not an adapter on the weights that their model names.
        """
        if self.adapter_of is None:
            raise ModelError(
                "params.adapter: these params are not an adapter on the weights that Model names: it has no lora, or "
                "they come from init(params) or load(folder). Take all of them"
            )
        return Params(
            self.handle,
            self.trainer,
            self.version,
            published=self.published,
            adapter_of=self.adapter_of,
            find=partial(worker.find_adapter, self.find),
        )

    def buckets(
        self, who: str = "buckets", to: Sequence[Mesh] = (), dtype: torch.dtype | None = None
    ) -> Iterator[Future[Bucket]]:
        """The weights in pieces, with adapters added in; each bucket of them is a future of a value on the mesh.

        Args:
            who: how errors name the reader.
            to: the meshes whose processes will all open every bucket; nobody else may. See `nrl.runtime.transfer`.
            dtype: to round matrices to; None: they stay as they are. Vectors are few, and stay in any case.
        """
        return self.trainer.buckets(self, who, to, dtype)

    def tensors(self, who: str = "tensors") -> Iterator[tuple[str, Tensor]]:
        """The weights by their Hugging Face names, one at a time, whole, in this process."""
        joining = ShardAssembler()
        for bucket in self.buckets(who):
            yield from joining.add(bucket.result())
        joining.end(who)


class TrainState:
    """A train state: an opaque handle that knows its trainer. Trainers make it (``trainer.init``, a step).

    A step consumes it and returns the next; using it afterwards raises `ConsumedState`.
    """

    def __init__(self, params: Params, step: int) -> None:
        self._params, self._step = params, step

    @property
    def handle(self) -> Handle:
        """The handle of its values on the mesh."""
        return self._params.handle

    @property
    def params(self) -> Params:
        """Its weights, borrowed."""
        if self.handle.is_consumed:
            self.handle.borrow(self.handle.owner, "state.params")
        return self._params

    @property
    def trainer(self) -> OwningTrainer:
        """The trainer that made it."""
        return self._params.trainer

    @property
    def step(self) -> int:
        """The number of optimizer steps taken."""
        return self._step

    @property
    def version(self) -> int:
        """The version of its weights: how many publishes there have been."""
        return self._params.version


def _instead_of_params(value: Any) -> str:
    return "give state.params" if isinstance(value, TrainState) else "give state.params, or trainer.load()"


def _instead_of_state(value: Any) -> str:
    return "give the train state, as trainer.init() or the step before returned it"


register_kind(Params, _instead_of_params, lambda value: hasattr(value, "trainer") and not isinstance(value, TrainState))
register_kind(TrainState, _instead_of_state)
