"""References in configurations: what they stand for, and what is told about those that lead nowhere."""

import pytest

from nrl.config._yaml import Word
from nrl.config.interpolation import interpolate, references
from nrl.errors import ConfigError


def test_a_reference_alone_keeps_the_type_of_its_value() -> None:
    given = {
        "a": {"n": 3, "x": 0.5, "on": True, "none": None, "list": [1, "${a.n}"]},
        "b": "${a}",
        "c": "${ a.list.1 }",
    }
    found = interpolate(given)
    assert found["b"] == {"n": 3, "x": 0.5, "on": True, "none": None, "list": [1, 3]}
    assert found["c"] == 3


def test_references_within_a_text_are_texts() -> None:
    given = {"n": 3, "on": True, "none": None, "text": "${n} ${on} ${none} \\${n} ${word}", "word": Word("1e5")}
    found = interpolate(given)
    assert found["text"] == "3 true null ${n} 1e5"
    assert interpolate({"n": 1, "word": Word("${n}0")})["word"] == Word("10")
    assert isinstance(interpolate({"n": 1, "word": Word("${n}0")})["word"], Word)


def test_references_are_followed_through_references() -> None:
    assert interpolate({"a": "${b.c}", "b": "${d}", "d": {"c": "${e}"}, "e": 7})["a"] == 7


def test_what_is_not_asked_for_may_be_wrong() -> None:
    assert interpolate({"a": 1, "b": "${gone}"}, ["a", "z"]) == {"a": 1}


def test_more_is_asked_for_names_that_nothing_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interpolate({"a": "${key}"}, fallback={"key": "value"}.get) == {"a": "value"}
    monkeypatch.setenv("NRL_TEST_SOME", "5")
    given = {"a": "${oc.env:NRL_TEST_SOME}", "b": "${oc.env:NRL_TEST_NONE, 6}", "c": "x${oc.env:NRL_TEST_SOME}"}
    assert interpolate(given) == {"a": Word("5"), "b": Word("6"), "c": "x5"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"a": "${a}"}, "a: ${a} leads back to itself: a -> a; give one of them a value"),
        ({"a": "${b}", "b": "x${c}", "c": "${a}"}, "leads back to itself: a -> b -> c -> a;"),
        ({"a": {"b": "${a}"}}, "a.b: ${a} leads back to itself: a -> a;"),
        ({"a": {"b": "${a.b.c}"}}, "leads back to itself"),
        ({"a": "${a.b}"}, "a: ${a.b} leads back to itself"),
        ({"a": "${key}"}, "a: ${key}: there is no key; give key=VALUE, or key: VALUE in env.yaml, or the environment "),
        ({"a": "${key}"}, "variable KEY"),
        ({"a": ["${b.c}"], "b": {}}, "a.0: ${b.c}: there is no b.c; give b.c=VALUE, or add it to the file"),
        ({"a": "${b.c}"}, "a: ${b.c}: there is no b; give b.c=VALUE"),
        ({"a": "${b.2}", "b": [1]}, "a: ${b.2}: there is no b.2"),
        ({"a": "${oc.env:NRL_TEST_NONE}"}, "there is no environment variable NRL_TEST_NONE; set it"),
        ({"a": "${.b}"}, "a: ${.b} is no reference; write the full path of a key"),
        ({"a": "${oc.select:b}"}, "is no reference"),
        ({"a": "x${b}", "b": {}}, "a: ${b} is a mapping, which cannot stand within a text; refer to one of its values"),
        ({"a": "x${b}", "b": []}, "is a list, which"),
        ({"a": {"b": "???"}}, "a.b: the file leaves it open (???); give it, as a.b=VALUE"),
    ],
)
def test_mistakes_are_told(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        interpolate(values)
    assert message in str(error.value)


def test_references_of_all_kinds_are_found() -> None:
    given = {"a": ["${b.c}", {"d": "${e}${f}"}], "g": "${oc.env:H}", "i": "\\${j}", "k": 3}
    assert references(given) == {"b", "e", "f"}


def test_defaults_of_variables_may_be_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECOND", "b")
    values = {"a": "${oc.env:FIRST_UNSET,${oc.env:SECOND}}/x", "c": "${oc.env:FIRST_UNSET,${d}}", "d": 3}
    assert interpolate(values) == {"a": "b/x", "c": "3", "d": 3}
    with pytest.raises(ConfigError, match=r"a: \$\{env:X\} is no reference; write \$\{oc.env:X\} for an environment"):
        interpolate({"a": "${env:X}"})
