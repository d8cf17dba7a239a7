"""Optimizers and their schedules as frozen data, which each engine realises with its own library."""

import math
from collections.abc import Iterable
from typing import Any, Literal

import attrs

__all__ = ["Optimizer", "Schedule", "adamw", "learning_rate", "set_learning_rate"]


@attrs.frozen
class Schedule:
    """A schedule of the learning rate: linear warm-up, then constant, or a decay to ``floor``.

    ``linear`` and ``cosine`` decay from the end of the warm-up on. ``wsd`` (warm-up, stable, decay) stays at the full
    rate, and decays linearly in its last ``decay`` steps: a run can go on from before those, with a later end.

    Args:
        kind: the shape.
        warmup: optimizer steps of linear warm-up; the first has ``1 / (warmup + 1)`` of the full rate.
        steps: the optimizer step at which the decay ends. Needed for all but constant.
        floor: the rate at the end of the decay and afterwards, as a fraction of the full one.
        decay: optimizer steps that the decay of ``wsd`` lasts; for no other kind.

    Raises:
        ValueError: a decay without ``steps`` after the warm-up, a ``wsd`` without ``decay`` or room for it, or
            ``decay`` where it would do nothing.

    Sources: WSD, Hu et al., 2024 (2404.06395), section 4; its linear decay, Hägele et al., 2024 (2405.18392).

    >>> Schedule("cosine", warmup=10, steps=100).floor
    0.0
    """

    kind: Literal["constant", "linear", "cosine", "wsd"] = attrs.field(
        default="constant", validator=attrs.validators.in_(["constant", "linear", "cosine", "wsd"])
    )
    warmup: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    steps: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    floor: float = attrs.field(default=0.0, validator=[attrs.validators.ge(0), attrs.validators.le(1)])
    decay: int = attrs.field(default=0, validator=attrs.validators.ge(0))

    def __attrs_post_init__(self) -> None:
        if self.kind != "constant" and self.steps <= self.warmup:
            raise ValueError(
                f"Schedule: a {self.kind} decay needs steps > warmup; found steps={self.steps}, warmup={self.warmup}"
            )
        if self.kind != "wsd" and self.decay:
            raise ValueError(f"Schedule: decay={self.decay} is for the kind 'wsd' alone; found '{self.kind}'")
        if self.kind == "wsd" and not 0 < self.decay <= self.steps - self.warmup:
            raise ValueError(
                f"Schedule: wsd needs a decay of 1 to {self.steps - self.warmup} steps, which is steps - warmup; found "
                f"decay={self.decay}"
            )


_ge, _lt = attrs.validators.ge, attrs.validators.lt


@attrs.frozen
class Optimizer:
    """An optimizer as data; made by `adamw`.

    >>> adamw(lr=1e-3).lr
    0.001
    """

    lr: float = attrs.field(default=1e-6, validator=attrs.validators.ge(0))
    betas: tuple[float, float] = attrs.field(
        default=(0.9, 0.999), validator=attrs.validators.deep_iterable(attrs.validators.and_(_ge(0), _lt(1)))
    )
    eps: float = attrs.field(default=1e-8, validator=attrs.validators.gt(0))
    weight_decay: float = attrs.field(default=0.0, validator=attrs.validators.ge(0))
    clip: float = attrs.field(default=1.0, validator=attrs.validators.gt(0))
    schedule: Schedule = Schedule()


def adamw(
    lr: float,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    clip: float = 1.0,
    schedule: Schedule | None = None,
) -> Optimizer:
    """AdamW, with clipping by the global norm of the gradient.

    Args:
        lr: the full learning rate.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled; multiplied by the learning rate. Matrices only: norms and biases are left out.
        clip: the largest global norm of the gradient; infinity (``.inf`` in a configuration) for none.
        schedule: of the learning rate; None: constant.

    Source: Loshchilov and Hutter, 2017 (1711.05101), algorithm 2.

    >>> adamw(lr=1e-6, schedule=Schedule("linear", steps=100)).schedule.kind
    'linear'
    """
    return Optimizer(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, clip=clip, schedule=schedule or Schedule())


def learning_rate(optimizer: Optimizer, step: int) -> float:
    """The learning rate of optimizer step ``step``, which counts from 0.

    >>> [
    ...     round(learning_rate(adamw(lr=1.0, schedule=Schedule("linear", warmup=1, steps=5)), step), 3)
    ...     for step in range(6)
    ... ]
    [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    schedule = optimizer.schedule
    if step < schedule.warmup:
        return optimizer.lr * (step + 1) / (schedule.warmup + 1)
    if schedule.kind == "constant":
        return optimizer.lr
    begin = schedule.steps - schedule.decay if schedule.kind == "wsd" else schedule.warmup
    progress = min(1.0, max(0, step - begin) / (schedule.steps - begin))
    left = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.kind == "cosine" else 1 - progress
    return optimizer.lr * (schedule.floor + (1 - schedule.floor) * left)


def set_learning_rate(groups: Iterable[dict[str, Any]], optimizer: Optimizer, step: int) -> float:
    """Let the groups of parameters of a torch optimizer have the rate of a step, and return it."""
    rate = learning_rate(optimizer, step)
    for group in groups:
        group["lr"] = rate
    return rate
