"""A real sampler and a trainer of one tiny model."""

import pytest

from nrl import tiny
from nrl.backends import Sampling, Trainer, adamw, fsdp, hf
from nrl.backends.sampling.pool import EnginePool
from nrl.runtime import Slots


@pytest.fixture(scope="module")
def sampler(slots: Slots) -> EnginePool:
    return hf.sampler(slots[:1], tiny.model(num_hidden_layers=1), Sampling(max_new_tokens=5))


@pytest.fixture(scope="module")
def trainer(slots: Slots) -> Trainer:
    return fsdp.trainer(slots[1:2], tiny.model(num_hidden_layers=1), adamw(lr=1e-2))
