"""Optimizers and schedules are data; the learning rate is a function of the step."""

import itertools
import math

import attrs
import pytest

from nrl.backends import Optimizer, Schedule, adamw, learning_rate


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
