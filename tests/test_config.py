"""Configuration: what is read, what is refused and how the refusal reads."""

import enum
import pickle
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NewType

import attrs
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from nrl.config import derived, dump, load, option
from nrl.errors import ConfigError
from nrl.log import redacted


class Color(enum.Enum):
    RED = "red"
    DEEP = 3


class Speed(enum.StrEnum):
    SLOW = "slow"
    FAST = "fast"


type Mode = Literal["sync", "async"]
Name = NewType("Name", str)


@attrs.frozen
class Schedule:
    warmup: int = 10
    decay: float = 0.5


@attrs.frozen
class Optimizer:
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    schedule: Schedule = Schedule()


@attrs.frozen
class Sampling:
    temperature: float = attrs.field(default=1.0, validator=attrs.validators.ge(0))
    top_k: int = 0


@attrs.frozen
class Config:
    """Train a model.

    This paragraph is not in the help.
    """

    model: str = "tiny"
    steps: int = option(100, help="optimizer steps", validator=attrs.validators.gt(0))
    ratio: float = 0.25
    verbose: bool = False
    note: str | None = None
    limit: int | None = None
    folder: Path = Path("runs")
    where: Path | None = None
    mode: Literal["on", "off", 3, None] = "on"
    color: Color = Color.RED
    speed: Speed = Speed.SLOW
    stop: list[str] = attrs.field(factory=list)
    sizes: tuple[int, ...] = ()
    weights: dict[str, float] = attrs.field(factory=dict)
    seed: int | str = 0
    names: str | list[str] = "a"
    extra: Any = None
    optimizer: Optimizer = Optimizer(lr=3e-4, schedule=Schedule(warmup=7))
    sampling: Sampling | None = None
    stages: tuple[Schedule, ...] = ()
    by_name: dict[str, Schedule] = attrs.field(factory=dict)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    def at(text: str, name: str = "c.yaml") -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return at


def problems(cls: type, *args: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(cls, args)
    first, *rest = str(caught.value).split("\n  ")
    assert first == f"load({cls.__name__}): {len(rest)} problem{'s' * (len(rest) != 1)}"
    return rest


def test_no_arguments_give_the_defaults() -> None:
    assert load(Config, []) == Config()


def test_the_arguments_of_the_program_are_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "steps=4"])
    assert load(Config) == Config(steps=4)


@pytest.mark.parametrize(
    ("arg", "key", "value"),
    [
        ("steps=4", "steps", 4),
        ("steps=4_000", "steps", 4000),
        ("ratio=1e-3", "ratio", 0.001),
        ("ratio=1e5", "ratio", 100000.0),
        ("ratio=-.5", "ratio", -0.5),
        ("ratio=3", "ratio", 3.0),
        ("ratio=.inf", "ratio", float("inf")),
        ("verbose=true", "verbose", True),
        ("verbose=False", "verbose", False),
        # text stays text
        ("model=123", "model", "123"),
        ("model=1e5", "model", "1e5"),
        ("model=1.10", "model", "1.10"),
        ("model=null", "model", "null"),
        ("model=true", "model", "true"),
        ("model=", "model", ""),
        ("model=a=b", "model", "a=b"),
        ("model= x ", "model", " x "),
        ("model={a: 1}", "model", "{a: 1}"),
        ("model=[INST] hi: # there", "model", "[INST] hi: # there"),
        ('model="quoted"', "model", '"quoted"'),
        ("model=org/name.yaml", "model", "org/name.yaml"),
        ("folder=010", "folder", Path("010")),
        ("folder=null", "folder", Path("null")),
        # None where it is allowed
        ("note=null", "note", None),
        ("note=~", "note", None),
        ("note=", "note", None),
        ("note=123", "note", "123"),
        ("note=nullify", "note", "nullify"),
        ("limit=null", "limit", None),
        ("limit=7", "limit", 7),
        ("where=null", "where", None),
        ("where=1e5", "where", Path("1e5")),
        # choices
        ("mode=on", "mode", "on"),
        ("mode=3", "mode", 3),
        ("mode=null", "mode", None),
        ("color=red", "color", Color.RED),
        ("color=3", "color", Color.DEEP),
        ("speed=fast", "speed", Speed.FAST),
        # collections
        ("stop=[a, 'b c', 12, on, null]", "stop", ["a", "b c", "12", "on", "null"]),
        ("stop=[]", "stop", []),
        ("sizes=[1, 2]", "sizes", (1, 2)),
        ("weights={a: 1, on: 1e-3}", "weights", {"a": 1.0, "on": 0.001}),
        ("weights.a-b/c=2", "model", "tiny"),
        ("stages=[{warmup: 1}, {decay: 1}]", "stages", (Schedule(warmup=1), Schedule(decay=1.0))),
        ("by_name.a.decay=2", "by_name", {"a": Schedule(decay=2.0)}),
        # unions: what YAML reads if that is one of the types, else the text
        ("seed=5", "seed", 5),
        ("seed=5x", "seed", "5x"),
        ("seed=010", "seed", "010"),
        ("names=[a, 1]", "names", ["a", "1"]),
        ("names=a: b: c", "names", "a: b: c"),
        ("names=12", "names", "12"),
        ("extra={a: [1, on, 1e3]}", "extra", {"a": [1, "on", 1000.0]}),
        ("extra.a.b=1", "extra", {"a": {"b": 1}}),
    ],
)
def test_values_on_the_command_line(arg: str, key: str, value: object) -> None:
    if "/c" in arg:
        arg = arg.replace("/", "-")
    got = getattr(load(Config, [arg]), key)
    assert (type(got), got) == (type(value), value)


