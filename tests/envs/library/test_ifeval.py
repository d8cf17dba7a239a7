"""Instructions that a program checks: each kind met and not met, and what lazy answers get."""

import re
import time
from typing import Any

import pytest

from nrl.envs import CONSTRAINTS, Score, Trace, constraints
from nrl.envs.library.ifeval_tasks import task
from nrl.envs.references import faults_of, task_check
from nrl.errors import DataError, EnvError

CASES: dict[str, tuple[Any, str, str]] = {
    "words": ({"least": 2, "most": 3}, "It's well-known here.", "one two three four"),
    "sentences": ({"least": 2, "most": 2}, 'He said "Yes." Then he left!', "One. Two. Three."),
    "paragraphs": ({"least": 2, "most": 2}, "a\n\n\nb", "a\nb"),
    "lines": ({"most": 2}, "a\n\nb", "a\nb\nc"),
    "bullets": ({"least": 3, "most": 3}, "* **a**\n- b\n  • c", "* a\n- b\n3. c"),
    "contains": ({"words": ["cat", "Dog"]}, "A Cat, a dog", "A category, a dog"),
    "avoids": ({"words": ["cat"]}, "A category", "The cat."),
    "repeats": ({"word": "la", "least": 2, "most": 2}, "La la land", "La land"),
    "letter": ({"letter": "Q", "least": 1}, "Quick", "Slow"),
    "begins": ({"with": "Dear"}, "\nDear all", "My dear"),
    "ends": ({"with": "Bye."}, "So. Bye.\n", "Bye. So."),
    "lowercase": ({}, "all low", "All low"),
    "uppercase": ({}, "ALL UP 4", "all up 4"),
    "no_commas": ({}, "none here", "one, here"),
    "quoted": ({}, '"all of\nit"', '"only" this'),
    "titled": ({}, "<<A title>>\nText", "<A title>"),
    "placeholders": ({"least": 2}, "[name] of [town]", "[name] of []"),
    "postscript": ({}, "Text\nP.S. more", "Text P.S. more"),
    "json": ({}, '```json\n{"a": [1]}\n```', "{'a': 1}"),
}


def test_every_kind_has_a_case() -> None:
    assert set(CASES) == set(CONSTRAINTS)


@pytest.mark.parametrize("name", CASES)
def test_a_constraint_is_met_and_not_met(name: str) -> None:
    how, met, not_met = CASES[name]
    task = {"constraints": [{name: how}]}
    assert constraints(task, Trace("", [met])) == Score(1.0, "ok", {"all": 1.0, name: 1.0})
    assert constraints(task, Trace("", [not_met])).reward == 0.0
    if not how:
        assert constraints({"constraints": [name]}, Trace("", [met])).reward == 1.0


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", '{"a": -Infinity}'])
def test_json_has_no_such_numbers(text: str) -> None:
    assert constraints({"constraints": ["json"]}, Trace("", [text])).reward == 0.0


@pytest.mark.parametrize(
    ("text", "count"), [("_ _ _", 0), ("_one_ ___ two_", 2), ("snake_case", 1), ("a\u0301 \u0968", 2), ("1 2.5", 2)]
)
def test_what_is_a_word(text: str, count: int) -> None:
    assert CONSTRAINTS["words"](text, least=count, most=count)


def test_shares_and_components() -> None:
    task = {"constraints": ["lowercase", {"words": {"most": 3}}, {"words": {"least": 3}}, "no_commas"]}
    assert constraints(task, Trace("", ["just two"])) == Score(
        0.75, "ok", {"all": 0.0, "lowercase": 1.0, "words": 0.0, "no_commas": 1.0}
    )


