"""Values that user code may return, and whether each is one: for the suites of every place in which it may run.

A value is made anew for each row, since a generator or a coroutine can be used once.
"""

import collections
import math
import types
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch

from nrl.envs import Environment, Score, Step, Turn, of_group, tools

__all__ = [
    "DONES",
    "EVERYTHING",
    "GROUPS",
    "INFOS",
    "OBSERVATIONS",
    "PROMPTS",
    "RESETS",
    "STEPS",
    "VERDICTS",
    "WAYS",
    "Case",
    "compared",
]


class Case(NamedTuple):
    """A value, and whether it is accepted."""

    name: str
    good: bool
    make: Callable[[], Any]


class Text(str):
    """A text of another type."""


class Name:
    """An object whose ``repr`` fails."""

    def __repr__(self) -> str:
        raise OSError("away")


async def _later(value: Any) -> Any:
    return value


def _awaitable() -> Any:
    """An awaitable that nobody is warned of where it is not awaited."""

    @types.coroutine
    def wait() -> Any:
        yield

    return wait()


def _cases(good: dict[str, Any], bad: dict[str, Any]) -> list[Case]:
    def made(value: Any) -> Callable[[], Any]:
        return value if isinstance(value, types.FunctionType) else lambda: value

    kinds = ((True, good), (False, bad))
    return [Case(name, kind, made(value)) for kind, values in kinds for name, value in values.items()]


ASK = {"role": "user", "content": "1+1="}
_AGENT = {"messages": [ASK], "tools": []}

_NEVER_READ: dict[str, Any] = {
    "bytes": b"12",
    "no bytes": b"",
    "bytearray": bytearray(b"12"),
    "memoryview": lambda: memoryview(b"12"),
    "number": 5,
    "float": 5.0,
    "true": True,
    "nan": math.nan,
    "complex": 1j,
    "set": {4, 5},
    "frozenset": frozenset((4, 5)),
    "range": range(4, 6),
    "generator": lambda: (token for token in (4, 5)),
    "iterator": lambda: iter([4, 5]),
    "deque": lambda: collections.deque([4, 5]),
    "userlist": lambda: collections.UserList([4, 5]),
    "userstring": lambda: collections.UserString("12"),
    "function": len,
    "class": str,
    "awaitable": _awaitable,
    "without repr": Name,
    "step": lambda: Step(None),
    "score": lambda: Score(1.0),
    "floats": [4, 5.0],
    "one float": [5.0],
    "nans": [math.nan],
    "bools": [True, False],
    "texts": ["4", "5"],
    "bytes in a list": [b"4"],
    "nested": [[4, 5]],
    "nothings": [None],
    "complexes": [4j],
    "negative": [-1],
    "outside": [4, 100],
    "far outside": [2**70],
    "float array": np.array([4.0, 5.0]),
    "bool array": np.array([True]),
    "text array": np.array(["4"]),
    "square array": np.array([[4, 5]]),
    "array outside": np.array([100]),
    "float tensor": torch.tensor([4.0]),
    "bool tensor": torch.tensor([True]),
    "square tensor": torch.tensor([[4]]),
    "scalar tensor": torch.tensor(4),
    "message and id": [ASK, 4],
    "id and message": [4, ASK],
    "message and text": [ASK, "x"],
    "no role": [{"content": "x"}],
    "role of bytes": [{"role": b"user", "content": "x"}],
    "role of nothing": [{"role": None, "content": "x"}],
    "no content": [{"role": "user"}],
    "content of nothing": [{"role": "user", "content": None}],
    "content of a number": [{"role": "user", "content": 5}],
    "content of bytes": [{"role": "user", "content": b"x"}],
    "content of ids": [{"role": "user", "content": [4]}],
    "one message": dict(ASK),
    "empty mapping": {},
    "unknown mapping": {"said": "x"},
    "messages of text": {"messages": "x"},
    "messages and more": {"messages": [ASK], "more": 1},
    "request without messages": {"tools": []},
    "request of text": {"messages": "x", "tools": []},
    "tools of nothing": {**_AGENT, "tools": None},
    "tools of texts": {**_AGENT, "tools": ["add"]},
    "stop of text": {**_AGENT, "stop": "END"},
    "stop of a number": {**_AGENT, "stop": 5},
    "empty stop": {**_AGENT, "stop": [""]},
    "stop of numbers": {**_AGENT, "stop": [5]},
    "length of text": {**_AGENT, "max_new_tokens": "5"},
    "no length": {**_AGENT, "max_new_tokens": 0},
    "float length": {**_AGENT, "max_new_tokens": 5.0},
    "ids of text": {**_AGENT, "ids": "no"},
}

