"""Both ends of a call of a function that a model wrote: its program, and the test that calls it.

They are two processes in two sandboxes. Values alone go between them, as lines of JSON; so nothing that the program
does to its interpreter reaches the comparison, and nothing that is compared with reaches the program. An object that is
no data stays where it is: the other end has a reference to it, and reads its attributes and calls its methods there.
"""

import ast
import builtins
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from nrl.envs.inside.assertions import equal, forgiving, independent_lines, plain_classes, unbound
from nrl.envs.inside.peers import Peer
from nrl.envs.inside.proxies import INDEPENDENT_LINES, is_proxy
from nrl.envs.inside.values import private, say

__all__ = ["NODES", "check", "run", "serve"]


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


_OUTPUT = 1 << 20  # bytes of what a call prints
NODES = """
class ListNode:
    def __init__(self, val=0, next=None): self.val, self.next = val, next
class TreeNode:
    def __init__(self, val=0, left=None, right=None): self.val, self.left, self.right = val, left, right
"""


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
    if used & {"ListNode", "TreeNode"}:  # LeetCode gives them, and programs have them in a comment, if at all
        nodes: dict[str, Any] = {"__name__": "program"}
        exec(NODES, nodes)
        found |= {name: nodes[name] for name in ("ListNode", "TreeNode")}
    return found


def run() -> None:
    """Run ``main.py`` as a program that reads and prints."""
    sys.set_int_max_str_digits(0)
    source = Path("main.py").read_text(encoding="utf-8", errors="replace")
    main = ModuleType("__main__")
    main.__dict__.update(_preamble(source), __file__="main.py")
    sys.argv, sys.modules["__main__"] = ["main.py"], main
    exec(compile(source, "main.py", "exec", dont_inherit=True), main.__dict__)


class _Input(io.TextIOBase):
    """Standard input of the program, which is that of the test."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def readable(self) -> bool:
        return True

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        return str(self._peer.ask("readline", ["system"])) if self._peer.is_answering else ""

    def read(self, size: int | None = -1) -> str:
        return str(self._peer.ask("read", ["system"])) if self._peer.is_answering else ""

    def asked(self, prompt: object = "") -> str:
        """Return what `input` returns."""
        if not self._peer.is_answering:
            raise EOFError
        return str(self._peer.ask("input", ["system"], str(prompt)))


class _Outputs:
    """What the program writes, for the test to see."""

    def __init__(self) -> None:
        self._buffers = io.BytesIO(), io.BytesIO()
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(each, "utf-8", "replace", write_through=True) for each in self._buffers
        )

    def take(self) -> list[str]:
        """Return what was written since, at most a million bytes of it."""
        texts = [each.getvalue()[:_OUTPUT].decode(errors="replace") for each in self._buffers if not each.closed]
        for each in self._buffers:
            if not each.closed:
                each.seek(0)
                each.truncate()
        return texts


class _TestClass(type):
    """A class that only the test defines: the program may name it, and the test's end makes its instances."""

    _peer: Peer
    _instead: Any = None

    def _defined(cls) -> Any:
        if cls._peer.is_answering:
            try:
                return cls._peer.ask("value", ["name", cls.__name__])
            except Exception:  # not by this test
                if cls._instead is not None:
                    return cls._instead
        raise NameError(cls.__name__)

    def __call__(cls, /, *args: Any, **kwargs: Any) -> Any:
        return cls._defined()(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls._defined())


class _Loop:
    """The event loop of the program, which runs while the test awaits something."""

    def __init__(self) -> None:
        self._loop: Any = None
        self._tasks = dict[int, Any]()

    def step(self, target: Any) -> bool:
        """Run the loop a little; return whether the target is done."""
        import asyncio

        async def awaited() -> Any:
            return await target

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        if id(target) not in self._tasks:
            self._tasks[id(target)] = self._loop.create_task(awaited())
        task = self._tasks[id(target)]
        self._loop.run_until_complete(asyncio.wait({task}, timeout=0.01))
        return bool(task.done())

    def result(self, target: Any) -> Any:
        """Return the result of an awaitable, or raise its error."""
        return self._tasks[id(target)].result()

    def cancel(self, target: Any) -> None:
        """Cancel an awaitable that has begun."""
        self._tasks[id(target)].cancel()
        self.step(target)


def serve() -> None:
    """Run the program that the first line has, with the test's classes that it may name, and call its functions."""
    lines, out = private()
    loop = _Loop()
    peer = Peer(lines, out, operations={"step": loop.step, "result": loop.result, "cancel": loop.cancel})
    source, test_classes = json.loads(lines.readline())
    namespace: dict[str, Any] = {"__name__": "program"}  # its own demonstration, if it has one, is not asked for
    sys.stdin = stdin = _Input(peer)
    builtins.input = stdin.asked
    module = ModuleType("program")  # where dataclasses look for names
    module.__dict__.update(namespace | _preamble(source))
    sys.modules["program"], namespace = module, module.__dict__
    for name in test_classes:
        namespace[name] = _TestClass(name, (), {"_peer": peer, "_instead": namespace.get(name)})
    try:
        exec(compile(source, "program.py", "exec", dont_inherit=True), namespace)
    except BaseException as error:
        say(out, "error", type(error).__name__)
        return

    def named(name: str) -> Any:
        """A function of the program, or a method of its class Solution."""
        if name in namespace:
            return namespace[name]
        if hasattr(namespace.get("Solution"), name):
            return getattr(namespace["Solution"](), name)
        raise NameError(name)

    peer.named, peer.took = named, _Outputs().take
    say(out, "ready")
    peer.serve()


