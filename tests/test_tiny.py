from pathlib import Path
from typing import Any

import pytest
import torch

from nrl import tiny
from nrl.backends.models.loading import build, load_tokenizer
from nrl.backends.types import Model
from nrl.envs.tools import parse
from nrl.errors import DataError, ModelError

TEXTS = ["7+12=19\n", "", " ", "  two  spaces , and it 's . odd !", tiny.ALPHABET, tiny.ALPHABET[::-1]]


@pytest.mark.parametrize("text", TEXTS)
def test_characters_decode_to_what_was_encoded(text: str) -> None:
    made = tiny.tokenizer()
    ids = made.encode(text)
    assert len(ids) == len(text)
    assert made.decode(ids) == text
    assert "".join(made.decode([token]) for token in ids) == text


def test_the_characters_special_tokens() -> None:
    made = tiny.tokenizer()
    assert [made.pad_token_id, made.bos_token_id, made.eos_token_id, made.unk_token_id] == [0, 1, 2, 3]
    assert len(made) == len(tiny.ALPHABET) + 4 == 100
    assert made.chat_template is None
    assert made.encode("é") == [3]
    assert made.decode([*made.encode("19"), 2], skip_special_tokens=True) == "19"


def test_bpe_learns_merges_and_gives_any_text_back() -> None:
    made = tiny.bpe(["the cat sat on the mat with the hat"] * 3, vocab_size=280)
    assert len(made.encode("the cat")) < 7
    for text in [*TEXTS, "Zürich – 東京 🙂\r\n\tx", "a  b"]:
        assert made.decode(made.encode(text)) == text


def test_bpe_renders_chats_with_special_tokens() -> None:
    made = tiny.bpe(["hello there"], vocab_size=270)
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi {{x}}"}]
    expected = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi {{x}}<|im_end|>\n"
    assert made.apply_chat_template(chat, tokenize=False) == expected
    ids = made.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert made.decode(ids) == expected + "<|im_start|>assistant\n"
    assert ids.count(made.eos_token_id) == 2
    assert made.eos_token == "<|im_end|>"
    assert made.pad_token == "<|endoftext|>"
    assert made.decode(ids, skip_special_tokens=True) == "system\nBe kind.\nuser\nHi {{x}}\nassistant\n"


def test_bpe_writes_tools_and_calls_as_hermes_does() -> None:
    made = tiny.bpe(["hello there"], vocab_size=270)
    schema = {"type": "function", "function": {"name": "add"}}
    calls = [{"function": {"name": "add", "arguments": {"a": n, "text": 'é "'}}} for n in (1, 2)]
    chat = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "One moment.", "tool_calls": calls},
        {"role": "assistant", "content": "", "tool_calls": calls[:1]},
        {"role": "tool", "name": "add", "content": "3"},
    ]
    one, two = (
        f'<tool_call>\n{{"name": "add", "arguments": {{"a": {n}, "text": "é \\""}}}}\n</tool_call>' for n in (1, 2)
    )
    expected = (
        '<|im_start|>system\n# Tools\n{"type": "function", "function": {"name": "add"}}\n'
        'Write <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call> to call one.<|im_end|>\n'
        f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nOne moment.\n{one}\n{two}<|im_end|>\n"
        f"<|im_start|>assistant\n{one}<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"
    )
    text = made.apply_chat_template(chat, tools=[schema], tokenize=False, add_generation_prompt=True)
    assert text == expected
    found = parse(text.split("assistant\n")[1].partition("<|im_end|>")[0], "hermes")
    assert (found.text, found.malformed) == ("One moment.", ())
    assert [each.arguments for each in found.calls] == [each["function"]["arguments"] for each in calls]


def test_bpe_has_at_most_the_tokens_that_were_asked_for() -> None:
    assert len(tiny.bpe(["abab abab abab"], vocab_size=259)) == 259
    assert len(tiny.bpe(["ab"], vocab_size=2048)) == 260
    assert tiny.bpe(iter(["abc abd"] * 2), 300).get_vocab() == tiny.bpe(["abc abd"] * 2, 300).get_vocab()