@pytest.mark.parametrize(
    ("arg", "message"),
    [
        ("steps=4.7", "steps: expected int, found 4.7 (a float)"),
        ("steps=4.0", "steps: expected int, found 4.0 (a float)"),
        ("steps=true", "steps: expected int, found True (a bool)"),
        ("steps=", "steps: expected int, found null"),
        ("steps='3'", "steps: expected int, found '3' (a str)"),
        ("steps=010", "steps: expected int, found '010' (a str)"),
        ("steps=1:30", "steps: expected int, found '1:30' (a str)"),
        ("steps=[1", "steps: expected int, found '[1' (a str)"),
        ("steps=" + "9" * 5000, "steps: expected int, found '999999999999...9999999999999' (a str)"),
        ("steps={a: 1}", "steps: expected int, found {'a': 1} (a dict)"),
        ("ratio=true", "ratio: expected float, found True (a bool)"),
        ("ratio=1" + "0" * 400, "ratio: expected float, found 100000000000000000...0000000000000000000 (an int)"),
        ("verbose=on", "verbose: expected bool, found 'on' (a str); write true or false"),
        ("verbose=1", "verbose: expected bool, found 1 (an int); write true or false"),
        ("limit=x", "limit: expected int, found 'x' (a str)"),
        ("mode=onn", "mode: expected 'on' or 'off' or 3 or None, found 'onn' (a str)"),
        ("mode=true", "mode: expected 'on' or 'off' or 3 or None, found True (a bool)"),
        ("mode=3.0", "mode: expected 'on' or 'off' or 3 or None, found 3.0 (a float)"),
        ("mode=[", "mode: expected 'on' or 'off' or 3 or None, found '[' (a str)"),
        ("color=blue", "color: expected 'red' or 3, found 'blue' (a str)"),
        ("speed=9", "speed: expected 'slow' or 'fast', found 9 (an int)"),
        ("stop=a", "stop: expected list[str], found 'a' (a str); write [a, b]"),
        ("sizes=3", "sizes: expected tuple[int, ...], found 3 (an int); write [a, b]"),
        ("sizes=[1, x]", "sizes.1: expected int, found 'x' (a str)"),
        ("sizes=[1, '2']", "sizes.1: expected int, found '2' (a str)"),
        ("sizes=[1", "sizes: not valid YAML, line 1: expected ',' or ']', but got '<stream end>'"),
        ("optimizer.betas=[1]", "optimizer.betas: expected tuple[float, float], found [1] (a list); write [a, b]"),
        ("weights=a", "weights: expected dict[str, float], found 'a' (a str)"),
        ("weights.a=b", "weights.a: expected float, found 'b' (a str)"),
        ("optimizer=adamw", "optimizer: expected Optimizer, found 'adamw' (a str); its keys are lr, betas, schedule"),
        ("optimizer=null", "optimizer: expected Optimizer, found null; its keys are lr, betas, schedule"),
        ("optimizer={lr: 1, lr: 2}", "optimizer: expected Optimizer, found '{lr: 1, lr: 2}' (a str); its keys are"),
        ("sampling.temperature=-1", "sampling.temperature: 'temperature' must be >= 0: -1.0"),
        ("steps=-1", "steps: 'steps' must be > 0: -1"),
        ("steps.a=1", "steps: expected int, found {'a': '1'} (a dict)"),
        ("extra=a: b: c", "extra: not valid YAML, line 1: mapping values are not allowed here"),
        ("stepz=1", "stepz: no such key; did you mean 'steps'?"),
        ("optimizer.lrr=1", "optimizer.lrr: no such key; did you mean 'optimizer.lr'?"),
        ("lr=1", "lr: no such key; did you mean 'optimizer.lr'?"),
        ("warmup=1", "warmup: no such key; did you mean 'optimizer.schedule.warmup'?"),
        ("by_name.a.dekay=1", "by_name.a.dekay: no such key; did you mean 'by_name.a.decay'?"),
        ("optimizer.zzzz=1", "optimizer.zzzz: no such key; the keys here are lr, betas, schedule"),
    ],
)
def test_problems_on_the_command_line(arg: str, message: str) -> None:
    (problem,) = problems(Config, arg)
    assert problem.startswith(message)
    assert problem.endswith("; from the command line")


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("ratio: 1e-3", "ratio", 0.001),
        ("ratio: 2", "ratio", 2.0),
        ("verbose: true", "verbose", True),
        ("model: on", "model", "on"),
        ("model: no", "model", "no"),
        ("model: 2026-01-31", "model", "2026-01-31"),
        ("model: 12:30", "model", "12:30"),
        ("model: '123'", "model", "123"),
        ("note: null", "note", None),
        ("note:", "note", None),
        ("mode: off", "mode", "off"),
        ("seed: '5'", "seed", "5"),
        ("seed: 5", "seed", 5),
        ("sizes: [1, 2]", "sizes", (1, 2)),
        ("stages:\n- warmup: 1\n- {}", "stages", (Schedule(warmup=1), Schedule())),
        ("extra: {1: a, '1': b}", "extra", {1: "a", "1": "b"}),
        ("x: &x {warmup: 1}\n", "steps", 100),
    ],
)
def test_values_in_yaml(write: Callable[..., str], text: str, key: str, value: object) -> None:
    if text.startswith("x:"):
        text = "optimizer:\n  schedule: &x {warmup: 1}\nby_name:\n  a: {<<: *x, decay: 2}\n  b: *x\n"
        assert load(Config, [write(text)]).by_name == {"a": Schedule(1, 2.0), "b": Schedule(1)}
    else:
        got = getattr(load(Config, [write(text)]), key)
        assert (type(got), got) == (type(value), value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: '3'", "steps: expected int, found '3' (a str)"),
        ("steps: 3.0", "steps: expected int, found 3.0 (a float)"),
        ("steps: true", "steps: expected int, found True (a bool)"),
        ("ratio: '1e-3'", "ratio: expected float, found '1e-3' (a str)"),
        ("verbose: on", "verbose: expected bool, found 'on' (a str); write true or false"),
        ("verbose: yes", "verbose: expected bool, found 'yes' (a str); write true or false"),
        ("model: 123", "model: expected str, found 123 (an int); put it in quotes"),
        ("model: 1e5", "model: expected str, found 100000.0 (a float); put it in quotes"),
        ("model: true", "model: expected str, found True (a bool); put it in quotes"),
        ("model: null", "model: expected str, found null; put it in quotes"),
        ("model:", "model: expected str, found null; put it in quotes"),
        ("stop: abc", "stop: expected list[str], found 'abc' (a str); write [a, b]"),
        ("seed: 1.5", "seed: expected int | str, found 1.5 (a float)"),
        ("folder: 3", "folder: expected Path, found 3 (an int)"),
        ("limit: x", "limit: expected int, found 'x' (a str)"),
        ("model: !!binary aGk=", "model: expected str, found b'hi' (a bytes); put it in quotes"),
        ("1: x", "1: no such key; the keys here are"),
    ],
)
def test_problems_in_yaml(write: Callable[..., str], text: str, message: str) -> None:
    path = write("# a comment\n" + text)
    (problem,) = problems(Config, path)
    assert problem.startswith(message)
    assert problem.endswith(f"; from {path}, line 2")


