"""From an executable to a recipe, and to what a process of its environment imports."""

import os
import pickle
import re
import runpy
import shutil
import sys
import tomllib
from contextlib import ExitStack
from pathlib import Path

import pytest

from nrl.errors import ExecutableError
from nrl.runtime.venvs import locks
from nrl.runtime.venvs.building import ensure_env
from nrl.runtime.venvs.environments import DISTRIBUTION, Recipe, list_sources
from nrl.runtime.venvs.locks import Project, find_project
from nrl.runtime.venvs.recipes import make_recipe
from nrl.runtime.venvs.registry import Executable
from tests.runtime.venvs.recipe_parts import BACKEND, run, to_install

NAME = re.compile(r"base-[0-9a-f]{12}")


def run_in(made: Recipe, program: str) -> str:
    """Run a program as a process of the recipe's environment does: with its sources on the path."""
    python = ensure_env(made)
    return run(python, "-c", program, PYTHONPATH=os.pathsep.join(list_sources(made, python)))


def source_of(made: Recipe, package: str) -> str:
    """The name of the folder that has a package's source."""
    return next(name for name in made.sources if name.startswith(f"{package}-"))


def test_a_users_project_with_its_own_code(mine: Path) -> None:
    assert find_project() == Project("project", mine)
    made = make_recipe("base")
    assert run_in(made, "import app, nrl, one; print(app.x, nrl.x)") == "1 1"
    assert run_in(made, "from importlib.util import find_spec as f; print(f('two'), f('three'))") == "None None"
    assert (
        run_in(made, f"from importlib.metadata import version as v; print(v('app'), v('{DISTRIBUTION}'))") == "1.0 1.0"
    )


def test_extras_and_groups_are_the_projects(mine: Path) -> None:
    assert set(make_recipe(Executable("a")).inventory["packages"]) == {"one"}
    assert set(make_recipe(Executable("a", extras=["extra"])).inventory["packages"]) == {"one", "two"}
    assert set(make_recipe(Executable("a", groups=["dev"])).inventory["packages"]) == {"one", "three"}
    with pytest.raises(ExecutableError, match=r"(?s)recipe: the lock of .*/project: .*Group `nope` is not defined"):
        make_recipe(Executable("a", groups=["nope"]))


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_the_name_changes_with_what_is_installed_and_with_nothing_else(mine: Path) -> None:
    def names() -> list[str]:
        return [make_recipe(Executable("a")).name, make_recipe(Executable("a", extras=["extra"])).name]

    first = names()
    assert first[0] != first[1]
    edit(mine / "pyproject.toml", "[project]", "# a comment\n[project]")
    edit(mine / "app" / "__init__.py", "x = 1", "x = 3")
    assert names() == first
    lock = tomllib.loads((mine / "uv.lock").read_text())
    files = {each["name"]: each["wheels"][0]["hash"] for each in lock["package"] if "wheels" in each}
    edit(mine / "uv.lock", files["two"], "sha256:" + "0" * 64)  # a line of the lock that only one of them has
    second = names()
    assert (second[0] == first[0], second[1] == first[1]) == (True, False)


def test_an_edit_builds_nothing_and_takes_effect(mine: Path) -> None:
    first = make_recipe("base")
    assert run_in(first, "import app, nrl; print(app.x, nrl.x)") == "1 1"
    said: list[str] = []
    edit(mine / "libs/nrl/pyproject.toml", "[project]", "# a comment\n[project]")
    (mine / "notes.txt").write_text("no package has this file")
    assert make_recipe("base").sources.keys() == first.sources.keys()
    edit(mine / "libs/nrl/nrl/__init__.py", "x = 1", "x = 2")  # an editable dependency
    second = make_recipe("base")
    assert source_of(second, DISTRIBUTION) != source_of(first, DISTRIBUTION)
    assert source_of(second, "app") == source_of(first, "app")
    edit(mine / "app/__init__.py", "x = 1", "x = 3")  # the project itself
    third = make_recipe("base")
    assert ensure_env(third, say=said.append) == ensure_env(first, say=said.append)
    assert said == []
    assert run_in(third, "import app, nrl; print(app.x, nrl.x)") == "3 2"
    assert run_in(first, "import app, nrl; print(app.x, nrl.x)") == "1 1"  # for who runs still
    edit(mine / "libs/nrl/nrl/__init__.py", "x = 2", "x = 1")
    edit(mine / "app/__init__.py", "x = 3", "x = 1")
    assert make_recipe("base").sources.keys() == first.sources.keys()  # not a matter of time or place


