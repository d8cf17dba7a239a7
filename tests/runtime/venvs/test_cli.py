"""`nrl venvs`: environments are built, listed, checked, found and removed."""

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from filelock import FileLock

from nrl.cli.cli import main
from nrl.runtime.venvs import cli
from nrl.runtime.venvs.environments import DISTRIBUTION, INVENTORY, list_inventories
from nrl.runtime.venvs.installer import run_uv
from nrl.runtime.venvs.registry import EXECUTABLES
from tests.runtime.venvs.recipe_parts import held, index_of, project_of, to_install, wheel_of

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's project with the executable `mine`, which is small."""
    before = dict(EXECUTABLES)
    with ExitStack() as stack:
        _, variables = stack.enter_context(index_of(tmp_path / "simple", *map(wheel_of, ("one", "two", "three"))))
        for name, value in {**variables, "NRL_VENV_DIR": str(tmp_path / "venvs")}.items():
            monkeypatch.setenv(name, value)
        root = project_of(tmp_path)
        monkeypatch.setattr("sys.prefix", str(root / ".venv"))
        monkeypatch.chdir(root)
        (root / "mine.py").write_text(
            "from nrl import Executable, register\nregister(Executable('mine', extras=['extra']))\n"
        )
        yield root
    EXECUTABLES.clear()
    EXECUTABLES.update(before)