def test_toml(write: Callable[..., str]) -> None:
    path = write("ratio = 1e-3\n[optimizer]\nlr = 1\n[optimizer.schedule]\nwarmup = 2\n", "c.toml")
    assert load(Config, [path]) == Config(ratio=1e-3, optimizer=Optimizer(lr=1.0, schedule=Schedule(2)))
    bad = write('steps = "3"\nmodel = 2026-01-31\n', "d.TOML")
    assert problems(Config, bad) == [
        "model: expected str, found datetime.date(2026, 1, 31) (a date); put it in quotes; from " + bad,
        "steps: expected int, found '3' (a str); from " + bad,
    ]


def test_later_files_and_then_pairs_win_and_mappings_merge(write: Callable[..., str]) -> None:
    one = write("steps: 1\nratio: 1\nweights: {a: 1}\noptimizer: {lr: 1, schedule: {decay: 1}}\nsizes: [1, 1]", "1.yml")
    two = write("ratio: 2\nweights: {b: 2}\noptimizer: {schedule: {warmup: 2}}\nsizes: [2]", "2.yaml")
    got = load(Config, ["optimizer.betas=[0, 0]", one, f"config={two}", "steps=3", "steps=4", "weights.c=3"])
    assert got == Config(
        steps=4,
        ratio=2.0,
        weights={"a": 1, "b": 2, "c": 3},
        optimizer=Optimizer(lr=1.0, betas=(0, 0), schedule=Schedule(warmup=2, decay=1.0)),
        sizes=(2,),
    )
    assert load(Config, [two, one]).ratio == 1


