"""What is published speaks of the project alone: no paths of somebody's machine, no index but PyPI, its own name."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from nrl.runtime.venvs.environments import DISTRIBUTION

ROOT = Path(__file__).parents[1]

# Written in pieces, so that this file does not find itself.
PRIVATE = re.compile(
    r"(?<![\w.~-])/(?:"
    + "|".join(["wo" + "rk/", "ro" + "ot/", "ho" + "me/", "Us" + "ers/", "op" + "t/", "tm" + "p/bash"])
    + ")"
    + "|"
    + "|".join([r"\bFACTS" + r"\.md", r"\bDESIGN" + r"\.md", "nrl-inter" + "faces", "registry " + "hosts"])
)
# The index has another project called as the module is. Paths such as ../nrl and files such as nrl/x.py are no names.
NAME = r"(?<![\w./~-])nr" + r"l(?![\w/-]|\.\w)"
OTHER_PROJECT = re.compile(
    "|".join(
        [
            NAME + r"\[\w",  # extras; subscripts have quotes or a name of the program's
            NAME + r"[\"'`]? *(?:[=~!<>]=|@ )",  # a requirement
            r"\binstall [\"'`]?" + NAME,
            r"\b(?:pip|uv) (?:pip )?(?:add|download|install|lock|remove|tree|uninstall)(?:[ =][\w-]+)*?[ =][\"'`]?"
            + NAME,
            r"--with[ =][\"'`]?" + NAME,
            r"\b(?:version|metadata|distribution|requires|files|from_name|discover)\((?:name=)?[\"']" + NAME,
        ]
    )
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


def hints_of_another_project(text: str) -> list[str]:
    """The lines that install, require or look up what the index calls as nrl's module is called."""
    return [line.strip() for line in text.splitlines() if OTHER_PROJECT.search(line)]


def texts() -> dict[str, str]:
    """The published texts by their path."""
    contents = {str(path.relative_to(ROOT)): path.read_bytes() for path in published()}
    return {name: content.decode() for name, content in contents.items() if b"\0" not in content[:8192]}


def test_the_distribution_has_one_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", DISTRIBUTION)  # as PEP 503 normalises it, so texts may be compared
    assert project["scripts"].keys() == {"nrl"}


def test_no_file_names_the_other_project_of_the_index() -> None:
    found = {name: lines for name, text in texts().items() if (lines := hints_of_another_project(text))}
    assert found == {}


def test_every_named_extra_is_there() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    hints = re.compile(rf"{DISTRIBUTION}\[([\w,-]+)\]")
    named = {
        (name, extra) for name, text in texts().items() for found in hints.findall(text) for extra in found.split(",")
    }
    assert {extra for _, extra in named} >= {"mcore", "tensorboard", "verifiers", "vllm"}
    assert [each for each in sorted(named) if each[1] not in extras] == []


@pytest.mark.parametrize(
    "line",
    [
        "pip install 'nr" + "l[tensorboard]'",
        "install nr" + "l[mcore], or take cluster=ray",
        'vllm = ["nr' + 'l[vllm]"]',
        "uv add --optional extra nr" + "l",
        "then `pip install -U nr" + "l`.",
        "uv add nr" + "l",
        'dependencies = ["nr' + 'l>=0.1"]',
        "nr" + "l @ git+https://git.example.org/nrl",
        'metadata.version("nr' + 'l")',
        "Distribution.discover(name='nr" + "l', path=[])",
        "uv lock --upgrade-package nr" + "l",
        "uv run --with=nr" + "l python",
    ],
)
def test_a_hint_of_the_other_project_is_seen(line: str) -> None:
    assert hints_of_another_project(f"fine\n{line}\n") == [line]


@pytest.mark.parametrize(
    "line",
    [
        "uv add --editable ../nrl",
        "uv pip install 'nrl-torch[tensorboard]'",
        "uv add ./nrl",
        "uv run nrl venvs build base",
        "install -d -o nrl -g nrl /src",
        "if nrl.adamw(lr=1) == nrl.adamw(lr=1):",
        "import nrl",
        "wheel.package == nrl.__name__",
        "install it, or let nrl build it",
        "nrl [mcore] is",
        'PACKAGES["nrl"]',
    ],
)
def test_what_is_no_hint_passes(line: str) -> None:
    assert hints_of_another_project(line) == []