def test_bpe_says_what_it_cannot_use() -> None:
    with pytest.raises(DataError, match=r"tiny.bpe: vocab_size is 200; .* need at least 259"):
        tiny.bpe(["text"], vocab_size=200)
    with pytest.raises(DataError, match=r"tiny.bpe: texts is one string; give several, such as \[text\]"):
        tiny.bpe("text")


def test_the_model_has_the_parameters_that_are_documented() -> None:
    module = build(tiny.model())
    assert sum(parameter.numel() for parameter in module.parameters()) == 406_784
    assert "406,784" in (tiny.model.__doc__ or "")
    assert module.get_output_embeddings().weight is module.get_input_embeddings().weight  # type: ignore[operator]


def test_the_seed_decides_the_weights() -> None:
    def weights(model: Model) -> torch.Tensor:
        return torch.cat([parameter.flatten() for parameter in build(model).parameters()])

    assert torch.equal(weights(tiny.model(seed=4)), weights(tiny.model(seed=4)))
    assert not torch.equal(weights(tiny.model(seed=4)), weights(tiny.model(seed=5)))


def test_overrides_reach_the_config() -> None:
    model = tiny.model(hidden_size=64, num_hidden_layers=1, dtype="float64", max_position_embeddings=32)
    module: Any = build(model)
    assert module.config.hidden_size == 64
    assert module.config.max_position_embeddings == 32
    assert module.dtype == torch.float64
    llama: Any = build(tiny.model(model_type="llama", num_hidden_layers=1))
    assert llama.config.model_type == "llama"


def test_another_tokenizer_brings_its_vocabulary() -> None:
    made = tiny.bpe(["some text"], vocab_size=264)
    model = tiny.model(tokenizer=made)
    module: Any = build(model)
    assert module.config.vocab_size == len(made)
    assert module.config.eos_token_id == made.eos_token_id
    assert load_tokenizer(model) is made


def test_an_override_that_is_no_field() -> None:
    with pytest.raises(ModelError, match="tiny.model: a qwen3 config has no field 'hiden_size'; did you mean 'hidden_"):
        tiny.model(hiden_size=64)
    with pytest.raises(ModelError, match="has no field 'zzzz'; give fields of its transformers config"):
        tiny.model(zzzz=1)


def test_the_model_that_is_named_or_the_tiny_one() -> None:
    asked: dict[str, Any] = {"dtype": "bfloat16", "head": "reward", "trust_remote_code": True}
    assert tiny.model_or("a/name", **asked, num_hidden_layers=4) == Model("a/name", **asked)
    small = tiny.model_or(None, **asked, num_hidden_layers=4)
    assert small.source == tiny.model(num_hidden_layers=4).source
    assert (small.dtype, small.head, small.trust_remote_code) == ("bfloat16", "reward", True)


@pytest.mark.parametrize("chat", [False, True])
def test_a_saved_model_loads_as_a_folder(tmp_path: Path, chat: bool) -> None:
    made = tiny.bpe(["one two three"], vocab_size=270) if chat else tiny.tokenizer()
    model = tiny.model(tokenizer=made, seed=3, num_hidden_layers=1)
    tiny.save(model, tmp_path / "model")
    loaded = Model(str(tmp_path / "model"))

    ids = torch.tensor([made.encode("two three")])
    torch.testing.assert_close(build(loaded)(ids).logits, build(model)(ids).logits, rtol=0, atol=0)
    again = load_tokenizer(loaded)
    assert again.get_vocab() == made.get_vocab()
    assert again.eos_token_id == made.eos_token_id
    assert again.pad_token_id == made.pad_token_id
    assert again.chat_template == made.chat_template
    assert again.decode(again.encode("1 , 2 !\n")) == "1 , 2 !\n"
