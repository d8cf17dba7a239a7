"""The driver's half of a step, over the smallest engine there is."""

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import nrl
from nrl.algos import Loss, needs, policy_loss, reinforce, sft_loss, token_mean, weighted_sft_loss
from nrl.backends import Sampler, TrainEngine, Trainer, publish
from nrl.backends.training.loss.loss_terms import check_weights, global_weights, terms_of
from nrl.backends.training.trainer import make_trainer
from nrl.backends.types import top_k
from nrl.batch import Batch
from nrl.batch.metrics import Mean, Metrics, Sum, finalize
from nrl.errors import (
    ArgumentError,
    BatchError,
    CheckpointError,
    ClosedCluster,
    ConsumedState,
    ForeignState,
    LossResultError,
    MissingColumn,
    MissingOutput,
    NotFinite,
    WeightError,
)
from nrl.runtime import Cluster
from tests.backends.bigram import VOCABULARY, Bigram, Recorder

MASK = torch.tensor([[False, True, True, False], [False, False, True, True], [False, True, False, False]])


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with nrl.cluster("local") as entered:
        yield entered


@pytest.fixture
def trainer(cluster: Cluster) -> Trainer:
    return made(cluster)


def made(cluster: Cluster, dp: int = 1, max_tokens: int = 100, engine: TrainEngine[Any, Any] | None = None) -> Trainer:
    mesh = cluster.reserve(dp).mesh()
    return make_trainer(mesh, lambda: engine or Bigram(), name="bigram", max_tokens=max_tokens)


def batch_of(n: int = 3, **columns: torch.Tensor) -> Batch:
    """``n`` rows of 4, 4, 2, 3, 4, ... tokens, none of them alike."""
    ids = torch.arange(n * 4).view(n, 4).pow(2) % VOCABULARY
    sizes = torch.tensor([4, 4, 2, 3] * n)[:n, None]
    mask = torch.arange(4) < sizes
    trained = MASK.repeat(n, 1)[:n] & mask
    return nrl.assign(
        Batch({}, batch_size=[n]), input_ids=ids * mask, attention_mask=mask, loss_mask=trained, **columns
    )


def by_hand(batch: Batch) -> torch.Tensor:
    """Log-probabilities under the table that `Bigram` starts from, one token at a time."""
    table = Bigram().init().table.log_softmax(-1)
    out = torch.zeros(batch["input_ids"].shape, dtype=torch.float64)
    for row, ids in enumerate(batch["input_ids"].tolist()):
        for t in range(1, int(nrl.lengths(batch)[row])):
            out[row, t] = table[ids[t - 1], ids[t]]
    return out


# what a loss returns


def test_terms_of_one_mean_and_of_several() -> None:
    mean, other = Mean(torch.tensor(1.0), torch.tensor(2.0)), Mean(torch.tensor(3.0), torch.tensor(4.0))
    assert terms_of("f", (mean, {})) == ({"loss": mean}, {})
    metrics: Metrics = {"kl": other}
    assert terms_of("f", ({"a": mean, "b": other}, metrics)) == ({"a": mean, "b": other}, metrics)


@pytest.mark.parametrize(
    "value",
    [
        None,
        torch.tensor(1.0),
        Mean(torch.tensor(1.0), torch.tensor(1.0)),
        (torch.tensor(1.0), {}),
        (Mean(torch.tensor(1.0), torch.tensor(1.0)),),
        (Mean(torch.tensor(1.0), torch.tensor(1.0)), None),
        ({}, {}),
        ({"a": torch.tensor(1.0)}, {}),
    ],
)
def test_terms_of_anything_else(value: Any) -> None:
    with pytest.raises(LossResultError, match=r"my_loss returned .*A loss returns \(Mean, metrics\)"):
        terms_of("my_loss", value)


# weights


def test_global_weights_by_hand() -> None:
    batch = batch_of()
    assert global_weights(sft_loss, batch) == {"loss": 5.0}
    assert global_weights(nrl.algos.grpo_loss, with_policy(batch)) == {"loss": 3.0}
    both = nrl.algos.add((1.0, sft_loss), (0.1, nrl.algos.grpo_loss))
    assert global_weights(both, with_policy(batch)) == {"sft_loss": 5.0, "grpo_loss": 3.0}


