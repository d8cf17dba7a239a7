"""Value and reward heads, and a teacher's outputs, against transformers' own models and a plain softmax."""

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import transformers
from tensordict import TensorDict
from torch import Tensor

import nrl
from nrl import tiny
from nrl.algos import bradley_terry_loss, distillation_loss, logprobs_at, needs, sft_loss, token_mean, value_loss
from nrl.backends import Model, Params, Trainer, adamw, fsdp, hf
from nrl.backends.fsdp.torch_engine import TorchEngine
from nrl.backends.models import loading
from nrl.batch import Batch, lengths
from nrl.batch.metrics import Mean, Metrics, Sum, finalize
from nrl.batch.packed_rows import Packing
from nrl.errors import BatchError, ColumnError, ConfigError, MissingOutput, ModelError
from nrl.runtime import Cluster, Slots
from tests.backends.fsdp.test_torch_engine import CONFIGS, MIXED, QWEN3, batch_of

WORDS = QWEN3["vocab_size"]
NAMES = ["qwen3 tied", "qwen2 untied", "llama tied"]


def trainer_of(
    place: Slots, source: Any, head: Any, *, packing: Packing | None = nrl.Rectangles, max_tokens: int = 64
) -> Trainer:
    return fsdp.trainer(place, Model(source, head=head), adamw(lr=1e-2), packing=packing, max_tokens=max_tokens)


def written(config: dict[str, Any], head: str, folder: Path) -> Any:
    """A model of transformers' own with a random head, in a folder."""
    kind = {"value": transformers.AutoModelForTokenClassification, "lm": transformers.AutoModelForCausalLM}.get(
        head, transformers.AutoModelForSequenceClassification
    )
    fields = config | ({} if head == "lm" else {"num_labels": 1})
    torch.manual_seed(3)
    module: Any = kind.from_config(transformers.AutoConfig.for_model(**fields), dtype=torch.float32)
    if head != "lm":
        torch.nn.init.normal_(module.score.weight)
        if module.score.bias is not None:
            torch.nn.init.normal_(module.score.bias)
    module.eval().save_pretrained(folder)
    return module