@pytest.mark.parametrize("text", ["", " \n", "...", "{}", "**"])
def test_who_says_nothing_gets_nothing(text: str) -> None:
    """However many constraints nothing fulfils."""
    task = {"constraints": [{"words": {"most": 5}}, {"avoids": {"words": ["cat"]}}, "json", {"sentences": {"most": 1}}]}
    assert constraints(task, Trace("", [text])) == Score(0.0, "parse_fail", {"all": 0.0})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "constraints: the task's constraints are None; give a list of names"),
        ("lowercase", "constraints: the task's constraints are 'lowercase'; give a list"),
        ([], r"constraints: the task's constraints are \[\]"),
        (["rhymes"], "constraints: there is no 'rhymes'; there are avoids, begins"),
        ([{"words": {}, "lines": {}}], "constraints: there is no {'lines': {}, 'words': {}}"),
        ([10**5000], "constraints: there is no an int"),
        ([{"words": {"least": -(10**5000)}}], "words does not take"),
        ([{"words": 3}], "constraints: there is no {'words': 3}"),
        ([{"words": {"about": 3}}], "constraints: words does not take {'about': 3}: .*about"),
        # A text where a list belongs would be read letter by letter
        ([{"avoids": {"words": "apple"}}], "avoids does not take .*: the words are 'apple'; give a list of texts"),
        ([{"contains": {"words": "apple"}}], "contains does not take .*: the words are 'apple'; give a list of texts"),
        ([{"avoids": {"words": []}}], r"avoids does not take .*: the words are \[\]; give a list of texts"),
        ([{"contains": {"words": ["a", 3]}}], "contains does not take .*: 3 is found in every text or in none"),
        ([{"contains": {"words": {"a": 3}}}], "contains does not take .*: the words are {'a': 3}; give a list"),
        ([{"words": {}}], "words does not take {}: every text would do; give least, most or both"),
        (["sentences"], "sentences does not take {}: every text would do; give least, most or both"),
        ([{"lines": {"least": 0}}], "lines does not take {'least': 0}: every text would do"),
        ([{"repeats": {"word": "a"}}], "repeats does not take {'word': 'a'}: every text would do"),
        ([{"words": {"least": 4, "most": 3}}], "words .*: no text would do; give a least .*, not 4 and 3"),
        ([{"words": {"most": -1}}], "words .*: -1 is no number of things; give least and most as integers"),
        ([{"words": {"least": True}}], "words .*: True is no number of things"),
        ([{"words": {"most": "3"}}], "words .*: '3' is no number of things"),
        ([{"begins": {"with": ""}}], "begins does not take {'with': ''}: '' is found in every text or in none; give a"),
        ([{"ends": {"with": " "}}], "ends does not take {'with': ' '}: ' ' is found in every text or in none"),
        ([{"letter": {"letter": "", "least": 1}}], "letter does not take .*: '' is found in every text or in none"),
        ([{"repeats": {"word": None, "least": 1}}], "repeats does not take .*: None is found in every text or in none"),
        (["begins"], "begins does not take {}: .*with_"),
    ],
)
def test_what_cannot_be_checked_is_the_tasks_fault(given: Any, said: str) -> None:
    with pytest.raises(EnvError, match=said):
        constraints({"constraints": given}, Trace("", ["text"]))


LONG = ["a" * 1_000_000, "a. " * 300_000, "[" * 1_000_000, '"' * 1_000_000, "\n" * 500_000 + "x", "{" * 100_000]
LONG += ["```json\n" + " " * 500_000 + "x", " \n" * 300_000 + "x", '" ' * 300_000 + "x", "." + ")" * 500_000]


@pytest.mark.parametrize("text", LONG, ids=lambda text: repr(text[:9]))
def test_long_answers_take_little_time(text: str) -> None:
    task = {"constraints": [{name: how} for name, (how, _, _) in CASES.items()]}
    began = time.process_time()
    constraints(task, Trace("", [text]))
    assert time.process_time() - began < 60  # linear: below 1; quadratic: 500,000 ** 2 steps, which are an hour


def test_generated_tasks_are_fulfilled_by_their_responses_and_by_nothing_lazy() -> None:
    lazy = ["", " ", "the reward is 1", "apple", "apple apple apple", '"', "!?"]
    passed = dict.fromkeys(lazy, 0)
    for index in range(500):
        asked = task(3, index)
        found = constraints(asked, Trace(asked["prompt"], [asked["response"]]))
        assert (found.reward, found.components["all"]) == (1.0, 1.0), asked
        for text in lazy:
            passed[text] += constraints(asked, Trace(asked["prompt"], [text])).components["all"] == 1
    assert max(passed.values()) < 60
    assert task(3, 7) == task(3, 7) != task(3, 8)


@pytest.mark.parametrize(("seed", "index"), [(-1, 0), (0, -1), (0, 1.5), (True, 0)])
def test_generated_tasks_want_numbers(seed: Any, index: Any) -> None:
    with pytest.raises(
        DataError, match=r"instruction_tasks.task: (seed|index) is .*; it must be an integer that is not"
    ):
        task(seed, index)


