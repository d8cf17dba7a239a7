"""Tasks and scores of reasoning-gym: the same everywhere, and nothing for junk."""

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import time
from typing import Any

import pytest

import nrl
from benchmarks.reasoning_audit import ALSO_RIGHT, Finding, audit, table
from benchmarks.reasoning_shapes import shapes
from nrl.envs import Score, Trace, extractor, single_turn
from nrl.envs.library.reasoning.scorer_worker import LONGEST
from nrl.envs.library.reasoning.scorers import EXACT, MENDED, formula
from nrl.envs.library.reasoning.tasks import datasets, reasoning_gym, stated_answer, task
from nrl.envs.pool.fork_worker import Crashed, Fork, Late
from nrl.errors import EnvError

UNREAD = Score(0.0, "parse_fail")
SUM = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


@pytest.fixture(scope="module")
def verify() -> Any:
    return nrl.reasoning_gym("chain_sum", SUM, workers=1)


def ask(verifier: Any, given: Any, response: str) -> Score:
    found: Score = asyncio.run(verifier(given, Trace(given.get("prompt", ""), [response])))
    return found


# --- tasks


def test_a_task_is_a_sum_whose_answer_is_its_value(verify: Any) -> None:
    for index in range(50):
        found = verify.tasks(3, index)
        first, sign, second = re.fullmatch(r".*: (\d) ([+-]) (\d) =", found["prompt"], re.DOTALL).groups()  # type: ignore[union-attr]
        assert int(found["answer"]) == int(first) + (1 if sign == "+" else -1) * int(second)
        assert json.loads(json.dumps(found)) == found


def test_tasks_do_not_depend_on_the_order_in_which_they_are_asked_for() -> None:
    forth = [task(7, index, dataset="isomorphic_strings") for index in range(6)]
    other: Any = nrl.pooled(reasoning_gym_task, workers=1, executable="gym", timeout=120)
    back = [asyncio.run(other({"index": index}, Trace())) for index in reversed(range(6))]
    assert forth == back[::-1]


def reasoning_gym_task(given: Any, trace: Any) -> Any:
    return task(7, given["index"], dataset="isomorphic_strings")


def test_seeds_have_nothing_in_common() -> None:
    numbers = [{task(seed, index)["reasoning_gym"]["number"] for index in range(40)} for seed in (0, 1)]
    assert len(numbers[0]) == 40
    assert not numbers[0] & numbers[1]


def test_several_datasets_are_mixed_by_weight() -> None:
    config = {"spell_backward": {"max_word_len": 4}}
    found = [task(0, i, dataset={"chain_sum": 3, "spell_backward": 1, "maze": 0}, config=config) for i in range(400)]
    names = [each["reasoning_gym"]["dataset"] for each in found]
    assert set(names) == {"chain_sum", "spell_backward"}
    assert 70 < names.count("spell_backward") < 130
    assert all(len(each["answer"]) <= 4 for each, name in zip(found, names, strict=True) if name == "spell_backward")


def test_a_suffix_stands_behind_the_question() -> None:
    assert task(0, 0, suffix=" Tell me.")["prompt"] == task(0, 0)["prompt"] + " Tell me."


def test_tasks_are_made_where_an_event_loop_runs() -> None:
    async def within() -> Any:
        return task(11, 0)

    assert asyncio.run(within()) == task(11, 0)


def test_known_answers_of_rows_without_one() -> None:
    assert json.loads(task(0, 0, dataset="graph_color")["answer"])
    assert "answer" not in task(0, 0, dataset="rush_hour")


def test_it_is_named_with_options_on_a_command_line() -> None:
    options = {"dataset": "chain_sum", "config": SUM, "workers": 1}
    made = nrl.environments({"reasoning_gym": options})
    drawn = made.tasks(seed=5).take(3)
    assert [each["prompt"] for each in drawn] == [task(5, i, config=SUM)["prompt"] for i in range(3)]
    assert ask(made.graded, drawn[0], drawn[0]["answer"]) == Score(1.0)
    assert ask(made.graded, drawn[0], "77") == Score(0.0)


# --- scores


