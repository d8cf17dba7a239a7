"""Which module may import which: the rooms of the package, from the ground up, and what an import leaves out."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.loading import HEAVY, TORCH, loaded_by

ROOT = Path(__file__).parents[1]

# A room imports from its own line and from the lines above it. Neither rooms nor modules import each other in a circle;
# imports within functions and for type checkers count. A module is in the room with the longest name that its own
# begins with.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "imports", "_lazy"),
    ("arguments", "files", "flags"),
    ("batch",),
    ("algos", "config", "log"),
    ("runtime",),
    ("data.checks", "data.messages"),
    ("envs",),
    ("backends",),
    ("data", "rollout", "tiny", "envs.builtin", "envs.llm_judge", "envs.reward_model"),
    ("run",),
    ("gym", "ops"),
    ("",),  # nrl/__init__.py, which gathers the public names
    ("cli",),
    ("__main__",),
)
OWNERS = {"megatron": "nrl.backends.megatron", "ray": "nrl.runtime", "vllm": "nrl.backends.vllm", "wandb": "nrl.log"}
_MEGATRONS = ("experts", "packed_layers", "megatron_engine", "pipeline")
ON_THEIR_OWN = {f"nrl.backends.megatron.{name}": "megatron" for name in _MEGATRONS}
"""Modules that subclass what a heavy package has. They alone import it as they are; others import them in functions."""
LIGHT = (
    *(
        "nrl.cli.cli",
        "nrl.cli.evaluation_settings",
        "nrl.gym.cli",
        "nrl.config",
        "nrl.envs",
        "nrl.errors",
        "nrl.files",
        "nrl.log",
        "nrl.run.exit_codes",
    ),
    *(
        "nrl.runtime.venvs",
        "nrl.runtime.node",
        "nrl.runtime.ports",
        "nrl.runtime.preemption",
        "nrl.runtime.restart_state",
        "nrl.runtime.threads",
    ),
)
NOT_LIGHT = ("nrl.gym.cli.env_fuzz", "nrl.envs.pool.mesh_worker", "nrl.envs.reward_model")
"""What starts in a fraction of a second: an environment, a worker of a pool, the command; torch takes seconds."""
OUTSIDE = frozenset({"benchmarks", "examples", "tests"})


class Import(NamedTuple):
    importer: str
    target: str
    line: int
    lazy: bool  # inside a function, or for the type checker alone


def sources(root: Path = ROOT) -> dict[str, str]:
    found = {}
    for path in sorted((root / "nrl").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


def imports(importer: str, source: str, modules: Iterable[str]) -> Iterator[Import]:
    """Every import, `import_module("literal")` included; `from a import b` counts as `a.b` where that is a module."""
    known = frozenset(modules)

    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        targets: list[str] = []
        match node:
            case ast.Import(names):
                targets = [alias.name for alias in names]
            case ast.ImportFrom(module, names, 0):
                joined = [f"{module}.{alias.name}" for alias in names]
                targets = sorted({full if full in known else str(module) for full in joined})
            case ast.ImportFrom():
                targets = ["."]
            case ast.Call(
                ast.Name("import_module" | "__import__") | ast.Attribute(_, "import_module"),
                [ast.Constant(str(name)), *_],
            ):
                targets = [name]
        yield from (Import(importer, target, getattr(node, "lineno", 0), lazy) for target in targets)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from (found for child in node.body for found in walk(child, True))
            yield from (found for child in node.orelse for found in walk(child, lazy))
            return
        lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from (found for child in ast.iter_child_nodes(node) for found in walk(child, lazy))

    return walk(ast.parse(source), False)


def room(module: str) -> str:
    """The room with the longest name that the module is in."""
    name = module.removeprefix("nrl").removeprefix(".")
    return max((each for names in LAYERS for each in names if inside(name, each)), key=len, default="?")


def inside(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def circle(edges: Mapping[str, Iterable[str]]) -> list[str]:
    """The first circle that a depth-first walk meets, its first name repeated at the end; empty if there is none."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for target in sorted(edges.get(name, ())):
            if found := visit(target, [*path, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(edges) if (found := visit(name, []))), [])


def violations(files: Mapping[str, str]) -> list[str]:
    """What is wrong with the imports of a package, given as {module: source}; one sentence each."""
    rank = {name: height for height, names in enumerate(LAYERS) for name in names}
    found = [each for name, source in files.items() for each in imports(name, source, files)]
    wrong = [f"{name}: no layer is given for this room" for name in files if room(name) not in rank]
    for importer, target, line, lazy in found:
        top = target.split(".")[0]
        where = f"{importer}:{line}"
        if target == ".":
            wrong.append(f"{where}: relative import; write the full name")
        if top in OUTSIDE:
            wrong.append(f"{where}: nothing in nrl imports {top}")
        if top == "nrl" and rank.get(room(target), 0) > rank.get(room(importer), 99):
            wrong.append(f"{where}: {room(importer) or 'nrl'} is below {room(target) or 'nrl'}, which it imports")
        if top in OWNERS and not inside(importer, OWNERS[top]):
            wrong.append(f"{where}: {top} is imported only in {OWNERS[top]}")
        if target in ON_THEIR_OWN and importer not in ON_THEIR_OWN and not lazy:
            wrong.append(f"{where}: {target} imports {ON_THEIR_OWN[target]}; import it inside a function")
        if top in HEAVY and not lazy and ON_THEIR_OWN.get(importer) != top:
            wrong.append(f"{where}: {top} is imported at module level; import it inside the function that needs it")

    modules: dict[str, set[str]] = {}
    rooms: dict[str, set[str]] = {}
    for importer, target, _, _ in found:
        if not inside(target, "nrl"):
            continue
        modules.setdefault(importer, set()).add(target)
        if room(importer) != room(target):
            rooms.setdefault(room(importer), set()).add(room(target))
    wrong += [f"modules in a circle: {' -> '.join(path)}" for path in [circle(modules)] if path]
    wrong += [f"rooms in a circle: {' -> '.join(path)}" for path in [circle(rooms)] if path]
    return wrong


