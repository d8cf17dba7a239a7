"""PPO: `python examples/ppo.py` teaches a tiny model with a critic; `model=<folder> data=<file>` trains a real one."""

from typing import Any, Literal

import attrs
from attrs.validators import ge, gt, le

import nrl
from nrl import Layout, algos, config, tiny
from nrl.backends import SAMPLERS, TRAINERS, Optimizer, Sampling, Schedule, Trainer, TrainState, adamw


@attrs.frozen
class Config:
    model: str | None = None  # a folder or a hub name; none: the tiny model
    trust_remote_code: bool = False  # true: Python files that lie with the model may run
    critic: str | None = None  # a folder or a hub name, such as a reward model's; none: the policy's, with another head
    env: str | dict[str, Any] = "number"  # a verifier or an environment, or several; see docs/environments.md
    data: str | dict[str, Any] | None = None  # a file or a dataset that env reads; none: tasks that come with env
    format: str | None = None  # from the rows of a well-known dataset
    chat: bool = True  # false: prompts that are texts stay texts, as base models need them
    steps: int = 150
    seed: int = 0
    out: str | None = None  # none: a new folder under runs/; that of an earlier run: go on with it
    checkpoints: nrl.Checkpoints = nrl.Checkpoints()
    sinks: tuple[str, ...] = ()  # besides the terminal and files: "wandb", "tensorboard", "mlflow"
    cluster: str = "local"  # "local": this process; "ray", or the address of a Ray cluster: actors
    dtype: Literal["float32", "bfloat16"] = "float32"
    trainer: Literal["fsdp", "megatron"] = "fsdp"  # of nrl.backends.TRAINERS
    sampler: Literal["hf", "vllm", "vllm-cpu"] = "hf"  # vLLM: on a GPU, or a CPU
    engine: dict[str, Any] = attrs.field(factory=dict)  # vLLM's engine arguments, such as engine.max_model_len=2048
    dp: int = attrs.field(default=1, validator=ge(1))  # shards that the trainers split a batch into
    layout: Layout = config.derived(lambda cfg: Layout(cfg.dp))  # all axes of the trainers' mesh; dp is the short form
    samplers: int = attrs.field(default=1, validator=ge(0))  # processes that sample; 0: on the trainers' slots
    prompts: int = attrs.field(default=256, validator=ge(1))  # a step, each of which is answered once
    updates: int = attrs.field(default=2, validator=ge(1))  # optimizer steps a batch, each on a part of it
    clip: float = attrs.field(default=0.2, validator=gt(0))
    value_clip: float = attrs.field(default=0.2, validator=gt(0))
    gamma: float = attrs.field(default=1.0, validator=[ge(0), le(1)])
    lam: float = attrs.field(default=0.95, validator=[ge(0), le(1)])
    max_mismatch: float = config.derived(lambda cfg: 0.1 if cfg.model else 2.0, validator=gt(0))  # mismatch/kl at most
    max_tokens: int = attrs.field(default=16_384, validator=ge(1))  # of a micro-batch
    optimizer: Optimizer = config.derived(
        lambda cfg: adamw(lr=1e-6 if cfg.model else 7e-4, schedule=Schedule(steps=cfg.steps * cfg.updates))
    )
    critic_optimizer: Optimizer = config.derived(
        lambda cfg: adamw(lr=1e-5 if cfg.model else 2e-3, schedule=Schedule(steps=cfg.steps * cfg.updates))
    )
    sampling: Sampling = config.derived(lambda cfg: Sampling(max_new_tokens=512 if cfg.model else 4))
    warmup: int = config.derived(lambda cfg: 0 if cfg.model else 40, validator=ge(0))  # supervised, of the tiny model


def main(cfg: Config) -> None:
    """The whole of PPO."""
    with nrl.run(cfg) as run, nrl.cluster(cfg.cluster) as cluster:
        envs = nrl.environments(cfg.env, cfg.data, format=cfg.format, chat=cfg.chat)
        slots, make = cluster.reserve(cfg.layout.slots + cfg.samplers, least=cfg.layout.slots), TRAINERS[cfg.trainer]
        model = tiny.model_or(cfg.model, dtype=cfg.dtype, trust_remote_code=cfg.trust_remote_code)
        judge = attrs.evolve(model, source=cfg.critic or model.source, head="value")
        actor = make(slots[: cfg.layout.slots], model, cfg.optimizer, layout=cfg.layout, max_tokens=cfg.max_tokens)
        critic = make(actor.mesh, judge, cfg.critic_optimizer, max_tokens=cfg.max_tokens)
        sampler = SAMPLERS[cfg.sampler](slots[cfg.layout.slots :] or slots, model, cfg.sampling, **cfg.engine)
        act = actor.train_step(algos.policy_loss(algos.clip(cfg.clip)))
        value = critic.train_step(algos.value_loss(cfg.value_clip))
        stream = nrl.batched(nrl.rollouts(sampler, envs.env, envs.tasks(cfg.seed), n=1, seed=cfg.seed), cfg.prompts)
        policy: Trainer | TrainState = actor
        valuer: Trainer | TrainState = critic
        if cfg.warmup:  # so that there is a reward to start from
            warm = make(actor.mesh, model, adamw(lr=1e-3))
            start = nrl.fit(run, "warmup", warm, algos.sft_loss, tiny.sums(128, seed=cfg.seed + 1), cfg.warmup).params
            policy, valuer = actor.init(start), critic.init(start)
        state, values, stream = run.restore(policy=policy, critic=valuer, stream=stream)
        nrl.publish(state.params, sampler)
        for i, batch in run.steps(stream):
            batch = nrl.assign(algos.token_rewards(batch), old_logprobs=batch["rollout_logprobs"])
            batch, mask = nrl.assign(batch, values=critic.values(values.params, batch)), batch["loss_mask"]
            found, returns = algos.episode_gae(batch, gamma=cfg.gamma, lam=cfg.lam)
            batch = nrl.assign(batch, advantages=algos.whiten(found, mask), returns=returns)
            metrics = nrl.summary(batch) | nrl.per_source(batch, envs.names)
            metrics |= {"explained_variance": algos.explained_variance(batch)}
            for n, part in enumerate(nrl.minibatches(batch, cfg.updates, seed=cfg.seed + i)):
                state, acted = act(state, part)
                values, valued = value(values, part)
                metrics = nrl.merge(metrics, nrl.without("mismatch/", acted.result()) if n else acted.result())
                metrics = nrl.merge(metrics, nrl.prefixed("critic/", valued.result()))
            nrl.publish(state.params, sampler)
            numbers = run.log(i, metrics, samples=nrl.samples(batch, sampler.tokenizer))
            algos.check_mismatch(numbers, cfg.max_mismatch)
            run.save(i, policy=state, critic=values, stream=stream)
        actor.export(state.params, run.out / "model")


if __name__ == "__main__":
    nrl.launch(nrl.retrying(main), Config)
