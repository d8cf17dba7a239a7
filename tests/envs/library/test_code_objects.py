"""Tests of a task that use objects, classes, exceptions, outputs and coroutines of a program in another process."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nrl.envs import Trace, code
from nrl.envs.library.code_tests import fault_of_reach, solutions_of
from nrl.envs.sandbox import Limits
from nrl.errors import EnvError
from tests.envs.library.program_calls import MORE_TESTS, OTHER_PROGRAM, PROGRAM, TESTS

LIMITS = Limits(seconds=60.0, cpu_seconds=60.0)
verify: Any = code(limits=LIMITS)

ONE_PROCESS = """
import asyncio, json, sys, typing, unittest
from types import ModuleType
program, tests, nodes = json.load(sys.stdin)
failed = []
for number, test in enumerate(tests):
    module = sys.modules["program"] = ModuleType("program")
    names = module.__dict__
    exec(f"from typing import *\\n{nodes}", names)
    exec(program, names)
    defined, names["__name__"] = set(names), "test"
    stdout, stdin = sys.stdout, sys.stdin
    try:
        exec(compile(test, "test.py", "exec"), names)
        for name, value in list(names.items()):
            if name not in defined and isinstance(value, type) and issubclass(value, unittest.TestCase):
                cases = unittest.defaultTestLoader.loadTestsFromTestCase(value)
                assert unittest.TextTestRunner(stream=sys.stderr).run(cases).wasSuccessful()
            elif name not in defined and name.startswith("test"):
                returned = value()
                if asyncio.iscoroutine(returned):
                    asyncio.run(returned)
    except Exception as error:
        failed.append([number, repr(error)])
    sys.stdout, sys.stdin = stdout, stdin
print("\\n" + json.dumps(failed))
"""


def passed(program: str, tests: list[Any]) -> list[bool]:
    """Which tests a program passes."""
    results: list[bool] = []

    def keep(passed: Any) -> float:
        results.extend(passed)
        return 0.0

    code(limits=LIMITS, reward=keep)({"tests": tests}, Trace("", [f"```python\n{program}\n```"]))
    return results


@pytest.mark.parametrize(("program", "tests"), [(PROGRAM, TESTS), (OTHER_PROGRAM, MORE_TESTS)], ids=["one", "other"])
def test_tests_mean_what_they_mean_within_one_process(program: str, tests: list[str]) -> None:
    results = passed(program, tests)
    assert [test for test, result in zip(tests, results, strict=True) if not result] == []


@pytest.mark.parametrize(("program", "tests"), [(PROGRAM, TESTS), (OTHER_PROGRAM, MORE_TESTS)], ids=["one", "other"])
def test_these_tests_hold_within_one_process(program: str, tests: list[str]) -> None:
    from nrl.envs.inside.calls import NODES

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ONE_PROCESS],
        input=json.dumps([program, tests, NODES]), capture_output=True, text=True, check=True, cwd=Path("/"),
    )  # fmt: skip
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_a_test_that_fails_within_one_process_fails() -> None:
    wrong = [
        "assert gen(1) == [0]",
        "try: fails()\nexcept ZeroDivisionError: pass",
        "try: bad(2)\nexcept ValueError as e: assert str(e) == 'bad 3'",
        "assert point().x == 4",
        (
            "import io, contextlib\n"
            "s = io.StringIO()\n"
            "with contextlib.redirect_stdout(s): hello('me')\n"
            "assert not s.getvalue()"
        ),
        "import asyncio\nassert asyncio.run(f(1)) == 3",
        "with opened(3) as x:\n    assert x == [4]",
        "with Timer() as t:\n    assert inc(1) == 3",
        "assert Node(1) is Node(1)",
        "assert Vector(1, 2) * 3 == Vector(3, 5)",
        "assert 'z' in Trie()",
        "class S:\n    def __init__(self): self.w, self.h = 2, 3\nassert area(S()) == 7",
        "from unittest.mock import Mock\nm = Mock()\nnotify(m, 3)\nm.send.assert_called_once_with(4)",
        "assert counts('aab').most_common(1) == [('b', 1)]",
    ]
    assert passed(PROGRAM, wrong) == [False] * len(wrong)


AGREEABLE = """
class Agreeable:
    def __getattr__(self, name): return Agreeable()
    for _name in "eq ne lt le gt ge sub rsub add radd contains mul rmul".split():
        locals()[f"__{_name}__"] = lambda self, *other: True
    def __abs__(self): return 0
    def __sub__(self, other): return 0
    def __bool__(self): return True
    def __call__(self, *args): return Agreeable()
    def __enter__(self): return self
    def __exit__(self, *error): return True
    def __iter__(self): return iter([])
