"""Optimizers as frozen data, which each engine realises with its own library."""

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import attrs

from nrl.arguments import Unbounded, checked, described, register_kind
from nrl.backends.training.optim.lr_schedule import Schedule, fraction
from nrl.errors import ArgumentError

__all__ = [
    "Group",
    "Optimizer",
    "adamw",
    "learning_rate",
    "muon",
    "own",
    "set_learning_rate",
    "sgd",
]

_ge, _gt, _lt = attrs.validators.ge, attrs.validators.gt, attrs.validators.lt
_fraction = attrs.validators.and_(_ge(0), _lt(1))


@checked("Group")
@attrs.frozen
class Group:
    """The options of a group of weights; where several groups fit a weight, the first one counts.

    Args:
        names: which weights, by a pattern for their Hugging Face names: ``*`` is any text, ``[ab]`` one of two letters.
        factor: the learning rate, as a multiple of the optimizer's.
        weight_decay: for weights of any shape; None: the optimizer's own.
        muon: whether Muon may update these weights, if it updates weights of their kind; else AdamW does.

    Raises:
        ValueError: a number is negative.

    >>> Group("*.embed_tokens.weight", factor=0.1, weight_decay=0.0).factor
    0.1
    """

    names: str
    factor: float = attrs.field(default=1.0, validator=_ge(0))
    weight_decay: float | None = attrs.field(default=None, validator=attrs.validators.optional(_ge(0)))
    muon: bool = True


@checked("Optimizer")
@attrs.frozen
class Optimizer:
    """An optimizer as data; made by `adamw`, `sgd`, `muon` and `own`, which explain the fields.

    In a configuration, ``optimizer.kind=muon`` replaces AdamW. Fields that are None have the defaults of the kind.

    Raises:
        ValueError: a number out of its range, an option where it would do nothing, or ``own`` without ``make``.

    >>> adamw(lr=1e-3).lr
    0.001
    """

    lr: float = attrs.field(default=1e-6, validator=_ge(0))
    betas: tuple[float, float] = attrs.field(default=(0.9, 0.999), validator=attrs.validators.deep_iterable(_fraction))
    eps: float = attrs.field(default=1e-8, validator=_gt(0))
    weight_decay: float = attrs.field(default=0.0, validator=_ge(0))
    clip: Unbounded = attrs.field(default=1.0, validator=_gt(0))
    schedule: Schedule | Callable[[int], float] = Schedule()
    kind: Literal["adamw", "sgd", "muon", "own"] = attrs.field(
        default="adamw", validator=attrs.validators.in_(["adamw", "sgd", "muon", "own"])
    )
    momentum: float | None = attrs.field(default=None, validator=attrs.validators.optional(_fraction))
    nesterov: bool | None = None
    scale: Literal["match_rms_adamw", "original"] | None = attrs.field(
        default=None, validator=attrs.validators.in_([None, "match_rms_adamw", "original"])
    )
    precision: Literal["float32", "bfloat16"] | None = attrs.field(
        default=None, validator=attrs.validators.in_([None, "float32", "bfloat16"])
    )
    moments: Literal["float32", "bfloat16"] | None = attrs.field(
        default=None, validator=attrs.validators.in_([None, "float32", "bfloat16"])
    )
    groups: tuple[Group, ...] = attrs.field(default=())
    make: Callable[[Any], Any] | None = None

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.schedule, Schedule):
            _check_schedule(self.schedule)
        reads = {
            "adamw": ("moments",),
            "sgd": ("momentum", "nesterov"),
            "muon": ("momentum", "nesterov", "scale", "precision"),
        }
        for name in ("momentum", "nesterov", "scale", "precision", "moments"):
            if getattr(self, name) is not None and name not in reads.get(self.kind, ()):
                kinds = " and ".join(f"'{kind}'" for kind, names in reads.items() if name in names)
                raise ArgumentError(
                    f"Optimizer: {name} is for {kinds} alone; found {getattr(self, name)!r} of '{self.kind}'"
                )
        if self.kind == "sgd" and self.nesterov and not self.momentum:
            raise ArgumentError("Optimizer: nesterov needs a momentum, and there is none; give one above 0")
        if (self.kind == "own") != (self.make is not None):
            raise ArgumentError(
                f"Optimizer: the kind 'own' and nothing else has make, a function; found '{self.kind}' and "
                f"make={self.make!r}; use own(make, lr=...)"
            )
        if self.kind == "own" and self.weight_decay:
            raise ArgumentError(
                f"Optimizer: weight_decay={self.weight_decay} would do nothing; have make pass it to its optimizer"
            )
        for group in self.groups:
            if not group.muon and self.kind != "muon":
                raise ArgumentError(f"Optimizer: {group} keeps Muon away; found '{self.kind}', which has none")


