"""Agreement between processes on numbers, decisions and errors, before any of them acts.

A process that raised while the others wait in a collective would leave them hanging. So an error is held back, the
process goes on with its part of the collectives, and at a place where all meet, all of them raise.
"""

import contextlib
import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple

import attrs
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from nrl.errors import ClusterError

__all__ = ["HeldError", "Peers", "PickledError"]


@attrs.frozen
class Peers:
    """The processes that hold a model together.

    Args:
        mesh: of one axis; None: this process is alone.

    >>> Peers(None).gather("found")
    ['found']
    """

    mesh: DeviceMesh | None

    @property
    def alone(self) -> bool:
        """Whether there is nobody to agree with."""
        return self.mesh is None

    @property
    def rank(self) -> int:
        """Which of them this one is."""
        return 0 if self.mesh is None else self.mesh.get_local_rank()

    @property
    def count(self) -> int:
        """How many there are."""
        return 1 if self.mesh is None else self.mesh.size()

    def gather[T](self, value: T) -> list[T]:
        """What every process found, by rank; a collective."""
        if self.mesh is None:
            return [value]
        found: list[T] = [value] * self.mesh.size()
        dist.all_gather_object(found, value, group=self.mesh.get_group())
        return found

    def send[T](self, value: T | None) -> T:
        """What the first process has, in every process; a collective."""
        box: list[Any] = [value]
        if self.mesh is not None:
            dist.broadcast_object_list(box, group=self.mesh.get_group(), group_src=0)
        found: T = box[0]
        return found


class PickledError(NamedTuple):
    """An error as it travels: most exceptions can be pickled, but any function may raise one that cannot.

    >>> PickledError.of(2, ValueError("no such row")).error("train_step(my_loss)")
    ValueError('no such row')
    """

    rank: int
    text: str
    pickled: bytes

    @classmethod
    def of(cls, rank: int, error: Exception) -> "PickledError":
        """What another process needs to know about it."""
        try:
            pickled = pickle.dumps(error)
        except Exception:  # what pickle raises depends on what it finds
            pickled = b""
        return cls(rank, f"{type(error).__name__}: {error}", pickled)

    def error(self, who: str) -> Exception:
        """The same error if it can be had, otherwise one that says what it said; a note names the rank."""
        made: Exception = ClusterError(f"{who}: rank {self.rank} raised {self.text}")
        with contextlib.suppress(Exception):
            made = pickle.loads(self.pickled)
        made.add_note(f"{who}: rank {self.rank} of dp raised it: {self.text}")
        return made


class HeldError:
    """The first error of this process, until all processes raise.

    >>> held = HeldError(Peers(None))
    >>> with held.back():  # alone, an error is raised where it happens
    ...     raise ValueError("no such row")
    Traceback (most recent call last):
    ValueError: no such row
    """

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self.error: Exception | None = None

    @contextlib.contextmanager
    def back(self) -> Iterator[None]:
        """Hold back what is raised inside."""
        try:
            yield
        except Exception as error:
            if self.peers.alone:
                raise
            self.error = self.error or error

    def meet[T](self, who: str, value: T = None) -> list[T]:  # type: ignore[assignment]
        """What every process found, by rank; a collective.

        Raises:
            Exception: the error of this process, or of the first that has one.
        """
        mishap = None if self.error is None else PickledError.of(self.peers.rank, self.error)
        found = self.peers.gather((value, mishap))
        if self.error is not None:
            raise self.error
        for _, other in found:
            if other is not None:
                raise other.error(who)
        return [value for value, _ in found]
