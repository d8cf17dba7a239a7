"""What is published speaks of the project alone: no paths of somebody's machine, no package index but PyPI."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Written in pieces, so that this file does not find itself.
PRIVATE = re.compile(
    r"(?<![\w.~-])/(?:"
    + "|".join(["wo" + "rk/", "ro" + "ot/", "ho" + "me/", "Us" + "ers/", "op" + "t/", "tm" + "p/bash"])
    + ")"
    + "|"
    + "|".join([r"\bFACTS" + r"\.md", r"\bDESIGN" + r"\.md", "nrl-inter" + "faces", "registry " + "hosts"])
)
INDEX = "https://pypi.org/simple"
FILES = "https://files.pythonhosted.org/"


def published() -> list[Path]:
    """Every file that git tracks, or would after `git add`."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def private_lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if PRIVATE.search(line)]


def test_no_file_names_a_path_of_somebodys_machine() -> None:
    found = {}
    for path in published():
        content = path.read_bytes()
        if b"\0" not in content[:8192] and (lines := private_lines(content.decode())):
            found[str(path.relative_to(ROOT))] = lines[:3]
    assert found == {}


@pytest.mark.parametrize(
    "line", ["cd /wo" + "rk/main", '"/ro' + 'ot/.cache"', "`/ho" + "me/me/nrl`", "see DESIGN" + ".md, section 3"]
)
def test_a_private_line_is_seen(line: str) -> None:
    assert private_lines(f"fine\n{line}\n") == [line]


@pytest.mark.parametrize("line", ["https://example.org/wo" + "rk/x", "docs/wo" + "rk/", "/usr/bin/env", "~/wo" + "rk/"])
def test_an_innocent_line_passes(line: str) -> None:
    assert private_lines(line) == []


def test_the_lock_names_no_package_index_but_pypi() -> None:
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    sources = [package["source"] for package in lock["package"]]
    assert [source for source in sources if source != {"registry": INDEX} and "editable" not in source] == []
    files = [
        file["url"]
        for package in lock["package"]
        for file in [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
    ]
    assert files
    assert [url for url in files if not url.startswith(FILES)] == []
