"""The program of an answer: blocks within lists and quotations, and programs in several blocks."""

import textwrap

import pytest

from nrl.envs.library.code_blocks import program_of

F = "def f(x):\n    return x\n"


@pytest.mark.parametrize(
    "text",
    [
        "1. Do:\n   ```python\n   def f(x):\n       return x\n   ```\n",
        "- Do:\n\n    ```python\n    def f(x):\n        return x\n    ```\n",
        "- ```python\n  def f(x):\n      return x\n  ```\n",
        "1.  ~~~py\n    def f(x):\n        return x\n    ~~~\n2. Done.\n",
        "   ```python\ndef f(x):\n    return x\n   ```\n",  # only the fences are indented
        "> ```python\n> def f(x):\n>     return x\n> ```\n",
        "```python\ndef f(x):\n    return x\n  ```\nThat is it.\n",
    ],
)
def test_blocks_within_lists_and_quotations(text: str) -> None:
    assert program_of(text, ["f"]) == F


def test_a_fence_within_a_docstring_closes_nothing() -> None:
    program = 'def f(x):\n    """\n    ```\n    f(1)\n    ```\n    """\n    return x\n'
    assert program_of(f"```python\n{program}```\n", ["f"]) == program


def blocks(*programs: str) -> str:
    return "\nThen:\n".join(f"```python\n{textwrap.dedent(program)}\n```" for program in programs)


@pytest.mark.parametrize(
    "programs",
    [
        ("def g(x): return x", "def f(x): return g(x)"),
        ("def f(x): return g(x)", "def g(x): return x"),
        ("import math", "def f(x): return math.floor(x)"),
        ("from math import floor as down", "def f(x): return down(x)"),
        ("MOD: int = 10**9 + 7\nseen = {}", "def f(x):\n    seen[x] = x\n    return seen[x] % MOD"),
        ("class A:\n    v = 0", "class B(A): pass\ndef h(): return B().v", "def f(x): return x + h()"),
        ("import functools\n@functools.cache\ndef g(x): return x", "def f(x): return g(x)"),
        ("def g(x): return -1", "def g(x): return x", "def f(x): return g(x)"),  # the last helper counts
        ("def f(x): return -1", "def f(x): return x"),
        ("def g(x): return x\nraise SystemExit(g(1))", "def f(x): return g(x)"),  # only definitions are joined
        ("def g(n): return n if n < 1 else h(n)\ndef h(n): return g(n - 1) + 1", "def f(x): return g(x)"),
        ("def f(x): return x", "print(f(1))"),
    ],
)
def test_a_program_in_several_blocks_is_one(programs: tuple[str, ...]) -> None:
    names = {"__name__": "program"}
    exec(program_of(blocks(*programs), ["f"]) or "", names)
    assert names["f"](3) == 3  # type: ignore[operator]


def test_tests_of_two_functions_find_both() -> None:
    program = program_of(blocks("def f(x): return x", "def g(x): return x"), ["f", "g"]) or ""
    assert "def f" in program
    assert "def g" in program


def test_a_whole_program_stays_as_it_is() -> None:
    assert program_of(blocks("def g(x): return x", F.strip()), ["f"]) == F
