"""Agreement between processes on numbers, decisions and errors, before any of them acts.

A process that raises while the others wait in a collective leaves them hanging. So a process holds its error back, goes
on with its part of the collectives, and raises where all processes meet; there the others raise, too.
"""

import contextlib
import pickle
from collections.abc import Iterator
from typing import Any

import attrs
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from nrl.errors import ClusterError

__all__ = ["DeferredError", "ProcessGroup", "pickle_error"]


@attrs.frozen
class ProcessGroup:
    """The processes that hold a model together.

    Args:
        mesh: of one axis; None: this process is alone.
    """

    mesh: DeviceMesh | None

    @property
    def is_single(self) -> bool:
        """True if this process is the only one."""
        return self.mesh is None

    @property
    def rank(self) -> int:
        """The number of this process."""
        return 0 if self.mesh is None else self.mesh.get_local_rank()

    @property
    def count(self) -> int:
        """The number of processes."""
        return 1 if self.mesh is None else self.mesh.size()

    @property
    def group(self) -> Any:
        """Their process group, of ``torch.distributed``; None: there is none."""
        return None if self.mesh is None else self.mesh.get_group()

    def gather[T](self, value: T) -> list[T]:
        """Gather the values of all processes, by rank; a collective."""
        if self.mesh is None:
            return [value]
        values: list[T] = [value] * self.mesh.size()
        dist.all_gather_object(values, value, group=self.mesh.get_group())
        return values

    def broadcast[T](self, value: T | None) -> T:
        """Return the value of the first process, in every process; a collective."""
        box: list[Any] = [value]
        if self.mesh is not None:
            dist.broadcast_object_list(box, group=self.mesh.get_group(), group_src=0)
        result: T = box[0]
        return result


def pickle_error(error: Exception, caller: str, rank: int) -> bytes:
    """Pickle an error for other processes; a `ClusterError` with its text where pickle cannot copy it.

    Args:
        error: of this process.
        caller: the name of the caller in errors.
        rank: of this process, which a note names.
    """
    text = f"{type(error).__name__}: {error}"
    note = f"{caller}: rank {rank} of dp raised it: {text}"
    with contextlib.suppress(Exception):  # a class may do anything when it is pickled
        copy = pickle.loads(pickle.dumps(error))
        copy.add_note(note)
        return pickle.dumps(copy)
    stand_in = ClusterError(f"{caller}: rank {rank} raised {text}")
    stand_in.add_note(note)
    return pickle.dumps(stand_in)


class DeferredError:
    """The first error of this process, held back until all processes raise.

    >>> deferred = DeferredError(ProcessGroup(None))
    >>> with deferred.capture():  # alone, an error is raised where it happens
    ...     raise ValueError("no such row")
    Traceback (most recent call last):
    ValueError: no such row
    """

    def __init__(self, peers: ProcessGroup) -> None:
        self.peers = peers
        self.error: Exception | None = None

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Hold back an error of the block, or raise it in a single process."""
        try:
            yield
        except Exception as error:
            if self.peers.is_single:
                raise
            self.error = self.error or error

    def gather_or_raise[T](self, caller: str, value: T = None) -> list[T]:  # type: ignore[assignment]
        """Gather the values of all processes, by rank, or raise a held error in all of them; a collective.

        Raises:
            Exception: the error of this process, or of the first that has one.
        """
        mine = None if self.error is None else pickle_error(self.error, caller, self.peers.rank)
        gathered = self.peers.gather((value, mine))
        if self.error is not None:
            raise self.error
        for _, error in gathered:
            if error is not None:
                raise pickle.loads(error)
        return [value for value, _ in gathered]
