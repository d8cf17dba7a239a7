"""The ``nrl`` command."""

import argparse
import sys
from collections.abc import Sequence

from nrl.errors import NrlError
from nrl.report import report

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; ``nrl report OUT`` writes a run's report.

    Args:
        argv: the arguments; None: the program's own.

    Returns:
        The exit status: 0, or 2 where something could not be done, which one line on stderr tells.

    >>> main(["report", "/nowhere"])
    2
    """
    parser = argparse.ArgumentParser(prog="nrl", description="A composable functional library for LLM post-training.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("report", help="write OUT/report.html, one page that shows the run")
    command.add_argument("out", metavar="OUT", help="the run's folder")
    command.set_defaults(do=lambda given: print(report(given.out)))
    given = parser.parse_args(argv)
    try:
        given.do(given)
    except (NrlError, OSError) as error:
        print(f"nrl: {error}", file=sys.stderr)
        return 2
    return 0