def test_the_package_keeps_to_its_layers() -> None:
    assert violations(sources()) == []


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"nrl.batch": "def f():\n    from nrl.algos.losses import g"}, "nrl.batch:2: batch is below algos"),
        ({"nrl.algos.x": "from nrl import runtime", "nrl.runtime": ""}, "nrl.algos.x:1: algos is below runtime"),
        ({"nrl.run": "import nrl"}, "nrl.run:1: run is below nrl, which it imports"),
        ({"nrl.attic": ""}, "nrl.attic: no layer is given"),
        ({"nrl.batch": "from .errors import E"}, "nrl.batch:1: relative import"),
        (
            {"nrl.cli.cli": "def f():\n    import examples.grpo"},
            "nrl.cli.cli:2: nothing in nrl imports examples",
        ),
        ({"nrl.data": "def f():\n    import ray"}, "nrl.data:2: ray is imported only in nrl.runtime"),
        ({"nrl.log": "import wandb"}, "nrl.log:1: wandb is imported at module level"),
        ({"nrl.backends.megatron.pipeline": "import ray"}, "nrl.backends.megatron.pipeline:1: ray is imported"),
        (
            {"nrl.backends.megatron": "import nrl.backends.megatron.pipeline", "nrl.backends.megatron.pipeline": ""},
            "nrl.backends.megatron:1: nrl.backends.megatron.pipeline imports megatron; import it in",
        ),
        (
            {"nrl.data": "try:\n    from datasets import load\nexcept E: ..."},
            "nrl.data:2: datasets is imported at module",
        ),
        ({"nrl.data": "class A:\n    import transformers.models"}, "nrl.data:2: transformers is imported at module"),
        ({"nrl.data": "if TYPE_CHECKING:\n    pass\nelse:\n    import peft"}, "nrl.data:4: peft is imported at module"),
        ({"nrl.data": "x = importlib.import_module('peft.tuners')"}, "nrl.data:1: peft is imported at module level"),
        (
            {"nrl.data.hub": "import nrl.data.rows", "nrl.data.rows": "def f():\n    from nrl.data.hub import load"},
            "modules in a circle: nrl.data.hub -> nrl.data.rows -> nrl.data.hub",
        ),
        (
            {"nrl.log": "if TYPE_CHECKING:\n    import nrl.log.sinks", "nrl.log.sinks": "import nrl.log"},
            "modules in a circle: nrl.log -> nrl.log.sinks -> nrl.log",
        ),
        (
            {"nrl.data": "def f():\n    import nrl.rollout", "nrl.rollout": "import nrl.data"},
            "rooms in a circle: data -> rollout -> data",
        ),
    ],
)
def test_the_checker_finds(files: dict[str, str], message: str) -> None:
    assert any(found.startswith(message) for found in violations(files)), violations(files)


@pytest.mark.parametrize(
    "files",
    [
        {"nrl.batch": "import torch\nfrom nrl.errors import BatchError"},
        {"nrl": "from nrl import batch\nfrom nrl.run import run", "nrl.batch": ""},
        {"nrl.data": "if typing.TYPE_CHECKING:\n    from transformers import PreTrainedConfig"},
        {"nrl.runtime.cluster": "async def f():\n    import ray.util"},
        {
            "nrl.backends.fsdp": "from nrl.backends.fsdp import rank",
            "nrl.backends.fsdp.rank": "import nrl.backends.types",
        },
        {
            "nrl.backends.megatron": "def f():\n    from nrl.backends.megatron.pipeline import build",
            "nrl.backends.megatron.pipeline": "import megatron.core",
        },
    ],
)
def test_the_checker_allows(files: dict[str, str]) -> None:
    assert violations(files) == []


def test_importing_nrl_loads_nothing_heavy() -> None:
    modules = [name for name in sources() if not name.endswith("__main__") and name not in ON_THEIR_OWN]
    assert loaded_by("import " + ", ".join(modules)) == {}  # all of them: nrl, nrl.algos and each backend's front


def test_a_heavy_import_is_seen(tmp_path: Path) -> None:
    (tmp_path / "wandb.py").touch()
    (tmp_path / "between.py").write_text("import wandb")
    assert loaded_by("import between", path=tmp_path) == {"wandb": "__main__ -> between -> wandb"}


def test_what_works_without_tensors_loads_no_torch() -> None:
    modules = [name for name in sources() if any(inside(name, light) for light in LIGHT) and name not in NOT_LIGHT]
    assert loaded_by("import " + ", ".join(modules), HEAVY | TORCH) == {}