@pytest.fixture
def nrl(root: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(["venvs", *arguments])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def test_from_nothing_to_a_built_environment_that_is_current(nrl: Run, root: Path, tmp_path: Path) -> None:
    venvs = tmp_path / "venvs"
    build = "build one with `nrl venvs build base`, or name another folder, NRL_VENV_DIR"
    nothing = f"{venvs} has no environments; {build}\n"
    assert (nrl("list"), nrl("check")) == ((0, nothing, ""), (1, nothing, ""))
    status, out, err = nrl("path", "base")
    assert (status, out) == (2, "")
    assert err.startswith(f"nrl: path: {venvs} has no base-")
    assert err.endswith("; build it with `nrl venvs build base`\n")
    status, out, _ = nrl("check", "base")
    assert status == 1
    assert out.endswith(f"is not in {venvs}. Build it with `nrl venvs build base`\n")

    status, out, _ = nrl("build", "base")
    (env,) = list_inventories(venvs)
    assert status == 0
    assert out.splitlines()[0] == f"{env.name}: building it in {venvs}, 1 packages"
    assert nrl("path", "base") == (0, f"{env}/bin/python\n", "")
    assert nrl("check") == (0, f"{env.name}: is complete, and is what the lock and the source say\n", "")
    _, out, _ = nrl("list")
    header, row = out.splitlines()[1:]
    assert header.split() == ["name", "size", "its", "own", "built", "last", "used"]
    assert row.split()[0] == env.name
    assert row.endswith("just now  just now   current")
    _, out, _ = nrl("list", "base")
    assert out.splitlines()[1:] == ["  one 1.0"]
    _, out, _ = nrl("path", "--imports", "base")
    folders = [Path(folder) for folder in out.rstrip().split(os.pathsep)]
    assert [(folder.parent, folder.name.rsplit("-", 2)[0]) for folder in folders] == [
        (venvs / ".sources", "app"),
        (venvs / ".sources", DISTRIBUTION),
    ]
    assert (folders[0] / "app" / "__init__.py").is_file()


def test_the_drivers_own_interpreter_needs_no_environment(nrl: Run) -> None:
    assert nrl("build", "system")[0] == 0
    assert nrl("check", "system") == (0, f"system: is {sys.executable}, and needs no environment\n", "")
    assert nrl("path", "system") == (0, f"{sys.executable}\n", "")
    assert nrl("path", "--imports", "system") == (0, "\n", "")


def test_a_checkout_that_went_on(nrl: Run, root: Path, tmp_path: Path) -> None:
    to_install(root)
    nrl("build", "base")
    (old,) = list_inventories(tmp_path / "venvs")
    (root / "app" / "__init__.py").write_text("x = 2\n")
    status, out, _ = nrl("check")
    assert status == 1
    built = list_inventories(tmp_path / "venvs")[old]["built"]
    there = f"is not in {tmp_path / 'venvs'}, which has {old.name}, built {built}"
    assert f": {there}. What that one has -> what the lock and the source of {root} have: the source of app 1.0." in out
    assert "Build what is missing with `nrl venvs build base`, or go back to the lock and the source that the" in out
    assert nrl("list")[1].endswith("differs: the source of app 1.0\n")
    _, out, _ = nrl("build", "base")
    assert (
        "What that one has -> what the program's lock and source have: the source of app 1.0. Only that is built" in out
    )
    assert nrl("check")[0] == 0


def test_a_lock_that_went_on_is_told_from_the_image_to_the_checkout(nrl: Run, root: Path, tmp_path: Path) -> None:
    venvs = tmp_path / "venvs"
    for extra in (
        "",
        "two",
    ):  # an image has two environments of one executable: which one is near is not a matter of age
        edit_dependencies(root, "one", extra)
        assert nrl("build", "base")[0] == 0
    image = list_inventories(venvs)
    (near,) = [env for env, found in image.items() if "two" in found["packages"]]
    for env in image.keys() - {near}:
        os.utime(env / INVENTORY, (time.time() + 60, time.time() + 60))
    edit_dependencies(root, "one", "two", "three")  # the mounted checkout
    status, out, _ = nrl("check", "base")
    assert status == 1
    assert f"which has {near.name}, built {image[near]['built']}. What that one has -> what the lock" in out
    assert f"the source of {root} have: three 1.0 is added. Build what is missing with `nrl venvs build base`" in out
    edit_dependencies(root, "one", "two")  # as it says: back to what is there
    assert nrl("check", "base") == (0, f"{near.name}: is complete, and is what the lock and the source say\n", "")


def edit_dependencies(root: Path, *names: str) -> None:
    text = (root / "pyproject.toml").read_text()
    needed = ", ".join(f'"{name}"' for name in (DISTRIBUTION, *names) if name)
    (root / "pyproject.toml").write_text(re.sub(r"(?m)^dependencies = .*$", f"dependencies = [{needed}]", text))
    run_uv(["lock", "--quiet", f"--python={sys.executable}"], cwd=root)


def test_a_source_that_differs_from_the_images(
    nrl: Run, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venvs = tmp_path / "venvs"
    nrl("build", "base")
    (env,) = list_inventories(venvs)
    (image,) = venvs.glob(".sources/app-*")
    (root / "app" / "__init__.py").write_text("x = 2\n")
    status, out, _ = nrl("check", "base")
    assert status == 0  # nothing is built
    said = re.fullmatch(rf"{env.name}: is complete, and is what the lock says; the source of (.*) is (.*)\n", out)
    assert said
    assert said[1] == str(root)
    assert re.fullmatch(
        rf"app-1\.0-\w{{16}}, and not {image.name}: a program that starts puts it there, and builds nothing", said[2]
    )
    for at in (1, 2):  # older ones are only counted
        older = venvs / ".sources" / f"app-0.{at}-{'0' * 16}"
        shutil.copytree(image, older)
        (older / INVENTORY).write_text((older / INVENTORY).read_text().replace(image.name, older.name))
        os.utime(older, (at, at))
    assert f", and not {image.name} nor one of 2 others: a program" in nrl("check", "base")[1]
    monkeypatch.setattr(cli, "_is_read_only", lambda folder: True)  # a mount, which root cannot write either
    status, out, _ = nrl("check", "base")
    assert status == 1
    assert f": {venvs} cannot be written, so a program that starts will fail: set NRL_VENV_DIR to a copy" in out
    monkeypatch.undo()


def test_executables_of_a_users_own(nrl: Run, root: Path) -> None:
    assert nrl("build", "mine")[0] == 2
    assert nrl("build", "--import", "mine.py", "mine")[0] == 0
    EXECUTABLES.pop("mine")
    assert nrl("list")[1].endswith("of an executable that is not registered here\n")
    status, out, _ = nrl("path", "--import", "mine", "mine")
    assert status == 0
    assert "/mine-" in out
    assert nrl("list")[1].endswith("current\n")


def test_a_file_is_imported_with_what_lies_beside_it(nrl: Run, root: Path) -> None:
    (root / "jobs").mkdir()
    (root / "jobs/mine_beside.py").write_text("EXTRAS = ['extra']\n")
    (root / "jobs/job.py").write_text(
        "from mine_beside import EXTRAS\nfrom nrl import Executable, register\n"
        "register(Executable('mine', extras=EXTRAS))\n"
    )
    before = list(sys.path)
    assert nrl("build", "--import", "jobs/job.py", "mine")[0] == 0
    assert sys.path == before


def test_an_environment_that_somebody_changed(nrl: Run, root: Path, tmp_path: Path) -> None:
    nrl("build", "--import", "mine.py", "mine")
    (env,) = list_inventories(tmp_path / "venvs")
    site = env / "lib/python3.12/site-packages"
    one = site / "one-1.0.dist-info"
    for name, version in (("three", "1.0"), ("one", "1.1")):
        other = site / f"{name}-{version}.dist-info"
        shutil.copytree(one, other)
        (other / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (other / "RECORD").write_text((one / "RECORD").read_text().replace(one.name, other.name))
    shutil.rmtree(one)
    shutil.rmtree(site / "two-1.0.dist-info")
    again = "build it again with NRL_FORCE_REBUILD_VENVS=1 or remove it"
    assert nrl("check") == (
        1,
        f"{env.name}: two is missing, three does not belong there, one is 1.1 instead of 1.0; {again}\n",
        "",
    )


def test_what_is_current_or_lately_used_or_being_built_is_not_removed(nrl: Run, root: Path, tmp_path: Path) -> None:
    to_install(root)
    venvs = tmp_path / "venvs"
    nrl("build", "base")
    (old,) = list_inventories(venvs)
    (root / "app" / "__init__.py").write_text("x = 2\n")
    nrl("build", "base")
    (current,) = set(list_inventories(venvs)) - {old}
    assert nrl("prune") == (0, "0 are removed\n", "")
    for env in (old, current):
        long_ago = time.time() - 31 * 86400
        os.utime(env / INVENTORY, (long_ago, long_ago))
    (venvs / f".{current.name}.x.building").mkdir()
    assert nrl("prune", "--dry-run")[1] == (
        f"{old.name}: would be removed\n.{current.name}.x.building: would be removed\n2 would be removed\n"
    )
    with FileLock(venvs / f".{old.name}.lock"):
        _, out, _ = nrl("prune")
    assert out.startswith(f"{old.name}: is kept, because it is being built\n")
    assert nrl("prune") == (0, f"{old.name}: is removed\n1 are removed\n", "")
    assert set(list_inventories(venvs)) == {current}
    assert nrl("prune", "--days", "0")[1] == f"{current.name}: is removed\n1 are removed\n"
    assert list_inventories(venvs) == {}
    assert not any(path.name.endswith(".building") for path in venvs.iterdir())
    assert list((venvs / ".wheels").iterdir()) == []


def old(path: Path) -> None:
    long_ago = time.time() - 31 * 86400
    os.utime(path, (long_ago, long_ago))


def test_an_environment_that_processes_run_in_is_not_removed(nrl: Run, root: Path, tmp_path: Path) -> None:
    nrl("build", "base")
    (env,) = list_inventories(tmp_path / "venvs")
    with held(env):
        assert nrl("prune", "--days", "0")[1] == f"{env.name}: is kept, because processes run in it\n0 are removed\n"
    assert list_inventories(tmp_path / "venvs").keys() == {env}
    assert nrl("prune", "--days", "0")[1] == f"{env.name}: is removed\n1 are removed\n"


def test_what_recipes_are_made_with_is_kept_while_they_are(nrl: Run, root: Path, tmp_path: Path) -> None:
    (root / "mine.py").write_text(
        "from nrl.runtime.venvs.registry import Executable, register\n"
        "register(Executable('more', requirements=['three']))\n"
    )
    assert nrl("build", "--import", "mine.py", "more")[0] == 0
    venvs = tmp_path / "venvs"
    sources = list(venvs.glob(".sources/*"))
    kept = [*venvs.glob(".wheels/*"), *venvs.glob(".resolved/*"), *(source / INVENTORY for source in sources)]
    assert len(kept) == 5  # the wheels of the project and of nrl, a resolution, and the sources from these wheels
    for path in kept:
        old(path)
    assert nrl("path", "more")[0] == 0  # which makes the recipe, of what is there
    assert nrl("prune")[0] == 0
    assert all(path.exists() for path in kept)
    EXECUTABLES.pop("more")  # or its recipe would be made to find out what is current
    for path in kept:
        old(path)
    with held(sources[0]):
        assert nrl("prune")[0] == 0
    assert [path.parent for path in kept if path.exists()] == sources[:1]
    assert list(venvs.glob(".sources/*")) == sources[:1]
    assert nrl("prune")[0] == 0
    assert list(venvs.glob(".sources/*")) == []


def test_where_somebody_builds_is_not_removed(nrl: Run, root: Path, tmp_path: Path) -> None:
    nrl("build", "base")
    scratch = [
        tmp_path / "venvs" / name for name in (".wheels/.building.abc", ".resolved/tmpabc", ".sources/.a.building")
    ]
    for folder in scratch:
        folder.mkdir(parents=True, exist_ok=True)
    nrl("prune", "--days", "0")
    assert all(folder.exists() for folder in scratch)
    for folder in scratch:
        old(folder)
    nrl("prune")
    assert not any(folder.exists() for folder in scratch)


def test_what_a_killed_builder_left_is_listed(nrl: Run, root: Path, tmp_path: Path) -> None:
    (tmp_path / "venvs" / ".base-0123.x.building").mkdir(parents=True)
    assert nrl("list")[1].endswith("incomplete: a builder is at work, or was killed\n")
