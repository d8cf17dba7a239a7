"""Arguments are checked by their names and annotations, where they are given."""

import ast
import collections
import enum
import importlib
import inspect
import math
import operator
import pickle
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, Literal

import attrs
import numpy as np
import pytest
import torch

from nrl.arguments import Unbounded, check_argument, checked, described
from nrl.errors import ArgumentError, NrlError

ROOT = Path(__file__).parents[1]


class Engine:
    pass


class Dtype(enum.StrEnum):
    BFLOAT16 = "bfloat16"


@checked("drive")
def drive(
    engine: Engine,
    speed: float,
    *,
    gears: int = 5,
    limit: Unbounded = math.inf,
    mode: Literal["eco", "sport"] = "eco",
    stops: Sequence[str] = (),
    plan: Callable[[int], float] | None = None,
) -> tuple[float, int]:
    return speed, gears


@checked("Car")
@attrs.frozen
class Car:
    wheels: int = attrs.field(default=4, validator=attrs.validators.ge(1))
    load: float = 0.0
    doors: tuple[int, ...] = ()

    def __attrs_post_init__(self) -> None:
        if self.load > 100:
            raise ValueError(f"Car: load={self.load} is too much; take two cars")


def test_what_fits_passes() -> None:
    three: Any = np.int64(3)
    half: Any = np.float32(2.5)
    doors: Any = [1, 2]
    assert drive(Engine(), 2, gears=three, mode="sport", stops=["a"], plan=float) == (2, 3)
    assert drive(Engine(), speed=half) == (2.5, 5)
    assert Car(load=5).load == 5
    assert attrs.evolve(Car(), doors=doors).doors == doors


WRONG: list[tuple[str, Any, str]] = [
    ("speed", "2", "speed is '2'; give a finite number, without quotes"),
    ("speed", math.nan, "speed is nan; give a finite number"),
    ("speed", math.inf, "speed is inf; give a finite number"),
    ("speed", None, "speed is None; give a finite number"),
    ("speed", True, "speed is True; give a finite number"),
    ("speed", [1.0], "speed is the list [1.0]; give a finite number"),
    ("gears", 2.5, "gears is 2.5; give a whole number"),
    ("gears", False, "gears is False; give a whole number"),
    ("limit", math.nan, "limit is nan; give a number"),
    ("mode", "fast", "mode is 'fast'; give 'eco' or 'sport'"),
    ("stops", "abc", "stops is 'abc'; give several entries, each a text, such as ['abc']"),
    ("stops", ["a", 1], "stops[1] is 1; give a text"),
    ("plan", 3, "plan is 3; give a function or None"),
    ("engine", Engine, "engine is the class Engine; give an Engine"),
    ("engine", print, "engine is the function print; give an Engine"),
]


@pytest.mark.parametrize(("argument", "value", "message"), WRONG)
def test_what_does_not_fit_is_named_with_the_remedy(argument: str, value: Any, message: str) -> None:
    given: dict[str, Any] = {"engine": Engine(), "speed": 1.0} | {argument: value}
    with pytest.raises(ArgumentError) as raised:
        drive(**given)
    assert raised.value.argument == argument
    assert str(raised.value) == f"drive: {message}"


def test_an_argument_error_is_both_of_pythons() -> None:
    for kind in (TypeError, ValueError, NrlError):
        with pytest.raises(kind):
            drive(Engine(), "2")  # type: ignore[arg-type]
    error = ArgumentError("drive: speed is '2'", "speed")
    assert pickle.loads(pickle.dumps(error)).argument == "speed"


