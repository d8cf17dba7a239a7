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

__all__ = ["all_written"]

_FIRST, _LONGEST, _GROWTH = 0.001, 1.0, 1.2  # seconds between two questions, and how these become fewer
_PATIENCE = 5.0  # seconds for an answer, after which nobody shall be told that it takes long: a step comes first


def all_written(mesh: Mesh, writers: Sequence[Value]) -> list[Saved]:
    """Wait until all processes have written what `on_ranks.begin_writing` has begun; what each wrote, by rank.

    It asks again and again, in any thread; between its questions the processes do what they are told to.

    Raises:
        Exception: the error of the first writer that had one, once all have ended.
        LostActor: a process died.
    """
    pause = _FIRST
    while True:
        with timeline.hide_calls(), profiles.without_profiling():
            asked = call(mesh, "save", worker.written, Each(writers), outs=Out.all, turn=False).then(list)
        found = _patiently(mesh, asked)
        if all(each is not None for each in found):
            break
        time.sleep(pause)
        pause = min(_LONGEST, pause * _GROWTH)
    for each in found:
        if isinstance(each, bytes):
            raise pickle.loads(each)
    return [each for each in found if isinstance(each, Saved)]


def _patiently(mesh: Mesh, asked: Future[list[Saved | bytes | None]]) -> list[Saved | bytes | None]:
    while True:
        try:
            return asked.result(timeout=_PATIENCE)
        except DeadlineExceeded:
            if mesh.processes.has_ended:
                raise
