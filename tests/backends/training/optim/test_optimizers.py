"""Optimizers and schedules are data; the learning rate is a function of the step."""

import itertools
import math

import attrs
import pytest

from nrl import config
from nrl.backends import Group, Optimizer, Schedule, adamw, learning_rate, muon, own, sgd
from nrl.backends.training.optim.optimizers import set_learning_rate
from nrl.backends.training.saving import storage
from nrl.errors import CheckpointError, ConfigError


def rates(schedule: Schedule | None, steps: int, lr: float = 1.0) -> list[float]:
    return [learning_rate(adamw(lr=lr, schedule=schedule), step) for step in range(steps)]


def test_defaults() -> None:
    made = adamw(3e-4)
    assert isinstance(made, Optimizer)
    assert (made.lr, made.betas, made.eps, made.weight_decay, made.clip) == (3e-4, (0.9, 0.999), 1e-8, 0.0, 1.0)
    assert made.schedule == Schedule("constant", warmup=0, steps=0, floor=0.0)


def test_it_is_frozen_data() -> None:
    made = adamw(lr=1.0)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        made.lr = 2.0  # type: ignore[misc]
    assert made == adamw(lr=1.0)
    assert hash(made) == hash(adamw(lr=1.0))
    assert attrs.evolve(made, lr=2.0) == adamw(lr=2.0)


@pytest.mark.parametrize("schedule", [None, Schedule()])
def test_constant(schedule: Schedule | None) -> None:
    assert rates(schedule, 3, lr=0.3) == [0.3, 0.3, 0.3]


def test_warmup_has_steps_of_equal_size_and_starts_above_zero() -> None:
    assert rates(Schedule(warmup=3), 6) == pytest.approx([1 / 4, 2 / 4, 3 / 4, 1, 1, 1])


def test_linear() -> None:
    assert rates(Schedule("linear", steps=4), 6) == pytest.approx([1, 3 / 4, 2 / 4, 1 / 4, 0, 0])
    assert rates(Schedule("linear", warmup=1, steps=5), 7) == pytest.approx([1 / 2, 1, 3 / 4, 2 / 4, 1 / 4, 0, 0])


def test_linear_to_a_floor() -> None:
    assert rates(Schedule("linear", steps=4, floor=0.2), 6, lr=10) == pytest.approx([10, 8, 6, 4, 2, 2])


def test_cosine() -> None:
    half = math.sqrt(0.5)
    expected = [1, (1 + half) / 2, 1 / 2, (1 - half) / 2, 0, 0]
    assert rates(Schedule("cosine", steps=4), 6) == pytest.approx(expected)
    floored = [0.1 + 0.9 * x for x in expected]
    assert rates(Schedule("cosine", steps=4, floor=0.1), 6) == pytest.approx(floored)


def test_wsd() -> None:
    schedule = Schedule("wsd", warmup=1, steps=6, decay=2)
    assert rates(schedule, 8) == pytest.approx([1 / 2, 1, 1, 1, 1, 1 / 2, 0, 0])
    assert rates(attrs.evolve(schedule, floor=0.2), 8, lr=10) == pytest.approx([5, 10, 10, 10, 10, 6, 2, 2])


def test_wsd_whose_end_is_moved_goes_on_as_it_was_until_it_decays() -> None:
    short, long = Schedule("wsd", warmup=3, steps=20, decay=4), Schedule("wsd", warmup=3, steps=40, decay=4)
    assert rates(short, 16) == rates(long, 16)


def test_wsd_without_a_stable_part_is_linear() -> None:
    assert rates(Schedule("wsd", warmup=2, steps=7, decay=5), 9) == rates(Schedule("linear", warmup=2, steps=7), 9)


def test_wsd_needs_a_decay_and_room_for_it() -> None:
    for decay in (0, 4):
        with pytest.raises(ValueError, match=rf"wsd needs a decay of 1 to 3 steps, .*; found decay={decay}"):
            Schedule("wsd", warmup=2, steps=5, decay=decay)
    with pytest.raises(ValueError, match="decay=3 is for the kind 'wsd' alone; found 'cosine'"):
        Schedule("cosine", steps=5, decay=3)


def test_a_schedule_is_continuous_where_warmup_ends() -> None:
    for kind in ("linear", "cosine"):
        numbers = rates(Schedule(kind, warmup=10, steps=1000), 1200)
        assert max(numbers) == numbers[10] == 1.0
        assert max(abs(a - b) for a, b in itertools.pairwise(numbers[10:])) < 0.002
        assert numbers[:11] == sorted(numbers[:11])
        assert numbers[10:] == sorted(numbers[10:], reverse=True)


