"""What stands at one end for an object, a class or an exception of the other end.

A proxy is equal to nothing of its own end, and takes part in no arithmetic with that, since the other end would decide.
Instances that the test makes itself, by a class that it names, are free to: a test of a class is a test of its
operators. A comparison that they win has to be lost by other values, as `nrl.envs.inside.contrasts` has it.
"""

import sys
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

from nrl.envs.inside.contrasts import differs

__all__ = [
    "DUNDERS",
    "INDEPENDENT_LINES",
    "Proxy",
    "SaysNothing",
    "has_operators",
    "is_proxy",
    "mirrored_class",
    "mirrored_error",
    "proxy_of",
    "target_of",
]

_CONTRASTED = ("lt", "le", "gt", "ge", "eq")
_COMPARES = (*_CONTRASTED, "ne")
_ARITHMETIC = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "matmul", "pow", "lshift", "rshift", "and", "or", "xor"),
)
_DECIDED = (*_COMPARES, *_ARITHMETIC, "divmod", *(f"{side}{name}" for side in "ri" for name in _ARITHMETIC))
_UNARY = (
    *("bool", "len", "int", "float", "complex", "index", "bytes", "abs", "neg", "pos", "invert", "round", "reversed"),
    *("getitem", "setitem", "delitem", "next", "format"),
)
_PROTOCOLS = ("iter", "contains", "call", "enter", "exit", "aiter", "anext", "aenter", "aexit", "await", "hash")
DUNDERS = (*_DECIDED, *_UNARY, *_PROTOCOLS)
"""The methods of a class that its mirror has, too."""

_FORWARDED = ("name", "qualname", "doc", "annotations", "dict", "defaults", "wrapped", "module")
_OWN = ("_nrl_peer", "_nrl_target", "_nrl_free", "_nrl_context", "_nrl_arguments")


