"""From a recipe to a virtual environment, on the node where it is used.

An environment is built in a scratch folder and renamed when complete, so a folder with an environment's name is whole.
One builder at a time holds the lock of that name; the lock ends with the builder's process. Sources are unpacked and
renamed likewise. Their names are hashes of their content, so two processes may do that at once.
"""

import contextlib
import io
import json
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from nrl.runtime.venvs.environments import (
    INVENTORY,
    Recipe,
    default_folder,
    difference,
    here,
    inventories,
    inventory_of,
    likeness,
    mark_used,
    package_of,
    sources,
    usable,
    used,
)
from nrl.runtime.venvs.installer import EVERY, failure, uv

__all__ = ["provide"]


def provide(
    recipe: Recipe,
    *,
    folder: str | Path | None = None,
    deadline: float = 1800.0,
    say: Callable[[str], None] | None = None,
) -> Path:
    """Build a recipe's environment on this node unless it is there, and return its interpreter.

    The recipe's sources are unpacked beside it: a process of the environment has to have them on its path
    (`nrl.runtime.venvs.environments.sources`).

    Args:
        recipe: what `nrl.runtime.venvs.recipes.recipe` returned.
        folder: where environments are; None: `default_folder`.
        deadline: seconds for waiting until another builder is done and for building, together.
        say: gets a line of progress now and then, and a paragraph where the node has an environment of the same
            executable with other packages; None: print.

    Returns:
        The absolute path of the interpreter.

    Raises:
        ExecutableError: it cannot be built; the message has uv's last lines. Or processes run in an environment that
            has to be built again. (RuntimeError on a node without nrl.)
        DeadlineExceeded: it took longer than ``deadline``. (TimeoutError on a node without nrl.)
    """
    say = say or print  # no default: Ray replaces builtins.print, and cannot send a function that refers to the old one
    if recipe.interpreter is not None:
        if not Path(recipe.interpreter).exists():
            raise failure(
                f"provide: executable '{recipe.executable}' is the driver's own interpreter, but node "
                f"{socket.gethostname()} has no {recipe.interpreter}; use the executable 'base', which is built on each"
                " node"
            )
        return Path(recipe.interpreter)
    if recipe.platform != here():
        raise failure(
            f"provide: {recipe.name} is for {recipe.platform}, and node {socket.gethostname()} is {here()}; use nodes "
            "of the driver's platform"
        )
    place = Path(folder).expanduser().absolute() if folder is not None else default_folder()
    env, until = place / recipe.name, time.monotonic() + deadline
    lacking = recipe.name
    try:
        if not usable(env, recipe.force):
            place.mkdir(parents=True, exist_ok=True)
            with _locked(place, recipe.name, until, deadline, say):
                if not usable(env, recipe.force):
                    _check_unused(recipe, env)
                    for left in place.glob(f".{recipe.name}.*.building"):  # by builders that were killed
                        shutil.rmtree(left, ignore_errors=True)
                    _build(recipe, place, until, say)
        for lacking, wheel in recipe.sources.items():
            _unpack(wheel, place / ".sources" / lacking)
    except OSError as error:
        if isinstance(error, TimeoutError):  # DeadlineExceeded is one
            raise
        raise failure(
            f"provide: {lacking} is not in {place}, and cannot be built there ({error}); set NRL_VENV_DIR to a folder "
            "that you can write, with room for it"
        ) from error
    python = env / "bin" / "python"
    for each in (env, *map(Path, sources(recipe, python))):
        mark_used(each / INVENTORY)
    return python


