"""GRPO: `python examples/grpo.py` teaches a tiny model to add; `model=<name> data=<file>` trains a real model."""

from typing import Any, Literal

import attrs
from attrs.validators import ge, gt

import nrl
from nrl import Layout, algos, config, data, tiny
from nrl.algos import advantages, check_mismatch, clip, policy_loss, sft_loss
from nrl.backends import SAMPLERS, TRAINERS, Optimizer, Sampler, Sampling, Schedule, Trainer, TrainState, adamw
from nrl.envs.builtin import Environments
from nrl.run import Run

BEST = nrl.Checkpoints(best="eval/reward")
EMBEDDED = adamw(lr=7e-4, betas=(0.9, 0.95), schedule=Schedule("linear", steps=300, floor=0.1))


@attrs.frozen
class Config:
    model: str | None = None  # a folder or a hub name; none: the tiny model
    trust_remote_code: bool = False  # true: Python files that lie with the model may run
    lora: str | dict[str, Any] | None = None  # arguments of peft.LoraConfig, or a folder in its format
    env: str | dict[str, Any] = "number"  # a verifier or an environment, or several; see docs/environments.md
    data: str | dict[str, Any] | None = None  # a file or a dataset that env reads; none: tasks that come with env
    format: str | None = None  # from the rows of a well-known dataset
    chat: bool = True  # false: prompts that are texts stay texts, as base models need them
    eval_data: str | dict[str, Any] | None = config.derived(lambda cfg: None if cfg.model else "same")  # or a file
    evaluate_every: int = attrs.field(default=50, validator=ge(1))  # steps; never: eval_data=null
    evaluate_prompts: int = attrs.field(default=256, validator=ge(1))
    steps: int = 300
    seed: int = 0
    out: str | None = None  # none: a new folder under runs/; that of an earlier run: go on with it
    checkpoints: nrl.Checkpoints = config.derived(lambda cfg: BEST if cfg.eval_data else nrl.Checkpoints())
    sinks: tuple[str, ...] = ()  # besides the terminal and files: "wandb", "tensorboard", "mlflow"
    cluster: str = "local"  # "local": this process; "ray", or the address of a Ray cluster: actors
    dtype: Literal["float32", "bfloat16"] = "float32"
    trainer: Literal["fsdp", "megatron"] = "fsdp"  # of nrl.backends.TRAINERS
    sampler: Literal["hf", "vllm", "vllm-cpu"] = "hf"  # vLLM: on a GPU, or a CPU
    engine: dict[str, Any] = attrs.field(factory=dict)  # vLLM's engine arguments, such as engine.max_model_len=2048
    inflight: Literal["wait", "keep", "abort"] = "wait"  # what becomes of rows under way, when weights are published
    dp: int = attrs.field(default=1, validator=ge(1))  # shards that the trainer splits a batch into
    layout: Layout = config.derived(lambda cfg: Layout(cfg.dp))  # all axes of the trainer's mesh; dp is the short form
    samplers: int = attrs.field(default=1, validator=ge(0))  # processes that sample; 0: on the trainer's slots
    verifiers: int = attrs.field(default=0, validator=ge(0))  # slots on which env runs; 0: in this process
    prompts: int = attrs.field(default=32, validator=ge(1))  # a step
    group_size: int = attrs.field(default=8, validator=ge(1))  # samples a prompt
    lag: int = attrs.field(default=0, validator=ge(0))  # publishes that a rollout may be early
    updates: int = attrs.field(default=1, validator=ge(1))  # optimizer steps a batch, each on a part of it
    aggregate: Literal["seq_mean", "token_mean"] = "seq_mean"  # the mean of the loss: over answers, or over tokens
    max_mismatch: float = config.derived(lambda cfg: 0.1 if cfg.model else 2.0, validator=gt(0))  # mismatch/kl at most
    max_tokens: int = attrs.field(default=16_384, validator=ge(1))  # of a micro-batch
    checkpointing: bool | Literal["selective"] = False  # recompute activations: takes time, saves memory
    optimizer: Optimizer = config.derived(lambda cfg: adamw(lr=1e-6) if cfg.model else EMBEDDED)
    sampling: Sampling = config.derived(lambda cfg: Sampling(max_new_tokens=512 if cfg.model else 4))
    warmup: int = config.derived(lambda cfg: 0 if cfg.model else 40, validator=ge(0))  # steps on rows with a "response"
    warmup_rows: int = attrs.field(default=128, validator=ge(1))
    warmup_optimizer: Optimizer = adamw(lr=1e-3)


