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
from nrl.runtime.ray.call_arguments import Arguments, ObjectStoreCache
from nrl.runtime.ray.codec.messages import CallReply, CallRequest, encode
from nrl.runtime.ray.codec.pickling import deserialize
from nrl.runtime.ray.failures import explain_raised, get_error, is_death, make_lost_error
from nrl.runtime.ray.nodes import last_lines
from nrl.runtime.ray.pending_call import Call, MeshActors, Ref
from nrl.runtime.ray.results import Pending
from nrl.runtime.trace import timeline

__all__ = ["ActorHelper", "pack_task"]


def pack_task(
    processes: MeshActors, stored: ObjectStoreCache, caller: str, fn: Callable[..., Any], *args: Any
) -> tuple[list[Any], list[Call]]:
    """Pack a function and its arguments; return the data to send, and the calls whose results it reads.

    Waits for these calls, so that a helper's threads need not.
    """
    for arg in args:
        if isinstance(arg, Pending):
            arg.call.wait()
    arguments = Arguments(processes, stored, caller, fn)
    packed_args, items = arguments.pack(0, args)
    request = CallRequest(
        caller, arguments.digest, packed_args, Out.all, keys=(None,), returned=(True,), compared=(False,)
    )
    return encode(request, items), arguments.read


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
        _call_when_done(self._files, self._look_at_start)
        stays = self._actor.do.remote("stay")
        _call_when_done(stays, functools.partial(self._look_at_end, stays))

    def begin(self, task: Task) -> None:
        """Send the function; Ray calls back when it has returned."""
        payload, read = task.load
        task.load = None
        reply, result = self._actor.do.options(num_returns=2).remote("call_in_thread", *payload)
        _call_when_done(reply, functools.partial(self._handle_return, task, read, reply, result))

    def end(self) -> None:
        """Kill the process."""
        import ray

        ray.kill(self._actor, no_restart=True)

    def log(self) -> str:
        """Return the last lines of its log."""
        return last_lines(self._node[0], self._files)

    def _look_at_start(self) -> None:
        if get_error(self._files) is None:
            self.desk.started(self)

    def _look_at_end(self, stays: Ref) -> None:
        """Report the end of the process to the queue, and to each function that ran in it."""
        error = get_error(stays)
        if error is not None:
            self.desk.lost(self, functools.partial(self._error_for_caller, error))

    def _handle_return(self, task: Task, read: Sequence[Call], reply: Ref, result: Ref) -> None:
        """Settle a task whose function has returned or raised, or whose process has died; called in a thread."""
        error = get_error(reply)
        if error is not None and is_death(error):
            self.desk.lost(self, functools.partial(self._error_for_caller, error))
        self.desk.over(self, task)
        try:
            if error is None:
                self._open(task, reply, result)
                return
            failure = self._error_for_caller(error, task.who)
        except BaseException as other:
            failure = other
        if isinstance(failure, MutatedBatch):
            self._processes.forget()
            for call in read:
                call.error = failure
        task.settle(error=failure)

    def _open(self, task: Task, reply: Ref, result: Ref) -> None:
        import ray

        call_reply: CallReply = pickle.loads(bytes(ray.get(reply)))
        if task.shown:
            timeline.record(
                self.desk.label,
                self.rank,
                task.who,
                call_reply.start - self._node.clock_skew,
                call_reply.end - self._node.clock_skew,
            )
        try:
            parts = ray.get(result, timeout=self._processes.deadline)
        except ray.exceptions.RayError as error:  # the node that held the result is gone
            task.settle(error=self._error_for_caller(error, task.who))
        else:
            task.settle(deserialize(parts, copy=True)[0])

    def _error_for_caller(self, error: BaseException, caller: str) -> BaseException:
        """Return the caller's error for an error of Ray's."""
        mesh = self.desk.mesh
        if (ended := self._processes.error_after_end(caller)) is not None:
            return ended
        if is_death(error):
            return make_lost_error(caller, mesh, self.rank, self._node[1], error, self.log)
        return explain_raised(error, mesh, self._processes.describe_rank(self.rank))


def _call_when_done(ref: Ref, callback: Callable[[], object]) -> None:
    """Call a function in a thread once Ray has an object, or an error in its place."""
    ref.future().add_done_callback(lambda _: THREADS.submit(callback))
