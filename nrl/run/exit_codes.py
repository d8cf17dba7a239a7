"""Exit statuses of a program, and the lines that it prints for a mistake.

- 0: it has done its steps.
- 1: a bug. Its traceback is shown.
- 2: a mistake: an error of nrl's, or one of the system's about a file. A few lines say what to do. A lost process of a
  mesh is one of these, unless `nrl.run.retries` begins again.
- 130: Ctrl-C.
- 143: SIGTERM, which `nrl.runtime.preemption` catches; `Run.steps` and `Run.save` heed it.
"""

import errno
import os
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from nrl.arguments import checked
from nrl.errors import NrlError
from nrl.files import free_room
from nrl.flags import flag
from nrl.log import printable, redact

__all__ = ["exit_status", "launch"]

_MISTAKE, _INTERRUPTED = 2, 130  # exit statuses; Python's own is 1, for a bug
_HOMELESS = "Could not determine home directory."  # pathlib's words
# Prefixes of files that are not the user's.
_NOBODYS = str(Path(__file__).parents[1]), sysconfig.get_path("scripts"), "<"
_LIBRARIES = (
    str(Path(__file__).parents[1]),
    *(sysconfig.get_path(scheme) for scheme in ("stdlib", "purelib", "platlib")),
)


@checked("launch")
def launch[C](program: Callable[[C], object], cls: type[C], args: Sequence[str] | None = None) -> None:
    """Run a program from the command line: load its configuration, call it, and print mistakes in a few lines.

    It is the last line of a script: ``nrl.launch(nrl.retrying(main), Config)``. An error of nrl's, or one of the
    system's about a file, becomes a few lines on stderr, in colour on a terminal, and exit status 2; Ctrl-C becomes one
    line and 130. ``NRL_TRACEBACK=1`` shows the traceback as well. All other errors are bugs, and end the program with
    their traceback, as without this.

    Args:
        program: ``(cfg) -> anything``.
        cls: the attrs class of its configuration, which `nrl.config.load` makes.
        args: for `nrl.config.load`; None: the program's own arguments.

    Raises:
        SystemExit: there was a mistake, or Ctrl-C.

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
    from nrl import config  # a command without a configuration needs none

    def run_program() -> None:
        program(config.load(cls, args))

    if status := exit_status(run_program, Path(sys.argv[0]).name):
        raise SystemExit(status)


def exit_status(program: Callable[[], int | None], name: str) -> int:
    """Call a program, print a mistake on stderr, and return the exit status.

    Meanwhile a warning that no line of the user's is to blame for is one line, too, without the place in the command.

    Args:
        program: to be called.
        name: of the program; the printed lines begin with it.

    Returns:
        The program's own status (None is 0); 2 after a mistake, 130 after Ctrl-C.
    """
    verbose = False
    try:
        verbose = flag("NRL_TRACEBACK")
        with _name_warnings(name):
            return program() or 0
    except (Exception, KeyboardInterrupt) as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        lines = ["interrupted"] if interrupted else _lines_of(error)
        if lines is None:
            raise
        if verbose:
            traceback.print_exc()
        elif not interrupted and (line := _find_user_line(error.__traceback__)):
            lines.append(f"  at {line}; NRL_TRACEBACK=1 shows the traceback")
        sys.stdout.flush()
        print(_add_color(name, printable(redact("\n".join(lines)))), file=sys.stderr, flush=True)
        return _INTERRUPTED if interrupted else _MISTAKE


@contextmanager
def _name_warnings(name: str) -> Iterator[None]:
    before = warnings.formatwarning

    def format_warning(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if filename.startswith(_NOBODYS):
            return f"{name}: {category.__name__}: {printable(redact(str(message)))}\n"
        return before(message, category, filename, lineno, line)

    warnings.formatwarning = format_warning
    try:
        yield
    finally:
        warnings.formatwarning = before


def _lines_of(error: BaseException) -> list[str] | None:
    """Return the lines to print for a mistake; None: the error is a bug."""
    if isinstance(error, ExceptionGroup):
        parts = [_lines_of(inner) for inner in error.exceptions]
        lines = [line for part in parts for line in part or ()]
        return list(dict.fromkeys(lines)) if all(parts) else None
    if isinstance(error, RuntimeError) and str(error) == _HOMELESS:
        return [f"user {os.getuid()} has no home folder, and HOME is not set; set HOME to a folder that it can write"]
    of_a_file = isinstance(error, OSError) and error.errno is not None
    if not isinstance(error, NrlError) and (not of_a_file or isinstance(error, ConnectionError | TimeoutError)):
        return None
    notes = [note.splitlines()[0].rstrip(":") for note in getattr(error, "__notes__", ()) if note]  # then, a traceback
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and isinstance(error.filename, str):
        notes.append(free_room(Path(error.filename)))
    return [*(str(error).splitlines() or [type(error).__name__]), *(f"  {note}" for note in notes)]


def _find_user_line(trace: TracebackType | None) -> str:
    """Return the last line of the user's own code; empty: there is none."""
    foreign = (*(f"{folder}{os.sep}" for folder in _LIBRARIES), "<")
    frames = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(foreign)]
    if not frames:
        return ""
    path = Path(frames[-1].filename)
    in_cwd = path.is_relative_to(Path.cwd())
    return f"{path.relative_to(Path.cwd()) if in_cwd else path}, line {frames[-1].lineno}, in {frames[-1].name}"


def _add_color(name: str, text: str) -> str:
    terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")
    return f"\x1b[1;31m{name}:\x1b[0m {text}" if terminal else f"{name}: {text}"
