"""`__all__` is what is public, and every public name shows how it is used in an example that doctest runs.

The order of `__all__` is ruff's to check (RUF022), which can also mend it.
"""

import ast
import doctest
import functools
import importlib
import inspect
import itertools
import re
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("nrl", "nrl.algos")  # whose names are the public API


@functools.cache
def module_files() -> dict[str, Path]:
    found = {}
    for path in sorted((ROOT / "nrl").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def bound(statements: Sequence[ast.stmt]) -> Iterator[tuple[str, bool]]:
    """The names that a module's top level binds, and whether it imports them."""
    for node in statements:
        match node:
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                yield name, False
            case ast.Assign(targets) | ast.Delete(targets):
                names = [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
                yield from ((name, False) for name in names)
            case ast.AnnAssign(ast.Name(name)) | ast.TypeAlias(ast.Name(name)):
                yield name, False
            case ast.Import(names) | ast.ImportFrom(_, names):
                yield from ((alias.asname or alias.name.split(".")[0], True) for alias in names)
            case ast.If(_, body, orelse):
                yield from bound([*body, *orelse])
            case ast.Try(body, handlers, orelse, final):
                yield from bound([*body, *orelse, *final, *(each for handler in handlers for each in handler.body)])
            case ast.With(_, body):
                yield from bound(body)


def problems_of_all(source: str, *, package: bool = False) -> list[str]:
    """How `__all__` differs from the public names that a module defines; a package may list what it imports too."""
    tree = ast.parse(source)
    names = list(bound(tree.body))
    defined = {name for name, imported in names if not imported and not name.startswith("_")}
    available = {name for name, imported in names if package or not imported}
    listed: list[str] | None = None
    for node in tree.body:
        match node:
            case ast.Assign([ast.Name("__all__")], value) | ast.AnnAssign(ast.Name("__all__"), _, ast.expr() as value):
                listed = list(ast.literal_eval(value))
    if listed is None:
        return [f"no __all__, but it defines {', '.join(sorted(defined))}"] if defined else []
    wrong = [f"{name} is public and not in __all__" for name in sorted(defined - set(listed))]
    wrong += [f"{name} is in __all__ and not defined here" for name in sorted(set(listed) - available)]
    wrong += [f"{name} is in __all__ twice" for name in sorted({name for name in listed if listed.count(name) > 1})]
    return wrong


def examples(docstring: str | None) -> list[str]:
    """The statements of a docstring's examples that doctest really runs."""
    found = doctest.DocTestParser().get_examples(docstring or "")
    return [each.source for each in found if not each.options.get(doctest.SKIP)]


def described_aliases(source: str) -> set[str]:
    """The type aliases that have a text in the line below: what they stand for cannot be run."""
    body = ast.parse(source).body
    found = set()
    for node, below in itertools.pairwise(body):
        match node, below:
            case ast.TypeAlias(ast.Name(name)), ast.Expr(ast.Constant(str())):
                found.add(name)
    return found


def has_own_docstring(value: object, name: str) -> bool:
    """A function or class under its own name: not an alias of one, nor a closure that a factory returned."""
    return isinstance(value, type | types.FunctionType) and value.__qualname__ == name and "nrl" in value.__module__


def problems_of_examples(name: str, value: object, homes: Sequence[types.ModuleType]) -> list[str]:
    """What is missing for one public name.

    A function or a class needs a docstring with an example, a type alias a text below it. Any other value (a ready-made
    loss) has no docstring that doctest reads: an example in the module that defines it has to use the name.
    """
    if inspect.ismodule(value):
        return []
    if isinstance(value, typing.TypeAliasType):
        described = any(name in described_aliases(Path(str(home.__file__)).read_text()) for home in homes)
        return [] if described else [f"the type {name} has no text below it"]
    if has_own_docstring(value, name):
        if not value.__doc__:
            return [f"{name} has no docstring"]
        return [] if examples(value.__doc__) else [f"{name}'s docstring has no example that runs"]
    run = [each for home in homes for test in doctest.DocTestFinder().find(home) for each in examples(test.docstring)]
    used = any(re.search(rf"\b{name}\b", example) for example in run)
    return [] if used else [f"no example in {' or '.join(home.__name__ for home in homes)} uses {name}"]


@functools.cache
def definitions() -> dict[str, set[str]]:
    """The names that each module of nrl defines."""
    return {
        module: {name for name, imported in bound(ast.parse(path.read_text()).body) if not imported}
        for module, path in module_files().items()
    }


def home_modules(name: str, value: object) -> list[types.ModuleType]:
    """The modules of nrl that define this value under this name."""
    homes = [importlib.import_module(module) for module, defined in definitions().items() if name in defined]
    return [home for home in homes if getattr(home, name, None) is value]


@pytest.mark.parametrize("module", module_files())
def test_all_is_what_is_public(module: str) -> None:
    path = module_files()[module]
    assert problems_of_all(path.read_text(), package=path.name == "__init__.py") == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_an_example(package: str) -> None:
    loaded = importlib.import_module(package)
    wrong = []
    for name in loaded.__all__:
        value = getattr(loaded, name)
        homes = [] if has_own_docstring(value, name) else home_modules(name, value)
        wrong += problems_of_examples(name, value, homes or [loaded])
    assert wrong == []


def test_algos_publishes_all_that_its_modules_do_each_with_an_example() -> None:
    algos = importlib.import_module("nrl.algos")
    found = [name for name in module_files() if re.fullmatch(r"nrl\.algos\.[a-z]\w*", name)]
    assert set(algos.__all__) == {name for module in found for name in importlib.import_module(module).__all__}
    values = {name: getattr(algos, name) for name in algos.__all__}
    documented = {name for name, x in values.items() if ">>>" in (x.__doc__ or "")}  # ready-made losses, too
    assert documented == {name for name, x in values.items() if not isinstance(x, typing.TypeAliasType)}


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("def f(): ...", "no __all__, but it defines f"),
        ("__all__ = ['f']\ndef f(): ...\ndef g(): ...", "g is public and not in __all__"),
        ("__all__ = ['f']\ndef f(): ...\na, b = 1, 2", "a is public and not in __all__"),
        ("__all__ = []\ntype T = int", "T is public and not in __all__"),
        ("__all__ = []\nif True:\n    async def f(): ...", "f is public and not in __all__"),
        ("__all__ = []\ntry:\n    x = 1\nexcept ValueError:\n    y = 2", "y is public and not in __all__"),
        ("from a import g\n__all__ = ['g']", "g is in __all__ and not defined here"),
        ("__all__ = ['f', 'f']\ndef f(): ...", "f is in __all__ twice"),
    ],
)
def test_a_wrong_all_is_seen(source: str, problem: str) -> None:
    assert problem in problems_of_all(source)


