"""The examples as they are, on Ray: the numbers of the local cluster, in environments that uv built from the lock."""

import importlib
import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from tensordict import TensorDict

import nrl
from nrl import tiny
from nrl.algos import advantages, from_rewards, grpo_loss
from nrl.backends import Model, Sampling, adamw, fsdp, hf, load_tokenizer
from nrl.batch import Batch
from nrl.batch.metrics import finalize
from nrl.envs import number, single_turn
from nrl.runtime import Cluster, P, process, shard_map
from tests.jsonlines import lines
from tests.replays import assert_replayed, balances, played, taught

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

QUIET = adamw(lr=1e-3, eps=1e-3)  # so that rounding in tiny gradients stays rounding


def run(example: str, out: Path, **options: Any) -> list[dict[str, float]]:
    module = importlib.import_module(f"examples.{example}")
    module.main(attrs.evolve(module.Config(), out=str(out), steps=5, optimizer=QUIET, **options))
    return lines(out / "metrics.jsonl")


@pytest.fixture(scope="module", params=["sft", pytest.param("dpo", marks=pytest.mark.slow)])
def here(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, float]]]:
    return request.param, run(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("dp", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_losses_are_those_of_the_local_cluster(
    on_ray: Cluster, here: tuple[str, list[dict[str, float]]], dp: int, tmp_path: Path
) -> None:
    example, expected = here
    found = run(example, tmp_path, cluster="ray", dp=dp)
    for key in ("loss", "grad_norm", "tokens"):
        torch.testing.assert_close([x[key] for x in found], [x[key] for x in expected], rtol=1e-5, atol=1e-9)
    assert (tmp_path / "model" / "config.json").exists()
    assert (tmp_path / "timeline.json").stat().st_size > 0


@pytest.fixture(scope="module")
def rollouts() -> list[Batch]:
    """Five batches that a sampler has written, as a run would record them.

    Advantages are all positive. Those of a group add up to 0, and so a loss nearly does: what would be compared is
    rounding, which differs by the machine.
    """
    with nrl.cluster("local") as cluster:
        sampler = hf.sampler(cluster.reserve(1), tiny.model(), Sampling(max_new_tokens=4))
        tasks = nrl.data.tasks("arithmetic", seed=0)
        batches = nrl.batched(nrl.rollouts(sampler, single_turn(number), tasks, n=4, seed=0), 8).take(5)
    positive = from_rewards(lambda rewards, groups: rewards + 1)
    return [
        nrl.assign(
            advantages(nrl.assign(batch, rewards=torch.arange(len(batch)) % 3.0), positive),
            old_logprobs=batch["rollout_logprobs"],
        )
        for batch in batches
    ]


def raising(out: TensorDict, batch: Batch) -> Any:
    if out["logprobs"].requires_grad:
        raise ArithmeticError("on the mesh")
    return grpo_loss(out, batch)


def trained(cluster: Cluster, batches: list[Batch], dp: int) -> tuple[list[dict[str, float]], torch.Tensor, Any]:
    mesh = cluster.reserve(dp).mesh()
    trainer = fsdp.trainer(mesh, tiny.model(), QUIET, max_tokens=128)
    step, state, found, failed = trainer.train_step(grpo_loss), trainer.init(), [], 0
    for batch in batches:
        try:  # a step that fails costs nothing
            state, metrics = trainer.train_step(raising)(state, batch)
            metrics.result()
        except ArithmeticError:
            failed += 1
        state, metrics = step(state, batch)
        found.append(finalize(metrics.result()))
    assert failed == len(batches)
    logprobs = trainer.logprobs(state.params, batches[0]).result()
    one = trainer.logprobs(state.params, batches[0][:1].lock_()).result()  # fewer rows than shards
    torch.testing.assert_close(one, logprobs[:1], rtol=1e-5, atol=1e-6)
    double = nrl.shard_map(lambda x: 2 * x, mesh, nrl.P("dp"), nrl.P("dp"))  # which goes on without this process
    assert torch.equal(double(trainer.logprobs(state.params, batches[0])).result(), 2 * logprobs)
    return found, logprobs, dict(state.params.tensors())


@pytest.fixture(scope="module")
def here_too(rollouts: list[Batch]) -> tuple[list[dict[str, float]], torch.Tensor, Any]:
    with nrl.cluster("local") as local:
        return trained(local, rollouts, 1)


@pytest.mark.parametrize("dp", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_grpo_on_the_same_rollouts(on_ray: Cluster, rollouts: list[Batch], here_too: Any, dp: int) -> None:
    expected, logprobs, weights = here_too
    with nrl.cluster("ray") as cluster:
        found, others, moved = trained(cluster, rollouts, dp)
    for key in ("loss", "grad_norm", "lag", "skipped", "lr"):
        torch.testing.assert_close([x[key] for x in found], [x[key] for x in expected], rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(others, logprobs, rtol=1e-5, atol=1e-5)
    assert moved.keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(moved[name], tensor, rtol=1e-5, atol=1e-6)


def needs_pytest() -> str:
    import pytest

    return pytest.__version__


def test_processes_run_in_an_environment_of_their_own(on_ray: Cluster) -> None:
    import sys

    def where() -> Any:
        import importlib.util

        return sys.prefix, importlib.util.find_spec("pytest") is not None, process().mesh

    with nrl.cluster("ray") as cluster:
        mesh = cluster.reserve(1).mesh(name="elsewhere")
        prefix, has_pytest, name = shard_map(where, mesh, (), P())().result()
        with pytest.raises(ModuleNotFoundError) as caught:
            shard_map(needs_pytest, mesh, (), P())().result()
    assert Path(prefix).name.startswith("base-")
    assert not has_pytest  # a development dependency, which `base` is without
    assert name == "elsewhere"
    assert caught.value.__notes__[1] == (
        "The environment of mesh 'elsewhere' has no package 'pytest': name it in the requirements of its Executable, "
        "or use executable='system' if the driver's own interpreter has it"
    )


SMALL = {"warmup": 30, "prompts": 4, "evaluate_prompts": 8}


@pytest.fixture(scope="module")
def grpo_here(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    return run("grpo", tmp_path_factory.mktemp("grpo"), **SMALL)


@pytest.mark.parametrize("samplers", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_grpo_with_its_own_sampler(
    on_ray: Cluster, grpo_here: list[dict[str, float]], samplers: int, tmp_path: Path
) -> None:
    """Two processes sample what one does; without slots of its own, a sampler shares the trainer's."""
    found = run("grpo", tmp_path, cluster="ray", samplers=samplers, **SMALL)
    assert any(x["grad_norm"] for x in found)
    assert [x["lag"] for x in found] == [0] * 5  # each was sampled with what was published last
    for key in ("grad_norm", "reward", "ratio_max", "tokens"):
        torch.testing.assert_close([x[key] for x in found], [x[key] for x in grpo_here], rtol=1e-5, atol=1e-8)
    losses = ([x["loss"] for x in each] for each in (found, grpo_here))  # terms of about 1 that add up to about 0
    torch.testing.assert_close(*losses, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_grpo_on_mathematics_with_two_slots_that_verify(on_ray: Cluster, tmp_path: Path) -> None:
    """Sums of terms, for which math-verify has to decide: the rewards and answers are those of this process."""
    data = tmp_path / "terms.jsonl"
    pairs = [(a, b) for a in range(1, 4) for b in range(1, 4)]
    rows = [{"prompt": f"{a}x+{b}x=", "answer": f"{a + b}x", "response": f"{a + b}x"} for a, b in pairs]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = SMALL | {"env": "math", "data": str(data), "chat": False, "evaluate_every": 5}
    expected = run("grpo", tmp_path / "here", **small)
    found = run("grpo", tmp_path / "there", cluster="ray", verifiers=2, **small)
    for key in ("reward", "eval/reward", "parse_fail", "grad_norm", "tokens"):
        torch.testing.assert_close([x.get(key) for x in found], [x.get(key) for x in expected], rtol=1e-5, atol=1e-8)
    assert [x["invalid"] for x in found] == [0] * 5
    assert any(0 < x["reward"] < 1 for x in found)


@pytest.mark.parametrize("name", ["guess", pytest.param("tools", marks=pytest.mark.slow)])
def test_episodes_of_several_turns_are_those_of_the_local_cluster(on_ray: Cluster, name: str, tmp_path: Path) -> None:
    """Token by token, those between the turns too."""
    module = importlib.import_module(f"examples.{name}")
    gentle = attrs.evolve(QUIET, lr=1e-4)  # at the full rate rounding grows tenfold in the third step
    model = taught(module, name, tmp_path / "taught")
    expected, here = played(module, name, model, tmp_path / "here", optimizer=gentle)
    found, there = played(module, name, model, tmp_path / "there", optimizer=gentle, cluster="ray", samplers=2)
    assert there == here
    assert sum(len(seen.turns) > 2 for seen in there) > len(there) // 5
    for seen in there:
        assert_replayed(module.env, seen, load_tokenizer(Model(str(model))))
    ledger = [f"tokens/{part}" for part in ("sampled", "trained", "masked", "beyond", "invalid", "dropped")]
    assert [[x[key] for key in ledger] for x in found] == [[x[key] for key in ledger] for x in expected]
    assert all(balances(x) for x in found)
    assert any(x["grad_norm"] for x in found)
    for key in ("grad_norm", "reward", "tokens"):
        torch.testing.assert_close([x[key] for x in found], [x[key] for x in expected], rtol=1e-5, atol=1e-8)


@pytest.mark.slow
def test_grpo_learns_on_ray(on_ray: Cluster, tmp_path: Path) -> None:
    grpo = importlib.import_module("examples.grpo")
    grpo.main(attrs.evolve(grpo.Config(), out=str(tmp_path), cluster="ray", dp=2))
    rewards = [line["reward"] for line in lines(tmp_path / "metrics.jsonl")]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.4