def with_policy(batch: Batch) -> Batch:
    zeros = torch.zeros(batch["input_ids"].shape)
    return nrl.assign(batch, advantages=zeros + 1, old_logprobs=zeros - 1)


def test_global_weights_gives_the_loss_all_outputs_that_it_needs() -> None:
    @needs("entropy")
    def loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        assert set(out.keys()) == {"entropy", "logprobs"}
        assert out["entropy"].shape == batch["input_ids"].shape
        return token_mean(out["entropy"], batch["loss_mask"]), {}

    assert global_weights(loss, batch_of()) == {"loss": 5.0}


def test_global_weights_gives_a_loss_numbers_of_rows() -> None:
    pairs = batch_of(4).reshape(2, 2)
    for batch in (batch_of(), pairs):

        @needs("rewards")
        def loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
            assert out["rewards"].shape == batch.batch_size
            return token_mean(out["rewards"], batch["loss_mask"].any(-1)), {}

        assert global_weights(loss, batch) == {"loss": float(batch["loss_mask"].any(-1).sum())}
    assert global_weights(nrl.algos.reward_model_loss, pairs) == {"loss": 2.0}


@pytest.mark.parametrize(
    ("column", "hint"), [("advantages", "nrl.algos.advantages"), ("teacher_logprobs", "teacher.logprobs")]
)
def test_a_missing_column_of_a_custom_loss_is_named(column: str, hint: str) -> None:
    def my_loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        return token_mean(out["logprobs"] * batch[column], batch["loss_mask"]), {}

    with pytest.raises(
        MissingColumn, match=f"my_loss reads the column '{column}', which this batch does not have"
    ) as e:
        global_weights(my_loss, batch_of())
    assert e.value.column == column
    assert hint in str(e.value)
    assert "loss_mask" in str(e.value)


def test_a_missing_column_that_nobody_knows_is_named_too() -> None:
    def my_loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        return token_mean(out["logprobs"] * batch["my_column"], batch["loss_mask"]), {}

    with pytest.raises(MissingColumn, match="my_loss reads the column 'my_column'"):
        global_weights(my_loss, batch_of())


def test_an_output_that_was_not_asked_for_is_no_missing_column() -> None:
    """The way out is ``@needs``, and not a column."""

    def my_loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        return token_mean(out["entropy"], batch["loss_mask"]), {}

    with pytest.raises(MissingOutput, match=r"my_loss.*entropy.*needs"):
        global_weights(my_loss, batch_of())


def test_a_key_error_of_the_loss_itself_is_left_alone() -> None:
    def my_loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        raise KeyError("loss_mask")

    with pytest.raises(KeyError, match="loss_mask") as e:
        global_weights(my_loss, batch_of())
    assert not isinstance(e.value, MissingColumn)


def test_check_weights() -> None:
    check_weights("f", {"a": 6.0, "b": 0.0}, {"a": 6.0, "b": 0.0})
    check_weights("f", {"a": 6.0 * (1 + 1e-7)}, {"a": 6.0})  # float32 sums in another order
    for seen, expected in [({"a": 6.1}, {"a": 6.0}), ({}, {"a": 1.0}), ({"a": math.nan}, {"a": 1.0})]:
        with pytest.raises(WeightError, match="my_loss: the weight of term 'a' is .*token_mean"):
            check_weights("my_loss", seen, expected)


# log-probabilities


