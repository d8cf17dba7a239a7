"""Fixtures that tests of several folders share."""

from collections.abc import Iterator

import pytest

import nrl
from nrl.runtime import Cluster


@pytest.fixture(scope="session")
def on_ray() -> Iterator[Cluster]:
    """One Ray cluster on this machine, for all tests that neither change nor kill it."""
    with nrl.cluster("ray", deadline=300) as cluster:
        yield cluster
