"""What `vllm.sampler` sees before vLLM is started; these need no vLLM."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from nrl import tiny
from nrl.backends import Model, vllm
from nrl.backends.models.loading import build, save_model
from nrl.backends.vllm import settings, vllm_engine
from nrl.errors import ConfigError, ModelError, PlacementError
from nrl.runtime import Cluster
from nrl.runtime.mesh.local import LocalCluster


@pytest.mark.parametrize(
    "options",
    [
        {"logprobs_mode": "raw_logits"},
        {"data_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"trust_remote_code": True},
    ],
)
def test_arguments_that_are_nrls_are_refused_at_once(local: Cluster, options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=f"vllm.sampler: {name} are set by nrl; leave them out, and say with slots"):
        vllm.sampler(local.reserve(1), tiny.model(), max_num_seqs=3, **options)


def test_an_executable_for_gpus_where_there_are_none(local: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalCluster, "remote", True)
    with pytest.raises(PlacementError, match="there is no GPU on this node; give executable='vllm-cpu'"):
        vllm.sampler(local.reserve(1), tiny.model())
    settings.check(local.reserve(1), "vllm-cpu", {})
    monkeypatch.setattr(LocalCluster, "are_gpus", lambda cluster, indices: True)
    settings.check(local.reserve(1), "vllm", {})


def test_a_mesh_without_vllm(local: Cluster) -> None:
    with pytest.raises(PlacementError, match="needs the package 'vllm', which this process cannot import"):
        vllm.sampler(local.reserve(1), tiny.model(), executable="vllm-cpu")
    with pytest.raises(PlacementError, match="the environment of its mesh has no package 'vllm'; make the mesh with"):
        vllm.sampler(local.reserve(1).mesh(executable="system"), tiny.model())


def test_memory_is_what_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    model = tiny.model()
    assert settings.with_defaults(model, {})["kv_cache_memory_bytes"] == 2**30
    assert settings.with_defaults(model, {"kv_cache_memory_bytes": 5})["kv_cache_memory_bytes"] == 5
    assert "kv_cache_memory_bytes" not in settings.with_defaults(model, {"gpu_memory_utilization": 0.2})
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert "kv_cache_memory_bytes" not in settings.with_defaults(model, {})
    assert settings.with_defaults(model, {})["enable_sleep_mode"]


def test_code_that_comes_with_a_model_runs_where_the_model_says_so() -> None:
    assert settings.with_defaults(tiny.model(), {})["trust_remote_code"] is False
    assert settings.with_defaults(Model("somewhere", trust_remote_code=True), {})["trust_remote_code"] is True


def test_what_the_hub_has_is_read_where_it_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module: Any = build(tiny.model())
    module.generation_config.eos_token_id = [7, 9]
    save_model(module, tmp_path / "fetched")
    asked = []

    def download(name: str, **kwargs: Any) -> str:
        asked.append((name, kwargs))
        if name != "someone/tiny":
            raise OSError("there is no such name")
        return str(tmp_path / "fetched")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    tokenizer = tiny.tokenizer()
    model = Model("someone/tiny", tokenizer=tokenizer)
    with monkeypatch.context() as patched:
        patched.setattr(vllm_engine, "build", None)
        folder, stops = vllm_engine._prepare_folder(model, tokenizer, tmp_path / "scratch")
    assert folder == tmp_path / "fetched"
    assert stops == tuple(sorted({7, 9, tokenizer.eos_token_id}))
    files = {"allow_patterns": ["*.json", "*.safetensors"], "ignore_patterns": ["original/*", "consolidated*"]}
    assert asked == [("someone/tiny", files)]
    assert "model.embed_tokens.weight" in vllm_engine._shapes(folder, True)
    with pytest.raises(ModelError, match="the files of 'nobody/none' cannot be had from the hub: there is no such nam"):
        vllm_engine._prepare_folder(Model("nobody/none"), tokenizer, tmp_path / "scratch")


def test_what_has_no_files_that_vllm_reads_is_written(tmp_path: Path) -> None:
    folder, _ = vllm_engine._prepare_folder(tiny.model(), tiny.tokenizer(), tmp_path)
    assert folder == tmp_path
    assert list(tmp_path.glob("*.safetensors"))
