"""Right verdicts by kind, which the documentation shows."""

import pytest

from tests.envs.verdicts import KINDS, PAGE, page, verdict

ROWS = [(kind, number) for kind, rows in KINDS.items() for number in range(len(rows))]


@pytest.mark.parametrize(("kind", "number"), ROWS, ids=[f"{kind}-{number}" for kind, number in ROWS])
def test_verdicts_are_right(kind: str, number: int) -> None:
    task, text, reward = KINDS[kind][number]
    assert verdict(kind, task, text) == reward


def test_the_documentation_shows_these_verdicts() -> None:
    text = PAGE.read_text()
    assert all(f"<!-- verdicts: {kind} -->" in text for kind in KINDS)
    assert page(text) == text, "write it again: python -m tests.envs.verdicts"
