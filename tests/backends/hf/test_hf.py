import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from nrl import tiny
from nrl.backends import hf
from nrl.backends.hf.cache import ATTENTION
from nrl.backends.models.loading import build
from nrl.backends.models.named_weights import named_tensors
from nrl.backends.types import Bucket, Completion, Model, Sampling
from nrl.errors import ConfigError, GenerationError, ModelError
from nrl.runtime import cluster
from tests.weights import bucket_of

WORDS = ["<pad>", "<bos>", "<eos>", *"abcdefghijklmnopqrst"]
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10]]


def tokenizer(**options: Any) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", **options
    )


def model(**changes: Any) -> Model:
    return Model({**CONFIG, **changes}, tokenizer=tokenizer())


@pytest.fixture
def slots() -> Iterator[Any]:
    with cluster("local") as here:
        yield here.reserve(2)


def ids(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in completions]


def weights(**changes: Any) -> dict[str, Tensor]:
    return dict(named_tensors(build(model(**changes))))


# --- what it says of itself -------------------------------------------------------------------------------------------


def test_it_is_made_of_slots_or_of_a_mesh_and_knows_itself(slots: Any) -> None:
    for place in (slots, slots.mesh()):
        sampler = hf.sampler(place, model(), Sampling(max_new_tokens=5))
        assert sampler.version == 0
        assert sampler.context_length == 256
        assert sampler.tokenizer.decode([3]) == "a"
        assert sampler.sampling == Sampling(max_new_tokens=5)
    assert hf.sampler(slots, model()).sampling == Sampling()


def test_the_tokenizer_may_shorten_the_context(slots: Any) -> None:
    sampler = hf.sampler(slots, Model(CONFIG, tokenizer=tokenizer(model_max_length=6)))
    assert sampler.context_length == 6
    (row,) = sampler.generate([[3, 4, 5]], seeds=[0], sampling=Sampling(max_new_tokens=50)).result()
    assert len(row.token_ids) <= 3


def test_it_loads_a_folder(slots: Any, tmp_path: Path) -> None:
    build(model()).save_pretrained(tmp_path)  # type: ignore[operator]
    tokenizer().save_pretrained(tmp_path)
    here = hf.sampler(slots, Model(str(tmp_path)), Sampling(max_new_tokens=6))
    assert ids(here.generate(PROMPTS).result()) == ids(
        hf.sampler(slots, model(), here.sampling).generate(PROMPTS).result()
    )


def test_a_model_without_a_tokenizer_is_an_error(slots: Any) -> None:
    with pytest.raises(ModelError, match="tokenizer"):
        hf.sampler(slots, Model(CONFIG))


# --- generating -------------------------------------------------------------------------------------------------------


def test_it_stops_at_the_end_tokens_of_tokenizer_and_generation_config_and_at_those_of_the_call(slots: Any) -> None:
    sampler = hf.sampler(slots, model(eos_token_id=[9, 10]), Sampling(max_new_tokens=200))
    rows = sampler.generate([[3]] * 40).result()
    assert {row.token_ids[-1].item() for row in rows if not row.truncated} == {2, 9, 10}
    assert not any(token in (2, 9, 10) for row in rows for token in row.token_ids[:-1].tolist())
    stops: Any = (11,)
    rows = sampler.generate([[3]] * 40, sampling=Sampling(max_new_tokens=200, stop_token_ids=stops)).result()
    assert {row.token_ids[-1].item() for row in rows if not row.truncated} == {2, 9, 10, 11}


def module_of(sampler: Any) -> Any:
    """The model in the only process that there is."""
    return sampler._replicas[0]._handles.values[0].value.module


def test_its_module_alone_has_the_decoding_attention(slots: Any) -> None:
    sampler = hf.sampler(slots, model())
    assert module_of(sampler).config._attn_implementation == ATTENTION
    other: Any = build(model())
    assert other.config._attn_implementation != ATTENTION


def test_one_stop_is_one_stop() -> None:
    for one, several in (({"stop": "abc"}, {"stop": ["abc"]}), ({"stop_token_ids": 7}, {"stop_token_ids": [7]})):
        assert Sampling(**one) == Sampling(**several)
        assert hash(Sampling(**one)) == hash(Sampling(**several))
    assert Sampling(stop="abc", stop_token_ids=[7, 8]).stop == ("abc",)
    assert Sampling(stop=["a", "b"], stop_token_ids=[7, 8]).stop_token_ids == (7, 8)


def test_truncated_sampling_warns_once(slots: Any) -> None:
    sampler = hf.sampler(slots, model(), Sampling(max_new_tokens=2, top_p=0.9))
    with pytest.warns(UserWarning, match=r"top_k=0, top_p=0.9 .* E\[p/q\] is the kept mass and not 1.*top_p=1"):
        sampler.generate([[3]])
    sampler.generate([[3]])  # warnings are errors here


@pytest.mark.parametrize(
    "sampling", [Sampling(max_new_tokens=2), Sampling(0, 5, 0.5, 2), Sampling(top_k=len(WORDS), max_new_tokens=2)]
)
def test_sampling_that_truncates_nothing_does_not_warn(slots: Any, sampling: Sampling) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf.sampler(slots, model(), sampling).generate([[3]])


# --- receiving weights ------------------------------------------------------------------------------------------------


def test_receiving_copies_and_converts(slots: Any) -> None:
    sampler = hf.sampler(slots, model(), Sampling(max_new_tokens=4))
    new = {name: tensor.double() for name, tensor in weights().items()}
    sampler.receive([bucket_of(new)], 1)
    before = ids(sampler.generate(PROMPTS).result())
    for tensor in new.values():
        tensor.zero_()
    assert ids(sampler.generate(PROMPTS).result()) == before


def test_tied_weights_may_come_under_both_names_if_they_agree(slots: Any) -> None:
    sampler = hf.sampler(slots, model())
    new = weights()
    embedding = new["model.embed_tokens.weight"]
    sampler.receive([bucket_of({**new, "lm_head.weight": embedding.clone()})], 1)
    with pytest.raises(ModelError, match=r"'lm_head.weight' came twice with different values, or is tied"):
        sampler.receive([bucket_of({**new, "lm_head.weight": embedding + 1})], 2)


def test_a_sender_that_fails_midway_stops_it(slots: Any) -> None:
    def broken() -> Iterator[Bucket]:
        yield bucket_of(dict([next(iter(weights().items()))]))
        raise OSError("the wire broke")

    sampler = hf.sampler(slots, model())
    with pytest.raises(OSError, match="the wire broke"):
        sampler.receive(broken(), 1)
    with pytest.raises(GenerationError, match="the wire broke"):
        sampler.generate([[3]])


def test_there_is_no_engine_to_set_up() -> None:
    with cluster("local") as here, pytest.raises(ConfigError, match="no engine to set max_model_len of; that is for"):
        hf.sampler(here.reserve(1), tiny.model(), max_model_len=100)
