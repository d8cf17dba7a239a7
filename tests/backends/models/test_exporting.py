"""Folders that are written one weight at a time hold what transformers itself would write."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from nrl.backends import Model
from nrl.backends.models import exporting, loading, lora, named_weights
from nrl.backends.models.exporting import export_weights
from nrl.backends.models.named_weights import named_tensors
from nrl.errors import ModelError
from tests.properties.strategies import TINY

LORA = {"r": 2, "target_modules": ["q_proj"]}
EXPERTS = TINY | {"model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
SPLIT = TINY | {"model_type": "hrm_text"}
CONFIGS = {"tied": TINY, "untied": TINY | {"tie_word_embeddings": False}, "experts": EXPERTS, "split": SPLIT}


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: x for path in folder.glob("*.safetensors") for name, x in load_file(path).items()}


def one_at_a_time(module: Any, seen: list[str]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in named_tensors(module):
        seen.append(name)
        yield name, tensor.clone()


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
    assert len(seen) == len(dict(named_tensors(module)))
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
    for kind in ("tied", "untied"):
        for head in heads:
            for adapter in (None, LORA):
                model = Model(str(tmp_path / kind), head=head, lora=adapter, seed=5)
                unread, whole = lora.unread(model), lora.build(model)
                assert unread is not None
                own = dict(unread.module.named_parameters())
                assert own.keys() == dict(whole.named_parameters()).keys()
                for name, expected in whole.named_parameters():
                    mine = own[name]
                    assert mine.is_meta == (".lora_" not in name)
                    value = unread.read(named_weights.weight_name(name)) if mine.is_meta else mine
                    assert torch.equal(value, expected), name
                    assert (mine.shape, mine.requires_grad) == (expected.shape, expected.requires_grad)
                for (name, x), (other, y) in zip(unread.module.named_buffers(), whole.named_buffers(), strict=True):
                    assert (name, x.tolist()) == (other, y.tolist())


def test_what_only_transformers_can_read(tmp_path: Path) -> None:
    for kind in ("experts", "split"):
        loading.save_model(loading.build(Model(CONFIGS[kind])), tmp_path / kind)
        assert loading.unread(Model(str(tmp_path / kind))) is None
    assert loading.unread(Model(TINY)) is None
    assert loading.unread(Model("a/name-on-the-hub")) is None
    assert loading.unread(Model(str(tmp_path / "none"))) is None
    wrong = tmp_path / "wrong"
    loading.save_model(loading.build(Model(TINY)), wrong)
    config = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps(config | {"hidden_size": 32, "num_hidden_layers": 1}))
    assert loading.unread(Model(str(wrong))) is None
    loading.save_model(loading.build(Model(TINY)), tmp_path / "base")  # an adapter's folder may hold a head
    assert lora.unread(Model(str(tmp_path / "base"), head="value", lora=str(tmp_path / "adapter"))) is None
    with pytest.raises(ModelError, match="the folder cannot be loaded as a causal language model"):
        loading.build(Model(str(wrong)))
