"""An environment: `python examples/guess.py` teaches a tiny model to guess; `model=<name>` plays with it in a chat."""

import random
import re
from functools import partial
from typing import Any, Literal

import attrs
from attrs.validators import ge, gt

import nrl
from nrl import Layout, config, data, tiny
from nrl.algos import advantages, check_mismatch, grpo_loss, sft_loss
from nrl.backends import SAMPLERS, TRAINERS, Optimizer, Sampling, Trainer, TrainState, adamw
from nrl.envs import Environment, Step, Task, Turn

LARGEST, TURNS = 7, 3  # halving finds each of 7 numbers in 3 turns; who does not listen finds 3 of them
QUESTION, BRIEFLY = "Guess a number from 1 to 7.", "1-7\n"  # to a real model, and to the tiny one


def reset(task: Task) -> tuple[Any, Any]:
    number = random.Random(task["seed"]).randint(1, task.get("largest", LARGEST))  # one for all episodes of a group
    return (number, task.get("turns", TURNS), isinstance(task["prompt"], str)), task["prompt"]


def step(state: Any, turn: Turn) -> Step:
    number, left, plain = state
    found = re.findall(r"\d{1,9}", turn)
    guess = int(found[-1]) if found else None
    if guess == number or left == 1:
        return Step(state, float(guess == number), info={"turns_left": left - 1})
    hint = "a number, please" if guess is None else "higher" if guess < number else "lower"
    said = f" {hint}\n" if plain else [{"role": "user", "content": hint}]
    return Step((number, left - 1, plain), done=False, observation=said)


env = Environment(reset, step)


def lesson(draw: random.Random) -> Task:  # a guess after hints that have no meaning: how to play, and not how to win
    turns = (f"{draw.randint(1, 7)}<eos> {draw.choice(['higher', 'lower'])}\n" for _ in range(draw.randrange(TURNS)))
    return {"prompt": BRIEFLY + "".join(turns), "response": str(draw.randint(1, LARGEST))}


@attrs.frozen
class Config:
    model: str | None = None  # a folder or a hub name; none: the tiny model
    trust_remote_code: bool = False  # true: Python files that lie with the model may run
    data: str | None = None  # a file of rows with "prompt", and "largest" and "turns"; none: the numbers from 1 to 7
    chat: bool = config.derived(lambda cfg: cfg.model is not None)  # false: questions and hints are plain text
    evaluate_every: int = attrs.field(default=20, validator=ge(1))  # steps; with other numbers
    steps: int = 120
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
    group_size: int = attrs.field(default=16, validator=ge(1))  # episodes a prompt
    lag: int = attrs.field(default=0, validator=ge(0))  # publishes that a rollout may be early
    max_mismatch: float = config.derived(lambda cfg: 0.1 if cfg.model else 2.0, validator=gt(0))  # mismatch/kl at most
    max_tokens: int = attrs.field(default=16_384, validator=ge(1))  # of a micro-batch
    optimizer: Optimizer = config.derived(lambda cfg: adamw(lr=1e-6 if cfg.model else 5e-4, betas=(0.9, 0.95)))
    sampling: Sampling = config.derived(lambda cfg: Sampling(max_new_tokens=512 if cfg.model else 2))  # of a turn
    warmup: int = config.derived(lambda cfg: 0 if cfg.model else 40, validator=ge(0))  # supervised, of the tiny model


def main(cfg: Config) -> None:
    """GRPO, over episodes of several turns."""
    with nrl.run(cfg) as run, nrl.cluster(cfg.cluster) as cluster:
        asked = partial(data.tasks, cfg.data or [{"prompt": QUESTION if cfg.chat else BRIEFLY}], chat=cfg.chat)
        slots, make = cluster.reserve(cfg.layout.slots + cfg.samplers, least=cfg.layout.slots), TRAINERS[cfg.trainer]
        model = tiny.model_or(cfg.model, dtype=cfg.dtype, trust_remote_code=cfg.trust_remote_code)
        trainer = make(slots[: cfg.layout.slots], model, cfg.optimizer, layout=cfg.layout, max_tokens=cfg.max_tokens)
        sampler = SAMPLERS[cfg.sampler](slots[cfg.layout.slots :] or slots, model, cfg.sampling, **cfg.engine)
        train, greedy = trainer.train_step(grpo_loss), attrs.evolve(cfg.sampling, temperature=0.0)
        groups = nrl.rollouts(sampler, env, asked(seed=cfg.seed), n=cfg.group_size, seed=cfg.seed)
        policy: Trainer | TrainState = trainer
        if cfg.warmup:
            lessons = data.tasks([lesson(random.Random(i)) for i in range(4096)], seed=cfg.seed, chat=False)
            words = data.parse_special(sampler.tokenizer)  # the turns within a lesson end with its <eos>
            taught = nrl.batched(lessons, 128, collate=partial(data.supervised, tokenizer=words))
            warm = make(trainer.mesh, model, adamw(lr=1e-3))
            policy = trainer.init(nrl.fit(run, "warmup", warm, sft_loss, taught, cfg.warmup).params)
        state, stream = run.restore(policy=policy, stream=nrl.ahead(nrl.batched(groups, cfg.prompts), cfg.lag))
        nrl.publish(state.params, sampler)
        for i, batch in run.steps(stream):
            batch = nrl.assign(advantages(batch), old_logprobs=batch["rollout_logprobs"])
            state, metrics = train(state, batch)
            nrl.publish(state.params, sampler)
            found = nrl.summary(batch)
            if not (i + 1) % cfg.evaluate_every:
                played = nrl.grade(sampler, env, data.epoch(asked(), 64), sampling=greedy, seed=10**6)
                found |= nrl.measure(played)
            check_mismatch(run.log(i, metrics, found, samples=nrl.samples(batch, sampler.tokenizer)), cfg.max_mismatch)
            run.save(i, policy=state, stream=stream)
        trainer.export(state.params, run.out / "model")


if __name__ == "__main__":
    nrl.launch(nrl.retrying(main), Config)
