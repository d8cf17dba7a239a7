"""Both ends of a call of a function that a model wrote: its program, and the test that calls it.

They are two processes in two sandboxes. Values alone go between them, as lines of JSON; so nothing that the program
does to its interpreter reaches the comparison, and nothing that is compared with reaches the program. An object that is
no data stays where it is: the other end has a reference to it, and reads its attributes and calls its methods there.
"""

import ast
import builtins
import json
import operator
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nrl.envs.inside.assertions import equal, forgiving, unbound
from nrl.envs.inside.values import decode, encode, exception_of, private, say

__all__ = ["check", "run", "serve"]


# --- The program's end.

_TYPING = """Any Callable ClassVar Counter DefaultDict Deque Dict FrozenSet Generator Generic Hashable Iterable Iterator
List Literal Mapping MutableMapping NamedTuple NoReturn Optional OrderedDict Sequence Set Tuple Type TypeVar Union"""
_PREAMBLE = {  # what LeetCode imports for a class Solution, by module
    "typing": _TYPING,
    "collections": "ChainMap Counter OrderedDict defaultdict deque namedtuple",
    "heapq": "heapify heappop heappush heappushpop heapreplace nlargest nsmallest",
    "bisect": "bisect bisect_left bisect_right insort insort_left insort_right",
    "functools": "cache cmp_to_key lru_cache partial reduce",
    "itertools": "accumulate chain combinations count cycle groupby permutations product repeat zip_longest",
    "math": "ceil comb factorial floor gcd inf isqrt lcm log log2 pi sqrt",
}
_MODULES = (
    *("bisect", "collections", "copy", "datetime", "functools", "heapq", "itertools"),
    *("math", "operator", "random", "re", "string", "typing"),
)


def _preamble(source: str) -> dict[str, Any]:
    """Names that a program may use without importing them: those of typing; more, if it has a ``class Solution``."""
    import re
    from importlib import import_module

    used = set(re.findall(r"\w+", source))
    found = dict[str, Any]()
    for module, names in _PREAMBLE.items() if "Solution" in used else [("typing", _TYPING)]:
        if wanted := used & set(names.split()):
            found |= {name: getattr(import_module(module), name) for name in wanted}
    if "Solution" in used:
        found |= {name: import_module(name) for name in _MODULES if name in used and name not in found}
    return found


def run() -> None:
    """Run ``main.py`` as a program that reads and prints."""
    from types import ModuleType

    sys.set_int_max_str_digits(0)
    source = Path("main.py").read_text(encoding="utf-8", errors="replace")
    main = ModuleType("__main__")
    main.__dict__.update(_preamble(source), __file__="main.py")
    sys.argv, sys.modules["__main__"] = ["main.py"], main
    exec(compile(source, "main.py", "exec", dont_inherit=True), main.__dict__)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    **{
        name: getattr(builtins, name)
        for name in ("bool", "iter", "len", "next", "repr", "str", "isinstance", "setattr")
    },
    **{name: getattr(operator, name) for name in ("getitem", "setitem", "delitem", "abs", "neg")},
}
_BINARY = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "matmul",
    "and_",
    "or_",
    "xor",
    "lt",
    "le",
    "gt",
    "ge",
    "eq",
)
_OPERATIONS |= {name: getattr(operator, name) for name in _BINARY}


def serve() -> None:
    """Run the program that the first line has, and call its functions as further lines say."""
    lines, out = private()
    source, objects = json.loads(lines.readline()), list[Any]()
    namespace: dict[str, Any] = {"__name__": "program"}  # its own demonstration, if it has one, is not asked for
    try:
        namespace |= _preamble(source)
        exec(compile(source, "program.py", "exec", dont_inherit=True), namespace)
    except BaseException as error:
        say(out, "error", type(error).__name__)
        return

    def refer(value: Any) -> Any:
        objects.append(value)
        return ["iterator" if hasattr(value, "__next__") else "object", len(objects) - 1]

    def resolve(kind: str, parts: list[Any]) -> Any:
        match kind:
            case "name":
                return named(parts[0])
            case "callback":
                return lambda *args: call_back(parts[0], args)
        return objects[parts[0]]

    def named(name: str) -> Any:
        """A function of the program, or a method of its class Solution."""
        if name in namespace:
            return namespace[name]
        if hasattr(namespace.get("Solution"), name):
            return getattr(namespace["Solution"](), name)
        raise NameError(name)

    def call_back(number: int, args: Sequence[Any]) -> Any:
        """Call a function of the test."""
        say(out, "callback", number, encode(list(args), refer))
        what, value = json.loads(lines.readline())
        if what == "error":
            raise exception_of(str(value))
        return decode(value, resolve)

    say(out, "ready")
    while line := lines.readline():
        try:
            what, target, args, kwargs = decode(json.loads(line), resolve)
            match what:
                case "value":
                    value = target
                case "call":
                    value = target(*args, **kwargs)
                case "get":
                    value = getattr(target, args[0])
                case _:
                    value = _OPERATIONS[what](target, *args)
            say(out, "value", encode(value, refer), encode(args, refer))
        except BaseException as error:
            say(out, "error", type(error).__name__)