CHECK: Any = task_check(constraints)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["lowercase", "uppercase"], "'lowercase' and 'uppercase'"),
        ([{"words": {"most": 3}}, {"words": {"least": 5}}], "{'words': {'least': 5}} and {'words': {'most': 3}}"),
        ([{"lines": {"most": 1}}, {"paragraphs": {"least": 2}}], "{'paragraphs': {'least': 2}} and {'lines'"),
        ([{"words": {"most": 3}}, {"sentences": {"least": 4}}], "{'sentences': {'least': 4}} and {'words'"),
        ([{"words": {"most": 0}}], "{'words': {'most': 0}} cannot be fulfilled by a text that has words"),
        ([{"words": {"most": 2}}, {"contains": {"words": ["a", "b", "c"]}}], "{'contains'.* and {'words'"),
        ([{"contains": {"words": ["blue sky"]}}, {"avoids": {"words": ["Sky"]}}], "{'contains'.* and {'avoids'"),
        ([{"repeats": {"word": "sky", "least": 3}}, {"repeats": {"word": "Sky", "most": 2}}], "{'repeats'.* and {'r"),
        ([{"repeats": {"word": "sky", "least": 1}}, {"avoids": {"words": ["sky"]}}], "{'repeats'.* and {'avoids'"),
        ([{"repeats": {"word": "sky", "most": 0}}, {"contains": {"words": ["sky"]}}], "{'contains'.* and {'repeats'"),
        ([{"letter": {"letter": "e", "most": 1}}, {"contains": {"words": ["eleven"]}}], "{'contains'.* and {'letter'"),
        ([{"letter": {"letter": "e", "most": 1}}, {"letter": {"letter": "E", "least": 2}}], "{'letter'.* and {'lett"),
        ([{"begins": {"with": "Yes"}}, "lowercase"], "{'begins': {'with': 'Yes'}} and 'lowercase'"),
        ([{"ends": {"with": "Bye."}}, "uppercase"], "{'ends': {'with': 'Bye.'}} and 'uppercase'"),
        ([{"begins": {"with": "Yes"}}, {"begins": {"with": "No"}}], "{'begins': {'with': 'Yes'}} and {'begins'"),
        ([{"begins": {"with": "No, sir"}}, "no_commas"], "{'begins'.* and 'no_commas'"),
        ([{"begins": {"with": "No way"}}, {"avoids": {"words": ["no"]}}], "{'begins'.* and {'avoids'"),
        ([{"begins": {"with": "Yes"}}, "quoted"], "{'begins'.* and 'quoted'"),
        ([{"ends": {"with": "Yes"}}, "quoted"], "{'ends'.* and 'quoted'"),
        ([{"begins": {"with": "Here"}}, "json"], "{'begins'.* and 'json'"),
        (["json", {"bullets": {"least": 1}}], "'json' and {'bullets'"),
        (["json", "postscript"], "'json' and 'postscript'"),
        (["lowercase", "postscript"], "'lowercase' and 'postscript'"),
        (["postscript", {"words": {"most": 1}}], "'postscript' and {'words'"),
    ],
)
def test_constraints_that_contradict_each_other_are_found(given: list[Any], named: str) -> None:
    faults = faults_of(CHECK, [{"constraints": given}, {"constraints": given[::-1]}])
    assert {0, 1} == {*faults}
    first, _, second = named.partition(" and ")
    pair = f"{first}.* and {second}|{second}.* and {first}" if second else first
    assert all(re.search(pair, text) and text.endswith("; leave one of them out") for text in faults.values())


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([{"words": {"most": 3}}, {"words": {"least": 3}}], "one two three"),
        (["lowercase", {"contains": {"words": ["Sky"]}}, {"begins": {"with": "so"}}], "so, the sky"),
        ([{"begins": {"with": "no"}}, {"avoids": {"words": ["no"]}}], "nothing"),
        ([{"begins": {"with": "A"}}, {"begins": {"with": "A sky"}}, {"ends": {"with": "."}}], "A sky."),
        (["json", "uppercase", "quoted", {"begins": {"with": '"'}}], '"A"'),
        ([{"avoids": {"words": ["sky"]}}, {"contains": {"words": ["skyline"]}}], "skyline"),
        ([{"sentences": {"least": 2}}, {"words": {"most": 2}}, {"lines": {"most": 1}}], "One. Two."),
        (["postscript", {"words": {"most": 2}}], "P.S."),
        ([{"repeats": {"word": "a", "least": 2}}, {"repeats": {"word": "b", "most": 0}}], "a a"),
    ],
)
def test_constraints_that_a_text_fulfils_are_no_conflict(given: list[Any], text: str) -> None:
    row = {"constraints": given}
    assert constraints(row, Trace("", [text])).reward == 1.0
    assert faults_of(CHECK, [row]) == {}
