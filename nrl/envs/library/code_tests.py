"""The tests of a task for programs: how they are written, which of them no program can pass, and equal outputs."""

import ast
import contextlib
import decimal
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nrl.envs.inside.assertions import unbound
from nrl.envs.library.code_blocks import acts, parsed, program_of
from nrl.envs.types import Task, text_of
from nrl.errors import EnvError

__all__ = [
    "Test",
    "fault_of_imports",
    "fault_of_names",
    "fault_of_reach",
    "fault_of_solutions",
    "fault_of_text",
    "names_of",
    "read_tests",
    "same_lines",
    "shown",
    "solutions_of",
]

_SHOWN = 200  # characters of a test in a message
_FUNCTION_FIELDS = ("fn_name", "func_name", "function_name", "function", "method", "entry_point")
_SOLUTIONS = 4  # of a task that are tried, at most

type Test = str | tuple[str, str]
"""Python that calls; or an input and the output that is wanted."""


def read_tests(task: Task) -> list[Test]:
    """Return the tests of a task: its texts as they are, its inputs and outputs as pairs of texts.

    The list of them, and each with an input and an output, may be JSON.

    Raises:
        EnvError: there are none, or one is no test.

    >>> read_tests({"tests": ["assert f(1) == 1", {"input": ["1", "2"], "output": 3}]})
    ['assert f(1) == 1', ('1\\n2', '3')]
    """
    tests = _listed(task.get("tests"))
    if not isinstance(tests, Sequence) or isinstance(tests, str) or not tests:
        raise EnvError(f"code: the task's 'tests' are {tests!r}; give a list with a test at least")
    read = list[Test]()
    for place, text in enumerate(tests):
        test = _of_json(text)
        if isinstance(test, str):
            read.append(test)
            continue
        outputs = [test[name] for name in ("stdout", "output") if name in test] if isinstance(test, Mapping) else []
        if outputs and outputs[0] is None:
            name = "stdout" if "stdout" in test else "output"
            raise EnvError(
                f"code: test {place} of the task is {shown(test)}, whose {name!r} is None; give the text that the "
                "program has to write, '' for none, or leave the test out"
            )
        given = next((test[name] for name in ("stdin", "input") if name in test), "") if outputs else ""
        if marker := next((name for name in _FUNCTION_FIELDS if isinstance(test, Mapping) and test.get(name)), None):
            raise EnvError(
                f"code: test {place} of the task has the field {marker!r}, {test[marker]!r:.80}, as tests that call a "
                "function have it; write the call as Python, such as 'assert add(1, 2) == 3'"
            )
        pair = _text(given), _text(outputs[0]) if outputs else None
        if pair[0] is None or pair[1] is None:
            raise EnvError(
                f"code: test {place} of the task is {shown(test)}; give {{'stdin': text, 'stdout': text}}, or Python "
                "that calls the program, such as 'assert add(1, 2) == 3'"
            )
        read.append((pair[0].replace("\r\n", "\n"), pair[1].replace("\r\n", "\n")))
    return read


def _listed(tests: Any) -> Any:
    """Return tests as a list: also those that are JSON, or lists of inputs and of outputs, as in APPS."""
    tests = _of_json(tests)
    if not isinstance(tests, Mapping):
        return tests
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not isinstance(inputs, list | tuple) or not isinstance(outputs, list | tuple) or len(inputs) != len(outputs):
        return [tests] if "output" in tests or "stdout" in tests else tests
    names = {name: tests[name] for name in _FUNCTION_FIELDS if tests.get(name)}
    return [{"input": given, "output": wanted, **names} for given, wanted in zip(inputs, outputs, strict=True)]