def test_a_part_of_a_default_section_leaves_the_rest_of_it() -> None:
    default = Config().optimizer
    assert load(Config, ["optimizer.lr=1"]).optimizer == attrs.evolve(default, lr=1.0)
    assert load(Config, ["optimizer={lr: 1}"]).optimizer == attrs.evolve(default, lr=1.0)
    assert load(Config, ["optimizer.schedule.decay=1"]).optimizer == attrs.evolve(default, schedule=Schedule(7, 1.0))
    assert load(Config, ["optimizer={lr: 1}", "optimizer.schedule={decay: 1}"]).optimizer == Optimizer(
        1.0, schedule=Schedule(7, 1.0)
    )


def test_a_section_may_be_none_and_given(write: Callable[..., str]) -> None:
    assert load(Config, ["sampling.top_k=3"]).sampling == Sampling(top_k=3)
    path = write("sampling: {temperature: 0.5}")
    assert load(Config, [path, "sampling.top_k=3"]).sampling == Sampling(0.5, 3)
    assert load(Config, [path, "sampling=null"]).sampling is None
    assert load(Config, ["sampling=null", "sampling.top_k=3"]).sampling == Sampling(top_k=3)


def test_every_problem_is_found_at_once(write: Callable[..., str]) -> None:
    @attrs.frozen
    class Job:
        model: str
        config: Config
        lr: float = attrs.field(default=1.0, validator=attrs.validators.gt(0))
        low: int = 1
        high: int = attrs.field(default=2)

        @high.validator
        def _above_low(self, attribute: Any, value: int) -> None:
            if value <= self.low:
                raise ValueError(f"high is {value}, not above low = {self.low}")

    path = write("config:\n  steps: 1.5\n  sizes: [a, 1, b]\n  optimiser: {}\nlr: -1\n")
    assert problems(Job, path, "high=0", "extra=1") == [
        f"config.steps: expected int, found 1.5 (a float); from {path}, line 2",
        f"config.sizes.0: expected int, found 'a' (a str); from {path}, line 3",
        f"config.sizes.2: expected int, found 'b' (a str); from {path}, line 3",
        f"config.optimiser: no such key; did you mean 'config.optimizer'?; from {path}, line 4",
        "model: missing, and it has no default; expected str",
        "extra: no such key; did you mean 'config.extra'?; from the command line",
        f"lr: 'lr' must be > 0: -1.0; from {path}, line 5",
        "high: high is 0, not above low = 1; from the command line",
    ]
    # low is not known, so high is not judged
    assert problems(Job, "model=m", "config={}", "low=x", "high=0") == [
        "low: expected int, found 'x' (a str); from the command line"
    ]


