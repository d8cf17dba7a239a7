"""A step on forked episodes is the step on the same episodes in a row each, whatever the mesh and the order."""

import pytest

from nrl.batch import Batch
from nrl.runtime import Slots
from tests.properties.strategies import LOSSES, forked, make_batch
from tests.properties.test_shared_prefixes import trainer  # layer norms: a beginning may be computed more than once
from tests.properties.test_trainer_laws import MESHES, assert_equal, near, run, tokens_for

OF_ROWS = frozenset({"tokens", "lag"})
"""Metrics that count rows."""


@pytest.fixture(scope="module")
def rows(slots: Slots) -> Batch:
    lengths = [9, 3, 0, 12, 6, 2, 9, 7, 4]
    return near(trainer(slots), make_batch(lengths, [i == 3 for i in range(9)], [i == 7 for i in range(9)], 3, False))


@pytest.mark.parametrize("name", ["grpo with a penalty", "dapo", "dr grpo", "k1", "sum"])
def test_a_forked_episode_counts_once_on_every_mesh(name: str, slots: Slots, rows: Batch) -> None:
    loss, expected = LOSSES[name], run(trainer(slots, packing=None), LOSSES[name], rows)
    assert expected.metrics["grad_norm"] > 1e-3
    for seed, (dp, parts, packing) in enumerate(MESHES):
        batch = forked(rows, seed)
        found = run(trainer(slots, dp, tokens_for(batch, parts), packing), loss, batch)
        assert_equal(found, expected, but=OF_ROWS)


def test_rows_that_are_no_episodes_count_each(slots: Slots, rows: Batch) -> None:
    """The law above would not hold without ``episode_ids``."""
    made, batch = trainer(slots), forked(rows, 0)
    by_row, by_episode = (run(made, LOSSES["dr grpo"], each) for each in (batch.exclude("episode_ids"), batch))
    ratio = len(set(batch["episode_ids"][batch["loss_mask"].any(-1)].tolist())) / int(batch["loss_mask"].any(-1).sum())
    assert ratio < 0.8
    assert by_row.metrics["grad_norm"] == pytest.approx(ratio * by_episode.metrics["grad_norm"])
