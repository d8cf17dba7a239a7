"""The examples on Megatron Core: they learn, over pipelines and tensor parallel layers, and go on after a stop."""

import signal
import time
from pathlib import Path

import attrs
import pytest

from examples import grpo, ppo, sft
from nrl import Layout, tiny
from nrl.backends import adamw
from nrl.data import read_jsonl
from nrl.run.checkpoint import Checkpoints
from nrl.runtime import Cluster
from tests.children import child, server
from tests.jsonlines import lines, untimed

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]

GSM8K = Path(__file__).parent / "data" / "gsm8k_sample.jsonl"


def test_grpo_learns_to_add_in_a_pipeline(on_ray: Cluster, tmp_path: Path) -> None:
    cfg = attrs.evolve(grpo.Config(), out=str(tmp_path), cluster="ray", trainer="megatron", layout=Layout(pp=2))
    grpo.main(attrs.evolve(cfg, steps=24, eval_data=None))
    found = lines(tmp_path / "metrics.jsonl")
    rewards = [each["reward"] for each in found]
    assert sum(rewards[-8:]) / 8 > sum(rewards[:8]) / 8 + 0.08
    assert max(each["mismatch/max_abs"] for each in found) < 1e-4


@pytest.mark.megatron
def test_grpo_has_the_gradients_of_fsdp(on_ray: Cluster, tmp_path: Path) -> None:
    """With tensors split; rows have the model's pad token, whose input embedding neither engine trains."""
    cfg = attrs.evolve(grpo.Config(), cluster="ray", steps=3, eval_data=None)
    grpo.main(attrs.evolve(cfg, out=str(tmp_path / "fsdp")))
    grpo.main(attrs.evolve(cfg, out=str(tmp_path / "run"), trainer="megatron", layout=Layout(tp=2)))
    expected, found = lines(tmp_path / "fsdp" / "metrics.jsonl"), lines(tmp_path / "run" / "metrics.jsonl")
    assert [each["grad_norm"] > 0.1 for each in found] == [True] * 3
    assert [each["reward"] for each in found] == [each["reward"] for each in expected]
    assert [each["loss"] for each in found] == pytest.approx([each["loss"] for each in expected], abs=1e-6)
    assert [each["grad_norm"] for each in found] == pytest.approx([each["grad_norm"] for each in expected], rel=1e-4)


def test_sft_on_gsm8k_in_a_pipeline(on_ray: Cluster, tmp_path: Path) -> None:
    rows = read_jsonl(GSM8K)
    tokenizer = tiny.bpe((text for row in rows for text in (row["question"], row["answer"])), vocab_size=512)
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    tiny.save(tiny.model(tokenizer=tokenizer, initializer_range=0.02, **sizes), tmp_path / "model")
    cfg = attrs.evolve(
        sft.Config(), model=str(tmp_path / "model"), data=str(GSM8K), eval_data=str(GSM8K), format="gsm8k", steps=20,
        rows=8, evaluate_rows=8, evaluate_every=19, max_length=512, optimizer=adamw(lr=5e-3), cluster="ray",
    )  # fmt: skip
    sft.main(attrs.evolve(cfg, out=str(tmp_path / "fsdp"), steps=3))
    sft.main(attrs.evolve(cfg, out=str(tmp_path / "run"), trainer="megatron", layout=Layout(pp=2)))
    expected, found = lines(tmp_path / "fsdp" / "metrics.jsonl"), lines(tmp_path / "run" / "metrics.jsonl")
    assert [each["loss"] for each in found[:3]] == pytest.approx([each["loss"] for each in expected], rel=1e-3)
    assert found[-1]["eval/loss"] < found[0]["loss"] - 1  # nats


def test_a_run_goes_on_in_another_layout_and_on_the_other_trainer(on_ray: Cluster, tmp_path: Path) -> None:
    """Two steps each with tensors split, in a pipeline, and on fsdp: as on fsdp alone, to rounding."""
    rows = read_jsonl(GSM8K)
    tokenizer = tiny.bpe((text for row in rows for text in (row["question"], row["answer"])), vocab_size=512)
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    tiny.save(tiny.model(tokenizer=tokenizer, initializer_range=0.02, **sizes), tmp_path / "model")
    cfg = attrs.evolve(
        sft.Config(), model=str(tmp_path / "model"), data=str(GSM8K), eval_data=None, format="gsm8k", steps=6,
        rows=8, max_length=512, optimizer=adamw(lr=1e-3, eps=1e-3), cluster="ray",
        checkpoints=Checkpoints(every=1),
    )  # fmt: skip
    sft.main(attrs.evolve(cfg, out=str(tmp_path / "whole")))
    moved = attrs.evolve(cfg, out=str(tmp_path / "moved"))
    sft.main(attrs.evolve(moved, steps=2, trainer="megatron", layout=Layout(tp=2)))
    sft.main(attrs.evolve(moved, steps=4, trainer="megatron", layout=Layout(pp=2)))
    sft.main(attrs.evolve(moved, steps=6))
    whole, found = lines(tmp_path / "whole" / "metrics.jsonl"), lines(tmp_path / "moved" / "metrics.jsonl")
    assert [each["step"] for each in found] == list(range(6))
    for name in ("loss", "grad_norm"):
        assert [each[name] for each in found] == pytest.approx([each[name] for each in whole], rel=1e-4)


def test_ppo_with_both_models_goes_on_after_it_was_killed(tmp_path: Path) -> None:
    """In the middle of a step, twice; the numbers are those of a run that was left alone."""
    cfg = attrs.evolve(ppo.Config(), cluster="ray", trainer="megatron", layout=Layout(tp=2), warmup=5, prompts=32)
    cfg = attrs.evolve(cfg, optimizer=adamw(lr=1e-3, eps=1e-3), critic_optimizer=adamw(lr=2e-3, eps=1e-3), steps=6)
    cfg = attrs.evolve(cfg, checkpoints=Checkpoints(every=1))
    assert child(ppo.main, attrs.evolve(cfg, out=str(tmp_path / "whole"))) == 0
    metrics = tmp_path / "parts" / "metrics.jsonl"
    for least in (2, 4, 6):
        process = server().Process(target=ppo.main, args=(attrs.evolve(cfg, out=str(tmp_path / "parts")),))
        process.start()
        until = time.monotonic() + 600
        while (not metrics.exists() or len(lines(metrics)) < least) and time.monotonic() < until:
            time.sleep(0.05)
        if least < 6:
            process.kill()
        process.join()
        assert process.exitcode == (0 if least == 6 else -signal.SIGKILL)
    assert untimed(tmp_path / "parts")["metrics.jsonl"] == untimed(tmp_path / "whole")["metrics.jsonl"]
