"""Frozen records that users make refuse numbers that are none, when they are made."""

import importlib
import inspect
import math
import typing
from typing import Any

import attrs
import pytest
import torch

from nrl.errors import ArgumentError

PACKAGES = (
    "nrl",
    "nrl.backends",
    "nrl.run.checkpoint",
    "nrl.envs",
    "nrl.runtime",
    "nrl.ops.plan.gpus",
    "nrl.ops.plan.simulate",
)
COMMANDS = (
    "nrl.ops.deploy.kubernetes",
    "nrl.ops.deploy.slurm",
    "nrl.ops.doctor.doctor_command",
    "nrl.cli.evaluation_settings",
    "nrl.gym.cli.audit",
    "nrl.ops.plan.plan_command",
    "nrl.cli.serve",
)
RESULTS = {"Environment", "Episode", "Graded", "Mesh", "Process", "Slots", "Trace", "Trainer"}
"""What nrl makes, and users do not."""
NEEDED: dict[str, dict[str, Any]] = {
    "Audit": {"target": "number"},
    "Executable": {"name": "x"},
    "Gpu": dict.fromkeys(("memory", "flops", "float32", "bandwidth", "link", "network", "host"), 1.0)
    | {"capability": (9, 0)},
    "Group": {"names": "x"},
    "Kubernetes": {"program": "train.py", "image": "a/b:c"},
    "Media": {"kind": "image", "data": torch.zeros(1)},
    "Model": {"source": "x"},
    "Planning": {"model": "x"},
    "Serving": {"model": "x"},
    "Slurm": {"program": "train.py"},
    "Step": {"model": {}},
}
"""The arguments that a record cannot be made without."""
UNBOUNDED = {("Optimizer", "clip")}
"""Numbers that may be infinite."""


def records() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for package in (*PACKAGES, *COMMANDS):
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) and attrs.has(value) and name not in RESULTS:
                found[name] = value
    return found


def numeric() -> list[tuple[Any, str, Any]]:
    """Every record, with each of its fields that is a number."""
    return [
        (record, field.alias, field.type)
        for record in records().values()
        for field in attrs.fields(attrs.resolve_types(record, include_extras=False))
        if field.init and {int, float} & {field.type, *typing.get_args(field.type)}
    ]


FIELDS = [pytest.param(*each, id=f"{each[0].__name__}.{each[1]}") for each in numeric()]


def test_there_are_many() -> None:
    assert {"Checkpoints", "Layout", "Limits", "Media", "Model", "Optimizer", "Sampling", "Schedule"} <= {*records()}
    assert len(FIELDS) > 90


@pytest.mark.parametrize("record", [pytest.param(each, id=name) for name, each in records().items()])
def test_an_unknown_name_is_refused_with_those_that_there_are(record: Any) -> None:
    with pytest.raises(ArgumentError, match="it has no argument 'colour'; it takes ") as raised:
        record(**NEEDED.get(record.__name__, {}), colour=1)
    assert raised.value.argument == "colour"


@pytest.mark.parametrize(("record", "field", "kind"), FIELDS)
def test_what_is_no_number_is_refused(record: Any, field: str, kind: Any) -> None:
    kinds = {kind, *typing.get_args(kind)}
    words: list[Any] = [math.nan, object()]
    words += [] if str in kinds else ["1"]
    words += [] if bool in kinds else [True]
    words += [] if typing.get_origin(kind) is tuple else [[1]]
    words += [] if float in kinds else [2.5]
    words += [] if (record.__name__, field) in UNBOUNDED else [math.inf, -math.inf]
    for word in words:
        with pytest.raises(ArgumentError) as raised:
            record(**NEEDED.get(record.__name__, {}) | {field: word})
        assert raised.value.argument == field, word
