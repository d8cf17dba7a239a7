"""The examples that need a second model: what they learn, what they resume, and what they measure."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import nrl
from nrl import tiny
from nrl.algos import (
    advantages,
    distillation_loss,
    on_policy_distillation,
    on_policy_ratio,
    policy_loss,
    reinforce,
    reverse_kl,
)
from nrl.backends import Model, adamw, fsdp, hf
from nrl.batch import Batch
from nrl.batch.metrics import finalize
from nrl.envs import number, single_turn
from nrl.errors import ConfigError
from nrl.run.checkpoint import Checkpoints
from tests.jsonlines import lines
from tests.test_examples import load


def mean(rows: list[dict[str, Any]], key: str) -> float:
    return float(sum(row[key] for row in rows) / len(rows))


@pytest.mark.slow
def test_ppo_learns_and_its_critic_foresees(tmp_path: Path) -> None:
    ppo = load("ppo")
    ppo.main(ppo.Config(steps=50, out=str(tmp_path)))
    rows = lines(tmp_path / "metrics.jsonl")
    assert mean(rows[:5], "reward") < 0.35
    assert mean(rows[-5:], "reward") > 0.6
    assert mean(rows[-10:], "critic/loss") < 0.75 * mean(rows[:10], "critic/loss")
    assert mean(rows[:3], "explained_variance") < 0.1
    assert mean(rows[-10:], "explained_variance") > 0.3
    assert rows[0]["critic/value_clip_fraction"] == 0
    assert {"critic/grad_norm", "grad_norm", "mismatch/kl"} <= rows[0].keys()


def test_ppo_resumes_with_both_states(tmp_path: Path) -> None:
    """Broken off after three steps, it does the others as if nothing had been."""
    ppo = load("ppo")
    small = {"warmup": 2, "prompts": 8, "checkpoints": Checkpoints(every=1)}
    ppo.main(ppo.Config(steps=6, out=str(tmp_path / "whole"), **small))
    ppo.main(ppo.Config(steps=3, out=str(tmp_path / "broken"), **small))
    ppo.main(ppo.Config(steps=6, out=str(tmp_path / "broken"), **small))
    whole, broken = (lines(tmp_path / name / "metrics.jsonl") for name in ("whole", "broken"))
    timed = {"tokens_per_second"}
    for one, other in zip(whole, broken, strict=True):
        assert one.keys() == other.keys()
        for key in one.keys() - timed:
            assert one[key] == other[key] or key.startswith(("time/", "device/")), key
    weights, resumed = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "broken"))
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)


def test_a_reward_model_tells_right_from_wrong(tmp_path: Path) -> None:
    """Also of sums that it has never seen: one in five of all that there are."""
    example = load("reward_model")
    pairs = nrl.data.tasks("arithmetic", seed=0).take(2000)
    new = {pair["prompt"] for pair in pairs if (int(pair["answer"]) + len(pair["prompt"])) % 5 == 0}
    files = {name: tmp_path / f"{name}.jsonl" for name in ("train", "eval")}
    for name, path in files.items():
        chosen = [pair for pair in pairs if (pair["prompt"] in new) is (name == "eval")]
        path.write_text("".join(json.dumps(pair) + "\n" for pair in chosen))
    options = {"data": str(files["train"]), "eval_data": str(files["eval"]), "chat": False}
    example.main(example.Config(steps=60, evaluate_every=30, out=str(tmp_path / "run"), **options))
    found = [row["eval/accuracy"] for row in lines(tmp_path / "run" / "metrics.jsonl") if "eval/accuracy" in row]
    assert len(found) == 2
    assert found[-1] > 0.6
    model = Model(str(tmp_path / "run" / "model"), head="reward")
    pairs = nrl.data.preferences(nrl.data.tasks("arithmetic", seed=9).take(64), tiny.tokenizer())
    with nrl.cluster("local") as cluster:
        trainer = fsdp.trainer(cluster.reserve(1), model, adamw(lr=1e-3))
        rewards = trainer.rewards(trainer.load(), pairs).result()
    assert float((rewards[:, 0] > rewards[:, 1]).float().mean()) > 0.6


def test_kto_tells_good_from_bad(tmp_path: Path) -> None:
    example = load("kto")
    example.main(example.Config(steps=40, rows=32, evaluate_rows=64, out=str(tmp_path)))
    rows = [row for row in lines(tmp_path / "metrics.jsonl") if "eval/loss" in row]
    assert rows[-1]["eval/loss"] < rows[0]["eval/loss"]
    assert rows[-1]["eval/desirable_score"] > rows[-1]["eval/undesirable_score"] + 0.1


@pytest.mark.parametrize("top_k", [16, 0])
def test_distillation_runs(tmp_path: Path, top_k: int) -> None:
    example = load("distill")
    example.main(example.Config(steps=3, teaching=3, warmup=3, prompts=8, top_k=top_k, out=str(tmp_path)))
    rows = lines(tmp_path / "metrics.jsonl")
    assert len(rows) == 3
    assert ("teacher_mass" in rows[0]) == bool(top_k)


@pytest.mark.slow
def test_distillation_brings_a_student_to_its_teacher(tmp_path: Path) -> None:
    example = load("distill")
    example.main(example.Config(out=str(tmp_path)))

    def reward(folder: str) -> float:
        """Of what it samples, on prompts of their own."""
        with nrl.cluster("local") as cluster:
            model = Model(str(tmp_path / folder))
            sampler = hf.sampler(cluster.reserve(1), model, nrl.Sampling(max_new_tokens=4))
            tasks = nrl.data.tasks("arithmetic", seed=11).take(512)
            return finalize(nrl.summary(nrl.rollout(sampler, single_turn(number), tasks)))["reward"]

    assert reward("teacher") > 0.6
    assert reward("model") > reward("teacher") - 0.05
    assert mean(lines(tmp_path / "metrics.jsonl")[:3], "reward") < reward("teacher") - 0.2


@pytest.mark.parametrize("of_top_k", [True, False])
def test_distillation_of_a_teacher_that_is_the_student_changes_nothing(of_top_k: bool) -> None:
    """The gradient is 0: to rounding over top-k, exactly of the sampled tokens alone."""
    with nrl.cluster("local") as cluster:
        trainer = fsdp.trainer(cluster.reserve(1), tiny.model(), adamw(lr=1e-3))
        state = trainer.init()
        ids = torch.randint(4, 90, (6, 9), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(ids, dtype=torch.bool)
        batch = Batch({"input_ids": ids, "attention_mask": mask, "loss_mask": mask & (torch.arange(9) > 2)}, [6])
        logprobs = trainer.logprobs(state.params, batch).result()
        if of_top_k:
            loss, columns = distillation_loss(reverse_kl), trainer.top_k(state.params, batch, 8)
            batch = nrl.assign(batch, **columns)
        else:
            loss = policy_loss(reinforce, ratio=on_policy_ratio)
            batch = nrl.assign(batch, teacher_logprobs=logprobs, rollout_logprobs=logprobs)
            batch = advantages(batch, on_policy_distillation)
        _, metrics = trainer.train_step(loss)(state, batch)
        norm = finalize(metrics.result())["grad_norm"]
    assert norm < 1e-5 if of_top_k else norm == 0


def test_rlhf_runs(tmp_path: Path) -> None:
    example = load("rlhf")
    example.main(example.Config(steps=2, judging=2, warmup=2, prompts=4, group_size=2, out=str(tmp_path)))
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"reward", "env/right"} <= row.keys()
    assert row["invalid"] == 0


@pytest.mark.slow
def test_rlhf_earns_a_reward_that_is_for_right_answers(tmp_path: Path) -> None:
    """Within what the penalty allows: far from the reference the reward model is wrong, and the policy finds it out."""
    example = load("rlhf")
    example.main(example.Config(out=str(tmp_path)))
    rows = lines(tmp_path / "metrics.jsonl")
    assert mean(rows[-10:], "reward") > mean(rows[:5], "reward") + 2
    assert mean(rows[-10:], "env/right") > mean(rows[:5], "env/right") + 0.15


def test_dapo_keeps_only_groups_that_teach(tmp_path: Path) -> None:
    example = load("dapo")
    example.main(example.Config(steps=3, warmup=20, prompts=4, out=str(tmp_path)))
    rows = lines(tmp_path / "metrics.jsonl")
    assert len(rows) == 3
    assert sum(row["dropped"] for row in rows) > 0
    for line in lines(tmp_path / "rollouts.jsonl"):
        assert len({row["reward"] for row in line["rows"][:2]}) == 2  # of one group


def test_async_grpo_is_two_versions_behind_and_corrects_for_it(tmp_path: Path) -> None:
    example = load("async_grpo")
    example.main(example.Config(steps=4, warmup=20, prompts=8, group_size=4, out=str(tmp_path)))
    rows = lines(tmp_path / "metrics.jsonl")
    assert [row["lag"] for row in rows] == [0, 1, 2, 2]
    assert rows[0]["mismatch/max_abs"] < 1e-4 < rows[2]["mismatch/max_abs"]


def test_multi_task_measures_each_task(tmp_path: Path) -> None:
    example = load("multi_task")
    example.main(
        example.Config(steps=3, warmup=3, prompts=4, group_size=4, env={"number": 1, "exact": 3}, out=str(tmp_path))
    )
    for row in lines(tmp_path / "metrics.jsonl"):
        assert row["reward"] == pytest.approx(0.25 * row["number/reward"] + 0.75 * row["exact/reward"], abs=1e-6)


def test_the_zoo_runs_several_methods_from_one_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zoo = load("zoo")
    names = "gspo,reinforce++,decoupled_ppo,rejection_sampling"
    zoo.main(zoo.Config(algo=names, steps=2, warmup=10, prompts=4, out=str(tmp_path)))
    table = capsys.readouterr().out
    for name in names.split(","):
        assert f" {name} " in table
        assert len(lines(tmp_path / f"{name}.jsonl")) == 2
    before = {line.split("│")[2] for line in table.splitlines() if line.startswith("│")}
    assert len(before) == 1
    with pytest.raises(ConfigError, match=r"zoo: there is no algo 'grpp'; there are grpo, dr_grpo"):
        zoo.main(zoo.Config(algo="grpo,grpp"))


def test_the_zoo_compares_methods_on_other_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its warm-up teaches them, and they are what is measured."""
    zoo = load("zoo")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "hello", "response": "x", "answer": "x"}\n')
    cfg = zoo.Config(algo="grpo", env="exact", data=str(rows), steps=2, warmup=25, prompts=2, out=str(tmp_path / "run"))
    zoo.main(cfg)
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("│"))
    assert float(row.split("│")[2]) > 0.9
    assert lines(tmp_path / "run" / "grpo.jsonl")[-1]["reward"] > 0.9


