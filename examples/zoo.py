"""The zoo: `python examples/zoo.py algo=all` trains with each method from one start and compares the results."""

import json
from typing import Any, Literal, NamedTuple

import attrs
import rich.table
from attrs.validators import ge

import nrl
from nrl import Layout, algos, data, finalize, measure, tiny
from nrl.algos import clip, from_rewards, group_center, group_normalize, policy_loss
from nrl.backends import TRAINERS, Sampler, adamw, hf


class Method(NamedTuple):
    """A composition: what is done to a batch on the driver, and the loss."""

    loss: algos.Loss
    estimator: algos.Estimator = from_rewards(group_normalize)
    before: algos.Shaping = lambda batch: batch  # rewards reshaped, rows and tokens left out


ZOO = {
    "grpo": Method(algos.grpo_loss),
    "dr_grpo": Method(algos.dr_grpo_loss(norm=6), from_rewards(group_center)),
    "dapo": Method(algos.dapo_loss, before=algos.overlong_penalty(6, 2)),
    "gspo": Method(algos.gspo_loss),
    "cispo": Method(algos.cispo_loss),
    "rloo": Method(algos.reinforce_loss, from_rewards(algos.leave_one_out)),
    "reinforce++": Method(policy_loss(clip(0.2)), algos.reinforce_plus_plus, before=algos.token_rewards),
    "reinforce++ baseline": Method(policy_loss(clip(0.2)), algos.whitened(from_rewards(group_center))),
    "gmpo": Method(algos.gmpo_loss),
    "sapo": Method(algos.sapo_loss),
    "maxrl": Method(algos.reinforce_loss, from_rewards(algos.max_rl)),
    "opo": Method(algos.reinforce_loss, algos.optimal_baseline),
    "lite_ppo": Method(policy_loss(clip(0.2)), from_rewards(algos.group_center_batch_std)),
    "dual_clip": Method(policy_loss(clip(0.2, dual=3.0))),
    "dppo": Method(algos.dppo_loss, from_rewards(group_center)),
    "vespo": Method(algos.vespo_loss, from_rewards(group_center)),
    "decoupled_ppo": Method(algos.decoupled_ppo_loss),
    "tis": Method(policy_loss(clip(0.2), correction=algos.truncate(2.0))),
    "sequence_tis": Method(policy_loss(clip(0.2), correction=algos.sequence_truncate(2.0))),
    "icepop": Method(policy_loss(clip(0.2), correction=algos.icepop(0.5, 5.0))),
    "opsm": Method(policy_loss(clip(0.2), keep=algos.opsm(0.5))),
    "entropy_bonus": Method(algos.add((1.0, algos.grpo_loss), (-0.01, algos.entropy_loss))),
    "rejection_sampling": Method(algos.sft_loss, before=algos.keep_at_least(1.0)),
}


@attrs.frozen
class Config:
    algo: str = "all"  # one of the zoo, or several with commas between; all
    env: str | dict[str, Any] = "number"  # a verifier or an environment, or several; see docs/environments.md
    data: str | dict[str, Any] | None = None  # a file or a dataset that env reads; none: tasks that come with env
    steps: int = 40
    seed: int = 0
    out: str | None = None  # none: a new folder under runs/; that of an earlier run: go on with it
    cluster: str = "local"  # "local": this process; "ray", or the address of a Ray cluster: actors
    trainer: Literal["fsdp", "megatron"] = "fsdp"  # of nrl.backends.TRAINERS
    layout: Layout = Layout()  # all axes of the trainer's mesh
    prompts: int = attrs.field(default=32, validator=ge(1))  # a step
    group_size: int = attrs.field(default=8, validator=ge(1))  # samples a prompt
    lag: int = attrs.field(default=1, validator=ge(0))  # publishes that a rollout is early, so that ratios are not 1
    warmup: int = attrs.field(default=40, validator=ge(0))  # supervised steps, once for all methods


def measured(cfg: Config, envs: Any, sampler: Sampler) -> float:  # the mean reward, on another draw of prompts
    return finalize(measure(nrl.grade(sampler, envs.graded, data.epoch(envs.tasks(cfg.seed + 2), 512))))["eval/reward"]


def main(cfg: Config) -> None:
    """One loop for all of them."""
    names = list(ZOO) if cfg.algo == "all" else [name.strip() for name in cfg.algo.split(",")]
    if unknown := [name for name in names if name not in ZOO]:
        raise nrl.errors.ConfigError(f"zoo: there is no algo '{unknown[0]}'; there are {', '.join(ZOO)}")
    table = rich.table.Table("algo", "reward before", "after", "seconds a step", title=f"{cfg.steps} steps each")
    with nrl.run(cfg) as run, nrl.cluster(cfg.cluster) as cluster:
        envs, model = nrl.environments(cfg.env, cfg.data, chat=False), tiny.model()
        slots, make = cluster.reserve(cfg.layout.slots + 1), TRAINERS[cfg.trainer]
        trainer = make(slots[:-1], model, adamw(lr=5e-4, betas=(0.9, 0.95)), layout=cfg.layout)
        warm = make(trainer.mesh, model, adamw(lr=1e-3, betas=(0.9, 0.95)))
        sampler = hf.sampler(slots[-1:], model, nrl.Sampling(max_new_tokens=6))
        rows = nrl.batched(envs.tasks(cfg.seed), 128, lambda rows: data.supervised(rows, sampler.tokenizer))
        start = warm.freeze(nrl.fit(run, "warmup", warm, algos.sft_loss, rows, cfg.warmup).params)
        for name in names:
            method, step = ZOO[name], trainer.train_step(ZOO[name].loss)
            groups: Any = nrl.rollouts(sampler, envs.env, envs.tasks(), n=cfg.group_size, seed=cfg.seed)
            early = nrl.ahead(nrl.batched(groups, cfg.prompts), cfg.lag)
            nrl.publish(start, sampler)
            before = measured(cfg, envs, sampler)
            state, stream = run.restore(name, policy=trainer.init(start), stream=early)
            nrl.publish(state.params, sampler)
            for i, batch in run.steps(stream, cfg.steps, name=name):
                batch = algos.advantages(method.before(batch), method.estimator)
                state, metrics = step(state, nrl.assign(batch, old_logprobs=trainer.logprobs(state.params, batch)))
                nrl.publish(state.params, sampler)
                run.log(i, metrics, nrl.summary(batch))
                run.save(i, policy=state, stream=stream)
            took = sorted(json.loads(row)["time/total"] for row in (run.out / f"{name}.jsonl").read_text().splitlines())
            table.add_row(name, f"{before:.3f}", f"{measured(cfg, envs, sampler):.3f}", f"{took[len(took) // 2]:.2f}")
    rich.print(table)


if __name__ == "__main__":
    nrl.launch(main, Config)
