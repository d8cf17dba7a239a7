"""What tests of programs may do, which of them are mistakes, and which block of an answer is the program."""

from typing import Any

import attrs
import pytest

from nrl.envs import Score, Trace, code
from nrl.envs.library.code_blocks import program_of
from nrl.envs.library.code_tests import read_tests, same_lines
from nrl.envs.sandbox import Limits
from nrl.errors import EnvError

LIMITS = Limits(seconds=60.0, cpu_seconds=60.0)
verify: Any = code(limits=LIMITS)

PROGRAM = """
class Solution:
    def twice(self, a: List[int]) -> List[int]:
        return [2 * x for x in a]

class Point:
    def __init__(self, x, y): self.x, self.y = x, y
    def __add__(self, other): return Point(self.x + other.x, self.y + other.y)
    def __eq__(self, other): return (self.x, self.y) == (other.x, other.y)
    def __len__(self): return 2
    def __iter__(self): return iter((self.x, self.y))
    def __repr__(self): return f"Point({self.x}, {self.y})"
    def moved(self, by): return Point(self.x + by, self.y + by)

LIMIT = 3

def same(x): return x
def named(nums, target, what=0, self=0): return [nums, target, what, self]
def pair(): return (1, [2, (3, 4)])
def third(): return [0.1 + 0.2, {"a": 1 / 3}]
def count(n): yield from range(n)
def forever():
    n = 0
    while True:
        yield n
        n += 1
def apply(f, *args): return f(*args)
def fails(): raise ValueError("no")
def extend(queue): queue.append(9)
"""

CASE = "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(same(1), "

PASS = [
    "assert named(nums=[2], target=9, what=1, self=2) == [[2], 9, 1, 2]",
    "assert Solution().twice([1]) == [2]",
    "assert twice([1]) == [2]",
    "s = Solution()\nassert s.twice([1]) == [2] and s.twice([]) == []",
    "assert LIMIT == 3",
    "p = Point(1, 2)\nassert p.x == 1 and p.moved(2).y == 4 and len(p) == 2 and list(p) == [1, 2]",
    "assert Point(1, 2) == Point(1, 2) and (Point(1, 2) + Point(1, 1)).x == 2 and str(Point(1, 2)) == 'Point(1, 2)'",
    "p = Point(1, 2)\np.x = 5\nassert p.x == 5 and isinstance(p, Point) and 2 in p and 7 not in p",
    "assert pair() == [1, [2, [3, 4]]] and pair() == (1, [2, (3, 4)])",
    "assert third() == [0.3, {'a': 0.3333333333333333}]",
    "assert same(float('nan')) == float('nan') and same([1, float('nan')]) == [1, float('nan')]",
    "assert list(count(3)) == [0, 1, 2] and list(count(2)) == [0, 1] and sum(count(4)) == 6",
    "import itertools\nassert list(itertools.islice(forever(), 3)) == [0, 1, 2]",
    "g = forever()\nassert next(g) == 0 and next(g) == 1",
    "assert apply(lambda x: x + 1, 2) == 3 and apply(max, 2, 5) == 5 and apply(same, [1]) == [1]",
    "import datetime as d\nfor x in (d.date(2020, 1, 2), d.time(3), d.timedelta(1, 2)):\n    assert same(x) == x",
    "from decimal import Decimal as D\nassert same(D('1.10')) == D('1.10') and same(range(2)) == range(2)",
    "from fractions import Fraction as F\nassert same(F(1, 3)) == F(1, 3) and same([F(1)]) == [1]",
    "from collections import deque\nq = deque([1], 5)\nextend(q)\nassert q == deque([1, 9])",
    "assert same(-10 ** 20000) == -10 ** 20000 and same({10 ** 6000: 1}) == {10 ** 6000: 1}",
    "def test_same():\n    assert same(1) == 1",
    f"{CASE}1)",
    f"{CASE}1)\nunittest.main()",
    "try:\n    fails()\nexcept ValueError:\n    pass\nelse:\n    assert False",
]
FAIL = [
    "assert Solution().twice([1]) == [3]",
    "assert LIMIT == 4",
    "assert Point(1, 2) == Point(1, 3)",
    "assert Point(1, 2) == (1, 2)",
    "assert pair() == [1, [2, [3, 5]]]",
    "assert third()[0] == 0.3001",
    "assert not third() == [0.30000000000000004, {'a': 0.3333333333333333}]",
    "assert count(3) == [0, 1]",
    "assert count(3) == [0, 1, 2]",
    "assert count(3) == (0, 1, 2)",
    "assert same([1, 2]) == (1, 2)",
    "assert apply(lambda x: x + 1, 2) == 4",
    "assert same(10 ** 6000) == 10 ** 6000 + 1",
    "def test_same():\n    assert same(1) == 2",
    f"{CASE}2)",
    f"{CASE}2)\nunittest.main(argv=['x'], exit=False)",
    "fails()",
    "assert missing(1) == 1",
]


