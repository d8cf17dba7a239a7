"""Law 1: statistics see the whole batch, before it is split, and see neither its order nor its padding."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import nrl
from nrl import algos
from nrl.algos import Estimator
from nrl.batch import Batch
from tests.properties.strategies import batches, taken

ESTIMATORS = {
    name: algos.from_rewards(fn)
    for name, fn in {
        "group_normalize": algos.group_normalize,
        "group_center": algos.group_center,
        "leave_one_out": algos.leave_one_out,
        "per_group": algos.per_group(lambda rewards: rewards - rewards.median()),
    }.items()
}


@st.composite
def rollouts(draw: st.DrawFn) -> Batch:
    batch = draw(batches())
    rows = len(batch)
    groups = draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows))
    rewards = draw(st.lists(st.sampled_from([0.0, 0.1, 1.0, -2.0]), min_size=rows, max_size=rows))
    return nrl.assign(batch, group_ids=torch.tensor(groups), rewards=torch.tensor(rewards, dtype=torch.float64))


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=list(ESTIMATORS))
@settings(max_examples=25)
@given(data=st.data())
def test_advantages_do_not_see_order_padding_or_failures(estimator: Estimator, data: st.DataObject) -> None:
    batch = data.draw(rollouts())
    expected = algos.advantages(batch, estimator)["advantages"]
    order = data.draw(st.permutations(range(len(batch))))
    close(algos.advantages(taken(batch, order), estimator)["advantages"], expected[order])
    width = batch["input_ids"].shape[-1]
    wider = algos.advantages(nrl.pad(batch, width + 3), estimator)["advantages"]
    close(wider[:, :width], expected)
    assert not wider[:, width:].any()
    spoiled = nrl.assign(batch, rewards=torch.where(batch["valid"], batch["rewards"], float("nan")))
    close(algos.advantages(spoiled, estimator)["advantages"], expected)
    assert not expected[~batch["loss_mask"]].any()


@pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=list(ESTIMATORS))
@settings(max_examples=25)
@given(data=st.data())
def test_advantages_need_the_rows_of_a_group_and_no_others(estimator: Estimator, data: st.DataObject) -> None:
    batch = data.draw(rollouts())
    expected = algos.advantages(batch, estimator)["advantages"]
    for group in batch["group_ids"].unique():
        rows = torch.nonzero(batch["group_ids"] == group)[:, 0]
        close(algos.advantages(taken(batch, rows.tolist()), estimator)["advantages"], expected[rows])


@settings(max_examples=25)
@given(data=st.data())
def test_a_group_whose_rewards_are_equal_teaches_exactly_nothing(data: st.DataObject) -> None:
    batch = data.draw(rollouts())
    reward = data.draw(st.floats(-1e6, 1e6))
    same = nrl.assign(batch, rewards=torch.full((len(batch),), reward, dtype=torch.float64))
    for estimator in ESTIMATORS.values():
        assert not algos.advantages(same, estimator)["advantages"].any()


@settings(max_examples=25)
@given(data=st.data())
def test_an_episode_of_several_rows_counts_once(data: st.DataObject) -> None:
    """Forked rows of an episode change neither their own advantage nor that of others."""
    batch = data.draw(rollouts())
    copies = [row for row in range(len(batch)) for _ in range(data.draw(st.integers(1, 3)))]
    forked = nrl.assign(taken(batch, copies), episode_ids=torch.tensor(copies))
    for estimator in ESTIMATORS.values():
        expected = algos.advantages(batch, estimator)["advantages"]
        close(algos.advantages(forked, estimator)["advantages"], expected[copies])
