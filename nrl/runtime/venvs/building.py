"""Build a virtual environment from a recipe, on the node where it is used.

An environment is built in a scratch folder and renamed when complete, so a folder with its name is complete.
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
    current_platform,
    default_folder,
    describe_difference,
    is_in_use,
    is_usable,
    list_inventories,
    list_sources,
    mark_used,
    measure_similarity,
    parse_package,
    read_inventory,
)
from nrl.runtime.venvs.installer import PROGRESS_SECONDS, make_error, run_uv

__all__ = ["ensure_env"]


def ensure_env(
    recipe: Recipe,
    *,
    folder: str | Path | None = None,
    deadline: float = 1800.0,
    say: Callable[[str], None] | None = None,
) -> Path:
    """Build a recipe's environment on this node unless it is there, and return its interpreter.

    The recipe's sources are unpacked beside it: a process of the environment has to have them on its path
    (`nrl.runtime.venvs.environments.list_sources`).

    Args:
        recipe: what `nrl.runtime.venvs.recipes.make_recipe` returned.
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
            raise make_error(
                f"provide: executable '{recipe.executable}' is the driver's own interpreter, but node "
                f"{socket.gethostname()} has no {recipe.interpreter}; use the executable 'base', which is built on each"
                " node"
            )
        return Path(recipe.interpreter)
    if recipe.platform != current_platform():
        raise make_error(
            f"provide: {recipe.name} is for {recipe.platform}, and node {socket.gethostname()} is "
            f"{current_platform()}; use nodes of the driver's platform"
        )
    venvs = Path(folder).expanduser().absolute() if folder is not None else default_folder()
    env, until = venvs / recipe.name, time.monotonic() + deadline
    lacking = recipe.name
    try:
        if not is_usable(env, recipe.force):
            venvs.mkdir(parents=True, exist_ok=True)
            with _lock_name(venvs, recipe.name, until, deadline, say):
                if not is_usable(env, recipe.force):
                    _check_unused(recipe, env)
                    for leftover in venvs.glob(f".{recipe.name}.*.building"):  # Killed builders leave such folders.
                        shutil.rmtree(leftover, ignore_errors=True)
                    _build(recipe, venvs, until, say)
        for lacking, wheel in recipe.sources.items():
            _unpack(wheel, venvs / ".sources" / lacking)
    except OSError as error:
        if isinstance(error, TimeoutError):  # DeadlineExceeded is one
            raise
        raise make_error(
            f"provide: {lacking} is not in {venvs}, and cannot be built there ({error}); set NRL_VENV_DIR to a folder "
            "that you can write, with room for it"
        ) from error
    python = env / "bin" / "python"
    for used_folder in (env, *map(Path, list_sources(recipe, python))):
        mark_used(used_folder / INVENTORY)
    return python


