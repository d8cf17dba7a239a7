"""Schedules of the learning rate as frozen data."""

import math
from typing import Any, Literal

import attrs

from nrl.arguments import checked, register_kind
from nrl.errors import ArgumentError

__all__ = ["Schedule", "fraction"]

_ge = attrs.validators.ge


def _steps_or_share(_: object, field: "attrs.Attribute[Any]", value: float) -> None:
    if not (value >= 0 and (isinstance(value, int) or value < 1)):
        raise ArgumentError(
            f"Schedule: {field.name}={value!r} is neither a whole number of optimizer steps nor, below 1, a share of "
            "steps"
        )


@checked("Schedule")
@attrs.frozen
class Schedule:
    """A schedule of the learning rate: linear warm-up, then constant, or a decay to ``floor``.

    ``linear`` and ``cosine`` decay from the end of the warm-up on. ``wsd`` (warm-up, stable, decay) stays at the full
    rate, and decays linearly in its last ``decay`` steps: a run can go on from before those, with a later end.

    ``warmup`` and ``decay`` are whole numbers of optimizer steps, or shares of ``steps``, which are below 1. In a
    configuration ``steps: ${steps}`` lets the schedule follow the length of the run.

    Args:
        kind: the shape.
        warmup: how long the rate rises; the first step has ``1 / (warm-up steps + 1)`` of the full rate.
        steps: the optimizer step at which the decay ends. Needed for all but constant, and for shares.
        floor: the rate at the end of the decay and afterwards, as a fraction of the full one.
        decay: how long the decay of ``wsd`` lasts; for no other kind.

    Raises:
        ValueError: a decay without ``steps`` after the warm-up, a ``wsd`` without ``decay`` or room for it, ``decay``
            where it would do nothing, or a share of no steps.

    Sources: WSD, Hu et al., 2024 (2404.06395), section 4; its linear decay, Hägele et al., 2024 (2405.18392).

    >>> Schedule("cosine", warmup=10, steps=100).floor
    0.0
    >>> Schedule("wsd", warmup=0.05, decay=0.2, steps=200).warmup_steps
    10
    """

    kind: Literal["constant", "linear", "cosine", "wsd"] = attrs.field(
        default="constant", validator=attrs.validators.in_(["constant", "linear", "cosine", "wsd"])
    )
    warmup: int | float = attrs.field(default=0, validator=_steps_or_share)
    steps: int = attrs.field(default=0, validator=_ge(0))
    floor: float = attrs.field(default=0.0, validator=[_ge(0), attrs.validators.le(1)])
    decay: int | float = attrs.field(default=0, validator=_steps_or_share)

    @property
    def warmup_steps(self) -> int:
        """Optimizer steps of warm-up."""
        return self._in_steps(self.warmup)

    @property
    def decay_steps(self) -> int:
        """Optimizer steps that the decay of ``wsd`` lasts."""
        return self._in_steps(self.decay)

    def _in_steps(self, length: float) -> int:
        return length if isinstance(length, int) else round(length * self.steps)

    def __attrs_post_init__(self) -> None:
        if self.kind != "constant" and self.steps <= self.warmup_steps:
            raise ArgumentError(
                f"Schedule: a {self.kind} decay needs steps > warmup; found steps={self.steps}, warmup={self.warmup}"
            )
        if not self.steps and 0 < self.warmup < 1:
            raise ArgumentError(f"Schedule: warmup={self.warmup} is a share of steps, and there are none; give steps")
        if self.kind != "wsd" and self.decay:
            raise ArgumentError(f"Schedule: decay={self.decay} is for the kind 'wsd' alone; found '{self.kind}'")
        if self.kind == "wsd" and not 0 < self.decay_steps <= self.steps - self.warmup_steps:
            raise ArgumentError(
                f"Schedule: wsd needs a decay of 1 to {self.steps - self.warmup_steps} steps, which is steps - warmup; "
                f"found decay={self.decay}" + (f", {self.decay_steps} steps" if 0 < self.decay < 1 else "")
            )


def _instead_of_schedule(value: Any) -> str:
    kind = value if value in ("linear", "cosine", "wsd") else "cosine"
    return f"give Schedule('{kind}', steps=1000), or a function of the optimizer step"


register_kind(Schedule, _instead_of_schedule)


def fraction(schedule: Schedule, step: int) -> float:
    """Return the fraction of the full rate at optimizer step ``step``, which counts from 0.

    >>> [round(fraction(Schedule("linear", warmup=1, steps=5), step), 3) for step in range(6)]
    [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    warmup = schedule.warmup_steps
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if schedule.kind == "constant":
        return 1.0
    begin = schedule.steps - schedule.decay_steps if schedule.kind == "wsd" else warmup
    progress = min(1.0, max(0, step - begin) / (schedule.steps - begin))
    remaining = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.kind == "cosine" else 1 - progress
    return schedule.floor + (1 - schedule.floor) * remaining
