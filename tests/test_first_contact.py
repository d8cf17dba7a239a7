"""Mistakes of a first day: each is an error of nrl's that names the argument and says what to give."""

# A type checker would find most of them, too, and those who make them have none
# mypy: disable-error-code="arg-type, call-arg, list-item, misc"

import functools
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import attrs
import numpy as np
import pytest
import torch
import transformers

import nrl
from nrl import algos, data, tiny
from nrl.algos import sft_loss, token_mean
from nrl.backends import Group, Model, Schedule, adamw, fsdp, hf, megatron, muon, openai, own, sgd, vllm
from nrl.data import counting
from nrl.envs import exact, single_turn
from nrl.errors import (
    ArgumentError,
    ColumnError,
    ConfigError,
    DataError,
    EnvError,
    LossResultError,
    MissingColumn,
    MissingOutput,
    NoGradient,
    NotFinite,
    NrlError,
)
from nrl.runtime import Layout

type Made = SimpleNamespace
type Mistake = Callable[[Made], object]


@attrs.frozen
class Config:
    out: str
    steps: int = 2


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.Qwen3Config(vocab_size=64, num_hidden_layers=1, head_dim=4, **sizes)
    with nrl.cluster("local") as cluster:
        slots, model = cluster.reserve(2), tiny.model()
        trainer = fsdp.trainer(slots[:1], model, adamw(lr=1e-3))
        yield SimpleNamespace(
            cluster=cluster,
            slots=slots,
            model=model,
            adamw=adamw(lr=1e-3),
            config=config,
            hf_model=transformers.AutoModelForCausalLM.from_config(config),
            tokenizer=tiny.tokenizer(),
            trainer=trainer,
            state=trainer.init(),
            sampler=hf.sampler(slots[1:], model, nrl.Sampling(max_new_tokens=3)),
            env=single_turn(exact),
            tasks=data.tasks("arithmetic"),
            batch=tiny.sums(4).take(1)[0],
            out=str(tmp_path_factory.mktemp("run")),
        )


def trained(loss: Any) -> Mistake:
    return lambda made: made.trainer.train_step(loss)(made.trainer.init(), made.batch)[1].result()


def stepped(stream: Callable[[Made], Any], n: Any = None) -> Mistake:
    def mistake(made: Made) -> None:
        with nrl.run(Config(out=made.out)) as run:
            next(run.steps(stream(made), n))

    return mistake


def per_token(out: Any, batch: Any) -> Any:
    return token_mean(-out["logprobs"], batch["loss_mask"])


TRAINER: list[tuple[Mistake, str, str]] = [
    (lambda made: fsdp.trainer(made.slots, made.hf_model), "model", "give nrl.Model('folder or name on the hub')"),
    (
        lambda made: fsdp.trainer(made.slots, "Qwen/Qwen3-0.6B", made.adamw),
        "model",
        "give nrl.Model('Qwen/Qwen3-0.6B')",
    ),
    (lambda made: fsdp.trainer(made.slots, {"model_type": "qwen3"}, made.adamw), "model", "give nrl.Model(config)"),
    (lambda made: fsdp.trainer(made.slots, made.config, made.adamw), "model", "nrl.Model(config.to_dict())"),
    (lambda made: fsdp.trainer(made.slots, made.tokenizer, made.adamw), "model", "tokenizer=tokenizer"),
    (lambda made: fsdp.trainer(made.slots, made.model, torch.optim.AdamW), "optimizer", "own(torch.optim.AdamW, lr="),
    (
        lambda made: fsdp.trainer(made.slots, made.model, torch.optim.SGD(made.hf_model.parameters(), lr=1.0)),
        "optimizer",
        "own(torch.optim.SGD, lr=1e-6)",
    ),
    (
        lambda made: fsdp.trainer(made.slots, made.model, functools.partial(torch.optim.AdamW, lr=1.0)),
        "optimizer",
        "nrl.backends.own(make, lr=1e-6)",
    ),
    (lambda made: fsdp.trainer(made.slots, made.model, adamw), "optimizer", "call it: adamw(lr=1e-6)"),
    (lambda made: fsdp.trainer(made.slots, made.model, 1e-3), "optimizer", "give adamw(lr=0.001)"),
    (lambda made: fsdp.trainer(made.slots, made.model, "adamw"), "optimizer", "give adamw(lr=1e-6)"),
    (lambda made: fsdp.trainer(made.slots, made.model), "optimizer", "is missing; give adamw(lr=1e-6)"),
    (lambda made: fsdp.trainer(made.model, made.adamw), "place", "give slots, as cluster.reserve(8)"),
    (lambda made: fsdp.trainer(2, made.model, made.adamw), "place", "is 2; give slots, as cluster.reserve(8)"),
    (lambda made: fsdp.trainer(made.cluster, made.model, made.adamw), "place", "cluster.reserve(1) on one device"),
    (lambda made: fsdp.trainer(made.slots, made.model, made.adamw, max_tokens="9"), "max_tokens", "without quotes"),
    (lambda made: fsdp.trainer(made.slots, made.model, made.adamw, max_tokens=0), "max_tokens", "1 or more"),
    (lambda made: fsdp.trainer(made.slots, made.model, made.adamw, device="gpu"), "device", "give 'cpu' or 'cuda'"),
    (lambda made: fsdp.trainer(made.slots, made.model, made.adamw, offload=True), "offload", "give 'cpu' or None"),
    (lambda made: fsdp.trainer(made.slots, made.model, made.adamw, layout=2), "layout", "give a Layout or None"),
    (lambda made: fsdp.trainer(made.slots, made.model, made.adamw, packing="flat"), "packing", "nrl.Rectangles"),
    (lambda made: megatron.trainer(made.slots, made.hf_model, made.adamw), "model", "give nrl.Model("),
    (lambda made: megatron.trainer(made.slots, made.model, torch.optim.AdamW), "optimizer", "give adamw(lr=1e-6)"),
]

