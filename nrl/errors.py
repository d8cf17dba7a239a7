"""The exceptions of nrl, in one tree.

    NrlError
    ├── ArgumentError (TypeError, ValueError)  an argument of the wrong type, out of its range, or of an unknown name
    ├── BatchError (ValueError)           a batch or a column is not what a function can work with
    │   ├── MissingColumn (KeyError)      a function read a column that the batch does not have
    │   ├── ColumnError                   a known column with the wrong dtype or shape
    │   └── MutatedBatch                  NRL_DEBUG=1 caught a function that wrote into its argument
    ├── LossError                         a loss breaks the rules that make it layout invariant
    │   ├── WeightError                   its weight is not a sum over rows of the batch alone
    │   ├── LossResultError (TypeError)   it takes or returns something other than a loss does
    │   ├── NoGradient                    its value does not depend on any output of the model
    │   ├── NotFinite                     its value or gradient is NaN or infinite
    │   └── MissingOutput (KeyError)      it needs an output that this backend cannot provide
    ├── StateError                        a handle used against the rules of linear state
    │   ├── ConsumedState                 the handle was donated to a step (or borrowed from one that was)
    │   ├── ForeignState                  the handle belongs to another trainer or mesh
    │   └── ClosedCluster                 the cluster that holds the value has been left
    ├── PlacementError (ValueError)       slots, meshes and executables that do not fit together
    ├── ClusterError                      what can go wrong where work is done by other processes
    │   ├── LostActor                     a process of a mesh died: mesh, rank, node, cause and its last log lines
    │   │   └── FailedStart               it raised while it started, and would do so again
    │   ├── DeadlineExceeded (TimeoutError)  a wait took longer than it may
    │   ├── ExecutableError               the environment of an executable cannot be built or used
    │   ├── ShippingError (TypeError)     an object cannot be sent to another process
    │   ├── TransferError                 tensors did not get from one mesh to others
    │   │   └── CorruptedTransfer         they are not what was sent
    │   └── WeightMismatch                a sampler does not compute what the trainer does with the weights it was given
    ├── ConfigError (ValueError)          a configuration key or value that cannot be used
    ├── CheckpointError                   a checkpoint that cannot be written, or that is not what was written
    ├── DataError (ValueError)            a data file or a row of it that cannot be used
    ├── ModelError (ValueError)           a model or tokenizer that cannot be loaded or cannot do what is asked
    ├── NotDeterministic (RuntimeError)   deterministic=true, and an operation that has no deterministic kernel
    ├── GenerationError (ValueError)      a request that a sampler cannot serve
    │   └── LostRequest                   engines died with it, a server failed, or its answer cannot be used
    ├── RolloutMismatch                   trainer and sampler disagree about sampled tokens by more than a run allows
    └── EnvError                          an environment or verifier broke its contract

An `ArgumentError` is both of Python's own ValueError and TypeError, so either catches it.

Every message names the function, the column or field, what was found, and what to do. All of them survive pickling,
because on a cluster they travel between processes.
"""

from collections.abc import Iterable

__all__ = [
    "ArgumentError",
    "BatchError",
    "CheckpointError",
    "ClosedCluster",
    "ClusterError",
    "ColumnError",
    "ConfigError",
    "ConsumedState",
    "CorruptedTransfer",
    "DataError",
    "DeadlineExceeded",
    "EnvError",
    "ExecutableError",
    "FailedStart",
    "ForeignState",
    "GenerationError",
    "LossError",
    "LossResultError",
    "LostActor",
    "LostRequest",
    "MissingColumn",
    "MissingOutput",
    "ModelError",
    "MutatedBatch",
    "NoGradient",
    "NotDeterministic",
    "NotFinite",
    "NrlError",
    "PlacementError",
    "RolloutMismatch",
    "ShippingError",
    "StateError",
    "TransferError",
    "WeightError",
    "WeightMismatch",
]


