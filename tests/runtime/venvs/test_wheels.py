"""Wheels: built once, packed again, and the same for the same files."""

import sys
from contextlib import ExitStack
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from nrl.errors import ExecutableError
from nrl.runtime.venvs.installer import run_uv
from nrl.runtime.venvs.wheels import Wheel, build_wheel, content_digest, repack
from tests.runtime.venvs.recipe_parts import project_of, run, wheel_of


def test_a_wheel_for_one_platform_is_no_source() -> None:
    wheel = wheel_of("tiny")
    assert wheel.works_anywhere()
    assert not Wheel("tiny-1.0-cp312-cp312-linux_x86_64.whl", wheel.content).works_anywhere()


def test_a_path_of_the_lock_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(ExecutableError, match=f"recipe: the lock depends on {tmp_path}/gone, which is not there"):
        build_wheel(tmp_path / "gone", tmp_path)


def test_the_digest_of_a_wheel_is_of_what_it_installs() -> None:
    assert content_digest(wheel_of("a", source="x = 1")) == content_digest(wheel_of("a", source="x = 1"))
    assert content_digest(wheel_of("a", source="x = 1")) != content_digest(wheel_of("a", source="x = 2"))
    assert content_digest(wheel_of("a")) != content_digest(wheel_of("a", "1.1"))
    assert content_digest(wheel_of("a")) != content_digest(wheel_of("a", script=True))


def test_a_wheel_is_built_once(tmp_path: Path, index: ExitStack) -> None:
    root = project_of(tmp_path)
    first = build_wheel(root, tmp_path / "kept")
    (root / "backend.py").chmod(0o600)
    kept = next((tmp_path / "kept").glob("*/*.whl"))
    other = wheel_of("other").content
    kept.write_bytes(other)
    assert build_wheel(root, tmp_path / "kept") == Wheel(first.name, other)
    (root / "app" / "__init__.py").write_text("x = 2\n")
    assert build_wheel(root, tmp_path / "kept").content != other


def test_a_kept_wheel_that_is_not_whole_is_built_again(tmp_path: Path, index: ExitStack) -> None:
    root = project_of(tmp_path)
    first = build_wheel(root, tmp_path / "kept")
    kept = next((tmp_path / "kept").glob("*/*.whl"))
    kept.write_bytes(first.content[: len(first.content) // 2])
    again = build_wheel(root, tmp_path / "kept")
    assert content_digest(again) == content_digest(first)
    assert next((tmp_path / "kept").glob("*/*.whl")).read_bytes() == again.content


def test_files_that_git_ignores_build_no_wheel(tmp_path: Path, index: ExitStack) -> None:
    root = project_of(tmp_path)
    run("git", "-C", root, "init", "-q")
    (root / ".gitignore").write_text("ignored\n")
    run("git", "-C", root, "add", ".")
    first = build_wheel(root, tmp_path / "kept")
    (root / "ignored").write_text("1")
    kept = next((tmp_path / "kept").glob("*/*.whl"))
    other = wheel_of("other").content
    kept.write_bytes(other)
    assert build_wheel(root, tmp_path / "kept") == Wheel(first.name, other)
    (root / "new").write_text("1")  # not added yet, but a backend could take it
    assert build_wheel(root, tmp_path / "kept").content != other


def test_an_installed_package_is_packed_again(tmp_path: Path) -> None:
    wheel = repack(Distribution.from_name("filelock"))
    (tmp_path / wheel.name).write_bytes(wheel.content)
    run_uv(
        ["pip", "install", "--quiet", "--no-deps", f"--target={tmp_path / 'site'}", str(tmp_path / wheel.name)],
        cwd=tmp_path,
    )
    program = "import filelock; print(filelock.__file__)"
    assert run(sys.executable, "-c", program, PYTHONPATH=str(tmp_path / "site")).startswith(str(tmp_path / "site"))


def test_an_installed_package_whose_file_is_gone(tmp_path: Path) -> None:
    wheel = wheel_of("gone")
    (tmp_path / wheel.name).write_bytes(wheel.content)
    run_uv(
        ["pip", "install", "--quiet", "--no-deps", f"--target={tmp_path / 'site'}", str(tmp_path / wheel.name)],
        cwd=tmp_path,
    )
    (tmp_path / "site" / "gone" / "__init__.py").unlink()
    distribution = next(iter(Distribution.discover(name="gone", path=[str(tmp_path / "site")])))
    message = (
        r"package gone cannot be sent to other nodes, because its file gone/__init__.py is gone; install it again with "
        rf"`uv pip install --reinstall`, from {(tmp_path / wheel.name).as_uri()}$"
    )
    with pytest.raises(ExecutableError, match=message):  # an index may have something else of this name
        repack(distribution)