@pytest.mark.parametrize("kind", ["linear", "cosine", "wsd"])
def test_a_decay_needs_an_end(kind: str) -> None:
    with pytest.raises(ValueError, match=rf"Schedule: a {kind} decay needs steps > warmup; found steps=0, warmup=0"):
        Schedule(kind)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="found steps=5, warmup=5"):
        Schedule(kind, warmup=5, steps=5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"kind": "exponential", "steps": 3}, "kind"),
        ({"warmup": -1}, "warmup"),
        ({"warmup": 1.5, "steps": 3}, "warmup=1.5 is neither a whole number of optimizer steps nor, below 1, a share"),
        ({"warmup": 0.1}, "warmup=0.1 is a share of steps, and there are none; give steps"),
        ({"kind": "wsd", "steps": 9, "decay": 1.0}, "decay=1.0 is neither a whole number"),
        ({"kind": "wsd", "steps": 4, "decay": 0.1}, "wsd needs a decay of 1 to 4 steps, .*; found decay=0.1, 0 steps"),
        ({"decay": 0.1, "steps": 9}, "decay=0.1 is for the kind 'wsd' alone"),
        ({"steps": -1}, "steps"),
        ({"floor": 1.5}, "floor"),
        ({"floor": -0.1}, "floor"),
        ({"decay": -1}, "decay"),
    ],
)
def test_schedules_that_cannot_be(fields: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Schedule(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"lr": -1.0}, "lr"),
        ({"lr": math.nan}, "lr"),
        ({"lr": 1.0, "eps": 0.0}, "eps"),
        ({"lr": 1.0, "weight_decay": -0.1}, "weight_decay"),
        ({"lr": 1.0, "clip": 0.0}, "clip"),
        ({"lr": 1.0, "clip": math.nan}, "clip"),
        ({"lr": 1.0, "betas": (1.0, 0.999)}, "betas"),
        ({"lr": 1.0, "betas": (0.9, -0.1)}, "betas"),
    ],
)
def test_optimizers_that_cannot_be(fields: dict[str, float], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        adamw(**fields)  # type: ignore[arg-type]


def test_no_clip_is_infinity() -> None:
    assert adamw(lr=1.0, clip=math.inf).clip == math.inf


def test_shares_of_steps() -> None:
    """A tenth of 20 steps is 2, a quarter 5; with twice the steps twice as many."""
    for kind in ("constant", "linear", "cosine"):
        share, whole = Schedule(kind, warmup=0.1, steps=20), Schedule(kind, warmup=2, steps=20)
        assert rates(share, 25) == rates(whole, 25)
    share = Schedule("wsd", warmup=0.1, steps=20, decay=0.25)
    expected = [1 / 3, 2 / 3, *[1] * 14, 4 / 5, 3 / 5, 2 / 5, 1 / 5, 0]
    assert rates(share, 21) == pytest.approx(expected)
    assert (share.warmup_steps, share.decay_steps) == (2, 5)
    longer = attrs.evolve(share, steps=40)
    assert rates(longer, 40) == rates(Schedule("wsd", warmup=4, steps=40, decay=10), 40)


@attrs.frozen
class Config:
    """As examples have them: the schedule follows the steps of the run."""

    steps: int = 8
    optimizer: Optimizer = config.derived(lambda cfg: adamw(lr=1.0, schedule=Schedule(steps=cfg.steps)))


def from_config(*args: str) -> list[float]:
    cfg = config.load(Config, args)
    return [learning_rate(cfg.optimizer, step) for step in range(cfg.steps)]


def test_a_schedule_follows_the_steps_of_the_run() -> None:
    assert from_config("steps=2") == [1, 1]
    assert from_config("optimizer.schedule.kind=linear", "steps=4") == [1, 3 / 4, 2 / 4, 1 / 4]
    assert from_config("optimizer.schedule={kind: linear, warmup: 0.25}") == pytest.approx(
        [1 / 3, 2 / 3, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]
    )
    assert from_config("optimizer.schedule.kind=cosine", "steps=2") == pytest.approx([1, 1 / 2])
    wsd = "optimizer.schedule={kind: wsd, warmup: 1, decay: 0.5}"
    assert from_config(wsd, "steps=4") == pytest.approx([1 / 2, 1, 1, 1 / 2])
    assert from_config(wsd) == pytest.approx([1 / 2, 1, 1, 1, 1, 3 / 4, 2 / 4, 1 / 4])


def test_optimizers_from_a_configuration() -> None:
    groups = "optimizer.groups=[{names: '*embed*', weight_decay: 0, factor: 0.1}, {names: '*.gate.*', muon: false}]"
    args = ["optimizer.kind=muon", "optimizer.momentum=0.9", "optimizer.scale=original", groups]
    found = config.load(Config, args).optimizer
    assert found.groups == (Group("*embed*", factor=0.1, weight_decay=0.0), Group("*.gate.*", muon=False))
    assert (found.kind, found.momentum, found.scale, found.lr) == ("muon", 0.9, "original", 1.0)
    written = config.dump(attrs.evolve(config.load(Config, []), optimizer=found))
    assert "kind: muon" in written
    with pytest.raises(ConfigError, match="cannot be written in a configuration; set it in Python"):
        config.load(Config, ["optimizer.kind=own", "optimizer.make=x"])
    with pytest.raises(ConfigError, match="momentum is for 'sgd' and 'muon' alone; found 0.9 of 'adamw'"):
        config.load(Config, ["optimizer.momentum=0.9"])


def test_what_makes_an_optimizer() -> None:
    assert sgd(0.1) == Optimizer(0.1, kind="sgd", momentum=0.0, nesterov=False)
    made = muon(0.1, weight_decay=0.2)
    assert (made.kind, made.momentum, made.nesterov, made.scale) == ("muon", 0.95, True, "match_rms_adamw")
    assert (made.precision, made.weight_decay, made.betas, made.eps, made.clip) == (
        "float32",
        0.2,
        (0.9, 0.999),
        1e-8,
        1,
    )
    assert own(dict, lr=0.1, clip=2.0).make is dict
    assert hash(made) == hash(muon(0.1, weight_decay=0.2))
    groups = [Group("*")]
    for made in (
        adamw(1.0, groups=groups),
        sgd(1.0, groups=groups),
        muon(1.0, groups=groups),
        own(dict, lr=1, groups=groups),
    ):
        assert made.groups == (Group("*"),)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"kind": "lion"}, "kind"),
        ({"momentum": 0.9}, "momentum is for 'sgd' and 'muon' alone; found 0.9 of 'adamw'"),
        ({"kind": "sgd", "momentum": 1.0}, "momentum"),
        ({"kind": "sgd", "scale": "original"}, "scale is for 'muon' alone; found 'original' of 'sgd'"),
        ({"kind": "sgd", "precision": "float32"}, "precision is for 'muon' alone"),
        ({"kind": "muon", "scale": "spectral"}, "scale"),
        ({"kind": "muon", "precision": "float16"}, "precision"),
        ({"kind": "sgd", "nesterov": True}, "nesterov needs a momentum, and there is none; give one above 0"),
        ({"kind": "own"}, r"the kind 'own' and nothing else has make, .*; found 'own' and make=None; use own\(make"),
        ({"make": dict}, "found 'adamw' and make=<class 'dict'>"),
        ({"kind": "own", "make": dict, "weight_decay": 0.1}, "weight_decay=0.1 would do nothing; have make pass it"),
        ({"groups": (Group("*", muon=False),)}, "keeps Muon away; found 'adamw', which has none"),
    ],
)
def test_optimizers_of_other_kinds_that_cannot_be(fields: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Optimizer(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("fields", [{"factor": -1.0}, {"weight_decay": -0.1}])
def test_groups_that_cannot_be(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        Group("*", **fields)  # type: ignore[arg-type]


def test_a_rate_of_ones_own() -> None:
    optimizer = sgd(0.5, schedule=lambda step: 1 / (step + 1))
    assert [learning_rate(optimizer, step) for step in range(3)] == [1 / 2, 1 / 4, 0.5 / 3]
    groups = [{"factor": 0.1}, {}]
    assert set_learning_rate(groups, optimizer, 1) == 1 / 4
    assert groups == [{"factor": 0.1, "lr": pytest.approx(1 / 40)}, {"lr": 1 / 4}]


@pytest.mark.parametrize("rate", [-1.0, math.nan, math.inf])
def test_a_rate_that_cannot_be(rate: float) -> None:
    with pytest.raises(ValueError, match=f"the schedule gives {0.5 * rate} at optimizer step 7; give a finite rate"):
        learning_rate(adamw(0.5, schedule=lambda step: rate), 7)


def test_whose_state_a_checkpoint_has() -> None:
    storage.check_optimizer({}, "adamw")  # before there were others
    storage.check_optimizer({"optimizer": "muon"}, "muon")
    with pytest.raises(CheckpointError, match="is of the optimizer 'adamw', and here it is 'sgd', which keeps"):
        storage.check_optimizer({}, "sgd")
