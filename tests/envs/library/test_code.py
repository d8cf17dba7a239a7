"""Programs of answers, right, wrong, lazy and hostile, against the tests of a task; and the interpreter as a tool."""

import asyncio
import os
import pickle
import time
from collections.abc import Sequence
from typing import Any

import attrs
import cloudpickle
import pytest

import nrl
from nrl.envs import Interpreter, Score, Trace, Turn, code, python
from nrl.envs.inside.values import decode, encode
from nrl.envs.library.code_blocks import last_block
from nrl.envs.library.code_tests import same_lines
from nrl.envs.sandbox import Channel, Finished, Limits, bubblewrap
from nrl.envs.tools import ToolCall, ToolError, call, tool, tool_use
from nrl.errors import EnvError
from tests.processes import descendants, settled

LIMITS = Limits(seconds=2.0, cpu_seconds=2.0, memory=512 << 20)
SHORT = attrs.evolve(LIMITS, seconds=1.0, cpu_seconds=1.0)  # for programs that have no end
PATIENT = attrs.evolve(LIMITS, seconds=60.0, cpu_seconds=60.0)  # for programs that end, on a busy machine too
ADD = "def add(a, b):\n    return a + b\n"
TESTS = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"]
SQUARES = [{"stdin": "3\n", "stdout": "9\n"}, {"stdin": "4\n", "stdout": "16\n"}]


def verdict(program: str, tests: Any, **options: Any) -> Score:
    answer = f"Here it is.\n\n```python\n{program}\n```\nIt works."
    found = code(limits=options.pop("limits", LIMITS), **options)({"tests": tests}, Trace("Do it.", [answer]))
    assert isinstance(found, Score)
    return found


def share(program: str, tests: Any, **options: Any) -> float:
    found = verdict(program, tests, **{"limits": PATIENT, **options})
    assert found.status == "ok"
    return found.components["passed"]


def test_a_right_program_passes() -> None:
    assert verdict(ADD, TESTS, limits=PATIENT) == Score(1.0, "ok", {"passed": 1.0})
    assert verdict("print(int(input()) ** 2)", SQUARES, limits=PATIENT) == Score(1.0, "ok", {"passed": 1.0})


def test_a_wrong_program_has_a_share() -> None:
    assert verdict("def add(a, b): return 3", TESTS, limits=PATIENT) == Score(0.0, "ok", {"passed": 0.5})
    half = verdict("print(9)", SQUARES, limits=PATIENT, reward=lambda passed: sum(passed) / 4)
    assert half == Score(0.25, "ok", {"passed": 0.5})
    assert share(f"{ADD}\nif __name__ == '__main__': print(int(input()) ** 2)", [*TESTS, *SQUARES]) == 1.0


@pytest.mark.parametrize("answer", ["3", "", "```python\nnever closed", "```python\n```", "    x = 1"])
def test_an_answer_without_code_cannot_be_parsed(answer: str) -> None:
    assert code()({"tests": TESTS}, Trace("", [answer])) == Score(0.0, "parse_fail", {"passed": 0.0})


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("```\na\n```\n```py\nb\n```", "b\n"),
        ("````\n```\na\n```\n````\n", "```\na\n```\n"),
        ("~~~python\na\n~~~ \n", "a\n"),
        ("```python title='x'\na\n\nb\n   ```", "a\n\nb\n"),
        ("```\na\n```\n```\nb", "a\n"),
        ("a ``` b ```", None),
    ],
)
def test_the_last_block_counts(text: str, block: str | None) -> None:
    assert last_block(text) == block


def test_outputs_are_compared_by_lines() -> None:
    assert same_lines("a  \nb\n\n", "a\nb")
    assert not same_lines(" a", "a")
    assert not same_lines("a\n\nb", "a\nb")
    assert not same_lines("", "a")


