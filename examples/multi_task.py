"""Two tasks at once: `python examples/multi_task.py` learns to add and to write backwards, and measures each."""

from functools import partial
from typing import Any, Literal

import attrs
from attrs.validators import ge, gt

import nrl
from nrl import Layout, config, data, tiny
from nrl.algos import advantages, check_mismatch, grpo_loss, sft_loss
from nrl.backends import SAMPLERS, TRAINERS, Optimizer, Sampling, Schedule, Trainer, TrainState, adamw


@attrs.frozen
class Config:
    model: str | None = None  # a folder or a hub name; none: the tiny model
    trust_remote_code: bool = False  # true: Python files that lie with the model may run
    env: dict[str, Any] = attrs.field(factory=lambda: {"number": 1, "exact": 1})  # weights; see docs/environments.md
    data: dict[str, Any] | None = None  # files or datasets, by these names; none: sums, and texts to write backwards
    chat: bool = True  # false: prompts that are texts stay texts, as base models need them
    steps: int = 200
    seed: int = 0
    out: str | None = None  # none: a new folder under runs/; that of an earlier run: go on with it
    checkpoints: nrl.Checkpoints = nrl.Checkpoints()
    sinks: tuple[str, ...] = ()  # besides the terminal and files: "wandb", "tensorboard", "mlflow"
    cluster: str = "local"  # "local": this process; "ray", or the address of a Ray cluster: actors
    dtype: Literal["float32", "bfloat16"] = "float32"
    trainer: Literal["fsdp", "megatron"] = "fsdp"  # of nrl.backends.TRAINERS
    sampler: Literal["hf", "vllm", "vllm-cpu"] = "hf"  # vLLM: on a GPU, or a CPU
    engine: dict[str, Any] = attrs.field(factory=dict)  # vLLM's engine arguments, such as engine.max_model_len=2048
    dp: int = attrs.field(default=1, validator=ge(1))  # shards that the trainer splits a batch into
    layout: Layout = config.derived(lambda cfg: Layout(cfg.dp))  # all axes of the trainer's mesh; dp is the short form
    samplers: int = attrs.field(default=1, validator=ge(0))  # processes that sample; 0: on the trainer's slots
    prompts: int = attrs.field(default=32, validator=ge(1))  # a step
    group_size: int = attrs.field(default=8, validator=ge(1))  # samples a prompt
    max_mismatch: float = config.derived(lambda cfg: 0.1 if cfg.model else 2.0, validator=gt(0))  # mismatch/kl at most
    max_tokens: int = attrs.field(default=16_384, validator=ge(1))  # of a micro-batch
    optimizer: Optimizer = config.derived(
        lambda cfg: adamw(lr=1e-6 if cfg.model else 7e-4, schedule=Schedule(steps=cfg.steps))
    )
    sampling: Sampling = config.derived(lambda cfg: Sampling(max_new_tokens=512 if cfg.model else 5))
    warmup: int = config.derived(lambda cfg: 0 if cfg.model else 60, validator=ge(0))  # supervised, of the tiny model


def main(cfg: Config) -> None:
    """GRPO, over a mixture."""
    with nrl.run(cfg) as run, nrl.cluster(cfg.cluster) as cluster:
        envs = nrl.environments(cfg.env, cfg.data, chat=cfg.chat)
        slots, make = cluster.reserve(cfg.layout.slots + cfg.samplers, least=cfg.layout.slots), TRAINERS[cfg.trainer]
        model = tiny.model_or(cfg.model, dtype=cfg.dtype, trust_remote_code=cfg.trust_remote_code)
        trainer = make(slots[: cfg.layout.slots], model, cfg.optimizer, layout=cfg.layout, max_tokens=cfg.max_tokens)
        sampler = SAMPLERS[cfg.sampler](slots[cfg.layout.slots :] or slots, model, cfg.sampling, **cfg.engine)
        step = trainer.train_step(grpo_loss)
        groups = nrl.rollouts(sampler, envs.env, envs.tasks(cfg.seed), n=cfg.group_size, seed=cfg.seed)
        stream = nrl.batched(groups, cfg.prompts)
        policy: Trainer | TrainState = trainer
        if cfg.warmup:  # so that there is a reward to start from
            warm = make(trainer.mesh, model, adamw(lr=1e-3))
            collate = partial(data.supervised, tokenizer=sampler.tokenizer)
            rows = nrl.batched(envs.tasks(cfg.seed + 1), 128, collate=collate)
            policy = trainer.init(nrl.fit(run, "warmup", warm, sft_loss, rows, cfg.warmup).params)
        state, stream = run.restore(policy=policy, stream=stream)
        nrl.publish(state.params, sampler)
        for i, batch in run.steps(stream):
            batch = nrl.assign(advantages(batch), old_logprobs=batch["rollout_logprobs"])
            state, metrics = step(state, batch)
            nrl.publish(state.params, sampler)
            each = nrl.per_source(batch, envs.names)
            samples = nrl.samples(batch, sampler.tokenizer, names=envs.names)
            numbers = run.log(i, metrics, nrl.summary(batch), each, samples=samples)
            check_mismatch(numbers, cfg.max_mismatch)
            run.save(i, policy=state, stream=stream)
        trainer.export(state.params, run.out / "model")


if __name__ == "__main__":
    nrl.launch(nrl.retrying(main), Config)
