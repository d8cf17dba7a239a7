"""Forked episodes: what their tokens are given, and what they add to a loss, does not depend on the rows that they lie
in, nor on the rows' order.
"""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

import nrl
from nrl import algos
from nrl.algos import Aggregate, Loss, policy_loss
from nrl.backends.training.loss.batch_checks import with_shares
from nrl.batch import Batch
from nrl.batch.metrics import Mean
from nrl.errors import BatchError, MissingColumn

Column = Callable[[Batch], Tensor]

COLUMNS: dict[str, Column] = {
    "from_token_rewards": algos.from_token_rewards(),
    "from_token_rewards(gamma)": algos.from_token_rewards(0.9),
    "reinforce_plus_plus": algos.reinforce_plus_plus,
    "token_rewards": lambda batch: algos.token_rewards(batch)["token_rewards"],
    "token_rewards and then from_token_rewards": lambda batch: algos.from_token_rewards(0.9)(
        algos.token_rewards(batch, algos.kl(algos.k1, 0.1))
    ),
    "advantages of episode_gae": lambda batch: algos.episode_gae(batch, gamma=0.9, lam=0.8)[0],
    "returns of episode_gae": lambda batch: algos.episode_gae(batch, gamma=0.9, lam=0.8)[1],
}


@st.composite
def episodes(draw: st.DrawFn) -> Batch:
    """Whole episodes, a row each: turns of some tokens, of which some are trained, and observations between them."""
    length, count = 12, draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    turns = torch.full((count, length), -1, dtype=torch.int16)
    for row in range(count):
        at, turn = draw(st.integers(0, 2)), 0
        while at < length:
            until = at + draw(st.integers(1, 4))
            turns[row, at:until] = turn
            at, turn = until + draw(st.integers(0, 2)), turn + 1
    mask = (turns >= 0) & (torch.rand(turns.shape, generator=generator) < 0.9)
    numbers = {
        name: torch.randn(turns.shape, generator=generator, dtype=torch.float64)
        for name in ("token_rewards", "values", "old_logprobs", "ref_logprobs")
    }
    rewards = torch.randn(count, generator=generator, dtype=torch.float64)
    valid = torch.rand(count, generator=generator) < 0.9
    columns = {"turns": turns, "loss_mask": mask & valid[:, None], "rewards": rewards, "valid": valid, **numbers}
    return Batch({**columns, "episode_ids": torch.arange(count)}, batch_size=[count])


def drawn_forks(batch: Batch, data: st.DataObject) -> tuple[Batch, list[int]]:
    """The same episodes, each in one row or several, in any order; and which episode each row is of."""
    rows, masks = [], []
    for row in range(len(batch)):
        last = int(batch["turns"][row].max())
        cuts = sorted(data.draw(st.sets(st.integers(1, last), max_size=3))) if last > 0 else []
        for begin, end in zip([0, *cuts], [*cuts, last + 1], strict=True):  # a row has turns begin ... end - 1
            rows.append(row)
            masks.append(batch["loss_mask"][row] & (batch["turns"][row] >= begin) & (batch["turns"][row] < end))
    order = data.draw(st.permutations(range(len(rows))))
    taken, mask = torch.tensor([rows[i] for i in order]), torch.stack([masks[i] for i in order])
    turns = torch.where(mask, batch["turns"][taken], -1)  # others are the prompt of a forked row
    return nrl.assign(Batch(batch[taken], batch_size=[len(taken)]), loss_mask=mask, turns=turns), taken.tolist()


@pytest.mark.parametrize("column", COLUMNS.values(), ids=list(COLUMNS))
@settings(max_examples=30)
@given(batch=episodes(), data=st.data())
def test_a_fork_changes_nothing_that_a_token_is_given(column: Column, batch: Batch, data: st.DataObject) -> None:
    whole = column(batch)
    forked, taken = drawn_forks(batch, data)
    found, mask = column(forked), forked["loss_mask"]
    for i, row in enumerate(taken):
        torch.testing.assert_close(found[i][mask[i]], whole[row][mask[i]], rtol=1e-9, atol=1e-9)
    assert not found[~mask].any()