def test_where_the_answer_is() -> None:
    for response, answer in [
        ("4", "4"),
        ("<think>3</think> 4 ", "4"),
        ("<answer>3</answer> or <answer> 4\n</answer>", "4"),
        ("<answer>4</answer> <answer>", "4"),
        ("4</answer>", "4</answer>"),
        ("<answer></answer>", None),
        ("<think>4</think>", None),
        ("", None),
    ]:
        assert stated_answer(response) == answer
    found = extractor(nrl.reasoning_gym())
    assert found is not None
    assert found("<answer>4</answer>") == "4"


def test_right_wrong_and_nothing(verify: Any) -> None:
    found = verify.tasks(0, 0)
    assert ask(verify, found, found["answer"]) == Score(1.0)
    assert ask(verify, found, f"<answer>{found['answer']}</answer>") == Score(1.0)
    assert ask(verify, found, "77") == Score(0.0)
    assert ask(verify, found, "") == UNREAD
    assert ask(verify, found, "7" * (LONGEST + 1)) == UNREAD
    assert single_turn(verify).timeout is None


def test_a_part_of_the_reward_is_left_out_on_request(verify: Any) -> None:
    found, whole = verify.tasks(0, 0), nrl.reasoning_gym(partial=False, workers=1)
    response = f"{found['answer']} or another number"
    assert 0 < ask(verify, found, response).reward < 1
    assert ask(whole, found, response) == Score(0.0)
    assert ask(whole, found, found["answer"]) == Score(1.0)


def test_what_a_model_wrote_is_not_run(verify: Any) -> None:
    """reasoning-gym's own scorers would run it; then these would end their process, or take for ever."""
    for name in ("spiral_matrix", "n_queens", "countdown", "simple_integration"):
        found = task(0, 0, dataset=name)
        for answer in ("__import__('os')._exit(0)", "[0 for _ in iter(int, 1)]", "().__class__", "9**9**9**9"):
            assert ask(verify, found, answer).reward < 0.1


def test_four_other_numbers_that_make_24_are_wrong(verify: Any) -> None:
    rows = [task(0, index, dataset="puzzle24") for index in range(6)]
    first, other = next((a, b) for a in rows for b in rows if sorted(a["answer"]) != sorted(b["answer"]))
    assert ask(verify, first, other["answer"]) == UNREAD
    assert ask(verify, first, f"({first['answer']})").reward == 1.0


@pytest.mark.parametrize(
    "change", [lambda each: "NaN", lambda each: each + 0.9, lambda each: each - 0.9, lambda each: each + 1e-3]
)
def test_sorted_numbers_are_those_of_the_row(verify: Any, change: Any) -> None:
    for index in range(4):
        found = task(0, index, dataset="number_sorting")
        numbers = [float(each) for each in json.loads(found["answer"].replace("'", '"'))]
        assert ask(verify, found, json.dumps(numbers)).reward == 1.0
        assert ask(verify, found, json.dumps([change(each) for each in numbers])).reward == 0.0


def test_24_and_a_half_is_not_24() -> None:
    right, row = MENDED["puzzle24"].right, {"metadata": {"numbers": [4, 7, 10, 3]}}
    assert not right("(4*7) - (10/3)", row)  # 24.67
    assert not right("(7*7)/(6-4)", row)  # 24.5
    assert right("(7 - 3)*(10 - 4)", row)
    assert right("-(4 - 28)", row)
    with pytest.raises(ValueError, match="none of the four operators"):
        right("2**4 + 8", row)


def test_four_numbers_that_make_almost_24_are_wrong(verify: Any) -> None:
    row = next(each for i in range(20) if (each := task(0, i, dataset="puzzle24")) and almost_24(each["answer"]))
    assert ask(verify, row, str(almost_24(row["answer"]))).reward == 0.01
    assert ask(verify, row, f"({row['answer']})").reward == 1.0


def almost_24(answer: str) -> str | None:
    """The same numbers in an expression that makes more than 24 and less than 25."""
    for numbers in itertools.permutations(re.findall(r"\d+", answer)):
        for signs in itertools.product("*/-+", repeat=3):
            a, b, c, d = numbers
            p, q, r = signs
            text = f"(({a} {p} {b}) {q} {c}) {r} {d}"
            with contextlib.suppress(ZeroDivisionError):
                if 24 < eval(text) < 25:
                    return text
    return None