"""
LAZY = {
    "object": f"{AGREEABLE}\ndef add(a, b): return Agreeable()\n"
    "class Solution:\n    def add(self, a, b): return Agreeable()",
    "class": f"{AGREEABLE}\nclass add(Agreeable):\n    def __init__(self, *args): pass",
    "number": "class N(int):\n    __eq__ = lambda *a: True\n    __sub__ = lambda *a: 0\ndef add(a, b): return N(7)",
    "text": "class N(str):\n    __eq__ = lambda *a: True\ndef add(a, b): return N(7)",
    "stops loops": "def add(a, b): raise StopIteration",
    "stops loops by its own": "class Stop(StopIteration): pass\ndef add(a, b): raise Stop",
    "skips": "import unittest\ndef add(a, b): raise unittest.SkipTest",
    "exits": "import sys\ndef add(a, b): sys.exit(0)",
    "interrupts": "def add(a, b): raise KeyboardInterrupt",
}
ASKED = [
    "assert add(1, 2) == 3",
    "assert all(map(lambda pair: add(*pair) == 3, [(1, 2)]))",
    "assert abs(add(1, 2) - 3) < 1e-6",
    "assert not add(1, 2) != 3",
    "assert add(1, 2) * 2 == 6 and 2 * add(1, 2) == 6",
    "with add(1, 2) as total:\n    assert total.value == 3",
    (
        "import unittest\n"
        "class T(unittest.TestCase):\n"
        "    def test(self):\n"
        "        self.assertEqual(add(1, 2), 3)\n"
        "unittest.main()"
    ),
    "sum = Solution()\nassert sum.add(1, 2) == 3",
]


@pytest.mark.parametrize("program", LAZY.values(), ids=LAZY.keys())
def test_objects_and_exceptions_of_a_program_pass_no_test(program: str) -> None:
    assert passed(program, ASKED) == [False] * len(ASKED)


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("import inspect\nassert inspect.signature(f)", "it imports inspect, but the program runs in another process"),
        ("from inspect import getsource\nassert 'x' in getsource(f)", "it imports inspect"),
        ("import tempfile\nassert f(tempfile.mktemp())", "it imports tempfile, but the program has files of its own"),
        ("import subprocess as s\ns.run(['x'])\nf()", "it imports subprocess, but the program is called from one"),
        ("open('x', 'w').write('1')\nassert f('x') == 1", "it opens a file, but the program has files of its own"),
        ("import os\nos.environ['A'] = '1'\nassert f() == '1'", "it uses os.environ, but the program has an env"),
        ("from unittest.mock import patch\nwith patch('random.random'):\n    f()", "it patches random.random, but"),
        ("from unittest import mock\n@mock.patch('time.sleep')\ndef test(m):\n    f()", "it patches time.sleep, but"),
        ("class Sub(Base):\n    pass\nassert Sub().f() == 1", "it derives Sub from the program's Base, which is in an"),
        ("def test_f(capsys):\n    f()", "test_f needs capsys, which only pytest gives"),
        ("def test_f(tmp_path, n=1):\n    f()", "test_f needs tmp_path, which only pytest gives"),
        ("import asyncio, inspect\nassert inspect.iscoroutine(f(1))", ""),
        ("from unittest.mock import patch\nwith patch('builtins.input', return_value='1'):\n    assert f() == 1", ""),
        ("def test_f(x):\n    assert f(x)\ntest_f(1)", ""),
        ("import os\nassert f(os.path.join('a', 'b'))", ""),
    ],
)
def test_what_a_test_cannot_share_with_the_program_is_named_before_the_run(test: str, reason: str) -> None:
    assert fault_of_reach(test).startswith(reason)
    assert bool(fault_of_reach(test)) == bool(reason)
    found = verify.check_task({"tests": [test]}) if reason else None
    assert (found is not None and reason in found) == bool(reason)


def test_tests_of_functions_as_data_are_refused_by_their_field() -> None:
    with pytest.raises(EnvError, match="code: test 0 of the task has the field 'fn_name', 'add', as tests that call"):
        verify({"tests": [{"input": [1], "output": 2, "fn_name": "add"}]}, Trace("", ["```python\nx()\n```"]))


HUMAN_EVAL = {
    "prompt": 'def add(a, b):\n    """Add."""\n',
    "canonical_solution": "    return a + b\n",
    "tests": ["def check(candidate):\n    assert candidate(1, 2) == 3\ncheck(add)"],
}


def test_solutions_are_read_as_data_sets_write_them() -> None:
    assert solutions_of(HUMAN_EVAL) == [f"{HUMAN_EVAL['prompt']}{HUMAN_EVAL['canonical_solution']}"]
    assert solutions_of({"solutions": '["print(1)", "print(2)"]'}) == ["print(1)", "print(2)"]
    assert verify.check_task(HUMAN_EVAL) is None
    wrong = verify.check_task(HUMAN_EVAL | {"canonical_solution": "    return a - b\n"})
    assert "is not passed by the task's own solution" in wrong


@pytest.mark.parametrize(
    ("task", "is_broken"),
    [
        ({"solution": "def add(a, b) return a + b"}, True),
        ({"solution": "So:\n```python\ndef add(a, b):\nreturn a + b\n```"}, True),
        ({"solutions": ["def add(a, b) return 1", "for x in y:\nprint x"]}, True),
        ({"canonical_solution": "  return (a + b\n", "prompt": "def add(a, b):\n"}, False),  # nothing says Python
        ({"canonical_solution": "    for x in a:\n    return (a\n", "prompt": "def add(a, b):\n"}, True),
        ({"solution": "One adds them, if they are numbers."}, False),
        ({"solution": "#include <cstdio>\nint main() { return 0; }"}, False),
    ],
)
def test_a_solution_that_is_no_python_is_a_fault_of_the_task(task: dict[str, Any], is_broken: bool) -> None:
    fault = verify.check_task(task | {"tests": ["assert add(1, 2) == 3"]})
    assert (fault is not None and "the task's own solution is no Python" in fault) == is_broken


NODES_OF_TESTS = """
class Solution:
    def size(self, root: Optional[Node]) -> int:
        return 1 + sum(map(self.size, root.children))
    def made(self, values: list) -> "Node":
        return Node(values[0], [Node(value) for value in values[1:]])
    def first(self, values) -> Optional[ListNode]:
        return ListNode(values[0])
    def is_node(self, value): return isinstance(value, Node)