@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("def f(x):\n    x.sort()", "x = [3, 1]\nf(x)\nassert x == [1, 3]"),
        ("def f(d):\n    d['a'] = {1}", "d = {}\nassert f(d) is None and d == {'a': {1}}"),
        ("def f(x): raise ValueError", "try:\n    f(1)\nexcept ValueError:\n    pass\nelse:\n    assert False"),
        (
            "def f(x): return x",
            "for x in (1.5, True, None, b'a', (1, [2]), {(1, 2): {3}}, 1j, 'ü'):\n    assert f(x) == x",
        ),
        ("def f(x): return x * 2", "def check(candidate):\n    assert candidate(2) == 4\ncheck(f)"),
        ("from collections import Counter\ndef f(x): return Counter(x)", "assert f('aab') == {'a': 2, 'b': 1}"),
        ("seen = []\ndef f(x):\n    seen.append(x)\n    return len(seen)", "assert f(1) == 1 and f(x=1) == 2"),
        ("print('noise')\ndef f(): print('more'); return 1", "assert f() == 1"),
        ("def f(x): return float('nan')", "import math\nassert math.isnan(f(1))"),
    ],
)
def test_calls_are_as_calls_within_one_process(program: str, test: str) -> None:
    assert share(program, [test]) == 1.0


def test_values_come_back_as_they_were() -> None:
    for value in (
        None,
        True,
        2,
        -1.5,
        "é",
        b"\0",
        [1, [2]],
        (1,),
        {1: (2,)},
        {1, 2},
        frozenset({3}),
        2 + 1j,
        float("inf"),
    ):
        found = decode(encode(value))
        assert (type(found), found) == (type(value), value)
    with pytest.raises(TypeError, match="object is no data"):
        encode(object())


# --- Lazy and hostile answers

AGREEABLE = """
class Agreeable:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
class Number(int):
    __eq__ = Agreeable.__eq__
    __hash__ = None
"""

HOSTILE = {
    "empty": "pass",
    "exits": "import os; os._exit(0)",
    "exits cleanly": "import sys; sys.exit(0)",
    "exits when called": "import os\ndef add(a, b): os._exit(0)",
    "exits when called, cleanly": "import sys\ndef add(a, b): sys.exit(0)",
    "equal to all": f"{AGREEABLE}\ndef add(a, b): return Agreeable()",
    "a number equal to all": f"{AGREEABLE}\ndef add(a, b): return Number(7)",
    "no assertions": "import builtins\nbuiltins.AssertionError = type('A', (), {})\ndef add(a, b): return 7",
    "all is well": "import builtins\nbuiltins.all = builtins.isinstance = lambda *x: True\ndef add(a, b): return 7",
    "reads files": """
import os
def add(a, b):
    for folder, _, files in os.walk('/sandbox'):
        for name in files:
            text = open(os.path.join(folder, name)).read()
            if 'add(1, 2)' in text: return 3
    return 7""",
    "walks the stack": """
import sys, gc
def add(a, b):
    frame = sys._getframe()
    while frame:
        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
            if isinstance(value, str) and 'assert add' in value: return eval(value.split('==')[1])
        frame = frame.f_back
    for value in gc.get_objects():
        if isinstance(value, str) and value.startswith('assert add'): return eval(value.split('==')[1])
    return 7""",
    "says that it passed": """
import os, json
for fd in range(64):
    for word in (b'["passed"]', b'["ready"]', b'["passed"]', b'P', b'OK'):
        try: os.write(fd, word + b"\\n")
        except OSError: pass
def add(a, b): return 7""",
    "says so and ends": """
import os
for fd in range(64):
    try: os.write(fd, b'["passed"]\\n["value", ["passed"], []]\\n["unusable", "x"]\\n' * 9)
    except OSError: pass
os._exit(0)""",
    "rewrites its server": """
import sys
main = sys.modules['__main__']
main.check = main.encode = main._say = lambda *x: ['passed']
def add(a, b): return 7""",
    "writes the server's file": "open('/sandbox/calls.py', 'w').write('print([\"passed\"])')\ndef add(a, b): return 7",
    "raises what the test may": "def add(a, b): raise AssertionError",
    "never returns": "def add(a, b):\n    while True: pass",
    "sleeps": "import time\ntime.sleep(60)",
    "takes all memory": "def add(a, b): return bytearray(8 << 30)",
    "returns too much": "def add(a, b): return [1] * (1 << 22)",
    "returns what nests": "def add(a, b):\n    x = []\n    for _ in range(100000): x = [x]\n    return x",
    "returns itself": "def add(a, b):\n    x = []\n    x.append(x)\n    return x",
    "returns a large number": "def add(a, b): return 10 ** 100000",
    "answers garbage": """
import os
def add(a, b):
    for fd in range(3, 64):
        try: os.write(fd, b'[' * 100000 + b"\\n" + b'["value", ["nothing"], 3]\\n' + b'\\xff\\n')
        except OSError: pass
    return 7""",
    "floods": """
import os
def add(a, b):
    while True:
        for fd in range(3, 6):
            try: os.write(fd, b'x' * 4096)
            except OSError: pass""",
    "forks": "import os\ndef add(a, b):\n    while True:\n        try: os.fork()\n        except OSError: pass",
    "kills": "import os\nos.kill(-1, 9)\nos.kill(os.getpid(), 9)",
    "does not parse": "def add(a, b) return",
    "closes everything": "import os, time\nos.closerange(0, 256)\ntime.sleep(60)",
}


