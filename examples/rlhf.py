"""RLHF: `python examples/rlhf.py` learns a reward model from pairs, and then trains a policy on it.

`model=<folder> reward=<folder>` takes real models; `reward` is what `examples/reward_model.py` exported.
"""

from typing import Any, Literal

import attrs
from attrs.validators import ge, gt

import nrl
from nrl import Layout, algos, config, data, tiny
from nrl.backends import SAMPLERS, TRAINERS, Optimizer, Sampling, Trainer, TrainState, adamw, load_tokenizer
from nrl.envs import Environment, Step, Task, Trace, Turn, number, single_turn
from nrl.errors import ConfigError


@attrs.frozen
class Config:
    model: str | None = None  # a folder or a hub name; none: the tiny model
    reward: str | None = None  # a folder or a hub name of a reward model; none: one that is trained here, on sums
    trust_remote_code: bool = False  # true: Python files that lie with the model may run
    data: str = "arithmetic"  # a file or a dataset with "question" (or "prompt", "messages")
    env: str | dict[str, Any] | None = None  # always none: a reward model verifies here, others in examples/grpo.py
    format: str | None = None  # from the rows of a well-known dataset
    chat: bool = True  # false: prompts that are texts stay texts, as base models need them
    steps: int = 100
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
    prompts: int = attrs.field(default=64, validator=ge(1))  # a step
    group_size: int = attrs.field(default=4, validator=ge(1))  # samples a prompt
    kl: float = config.derived(lambda cfg: 0.05 if cfg.model else 0.3, validator=ge(0))  # cost of a nat of divergence
    max_mismatch: float = config.derived(lambda cfg: 0.1 if cfg.model else 2.0, validator=gt(0))  # mismatch/kl at most
    max_tokens: int = attrs.field(default=16_384, validator=ge(1))  # of a micro-batch
    optimizer: Optimizer = config.derived(lambda cfg: adamw(lr=1e-6 if cfg.model else 7e-4))
    sampling: Sampling = config.derived(lambda cfg: Sampling(max_new_tokens=512 if cfg.model else 4))
    warmup: int = config.derived(lambda cfg: 0 if cfg.model else 40, validator=ge(0))  # supervised, of the tiny policy
    judging: int = config.derived(lambda cfg: 0 if cfg.reward else 300, validator=ge(0))  # steps of the tiny judge


def main(cfg: Config) -> None:
    """The whole of RLHF, by RLOO."""
    if cfg.model and not cfg.reward:
        raise ConfigError(f"rlhf: model={cfg.model} needs reward=, what examples/reward_model.py has exported")
    if cfg.env:
        raise ConfigError(f"rlhf: a reward model verifies, so it takes no env={cfg.env}; examples/grpo.py does")
    with nrl.run(cfg) as run, nrl.cluster(cfg.cluster) as cluster:
        tasks = data.tasks(cfg.data, seed=cfg.seed, format=cfg.format, chat=cfg.chat)
        slots, make = cluster.reserve(cfg.layout.slots + cfg.samplers, least=cfg.layout.slots), TRAINERS[cfg.trainer]
        model = tiny.model_or(cfg.model, dtype=cfg.dtype, trust_remote_code=cfg.trust_remote_code)
        judge = tiny.model_or(cfg.reward, head="reward", dtype=cfg.dtype, trust_remote_code=cfg.trust_remote_code)
        trainer = make(slots[: cfg.layout.slots], model, cfg.optimizer, layout=cfg.layout, max_tokens=cfg.max_tokens)
        rewarder = make(trainer.mesh, judge, adamw(lr=2e-3), max_tokens=cfg.max_tokens)
        sampler = SAMPLERS[cfg.sampler](slots[cfg.layout.slots :] or slots, model, cfg.sampling, **cfg.engine)
        step, words = trainer.train_step(algos.reinforce_loss), load_tokenizer(judge)
        if cfg.judging:
            pairs = nrl.batched(data.tasks("arithmetic", seed=cfg.seed + 1), 64, lambda x: data.preferences(x, words))
            verdicts = nrl.fit(run, "reward", rewarder, algos.bradley_terry_loss(0.01), pairs, cfg.judging).params
        else:
            verdicts = rewarder.load()
        verify = nrl.scored_by(verdicts, words)

        async def answer(task: Task, turn: Turn) -> Step:
            trace = Trace(task["prompt"], [turn])
            known = {"right": number(task, trace).reward} if "answer" in task else {}  # which the policy is not told
            return Step(task, await verify(task, trace), info=known)

        env = Environment(single_turn(verify).reset, answer)
        stream = nrl.batched(nrl.rollouts(sampler, env, tasks, n=cfg.group_size, seed=cfg.seed), cfg.prompts)
        policy: Trainer | TrainState = trainer
        if cfg.warmup:
            policy = trainer.init(nrl.fit(run, "warmup", trainer, algos.sft_loss, tiny.sums(128), cfg.warmup).params)
        reference = trainer.freeze(policy.params) if isinstance(policy, TrainState) else trainer.load()
        state, stream = run.restore(policy=policy, stream=stream)
        nrl.publish(state.params, sampler)
        for i, batch in run.steps(stream):
            measured = nrl.summary(batch)
            batch = nrl.assign(batch, ref_logprobs=trainer.logprobs(reference, batch))
            batch = algos.penalized_rewards(batch, algos.kl(algos.k1, cfg.kl))
            batch = algos.advantages(batch, algos.from_rewards(algos.leave_one_out))
            state, metrics = step(state, batch)
            nrl.publish(state.params, sampler)
            numbers = run.log(i, metrics, measured, samples=nrl.samples(batch, sampler.tokenizer))
            algos.check_mismatch(numbers, cfg.max_mismatch)
            run.save(i, policy=state, stream=stream)
        trainer.export(state.params, run.out / "model")


if __name__ == "__main__":
    nrl.launch(nrl.retrying(main), Config)
