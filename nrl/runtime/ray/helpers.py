"""Second processes beside those of a mesh, which run submitted functions in threads.

A mesh's own process runs one call after the other in its main thread, as vLLM and collectives need it. A helper is an
actor in the same slot and the same environment, so a function in it holds up no call, and it can be killed alone.
"""

import functools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from nrl.errors import MutatedBatch
from nrl.runtime.mesh.processes import Out
from nrl.runtime.mesh.task_queue import THREADS, Desk, Helper, Task
from nrl.runtime.ray.call_arguments import Arguments, Stored
from nrl.runtime.ray.codec.messages import Order, Receipt, folded
from nrl.runtime.ray.codec.pickling import deserialized
from nrl.runtime.ray.failures import error_of, is_death, lost, raised
from nrl.runtime.ray.nodes import last_lines
from nrl.runtime.ray.pending_call import Call, MeshActors, Ref
from nrl.runtime.ray.results import Pending
from nrl.runtime.trace import timeline

__all__ = ["ActorHelper", "packed"]


def packed(
    processes: MeshActors, stored: Stored, who: str, fn: Callable[..., Any], *args: Any
) -> tuple[list[Any], list[Call]]:
    """Pack a function and its arguments; what is sent, and the calls whose results it reads.

    It waits for those calls, so that a helper's threads need not.
    """
    for arg in args:
        if isinstance(arg, Pending):
            arg.call.wait()
    arguments = Arguments(processes, stored, who, fn)
    given, beside = arguments.load(0, args)
    order = Order(who, arguments.digest, given, Out.all, keys=(None,), wanted=(True,), compared=(False,))
    return folded(order, beside), arguments.read


class ActorHelper(Helper):
    """A second process of a slot.

    Args:
        processes: of the mesh.
        start: starts the actor.
        desk: of the mesh.
        rank: of the process in the same slot.
    """

    fate = "its helper is killed as soon as no other function runs in it"

    def __init__(self, processes: MeshActors, start: Callable[[int], Any], desk: Desk, rank: int) -> None:
        super().__init__(desk, rank)
        self._processes, self._node = processes, processes.nodes[rank]
        self._actor = start(rank)
        self._files = self._actor.do.remote("logs")
        _when_done(self._files, self._look_at_start)
        stays = self._actor.do.remote("stay")
        _when_done(stays, functools.partial(self._look_at_end, stays))

    def begin(self, task: Task) -> None:
        """Send the function; Ray calls back when it has returned."""
        letter, read = task.load
        task.load = None
        receipt, result = self._actor.do.options(num_returns=2).remote("submitted", *letter)
        _when_done(receipt, functools.partial(self._ended, task, read, receipt, result))

    def end(self) -> None:
        """Kill the process."""
        import ray

        ray.kill(self._actor, no_restart=True)

    def log(self) -> str:
        """The last lines that it wrote."""
        return last_lines(self._node[0], self._files)

    def _look_at_start(self) -> None:
        if error_of(self._files) is None:
            self.desk.started(self)

    def _look_at_end(self, stays: Ref) -> None:
        """It is gone: while it started, while it was idle, or with functions, each of which is told so for itself."""
        error = error_of(stays)
        if error is not None:
            self.desk.lost(self, functools.partial(self._told, error))

    def _ended(self, task: Task, read: Sequence[Call], receipt: Ref, result: Ref) -> None:
        """A function has returned or raised, or its process has died; called in a thread."""
        error = error_of(receipt)
        if error is not None and is_death(error):
            self.desk.lost(self, functools.partial(self._told, error))
        self.desk.over(self, task)
        try:
            if error is None:
                self._open(task, receipt, result)
                return
            found = self._told(error, task.who)
        except BaseException as other:
            found = other
        if isinstance(found, MutatedBatch):
            self._processes.forget()
            for call in read:
                call.error = found
        task.settle(error=found)

    def _open(self, task: Task, receipt: Ref, result: Ref) -> None:
        import ray

        ran: Receipt = pickle.loads(bytes(ray.get(receipt)))
        if task.shown:
            timeline.record(
                self.desk.label, self.rank, task.who, ran.start - self._node.ahead, ran.end - self._node.ahead
            )
        try:
            parts = ray.get(result, timeout=self._processes.deadline)
        except ray.exceptions.RayError as error:  # the node that held the result is gone
            task.settle(error=self._told(error, task.who))
        else:
            task.settle(deserialized(parts, copy=True)[0])

    def _told(self, error: BaseException, who: str) -> BaseException:
        """The error that a caller gets of one that Ray has in the place of a result."""
        mesh = self.desk.mesh
        if (ended := self._processes.after_end(who)) is not None:
            return ended
        if is_death(error):
            return lost(who, mesh, self.rank, self._node[1], error, self.log)
        return raised(error, mesh, self._processes.where(self.rank))


def _when_done(ref: Ref, then: Callable[[], object]) -> None:
    """Call a function in a thread once Ray has an object, or an error in its place."""
    ref.future().add_done_callback(lambda _: THREADS.submit(then))