def test_the_last_layer_that_sets_a_value_is_named(write: Callable[..., str]) -> None:
    one, two = write("steps: 5\noptimizer: {lr: a}", "1.yaml"), write("\n\nsteps: x\noptimizer: {betas: 3}", "2.yaml")
    found = problems(Config, one, two)
    assert [re.sub(r".*; ", "", text) for text in found] == [
        f"from {two}, line 3",
        f"from {one}, line 2",
        f"from {two}, line 4",
    ]


def _inverse(x: int) -> int:
    return 1 // x


def test_errors_of_the_class_itself_are_told() -> None:
    @attrs.frozen
    class Pair:
        a: int = attrs.field(default=1, converter=_inverse)
        b: int = 1

        def __attrs_post_init__(self) -> None:
            if self.b == 7:
                raise ValueError("b is seven")

    @attrs.frozen
    class Outer:
        pair: Pair | None = None

    assert problems(Outer, "pair.a=0") == [
        "pair.a: ZeroDivisionError: integer division or modulo by zero; from the command line"
    ]
    assert problems(Outer, "pair={a: 1, b: 7}") == ["pair: b is seven; from the command line"]
    assert problems(Pair, "a=1", "b=7") == ["b is seven"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "- 1\n- 2", "expected a mapping of keys to values, found [1, 2] (a list)"),
        ("a.yaml", "hello", "expected a mapping of keys to values, found 'hello' (a str)"),
        ("a.yaml", "0", "expected a mapping of keys to values, found 0 (an int)"),
        ("a.yaml", "a: 1\nb: [1\nc: 2", "not valid YAML, line 3: expected ',' or ']'"),
        ("a.yaml", "a: 1\n\tb: 2", "not valid YAML, line 2: found character '\\t'"),
        ("a.yaml", "steps: 1\nsteps: 2", "not valid YAML, line 2: the key 'steps' occurs twice"),
        ("a.yaml", "a: {b: 1, b: 2}", "not valid YAML, line 1: the key 'b' occurs twice"),
        ("a.yaml", "a: &a {b: *a}", "not valid YAML, line 1: found unconstructable recursive node"),
        ("a.yaml", "a: !!python/name:os.system x", "not valid YAML, line 1: could not determine a constructor"),
        ("a.yaml", "a: !!int x", "not valid YAML: invalid literal for int()"),
        ("a.yaml", "a: !!bool x", "not valid YAML: 'x'"),
        ("a.yaml", "a: 1\n---\nb: 2", "not valid YAML, line 2: but found another document"),
        ("a.yaml", "? [1]\n: 2", "not valid YAML, line 1: found unhashable key"),
        ("a.yaml", "a: \x01", "not valid YAML: unacceptable character"),
        ("a.yaml", "a: " + "[" * 1000, "not usable as YAML: it is nested too deeply"),
        ("a.toml", "a = 1\nb = ]", "not valid: Invalid value (at line 2, column 5)"),
        ("a.toml", "a = " + "9" * 5000, "not valid: Exceeds the limit"),
        ("a.json", "{}", "neither key=value nor a file that ends in .yaml, .yml or .toml"),
    ],
)
def test_files_that_cannot_be_used(write: Callable[..., str], name: str, text: str, message: str) -> None:
    path = write(text, name)
    (problem,) = problems(Config, path, "steps=x")  # files come first: with one of them unread, values cannot be judged
    assert problem.startswith(f"{path}: {message}")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes("a: é".encode("latin-1"))
    (tmp_path / "folder.yaml").mkdir()
    missing, latin, folder = (str(tmp_path / f"{name}.yaml") for name in ("missing", "latin", "folder"))
    assert problems(Config, missing, latin, folder) == [
        f"{missing}: cannot be read: No such file or directory",
        f"{latin}: not valid: 'utf-8' codec can't decode byte 0xe9 in position 3: unexpected end of data",
        f"{folder}: cannot be read: Is a directory",
    ]


@pytest.mark.parametrize(
    ("arg", "message"),
    [
        ("--steps=3", "--steps=3: options are written key=value, without dashes; --help prints every key"),
        ("-x", "-x: options are written"),
        ("steps", "steps: neither key=value nor a file that ends in .yaml, .yml or .toml"),
        ("config=steps", "steps: neither key=value nor a file"),
        ("=3", "=3: a part of the key is empty; write key=value or key.sub=value"),
        ("optimizer..lr=3", "optimizer..lr=3: a part of the key is empty"),
        (".=3", ".=3: a part of the key is empty"),
        ("", ": neither key=value nor a file"),
    ],
)
def test_arguments_that_cannot_be_used(arg: str, message: str) -> None:
    (problem,) = problems(Config, arg)
    assert problem.startswith(message)