def _check_schedule(schedule: Callable[[int], float]) -> None:
    """Call one's own schedule once: a scheduler of torch, for one, is a class that takes an optimizer."""
    try:
        value = schedule(0)
        wrong = "" if isinstance(value, int | float) or getattr(value, "shape", None) == () else described(value)
    except (TypeError, AttributeError) as error:
        value, wrong = None, f"the error {error}"
    if wrong or isinstance(value, bool):
        raise ArgumentError(
            f"Optimizer: schedule(0) is {wrong or described(value)}; give a function of the optimizer step, which "
            "counts from 0, that returns a multiple of lr, such as lambda step: 0.99**step, or a Schedule such as "
            "Schedule('cosine', steps=1000)",
            "schedule",
        )


def _instead_of_optimizer(value: Any) -> str:
    name = value.__name__ if isinstance(value, type) else type(value).__name__
    if value in (adamw, sgd, muon, own):
        return f"call it: {value.__name__}(lr=1e-6)"
    if callable(getattr(value, "func", None)):
        return "give adamw(lr=1e-6), or nrl.backends.own(make, lr=1e-6) for an optimizer of torch that make builds"
    if hasattr(value, "zero_grad") or hasattr(value, "step"):
        return (
            "give adamw(lr=1e-6), as data: each process makes its own from the weights that it holds. For another one "
            f"of torch give nrl.backends.own(torch.optim.{name}, lr=1e-6)"
        )
    return f"give adamw(lr={value!r})" if isinstance(value, float) else "give adamw(lr=1e-6), or sgd, muon or own"


register_kind(Optimizer, _instead_of_optimizer)


@checked("adamw")
def adamw(
    lr: float,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    moments: Literal["float32", "bfloat16"] = "float32",
    clip: Unbounded = 1.0,
    schedule: Schedule | Callable[[int], float] | None = None,
    groups: Iterable[Group] = (),
) -> Optimizer:
    """AdamW, with clipping by the global norm of the gradient.

    Args:
        lr: the full learning rate.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled; multiplied by the learning rate. Matrices only: norms and biases are left out.
        moments: in which both moments are kept; in bfloat16 they are stochastically rounded after each step, and
            computed in float32 (`nrl.backends.training.optim.stochastic_rounding`).
        clip: the largest global norm of the gradient; infinity (``.inf`` in a configuration) for none.
        schedule: of the learning rate, or a function of the optimizer step, which counts from 0: the rate as a multiple
            of ``lr``. None: constant.
        groups: options of groups of weights.

    Source: Loshchilov and Hutter, 2017 (1711.05101), algorithm 2.

    >>> adamw(lr=1e-6, schedule=Schedule("linear", steps=100)).schedule.kind
    'linear'
    >>> learning_rate(adamw(lr=1.0, schedule=lambda step: (step + 1) ** -0.5), 3)
    0.5
    """
    moments_dtype = None if moments == "float32" else moments  # None lets another kind replace it in a configuration.
    return Optimizer(
        lr,
        (betas[0], betas[1]),
        eps,
        weight_decay,
        clip,
        schedule or Schedule(),
        moments=moments_dtype,
        groups=tuple(groups),
    )


@checked("sgd")
def sgd(
    lr: float,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    clip: Unbounded = 1.0,
    schedule: Schedule | Callable[[int], float] | None = None,
    groups: Iterable[Group] = (),
) -> Optimizer:
    """Stochastic gradient descent, torch's: ``b = momentum b + g``, then ``w -= lr b``, where g is the gradient.

    Args:
        lr: the full learning rate.
        momentum: mu; without one there is no state. The first step has ``b = g``.
        nesterov: whether a step is ``g + momentum b`` instead of b.
        weight_decay: of matrices, added to the gradient: ``g + weight_decay w``.
        clip: as of `adamw`, before weight decay.
        schedule: as of `adamw`.
        groups: as of `adamw`.

    Source: Sutskever et al., 2013 (On the importance of initialization and momentum in deep learning), with the
    learning rate outside of the momentum.

    >>> sgd(lr=0.1, momentum=0.9).momentum
    0.9
    """
    return Optimizer(
        lr,
        weight_decay=weight_decay,
        clip=clip,
        schedule=schedule or Schedule(),
        kind="sgd",
        momentum=momentum,
        nesterov=nesterov,
        groups=tuple(groups),
    )


