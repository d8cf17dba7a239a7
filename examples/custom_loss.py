"""A new algorithm: `python examples/custom_loss.py` writes a loss in ten lines, unit-tests it and runs it."""

from typing import Any, Literal

import attrs
import torch
from attrs.validators import ge, gt

import nrl
from nrl import Layout, config, data, tiny
from nrl.algos import advantages, from_rewards, leave_one_out, sft_loss, token_mean, token_ratio
from nrl.backends import SAMPLERS, TRAINERS, adamw


def my_loss(out: Any, batch: nrl.Batch) -> tuple[nrl.Mean, nrl.Metrics]:
    """REINFORCE, each token weighted by its detached importance ratio, at most 4."""
    ratio = token_ratio(out["logprobs"], batch).exp()
    loss = -(ratio.clamp(max=4).detach() * batch["advantages"] * out["logprobs"])
    return token_mean(loss, batch["loss_mask"]), {"ratio": token_mean(ratio.detach(), batch["loss_mask"])}


def check() -> None:
    """The mathematics by hand: outputs are a leaf tensor, and no model is needed."""
    logprobs = torch.tensor([[0.0, -1.0, -2.0]], requires_grad=True)
    batch = nrl.assign(
        nrl.Batch({}, batch_size=[1]),
        input_ids=torch.tensor([[5, 6, 7]]),
        loss_mask=torch.tensor([[False, True, True]]),
        advantages=torch.tensor([[0.0, 2.0, 2.0]]),
        old_logprobs=torch.tensor([[0.0, -1.0, -4.0]]),
    )
    loss, metrics = my_loss({"logprobs": logprobs}, batch)
    loss.total.backward()
    assert logprobs.grad is not None
    expected = torch.tensor([[0.0, -2.0, -8.0]])  # exp(2) > 4, so the last token counts four times
    torch.testing.assert_close(logprobs.grad, expected)
    assert nrl.finalize({"loss": loss})["loss"] == (1 * 2 * 1 + 4 * 2 * 2) / 2
    print("the loss is what it should be:", nrl.finalize(metrics))


@attrs.frozen
class Config:
    model: str | None = None  # a folder or a hub name; none: the tiny model
    trust_remote_code: bool = False  # true: Python files that lie with the model may run
    env: str | dict[str, Any] = "number"
    data: str | dict[str, Any] | None = None
    steps: int = 100
    warmup: int = attrs.field(default=40, validator=ge(0))  # 0 for a real model
    lr: float = attrs.field(default=5e-4, validator=gt(0))
    max_new_tokens: int = attrs.field(default=4, validator=ge(1))
    seed: int = 0
    out: str | None = None
    cluster: str = "local"
    trainer: Literal["fsdp", "megatron"] = "fsdp"  # of nrl.backends.TRAINERS
    sampler: Literal["hf"] = "hf"
    dp: int = attrs.field(default=1, validator=ge(1))
    layout: Layout = config.derived(lambda cfg: Layout(cfg.dp))  # all axes of the trainer's mesh; dp is the short form


def main(cfg: Config) -> None:
    """The loop of `grpo.py` with another loss and another estimator."""
    with nrl.run(cfg) as run, nrl.cluster(cfg.cluster) as cluster:
        envs = nrl.environments(cfg.env, cfg.data)
        slots, make = cluster.reserve(cfg.layout.slots + 1), TRAINERS[cfg.trainer]
        model = tiny.model_or(cfg.model, trust_remote_code=cfg.trust_remote_code)
        warm = make(slots[: cfg.layout.slots], model, adamw(lr=1e-3), layout=cfg.layout)
        trainer = make(warm.mesh, model, adamw(lr=cfg.lr, betas=(0.9, 0.95)))
        sampling = nrl.Sampling(max_new_tokens=cfg.max_new_tokens)
        sampler = SAMPLERS[cfg.sampler](slots[cfg.layout.slots :], model, sampling)
        learn, step = warm.train_step(sft_loss), trainer.train_step(my_loss)
        rows = nrl.batched(envs.tasks(cfg.seed + 1), 128, collate=lambda rows: data.supervised(rows, sampler.tokenizer))
        groups = nrl.rollouts(sampler, envs.env, envs.tasks(cfg.seed), n=8, seed=cfg.seed)
        state = warm.init()
        for i, batch in run.steps(rows, cfg.warmup, name="warmup"):
            state, metrics = learn(state, batch)
            run.log(i, metrics)
        state = trainer.init(state.params)
        nrl.publish(state.params, sampler)
        for i, batch in run.steps(nrl.batched(groups, 32)):
            batch = advantages(batch, from_rewards(leave_one_out))
            batch = nrl.assign(batch, old_logprobs=batch["rollout_logprobs"])
            state, metrics = step(state, batch)
            nrl.publish(state.params, sampler)
            run.log(i, metrics, nrl.summary(batch))


if __name__ == "__main__":
    check()
    nrl.launch(nrl.retrying(main), Config)
