"""The command ``nrl venvs``: builds, lists, checks and prunes the environments of an image or a node."""

import calendar
import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from nrl.errors import ExecutableError, NrlError
from nrl.runtime.venvs.building import ensure_env
from nrl.runtime.venvs.environments import (
    INVENTORY,
    Recipe,
    default_folder,
    describe_difference,
    is_in_use,
    is_usable,
    list_inventories,
    list_sources,
    measure_similarity,
    read_inventory,
)
from nrl.runtime.venvs.inspection import list_wrong_packages
from nrl.runtime.venvs.locks import find_project
from nrl.runtime.venvs.recipes import make_recipe
from nrl.runtime.venvs.registry import EXECUTABLES

__all__ = ["build", "check", "find_path", "list_envs", "prune"]

_DAY = 86400.0


def build(names: Iterable[str], say: Callable[[str], None] = print) -> list[Path]:
    """Build the environments of some executables, and return their interpreters.

    Raises:
        ExecutableError: one of them cannot be built.
    """
    return [ensure_env(make_recipe(name), say=say) for name in names]


def find_path(name: str, *, imports: bool = False) -> str:
    """Return the interpreter of an executable's environment.

    Args:
        name: of the executable.
        imports: return the folders of its sources instead, as PYTHONPATH takes them.

    Raises:
        ExecutableError: there is no such environment.
    """
    venv_recipe = make_recipe(name)
    if venv_recipe.interpreter is None and not is_usable(default_folder() / venv_recipe.name):
        raise ExecutableError(
            f"path: {default_folder()} has no {venv_recipe.name}; build it with `nrl venvs build {name}`"
        )
    python = ensure_env(venv_recipe)
    return os.pathsep.join(list_sources(venv_recipe, python)) if imports else str(python)


def list_envs(names: Iterable[str] = (), *, folder: Path | None = None) -> str:
    """Return a table of all environments: size, age, last use, and whether they are current.

    Args:
        names: of executables or environments, to list their packages instead.
        folder: of the environments; None: `nrl.runtime.venvs.environments.default_folder`.
    """
    folder = folder or default_folder()
    by_env = list_inventories(folder)
    if chosen_names := set(names):
        chosen = {
            env: inventory for env, inventory in by_env.items() if chosen_names & {env.name, inventory["executable"]}
        }
        return "\n".join(_list_packages(env, inventory) for env, inventory in chosen.items()) or (
            f"{folder} has no environment of {', '.join(sorted(chosen_names))}"
        )
    current = _current_envs({inventory["executable"] for inventory in by_env.values()}, folder)
    rows = [("name", "size", "its own", "built", "last used", "")]
    for env, inventory in by_env.items():
        size, unshared = _measure_sizes(env)
        age = _format_ago((env / INVENTORY).stat().st_mtime)
        rows.append(
            (
                env.name,
                _format_bytes(size),
                _format_bytes(unshared),
                _format_age(inventory),
                age,
                _describe_state(env, inventory, current),
            )
        )
    leftovers = [inventory.name for inventory in _list_leftovers(folder)]
    rows += [(name, "", "", "", "", "incomplete: a builder is at work, or was killed") for name in leftovers]
    if len(rows) == 1:
        return _describe_no_envs(folder)
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[5]]) for row in rows
    ]
    return "\n".join([f"environments in {folder}", *(line.rstrip() for line in lines)])


