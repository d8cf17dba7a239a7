"""Processes that tests start to end them: forks of one server, which has imported what is slow to import."""

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from typing import Any

__all__ = ["child", "server"]

_IMPORTED = [
    "examples.grpo",
    "transformers.models.qwen3.modeling_qwen3",
    "nrl.backends.fsdp.torch_engine",
    "hypothesis",
    "pytest",
]


def server() -> ForkServerContext:
    """The fork server, running: a process's first one takes many seconds to start, and nobody should time that."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
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
