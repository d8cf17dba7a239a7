"""What every test runs under: no network, one thread, the same examples each time; and on how many cores they run."""

import os
import sys
import threading
from collections.abc import Generator, Iterator

if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):  # as in many images: each process would compile torch anew
    sys.dont_write_bytecode = False
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported, which reads it once
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of what tests start, too: each core has a test of its own

import hypothesis
import pytest
import torch

import nrl  # noqa: F401 - before pytest collects doctests, or it would import modules a second time under their names
from nrl.batch import columns
from nrl.run.step_log import gc_paused
from nrl.runtime.venvs.registry import EXECUTABLES

torch.set_num_threads(1)  # small tensors: more threads cost more than they give, and sums keep one order

_MATHEMATICS = ("tests/algos/", "tests/batch/", "tests/properties/", "tests/batch/test_metrics.py", "nrl/")

hypothesis.settings.register_profile("nrl", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile("nrl")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """One more than cores for the whole suite: many tests wait for processes that they start.

    What is chosen by a path, `-k` or `-m` runs in this process: it starts sooner.
    """
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + 1 if whole and not {"-k", "-m"} & set(config.invocation_params.args) else 0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Branches are counted in tests of the mathematics: to trace the others costs as much time as they take.

    The marker `no_cover` of pytest-cov does not help in processes of xdist, which have two tracers.
    """
    tracers = sys.gettrace(), threading.gettrace()
    if item.nodeid.startswith(_MATHEMATICS) or tracers == (None, None):
        return (yield)
    sys.settrace(None)
    threading.settrace(None)
    try:
        return (yield)
    finally:
        sys.settrace(tracers[0])
        threading.settrace(tracers[1])


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop() -> Generator[None, object, object]:
    """Half a million objects are there by now and stay: no search for garbage looks at them again."""
    with gc_paused():
        return (yield)


@pytest.fixture(autouse=True)
def global_tables() -> Iterator[None]:
    """What a test registers or declares is forgotten after it."""
    before = [(table, dict(table)) for table in (EXECUTABLES, columns._DECLARED)]
    yield
    for table, held in before:
        table.clear()
        table.update(held)  # type: ignore[arg-type]
