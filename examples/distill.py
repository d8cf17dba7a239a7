"""On-policy distillation: `python examples/distill.py`; `model=<folder> teacher=<folder>` takes real models."""

from typing import Any, Literal

import attrs
from attrs.validators import ge, gt

import nrl
from nrl import Layout, algos, config, tiny
from nrl.backends import SAMPLERS, TRAINERS, Optimizer, Sampling, Schedule, Trainer, TrainState, adamw
from nrl.errors import ConfigError

EMBEDDED = adamw(lr=1e-3, schedule=Schedule("linear", steps=150, floor=0.1))


@attrs.frozen
class Config:
    model: str | None = None  # the student, a folder or a hub name; none: the tiny model
    teacher: str | None = None  # a folder or a hub name, with the student's tokenizer; none: a larger tiny model
    trust_remote_code: bool = False  # true: Python files that lie with the model may run
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
    dp: int = attrs.field(default=1, validator=ge(1))  # shards that the trainer splits a batch into
    layout: Layout = config.derived(lambda cfg: Layout(cfg.dp))  # all axes of the trainer's mesh; dp is the short form
    samplers: int = attrs.field(default=1, validator=ge(0))  # processes that sample; 0: on the trainer's slots
    prompts: int = attrs.field(default=128, validator=ge(1))  # a step, each of which the student answers once
    top_k: int = attrs.field(default=16, validator=ge(0))  # likeliest tokens of the teacher; 0: the sampled one
    max_mismatch: float = config.derived(lambda cfg: 0.1 if cfg.model else 2.0, validator=gt(0))  # mismatch/kl at most
    max_tokens: int = attrs.field(default=16_384, validator=ge(1))  # of a micro-batch
    optimizer: Optimizer = config.derived(
        lambda cfg: adamw(lr=1e-6, schedule=Schedule(steps=cfg.steps)) if cfg.model else EMBEDDED
    )
    sampling: Sampling = config.derived(lambda cfg: Sampling(max_new_tokens=512 if cfg.model else 4))
    warmup: int = config.derived(lambda cfg: 0 if cfg.model else 40, validator=ge(0))  # supervised, of the tiny student
    teaching: int = config.derived(lambda cfg: 0 if cfg.teacher else 200, validator=ge(0))  # supervised, of its teacher


def main(cfg: Config) -> None:
    """The whole of it."""
    if cfg.model and not cfg.teacher:
        raise ConfigError(f"distill: model={cfg.model} needs teacher=, a larger model with its tokenizer")
    with nrl.run(cfg) as run, nrl.cluster(cfg.cluster) as cluster:
        envs = nrl.environments(cfg.env, cfg.data, format=cfg.format, chat=cfg.chat)
        slots, make = cluster.reserve(cfg.layout.slots + cfg.samplers, least=cfg.layout.slots), TRAINERS[cfg.trainer]
        given = {"dtype": cfg.dtype, "trust_remote_code": cfg.trust_remote_code}
        model = tiny.model_or(cfg.model, **given)
        larger = tiny.model_or(cfg.teacher, num_hidden_layers=4, **given)
        trainer = make(slots[: cfg.layout.slots], model, cfg.optimizer, layout=cfg.layout, max_tokens=cfg.max_tokens)
        teacher = make(trainer.mesh, larger, adamw(lr=1e-3), max_tokens=cfg.max_tokens)
        sampler = SAMPLERS[cfg.sampler](slots[cfg.layout.slots :] or slots, model, cfg.sampling, **cfg.engine)
        sampled = algos.policy_loss(algos.reinforce, ratio=algos.on_policy_ratio)
        loss = algos.distillation_loss(algos.reverse_kl) if cfg.top_k else sampled
        step = trainer.train_step(loss)
        stream = nrl.batched(nrl.rollouts(sampler, envs.env, envs.tasks(cfg.seed), n=1, seed=cfg.seed), cfg.prompts)
        rows = tiny.sums(128, seed=cfg.seed + 1)
        policy: Trainer | TrainState = trainer
        expert = nrl.fit(run, "teaching", teacher, algos.sft_loss, rows, cfg.teaching).params if cfg.teaching else None
        expert = expert or teacher.load()
        if cfg.warmup:
            policy = trainer.init(nrl.fit(run, "warmup", trainer, algos.sft_loss, rows, cfg.warmup).params)
        state, stream = run.restore(policy=policy, stream=stream)
        nrl.publish(state.params, sampler)
        for i, batch in run.steps(stream):
            if cfg.top_k:
                state, metrics = step(state, batch, **teacher.top_k(expert, batch, cfg.top_k))
            else:
                batch = nrl.assign(batch, teacher_logprobs=teacher.logprobs(expert, batch))
                state, metrics = step(state, algos.advantages(batch, algos.on_policy_distillation))
            nrl.publish(state.params, sampler)
            found = nrl.summary(batch) | nrl.per_source(batch, envs.names)
            numbers = run.log(i, metrics, found, samples=nrl.samples(batch, sampler.tokenizer))
            algos.check_mismatch(numbers, cfg.max_mismatch)
            run.save(i, policy=state, stream=stream)
        trainer.export(state.params, run.out / "model")
        if cfg.teaching:
            teacher.export(expert, run.out / "teacher")


if __name__ == "__main__":
    nrl.launch(nrl.retrying(main), Config)