def test_files_that_hold_nothing_and_names_with_an_equals_sign(write: Callable[..., str], tmp_path: Path) -> None:
    assert load(Config, [write("# nothing"), write("", "b.toml")]) == Config()
    assert load(Config, [write("\ufeffsteps: 2", "a=b.yaml")]).steps == 2


def test_a_field_that_is_named_config() -> None:
    @attrs.frozen
    class Has:
        config: str = ""

    assert load(Has, ["config=x.yaml"]) == Has("x.yaml")


def test_only_attrs_classes() -> None:
    for cls in (dict, int, Config()):
        with pytest.raises(ConfigError, match=r"load: expected an attrs class, got .*; decorate it with @attrs.frozen"):
            load(cls, [])  # type: ignore[arg-type]
    for instance in (3, Config):
        with pytest.raises(ConfigError, match="dump: expected an instance of an attrs class, got"):
            dump(instance)


def test_a_field_without_a_type_takes_anything() -> None:
    assert load(attrs.make_class("Loose", ["x"]), ["x=[1, a]"]).x == [1, "a"]


def test_the_error_survives_pickling() -> None:
    with pytest.raises(ConfigError) as caught:
        load(Config, ["steps=x"])
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@attrs.frozen
class Sgd:
    lr: float = 0.1
    momentum: float = 0.9


@attrs.frozen
class Adam:
    lr: float = 0.1
    beta: float = 0.9


@attrs.frozen
class Unions:
    optimizer: Sgd | Adam = Adam(beta=0.8)
    source: str | Mapping[str, Any] | Callable[[], int] = "hub"
    either: Schedule | int = 1
    anything: bool | float | None = None


def test_unions() -> None:
    assert load(Unions, ["optimizer.momentum=1"]).optimizer == Sgd(momentum=1.0)
    assert load(Unions, ["optimizer.beta=1"]).optimizer == Adam(beta=1.0)
    assert problems(Unions, "optimizer.lr=1") == [
        "optimizer: fits Sgd and Adam; give a key that only one of them has; from the command line"
    ]
    assert problems(Unions, "optimizer.beta=x") == [
        "optimizer: expected Sgd | Adam, found {'beta': 'x'} (a dict); from the command line"
    ]
    assert load(Unions, ["source=a: 1"]).source == {"a": 1}
    assert load(Unions, ["source.a.b=1"]).source == {"a": {"b": 1}}
    assert load(Unions, ["source=x/y"]).source == "x/y"
    assert load(Unions, ["either={warmup: 2}"]).either == Schedule(2)
    assert load(Unions, ["either=3"]).either == 3
    assert problems(Unions, "either.warmup=x") == [
        "either.warmup: expected int, found 'x' (a str); from the command line"
    ]
    assert load(Unions, ["anything=3"]).anything == 3.0
    assert load(Unions, ["anything=true"]).anything is True


def _hidden_plus_one(odd: Any) -> int:
    return int(odd._hidden) + 1


def test_other_types() -> None:
    @attrs.frozen
    class Odd:
        mode: Mode = "sync"
        call: Callable[..., int] = abs
        name: Name = Name("n")
        noted: Annotated[int | None, "note"] = 3
        bare: dict = attrs.field(factory=dict)  # type: ignore[type-arg]
        keyed: dict[int, Mode] = attrs.field(factory=dict)
        seq: Sequence[float] = ()
        raw: bytes = b""
        _hidden: int = 0
        made: int = attrs.field(init=False, default=3)
        later: int = attrs.Factory(_hidden_plus_one, takes_self=True)

    args = ["mode=async", "name=1", "noted=null", "bare.a=1", "keyed.3=sync", "seq=[1]", "hidden=4"]
    got = load(Odd, args)
    assert (got.mode, got.name, got.noted, got.bare, got.keyed) == ("async", "1", None, {"a": 1}, {3: "sync"})
    assert (got.seq, got._hidden, got.later, got.call) == ((1.0,), 4, 5, abs)
    assert problems(Odd, "call=abs", "mode=x", "raw=x", "made=1", "keyed.x=y") == [
        "mode: expected 'sync' or 'async', found 'x' (a str); from the command line",
        "call: a Callable[..., int] cannot be written in a configuration; set it in Python; from the command line",
        "keyed.x: expected int, found 'x' (a str); from the command line",
        "keyed.x: expected 'sync' or 'async', found 'y' (a str); from the command line",
        "raw: a bytes cannot be written in a configuration; set it in Python; from the command line",
        "made: no such key; did you mean 'mode'?; from the command line",
    ]
    with pytest.raises(
        ConfigError, match=r"dump\(Odd\): a value has no form in YAML: cannot represent an object <built"
    ):
        dump(got)

    @attrs.frozen
    class Holder:
        odd: Odd = Odd("async", call=int, raw=b"x")

    assert load(Holder, ["odd.noted=4"]).odd == Odd("async", call=int, raw=b"x", noted=4)


