"""Common first tokens that are computed once, and outputs that are not computed at all, change no number.

A batch here is small, so blocks and micro-batches are made free: then all that rows have in common at their beginning
is shared, and rows that begin alike are kept together.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tensordict import TensorDict
from torch import Tensor

import nrl
from nrl import algos
from nrl.algos import Loss, needs, token_mean
from nrl.backends import Model, Trainer, fsdp
from nrl.backends.models.loading import build
from nrl.backends.training.layout import microbatch_plan
from nrl.backends.training.outputs import output_heads
from nrl.backends.training.outputs.fused_logprobs import linear_logprobs
from nrl.batch import Batch
from nrl.batch.metrics import Mean, Metrics, Sum
from nrl.batch.packed_rows import Packing
from nrl.batch.packing import Packed, pack
from nrl.runtime import Slots
from tests.properties.strategies import LOSSES, TINY, policy_losses, taken
from tests.properties.test_trainer_laws import LARGE, NO_SHRINK, SHOW, assert_equal, near, run, tokens_for

WIDTH = 12
CONFIG = TINY | {"model_type": "starcoder2", "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": None}
"""Layer norms in float64: RMS norms round to float32 in transformers, and adding gradients up before or after shows."""
MODEL = Model(CONFIG, dtype="float64")
PACKINGS: list[Packing] = [nrl.Rectangles, nrl.Sequences]
packings = st.sampled_from(PACKINGS)


def trainer(slots: Slots, dp: int = 1, max_tokens: int = LARGE, packing: Packing | None = nrl.Rectangles) -> Trainer:
    return fsdp.trainer(slots[:dp], MODEL, SHOW, max_tokens=max_tokens, packing=packing)


@pytest.fixture(autouse=True, scope="module")
def laid_out() -> Iterator[list[Packed]]:
    """All packed tokens that were made, newest last; blocks are free."""
    made: list[Packed] = []

    def recorded(*args: Any, **kwargs: Any) -> Packed:
        made.append(pack(*args, **kwargs))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nrl.batch.packed_rows._BLOCK_COST", 0)
        patch.setattr("nrl.batch.prefixes._PART_COST", 0)
        patch.setattr(microbatch_plan, "pack", recorded)
        yield made


def batch_of(rows: list[list[int]], prompts: list[int], seed: int = 0) -> Batch:
    """Rows of these tokens, trained on after their prompts with a hole now and then, with every column."""
    g, n = torch.Generator().manual_seed(seed), len(rows)
    sizes = torch.tensor([len(row) for row in rows])[:, None]
    mask = torch.arange(WIDTH) < sizes
    trained = mask & (torch.arange(WIDTH) >= torch.tensor(prompts)[:, None]) & (torch.rand(n, WIDTH, generator=g) > 0.3)

    def numbers(scale: float) -> Tensor:
        return torch.randn(n, WIDTH, generator=g, dtype=torch.float64) * scale

    old = -numbers(2.0).abs()
    return nrl.assign(
        Batch({}, batch_size=[n]),
        input_ids=torch.tensor([[*row, *[0] * (WIDTH - len(row))] for row in rows]),
        attention_mask=mask,
        loss_mask=trained & (torch.arange(WIDTH) > 0),
        old_logprobs=old,
        rollout_logprobs=old + numbers(0.3),
        ref_logprobs=old + numbers(0.5),
        advantages=numbers(1.0),
        temperature=torch.tensor([0.0, 0.7, 1.0], dtype=torch.float64)[torch.randint(0, 3, (n,), generator=g)],
        desirable=torch.rand(n, generator=g) < 0.5,
        reference_point=torch.rand(n, generator=g, dtype=torch.float64),
        weights=torch.rand(n, generator=g, dtype=torch.float64),
    )


@st.composite
def families(draw: st.DrawFn) -> Batch:
    """Answers to a few prompts, of which one may begin like another; alone, equal, empty and untrained ones too."""
    words = st.integers(1, 3)
    prompts: list[list[int]] = []
    for _ in range(draw(st.integers(1, 3))):
        begin = draw(st.sampled_from([[], *prompts]))
        prompts.append([*begin, *draw(st.lists(words, max_size=4))][:8])
    rows, trained = [], []
    for _ in range(draw(st.integers(1, 7))):
        prompt = draw(st.sampled_from(prompts))
        rows.append([*prompt, *draw(st.lists(words, max_size=4))])
        trained.append(draw(st.sampled_from([len(prompt), len(prompt), 0, WIDTH])))
    return batch_of(rows, trained, draw(st.integers(0, 2**16)))


@settings(max_examples=25, phases=NO_SHRINK)
@given(data=st.data(), batch=families(), loss=st.one_of(policy_losses, st.sampled_from(list(LOSSES.values()))))
def test_a_step_on_shared_tokens_is_that_of_rows_laid_out_whole(
    data: st.DataObject, batch: Batch, loss: Loss, slots: Slots
) -> None:
    batch = near(trainer(slots, packing=None), batch)
    expected = run(trainer(slots, packing=None), loss, batch)
    order = data.draw(st.permutations(range(len(batch))))
    dp, n = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 4))
    made = trainer(slots, dp, tokens_for(batch, n), data.draw(packings))
    assert_equal(run(made, loss, taken(batch, order)), expected)


@settings(max_examples=25, phases=NO_SHRINK)
@given(batch=families(), packing=packings)
def test_log_probabilities_of_shared_tokens(batch: Batch, packing: Packing, slots: Slots) -> None:
    plain, made = trainer(slots, packing=None), trainer(slots, packing=packing)
    expected = plain.logprobs(plain.init().params, batch).result()
    found = made.logprobs(made.init().params, batch).result()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


GROUPS = [[5, 1, 7, 2, *answer] for answer in ([3, 4, 9], [3, 4, 9], [8], [1, 1, 1, 1], [])] + [
    [5, 1, 6, *answer] for answer in ([2, 2], [9, 9, 9])
]
"""Two prompts that begin alike, with five answers and two."""
PROMPTS = [4] * 5 + [3] * 2


def each_alone(loss: Loss, batch: Batch) -> dict[str, Tensor]:
    """The gradient of a loss by autograd through the stock model, a row at a time."""
    module = build(MODEL)
    logprobs = torch.zeros(batch["input_ids"].shape, dtype=torch.float64)
    for row, size in enumerate(nrl.lengths(batch).tolist()):
        logits = module(input_ids=batch["input_ids"][row : row + 1, :size], use_cache=False).logits[0, :-1]
        logits = logits / (float(batch["temperature"][row]) or 1.0)
        found = logits.log_softmax(-1).gather(1, batch["input_ids"][row, 1:size, None])[:, 0]
        logprobs[row] = torch.nn.functional.pad(found, (1, WIDTH - size))
    mean, _ = loss(TensorDict({"logprobs": logprobs}, batch_size=batch.batch_size), batch)
    assert isinstance(mean, Mean)
    (mean.total / mean.weight).backward()
    return {name: x.grad for name, x in module.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("loss", [algos.grpo_loss, algos.sft_loss])
@pytest.mark.parametrize("packing", PACKINGS)
def test_the_gradient_is_that_of_rows_one_at_a_time(
    loss: Loss, packing: Packing, slots: Slots, laid_out: list[Packed]
) -> None:
    batch = near(trainer(slots), batch_of(GROUPS, PROMPTS))
    found = run(trainer(slots, packing=packing), loss, batch)
    assert len(laid_out[-1].input_ids) < int(nrl.lengths(batch).sum()) - 4 * 3
    expected = each_alone(loss, batch)
    assert len(expected) > 20
    for name, gradient in expected.items():
        change = found.change[name]  # -g / (1 + |g| / 1e6)
        torch.testing.assert_close(-change / (1 - change.abs() / 1e6), gradient, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("window", [1, 2, 3, 5, 50])
def test_sliding_windows_reach_into_shared_tokens(window: int, slots: Slots) -> None:
    batch = batch_of(GROUPS, PROMPTS)
    results = [
        fsdp.trainer(
            slots[:1],
            Model(CONFIG | {"sliding_window": window}, dtype="float64"),
            SHOW,
            max_tokens=LARGE,
            packing=packing,
        )
        for packing in (*PACKINGS, None)
    ]
    params = [made.init().params for made in results]
    logprobs = [made.logprobs(x, batch).result() for made, x in zip(results, params, strict=True)]
    *shared, whole = (run(made, algos.grpo_loss, batch) for made in results)
    for found, step in zip(logprobs, shared, strict=False):
        torch.testing.assert_close(found, logprobs[-1], rtol=1e-9, atol=1e-12)
        assert_equal(step, whole)


@pytest.mark.parametrize("packing", PACKINGS)
def test_checkpointing_recomputes_shared_tokens(packing: Packing, slots: Slots) -> None:
    batch = batch_of(GROUPS, PROMPTS)
    made = fsdp.trainer(slots[:1], MODEL, SHOW, packing=packing, checkpointing=True)
    assert_equal(run(made, algos.grpo_loss, batch), run(trainer(slots, packing=None), algos.grpo_loss, batch))


# what is computed


@pytest.mark.parametrize("packing", PACKINGS)
def test_no_token_is_computed_that_no_trained_one_needs(packing: Packing, slots: Slots, laid_out: list[Packed]) -> None:
    """A row goes as far as the token before its last trained one, and one without any does not go at all."""
    batch = batch_of([[5, 1, 2, 3, 4], [6, 1, 2, 3], [7, 1, 2]], [0, 0, 0])
    trained = torch.zeros(3, WIDTH, dtype=torch.bool)
    trained[0, 2] = trained[2, 2] = True
    run(trainer(slots, packing=packing), algos.sft_loss, nrl.assign(batch, loss_mask=trained))
    tokens = laid_out[-1]
    real = tokens.rows.real if isinstance(tokens.rows, nrl.Rectangles) else slice(None)
    assert sorted(tokens.input_ids[real].tolist()) == [1, 1, 5, 7]


def spy(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For how many tokens the head runs."""
    counts: list[int] = []

    def counted(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        counts.append(len(hidden))
        return linear_logprobs(hidden, *args, **kwargs)

    monkeypatch.setattr(output_heads, "linear_logprobs", counted)
    return counts


@needs("entropy")
def reads_entropy_elsewhere(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    return token_mean(-out["logprobs"], batch["loss_mask"]), {"entropy": Sum(out["entropy"].detach().sum())}


def reads_the_row_before(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    return token_mean(-out["logprobs"] - out["logprobs"].roll(1, -1), batch["loss_mask"]), {}


def reads_in_its_gradient_alone(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    """Its value is the same whatever the outputs are."""
    row = out["logprobs"].sum(-1, keepdim=True)
    return token_mean((row - row.detach()).exp() * batch["advantages"], batch["loss_mask"]), {}


def reads_if_a_token_is_improbable(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    """It does not show on outputs of zeros."""
    before = torch.where(out["logprobs"] < -2, out["logprobs"].roll(1, -1), 0.0)
    return token_mean(-out["logprobs"] - before, batch["loss_mask"]), {}


def counts_probable_tokens(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    count = (out["logprobs"].detach() > -2).sum()
    return token_mean(-out["logprobs"], batch["loss_mask"]), {"probable": Sum(count.double())}


def multiplies_by_the_mask(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    mask = batch["loss_mask"].double()
    return Mean(-(out["logprobs"] * mask).sum(), mask.sum()), {"square": Sum((out["logprobs"] ** 2 * mask).sum())}


CURIOUS = [
    reads_entropy_elsewhere,
    reads_the_row_before,
    reads_in_its_gradient_alone,
    reads_if_a_token_is_improbable,
    counts_probable_tokens,
]


@pytest.mark.parametrize("loss", CURIOUS)
def test_a_loss_that_reads_other_outputs_gets_them(loss: Loss, slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the same step where all of them are trained on, but for a column of the mask's."""
    batch = near(trainer(slots), batch_of(GROUPS, PROMPTS))
    every = int((nrl.lengths(batch) - 1).sum())

    @needs(*algos.needed(loss))
    def told(out: TensorDict, renamed: Batch) -> tuple[Any, Metrics]:
        return loss(out, nrl.assign(renamed, loss_mask=renamed["own"]))

    nrl.declare(own="token")
    renamed = nrl.assign(batch, own=batch["loss_mask"], loss_mask=microbatch_plan.predicted_mask(batch))
    counts = spy(monkeypatch)
    expected = run(trainer(slots), told, renamed)
    assert counts == [every]
    counts.clear()
    made = trainer(slots)
    of_the_mask = frozenset(f"mismatch/{name}" for name in ("kl", "ess", "max_abs", "chi2", "max_ratio"))
    assert_equal(run(made, loss, batch), expected, of_the_mask)
    assert counts == [int(batch["loss_mask"].sum()), every]
    run(made, loss, batch)  # it is known by now
    assert counts[2:] == [every]


@pytest.mark.parametrize("loss", [*LOSSES.values(), multiplies_by_the_mask])
def test_the_head_runs_where_a_token_is_trained_on(loss: Loss, slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = near(trainer(slots), batch_of(GROUPS, PROMPTS))
    counts = spy(monkeypatch)
    run(trainer(slots), loss, batch)
    assert counts == [int(batch["loss_mask"].sum())]


def test_a_loss_that_reads_elsewhere_in_one_batch_only(slots: Slots) -> None:
    """While all advantages are zero nothing shows; what shows later is right all the same."""

    def loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        row = out["logprobs"].mean(-1, keepdim=True)
        return token_mean(batch["advantages"] * (out["logprobs"] + row), batch["loss_mask"]), {}

    batch = batch_of(GROUPS, PROMPTS)
    made, plain = trainer(slots), trainer(slots, packing=None)
    step, other = made.train_step(loss), plain.train_step(algos.add((1.0, loss), (1.0, everything)))
    quiet = nrl.assign(batch, advantages=torch.zeros_like(batch["advantages"]))
    state, _ = step(made.init(), quiet)
    twin, _ = other(plain.init(), quiet)
    state, _ = step(state, batch)
    twin, _ = other(twin, batch)
    expected = dict(twin.params.tensors())
    for name, x in state.params.tensors():
        torch.testing.assert_close(x, expected[name], rtol=1e-9, atol=1e-12, msg=name)


def everything(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    """Reads all outputs and adds nothing."""
    zero = out["logprobs"].sum() * 0.0
    return Mean(zero, batch["loss_mask"].sum().double()), {"all": Sum(out["logprobs"].detach().sum())}


def test_without_a_loss_mask_every_token_is_computed(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        return token_mean(-out["logprobs"], batch["attention_mask"]), {}

    batch = batch_of(GROUPS, PROMPTS)
    bare = Batch({name: batch[name] for name in ("input_ids", "attention_mask")}, batch_size=[len(batch)]).lock_()
    counts = spy(monkeypatch)
    made = trainer(slots)
    made.train_step(loss)(made.init(), bare)
    assert counts == [int((nrl.lengths(batch) - 1).sum())]


# how many tokens are computed, and how many are not because rows have them in common


def counts(made: Trainer, batch: Batch, loss: Loss = algos.sft_loss) -> list[float]:
    numbers = run(made, loss, batch).metrics
    return [numbers[name] for name in ("tokens", "tokens/computed", "tokens/saved")]


def trained_on(rows: list[list[int]]) -> Batch:
    """Rows that are trained on from their second token on."""
    batch = batch_of(rows, [0] * len(rows))
    return nrl.assign(batch, loss_mask=batch["attention_mask"] & (torch.arange(WIDTH) > 0))


FORK = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7, 7], [1, 2, 3, 8, 8]]
"""A fork within a fork: up to the tokens that predict nothing, 12345, 123457 and 1238. A trie of these has 7 nodes."""


@pytest.mark.parametrize(
    ("rows", "max_tokens", "packing", "expected"),
    [
        # One level: 123 | 45, 457, 8. The 45 is computed twice: sharing 12345 would save 5, and this saves 6
        (FORK, LARGE, nrl.Sequences, [18, 9, 6]),
        (FORK, LARGE, nrl.Rectangles, [18, 9, 6]),
        # With a longer inner fork, 1234567 | nothing, 9, and another 1: sharing the 1 of all would save 2, and not 7
        ([[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 9, 9], [1, 8]], LARGE, nrl.Sequences, [19, 9, 7]),
        # The same rows in micro-batches of two and one: 1234 5 | nothing, 7, and 1238
        (FORK, 14, nrl.Sequences, [18, 10, 5]),
        (FORK, 7, nrl.Sequences, [18, 15, 0]),
        (FORK, LARGE, None, [18, 18, 0]),  # padded rows are computed to their ends
    ],
)
def test_a_fork_within_a_fork(
    rows: list[list[int]], max_tokens: int, packing: Packing | None, expected: list[int], slots: Slots
) -> None:
    assert counts(trainer(slots, max_tokens=max_tokens, packing=packing), trained_on(rows)) == expected


def test_rows_of_shards_are_not_shared(slots: Slots) -> None:
    assert counts(trainer(slots, 3, packing=nrl.Sequences), trained_on(FORK)) == [18, 15, 0]


def test_tokens_that_nothing_is_read_of_are_neither_computed_nor_saved(slots: Slots) -> None:
    batch = trained_on(FORK)
    mask = batch["loss_mask"] & (torch.arange(WIDTH) < torch.tensor([4, 4, 0])[:, None])
    masked = nrl.assign(batch, loss_mask=mask)  # 123 of two rows, and nothing of the third
    assert counts(trainer(slots, packing=nrl.Sequences), masked) == [18, 3, 3]
    assert counts(trainer(slots, packing=None), masked) == [18, 13, 0]
    # The first time a loss reads other outputs, the step is computed again, and the last time counts
    assert counts(trainer(slots, packing=nrl.Sequences), masked, counts_probable_tokens) == [18, 9, 6]


class Trie(dict[int, "Trie"]):
    """Rows as a tree; slow."""

    @property
    def nodes(self) -> int:
        return sum(1 + child.nodes for child in self.values())

    @classmethod
    def of(cls, rows: list[list[int]]) -> "Trie":
        root = cls()
        for row in rows:
            node = root
            for token in row:
                node = node.setdefault(token, cls())
        return root


def in_common(rows: list[list[int]]) -> int:
    """The number of first tokens that all of some rows have in common."""
    return next((i for i, tokens in enumerate(zip(*rows, strict=False)) if len(set(tokens)) > 1), min(map(len, rows)))


def best(rows: list[list[int]]) -> int:
    """The most that one level of sharing can save: over all ways to put rows into sets."""
    if not rows:
        return 0
    first, *others = rows
    most = 0
    for chosen in itertools.product([False, True], repeat=len(others)):
        with_it = [first, *(row for row, here in zip(others, chosen, strict=True) if here)]
        without = [row for row, here in zip(others, chosen, strict=True) if not here]
        most = max(most, (len(with_it) - 1) * in_common(with_it) + best(without))
    return most


@st.composite
def forked(draw: st.DrawFn) -> tuple[list[list[int]], bool]:
    """Rows of at most five; and whether they fork once at most, behind their prompt, of which no other row has any."""
    if draw(st.booleans()):
        prompts = [[word] * draw(st.integers(1, 4)) for word in (1, 2)]
        tails = [
            [word, *draw(st.lists(st.integers(3, 9), max_size=3))] for word in range(3, 3 + draw(st.integers(1, 5)))
        ]
        return [draw(st.sampled_from(prompts)) + tail for tail in tails], True
    words = st.lists(st.integers(1, 2), min_size=2, max_size=8)
    return draw(st.lists(words, min_size=1, max_size=5)), False


@settings(max_examples=60, phases=NO_SHRINK)
@given(drawn=forked(), dp=st.integers(1, 2), n=st.integers(1, 3), packing=packings)
def test_tokens_are_counted_as_a_slow_loop_counts_them(
    drawn: tuple[list[list[int]], bool], dp: int, n: int, packing: Packing, slots: Slots
) -> None:
    """Against a trie of the rows of each micro-batch, and all ways to share one level of them."""
    rows, forks_once = drawn
    parts, laid = list[list[list[int]]](), list[int]()

    def watched(batch: Batch, **options: Any) -> Packed:
        ends = options["ends"].tolist()
        parts.append([row[:end] for row, end in zip(batch["input_ids"].tolist(), ends, strict=True)])
        found = pack(batch, **options)
        real = found.rows.real if isinstance(found.rows, nrl.Rectangles) else torch.ones_like(found.source).bool()
        laid.append(len(set(found.source[real].tolist())))
        assert laid[-1] == int(real.sum())  # none of them twice
        return found

    batch = trained_on(rows)
    made = trainer(slots, dp, tokens_for(batch, n), packing)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(microbatch_plan, "pack", watched)
        parts.clear()
        found = counts(made, batch)
    needed = sum(len(row) for part in parts for row in part)
    assert needed == sum(map(len, rows)) - len(rows)
    assert found == [sum(map(len, rows)), sum(laid), needed - sum(laid)]
    tree = sum(Trie.of(part).nodes for part in parts)
    one_level = needed - sum(best(part) for part in parts)
    assert tree <= one_level <= sum(laid) <= needed
    if forks_once:
        assert sum(laid) == one_level == tree
