"""Checks of arguments against the annotations of a function or record, before anything uses them."""

import functools
import inspect
import math
import numbers
import reprlib
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, NewType, TypeAliasType, TypeVar, Union, get_args, get_origin

from nrl.errors import ArgumentError, NrlError

__all__ = [
    "UNBOUNDED",
    "Unbounded",
    "check_argument",
    "checked",
    "described",
    "register_kind",
    "similar_name",
    "with_article",
]

UNBOUNDED = "may be infinite"
"""The metadata of a number that may be infinite."""

type Unbounded = Annotated[float, UNBOUNDED]
"""A number that may be infinite, such as a bound that bounds nothing."""

# Names of the same thing in other libraries, whose users try them first
_ALIASES: Mapping[str, tuple[str, ...]] = {
    "clip": ("max_grad_norm", "grad_clip", "clip_grad", "clip_norm", "gradient_clipping", "max_norm"),
    "cp": ("context_parallel", "context_parallel_size"),
    "dp": ("data_parallel", "data_parallel_size", "world_size", "num_processes"),
    "dtype": ("torch_dtype", "precision"),
    "env": ("environment", "env_vars", "environment_variables"),
    "ep": ("expert_parallel", "expert_parallel_size", "expert_model_parallel_size"),
    "floor": ("min_lr", "min_lr_ratio", "end_factor"),
    "kind": ("lr_scheduler_type", "scheduler", "type", "name"),
    "lora": ("peft_config", "adapter", "lora_config"),
    "loss": ("loss_fn", "criterion", "objective"),
    "lr": ("learning_rate", "rate"),
    "max_new_tokens": ("max_tokens", "max_length", "max_completion_tokens", "max_response_length", "max_gen_len"),
    "n": ("group_size", "num_generations", "num_samples", "n_samples", "num_return_sequences", "batch_size", "size"),
    "pp": ("pipeline_parallel", "pipeline_parallel_size", "pipeline_model_parallel_size"),
    "requirements": ("pip", "packages", "dependencies", "install"),
    "sampling": ("sampling_params", "generation_config", "temperature", "top_p", "top_k", "max_tokens"),
    "schedule": ("scheduler", "lr_scheduler", "warmup", "warmup_steps"),
    "seed": ("random_state", "random_seed"),
    "source": ("model", "path", "name", "model_name", "name_or_path", "model_name_or_path", "config"),
    "stop_token_ids": ("eos_token_id", "stop_ids"),
    "steps": ("total_steps", "max_steps", "num_steps", "num_training_steps", "T_max"),
    "tp": ("tensor_parallel", "tensor_parallel_size", "tensor_model_parallel_size"),
    "warmup": ("warmup_steps", "num_warmup_steps", "warmup_ratio"),
}


class _Kind(NamedTuple):
    """The check of a registered type.

    Args:
        accepts: whether a value is of the type.
        remedy: the advice for a wrong value, in the imperative.
        words: for a value of the type, after "each".
    """

    accepts: Callable[[Any], bool]
    remedy: Callable[[Any], str]
    words: str


_KINDS: dict[Any, _Kind] = {}


def register_kind(
    kind: Any, remedy: Callable[[Any], str], accepts: Callable[[Any], bool] | None = None, words: str = ""
) -> None:
    """Register what errors say to give where an annotation names a type.

    Args:
        kind: a class, a protocol or an alias.
        remedy: from the wrong value to what to give instead, in the imperative.
        accepts: whether a value is right; None: whether it is an instance.
        words: for such a value; empty: the name of the class.

    >>> class Clock: ...
    >>> register_kind(Clock, lambda value: "give Clock()")
    >>> check_argument("wind", "clock", 5, Clock)
    Traceback (most recent call last):
    nrl.errors.ArgumentError: wind: clock is 5; give Clock()
    """
    words = words or with_article(getattr(kind, "__name__", str(kind)))
    _KINDS[kind] = _Kind(accepts or functools.partial(_is_instance, kind), remedy, words)


def _is_instance(kind: Any, value: Any) -> bool:
    return isinstance(value, kind)