OBSERVATIONS = _cases(
    {
        "text": "12",
        "subclass": Text("12"),
        "turn": lambda: Turn("12", [4]),
        "numpy text": np.str_("12"),
        "empty text": "",
        "ids": [4, 5],
        "tuple": (4, 5),
        "no ids": [],
        "array": np.array([4, 5]),
        "bytes as ids": np.array([4, 5], dtype=np.uint8),
        "tensor": torch.tensor([4, 5]),
        "numpy ids": [np.int64(4), np.int32(5)],
        "tensor ids": [torch.tensor(4)],
        "last id": [99],
    },
    {**_NEVER_READ, "nothing": None, "surrogate": "\ud800", "turn that was not": {"messages": [{**ASK, "turn": 7}]}},
)
"""Of a step that is not done, to an episode whose prompt is text."""

PROMPTS = _cases(
    {"text": "12", "subclass": Text("12"), "ids": [4, 5], "tuple": (4, 5), "array": np.array([4]), "last id": [99]},
    {
        **_NEVER_READ,
        "nothing": None,
        "empty text": "",
        "no ids": [],
        "whole": {"messages": [ASK]},
        "surrogate": "\ud800",
    },
)

VERDICTS = _cases(
    {
        "float": 0.5,
        "int": 1,
        "true": True,
        "false": False,
        "numpy": np.float32(0.5),
        "numpy int": np.int64(1),
        "numpy bool": np.bool_(True),
        "array of none": np.array(0.5),
        "tensor": torch.tensor(0.5),
        "half": torch.tensor(0.5, dtype=torch.bfloat16),
        "bool tensor": torch.tensor(True),
        "fraction": Fraction(1, 2),
        "decimal": Decimal("0.5"),
        "largest": 3.4e38,
        "components": {"a": 0.5, "b": True},
        "tensor component": {"a": torch.tensor(0.5)},
        "score": lambda: Score(0.5, "parse_fail", {"a": 1}),
    },
    {
        "nothing": None,
        "text": "1",
        "words": "right",
        "empty text": "",
        "bytes": b"1",
        "bytearray": bytearray(b"1"),
        "memoryview": lambda: memoryview(b"1"),
        "complex": 1 + 0j,
        "nan": math.nan,
        "infinite": math.inf,
        "minus infinite": -math.inf,
        "too large": 1e39,
        "too large int": 10**400,
        "nan of numpy": np.float64("nan"),
        "nan of torch": torch.tensor(math.nan),
        "nan of decimal": Decimal("nan"),
        "signalling nan": Decimal("snan"),
        "complex tensor": torch.tensor(1j),
        "empty components": {},
        "empty list": [],
        "empty tuple": (),
        "empty array": np.array([]),
        "empty tensor": torch.tensor([]),
        "texts": ["1", "2"],
        "nested": [[1.0]],
        "nothings": [None, None],
        "square array": np.ones((2, 2)),
        "square tensor": torch.ones(1, 1),
        "set": {1.0},
        "generator": lambda: (x for x in (1.0,)),
        "iterator": lambda: iter([1.0]),
        "range": range(2),
        "deque": lambda: collections.deque([1.0]),
        "function": len,
        "class": float,
        "awaitable": _awaitable,
        "without repr": Name,
        "step": lambda: Step(None, 1.0),
        "text component": {"a": "1"},
        "no component": {"a": None},
        "nan component": {"a": math.nan},
        "infinite component": {"a": math.inf, "b": -math.inf},
        "list component": {"a": [1.0]},
        "several in a component": {"a": torch.ones(2)},
        "nested components": {"a": {"b": 1.0}},
        "numbered component": {0: 1.0},
        "nameless component": {"": 1.0},
        "named by bytes": {b"a": 1.0},
        "components that cancel": {"a": 3e38, "b": 3e38},
        "score of text": lambda: Score("1"),
        "score of nothing": lambda: Score(None),
        "score of components": lambda: Score({"a": 1.0}),
        "score of nan": lambda: Score(math.nan),
        "unknown status": lambda: Score(1.0, "fine"),  # type: ignore[arg-type]
        "status of nothing": lambda: Score(1.0, None),  # type: ignore[arg-type]
        "components of nothing": lambda: Score(1.0, components=None),  # type: ignore[arg-type]
        "components of a list": lambda: Score(1.0, components=[1.0]),  # type: ignore[arg-type]
        "component of text": lambda: Score(1.0, components={"a": "1"}),  # type: ignore[dict-item]
        "nan component of a score": lambda: Score(1.0, components={"a": math.nan}),
        "skipped": lambda: Score(status="skipped"),
        "failed": lambda: Score(1.0, "infra_error"),
    },
)
"""Where the others have one reward each."""

_BASE = Step(None, 1.0)

