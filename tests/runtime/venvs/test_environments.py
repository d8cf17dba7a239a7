"""An environment is what its recipe says, and source lies beside it."""

import json
import os
import shutil
import sys
import time
import zipfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from nrl.errors import ExecutableError
from nrl.runtime.venvs.building import ensure_env
from nrl.runtime.venvs.environments import (
    INVENTORY,
    Recipe,
    default_folder,
    describe_difference,
    list_inventories,
    list_sources,
)
from nrl.runtime.venvs.installer import run_uv
from tests.runtime.venvs.recipe_parts import (
    changed,
    held,
    hidden,
    index_of,
    recipe_of,
    run,
    wheel_of,
)

TINY = wheel_of("tiny", source="x = 1", script=True)
OTHER = wheel_of("other")


def test_an_environment_has_what_its_recipe_says(tmp_path: Path) -> None:
    recipe = recipe_of(TINY, OTHER)
    said: list[str] = []
    python = ensure_env(recipe, folder=tmp_path, say=said.append)
    assert python == tmp_path / recipe.name / "bin" / "python"
    assert run(python, "-c", "import tiny, other; print(tiny.x, tiny.__file__)") == (
        f"1 {tmp_path}/{recipe.name}/lib/python3.12/site-packages/tiny/__init__.py"
    )
    assert run(python, "-c", "import sys; print(sys.version.split()[0])") == recipe.python
    assert said[0] == f"{recipe.name}: building it in {tmp_path}, 2 packages"
    assert said[1].startswith(f"{recipe.name}: built in ")
    assert hidden(tmp_path) == []
    ((env, found),) = list_inventories(tmp_path).items()
    assert env == python.parents[1]
    assert found["packages"] == recipe.inventory["packages"]
    assert (found["name"], found["executable"], found["python"]) == (recipe.name, "tiny", recipe.python)


def test_scripts_and_pyvenv_cfg_are_right_after_the_renaming(tmp_path: Path) -> None:
    recipe = recipe_of(TINY)
    env = ensure_env(recipe, folder=tmp_path).parents[1]
    assert run(env / "bin" / "tiny").startswith(str(env))
    building = [
        path
        for path in env.rglob("*")
        if path.is_file() and not path.is_symlink() and b".building/venv" in path.read_bytes()
    ]
    assert building == []
    home = next(line.split(" = ")[1] for line in (env / "pyvenv.cfg").read_text().splitlines() if "home" in line)
    assert Path(home).is_dir()


def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "a $(venv); 'of' \"mine\" & * % #"
    python = ensure_env(recipe_of(TINY), folder=folder)
    assert run(python, "-c", "import tiny; print(tiny.x)") == "1"
    assert run(python.parent / "tiny").startswith(str(folder))
    assert ensure_env(recipe_of(TINY, OTHER), folder=folder).exists()  # which is made of the first


def test_one_that_is_there_is_used_as_it_is(tmp_path: Path) -> None:
    recipe = recipe_of(TINY)
    env = ensure_env(recipe, folder=tmp_path).parents[1]
    (env / "mine").touch()
    os.utime(env / INVENTORY, (0, 0))
    said: list[str] = []
    ensure_env(changed(recipe, wheels={}), folder=tmp_path, say=said.append)  # it could not be built from this
    assert said == []
    assert (env / "mine").exists()
    assert (env / INVENTORY).stat().st_mtime > time.time() - 60  # the time of its last use


def test_the_folder_is_nrl_venv_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NRL_VENV_DIR", str(tmp_path / "deep" / "venvs"))
    assert ensure_env(recipe_of(TINY)).is_relative_to(tmp_path / "deep" / "venvs")
    monkeypatch.delenv("NRL_VENV_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "nrl" / "venvs"


def test_an_environment_variable_of_another_environment_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VIRTUAL_ENV", "PYTHONHOME", "PYTHONPATH", "UV_PROJECT_ENVIRONMENT", "UV_PYTHON", "UV_LOCKED"):
        monkeypatch.setenv(name, str(tmp_path / "nowhere"))
    assert ensure_env(recipe_of(TINY), folder=tmp_path).exists()


def test_packages_come_from_the_index_of_this_process_with_the_hashes_of_the_lock(tmp_path: Path) -> None:
    wrong = f"tiny==1.0 --hash=sha256:{'0' * 64}"
    with index_of(tmp_path / "simple", TINY) as (lines, settings):
        python = ensure_env(recipe_of(requirements=lines, settings=settings), folder=tmp_path / "venvs")
        with pytest.raises(ExecutableError, match="(?s)tiny-.*`uv pip install` fails; its last lines:.*[Hh]ash"):
            ensure_env(recipe_of(requirements=[wrong], settings=settings), folder=tmp_path / "venvs", say=print)
    assert run(python, "-c", "import tiny; print(tiny.x)") == "1"


def test_the_nodes_own_settings_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "of the node"))
    said = run_uv(["cache", "dir"], cwd=tmp_path, settings={"UV_CACHE_DIR": str(tmp_path / "of the driver")})
    assert said.strip() == str(tmp_path / "of the node")


