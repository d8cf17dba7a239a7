"""Random steps of the examples by the torch engine, against plain transformers in float64.

`tests/backends/megatron/test_engine_equality.py` draws more of them, for both engines.
"""

from pathlib import Path

import pytest

from nrl.runtime import Layout
from tests.backends.engine_draws import MUTANTS, Setting, check_equal, expected, recorded, run, settings, tied_step


@pytest.mark.parametrize("seed", [1001, 1002])
def test_the_gradient_is_that_of_plain_transformers(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in recorded(seed, tmp_path, monkeypatch):
        _, setting = settings(seed, step.model)
        check_equal(run(None, setting._replace(layout=Layout()), step), expected(step), f"seed {seed}, {setting}")


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_comparison_finds_an_engine_that_is_wrong(mutant: str, tmp_path: Path) -> None:
    step = tied_step(tmp_path)
    reference = expected(step)
    check_equal(run(None, Setting("fsdp"), step), reference, "as it is")
    with pytest.raises(AssertionError, match="model.embed_tokens.weight differs"):
        check_equal(run(None, Setting("fsdp"), step, mutant), reference, mutant)