def test_a_function_may_judge_infinities_itself() -> None:
    @checked("clip", finite=False)
    def clip(low: float) -> float:
        return low

    assert clip(math.inf) == math.inf
    with pytest.raises(ArgumentError, match="clip: low is '1'"):
        clip("1")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("args", "kwargs", "argument", "message"),
    [
        ((), {"sped": 2.0}, "sped", "drive: it has no argument 'sped'; use speed; it takes engine, speed, gears"),
        ((), {"colour": 2}, "colour", "drive: it has no argument 'colour'; it takes engine, speed"),
        ((Engine(),), {}, "speed", "drive: speed is missing; give a finite number"),
        ((), {"speed": 1.0}, "engine", "drive: engine is missing; give an Engine"),
        (
            (Engine(), 1.0, 5),
            {},
            "",
            "drive: found 3 arguments, and it takes 2: engine, speed; give the others by name",
        ),
        ((Engine(), 1.0), {"speed": 2.0}, "speed", "drive: speed is given twice, first as 1.0"),
    ],
)
def test_names_and_numbers_of_arguments(args: Any, kwargs: Any, argument: str, message: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        drive(*args, **kwargs)
    assert raised.value.argument == argument
    assert str(raised.value).startswith(message)


def test_what_a_records_own_validators_refuse_is_an_argument_error() -> None:
    with pytest.raises(ArgumentError, match=r"Car: 'wheels' must be >= 1: 0") as raised:
        Car(wheels=0)
    assert raised.value.argument == "wheels"
    with pytest.raises(ArgumentError, match=r"^Car: load=101 is too much; take two cars$") as raised:
        Car(load=101)
    assert raised.value.argument == "load"
    with pytest.raises(ArgumentError, match=r"Car: doors\[0\] is 'left'; give a whole number"):
        Car(doors=["left"])  # type: ignore[arg-type]


def test_an_error_inside_of_the_function_is_its_own() -> None:
    @checked("fail")
    def fail(x: int) -> None:
        raise TypeError("inside")

    with pytest.raises(TypeError, match="^inside$") as raised:
        fail(1)
    assert not isinstance(raised.value, NrlError)


@pytest.mark.parametrize(
    ("value", "kind", "fits"),
    [
        ({"a": 1}, Mapping[str, Any], True),
        ([("a", 1)], Mapping[str, Any], False),
        ((0.9, 0.99), tuple[float, float], True),
        ((0.9,), tuple[float, float], False),
        (iter([1]), Iterable[int], True),
        (5, Iterable[int], False),
        (None, int | None, True),
        (b"a", str, False),
        (object(), Any, True),
    ],
)
def test_kinds(value: Any, kind: Any, fits: bool) -> None:
    if fits:
        check_argument("f", "x", value, kind)
    else:
        with pytest.raises(ArgumentError, match="f: x is "):
            check_argument("f", "x", value, kind)


def test_long_values_are_cut() -> None:
    assert len(described("x" * 1000)) < 80
    assert described([object()]) == "a list"
    assert described(math) == "the module math"


def decorated() -> list[tuple[str, str]]:
    """The module and the name of all that is checked."""
    found = []
    for path in sorted((ROOT / "nrl").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                made = [each for each in node.decorator_list if ast.unparse(each).startswith("checked(")]
                inner = node.body if isinstance(node, ast.ClassDef) else []
                methods = [
                    f"{node.name}.{each.name}"
                    for each in inner
                    if isinstance(each, ast.FunctionDef)
                    and any(ast.unparse(decorator).startswith("checked(") for decorator in each.decorator_list)
                ]
                found += [(module, name) for name in ([node.name] if made else []) + methods]
    return found


def test_all_annotations_of_what_is_checked_can_be_read() -> None:
    names = decorated()
    assert len(names) > 100
    for module, name in names:
        target = operator.attrgetter(name)(importlib.import_module(module))
        function = vars(target)["__init__"] if isinstance(target, type) else inspect.unwrap(target)
        assert typing.get_type_hints(function, localns=vars(sys.modules[module])), (module, name)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (np.float32(0.5), float),
        (torch.tensor(0.5), float),
        (np.int64(3), int),
        (np.bool_(True), bool),
        (np.array([0.9, 0.95]), tuple[float, float]),
        (collections.UserList([0.9, 0.95]), tuple[float, float]),
        (Dtype.BFLOAT16, Literal["float32", "bfloat16"]),
        (PurePath("a"), str | PurePath),
    ],
)
def test_values_of_other_libraries_fit_where_they_behave_alike(value: Any, kind: Any) -> None:
    check_argument("call", "value", value, kind)


@pytest.mark.parametrize(
    ("value", "kind"), [(True, int), (True, Literal[1]), (1, Literal[True]), ("ab", tuple[str, str]), (1, bool)]
)
def test_values_that_only_look_alike_do_not_fit(value: Any, kind: Any) -> None:
    with pytest.raises(ArgumentError, match="^call: value is "):
        check_argument("call", "value", value, kind)


def test_a_whole_float_is_told_as_an_integer() -> None:
    with pytest.raises(ArgumentError, match=r"^call: n is 10000.0; give 10000, a whole number$"):
        check_argument("call", "n", 1e4, int)