# --- what differs


def test_only_what_differs_is_built_and_that_is_said_in_one_paragraph(tmp_path: Path) -> None:
    with index_of(tmp_path / "simple", OTHER) as (lines, settings):
        ensure_env(recipe_of(TINY, requirements=lines, settings=settings), folder=tmp_path)
    old = next(iter(list_inventories(tmp_path)))
    shutil.rmtree(tmp_path / "cache")  # and the index cannot be reached any more
    new = recipe_of(wheel_of("tiny", source="x = 2", script=True), requirements=lines, settings=settings)
    said: list[str] = []
    python = ensure_env(new, folder=tmp_path, say=said.append)
    built = json.loads((old / INVENTORY).read_text())["built"]
    assert said[0] == (
        f"{new.name} is not in {tmp_path}. The nearest there is {old.name}, built {built}. What that one "
        "has -> what the program's lock and source have: the source of tiny 1.0. Only that is built now. To find it "
        "ready, run `nrl venvs build tiny` where "
        "that folder or image is made; to use what is there, go back to the lock and the source that it was made from."
    )
    assert run(python, "-c", "import tiny, other; print(tiny.x)") == "2"
    assert run(old / "bin" / "python", "-c", "import tiny, other; print(tiny.x)") == "1"  # as it was
    site = "lib/python3.12/site-packages/other/__init__.py"
    assert (python.parents[1] / site).stat().st_ino == (old / site).stat().st_ino  # not installed again
    assert run(python.parent / "tiny").startswith(str(python.parents[1]))


def test_what_left_the_recipe_leaves_the_environment(tmp_path: Path) -> None:
    ensure_env(recipe_of(TINY, OTHER), folder=tmp_path)
    python = ensure_env(recipe_of(TINY), folder=tmp_path)
    assert run(python, "-c", "from importlib.util import find_spec; print(find_spec('other'))") == "None"


def test_an_environment_that_shares_little_is_no_beginning(tmp_path: Path) -> None:
    wheels = [wheel_of(f"p{i}") for i in range(3)]
    ensure_env(recipe_of(TINY, *wheels), folder=tmp_path)
    said: list[str] = []
    python = ensure_env(recipe_of(TINY, OTHER, executable="mine"), folder=tmp_path, say=said.append)
    assert said[0].endswith("2 packages")  # nothing is said of other executables
    assert run(python, "-c", "from importlib.util import find_spec; print(find_spec('p0'))") == "None"


A = {"version": "1.0", "source": "index", "digest": "a"}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ({}, {}, ""),
        ({"python": "3.12.1"}, {"python": "3.12.2"}, "python 3.12.1 -> 3.12.2"),
        ({"platform": "linux-x86_64"}, {"platform": "darwin-arm64"}, "platform linux-x86_64 -> darwin-arm64"),
        ({"packages": {"p": A}}, {"packages": {"p": A}}, ""),
        ({"packages": {}}, {"packages": {"p": A}}, "p 1.0 is added"),
        ({"packages": {"p": A}}, {"packages": {}}, "p 1.0 is gone"),
        ({"packages": {"p": A}}, {"packages": {"p": {**A, "digest": "b"}}}, "the files of p"),
        ({"packages": {"p": A}}, {"packages": {"p": {**A, "source": "local"}}}, "the source of p 1.0"),
        (
            {"packages": {f"p{i}": A for i in range(9)}},
            {"packages": {f"p{i}": {**A, "version": "2"} for i in range(9)}},
            "p0 1.0 -> 2, p1 1.0 -> 2, p2 1.0 -> 2, p3 1.0 -> 2, p4 1.0 -> 2, p5 1.0 -> 2, and 3 more",
        ),
    ],
)
def test_differences_in_words(old: dict[str, Any], new: dict[str, Any], words: str) -> None:
    assert describe_difference(old, new) == words


def test_what_is_forced_is_built_anew_once(tmp_path: Path) -> None:
    env = ensure_env(recipe_of(TINY), folder=tmp_path).parents[1]
    (env / "lib/python3.12/site-packages/tiny/extra.py").touch()
    forced = recipe_of(TINY, force="this driver")
    assert ensure_env(forced, folder=tmp_path).parents[1] == env
    assert not (env / "lib/python3.12/site-packages/tiny/extra.py").exists()
    (env / "mine").touch()
    ensure_env(forced, folder=tmp_path)
    ensure_env(recipe_of(TINY), folder=tmp_path)
    assert (env / "mine").exists()
    ensure_env(recipe_of(TINY, force="another driver"), folder=tmp_path)
    assert not (env / "mine").exists()


