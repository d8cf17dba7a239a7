"""What is ranked, what is near, and Megatron's sums by hand."""

from typing import Any

import attrs
import pytest

from nrl.backends import adamw, sgd
from nrl.errors import ConfigError, ModelError
from nrl.ops.plan.analytic import estimate_step, row_stats
from nrl.ops.plan.analytic_megatron import (
    _microbatches_in_flight,
    bubble_share,
    count_stage_parameters,
    estimate_megatron,
    estimate_stages,
    saved_layer_bytes,
)
from nrl.ops.plan.gpus import GPUS, estimate
from nrl.ops.plan.report import describe_nearest
from nrl.ops.plan.search import (
    find_highest_stage,
    find_nearest,
    fsdp_candidates,
    list_layouts,
    make_candidate,
    megatron_candidates,
    rank,
)
from nrl.ops.plan.shapes import read_shape
from nrl.ops.plan.simulate import Step
from nrl.runtime import Layout
from tests.ops.plan.test_analytic import MIXTURE
from tests.ops.plan.test_gpus import TINY

GIB = 2**30
BIG: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "head_dim": 128, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 12_288, "vocab_size": 151_936, "tie_word_embeddings": False,
}  # fmt: skip
STEP = Step(BIG, dp=8, rows=2, width=8192)
H100 = GPUS["h100"]


