"""The Python in README.md and docs/ runs, links between pages lead somewhere, and lines are short.

The blocks of a page run from top to bottom in one namespace. A block that is not meant to run on its own is fenced as
` ```python notest`.
"""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PLACES = "*.md", "docs/**/*.md", "benchmarks/README.md", "deploy/README.md", "tests/data/README.md"
FILES = [path for place in PLACES for path in ROOT.glob(place)]
PAGES = sorted(str(path.relative_to(ROOT)) for path in FILES)
FENCE = re.compile(r"^```(\S*)[ \t]*([^\n]*)\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]*)(?:#([^)\s]+))?\)")


def blocks(text: str) -> list[str]:
    """The Python blocks that run, each behind as many empty lines as put it where it is in the page."""
    return [
        "\n" * text.count("\n", 0, found.start(3)) + found[3]
        for found in FENCE.finditer(text)
        if found[1] == "python" and "notest" not in found[2].split()
    ]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = HEADING.findall(FENCE.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path) -> list[str]:
    """The links of a page whose file, or whose heading in it, does not exist."""
    dead = []
    for path, anchor in LINK.findall(FENCE.sub("", page.read_text())):
        if "://" in path or path.startswith("mailto:"):
            continue
        target = page.parent / path if path else page
        if not target.exists():
            dead.append(path)
        elif anchor and anchor not in anchors(target):
            dead.append(f"{path}#{anchor}")
    return dead


def missing_paths(text: str) -> list[str]:
    """The files and folders of the repository that a page names and that do not exist."""
    paths = re.findall(r"(?<![\w/.-])(?:nrl|tests|examples|benchmarks|deploy)/[\w./-]*\w(?:\.py\b|/(?=`))", text)
    return sorted({path for path in paths if not (ROOT / path).exists()})


def long_lines(text: str) -> list[str]:
    """The lines of more than 120 columns."""
    return [line for line in text.splitlines() if len(line) > 120]


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_the_files_that_a_page_names_are_there(page: str) -> None:
    assert missing_paths((ROOT / page).read_text()) == []


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks((ROOT / page).read_text()):
        exec(compile(block, str(ROOT / page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES)
def test_the_links_of_a_page_lead_somewhere(page: str) -> None:
    assert dead_links(ROOT / page) == []


@pytest.mark.parametrize("page", PAGES)
def test_the_lines_of_a_page_have_at_most_120_columns(page: str) -> None:
    assert long_lines((ROOT / page).read_text()) == []


def test_only_python_blocks_that_are_meant_to_run_are_taken() -> None:
    text = "# A\n```python\nx = 1\n```\n```python notest\nboom\n```\n```bash\nls\n```\n```python\nassert x == 1\n```\n"
    assert blocks(text) == ["\n\nx = 1\n", "\n" * 11 + "assert x == 1\n"]


def test_a_dead_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# The `top` of it\n[a](page.md#the-top-of-it) [b](gone.md) [c](https://example.org/x#y) [d](#the-end)\n"
        "```md\n# The end\n[e](also-gone.md)\n```\n"
    )
    assert dead_links(page) == ["gone.md", "#the-end"]


def test_a_long_line_is_seen() -> None:
    assert long_lines(f"{'a' * 120}\n| {'b' * 118} |\n") == [f"| {'b' * 118} |"]


def test_the_page_of_methods_is_what_the_docstrings_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    entries = {each.name: each for _, found in make.sections() for each in found}
    assert len(entries) > 60
    for name, each in entries.items():
        if name not in APPLIES | NO_SOURCE:
            assert each.source, name
        loss_of_a_policy = name.endswith("_loss")
        assert not loss_of_a_policy or each.equation, name
