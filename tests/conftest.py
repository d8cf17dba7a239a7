"""Fixtures that tests of several folders share."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

import nrl
from nrl.errors import ClosedCluster
from nrl.log import redaction
from nrl.runtime import Cluster, Mesh, Slots
from nrl.runtime.ray.cluster import RayCluster
from tests.meshes import end

# A change is not refused for an input that it has nothing to do with: property tests draw the same inputs in every run.
# `.ci/nightly draws` searches for others, with --hypothesis-profile search.
settings.register_profile("search", derandomize=False)
settings.register_profile("repeat", derandomize=True)
settings.load_profile("repeat")


@pytest.fixture(autouse=True)
def no_secrets_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test tells nrl to keep secret is no secret in the next one."""
    monkeypatch.setattr(redaction, "_kept_secrets", set())


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
def ray_of_the_session() -> Iterator[Cluster]:
    """One Ray cluster on this machine: to start one takes seconds."""
    with nrl.cluster("ray", deadline=300) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def on_ray(ray_of_the_session: Cluster) -> Iterator[Cluster]:
    """The session's Ray cluster, for all tests that neither change nor kill it.

    A cluster keeps its meshes until it is left: those of a module are ended with it, or the machine runs out of memory.
    """
    assert isinstance(ray_of_the_session, RayCluster)
    yield ray_of_the_session
    for processes in ray_of_the_session._meshes:
        if not processes.has_ended:
            processes.close(ClosedCluster("the module of tests that began this mesh is over"))


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
