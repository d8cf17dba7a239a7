"""How engines are given weights: what overlaps, in which dtype they come, and what they are compared with."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import nrl
from nrl import tiny
from nrl.backends import Model, Params, Sampling, adamw, fsdp, hf
from nrl.backends.hf.hf_engine import HfEngine
from nrl.backends.sampling.pool import EnginePool
from nrl.backends.sampling.weight_delivery import Weights, give
from nrl.backends.training import weight_stream
from nrl.backends.training.trainer import Trainer
from nrl.errors import ModelError, WeightMismatch
from nrl.runtime import Cluster
from nrl.runtime.mesh.futures import done
from tests.weights import assert_equal

MODEL = tiny.model(seed=1, initializer_range=0.2)
MIXTURE = tiny.model(
    model_type="qwen3_moe",
    num_local_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    tie_word_embeddings=False,
)


@pytest.fixture(scope="module")
def here() -> Iterator[Cluster]:
    with nrl.cluster("local") as entered:
        yield entered


@pytest.fixture
def params(here: Cluster) -> Params:
    return fsdp.trainer(here.reserve(1), MODEL, adamw(lr=1e-3)).init().params


@pytest.fixture
def sampler(here: Cluster) -> EnginePool:
    return pool(here)


def pool(here: Cluster, model: Model = MODEL, tolerance: float = 1e-3) -> EnginePool:
    meshes = [here.reserve(1).mesh()]
    return EnginePool("checked", meshes, partial(HfEngine, model), model, Sampling(), tolerance)


class Slow:
    """A replica whose engine loads for as long as nobody waits for it."""

    def __init__(self, story: list[str], fails: str = "") -> None:
        self.mesh, self.story, self.fails = None, story, fails

    def load_weights(self, step: str, *given: Any) -> "Slow":
        self.story.append(f"ask {step}")
        return self

    def result(self) -> None:
        self.story.append("wait")
        if self.fails:
            raise ModelError(self.fails)

    def describe_death(self, error: Exception) -> None:
        return None


def test_the_next_bucket_is_read_while_one_is_loaded() -> None:
    story = list[str]()

    def buckets() -> Iterator[Any]:
        for bucket in range(3):
            story.append(f"read {bucket}")
            yield done(bucket)

    replicas: list[Any] = [Slow(story)]
    assert give(replicas, buckets(), 1) == {}
    ahead = ["read 0", "ask add", "read 1", "ask add", "wait", "read 2", "ask add", "wait", "wait"]
    assert story == ["ask begin", "wait", *ahead, "ask end", "wait"]


def test_nothing_that_was_asked_is_left_behind_an_error() -> None:
    story = list[str]()

    def buckets() -> Iterator[Any]:
        yield done(0)
        replicas[0].fails = "refused"
        yield done(1)
        raise AssertionError("it is known by then that the first was refused")

    replicas: list[Any] = [Slow(story)]
    with pytest.raises(ModelError, match="refused"):
        give(replicas, buckets(), 1)
    assert story == ["ask begin", "wait", "ask add", "ask add", "wait", "wait"]


@pytest.mark.parametrize("beside", [True, False])
def test_where_engines_are_on_its_devices_the_trainer_computes_before_it_sends(
    here: Cluster, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    """Also before they begin to load, since its turn makes them rest. Else it does so while they load.

    It is asked once, also if engines are given the weights again.
    """
    slots, story = here.reserve(2), list[str]()
    params = fsdp.trainer(slots[:1], MODEL, adamw(lr=1e-3)).init().params
    meshes = [slots[0 if beside else 1 :].mesh()]
    sampler = EnginePool("checked", meshes, partial(HfEngine, MODEL), MODEL, Sampling(), 1e-3)

    def told(of: Any, name: str) -> None:
        do = getattr(of, name)

        def also(*args: Any, **options: Any) -> Any:
            story.append(name)
            return do(*args, **options)

        monkeypatch.setattr(of, name, also)

    for of, name in ((Trainer, "forward"), (HfEngine, "begin"), (HfEngine, "add"), (HfEngine, "advance")):
        told(of, name)
    nrl.publish(params, sampler)
    order = ["forward", "begin", "add", "advance"] if beside else ["begin", "add", "forward", "advance"]
    assert list(dict.fromkeys(story)) == order
    assert story.count("forward") == 1
    given: Any = sampler._weights
    give(sampler._replicas, given, 2)
    assert story.count("forward") == 1


def test_the_bits_are_those_of_rounding_where_they_arrive(here: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tied weights, of experts that transformers joins, and of adapters that are added in; vectors stay."""
    add, end = HfEngine.add, HfEngine.end
    came, held = list[dict[str, torch.dtype]](), list[dict[str, Tensor]]()

    def seen(self: HfEngine, bucket: Any) -> None:
        came.append({piece.name: piece.tensor.dtype for piece in bucket})
        add(self, bucket)

    def kept(self: HfEngine, version: int) -> None:
        end(self, version)
        held.append({name: x.clone() for name, x in self.module.state_dict().items()})

    monkeypatch.setattr(HfEngine, "add", seen)
    monkeypatch.setattr(HfEngine, "end", kept)
    for model in (MODEL, MIXTURE, attrs.evolve(MODEL, lora={"r": 2, "target_modules": "all-linear"})):
        params = fsdp.trainer(here.reserve(1), model, adamw(lr=1e-3)).init().params
        sampler = hf.sampler(here.reserve(1), attrs.evolve(model, dtype="bfloat16", lora=None))
        nrl.publish(params, sampler)
        sampler.capabilities = attrs.evolve(sampler.capabilities, dtype=None)
        nrl.publish(params, sampler)
        assert_equal(*held[-2:])
        name = next(name for name in came[-2] if name.endswith("q_proj.weight"))
        assert [each[name] for each in came[-2:]] == [torch.bfloat16, torch.float32]
        assert {each["model.norm.weight"] for each in came} == {torch.float32}


def test_a_rounded_bucket_has_twice_as_many_weights(params: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_stream, "_BUCKET", 100_000)
    whole, half = (len(list(params.buckets(dtype=dtype))) for dtype in (None, torch.bfloat16))
    assert whole > 1.5 * half


def fixed(ids: Tensor, logprobs: Tensor) -> Any:
    return lambda self, params, batch, needs: {
        "top_k_ids": done(ids.expand(len(batch), batch["input_ids"].shape[1], -1)),
        "top_k_logprobs": done(logprobs.expand(len(batch), batch["input_ids"].shape[1], -1)),
    }


def test_a_token_that_the_trainer_has_not_among_its_best(
    params: Params, sampler: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is at most as probable there as the last of those; if that leaves too little room, the engine is wrong."""
    nrl.publish(params, sampler)
    nobody = torch.tensor([-1, -2])
    monkeypatch.setattr(Trainer, "forward", fixed(nobody, torch.tensor([-0.1, -9.0])))
    with pytest.raises(WeightMismatch, match=r"at most \[-9\.0, -9\.0, -9\.0, -9\.0\]: they are .* 0\.001 may be"):
        nrl.publish(params, sampler)
    monkeypatch.setattr(Trainer, "forward", fixed(nobody, torch.tensor([0.0, 0.0])))
    nrl.publish(params, sampler)


def test_weights_for_a_sampler_that_needs_no_check(params: Params, here: Cluster) -> None:
    free = hf.sampler(here.reserve(1), MODEL)
    assert len(list(Weights(params, free).to([]))) == len(list(params.buckets()))