# --- losses

LOSSES: dict[str, Loss] = {
    "grpo": algos.grpo_loss,
    "grpo with a penalty": policy_loss(algos.clip(0.2), penalty=algos.kl(algos.k3, 0.04), aggregate=algos.seq_mean),
    "dapo": algos.dapo_loss,
    "dr grpo": algos.dr_grpo_loss(16),
    "reinforce": algos.reinforce_loss,
    "cispo": algos.cispo_loss,
    "sapo": algos.sapo_loss,
    "tis": policy_loss(algos.clip(0.2), correction=algos.truncate(1.2), aggregate=algos.seq_mean),
    "value": algos.value_loss(clip=0.2),
    "value of rows": algos.value_loss(aggregate=algos.seq_mean),
    "distillation of rows": algos.distillation_loss(aggregate=algos.seq_mean),
    "sft": algos.sft_loss,
    "sum": algos.add((1.0, algos.grpo_loss), (0.5, algos.dapo_loss)),
}
"""All that treat each token alone."""

OF_ROWS: dict[str, Loss] = {
    "gspo": algos.gspo_loss,
    "gmpo": algos.gmpo_loss,
    "sequence tis": policy_loss(algos.clip(0.2), correction=algos.sequence_truncate(1.2), aggregate=algos.seq_mean),
    "opsm": policy_loss(algos.clip(0.2), keep=algos.opsm(0.1), aggregate=algos.seq_mean),
}
"""Ratios, corrections and selections of whole rows are those of each row of a fork; the rows count once together."""


def read_by_losses(batch: Batch) -> Batch:
    """The batch with what losses read beside."""
    g, shape = torch.Generator().manual_seed(0), batch["loss_mask"].shape
    numbers = {
        name: torch.randn(shape, generator=g, dtype=torch.float64) for name in ("advantages", "returns", "noise")
    }
    known = torch.randn(*shape, 3, generator=g, dtype=torch.float64).log_softmax(-1) - 0.5
    return nrl.assign(
        batch,
        advantages=numbers["advantages"],
        returns=numbers["returns"],
        rollout_logprobs=batch["old_logprobs"] + 0.3 * numbers["noise"],
        input_ids=torch.zeros(shape, dtype=torch.int64),
        teacher_ids=torch.zeros(*shape, 3, dtype=torch.int64),
        teacher_topk_logprobs=known,
    )


def outputs(batch: Batch) -> dict[str, Tensor]:
    """What a model may put out, a function of each token's columns, so that a fork has the same."""
    at = algos.logprobs_at("teacher_ids")
    return {
        "logprobs": batch["old_logprobs"] + 0.3 * batch["returns"],
        "values": batch["values"] + 0.1 * batch["advantages"],
        at: batch["teacher_topk_logprobs"] + 0.3 * batch["ref_logprobs"].sigmoid().log().unsqueeze(-1),
    }


type Term = tuple[float, float, dict[str, Tensor]]


def evaluated(loss: Loss, batch: Batch) -> dict[str, Term]:
    """Each term's total, weight, and gradient of the total for each output."""
    leaves = {name: x.clone().requires_grad_() for name, x in outputs(batch).items()}
    found, _ = loss(TensorDict(leaves, batch_size=batch.batch_size), batch)
    terms = {"loss": found} if isinstance(found, Mean) else found

    def gradients(total: Tensor) -> dict[str, Tensor]:
        grads = torch.autograd.grad(total, list(leaves.values()), retain_graph=True, materialize_grads=True)
        return dict(zip(leaves, grads, strict=True))

    return {key: (term.total.item(), term.weight.item(), gradients(term.total)) for key, term in terms.items()}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=list(LOSSES))
