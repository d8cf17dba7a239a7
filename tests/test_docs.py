"""The Python in README.md and docs/ runs, and links between pages lead somewhere.

The blocks of a page run from top to bottom in one namespace. A block that is not meant to run on its own is fenced as
` ```python notest`.
"""

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