def test_more_words_than_were_to_be_sorted_are_not_right(verify: Any) -> None:
    found = task(0, 0, dataset="word_sorting")
    assert ask(verify, found, found["answer"] + ", zoo").reward == 0.8
    assert ask(verify, found, found["answer"] + ", " + found["answer"]).reward == 0.8
    assert ask(verify, found, found["answer"].replace(", ", ",")).reward == 1.0


def _more(text: str) -> str:
    return json.dumps([*json.loads(text), json.loads(text)[-1]])


@pytest.mark.parametrize(
    ("dataset", "wrong", "most"),
    [
        ("fraction_simplification", lambda text: f"{text} other", 0.0),
        ("cryptarithm", lambda text: text[:2] + "0," + text, 0.0),
        ("game_of_life", _more, 0.8),
        ("game_of_life", lambda text: json.dumps([[*each, 1] for each in json.loads(text)]), 0.8),
        ("graph_color", lambda text: json.dumps({**json.loads(text), "other": 1}), 0.01),
        ("gsm_symbolic", lambda text: f"not {text}", 0.0),
        ("gsm_symbolic", lambda text: f"-{text}", 0.0),
        ("kakurasu", lambda text: f"{text} or not", 0.0),
        ("kakurasu", lambda text: text.replace("1", "1.9"), 0.0),
        ("knights_knaves", lambda text: f"not {text}", 0.8),
        ("knights_knaves", lambda text: f"{text} {text}", 0.8),
        ("palindrome_partitioning", _more, 0.0),
        (
            "pool_matrix",
            lambda text: "\n".join(" ".join(str(float(x) * 1.009) for x in y.split()) for y in text.split("\n")),
            0.1,
        ),
        ("rubiks_cube", lambda text: f"{text} 77", 0.0),
        ("rubiks_cube", lambda text: f"1a2, {text}", 0.0),
        ("survo", lambda text: f"not {text}", 0.0),
    ],
)
def test_what_a_scorer_would_pass_over_is_read(verify: Any, dataset: str, wrong: Any, most: float) -> None:
    for index in range(3):
        found = task(0, index, dataset=dataset)
        assert ask(verify, found, wrong(found["answer"])).reward <= most


def test_a_point_has_two_numbers(verify: Any) -> None:
    rows = (task(0, index, dataset="advanced_geometry") for index in range(40))
    found = next(each for each in rows if each["answer"].startswith("("))
    assert ask(verify, found, f"{found['answer']}, 77").reward == 0.0
    assert ask(verify, found, found["answer"].strip("()")).reward == 1.0


@pytest.mark.parametrize(
    ("dataset", "other"),
    [
        ("fraction_simplification", lambda text: "/".join(re.findall(r"\d+", text))),
        ("cryptarithm", lambda text: ", ".join(reversed(text.split(",")))),
        ("game_of_life", lambda text: json.dumps(json.loads(text), indent=1)),
        ("graph_color", lambda text: json.dumps(json.loads(text), indent=1)),
        ("gsm_symbolic", lambda text: f"${text}.00"),
        ("kakurasu", lambda text: text.replace(" ", "")),
        ("knights_knaves", lambda text: " and ".join(reversed(text.rstrip(".").split(", and ")))),
        ("palindrome_partitioning", lambda text: json.dumps(json.loads(text)[::-1])),
        (
            "pool_matrix",
            lambda text: "\n".join(" ".join(f"{float(x):.2f}" for x in y.split()) for y in text.split("\n")),
        ),
        ("rubiks_cube", lambda text: text.replace(" ", "\n")),
        ("survo", lambda text: text.replace(" ", "  ")),
    ],
)
def test_the_right_answer_in_another_notation_stays_right(verify: Any, dataset: str, other: Any) -> None:
    for index in range(3):
        found = task(0, index, dataset=dataset)
        assert ask(verify, found, other(found["answer"])).reward == 1.0


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("2240*x**3 + 3584*x**2 - 896*x", True),
        ("sqrt(x)*exp(-x)/3 + C", True),
        ("(8 - 5)*10 - 6", True),
        ("2**1000", True),
        ("x**x", True),
        ("2**10**5", False),
        ("(2**4000)**4000", False),
        ("x.y", False),
        ("f'(x)", False),
        ("x[0]", False),
        ("lambda: 1", False),
        ("gamma(3)", False),
        ("1 +", False),
        ("1" + "+1" * 1000, False),
        ("x_1", False),
    ],
)
def test_formulas(text: str, good: bool) -> None:
    assert formula(text) == good


