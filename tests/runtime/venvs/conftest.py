"""A small index, and a project of a user: one package in the place of nrl, and two extras from the index."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.runtime.venvs.recipe_parts import index_of, project_of, wheel_of


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    """An index with three packages, which is uv's only one until it is closed."""
    with ExitStack() as stack:
        wheels = wheel_of("one"), wheel_of("two"), wheel_of("three", "3.0")
        _, variables = stack.enter_context(index_of(tmp_path / "simple", *wheels))
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("NRL_VENV_DIR", str(tmp_path / "venvs"))
        yield stack


@pytest.fixture
def mine(tmp_path: Path, index: ExitStack, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a user's project, whose environment this interpreter seems to be."""
    root = project_of(tmp_path)
    monkeypatch.setattr(sys, "prefix", str(root / ".venv"))
    return root
