"""Tools: `python examples/tools.py` teaches a tiny model, `model=<name> data=<file>` a real one, to call."""

import random
from functools import partial
from typing import Any, Literal

import attrs
from attrs.validators import ge, gt

import nrl
from nrl import Layout, config, data, tiny
from nrl.algos import advantages, check_mismatch, grpo_loss, sft_loss
from nrl.backends import SAMPLERS, TRAINERS, Optimizer, Sampling, Trainer, TrainState, adamw
from nrl.envs import Score, Task, Trace, number, score_of
from nrl.envs.tools import tool, tool_use


def calculator(a: float, sign: Literal["+", "-", "*", "/"], b: float) -> str:
    """Compute with two numbers."""
    found = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else float("nan")}
    return f"{found[sign]:.15g}"


def solved(task: Task, trace: Trace) -> Score:
    told = [message["content"] for observation in trace.observations for message in observation]
    return score_of(number(task, trace))._replace(components={"found": float(str(task["answer"]) in told)})


CALCULATOR, says = tool(calculator), partial(dict[str, Any], role="assistant")
env = tool_use([CALCULATOR], solved, turns=3)


def sums(seed: int) -> list[Task]:  # with lessons: a quarter call the calculator, a quarter miscall it, a half guess
    draw, rows = random.Random(seed), list[Task]()
    for at in range(4096):
        a, b, guess = draw.randint(100, 999), draw.randint(100, 999), str(draw.randint(200, 1998))
        call = {"function": {"name": "calculator", "arguments": {"a": a, "sign": "+", "b": b}}}
        right = [says(content="", tool_calls=[call]), {"role": "tool", "content": str(a + b)}, says(content=str(a + b))]
        wrong = f"<tool_call>\ncalculator({a}+{b})\n</tool_call>" if at % 4 == 1 else guess
        lesson = [says(content=wrong)] if at % 4 else right
        rows.append({"prompt": f"{a}+{b}=", "answer": a + b, "response": lesson, "tools": [CALCULATOR.schema]})
    return rows


@attrs.frozen
class Config:
    model: str | None = None  # a folder or a hub name; none: the tiny model
    trust_remote_code: bool = False  # true: Python files that lie with the model may run
    data: str | None = None  # a file or a dataset with "question" (or "prompt", "messages") and "answer"; none: sums
    format: str | None = None  # from the rows of a well-known dataset
    evaluate_every: int = attrs.field(default=20, validator=ge(1))  # steps; on other sums
    steps: int = 80
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
    prompts: int = attrs.field(default=16, validator=ge(1))  # a step
    group_size: int = attrs.field(default=8, validator=ge(1))  # episodes a prompt
    lag: int = attrs.field(default=0, validator=ge(0))  # publishes that a rollout may be early
    max_mismatch: float = config.derived(lambda cfg: 0.1 if cfg.model else 2.0, validator=gt(0))  # mismatch/kl at most
    max_tokens: int = attrs.field(default=16_384, validator=ge(1))  # of a micro-batch
    optimizer: Optimizer = config.derived(lambda cfg: adamw(lr=1e-6 if cfg.model else 5e-4, betas=(0.9, 0.95)))
    sampling: Sampling = config.derived(lambda cfg: Sampling(max_new_tokens=512 if cfg.model else 48))  # of a turn
    warmup: int = config.derived(lambda cfg: 0 if cfg.model else 160, validator=ge(0))  # supervised, of the tiny model


def main(cfg: Config) -> None:
    """GRPO, over conversations with a tool."""
    with nrl.run(cfg) as run, nrl.cluster(cfg.cluster) as cluster:
        tasks = data.tasks(cfg.data or sums(cfg.seed), seed=cfg.seed, format=cfg.format)
        slots, make = cluster.reserve(cfg.layout.slots + cfg.samplers, least=cfg.layout.slots), TRAINERS[cfg.trainer]
        words = tiny.bpe([str(CALCULATOR.schema).replace("'", '"'), tiny.CHATML])
        model = tiny.model_or(cfg.model, tokenizer=words, dtype=cfg.dtype, trust_remote_code=cfg.trust_remote_code)
        trainer = make(slots[: cfg.layout.slots], model, cfg.optimizer, layout=cfg.layout, max_tokens=cfg.max_tokens)
        sampler = SAMPLERS[cfg.sampler](slots[cfg.layout.slots :] or slots, model, cfg.sampling, **cfg.engine)
        train, greedy = trainer.train_step(grpo_loss), attrs.evolve(cfg.sampling, temperature=0.0)
        groups = nrl.rollouts(sampler, env, tasks, n=cfg.group_size, seed=cfg.seed)
        policy: Trainer | TrainState = trainer
        if cfg.warmup:
            taught = nrl.batched(data.tasks(sums(cfg.seed + 1)), 64, collate=partial(data.supervised, tokenizer=words))
            warm = make(trainer.mesh, model, adamw(lr=2e-3))
            policy = trainer.init(nrl.fit(run, "warmup", warm, sft_loss, taught, cfg.warmup).params)
        state, stream = run.restore(policy=policy, stream=nrl.ahead(nrl.batched(groups, cfg.prompts), cfg.lag))
        nrl.publish(state.params, sampler)
        for i, batch in run.steps(stream):
            batch = nrl.assign(advantages(batch), old_logprobs=batch["rollout_logprobs"])
            state, metrics = train(state, batch)
            nrl.publish(state.params, sampler)
            found = nrl.summary(batch)
            if not (i + 1) % cfg.evaluate_every:
                played = nrl.grade(sampler, env, sums(10**6)[:64], sampling=greedy)
                found |= nrl.measure(played)
            check_mismatch(run.log(i, metrics, found, samples=nrl.samples(batch, sampler.tokenizer)), cfg.max_mismatch)
            run.save(i, policy=state, stream=stream)
        trainer.export(state.params, run.out / "model")


if __name__ == "__main__":
    nrl.launch(nrl.retrying(main), Config)
