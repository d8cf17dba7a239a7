"""The longest row that a model reads, and what is longer."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

import nrl
from nrl import data, tiny
from nrl.algos import sft_loss
from nrl.backends import fsdp, hf
from nrl.backends.models.positions import count_positions
from nrl.envs import number, single_turn
from nrl.errors import ArgumentError, DataError

ROPE = {"rope_theta": 1e4, "factor": 4.0}
OLD = {"type": "linear"}  # as older files name it
YARN = ROPE | {"rope_type": "yarn"}
LLAMA3 = ROPE | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (transformers.LlamaConfig(max_position_embeddings=128), 128),
        (transformers.GPT2Config(n_positions=96), 96),
        (transformers.BloomConfig(), None),
        (transformers.LlamaConfig(max_position_embeddings=128, rope_parameters=ROPE | {"rope_type": "linear"}), 512),
        (transformers.LlamaConfig(max_position_embeddings=128, rope_parameters=ROPE | {"rope_type": "dynamic"}), 512),
        (transformers.LlamaConfig(max_position_embeddings=128, rope_parameters=YARN), 512),
        (
            transformers.LlamaConfig(
                max_position_embeddings=512, rope_parameters=YARN | {"original_max_position_embeddings": 128}
            ),
            512,
        ),
        (
            transformers.LlamaConfig(
                max_position_embeddings=512, rope_parameters=LLAMA3 | {"original_max_position_embeddings": 128}
            ),
            512,
        ),
        (transformers.AutoConfig.for_model("qwen2", max_position_embeddings=128, rope_scaling=ROPE | OLD), 512),
        (transformers.LlavaConfig(text_config=transformers.LlamaConfig(max_position_embeddings=256)), 256),
        (transformers.Gemma3TextConfig(max_position_embeddings=8192), 8192),
    ],
)
def test_positions_are_read_as_transformers_reaches(config: Any, expected: int | None) -> None:
    assert count_positions(config) == expected


def rows(*lengths: int) -> list[dict[str, str]]:
    return [{"prompt": "1" * (length - 3), "response": "23"} for length in lengths]  # and the token that ends a row


def test_a_row_beyond_the_positions_is_an_error_before_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows(8, 33, 32, 40, 41)))
    model = tiny.model(hidden_size=32, num_hidden_layers=1, intermediate_size=32, max_position_embeddings=32)
    with nrl.cluster("local") as cluster:
        trainer = fsdp.trainer(cluster.reserve(1), model, nrl.adamw(lr=1e-3))
        assert trainer.positions == 32
        how: dict[str, Any] = {"chat": False, "tokenizer": tiny.tokenizer(), "collate": data.supervised}
        with pytest.raises(DataError) as error:
            data.tasks(file, max_tokens=40, positions=trainer.positions, **how)
        said = str(error.value)
        assert "2 of 5 rows have more tokens than the 32 positions" in said
        assert "the longest has 40 (" in said
        assert "line 4)" in said
        assert "Set max_tokens=32 (in the examples max_length=32) in place of 40" in said
        assert data.tasks(file, max_tokens=32, positions=32, **how).size == 2
        assert data.tasks(rows(8, 32), max_tokens=1000, positions=32, **how).size == 2
        with pytest.raises(DataError, match="positions=32 needs tokenizer and max_tokens"):
            data.tasks(file, chat=False, positions=32)
        capsys.readouterr()
        step, state = trainer.train_step(sft_loss), trainer.init()
        for length in (32, 33, 34):
            state, _ = step(state, data.supervised(rows(length), tiny.tokenizer()))
        said = capsys.readouterr().err
        assert said.count("a row has 33 tokens, more than the 32 positions of the model") == 1
        assert "34" not in said


def test_an_answer_longer_than_the_context_is_an_error_before_anything_is_sampled() -> None:
    model = tiny.model(hidden_size=32, num_hidden_layers=1, intermediate_size=32, max_position_embeddings=32)
    with nrl.cluster("local") as cluster:
        sampler = hf.sampler(cluster.reserve(1), model, nrl.Sampling(max_new_tokens=33))
        tasks = data.tasks("arithmetic")
        with pytest.raises(ArgumentError, match=r"rollouts: sampling.max_new_tokens=33 is more than the 32") as error:
            nrl.rollouts(sampler, single_turn(number), tasks, n=1)
        assert error.value.argument == "sampling"
        nrl.rollouts(sampler, single_turn(number), tasks, n=1, sampling=nrl.Sampling(max_new_tokens=32))
        with pytest.raises(ArgumentError, match="grade: sampling.max_new_tokens=64 is more than the 32 tokens"):
            nrl.grade(sampler, number, tasks.take(1), sampling=nrl.Sampling(max_new_tokens=64))
