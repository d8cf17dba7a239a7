"""Tasks on nodes other than the driver's: checking an interpreter, reading the ends of logs.

A node's default Python need not have nrl, so this module is also shipped by value: it imports the standard library
alone.
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["by_value", "fault", "tail"]

_PATIENCE = 120.0  # seconds in which an interpreter starts, wherever its files are
_LOOK = """
import importlib.metadata, importlib.util, sys
missing = [name for name in ("ray", "torch") if importlib.util.find_spec(name) is None]
if missing:
    sys.exit("it cannot import " + " and ".join(missing))
print(*sys.version_info[:2], importlib.metadata.version("ray"))
"""


def fault(python: str, version: tuple[int, int], ray: str, deadline: float = 60.0) -> str:
    """Why an interpreter cannot run a process of a mesh; empty if nothing speaks against it.

    Ray starts an interpreter that ends at once again and again, and says nothing. To import all of torch here would
    double the time that a mesh takes to start, so only what that would begin with is looked for. What a process that
    Ray could start cannot import, it says itself.

    Args:
        python: its path.
        version: the major and minor version of the driver's Python, which it has to share.
        ray: the version of the driver's Ray, likewise.
        deadline: seconds that it may take.

    >>> import sys
    >>> fault("/nowhere/python", sys.version_info[:2], "2.60.0")
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
    found = run.stdout.split()[-3:]
    if found[:2] != [str(part) for part in version]:
        return f"it is Python {'.'.join(found[:2])}, and the driver Python {'.'.join(map(str, version))}"
    return "" if found[2] == ray else f"it has Ray {found[2]}, and the driver Ray {ray}"


def tail(files: Sequence[str], most: int) -> str:
    """The last lines of some files, without the marks that Ray makes in them.

    >>> tail(["/nowhere.log"], 3)
    ''
    """
    lines: list[str] = []
    for path in files:
        try:
            text = Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        lines += [line for line in text.splitlines(keepends=True) if not line.startswith(":")][-most:]
    return "".join(lines[-most:])


def by_value[F: Callable[..., object]](fn: F) -> F:
    """The same function; Ray sends it, and its module, as they are instead of by name.

    >>> by_value(tail) is tail
    True
    """
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[fn.__module__])
    return fn
