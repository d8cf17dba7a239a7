"""Finding the checkpoints of a run, and choosing those to keep."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import attrs

from nrl.arguments import checked
from nrl.files import NOT_FINITE, Folder, read_manifest
from nrl.run.checkpoint import storage

__all__ = ["Checkpoint", "Checkpoints", "best", "checkpoints", "finite", "not_finite", "score"]


@checked("Checkpoints")
@attrs.frozen
class Checkpoints:
    """Settings of a run for writing and keeping checkpoints.

    Args:
        every: steps between two checkpoints. The last step of a loop always has a checkpoint.
        keep: number of the newest checkpoints to keep.
        best: a metric whose best checkpoint is kept too, for example ``"eval/loss"``. A step with a new best value
            always has a checkpoint.
        mode: whether the best is the largest or the smallest.
        grace: seconds from a SIGTERM to the end of the process; the last step is saved within this time.
        wait: ``"copy"``: a step waits for the copy of its values in host memory, as large as the files; ``"disk"``: a
            step waits for the files, without a copy. The files are the same.
        to: a folder shared by all nodes, or the URL of an object store, for example ``s3://bucket/runs/qwen``, of this
            run alone. None: the run's own folder.
        data_changed: whether a resumed run refuses or accepts changed rows of a source of `nrl.data.tasks`.

    >>> Checkpoints(best="eval/loss", mode="min").every
    50
    """

    every: int = attrs.field(default=50, validator=attrs.validators.ge(1))
    keep: int = attrs.field(default=2, validator=attrs.validators.ge(1))
    best: str | None = None
    mode: Literal["max", "min"] = attrs.field(default="max", validator=attrs.validators.in_(["max", "min"]))
    grace: float = attrs.field(default=30.0, validator=attrs.validators.gt(0))
    wait: Literal["copy", "disk"] = attrs.field(default="copy", validator=attrs.validators.in_(["copy", "disk"]))
    to: str | None = None
    data_changed: Literal["refuse", "accept"] = attrs.field(
        default="refuse", validator=attrs.validators.in_(["refuse", "accept"])
    )


class Checkpoint(NamedTuple):
    """A complete checkpoint.

    Args:
        folder: its name is the number of steps before it.
        step: the step before it, from 0.
        meta: JSON that was written with it.
        not_finite: names of weights and optimizer states in it that have NaN or infinite numbers, such as
            ``policy: model.lm_head.weight``. No run resumes from such a checkpoint, and it is never the best.
    """

    folder: Folder
    step: int
    meta: Mapping[str, Any]
    not_finite: tuple[str, ...] = ()


def checkpoints(root: str | Folder) -> list[Checkpoint]:
    """List the complete checkpoints of a loop, oldest first, without reading their files (see `verify`).

    Args:
        root: its folder, ``.../checkpoints/train``, or where ``Checkpoints(to=)`` has put them, ``s3://.../train``.
    """
    complete = []
    for folder in storage.list_complete(storage.resolve(root)):
        manifest = read_manifest(folder) or {"step": int(folder.name) - 1, "meta": {}}
        complete.append(Checkpoint(folder, manifest["step"], manifest["meta"], not_finite(manifest)))
    return complete


def not_finite(manifest: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of weights and optimizer states with NaN or infinite numbers, as `Checkpoint` has them.

    >>> not_finite({"values": {"count": None, "policy": {"not_finite": ["model.lm_head.weight"]}}})
    ('policy: model.lm_head.weight',)
    """
    values = manifest.get("values", {}).items()
    return tuple(f"{value}: {name}" for value, record in values if record for name in record.get(NOT_FINITE, ()))


def finite(candidates: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return the checkpoints whose weights and optimizer states are finite, in the same order.

    >>> from pathlib import Path
    >>> finite([Checkpoint(Path("10"), 9, {}), Checkpoint(Path("20"), 19, {}, ("policy: model.norm.weight",))])
    [Checkpoint(folder=PosixPath('10'), step=9, meta={}, not_finite=())]
    """
    return [checkpoint for checkpoint in candidates if not checkpoint.not_finite]


def best(candidates: list[Checkpoint], keep: Checkpoints) -> Checkpoint | None:
    """Return the first checkpoint with the best value of the metric of ``keep``. None: no checkpoint has it.

    A checkpoint with NaN or infinite weights is never the best.

    >>> from pathlib import Path
    >>> found = [Checkpoint(Path(name), 0, {"metrics": {"loss": loss}}) for name, loss in [("10", 0.5), ("20", 0.3)]]
    >>> best(found, Checkpoints(best="loss", mode="min")).folder.name
    '20'
    """
    scored = [(x, score(x.meta.get("metrics", {}), keep)) for x in finite(candidates)]
    ranked = [(x, value) for x, value in scored if value is not None]
    return max(ranked, key=lambda pair: pair[1])[0] if ranked else None


def score(metrics: Mapping[str, Any], keep: Checkpoints) -> float | None:
    """Return the metric that ``keep`` names, larger is better. None: it was not measured, or is not finite.

    >>> score({"eval/loss": 0.5}, Checkpoints(best="eval/loss", mode="min"))
    -0.5
    """
    value = metrics.get(keep.best) if keep.best else None
    if value is None or not math.isfinite(value):
        return None
    return float(value) if keep.mode == "max" else -float(value)
