"""Why a program stopped, and what its exit status says of that.

- 0: it has done its steps.
- 1: a bug. Its traceback is shown.
- 2: a mistake, which is an error of nrl's, or of the system's about a file. It is told here, in a few lines that say
  what to do. A lost process of a mesh is one of these, unless `nrl.runs.retries` begins again.
- 130: Ctrl-C.
- 143: SIGTERM, which `nrl.runtime.preemption` catches; `Run.steps` and `Run.save` heed it.
"""

import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from nrl import config
from nrl.errors import NrlError
from nrl.log import redact

__all__ = ["exit_status", "launch"]

_MISTAKE, _INTERRUPTED = 2, 130  # exit statuses; Python's own is 1, for a bug
_LIBRARIES = (str(Path(__file__).parents[1]), *(sysconfig.get_path(each) for each in ("stdlib", "purelib", "platlib")))


def launch[C](program: Callable[[C], object], cls: type[C], args: Sequence[str] | None = None) -> None:
    """Run a program from the command line: load its configuration, call it, and say in short what could not be done.

    It is the last line of a script: ``nrl.launch(nrl.retrying(main), Config)``. An error of nrl's, or of the system's
    about a file, is told on stderr in a few lines, in colour on a terminal, and the exit status is 2; Ctrl-C is one
    line and 130. ``NRL_TRACEBACK=1`` shows the traceback as well. Whatever else is raised is a bug, and ends the
    program with its traceback, as it does without this.

    Args:
        program: ``(cfg) -> anything``.
        cls: the attrs class of its configuration, which `nrl.config.load` makes.
        args: what `nrl.config.load` takes; None: the program's own arguments.

    Raises:
        SystemExit: something could not be done.

    >>> import attrs
    >>> @attrs.frozen
    ... class Config:
    ...     steps: int = 3
    >>> launch(print, Config, ["steps=5"])
    Config(steps=5)
    >>> launch(print, Config, ["stps=5"])
    Traceback (most recent call last):
    SystemExit: 2
    """

    def loaded() -> None:
        program(config.load(cls, args))

    if status := exit_status(loaded, Path(sys.argv[0]).name):
        raise SystemExit(status)


def exit_status(program: Callable[[], int | None], name: str) -> int:
    """Call a program, and tell a mistake on stderr.

    Args:
        program: to be called.
        name: of the program, which the line begins with.

    Returns:
        The exit status: what the program returns, None is 0; 2, or 130 after Ctrl-C, where something was told.

    >>> told(lambda: None, "example")
    0
    """
    try:
        return program() or 0
    except (Exception, KeyboardInterrupt) as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        said = ["interrupted"] if interrupted else _said(error)
        if said is None:
            raise
        if os.environ.get("NRL_TRACEBACK", "0") not in ("", "0"):
            traceback.print_exc()
        elif not interrupted and (place := _place(error.__traceback__)):
            said.append(f"  at {place}; NRL_TRACEBACK=1 shows the traceback")
        sys.stdout.flush()
        print(_coloured(name, redact("\n".join(said))), file=sys.stderr, flush=True)
        return _INTERRUPTED if interrupted else _MISTAKE


def _said(error: BaseException) -> list[str] | None:
    """The lines of a mistake; None: it is a bug, or nobody knows."""
    if isinstance(error, ExceptionGroup):
        each = [_said(one) for one in error.exceptions]
        lines = [line for some in each for line in some or ()]
        return list(dict.fromkeys(lines)) if all(each) else None
    of_a_file = isinstance(error, OSError) and error.errno is not None
    if not isinstance(error, NrlError) and (not of_a_file or isinstance(error, ConnectionError | TimeoutError)):
        return None
    notes = [note.splitlines()[0].rstrip(":") for note in getattr(error, "__notes__", ()) if note]  # then, a traceback
    return [*(str(error).splitlines() or [type(error).__name__]), *(f"  {note}" for note in notes)]


def _place(trace: TracebackType | None) -> str:
    """The last line that is the user's own; empty: there is none."""
    others = (*(f"{folder}{os.sep}" for folder in _LIBRARIES), "<")
    frames = [each for each in traceback.extract_tb(trace) if not each.filename.startswith(others)]
    if not frames:
        return ""
    path = Path(frames[-1].filename)
    here = path.is_relative_to(Path.cwd())
    return f"{path.relative_to(Path.cwd()) if here else path}, line {frames[-1].lineno}, in {frames[-1].name}"


def _coloured(name: str, text: str) -> str:
    terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")
    return f"\x1b[1;31m{name}:\x1b[0m {text}" if terminal else f"{name}: {text}"