def checked[F: Callable[..., Any]](name: str, *, finite: bool = True) -> Callable[[F], F]:
    """Check the arguments of a function, or of a frozen record, by their names and annotations at each call.

    Numbers have to be finite, unless they are `Unbounded`, and true and false are no numbers. Of a record, what its
    own validators refuse is an `ArgumentError`, too.

    Args:
        name: of the function or record in errors.
        finite: whether numbers are checked to be finite; False: the function itself says which are not in range.

    Returns:
        The decorator.

    Raises:
        ArgumentError: (when called) an argument is missing, has an unknown name, or does not fit its annotation.

    >>> @checked("wait")
    ... def wait(seconds: float, *, times: int = 1) -> float:
    ...     return seconds * times
    >>> wait(2.0)
    2.0
    >>> wait("2")
    Traceback (most recent call last):
    nrl.errors.ArgumentError: wait: seconds is '2'; give a finite number, without quotes
    >>> wait(2.0, time=3)
    Traceback (most recent call last):
    nrl.errors.ArgumentError: wait: it has no argument 'time'; use times; it takes seconds, times
    """

    def decorate(callee: F) -> F:
        record = isinstance(callee, type)
        function: Any = callee.__init__ if record else callee

        @functools.cache
        def parameters() -> dict[str, inspect.Parameter]:
            parameters_of_function = inspect.signature(function).parameters
            return dict(list(parameters_of_function.items())[1:] if record else parameters_of_function)

        @functools.cache
        def hints() -> dict[str, Any]:
            return typing.get_type_hints(function, localns=vars(sys.modules[callee.__module__]), include_extras=True)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            positional = args[1:] if record else args
            _check_call(name, parameters(), hints(), positional, kwargs, finite)
            if not record:
                return function(*args, **kwargs)
            try:
                return function(*args, **kwargs)
            except (TypeError, ValueError) as error:  # Validators of the record raised.
                if isinstance(error, NrlError):
                    raise
                text = str(error.args[0] if error.args else error)  # Errors of attrs have more arguments.
                wrong = next((key for key in parameters() if f"'{key}'" in text or f" {key}=" in text), "")
                raise ArgumentError(text if text.startswith(name) else f"{name}: {text}", wrong) from error

        if record:
            callee.__init__ = call  # type: ignore[method-assign]
            return callee
        return typing.cast(F, call)

    return decorate


