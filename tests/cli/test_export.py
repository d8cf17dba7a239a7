"""The command `nrl export`: what it writes of a checkpoint is what the trainer itself exports."""

import ctypes
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file

import nrl
from nrl import tiny
from nrl.algos import sft_loss
from nrl.backends import Model, fsdp, hf
from nrl.backends.training.saving.storage import iter_weights
from nrl.cli.cli import main
from nrl.cli.export import Export
from nrl.cli.export import main as export
from nrl.errors import CheckpointError
from nrl.run import checkpoint
from tests.backends.fsdp.test_torch_engine import QWEN3, batch_of
from tests.backends.models.test_lora import LORA
from tests.children import child

CHAT = ["user assistant Hi more", tiny.CHATML]


def saved(root: Path, model: Model, *, steps: tuple[int, ...] = (1, 2)) -> Any:
    """Checkpoints of a run that trains this model, and what its trainer exports after the last."""
    with nrl.cluster("local") as cluster:
        trainer = fsdp.trainer(cluster.reserve(1), model, nrl.adamw(lr=1e-2))
        state, step = trainer.init(), trainer.train_step(sft_loss)
        for at in steps:
            state, _ = step(state, batch_of([5, 9, 3]))
            meta = {"metrics": {"eval/reward": float(at == steps[0])}}
            checkpoint.save(root / "checkpoints" / "train" / f"{at:06}", at - 1, {"policy": state, "at": at}, meta)
        trainer.export(state.params, root / "own")


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_it_is_what_the_trainer_exports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Byte by byte, with config and tokenizer; and transformers, a sampler and nrl serve's loader take it."""
    saved(tmp_path, tiny.model(tokenizer=tiny.bpe(CHAT)))
    assert main(["export", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "model")
    own, found = files(tmp_path / "own"), files(tmp_path / "model")
    assert own.keys() == found.keys()
    assert {name for name in own if own[name] != found[name]} == set()
    assert "chat_template" in "".join(found)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert isinstance(model.generate(torch.tensor([[5]]), max_new_tokens=2), torch.Tensor)
    with nrl.cluster("local") as cluster:
        hf.sampler(cluster.reserve(1), Model(str(tmp_path / "model"))).generate([[5]]).result()


def test_which_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path, tiny.model())
    kept = {"checkpoints": {"best": "eval/reward", "mode": "max"}}

    def of(**how: Any) -> dict[str, torch.Tensor]:
        return load_file(export(Export(str(tmp_path), str(tmp_path / "to"), **how)) / "model.safetensors")

    def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(x, b[name]) for name, x in a.items())

    first, last = of(checkpoint="1"), of(checkpoint="000002")
    assert not same(first, last)
    assert same(of(checkpoint="newest"), last)
    assert same(of(), last)  # the run has no word for what is best
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(kept))
    assert same(of(), first)
    folder = tmp_path / "checkpoints" / "train" / "000001"
    assert same(load_file(export(Export(str(folder))) / "model.safetensors"), first)
    assert (tmp_path / "model").is_dir()
    half = of(dtype="bfloat16")
    assert {x.dtype for x in half.values()} == {torch.bfloat16}
    assert same(half, {name: x.bfloat16() for name, x in first.items()})


def test_a_reward_model_keeps_its_head(tmp_path: Path) -> None:
    with nrl.cluster("local") as cluster:
        trainer = fsdp.trainer(cluster.reserve(1), tiny.model(head="reward"), nrl.adamw(lr=1e-2))
        params = trainer.init().params
        checkpoint.save(tmp_path / "checkpoints" / "train" / "000001", 0, {"reward": params})
        trainer.export(params, tmp_path / "own")
    export(Export(str(tmp_path), value="reward"))
    assert files(tmp_path / "own") == files(tmp_path / "model")


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no checkpoints, which a run has in checkpoints/train"):
        export(Export(str(tmp_path)))
    saved(tmp_path, Model(QWEN3, lora=LORA), steps=(1,))
    with pytest.raises(CheckpointError, match=r"has no checkpoint '7'; it has 000001"):
        export(Export(str(tmp_path), checkpoint="7"))
    with pytest.raises(CheckpointError, match=r"has no weights of the name 'critic'; it has policy: give value="):
        export(Export(str(tmp_path), value="critic"))
    with pytest.raises(CheckpointError, match=r"has an adapter alone; export in the program: trainer.export\(trainer"):
        export(Export(str(tmp_path)))