def _unpack(wheel: bytes, source: Path) -> None:
    if inventory_of(source) is not None:
        return
    source.parent.mkdir(exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{source.name}.", suffix=".building", dir=source.parent))
    try:
        with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
            archive.extractall(scratch / "new")
        (scratch / "new" / INVENTORY).write_text(json.dumps({"name": source.name}))
        if source.exists() and inventory_of(source) is None:
            source.rename(scratch / "old")
        (scratch / "new").rename(source)
    except OSError:
        if inventory_of(source) is None:  # else another process was faster
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check_unused(recipe: Recipe, env: Path) -> None:
    if used(env):
        raise failure(
            f"provide: {env} is to be built again, and processes run in it, whose files would change under them; end "
            "them first" + (", or unset NRL_FORCE_REBUILD_VENVS" if recipe.force else "")
        )


def _build(recipe: Recipe, place: Path, until: float, say: Callable[[str], None]) -> None:
    nearest, kept, gone = _nearest(recipe, place)
    same = [env for env, found in inventories(place).items() if found["executable"] == recipe.executable]
    if recipe.name not in {env.name for env in same} and same:
        say(_paragraph(recipe, nearest if nearest in same else max(same, key=lambda env: env.stat().st_mtime)))
    else:
        say(f"{recipe.name}: building it in {place}, {len(recipe.inventory['packages'])} packages")
    started = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix=f".{recipe.name}.", suffix=".building", dir=place))
    venv = scratch / "venv"

    def run(*arguments: str) -> None:
        uv(arguments, cwd=scratch, until=until, say=say, what=recipe.name, settings=recipe.settings)

    try:
        lines = {line.replace("=", " ").split()[0]: line for line in recipe.requirements}
        for file, content in recipe.wheels.items():
            (scratch / file).write_bytes(content)
            name = package_of(file)
            lines[name] = f"{name} @ {(scratch / file).as_uri()}"
        # Relocatable, so that scripts find their interpreter after the renaming. In a copy of the nearest environment
        # uv replaces only the packages that differ: an image may have neither uv's cache nor a network.
        if nearest is None or not _cloned(nearest, venv):
            run(
                "venv", "--quiet", "--no-project", "--relocatable", f"--python={_interpreter(recipe.python)}", str(venv)
            )
        else:
            lines = {name: line for name, line in lines.items() if name not in kept}
            if gone:
                run("pip", "uninstall", f"--python={venv / 'bin' / 'python'}", *gone)
        if lines:
            (scratch / "requirements.txt").write_text("\n".join(lines.values()) + "\n")
            # Any index may serve a file, since hashes say which file it has to be
            where = [f"--index={index}" for index in recipe.indexes] + ["--index-strategy=unsafe-best-match"]
            run("pip", "install", "--no-deps", f"--python={venv / 'bin' / 'python'}", *where, "-r", "requirements.txt")
        inventory = {**recipe.inventory, "name": recipe.name, "executable": recipe.executable, "force": recipe.force}
        inventory["built"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        (venv / INVENTORY).write_text(json.dumps(inventory, indent=1, sort_keys=True) + "\n")
        env = place / recipe.name
        if env.exists():
            _check_unused(recipe, env)  # again, since building took a while
            env.rename(scratch / "replaced")
        venv.rename(env)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    say(f"{recipe.name}: built in {time.monotonic() - started:.1f} s")


def _paragraph(recipe: Recipe, other: Path) -> str:
    found = inventory_of(other) or {}
    return (
        f"{recipe.name} is not in {other.parent}. The nearest there is {other.name}, built "
        f"{found.get('built', 'once')}. What that one has -> what the program's lock and source have: "
        f"{difference(found, recipe.inventory)}. Only that is built now. To find it ready, run `nrl venvs build "
        f"{recipe.executable}` where that folder or image is made; to use what is there, go back to the lock and the "
        "source that it was made from."
    )


def _nearest(recipe: Recipe, place: Path) -> tuple[Path | None, set[str], list[str]]:
    """The environment that shares most packages with the recipe, at least half; these packages; those to uninstall."""
    packages = recipe.inventory["packages"]
    able = {
        env: found
        for env, found in inventories(place).items()
        if not recipe.force and all(found.get(key) == recipe.inventory[key] for key in ("python", "platform"))
    }
    nearest = max(able, key=lambda env: likeness(able[env], recipe.inventory), default=None)
    there = able[nearest]["packages"] if nearest is not None else {}
    shared = {name for name in packages if there.get(name) == packages[name]}
    if 2 * len(shared) < len(packages):
        return None, set(), []
    return nearest, shared, sorted(there.keys() - shared)


def _cloned(old: Path, new: Path) -> bool:
    """Copy an environment by hard links; the few files that uv writes in place are real copies. Whether that worked."""

    def link(source: str, target: str) -> None:
        if Path(source).parent == old / "bin" or Path(source).name in ("pyvenv.cfg", ".lock"):
            shutil.copy2(source, target)
            return
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)

    try:
        shutil.copytree(old, new, symlinks=True, copy_function=link, ignore=shutil.ignore_patterns(INVENTORY))
    except (OSError, shutil.Error):
        shutil.rmtree(new, ignore_errors=True)
        return False
    return True


@contextlib.contextmanager
def _locked(place: Path, name: str, until: float, deadline: float, say: Callable[[str], None]) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock, holder = FileLock(place / f".{name}.lock"), place / f".{name}.holder"
    started = time.monotonic()
    while True:
        left = until - time.monotonic()
        try:
            lock.acquire(timeout=max(0.0, min(EVERY, left)), poll_interval=0.1)
            break
        except Timeout:
            who = "another process"
            with contextlib.suppress(OSError, ValueError, KeyError):
                said = json.loads(holder.read_text())
                who = f"process {said['pid']} on {said['host']} since {said['since']}"
            if left <= EVERY and until - time.monotonic() <= 0:
                raise failure(
                    f"provide: {name} in {place} was waited for for {deadline:.0f} s, and {who} still holds its lock; "
                    "give a longer deadline, or end that process",
                    late=True,
                ) from None
            say(f"{name}: {who} is building it; waiting, {time.monotonic() - started:.0f} s so far")
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        holder.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}))
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def _interpreter(version: str) -> str:
    """This process's interpreter if it has that version; else the version, for uv to find one."""
    own = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    return str(own) if platform.python_version() == version and own.exists() else version