@pytest.mark.parametrize(
    ("source", "package"),
    [
        ("import os\n_x = 1\ndef _f(): ...", False),
        ("from a import b\n__all__ = ['f']\ndef f(): ...", False),
        ("from a import b as c\nimport d\n__all__ = ['c', 'd']", True),
    ],
)
def test_a_right_all_passes(source: str, package: bool) -> None:
    assert problems_of_all(source, package=package) == []


def a_module(folder: Path, source: str) -> types.ModuleType:
    module = types.ModuleType("nrl.made_up")
    module.__file__ = str(folder / "made_up.py")
    Path(module.__file__).write_text(source)
    exec(source, module.__dict__)
    return module


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("def name(): pass", "name has no docstring"),
        ("def name(): 'Do it.'", "name's docstring has no example that runs"),
        (
            "class name: '''Be it.\n\n    >>> 1/0  # doctest: +SKIP\n    '''",
            "name's docstring has no example that runs",
        ),
        ("type name = int", "the type name has no text below it"),
        ("'Above.'\ntype name = int\nx = 1", "the type name has no text below it"),
        ("'>>> names, rename = 1, 2'\nname = 3", "no example in nrl.made_up uses name"),
    ],
)
def test_a_missing_example_is_seen(source: str, problem: str, tmp_path: Path) -> None:
    module = a_module(tmp_path, source)
    assert problems_of_examples("name", module.__dict__["name"], [module]) == [problem]


@pytest.mark.parametrize(
    "source",
    [
        "def name(): '>>> name()'",
        "'>>> name + 1\\n4'\nname = 3",
        "def factory():\n    '>>> name'\n    return lambda: 1\nname = factory()",
        "type name = int\n'A number.'",
    ],
)
def test_an_example_is_found(source: str, tmp_path: Path) -> None:
    module = a_module(tmp_path, source)
    assert problems_of_examples("name", module.__dict__["name"], [module]) == []
