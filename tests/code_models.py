"""A model whose architecture and tokenizer are Python files that lie with it."""

import json
import sys
from pathlib import Path

import pytest

from nrl import tiny


def model_with_code(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write such a folder into another one, in which a file ``ran`` appears where its code runs."""
    import transformers.dynamic_module_utils as dynamic

    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)  # of another folder of modules
    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(root / "modules"))
    monkeypatch.syspath_prepend(root / "modules")
    folder = root / "with_code"
    tiny.save(tiny.model(hidden_size=32, num_hidden_layers=1, intermediate_size=32), folder)
    config = json.loads((folder / "config.json").read_text())
    kinds = {"AutoModelForCausalLM": "mine.MineForCausalLM", "AutoConfig": "mine.MineConfig"}
    config |= {"model_type": "mine", "auto_map": kinds}
    (folder / "config.json").write_text(json.dumps(config))
    said = json.loads((folder / "tokenizer_config.json").read_text())
    said |= {"tokenizer_class": "MineTokenizer", "auto_map": {"AutoTokenizer": [None, "mine.MineTokenizer"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    (folder / "mine.py").write_text(
        "from pathlib import Path\n"
        "from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM\n"
        "from .mine_too import KIND\n"
        f"Path({str(root / 'ran')!r}).touch()\n"
        "class MineConfig(Qwen3Config):\n    model_type = KIND\n"
        "class MineForCausalLM(Qwen3ForCausalLM):\n    config_class = MineConfig\n"
        "class MineTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    (folder / "mine_too.py").write_text("KIND = 'mine'\n")
    return folder