def test_where_a_model_cannot_be_described_its_weights_are_saved_nevertheless(tmp_path: Path) -> None:
    tiny.save(tiny.model(), tmp_path / "source")
    with nrl.cluster("local") as cluster:
        trainer = fsdp.trainer(cluster.reserve(1), Model(str(tmp_path / "source")), nrl.adamw(lr=1e-2))
        state = trainer.init()
        (tmp_path / "source").rename(tmp_path / "elsewhere")
        with pytest.warns(
            UserWarning, match=r"save: fsdp.trainer \d+: the config and the tokenizer .* cannot be written"
        ):
            made = checkpoint.save(tmp_path / "checkpoints" / "train" / "000001", 0, {"policy": state})
        checkpoint.verify(made.folder)
    with pytest.raises(CheckpointError, match="has the weights of a model that only its program knows; export in the"):
        export(Export(str(tmp_path)))


def test_a_file_that_is_missing_is_noticed(tmp_path: Path) -> None:
    saved(tmp_path, tiny.model(), steps=(1,))
    (next(tmp_path.glob("checkpoints/train/000001/policy/*.safetensors"))).unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        export(Export(str(tmp_path)))


def test_without_a_tokenizer_there_is_none(tmp_path: Path) -> None:
    saved(tmp_path, Model(QWEN3), steps=(1,))
    assert not list(export(Export(str(tmp_path))).glob("tokenizer*"))


def peaks_of_exports(run: str, out: str) -> None:
    """Write the bytes that an export takes at most, and one that holds all weights; those of mapped files left out."""
    export(Export(run, to=f"{out}/first", dtype="bfloat16"))  # what is imported stays
    found = [peak(lambda: export(Export(run, to=f"{out}/second", dtype="bfloat16")))]
    found.append(
        peak(lambda: {name: x.clone() for name, x in iter_weights(Path(run, "checkpoints/train/000001/policy"))})
    )
    Path(out, "peaks").write_text(json.dumps(found))


def peak(work: Callable[[], object]) -> int:
    over, most = threading.Event(), list[int]()
    ctypes.CDLL(None).malloc_trim(0)  # else what was free before is used again, and is not seen

    def watch() -> None:
        while not over.is_set():
            most.append(anonymous())
            time.sleep(0.0005)

    before, thread = anonymous(), threading.Thread(target=watch)
    thread.start()
    held = work()
    most.append(anonymous())
    over.set()
    thread.join()
    del held
    return max(most) - before


def anonymous() -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in text.splitlines() if line.startswith("RssAnon:")).split()[1])


def test_one_weight_is_held_at_a_time(tmp_path: Path) -> None:
    size = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 8000}
    with nrl.cluster("local") as cluster:
        trainer = fsdp.trainer(cluster.reserve(1), tiny.model(**size), nrl.adamw(lr=1e-2))
        params = trainer.load()
        checkpoint.save(tmp_path / "checkpoints" / "train" / "000001", 0, {"policy": params})
        bytes_of = [x.nbytes for _, x in params.tensors()]
    assert sum(bytes_of) > 10 * max(bytes_of)
    assert child(peaks_of_exports, str(tmp_path), str(tmp_path)) == 0
    streamed, held = json.loads((tmp_path / "peaks").read_text())
    assert held > 0.9 * sum(bytes_of)
    assert streamed < 2 * max(bytes_of)
