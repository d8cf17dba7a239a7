"""Folders that are written one weight at a time hold what transformers itself would write."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from nrl.backends import Model
from nrl.backends.models import exporting, lazy_weights, loading, lora, named_weights, weight_layout
from nrl.backends.models.exporting import export_weights
from nrl.backends.models.named_weights import named_tensors
from nrl.backends.models.shards import full_shard
from nrl.errors import ModelError
from tests.properties.strategies import TINY

LORA = {"r": 2, "target_modules": ["q_proj"]}
EXPERTS = TINY | {"model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
SPLIT = TINY | {"model_type": "hrm_text"}
MIXTRAL = TINY | {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2}
UNTIED = TINY | {"tie_word_embeddings": False}
CONFIGS = {"tied": TINY, "untied": UNTIED, "experts": EXPERTS, "mixtral": MIXTRAL, "split": SPLIT}
"""Of the last one transformers cuts weights of files; of those before it, it joins them."""


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: x for path in folder.glob("*.safetensors") for name, x in load_file(path).items()}


def one_at_a_time(module: Any, seen: list[str]) -> Iterator[tuple[str, Tensor]]:
    mine = (full_shard(name, tensor) for name, tensor in named_tensors(module))
    for piece in weight_layout.split_for_files(mine, weight_layout.find_parts(module)):
        seen.append(piece.name)
        yield piece.name, piece.tensor.clone()


def skeleton(config: dict[str, Any], dtype: torch.dtype) -> Any:
    with torch.device("meta"):
        return loading.build(Model(config)).to(dtype)


@pytest.mark.parametrize("largest", ["50GB", "5KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", list(CONFIGS))
def test_it_is_what_transformers_writes(
    kind: str, dtype: torch.dtype, largest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = loading.build(Model(CONFIGS[kind]))
    seen: list[str] = []
    monkeypatch.setattr(exporting, "_LARGEST", largest)
    (tmp_path / "ours").mkdir()
    for stale in ("model-00001-of-00009.safetensors", "model.safetensors", "model.safetensors.index.json"):
        (tmp_path / "ours" / stale).write_text("of another model")
    export_weights(one_at_a_time(module, seen), skeleton(CONFIGS[kind], dtype), tmp_path / "ours")
    module.to(dtype).save_pretrained(tmp_path / "theirs", max_shard_size=largest)
    found, expected = tensors(tmp_path / "ours"), tensors(tmp_path / "theirs")
    assert found.keys() == expected.keys()
    assert all(x.dtype == expected[name].dtype and torch.equal(x, expected[name]) for name, x in found.items())
    assert len(seen) == len(dict(named_tensors(module))) if kind == "split" else sorted(seen) == sorted(expected)
    if kind in ("tied", "untied"):  # transformers keeps the experts of a layer in one file
        names = [{path.name for path in (tmp_path / each).iterdir()} for each in ("ours", "theirs")]
        assert names[0] == names[1]
    ours, theirs = (json.loads((tmp_path / each / "config.json").read_text()) for each in ("ours", "theirs"))
    assert ours == theirs
    again: Any = type(module).from_pretrained(tmp_path / "ours", dtype=dtype)
    assert all(torch.equal(x, dict(module.named_parameters())[name]) for name, x in again.named_parameters())


@pytest.mark.parametrize("kind", ["tied", "split"])
def test_a_weight_that_does_not_come_is_missed(kind: str, tmp_path: Path) -> None:
    module: Any = loading.build(Model(CONFIGS[kind]))
    some = [(name, x) for name, x in named_tensors(module) if name != "model.embed_tokens.weight"]
    with pytest.raises(ModelError, match="export: 1 weights did not arrive: model.embed_tokens.weight"):
        export_weights(iter(some), skeleton(CONFIGS[kind], torch.float32), tmp_path)


def test_a_folder_is_read_one_weight_at_a_time(tmp_path: Path) -> None:
    """With any head and adapter it gives the model that transformers reads as a whole."""
    for kind, config in CONFIGS.items():
        loading.save_model(loading.build(Model(config, seed=4)), tmp_path / kind)
    heads: list[Any] = ["lm", "value", "reward"]
    for kind in ("tied", "untied", "experts", "mixtral"):
        for head in heads:
            for adapter in (None, LORA):
                model = Model(str(tmp_path / kind), head=head, lora=adapter, seed=5)
                unread, whole = lora.build_lazy(model), lora.build(model)
                assert unread is not None
                own = dict(unread.module.named_parameters())
                assert own.keys() == dict(whole.named_parameters()).keys()
                for name, expected in whole.named_parameters():
                    mine = own[name]
                    assert mine.is_meta == (".lora_" not in name)
                    value = unread.load(named_weights.weight_name(name)) if mine.is_meta else mine
                    assert torch.equal(value, expected), name
                    assert (mine.shape, mine.requires_grad) == (expected.shape, expected.requires_grad)
                for (name, x), (other, y) in zip(unread.module.named_buffers(), whole.named_buffers(), strict=True):
                    assert (name, x.tolist()) == (other, y.tolist())


@pytest.mark.parametrize("has_head", [True, False])
@pytest.mark.parametrize("head", ["value", "reward"])
def test_an_adapters_folder_with_a_head_is_read_over_a_folder(head: Any, has_head: bool, tmp_path: Path) -> None:
    """The head of the adapter's folder replaces the one that lies with the base, or that is new."""
    loading.save_model(loading.build(Model(UNTIED, seed=4, head=head if has_head else "lm")), tmp_path / "base")
    base = str(tmp_path / "base")
    adapted = lora.build(Model(base, head=head, lora=LORA))
    trained = {
        name: torch.randn(x.shape) for name, x in named_weights.weights(adapted).items() if lora.is_trained(name)
    }
    (tmp_path / "adapter").mkdir()
    lora.export(adapted, trained, Model(base, head=head, lora=LORA), tmp_path / "adapter")
    model = Model(base, head=head, lora=str(tmp_path / "adapter"), dtype="float64")
    unread, expected = lora.build_lazy(model), lora.build(model)
    assert unread is not None
    own = dict(unread.module.named_parameters())
    assert own.keys() == dict(expected.named_parameters()).keys()
    for name, x in expected.named_parameters():
        mine = own[name]
        assert mine.is_meta == (not lora.is_trained(named_weights.weight_name(name)))
        value = unread.load(named_weights.weight_name(name)).to(x.dtype) if mine.is_meta else mine
        assert torch.equal(value, x), name
        assert (mine.dtype, mine.requires_grad) == (x.dtype, x.requires_grad)
    assert torch.equal(own["score.weight"], trained["score.weight"].double())


