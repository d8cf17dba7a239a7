"""Both ends of a call of a function that a model wrote: its program, and the test that calls it.

They are two processes in two sandboxes. Values alone go between them, as lines of JSON; so nothing that the program
does to its interpreter reaches the comparison, and nothing that is compared with reaches the program.
"""

import ast
import builtins
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["check", "decode", "encode", "serve"]

_SCALARS = (bool, int, float, str)


def encode(value: Any) -> Any:
    """What JSON has, for a value made of Python's own types; subclasses count as these.

    Raises:
        TypeError: it is something else.

    >>> encode({(1, 2): [None]})
    ['dict', [['tuple', 1, 2], ['list', None]]]
    """
    if value is None or type(value) in _SCALARS:
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, bytes | bytearray):
        return [type(value).__name__, bytes(value).hex()]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, dict):
        return ["dict", *([encode(key), encode(each)] for key, each in value.items())]
    for each_kind in (list, tuple, set, frozenset):
        if isinstance(value, each_kind):
            return [each_kind.__name__, *map(encode, value)]
    raise TypeError(f"{type(value).__name__} is no data")


def decode(value: Any) -> Any:
    """The value again.

    >>> decode(encode({(1, 2): {3.5, b"x"}})) == {(1, 2): {3.5, b"x"}}
    True
    """
    if not isinstance(value, list):
        return value
    kind, *parts = value
    match kind:
        case "bytes":
            return bytes.fromhex(parts[0])
        case "bytearray":
            return bytearray.fromhex(parts[0])
        case "complex":
            return complex(*parts)
        case "dict":
            return {decode(key): decode(each) for key, each in parts}
    kinds: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
    return kinds[kind](map(decode, parts))


def _private() -> tuple[Any, int]:
    """What was standard input and output, out of the way of a program that reads and prints."""
    lines, out = os.fdopen(os.dup(0), "rb"), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    return lines, out


def _say(out: int, what: str, *more: Any) -> None:
    data = json.dumps([what, *more]).encode() + b"\n"
    while data:
        data = data[os.write(out, data) :]


# --- The program's end.


def serve() -> None:
    """Run the program that the first line has, and call its functions as further lines say."""
    lines, out = _private()
    namespace: dict[str, Any] = {"__name__": "program"}  # its own demonstration, if it has one, is not asked for
    try:
        exec(compile(json.loads(lines.readline()), "program.py", "exec"), namespace)
    except BaseException as error:
        _say(out, "error", type(error).__name__)
        return
    _say(out, "ready")
    for line in lines:
        try:
            name, args, kwargs = decode(json.loads(line))
            value = encode(namespace[name](*args, **kwargs))
            _say(out, "value", value, encode(args))
        except BaseException as error:
            _say(out, "error", type(error).__name__)


# --- The test's end.


class _Unusable(BaseException):
    """The test asks for what is no call with data: the mistake of the test's author."""


_GONE = "gone"


class _Gone(BaseException):
    """There is no answer: the program ended, or took too long."""


class _Remote:
    """A function of the program, as the test sees it."""

    def __init__(self, name: str, lines: Any, out: int, calls: list[str]) -> None:
        self._name, self._lines, self._out, self._calls = name, lines, out, calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            said = [self._name, encode(args), encode(kwargs)]
        except TypeError as error:
            raise _Unusable(f"it calls {self._name} with what is no data: {error}") from None
        self._calls.append(self._name)
        _say(self._out, "call", ["list", *said])
        return self._answered(args)

    def __getattr__(self, name: str) -> Any:
        raise _Unusable(f"it reads {self._name}.{name}; a test can only call functions of the program, with data")

    def _answered(self, args: Sequence[Any]) -> Any:
        line = self._lines.readline()
        try:
            what, *more = json.loads(line)
            if what == "value":
                value, after = decode(more[0]), decode(more[1])
            elif what == "error":
                value, after = str(more[0]), ()
        except Exception as error:
            raise RuntimeError("the program answered with what is no value") from error
        if what == "gone":
            self._calls.append(_GONE)
            raise _Gone
        if what == "error":
            kind = getattr(builtins, value, None)
            raise (kind if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError)
        for mine, theirs in zip(args, after, strict=False):  # a function may change what it is given
            if type(mine) is type(theirs) and isinstance(mine, list | bytearray):
                mine[:] = theirs
            elif type(mine) is type(theirs) and isinstance(mine, dict | set):
                mine.clear()
                mine.update(theirs)
        return value


def _unbound(tree: ast.AST) -> set[str]:
    """The names that a test reads and neither defines nor finds in Python."""
    read, bound = set(), set(dir(builtins))
    for node in ast.walk(tree):
        match node:
            case ast.Name(name, ast.Load()):
                read.add(name)
            case ast.Name(name) | ast.FunctionDef(name) | ast.ClassDef(name) | ast.arg(name):
                bound.add(name)
            case ast.alias(name, asname):
                bound.add(asname or name.split(".")[0])
            case ast.ExceptHandler(_, str(name)):
                bound.add(name)
    return read - bound


def check() -> None:
    """Run the tests that lines have, one after the other, and say of each whether it passed."""
    lines, out = _private()
    for line in lines:
        calls: list[str] = []
        try:
            tree = ast.parse(json.loads(line))
            remotes = {name: _Remote(name, lines, out, calls) for name in _unbound(tree)}
            exec(compile(tree, "test.py", "exec"), {"__name__": "test", **remotes})
            if calls:
                _say(out, "failed" if _GONE in calls else "passed")  # though the test may have caught it
            else:
                _say(out, "unusable", "it calls no function of the program, so it would pass whatever that is")
        except _Unusable as error:
            _say(out, "unusable", str(error))
        except BaseException as error:
            if calls:
                _say(out, "failed")
            else:
                _say(out, "unusable", f"it raised before it called the program: {error!r}")


if __name__ == "__main__":
    {"serve": serve, "check": check}[sys.argv[1]]()
