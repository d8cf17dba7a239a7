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
from nrl.runtime.venvs.building import provide
from nrl.runtime.venvs.environments import (
    INVENTORY,
    Recipe,
    default_folder,
    difference,
    inventories,
    inventory_of,
    likeness,
    sources,
    usable,
    used,
)
from nrl.runtime.venvs.inspection import wrong_packages
from nrl.runtime.venvs.locks import project
from nrl.runtime.venvs.recipes import recipe
from nrl.runtime.venvs.registry import EXECUTABLES

__all__ = ["build", "check", "listing", "path", "prune"]

_DAY = 86400.0


def build(names: Iterable[str], say: Callable[[str], None] = print) -> list[Path]:
    """Build the environments of some executables, and return their interpreters.

    Raises:
        ExecutableError: one of them cannot be built.
    """
    return [provide(recipe(name), say=say) for name in names]


def path(name: str, *, imports: bool = False) -> str:
    """The interpreter of an executable's environment.

    Args:
        name: of the executable.
        imports: return the folders of its sources instead, as PYTHONPATH takes them.

    Raises:
        ExecutableError: there is no such environment.
    """
    wanted = recipe(name)
    if wanted.interpreter is None and not usable(default_folder() / wanted.name):
        raise ExecutableError(f"path: {default_folder()} has no {wanted.name}; build it with `nrl venvs build {name}`")
    python = provide(wanted)
    return os.pathsep.join(sources(wanted, python)) if imports else str(python)


def listing(names: Iterable[str] = (), *, folder: Path | None = None) -> str:
    """A table of all environments: sizes, when they were built and last used, and whether they are current.

    Args:
        names: of executables or environments, to list their packages instead.
        folder: of the environments; None: `nrl.runtime.venvs.environments.default_folder`.
    """
    folder = folder or default_folder()
    found = inventories(folder)
    if wanted := set(names):
        chosen = {env: each for env, each in found.items() if wanted & {env.name, each["executable"]}}
        return "\n".join(_contents(env, each) for env, each in chosen.items()) or (
            f"{folder} has no environment of {', '.join(sorted(wanted))}"
        )
    current = _current({each["executable"] for each in found.values()}, folder)
    rows = [("name", "size", "its own", "built", "last used", "")]
    for env, inventory in found.items():
        size, own = _sizes(env)
        used = _ago((env / INVENTORY).stat().st_mtime)
        rows.append((env.name, _bytes(size), _bytes(own), _age(inventory), used, _state(env, inventory, current)))
    left = [each.name for each in _left_behind(folder)]
    rows += [(name, "", "", "", "", "incomplete: a builder is at work, or was killed") for name in left]
    if len(rows) == 1:
        return _none_in(folder)
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
    found = inventories(folder)
    asked = list(names) or sorted({each["executable"] for each in found.values()} & set(EXECUTABLES))
    if not asked:
        say(_none_in(folder))
    well = bool(asked)
    for name in asked:
        wanted = recipe(name, folder=folder)
        env, here, build = folder / wanted.name, project().root, f"`nrl venvs build {name}`"
        others = [other for other, each in found.items() if each["executable"] == name]
        if wanted.interpreter is not None:
            say(f"{name}: is {wanted.interpreter}, and needs no environment")
        elif env in found:
            wrong, other = _wrong_packages(env), _other_sources(wanted, folder, here)
            say(f"{env.name}: " + (wrong or f"is complete, and is what the lock {other or 'and the source say'}"))
            well = well and not wrong and not (other and _read_only(folder))
        elif others:
            nearest = max(others, key=lambda other: likeness(found[other], wanted.inventory))
            say(
                f"{wanted.name}: is not in {folder}, which has {nearest.name}, built {found[nearest]['built']}. What "
                f"that one has -> what the lock and the source of {here} have: "
                f"{difference(found[nearest], wanted.inventory)}. Build what is missing with {build}, or go back to "
                "the lock and the source that the other one was made from"
            )
            well = False
        else:
            say(f"{wanted.name}: is not in {folder}. Build it with {build}")
            well = False
    return well


def _none_in(folder: Path) -> str:
    return f"{folder} has no environments; build one with `nrl venvs build base`, or name another folder, NRL_VENV_DIR"