class NrlError(Exception):
    """The root of every exception that nrl raises on purpose."""


class ArgumentError(NrlError, TypeError, ValueError):
    """An argument has the wrong type, is out of its range, or has a name that the function does not know.

    Args:
        message: all of it.
        argument: its name; empty: the error is not about one alone.

    >>> error = ArgumentError("batched: n is 2.5; give a whole number", "n")
    >>> str(error), error.argument
    ('batched: n is 2.5; give a whole number', 'n')
    """

    def __init__(self, message: str, argument: str = "") -> None:
        self.argument = argument
        super().__init__(message, argument)

    def __str__(self) -> str:
        return str(self.args[0])


class BatchError(NrlError, ValueError):
    """A function cannot work with a batch or one of its columns."""


class MissingColumn(BatchError, KeyError):
    """A function read a column that the batch does not have.

    Args:
        reader: the function that asked, as a user would name it.
        column: the column it asked for.
        present: the columns that are there.
        hint: how to add the column; a sentence or empty.

    >>> print(MissingColumn("grpo_loss", "advantages", ["input_ids", "rewards"], "Call advantages(batch)."))
    grpo_loss reads the column 'advantages', which this batch does not have. It has: input_ids, rewards. Call \
advantages(batch).
    """

    def __init__(self, reader: str, column: str, present: Iterable[str] = (), hint: str = "") -> None:
        self.reader, self.column, self.present, self.hint = (
            reader,
            column,
            tuple(present),
            hint,
        )
        super().__init__(reader, column, self.present, hint)

    def __str__(self) -> str:
        columns = ", ".join(self.present) or "no columns"
        text = f"{self.reader} reads the column '{self.column}', which this batch does not have. It has: {columns}."
        return f"{text} {self.hint}".rstrip()


class ColumnError(BatchError):
    """A known column has the wrong dtype or shape."""


class MutatedBatch(BatchError):
    """A function wrote into a batch that it was given (found by ``NRL_DEBUG=1``)."""


class LossError(NrlError):
    """A loss breaks the rules that make it independent of layout."""


class WeightError(LossError):
    """A loss's weight is not a sum over rows of the batch alone."""


class NotFinite(LossError):
    """A loss, a gradient or a reward is NaN or infinite."""


class LossResultError(LossError, TypeError):
    """A loss has other parameters than ``(out, batch)``, or returns something other than ``(Mean, metrics)``."""


class NoGradient(LossError):
    """The value of a loss does not depend on any output of the model, so a step would change nothing."""


class MissingOutput(LossError, KeyError):
    """A loss needs an output that this backend cannot provide."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0]) if self.args else ""


class StateError(NrlError):
    """A handle was used against the rules of linear state."""


class ConsumedState(StateError):
    """The handle was donated to a step already, or was borrowed from one that was."""


class ForeignState(StateError):
    """The handle belongs to another trainer or mesh."""


class ClosedCluster(StateError):
    """The cluster that held the value has been left."""


class PlacementError(NrlError, ValueError):
    """Slots, meshes and executables do not fit together."""


class ClusterError(NrlError):
    """Other processes cannot do their work, for a reason outside of the program."""


class LostActor(ClusterError):
    """A process of a mesh died. `nrl.retrying` catches it, and the run goes on from its last checkpoint.

    Args:
        who: the call that waited, as a user would name it.
        mesh: the name of its mesh.
        rank: its rank there; None where that is not known, as when a whole node is gone.
        node: the address of its node.
        cause: of its end, such as ``"killed by signal 9"``.
        log: the last lines that it wrote, or empty.

    >>> print(LostActor("train_step(grpo_loss)", "trainer", 1, "10.0.0.3", "killed by signal 9", "loading\\n"))
    train_step(grpo_loss): rank 1 of mesh 'trainer' on node 10.0.0.3 is lost: killed by signal 9. The last lines of \