def passed(program: str, tests: list[Any], **options: Any) -> list[bool]:
    """Which tests a program passes."""
    found: list[bool] = []

    def kept(each: Any) -> float:
        found.extend(each)
        return 0.0

    code(limits=LIMITS, reward=kept, **options)({"tests": tests}, Trace("", [f"```python\n{program}\n```"]))
    return found


def test_tests_use_what_a_program_defines() -> None:
    assert passed(PROGRAM, PASS) == [True] * len(PASS)


def test_tests_fail_where_a_program_is_wrong() -> None:
    assert passed(PROGRAM, FAIL) == [False] * len(FAIL)


def test_an_object_decides_nothing_that_the_test_compares() -> None:
    """It is equal to, greater than and made of nothing of the test's own."""
    program = """
class Agreeable:
    def __getattr__(self, name): return Agreeable()
    for _name in "eq ne lt le gt ge sub rsub add radd contains".split():
        locals()[f"__{_name}__"] = lambda self, *other: True
    def __abs__(self): return 0
    def __sub__(self, other): return 0
    def __bool__(self): return True
    def __call__(self, *args): return Agreeable()
def add(a, b): return Agreeable()
def items(): return Agreeable()"""
    tests = ["assert add(1, 2) == 3", "assert 3 == add(1, 2)", "assert 2.9 < add(1, 2) < 3.1", "assert 3 in items()",
             "assert abs(add(1, 2) - 3) < 1e-6", "assert add(1, 2).value == 3", "assert add(1, 2)[0] == 3",
             "assert add(1, 2) in (3, 4)", "assert {3: 1}[add(1, 2)]", "assert min(add(1, 2), 3) == 3"]  # fmt: skip
    assert passed(program, tests) == [False] * len(tests)


FORGES = """
import os
for fd in range(64):
    try: os.write(fd, b'["callback", 0, ["list"]]\\n' * 9)
    except OSError: pass
def f(x): return x"""


def test_programs_call_nothing_of_a_test_but_what_it_gives() -> None:
    assert passed(FORGES, ["assert f(1) == 1"]) == [False]


@pytest.mark.parametrize(
    ("program", "test", "right"),
    [
        ("print(1 / 3)", {"stdin": "", "stdout": "0.333333"}, True),
        ("print(input())", {"input": 5, "output": 5}, True),
        ("print(input() + input())", {"stdin": ["1", "2"], "stdout": ["12"]}, True),
        ("print(5)", {"stdout": "5"}, True),
        ("print(5)", {"stdin": None, "stdout": 5.0}, True),
        ("print(repr(input()))", {"stdin": "a\r\n", "stdout": "'a'\r\n"}, True),
        ("print(10 ** 5000)", {"stdin": "", "stdout": "1" + "0" * 5000}, True),
        ("def f(x: Optional[int]) -> List[int]: return [x]\nprint(f(1))", {"stdout": "[1]"}, True),
        ("print(sys.argv)", {"stdout": "['main.py']"}, False),
        ("from __future__ import annotations\nimport sys\nprint(sys.argv)", {"stdout": "['main.py']"}, True),
        ("import sys\nprint(1)\nsys.exit(1)", {"stdout": "1"}, False),
    ],
)  # fmt: skip
def test_inputs_and_outputs_are_read_as_they_are_written(program: str, test: Any, right: bool) -> None:
    assert passed(program, [test]) == [right]