ENDLESS = ("never returns", "sleeps", "floods", "forks", "closes everything")


@pytest.mark.parametrize("program", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_answers_get_nothing_where_functions_are_called(program: str) -> None:
    limits = SHORT if program in map(HOSTILE.get, ENDLESS) else LIMITS
    assert verdict(program, TESTS, limits=limits) == Score(0.0, "ok", {"passed": 0.0})


@pytest.mark.parametrize(
    "program",
    [
        "",
        "pass",
        "import os; os._exit(0)",
        "print('9')\nimport sys; sys.exit(1)",
        "while True: pass",
        "import time; time.sleep(60)",
        "while True: print(9)",
        "import os\n[print(open(os.path.join(at, f)).read()) for at, _, fs in os.walk('/sandbox') for f in fs]",
        "print('16 9'); print(*range(100))",
        "import sys; print(*[v for v in sys._getframe().f_globals.values()])",
        "import os, subprocess\nsubprocess.run(['python', '-c', 'print(9)'], check=True)\nos.kill(os.getpid(), 9)",
    ],
)
def test_hostile_answers_get_nothing_where_programs_print(program: str) -> None:
    endless = "while" in program or "sleep" in program
    found = verdict(f"{program}\n#", SQUARES, limits=SHORT if endless else LIMITS)
    assert found == Score(0.0, "ok", {"passed": 0.0})


def test_one_test_that_ends_the_program_is_one_test() -> None:
    program = "import os, time\ndef f(x):\n    if x == 1: os._exit(0)\n    if x == 2: time.sleep(60)\n    return x"
    assert share(program, [f"assert f({x}) == {x}" for x in (0, 1, 2, 3)], limits=Limits(seconds=4)) == 0.5


def test_a_test_that_catches_everything_does_not_pass_a_program_that_ended() -> None:
    test = "try:\n    f()\nexcept:\n    pass"
    assert share("import os\ndef f(): os._exit(0)", [test]) == 0.0
    endless = "while True:\n    try: f()\n    except: pass"
    assert share("import os\ndef f(): os._exit(0)", [endless], limits=LIMITS) == 0.0


def test_what_a_program_returns_may_take_the_test_too_long() -> None:
    tests = ["assert 3 ** (f() ** 5) > 0", "assert f() > 1"]
    assert share("def f(): return 1 << 13000", tests, limits=attrs.evolve(PATIENT, cpu_seconds=0.7)) == 0.5


# --- Mistakes of tasks are no rewards


class Endless:
    """The channel of a program that starts, and then always has something more of one line."""

    def __init__(self, channel: Channel, more: bytes, got: list[float]) -> None:
        self._channel, self._more, self._got, self._ready = channel, more, got, False

    def send(self, data: bytes) -> None:
        self._channel.send(data)

    def receive(self, seconds: float) -> bytes:
        if not self._ready:
            self._ready = True
            return self._channel.receive(seconds)
        self._got.append(time.monotonic())
        assert self._got[-1] - self._got[0] < 60.0, "nobody ends it"
        if len(self._more) == 1:
            time.sleep(0.001)  # 16 MiB byte by byte would take longer than the test may
        return self._more


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_an_answer_without_an_end_is_neither_longer_than_its_test_nor_than_a_line(size: int) -> None:
    run, got = bubblewrap(), list[float]()

    def sandbox(command: Sequence[str], stdin: Any, files: Any, limits: Limits) -> Finished:
        serves = command[-1] == "serve"
        talk = (lambda channel: stdin(Endless(channel, b"1" * size, got))) if serves else stdin
        return run(command, talk, files, limits)

    limits = PATIENT if size > 1 else attrs.evolve(PATIENT, seconds=4.0)
    assert share(ADD, ["assert add(1, 2) == 3"], sandbox=sandbox, limits=limits) == 0.0
    assert 0 < len(got) * size <= 17 << 20


def test_a_value_is_as_long_as_a_line_at_most() -> None:
    program = "def f(size): return 'x' * size"
    assert share(program, ["assert len(f(8 << 20)) == 8 << 20", "assert f(1 << 24)", "assert f(1) == 'x'"]) == 2 / 3
    wide = attrs.evolve(LIMITS, output=32 << 20)
    assert share(program, ["assert f(1 << 24)"], limits=wide) == 1.0


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ([], "code: the task's 'tests' are .*; give a list with a test at least"),
        ("assert add(1, 2) == 3", "give a list with a test at least"),
        (None, "the task's 'tests' are None"),
        ([{"stdin": "1"}], "code: test 0 of the task is .*; give {'stdin': text, 'stdout': text}, or Python"),
        (
            ["assert 1 == 1"],
            "code: test 0 of the task, .*, cannot be used: it calls no function of the program, so it would pass",
        ),
        (["1 / 0"], "test 0 of the task, .*, cannot be used: it divides by 0; mend it, or leave it out"),
        (["[][0]\nadd(1, 2)"], "it raised before it called the program: IndexError"),
        ([SQUARES[0], TESTS[0], "assert add(1"], "test 2 of the task, .*: it is no Python: '[(]' was never closed"),
        (["assert add(object(), 2)"], "it calls add with what is no data: object is no data"),
        (["assert add(1, 2) == 3 / 0"], "test 0 of the task, .*, cannot be used: it divides by 0"),
        (["add(1, 2)\nimport nowhere"], "ModuleNotFoundError"),
        (
            ["import os; os._exit(0)\nadd(1, 2)"],
            r"test 0 of the task ended before it called the program \(exited\)",
        ),
    ],
)
def test_a_test_that_is_none_is_an_error(tests: Any, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        verdict(ADD, tests)


def test_a_sandbox_that_fails_makes_the_row_invalid() -> None:
    def broken(*_: Any) -> Finished:
        raise EnvError("no sandbox")

    with pytest.raises(EnvError, match="no sandbox"):
        verdict(ADD, TESTS, sandbox=broken)


def test_the_verifier_goes_to_other_processes() -> None:
    task, trace = {"tests": TESTS}, Trace("", [f"```\n{ADD}```"])
    assert pickle.loads(cloudpickle.dumps(code()))(task, trace).reward == 1.0
    pooled = nrl.pooled(code(limits=LIMITS), workers=1)
    assert asyncio.run(pooled(task, trace)) == Score(1.0, "ok", {"passed": 1.0})  # type: ignore[arg-type]


# --- The interpreter as a tool


def test_an_interpreter_keeps_its_state() -> None:
    with Interpreter() as interpreter:
        assert interpreter.run("x = 6") == ""
        assert interpreter.run("print('so')\nx * 7") == "so\n42\n"
        assert interpreter.run("def f(n):\n    return n + x") == ""
        assert interpreter.run("f(1)") == "7\n"
        assert "ZeroDivisionError: division by zero" in interpreter.run("f(1) / 0")
        assert 'File "<code>", line 2' in interpreter.run("\nnothing")
        assert "SyntaxError" in interpreter.run("x =")
        assert "SystemExit" in interpreter.run("exit()")
        assert interpreter.run("import subprocess; subprocess.run(['python', '-c', 'print(5)']); x").startswith("5\n")
        assert interpreter.run("import os; os.getuid() == 0") == "False\n"
        assert interpreter.run("input()").strip().endswith("EOFError: EOF when reading a line")


def test_a_call_that_takes_too_long_ends_the_interpreter_alone() -> None:
    with Interpreter(limits=Limits(seconds=1)) as interpreter:
        interpreter.run("x = 1")
        with pytest.raises(
            ToolError, match=r"ended after 1 s, and its variables are gone; it had written: 'before\\n'"
        ):
            interpreter.run("print('before', flush=True)\nwhile True: pass")
        assert "NameError" in interpreter.run("x")


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("while True: print('x' * 100)", "reached its limit of output, and its variables are gone"),
        ("import os; os._exit(3)", "ended, and its variables are gone"),
        (
            "import os; held = [os.fork() or bytearray(os.urandom(1 << 20) * 99) for _ in range(4)]\nwhile 1: pass",
            "limit of memory",
        ),
    ],
)
def test_the_model_is_told_why_its_interpreter_ended(program: str, message: str) -> None:
    with Interpreter(limits=Limits(seconds=20, output=10_000, memory=256 << 20)) as interpreter:
        with pytest.raises(ToolError, match=message):
            interpreter.run(program)
        assert interpreter.run("1 + 1") == "2\n"


