"""Building models and tokenizers, and naming what is wrong where that fails."""

import json
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from nrl import tiny
from nrl.backends import Model
from nrl.backends.models import loading, named_weights
from nrl.backends.models.positions import context_length
from nrl.backends.models.shards import fill, full_shards
from nrl.errors import ModelError
from tests.code_models import model_with_code
from tests.properties.strategies import TINY
from tests.weights import bucket_of

GPT2 = {"model_type": "gpt2", "vocab_size": 23, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}


def build(config: Mapping[str, Any] = TINY, **fields: Any) -> Any:
    return loading.build(Model(config, **fields))


def weights(module: nn.Module) -> dict[str, Tensor]:
    return dict(named_weights.named_tensors(module))


def saved(folder: Path, config: dict[str, Any] = TINY, seed: int = 0) -> Any:
    module = build(config, seed=seed)
    module.save_pretrained(folder)
    return module


# models


def test_a_config_makes_a_causal_language_model() -> None:
    module = build()
    assert type(module).__name__ == "Qwen3ForCausalLM"
    assert module.config.hidden_size == 16
    assert {x.dtype for x in weights(module).values()} == {torch.float32}


def test_the_config_is_left_as_it_is() -> None:
    config = dict(TINY)
    loading.build(Model(config))
    assert config == TINY


def test_the_same_seed_gives_the_same_weights() -> None:
    a, b, c = (weights(loading.build(Model(TINY, seed=seed))) for seed in (3, 3, 4))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["model.embed_tokens.weight"], c["model.embed_tokens.weight"])


def test_the_seed_does_not_touch_the_global_generator_and_does_not_read_it() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    a = weights(loading.build(Model(TINY, seed=3)))
    assert torch.equal(torch.rand(3), expected)
    b = weights(loading.build(Model(TINY, seed=3)))
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_the_weights_do_not_depend_on_the_dtype(dtype: Any) -> None:
    wanted = getattr(torch, dtype)
    expected = weights(loading.build(Model(TINY, seed=3)))
    for made in (loading.build(Model(TINY, seed=3, dtype=dtype)), loading.build(Model(TINY, seed=3), dtype=wanted)):
        found = weights(made)
        assert {x.dtype for x in found.values()} == {wanted}
        assert all(torch.equal(found[name], expected[name].to(wanted)) for name in expected)


def test_positions_stay_exact_in_every_dtype() -> None:
    """Rotary frequencies in bfloat16 would move every token."""
    expected = {name: x for name, x in loading.build(Model(TINY)).named_buffers() if "inv_freq" in name}
    assert expected
    for dtype in ("bfloat16", "float64"):
        found = dict(build(dtype=dtype).named_buffers())
        for name, x in expected.items():
            assert found[name].dtype == torch.float32
            assert torch.equal(found[name], x)


def test_dropout_is_off() -> None:
    config = GPT2 | {"embd_pdrop": 0.5, "attn_pdrop": 0.5, "resid_pdrop": 0.5}
    for source in (config, {**TINY, "attention_dropout": 0.5}):
        module = loading.build(Model(source))
        module.train()
        ids = torch.arange(8)[None]
        assert torch.equal(module(input_ids=ids).logits, module(input_ids=ids).logits)


def test_a_folder(tmp_path: Path) -> None:
    expected = weights(saved(tmp_path, seed=7))
    found = weights(loading.build(Model(str(tmp_path))))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_loading_leaves_no_bars_and_says_what_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers.utils import logging

    saved(tmp_path)
    logging.enable_progress_bar()
    capfd.readouterr()
    loading.build(Model(str(tmp_path)))
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr("nrl.log.slow_wait.SILENCE", 0.0)
    counted = loading._report_progress

    def slowly(items: Any, far: Callable[[int, int], None]) -> Iterator[Any]:
        for item in counted(items, far):
            time.sleep(0.02)  # in which a line is written
            yield item

    monkeypatch.setattr(loading, "_report_progress", slowly)
    loading.build(Model(str(tmp_path)))
    said = capfd.readouterr()
    assert said.out == ""
    line = rf"loading the weights of {re.escape(str(tmp_path))}(, \d+ of \d+)?, 0:0\d so far\n"
    assert re.fullmatch(f"({line})+", said.err)
    assert re.search(r", \d+ of \d+, 0:0\d so far$", said.err, re.MULTILINE)
    assert logging.is_progress_bar_enabled()


def test_a_path_object_is_a_folder_too(tmp_path: Path) -> None:
    expected = weights(saved(tmp_path, seed=7))
    source: Any = tmp_path
    assert all(torch.equal(x, expected[name]) for name, x in named_weights.named_tensors(loading.build(Model(source))))


