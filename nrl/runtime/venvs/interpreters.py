"""Check of an interpreter for processes of a mesh."""

import subprocess

__all__ = ["check_interpreter"]

_PATIENCE = 120.0  # seconds for an interpreter to start, on slow disks, too
_LOOK = """
import importlib.metadata, importlib.util, sys
missing = [name for name in ("ray", "torch") if importlib.util.find_spec(name) is None]
if missing:
    sys.exit("it cannot import " + " and ".join(missing))
print(*sys.version_info[:2], *map(importlib.metadata.version, ("ray", "torch")))
"""


def check_interpreter(
    python: str, version: tuple[int, int], ray: str, torch: str | None = None, deadline: float = 60.0
) -> str:
    """Return why an interpreter cannot run a process of a mesh; empty if no reason was found.

    Where an interpreter ends at once, Ray starts it again and again, and says nothing. Importing torch here would
    double the time in which a mesh starts, so this only looks whether ray and torch can be found. A process that starts
    reports by itself what it cannot import.

    Args:
        python: the path of the interpreter.
        version: the driver's major and minor version of Python, which has to be the interpreter's.
        ray: the driver's version of Ray, likewise.
        torch: the driver's version of torch, likewise; None: another may do.
        deadline: seconds for the answer.

    >>> import sys
    >>> check_interpreter("/nowhere/python", sys.version_info[:2], "2.60.0")
    'it cannot be started: No such file or directory'
    """
    try:
        run = subprocess.run(
            [python, "-c", _LOOK], capture_output=True, text=True, errors="replace", timeout=min(deadline, _PATIENCE)
        )
    except OSError as error:
        return f"it cannot be started: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"it did nothing for {min(deadline, _PATIENCE):g} s"
    if run.returncode:
        wrote = "".join(run.stderr.splitlines(keepends=True)[-10:]).strip()
        if wrote.startswith("it cannot import"):
            return wrote
        return f"it ended with exit code {run.returncode}" + (f" and wrote: {wrote}" if wrote else "")
    versions = run.stdout.split()[-4:]
    if versions[:2] != [str(part) for part in version]:
        return f"it is Python {'.'.join(versions[:2])}, and the driver Python {'.'.join(map(str, version))}"
    if versions[2] != ray:
        return f"it has Ray {versions[2]}, and the driver Ray {ray}"
    return "" if torch in (None, versions[3]) else f"it has torch {versions[3]}, and the driver torch {torch}"