def hidden(module: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = module.base_model(input_ids=ids[None]).last_hidden_state[0]
    return found


@pytest.mark.parametrize("packing", [nrl.Rectangles, nrl.Sequences, None])
@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_transformers_one_token_earlier(
    slots: Slots, name: str, packing: Packing | None, tmp_path: Path
) -> None:
    module = written(CONFIGS[name], "value", tmp_path)
    batch = batch_of(MIXED)
    for dp in (1, 3):
        trainer = trainer_of(slots[:dp], str(tmp_path), "value", packing=packing)
        found = trainer.values(trainer.load(), batch).result()
        expected = torch.zeros_like(found)
        for row, length in enumerate(lengths(batch).tolist()):
            if length > 1:
                with torch.no_grad():
                    own = module(input_ids=batch["input_ids"][row : row + 1, :length]).logits[0, :, 0]
                expected[row, 1:length] = own[:-1]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        assert bool((found != 0).any())


@pytest.mark.parametrize("packing", [nrl.Rectangles, nrl.Sequences, None])
@pytest.mark.parametrize("name", NAMES)
def test_rewards_are_those_of_transformers(slots: Slots, name: str, packing: Packing | None, tmp_path: Path) -> None:
    """Of single rows and of pairs; a row without a token has none."""
    module = written(CONFIGS[name], "reward", tmp_path)
    batch = batch_of(MIXED)
    expected = torch.zeros(len(batch))
    for row, length in enumerate(lengths(batch).tolist()):
        if length:
            with torch.no_grad():
                expected[row] = module(input_ids=batch["input_ids"][row : row + 1, :length]).logits[0, 0]
    for dp in (1, 3):
        trainer = trainer_of(slots[:dp], str(tmp_path), "reward", packing=packing)
        params = trainer.load()
        torch.testing.assert_close(trainer.rewards(params, batch).result(), expected, atol=1e-5, rtol=0)
        pairs = batch[:8].reshape(4, 2).lock_()
        torch.testing.assert_close(trainer.rewards(params, pairs).result(), expected[:8].view(4, 2), atol=1e-5, rtol=0)
    assert len(set(expected.tolist())) > 5


@pytest.mark.parametrize("head", ["value", "reward"])
def test_a_head_that_is_not_there_yet_says_0(slots: Slots, head: str, tmp_path: Path, caplog: Any) -> None:
    written(QWEN3, "lm", tmp_path)
    for source in (str(tmp_path), QWEN3):
        trainer = trainer_of(slots[:1], source, head)
        name = {"value": "values", "reward": "rewards"}[head]
        assert not trainer.forward(trainer.load(), batch_of(MIXED), [name])[name].result().any()
    assert "score" not in caplog.text  # nobody is warned of what was asked for


@needs("values")
def regression(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    return token_mean((out["values"] - batch["returns"]).square(), batch["loss_mask"]), {}


@needs("rewards")
def rewards_loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    counted = batch["loss_mask"].any(-1)
    each = (out["rewards"] - batch["returns"][..., 0]).square()
    return Mean(torch.where(counted, each, 0).sum(), counted.sum().float()), {}


@pytest.mark.parametrize(("head", "loss"), [("value", regression), ("reward", rewards_loss)])
@pytest.mark.parametrize("packing", [nrl.Rectangles, nrl.Sequences, None])
def test_a_step_is_that_of_plain_torch(
    slots: Slots, head: str, loss: Any, packing: Packing | None, tmp_path: Path
) -> None:
    """By any number of micro-batches and shards, from transformers' own model and torch's AdamW."""
    draw = torch.Generator().manual_seed(5)
    batch = batch_of(MIXED)
    batch = nrl.assign(batch, returns=torch.randn(batch["input_ids"].shape, generator=draw))
    module = written(QWEN3, head, tmp_path)
    matrices = [p for p in module.parameters() if p.ndim > 1]
    others = [p for p in module.parameters() if p.ndim <= 1]
    spec = adamw(lr=1e-2, clip=1e9)
    groups = [{"params": matrices, "weight_decay": spec.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps)
    total, weight = torch.zeros(()), torch.zeros(())
    for row, length in enumerate(lengths(batch).tolist()):
        mask = batch["loss_mask"][row]
        if head == "value" and length > 1:
            logits = module(input_ids=batch["input_ids"][row : row + 1, :length]).logits[0, :, 0]
            values = torch.cat([torch.zeros(1), logits[:-1]])
            total = total + (values - batch["returns"][row, :length])[mask[:length]].square().sum()
        elif head == "reward" and mask.any():
            logits = module(input_ids=batch["input_ids"][row : row + 1, :length]).logits[0, 0]
            total = total + (logits - batch["returns"][row, 0]).square()
        weight = weight + (mask.sum() if head == "value" else mask.any())
    (total / weight).backward()
    optimizer.step()
    expected = dict(module.named_parameters())
    for dp, max_tokens in ((1, 200), (3, 20)):
        model = Model(str(tmp_path), head=head)  # type: ignore[arg-type]
        trainer = fsdp.trainer(slots[:dp], model, spec, packing=packing, max_tokens=max_tokens)
        state, metrics = trainer.train_step(loss)(trainer.init(), batch)
        assert finalize(metrics.result())["loss"] == pytest.approx(float(total.detach() / weight), rel=1e-5)
        for name, x in state.params.tensors():
            torch.testing.assert_close(x, expected[name].detach(), atol=2e-5, rtol=0)


def test_a_critic_begins_where_a_policy_is_and_a_policy_where_a_critic_is(slots: Slots) -> None:
    policy, critic = trainer_of(slots[:1], QWEN3, "lm"), trainer_of(slots[:1], QWEN3, "value")
    batch = batch_of(MIXED)
    state, _ = policy.train_step(sft_loss)(policy.init(), batch)
    begun = critic.init(state.params)
    body = dict(state.params.tensors())
    found = dict(begun.params.tensors())
    assert found.keys() - body.keys() == {"score.weight", "score.bias"}
    assert not found["score.weight"].any()
    for name in body:
        assert torch.equal(body[name], found[name])
    back = dict(policy.init(begun.params).params.tensors())
    assert all(torch.equal(back[name], body[name]) for name in body)
    returns = nrl.assign(batch, returns=torch.ones_like(batch["input_ids"], dtype=torch.float32))
    trained, _ = critic.train_step(value_loss())(begun, returns)
    reward = trainer_of(slots[:1], QWEN3, "reward")
    expected = dict(trained.params.tensors())
    score = dict(reward.init(trained.params).params.tensors())  # whose head has no bias
    assert score.keys() == expected.keys() - {"score.bias"}
    assert torch.equal(score["score.weight"], expected["score.weight"])
    assert bool(expected["score.weight"].any())
    again = dict(critic.init(reward.init(trained.params).params).params.tensors())
    assert torch.equal(again["score.weight"], expected["score.weight"])
    assert not again["score.bias"].any()
    untied = trainer_of(slots[:1], CONFIGS["qwen3 untied"], "lm")
    with pytest.raises(ModelError, match=r"1 weights did not arrive: lm_head\.weight"):
        untied.init(trainer_of(slots[:1], CONFIGS["qwen3 untied"], "value").init().params)
    assert all(torch.equal(x, expected[name]) for name, x in critic.init(trained.params).params.tensors())


@pytest.mark.parametrize(("head", "output"), [("value", "values"), ("reward", "rewards")])
def test_it_is_saved_restored_and_exported(slots: Slots, head: str, output: str, tmp_path: Path) -> None:
    trainer = trainer_of(slots[:1], QWEN3, head)
    batch = batch_of(MIXED)
    batch = nrl.assign(batch, returns=torch.ones(batch["input_ids"].shape))
    state, _ = trainer.train_step(regression if head == "value" else rewards_loss)(trainer.init(), batch)
    expected = trainer.forward(state.params, batch, [output])[output].result()
    assert bool(expected.any())
    trainer.save(state, tmp_path / "saved")
    trainer.export(state.params, tmp_path / "exported")

    def outputs(by: Trainer, params: Params) -> Tensor:
        found: Tensor = by.forward(params, batch, [output])[output].result()
        return found

    assert torch.equal(outputs(trainer, trainer.restore(tmp_path / "saved").params), expected)
    again = trainer_of(slots[:1], str(tmp_path / "exported"), head)
    assert torch.equal(outputs(again, again.load()), expected)
    assert torch.equal(outputs(trainer, trainer.load(str(tmp_path / "exported"))), expected)


def test_what_a_head_does_not_compute(slots: Slots) -> None:
    critic, policy = trainer_of(slots[:1], QWEN3, "value"), trainer_of(slots[:1], QWEN3, "lm")
    batch = batch_of(MIXED)
    with pytest.raises(MissingOutput, match=r"sft_loss reads logprobs, which only a model with head='lm' computes"):
        critic.train_step(sft_loss)(critic.init(), batch)
    with pytest.raises(
        MissingOutput, match=r"logprobs: it needs logprobs, and fsdp.trainer \d+ provides hidden_states, values; ano"
    ):
        critic.logprobs(critic.load(), batch)
    with pytest.raises(
        MissingOutput, match=r"top_k: it needs top_k\(2\), and fsdp.trainer \d+ provides hidden_states, values"
    ):
        critic.top_k(critic.load(), batch, 2)
    with pytest.raises(MissingOutput, match=r"forward: it needs entropy, logprobs, and fsdp.trainer \d+ provides hid"):
        critic.forward(critic.load(), batch, {"logprobs", "values", "entropy"})
    with pytest.raises(MissingOutput, match=r"train_step\(value_loss\): it needs values, and .* provides entropy, fro"):
        policy.train_step(value_loss())
    with pytest.raises(MissingOutput, match=r"rewards: it needs rewards, and .* provides entropy"):
        policy.rewards(policy.load(), batch)
    with pytest.raises(ModelError, match=r"hf.sampler: .* has head='value'; only a language model, head='lm', samples"):
        hf.sampler(slots[:1], attrs.evolve(tiny.model(), head="value"))


def test_every_output_is_a_forward(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name, with others in one call of the engine; and the engine is asked for nothing else, nor returns it."""
    calls, forward = list[Any](), TorchEngine.forward

    def watched(engine: Any, params: Any, parts: Any, needs: frozenset[str]) -> Any:
        found = forward(engine, params, parts, needs)
        calls.append((needs, {str(key) for out in found for key in out.keys()}))
        return found

    monkeypatch.setattr(TorchEngine, "forward", watched)
    policy, batch = trainer_of(slots[:1], QWEN3, "lm"), batch_of(MIXED)
    params = policy.load()
    found = policy.forward(params, batch, ["top_k(3)", "logprobs", "entropy"])
    assert list(found) == ["entropy", "logprobs", "top_k_ids", "top_k_logprobs"]
    assert calls.pop() == ({"top_k(3)", "logprobs", "entropy"}, set(found))
    (entropy,) = policy.forward(params, batch, {"entropy"}).values()
    assert calls.pop() == ({"entropy"}, {"entropy"})
    logprobs, likely = policy.logprobs(params, batch), policy.top_k(params, batch, 3)
    assert calls == [({"logprobs"}, {"logprobs"}), ({"top_k(3)"}, {"top_k_ids", "top_k_logprobs"})]
    each = [entropy, logprobs, likely["teacher_ids"], likely["teacher_topk_logprobs"]]
    for one, other in zip(found.values(), each, strict=True):
        assert torch.equal(one.result(), other.result())
    calls.clear()
    for head, name in [("value", "values"), ("reward", "rewards")]:
        trainer = trainer_of(slots[:1], QWEN3, head)
        assert trainer.provides - {"hidden_states"} == {name}
        getattr(trainer, name)(trainer.load(), batch)
        assert calls.pop() == ({name}, {name})
    nrl.evaluate(sft_loss, policy, params, nrl.assign(batch, loss_mask=batch["attention_mask"]))
    assert calls.pop() == ({"logprobs"}, {"logprobs"})  # which every loss on a language model sees


def test_a_head_of_another_kind_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    two = transformers.AutoModelForSequenceClassification.from_config(
        transformers.AutoConfig.for_model(**QWEN3, num_labels=2)
    )
    two.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"cannot be loaded as a language model with a reward head"):
        loading.build(Model(str(tmp_path), head="reward"))
    gpt2 = {"model_type": "gpt2", "vocab_size": 23, "n_embd": 16, "n_layer": 1, "n_head": 2}
    with pytest.raises(ModelError, match=r"GPT2ForTokenClassification: it has no linear layer 'score' of one output"):
        loading.build(Model(gpt2, head="value"))


# -- teachers ---------------------------------------------------------------------------------------------------------


def softmax(module: Any, batch: Batch, temperature: Tensor) -> Tensor:
    """``[B, T, V]``: at t, of the token at t; zeros where nothing is predicted."""
    found = torch.zeros(*batch["input_ids"].shape, WORDS)
    for row, length in enumerate(lengths(batch).tolist()):
        if length > 1:
            with torch.no_grad():
                logits = module(input_ids=batch["input_ids"][row : row + 1, :length]).logits[0]
            found[row, 1:length] = (logits / temperature[row]).log_softmax(-1)[:-1]
    return found


@pytest.mark.parametrize("packing", [nrl.Rectangles, nrl.Sequences, None])
def test_the_most_probable_tokens(slots: Slots, packing: Packing | None, tmp_path: Path) -> None:
    module = written(QWEN3, "lm", tmp_path)
    batch = batch_of(MIXED)
    heat = torch.linspace(0.5, 2, len(batch))
    batch = nrl.assign(batch, temperature=heat)
    expected = softmax(module, batch, heat)
    for dp in (1, 4):
        trainer = trainer_of(slots[:dp], str(tmp_path), "lm", packing=packing)
        columns = trainer.top_k(trainer.load(), batch, 5)
        found = nrl.assign(batch, **columns)
        ids, known = found["teacher_ids"], found["teacher_topk_logprobs"]
        assert ids.shape == known.shape == (*batch["input_ids"].shape, 5)
        torch.testing.assert_close(known, expected.topk(5).values, atol=1e-5, rtol=0)
        torch.testing.assert_close(expected.gather(-1, ids), known, atol=1e-5, rtol=0)
    with pytest.raises(ConfigError, match=r"top_k: k is 24; it must be at least 1 and at most the 23 words"):
        trainer.top_k(trainer.load(), batch, 24)["teacher_ids"].result()
    with pytest.raises(ConfigError, match=r"top_k: k is 0"):
        trainer.top_k(trainer.load(), batch, 0)["teacher_ids"].result()


@pytest.mark.parametrize("packing", [nrl.Rectangles, nrl.Sequences, None])
def test_distillation_has_the_gradient_of_a_plain_softmax(
    slots: Slots, packing: Packing | None, tmp_path: Path
) -> None:
    """One step of the student, by any number of micro-batches, is that of the loss over transformers' own logits."""
    batch = batch_of(MIXED)
    teacher = trainer_of(slots[:1], QWEN3 | {"num_hidden_layers": 1}, "lm")
    batch = nrl.assign(batch, **teacher.top_k(teacher.load(), batch, 4))
    module = written(QWEN3, "lm", tmp_path)
    spec = adamw(lr=1e-2, clip=1e9)
    decayed = [p for p in module.parameters() if p.ndim > 1]
    others = [p for p in module.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": spec.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps)
    rows = []
    for row, length in enumerate(lengths(batch).tolist()):
        student = torch.zeros(*batch["teacher_ids"].shape[1:])
        if length > 1:
            logits = module(input_ids=batch["input_ids"][row : row + 1, :length]).logits[0].log_softmax(-1)[:-1]
            student = torch.cat([student[:1], logits.gather(-1, batch["teacher_ids"][row, 1:length]), student[length:]])
        rows.append(student)
    out = TensorDict({logprobs_at("teacher_ids"): torch.stack(rows)}, batch_size=batch.batch_size)
    (total, weight), _ = distillation_loss()(out, batch)
    (total / weight).backward()
    optimizer.step()
    expected = dict(module.named_parameters())
    for dp, max_tokens in ((1, 200), (3, 20)):
        trainer = fsdp.trainer(slots[:dp], Model(str(tmp_path)), spec, packing=packing, max_tokens=max_tokens)
        state, _ = trainer.train_step(distillation_loss())(trainer.init(), batch)
        for name, x in state.params.tensors():
            torch.testing.assert_close(x, expected[name].detach(), atol=2e-5, rtol=0)


def test_ids_that_the_model_does_not_know(slots: Slots) -> None:
    batch = batch_of([3, 4])
    ids = torch.full((*batch["input_ids"].shape, 2), WORDS)
    batch = nrl.assign(batch, teacher_ids=ids, teacher_topk_logprobs=torch.full(ids.shape, -1.0))
    trainer = trainer_of(slots[:1], QWEN3, "lm")
    with pytest.raises(BatchError, match=r"teacher_ids has the token 23, and the model knows those from 0 to 22"):
        trainer.train_step(distillation_loss())(trainer.init(), batch)


@pytest.mark.parametrize("head", ["value", "reward", "lm"])
def test_outputs_of_no_rows(slots: Slots, head: str) -> None:
    """A shard without any."""
    trainer = trainer_of(slots[:4], QWEN3, head)
    batch = batch_of([4, 3])
    params = trainer.load()
    if head == "lm":
        found = trainer.top_k(params, batch, 3)
        assert found["teacher_ids"].result().shape == (*batch["input_ids"].shape, 3)
        assert trainer.forward(params, batch, {"entropy"})["entropy"].result().shape == batch["input_ids"].shape
    elif head == "value":
        assert trainer.values(params, batch).result().shape == batch["input_ids"].shape
    else:
        assert trainer.rewards(params, batch).result().shape == (2,)


def test_a_loss_is_measured_by_any_head(slots: Slots) -> None:
    pairs = batch_of([5, 4, 3, 6]).reshape(2, 2).lock_()
    trainer = trainer_of(slots[:1], QWEN3, "reward")
    found = finalize(nrl.evaluate(bradley_terry_loss(), trainer, trainer.load(), pairs))
    assert found["eval/loss"] == pytest.approx(0.693147, abs=1e-6)  # rewards that are 0
    assert "eval/accuracy" in found


def distilled(trainer: Trainer, teacher: Trainer, *, given: bool) -> tuple[dict[str, float], Any]:
    """Numbers of two steps of distillation, and the columns of the last one."""
    state, expert, step = trainer.init(), teacher.load(), trainer.train_step(distillation_loss())
    batch = batch_of(MIXED)
    for _ in range(2):
        columns = teacher.top_k(expert, batch, 4)
        if given:
            state, metrics = step(state, batch, **columns)
        else:
            state, metrics = step(state, nrl.assign(batch, **columns))
    return finalize(metrics.result()), columns


def test_a_step_is_given_columns(slots: Slots) -> None:
    """Futures or tensors, as if they had been assigned; and of the wrong rows none."""
    trainer = trainer_of(slots[:2], QWEN3, "lm")
    teacher = trainer_of(slots[:1], QWEN3 | {"num_hidden_layers": 1}, "lm")
    assert distilled(trainer, teacher, given=True)[0] == distilled(trainer, teacher, given=False)[0]
    other = teacher.top_k(teacher.load(), batch_of([3, 4, 5]), 4)
    with pytest.raises(ColumnError, match="teacher_ids"):
        trainer.train_step(distillation_loss())(trainer.init(), batch_of(MIXED), **other)


def sums(shard: Batch) -> Metrics:
    """Of a teacher's columns, and of rows."""
    both = (shard["teacher_ids"].double() + shard["teacher_topk_logprobs"]).sum()
    return {"both": Sum(both), "rows": Sum(torch.tensor(float(len(shard))))}


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_heavy_columns_go_from_mesh_to_mesh(on_ray: Cluster) -> None:
    """Without passing through the program, whether the other mesh splits rows alike or not, and in whatever order."""
    slots = on_ray.reserve(2)
    both = slots.mesh(executable="system", name="students")
    options: dict[str, Any] = {"max_tokens": 64}
    trainer = fsdp.trainer(both, Model(QWEN3), adamw(lr=1e-2, eps=1e-3), **options)
    small = Model(QWEN3 | {"num_hidden_layers": 1})
    with nrl.cluster("local") as here:
        place = here.reserve(1)
        student = fsdp.trainer(place, Model(QWEN3), adamw(lr=1e-2, eps=1e-3), **options)
        other = fsdp.trainer(place, small, adamw(lr=1e-2), **options)
        expected, _ = distilled(student, other, given=False)
        whole = nrl.assign(batch_of(MIXED), **other.top_k(other.load(), batch_of(MIXED), 4))
    for mesh in (both, slots[:1].mesh(executable="system", name="teacher")):
        teacher = fsdp.trainer(mesh, small, adamw(lr=1e-2), **options)
        for given in (True, False):
            found, columns = distilled(trainer, teacher, given=given)
            for key in ("loss", "grad_norm"):
                assert found[key] == pytest.approx(expected[key], rel=1e-4)
            assert [column._value for column in columns.values()] == [[], []]  # nobody here has fetched them
    likely: Any = teacher.top_k(teacher.load(), batch_of(MIXED), 4)
    batch = nrl.assign(batch_of(MIXED), **likely)
    parts = nrl.minibatches(batch, 3, seed=0)
    joined = nrl.concatenate([nrl.pad(part, part["input_ids"].shape[1] + 3) for part in (*parts, parts[0])])
    length = nrl.microbatches(batch, max_tokens=40)
    for some, same in [
        (batch, whole),
        *zip(parts, nrl.minibatches(whole, 3, seed=0), strict=True),
        *zip(length, nrl.microbatches(whole, max_tokens=40), strict=True),
        (joined, nrl.concatenate([whole, nrl.minibatches(whole, 3, seed=0)[0]])),
    ]:
        found = finalize(nrl.shard_map(sums, both, nrl.P("dp"), nrl.merged)(some).result())
        assert found == pytest.approx(finalize(sums(same)), rel=1e-5)
    everywhere = finalize(nrl.shard_map(sums, both, nrl.P(), nrl.P())(batch).result())
    assert everywhere == pytest.approx(finalize(sums(whole)), rel=1e-5)
    assert trainer.logprobs(trainer.load(), parts[0]).result().shape == parts[0]["input_ids"].shape
    assert [column._value for column in likely.values()] == [[], []]
    torch.testing.assert_close(batch["teacher_topk_logprobs"] + 0, whole["teacher_topk_logprobs"], atol=1e-5, rtol=0)
    assert [len(column._value) for column in likely.values()] == [0, 1]  # this program has asked for one of them
    wrong = trainer.top_k(trainer.load(), batch_of([3, 4, 5]), 4)
    with pytest.raises(ColumnError, match=r"'teacher_ids' has shape \[3, 5, 4\], but the batch has batch size \["):
        trainer.train_step(distillation_loss())(trainer.init(), batch_of(MIXED), **wrong)


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_what_failed_while_it_computed_a_heavy_column(on_ray: Cluster) -> None:
    """It is raised by whoever reads the step that was given the column."""
    mesh = on_ray.reserve(1).mesh(executable="system")
    trainer = fsdp.trainer(mesh, Model(QWEN3), adamw(lr=1e-2))
    batch = nrl.assign(batch_of(MIXED), **trainer.top_k(trainer.load(), batch_of(MIXED), 24))
    _, metrics = trainer.train_step(distillation_loss())(trainer.init(), batch)
    with pytest.raises(ConfigError, match=r"top_k: k is 24; it must be at least 1 and at most the 23 words"):
        metrics.result()