# --- The test's end.

_READABLE = ("_io", "types", "unittest.mock")  # modules whose objects the program may use as it likes
_HIDDEN = ("_", "gi_", "cr_", "ag_", "tb_", "f_", "func_", "reset_mock", "configure_mock", "attach_mock")


class _Unusable(BaseException):
    """The test asks for what is no call with data: the mistake of the test's author."""


def _may_share(value: Any) -> None:
    """Check that the program may have a reference to something of the test."""
    if isinstance(value, BaseException | int | float | str | tuple) or hasattr(type(value), "__next__"):
        return
    if isinstance(value, type):
        is_shared = value.__module__ == "test" or value.__module__ in sys.stdlib_module_names
    else:
        is_shared = callable(value) or type(value).__module__ in ("test", *_READABLE)
    if not is_shared:
        raise TypeError(f"{type(value).__name__} is no data")


def _may_do(operation: str, target: Any, args: list[Any]) -> None:
    """Check that the program may do an operation on something of the test: call it, and use what is public of it."""
    if operation in ("input", "readline", "read"):
        return
    if operation == "get" and args and args[0] in ("__name__", "__qualname__", "__doc__", "__module__"):
        return
    if operation in ("get", "setattr", "delattr", "dir"):
        is_open = type(target).__module__ in ("test", *_READABLE)
        hidden = not args or str(args[0]).startswith(_HIDDEN)
        if not is_open or hidden or (operation != "get" and type(target).__module__ != "test"):
            raise AttributeError(operation)


_SYSTEM: dict[str, Any] = {  # looked up when they are used: a test may replace them
    "input": lambda _, prompt: builtins.input(prompt),
    "readline": lambda _: sys.stdin.readline(),
    "read": lambda _: sys.stdin.read(),
}


class _Link(Peer):
    """The way to the program."""

    def begin(self) -> None:
        """Forget the test before, and the program that it had."""
        self.calls.clear()
        self.proxies.clear()

    def defines(self, names: dict[str, Any], plain: set[str]) -> None:
        """Let the program use those classes of a test that are plain."""
        allowed = {name: name for name in plain}
        self.named = lambda name: names[allowed[name]]

    def _encoded(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        try:
            return super()._encoded(target, args, kwargs)
        except TypeError as error:
            name = target[1] if isinstance(target, list) else type(target).__name__
            raise _Unusable(f"it calls {name} with what is no data: {error}") from None


class _Named:
    """A function of the program that the test only calls: whether it is there, the call finds out."""

    def __init__(self, link: _Link, name: str) -> None:
        self._call = lambda *args, **kwargs: link.ask("call", ["name", name], *args, **kwargs)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)  # type: ignore[no-untyped-call]


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
        is_class = name[:1].isupper()
        if name in self._only_called and not is_class:
            return _Named(self._link, name)
        value = self._link.ask("value", ["name", name])
        if is_class and isinstance(value, type) and is_proxy(value):
            type.__setattr__(value, "_nrl_made_by_test", True)
        self[name] = value
        return value


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
                result = value()
                if hasattr(result, "__await__"):
                    import asyncio

                    asyncio.run(result)
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
    link = _Link(lines, out, prefix=["call"], shares=_may_share, allows=_may_do, operations=_SYSTEM)
    for line in lines:
        link.begin()
        try:
            tree = ast.parse(json.loads(line))
            names = _Names(link, tree)
            names["__equal__"] = equal
            link.defines(names, plain_classes(tree))
            INDEPENDENT_LINES.clear()
            INDEPENDENT_LINES.update(independent_lines(tree))
            sys.modules["__main__"] = _Main(names)  # type: ignore[assignment]
            if any(isinstance(node, ast.alias) and node.name.startswith("unittest") for node in ast.walk(tree)):
                import unittest  # noqa: F401
            if "unittest" in sys.modules:
                _outcome(sys.modules["unittest"]).clear()
            try:
                exec(compile(forgiving(tree), "test.py", "exec", dont_inherit=True), names)
            except SystemExit as error:  # of unittest.main
                if hasattr(error, "remote") or "unittest" not in sys.modules or not _outcome(sys.modules["unittest"]):
                    raise
            _run_functions(names, link)
            if link.calls:
                say(out, "failed" if "gone" in link.calls else "passed")  # though the test may have caught it
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
