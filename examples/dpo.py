"""DPO: `python examples/dpo.py` makes a tiny model prefer right sums; `model=<folder> data=<source>`: real ones."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import attrs
from attrs.validators import ge, gt

import nrl
from nrl import Layout, config, data, tiny
from nrl.algos import dpo_loss
from nrl.backends import TRAINERS, Optimizer, Schedule, adamw, load_tokenizer
from nrl.batch import Batch


@attrs.frozen
class Config:
    model: str | None = None  # a folder or a hub name; none: the tiny model
    trust_remote_code: bool = False  # true: Python files that lie with the model may run
    lora: str | Mapping[str, Any] | None = None  # arguments of peft.LoraConfig, or a folder in its format
    data: str = "arithmetic"  # rows with "prompt", "chosen" and "rejected"
    eval_data: str | None = config.derived(lambda cfg: None if cfg.model else "arithmetic")  # what eval/* is over
    format: str | None = None  # from the rows of a well-known dataset
    chat: bool = True  # false: prompts that are texts stay texts, as base models need them
    steps: int = 100
    seed: int = 0
    out: str | None = None  # none: a new folder under runs/; that of an earlier run: go on with it
    checkpoints: nrl.Checkpoints = config.derived(
        lambda cfg: nrl.Checkpoints(best="eval/accuracy" if cfg.eval_data else None)
    )
    sinks: tuple[str, ...] = ()  # besides the terminal and files: "wandb", "tensorboard", "mlflow"
    cluster: str = "local"  # "local": this process; "ray", or the address of a Ray cluster: actors
    dtype: Literal["float32", "bfloat16"] = "float32"
    trainer: Literal["fsdp", "megatron"] = "fsdp"  # of nrl.backends.TRAINERS
    dp: int = attrs.field(default=1, validator=ge(1))  # shards that the trainer splits a batch into
    layout: Layout = config.derived(lambda cfg: Layout(cfg.dp))  # all axes of the trainer's mesh; dp is the short form
    pairs: int = attrs.field(default=64, validator=ge(1))  # a step
    beta: float = attrs.field(default=0.1, validator=gt(0))
    max_length: int = attrs.field(default=1024, validator=ge(1))  # tokens; longer rows are left out and counted
    max_tokens: int = attrs.field(default=16_384, validator=ge(1))  # of a micro-batch
    evaluate_every: int = attrs.field(default=10, validator=ge(1))  # steps
    evaluate_pairs: int = attrs.field(default=256, validator=ge(1))
    optimizer: Optimizer = config.derived(
        lambda cfg: adamw(lr=5e-7 if cfg.model else 1e-3, schedule=Schedule(steps=cfg.steps))
    )


def main(cfg: Config) -> None:
    """The whole of DPO."""
    with nrl.run(cfg) as run, nrl.cluster(cfg.cluster) as cluster:
        model = tiny.model_or(cfg.model, dtype=cfg.dtype, lora=cfg.lora, trust_remote_code=cfg.trust_remote_code)
        tokenizer = load_tokenizer(model)
        slots, make = cluster.reserve(cfg.layout.slots), TRAINERS[cfg.trainer]
        trainer = make(slots, model, cfg.optimizer, layout=cfg.layout, max_tokens=cfg.max_tokens)
        loss = dpo_loss(cfg.beta)
        step, reference = trainer.train_step(loss), trainer.load()

        def with_reference(batch: Batch) -> Batch:
            return nrl.assign(batch, ref_logprobs=trainer.logprobs(reference, batch))

        collate = partial(data.preferences, tokenizer=tokenizer)
        tasks = partial(data.tasks, format=cfg.format, chat=cfg.chat, tokenizer=tokenizer, max_tokens=cfg.max_length)
        tasks = partial(tasks, collate=data.preferences, positions=trainer.positions)
        stream = nrl.batched(tasks(cfg.data, seed=cfg.seed), cfg.pairs, collate=collate)
        eval_tasks = tasks(cfg.eval_data, seed=cfg.seed + 1) if cfg.eval_data else None
        eval_batch = with_reference(collate(data.epoch(eval_tasks, cfg.evaluate_pairs))) if eval_tasks else None
        state, stream = run.restore(policy=trainer, stream=stream)
        for i, batch in run.steps(stream):
            state, metrics = step(state, with_reference(batch))
            evaluated = {}
            if eval_batch is not None and (i % cfg.evaluate_every == 0 or i + 1 == cfg.steps):
                evaluated = nrl.evaluate(loss, trainer, state.params, eval_batch)
            run.log(i, metrics, evaluated)
            run.save(i, policy=state, stream=stream)
        trainer.export(state.params, run.out / "model")


if __name__ == "__main__":
    nrl.launch(nrl.retrying(main), Config)
