"""`bubblewrap`: a sandbox of the kernel's own namespaces, without a daemon, an image or a right that users lack."""

import math
import os
import random
import resource
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path, PurePosixPath

import attrs

from nrl.envs.sandbox.base import Dialogue, Finished, Limits, Sandbox
from nrl.envs.sandbox.running import run
from nrl.envs.sandbox.seccomp import seccomp_filter
from nrl.errors import EnvError

__all__ = ["bubblewrap"]

_ROOT = 0
_NOBODY = 65534
_OPEN_FILES = 256
_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")  # libraries, and what the interpreter of the system imports
_ENVIRONMENT = {
    "PATH": "/bin",
    "HOME": "/sandbox",
    "TMPDIR": "/sandbox",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


@attrs.frozen
class _Setup:
    """What all runs of a sandbox have in common; it can be pickled."""

    bwrap: str
    prlimit: str
    setpriv: str
    python: str
    paths: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]


def bubblewrap(
    *, paths: Sequence[str | os.PathLike[str]] = (), environment: Mapping[str, str] | None = None, python: str = ""
) -> Sandbox:
    """A sandbox made by bubblewrap, a program of 100 KB that most distributions of Linux have.

    A program has new namespaces of all kinds, no network, a clean environment, and a work folder in memory that ends
    with it. Of the machine's files it sees, read-only, the interpreter and the libraries of the system. Where this
    process is root, the program is another user, with a number that nobody else has.

    Args:
        paths: more files and folders that programs may read, where they are: packages, say, with ``PYTHONPATH``.
        environment: more variables of the environment.
        python: the interpreter, without what its virtual environment adds; left out, this process's.

    Returns:
        A sandbox, which can be pickled. It uses no state, so threads may share it.

    Raises:
        EnvError: bwrap, or what else it takes, is not installed; a path does not exist; the machine is not one for
            which there is a filter of system calls; this process is root and has no other user to become.
            When called: the sandbox could not be made, or a file's name is not one within the folder.

    >>> run = bubblewrap()
    >>> run(["python", "-c", "import os; print(os.listdir())"], b"", {"a.txt": b"1"}, Limits()).stdout
    b"['a.txt']\\n"
    """
    base = python or getattr(sys, "_base_executable", sys.executable)
    setup = _Setup(
        _found("bwrap", "bubblewrap"),
        _found("prlimit", "util-linux"),
        _found("setpriv", "util-linux"),
        os.path.realpath(base),
        tuple(os.path.realpath(each) for each in paths),
        tuple({**_ENVIRONMENT, **(environment or {})}.items()),
    )
    for each in (setup.python, *setup.paths):
        if not Path(each).exists():
            raise EnvError(f"bubblewrap: there is no {each}; give paths that exist on every machine that runs programs")
    seccomp_filter()
    if os.geteuid() == _ROOT:
        _another_user()
    return partial(_sandboxed, setup)


def _found(program: str, package: str) -> str:
    path = shutil.which(program) or shutil.which(program, path="/usr/bin:/bin:/usr/sbin:/sbin")
    if path is None:
        raise EnvError(
            f"bubblewrap: there is no {program} on PATH; install it (apt-get install {package}, dnf install {package}, "
            f"apk add {package}), or give another sandbox"
        )
    return os.path.realpath(path)