def warm_up(cfg: Config, run: Run, trainer: Trainer, envs: Environments, tokenizer: Any) -> TrainState:
    """Supervised steps, so that the main loop has a reward to start from."""
    stream = nrl.batched(envs.tasks(cfg.seed + 1), cfg.warmup_rows, lambda rows: data.supervised(rows, tokenizer))
    return nrl.fit(run, "warmup", trainer, sft_loss, stream, cfg.warmup)


def evaluate(cfg: Config, envs: Environments, sampler: Sampler, i: int) -> nrl.batch.metrics.Metrics:
    """The mean reward of the most probable answers to another draw of prompts, now and then and after the last step."""
    if cfg.eval_data is None or ((i + 1) % cfg.evaluate_every and i + 1 != cfg.steps):
        return {}
    given = None if cfg.eval_data == "same" else cfg.eval_data
    some, greedy = envs.tasks(cfg.seed + 2, given), attrs.evolve(cfg.sampling, temperature=0.0)
    return nrl.measure(nrl.grade(sampler, envs.graded, data.epoch(some, cfg.evaluate_prompts), sampling=greedy))


def main(cfg: Config) -> None:
    """The whole of GRPO."""
    with nrl.run(cfg) as run, nrl.cluster(cfg.cluster) as cluster:
        slots = cluster.reserve((n := cfg.layout.slots) + cfg.samplers + cfg.verifiers, least=n)
        envs = nrl.environments(cfg.env, cfg.data, place=slots[n + cfg.samplers :], format=cfg.format, chat=cfg.chat)
        model = tiny.model_or(cfg.model, dtype=cfg.dtype, lora=cfg.lora, trust_remote_code=cfg.trust_remote_code)
        make, options = TRAINERS[cfg.trainer], {"max_tokens": cfg.max_tokens, "checkpointing": cfg.checkpointing}
        trainer = make(slots[:n], model, cfg.optimizer, layout=cfg.layout, **options)
        warm = make(trainer.mesh, model, cfg.warmup_optimizer, **options)
        sampler = SAMPLERS[cfg.sampler](slots[n : n + cfg.samplers] or slots[:n], model, cfg.sampling, **cfg.engine)
        loss = policy_loss(clip(0.2), aggregate=getattr(algos, cfg.aggregate))
        step = nrl.minibatched(trainer.train_step(loss), cfg.updates, cfg.seed)
        groups = nrl.rollouts(sampler, envs.env, envs.tasks(cfg.seed), n=cfg.group_size, seed=cfg.seed)
        policy = trainer.init(warm_up(cfg, run, warm, envs, sampler.tokenizer).params) if cfg.warmup else trainer
        state, stream = run.restore(policy=policy, stream=nrl.ahead(nrl.batched(groups, cfg.prompts), cfg.lag))
        nrl.publish(state.params, sampler, cfg.inflight)
        for i, batch in run.steps(stream):
            batch = nrl.assign(advantages(batch), old_logprobs=batch["rollout_logprobs"])
            state, metrics = step(state, batch)
            nrl.publish(state.params, sampler, cfg.inflight)
            found = nrl.summary(batch) | nrl.per_source(batch, envs.names) | evaluate(cfg, envs, sampler, i)
            check_mismatch(run.log(i, metrics, found, samples=nrl.samples(batch, sampler.tokenizer)), cfg.max_mismatch)
            run.save(i, policy=state, stream=stream)
        trainer.export(state.params, run.out / "model")


if __name__ == "__main__":
    nrl.launch(nrl.retrying(main), Config)
