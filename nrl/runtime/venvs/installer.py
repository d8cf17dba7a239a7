"""Run uv and report its progress; uv ends with the process that runs it."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["PROGRESS_SECONDS", "find_uv", "make_error", "run_uv"]

PROGRESS_SECONDS = 15.0
"""Seconds between two lines of progress."""

_BOUND = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
os.execvp(sys.argv[1], sys.argv[1:])
"""


def run_uv(
    arguments: Sequence[str],
    *,
    cwd: Path,
    until: float | None = None,
    say: Callable[[str], None] | None = None,
    purpose: str = "uv",
    settings: Mapping[str, str] | None = None,
    stdin: str | None = None,
) -> str:
    """Run uv and return its output.

    Args:
        arguments: of uv.
        cwd: the folder that it runs in.
        until: the monotonic time at which it is killed; None: half an hour from now.
        say: gets a line of progress now and then.
        purpose: names the purpose at the beginning of messages.
        settings: environment variables, for those that have no value yet.
        stdin: its input.

    Raises:
        ExecutableError: it fails, or there is no uv. (RuntimeError on a node without nrl.)
        DeadlineExceeded: it was killed. (TimeoutError on a node without nrl.)
    """
    # Without variables of another environment: uv would act on that, or its packages would hide the new ones
    ignored = {"VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "PYTHONHOME", "UV_PROJECT_ENVIRONMENT", "UV_PYTHON"}
    ignored |= {"UV_FROZEN", "UV_LOCKED"}  # not beside the options
    variables = {key: value for key, value in os.environ.items() if key not in ignored}
    variables = {**(settings or {}), **variables, "NO_COLOR": "1", "UV_NO_PROGRESS": "1"}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err, tempfile.TemporaryFile("w+") as inp:
        inp.write(stdin or "")
        inp.seek(0)
        # The process that becomes uv first asks Linux to end it together with this one, so that no orphan builds on
        command = [sys.executable, "-IS", "-c", _BOUND, *find_uv(), *arguments]
        process = subprocess.Popen(command, cwd=cwd, env=variables, stdin=inp, stdout=out, stderr=err)
        started = time.monotonic()
        until = started + 1800.0 if until is None else until
        try:
            while process.poll() is None:
                remaining = min(PROGRESS_SECONDS, until - time.monotonic())
                if remaining <= 0:
                    raise make_error(
                        f"{purpose}: `uv {' '.join(arguments[:2])}` was ended, because the time for it is over; its "
                        f"last lines:\n{_last_lines(err)}",
                        late=True,
                    )
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(remaining)
                if process.returncode is None and say is not None and time.monotonic() - started > PROGRESS_SECONDS - 1:
                    last = _last_lines(err, 1).strip()
                    say(f"{purpose}: {time.monotonic() - started:.0f} s so far" + (f" ({last})" if last else ""))
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode:
            raise make_error(f"{purpose}: `uv {' '.join(arguments[:2])}` fails; its last lines:\n{_last_lines(err)}")
        out.seek(0)
        return out.read()


def find_uv() -> list[str]:
    """Find a command that runs uv.

    Raises:
        ExecutableError: there is none. (RuntimeError on a node without nrl.)
    """
    candidates = []
    with contextlib.suppress(ImportError, FileNotFoundError):
        from uv import find_uv_bin

        candidates.append([find_uv_bin()])
    if path := shutil.which("uv"):
        candidates.append([path])
    candidates.append([sys.executable, "-m", "uv"])
    for command in candidates:  # the one on PATH may be a shim that refuses to run
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if subprocess.run([*command, "--version"], capture_output=True, timeout=60).returncode == 0:
                return command
    raise make_error(
        f"uv: none that runs on node {socket.gethostname()}: not the package of {sys.executable}, none on PATH; "
        "install it there with `python -m pip install uv`"
    )


def _last_lines(file: Any, count: int = 15) -> str:
    written = os.pread(file.fileno(), 1 << 20, max(0, os.fstat(file.fileno()).st_size - (1 << 20)))  # uv's place stays
    lines = [f"    {line.rstrip()}" for line in written.decode(errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-count:])


def make_error(message: str, late: bool = False) -> Exception:
    """Make an `ExecutableError`, or `DeadlineExceeded` if ``late``; without nrl, the nearest built-in error."""
    try:
        from nrl.errors import DeadlineExceeded, ExecutableError
    except ImportError:
        return (TimeoutError if late else RuntimeError)(message)
    return (DeadlineExceeded if late else ExecutableError)(message)
