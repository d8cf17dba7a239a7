"""The same laws through a real model and a real step: dp, micro-batches, packing, padding and order change nothing.

The optimizer is AdamW without memory and with a huge epsilon, ``w - g / (1 + |g| / 1e6)``: one step shows the gradient,
and rounding does not grow.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import Phase, given, settings
from torch import Tensor

import nrl
from nrl.algos import Loss
from nrl.backends import Model, Trainer, adamw, fsdp
from nrl.backends.training.layout import microbatch_plan
from nrl.batch import Batch
from nrl.batch.metrics import finalize
from nrl.batch.packed_rows import Packing
from nrl.batch.packing import Packed, pack
from nrl.runtime import Slots
from tests.metrics import LAYOUT
from tests.properties.strategies import (
    LOSSES,
    PAIR_LOSSES,
    TINY,
    batches,
    hidden_rows,
    make_batch,
    policy_losses,
    taken,
)

MODEL = Model(TINY, dtype="float64")
SHOW = adamw(lr=1e6, eps=1e6, betas=(0.0, 0.0), clip=float("inf"))
LARGE = 10_000
MESHES: list[tuple[int, int, Packing | None]] = [
    (1, 1, nrl.Rectangles),
    (1, 1, nrl.Sequences),
    (2, 2, nrl.Rectangles),
    (3, 3, None),
    (1, 5, nrl.Sequences),
    (3, 12, nrl.Rectangles),
]
"""dp, the number of micro-batches, and how rows are packed."""
packings = st.sampled_from([nrl.Rectangles, nrl.Sequences, None])
NO_SHRINK = (Phase.explicit, Phase.generate)  # a smaller example of a failure is not worth minutes of steps
ALL = [(name, loss, False) for name, loss in LOSSES.items()] + [
    (name, loss, True) for name, loss in PAIR_LOSSES.items()
]
CASES = [pytest.param(loss, pairs, id=name) for name, loss, pairs in ALL]


@pytest.fixture(autouse=True, scope="module")
def whole() -> Iterator[None]:
    """Sequences are laid out whole, as rectangles are where the batch is so small.

    The model's RMS norms round to float32 in transformers, so that it shows whether gradients of common tokens are
    added up before them or after. The same laws hold to the same bounds with layer norms: `test_shared_prefixes`.
    """

    def whole_rows(batch: Batch, *, packing: Packing, share: bool | None = False, **options: Any) -> Packed:
        return pack(batch, packing=packing, share=False if packing is nrl.Sequences else share, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(microbatch_plan, "pack", whole_rows)
        yield


class Result(NamedTuple):
    """Metrics, and what the step added to each weight, which is minus its gradient."""

    metrics: dict[str, float]
    change: dict[str, Tensor]


def trainer(slots: Slots, dp: int = 1, max_tokens: int = LARGE, packing: Packing | None = nrl.Rectangles) -> Trainer:
    return fsdp.trainer(slots[:dp], MODEL, SHOW, max_tokens=max_tokens, packing=packing)


def run(made: Trainer, loss: Loss, batch: Batch) -> Result:
    state = made.init()
    before = {name: x.clone() for name, x in state.params.tensors()}
    state, metrics = made.train_step(loss)(state, batch)
    return Result(finalize(metrics.result()), {name: x - before[name] for name, x in state.params.tensors()})


def near(made: Trainer, batch: Batch) -> Batch:
    """The batch with log-probabilities near those of the model, so that some ratios are clipped and some are not."""
    logprobs = made.logprobs(made.init().params, batch).result()
    noise = batch["rollout_logprobs"] - batch["old_logprobs"], batch["ref_logprobs"] - batch["old_logprobs"]
    return nrl.assign(
        batch,
        old_logprobs=logprobs + noise[0],
        rollout_logprobs=logprobs + 0.3 * noise[1],
        ref_logprobs=logprobs + noise[1],
    )


def tokens_for(batch: Batch, n: int) -> int:
    """A ``max_tokens`` under which the batch makes ``n`` micro-batches, or as near to that as it can."""
    widest = max(1, int(nrl.lengths(batch).max())) * (2 if batch.ndim > 1 else 1)
    choices = [widest * rows for rows in range(1, len(batch) + 1)]
    return min(choices, key=lambda tokens: abs(len(nrl.microbatches(batch, max_tokens=tokens)) - n))


def assert_equal(found: Result, expected: Result, but: frozenset[str] = frozenset()) -> None:
    assert found.metrics.keys() == expected.metrics.keys()
    for name in expected.metrics.keys() - but - LAYOUT:
        assert found.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-9, abs=1e-12, nan_ok=True), name
    for name, change in expected.change.items():
        torch.testing.assert_close({name: found.change[name]}, {name: change}, rtol=1e-9, atol=1e-12)


@pytest.fixture(scope="module")
def rows(slots: Slots) -> Batch:
    """Twelve rows: of many lengths, one without tokens, one that is not trained on, one that failed."""
    lengths = [9, 3, 0, 12, 6, 2, 9, 7, 4, 10, 5, 8]
    batch = make_batch(lengths, [i == 3 for i in range(12)], [i == 7 for i in range(12)], seed=3, pairs=False)
    return near(trainer(slots), batch)


@pytest.fixture(scope="module")
def pairs(slots: Slots) -> Batch:
    lengths = [9, 3, 4, 12, 6, 2, 9, 7, 4, 10, 5, 8, 0, 3, 6, 6, 11, 9, 8, 7, 3, 12, 9, 9]
    batch = make_batch(lengths, [i == 5 for i in range(24)], [i == 20 for i in range(24)], seed=4, pairs=True)
    return near(trainer(slots), batch)


@pytest.mark.parametrize(("loss", "paired"), CASES)
def test_every_loss_gives_the_same_step_on_every_mesh(
    loss: Loss, paired: bool, slots: Slots, rows: Batch, pairs: Batch
) -> None:
    batch = pairs if paired else rows
    expected = run(trainer(slots, packing=None), loss, batch)
    assert expected.metrics["skipped"] == 0
    assert expected.metrics["grad_norm"] > 1e-3
    for dp, parts, packing in MESHES:
        made = trainer(slots, dp, tokens_for(batch, parts), packing)
        assert_equal(run(made, loss, batch), expected)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 12])
@pytest.mark.parametrize("packing", [nrl.Rectangles, nrl.Sequences, None])
def test_any_number_of_micro_batches(n: int, packing: Packing | None, slots: Slots) -> None:
    equal = near(trainer(slots), make_batch([8] * 12, [False] * 12, [i == 4 for i in range(12)], seed=5, pairs=False))
    max_tokens = 8 * -(-12 // n)
    parts = len(nrl.microbatches(equal, max_tokens=max_tokens))
    assert parts == {1: 1, 2: 2, 3: 3, 5: 4, 12: 12}[n]  # five groups of equal rows need three each, which makes four
    loss = LOSSES["sum"]
    assert_equal(run(trainer(slots, 1, max_tokens, packing), loss, equal), run(trainer(slots), loss, equal))


@pytest.mark.parametrize(("loss", "paired"), CASES)
def test_order_padding_and_masked_rows_change_nothing(
    loss: Loss, paired: bool, slots: Slots, rows: Batch, pairs: Batch
) -> None:
    batch = pairs if paired else rows
    expected = run(trainer(slots), loss, batch)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0)).tolist()
    assert_equal(run(trainer(slots, 2, tokens_for(batch, 3)), loss, taken(batch, order)), expected)
    wider = nrl.pad(batch, batch["input_ids"].shape[-1] + 5)
    assert_equal(run(trainer(slots), loss, wider), expected)
    assert_equal(run(trainer(slots, packing=None), loss, wider), expected)
    more = nrl.concatenate([hidden_rows(batch, 1), batch, hidden_rows(batch, 2)])
    more = nrl.assign(more, ref_logprobs=more["ref_logprobs"].nan_to_num(0.0))
    for made in (trainer(slots), trainer(slots, 3, tokens_for(batch, 5), packing=None)):
        assert_equal(run(made, loss, more), expected, but=frozenset({"tokens"}))


@settings(max_examples=12, phases=NO_SHRINK)
@given(data=st.data(), loss=st.one_of(policy_losses, st.sampled_from(list(LOSSES.values()))))
def test_any_batch_any_loss_any_mesh(data: st.DataObject, loss: Loss, slots: Slots) -> None:
    batch = near(trainer(slots), data.draw(batches(width=7)))
    expected = run(trainer(slots), loss, batch)
    dp, n, packing = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6)), data.draw(packings)
    order = data.draw(st.permutations(range(len(batch))))
    found = run(trainer(slots, dp, tokens_for(batch, n), packing), loss, taken(batch, order))
    assert_equal(found, expected)


@settings(max_examples=12, phases=NO_SHRINK)
@given(data=st.data())
def test_log_probabilities_are_the_same_on_every_mesh(data: st.DataObject, slots: Slots) -> None:
    batch = data.draw(batches(pairs=data.draw(st.booleans())))
    plain = trainer(slots, packing=None)
    expected = plain.logprobs(plain.init().params, batch).result()
    order = data.draw(st.permutations(range(len(batch))))
    dp, n, packing = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6)), data.draw(packings)
    made = trainer(slots, dp, tokens_for(batch, n), packing)
    found = made.logprobs(made.init().params, taken(batch, order)).result()
    torch.testing.assert_close(found, expected[order], rtol=1e-9, atol=1e-12)


def test_the_gradient_is_that_of_the_plain_loss(slots: Slots, rows: Batch) -> None:
    """All layouts agree, and what they agree on is what autograd finds through the stock model, row by row."""
    from nrl.backends.models.loading import build

    module = build(MODEL)
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(rows)):
        ids = rows["input_ids"][row, : int(nrl.lengths(rows)[row])]
        mask = rows["loss_mask"][row, 1 : len(ids)]
        if mask.any():
            temperature = float(rows["temperature"][row]) or 1.0
            logits = module(input_ids=ids[None], use_cache=False).logits[0, :-1] / temperature
            logprobs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            total = total - logprobs[mask].sum()
    (total / rows["loss_mask"].sum()).backward()
    change = run(trainer(slots, 2, tokens_for(rows, 3)), LOSSES["sft"], rows).change
    for name, parameter in module.named_parameters():
        if name in change:
            assert parameter.grad is not None
            torch.testing.assert_close(-change[name], parameter.grad, rtol=1e-6, atol=1e-10, msg=name)
