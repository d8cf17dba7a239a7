"""Fixtures that tests of several folders share."""

from collections.abc import Iterator

import pytest

import nrl
from nrl.batch import columns
from nrl.runtime import Cluster


@pytest.fixture(autouse=True)
def declare_for_this_test_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test declares holds for it alone."""
    monkeypatch.setattr(columns, "_DECLARED", dict(columns.declared()))


@pytest.fixture(scope="session")
def on_ray() -> Iterator[Cluster]:
    """One Ray cluster on this machine, for all tests that neither change nor kill it."""
    with nrl.cluster("ray", deadline=300) as cluster:
        yield cluster