SAMPLER: list[tuple[Mistake, str, str]] = [
    (lambda made: hf.sampler(made.slots, made.hf_model), "model", "give nrl.Model("),
    (lambda made: hf.sampler(made.slots, "Qwen/Qwen3-0.6B"), "model", "give nrl.Model('Qwen/Qwen3-0.6B')"),
    (lambda made: hf.sampler(made.slots, made.model, {"top_k": 1}), "sampling", "give nrl.Sampling(**sampling)"),
    (lambda made: hf.sampler(made.slots, made.model, 0.7), "sampling", "give nrl.Sampling(temperature=0.7)"),
    (lambda made: hf.sampler(1, made.model), "place", "give slots"),
    (lambda made: vllm.sampler(made.slots, made.hf_model), "model", "give nrl.Model("),
    (lambda made: openai.sampler("http://localhost:1/v1", "gpt"), "model", "give nrl.Model('gpt')"),
    (lambda made: openai.sampler(None, made.model), "url", "give a text or several entries"),
    (lambda made: nrl.publish(made.sampler, made.state.params), "params", "give state.params, or trainer.load()"),
    (lambda made: nrl.publish(made.state, made.sampler), "params", "give state.params"),
    (lambda made: nrl.publish(made.state.params, [made.sampler]), "sampler", "give a sampler"),
]

RECORDS: list[tuple[Mistake, str, str]] = [
    (lambda made: nrl.Sampling(max_tokens=3), "max_tokens", "use max_new_tokens"),
    (lambda made: nrl.Sampling(temprature=1.0), "temprature", "use temperature"),
    (lambda made: nrl.Sampling(temperature=1e-300), "temperature", "give 0, which is greedy, or a number from 0.001"),
    (lambda made: nrl.Sampling(temperature=-1.0), "temperature", "'temperature' must be >= 0: -1.0"),
    (lambda made: nrl.Sampling(top_k=-1), "top_k", "top_k is -1; give 0 for all tokens"),
    (lambda made: nrl.Sampling(top_p=1.5), "top_p", "'top_p' must be <= 1: 1.5"),
    (lambda made: nrl.Sampling(stop=5), "stop", "give a text or several entries, each a text"),
    (lambda made: Model("x", torch_dtype=torch.bfloat16), "torch_dtype", "use dtype"),
    (lambda made: Model("x", dtype=torch.bfloat16), "dtype", "give 'float32' or 'bfloat16' or 'float64'"),
    (lambda made: Model(made.hf_model), "source", "give where it was loaded from"),
    (lambda made: Model(made.config), "source", "nrl.Model(config.to_dict())"),
    (lambda made: Model(None), "source", "give a folder, a name on the Hugging Face hub"),
    (lambda made: adamw(learning_rate=1e-3), "learning_rate", "use lr"),
    (lambda made: adamw(1e-3, max_grad_norm=1.0), "max_grad_norm", "use clip"),
    (lambda made: adamw(1e-3, schedule="linear"), "schedule", "give Schedule('linear', steps=1000)"),
    (lambda made: adamw(1e-3, schedule=torch.optim.lr_scheduler.LambdaLR), "schedule", "schedule(0) is the error"),
    (
        lambda made: adamw(1e-3, schedule=cast(Any, lambda step: "fast")),
        "schedule",
        "schedule(0) is 'fast'; give a function",
    ),
    (lambda made: adamw(), "lr", "is missing; give a finite number"),
    (lambda made: adamw(lr=math.inf), "lr", "is inf; give a finite number"),
    (lambda made: adamw(lr=-1.0), "lr", "'lr' must be >= 0: -1.0"),
    (lambda made: adamw(made.hf_model.parameters(), lr=1e-3), "lr", "is a generator; give a finite number"),
    (lambda made: adamw(1e-3, betas=0.9), "betas", "give (a finite number, a finite number)"),
    (lambda made: adamw(1e-3, schedule="cosine"), "schedule", "give Schedule('cosine', steps=1000)"),
    (lambda made: adamw(1e-3, groups=["embed"]), "groups", "several entries, each a Group"),
    (lambda made: sgd(1e-3, momentum=math.nan), "momentum", "give a finite number"),
    (lambda made: muon(1e-3, scale="spectral"), "scale", "give 'match_rms_adamw' or 'original'"),
    (lambda made: own(5, lr=1e-3), "make", "give a function"),
    (lambda made: Group("x", factor=math.inf), "factor", "give a finite number"),
    (lambda made: Schedule("linear", total_steps=10), "total_steps", "use steps"),
    (lambda made: Layout(tensor_parallel_size=2), "tensor_parallel_size", "use tp"),
    (lambda made: Layout(dp="2"), "dp", "give a whole number, without quotes"),
    (lambda made: nrl.Executable("x", pip=["a"]), "pip", "use requirements"),
]

