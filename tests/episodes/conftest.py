"""A real sampler and a trainer of one tiny model."""

from collections.abc import Iterator

import pytest

import nrl
from nrl import tiny
from nrl.backends import Sampling, Trainer, adamw, fsdp, hf
from nrl.backends.sampling.pool import EnginePool
from nrl.runtime import Cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with nrl.cluster("local") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def sampler(cluster: Cluster) -> EnginePool:
    return hf.sampler(cluster.reserve(1), tiny.model(num_hidden_layers=1), Sampling(max_new_tokens=5))


@pytest.fixture(scope="module")
def trainer(cluster: Cluster) -> Trainer:
    return fsdp.trainer(cluster.reserve(1), tiny.model(num_hidden_layers=1), adamw(lr=1e-2))