@settings(max_examples=20)
@given(batch=episodes(), data=st.data())
def test_a_fork_changes_nothing_about_a_loss(loss: Loss, batch: Batch, data: st.DataObject) -> None:
    batch = read_by_losses(batch)
    forked, taken = drawn_forks(batch, data)
    whole, mask = evaluated(loss, batch), forked["loss_mask"]
    for key, (total, weight, gradients) in evaluated(loss, forked).items():
        assert (total, weight) == pytest.approx(whole[key][:2], rel=1e-9, abs=1e-9)
        for output, gradient in gradients.items():
            torch.testing.assert_close(gradient[mask], whole[key][2][output][taken][mask], rtol=1e-9, atol=1e-9)
            assert not gradient[~mask].any()


@pytest.mark.parametrize("loss", [*LOSSES.values(), *OF_ROWS.values()], ids=[*LOSSES, *OF_ROWS])
@settings(max_examples=20)
@given(batch=episodes(), data=st.data())
def test_forked_rows_add_up_over_parts(loss: Loss, batch: Batch, data: st.DataObject) -> None:
    forked, _ = drawn_forks(read_by_losses(batch), data)
    whole, shared = evaluated(loss, forked), with_shares(forked)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(forked)), max_size=3)))
    parts = [evaluated(loss, shared[a:b]) for a, b in zip([0, *cuts], [*cuts, len(forked)], strict=True)]
    for key, (total, weight, gradients) in whole.items():
        added = [sum(part[key][i] for part in parts) for i in (0, 1)]  # type: ignore[misc]
        assert added == pytest.approx([total, weight], rel=1e-9, abs=1e-9)
        for output, gradient in gradients.items():
            torch.testing.assert_close(torch.cat([part[key][2][output] for part in parts]), gradient)


@pytest.mark.parametrize("loss", OF_ROWS.values(), ids=list(OF_ROWS))
@settings(max_examples=20)
@given(batch=episodes(), data=st.data())
def test_a_loss_with_ratios_of_rows_counts_episodes(loss: Loss, batch: Batch, data: st.DataObject) -> None:
    batch = read_by_losses(batch)
    forked, _ = drawn_forks(batch, data)
    ((_, weight, _),) = evaluated(loss, forked).values()
    assert weight == pytest.approx(int(batch["loss_mask"].any(-1).sum()))


def two_rows_of_one() -> Batch:
    """An episode of four tokens in two rows, and one of two tokens in one row."""
    mask = torch.tensor([[True, False, False], [True, True, True], [True, True, False]])
    advantages = torch.tensor([[8.0, 9.0, 9.0], [4.0, 4.0, 4.0], [2.0, 6.0, 9.0]])
    return Batch({"loss_mask": mask, "advantages": advantages, "episode_ids": torch.tensor([5, 5, 1])}, batch_size=[3])


@pytest.mark.parametrize(
    ("aggregate", "forked", "rows"),
    [
        (algos.token_mean, (28.0, 6.0), (28.0, 6.0)),
        (algos.seq_mean, ((8 + 4 + 4 + 4) / 4 + (2 + 6) / 2, 2.0), (8 / 1 + 12 / 3 + 8 / 2, 3.0)),
        (algos.seq_sum(16), (28 / 16, 2.0), (28 / 16, 3.0)),
    ],
    ids=["token_mean", "seq_mean", "seq_sum"],
)
def test_a_forked_loss_by_hand(aggregate: Aggregate, forked: tuple[float, float], rows: tuple[float, float]) -> None:
    batch, out = two_rows_of_one(), TensorDict({"logprobs": torch.zeros(3, 3)}, batch_size=[3])
    loss = policy_loss(lambda log_ratio, logprobs, a: a, ratio=algos.on_policy_ratio, aggregate=aggregate)
    for known in (batch, with_shares(batch)):
        assert tuple(part.item() for part in loss(out, known)[0]) == forked
    assert tuple(part.item() for part in loss(out, batch.exclude("episode_ids"))[0]) == rows