# --- the audit


@pytest.mark.slow
def test_the_audit_of_some() -> None:
    names = [
        "game_of_life_halting",
        "prime_factorization",
        "complex_arithmetic",
        "puzzle24",
        "gsm_symbolic",
        "quantum_lock",
        "number_sorting",
        "word_sorting",
    ]
    found = audit(names, rows=2, workers=2)
    assert [each for each in found if not each.good or each.hedged >= 1.0] == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_audit_of_all() -> None:
    found = audit(datasets(), rows=4)
    assert len(found) == 105
    assert [each for each in found if not each.good or each.hedged >= 1.0] == []
    assert max(each.longest for each in found) < LONGEST / 2


def test_what_is_mended_exists() -> None:
    assert MENDED.keys() | EXACT.keys() | ALSO_RIGHT.keys() <= set(datasets())


@pytest.mark.parametrize(
    ("reference", "kind", "answer"),
    [
        ("['1.5', '2.0']", "numbers: NaN", "['NaN', 'NaN']"),
        ("['1.5', '2.0']", "list: NaN", "[NaN, NaN]"),
        ("['1.5', '2.0']", "numbers: 0.9 less", "['0.6', '1.1']"),
        ("5", "numbers: 0.9 more", "5.9"),
        ("5", "numbers: negated", "-5"),
        ("7 - 4 - 1", "expression: near, 0", "((7 / 4) * 1)"),
        ("[[1, 2], [3, 4]]", "rows: longer", "[[1, 2, 2], [3, 4, 4]]"),
        ("[[1, 2], [3, 4]]", "list: one more", "[[1, 2], [3, 4], [3, 4]]"),
        ("b, a", "a word behind, comma", "b, a, other"),
        ("Ann is a knight", "not", "not Ann is a knight"),
        ("1 0\n0 1", "lines: longer", "1 0 0\n0 1 1"),
        ('{"0": 1, "1": 2}', "mapping: one value", '{"0": 1, "1": 1}'),
    ],
)
def test_shapes_of_wrong_answers(reference: str, kind: str, answer: str) -> None:
    found = list(shapes(reference))
    assert (kind, answer) in found
    assert reference not in [each for _, each in found]


def test_a_fault_is_in_the_table() -> None:
    bad = Finding("maze", 0.5, 1.0, ("0",), 1.0, 1.0, ("x (ValueError)",), 3.0, False, 3)
    assert not bad.good
    assert table([bad], 2).splitlines()[-1] == (
        "| `maze` | 0.5 | 1 | 1 | 1 | 3.0 | passed: 0; failed: x (ValueError); rows differ |"
    )


# --- errors


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dataset": "chain_sums"}, "there is no dataset 'chain_sums'; there are chain_sum"),
        (
            {"config": {"terms": 2}},
            r"chain_sum rejects the options \{'terms': 2\} .* it has allow_negation, max_digits",
        ),
        ({"config": {"min_terms": 0}}, r"rejects the options .*min_terms must be positive"),
        ({"dataset": {"maze": -1}}, "dataset is {'maze': -1}; give a name, or several with weights"),
        ({"dataset": {}}, "dataset is {}; give a name, or several with weights"),
        ({"dataset": {"maze": 1, "lcm": 1}, "config": {"n": 1}}, "config has n, and the datasets are maze, lcm; where"),
        (
            {"executable": "system"},
            r"has no reasoning-gym \(No module named 'reasoning_gym'\); use executable='gym', or",
        ),
    ],
)
def test_tasks_that_cannot_be_made(given: Any, said: str) -> None:
    with pytest.raises(EnvError, match=f"^reasoning_gym: .*{said}"):
        task(0, 0, **given)


