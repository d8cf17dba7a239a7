"""What every test of the runtime runs under."""

from collections.abc import Iterator

import pytest

from nrl.runtime.executables import EXECUTABLES


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """What a test registers is gone after it."""
    before = dict(EXECUTABLES)
    yield
    EXECUTABLES.clear()
    EXECUTABLES.update(before)