def _another_user() -> int:
    """The number of a user that nobody else is, so that the kernel counts the processes of one sandbox alone.

    The kernel does not limit the processes of root. Code that ran as root would also own what is mapped to root.
    """
    try:
        last = Path("/proc/self/uid_map").read_text().splitlines()[-1].split()
        first, count = int(last[0]), int(last[2])
    except (OSError, IndexError, ValueError):
        first, count = 0, 1
    if count < 1 << 10:
        raise EnvError(
            "bubblewrap: this process is root, and its user namespace has no other users, so programs would run as "
            "root, whose processes the kernel does not limit; run it as another user, or map more users into its "
            "container (newuidmap)"
        )
    most = min(first + count, 1 << 31) - 2
    taken = _NOBODY
    while taken == _NOBODY:
        taken = random.SystemRandom().randrange(first + (most - first) // 2, most)
    return taken


def _sandboxed(
    setup: _Setup, command: Sequence[str], stdin: bytes | Dialogue, files: Mapping[str, bytes], limits: Limits
) -> Finished:
    for name in files:
        if not name or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\0" in name:
            raise EnvError(f"bubblewrap: {name!r} is no file of the work folder; give relative names without '..'")
    with ExitStack() as stack:

        def holding(data: bytes) -> int:
            fd = os.memfd_create("nrl", os.MFD_CLOEXEC)
            stack.callback(os.close, fd)
            with open(fd, "wb", closefd=False) as file:
                file.write(data)
            os.lseek(fd, 0, os.SEEK_SET)
            return fd

        given = {name: holding(data) for name, data in files.items()}
        filtering = holding(seccomp_filter())
        reading, writing = os.pipe()
        words = [*_namespaces(limits), *_files(setup, given, limits)]
        for name, value in setup.environment:
            words += ["--setenv", name, value]
        words += ["--seccomp", str(filtering), "--json-status-fd", str(writing)]
        arguments = holding(b"".join(word.encode() + b"\0" for word in words))
        line = [setup.bwrap, "--args", str(arguments), "--", *_confined(setup, limits), *command]
        return run(line, [*given.values(), filtering, arguments], (reading, writing), stdin, limits)


def _namespaces(limits: Limits) -> list[str]:
    words = [
        *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        *("--hostname", "sandbox", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
    ]
    if os.geteuid() == _ROOT:  # mounts what only root can read the way to, and then becomes another user
        return [*words, "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    return [*words, "--unshare-user", "--uid", str(_NOBODY), "--gid", str(_NOBODY)]


def _files(setup: _Setup, given: Mapping[str, int], limits: Limits) -> Iterator[str]:
    library = str(Path(setup.python).parent.parent / "lib")
    shown = [setup.python, setup.prlimit, setup.setpriv, *setup.paths]
    above = {str(parent) for each in (*_SYSTEM, library, *shown) for parent in Path(each).parents} - {"/"}
    for each in sorted({*above, "/etc", "/bin"}):  # bwrap would let root alone enter them
        if each not in _SYSTEM:
            yield from ("--perms", "0755", "--dir", each)
    for each in _SYSTEM:
        if Path(each).is_symlink():
            yield from ("--symlink", str(Path(each).readlink()), each)
        else:
            yield from ("--ro-bind-try", each, each)
    yield from ("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache")
    if library not in _SYSTEM:
        yield from ("--ro-bind-try", library, library)
    for each in shown:
        yield from ("--ro-bind", each, each)
    for name in ("python", "python3"):
        yield from ("--symlink", setup.python, f"/bin/{name}")
    yield from ("--proc", "/proc")
    # Its first process, bwrap's own, has no limits yet; where it is of the same user, its memory could be written
    yield from ("--perms", "0000", "--size", "4096", "--tmpfs", "/proc/1", "--remount-ro", "/proc/1")
    yield from ("--dev", "/dev")
    for each in ("/dev/shm", "/sandbox"):
        yield from ("--perms", "1777", "--size", str(limits.disk), "--tmpfs", each)
    folders = {str(parent) for name in given for parent in PurePosixPath(name).parents} - {"."}
    for each in sorted(folders):
        yield from ("--perms", "0777", "--dir", f"/sandbox/{each}")
    for name, fd in given.items():
        yield from ("--perms", "0666", "--file", str(fd), f"/sandbox/{name}")
    if "/tmp" not in above:
        yield from ("--symlink", "sandbox", "/tmp")
    yield from ("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/sandbox")


def _confined(setup: _Setup, limits: Limits) -> list[str]:
    """What becomes the program: it gives rights up and limits itself, within the namespaces."""
    seconds = math.ceil(limits.cpu_seconds) + 1  # of each process, should nobody watch
    words = []
    if os.geteuid() == _ROOT:
        user = str(_another_user())
        words = [setup.setpriv, "--reuid", user, "--regid", user, "--clear-groups", "--inh-caps=-all", "--"]
    wanted = {
        "nproc": (resource.RLIMIT_NPROC, limits.processes),
        "as": (resource.RLIMIT_AS, limits.memory),
        "cpu": (resource.RLIMIT_CPU, seconds),
        "fsize": (resource.RLIMIT_FSIZE, limits.disk),
        "nofile": (resource.RLIMIT_NOFILE, _OPEN_FILES),
        "core": (resource.RLIMIT_CORE, 0),
    }
    words.append(setup.prlimit)
    for name, (kind, value) in wanted.items():
        hard = resource.getrlimit(kind)[1]  # which only root could raise, within the first namespace
        words.append(f"--{name}={value if hard == resource.RLIM_INFINITY else min(value, hard)}")
    return [*words, "--"]