@pytest.mark.parametrize("file", ["app.pth", "app-1.0.data/data/share/app.txt"])
def test_a_wheel_that_is_more_than_python_is_installed(mine: Path, file: str) -> None:
    to_install(mine, file)
    first = make_recipe("base")
    assert set(first.inventory["packages"]) == {"app", "one"}
    assert [name.rsplit("-", 2)[0] for name in first.sources] == [DISTRIBUTION]
    assert run(ensure_env(first), "-c", "import app; print(app.x)") == "1"
    edit(mine / "app/__init__.py", "x = 1", "x = 2")
    second = make_recipe("base")
    assert second.name != first.name
    assert run(ensure_env(second), "-c", "import app; print(app.x)") == "2"


def test_an_index_goes_by_its_name_for_the_sake_of_its_credentials(mine: Path) -> None:
    url = os.environ["UV_DEFAULT_INDEX"]
    assert make_recipe("base").indexes == (url,)
    with (mine / "pyproject.toml").open("a") as file:
        file.write(f'[[tool.uv.index]]\nname = "near"\nurl = "{url}"\n')
    assert make_recipe("base").indexes == (f"near={url}",)
    assert ensure_env(make_recipe("base")).exists()


def test_a_file_of_another_platform_changes_no_name(mine: Path) -> None:
    first = make_recipe(Executable("a"))
    text = (mine / "uv.lock").read_text()
    found = re.search(r'    \{ .*/one-1.0-py3-none-any.whl".*\},\n', text)
    assert found, text
    strange = found[0].replace("py3-none-any", "cp27-none-plan9")
    strange = re.sub(r"sha256:\w+", "sha256:" + "1" * 64, strange)
    (mine / "uv.lock").write_text(text.replace(found[0], found[0] + strange))
    second = make_recipe(Executable("a"))
    assert second.name == first.name
    assert "1" * 64 in "".join(second.requirements)  # though a node may have it


def test_an_additional_requirement_agrees_with_the_lock(mine: Path) -> None:
    found = make_recipe(Executable("a", requirements=["three>=2"]))
    assert found.inventory["packages"]["three"]["version"] == "3.0"
    assert run_in(found, "import three, one, app") == ""
    message = (
        r"(?s)recipe: the requirements one>=2 of executable 'a', with the versions of the lock of .*/project: `uv pip "
        r"compile` fails; its last lines:.*one==1\.0"
    )
    with pytest.raises(ExecutableError, match=message):
        make_recipe(Executable("a", requirements=["one>=2"]))