STREAMS: list[tuple[Mistake, str, str]] = [
    (lambda made: nrl.batched([1, 2, 3], 2), "stream", "nrl.data.counting(items.__getitem__)"),
    (lambda made: nrl.batched(counting(), "2"), "n", "give a whole number, without quotes"),
    (lambda made: nrl.batched(counting(), 2, collate=5), "collate", "give a function"),
    (lambda made: nrl.ahead([1, 2], 1), "stream", "give a stream"),
    (lambda made: nrl.ahead((i for i in range(3)), 1), "stream", "give a stream, which has take, state and restore"),
    (lambda made: nrl.filtered([1], bool), "stream", "give a stream"),
    (lambda made: nrl.drop_uniform([made.batch]), "stream", "give a stream"),
    (lambda made: nrl.drop_uniform(made.batch), "stream", "give a stream"),
    (lambda made: nrl.fresh([1], 1, made.sampler), "stream", "give a stream"),
    (lambda made: nrl.fresh(counting(), 1, None), "sampler", "give the sampler"),
    (lambda made: nrl.cut([1], 2.0), "stream", "give a stream"),
    (lambda made: nrl.oversample([1], 2), "stream", "give a stream"),
    (lambda made: nrl.partial([1], 2), "stream", "give a stream"),
    (lambda made: nrl.refill([1], 2), "stream", "give a stream"),
    (lambda made: counting().take("2"), "take(n)", "give a whole number"),
    (stepped(lambda made: range(3)), "stream", "run.steps: stream is range(0, 3); give a stream"),
    (stepped(lambda made: [made.batch]), "stream", "give a stream"),
    (stepped(lambda made: 3), "stream", "run.steps(stream, n)"),
    (stepped(lambda made: made.batch), "stream", "give a stream"),
    (stepped(lambda made: torch.utils.data.DataLoader([1])), "stream", "is a DataLoader; give a stream"),
    (stepped(lambda made: counting(), "2"), "n", "give a whole number or None, without quotes"),
    (lambda made: nrl.rollouts(made.sampler, made.env, [{"prompt": "1+1="}], n=2), "tasks", "nrl.data.tasks(rows)"),
    (lambda made: nrl.rollouts(made.sampler, made.env, made.tasks, n="2"), "n", "give a whole number"),
    (lambda made: nrl.rollouts(made.sampler, made.env, made.tasks), "n", "n is missing; give a whole number"),
    (lambda made: nrl.rollouts(made.sampler, made.env, made.tasks, group_size=2), "group_size", "use n"),
    (lambda made: nrl.rollouts(made.trainer, made.env, made.tasks, n=2), "sampler", "give a sampler"),
    (lambda made: nrl.rollout(made.sampler, made.env, made.tasks, n=2), "tasks", "several entries, each a mapping"),
    (lambda made: nrl.rollout(made.sampler, made.env, {"prompt": "1+1="}, n=2), "tasks", "several entries"),
    (lambda made: single_turn("exact"), "verifier", "give a function"),
    (lambda made: data.tasks(5), "source", "give a text or a Path"),
    (lambda made: data.supervised("x", made.tokenizer), "rows", "give several entries, each a mapping"),
    (lambda made: data.supervised([], "Qwen/Qwen3-0.6B"), "tokenizer", "load_tokenizer(nrl.Model('Qwen/Qwen3-0.6B'))"),
]

