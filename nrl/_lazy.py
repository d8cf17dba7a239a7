"""Packages whose names are imported when they are used, so that a light part of a package does not wait for torch."""

import ast
import functools
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

__all__ = ["on_demand"]


def on_demand(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` (PEP 562) of a package that imports its public names when they are used.

    The package says once where its names are, to type checkers and editors, and here that is read::

        from typing import TYPE_CHECKING

        if TYPE_CHECKING:
            from shapes.circles import circle
        else:
            __getattr__, __dir__ = on_demand(__name__)

        __all__ = ["circle"]

    Modules and packages that lie in the package are attributes of it, too, but for those whose name is public. A type
    checker does not see that ``__getattr__``, so it still finds names that there are not.

    Args:
        package: its name.

    Raises:
        AttributeError: (when a name is used) there is none.

    >>> import nrl.runtime
    >>> get, names = on_demand("nrl.runtime")
    >>> get("Layout"), "Layout" in names(), "mesh" in names()
    (<class 'nrl.runtime.mesh.layout.Layout'>, True, True)
    >>> nrl.runtime.layuot
    Traceback (most recent call last):
    AttributeError: module 'nrl.runtime' has no attribute 'layuot'. Did you mean: 'Layout'?
    """
    module = sys.modules[package]
    module.__class__ = _Package

    @functools.cache
    def homes() -> dict[str, tuple[str, str]]:
        return _imported_for_checkers(module)

    def get(name: str) -> Any:
        if name in module.__all__ and name in homes():
            home, own = homes()[name]
            value = getattr(importlib.import_module(home), own)
        elif not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}") is not None:
            value = importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module '{package}' has no attribute '{name}'", name=name, obj=module)
        vars(module)[name] = value  # This function is not called for the name again.
        return value

    def names() -> list[str]:
        rooms = {each.name for each in pkgutil.iter_modules(module.__path__) if not each.name.startswith("_")}
        return sorted({*vars(module), *module.__all__, *rooms})

    return get, names


class _Package(ModuleType):
    """A package whose public names stay what they are when a module of the same name is imported.

    Python binds each imported submodule in its parent: without this, ``nrl.rollout`` would be the function until
    somebody imports `nrl.rollout.episode`, and the package from then on.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, ModuleType) and name in vars(self).get("__all__", ())):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
        return importlib.import_module, (self.__name__,)  # Plain modules are pickled by name, too.


def _imported_for_checkers(module: ModuleType) -> dict[str, tuple[str, str]]:
    """Of each name that a package imports for type checkers, the module that has it, and how it is called there."""
    loader: Any = module.__spec__ and module.__spec__.loader
    found = dict[str, tuple[str, str]]()
    for node in ast.parse(loader.get_source(module.__name__)).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for each in node.body:
                if isinstance(each, ast.ImportFrom) and each.module:
                    found |= {alias.asname or alias.name: (each.module, alias.name) for alias in each.names}
    return found
