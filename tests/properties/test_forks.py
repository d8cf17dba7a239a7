"""Forked episodes: what their tokens are given does not depend on the rows that they lie in, nor on the rows' order."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import nrl
from nrl import algos
from nrl.batch import Batch
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


@pytest.mark.parametrize("column", COLUMNS.values(), ids=list(COLUMNS))
@settings(max_examples=30)
@given(batch=episodes(), data=st.data())
def test_a_fork_changes_nothing_that_a_token_is_given(column: Column, batch: Batch, data: st.DataObject) -> None:
    whole = column(batch)
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
    forked = nrl.assign(Batch(batch[taken], batch_size=[len(taken)]), loss_mask=mask, turns=turns)
    found = column(forked)
    for i, row in enumerate(taken.tolist()):
        torch.testing.assert_close(found[i][mask[i]], whole[row][mask[i]], rtol=1e-9, atol=1e-9)
    assert not found[~mask].any()


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
