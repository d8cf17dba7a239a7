import importlib
import pkgutil
from typing import TypeAliasType

import pytest

import nrl.algos

NAMES = [info.name for info in pkgutil.iter_modules(nrl.algos.__path__) if not info.name.startswith("_")]
MODULES = [importlib.import_module(f"nrl.algos.{name}") for name in NAMES]


def test_all_is_sorted_and_what_the_modules_publish() -> None:
    assert nrl.algos.__all__ == sorted(nrl.algos.__all__)
    assert set(nrl.algos.__all__) == {name for module in MODULES for name in module.__all__}
    for module in MODULES:
        assert module.__all__ == sorted(module.__all__)


@pytest.mark.parametrize("name", nrl.algos.__all__)
def test_every_public_name_is_documented_with_an_example(name: str) -> None:
    value = getattr(nrl.algos, name)
    if not isinstance(value, TypeAliasType):
        assert value.__doc__
        assert ">>>" in value.__doc__