class _Class(type):
    """The class of a mirrored class: what a test does with a class of the program."""

    __doc__ = property(lambda cls: cls._nrl_doc)
    _nrl_doc: str | None = None
    _nrl_peer_of_class: Any
    _nrl_made_by_test = False

    def __call__(cls, /, *args: Any, **kwargs: Any) -> Any:
        made = cls._nrl_peer_of_class.ask("new", cls, *args, **kwargs)
        if Proxy in type(made).__mro__:
            object.__setattr__(made, "_nrl_free", made._nrl_free or cls._nrl_made_by_test)
            object.__setattr__(made, "_nrl_arguments", (cls, args, kwargs))
        return made

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_nrl_") or (name.startswith("__") and name.strip("_") not in _FORWARDED):
            raise AttributeError(name)
        return cls._nrl_peer_of_class.ask("get", cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        if name.startswith("_nrl_") or name in ("__abstractmethods__", "__doc__"):
            type.__setattr__(cls, name, value)
        else:
            cls._nrl_peer_of_class.ask("setattr", cls, name, value)

    def __instancecheck__(cls, instance: Any) -> bool:
        return issubclass(type(instance).__dict__.get("_nrl_class", type(instance)), cls)

    def __getitem__(cls, key: Any) -> Any:
        return cls._nrl_peer_of_class.ask("getitem", cls, key)

    def __iter__(cls) -> Any:
        return cls._nrl_peer_of_class.ask("iter", cls)

    def __len__(cls) -> int:
        return int(cls._nrl_peer_of_class.ask("len", cls))

    def __contains__(cls, value: Any) -> bool:
        return any(item is value or item == value for item in cls)

    def __bool__(cls) -> bool:
        return True


class Proxy(metaclass=_Class):
    """An object of the other end that is no data."""

    __slots__ = _OWN

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_nrl_") or (name.startswith("__") and name.strip("_") not in _FORWARDED):
            raise AttributeError(name)
        return self._nrl_peer.ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._nrl_peer.ask("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._nrl_peer.ask("delattr", self, name)

    def __hash__(self) -> int:
        return hash(tuple(self._nrl_target))

    def __eq__(self, other: object) -> Any:
        return self is other or NotImplemented

    def __repr__(self) -> str:
        return str(self._nrl_peer.ask("repr", self))

    def __str__(self) -> str:
        return str(self._nrl_peer.ask("str", self))

    def __dir__(self) -> Any:
        return self._nrl_peer.ask("dir", self)

    def __copy__(self) -> Any:
        return self._nrl_peer.ask("copy", self)

    def __deepcopy__(self, memo: Any) -> Any:
        return self._nrl_peer.ask("deepcopy", self)

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        return self._nrl_peer.ask("get", self, "__dict__")


def has_operators(value: Any) -> bool:
    """Return whether a value is compared by operators that the program defines, since the test has made it."""
    mirrored = type(value).__mro__
    if Proxy not in mirrored or not value._nrl_free:
        return False
    names = {f"__{name}__" for name in (*_DECIDED, "contains")}
    return any(names & cls.__dict__.keys() for cls in mirrored[: mirrored.index(Proxy)])


def is_proxy(value: Any) -> bool:
    """Whether a value stands for something of the other end."""
    kind = type(value)
    is_mirrored = issubclass(kind, _Class | _ErrorClass | Proxy) or isinstance(kind, _ErrorClass)
    return is_mirrored or ("_nrl_class" in kind.__dict__ and "_nrl_target" in value.__dict__)


# --- Methods of mirrored classes


def _unary(name: str) -> Any:
    return lambda self, *args: self._nrl_peer.ask(name, self, *args)


def _between(name: str) -> Any:
    operation = f"{name}_" if name in ("and", "or") else name

    def operate(self: Any, other: Any, *more: Any) -> Any:
        if not (self._nrl_free or is_proxy(other)):
            return NotImplemented
        result = self._nrl_peer.ask(operation, self, other, *more)
        if name in _CONTRASTED and result:
            _check_contrast(name, self, other)
        if isinstance(result, Proxy) and self._nrl_free:
            object.__setattr__(result, "_nrl_free", True)
        return result

    return operate


class SaysNothing(BaseException):
    """A comparison that the program decides holds for all values, so the test that makes it has failed."""


def _check_contrast(operation: str, target: Any, other: Any) -> None:
    """Check that an operation that holds fails for other values, and raise `SaysNothing` if not."""
    ask = target._nrl_peer.ask
    if operation in ("lt", "gt") and is_proxy(other):
        has_contrast = not ask(operation, other, target)
    else:
        has_contrast = differs(lambda one, another: ask(operation, one, another), (target, other), _remade)
    if not has_contrast:
        raise SaysNothing(operation)


def _remade(value: Any, vary: Any) -> Any:
    """Make an instance of the program's class again, with other arguments than the test made it with."""
    if type(type(value)) is not _Class or value._nrl_arguments is None:
        return
    cls, args, kwargs = value._nrl_arguments
    for varied in vary([*args, *kwargs.values()]):
        try:
            yield cls(*varied[: len(args)], **dict(zip(kwargs, varied[len(args) :], strict=True)))
        except Exception:  # it does not take such arguments
            continue


def _contains(self: Any, value: Any) -> bool:
    if self._nrl_free or is_proxy(value):
        is_in = bool(self._nrl_peer.ask("contains", self, value))
        if is_in:
            _check_contrast("contains", self, value)
        return is_in
    return any(item is value or item == value for item in self)


def _iter(self: Any) -> Any:
    return self._nrl_peer.ask("iter", self)


def _exit(self: Any, kind: Any, error: Any, trace: Any) -> bool:
    """Leave a block. The program may suppress no error that depends on what it did, such as that of an assertion."""
    return bool(self._nrl_peer.ask("exit", self, _shared_error(error))) and _is_independent(error)


async def _aexit(self: Any, kind: Any, error: Any, trace: Any) -> bool:
    return bool(await self._nrl_peer.ask("aexit", self, _shared_error(error))) and _is_independent(error)


def _shared_error(error: Any) -> Any:
    """The error of a block, for the program to see: the message of one that depends on it may have what is expected."""
    return error if error is None or hasattr(error, "remote") or _is_independent(error) else RuntimeError()


def _is_independent(error: Any) -> bool:
    """Whether a line of the test raised an error that reads nothing but what Python has."""
    trace = getattr(error, "__traceback__", None)
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_frame.f_code.co_filename != "test.py":
        return False
    return trace.tb_lineno in INDEPENDENT_LINES


INDEPENDENT_LINES = set[int]()
"""The lines of the test that read nothing but what Python has."""


async def _steps(awaitable: Any) -> Any:
    """Await something of the program, whose event loop runs a little at a time."""
    import asyncio

    try:
        while not awaitable._nrl_peer.ask("step", awaitable):
            await asyncio.sleep(0)
    except asyncio.CancelledError:
        awaitable._nrl_peer.ask("cancel", awaitable)
        raise
    return awaitable._nrl_peer.ask("result", awaitable)


def _coroutine(self: Any) -> Any:
    if getattr(self, "_nrl_context", None) is None:
        object.__setattr__(self, "_nrl_context", _steps(self))
    return self._nrl_context


_AWAITABLE = {
    "__await__": lambda self: _coroutine(self).__await__(),
    "send": lambda self, value: _coroutine(self).send(value),
    "throw": lambda self, *error: _coroutine(self).throw(*error),
    "close": lambda self: _coroutine(self).close(),
}


_DOC = property(lambda self: self._nrl_peer.ask("get", self, "__doc__"))
_METHODS: dict[str, Any] = {
    **{name: _unary(name) for name in _UNARY if name != "int" and name != "float"},
    **{name: _between(name) for name in _DECIDED},
    "int": lambda self: int(self._nrl_peer.ask("int", self)),
    "float": lambda self: float(self._nrl_peer.ask("float", self)),
    "call": lambda self, /, *args, **kwargs: self._nrl_peer.ask("call", self, *args, **kwargs),
    "contains": _contains,
    "iter": _iter,
    "enter": _unary("enter"),
    "exit": _exit,
    "aiter": _unary("aiter"),
    "anext": _unary("anext"),
    "aenter": _unary("aenter"),
    "aexit": _aexit,
    "hash": lambda self: int(self._nrl_peer.ask("hash", self)),
}


def mirrored_class(
    peer: Any, target: list[Any], name: str, bases: Sequence[Any], dunders: Sequence[str], fields: Sequence[str],
    doc: str | None, errors: Sequence[Sequence[str]],
) -> Any:  # fmt: skip
    """Make a class that stands for one of the other end; of Python's own exceptions, return the class itself."""
    if errors:
        known = next((found for each in errors if (found := _own_error(*each)) is not None), Exception)
        if not bases and errors[0][1] == name == known.__name__:
            return known
        members = {"_nrl_class_target": target, "_nrl_peer": peer, "__doc__": doc}
        members |= {"__getattr__": _error_attribute, "__str__": _error_text}
        own: Any = tuple(base for base in bases if isinstance(base, type) and issubclass(base, BaseException))
        return _ErrorClass(name, own or (known,), members)
    members = {
        "__slots__": (),
        "__doc__": _DOC,
        "_nrl_doc": doc,
        "_nrl_class_target": target,
        "_nrl_peer_of_class": peer,
    }
    members |= {f"__{each}__": _METHODS[each] for each in dunders if each in _METHODS}
    if "__await__" in {f"__{each}__" for each in dunders}:
        members |= _AWAITABLE
    if fields:
        import dataclasses

        members["__dataclass_fields__"] = dataclasses.make_dataclass(name, map(str, fields)).__dataclass_fields__  # type: ignore[attr-defined]
    if name == "generator":
        import types

        members["__class__"] = property(lambda self: types.GeneratorType)
    own = tuple(base for base in bases if isinstance(base, _Class))
    return _Class(name, own or (Proxy,), members)


def proxy_of(peer: Any, target: list[Any], cls: Any, kind: str, value: Any) -> Any:
    """Make what stands for an object of the other end: a proxy; or, for ``"data"``, a value that has its attributes."""
    if kind != "data":
        proxy = object.__new__(cls)
        for name, part in zip(_OWN, (peer, target, False, None, None), strict=True):
            object.__setattr__(proxy, name, part)
        return proxy
    base_name, plain, fields = value
    members: dict[str, Any] = {"_nrl_peer": peer, "_nrl_class": cls, "__getattr__": _data_attribute}
    if base_name == "tuple":
        base: Any = namedtuple(str(cls.__name__), list(map(str, fields)), rename=True)  # type: ignore[misc]
        made = type(str(cls.__name__), (base,), members)(*plain)
    else:
        members |= {"__repr__": lambda self: peer.ask("repr", self)}
        if base_name != "str":
            members |= {"__str__": lambda self: peer.ask("str", self)}
            members |= {"__format__": lambda self, form: peer.ask("format", self, form)}
        made = type(str(cls.__name__), ({"int": int, "float": float, "str": str}[base_name],), members)(plain)
    made.__dict__["_nrl_target"] = target
    return made


def mirrored_error(target: list[Any], cls: Any, args: Sequence[Any]) -> BaseException:
    """Make what stands for an exception of the other end."""
    if not isinstance(cls, _ErrorClass):
        try:
            return cls(*args)  # type: ignore[no-any-return]
        except Exception:  # it wants other arguments than it keeps
            error = cls.__new__(cls, *args)
            error.args = tuple(args)
            return error  # type: ignore[no-any-return]
    kind: Any = cls
    error = kind.__new__(kind, *args)
    error.__dict__["_nrl_target"] = target
    return error  # type: ignore[no-any-return]


def target_of(value: Any) -> list[Any]:
    """The reference of a proxy, by which the other end finds what it stands for."""
    target: list[Any] = getattr(value, "_nrl_class_target" if isinstance(value, type) else "_nrl_target")
    return target


def _data_attribute(self: Any, name: str) -> Any:
    if name.startswith(("__", "_nrl_")) or "_nrl_target" not in self.__dict__:  # a copy by ``_replace`` has none
        raise AttributeError(name)
    return self._nrl_peer.ask("get", self, name)


def _error_attribute(self: Any, name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    return self._nrl_peer.ask("get", self, name)


def _error_text(self: Any) -> str:
    return str(self._nrl_peer.ask("str", self))


class _ErrorClass(type):
    """The class of a mirrored exception class."""

    def __call__(cls, /, *args: Any, **kwargs: Any) -> Any:
        return cls._nrl_peer.ask("new", cls, *args, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return cls._nrl_peer.ask("get", cls, name)


def _own_error(module: str, name: str) -> Any:
    """An exception class of Python or of a module that the test has imported, but for those that steer its tests."""
    top = module.partition(".")[0]
    if top not in sys.stdlib_module_names or top == "unittest" or module not in sys.modules:
        return None
    found = getattr(sys.modules[module], name, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None
