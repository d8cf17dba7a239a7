"""Configuration: YAML or TOML files and ``key=value`` arguments become a frozen attrs instance.

A configuration is an attrs class that the program declares; `load` fills it in, `dump` writes it back. Values come
from the defaults of the class, then the files in the given order, then the ``key=value`` arguments; later ones win.
Mappings are merged key by key, so ``optimizer.lr=1e-4`` keeps the rest of the default optimizer. All other values, and
the default of a ``dict`` field, are replaced whole.

Files are typed and nothing is converted, except that an ``int`` may stand for a ``float``. YAML is read by the rules
of YAML 1.2: ``1e-3`` is a float; only ``true`` and ``false`` are booleans; ``on``, ``yes``, ``2026-01-31`` and
``12:30`` are strings. A key that occurs twice is an error.

Text on the command line has no type until its field gives it one. A ``str`` or `Path` field takes the text as it
stands: ``model=1e5`` is ``"1e5"``, ``name=null`` is ``"null"``. If a field may be None, ``null``, ``~`` and an empty
text mean None. Every other field reads the text as YAML: ``betas=[0.9, 0.99]``, ``flag=true``,
``optimizer={lr: 1e-4}``. In a union such as ``int | str``, a text that YAML reads as one of the types has that type;
any other text is a string.

In every text of a file or of the command line, ``${oc.env:NAME}`` and ``${oc.env:NAME,default}`` are environment
variables, and a text that begins with ``~/`` is a path in the home folder.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import yaml

from nrl.config._usage import usage
from nrl.config._yaml import Problems, Word, mapping, parse, write
from nrl.config.expansion import expand_variables
from nrl.config.layers import ConfigLayer, explain, merge_values, read_file
from nrl.config.structure import fields, structure
from nrl.errors import ConfigError

__all__ = ["derived", "dump", "given_keys", "load", "option"]


def option[T](default: T, *, help: str, validator: Callable[[Any, Any, T], Any] | None = None) -> T:
    """Define a field of a configuration with a default and the line that ``--help`` prints for it.

    ``--help`` also prints the comment at the end of a field's line in the source, so use this for computed texts. A
    field without a default takes ``attrs.field(metadata={"help": ...})`` instead.

    Args:
        default: the default; a list or dict is copied for each instance.
        help: what the field means.
        validator: an attrs validator, called with ``(instance, attribute, value)``.

    Returns:
        An `attrs.field`, typed as its value so that type checkers accept it in a class body.

    >>> @attrs.frozen
    ... class Config:
    ...     steps: int = option(100, help="optimizer steps", validator=attrs.validators.gt(0))
    >>> Config().steps
    100
    """
    instance: Any = attrs.Factory(default.copy) if isinstance(default, list | dict) else default
    return attrs.field(default=instance, validator=validator, metadata={"help": help})  # type: ignore[no-any-return]


def derived(
    default: Callable[[Any], Any], *, help: str = "", validator: Callable[[Any, Any, Any], Any] | None = None
) -> Any:
    """Define a field of a configuration whose default depends on the fields before it.

    Args:
        default: from the instance, with the fields before this one, to the default.
        help: the line that ``--help`` prints.
        validator: an attrs validator, called with ``(instance, attribute, value)``.

    Returns:
        An `attrs.field`.

    >>> @attrs.frozen
    ... class Config:
    ...     model: str | None = None
    ...     lr: float = derived(lambda cfg: 1e-6 if cfg.model else 1e-3)
    >>> Config().lr, Config("a-real-one").lr
    (0.001, 1e-06)
    """
    instance = attrs.Factory(default, takes_self=True)
    return attrs.field(default=instance, validator=validator, metadata={"help": help} if help else {})


def load[T](
    cls: type[T], args: Sequence[str] | None = None, *, program: str | None = None, caller: str | None = None
) -> T:
    """Make an instance of ``cls`` from files and ``key=value`` arguments; the module's docstring has the rules.

    Args:
        cls: an attrs class. Fields may be ``bool``, ``int``, ``float``, ``str``, `Path`, ``Literal``, an `Enum` (by
            value), lists, tuples, mappings, attrs classes, and unions of these; ``Any`` takes any value of YAML.
        args: ``key=value``, ``key.sub=value``, ``FILE.yaml``, ``FILE.toml`` or ``config=FILE`` (unless ``cls`` has a
            field ``config``). Arguments of the form ``key=value`` win over files wherever they stand. With ``-h`` or
            ``--help``, every key is printed and the program exits with 0. Default: the program's own arguments.
        program: how ``--help`` names the program. Default: by the file that was started.
        caller: how errors name what reads the configuration. Default: ``load(CLASS)``.

    Returns:
        The instance.

    Raises:
        ConfigError: names every problem at once, each with its key, the expected type, the value found, and its place.

    >>> @attrs.frozen
    ... class Optimizer:
    ...     lr: float = 1e-3
    ...     betas: tuple[float, float] = (0.9, 0.999)
    >>> @attrs.frozen
    ... class Config:
    ...     model: str
    ...     steps: int = 100
    ...     optimizer: Optimizer = Optimizer()
    >>> load(Config, ["model=tiny", "optimizer.lr=1e-4"])
    Config(model='tiny', steps=100, optimizer=Optimizer(lr=0.0001, betas=(0.9, 0.999)))
    >>> load(Config, ["steps=4.7", "optimizer.lrr=1"])
    Traceback (most recent call last):
    nrl.errors.ConfigError: load(Config): 3 problems
      steps: expected int, found 4.7 (a float); from the command line
      optimizer.lrr: no such key; did you mean 'optimizer.lr'?; from the command line
      model: missing, and it has no default; expected str
    """
    if not inspect.isclass(cls) or not attrs.has(cls):
        raise ConfigError(f"load: expected an attrs class, got {cls!r}; decorate it with @attrs.frozen")
    args = sys.argv[1:] if args is None else args
    if "-h" in args or "--help" in args:
        sys.stdout.write(usage(cls, program or Path(sys.argv[0]).name) + "\n")
        raise SystemExit(0)
    layers, problems = _layers(cls, args)
    if not problems:
        values: Any = {}
        for layer in layers:
            values = merge_values(values, layer.values)
        try:
            instance: T = structure(expand_variables(values), cls)
        except Problems as error:
            problems = [explain(cls, path, text, layers) for path, text in error.problems]
        else:
            return instance
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    raise ConfigError("\n  ".join([f"{caller or f'load({cls.__name__})'}: {count}", *problems]))


def dump(config: Any, mask: Callable[[Any], Any] | None = None) -> str:
    """Write a configuration as YAML, every key with its value; `load` reads the same configuration from it.

    Args:
        config: an instance of an attrs class, as `load` returns it.
        mask: from mappings, lists and scalars to the values to write in their place, such as `nrl.log.redacted`. (In
            YAML's own text, ``***`` would be an alias.)

    Returns:
        YAML text that readers of YAML 1.1 and 1.2 agree about.

    Raises:
        ConfigError: ``config`` is no attrs instance, or holds a value without a plain form in YAML.

    >>> @attrs.frozen
    ... class Config:
    ...     lr: float = 1e-4
    ...     betas: tuple[float, float] = (0.9, 0.99)
    ...     name: str = "on"
    >>> print(dump(Config()), end="")
    lr: 0.0001
    betas: [0.9, 0.99]
    name: 'on'
    """
    if isinstance(config, type) or not attrs.has(type(config)):
        raise ConfigError(f"dump: expected an instance of an attrs class, got {config!r}")
    try:
        text = write(config)
        return text if mask is None else write(mask(parse(text)))
    except yaml.YAMLError as error:
        reason = " ".join(map(str, error.args))
        raise ConfigError(f"dump({type(config).__name__}): a value has no form in YAML: {reason}") from None


def given_keys(cls: type, args: Sequence[str]) -> frozenset[str]:
    """Return the keys that files and arguments set, as ``key`` and ``key.sub``.

    >>> @attrs.frozen
    ... class Optimizer:
    ...     lr: float = 1e-3
    >>> @attrs.frozen
    ... class Config:
    ...     steps: int = 100
    ...     optimizer: Optimizer = Optimizer()
    >>> sorted(given_keys(Config, ["optimizer.lr=1e-4"]))
    ['optimizer', 'optimizer.lr']
    """
    keys = set[str]()

    def see(above: str, values: Any) -> None:
        for key, value in (mapping(values) or {}).items():
            keys.add(f"{above}{key}")
            see(f"{above}{key}.", value)

    for layer in _layers(cls, args)[0]:
        see("", layer.values)
    return frozenset(keys)


def _layers(cls: type, args: Sequence[str]) -> tuple[list[ConfigLayer], list[str]]:
    """Read the settings of the files, then of the pairs; return them and their problems."""
    files: list[ConfigLayer] = []
    pairs: list[ConfigLayer] = []
    problems: list[str] = []
    config_is_file = all(field.alias != "config" for field in fields(cls))
    for arg in args:
        key, equals, text = arg.partition("=")
        if arg.startswith("-"):
            problems.append(f"{arg}: options are written key=value, without dashes; --help prints every key")
        elif equals and "/" not in key and not (key == "config" and config_is_file):
            values: Any = Word(text)
            for part in reversed(key.split(".")):
                values = {Word(part): values}
            pairs.append(ConfigLayer("the command line", values))
            if not all(key.split(".")):
                problems.append(f"{arg}: a part of the key is empty; write key=value or key.sub=value")
        else:
            path = text if equals and key == "config" else arg
            try:
                files.append(ConfigLayer(path, read_file(Path(path))))
            except OSError as error:
                problems.append(f"{path}: cannot be read: {error.strerror}")
            except ValueError as error:  # TOML or UTF-8 that cannot be decoded
                problems.append(f"{path}: not valid: {error}")
            except Problems as error:
                problems += [f"{path}: {text}" for _, text in error.problems]
    return [*files, *pairs], problems