@pytest.mark.parametrize(
    ("found", "wanted", "same"),
    [
        ("0.333333", "0.333333333333", True),
        ("1.0", "1", True),
        ("1", "1.0", True),
        ("1e-7", "0", True),
        ("2.5e3 x", "2500.000 x", True),
        ("[0.30000000000000004, 1]", "[0.3, 1]", True),
        ("100000000000000000000.0", "100000000000000000000", True),
        ("0.33", "0.333333", False),
        ("1000001", "1000000", False),
        ("1000001.0", "1000000", False),
        ("1000000.4", "1000000", False),
        ("100000000000000000001.0", "100000000000000000000", False),
        ("007", "7", False),
        ("1.0", "-1.0", False),
        ("1.0 2", "1.0  2", False),
        ("v1.0.1", "v1.0.2", False),
        ("nan", "0.0", False),
        ("1e999999999", "1e999999998", False),
        ("1." + "0" * 1000, "1", False),
        ("a1.0", "a1", False),
    ],
)
def test_decimals_are_compared_as_numbers(found: str, wanted: str, same: bool) -> None:
    assert same_lines(found, wanted) == same


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na()\n```\nOutput:\n```\n3 4\n```", "a()\n"),
        ("```python\na()\n```\nOutput:\n```\n[1, 2]\n```", "a()\n"),
        ("```python\na()\n```\n```text\nb()\n```\n```bash\npython main.py\n```\n```json\n{}\n```", "a()\n"),
        ("```python\na()\n```\nBetter:\n```\nb()\n```", "b()\n"),
        ("```Python\na()\n```", "a()\n"),
        ("```python\ndef f(): pass\n```\nUse it:\n```python\nprint(f())\n```", "def f(): pass\n"),
        ("```python\ndef f(): 1\n```\nBetter:\n```python\ndef f(): 2\n```", "def f(): 2\n"),
        ("```python\nclass Solution: pass\n```\n```python\nSolution().f()\n```", "class Solution: pass\n"),
        ("```python\na()", "a()"),
        ("```python\na(", None),
        ("```bash\nls\n```", "ls\n"),
        ("no block", None),
    ],
)
def test_the_last_block_that_is_a_program_counts(text: str, program: str | None) -> None:
    assert program_of(text, {"f"}) == program


def test_a_block_that_a_limit_cut_is_no_program() -> None:
    task = {"tests": [{"stdout": "1"}]}
    assert verify(task, Trace("", ["```python\nprint(1)"])).reward == 1.0
    assert verify(task, Trace("", ["```python\nprint(1)"], truncated=True)) == Score(0.0, "parse_fail", {"passed": 0.0})
    assert verify(task, Trace("", ["<think>```python\nprint(1)\n```</think>No."])).status == "parse_fail"


