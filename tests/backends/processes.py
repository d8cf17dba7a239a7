"""Processes that hold a model together over gloo, kept for many calls, because starting them is slow."""

import gc
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.children import server

__all__ = ["AXES", "Processes"]

AXES = ("dp", "tp", "pp", "cp")


class Processes:
    """``n`` processes with a mesh of ``dp=n``. Calling it with a function runs ``function(mesh, ...)`` in each."""

    def __init__(self, n: int, *imported: str) -> None:
        self.folder = tempfile.TemporaryDirectory()
        context, file = server(*imported), str(Path(self.folder.name) / "meeting")
        self.ends, self.processes = [], []
        for rank in range(n):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, n, file, theirs), daemon=True)
            process.start()
            theirs.close()
            self.ends.append(mine)
            self.processes.append(process)

    def __call__(self, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """What each process returned; an error of any of them is raised."""
        for end in self.ends:
            end.send((function, args, options))
        answers = []
        for rank, end in enumerate(self.ends):
            assert end.poll(120), f"rank {rank} does not answer"
            answers.append(end.recv())
        failed = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(answers) if error]
        assert not failed, "\n".join(failed)
        return [value for value, _ in answers]

    def close(self) -> None:
        """End them."""
        for end in self.ends:
            end.close()
        for process in self.processes:
            process.join(10)
            process.kill()
            process.join()
        self.folder.cleanup()


def _serve(rank: int, n: int, file: str, end: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")  # as in the process of the tests
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=n, timeout=timedelta(seconds=20)
    )
    mesh = init_device_mesh("cpu", (n, 1, 1, 1), mesh_dim_names=AXES)
    gc.freeze()  # what modules hold is there for good
    while True:
        try:
            function, args, options = end.recv()
        except (EOFError, OSError):
            break
        try:
            end.send((function(mesh, *args, **options), None))
        except BaseException:
            end.send((None, traceback.format_exc()))
    dist.destroy_process_group()
