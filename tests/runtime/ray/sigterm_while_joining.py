"""SIGTERM while Ray connects: the program's own handler answers, as it does before and after that.

`test_apart.py` runs it, in a process that has joined no cluster of Ray yet.
"""

import os
import signal
from typing import Any

import pytest

import nrl

pytestmark = pytest.mark.ray


def test_the_programs_handler_answers_while_ray_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own would exit with the status 15: no checkpoint, and a scheduler that does not start the job again."""
    from ray._private import utils, worker

    theirs: Any = utils.set_sigterm_handler
    connect, heard = worker.connect, list[int]()

    def signalled(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return connect(*args, **kwargs)

    monkeypatch.setattr(worker, "connect", signalled)
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with nrl.cluster("ray") as cluster:
            assert cluster.name == "ray"
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]
    assert utils.set_sigterm_handler is theirs  # for whatever else uses Ray