def _of_json(value: Any) -> Any:
    """Return what a text has that is a list or an object of JSON; anything else as it is."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def _text(value: Any) -> str | None:
    """An input or output as text: a number as Python writes it, a list as lines; None: it is neither."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, bool | int | float):
        return str(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        lines = [_text(line) for line in value if isinstance(line, str | bool | int | float)]
        return "\n".join(line or "" for line in lines) if len(lines) == len(value) else None
    return None


def shown(test: Any) -> str:
    """Return a test for a message, not longer than a line or two."""
    text = repr(test)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def solutions_of(task: Task) -> list[str]:
    """The programs that a task says to be right, as far as they are Python.

    A solution that is no program alone, as in HumanEval, continues the prompt.
    """
    prompt = text_of(task.get("prompt", ""))
    programs = list[str]()
    for text in _solution_texts(task)[:_SOLUTIONS]:
        candidates = (f"{prompt}{text}", text) if task.get("canonical_solution") == text else (text, f"{prompt}{text}")
        for program in (program_of(text) or "", *candidates):
            if (tree := parsed(program)) is not None and acts(tree):
                programs.append(program)
                break
    return programs


def fault_of_solutions(task: Task) -> str:
    """Return why a task's solution is no program though it looks like one; empty: it is one or prose, or missing."""
    texts = _solution_texts(task)
    if not texts or solutions_of(task):
        return ""
    for text in texts:
        program = program_of(text) or text
        if program is not text or _PYTHON_LINE.search(text):
            try:
                ast.parse(program)
            except (SyntaxError, ValueError, RecursionError) as error:
                return f"the task's own solution is no Python: {error}"
    return ""


_SOLUTION_NAMES = ("solution", "reference_solution", "reference", "canonical_solution", "solutions")
_PYTHON_LINE = re.compile(
    r"^[ \t]*(?:(?:async )?def \w+ ?\(|class \w+ ?[(:]|import \w+[ \t]*$|from [\w.]+ import |print ?\("
    r"|(?:for|while|if) .*:[ \t]*$)",
    re.MULTILINE,
)


def _solution_texts(task: Task) -> list[str]:
    """The solutions that a task has; a list of them may be written as JSON, as in APPS."""
    solutions: Any = next((task[name] for name in _SOLUTION_NAMES if task.get(name)), [])
    if isinstance(solutions, str) and solutions.lstrip().startswith("["):
        solutions = _of_json(solutions)
    if isinstance(solutions, str):
        return [solutions]
    return [text for text in solutions if isinstance(text, str)] if isinstance(solutions, list | tuple) else []


def names_of(test: str) -> set[str]:
    """The names that a test reads and does not define."""
    tree = parsed(test)
    return set() if tree is None else unbound(tree)


def fault_of_names(test: str, task: Task, program: str = "") -> str:
    """Which name a test compares with that nobody defines; empty: none.

    Neither the test nor the program defines it, and the prompt, if it is a text, does not say that it has to. What a
    test calls is not looked at: the names of functions often stand in tests alone.
    """
    tree, prompt = parsed(test), text_of(task.get("prompt", ""))
    if tree is None or not prompt:
        return ""
    compared = {
        side.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        for side in (node.left, *node.comparators)
        if isinstance(side, ast.Name)
    }
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    for name in sorted((compared & unbound(tree)) - called):
        if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", f"{prompt}\n{program}"):
            return f"it compares with {name}, which neither it defines nor the prompt asks for"
    return ""


def fault_of_imports(test: str, has_module: Callable[[str], bool]) -> str:
    """Which module a test imports that the sandbox does not have; empty: none."""
    for node in ast.walk(parsed(test) or ast.Module([], [])):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in {name.partition(".")[0] for name in names} - sys.stdlib_module_names:
            if not has_module(name):
                return f"it imports {name}, which the sandbox does not have"
    return ""


def fault_of_text(test: str) -> str:
    """Why no program can pass a test, as far as its text says that; empty: it does not."""
    try:
        tree = ast.parse(test)
    except (SyntaxError, ValueError, RecursionError) as error:
        return f"it is no Python: {error}"
    return _fault_of_tree(tree) or (
        "" if unbound(tree) else "it calls no function of the program, so it would pass whatever that is"
    )


_APART = {  # modules by which a test would look into the program's process or share something with it
    **dict.fromkeys(("dis", "gc", "inspect", "tracemalloc", "weakref"), "the program runs in another process"),
    **dict.fromkeys(("multiprocessing", "subprocess"), "the program is called from one process alone"),
    **dict.fromkeys(("shutil", "sqlite3", "tempfile"), "the program has files of its own"),
}
_SHARED_CALLS = {"open": "opens a file", "os.chdir": "changes the directory", "os.mkdir": "makes a directory"}
_ALLOWED_INSPECT = {"isawaitable", "iscoroutine", "isgenerator"}
_PATCHED = {"builtins.input", "sys.stdin", "sys.stdout", "sys.stderr"}


def fault_of_reach(test: str) -> str:
    """Return what a test needs that a program in another process does not share with it; empty: nothing.

    Such a test would fail for right programs, too.

    >>> fault_of_reach("import inspect\\nassert inspect.signature(f)")
    'it imports inspect, but the program runs in another process'
    """
    tree = parsed(test)
    if tree is None:
        return ""
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    of_program = unbound(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases) if (module := _apart(aliases)) and not _only_asks(tree, module):
                return f"it imports {module}, but {_APART[module]}"
            case ast.ImportFrom(module=str(name), names=aliases) if name.partition(".")[0] in _APART:
                if {alias.name for alias in aliases} - _ALLOWED_INSPECT:
                    return f"it imports {name}, but {_APART[name.partition('.')[0]]}"
            case ast.Call(func=function) if (name := ast.unparse(function)) in _SHARED_CALLS:
                return f"it {_SHARED_CALLS[name]}, but the program has files of its own"
            case ast.Attribute(value=ast.Name("os"), attr="environ"):
                return "it uses os.environ, but the program has an environment of its own"
            case ast.Call(func=function, args=[ast.Constant(value=str(target)), *_]):
                if ast.unparse(function).endswith("patch") and target not in _PATCHED:
                    return f"it patches {target}, but the program runs in another process"
            case ast.ClassDef(name=name, bases=bases):
                for base in bases:
                    if isinstance(base, ast.Name) and base.id in of_program:
                        return f"it derives {name} from the program's {base.id}, which is in another process"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            needed = [arg.arg for arg in node.args.args[: len(node.args.args) - len(node.args.defaults)]]
            if needed and not node.decorator_list and node.name not in called:
                return f"{node.name} needs {', '.join(needed)}, which only pytest gives"
    return ""


def _apart(aliases: Sequence[ast.alias]) -> str:
    return next((name for alias in aliases if (name := alias.name.partition(".")[0]) in _APART), "")


def _only_asks(tree: ast.Module, module: str) -> bool:
    """Whether a test uses of ``inspect`` only what works from another process."""
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == module
    }
    return module == "inspect" and used <= _ALLOWED_INSPECT