def check(names: Iterable[str] = (), *, folder: Path | None = None, say: Callable[[str], None] = print) -> bool:
    """Say whether executables have their environments, complete and with the packages of the lock.

    Args:
        names: the executables; none: those that have an environment, current or not.
        folder: of the environments; None: `nrl.runtime.venvs.environments.default_folder`.
        say: gets a line for each executable.

    Returns:
        Whether all of them have, and there are some.
    """
    folder = folder or default_folder()
    by_env = list_inventories(folder)
    executables = list(names) or sorted({inventory["executable"] for inventory in by_env.values()} & set(EXECUTABLES))
    if not executables:
        say(_describe_no_envs(folder))
    well = bool(executables)
    for name in executables:
        venv_recipe = make_recipe(name, folder=folder)
        env, root, build = folder / venv_recipe.name, find_project().root, f"`nrl venvs build {name}`"
        other_envs = [other for other, inventory in by_env.items() if inventory["executable"] == name]
        if venv_recipe.interpreter is not None:
            say(f"{name}: is {venv_recipe.interpreter}, and needs no environment")
        elif env in by_env:
            wrong, other = _describe_wrong_packages(env), _describe_missing_sources(venv_recipe, folder, root)
            say(f"{env.name}: " + (wrong or f"is complete, and is what the lock {other or 'and the source say'}"))
            well = well and not wrong and not (other and _is_read_only(folder))
        elif other_envs:
            nearest = max(other_envs, key=lambda other: measure_similarity(by_env[other], venv_recipe.inventory))
            say(
                f"{venv_recipe.name}: is not in {folder}, which has {nearest.name}, built {by_env[nearest]['built']}. "
                f"What that one has -> what the lock and the source of {root} have: "
                f"{describe_difference(by_env[nearest], venv_recipe.inventory)}. Build what is missing with {build}, "
                "or go back to the lock and the source that the other one was made from"
            )
            well = False
        else:
            say(f"{venv_recipe.name}: is not in {folder}. Build it with {build}")
            well = False
    return well


def _describe_no_envs(folder: Path) -> str:
    return f"{folder} has no environments; build one with `nrl venvs build base`, or name another folder, NRL_VENV_DIR"


def _describe_missing_sources(recipe_wanted: Recipe, folder: Path, root: Path) -> str:
    """Describe how the sources beside an environment differ from this process's; empty: they are complete."""
    lacking = [name for name in recipe_wanted.sources if read_inventory(folder / ".sources" / name) is None]
    if not lacking:
        return ""
    complete = [source for source in folder.glob(".sources/*") if read_inventory(source) is not None]
    available = [source.name for source in sorted(complete, key=lambda each: each.stat().st_mtime)]
    words = list[str]()
    for name in lacking:
        package = f"{name.rsplit('-', 2)[0]}-"
        same_package = [source for source in available if source.startswith(package)]
        rest = f" nor one of {len(same_package) - 1} others" if len(same_package) > 1 else ""
        words.append(f"{name}, and not {same_package[-1] + rest if same_package else f'in {folder}'}")
    consequence = (
        f"{folder} cannot be written, so a program that starts will fail: set NRL_VENV_DIR to a copy that can, or go "
        "back to that source"
        if _is_read_only(folder)
        else "a program that starts puts it there, and builds nothing"
    )
    return f"says; the source of {root} is {', '.join(words)}: {consequence}"


def _is_read_only(folder: Path) -> bool:
    return not os.access(folder, os.W_OK)