def test_a_folder_in_bfloat16(tmp_path: Path) -> None:
    expected = weights(saved(tmp_path, seed=7))
    found = weights(loading.build(Model(str(tmp_path), dtype="bfloat16")))
    assert all(torch.equal(found[name], expected[name].bfloat16()) for name in expected)


# what cannot be built


def test_no_such_folder(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    with pytest.raises(ModelError, match=f"{missing}.*there is no such folder on host .*; give a folder with config"):
        loading.build(Model(missing))


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"{tmp_path}.*cannot be loaded"):
        loading.build(Model(str(tmp_path)))


def test_a_folder_without_weights(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=f"{tmp_path}.*cannot be loaded.*model.safetensors"):
        loading.build(Model(str(tmp_path)))


def test_a_folder_with_broken_weights(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(ModelError, match=f"{tmp_path}.*cannot be loaded"):
        loading.build(Model(str(tmp_path)))


def test_a_folder_with_a_weight_missing(tmp_path: Path) -> None:
    """transformers would fill it in at random, with no more than a warning."""
    from safetensors.torch import load_file, save_file

    saved(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="model.layers.1.mlp.up_proj.weight"):
        loading.build(Model(str(tmp_path)))


def test_a_name_that_the_hub_does_not_give() -> None:
    with pytest.raises(ModelError, match="'nobody/nothing'.*neither a folder here nor a .*hub"):
        loading.build(Model("nobody/nothing"))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How often a hub was asked that hangs up on everybody."""
    from huggingface_hub import constants

    found = [0]
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            while True:
                try:
                    asking, _ = server.accept()
                except OSError:  # the test is over
                    return
                found[0] += 1
                asking.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield found
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


READERS: list[Callable[[Model], object]] = [loading.build, loading.load_config, loading.load_tokenizer]


@pytest.mark.parametrize("read", READERS)
def test_a_hub_that_cannot_be_reached_is_asked_once(read: Callable[[Model], object], asked: list[int]) -> None:
    """transformers by itself asks six times for each file, for half a minute."""
    message = (
        "neither a folder here nor a .* hub gives: it cannot be reached .*fetched before; give a folder that is there"
    )
    with pytest.raises(ModelError, match=message):
        read(Model("nobody/nothing"))
    assert asked == [1]


@pytest.mark.parametrize("read", READERS)
def test_what_was_fetched_before_needs_no_hub(
    read: Callable[[Model], object], asked: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    kept = tmp_path / "models--some--tiny"
    tiny.save(tiny.model(num_hidden_layers=1), tmp_path / "saved")
    shutil.move(tmp_path / "saved", kept / "snapshots" / ("0" * 40))
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0" * 40)
    read(Model("some/tiny"))
    assert asked == [1]


def test_a_config_without_a_model_type() -> None:
    with pytest.raises(ValueError, match=r"Model: a config needs 'model_type' .*found the keys \['vocab_size'\]"):
        Model({"vocab_size": 3})


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "no_such_thing"},
        {"model_type": "vit"},  # no language model
        TINY | {"hidden_size": "many"},
    ],
)
def test_a_config_that_makes_no_language_model(config: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=rf"Model\(source=a {config['model_type']} config\): the config does not make"):
        loading.build(Model(config))


@pytest.mark.parametrize("fields", [{"head": "nonsense"}, {"dtype": "int8"}])
def test_fields_that_cannot_be(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        Model(TINY, **fields)


# tokenizers


def test_a_model_from_a_config_has_no_tokenizer() -> None:
    with pytest.raises(ModelError, match=r"no tokenizer of its own; give one with Model\(config, tokenizer=\.\.\.\)"):
        loading.load_tokenizer(Model(TINY))


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(ModelError, match=f"the tokenizer of '{tmp_path}': .* it has no tokenizer files"):
        loading.load_tokenizer(Model(str(tmp_path)))


def test_tokenizers(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    assert loading.load_tokenizer(Model(TINY, tokenizer=tokenizer)) is tokenizer
    tokenizer.save_pretrained(tmp_path)
    for model in (Model(TINY, tokenizer=str(tmp_path)), Model(TINY, tokenizer=tmp_path), Model(str(tmp_path))):
        assert loading.load_tokenizer(model).encode("12+3") == tokenizer.encode("12+3")


# what a model says of itself


def test_context_length() -> None:
    assert context_length(loading.build(Model(TINY))) == 64
    assert context_length(loading.build(Model(GPT2))) == 32  # under a name of its own
    bloom = {"model_type": "bloom", "vocab_size": 23, "hidden_size": 16, "n_layer": 1, "n_head": 2}
    with pytest.raises(ModelError, match="BloomForCausalLM: the config has no max_position_embeddings"):
        context_length(build(bloom))


def test_end_tokens() -> None:
    tokenizer, generation = tiny.tokenizer(), GenerationConfig()
    assert loading.end_tokens(None, tokenizer) == loading.end_tokens(generation, tokenizer) == (tokenizer.eos_token_id,)
    generation.eos_token_id = [9, 5]
    assert loading.end_tokens(generation, tokenizer) == tuple(sorted({tokenizer.eos_token_id, 5, 9}))
    generation.eos_token_id = 9
    assert loading.end_tokens(generation, tokenizer) == tuple(sorted({tokenizer.eos_token_id, 9}))


def test_head_weight() -> None:
    module = build()
    weight, bias = named_weights.head_weight(module)
    assert weight is module.model.embed_tokens.weight
    assert bias is None


# weights, out and in


def load(module: nn.Module, tensors: Mapping[str, Tensor], who: str = "receive") -> None:
    fill(full_shards(named_weights.weights(module)), bucket_of(tensors), caller=who)


@pytest.mark.parametrize("tied", [True, False])
def test_named_tensors_are_what_a_folder_holds(tied: bool, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    module = saved(tmp_path, TINY | {"tie_word_embeddings": tied})
    found = weights(module)
    assert ("lm_head.weight" in found) != tied
    assert found.keys() == load_file(tmp_path / "model.safetensors").keys()
    assert not any(x.requires_grad for x in found.values())


@pytest.mark.parametrize("tied", [True, False])
def test_filling_is_the_inverse(tied: bool) -> None:
    config = TINY | {"tie_word_embeddings": tied}
    a, b = build(config, seed=1), build(config, seed=2)
    load(b, weights(a), "test")
    ids = torch.arange(8)[None]
    assert torch.equal(a(input_ids=ids).logits, b(input_ids=ids).logits)
    with torch.no_grad():
        a.model.embed_tokens.weight.zero_()  # a copy, which does not follow
    assert b.model.embed_tokens.weight.any()
    assert (b.lm_head.weight is b.model.embed_tokens.weight) == tied


def test_filling_from_another_dtype() -> None:
    a, b = loading.build(Model(TINY, seed=1, dtype="float64")), loading.build(Model(TINY, seed=2))
    load(b, weights(a), "test")
    assert {x.dtype for x in weights(b).values()} == {torch.float32}
    assert torch.equal(weights(b)["model.norm.weight"], weights(a)["model.norm.weight"].float())


def test_filling_says_what_does_not_fit() -> None:
    module = loading.build(Model(TINY))
    tensors = weights(module)
    with pytest.raises(ModelError, match="receive: the model has no weight 'extra'"):
        load(module, {"extra": torch.zeros(1)})
    with pytest.raises(ModelError, match=r"receive: 'model.norm.weight' has shape \[3\], and here it is \[16\]"):
        load(module, {"model.norm.weight": torch.zeros(3)})
    some = {name: x for name, x in tensors.items() if name != "model.norm.weight"}
    with pytest.raises(ModelError, match="receive: 1 weights did not arrive: model.norm.weight"):
        load(module, some)


def test_a_saved_config_is_plain(tmp_path: Path) -> None:
    saved(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "qwen3"
    assert config["architectures"] == ["Qwen3ForCausalLM"]


# code of its own


@pytest.fixture
def with_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return model_with_code(tmp_path, monkeypatch)


def test_code_that_comes_with_a_model_does_not_run_and_nobody_is_asked(
    with_code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def answer(text: str) -> str:
        asked.append(text)
        return "y"

    monkeypatch.setattr("builtins.input", answer)
    for load in (loading.build, loading.load_config, loading.load_tokenizer):
        with pytest.raises(ModelError, match=r"Python code of its own.*Model\(..., trust_remote_code=True\)"):
            load(Model(str(with_code)))
    assert not asked
    assert not (with_code.parent / "ran").exists()


def test_code_that_comes_with_a_model_runs_where_that_was_asked_for(with_code: Path) -> None:
    model = Model(str(with_code), trust_remote_code=True)
    module: Any = loading.build(model)
    assert type(module).__name__ == "MineForCausalLM"
    assert loading.load_config(model)[0].model_type == "mine"
    assert type(loading.load_tokenizer(model)).__name__ == "MineTokenizer"
    assert (with_code.parent / "ran").exists()
    loading.save_model(module, with_code.parent / "again")
    again = loading.build(attrs.evolve(model, source=str(with_code.parent / "again")))
    assert all(torch.equal(value, weights(again)[name]) for name, value in weights(module).items())
