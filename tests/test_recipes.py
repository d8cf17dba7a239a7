"""The recipes load, and say nothing that a program would ignore."""

from pathlib import Path
from typing import Any

import pytest

from nrl import config, data
from tests.test_examples import load

RECIPES = sorted((Path(__file__).parent.parent / "examples" / "configs").glob("*.yaml"))
MEANT = {
    "dpo_helpsteer3_llama3.2_1b": {"beta": 0.05, "pairs": 128, "adapter": "helpsteer3"},
    "grpo_openmath_llama3.1_8b": {"prompts": 64, "group_size": 32, "warmup": 0, "adapter": "openmathinstruct2"},
    "grpo_openmath_llama3.2_1b": {"prompts": 32, "group_size": 16, "warmup": 0, "adapter": "openmathinstruct2"},
    "sft_squad_llama3.2_1b": {"rows": 32, "chat": False, "adapter": "squad"},
}


def program(recipe: Path) -> Any:
    return load(recipe.stem.split("_")[0])


def test_every_recipe_is_checked() -> None:
    assert [recipe.stem for recipe in RECIPES] == sorted(MEANT)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_loads(recipe: Path) -> None:
    found = config.load(program(recipe).Config, [str(recipe)])
    assert {key: getattr(found, key) for key in MEANT[recipe.stem]} == MEANT[recipe.stem]
    assert found.adapter in data.ADAPTERS
    assert found.model.startswith("meta-llama/")
    assert found.dtype == "bfloat16"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_how_it_is_run(recipe: Path) -> None:
    name = recipe.stem.split("_")[0]
    assert f"#     python examples/{name}.py examples/configs/{recipe.name}\n" in recipe.read_text()
