"""`environments`: what ``env=`` and ``data=`` of a configuration say, as an environment and its tasks."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from nrl.envs.library.arithmetic import task as sums
from nrl.envs.library.code import code
from nrl.envs.library.games import sliding_puzzle, tic_tac_toe
from nrl.envs.library.generated_tasks import choices, passages, products, programs
from nrl.envs.library.ifeval import constraints
from nrl.envs.library.ifeval_tasks import task as instructions
from nrl.envs.library.mathematics.verifying import math_verifier
from nrl.envs.library.multiple_choice import choice
from nrl.envs.library.python_tool import LIMITS as _PYTHON
from nrl.envs.library.python_tool import Interpreter, python
from nrl.envs.library.reasoning.tasks import reasoning_gym
from nrl.envs.library.reversal import task as texts
from nrl.envs.library.search.searches import searching
from nrl.envs.library.search.short_answers import short_answer
from nrl.envs.llm_judge import judge
from nrl.envs.pool.pool import on
from nrl.envs.references import task_check
from nrl.envs.registry import named
from nrl.envs.rubric import by_source, single_turn
from nrl.envs.sandbox import Limits
from nrl.envs.tools import tool, tool_use
from nrl.envs.types import Env, Environment, Task, Verifier, is_env
from nrl.envs.verifiers import VERIFIERS
from nrl.errors import ConfigError

if TYPE_CHECKING:
    from nrl.data import Tasks
    from nrl.runtime import Mesh, Slots

__all__ = [
    "ADDRESS_ENTRY_POINTS",
    "BUILTIN",
    "ENTRY_POINTS",
    "ENVIRONMENTS",
    "OWN_TASKS",
    "Environments",
    "environments",
]


_LIMITS = Limits()


def _code(
    *,
    seconds: float = _LIMITS.seconds,
    cpu_seconds: float = _LIMITS.cpu_seconds,
    memory: int = _LIMITS.memory,
    processes: int = _LIMITS.processes,
    output: int = _LIMITS.output,
    disk: int = _LIMITS.disk,
) -> Verifier:
    """The verifier `nrl.envs.code`, with limits of each test."""
    return code(limits=Limits(seconds, cpu_seconds, memory, processes, output, disk))


def _reward_model(
    *,
    model: str,
    dtype: Literal["float32", "bfloat16"] = "float32",
    max_length: int | None = None,
    max_tokens: int = 16_384,
    device: str | None = None,
    trust_remote_code: bool = False,
) -> Verifier:
    """The verifier `nrl.reward_model` in this process, as far as a configuration can say it."""
    from nrl.envs.reward_model import reward_model  # which imports torch

    found: Verifier = reward_model(
        model,
        dtype=dtype,
        max_length=max_length,
        max_tokens=max_tokens,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    return found


def _with_python(
    *,
    verifier: str | dict[str, Any] = "math",
    turns: int = 8,
    seconds: float = _PYTHON.seconds,
    cpu_seconds: float = _PYTHON.cpu_seconds,
    memory: int = _PYTHON.memory,
    processes: int = _PYTHON.processes,
    output: int = _PYTHON.output,
    disk: int = _PYTHON.disk,
) -> Environment:
    """Episodes with a Python interpreter as a tool, with limits, in which a verifier has the last word."""
    limits = Limits(seconds, cpu_seconds, memory, processes, output, disk)
    start, end = (lambda task: Interpreter(limits=limits)), Interpreter.close
    return tool_use([tool(python)], _verifier("python", verifier), turns=turns, state=start, close=end)


def _searching(
    *,
    corpus: str | None = None,
    verifier: str | dict[str, Any] = "short_answer",
    k: int = 3,
    turns: int = 6,
    hops: int | None = None,
) -> Environment:
    """Episodes with a search of a corpus as a tool, in which a verifier has the last word."""
    return searching(corpus, _verifier("search", verifier), k=k, turns=turns, hops=hops)


def _verifier(who: str, given: str | Mapping[str, Any]) -> Verifier:
    """The verifier that an option names, or ``{name: options}``."""
    ((name, options),) = given.items() if isinstance(given, Mapping) and len(given) == 1 else [(given, {})]
    found = named(str(name), options or {}, ENVIRONMENTS, at=f"env.{who}.verifier")
    if is_env(found):
        raise ConfigError(f"env.{who}.verifier={name} is an environment; give a verifier")
    return cast(Verifier, found)


BUILTIN: dict[str, Any] = {
    **VERIFIERS,
    "choice": choice,
    "code": _code,
    "constraints": constraints,
    "judge": judge,
    "math": math_verifier,
    "python": _with_python,
    "reasoning_gym": reasoning_gym,
    "reward_model": _reward_model,
    "search": _searching,
    "short_answer": short_answer,
    "sliding_puzzle": sliding_puzzle,
    "tic_tac_toe": tic_tac_toe,
}
"""Verifiers, and functions that make a verifier or an environment from options, by name."""

ENTRY_POINTS = "nrl.environments"
"""The group of entry points in which a package lists environments by name, as those of `BUILTIN`."""

ADDRESS_ENTRY_POINTS = "nrl.environment_addresses"
"""The group of entry points of functions that make environments of an address, such as ``http://...``.