ADD = "def add(a, b):\n    return a + b\n"


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ({"tests": ["assert add(1, 2) == 3"]}, None),
        ({"tests": ["assert add(1, 2) == 3", {"stdout": ""}], "solution": ADD}, None),
        ({"tests": ["assert add(1, 2) == 3"], "solution": f"So:\n```python\n{ADD}```\n"}, None),
        ({"tests": ["assert add(1, 2) == 3"], "solution": "One adds them."}, None),
        ({"tests": ["assert add(1, 2) == 3"], "solutions": ["def add(a, b): return 0", ADD]}, None),
        ({"tests": []}, "the task's 'tests' are []"),
        ({"tests": ["asert add(1, 2) == 3"]}, "(1, 2) == 3', cannot be used: it is no Python: invalid syntax"),
        ({"tests": [{"stdout": ""}, "assert add(1, 2) == 3 / 0"]},
         "test 1 of the task, 'assert add(1, 2) == 3 / 0', cannot be used: it d"),
        ({"tests": ["assert add(1, 2) == THREE"], "prompt": "Add."}, "it compares with THREE, which neither"),
        ({"tests": ["assert add(1, 2) == THREE"], "prompt": "THREE is 3."}, None),
        ({"tests": ["import nowhere\nassert add(1, 2) == 3"]}, "it imports nowhere, which the sandbox does not have"),
        ({"tests": ["assert add(1, 2) == 3", "assert add(1, 1) == 3"], "solution": ADD},
         "test 1 of the task, 'assert add(1, 1) == 3', is not passed by the task's own solution; mend the test"),
        ({"tests": [{"stdout": "4"}], "solution": "print(3)"}, "test 0 of the task, ('', '4'), is not passed by"),
        ({"tests": ["assert add(1, 2) == tree"], "solution": ADD}, "is not passed by the task's own solution"),
    ],
)  # fmt: skip
def test_tests_that_no_program_can_pass_are_found_before_the_run(task: dict[str, Any], reason: str | None) -> None:
    found = verify.check_task(task)
    assert (found is None) == (reason is None)
    assert reason is None or (found.startswith("code: ") and reason in found)


def test_a_wrong_answer_to_a_wrong_test_is_an_error_of_the_task() -> None:
    task = {"tests": ["assert add(1, 1) == 3"], "solution": ADD}
    with pytest.raises(EnvError, match="code: test 0 of the task, .* is not passed by the task's own solution"):
        verify(task, Trace("", [f"```python\n{ADD}```"]))
    mended = attrs.evolve(LIMITS, seconds=30.0)
    assert code(limits=mended)(
        {**task, "tests": ["assert add(1, 1) == 2"]}, Trace("", ["```\nadd = min\n```"])
    ) == Score(0.0, "ok", {"passed": 0.0})


@pytest.mark.parametrize(
    ("tests", "read"),
    [
        ('["assert f(1) == 1"]', ["assert f(1) == 1"]),
        ('[{"input": "1", "output": 2}]', [("1", "2")]),
        (['{"stdin": "1", "stdout": "2"}'], [("1", "2")]),
        ('{"inputs": ["1\\n", ["2", "3"]], "outputs": ["1", 5]}', [("1\n", "1"), ("2\n3", "5")]),
        ({"inputs": ["1"], "outputs": ["2"]}, [("1", "2")]),
        ('{"input": "1", "output": "2"}', [("1", "2")]),
        (["[1, 2] == f(2)", "{1: 2} == f(2)"], ["[1, 2] == f(2)", "{1: 2} == f(2)"]),
    ],
)
def test_tests_may_be_json(tests: Any, read: list[Any]) -> None:
    assert read_tests({"tests": tests}) == read


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ([{"stdout": "1"}, {"stdin": "1", "stdout": None}], "code: test 1 of the task is .*, whose 'stdout' is None"),
        ('[{"input": "1", "output": null}]', "code: test 0 of the task is .*, whose 'output' is None; give the text"),
        ('{"inputs": ["1"], "outputs": []}', "code: the task's 'tests' are .*; give a list with a test at least"),
        (
            '{"inputs": ["1"], "outputs": ["2"], "fn_name": "f"}',
            "code: test 0 of the task has the field 'fn_name', 'f'",
        ),
        ('["assert f(1)', "code: the task's 'tests' are .*; give a list with a test at least"),
    ],
)
def test_tests_that_want_nothing_are_refused(tests: Any, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        read_tests({"tests": tests})
    assert verify.check_task({"tests": tests})
