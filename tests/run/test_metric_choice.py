"""Which metrics a report shows first, and which it folds away."""

import math
from pathlib import Path

import numpy as np
import pytest

from nrl.run.charts import Series
from nrl.run.metric_choice import is_flat, key_metrics, order_metrics, time_phases
from nrl.runtime.trace import timeline


@pytest.mark.parametrize(
    ("name", "values", "flat"),
    [
        ("lag", [0.0, 0.0, 0.0], True),
        ("reward/max", [1.0, 1.0], True),
        ("loss", [2.2e-8, -5e-8, 0.0], True),  # of GRPO on its own samples
        ("mismatch/ess", [0.99999999999, 1.0], True),
        ("tokens", [4096.0, 4096.001], True),  # rounding of float32
        ("mismatch/kl", [1e-13, 4e-13], True),
        ("mismatch/kl", [1e-13, 2e-6], False),
        ("reward", [0.5, 0.50001], False),
        ("tokens", [4096.0, 4097.0], False),
        ("lr", [1e-7, 5e-8], False),  # decays, and is no noise
        ("critic/lr", [0.0, 0.0], True),
        ("lr", [3e-7, 3e-7], True),
        ("loss", [1.0], False),  # no curve yet
        ("loss", [1.0, math.nan, 1.0], False),  # the gap is worth a look
    ],
)
def test_curves_that_say_no_more_than_one_number(name: str, values: list[float], flat: bool) -> None:
    assert is_flat(name, np.array(values)) is flat


@pytest.mark.parametrize(
    ("logged", "first"),
    [
        ("loss grad_norm tokens lr eval/loss tokens_per_second", "loss eval/loss"),
        ("loss accuracy margin chosen_score eval/loss eval/accuracy eval/margin", "accuracy margin eval/accuracy"),
        ("loss mismatch/kl approx_kl reward reward/max length length/max", "reward length approx_kl"),
        ("loss kl reward length entropy mismatch/kl eval/length eval/reward", "reward eval/reward length entropy"),
        ("loss sums/eval/reward teacher_kl", "loss sums/eval/reward teacher_kl"),
        ("grad_norm mine", ""),
    ],
)
def test_the_first_row_is_what_a_reader_of_such_a_run_looks_for(logged: str, first: str) -> None:
    assert key_metrics(logged.split()) == first.split()


def test_other_metrics_follow_rewards_and_losses_first() -> None:
    assert order_metrics(["b", "length/max", "loss", "a", "reward/max"]) == [
        "reward/max",
        "loss",
        "length/max",
        "b",
        "a",
    ]


def series(**values: list[float]) -> dict[str, Series]:
    return {f"time/{name}": (np.arange(float(len(some))), np.array(some)) for name, some in values.items()}


def test_the_time_of_a_step_is_split_into_the_phases_that_the_loop_has() -> None:
    metrics = series(rollout=[1.0, 2.0], train=[3.0, 4.0], total=[4.0, 6.0])
    assert list(time_phases(metrics, samples=True, saves={})) == ["rollout", "train"]
    assert list(time_phases(metrics, samples=False, saves={})) == ["data", "train"]
    phases = time_phases(metrics | series(publish=[0.5]), samples=True, saves={1.0: 2.0})
    assert {name: values.tolist() for name, (_, values) in phases.items()} == {
        "rollout": [1.0, 2.0],
        "train": [2.5, 4.0],
        "publish": [0.5, 0.0],
        "save": [0.0, 2.0],
    }
    assert list(time_phases(metrics | series(publish=[0.01]), samples=True, saves={1.0: 1e-5})) == ["rollout", "train"]
    assert time_phases(series(rollout=[1.0]), samples=True, saves={}) == {}


def test_saves_count_for_the_innermost_step_around_them(tmp_path: Path) -> None:
    with timeline.recording(tmp_path) as path:
        for mesh, name, start, end, loop in [
            ("driver", "save", 11.0, 11.5, None),
            ("driver", "eval 0", 10.5, 12.0, "eval"),
            ("driver", "save", 13.0, 14.0, None),
            ("driver", "save", 14.0, 14.25, None),
            ("trainer", "save", 10.0, 10.5, None),
            ("driver", "train 3", 10.0, 20.0, "train"),
            ("driver", "save", 30.0, 31.0, None),  # in no step
        ]:
            timeline.record(mesh, 0, name, start, end, loop)
    assert timeline.seconds_in_steps(path, "save") == {"eval": {0: 0.5}, "train": {3: 1.25}}