@pytest.mark.parametrize("most", [1, 10, 40])
def test_a_small_limit_of_output_is_of_what_a_call_writes(most: int) -> None:
    """And of nothing else: what ends an output does not count."""
    with Interpreter(limits=attrs.evolve(LIMITS, output=most)) as interpreter:
        assert interpreter.run(f"print('x' * {most}, end='')") == "x" * most
        with pytest.raises(ToolError, match="reached its limit of output, and its variables are gone"):
            interpreter.run(f"print('x' * {most + 1}, end='')")
        assert interpreter.run(f"print('y' * {most}, end='')") == "y" * most


def test_an_interpreter_is_the_tool_of_an_episode() -> None:
    before = set(descendants(os.getpid()))
    made: list[Interpreter] = []

    def fresh(task: Any) -> Interpreter:
        made.append(Interpreter(limits=LIMITS))
        return made[-1]

    env = tool_use([tool(python)], lambda task, trace: 1.0, state=fresh, close=Interpreter.close)
    state, _, _ = env.reset({"prompt": "What is 6 * 7?"})

    async def play() -> Any:
        now = state
        for source in ("x = 6", "x * 7", "import os; os._exit(0)"):
            step = await env.step(now, Turn("", calls=[ToolCall("python", {"code": source})]))  # type: ignore[misc]
            now = step.state
            yield step.observation[0]["content"]
        assert env.close is not None
        env.close(now)

    async def gathered() -> list[str]:
        return [each async for each in play()]

    said = asyncio.run(gathered())
    assert said[:2] == ["", "42\n"]
    assert said[2] == "the interpreter ended, and its variables are gone"
    assert not settled(lambda: set(descendants(os.getpid())) - before, 10)
    with pytest.raises(EnvError, match="this interpreter has been closed; make another"):
        made[0].run("1")


def test_an_interpreter_that_nobody_holds_is_gone() -> None:
    before = set(descendants(os.getpid()))
    interpreter = Interpreter()
    assert interpreter.run("1") == "1\n"
    del interpreter
    assert not settled(lambda: set(descendants(os.getpid())) - before, 10)


def test_calls_of_a_turn_share_the_interpreter_in_order() -> None:
    with Interpreter() as interpreter:
        calls = [ToolCall("python", {"code": "x = 2"}), ToolCall("python", {"code": "x + 1"})]
        results, _ = asyncio.run(call([tool(python)], calls, state=interpreter))
        assert [each.text for each in results] == ["", "3\n"]
