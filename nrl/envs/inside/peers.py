"""Two processes that use each other's objects: values travel as data, objects stay, and the other end has a proxy.

A message is a line of JSON: ``["ask", operation, target, args, kwargs]``, and the answer ``["value", value, args]`` or
``["error", exception]``. While an end waits for an answer, it answers what the other end asks.
"""

import builtins
import contextlib
import copy
import json
import operator
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from nrl.envs.inside.proxies import (
    DUNDERS,
    has_operators,
    is_proxy,
    mirrored_class,
    mirrored_error,
    proxy_of,
    target_of,
)
from nrl.envs.inside.values import decode, encode, say

__all__ = ["Peer", "PeerGone"]


class PeerGone(BaseException):
    """The other end has ended, or took too long."""


def _reflected(name: str) -> Callable[..., Any]:
    return lambda target, other: getattr(operator, name)(other, target)


_BINARY = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "matmul", "pow", "lshift", "rshift", "and_", "or_", "xor"),
    *("lt", "le", "gt", "ge", "eq", "ne"),
)
_INPLACE = tuple(f"i{name.rstrip('_')}" for name in _BINARY[:13])
_RETURNS_ITSELF = {"new", "enter", "aenter", *_INPLACE}
"""The operations of a test whose value is, as a rule, the object itself."""
_UNARY = ("neg", "pos", "invert", "getitem", "setitem", "delitem", "contains", "index")


def _exit(target: Any, error: Any) -> bool:
    return bool(target.__exit__(None if error is None else type(error), error, None))


_OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in (*_BINARY, *_INPLACE, *_UNARY)},
    **{f"r{name.rstrip('_')}": _reflected(name) for name in _BINARY[:13]},
    **{kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list)},
    **{function.__name__: function for function in (len, iter, next, repr, abs, hash, round, reversed, dir, divmod)},
    **{function.__name__: function for function in (isinstance, issubclass, setattr, delattr, format, aiter, anext)},
    "get": getattr,
    "enter": lambda target: target.__enter__(),
    "aenter": lambda target: target.__aenter__(),
    "aexit": lambda target, error: target.__aexit__(error and type(error), error, None),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "exit": _exit,
    "call": lambda target, /, *args, **kwargs: target(*args, **kwargs),
    "new": lambda target, /, *args, **kwargs: target(*args, **kwargs),
    "value": lambda target: target,
}


_COMPARES_OBJECTS = {
    name: getattr(object, name) for name in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
}