def prune(
    days: float = 30.0, *, dry: bool = False, folder: Path | None = None, say: Callable[[str], None] = print
) -> list[Path]:
    """Remove environments that nobody has used for some days and that no process runs in, and what builders left.

    Sources, wheels and resolutions that nobody has used for that time go, too.

    Args:
        days: since the last use. An environment that is current for this process's lock is kept; 0 removes all.
        dry: remove nothing, only say.
        folder: of the environments; None: `nrl.runtime.venvs.environments.default_folder`.
        say: gets a line for each environment.

    Returns:
        The environments that were removed, or would be.
    """
    folder, removed = folder or default_folder(), []
    by_env = list_inventories(folder)
    current = _current_envs({env_path["executable"] for env_path in by_env.values()}, folder) if days > 0 else {}
    names = {env_path.name for env_path in current.values()}
    unused = [env for env in by_env if (time.time() - (env / INVENTORY).stat().st_mtime) >= days * _DAY]
    for env in [*(env for env in unused if env.name not in names), *_list_leftovers(folder)]:
        name = env.name[1:].rsplit(".", 2)[0] if env.name.startswith(".") else env.name
        try:
            with FileLock(folder / f".{name}.lock", timeout=0):
                if is_in_use(env):
                    say(f"{env.name}: is kept, because processes run in it")
                    continue
                say(f"{env.name}: {'would be removed' if dry else 'is removed'}")
                removed.append(env)
                if not dry:  # renamed first, so that nobody uses a half-removed one
                    scratch_env = env if env.name.startswith(".") else env.rename(folder / f".{name}.0.building")
                    shutil.rmtree(scratch_env, ignore_errors=True)
        except Timeout:
            say(f"{env.name}: is kept, because it is being built")
    if not dry:
        for cached in (*folder.glob(".wheels/*"), *folder.glob(".resolved/*"), *folder.glob(".sources/*")):
            scratch = cached.name.startswith(".") or cached.match(".resolved/tmp*")  # somebody may be building there
            last = cached / INVENTORY if read_inventory(cached) else cached
            with contextlib.suppress(FileNotFoundError):
                old = time.time() - last.stat().st_mtime >= (max(days, 1.0) if scratch else days) * _DAY
                if old and not is_in_use(cached):
                    if last.is_file():  # first, so that nobody uses a half-removed folder
                        last.unlink()
                    if cached.is_dir():
                        shutil.rmtree(cached)
    return removed


def _list_packages(env: Path, inventory: Mapping[str, Any]) -> str:
    packages = [
        f"  {name} {package['version']}"
        + ("" if package["source"] == "index" else f"  ({package['source']}, {package['digest']})")
        for name, package in inventory["packages"].items()
    ]
    return "\n".join(
        [f"{env}: Python {inventory['python']}, {inventory['platform']}, {_format_age(inventory)}", *packages]
    )


def _current_envs(names: Iterable[str], folder: Path) -> dict[str, Path]:
    """Return the environment that each executable would have now, if its lock can be read."""
    envs = {}
    for name in names:
        with contextlib.suppress(NrlError):
            envs[name] = folder / make_recipe(name, folder=folder).name
    return envs


def _describe_state(env: Path, inventory: Mapping[str, Any], current: dict[str, Path]) -> str:
    name = str(inventory["executable"])
    if name not in EXECUTABLES:
        return "of an executable that is not registered here"
    if name not in current:
        return "its lock cannot be read here"
    if current[name] == env:
        return "current"
    return f"differs: {describe_difference(inventory, make_recipe(name, folder=env.parent).inventory, limit=3)}"


def _describe_wrong_packages(env: Path) -> str:
    """Describe how the packages of an environment differ from its inventory; empty: they do not."""
    wrong = list(list_wrong_packages(env, json.loads((env / INVENTORY).read_text())))
    again = "; build it again with NRL_FORCE_REBUILD_VENVS=1 or remove it"
    return ", ".join(wrong[:6]) + again if wrong else ""


def _list_leftovers(folder: Path) -> list[Path]:
    return sorted(folder.glob(".*.building")) if folder.is_dir() else []


def _measure_sizes(env: Path) -> tuple[int, int]:
    """Return the bytes of an environment, and the bytes that it does not share with uv's cache by hard links."""
    size = unshared = 0
    for file in env.rglob("*"):
        status = file.lstat()
        size += status.st_size
        unshared += status.st_size if status.st_nlink == 1 or file.is_dir() else 0
    return size, unshared


def _format_bytes(number: float) -> str:
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.0f} {unit}"
        number /= 1000
    return f"{number:.1f} GB"


def _format_age(inventory: Mapping[str, Any]) -> str:
    return _format_ago(calendar.timegm(time.strptime(str(inventory["built"]), "%Y-%m-%dT%H:%M:%SZ")))


def _format_ago(timestamp: float) -> str:
    seconds = max(0.0, time.time() - timestamp)
    for length, unit in ((_DAY, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return "just now"
