"""Pools of processes in which Megatron is imported already."""

from collections.abc import Iterator

import pytest

from tests.backends.processes import Processes


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    processes = Processes(2, "megatron.core.models.gpt", "nrl.backends.megatron.megatron_engine")
    yield processes
    processes.close()


@pytest.fixture(scope="module")
def four() -> Iterator[Processes]:
    processes = Processes(4, "megatron.core.models.gpt", "nrl.backends.megatron.megatron_engine")
    yield processes
    processes.close()
