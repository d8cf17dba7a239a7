"""What an import of nrl imports, that its names are there all the same, and what the compiler knows of tensordict."""

import asyncio
import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import pytest

import nrl
from nrl import imports
from nrl.envs import Trace
from nrl.envs.pool import subprocess_worker
from tests.loading import HEAVY, TORCH, loaded_by

PROGRAM = """
import importlib.util
import json
import sys

{first}
import nrl

importlib.util.find_spec("tensordict"), importlib.util.find_spec("torch._dynamo")  # who asks has imported neither
import tensordict

before = sorted({{"torch._dynamo", "sympy", "transformers", "ray", "pandas", "matplotlib"}} & sys.modules.keys())
import torch
from tensordict import TensorDict, utils

double = torch.compile(torch.vmap(lambda row: row["x"] * 2), backend="eager", fullgraph=True)
found = double(TensorDict({{"x": torch.arange(3)}}, batch_size=[3])).tolist()

from torch._dynamo import trace_rules

kind = trace_rules.lookup_callable(utils._add_batch_dim_c).__name__
marked = utils._lock_warn._dynamo_marked_constant
hooks = [type(finder).__module__ for finder in sys.meta_path].count("nrl.imports")
print(json.dumps([before, found, kind, marked, hooks, torch.compiler.allow_in_graph.__module__]))
"""


@pytest.mark.parametrize(
    ("first", "imported"),
    [
        ("", []),
        pytest.param("import torch._dynamo", ["sympy", "torch._dynamo"], marks=pytest.mark.slow),
        ("import tensordict", None),
    ],
)
def test_the_compiler_is_imported_when_it_is_needed(first: str, imported: list[str] | None) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(first=first)], capture_output=True, text=True, check=True
    )
    before, *rest = json.loads(run.stdout)
    assert before == (["sympy", "torch._dynamo"] if imported is None else imported)
    assert rest == [[0, 2, 4], "TorchInGraphFunctionVariable", True, 0, "torch.compiler"]


def test_nrl_may_be_imported_anew() -> None:
    """As pytest --cov=nrl does: it imports a package, forgets it, and imports it again under its watch."""
    script = (
        "import sys; import nrl.imports\n"
        "for name in [each for each in sys.modules if each.startswith('nrl')]: del sys.modules[name]\n"
        "import nrl.imports, tensordict\n"
        "print(len(sys.meta_path), 'torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.split()[1] == "False"


def test_a_module_is_run_in_another_way_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small_module.py").write_text("number = 1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    ran = list[str]()

    def run(usual: Any, module: ModuleType) -> None:
        ran.append(module.__name__)
        usual(module)

    for name in ("small_module", "missing_module"):
        imports._Once(name, run)
    early = importlib.util.find_spec("small_module")
    assert early is not None
    assert early.loader is not None
    for _ in range(2):
        sys.modules.pop("small_module", None)
        assert importlib.import_module("small_module").number == 1
    again = importlib.util.module_from_spec(early)
    early.loader.exec_module(again)
    assert again.number == 1
    assert ran == ["small_module"]
    with pytest.raises(ModuleNotFoundError, match="missing_module"):
        importlib.import_module("missing_module")


LIGHT = [
    "import nrl; dir(nrl)",
    "import nrl.envs, nrl.run, nrl.runtime",
    "import nrl; nrl.pooled(nrl.envs.exact); nrl.math_verifier(); nrl.judge; nrl.reasoning_gym(); nrl.envs.limited",
    "import nrl; nrl.environments('math')",
    "import nrl; nrl.environments({'python': 1, 'tic_tac_toe': {}, 'code': 2, 'short_answer': 1, 'constraints': {}})",
    "import nrl.__main__",
]


@pytest.mark.parametrize("statement", LIGHT)
def test_what_works_without_tensors_loads_no_torch(statement: str) -> None:
    assert loaded_by(statement, HEAVY | TORCH) == {}


@pytest.mark.parametrize("arguments", [["--help"], ["venvs", "list", "--help"], ["venvs", "path", "system"]])
def test_the_command_loads_what_it_needs(arguments: list[str]) -> None:
    program = f"""
from contextlib import suppress
from nrl.cli.cli import main
with suppress(SystemExit):
    main({arguments})
"""
    assert loaded_by(program, HEAVY | TORCH) == {}


@pytest.mark.parametrize("arguments", [["eval", "model=m", "env=numbr"], ["gym", "test", "numbr"]])
def test_a_name_that_is_not_there_is_told_before_torch_is_imported(arguments: list[str]) -> None:
    program = f"""
from nrl.cli.cli import main
assert main({arguments}) == 2
"""
    assert loaded_by(program, HEAVY | TORCH) == {}


@pytest.mark.parametrize("given", ["nothing", "a tensor"])
def test_a_worker_of_a_pool_loads_torch_with_its_first_tensor(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the call for which it is, so that these seconds are not the call's."""
    heavy, limits, within = HEAVY | TORCH, list[float | None](), subprocess_worker._Channel.within

    def noted(channel: Any, seconds: float | None) -> None:
        limits.append(seconds)
        within(channel, seconds)

    monkeypatch.setattr(subprocess_worker._Channel, "within", noted)

    def loaded(task: Any, trace: Trace) -> Any:
        return sorted(heavy & set(sys.modules))

    verify: Any = nrl.pooled(loaded, workers=1, timeout=59)
    value = importlib.import_module("torch").ones(3) if given == "a tensor" else None
    first, second, third = (asyncio.run(verify({"answer": each}, Trace("", [""]))) for each in (None, value, value))
    assert first == []
    assert second == third == (["numpy", "tensordict", "torch"] if given == "a tensor" else [])
    start, *calls = limits
    assert calls == ([59, start, 59, 59] if given == "a tensor" else [59, 59, 59])


@pytest.mark.parametrize("name", ["nrl", "nrl.data", "nrl.rollout", "nrl.run", "nrl.runtime"])
def test_all_names_of_a_package_are_there(name: str) -> None:
    package: Any = importlib.import_module(name)
    assert {*package.__all__, "__doc__", "__path__"} <= set(dir(package))
    assert all(getattr(package, name) is getattr(package, name) for name in package.__all__)


def test_rooms_are_attributes() -> None:
    program = """
import nrl

assert "algos" in dir(nrl) and "algos" not in vars(nrl)
print(nrl.algos.clip.__module__, nrl.runtime.mesh.__name__, nrl.tiny.__name__)
from nrl import *
print(rollout is nrl.rollout, COLUMNS is nrl.COLUMNS)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "nrl.algos.surrogates nrl.runtime.mesh nrl.tiny\nTrue True\n"


def test_what_is_not_there_is_an_error_to_python_and_to_the_type_checker() -> None:
    with pytest.raises(AttributeError, match=r"^module 'nrl' has no attribute 'rolout'$"):
        nrl.rolout  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"^module 'nrl\.runtime' has no attribute '_cluster'$"):
        nrl.runtime._cluster  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'rolout' from 'nrl'"):
        from nrl import rolout  # type: ignore[attr-defined]  # noqa: F401


def test_a_public_function_stays_when_a_package_of_its_name_is_imported() -> None:
    program = "import nrl, nrl.rollout.episode, nrl.run.folder; print(callable(nrl.rollout), callable(nrl.run))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True True\n"


def test_a_package_travels_by_its_name() -> None:
    for name in ("nrl", "nrl.rollout", "nrl.run"):
        module = importlib.import_module(name)
        assert cloudpickle.loads(cloudpickle.dumps(module)) is module
