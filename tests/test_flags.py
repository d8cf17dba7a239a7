import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from nrl.errors import ConfigError
from nrl.flags import flag
from nrl.runtime.venvs.locks import is_rebuild_forced

ROOT = Path(__file__).parents[1]
FLAGS = {"NRL_DEBUG", "NRL_FORCE_REBUILD_VENVS", "NRL_TRACEBACK"}
NOT_FLAGS = {
    "NRL_ENDPOINT_TOKEN",
    "NRL_GYM_DIR",
    "NRL_GYM_TOKEN",
    "NRL_NSIGHT",
    "NRL_PORTS",
    "NRL_PROFILE",
    "NRL_SERVE_TOKEN",
    "NRL_VENV_DIR",
}
"""Variables that hold a text: paths, tokens, ranges and names."""
CONSTANTS = {"0", "1", "true", "false", "yes", "no"}


@pytest.mark.parametrize("value", ["", "0", "false", "False", "FALSE", "no", "No", "off", "OFF", "n", "f", " 0 "])
def test_off(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NRL_FORCE_REBUILD_VENVS", value)
    assert not flag("NRL_FORCE_REBUILD_VENVS")
    assert not is_rebuild_forced()


@pytest.mark.parametrize("value", ["1", "true", "True", "YES", "on", "On", "y", "t"])
def test_on(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NRL_FORCE_REBUILD_VENVS", value)
    assert is_rebuild_forced()


def test_unset_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NRL_FORCE_REBUILD_VENVS", raising=False)
    assert not is_rebuild_forced()


@pytest.mark.parametrize("value", ["2", "nope", "-1", "disable", "none"])
def test_an_unreadable_value_is_an_error_that_names_the_variable(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NRL_FORCE_REBUILD_VENVS", value)
    with pytest.raises(ConfigError, match=f"NRL_FORCE_REBUILD_VENVS is '{value}'; set it to 1 or 0"):
        is_rebuild_forced()


def named(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield the variables of nrl that a module reads, and whether `flag` reads them."""
    for node in ast.walk(tree):
        texts = [part.value for part in ast.iter_child_nodes(node) if isinstance(part, ast.Constant)]
        variables = [text for text in texts if isinstance(text, str) and text.startswith("NRL_") and text.isupper()]
        by_flag = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "flag"
        reads = isinstance(node, ast.Call | ast.Subscript) and "environ" in ast.unparse(node)
        yield from ((variable, by_flag) for variable in variables if by_flag or reads)


def compared(tree: ast.AST) -> list[str]:
    """Return the comparisons of an environment variable of nrl with a word such as "1"."""
    comparisons = [node for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    return [
        text
        for node in comparisons
        if "environ" in (text := ast.unparse(node)) and "NRL_" in text
        if any(isinstance(part, ast.Constant) and part.value in CONSTANTS for part in ast.walk(node))
    ]


def test_every_switch_is_read_by_one_function() -> None:
    reads = set[tuple[str, bool]]()
    for path in sorted((ROOT / "nrl").rglob("*.py")):
        tree = ast.parse(path.read_text())
        reads |= set(named(tree))
        assert not compared(tree), path
    assert {variable for variable, by_flag in reads if by_flag} == FLAGS
    assert {variable for variable, by_flag in reads if not by_flag} <= NOT_FLAGS


def test_the_search_finds_a_switch_that_is_read_otherwise() -> None:
    source = 'import os\nif os.environ.get("NRL_FAST", "0") not in ("", "0"):\n    pass\nflag("NRL_SLOW")\n'
    tree = ast.parse(source)
    assert set(named(tree)) == {("NRL_FAST", False), ("NRL_SLOW", True)}
    assert compared(tree)
