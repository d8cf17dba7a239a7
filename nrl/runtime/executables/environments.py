"""Building virtual environments from recipes, on the node that uses them.

A node's default Python need not have nrl, so this module is also shipped by value: it imports the standard library
alone, and filelock where it locks. `nrl.runtime.executables.recipes` makes recipes.

An environment is built in a scratch folder beside its place and renamed into it when complete, so what is under an
environment's name is whole. One builder at a time holds the lock of that name, which ends with its process.
"""

import contextlib
import fcntl
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "INVENTORY",
    "Recipe",
    "default_folder",
    "difference",
    "here",
    "hold",
    "inventories",
    "provide",
    "usable",
    "used",
    "uv",
]

INVENTORY = "nrl-venv.json"
"""The file in an environment that says what it is made of; it is written last, so that it also says: complete.

>>> INVENTORY
'nrl-venv.json'
"""

_held: list[int] = []  # open files; their locks end with this process
_EVERY = 15.0  # seconds between two words of progress
_BOUND = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
os.execvp(sys.argv[1], sys.argv[1:])
"""


@dataclass(frozen=True)
class Recipe:
    """All that a node needs to build an environment, apart from packages that an index or a git server has.

    Args:
        name: ``<executable>-<hash>``, the hash over the inventory.
        executable: the name of the executable.
        interpreter: a path, where no environment is needed (``system``).
        python: the version to build with, such as ``"3.12.1"``.
        platform: what `here` says on nodes that can use it.
        requirements: lines of pinned requirements with their hashes.
        wheels: content by file name, of what no index has: nrl, the project and its path dependencies.
        indexes: indexes other than the default one from which locked packages come.
        inventory: what the environment is made of: python, platform, and for each package its version, source and
            digest.
        settings: variables for uv where the node has no value of its own, such as ``UV_DEFAULT_INDEX``.
        force: build anew what was not built for this very value; empty: use what is there.

    >>> Recipe("system", "system", interpreter="/usr/bin/python3").name
    'system'
    """

    name: str
    executable: str
    interpreter: str | None = None
    python: str = ""
    platform: str = ""
    requirements: tuple[str, ...] = ()
    wheels: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    indexes: tuple[str, ...] = ()
    inventory: Mapping[str, Any] = field(default_factory=dict, repr=False)
    settings: Mapping[str, str] = field(default_factory=dict, repr=False)  # may hold credentials
    force: str = ""


def here() -> str:
    """The platform of this node.

    >>> here().split("-")[0] in ("linux", "darwin")
    True
    """
    return f"{sys.platform}-{platform.machine()}"


def default_folder() -> Path:
    """Where this node keeps environments: ``NRL_VENV_DIR``, else a folder in the user's cache.

    >>> default_folder().is_absolute()
    True
    """
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("NRL_VENV_DIR") or f"{cache}/nrl/venvs").expanduser().absolute()


def provide(
    recipe: Recipe,
    *,
    folder: str | Path | None = None,
    deadline: float = 1800.0,
    say: Callable[[str], None] | None = None,
) -> Path:
    """The interpreter of a recipe's environment on this node, which is built if it is not there.

    Args:
        recipe: what `nrl.runtime.executables.recipes.recipe` returned.
        folder: where environments are; None: `default_folder`.
        deadline: seconds that waiting for another builder and building may take together.
        say: gets one line now and then while that lasts, and a paragraph if there is an environment of the same
            executable that is made of something else; None: print.

    Returns:
        The absolute path of the interpreter.

    Raises:
        ExecutableError: it cannot be built; the message has uv's last lines. Or it is to be built again while processes
            run in it. (RuntimeError on a node without nrl.)
        DeadlineExceeded: it took longer than it may. (TimeoutError on a node without nrl.)

    >>> provide(Recipe("system", "system", interpreter=sys.executable)) == Path(sys.executable)
    True
    """
    say = say or print  # no default: Ray replaces builtins.print, and cannot send what refers to the old one
    if recipe.interpreter is not None:
        if not Path(recipe.interpreter).exists():
            raise _error(
                f"provide: executable '{recipe.executable}' is the driver's own interpreter, but node "
                f"{socket.gethostname()} has no {recipe.interpreter}; use the executable 'base', which is built on each"
                " node"
            )
        return Path(recipe.interpreter)
    if recipe.platform != here():
        raise _error(
            f"provide: {recipe.name} is for {recipe.platform}, and node {socket.gethostname()} is {here()}; use nodes "
            "of the driver's platform"
        )
    place = Path(folder).expanduser().absolute() if folder is not None else default_folder()
    env = place / recipe.name
    if not usable(env, recipe.force):
        until = time.monotonic() + deadline
        try:
            place.mkdir(parents=True, exist_ok=True)
            with _locked(place, recipe.name, until, deadline, say):
                if not usable(env, recipe.force):
                    _check_unused(recipe, env)
                    for left in place.glob(f".{recipe.name}.*.building"):  # by builders that were killed
                        shutil.rmtree(left, ignore_errors=True)
                    _build(recipe, place, until, say)
        except OSError as error:
            if isinstance(error, TimeoutError):  # such as that of a deadline
                raise
            raise _error(
                f"provide: {recipe.name} is not in {place}, and cannot be built there ({error}); set NRL_VENV_DIR to a "
                "folder that you can write, with room for it"
            ) from error
    with contextlib.suppress(OSError):  # the time of its last use, for `nrl venvs prune`; an image may be read-only
        os.utime(env / INVENTORY)
    return env / "bin" / "python"


def usable(env: Path, force: str = "") -> bool:
    """Whether an environment is complete, and its base interpreter still there.

    >>> usable(Path("/nowhere/base-0123456789ab"))
    False
    """
    inventory = _inventory(env)
    return (
        inventory is not None
        and inventory.get("name") == env.name
        and (env / "bin" / "python").exists()
        and (not force or inventory.get("force") == force)
    )


def hold(env: Path) -> None:
    """Let nobody replace or remove an environment until this process has ended; where there is none, do nothing.

    >>> hold(Path("/nowhere"))
    """
    with contextlib.suppress(OSError):  # also where the file system has no locks
        _held.append(os.open(env / INVENTORY, os.O_RDONLY | os.O_CLOEXEC))
        fcntl.flock(_held[-1], fcntl.LOCK_SH | fcntl.LOCK_NB)


def used(env: Path) -> bool:
    """Whether a process holds an environment: on this node, or on another one where the file system's locks are shared.

    >>> used(Path("/nowhere"))
    False
    """
    try:
        file = os.open(env / INVENTORY, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(file)
    return False


def _check_unused(recipe: Recipe, env: Path) -> None:
    if used(env):
        raise _error(
            f"provide: {env} is to be built again, and processes run in it, whose files would change under them; end "
            "them first" + (", or unset NRL_FORCE_REBUILD_VENVS" if recipe.force else "")
        )


def inventories(folder: Path) -> dict[Path, dict[str, Any]]:
    """The usable environments of a folder, and what they are made of.

    >>> inventories(Path("/nowhere"))
    {}
    """
    if not folder.is_dir():
        return {}
    envs = [env for env in sorted(folder.iterdir()) if not env.name.startswith(".") and usable(env)]
    return {env: found for env in envs if (found := _inventory(env)) is not None}


def difference(old: Mapping[str, Any], new: Mapping[str, Any], most: int = 6) -> str:
    """What differs between two inventories, in words; empty if nothing does.

    >>> a = {"python": "3.12.1", "packages": {"numpy": {"version": "2.3.4", "source": "index", "digest": "a"}}}
    >>> b = {"python": "3.12.1", "packages": {"numpy": {"version": "2.3.5", "source": "index", "digest": "b"}}}
    >>> difference(a, b)
    'numpy 2.3.4 -> 2.3.5'
    """
    found = [
        f"{key} {old.get(key)} -> {new.get(key)}" for key in ("python", "platform") if old.get(key) != new.get(key)
    ]
    before, after = old.get("packages", {}), new.get("packages", {})
    changed = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    for name in sorted(changed, key=lambda name: (after.get(name, before.get(name))["source"] != "local", name)):
        a, b = before.get(name), after.get(name)
        if a is None or b is None:
            found.append(f"{name} {b['version']} is added" if b else f"{name} {a['version']} is gone")
        elif a["version"] != b["version"]:
            found.append(f"{name} {a['version']} -> {b['version']}")
        else:
            found.append(f"the source of {name} {b['version']}" if b["source"] == "local" else f"the files of {name}")
    more = len(found) - most
    return ", ".join([*found[:most], *([f"and {more} more"] if more > 0 else [])])


def uv(
    arguments: Sequence[str],
    *,
    cwd: Path,
    until: float | None = None,
    say: Callable[[str], None] | None = None,
    what: str = "uv",
    settings: Mapping[str, str] | None = None,
    stdin: str | None = None,
) -> str:
    """Run uv and return what it prints.

    Args:
        arguments: its arguments.
        cwd: the folder it runs in.
        until: the monotonic time at which it is ended; None: half an hour from now.
        say: gets a line of progress now and then.
        what: what it is for, at the beginning of messages.
        settings: environment variables that are set where they have no value yet.
        stdin: its input.

    Raises:
        ExecutableError: it fails, or there is none. (RuntimeError on a node without nrl.)
        DeadlineExceeded: it was ended. (TimeoutError on a node without nrl.)

    >>> uv(["--version"], cwd=Path.cwd())[:2]
    'uv'
    """
    # Nothing of another environment: uv would act on it, or its packages would hide those of the one that is built.
    strange = {"VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "PYTHONHOME", "UV_PROJECT_ENVIRONMENT", "UV_PYTHON"}
    strange |= {"UV_FROZEN", "UV_LOCKED"}  # not beside the options
    variables = {key: value for key, value in os.environ.items() if key not in strange}
    variables = {**(settings or {}), **variables, "NO_COLOR": "1", "UV_NO_PROGRESS": "1"}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err, tempfile.TemporaryFile("w+") as inp:
        inp.write(stdin or "")
        inp.seek(0)
        # Started by a process that asks Linux to end it together with this one, so that no orphan goes on building.
        command = [sys.executable, "-IS", "-c", _BOUND, *_find_uv(), *arguments]
        process = subprocess.Popen(command, cwd=cwd, env=variables, stdin=inp, stdout=out, stderr=err)
        started = time.monotonic()
        until = started + 1800.0 if until is None else until
        try:
            while process.poll() is None:
                left = min(_EVERY, until - time.monotonic())
                if left <= 0:
                    raise _error(
                        f"{what}: `uv {' '.join(arguments[:2])}` was ended, because the time for it is over; its last "
                        f"lines:\n{_last_lines(err)}",
                        late=True,
                    )
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(left)
                if process.returncode is None and say is not None and time.monotonic() - started > _EVERY - 1:
                    last = _last_lines(err, 1).strip()
                    say(f"{what}: {time.monotonic() - started:.0f} s so far" + (f" ({last})" if last else ""))
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode:
            raise _error(f"{what}: `uv {' '.join(arguments[:2])}` fails; its last lines:\n{_last_lines(err)}")
        out.seek(0)
        return out.read()


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
            name = file.split("-")[0].lower().replace("_", "-").replace(".", "-")
            lines[name] = f"{name} @ {(scratch / file).as_uri()}"
        # Relocatable, so that scripts find their interpreter after the renaming. In a copy of the nearest environment
        # only what differs is replaced: an image may have neither uv's cache nor a network to get the rest from.
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
            # Hashes say which file it has to be, whichever index has it.
            where = [f"--index={index}" for index in recipe.indexes] + ["--index-strategy=unsafe-best-match"]
            run("pip", "install", "--no-deps", f"--python={venv / 'bin' / 'python'}", *where, "-r", "requirements.txt")
        inventory = {**recipe.inventory, "name": recipe.name, "executable": recipe.executable, "force": recipe.force}
        inventory["built"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        (venv / INVENTORY).write_text(json.dumps(inventory, indent=1, sort_keys=True) + "\n")
        env = place / recipe.name
        if env.exists():
            _check_unused(recipe, env)  # that took a while
            env.rename(scratch / "replaced")
        venv.rename(env)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    say(f"{recipe.name}: built in {time.monotonic() - started:.1f} s")


def _paragraph(recipe: Recipe, other: Path) -> str:
    found = _inventory(other) or {}
    return (
        f"{recipe.name} is not in {other.parent}. The nearest there is {other.name}, built "
        f"{found.get('built', 'once')}; since then there have changed: {difference(found, recipe.inventory)}. Only "
        f"that is built now. To find it ready, run `nrl venvs build {recipe.executable}` where that folder or image is "
        "made; to use what is there, go back to the lock and the source that it was made from."
    )


def _nearest(recipe: Recipe, place: Path) -> tuple[Path | None, set[str], list[str]]:
    """The environment that shares most packages with the recipe, at least half of them; those; what has to leave it."""
    packages = recipe.inventory["packages"]
    best: tuple[Path | None, set[str], list[str]] = (None, set(), [])
    most = (len(packages) - 1) // 2
    for env, found in inventories(place).items():
        if not recipe.force and all(found.get(key) == recipe.inventory[key] for key in ("python", "platform")):
            shared = {name for name in packages if found["packages"].get(name) == packages[name]}
            if len(shared) > most:
                best, most = (env, shared, sorted(found["packages"].keys() - shared)), len(shared)
    return best


def _cloned(old: Path, new: Path) -> bool:
    """Copy an environment by hard links to its files, but for the few that are written in place."""

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
            lock.acquire(timeout=max(0.0, min(_EVERY, left)), poll_interval=0.1)
            break
        except Timeout:
            who = "another process"
            with contextlib.suppress(OSError, ValueError, KeyError):
                said = json.loads(holder.read_text())
                who = f"process {said['pid']} on {said['host']} since {said['since']}"
            if left <= _EVERY and until - time.monotonic() <= 0:
                raise _error(
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


def _inventory(env: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((env / INVENTORY).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _interpreter(version: str) -> str:
    """This process's own interpreter where it is of that version, else the version, for uv to find."""
    own = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    return str(own) if platform.python_version() == version and own.exists() else version