@pytest.mark.parametrize("dp", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("max_tokens", [4, 8, 100])
def test_logprobs_come_back_in_the_order_of_the_rows(cluster: Cluster, dp: int, max_tokens: int) -> None:
    trainer, batch = made(cluster, dp, max_tokens), batch_of(7)
    found = trainer.logprobs(trainer.init().params, batch).result()
    torch.testing.assert_close(found, by_hand(batch))


def test_logprobs_of_no_rows_and_of_rows_without_tokens(cluster: Cluster) -> None:
    trainer = made(cluster, dp=2)
    params = trainer.init().params
    assert trainer.logprobs(params, batch_of()[:0].lock_()).result().shape == (0, 4)
    empty = nrl.assign(batch_of(), attention_mask=torch.zeros(3, 4, dtype=torch.bool))
    assert not trainer.logprobs(params, empty).result().any()


def test_logprobs_of_pairs_keep_their_shape(cluster: Cluster) -> None:
    trainer, flat = made(cluster, dp=3, max_tokens=8), batch_of(8)
    pairs = Batch({name: flat[name].unflatten(0, (4, 2)) for name in flat.keys()}, batch_size=[4, 2]).lock_()
    found = trainer.logprobs(trainer.init().params, pairs).result()
    torch.testing.assert_close(found, by_hand(flat).unflatten(0, (4, 2)))


def test_a_row_longer_than_max_tokens_is_an_error(cluster: Cluster) -> None:
    trainer = made(cluster, max_tokens=3)
    state = trainer.init()
    with pytest.raises(BatchError, match=r"4 tokens, more than max_tokens=3"):
        trainer.logprobs(state.params, batch_of())
    with pytest.raises(BatchError, match=r"4 tokens, more than max_tokens=3; raise max_tokens"):
        trainer.train_step(sft_loss)(state, batch_of())
    assert not state.handle.is_consumed


# a step


def test_a_step_by_hand(trainer: Trainer) -> None:
    """One gradient-descent step on the negative log-likelihood: logits move by rate times (one-hot - p) per token."""
    batch = batch_of()
    expected = Bigram().init().table
    probs, slope = expected.softmax(-1), torch.zeros_like(expected)
    for row, ids in enumerate(batch["input_ids"].tolist()):
        for t in torch.nonzero(batch["loss_mask"][row])[:, 0].tolist():
            slope[ids[t - 1]] += probs[ids[t - 1]] / 5
            slope[ids[t - 1], ids[t]] -= 1 / 5
    state, metrics = trainer.train_step(sft_loss)(trainer.init(), batch)
    torch.testing.assert_close(dict(state.params.tensors())["table"], expected - 0.5 * slope)
    numbers = finalize(metrics.result())
    assert numbers["loss"] == pytest.approx(float(-by_hand(batch)[batch["loss_mask"]].mean()))
    assert numbers["skipped"] == 0
    assert state.step == 1


def test_the_batch_is_split_into_shards_and_their_micro_batches(cluster: Cluster) -> None:
    batch = batch_of(7)
    for dp, max_tokens, parts in [(1, 100, 1), (7, 100, 7), (2, 8, 4), (1, 4, 6)]:
        trainer = made(cluster, dp, max_tokens)
        _, metrics = trainer.train_step(sft_loss)(trainer.init(), batch)
        assert finalize(metrics.result())["parts"] == parts


def test_lag_is_what_the_state_is_ahead_of_the_rows_that_are_trained_on(trainer: Trainer) -> None:
    state, sampler = trainer.init(), Recorder()
    for _ in range(3):
        publish(state.params, sampler)
        state, _ = trainer.train_step(sft_loss)(state, batch_of())
    assert state.version == 3
    batch = batch_of(4, version=torch.tensor([3, 2, 1, 0]))
    batch = nrl.assign(batch, loss_mask=batch["loss_mask"] & torch.tensor([True, True, True, False])[:, None])
    _, metrics = trainer.train_step(sft_loss)(state, batch)
    lag = metrics.result()["lag"]
    assert isinstance(lag, Mean)
    assert (float(lag.total), float(lag.weight)) == (3.0, 3.0)  # 0 + 1 + 2 over three rows


def test_no_lag_without_versions(trainer: Trainer) -> None:
    _, metrics = trainer.train_step(sft_loss)(trainer.init(), batch_of())
    assert "lag" not in metrics.result()


def test_the_mismatch_by_hand(trainer: Trainer) -> None:
    """Of the weights that the step starts from, at trained tokens of valid rows; whatever the loss is."""
    batch = batch_of()
    far = torch.where(batch["loss_mask"], by_hand(batch), 0.0) - torch.tensor([[0.0, 2.0, 0.0, 0.0]]).log1p()
    batch = nrl.assign(batch, rollout_logprobs=far)  # a ratio of 3 in the second column, of 1 elsewhere
    assert batch["loss_mask"].sum(0).tolist() == [0, 2, 2, 1]
    _, metrics = trainer.train_step(sft_loss)(trainer.init(), batch)
    numbers = finalize(metrics.result())
    assert numbers["mismatch/kl"] == pytest.approx(2 * (2 - math.log(3)) / 5)
    assert numbers["mismatch/ess"] == pytest.approx((3 + 2 * 3) ** 2 / (5 * (3 + 2 * 9)))
    assert numbers["mismatch/max_abs"] == pytest.approx(math.log(3))
    assert numbers["mismatch/chi2"] == pytest.approx((3 + 2 * 9) / 5 - 1)
    assert numbers["mismatch/max_ratio"] == pytest.approx(3)


def test_no_mismatch_without_what_the_sampler_said(trainer: Trainer) -> None:
    _, metrics = trainer.train_step(sft_loss)(trainer.init(), batch_of())
    assert not [key for key in metrics.result() if key.startswith("mismatch/")]


@pytest.mark.parametrize("name", ["mismatch/kl", "mismatch/max_abs", "mismatch/chi2", "mismatch/max_ratio"])
def test_a_loss_has_no_mismatch_of_its_own(trainer: Trainer, name: str) -> None:
    def my_loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        return sft_loss(out, batch)[0], {name: Sum(torch.tensor(1.0))}

    with pytest.raises(TypeError, match=f"my_loss returned a metric '{name}', a name that the step itself reports"):
        trainer.train_step(my_loss)(trainer.init(), batch_of())


def of_groups(groups: list[int], rewards: list[float], batch: Batch | None = None) -> Batch:
    """With what `advantages` makes of rewards."""
    batch = batch_of(len(groups)) if batch is None else batch
    ids, found = torch.tensor(groups), torch.tensor(rewards)
    batch = nrl.assign(batch, group_ids=ids, rewards=found, old_logprobs=by_hand(batch))
    return nrl.algos.advantages(batch)


def test_a_step_that_teaches_nothing_is_said_once(trainer: Trainer, capfd: pytest.CaptureFixture[str]) -> None:
    groups = of_groups([4, 4, 7, 7], [1.0, 0.0, 0.0, 1.0])
    for batch, why in (
        (of_groups([4, 5, 6, 7], [1.0, 0.0, 1.0, 0.0]), "Each of its 4 groups has one row, .*group_size"),
        (of_groups([4, 4, 7, 7], [1.0, 1.0, 0.0, 0.0]), "In each of its 2 groups all rewards are equal.*drop_uniform"),
        (nrl.assign(groups, advantages=torch.zeros(4, 4)), "In each of its 2 groups"),
        (nrl.assign(batch_of(), advantages=torch.zeros(3, 4), old_logprobs=by_hand(batch_of())), "See what computed"),
    ):
        step, state = trainer.train_step(nrl.algos.grpo_loss), trainer.init()
        state, _ = step(state, groups)
        assert capfd.readouterr().err == ""
        for _ in range(3):
            state, metrics = step(state, batch)
            assert finalize(metrics.result())["skipped"] == 0
        said = capfd.readouterr().err
        assert re.match(rf"train_step\(\w+\): all advantages are 0 at the tokens that are trained on, .*{why}", said)
        assert said.count("(This is said once.)") == 1


def test_rows_that_hold_a_frozen_token_are_said_once(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    """Where the token is an input; the last token of a row is none."""
    trainer, rows = made(cluster, engine=Bigram(frozen_token=6)), batch_of()
    ids = torch.where(rows["input_ids"] == 6, 5, rows["input_ids"])
    last = nrl.assign(rows, input_ids=ids.scatter(1, nrl.batch.lengths(rows)[:, None] - 1, 6))
    step, state = trainer.train_step(sft_loss), trainer.init()
    for batch in (nrl.assign(rows, input_ids=ids), last):
        state, _ = step(state, batch)
        assert capfd.readouterr().err == ""
    ids[1, 0] = 6
    for _ in range(2):
        state, _ = step(state, nrl.assign(rows, input_ids=ids))
    said = capfd.readouterr().err
    assert said.startswith(
        "train_step(sft_loss): row 1 holds the model's pad token 6 as a token of its own (position 0)"
    )
    assert said.count("train_pad_embedding=True") == 1


def test_advantages_that_a_loss_does_not_read_may_be_anything(
    trainer: Trainer, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer.train_step(sft_loss)(trainer.init(), of_groups([4, 5, 6], [1.0, 0.0, 1.0]))
    assert capfd.readouterr().err == ""


def test_a_weight_of_zero_skips_the_step(trainer: Trainer) -> None:
    state = trainer.init()
    publish(state.params, Recorder())
    before = dict(state.params.tensors())["table"].clone()
    step = trainer.train_step(sft_loss)
    new, metrics = step(state, nrl.assign(batch_of(), loss_mask=torch.zeros_like(MASK)))
    assert finalize(metrics.result())["skipped"] == 1
    assert torch.equal(dict(new.params.tensors())["table"], before)
    assert (new.step, new.version) == (0, 1)
    with pytest.raises(ConsumedState):
        step(state, batch_of())
    assert publish(new.params, Recorder()) == 1  # the same weights, and so the same number
    new, metrics = step(new, batch_of())
    assert finalize(metrics.result())["skipped"] == 0
    assert new.step == 1


def test_one_term_of_weight_zero_skips_the_step_too(trainer: Trainer) -> None:
    def sources(out: TensorDict, batch: Batch) -> tuple[dict[str, Mean], Metrics]:
        first = (batch["source"] == 0)[:, None] & batch["loss_mask"]
        return {
            "first": token_mean(-out["logprobs"], first),
            "second": token_mean(-out["logprobs"], batch["loss_mask"] & ~first),
        }, {}

    batch = batch_of(source=torch.zeros(3, dtype=torch.int64))
    state, metrics = trainer.train_step(sources)(trainer.init(), batch)
    assert finalize(metrics.result())["skipped"] == 1
    assert state.step == 0


# what is refused


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_column_that_is_not_finite(trainer: Trainer, bad: float) -> None:
    state, loss = trainer.init(), policy_loss(reinforce, ratio=nrl.algos.on_policy_ratio)
    batch = with_policy(batch_of())
    advantages = batch["advantages"].clone()
    advantages[1, 2] = bad
    with pytest.raises(NotFinite, match=r"policy_loss.*'advantages' is NaN or infinite.*in rows \[1\]"):
        trainer.train_step(loss)(state, nrl.assign(batch, advantages=advantages))
    assert not state.handle.is_consumed
    advantages[1, 2] = 1.0
    advantages[0, 0] = bad  # nobody trains on it
    state, metrics = trainer.train_step(loss)(state, nrl.assign(batch, advantages=advantages))
    assert math.isfinite(finalize(metrics.result())["loss"])


def test_an_output_that_the_engine_lacks_is_refused_before_the_run(trainer: Trainer) -> None:
    @needs("entropy", "values")
    def my_loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        raise AssertionError("it must not be called")

    with pytest.raises(MissingOutput, match=r"my_loss.*needs entropy, values, and bigram provides logprobs"):
        trainer.train_step(my_loss)


def test_a_part_that_needs_an_output_makes_the_composition_need_it(trainer: Trainer) -> None:
    @needs("values")
    def penalty(logprobs: torch.Tensor, batch: TensorDict) -> torch.Tensor:
        return logprobs

    loss = nrl.algos.add((1.0, policy_loss(reinforce, penalty=penalty)))
    with pytest.raises(MissingOutput, match="values"):
        trainer.train_step(loss)


def test_needs_that_are_none(trainer: Trainer) -> None:
    params = trainer.load()
    with pytest.raises(ArgumentError, match=r"forward: needs is 'logprobs'; give several entries, each a text"):
        trainer.forward(params, batch_of(), "logprobs")
    with pytest.raises(MissingOutput, match=r"forward: it needs top_k\(4\) and top_k\(8\), and one of them at a time"):
        trainer.forward(params, batch_of(), {top_k(4), top_k(8)})


def test_things_that_are_no_state_and_no_params(trainer: Trainer) -> None:
    state: Any = trainer.init()
    with pytest.raises(ArgumentError, match=r"train_step\(sft_loss\): state is a Params; give the train state"):
        trainer.train_step(sft_loss)(state.params, batch_of())
    with pytest.raises(ArgumentError, match=r"logprobs: params is a TrainState; give state.params"):
        trainer.logprobs(state, batch_of())
    with pytest.raises(ArgumentError, match=r"freeze: params is a TrainState; give state.params"):
        trainer.freeze(state)


def test_a_loss_that_writes_into_its_batch(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    def my_loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        batch["advantages"].mul_(2)
        return sft_loss(out, batch)

    monkeypatch.setenv("NRL_DEBUG", "1")
    with pytest.raises(nrl.errors.MutatedBatch, match="my_loss wrote into its batch: advantages"):
        trainer.train_step(my_loss)(trainer.init(), with_policy(batch_of()))


# state


def test_a_consumed_state_and_everything_borrowed_from_it(trainer: Trainer, tmp_path: Path) -> None:
    old = trainer.init()
    params, frozen = old.params, trainer.freeze(old.params)
    step = trainer.train_step(sft_loss)
    state, _ = step(old, batch_of())
    uses: dict[str, Callable[[], Any]] = {
        r"train_step\(sft_loss\)": lambda: step(old, batch_of()),
        "logprobs": lambda: trainer.logprobs(params, batch_of()),
        "freeze": lambda: trainer.freeze(params),
        "export": lambda: trainer.export(params, tmp_path / "export"),
        "save": lambda: trainer.save(old, tmp_path / "save"),
        "publish": lambda: publish(params, Recorder()),
        r"state\.params": lambda: old.params,
    }
    for who, use in uses.items():
        with pytest.raises(ConsumedState, match=rf"^{who}: .*consumed"):
            use()
    with pytest.raises(ConsumedState, match=r"consumed by train_step\(sft_loss\) already.*state, metrics = step"):
        trainer.logprobs(params, batch_of())
    torch.testing.assert_close(trainer.logprobs(frozen, batch_of()).result(), by_hand(batch_of()))
    assert not torch.equal(trainer.logprobs(state.params, batch_of()).result(), by_hand(batch_of()))


def test_what_is_refused_writes_nothing(trainer: Trainer, tmp_path: Path) -> None:
    old = trainer.init()
    params = old.params
    trainer.train_step(sft_loss)(old, batch_of())
    with pytest.raises(ConsumedState):
        trainer.export(params, tmp_path / "export")
    with pytest.raises(ConsumedState):
        trainer.save(old, tmp_path / "save")
    assert not list(tmp_path.iterdir())


def test_init_from_params_that_are_gone_names_init(trainer: Trainer) -> None:
    old = trainer.init()
    params = old.params
    trainer.train_step(sft_loss)(old, batch_of())
    with pytest.raises(ConsumedState, match=r"^init: .*consumed by train_step\(sft_loss\)"):
        trainer.init(params)


def test_the_state_of_another_trainer(cluster: Cluster) -> None:
    policy = make_trainer(cluster.reserve(1).mesh(), Bigram, name="policy", max_tokens=100)
    critic = make_trainer(cluster.reserve(1).mesh(), Bigram, name="critic", max_tokens=100)
    state = critic.init()

    def never(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        raise AssertionError("it must not be called")

    with pytest.raises(ForeignState, match=r"train_step\(never\): this train state belongs to critic, not to policy"):
        policy.train_step(never)(state, batch_of())
    with pytest.raises(
        ForeignState, match=r"logprobs: .* belongs to critic, not to policy; pass the state of the same trainer"
    ):
        policy.logprobs(state.params, batch_of())
    with pytest.raises(ForeignState, match=r"logprobs: this frozen params belongs to critic|frozen params"):
        policy.logprobs(critic.load(), batch_of())
    assert not state.handle.is_consumed
    copied = policy.init(state.params)  # weights may be copied across, though
    policy.train_step(sft_loss)(copied, batch_of())
    torch.testing.assert_close(critic.logprobs(state.params, batch_of()).result(), by_hand(batch_of()))


def test_a_cluster_that_has_been_left(tmp_path: Path) -> None:
    with nrl.cluster("local") as cluster:
        trainer = made(cluster)
        state, frozen = trainer.init(), trainer.load()
        params, step, sampler = state.params, trainer.train_step(sft_loss), Recorder()
        trainer.save(state, tmp_path / "saved")
    uses: dict[str, Callable[[], Any]] = {
        "init": trainer.init,
        "load": trainer.load,
        r"train_step\(sft_loss\)": lambda: step(state, batch_of()),
        "logprobs": lambda: trainer.logprobs(frozen, batch_of()),
        "freeze": lambda: trainer.freeze(params),
        "save": lambda: trainer.save(state, tmp_path / "again"),
        "restore": lambda: trainer.restore(tmp_path / "saved"),
        "export": lambda: trainer.export(params, tmp_path / "export"),
        "publish": lambda: publish(params, sampler),
    }
    for who, use in uses.items():
        with pytest.raises(ClosedCluster, match=rf"^{who}: the cluster 'local' has been left.*nrl\.cluster"):
            use()
    assert sampler.version == 0


def test_restore_from_a_folder_that_nobody_saved(trainer: Trainer, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"restore: .*{tmp_path / 'nothing'}: no manifest.json there says so"):
        trainer.restore(tmp_path / "nothing")


def test_restore_of_what_an_earlier_version_saved(trainer: Trainer, tmp_path: Path) -> None:
    """It wrote no manifest, and a state.json beside what the engine wrote; in a checkpoint, too."""
    old = {"version": 1, "published": True, "adapter": False, "step": 1, "files": {}}
    for folder in (tmp_path / "saved", tmp_path / "000010" / "policy"):
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps(old))
        with pytest.raises(CheckpointError, match=f"restore: {folder} was written by an earlier version .*let it"):
            trainer.restore(folder)
    trainer.save(trainer.init(), tmp_path / "saved")  # over it
    assert trainer.restore(tmp_path / "saved").step == 0


def test_restore_says_that_its_manifest_was_altered(trainer: Trainer, tmp_path: Path) -> None:
    trainer.save(trainer.init(), tmp_path)
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 0', '"version": 1'))
    with pytest.raises(CheckpointError, match=f"{tmp_path}: its manifest.json was altered"):
        trainer.restore(tmp_path)


def test_init_copies_params(trainer: Trainer) -> None:
    state, _ = trainer.train_step(sft_loss)(trainer.init(), batch_of())
    publish(state.params, Recorder())
    copy = trainer.init(state.params)
    assert (copy.step, copy.version) == (0, 0)
    expected = trainer.logprobs(state.params, batch_of()).result()
    trainer.train_step(sft_loss)(copy, batch_of())
    assert torch.equal(trainer.logprobs(state.params, batch_of()).result(), expected)


def test_save_and_restore_keep_the_counts(trainer: Trainer, tmp_path: Path) -> None:
    step, sampler = trainer.train_step(sft_loss), Recorder()
    state, _ = step(trainer.init(), batch_of())
    assert publish(state.params, sampler) == 1
    trainer.save(state, tmp_path / "deep" / "folder")
    again = trainer.restore(tmp_path / "deep" / "folder")
    assert (again.step, again.version) == (1, 1)
    assert publish(again.params, Recorder()) == 1  # published before the restore: the number that it has
    a, _ = step(state, batch_of())
    b, _ = step(again, batch_of())
    assert torch.equal(dict(a.params.tensors())["table"], dict(b.params.tensors())["table"])
    assert (publish(a.params, sampler), publish(b.params, Recorder())) == (2, 2)
    assert json.loads((tmp_path / "deep" / "folder" / "manifest.json").read_text())["values"]["."]["step"] == 1


# publish


def test_versions_of_other_weights_count_on(trainer: Trainer) -> None:
    """Two sets of weights that one sampler has had do not share a number."""
    state, sampler = trainer.init(), Recorder()
    for _ in range(3):
        publish(state.params, sampler)
        state, _ = trainer.train_step(sft_loss)(state, batch_of())
    reference = trainer.load()
    assert publish(reference, sampler) == 4
    assert publish(state.params, sampler) == 5
    assert (reference.version, state.version, sampler.version) == (4, 5, 5)


def test_publish_counts(trainer: Trainer) -> None:
    first: Sampler = (recorder := Recorder())
    second = Recorder()
    step = trainer.train_step(sft_loss)
    state = trainer.init()
    assert (state.version, publish(state.params, first), state.version) == (0, 1, 1)
    assert publish(state.params, second) == 1  # a second sampler: the same number
    assert publish(state.params, first) == 1
    assert (first.version, second.version, recorder.calls) == (1, 1, 2)
    state, _ = step(state, batch_of())
    assert state.version == 1  # a step is no publish
    state, _ = step(state, batch_of())
    assert publish(state.params, first) == 2
    assert (state.step, state.version, first.version, second.version) == (2, 2, 2, 1)
    assert torch.equal(recorder.weights["table"], dict(state.params.tensors())["table"])
    assert not torch.equal(second.weights["table"], recorder.weights["table"])


def test_a_publish_that_fails_does_not_count(trainer: Trainer) -> None:
    class Broken(Recorder):
        def receive(self, buckets: Any, version: int, *, inflight: Any = "wait") -> None:
            raise RuntimeError("the sampler is gone")

    state = trainer.init()
    with pytest.raises(RuntimeError, match="gone"):
        publish(state.params, Broken())
    assert state.version == 0
    assert publish(state.params, Recorder()) == 1


def test_frozen_params_keep_their_number(trainer: Trainer) -> None:
    state, sampler = trainer.init(), Recorder()
    publish(state.params, sampler)
    frozen = trainer.freeze(state.params)
    state, _ = trainer.train_step(sft_loss)(state, batch_of())
    assert publish(state.params, sampler) == 2
    assert publish(frozen, sampler) == 1
    assert sampler.version == 1


def test_the_names_in_messages_are_functions_of_the_loss() -> None:
    with nrl.cluster("local") as cluster:
        trainer = made(cluster)
        loss: Loss = nrl.algos.add((1.0, sft_loss), (1.0, nrl.algos.grpo_loss))
        with pytest.raises(MissingColumn, match=re.escape("advantages")):
            trainer.train_step(loss)(trainer.init(), batch_of())


def test_metrics_of_steps_add_up(trainer: Trainer) -> None:
    """Counts of skipped steps add up over steps, so that a loop over minibatches can merge what it gets."""
    step, state = trainer.train_step(sft_loss), trainer.init()
    merged: Metrics = {}
    for batch in (batch_of(), nrl.assign(batch_of(), loss_mask=torch.zeros_like(MASK)), batch_of()):
        state, metrics = step(state, batch)
        merged = nrl.merge(merged, metrics.result())
    assert isinstance(merged["skipped"], Sum)
    assert finalize(merged)["skipped"] == 1


def skewed(rows: int = 64, width: int = 4096) -> Batch:
    """Nearly all padding."""
    mask = torch.arange(width) < torch.tensor([width, *range(2, rows + 1)]).view(-1, 1)
    columns = {"input_ids": torch.ones_like(mask, dtype=torch.int64) * mask, "attention_mask": mask}
    weights = torch.rand(rows, generator=torch.Generator().manual_seed(0))
    return nrl.assign(Batch({}, batch_size=[rows]), **columns, loss_mask=mask, weights=weights)


def test_the_weights_of_a_loss_are_learnt_from_its_tokens() -> None:
    batch, seen = skewed(), list[int]()

    def loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        seen.append(out["logprobs"].numel())
        return sft_loss(out, batch)

    tokens = int(batch["loss_mask"].sum())
    assert global_weights(loss, batch) == {"loss": tokens}
    assert tokens < sum(seen) < 2.1 * 2**16 < batch["loss_mask"].numel()


def test_weights_that_are_no_whole_numbers_are_those_of_the_whole_batch_to_the_bit() -> None:
    batch = skewed()
    out = TensorDict({"logprobs": torch.zeros(batch["input_ids"].shape)}, batch_size=batch.batch_size)
    whole, _ = weighted_sft_loss(out, batch)
    assert isinstance(whole, Mean)
    assert global_weights(weighted_sft_loss, batch) == {"loss": float(whole.weight)}