Each is called with the name of an entry of ``env=``, the address and the options, and returns environments by label, or
None, if it does not know such addresses.
"""


@functools.cache
def _entry_points(group: str) -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=group)}


class _Environments(Mapping[str, Any]):
    """The environments of this package and those that installed packages list; the latter are imported when used."""

    def __getitem__(self, name: str) -> Any:
        return BUILTIN[name] if name in BUILTIN else _entry_points(ENTRY_POINTS)[name].load()

    def __contains__(self, name: object) -> bool:
        return name in BUILTIN or name in _entry_points(ENTRY_POINTS)

    def __iter__(self) -> Iterator[str]:
        return iter({**BUILTIN, **_entry_points(ENTRY_POINTS)})

    def __len__(self) -> int:
        return len({**BUILTIN, **_entry_points(ENTRY_POINTS)})


ENVIRONMENTS: Mapping[str, Any] = _Environments()
"""What ``env=`` knows by name: `BUILTIN`, and what other packages list under `ENTRY_POINTS`."""

OWN_TASKS: dict[str, Callable[[int, int], Task]] = {
    "choice": choices,
    "code": programs,
    "constraints": instructions,
    "exact": texts,
    "judge": sums,
    "math": sums,
    "number": sums,
    "number_or_wrong": sums,
    "python": products,
    "reward_model": sums,
    "short_answer": passages,
}
"""The tasks of those that bring none themselves: what the tiny model learns."""


class Environments(NamedTuple):
    """One environment or several, and their tasks; `environments` makes it.

    Args:
        env: for `nrl.rollouts`; of several, that of each task's source.
        tasks: from a seed, and other data in place of the configured, to a stream of tasks.
        names: of the sources, by their number, for `nrl.per_source`.
        graded: what `nrl.grade` takes: the verifier, where one alone decides, and else ``env``.
        each: verifier or environment, in the order of ``names``.
    """

    env: Env
    tasks: "Callable[..., Tasks]"
    names: tuple[str, ...]
    graded: Verifier | Env
    each: tuple[Verifier | Env, ...]


def environments(
    env: str | Mapping[str, Any], source: Any = None, *, place: "Slots | Mesh | None" = None, **how: Any
) -> Environments:
    """What a configuration's ``env=`` and ``data=`` say.

    ``env`` is a name: one of `ENVIRONMENTS`, or ``FILE.py:NAME`` or ``MODULE:NAME`` for an environment, a verifier, or
    a function that makes one of the two. With options it is a mapping, ``{"math": {"timeout": 2}}``, which a command
    line writes as ``env.math.timeout=2``. Several are mixed, each as often as its weight says:
    ``{"math": 3, "code": 1}``, or ``{"math": {"weight": 3, "timeout": 2}, "code": 1}``. To have one of them twice,
    name it as ``"env"``: ``{"quick": {"env": "math"}, "patient": {"env": "math", "timeout": 5}}``.

    ``env`` may also be the address of a server, ``http://10.0.0.5:8000``, with the options of `nrl.remote`; several, as
    ``http://10.0.0.5:8000,http://10.0.0.6:8000``, are replicas of one environment. Or it is the configuration of a gym
    that ``nrl gym run`` has started, ``gym.yaml``, which is all of its environments, or ``gym.yaml:math``, one of them.

    Args:
        env: the name, or the names and their options.
        source: where tasks come from, as for `nrl.data.tasks`; for each name, if it is a mapping; each may be a mapping
            itself, of ``source`` and other arguments of that function. None: tasks that come with the environment.
        place: a mesh on which verifiers and environments run, as with `nrl.on`, or slots, of which one named
            ``"verifiers"`` is made. None, or no slots: they run in this process.
        how: more arguments of `nrl.data.tasks`, such as ``format``.

    Raises:
        ConfigError: a name, an option or a weight is wrong, or nothing says where tasks come from.
        DataError: (when tasks are asked for) as `nrl.data.tasks` does.
        NrlError: as `nrl.runtime.Slots.mesh` does, where slots are given.

    >>> made = environments({"number": 3, "exact": 1})
    >>> [task["prompt"] for task in made.tasks(0).take(5)], made.names
    (['17+12=', '10+17=', '19+1=', '10+17=', '779<'], ('number', 'exact'))
    """
    if not env or not isinstance(env, str | Mapping):
        raise ConfigError(f"env is {env!r}; give a name, or a mapping of names: {', '.join(sorted(ENVIRONMENTS))}")
    found, weights, kinds = dict[str, Verifier | Env](), dict[str, float](), dict[str, str]()
    for name, given in ({env: 1} if isinstance(env, str) else _joined(env)).items():
        options = dict(given) if isinstance(given, Mapping) else {"env" if isinstance(given, str) else "weight": given}
        weight, kind = options.pop("weight", 1), str(options.pop("env", name))
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise ConfigError(f"env.{name}: the weight is {weight!r}; give a positive number, or options by name")
        for label, made in _load(name, kind, options).items():
            if label in found:
                raise ConfigError(f"env: there are two {label}; name one anew, as {{other: {{env: {name}}}}}")
            found[label], weights[label], kinds[label] = made, weight, kind

    if place:
        from nrl.runtime.mesh.placement import as_mesh  # who has a place has torch

        moved = on(as_mesh(place, "base", name="verifiers"))
        found = {label: moved(cast(Any, each)) for label, each in found.items()}

    def tasks(seed: int = 0, other: Any = None) -> "Tasks":
        from nrl import data  # where tasks come to an environment from elsewhere, as to a server, nothing needs it

        given = source if other is None else other
        if isinstance(given, Mapping) and len(found) == 1 and "source" in given and "source" not in found:
            given = {next(iter(found)): given}
        for name in given if isinstance(given, Mapping) else ():
            if name not in found:
                raise ConfigError(f"data: there is no environment '{name}'; there are {', '.join(found)}")
        each = {name: _tasks(name, found[name], kinds[name], given, {**how, "seed": seed}) for name in found}
        if len(each) == 1:
            return next(iter(each.values()))
        return data.mixture({name: (stream, weights[name]) for name, stream in each.items()}, seed=seed)

    played: list[Env] = [each if is_env(each) else single_turn(cast(Verifier, each)) for each in found.values()]
    if len(played) == 1:
        return Environments(played[0], tasks, tuple(found), next(iter(found.values())), tuple(found.values()))
    mixed = by_source(*played)
    return Environments(mixed, tasks, tuple(found), mixed, tuple(found.values()))


def _load(name: str, kind: str, options: Mapping[str, Any]) -> dict[str, Verifier | Env]:
    """Return what an entry names, by label: one environment, or all of an address that holds several."""
    if kind not in BUILTIN:
        for entry in _entry_points(ADDRESS_ENTRY_POINTS).values():
            if (found := entry.load()(name, kind, options)) is not None:
                return dict(found)
    return {_label(name): named(kind, options, ENVIRONMENTS)}


def _joined(env: Mapping[str, Any]) -> dict[str, Any]:
    """The entries, with names that a command line has split at the point of ``FILE.py:NAME`` put together."""
    found: dict[str, Any] = {}
    for name, given in env.items():
        split = isinstance(given, Mapping) and bool(given) and all(key.startswith("py:") for key in given)
        found |= {f"{name}.{key}": value for key, value in given.items()} if split else {name: given}
    return found


def _label(name: str) -> str:
    """How metrics call an environment: ``games/guess.py:env`` is ``guess.env``."""
    module, _, attribute = name.rpartition(":")
    return f"{Path(module).name.removesuffix('.py')}.{attribute}" if module else name


def _tasks(name: str, found: Verifier | Env, kind: str, given: Any, how: Mapping[str, Any]) -> "Tasks":
    from nrl import data

    if isinstance(given, Mapping):
        given = given.get(name)
    if isinstance(given, Mapping):
        given, how = given.get("source"), {**how, **{key: value for key, value in given.items() if key != "source"}}
    if given is None:
        given = getattr(found, "tasks", None) or OWN_TASKS.get(kind)
        if given is None:
            raise ConfigError(f"env={kind} brings no tasks; say where they come from, as data=FILE")
    try:
        made = data.tasks(given, check=task_check(found), **how)
    except TypeError as error:
        raise ConfigError(f"data: the tasks of {name}: {error}") from error
    return made._replace(names=(name,)) if callable(given) else made