def _find_uv() -> list[str]:
    candidates = []
    with contextlib.suppress(ImportError, FileNotFoundError):
        from uv import find_uv_bin

        candidates.append([find_uv_bin()])
    if path := shutil.which("uv"):
        candidates.append([path])
    candidates.append([sys.executable, "-m", "uv"])
    for command in candidates:  # one on PATH may be a shim that refuses to run
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if subprocess.run([*command, "--version"], capture_output=True, timeout=60).returncode == 0:
                return command
    raise _error(
        f"uv: none that runs on node {socket.gethostname()}: not the package of {sys.executable}, none on PATH; "
        "install it there with `python -m pip install uv`"
    )


def _last_lines(file: Any, count: int = 15) -> str:
    written = os.pread(file.fileno(), 1 << 20, max(0, os.fstat(file.fileno()).st_size - (1 << 20)))  # uv's place stays
    lines = [f"    {line.rstrip()}" for line in written.decode(errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-count:])


def _error(message: str, late: bool = False) -> Exception:
    """The error of `nrl.errors`, or where there is no nrl the built-in one that is nearest."""
    try:
        from nrl.errors import DeadlineExceeded, ExecutableError
    except ImportError:
        return (TimeoutError if late else RuntimeError)(message)
    return (DeadlineExceeded if late else ExecutableError)(message)
