"""`nrl plan` on published configs of mixtures of experts, whose names of fields are not those of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest

from nrl.backends.models.loading import load_config
from nrl.backends.types import Model
from nrl.cli.cli import main
from nrl.errors import ModelError
from nrl.ops.plan.shapes import FAMILIES, read_shape
from tests.ops.plan.published import PUBLISHED

# As their model cards say: 235B with 22B used, 30.5B with 3.3B used, 46.7B with 12.9B used (with embedding and head)
BILLIONS = {
    "Qwen/Qwen3-235B-A22B": (235.1, 22.2),
    "Qwen/Qwen3-30B-A3B": (30.5, 3.3),
    "mistralai/Mixtral-8x7B-v0.1": (46.7, 12.9),
}
KNOWN = [name for name, config in PUBLISHED.items() if config["model_type"] in FAMILIES]


def test_families_are_those_whose_size_is_known() -> None:
    assert list(BILLIONS) == KNOWN


@pytest.mark.parametrize("name", KNOWN)
def test_its_size_is_the_published_one(name: str) -> None:
    total, used = BILLIONS[name]
    found = read_shape(PUBLISHED[name])
    assert found.parameters / 1e9 == pytest.approx(total, abs=0.06)
    assert (found.active_weights + found.outside) / 1e9 == pytest.approx(used, abs=0.06)


@pytest.mark.parametrize("name", KNOWN)
def test_the_fields_of_transformers_are_read_alike(name: str) -> None:
    config: dict[str, Any] = load_config(Model(PUBLISHED[name]))[0].to_dict()
    assert read_shape(config) == read_shape(PUBLISHED[name])


@pytest.mark.parametrize("name", KNOWN)
def test_the_command_plans_it(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    assert main(["plan", str(tmp_path), "driven=false", "dp=64"]) == 0
    assert "parameters of a model" in capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name not in KNOWN])
def test_another_type_is_refused_by_name(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    assert main(["plan", str(tmp_path), "driven=false"]) == 2
    kind = PUBLISHED[name].get("text_config", PUBLISHED[name])["model_type"]
    assert f"found a model of type '{kind}'; closed forms know llama" in capsys.readouterr().err


@pytest.mark.parametrize("field", ["num_experts", "num_experts_per_tok", "moe_intermediate_size"])
def test_a_missing_field_is_named(field: str) -> None:
    config = {key: value for key, value in PUBLISHED["Qwen/Qwen3-30B-A3B"].items() if key != field}
    with pytest.raises(ModelError, match=f"the config of this qwen3_moe model has no {field}"):
        read_shape(config)
