"""Importing tensordict without torch's compiler, which takes longer to import than torch and all of nrl.

tensordict marks a few functions for the compiler when it is imported, and the marks import it. Most processes never
compile anything, so here the marks wait until the compiler is imported, if it ever is. Importing this module is enough,
as every import of a part of nrl does: it imports neither, and waits for whoever imports tensordict.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

_COMPILER = "torch._dynamo"
_MARKS = ("allow_in_graph", "assume_constant_result")  # functions of torch.compiler


class _Once:
    """A finder of `sys.meta_path` that has one module run in a way of its own; then it is gone.

    Args:
        name: of the module.
        run: given what runs the module, and the module.
    """

    def __init__(self, name: str, run: Callable[[Callable[[ModuleType], None], ModuleType], None]) -> None:
        self._run = run
        # Where somebody imports nrl anew, as pytest --cov=nrl does, two of one name would ask each other without end
        other_finders = [finder for finder in sys.meta_path if getattr(finder, "_of_nrl", None) != name]
        self._of_nrl = name
        sys.meta_path[:] = [self, *other_finders]

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Called for every module, and also where somebody only asks whether there is one."""
        if name != self._of_nrl:
            return None
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((finder for finder in specs if finder is not None), None)
        if spec is not None and spec.loader is not None:
            usual = spec.loader.exec_module

            def run(module: ModuleType) -> None:
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self._run(usual, module)
                else:  # The module was found before and runs once more.
                    usual(module)

            cast(Any, spec.loader).exec_module = run
        return spec


def _without_the_compiler(usual: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Run tensordict; the marks that it makes meanwhile are made when the compiler is imported."""
    import torch.compiler

    if _COMPILER in sys.modules:
        usual(module)
        return
    noted: list[tuple[Callable[[Any], Any], Any]] = []

    def later[F](mark: Callable[[F], F]) -> Callable[[F], F]:
        def note(function: F) -> F:
            noted.append((mark, function))
            return function

        return note

    def run_and_mark(usual: Callable[[ModuleType], None], module: ModuleType) -> None:
        usual(module)
        for mark, function in noted:
            mark(function)

    marks = {name: getattr(torch.compiler, name) for name in _MARKS}
    for name, mark in marks.items():
        setattr(torch.compiler, name, later(mark))
    try:
        usual(module)
    finally:
        for name, mark in marks.items():
            setattr(torch.compiler, name, mark)
    _Once(_COMPILER, run_and_mark)


if "tensordict" not in sys.modules:
    _Once("tensordict", _without_the_compiler)