HUB = """
import torch
from nrl.backends import Model
from nrl.backends.models import loading, lora, lazy_weights
for head in ("lm", "value"):
    model = Model("someone/tiny", head=head)
    unread, whole = lora.unread(model), lora.build(model)
    assert unread is not None
    for name, expected in whole.named_parameters():
        assert torch.equal(unread.read(name), expected), name
    if head == "lm":
        assert unread.module.generation_config.eos_token_id == whole.generation_config.eos_token_id == [7, 9]
assert lazy_weights.unread(Model("someone/other")) is None
print(loading.files(Model("someone/tiny")), loading.files(Model({"model_type": "qwen3"})))
"""


@pytest.mark.slow
def test_a_name_on_the_hub_is_read_one_weight_at_a_time(tmp_path: Path) -> None:
    """From its folder in the hub's cache, as a folder is."""
    cache = tmp_path / "hub" / "models--someone--tiny"
    snapshot = cache / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text(snapshot.name)
    module: Any = loading.build(Model(TINY))
    module.generation_config.eos_token_id = [7, 9]
    loading.save_model(module, snapshot)
    env = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", HUB], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, [str(snapshot), "None"]), done.stderr


def test_what_only_transformers_can_read(tmp_path: Path) -> None:
    loading.save_model(loading.build(Model(SPLIT)), tmp_path / "split")
    assert lazy_weights.build_lazy(Model(str(tmp_path / "split"))) is None
    assert lazy_weights.build_lazy(Model("a/name-on-the-hub")) is None
    assert lazy_weights.build_lazy(Model(str(tmp_path / "none"))) is None
    wrong = tmp_path / "wrong"
    loading.save_model(loading.build(Model(TINY)), wrong)
    config = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps(config | {"hidden_size": 32, "num_hidden_layers": 1}))
    assert lazy_weights.build_lazy(Model(str(wrong))) is None
    with pytest.raises(ModelError, match="the folder cannot be loaded as a causal language model"):
        loading.build(Model(str(wrong)))
