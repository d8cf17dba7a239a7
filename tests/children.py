"""Processes that tests start to end them: forks of one that has imported what is slow to import."""

import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Ended", "child", "ends", "server"]

_IMPORTED = [
    "examples.grpo",
    "transformers.models.qwen3.modeling_qwen3",
    "nrl.backends.fsdp.torch_engine",
    "hypothesis",
    "pytest",
]


def server(*more: str) -> ForkServerContext:
    """The fork server, running: a process's first one takes many seconds to start, and nobody should time that.

    ``more`` are modules to import where it does not run yet.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_IMPORTED, *more])
    ready = context.Process(target=time.time)
    ready.start()
    ready.join()
    return context


def child(target: Callable[..., None], *args: Any) -> int | None:
    """Run a function to its end; returns the exit code. What it raises is on the standard error."""
    process = server().Process(target=target, args=args)
    process.start()
    process.join()
    return process.exitcode


class Ended(NamedTuple):
    """What a program has left."""

    status: int
    out: str
    err: str


_ENDS = """
import json, os, sys
exec(sys.argv[1])
folder, programs, running = sys.argv[2], json.loads(sys.argv[3]), {}
for name, program in programs.items():
    pid = os.fork()
    if not pid:
        for fd in (1, 2):
            os.dup2(os.open(f"{folder}/{name}.{fd}", os.O_WRONLY | os.O_CREAT), fd)
        exec(program, {"__name__": "__main__"})
        sys.exit()
    running[name] = pid
print(json.dumps({name: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for name, pid in running.items()}))
"""


def ends(first: str, programs: Mapping[str, str], seconds: float) -> dict[str, Ended]:
    """How programs end, in fresh interpreters but for what all of them do first: it is done once, and then they fork.

    Args:
        first: imports, mostly.
        programs: each by a name; they run at the same time, and end as any script does.
        seconds: in which all of them have to end.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _ENDS, first, folder, json.dumps(dict(programs))]
        done = subprocess.run(command, timeout=seconds, capture_output=True, text=True, check=True)
        texts = {name: [Path(folder, f"{name}.{fd}").read_text() for fd in (1, 2)] for name in programs}
        return {name: Ended(status, *texts[name]) for name, status in json.loads(done.stdout).items()}