STEPS: list[tuple[Mistake, str, str]] = [
    (trained("grpo"), "loss", "give a function, such as nrl.algos.sft_loss"),
    (trained(algos), "loss", "is the module nrl.algos; give a function"),
    (trained(torch.nn.CrossEntropyLoss()), "loss", "is a CrossEntropyLoss; give a function"),
    (trained(lambda out: None), "loss", "a loss takes two arguments, and this one takes (out)"),
    (trained(lambda out, batch, model: None), "loss", "and this one takes (out, batch, model)"),
    (trained(lambda: None), "loss", "and this one takes ()"),
    (trained(algos.dpo_loss), "loss", "it makes a loss of beta: call it, dpo_loss(...)"),
    (trained(algos.policy_loss), "loss", "call it, policy_loss(...)"),
    (lambda made: made.trainer.train_step(sft_loss)(made.batch), "state", "give the train state"),
    (lambda made: made.trainer.train_step(sft_loss)(made.state), "batch", "is missing; give a batch"),
    (lambda made: made.trainer.train_step(sft_loss)(made.state.params, made.batch), "state", "give the train state"),
    (lambda made: made.trainer.train_step(sft_loss)(made.state, {"a": 1}), "batch", "nrl.Batch(columns, batch_size="),
    (lambda made: made.trainer.train_step(sft_loss)(made.state, [made.batch]), "batch", "nrl.concatenate(batches)"),
    (lambda made: made.trainer.logprobs(made.state, made.batch), "params", "give state.params"),
    (lambda made: made.trainer.logprobs(made.batch), "params", "give state.params, or trainer.load()"),
    (lambda made: made.trainer.top_k(made.state.params, made.batch, "8"), "k", "give a whole number"),
    (lambda made: nrl.minibatched(sft_loss, 2), "step", "give trainer.train_step(loss)"),
    (lambda made: nrl.evaluate(sft_loss, made.state, made.batch), "trainer", "give the trainer"),
    (lambda made: nrl.fit(None, "a", made.trainer, sft_loss, [made.batch], 2), "run", "give a Run"),
    (lambda made: algos.advantages({"rewards": torch.ones(2)}), "batch", "nrl.Batch(columns, batch_size=[rows])"),
    (lambda made: algos.advantages(made.batch, "grpo"), "estimator", "give a function"),
    (lambda made: algos.advantages(made.batch, algos.group_normalize), "estimator", "from_rewards(group_normalize)"),
    (lambda made: algos.policy_loss("clip"), "surrogate", "such as clip(0.2)"),
    (lambda made: algos.policy_loss(algos.clip(0.2), aggregate="mean"), "aggregate", "such as token_mean"),
    (lambda made: algos.policy_loss(algos.clip(0.2), penalty=0.1), "penalty", "such as kl(k2, 0.1)"),
    (lambda made: algos.policy_loss(algos.clip), "surrogate", "which makes one; call it, such as clip(0.2)"),
    (lambda made: algos.policy_loss(algos.clip(0.2), correction=algos.truncate), "correction", "call it, such as tru"),
    (lambda made: algos.policy_loss(algos.clip(0.2), penalty=algos.kl), "penalty", "call it, such as kl(k2, 0.1)"),
    (lambda made: algos.policy_loss(algos.clip(0.2), aggregate=algos.seq_sum), "aggregate", "which makes one"),
    (lambda made: algos.from_logits(5), "fn", "give a function fn(logits, *columns)"),
    (lambda made: algos.from_logits(len, 5), "columns", "5 is not the name of a column"),
    (lambda made: algos.from_logits(len, k=0), "k", "it must be at least 1"),
    (lambda made: algos.clip("0.2"), "low", "without quotes"),
    (lambda made: algos.clip(-0.2), "low", "it must be at least 0"),
    (lambda made: algos.kl(0.1, algos.k3), "estimator", "give a function"),
    (lambda made: nrl.assign({"a": torch.ones(2)}, rewards=torch.ones(2)), "batch", "give a batch"),
    (lambda made: nrl.assign(made.batch, torch.ones(4)), "", "give the others by name"),
    (lambda made: nrl.concatenate(made.batch), "batches", "give several entries, each a batch"),
    (lambda made: nrl.concatenate([made.batch, 3]), "batches", "batches[1] is 3; give a batch"),
    (lambda made: nrl.minibatches(made.batch, "2", 0), "n", "give a whole number"),
    (lambda made: nrl.shard(made.batch, 2.0), "n", "is 2.0; give 2, a whole number"),
    (lambda made: made.cluster.reserve("2"), "n", "give a whole number"),
    (lambda made: made.slots.mesh(dp="2"), "dp", "give a whole number"),
    (lambda made: nrl.shard_map(made.slots, nrl.P("dp")), "fn", "give a function"),
]


