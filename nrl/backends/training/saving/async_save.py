"""The driver's half of writing beside the steps: waiting for the processes of a trainer."""

import pickle
import time
from collections.abc import Sequence

from nrl.backends.training import worker
from nrl.errors import DeadlineExceeded
from nrl.files import Saved
from nrl.runtime.mesh.futures import Future
from nrl.runtime.mesh.placement import Mesh
from nrl.runtime.mesh.processes import Out, Value
from nrl.runtime.mesh.rpc import Each, call
from nrl.runtime.trace import profiles, timeline

__all__ = ["wait_for_writers"]

_FIRST, _LONGEST, _GROWTH = 0.001, 1.0, 1.2  # seconds between two questions, and how these become fewer
_PATIENCE = 5.0  # seconds for an answer; a step comes first, so a slow answer is not reported


def wait_for_writers(mesh: Mesh, writers: Sequence[Value]) -> list[Saved]:
    """Wait until all writers of `worker.begin_writing` are done; return the files of each process, by rank.

    It asks again and again, in any thread; between its questions the processes do what they are told to.

    Raises:
        Exception: the error of the first writer that had one, once all have ended.
        LostActor: a process died.
    """
    pause = _FIRST
    while True:
        with timeline.hide_calls(), profiles.without_profiling():
            future = call(mesh, "save", worker.poll_writing, Each(writers), outs=Out.all, turn=False).then(list)
        results = _wait_patiently(mesh, future)
        if all(result is not None for result in results):
            break
        time.sleep(pause)
        pause = min(_LONGEST, pause * _GROWTH)
    for result in results:
        if isinstance(result, bytes):
            raise pickle.loads(result)
    return [result for result in results if isinstance(result, Saved)]


def _wait_patiently(mesh: Mesh, future: Future[list[Saved | bytes | None]]) -> list[Saved | bytes | None]:
    while True:
        try:
            return future.result(timeout=_PATIENCE)
        except DeadlineExceeded:
            if mesh.processes.has_ended:
                raise
