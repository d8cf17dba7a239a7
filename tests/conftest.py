"""Fixtures that tests of several folders share."""

from collections.abc import Iterator

import pytest

import nrl
from nrl.log import redaction
from nrl.runtime import Cluster, Mesh, Slots
from tests.meshes import end


@pytest.fixture(autouse=True)
def no_secrets_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test tells nrl to keep secret is no secret in the next one."""
    monkeypatch.setattr(redaction, "_told", set())


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


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=pytest.mark.ray)])
def judges(request: pytest.FixtureRequest) -> Iterator[Mesh]:
    """A mesh of two processes; each test leaves it as it was."""
    if request.param == "ray":
        mesh = request.getfixturevalue("on_ray").reserve(2).mesh(executable="system", name="judges")
        yield mesh
        end(mesh)
    else:
        with nrl.cluster("local") as here:
            yield here.reserve(2).mesh(name="judges")
