"""The recipes load, say nothing that a program ignores, and run: two steps each, on tiny models of their family."""

import re
from pathlib import Path
from typing import Any

import attrs
import datasets
import pytest
import torch

import nrl.algos
from nrl import config, data
from nrl.backends import Model
from nrl.backends.models.loading import build, save_model
from tests.chat_tokenizers import tokenizer
from tests.jsonlines import lines
from tests.test_examples import load

RECIPES = sorted((Path(__file__).parent.parent / "examples" / "configs").glob("*.yaml"))
SAMPLES = Path(__file__).parent / "data"
OPENMATH = {"env": "math", "format": "openmathinstruct2", "warmup": 0, "aggregate": "token_mean", "evaluate_every": 10}
MEANT: dict[str, dict[str, Any]] = {
    "dpo_helpsteer3_llama3.2_1b": {"beta": 0.05, "pairs": 128, "format": "helpsteer3"},
    "grpo_gsm8k_qwen3_0.6b": {"env": "math", "format": "gsm8k", "warmup": 0, "prompts": 32, "group_size": 8},
    "grpo_openmath_llama3.1_8b": OPENMATH
    | {"prompts": 64, "group_size": 32, "updates": 4}
    | {"cluster": "auto", "dp": 8, "samplers": 0, "sampler": "vllm", "checkpointing": True},
    "grpo_openmath_llama3.2_1b": OPENMATH | {"prompts": 32, "group_size": 16, "updates": 1},
    "sft_squad_llama3.2_1b": {"rows": 32, "chat": False, "format": "squad"},
}
TEMPLATES = {
    "Llama-3.1-8B-Instruct": "llama3_1",
    "Llama-3.2-1B-Instruct": "llama3_2",
    "Llama-3.2-1B": None,
    "Qwen3-0.6B": "qwen3",
}
"""Of the models that the recipes are for; a base model has none."""
HUB = {
    ("openai/gsm8k", "main"): ("gsm8k", ["train", "test"]),
    ("nvidia/HelpSteer3", "preference"): ("helpsteer3", ["train", "validation"]),
    ("nvidia/OpenMathInstruct-2",): ("openmathinstruct2", ["train_1M"]),
    ("rajpurkar/squad",): ("squad", ["train", "validation"]),
}
"""Name and configuration of the data sets on the hub, our rows in their format, and their splits."""
HERE = {"grpo_openmath_llama3.1_8b": {"cluster": "local", "sampler": "hf", "engine": {}}}
"""What is otherwise in this test, which has no GPUs."""


def program(recipe: Path) -> Any:
    return load(recipe.stem.split("_")[0])


def test_every_recipe_is_checked() -> None:
    assert [recipe.stem for recipe in RECIPES] == sorted(MEANT)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_loads(recipe: Path) -> None:
    found = config.load(program(recipe).Config, [str(recipe)])
    assert {key: getattr(found, key) for key in MEANT[recipe.stem]} == MEANT[recipe.stem]
    assert found.format in data.FORMATS
    assert Path(found.model).name in TEMPLATES
    assert found.dtype == "bfloat16"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_how_it_is_run(recipe: Path) -> None:
    name = recipe.stem.split("_")[0]
    assert f"#     python examples/{name}.py examples/configs/{recipe.name}\n" in recipe.read_text()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that has a few rows of each data set, a hundred times; splits are cut by `datasets` itself."""
    read = datasets.load_dataset

    def load_dataset(*name: str, split: str) -> Any:
        sample, splits = HUB[name]
        path = tmp_path / f"{sample}.jsonl"
        path.write_text((SAMPLES / f"{sample}_sample.jsonl").read_text() * 100)
        files = dict.fromkeys(splits, str(path))
        return read("json", data_files=files, split=split, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)


def tiny_llama(name: str, folder: Path) -> Path:
    """With the chat template of the real model. It mostly writes one digit, so that rewards differ within a group."""
    of = tokenizer(TEMPLATES[name] or "llama3")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    spec = Model({"model_type": "llama", "vocab_size": len(of), "max_position_embeddings": 1024} | sizes)
    module: Any = build(spec)
    with torch.no_grad():
        module.model.embed_tokens.weight[:, 0] = 1.0
        module.lm_head.weight[of.convert_tokens_to_ids(list("0123456789")), 0] = 1.5
    save_model(module, folder)
    of.save_pretrained(folder)
    if TEMPLATES[name] is None:
        (folder / "chat_template.jinja").unlink()
    return folder


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    "recipe",
    [pytest.param(path, marks=[pytest.mark.slow] * (path.stem == "grpo_openmath_llama3.1_8b")) for path in RECIPES],
    ids=[path.stem for path in RECIPES],
)
def test_a_recipe_runs(recipe: Path, tmp_path: Path) -> None:
    """As it stands, but for two steps, the tiny model, and answers of one token, which that writes."""
    example, out = program(recipe), tmp_path / "run"
    name = Path(config.load(example.Config, [str(recipe)]).model).name
    settings = [str(recipe), f"model={tiny_llama(name, tmp_path / 'model')}", f"out={out}", "steps=2"]
    grpo = recipe.stem.startswith("grpo")
    patient = ["env={math: {timeout: 60}}"]  # a comparison takes longer than a second where a machine is busy
    cfg = config.load(example.Config, settings + ["sampling.max_new_tokens=1", *patient] * grpo)
    example.main(attrs.evolve(cfg, **HERE.get(recipe.stem, {})))
    found = lines(out / "metrics.jsonl")
    assert len(found) == 2
    assert all(line["grad_norm"] > 0 for line in found)
    assert "eval/reward" in found[-1] if grpo else "eval/loss" in found[-1]
    assert not grpo or all(line["invalid"] == 0 and 0 < line["reward"] < 1 for line in found)
    assert (out / "model" / "config.json").exists()


def test_the_settings_that_the_page_for_users_of_nemo_rl_names_are_there() -> None:
    page = (Path(__file__).parent.parent / "docs" / "nemo_rl.md").read_text()
    ours = [line.split(" | ")[1] for line in page.splitlines() if line.startswith("| `")]
    named = {key for cell in ours for key in re.findall(r"`(\w+)(?:\.[\w.]+)?=[^`(]*`", cell)}
    assert len(named) > 15
    assert named <= {field.name for field in attrs.fields(load("grpo").Config)}
    called = {name for cell in ours for name in re.findall(r"(\w+)\(", cell)} | {"gspo_loss"}
    assert {"mask_truncated", "kl", "truncate"} <= called
    assert all(hasattr(nrl.algos, name) for name in called)