@pytest.mark.slow
def test_a_method_of_the_zoo_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And what is resumed has the times of all its steps."""
    zoo = load("zoo")
    cfg = zoo.Config(algo="rejection_sampling", steps=12, out=str(tmp_path))
    rows = []
    for _ in range(2):
        zoo.main(cfg)
        (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("│"))
        rows.append([cell.strip() for cell in row.strip("│").split("│")])
    assert rows[0] == rows[1]
    _, before, after, seconds = rows[0]
    assert float(after) > float(before) + 0.06  # three standard errors
    assert float(seconds) > 0


@pytest.mark.parametrize(("name", "other"), [("rlhf", "reward"), ("distill", "teacher")])
def test_a_real_model_needs_a_real_second_one(name: str, other: str) -> None:
    example = load(name)
    with pytest.raises(ConfigError, match=f"{name}: model=somewhere needs {other}="):
        example.main(example.Config(model="somewhere"))


def test_rlhf_says_that_its_reward_model_verifies() -> None:
    example = load("rlhf")
    with pytest.raises(ConfigError, match="a reward model verifies, so it takes no env=math; examples/grpo.py does"):
        example.main(example.Config(env="math"))


@pytest.mark.parametrize("name", ["ppo", "dapo"])
def test_the_mismatch_is_that_of_the_first_update(name: str, tmp_path: Path) -> None:
    """The next ones have left the policy that sampled; at the first step nothing else has."""
    example = load(name)
    example.main(example.Config(steps=1, warmup=15, prompts=32, updates=2, out=str(tmp_path)))
    (row,) = lines(tmp_path / "metrics.jsonl")
    assert row["mismatch/kl"] < 1e-6
    assert row["ratio_max"] > 1.01


def test_every_method_of_the_zoo_makes_a_step() -> None:
    """Each makes a step whose loss is finite, on rows of a tiny model."""
    zoo = load("zoo")
    assert len(zoo.ZOO) > 20
    with nrl.cluster("local") as cluster:
        trainer = fsdp.trainer(cluster.reserve(1), tiny.model(), adamw(lr=1e-3))
        sampler = hf.sampler(cluster.reserve(1), tiny.model(), nrl.Sampling(max_new_tokens=4))
        batch = nrl.rollout(sampler, single_turn(number), nrl.data.tasks("arithmetic").take(4), n=4)
        batch = nrl.assign(batch, rewards=torch.arange(16) % 3 / 2)
        for name, (loss, estimator, before) in zoo.ZOO.items():
            state = trainer.init()
            batch = nrl.assign(batch, old_logprobs=trainer.logprobs(state.params, batch))
            made = advantages(before(batch), estimator)
            _, metrics = trainer.train_step(loss)(state, made)
            found = finalize(metrics.result())
            assert found["skipped"] == 0, name
            assert found["grad_norm"] > 0, name
