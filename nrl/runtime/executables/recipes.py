"""Recipes of virtual environments, made from executables on the driver.

A recipe's name is a hash of what is really installed: each package's version and the hashes of its files as the lock
has them, Python, and the platform. So a line of the lock that an executable does not have changes nothing. What is in
the hands of whoever runs the program (nrl, the user's project, the folders that it depends on) changes all the time,
so it is not installed: it goes beside, under a hash of its content, onto the path of processes. That works for wheels
of Python alone. A wheel with anything else in it is installed, and its content is part of the hash.
"""

import hashlib
import json
import os
import sys
import uuid
from collections.abc import Callable
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from typing import Any

from nrl.errors import ExecutableError
from nrl.runtime.executables.locks import locked, project, settings
from nrl.runtime.executables.pins import python_of
from nrl.runtime.executables.registry import Executable, executable
from nrl.runtime.executables.wheels import build, content_digest, repack
from nrl.runtime.node.environments import Recipe, default_folder, here

__all__ = ["recipe"]

_THIS_PROCESS = uuid.uuid4().hex


def recipe(
    name: str | Executable, *, folder: str | Path | None = None, say: Callable[[str], None] | None = None
) -> Recipe:
    """All that a node needs to build the environment of an executable.

    Args:
        name: the executable, or its name.
        folder: where the driver keeps environments, and beside them what recipes are made with; None:
            `nrl.runtime.node.environments.default_folder`.
        say: gets a line now and then while uv resolves or builds something.

    Returns:
        Frozen data that can be pickled; ``.name`` is ``<executable>-<hash>``.

    Raises:
        PlacementError: no executable has this name.
        ExecutableError: the lock, or a wheel that it needs, cannot be had; the message says why.

    >>> recipe("system").name
    'system'
    """
    wanted = executable(name)
    if wanted.name == "system":
        if wanted.extras or wanted.groups or wanted.requirements or wanted.python:
            raise ExecutableError(
                "recipe: 'system' is the driver's own interpreter, to which nothing is added; give the executable with "
                "extras, groups, requirements or python another name"
            )
        return Recipe("system", "system", interpreter=sys.executable)
    place = Path(folder).expanduser().absolute() if folder is not None else default_folder()
    of = project()
    try:
        pins = locked(wanted, of, place / ".resolved", say)
        wheels = [build(pin.path, place / ".wheels", say) for pin in pins.values() if pin.path is not None]
    except PermissionError as error:
        raise ExecutableError(
            f"recipe: {place} cannot be written ({error}); set NRL_VENV_DIR to a folder that you can write"
        ) from error
    if "nrl" not in pins:
        wheels.append(repack(_installed()))
    packages: dict[str, dict[str, str]] = {}
    for pin in pins.values():
        if pin.path is None:
            source = "index" if pin.line.startswith(f"{pin.name}==") else "url"
            packages[pin.name] = {"version": pin.version, "source": source, "digest": _digest(pin.digest or pin.line)}
    installed: dict[str, bytes] = {}
    sources: dict[str, bytes] = {}
    for wheel in wheels:
        digest = content_digest(wheel)[:16]
        if wheel.works_anywhere():
            sources[f"{wheel.package}-{wheel.version}-{digest}"] = wheel.content
        else:
            installed[wheel.name] = wheel.content
            packages[wheel.package] = {"version": wheel.version, "source": "local", "digest": digest}
    inventory: dict[str, Any] = {"format": 1, "python": python_of(wanted), "platform": here()}
    inventory["packages"] = dict(sorted(packages.items()))
    force = os.environ.get("NRL_FORCE_REBUILD_VENVS", "0") not in ("", "0")
    return Recipe(
        name=f"{wanted.name}-{_digest(json.dumps(inventory, sort_keys=True))[:12]}",
        executable=wanted.name,
        python=inventory["python"],
        platform=inventory["platform"],
        requirements=tuple(sorted(pin.line for pin in pins.values() if pin.line)),
        wheels=installed,
        sources=dict(sorted(sources.items())),
        indexes=tuple(sorted({pin.origin for pin in pins.values() if pin.origin is not None})),
        inventory=inventory,
        settings=settings(),
        force=_THIS_PROCESS if force else "",
    )


def _installed() -> Distribution:
    try:
        return Distribution.from_name("nrl")
    except PackageNotFoundError:
        raise ExecutableError(
            "recipe: nrl was imported, but is not installed, and there is no lock beside it; install it, or run from "
            "its checkout"
        ) from None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