def test_an_additional_requirement_is_resolved_once(
    mine: Path, index: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = Executable("a", requirements=["three"])
    first = make_recipe(wanted)
    index.close()  # as in an image without a network
    shutil.rmtree(tmp_path / "cache")
    assert make_recipe(wanted).name == first.name
    monkeypatch.setenv("NRL_FORCE_REBUILD_VENVS", "1")
    monkeypatch.setattr(locks, "_RESOLVED", set())
    with pytest.raises(ExecutableError, match="recipe: the requirements three of executable 'a'"):
        make_recipe(wanted)


def test_a_kept_resolution_that_is_not_whole_is_resolved_again(mine: Path) -> None:
    wanted = Executable("a", requirements=["three"])
    first = make_recipe(wanted)
    (kept,) = (mine.parent / "venvs" / ".resolved").iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(whole[: int(0.99 * len(whole))])
    assert make_recipe(wanted) == first
    assert kept.read_bytes() == whole


def test_a_folder_as_an_additional_requirement(mine: Path, tmp_path: Path) -> None:
    (tmp_path / "more" / "more").mkdir(parents=True)
    (tmp_path / "more" / "more" / "__init__.py").write_text("y = 1\n")
    (tmp_path / "more" / "backend.py").write_text(BACKEND.format(name="more", package="more"))
    (tmp_path / "more" / "pyproject.toml").write_text(
        '[project]\nname = "more"\nversion = "1.0"\n'
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    wanted = Executable("a", requirements=[f"more @ {(tmp_path / 'more').as_uri()}"])
    first = make_recipe(wanted)
    shutil.rmtree(tmp_path / "more" / "__pycache__", ignore_errors=True)
    (tmp_path / "more" / "more" / "__init__.py").write_text("y = 2\n")
    second = make_recipe(wanted)
    assert source_of(first, "more") != source_of(second, "more")
    assert run_in(second, "import more; print(more.y)") == "2"


@pytest.mark.parametrize("line", ["./lib", "-e lib", "two words"])
def test_a_requirement_that_is_none(mine: Path, line: str) -> None:
    message = (
        f"(?s)recipe: executable 'a' has requirements with the line '{line}', which is not one .*; write 'name>=1.0'"
    )
    with pytest.raises(ExecutableError, match=message):
        make_recipe(Executable("a", requirements=[line]))


def test_an_extra_that_neither_the_project_nor_nrl_has(mine: Path) -> None:
    with pytest.raises(ExecutableError, match=r"(?s)recipe: the lock of .*Extra `nope` is not defined"):
        make_recipe(Executable("a", extras=["nope"]))


def test_a_project_whose_lock_does_not_agree_with_an_extra_of_nrl(mine: Path) -> None:
    message = (
        r"(?s)recipe: the project .*/project has no extra 'mcore' for executable 'mcore', and what nrl's lock has for "
        r"it does not agree .* mcore = \[\"nrl-torch\[mcore\]\"\] and, "
        r".*override-dependencies = \[\"torch==.*In detail: "
    )
    with pytest.raises(ExecutableError, match=message):  # the index has none of these packages
        make_recipe("mcore")


def test_a_path_of_the_lock_that_is_gone(mine: Path) -> None:
    shutil.rmtree(mine / "libs")
    with pytest.raises(ExecutableError, match=r"libs/nrl"):
        make_recipe("base")


def test_a_wheel_that_cannot_be_built(mine: Path) -> None:
    (mine / "backend.py").write_text("")
    with pytest.raises(
        ExecutableError, match=r"(?s)recipe: the wheel of .*/project: `uv build --quiet` fails.*Failed to build"
    ):
        make_recipe("base")


def test_a_recipe_is_forced_by_a_variable_once_a_process(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = ensure_env(make_recipe("base")).parents[1]
    (env / "mine").touch()
    for value in ("", "0"):
        monkeypatch.setenv("NRL_FORCE_REBUILD_VENVS", value)
        ensure_env(make_recipe("base"))
        assert (env / "mine").exists()
    monkeypatch.setenv("NRL_FORCE_REBUILD_VENVS", "1")
    ensure_env(make_recipe("base"))
    assert not (env / "mine").exists()
    (env / "mine").touch()
    ensure_env(make_recipe("base"))
    assert (env / "mine").exists()


def test_system_needs_nothing() -> None:
    assert make_recipe("system") == Recipe("system", "system", interpreter=sys.executable)
    assert ensure_env(make_recipe("system")) == Path(sys.executable)


def test_a_recipe_travels(tmp_path: Path) -> None:
    found = make_recipe("base", folder=tmp_path)
    assert NAME.fullmatch(found.name)
    assert pickle.loads(pickle.dumps(found)) == found
    assert ([name.rsplit("-", 2)[0] for name in found.sources], found.wheels) == ([DISTRIBUTION], {})
    shown = {*re.findall(r"(\w+)=", repr(found))}
    assert not {"wheels", "sources", "settings", "inventory"} & shown  # large, or secret


def test_an_executable_that_a_script_outside_of_the_repository_registers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "shouting"
    (source / "shouting").mkdir(parents=True)
    (source / "shouting" / "__init__.py").write_text("def shout(text):\n    return text.upper()\n")
    (source / "backend.py").write_text(BACKEND.format(name="shouting", package="shouting"))
    (source / "pyproject.toml").write_text(
        '[project]\nname = "shouting"\nversion = "1.0"\n'
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (tmp_path / "script.py").write_text(
        "from nrl.runtime.venvs.registry import Executable, register\n"
        "from nrl.runtime.venvs.building import ensure_env\n"
        "from nrl.runtime.venvs.recipes import make_recipe\n"
        f"register(Executable('loud', requirements=['shouting @ {source.as_uri()}']))\n"
        "made = make_recipe('loud')\n"
        "python = ensure_env(made)\n"
    )
    monkeypatch.setenv("NRL_VENV_DIR", str(tmp_path / "venvs"))
    monkeypatch.chdir(tmp_path)
    made = runpy.run_path(str(tmp_path / "script.py"), run_name="__main__")
    assert made["python"].is_relative_to(tmp_path / "venvs")
    program = "from importlib.util import find_spec as f; import shouting; print(shouting.shout(f('nrl').origin))"
    assert run_in(made["made"], program).startswith(str(tmp_path / "venvs" / ".sources").upper())


def test_nothing_is_added_to_the_drivers_own_interpreter() -> None:
    with pytest.raises(ExecutableError, match="'system' is the driver's own interpreter, to which nothing is added"):
        make_recipe(Executable("system", requirements=["cowsay"]))
