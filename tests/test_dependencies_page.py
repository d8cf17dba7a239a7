"""docs/dependencies.md: its commands run, in order, and it explains every message of the rooms that it is about."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from uv import find_uv_bin

from tests.runtime.venvs.recipe_parts import index_of, project_of, wheel_of
from tests.test_docs import FENCE, ROOT

PAGE = ROOT / "docs" / "dependencies.md"
BASE = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
PACKAGES = (
    ("one", "two", "three"),
    (("cowsay", "5.0"), ("cowsay", "6.1"), ("tabulate", "0.8.10"), ("tabulate", "0.9.0")),
)
# As the command of a project's environment, which would be the project's
COMMAND = """#!{python}
import sys
sys.prefix = {prefix!r}
from nrl.cli.cli import main
sys.exit(main())
"""


def commands(kind: str) -> list[str]:
    """The blocks of commands with this word behind `sh`."""
    return [found[3] for found in FENCE.finditer(PAGE.read_text()) if found[1] == "sh" and found[2].strip() == kind]


# --- commands


@pytest.fixture
def project(tmp_path: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """A small project with its index, and the variables of a shell in it."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "uv").symlink_to(find_uv_bin())
    (bin_ / "python3.12").symlink_to(BASE)
    names, versions = PACKAGES
    with index_of(tmp_path / "simple", *map(wheel_of, names), *(wheel_of(*each) for each in versions)) as (_, settings):
        variables = {"PATH": f"{bin_}:{os.environ['PATH']}", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT), **settings}
        variables |= {"UV_PYTHON_DOWNLOADS": "never", "NRL_VENV_DIR": str(tmp_path / "venvs"), "NO_COLOR": "1"}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in settings.items():
                patch.setenv(name, value)
            root = project_of(tmp_path)
        for backend in (root / "backend.py", root / "libs" / "nrl" / "backend.py"):
            text = backend.read_text()
            assert '    raise RuntimeError("never needed")' in text
            backend.write_text(
                text.replace('    raise RuntimeError("never needed")', "    return build_wheel(*arguments)")
            )
        command = bin_ / "nrl"
        command.write_text(COMMAND.format(python=sys.executable, prefix=str(root / ".venv")))
        command.chmod(0o755)
        yield root, variables


def shell(script: str, folder: Path, variables: dict[str, str], *enter: str) -> str:
    """What commands print, the last of which ends well, as all before it do."""
    done = subprocess.run(
        [*enter, "bash", "-exc", script],
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
def test_the_commands_of_the_page_run(project: tuple[Path, dict[str, str]]) -> None:
    root, variables = project
    said = [shell(block, root, variables) for block in commands("")]
    production, development, adding, contradiction, again, collecting = said
    assert "is complete, and is what the lock and the source say" in production
    assert re.search(r"is not in \S+, which has base-\w+, built \S+ What that one has -> ", development), development
    assert "have: cowsay 5.0 -> 6.1. Build what is missing with `nrl venvs build base`" in development
    assert development.count(": built in ") == 2
    assert "0 would be removed" in development
    assert "cowsay" in adding
    assert "your project's requirements are unsatisfiable" in contradiction
    assert ": built in " in again
    assert "packages into wheels" in collecting
    assert sorted(each.name for each in (root / "wheels").iterdir()) == [
        "base.txt",
        "cowsay-6.1-py3-none-any.whl",
        "one-1.0-py3-none-any.whl",
    ]


def without_network() -> tuple[str, ...]:
    """The words before a command that has no network."""
    words = ("unshare", "--net")
    if shutil.which("unshare") is None or subprocess.run([*words, "true"], capture_output=True).returncode:
        pytest.skip("a host without a network needs a network namespace: util-linux, and root")
    return words


@pytest.mark.slow
def test_without_a_network_a_folder_is_enough(project: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    root, variables = project
    shell(commands("")[-1], root, variables)
    (offline,) = commands("offline")
    there = {key: each for key, each in variables.items() if not key.startswith("UV_")}
    there |= {"UV_CACHE_DIR": str(tmp_path / "their cache"), "NRL_VENV_DIR": str(tmp_path / "theirs")}
    said = shell(offline, root, there, *without_network())
    assert "is complete, and is what the lock and the source say" in said
    (wheel,) = (root / "wheels").glob("one-*")
    wheel.unlink()  # what is not collected is missed, and told
    with pytest.raises(AssertionError, match="one was not found in the cache"):
        shell(
            offline.partition("uv pip install --no-deps --editable")[0],
            root,
            there | {"UV_CACHE_DIR": str(tmp_path / "other")},
            *without_network(),
        )


@pytest.mark.slow
def test_a_project_of_ones_own_beside_a_clone(tmp_path: Path) -> None:
    (tmp_path / "nrl").symlink_to(ROOT)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "uv").symlink_to(find_uv_bin())
    (tmp_path / "bin" / "python3.12").symlink_to(BASE)
    variables = {key: each for key, each in os.environ.items() if key not in ("VIRTUAL_ENV", "UV_PYTHON")}
    variables |= {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "NRL_VENV_DIR": str(tmp_path / "venvs")}
    (block,) = commands("slow")
    said = shell(block, tmp_path, variables)
    assert "is complete, and is what the lock and the source say" in said


# --- messages


def text_of(node: ast.expr) -> str:
    """The text of a message, with a zero for what is put in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    if isinstance(node, ast.IfExp):
        return f"{text_of(node.body)}\0{text_of(node.orelse)}"
    return "\0"


def messages() -> set[str]:
    """What errors of the two rooms say, and what uv is called for."""
    found = set[str]()
    rooms = [ROOT / "nrl" / "runtime" / room for room in ("venvs", "node")]
    for path in [path for room in rooms for path in room.glob("*.py") if path.name != "reaper.py"]:  # of servers
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                found.add(text_of(node.exc.args[0]))
            elif isinstance(node, ast.keyword) and node.arg == "purpose":
                found.add(text_of(node.value))
            elif (
                path.name == "interpreters.py" and isinstance(node, ast.Return | ast.Assign) and node.value is not None
            ):
                found.add(text_of(node.value))  # why an interpreter cannot be used
    return {each for each in found if len(each.strip("\0")) > 8}


def cells() -> list[list[str]]:
    """The first column of the tables of messages: of each cell the pieces between what varies."""
    text = PAGE.read_text().partition("## Messages")[2]
    rows = re.findall(r"^\| (.+?) \| .+ \|$", text, re.MULTILINE)
    return [
        [piece.strip(" ,;:") for part in row.split("; ") for piece in re.split(r"\*[^*]+\*", part) if piece.strip()]
        for row in rows
        if row not in ("message", "---")
    ]


def is_in(piece: str, message: str) -> bool:
    return len(piece) >= 10 and piece in message


def test_every_message_is_explained() -> None:
    unexplained = [each for each in messages() if not any(is_in(piece, each) for cell in cells() for piece in cell)]
    assert unexplained == []


def test_every_explained_message_exists() -> None:
    said = messages()
    assert len(cells()) > 30
    gone = [cell for cell in cells() if not any(is_in(piece, each) for piece in cell for each in said)]
    assert gone == []
