"""Random steps of the examples by both engines in random layouts, against plain transformers in float64.

`tests.backends.engine_draws` says what is random.
"""

from pathlib import Path

import pytest

from nrl.runtime import Layout
from tests.backends.engine_draws import (
    MUTANTS,
    Result,
    Setting,
    Step,
    check_equal,
    expected,
    recorded,
    run,
    settings,
    tied_step,
)
from tests.backends.processes import Processes

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(600)]


def by(setting: Setting, step: Step, two: Processes, four: Processes, mutant: str | None = None) -> list[Result]:
    """What each process of a setting has found."""
    slots = setting.layout.slots
    return [run(None, setting, step, mutant)] if slots == 1 else {2: two, 4: four}[slots](run, setting, step, mutant)


def check_draw(seed: int, folder: Path, patch: pytest.MonkeyPatch, two: Processes, four: Processes) -> None:
    for step in recorded(seed, folder, patch):
        reference = expected(step)
        for setting in settings(seed, step.model):
            for found in by(setting, step, two, four):
                check_equal(found, reference, f"seed {seed}, {setting}")


@pytest.mark.parametrize("seed", range(10))
def test_engines_have_the_gradient_of_plain_transformers(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two: Processes, four: Processes
) -> None:
    check_draw(seed, tmp_path, monkeypatch, two, four)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 200))
def test_many_more_draws(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two: Processes, four: Processes
) -> None:
    check_draw(seed, tmp_path, monkeypatch, two, four)


ALONE = Setting("fsdp"), *(Setting("megatron", layout) for layout in (Layout(tp=2), Layout(pp=2), Layout(dp=2)))


@pytest.mark.parametrize("setting", ALONE, ids=str)
def test_a_tied_head_keeps_the_gradient_of_the_pad_token(
    setting: Setting, tmp_path: Path, two: Processes, four: Processes
) -> None:
    step = tied_step(tmp_path)
    for found in by(setting, step, two, four):
        check_equal(found, expected(step), str(setting))


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("setting", ALONE[1:], ids=str)
def test_the_comparison_finds_engines_that_are_wrong(
    setting: Setting, mutant: str, tmp_path: Path, two: Processes, four: Processes
) -> None:
    step = tied_step(tmp_path)
    for found in by(setting, step, two, four, mutant):
        with pytest.raises(AssertionError, match="model.embed_tokens.weight differs"):
            check_equal(found, expected(step), mutant)
