"""The example with a real vLLM engine, in an environment of its own, between two meshes."""

import importlib
from pathlib import Path

import attrs
import pytest

from benchmarks import publish
from examples import grpo
from nrl import Layout, tiny
from nrl.backends import Model, Sampling, adamw, load_tokenizer
from nrl.backends.models.loading import build, save_model
from nrl.runtime import Cluster
from tests.jsonlines import lines
from tests.replays import assert_replayed, balances, played, taught

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_grpo_learns_with_vllm(on_ray: Cluster, tmp_path: Path) -> None:
    cfg = attrs.evolve(grpo.Config(), out=str(tmp_path), cluster="ray", sampler="vllm-cpu", steps=24, eval_data=None)
    cfg = attrs.evolve(cfg, engine={"max_num_seqs": 256, "kv_cache_memory_bytes": 2**27})
    grpo.main(cfg)
    found = lines(tmp_path / "metrics.jsonl")
    rewards = [each["reward"] for each in found]
    assert [each["lag"] for each in found] == [0] * 24
    assert sum(rewards[-8:]) / 8 > sum(rewards[:8]) / 8 + 0.08
    assert max(each["ratio_max"] for each in found) < 1.001  # the sampler's log-probabilities are the trainer's


@pytest.mark.parametrize("name", ["guess", pytest.param("tools", marks=pytest.mark.slow)])
def test_episodes_of_several_turns_are_bridged_as_they_are_locally(on_ray: Cluster, name: str, tmp_path: Path) -> None:
    """vLLM samples other tokens than ours; what lies between them is what the same turns have here."""
    module = importlib.import_module(f"examples.{name}")
    model = taught(module, name, tmp_path / "taught")
    engine = {"max_num_seqs": 64, "kv_cache_memory_bytes": 2**27}
    options = {"cluster": "ray", "sampler": "vllm-cpu", "engine": engine, "optimizer": adamw(lr=1e-3)}
    found, seen = played(module, name, model, tmp_path / "run", **options)
    assert len(seen) == 3 * 4 * module.Config().group_size
    assert sum(len(each.turns) > 2 for each in seen) > len(seen) // 5
    for each in seen:
        assert_replayed(module.env, each, load_tokenizer(Model(str(model))))
    assert all(balances(x) and x["invalid"] == 0 and x["lag"] == 0 for x in found)
    assert sum(sum(each.sampled) for each in seen) == sum(x["tokens/sampled"] for x in found)
    assert max(x["mismatch/max_abs"] for x in found) < 1e-2
    assert any(x["grad_norm"] for x in found)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_million_parameters_answer_questions(on_ray: Cluster, tmp_path: Path) -> None:
    """They learn nothing in five steps; a real model's folder, prompts and sizes go the way that they always go."""
    model = publish.model("100M")
    save_model(build(model), tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    cfg = grpo.Config(
        model=str(tmp_path / "model"),
        data=str(Path(__file__).parent / "data" / "gsm8k_sample.jsonl"),
        format="gsm8k",
        chat=False,
        out=str(tmp_path / "run"),
        cluster="ray",
        sampler="vllm-cpu",
        steps=5,
        prompts=4,
        group_size=4,
        sampling=Sampling(max_new_tokens=32),
    )
    grpo.main(cfg)
    found = lines(tmp_path / "run" / "metrics.jsonl")
    assert [each["lag"] for each in found] == [0] * 5
    assert max(each["mismatch/max_abs"] for each in found) < 1e-2
    assert all(each["length"] > 16 for each in found)


def test_grpo_trains_with_megatron_and_samples_with_vllm(on_ray: Cluster, tmp_path: Path) -> None:
    cfg = attrs.evolve(grpo.Config(), out=str(tmp_path), cluster="ray", trainer="megatron", sampler="vllm-cpu", steps=3)
    cfg = attrs.evolve(cfg, layout=Layout(tp=2), eval_data=None, warmup=20, prompts=16)
    cfg = attrs.evolve(cfg, engine={"max_num_seqs": 256, "kv_cache_memory_bytes": 2**27})
    grpo.main(cfg)
    found = lines(tmp_path / "metrics.jsonl")
    assert [each["lag"] for each in found] == [0] * 3
    assert all(each["grad_norm"] > 0 for each in found)  # so what is published is new each time
    assert max(each["mismatch/max_abs"] for each in found) < 1e-4
