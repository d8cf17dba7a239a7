"""Fixtures that tests of several folders share."""

from collections.abc import Iterator

import pytest

import nrl
from nrl.runtime import Cluster, Slots


@pytest.fixture(scope="module")
def local() -> Iterator[Cluster]:
    """The local cluster."""
    with nrl.cluster("local") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def slots(local: Cluster) -> Slots:
    """Places on it: each test takes as many as it needs."""
    return local.reserve(9)


@pytest.fixture(scope="session")
def on_ray() -> Iterator[Cluster]:
    """One Ray cluster on this machine, for all tests that neither change nor kill it."""
    with nrl.cluster("ray", deadline=300) as cluster:
        yield cluster