# --- The test's end.


class _Unusable(BaseException):
    """The test asks for what is no call with data: the mistake of the test's author."""


_GONE = "gone"


class _Gone(BaseException):
    """There is no answer: the program ended, or took too long."""


class _Link:
    """The way to the program."""

    def __init__(self, lines: Any, out: int) -> None:
        self._lines, self._out, self._callbacks = lines, out, list[Any]()
        self.calls: list[str] = []

    def ask(self, what: str, target: list[Any], /, *args: Any, **kwargs: Any) -> Any:
        """The value of an operation on something of the program."""
        try:
            request = ["list", what, target, encode(list(args), self._refer), encode(kwargs, self._refer)]
        except TypeError as error:
            raise _Unusable(f"it calls {target[1]} with what is no data: {error}") from None
        self.calls.append(what)
        say(self._out, "call", request)
        return self._answered(args)

    def _refer(self, value: Any) -> Any:
        if isinstance(value, _Object):
            return value._target
        if not callable(value) or isinstance(value, type):
            raise TypeError(f"{type(value).__name__} is no data")
        self._callbacks.append(value)
        return ["callback", len(self._callbacks) - 1]

    def _resolve(self, kind: str, parts: list[Any]) -> Any:
        number = int(parts[0])
        return _Iterator(self, ["iterator", number]) if kind == "iterator" else _Object(self, ["object", number])

    def _answered(self, args: Sequence[Any]) -> Any:
        while True:
            line = self._lines.readline()
            try:
                what, *more = json.loads(line)
                if what == "callback":
                    function, values = self._callbacks[more[0]], decode(more[1], self._resolve)
                elif what == "value":
                    value, after = decode(more[0], self._resolve), decode(more[1], self._resolve)
                elif what == "error":
                    value, after = str(more[0]), []
            except Exception as error:
                raise RuntimeError("the program answered with what is no value") from error
            if what != "callback":
                break
            try:
                say(self._out, "call", ["value", encode(function(*values), self._refer)])
            except Exception as error:
                say(self._out, "call", ["error", type(error).__name__])
        if what == "gone":
            self.calls.append(_GONE)
            raise _Gone
        if what == "error":
            raise exception_of(value)
        for mine, theirs in zip(args, after, strict=False):  # a function may change what it is given
            if type(mine) is type(theirs) and isinstance(mine, list | bytearray):
                mine[:] = theirs
            elif type(mine) is type(theirs) and isinstance(mine, dict | set):
                mine.clear()
                mine.update(theirs)
            elif type(mine) is type(theirs) and type(mine).__name__ == "deque":
                mine.clear()
                mine.extend(theirs)
        return value