class Peer:
    """One end.

    Args:
        lines: gives the lines of the other end.
        out: the file descriptor to write to.
        prefix: what stands before each message.
        shares: whether the other end may have a reference to an object; it raises `TypeError`, if not.
        allows: whether the other end may do an operation on an object; it raises `AttributeError`, if not.
        operations: more than there are.
    """

    def __init__(
        self,
        lines: Any,
        out: int,
        *,
        prefix: Sequence[Any] = (),
        shares: Callable[[Any], None] = lambda value: None,
        allows: Callable[[str, Any, list[Any]], None] = lambda operation, target, args: None,
        operations: dict[str, Callable[..., Any]] | None = None,
    ) -> None:
        self._lines, self._out, self._prefix = lines, out, prefix
        self._shares, self._allows, self._operations = shares, allows, _OPERATIONS | (operations or {})
        self._objects, self._indices, self._lock = list[Any](), dict[int, int](), threading.RLock()
        self._described = dict[int, list[Any]]()
        self.proxies = dict[int, Any]()
        self.names = dict[str, Any]()
        self.named: Callable[[str], Any] = self.names.__getitem__
        self.calls = list[str]()
        self.took: Callable[[], list[str]] = list
        self.is_answering = False

    # --- What this end asks

    def ask(self, operation: str, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Return the value of an operation on something of the other end."""
        with self._lock:
            encoded = self._encoded(target, args, kwargs)
            self.calls.append(operation)
            self._say("ask", operation, target_of(target) if is_proxy(target) else target, *encoded)
            while True:
                what, *parts = self._receive()
                if what != "ask":
                    break
                self._answer(parts)
            if what == "gone":
                self.calls.append("gone")
                raise PeerGone
            try:
                if what == "error":
                    error = decode(parts[0], self._resolve)
                elif what == "value":
                    after = decode(parts[1], self._resolve_same)
                    inputs = [*args, *kwargs.values()]
                    is_same = isinstance(parts[0], list) and parts[0][:1] == ["same"]
                    resolve = self._resolve_same if operation in _RETURNS_ITSELF else self._resolve
                    value = inputs[parts[0][1]] if is_same else decode(parts[0], resolve)
                else:
                    raise ValueError(what)
            except Exception as error_of_line:
                raise RuntimeError("the program answered with what is no value") from error_of_line
            if what == "error":
                raise self._raisable(error, operation)
            for mine, theirs in zip(inputs, after, strict=False):  # a function may change what it is given
                _update(mine, theirs)
            return value

    def _encoded(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return encode(list(args), self._refer), encode(kwargs, self._refer)

    @staticmethod
    def _raisable(error: Any, operation: str) -> BaseException:
        """An error of the other end, as it may be raised here."""
        usable = isinstance(error, Exception | SystemExit)
        ends_loop = operation not in ("next", "result") and isinstance(error, StopIteration | StopAsyncIteration)
        if not usable or ends_loop:  # which ``map`` and ``for`` would take for the end of theirs
            error = RuntimeError(type(error).__name__)
        error.__dict__["remote"] = True
        return error  # type: ignore[no-any-return]

    def _receive(self) -> list[Any]:
        try:
            message = json.loads(self._lines.readline())
            output = message.pop() if message and isinstance(message[-1], dict) else {}
            for name in output.keys() & {"stdout", "stderr"}:
                getattr(sys, name).write(str(output[name]))
        except Exception as error:
            raise RuntimeError("the program answered with what is no value") from error
        return message if isinstance(message, list) and message else ["nothing"]

    def _say(self, *message: Any) -> None:
        output = self.took()
        tail = [dict(zip(("stdout", "stderr"), output, strict=False))] if any(output) else []
        say(self._out, *self._prefix, [*message, *tail]) if self._prefix else say(self._out, *message, *tail)

    # --- What it answers

    def serve(self) -> None:
        """Answer until there are no more lines."""
        while line := self._lines.readline():
            what, *parts = json.loads(line)
            self._answer(parts if what == "ask" else [])

    def _answer(self, parts: list[Any]) -> None:
        before, self.is_answering = self.is_answering, True
        try:
            operation, encoded_target, *encoded = parts
            target = self._resolve(encoded_target[0], encoded_target[1:])
            args, kwargs = (decode(part, self._resolve) for part in encoded)
            self._allows(operation, target, args)
            value = self._operations[operation](target, *args, **kwargs)
            inputs = [*args, *kwargs.values()]
            same = [place for place, each in enumerate(inputs) if each is value]
            if same and isinstance(value, list | dict | set):
                result: Any = ["same", same[0]]
            elif operation == "new" and not isinstance(value, tuple) and type(value).__module__ == "program":
                result = self._refer(value)  # also a subclass of a list, whose own methods the test calls
            else:
                result = encode(value, self._refer)
            message: list[Any] = ["value", result, encode(inputs, self._refer)]
        except BaseException as error:
            message = ["error", self._error(error)]
        self.is_answering = before
        try:
            self._say(*message)
        except (RecursionError, TypeError, ValueError):  # it nests too deep; nothing was written
            self._say("error", ["builtin", "RuntimeError"])

    def _error(self, error: BaseException) -> Any:
        try:
            return self._refer(error)
        except BaseException:
            return ["builtin", "RuntimeError"]

    # --- References

    def _refer(self, value: Any) -> Any:
        if is_proxy(value):
            return target_of(value)
        if isinstance(value, BaseException):
            return self._describe_error(value)
        if isinstance(value, type) and value.__module__ == "builtins" and value is not type:
            return ["builtin", value.__name__]
        self._shares(value)
        if isinstance(value, type):
            return self._describe_class(value)
        kind = "awaitable" if hasattr(type(value), "__await__") else "object"
        extra: list[Any] = []
        if isinstance(value, int | str | float | tuple):  # of a class of the program: it is a value, and has attributes
            kind, extra = "data", [next(base.__name__ for base in (int, str, float, tuple) if isinstance(value, base))]
            plain = str.__str__(value) if isinstance(value, str) else getattr(builtins, extra[0])(value)
            extra += [encode(plain, self._refer), list(getattr(value, "_fields", ()))]
        return [kind, self._index(value), self._describe_class(type(value)), *extra]

    def _index(self, value: Any) -> int:
        if (index := self._indices.get(id(value))) is None:
            index = self._indices[id(value)] = len(self._objects)
            self._objects.append(value)
        return index

    def _describe_class(self, cls: type) -> list[Any]:
        index = self._index(cls)
        if index not in self._described:
            self._described[index] = self._description(cls, index)
        return self._described[index]

    def _description(self, cls: type, index: int) -> list[Any]:
        own = [base for base in cls.__bases__ if base.__module__ in ("program", "test")]
        return [
            "class",
            index,
            cls.__name__,
            [self._describe_class(base) for base in own],
            [name for name in DUNDERS if _defines(cls, f"__{name}__")],
            list(getattr(cls, "__dataclass_fields__", ())),
            cls.__doc__ if isinstance(cls.__doc__, str) else None,
            self._error_bases(cls),
        ]

    @staticmethod
    def _error_bases(cls: type) -> list[list[str]]:
        """The exception classes of Python and its library that a class derives from, or is."""
        if not issubclass(cls, BaseException):
            return []
        return [[base.__module__, base.__name__] for base in cls.__mro__ if base.__module__ not in ("program", "test")][
            :-1
        ]

    def _describe_error(self, error: BaseException) -> list[Any]:
        try:  # the message of an assertion may have what is expected, which stays with the test
            inputs = [] if isinstance(error, AssertionError) else list(error.args)
            if isinstance(error, OSError) and error.filename is not None:
                inputs = [error.errno, error.strerror, error.filename]
            args = encode(inputs, self._refer)
        except Exception:
            args = ["list"]
        cause = None if error.__cause__ is None else self._describe_error(error.__cause__)
        fields = dict[str, Any]()
        for name, value in getattr(error, "__dict__", {}).items():
            with contextlib.suppress(Exception):
                fields[str(name)] = encode(value)
        return ["error", self._index(error), self._describe_class(type(error)), args, cause, fields]

    def _resolve(self, kind: str, parts: list[Any]) -> Any:
        match kind:
            case "name":
                return self.named(parts[0])
            case "system":
                return None
            case "builtin":
                return getattr(builtins, parts[0])
            case "yours":
                return self._objects[parts[0]]
            case "class":
                return self._class(parts)
            case "error":
                index, cls, args, cause, fields = parts
                if index not in self.proxies:
                    inputs = decode(args, self._resolve)
                    error = mirrored_error(["yours", index], self._class(cls[1:]), inputs)
                    error.__dict__.update({name: decode(value) for name, value in fields.items()})
                    if cause is not None:
                        error.__cause__ = self._resolve(cause[0], cause[1:])
                    self.proxies[index] = error
                return self.proxies[index]
            case "object" | "awaitable" | "data":
                index, cls, *extra = parts
                # What the program hands over is its answer, also where it is an instance that the test has made: the
                # class of that may call it equal to everything. So the test gets another proxy, without its operators.
                if index not in self.proxies or has_operators(self.proxies[index]):
                    value = [extra[0], decode(extra[1], self._resolve), extra[2]] if extra else None
                    proxy = proxy_of(self, ["yours", index], self._class(cls[1:]), kind, value)
                    self.proxies.setdefault(index, proxy)
                    return proxy
                return self.proxies[index]
        raise ValueError(kind)

    def _resolve_same(self, kind: str, parts: list[Any]) -> Any:
        """Resolve a reference to what the test has already, or makes by this operation."""
        known = self.proxies.get(parts[0]) if kind in ("object", "awaitable", "data") else None
        return self._resolve(kind, parts) if known is None else known

    def _class(self, parts: list[Any]) -> Any:
        index, name, bases, dunders, fields, doc, errors = parts
        if index not in self.proxies:
            own = [self._class(base[1:]) for base in bases]
            self.proxies[index] = mirrored_class(self, ["yours", index], name, own, dunders, fields, doc, errors)
        return self.proxies[index]


def _defines(cls: type, name: str) -> bool:
    """Return whether a class has a method that is not the one with which every object is compared."""
    method = next((base.__dict__[name] for base in cls.__mro__ if name in base.__dict__), None)
    return method is not None and method is not _COMPARES_OBJECTS.get(name)


def _update(mine: Any, theirs: Any) -> None:
    """Change a container into another one, in place, and those within it likewise."""
    if type(mine) is not type(theirs) or is_proxy(mine):
        return
    if isinstance(mine, list | tuple) and len(mine) == len(theirs):
        for place, (old, new) in enumerate(zip(list(mine), theirs, strict=True)):
            if type(old) is type(new) and isinstance(old, list | dict | set | tuple | bytearray):
                _update(old, new)
            elif isinstance(mine, list):
                mine[place] = new
    elif isinstance(mine, list | bytearray):
        mine[:] = theirs
    elif isinstance(mine, dict):
        kept = {key: old for key, old in mine.items() if isinstance(old, list | dict | set)}
        kept = {key: old for key, old in kept.items() if key in theirs and type(old) is type(theirs[key])}
        for key, old in kept.items():
            _update(old, theirs[key])
        mine.clear()
        mine.update({key: kept.get(key, new) for key, new in theirs.items()})
    elif isinstance(mine, set):
        mine.clear()
        mine.update(theirs)
    elif type(mine).__name__ == "deque":
        mine.clear()
        mine.extend(theirs)