def test_option_copies_what_can_change() -> None:
    @attrs.frozen
    class Has:
        stop: list[str] = option(["a"], help="where to stop")

    assert Has().stop == ["a"]
    assert Has().stop is not Has().stop


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_prints_every_key_and_exits(
    flag: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @attrs.frozen
    class Node:
        """One node.

        More.
        """

        name: str
        lr: float = option(1e-5, help="how fast")
        note: str | None = None
        optimizer: Optimizer = Optimizer(lr=5.0)
        sampling: Sampling | None = None
        call: Callable[..., Any] = abs
        twice: int = attrs.Factory(lambda self: 2, takes_self=True)
        sizes: tuple[int, ...] = (1, 2)
        table: dict[str, float] = option({"a": 1.0}, help="weights")

    monkeypatch.setattr(sys, "argv", ["/some/where/train.py"])
    with pytest.raises(SystemExit) as caught:
        load(Node, ["nonsense", flag])
    assert caught.value.code == 0
    assert capsys.readouterr().out == (
        "usage: train.py [FILE.yaml | FILE.toml | config=FILE ...] [key=value ...]\n"
        "\n"
        "One node.\n"
        "\n"
        "  name: str (required)\n"
        "  lr: float = 1.0e-05\n"
        "      how fast\n"
        "  note: str | None = null\n"
        "  optimizer: Optimizer\n"
        "  optimizer.lr: float = 5.0\n"
        "  optimizer.betas: tuple[float, float] = [0.9, 0.999]\n"
        "  optimizer.schedule: Schedule\n"
        "  optimizer.schedule.warmup: int = 10\n"
        "  optimizer.schedule.decay: float = 0.5\n"
        "  sampling: Sampling | None = null\n"
        "  sampling.temperature: float = 1.0\n"
        "  sampling.top_k: int = 0\n"
        "  call: Callable[..., Any] = <built-in function abs>\n"
        "  twice: int (computed)\n"
        "  sizes: tuple[int, ...] = [1, 2]\n"
        "  table: dict[str, float] = {a: 1.0}\n"
        "      weights\n"
    )


@attrs.frozen
class Tree:
    value: int = 0
    child: "Tree | None" = None


def test_a_class_may_hold_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert load(Tree, ["child.child.value=2"]) == Tree(child=Tree(child=Tree(2)))
    with pytest.raises(SystemExit):
        load(Tree, ["-h"])
    assert "child: Tree | None = null" in capsys.readouterr().out


floats = st.floats(allow_nan=False)
schedules = st.builds(Schedule, warmup=st.integers(), decay=floats)
# what YAML 1.1 or 1.2 reads as something else, and what is hard to quote
HARD = ["on", "no", "1e-3", "1e5", "010", "0x1f", "1_000", "1:30", "2026-01-31", "~", "null", "", "<<", "=", ".inf"]
HARD += ["- a", "true", "a: b", "#", "a #b", "'", '"', "\ufeff", "\x85", "\u2028", "\r\n", "\x00", "é\U0001f600", "!x"]
texts = st.text() | st.sampled_from(HARD)


@given(
    st.builds(
        Config,
        model=texts,
        steps=st.integers(1),
        ratio=floats,
        verbose=st.booleans(),
        note=st.none() | texts,
        limit=st.none() | st.integers(),
        folder=st.just(Path("a b")) | st.just(Path("null")),
        where=st.none() | st.just(Path("1e5")),
        mode=st.sampled_from(["on", "off", 3, None]),
        color=st.sampled_from(Color),
        speed=st.sampled_from(Speed),
        stop=st.lists(texts),
        sizes=st.lists(st.integers()).map(tuple),
        weights=st.dictionaries(texts, floats),
        seed=st.integers() | texts,
        names=texts | st.lists(texts),
        extra=st.recursive(
            st.none() | st.booleans() | st.integers() | floats | texts,
            lambda inner: st.lists(inner) | st.dictionaries(texts | st.integers(), inner),
            max_leaves=5,
        ),
        optimizer=st.builds(Optimizer, lr=floats, betas=st.tuples(floats, floats), schedule=schedules),
        sampling=st.none() | st.builds(Sampling, temperature=st.floats(0, allow_nan=False)),
        stages=st.lists(schedules, max_size=2).map(tuple),
        by_name=st.dictionaries(texts, schedules, max_size=2),
    )
)
def test_what_is_dumped_loads_as_the_same(tmp_path_factory: pytest.TempPathFactory, config: Config) -> None:
    path = tmp_path_factory.getbasetemp() / "round.yaml"
    path.write_text(dump(config), encoding="utf-8")
    assert load(Config, [str(path)]) == config


@given(config=st.builds(Config, model=texts, stop=st.lists(texts), note=texts))
def test_a_reader_of_yaml_1_1_sees_the_same_strings(config: Config) -> None:
    read = yaml.safe_load(dump(config))
    assert (read["model"], read["stop"], read["note"]) == (config.model, config.stop, config.note)


@given(st.text())
def test_any_text_is_a_string_on_the_command_line(text: str) -> None:
    assert load(Config, [f"model={text}"]).model == text


@given(st.text(alphabet="ab=.:[]{},'\"#&*!|>-?%@ \n\t019e~<"))
def test_any_other_text_is_a_value_or_a_config_error(text: str) -> None:
    for key in ("steps", "ratio", "limit", "mode", "color", "stop", "weights", "seed", "names", "extra", "optimizer"):
        try:
            load(Config, [f"{key}={text}"])
        except ConfigError as error:
            assert str(error).startswith("load(Config): ")  # noqa: PT017


# --- defaults that depend on other fields


@attrs.frozen
class Derived:
    model: str | None = None
    warmup: int = derived(lambda cfg: 0 if cfg.model else 40, help="supervised steps")


def test_a_default_may_depend_on_the_fields_before() -> None:
    assert load(Derived, []).warmup == 40
    assert load(Derived, ["model=x"]).warmup == 0
    assert load(Derived, ["model=x", "warmup=3"]).warmup == 3


def test_a_derived_default_is_shown_by_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(Derived, ["--help"])
    assert "warmup: int = 40\n      supervised steps" in capsys.readouterr().out


@attrs.frozen
class Commented:
    steps: int = 3  # of the main loop
    rate: float = option(0.5, help="said by the option")  # not by this
    # nor by this
    name: str = "x"


def test_help_shows_the_comments_behind_fields(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(Commented, ["--help"])
    shown = capsys.readouterr().out
    assert "steps: int = 3\n      of the main loop\n" in shown
    assert "rate: float = 0.5\n      said by the option\n" in shown
    assert shown.endswith("name: str = x\n")


def test_a_class_without_source_has_help_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    made = attrs.make_class("Made", {"steps": attrs.field(default=1, type=int)}, frozen=True)
    with pytest.raises(SystemExit):
        load(made, ["--help"])
    assert "steps: int = 1" in capsys.readouterr().out


def test_a_dump_is_masked_in_its_structure(tmp_path: Path) -> None:
    """What is masked can be read, and where nothing is, it is the same text."""

    @attrs.frozen
    class Config:
        key: str = "x"
        engine: dict[str, Any] = attrs.field(factory=lambda: {"api_key": "pw", "sizes": [1, 2.5], "on": "on", "of": []})
        betas: tuple[float, float] = (0.9, 1e-20)
        path: Path = Path("a")
        parts: tuple[Any, ...] = ({"a": [{}]}, None, "***", "a: b\nc")

    assert dump(Config(), lambda value: value) == dump(Config())
    masked = dump(Config(), redacted)
    assert masked == dump(Config()).replace("pw", "'***'")
    assert yaml.safe_load(masked)["engine"]["api_key"] == "***"
    (tmp_path / "masked.yaml").write_text(masked)
    assert load(Config, [str(tmp_path / "masked.yaml")]).betas == (0.9, 1e-20)
