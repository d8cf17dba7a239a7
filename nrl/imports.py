"""Importing tensordict without torch's compiler, which takes longer to import than torch and all of nrl.

tensordict marks a few functions for the compiler when it is imported, and the marks import it. Most processes never
compile anything, so here the marks wait until the compiler is imported, if it ever is. Importing this module is enough.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

import torch

__all__ = ["import_tensordict"]

_COMPILER = "torch._dynamo"
_MARKS = ("allow_in_graph", "assume_constant_result")  # functions of torch.compiler


class _Waiting(MetaPathFinder):
    """Marks to make as soon as the compiler is imported."""

    def __init__(self) -> None:
        self.marks: list[tuple[Callable[[Any], Any], Any]] = []

    def later[F](self, mark: Callable[[F], F]) -> Callable[[F], F]:
        """A mark that waits."""

        def note(function: F) -> F:
            self.marks.append((mark, function))
            return function

        return note

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Called for every module: finds the compiler as usual, and makes the marks after its import."""
        if name != _COMPILER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_mark(module: ModuleType) -> None:
                run(module)
                for mark, function in self.marks:
                    mark(function)

            cast(Any, spec.loader).exec_module = run_and_mark
        return spec


def import_tensordict() -> None:
    """Import tensordict, and the compiler with it only if it is already imported.

    >>> import_tensordict()
    >>> "tensordict" in sys.modules
    True
    """
    if _COMPILER in sys.modules or "tensordict" in sys.modules:
        return
    waiting = _Waiting()
    marks = {name: getattr(torch.compiler, name) for name in _MARKS}
    for name, mark in marks.items():
        setattr(torch.compiler, name, waiting.later(mark))
    try:
        importlib.import_module("tensordict")
    finally:
        for name, mark in marks.items():
            setattr(torch.compiler, name, mark)
    sys.meta_path.insert(0, waiting)


import_tensordict()