@checked("muon")
def muon(
    lr: float,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
    precision: Literal["float32", "bfloat16"] = "float32",
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    clip: Unbounded = 1.0,
    schedule: Schedule | Callable[[int], float] | None = None,
    groups: Iterable[Group] = (),
) -> Optimizer:
    """Muon for the matrices of hidden layers, AdamW for all else: embeddings, the head, norms and biases.

    A matrix G of m rows and n columns has the momentum ``b = momentum b + g``. A step is
    ``w -= lr (scale(m, n) O + weight_decay w)``, where O is `nrl.backends.training.optim.muon.newton_schulz` of b, or
    of ``g + momentum b``. A matrix is what files have as one: each expert is, of each projection, also where a model
    keeps them in one tensor. LoRA's A and B are matrices like others.

    Args:
        lr: the full learning rate, of both optimizers; ``groups`` can give weights another one.
        momentum: mu, of Muon.
        nesterov: whether a step looks ahead by ``g + momentum b``.
        scale: ``0.2 sqrt(max(m, n))``, with which updates are as large as AdamW's usually are, so that both can have
            one learning rate; or the original ``sqrt(max(1, m / n))``.
        precision: of Newton-Schulz; of a float64 model, float32 means float64.
        betas: of AdamW.
        eps: of AdamW.
        weight_decay: decoupled, of both; matrices only.
        clip: as of `adamw`.
        schedule: as of `adamw`.
        groups: as of `adamw`.

    Sources: Jordan et al., 2024 (Muon: an optimizer for hidden layers in neural networks, kellerjordan.github.io); the
    scale and weight decay, Liu et al., 2025 (2502.16982), equation 4.

    >>> muon(lr=1e-5, groups=[Group("*.mlp.gate.weight", muon=False)]).momentum
    0.95
    """
    return Optimizer(
        lr,
        (betas[0], betas[1]),
        eps,
        weight_decay,
        clip,
        schedule or Schedule(),
        kind="muon",
        momentum=momentum,
        nesterov=nesterov,
        scale=scale,
        precision=precision,
        groups=tuple(groups),
    )


@checked("own")
def own(
    make: Callable[[Any], Any],
    *,
    lr: float,
    clip: Unbounded = 1.0,
    schedule: Schedule | Callable[[int], float] | None = None,
    groups: Iterable[Group] = (),
) -> Optimizer:
    """One's own optimizer of torch.

    Its state of a parameter has to be tensors of the parameter's shape, and numbers, with nothing in
    ``param_groups`` that a step changes: that is what checkpoints have. Over several processes, parameters and
    gradients are DTensors, of which each holds rows. What is computed number by number is right as it is; what looks at
    a whole matrix is right if it is made of operators that DTensor knows.

    Args:
        make: from parameters to a ``torch.optim.Optimizer``. It gets groups as torch has them, dicts with ``params``
            and, where a `Group` has it, ``weight_decay``; all other weights have the weight decay that ``make`` says.
        lr: the full learning rate, which every step sets.
        clip: as of `adamw`.
        schedule: as of `adamw`.
        groups: as of `adamw`.

    >>> from functools import partial
    >>> import torch
    >>> own(partial(torch.optim.Adagrad, lr_decay=0.1), lr=1e-2, clip=math.inf).kind
    'own'
    """
    return Optimizer(lr, clip=clip, schedule=schedule or Schedule(), kind="own", groups=tuple(groups), make=make)


def learning_rate(optimizer: Optimizer, step: int) -> float:
    """Return the learning rate of optimizer step ``step``, which counts from 0.

    Raises:
        ValueError: one's own schedule gives a negative number, or one that is not finite.

    >>> [
    ...     round(learning_rate(adamw(lr=1.0, schedule=Schedule("linear", warmup=1, steps=5)), step), 3)
    ...     for step in range(6)
    ... ]
    [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    schedule = optimizer.schedule
    if isinstance(schedule, Schedule):
        return optimizer.lr * fraction(schedule, step)
    rate = optimizer.lr * float(schedule(step))
    if not (math.isfinite(rate) and rate >= 0):
        raise ArgumentError(
            f"learning_rate: the schedule gives {rate} at optimizer step {step}; give a finite rate of 0 or more"
        )
    return rate


def set_learning_rate(groups: Iterable[dict[str, Any]], optimizer: Optimizer, step: int) -> float:
    """Set the learning rate of a step in the parameter groups of a torch optimizer, and return it.

    A group with a ``factor`` has a multiple of it, and one with ``at`` the number of the step.
    """
    rate = learning_rate(optimizer, step)
    for group in groups:
        group["lr"] = rate * group.get("factor", 1.0)
        if "at" in group:
            group["at"] = step
    return rate
