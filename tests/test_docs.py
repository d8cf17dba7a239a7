"""The Python in README.md and docs/ runs, and links between pages lead somewhere.

The blocks of a page run from top to bottom in one namespace. A block that is not meant to run on its own is fenced as
` ```python notest`.
"""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(r"^```(\S*)[ \t]*([^\n]*)\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


def blocks(text: str) -> list[str]:
    """The Python blocks that run, each behind as many empty lines as put it where it is in the page."""
    return [
        "\n" * text.count("\n", 0, found.start(3)) + found[3]
        for found in FENCE.finditer(text)
        if found[1] == "python" and "notest" not in found[2].split()
    ]


def dead_links(page: Path) -> list[str]:
    targets = LINK.findall(FENCE.sub("", page.read_text()))
    return [
        each
        for each in targets
        if "://" not in each and not each.startswith("mailto:") and not (page.parent / each).exists()
    ]


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks((ROOT / page).read_text()):
        exec(compile(block, str(ROOT / page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES)
def test_the_links_of_a_page_lead_somewhere(page: str) -> None:
    assert dead_links(ROOT / page) == []


def test_only_python_blocks_that_are_meant_to_run_are_taken() -> None:
    text = "# A\n```python\nx = 1\n```\n```python notest\nboom\n```\n```bash\nls\n```\n```python\nassert x == 1\n```\n"
    assert blocks(text) == ["\n\nx = 1\n", "\n" * 11 + "assert x == 1\n"]


def test_a_dead_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("[a](page.md#top) [b](gone.md) [c](https://example.org/x)\n```md\n[d](also-gone.md)\n```\n")
    assert dead_links(page) == ["gone.md"]


def test_the_table_of_methods_is_what_the_docstrings_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    make = importlib.import_module("make_losses")
    assert make.main(check=True) == 0
    (tmp_path / "losses.md").write_text("another")
    monkeypatch.setattr(make, "PAGE", tmp_path / "losses.md")
    assert make.main(check=True) == 1
    assert make.main(check=False) == 0
    assert make.main(check=True) == 0


APPLIES = {"advantages", "from_rewards", "kl", "per_group", "sampled_logprobs", "times"}  # another function
NO_SOURCE = {"bounded", "policy_loss", "preference_loss", "scale_rewards", "weighted_sum"}


def test_every_method_has_its_equation_and_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    make = importlib.import_module("make_losses")
    rows = [line.strip("| ").split(" | ") for line in make.written() if line.startswith("| `")]
    names = {cells[0].strip("`").partition("(")[0]: cells for cells in rows}
    assert len(names) > 60
    for name, cells in names.items():
        if name not in APPLIES | NO_SOURCE:
            assert len(cells) == 4, name
            assert cells[3].strip(), name
        loss_of_a_policy = name.endswith("_loss")
        assert not loss_of_a_policy or cells[2].startswith("`"), name