INFOS = _cases(
    {
        "none": {},
        "numbers": {"a": 1, "b": 0.5},
        "true": {"a": True},
        "tensor": {"a": torch.tensor(1.0)},
        "numpy": {"a": np.float32(1)},
        "nan": {"a": math.nan},
    },
    {
        "nothing": None,
        "list": [1.0],
        "pairs": [("a", 1.0)],
        "text": "a",
        "number": 5,
        "text value": {"a": "1"},
        "bytes": {"a": b"1"},
        "no value": {"a": None},
        "infinite": {"a": math.inf},
        "too large": {"a": 10**400},
        "complex": {"a": 1j},
        "list value": {"a": [1.0]},
        "tensor of two": {"a": torch.ones(2)},
        "mapping": {"a": {"b": 1.0}},
        "numbered": {0: 1.0},
        "nameless": {"": 1.0},
        "named by bytes": {b"a": 1.0},
        "function": len,
    },
)

DONES = _cases(
    {"true": True, "numpy": np.bool_(True), "tensor": torch.tensor(True), "one": 1},
    {
        "nothing": None,
        "text": "False",
        "no text": "",
        "number": 2,
        "float": 1.0,
        "list": [True],
        "empty": [],
        "tensor of two": torch.tensor([True, True]),
        "mapping": {"done": True},
        "awaitable": _awaitable,
    },
)

STEPS = _cases(
    {"step": _BASE},
    {
        "nothing": None,
        "number": 1.0,
        "text": "done",
        "tuple": (None, 1.0, True, None, {}),
        "list": [None, 1.0],
        "mapping": {"state": None, "reward": 1.0},
        "class": Step,
        "generator": lambda: (x for x in (_BASE,)),
        "steps": [_BASE],
        "score": lambda: Score(1.0),
    },
)


def _add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


RESETS = _cases(
    {"two": (0, "12"), "no tools": (0, "12", []), "no state": (None, "12")},
    {
        "nothing": None,
        "text": "12",
        "two letters": "ab",
        "three letters": "abc",
        "bytes": b"ab",
        "list": [0, "12"],
        "mapping of two": {0: 1, "12": 2},
        "set of two": {0, "12"},
        "one": (0,),
        "empty": (),
        "four": (0, "12", [], None),
        "number": 5,
        "tools of nothing": (0, "12", None),
        "tools of a number": (0, "12", 5),
        "tools of text": (0, "12", "ab"),
        "functions": (0, "12", [_add]),
        "one tool": lambda: (0, "12", tools.tool(_add)),
        "generator of tools": lambda: (0, "12", (tools.tool(each) for each in [_add])),
        "generator": lambda: (each for each in (0, "12")),
        "step": lambda: Step(0),
    },
)

GROUPS = _cases(
    {
        "list": [1.0, 0.0],
        "tuple": (1.0, 0.0),
        "array": np.array([1.0, 0.0]),
        "tensor": torch.tensor([1.0, 0.0]),
        "scores": lambda: [Score(1.0), Score(0.0)],
        "components": [{"a": 1.0}, {"a": 0.0}],
    },
    {
        "nothing": None,
        "number": 1.0,
        "one": [1.0],
        "three": [1.0, 0.0, 1.0],
        "text": "10",
        "bytes": b"10",
        "mapping": {0: 1.0, 1: 0.0},
        "set": {0.0, 1.0},
        "empty": [],
        "generator": lambda: (x for x in (1.0, 0.0)),
        "iterator": lambda: iter([1.0, 0.0]),
        "scalar": torch.tensor(1.0),
        "class": list,
    },
)
"""Of a group of two."""

WAYS: dict[str, list[Case]] = {
    "reset": RESETS,
    "prompt": PROMPTS,
    "observation": OBSERVATIONS,
    "reward": VERDICTS,
    "verdict": VERDICTS,
    "info": INFOS,
    "done": DONES,
    "step": STEPS,
}
"""Where a value comes in, by the task's ``"way"``, and which."""


def _everything() -> Environment:
    """Returns what the task says, in the way that it says."""

    def value(task: Any, way: str) -> Any:
        return WAYS[way][task["case"]].make()

    def reset(task: Any) -> Any:
        match task["way"]:
            case "reset":
                return value(task, "reset")
            case "prompt":
                return {**task, "turns": 0}, value(task, "prompt")
        return {**task, "turns": 0}, "1+1="

    def step(state: Any, turn: Turn) -> Any:
        if not isinstance(state, dict):
            return Step(state, 1.0)
        after = {**state, "turns": state["turns"] + 1}
        match state["way"]:
            case "observation":
                return Step(after, 1.0, done=after["turns"] == 2, observation=value(state, "observation"))
            case "reward":
                return Step(after, value(state, "reward"))
            case "info":
                return Step(after, 1.0, info=value(state, "info"))
            case "done":
                return Step(after, 1.0, done=value(state, "done"))
            case "step":
                return value(state, "step")
        return Step(after, 0.0 if state["way"] == "verdict" else 1.0)

    def verifier(task: Any, trace: Any) -> Any:
        return value(task, "verdict") if task["way"] == "verdict" else 0.0

    return Environment(reset, step, None, verifier)


EVERYTHING = _everything()


def _compared(task: Any, traces: Any) -> Any:
    return GROUPS[task["case"]].make()


compared = of_group(_compared)
