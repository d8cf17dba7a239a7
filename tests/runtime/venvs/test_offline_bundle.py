"""A folder with all that executables need: wheels of the lock, and what builds the rest."""

import importlib.util
import io
import os
import sys
import tarfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from nrl.errors import ExecutableError
from nrl.runtime.venvs import offline_bundle
from nrl.runtime.venvs.installer import run_uv
from nrl.runtime.venvs.offline_bundle import collect
from nrl.runtime.venvs.registry import Executable
from tests.runtime.venvs.recipe_parts import index_of, run, wheel_of


def names(folder: Path) -> set[str]:
    return {file.name.partition("-")[0] for file in folder.iterdir()}


def test_the_packages_of_executables_and_their_lines(mine: Path, tmp_path: Path) -> None:
    folder, said = tmp_path / "wheels", list[str]()
    first, second = collect(["base", Executable("more", extras=["extra"])], folder, said.append)
    assert names(folder) == {"one", "two", "base.txt", "more.txt"}
    assert said == [f"base: 1 packages into {folder}", f"more: 2 packages into {folder}"]
    assert [line.split(" --hash=sha256:")[0] for line in second.read_text().splitlines()] == ["one==1.0", "two==1.0"]
    assert first.read_text() in second.read_text()


def test_a_file_with_another_hash_is_refused(mine: Path, tmp_path: Path) -> None:
    lock = (mine / "uv.lock").read_text()
    at = lock.index("sha256:", lock.index('name = "one"')) + len("sha256:")
    (mine / "uv.lock").write_text(lock[:at] + "0" * 64 + lock[at + 64 :])
    with pytest.raises(ExecutableError, match=r"(?s)^wheels: `pip download -r base.txt` fails; .*DO NOT MATCH"):
        collect(["base"], tmp_path / "wheels")
    assert names(tmp_path / "wheels") == {"base.txt"}


def test_what_builds_a_project_comes_along(mine: Path, tmp_path: Path) -> None:
    for file, old, new in (
        ("pyproject.toml", "requires = []", 'requires = ["two"]'),  # what its file says
        (
            "backend.py",
            "def build_editable",
            "def get_requires_for_build_editable():\n    return ['three']\ndef build_editable",
        ),
    ):  # what the backend says
        text = (mine / file).read_text()
        assert old in text
        (mine / file).write_text(text.replace(old, new))
    said = list[str]()
    collect(["base"], tmp_path / "wheels", said.append)
    assert names(tmp_path / "wheels") == {"one", "two", "three", "base.txt"}
    assert said[-1] == "what builds packages that are no wheels: three, two"


def source_of(folder: Path, name: str, build_system: str) -> bytes:
    """A source archive, with this text in its pyproject.toml."""
    buffer = io.BytesIO()
    files = {
        "pyproject.toml": build_system,
        "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        "backend.py": "def prepare_metadata_for_build_wheel(folder, settings=None):\n"
        f"    import pathlib; info = pathlib.Path(folder) / '{name}-1.0.dist-info'; info.mkdir()\n"
        f"    (info / 'METADATA').write_text('Metadata-Version: 2.1\\nName: {name}\\nVersion: 1.0\\n')\n"
        f"    return info.name\n",
    }
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for file, text in files.items():
            entry = tarfile.TarInfo(f"{name}-1.0/{file}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return buffer.getvalue()


def test_what_builds_a_source_archive_and_the_locks_uv(
    tmp_path: Path, index: ExitStack, mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = source_of(
        tmp_path,
        "four",
        '[build-system]\nrequires = ["uv"]\nbuild-backend = "backend"\nbackend-path = ["."]\n',
    )
    wheels = [
        wheel_of(*each) for each in (("one", "1.0"), ("two", "1.0"), ("three", "3.0"), ("uv", "1.0"), ("uv", "2.0"))
    ]
    _, variables = index.enter_context(index_of(tmp_path / "second", *wheels))
    (tmp_path / "second" / "four").mkdir()
    (tmp_path / "second" / "four" / "four-1.0.tar.gz").write_bytes(archive)
    (tmp_path / "second" / "four" / "index.html").write_text('<a href="four-1.0.tar.gz">four</a>')
    monkeypatch.setenv("UV_DEFAULT_INDEX", variables["UV_DEFAULT_INDEX"])
    text = (mine / "pyproject.toml").read_text()
    (mine / "pyproject.toml").write_text(text.replace('"one"]', '"one", "four", "uv==1.0"]'))
    run_uv(["lock", "--quiet", f"--python={sys.executable}"], cwd=mine)
    collect(["base"], tmp_path / "wheels")
    files = {file.name for file in (tmp_path / "wheels").iterdir()}
    assert "four-1.0.tar.gz" in files
    assert {file for file in files if file.startswith("uv-")} == {"uv-1.0-py3-none-any.whl"}  # and not the newest


def test_what_builds_a_package_that_does_not_say(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("")
    assert offline_bundle._build_requirements(tmp_path) == ["setuptools>=40.8.0", "wheel"]
    (tmp_path / "old-1.0.tar.gz").write_bytes(source_of(tmp_path, "old", ""))
    assert offline_bundle._build_requirements(tmp_path / "old-1.0.tar.gz") == ["setuptools>=40.8.0", "wheel"]


def test_a_package_that_no_index_has_is_refused(mine: Path, tmp_path: Path) -> None:
    git = tmp_path / "git"
    (git / "four").mkdir(parents=True)
    (git / "four" / "__init__.py").write_text("")
    (git / "pyproject.toml").write_text('[project]\nname = "four"\nversion = "1.0"\n')
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "one"]):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        assert os.spawnvp(os.P_WAIT, "git", ["git", "-C", str(git), *identity, *words]) == 0
    text = (mine / "pyproject.toml").read_text()
    (mine / "pyproject.toml").write_text(text.replace('"one"]', f'"one", "four @ git+{git.as_uri()}"]'))
    run_uv(["lock", "--quiet", f"--python={sys.executable}"], cwd=mine)
    with pytest.raises(ExecutableError, match=r"^wheels: executable 'base' has four from no index, .*take uv's cache"):
        collect(["base"], tmp_path / "wheels")


def test_a_python_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(*offline_bundle._find_pip(), "--version").startswith("pip ")
    bare = tmp_path / "bare"
    run_uv(["venv", "--quiet", "--no-project", f"--python={sys.executable}", str(bare)], cwd=tmp_path)
    monkeypatch.setattr(sys, "executable", str(bare / "bin" / "python"))
    monkeypatch.setattr(sys, "_base_executable", "/bin/false")
    python, pip = offline_bundle._find_pip()
    assert python == sys.executable
    assert Path(pip).parent.is_file()  # the wheel that Python brings
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ExecutableError, match="^wheels: .* has no pip, .*install it with `uv pip install pip`"):
        offline_bundle._find_pip()


def test_the_indexes_of_uv_are_those_of_pip() -> None:
    assert offline_bundle._index_options({}) == []
    assert offline_bundle._index_options(
        {
            "UV_DEFAULT_INDEX": "main=https://a.example/simple?key=1",
            "UV_INDEX": "near=https://b.example/simple https://c.example/simple",
            "UV_EXTRA_INDEX_URL": "https://d.example/simple",
            "UV_FIND_LINKS": "/wheels,/more",
        }
    ) == [
        "--index-url=https://a.example/simple?key=1",
        "--extra-index-url=https://b.example/simple",
        "--extra-index-url=https://c.example/simple",
        "--extra-index-url=https://d.example/simple",
        "--find-links=/wheels",
        "--find-links=/more",
    ]