@pytest.mark.parametrize(("mistake", "argument", "message"), [*TRAINER, *SAMPLER, *RECORDS, *STREAMS, *STEPS])
def test_an_argument_is_checked_where_it_is_given(mistake: Mistake, argument: str, message: str, made: Made) -> None:
    with pytest.raises(ArgumentError) as raised:
        mistake(made)
    assert raised.value.argument == argument
    assert message in str(raised.value)


MENDED = 'end with `return token_mean(x, batch["loss_mask"]), {}`'
OTHERS: list[tuple[Mistake, type[NrlError], str]] = [
    (trained(torch.nn.functional.cross_entropy), LossResultError, "cross_entropy: a function of torch got all outputs"),
    (trained(lambda batch, out: out["logprobs"].mean()), MissingColumn, "a loss is called with (out, batch), in this"),
    (trained(lambda out, batch: out["logprobs"].mean()), LossResultError, "returned a scalar, which is summed or"),
    (trained(lambda out, batch: out["logprobs"].mean()), LossResultError, MENDED),
    (trained(lambda out, batch: (out["logprobs"].mean(), {})), LossResultError, "returned a scalar"),
    (trained(lambda out, batch: -out["logprobs"]), LossResultError, "returned a tensor of shape [4, "),
    (trained(per_token), LossResultError, "returned a Mean without metrics: add `, {}`"),
    (trained(lambda out, batch: None), LossResultError, "returned None: its last line has no `return`"),
    (trained(lambda out, batch: 3.0), LossResultError, "returned 3.0. A loss returns (Mean, metrics)"),
    (trained(lambda out, batch: (per_token(out, batch), None)), LossResultError, MENDED),
    (trained(lambda out, batch: (per_token(out, batch), {"x": 1.0})), LossResultError, "the metric 'x' as a float"),
    (trained(lambda out, batch: sft_loss), LossResultError, "returned a function, sft_loss"),
    (trained(lambda model, batch: model(batch["input_ids"])), LossResultError, "calls its first argument"),
    (trained(lambda out, batch: (token_mean(out.logprobs, batch["loss_mask"]), {})), MissingOutput, "out['logprobs']"),
    (
        trained(lambda out, batch: (token_mean(out["logprobs"], batch.loss_mask), {})),
        MissingOutput,
        "batch['loss_mask']",
    ),
    (
        trained(lambda out, batch: (token_mean(out["logprobs"].detach(), batch["loss_mask"]), {})),
        NoGradient,
        "the loss has no gradient: no term of it depends on an output of the model, so nothing was changed",
    ),
    (
        trained(lambda out, batch: (token_mean(math.inf - out["logprobs"], batch["loss_mask"]), {})),
        NotFinite,
        "the loss is inf; nothing was changed",
    ),
    (lambda made: nrl.rollouts(made.sampler, exact, made.tasks, n=2), EnvError, "give single_turn(exact)"),
    (lambda made: nrl.rollouts(made.sampler, single_turn, made.tasks, n=2), EnvError, "or single_turn(...)"),
    (lambda made: nrl.rollouts(made.sampler, None, made.tasks, n=2), EnvError, "give an Environment"),
    (lambda made: nrl.rollouts(made.sampler, made.env, made.tasks, n=0), DataError, "n is 0"),
    (lambda made: nrl.batched(counting(), -1), DataError, "n is -1"),
    (lambda made: nrl.assign(made.batch, rewards=np.zeros(4)), ColumnError, "is a ndarray; give a torch tensor"),
    (lambda made: nrl.assign(made.batch, rewards=[0.0] * 4), ColumnError, "is a list; give a torch tensor"),
    (lambda made: nrl.run({"steps": 3}).__enter__(), ConfigError, "run: cfg is a dict; give an instance of a class"),
    (lambda made: nrl.run(Config).__enter__(), ConfigError, "run: cfg is the class Config; give Config()"),
]


@pytest.mark.parametrize(("mistake", "error", "message"), OTHERS)
def test_other_mistakes_are_errors_of_nrl(mistake: Mistake, error: type[NrlError], message: str, made: Made) -> None:
    with pytest.raises(error) as raised:
        mistake(made)
    assert message in str(raised.value)