def _fault_of_tree(tree: Any) -> str:
    """Why no program can pass a test, as far as its text says that; empty: it does not.

    >>> import ast
    >>> _fault_of_tree(ast.parse("assert f(1) == 1 / 0"))
    'it divides by 0'
    """
    nodes = list(ast.walk(tree))
    if any(isinstance(node, ast.Try | ast.With) for node in nodes):
        return ""  # it may want the error
    for node in nodes:
        divides = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.FloorDiv | ast.Mod)
        if divides:
            left, right = (getattr(side, "value", None) for side in (node.left, node.right))  # type: ignore[attr-defined]
            if isinstance(right, int | float) and not right and not isinstance(left, str | bytes):
                return "it divides by 0"
    return ""


_TOLERANCE = 1e-6
_DECIMALS = re.compile(r"(?<![\w.])[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?(?![\w.])", re.ASCII)
_DIGITS = 400  # characters of a number that is compared as one, and not as text


def same_lines(found: str, wanted: str) -> bool:
    """Whether two outputs have the same lines, apart from spaces at their ends and empty lines at the end of all.

    Numbers are the same if they differ by at most 1e-6, or 1e-6 of the expected one, and if one of them is written with
    a point or an exponent: ``0.333333`` for ``0.333333333333``, ``1.0`` for ``1``. Integers have to be the same.

    >>> same_lines("1 2 \\n\\n", "1 2"), same_lines("0.333333", "0.333333333333"), same_lines("1000001", "1000000")
    (True, True, False)
    """

    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in text.rstrip().split("\n")]

    ours, theirs = lines(found), lines(wanted)
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def _same_line(found: str, wanted: str) -> bool:
    if found == wanted:
        return True
    ours, theirs = _DECIMALS.findall(found), _DECIMALS.findall(wanted)
    if not ours or len(ours) != len(theirs) or _DECIMALS.split(found) != _DECIMALS.split(wanted):
        return False
    return all(map(_same_number, ours, theirs))


def _same_number(found: str, wanted: str) -> bool:
    if found == wanted:
        return True
    if max(len(found), len(wanted)) > _DIGITS or not set(found + wanted) & set(".eE"):
        return False
    with decimal.localcontext(prec=2 * _DIGITS):
        ours, theirs = decimal.Decimal(found), decimal.Decimal(wanted)
        if max(abs(ours.adjusted()), abs(theirs.adjusted())) > _DIGITS:
            return ours == theirs
        if theirs == theirs.to_integral_value() and (ours == ours.to_integral_value() or not set(wanted) & set(".eE")):
            limit = decimal.Decimal(0) if ours == ours.to_integral_value() else decimal.Decimal(_TOLERANCE)
        else:
            limit = decimal.Decimal(_TOLERANCE) * max(decimal.Decimal(1), abs(theirs))
        return abs(ours - theirs) <= limit