def _unpack(wheel: bytes, source: Path) -> None:
    if read_inventory(source) is not None:
        return
    source.parent.mkdir(exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{source.name}.", suffix=".building", dir=source.parent))
    try:
        with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
            archive.extractall(scratch / "new")
        (scratch / "new" / INVENTORY).write_text(json.dumps({"name": source.name}))
        if source.exists() and read_inventory(source) is None:
            source.rename(scratch / "old")
        (scratch / "new").rename(source)
    except OSError:
        if read_inventory(source) is None:  # else another process was faster
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check_unused(recipe: Recipe, env: Path) -> None:
    if is_in_use(env):
        raise make_error(
            f"provide: {env} is to be built again, and processes run in it, whose files would change under them; end "
            "them first" + (", or unset NRL_FORCE_REBUILD_VENVS" if recipe.force else "")
        )


def _build(recipe: Recipe, folder: Path, until: float, say: Callable[[str], None]) -> None:
    nearest, shared_packages, extra_packages = _find_nearest(recipe, folder)
    same_executable = [
        env for env, inventory in list_inventories(folder).items() if inventory["executable"] == recipe.executable
    ]
    if recipe.name not in {env.name for env in same_executable} and same_executable:
        say(
            _describe_difference(
                recipe,
                nearest if nearest in same_executable else max(same_executable, key=lambda env: env.stat().st_mtime),
            )
        )
    else:
        say(f"{recipe.name}: building it in {folder}, {len(recipe.inventory['packages'])} packages")
    started = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix=f".{recipe.name}.", suffix=".building", dir=folder))
    venv = scratch / "venv"

    def run(*arguments: str) -> None:
        run_uv(arguments, cwd=scratch, until=until, say=say, purpose=recipe.name, settings=recipe.settings)

    try:
        lines = {line.replace("=", " ").split()[0]: line for line in recipe.requirements}
        for file, content in recipe.wheels.items():
            (scratch / file).write_bytes(content)
            name = parse_package(file)
            lines[name] = f"{name} @ {(scratch / file).as_uri()}"
        # Relocatable, so that scripts find their interpreter after the renaming. In a copy of the nearest environment
        # uv replaces only the packages that differ: an image may have neither uv's cache nor a network.
        if nearest is None or not _clone(nearest, venv):
            run(
                "venv",
                "--quiet",
                "--no-project",
                "--relocatable",
                f"--python={_find_interpreter(recipe.python)}",
                str(venv),
            )
        else:
            lines = {name: line for name, line in lines.items() if name not in shared_packages}
            if extra_packages:
                run("pip", "uninstall", f"--python={venv / 'bin' / 'python'}", *extra_packages)
        if lines:
            (scratch / "requirements.txt").write_text("\n".join(lines.values()) + "\n")
            # Any index may serve a file, since hashes say which file it has to be
            index_options = [f"--index={index}" for index in recipe.indexes] + ["--index-strategy=unsafe-best-match"]
            run(
                "pip",
                "install",
                "--no-deps",
                f"--python={venv / 'bin' / 'python'}",
                *index_options,
                "-r",
                "requirements.txt",
            )
        inventory = {**recipe.inventory, "name": recipe.name, "executable": recipe.executable, "force": recipe.force}
        inventory["built"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        (venv / INVENTORY).write_text(json.dumps(inventory, indent=1, sort_keys=True) + "\n")
        env = folder / recipe.name
        if env.exists():
            _check_unused(recipe, env)  # again, since building took a while
            env.rename(scratch / "replaced")
        venv.rename(env)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    say(f"{recipe.name}: built in {time.monotonic() - started:.1f} s")


def _describe_difference(recipe: Recipe, other: Path) -> str:
    inventory = read_inventory(other) or {}
    return (
        f"{recipe.name} is not in {other.parent}. The nearest there is {other.name}, built "
        f"{inventory.get('built', 'once')}. What that one has -> what the program's lock and source have: "
        f"{describe_difference(inventory, recipe.inventory)}. Only that is built now. To find it ready, run `nrl venvs "
        f"build {recipe.executable}` where that folder or image is made; to use what is there, go back to the lock and "
        "the source that it was made from."
    )


def _find_nearest(recipe: Recipe, folder: Path) -> tuple[Path | None, set[str], list[str]]:
    """Find the environment with most of the recipe's packages, at least half; return packages to keep and drop."""
    packages = recipe.inventory["packages"]
    able = {
        env: inventory
        for env, inventory in list_inventories(folder).items()
        if not recipe.force and all(inventory.get(key) == recipe.inventory[key] for key in ("python", "platform"))
    }
    nearest = max(able, key=lambda env: measure_similarity(able[env], recipe.inventory), default=None)
    installed = able[nearest]["packages"] if nearest is not None else {}
    shared = {name for name in packages if installed.get(name) == packages[name]}
    if 2 * len(shared) < len(packages):
        return None, set(), []
    return nearest, shared, sorted(installed.keys() - shared)


def _clone(old: Path, new: Path) -> bool:
    """Copy an environment by hard links, and copy files that uv writes in place; return whether it worked."""

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
def _lock_name(folder: Path, name: str, until: float, deadline: float, say: Callable[[str], None]) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock, holder = FileLock(folder / f".{name}.lock"), folder / f".{name}.holder"
    started = time.monotonic()
    while True:
        remaining = until - time.monotonic()
        try:
            lock.acquire(timeout=max(0.0, min(PROGRESS_SECONDS, remaining)), poll_interval=0.1)
            break
        except Timeout:
            owner = "another process"
            with contextlib.suppress(OSError, ValueError, KeyError):
                record = json.loads(holder.read_text())
                owner = f"process {record['pid']} on {record['host']} since {record['since']}"
            if remaining <= PROGRESS_SECONDS and until - time.monotonic() <= 0:
                raise make_error(
                    f"provide: {name} in {folder} was waited for for {deadline:.0f} s, and {owner} still holds its "
                    "lock; give a longer deadline, or end that process",
                    late=True,
                ) from None
            say(f"{name}: {owner} is building it; waiting, {time.monotonic() - started:.0f} s so far")
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        holder.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}))
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def _find_interpreter(version: str) -> str:
    """Return this process's interpreter if it has the version; else the version, for uv to find one."""
    interpreter = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    return str(interpreter) if platform.python_version() == version and interpreter.exists() else version
