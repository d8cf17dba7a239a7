"""Values as JSON has them: whatever is promised to travel arrives as it was."""

import collections
import enum
import json
import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nrl.errors import EnvError
from nrl.gym.http.json_codec import TAG, sendable, value_of

TEXTS = st.text() | st.text(st.characters(categories=["Cs", "Lu"])) | st.sampled_from([TAG, "value", ""])
"""Also with lone surrogates."""
LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | TEXTS | st.binary()
KEYS = TEXTS | st.integers(-9, 9) | st.tuples(st.integers(0, 9), TEXTS) | st.none()


def within(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner)


VALUES = st.recursive(LEAVES, within, max_leaves=20)


def same(a: Any, b: Any) -> bool:
    """Equal, of the same types, NaN and signed zeros too, in the same order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return bool(a.hex() == b.hex())
    if isinstance(a, dict):
        return same([list(item) for item in a.items()], [list(item) for item in b.items()])
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@given(VALUES)
def test_what_is_sent_arrives_as_it_was(value: Any) -> None:
    sent = msgspec.json.encode(sendable(value, "it"))
    assert same(value_of(msgspec.json.decode(sent)), value)
    assert json.loads(sent) == json.loads(msgspec.json.encode(msgspec.json.decode(sent)))  # any client reads it


@pytest.mark.parametrize("value", [{"a": [1, "x", None, 2.5, True]}, [], {}, "ä", {"ä": "€"}])
def test_what_json_has_is_sent_as_it_is(value: Any) -> None:
    assert sendable(value, "it") == value
    assert TAG not in json.dumps(sendable(value, "it"))


class Color(enum.IntEnum):
    RED = 3


class Word(str):
    __slots__ = ()


class Half(float):
    __slots__ = ()


Point = collections.namedtuple("Point", "x y")


class Only(Mapping[str, int]):
    def __getitem__(self, key: str) -> int:
        return {"a": 1}[key]

    def __iter__(self) -> Any:
        return iter("a")

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (np.arange(3), [0, 1, 2]),
        (torch.tensor([[1.5, math.inf]]), [[1.5, math.inf]]),
        (np.float32(0.5), 0.5),
        (torch.tensor(7), 7),
        (Color.RED, 3),
        (Word("w"), "w"),
        (Half(0.5), 0.5),
        (Only(), {"a": 1}),
        (collections.OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
    ],
)
def test_what_is_almost_a_value_arrives_as_one(given: Any, found: Any) -> None:
    assert same(value_of(json.loads(msgspec.json.encode(sendable(given, "it")))), found)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, {"b": object()}]}, r"the task has an object at \['a'\]\[1\]\['b'\], which cannot be sent; give"),
        (object(), "the task has an object at its root"),
        ({1, 2}, "the task has a set at its root"),
        (Point(1, 2), "the task has a Point at its root"),
        ({"x": (1, 2j)}, r"the task has a complex at \['x'\]\[1\]"),
    ],
)
def test_what_cannot_be_sent_is_named_with_its_place(value: Any, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        sendable(value, "the task")


def test_what_contains_itself_is_told() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(EnvError, match="the task is nested too deeply, or contains itself; give something flatter"):
        sendable(value, "the task")


@pytest.mark.parametrize(
    "given",
    [
        {TAG: "tuple"},
        {TAG: "tuple", "value": 3},
        {TAG: "code", "value": "x"},
        {TAG: ["tuple"], "value": []},
        {TAG: "float", "value": "1e9"},
        {TAG: "bytes", "value": "not base 64"},
        {TAG: "text", "value": "_w=="},
        {TAG: "map", "value": [1]},
        {TAG: "map", "value": [[[], 1]]},
        {"a": [{TAG: None, "value": 1}]},
    ],
)
def test_a_tag_that_says_nothing_is_an_error(given: Any) -> None:
    with pytest.raises(ValueError, match="is no value; see nrl.gym.http.json_codec"):
        value_of(given)