def test_one_that_processes_run_in_is_not_replaced(tmp_path: Path) -> None:
    python = ensure_env(recipe_of(TINY), folder=tmp_path)
    env, forced = python.parents[1], recipe_of(TINY, force="another driver")
    (env / "mine").touch()
    text = (
        f"provide: {env} is to be built again, and processes run in it, whose files would change under them; end them"
    )
    with held(env):
        assert ensure_env(recipe_of(TINY), folder=tmp_path) == python
        with pytest.raises(ExecutableError) as caught:
            ensure_env(forced, folder=tmp_path)
    assert str(caught.value) == f"{text} first, or unset NRL_FORCE_REBUILD_VENVS"
    assert (env / "mine").exists()
    assert hidden(tmp_path) == []
    ensure_env(forced, folder=tmp_path)
    assert not (env / "mine").exists()


def test_one_that_a_process_enters_while_it_is_built_anew_is_not_replaced(tmp_path: Path) -> None:
    env = ensure_env(recipe_of(TINY), folder=tmp_path).parents[1]
    (env / "mine").touch()
    with ExitStack() as stack:

        def say(line: str) -> None:
            if "building it in" in line:
                stack.enter_context(held(env))

        with pytest.raises(ExecutableError, match="processes run in it"):
            ensure_env(recipe_of(TINY, force="another driver"), folder=tmp_path, say=say)
    assert (env / "mine").exists()
    assert hidden(tmp_path) == []


# --- sources


def sourced(**sources: str) -> Recipe:
    return changed(
        recipe_of(TINY), sources={name: wheel_of(name, source=text).content for name, text in sources.items()}
    )


def test_sources_lie_beside_and_one_environment_serves_them_all(tmp_path: Path) -> None:
    made, after = sourced(ours="x = 1", yours="x = 2"), sourced(theirs="x = 3")
    python = ensure_env(made, folder=tmp_path)
    assert list_sources(made, python) == [str(tmp_path / ".sources" / name) for name in ("ours", "yours")]
    path = os.pathsep.join(list_sources(made, python))
    program = f"import sys; sys.path += {path!r}.split(':'); import ours, tiny, yours; print(ours.x, tiny.x, yours.x)"
    assert run(python, "-c", program) == "1 1 2"
    assert ensure_env(after, folder=tmp_path, say=pytest.fail) == python
    assert sorted(each.name for each in (tmp_path / ".sources").iterdir()) == ["ours", "theirs", "yours"]


def test_a_source_that_is_there_and_whole_is_used_as_it_is(tmp_path: Path) -> None:
    made = sourced(ours="x = 1")
    (source,) = map(Path, list_sources(made, ensure_env(made, folder=tmp_path)))
    (source / "mine").touch()
    os.utime(source / INVENTORY, (0, 0))
    ensure_env(changed(made, sources={"ours": b"no zip file"}), folder=tmp_path)
    assert (source / "mine").exists()
    assert (source / INVENTORY).stat().st_mtime > time.time() - 60  # the time of its last use
    (source / INVENTORY).unlink()  # as of one that is half removed
    ensure_env(made, folder=tmp_path)
    assert sorted(each.name for each in source.iterdir()) == [INVENTORY, "ours", "ours-1.0.dist-info"]
    assert [each.name for each in source.parent.iterdir()] == ["ours"]


def test_two_that_unpack_a_source_at_once_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = sourced(ours="x = 1")
    ensure_env(recipe_of(TINY), folder=tmp_path)
    found = zipfile.ZipFile.extractall

    def late(self: zipfile.ZipFile, to: Path) -> None:
        monkeypatch.setattr(zipfile.ZipFile, "extractall", found)
        ensure_env(made, folder=tmp_path)  # another one, which is faster
        (tmp_path / ".sources" / "ours" / "first").touch()
        found(self, to)

    monkeypatch.setattr(zipfile.ZipFile, "extractall", late)
    ensure_env(made, folder=tmp_path)
    assert (tmp_path / ".sources" / "ours" / "first").exists()
    assert [each.name for each in (tmp_path / ".sources").iterdir()] == ["ours"]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_source_that_cannot_be_written(tmp_path: Path) -> None:
    made = sourced(ours="x = 1")
    ensure_env(recipe_of(TINY), folder=tmp_path)
    (tmp_path / ".sources").symlink_to("/proc/nowhere")
    message = f"provide: ours is not in {tmp_path}, and cannot be built there .*; set NRL_VENV_DIR to a folder"
    with pytest.raises(ExecutableError, match=message):
        ensure_env(made, folder=tmp_path)