def _check_call(
    name: str,
    parameters: Mapping[str, inspect.Parameter],
    hints: Mapping[str, Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    finite: bool,
) -> None:
    kinds = {key: parameter.kind for key, parameter in parameters.items()}
    by_place = [key for key, kind in kinds.items() if kind in (_PLACE, _PLACE_ONLY)]
    variadic = {kind for kind in kinds.values() if kind in (_ARGS, _KWARGS)}
    takes = [key for key, kind in kinds.items() if kind not in (_ARGS, _KWARGS) and key != "self"]
    unknown = [key for key in kwargs if key not in takes]
    if unknown and _KWARGS not in variadic:
        raise ArgumentError(
            f"{name}: it has no argument '{unknown[0]}'; {_use(unknown[0], takes)}it takes {', '.join(takes)}",
            unknown[0],
        )
    positional = dict(zip(by_place, args, strict=False))
    for key, value in [*positional.items(), *((key, value) for key, value in kwargs.items() if key in takes)]:
        default = parameters[key].default
        left_to_it = not finite and _are_numbers(value) and _is_numeric(hints.get(key, Any))
        if key in hints and value is not default and not left_to_it:
            check_argument(name, key, value, hints[key])
    if len(args) > len(by_place) and _ARGS not in variadic:
        hint = "; give the others by name" if variadic or len(by_place) < len(takes) else ""
        shown = [key for key in by_place if key != "self"]
        count = len(args) - len(by_place) + len(shown)
        raise ArgumentError(f"{name}: found {count} arguments, and it takes {len(shown)}: {', '.join(shown)}{hint}")
    if twice := [key for key in positional if key in kwargs]:
        raise ArgumentError(f"{name}: {twice[0]} is given twice, first as {described(positional[twice[0]])}", twice[0])
    needed = [key for key in takes if parameters[key].default is inspect.Parameter.empty]
    if missing := [key for key in needed if key not in positional and key not in kwargs]:
        kind = hints.get(missing[0], Any)
        instead = _remedy(kind, None) if kind is not Any else f"give {missing[0]}=..."
        raise ArgumentError(f"{name}: {missing[0]} is missing; {instead}", missing[0])


_PLACE, _PLACE_ONLY = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY
_ARGS, _KWARGS = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


def _use(unknown: str, names: Sequence[str]) -> str:
    """Return the clause that names a similar argument; empty: none is similar."""
    close = similar_name(unknown, names)
    return f"use {close}; " if close else ""


def similar_name(unknown: str, candidates: Iterable[str], cutoff: float = 0.75) -> str:
    """Return the name that is probably meant; empty: there is none.

    Args:
        unknown: a name that does not exist.
        candidates: those that do.
        cutoff: how similar the spelling has to be, from 0 to 1. A name of the same thing in another library counts as
            equal.

    >>> similar_name("learning_rate", ["lr", "eps"]), similar_name("epss", ["lr", "eps"]), similar_name("x", ["lr"])
    ('lr', 'eps', '')
    """
    names = list(candidates)
    close = [key for key in names if key == unknown] or [key for key in names if unknown in _ALIASES.get(key, ())]
    return [*close, *get_close_matches(unknown, names, 1, cutoff), ""][0]


def check_argument(caller: str, name: str, value: Any, kind: Any) -> None:
    """Check one argument.

    Args:
        caller: the function that takes it, in errors.
        name: of the argument.
        value: any.
        kind: its annotation.

    Raises:
        ArgumentError: the value is not of this kind.

    >>> check_argument("batched", "n", 2.5, int)
    Traceback (most recent call last):
    nrl.errors.ArgumentError: batched: n is 2.5; give a whole number
    """
    if not _fits(value, kind):
        position, wrong = _first_wrong(value, kind)
        raise ArgumentError(f"{caller}: {name}{position} is {described(wrong[0])}; {_remedy(wrong[1], wrong[0])}", name)


def _first_wrong(value: Any, kind: Any) -> tuple[str, tuple[Any, Any]]:
    """Return position, value and kind of the first entry that does not fit; without entries the value itself."""
    origin, kinds = get_origin(_strip_alias(kind)), get_args(_strip_alias(kind))
    alike = origin in (list, Sequence) or (origin is tuple and kinds[-1] is ...)
    if alike and isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        for index, entry in enumerate(value[:_MOST]):
            if not _fits(entry, kinds[0]):
                return f"[{index}]", (entry, kinds[0])
    return "", (value, kind)


_UNIONS = (Union, UnionType)
_MOST = 1000  # entries of a sequence that are looked at


def _strip_alias(kind: Any) -> Any:
    """Return a type without aliases and new names."""
    while isinstance(kind, TypeAliasType | NewType) and kind not in _KINDS:
        kind = kind.__value__ if isinstance(kind, TypeAliasType) else kind.__supertype__
    return kind


def _fits(value: Any, kind: Any) -> bool:
    kind = _strip_alias(kind)
    origin, args = get_origin(kind), get_args(kind)
    if (registered := _KINDS.get(kind) or _KINDS.get(origin)) is not None:
        return registered.accepts(value)
    if kind is Any or kind is object:
        return True
    if origin is Annotated:
        return _is_number(value, infinite=True) if UNBOUNDED in args else _fits(value, args[0])
    if origin in _UNIONS:
        return any(_fits(value, member) for member in args)
    if origin is Literal:
        return any(isinstance(value, bool) == isinstance(choice, bool) and value == choice for choice in args)
    if kind is None or kind is NoneType:
        return value is None
    if kind is float:
        return _is_number(value)
    if kind is bool:
        return isinstance(value, bool) or (type(value).__module__ == "numpy" and value.dtype.kind == "b")
    if kind is int:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if origin is tuple or kind is tuple:
        return _are_entries(value, args)
    if _is_class(origin or kind, Mapping):
        return isinstance(value, Mapping)
    if _is_class(origin or kind, Iterable) and (origin or kind) not in (str, bytes):
        return _are_items(value, origin or kind, args[0] if args else Any)
    if origin is Callable or kind is Callable or _is_class(origin, Callable):
        return callable(value)
    if not isinstance(kind, type) or isinstance(kind, TypeVar) or getattr(kind, "_is_protocol", False):
        return True
    return isinstance(value, kind)


def _is_class(kind: Any, base: Any) -> bool:
    return isinstance(kind, type) and kind.__module__ in ("builtins", "collections.abc") and issubclass(kind, base)


def _is_number(value: Any, infinite: bool = False) -> bool:
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a scalar of torch or numpy
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    return not math.isnan(value) and (infinite or math.isfinite(value))


def _is_numeric(kind: Any) -> bool:
    """Return whether a type is numeric, or a collection of numeric ones."""
    kind = _strip_alias(kind)
    inside = get_args(kind) if get_origin(kind) in (*_UNIONS, tuple, Sequence, Annotated) else ()
    return kind in (int, float) or any(map(_is_numeric, inside))


def _are_numbers(value: Any) -> bool:
    items = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(item, numbers.Real) and not isinstance(item, bool) for item in items)


