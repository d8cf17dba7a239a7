"""A pool of processes for tests of what is sharded."""

from collections.abc import Iterator

import pytest

from tests.backends.processes import Processes


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    processes = Processes(2)
    yield processes
    processes.close()