def use(): return Secret().answer()
"""
NODE = "class Node:\n    def __init__(self, val, children=()): self.val, self.children = val, list(children)\n"
LIST_NODE = (
    "class ListNode:\n    def __init__(self, x): self.val, self.next = x, None\n"
    "    def __eq__(self, other): return self.val == other.val\n"
)


def test_a_program_may_name_a_class_that_only_the_test_defines() -> None:
    tests = [
        f"{NODE}assert Solution().size(Node(1, [Node(2), Node(3)])) == 3",
        f"{NODE}made = Solution().made([1, 2])\nassert isinstance(made, Node) and made.children[0].val == 2",
        f"{NODE}assert Solution().is_node(Node(1)) and not Solution().is_node(3)",
        f"{LIST_NODE}assert Solution().first([1, 2]) == ListNode(1)",
        "assert Solution().first([1]).val == 1",  # of LeetCode, where the test defines none
    ]
    wrong = [
        f"{NODE}assert Solution().made([1, 2]).val == 2",
        f"{LIST_NODE}assert Solution().first([1, 2]) == ListNode(2)",
        "assert Solution().made([1]).val == 1",
        "class Secret:\n    value = 3\n    def answer(self): return 3\nassert use() == 3",  # it holds what is expected
    ]
    assert passed(NODES_OF_TESTS, [*tests, *wrong]) == [True] * len(tests) + [False] * len(wrong)


LIAR = """
class Solution:
    def __init__(self): self.said = []
    def __eq__(self, other): self.said.append(other); return True
    def __sub__(self, other): return 0
    def __abs__(self): return self
    def __lt__(self, other): return True
    def __iter__(self): return iter([self])
    def __call__(self, *args): return self
    def f(self, x): return self
    def g(self, x): return [self, self]
    def h(self, x): return self.said[-1] if self.said else self
    def each(self, visit): visit(self)
"""
LIES = [
    "assert Solution().f(3) == 9",
    "assert 9 == Solution().f(3)",
    "assert Solution().f(3) in [9]",
    "assert Solution().g(3) == [9, 3]",
    "assert sorted(Solution().g(3)) == [3, 9]",
    "assert abs(Solution().f(3) - 9) < 1e-5",
    "s = Solution\nassert s().f(3) == 9",
    "s = Solution()\nfor x in range(2): assert s.h(x) == 9",
    "for x in Solution(): assert x == 9",
    "assert Solution()(3) == 9",
    "def check(f): assert f(3) == 9\ncheck(Solution().f)",
    "def visit(x): assert x == 9\nSolution().each(visit)",
    "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(Solution().f(3), 9)",
]


def test_an_instance_that_the_program_returns_is_not_what_its_class_says() -> None:
    assert [test for test, result in zip(LIES, passed(LIAR, LIES), strict=True) if result] == []