def test_a_seed_that_is_none() -> None:
    with pytest.raises(EnvError, match=r"^reasoning_gym: seed is -1; it must be an integer that is not negative$"):
        task(-1, 0)
    with pytest.raises(EnvError, match=r"^reasoning_gym: index is 0\.5; it must be an integer"):
        task(0, 0.5)  # type: ignore[arg-type]


def test_verifiers_that_cannot_be_made() -> None:
    for timeout in (0, -1.0, None, "2", True, float("nan"), float("inf")):
        with pytest.raises(
            ValueError, match=rf"^reasoning_gym: timeout is {timeout!r}; give seconds, more than 0: each"
        ):
            reasoning_gym(timeout=timeout)  # type: ignore[arg-type]
    with pytest.raises(EnvError, match=r"^reasoning_gym: dataset is \{\}; give a name"):
        reasoning_gym({})


def test_tasks_of_others(verify: Any) -> None:
    with pytest.raises(EnvError, match=r"^reasoning_gym: the task has no 'reasoning_gym' with a .*only 'prompt'"):
        ask(verify, {"prompt": "1 + 1 ="}, "2")
    found = verify.tasks(0, 0)
    with pytest.raises(EnvError, match=r"^reasoning_gym: the task's answer is '99', but row \d+ of chain_sum has "):
        ask(verify, found | {"answer": "99"}, "2")


def test_rows_without_an_answer(verify: Any) -> None:
    """Where there may be no letter, there is nothing to find."""
    with pytest.raises(EnvError, match=r"^reasoning_gym: string_insertion rejects|made 100 rows whose answer is empty"):
        task(0, 0, dataset="string_insertion", config={"min_string_length": 0, "max_string_length": 0})


# --- forks


def test_a_fork_answers_and_what_it_raises_is_none() -> None:
    fork = Fork(lambda n: 10 // n)
    assert [fork.ask(n, 10.0) for n in (2, 0, 5)] == [5, None, 2]
    fork.end()


def test_a_fork_that_is_late_is_killed_and_another_takes_its_place() -> None:
    fork = Fork(lambda n: n if n < 9 else 9**9**n)
    with pytest.raises(Late):
        fork.ask(9, 0.5)
    assert fork.ask(3, 10.0) == 3
    fork.end()


def test_a_fork_that_sleeps_was_not_busy() -> None:
    fork = Fork(time.sleep)
    with pytest.raises(Late) as late:
        fork.ask(60, 0.3)
    assert not late.value.busy(0.3)
    fork.end()


def test_a_fork_that_crashes_says_by_what() -> None:
    fork = Fork(lambda n: os.kill(os.getpid(), n))
    with pytest.raises(Crashed) as crashed:
        fork.ask(signal.SIGUSR1, 10.0)
    assert crashed.value.signal == signal.SIGUSR1


def test_a_fork_has_no_more_memory_than_it_may() -> None:
    fork = Fork(lambda n: len(bytearray(n)), memory=1 << 28)
    assert fork.ask(1 << 30, 10.0) is None
    assert fork.ask(1 << 20, 10.0) == 1 << 20
    fork.end()


def test_a_fork_serves_its_time() -> None:
    fork = Fork(lambda _: os.getpid(), most=2)
    first, second, third = (fork.ask(None, 10.0) for _ in range(3))
    assert first == second != third
    fork.end()


def test_requests_that_belong_together_have_one_fork() -> None:
    fork = Fork(lambda _: os.getpid(), most=3)
    found = list[int]()
    for _ in range(2):
        fork.ready(2)
        found += [fork.ask(None, 10.0) for _ in range(2)]
    assert found[0] == found[1] != found[2] == found[3]
    fork.end()


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_request_without_time_is_late(seconds: float) -> None:
    fork = Fork(time.sleep)
    with pytest.raises(Late):
        fork.ask(60, seconds)
    fork.end()
