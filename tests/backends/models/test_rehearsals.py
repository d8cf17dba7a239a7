"""What would fail at the export, after the last step, shows before the first."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import transformers

import nrl
from nrl import data, tiny
from nrl.algos import sft_loss
from nrl.backends import Model, fsdp, load_tokenizer
from nrl.backends.models.model_files import description
from nrl.cli.export import Export
from nrl.cli.export import main as export
from nrl.errors import ModelError
from nrl.run import checkpoint
from tests.code_models import model_with_code

CONTRADICTORY: list[dict[str, Any]] = [
    {"do_sample": False, "temperature": 0.6},
    {"do_sample": False, "top_p": 0.9, "top_k": 20},
    {"temperature": 0.6, "eos_token_id": [2, 3]},
    {"num_beams": 1, "early_stopping": True, "length_penalty": 2.0},
    {"num_return_sequences": 4},
    {"do_sample": True, "temperature": 0.6, "a key of tomorrow": {"x": [1]}},
]


def folder(root: Path, **overrides: Any) -> Path:
    tiny.save(tiny.model(hidden_size=32, num_hidden_layers=1, intermediate_size=32), root / "source")
    for name, values in overrides.items():
        (root / "source" / f"{name}.json").write_text(json.dumps(values, indent=1))
    return root / "source"


def described(model: Model) -> Mapping[str, bytes]:
    files = description(model)
    assert isinstance(files, dict)
    return files


@pytest.mark.parametrize("generation", CONTRADICTORY, ids=lambda generation: ",".join(generation))
def test_a_generation_config_is_kept_byte_for_byte(generation: dict[str, Any], tmp_path: Path) -> None:
    source = folder(tmp_path, generation_config=generation)
    found = described(Model(str(source)))
    assert found["generation_config.json"] == (source / "generation_config.json").read_bytes()
    assert "generation_config.json" not in described(Model(str(source), head="reward"))


def test_generation_keys_of_a_config_become_the_generation_config(tmp_path: Path) -> None:
    source = folder(tmp_path)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"temperature": 0.6, "do_sample": False}))
    (source / "generation_config.json").unlink()
    found = described(Model(str(source)))
    assert "temperature" not in json.loads(found["config.json"])
    assert json.loads(found["generation_config.json"])["temperature"] == 0.6


def trained(root: Path, model: Model) -> None:
    """Take a step, save a checkpoint and export."""
    with nrl.cluster("local") as cluster:
        trainer = fsdp.trainer(cluster.reserve(1), model, nrl.adamw(lr=1e-2))
        step = trainer.train_step(sft_loss)
        batch = data.supervised([{"prompt": "1+1=", "response": "2"}], load_tokenizer(model))
        state, _ = step(trainer.init(), batch)
        checkpoint.save(root / "checkpoints" / "train" / "000001", 0, {"policy": state})
        trainer.export(state.params, root / "own")


def test_a_run_and_its_checkpoint_export_a_contradictory_generation_config(tmp_path: Path) -> None:
    source = folder(tmp_path, generation_config=CONTRADICTORY[0])
    trained(tmp_path, Model(str(source)))
    export(Export(str(tmp_path)))
    for written in (tmp_path / "own", tmp_path / "model"):
        assert (written / "generation_config.json").read_bytes() == (source / "generation_config.json").read_bytes()
        transformers.AutoModelForCausalLM.from_pretrained(written)


def test_a_model_without_a_tokenizer_is_exported_without_one(tmp_path: Path) -> None:
    source = folder(tmp_path, generation_config=CONTRADICTORY[0])
    for file in source.glob("tokenizer*"):
        file.unlink()
    with nrl.cluster("local") as cluster:
        trainer = fsdp.trainer(cluster.reserve(1), Model(str(source)), nrl.adamw(lr=1e-2))
        trainer.check_export()
        trainer.export(trainer.load(), tmp_path / "own")
    assert not list((tmp_path / "own").glob("tokenizer*"))
    assert (tmp_path / "own" / "generation_config.json").read_text() == json.dumps(CONTRADICTORY[0], indent=1)


def test_a_checkpoint_carries_the_code_of_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = model_with_code(tmp_path, monkeypatch)
    trained(tmp_path, Model(str(source), trust_remote_code=True))
    for file in source.iterdir():
        file.unlink()
    with pytest.raises(ModelError, match="trust_remote_code=true"):
        export(Export(str(tmp_path)))
    export(Export(str(tmp_path), trust_remote_code=True))
    for written in (tmp_path / "own", tmp_path / "model"):
        assert {"mine.py", "mine_too.py"} <= {path.name for path in written.iterdir()}
        model = Model(str(written), trust_remote_code=True)
        assert type(load_tokenizer(model)).__name__ == "MineTokenizer"
        loaded = transformers.AutoModelForCausalLM.from_pretrained(written, trust_remote_code=True)
        assert type(loaded).__name__ == "MineForCausalLM"


@attrs.frozen
class Config:
    out: str
    steps: int = 1


def test_what_cannot_be_written_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.init_kwargs["note"] = object()  # which JSON does not know
    tiny.save(tiny.model(), tmp_path / "source")
    with nrl.cluster("local") as cluster:
        slots = cluster.reserve(1)
        of_folder = fsdp.trainer(slots, Model(str(tmp_path / "source"), tokenizer=tokenizer), nrl.adamw(lr=1e-2))
        with pytest.raises(ModelError, match="export: the model .* its files cannot be written, .*TypeError"):
            of_folder.train_step(sft_loss)
        of_config = fsdp.trainer(slots, tiny.model(tokenizer=tokenizer), nrl.adamw(lr=1e-2))
        with nrl.run(Config(str(tmp_path / "run"))) as run, pytest.raises(ModelError, match="mend its config and its"):
            run.restore(policy=of_config)


def test_a_rehearsal_writes_no_weights_and_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    source = folder(tmp_path, generation_config=CONTRADICTORY[0])
    with nrl.cluster("local") as cluster:
        trainer = fsdp.trainer(cluster.reserve(1), Model(str(source)), nrl.adamw(lr=1e-2))
        trainer.check_export()
        assert not [name for name in trainer._description if name.endswith(".safetensors")]
        assert sorted(tmp_path.iterdir()) == [source]