def test_a_step_adds_shares_of_what_is_trained() -> None:
    batch = two_rows_of_one()
    assert with_shares(batch)["episode_shares"].tolist() == [0.25, 0.75, 1.0]
    narrowed = nrl.assign(with_shares(batch), loss_mask=batch["loss_mask"] & torch.tensor([True, True, False]))
    assert with_shares(narrowed)["episode_shares"].tolist() == pytest.approx([1 / 3, 2 / 3, 1.0])
    failed = nrl.assign(batch, valid=torch.tensor([True, False, False]))
    assert with_shares(failed)["episode_shares"].tolist() == [1.0, 0.0, 0.0]
    assert with_shares(batch).is_locked


def test_a_batch_without_forks_goes_as_it_is() -> None:
    batch = nrl.assign(two_rows_of_one(), episode_ids=torch.tensor([5, 6, 1]))
    assert with_shares(batch) is batch
    for missing in ("episode_ids", "loss_mask"):
        other = two_rows_of_one().exclude(missing)
        assert with_shares(other) is other
    stale = with_shares(nrl.assign(batch, episode_shares=torch.full((3,), 0.5)))
    assert set(stale.keys()) == set(batch.keys())
    assert stale.is_locked


@pytest.mark.parametrize("loss", [*LOSSES.values(), *OF_ROWS.values()], ids=[*LOSSES, *OF_ROWS])
@settings(max_examples=10)
@given(batch=episodes())
def test_without_forks_a_loss_is_the_same_to_the_last_bit(loss: Loss, batch: Batch) -> None:
    batch = read_by_losses(batch)
    alone = evaluated(loss, batch.exclude("episode_ids"))
    for key, (total, weight, gradients) in evaluated(loss, batch).items():
        assert (total, weight) == alone[key][:2]
        assert all(bool((gradient == alone[key][2][output]).all()) for output, gradient in gradients.items())


# --- errors, and expected numbers by hand


def forked(**columns: Tensor) -> Batch:
    """An episode of two turns in two rows, the later one first: 0.25 for the first turn, and 2 in all."""
    mask = torch.tensor([[False, False, True], [True, True, False]])
    known = {
        "loss_mask": mask,
        "rewards": torch.tensor([2.25, 2.25]),
        "token_rewards": torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.25, 0.0]]),
        "episode_ids": torch.tensor([3, 3]),
        "turns": torch.tensor([[-1, -1, 1], [0, 0, -1]], dtype=torch.int16),
    }
    return Batch({**known, **columns}, batch_size=[2])


def test_an_episode_that_forked_by_hand() -> None:
    rewarded = algos.token_rewards(forked())
    assert rewarded["token_rewards"].tolist() == [[0.0, 0.0, 2.0], [0.0, 0.25, 0.0]]
    assert algos.from_token_rewards()(rewarded).tolist() == [[0.0, 0.0, 2.0], [2.25, 2.25, 0.0]]


def test_rows_of_an_episode_need_turns() -> None:
    with pytest.raises(MissingColumn, match=r"from_token_rewards.*turns"):
        algos.from_token_rewards()(forked().exclude("turns"))


@pytest.mark.parametrize(
    ("turns", "row"), [([[-1, -1, 0], [0, 0, -1]], "row 1"), ([[-1, -1, -1], [0, 0, -1]], "row 0")]
)
def test_turns_that_do_not_say_an_order(turns: list[list[int]], row: str) -> None:
    batch = forked(turns=torch.tensor(turns, dtype=torch.int16))
    with pytest.raises(BatchError, match=rf"token_rewards: {row} is one of several of the episode 3, and its turns do"):
        algos.token_rewards(batch)


def test_rows_of_an_episode_have_one_reward() -> None:
    with pytest.raises(BatchError, match="token_rewards: row 1 has another value of rewards"):
        algos.token_rewards(forked(rewards=torch.tensor([2.25, 1.0])))