def test_all_layouts_of_the_torch_trainer() -> None:
    found = list(fsdp_candidates(STEP, H100, 0, 4))
    assert {(each.step.dp, each.step.rows) for each in found} == {(4, 4)}  # as many rows in all
    assert {each.step.max_tokens for each in found} == {8192, 16_384, 32_768}
    assert {each.step.checkpointing for each in found} == {False, "selective", True}
    assert list(fsdp_candidates(STEP, H100, 0, 32)) == []  # 16 rows
    odd = fsdp_candidates(attrs.evolve(STEP, dp=1, rows=5), H100, 0, 1)
    assert {each.step.max_tokens // 8192 for each in odd} == {1, 2, 3, 5}  # of 5, 3, 2 and 1 micro-batches


def test_those_that_fit_come_first_the_fastest_of_them() -> None:
    found = rank(list(fsdp_candidates(STEP, H100, 6 * GIB, 8)))
    fits = [each.fits for each in found]
    assert fits == sorted(fits, reverse=True)
    assert 0 < sum(fits) < len(fits)
    speeds = [each.tokens_per_second for each in found if each.fits]
    assert speeds == sorted(speeds, reverse=True)
    over = [each.over for each in found if not each.fits]
    assert over == sorted(over)
    assert over[0] == found[sum(fits)].peak + 6 * GIB - H100.memory


@pytest.mark.parametrize(
    "held",
    [
        {"trainer": "fsdp"}, {"trainer": "megatron"}, {"checkpointing": True}, {"checkpointing": "selective"},
        {"max_tokens": 24_576}, {"tp": 4}, {"pp": 3, "vp": 2}, {"cp": 3}, {"shard": 2},
        {"dp": 3, "trainer": "megatron"},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_held_is_not_searched(held: dict[str, Any]) -> None:
    found = list_layouts(attrs.evolve(STEP, dp=24), H100, 0, 24, held)
    for each in found:
        of = {"trainer": each.trainer, **attrs.asdict(each.layout), **attrs.asdict(each.step)} | {"dp": each.layout.dp}
        assert {name: of[name] for name in held} == held
        assert each.layout.slots == 24
        assert each.step.rows * each.layout.dp == 48
    assert found


@pytest.mark.parametrize(
    ("trainer", "held"),
    [
        ("fsdp", {"checkpointing": "selective"}), ("fsdp", {"max_tokens": 8192}), ("megatron", {"checkpointing": True}),
        ("megatron", {"tp": 4}), ("megatron", {"pp": 3, "vp": 2}), ("megatron", {"cp": 3}), ("megatron", {"shard": 8}),
        ("megatron", {"dp": 3}), ("megatron", {"shard": None, "tp": 2}),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_held_leaves_all_that_a_free_search_has_with_it(trainer: str, held: dict[str, Any]) -> None:
    step, given = attrs.evolve(STEP, dp=24), {"trainer": trainer}

    def has(each: Any) -> bool:
        of = attrs.asdict(each.step) | attrs.asdict(each.layout)
        return all(of[name] == value for name, value in held.items())

    free = list_layouts(step, H100, 0, 24, given)
    kept = {each.settings for each in free if has(each)}
    found = list_layouts(step, H100, 0, 24, given | held)
    assert kept
    assert kept <= {each.settings for each in found}  # which may have a larger tp x cp
    assert all(has(each) for each in found)
    assert len(found) < len(free)


def test_shard_over_all_of_dp_is_what_the_torch_trainer_does() -> None:
    given = {"trainer": "fsdp"}
    every = [each.settings for each in list_layouts(STEP, H100, 0, 8, given)]
    for shard in (None, 8):
        assert [each.settings for each in list_layouts(STEP, H100, 0, 8, given | {"shard": shard})] == every
    with pytest.raises(ConfigError, match="no layout of gpus=8 .* shard=2"):
        list_layouts(STEP, H100, 0, 8, given | {"shard": 2})


def test_what_is_not_held_is_searched() -> None:
    found = list_layouts(attrs.evolve(STEP, dp=24), H100, 0, 24)
    for axis, sizes in {"tp": {1, 2, 4, 8}, "cp": set(range(1, 9)) - {5, 7}, "pp": {1, 2, 3, 4, 6, 12}}.items():
        assert {getattr(each.layout, axis) for each in found} == sizes
    assert {each.layout.vp for each in found} >= {1, 2, 3}
    assert {each.layout.shard for each in found} >= {None, 4, 8}
    assert all(each.layout.vp == 1 for each in found if each.layout.pp == 1)


def test_a_search_that_finds_nothing_says_what_was_held() -> None:
    with pytest.raises(ConfigError, match="no layout of gpus=32 for 16 rows .* has trainer=fsdp; .*leave out one"):
        list_layouts(STEP, H100, 0, 32, {"trainer": "fsdp"})
    with pytest.raises(ConfigError, match=r"that has dp=3, trainer=fsdp"):
        list_layouts(STEP, H100, 0, 8, {"dp": 3, "trainer": "fsdp"})


def test_the_optimizer_and_the_host_are_those_of_the_step() -> None:
    plain = {each.settings: each for each in list_layouts(STEP, H100, 0, 8)}
    for change in ({"optimizer": adamw(lr=1.0, moments="bfloat16")}, {"optimizer": sgd(lr=1.0)}, {"offload": "cpu"}):
        found = list_layouts(attrs.evolve(STEP, **change), H100, 0, 8)
        assert {each.trainer for each in found} == {"fsdp"}  # Megatron's has none of these
        for each in found:
            assert each.peak < plain[each.settings.removesuffix(" offload=cpu")].peak
    with pytest.raises(ConfigError, match="no layout of gpus=8 .* that has trainer=megatron"):
        list_layouts(attrs.evolve(STEP, offload="cpu"), H100, 0, 8, {"trainer": "megatron"})


def test_the_nearest_changes_least() -> None:
    asked = make_candidate(STEP, H100, 6 * GIB)
    near = find_nearest(asked, H100, 6 * GIB)
    assert not asked.fits
    assert near is not None
    assert near.settings == "trainer=fsdp dp=8 rows=2 max_tokens=16384 checkpointing=selective"
    small = make_candidate(
        attrs.evolve(STEP, dp=1), H100, 6 * GIB
    )  # 98 GB of weights, moments and gradients do not fit
    more = find_nearest(small, H100, 6 * GIB)
    assert more is not None
    assert (more.step.dp, more.step.rows) == (2, 2)
    assert find_nearest(small, H100, 6 * GIB, limit=1) is None


def test_as_many_gpus_as_were_asked_for_are_looked_at() -> None:
    near = find_nearest(make_candidate(attrs.evolve(STEP, dp=2048), H100, 6 * GIB), H100, 6 * GIB)
    assert near is not None
    assert near.settings == "trainer=fsdp dp=2048 rows=2 max_tokens=16384 checkpointing=selective"
    assert describe_nearest(None, 2048) == "no layout of either trainer fits on up to 2048 GPUs"


def test_the_nearest_has_the_trainer_and_the_gpus_that_were_asked_for() -> None:
    layout = Layout(dp=2, tp=2, pp=2)
    step = attrs.evolve(STEP, dp=2, rows=8, max_tokens=32_768)
    asked = make_candidate(step, H100, 6 * GIB, layout)
    near = find_nearest(asked, H100, 6 * GIB)
    assert not asked.fits
    assert near is not None
    assert (near.trainer, near.layout.slots, near.step.rows * near.layout.dp) == ("megatron", 8, 16)
    assert near.layout == layout  # a smaller micro-batch is enough


def test_where_a_trainer_has_no_layout_that_fits_the_other_one_is_named() -> None:
    asked = make_candidate(
        attrs.evolve(STEP, rows=1, width=131_072, max_tokens=131_072, checkpointing=True), H100, 6 * GIB
    )
    near = find_nearest(asked, H100, 6 * GIB)
    assert (asked.trainer, asked.fits) == ("fsdp", False)
    assert near is not None
    assert near.settings.startswith("trainer=megatron dp=")
    assert near.layout.slots == 8


def test_what_fits_is_asked_of_each_part_of_a_life() -> None:
    counted = estimate_step(STEP) | {
        "stages": {"train": {"peak": 50e9}, "publish": {"peak": 90e9}, "save": {"peak": 10e9}}
    }
    assert find_highest_stage(counted) == ("publish", 90e9)
    found = make_candidate(STEP, H100, 6 * GIB, counted=counted)
    assert (found.stage, found.peak, found.fits) == ("publish", 90e9, False)
    assert find_highest_stage(estimate_step(STEP)) == ("train", estimate_step(STEP)["peak"])


def test_layouts_of_megatron_are_those_that_it_takes() -> None:
    found = [each.layout for each in megatron_candidates(STEP, H100, 0, 16)]
    assert {each.slots for each in found} == {16}
    assert {each.pp for each in found} == {1, 2, 4}  # of 36 layers, and 16 GPUs
    assert max(each.tp * each.cp for each in found) == 8
    assert {each.ep for each in found} == {1}
    experts = [each.layout for each in megatron_candidates(attrs.evolve(STEP, model=MIXTURE), H100, 0, 16)]
    assert {each.ep for each in experts} == {1, 2, 4, 8}


def test_parameters_of_a_stage_by_hand() -> None:
    model = read_shape(TINY | {"tie_word_embeddings": True})
    # a layer: matrices 36,864, norms 2*64 + 2*16 = 160; an embedding of 512*64, and a last norm of 64
    assert count_stage_parameters(model, Layout(), 0) == (2 * 37_024 + 32_768 + 64, 0)
    assert count_stage_parameters(model, Layout(tp=2, pp=2), 0) == (18_432 + 160 + 16_384, 0)
    assert count_stage_parameters(model, Layout(tp=2, pp=2), 1) == (18_432 + 160 + 16_384 + 64, 0)  # a copy of the head
    mixed = count_stage_parameters(read_shape(MIXTURE), Layout(dp=4, ep=4), 0)
    # two heads of words; attention 12,288, a router of 512; a quarter of 8 experts of 3*64*32
    assert mixed == (2 * 32_768 + 64 + 2 * (12_288 + 160 + 512), 2 * 2 * 6144)


def test_a_step_of_megatron_by_hand() -> None:
    assert bubble_share(4, 12) == 0.2
    step = Step(TINY | {"tie_word_embeddings": True}, dp=2, rows=2, width=64, max_tokens=64)  # 63 and 26 tokens
    found = estimate_megatron(step, Layout(dp=2))
    count = 2 * 37_024 + 32_768 + 64
    assert (found["parameters"], found["gradients"], found["moments"]) == (2 * count, 4 * count, 6 * count)
    assert estimate_megatron(step, Layout(dp=2, shard=1))["moments"] == 12 * count
    # norms 8*64 and 8; attention 8*(64 + 32), factors 4*6 and sums 4*4; the MLP 10*128; rotations 8*16
    assert saved_layer_bytes(read_shape(TINY), sparse=False) == 520 + 768 + 40 + 1280 + 128
    assert saved_layer_bytes(read_shape(TINY), sparse=False, tp=2) == (520 + 768 + 40 + 1280) / 2 + 128
    # 4*64 + 4*32*4 of gathered keys and values, 2*(64 + 32) of their norms
    assert saved_layer_bytes(read_shape(TINY), sparse=False, cp=4) == 520 + 256 + 512 + 192 + 40 + 1280 + 128
    # A layer's matrices, and a head of 512*64
    assert found["flops"]["bfloat16"] == 6 * (63 + 26) * (2 * 36_864 + 32_768)
    assert found["model"] == 6 * (63 + 26) * (2 * 36_864 + 32_768) + 6 * 2 * 64 * (63 * 63 + 26 * 26)
    assert found["flops"]["attention"] == 2 * 7 * 2 * 64 * (63 * 63 + 26 * 26)
    halves = estimate_megatron(attrs.evolve(step, dp=1), Layout(pp=2))
    assert halves["bubble"] == pytest.approx(1 / 3)
    tokens = (63 + 26) * 64 * 2  # what the first stage sends on; as much comes back
    assert halves["collectives"] == {"pipeline": 2 * tokens, "words": 4 * 512 * 64}  # of the tied head
    twice = (
        estimate_megatron(attrs.evolve(step, dp=1), Layout(pp=2, vp=1)),
        estimate_megatron(attrs.evolve(step, dp=1, model={**step.model, "num_hidden_layers": 4}), Layout(pp=2, vp=2)),
    )
    assert twice[1]["bubble"] == pytest.approx(1 / 5)
    assert (
        twice[1]["collectives"]["pipeline"] == 6 * 2 * 63 * 64 * 2
    )  # filled up; the first sends two parts, and gets one
    with pytest.raises(ConfigError, match="of bfloat16; found dtype=float32"):
        estimate_megatron(attrs.evolve(step, dtype="float32"), Layout())
    for change in ({"optimizer": sgd(lr=1.0)}, {"optimizer": adamw(lr=1.0, moments="bfloat16")}, {"offload": "cpu"}):
        with pytest.raises(ConfigError, match="Megatron's trainer has adamw with moments in float32"):
            estimate_megatron(attrs.evolve(step, **change), Layout())


def test_the_head_of_megatron_computes_its_logits_again_as_the_torch_trainers_does() -> None:
    one, layouts = attrs.evolve(STEP, dp=1), (Layout(), Layout(pp=2), Layout(tp=2), Layout(cp=2))
    for step in (one, attrs.evolve(one, checkpointing=True)):
        of_layers = (8 if step.checkpointing else 6) * read_shape(BIG).active_weights * row_stats(step).tokens
        head = 8 * 4096 * 151_936 * row_stats(step).tokens
        for layout in layouts:
            stages = estimate_stages(step, layout)
            found = sum(each["flops"]["bfloat16"] for each in stages) * layout.tp * layout.cp
            assert found == pytest.approx(of_layers + head), layout
    assert estimate_step(one)["flops"]["bfloat16"] == pytest.approx(
        6 * read_shape(BIG).active_weights * row_stats(one).tokens + head
    )
    assert sum(each["model"] for each in estimate_stages(one, Layout(pp=3))) == pytest.approx(
        estimate_step(one)["model"]
    )


def test_the_slowest_stage_says_the_speed_and_the_fullest_the_peak() -> None:
    """Of four stages of nine layers of 8B, the last has the head, too; the first keeps the most micro-batches."""
    layout = Layout(pp=4)
    step = attrs.evolve(STEP, dp=1, rows=8, max_tokens=8192)
    stages = estimate_stages(step, layout)
    found = make_candidate(step, H100, 0, layout)
    speeds = [estimate(each, H100, row_stats(step).tokens / 4, 4)["tokens_per_second"] for each in stages]
    assert (found.peak, found.stage) == (stages[0]["peak"], "train")
    assert found.tokens_per_second == pytest.approx(speeds[3])
    assert speeds[3] < 0.9 * speeds[0]
    pipeline = estimate_megatron(step, layout)["pipeline"]
    assert [(times, each["stage"]) for times, each in pipeline] == [(1, 0), (2, 1), (1, 3)]
    assert stages[1]["flops"] == stages[2]["flops"]


def test_collectives_of_megatron_have_their_rings() -> None:
    def rings(layout: Layout) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = estimate_megatron(STEP, layout)["rings"]
        return found

    assert rings(Layout(dp=8, tp=2, cp=4)) == {
        "tensor": (2, 1), "context": (8, 2), "experts": (1, 1), "pipeline": (64, 64), "words": (64, 64),
        "reduce_scatter": (64, 2), "all_gather": (64, 2), "all_reduce": (64, 2),
    }  # fmt: skip
    parts = rings(Layout(dp=8, shard=4, tp=2, pp=2))
    assert parts["reduce_scatter"] == parts["all_gather"] == (8, 2)
    assert parts["all_reduce"] == (16, 8)  # of the parts of a copy
    assert rings(Layout(dp=8, shard=1, tp=2))["all_reduce"] == (16, 2)


@pytest.mark.parametrize(
    ("model", "layout", "said"),
    [
        (BIG, Layout(pp=5), "pp x vp = 5 does not divide num_hidden_layers=36; take another layout"),
        (BIG, Layout(pp=4, vp=2), "pp x vp = 8 does not divide num_hidden_layers=36"),
        (BIG, Layout(tp=3), "tp = 3 does not divide num_key_value_heads=8"),
        (BIG, Layout(dp=2, ep=2), "ep = 2 does not divide num_experts=1"),
        (MIXTURE, Layout(dp=3, ep=3), "ep = 3 does not divide num_experts=8"),
    ],
)
def test_what_the_trainer_cannot_split_is_not_planned(model: dict[str, Any], layout: Layout, said: str) -> None:
    with pytest.raises(ModelError, match=f"megatron.trainer: {said}"):
        estimate_megatron(attrs.evolve(STEP, model=model), layout)


def test_selective_checkpointing_of_megatron_computes_attention_again() -> None:
    plain, model = attrs.evolve(STEP, dp=1), read_shape(TINY)
    for layout in (Layout(tp=2), Layout(cp=2)):
        none, some = (
            estimate_megatron(attrs.evolve(plain, checkpointing=each), layout) for each in (False, "selective")
        )
        assert some["flops"]["attention"] == none["flops"]["attention"] * 9 / 7
        assert some["flops"]["bfloat16"] == none["flops"]["bfloat16"]
        assert (some["activations"] < none["activations"]) == (layout.cp == 1)  # along cp the packed q, k, v stay
        assert some["collectives"].get("tensor") == none["collectives"].get("tensor")
        assert some["model"] == none["model"]
    assert some["collectives"]["context"] == none["collectives"]["context"] * 6 / 4  # gathered once more
    # Without 4*4 sums of scores; along cp with all of 6*(64 + 32), and not 4*64 and the gathered 4*32*4
    whole = saved_layer_bytes(model, sparse=False)
    assert saved_layer_bytes(model, sparse=False, selective=True) == whole - 16
    assert saved_layer_bytes(model, sparse=False, cp=4, selective=True) == whole - 16


def test_micro_batches_that_are_filled_up_are_work() -> None:
    step = attrs.evolve(STEP, dp=1, rows=4, max_tokens=8192, model=BIG | {"num_hidden_layers": 64})
    assert estimate_megatron(step, Layout(pp=8))["bubble"] == 7 / (4 + 7)
    assert estimate_megatron(step, Layout(pp=8, vp=4))["bubble"] == 7 / (4 * 8 + 7)  # eight are computed


def test_micro_batches_that_a_stage_keeps() -> None:
    assert [_microbatches_in_flight(4, stage, 12, 1) for stage in range(4)] == [4, 3, 2, 1]
    assert [_microbatches_in_flight(4, stage, 2, 1) for stage in range(4)] == [2, 2, 2, 1]
    # Megatron warms up with 2 (p - 1 - stage) + (v - 1) p parts, each of 1/v of the layers, and has one more under way
    assert [_microbatches_in_flight(4, stage, 12, 2) for stage in range(4)] == [5.5, 4.5, 3.5, 2.5]
    assert _microbatches_in_flight(4, 0, 3, 2) == 4  # of the 4 that there are