def _other_sources(wanted: Recipe, folder: Path, here: Path) -> str:
    """How the sources beside an environment differ from those of this process, in words; empty: they are there."""
    lacking = [name for name in wanted.sources if inventory_of(folder / ".sources" / name) is None]
    if not lacking:
        return ""
    found = [each for each in folder.glob(".sources/*") if inventory_of(each) is not None]
    there = [each.name for each in sorted(found, key=lambda each: each.stat().st_mtime)]
    words = list[str]()
    for name in lacking:
        package = f"{name.rsplit('-', 2)[0]}-"
        others = [each for each in there if each.startswith(package)]
        more = f" nor one of {len(others) - 1} others" if len(others) > 1 else ""
        words.append(f"{name}, and not {others[-1] + more if others else f'in {folder}'}")
    then = (
        f"{folder} cannot be written, so a program that starts will fail: set NRL_VENV_DIR to a copy that can, or go "
        "back to that source"
        if _read_only(folder)
        else "a program that starts puts it there, and builds nothing"
    )
    return f"says; the source of {here} is {', '.join(words)}: {then}"


def _read_only(folder: Path) -> bool:
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
    found = inventories(folder)
    current = _current({each["executable"] for each in found.values()}, folder) if days > 0 else {}
    names = {each.name for each in current.values()}
    unused = [env for env in found if (time.time() - (env / INVENTORY).stat().st_mtime) >= days * _DAY]
    for env in [*(env for env in unused if env.name not in names), *_left_behind(folder)]:
        name = env.name[1:].rsplit(".", 2)[0] if env.name.startswith(".") else env.name
        try:
            with FileLock(folder / f".{name}.lock", timeout=0):
                if used(env):
                    say(f"{env.name}: is kept, because processes run in it")
                    continue
                say(f"{env.name}: {'would be removed' if dry else 'is removed'}")
                removed.append(env)
                if not dry:  # renamed first, so that nobody uses a half-removed one
                    gone = env if env.name.startswith(".") else env.rename(folder / f".{name}.0.building")
                    shutil.rmtree(gone, ignore_errors=True)
        except Timeout:
            say(f"{env.name}: is kept, because it is being built")
    if not dry:
        for kept in (*folder.glob(".wheels/*"), *folder.glob(".resolved/*"), *folder.glob(".sources/*")):
            scratch = kept.name.startswith(".") or kept.match(".resolved/tmp*")  # somebody may be building there
            last = kept / INVENTORY if inventory_of(kept) else kept
            with contextlib.suppress(FileNotFoundError):
                old = time.time() - last.stat().st_mtime >= (max(days, 1.0) if scratch else days) * _DAY
                if old and not used(kept):
                    if last.is_file():  # first, so that nobody uses a half-removed folder
                        last.unlink()
                    if kept.is_dir():
                        shutil.rmtree(kept)
    return removed


def _contents(env: Path, inventory: Mapping[str, Any]) -> str:
    packages = [
        f"  {name} {each['version']}" + ("" if each["source"] == "index" else f"  ({each['source']}, {each['digest']})")
        for name, each in inventory["packages"].items()
    ]
    return "\n".join([f"{env}: Python {inventory['python']}, {inventory['platform']}, {_age(inventory)}", *packages])


def _current(names: Iterable[str], folder: Path) -> dict[str, Path]:
    """The environment that each executable would have now, where its lock can be read."""
    found = {}
    for name in names:
        with contextlib.suppress(NrlError):
            found[name] = folder / recipe(name, folder=folder).name
    return found


def _state(env: Path, inventory: Mapping[str, Any], current: dict[str, Path]) -> str:
    name = str(inventory["executable"])
    if name not in EXECUTABLES:
        return "of an executable that is not registered here"
    if name not in current:
        return "its lock cannot be read here"
    if current[name] == env:
        return "current"
    return f"differs: {difference(inventory, recipe(name, folder=env.parent).inventory, most=3)}"


def _wrong_packages(env: Path) -> str:
    """How the packages of an environment differ from its inventory, in words; empty where they do not."""
    wrong = list(wrong_packages(env, json.loads((env / INVENTORY).read_text())))
    again = "; build it again with NRL_FORCE_REBUILD_VENVS=1 or remove it"
    return ", ".join(wrong[:6]) + again if wrong else ""


def _left_behind(folder: Path) -> list[Path]:
    return sorted(folder.glob(".*.building")) if folder.is_dir() else []


def _sizes(env: Path) -> tuple[int, int]:
    """Bytes of an environment, and how many of them it does not share with uv's cache by hard links."""
    size = own = 0
    for file in env.rglob("*"):
        status = file.lstat()
        size += status.st_size
        own += status.st_size if status.st_nlink == 1 or file.is_dir() else 0
    return size, own


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.0f} {unit}"
        number /= 1000
    return f"{number:.1f} GB"


def _age(inventory: Mapping[str, Any]) -> str:
    return _ago(calendar.timegm(time.strptime(str(inventory["built"]), "%Y-%m-%dT%H:%M:%SZ")))


def _ago(when: float) -> str:
    seconds = max(0.0, time.time() - when)
    for length, unit in ((_DAY, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return "just now"