def _are_entries(value: Any, kinds: tuple[Any, ...]) -> bool:
    """Return whether a value is a sequence with entries of these kinds; a list or an array may stand for a tuple."""
    if isinstance(value, str | bytes | Mapping) or not (hasattr(value, "__len__") and hasattr(value, "__getitem__")):
        return False
    if not kinds or kinds[-1] is ...:
        return all(_fits(entry, kinds[0]) for entry in value[:_MOST]) if kinds else True
    return len(value) == len(kinds) and all(_fits(*pair) for pair in zip(value, kinds, strict=True))


def _are_items(value: Any, base: type, kind: Any) -> bool:
    """Return whether a value has items of a kind. Readers of mappings report a wrong item by its position."""
    if isinstance(value, str | bytes | Mapping) or hasattr(value, "_fields"):  # a record is no list of its fields
        return False
    # Tables of other libraries are sequences without a common base class.
    like_a_list = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    if not isinstance(value, base if base is not list else (list, tuple)) and not (base is Sequence and like_a_list):
        return False
    is_unchecked = not isinstance(value, list | tuple) or _is_class(
        get_origin(_strip_alias(kind)) or _strip_alias(kind), Mapping
    )
    return is_unchecked or all(_fits(item, kind) for item in value[:_MOST])


def _remedy(kind: Any, value: Any) -> str:
    """Return the advice for a wrong value, in the imperative."""
    members = get_args(_strip_alias(kind)) if get_origin(_strip_alias(kind)) in _UNIONS else (kind,)
    for member in members:
        member = _strip_alias(member)
        if (registered := _KINDS.get(member) or _KINDS.get(get_origin(member))) is not None:
            return registered.remedy(value)
    if isinstance(value, float) and value.is_integer() and int in map(_strip_alias, members):
        return f"give {int(value)}, a whole number"
    numeric = any(
        _strip_alias(member) in (int, float) or get_origin(_strip_alias(member)) is Annotated for member in members
    )
    quoted = ", without quotes" if numeric and isinstance(value, str) else ""
    words = " or ".join(dict.fromkeys(map(_describe_kind, members)))
    example = f", such as [{value!r}]" if isinstance(value, str) and words.endswith("each a text") else ""
    return f"give {words}{quoted}{example}"


def _describe_kind(kind: Any) -> str:
    """Return the words for a type."""
    kind = _strip_alias(kind)
    origin, args = get_origin(kind), get_args(kind)
    if (registered := _KINDS.get(kind) or _KINDS.get(origin)) is not None:
        return registered.words
    if origin is Annotated:
        return "a number" if UNBOUNDED in args else _describe_kind(args[0])
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin in _UNIONS:
        return " or ".join(dict.fromkeys(map(_describe_kind, args)))
    if origin is tuple and args and args[-1] is not ...:
        return f"({', '.join(map(_describe_kind, args))})"
    base = origin or kind
    if base is tuple or (_is_class(base, Iterable) and base not in (str, bytes) and not _is_class(base, Mapping)):
        return (
            f"several entries, each {_describe_kind(args[0])}"
            if args and _strip_alias(args[0]) is not Any
            else "a list"
        )
    if _is_class(base, Mapping):
        return "a mapping"
    if base is Callable or _is_class(base, Callable):
        return "a function"
    words = {int: "a whole number", float: "a finite number", str: "a text", bool: "True or False", NoneType: "None"}
    return words.get(base) or f"{with_article(getattr(base, '__name__', str(base)))}"


def with_article(name: str) -> str:
    """Return a noun with its article.

    >>> with_article("int"), with_article("OrderedDict"), with_article("dict")
    ('an int', 'an OrderedDict', 'a dict')
    """
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


_SHOWN = reprlib.Repr(maxstring=60, maxother=60, maxlong=40)


def described(value: Any) -> str:
    """Return the words for a value in an error: itself if it is short, else its type.

    >>> described("a"), described([1, 2]), described(int), described(print)
    ("'a'", 'the list [1, 2]', 'the class int', 'the function print')
    """
    if value is None or isinstance(value, str | bytes | bool | int | float):
        return _SHOWN.repr(value)
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    if isinstance(value, ModuleType):
        return f"the module {value.__name__}"
    if inspect.isroutine(value):
        return f"the function {getattr(value, '__name__', type(value).__name__)}"
    simple = isinstance(value, list | tuple) and all(isinstance(x, str | bool | int | float) for x in value[:_MOST])
    if simple or isinstance(value, range):
        return f"the {type(value).__name__} {_SHOWN.repr(value)}" if simple else repr(value)
    return with_article(type(value).__name__)
