"""Recipes of virtual environments, made from executables on the driver.

A recipe's name is a hash of what will be installed: each package's version and the lock's hashes of its files, Python,
and the platform. So a line of the lock that an executable does not use changes nothing. Sources that users edit (nrl,
their project, the folders that it depends on) change all the time, so they are not installed: they lie beside the
environment, under a hash of their content, on the path of its processes. That works for wheels of Python alone. A wheel
with anything else in it is installed, and its content is part of the hash.
"""

import hashlib
import json
import sys
import uuid
from collections.abc import Callable
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from typing import Any

from nrl.errors import ExecutableError
from nrl.runtime.venvs.environments import DISTRIBUTION, Recipe, current_platform, default_folder
from nrl.runtime.venvs.locks import find_project, is_rebuild_forced, select_pins, uv_settings
from nrl.runtime.venvs.pylock import choose_python
from nrl.runtime.venvs.registry import Executable, executable
from nrl.runtime.venvs.wheels import build_wheel, content_digest, repack

__all__ = ["make_recipe"]

_THIS_PROCESS = uuid.uuid4().hex


def make_recipe(
    name: str | Executable, *, folder: str | Path | None = None, say: Callable[[str], None] | None = None
) -> Recipe:
    """Make the recipe from which a node builds the environment of an executable.

    Args:
        name: the executable, or its name.
        folder: where the driver keeps environments, wheels and resolutions; None:
            `nrl.runtime.venvs.environments.default_folder`.
        say: gets a line of progress now and then while uv resolves or builds something.

    Returns:
        Frozen data that can be pickled; ``.name`` is ``<executable>-<hash>``.

    Raises:
        PlacementError: no executable has this name.
        ExecutableError: the lock cannot be read, or a wheel cannot be built; the message says why.
    """
    chosen = executable(name)
    if chosen.name == "system":
        if chosen.extras or chosen.groups or chosen.requirements or chosen.python:
            raise ExecutableError(
                "recipe: 'system' is the driver's own interpreter, to which nothing is added; give the executable with "
                "extras, groups, requirements or python another name"
            )
        return Recipe("system", "system", interpreter=sys.executable)
    folder_used = Path(folder).expanduser().absolute() if folder is not None else default_folder()
    lock_project = find_project()
    try:
        pins = select_pins(chosen, lock_project, folder_used / ".resolved", say)
        wheels = [build_wheel(pin.path, folder_used / ".wheels", say) for pin in pins.values() if pin.path is not None]
    except PermissionError as error:
        raise ExecutableError(
            f"recipe: {folder_used} cannot be written ({error}); set NRL_VENV_DIR to a folder that you can write"
        ) from error
    if DISTRIBUTION not in pins:
        wheels.append(repack(_find_distribution()))
    packages: dict[str, dict[str, str]] = {}
    for pin in pins.values():
        if pin.path is None:
            source = "index" if pin.line.startswith(f"{pin.name}==") else "url"
            packages[pin.name] = {"version": pin.version, "source": source, "digest": _hash(pin.digest or pin.line)}
    installed: dict[str, bytes] = {}
    sources: dict[str, bytes] = {}
    for wheel in wheels:
        digest = content_digest(wheel)[:16]
        if wheel.works_anywhere():
            sources[f"{wheel.package}-{wheel.version}-{digest}"] = wheel.content
        else:
            installed[wheel.name] = wheel.content
            packages[wheel.package] = {"version": wheel.version, "source": "local", "digest": digest}
    inventory: dict[str, Any] = {"format": 1, "python": choose_python(chosen), "platform": current_platform()}
    inventory["packages"] = dict(sorted(packages.items()))
    return Recipe(
        name=f"{chosen.name}-{_hash(json.dumps(inventory, sort_keys=True))[:12]}",
        executable=chosen.name,
        python=inventory["python"],
        platform=inventory["platform"],
        requirements=tuple(sorted(pin.line for pin in pins.values() if pin.line)),
        wheels=installed,
        sources=dict(sorted(sources.items())),
        indexes=tuple(sorted({pin.origin for pin in pins.values() if pin.origin is not None})),
        inventory=inventory,
        settings=uv_settings(),
        force=_THIS_PROCESS if is_rebuild_forced() else "",
    )


def _find_distribution() -> Distribution:
    try:
        return Distribution.from_name(DISTRIBUTION)
    except PackageNotFoundError:
        raise ExecutableError(
            "recipe: nrl was imported, but is not installed, and there is no lock beside it; install it, or run from "
            "its checkout"
        ) from None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