class _Object:
    """Something of the program that is no data, as the test sees it: a function, a class, an instance.

    It is equal to nothing of the test's, and takes part in no arithmetic with that, since the program would decide.
    """

    _link: _Link
    _target: list[Any]

    def __init__(self, link: _Link, target: list[Any]) -> None:
        self.__dict__.update(_link=link, _target=target)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._link.ask("call", self._target, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__doc__"):
            raise AttributeError(name)
        return self._link.ask("get", self._target, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.ask("setattr", self._target, name, value)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, _Object) and bool(self._link.ask("isinstance", instance._target, self))

    def __iter__(self) -> Any:
        return self._link.ask("iter", self._target)

    def __contains__(self, value: Any) -> bool:
        return any(item is value or item == value for item in self)

    def __hash__(self) -> int:
        return hash(tuple(self._target))


def _operation(what: str) -> Any:
    return lambda self, *args: self._link.ask(what, self._target, *args)


def _between(what: str) -> Any:
    return lambda self, other: (
        self._link.ask(what, self._target, other) if isinstance(other, _Object) else NotImplemented
    )


for _name in ("bool", "len", "repr", "str", "getitem", "setitem", "delitem", "abs", "neg"):
    setattr(_Object, f"__{_name}__", _operation(_name))
for _name in _BINARY:
    setattr(_Object, f"__{_name.rstrip('_')}__", _between(_name))


class _Iterator(_Object):
    """An iterator of the program, such as a generator; it is equal to a list of what it has left."""

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return self._link.ask("next", self._target)

    def __eq__(self, other: object) -> Any:
        return list(self) == other if isinstance(other, list) else NotImplemented

    __hash__ = _Object.__hash__


class _Names(dict[str, Any]):
    """The globals of a test; a name that it does not define is one of the program's."""

    def __init__(self, link: _Link, tree: Any) -> None:
        super().__init__(__name__="test")
        self._link, self._program = link, unbound(tree)
        called = [
            node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        ]
        loads = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
        self._only_called = {name for name in called if called.count(name) == loads.count(name)}

    def __missing__(self, name: str) -> Any:
        if name not in self._program:
            raise KeyError(name)
        if name in self._only_called:  # the call itself finds out whether it is there
            return _Object(self._link, ["name", name])
        return self._link.ask("value", ["name", name])


def _run_functions(names: _Names, link: _Link) -> None:
    """Run what a test only defines: functions that begin with ``test``, and classes of unittest."""
    unittest = sys.modules.get("unittest")
    cases = [
        value
        for value in list(names.values())
        if unittest and isinstance(value, type) and issubclass(value, unittest.TestCase)
    ]
    if unittest and cases and not _outcome(unittest):
        suite = unittest.TestSuite(map(unittest.defaultTestLoader.loadTestsFromTestCase, cases))
        unittest.TextTestRunner(stream=sys.stderr).run(suite)
    if not link.calls:
        for name, value in list(names.items()):
            if name.startswith("test") and callable(value) and not isinstance(value, type):
                value()
    if unittest and "failed" in _outcome(unittest):
        raise AssertionError("a case of unittest failed")


def _outcome(unittest: Any) -> list[str]:
    """What became of the cases of unittest so far; from the first call on it is noted."""
    result = unittest.TestResult
    if "outcome" not in result.__dict__:
        result.outcome = []
        for method, outcome in (("addSuccess", "passed"), ("addFailure", "failed"), ("addError", "failed")):
            before = getattr(result, method)

            def noted(self: Any, *args: Any, before: Any = before, outcome: str = outcome) -> None:
                result.outcome.append(outcome)
                before(self, *args)

            setattr(result, method, noted)
    found: list[str] = result.outcome
    return found


class _Main:
    """The module of a test, for `unittest.main`."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.__dict__ = names


def check() -> None:
    """Run the tests that lines have, one after the other, and say of each whether it passed."""
    lines, out = private()
    sys.argv = ["test.py"]
    for line in lines:
        link = _Link(lines, out)
        try:
            tree = ast.parse(json.loads(line))
            names = _Names(link, tree)
            names["__equal__"] = equal
            sys.modules["__main__"] = _Main(names)  # type: ignore[assignment]
            if any(isinstance(node, ast.alias) and node.name.startswith("unittest") for node in ast.walk(tree)):
                import unittest  # noqa: F401
            if "unittest" in sys.modules:
                _outcome(sys.modules["unittest"]).clear()
            try:
                exec(compile(forgiving(tree), "test.py", "exec", dont_inherit=True), names)
            except SystemExit:  # of unittest.main
                if "unittest" not in sys.modules or not _outcome(sys.modules["unittest"]):
                    raise
            _run_functions(names, link)
            if link.calls:
                say(out, "failed" if _GONE in link.calls else "passed")  # though the test may have caught it
            else:
                say(out, "unusable", "it calls no function of the program, so it would pass whatever that is")
        except _Unusable as error:
            say(out, "unusable", str(error))
        except BaseException as error:
            own_import = isinstance(error, ImportError) and not hasattr(error, "remote")
            if link.calls and not own_import:
                say(out, "failed")
            else:
                say(out, "unusable", f"it raised before it called the program: {error!r}")


if __name__ == "__main__":
    {"run": run, "serve": serve, "check": check}[sys.argv[1]]()