its log:
        loading
    """

    def __init__(self, who: str, mesh: str, rank: int | None, node: str, cause: str, log: str = "") -> None:
        self.who, self.mesh, self.rank, self.node, self.cause, self.log = who, mesh, rank, node, cause, log
        super().__init__(who, mesh, rank, node, cause, log)

    def __str__(self) -> str:
        which = "a rank" if self.rank is None else f"rank {self.rank}"
        text = f"{self.who}: {which} of mesh '{self.mesh}' on node {self.node} is lost: {self.cause}."
        lines = [f"    {line}" for line in self.log.rstrip().splitlines()]
        return "\n".join([f"{text} The last lines of its log:", *lines]) if lines else text


class FailedStart(LostActor):
    """A process of a mesh raised while it started. It would do so again, so `nrl.retrying` does not catch it."""


class DeadlineExceeded(ClusterError, TimeoutError):
    """A wait took longer than it may."""


class ExecutableError(ClusterError):
    """The environment of an executable cannot be built or used."""


class ShippingError(ClusterError, TypeError):
    """An object cannot be sent to another process."""


class TransferError(ClusterError):
    """Tensors did not get from one mesh to others."""


class CorruptedTransfer(TransferError):
    """Tensors that arrived are not those that were sent."""


class WeightMismatch(ClusterError):
    """A sampler does not compute what the trainer does with the weights that it was given."""


class ConfigError(NrlError, ValueError):
    """A configuration key or value that cannot be used."""


class CheckpointError(NrlError):
    """A checkpoint that cannot be written, or that is not what was written."""


class DataError(NrlError, ValueError):
    """A data file, or a row of it, that cannot be used."""


class ModelError(NrlError, ValueError):
    """A model or tokenizer that cannot be loaded or cannot do what is asked of it."""


class NotDeterministic(NrlError, RuntimeError):
    """``deterministic=true``, and an operation that has no deterministic kernel on the device."""


class GenerationError(NrlError, ValueError):
    """A request that a sampler cannot serve."""


class LostRequest(GenerationError):
    """Engines died with it, a server failed as often as it may be asked, or the answer cannot be used.

    In a rollout its row is not valid.
    """


class RolloutMismatch(NrlError):
    """Trainer and sampler disagree about the tokens that were sampled by more than a run allows.

    Args:
        kl: ``mismatch/kl`` of the step, nats a token.
        ess: ``mismatch/ess``, a fraction.
        max_abs: ``mismatch/max_abs``, nats.
        lag: of the step, in publishes; None where versions are not known.
        bound: the largest ``kl`` allowed, nats a token.
        diagnosis: the likely cause, and what to do; sentences.

    >>> print(RolloutMismatch(0.5, 0.25, 6.0, 2.0, 0.1, "Sample with less lag."))
    check_mismatch: trainer and sampler disagree: mismatch/kl is 0.5 nats a token, and the bound is 0.1 \
(mismatch/ess 0.25, mismatch/max_abs 6 nats, lag 2). Sample with less lag.
    """

    def __init__(
        self, kl: float, ess: float, max_abs: float, lag: float | None, bound: float, diagnosis: str = ""
    ) -> None:
        self.kl, self.ess, self.max_abs, self.lag = kl, ess, max_abs, lag
        self.bound, self.diagnosis = bound, diagnosis
        super().__init__(kl, ess, max_abs, lag, bound, diagnosis)

    def __str__(self) -> str:
        numbers = f"mismatch/ess {self.ess:.3g}, mismatch/max_abs {self.max_abs:.3g} nats"
        lag = "lag unknown" if self.lag is None else f"lag {self.lag:.3g}"
        text = (
            f"check_mismatch: trainer and sampler disagree: mismatch/kl is {self.kl:.3g} nats a token, and the bound "
            f"is {self.bound:g} ({numbers}, {lag}). {self.diagnosis}"
        )
        return text.rstrip()


class EnvError(NrlError):
    """An environment or a verifier broke its contract."""
